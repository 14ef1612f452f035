//! Stages as threads, with a chain of affine maps whose gradients are exact: over channels whose
//! sends are over only when taken, and over the transport that trainers use.

#[path = "pipeline/fake.rs"]
mod fake;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use fake::{Host, group};
use quintet_collectives::Error as WireError;
use quintet_collectives::transport::local::World;
use quintet_kernels::{Backend, Collectives, Cpu, Error as KernelError, Tag};
use quintet_parallel_layers::pipeline::{
    Action, Error as PipelineError, Moment, Route, Schedule, ScheduleKind, Stage, Work, laws,
};

const LEN: usize = 3;

/// What a trainer's error would be.
#[derive(Debug, PartialEq)]
enum Error {
    Pipeline(PipelineError),
    Wire(WireError),
    Kernel(KernelError),
    Planned,
}
impl From<PipelineError> for Error {
    fn from(e: PipelineError) -> Self {
        Self::Pipeline(e)
    }
}
impl From<WireError> for Error {
    fn from(e: WireError) -> Self {
        Self::Wire(e)
    }
}
impl From<KernelError> for Error {
    fn from(e: KernelError) -> Self {
        Self::Kernel(e)
    }
}

/// Layer `l` of the whole model, one per segment: y = a x + b with a = 2, b = l + 1; the loss is
/// the sum of the last y. `da` and `db` are its gradients.
#[derive(Default)]
struct Chain<B: Backend> {
    backend: B,
    /// By chunk: global number of its first layer, layers in it.
    chunks: Vec<(usize, usize)>,
    /// Layers in the model.
    whole: usize,
    inputs: BTreeMap<(usize, usize), Vec<f64>>,
    douts: BTreeMap<(usize, usize), Vec<f64>>,
    da: BTreeMap<usize, f64>,
    db: BTreeMap<usize, f64>,
    loss: f64,
    reduced: BTreeMap<usize, Vec<usize>>,
    gathered: BTreeSet<usize>,
    heard: Vec<(Action, Moment)>,
    /// Fails at this forward.
    fails: Option<usize>,
    /// Microbatches and chunks between forward and the last weights.
    saved: BTreeSet<(usize, usize)>,
    most_saved: usize,
    /// Tells of each backward_input.
    tells: Option<Sender<usize>>,
    /// Takes no weights of a microbatch before another stage has told of it.
    waits: Option<Receiver<usize>>,
}

fn sample(mb: usize) -> Vec<f64> {
    (0..LEN).map(|i| (mb * LEN + i) as f64 - 4.0).collect()
}

fn layer(l: usize, x: &[f64]) -> Vec<f64> {
    x.iter().map(|x| 2.0 * x + (l + 1) as f64).collect()
}

impl<B: Backend> Chain<B> {
    /// Segment 0 holds the chunk's last layer.
    fn layer_of(&self, chunk: usize, segment: usize) -> usize {
        let (first, layers) = self.chunks[chunk];
        first + layers - 1 - segment
    }
    fn hold(&self, data: &[f64]) -> Result<B::Buf<f64>, Error> {
        Ok(self.backend.upload(Tag::Activation, data)?)
    }
    fn read(&self, buf: &B::Buf<f64>) -> Result<Vec<f64>, Error> {
        let mut data = vec![0.0; LEN];
        self.backend.download(B::whole(buf), &mut data)?;
        Ok(data)
    }
}

impl<B: Backend> Work<B, f64> for Chain<B> {
    type Error = Error;

