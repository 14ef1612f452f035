//! What every schedule must obey, judged without running it.
//!
//! * [`complete`]: a stage has exactly the actions it owes, each once.
//! * [`order`]: on a stage, each action comes after what it needs.
//! * [`reductions`]: each gradient is reduced, with those of all microbatches or alone.
//! * [`messages`]: what a stage sends another is what that one takes, in the same order.
//! * [`progress`]: all stages come to their end although sends wait for room.
//! * [`held`]: for how many microbatches at once a stage keeps what backward needs.
//!
//! The laws read plain lists of actions, so they may be tried on lists with planted faults.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::timeline::play;
use super::{Action, Actions, Direction, Error, Reduction, Route, Schedule};

/// All laws, with room for one message each way between two stages.
///
/// # Errors
/// The first law broken.
pub fn check(schedule: &Schedule) -> Result<(), Error> {
    check_actions(schedule, &schedule.all())
}

/// All laws on given actions of a schedule, one list per stage.
///
/// # Errors
/// The first law broken.
pub fn check_actions(schedule: &Schedule, programs: &[Actions]) -> Result<(), Error> {
    let none = Actions::new();
    for stage in 0..schedule.stages().max(programs.len()) {
        let actions = programs.get(stage).unwrap_or(&none);
        complete(schedule, stage, actions)?;
        order(schedule.route(), stage, actions)?;
        reductions(schedule, stage, actions)?;
    }
    messages(schedule.route(), programs)?;
    progress(programs, Some(1))
}

/// The stage has every action it owes, once, and no other. Gathers and releases are left to
/// [`order`]: how many there are is the schedule's choice.
///
/// # Errors
/// [`Error::Foreign`], [`Error::Absent`].
pub fn complete(schedule: &Schedule, stage: usize, actions: &[Action]) -> Result<(), Error> {
    let mut owed = owed(schedule, stage);
    let mut again: BTreeMap<Action, usize> = BTreeMap::new();
    let sums = match schedule.reduction() {
        Reduction::Once => 1,
        Reduction::EachMicrobatch => schedule.microbatches().max(1),
    };
    for &action in actions {
        let free = matches!(action, Action::Gather { .. } | Action::Release { .. });
        if matches!(action, Action::ReduceGrads { .. }) && owed.contains(&action) {
            let times = again.entry(action).or_default();
            *times += 1;
            if *times < sums {
                continue;
            }
        }
        if !free && !owed.remove(&action) {
            return Err(Error::Foreign { stage, action });
        }
    }
    match owed.first() {
        Some(&action) => Err(Error::Absent { stage, action }),
        None => Ok(()),
    }
}

fn owed(schedule: &Schedule, stage: usize) -> BTreeSet<Action> {
    let mut owed = BTreeSet::new();
    if stage >= schedule.stages() {
        return owed;
    }
    for chunk in 0..schedule.chunks() {
        let segments = schedule.segments(stage, chunk);
        owed.extend((0..segments).map(|bucket| Action::ReduceGrads { chunk, bucket }));
        for mb in 0..schedule.microbatches() {
            owed.insert(Action::Forward { mb, chunk });
            for segment in 0..segments {
                owed.insert(Action::BackwardInput { mb, chunk, segment });
                owed.insert(Action::BackwardWeight { mb, chunk, segment });
            }
            if let Some(peer) = schedule.before(stage, chunk) {
                let (from, to) = (peer, peer);
                owed.insert(Action::RecvForward { mb, chunk, from });
                owed.insert(Action::SendBackward { mb, chunk, to });
            }
            if let Some(peer) = schedule.after(stage, chunk) {
                let (from, to) = (peer, peer);
                owed.insert(Action::SendForward { mb, chunk, to });
                owed.insert(Action::RecvBackward { mb, chunk, from });
            }
        }
    }
    owed
}

/// Each action comes after what it needs:
///
/// ```text
/// receive F -> F -> send F        W of a segment after its B
/// F, receive B -> B.0 -> B.1 -> ... -> send B
/// every W of a bucket -> its last reduction
/// every W of a later chunk of the stage -> the last reductions of an earlier one
/// F and B between a gather and a release
/// ```
///
/// A chunk that follows another on the same stage has no receive: its F needs the other's F, the
/// other's B.0 its last B. That reductions wait for later chunks lets the first and the last chunk
/// of the model share a table where they share a stage.
///
/// # Errors
/// [`Error::Early`], [`Error::Shared`], [`Error::Parameters`].
pub fn order(route: &Route, stage: usize, actions: &[Action]) -> Result<(), Error> {
    let mut place: BTreeMap<Action, usize> = BTreeMap::new();
    let mut last: BTreeMap<Action, usize> = BTreeMap::new();
    for (at, action) in actions.iter().enumerate() {
        place.entry(anonymous(*action)).or_insert(at);
        last.insert(*action, at);
    }
    let needs = Needs::of(route, stage, actions);
    for (at, &action) in actions.iter().enumerate() {
        let sum = matches!(action, Action::ReduceGrads { .. });
        if sum && last.get(&action) != Some(&at) {
            continue;
        }
        for need in needs.before(action) {
            // A receive that is nowhere is not owed: `complete` knows.
            let optional = matches!(
                need,
                Action::RecvForward { .. } | Action::RecvBackward { .. }
            );
            match place.get(&need) {
                Some(&then) if then < at => {}
                None if optional => {}
                _ => {
                    let needs = need;
                    return Err(Error::Early {
                        stage,
                        action,
                        needs,
                    });
                }
            }
        }
    }
    shared(stage, actions)?;
    parameters(stage, actions)
}

