//! Ranks of one process that share a GPU.

use half::bf16;
use quintet_collectives::ReduceOp;
use quintet_collectives::transport::local::World;
use quintet_kernels::launch::{Launch, Stream};
use quintet_kernels::wire::{Board, SameDevice};
use quintet_kernels::{Backend, Collectives, Cpu, Gpu, Queue, Scalar};

use crate::speak::{WORLD, numbers, read, speak};

/// Ranks that are threads on one device: every form of every call in every type, with the fold of several lengths,
/// and as many bytes counted as through the host.
pub fn on_one_device<L: Launch>(launcher: &L, seat: impl Fn(usize) -> (L, [Stream; 2]) + Sync) {
    let board = Board::default();
    World::run(WORLD, |comm| {
        let (home, streams) = seat(comm.rank());
        let device = Gpu::on(home, streams).unwrap();
        let shared = (launcher.clone(), board.clone());
        let near = comm.over("device", |end| SameDevice::new(end, Some(shared)))?;
        let host = comm.subgroup(&comm.group().clone(), "host")?;
        assert!(near.reaches_device() && !host.reaches_device());
        speak::<_, _, f64>(&near, &device);
        speak::<_, _, f32>(&near, &device);
        speak::<_, _, bf16>(&near, &device);
        let cpu = Cpu::new(1);
        speak::<_, _, f64>(&host, &cpu);
        speak::<_, _, f32>(&host, &cpu);
        speak::<_, _, bf16>(&host, &cpu);
        assert_eq!(near.stats().bytes, host.stats().bytes);
        // Sums of thirds: bits tell the order, and the rounding of bf16.
        for len in [1, 2, 7, 1000] {
            let x: Vec<f64> = (0..len)
                .map(|i| (i * WORLD + comm.rank()) as f64 / 3.0)
                .collect();
            let sums = |bits: [Vec<f64>; 2]| assert_eq!(bits[0], bits[1], "{len} elements");
            sums([
                all_reduced::<_, _, f32>(&near, &device, &x),
                all_reduced::<_, _, f32>(&host, &cpu, &x),
            ]);
            sums([
                all_reduced::<_, _, bf16>(&near, &device, &x),
                all_reduced::<_, _, bf16>(&host, &cpu, &x),
            ]);
        }
        // A started call whose end nobody waits for: its memory stays until the device is through.
        let buf = numbers::<_, f32>(&device, &[1.0; 64]);
        let now = device.record(Queue::Compute);
        drop(Collectives::<Gpu<L>>::start_all_reduce(
            &near,
            buf,
            ReduceOp::Sum,
            now,
        )?);
        assert_eq!(
            all_reduced::<_, _, f32>(&near, &device, &[2.0]),
            [2.0 * WORLD as f64]
        );
        Ok(())
    })
    .unwrap();
}

fn all_reduced<B: Backend, C: Collectives<B>, E: Scalar>(
    comm: &C,
    device: &B,
    x: &[f64],
) -> Vec<f64> {
    let mut buf = numbers::<B, E>(device, x);
    comm.all_reduce(B::whole_mut(&mut buf), ReduceOp::Sum)
        .unwrap();
    read::<B, E>(device, &buf)
}
