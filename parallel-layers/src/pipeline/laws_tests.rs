//! The laws on every small schedule, and on schedules with one planted fault.

use alloc::string::ToString;
use alloc::vec;

use super::*;
use crate::pipeline::ScheduleKind;

const OFTEN: [Reduction; 2] = [Reduction::Once, Reduction::EachMicrobatch];

/// Every kind over 1..=6 stages, 0..=12 microbatches (24 where it takes multiples), 1..=3
/// segments, 2..=4 chunks where that is free, reduced once and each time; what a kind refuses is
/// left out.
pub(crate) fn each(mut test: impl FnMut(&Schedule)) {
    for kind in ScheduleKind::ALL {
        for stages in 1..=6 {
            for chunks in kind.chunks().map_or(2..=4, |n| n..=n) {
                for microbatches in 0..=24 {
                    for segments in 1..=3 {
                        let free = kind.chunks().is_none();
                        if (microbatches > 12 && !free) || (segments > 2 && microbatches > 7) {
                            continue;
                        }
                        let segments = vec![segments; stages * chunks];
                        if let Ok(schedule) = Schedule::new(kind, stages, microbatches, &segments) {
                            let reduction = OFTEN[(stages + microbatches) % 2];
                            test(&schedule.with_reduction(reduction));
                        }
                    }
                }
            }
        }
    }
}

/// What [`each`] leaves out is what the kinds refuse, and no more.
#[test]
fn each_leaves_little_out() {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    each(|schedule| *counts.entry(schedule.kind().name()).or_default() += 1);
    let whole = 6 * (13 * 2 + 8);
    // Multiples of the stages up to 24, in three numbers of chunks.
    let multiples: usize = (1..=6).map(|p| 2 * (24 / p + 1) + 7 / p + 1).sum();
    // From twice the stages, and none.
    let twice: usize = (2..=6)
        .map(|p| 2 * (14 - 2 * p) + 8usize.saturating_sub(2 * p) + 1)
        .sum();
    let expected = [
        ("1f1b", whole),
        ("dualpipe-v", twice),
        ("gpipe", whole),
        ("interleaved", 3 * multiples),
        ("zb-h1", whole),
    ];
    assert_eq!(counts, BTreeMap::from(expected));
}

fn small(kind: ScheduleKind) -> Schedule {
    let segments = [2, 1, 3, 1, 2, 2];
    let chunks = kind.chunks().unwrap_or(2);
    Schedule::new(kind, 3, 6, &segments[..3 * chunks]).unwrap()
}

#[test]
fn every_schedule_obeys() {
    each(|schedule| {
        let programs = schedule.all();
        check_actions(schedule, &programs).unwrap_or_else(|e| panic!("{e}\n{schedule:?}"));
        for room in [Some(2), Some(3), None] {
            progress(&programs, room).unwrap();
        }
    });
    for kind in ScheduleKind::ALL {
        check(&small(kind)).unwrap();
    }
}

/// The column "held" of the table in [`pipeline`](crate::pipeline).
#[test]
fn activations_held() {
    each(|schedule| {
        let (p, v) = (schedule.stages(), schedule.chunks());
        let m = schedule.microbatches();
        for s in 0..p {
            let expected = match schedule.kind() {
                ScheduleKind::GPipe => m,
                ScheduleKind::OneFOneB => m.min(p - s),
                ScheduleKind::Interleaved => (m * v).min((v - 1) * p + 2 * (p - 1 - s) + 1),
                ScheduleKind::ZbH1 => m.min(p),
                ScheduleKind::DualPipeV => (m * 2).min(2 * p + 1),
            };
            assert_eq!(held(&schedule.actions(s)), expected, "{schedule:?}");
        }
    });
}

/// Where backward is in two, the gradient leaves before any weight of its microbatch is touched.
#[test]
fn gradients_leave_before_weights() {
    each(|schedule| {
        for stage in 0..schedule.stages() {
            let actions = schedule.actions(stage);
            let mut weighed = BTreeSet::new();
            let mut early = 0;
            for action in &actions {
                match *action {
                    Action::BackwardWeight { mb, chunk, .. } => {
                        weighed.insert((mb, chunk));
                    }
                    Action::SendBackward { mb, chunk, .. } => {
                        early += usize::from(!weighed.contains(&(mb, chunk)));
                    }
                    _ => {}
                }
            }
            let sends = |a: &&Action| matches!(a, Action::SendBackward { .. });
            let sends = actions.iter().filter(sends).count();
            match schedule.kind() {
                ScheduleKind::ZbH1 => assert_eq!(early, sends, "{schedule:?}"),
                // The two ends, of which stage 0 does not send chunk 0's.
                ScheduleKind::DualPipeV if schedule.microbatches() > 0 => {
                    let behind = schedule.stages() - 1 - stage;
                    let ends = if stage > 0 { 2 } else { 1 };
                    assert!(early >= ends * behind, "{early} {schedule:?}");
                }
                _ => {}
            }
        }
    });
}

