//! The walk through all layouts: what does not depend on an inner choice is worked out once outside
//! of it.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;

use quintet_parallel_layers::pipeline::ScheduleKind;

use super::reject::Rules;
use super::{Candidate, Found, Job, Pins, Request, Tightest, flops, space};
use crate::closed::ByKind;
use crate::closed::held::{Held, States, activations, units};
use crate::closed::parts::{self, Parts, Places};
use crate::closed::pipeline::{Stage, fullest, stages};
use crate::closed::sent::{self, Collective, Group, Sums};
use crate::cluster::Cluster;
use crate::links::{Lies, seconds};
use crate::memory::{self, Bytes};
use crate::time::{Clock, Efficiency, LayerSeconds, StateSeconds, Timed, step, updated, work};
use crate::{Batch, Invalid, Layout, validate};
use quintet_parallel_layers::Recompute;

pub(super) struct Walk<'a> {
    request: &'a Request,
    clock: Clock<'a>,
    /// The same without latencies, and with every product at the best rate: a microbatch of any
    /// length takes at least its tokens' share of that.
    floor: Clock<'a>,
    lies: Lies,
    pipelines: BTreeMap<(usize, usize, usize, usize), Vec<Stage>>,
    rules: Rules,
    /// Schedules that cannot run so many microbatches: how often, and the first.
    stuck: BTreeMap<(u8, usize, usize), (u64, Layout, Batch)>,
    found: Found,
}

/// One ZeRO stage of one mesh.
struct Sharded {
    zero: u8,
    states: States,
    /// Of one microbatch, where they are summed or gathered for each.
    seconds: ByKind<StateSeconds>,
    updated: ByKind<u64>,
}

/// One microbatch of one way through one mesh.
struct Micro {
    units: ByKind<Bytes>,
    layers: ByKind<LayerSeconds>,
    /// Bytes of a message to a neighbour, and its seconds.
    message: (u64, f64),
}

impl<'a> Walk<'a> {
    /// `swift` is the request's cluster without latencies.
    pub(super) fn new(request: &'a Request, swift: &'a Cluster) -> Self {
        let cluster = &request.cluster;
        Self {
            floor: Clock {
                cluster: swift,
                peak: request.job.peak(cluster),
                element: request.job.types.storage.bytes(),
                efficiency: Efficiency {
                    half_width: 0.0,
                    ..request.efficiency
                },
                practice: request.practice,
            },
            clock: Clock {
                cluster,
                peak: request.job.peak(cluster),
                element: request.job.types.storage.bytes(),
                efficiency: request.efficiency,
                practice: request.practice,
            },
            lies: Lies::default(),
            pipelines: BTreeMap::new(),
            rules: Rules::default(),
            stuck: BTreeMap::new(),
            found: Found {
                best: Vec::new(),
                considered: 0,
                fitting: 0,
                meshes: 0,
                rejected: Vec::new(),
                tightest: None,
                flops: flops(request),
            },
            request,
        }
    }

    /// Walks until so many meshes have been found to fit.
    pub(super) fn run(mut self, enough: usize) -> Found {
        for mesh in space::meshes(self.request) {
            if self.found.meshes >= enough as u64 {
                break;
            }
            self.mesh(mesh);
        }
        for (count, layout, batch) in core::mem::take(&mut self.stuck).into_values() {
            if let Err(invalid) = validate(self.config(), &layout, &batch) {
                self.found.considered += count;
                self.rules.counted(&invalid, count);
            }
        }
        self.found.best.truncate(self.request.keep);
        self.found.rejected = self.rules.sorted();
        self.found
    }