    fn gather(&mut self, chunk: usize) -> Result<(), Error> {
        assert!(self.gathered.insert(chunk));
        Ok(())
    }
    fn release(&mut self, chunk: usize) -> Result<(), Error> {
        assert!(self.gathered.remove(&chunk));
        Ok(())
    }
    fn forward(
        &mut self,
        mb: usize,
        chunk: usize,
        input: Option<B::Buf<f64>>,
    ) -> Result<Option<B::Buf<f64>>, Error> {
        if self.fails == Some(mb) {
            return Err(Error::Planned);
        }
        assert!(self.gathered.contains(&chunk));
        let (first, layers) = self.chunks[chunk];
        assert_eq!(input.is_none(), first == 0);
        let mut x = match input {
            Some(buf) => self.read(&buf)?,
            None => sample(mb),
        };
        for l in first..first + layers {
            let y = layer(l, &x);
            self.inputs.insert((mb, l), x);
            x = y;
        }
        self.saved.insert((mb, chunk));
        self.most_saved = self.most_saved.max(self.saved.len());
        if first + layers == self.whole {
            self.loss += x.iter().sum::<f64>();
            return Ok(None);
        }
        Ok(Some(self.hold(&x)?))
    }
    fn backward_input(
        &mut self,
        mb: usize,
        chunk: usize,
        segment: usize,
        dout: Option<B::Buf<f64>>,
    ) -> Result<Option<B::Buf<f64>>, Error> {
        assert!(self.gathered.contains(&chunk));
        let l = self.layer_of(chunk, segment);
        assert_eq!(dout.is_none(), l + 1 == self.whole);
        let dout = match dout {
            Some(buf) => self.read(&buf)?,
            None => vec![1.0; LEN],
        };
        let din: Vec<f64> = dout.iter().map(|d| 2.0 * d).collect();
        self.douts.insert((mb, l), dout);
        if let Some(tells) = &self.tells {
            tells.send(mb).expect("the other stage");
        }
        (l > 0).then(|| self.hold(&din)).transpose()
    }
    fn backward_weight(&mut self, mb: usize, chunk: usize, segment: usize) -> Result<(), Error> {
        let l = self.layer_of(chunk, segment);
        if let Some(told) = &self.waits {
            let other = told.recv_timeout(Duration::from_secs(10));
            assert_eq!(
                other,
                Ok(mb),
                "the gradient has not left before the weights"
            );
        }
        let x = self.inputs.remove(&(mb, l)).expect("forward first");
        let dout = self.douts.remove(&(mb, l)).expect("backward_input first");
        let dot: f64 = x.iter().zip(&dout).map(|(x, d)| x * d).sum();
        *self.da.entry(l).or_default() += dot;
        *self.db.entry(l).or_default() += dout.iter().sum::<f64>();
        if segment + 1 == self.chunks[chunk].1 {
            self.saved.remove(&(mb, chunk));
        }
        Ok(())
    }
    fn reduce_grads(&mut self, chunk: usize, bucket: usize) -> Result<(), Error> {
        let l = self.layer_of(chunk, bucket);
        assert!(!self.inputs.keys().any(|&(_, layer)| layer == l));
        self.reduced.entry(chunk).or_default().push(bucket);
        Ok(())
    }
    fn on_action(&mut self, action: &Action, moment: Moment) {
        self.heard.push((*action, moment));
    }
}

/// How one stage ended.
type End<B> = (Chain<B>, Result<(), Error>);

