//! The copy that shared memory is filled with, beside the system's, at 64 places of the one buffer
//! relative to the other: a page-aligned segment and a heap buffer lie a few bytes apart modulo 4 KiB,
//! where string instructions fall to a fraction of their speed.

use std::hint::black_box;
use std::time::Instant;

use quintet_benches::median;
use quintet_collectives::transport::direct::copy_bytes;

/// A stage's length.
const BYTES: usize = 128 << 10;
/// Bytes from one place to the next.
const APART: usize = 4;

fn main() {
    let source = vec![1u8; BYTES + 8192];
    let mut target = vec![0u8; BYTES + 8192];
    let source_page = source.as_ptr().align_offset(4096);
    let target_page = target.as_ptr().align_offset(4096);
    let mut rows = Vec::new();
    for place in 0..64 {
        let at = source_page + place * APART;
        let from = &source[at..at + BYTES];
        let to = &mut target[target_page..target_page + BYTES];
        let ours = speed(|| copy_bytes(black_box(from), black_box(to)));
        let system = speed(|| black_box(&mut *to).copy_from_slice(black_box(from)));
        rows.push((place * APART, ours, system));
    }
    println!("copies of {BYTES} bytes, GB/s by bytes apart modulo 4096");
    println!(
        "{:>6} {:>8} {:>8} {:>8}",
        "apart", "ours", "system", "ratio"
    );
    for (apart, ours, system) in &rows {
        println!("{apart:6} {ours:8.2} {system:8.2} {:7.2}x", ours / system);
    }
    let ratio = median(rows.iter().map(|(_, ours, system)| ours / system));
    let least =
        |way: fn(&(usize, f64, f64)) -> f64| rows.iter().map(way).fold(f64::INFINITY, f64::min);
    println!(
        "least: ours {:.2}, system {:.2}; median ratio {ratio:.2}x",
        least(|r| r.1),
        least(|r| r.2)
    );
}

fn speed(mut copy: impl FnMut()) -> f64 {
    let rounds = (0..9).map(|_| {
        let start = Instant::now();
        (0..100).for_each(|_| copy());
        (100 * BYTES) as f64 / start.elapsed().as_secs_f64() * 1e-9
    });
    median(rounds.collect::<Vec<_>>())
}