    fn config(&self) -> &'a crate::ModelConfig {
        &self.request.shape.config
    }

    /// Judges, and notes the rule where the layout cannot be.
    fn can_be(&mut self, layout: &Layout, batch: &Batch) -> bool {
        match validate(self.config(), layout, batch) {
            Ok(()) => true,
            Err(invalid) => {
                self.found.considered += 1;
                self.rules.broken(&invalid);
                false
            }
        }
    }

    fn mesh(&mut self, mesh: Layout) {
        let request = self.request;
        let job = &request.job;
        let smallest = Batch {
            seq: job.seq,
            micro_batch: 1,
            global_batch: job.global_batch,
        };
        if !self.can_be(&mesh, &smallest) {
            return;
        }
        let mut best = None;
        let both: &[bool] = if mesh.tp > 1 {
            &[true, false]
        } else {
            &[false]
        };
        for &sequence_parallel in both {
            if !Pins::free(request.pins.sequence_parallel, sequence_parallel) {
                continue;
            }
            let mesh = Layout {
                sequence_parallel,
                ..mesh.clone()
            };
            let parts = parts::by_kind(&request.shape, &mesh);
            let sharded = self.sharded(&mesh, &parts);
            for (cp_comm, ulysses_degree) in space::contexts(mesh.cp, &request.pins) {
                let mesh = Layout {
                    cp_comm,
                    ulysses_degree,
                    ..mesh.clone()
                };
                if self.can_be(&mesh, &smallest) {
                    let floor = self.floor(&mesh, &smallest);
                    if floor < self.bar(best.as_ref()) {
                        self.microbatches(&mesh, &sharded, &mut best);
                    } else {
                        let lengths = space::divisors(job.global_batch / mesh.dp).len();
                        let orders = space::schedules(mesh.pp, self.config().layers, &request.pins);
                        let modes = space::recomputes(&request.pins).len();
                        self.slower(lengths * modes * orders.len() * sharded.len());
                    }
                }
            }
        }
        if let Some(best) = best {
            self.found.meshes += 1;
            self.keep(best);
        }
    }

    /// Seconds that a step takes at least, however long microbatches are and whatever the schedule.
    fn floor(&mut self, mesh: &Layout, batch: &Batch) -> f64 {
        let (shape, types) = (&self.request.shape, self.request.job.types);
        let flows = sent::by_kind(shape, mesh, batch, types, Sums::Least);
        let works = work(shape, mesh, batch, types.storage.bytes());
        let (floor, lies) = (&self.floor, &mut self.lies);
        let mut layer = |work, flows: &[_]| floor.layer(lies, (shape, mesh), work, flows, [0.0; 3]);
        let (dense, moe) = (
            layer(&works.dense, &flows.dense),
            layer(&works.moe, &flows.moe),
        );
        // Longer microbatches may fall into rows a little more evenly.
        0.99 * self.at_least(&dense, &moe, mesh, batch)
    }

    /// Seconds of a stage with the mean number of blocks, which the slowest one needs at least.
    fn at_least(
        &self,
        dense: &LayerSeconds,
        moe: &LayerSeconds,
        mesh: &Layout,
        batch: &Batch,
    ) -> f64 {
        let m = self.config();
        let first = m.moe.map_or(m.layers, |moe| moe.first_dense.min(m.layers));
        let shown = 1.0 - self.request.efficiency.hidden;
        let of = |l: &LayerSeconds| {
            l.forward
                + l.input
                + l.weight
                + l.again
                + l.tp[0]
                + l.tp[1]
                + l.cp[0]
                + l.cp[1]
                + shown * (l.ep[0] + l.ep[1])
        };
        let blocks = first as f64 * of(dense) + (m.layers - first) as f64 * of(moe);
        (batch.microbatches() / mesh.dp) as f64 * blocks / mesh.pp as f64
    }

    /// The seconds below which a way must stay to be of interest: of its mesh, and of those kept.
    fn bar(&self, best: Option<&Candidate>) -> f64 {
        let kept = &self.found.best;
        let last = kept
            .last()
            .filter(|_| kept.len() >= self.request.keep.max(1));
        let of = |c: Option<&Candidate>| c.map_or(f64::INFINITY, |c| c.time.total());
        of(last).min(of(best))
    }

    /// So many ways of each schedule and recompute mode are slower than what is kept.
    fn slower(&mut self, ways: usize) {
        self.found.considered += ways as u64;
        self.rules.slower(ways as u64);
    }

    /// Keeps the best in order, and no more than are wanted.
    fn keep(&mut self, candidate: Candidate) {
        let best = &mut self.found.best;
        let time = candidate.time.total();
        let at = best.partition_point(|other| other.time.total() <= time);
        best.insert(at, candidate);
        best.truncate(self.request.keep.max(1));
    }

    /// Model states under every ZeRO stage that makes a difference.
    fn sharded(&mut self, mesh: &Layout, parts: &ByKind<Parts>) -> Vec<Sharded> {
        let (request, places) = (self.request, Places::of(mesh));
        let Job { types, moments, .. } = request.job;
        let alone = places.dense == 1 && places.experts == 1;
        let mut all = Vec::new();
        for zero in 0..=(if alone { 0 } else { 3 }) {
            if !Pins::free(request.pins.zero_stage, zero) {
                continue;
            }
            let layout = Layout {
                zero_stage: zero,
                ..mesh.clone()
            };
            let seconds = |walk: &mut Self, parts: &Parts| {
                let flows = sent::states(parts, &layout, &request.shape, (types, Sums::Least), 1);
                walk.clock
                    .states(&mut walk.lies, (&request.shape, &layout), &flows)
            };
            all.push(Sharded {
                zero,
                states: States::new(parts, places, zero, types, moments),
                seconds: ByKind {
                    embed: seconds(self, &parts.embed),
                    dense: seconds(self, &parts.dense),
                    moe: seconds(self, &parts.moe),
                    head: seconds(self, &parts.head),
                },
                updated: parts.map(|parts| updated(&parts, places, zero)),
            });
        }
        all
    }

    fn microbatches(&mut self, mesh: &Layout, sharded: &[Sharded], best: &mut Option<Candidate>) {
        let request = self.request;
        let job = &request.job;
        let each = job.global_batch / mesh.dp;
        let mut schedules = space::schedules(mesh.pp, self.config().layers, &request.pins);
        let smallest = Batch {
            seq: job.seq,
            micro_batch: 1,
            global_batch: job.global_batch,
        };
        // What cannot run microbatches of one sequence cannot run longer ones.
        schedules.retain(|&(schedule, virtual_stages)| {
            let layout = Layout {
                schedule,
                virtual_stages,
                ..mesh.clone()
            };
            self.can_be(&layout, &smallest)
        });
        for micro_batch in space::divisors(each) {
            if !Pins::free(request.pins.micro_batch, micro_batch) {
                continue;
            }
            let batch = Batch {
                seq: job.seq,
                micro_batch,
                global_batch: job.global_batch,
            };
            let mut fits = false;
            for recompute in space::recomputes(&request.pins) {
                let mesh = Layout {
                    recompute,
                    ..mesh.clone()
                };
                let micro = self.micro(&mesh, &batch);
                let (dense, moe) = (&micro.layers.dense, &micro.layers.moe);
                if self.at_least(dense, moe, &mesh, &batch) >= self.bar(best.as_ref()) {
                    self.slower(schedules.len() * sharded.len());
                    fits = true;
                    continue;
                }
                for &(schedule, virtual_stages) in &schedules {
                    let layout = Layout {
                        schedule,
                        virtual_stages,
                        ..mesh.clone()
                    };
                    let (m, p) = (each / micro_batch, mesh.pp);
                    let kind = match schedule {
                        ScheduleKind::Interleaved if !m.is_multiple_of(p) => 0,
                        ScheduleKind::DualPipeV if m < 2 * p => 1,
                        _ => {
                            fits |= self.pipeline(layout, batch, &micro, sharded, best);
                            continue;
                        }
                    };
                    let stuck = self.stuck.entry((kind, p, m));
                    stuck.or_insert((0, layout, batch)).0 += 1;
                }
            }
            // A longer microbatch holds more of everything.
            if !fits {
                break;
            }
        }
    }

    fn micro(&mut self, layout: &Layout, batch: &Batch) -> Micro {
        let (shape, types) = (&self.request.shape, self.request.job.types);
        let width = types.storage.bytes();
        let units = units(shape, layout, batch, types);
        let flows = sent::by_kind(shape, layout, batch, types, Sums::Least);
        let works = work(shape, layout, batch, width);
        let again = match layout.recompute {
            Recompute::None => [0.0; 3],
            // What is cheap passes through memory once.
            Recompute::Selective => [0.0, 0.0, 0.5],
            Recompute::Full => [1.0; 3],
        };
        let place = Group::Pp.place(shape, layout);
        let message = memory::message(&shape.config, layout, batch, types);
        let lie = self.lies.of(place, self.clock.cluster);
        let mut layer = |work, flows: &[_], block: bool| {
            let again = if block { again } else { [0.0; 3] };
            self.clock
                .layer(&mut self.lies, (shape, layout), work, flows, again)
        };
        Micro {
            layers: ByKind {
                embed: layer(&works.embed, &flows.embed, false),
                dense: layer(&works.dense, &flows.dense, true),
                moe: layer(&works.moe, &flows.moe, true),
                head: layer(&works.head, &flows.head, false),
            },
            units,
            message: (
                message,
                seconds(
                    self.clock.cluster,
                    lie,
                    Collective::Send,
                    message as f64,
                    layout.pp,
                    self.clock.efficiency.link,
                ),
            ),
        }
    }

    /// Every ZeRO stage of one pipeline: whether one of them fits.
    fn pipeline(
        &mut self,
        layout: Layout,
        batch: Batch,
        micro: &Micro,
        sharded: &[Sharded],
        best: &mut Option<Candidate>,
    ) -> bool {
        let microbatches = batch.microbatches() / layout.dp;
        let Some(stages) = self.stages(&layout, microbatches) else {
            return false;
        };
        let usable = self.request.cluster.usable();
        let mut fits = false;
        let (mut over, mut largest) = (0, 0);
        let holds = |stage: &Stage| activations(stage, &micro.units, micro.message.0);
        let held: Vec<(u64, u64)> = stages.iter().map(holds).collect();
        for zero in sharded {
            self.found.considered += 1;
            let mut most = (Held::default(), 0);
            for (stage, &(activations, buffers)) in stages.iter().zip(&held) {
                let states = zero.states.on(stage, &layout, microbatches);
                let all = Held {
                    activations,
                    buffers,
                    ..states
                };
                if all.total() >= most.0.total() {
                    most = (all, stage.stage);
                }
            }
            let (held, stage) = most;
            if held.total() > usable {
                over += 1;
                largest = largest.max(held.total());
                let nearer = |t: &Tightest| held.total() < t.held.total();
                if self.found.tightest.as_ref().is_none_or(nearer) {
                    self.found.tightest = Some(Tightest {
                        layout: Layout {
                            zero_stage: zero.zero,
                            ..layout.clone()
                        },
                        batch,
                        held,
                    });
                }
                continue;
            }
            fits = true;
            self.found.fitting += 1;
            let time = self.time(&layout, &stages, zero, micro, microbatches);
            if best
                .as_ref()
                .is_none_or(|best| time.total() < best.time.total())
            {
                *best = Some(Candidate {
                    layout: Layout {
                        zero_stage: zero.zero,
                        ..layout.clone()
                    },
                    batch,
                    held,
                    stage,
                    time,
                });
            }
        }
        if over > 0 {
            let (l, name) = (&layout, &self.request.cluster.name);
            self.rules.over_memory(over, || {
                let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
                format!(
                    "tp {} pp {} cp {} dp {}, {} with {} chunk(s) a stage, recompute {}, takes {:.1} GiB on its fullest rank, of {:.1} that {name} leaves to a model; cut parameters, or keep less (--zero-stage, --pp, --tp, --recompute)",
                    l.tp, l.pp, l.cp, l.dp, l.schedule, l.chunks(), l.recompute.name(),
                    gib(largest), gib(usable)
                )
            });
        }
        // Put back what was lent.
        let key = key(&layout, microbatches);
        self.pipelines.insert(key, stages);
        fits
    }

    /// The stages of a pipeline of which one is the fullest, lent from what is remembered.
    fn stages(&mut self, layout: &Layout, microbatches: usize) -> Option<Vec<Stage>> {
        let key = key(layout, microbatches);
        if let Some(stages) = self.pipelines.get_mut(&key) {
            return Some(core::mem::take(stages));
        }
        match stages(self.config(), layout, microbatches) {
            Ok(all) => Some(fullest(all)),
            Err(refused) => {
                self.rules.broken(&Invalid(format!("{refused}")));
                None
            }
        }
    }

    /// The step of the slowest of these stages.
    fn time(
        &self,
        layout: &Layout,
        stages: &[Stage],
        zero: &Sharded,
        micro: &Micro,
        microbatches: usize,
    ) -> crate::time::StepTime {
        let m = microbatches as f64;
        let states = zero.seconds.map(|s| StateSeconds {
            forward: s.forward * m,
            backward: s.backward * m,
            ..s
        });
        let mut slowest = crate::time::StepTime::default();
        for stage in stages {
            let timed = Timed {
                stage,
                microbatches: microbatches as u64,
                layers: &micro.layers,
                states: &states,
                message: micro.message.1,
                updated: stage.layers.sum(&zero.updated) as f64,
            };
            let time = step(&self.clock, layout, &timed);
            if time.total() > slowest.total() {
                slowest = time;
            }
        }
        slowest
    }
}

fn key(layout: &Layout, microbatches: usize) -> (usize, usize, usize, usize) {
    let (p, v) = (layout.pp, layout.chunks());
    let (kind, held) = match layout.schedule {
        ScheduleKind::GPipe => (0, microbatches),
        ScheduleKind::OneFOneB => (1, microbatches.min(p)),
        ScheduleKind::Interleaved => (2, microbatches.min(4 * p)),
        ScheduleKind::ZbH1 => (3, microbatches.min(4 * p)),
        ScheduleKind::DualPipeV => (4, microbatches.min(4 * p)),
    };
    (kind, p, v, held)
}