/// Runs given actions, one thread a stage; all stages' chains, and how each ended.
fn perform(
    route: Route,
    programs: &[Vec<Action>],
    segments: &[usize],
    fails: Option<(usize, usize)>,
) -> Vec<End<Host>> {
    thread::scope(|scope| {
        let threads: Vec<_> = group(programs.len())
            .into_iter()
            .map(|group| {
                scope.spawn(move || stage::<Host, _>(group, route, programs, segments, fails))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// The same on CPUs and the transport between threads.
fn perform_local(
    route: Route,
    programs: &[Vec<Action>],
    segments: &[usize],
    fails: Option<(usize, usize)>,
) -> Vec<End<Cpu>> {
    World::run(programs.len(), |comm| {
        Ok(stage::<Cpu, _>(comm, route, programs, segments, fails))
    })
    .unwrap()
}

/// One stage of it: the group's rank is the stage.
fn stage<B: Backend + Default, C: Collectives<B>>(
    group: C,
    route: Route,
    programs: &[Vec<Action>],
    segments: &[usize],
    fails: Option<(usize, usize)>,
) -> End<B> {
    let (backend, stage) = (B::default(), group.rank());
    let chunk = |chunk| {
        let place = route.place(stage, chunk);
        (segments[..place].iter().sum(), segments[place])
    };
    let mut chain = Chain {
        backend: backend.clone(),
        chunks: (0..route.chunks()).map(chunk).collect(),
        whole: segments.iter().sum(),
        fails: fails.filter(|f| f.0 == stage).map(|f| f.1),
        ..Chain::default()
    };
    let end = Stage::new(backend, group, route, LEN).run(&programs[stage], &mut chain);
    assert_eq!(chain.backend.meter().now(Tag::Activation), 0);
    (chain, end)
}

/// The same chain without a pipeline: loss, da, db.
fn alone(whole: usize, microbatches: usize) -> (f64, Vec<f64>, Vec<f64>) {
    let (mut loss, mut da, mut db) = (0.0, vec![0.0; whole], vec![0.0; whole]);
    for mb in 0..microbatches {
        let mut x = sample(mb);
        for l in 0..whole {
            let slope = 2f64.powi((whole - 1 - l) as i32);
            da[l] += slope * x.iter().sum::<f64>();
            db[l] += slope * LEN as f64;
            x = layer(l, &x);
        }
        loss += x.iter().sum::<f64>();
    }
    (loss, da, db)
}

/// A schedule where the kind has one; segments are taken from `pattern`, over and over.
fn schedule(
    kind: ScheduleKind,
    stages: usize,
    microbatches: usize,
    pattern: &[usize],
) -> Option<(Schedule, Vec<usize>)> {
    let places = stages * kind.chunks().unwrap_or(3);
    let segments: Vec<usize> = pattern.iter().copied().cycle().take(places).collect();
    let schedule = Schedule::new(kind, stages, microbatches, &segments).ok()?;
    Some((schedule, segments))
}

#[test]
fn every_pipeline_computes_what_one_device_computes() {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for kind in ScheduleKind::ALL {
        for stages in 1..=4 {
            for microbatches in 0..=9 {
                for pattern in [&[1][..], &[2, 1, 3, 2, 1]] {
                    let Some((schedule, segments)) = schedule(kind, stages, microbatches, pattern)
                    else {
                        continue;
                    };
                    compare(&schedule, &segments);
                    *counts.entry(kind.name()).or_default() += 1;
                }
            }
        }
    }
    assert!(
        counts.len() == 5 && counts.values().all(|&n| n >= 30),
        "{counts:?}"
    );
}

#[test]
fn many_microbatches_hold_few_buffers() {
    for kind in ScheduleKind::ALL {
        let (schedule, segments) = schedule(kind, 4, 40, &[1, 2, 1, 1]).unwrap();
        compare(&schedule, &segments);
    }
}

/// Uneven stages, on 2 to 4 ranks, as a trainer runs them.
#[test]
fn so_does_every_pipeline_over_the_local_transport() {
    for kind in ScheduleKind::ALL {
        for stages in 2..=4 {
            for microbatches in [0, 1, 2, 5, 12] {
                for pattern in [&[1][..], &[2, 1, 3, 2, 1]] {
                    let Some((schedule, segments)) = schedule(kind, stages, microbatches, pattern)
                    else {
                        continue;
                    };
                    let ends = perform_local(*schedule.route(), &schedule.all(), &segments, None);
                    check(&schedule, &segments, &ends);
                }
            }
        }
    }
}

fn compare(schedule: &Schedule, segments: &[usize]) {
    check(
        schedule,
        segments,
        &perform(*schedule.route(), &schedule.all(), segments, None),
    );
}

/// Every stage ended well, with the gradients of one device and no more memory than is allowed.
fn check<B: Backend>(schedule: &Schedule, segments: &[usize], ends: &[End<B>]) {
    let programs = schedule.all();
    let (loss, da, db) = alone(segments.iter().sum(), schedule.microbatches());
    let mut total = 0.0;
    for (stage, (chain, end)) in ends.iter().enumerate() {
        assert_eq!(*end, Ok(()), "{schedule:?}");
        for (chunk, &(first, layers)) in chain.chunks.iter().enumerate() {
            for l in first..first + layers {
                let got = |grad: &BTreeMap<_, f64>| grad.get(&l).copied().unwrap_or_default();
                assert_eq!((got(&chain.da), got(&chain.db)), (da[l], db[l]));
            }
            let all: Vec<usize> = (0..schedule.segments(stage, chunk)).collect();
            assert_eq!(chain.reduced[&chunk], all);
        }
        assert_eq!(chain.most_saved, laws::held(&programs[stage]));
        // Two sends under way on each lane (two each way in a V), and what goes into and out of
        // the worker.
        let buffers = if schedule.chunks() > 1 { 12 } else { 6 };
        let peak = chain.backend.meter().peak(Tag::Activation);
        assert!(
            peak <= buffers * LEN * size_of::<f64>(),
            "{peak} {schedule:?}"
        );
        assert!(chain.inputs.is_empty() && chain.douts.is_empty() && chain.gathered.is_empty());
        let both = |action: &Action| [(*action, Moment::Begin), (*action, Moment::End)];
        let heard: Vec<_> = programs[stage].iter().flat_map(both).collect();
        assert_eq!(chain.heard, heard);
        total += chain.loss;
    }
    assert_eq!(total, loss);
}

/// The last stage takes no weights before the first one has used the gradient that it waits for:
/// it comes to its end only because that gradient leaves before them.
#[test]
fn the_gradient_has_left_before_the_weights_are_taken() {
    for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZbH1] {
        let (schedule, _) = schedule(kind, 2, 5, &[1]).unwrap();
        let (tells, told) = channel();
        let mut chains = [Some(tells), None].map(|tells| Chain {
            tells,
            whole: 2,
            ..Chain::default()
        });
        chains[1].waits = Some(told);
        thread::scope(|scope| {
            let ranks = group(2).into_iter().zip(chains).enumerate();
            for (stage, (group, mut chain)) in ranks {
                let (schedule, backend) = (&schedule, Host::default());
                scope.spawn(move || {
                    (chain.backend, chain.chunks) = (backend.clone(), vec![(stage, 1)]);
                    let mut performer = Stage::new(backend, group, *schedule.route(), LEN);
                    performer.run(&schedule.actions(stage), &mut chain).unwrap();
                });
            }
        });
    }
}

/// A pair of messages on one wire that change places: no peer takes one for the other.
#[test]
fn swapped_sends_are_not_taken_for_each_other() {
    let (schedule, segments) = schedule(ScheduleKind::ZbH1, 2, 4, &[1]).unwrap();
    let mut programs = schedule.all();
    let sends: Vec<usize> = (0..programs[0].len())
        .filter(|&at| matches!(programs[0][at], Action::SendForward { .. }))
        .collect();
    // The second activation leaves before it is there.
    programs[0].swap(sends[0], sends[1]);
    let ends = perform(*schedule.route(), &programs, &segments, None);
    assert!(
        ends.iter().all(|(_, end)| end.is_err()),
        "a swapped pair went through"
    );
}

/// Rank `rank` of 2 performs `actions` by itself; the chain is two layers long.
fn by_itself(rank: usize, actions: &[Action]) -> PipelineError {
    let group = group(2).remove(rank);
    let mut chain: Chain<Host> = Chain {
        chunks: vec![(rank, 1)],
        whole: 2,
        gathered: BTreeSet::from([0]),
        ..Chain::default()
    };
    let mut stage = Stage::new(chain.backend.clone(), group, Route::looped(2, 1), LEN);
    let end = stage.run(actions, &mut chain);
    assert_eq!(chain.backend.meter().now(Tag::Activation), 0);
    match end {
        Err(Error::Pipeline(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_missing_buffer_is_an_error() {
    let (mb, chunk) = (0, 0);
    let forward = Action::Forward { mb, chunk };
    let input = |segment| Action::BackwardInput { mb, chunk, segment };
    for (rank, actions, what) in [
        (1, vec![forward], "an input activation"),
        (0, vec![forward, input(0)], "an output gradient"),
        (1, vec![input(0), input(2)], "an output gradient"),
        (
            0,
            vec![Action::SendForward { mb, chunk, to: 1 }],
            "an output activation",
        ),
        (
            1,
            vec![Action::SendBackward { mb, chunk, to: 0 }],
            "an input gradient",
        ),
    ] {
        let action = actions[actions.len() - 1];
        let missing = PipelineError::Missing { action, what };
        assert_eq!(by_itself(rank, &actions), missing);
    }
}

#[test]
fn a_buffer_left_over_is_an_error() {
    let (mb, chunk) = (0, 0);
    let what = "an output activation";
    let left = PipelineError::Left { what, mb, chunk };
    assert_eq!(by_itself(0, &[Action::Forward { mb, chunk }]), left);
    let segment = 0;
    let what = "a gradient";
    let left = PipelineError::Left { what, mb, chunk };
    assert_eq!(
        by_itself(1, &[Action::BackwardInput { mb, chunk, segment }]),
        left
    );
}

#[test]
fn a_failing_worker_ends_its_stage_and_its_neighbours() {
    for kind in ScheduleKind::ALL {
        let (schedule, segments) = schedule(kind, 3, 6, &[1]).unwrap();
        let ends = perform(*schedule.route(), &schedule.all(), &segments, Some((1, 1)));
        assert_eq!(ends[1].1, Err(Error::Planned));
        for other in [0, 2] {
            assert!(
                matches!(ends[other].1, Err(Error::Wire(_))),
                "{:?}",
                ends[other].1
            );
        }
    }
}

#[test]
fn over_the_local_transport_too_and_by_name() {
    for kind in ScheduleKind::ALL {
        let segments = [1, 2, 1];
        let schedule = Schedule::new(kind, 3, 4, &segments).unwrap();
        let ends = perform_local(*schedule.route(), &schedule.all(), &segments, Some((1, 1)));
        assert_eq!(ends[1].1, Err(Error::Planned));
        for other in [0, 2] {
            let lost = matches!(ends[other].1, Err(Error::Wire(WireError::PeerLost { .. })));
            assert!(lost, "{:?}", ends[other].1);
        }
    }
}
