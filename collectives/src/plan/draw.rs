//! A plan as text, for people and for golden tests: one line per round, one column per rank.
//!
//! ```text
//! >1 0..3    input 0..3 goes to rank 1        <2 4..6    output 4..6 comes from rank 2
//! >1 =0..3   output 0..3 goes to rank 1       <2 +4..6   is folded onto 4..6
//! >1 +0..3   the partial of 0..3 goes         <2 4..6+   4..6 is folded onto it
//! >1 &0..3   the same, and stays              <2 3 kept  three elements kept apart
//! >1 !0..3   the same, complete               <2 ~4..6   laid down in the stash
//! >1 0..3 ~4..6   several parts in one        ! 0..3     own part is complete
//! ```

use alloc::{format, string::String, vec::Vec};
use core::fmt;

use super::{Action, FoldOrder, Local, Part, Place, Plan, Recv, Round, Send, What};

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = match self.fold_order() {
            FoldOrder::RankOrder => "rank",
            FoldOrder::Fixed => "fixed",
        };
        let pieces = match self.pieces {
            1 => String::new(),
            pieces => format!(" in {pieces} pieces"),
        };
        writeln!(
            f,
            "{} by {}, world {}, len {}{pieces}, rounds {}, fold order {order}",
            self.shape().operation(),
            self.algorithm(),
            self.world(),
            self.shape().len(self.world()),
            self.rounds_len(),
        )?;
        let columns: Vec<Vec<Vec<String>>> = (0..self.world())
            .map(|rank| self.rounds(rank).iter().map(cell).collect())
            .collect();
        let widths: Vec<usize> = columns
            .iter()
            .map(|column| {
                column
                    .iter()
                    .flatten()
                    .map(String::len)
                    .max()
                    .unwrap_or(0)
                    .max(7)
            })
            .collect();
        let rounds = columns.iter().map(Vec::len).max().unwrap_or(0);
        let mut head = String::from("round");
        for (rank, width) in widths.iter().enumerate() {
            head += &format!(" | {:<width$}", format!("rank {rank}"));
        }
        writeln!(f, "{}", head.trim_end())?;
        for round in 0..rounds {
            let cells: Vec<&[String]> = columns
                .iter()
                .map(|column| column.get(round).map_or(&[][..], |c| c))
                .collect();
            let lines = cells
                .iter()
                .map(|cell| cell.len())
                .max()
                .unwrap_or(0)
                .max(1);
            for line in 0..lines {
                let mut text = if line == 0 {
                    format!("{round:>5}")
                } else {
                    String::from("     ")
                };
                for (cell, width) in cells.iter().zip(&widths) {
                    text += &format!(" | {:<width$}", cell.get(line).map_or("", |s| s.as_str()));
                }
                writeln!(f, "{}", text.trim_end())?;
            }
        }
        Ok(())
    }
}

fn cell(round: &Round) -> Vec<String> {
    let sends = round.sends.iter().map(|Send { to, what }| match what {
        What::Input(r) => format!(">{to} {r:?}"),
        What::Output(r) => format!(">{to} ={r:?}"),
        What::Partial(r) => format!(">{to} +{r:?}"),
        What::Shared(r) => format!(">{to} &{r:?}"),
        What::Finished(r) => format!(">{to} !{r:?}"),
        What::Parts(parts) => format!(">{to}{}", listed(parts, "=")),
    });
    let recvs = round
        .recvs
        .iter()
        .map(|Recv { from, len, action }| match action {
            Action::Store(at) => format!("<{from} {at}..{}", at + len),
            Action::Fold(r) => format!("<{from} +{r:?}"),
            Action::FoldLeft(r) => format!("<{from} {r:?}+"),
            Action::FoldRaw(ranges) => {
                let ranges = ranges.iter().map(|r| format!(" +{r:?}"));
                format!("<{from}{}", ranges.collect::<String>())
            }
            Action::Keep => format!("<{from} {len} kept"),
            Action::Parts(parts) => format!("<{from}{}", listed(parts, "")),
        });
    let then = round.then.iter().map(|local| match local {
        Local::Copy { input, at } => format!("= {at}..{}", at + input.len()),
        Local::FoldRanks { input, .. }
        | Local::FoldStash { input, .. }
        | Local::Finish { input, .. } => format!("! {input:?}"),
    });
    sends.chain(recvs).chain(then).collect()
}

fn listed(parts: &[Part], output: &str) -> String {
    let mark = |place| match place {
        Place::Input => "",
        Place::Output => output,
        Place::Stash => "~",
    };
    let parts = parts.iter();
    parts
        .map(|Part { place, range }| format!(" {}{range:?}", mark(*place)))
        .collect()
}
