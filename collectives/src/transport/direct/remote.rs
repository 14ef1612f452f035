//! Slices of processes that can read each other's memory, though they share none of it: what is only copied.
//!
//! ```text
//! read what is for me out of the others' inputs | is it what they showed? | publish, and whether all could be read
//!                                                                         | ... all there? all read? else by stages
//! ```
//!
//! Each byte is copied once on its way, instead of into a stage and out of it. A rank may give up at any moment and use
//! its memory for something else: it says so first (`close`), and who has read from it looks at that last (`open`), before
//! anybody can be done. Nobody writes to another's memory, so there is nothing to wait for.
//!
//! Some memory cannot be read so (a device's, for one), though other memory of its process can. Who finds that says it with
//! its step, and all ranks do this call, and those that follow it in the group, by stages.
//!
//! Folds go by stages: what they exchange was just written, and to move it from one core's cache to another's costs the
//! same by either way.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::{
    Aim, End, Reach,
    claim::ORDERS,
    duty::{Duties, Duty},
    raw::{self, Target},
    work::Memory,
};
use crate::{
    Element,
    plan::{CollectiveShape as S, Plan},
};

/// Bytes that a rank moves before it looks whether the group is still well.
const STRIDE: usize = 4 << 20;

/// Bytes of a rank's part that are worth a call of the kernel.
const PART: usize = 4 << 10;

/// The lengths of a whole that go this way. Below, the kernel's call costs more than it saves; above, its copy is slower
/// than one that reads ahead and writes past the caches, and where all that is long goes one way (a
/// root's) it has one core do what stages let two do at a time.
const FROM: usize = 32 << 10;
const TO: usize = 16 << 20;
const ROOTED_TO: usize = 512 << 10;

/// How far a call has got.
#[derive(Debug)]
pub(super) struct Remote {
    sequence: u64,
    /// Duties of mine that are done.
    done: usize,
    published: bool,
}

/// What came of going on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Went {
    /// To the end.
    Over,
    /// Not that far yet.
    On,
    /// A rank has given up, or is gone; the cause is on its way.
    Astray,
    /// Somebody's memory cannot be read, as all ranks know now.
    Unreadable,
}

impl Remote {
    /// Where all ranks can read each other's memory, and it pays.
    pub(super) fn new(plan: &Plan, width: usize, sequence: u64, end: &End) -> Option<Self> {
        let can = |rank| end.arena.post(rank, sequence).input_at != 0;
        (end.remote && pays(plan, width) && (0..plan.world()).all(can)).then_some(Self {
            sequence,
            done: 0,
            published: false,
        })
    }

    /// Goes as far as it can.
    ///
    /// # Safety
    /// The memory is mine until this is over.
    pub(super) unsafe fn poll<E: Element>(
        &mut self,
        (plan, memory): (&Plan, Memory),
        end: &mut End,
    ) -> Went {
        let n = plan.world();
        if !self.published {
            let Some(duties) = Duties::of(plan, size_of::<E>(), STRIDE, usize::MAX) else {
                return astray(end);
            };
            let mine = duties.mine(end.me);
            // Each begins with what is its own, so that not all read the same rank's memory at once.
            let first = if mine.len().is_multiple_of(n) {
                end.me * mine.len() / n
            } else {
                0
            };
            let past = raw::goes_past(memory.output_bytes, n);
            let own = if past { Target::Memory } else { Target::Caches };
            let (mut moved, mut all) = (0, true);
            while all && self.done < mine.len() {
                if moved >= STRIDE {
                    return Went::On;
                }
                let duty = duties.get(mine.start + (first + self.done) % mine.len());
                // SAFETY: the caller's word.
                match unsafe { self.copy::<E>(duty, (memory, own), end) } {
                    Some(bytes) => moved += bytes,
                    None => all = false,
                }
                self.done += 1;
            }
            ORDERS.read::<AtomicU64>();
            let open = |rank| ORDERS.open(end.arena.open(rank, self.sequence), self.sequence);
            if !(0..n).all(open) {
                return astray(end);
            }
            let word = if all { self.sequence + 1 } else { 0 };
            end.arena
                .read_all(end.me, self.sequence)
                .store(word, Ordering::Relaxed);
            end.publish();
            self.published = true;
        }
        if !end.glance() {
            return Went::On;
        }
        let read = |rank| {
            end.arena
                .read_all(rank, self.sequence)
                .load(Ordering::Relaxed)
        };
        if (0..n).all(|rank| read(rank) == self.sequence + 1) {
            return Went::Over;
        }
        end.remote = false;
        Went::Unreadable
    }

