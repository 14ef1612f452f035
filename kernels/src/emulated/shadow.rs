//! The shadow: what is known about each byte of device and shared memory.
//!
//! ```text
//! byte   writer: who wrote it last       Stamp = operation, block, thread, clock
//!        reader: who read it since       one Stamp, or a set of them
//!        state:  written? on its way (cp.async)?
//! ```
//!
//! Every check is a question to it: a read wants a byte that is written, here, and written by
//! somebody who is ordered before the reader; a write wants all readers and the writer before it.
//! A set of readers forgets whom a later reader is ordered after, and keeps two blocks of one
//! operation at most: a third adds nothing, since any writer conflicts with one of the two.

use std::ops::Range;
use std::vec::Vec;

use super::order::Clocks;

/// Who touched a byte, and when: operation (20 bits, 0 for nobody), block (18), thread (10),
/// clock (16).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Stamp(u64);

/// Operations that a stamp can tell apart; the last value marks a set of readers.
pub(super) const MAX_OPS: usize = (1 << 20) - 1;
/// Blocks that a stamp can tell apart.
pub(super) const MAX_BLOCKS: u64 = 1 << 18;
const NOBODY: u64 = 0;
const SET: u64 = (MAX_OPS as u64) << 44;

impl Stamp {
    pub(super) fn new(op: u32, block: u32, thread: usize, clock: u16) -> Self {
        let thread = thread as u64 & 0x3ff;
        Self(u64::from(op) << 44 | u64::from(block) << 26 | thread << 16 | u64::from(clock))
    }

    pub(super) fn op(self) -> u32 {
        (self.0 >> 44) as u32
    }

    pub(super) fn block(self) -> u32 {
        (self.0 >> 26) as u32 & 0x3_ffff
    }

    pub(super) fn thread(self) -> usize {
        (self.0 >> 16) as usize & 0x3ff
    }

    fn clock(self) -> u16 {
        self.0 as u16
    }
}

/// Which operations come before the current one.
#[derive(Debug, Default)]
pub(super) struct Ops {
    /// Stream and place in it, by operation; entry 0 stands for nobody.
    pub(super) place: Vec<(u32, u32)>,
    /// Name in reports.
    pub(super) name: Vec<std::sync::Arc<str>>,
    /// For each stream, how far the current operation has seen it.
    pub(super) seen: Vec<u32>,
}

impl Ops {
    fn before(&self, op: u32) -> bool {
        let (stream, seq) = self.place[op as usize];
        seq <= self.seen.get(stream as usize).copied().unwrap_or(0)
    }
}

/// Who touches memory now, and what is ordered before it.
pub(super) struct Now<'a> {
    pub(super) stamp: Stamp,
    pub(super) ops: &'a Ops,
    pub(super) clocks: &'a Clocks,
}

impl Now<'_> {
    #[inline]
    fn after(&self, other: Stamp) -> bool {
        if other.op() != self.stamp.op() {
            return other.0 == NOBODY || self.ops.before(other.op());
        }
        other.block() == self.stamp.block()
            && self
                .clocks
                .before(other.thread(), other.clock(), self.stamp.thread())
    }
}

/// How a byte is touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Touch {
    Read,
    Write,
    /// The start of an asynchronous copy: written, but not there before [`Touch::Land`].
    Start,
    /// The end of an asynchronous copy.
    Land,
    /// The end of the memory's life: conflicts as a write does.
    Free,
}

/// What the shadow objects to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Objection {
    /// Never written.
    Unwritten,
    /// Touched between an asynchronous copy's start and its end.
    OnItsWay(Stamp),
    /// Written by somebody not ordered before.
    Written(Stamp),
    /// Read by somebody not ordered before this write.
    Read(Stamp),
}

const WRITTEN: u8 = 1;
const ON_ITS_WAY: u8 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    writer: Stamp,
    reader: u64,
}

/// The shadow of one allocation, as coarse as its touches: bytes that every touch so far took
/// together share a cell. Nothing is lost by it, for their records are the same.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    cells: Vec<Cell>,
    state: Vec<u8>,
    bytes: usize,
    /// Bytes of a cell, as a power of two.
    grain: u32,
}

