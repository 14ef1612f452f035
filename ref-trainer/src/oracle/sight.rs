//! Where the tokens of a microbatch stand, how far back they see, and how sharply.

use super::Rounding;
use super::dropout::Dropout;
use crate::data::Sample;

/// Of each token t, counted over the samples of a microbatch: its position, and the first token
/// that it sees; it sees from there to itself.
pub(super) struct Sight<'a> {
    pub(super) positions: Vec<usize>,
    pub(super) first: Vec<usize>,
    /// What is let go.
    pub(super) dropout: Dropout,
    /// Tokens of each sample.
    pub(super) lens: Vec<usize>,
    /// What happens to each value on the way.
    pub(super) rounding: &'a Rounding,
    /// By layer: choices that are taken over where they are within so much of the oracle's own.
    pub(super) ties: Option<(&'a [Vec<i32>], f64)>,
}

impl<'a> Sight<'a> {
    /// Positions begin anew in each sample and in each document, and nobody sees into another. Of a
    /// window, a token itself is the last.
    pub(super) fn new(samples: &[Sample], window: Option<usize>, rounding: &'a Rounding) -> Self {
        let (mut positions, mut first) = (vec![], vec![]);
        for sample in samples {
            let (start, documents) = (positions.len(), &sample.documents);
            let mut begin = start;
            for t in start..start + sample.mask.len() {
                let here = t - start;
                if !documents.is_empty() && here > 0 && documents[here] != documents[here - 1] {
                    begin = t;
                }
                positions.push(t - begin);
                first.push(match window {
                    Some(window) => begin.max((t + 1).saturating_sub(window)),
                    None => begin,
                });
            }
        }
        Self {
            positions,
            first,
            dropout: Dropout::default(),
            lens: samples.iter().map(|sample| sample.mask.len()).collect(),
            rounding,
            ties: None,
        }
    }

    /// In training; sample 0 here is number `number` of the step.
    pub(super) fn dropping(mut self, share: f64, run: Option<(u64, u64)>, number: usize) -> Self {
        if let Some(run) = run.filter(|_| share > 0.0) {
            let mut of = vec![];
            for (i, len) in self.lens.iter().enumerate() {
                of.extend((0..*len).map(|place| ((number + i) as u32, place as u32)));
            }
            self.dropout = Dropout::new(share, run, of);
        }
        self
    }
}