    /// Makes a part of my output, `own` saying how what is mine is written; its bytes, or none where they cannot be had.
    unsafe fn copy<E: Element>(
        &self,
        duty: Duty,
        (memory, own): (Memory, Target),
        end: &End,
    ) -> Option<usize> {
        let Duty::Copy {
            source,
            from,
            at,
            len,
            ..
        } = duty
        else {
            return None;
        };
        let (width, bytes) = (size_of::<E>(), len * size_of::<E>());
        // SAFETY: in my output, as the plan has it.
        let to = unsafe { memory.output.add(at * width) };
        if source == end.me {
            // SAFETY: my own memory; it lies apart where it is not the same.
            unsafe {
                let from = memory.input.add(from * width);
                if !core::ptr::eq(from, to) {
                    raw::copy_into(own, from, to, bytes);
                }
            }
        } else if bytes > 0 {
            let Reach::Segments(segments) = &end.reach else {
                return None;
            };
            let start = end.arena.post(source, self.sequence).input_at + (from * width) as u64;
            // SAFETY: my output.
            let whole = unsafe { segments.read(source, start, to, bytes) };
            return whole.then_some(bytes);
        }
        Some(bytes)
    }
}

fn astray(end: &mut End) -> Went {
    end.aim = Aim::Nothing;
    Went::Astray
}

/// Reads a byte of each page of my input: if the page has to come from a disk, I wait for that and not those who read it.
///
/// # Safety
/// `input` is readable for `bytes`.
pub(super) unsafe fn present(input: *const u8, bytes: usize) {
    for at in (0..bytes).step_by(4096) {
        // SAFETY: within the input.
        unsafe { input.add(at).read_volatile() };
    }
}

/// Whether calls of this plan are to go this way where it is open.
pub(super) fn pays(plan: &Plan, width: usize) -> bool {
    let to = match plan.shape() {
        S::AllGather { .. } | S::AllToAll { .. } => TO,
        S::Broadcast { .. } | S::Gather { .. } | S::Scatter { .. } => ROOTED_TO,
        _ => return false,
    };
    let (n, whole) = (
        plan.world(),
        plan.shape().len(plan.world()).saturating_mul(width),
    );
    (FROM..=to).contains(&whole) && whole / n >= PART
}

#[cfg(test)]
mod tests {
    use super::super::{Arena, Bell, Outline, Segments, Task};
    use super::*;
    use crate::{DType, Order, ReduceOp, plan::Algorithm, transport::Call};
    use core::ptr::NonNull;
    use std::{
        sync::{Arc, Mutex},
        vec,
        vec::Vec,
    };

    /// Memory of this process, read as if it were another's; what befalls its owner in the middle of that, or whether it cannot
    /// be read.
    struct Befallen(Mutex<Option<std::boxed::Box<dyn FnOnce() + Send>>>, bool);

    impl Segments for Befallen {
        fn place(&self, _: *const u8, _: usize) -> Option<u64> {
            None
        }
        fn address(&self, _: usize, _: u64, _: usize) -> Option<NonNull<u8>> {
            None
        }
        fn part(&self, _: NonNull<u8>, _: usize) {}
        fn reads(&self) -> bool {
            true
        }
        unsafe fn read(&self, _: usize, from: u64, to: *mut u8, bytes: usize) -> bool {
            if let Some(event) = self.0.lock().unwrap().take() {
                event();
            }
            if self.1 {
                return false;
            }
            let from = core::ptr::with_exposed_provenance(from as usize);
            // SAFETY: this test's own memory.
            unsafe { raw::copy(from, to, bytes) };
            true
        }
    }

