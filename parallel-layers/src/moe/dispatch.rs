//! Rows to the ranks of their experts and back.
//!
//! ```text
//! this rank     rows by expert           [ e0 e1 | e2 e3 ]          ep 2: experts 0 1, 2 3
//!    | all-to-all over ep                 to 0    to 1
//! on ep 0       by source, then expert   [ e0 e1 | e0 e1 ]          from 0, from 1
//!    | all-gather over etp
//!               by etp, source, expert   [ e0 e1 | e0 e1 ][ e0 e1 | e0 e1 ]
//!    | regroup
//!               by expert, source, etp   [ e0 e0 e0 e0 | e1 e1 e1 e1 ]
//! ```
//!
//! Within an expert rows are in the order of their source's rank, then of (token, k). Counts go
//! ahead: an all-to-all over ep and an all-gather over etp, of fixed length. The way back is the
//! mirror, with a reduce-scatter for the all-gather; each is the other's adjoint, so backward uses
//! the same two.
//!
//! Indices are made and kept on the host, where the counts are needed anyway.

use alloc::vec;
use alloc::vec::Vec;

use quintet_collectives::ReduceOp;
use quintet_kernels::moe::{Combine, Permutation, Permute};
use quintet_kernels::{Backend, Collectives, Scalar, Tag};

use crate::{Ctx, Error};

/// Which row goes where.
#[derive(Debug)]
pub(super) struct Dispatch {
    plan: Permutation,
    width: usize,
    /// Rows to and from each ep rank.
    send: Vec<usize>,
    recv: Vec<usize>,
    /// Rows that each etp rank received.
    parts: Vec<usize>,
    /// Rows of each expert here.
    counts: Vec<usize>,
    /// For each row by expert, where it arrived; none where that is the order of arrival.
    regroup: Option<Vec<i32>>,
    /// Its inverse.
    ungroup: Option<Vec<i32>>,
}

impl Dispatch {
    /// Plans from the experts of this rank's pairs, and exchanges counts.
    pub(super) fn new<B: Backend, C: Collectives<B>>(
        ctx: &Ctx<'_, B, C>,
        kept_tk: &[i32],
        experts: usize,
        width: usize,
    ) -> Result<Self, Error> {
        let plan = Permutation::new(kept_tk, experts);
        let (ep, etp) = (ctx.ep.world(), ctx.etp.world());
        let here = experts / ep;
        let host: Vec<i32> = plan.counts().iter().map(|&n| n as i32).collect();
        let mut counts = host.clone();
        if ep > 1 {
            let each = vec![here; ep];
            let mine = ctx.device.upload(Tag::Scratch, &host)?;
            let mut theirs = ctx.device.zeros::<i32>(Tag::Scratch, experts)?;
            ctx.ep
                .all_to_all(B::whole(&mine), &each, B::whole_mut(&mut theirs), &each)?;
            ctx.device.download(B::whole(&theirs), &mut counts)?;
        }
        let recv = sums(&counts, here);
        if etp > 1 {
            let mine = ctx.device.upload(Tag::Scratch, &counts)?;
            let mut all = ctx.device.zeros::<i32>(Tag::Scratch, etp * experts)?;
            ctx.etp
                .all_gather(B::whole(&mine), &vec![experts; etp], B::whole_mut(&mut all))?;
            counts = vec![0; etp * experts];
            ctx.device.download(B::whole(&all), &mut counts)?;
        }
        let send = plan
            .counts()
            .chunks(here.max(1))
            .map(|c| c.iter().sum())
            .collect();
        let (regroup, per_expert) = regrouped(&counts, ep, etp, here);
        let alone = ep * etp == 1;
        let ungroup = (!alone).then(|| inverse(&regroup));
        Ok(Self {
            plan,
            width,
            send,
            recv,
            parts: sums(&counts, experts),
            counts: per_expert,
            regroup: (!alone).then_some(regroup),
            ungroup,
        })
    }

