//! Who keeps what: the whole difference between the stages.
//!
//! The table stands in the head of this crate; [`ZeroStage::kept`] is its rows.
//! (Rajbhandari et al. 2020.)

use alloc::sync::Arc;
use core::ops::Range;

use crate::{Error, FlatLayout};

/// A ZeRO stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum ZeroStage {
    /// Everything on every rank.
    #[default]
    Ddp,
    /// Optimizer state is cut.
    One,
    /// Gradients are cut as well.
    Two,
    /// Parameters are cut as well.
    Three,
}

/// Whether a rank keeps a part whole or its chunk of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keep {
    /// All of it.
    Whole,
    /// This rank's chunk.
    Chunk,
}

/// What a stage keeps between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kept {
    /// Parameters.
    pub param: Keep,
    /// Gradients.
    pub grad: Keep,
    /// Moments and master weights.
    pub state: Keep,
}

impl ZeroStage {
    /// The stage of this number.
    ///
    /// # Errors
    /// [`Error::Stage`] above 3.
    pub const fn from_number(stage: u8) -> Result<Self, Error> {
        Ok(match stage {
            0 => ZeroStage::Ddp,
            1 => ZeroStage::One,
            2 => ZeroStage::Two,
            3 => ZeroStage::Three,
            stage => return Err(Error::Stage { stage }),
        })
    }

    /// Its number, as flags spell it.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// The row of the table.
    #[must_use]
    pub const fn kept(self) -> Kept {
        use Keep::{Chunk, Whole};
        let (param, grad, state) = match self {
            ZeroStage::Ddp => (Whole, Whole, Whole),
            ZeroStage::One => (Whole, Whole, Chunk),
            ZeroStage::Two => (Whole, Chunk, Chunk),
            ZeroStage::Three => (Chunk, Chunk, Chunk),
        };
        Kept { param, grad, state }
    }
}

/// A layout and the stage under which it is kept.
#[derive(Debug, Clone)]
pub struct Partition {
    layout: Arc<FlatLayout>,
    stage: ZeroStage,
}

impl Partition {
    /// Who keeps what of `layout`.
    #[must_use]
    pub fn new(layout: Arc<FlatLayout>, stage: ZeroStage) -> Self {
        Self { layout, stage }
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &Arc<FlatLayout> {
        &self.layout
    }

    /// The stage.
    #[must_use]
    pub fn stage(&self) -> ZeroStage {
        self.stage
    }

    /// Whether reduced gradients are valid in the rank's own chunk only.
    #[must_use]
    pub fn scatters(&self) -> bool {
        self.stage.kept().state == Keep::Chunk
    }

    /// Whether gradients are kept in chunks, and reduced after each microbatch.
    #[must_use]
    pub fn cuts_grads(&self) -> bool {
        self.stage.kept().grad == Keep::Chunk
    }

    /// Whether a part is at rest in chunks of several ranks, and must be gathered for its use.
    #[must_use]
    pub fn gathers(&self, part: usize) -> bool {
        let several = self.layout.parts().get(part).is_some_and(|p| p.places > 1);
        several && self.stage.kept().param == Keep::Chunk
    }

    /// The range of a part for which this rank keeps parameters at rest.
    #[must_use]
    pub fn param(&self, part: usize) -> Range<usize> {
        self.range(part, self.stage.kept().param)
    }

    /// The range of a part for which this rank keeps gradients until the step.
    #[must_use]
    pub fn grad(&self, part: usize) -> Range<usize> {
        self.range(part, self.stage.kept().grad)
    }

    /// The range of a part for which this rank keeps optimizer state and takes the step.
    #[must_use]
    pub fn state(&self, part: usize) -> Range<usize> {
        self.range(part, self.stage.kept().state)
    }

    fn range(&self, part: usize, keep: Keep) -> Range<usize> {
        match (self.layout.parts().get(part), keep) {
            (Some(p), Keep::Whole) => 0..p.len,
            (Some(p), Keep::Chunk) => p.chunk(p.place),
            (None, _) => 0..0,
        }
    }
}