    struct Silent;
    impl Bell for Silent {
        fn ring(&self, _: usize, _: u64) {}
    }

    #[derive(Clone, Copy, PartialEq)]
    enum Case {
        Well,
        /// Rank 0 gives up, and uses its memory for something else, while rank 1 reads it.
        GivesUp,
        /// Nobody's memory can be read.
        Unreadable,
    }

    /// Rank 1 gathers from rank 0: what it has then, if it is done.
    fn gathers(case: Case) -> Option<Vec<f32>> {
        const LEN: usize = FROM / 4;
        let arena = Arc::new(Arena::heap_with(2, 64 << 10));
        let befallen = Arc::new(Befallen(Mutex::new(None), case == Case::Unreadable));
        let end = |rank| {
            let reach = Reach::Segments(befallen.clone());
            End::new((arena.clone(), rank), 2, reach, Arc::new(Silent))
        };
        let mut ends = [end(0), end(1)];
        let shape = S::AllGather {
            counts: vec![LEN / 2; 2],
        };
        let plan = Arc::new(Plan::new(shape, Algorithm::Ring, 2).unwrap());
        let call = Call::new(0, plan.shape(), 2, DType::F32, None, Order::Rank);
        let mut inputs = [vec![10f32; LEN / 2], vec![11f32; LEN / 2]];
        let mut outputs = [vec![0f32; LEN], vec![0f32; LEN]];
        let mut tasks: Vec<Option<Task>> = Vec::new();
        let outlines = [0, 1].map(|rank| Outline::new(plan.clone(), DType::F32, rank));
        for rank in 0..2 {
            let memory = Memory::new::<f32>(
                (inputs[rank].as_ptr(), LEN / 2),
                (outputs[rank].as_mut_ptr(), LEN),
            );
            let op = ReduceOp::Sum;
            tasks.push(Some(ends[rank].prepare(&outlines[rank], op, memory, 0)));
            ends[rank].announce(&call);
        }
        let [end_0, end_1] = &mut ends;
        let perform = |rank: usize, end: &mut End, task: &mut Option<Task>| {
            let task = task.as_mut().unwrap();
            end.perform::<f32>(&outlines[rank], ReduceOp::Sum, task)
                .unwrap()
        };
        // Rank 0 has read all that it needs, and waits for rank 1.
        assert!(!perform(0, end_0, &mut tasks[0]));
        if case == Case::GivesUp {
            let task = tasks[0].take();
            let at = inputs[0].as_mut_ptr().expose_provenance();
            *befallen.0.lock().unwrap() = Some(std::boxed::Box::new(move || {
                drop(task);
                let input: *mut f32 = core::ptr::with_exposed_provenance_mut(at);
                // SAFETY: this test's own memory.
                (0..LEN / 2).for_each(|i| unsafe { input.add(i).write(7.0) });
            }));
        }
        let mut done = false;
        for _ in 0..6 {
            done = perform(1, end_1, &mut tasks[1]);
            if done {
                break;
            }
            if case == Case::Unreadable {
                perform(0, end_0, &mut tasks[0]);
            }
        }
        assert_eq!(end_1.remote, case != Case::Unreadable);
        done.then(|| outputs[1].clone())
    }

    #[test]
    fn nobody_is_done_with_what_was_read_of_one_that_gave_up() {
        let whole = gathers(Case::Well).unwrap();
        assert!(
            whole
                .iter()
                .enumerate()
                .all(|(i, x)| *x == if i < whole.len() / 2 { 10.0 } else { 11.0 })
        );
        assert_eq!(gathers(Case::GivesUp), None);
    }

    #[test]
    fn what_cannot_be_read_goes_by_stages() {
        assert_eq!(gathers(Case::Unreadable), gathers(Case::Well));
    }
}
