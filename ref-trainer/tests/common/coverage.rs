//! What a run of draws has met, so that a suite that stops looking somewhere fails.

use std::collections::BTreeMap;
use std::fmt;

use quintet_parallel_layers::Recompute;
use quintet_parallel_layers::moe::Score;
use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_planner::CpComm;
use quintet_planner::config::MoeConfig;
use quintet_ref_trainer::data::RandomMask;
use quintet_ref_trainer::job::OptimizerKind;

use super::Draw;

/// What a draw has in effect, and could have had.
struct Feature {
    name: &'static str,
    /// Whether the mesh lets a draw have it at all.
    possible: bool,
    /// Whether it does something in this draw.
    on: bool,
}

/// Counts of draws.
#[derive(Debug, Default)]
pub struct Coverage {
    draws: usize,
    /// By feature: draws in which it is possible, and in which it is on.
    single: BTreeMap<&'static str, (usize, usize)>,
    pairs: BTreeMap<(&'static str, &'static str), usize>,
}

/// Every two of these must meet.
const PAIRED: [&str; 34] = [
    "dp",
    "tp",
    "pp",
    "cp",
    "ring",
    "all-gather",
    "ulysses",
    "ulysses inside",
    "documents",
    "window",
    "sequence-parallel",
    "zero",
    "zero 2, 3",
    "zero 3",
    "hybrid",
    "tied",
    "uneven stages",
    "several chunks a stage",
    "kv heads < tp",
    "masked",
    "gpipe",
    "interleaved",
    "zb-h1",
    "dualpipe-v",
    "clip",
    "experts",
    "ep",
    "etp",
    "capacity",
    "aux loss",
    "shared experts",
    "recompute selective",
    "recompute full",
    "dropout",
];
/// Only one of these is in a draw, so that each is in a tenth of those that could have it.
const KINDS: [&str; 4] = ["gpipe", "interleaved", "zb-h1", "dualpipe-v"];
/// A draw has at most one of each of these.
const EITHER: [&[&str]; 5] = [
    &KINDS,
    &["ring", "all-gather"],
    &["recompute selective", "recompute full"],
    &["gpipe", "several chunks a stage"],
    &["zb-h1", "several chunks a stage"],
];
/// Each of these must be in a quarter of all draws, the others where they are possible.
const STRICT: [&str; 8] = [
    "dp",
    "tp",
    "pp",
    "cp",
    "ep",
    "etp",
    "several chunks a stage",
    "microbatches",
];
/// Rare by nature: they must occur.
const RARE: [&str; 7] = [
    "hybrid, several shards",
    "nothing valid in a step",
    "empty shard of vocab",
    "empty shard of ffn",
    "adamw",
    "more than 8 ranks",
    "16 ranks",
];

