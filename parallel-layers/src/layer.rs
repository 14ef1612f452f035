//! What a layer is: a description of maths and shapes that owns no parameter.
//!
//! ```text
//! params() ----------------> ParamSpecs, in the order views are passed
//! forward(x)              -> y, Saved          Saved: what backward will need, counted memory
//! backward_input(dy)      -> dx                leaves in Saved what the weights' gradient needs
//! backward_weight()       -> adds into grads   ends Saved
//! ```
//!
//! Plain backward is the two in order; a zero-bubble pipeline puts time between them. Values
//! between layers are `[token, feature]` with tokens = sequences x positions, row-major.
//!
//! Legend of shape suffixes: t tokens here, b sequences, s positions, d hidden, h query heads
//! here, g KV heads here, e head width, f MLP width here, v vocabulary entries here.

use alloc::vec::Vec;

use quintet_collectives::ParamSpec;
use quintet_kernels::{Backend, Collectives, Scalar};

use crate::Error;
use crate::context::{ContextGroups, ContextPlaces};
use crate::dropout::Drawn;

/// What a layer works with: the device, and the ranks that share its weights.
#[derive(Debug)]
pub struct Ctx<'a, B, C> {
    /// The device of this rank.
    pub device: &'a B,
    /// The tensor parallel group.
    pub tp: &'a C,
    /// The ranks that share a microbatch, each with tokens of its own: cp x tp.
    pub replica: &'a C,
    /// The ranks that share the experts.
    pub ep: &'a C,
    /// The ranks that share each expert.
    pub etp: &'a C,
    /// The context parallel groups.
    pub cp: ContextGroups<'a, C>,
}

/// One microbatch on this rank: `sequences` of `positions` tokens each, flattened. Where cp cuts
/// sequences, the tokens here are those that [`held`](crate::context::held) names.
pub struct MicroBatch<B: Backend, E: Scalar> {
    /// Sequences in the microbatch.
    pub sequences: usize,
    /// Tokens of a sequence that are here.
    pub positions: usize,
    /// Token ids, `[t]`.
    pub ids_t: B::Buf<i32>,
    /// Positions within the document, `[t]`.
    pub pos_t: B::Buf<i32>,
    /// Documents, `[t]`; `None` where each sequence is one.
    pub doc_t: Option<B::Buf<i32>>,
    /// Where all tokens of the sequences stand; `None` where all are here.
    pub context: Option<ContextPlaces<B>>,
    /// The next token of each position, `[t]`.
    pub labels_t: B::Buf<i32>,
    /// `1 / Count` where the token is valid, 0 where it is masked, `[t]`; Count is the number of
    /// valid tokens of the whole global batch, so that losses and gradients are summed, never
    /// averaged, over ranks and microbatches.
    pub weight_t: B::Buf<E::Acc>,
    /// Share of this microbatch in the step, 1 / microbatches: the weight of what is a mean over
    /// microbatches and not over valid tokens.
    pub share: f64,
    /// What dropout is keyed by; `None` in evaluation, where nothing is let go.
    pub drawn: Option<Drawn<B>>,
}

impl<B: Backend, E: Scalar> MicroBatch<B, E> {
    /// Tokens here.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.sequences * self.positions
    }
}

/// A layer from activations to activations.
pub trait Layer<B: Backend, C: Collectives<B>, E: Scalar> {
    /// What forward leaves for backward.
    type Saved: Send;

    /// The parameters, in the order in which views are passed.
    fn params(&self) -> Vec<ParamSpec>;

    /// `y` from `x`. The views are this rank's parts, in the order of [`Layer::params`].
    ///
    /// # Errors
    /// What a kernel or a collective refuses or fails with.
    fn forward(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        x_td: B::Buf<E>,
    ) -> Result<(B::Buf<E>, Self::Saved), Error>;

    /// Gradient of `x` from the gradient of `y`.
    ///
    /// # Errors
    /// As [`Layer::forward`].
    fn backward_input(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        params: &[B::Ref<'_, E>],
        saved: &mut Self::Saved,
        dy_td: B::Buf<E>,
    ) -> Result<B::Buf<E>, Error>;

    /// Adds the gradients of the parameters, in the order of [`Layer::params`].
    ///
    /// # Errors
    /// As [`Layer::forward`], and [`Error::Order`] before [`Layer::backward_input`].
    fn backward_weight(
        &self,
        ctx: &Ctx<'_, B, C>,
        batch: &MicroBatch<B, E>,
        saved: Self::Saved,
        grads: &mut [B::Mut<'_, E::Acc>],
    ) -> Result<(), Error>;
}
