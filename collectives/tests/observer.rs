//! Who observes a communicator hears of every operation once, with the bytes that the counters have.
#![cfg(feature = "std")]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use quintet_collectives::{Observed, Observer, ProcessGroup, ReduceOp, World};

/// (group, op, started, ok) and the rest of what was told, in order.
#[derive(Default)]
struct Heard(Mutex<Vec<Told>>);

#[derive(Debug, Clone)]
struct Told {
    group: String,
    op: &'static str,
    number: u64,
    peer: Option<usize>,
    bytes: u64,
    started: bool,
    ok: bool,
}

impl Observer for Heard {
    fn over(&self, o: &Observed<'_>) {
        assert!(o.began <= o.ended && o.world > 1);
        self.0.lock().unwrap().push(Told {
            group: o.group.into(),
            op: o.op,
            number: o.number,
            peer: o.peer,
            bytes: o.bytes,
            started: o.started,
            ok: o.error.is_none(),
        });
    }
}

#[test]
fn every_operation_is_told_once_with_its_bytes() {
    World::run(4, |comm| {
        let heard = Arc::new(Heard::default());
        let comm = comm.with_observer(heard.clone());
        let rank = comm.rank();
        let pair = ProcessGroup::new(vec![rank % 2, rank % 2 + 2], rank)?;
        let pair = comm.subgroup(&pair, "pairs")?;
        let mut x = vec![1.0f32; 10];
        comm.all_reduce(&mut x, ReduceOp::Sum)?;
        // Started beside messages of the same group, so that their polls take turns.
        let sum = comm.start_all_reduce(vec![1.0f64; 6], ReduceOp::Sum, ())?;
        let (next, before) = ((rank + 1) % 4, (rank + 3) % 4);
        let sent = comm.start_send::<u8, _>(vec![7; 5 + rank], next, 9, ())?;
        let got = comm
            .start_recv::<u8, _>(vec![0; 5 + before], before, 9, ())?
            .wait()?;
        assert_eq!(got, vec![7; 5 + before]);
        sent.wait()?;
        assert_eq!(sum.wait()?, [4.0; 6]);
        let other = (rank + 2) % 4;
        let mut back = [0u8; 3];
        pair.sendrecv(&[1u8; 3], other / 2, &mut back, other / 2, 1)?;
        let told = heard.0.lock().unwrap().clone();
        let of = |op: &str| -> Vec<&Told> { told.iter().filter(|t| t.op == op).collect() };
        assert_eq!(told.len(), 5, "{told:?}");
        assert!(told.iter().all(|t| t.ok));
        let sums = of("all_reduce");
        assert_eq!(
            sums.iter()
                .map(|t| (t.number, t.started))
                .collect::<Vec<_>>(),
            [(0, false), (1, true)]
        );
        let send = of("send")[0];
        assert_eq!(
            (send.peer, send.number, send.bytes, send.started),
            (Some(next), 9, 5 + rank as u64, true)
        );
        let recv = of("recv")[0];
        assert_eq!((recv.peer, recv.number, recv.bytes), (Some(before), 9, 0));
        let both = of("sendrecv")[0];
        assert_eq!(
            (both.group.as_str(), both.peer, both.bytes),
            ("pairs", Some(other), 3)
        );
        // What was told, what went to each, and what was counted are the same bytes.
        for (comm, name) in [(&comm, comm.name()), (&pair, "pairs")] {
            let bytes: u64 = told
                .iter()
                .filter(|t| t.group == name)
                .map(|t| t.bytes)
                .sum();
            let by_receiver: BTreeMap<usize, u64> = comm.sent_to();
            assert_eq!(bytes, comm.stats().bytes);
            assert_eq!(by_receiver.values().sum::<u64>(), bytes);
            assert!(by_receiver.keys().all(|to| *to != rank && *to < 4));
        }
        assert_eq!(pair.sent_to(), [(other, 3)].into());
        comm.barrier()
    })
    .unwrap();
}

/// An operation that fails is told of as such; what is not observed goes on as before.
#[test]
fn a_failure_is_told_as_one() {
    let heard = Arc::new(Heard::default());
    let seen = heard.clone();
    let outcome = World::run(2, move |comm| {
        let comm = comm.with_observer(seen.clone());
        if comm.rank() == 1 {
            comm.abort();
        }
        comm.all_reduce(&mut [0.0f32; 4], ReduceOp::Sum)
    });
    assert!(outcome.is_err());
    let told = heard.0.lock().unwrap();
    assert!(!told.is_empty() && told.iter().all(|t| !t.ok), "{told:?}");
}
