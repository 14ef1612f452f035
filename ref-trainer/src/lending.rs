//! Parameters on their way through a pass: gathered one segment ahead, let go after their use.
//!
//! ```text
//! Gather(chunk)      begin(first)            on the wire while the message of the neighbour is
//! Forward, Backward  enter(k, next k + 1)    k has arrived, k + 1 is on the wire beside k's layers
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
    /// Starts to gather a segment.
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

    /// Waits for a segment that is to be used now, and starts to gather the next.
    ///
    /// # Errors
    /// What a collective fails with.
    pub fn enter(
        &mut self,
        params: &mut ParamStore<B, E>,
        groups: &impl Groups<C>,
        segment: usize,
        next: Option<usize>,
    ) -> Result<(), Failure> {
        self.begin(params, groups, segment)?;
        self.under_way.end_bucket(params, segment)?;
        next.map_or(Ok(()), |next| self.begin(params, groups, next))
    }

    /// Lets a segment go.
    ///
    /// # Errors
    /// Where it was not entered.
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
