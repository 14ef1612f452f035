//! Names and shapes -> offsets in flat buffers. Pure data, made by a pure function.
//!
//! ```text
//! layers, forward    0 embed     1 block      2 block      3 head
//! backward reaches   <------------------------------------------
//! buckets            [ 1: 0..2             ]  [ 0: 2..4        ]   closed once large enough
//!
//! bucket 0           part 0  | head.w          | block2.wq | ..  |   summed over dp
//!                    part 1  | norm | block2.norm |                  summed over dp x tp
//! bucket 1           part 2  | block1.wq ..                          summed over dp
//!                    part 3  | block1.norm |                         summed over dp x tp
//! tied bucket        part 4  | embed.w |      also on another stage: after the last action
//! ```
//!
//! A *bucket* is a run of layers whose gradients are reduced together, as soon as backward has
//! passed them. A *part* is one flat buffer: the entries of a bucket that share their summing
//! factors. An *entry* is a parameter; one that two layers of this chunk use (an embedding tied to
//! the head) is stored once, in the bucket of the first of them, where its gradient is complete.
//!
//! Buckets are closed by the lengths on the stage's first rank, which holds the longest shards, so
//! that all ranks of a stage agree on them; parts of a bucket are in the order of their factors,
//! so that all ranks start their reductions in one order.

mod build;
mod draw;

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use quintet_collectives::chunk::chunk;
use quintet_collectives::{Axis, DeviceMesh, Factor, ParamSpec};

use crate::Error;

/// What a layout depends on beside the layers, the mesh and the rank.
#[derive(Debug, Clone, Copy)]
pub struct LayoutSpec<'a> {
    /// A bucket is closed once its gradients take so many bytes; 0 gives each layer its own.
    pub bucket_bytes: usize,
    /// Bytes of a gradient element, as it is summed.
    pub element_bytes: usize,
    /// The names that live on several stages.
    pub tied: &'a [Tied],
    /// Neighbouring replicas that shard among themselves, the others holding copies of what they
    /// hold (hybrid sharding); none: all of them. Of experts, which may have fewer replicas, the
    /// greatest common divisor of this and of those.
    pub shard_within: Option<usize>,
}

/// A name whose copies live on several pipeline stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tied {
    /// The parameter's name.
    pub name: String,
    /// The stages that hold it.
    pub stages: Vec<usize>,
}

/// A parameter of this rank and where it lies.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The ledger's line.
    pub spec: ParamSpec,
    /// The first layer, in forward order, that uses it.
    pub layer: usize,
    /// Elements on this rank.
    pub len: usize,
    /// The part that holds it.
    pub part: usize,
    /// Where it begins in the part.
    pub offset: usize,
}

impl Entry {
    /// The range of the part's buffer.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len
    }
}

/// One flat buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Over which replicas the sum is sharded: the factors of dp, cp (dense) or edp (experts).
    pub shard: Vec<Factor>,
    /// Replicas that hold copies of the shards, under hybrid sharding; their sum comes last.
    pub across: Vec<Factor>,
    /// The other factors of the sum; they come first.
    pub extra: Vec<Factor>,
    /// The stages that hold copies, where there are several; their sum comes before all others.
    pub stages: Vec<usize>,
    /// The entries, in the order they lie.
    pub entries: Vec<usize>,
    /// Elements.
    pub len: usize,
    /// Ranks that `shard` spans.
    pub places: usize,
    /// This rank's place among them.
    pub place: usize,
}

impl Part {
    /// What the rank at `place` owns under ZeRO, and counts under any stage: no padding, may cut
    /// through an entry, may be empty.
    #[must_use]
    pub fn chunk(&self, place: usize) -> Range<usize> {
        chunk(self.len, self.places, place)
    }

    /// The lengths of all ranks' chunks, in the order of the group.
    #[must_use]
    pub fn counts(&self) -> Vec<usize> {
        (0..self.places).map(|p| self.chunk(p).len()).collect()
    }
}

/// A run of layers whose gradients are reduced together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// The layers, in forward order.
    pub layers: Range<usize>,
    /// Its parts.
    pub parts: Range<usize>,
}

/// Elements of one entry that this rank counts in the norm and writes into a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The entry.
    pub entry: usize,
    /// Its part.
    pub part: usize,
    /// Range in the part's buffer.
    pub range: Range<usize>,
    /// The same as runs `(index in the part, logical index, length)`.
    pub runs: Vec<(usize, usize, usize)>,
}

/// Where every parameter of one chunk lies on one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct FlatLayout {
    mesh: DeviceMesh,
    rank: usize,
    entries: Vec<Entry>,
    parts: Vec<Part>,
    buckets: Vec<Bucket>,
    tied: Range<usize>,
    layers: Vec<Vec<usize>>,
}

