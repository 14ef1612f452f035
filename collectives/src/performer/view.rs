//! The memory of one operation on one rank.

use core::ops::Range;

use crate::{Element, plan::What};

/// The memory of one operation on one rank.
#[derive(Debug)]
pub enum View<'a, E> {
    /// Input and output lie apart.
    Apart {
        /// Read only.
        input: &'a [E],
        /// Written.
        output: &'a mut [E],
    },
    /// Input and output are parts of one buffer, which may overlap.
    Whole {
        /// The buffer.
        buffer: &'a mut [E],
        /// Where the input lies in it.
        input: Range<usize>,
        /// Where the output lies in it.
        output: Range<usize>,
    },
}

impl<E: Element> View<'_, E> {
    pub(super) fn input(&self, range: Range<usize>) -> &[E] {
        match self {
            Self::Apart { input, .. } => &input[range],
            Self::Whole { buffer, input, .. } => &buffer[input.clone()][range],
        }
    }

    pub(super) fn output(&self, range: Range<usize>) -> &[E] {
        match self {
            Self::Apart { output, .. } => &output[range],
            Self::Whole { buffer, output, .. } => &buffer[output.clone()][range],
        }
    }

    pub(super) fn output_mut(&mut self, range: Range<usize>) -> &mut [E] {
        match self {
            Self::Apart { output, .. } => &mut output[range],
            Self::Whole { buffer, output, .. } => &mut buffer[output.clone()][range],
        }
    }

    /// Whether what goes out and elements of the output have memory in common.
    pub(super) fn meets(&self, out: &What, output: &Range<usize>) -> bool {
        let (sent, written) = match (self, out) {
            (_, What::Output(range)) => (range.clone(), output.clone()),
            (
                Self::Whole {
                    input: i,
                    output: o,
                    ..
                },
                What::Input(range),
            ) => (
                range.start + i.start..range.end + i.start,
                output.start + o.start..output.end + o.start,
            ),
            _ => return false,
        };
        sent.start.max(written.start) < sent.end.min(written.end)
    }

    /// Where input and output lie, and how many elements each has.
    #[cfg(feature = "std")]
    pub(crate) fn parts(&mut self) -> ((*const E, usize), (*mut E, usize)) {
        match self {
            Self::Apart { input, output } => (
                (input.as_ptr(), input.len()),
                (output.as_mut_ptr(), output.len()),
            ),
            Self::Whole {
                buffer,
                input,
                output,
            } => {
                let len = buffer.len();
                let all = buffer.as_mut_ptr();
                // Ranges beyond the buffer, which nobody has checked yet, lead nowhere.
                let inside = |range: &Range<usize>| {
                    let start = range.start.min(len);
                    (
                        all.wrapping_add(start),
                        range.end.min(len).saturating_sub(start),
                    )
                };
                let (from, input_len) = inside(input);
                ((from.cast_const(), input_len), inside(output))
            }
        }
    }

    pub(super) fn copy(&mut self, from: Range<usize>, at: usize) {
        match self {
            Self::Apart { input, output } => {
                output[at..at + from.len()].copy_from_slice(&input[from]);
            }
            Self::Whole {
                buffer,
                input,
                output,
            } => {
                let from = input.start + from.start..input.start + from.end;
                let to = output.start + at;
                if from.start != to {
                    buffer.copy_within(from, to);
                }
            }
        }
    }

    /// All of the input and all of the output.
    #[must_use]
    pub fn slices(&self) -> (&[E], &[E]) {
        let (input, output) = self.lens();
        (self.input(0..input), self.output(0..output))
    }

    /// All of the output.
    #[must_use]
    pub fn output_all(&mut self) -> &mut [E] {
        let (_, output) = self.lens();
        self.output_mut(0..output)
    }

    /// Elements of input and output.
    pub(super) fn lens(&self) -> (usize, usize) {
        match self {
            Self::Apart { input, output } => (input.len(), output.len()),
            Self::Whole { input, output, .. } => (input.len(), output.len()),
        }
    }
}
