//! Short texts between ranks: lengths first, then bytes packed into whole elements.

use alloc::vec::Vec;

use quintet_kernels::{Backend, Collectives, Tag};

use crate::Error;

/// Every rank's `mine`, in rank order.
pub(crate) fn all_gather<B: Backend, C: Collectives<B>>(
    device: &B,
    group: &C,
    mine: &[u8],
) -> Result<Vec<Vec<u8>>, Error> {
    let world = group.world();
    // Lengths in f64: exact up to 2^53 bytes, where i32 would end at 2 GiB.
    let lens = values(device, group, &[mine.len() as f64], &alloc::vec![1; world])?;
    let lens: Vec<usize> = lens.into_iter().map(|len| len as usize).collect();
    let words: Vec<i32> = mine.chunks(4).map(pack).collect();
    let counts: Vec<usize> = lens.iter().map(|len| len.div_ceil(4)).collect();
    let all = values(device, group, &words, &counts)?;
    let mut rest = all.as_slice();
    let mut texts = Vec::new();
    for (count, len) in counts.into_iter().zip(lens) {
        let (words, tail) = rest.split_at(count.min(rest.len()));
        rest = tail;
        texts.push(
            words
                .iter()
                .flat_map(|w| w.to_le_bytes())
                .take(len)
                .collect(),
        );
    }
    Ok(texts)
}

/// Every rank's `mine`, in rank order, one after another.
pub(crate) fn values<B: Backend, C: Collectives<B>, T: quintet_kernels::Wire>(
    device: &B,
    group: &C,
    mine: &[T],
    counts: &[usize],
) -> Result<Vec<T>, Error> {
    let len = counts.iter().sum();
    let mine = device.upload(Tag::Comm, mine)?;
    let mut all = device.zeros(Tag::Comm, len)?;
    group.all_gather(B::whole(&mine), counts, B::whole_mut(&mut all))?;
    let mut host = alloc::vec![T::zeroed(); len];
    device.download(B::whole(&all), &mut host)?;
    Ok(host)
}

fn pack(bytes: &[u8]) -> i32 {
    let mut word = [0; 4];
    word[..bytes.len()].copy_from_slice(bytes);
    i32::from_le_bytes(word)
}
