//! What the emulator found: who did what, where, and against whom.

use std::fmt;
use std::string::String;

/// The kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FaultKind {
    /// An address in no allocation, or past the end of one.
    OutOfBounds,
    /// An address in memory that was freed.
    Freed,
    /// An address that is no multiple of the access.
    Misaligned,
    /// Two threads of a block touch a byte, one writes, and nothing orders them.
    Race,
    /// Two blocks of a launch touch a byte and one writes.
    BlockRace,
    /// Two operations on different streams touch a byte, one writes, and no event orders them.
    StreamRace,
    /// A byte nobody has written is read.
    Unwritten,
    /// Memory is touched between a `cp.async` and its wait.
    OnItsWay,
    /// Part of a block waits where the others do not come.
    Divergence,
    /// A warp instruction's mask does not name its callers.
    Mask,
    /// A barrier used with different counts, twice by one thread, or with an id past 15.
    Barrier,
    /// `__trap()`.
    Trap,
    /// More blocks, operations, or barriers than the emulator counts, or no memory for a stack.
    Emulator,
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FaultKind::OutOfBounds => "out of bounds",
            FaultKind::Freed => "use after free",
            FaultKind::Misaligned => "misaligned",
            FaultKind::Race => "race in a block",
            FaultKind::BlockRace => "race between blocks",
            FaultKind::StreamRace => "race between streams",
            FaultKind::Unwritten => "read of unwritten memory",
            FaultKind::OnItsWay => "touched before its wait",
            FaultKind::Divergence => "divergence",
            FaultKind::Mask => "wrong mask",
            FaultKind::Barrier => "misused barrier",
            FaultKind::Trap => "trap",
            FaultKind::Emulator => "limit of the emulator",
        })
    }
}

/// One who took part: an operation, and for a kernel its block and thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Party {
    /// Kernel or copy.
    pub op: String,
    /// Index of the block, x fastest.
    pub block: u32,
    /// Index of the thread in its block, x fastest.
    pub thread: usize,
    /// `file:line` of the access, where known.
    pub site: Option<String>,
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} block {} thread {}", self.op, self.block, self.thread)?;
        match &self.site {
            Some(site) => write!(f, " at {site}"),
            None => Ok(()),
        }
    }
}

/// A place in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Tag of the allocation, or name of the shared array.
    pub allocation: String,
    /// Byte offset in it; may lie outside.
    pub offset: i64,
    /// Bytes of the allocation.
    pub bytes: usize,
}

/// A fault: the launch that met it ends there, and the device takes no more work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// What is wrong.
    pub kind: FaultKind,
    /// Who met it.
    pub who: Party,
    /// What it did: the access or the call.
    pub what: String,
    /// Where in memory.
    pub place: Option<Place>,
    /// The other party of a race.
    pub other: Option<Party>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.kind, self.who, self.what)?;
        if let Some(place) = &self.place {
            let Place {
                allocation,
                offset,
                bytes,
            } = place;
            write!(f, " byte {offset} of {allocation} ({bytes} bytes)")?;
        }
        match &self.other {
            Some(other) => write!(f, ", against {other}"),
            None => Ok(()),
        }
    }
}
