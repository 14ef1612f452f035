//! One rank's memory during the replay, in symbols: the twin of the performer's.

use alloc::{
    collections::{BTreeSet, VecDeque},
    format,
    string::String,
    vec,
    vec::Vec,
};
use core::ops::Range;

use super::super::{Action, CollectiveShape, Local, Part, Place, Plan, Recv, What};

/// One element: which (rank, input index) were folded into it, in this order.
pub(super) type Sum = Vec<(usize, usize)>;

/// Why a plan is unsound.
pub(super) type Fault<T> = Result<T, String>;

/// Accumulators of a range, some given away.
pub(super) type Held = (Range<usize>, Vec<Option<Sum>>);

/// One rank's memory during the replay.
#[derive(Debug, Default)]
pub(super) struct Symbols {
    pub(super) input: usize,
    /// How an in-place call would lay one over the other.
    pub(super) alias: Option<Alias>,
    /// Inputs that an in-place call has overwritten.
    pub(super) spoiled: BTreeSet<usize>,
    pub(super) output: Vec<Option<Sum>>,
    pub(super) stash: Vec<Option<Sum>>,
    pub(super) kept: Vec<Option<Vec<Sum>>>,
    pub(super) held: Vec<Held>,
    /// Ranks whose messages, directly or not, this rank's messages depend on.
    pub(super) heard: BTreeSet<usize>,
    pub(super) posted: VecDeque<(usize, Letter)>,
    pub(super) missing: Vec<Recv>,
    pub(super) then: Vec<Local>,
    pub(super) next: usize,
}

/// Input `input + i` and output `output + i` are one element of an in-place call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Alias {
    pub(super) input: usize,
    pub(super) output: usize,
}

impl Alias {
    /// The in-place forms of a communicator; operations without one have no alias.
    pub(super) fn of(plan: &Plan, rank: usize) -> Option<Self> {
        use CollectiveShape as S;
        let start = plan.chunk(rank).start;
        let (input, output) = match plan.shape() {
            S::AllReduce { .. } | S::Reduce { .. } | S::Broadcast { .. } => (0, 0),
            S::ReduceScatter { .. } => (start, 0),
            S::AllGather { .. } => (0, start),
            _ => return None,
        };
        Some(Self { input, output })
    }

    fn input_at(self, output: usize, inputs: usize) -> Option<usize> {
        let input = (output + self.input).checked_sub(self.output)?;
        (input < inputs).then_some(input)
    }
}

/// A message on its way.
#[derive(Debug, Clone)]
pub(super) struct Letter {
    pub(super) sums: Vec<Sum>,
    pub(super) wide: bool,
    pub(super) round: usize,
    pub(super) heard: BTreeSet<usize>,
}

impl Symbols {
    fn input(&self, me: usize, range: &Range<usize>) -> Fault<Vec<Sum>> {
        if range.end > self.input {
            return Err(format!(
                "rank {me} reads {range:?} of an input of {}",
                self.input
            ));
        }
        if let Some(at) = self.spoiled.range(range.clone()).next() {
            return Err(format!(
                "rank {me} reads input {at}, which in place was overwritten before"
            ));
        }
        Ok(range.clone().map(|i| vec![(me, i)]).collect())
    }

    fn raw(&self, me: usize, place: Place, range: &Range<usize>) -> Fault<Vec<Sum>> {
        let memory = match place {
            Place::Input => return self.input(me, range),
            Place::Output => &self.output,
            Place::Stash => &self.stash,
        };
        let cells = memory.get(range.clone());
        let sums = cells.and_then(|cells| cells.iter().cloned().collect::<Option<Vec<Sum>>>());
        sums.ok_or_else(|| format!("rank {me} sends {place:?} {range:?} before it is there"))
    }

    /// The accumulators of `range` where the performer would find them: in the partial that holds
    /// it, else in the input.
    fn partial(&mut self, me: usize, range: &Range<usize>, give: bool) -> Fault<Vec<Sum>> {
        let Some(at) = self.holding(me, range)? else {
            return self.input(me, range);
        };
        let (held, cells) = &mut self.held[at];
        let cells = &mut cells[range.start - held.start..range.end - held.start];
        let sums = cells.iter().cloned().collect::<Option<Vec<Sum>>>();
        let sums =
            sums.ok_or_else(|| format!("rank {me} has given some of partial {range:?} away"));
        if give {
            cells.fill(None);
            if held == range {
                self.held.swap_remove(at);
            }
        }
        sums
    }

    fn hold(&mut self, me: usize, range: &Range<usize>, sums: Vec<Sum>) -> Fault<()> {
        let sums = sums.into_iter().map(Some);
        match self.holding(me, range)? {
            Some(at) => {
                let (held, cells) = &mut self.held[at];
                let cells = &mut cells[range.start - held.start..];
                cells
                    .iter_mut()
                    .zip(sums)
                    .for_each(|(cell, sum)| *cell = sum);
            }
            None => self.held.push((range.clone(), sums.collect())),
        }
        Ok(())
    }

    /// Which partial holds all of `range`; one that holds only some of it is a fault.
    fn holding(&self, me: usize, range: &Range<usize>) -> Fault<Option<usize>> {
        let meets = |held: &Held| held.0.start < range.end && range.start < held.0.end;
        let Some(at) = self.held.iter().position(meets) else {
            return Ok(None);
        };
        let held = &self.held[at].0;
        if held.start <= range.start && range.end <= held.end {
            return Ok(Some(at));
        }
        Err(format!(
            "rank {me} holds the partial {held:?}, which is not all of {range:?}"
        ))
    }

