//! From layers to entries, from entries to buckets, from buckets to parts.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use quintet_collectives::{Axis, DeviceMesh, Factor, IndexMap, ParamSpec, Placement};

use super::{Bucket, Entry, FlatLayout, LayoutSpec, Part, is_replica};
use crate::Error;

pub(super) fn build(
    layers: &[Vec<ParamSpec>],
    mesh: &DeviceMesh,
    rank: usize,
    spec: &LayoutSpec<'_>,
) -> Result<FlatLayout, Error> {
    let (mut entries, layers) = collect(layers, mesh, rank)?;
    let stages = stages(&entries, mesh, rank, spec)?;
    let mut parts = Vec::new();
    let mut buckets = Vec::new();
    let first = mesh.index(rank, Axis::Pp) * (mesh.world() / mesh.degree(Axis::Pp));
    let (mut pending, mut bytes, mut end) = (Vec::new(), 0, layers.len());
    for layer in (0..layers.len()).rev() {
        for &i in &layers[layer] {
            if entries[i].layer == layer && stages[i].is_empty() {
                pending.push((Vec::new(), i));
                bytes += entries[i].spec.local_len(mesh, first) * spec.element_bytes;
            }
        }
        if bytes >= spec.bucket_bytes || layer == 0 {
            let from = parts.len();
            place(pending, &mut entries, &mut parts, (mesh, rank), spec)?;
            let parts = from..parts.len();
            buckets.push(Bucket {
                layers: layer..end,
                parts,
            });
            (pending, bytes, end) = (Vec::new(), 0, layer);
        }
    }
    // Tied entries lie by name, so that the buffers of all their stages agree.
    let mut tied: Vec<(Vec<usize>, usize)> = (0..entries.len())
        .filter(|&i| !stages[i].is_empty())
        .map(|i| (stages[i].clone(), i))
        .collect();
    tied.sort_by(|a, b| entries[a.1].spec.name.cmp(&entries[b.1].spec.name));
    let from = parts.len();
    place(tied, &mut entries, &mut parts, (mesh, rank), spec)?;
    let tied = from..parts.len();
    Ok(FlatLayout {
        mesh: *mesh,
        rank,
        entries,
        parts,
        buckets,
        tied,
        layers,
    })
}

/// Every parameter once, and each layer's views as entries.
fn collect(
    layers: &[Vec<ParamSpec>],
    mesh: &DeviceMesh,
    rank: usize,
) -> Result<(Vec<Entry>, Vec<Vec<usize>>), Error> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut by_name: BTreeMap<&str, usize> = BTreeMap::new();
    let mut views = Vec::new();
    for (layer, specs) in layers.iter().enumerate() {
        let mut here = Vec::new();
        for spec in specs {
            check(spec)?;
            let entry = *by_name.entry(&spec.name).or_insert(entries.len());
            if let Some(known) = entries.get(entry) {
                same(&known.spec, spec)?;
            } else {
                let len = spec.local_len(mesh, rank);
                entries.push(Entry {
                    spec: spec.clone(),
                    layer,
                    len,
                    part: 0,
                    offset: 0,
                });
            }
            if here.contains(&entry) {
                return Err(refused(spec, format!("layer {layer} names it twice")));
            }
            here.push(entry);
        }
        views.push(here);
    }
    Ok((entries, views))
}

/// Refuses placements that a parameter cannot have at use.
fn check(spec: &ParamSpec) -> Result<(), Error> {
    let mut seen = BTreeSet::new();
    for (factor, placement) in &spec.at_use {
        let why = match placement {
            Placement::Partial => "a parameter cannot be a sum still to be taken".into(),
            Placement::Shard { dim, .. } if *dim >= spec.shape.len() => {
                format!(
                    "{placement} cuts a dim that the shape {:?} does not have",
                    spec.shape
                )
            }
            Placement::Shard {
                map: IndexMap::Zigzag | IndexMap::Ragged,
                ..
            } => {
                format!("{placement} is a map of tokens; parameters are cut in contiguous runs")
            }
            _ if factor.axis == Axis::Pp => {
                "stages hold different parameters, or tied ones: pp has no placement".into()
            }
            _ if factor.degree > 1 && !seen.insert(*factor) => {
                format!("two placements on one factor of {}", factor.axis.name())
            }
            _ => continue,
        };
        return Err(refused(spec, why));
    }
    Ok(())
}

/// Refuses two lines of one name that differ in what must agree.
fn same(known: &ParamSpec, spec: &ParamSpec) -> Result<(), Error> {
    let why = if known.shape != spec.shape {
        format!(
            "two layers give it the shapes {:?} and {:?}",
            known.shape, spec.shape
        )
    } else if known.at_use != spec.at_use {
        "two layers place it differently; one storage has one placement".into()
    } else if known.decay != spec.decay {
        "one layer lets it decay and another does not".into()
    } else {
        return Ok(());
    };
    Err(refused(spec, why))
}

