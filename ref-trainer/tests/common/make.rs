//! From genes to a job: each constraint of `validate` holds by construction, nothing is rejected.

use quintet_parallel_layers::moe::Score;
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_planner::config::{Batch, Layout, ModelConfig, MoeConfig};
use quintet_ref_trainer::job::{Dtype, Job, OptimizerKind, OptimizerOptions};

use super::Draw;
use super::genes::{
    ARCHITECTURES, BUCKETS, CAPACITIES, DROPOUTS, ExpertGenes, Genes, MASKS, Mask, RECOMPUTES,
    SCHEDULES, WAYS, meshes,
};

impl Genes {
    pub(super) fn draw(&self, dtype: Dtype) -> Draw {
        let [dp, tp, pp, cp] = self.mesh(dtype);
        let (way, documents, window) = self.context;
        let (cp_comm, mixed) = WAYS[way];
        let mixed = mixed && cp > 2 && cp.is_multiple_of(2);
        let [sequence_parallel, hybrid, tied, any_order, clip, decay, two] = self.flags;
        let (schedule, virtual_stages) = self.kind(dtype, pp);
        let places = pp * schedule.chunks().unwrap_or(virtual_stages);
        let (counts, uneven) = self.stage_layers(dtype, places);
        let (ep, etp) = self
            .experts
            .as_ref()
            .map_or((1, 1), |e| e.degrees(dp * cp * tp));
        let layout = Layout {
            ep,
            etp,
            dp,
            tp,
            pp,
            cp,
            cp_comm,
            ulysses_degree: mixed.then_some(cp / 2),
            sequence_parallel,
            zero_stage: self.zero.0,
            hybrid_shard_size: self.hybrid(dp, cp).filter(|_| hybrid),
            schedule,
            virtual_stages,
            stage_layers: uneven.then(|| counts.clone()),
            bucket_bytes: BUCKETS[self.bucket],
            any_order,
            recompute: RECOMPUTES[self.recompute],
        };
        let micro_batch = self.batch.1 + 1;
        let batch = Batch {
            // With one key, q and k have no gradient but rounding, of which the condition of the
            // oracle, where it is zero, does not tell how much; that has a test of its own.
            seq: if cp == 1 {
                self.batch.0 + 2
            } else {
                // No more than GPT-2 has positions.
                2 * cp * (1 + self.batch.0 / 3).min(24 / cp)
            },
            micro_batch,
            global_batch: micro_batch * dp * self.microbatches(schedule, pp),
        };
        let (mask_fraction, mask_samples) = self.mask(batch.global_batch);
        let job = Job {
            model_name: "drawn".into(),
            model: ModelConfig {
                window: (window > 0).then_some(window),
                dropout: DROPOUTS[self.dropout],
                moe: self.experts.as_ref().map(|experts| experts.config(ep)),
                ..self.model((tp, layout.ulysses()), counts.iter().sum(), tied)
            },
            layout,
            pack_documents: documents,
            batch,
            mask_fraction,
            mask_samples,
            dtype,
            seed: self.seed,
            optimizer: self.optimizer(dtype, clip, decay),
            threads_per_rank: 1 + usize::from(two),
            by_messages: self.seed.is_multiple_of(3),
            ..Job::verify()
        };
        if dtype == Dtype::Bf16 {
            return Draw {
                job: for_8_bits(job),
            };
        }
        Draw { job }
    }

    /// dp, tp, pp and cp. Depth is what 8 bits bear least: no more stages than two with them.
    fn mesh(&self, dtype: Dtype) -> [usize; 4] {
        let mut all = meshes();
        if dtype == Dtype::Bf16 {
            all.retain(|[_, _, pp, _]| *pp <= 2);
        }
        all[self.mesh % all.len()]
    }

    /// Fewer replicas than all, that shard among themselves; none where nothing is sharded.
    fn hybrid(&self, dp: usize, cp: usize) -> Option<usize> {
        let (stage, pick) = self.zero;
        let all = dp * cp;
        let fits =
            |h: &usize| all.is_multiple_of(*h) && (h.is_multiple_of(cp) || cp.is_multiple_of(*h));
        let all: Vec<usize> = (1..all).rev().filter(fits).collect();
        (stage > 0 && !all.is_empty()).then(|| all[pick % all.len()])
    }

    /// A schedule that `pp` stages can follow, and the chunks of a stage where that is free.
    fn kind(&self, dtype: Dtype, pp: usize) -> (ScheduleKind, usize) {
        let (kind, more) = (SCHEDULES[self.schedule.0], self.schedule.1);
        if pp < kind.least_stages() {
            return (ScheduleKind::OneFOneB, 1);
        }
        // Not so many layers that a draw takes long, or is too deep for 8 bits.
        let few = pp > 3 || dtype == Dtype::Bf16;
        let chunks = if few { 2 } else { 2 + more };
        (kind, kind.chunks().map_or(chunks, |_| 1))
    }

