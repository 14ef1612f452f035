//! Ranks that are processes: what each gives lies in a folder, a file a post.
//!
//! ```text
//! FOLDER/ID/here-RANK, over-RANK, aborted-RANK      who has come, is through, has given up
//! FOLDER/ID/all-COUNT-RANK                          what a rank gives to its COUNTth collective
//! FOLDER/ID/FROMtoTO-COUNT                          a message
//! ```
//!
//! A post appears whole, by its name's change, and goes once nobody can need it any more.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fs, io};

use crate::state::Op;

/// A rank's view of a communicator's folder. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Mail {
    folder: PathBuf,
    rank: usize,
    world: usize,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Collectives that are over.
    collectives: usize,
    /// Whether what this rank gives to the next one is posted.
    given: bool,
    /// By pair: messages that are over.
    messages: BTreeMap<(usize, usize), usize>,
}

/// What a post says of its call; the bytes that the rank gives follow.
fn head(op: &Op) -> String {
    format!("{:?} {:?} {}\n", op.verb, op.kind, op.len)
}

impl Mail {
    pub(crate) fn open(
        folder: &Path,
        id: u64,
        (rank, world): (usize, usize),
    ) -> Result<Self, String> {
        let folder = folder.join(format!("{id:x}"));
        let said = |error: io::Error| format!("{}: {error}", folder.display());
        fs::create_dir_all(&folder).map_err(said)?;
        let mail = Self {
            folder: folder.clone(),
            rank,
            world,
            counts: Arc::default(),
        };
        mail.mark("here");
        Ok(mail)
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn world(&self) -> usize {
        self.world
    }

    /// Says something of this rank. Whoever is the last to be over clears the folder away.
    pub(crate) fn mark(&self, what: &str) {
        self.post(&format!("{what}-{}", self.rank), b"");
        if what == "over" && self.all("over") && self.first("aborted").is_none() {
            // Others may still look whether all are over.
            let _ = fs::write(self.folder.with_extension("over"), b"");
            let _ = fs::remove_dir_all(&self.folder);
        }
    }

    fn is(&self, what: &str, rank: usize) -> bool {
        self.folder.join(format!("{what}-{rank}")).exists()
    }

    /// Whether all ranks have said so.
    pub(crate) fn all(&self, what: &str) -> bool {
        let cleared = self.folder.with_extension("over").exists();
        cleared || (0..self.world).all(|rank| self.is(what, rank))
    }

    /// The first rank that has said so.
    pub(crate) fn first(&self, what: &str) -> Option<usize> {
        (0..self.world).find(|&rank| self.is(what, rank))
    }

    fn post(&self, name: &str, bytes: &[u8]) {
        let (path, draft) = (
            self.folder.join(name),
            self.folder.join(format!("{name}.draft")),
        );
        // A folder that is gone has nobody who waits.
        let _ = fs::write(&draft, bytes).and_then(|()| fs::rename(draft, path));
    }

    fn read(&self, name: &str, op: &Op, other: &str) -> Result<Option<Vec<u8>>, String> {
        let Ok(mut bytes) = fs::read(self.folder.join(name)) else {
            return Ok(None);
        };
        let end = bytes
            .iter()
            .position(|b| *b == b'\n')
            .map_or(0, |at| at + 1);
        let rest = bytes.split_off(end);
        let theirs = String::from_utf8_lossy(&bytes);
        if theirs != other {
            return Err(format!("{op:?} meets {}", theirs.trim_end()));
        }
        Ok(Some(rest))
    }

    /// Posts what this rank gives to the collective, once.
    pub(crate) fn give(&self, op: &Op, bytes: impl FnOnce() -> Vec<u8>) {
        let mut counts = self.counts();
        if counts.given {
            return;
        }
        counts.given = true;
        let mut post = head(op).into_bytes();
        post.extend(bytes());
        self.post(&format!("all-{}-{}", counts.collectives, self.rank), &post);
    }

    /// What all have given to it, in rank order, once they have.
    pub(crate) fn everybodys(&self, op: &Op) -> Result<Option<Vec<Vec<u8>>>, String> {
        let mut counts = self.counts();
        let count = counts.collectives;
        let given = |rank| self.read(&format!("all-{count}-{rank}"), op, &head(op));
        let all: Result<Option<Vec<_>>, String> = (0..self.world).map(given).collect();
        if let Ok(Some(_)) = all {
            // Who gives to this one has read what was given to the one before.
            if let Some(before) = count.checked_sub(1) {
                let _ = fs::remove_file(self.folder.join(format!("all-{before}-{}", self.rank)));
            }
            (counts.collectives, counts.given) = (count + 1, false);
        }
        all
    }

    fn next(&self, from: usize, to: usize) -> String {
        let mut counts = self.counts();
        let count = counts.messages.entry((from, to)).or_default();
        *count += 1;
        format!("{from}to{to}-{count}")
    }

    /// Posts a message.
    pub(crate) fn send(&self, to: usize, op: &Op, bytes: &[u8]) {
        let mut post = format!("{:?} {}\n", op.kind, op.len).into_bytes();
        post.extend_from_slice(bytes);
        self.post(&self.next(self.rank, to), &post);
    }

    /// Takes the next message, once it is there.
    pub(crate) fn receive(&self, from: usize, op: &Op) -> Result<Option<Vec<u8>>, String> {
        let count = self
            .counts()
            .messages
            .get(&(from, self.rank))
            .map_or(0, |n| *n);
        let name = format!("{from}to{}-{}", self.rank, count + 1);
        let got = self.read(&name, op, &format!("{:?} {}\n", op.kind, op.len))?;
        if got.is_some() {
            let _ = self.next(from, self.rank);
            let _ = fs::remove_file(self.folder.join(name));
        }
        Ok(got)
    }
}
