//! Runs a block: one fiber a CUDA thread, all on the calling OS thread.

use std::cell::RefCell;
use std::vec::Vec;

use corosensei::stack::{DefaultStack, Stack};
use corosensei::{Coroutine, Yielder};

use super::block::Run;
use super::calls::{Entered, resume_as};
use super::kernels::HostKernel;

unsafe extern "C" {
    /// Tells cuda/host.cc which stack is the running fiber's.
    safe fn emu_stack(low: usize, bytes: usize);
}

/// Bytes of a fiber's stack, with a guard page below.
const STACK: usize = 64 * 1024;

std::thread_local! {
    /// Stacks that no fiber uses.
    static STACKS: RefCell<Vec<DefaultStack>> = const { RefCell::new(Vec::new()) };
}

/// Runs one block to its end, or to its first fault (in `run.found`).
///
/// # Errors
/// Where the system has no memory for stacks.
pub(super) fn run_block(
    run: &mut Run<'_>,
    kernel: &'static HostKernel,
    args: &mut [u64],
    block: u32,
) -> std::io::Result<()> {
    let mut params: Vec<*mut u64> = args.iter_mut().map(|a| a as *mut u64).collect();
    let threads = run.call.threads() as usize;
    let mut stacks = Vec::new();
    for _ in 0..threads {
        let kept = STACKS.with_borrow_mut(Vec::pop);
        stacks.push(match kept {
            Some(stack) => stack,
            None => DefaultStack::new(STACK)?,
        });
    }
    let bounds: Vec<(usize, usize)> = stacks
        .iter()
        .map(|s| (s.limit().get(), s.base().get()))
        .collect();
    run.start(block, bounds.iter().copied());
    let params = params.as_mut_ptr() as usize;
    let mut fibers: Vec<_> = stacks
        .into_iter()
        .map(|stack| {
            Coroutine::with_stack(stack, move |fiber: &Yielder<(), ()>, ()| {
                resume_as(fiber);
                // SAFETY: `params` points to as many arguments, of as many bytes, as the kernel
                // takes (Call::check), and they outlive the fibers.
                unsafe { (kernel.call)(params as *mut *mut u64) };
            })
        })
        .collect();
    let run: *mut Run<'_> = run;
    let entered = Entered::new(run);
    // SAFETY: `run` is the unique borrow of the caller; no reference made here lives across
    // `resume`, in which the kernel's calls make theirs.
    while let Some(thread) = unsafe { (*run).pick() } {
        let (low, high) = bounds[thread];
        emu_stack(low, high - low);
        let done = fibers[thread].resume(()).as_return().is_some();
        // SAFETY: as above; nothing is resumed while this borrow lives.
        let run = unsafe { &mut *run };
        if run.found.is_some() {
            break;
        }
        if done {
            run.finish_thread();
        }
    }
    emu_stack(0, 0);
    drop(entered);
    for mut fiber in fibers {
        if fiber.started() && !fiber.done() {
            // SAFETY: the frames that are left behind are a kernel's, which own nothing, and those
            // of calls.rs, which own nothing when they pause.
            unsafe { fiber.force_reset() };
        }
        if fiber.done() {
            let stack = fiber.into_stack();
            STACKS.with_borrow_mut(|stacks| stacks.push(stack));
        }
    }
    Ok(())
}
