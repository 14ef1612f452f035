//! Dropout (Srivastava et al. 2014): whether an element is let go is a function of where it stands
//! in the model and in the data, never of who computes it or of the order in which that is done.
//!
//! ```text
//! stream  = philox(counter: sample | head, step / 2^32 | site | step, key: seed)    once a sequence and head
//! words   = philox(counter: row | column / 4 | stream[2] | stream[3], key: stream[0], stream[1])
//! let go  <=> words[column % 4] < share 2^32;  what stays is multiplied by 1 / (1 - share)
//! ```
//!
//! Rows are places in the sample and columns features; of attention rows are places of queries and
//! columns places of keys. Samples are counted in the step, places in the sample whatever documents
//! it holds. No mask is stored: backward draws it again.

use alloc::vec::Vec;

use crate::philox::philox;
use crate::{Float, Real};

/// What is let go, and everything of an element's key that all elements of a call share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Share of elements let go, in [0, 1).
    pub share: f64,
    /// Of the run.
    pub seed: u64,
    /// Of the run; below 2^48.
    pub step: u64,
    /// Which activation of the model.
    pub site: u32,
    /// Number in the step of the first sequence of the microbatch.
    pub sample: u64,
}

impl Dropout {
    /// The factor on what stays.
    #[must_use]
    pub fn scale(&self) -> f64 {
        1.0 / (1.0 - self.share)
    }

    /// The least word of an element that stays.
    #[must_use]
    pub(crate) fn least(&self) -> u32 {
        (self.share * (1u64 << 32) as f64) as u32
    }

    /// The draws for one sequence of the microbatch and one head (0 where there are none).
    #[must_use]
    pub fn draws(&self, sequence: usize, head: usize) -> Draws {
        let high = (self.step >> 32) as u32;
        let counter = [
            (self.sample + sequence as u64) as u32,
            (head as u32 & 0xFFFF) | high << 16,
            self.site,
            self.step as u32,
        ];
        let [a, b, c, d] = philox(counter, [self.seed as u32, (self.seed >> 32) as u32]);
        Draws {
            key: [a, b],
            tail: [c, d],
            least: self.least(),
        }
    }
}

/// The draws for one sequence and head.
#[derive(Debug, Clone, Copy)]
pub struct Draws {
    key: [u32; 2],
    tail: [u32; 2],
    /// The least word of an element that stays.
    least: u32,
}

impl Draws {
    /// Whether an element stays.
    #[must_use]
    pub fn keeps(&self, row: u32, column: u32) -> bool {
        self.row(row).keeps(column)
    }

    /// The draws of a row.
    #[must_use]
    #[inline]
    pub fn row(&self, row: u32) -> RowDraws<'_> {
        RowDraws {
            draws: self,
            row,
            four: u32::MAX,
            words: [0; 4],
        }
    }
}

/// The draws of a row, which remember the last four columns.
#[derive(Debug, Clone)]
pub struct RowDraws<'a> {
    draws: &'a Draws,
    row: u32,
    /// Which four columns `words` are of; none are the last of 2^32 fours.
    four: u32,
    words: [u32; 4],
}

impl RowDraws<'_> {
    /// Whether the element of a column stays.
    #[inline]
    pub fn keeps(&mut self, column: u32) -> bool {
        let four = column >> 2;
        if four != self.four {
            let [c, d] = self.draws.tail;
            self.words = philox([self.row, four, c, d], self.draws.key);
            self.four = four;
        }
        self.words[(column & 3) as usize] >= self.draws.least
    }
}

/// Where the rows of an activation stand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutSpec {
    /// What is let go.
    pub dropout: Dropout,
    /// Number in the microbatch of the first row.
    pub first: usize,
    /// Rows of a sequence.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

impl DropoutSpec {
    /// Lets elements of `x` go and scales what stays; `at` are the places of its rows in their
    /// samples.
    pub(crate) fn apply<E: Float>(&self, at: &[i32], x: &mut [E]) {
        let scale = E::Acc::from_f64(self.dropout.scale());
        for (i, (row, &at)) in x.chunks_exact_mut(self.width.max(1)).zip(at).enumerate() {
            let draws = self.dropout.draws((self.first + i) / self.rows.max(1), 0);
            let mut stays = draws.row(at as u32);
            for (column, x) in row.iter_mut().enumerate() {
                *x = if stays.keeps(column as u32) {
                    E::from_acc(x.to_acc() * scale)
                } else {
                    E::from_acc(E::Acc::ZERO)
                };
            }
        }
    }
}

/// The same in f64, element by element.
#[must_use]
pub fn naive(spec: &DropoutSpec, at: &[i32], x: &[f64]) -> Vec<f64> {
    let one = |(i, x): (usize, &f64)| {
        let (row, column) = (i / spec.width, i % spec.width);
        let sequence = (spec.first + row) / spec.rows;
        let draws = spec.dropout.draws(sequence, 0);
        match draws.keeps(at[row] as u32, column as u32) {
            true => x * spec.dropout.scale(),
            false => 0.0,
        }
    };
    x.iter().enumerate().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF: Dropout = Dropout {
        share: 0.3,
        seed: 5,
        step: 7,
        site: 2,
        sample: 11,
    };

    fn mask(of: &Dropout, sequence: usize, head: usize) -> Vec<bool> {
        let draws = of.draws(sequence, head);
        (0..4096).map(|i| draws.keeps(i / 64, i % 64)).collect()
    }

    #[test]
    fn the_share_is_let_go() {
        let n = mask(&OF, 0, 0).iter().filter(|stays| !**stays).count();
        assert!((n as f64 / 4096.0 - 0.3).abs() < 0.03, "{n}");
        assert!(
            mask(&Dropout { share: 0.0, ..OF }, 0, 0)
                .iter()
                .all(|stays| *stays)
        );
    }

    /// Each part of the key matters, and a sample is a sample in whichever microbatch it comes.
    #[test]
    fn every_part_of_the_key_matters() {
        let base = mask(&OF, 0, 0);
        for other in [
            mask(&Dropout { seed: 6, ..OF }, 0, 0),
            mask(
                &Dropout {
                    seed: 5 + (1 << 32),
                    ..OF
                },
                0,
                0,
            ),
            mask(&Dropout { step: 8, ..OF }, 0, 0),
            mask(
                &Dropout {
                    step: 7 + (1 << 32),
                    ..OF
                },
                0,
                0,
            ),
            mask(&Dropout { site: 3, ..OF }, 0, 0),
            mask(&OF, 1, 0),
            mask(&OF, 0, 1),
        ] {
            let same = base.iter().zip(&other).filter(|(a, b)| a == b).count();
            // Of independent draws 0.58.
            assert!((same as f64 / 4096.0 - 0.58).abs() < 0.04, "{same}");
        }
        assert_eq!(mask(&OF, 3, 0), mask(&Dropout { sample: 14, ..OF }, 0, 0));
    }
}
