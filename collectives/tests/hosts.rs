//! Runs over two hosts, which are network namespaces here, with a link that is slow, loses packets or takes
//! its time. Each says why where it cannot run.
#![cfg(target_os = "linux")]

#[path = "common/hosts.rs"]
mod hosts;

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Child;
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use hosts::{ADDRESS, Hosts, ends};
use quintet_collectives::{Communicator, ReduceOp, Result, Sockets, from_env};

/// One test compares times, and has the machine to itself; all others share it.
static MACHINE: RwLock<()> = RwLock::new(());

/// A rank, or the relay.
#[test]
fn rank() {
    match std::env::var("TEST_ROLE").as_deref() {
        Ok("relay") => relay(),
        Ok("suite") => with(suite),
        Ok("large") => with(large),
        Ok("overlap") => {
            settle();
            with(overlap);
        }
        _ => {}
    }
}

/// Does `work` as this rank and says how it ended.
fn with(work: impl FnOnce(&Communicator<Sockets>) -> Result<String>) {
    let process = from_env().unwrap();
    let comm = process.communicator().unwrap();
    match work(&comm) {
        Ok(text) => {
            let moved = process.seat().moved();
            println!(
                "\nend: tcp {} unix {} shm {} {text}",
                moved.tcp, moved.unix, moved.shm
            );
            drop(comm);
            process.finish(Ok(()));
        }
        Err(error) => {
            println!("\nfailed: {error}");
            process.finish(Err(&error));
        }
    }
}

/// Sums of all lengths that a plan treats in its own way, each element checked.
fn suite(comm: &Communicator<Sockets>) -> Result<String> {
    let world = comm.world();
    for len in [0, 1, 2, 7, 1000, 4097, 100_003, 1 << 20] {
        let mine = |rank: usize, i: usize| ((i * 7 + rank * 13) % 101) as f32;
        let mut x: Vec<f32> = (0..len).map(|i| mine(comm.rank(), i)).collect();
        comm.all_reduce(&mut x, ReduceOp::Sum)?;
        for (i, x) in x.iter().enumerate() {
            let sum: f32 = (0..world).map(|rank| mine(rank, i)).sum();
            assert_eq!(*x, sum, "element {i} of {len}");
        }
    }
    Ok(String::new())
}

/// Sums of one element, one after the other: each but the first waits for what the peer sent after the one before.
const SHORT: u32 = 10;

/// How long a sum of 4 MiB takes, and one of one element.
fn large(comm: &Communicator<Sockets>) -> Result<String> {
    let mut x = vec![1f32; 1 << 20];
    comm.barrier()?;
    let begin = Instant::now();
    comm.all_reduce(&mut x, ReduceOp::Sum)?;
    let long = begin.elapsed();
    assert!(x.iter().all(|x| *x == comm.world() as f32));
    comm.barrier()?;
    let begin = Instant::now();
    for _ in 0..SHORT {
        comm.all_reduce(&mut x[..1], ReduceOp::Sum)?;
    }
    let short = begin.elapsed() / SHORT;
    Ok(format!(
        "long {} short {}",
        long.as_micros(),
        short.as_micros()
    ))
}

/// A number behind a word.
#[track_caller]
fn number(text: &str, word: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with("end: "));
    let words = line.unwrap_or_else(|| panic!("{text}"));
    let mut words = words.split(' ').skip_while(|w| *w != word).skip(1);
    words
        .next()
        .and_then(|n| n.parse().ok())
        .unwrap_or_else(|| panic!("{word} in {text}"))
}

