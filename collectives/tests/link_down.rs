//! A dead link between hosts, which are network namespaces here. Needs root and `ip`; says so where it
//! cannot run.
#![cfg(target_os = "linux")]

use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use quintet_collectives::{Error, ReduceOp, from_env};

/// A rank that works until it fails.
#[test]
fn rank() {
    if std::env::var_os("TEST_ROLE").is_none() {
        return;
    }
    let outcome = from_env().unwrap().run(|comm| {
        comm.barrier()?;
        println!("\nready");
        loop {
            comm.all_reduce(&mut vec![1f32; 10_000], ReduceOp::Sum)?;
        }
        #[expect(unreachable_code, reason = "it works until it fails")]
        Ok(())
    });
    match outcome {
        Err(Error::PeerLost { rank, .. }) => println!("\nend: lost {rank}"),
        other => println!("\nend: {other:?}"),
    }
}

fn ip(words: &str) -> bool {
    let done = Command::new("ip").args(words.split(' ')).output();
    done.is_ok_and(|done| done.status.success())
}

/// Two namespaces with a link between them, which go with the value.
struct Hosts([String; 2]);

impl Hosts {
    fn new() -> Option<Self> {
        let id = std::process::id();
        let hosts = Self(["a", "b"].map(|side| format!("quintet-{id}-{side}")));
        let [a, b] = &hosts.0;
        let (va, vb) = (format!("qa{id}"), format!("qb{id}"));
        let fine = ip(&format!("netns add {a}"))
            && ip(&format!("netns add {b}"))
            && ip(&format!(
                "link add {va} netns {a} type veth peer name {vb} netns {b}"
            ))
            && ip(&format!("-n {a} addr add 10.77.0.1/24 dev {va}"))
            && ip(&format!("-n {b} addr add 10.77.0.2/24 dev {vb}"))
            && [(a, &va), (b, &vb)].into_iter().all(|(host, device)| {
                ip(&format!("-n {host} link set lo up"))
                    && ip(&format!("-n {host} link set {device} up"))
            });
        fine.then_some(hosts)
    }

    fn cut(&self) {
        let id = std::process::id();
        assert!(ip(&format!("-n {} link set qa{id} down", self.0[0])));
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &self.0 {
            ip(&format!("netns del {host}"));
        }
    }
}

#[test]
fn a_dead_link_is_noticed_by_both_sides_in_about_two_seconds() {
    let Some(hosts) = Hosts::new() else {
        println!("skipped: this needs root, network namespaces and the program `ip`");
        return;
    };
    let test = std::env::current_exe().unwrap();
    let ranks: Vec<_> = [0, 1, 1]
        .into_iter()
        .enumerate()
        .map(|(rank, host)| {
            Command::new("ip")
                .args(["netns", "exec", &hosts.0[host]])
                .arg(&test)
                .args(["rank", "--exact", "--nocapture", "--test-threads=1"])
                .env("TEST_ROLE", "rank")
                .env("QUINTET_RANK", rank.to_string())
                .env("QUINTET_WORLD_SIZE", "3")
                .env("QUINTET_MASTER_ADDR", "10.77.0.1")
                .env("QUINTET_TIMEOUT", "20")
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    thread::sleep(Duration::from_millis(1500));
    let begin = Instant::now();
    hosts.cut();
    let ends: Vec<Output> = ranks
        .into_iter()
        .map(|rank| rank.wait_with_output().unwrap())
        .collect();
    let took = begin.elapsed();
    for (rank, end) in ends.iter().enumerate() {
        let text = String::from_utf8_lossy(&end.stdout);
        let expected: &[&str] = if rank == 0 {
            &["end: lost 1", "end: lost 2"]
        } else {
            &["end: lost 0"]
        };
        assert!(text.contains("ready"), "rank {rank} never began: {text}");
        assert!(
            expected.iter().any(|end| text.contains(end)),
            "rank {rank}: {text}"
        );
    }
    assert!(took < Duration::from_millis(2500), "{took:?}");
}
