//! Event files for TensorBoard, as `--tensorboard-dir DIR` asks for them.
//!
//! ```text
//! file    events.out.tfevents.<seconds>.<host>.<process>.0       records one after another
//! record  length u64 | masked CRC-32C of it | Event | masked CRC-32C of the event     (TFRecord)
//! Event   1 wall_time  2 step  3 file_version | 5 Summary { 1 Value { 1 tag  2 simple_value } } | 7 SessionLog
//! ```
//!
//! Scalars alone, so three messages of protobuf, written by hand. Tags are torchtitan's where it has
//! them (`throughput(tps)` counts tokens per rank, as there), and ours beside them.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::StepReport;
use crate::failure::Failure;

/// An event file that grows by a record a step.
#[derive(Debug)]
pub struct EventFile {
    path: PathBuf,
    file: File,
    world: u64,
    /// Tokens of the steps written so far.
    tokens: u64,
}

impl EventFile {
    /// Makes a new file in `dir` for a run of `world` ranks that has done `done` steps. What earlier
    /// files there say of later steps is void, and TensorBoard is told so.
    ///
    /// # Errors
    /// Exit 3 where the folder or file cannot be made.
    pub fn create(dir: &Path, world: usize, done: u64) -> Result<Self, Failure> {
        fs::create_dir_all(dir).map_err(|e| Failure::file("make", dir, &e))?;
        let (now, process) = (seconds(), std::process::id());
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy().replace(['/', ' '], "-");
        // Two runs of one process in one second shall not meet.
        let mut tries = (0..1000).map(|n| {
            let name = format!("events.out.tfevents.{now:010.0}.{host}.{process}.{n}");
            let path = dir.join(name);
            let file = OpenOptions::new().append(true).create_new(true).open(&path);
            (path, file)
        });
        let taken = |made: &(PathBuf, std::io::Result<File>)| {
            let error = made.1.as_ref().err().map(std::io::Error::kind);
            error != Some(std::io::ErrorKind::AlreadyExists)
        };
        let Some((path, file)) = tries.find(taken) else {
            return Err(Failure::data(format!(
                "{} is full of event files of this second; try again",
                dir.display()
            )));
        };
        let file = file.map_err(|e| Failure::file("make", &path, &e))?;
        let mut log = Self {
            path,
            file,
            world: world.max(1) as u64,
            tokens: 0,
        };
        log.write(&version(now))?;
        log.write(&session_start(now, done + 1))?;
        Ok(log)
    }

    /// Writes a step, in one piece.
    ///
    /// # Errors
    /// Exit 3 where it cannot be written.
    pub fn append(&mut self, report: &StepReport) -> Result<(), Failure> {
        self.tokens += report.tokens;
        let values = scalars(report, self.world, self.tokens);
        self.write(&summary(seconds(), report.step, &values))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn write(&mut self, event: &[u8]) -> Result<(), Failure> {
        self.file
            .write_all(&record(event))
            .map_err(|e| Failure::file("write", &self.path, &e))
    }
}

fn seconds() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0.0, |since| since.as_secs_f64())
}

/// The scalars of a step, by tag; `seen` tokens were learnt from in this run so far.
#[must_use]
pub fn scalars(report: &StepReport, world: u64, seen: u64) -> Vec<(String, f64)> {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let mut values: Vec<(String, f64)> = Vec::new();
    let mut put = |tag: &str, value: f64| values.push((tag.to_string(), value));
    // torchtitan's.
    put("loss_metrics/global_avg_loss", report.loss);
    put("grad_norm", report.grad_norm);
    put("lr", report.lr);
    put("ntokens_seen", seen as f64);
    put("throughput(tps)", report.tokens_per_s / world as f64);
    put("time_metrics/end_to_end(s)", report.step_ms / 1e3);
    let most: u64 = report.memory_bytes.values().sum();
    put("memory/max_active(GiB)", gib(most));
    if let Some(loss) = report.held_out {
        put("validation_metrics/loss", loss);
    }
    // Ours.
    put("pipeline/bubble(%)", 100.0 * report.bubble);
    for (category, bytes) in &report.memory_bytes {
        put(&format!("memory/{category}(GiB)"), gib(*bytes));
    }
    for (group, ms) in &report.comm_wait_ms {
        put(
            &format!("comm/{group}/wait(%)"),
            100.0 * ms / report.step_ms,
        );
    }
    for (group, bytes) in &report.bytes {
        put(&format!("comm/{group}/GB"), *bytes as f64 / 1e9);
    }
    if let Some(experts) = &report.experts {
        put("moe/load_imbalance", experts.imbalance);
        put("moe/dropped(%)", 100.0 * experts.dropped);
        put("moe/aux_loss", experts.aux_loss);
        put("moe/z_loss", experts.z_loss);
    }
    values
}

/// The first event of a file.
fn version(now: f64) -> Vec<u8> {
    let mut event = wall_time(now);
    bytes(&mut event, 3, b"brain.Event:2");
    event
}

/// Tells readers that a run begins again at `step`: what they have of later ones is void.
fn session_start(now: f64, step: u64) -> Vec<u8> {
    const START: u64 = 1;
    let mut session = Vec::new();
    number(&mut session, 1, START);
    let mut event = wall_time(now);
    number(&mut event, 2, step);
    bytes(&mut event, 7, &session);
    event
}

fn summary(now: f64, step: u64, values: &[(String, f64)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, value) in values {
        let mut one = Vec::new();
        bytes(&mut one, 1, tag.as_bytes());
        one.push(key(2, FIXED32));
        one.extend((*value as f32).to_le_bytes());
        bytes(&mut summary, 1, &one);
    }
    let mut event = wall_time(now);
    number(&mut event, 2, step);
    bytes(&mut event, 5, &summary);
    event
}

fn wall_time(now: f64) -> Vec<u8> {
    let mut event = vec![key(1, FIXED64)];
    event.extend(now.to_le_bytes());
    event
}

// Protobuf's wire types.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const DELIMITED: u8 = 2;
const FIXED32: u8 = 5;

/// The key of a field; all of ours are below 16.
const fn key(field: u8, wire: u8) -> u8 {
    field << 3 | wire
}

fn number(out: &mut Vec<u8>, field: u8, value: u64) {
    out.push(key(field, VARINT));
    varint(out, value);
}

fn bytes(out: &mut Vec<u8>, field: u8, value: &[u8]) {
    out.push(key(field, DELIMITED));
    varint(out, value.len() as u64);
    out.extend(value);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A TFRecord.
fn record(event: &[u8]) -> Vec<u8> {
    let len = (event.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(event.len() + 16);
    record.extend(len);
    record.extend(masked(&len).to_le_bytes());
    record.extend(event);
    record.extend(masked(event).to_le_bytes());
    record
}

/// TensorFlow's mask: so that the checksum of data that holds checksums is not weak.
fn masked(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), the polynomial reflected.
fn crc32c(data: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8);
    !data.iter().fold(!0, step)
}

const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
}

#[cfg(test)]
mod tests;
