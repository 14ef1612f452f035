//! Both directions of one data connection, without waiting.
//!
//! ```text
//! push(frame, payload) -> [ queue ] -> writev(header, payload)      as far as the kernel takes it
//! pull()               <- frames   <- readv(payload, buffer)        large payloads are read in place
//!
//! lend(frame, bytes)   -> [ queue ]    written by its owner alone, from where the bytes lie
//! take(room)           <- a payload that its owner claimed when its header came: read by him alone, to where he wants it
//! ```
//!
//! The last two are for long messages of a caller who stays, and touch no memory of their own.

mod inward;
mod outward;
mod pool;

use super::{frame, lock, stream};
pub(super) use inward::{Claim, End, In, Sink};
pub(super) use outward::Out;
pub(super) use pool::Pool;
