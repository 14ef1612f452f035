//! What travels on a data connection.
//!
//! ```text
//! 0      4    5     6     8          12     16    24   32      40   48       52      56  60
//! magic  kind dtype flags generation from   group tag  number  len  payload  call    0   header
//!                                                                   CRC32C   CRC32C      CRC32C
//! then the call (77 bytes) where the flags say so, then len elements, or 8 bytes that say where they lie
//! ```
//!
//! `number` counts the frames of one direction of one connection: a lost, doubled or reordered frame
//! is seen. The first frame about a collective that goes to a peer carries the call, so that ranks
//! compare calls without a message of their own.

use std::vec::Vec;

use super::codec::{CALL, Reader, Writer, dtype, dtype_code, get_call, put_call};
use crate::{
    DType,
    transport::{Call, Tag},
};

/// Bytes of a header.
pub const HEADER: usize = 64;

/// The longest payload a header may claim, in bytes.
pub const MAX_PAYLOAD: u64 = 1 << 40;

const MAGIC: [u8; 4] = *b"QNT1";
const USER: u8 = 1;
const HAS_CALL: u8 = 2;
const HAS_CRC: u8 = 4;

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A message.
    Data,
    /// A call without a message.
    Announce,
    /// `len` bytes of user messages were consumed.
    Credit,
    /// The sender waits for credit.
    Ask,
    /// The last frame of this direction.
    Bye,
    /// A message that lies in the sender's segment, at the place that follows.
    Lent,
    /// Something that the group's members share has changed.
    Knock,
}

const KINDS: [Kind; 7] = [
    Kind::Data,
    Kind::Announce,
    Kind::Credit,
    Kind::Ask,
    Kind::Bye,
    Kind::Lent,
    Kind::Knock,
];

/// A frame without its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// What it is for.
    pub kind: Kind,
    /// Type of the elements that follow.
    pub dtype: DType,
    /// The generation of the run.
    pub generation: u32,
    /// Global rank of the sender.
    pub from: u32,
    /// The group.
    pub group: u64,
    /// The stream of messages.
    pub tag: Tag,
    /// Which frame of its direction, from 0.
    pub number: u64,
    /// Elements that follow; of a credit, bytes.
    pub len: u64,
    /// CRC32C of the payload, where the sender takes it.
    pub payload_crc: Option<u32>,
    /// The call it belongs to, where it is the first frame about it to this peer.
    pub call: Option<Call>,
}

/// Why bytes are no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// They do not begin as a frame does.
    Magic,
    /// The header's checksum is another.
    Header,
    /// The call's checksum is another.
    Call,
    /// A field has no meaning, or a length is beyond [`MAX_PAYLOAD`].
    Field,
}

impl Fault {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Magic => "it does not begin as a frame does",
            Self::Header => "its header's checksum is wrong",
            Self::Call => "its call's checksum is wrong",
            Self::Field => "one of its fields has no meaning",
        }
    }
}

