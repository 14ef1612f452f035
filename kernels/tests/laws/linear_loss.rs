//! Laws of the linear layer with its loss, some tokens at a time: they are those of all logits at once.

use quintet_kernels::cross_entropy::chunked::{
    Inputs, LinearLossSpec, linear_backward, linear_sums,
};
use quintet_kernels::cross_entropy::naive;
use quintet_kernels::{CrossEntropy, CrossEntropySpec, Error, Float, Gemm, Tag};

use crate::common::*;

struct Case {
    tokens: usize,
    vocab: usize,
    hidden: usize,
    x: Vec<f64>,
    w: Vec<f64>,
    labels: Vec<i32>,
    weight: Vec<f64>,
}

/// Loss, dx and dw of all shards.
type Answer = [Vec<f64>; 3];

impl Case {
    fn new<E: Float>([tokens, vocab, hidden]: [usize; 3]) -> Self {
        let mut draw = Draw::new((tokens * 31 + vocab) as u64);
        let (x, w) = (
            draw.vec::<E>(tokens * hidden, 1.0),
            draw.vec::<E>(vocab * hidden, 1.0),
        );
        let labels = (0..tokens).map(|_| draw.below(vocab) as i32).collect();
        let mut weight = draw.vec::<E::Acc>(tokens, 1.0);
        weight.iter_mut().step_by(3).for_each(|w| *w = 0.0);
        Self {
            tokens,
            vocab,
            hidden,
            x,
            w,
            labels,
            weight,
        }
    }

    fn spec(&self, [first, end]: [usize; 2], chunk: usize) -> LinearLossSpec {
        LinearLossSpec {
            loss: CrossEntropySpec {
                tokens: self.tokens,
                first,
                entries: end - first,
            },
            hidden: self.hidden,
            chunk,
        }
    }

    /// By shards `cuts[i]..cuts[i + 1]` and chunks, the reductions between them taken on the host.
    fn perform<B: Gemm + CrossEntropy, E: Float>(
        &self,
        device: &B,
        cuts: &[usize],
        chunk: usize,
    ) -> Answer {
        let (t, d) = (self.tokens, self.hidden);
        let x = up::<B, E>(device, &self.x);
        let (labels, weight) = (
            up_raw(device, &self.labels),
            up::<B, E::Acc>(device, &self.weight),
        );
        let shards: Vec<_> = cuts
            .windows(2)
            .map(|cut| self.spec([cut[0], cut[1]], chunk))
            .collect();
        let rows = |s: &LinearLossSpec| s.loss.first * d..(s.loss.first + s.loss.entries) * d;
        let parts: Vec<_> = shards
            .iter()
            .map(|s| up::<B, E>(device, &self.w[rows(s)]))
            .collect();
        let inputs = |w| Inputs {
            x_td: B::whole(&x),
            w_vd: B::whole(w),
            labels_t: B::whole(&labels),
        };
        let (mut own, mut maxima) = (Vec::new(), vec![f64::NEG_INFINITY; t]);
        for (spec, w) in shards.iter().zip(&parts) {
            let mut max = unset::<B, E::Acc>(device, t);
            let mut stats = unset::<B, E::Acc>(device, 2 * t);
            let (max_view, stats_view) = (B::whole_mut(&mut max), B::whole_mut(&mut stats));
            linear_sums::<B, E>(device, spec, inputs(w), max_view, stats_view).unwrap();
            let here = down::<B, E::Acc>(device, &max);
            maxima.iter_mut().zip(here).for_each(|(m, x)| *m = m.max(x));
            own.push((max, stats));
        }
        let max = up::<B, E::Acc>(device, &maxima);
        let mut totals = vec![0.0; 2 * t];
        for (spec, (here, stats)) in shards.iter().zip(&mut own) {
            let (here, all) = (B::whole(here), B::whole(&max));
            let into = B::whole_mut(stats);
            device
                .shift_sums::<E::Acc>(&spec.loss, B::whole(&labels), here, all, into)
                .unwrap();
            let stats = down::<B, E::Acc>(device, stats);
            totals.iter_mut().zip(stats).for_each(|(s, x)| *s += x);
        }
        let stats = up::<B, E::Acc>(device, &totals);
        let mut loss = unset::<B, E::Acc>(device, t);
        device
            .token_loss::<E::Acc>(B::whole(&stats), B::whole(&weight), B::whole_mut(&mut loss))
            .unwrap();
        let (mut dx, mut dw) = (vec![0.0; t * d], Vec::new());
        for (spec, w) in shards.iter().zip(&parts) {
            let mut dx_part = unset::<B, E>(device, t * d);
            // What is there stays in the sum.
            let mut dw_part = up::<B, E::Acc>(device, &vec![2.0; spec.loss.entries * d]);
            let given = (B::whole(&max), B::whole(&stats), B::whole(&weight));
            let (dx_view, dw_view) = (B::whole_mut(&mut dx_part), B::whole_mut(&mut dw_part));
            linear_backward::<B, E>(device, spec, inputs(w), given, dx_view, dw_view).unwrap();
            let part = down::<B, E>(device, &dx_part);
            dx.iter_mut().zip(part).for_each(|(s, x)| *s += x);
            dw.extend(down::<B, E::Acc>(device, &dw_part));
        }
        [down::<B, E::Acc>(device, &loss), dx, dw]
    }