    /// Microbatches of a replica: as the gene says, or the next number that can be run.
    fn microbatches(&self, kind: ScheduleKind, pp: usize) -> usize {
        let nearest = kind.nearest_microbatches(pp, self.batch.2 + 1);
        let more = if kind == ScheduleKind::DualPipeV {
            self.batch.2
        } else {
            0
        };
        nearest.into_iter().max().unwrap_or(1) + more
    }

    /// Layers of each chunk, and whether that is another cut than the even one.
    fn stage_layers(&self, dtype: Dtype, places: usize) -> (Vec<usize>, bool) {
        let (extra, uneven, first) = self.layers;
        let extra = if dtype == Dtype::Bf16 { 0 } else { extra };
        let layers = places + extra;
        let even: Vec<usize> = (0..places)
            .map(|place| quintet_collectives::chunk::chunk_len(layers, places, place))
            .collect();
        if !uneven || places == 1 {
            return (even, false);
        }
        // One chunk takes all that is more than one each, and there is at least one of that.
        let mut counts = vec![1; places];
        counts[first % places] += extra.max(1);
        (counts, true)
    }

    fn model(&self, (tp, ulysses): (usize, usize), layers: usize, tied: bool) -> ModelConfig {
        let heads = tp * ulysses * (self.heads.0 + 1);
        let one = |a: usize, b: usize| a.is_multiple_of(b) || b.is_multiple_of(a);
        let fits = |kv: &usize| {
            let here = (kv / tp).max(1);
            heads.is_multiple_of(*kv) && one(*kv, tp) && one(here, ulysses)
        };
        let kv: Vec<usize> = (1..=heads).rev().filter(fits).collect();
        ModelConfig {
            // A text with blank lines has the byte of a line's end.
            vocab: self.widths.2 + if self.context.1 { 11 } else { 2 },
            hidden: self.widths.0 + 4,
            layers,
            heads,
            kv_heads: kv[self.heads.1 % kv.len()],
            head_dim: 2 * (self.heads.2 + 1),
            ffn: self.widths.1 + 1,
            tied,
            architecture: ARCHITECTURES[self.architecture],
            ..Job::default().model
        }
    }

    /// `mask_fraction` and `mask_samples`.
    fn mask(&self, samples: usize) -> (f64, Option<f64>) {
        match MASKS[self.mask] {
            Mask::Fraction(f) => (f, None),
            Mask::AllButFew => (0.0, Some((1.0 - 1.5 / samples as f64).max(0.5))),
            Mask::All => (0.0, Some(1.0)),
        }
    }

    fn optimizer(&self, dtype: Dtype, clip: bool, decay: bool) -> OptimizerOptions {
        let (adam, lower) = self.optimizer;
        // In f32 and bf16 the first steps of AdamW are the signs of gradients: no bound but 1 holds there.
        let kind = if adam && dtype == Dtype::F64 {
            OptimizerKind::AdamW
        } else {
            OptimizerKind::Sgd
        };
        let lr = match (kind, lower, dtype) {
            (OptimizerKind::AdamW, ..) => 0.01,
            (_, true, _) | (_, _, Dtype::F32 | Dtype::Bf16) => 0.1,
            _ => 1.0,
        };
        OptimizerOptions {
            kind,
            lr,
            clip_grad: if clip { 0.3 } else { 0.0 },
            weight_decay: if decay { 0.1 } else { 0.0 },
            // Where gradients cancel to nothing, AdamW still takes a step of lr |rounding| / eps.
            eps: 1e-6,
            ..Job::verify().optimizer
        }
    }
}

/// Of a width at which 8 bits say something of a gradient after two steps: three through as narrow
/// a model, at the rate that f64 bears, are chaos.
fn for_8_bits(mut job: Job) -> Job {
    job.steps = 2;
    job.optimizer.lr = 0.02;
    job.model.hidden += 8;
    job
}

impl ExpertGenes {
    /// ep and etp, of so many ranks that experts are folded into: the pairs whose product divides
    /// them, those that cut nothing or only one way no more often than the others.
    fn degrees(&self, folded: usize) -> (usize, usize) {
        let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
        let pairs = divisors(folded).flat_map(|ep| divisors(folded / ep).map(move |etp| (ep, etp)));
        let pairs: Vec<(usize, usize)> = pairs.collect();
        pairs[self.cut % pairs.len()]
    }

    fn config(&self, ep: usize) -> MoeConfig {
        let [sigmoid, plain, scaled, bias, aux, z, dense] = self.flags;
        let experts = ep * (self.lens.0 + 1);
        let topk = (self.lens.1 + 1).min(experts);
        MoeConfig {
            score: if sigmoid {
                Score::Sigmoid
            } else {
                Score::Softmax
            },
            normalize: !plain,
            scale: if scaled { 1.5 } else { 1.0 },
            selection_bias: bias,
            bias_update_rate: 0.01,
            aux_loss: if aux { 0.3 } else { 0.0 },
            z_loss: if z { 0.1 } else { 0.0 },
            capacity_factor: CAPACITIES[self.capacity],
            shared_ffn: if self.shared > 0 { 3 } else { 0 },
            shared_gate: self.shared > 1,
            first_dense: usize::from(dense),
            ..MoeConfig::new(experts, topk, self.lens.2 + 1)
        }
    }
}