/// Bytes of a cell before the first touch: the widest access.
const GRAIN: u32 = 4;

impl Shadow {
    pub(super) fn new(bytes: usize) -> Self {
        Self::try_new(bytes).unwrap_or_default()
    }

    /// `None` where the host has no memory for it.
    pub(super) fn try_new(bytes: usize) -> Option<Self> {
        let mut shadow = Self {
            bytes,
            grain: GRAIN,
            ..Self::default()
        };
        let n = bytes.div_ceil(1 << GRAIN);
        shadow.cells.try_reserve_exact(n).ok()?;
        shadow.state.try_reserve_exact(n).ok()?;
        let cell = Cell {
            writer: Stamp(NOBODY),
            reader: NOBODY,
        };
        shadow.cells.resize(n, cell);
        shadow.state.resize(n, 0);
        Some(shadow)
    }

    /// The cells of a range of bytes, split first where the range cuts one.
    fn cells_of(&mut self, range: &Range<usize>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        let end = if range.end == self.bytes {
            0
        } else {
            range.end
        };
        let grain = (range.start | end).trailing_zeros();
        if grain < self.grain {
            self.split(grain);
        }
        range.start >> self.grain..range.end.div_ceil(1 << self.grain)
    }

    #[cold]
    fn split(&mut self, grain: u32) {
        fn each<T: Copy>(old: &[T], times: usize, n: usize) -> Vec<T> {
            let mut new = Vec::with_capacity(n);
            let repeated = old.iter().flat_map(|x| std::iter::repeat_n(*x, times));
            new.extend(repeated.take(n));
            new
        }
        let (times, n) = (1 << (self.grain - grain), self.bytes.div_ceil(1 << grain));
        self.cells = each(&self.cells, times, n);
        self.state = each(&self.state, times, n);
        self.grain = grain;
    }

    /// Forgets who touched what, not what is written.
    pub(super) fn forget_stamps(&mut self) {
        for cell in &mut self.cells {
            (cell.writer, cell.reader) = (Stamp(NOBODY), NOBODY);
        }
    }

    /// Moves the sets of readers from `old` to `sets`, without what nobody refers to; where the
    /// operations in them are over, without what a later one need not know.
    fn collapse(&mut self, sets: &mut Sets, old: &[Node], over: bool) {
        let mut last = (NOBODY, NOBODY);
        for cell in &mut self.cells {
            if cell.reader & SET == SET {
                if cell.reader != last.0 {
                    last = (cell.reader, sets.adopt(old, cell.reader, over));
                }
                cell.reader = last.1;
            }
        }
    }

    /// Copies which bytes are written, for a copy of the bytes themselves, which has just written
    /// them all.
    pub(super) fn copy_written(&mut self, at: usize, from: &[bool]) {
        if from.iter().all(|&written| written) {
            return;
        }
        self.split(0);
        for (state, &written) in self.state[at..].iter_mut().zip(from) {
            *state = if written { WRITTEN } else { 0 };
        }
    }

    pub(super) fn written(&self, range: Range<usize>) -> Vec<bool> {
        let written = |i: usize| self.state[i >> self.grain] & WRITTEN != 0;
        range.map(written).collect()
    }

    /// Checks a touch of `range` and records it. An objection names the first byte; bytes before
    /// it are recorded.
    pub(super) fn touch(
        &mut self,
        range: Range<usize>,
        touch: Touch,
        now: &Now<'_>,
        sets: &mut Sets,
        care_unwritten: bool,
    ) -> Result<(), (usize, Objection)> {
        let range = self.cells_of(&range);
        let grain = self.grain;
        if range.len() == 1 {
            let (cell, state) = (&mut self.cells[range.start], &mut self.state[range.start]);
            return match next((*cell, *state), touch, now, sets, care_unwritten) {
                Ok(new) => {
                    (*cell, *state) = new;
                    Ok(())
                }
                Err(objection) => Err((range.start << grain, objection)),
            };
        }
        let mut last: Option<((Cell, u8), (Cell, u8))> = None;
        let cells = self.cells[range.clone()].iter_mut();
        for (i, (cell, state)) in cells.zip(&mut self.state[range.clone()]).enumerate() {
            let old = (*cell, *state);
            let new = match last {
                Some((same, new)) if same == old => new,
                _ => match next(old, touch, now, sets, care_unwritten) {
                    Ok(new) => new,
                    Err(objection) => return Err(((range.start + i) << grain, objection)),
                },
            };
            (*cell, *state) = new;
            last = Some((old, new));
        }
        Ok(())
    }
}

