//! Two hosts with a link between them: network namespaces of this one. They need root and `ip`; `tc` limits
//! the rate, `nft` (nftables) loses packets and leads connections elsewhere.
#![allow(dead_code)]

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Two namespaces, which go with the value.
pub struct Hosts {
    names: [String; 2],
    devices: [String; 2],
}

/// The address of each host on the link.
pub const ADDRESS: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

fn done(program: &str, words: &[&str]) -> bool {
    let done = Command::new(program).args(words).output();
    done.is_ok_and(|done| done.status.success())
}

fn ip(words: &str) -> bool {
    done("ip", &words.split(' ').collect::<Vec<_>>())
}

impl Hosts {
    /// None, with a reason on stdout, where they cannot be made.
    pub fn new() -> Option<Self> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let id = std::process::id() * 10 + NUMBER.fetch_add(1, Ordering::Relaxed) as u32;
        let hosts = Self {
            names: ["a", "b"].map(|side| format!("quintet-{id}-{side}")),
            devices: ["a", "b"].map(|side| format!("q{side}{id}")),
        };
        let ([a, b], [va, vb]) = (&hosts.names, &hosts.devices);
        let made = ip(&format!("netns add {a}"))
            && ip(&format!("netns add {b}"))
            && ip(&format!(
                "link add {va} netns {a} type veth peer name {vb} netns {b}"
            ))
            && (0..2).all(|host| {
                let (name, device, address) =
                    (&hosts.names[host], &hosts.devices[host], ADDRESS[host]);
                ip(&format!("-n {name} addr add {address}/24 dev {device}"))
                    && ip(&format!("-n {name} link set lo up"))
                    && ip(&format!("-n {name} link set {device} up"))
            });
        if !made {
            println!("skipped: this needs root, network namespaces and the program `ip`");
        }
        made.then_some(hosts)
    }

    /// Takes the link down.
    pub fn cut(&self) {
        let (name, device) = (&self.names[0], &self.devices[0]);
        assert!(ip(&format!("-n {name} link set {device} down")));
    }

    /// What each host sends into the link goes no faster than this, as in `1gbit`. Says so where the
    /// kernel cannot.
    pub fn limit(&self, rate: &str) -> bool {
        let limited = (0..2).all(|host| {
            let words = format!(
                "-n {} qdisc add dev {} root tbf rate {rate} burst 256kb latency 400ms",
                self.names[host], self.devices[host]
            );
            done("tc", &words.split(' ').collect::<Vec<_>>())
        });
        if !limited {
            println!("skipped: this needs `tc` and a kernel with tbf");
        }
        limited
    }

    /// A rule set for a host, as `nft -f` reads it; `LINK` stands for its end of the link.
    pub fn rules(&self, host: usize, text: &str) -> bool {
        let text = text.replace("LINK", &self.devices[host]);
        let fine = done("ip", &["netns", "exec", &self.names[host], "nft", &text]);
        if !fine {
            println!("skipped: this needs `nft` (nftables)");
        }
        fine
    }

    /// Packets that a host's rules have counted.
    pub fn counted(&self, host: usize) -> u64 {
        let listed = Command::new("ip")
            .args(["netns", "exec", &self.names[host], "nft", "list", "ruleset"])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&listed.stdout).into_owned();
        let mut words = text.split_whitespace().skip_while(|w| *w != "packets");
        words.nth(1).map_or(0, |n| n.parse().unwrap())
    }

    /// A program on a host, its output kept.
    pub fn command(&self, host: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.names[host]])
            .arg(program)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// This test binary's test `rank`, as so many ranks as are named hosts, on those hosts.
    pub fn ranks(&self, role: &str, hosts: &[usize], variables: &[(&str, &str)]) -> Vec<Child> {
        let test = std::env::current_exe().unwrap();
        let start = |(rank, &host): (usize, &usize)| {
            self.command(host, &test)
                .args(["rank", "--exact", "--nocapture", "--test-threads=1"])
                .env("TEST_ROLE", role)
                .env("QUINTET_RANK", rank.to_string())
                .env("QUINTET_WORLD_SIZE", hosts.len().to_string())
                .env("QUINTET_MASTER_ADDR", ADDRESS[hosts[0]])
                .env("QUINTET_TIMEOUT", "20")
                .env("QUINTET_HOST", ["a", "b"][host])
                .envs(variables.iter().copied())
                .spawn()
                .unwrap()
        };
        hosts.iter().enumerate().map(start).collect()
    }
}

/// What each printed at its end.
pub fn ends(ranks: Vec<Child>) -> Vec<String> {
    let end = |rank: Child| {
        let Output { stdout, stderr, .. } = rank.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&stdout).into_owned();
        text + &String::from_utf8_lossy(&stderr)
    };
    ranks.into_iter().map(end).collect()
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &self.names {
            ip(&format!("netns del {host}"));
        }
    }
}
