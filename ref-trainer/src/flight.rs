//! What ranks recorded of their calls, read back and put side by side.
//!
//! A file is written slot by slot while its rank runs (`quintet_collectives::recorder`), so it may end or
//! break anywhere; what can be read of it is used.

use std::fs;
use std::path::Path;

use quintet_collectives::recorder::{Entry, Group, Ring, State, merge};
use serde_json::Value;

use crate::failure::Failure;

/// Says of the records in `folder` which rank is at which call.
///
/// # Errors
/// Exit 3 where there is no record, or one that is none.
pub fn describe(folder: &Path) -> Result<String, Failure> {
    Ok(merge(&read(folder)?).to_string())
}

/// The rings of all ranks in `folder`, by rank.
///
/// # Errors
/// As [`describe`].
pub fn read(folder: &Path) -> Result<Vec<Ring>, Failure> {
    let listed = fs::read_dir(folder).map_err(|e| Failure::file("read", folder, &e))?;
    let mut paths = Vec::new();
    for item in listed {
        let path = item.map_err(|e| Failure::file("read", folder, &e))?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
        if name.starts_with("rank-") && name.ends_with(".jsonl") {
            paths.push(path);
        }
    }
    if paths.is_empty() {
        return Err(Failure::data(format!(
            "{} holds no record; train --recorder DIR writes rank-*.jsonl there",
            folder.display()
        )));
    }
    paths.sort();
    paths.iter().map(|path| ring(path)).collect()
}

fn ring(path: &Path) -> Result<Ring, Failure> {
    let bytes = fs::read(path).map_err(|e| Failure::file("read", path, &e))?;
    let text = String::from_utf8_lossy(&bytes);
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let header: Option<Value> = lines.next().and_then(|l| serde_json::from_str(l).ok());
    let number = |key: &str| header.as_ref().and_then(|h| h[key].as_u64());
    let (Some(rank), Some(began)) = (number("rank"), number("began")) else {
        return Err(Failure::data(format!(
            "{} is no recorder's file: its first line names no rank",
            path.display()
        )));
    };
    let mut ring = Ring {
        rank: place(rank),
        began,
        groups: Vec::new(),
        entries: Vec::new(),
    };
    // A line that was being written when its rank was killed is left out.
    for value in lines.filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        if let Some(group) = group(&value) {
            ring.groups.push(group);
        } else {
            ring.entries.extend(entry(&value));
        }
    }
    let groups = ring.groups.len();
    ring.entries.retain(|entry| entry.group < groups);
    ring.entries.sort_unstable_by_key(|entry| entry.number);
    Ok(ring)
}

fn group(value: &Value) -> Option<Group> {
    let ranks = value["ranks"].as_array()?;
    Some(Group {
        name: value["name"].as_str()?.into(),
        ranks: ranks.iter().filter_map(Value::as_u64).map(place).collect(),
    })
}

fn entry(value: &Value) -> Option<Entry> {
    let text = |key: &str| value[key].as_str().map(String::from);
    let number = |key: &str| value[key].as_u64();
    Some(Entry {
        number: number("n")?,
        group: place(number("group")?),
        op: text("op")?,
        sequence: number("seq"),
        dtype: text("dtype")?,
        len: place(number("len")?),
        peer: number("peer").map(place).zip(number("tag")),
        site: text("site")?,
        state: State::named(value["state"].as_str()?)?,
        at: ["queued", "begun", "over"].map(number),
        error: text("error")?,
    })
}

/// A count of this machine's, from a file.
fn place(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use quintet_collectives::{Recorder, ReduceOp, World};

    use super::*;
    use crate::report::test_dir::TestDir;

    #[test]
    fn a_file_reads_as_what_was_recorded_while_a_rank_still_waits() {
        let dir = TestDir::new("flight");
        let folder = dir.path();
        let _ = World::run(3, |comm| {
            let recorder = Arc::new(Recorder::in_folder(folder, comm.rank(), 8)?);
            let rank = comm.rank();
            let deadline = Duration::from_secs(5);
            let comm = comm.with_deadline(deadline).with_recorder(&recorder);
            for len in 0..20 {
                comm.all_reduce(&mut vec![0f32; len], ReduceOp::Sum)?;
            }
            if rank == 2 {
                std::thread::sleep(Duration::from_millis(300));
                let said = describe(folder).unwrap();
                assert!(said.contains("ranks 0 1 in call 20, broadcast"), "{said}");
                assert!(said.contains("rank 2 is in no call"), "{said}");
                let mine = read(folder).unwrap().swap_remove(2);
                assert_eq!(mine, recorder.ring());
                assert_eq!(mine.entries.len(), 8);
                comm.abort();
                return Ok(());
            }
            comm.broadcast(&mut [1u8; 5], 0)
        });
    }

    #[test]
    fn what_is_damaged_is_left_out_and_what_is_no_record_refused() {
        let dir = TestDir::new("flight-damaged");
        let folder = dir.path();
        assert!(describe(folder).unwrap_err().sentence.contains("no record"));
        let path = Recorder::path(folder, 0);
        fs::write(&path, "hello\n").unwrap();
        assert!(
            describe(folder)
                .unwrap_err()
                .sentence
                .contains("names no rank")
        );
        for cut in 0..3000 {
            let recorder = Arc::new(Recorder::in_folder(folder, 0, 2).unwrap());
            let ran = World::run(1, |comm| comm.with_recorder(&recorder).barrier());
            ran.unwrap();
            let bytes = fs::read(&path).unwrap();
            if cut > bytes.len() {
                break;
            }
            fs::write(&path, &bytes[..bytes.len() - cut]).unwrap();
            // Any outcome but a panic.
            let _ = describe(folder);
        }
    }
}
