//! Memory that was given back, kept for the next buffer of the same type and length.
//!
//! A training step asks for the same lengths again and again, and most outputs are overwritten
//! from end to end: taking such memory as it was left saves clearing it, and page faults. What is
//! kept never takes more than the buffers in use took at their most.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::any::{Any, TypeId};
use core::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Data;

/// The memory that one device keeps.
#[derive(Default)]
pub(super) struct Recycler(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    by_kind: BTreeMap<(TypeId, usize), Vec<Box<dyn Any + Send>>>,
    bytes: usize,
    used: usize,
    most_used: usize,
}

impl Recycler {
    /// Memory of `len` elements with whatever was left in it; none where none is kept.
    pub(super) fn take<T: Data>(&self, len: usize) -> Option<Vec<T>> {
        let mut kept = self.lock();
        let found = kept.by_kind.get_mut(&(TypeId::of::<T>(), len))?.pop()?;
        let data = *found.downcast::<Vec<T>>().ok()?;
        kept.bytes -= size_of_val(data.as_slice());
        Some(data)
    }

    /// Counts memory that has come into use.
    pub(super) fn used(&self, bytes: usize) {
        let mut kept = self.lock();
        kept.used += bytes;
        kept.most_used = kept.most_used.max(kept.used);
    }

    /// Takes memory back; lets it go where enough is kept.
    pub(super) fn give<T: Data>(&self, data: Vec<T>) {
        let bytes = size_of_val(data.as_slice());
        let mut kept = self.lock();
        kept.used = kept.used.saturating_sub(bytes);
        if bytes > 0 && kept.bytes + bytes <= kept.most_used {
            kept.bytes += bytes;
            let kind = (TypeId::of::<T>(), data.len());
            kept.by_kind.entry(kind).or_default().push(Box::new(data));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Recycler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recycler({} bytes)", self.lock().bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_by_type_and_length_and_is_bounded() {
        let recycler = Recycler::default();
        recycler.used(24);
        recycler.give(alloc::vec![1.0_f32, 2.0]);
        assert_eq!(recycler.take::<f32>(3), None);
        assert_eq!(recycler.take::<i32>(2), None);
        assert_eq!(recycler.take::<f32>(2), Some(alloc::vec![1.0, 2.0]));
        assert_eq!(recycler.take::<f32>(2), None);
        recycler.give(alloc::vec![0_u8; 16]);
        recycler.give(alloc::vec![0_u8; 16]); // 32 bytes kept would be more than 24 ever used
        assert!(recycler.take::<u8>(16).is_some());
        assert!(recycler.take::<u8>(16).is_none());
    }
}
