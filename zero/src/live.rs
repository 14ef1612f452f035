//! Which whole buffers live beside the chunks, as bookkeeping without a buffer: the store and the
//! gradients ask it what to make and what to let go, and a planner asks it how much that is.
//!
//! ```text
//! parameters   want(2) want(1) | layers of 2 | done(2) want(0) | layers of 1 | done(1) ...
//!              gather  gather                 let go  gather
//!
//! gradients    fill(layer) | reduce(0) | fill(layer) | reduce(1)               | ...
//!              make          0 moves     make          0 must be over, 1 moves
//! ```

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use crate::{Error, Partition};

/// Buckets whose reductions may be under way while the next is filled: it has as long as that takes.
/// The whole gradients of so many buckets live beside the one being filled.
pub const IN_FLIGHT: usize = 1;

/// Whole copies of parameters that are at rest in chunks.
#[derive(Debug, Clone)]
pub struct WholeParams {
    partition: Partition,
    /// For each part, the buckets that want it.
    wanted: Vec<usize>,
}

impl WholeParams {
    /// None.
    #[must_use]
    pub fn new(partition: &Partition) -> Self {
        Self {
            wanted: vec![0; partition.layout().parts().len()],
            partition: partition.clone(),
        }
    }

    /// The layers of a bucket are to be used: the parts that must be gathered for it now.
    ///
    /// # Errors
    /// [`Error::Index`] where there is no such bucket.
    pub fn want(&mut self, bucket: usize) -> Result<Vec<usize>, Error> {
        let mut parts = self.parts(bucket)?;
        parts.retain(|&part| {
            self.wanted[part] += 1;
            self.wanted[part] == 1
        });
        Ok(parts)
    }

    /// The layers of a bucket have been used: the parts to let go.
    ///
    /// # Errors
    /// [`Error::Index`], and [`Error::Order`] where it is not wanted.
    pub fn done(&mut self, bucket: usize) -> Result<Vec<usize>, Error> {
        let mut parts = self.parts(bucket)?;
        if parts.iter().any(|&part| self.wanted[part] == 0) {
            return Err(Error::Order {
                what: "bucket",
                index: bucket,
                why: "its parameters are released without having been gathered",
            });
        }
        parts.retain(|&part| {
            self.wanted[part] -= 1;
            self.wanted[part] == 0
        });
        Ok(parts)
    }

    /// Whether a whole copy of a part is wanted.
    pub(crate) fn wants(&self, part: usize) -> bool {
        self.wanted.get(part).is_some_and(|&n| n > 0)
    }

    /// Whether no whole copy is wanted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.wanted.iter().all(|&n| n == 0)
    }

    /// Elements of all whole copies.
    #[must_use]
    pub fn len(&self) -> usize {
        let parts = self.partition.layout().parts().iter().zip(&self.wanted);
        parts.filter(|(_, n)| **n > 0).map(|(p, _)| p.len).sum()
    }

    /// Elements at rest, which never go.
    #[must_use]
    pub fn at_rest(&self) -> usize {
        let parts = 0..self.wanted.len();
        parts.map(|part| self.partition.param(part).len()).sum()
    }

    fn parts(&self, bucket: usize) -> Result<Vec<usize>, Error> {
        let layout = self.partition.layout();
        if bucket >= layout.buckets().len() {
            return Err(Error::Index {
                what: "bucket",
                index: bucket,
                count: layout.buckets().len(),
            });
        }
        let mut parts = layout.parts_of(bucket);
        parts.retain(|&part| self.partition.gathers(part));
        Ok(parts)
    }
}

/// Whole gradients of parts that are kept in chunks.
#[derive(Debug, Clone)]
pub struct WholeGrads {
    partition: Partition,
    filling: Vec<bool>,
    moving: VecDeque<usize>,
}

impl WholeGrads {
    /// None.
    #[must_use]
    pub fn new(partition: &Partition) -> Self {
        Self {
            filling: vec![false; partition.layout().parts().len()],
            moving: VecDeque::new(),
            partition: partition.clone(),
        }
    }

    /// Whether layers add a part's gradient into what is kept until the step: below stage 2, and
    /// where this rank alone owns it.
    #[must_use]
    pub fn in_place(&self, part: usize) -> bool {
        let alone = |p: &crate::Part| p.places == 1;
        !self.partition.cuts_grads() || self.partition.layout().parts().get(part).is_none_or(alone)
    }

    /// Gradients of a layer are to be added: the parts to make for them, all zeros.
    ///
    /// # Errors
    /// [`Error::Index`] where there is no such layer.
    pub fn fill(&mut self, layer: usize) -> Result<Vec<usize>, Error> {
        let layout = self.partition.layout().clone();
        let entries = layout.layer(layer)?.iter();
        let parts: Vec<usize> = entries.map(|&e| layout.entries()[e].part).collect();
        Ok(parts.into_iter().filter(|&part| self.make(part)).collect())
    }

    /// A part is to be added to or reduced; whether it must be made for that.
    pub(crate) fn make(&mut self, part: usize) -> bool {
        !self.in_place(part) && !core::mem::replace(&mut self.filling[part], true)
    }

    /// A bucket's reduction is to start: the buckets that must be over before.
    ///
    /// # Errors
    /// [`Error::Index`] where there is no such bucket.
    pub fn reduce(&mut self, bucket: usize) -> Result<Vec<usize>, Error> {
        for part in self.parts(bucket)? {
            self.filling[part] = false;
        }
        let over = (self.moving.len() + 1).saturating_sub(IN_FLIGHT);
        let over = self.moving.drain(..over).collect();
        self.moving.push_back(bucket);
        Ok(over)
    }

    /// The step ends: the buckets that are still under way.
    pub fn finish(&mut self) -> Vec<usize> {
        for part in self.partition.layout().tied() {
            self.filling[part] = false;
        }
        self.moving.drain(..).collect()
    }

    /// Elements of all whole gradients: being filled, or under way.
    #[must_use]
    pub fn len(&self) -> usize {
        let all = self.partition.layout().parts();
        let filling = all.iter().zip(&self.filling).filter(|(_, on)| **on);
        let moving = self.moving.iter().map(|&bucket| {
            let parts = self.parts(bucket).unwrap_or_default();
            parts.into_iter().map(|part| all[part].len).sum::<usize>()
        });
        filling.map(|(p, _)| p.len).sum::<usize>() + moving.sum::<usize>()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.moving.is_empty() && !self.filling.contains(&true)
    }

    /// Elements kept until the step, which never go.
    #[must_use]
    pub fn at_rest(&self) -> usize {
        let parts = 0..self.filling.len();
        parts.map(|part| self.partition.grad(part).len()).sum()
    }

    /// The parts of a bucket that are reduced with it.
    fn parts(&self, bucket: usize) -> Result<Vec<usize>, Error> {
        let buckets = self.partition.layout().buckets();
        let found = buckets.get(bucket).ok_or(Error::Index {
            what: "bucket",
            index: bucket,
            count: buckets.len(),
        })?;
        let parts = found.parts.clone();
        Ok(parts.filter(|&part| !self.in_place(part)).collect())
    }
}
