//! An ordered set of global ranks and my place in it; pure data.
//!
//! ```text
//! world    0 1 2 3 4 5 6 7
//! group      1   3   5   7     ranks = [1, 3, 5, 7]
//! place      0   1   2   3     global rank 5 has rank 2 here
//! ```

use alloc::{format, sync::Arc, vec::Vec};

use crate::Error;

/// Some ranks of the world, in an order, and which of them I am.
///
/// ```
/// use quintet_collectives::ProcessGroup;
/// let group = ProcessGroup::new(vec![1, 3, 5, 7], 5)?;
/// assert_eq!((group.rank(), group.world()), (2, 4));
/// assert_eq!(group.global(3), Some(7));
/// # Ok::<(), quintet_collectives::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ProcessGroup {
    ranks: Arc<[usize]>,
    me: usize,
}

impl ProcessGroup {
    /// The group of `ranks` (global, in group order) as seen by the global rank `global`.
    ///
    /// # Errors
    /// [`Error::Layout`] where the list is empty, names a rank twice or lacks `global`.
    pub fn new(ranks: impl Into<Arc<[usize]>>, global: usize) -> Result<Self, Error> {
        let ranks = ranks.into();
        let mut sorted: Vec<usize> = ranks.to_vec();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::Layout(format!(
                "rank {} is named twice in the group {ranks:?}",
                pair[0]
            )));
        }
        let Some(me) = ranks.iter().position(|&r| r == global) else {
            return Err(Error::Layout(format!(
                "rank {global} is not a member of the group {ranks:?}"
            )));
        };
        Ok(Self { ranks, me })
    }

    /// All of a world of `world` ranks, in order, as seen by `rank`.
    ///
    /// # Errors
    /// [`Error::Layout`] where `rank` is not below `world`.
    pub fn whole(world: usize, rank: usize) -> Result<Self, Error> {
        Self::new((0..world).collect::<Vec<_>>(), rank)
    }

    /// The group as a transport knows it: already checked.
    #[cfg(feature = "std")]
    pub(crate) fn seat(ranks: Vec<usize>, me: usize) -> Self {
        Self {
            ranks: ranks.into(),
            me,
        }
    }

    /// My place, `0..world`.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.me
    }

    /// How many members.
    #[must_use]
    pub fn world(&self) -> usize {
        self.ranks.len()
    }

    /// The global ranks, in group order.
    #[must_use]
    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The global rank of member `rank`.
    #[must_use]
    pub fn global(&self, rank: usize) -> Option<usize> {
        self.ranks.get(rank).copied()
    }

    /// The place of a global rank in this group.
    #[must_use]
    pub fn place(&self, global: usize) -> Option<usize> {
        self.ranks.iter().position(|&r| r == global)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_is_not_a_group() {
        assert!(ProcessGroup::new(vec![1, 1], 1).is_err());
        assert!(ProcessGroup::new(vec![0, 1], 2).is_err());
        assert!(ProcessGroup::new(vec![], 0).is_err());
        assert!(ProcessGroup::whole(3, 3).is_err());
    }

    #[test]
    fn order_is_the_callers() {
        let group = ProcessGroup::new(vec![4, 0, 2], 2).unwrap();
        assert_eq!(
            (group.rank(), group.world(), group.place(4)),
            (2, 3, Some(0))
        );
    }

    use alloc::vec;
}
