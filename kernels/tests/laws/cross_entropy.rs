//! Laws of cross-entropy: sharded over the vocabulary in every way, it is the whole's.

use quintet_kernels::cross_entropy::naive;
use quintet_kernels::{CrossEntropy, CrossEntropySpec, Float};

use crate::common::*;

struct Case {
    tokens: usize,
    vocab: usize,
    logits: Vec<f64>,
    labels: Vec<i32>,
    weight: Vec<f64>,
}

impl Case {
    fn new<E: Float>(tokens: usize, vocab: usize, scale: f64) -> Self {
        let mut draw = Draw::new((tokens + vocab) as u64);
        let mut logits = draw.vec::<E>(tokens * vocab, scale);
        let mut labels: Vec<i32> = (0..tokens).map(|_| draw.below(vocab) as i32).collect();
        let mut weight = draw.vec::<E::Acc>(tokens, 1.0);
        // Some tokens are masked; neither their labels nor their logits must matter.
        for t in (0..tokens).step_by(3) {
            weight[t] = 0.0;
            labels[t] = [-100, i32::MAX, 0][t / 3 % 3];
            logits[t * vocab] = f64::NAN;
        }
        Self {
            tokens,
            vocab,
            logits,
            labels,
            weight,
        }
    }

    fn shard(&self, first: usize, entries: usize) -> CrossEntropySpec {
        CrossEntropySpec {
            tokens: self.tokens,
            first,
            entries,
        }
    }

    /// The columns of a shard.
    fn part(&self, spec: &CrossEntropySpec) -> Vec<f64> {
        let rows = self.logits.chunks(self.vocab.max(1));
        rows.flat_map(|row| row[spec.first..spec.first + spec.entries].to_vec())
            .collect()
    }

    /// `(loss_t, dlogits_tv)` of all steps on shards `cuts[i]..cuts[i + 1]`, the reductions
    /// between them taken on the host.
    fn perform<B: CrossEntropy, E: Float>(
        &self,
        device: &B,
        cuts: &[usize],
    ) -> (Vec<f64>, Vec<f64>) {
        let shards: Vec<_> = cuts
            .windows(2)
            .map(|cut| self.shard(cut[0], cut[1] - cut[0]))
            .collect();
        let parts: Vec<_> = shards
            .iter()
            .map(|spec| up::<B, E>(device, &self.part(spec)))
            .collect();
        let labels = up_raw(device, &self.labels);
        let weight = up::<B, E::Acc>(device, &self.weight);

        let mut maxima = vec![f64::NEG_INFINITY; self.tokens];
        for (spec, logits) in shards.iter().zip(&parts) {
            let mut max = unset::<B, E::Acc>(device, self.tokens);
            device
                .logit_max::<E>(spec, B::whole(logits), B::whole_mut(&mut max))
                .unwrap();
            let max = down::<B, E::Acc>(device, &max);
            maxima.iter_mut().zip(max).for_each(|(m, x)| *m = m.max(x));
        }
        let max = up::<B, E::Acc>(device, &maxima);

        let mut totals = vec![0.0; 2 * self.tokens];
        for (spec, logits) in shards.iter().zip(&parts) {
            let mut stats = unset::<B, E::Acc>(device, 2 * self.tokens);
            device
                .logit_sums::<E>(
                    spec,
                    B::whole(logits),
                    B::whole(&labels),
                    B::whole(&max),
                    B::whole_mut(&mut stats),
                )
                .unwrap();
            let stats = down::<B, E::Acc>(device, &stats);
            totals.iter_mut().zip(stats).for_each(|(s, x)| *s += x);
        }
        let stats = up::<B, E::Acc>(device, &totals);

        let mut loss = unset::<B, E::Acc>(device, self.tokens);
        device
            .token_loss::<E::Acc>(B::whole(&stats), B::whole(&weight), B::whole_mut(&mut loss))
            .unwrap();

        let mut gradient = vec![f64::NAN; self.logits.len()];
        for (spec, logits) in shards.iter().zip(&parts) {
            let mut dlogits = unset::<B, E>(device, self.tokens * spec.entries);
            device
                .logit_backward::<E>(
                    spec,
                    B::whole(logits),
                    B::whole(&labels),
                    B::whole(&max),
                    B::whole(&stats),
                    B::whole(&weight),
                    B::whole_mut(&mut dlogits),
                )
                .unwrap();
            let dlogits = down::<B, E>(device, &dlogits);
            for (t, row) in dlogits.chunks(spec.entries.max(1)).enumerate() {
                let at = t * self.vocab + spec.first;
                gradient[at..at + row.len()].copy_from_slice(row);
            }
        }
        (down::<B, E::Acc>(device, &loss), gradient)
    }
}

