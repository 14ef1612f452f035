//! Every collective among ranks of one emulated device, late and in a seeded order: right, and with any one of
//! its waits left out, found.

use std::vec;
use std::vec::Vec;

use quintet_collectives::element::fold_ranks;
use quintet_collectives::plan::CollectiveShape as Shape;
use quintet_collectives::transport::device::Job;
use quintet_collectives::{Element, ReduceOp};

use super::super::near::{lane, part};
use super::board::{Board, Place, Running};
use super::steps::{Step, steps};
use crate::emulated::{Emulated, FaultKind};
use crate::launch::{Arch, Launch, Libraries};
use crate::wire::Wire;
use crate::{Backend, Error, Gpu, Queue, Tag, bf16};

/// What a collective is to do: a shape and an input of each rank, and what comes of them.
struct Case<E> {
    shapes: Vec<Shape>,
    redop: ReduceOp,
    inputs: Vec<Vec<E>>,
    outputs: Vec<Vec<E>>,
}

impl<E: Wire> Case<E> {
    /// Lengths by the shape, elements by rank and place.
    fn new(shapes: Vec<Shape>, redop: ReduceOp, element: fn(usize, usize) -> E) -> Self {
        let world = shapes.len();
        let (len, total) = (shapes[0].len(world), |counts: &[usize]| counts.iter().sum());
        let input_len = |rank: usize| match &shapes[rank] {
            Shape::AllGather { counts } | Shape::Gather { counts, .. } => counts[rank],
            Shape::AllToAllV { send, .. } => total(send),
            Shape::AllToAll { len } => len * world,
            _ => len,
        };
        let inputs: Vec<Vec<E>> = (0..world)
            .map(|r| (0..input_len(r)).map(|i| element(r, i)).collect())
            .collect();
        let range = |counts: &[usize], rank: usize| {
            let first: usize = counts[..rank].iter().sum();
            first..first + counts[rank]
        };
        let folded = |of: core::ops::Range<usize>| {
            let mut all = (&inputs, vec![E::zeroed(); of.len()]);
            fold_ranks::<E, _>(
                redop,
                world,
                of.len(),
                &mut all,
                |(inputs, _), rank, at, n| &inputs[rank][of.start + at..of.start + at + n],
                |(_, out), at, n| &mut out[at..at + n],
            );
            all.1
        };
        let output = |me: usize| match &shapes[me] {
            Shape::AllReduce { len } => folded(0..*len),
            Shape::ReduceScatter { counts } => folded(range(counts, me)),
            Shape::Reduce { len, root } if *root == me => folded(0..*len),
            Shape::AllGather { .. } => inputs.concat(),
            Shape::Gather { root, .. } if *root == me => inputs.concat(),
            Shape::Broadcast { root, .. } => inputs[*root].clone(),
            Shape::Scatter { counts, root } => inputs[*root][range(counts, me)].to_vec(),
            Shape::AllToAll { len } => {
                let its = |input: &Vec<E>| input[me * len..(me + 1) * len].to_vec();
                inputs.iter().flat_map(its).collect()
            }
            Shape::AllToAllV { .. } => {
                let its = |rank: usize| match &shapes[rank] {
                    Shape::AllToAllV { send, .. } => inputs[rank][range(send, me)].to_vec(),
                    _ => Vec::new(),
                };
                (0..world).flat_map(its).collect()
            }
            _ => Vec::new(),
        };
        let outputs = (0..world).map(output).collect();
        Self {
            shapes,
            redop,
            inputs,
            outputs,
        }
    }

    /// Performs it, step `without` of a rank left out; whether all came as it should.
    fn run(&self, seed: u64, without: Option<(usize, usize)>) -> Result<(), Error> {
        let device = Emulated::new(Arch(80), seed);
        let board = Board::<Emulated>::default();
        let world = self.shapes.len();
        let ranks: Vec<usize> = (0..world).collect();
        let groups: Vec<_> = ranks
            .iter()
            .map(|&r| board.group(r, &ranks, "all"))
            .collect();
        let mut all = Vec::new();
        for me in 0..world {
            let streams = [device.fresh_stream(), device.fresh_stream()];
            let gpu = Gpu::on(device.clone(), streams)?;
            let input = gpu.upload(Tag::Comm, &self.inputs[me])?;
            let output = gpu.alloc::<E>(Tag::Comm, self.outputs[me].len())?;
            let lane = lane(&input, (0, 0), &(0..0), gpu.record(Queue::Compute))?;
            let span = |buf| part(buf, &(0..Gpu::len(Gpu::whole(buf))));
            let (shape, redop) = (self.shapes[me].clone(), self.redop);
            let place = Place {
                me,
                world,
                number: 0,
            };
            let job = Job {
                shape,
                redop,
                input: span(&input),
                output: span(&output),
                lane: lane.clone(),
            };
            let running = Running::begin(&mut groups[me].state(), place, &job, &lane);
            all.push((gpu, input, output, lane, running, false));
        }
        for turn in 0..20 * world {
            let me = turn % world;
            let (_, _, _, lane, running, over) = &mut all[me];
            let plan = |shapes: &[&Shape], me| {
                let mut plan = steps(shapes, me);
                if let Some((_, at)) = without.filter(|(rank, _)| *rank == me) {
                    plan.remove(at);
                }
                plan
            };
            if !*over {
                *over = running.go_on(&mut groups[me].state(), lane, plan)?;
            }
        }
        assert!(all.iter().all(|rank| rank.5), "a rank waits for ever");
        // Every rank takes its result and writes over its memory at once: all waits are on the device.
        let mut results = Vec::new();
        for (gpu, input, output, lane, ..) in &mut all {
            let done = device.record(lane.stream());
            gpu.wait(Queue::Compute, &done);
            let mut result = gpu.alloc::<E>(Tag::Comm, Gpu::len(Gpu::whole(output)))?;
            gpu.copy(Gpu::whole(output), Gpu::whole_mut(&mut result))?;
            for buf in [input, output] {
                let zeros = gpu.zeros::<E>(Tag::Comm, Gpu::len(Gpu::whole(buf)))?;
                gpu.copy(Gpu::whole(&zeros), Gpu::whole_mut(buf))?;
            }
            results.push(result);
        }
        for (me, ((gpu, ..), result)) in all.iter().zip(&results).enumerate() {
            let mut got = vec![E::zeroed(); self.outputs[me].len()];
            gpu.download(Gpu::whole(result), &mut got)?;
            assert_eq!(
                got, self.outputs[me],
                "rank {me} of {:?}, seed {seed}",
                self.shapes[me]
            );
        }
        for (_, _, _, lane, ..) in &all {
            device.synchronize(lane.stream())?;
        }
        Ok(())
    }
}

