//! Bytes of any length, for what is no tensor: reports, texts, serialized values.

use std::vec::Vec;

use super::Communicator;
use crate::{Result, transport::Transport};

impl<T: Transport + Send + 'static> Communicator<T> {
    /// What every rank gives, in rank order, at the root; nothing elsewhere. Lengths may differ and
    /// are exchanged first.
    ///
    /// ```
    /// use quintet_collectives::World;
    /// let all = World::run(3, |comm| comm.gather_bytes("abc"[..comm.rank()].as_bytes(), 1))?;
    /// assert_eq!(all, [vec![], vec![b"".to_vec(), b"a".to_vec(), b"ab".to_vec()], vec![]]);
    /// # Ok::<(), quintet_collectives::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Communicator::gather_v`].
    #[track_caller]
    pub fn gather_bytes(&self, bytes: &[u8], root: usize) -> Result<Vec<Vec<u8>>> {
        let mut lens = std::vec![0i64; self.world()];
        self.all_gather(&[bytes.len() as i64], &mut lens)?;
        // Each was a length of a slice on its rank.
        let counts: Vec<usize> = lens.iter().map(|&len| len as usize).collect();
        let here = self.rank() == root;
        let mut all = std::vec![0u8; if here { counts.iter().sum() } else { 0 }];
        self.gather_v(bytes, &mut all, &counts, root)?;
        let mut rest = &all[..];
        let cut = |&len: &usize| {
            let (first, after) = rest.split_at(len);
            rest = after;
            first.to_vec()
        };
        Ok(if here {
            counts.iter().map(cut).collect()
        } else {
            Vec::new()
        })
    }

    /// What the root gives, on every rank; what others give is not looked at.
    ///
    /// ```
    /// use quintet_collectives::World;
    /// let all = World::run(3, |comm| comm.broadcast_bytes(&[7; 5][..comm.rank()], 2))?;
    /// assert_eq!(all, [[7, 7], [7, 7], [7, 7]]);
    /// # Ok::<(), quintet_collectives::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Communicator::broadcast`].
    #[track_caller]
    pub fn broadcast_bytes(&self, bytes: &[u8], root: usize) -> Result<Vec<u8>> {
        let mut len = [bytes.len() as i64];
        self.broadcast(&mut len, root)?;
        let mut all = if self.rank() == root {
            bytes.to_vec()
        } else {
            std::vec![0; len[0] as usize]
        };
        self.broadcast(&mut all, root)?;
        Ok(all)
    }
}