/// A byte's record after a touch.
#[inline]
fn next(
    (mut cell, mut state): (Cell, u8),
    touch: Touch,
    now: &Now<'_>,
    sets: &mut Sets,
    care_unwritten: bool,
) -> Result<(Cell, u8), Objection> {
    if touch == Touch::Land {
        (cell.writer, cell.reader) = (now.stamp, NOBODY);
        return Ok((cell, WRITTEN));
    }
    if state & ON_ITS_WAY != 0 {
        return Err(Objection::OnItsWay(cell.writer));
    }
    if !now.after(cell.writer) {
        return Err(Objection::Written(cell.writer));
    }
    if touch == Touch::Read {
        if care_unwritten && state & WRITTEN == 0 {
            return Err(Objection::Unwritten);
        }
        cell.reader = sets.add(cell.reader, now);
        return Ok((cell, state));
    }
    if let Some(reader) = sets.unordered(cell.reader, now) {
        return Err(Objection::Read(reader));
    }
    (cell.writer, cell.reader) = (now.stamp, NOBODY);
    match touch {
        Touch::Start => state |= ON_ITS_WAY,
        _ => state = WRITTEN,
    }
    Ok((cell, state))
}

/// Sets of readers, as chains: a set is its latest reader and the set before it.
#[derive(Debug)]
pub(super) struct Sets {
    nodes: Vec<Node>,
    /// Room for the next sweep, and for what a set is made of.
    spare: Vec<Node>,
    kept: Vec<Stamp>,
    /// Nodes after the last sweep.
    swept: usize,
    /// Nodes that are worth a sweep.
    many: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    stamp: Stamp,
    /// The rest: nobody, one reader, or another set.
    rest: u64,
    depth: u32,
    /// The set holds two blocks of the stamp's operation.
    two_blocks: bool,
}

/// A set this deep is looked through for readers that need not be remembered.
const DEEP: u32 = 512;

/// A set's node, where it is one.
fn node(nodes: &[Node], reader: u64) -> Option<Node> {
    match reader & SET {
        SET => nodes.get((reader & !SET) as usize).copied(),
        _ => None,
    }
}

fn members(nodes: &[Node], reader: u64) -> impl Iterator<Item = Stamp> {
    let mut at = reader;
    std::iter::from_fn(move || match node(nodes, at) {
        Some(node) => {
            at = node.rest;
            Some(node.stamp)
        }
        None if at == NOBODY => None,
        None => Some(Stamp(std::mem::replace(&mut at, NOBODY))),
    })
}

impl Default for Sets {
    fn default() -> Self {
        Self::with_sweeps(1 << 20)
    }
}

impl Sets {
    /// Sets that are swept where `many` nodes have come since the last time.
    pub(super) fn with_sweeps(many: usize) -> Self {
        Self {
            nodes: Vec::new(),
            spare: Vec::new(),
            kept: Vec::new(),
            swept: 0,
            many,
        }
    }

    /// Forgets all of them.
    pub(super) fn clear(&mut self) {
        self.nodes.clear();
        self.swept = 0;
    }

    /// Whether many nodes were added since the last sweep.
    pub(super) fn are_many(&self) -> bool {
        self.nodes.len() >= 2 * self.swept + self.many
    }

