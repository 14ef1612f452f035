//! `bar.sync`, `bar.arrive` and the forms of `__syncthreads`.

use std::format;

use super::super::order::Meeting;
use super::*;

const ARRIVE: i32 = 1;
const COUNT: i32 = 2;
const AND: i32 = 3;
const OR: i32 = 4;

impl Run<'_> {
    /// The current thread comes to barrier `id` for `threads` threads (0: the whole block).
    pub(in super::super) fn barrier(
        &mut self,
        (call, id, threads): (i32, i32, i32),
        value: i32,
        site: Site,
    ) -> Next {
        let all = self.threads.len();
        let Some(index) = usize::try_from(id).ok().filter(|&id| id < 16) else {
            let what = format!("barrier {id} where 0 to 15 are there");
            return self.fail(FaultKind::Barrier, site, what);
        };
        let count = match threads {
            0 => all,
            n if n > 0 && n % 32 == 0 && n as usize <= all.next_multiple_of(32) => {
                all.min(n as usize)
            }
            n => {
                let what = format!(
                    "barrier {id} for {n} threads: not a multiple of 32 up to the block's {all}"
                );
                return self.fail(FaultKind::Barrier, site, what);
            }
        };
        if let Some((kind, what, other)) = self.objects(index, call, count, site) {
            let other = other.map(|t| self.stamp(t));
            return self.fail_at(kind, site, what, None, other);
        }
        let (current, waits) = (self.current, call != ARRIVE);
        let rule = match waits {
            true => Meeting::BarSync.rule(),
            false => Meeting::BarArrive.rule(),
        };
        let barrier = &mut self.barriers[index];
        (barrier.count, barrier.call) = (count, call.max(barrier.call));
        barrier.came[current / LANES] |= 1 << (current % LANES);
        let nth = barrier.arrived.len() as u16;
        barrier.first_of[current / LANES].get_or_insert(nth);
        barrier.arrived.push(Arrival {
            thread: current,
            waits,
            value,
            site,
        });
        if rule.releases {
            match self.clocks.release(current) {
                Ok(release) => barrier.released.push(release),
                Err(()) => {
                    let what = "more barriers than the emulator counts".into();
                    return self.fail(FaultKind::Emulator, site, what);
                }
            }
        }
        if self.barriers[index].arrived.len() == count {
            self.meet_at(index);
        } else if waits {
            return self.park(Wait::Barrier(index), site);
        }
        Next::Go
    }

    /// What is wrong with the current thread's coming.
    fn objects(
        &self,
        index: usize,
        call: i32,
        count: usize,
        site: Site,
    ) -> Option<(FaultKind, String, Option<usize>)> {
        let barrier = &self.barriers[index];
        let first = barrier.arrived.first()?.thread;
        if barrier.count != count {
            let what = format!(
                "barrier {index} for {count} threads where others said {}",
                barrier.count
            );
            return Some((FaultKind::Barrier, what, Some(first)));
        }
        let warp = self.current / LANES;
        if barrier.came[warp] >> (self.current % LANES) & 1 == 1 {
            let what = format!("comes to barrier {index} twice before it is met");
            return Some((FaultKind::Barrier, what, None));
        }
        // Whoever else of the warp has come was held to the first of it.
        let arrival = barrier.arrived[usize::from(barrier.first_of[warp]?)];
        let same_call = arrival.waits == (call != ARRIVE) && arrival.site.is(site);
        if !same_call {
            let what = format!("barrier {index} is not where its warp waits");
            return Some((FaultKind::Divergence, what, Some(arrival.thread)));
        }
        None
    }

    /// The last one has come: memory is ordered, who waits goes on.
    fn meet_at(&mut self, index: usize) {
        let Barrier {
            arrived,
            released,
            call,
            ..
        } = std::mem::take(&mut self.barriers[index]);
        let acquires = arrived.iter().filter(|a| match a.waits {
            true => Meeting::BarSync.rule().acquires,
            false => Meeting::BarArrive.rule().acquires,
        });
        self.clocks.acquire(acquires.map(|a| a.thread), &released);
        let mut values = arrived.iter().map(|a| a.value != 0);
        let answer = match call {
            COUNT => values.filter(|&v| v).count() as i32,
            AND => values.all(|v| v).into(),
            OR => values.any(|v| v).into(),
            _ => 0,
        };
        for Arrival { thread, .. } in arrived.iter().filter(|a| a.waits).copied() {
            self.threads[thread].answer = answer;
            if thread != self.current {
                self.wake(thread);
            }
        }
    }
}
