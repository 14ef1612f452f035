//! Products of groups of rows, each group with a matrix of its own.
//!
//! ```text
//! forward, input's gradient    C[rows of g] = A[rows of g] op(B[g])        groups along m
//! weights' gradient            C[g] += A[rows of g]^T B[rows of g]         groups along k
//! ```
//!
//! Groups lie one after another; any may be empty, one may hold all rows. An empty group's weights
//! get no gradient: nothing is added.

use alloc::vec::Vec;

use crate::backend::slice_mut;
use crate::error::need;
use crate::{Error, Float, Gemm, GemmSpec, Trans};

const OP: &str = "grouped_gemm";

/// Shape of a product of groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupedSpec<'a> {
    /// Rows of each group.
    pub counts: &'a [usize],
    /// Columns of C.
    pub n: usize,
    /// Columns of A.
    pub k: usize,
}

impl GroupedSpec<'_> {
    fn rows(&self) -> usize {
        self.counts.iter().sum()
    }

    /// Group, its first row and its rows.
    fn groups(&self) -> Vec<(usize, usize, usize)> {
        let mut first = 0;
        let each = self.counts.iter().enumerate().map(|(g, &rows)| {
            first += rows;
            (g, first - rows, rows)
        });
        each.collect()
    }
}

/// Refuses lengths that do not fit [`GroupedGemm::grouped_gemm`].
pub(crate) fn check_grouped(
    spec: &GroupedSpec<'_>,
    a: usize,
    b: usize,
    c: usize,
) -> Result<(), Error> {
    need(OP, "b", spec.counts.len() * spec.n * spec.k, b)?;
    need(OP, "a", spec.rows() * spec.k, a)?;
    need(OP, "c", spec.rows() * spec.n, c)
}

/// Refuses lengths that do not fit [`GroupedGemm::grouped_gemm_weight`].
pub(crate) fn check_grouped_weight(
    spec: &GroupedSpec<'_>,
    dy: usize,
    x: usize,
    dw: usize,
) -> Result<(), Error> {
    need(OP, "dw", spec.counts.len() * spec.n * spec.k, dw)?;
    need(OP, "dy", spec.rows() * spec.n, dy)?;
    need(OP, "x", spec.rows() * spec.k, x)
}

/// Products of groups; each is [`Gemm::gemm`] of its group, to the bit.
pub trait GroupedGemm: Gemm {
    /// `C[rows of g] (+)= A[rows of g] op(B[g])`; A is `[rows, k]`, each `B[g]` is `[k, n]`, or
    /// `[n, k]` where it is `Trans::T`.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn grouped_gemm<E: Float>(
        &self,
        spec: &GroupedSpec<'_>,
        (b_form, accumulate): (Trans, bool),
        a: Self::Ref<'_, E>,
        b: Self::Ref<'_, E>,
        mut c: Self::Mut<'_, E>,
    ) -> Result<(), Error> {
        let (n, k) = (spec.n, spec.k);
        let c_len = Self::len(Self::as_ref(&c));
        check_grouped(spec, Self::len(a), Self::len(b), c_len)?;
        for (g, first, rows) in spec.groups() {
            let mut one = GemmSpec::new(rows, n, k, Trans::N, b_form);
            one.accumulate = accumulate;
            let a = Self::slice(a, first * k..(first + rows) * k);
            let b = Self::slice(b, g * n * k..(g + 1) * n * k);
            let c = slice_mut::<Self, E>(Self::reborrow(&mut c), first * n..(first + rows) * n);
            self.gemm::<E, E>(&one, a, b, None, None, c)?;
        }
        Ok(())
    }

    /// `C[g] += A[rows of g]^T B[rows of g]`, in Acc; A is `[rows, n]`, B `[rows, k]`, each `C[g]`
    /// `[n, k]`: the gradient of what `grouped_gemm` with `Trans::T` takes for B, from `dy` and `x`.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit.
    fn grouped_gemm_weight<E: Float>(
        &self,
        spec: &GroupedSpec<'_>,
        dy: Self::Ref<'_, E>,
        x: Self::Ref<'_, E>,
        mut dw: Self::Mut<'_, E::Acc>,
    ) -> Result<(), Error> {
        let (n, k) = (spec.n, spec.k);
        let dw_len = Self::len(Self::as_ref(&dw));
        check_grouped_weight(spec, Self::len(dy), Self::len(x), dw_len)?;
        for (g, first, rows) in spec.groups() {
            let one = GemmSpec::new(n, k, rows, Trans::T, Trans::N).accumulate();
            let dy = Self::slice(dy, first * n..(first + rows) * n);
            let x = Self::slice(x, first * k..(first + rows) * k);
            let dw = slice_mut::<Self, _>(Self::reborrow(&mut dw), g * n * k..(g + 1) * n * k);
            self.gemm::<E, E::Acc>(&one, dy, x, None, None, dw)?;
        }
        Ok(())
    }
}

impl GroupedGemm for crate::Cpu {}