/// No last reduction of a chunk before the last weights of the chunks after it.
fn shared(stage: usize, actions: &[Action]) -> Result<(), Error> {
    for (at, &action) in actions.iter().enumerate() {
        let Action::ReduceGrads { chunk, .. } = action else {
            continue;
        };
        if actions[at + 1..].contains(&action) {
            continue;
        }
        let later = actions[at..]
            .iter()
            .find(|a| matches!(**a, Action::BackwardWeight { chunk: other, .. } if other > chunk));
        if let Some(&needs) = later {
            return Err(Error::Shared {
                stage,
                action,
                needs,
            });
        }
    }
    Ok(())
}

/// An action whatever its neighbour is.
fn anonymous(action: Action) -> Action {
    let (from, to) = (0, 0);
    match action {
        Action::RecvForward { mb, chunk, .. } => Action::RecvForward { mb, chunk, from },
        Action::SendForward { mb, chunk, .. } => Action::SendForward { mb, chunk, to },
        Action::RecvBackward { mb, chunk, .. } => Action::RecvBackward { mb, chunk, from },
        Action::SendBackward { mb, chunk, .. } => Action::SendBackward { mb, chunk, to },
        other => other,
    }
}

/// What the needs of a stage's actions depend on: its chunks' segments, who uses a bucket, and
/// which chunks of the stage follow each other.
struct Needs<'a> {
    route: &'a Route,
    stage: usize,
    segments: BTreeMap<usize, usize>,
    users: BTreeMap<(usize, usize), Vec<usize>>,
}

impl<'a> Needs<'a> {
    fn of(route: &'a Route, stage: usize, actions: &[Action]) -> Self {
        let mut segments: BTreeMap<usize, usize> = BTreeMap::new();
        let mut users: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
        for action in actions {
            match *action {
                Action::BackwardInput { chunk, segment, .. } => {
                    let count = segments.entry(chunk).or_default();
                    *count = (*count).max(segment + 1);
                }
                Action::BackwardWeight { mb, chunk, segment } => {
                    users.entry((chunk, segment)).or_default().push(mb);
                }
                _ => {}
            }
        }
        Self {
            route,
            stage,
            segments,
            users,
        }
    }

    /// The chunk of this stage that comes next before (or after) one, without a message.
    fn here(&self, neighbour: Option<(usize, usize)>) -> Option<usize> {
        let (stage, chunk) = neighbour?;
        (stage == self.stage).then_some(chunk)
    }

    fn last_input(&self, mb: usize, chunk: usize) -> Action {
        let segments = self.segments.get(&chunk).copied().unwrap_or(1);
        let segment = segments.saturating_sub(1);
        Action::BackwardInput { mb, chunk, segment }
    }

    fn before(&self, action: Action) -> Vec<Action> {
        let (from, mut needs) = (0, Vec::new());
        match action {
            Action::Gather { .. } | Action::Release { .. } | Action::RecvForward { .. } => {}
            Action::Forward { mb, chunk } => {
                let before = self.here(self.route.before(self.stage, chunk));
                needs.push(match before {
                    Some(chunk) => Action::Forward { mb, chunk },
                    None => Action::RecvForward { mb, chunk, from },
                });
            }
            Action::SendForward { mb, chunk, .. } | Action::RecvBackward { mb, chunk, .. } => {
                needs.push(Action::Forward { mb, chunk });
            }
            Action::BackwardInput { mb, chunk, segment } => match segment.checked_sub(1) {
                Some(segment) => needs.push(Action::BackwardInput { mb, chunk, segment }),
                None => {
                    let after = self.here(self.route.after(self.stage, chunk));
                    needs.push(Action::Forward { mb, chunk });
                    needs.push(match after {
                        Some(chunk) => self.last_input(mb, chunk),
                        None => Action::RecvBackward { mb, chunk, from },
                    });
                }
            },
            Action::BackwardWeight { mb, chunk, segment } => {
                needs.push(Action::BackwardInput { mb, chunk, segment });
            }
            Action::SendBackward { mb, chunk, .. } => {
                needs.push(self.last_input(mb, chunk));
            }
            Action::ReduceGrads { chunk, bucket } => {
                let users = self.users.get(&(chunk, bucket)).into_iter().flatten();
                needs.extend(users.map(|&mb| Action::BackwardWeight {
                    mb,
                    chunk,
                    segment: bucket,
                }));
            }
        }
        needs
    }
}