#[test]
fn between_hosts_all_goes_over_tcp_whatever_the_link() {
    let _shared = MACHINE.read().unwrap_or_else(PoisonError::into_inner);
    for (rate, lost) in [("", 0), ("200mbit", 0), ("1gbit", 2)] {
        let Some(hosts) = Hosts::new() else {
            return;
        };
        if !rate.is_empty() && !hosts.limit(rate) {
            return;
        }
        let loss = format!(
            "table inet loss {{ chain in {{ type filter hook input priority 0; \
             iifname \"LINK\" numgen random mod 100 < {lost} counter drop; }}; }}"
        );
        if lost > 0 && !(hosts.rules(0, &loss) && hosts.rules(1, &loss)) {
            return;
        }
        let ranks = hosts.ranks("suite", &[0, 1], &[("QUINTET_TRANSPORT", "auto")]);
        let ends = ends(ranks);
        let counted = hosts.counted(0) + hosts.counted(1);
        assert_eq!(counted > 0, lost > 0, "{counted} packets were lost");
        for text in ends {
            assert!(number(&text, "tcp") > 4e6, "{rate} {lost}: {text}");
            assert_eq!(number(&text, "shm") + number(&text, "unix"), 0.0, "{text}");
        }
    }
}

#[test]
fn of_two_hosts_with_two_ranks_each_only_neighbours_share_memory() {
    let _shared = MACHINE.read().unwrap_or_else(PoisonError::into_inner);
    let Some(hosts) = Hosts::new() else {
        return;
    };
    let ranks = hosts.ranks("suite", &[0, 0, 1, 1], &[("QUINTET_TRANSPORT", "auto")]);
    for text in ends(ranks) {
        assert!(number(&text, "tcp") > 4e6, "{text}");
        assert!(number(&text, "shm") > 1e6, "{text}");
    }
}

#[test]
fn a_slow_link_is_what_a_long_sum_takes() {
    let _shared = MACHINE.read().unwrap_or_else(PoisonError::into_inner);
    let Some(hosts) = Hosts::new() else {
        return;
    };
    if !hosts.limit("200mbit") {
        return;
    }
    for text in ends(hosts.ranks("large", &[0, 1], &[])) {
        // Each rank sends 4 MiB, of which a burst of 256 KiB goes as fast as it can.
        let least = (4.0 - 0.25 - 0.25) * (1 << 20) as f64 * 8.0 / 200.0;
        let took = number(&text, "long");
        assert!(took > least, "{took} of {least} us: {text}");
        assert!(took < 4.0 * least, "{took} of {least} us: {text}");
    }
}

/// What a relay has taken in and not yet passed on, at most, in each direction of a connection.
const HELD: usize = 256 << 10;
/// How long each byte stays.
const DELAY: Duration = Duration::from_millis(15);
/// The port at which the relay waits in place of another.
const PORTS: [(u16, u16); 2] = [(29_500, 7_500), (61_001, 7_001)];

/// Passes connections on to this host's ports, each byte a while later.
fn relay() {
    for (to, at) in PORTS {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, at)).unwrap();
        thread::spawn(move || {
            for from in listener.incoming().flatten() {
                let address = SocketAddr::from((ADDRESS[0].parse::<Ipv4Addr>().unwrap(), to));
                // Nobody there yet: the connection ends, as it would have.
                let Ok(onward) = TcpStream::connect(address) else {
                    continue;
                };
                from.set_nodelay(true).unwrap();
                onward.set_nodelay(true).unwrap();
                pass(from.try_clone().unwrap(), onward.try_clone().unwrap());
                pass(onward, from);
            }
        });
    }
    println!("\nready");
    // Until the test ends it.
    thread::sleep(Duration::from_secs(60));
}

/// Bytes with the moment at which they go on, and whether no more will come.
type Queue = Arc<(Mutex<(VecDeque<(Instant, Vec<u8>)>, usize, bool)>, Condvar)>;

fn pass(mut from: TcpStream, mut to: TcpStream) {
    let queue: Queue = Arc::default();
    let taking = queue.clone();
    thread::spawn(move || {
        let (lock, changed) = &*taking;
        let mut buffer = vec![0; 32 << 10];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            let mut held = lock.lock().unwrap();
            while held.1 + n > HELD {
                held = changed.wait(held).unwrap();
            }
            held.0
                .push_back((Instant::now() + DELAY, buffer[..n].to_vec()));
            held.1 += n;
            changed.notify_all();
        }
        lock.lock().unwrap().2 = true;
        changed.notify_all();
    });
    thread::spawn(move || {
        let (lock, changed) = &*queue;
        loop {
            let mut held = lock.lock().unwrap();
            while held.0.is_empty() && !held.2 {
                held = changed.wait(held).unwrap();
            }
            let Some((at, bytes)) = held.0.pop_front() else {
                let _ = to.shutdown(std::net::Shutdown::Write);
                return;
            };
            drop(held);
            thread::sleep(at.saturating_duration_since(Instant::now()));
            let written = to.write_all(&bytes);
            lock.lock().unwrap().1 -= bytes.len();
            changed.notify_all();
            if written.is_err() {
                return;
            }
        }
    });
}