fn refused(spec: &ParamSpec, why: String) -> Error {
    Error::Param {
        name: spec.name.clone(),
        why,
    }
}

/// For each entry the stages that hold copies, ascending; none where this is the only one.
fn stages(
    entries: &[Entry],
    mesh: &DeviceMesh,
    rank: usize,
    spec: &LayoutSpec<'_>,
) -> Result<Vec<Vec<usize>>, Error> {
    let (here, pp) = (mesh.index(rank, Axis::Pp), mesh.degree(Axis::Pp));
    let of = |entry: &Entry| {
        let tied = spec.tied.iter().filter(|t| t.name == entry.spec.name);
        let stages: BTreeSet<usize> = tied.flat_map(|t| t.stages.iter().copied()).collect();
        if stages.last().is_some_and(|&s| s >= pp) || !(stages.is_empty() || stages.contains(&here))
        {
            let why = format!("it is tied on stages {stages:?}, and this is stage {here} of {pp}");
            return Err(refused(&entry.spec, why));
        }
        let several = stages.len() > 1;
        Ok(if several {
            stages.into_iter().collect()
        } else {
            Vec::new()
        })
    };
    entries.iter().map(of).collect()
}

/// Makes one part for each distinct set of stages and summing factors, in their order.
fn place(
    entries: Vec<(Vec<usize>, usize)>,
    all: &mut [Entry],
    parts: &mut Vec<Part>,
    (mesh, rank): (&DeviceMesh, usize),
    spec: &LayoutSpec<'_>,
) -> Result<(), Error> {
    let mut sets: BTreeMap<(Vec<usize>, Vec<Factor>), Vec<usize>> = BTreeMap::new();
    for (stages, entry) in entries {
        let factors = normal(all[entry].spec.summed_over());
        sets.entry((stages, factors)).or_default().push(entry);
    }
    for ((stages, factors), entries) in sets {
        let (replicas, extra): (Vec<Factor>, Vec<Factor>) =
            factors.into_iter().partition(|f| is_replica(f.axis));
        let (across, shard) = match spec.shard_within {
            None => (Vec::new(), replicas),
            Some(within) => hybrid(&replicas, within).map_err(|why| {
                let first = entries.first().copied().unwrap_or_default();
                refused(&all[first].spec, why)
            })?,
        };
        let mut len = 0;
        for &entry in &entries {
            all[entry].part = parts.len();
            all[entry].offset = len;
            len += all[entry].len;
        }
        let group = mesh.group(rank, &shard);
        let place = group.iter().position(|&r| r == rank).unwrap_or(0);
        let places = group.len();
        parts.push(Part {
            shard,
            across,
            extra,
            stages,
            entries,
            len,
            places,
            place,
        });
    }
    Ok(())
}

/// Cuts the replicas, outer to inner, into those that hold copies and `within` neighbours that
/// shard among themselves.
fn hybrid(replicas: &[Factor], within: usize) -> Result<(Vec<Factor>, Vec<Factor>), String> {
    let all: usize = replicas.iter().map(|f| f.degree).product();
    let (mut across, mut shard) = (Vec::new(), Vec::new());
    let mut left = gcd(all, within);
    for &f in replicas.iter().rev() {
        let inner = gcd(f.degree, left);
        if inner != f.degree && inner != left {
            return Err(format!(
                "{within} neighbours of {all} replicas are no block of {} {}",
                f.axis.name(),
                f.degree
            ));
        }
        let cut = |stride, degree| Factor {
            stride,
            degree,
            ..f
        };
        if inner > 1 {
            shard.push(cut(f.stride, inner));
        }
        if inner < f.degree {
            across.push(cut(f.stride * inner, f.degree / inner));
        }
        left /= inner;
    }
    across.reverse();
    shard.reverse();
    Ok((across, shard))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Sorted, and factors that together make a larger factor of their axis joined.
fn normal(mut factors: Vec<Factor>) -> Vec<Factor> {
    factors.sort_unstable_by_key(|f| (f.axis, core::cmp::Reverse(f.stride), f.degree));
    let mut joined: Vec<Factor> = Vec::new();
    for f in factors {
        match joined.last_mut() {
            Some(outer) if outer.axis == f.axis && outer.stride == f.stride * f.degree => {
                outer.stride = f.stride;
                outer.degree *= f.degree;
            }
            _ => joined.push(f),
        }
    }
    joined
}
