//! Parameters on their way through a pass: gathered one segment ahead, let go after their use.
//!
//! ```text
//! Gather(chunk)      begin(first)            on the wire while the message of the neighbour is
//! Forward, Backward  ready(k) begin(k + 1)   k has arrived, k + 1 is on the wire beside k's layers
//!                    leave(k)
//! Release(chunk)     end()
//! ```
//!
//! Below ZeRO-3 nothing is ever gathered and none of this does anything.

use quintet_kernels::{Backend, Collectives, Scalar};
use quintet_zero::{Gathering, Groups, ParamStore};

use crate::failure::Failure;

/// What of a chunk's parameters is gathered, by segment.
pub struct Lending<B: Backend, C: Collectives<B>, E: Scalar> {
    under_way: Gathering<B, C, E>,
    wanted: Vec<usize>,
}

impl<B: Backend, C: Collectives<B>, E: Scalar> Default for Lending<B, C, E> {
    fn default() -> Self {
        Self {
            under_way: Gathering::new(),
            wanted: Vec::new(),
        }
    }
}

impl<B: Backend, C: Collectives<B>, E: Scalar> Lending<B, C, E> {
    /// Starts to gather a segment, where that is not done already.
    ///
    /// # Errors
    /// What a collective fails with.
    pub fn begin(
        &mut self,
        params: &mut ParamStore<B, E>,
        groups: &impl Groups<C>,
        segment: usize,
    ) -> Result<(), Failure> {
        if !self.wanted.contains(&segment) {
            self.under_way.ahead(params, groups, segment)?;
            self.wanted.push(segment);
        }
        Ok(())
    }

    /// Waits for a segment that is to be used now.
    ///
    /// # Errors
    /// What a collective fails with.
    pub fn ready(&mut self, params: &mut ParamStore<B, E>, segment: usize) -> Result<(), Failure> {
        Ok(self.under_way.end_bucket(params, segment)?)
    }

    /// Lets a segment go.
    ///
    /// # Errors
    /// Where it was not begun.
    pub fn leave(&mut self, params: &mut ParamStore<B, E>, segment: usize) -> Result<(), Failure> {
        self.wanted.retain(|&s| s != segment);
        Ok(params.release(segment)?)
    }

    /// Lets go what is left when a pass ends.
    ///
    /// # Errors
    /// What a collective fails with that is still under way.
    pub fn end(&mut self, params: &mut ParamStore<B, E>) -> Result<(), Failure> {
        core::mem::take(&mut self.under_way).end(params)?;
        for segment in self.wanted.drain(..) {
            params.release(segment)?;
        }
        Ok(())
    }
}
