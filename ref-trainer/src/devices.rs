//! Which GPU is whose: the one rule, for ranks that are threads and for ranks that are processes.
//!
//! ```text
//! thread     its rank -----------------------+
//! process    Seat { host, local rank } of all +--> number on its host --% GPUs that it sees--> ordinal, round
//!                                                                           ordinal --driver--> bus id
//! NCCL moves what lies there: two ranks on one bus id of a host are refused, a tp group on two hosts is said
//! ```

use serde::{Deserialize, Serialize};

/// What one process knows of its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// Its host.
    pub host: String,
    /// Its number on the host, where its launcher says so; else it is counted.
    pub local_rank: Option<usize>,
}

/// The number of a rank on its host.
#[must_use]
pub fn number(seats: &[Seat], rank: usize) -> usize {
    let before = |seat: &Seat| seats[..rank].iter().filter(|s| s.host == seat.host).count();
    let seat = seats.get(rank);
    seat.map_or(0, |seat| seat.local_rank.unwrap_or_else(|| before(seat)))
}

/// Of the `there` GPUs that a process sees, the one of the rank with this number on its host, and how many ranks
/// have it before this one. A process that sees one GPU has that, as `srun --gpus-per-task=1` means it.
#[must_use]
pub fn ordinal(number: usize, there: usize) -> (usize, usize) {
    let there = there.max(1);
    (number % there, number / there)
}

/// A rank's GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// The host.
    pub host: String,
    /// Where it sits in the host, which is the same under whatever number a process sees it.
    pub bus_id: String,
}

/// Two ranks that would share a GPU, in a sentence, if there are such.
#[must_use]
pub fn shared(devices: &[Device]) -> Option<String> {
    let mut pairs = (0..devices.len()).flat_map(|b| (0..b).map(move |a| (a, b)));
    let (a, b) = pairs.find(|&(a, b)| devices[a] == devices[b])?;
    let Device { host, bus_id } = &devices[a];
    Some(format!(
        "ranks {a} and {b} would share GPU {bus_id} of {host}, which NCCL refuses; start one rank a GPU, or set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer"
    ))
}

/// A tensor-parallel group that leaves its host, in a sentence, if there is one.
#[must_use]
pub fn apart(seats: &[Seat], groups: impl IntoIterator<Item = Vec<usize>>) -> Option<String> {
    groups.into_iter().find_map(|ranks| {
        let first = *ranks.first()?;
        let host = |rank: usize| seats.get(rank).map(|seat| &seat.host);
        let other = ranks.iter().find(|&&rank| host(rank) != host(first))?;
        Some(format!(
            "ranks {first} and {other} are of one tp group and on {} and {}: each layer waits for the network between them; tp is best kept within a host",
            host(first)?, host(*other)?
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seats(places: &[(&str, Option<usize>)]) -> Vec<Seat> {
        let seat = |&(host, local_rank): &(&str, _)| Seat {
            host: String::from(host),
            local_rank,
        };
        places.iter().map(seat).collect()
    }

    #[test]
    fn a_rank_takes_the_gpu_of_its_number_on_its_host() {
        let numbers = |places: &[(&str, Option<usize>)]| -> Vec<usize> {
            let seats = seats(places);
            (0..seats.len()).map(|rank| number(&seats, rank)).collect()
        };
        // torchrun, srun and mpirun say it; nobody does: by rank among those of the host.
        assert_eq!(
            numbers(&[("a", Some(0)), ("a", Some(1)), ("b", Some(0))]),
            [0, 1, 0]
        );
        assert_eq!(numbers(&[("a", None), ("b", None), ("a", None)]), [0, 0, 1]);
        // One GPU each, as many as ranks, fewer.
        assert_eq!(ordinal(3, 1), (0, 3));
        assert_eq!([0, 1, 7].map(|n| ordinal(n, 8)), [(0, 0), (1, 0), (7, 0)]);
        assert_eq!(
            [0, 1, 2, 3].map(|n| ordinal(n, 2)),
            [(0, 0), (1, 0), (0, 1), (1, 1)]
        );
    }

    #[test]
    fn two_ranks_on_a_gpu_and_tp_over_hosts_are_found() {
        let device = |host: &str, bus_id: &str| Device {
            host: host.into(),
            bus_id: bus_id.into(),
        };
        let [one, two] = ["0000:3b:00.0", "0000:af:00.0"];
        let apart_all = [device("a", one), device("a", two), device("b", one)];
        assert_eq!(shared(&apart_all), None);
        let said = shared(&[device("a", two), device("b", one), device("b", one)]).unwrap();
        assert!(
            said.starts_with("ranks 1 and 2 would share GPU 0000:3b:00.0 of b"),
            "{said}"
        );
        let seats = seats(&[("a", None), ("a", None), ("b", None)]);
        assert_eq!(apart(&seats, [vec![0, 1], vec![2]]), None);
        let said = apart(&seats, [vec![0, 1], vec![1, 2]]).unwrap();
        assert!(
            said.starts_with("ranks 1 and 2 are of one tp group and on a and b"),
            "{said}"
        );
    }
}
