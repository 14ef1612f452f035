//! The one place where a layout is judged.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use quintet_parallel_layers::Positions;
use quintet_parallel_layers::pipeline::ScheduleKind;

use super::{Batch, Layout, ModelConfig};

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
    if !(0.0..1.0).contains(&model.dropout) {
        return no(format!(
            "dropout is {}; it must be at least 0 and less than 1",
            model.dropout
        ));
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
    experts(model, l)?;
    if l.zero_stage > 3 {
        return no(format!(
            "zero-stage {}: there are 0, 1, 2 and 3",
            l.zero_stage
        ));
    }
    if let Some(within) = l.hybrid_shard_size {
        hybrid(l, within)?;
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
        let (heads, kv) = (model.heads, model.kv_heads);
        let fits = |tp: &usize| {
            heads.is_multiple_of(*tp) && (kv.is_multiple_of(*tp) || tp.is_multiple_of(kv))
        };
        let valid: Vec<String> = (1..=heads).filter(fits).map(|tp| format!("{tp}")).collect();
        return no(format!(
            "tp={} and {kv} KV heads: one must divide the other; valid: {}",
            l.tp,
            valid.join(", ")
        ));
    }
    context(model, l, batch)?;
    chunks(model, l)?;
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
    microbatches(l, batch)?;
    if l.bucket_bytes == 0 {
        return no(String::from(
            "bucket-bytes is 0; a bucket holds at least one byte",
        ));
    }
    Ok(())
}

/// Whether sequences fall into equal pieces, and heads to a ulysses group.
fn context(model: &ModelConfig, l: &Layout, batch: &Batch) -> Result<(), Invalid> {
    let no = |text: String| Err(Invalid(text));
    if model.window == Some(0) {
        return no(String::from(
            "a window of 0 tokens sees nothing, not even itself; the least is 1",
        ));
    }
    if let Some(cap) = model.architecture.softcap
        && !(cap > 0.0 && cap.is_finite())
    {
        return no(format!(
            "scores are capped at {cap}; a cap is a number above 0, such as 50"
        ));
    }
    let pieces = l.cp.saturating_mul(2);
    if l.cp > 1 && !batch.seq.is_multiple_of(pieces) {
        let below = batch.seq / pieces * pieces;
        let nearest = match below {
            0 => format!("{pieces}"),
            _ => format!("{below} or {}", below + pieces),
        };
        return no(format!(
            "seq-length {} is no multiple of 2 x cp = {pieces}: each of {} ranks holds two pieces of a sequence; nearest: {nearest}",
            batch.seq, l.cp
        ));
    }
    let ulysses = l.ulysses();
    if ulysses == 0 || !l.cp.is_multiple_of(ulysses) {
        return no(format!(
            "ulysses-degree {ulysses} does not divide cp={}; divisors: {}",
            l.cp,
            divisors(l.cp)
        ));
    }
    if l.cp == 1 {
        return Ok(());
    }
    // Of one tensor parallel rank.
    let (heads, kv) = (model.heads / l.tp, (model.kv_heads / l.tp).max(1));
    let fits = |u: usize| heads.is_multiple_of(u) && (kv.is_multiple_of(u) || u.is_multiple_of(kv));
    if !fits(ulysses) {
        let valid: Vec<String> = (1..=l.cp)
            .filter(|u| l.cp.is_multiple_of(*u) && fits(*u))
            .map(|u| format!("{u}"))
            .collect();
        return no(format!(
            "ulysses over {ulysses} ranks cannot share the {heads} heads ({kv} KV heads) of a tensor parallel rank; at cp={} ulysses-degree may be {}, the rest a ring",
            l.cp,
            valid.join(", ")
        ));
    }
    Ok(())
}

/// Replicas that shard among themselves are a block of neighbours on dp x cp.
fn hybrid(l: &Layout, within: usize) -> Result<(), Invalid> {
    let replicas = l.dp * l.cp;
    let fits = |h: usize| {
        h > 0 && replicas.is_multiple_of(h) && (h.is_multiple_of(l.cp) || l.cp.is_multiple_of(h))
    };
    if l.zero_stage == 0 {
        return Err(Invalid(format!(
            "hybrid-shard-size {within} says which replicas shard, and under zero-stage 0 none do; use zero-stage 1, 2 or 3"
        )));
    }
    if fits(within) {
        return Ok(());
    }
    let valid: Vec<String> = (1..=replicas)
        .filter(|&h| fits(h))
        .map(|h| format!("{h}"))
        .collect();
    Err(Invalid(format!(
        "hybrid-shard-size {within} is no block of dp {} x cp {} = {replicas} replicas; valid: {}",
        l.dp,
        l.cp,
        valid.join(", ")
    )))
}

