//! What a rank holds of a part: a run of it, looked at by indices in the part.

use core::ops::Range;

use quintet_kernels::{Backend, Data};

use crate::Error;

/// A view of `range` of a part.
#[derive(Debug)]
pub struct Held<'a, B: Backend, T: Data> {
    part: usize,
    range: Range<usize>,
    view: B::Ref<'a, T>,
}

impl<'a, B: Backend, T: Data> Held<'a, B, T> {
    pub(crate) fn new(part: usize, range: Range<usize>, view: B::Ref<'a, T>) -> Self {
        Self { part, range, view }
    }

    /// The range of the part that is held.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// All of it.
    #[must_use]
    pub fn view(&self) -> B::Ref<'a, T> {
        self.view
    }

    /// The elements `range` of the part.
    ///
    /// # Errors
    /// [`Error::Order`] where they do not all lie in what is held.
    pub fn cut(&self, range: Range<usize>) -> Result<B::Ref<'a, T>, Error> {
        if range.is_empty() {
            return Ok(B::slice(self.view, 0..0));
        }
        if range.start < self.range.start || range.end > self.range.end {
            return Err(Error::Order {
                what: "part",
                index: self.part,
                why: "elements are asked for that another rank holds",
            });
        }
        let start = self.range.start;
        Ok(B::slice(self.view, range.start - start..range.end - start))
    }
}
