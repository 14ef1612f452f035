//! Draws of whole jobs, and what every file of this suite does with them.
//!
//! ```text
//! genes   small independent integers; all zero is the simplest job, so shrinking ends there
//!   |     Genes::draw: each constraint of `validate` holds by construction, nothing is rejected
//!   v
//! Draw    a job, a loss mask, a text
//! ```
// Every test file is a crate of its own and uses a part of this one.
#![allow(dead_code)]

pub mod coverage;
pub mod plant;
pub mod watched;

use std::fmt;
use std::path::PathBuf;

use proptest::bool::weighted;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use quintet_parallel_layers::moe::Score;
use quintet_parallel_layers::philox::Stream;
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_parallel_layers::{Architecture, Positions, Recompute};
use quintet_planner::config::{Batch, CpComm, Layout, ModelConfig, MoeConfig};
use quintet_ref_trainer::compare::compare;
use quintet_ref_trainer::data::{Corpus, RandomMask, Samples};
use quintet_ref_trainer::job::{DataSource, Dtype, Job, OptimizerKind, OptimizerOptions};
use quintet_ref_trainer::record::Step;

/// What a draw is made of. Every gene stands alone, and 0 or false is the simplest.
#[derive(Debug, Clone)]
pub struct Genes {
    /// Place in [`meshes`].
    pub mesh: usize,
    /// Heads a rank, KV heads (a place in the valid ones, no repetition first), half of head_dim.
    pub heads: (usize, usize, usize),
    /// What hidden, ffn and vocab have beyond the least.
    pub widths: (usize, usize, usize),
    /// Layers beyond one a chunk, and the chunks that get them.
    pub layers: (usize, bool, usize),
    /// Sequence length, microbatch and microbatches of a replica, beyond the least.
    pub batch: (usize, usize, usize),
    /// Sequence-parallel, hybrid sharding, tied, any order, clipping, weight decay, two threads.
    pub flags: [bool; 7],
    /// Place in [`SCHEDULES`], chunks a stage beyond two where that is free.
    pub schedule: (usize, usize),
    /// AdamW instead of descent, with a lower learning rate, without.
    pub optimizer: (bool, bool),
    /// Place in [`MASKS`].
    pub mask: usize,
    /// Place in [`BUCKETS`].
    pub bucket: usize,
    /// Place in [`WAYS`], documents, tokens of a window (0 is none).
    pub context: (usize, bool, usize),
    /// ZeRO stage, and the place of the hybrid one's shards among the divisors of dp.
    pub zero: (u8, usize),
    /// Experts, if there are any.
    pub experts: Option<ExpertGenes>,
    /// Place in [`ARCHITECTURES`].
    pub architecture: usize,
    /// Of weights, data and masks.
    pub seed: u64,
}

/// What a mixture of experts is made of.
#[derive(Debug, Clone)]
pub struct ExpertGenes {
    /// Places in the valid degrees of ep, and then of etp.
    pub cut: (usize, usize),
    /// Experts a rank of ep, choices of a token, width, each beyond the least.
    pub lens: (usize, usize, usize),
    /// Sigmoid scores, weights as they are, a factor on them, a bias on the choice, a loss of
    /// balance, a z-loss, the first block dense.
    pub flags: [bool; 7],
    /// Place in [`CAPACITIES`].
    pub capacity: usize,
    /// No shared experts, some, some with a gate.
    pub shared: usize,
}

/// How a cut sequence attends, and whether with ulysses inside: then the outer factor has two
/// places, where cp lets it.
const WAYS: [(CpComm, bool); 6] = [
    (CpComm::Ring, false),
    (CpComm::AllGather, false),
    (CpComm::Ulysses, false),
    (CpComm::Ring, true),
    (CpComm::Ring, true),
    (CpComm::AllGather, true),
];

/// A job with its data.
#[derive(Debug, Clone)]
pub struct Draw {
    /// The job.
    pub job: Job,
    /// Its loss mask.
    pub mask: RandomMask,
}

