//! Which ranks share a host: what a two-level plan and a topology are told.
//!
//! ```text
//! ids [7, 7, 3, 7, 3]  ->  host 0: ranks 0 1 3      host 1: ranks 2 4
//! ```

use alloc::{sync::Arc, vec::Vec};

/// The hosts of a world, numbered in the order in which their first ranks come. Hosts may hold
/// different numbers of ranks, in any order. Cloning shares the table.
///
/// ```
/// use quintet_collectives::plan::Hosts;
/// let hosts = Hosts::new(&[7, 7, 3, 7, 3]);
/// assert_eq!((hosts.len(), hosts.members(0), hosts.members(1)), (2, &[0, 1, 3][..], &[2, 4][..]));
/// assert_eq!((hosts.host(4), hosts.place(4)), (1, 1));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosts(Arc<Table>);

#[derive(Debug, PartialEq, Eq)]
struct Table {
    host: Vec<usize>,
    place: Vec<usize>,
    members: Vec<Vec<usize>>,
}

impl Hosts {
    /// From one host id per rank; equal ids are one host.
    #[must_use]
    pub fn new(ids: &[usize]) -> Self {
        let mut seen: Vec<(usize, usize)> = Vec::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        let (mut host, mut place) = (Vec::new(), Vec::new());
        for (rank, id) in ids.iter().enumerate() {
            let at = match seen.binary_search_by_key(id, |(id, _)| *id) {
                Ok(at) => seen[at].1,
                Err(at) => {
                    seen.insert(at, (*id, members.len()));
                    members.push(Vec::new());
                    members.len() - 1
                }
            };
            host.push(at);
            place.push(members[at].len());
            members[at].push(rank);
        }
        Self(Arc::new(Table {
            host,
            place,
            members,
        }))
    }

    /// Consecutive ranks, `per_host` to a host; the last host may hold fewer.
    #[must_use]
    pub fn blocks(world: usize, per_host: usize) -> Self {
        let ids: Vec<usize> = (0..world).map(|rank| rank / per_host.max(1)).collect();
        Self::new(&ids)
    }

    /// Ranks in all.
    #[must_use]
    pub fn world(&self) -> usize {
        self.0.host.len()
    }

    /// How many hosts there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.members.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.members.is_empty()
    }

    /// The host of a rank.
    #[must_use]
    pub fn host(&self, rank: usize) -> usize {
        self.0.host[rank]
    }

    /// The place of a rank among the ranks of its host.
    #[must_use]
    pub fn place(&self, rank: usize) -> usize {
        self.0.place[rank]
    }

    /// The ranks of a host, ascending.
    #[must_use]
    pub fn members(&self, host: usize) -> &[usize] {
        &self.0.members[host]
    }

    /// Ranks on the fullest host; 0 where there is none.
    #[must_use]
    pub fn most(&self) -> usize {
        self.0.members.iter().map(Vec::len).max().unwrap_or(0)
    }
}