/// Each chunk takes its microbatches in order, all three ways: sums have one order everywhere.
#[test]
fn microbatches_keep_their_order() {
    each(|schedule| {
        for stage in 0..schedule.stages() {
            let mut next: BTreeMap<(char, usize, usize), usize> = BTreeMap::new();
            for action in schedule.actions(stage) {
                let (key, mb) = match action {
                    Action::Forward { mb, chunk } => (('F', chunk, 0), mb),
                    Action::BackwardInput { mb, chunk, segment } => (('B', chunk, segment), mb),
                    Action::BackwardWeight { mb, chunk, segment } => (('W', chunk, segment), mb),
                    _ => continue,
                };
                let next = next.entry(key).or_default();
                assert_eq!(*next, mb, "{schedule:?}");
                *next += 1;
            }
        }
    });
}

/// An evaluation over any number of microbatches has no deadlock either.
#[test]
fn forward_alone_comes_to_its_end() {
    each(|schedule| {
        for microbatches in [0, 1, 5, 7] {
            let all = 0..schedule.stages();
            let programs: Vec<_> = all
                .map(|s| schedule.forward_only(s, microbatches))
                .collect();
            messages(schedule.route(), &programs).unwrap();
            progress(&programs, Some(1)).unwrap_or_else(|e| panic!("{e} {schedule:?}"));
            for actions in &programs {
                let forwards = |a: &&Action| matches!(a, Action::Forward { .. });
                let count = actions.iter().filter(forwards).count();
                assert_eq!(count, microbatches * schedule.chunks());
            }
        }
    });
}

#[test]
fn an_action_left_out_is_found() {
    for (kind, reduction) in ScheduleKind::ALL
        .into_iter()
        .flat_map(|k| OFTEN.map(|r| (k, r)))
    {
        let schedule = small(kind).with_reduction(reduction);
        let whole = schedule.all();
        for stage in 0..whole.len() {
            for at in 0..whole[stage].len() {
                let mut programs = whole.clone();
                let action = programs[stage].remove(at);
                assert!(check_actions(&schedule, &programs).is_err(), "{action}");
            }
        }
    }
}

#[test]
fn an_action_done_twice_is_found() {
    for (kind, reduction) in ScheduleKind::ALL
        .into_iter()
        .flat_map(|k| OFTEN.map(|r| (k, r)))
    {
        let schedule = small(kind).with_reduction(reduction);
        let whole = schedule.all();
        for stage in 0..whole.len() {
            for at in 0..whole[stage].len() {
                let mut programs = whole.clone();
                let action = programs[stage][at];
                programs[stage].insert(at, action);
                assert!(check_actions(&schedule, &programs).is_err(), "{action}");
            }
        }
    }
}

/// The reduction of a microbatch that comes after the backward of the next takes two at once.
#[test]
fn a_microbatch_that_is_reduced_with_the_next_is_found() {
    let schedule = small(ScheduleKind::OneFOneB).with_reduction(Reduction::EachMicrobatch);
    let mut programs = schedule.all();
    let sum = |a: &Action| matches!(a, Action::ReduceGrads { bucket: 0, .. });
    let first = programs[0].iter().position(sum).unwrap();
    let action = programs[0].remove(first);
    let next = programs[0].iter().position(sum).unwrap();
    programs[0].insert(next, action);
    let error = check_actions(&schedule, &programs).unwrap_err();
    assert_eq!(
        error.to_string(),
        "stage 0: reduce 0 takes the gradients of 2 microbatches, not 1"
    );
}

/// Moves one action of stage 1 to just before another and names the law it breaks.
fn moved(action: Action, before: Action) -> Error {
    let schedule = small(ScheduleKind::OneFOneB);
    let mut programs = schedule.all();
    let at = programs[1].iter().position(|a| *a == action).unwrap();
    programs[1].remove(at);
    let to = programs[1].iter().position(|a| *a == before).unwrap();
    programs[1].insert(to, action);
    check_actions(&schedule, &programs).unwrap_err()
}

