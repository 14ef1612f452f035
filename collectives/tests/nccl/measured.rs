//! What `bench` measures on memory that is not its own.

use quintet_collectives::bench::{Bench, Buffers, Memory, OPERATIONS};
use quintet_collectives::nccl::Nccl;
use quintet_collectives::transport::Transport;
use quintet_collectives::{Communicator, Order, ReduceOp, Result};

use crate::all_well;
use crate::shim::{call_within, library};

/// The host's memory by its addresses, as the stand-in takes it.
struct Addresses {
    /// Whether what comes out is spoilt.
    spoilt: bool,
}

impl<T: Transport + Send + 'static> Memory<Nccl<T>> for Addresses {
    fn chooses(&self) -> Option<&'static str> {
        Some("nccl")
    }

    fn write(&mut self, _: &Buffers) -> Result<()> {
        Ok(())
    }

    fn call(&mut self, comm: &Communicator<Nccl<T>>, buffers: &mut Buffers) -> Result<()> {
        let (shape, places) = (buffers.shape().clone(), buffers.places());
        let elements = buffers.elements_mut();
        call_within(comm, &library(), shape, ReduceOp::Sum, elements, places)
    }

    fn read(&mut self, buffers: &mut Buffers) -> Result<()> {
        let first = buffers.places()[1].start;
        if self.spoilt {
            buffers.elements_mut()[first] += 1.0;
        }
        Ok(())
    }
}

#[test]
fn every_operation_is_measured_where_its_elements_lie() {
    for world in [1, 2, 3] {
        all_well(world, |comm| {
            let comm = comm.subgroup(comm.group(), "any")?.with_order(Order::Any);
            for op in OPERATIONS {
                let bench = Bench {
                    op,
                    iters: 2,
                    warmup: 1,
                    check: true,
                };
                for bytes in [0, 4, 400] {
                    let row = bench.measure_in(&comm, bytes, &mut Addresses { spoilt: false })?;
                    assert_eq!((row.algorithm.as_str(), row.predicted), ("nccl", None));
                    for timing in [Some(row.apart), row.in_place].into_iter().flatten() {
                        assert_eq!(timing.wrong, Some(0), "{op} of {bytes} on {world}");
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn what_lies_there_is_what_is_compared() {
    all_well(2, |comm| {
        let bench = Bench {
            op: OPERATIONS[0],
            iters: 1,
            warmup: 0,
            check: true,
        };
        let row = bench.measure_in(comm, 40, &mut Addresses { spoilt: true })?;
        // One element a rank.
        assert_eq!(row.apart.wrong, Some(2));
        Ok(())
    });
}
