//! Two binary trees over the same ranks, each for one half of the buffer; a rank that is inner in
//! one is a leaf of the other (Sanders, Speck and Traeff, 2009). Every rank then sends and receives
//! about as much as every other.
//!
//! ```text
//! numbers 1..=6 in order:        4              the second tree: numbers counted from the other
//!                              /   \            end (even worlds) or moved on by one (odd
//!                             2     6           worlds), so that odd and even change places
//!                            / \   /
//!                           1   3 5             leaves are odd, inner nodes even
//! ```
//!
//! all_reduce: both trees hold all ranks, each climbs and descends. Broadcast and reduce: the trees
//! hold all ranks but the root, which feeds both of their tops, or is fed by them. A node folds
//! (left child + itself) + right child. Cut into pieces, all edges of both trees work at once.

use core::ops::Range;

use super::{CollectiveShape as S, Local, Plan, Round, What};
use crate::chunk::chunk;

/// A place in a binary tree whose nodes are numbered 1..=n in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seat {
    /// Number of the parent; none at the top.
    pub parent: Option<usize>,
    /// Number of the left child, which is lower.
    pub left: Option<usize>,
    /// Number of the right child, which is higher.
    pub right: Option<usize>,
    /// Edges up to the top.
    pub depth: usize,
}

/// The seats of rank `rank` of `n` in both trees, each with the rank's number there.
///
/// ```
/// use quintet_collectives::plan::seats;
/// let [(_, one), (_, two)] = seats(2, 7);
/// assert!(one.left.is_none() || two.left.is_none());
/// ```
#[must_use]
pub fn seats(rank: usize, n: usize) -> [(usize, Seat); 2] {
    let numbers = [number(0, rank, n), number(1, rank, n)];
    numbers.map(|number| (number, seat(number, n)))
}

/// The number of `rank` in tree `tree`.
fn number(tree: usize, rank: usize, n: usize) -> usize {
    match tree {
        0 => rank + 1,
        _ if n.is_multiple_of(2) => n - rank,
        _ => (rank + 1) % n + 1,
    }
}

/// The rank of `number` in tree `tree`.
fn member(tree: usize, number: usize, n: usize) -> usize {
    match tree {
        0 => number - 1,
        _ if n.is_multiple_of(2) => n - number,
        _ => (number + n - 2) % n,
    }
}

/// Edges from the top to the lowest leaf.
fn height(n: usize) -> usize {
    n.ilog2() as usize
}

fn seat(number: usize, n: usize) -> Seat {
    // The node right of `at` whose subtree has `bit` as its half, if any rank is there.
    let right_of = |at: usize, mut bit: usize| {
        while bit > 0 && at + bit > n {
            bit /= 2;
        }
        (bit > 0).then_some((at + bit, bit))
    };
    let mut bit = 1 << height(n);
    let (mut at, mut parent, mut depth) = (bit, None, 0);
    while at != number {
        parent = Some(at);
        depth += 1;
        bit /= 2;
        if number < at {
            at -= bit;
        } else if let Some((next, half)) = right_of(at, bit) {
            (at, bit) = (next, half);
        } else {
            break;
        }
    }
    let half = bit / 2;
    Seat {
        parent,
        left: (half > 0).then(|| number - half),
        right: right_of(number, half).map(|(at, _)| at),
        depth,
    }
}

/// Rounds of one piece.
pub(super) fn rounds_len(plan: &Plan) -> usize {
    let n = plan.world();
    match plan.shape() {
        S::AllReduce { .. } => 2 * height(n),
        _ => height(n - 1) + 1,
    }
}

/// In each tree: how many ranks `rank` sends down to, whether it sends up, and the elements of each
/// message.
pub(super) fn traffic(plan: &Plan, rank: usize) -> [(usize, bool, usize); 2] {
    [0, 1].map(|tree| {
        let len = half(plan, tree).len();
        match Trees::of(plan, rank, tree) {
            Trees::Root { .. } => (1, false, len),
            Trees::Member { seat, .. } => {
                let kids = usize::from(seat.left.is_some()) + usize::from(seat.right.is_some());
                let top = seat.parent.is_none() && matches!(plan.shape(), S::AllReduce { .. });
                (kids, !top, len)
            }
        }
    })
}

