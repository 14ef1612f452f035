//! How fast a communicator is, in the terms of nccl-tests (`std`).
//!
//! ```text
//! per size:   warm up -> check every element once -> n x (barrier, clock, call, clock)
//!             p50 and p99 of a rank's times, then the greatest over ranks
//! size        bytes of the longer of a rank's two buffers
//! algbw       size / time
//! busbw       algbw x what of the size a rank's link must carry: 2(n-1)/n for all_reduce, ...
//! ```
//!
//! Bandwidths follow nccl-tests' PERFORMANCE.md; GB is 1e9 bytes.

use std::{
    string::{String, ToString},
    time::{Duration, Instant},
    vec,
    vec::Vec,
};

mod buffers;

pub use buffers::{Buffers, Memory, Slices};

use crate::{
    Communicator, DType, Error, ReduceOp, Result, Transport,
    cost::{Constants, Curve, Piece},
    element::fold,
    plan::{CollectiveShape, Operation},
};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bench {
    /// The operation.
    pub op: Operation,
    /// Calls that are timed, at least one.
    pub iters: usize,
    /// Calls before them.
    pub warmup: usize,
    /// Whether each result is compared once, element by element.
    pub check: bool,
}

/// One size.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Bytes of the longer of a rank's two buffers, as they came out of the size that was asked for.
    pub bytes: usize,
    /// Elements of f32 in it.
    pub len: usize,
    /// Input and output apart.
    pub apart: Timing,
    /// One buffer, where the operation has such a form.
    pub in_place: Option<Timing>,
    /// The plan that was performed.
    pub algorithm: String,
    /// Its time by the communicator's model, where that has chosen it.
    pub predicted: Option<Duration>,
}

/// What came out for one form of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// The greatest over ranks of the medians.
    pub p50: Duration,
    /// The greatest over ranks of the 99th percentiles.
    pub p99: Duration,
    /// Elements that were not what they should be, over all ranks; `None` where nothing was compared.
    pub wrong: Option<u64>,
}

/// The operations that can be measured.
pub const OPERATIONS: [Operation; 8] = [
    Operation::AllReduce,
    Operation::ReduceScatter,
    Operation::AllGather,
    Operation::Broadcast,
    Operation::Reduce,
    Operation::Gather,
    Operation::Scatter,
    Operation::AllToAll,
];

/// Bytes a second of `size` bytes in `time`, in units of 1e9.
#[must_use]
pub fn algbw(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64().max(1e-12) / 1e9
}

/// The same, times the share of the size that a rank's link carries at least.
#[must_use]
pub fn busbw(op: Operation, bytes: usize, world: usize, time: Duration) -> f64 {
    let n = world.max(1) as f64;
    let share = match op {
        Operation::AllReduce => 2.0 * (n - 1.0) / n,
        Operation::Broadcast | Operation::Reduce => 1.0,
        _ => (n - 1.0) / n,
    };
    algbw(bytes, time) * share
}