fn features(draw: &Draw, clipped: bool) -> Vec<Feature> {
    let (m, l, b, o) = (
        &draw.job.model,
        &draw.job.layout,
        &draw.job.batch,
        &draw.job.optimizer,
    );
    let valid = draw.valid();
    let none = |step: &Vec<usize>| step.contains(&0) && step.iter().sum::<usize>() > 0;
    let feature = |name, possible, on| Feature {
        name,
        possible,
        on: possible && on,
    };
    let everywhere = |name, on| feature(name, true, on);
    let moe = m.moe.is_some();
    let of_moe =
        |name, on: fn(&MoeConfig) -> bool| feature(name, moe, m.moe.as_ref().is_some_and(on));
    vec![
        everywhere("dp", l.dp > 1),
        everywhere("tp", l.tp > 1),
        everywhere("pp", l.pp > 1),
        everywhere("cp", l.cp > 1),
        feature(
            "ring",
            l.cp > 1,
            l.cp_outer() > 1 && l.cp_comm == CpComm::Ring,
        ),
        feature("all-gather", l.cp > 1, l.cp_comm == CpComm::AllGather),
        feature("ulysses", l.cp > 1, l.ulysses() > 1),
        feature(
            "ulysses inside",
            l.cp > 2 && l.cp.is_multiple_of(2),
            l.ulysses() > 1 && l.cp_outer() > 1,
        ),
        feature(
            "kv heads < ulysses",
            l.ulysses() > 1,
            m.kv_heads / l.tp < l.ulysses(),
        ),
        everywhere("documents", draw.job.pack_documents),
        everywhere("window", m.window.is_some_and(|w| w < b.seq)),
        everywhere("microbatches", b.microbatches() / l.dp > 1),
        everywhere("samples in a microbatch", b.micro_batch > 1),
        feature("sequence-parallel", l.tp > 1, l.sequence_parallel),
        feature("zero", l.dp * l.cp > 1, l.zero_stage > 0),
        feature("zero 2, 3", l.dp * l.cp > 1, l.zero_stage > 1),
        feature("zero 3", l.dp * l.cp > 1, l.zero_stage == 3),
        feature(
            "hybrid",
            l.dp * l.cp > 1 && l.zero_stage > 0,
            l.hybrid_shard_size.is_some(),
        ),
        feature(
            "hybrid, several shards",
            l.dp * l.cp > 3 && l.zero_stage > 0,
            l.hybrid_shard_size.is_some_and(|h| h > 1),
        ),
        everywhere("tied", m.tied),
        feature(
            "tied over stages",
            l.pp > 1 && l.schedule != ScheduleKind::DualPipeV,
            m.tied,
        ),
        feature("uneven stages", l.pp > 1, l.stage_layers.is_some()),
        everywhere("kv heads < heads", m.kv_heads < m.heads),
        feature("kv heads < tp", l.tp > 1, m.kv_heads < l.tp),
        feature("gpipe", l.pp > 1, l.schedule == ScheduleKind::GPipe),
        feature(
            "interleaved",
            l.pp > 1,
            l.schedule == ScheduleKind::Interleaved,
        ),
        feature("zb-h1", l.pp > 1, l.schedule == ScheduleKind::ZbH1),
        feature(
            "dualpipe-v",
            l.pp > 1,
            l.schedule == ScheduleKind::DualPipeV,
        ),
        everywhere("several chunks a stage", l.chunks() > 1),
        feature(
            "a table borrowed from another chunk",
            l.chunks() > 1 && (l.pp == 1 || l.schedule == ScheduleKind::DualPipeV),
            m.tied,
        ),
        everywhere("recompute selective", l.recompute == Recompute::Selective),
        everywhere("recompute full", l.recompute == Recompute::Full),
        everywhere("dropout", m.dropout > 0.0),
        everywhere("several buckets", l.bucket_bytes < 1 << 20),
        everywhere("masked", draw.job.mask() != RandomMask::default()),
        feature(
            "a replica with no valid token",
            l.dp > 1,
            valid.iter().any(none),
        ),
        everywhere("clip", clipped),
        everywhere("weight decay", o.weight_decay > 0.0),
        everywhere("any order", l.any_order),
        everywhere("by messages", draw.job.by_messages),
        everywhere("two threads a rank", draw.job.threads_per_rank > 1),
        feature(
            "tp cuts tokens unevenly",
            // Of a sequence over cp a rank has an even number of tokens.
            l.tp > 2 || (l.tp > 1 && l.cp == 1),
            (b.seq * b.micro_batch / l.cp) % l.tp > 0,
        ),
        feature(
            "tp cuts vocab unevenly",
            l.tp > 1,
            !m.vocab.is_multiple_of(l.tp),
        ),
        everywhere(
            "nothing valid in a step",
            valid.iter().any(|s| s.iter().sum::<usize>() == 0),
        ),
        feature("empty shard of vocab", l.tp > 2, m.vocab < l.tp),
        feature("empty shard of ffn", l.tp > 2, m.ffn < l.tp),
        everywhere("adamw", o.kind == OptimizerKind::AdamW),
        everywhere("more than 8 ranks", l.world() > 8),
        everywhere("16 ranks", l.world() == 16),
        everywhere("experts", m.moe.is_some()),
        feature("ep", moe && l.dp * l.cp * l.tp > 1, l.ep > 1),
        feature("etp", moe && l.dp * l.cp * l.tp > 1, l.etp > 1),
        of_moe("several choices", |moe| moe.topk > 1),
        of_moe("sigmoid scores", |moe| moe.score == Score::Sigmoid),
        of_moe("weights as they are", |moe| !moe.normalize),
        of_moe("bias on the choice", |moe| moe.selection_bias),
        of_moe("aux loss", |moe| moe.aux_loss > 0.0),
        of_moe("z-loss", |moe| moe.z_loss > 0.0),
        of_moe("capacity", |moe| moe.capacity_factor.is_some()),
        of_moe("shared experts", |moe| moe.shared_ffn > 0),
        of_moe("gated shared experts", |moe| moe.shared_gate),
        of_moe("a dense first block", |moe| moe.first_dense > 0),
        everywhere(
            "hidden is not heads x head_dim",
            m.hidden != m.heads * m.head_dim,
        ),
    ]
}

impl Coverage {
    /// Counts a draw; `clipped` says whether the limit of the norm was felt.
    pub fn add(&mut self, draw: &Draw, clipped: bool) {
        let features = features(draw, clipped);
        self.draws += 1;
        for f in &features {
            let (possible, on) = self.single.entry(f.name).or_default();
            *possible += usize::from(f.possible);
            *on += usize::from(f.on);
        }
        let on = |name: &str| features.iter().any(|f| f.name == name && f.on);
        for (i, a) in PAIRED.iter().enumerate() {
            for b in &PAIRED[i + 1..] {
                let either = |of: &[&str]| of.contains(a) && of.contains(b);
                if EITHER.iter().any(|of| either(of)) {
                    continue;
                }
                *self.pairs.entry((a, b)).or_default() += usize::from(on(a) && on(b));
            }
        }
    }

    /// What has not been met as often as it must be.
    pub fn gaps(&self) -> Vec<String> {
        let mut gaps = Vec::new();
        for (name, &(possible, on)) in &self.single {
            let of = if STRICT.contains(name) {
                self.draws
            } else {
                possible
            };
            let needed = if RARE.contains(name) {
                1
            } else if KINDS.contains(name) {
                of.div_ceil(10)
            } else {
                of.div_ceil(4)
            };
            if on < needed {
                gaps.push(format!("{name}: in {on} draws of {of}, needed in {needed}"));
            }
        }
        let never = self.pairs.iter().filter(|(_, n)| **n == 0);
        gaps.extend(never.map(|((a, b), _)| format!("{a} never meets {b}")));
        gaps
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<34}{:>6}{:>10}{:>8}",
            format!("of {} draws", self.draws),
            "on",
            "possible",
            "share"
        )?;
        for (name, (possible, on)) in &self.single {
            let share = 100.0 * *on as f64 / (*possible).max(1) as f64;
            writeln!(f, "{name:<34}{on:>6}{possible:>10}{share:>7.0}%")?;
        }
        let mut rarest: Vec<_> = self.pairs.iter().collect();
        rarest.sort_by_key(|(_, n)| **n);
        write!(f, "{} pairs, the rarest:", rarest.len())?;
        for ((a, b), n) in rarest.into_iter().take(5) {
            write!(f, " {a} with {b} {n} times;")?;
        }
        writeln!(f)
    }
}