    /// Rows of each expert of this rank, once they have come.
    pub(super) fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// This rank's rows by expert, from its tokens.
    pub(super) fn gather<B: Permute, E: Scalar>(
        &self,
        device: &B,
        topk: usize,
        x_td: B::Ref<'_, E>,
    ) -> Result<B::Buf<E>, Error> {
        let tokens: Vec<i32> = self.plan.pairs().iter().map(|p| p / topk as i32).collect();
        gathered(device, self.width, &tokens, x_td)
    }

    /// Rows where their experts are, by expert.
    pub(super) fn to_experts<B: Permute, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        mut rows: B::Buf<E>,
    ) -> Result<B::Buf<E>, Error> {
        let dev = ctx.device;
        if ctx.ep.world() > 1 {
            rows = exchange(ctx, self.width, &rows, &self.send, &self.recv)?;
        }
        if ctx.etp.world() > 1 {
            let counts = self.elements(&self.parts);
            let mut all = dev.alloc(Tag::Activation, counts.iter().sum())?;
            ctx.etp
                .all_gather(B::whole(&rows), &counts, B::whole_mut(&mut all))?;
            rows = all;
        }
        if let Some(index) = &self.regroup {
            rows = gathered(dev, self.width, index, B::whole(&rows))?;
        }
        Ok(rows)
    }

    /// The way back: this rank's rows, each summed over the parts of its expert.
    pub(super) fn to_tokens<B: Permute, C: Collectives<B>, E: Scalar>(
        &self,
        ctx: &Ctx<'_, B, C>,
        mut rows: B::Buf<E>,
    ) -> Result<B::Buf<E>, Error> {
        let dev = ctx.device;
        if let Some(index) = &self.ungroup {
            rows = gathered(dev, self.width, index, B::whole(&rows))?;
        }
        if ctx.etp.world() > 1 {
            let counts = self.elements(&self.parts);
            let mut mine = dev.alloc(Tag::Activation, counts[ctx.etp.rank()])?;
            let sum = ReduceOp::Sum;
            ctx.etp
                .reduce_scatter(B::whole(&rows), &counts, B::whole_mut(&mut mine), sum)?;
            rows = mine;
        }
        if ctx.ep.world() > 1 {
            rows = exchange(ctx, self.width, &rows, &self.recv, &self.send)?;
        }
        Ok(rows)
    }

    /// `y[t] = sum over k of weight[t,k] row of (t,k)`.
    pub(super) fn combine<B: Permute, E: Scalar>(
        &self,
        device: &B,
        topk: usize,
        weight_tk: Option<B::Ref<'_, E::Acc>>,
        rows: &B::Buf<E>,
        y_td: &mut B::Buf<E>,
    ) -> Result<(), Error> {
        let index = self.upload(device)?;
        let by = self.by::<B>(topk, &index);
        Ok(device.combine::<E>(by, weight_tk, B::whole(rows), B::whole_mut(y_td))?)
    }

    /// Gradients of the rows and of the weights from that of y.
    pub(super) fn combine_backward<B: Permute, E: Scalar>(
        &self,
        device: &B,
        topk: usize,
        weight_tk: B::Ref<'_, E::Acc>,
        rows: &B::Buf<E>,
        dy_td: B::Ref<'_, E>,
    ) -> Result<(B::Buf<E>, B::Buf<E::Acc>), Error> {
        let index = self.upload(device)?;
        let by = self.by::<B>(topk, &index);
        let mut drows = device.alloc(Tag::Activation, B::len(B::whole(rows)))?;
        let mut dweight = device.alloc(Tag::Scratch, B::len(weight_tk))?;
        device.combine_backward::<E>(
            by,
            (weight_tk, B::whole(rows)),
            dy_td,
            B::whole_mut(&mut drows),
            B::whole_mut(&mut dweight),
        )?;
        Ok((drows, dweight))
    }

    fn upload<B: Backend>(&self, device: &B) -> Result<[B::Buf<i32>; 2], Error> {
        let rows = device.upload(Tag::Scratch, self.plan.rows())?;
        Ok([rows, device.upload(Tag::Scratch, self.plan.pairs())?])
    }

    fn by<'a, B: Backend>(
        &self,
        topk: usize,
        [rows, pairs]: &'a [B::Buf<i32>; 2],
    ) -> Combine<'a, B> {
        Combine {
            tokens: self.plan.rows().len() / topk,
            topk,
            width: self.width,
            rows_tk: B::whole(rows),
            pairs_r: B::whole(pairs),
        }
    }

    fn elements(&self, rows: &[usize]) -> Vec<usize> {
        rows.iter().map(|n| n * self.width).collect()
    }
}