/// Ends with the value.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_link_that_takes_its_time_delays_each_message_once() {
    let _shared = MACHINE.read().unwrap_or_else(PoisonError::into_inner);
    let Some(hosts) = Hosts::new() else {
        return;
    };
    let [(store, store_at), (data, data_at)] = PORTS;
    let rules = format!(
        "table ip relay {{ chain pre {{ type nat hook prerouting priority -100; \
         iifname \"LINK\" tcp dport {store} redirect to :{store_at}; \
         iifname \"LINK\" tcp dport {data} redirect to :{data_at}; }}; }}"
    );
    if !hosts.rules(0, &rules) {
        return;
    }
    let mut relay = Ended(hosts.ranks("relay", &[0], &[]).swap_remove(0));
    let mut first = [0; 1];
    // Its first output comes when it listens.
    let mut out = relay.0.stdout.take().unwrap();
    while first[0] != b'y' {
        assert_eq!(out.read(&mut first).unwrap(), 1);
    }
    // Rank 1, beyond the relay, connects to rank 0.
    let ports = data.to_string();
    let ranks = hosts.ranks("large", &[0, 1], &[("QUINTET_PORTS", &ports)]);
    for text in ends(ranks) {
        let (short, long) = (number(&text, "short"), number(&text, "long"));
        let delay = DELAY.as_micros() as f64;
        assert!(short > 0.85 * delay, "{short} us: {text}");
        assert!(short < 6.0 * delay, "{short} us: {text}");
        // 4 MiB in portions of what the relay holds, each as late.
        let portions = (4 << 20) as f64 / HELD as f64;
        assert!(long > portions / 2.0 * delay * 0.5, "{long} us: {text}");
    }
}

/// Gives this rank and its threads a core of their own, before others: two ranks on one core would not compute
/// as long as one does. What the system refuses is only missed.
fn settle() {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let rank: usize = std::env::var("QUINTET_RANK").unwrap().parse().unwrap();
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let mut set = CpuSet::new();
    set.set(rank % cores);
    let _ = sched_setaffinity(None, &set);
    let _ = rustix::process::setpriority_process(None, -20);
}

/// A connection of two ranks with nothing of ours on it.
fn connected(comm: &Communicator<Sockets>) -> Result<TcpStream> {
    let listening = (comm.rank() == 0).then(|| TcpListener::bind((ADDRESS[0], 0)).unwrap());
    let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
    let mut at = [listening.as_ref().map_or(0, port)].map(u32::from);
    comm.all_reduce(&mut at, ReduceOp::Max)?;
    Ok(match listening {
        Some(listener) => listener.accept().unwrap().0,
        None => TcpStream::connect((ADDRESS[0], at[0] as u16)).unwrap(),
    })
}

/// `work` while as many bytes as a sum of two ranks sends go each way, by nothing but the system's calls.
fn beside_plain_bytes(stream: &TcpStream, [out, into]: &mut [Vec<u8>; 2], work: impl FnOnce()) {
    thread::scope(|scope| {
        scope.spawn(|| (&mut &*stream).write_all(out).unwrap());
        scope.spawn(|| (&mut &*stream).read_exact(into).unwrap());
        work();
    });
}

