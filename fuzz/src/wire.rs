//! What peers and strangers send.

use quintet_collectives::transport::socket::control::Note;
use quintet_collectives::transport::socket::frame::{Frame, HEADER, Kind, MAX_PAYLOAD};
use quintet_collectives::transport::socket::identify;
use quintet_collectives::transport::{Call, Site, Tag};
use quintet_collectives::{CollectiveShape, DType, Error, Order, ReduceOp};

use crate::bytes::Bytes;

/// Any bytes: a fault, or a frame that is written as it was read. A frame of ours with any byte
/// changed: a fault.
pub fn frames(data: &[u8]) {
    if let Ok(frame) = Frame::decode(data) {
        assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        assert!(frame.payload() as u64 <= MAX_PAYLOAD);
    }
    // The same fields under the right checksums, which no random bytes carry.
    if let Ok(frame) = Frame::decode(&sealed_frame(data)) {
        assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        assert!(frame.payload() as u64 <= MAX_PAYLOAD);
    }
    let mut bytes = Bytes(data);
    let sequence = u64::from(bytes.byte());
    let shape = CollectiveShape::Broadcast {
        len: bytes.below(100),
        root: bytes.below(3),
    };
    let redop = [None, Some(ReduceOp::Sum)][bytes.below(2)];
    let call = Call::new(sequence, &shape, 3, DType::F32, redop, Order::Any);
    let with_call = bytes.below(2) == 1;
    let frame = Frame {
        kind: [Kind::Data, Kind::Announce, Kind::Credit, Kind::Bye][bytes.below(4)],
        dtype: [DType::F64, DType::Bf16, DType::U8][bytes.below(3)],
        generation: u32::from(bytes.byte()),
        from: u32::from(bytes.byte()),
        group: u64::from(bytes.byte()) << 40,
        tag: Tag::Collective(sequence),
        number: u64::MAX - u64::from(bytes.byte()),
        len: u64::from(bytes.byte()),
        payload_crc: (bytes.below(2) == 1).then_some(7),
        call: with_call.then(|| call.at(Site::new("src/\u{fc}.rs", 1))),
    };
    let mut encoded = frame.encode();
    assert_eq!(Frame::decode(&encoded), Ok(frame));
    for cut in [0, HEADER - 1, encoded.len() - 1] {
        assert!(Frame::decode(&encoded[..cut]).is_err());
    }
    let (at, with) = (bytes.below(encoded.len()), bytes.byte());
    encoded[at] ^= with.max(1);
    assert!(Frame::decode(&encoded).is_err());
}

/// A frame with a call, of these fields, zeros once they are used up.
fn sealed_frame(fields: &[u8]) -> Vec<u8> {
    const CALL: usize = 77;
    let mut bytes = b"QNT1".to_vec();
    bytes.extend(fields);
    bytes.resize(HEADER + CALL, 0);
    // Half of them have one.
    let call = if bytes[6] & 2 == 0 { 0 } else { CALL };
    bytes.truncate(HEADER + call);
    let crc = crc32c::crc32c(&bytes[HEADER..]);
    bytes[52..56].copy_from_slice(&crc.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..HEADER - 4]);
    bytes[HEADER - 4..HEADER].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// A greeting of these fields.
fn sealed_hello(fields: &[u8]) -> Vec<u8> {
    let mut bytes = b"QNTH\x01\0\0\0".to_vec();
    bytes.extend(fields);
    bytes.resize(73, 0);
    bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

/// Any bytes as notes, greetings and requests: refused, or read without a panic. A note of ours
/// comes back, and no part of it is taken for a whole.
pub fn rendezvous(data: &[u8]) {
    let _ = identify(data);
    let hello = sealed_hello(data);
    assert_eq!(identify(&hello).is_some(), hello[40] < 3);
    let mut sealed = (data.len() as u32).to_le_bytes().to_vec();
    sealed.extend(crc32c::crc32c(data).to_le_bytes());
    sealed.extend(data);
    if let Ok(Some((note, len))) = Note::decode(&sealed) {
        assert_eq!(len, sealed.len());
        let again = note.encode();
        assert_eq!(Note::decode(&again), Ok(Some((note, again.len()))));
    }
    let mut rest = data;
    while let Ok(Some((note, len))) = Note::decode(rest) {
        assert!(len <= rest.len());
        assert_eq!(Note::decode(&note.encode()), Ok(Some((note, len))));
        rest = &rest[len..];
    }
    let mut bytes = Bytes(data);
    let cause = match bytes.below(3) {
        0 => Error::Aborted {
            rank: bytes.below(9),
        },
        1 => Error::PeerLost {
            rank: bytes.below(9),
            reason: String::from_utf8_lossy(data).to_string(),
        },
        _ => Error::Timeout {
            group: "g".into(),
            rank: 1,
            op: "recv",
            sequence: u64::from(bytes.byte()),
            peer: [None, Some(3)][bytes.below(2)],
            what: "a message".into(),
            waited: std::time::Duration::from_millis(5),
        },
    };
    let note = match bytes.below(4) {
        0 => Note::Poison {
            group: u64::from(bytes.byte()),
            cause,
        },
        1 => Note::Leave(Some(cause)),
        2 => Note::Meet {
            generation: u32::from(bytes.byte()),
            host: "h".into(),
            port: 5,
            members: (0..bytes.below(9)).collect(),
        },
        _ => Note::Cause(cause),
    };
    let encoded = note.encode();
    assert_eq!(Note::decode(&encoded), Ok(Some((note, encoded.len()))));
    let cut = bytes.below(encoded.len());
    assert_eq!(Note::decode(&encoded[..cut]), Ok(None));
}
