//! What a draw is made of: small independent integers. All zero is the simplest job, so shrinking
//! ends there.

use proptest::bool::weighted;
use proptest::prelude::*;
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_parallel_layers::{Architecture, Positions, Recompute};
use quintet_planner::config::CpComm;
use quintet_ref_trainer::job::Dtype;

use super::Draw;

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
    /// Place in [`RECOMPUTES`].
    pub recompute: usize,
    /// Place in [`DROPOUTS`].
    pub dropout: usize,
    /// Of weights, data and masks.
    pub seed: u64,
}

/// What a mixture of experts is made of.
#[derive(Debug, Clone)]
pub struct ExpertGenes {
    /// Place in the valid pairs of ep and etp.
    pub cut: usize,
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
pub(super) const WAYS: [(CpComm, bool); 6] = [
    (CpComm::Ring, false),
    (CpComm::AllGather, false),
    (CpComm::Ulysses, false),
    (CpComm::Ring, true),
    (CpComm::Ring, true),
    (CpComm::AllGather, true),
];

/// How much is masked. What `--mask-fraction` says falls half on tokens and half on samples.
pub(super) const MASKS: [Mask; 8] = [
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
pub(super) enum Mask {
    /// As the command line has it.
    Fraction(f64),
    /// A sample or two of a step are left, so that most replicas have none.
    AllButFew,
    /// Everything.
    All,
}

/// Room of an expert: without end, hardly any, little, enough for most.
pub(super) const CAPACITIES: [Option<f64>; 4] = [None, Some(0.2), Some(0.7), Some(1.3)];

/// Llama most often; GPT-2 with as many positions as any draw has; every part of the others.
pub(super) const ARCHITECTURES: [Architecture; 6] = [
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
        softcap: Some(0.7),
        ..Architecture::LLAMA
    },
];

/// The simplest first.
pub(super) const SCHEDULES: [ScheduleKind; 9] = [
    ScheduleKind::OneFOneB,
    ScheduleKind::GPipe,
    ScheduleKind::GPipe,
    ScheduleKind::ZbH1,
    ScheduleKind::ZbH1,
    ScheduleKind::Interleaved,
    ScheduleKind::Interleaved,
    ScheduleKind::DualPipeV,
    ScheduleKind::DualPipeV,
];

/// What forward saves, and what is computed again.
pub(super) const RECOMPUTES: [Recompute; 4] = [
    Recompute::None,
    Recompute::Selective,
    Recompute::Full,
    Recompute::Full,
];

/// Share let go.
pub(super) const DROPOUTS: [f64; 4] = [0.0, 0.0, 0.1, 0.5];

/// From all in one bucket to one a layer.
pub(super) const BUCKETS: [usize; 4] = [1 << 20, 5_000, 700, 1];

/// All meshes of at most 16 ranks over dp, tp, pp and cp; small ones first, those that combine axes
/// more often, those more often whose cp has two factors, and large worlds, which take long, less.
pub(super) fn meshes() -> Vec<[usize; 4]> {
    let mut all = Vec::new();
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    for world in 1..=16 {
        for dp in divisors(world) {
            for tp in divisors(world / dp) {
                for pp in divisors(world / dp / tp) {
                    let mesh = [dp, tp, pp, world / dp / tp / pp];
                    let combined = mesh.iter().filter(|n| **n > 1).count();
                    let often = [1, 1, 3, 9, 27][combined] * if mesh[3] == 4 { 4 } else { 1 };
                    let often = often * if world <= 8 { 6 } else { 1 };
                    all.extend(std::iter::repeat_n(mesh, often));
                }
            }
        }
    }
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
        (0..ARCHITECTURES.len(), 0..RECOMPUTES.len()),
        (0..SCHEDULES.len(), 0..2_usize),
        (
            prop_oneof![2 => Just(0_u8), 2 => Just(1), 3 => Just(2), 4 => Just(3)],
            0..4_usize,
        ),
        any::<u32>(),
        proptest::option::weighted(0.75, experts()),
        0..DROPOUTS.len(),
    );
    (shape, flags, rest).prop_map(move |((mesh, heads, widths, layers, batch), flags, rest)| {
        let (optimizer, mask, bucket, context, of_blocks, schedule, zero, seed, experts, dropout) =
            rest;
        let (architecture, recompute) = of_blocks;
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
            recompute,
            dropout,
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
        0..60_usize,
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
