//! What the flight recorder says of runs that do not go on.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use quintet_collectives::recorder::{self, Absent, Blame, Ring, Standing, State, merge};
use quintet_collectives::{Communicator, Local, Recorder, ReduceOp, Result, World};

/// Runs `body` on every rank with a short deadline; what the records say afterwards, whatever happened.
fn standing(world: usize, body: impl Fn(&Communicator<Local>) -> Result<()> + Sync) -> Standing {
    let rings: Mutex<Vec<Ring>> = Mutex::default();
    let _ = World::run(world, |comm| {
        let recorder = Arc::new(Recorder::new(comm.rank(), recorder::SLOTS));
        let deadline = Duration::from_millis(300);
        let outcome = body(&comm.with_deadline(deadline).with_recorder(&recorder));
        rings.lock().unwrap().push(recorder.ring());
        outcome
    });
    merge(&rings.into_inner().unwrap())
}

#[test]
fn all_is_well() {
    let found = standing(4, |comm| {
        let half = comm.split((comm.rank() / 2) as i64, 0)?;
        for len in [0, 1, 1000] {
            comm.all_reduce(&mut vec![1f32; len], ReduceOp::Sum)?;
            half.all_reduce(&mut vec![1f64; len], ReduceOp::Max)?;
        }
        let (to, from) = ((comm.rank() + 1) % 4, (comm.rank() + 3) % 4);
        comm.sendrecv(&[1u8], to, &mut [0u8], from, 5)?;
        let started = comm.start_all_reduce::<f32, _>(vec![2.0], ReduceOp::Sum, ())?;
        started.wait().map(drop)
    });
    assert_eq!(found.ranks, [0, 1, 2, 3]);
    assert_eq!(found.blames, []);
}

#[test]
fn a_rank_that_does_not_call_is_named_with_its_last_call() {
    let found = standing(5, |comm| {
        comm.barrier()?;
        if comm.rank() != 3 {
            comm.all_reduce(&mut [0f32; 7], ReduceOp::Sum)?;
        }
        std::thread::sleep(Duration::from_millis(600));
        Ok(())
    });
    let Blame::Absent {
        call,
        waiting,
        absent,
        ..
    } = &found.blames[0]
    else {
        panic!("{found}");
    };
    assert_eq!(
        (call.op.as_str(), call.len, call.sequence),
        ("all_reduce", 7, Some(1))
    );
    assert!(call.site.contains("tests/recorder.rs:"), "{}", call.site);
    assert_eq!(waiting, &[0, 1, 2, 4]);
    let [Absent::Idle(3, Some(last))] = &absent[..] else {
        panic!("{found}");
    };
    assert_eq!((last.op.as_str(), last.state), ("barrier", State::Done));
    let text = found.to_string();
    assert!(
        text.contains("rank 3 is in no call; its last, barrier"),
        "{text}"
    );
}

#[test]
fn the_cause_stands_before_what_follows_from_it() {
    // 0 and 1 wait in world for 2 and 3, which wait in their half for nothing but each other: 3 never comes.
    let found = standing(4, |comm| {
        let half = comm.split((comm.rank() / 2) as i64, 0)?;
        match comm.rank() {
            3 => std::thread::sleep(Duration::from_millis(700)),
            2 => half.all_reduce(&mut [0f32; 2], ReduceOp::Sum)?,
            _ => comm.all_reduce(&mut [0f32; 9], ReduceOp::Sum)?,
        }
        Ok(())
    });
    let blamed: Vec<usize> = found
        .blames
        .iter()
        .filter_map(|blame| match blame {
            Blame::Absent { absent, .. } => absent.iter().find_map(|a| match a {
                Absent::Idle(rank, _) => Some(*rank),
                _ => None,
            }),
            _ => None,
        })
        .collect();
    assert!(
        !blamed.is_empty() && blamed.iter().all(|rank| *rank == 3),
        "{found}"
    );
}

#[test]
fn calls_that_differ_are_shown_side_by_side() {
    let found = standing(3, |comm| {
        let len = 4 + usize::from(comm.rank() == 2);
        comm.all_reduce(&mut vec![0f32; len], ReduceOp::Sum)
    });
    let Blame::Differs {
        sequence, calls, ..
    } = &found.blames[0]
    else {
        panic!("{found}");
    };
    assert_eq!(*sequence, 0);
    let lens: Vec<usize> = calls.iter().map(|(_, call)| call.len).collect();
    assert!(lens.contains(&4) && lens.contains(&5), "{found}");
}

#[test]
fn a_message_that_nobody_sends_is_named_with_its_site() {
    let found = standing(2, |comm| match comm.rank() {
        0 => comm.recv(&mut [0u8; 3], 1, 8),
        _ => Ok(()),
    });
    let Blame::Message {
        rank: 0,
        call,
        other,
        ..
    } = &found.blames[0]
    else {
        panic!("{found}");
    };
    assert_eq!((call.peer, call.len), (Some((1, 8)), 3));
    assert!(call.site.contains("tests/recorder.rs:"), "{}", call.site);
    assert_eq!(other, &Absent::Idle(1, None));
}

#[test]
fn a_rank_without_a_record_is_said_to_have_none() {
    let rings: Mutex<Vec<Ring>> = Mutex::default();
    let _ = World::run(3, |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500));
            return Ok(());
        }
        let recorder = Arc::new(Recorder::new(comm.rank(), 8));
        let comm = comm
            .with_deadline(Duration::from_millis(200))
            .with_recorder(&recorder);
        let outcome = comm.barrier();
        rings.lock().unwrap().push(recorder.ring());
        outcome
    });
    let found = merge(&rings.into_inner().unwrap());
    assert!(
        found.to_string().contains("rank 1 has left no record"),
        "{found}"
    );
}

#[test]
fn started_operations_wait_for_their_gate_in_the_record() {
    let rings = World::run(1, |comm| {
        let recorder = Arc::new(Recorder::new(0, 8));
        let comm = comm.with_recorder(&recorder);
        let (open, gate) = std::sync::mpsc::channel::<()>();
        struct Wait(std::sync::mpsc::Receiver<()>);
        impl quintet_collectives::Gate for Wait {
            fn wait(&mut self, timeout: Duration) -> Result<bool> {
                Ok(self.0.recv_timeout(timeout).is_ok())
            }
        }
        let started = comm.start_all_reduce::<f32, _>(vec![2.0], ReduceOp::Sum, Wait(gate))?;
        assert_eq!(recorder.ring().entries[0].state, State::Queued);
        open.send(()).unwrap();
        started.wait()?;
        Ok(recorder.ring())
    })
    .unwrap();
    let entry = &rings[0].entries[0];
    assert_eq!(entry.state, State::Done);
    assert!(entry.at.iter().all(Option::is_some) && entry.at.is_sorted());
}
