//! What a layer keeps between its three calls, and the order in which they come.
//!
//! ```text
//! forward -> Forward(F) -- backward_input --> Weight(W) -- backward_weight --> gone
//! ```
//!
//! `F` is what the gradient of the input needs, `W` what the gradients of the weights need:
//! memory that only the first wants is let go between them.

use quintet_kernels::{Backend, Data};

use crate::Error;

/// What a layer keeps: after forward an `F`, after backward_input a `W`.
#[derive(Debug)]
pub enum Saved<F, W> {
    /// Forward has run.
    Forward(F),
    /// The gradient of the input has been taken.
    Weight(W),
    /// Backward_input began and failed.
    Spent,
}

impl<F, W> Saved<F, W> {
    /// What forward left; `Spent` stays behind until the caller puts a `Weight` there.
    ///
    /// # Errors
    /// [`Error::Order`] where backward_input has run before.
    pub fn take_forward(&mut self, layer: &'static str) -> Result<F, Error> {
        match core::mem::replace(self, Saved::Spent) {
            Saved::Forward(kept) => Ok(kept),
            other => {
                *self = other;
                Err(Error::Order {
                    layer,
                    what: "what forward saves",
                    first: "forward",
                })
            }
        }
    }

    /// What backward_input left.
    ///
    /// # Errors
    /// [`Error::Order`] where it has not run.
    pub fn into_weight(self, layer: &'static str) -> Result<W, Error> {
        match self {
            Saved::Weight(kept) => Ok(kept),
            _ => Err(Error::Order {
                layer,
                what: "the gradient of the output",
                first: "backward_input",
            }),
        }
    }
}

/// Exactly `N` views, by name.
pub(crate) fn views<'a, T, const N: usize>(
    layer: &'static str,
    views: &'a [T],
) -> Result<&'a [T; N], Error> {
    let got = views.len();
    views.try_into().map_err(|_| Error::Params {
        layer,
        expected: N,
        got,
    })
}

/// As [`views`], mutable.
pub(crate) fn views_mut<'a, T, const N: usize>(
    layer: &'static str,
    views: &'a mut [T],
) -> Result<&'a mut [T; N], Error> {
    let got = views.len();
    views.try_into().map_err(|_| Error::Params {
        layer,
        expected: N,
        got,
    })
}

/// `views` cut into one run per sublayer, of `counts` views each.
pub(crate) fn runs<'a, T, const N: usize>(
    layer: &'static str,
    mut views: &'a [T],
    counts: [usize; N],
) -> Result<[&'a [T]; N], Error> {
    expect_sum(layer, &counts, views.len())?;
    Ok(counts.map(|count| {
        let (run, rest) = views.split_at(count);
        views = rest;
        run
    }))
}

/// As [`runs`], mutable.
pub(crate) fn runs_mut<'a, T, const N: usize>(
    layer: &'static str,
    mut views: &'a mut [T],
    counts: [usize; N],
) -> Result<[&'a mut [T]; N], Error> {
    expect_sum(layer, &counts, views.len())?;
    Ok(counts.map(|count| {
        let (run, rest) = core::mem::take(&mut views).split_at_mut(count);
        views = rest;
        run
    }))
}

fn expect_sum(layer: &'static str, counts: &[usize], got: usize) -> Result<(), Error> {
    let expected = counts.iter().sum();
    if expected == got {
        return Ok(());
    }
    Err(Error::Params {
        layer,
        expected,
        got,
    })
}

/// The weight of a linear layer and its bias, if it has one: what [`runs`] cut off for it.
pub(crate) fn weight_bias<T: Copy>(
    layer: &'static str,
    views: &[T],
) -> Result<(T, Option<T>), Error> {
    match *views {
        [weight] => Ok((weight, None)),
        [weight, bias] => Ok((weight, Some(bias))),
        _ => Err(Error::Params {
            layer,
            expected: 1,
            got: views.len(),
        }),
    }
}

/// As [`weight_bias`], mutable.
pub(crate) fn weight_bias_mut<'a, B: Backend, T: Data>(
    layer: &'static str,
    views: &'a mut [B::Mut<'_, T>],
) -> Result<(B::Mut<'a, T>, Option<B::Mut<'a, T>>), Error> {
    match views {
        [weight] => Ok((B::reborrow(weight), None)),
        [weight, bias] => Ok((B::reborrow(weight), Some(B::reborrow(bias)))),
        _ => Err(Error::Params {
            layer,
            expected: 1,
            got: views.len(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_kept() {
        let mut saved: Saved<u8, u16> = Saved::Forward(1);
        assert_eq!(saved.take_forward("l").unwrap(), 1);
        assert!(saved.take_forward("l").is_err());
        assert!(Saved::<u8, u16>::Forward(1).into_weight("l").is_err());
        assert_eq!(Saved::<u8, u16>::Weight(2).into_weight("l").unwrap(), 2);
    }
}
