//! Failures of other libraries that no other file here looks for; `README.md` beside this has all of them.
#![cfg(unix)]

mod common;

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use common::{Folder, join};
use half::bf16;
use quintet_collectives::environment::{Place, Variables};
use quintet_collectives::process::Options;
use quintet_collectives::store::{FileStore, Store, StoreServer, TcpStore};
use quintet_collectives::transport::socket::{Join, Kind};
use quintet_collectives::{Error, Process, ReduceOp, World};

const SECOND: Duration = Duration::from_secs(1);

/// Row 11: a sum that is rounded at every rank it passes does not meet the bound of one rounding.
#[test]
fn rounding_at_every_hop_would_be_seen() {
    for world in [2usize, 8, 64] {
        let value = |r: usize| bf16::from_f32(1.0 + r as f32 / 128.0);
        let exact = bf16::from_f32((0..world).map(|r| value(r).to_f32()).sum());
        let sums = World::run(world, |comm| {
            let mut x = [value(comm.rank())];
            comm.all_reduce(&mut x, ReduceOp::Sum)?;
            Ok(x[0])
        });
        assert_eq!(sums.unwrap(), vec![exact; world]);
        let hop = |sum: bf16, r| bf16::from_f32(sum.to_f32() + value(r).to_f32());
        let by_hops = (1..world).fold(value(0), hop);
        assert_eq!(by_hops == exact, world == 2, "{by_hops} {exact}");
    }
}

/// Starts one test of this file again, alone, as a process that plays a role.
fn play(test: &str) -> String {
    let _none = FORKS.lock().unwrap_or_else(PoisonError::into_inner);
    let done = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env("TEST_ROLE", test)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stdout).unwrap()
}

fn plays(test: &str) -> bool {
    std::env::var("TEST_ROLE").as_deref() == Ok(test)
}

/// Sockets of this process that a network can reach.
#[cfg(target_os = "linux")]
fn reachable() -> usize {
    let table = |name: &str| std::fs::read_to_string(format!("/proc/net/{name}"));
    let text = ["tcp", "tcp6", "udp", "udp6"].map(|name| table(name).unwrap_or_default());
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    links
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .filter_map(|to| {
            let inode = to.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
            Some(format!(" {inode} "))
        })
        .filter(|inode| text.iter().any(|text| text.contains(inode)))
        .count()
}

/// Row 16.
#[cfg(target_os = "linux")]
#[test]
fn alone_nothing_is_opened_and_nothing_changes() {
    let me = "alone_nothing_is_opened_and_nothing_changes";
    if !plays(me) {
        assert!(play(me).contains("alone and well"));
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert_eq!(reachable(), 1);
    drop(listener);
    let place = Place::parse(&Variables::from([
        ("QUINTET_RANK".into(), "0".into()),
        ("QUINTET_WORLD_SIZE".into(), "1".into()),
    ]));
    let process = Process::join(place.unwrap(), Options::default()).unwrap();
    process
        .run(|comm| {
            assert_eq!(reachable(), 0);
            let given = [1.5f32, -2.0, f32::NAN];
            for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max] {
                let mut x = given;
                comm.all_reduce(&mut x, op)?;
                assert_eq!(x.map(f32::to_bits), given.map(f32::to_bits));
            }
            let mut y = [0f32; 3];
            comm.all_to_all(&given, &mut y)?;
            assert_eq!(y.map(f32::to_bits), given.map(f32::to_bits));
            comm.barrier()
        })
        .unwrap();
    println!("alone and well");
}

/// A fork has open what its parent has until its program begins: none while a port is to be free at once.
static FORKS: Mutex<()> = Mutex::new(());

/// Below those that connections of others are given, and none of the next sixteen was given before.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 20_000 + (std::process::id() % 10_000) as u16;
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let mut ports = (0..).map(|_| first + 17 * NEXT.fetch_add(1, Ordering::Relaxed));
    ports.find(free).unwrap()
}

/// Row 19: a port is free again at once.
#[test]
fn one_port_serves_a_hundred_runs() {
    let _none = FORKS.lock().unwrap_or_else(PoisonError::into_inner);
    let port = free_port();
    for turn in 0..100 {
        let server = StoreServer::start(port..=port, "127.0.0.1", "run", b"").unwrap();
        let store = TcpStore::connect("127.0.0.1", port..=port, "run", b"", 5 * SECOND).unwrap();
        assert_eq!(store.add("turn", turn, SECOND).unwrap(), turn);
        drop(store);
        drop(server);
    }
}

