//! What a GPU would have done: bytes, sectors, bank conflicts, matrix products.
//!
//! A warp's lanes reach an instruction one by one here; the n-th time that each lane passes a line
//! of code counts as one warp access.
//!
//! ```text
//! shared   32 banks of 4 bytes; wide accesses go in phases of 128 bytes; a phase takes as
//!          many turns as one bank has different words in it
//! global   sectors of 32 bytes that a warp access touches
//! ```

use std::collections::HashMap;
use std::vec::Vec;

use super::warp::LANES;

/// Counted over launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Bytes that lanes read from global memory.
    pub global_read: u64,
    /// Bytes that lanes wrote to global memory.
    pub global_written: u64,
    /// Sectors of 32 bytes that warps touched in global memory.
    pub sectors: u64,
    /// The fewest sectors that hold those bytes.
    pub least_sectors: u64,
    /// Warp accesses to shared memory, in phases.
    pub shared_phases: u64,
    /// Turns beyond the first that banks needed.
    pub bank_conflicts: u64,
    /// Matrix instructions, by warp.
    pub mma: u64,
    /// Blocks that ran.
    pub blocks: u64,
}

impl Counters {
    pub(super) fn add(&mut self, other: &Counters) {
        self.global_read += other.global_read;
        self.global_written += other.global_written;
        self.sectors += other.sectors;
        self.least_sectors += other.least_sectors;
        self.shared_phases += other.shared_phases;
        self.bank_conflicts += other.bank_conflicts;
        self.mma += other.mma;
        self.blocks += other.blocks;
    }
}

#[derive(Debug, Clone, Copy)]
struct Lane {
    lane: usize,
    at: usize,
    bytes: usize,
}

/// The accesses of one place in the code by one warp.
#[derive(Debug, Default)]
struct Stand {
    /// How often each lane has passed.
    passed: [u32; LANES],
    /// Accesses not yet counted: the first is the one numbered `counted`.
    open: Vec<Vec<Lane>>,
    counted: u32,
}

/// Collects the accesses of one block.
#[derive(Debug, Default)]
pub(super) struct Counting {
    pub(super) sum: Counters,
    stands: HashMap<(usize, usize, bool), Stand>,
}

impl Counting {
    /// One lane's access; `key` is the place in the code, `live` the warp's lanes.
    pub(super) fn access(
        &mut self,
        (warp, lane, live): (usize, usize, usize),
        key: usize,
        (at, bytes): (usize, usize),
        (shared, write): (bool, bool),
    ) {
        if !shared {
            let sum = match write {
                true => &mut self.sum.global_written,
                false => &mut self.sum.global_read,
            };
            *sum += bytes as u64;
        }
        let stand = self.stands.entry((warp, key, shared)).or_default();
        let nth = stand.passed[lane];
        stand.passed[lane] += 1;
        let i = (nth - stand.counted) as usize;
        if stand.open.len() <= i {
            stand.open.resize_with(i + 1, Vec::new);
        }
        stand.open[i].push(Lane { lane, at, bytes });
        while stand.open.first().is_some_and(|lanes| lanes.len() == live) {
            let lanes = stand.open.remove(0);
            stand.counted += 1;
            self.sum.count(shared, lanes);
        }
    }

    /// Counts what is left: accesses of part of a warp.
    pub(super) fn finish(mut self) -> Counters {
        for ((_, _, shared), stand) in self.stands {
            for lanes in stand.open {
                self.sum.count(shared, lanes);
            }
        }
        self.sum.blocks = 1;
        self.sum
    }

    pub(super) fn mma(&mut self) {
        self.sum.mma += 1;
    }

    /// The rows of one 8x8 matrix: a phase of shared memory.
    pub(super) fn phase(&mut self, rows: &[usize]) {
        let words = rows.iter().flat_map(|at| (0..4).map(move |i| at / 4 + i));
        self.sum.phase(words.collect());
    }
}

impl Counters {
    fn count(&mut self, shared: bool, mut lanes: Vec<Lane>) {
        let Some(bytes) = lanes.iter().map(|l| l.bytes).max().filter(|&b| b > 0) else {
            return;
        };
        lanes.sort_by_key(|l| l.lane);
        let words = |l: &Lane, unit: usize| l.at / unit..=(l.at + l.bytes - 1) / unit;
        if !shared {
            let mut sectors: Vec<usize> = lanes.iter().flat_map(|l| words(l, 32)).collect();
            let mut all: Vec<usize> = lanes.iter().flat_map(|l| l.at..l.at + l.bytes).collect();
            for list in [&mut sectors, &mut all] {
                list.sort_unstable();
                list.dedup();
            }
            self.sectors += sectors.len() as u64;
            self.least_sectors += all.len().div_ceil(32) as u64;
            return;
        }
        let lanes_per_phase = (128 / bytes.max(4)).max(1);
        for phase in 0..LANES.div_ceil(lanes_per_phase) {
            let mine = |l: &&Lane| l.lane / lanes_per_phase == phase;
            let words: Vec<usize> = lanes
                .iter()
                .filter(mine)
                .flat_map(|l| words(l, 4))
                .collect();
            if !words.is_empty() {
                self.phase(words);
            }
        }
    }

    fn phase(&mut self, mut words: Vec<usize>) {
        words.sort_unstable();
        words.dedup();
        let mut banks = [0u64; 32];
        for word in words {
            banks[word % 32] += 1;
        }
        self.shared_phases += 1;
        self.bank_conflicts += banks.into_iter().max().unwrap_or(1).max(1) - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(shared: bool, bytes: usize, at: impl Fn(usize) -> usize) -> Counters {
        let mut counting = Counting::default();
        for lane in 0..32 {
            counting.access((0, lane, 32), 7, (at(lane), bytes), (shared, false));
        }
        counting.finish()
    }

    #[test]
    fn banks_and_sectors_are_those_of_the_manual() {
        assert_eq!(count(true, 4, |l| 4 * l).bank_conflicts, 0);
        assert_eq!(count(true, 4, |_| 64).bank_conflicts, 0, "a broadcast");
        assert_eq!(count(true, 4, |l| 8 * l).bank_conflicts, 1);
        assert_eq!(count(true, 4, |l| 128 * l).bank_conflicts, 31);
        assert_eq!(count(true, 4, |l| 132 * l).bank_conflicts, 0, "padded");
        let wide = count(true, 16, |l| 16 * l);
        assert_eq!((wide.shared_phases, wide.bank_conflicts), (4, 0));
        assert_eq!(count(true, 16, |l| 128 * l).bank_conflicts, 4 * 7);
        let row = count(false, 4, |l| 4 * l);
        assert_eq!(
            (row.sectors, row.least_sectors, row.global_read),
            (4, 4, 128)
        );
        assert_eq!(count(false, 4, |l| 4 * l + 4).sectors, 5);
        assert_eq!(count(false, 4, |l| 256 * l).sectors, 32);
        assert_eq!(count(false, 2, |l| 2 * l).sectors, 2);
    }
}
