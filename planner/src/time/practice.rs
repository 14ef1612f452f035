//! How another trainer goes about a step, where that changes its seconds and not its results.
//!
//! ```text
//! each copy of a token alone      t --> gpu of its expert                        topk copies between nodes
//! once to a node                  t --> gpu of the same place there --> expert   as many as there are nodes
//! ```

use crate::closed::sent::{Collective, Flow, Group};
use crate::cluster::Cluster;
use crate::links::{Lie, seconds};
use crate::shape::Shape;
use crate::{Invalid, Layout};

/// The default is this project's trainer, whose bytes and memory are counted to the byte. Anything
/// else changes the model of time alone: bytes and memory stay this trainer's.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Practice {
    /// Products of blocks with operands of 8 bits, at their peak; attention proper, the router and
    /// the head stay in the job's type.
    pub fp8: bool,
    /// Bytes of an element on its way to an expert; back it comes in the job's type, which it has
    /// both ways where absent.
    pub dispatch_bytes: Option<usize>,
    /// A token's experts lie on at most so many nodes, and it is sent once to each, whence its copies
    /// go on inside; where absent each copy travels alone.
    pub dispatch_nodes: Option<usize>,
    /// Of a GPU's units, the share that does nothing but send and receive.
    pub communication_share: f64,
}

impl Practice {
    /// DeepSeek-V3 (arXiv:2412.19437, 3.2.2 and 3.3): products in 8 bits; a token goes to four nodes
    /// at most, once to each, in 8 bits, and comes back in 16; 20 of a GPU's 132 multiprocessors
    /// communicate.
    pub const DEEPSEEK_V3: Self = Self {
        fp8: true,
        dispatch_bytes: Some(1),
        dispatch_nodes: Some(4),
        communication_share: 20.0 / 132.0,
    };

    /// Whether the cluster can.
    ///
    /// # Errors
    /// Where it has no peak for 8 bits, or a count is 0.
    pub fn validate(&self, cluster: &Cluster) -> Result<(), Invalid> {
        let no = |text: &str| Err(Invalid(text.into()));
        if self.fp8 && cluster.peak.fp8 <= 0.0 {
            return no("products in 8 bits need GPUs that have them; the cluster's fp8 peak is 0");
        }
        if self.dispatch_bytes == Some(0) || self.dispatch_nodes == Some(0) {
            return no("what is dispatched to experts has at least 1 byte and 1 node");
        }
        if !(0.0..1.0).contains(&self.communication_share) {
            return no("the share of a GPU that communicates is at least 0 and less than 1");
        }
        Ok(())
    }

    /// Seconds of rows on their way to experts and back, `element` bytes being what the flow counts
    /// an element with; `times` is even, half of it there and half of it back.
    pub(super) fn experts(
        &self,
        (shape, layout): (&Shape, &Layout),
        (cluster, lie): (&Cluster, Lie),
        flow: &Flow,
        element: usize,
        efficiency: f64,
    ) -> f64 {
        let narrow = self
            .dispatch_bytes
            .map_or(1.0, |n| n as f64 / element as f64);
        let one = |bytes: f64| match self.dispatch_nodes {
            Some(most) => once_to_a_node((shape, layout), cluster, bytes, most, efficiency),
            None => seconds(
                cluster,
                lie,
                Collective::AllToAll,
                bytes,
                layout.ep,
                efficiency,
            ),
        };
        let bytes = flow.bytes as f64;
        0.5 * flow.times as f64 * (one(narrow * bytes) + one(bytes))
    }
}

/// Seconds of one exchange of which each rank would send `bytes` if every copy travelled alone.
fn once_to_a_node(
    (shape, layout): (&Shape, &Layout),
    cluster: &Cluster,
    bytes: f64,
    most: usize,
    efficiency: f64,
) -> f64 {
    let (stride, ep) = Group::Ep.place(shape, layout);
    let nodes = (stride * ep).div_ceil(cluster.gpus_per_node).max(1) as f64;
    let (ep, copies) = (ep as f64, shape.config.moe.map_or(1, |moe| moe.topk) as f64);
    let here = (ep / nodes).max(1.0);
    let copy = bytes / copies * ep / (ep - 1.0).max(1.0);
    // Nodes that a token's choices come to, were they thrown evenly at those it may go to.
    let limit = nodes.min(most as f64);
    let reached = limit * (1.0 - libm::pow(1.0 - 1.0 / limit, copies));
    let between = copy * reached * (nodes - 1.0) / nodes;
    let inside = copy * copies * (here - 1.0) / here;
    let carried = (inside / cluster.inside.bandwidth).max(between / cluster.between.bandwidth);
    carried / efficiency + cluster.inside.latency + cluster.between.latency
}
