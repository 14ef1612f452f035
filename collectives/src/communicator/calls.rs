//! The blocking collectives, on the caller's slices.

use super::{Communicator, own};
use crate::{
    Element, Error, ReduceOp, Result, performer::View, plan::CollectiveShape as Shape,
    transport::Transport,
};

impl<T: Transport + Send + 'static> Communicator<T> {
    /// Every rank's `buffer` becomes the fold of all.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::PeerLost`], [`Error::Timeout`], [`Error::Aborted`].
    #[track_caller]
    pub fn all_reduce<E: Element>(&self, buffer: &mut [E], op: ReduceOp) -> Result<()> {
        let len = buffer.len();
        self.perform(Shape::AllReduce { len }, Some(op), whole(buffer))
    }

    /// `output` becomes the fold of all inputs, which stay.
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`], and [`Error::Len`].
    #[track_caller]
    pub fn all_reduce_into<E: Element>(
        &self,
        input: &[E],
        output: &mut [E],
        op: ReduceOp,
    ) -> Result<()> {
        let len = input.len();
        self.perform(
            Shape::AllReduce { len },
            Some(op),
            View::Apart { input, output },
        )
    }

    /// `output` becomes chunk `rank` of the fold; all chunks are as long as `output`.
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`], and [`Error::Len`].
    #[track_caller]
    pub fn reduce_scatter<E: Element>(
        &self,
        input: &[E],
        output: &mut [E],
        op: ReduceOp,
    ) -> Result<()> {
        let counts = std::vec![output.len(); self.world()];
        self.reduce_scatter_v(input, output, &counts, op)
    }

    /// `output` becomes chunk `rank` of the fold; chunk r has `counts[r]` elements.
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`], [`Error::Len`], and [`Error::Plan`] for bad counts.
    #[track_caller]
    pub fn reduce_scatter_v<E: Element>(
        &self,
        input: &[E],
        output: &mut [E],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        let shape = Shape::ReduceScatter {
            counts: counts.to_vec(),
        };
        self.perform(shape, Some(op), View::Apart { input, output })
    }

    /// Chunk `rank` of `buffer` becomes that chunk of the fold; the rest of the buffer stays.
    ///
    /// # Errors
    /// Those of [`Communicator::reduce_scatter_v`].
    #[track_caller]
    pub fn reduce_scatter_in_place<E: Element>(
        &self,
        buffer: &mut [E],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        let (input, output) = (0..buffer.len(), own(counts, self.rank()));
        let shape = Shape::ReduceScatter {
            counts: counts.to_vec(),
        };
        self.perform(
            shape,
            Some(op),
            View::Whole {
                buffer,
                input,
                output,
            },
        )
    }

    /// `output` becomes all inputs in rank order, all of one length.
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`], and [`Error::Len`].
    #[track_caller]
    pub fn all_gather<E: Element>(&self, input: &[E], output: &mut [E]) -> Result<()> {
        let counts = std::vec![input.len(); self.world()];
        self.all_gather_v(input, output, &counts)
    }

    /// `output` becomes all inputs in rank order; rank r gives `counts[r]` elements.
    ///
    /// # Errors
    /// Those of [`Communicator::reduce_scatter_v`].
    #[track_caller]
    pub fn all_gather_v<E: Element>(
        &self,
        input: &[E],
        output: &mut [E],
        counts: &[usize],
    ) -> Result<()> {
        let shape = Shape::AllGather {
            counts: counts.to_vec(),
        };
        self.perform(shape, None, View::Apart { input, output })
    }

    /// Each rank has filled chunk `rank` of `buffer`; all chunks come to be filled.
    ///
    /// # Errors
    /// Those of [`Communicator::reduce_scatter_v`].
    #[track_caller]
    pub fn all_gather_in_place<E: Element>(
        &self,
        buffer: &mut [E],
        counts: &[usize],
    ) -> Result<()> {
        let (input, output) = (own(counts, self.rank()), 0..buffer.len());
        let shape = Shape::AllGather {
            counts: counts.to_vec(),
        };
        self.perform(
            shape,
            None,
            View::Whole {
                buffer,
                input,
                output,
            },
        )
    }

    /// Every rank's `buffer` becomes the root's.
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`], and [`Error::Plan`] where `root` is no rank.
    #[track_caller]
    pub fn broadcast<E: Element>(&self, buffer: &mut [E], root: usize) -> Result<()> {
        let len = buffer.len();
        self.perform(Shape::Broadcast { len, root }, None, whole(buffer))
    }

    /// The root's `buffer` becomes the fold of all; the others' stay.
    ///
    /// # Errors
    /// Those of [`Communicator::broadcast`].
    #[track_caller]
    pub fn reduce<E: Element>(&self, buffer: &mut [E], op: ReduceOp, root: usize) -> Result<()> {
        let len = buffer.len();
        self.perform(Shape::Reduce { len, root }, Some(op), whole(buffer))
    }

    /// The root's `output` becomes all inputs in rank order, all of one length. Elsewhere `output`
    /// is not looked at and may be empty.
    ///
    /// # Errors
    /// Those of [`Communicator::broadcast`], and [`Error::Len`].
    #[track_caller]
    pub fn gather<E: Element>(&self, input: &[E], output: &mut [E], root: usize) -> Result<()> {
        let counts = std::vec![input.len(); self.world()];
        self.gather_v(input, output, &counts, root)
    }

    /// The same, rank r giving `counts[r]` elements.
    ///
    /// # Errors
    /// Those of [`Communicator::gather`], and [`Error::Plan`] for bad counts.
    #[track_caller]
    pub fn gather_v<E: Element>(
        &self,
        input: &[E],
        output: &mut [E],
        counts: &[usize],
        root: usize,
    ) -> Result<()> {
        let shape = Shape::Gather {
            counts: counts.to_vec(),
            root,
        };
        self.perform(shape, None, View::Apart { input, output })
    }

    /// `output` becomes chunk `rank` of the root's `input`, all chunks as long as `output`.
    /// Elsewhere `input` is not looked at and may be empty.
    ///
    /// # Errors
    /// Those of [`Communicator::gather`].
    #[track_caller]
    pub fn scatter<E: Element>(&self, input: &[E], output: &mut [E], root: usize) -> Result<()> {
        let counts = std::vec![output.len(); self.world()];
        self.scatter_v(input, output, &counts, root)
    }

    /// The same, chunk r having `counts[r]` elements.
    ///
    /// # Errors
    /// Those of [`Communicator::gather_v`].
    #[track_caller]
    pub fn scatter_v<E: Element>(
        &self,
        input: &[E],
        output: &mut [E],
        counts: &[usize],
        root: usize,
    ) -> Result<()> {
        let shape = Shape::Scatter {
            counts: counts.to_vec(),
            root,
        };
        self.perform(shape, None, View::Apart { input, output })
    }

    /// Part r of `input` goes to rank r; part r of `output` comes from it; all of one length.
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`], and [`Error::Len`].
    #[track_caller]
    pub fn all_to_all<E: Element>(&self, input: &[E], output: &mut [E]) -> Result<()> {
        let world = self.world();
        if !input.len().is_multiple_of(world) {
            let expected = input.len().next_multiple_of(world);
            return Err(Error::Len {
                op: "all_to_all",
                what: "the input",
                expected,
                got: input.len(),
            });
        }
        let len = input.len() / world;
        self.perform(Shape::AllToAll { len }, None, View::Apart { input, output })
    }

    /// The next `send[r]` elements of `input` go to rank r, the next `recv[r]` of `output` come
    /// from it, for r = 0, 1, ... A pair of ranks that disagrees is found out on receipt.
    ///
    /// # Errors
    /// Those of [`Communicator::reduce_scatter_v`], and [`Error::Message`].
    #[track_caller]
    pub fn all_to_all_v<E: Element>(
        &self,
        input: &[E],
        send: &[usize],
        output: &mut [E],
        recv: &[usize],
    ) -> Result<()> {
        let shape = Shape::AllToAllV {
            send: send.to_vec(),
            recv: recv.to_vec(),
        };
        self.perform(shape, None, View::Apart { input, output })
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// Those of [`Communicator::all_reduce`].
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        let view: View<'_, u8> = View::Apart {
            input: &[],
            output: &mut [],
        };
        self.perform(Shape::Barrier, None, view)
    }
}

fn whole<E>(buffer: &mut [E]) -> View<'_, E> {
    let len = buffer.len();
    View::Whole {
        buffer,
        input: 0..len,
        output: 0..len,
    }
}
