//! What a measured call works on, and where it lies.

use core::ops::Range;
use std::{vec, vec::Vec};

use crate::{
    Communicator, ReduceOp, Result, Transport,
    plan::{CollectiveShape as Shape, Operation},
};

/// The elements of one rank's call, as the host has them: what is read and what is written are parts of one buffer.
#[derive(Debug, Clone, PartialEq)]
pub struct Buffers {
    shape: Shape,
    world: usize,
    rank: usize,
    elements: Vec<f32>,
    places: [Range<usize>; 2],
}

impl Buffers {
    /// Filled for one call; what nobody has written is not a number. Input and output lie apart, but for
    /// broadcast and reduce, which work on one, and where they are `in_place` (all_reduce, all_gather,
    /// reduce_scatter).
    #[must_use]
    pub fn new(shape: &Shape, world: usize, rank: usize, in_place: bool) -> Self {
        let whole = shape.len(world);
        let part = whole / world.max(1);
        let own = rank * part..(rank + 1) * part;
        let at_root = if rank == 0 { whole } else { 0 };
        let apart = |input, output| [0..input, input..input + output];
        let places = match (shape.operation(), in_place) {
            (Operation::Broadcast | Operation::Reduce, _) | (Operation::AllReduce, true) => {
                [0..whole, 0..whole]
            }
            (Operation::AllGather, true) => [own, 0..whole],
            (Operation::ReduceScatter, true) => [0..whole, own],
            (Operation::ReduceScatter, false) => apart(whole, part),
            (Operation::AllGather, false) => apart(part, whole),
            (Operation::Gather, _) => apart(part, at_root),
            (Operation::Scatter, _) => apart(at_root, part),
            _ => apart(whole, whole),
        };
        let len = places[0].end.max(places[1].end);
        let mut elements = vec![f32::NAN; len];
        let input = elements[places[0].clone()].iter_mut().enumerate();
        input.for_each(|(i, x)| *x = value(rank, i));
        Self {
            shape: shape.clone(),
            world,
            rank,
            elements,
            places,
        }
    }

    /// The collective.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// All elements.
    #[must_use]
    pub fn elements(&self) -> &[f32] {
        &self.elements
    }

    /// The same, to be written.
    #[must_use]
    pub fn elements_mut(&mut self) -> &mut [f32] {
        &mut self.elements
    }

    /// Where of them the input lies, and where the output.
    #[must_use]
    pub fn places(&self) -> [Range<usize>; 2] {
        self.places.clone()
    }

    /// Elements of the output that differ after one call on what was filled in.
    #[must_use]
    pub fn wrong(&self) -> usize {
        if self.shape.operation() == Operation::Reduce && self.rank != 0 {
            return 0;
        }
        let output = self.elements[self.places[1].clone()].iter().enumerate();
        output.filter(|&(i, x)| *x != self.expected(i)).count()
    }

    /// The element that this rank must hold at `i` of its output.
    fn expected(&self, i: usize) -> f32 {
        let (world, rank) = (self.world, self.rank);
        let part = self.shape.len(world) / world.max(1);
        let sum = |i: usize| (0..world).map(|r| value(r, i)).sum();
        match self.shape.operation() {
            Operation::AllReduce | Operation::Reduce => sum(i),
            Operation::ReduceScatter => sum(rank * part + i),
            Operation::AllGather | Operation::Gather => value(i / part.max(1), i % part.max(1)),
            Operation::Scatter => value(0, rank * part + i),
            Operation::AllToAll => value(i / part.max(1), rank * part + i % part.max(1)),
            _ => value(0, i),
        }
    }
}

/// A value that tells rank and place, and whose sums over ranks are exact.
fn value(rank: usize, i: usize) -> f32 {
    ((rank * 31 + i * 7) % 127) as f32 - 63.0
}

/// Where the elements lie that calls work on.
pub trait Memory<T: Transport + Send + 'static> {
    /// What chooses how a collective is done there, where it is not the communicator's model.
    fn chooses(&self) -> Option<&'static str>;

    /// Has the elements of these buffers there, and no others.
    ///
    /// # Errors
    /// Where there is no room.
    fn write(&mut self, buffers: &Buffers) -> Result<()>;

    /// Performs the collective of the buffers that were written last.
    ///
    /// # Errors
    /// Those of the operation.
    fn call(&mut self, comm: &Communicator<T>, buffers: &mut Buffers) -> Result<()>;

    /// Brings the elements back.
    ///
    /// # Errors
    /// Where they are lost.
    fn read(&mut self, buffers: &mut Buffers) -> Result<()>;
}

/// The buffers themselves, as slices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Slices;

impl<T: Transport + Send + 'static> Memory<T> for Slices {
    fn chooses(&self) -> Option<&'static str> {
        None
    }

    fn write(&mut self, _: &Buffers) -> Result<()> {
        Ok(())
    }

    fn call(&mut self, comm: &Communicator<T>, buffers: &mut Buffers) -> Result<()> {
        let [input, output] = buffers.places();
        let (op, x) = (buffers.shape.operation(), &mut buffers.elements[..]);
        let counts = buffers.shape.counts();
        let apart = input.end <= output.start;
        match op {
            Operation::Broadcast => return comm.broadcast(x, 0),
            Operation::Reduce => return comm.reduce(x, ReduceOp::Sum, 0),
            Operation::AllReduce if !apart => return comm.all_reduce(x, ReduceOp::Sum),
            Operation::AllGather if !apart => return comm.all_gather_in_place(x, counts),
            Operation::ReduceScatter if !apart => {
                return comm.reduce_scatter_in_place(x, counts, ReduceOp::Sum);
            }
            _ => {}
        }
        let (input, output) = x.split_at_mut(output.start);
        match op {
            Operation::AllReduce => comm.all_reduce_into(input, output, ReduceOp::Sum),
            Operation::ReduceScatter => comm.reduce_scatter(input, output, ReduceOp::Sum),
            Operation::AllGather => comm.all_gather(input, output),
            Operation::Gather => comm.gather(input, output, 0),
            Operation::Scatter => comm.scatter(input, output, 0),
            _ => comm.all_to_all(input, output),
        }
    }

    fn read(&mut self, _: &mut Buffers) -> Result<()> {
        Ok(())
    }
}