pub fn loss_and_gradient<B: CrossEntropy, E: Float>(device: &B) {
    let cuts_of_17: [&[usize]; 6] = [
        &[0, 17],
        &[0, 9, 17],
        &[0, 1, 2, 17],
        &[0, 5, 5, 12, 17],
        &[0, 0, 16, 16, 17, 17],
        &[0, 3, 7, 11, 14, 17],
    ];
    let small = Case::new::<E>(10, 17, 8.0);
    for cuts in cuts_of_17 {
        check::<B, E>(device, &small, cuts);
    }
    let mut draw = Draw::new(1);
    for _ in 0..30 {
        let mut cuts: Vec<usize> = (0..draw.below(5)).map(|_| draw.below(18)).collect();
        cuts.extend([0, 17]);
        cuts.sort_unstable();
        check::<B, E>(device, &small, &cuts);
    }
    check::<B, E>(device, &Case::new::<E>(0, 4, 1.0), &[0, 2, 4]);
    check::<B, E>(device, &Case::new::<E>(5, 1, 1.0), &[0, 1]);
    let large = Case::new::<E>(60, 1003, 30.0);
    check::<B, E>(device, &large, &[0, 1003]);
    check::<B, E>(device, &large, &[0, 400, 401, 1003]);
}

fn check<B: CrossEntropy, E: Float>(device: &B, case: &Case, cuts: &[usize]) {
    let whole = case.shard(0, case.vocab);
    let (want, dwant) = naive::cross_entropy(&whole, &case.logits, &case.labels, &case.weight);
    let (loss, dlogits) = case.perform::<B, E>(device, cuts);
    // The difference logit - max is rounded (up to 60 apart), which moves its exponential by as
    // many roundings; then the lanes' sum over the vocabulary.
    let tol = (case.vocab as f64 / 16.0 + 16.0 + 60.0) * acc::<E>();
    close("loss", &loss, &want, |t| tol * (1.0 + want[t].abs()));
    close("dlogits", &dlogits, &dwant, |i| {
        let weight = case.weight[i / case.vocab].abs();
        E::UNIT_ROUNDOFF * dwant[i].abs() + tol * weight
    });
    for (t, &weight) in case.weight.iter().enumerate() {
        if weight == 0.0 {
            let row = &dlogits[t * case.vocab..(t + 1) * case.vocab];
            assert_eq!(loss[t], 0.0);
            assert!(
                row.iter().all(|&d| d == 0.0),
                "a masked token has no gradient"
            );
        }
    }
}

/// Logits of any height, and minus infinity among them, give finite losses.
pub fn extremes<B: CrossEntropy, E: Float>(device: &B) {
    let ninf = f64::NEG_INFINITY;
    let case = Case {
        tokens: 4,
        vocab: 3,
        logits: vec![
            1e30, 1e30, -1e30, //
            ninf, 2.0, ninf, //
            -1e30, -1e30, -1e30, //
            0.0, 0.0, ninf,
        ],
        labels: vec![0, 1, 2, 1],
        weight: vec![1.0; 4],
    };
    let third = 1.0 / 3.0;
    for cuts in [&[0, 3][..], &[0, 1, 3], &[0, 1, 2, 2, 3]] {
        let (loss, dlogits) = case.perform::<B, E>(device, cuts);
        let want = [2f64.ln(), 0.0, 3f64.ln(), 2f64.ln()];
        close("loss", &loss, &want, |_| 4.0 * acc::<E>());
        let want = [
            -0.5,
            0.5,
            0.0, //
            0.0,
            0.0,
            0.0, //
            third,
            third,
            third - 1.0, //
            0.5,
            -0.5,
            0.0,
        ];
        close("dlogits", &dlogits, &want, |_| {
            E::UNIT_ROUNDOFF + 4.0 * acc::<E>()
        });
    }
}

/// The twin's gradient is the slope of its weighted loss; the device is held to the twin.
pub fn gradient<B: CrossEntropy, E: Float>(_: &B) {
    let case = Case::new::<E>(7, 9, 3.0);
    let spec = case.shard(0, case.vocab);
    let run = |x: &[f64]| naive::cross_entropy(&spec, x, &case.labels, &case.weight);
    let dlogits = run(&case.logits).1;
    slope("dlogits", &case.logits, &dlogits, |x| {
        dot(&run(x).0, &case.weight)
    });
}