/// How much is masked. What `--mask-fraction` says falls half on tokens and half on samples.
const MASKS: [Mask; 8] = [
    Mask::Fraction(0.0),
    Mask::Fraction(0.0),
    Mask::Fraction(0.6),
    Mask::Fraction(0.95),
    Mask::Fraction(0.95),
    Mask::AllButFew,
    Mask::AllButFew,
    Mask::All,
];

#[derive(Debug, Clone, Copy)]
enum Mask {
    /// As the command line has it.
    Fraction(f64),
    /// A sample or two of a step are left, so that most replicas have none.
    AllButFew,
    /// Everything.
    All,
}

/// Room of an expert: without end, hardly any, little, enough for most.
const CAPACITIES: [Option<f64>; 4] = [None, Some(0.2), Some(0.7), Some(1.3)];

/// Llama most often; GPT-2 with as many positions as any draw has; every part of the others.
const ARCHITECTURES: [Architecture; 6] = [
    Architecture::LLAMA,
    Architecture::LLAMA,
    Architecture::gpt2(48),
    Architecture {
        qkv_bias: true,
        ..Architecture::LLAMA
    },
    Architecture {
        qk_norm: true,
        ..Architecture::LLAMA
    },
    Architecture {
        positions: Positions::PartRotary(2),
        qkv_bias: true,
        qk_norm: true,
        ..Architecture::LLAMA
    },
];

/// The simplest first.
const SCHEDULES: [ScheduleKind; 5] = [
    ScheduleKind::OneFOneB,
    ScheduleKind::GPipe,
    ScheduleKind::ZbH1,
    ScheduleKind::Interleaved,
    ScheduleKind::DualPipeV,
];

/// From all in one bucket to one a layer.
const BUCKETS: [usize; 4] = [1 << 20, 5_000, 700, 1];

/// All meshes of at most 8 ranks over dp, tp, pp and cp, and two of each; small ones first, those
/// that combine axes more often, and those more often whose cp has two factors.
fn meshes() -> Vec<[usize; 4]> {
    let mut all = Vec::new();
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    for world in 1..=8 {
        for dp in divisors(world) {
            for tp in divisors(world / dp) {
                for pp in divisors(world / dp / tp) {
                    let mesh = [dp, tp, pp, world / dp / tp / pp];
                    let combined = mesh.iter().filter(|n| **n > 1).count();
                    let often = [1, 1, 3, 9][combined] * if mesh[3] == 4 { 3 } else { 1 };
                    all.extend(std::iter::repeat_n(mesh, often));
                }
            }
        }
    }
    all.extend([[2; 4]; 6]);
    all
}

/// Every valid draw of `dtype`.
pub fn draws(dtype: Dtype) -> impl Strategy<Value = Draw> {
    let shape = (
        0..meshes().len(),
        (0..3_usize, 0..6_usize, 0..3_usize),
        (
            0..14_usize,
            0..24_usize,
            prop_oneof![3 => 0..30_usize, 1 => 0..3_usize],
        ),
        (0..3_usize, weighted(0.6), 0..8_usize),
        (
            0..8_usize,
            0..3_usize,
            prop_oneof![1 => Just(0), 4 => 1..5_usize],
        ),
    );
    let flag = |p| weighted(p);
    let flags = [
        flag(0.6),
        flag(0.6),
        flag(0.5),
        flag(0.3),
        flag(0.5),
        flag(0.4),
        flag(0.3),
    ];
    let rest = (
        (weighted(0.3), weighted(0.4)),
        0..MASKS.len(),
        0..BUCKETS.len(),
        (
            0..WAYS.len(),
            weighted(0.4),
            prop_oneof![1 => Just(0), 1 => 1..9_usize],
        ),
        0..ARCHITECTURES.len(),
        (0..SCHEDULES.len(), 0..2_usize),
        (
            prop_oneof![2 => Just(0_u8), 2 => Just(1), 3 => Just(2), 4 => Just(3)],
            0..4_usize,
        ),
        any::<u32>(),
        proptest::option::weighted(0.6, experts()),
    );
    (shape, flags, rest).prop_map(move |((mesh, heads, widths, layers, batch), flags, rest)| {
        let (optimizer, mask, bucket, context, architecture, schedule, zero, seed, experts) = rest;
        let seed = u64::from(seed);
        let genes = Genes {
            mesh,
            heads,
            widths,
            layers,
            batch,
            flags,
            optimizer,
            mask,
            bucket,
            context,
            zero,
            architecture,
            schedule,
            seed,
            experts,
        };
        genes.draw(dtype)
    })
}

