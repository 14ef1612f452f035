//! Every type and fold, in place, uneven; what is refused before NCCL hears of it; one after the other, and the barrier.

use half::{bf16, f16};
use quintet_collectives::element::Bool;
use quintet_collectives::nccl::{HostLane, explain};
use quintet_collectives::plan::{CollectiveShape as S, Operation};
use quintet_collectives::transport::local::World;
use quintet_collectives::{DType, Element, Error, Order, ReduceOp};

use crate::shim::{Told, call, call_within, library, span};
use crate::{Comm, all_well, outcomes};

fn every_fold<E: Element>(world: usize, value: impl Fn(usize, usize) -> E + Sync + Copy) {
    all_well(world, |comm| {
        let comm = comm.subgroup(comm.group(), "any")?.with_order(Order::Any);
        for redop in [
            ReduceOp::Sum,
            ReduceOp::Prod,
            ReduceOp::Min,
            ReduceOp::Max,
            ReduceOp::Avg,
        ] {
            let mine: Vec<E> = (0..9).map(|i| value(comm.rank(), i)).collect();
            let (mut host, mut device) = (mine.clone(), vec![E::zeroed(); 9]);
            comm.all_reduce(&mut host, redop)?;
            call(
                &comm,
                &library(),
                S::AllReduce { len: 9 },
                redop,
                &mine,
                &mut device,
            )?;
            assert_eq!(device, host, "{} {redop}", E::DTYPE);
        }
        Ok(())
    });
}

#[test]
fn every_type_and_fold() {
    // Small powers of two: exact in any order, also as a mean of two or four.
    let small = |rank: usize, i: usize| [1, 2, 4, 4][(rank + i) % 4];
    for world in [1, 2, 4] {
        every_fold(world, |r, i| f64::from(small(r, i)));
        every_fold(world, |r, i| small(r, i) as f32);
        every_fold(world, |r, i| bf16::from_f32(small(r, i) as f32));
        every_fold(world, |r, i| f16::from_f32(small(r, i) as f32));
        every_fold(world, |r, i| small(r, i) - 3);
        every_fold(world, |r, i| i64::from(small(r, i)) - 3);
        every_fold(world, |r, i| small(r, i) as u8);
        every_fold(world, |r, i| small(r, i) as u32);
        every_fold(world, |r, i| small(r, i) as u64);
        every_fold(world, |r, i| Bool::from((r + i) % 3 == 0));
    }
}

#[test]
fn in_place_even_and_uneven() {
    all_well(3, |comm| {
        let (me, lib) = (comm.rank(), library());
        for counts in [vec![2, 2, 2], vec![3, 0, 2]] {
            let starts: Vec<usize> = (0..3).map(|r| counts[..r].iter().sum()).collect();
            let (len, own) = (counts.iter().sum(), starts[me]..starts[me] + counts[me]);
            let mut x: Vec<i32> = (0..len).map(|i| (i * 3 + me) as i32).collect();
            call_within(
                comm,
                &lib,
                S::ReduceScatter {
                    counts: counts.clone(),
                },
                ReduceOp::Sum,
                &mut x,
                [0..len, own.clone()],
            )?;
            let folded: Vec<i32> = own.clone().map(|i| (i * 9 + 3) as i32).collect();
            assert_eq!(x[own.clone()], folded);
            call_within(
                comm,
                &lib,
                S::AllGather {
                    counts: counts.clone(),
                },
                ReduceOp::Sum,
                &mut x,
                [own, 0..len],
            )?;
            assert_eq!(x, (0..len).map(|i| (i * 9 + 3) as i32).collect::<Vec<_>>());
        }
        let mut x = [me as i64; 4];
        let whole = [0..4, 0..4];
        call_within(
            comm,
            &lib,
            S::AllReduce { len: 4 },
            ReduceOp::Max,
            &mut x,
            whole.clone(),
        )?;
        assert_eq!(x, [2; 4]);
        x = [me as i64; 4];
        call_within(
            comm,
            &lib,
            S::Broadcast { len: 4, root: 1 },
            ReduceOp::Sum,
            &mut x,
            whole.clone(),
        )?;
        assert_eq!(x, [1; 4]);
        x = [me as i64; 4];
        call_within(
            comm,
            &lib,
            S::Reduce { len: 4, root: 2 },
            ReduceOp::Sum,
            &mut x,
            whole,
        )?;
        assert_eq!(x, [if me == 2 { 3 } else { me as i64 }; 4]);
        Ok(())
    });
}