/// A reduction takes the gradients of all microbatches, or under [`Reduction::EachMicrobatch`] of
/// the one whose backward of these parameters came last.
///
/// # Errors
/// [`Error::Reduction`].
pub fn reductions(schedule: &Schedule, stage: usize, actions: &[Action]) -> Result<(), Error> {
    let all = schedule.microbatches();
    let expected = match schedule.reduction() {
        Reduction::Once => all,
        Reduction::EachMicrobatch => all.min(1),
    };
    let mut waiting: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for &action in actions {
        match action {
            Action::BackwardWeight { chunk, segment, .. } => {
                *waiting.entry((chunk, segment)).or_default() += 1;
            }
            Action::ReduceGrads { chunk, bucket } => {
                let got = waiting.remove(&(chunk, bucket)).unwrap_or(0);
                if got != expected {
                    return Err(Error::Reduction {
                        stage,
                        action,
                        expected,
                        got,
                    });
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn parameters(stage: usize, actions: &[Action]) -> Result<(), Error> {
    let mut gathered = BTreeSet::new();
    let mut last = None;
    for &action in actions {
        let (chunk, fine, found) = match action {
            Action::Gather { chunk } => (chunk, gathered.insert(chunk), "gathered already"),
            Action::Release { chunk } => (chunk, gathered.remove(&chunk), "not gathered"),
            Action::Forward { chunk, .. } | Action::BackwardInput { chunk, .. } => {
                (chunk, gathered.contains(&chunk), "not gathered")
            }
            _ => continue,
        };
        if !fine {
            return Err(Error::Parameters {
                stage,
                action,
                chunk,
                found,
            });
        }
        last = Some(action);
    }
    match (gathered.first(), last) {
        (Some(&chunk), Some(action)) => Err(Error::Parameters {
            stage,
            action,
            chunk,
            found: "never released",
        }),
        _ => Ok(()),
    }
}

/// Between each two stages, each way, the messages sent are those taken, in order: of which
/// microbatch, and across which boundary of the model.
///
/// # Errors
/// [`Error::Unmatched`].
pub fn messages(route: &Route, programs: &[Actions]) -> Result<(), Error> {
    let mut wires: BTreeMap<(usize, usize, Direction), [Vec<(usize, usize)>; 2]> = BTreeMap::new();
    for (stage, actions) in programs.iter().enumerate() {
        for m in actions.iter().filter_map(Action::message) {
            let (from, to) = if m.sends {
                (stage, m.peer)
            } else {
                (m.peer, stage)
            };
            let wire = wires.entry((from, to, m.direction)).or_default();
            // A boundary is named by the chunk behind it, whichever end speaks.
            let ahead = m.sends == (m.direction == Direction::Forward);
            let boundary = route.place(stage, m.chunk) + usize::from(ahead);
            wire[usize::from(!m.sends)].push((m.mb, boundary));
        }
    }
    for ((from, to, direction), [sends, takes]) in wires {
        for place in 0..sends.len().max(takes.len()) {
            let (sent, taken) = (sends.get(place).copied(), takes.get(place).copied());
            if sent != taken {
                return Err(Error::Unmatched {
                    from,
                    to,
                    direction,
                    place,
                    sent,
                    taken,
                });
            }
        }
    }
    Ok(())
}

/// Every stage comes to its end. A send is started and does not wait for its receive, but with
/// `room` it waits until fewer than that many messages are under way its way; a receive waits
/// for its message.
///
/// # Errors
/// [`Error::Deadlock`].
pub fn progress(programs: &[Actions], room: Option<usize>) -> Result<(), Error> {
    play(programs, room, 0.0, |_, _| 0.0).map(|_| ())
}

/// The most microbatches (of a chunk each) whose saved activations a stage holds at once: from
/// a forward until the last gradient of the parameters, so that what a weight pass still waits
/// with counts in full.
#[must_use]
pub fn held(actions: &[Action]) -> usize {
    let mut left: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for action in actions {
        if let Action::BackwardWeight { mb, chunk, .. } = *action {
            *left.entry((mb, chunk)).or_default() += 1;
        }
    }
    let (mut now, mut most) = (0usize, 0);
    for action in actions {
        match *action {
            Action::Forward { .. } => {
                now += 1;
                most = most.max(now);
            }
            Action::BackwardWeight { mb, chunk, .. } => {
                if let Some(count) = left.get_mut(&(mb, chunk)) {
                    *count -= 1;
                    now = now.saturating_sub(usize::from(*count == 0));
                }
            }
            _ => {}
        }
    }
    most
}

#[cfg(test)]
#[path = "laws_tests.rs"]
pub(crate) mod tests;