impl Bench {
    /// Measures calls of about `bytes` on slices; every rank calls it alike and gets the same row.
    ///
    /// # Errors
    /// [`Error::Layout`] for an operation that is not one of [`OPERATIONS`]; else those of the operation.
    pub fn measure<T: Transport + Send + 'static>(
        &self,
        comm: &Communicator<T>,
        bytes: usize,
    ) -> Result<Row> {
        self.measure_in(comm, bytes, &mut Slices)
    }

    /// The same of calls on elements that lie elsewhere.
    ///
    /// # Errors
    /// Those of [`Bench::measure`] and of the memory.
    pub fn measure_in<T: Transport + Send + 'static>(
        &self,
        comm: &Communicator<T>,
        bytes: usize,
        memory: &mut dyn Memory<T>,
    ) -> Result<Row> {
        let world = comm.world();
        let part = match self.op {
            Operation::AllReduce | Operation::Broadcast | Operation::Reduce => bytes / 4,
            _ => bytes / 4 / world,
        };
        let shape = self.shape(part, world)?;
        let len = shape.len(world);
        let (algorithm, predicted) = match memory.chooses() {
            Some(library) => (String::from(library), None),
            None => {
                let explained = comm
                    .model()
                    .explain(&shape, world, DType::F32, comm.order())?;
                match explained.chosen() {
                    Some((spec, seconds)) => (spec.algorithm.to_string(), Some(seconds)),
                    None => (String::from("-"), None),
                }
            }
        };
        let mut form = |in_place| {
            let mut buffers = Buffers::new(&shape, world, comm.rank(), in_place);
            self.form(comm, &mut buffers, memory)
        };
        let apart = form(false)?;
        let in_place = match self.op {
            Operation::AllReduce | Operation::ReduceScatter | Operation::AllGather => {
                Some(form(true)?)
            }
            _ => None,
        };
        Ok(Row {
            bytes: len * 4,
            len,
            apart,
            in_place,
            algorithm,
            predicted: predicted.map(|seconds| Duration::from_secs_f64(seconds.clamp(0.0, 1e6))),
        })
    }

    fn shape(&self, part: usize, world: usize) -> Result<CollectiveShape> {
        let counts = vec![part; world];
        Ok(match self.op {
            Operation::AllReduce => CollectiveShape::AllReduce { len: part },
            Operation::ReduceScatter => CollectiveShape::ReduceScatter { counts },
            Operation::AllGather => CollectiveShape::AllGather { counts },
            Operation::Broadcast => CollectiveShape::Broadcast { len: part, root: 0 },
            Operation::Reduce => CollectiveShape::Reduce { len: part, root: 0 },
            Operation::Gather => CollectiveShape::Gather { counts, root: 0 },
            Operation::Scatter => CollectiveShape::Scatter { counts, root: 0 },
            Operation::AllToAll => CollectiveShape::AllToAll { len: part },
            other => {
                return Err(Error::Layout(std::format!("{other} is not measured")));
            }
        })
    }

    fn form<T: Transport + Send + 'static>(
        &self,
        comm: &Communicator<T>,
        buffers: &mut Buffers,
        memory: &mut dyn Memory<T>,
    ) -> Result<Timing> {
        let mut wrong = None;
        memory.write(buffers)?;
        if self.check {
            memory.call(comm, buffers)?;
            memory.read(buffers)?;
            let mut count = [buffers.wrong() as i64];
            comm.all_reduce(&mut count, ReduceOp::Sum)?;
            wrong = Some(count[0] as u64);
        }
        let mut times = Vec::with_capacity(self.iters);
        for turn in 0..self.warmup + self.iters.max(1) {
            comm.barrier()?;
            let start = Instant::now();
            memory.call(comm, buffers)?;
            if turn >= self.warmup {
                times.push(start.elapsed().as_secs_f64());
            }
        }
        times.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
        let mut both = [at(0.5), at(0.99)];
        comm.all_reduce(&mut both, ReduceOp::Max)?;
        let [p50, p99] = both.map(Duration::from_secs_f64);
        Ok(Timing { p50, p99, wrong })
    }
}

/// Buffers of these lengths stand for what fits a second-level cache, a third-level one, and neither.
const REGIMES: [(usize, u64); 3] = [
    (512 << 10, 1 << 20),
    (8 << 20, 32 << 20),
    (64 << 20, u64::MAX),
];

/// Measures what messages and folds cost between ranks 0 and 1; every rank calls it and gets the same
/// constants. `seconds` bounds how long each of its parts takes, about.
///
/// # Errors
/// [`Error::Layout`] in a world of one, where nothing travels; else those of messages.
pub fn calibrate<T: Transport + Send + 'static>(
    comm: &Communicator<T>,
    seconds: f64,
) -> Result<Constants> {
    if comm.world() < 2 {
        return Err(Error::Layout(String::from(
            "what a message costs is measured between two ranks; there is one",
        )));
    }
    let small = pingpong(comm, 1, seconds)?;
    let burst = burst(comm, seconds)?;
    let mut send = [Piece {
        up_to: 0,
        per_byte: 0.0,
    }; 3];
    let mut folds = send;
    for (at, (bytes, up_to)) in REGIMES.into_iter().enumerate() {
        let len = bytes / 4;
        let there = pingpong(comm, len, seconds)?;
        let per_byte = ((there - small) / bytes as f64).max(1e-13);
        send[at] = Piece { up_to, per_byte };
        let per_byte = fold_time(len, seconds) / bytes as f64;
        folds[at] = Piece { up_to, per_byte };
    }
    let overhead = burst.min(small);
    let mut agreed = vec![small - overhead, overhead];
    agreed.extend(send.iter().chain(&folds).map(|piece| piece.per_byte));
    comm.broadcast(&mut agreed, 0)?;
    let curve = |from: usize| {
        let pieces = core::array::from_fn(|at| Piece {
            up_to: REGIMES[at].1,
            per_byte: agreed[from + at],
        });
        Curve(pieces)
    };
    Ok(Constants {
        latency: agreed[0],
        overhead: agreed[1],
        send: curve(2),
        fold: curve(5),
    })
}