    /// Keeps the sets that the shadows have, and of them what they need.
    pub(super) fn sweep<'a>(&mut self, shadows: impl Iterator<Item = &'a mut Shadow>, over: bool) {
        let old = std::mem::replace(&mut self.nodes, std::mem::take(&mut self.spare));
        for shadow in shadows {
            shadow.collapse(self, &old, over);
        }
        self.swept = self.nodes.len();
        self.spare = old;
        self.spare.clear();
    }

    fn push(&mut self, rest: u64, stamp: Stamp) -> u64 {
        if rest == NOBODY {
            return stamp.0;
        }
        let (before, depth, two_blocks) = match node(&self.nodes, rest) {
            Some(node) => (node.stamp, node.depth, node.two_blocks),
            None => (Stamp(rest), 1, false),
        };
        let same_op = before.op() == stamp.op();
        self.nodes.push(Node {
            stamp,
            rest,
            depth: depth + 1,
            two_blocks: same_op && (two_blocks || before.block() != stamp.block()),
        });
        SET | (self.nodes.len() as u64 - 1)
    }

    /// The record of readers after `now` has read too.
    fn add(&mut self, reader: u64, now: &Now<'_>) -> u64 {
        let me = now.stamp;
        if reader == me.0 || reader == NOBODY {
            return me.0;
        }
        let Some(last) = node(&self.nodes, reader) else {
            // One reader.
            return match now.after(Stamp(reader)) {
                true => me.0,
                false => self.push(reader, me),
            };
        };
        if last.stamp == me || last.two_blocks && last.stamp.op() == me.op() {
            return reader;
        }
        if !now.after(last.stamp) && !last.depth.is_multiple_of(DEEP) {
            return self.push(reader, me);
        }
        let mut kept = std::mem::take(&mut self.kept);
        kept.extend(members(&self.nodes, reader).filter(|&s| !now.after(s)));
        let left = self.set_of(&mut kept);
        self.kept = kept;
        self.push(left, me)
    }

    /// The set of these members, the latest first; they are taken out.
    fn set_of(&mut self, members: &mut Vec<Stamp>) -> u64 {
        let last_first = members.drain(..).rev();
        last_first.fold(NOBODY, |rest, stamp| self.push(rest, stamp))
    }

    /// `reader` of `old`, in these sets: all of it while its operation runs, two members for each
    /// operation after it.
    fn adopt(&mut self, old: &[Node], reader: u64, over: bool) -> u64 {
        let mut kept = std::mem::take(&mut self.kept);
        for s in members(old, reader) {
            if !over || kept.iter().filter(|k| k.op() == s.op()).count() < 2 {
                kept.push(s);
            }
        }
        let set = self.set_of(&mut kept);
        self.kept = kept;
        set
    }

    /// A reader that is not ordered before `now`.
    fn unordered(&self, reader: u64, now: &Now<'_>) -> Option<Stamp> {
        if reader == NOBODY || reader == now.stamp.0 {
            return None;
        }
        members(&self.nodes, reader).find(|&s| !now.after(s))
    }
}

#[cfg(test)]
mod tests {
    use super::super::order::Meeting;
    use super::*;

    fn ops(n: u32) -> Ops {
        Ops {
            place: (0..=n).map(|i| (i, u32::from(i > 0))).collect(),
            name: Vec::new(),
            seen: std::vec![0; n as usize + 1],
        }
    }

    struct World {
        shadow: Shadow,
        sets: Sets,
        ops: Ops,
        clocks: Clocks,
    }

    impl World {
        fn new() -> Self {
            Self {
                shadow: Shadow::new(8),
                sets: Sets::default(),
                ops: ops(3),
                clocks: Clocks::new(4),
            }
        }

        fn touch(
            &mut self,
            touch: Touch,
            (op, block, thread): (u32, u32, usize),
        ) -> Result<(), (usize, Objection)> {
            let now = Now {
                stamp: Stamp::new(op, block, thread, self.clocks.now(thread)),
                ops: &self.ops,
                clocks: &self.clocks,
            };
            self.shadow.touch(2..6, touch, &now, &mut self.sets, true)
        }
    }

    #[test]
    fn a_stamp_gives_back_its_parts() {
        let s = Stamp::new(0xf_fffe, 0x3_ffff, 1023, u16::MAX);
        assert_eq!(
            (s.op(), s.block(), s.thread(), s.clock()),
            (0xf_fffe, 0x3_ffff, 1023, u16::MAX)
        );
        assert_ne!(s.0 & SET, SET);
    }

