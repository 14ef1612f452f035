//! Links every library of the collection without std.
#![no_std]

use core::alloc::{GlobalAlloc, Layout};
use core::panic::PanicInfo;

use quintet_collectives::cost::Model;
use quintet_collectives::plan::Operation;
use quintet_collectives::{Degrees, DeviceMesh, Order};
use quintet_kernels::{Float, Meter, Tag};
use quintet_parallel_layers::philox::Stream;
use quintet_planner::Layout as Parallel;
use quintet_zero as _;

struct Nothing;

// SAFETY: it never hands out memory.
unsafe impl GlobalAlloc for Nothing {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        core::ptr::null_mut()
    }
    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[global_allocator]
static ALLOCATOR: Nothing = Nothing;

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    loop {}
}

/// Something of each library, so that all are linked.
#[unsafe(no_mangle)]
pub extern "C" fn quintet_leaf(rank: usize) -> f64 {
    let mesh = DeviceMesh::new(Degrees { tp: 2, ..Degrees::default() });
    let world = mesh.map_or(0, |m| m.world());
    let meter = Meter::default();
    meter.add(Tag::Param, rank);
    let layout = Parallel::single();
    Stream::new(1, "leaf").normal(rank as u64) + f64::from_f64(world as f64)
        + meter.now(Tag::Param) as f64
        + layout.world() as f64
        + Model::default().choose_even(Operation::AllReduce, rank, 8, Order::Any).name().len() as f64
}
