//! The choice, and the table that says why.

use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::fmt;

use super::{Model, net::Net, overrides::Word, predict::Query};
use crate::{
    Algorithm as A, DType, Order,
    plan::{Operation, PlanSpec, offered, pipelines},
};

/// Every algorithm that offers an operation, judged.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// The operation.
    pub operation: Operation,
    /// Ranks in the group.
    pub world: usize,
    /// Bytes of the whole buffer; 0 for all_to_all_v, whose counts are not equal on all ranks.
    pub bytes: u64,
    /// The element type.
    pub dtype: DType,
    /// The order asked for.
    pub order: Order,
    /// In the order in which ties are broken.
    pub rows: Vec<Row>,
}

/// One algorithm.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The algorithm with the parameters it would have.
    pub spec: PlanSpec,
    /// What is thought of it.
    pub verdict: Verdict,
}

/// What is thought of an algorithm.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// It would take so long.
    Seconds(f64),
    /// It must not be, or makes no sense here.
    Excluded(&'static str),
}

/// As few bytes as a chunk may have before its rounds cost more than they hide.
const LEAST_CHUNK: u64 = 8 << 10;

/// The most pieces tried.
const MOST_PIECES: usize = 4096;

impl Explanation {
    /// The fastest candidate; of equals the first.
    #[must_use]
    pub fn chosen(&self) -> Option<(&PlanSpec, f64)> {
        let candidates = self.rows.iter().filter_map(|row| match row.verdict {
            Verdict::Seconds(seconds) => Some((&row.spec, seconds)),
            Verdict::Excluded(_) => None,
        });
        candidates.reduce(|best, next| if less(next.1, best.1) { next } else { best })
    }

    /// The reasons against each, for the error that nothing is left.
    pub(super) fn why_none(&self) -> String {
        let reasons = self.rows.iter().map(|row| match row.verdict {
            Verdict::Excluded(reason) => format!("{} ({reason})", row.spec.algorithm),
            Verdict::Seconds(_) => row.spec.algorithm.to_string(),
        });
        let reasons: Vec<String> = reasons.collect();
        format!(
            "nothing is left for {} over {} ranks under order {}: {}",
            self.operation,
            self.world,
            self.order,
            reasons.join(", ")
        )
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} of {} bytes ({}) over {} ranks, order {}",
            self.operation, self.bytes, self.dtype, self.world, self.order
        )?;
        let chosen = self.chosen().map(|(spec, _)| spec.algorithm);
        for row in &self.rows {
            let name = row.spec.algorithm.name();
            let mark = if chosen == Some(row.spec.algorithm) {
                '*'
            } else {
                ' '
            };
            match row.verdict {
                Verdict::Seconds(seconds) => {
                    write!(f, "{mark} {name:<18} {:>12.2} us", seconds * 1e6)?;
                    if let Some(len) = row.spec.chunk_len {
                        write!(f, "  chunks of {len}")?;
                    }
                    writeln!(f)?;
                }
                Verdict::Excluded(reason) => {
                    writeln!(f, "{mark} {name:<18} {:>12}     {reason}", "-")?
                }
            }
        }
        Ok(())
    }
}

impl Model {
    pub(super) fn explain_query(&self, query: &Query, order: Order) -> Explanation {
        let net = Net::of(self, query);
        let offers = A::ALL.into_iter().filter(|a| offered(query.op, *a));
        let rows = offers.map(
            |algorithm| match self.judge(&net, query, order, algorithm) {
                Ok((spec, seconds)) => Row {
                    spec,
                    verdict: Verdict::Seconds(seconds),
                },
                Err(reason) => Row {
                    spec: algorithm.into(),
                    verdict: Verdict::Excluded(reason),
                },
            },
        );
        Explanation {
            operation: query.op,
            world: query.world,
            bytes: query.bytes(),
            dtype: query.dtype,
            order,
            rows: rows.collect(),
        }
    }

    /// What [`Explanation::chosen`] says, without the table.
    pub(super) fn best(&self, query: &Query, order: Order) -> Option<(PlanSpec, f64)> {
        let net = Net::of(self, query);
        let offers = A::ALL.into_iter().filter(|a| offered(query.op, *a));
        offers
            .filter_map(|algorithm| self.judge(&net, query, order, algorithm).ok())
            .reduce(|best, next| if less(next.1, best.1) { next } else { best })
    }