    #[test]
    fn readers_of_all_threads_are_remembered() {
        let mut w = World::new();
        w.touch(Touch::Write, (1, 0, 0)).unwrap();
        let rule = Meeting::BarSync.rule();
        w.clocks.meet(&[0, 1, 2, 3], rule).unwrap();
        for thread in 0..3 {
            w.touch(Touch::Read, (1, 0, thread)).unwrap();
        }
        w.clocks.meet(&[2, 3], rule).unwrap();
        let refused = w.touch(Touch::Write, (1, 0, 3)).unwrap_err();
        assert!(matches!(refused, (2, Objection::Read(s)) if s.thread() < 2));
        w.clocks.meet(&[0, 1, 3], rule).unwrap();
        w.touch(Touch::Write, (1, 0, 3)).unwrap();
    }

    #[test]
    fn blocks_of_one_operation_never_order_each_other() {
        let mut w = World::new();
        w.touch(Touch::Write, (1, 0, 0)).unwrap();
        let refused = w.touch(Touch::Read, (1, 1, 0)).unwrap_err();
        assert!(matches!(refused, (2, Objection::Written(s)) if s.block() == 0));
        w.ops.seen[1] = 1; // operation 2 has seen operation 1
        for block in 0..5 {
            w.touch(Touch::Read, (2, block, 0)).unwrap();
        }
        for block in 0..5 {
            assert!(w.touch(Touch::Write, (2, block, 0)).is_err());
        }
        w.ops.seen[2] = 1;
        w.touch(Touch::Write, (3, 0, 0)).unwrap();
    }

    /// Touches of any place and width, of a shadow with a cell a byte and of one that begins coarse:
    /// the same answers, whatever came before.
    #[test]
    fn coarse_cells_answer_as_bytes_do() {
        use super::super::rng::Rng;
        const BYTES: usize = 70;
        let mut coarse_at_the_end = 0;
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let widest = 1 << rng.below(5);
            let mut fine = World::new();
            fine.shadow = Shadow::new(BYTES);
            fine.shadow.split(0);
            let mut coarse = World::new();
            coarse.shadow = Shadow::new(BYTES);
            for _ in 0..60 {
                let bytes = widest << rng.below(2);
                let at = rng.below(BYTES / widest) * widest;
                let range = at..(at + bytes).min(BYTES);
                let touch = match rng.below(8) {
                    0 => Touch::Start,
                    1 => Touch::Land,
                    2..5 => Touch::Write,
                    _ => Touch::Read,
                };
                let who = (1 + rng.below(2) as u32, 0, rng.below(4));
                let answers = [&mut fine, &mut coarse].map(|w| {
                    let now = Now {
                        stamp: Stamp::new(who.0, who.1, who.2, w.clocks.now(who.2)),
                        ops: &w.ops,
                        clocks: &w.clocks,
                    };
                    w.shadow
                        .touch(range.clone(), touch, &now, &mut w.sets, true)
                });
                assert_eq!(answers[0], answers[1], "seed {seed}");
                if rng.one_in(4) {
                    let rule = Meeting::BarSync.rule();
                    for w in [&mut fine, &mut coarse] {
                        w.clocks.meet(&[0, 1, 2, 3], rule).unwrap();
                    }
                }
                let written = [&fine, &coarse].map(|w| w.shadow.written(0..BYTES));
                assert_eq!(written[0], written[1]);
            }
            assert!(
                1 << coarse.shadow.grain >= widest,
                "no finer than it is touched"
            );
            coarse_at_the_end += u32::from(coarse.shadow.grain > 0);
        }
        assert!(coarse_at_the_end > 100, "{coarse_at_the_end}");
    }

    #[test]
    fn what_is_on_its_way_is_nobodys() {
        let mut w = World::new();
        assert_eq!(
            w.touch(Touch::Read, (1, 0, 0)),
            Err((2, Objection::Unwritten))
        );
        w.touch(Touch::Start, (1, 0, 0)).unwrap();
        for touch in [Touch::Read, Touch::Write, Touch::Start] {
            let refused = w.touch(touch, (1, 0, 0)).unwrap_err();
            assert!(matches!(refused, (2, Objection::OnItsWay(_))));
        }
        w.touch(Touch::Land, (1, 0, 0)).unwrap();
        w.touch(Touch::Read, (1, 0, 0)).unwrap();
        assert!(
            w.touch(Touch::Read, (1, 0, 1)).is_err(),
            "not without a barrier"
        );
    }
}