/// The median of half a there-and-back of `len` elements between ranks 0 and 1, in seconds; on the others
/// anything.
fn pingpong<T: Transport + Send + 'static>(
    comm: &Communicator<T>,
    len: usize,
    seconds: f64,
) -> Result<f64> {
    let mut buffer = vec![1f32; len];
    timed(comm, seconds, || match comm.rank() {
        0 => {
            comm.send(&buffer, 1, 1)?;
            comm.recv(&mut buffer, 1, 2)
        }
        1 => {
            comm.recv(&mut buffer, 0, 1)?;
            comm.send(&buffer, 0, 2)
        }
        _ => Ok(()),
    })
    .map(|time| time / 2.0)
}

/// The median time that one of many small messages keeps its sender busy.
fn burst<T: Transport + Send + 'static>(comm: &Communicator<T>, seconds: f64) -> Result<f64> {
    const MANY: usize = 64;
    let mut buffer = [1f32];
    timed(comm, seconds, || {
        for _ in 0..MANY {
            match comm.rank() {
                0 => comm.send(&buffer, 1, 3)?,
                1 => comm.recv(&mut buffer, 0, 3)?,
                _ => {}
            }
        }
        Ok(())
    })
    .map(|time| time / MANY as f64)
}

/// The median over calls of `call`, as many as fit into `seconds` by rank 0's clock, at least 3 and at
/// most 2000.
fn timed<T: Transport + Send + 'static>(
    comm: &Communicator<T>,
    seconds: f64,
    mut call: impl FnMut() -> Result<()>,
) -> Result<f64> {
    let start = Instant::now();
    call()?;
    let once = start.elapsed().as_secs_f64().max(1e-7);
    let mut turns = [(seconds / once).clamp(3.0, 2000.0) as i64];
    comm.broadcast(&mut turns, 0)?;
    let mut times = Vec::new();
    for _ in 0..turns[0] {
        comm.barrier()?;
        let start = Instant::now();
        call()?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(median(&mut times))
}

fn fold_time(len: usize, seconds: f64) -> f64 {
    let (mut onto, from) = (vec![1f32; len], vec![1f32; len]);
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < 3 || (begin.elapsed().as_secs_f64() < seconds && times.len() < 2000) {
        let start = Instant::now();
        fold(ReduceOp::Max, &mut onto, &from);
        times.push(start.elapsed().as_secs_f64());
    }
    core::hint::black_box(&onto);
    median(&mut times)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::World;

    #[test]
    fn every_operation_is_measured_and_right() {
        for world in [1, 2, 3] {
            for op in OPERATIONS {
                let bench = Bench {
                    op,
                    iters: 3,
                    warmup: 1,
                    check: true,
                };
                for bytes in [0, 4, 400, 4096] {
                    let rows = World::run(world, |comm| bench.measure(&comm, bytes)).unwrap();
                    assert!(rows.iter().all(|row| *row == rows[0]));
                    assert_eq!(rows[0].apart.wrong, Some(0), "{op} of {bytes}");
                    assert!(rows[0].bytes <= bytes);
                    if let Some(timing) = rows[0].in_place {
                        assert_eq!(timing.wrong, Some(0), "{op} of {bytes} in place");
                    }
                }
            }
        }
    }

    #[test]
    fn a_wrong_element_is_counted() {
        World::run(2, |comm| {
            let shape = CollectiveShape::AllReduce { len: 10 };
            let mut buffers = Buffers::new(&shape, 2, comm.rank(), false);
            assert_eq!(buffers.wrong(), 10);
            Slices.call(&comm, &mut buffers)?;
            assert_eq!(buffers.wrong(), 0);
            buffers.elements_mut()[13] += 1.0;
            assert_eq!(buffers.wrong(), 1);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn constants_are_measured_and_agreed() {
        let found = World::run(3, |comm| calibrate(&comm, 0.002)).unwrap();
        assert!(found.iter().all(|constants| *constants == found[0]));
        assert!(found[0].latency >= 0.0 && found[0].overhead > 0.0);
        let curves = [found[0].send, found[0].fold];
        assert!(
            curves
                .iter()
                .flat_map(|c| c.0)
                .all(|piece| piece.per_byte > 0.0)
        );
        let text = crate::cost::write(&[("local".to_string(), found[0])]);
        assert_eq!(crate::cost::parse(&text).unwrap()[0].1, found[0]);
    }

    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let (time, bytes) = (Duration::from_millis(1), 1_000_000);
        assert_eq!(algbw(bytes, time), 1.0);
        assert_eq!(busbw(Operation::AllReduce, bytes, 4, time), 1.5);
        assert_eq!(busbw(Operation::AllGather, bytes, 4, time), 0.75);
        assert_eq!(busbw(Operation::Broadcast, bytes, 4, time), 1.0);
    }
}
