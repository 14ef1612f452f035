//! The rings of all ranks, put side by side: who waits in which call for whom.
//!
//! ```text
//!            call 16   call 17                       open = 17, the first call of the group that
//! rank 0     done      begun  ...waits               somebody has begun and nobody has finished everywhere
//! rank 1     done      begun  ...waits
//! rank 2     done      -- absent: what does it do instead?
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    string::{String, ToString},
    vec::Vec,
};

use super::{Entry, Group, Ring, State};

/// What the rings of a run say together.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Standing {
    /// Ranks that have left a ring, in order.
    pub ranks: Vec<usize>,
    /// What does not go on, the nearest to its cause first; empty where all is well.
    pub blames: Vec<Blame>,
}

/// One thing that does not go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Blame {
    /// Members of a group have called differently.
    Differs {
        /// The group.
        group: Group,
        /// The number of the call.
        sequence: u64,
        /// What each rank called.
        calls: Vec<(usize, Entry)>,
    },
    /// Members wait in a call that others have not begun.
    Absent {
        /// The group.
        group: Group,
        /// The call, as the first of those who wait has it.
        call: Entry,
        /// Who waits.
        waiting: Vec<usize>,
        /// Who has not called.
        absent: Vec<Absent>,
    },
    /// A rank waits for a message that was not sent, or for somebody to take one.
    Message {
        /// The group.
        group: Group,
        /// Who waits.
        rank: usize,
        /// The call it waits in.
        call: Entry,
        /// The other end.
        other: Absent,
    },
    /// All members are in the call and it is not over: what they wait for is on its way, or lost.
    Under {
        /// The group.
        group: Group,
        /// The call.
        call: Entry,
        /// Who is in it.
        waiting: Vec<usize>,
    },
}

/// A rank that others wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Absent {
    /// It has left no ring.
    NoRecord(usize),
    /// It is in no call: it computes, or is gone. With its last call, where it has made one.
    Idle(usize, Option<Entry>),
    /// It is itself in another call.
    Busy(usize, Entry),
}

impl Absent {
    /// The rank, global.
    #[must_use]
    pub fn rank(&self) -> usize {
        match self {
            Self::NoRecord(rank) | Self::Idle(rank, _) | Self::Busy(rank, _) => *rank,
        }
    }
}

/// Puts rings side by side. Of two rings of one rank the later begun counts.
#[must_use]
pub fn merge(rings: &[Ring]) -> Standing {
    let mut by_rank: BTreeMap<usize, &Ring> = BTreeMap::new();
    for ring in rings {
        let kept = by_rank.entry(ring.rank).or_insert(ring);
        if ring.began >= kept.began {
            *kept = ring;
        }
    }
    let mut seen = BTreeSet::new();
    let mut blames = Vec::new();
    for group in by_rank.values().flat_map(|ring| &ring.groups) {
        if seen.insert((&group.name, &group.ranks)) {
            blames.extend(collective(group, &by_rank));
            messages(group, &by_rank, &mut blames);
        }
    }
    blames.sort_by_key(Blame::distance);
    Standing {
        ranks: by_rank.into_keys().collect(),
        blames,
    }
}

impl Blame {
    /// How far from a cause: a difference is one, and so is a rank that is in no call at all.
    fn distance(&self) -> u8 {
        let of = |absent: &Absent| u8::from(matches!(absent, Absent::Busy(..)));
        match self {
            Self::Differs { .. } => 0,
            Self::Absent { absent, .. } => 1 + absent.iter().map(of).min().unwrap_or(1),
            Self::Message { other, .. } => 1 + of(other),
            Self::Under { .. } => 3,
        }
    }
}

/// Collectives of `ring` in `group`, by number.
fn calls<'a>(ring: &'a Ring, group: &Group) -> impl Iterator<Item = (u64, &'a Entry)> {
    let at = ring.groups.iter().position(|known| known == group);
    let of_it = ring.entries.iter().filter(move |e| Some(e.group) == at);
    of_it.filter_map(|entry| Some((entry.sequence?, entry)))
}

/// Whether somebody waits in it, or gave up waiting.
fn stuck(entry: &Entry) -> bool {
    matches!(entry.state, State::Begun | State::Failed)
}