    /// By the letter, in f64.
    fn naive(&self) -> Answer {
        let (d, v) = (self.hidden, self.vocab);
        let row = |x: &[f64], i: usize| x[i * d..(i + 1) * d].to_vec();
        let logits: Vec<f64> = (0..self.tokens * v)
            .map(|i| dot(&row(&self.x, i / v), &row(&self.w, i % v)))
            .collect();
        let whole = self.spec([0, v], 1).loss;
        let (loss, dlogits) = naive::cross_entropy(&whole, &logits, &self.labels, &self.weight);
        let (mut dx, mut dw) = (vec![0.0; self.tokens * d], vec![2.0; v * d]);
        for (i, g) in dlogits.iter().enumerate() {
            for j in 0..d {
                dx[i / v * d + j] += g * self.w[i % v * d + j];
                dw[i % v * d + j] += g * self.x[i / v * d + j];
            }
        }
        [loss, dx, dw]
    }
}

/// In chunks of any length and shards of any widths it is the definition's; of one shard the loss and dx
/// have the same bits whatever the chunk, and a second call gives the bits of the first.
pub fn in_chunks<B: Gemm + CrossEntropy, E: Float>(device: &B) {
    for sizes in [[7, 17, 8], [5, 1, 3], [0, 4, 2], [9, 20, 8]] {
        let case = Case::new::<E>(sizes);
        let [tokens, vocab, hidden] = sizes;
        let want = case.naive();
        // Logits are rounded to E, each up to `hidden` high; a gradient to E again, and summed in E over shards.
        let (logit, acc) = (
            E::UNIT_ROUNDOFF * hidden as f64,
            acc::<E>() * (vocab + tokens + hidden + 80) as f64,
        );
        let bound = [
            4.0 * (logit + acc),
            8.0 * (logit + acc + E::UNIT_ROUNDOFF) * (1.0 + vocab as f64),
            8.0 * (logit + acc + E::UNIT_ROUNDOFF) * (4.0 + tokens as f64),
        ];
        let near = |got: &Answer| {
            for (i, what) in ["loss", "dx", "dw"].into_iter().enumerate() {
                close(what, &got[i], &want[i], |_| bound[i]);
            }
        };
        let whole = case.perform::<B, E>(device, &[0, vocab], tokens.max(1));
        near(&whole);
        for chunk in [1, 4, 100] {
            let got = case.perform::<B, E>(device, &[0, vocab], chunk);
            assert_eq!(got[..2], whole[..2], "{sizes:?} in chunks of {chunk}");
            near(&got);
            assert_eq!(
                got,
                case.perform::<B, E>(device, &[0, vocab], chunk),
                "again"
            );
            near(&case.perform::<B, E>(device, &[0, vocab / 3, vocab / 3, vocab], chunk));
        }
    }
    let case = Case::new::<E>([6, 9, 8]);
    let (x, w) = (up::<B, E>(device, &case.x), up::<B, E>(device, &case.w));
    let labels = up_raw(device, &case.labels);
    let inputs = Inputs {
        x_td: B::whole(&x),
        w_vd: B::whole(&w),
        labels_t: B::whole(&labels),
    };
    let refuse = |spec: &LinearLossSpec| {
        let mut max = unset::<B, E::Acc>(device, 6);
        let mut stats = unset::<B, E::Acc>(device, 12);
        let (max, stats) = (B::whole_mut(&mut max), B::whole_mut(&mut stats));
        linear_sums::<B, E>(device, spec, inputs, max, stats).unwrap_err()
    };
    assert!(matches!(refuse(&case.spec([0, 9], 0)), Error::Spec { .. }));
    assert!(matches!(
        refuse(&case.spec([0, 8], 2)),
        Error::Len { what: "w", .. }
    ));
}

/// The logits of all tokens are never there at once: by the device's own count.
pub fn keeps_to_its_chunk<B: Gemm + CrossEntropy, E: Float>(device: &B) {
    let case = Case::new::<E>([64, 96, 8]);
    device.meter().reset_peak();
    let before = device.meter().now(Tag::Scratch);
    case.perform::<B, E>(device, &[0, 96], 4);
    let held = device.meter().peak(Tag::Scratch) - before;
    // Inputs, outputs and two chunks of logits; all logits alone would be more than the half of it.
    let e = size_of::<E>();
    let given =
        (64 * 8 * 2 + 96 * 8) * e + 96 * 8 * size_of::<E::Acc>() + 64 * 12 * size_of::<f64>();
    let chunks = 2 * 4 * 96 * e + 8 * size_of::<f64>();
    assert!(held <= given + chunks, "{held} of {}", given + chunks);
    assert!(chunks < 64 * 96 * e / 4);
}
