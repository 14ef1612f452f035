//! The laws on every small schedule, and on schedules with one planted fault.

use alloc::string::ToString;
use alloc::vec;

use super::*;
use crate::pipeline::ScheduleKind;

const OFTEN: [Reduction; 2] = [Reduction::Once, Reduction::EachMicrobatch];

/// Both kinds over 1..=8 stages, 0..=17 microbatches, 1..=3 segments, reduced once and each time.
pub(crate) fn each(mut test: impl FnMut(&Schedule)) {
    for kind in ScheduleKind::ALL {
        for stages in 1..=8 {
            for microbatches in 0..=17 {
                for segments in 1..=3 {
                    let segments = vec![segments; stages];
                    let schedule = Schedule::new(kind, stages, microbatches, &segments).unwrap();
                    for reduction in OFTEN {
                        test(&schedule.clone().with_reduction(reduction));
                    }
                }
            }
        }
    }
}

fn small(kind: ScheduleKind) -> Schedule {
    Schedule::new(kind, 3, 4, &[2, 1, 3]).unwrap()
}

#[test]
fn every_schedule_obeys() {
    each(|schedule| {
        let programs = schedule.all();
        check_actions(schedule, &programs).unwrap();
        for room in [Some(2), Some(3), None] {
            progress(&programs, room).unwrap();
        }
    });
    for kind in ScheduleKind::ALL {
        check(&small(kind)).unwrap();
    }
}

#[test]
fn activations_held() {
    each(|schedule| {
        for stage in 0..schedule.stages() {
            let expected = match schedule.kind() {
                ScheduleKind::GPipe => schedule.microbatches(),
                ScheduleKind::OneFOneB => (schedule.stages() - stage).min(schedule.microbatches()),
            };
            assert_eq!(held(&schedule.actions(stage)), expected, "{schedule:?}");
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
    messages(&programs).unwrap();
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