/// Row 20.
#[test]
fn listeners_keep_to_their_range_and_say_when_it_is_full() {
    // Two neighbouring ports, of which the first is taken.
    let (held, first) = (0..100)
        .find_map(|_| {
            let held = TcpListener::bind("127.0.0.1:0").ok()?;
            let first = held.local_addr().ok()?.port();
            TcpListener::bind(("127.0.0.1", first.checked_add(1)?)).ok()?;
            Some((held, first))
        })
        .unwrap();
    let folder = Folder::new();
    let store = FileStore::new(&folder.0).unwrap();
    let rank = |rank: usize, ports| {
        let join = Join {
            ports,
            host: Some("127.0.0.1".into()),
            timeout: 10 * SECOND,
            ..Join::new(rank, 2, "run")
        };
        let store = store.clone();
        thread::spawn(move || join.over(&store))
    };
    let full = rank(0, first..=first).join().unwrap().unwrap_err();
    assert!(full.to_string().contains(&first.to_string()), "{full}");
    let zero = rank(0, first..=first + 1);
    let address = store.wait("run/0/address/0", 5 * SECOND).unwrap();
    let address = String::from_utf8(address).unwrap();
    assert!(address.ends_with(&format!(":{}", first + 1)), "{address}");
    let full = rank(1, first..=first + 1).join().unwrap().unwrap_err();
    let range = format!("{first}..={}", first + 1);
    let says = |port: u16| full.to_string().contains(&port.to_string());
    assert!(says(first) && says(first + 1), "{full} has not {range}");
    drop(held);
    let one = rank(1, 0..=0);
    for seat in [zero, one] {
        seat.join().unwrap().unwrap().finish(Ok(()));
    }
}

/// Row 21: rank 0 keeps the store, and whoever ends when, nobody else notices.
#[test]
fn whoever_holds_the_store_may_leave_first() {
    for turn in 0..100u64 {
        let port = free_port();
        thread::scope(|scope| {
            for rank in 0..3u64 {
                scope.spawn(move || {
                    let place = Place::parse(&Variables::from([
                        ("RANK".into(), rank.to_string()),
                        ("WORLD_SIZE".into(), "3".into()),
                        ("MASTER_ADDR".into(), "127.0.0.1".into()),
                        ("MASTER_PORT".into(), port.to_string()),
                    ]));
                    let options = Options {
                        timeout: 20 * SECOND,
                        ..Options::default()
                    };
                    let process = Process::join(place.unwrap(), options).unwrap();
                    let comm = process.communicator().unwrap();
                    let mut x = [rank];
                    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                    assert_eq!(x, [3]);
                    // Half the time rank 0 goes at once, else in some order.
                    let wait = (turn * 7919 + rank * 104_729) % 5;
                    let wait = if rank == 0 && turn % 2 == 0 { 0 } else { wait };
                    thread::sleep(Duration::from_millis(wait));
                    drop(comm);
                    process.finish(Ok(()));
                });
            }
        });
    }
}

/// Row 23: a child that was forked may neither speak for its parent nor keep its descriptors.
#[cfg(target_os = "linux")]
#[test]
#[allow(unsafe_code)]
fn a_fork_is_refused_and_its_parent_goes_on() {
    use std::os::unix::process::CommandExt;
    for kind in [Kind::Tcp, Kind::Unix, Kind::Shm] {
        let seats = join(kind, 2, |_| {});
        thread::scope(|scope| {
            for seat in seats {
                scope.spawn(move || {
                    let comm = seat.communicator().unwrap();
                    comm.barrier().unwrap();
                    if seat.rank() == 1 {
                        let forked = {
                            let comm = &comm;
                            move || match comm.all_reduce(&mut [1f32], ReduceOp::Sum) {
                                Err(Error::Forked { .. }) => Ok(()),
                                other => Err(std::io::Error::other(format!("{other:?}"))),
                            }
                        };
                        // SAFETY: the closure lives until the child has run it, which is before spawn returns.
                        let forked: Box<dyn FnMut() -> std::io::Result<()> + Send + Sync> = unsafe {
                            std::mem::transmute::<
                                Box<dyn FnMut() -> std::io::Result<()> + Send + Sync + '_>,
                                Box<dyn FnMut() -> std::io::Result<()> + Send + Sync + 'static>,
                            >(Box::new(forked))
                        };
                        let _none = FORKS.lock().unwrap_or_else(PoisonError::into_inner);
                        let mut child = Command::new("ls");
                        child.args(["-l", "/proc/self/fd"]).stderr(Stdio::inherit());
                        // SAFETY: what it does after the fork is one look at a page, and an error's text.
                        let done = unsafe { child.pre_exec(forked).output() }.unwrap();
                        let files = String::from_utf8(done.stdout).unwrap();
                        assert!(done.status.success(), "{files}");
                        let kept = files.lines().filter(|line| {
                            ["socket:", "quintet"]
                                .iter()
                                .any(|what| line.contains(what))
                        });
                        // What the tests' own parent has left open is not ours.
                        assert_eq!(kept.count(), 0, "{files}");
                    }
                    let mut x = [1f32];
                    comm.all_reduce(&mut x, ReduceOp::Sum).unwrap();
                    assert_eq!(x, [2.0]);
                    drop(comm);
                    seat.finish(Ok(()));
                });
            }
        });
    }
}
