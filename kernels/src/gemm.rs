//! General matrix product with an epilogue: `C = epilogue(op(A) op(B) [+ C])`.
//!
//! Row-major, contiguous. `op(A)` is m x k, `op(B)` is k x n, C is m x n. A linear layer with
//! weights `w_fd` stored `[out, in]` as Hugging Face stores them needs three of the four forms:
//!
//! ```text
//! forward    y_tf  = x_td  w_fd^T      NT
//! backward   dx_td = dy_tf w_fd        NN
//!            dw_fd += dy_tf^T x_td     TN, accumulate, output in Acc
//! ```
//!
//! There is no alpha and beta is 0 or 1 (`accumulate`): scales belong into epilogues, since a
//! scale inside the product rounds edge tiles differently in some libraries. Each output element
//! is summed over k in an order that depends on k alone, so the bits of a row or column do not
//! depend on which rows and columns stand beside it: column-parallel layers are bit-equal to one
//! device.

pub(crate) mod cpu;
pub mod naive;
pub(crate) mod simd;

use crate::error::need;
use crate::{Backend, Error, Float};

/// Whether an operand is used as stored or transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trans {
    /// As stored.
    N,
    /// Transposed.
    T,
}

/// What is done to each element of the product before it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Epilogue {
    /// Nothing.
    #[default]
    None,
    /// Adds `bias[n]` to each row.
    Bias,
    /// Adds `bias[n]`, then applies GELU (tanh form).
    BiasGelu,
    /// Adds `residual[m, n]`.
    Residual,
    /// Adds `bias[n]` and `residual[m, n]`.
    BiasResidual,
}

/// Shape and form of one product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemmSpec {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Length of each sum.
    pub k: usize,
    /// How A is stored: `N` as m x k, `T` as k x m.
    pub a: Trans,
    /// How B is stored: `N` as k x n, `T` as n x k.
    pub b: Trans,
    /// Adds to C instead of overwriting it.
    pub accumulate: bool,
    /// What happens to the sums.
    pub epilogue: Epilogue,
    /// f32 operands may be rounded to tf32 (10 bits of fraction), for tensor cores to multiply them. Where
    /// a device has no such kernel for the call it is exact, as it always is unasked.
    pub tf32: bool,
}

impl GemmSpec {
    /// A product that overwrites C, without epilogue.
    #[must_use]
    pub const fn new(m: usize, n: usize, k: usize, a: Trans, b: Trans) -> Self {
        Self {
            m,
            n,
            k,
            a,
            b,
            accumulate: false,
            epilogue: Epilogue::None,
            tf32: false,
        }
    }

    /// The same, adding to C.
    #[must_use]
    pub const fn accumulate(mut self) -> Self {
        self.accumulate = true;
        self
    }

    /// The same with an epilogue.
    #[must_use]
    pub const fn epilogue(mut self, epilogue: Epilogue) -> Self {
        self.epilogue = epilogue;
        self
    }

    /// The same, f32 operands rounded to tf32 where the device has tensor cores.
    #[must_use]
    pub const fn tf32(mut self) -> Self {
        self.tf32 = true;
        self
    }

    /// Refuses arguments whose lengths do not fit, and an epilogue's arguments where the epilogue
    /// does not name them.
    pub(crate) fn check(
        &self,
        a: usize,
        b: usize,
        bias: Option<usize>,
        residual: Option<usize>,
        c: usize,
    ) -> Result<(), Error> {
        const OP: &str = "gemm";
        let product = |x: usize, y: usize| {
            x.checked_mul(y).ok_or(Error::Spec {
                op: OP,
                why: "m, n, k describe a matrix longer than memory",
            })
        };
        need(OP, "a", product(self.m, self.k)?, a)?;
        need(OP, "b", product(self.k, self.n)?, b)?;
        need(OP, "c", product(self.m, self.n)?, c)?;
        let (has_bias, has_residual) = match self.epilogue {
            Epilogue::None => (false, false),
            Epilogue::Bias | Epilogue::BiasGelu => (true, false),
            Epilogue::Residual => (false, true),
            Epilogue::BiasResidual => (true, true),
        };
        let want = |named: bool, len: usize| if named { len } else { 0 };
        // An empty argument and none are the same.
        need(OP, "bias", want(has_bias, self.n), bias.unwrap_or(0))?;
        need(OP, "residual", want(has_residual, c), residual.unwrap_or(0))
    }
}

/// The product on a device.
pub trait Gemm: Backend {
    /// `c = epilogue(op(a) op(b) [+ c])`; A and B are stored as `I`, C as `O`, both with the same
    /// `Acc`; sums are taken in `Acc` and rounded once. `bias` has n elements, `residual` m x n;
    /// each must be given where the epilogue names it and only there.
    ///
    /// # Errors
    /// [`Error::Len`] where a length does not fit the spec.
    fn gemm<I: Float, O: Float<Acc = I::Acc>>(
        &self,
        spec: &GemmSpec,
        a: Self::Ref<'_, I>,
        b: Self::Ref<'_, I>,
        bias: Option<Self::Ref<'_, I>>,
        residual: Option<Self::Ref<'_, O>>,
        c: Self::Mut<'_, O>,
    ) -> Result<(), Error>;
}
