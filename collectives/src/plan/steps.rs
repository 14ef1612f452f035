//! What one rank does in one round: the words every plan is written in.
//!
//! ```text
//! input    read only                            output    raw elements
//! partials accumulators, one per range folded   stash     raw elements that only pass through
//! slots    one raw message per sender (Keep)
//! ```
//!
//! All messages of a round are posted at once and received in the round they were sent in. Messages
//! between the same two ranks keep the order in which the round lists them; folds onto the same
//! elements are done in the order listed, whichever message comes first.

use alloc::{vec, vec::Vec};
use core::ops::Range;

/// Messages and local work of one rank in one round. All messages of a round are posted at once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Round {
    /// What goes out.
    pub sends: Vec<Send>,
    /// What comes in.
    pub recvs: Vec<Recv>,
    /// What is done once everything of this round has come in.
    pub then: Vec<Local>,
}

/// A message to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Send {
    /// Rank in the group.
    pub to: usize,
    /// What it carries.
    pub what: What,
}

/// What a message carries; ranges count elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// Raw elements of the input.
    Input(Range<usize>),
    /// Elements of the output.
    Output(Range<usize>),
    /// The partial of this range, as accumulators, which is thereby given away; where none is held,
    /// this range of the input, widened.
    Partial(Range<usize>),
    /// The same, but it also stays here.
    Shared(Range<usize>),
    /// The partial of this range, rounded once, as raw elements; it is given away.
    Finished(Range<usize>),
    /// Raw elements of several places, one after another.
    Parts(Vec<Part>),
}

/// A range of raw elements in one of a rank's memories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Which memory.
    pub place: Place,
    /// Which elements of it.
    pub range: Range<usize>,
}

/// A memory that holds raw elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The caller's input; never written.
    Input,
    /// The caller's output.
    Output,
    /// Elements on their way to other ranks; as long as the plan needs.
    Stash,
}

/// A message from a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recv {
    /// Rank in the group.
    pub from: usize,
    /// Elements expected.
    pub len: usize,
    /// What is done with them.
    pub action: Action,
}

/// What is done with a message on receipt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Becomes the output from this element on.
    Store(usize),
    /// The partial (where none is held: this range of the input) op the message becomes the partial.
    Fold(Range<usize>),
    /// The message op the partial (where none is held: this range of the input) becomes the partial.
    FoldLeft(Range<usize>),
    /// As [`Action::Fold`] with raw elements, for several ranges one after another.
    FoldRaw(Vec<Range<usize>>),
    /// Is kept in the sender's slot for [`Local::FoldRanks`].
    Keep,
    /// Is laid down in these places, one after another.
    Parts(Vec<Part>),
}

/// Local work at the end of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Local {
    /// This range of the input becomes the output from element `at` on.
    Copy {
        /// Elements of the input.
        input: Range<usize>,
        /// First element of the output.
        at: usize,
    },
    /// Own input range and all kept messages, folded from left to right in rank order, rounded
    /// once, become the output from element `at` on.
    FoldRanks {
        /// Own contribution.
        input: Range<usize>,
        /// First element of the output.
        at: usize,
    },
    /// The same where the contribution of rank r lies in the stash from `r * input.len()` on.
    FoldStash {
        /// Own contribution.
        input: Range<usize>,
        /// First element of the output.
        at: usize,
    },
    /// The partial (where none is held: this range of the input), rounded once, becomes the output
    /// from element `at` on.
    Finish {
        /// Own contribution.
        input: Range<usize>,
        /// First element of the output.
        at: usize,
    },
}

