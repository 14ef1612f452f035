//! Storages of messages between two uses.

use std::{sync::Mutex, vec, vec::Vec};

use super::lock;

/// Storages between uses: what was sent last is received into next.
#[derive(Debug, Default)]
pub(in super::super) struct Pool(Mutex<Vec<Vec<u64>>>);

impl Pool {
    /// At least `words` long, contents of any value.
    pub(in super::super) fn take(&self, words: usize) -> Vec<u64> {
        let mut spare = lock(&self.0);
        let fits = spare
            .iter()
            .enumerate()
            .filter(|(_, s)| s.capacity() >= words && s.capacity() <= 2 * words + 64);
        let at = fits.min_by_key(|(_, s)| s.capacity()).map(|(at, _)| at);
        match at.map(|at| spare.swap_remove(at)) {
            Some(mut storage) => {
                drop(spare);
                storage.resize(words, 0);
                storage
            }
            None => vec![0; words],
        }
    }

    /// Keeps a storage; of too many the smallest comes back.
    pub(in super::super) fn give(&self, storage: Vec<u64>) -> Option<Vec<u64>> {
        let mut spare = lock(&self.0);
        if storage.capacity() == 0 {
            return None;
        }
        if spare.len() < SPARE {
            spare.push(storage);
            return None;
        }
        let smallest = spare.iter_mut().min_by_key(|s| s.capacity());
        match smallest.filter(|s| s.capacity() < storage.capacity()) {
            Some(smallest) => Some(core::mem::replace(smallest, storage)),
            None => Some(storage),
        }
    }
}

/// Storages kept; more than the messages of one round of a world of this size.
const SPARE: usize = 16;
