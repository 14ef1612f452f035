//! Which plans there are: the first two columns of the table in [`crate::plan`], and the parameters.

use alloc::{
    format,
    string::{String, ToString},
};

use super::{Algorithm, CollectiveShape, Operation, PlanSpec};

/// Why there is no such plan, if so.
pub(super) fn refused(shape: &CollectiveShape, spec: &PlanSpec, world: usize) -> Option<String> {
    if world == 0 {
        return Some("a group has at least one rank".to_string());
    }
    if let Some(reason) = shape.unfit(world) {
        return Some(reason);
    }
    let (op, algorithm) = (shape.operation(), spec.algorithm);
    if !offered(op, algorithm) {
        return Some("this algorithm does not offer the operation".to_string());
    }
    match spec.chunk_len {
        Some(0) => return Some("a chunk holds at least one element".to_string()),
        Some(_) if !pipelines(op, algorithm) => {
            return Some("its messages are not cut into chunks".to_string());
        }
        _ => {}
    }
    match &spec.hosts {
        None if algorithm == Algorithm::TwoLevel => {
            Some("it needs to be told the host of each rank".to_string())
        }
        Some(_) if algorithm != Algorithm::TwoLevel => {
            Some("it takes no account of hosts".to_string())
        }
        Some(hosts) if hosts.world() != world => {
            Some(format!("hosts were given for {} ranks", hosts.world()))
        }
        _ => None,
    }
}

/// Whether the plan takes [`PlanSpec::chunk_len`].
pub(crate) fn pipelines(operation: Operation, algorithm: Algorithm) -> bool {
    use Algorithm as A;
    match algorithm {
        A::Ring | A::Tree | A::DoubleTree => operation != Operation::Barrier,
        A::Pairwise => operation == Operation::AllReduce,
        _ => false,
    }
}

/// The table of this module, first two columns.
pub(crate) fn offered(operation: Operation, algorithm: Algorithm) -> bool {
    use Algorithm as A;
    use Operation as O;
    match operation {
        O::AllReduce => true,
        O::ReduceScatter => matches!(
            algorithm,
            A::Pairwise | A::Ring | A::HalvingDoubling | A::TwoLevel
        ),
        O::AllGather => matches!(
            algorithm,
            A::Pairwise | A::Ring | A::RecursiveDoubling | A::Bruck | A::TwoLevel
        ),
        O::Broadcast | O::Reduce => matches!(
            algorithm,
            A::Direct | A::Ring | A::Tree | A::DoubleTree | A::TwoLevel
        ),
        O::Barrier => matches!(
            algorithm,
            A::Direct | A::RecursiveDoubling | A::Bruck | A::TwoLevel
        ),
        O::Gather | O::Scatter => algorithm == A::Direct,
        O::AllToAll => matches!(algorithm, A::Pairwise | A::Bruck | A::TwoLevel),
        // Whoever forwards would have to know the counts of others.
        O::AllToAllV => algorithm == A::Pairwise,
        O::Send | O::Recv => false,
    }
}
