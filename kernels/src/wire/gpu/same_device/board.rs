//! Where ranks of one process put what they give each other: addresses and points of streams.
//!
//! ```text
//! Board                                of one device, a clone for each rank
//!   Group                              of each communicator: those ranks, that name, the k-th of both
//!     Round 0, 1, ...                  of each collective: a Post of each rank
//!     Letter (from, to, 0), ...        of each message
//! ```
//!
//! Nothing here is read by the device. A post is made when its rank's stream stands there, and
//! goes with its round, when the last rank has put the last of its work on its stream.

use std::collections::{BTreeMap, HashMap};
use std::string::{String, ToString};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::vec::Vec;

use quintet_collectives::plan::CollectiveShape as Shape;
use quintet_collectives::transport::device::{Job, Span};
use quintet_collectives::{Error, ReduceOp};

use super::super::near::GpuLane;
use super::super::reading;
use super::steps::{Mark, Side, Step};
use crate::gpu::{Fold, Folded};
use crate::launch::{Launch, Stream};

/// Global ranks of a group, its name, and how many such there were before.
type Key = (Vec<usize>, String, usize);

/// What the ranks of one process that share a device share. Clones are the same board.
pub struct Board<L: Launch>(Arc<Mutex<Groups<L>>>);

struct Groups<L: Launch> {
    of: HashMap<Key, Weak<Group<L>>>,
    /// How often a rank has asked for a group of these ranks and this name.
    asked: HashMap<(usize, Vec<usize>, String), usize>,
}

impl<L: Launch> Default for Board<L> {
    fn default() -> Self {
        let (of, asked) = (HashMap::new(), HashMap::new());
        Self(Arc::new(Mutex::new(Groups { of, asked })))
    }
}

impl<L: Launch> Clone for Board<L> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<L: Launch> core::fmt::Debug for Board<L> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "a board of {} groups", self.groups().of.len())
    }
}

impl<L: Launch> Board<L> {
    fn groups(&self) -> MutexGuard<'_, Groups<L>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The group of these global ranks and this name: the k-th that one of them asks for is the k-th
    /// of the others.
    pub(super) fn group(&self, me: usize, ranks: &[usize], name: &str) -> Arc<Group<L>> {
        let mut groups = self.groups();
        let asked = (me, ranks.to_vec(), name.to_string());
        let count = groups.asked.entry(asked).or_default();
        *count += 1;
        let key = (ranks.to_vec(), name.to_string(), *count);
        if let Some(group) = groups.of.get(&key).and_then(Weak::upgrade) {
            return group;
        }
        groups.of.retain(|_, group| group.strong_count() > 0);
        let group = Arc::new(Group(Mutex::default()));
        groups.of.insert(key, Arc::downgrade(&group));
        group
    }
}

/// What the ranks of a communicator share.
pub(super) struct Group<L: Launch>(Mutex<State<L>>);

impl<L: Launch> Group<L> {
    /// Whoever holds it may put work on streams; once it is dead nobody does.
    pub(super) fn state(&self) -> MutexGuard<'_, State<L>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct State<L: Launch> {
    rounds: BTreeMap<u64, Round<L>>,
    letters: BTreeMap<(usize, usize, u64), Letter<L>>,
    dead: Option<Error>,
}

impl<L: Launch> Default for State<L> {
    fn default() -> Self {
        Self {
            rounds: BTreeMap::new(),
            letters: BTreeMap::new(),
            dead: None,
        }
    }
}

/// A collective.
struct Round<L: Launch> {
    posts: Vec<Option<Post<L>>>,
    over: usize,
}

/// What a rank gives.
struct Post<L: Launch> {
    shape: Shape,
    input: Span,
    output: Span,
    marks: [Option<L::Event>; Mark::COUNT],
    stream: Stream,
}

/// A message.
struct Letter<L: Launch> {
    span: Span,
    given: L::Event,
    taken: Option<L::Event>,
    streams: Vec<Stream>,
}

impl<L: Launch> State<L> {
    pub(super) fn alive(&self) -> Result<(), Error> {
        self.dead.clone().map_or(Ok(()), Err)
    }

    /// From now on nothing is put on a stream for this group; gives the streams where something may be under way.
    pub(super) fn end(&mut self, cause: &Error) -> Vec<Stream> {
        self.dead.get_or_insert_with(|| cause.clone());
        let posts = self.rounds.values().flat_map(|round| &round.posts);
        let posts = posts.flatten().map(|post| post.stream);
        let letters = self.letters.values().flat_map(|letter| &letter.streams);
        posts.chain(letters.copied()).collect()
    }
}

/// Who is where in a group, and which of its collectives this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) me: usize,
    pub(super) world: usize,
    pub(super) number: u64,
}

/// A rank's part of a collective, under way.
pub(super) struct Running {
    place: Place,
    redop: ReduceOp,
    steps: Option<Vec<Step>>,
    next: usize,
}

impl Running {
    /// Says what this rank gives, once what comes before it on the lane's stream is over.
    pub(super) fn begin<L: Launch>(
        state: &mut State<L>,
        place: Place,
        job: &Job,
        lane: &GpuLane<L>,
    ) -> Self {
        lane.open();
        let stream = lane.stream();
        let mut marks = [const { None }; Mark::COUNT];
        marks[Mark::Given as usize] = Some(lane.launcher().record(stream));
        let round = state.rounds.entry(place.number).or_insert_with(|| Round {
            posts: (0..place.world).map(|_| None).collect(),
            over: 0,
        });
        round.posts[place.me] = Some(Post {
            shape: job.shape.clone(),
            input: job.input,
            output: job.output,
            marks,
            stream,
        });
        Self {
            place,
            redop: job.redop,
            steps: None,
            next: 0,
        }
    }

