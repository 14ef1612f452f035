//! Parameters on their way to where they are used: waited for when a layer needs them.
//!
//! ```text
//! stages 1, 2   start_step        step tied, last bucket .. first layers' bucket; each all-gather
//!                                 starts at once
//!               next forward      end_bucket(of layer 0)  layer 0   end_bucket(..)  layer 1 ...
//!
//! stage 3       ahead(0)  end_bucket(0) ahead(1) | layers of 0 | release(0) end_bucket(1) ahead(2) ...
//!                                       ==== 1 on the wire ====
//! ```

use alloc::vec::Vec;

use quintet_kernels::{Backend, Collectives, Scalar};

use crate::{Error, Groups, ParamStore};

/// All-gathers under way, of the step before ([`ShardedOptimizer::start_step`]) or ahead of use
/// ([`Gathering::ahead`]). Until they are ended the parameters of their buckets cannot be viewed;
/// dropped, they are lost.
///
/// [`ShardedOptimizer::start_step`]: crate::ShardedOptimizer::start_step
#[must_use = "the parameters come back only when it is ended"]
pub struct Gathering<B: Backend, C: Collectives<B>, E: Scalar> {
    started: Vec<(usize, C::Pending<E>)>,
}

impl<B: Backend, C: Collectives<B>, E: Scalar> Default for Gathering<B, C, E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B: Backend, C: Collectives<B>, E: Scalar> Gathering<B, C, E> {
    /// None under way.
    pub fn new() -> Self {
        Self {
            started: Vec::new(),
        }
    }

    /// Starts to gather what the layers of a bucket read and what is not gathered already, under
    /// stage 3; each call is answered by a [`ParamStore::release`]. All ranks that share
    /// parameters gather the same buckets in the same order.
    ///
    /// # Errors
    /// [`Error::Index`] where there is no such bucket, and what a collective or the device fails
    /// with.
    pub fn ahead(
        &mut self,
        params: &mut ParamStore<B, E>,
        groups: &impl Groups<C>,
        bucket: usize,
    ) -> Result<(), Error> {
        for part in params.want(bucket)? {
            let pending = params.start_gather::<C>(groups, part)?;
            self.push(part, pending);
        }
        Ok(())
    }

    pub(crate) fn push(&mut self, part: usize, pending: Option<C::Pending<E>>) {
        self.started.extend(pending.map(|pending| (part, pending)));
    }

    /// Waits for what the layers of a bucket read.
    ///
    /// # Errors
    /// What a collective fails with.
    pub fn end_bucket(
        &mut self,
        params: &mut ParamStore<B, E>,
        bucket: usize,
    ) -> Result<(), Error> {
        let parts = params.layout().parts_of(bucket);
        self.end_where(params, |part| parts.contains(&part))
    }

    /// Waits for all.
    ///
    /// # Errors
    /// What a collective fails with.
    pub fn end(mut self, params: &mut ParamStore<B, E>) -> Result<(), Error> {
        self.end_where(params, |_| true)
    }

    fn end_where(
        &mut self,
        params: &mut ParamStore<B, E>,
        wanted: impl Fn(usize) -> bool,
    ) -> Result<(), Error> {
        let (now, later) = core::mem::take(&mut self.started)
            .into_iter()
            .partition(|(part, _)| wanted(*part));
        self.started = later;
        let mut now: Vec<(usize, C::Pending<E>)> = now;
        now.drain(..)
            .try_for_each(|(part, pending)| params.end_gather(part, pending))
    }
}
