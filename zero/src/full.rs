//! The whole logical state on every rank, by name and logical index, under any layout: what a
//! comparison with another layout, or with a model on one device, looks at. It takes the memory
//! of the whole model on every rank and is meant for models that fit.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use quintet_kernels::{Backend, Collectives, Float, Optimizer, Scalar, Wire};

use crate::{
    Error, FlatLayout, GradSync, Groups, ParamStore, Piece, ShardedOptimizer, bytes, groups,
};

/// Logical tensors by name, row-major, widened to f64 (exactly).
pub type Full = BTreeMap<String, Vec<f64>>;

/// All parameters; `stores` are the chunks of this rank.
///
/// # Errors
/// What a collective fails with, and [`Error::Param`] where an element is counted by no rank or
/// by two.
pub fn gather_params<B: Backend, C: Collectives<B>, E: Scalar>(
    device: &B,
    stores: &[&ParamStore<B, E>],
    groups: &impl Groups<C>,
) -> Result<Full, Error> {
    let layouts: Vec<&FlatLayout> = stores.iter().map(|s| &**s.layout()).collect();
    gather(
        device,
        &layouts,
        groups,
        |chunk, part, range, host: &mut [E]| {
            Ok(device.download(stores[chunk].part(part)?.cut(range)?, host)?)
        },
    )
}

/// All reduced gradients; `syncs` are the chunks of this rank.
///
/// # Errors
/// As [`gather_params`], and [`Error::Order`] before [`GradSync::finish`].
pub fn gather_grads<B: Backend, C: Collectives<B>, E: Scalar>(
    device: &B,
    syncs: &[&GradSync<B, C, E>],
    groups: &impl Groups<C>,
) -> Result<Full, Error> {
    let layouts: Vec<&FlatLayout> = syncs.iter().map(|s| &**s.layout()).collect();
    gather(
        device,
        &layouts,
        groups,
        |chunk, part, range, host: &mut [E::Acc]| {
            Ok(device.download(syncs[chunk].part(part)?.cut(range)?, host)?)
        },
    )
}

/// All optimizer state, first by kind (`exp_avg`, `exp_avg_sq`, `master`), then by name.
///
/// # Errors
/// As [`gather_params`].
pub fn gather_state<B: Optimizer, C: Collectives<B>, E: Scalar>(
    device: &B,
    optimizers: &[&ShardedOptimizer<B, E>],
    groups: &impl Groups<C>,
) -> Result<BTreeMap<&'static str, Full>, Error> {
    let layouts: Vec<&FlatLayout> = optimizers.iter().map(|o| &**o.layout()).collect();
    let kinds = optimizers.first().map(|o| o.kinds()).unwrap_or_default();
    let full = |(index, kind): (usize, &'static str)| {
        let read = |chunk: usize, part, range, host: &mut [E::Acc]| {
            optimizers[chunk].read_state(index, part, &range, host)
        };
        Ok((kind, gather(device, &layouts, groups, read)?))
    };
    kinds.into_iter().enumerate().map(full).collect()
}

/// All master weights; none where parameters are their own.
///
/// # Errors
/// As [`gather_params`].
pub fn gather_master<B: Optimizer, C: Collectives<B>, E: Scalar>(
    device: &B,
    optimizers: &[&ShardedOptimizer<B, E>],
    groups: &impl Groups<C>,
) -> Result<Option<Full>, Error> {
    let layouts: Vec<&FlatLayout> = optimizers.iter().map(|o| &**o.layout()).collect();
    let Some(index) = optimizers.first().and_then(|o| o.master_kind()) else {
        return Ok(None);
    };
    let read = |chunk: usize, part, range, host: &mut [E::Acc]| {
        optimizers[chunk].read_state(index, part, &range, host)
    };
    gather(device, &layouts, groups, read).map(Some)
}