fn collective(group: &Group, rings: &BTreeMap<usize, &Ring>) -> Option<Blame> {
    let members = || {
        group
            .ranks
            .iter()
            .filter_map(|r| Some((*r, *rings.get(r)?)))
    };
    let open = members()
        .flat_map(|(_, ring)| calls(ring, group))
        .filter(|(_, entry)| stuck(entry))
        .map(|(sequence, _)| sequence)
        .min()?;
    let found: Vec<(usize, Entry)> = members()
        .filter_map(|(rank, ring)| {
            let call = calls(ring, group)
                .find(|(sequence, _)| *sequence == open)?
                .1;
            Some((rank, call.clone()))
        })
        .collect();
    let (_, first) = found.first()?;
    if found.iter().any(|(_, call)| differ(first, call)) {
        return Some(Blame::Differs {
            group: group.clone(),
            sequence: open,
            calls: found,
        });
    }
    let waiting: Vec<usize> = found
        .iter()
        .filter_map(|(rank, call)| stuck(call).then_some(*rank))
        .collect();
    let here = |rank: &&usize| found.iter().any(|(r, _)| r == *rank);
    let absent: Vec<Absent> = group
        .ranks
        .iter()
        .filter(|rank| !here(rank) && !beyond(**rank, open, group, rings))
        .map(|rank| whereabouts(*rank, rings))
        .collect();
    let (group, call) = (group.clone(), first.clone());
    Some(if absent.is_empty() {
        Blame::Under {
            group,
            call,
            waiting,
        }
    } else {
        Blame::Absent {
            group,
            call,
            waiting,
            absent,
        }
    })
}

/// Whether the rank is past this call, which its ring has lost.
fn beyond(rank: usize, open: u64, group: &Group, rings: &BTreeMap<usize, &Ring>) -> bool {
    let ring = rings.get(&rank);
    ring.is_some_and(|ring| calls(ring, group).any(|(sequence, _)| sequence > open))
}

fn differ(a: &Entry, b: &Entry) -> bool {
    let lens = a.op != "all_to_all_v" && a.len != b.len;
    a.op != b.op || a.dtype != b.dtype || lens
}

/// What a rank is doing.
fn whereabouts(rank: usize, rings: &BTreeMap<usize, &Ring>) -> Absent {
    let Some(ring) = rings.get(&rank) else {
        return Absent::NoRecord(rank);
    };
    // The oldest that is open, or the last where that failed: it stood there until it gave up.
    let open = ring.entries.iter().find(|e| e.state == State::Begun);
    let failed = ring.entries.last().filter(|e| e.state == State::Failed);
    match open.or(failed) {
        Some(entry) => Absent::Busy(rank, entry.clone()),
        None => Absent::Idle(rank, ring.entries.last().cloned()),
    }
}

fn messages(group: &Group, rings: &BTreeMap<usize, &Ring>, blames: &mut Vec<Blame>) {
    for (rank, ring) in group
        .ranks
        .iter()
        .filter_map(|r| Some((*r, *rings.get(r)?)))
    {
        let Some(at) = ring.groups.iter().position(|known| known == group) else {
            continue;
        };
        for call in ring.entries.iter().filter(|e| e.group == at && stuck(e)) {
            if let Some((peer, _)) = call.peer {
                blames.push(Blame::Message {
                    group: group.clone(),
                    rank,
                    call: call.clone(),
                    other: whereabouts(peer, rings),
                });
            }
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({} x {})", self.op, self.dtype, self.len)?;
        if let Some((peer, tag)) = self.peer {
            let way = if self.op == "recv" { "from" } else { "to" };
            write!(f, " {way} rank {peer}, tag {tag}")?;
        }
        if !self.site.is_empty() {
            write!(f, " at {}", self.site)?;
        }
        Ok(())
    }
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRecord(rank) => write!(f, "rank {rank} has left no record"),
            Self::Idle(rank, None) => write!(f, "rank {rank} has made no call"),
            Self::Idle(rank, Some(last)) => write!(
                f,
                "rank {rank} is in no call; its last, {last}, is {}",
                last.state.name()
            ),
            Self::Busy(rank, call) => write!(f, "rank {rank} is in {call}"),
        }
    }
}

fn list(ranks: &[usize]) -> String {
    let all: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    let noun = if all.len() == 1 { "rank" } else { "ranks" };
    std::format!("{noun} {}", all.join(" "))
}

impl fmt::Display for Blame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |call: &Entry| call.sequence.map_or_else(String::new, |n| n.to_string());
        match self {
            Self::Differs {
                group,
                sequence,
                calls,
            } => {
                write!(f, "group {}: call {sequence} differs", group.name)?;
                for (rank, call) in calls {
                    write!(f, "\n  rank {rank} called {call}")?;
                }
                Ok(())
            }
            Self::Absent {
                group,
                call,
                waiting,
                absent,
            } => {
                let (name, n) = (&group.name, number(call));
                write!(f, "group {name}: {} in call {n}, {call}", list(waiting))?;
                for rank in absent {
                    write!(f, "\n  not there: {rank}")?;
                }
                Ok(())
            }
            Self::Message {
                group,
                rank,
                call,
                other,
            } => write!(
                f,
                "group {}: rank {rank} in {call}\n  the other end: {other}",
                group.name
            ),
            Self::Under {
                group,
                call,
                waiting,
            } => {
                let (name, n) = (&group.name, number(call));
                write!(
                    f,
                    "group {name}: all have made call {n}, {call}; not over on {}",
                    list(waiting)
                )
            }
        }
    }
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "records of {}", list(&self.ranks))?;
        if self.blames.is_empty() {
            writeln!(f, "no call is left unfinished")?;
        }
        for blame in &self.blames {
            writeln!(f, "{blame}")?;
        }
        Ok(())
    }
}
