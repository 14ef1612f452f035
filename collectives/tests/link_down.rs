//! A dead link between hosts, which are network namespaces here. Needs root and `ip`; says so where it
//! cannot run.
#![cfg(target_os = "linux")]

#[path = "common/hosts.rs"]
mod hosts;

use std::thread;
use std::time::{Duration, Instant};

use hosts::{Hosts, ends};
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

#[test]
fn a_dead_link_is_noticed_by_both_sides_in_about_two_seconds() {
    let Some(hosts) = Hosts::new() else {
        return;
    };
    let ranks = hosts.ranks("work", &[0, 1, 1], &[]);
    thread::sleep(Duration::from_millis(1500));
    let begin = Instant::now();
    hosts.cut();
    let ends = ends(ranks);
    let took = begin.elapsed();
    for (rank, text) in ends.iter().enumerate() {
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
