//! Started operations: they own their buffer until it is given back.
//!
//! ```text
//! let p = comm.start_all_reduce(gradients, Sum, after)?;   // after: computed?
//! ... work ...                                             // the worker waits, sends, folds
//! let gradients = p.wait()?;
//! ```
//!
//! `Buf` is any owned buffer with `AsRef<[E]>` and `AsMut<[E]>`, which must show the same elements
//! each time.

use super::{
    Communicator,
    act::{Framed, Owned, Receiving, Sending},
    own,
};
use crate::{
    Element, Gate, Pending, ReduceOp, Result,
    performer::{View, fits},
    plan::CollectiveShape as Shape,
    transport::Transport,
};

impl<T: Transport + Send + 'static> Communicator<T> {
    /// Starts [`Communicator::all_reduce`] on `buffer` once `after` is open.
    ///
    /// # Errors
    /// [`crate::Error::System`] where the worker thread cannot be had; the rest comes from
    /// [`Pending::wait`].
    #[track_caller]
    pub fn start_all_reduce<E, B>(
        &self,
        buffer: B,
        op: ReduceOp,
        after: impl Gate + 'static,
    ) -> Result<Pending<B>>
    where
        E: Element,
        B: AsRef<[E]> + AsMut<[E]> + Send + 'static,
    {
        let len = buffer.as_ref().len();
        let framed = Framed {
            buffer,
            input: 0..len,
            output: 0..len,
        };
        self.start(Shape::AllReduce { len }, Some(op), framed, after)
    }

    /// Starts [`Communicator::reduce_scatter_in_place`] on `buffer` once `after` is open.
    ///
    /// # Errors
    /// [`crate::Error::Len`] and [`crate::Error::Plan`] at once; else as
    /// [`Communicator::start_all_reduce`].
    #[track_caller]
    pub fn start_reduce_scatter_v<E, B>(
        &self,
        buffer: B,
        counts: &[usize],
        op: ReduceOp,
        after: impl Gate + 'static,
    ) -> Result<Pending<B>>
    where
        E: Element,
        B: AsRef<[E]> + AsMut<[E]> + Send + 'static,
    {
        let (input, output) = (0..buffer.as_ref().len(), own(counts, self.rank()));
        let shape = Shape::ReduceScatter {
            counts: counts.to_vec(),
        };
        self.start(
            shape,
            Some(op),
            Framed {
                buffer,
                input,
                output,
            },
            after,
        )
    }

    /// Starts [`Communicator::all_gather_in_place`] on `buffer` once `after` is open.
    ///
    /// # Errors
    /// Those of [`Communicator::start_reduce_scatter_v`].
    #[track_caller]
    pub fn start_all_gather_v<E, B>(
        &self,
        buffer: B,
        counts: &[usize],
        after: impl Gate + 'static,
    ) -> Result<Pending<B>>
    where
        E: Element,
        B: AsRef<[E]> + AsMut<[E]> + Send + 'static,
    {
        let (input, output) = (own(counts, self.rank()), 0..buffer.as_ref().len());
        let shape = Shape::AllGather {
            counts: counts.to_vec(),
        };
        self.start(
            shape,
            None,
            Framed {
                buffer,
                input,
                output,
            },
            after,
        )
    }

    /// Starts [`Communicator::send`] of `buffer` once `after` is open.
    ///
    /// # Errors
    /// Those of [`Communicator::start_all_reduce`], and [`crate::Error::Layout`] where `to` is no rank.
    #[track_caller]
    pub fn start_send<E, B>(
        &self,
        buffer: B,
        to: usize,
        tag: u64,
        after: impl Gate + 'static,
    ) -> Result<Pending<B>>
    where
        E: Element,
        B: AsRef<[E]> + Send + 'static,
    {
        self.peer(to)?;
        self.core
            .start(Sending::<E, B>::new(to, tag, buffer), after, self.deadline)
    }

    /// Starts [`Communicator::recv`] into `buffer` once `after` is open.
    ///
    /// # Errors
    /// Those of [`Communicator::start_send`].
    #[track_caller]
    pub fn start_recv<E, B>(
        &self,
        buffer: B,
        from: usize,
        tag: u64,
        after: impl Gate + 'static,
    ) -> Result<Pending<B>>
    where
        E: Element,
        B: AsMut<[E]> + Send + 'static,
    {
        self.peer(from)?;
        self.core.start(
            Receiving::<E, B>::new(from, tag, buffer),
            after,
            self.deadline,
        )
    }

    #[track_caller]
    fn start<E, B>(
        &self,
        shape: Shape,
        redop: Option<ReduceOp>,
        mut framed: Framed<B>,
        after: impl Gate + 'static,
    ) -> Result<Pending<B>>
    where
        E: Element,
        B: AsRef<[E]> + AsMut<[E]> + Send + 'static,
    {
        let run = self.run(shape, E::DTYPE, redop)?;
        let (input, output) = (framed.input.clone(), framed.output.clone());
        fits::<E>(
            run.known.plan(),
            self.rank(),
            &View::Whole {
                buffer: framed.buffer.as_mut(),
                input,
                output,
            },
        )?;
        self.core
            .start(Owned::<E, _>::new(run, framed), after, self.deadline)
    }
}
