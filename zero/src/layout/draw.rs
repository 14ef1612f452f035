//! The layout as text.

use core::fmt;

use quintet_collectives::{Axis, Factor};

use super::{Entry, FlatLayout, Part};

impl fmt::Display for FlatLayout {
    /// Buckets in the order backward completes them, their parts, and what lies in each.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (stage, pp) = (
            self.mesh.index(self.rank, Axis::Pp),
            self.mesh.degree(Axis::Pp),
        );
        let (rank, len) = (self.rank, self.len());
        writeln!(f, "rank {rank}, stage {stage} of {pp}: {} elements", len)?;
        for (i, bucket) in self.buckets.iter().enumerate() {
            writeln!(f, "bucket {i}: layers {:?}", bucket.layers)?;
            for part in bucket.parts.clone() {
                self.draw_part(f, part)?;
            }
        }
        if !self.tied.is_empty() {
            writeln!(f, "tied bucket")?;
        }
        for part in self.tied.clone() {
            self.draw_part(f, part)?;
        }
        Ok(())
    }
}

impl FlatLayout {
    fn draw_part(&self, f: &mut fmt::Formatter<'_>, index: usize) -> fmt::Result {
        let part = &self.parts[index];
        write!(f, "  part {index}: {} elements, {}", part.len, Sum(part))?;
        if part.places > 1 {
            write!(f, ", mine {:?}", part.chunk(part.place))?;
        }
        writeln!(f)?;
        for &entry in &part.entries {
            let Entry {
                spec, len, offset, ..
            } = &self.entries[entry];
            let of = if *len == spec.len() { "" } else { " in part" };
            let plain = if spec.decay { "" } else { ", no decay" };
            writeln!(
                f,
                "    {offset:>6} +{len:<6} {} {:?}{of}{plain}",
                spec.name, spec.shape
            )?;
        }
        Ok(())
    }
}

struct Sum<'a>(&'a Part);

impl fmt::Display for Sum<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Part {
            shard,
            across,
            extra,
            stages,
            ..
        } = self.0;
        if shard.is_empty() && across.is_empty() && extra.is_empty() && stages.is_empty() {
            return write!(f, "not summed");
        }
        write!(f, "summed over")?;
        let mut then = "";
        if !stages.is_empty() {
            write!(f, " stages {stages:?}")?;
            then = ", then";
        }
        for factors in [extra, shard, across] {
            if !factors.is_empty() {
                write!(f, "{then} ")?;
                write_factors(f, factors)?;
                then = ", then";
            }
        }
        Ok(())
    }
}

fn write_factors(f: &mut fmt::Formatter<'_>, factors: &[Factor]) -> fmt::Result {
    for (i, factor) in factors.iter().enumerate() {
        let cross = if i == 0 { "" } else { " x " };
        write!(f, "{cross}{} {}", factor.axis.name(), factor.degree)?;
    }
    Ok(())
}
