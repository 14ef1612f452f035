//! What is trained and how it is cut: plain data, and the one place where a layout is judged.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use quintet_parallel_layers::pipeline::ScheduleKind;
use quintet_parallel_layers::{Architecture, Positions};

/// Shape of a decoder, and which one it is.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Vocabulary entries.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Decoder blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; even.
    pub head_dim: usize,
    /// Width of the MLP.
    pub ffn: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Added to the variance in norms.
    pub norm_eps: f64,
    /// Embedding and head share one table.
    pub tied: bool,
    /// Norm, MLP, positions, biases.
    pub architecture: Architecture,
}

/// How a step is cut over ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// Data parallel ranks.
    pub dp: usize,
    /// Tensor parallel ranks.
    pub tp: usize,
    /// Pipeline stages.
    pub pp: usize,
    /// Context parallel ranks.
    pub cp: usize,
    /// Expert parallel ranks (folded into dp x cp x tp).
    pub ep: usize,
    /// Expert tensor parallel ranks.
    pub etp: usize,
    /// Keep activations between blocks as Shard(token) over tp.
    pub sequence_parallel: bool,
    /// 0 to 3.
    pub zero_stage: u8,
    /// Order of work of the pipeline.
    pub schedule: ScheduleKind,
    /// Decoder blocks per stage; even (earlier stages take the remainder) where absent.
    pub stage_layers: Option<Vec<usize>>,
    /// A gradient bucket is closed once it holds this many bytes.
    pub bucket_bytes: usize,
    /// Fold contributions in any order a plan finds fast, instead of rank order.
    pub any_order: bool,
}

impl Layout {
    /// One rank.
    #[must_use]
    pub fn single() -> Self {
        Self {
            dp: 1,
            tp: 1,
            pp: 1,
            cp: 1,
            ep: 1,
            etp: 1,
            sequence_parallel: false,
            zero_stage: 0,
            schedule: ScheduleKind::OneFOneB,
            stage_layers: None,
            bucket_bytes: 1 << 20,
            any_order: false,
        }
    }

    /// Ranks in all.
    #[must_use]
    pub fn world(&self) -> usize {
        self.dp * self.tp * self.pp * self.cp
    }

    /// Chunks (virtual stages) that each pipeline rank holds.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.schedule.chunks()
    }

    /// Chunks of all stages.
    #[must_use]
    pub fn places(&self) -> usize {
        self.pp * self.chunks()
    }

    /// Where a stage's chunk lies along the model.
    #[must_use]
    pub fn place(&self, stage: usize, chunk: usize) -> usize {
        chunk * self.pp + stage
    }

    /// Decoder blocks `first..end` of the chunk that lies at `place` along the model.
    #[must_use]
    pub fn blocks(&self, layers: usize, place: usize) -> core::ops::Range<usize> {
        match &self.stage_layers {
            None => quintet_collectives::chunk::chunk(layers, self.places(), place),
            Some(counts) => {
                let first = counts.iter().take(place).sum();
                first..first + counts.get(place).copied().unwrap_or(0)
            }
        }
    }
}

/// How much is learnt from in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Tokens predicted per sample.
    pub seq: usize,
    /// Samples in a microbatch.
    pub micro_batch: usize,
    /// Samples in a step.
    pub global_batch: usize,
}

impl Batch {
    /// Microbatches in a step, over all data parallel ranks.
    #[must_use]
    pub fn microbatches(&self) -> usize {
        self.global_batch / self.micro_batch.max(1)
    }
}

/// A layout that cannot be, in one sentence with the nearest valid choices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub String);

/// Judges a layout for a model and a batch: the one list of constraints, shared by planner,
/// trainer and tests.
///
/// # Errors
/// The first constraint that does not hold.
pub fn validate(model: &ModelConfig, layout: &Layout, batch: &Batch) -> Result<(), Invalid> {
    let no = |text: String| Err(Invalid(text));
    let l = layout;
    for (name, degree) in [
        ("dp", l.dp),
        ("tp", l.tp),
        ("pp", l.pp),
        ("cp", l.cp),
        ("ep", l.ep),
        ("etp", l.etp),
    ] {
        if degree == 0 {
            return no(format!("{name}=0 means no rank at all; the least is 1"));
        }
    }
    for (name, len) in [
        ("vocab", model.vocab),
        ("hidden", model.hidden),
        ("layers", model.layers),
        ("heads", model.heads),
        ("kv_heads", model.kv_heads),
        ("head_dim", model.head_dim),
        ("ffn", model.ffn),
        ("seq-length", batch.seq),
        ("micro-batch-size", batch.micro_batch),
        ("global-batch-size", batch.global_batch),
    ] {
        if len == 0 {
            return no(format!("{name} is 0; it must be at least 1"));
        }
    }
    if !model.heads.is_multiple_of(model.kv_heads) {
        return no(format!(
            "{} KV heads do not divide {} heads; valid: {}",
            model.kv_heads,
            model.heads,
            divisors(model.heads)
        ));
    }
    let rotary = model.architecture.rotary(model.head_dim);
    if !rotary.is_multiple_of(2) {
        return no(format!(
            "{rotary} elements of a head turn, which is odd; rotary positions pair them"
        ));
    }
    if let Positions::Learned(rows) = model.architecture.positions
        && batch.seq > rows
    {
        return no(format!(
            "seq-length {} is more than the model's {rows} learned positions; use at most {rows}",
            batch.seq
        ));
    }
    for (flag, degree) in [("cp", l.cp), ("ep", l.ep), ("etp", l.etp)] {
        if degree > 1 {
            return no(format!("{flag}={degree} is not built yet; use {flag}=1"));
        }
    }
    if l.zero_stage > 1 {
        return no(format!(
            "zero-stage {} is not built yet; use 0 or 1",
            l.zero_stage
        ));
    }
    if !model.heads.is_multiple_of(l.tp) {
        return no(format!(
            "tp={} does not divide {} heads; divisors: {}",
            l.tp,
            model.heads,
            divisors(model.heads)
        ));
    }
    if !model.kv_heads.is_multiple_of(l.tp) && !l.tp.is_multiple_of(model.kv_heads) {
        return no(format!(
            "tp={} and {} KV heads: one must divide the other",
            l.tp, model.kv_heads
        ));
    }
    if l.pp > model.layers {
        return no(format!(
            "pp={} is more stages than the model's {} layers; use at most {}",
            l.pp, model.layers, model.layers
        ));
    }
    if let Some(counts) = &l.stage_layers {
        let sum: usize = counts.iter().sum();
        if counts.len() != l.pp || sum != model.layers || counts.contains(&0) {
            return no(format!(
                "pipeline-layout {counts:?} must list {} stages of at least one layer that sum to {}",
                l.pp, model.layers
            ));
        }
    }
    let unit = batch.micro_batch * l.dp;
    if !batch.global_batch.is_multiple_of(unit) {
        let below = (batch.global_batch / unit) * unit;
        return no(format!(
            "global-batch-size {} is no multiple of micro-batch-size {} x dp {} = {unit}; nearest: {}",
            batch.global_batch,
            batch.micro_batch,
            l.dp,
            if below == 0 {
                format!("{unit}")
            } else {
                format!("{below} or {}", below + unit)
            }
        ));
    }
    if l.bucket_bytes == 0 {
        return no(String::from(
            "bucket-bytes is 0; a bucket holds at least one byte",
        ));
    }
    Ok(())
}

fn divisors(n: usize) -> String {
    let all: Vec<String> = (1..=n)
        .filter(|d| n.is_multiple_of(*d))
        .map(|d| format!("{d}"))
        .collect();
    all.join(", ")
}
