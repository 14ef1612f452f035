//! The walk through all layouts: what does not depend on an inner choice is worked out once outside
//! of it.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;

use quintet_parallel_layers::pipeline::ScheduleKind;

use super::cost::{Costs, Micro, Sharded};
use super::reject::Rules;
use super::{Candidate, Found, Pins, Request, Tightest, flops, space};
use crate::closed::held::{Held, activations};
use crate::closed::parts;
use crate::closed::pipeline::{Stage, fullest, stages};
use crate::cluster::Cluster;
use crate::{Batch, Invalid, Layout, validate};

pub(super) struct Walk<'a> {
    request: &'a Request,
    costs: Costs<'a>,
    pipelines: BTreeMap<(usize, usize, usize, usize), Vec<Stage>>,
    rules: Rules,
    /// Schedules that cannot run so many microbatches: how often, and the first.
    stuck: BTreeMap<(u8, usize, usize), (u64, Layout, Batch)>,
    found: Found,
}

impl<'a> Walk<'a> {
    /// `swift` is the request's cluster without latencies.
    pub(super) fn new(request: &'a Request, swift: &'a Cluster) -> Self {
        Self {
            costs: Costs::new(request, swift),
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
            let sharded = self.costs.sharded(&mesh, &parts);
            for (cp_comm, ulysses_degree) in space::contexts(mesh.cp, &request.pins) {
                let mesh = Layout {
                    cp_comm,
                    ulysses_degree,
                    ..mesh.clone()
                };
                if self.can_be(&mesh, &smallest) {
                    let floor = self.costs.floor(&mesh, &smallest);
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
                let micro = self.costs.micro(&mesh, &batch);
                let (dense, moe) = (&micro.layers.dense, &micro.layers.moe);
                if self.costs.at_least(dense, moe, &mesh, &batch) >= self.bar(best.as_ref()) {
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
            let time = self.costs.time(&layout, &stages, zero, micro, microbatches);
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
