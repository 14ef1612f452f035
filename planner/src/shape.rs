//! The model that is planned for: what the trainer trains, and models beside that.
//!
//! Multi-head latent attention (DeepSeek-V2) keeps queries, keys and values in a narrower form:
//!
//! ```text
//! x -- q_a -- norm -- q_b ---------------> q   heads x (nope + rope)
//! x -- kv_a -- norm -- kv_b -------------> k   heads x nope,  v  heads x value
//!         '-- rope, one for all heads
//! ```
//!
//! Between the matrices it is attention of `heads` heads whose q and k are nope + rope wide and
//! whose v and o are value wide; in bytes and in operations that is the same as heads of the mean
//! of the two widths, which is what stands in [`ModelConfig::head_dim`].

use alloc::string::String;

use crate::ModelConfig;
use crate::model::parameters;

mod names;

pub use names::NAMES;

/// A model to plan for.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// What it is called.
    pub name: String,
    /// Its shape; under latent attention `kv_heads` are `heads`, and `head_dim` is the mean of what
    /// q and k, and what v and o have.
    pub config: ModelConfig,
    /// Multi-head latent attention, where it has that.
    pub latent: Option<Latent>,
    /// Tokens of its longest sequence, as it was published.
    pub max_positions: usize,
}

/// Widths of multi-head latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latent {
    /// The narrow form of queries; none: they are made in one product.
    pub q_rank: Option<usize>,
    /// The narrow form of keys and values.
    pub kv_rank: usize,
    /// Of a head of q and k, what does not turn with the position.
    pub nope_dim: usize,
    /// Of it, what turns.
    pub rope_dim: usize,
    /// Of a head of v.
    pub value_dim: usize,
}

impl Latent {
    /// Width of a head of q and k.
    #[must_use]
    pub fn query_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// The width that stands in `head_dim`.
    #[must_use]
    pub fn mean_dim(&self) -> usize {
        (self.query_dim() + self.value_dim) / 2
    }

    /// Elements of a block's matrices that every tensor parallel rank has whole, with the norms of
    /// the narrow forms.
    #[must_use]
    pub fn whole(&self, hidden: usize) -> (u64, u64) {
        let narrow =
            self.q_rank.map_or(0, |rank| rank * hidden) + (self.kv_rank + self.rope_dim) * hidden;
        (
            narrow as u64,
            (self.q_rank.unwrap_or(0) + self.kv_rank) as u64,
        )
    }

    /// Elements of the matrices that are cut by heads, for one head.
    #[must_use]
    pub fn per_head(&self, hidden: usize) -> u64 {
        let q = self.q_rank.unwrap_or(hidden) * self.query_dim();
        let kv = self.kv_rank * (self.nope_dim + self.value_dim);
        (q + kv + self.value_dim * hidden) as u64
    }

    /// Elements of a token's keys and values as inference keeps them: the narrow form, once for all
    /// heads.
    #[must_use]
    pub fn cached(&self) -> u64 {
        (self.kv_rank + self.rope_dim) as u64
    }
}

impl Shape {
    /// A model that the trainer trains.
    #[must_use]
    pub fn new(name: &str, config: ModelConfig, max_positions: usize) -> Self {
        Self {
            name: String::from(name),
            config,
            latent: None,
            max_positions,
        }
    }

    /// A published model by name ([`NAMES`]).
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        names::named(name)
    }

    /// Parameters, a tied table counted once.
    ///
    /// ```
    /// use quintet_planner::shape::Shape;
    /// assert_eq!(Shape::named("llama3-405b").unwrap().parameters(), 405_853_388_800);
    /// ```
    #[must_use]
    pub fn parameters(&self) -> u128 {
        let all = parameters(&self.config);
        let Some(latent) = self.latent else {
            return all;
        };
        let c = &self.config;
        let grouped = 4 * c.heads as u128 * c.head_dim as u128 * c.hidden as u128;
        let (matrices, norms) = latent.whole(c.hidden);
        let latent =
            u128::from(latent.per_head(c.hidden)) * c.heads as u128 + u128::from(matrices + norms);
        all + c.layers as u128 * latent - c.layers as u128 * grouped
    }

    /// Parameters that one token meets: of a layer's experts only those it goes to.
    #[must_use]
    pub fn active(&self) -> u128 {
        let Some(moe) = self.config.moe else {
            return self.parameters();
        };
        let layers = self.config.layers - moe.first_dense.min(self.config.layers);
        let idle = (moe.experts - moe.topk.min(moe.experts)) as u128;
        let expert = 3 * self.config.hidden as u128 * moe.ffn as u128;
        self.parameters() - layers as u128 * idle * expert
    }

    /// Bytes of a token's keys and values on each tensor parallel rank of an inference server, in
    /// `bytes` an element: heads are cut over `tp` down to one, which neighbours then hold twice; a
    /// latent cache has no heads to cut, so that every rank holds all of it.
    #[must_use]
    pub fn cache_bytes(&self, tp: usize, bytes: usize) -> u64 {
        let c = &self.config;
        let width = match self.latent {
            Some(latent) => latent.cached(),
            None => 2 * (c.kv_heads.div_ceil(tp.max(1)) * c.head_dim) as u64,
        };
        width * (c.layers * bytes) as u64
    }
}