/// Judges the mixture of experts, and how it is cut.
fn experts(model: &ModelConfig, l: &Layout) -> Result<(), Invalid> {
    let no = |text: String| Err(Invalid(text));
    let Some(moe) = &model.moe else {
        for (flag, degree) in [("ep", l.ep), ("etp", l.etp)] {
            if degree > 1 {
                return no(format!(
                    "{flag}={degree} cuts experts, and the model has none; use {flag}=1 or a model with experts"
                ));
            }
        }
        return Ok(());
    };
    if moe.experts == 0 || moe.ffn == 0 {
        return no(format!(
            "{} experts of width {}; both must be at least 1",
            moe.experts, moe.ffn
        ));
    }
    if moe.topk == 0 || moe.topk > moe.experts {
        return no(format!(
            "moe-router-topk {} must be from 1 to the {} experts",
            moe.topk, moe.experts
        ));
    }
    for (name, value) in [
        ("moe-aux-loss-coeff", moe.aux_loss),
        ("moe-z-loss-coeff", moe.z_loss),
        ("moe-capacity-factor", moe.capacity_factor.unwrap_or(0.0)),
        ("moe-router-topk-scaling-factor", moe.scale),
        ("moe-router-bias-update-rate", moe.bias_update_rate),
    ] {
        if !(0.0..=1e6).contains(&value) {
            return no(format!("{name} is {value}; it must be from 0 to 1000000"));
        }
    }
    if moe.shared_gate && moe.shared_ffn == 0 {
        return no(String::from(
            "a gate of the shared experts needs shared experts; give moe-shared-expert-intermediate-size",
        ));
    }
    if moe.first_dense > model.layers {
        return no(format!(
            "the first {} layers are dense in a model of {}",
            moe.first_dense, model.layers
        ));
    }
    let folded = l.dp * l.cp * l.tp;
    if !folded.is_multiple_of(l.etp) {
        return no(format!(
            "etp={} does not divide dp x cp x tp = {folded}; divisors: {}",
            l.etp,
            divisors(folded)
        ));
    }
    let fits = |ep: &usize| (folded / l.etp).is_multiple_of(*ep) && moe.experts.is_multiple_of(*ep);
    if !fits(&l.ep) {
        let valid: Vec<String> = (1..=folded)
            .filter(fits)
            .map(|ep| format!("{ep}"))
            .collect();
        return no(format!(
            "ep={} must divide the {} experts and dp x cp x tp / etp = {}; valid: {}",
            l.ep,
            moe.experts,
            folded / l.etp,
            valid.join(", ")
        ));
    }
    Ok(())
}

/// Whether the model can be cut into the schedule's chunks.
fn chunks(model: &ModelConfig, l: &Layout) -> Result<(), Invalid> {
    let no = |text: String| Err(Invalid(text));
    let (kind, v) = (l.schedule, l.virtual_stages);
    match kind.chunks() {
        None if v < 2 => {
            return no(format!(
                "virtual-stages={v} is too few for schedule {kind}, whose stages hold at least 2 chunks; use 2 or more, or schedule 1f1b"
            ));
        }
        Some(chunks) if v != 1 && v != chunks => {
            return no(format!(
                "virtual-stages={v} does not go with schedule {kind}, whose stages hold {chunks} of the model's chunks; use schedule interleaved, or virtual-stages={chunks}"
            ));
        }
        _ => {}
    }
    if l.pp < kind.least_stages() {
        return no(format!(
            "schedule {kind} needs at least pp={}, got pp={}; use that, or schedule 1f1b",
            kind.least_stages(),
            l.pp
        ));
    }
    if l.places() > model.layers {
        return no(if l.chunks() == 1 {
            format!(
                "pp={} is more stages than the model's {} layers; use at most {}",
                l.pp, model.layers, model.layers
            )
        } else {
            format!(
                "pp={} stages of {} chunks are {} chunks, more than the model's {} layers; use {}",
                l.pp,
                l.chunks(),
                l.places(),
                model.layers,
                fewer_chunks(model.layers, l)
            )
        });
    }
    if let Some(counts) = &l.stage_layers {
        let sum = counts
            .iter()
            .try_fold(0, |sum: usize, &n| sum.checked_add(n));
        if counts.len() != l.places() || sum != Some(model.layers) || counts.contains(&0) {
            return no(format!(
                "pipeline-layout {counts:?} must list {} {} of at least one layer that sum to {}",
                l.places(),
                if l.chunks() == 1 {
                    "stages"
                } else {
                    "chunks, in the order of the model,"
                },
                model.layers
            ));
        }
    }
    Ok(())
}