/// What a rank is to one of the trees.
enum Trees {
    /// The root of a broadcast or reduce, beside the tree; the rank on the top of it.
    Root {
        top: usize,
    },
    Member {
        seat: Seat,
        n: usize,
        first: usize,
    },
}

impl Trees {
    fn of(plan: &Plan, rank: usize, tree: usize) -> Self {
        let world = plan.world();
        let Some(root) = plan.shape().root() else {
            return Self::Member {
                seat: seat(number(tree, rank, world), world),
                n: world,
                first: 0,
            };
        };
        let (n, first) = (world - 1, root + 1);
        let place = (rank + world - root) % world;
        if place == 0 {
            let top = member(tree, 1 << height(n), n);
            return Self::Root {
                top: (top + first) % world,
            };
        }
        Self::Member {
            seat: seat(number(tree, place - 1, n), n),
            n,
            first,
        }
    }
}

/// The part of the buffer that a tree handles.
fn half(plan: &Plan, tree: usize) -> Range<usize> {
    chunk(plan.shape().len(plan.world()), 2, tree)
}

pub(super) fn round(plan: &Plan, rank: usize, index: usize, piece: usize, round: &mut Round) {
    for tree in 0..2 {
        let range = plan.piece(half(plan, tree), piece);
        match (plan.shape(), Trees::of(plan, rank, tree)) {
            (S::Broadcast { .. }, Trees::Root { top }) if index == 0 => {
                round.send(top, What::Input(range.clone()));
                let at = range.start;
                round.then.push(Local::Copy { input: range, at });
            }
            (S::Reduce { .. }, Trees::Root { top }) if index + 1 == rounds_len(plan) => {
                round.fold(top, range.clone(), false);
                let at = range.start;
                round.then.push(Local::Finish { input: range, at });
            }
            (_, Trees::Root { .. }) => {}
            (shape, Trees::Member { seat, n, first }) => {
                let real = |number: usize| (member(tree, number, n) + first) % plan.world();
                let h = height(n);
                let up = !matches!(shape, S::Broadcast { .. });
                if up {
                    climb(plan, &seat, index, h, &range, real, round);
                }
                // all_reduce descends after h rounds; a broadcast after the root has spoken.
                let down = match shape {
                    S::AllReduce { .. } => index.checked_sub(h),
                    S::Broadcast { .. } => Some(index),
                    _ => None,
                };
                if let Some(step) = down {
                    descend(plan, &seat, step, &range, real, round);
                }
            }
        }
    }
}

/// A node of depth d sends up in round h - d.
fn climb(
    plan: &Plan,
    seat: &Seat,
    index: usize,
    h: usize,
    range: &Range<usize>,
    real: impl Fn(usize) -> usize,
    round: &mut Round,
) {
    let above = plan.shape().root();
    if index + seat.depth + 1 == h {
        let kids = [(seat.left, true), (seat.right, false)];
        for (kid, left) in kids {
            kid.into_iter()
                .for_each(|kid| round.fold(real(kid), range.clone(), left));
        }
        if seat.parent.is_none() && above.is_none() {
            let at = range.start;
            round.then.push(Local::Finish {
                input: range.clone(),
                at,
            });
        }
    }
    if index + seat.depth == h
        && let Some(to) = seat.parent.map(real).or(above)
    {
        round.send(to, What::Partial(range.clone()));
    }
}

/// A node of depth d receives in step d, counted from the root of a broadcast, else in d - 1.
fn descend(
    plan: &Plan,
    seat: &Seat,
    step: usize,
    range: &Range<usize>,
    real: impl Fn(usize) -> usize,
    round: &mut Round,
) {
    let above = plan.shape().root();
    let receives = seat.depth + usize::from(above.is_some());
    if step + 1 == receives
        && let Some(from) = seat.parent.map(&real).or(above)
    {
        round.store(from, range.clone());
    }
    if step == receives {
        for kid in [seat.left, seat.right].into_iter().flatten() {
            round.send(real(kid), What::Output(range.clone()));
        }
    }
}