/// Gathers what `read(chunk, part, range, host)` reads of each piece that a rank counts.
fn gather<B: Backend, C: Collectives<B>, T: Wire + Float>(
    device: &B,
    layouts: &[&FlatLayout],
    groups: &impl Groups<C>,
    read: impl Fn(usize, usize, Range<usize>, &mut [T]) -> Result<(), Error>,
) -> Result<Full, Error> {
    let Some(first) = layouts.first() else {
        return Ok(Full::new());
    };
    let world = groups::world(groups, first)?;
    let (mut text, mut mine) = (Vec::new(), Vec::new());
    for (chunk, layout) in layouts.iter().enumerate() {
        for piece in layout.counted() {
            describe(layout, &piece, &mut text);
            let at = mine.len();
            mine.resize(at + piece.range.len(), T::zeroed());
            read(chunk, piece.part, piece.range, &mut mine[at..])?;
        }
    }
    let texts = bytes::all_gather(device, world, &text)?;
    let mut pieces = Vec::new();
    for (rank, text) in texts.iter().enumerate() {
        pieces.push(parse(text).ok_or(Error::Message { rank })?);
    }
    let len = |of: &Vec<Described>| of.iter().flat_map(|d| &d.runs).map(|(_, len)| len).sum();
    let counts: Vec<usize> = pieces.iter().map(len).collect();
    let all = bytes::values(device, world, &mine, &counts)?;
    assemble(pieces.into_iter().flatten(), &all)
}

/// A piece of one tensor as it travels.
struct Described {
    name: String,
    len: usize,
    runs: Vec<(usize, usize)>,
}

fn assemble<T: Float>(
    pieces: impl Iterator<Item = Described>,
    mut values: &[T],
) -> Result<Full, Error> {
    let mut full = Full::new();
    let mut seen: BTreeMap<String, Vec<bool>> = BTreeMap::new();
    for piece in pieces {
        let refused = |why| Error::Param {
            name: piece.name.clone(),
            why,
        };
        let tensor = full
            .entry(piece.name.clone())
            .or_insert(alloc::vec![0.0; piece.len]);
        let seen = seen
            .entry(piece.name.clone())
            .or_insert(alloc::vec![false; piece.len]);
        for &(start, len) in &piece.runs {
            let (run, rest) = values.split_at(len.min(values.len()));
            values = rest;
            for (i, x) in run.iter().enumerate() {
                match (tensor.get_mut(start + i), seen.get_mut(start + i)) {
                    (Some(to), Some(seen)) if !*seen => (*to, *seen) = (x.to_f64(), true),
                    _ => return Err(refused(format!("element {} comes twice", start + i))),
                }
            }
        }
    }
    for (name, seen) in seen {
        if let Some(at) = seen.iter().position(|s| !s) {
            return Err(Error::Param {
                name,
                why: format!("element {at} comes from no rank"),
            });
        }
    }
    Ok(full)
}

fn describe(layout: &FlatLayout, piece: &Piece, text: &mut Vec<u8>) {
    let spec = &layout.entries()[piece.entry].spec;
    let mut number = |x: usize| text.extend((x as u64).to_le_bytes());
    number(spec.name.len());
    number(spec.len());
    number(piece.runs.len());
    for &(_, logical, len) in &piece.runs {
        number(logical);
        number(len);
    }
    text.extend(spec.name.as_bytes());
}

fn parse(mut text: &[u8]) -> Option<Vec<Described>> {
    let mut pieces = Vec::new();
    while !text.is_empty() {
        let mut number = || {
            let (head, rest) = text.split_first_chunk()?;
            text = rest;
            usize::try_from(u64::from_le_bytes(*head)).ok()
        };
        let (bytes, len, count) = (number()?, number()?, number()?);
        let runs: Option<Vec<_>> = (0..count).map(|_| Some((number()?, number()?))).collect();
        let (name, rest) = text.split_at_checked(bytes)?;
        text = rest;
        let name = String::from_utf8(name.into()).ok()?;
        pieces.push(Described {
            name,
            len,
            runs: runs?,
        });
    }
    Some(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twice_or_never_is_an_error() {
        let piece = |runs: &[(usize, usize)]| Described {
            name: "w".into(),
            len: 4,
            runs: runs.to_vec(),
        };
        let full = assemble(
            [piece(&[(2, 2)]), piece(&[(0, 2)])].into_iter(),
            &[1.0, 2.0, 3.0, 4.0],
        );
        assert_eq!(full.unwrap()["w"], [3.0, 4.0, 1.0, 2.0]);
        let twice = assemble([piece(&[(0, 2), (1, 2)])].into_iter(), &[0.0; 4]).unwrap_err();
        assert_eq!(format!("{twice}"), "parameter w: element 1 comes twice");
        let gap = assemble([piece(&[(0, 3)])].into_iter(), &[0.0; 3]).unwrap_err();
        assert_eq!(
            format!("{gap}"),
            "parameter w: element 3 comes from no rank"
        );
    }
}