/// Layouts near one of too many chunks that the model can be cut into.
fn fewer_chunks(layers: usize, l: &Layout) -> String {
    let (stages, chunks) = (layers / l.chunks(), layers / l.pp);
    let mut choices = Vec::new();
    if stages >= l.schedule.least_stages().max(1) {
        choices.push(format!("at most pp={stages}"));
    }
    if l.schedule.chunks().is_none() && chunks > 1 {
        choices.push(format!("virtual-stages={chunks}"));
    }
    if choices.len() < 2 {
        let fewer = match l.pp > layers {
            true => format!(" with at most pp={layers}"),
            false => String::new(),
        };
        choices.push(format!("schedule 1f1b{fewer}"));
    }
    choices.join(", or ")
}

/// Whether the schedule can run as many microbatches as a pipeline has.
fn microbatches(l: &Layout, batch: &Batch) -> Result<(), Invalid> {
    let wanted = batch.microbatches() / l.dp;
    let nearest = l.schedule.nearest_microbatches(l.pp, wanted);
    if nearest.contains(&wanted) {
        return Ok(());
    }
    let rule = match l.schedule {
        ScheduleKind::Interleaved => format!("a multiple of pp={}", l.pp),
        _ => format!("at least {} = 2 pp", 2 * l.pp),
    };
    let sizes: Vec<String> = nearest
        .iter()
        .map(|m| format!("{}", m * batch.micro_batch * l.dp))
        .collect();
    Err(Invalid(format!(
        "schedule {} takes {rule} microbatches a pipeline, got {wanted}; nearest global-batch-size: {}",
        l.schedule,
        sizes.join(" or ")
    )))
}

fn divisors(n: usize) -> String {
    let all: Vec<String> = (1..=n)
        .filter(|d| n.is_multiple_of(*d))
        .map(|d| format!("{d}"))
        .collect();
    all.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(change: impl FnOnce(&mut Layout)) -> String {
        let model = ModelConfig {
            layers: 6,
            ..crate::traffic::tests::model(true)
        };
        let batch = Batch {
            seq: 4,
            micro_batch: 2,
            global_batch: 12,
        };
        let mut layout = Layout::single();
        change(&mut layout);
        validate(&model, &layout, &batch).map_or_else(|e| e.0, |()| String::from("fine"))
    }

    #[test]
    fn schedules_say_what_they_need() {
        let of = |schedule, pp, virtual_stages, stage_layers| {
            judged(|l| {
                (l.schedule, l.pp) = (schedule, pp);
                (l.virtual_stages, l.stage_layers) = (virtual_stages, stage_layers);
            })
        };
        use ScheduleKind::{DualPipeV, Interleaved, OneFOneB, ZbH1};
        for (pp, v) in [(1, 2), (1, 6), (2, 2), (2, 3), (3, 2)] {
            assert_eq!(of(Interleaved, pp, v, None), "fine", "{pp} {v}");
        }
        assert_eq!(of(DualPipeV, 3, 1, None), "fine");
        assert_eq!(of(DualPipeV, 2, 2, Some(alloc::vec![1, 2, 2, 1])), "fine");
        assert_eq!(of(ZbH1, 6, 1, None), "fine");
        for (got, needed) in [
            (of(Interleaved, 2, 1, None), "use 2 or more"),
            (
                of(Interleaved, 4, 2, None),
                "use at most pp=3, or schedule 1f1b",
            ),
            (of(OneFOneB, 2, 2, None), "use schedule interleaved"),
            (of(DualPipeV, 2, 3, None), "or virtual-stages=2"),
            (of(DualPipeV, 1, 2, None), "at least pp=2"),
            (
                of(Interleaved, 2, 2, Some(alloc::vec![3, 3])),
                "must list 4 chunks, in the order of the model,",
            ),
        ] {
            assert!(got.contains(needed), "{got}");
        }
        let dp = |schedule, dp, pp| {
            judged(|l| (l.schedule, l.dp, l.pp, l.virtual_stages) = (schedule, dp, pp, 2))
        };
        // 12 samples in twos over 2 replicas are 3 microbatches each.
        assert_eq!(
            dp(Interleaved, 2, 2),
            "schedule interleaved takes a multiple of pp=2 microbatches a pipeline, got 3; nearest global-batch-size: 8 or 16"
        );
        assert_eq!(
            dp(DualPipeV, 2, 3),
            "schedule dualpipe-v takes at least 6 = 2 pp microbatches a pipeline, got 3; nearest global-batch-size: 24"
        );
    }
}
