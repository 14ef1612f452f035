//! Where the tokens of a sample stand, and how far back they see.

use crate::data::Sample;

/// Of each token t: its position, and the first token that it sees; it sees from there to itself.
pub(super) struct Sight {
    pub(super) positions: Vec<usize>,
    pub(super) first: Vec<usize>,
}

impl Sight {
    /// Positions begin anew in each document, and nobody sees into another. Of a window, a token
    /// itself is the last.
    pub(super) fn new(sample: &Sample, window: Option<usize>) -> Self {
        let tokens = sample.mask.len();
        let mut begin = 0;
        let (mut positions, mut first) = (vec![], vec![]);
        for t in 0..tokens {
            let documents = &sample.documents;
            if !documents.is_empty() && t > 0 && documents[t] != documents[t - 1] {
                begin = t;
            }
            positions.push(t - begin);
            first.push(match window {
                Some(window) => begin.max((t + 1).saturating_sub(window)),
                None => begin,
            });
        }
        Self { positions, first }
    }
}
