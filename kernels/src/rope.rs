//! Rotary position embedding (Su et al. 2021) in the half-split form of Llama: of the first
//! `rotary` elements of a head, element i of the first half turns with element i of the second
//! half by `pos * theta^(-2i/rotary)`; elements after them stay (as in GPT-NeoX and GLM).
//! The backward is the turn by the negative angle.

pub mod cpu;
pub mod naive;

use crate::{Backend, Error, Float};

/// Shape of one call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeSpec {
    /// Rows (tokens).
    pub rows: usize,
    /// Heads per token.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Elements of a head that turn, its first; even, and at most `head_dim`.
    pub rotary: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Turn backwards: the adjoint.
    pub inverse: bool,
}

/// RoPE on a device.
pub trait Rope: Backend {
    /// Turns `x[t, h, d]` in place by `pos[t]`.
    ///
    /// # Errors
    /// [`Error::Len`] or [`Error::Spec`] where arguments do not fit.
    fn rope<E: Float>(
        &self,
        spec: &RopeSpec,
        pos_t: Self::Ref<'_, i32>,
        x_thd: Self::Mut<'_, E>,
    ) -> Result<(), Error>;
}
