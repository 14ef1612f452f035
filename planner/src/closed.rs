//! The same figures as [`traffic`](crate::traffic), [`states`](crate::states) and
//! [`memory`](crate::memory), in closed form: what one of millions of layouts costs, without its
//! ranks, its ledger or its schedule being made.
//!
//! ```text
//! kind of layer     what it has, once          times how many of it a stage has, or holds at once
//! embedding         parts, bytes, flows        [1, 0, 0, 0]
//! dense block                                  [0, 8, 0, 0]
//! block of experts                             [0, 0, 8, 0]
//! head                                         [0, 0, 0, 1]
//! ```
//!
//! The rank that is described is the first of its stage on every other axis, which has the longest
//! pieces of all that does not divide. Tests draw layouts at random and want the exact figures of
//! that rank, and of the fullest rank, from these forms. What they need for it, and the search keeps:
//! each layer is a bucket of its own, contributions are added in rank order, and messages are long
//! enough for the plans that move least. A table that is tied is counted on both of its uses.

use alloc::vec::Vec;

use crate::{Layout, ModelConfig};

pub mod held;
pub mod parts;
pub mod pipeline;
pub mod sent;

/// Something for each kind of layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ByKind<T> {
    /// The embedding.
    pub embed: T,
    /// A decoder block whose MLP is dense.
    pub dense: T,
    /// One with experts.
    pub moe: T,
    /// Final norm, linear and loss.
    pub head: T,
}

/// How many layers of each kind.
pub type Counts = ByKind<u64>;

impl<T> ByKind<T> {
    /// The same with each changed.
    pub fn map<U>(self, change: impl Fn(T) -> U) -> ByKind<U> {
        ByKind {
            embed: change(self.embed),
            dense: change(self.dense),
            moe: change(self.moe),
            head: change(self.head),
        }
    }

    /// In the order of the model.
    pub fn each(&self) -> [&T; 4] {
        [&self.embed, &self.dense, &self.moe, &self.head]
    }
}

impl Counts {
    /// The sum over the layers of what each of its kind has.
    #[must_use]
    pub fn sum(&self, each: &ByKind<u64>) -> u64 {
        self.embed * each.embed
            + self.dense * each.dense
            + self.moe * each.moe
            + self.head * each.head
    }

    /// The same in seconds.
    #[must_use]
    pub fn time(&self, each: &ByKind<f64>) -> f64 {
        self.embed as f64 * each.embed
            + self.dense as f64 * each.dense
            + self.moe as f64 * each.moe
            + self.head as f64 * each.head
    }

    /// Layers in all.
    #[must_use]
    pub fn all(&self) -> u64 {
        self.embed + self.dense + self.moe + self.head
    }

    fn add(&mut self, other: &Self, times: u64) {
        self.embed += times * other.embed;
        self.dense += times * other.dense;
        self.moe += times * other.moe;
        self.head += times * other.head;
    }

    fn take(&mut self, other: &Self, times: u64) {
        self.embed -= times * other.embed;
        self.dense -= times * other.dense;
        self.moe -= times * other.moe;
        self.head -= times * other.head;
    }

    fn covers(&self, other: &Self) -> bool {
        self.each().iter().zip(other.each()).all(|(a, b)| **a >= *b)
    }
}

/// The layers of a stage's chunk.
#[must_use]
pub fn layers(model: &ModelConfig, layout: &Layout, stage: usize, chunk: usize) -> Counts {
    let place = layout.route().place(stage, chunk);
    let blocks = layout.blocks(model.layers, place);
    let first = model.moe.map_or(model.layers, |moe| moe.first_dense);
    let dense = blocks.end.min(first).saturating_sub(blocks.start);
    Counts {
        embed: u64::from(place == 0),
        dense: dense as u64,
        moe: (blocks.len() - dense) as u64,
        head: u64::from(place + 1 == layout.places()),
    }
}

/// The layers of all chunks of a stage.
#[must_use]
pub fn stage(model: &ModelConfig, layout: &Layout, stage: usize) -> Vec<Counts> {
    (0..layout.chunks())
        .map(|chunk| layers(model, layout, stage, chunk))
        .collect()
}
