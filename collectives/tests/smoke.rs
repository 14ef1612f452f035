//! Every blocking operation once, over threads.
use quintet_collectives::{Order, ReduceOp, World};

#[test]
fn every_operation_once() {
    for world in [1usize, 2, 3, 8] {
        for order in [Order::Rank, Order::Any] {
            for len in [0usize, 1, 7, 5000] {
                World::run(world, |comm| {
                    let comm = comm.with_order(order);
                    let r = comm.rank();
                    let mut x: Vec<f32> = (0..len).map(|i| (i * (r + 1)) as f32).collect();
                    comm.all_reduce(&mut x, ReduceOp::Sum)?;
                    let s = (world * (world + 1) / 2) as f32;
                    assert!(x.iter().enumerate().all(|(i, &v)| v == i as f32 * s));
                    let mut all = vec![0i32; world * len];
                    comm.all_gather(&vec![r as i32; len], &mut all)?;
                    assert!((0..world * len).all(|i| all[i] == (i / len) as i32));
                    let mut mine = vec![0i32; len];
                    comm.reduce_scatter(&all, &mut mine, ReduceOp::Sum)?;
                    assert!(mine.iter().all(|&v| v == (r * world) as i32));
                    comm.broadcast(&mut mine, world - 1)?;
                    assert!(mine.iter().all(|&v| v == ((world - 1) * world) as i32));
                    let mut out = vec![0i32; world * len];
                    comm.all_to_all(&vec![r as i32; world * len], &mut out)?;
                    assert_eq!(out, all);
                    comm.barrier()?;
                    let p =
                        comm.start_all_reduce::<f32, _>(vec![1.0f32; len], ReduceOp::Avg, ())?;
                    let q = comm.start_all_reduce::<f32, _>(
                        vec![1.0f32; len],
                        ReduceOp::Sum,
                        p.done(),
                    )?;
                    comm.barrier()?;
                    assert_eq!(p.wait()?, vec![1.0f32; len]);
                    assert_eq!(q.wait()?, vec![world as f32; len]);
                    let half = comm.split((r % 2) as i64, 0)?;
                    half.barrier()?;
                    let mut got = vec![0u8; 3];
                    comm.sendrecv(
                        &[r as u8; 3],
                        (r + 1) % world,
                        &mut got,
                        (r + world - 1) % world,
                        5,
                    )?;
                    assert_eq!(got, [((r + world - 1) % world) as u8; 3]);
                    Ok(())
                })
                .unwrap();
            }
        }
    }
}
