//! Cross-entropy by the letter, in f64, over the whole vocabulary.

use alloc::vec::Vec;

use super::CrossEntropySpec;

/// `(loss_t, dlogits_tv)` with `loss_t = ln(sum_v e^logit) - logit[label]`; a row of weight 0 has
/// loss 0 and gradient 0. The gradient is that of `sum_t weight_t loss_t`.
#[must_use]
pub fn cross_entropy(
    spec: &CrossEntropySpec,
    logits: &[f64],
    labels: &[i32],
    weight: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (mut loss, mut dlogits) = (Vec::new(), Vec::new());
    for t in 0..spec.tokens {
        let row = &logits[t * spec.entries..(t + 1) * spec.entries];
        if weight[t] == 0.0 {
            loss.push(0.0);
            dlogits.resize(dlogits.len() + row.len(), 0.0);
            continue;
        }
        let label = labels[t] as usize - spec.first;
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| libm::exp(x - max)).sum();
        loss.push(libm::log(sum) - (row[label] - max));
        for (v, x) in row.iter().enumerate() {
            let hit = if v == label { 1.0 } else { 0.0 };
            dlogits.push(weight[t] * (libm::exp(x - max) / sum - hit));
        }
    }
    (loss, dlogits)
}