fn shapes(world: usize) -> Vec<Vec<Shape>> {
    let counts: Vec<usize> = (0..world).map(|r| (r * 5 + 3) % 7).collect();
    let root = world - 1;
    let alike = |shape: Shape| vec![shape; world];
    let send = |r: usize, s: usize| (r * 3 + s * 2) % 5;
    let ragged = (0..world).map(|r| Shape::AllToAllV {
        send: (0..world).map(|s| send(r, s)).collect(),
        recv: (0..world).map(|s| send(s, r)).collect(),
    });
    vec![
        alike(Shape::AllReduce { len: 40 }),
        alike(Shape::AllReduce { len: 1 }),
        alike(Shape::ReduceScatter {
            counts: counts.clone(),
        }),
        alike(Shape::AllGather {
            counts: counts.clone(),
        }),
        alike(Shape::Broadcast { len: 9, root }),
        alike(Shape::Reduce { len: 9, root }),
        alike(Shape::Gather {
            counts: counts.clone(),
            root: 0,
        }),
        alike(Shape::Scatter { counts, root: 0 }),
        alike(Shape::AllToAll { len: 3 }),
        ragged.collect(),
    ]
}

fn third(rank: usize, i: usize) -> f32 {
    (rank * 31 + i * 7) as f32 / 3.0 - 11.0
}

#[test]
fn every_collective_gives_the_bits_of_rank_order() {
    for world in [1, 2, 3, 8, 17] {
        for shapes in shapes(world) {
            for seed in 0..2 {
                Case::<f32>::new(shapes.clone(), ReduceOp::Sum, third)
                    .run(seed, None)
                    .unwrap();
            }
        }
    }
    let all_reduce = |world| vec![Shape::AllReduce { len: 33 }; world];
    let ops = [
        ReduceOp::Sum,
        ReduceOp::Prod,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Avg,
    ];
    for redop in ops {
        let of = |r: usize, i: usize| (r * 31 + i * 7) as i64 - 40;
        Case::<i64>::new(all_reduce(3), redop, of)
            .run(1, None)
            .unwrap();
        let of = |r, i| bf16::from_f32(third(r, i));
        Case::<bf16>::new(all_reduce(5), redop, of)
            .run(2, None)
            .unwrap();
        let of = |r, i| f64::from(third(r, i));
        Case::<f64>::new(all_reduce(20), redop, of)
            .run(3, None)
            .unwrap();
    }
}

/// Takes each wait out of each plan in turn: two ranks' streams are then not ordered as they must be.
#[test]
fn a_missing_wait_is_found() {
    let mut tried = 0;
    // Where a chunk is empty one wait stands for two.
    let short = Shape::AllReduce { len: 1 };
    for shapes in shapes(3).into_iter().filter(|s| s[0] != short) {
        let case = Case::<f32>::new(shapes, ReduceOp::Sum, third);
        let refs: Vec<&Shape> = case.shapes.iter().collect();
        for me in 0..3 {
            for (at, step) in steps(&refs, me).iter().enumerate() {
                if !matches!(step, Step::After(..)) {
                    continue;
                }
                let found = case.run(4, Some((me, at)));
                let Err(Error::Fault(fault)) = found else {
                    panic!(
                        "rank {me} of {:?} without its step {at}, {step}: {found:?}",
                        refs[me]
                    );
                };
                let kinds = [
                    FaultKind::StreamRace,
                    FaultKind::Unwritten,
                    FaultKind::Freed,
                ];
                assert!(kinds.contains(&fault.kind), "{fault}");
                tried += 1;
            }
        }
    }
    assert!(tried > 60, "{tried}");
}

#[test]
fn what_is_explained_is_what_is_done() {
    let said = super::explain(
        &Shape::AllReduce { len: 1 },
        f32::DTYPE,
        ReduceOp::Sum,
        2,
        1,
    );
    assert!(
        !said.contains("  fold "),
        "nothing is this rank's to fold: {said}"
    );
    assert!(
        said.contains("after 0 folded\n  copy 0..1 of rank 0's output -> 0"),
        "{said}"
    );
    let said = super::explain(
        &Shape::AllReduce { len: 4 },
        bf16::DTYPE,
        ReduceOp::Sum,
        17,
        0,
    );
    assert!(
        said.contains("refused: bf16 of more than 16 ranks"),
        "{said}"
    );
}
