//! The protocol of [`super`] under loom, whole and with each ordering weakened.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64 as LoomWord, fence as loom_fence};
use loom::thread;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{boxed::Box, panic, string::String, vec::Vec};

use super::{Claim, ORDERS, Orders, Word};

impl Word for LoomWord {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
    fn exchange(&self, old: u64, new: u64, order: Ordering) -> Result<u64, u64> {
        self.compare_exchange(old, new, order, Ordering::Relaxed)
    }
    fn add(&self, more: u64, order: Ordering) -> u64 {
        self.fetch_add(more, order)
    }
    fn fence(order: Ordering) {
        loom_fence(order);
    }
}

/// What a rank does at one of its steps instead of going on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Works,
    /// It gives up before step k: withdraws and takes its memory back.
    GivesUp(usize),
    /// It never runs again from step k on; its memory stays as it is.
    Dies(usize),
}

struct Group {
    progress: Vec<LoomWord>,
    duties: Vec<LoomWord>,
    finished: LoomWord,
    /// Inputs by rank; outputs by rank and duty.
    ins: Vec<UnsafeCell<u64>>,
    outs: Vec<[UnsafeCell<u64>; 2]>,
}

// SAFETY: loom's cells see to it that nobody touches one that somebody else has.
#[allow(unsafe_code)]
unsafe impl Sync for Group {}
#[allow(unsafe_code)]
unsafe impl Send for Group {}

const RANKS: usize = 2;

fn group() -> Group {
    Group {
        progress: (0..RANKS).map(|_| LoomWord::new(0)).collect(),
        duties: (0..2).map(|_| LoomWord::new(0)).collect(),
        finished: LoomWord::new(0),
        ins: (0..RANKS).map(|_| UnsafeCell::new(0)).collect(),
        outs: (0..RANKS)
            .map(|_| [UnsafeCell::new(0), UnsafeCell::new(0)])
            .collect(),
    }
}

impl Group {
    /// One rank's call, as `End` and `Shared` make it.
    fn run(&self, o: Orders, me: usize, fate: Fate) {
        let stop = |step: usize| match fate {
            Fate::GivesUp(at) => at == step,
            Fate::Dies(at) => at == step,
            Fate::Works => false,
        };
        // My memory before anybody knows of it.
        self.ins[me].with_mut(|x| set(x, 10 + me as u64));
        self.clear(me, 0);
        if stop(0) {
            return;
        }
        o.publish(&self.progress[me], 1);
        if stop(1) {
            return self.end(o, me, fate);
        }
        // A bounded wait: who waits in vain gives up, as at a deadline.
        if !(0..RANKS).all(|r| self.waits(|| o.reached(&self.progress[r], 1))) {
            return self.withdraw(o, me);
        }
        if stop(2) {
            return self.end(o, me, fate);
        }
        let mut count = 0;
        for i in 0..self.duties.len() {
            let duty = (me + i) % self.duties.len();
            match o.claim(&self.duties[duty], 1, me) {
                Claim::Taken => {}
                Claim::Revoked => return self.withdraw(o, me),
                Claim::Mine => {
                    if fate == Fate::Dies(3) {
                        // Its memory and its claim stay for ever.
                        return;
                    }
                    let sum = (0..RANKS).map(|r| self.ins[r].with(get)).sum::<u64>();
                    for out in &self.outs {
                        out[duty].with_mut(|x| set(x, sum));
                    }
                    o.done(&self.duties[duty], 1, me);
                    count += 1;
                }
            }
            if stop(4) {
                return self.end(o, me, fate);
            }
        }
        o.finish(&self.finished, count);
        if stop(5) {
            return self.end(o, me, fate);
        }
        if !self.waits(|| o.finished(&self.finished, 2)) {
            return self.withdraw(o, me);
        }
        // Returned: the result is right and nobody else has the memory any more.
        for out in &self.outs[me] {
            assert_eq!(out.with(get), 21);
        }
        self.clear(me, 0);
        self.ins[me].with_mut(|x| set(x, 0));
    }

    fn end(&self, o: Orders, me: usize, fate: Fate) {
        if matches!(fate, Fate::GivesUp(_)) {
            self.withdraw(o, me);
        }
    }

    /// Revokes, waits for what is claimed, and only then uses the memory for something else.
    fn withdraw(&self, o: Orders, me: usize) {
        for duty in &self.duties {
            let free = || o.revoke(duty, 1).is_none_or(|rank| rank == me);
            if !self.waits(free) {
                // The claimer never runs again: this rank must not return, and does not.
                return;
            }
        }
        self.clear(me, 7);
        self.ins[me].with_mut(|x| set(x, 7));
    }

    /// Uses my output for something else.
    fn clear(&self, me: usize, value: u64) {
        for out in &self.outs[me] {
            out.with_mut(|x| set(x, value));
        }
    }

    fn waits(&self, ready: impl Fn() -> bool) -> bool {
        for _ in 0..2 {
            if ready() {
                return true;
            }
            thread::yield_now();
        }
        ready()
    }
}

