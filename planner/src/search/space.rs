//! What there is to choose from.

use alloc::vec::Vec;

use quintet_parallel_layers::Recompute;
use quintet_parallel_layers::pipeline::ScheduleKind;

use super::{Pins, Request};
use crate::{CpComm, Layout};

/// The divisors of `n`, ascending.
pub(super) fn divisors(n: usize) -> Vec<usize> {
    let mut small: Vec<usize> = (1..)
        .take_while(|d| d * d <= n)
        .filter(|d| n.is_multiple_of(*d))
        .collect();
    let large: Vec<usize> = small.iter().rev().map(|d| n / d).collect();
    let from = usize::from(small.last() == large.first());
    small.extend(large.into_iter().skip(from));
    small
}

/// Every mesh of so many ranks, dense and expert.
pub(super) fn meshes(request: &Request) -> Vec<Layout> {
    let (world, pins) = (request.cluster.gpus, &request.pins);
    let mut meshes = Vec::new();
    let wanted = |pin: Option<usize>, value: &usize| Pins::free(pin, *value);
    for tp in divisors(world).into_iter().filter(|n| wanted(pins.tp, n)) {
        for pp in divisors(world / tp)
            .into_iter()
            .filter(|n| wanted(pins.pp, n))
        {
            let left = world / tp / pp;
            for cp in divisors(left).into_iter().filter(|n| wanted(pins.cp, n)) {
                let dp = left / cp;
                if !wanted(pins.dp, &dp) {
                    continue;
                }
                let mesh = Layout {
                    tp,
                    pp,
                    cp,
                    dp,
                    bucket_bytes: 1,
                    ..Layout::single()
                };
                experts(request, mesh, &mut meshes);
            }
        }
    }
    meshes
}

/// The ways to fold experts into a mesh.
fn experts(request: &Request, mesh: Layout, meshes: &mut Vec<Layout>) {
    let pins = &request.pins;
    let Some(moe) = request.shape.config.moe else {
        let (ep, etp) = (pins.ep.unwrap_or(1), pins.etp.unwrap_or(1));
        meshes.push(Layout { ep, etp, ..mesh });
        return;
    };
    let folded = mesh.tp * mesh.cp * mesh.dp;
    // What is asked for is judged even where it cannot be, so that there is a sentence about it.
    let asked = |pin: Option<usize>, free: Vec<usize>| pin.map_or(free, |n| Vec::from([n]));
    for etp in asked(pins.etp, divisors(mesh.tp)) {
        for ep in asked(pins.ep, divisors(moe.experts)) {
            if pins.ep.is_some() || (folded / etp.max(1)).is_multiple_of(ep) {
                meshes.push(Layout {
                    ep,
                    etp,
                    ..mesh.clone()
                });
            }
        }
    }
}

/// How a sequence that is cut may attend: ring, all-gather, ulysses, and a ring of ulysses groups.
pub(super) fn contexts(cp: usize, pins: &Pins) -> Vec<(CpComm, Option<usize>)> {
    if cp == 1 {
        return Vec::from([(CpComm::Ring, None)]);
    }
    let plain = CpComm::ALL.into_iter().map(|way| (way, None));
    let inner = divisors(cp).into_iter().filter(|u| 1 < *u && *u < cp);
    let mixed = inner.map(|u| (CpComm::Ring, Some(u)));
    let all = plain.chain(mixed);
    all.filter(|(way, _)| Pins::free(pins.cp_comm, *way))
        .collect()
}

/// Orders of work, with the chunks of a stage: of the interleaved ones, for each number of blocks a
/// chunk the fewest chunks that come down to it.
pub(super) fn schedules(pp: usize, layers: usize, pins: &Pins) -> Vec<(ScheduleKind, usize)> {
    use ScheduleKind::{DualPipeV, GPipe, Interleaved, OneFOneB, ZbH1};
    let plain: &[ScheduleKind] = if pp == 1 {
        &[OneFOneB]
    } else {
        &[OneFOneB, GPipe, ZbH1, DualPipeV]
    };
    let mut all: Vec<(ScheduleKind, usize)> = plain.iter().map(|kind| (*kind, 1)).collect();
    if pp > 1 {
        let stage = layers.div_ceil(pp);
        let mut before = stage;
        for chunks in 2..=layers / pp {
            let blocks = layers.div_ceil(pp * chunks);
            if blocks < before || pins.virtual_stages == Some(chunks) {
                all.push((Interleaved, chunks));
                before = blocks;
            }
        }
    }
    all.retain(|(kind, chunks)| {
        Pins::free(pins.schedule, *kind) && Pins::free(pins.virtual_stages, *chunks)
    });
    all
}

/// What backward may compute again.
pub(super) fn recomputes(pins: &Pins) -> Vec<Recompute> {
    let all = [Recompute::None, Recompute::Selective, Recompute::Full];
    let wanted = all.into_iter().filter(|r| Pins::free(pins.recompute, *r));
    wanted.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_all_and_in_order() {
        for n in 1..200 {
            let all: Vec<usize> = (1..=n).filter(|d| n % d == 0).collect();
            assert_eq!(divisors(n), all);
        }
    }

    #[test]
    fn chunks_come_down_to_one_block() {
        let all = schedules(16, 126, &Pins::default());
        let chunks: Vec<usize> = all.iter().map(|(_, v)| *v).filter(|v| *v > 1).collect();
        // 8 blocks a stage: chunks of 4, 3, 2.
        assert_eq!(chunks, [2, 3, 4]);
        let one = schedules(1, 126, &Pins::default());
        assert_eq!(one, [(ScheduleKind::OneFOneB, 1)]);
    }
}
