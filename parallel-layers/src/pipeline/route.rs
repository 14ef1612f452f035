//! Which chunk of the model lies on which stage, and so which way a microbatch takes.
//!
//! ```text
//! looped   stage 0   stage 1   stage 2         V   stage 0   stage 1   stage 2
//! chunk 0     0 -----> 1 -------> 2                   0 -----> 1 -------> 2
//!             .---------------------'                                     |
//! chunk 1     3 -----> 4 -------> 5                   5 <----- 4 <------- 3
//! ```
//!
//! A *place* is a number along the model: 0 holds the embedding, the last one the loss. Two
//! places that follow each other on one stage (the turning point of a V; all of them where there
//! is one stage) hand over without a message.

/// The places of a pipeline's chunks along the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    stages: usize,
    chunks: usize,
    turns: bool,
}

impl Route {
    /// Chunks are dealt to the stages in turn, first to last, over and over (Narayanan et al.
    /// 2021).
    #[must_use]
    pub const fn looped(stages: usize, chunks: usize) -> Self {
        let turns = false;
        Self {
            stages,
            chunks,
            turns,
        }
    }

    /// There and back: stage `s` of `p` holds the places `s` and `2 p - 1 - s` (DualPipe-V; the V
    /// of Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").
    #[must_use]
    pub const fn v(stages: usize) -> Self {
        let (chunks, turns) = (2, true);
        Self {
            stages,
            chunks,
            turns,
        }
    }

    /// Pipeline ranks.
    #[must_use]
    pub const fn stages(&self) -> usize {
        self.stages
    }

    /// Chunks on each of them.
    #[must_use]
    pub const fn chunks(&self) -> usize {
        self.chunks
    }

    /// Chunks of the whole model.
    #[must_use]
    pub const fn places(&self) -> usize {
        self.stages * self.chunks
    }

    /// Where a stage's chunk lies along the model.
    #[must_use]
    pub const fn place(&self, stage: usize, chunk: usize) -> usize {
        let along = if self.turns && chunk % 2 == 1 {
            self.stages.saturating_sub(1).saturating_sub(stage)
        } else {
            stage
        };
        chunk * self.stages + along
    }

    /// The stage and its chunk at a place; none beyond the model.
    #[must_use]
    pub fn home(&self, place: usize) -> Option<(usize, usize)> {
        if place >= self.places() {
            return None;
        }
        let (chunk, along) = (place / self.stages, place % self.stages);
        let back = self.turns && chunk % 2 == 1;
        let stage = if back { self.stages - 1 - along } else { along };
        Some((stage, chunk))
    }

    /// The stage and chunk whose output a stage's chunk takes; none for the first of the model.
    #[must_use]
    pub fn before(&self, stage: usize, chunk: usize) -> Option<(usize, usize)> {
        self.home(self.place(stage, chunk).checked_sub(1)?)
    }

    /// The stage and chunk that takes the output; none for the last of the model.
    #[must_use]
    pub fn after(&self, stage: usize, chunk: usize) -> Option<(usize, usize)> {
        self.home(self.place(stage, chunk) + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    #[test]
    fn every_place_has_one_home() {
        for stages in 1..=6 {
            for route in [
                Route::looped(stages, 1),
                Route::looped(stages, 3),
                Route::v(stages),
            ] {
                let mut seen = BTreeSet::new();
                for stage in 0..stages {
                    for chunk in 0..route.chunks() {
                        let place = route.place(stage, chunk);
                        assert_eq!(route.home(place), Some((stage, chunk)));
                        assert!(seen.insert(place));
                        // A stage's chunks are in the order of the model.
                        assert!(chunk == 0 || place > route.place(stage, chunk - 1));
                    }
                }
                assert_eq!(seen.len(), route.places());
                assert_eq!(route.home(route.places()), None);
            }
        }
    }

    #[test]
    fn a_v_turns_on_the_last_stage() {
        let route = Route::v(3);
        assert_eq!(route.after(2, 0), Some((2, 1)));
        assert_eq!(route.after(1, 1), Some((0, 1)));
        assert_eq!((route.before(0, 0), route.after(0, 1)), (None, None));
        assert_eq!(Route::looped(3, 2).after(2, 0), Some((0, 1)));
    }
}