    /// Puts on the stream what can be put there; true once that is all.
    pub(super) fn go_on<L: Launch>(
        &mut self,
        state: &mut State<L>,
        lane: &GpuLane<L>,
        plan: impl FnOnce(&[&Shape], usize) -> Vec<Step>,
    ) -> Result<bool, Error> {
        let Place { me, world, number } = self.place;
        let Some(round) = state.rounds.get_mut(&number) else {
            return Ok(true);
        };
        let (launcher, stream) = (lane.launcher(), lane.stream());
        let steps = match &self.steps {
            Some(steps) => steps,
            None => {
                let posts = round.posts.iter().flatten();
                let shapes: Vec<&Shape> = posts.map(|post| &post.shape).collect();
                if shapes.len() < world {
                    return Ok(false);
                }
                self.steps.insert(plan(&shapes, me))
            }
        };
        for step in &steps[self.next..] {
            match step {
                Step::Mark(mark) => {
                    if let Some(post) = &mut round.posts[me] {
                        post.marks[*mark as usize] = Some(launcher.record(stream));
                    }
                }
                Step::After(rank, mark) => {
                    let post = round.posts[*rank].as_ref();
                    let Some(event) = post.and_then(|p| p.marks[*mark as usize].as_ref()) else {
                        return Ok(false);
                    };
                    launcher.wait(stream, event);
                }
                Step::Fold { at, to } => {
                    fold(round, self.redop, (me, at, *to), (launcher, stream))?
                }
                Step::Copy { of, at, to } => {
                    let (Some(from), Some(mine)) = (&round.posts[of.0], &round.posts[me]) else {
                        return Ok(false);
                    };
                    let from = match of.1 {
                        Side::Input => from.input,
                        Side::Output => from.output,
                    };
                    let (src, dst) = (from.at(at.start), mine.output.at(*to));
                    if src != dst {
                        let bytes = at.len() * from.dtype().bytes();
                        launcher.copy(stream, src, dst, bytes).map_err(reading)?;
                    }
                }
            }
            self.next += 1;
        }
        round.over += 1;
        if round.over == world {
            state.rounds.remove(&number);
        }
        Ok(true)
    }
}

fn fold<L: Launch>(
    round: &Round<L>,
    redop: ReduceOp,
    (me, at, to): (usize, &core::ops::Range<usize>, usize),
    on: (&L, Stream),
) -> Result<(), Error> {
    let inputs = round.posts.iter().flatten();
    let parts: Vec<u64> = inputs.map(|post| post.input.at(at.start)).collect();
    let Some(mine) = &round.posts[me] else {
        return Ok(());
    };
    let folded = Folded::named(mine.output.dtype().name());
    let folded = folded.ok_or_else(|| Error::Layout("there is no fold kernel".to_string()))?;
    let out = (mine.output.at(to), at.len());
    folded.launch(on, op(redop), &parts, out).map_err(reading)
}

/// The kernel's word for a fold.
fn op(redop: ReduceOp) -> Fold {
    match redop {
        ReduceOp::Sum => Fold::Sum,
        ReduceOp::Prod => Fold::Prod,
        ReduceOp::Min => Fold::Min,
        ReduceOp::Max => Fold::Max,
        ReduceOp::Avg => Fold::Mean,
    }
}

/// One end of a message, under way: who sends, who receives, the how manieth.
pub(super) struct Passing {
    pub(super) way: (usize, usize, u64),
    /// Of a receiver.
    pub(super) into: Option<Span>,
}

impl Passing {
    /// Of a sender: says what it gives, once what comes before it on the lane's stream is over.
    pub(super) fn begin<L: Launch>(
        state: &mut State<L>,
        way: (usize, usize, u64),
        (span, out): (Span, bool),
        lane: &GpuLane<L>,
    ) -> Self {
        lane.open();
        if out {
            let letter = Letter {
                span,
                given: lane.launcher().record(lane.stream()),
                taken: None,
                streams: std::vec![lane.stream()],
            };
            state.letters.insert(way, letter);
        }
        let into = (!out).then_some(span);
        Self { way, into }
    }

    /// Puts on the stream what can be put there; true once that is all.
    pub(super) fn go_on<L: Launch>(
        &self,
        state: &mut State<L>,
        lane: &GpuLane<L>,
    ) -> Result<bool, Error> {
        let Some(letter) = state.letters.get_mut(&self.way) else {
            return Ok(false);
        };
        let (launcher, stream) = (lane.launcher(), lane.stream());
        if let Some(into) = self.into {
            launcher.wait(stream, &letter.given);
            let (src, dst) = (letter.span.address(), into.address());
            let bytes = into.len().min(letter.span.len()) * into.dtype().bytes();
            letter.streams.push(stream);
            launcher.copy(stream, src, dst, bytes).map_err(reading)?;
            letter.taken = Some(launcher.record(stream));
            return Ok(true);
        }
        let Some(taken) = &letter.taken else {
            return Ok(false);
        };
        launcher.wait(stream, taken);
        state.letters.remove(&self.way);
        Ok(true)
    }
}
