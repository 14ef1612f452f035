//! The global norm of the gradient, each logical element counted once, in f64.
//!
//! Which elements a rank counts follows from the ledger and the layout
//! ([`FlatLayout::counted`](crate::FlatLayout::counted)); nothing is marked by hand. The squares of
//! each piece of a parameter are summed by themselves, and these sums are added without rounding
//! ([`exact`]): one all-reduce of [`DIGITS`] numbers over the world. So the norm has
//! the same bits wherever the pieces are the same, whatever stage or chunk holds which of them.

use alloc::string::String;
use alloc::vec::Vec;

use quintet_collectives::ReduceOp;
use quintet_kernels::{Backend, Collectives, Optimizer, Real, Scalar, Tag};

use crate::exact::{self, DIGITS};
use crate::{Error, FlatLayout, GradSync, Groups, Piece, bytes, groups};

/// The norm of all ranks' reduced gradients; `syncs` are the chunks of this rank. Every rank ends
/// with the same bits, which do not depend on the ZeRO stage.
///
/// # Errors
/// The same on all ranks: [`Error::NonFinite`] names the first element that is not finite on the
/// lowest rank that counts one, [`Error::NormOverflow`] where there is none. [`Error::Order`]
/// before [`GradSync::finish`], and what a collective fails with.
pub fn grad_norm<B: Optimizer, C: Collectives<B>, E: Scalar>(
    device: &B,
    syncs: &[&GradSync<B, C, E>],
    groups: &impl Groups<C>,
) -> Result<f64, Error> {
    let Some(first) = syncs.first() else {
        return Ok(0.0);
    };
    let mut digits = [0.0; DIGITS];
    for sync in syncs {
        squares(device, sync, &mut digits)?;
    }
    let world = groups::world(groups, first.layout())?;
    let mut columns = device.upload(Tag::Scratch, &digits)?;
    world.all_reduce(B::whole_mut(&mut columns), ReduceOp::Sum)?;
    device.download(B::whole(&columns), &mut digits)?;
    let square = exact::value(&digits);
    if square.is_finite() {
        return Ok(Real::sqrt(square));
    }
    Err(blame(device, syncs, world)?)
}

/// Adds the squares of what a chunk counts, parameter by parameter.
fn squares<B: Optimizer, C: Collectives<B>, E: Scalar>(
    device: &B,
    sync: &GradSync<B, C, E>,
    digits: &mut [f64; DIGITS],
) -> Result<(), Error> {
    let pieces = sync.layout().counted();
    let mut sums = device.zeros::<f64>(Tag::Scratch, pieces.len())?;
    {
        let mut rest = B::whole_mut(&mut sums);
        for Piece { part, range, .. } in &pieces {
            let (sum, others) = B::split_mut(rest, 1);
            device.add_squares::<E::Acc>(sync.part(*part)?.cut(range.clone())?, sum)?;
            rest = others;
        }
    }
    let mut host = alloc::vec![0.0; pieces.len()];
    device.download(B::whole(&sums), &mut host)?;
    host.into_iter().for_each(|sum| exact::add(digits, sum));
    Ok(())
}

/// The factor that brings `norm` to at most `max_norm`, by PyTorch's rule (`clip_grad_norm_`):
/// `min(1, max_norm / (norm + 1e-6))`. It goes into the optimizer's `grad_scale`.
///
/// ```
/// assert_eq!(quintet_zero::clip_factor(0.5, 1.0), 1.0);
/// assert!((quintet_zero::clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
/// ```
#[must_use]
pub fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    (max_norm / (norm + 1e-6)).min(1.0)
}

/// Which element is to blame: each rank names its first, the lowest rank that has one is heard.
fn blame<B: Backend, C: Collectives<B>, E: Scalar>(
    device: &B,
    syncs: &[&GradSync<B, C, E>],
    world: &C,
) -> Result<Error, Error> {
    let mut mine = Vec::new();
    for sync in syncs {
        if let Some((name, index)) = first_bad(device, sync)? {
            mine.extend((index as u64).to_le_bytes());
            mine.extend(name.as_bytes());
            break;
        }
    }
    let all = bytes::all_gather(device, world, &mine)?;
    let found = all
        .into_iter()
        .enumerate()
        .find(|(_, text)| !text.is_empty());
    let Some((rank, text)) = found else {
        return Ok(Error::NormOverflow);
    };
    let (index, name) = text.split_first_chunk().ok_or(Error::Message { rank })?;
    let name = String::from_utf8_lossy(name).into_owned();
    Ok(Error::NonFinite {
        name,
        index: u64::from_le_bytes(*index) as usize,
        rank,
    })
}

fn first_bad<B: Backend, C: Collectives<B>, E: Scalar>(
    device: &B,
    sync: &GradSync<B, C, E>,
) -> Result<Option<(String, usize)>, Error> {
    let layout: &FlatLayout = sync.layout();
    for piece in layout.counted() {
        let mut host = alloc::vec![<E::Acc as Real>::ZERO; piece.range.len()];
        let grad = sync.part(piece.part)?.cut(piece.range.clone())?;
        device.download(grad, &mut host)?;
        let Some(at) = host.iter().position(|x| !Real::is_finite(*x)) else {
            continue;
        };
        let at = piece.range.start + at;
        let run = piece
            .runs
            .iter()
            .find(|(start, _, len)| (*start..start + len).contains(&at));
        let index = run.map_or(0, |(start, logical, _)| logical + (at - start));
        return Ok(Some((
            layout.entries()[piece.entry].spec.name.clone(),
            index,
        )));
    }
    Ok(None)
}