    /// Hard constraints, then the overrides, then the time.
    fn judge(
        &self,
        net: &Net<'_>,
        query: &Query,
        order: Order,
        algorithm: A,
    ) -> Result<(PlanSpec, f64), &'static str> {
        if let Some(reason) = self.excluded(query, order, algorithm) {
            return Err(reason);
        }
        let word = self.overrides.word(query.op, query.bytes(), algorithm);
        let chunk = match word {
            Word::Forbidden => return Err("override: it is forbidden"),
            Word::Passed => return Err("override: others are demanded"),
            Word::Demanded(chunk) => chunk,
            Word::Free => None,
        };
        let hosts = match (self.topology_of(query.world), algorithm) {
            (Some(topology), A::TwoLevel) => Some(topology.hosts().clone()),
            _ => None,
        };
        let mut spec = PlanSpec {
            algorithm,
            chunk_len: None,
            hosts,
        };
        if let Some(bytes) = chunk {
            let len = usize::try_from(bytes / query.dtype.bytes() as u64).unwrap_or(usize::MAX);
            let len = len.max(1);
            spec.chunk_len = Some(len);
            let pieces = cut(query, algorithm).div_ceil(len).max(1);
            return Ok((spec, net.seconds(query, algorithm, pieces)));
        }
        let (pieces, seconds) = pieces(net, query, algorithm);
        if pieces > 1 {
            spec.chunk_len = Some(cut(query, algorithm).div_ceil(pieces).max(1));
        }
        Ok((spec, seconds))
    }

    /// Why an algorithm that offers the operation must not be, or makes no sense.
    fn excluded(&self, query: &Query, order: Order, algorithm: A) -> Option<&'static str> {
        let apart = matches!(algorithm, A::Direct | A::Pairwise | A::Bruck);
        if order == Order::Rank && query.op.folds() && !apart {
            return Some(match algorithm {
                A::TwoLevel => {
                    "order rank: it folds on each host before the parts meet their owner"
                }
                _ => "order rank: it folds on the way, not at the owner from left to right",
            });
        }
        if algorithm != A::TwoLevel {
            return None;
        }
        match self.topology_of(query.world) {
            None => Some("world: no hosts are known, so all ranks count as one"),
            Some(all) if all.hosts().len() == 1 => Some("world: all ranks share one host"),
            Some(all) if all.hosts().most() == 1 => Some("world: no two ranks share a host"),
            Some(_) => None,
        }
    }
}

/// Whether a time is less than another by more than roundings make of times that are equal by their formulas.
fn less(seconds: f64, than: f64) -> bool {
    seconds < than * (1.0 - 1e-9)
}

/// Elements that are cut into pieces.
fn cut(query: &Query, algorithm: A) -> usize {
    match (algorithm, query.op) {
        (A::DoubleTree, _) => query.len.div_ceil(2),
        (A::Ring, Operation::Broadcast | Operation::Reduce) => query.len,
        (A::Ring | A::Pairwise, _) => query.len.div_ceil(query.world),
        _ => query.len,
    }
}

/// The number of pieces with the least time, among powers of two, and that time.
fn pieces(net: &Net<'_>, query: &Query, algorithm: A) -> (usize, f64) {
    let mut best = (1, net.seconds(query, algorithm, 1));
    // A ring is all links at work already, and a binomial tree's root is its bound.
    let chain = matches!(query.op, Operation::Broadcast | Operation::Reduce);
    let gains = match algorithm {
        A::DoubleTree => true,
        A::Pairwise => query.near,
        A::Ring => chain,
        _ => false,
    };
    if !gains || !pipelines(query.op, algorithm) {
        return best;
    }
    let bytes = cut(query, algorithm) as u64 * query.dtype.bytes() as u64;
    let mut pieces = 2;
    while pieces <= MOST_PIECES && bytes / pieces as u64 >= LEAST_CHUNK {
        let seconds = net.seconds(query, algorithm, pieces);
        if less(seconds, best.1) {
            best = (pieces, seconds);
        }
        pieces *= 2;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        CollectiveShape,
        cost::{Constants, Curve},
    };

    /// A ring of two sends what pairs do; with these constants its sum is rounded to a little less.
    #[test]
    fn equal_times_are_not_settled_by_roundings() {
        let within = Constants {
            latency: 2.512940625e-5,
            overhead: 5.56309375e-6,
            send: Curve::flat(2.3596933484077455e-9),
            fold: Curve::flat(1.5881752967834473e-10),
        };
        let model = Model {
            within,
            ..Model::default()
        };
        let shape = CollectiveShape::AllReduce { len: 1 << 20 };
        let table = model.explain(&shape, 2, DType::F32, Order::Any).unwrap();
        let time = |algorithm| {
            let row = table.rows.iter().find(|r| r.spec.algorithm == algorithm);
            match row.unwrap().verdict {
                Verdict::Seconds(seconds) => seconds,
                Verdict::Excluded(_) => f64::NAN,
            }
        };
        assert!(time(A::Ring) < time(A::Pairwise));
        assert!(time(A::Ring) > time(A::Pairwise) * (1.0 - 1e-12));
        assert_eq!(table.chosen().unwrap().0.algorithm, A::Pairwise);
        let chosen = model.choose(&shape, 2, DType::F32, Order::Any).unwrap();
        assert_eq!(chosen.algorithm, A::Pairwise);
    }
}
