//! The flight recorder (`std`): the last calls of a rank, kept where they outlive it.
//!
//! ```text
//! call       queued ------> begun ------> done | failed        times in us since the recorder began
//!              |              |              |
//! ring      [ 0 | 1 | 2 | ... | N-1 ]   number % N: one slot, written anew at each change
//!
//! file      header | N lines of LINE bytes | one line for each group, at its end
//!           each line is JSON, padded with spaces to its place
//! ```
//!
//! With a file, every change goes to the kernel at once, so that a rank that is killed, or hangs for ever,
//! leaves what it was doing. [`merge`] reads the rings of all ranks and says who is at which call. PyTorch's
//! flight recorder for NCCL has the same purpose.

use std::{
    collections::HashMap,
    fmt::Write as _,
    format,
    fs::{self, File},
    io::{self, Seek, SeekFrom, Write as _},
    path::{Path, PathBuf},
    string::{String, ToString},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime, UNIX_EPOCH},
    vec::Vec,
};

use crate::{Error, Made, Observed, Observer, Result};

mod merge;

pub use merge::{Absent, Blame, Standing, merge};

/// How far a call has got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Asked for; it waits for what was started before it, or for its gate.
    Queued,
    /// Announced, or its message handed over for sending.
    Begun,
    /// Over, well.
    Done,
    /// Over with an error.
    Failed,
}

impl State {
    const ALL: [Self; 4] = [Self::Queued, Self::Begun, Self::Done, Self::Failed];

    /// The state's name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Begun => "begun",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }

    /// The state of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }
}

/// One call of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Which call of the rank, over all groups, from 0.
    pub number: u64,
    /// Place of the group in [`Ring::groups`].
    pub group: usize,
    /// The operation's name: `all_reduce`, `send`, ...
    pub op: String,
    /// Of a collective its number in the group, from 0, once begun.
    pub sequence: Option<u64>,
    /// Type of the elements, by name.
    pub dtype: String,
    /// Elements.
    pub len: usize,
    /// Of a message, the other end (global rank) and the tag.
    pub peer: Option<(usize, u64)>,
    /// Where in the program it was called, as `path:line`; empty where that is not known.
    pub site: String,
    /// How far it has got.
    pub state: State,
    /// Microseconds since the recorder began: when it was queued, begun and over.
    pub at: [Option<u64>; 3],
    /// The error it ended with; else empty.
    pub error: String,
}

/// A group, as the ring names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Group {
    /// Its name.
    pub name: String,
    /// Its members, global, in group order.
    pub ranks: Vec<usize>,
}

/// The last calls of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    /// The rank, global.
    pub rank: usize,
    /// When the recorder began, in microseconds since 1970.
    pub began: u64,
    /// Groups in the order in which they first called.
    pub groups: Vec<Group>,
    /// Calls, oldest first.
    pub entries: Vec<Entry>,
}

/// Records the calls of one rank, of all its groups.
#[derive(Debug)]
pub struct Recorder {
    start: Instant,
    slots: usize,
    state: Mutex<Recording>,
}

#[derive(Debug)]
struct Recording {
    ring: Ring,
    /// The next call's number.
    next: u64,
    known: HashMap<Group, usize>,
    file: Option<File>,
}

/// Bytes of a line of a file, its end included.
pub const LINE: usize = 640;

/// Calls that are kept unless something else is asked for.
pub const SLOTS: usize = 256;

/// Bytes of an error's text that are kept.
const ERROR: usize = 160;

