//! Parameters on their way back to all ranks after a step: waited for when forward needs them.
//!
//! ```text
//! start_step        step tied, last bucket .. first layers' bucket; each all-gather starts at once
//! next forward      end(bucket of layer 0)  layer 0   end(..)  layer 1 ...
//! ```

use alloc::vec::Vec;

use quintet_kernels::{Backend, Collectives, Scalar};

use crate::{Error, ParamStore};

/// All-gathers under way, from [`ShardedOptimizer::start_step`](crate::ShardedOptimizer). Until
/// they are ended the parameters of their buckets cannot be viewed; dropped, they are lost.
#[must_use = "the parameters come back only when it is ended"]
pub struct Gathering<B: Backend, C: Collectives<B>, E: Scalar> {
    started: Vec<(usize, C::Pending<E>)>,
}

impl<B: Backend, C: Collectives<B>, E: Scalar> Gathering<B, C, E> {
    pub(crate) fn new() -> Self {
        Self {
            started: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, part: usize, pending: Option<C::Pending<E>>) {
        self.started.extend(pending.map(|pending| (part, pending)));
    }

    /// Waits for the parameters of a bucket's layers, and for the tied ones.
    ///
    /// # Errors
    /// What a collective fails with.
    pub fn end_bucket(
        &mut self,
        params: &mut ParamStore<B, E>,
        bucket: usize,
    ) -> Result<(), Error> {
        let (parts, tied) = {
            let layout = params.layout();
            let found = layout.buckets().get(bucket).map(|b| b.parts.clone());
            (found.unwrap_or(0..0), layout.tied())
        };
        self.end_where(params, |part| parts.contains(&part) || tied.contains(&part))
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