impl FlatLayout {
    /// Lays out the layers of a chunk, given in forward order, each with its parameters in the
    /// order of its views.
    ///
    /// # Errors
    /// [`Error::Param`] where one name is given with two shapes or placements, twice in one layer,
    /// with a placement that a parameter cannot have, or tied to stages without this one.
    pub fn build(
        layers: &[Vec<ParamSpec>],
        mesh: &DeviceMesh,
        rank: usize,
        spec: &LayoutSpec<'_>,
    ) -> Result<Self, Error> {
        build::build(layers, mesh, rank, spec)
    }

    /// The mesh.
    #[must_use]
    pub fn mesh(&self) -> &DeviceMesh {
        &self.mesh
    }

    /// The rank whose layout this is.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Every parameter of this rank, once.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The flat buffers: those of bucket 0 first, those of the tied bucket last.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The buckets in the order backward completes them, without the tied one.
    #[must_use]
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The parts of the tied bucket, reduced after the last action of the step.
    #[must_use]
    pub fn tied(&self) -> Range<usize> {
        self.tied.clone()
    }

    /// The runs of layers that make the buckets, in the order backward reaches them: the segments
    /// of a pipeline schedule.
    #[must_use]
    pub fn segments(&self) -> Vec<Range<usize>> {
        self.buckets.iter().map(|b| b.layers.clone()).collect()
    }

    /// Number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The entries of a layer, in the order of its views.
    ///
    /// # Errors
    /// [`Error::Index`] where there is no such layer.
    pub fn layer(&self, layer: usize) -> Result<&[usize], Error> {
        let count = self.layers.len();
        let found = self.layers.get(layer).ok_or(Error::Index {
            what: "layer",
            index: layer,
            count,
        })?;
        Ok(found)
    }

    /// The parts that the layers of a bucket read, ascending: its own, and those of tables that lie
    /// elsewhere; none where there is no such bucket.
    #[must_use]
    pub fn parts_of(&self, bucket: usize) -> Vec<usize> {
        let layers = self.buckets.get(bucket).map(|b| b.layers.clone());
        let used = self.layers[layers.unwrap_or(0..0)].iter().flatten();
        let mut parts: Vec<usize> = used.map(|&e| self.entries[e].part).collect();
        parts.sort_unstable();
        parts.dedup();
        parts
    }

    /// Elements of all parts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.parts.iter().map(|p| p.len).sum()
    }

    /// Whether this rank holds no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of an entry within `range` of its part's buffer, as runs
    /// `(index in the part, logical index, length)`.
    #[must_use]
    pub fn runs(&self, entry: &Entry, range: &Range<usize>) -> Vec<(usize, usize, usize)> {
        let runs = entry.spec.runs(&self.mesh, self.rank).into_iter();
        let cut = runs.filter_map(|(local, logical, len)| {
            let at = entry.offset + local;
            let (start, end) = (at.max(range.start), (at + len).min(range.end));
            (start < end).then(|| (start, logical + (start - at), end - start))
        });
        cut.collect()
    }

    /// What this rank counts: over all ranks, each logical element exactly once. It is the rank's
    /// chunk of each part, whatever the ZeRO stage, so that a norm has the same bits under all of
    /// them; ranks that are not first on an extra factor or among copies of a shard, or on a later
    /// stage of a tie, count nothing.
    #[must_use]
    pub fn counted(&self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let stage = self.mesh.index(self.rank, Axis::Pp);
        for (part, p) in self.parts.iter().enumerate() {
            if p.stages.first().is_some_and(|&first| first != stage) {
                continue;
            }
            let owned = p.chunk(p.place);
            for &entry in &p.entries {
                let e = &self.entries[entry];
                if !self.first_elsewhere(p, &e.spec) {
                    continue;
                }
                let runs = self.runs(e, &owned);
                let (start, end) = (e.offset.max(owned.start), (e.offset + e.len).min(owned.end));
                if start < end {
                    let range = start..end;
                    pieces.push(Piece {
                        entry,
                        part,
                        range,
                        runs,
                    });
                }
            }
        }
        pieces
    }

    /// Whether this rank comes first on every factor on which equal elements lie and that is not
    /// cut by ownership.
    fn first_elsewhere(&self, part: &Part, spec: &ParamSpec) -> bool {
        let summed = spec.summed_over();
        let owned = |f: &Factor| is_replica(f.axis) && summed.contains(f);
        let mut equal = spec.at_use.iter().filter(|(_, p)| !p.is_shard());
        let first = |f: &Factor| f.degree == 1 || self.mesh.place(self.rank, *f) == 0;
        equal.all(|(f, _)| owned(f) || first(f)) && part.across.iter().all(first)
    }
}

/// Whether an axis holds replicas of parameters, over which ZeRO shards.
fn is_replica(axis: Axis) -> bool {
    matches!(axis, Axis::Dp | Axis::Cp | Axis::Edp)
}