#[allow(unsafe_code)]
fn set<T>(x: *mut T, value: T) {
    // SAFETY: loom hands out the pointer while it watches who else has it.
    unsafe { *x = value };
}
#[allow(unsafe_code)]
fn get(x: *const u64) -> u64 {
    // SAFETY: as in `set`.
    unsafe { *x }
}
fn check(o: Orders, fates: [Fate; RANKS]) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let shared = Arc::new(group());
        let other = shared.clone();
        let thread = thread::spawn(move || other.run(o, 1, fates[1]));
        shared.run(o, 0, fates[0]);
        thread.join().unwrap();
    });
}

fn fates() -> Vec<[Fate; RANKS]> {
    let mut all = Vec::from([[Fate::Works; RANKS]]);
    for step in 0..=5 {
        all.push([Fate::Works, Fate::GivesUp(step)]);
        all.push([Fate::Works, Fate::Dies(step)]);
        all.push([Fate::GivesUp(step), Fate::GivesUp(1)]);
    }
    all
}

/// The first fault loom finds in any of the fates, if there is one.
fn fault(o: Orders) -> Option<String> {
    // Loom panics where it finds something; what it prints on the way is of no interest here.
    static QUIET: AtomicBool = AtomicBool::new(false);
    if !QUIET.swap(true, Ordering::SeqCst) {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !std::thread::current()
                .name()
                .is_some_and(|name| name.contains("weakened"))
            {
                before(info);
            }
        }));
    }
    fates().into_iter().find_map(|fates| {
        let outcome = panic::catch_unwind(move || check(o, fates));
        outcome.err().map(|_| std::format!("{fates:?}"))
    })
}

#[test]
fn every_rank_may_give_up_or_die_at_every_step() {
    for fates in fates() {
        check(ORDERS, fates);
    }
}

#[test]
fn each_weakened_ordering_is_caught() {
    let weak = Ordering::Relaxed;
    let cases: [(&str, Orders); 6] = [
        (
            "publish",
            Orders {
                publish: weak,
                ..ORDERS
            },
        ),
        (
            "reached",
            Orders {
                reached: weak,
                ..ORDERS
            },
        ),
        (
            "done",
            Orders {
                done: weak,
                ..ORDERS
            },
        ),
        (
            "held",
            Orders {
                held: weak,
                ..ORDERS
            },
        ),
        (
            "finish",
            Orders {
                finish: weak,
                ..ORDERS
            },
        ),
        (
            "finished",
            Orders {
                finished: weak,
                ..ORDERS
            },
        ),
    ];
    for (name, orders) in cases {
        assert!(fault(orders).is_some(), "{name} may be weaker than it is");
    }
}

/// A sleeper and the one who is to wake it: loom reports a deadlock where the call is missed.
fn nap(o: Orders) {
    loom::model(move || {
        let words = Arc::new((
            LoomWord::new(0),
            LoomWord::new(0),
            loom::sync::Notify::new(),
        ));
        let waker = words.clone();
        let thread = thread::spawn(move || {
            let (progress, sleeping, bell) = &*waker;
            o.publish(progress, 1);
            // A short call is performed before anybody is woken.
            let _ = o.reached(progress, 1);
            o.rouse::<LoomWord>();
            if o.sleeps(sleeping) != 0 {
                bell.notify();
            }
        });
        let (progress, sleeping, bell) = &*words;
        o.sleep(sleeping, 1);
        if !o.reached(progress, 1) {
            bell.wait();
        }
        thread.join().unwrap();
    });
}

#[test]
fn nobody_sleeps_through_it() {
    nap(ORDERS);
}

#[test]
fn each_missing_fence_is_a_weakened_sleep() {
    for orders in [
        Orders {
            sleep: None,
            ..ORDERS
        },
        Orders {
            rouse: None,
            ..ORDERS
        },
    ] {
        assert!(panic::catch_unwind(move || nap(orders)).is_err());
    }
}

/// A rank that shows its memory, and may use it for something else at once; and one that reads it.
fn reading(o: Orders) {
    loom::model(move || {
        let words = Arc::new((LoomWord::new(0), LoomWord::new(0), LoomWord::new(0)));
        let owner = words.clone();
        let thread = thread::spawn(move || {
            let (memory, open, progress) = &*owner;
            memory.store(21, Ordering::Relaxed);
            open.store(1, Ordering::Relaxed);
            o.publish(progress, 1);
            o.close(open);
            memory.store(7, Ordering::Relaxed);
        });
        let (memory, open, progress) = &*words;
        if o.reached(progress, 1) {
            let read = memory.load(Ordering::Relaxed);
            o.read::<LoomWord>();
            assert!(!o.open(open, 0) || read == 21);
        }
        thread.join().unwrap();
    });
}

#[test]
fn what_was_read_of_who_gave_up_is_not_taken() {
    reading(ORDERS);
}

#[test]
fn each_missing_fence_is_a_weakened_reading() {
    let weak = [
        Orders {
            close: None,
            ..ORDERS
        },
        Orders {
            read: None,
            ..ORDERS
        },
    ];
    for orders in weak {
        assert!(panic::catch_unwind(move || reading(orders)).is_err());
    }
}
