//! A world that is no power of two, folded to one: the first ranks pair up, and one of each pair
//! stands for both.
//!
//! ```text
//! world 7, p = 4, rem = 3:    ranks  (0 1) (2 3) (4 5)  6
//!                             nodes     0     1     2   3
//! before: 0 -> 1, 2 -> 3, 4 -> 5      then ranks 1 3 5 6 among themselves      after: 1 -> 0, ...
//! ```
//!
//! Every node stands for consecutive ranks, so what some consecutive nodes have gathered is one
//! range, and folds can keep the lower ranks on the left.

use core::ops::Range;

/// The largest power of two in a world, and who stands for whom.
#[derive(Debug, Clone, Copy)]
pub(super) struct Nodes {
    /// Nodes: a power of two.
    pub(super) p: usize,
    /// Ranks beyond it; so many nodes are pairs.
    pub(super) rem: usize,
}

/// What a rank is to the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// The even rank of a pair: `buddy` stands for it.
    Extra { buddy: usize },
    /// A node; `extra` is the rank it stands for beside itself.
    Node { node: usize, extra: Option<usize> },
}

impl Nodes {
    /// Of a world of at least one.
    pub(super) fn of(world: usize) -> Self {
        let p = 1 << world.ilog2();
        Self { p, rem: world - p }
    }

    /// log2 of the number of nodes.
    pub(super) fn levels(self) -> usize {
        self.p.trailing_zeros() as usize
    }

    /// One round before and one after where there are pairs.
    pub(super) fn odd(self) -> usize {
        usize::from(self.rem > 0)
    }

    pub(super) fn role(self, rank: usize) -> Role {
        if rank >= 2 * self.rem {
            Role::Node {
                node: rank - self.rem,
                extra: None,
            }
        } else if rank % 2 == 1 {
            Role::Node {
                node: rank / 2,
                extra: Some(rank - 1),
            }
        } else {
            Role::Extra { buddy: rank + 1 }
        }
    }

    /// The rank that stands for a node.
    pub(super) fn rank(self, node: usize) -> usize {
        if node < self.rem {
            2 * node + 1
        } else {
            node + self.rem
        }
    }

    /// The ranks that these nodes stand for.
    pub(super) fn ranks(self, nodes: Range<usize>) -> Range<usize> {
        let first = |node: usize| node + node.min(self.rem);
        first(nodes.start)..first(nodes.end)
    }
}

/// `len` nodes that hold `node`, from a multiple of `len` on.
pub(super) fn group(node: usize, len: usize) -> Range<usize> {
    let start = node - node % len;
    start..start + len
}
