//! What gradients and parameters send in a step.

use alloc::vec::Vec;

use super::{Collective, Flow, Group, Sums, When};
use crate::Layout;
use crate::closed::parts::{Parts, Places};
use crate::shape::Shape;
use crate::traffic::WireTypes;

/// What gradients and parameters of a layer with these parts send in a step in which each replica
/// has `microbatches`.
#[must_use]
pub fn states(
    parts: &Parts,
    layout: &Layout,
    shape: &Shape,
    (types, sums): (WireTypes, Sums),
    microbatches: u64,
) -> Vec<Flow> {
    let moved = |what, len, n, dtype| sums.moved(what, len, n, dtype);
    use Collective::{AllGather, AllReduce, ReduceScatter};
    let (places, zero) = (Places::of(layout), layout.zero_stage);
    let (acc, storage) = (types.accumulation, types.storage);
    let mut flows = Vec::new();
    let mut push = |group, collective, when, bytes: u64, times: u64| {
        if bytes > 0 && times > 0 {
            flows.push(Flow {
                group,
                collective,
                when,
                bytes,
                times,
            });
        }
    };
    for (part, (len, n)) in parts.each(places).into_iter().enumerate() {
        let group = if part == 3 { Group::Edp } else { Group::Dp };
        // Under ZeRO-2 and 3 what others own is summed after each microbatch.
        let (when, times) = if zero >= 2 && n > 1 {
            (When::BackwardBeside, microbatches)
        } else {
            (When::After, 1)
        };
        let extra = match part {
            1 => Some((Group::Tp, layout.tp)),
            2 => Some((Group::Rep, Group::Rep.place(shape, layout).1)),
            _ => None,
        };
        if let Some((group, ranks)) = extra {
            let bytes = moved(AllReduce, len, ranks as u64, acc);
            push(group, AllReduce, when, bytes, times);
        }
        if zero == 0 {
            push(
                group,
                AllReduce,
                When::After,
                moved(AllReduce, len, n, acc),
                1,
            );
            continue;
        }
        push(
            group,
            ReduceScatter,
            when,
            moved(ReduceScatter, len, n, acc),
            times,
        );
        let gather = moved(AllGather, len, n, storage);
        if zero < 3 {
            push(group, AllGather, When::After, gather, 1);
        } else {
            push(group, AllGather, When::ForwardBeside, gather, microbatches);
            push(group, AllGather, When::BackwardBeside, gather, microbatches);
        }
    }
    flows
}