impl Frame {
    /// The header, and the call where there is one.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (user, tag) = match self.tag {
            Tag::Collective(sequence) => (0, sequence),
            Tag::User(tag) => (USER, tag),
        };
        let mut call = Writer(Vec::with_capacity(CALL));
        if let Some(c) = &self.call {
            put_call(&mut call, c);
        }
        let flags = user
            | if self.call.is_some() { HAS_CALL } else { 0 }
            | if self.payload_crc.is_some() {
                HAS_CRC
            } else {
                0
            };
        let mut w = Writer(Vec::with_capacity(HEADER + CALL));
        w.0.extend(MAGIC);
        w.u8(kind_code(self.kind));
        w.u8(dtype_code(self.dtype));
        w.u8(flags);
        w.u8(0);
        w.u32(self.generation);
        w.u32(self.from);
        w.u64(self.group);
        w.u64(tag);
        w.u64(self.number);
        w.u64(self.len);
        w.u32(self.payload_crc.unwrap_or(0));
        w.u32(crc32c::crc32c(&call.0));
        w.u32(0);
        w.u32(crc32c::crc32c(&w.0));
        w.0.extend(call.0);
        w.0
    }

    /// How many bytes header and call take, from the first [`HEADER`] bytes.
    ///
    /// # Errors
    /// [`Fault`] where these are no header.
    pub fn extent(bytes: &[u8; HEADER]) -> Result<usize, Fault> {
        if bytes[..4] != MAGIC {
            return Err(Fault::Magic);
        }
        let (fields, crc) = bytes.split_at(HEADER - 4);
        if crc32c::crc32c(fields).to_le_bytes() != *crc {
            return Err(Fault::Header);
        }
        let flags = bytes[6];
        Ok(HEADER + if flags & HAS_CALL != 0 { CALL } else { 0 })
    }

    /// Reads what [`Frame::encode`] wrote: at least [`Frame::extent`] bytes.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn decode(bytes: &[u8]) -> Result<Self, Fault> {
        let header = bytes.first_chunk::<HEADER>().ok_or(Fault::Field)?;
        let extent = Self::extent(header)?;
        let call = bytes.get(HEADER..extent).ok_or(Fault::Call)?;
        if bytes[52..56] != crc32c::crc32c(call).to_le_bytes() {
            return Err(Fault::Call);
        }
        Self::fields(&bytes[4..HEADER], call).ok_or(Fault::Field)
    }

    fn fields(header: &[u8], call: &[u8]) -> Option<Self> {
        let mut r = Reader(header);
        let kind = *KINDS.get(usize::from(r.u8()?))?;
        let dtype = dtype(r.u8()?)?;
        let flags = r.u8()?;
        r.u8()?;
        let (generation, from, group) = (r.u32()?, r.u32()?, r.u64()?);
        let (tag, number, len, crc) = (r.u64()?, r.u64()?, r.u64()?, r.u32()?);
        let call = if flags & HAS_CALL == 0 {
            None
        } else {
            Some(get_call(&mut Reader(call), tag)?)
        };
        let user = flags & USER != 0;
        let fits = len.checked_mul(dtype.bytes() as u64)? <= MAX_PAYLOAD;
        (fits && (flags & !(USER | HAS_CALL | HAS_CRC)) == 0 && !(user && call.is_some()))
            .then_some(Self {
                kind,
                dtype,
                generation,
                from,
                group,
                tag: if user {
                    Tag::User(tag)
                } else {
                    Tag::Collective(tag)
                },
                number,
                len,
                payload_crc: (flags & HAS_CRC != 0).then_some(crc),
                call,
            })
    }

    /// Payload bytes that follow.
    #[must_use]
    pub fn payload(&self) -> usize {
        match self.kind {
            Kind::Data => self.len as usize * self.dtype.bytes(),
            Kind::Lent => 8,
            _ => 0,
        }
    }
}

fn kind_code(kind: Kind) -> u8 {
    match kind {
        Kind::Data => 0,
        Kind::Announce => 1,
        Kind::Credit => 2,
        Kind::Ask => 3,
        Kind::Bye => 4,
        Kind::Lent => 5,
        Kind::Knock => 6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Order, ReduceOp, plan::CollectiveShape, transport::Site};
    use proptest::prelude::*;

    fn frame(user: bool, call: bool, number: u64, len: u64) -> Frame {
        let shape = CollectiveShape::AllReduce { len: 5 };
        let made = Call::new(3, &shape, 2, DType::F32, Some(ReduceOp::Sum), Order::Rank);
        Frame {
            kind: Kind::Data,
            dtype: DType::F16,
            generation: 4,
            from: 1,
            group: 0xdead_beef_0123,
            tag: if user {
                Tag::User(3)
            } else {
                Tag::Collective(3)
            },
            number,
            len,
            payload_crc: (number % 2 == 1).then_some(8),
            call: (call && !user).then(|| made.at(Site::new("x.rs", 2))),
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(user: bool, call: bool, number: u64, len in 0u64..1 << 38) {
            let frame = frame(user, call, number, len);
            let bytes = frame.encode();
            prop_assert_eq!(Frame::extent(bytes.first_chunk().unwrap()), Ok(bytes.len()));
            prop_assert_eq!(Frame::decode(&bytes), Ok(frame));
        }

        #[test]
        fn any_changed_byte_is_seen(call: bool, at in 0usize..200, with in 1u8..=255) {
            let mut bytes = frame(false, call, 1, 7).encode();
            let at = at % bytes.len();
            bytes[at] ^= with;
            prop_assert!(Frame::decode(&bytes).is_err());
        }
    }

    #[test]
    fn lengths_that_cannot_be_are_refused() {
        for len in [1 << 63, u64::MAX, MAX_PAYLOAD] {
            assert_eq!(
                Frame::decode(&frame(true, false, 0, len).encode()),
                Err(Fault::Field)
            );
        }
    }
}