#[test]
fn an_action_out_of_place_is_found() {
    let (chunk, segment) = (0, 0);
    let forward = Action::Forward { mb: 1, chunk };
    let recv = Action::RecvForward {
        mb: 1,
        chunk,
        from: 0,
    };
    let send = Action::SendForward {
        mb: 1,
        chunk,
        to: 2,
    };
    let input = Action::BackwardInput {
        mb: 1,
        chunk,
        segment,
    };
    let weight = Action::BackwardWeight {
        mb: 1,
        chunk,
        segment,
    };
    let taken = Action::RecvBackward {
        mb: 1,
        chunk,
        from: 2,
    };
    let given = Action::SendBackward {
        mb: 1,
        chunk,
        to: 0,
    };
    let reduce = Action::ReduceGrads { chunk, bucket: 0 };
    let last = Action::BackwardWeight {
        mb: 3,
        chunk,
        segment,
    };
    for (action, before) in [
        (forward, recv),
        (send, forward),
        (input, taken),
        (weight, input),
        (given, input),
        (reduce, last),
    ] {
        let error = moved(action, before);
        assert!(matches!(error, Error::Early { .. }), "{action}: {error}");
    }
    // Sent in order, taken out of order.
    let later = Action::RecvForward {
        mb: 2,
        chunk,
        from: 0,
    };
    let early = Action::RecvForward {
        mb: 3,
        chunk,
        from: 0,
    };
    assert!(matches!(moved(early, later), Error::Unmatched { .. }));
    let gather = Action::Gather { chunk };
    let error = moved(gather, forward);
    assert!(matches!(error, Error::Parameters { .. }), "{error}");
}

#[test]
fn a_cycle_of_receives_is_a_deadlock() {
    let (mb, chunk) = (0, 0);
    let waits = |peer: usize| {
        vec![
            Action::RecvForward {
                mb,
                chunk,
                from: peer,
            },
            Action::SendForward {
                mb,
                chunk,
                to: peer,
            },
        ]
    };
    let programs = [waits(1), waits(0)];
    let action = Action::RecvForward { mb, chunk, from: 1 };
    assert_eq!(
        progress(&programs, None),
        Err(Error::Deadlock { stage: 0, action })
    );
}

/// Two sends that wait for each other's room.
#[test]
fn too_little_room_is_a_deadlock() {
    let chunk = 0;
    let talks = |peer: usize| {
        vec![
            Action::SendForward {
                mb: 0,
                chunk,
                to: peer,
            },
            Action::SendForward {
                mb: 1,
                chunk,
                to: peer,
            },
            Action::RecvForward {
                mb: 0,
                chunk,
                from: peer,
            },
            Action::RecvForward {
                mb: 1,
                chunk,
                from: peer,
            },
        ]
    };
    let programs = [talks(1), talks(0)];
    assert!(matches!(
        progress(&programs, Some(1)),
        Err(Error::Deadlock { .. })
    ));
    progress(&programs, Some(2)).unwrap();
    progress(&programs, None).unwrap();
}

/// Two messages of one wire change places: sent in one order, taken in the other.
#[test]
fn a_swapped_pair_of_sends_is_found() {
    for kind in ScheduleKind::ALL {
        let schedule = small(kind);
        let whole = schedule.all();
        let mut pairs = 0;
        for stage in 0..whole.len() {
            for sends in [true, false] {
                let ends = |(at, action): (usize, &Action)| {
                    let message = action.message().filter(|m| m.sends == sends)?;
                    Some((at, (message.peer, message.direction)))
                };
                let ends: Vec<_> = whole[stage].iter().enumerate().filter_map(ends).collect();
                for (first, lane) in &ends {
                    let next = ends.iter().find(|(at, other)| at > first && other == lane);
                    let Some((second, _)) = next else { continue };
                    let mut programs = whole.clone();
                    programs[stage].swap(*first, *second);
                    assert!(messages(schedule.route(), &programs).is_err(), "{kind}");
                    pairs += 1;
                }
            }
        }
        assert!(pairs > 20, "{kind}: {pairs}");
    }
}

/// The gradients of an earlier chunk that are reduced too soon for a table shared with a later one.
#[test]
fn a_reduction_before_a_later_chunks_weights_is_found() {
    for kind in [ScheduleKind::Interleaved, ScheduleKind::DualPipeV] {
        let schedule = small(kind);
        let mut actions = schedule.actions(0);
        let bucket = schedule.segments(0, 0) - 1;
        let reduce = Action::ReduceGrads { chunk: 0, bucket };
        let at = actions.iter().position(|a| *a == reduce).unwrap();
        actions.remove(at);
        let weight = |a: &Action| matches!(a, Action::BackwardWeight { chunk: 1, .. });
        let last = actions.iter().rposition(weight).unwrap();
        actions.insert(last, reduce);
        assert!(order(schedule.route(), 0, &actions).is_err());
        assert!(matches!(shared(0, &actions), Err(Error::Shared { .. })));
    }
}
