//! What forward leaves for backward, and what backward makes again instead.
//!
//! ```text
//!             a block keeps                                    and makes again, in backward_input
//! none        all that its backward reads                      nothing
//! selective   results of products, of attention, of messages   norms' outputs, activations' outputs:
//!                                                              a pass over memory each
//! full        its input                                        all of it: the whole forward, messages too
//! ```
//!
//! What is made again has the bits of what was let go: the same kernels see the same input. What
//! the gradients of the weights need stays from then on until they are taken, so that a schedule
//! which lets those wait (ZB-H1, DualPipe-V) has less of it.
//!
//! **Selective** goes by what a byte costs. In a block of Llama (d hidden, f MLP, one rank, a token)
//! the two norms' outputs and the product of the MLP are `2 d + f` of `4 d + 2 q + 2 k + 3 f` elements
//! kept, and take about ten operations an element to make again; a result of a product takes `2 d`
//! operations an element and more. Flash attention keeps no score matrix, so that there is none to let
//! go (what Korthikanti et al. 2022 called selective); by outputs, as here, goes Megatron-Core's
//! `recompute-modules`. It sends nothing: under sequence parallelism a norm's output is this rank's part.

use crate::Error;

/// What backward computes again instead of keeping it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// What is cheap.
    Selective,
    /// A block from its input.
    Full,
}

impl Recompute {
    /// Every mode.
    pub const ALL: [Self; 3] = [Self::None, Self::Selective, Self::Full];

    /// As the command line spells it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Selective => "selective",
            Self::Full => "full",
        }
    }
}

/// What forward made: kept, or let go to be made again.
#[derive(Debug)]
pub enum Remade<T> {
    /// Here.
    Here(T),
    /// Let go.
    Gone,
}

impl<T> Remade<T> {
    /// Lets it go.
    pub fn let_go(&mut self) {
        *self = Remade::Gone;
    }

    /// Whether it was let go.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Remade::Gone)
    }

    /// Makes it again, where it was let go.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn remake(&mut self, make: impl FnOnce() -> Result<T, Error>) -> Result<(), Error> {
        if self.is_gone() {
            *self = Remade::Here(make()?);
        }
        Ok(())
    }

    /// What is here.
    ///
    /// # Errors
    /// [`Error::Order`] where it was let go and not made again.
    pub fn made(self, layer: &'static str) -> Result<T, Error> {
        match self {
            Remade::Here(made) => Ok(made),
            Remade::Gone => Err(Error::Order {
                layer,
                what: "what was let go to be made again",
                first: "the recomputation",
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_here_is_not_made_again() {
        let mut kept = Remade::Here(1);
        kept.remake(|| Ok(2)).unwrap();
        assert_eq!(kept.made("l").unwrap(), 1);
        let mut gone = Remade::Here(1);
        gone.let_go();
        assert!(gone.is_gone());
        gone.remake(|| Ok(2)).unwrap();
        assert_eq!(gone.made("l").unwrap(), 2);
        assert!(Remade::<u8>::Gone.made("l").is_err());
    }
}
