//! Collectives in shared memory: threads, processes' slices, shared buffers; long and ragged, in place,
//! beside each other, failing at any moment.
#![cfg(target_os = "linux")]

mod common;

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::join;
use half::bf16;
use quintet_collectives::transport::Transport;
use quintet_collectives::transport::socket::{Kind, Seat};
use quintet_collectives::{
    Communicator, Element, Error, Observed, Observer, ReduceOp, Result, Sockets, World,
};

/// Runs `body` as every rank of a run whose ranks share memory.
fn shm<R: Send>(
    world: usize,
    body: impl Fn(Communicator<Sockets>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    shm_with(world, true, body)
}

/// The same, with or without reading what others have where it lies.
fn shm_with<R: Send>(
    world: usize,
    single_copy: bool,
    body: impl Fn(Communicator<Sockets>) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let seats = join(Kind::Shm, world, |join| {
        join.window = 1 << 30;
        join.single_copy = single_copy;
    });
    thread::scope(|scope| {
        let threads: Vec<_> = seats
            .into_iter()
            .map(|seat| scope.spawn(|| seat.run(&body)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Whether a rank's buffers come from `alloc`.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Memory {
    Slices,
    Shared,
    /// Only odd ranks have shared ones: all must do without.
    Mixed,
}

fn value<E: Element>(f: fn(f32) -> E, rank: usize, i: usize) -> E {
    // Not exact in f32 sums, so that the order of the fold shows.
    f((rank * 7 + i * 3 % 11) as f32 * 0.37 + (i % 7) as f32 * 1e-3)
}

/// The left fold in rank order, as a plain loop.
fn serial<E: Element>(f: fn(f32) -> E, world: usize, i: usize) -> E {
    let mut acc = value(f, 0, i).widen();
    for rank in 1..world {
        acc = acc.add(value(f, rank, i).widen());
    }
    E::narrow(acc)
}

/// Every operation on one rank, long enough for every way, compared to the bit.
fn every_operation<E: Element, T: Transport + Send + 'static>(
    comm: &Communicator<T>,
    memory: Memory,
    len: usize,
    f: fn(f32) -> E,
) -> Result<()> {
    let (n, me) = (comm.world(), comm.rank());
    let shared = memory == Memory::Shared || memory == Memory::Mixed && me % 2 == 1;
    let make = |len: usize| {
        if shared {
            return comm.alloc::<E>(len);
        }
        // From another communicator's point of view: memory that nobody shares.
        World::run(1, |alone| alone.alloc::<E>(len)).map(|mut all| all.remove(0))
    };
    let input = |len: usize| {
        make(len).map(|mut x| {
            x.iter_mut()
                .enumerate()
                .for_each(|(i, x)| *x = value(f, me, i));
            x
        })
    };
    let counts: Vec<usize> = (0..n)
        .map(|r| if r % 3 == 1 { 0 } else { len / 2 + r * 5 })
        .collect();
    let start = |r: usize| counts[..r].iter().sum::<usize>();
    let (total, root) = (start(n), n / 2);

    let (x, mut y) = (input(len)?, make(len)?);
    comm.all_reduce_into(&x, &mut y, ReduceOp::Sum)?;
    let whole: Vec<E> = (0..len).map(|i| serial(f, n, i)).collect();
    assert_eq!(*y, *whole, "all_reduce, rank {me} of {n}, {memory:?}");
    let mut z = input(len)?;
    comm.all_reduce(&mut z, ReduceOp::Sum)?;
    assert_eq!(*z, *whole, "all_reduce in place");
    comm.reduce(&mut y, ReduceOp::Max, root)?;

    let (x, mut y) = (input(total)?, make(counts[me])?);
    comm.reduce_scatter_v(&x, &mut y, &counts, ReduceOp::Sum)?;
    let mine: Vec<E> = (0..counts[me])
        .map(|i| serial(f, n, start(me) + i))
        .collect();
    assert_eq!(*y, *mine, "reduce_scatter");
    let mut x = input(total)?;
    comm.reduce_scatter_in_place(&mut x, &counts, ReduceOp::Sum)?;
    assert_eq!(
        x[start(me)..start(me) + counts[me]],
        *mine,
        "reduce_scatter in place"
    );

    let gathered: Vec<E> = (0..n)
        .flat_map(|r| (0..counts[r]).map(move |i| value(f, r, i)))
        .collect();
    let (x, mut y) = (input(counts[me])?, make(total)?);
    comm.all_gather_v(&x, &mut y, &counts)?;
    assert_eq!(*y, *gathered, "all_gather");
    let mut y = make(total)?;
    y[start(me)..start(me) + counts[me]].copy_from_slice(&x);
    comm.all_gather_in_place(&mut y, &counts)?;
    assert_eq!(*y, *gathered, "all_gather in place");

    let mut y = make(if me == root { total } else { 0 })?;
    comm.gather_v(&x, &mut y, &counts, root)?;
    assert!(me != root || *y == *gathered, "gather");
    let whole = input(if me == root { total } else { 0 })?;
    let mut y = make(counts[me])?;
    comm.scatter_v(&whole, &mut y, &counts, root)?;
    assert!(
        (0..counts[me]).all(|i| y[i] == value(f, root, start(me) + i)),
        "scatter"
    );

    let mut y = input(len)?;
    comm.broadcast(&mut y, root)?;
    assert!((0..len).all(|i| y[i] == value(f, root, i)), "broadcast");

    let (x, mut y) = (input(n * len)?, make(n * len)?);
    comm.all_to_all(&x, &mut y)?;
    for r in 0..n {
        assert!(
            (0..len).all(|i| y[r * len + i] == value(f, r, me * len + i)),
            "all_to_all"
        );
    }
    comm.barrier()
}

const WORLDS: [usize; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17];

#[test]
fn threads_in_every_world_and_length() {
    for world in WORLDS {
        World::run(world, |comm| {
            for len in [0, 1, 7, 129, 1030, 1500, 40_001] {
                every_operation::<f32, _>(&comm, Memory::Slices, len, |x| x)?;
            }
            every_operation(&comm, Memory::Slices, 3000, bf16::from_f32)?;
            every_operation(&comm, Memory::Slices, 3000, f64::from)
        })
        .unwrap();
    }
}

#[test]
fn processes_memory_in_every_world_and_length() {
    let all = &[Memory::Slices, Memory::Shared, Memory::Mixed][..];
    let once = WORLDS.into_iter().map(|world| (world, true, all));
    let staged = [2, 3, 5].into_iter().map(|world| (world, false, &all[..1]));
    for (world, single_copy, ways) in once.chain(staged) {
        for result in shm_with(world, single_copy, |comm| {
            for &memory in ways {
                let longest = if world > 9 { 9_001 } else { 60_001 };
                for len in [0, 7, 129, 1500, longest] {
                    every_operation::<f32, _>(&comm, memory, len, |x| x)?;
                }
                every_operation(&comm, memory, 3000, bf16::from_f32)?;
            }
            Ok(())
        }) {
            result.unwrap();
        }
    }
}

/// From just below to just above each length at which the way changes.
#[test]
fn what_is_only_copied_is_read_where_it_lies() {
    for single_copy in [true, false] {
        let seats = join(Kind::Shm, 3, |join| {
            join.window = 1 << 30;
            join.single_copy = single_copy;
        });
        let read = thread::scope(|scope| {
            let rank = |seat: Seat| {
                let comm = seat.communicator().unwrap();
                let (n, me) = (comm.world(), comm.rank());
                let mut read = Vec::new();
                for len in [
                    8 << 10,
                    (8 << 10) - 3,
                    128 << 10,
                    (128 << 10) + 3,
                    4 << 20,
                    (4 << 20) + 3,
                ] {
                    let before = seat.moved().read;
                    let each = len / n;
                    // No two neighbours alike, so that what is read of another place shows.
                    let is = |rank: usize, i: usize| (10_000 * rank + i % 8191) as f32;
                    let of = |rank: usize, len| (0..len).map(|i| is(rank, i)).collect::<Vec<_>>();
                    let mut all = vec![0f32; n * each];
                    comm.all_gather(&of(me, each), &mut all).unwrap();
                    let from = |i: usize| is(i / each, i % each);
                    assert!(all.iter().enumerate().all(|(i, x)| *x == from(i)));
                    let mut one = of(me, len);
                    comm.broadcast(&mut one, 1).unwrap();
                    assert!(one == of(1, len));
                    read.push(seat.moved().read - before);
                }
                seat.finish(Ok(()));
                read
            };
            let threads: Vec<_> = seats
                .into_iter()
                .map(|seat| scope.spawn(move || rank(seat)))
                .collect();
            threads
                .into_iter()
                .map(|t| t.join().unwrap())
                .collect::<Vec<_>>()
        });
        // Of its own process everybody may read, unless a filter of calls forbids it.
        if single_copy && filtered() && read.iter().flatten().all(|&read| read == 0) {
            println!("not tried: this system lets nobody read memory of processes");
            continue;
        }
        for (rank, read) in read.iter().enumerate() {
            // Of a broadcast the root reads nothing.
            let gathered = |len: usize| 4 * 2 * (len / 3) as u64;
            let cast = |len: usize| if rank == 1 { 0 } else { 4 * len as u64 };
            let wanted = match single_copy {
                false => vec![0; 6],
                true => vec![
                    cast(8 << 10),
                    0,
                    gathered(128 << 10) + cast(128 << 10),
                    gathered((128 << 10) + 3),
                    gathered(4 << 20),
                    0,
                ],
            };
            assert_eq!(*read, wanted, "rank {rank}, {single_copy}");
        }
    }
}

/// Whether calls of the kernel are filtered here.
fn filtered() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    !status
        .lines()
        .any(|line| line.split_whitespace().eq(["Seccomp:", "0"]))
}

/// Whoever is late finds its duties done by others, who are in the next call already, with other memory.
#[test]
fn buffers_and_slices_follow_each_other() {
    for world in [2, 5] {
        for result in shm(world, |comm| {
            let comm = comm.with_deadline(Duration::from_secs(60));
            let (mut shared, mut own) = (comm.alloc::<f32>(3000)?, vec![0f32; 3000]);
            for round in 0..400 {
                shared.fill(round as f32);
                comm.all_reduce(&mut shared, ReduceOp::Sum)?;
                own.fill(round as f32);
                comm.all_reduce(&mut own, ReduceOp::Max)?;
                assert!(shared.iter().all(|x| *x == (world * round) as f32));
                assert!(own.iter().all(|x| *x == round as f32));
            }
            Ok(())
        }) {
            result.unwrap();
        }
    }
}

#[test]
fn groups_and_started_work_share_memory_beside_each_other() {
    for result in shm(4, |comm| {
        assert!(comm.alloc::<f32>(10)?.is_shared());
        let half = comm.split((comm.rank() % 2) as i64, 0)?;
        for round in 0..200usize {
            let len = [3, 2000, 50_000][round % 3];
            let mut x = comm.alloc::<f32>(len)?;
            x.fill(1.0);
            let started = half.start_all_reduce(x, ReduceOp::Sum, ())?;
            let mut y = vec![1f32; len];
            comm.all_reduce(&mut y, ReduceOp::Sum)?;
            // A message of each length beside it, lent or not.
            let right = (comm.rank() + 1) % 4;
            let left = (comm.rank() + 3) % 4;
            let mut got = vec![0f32; len];
            comm.sendrecv(&vec![comm.rank() as f32; len], right, &mut got, left, 1)?;
            assert!(got.iter().all(|x| *x == left as f32));
            assert!(y.iter().all(|y| *y == 4.0));
            assert!(started.wait()?.iter().all(|x| *x == 2.0));
        }
        // Groups that come and go give their memory back.
        for turn in 0..300 {
            let group = comm.split((comm.rank() / 2) as i64, turn)?;
            group.barrier()?;
        }
        Ok(())
    }) {
        result.unwrap();
    }
}

#[test]
fn different_calls_are_named_on_every_rank() {
    for world in [2, 3, 5] {
        for odd in [0, world - 1] {
            for result in shm(world, |comm| {
                comm.barrier()?;
                if comm.rank() == odd {
                    comm.all_reduce(&mut vec![1f32; 5001], ReduceOp::Sum)
                } else {
                    comm.all_reduce(&mut vec![1f32; 5000], ReduceOp::Sum)
                }
            }) {
                let text = result.unwrap_err().to_string();
                assert!(text.contains("x 5000") && text.contains("x 5001"), "{text}");
                assert!(text.matches("shared.rs").count() == 2, "{text}");
            }
        }
    }
}

#[test]
fn who_gives_up_leaves_no_memory_behind() {
    for memory in [Memory::Slices, Memory::Shared] {
        let begin = Instant::now();
        for (rank, result) in shm(3, |comm| {
            let comm = comm.with_deadline(Duration::from_millis(100));
            let mut x = comm.alloc::<f32>(100_000)?;
            let mut y = vec![1f32; 100_000];
            let x: &mut [f32] = if memory == Memory::Shared {
                &mut x
            } else {
                &mut y
            };
            if comm.rank() == 1 {
                thread::sleep(Duration::from_millis(400));
            }
            let outcome = comm.all_reduce(x, ReduceOp::Sum);
            // It is mine again, whatever became of the call.
            x.fill(comm.rank() as f32);
            thread::sleep(Duration::from_millis(100));
            assert!(x.iter().all(|x| *x == comm.rank() as f32));
            outcome
        })
        .into_iter()
        .enumerate()
        {
            match result {
                Err(Error::Timeout { peer, .. }) => assert!(rank == 1 || peer == Some(1)),
                Err(Error::PeerLost { .. }) => {}
                other => panic!("rank {rank}: {other:?}"),
            }
        }
        assert!(begin.elapsed() < Duration::from_secs(2));
    }
}

/// Tells that a call has begun, and holds it up there.
struct HeldUp(Mutex<mpsc::Sender<()>>);

impl Observer for HeldUp {
    fn begun(&self, _: u64, _: Option<u64>) {
        let _ = self.0.lock().unwrap().send(());
        thread::sleep(Duration::from_millis(500));
    }
    fn over(&self, _: &Observed<'_>) {}
}

#[test]
fn a_timeout_tells_a_late_part_from_a_late_call() {
    for called in [true, false] {
        let (begins, begun) = mpsc::channel();
        let (begins, begun) = (Mutex::new(Some(begins)), Mutex::new(begun));
        let results = shm_with(2, false, |comm| {
            let comm = comm.with_deadline(Duration::from_millis(200));
            // Many pieces through the stages: nobody gets far alone.
            let mut x = vec![1f32; 4 << 20];
            if comm.rank() == 1 && called {
                let begins = Mutex::new(begins.lock().unwrap().take().unwrap());
                let comm = comm.with_observer(Arc::new(HeldUp(begins)));
                return comm.all_reduce(&mut x, ReduceOp::Sum);
            }
            if comm.rank() == 1 {
                thread::sleep(Duration::from_millis(500));
            } else if called {
                begun.lock().unwrap().recv().unwrap();
            }
            comm.all_reduce(&mut x, ReduceOp::Sum)
        });
        let text = results[0].as_ref().unwrap_err().to_string();
        let what = if called { "its part" } else { "its call" };
        assert!(
            text.ends_with(&format!("waiting for rank 1: {what}")),
            "{text}"
        );
    }
}

#[test]
fn an_abort_frees_whoever_waits_in_shared_memory() {
    let freed = Mutex::new(Vec::new());
    for result in shm(4, |comm| {
        let half = comm.split((comm.rank() % 2) as i64, 0)?;
        comm.barrier()?;
        if comm.rank() == 3 {
            thread::sleep(Duration::from_millis(200));
            let begin = Instant::now();
            comm.abort();
            freed.lock().unwrap().push(begin);
            return comm.barrier();
        }
        if comm.rank() == 1 {
            // It waits for rank 3.
            return half.all_reduce(&mut vec![1f32; 10_000], ReduceOp::Sum);
        }
        comm.barrier()
    }) {
        assert_eq!(result, Err(Error::Aborted { rank: 3 }));
    }
    assert!(freed.lock().unwrap()[0].elapsed() < Duration::from_millis(600));
}

#[test]
fn auto_shares_memory_only_where_labels_agree() {
    let labels = ["a", "b", "a", "b"];
    let seats = join(Kind::Auto, 4, |join| {
        join.label = Some(labels[join.rank].to_string());
        join.window = 1 << 30;
    });
    let body = |seat: &Seat| -> Result<()> {
        let comm = seat.communicator()?;
        let before = seat.moved();
        comm.all_reduce(&mut vec![1f32; 10_000], ReduceOp::Sum)?;
        // Across hosts the plan's messages go over tcp, to the one near rank by memory or unix.
        assert!(seat.moved().tcp > before.tcp);
        let near = comm.split((comm.rank() % 2) as i64, 0)?;
        let before = seat.moved();
        let mut x = near.alloc::<f32>(10_000)?;
        assert!(x.is_shared());
        near.all_reduce(&mut x, ReduceOp::Sum)?;
        assert_eq!(seat.moved().tcp, before.tcp);
        assert!(seat.moved().shm > before.shm);
        let far = comm.split((comm.rank() / 2) as i64, 0)?;
        let before = seat.moved();
        assert!(!far.alloc::<f32>(10)?.is_shared());
        far.all_reduce(&mut vec![1f32; 10_000], ReduceOp::Sum)?;
        assert_eq!(seat.moved().shm, before.shm);
        assert!(seat.moved().tcp > before.tcp);
        comm.barrier()
    };
    thread::scope(|scope| {
        let threads: Vec<_> = seats
            .into_iter()
            .map(|seat| {
                scope.spawn(move || {
                    let outcome = body(&seat);
                    seat.finish(Ok(()));
                    outcome
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap().unwrap());
    });
}

/// Where a disk of a few megabytes can be mounted (a mount namespace), this binary starts itself there.
#[test]
fn a_full_disk_is_an_error() {
    if let Ok(folder) = std::env::var("TEST_FULL_DISK") {
        return on_full_disk(Path::new(&folder));
    }
    let folder = common::Folder::new();
    let program = std::env::current_exe().unwrap();
    let script = format!(
        "mount -t tmpfs -o size=6m none {} || exit 77; exec {} a_full_disk_is_an_error --exact --nocapture",
        folder.0.display(),
        program.display()
    );
    let status = Command::new("unshare")
        .args(["-m", "sh", "-c", &script])
        .env("TEST_FULL_DISK", &folder.0)
        .status();
    match status.map(|status| status.code()) {
        Ok(Some(0)) => {}
        // Nothing may be mounted here.
        Err(_) | Ok(Some(1 | 77)) => eprintln!("no disk can be mounted: not tested"),
        other => panic!("{other:?}"),
    }
}

fn on_full_disk(folder: &Path) {
    let seats = join(Kind::Shm, 2, |join| {
        join.folder = Some(folder.to_path_buf());
        join.window = 1 << 26;
    });
    thread::scope(|scope| {
        for seat in seats {
            scope.spawn(move || {
                seat.run(|comm| {
                    let error = comm.alloc::<f32>(4 << 20).unwrap_err();
                    assert!(error.to_string().contains("No space left"), "{error}");
                    // What there is room for still works, and may be touched to its last byte.
                    let mut x = comm.alloc::<f32>(100_000)?;
                    x.fill(1.0);
                    comm.all_reduce(&mut x, ReduceOp::Sum)?;
                    assert!(x.iter().all(|x| *x == 2.0));
                    comm.barrier()
                })
                .unwrap();
            });
        }
    });
    // More segments than the disk has room for.
    let outcome = std::panic::catch_unwind(|| {
        join(Kind::Shm, 4, |join| {
            join.folder = Some(folder.to_path_buf());
            join.timeout = Duration::from_secs(1);
        })
    });
    assert!(outcome.is_err());
}

#[test]
fn a_file_without_a_name_will_do() {
    let folder = common::Folder::new();
    let seats = join(Kind::Shm, 2, |join| {
        join.folder = Some(folder.0.clone());
        join.window = 1 << 26;
    });
    assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 0);
    thread::scope(|scope| {
        for seat in seats {
            scope.spawn(move || {
                seat.run(|comm| {
                    let mut x = comm.alloc::<f32>(10_000)?;
                    x.fill(1.0);
                    comm.all_reduce(&mut x, ReduceOp::Sum)?;
                    assert!(x.iter().all(|x| *x == 2.0));
                    // Beyond the window is an error.
                    assert!(matches!(
                        comm.alloc::<u8>(1 << 27),
                        Err(Error::System { .. })
                    ));
                    comm.barrier()
                })
                .unwrap();
            });
        }
    });
}

/// A record is written when the call changes, and tells of the call that differs and not of one before it.
#[test]
fn a_mismatch_names_the_calls_that_differ_and_not_those_before() {
    let said = shm(2, |comm| {
        for _ in 0..4 {
            comm.all_reduce(&mut [1f32; 3], ReduceOp::Sum)?;
        }
        let mut x = vec![1f32; 5 + 2 * comm.rank()];
        comm.all_reduce(&mut x, ReduceOp::Sum)
    });
    for said in said {
        let error = said.unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("f32 x 5") && text.contains("f32 x 7"),
            "{text}"
        );
    }
}