fn experts() -> impl Strategy<Value = ExpertGenes> {
    let flags = [0.5, 0.4, 0.4, 0.5, 0.6, 0.5, 0.4].map(weighted);
    (
        (0..8_usize, 0..8_usize),
        (0..3_usize, 0..4_usize, 0..7_usize),
        flags,
        prop_oneof![1 => Just(0), 1 => 0..CAPACITIES.len()],
        0..3_usize,
    )
        .prop_map(|(cut, lens, flags, capacity, shared)| ExpertGenes {
            cut,
            lens,
            flags,
            capacity,
            shared,
        })
}

impl ExpertGenes {
    /// ep and etp, of so many ranks that experts are folded into.
    fn degrees(&self, folded: usize) -> (usize, usize) {
        let divisor = |n: usize, place: usize| {
            let all: Vec<usize> = (1..=n).filter(|d| n.is_multiple_of(*d)).collect();
            all[place % all.len()]
        };
        let ep = divisor(folded, self.cut.0);
        (ep, divisor(folded / ep, self.cut.1))
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

impl Genes {
    fn draw(&self, dtype: Dtype) -> Draw {
        let [dp, tp, pp, cp] = meshes()[self.mesh];
        let (way, documents, window) = self.context;
        let (cp_comm, mixed) = WAYS[way];
        let mixed = mixed && cp > 2 && cp.is_multiple_of(2);
        let [sequence_parallel, hybrid, tied, any_order, clip, decay, two] = self.flags;
        let (schedule, virtual_stages) = self.kind(pp);
        let places = pp * schedule.chunks().unwrap_or(virtual_stages);
        let (counts, uneven) = self.stage_layers(places);
        let (ep, etp) = self.experts.as_ref().map_or((1, 1), |e| e.degrees(dp * tp));
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
            recompute: Recompute::None,
        };
        let micro_batch = self.batch.1 + 1;
        let batch = Batch {
            // With one key, q and k have no gradient but rounding, of which the condition of the
            // oracle, where it is zero, does not tell how much; that has a test of its own.
            seq: if cp == 1 {
                self.batch.0 + 2
            } else {
                2 * cp * (1 + self.batch.0 / 3)
            },
            micro_batch,
            global_batch: micro_batch * dp * self.microbatches(schedule, pp),
        };
        let (mask_fraction, mask) = self.mask(batch.global_batch);
        let job = Job {
            model_name: "drawn".into(),
            model: ModelConfig {
                window: (window > 0).then_some(window),
                moe: self.experts.as_ref().map(|experts| experts.config(ep)),
                ..self.model((tp, layout.ulysses()), counts.iter().sum(), tied)
            },
            layout,
            pack_documents: documents,
            batch,
            mask_fraction,
            dtype,
            seed: self.seed,
            optimizer: self.optimizer(dtype, clip, decay),
            threads_per_rank: 1 + usize::from(two),
            ..Job::verify()
        };
        Draw { job, mask }
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
    fn kind(&self, pp: usize) -> (ScheduleKind, usize) {
        let (kind, more) = (SCHEDULES[self.schedule.0], self.schedule.1);
        if pp < kind.least_stages() {
            return (ScheduleKind::OneFOneB, 1);
        }
        // Not so many layers that a draw takes long.
        let chunks = if pp > 3 { 2 } else { 2 + more };
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
    fn stage_layers(&self, places: usize) -> (Vec<usize>, bool) {
        let (extra, uneven, first) = self.layers;
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

    fn mask(&self, samples: usize) -> (f64, RandomMask) {
        let mask = |tokens, samples| RandomMask { tokens, samples };
        match MASKS[self.mask] {
            Mask::Fraction(f) => (f, mask(f / 2.0, f / 2.0)),
            Mask::AllButFew => (0.0, mask(0.0, (1.0 - 1.5 / samples as f64).max(0.5))),
            Mask::All => (0.0, mask(1.0, 0.0)),
        }
    }

    fn optimizer(&self, dtype: Dtype, clip: bool, decay: bool) -> OptimizerOptions {
        let (adam, lower) = self.optimizer;
        // In f32 the first steps of AdamW are the signs of gradients: no bound but 1 holds there.
        let kind = if adam && dtype == Dtype::F64 {
            OptimizerKind::AdamW
        } else {
            OptimizerKind::Sgd
        };
        let lr = match (kind, lower, dtype) {
            (OptimizerKind::AdamW, ..) => 0.01,
            (_, true, _) | (_, _, Dtype::F32) => 0.1,
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

impl Draw {
    /// The samples: of a text of seeded bytes below the vocabulary.
    pub fn samples(&self) -> Samples {
        let corpus = Corpus::from_bytes("(drawn)", &self.text()).expect("a text");
        let samples = Samples::new(corpus, self.job.seed, self.job.batch.seq);
        let samples = samples.expect("a text long enough").with_mask(self.mask);
        samples.with_documents(self.job.pack_documents)
    }

    fn text(&self) -> Vec<u8> {
        let mut bytes = text(self.job.model.vocab, 400, self.job.seed);
        if self.job.pack_documents {
            blank_lines(&mut bytes, self.job.seed);
        }
        bytes
    }

    /// Valid tokens of each replica in each step.
    pub fn valid(&self) -> Vec<Vec<usize>> {
        let (batch, dp) = (self.job.batch, self.job.layout.dp);
        let (samples, each) = (self.samples(), batch.global_batch / dp);
        let replica = |step, r: usize| {
            let mine = (r * each..(r + 1) * each).map(|i| samples.sample(step, i as u64).valid());
            mine.sum()
        };
        let steps = 1..=self.job.steps;
        steps
            .map(|step| (0..dp).map(|r| replica(step, r)).collect())
            .collect()
    }

    /// How to run this draw again from a shell, where its mask can be said there: writes the job
    /// and the text beside the test's other files.
    pub fn replay(&self) -> String {
        let said = self.job.mask_fraction / 2.0;
        if (self.mask.tokens, self.mask.samples) != (said, said) {
            return "its mask cannot be said on the command line; run this test again".into();
        }
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("failing-draw");
        let (job, text) = (folder.join("config.json"), folder.join("text"));
        let told = Job {
            data: DataSource::File(text.clone()),
            ..self.job.clone()
        };
        std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::write(&text, self.text()))
            .and_then(|()| std::fs::write(&job, told.to_json().expect("a job")))
            .map_or_else(
                |e| format!("the job could not be written: {e}"),
                |()| format!("quintet verify --config {}", job.display()),
            )
    }
}

/// Puts a blank line at every sixth place or so.
pub fn blank_lines(bytes: &mut [u8], seed: u64) {
    let stream = Stream::new(seed, "blank lines for tests");
    for at in 0..bytes.len() - 1 {
        if stream.below(at as u64, 6) == 0 {
            bytes[at..at + 2].fill(b'\n');
        }
    }
}

/// Seeded bytes below `vocab`.
pub fn text(vocab: usize, len: usize, seed: u64) -> Vec<u8> {
    let stream = Stream::new(seed, "a text for tests");
    let most = vocab.min(256) as u64;
    (0..len as u64)
        .map(|i| stream.below(i, most) as u8)
        .collect()
}

impl fmt::Display for Draw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (m, l, b, o) = (
            &self.job.model,
            &self.job.layout,
            &self.job.batch,
            &self.job.optimizer,
        );
        writeln!(
            f,
            "dp {} tp {} pp {} cp {} {} ulysses {} documents {} window {:?}",
            l.dp,
            l.tp,
            l.pp,
            l.cp,
            l.cp_comm.name(),
            l.ulysses(),
            self.job.pack_documents,
            m.window,
        )?;
        writeln!(
            f,
            "sequence-parallel {} zero {} within {:?} {} of {} chunks {:?} bucket {} any order {} threads {}",
            l.sequence_parallel,
            l.zero_stage,
            l.hybrid_shard_size,
            l.schedule.name(),
            l.chunks(),
            l.stage_layers,
            l.bucket_bytes,
            l.any_order,
            self.job.threads_per_rank,
        )?;
        writeln!(f, "ep {} etp {} {:?}", l.ep, l.etp, m.moe)?;
        writeln!(
            f,
            "vocab {} hidden {} layers {} heads {} kv {} head_dim {} ffn {} tied {}",
            m.vocab, m.hidden, m.layers, m.heads, m.kv_heads, m.head_dim, m.ffn, m.tied,
        )?;
        writeln!(f, "{:?}", m.architecture)?;
        writeln!(
            f,
            "seq {} micro {} global {} mask {:?} valid {:?}",
            b.seq,
            b.micro_batch,
            b.global_batch,
            self.mask,
            self.valid(),
        )?;
        write!(
            f,
            "{:?} {:?} lr {} clip {} decay {} seed {}",
            self.job.dtype, o.kind, o.lr, o.clip_grad, o.weight_decay, self.job.seed,
        )
    }
}

/// A runner whose cases are the same on every machine and in every run, until asked for more.
pub fn runner(cases: u32) -> TestRunner {
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 400,
        ..Config::default()
    };
    TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
}

/// Cases to run: `QUINTET_CASES` where it is set.
pub fn cases(default: u32) -> u32 {
    let asked = std::env::var("QUINTET_CASES").ok();
    asked.and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The job most small tests begin from: a small untied model, three steps of descent.
pub fn small_job() -> Job {
    let model = ModelConfig {
        vocab: 37,
        hidden: 12,
        layers: 4,
        heads: 4,
        kv_heads: 2,
        head_dim: 4,
        ffn: 10,
        tied: false,
        ..Job::default().model
    };
    let batch = Batch {
        seq: 6,
        micro_batch: 1,
        global_batch: 12,
    };
    Job {
        model,
        batch,
        layout: Layout::single(),
        seed: 11,
        ..Job::verify()
    }
}

/// The same cut over dp x tp x pp ranks.
pub fn cut(job: &Job, (dp, tp, pp): (usize, usize, usize)) -> Job {
    with(job, |layout| {
        (layout.dp, layout.tp, layout.pp) = (dp, tp, pp)
    })
}

/// The same with another layout.
pub fn with(job: &Job, change: impl FnOnce(&mut Layout)) -> Job {
    let mut job = job.clone();
    change(&mut job.layout);
    job
}

/// Samples of seeded bytes that fit the job.
pub fn samples_of(job: &Job) -> Samples {
    Draw {
        job: job.clone(),
        mask: RandomMask::default(),
    }
    .samples()
}

/// The first quantity in which two runs have not the same bits. Norms are left out where
/// `but_norm`: how they are summed may depend on what is compared.
pub fn first_difference(a: &[Step], b: &[Step], but_norm: bool) -> Option<String> {
    if a.len() != b.len() {
        return Some(format!("{} steps and {}", a.len(), b.len()));
    }
    a.iter().zip(b).enumerate().find_map(|(step, (x, y))| {
        let same = |x: f64, y: f64| x.to_bits() == y.to_bits();
        let checks = [
            ("loss", same(x.loss, y.loss)),
            ("gradients", compare(&x.grads, &y.grads).bit_equal),
            ("norm", but_norm || same(x.norm, y.norm)),
            ("parameters", compare(&x.params, &y.params).bit_equal),
        ];
        let differs = checks.into_iter().find(|(_, same)| !same);
        differs.map(|(what, _)| format!("{what} of step {}", step + 1))
    })
}
