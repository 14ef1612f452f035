//! Event files are read back here by a reader of their format that knows nothing of the writer;
//! `.ci/read_tensorboard.py` reads them with TensorBoard's own.

use super::*;
use crate::report::ExpertReport;
use crate::report::test_dir::TestDir;

/// (step, tag, value), a version as `("version", 0)`, a session's start as `("start", step)`.
#[derive(Debug, PartialEq)]
enum Read {
    Version(String),
    Start(u64),
    Scalars(u64, Vec<(String, f32)>),
}

/// Splits off `len` bytes.
fn take<'a>(data: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (head, tail) = data.split_at(len);
    *data = tail;
    head
}

fn read_varint(data: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let byte = take(data, 1)[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            break;
        }
    }
    value
}

/// (field, value as little-endian bytes, or the number of a varint) of each field.
fn fields(mut data: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let mut all = Vec::new();
    while !data.is_empty() {
        let key = read_varint(&mut data);
        let value = match key & 7 {
            0 => read_varint(&mut data).to_le_bytes().to_vec(),
            1 => take(&mut data, 8).to_vec(),
            2 => {
                let len = read_varint(&mut data) as usize;
                take(&mut data, len).to_vec()
            }
            5 => take(&mut data, 4).to_vec(),
            wire => panic!("wire type {wire}"),
        };
        all.push((key >> 3, value));
    }
    all
}

/// Bit by bit, from the polynomial x^32 + x^28 + x^27 + ... as RFC 3720 writes it.
fn slow_crc(data: &[u8]) -> u32 {
    let mut crc = 0xffff_ffff_u32;
    for byte in data {
        for bit in 0..8 {
            let top = (crc >> 31 ^ u32::from(byte >> bit)) & 1;
            crc = crc << 1 ^ if top == 1 { 0x1edc_6f41 } else { 0 };
        }
    }
    !crc.reverse_bits()
}

fn unmask(masked: &[u8]) -> u32 {
    let masked = u32::from_le_bytes(masked.try_into().unwrap());
    masked.wrapping_sub(0xa282_ead8).rotate_left(15)
}

fn read(path: &Path) -> Vec<Read> {
    let content = fs::read(path).unwrap();
    let (mut data, mut events) = (&content[..], Vec::new());
    while !data.is_empty() {
        let head = take(&mut data, 8);
        assert_eq!(unmask(take(&mut data, 4)), slow_crc(head));
        let len = u64::from_le_bytes(head.try_into().unwrap()) as usize;
        let event = take(&mut data, len);
        assert_eq!(unmask(take(&mut data, 4)), slow_crc(event));
        let (mut step, mut what) = (0, None);
        for (field, value) in fields(event) {
            match field {
                1 => assert!(f64::from_le_bytes(value.try_into().unwrap()) > 1.7e9),
                2 => step = u64::from_le_bytes(value.try_into().unwrap()),
                3 => what = Some(Read::Version(String::from_utf8(value).unwrap())),
                5 => {
                    let scalar = |(field, value): (u64, Vec<u8>)| {
                        assert_eq!(field, 1);
                        let parts = fields(&value);
                        assert_eq!([parts[0].0, parts[1].0], [1, 2]);
                        let tag = String::from_utf8(parts[0].1.clone()).unwrap();
                        (
                            tag,
                            f32::from_le_bytes(parts[1].1.clone().try_into().unwrap()),
                        )
                    };
                    what = Some(Read::Scalars(
                        step,
                        fields(&value).into_iter().map(scalar).collect(),
                    ));
                }
                7 => {
                    assert_eq!(fields(&value), [(1, 1u64.to_le_bytes().to_vec())]);
                    what = Some(Read::Start(step));
                }
                other => panic!("field {other}"),
            }
        }
        events.push(what.unwrap());
    }
    events
}

fn report(step: u64) -> StepReport {
    StepReport {
        step,
        loss: 2.5,
        tokens: 100,
        tokens_per_s: 800.0,
        step_ms: 50.0,
        comm_wait_ms: [("tp".to_string(), 5.0)].into(),
        memory_bytes: [("parameters".to_string(), 1 << 30)].into(),
        bytes: [("dp".to_string(), 2_000_000_000)].into(),
        ..StepReport::default()
    }
}