    pub(super) fn outgoing(&mut self, me: usize, what: &What) -> Fault<Vec<Sum>> {
        match what {
            What::Input(range) => self.input(me, range),
            What::Output(range) => self.raw(me, Place::Output, range),
            What::Partial(range) | What::Finished(range) => self.partial(me, range, true),
            What::Shared(range) => self.partial(me, range, false),
            What::Parts(parts) => {
                let mut sums = Vec::new();
                for Part { place, range } in parts {
                    sums.extend(self.raw(me, *place, range)?);
                }
                Ok(sums)
            }
        }
    }

    fn store(&mut self, me: usize, at: usize, sums: Vec<Sum>) -> Fault<()> {
        let len = self.output.len();
        let Some(cells) = self.output.get_mut(at..at + sums.len()) else {
            return Err(format!(
                "rank {me} stores at {at}..{} of an output of {len}",
                at + sums.len()
            ));
        };
        for (i, (cell, sum)) in (at..).zip(cells.iter_mut().zip(sums)) {
            let input = self.alias.and_then(|alias| alias.input_at(i, self.input));
            if let Some(input) = input.filter(|input| sum != [(me, *input)]) {
                self.spoiled.insert(input);
            }
            *cell = Some(sum);
        }
        Ok(())
    }

    pub(super) fn receive(&mut self, me: usize, recv: Recv, letter: Letter) -> Fault<()> {
        let Recv { from, len, action } = recv;
        if letter.sums.len() != len || letter.wide != action.wide() {
            return Err(format!(
                "rank {me} expects {len} elements of rank {from}, which sends {}",
                letter.sums.len()
            ));
        }
        if letter.round + 1 != self.next {
            return Err(format!(
                "rank {me} receives in round {} what rank {from} sent in round {}",
                self.next - 1,
                letter.round
            ));
        }
        self.heard.extend(letter.heard);
        let mut sums = letter.sums;
        match action {
            Action::Store(at) => self.store(me, at, sums)?,
            Action::Keep => self.kept[from] = Some(sums),
            Action::Fold(range) => self.fold(me, &range, sums, false)?,
            Action::FoldLeft(range) => self.fold(me, &range, sums, true)?,
            Action::FoldRaw(ranges) => {
                for range in ranges {
                    let rest = sums.split_off(range.len().min(sums.len()));
                    self.fold(me, &range, sums, false)?;
                    sums = rest;
                }
            }
            Action::Parts(parts) => {
                for Part { place, range } in parts {
                    let rest = sums.split_off(range.len().min(sums.len()));
                    self.lay_down(me, place, range, sums)?;
                    sums = rest;
                }
            }
        }
        Ok(())
    }

    fn lay_down(
        &mut self,
        me: usize,
        place: Place,
        range: Range<usize>,
        sums: Vec<Sum>,
    ) -> Fault<()> {
        match place {
            Place::Input => Err(format!("rank {me} writes into its input")),
            Place::Output => self.store(me, range.start, sums),
            Place::Stash => {
                let len = self.stash.len().max(range.end);
                self.stash.resize(len, None);
                let cells = self.stash[range].iter_mut().zip(sums);
                cells.for_each(|(cell, sum)| *cell = Some(sum));
                Ok(())
            }
        }
    }

    fn fold(&mut self, me: usize, range: &Range<usize>, sums: Vec<Sum>, left: bool) -> Fault<()> {
        let own = self.partial(me, range, false)?;
        let total = if left {
            folded(me, sums, &own)?
        } else {
            folded(me, own, &sums)?
        };
        self.hold(me, range, total)
    }

    pub(super) fn work(&mut self, me: usize, local: Local) -> Fault<()> {
        let (sums, at) = match local {
            Local::Copy { input, at } => (self.input(me, &input)?, at),
            Local::Finish { input, at } => (self.partial(me, &input, true)?, at),
            Local::FoldRanks { input, at } => {
                let kept = core::mem::take(&mut self.kept);
                (self.fold_apart(me, &input, kept)?, at)
            }
            Local::FoldStash { input, at } => {
                let (n, len) = (self.kept.len(), input.len());
                let part = |rank| {
                    self.raw(me, Place::Stash, &(rank * len..(rank + 1) * len))
                        .ok()
                };
                let parts = (0..n).map(part).collect();
                (self.fold_apart(me, &input, parts)?, at)
            }
        };
        self.store(me, at, sums)
    }

    /// The left fold of own input and the parts of the others, in rank order.
    fn fold_apart(
        &mut self,
        me: usize,
        input: &Range<usize>,
        mut parts: Vec<Option<Vec<Sum>>>,
    ) -> Fault<Vec<Sum>> {
        let mut total: Vec<Sum> = vec![vec![]; input.len()];
        for rank in 0..parts.len() {
            let part = if rank == me {
                Some(self.input(me, input)?)
            } else {
                parts[rank].take()
            };
            match part {
                Some(part) => total = folded(me, total, &part)?,
                None if input.is_empty() => {}
                None => return Err(format!("rank {me} folds without the part of rank {rank}")),
            }
        }
        self.kept = vec![None; parts.len()];
        Ok(total)
    }
}

pub(super) fn folded(me: usize, mut left: Vec<Sum>, right: &[Sum]) -> Fault<Vec<Sum>> {
    if left.len() != right.len() {
        return Err(format!(
            "rank {me} folds {} elements onto {}",
            right.len(),
            left.len()
        ));
    }
    left.iter_mut().zip(right).for_each(|(l, r)| l.extend(r));
    Ok(left)
}