impl Recorder {
    /// A recorder for `rank` that keeps its last `slots` calls (at least one) in memory.
    #[must_use]
    pub fn new(rank: usize, slots: usize) -> Self {
        let began = SystemTime::now().duration_since(UNIX_EPOCH);
        let ring = Ring {
            rank,
            began: began.map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX)),
            groups: Vec::new(),
            entries: Vec::new(),
        };
        Self {
            start: Instant::now(),
            slots: slots.max(1),
            state: Mutex::new(Recording {
                ring,
                next: 0,
                known: HashMap::new(),
                file: None,
            }),
        }
    }

    /// One that also writes to [`Recorder::path`] in `folder`, which is made where there is none; a file
    /// of an earlier run is replaced.
    ///
    /// # Errors
    /// [`Error::System`] where the file cannot be made.
    pub fn in_folder(folder: &Path, rank: usize, slots: usize) -> Result<Self> {
        let recorder = Self::new(rank, slots);
        let path = Self::path(folder, rank);
        let failed = |e: io::Error| Error::System {
            what: "make a recorder's file",
            reason: format!("{}: {e}", path.display()),
        };
        fs::create_dir_all(folder).map_err(failed)?;
        let mut file = File::create(&path).map_err(failed)?;
        {
            let mut state = recorder.lock();
            let blank = line(String::new());
            let mut text = line(format!(
                "{{\"rank\": {rank}, \"began\": {}, \"slots\": {}}}",
                state.ring.began, recorder.slots
            ));
            (0..recorder.slots).for_each(|_| text += &blank);
            file.write_all(text.as_bytes()).map_err(failed)?;
            state.file = Some(file);
        }
        Ok(recorder)
    }

    /// Where the recorder of `rank` writes in `folder`.
    #[must_use]
    pub fn path(folder: &Path, rank: usize) -> PathBuf {
        folder.join(format!("rank-{rank:05}.jsonl"))
    }

    /// What is kept now.
    #[must_use]
    pub fn ring(&self) -> Ring {
        let mut ring = self.lock().ring.clone();
        ring.entries.sort_unstable_by_key(|entry| entry.number);
        ring
    }

    fn ended(&self, number: u64, error: Option<&Error>) {
        let now = self.now();
        self.change(number, |entry| {
            entry.at[2] = Some(now);
            entry.state = State::Done;
            if let Some(error) = error {
                entry.state = State::Failed;
                entry.error = cut(&error.to_string(), ERROR);
            }
        });
    }

    fn change(&self, number: u64, change: impl FnOnce(&mut Entry)) {
        let at = self.place(number);
        let mut state = self.lock();
        // A call that lasted longer than the ring is long has lost its slot.
        let entry = state.ring.entries.get_mut(at);
        if let Some(entry) = entry.filter(|entry| entry.number == number) {
            change(entry);
            state.write(at);
        }
    }

    fn place(&self, number: u64) -> usize {
        (number % self.slots as u64) as usize
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, Recording> {
        // Entries change in single steps: what a panicking holder left is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for Recorder {
    /// The call's number.
    fn made(&self, call: &Made<'_>) -> u64 {
        let now = self.now();
        let mut state = self.lock();
        let group = state.group(call.group, call.ranks, self.slots);
        let number = state.next;
        state.next += 1;
        let entry = Entry {
            number,
            group,
            op: call.op.to_string(),
            sequence: None,
            dtype: call.dtype.to_string(),
            len: call.len,
            peer: call.peer,
            site: call.site.map_or_else(String::new, |s| s.to_string()),
            state: State::Queued,
            at: [Some(now), None, None],
            error: String::new(),
        };
        let at = self.place(number);
        if at < state.ring.entries.len() {
            state.ring.entries[at] = entry;
        } else {
            state.ring.entries.push(entry);
        }
        state.write(at);
        number
    }

    fn begun(&self, number: u64, sequence: Option<u64>) {
        let now = self.now();
        self.change(number, |entry| {
            entry.state = State::Begun;
            entry.sequence = sequence;
            entry.at[1] = Some(now);
        });
    }

    fn over(&self, call: &Observed<'_>) {
        self.ended(call.ticket, call.error);
    }
}

impl Recording {
    fn group(&mut self, name: &str, ranks: &[usize], slots: usize) -> usize {
        let group = Group {
            name: name.to_string(),
            ranks: ranks.to_vec(),
        };
        if let Some(&at) = self.known.get(&group) {
            return at;
        }
        let at = self.ring.groups.len();
        if let Some(file) = &mut self.file {
            let text = format!(
                "{{\"group\": {at}, \"name\": {}, \"ranks\": {:?}}}\n",
                quoted(name),
                ranks
            );
            // The recorder is a help, not a duty: where its disk is full the run goes on.
            let _ = file.seek(SeekFrom::End(0)).and_then(|end| {
                debug_assert!(end >= (LINE * (slots + 1)) as u64);
                file.write_all(text.as_bytes())
            });
        }
        self.ring.groups.push(group.clone());
        self.known.insert(group, at);
        at
    }

    /// Writes one slot to the file, where there is one.
    fn write(&mut self, at: usize) {
        let Some(file) = &mut self.file else { return };
        let text = line(json(&self.ring.entries[at]));
        let to = SeekFrom::Start((LINE * (at + 1)) as u64);
        let _ = file.seek(to).and_then(|_| file.write_all(text.as_bytes()));
    }
}

/// An entry as one JSON object.
fn json(entry: &Entry) -> String {
    let number = |n: Option<u64>| n.map_or_else(|| String::from("null"), |n| n.to_string());
    let [queued, begun, over] = entry.at.map(number);
    let mut text = format!(
        "{{\"n\": {}, \"group\": {}, \"op\": {}, \"seq\": {}, \"dtype\": {}, \"len\": {}",
        entry.number,
        entry.group,
        quoted(&entry.op),
        number(entry.sequence),
        quoted(&entry.dtype),
        entry.len
    );
    if let Some((peer, tag)) = entry.peer {
        let _ = write!(text, ", \"peer\": {peer}, \"tag\": {tag}");
    }
    let _ = write!(
        text,
        ", \"site\": {}, \"state\": \"{}\", \"queued\": {queued}, \"begun\": {begun}, \"over\": {over}, \"error\": {}}}",
        quoted(&entry.site),
        entry.state.name(),
        quoted(&entry.error)
    );
    text
}

/// A line of [`LINE`] bytes.
fn line(mut text: String) -> String {
    debug_assert!(text.len() < LINE, "{text}");
    text.extend(core::iter::repeat_n(
        ' ',
        (LINE - 1).saturating_sub(text.len()),
    ));
    text.push('\n');
    text
}

/// A JSON string. What would need an escape is replaced, so that no text is longer than it seems.
fn quoted(text: &str) -> String {
    let plain = text.chars().map(|c| match c {
        '"' => '\'',
        '\\' => '/',
        c if c.is_control() => ' ',
        c => c,
    });
    format!("\"{}\"", plain.collect::<String>())
}

/// The first `bytes` bytes, or a few less, so that no character is cut.
fn cut(text: &str, bytes: usize) -> String {
    let mut end = bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::{DType, transport::Site};

    fn made(len: usize) -> Made<'static> {
        Made {
            group: "world",
            ranks: &[0, 3],
            op: "all_reduce",
            dtype: DType::F32,
            len,
            peer: None,
            site: Some(Site::new("a/\"very\"/strange\\path.rs", 7)),
        }
    }

    #[test]
    fn the_last_calls_are_kept() {
        let recorder = Recorder::new(3, 4);
        for len in 0..10 {
            let number = recorder.made(&made(len));
            recorder.begun(number, Some(len as u64));
            if len != 9 {
                recorder.ended(number, None);
            }
        }
        // One that has lost its slot changes nobody else's.
        recorder.ended(0, Some(&Error::Aborted { rank: 0 }));
        let ring = recorder.ring();
        let lens: Vec<usize> = ring.entries.iter().map(|e| e.len).collect();
        assert_eq!(lens, [6, 7, 8, 9]);
        assert_eq!(ring.entries[2].state, State::Done);
        assert_eq!(ring.entries[3].state, State::Begun);
        assert_eq!(ring.groups.len(), 1);
    }

    #[test]
    fn the_longest_line_fits() {
        let entry = Entry {
            number: u64::MAX,
            group: usize::MAX,
            op: "reduce_scatter_v".into(),
            sequence: Some(u64::MAX),
            dtype: "bf16".into(),
            len: usize::MAX,
            peer: Some((usize::MAX, u64::MAX)),
            site: format!("{}:{}", "\\".repeat(Site::PATH), u32::MAX),
            state: State::Queued,
            at: [Some(u64::MAX); 3],
            error: "\"".repeat(ERROR),
        };
        assert!(json(&entry).len() < LINE, "{}", json(&entry).len());
    }
}