/// The vectors of RFC 3720, B.4, and the usual check value.
#[test]
fn checksums_are_castagnolis() {
    let rising: Vec<u8> = (0..32).collect();
    for (data, want) in [
        (&b"123456789"[..], 0xe306_9283),
        (&[0; 32], 0x8a91_36aa),
        (&[0xff; 32], 0x62a8_ab43),
        (&rising, 0x46dd_794e),
        (b"", 0),
    ] {
        assert_eq!(crc32c(data), want);
        assert_eq!(slow_crc(data), want);
    }
}

/// Written out by hand from the format's description.
#[test]
fn a_record_has_these_bytes() {
    let event = summary(2.0, 300, &[("lr".to_string(), 0.5)]);
    let want = [
        0x09, 0, 0, 0, 0, 0, 0, 0, 0x40, // wall_time 2.0
        0x10, 0xac, 0x02, // step 300
        0x2a, 11, // summary
        0x0a, 9, // a value
        0x0a, 2, b'l', b'r', // tag
        0x15, 0, 0, 0, 0x3f, // 0.5
    ];
    assert_eq!(event, want);
    let record = record(&event);
    assert_eq!(&record[..8], (event.len() as u64).to_le_bytes());
    assert_eq!(record.len(), event.len() + 16);
}

#[test]
fn what_is_written_is_read_back() {
    let dir = TestDir::new("tensorboard");
    let mut log = EventFile::create(&dir.path().join("tb"), 4, 0).unwrap();
    log.append(&report(1)).unwrap();
    let experts = ExpertReport {
        imbalance: 1.5,
        dropped: 0.25,
        ..ExpertReport::default()
    };
    log.append(&StepReport {
        held_out: Some(3.0),
        experts: Some(experts),
        ..report(2)
    })
    .unwrap();
    let events = read(log.path());
    assert_eq!(events.len(), 4);
    assert_eq!(events[0], Read::Version("brain.Event:2".into()));
    assert_eq!(events[1], Read::Start(1));
    let of = |event: &Read, tag: &str| match event {
        Read::Scalars(step, scalars) => {
            let found = scalars.iter().find(|(t, _)| t == tag);
            found.map(|(_, value)| (*step, *value))
        }
        other => panic!("{other:?}"),
    };
    for (tag, value) in [
        ("loss_metrics/global_avg_loss", 2.5),
        ("throughput(tps)", 200.0),
        ("ntokens_seen", 100.0),
        ("time_metrics/end_to_end(s)", 0.05),
        ("memory/max_active(GiB)", 1.0),
        ("comm/tp/wait(%)", 10.0),
        ("comm/dp/GB", 2.0),
    ] {
        assert_eq!(of(&events[2], tag), Some((1, value)), "{tag}");
    }
    assert_eq!(of(&events[2], "validation_metrics/loss"), None);
    for (tag, value) in [
        ("validation_metrics/loss", 3.0),
        ("moe/load_imbalance", 1.5),
        ("moe/dropped(%)", 25.0),
        ("ntokens_seen", 200.0),
    ] {
        assert_eq!(of(&events[3], tag), Some((2, value)), "{tag}");
    }
}

#[test]
fn a_resumed_run_has_a_file_of_its_own_and_voids_what_came_later() {
    let dir = TestDir::new("tensorboard-again");
    let first = EventFile::create(dir.path(), 1, 0).unwrap();
    let again = EventFile::create(dir.path(), 1, 7).unwrap();
    assert_ne!(first.path(), again.path());
    let name = again.path().file_name().unwrap().to_string_lossy();
    assert!(name.starts_with("events.out.tfevents."), "{name}");
    assert_eq!(read(again.path())[1], Read::Start(8));
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    let refused = EventFile::create(&file, 1, 0).unwrap_err();
    assert_eq!(refused.exit, crate::failure::Exit::Data);
}
