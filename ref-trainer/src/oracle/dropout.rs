//! Dropout, by its definition: one draw an element.
//!
//! ```text
//! stream = philox([sample, head + 65536 (step / 2^32), site, step mod 2^32], key: seed)
//! word   = philox([row, column / 4, stream 2, stream 3], key: stream 0 and 1)[column mod 4]
//! factor = 0 where word < share 2^32, else 1 / (1 - share)
//! ```
//!
//! Samples by their number in the step, rows and columns by place: of an activation token and
//! feature, of attention query and key.

use quintet_parallel_layers::philox::philox;

/// The embedding's output.
pub(super) const EMBEDDING: u32 = 0;

/// Of block `layer`: 0 the probabilities of attention, 1 what attention gives, 2 what the MLP gives.
pub(super) fn site(layer: usize, part: u32) -> u32 {
    1 + 3 * layer as u32 + part
}

/// What is let go in one microbatch of one step.
#[derive(Default)]
pub(super) struct Dropout {
    share: f64,
    seed: u64,
    step: u64,
    /// Of each token its sample's number in the step, and its place in it; empty where nothing is
    /// let go.
    pub(super) of: Vec<(u32, u32)>,
}

impl Dropout {
    pub(super) fn new(share: f64, (seed, step): (u64, u64), of: Vec<(u32, u32)>) -> Self {
        Self {
            share,
            seed,
            step,
            of,
        }
    }

    /// The factors on row `t`, by column.
    pub(super) fn row(&self, site: u32, head: usize, t: usize) -> impl Fn(u32) -> f64 + '_ {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        let of = self.of.get(t).map(|&(sample, row)| {
            let [low, high] = halves(self.step);
            let counter = [sample, head as u32 + (high << 16), site, low];
            (row, philox(counter, halves(self.seed)))
        });
        move |column| {
            let Some((row, [a, b, c, d])) = of else {
                return 1.0;
            };
            let words = philox([row, column / 4, c, d], [a, b]);
            if f64::from(words[column as usize % 4]) < (self.share * 4294967296.0).floor() {
                0.0
            } else {
                1.0 / (1.0 - self.share)
            }
        }
    }

    /// On rows of `d` elements, one a token.
    pub(super) fn apply(&self, site: u32, x_td: &mut [f64], d: usize) {
        if self.of.is_empty() {
            return;
        }
        for (t, x_d) in x_td.chunks_exact_mut(d).enumerate() {
            let factor = self.row(site, 0, t);
            for (column, x) in x_d.iter_mut().enumerate() {
                *x *= factor(column as u32);
            }
        }
    }

    /// On the probabilities of query `t` for key `s`, of head `h`.
    pub(super) fn of_pair(&self, site: u32, h: usize, (t, s): (usize, usize)) -> f64 {
        match self.of.get(s) {
            None => 1.0,
            Some(&(_, column)) => self.row(site, h, t)(column),
        }
    }
}