impl What {
    /// Elements carried.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Input(range)
            | Self::Output(range)
            | Self::Partial(range)
            | Self::Shared(range)
            | Self::Finished(range) => range.len(),
            Self::Parts(parts) => parts.iter().map(|part| part.range.len()).sum(),
        }
    }

    /// Whether it carries nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the wire carries accumulators, not elements.
    #[must_use]
    pub fn wide(&self) -> bool {
        matches!(self, Self::Partial(_) | Self::Shared(_))
    }

    /// Raw parts, as plainly as they can be said.
    pub(super) fn parts(mut parts: Vec<Part>) -> Self {
        match (parts.len(), parts.pop()) {
            (1, Some(Part { place, range })) => match place {
                Place::Input => Self::Input(range),
                Place::Output => Self::Output(range),
                place @ Place::Stash => Self::Parts(vec![Part { place, range }]),
            },
            (_, last) => {
                parts.extend(last);
                Self::Parts(parts)
            }
        }
    }
}

impl Action {
    /// The ranges onto which the message is folded.
    #[must_use]
    pub fn folds(&self) -> &[Range<usize>] {
        match self {
            Self::Fold(range) | Self::FoldLeft(range) => core::slice::from_ref(range),
            Self::FoldRaw(ranges) => ranges,
            Self::Store(_) | Self::Keep | Self::Parts(_) => &[],
        }
    }

    /// Whether the message must hold accumulators, not elements.
    #[must_use]
    pub fn wide(&self) -> bool {
        matches!(self, Self::Fold(_) | Self::FoldLeft(_))
    }

    /// Raw parts, as plainly as they can be said.
    pub(super) fn parts(parts: Vec<Part>) -> Self {
        match What::parts(parts) {
            What::Output(range) => Self::Store(range.start),
            What::Parts(parts) => Self::Parts(parts),
            // A message cannot be laid down in the input; the checker refuses it.
            What::Input(range) => Self::Parts(vec![Part {
                place: Place::Input,
                range,
            }]),
            _ => Self::Parts(vec![]),
        }
    }
}

impl Recv {
    /// Whether `earlier`, listed before it in the round, must be received first: it comes from the
    /// same peer, or is folded onto the same elements.
    #[must_use]
    pub fn after(&self, earlier: &Self) -> bool {
        let meets = |a: &Range<usize>| {
            let others = earlier.action.folds().iter();
            others
                .into_iter()
                .any(|b| a.start < b.end && b.start < a.end)
        };
        self.from == earlier.from || self.action.folds().iter().any(meets)
    }
}

impl Round {
    pub(super) fn send(&mut self, to: usize, what: What) {
        self.sends.push(Send { to, what });
    }

    pub(super) fn recv(&mut self, from: usize, len: usize, action: Action) {
        self.recvs.push(Recv { from, len, action });
    }

    /// Takes `range` folded, the message on the left where `left`.
    pub(super) fn fold(&mut self, from: usize, range: Range<usize>, left: bool) {
        let action = if left {
            Action::FoldLeft(range.clone())
        } else {
            Action::Fold(range.clone())
        };
        self.recv(from, range.len(), action);
    }

    /// Takes `range` of the output.
    pub(super) fn store(&mut self, from: usize, range: Range<usize>) {
        self.recv(from, range.len(), Action::Store(range.start));
    }

    pub(super) fn clear(&mut self) {
        self.sends.clear();
        self.recvs.clear();
        self.then.clear();
    }

    /// Whether the receipts must be taken in some order: two from one peer, or onto the same
    /// elements.
    #[must_use]
    pub fn ordered(&self) -> bool {
        let folds = self
            .recvs
            .iter()
            .filter(|recv| !recv.action.folds().is_empty());
        if folds.count() > 1 {
            return true;
        }
        let mut peers: Vec<usize> = self.recvs.iter().map(|recv| recv.from).collect();
        peers.sort_unstable();
        peers.windows(2).any(|pair| pair[0] == pair[1])
    }
}

/// Adds a range to parts, joined to the last one where it goes on there.
pub(super) fn push_part(parts: &mut Vec<Part>, place: Place, range: Range<usize>) {
    if range.is_empty() {
        return;
    }
    match parts.last_mut() {
        Some(last) if last.place == place && last.range.end == range.start => {
            last.range.end = range.end;
        }
        _ => parts.push(Part { place, range }),
    }
}
