//! How `len` elements fall into `world` chunks: contiguous, ragged, without padding.
//!
//! The first `len % world` chunks hold one element more than the rest, so chunks differ by at
//! most one and any `len`, also one below `world`, is legal; the last chunks are then empty.
//!
//! ```text
//! len 10, world 4:   0 1 2 | 3 4 5 | 6 7 | 8 9
//! ```

use core::ops::Range;

/// The range of chunk `index` when `len` elements are cut into `world` chunks.
///
/// ```
/// use quintet_collectives::chunk::chunk;
/// assert_eq!(chunk(10, 4, 1), 3..6);
/// assert_eq!(chunk(2, 4, 3), 2..2);
/// ```
#[must_use]
pub const fn chunk(len: usize, world: usize, index: usize) -> Range<usize> {
    let (base, extra) = (len / world, len % world);
    let start = index * base + if index < extra { index } else { extra };
    start..start + base + (index < extra) as usize
}

/// The number of elements in chunk `index` of `len` cut into `world` chunks.
#[must_use]
pub const fn chunk_len(len: usize, world: usize, index: usize) -> usize {
    len / world + (index < len % world) as usize
}

/// The lengths of all chunks, in rank order.
pub fn chunk_lens(len: usize, world: usize) -> impl Iterator<Item = usize> {
    (0..world).map(move |i| chunk_len(len, world, i))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_partition_every_length() {
        for world in 1..=17 {
            for len in 0..=100 {
                let mut at = 0;
                for i in 0..world {
                    let r = chunk(len, world, i);
                    assert_eq!(r.start, at);
                    assert_eq!(r.len(), chunk_len(len, world, i));
                    at = r.end;
                }
                assert_eq!(at, len);
            }
        }
    }
}
