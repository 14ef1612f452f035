//! How large a question may be, so that no figure in it overflows and no answer takes forever.

use alloc::format;
use alloc::string::String;

use super::Request;
use crate::Invalid;
use crate::memory::microbatch;
use quintet_parallel_layers::Recompute;

/// Whether the figures are of a size that somebody could mean.
///
/// # Errors
/// The first that is none, with the most that it may be.
pub(super) fn limits(request: &Request) -> Result<(), Invalid> {
    let (c, job) = (&request.shape.config, &request.job);
    let moe = c.moe;
    let of = |pick: fn(&crate::config::MoeConfig) -> usize| moe.as_ref().map_or(1, pick);
    for (name, value, most) in [
        ("seq-length", job.seq, 1 << 26),
        ("global-batch-size", job.global_batch, 1 << 26),
        ("vocabulary", c.vocab, 1 << 26),
        ("hidden width", c.hidden, 1 << 20),
        ("layers", c.layers, 1 << 10),
        ("heads", c.heads, 1 << 12),
        ("width of a head", c.head_dim, 1 << 14),
        ("width of the MLP", c.ffn, 1 << 24),
        ("experts", of(|moe| moe.experts), 1 << 12),
        ("width of an expert", of(|moe| moe.ffn), 1 << 24),
        ("shared experts' width", of(|moe| moe.shared_ffn), 1 << 24),
    ] {
        if value > most {
            return Err(Invalid(format!(
                "{name}: {value} is more than is planned for; the most is {most}"
            )));
        }
    }
    let tokens = job.seq.saturating_mul(job.global_batch);
    let rows = moe.map_or(0, |moe| {
        moe.topk as u128 * (2 * c.hidden + 3 * moe.ffn) as u128
    });
    let experts = rows * tokens as u128 * c.layers as u128;
    let step = microbatch(c, tokens, Recompute::None).saturating_add(experts);
    if tokens > 1 << 36 || step > 1 << 56 || request.shape.parameters() > 1 << 52 {
        return Err(Invalid(String::from(
            "model and step together are more than is planned for: 2^52 parameters, 2^36 tokens a step",
        )));
    }
    Ok(())
}