#[test]
fn lengths_types_and_overlaps_are_looked_at_before_anything_is_called() {
    all_well(2, |comm| {
        let lib = library();
        let error = call(
            comm,
            &lib,
            S::AllReduce { len: 4 },
            ReduceOp::Sum,
            &[1f32; 4],
            &mut [0f32; 3],
        )
        .unwrap_err();
        assert!(
            matches!(
                error,
                Error::Len {
                    what: "the output",
                    expected: 4,
                    got: 3,
                    ..
                }
            ),
            "{error}"
        );
        let x = [0f32; 8];
        let lane = HostLane::new(&lib)?;
        let spans = [span(&x).part(0..4), span(&x).part(2..6)];
        let error = comm
            .on_device(S::AllReduce { len: 4 }, ReduceOp::Sum, spans, lane.clone())
            .unwrap_err();
        assert!(error.to_string().contains("overlap"), "{error}");
        let spans = [span(&[0i32; 4]), span(&x).part(0..4)];
        let error = comm
            .on_device(S::AllReduce { len: 4 }, ReduceOp::Sum, spans, lane.clone())
            .unwrap_err();
        assert!(error.to_string().contains("is of i32, not f32"), "{error}");
        let error = comm
            .start_send_on_device((), span(&x), (0, 1 << 61), lane)
            .unwrap_err();
        assert!(error.to_string().contains("below 2^61"), "{error}");
        assert_eq!(comm.stats().bytes, 0);
        comm.barrier()
    });
    // A communicator over anything else says so.
    World::run(1, |comm| {
        let x = [0f32; 4];
        let lane = HostLane::new(&library())?;
        let error = comm.on_device(
            S::AllReduce { len: 4 },
            ReduceOp::Sum,
            [span(&x), span(&x)],
            lane,
        );
        assert!(error.unwrap_err().to_string().contains("reaches no device"));
        Ok(())
    })
    .unwrap();
}

#[test]
fn its_own_fold_order_is_refused_unless_asked_for() {
    all_well(3, |comm| {
        let lib = library();
        let sum = |comm: &Comm, redop| {
            // 1 + 2^-24 + 2^-24 in rank order, and anything else.
            let x = [[1.0f32, 2f32.powi(-24), 2f32.powi(-24)][comm.rank()]];
            let mut y = [0f32];
            call(comm, &lib, S::AllReduce { len: 1 }, redop, &x, &mut y).map(|()| y[0])
        };
        let error = sum(comm, ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, Error::Plan { .. }), "{error}");
        assert!(
            error
                .to_string()
                .contains("order rank: NCCL chooses how it folds"),
            "{error}"
        );
        assert_eq!(sum(comm, ReduceOp::Max)?, 1.0);
        let any = comm.subgroup(comm.group(), "any")?.with_order(Order::Any);
        // The stand-in folds from the last rank to the first, which is why it must be asked for.
        assert_eq!(sum(&any, ReduceOp::Sum)?, 1.0 + 2f32.powi(-23));
        let said = explain(
            Operation::AllReduce,
            DType::F32,
            ReduceOp::Sum,
            3,
            comm.order(),
        );
        assert!(said.refused && said.to_string().contains("ncclAllReduce"));
        comm.barrier()
    });
}

#[test]
fn started_collectives_follow_each_other_and_groups_stay_apart() {
    all_well(4, |comm| {
        let lib = library();
        let half = comm.split((comm.rank() / 2) as i64, 0)?;
        let mut pending = Vec::new();
        for round in 0..5i32 {
            for group in [comm, &half] {
                let x = vec![round + group.rank() as i32; 50];
                let at = span(&x);
                let shape = S::AllReduce { len: 50 };
                pending.push((
                    group.world(),
                    round,
                    group.start_on_device(
                        x,
                        shape,
                        ReduceOp::Sum,
                        [at, at],
                        HostLane::new(&lib)?,
                    )?,
                ));
            }
        }
        for (world, round, pending) in pending {
            let ranks: i32 = (0..world as i32).sum();
            assert_eq!(pending.wait()?, vec![world as i32 * round + ranks; 50]);
        }
        Ok(())
    });
}

#[test]
fn a_barrier_waits_for_the_lane() {
    let told = Told::new("barrier");
    told.set("late=200");
    for outcome in outcomes(2, &told.library(), |comm| {
        let lib = told.library();
        let lane = HostLane::new(&lib)?;
        let x = vec![comm.rank() as i32; 10];
        let at = span(&x);
        let pending = comm.start_on_device(
            x,
            S::AllReduce { len: 10 },
            ReduceOp::Sum,
            [at, at],
            lane.clone(),
        )?;
        let none: [u8; 0] = [];
        comm.on_device(S::Barrier, ReduceOp::Sum, [span(&none), span(&none)], lane)?;
        assert!(pending.is_done());
        pending.wait().map(drop)
    }) {
        outcome.unwrap();
    }
    assert_eq!(told.faults(), "");
}