/// All-to-all over ep of rows.
fn exchange<B: Backend, C: Collectives<B>, E: Scalar>(
    ctx: &Ctx<'_, B, C>,
    width: usize,
    rows: &B::Buf<E>,
    send: &[usize],
    recv: &[usize],
) -> Result<B::Buf<E>, Error> {
    let [send, recv] = [send, recv].map(|c| c.iter().map(|n| n * width).collect::<Vec<_>>());
    let mut came = ctx.device.alloc(Tag::Activation, recv.iter().sum())?;
    ctx.ep
        .all_to_all(B::whole(rows), &send, B::whole_mut(&mut came), &recv)?;
    Ok(came)
}

fn gathered<B: Permute, E: Scalar>(
    device: &B,
    width: usize,
    index: &[i32],
    x: B::Ref<'_, E>,
) -> Result<B::Buf<E>, Error> {
    let mut y = device.alloc(Tag::Activation, index.len() * width)?;
    let index = device.upload(Tag::Scratch, index)?;
    device.gather_rows::<E>(width, B::whole(&index), x, B::whole_mut(&mut y))?;
    Ok(y)
}

/// Sums of runs of `each`.
fn sums(counts: &[i32], each: usize) -> Vec<usize> {
    let run = |run: &[i32]| run.iter().map(|&n| n as usize).sum();
    counts.chunks(each.max(1)).map(run).collect()
}

/// From rows in the order (etp, source, expert) to (expert, source, etp): where each comes from,
/// and how many each expert has. `counts` is `[etp, ep, here]`.
fn regrouped(counts: &[i32], ep: usize, etp: usize, here: usize) -> (Vec<i32>, Vec<usize>) {
    let first: Vec<i32> = counts
        .iter()
        .scan(0, |at, n| {
            *at += n;
            Some(*at - n)
        })
        .collect();
    let (mut index, mut per_expert) = (Vec::new(), Vec::new());
    for expert in 0..here {
        let before = index.len();
        for source in 0..ep {
            for part in 0..etp {
                let run = (part * ep + source) * here + expert;
                index.extend(first[run]..first[run] + counts[run]);
            }
        }
        per_expert.push(index.len() - before);
    }
    (index, per_expert)
}

fn inverse(index: &[i32]) -> Vec<i32> {
    let mut inverse = vec![0; index.len()];
    for (to, &from) in index.iter().enumerate() {
        inverse[from as usize] = to as i32;
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_regrouped_by_expert_then_source() {
        // etp 2, ep 2, two experts here: [[[1, 2], [0, 1]], [[0, 1], [2, 0]]]
        let counts = [1, 2, 0, 1, 0, 1, 2, 0];
        let (index, per_expert) = regrouped(&counts, 2, 2, 2);
        assert_eq!(per_expert, [3, 4]);
        assert_eq!(index, [0, 5, 6, 1, 2, 4, 3]);
        let back: Vec<i32> = inverse(&index).iter().map(|&i| index[i as usize]).collect();
        assert_eq!(back, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(sums(&counts, 4), [4, 3]);
    }
}
