//! ZeRO sharding of gradients and optimizer state: flat layouts, partitions, overlapped buckets, exact global-norm clipping.
#![no_std]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;