/// A started sum of 8 MiB, as much computation, and both at once; and the computation beside plain bytes, which is
/// what the link costs this machine. The least of a few rounds of each, for this machine
/// has other things to do. A round takes as long as it takes the slower rank.
fn overlap(comm: &Communicator<Sockets>) -> Result<String> {
    let slower = |begin: Instant| -> Result<f64> {
        let mut took = [begin.elapsed().as_secs_f64()];
        comm.all_reduce(&mut took, ReduceOp::Max)?;
        Ok(took[0])
    };
    // What is summed is made beforehand: only the sum and the computation are timed.
    let mut x = vec![0f32; 2 << 20];
    let (mut alone, mut computed, mut both) = (f64::MAX, f64::MAX, f64::MAX);
    for _ in 0..6 {
        x.fill(1.0);
        comm.barrier()?;
        let begin = Instant::now();
        x = comm.start_all_reduce(x, ReduceOp::Sum, ())?.wait()?;
        alone = slower(begin)?.min(alone);
    }
    let turns = turns_in(alone);
    let (stream, mut plain) = (connected(comm)?, f64::MAX);
    let mut bytes = [0, 1].map(|byte| vec![byte; 8 << 20]);
    for round in 0..40 {
        comm.barrier()?;
        let begin = Instant::now();
        let sum = compute(turns);
        computed = slower(begin)?.min(computed);
        x.fill(1.0);
        comm.barrier()?;
        let begin = Instant::now();
        let pending = comm.start_all_reduce(x, ReduceOp::Sum, ())?;
        let same = compute(turns);
        x = pending.wait()?;
        both = slower(begin)?.min(both);
        assert_eq!(sum.to_bits(), same.to_bits());
        comm.barrier()?;
        let begin = Instant::now();
        beside_plain_bytes(&stream, &mut bytes, || {
            std::hint::black_box(compute(turns));
        });
        plain = slower(begin)?.min(plain);
        assert!(x.iter().all(|x| *x == comm.world() as f32));
        // All ranks have the same figures, and end together.
        if round > 5 && both < 1.15 * alone.max(computed) {
            break;
        }
    }
    let [ratio, least] = [both, plain].map(|both| both / alone.max(computed));
    let [alone, computed, both] = [alone, computed, both].map(|seconds| (seconds * 1e6) as u64);
    Ok(format!(
        "ratio {ratio:.3} alone {alone} computed {computed} both {both} plain {least:.3}"
    ))
}

/// Arithmetic that no optimiser can leave out, on nothing but registers.
fn compute(turns: u64) -> f64 {
    let mut x = std::hint::black_box(0.5f64);
    for _ in 0..turns {
        x = 3.7 * x * (1.0 - x);
    }
    std::hint::black_box(x)
}

/// Turns of [`compute`] that take so many seconds where nothing holds them up.
fn turns_in(seconds: f64) -> u64 {
    const SAMPLE: u64 = 1 << 18;
    let took = || {
        let begin = Instant::now();
        compute(SAMPLE);
        begin.elapsed().as_secs_f64()
    };
    let fastest = (0..40).map(|_| took()).fold(f64::MAX, f64::min);
    (SAMPLE as f64 * seconds / fastest) as u64
}

#[test]
fn a_started_sum_goes_beside_the_computation() {
    let _alone = MACHINE.write().unwrap_or_else(PoisonError::into_inner);
    let Some(hosts) = Hosts::new() else {
        return;
    };
    if !hosts.limit("1gbit") {
        return;
    }
    for text in ends(hosts.ranks("overlap", &[0, 1], &[])) {
        let (ratio, alone) = (number(&text, "ratio"), number(&text, "alone"));
        let (computed, plain) = (number(&text, "computed"), number(&text, "plain"));
        println!(
            "a sum of 8 MiB over 1 Gbit in {alone} us, computation in {computed} us, both in {ratio} of the longer, plain bytes in {plain}"
        );
        // 8 MiB through 1 Gbit take 67 ms: the link is what the sum waits for.
        assert!(alone > 50e3, "{text}");
        if computed > 1.25 * alone {
            println!(
                "not judged: this machine is busy, for computation alone takes longer than it should"
            );
            continue;
        }
        // Where packets alone cost the cores that compute more than that, something else is at work here.
        let most = if plain <= 1.2 { 1.2 } else { 1.05 * plain };
        assert!(ratio <= most, "{text}");
    }
}
