//! The optimizer on what this rank keeps state for: everything, or its chunk of each part.
//!
//! ```text
//! part      | w            | b    | norm     |        decay splits a chunk by entry
//! rank 1            [..............]                  m, v (and master weights of bf16) live here
//! step              wwwwwwww|bbbbbb
//! beside the next   all-gather of the part's parameters, over the replicas (stages 1 and 2; under
//!                   stage 3 they are gathered when they are used)
//! ```
//!
//! Steps are elementwise, so that equal gradients make equal bits under every stage.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::any::{Any, TypeId};
use core::ops::Range;

use quintet_kernels::backend::slice_mut;
use quintet_kernels::{AdamWSpec, Backend, Collectives, Float, Optimizer, Scalar, SgdSpec, Tag};

use crate::{Entry, Error, FlatLayout, Gathering, GradSync, Groups, Held, ParamStore, Partition};

/// The rule of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rule {
    /// Loshchilov and Hutter 2019.
    AdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
        /// Decoupled weight decay, for parameters that take any.
        weight_decay: f64,
    },
    /// Plain gradient descent.
    Sgd {
        /// Weight decay, for parameters that take any.
        weight_decay: f64,
    },
}

impl Rule {
    /// Its name in checkpoints and on the command line.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Rule::AdamW { .. } => "adamw",
            Rule::Sgd { .. } => "sgd",
        }
    }

    /// The state it keeps beside master weights, by name.
    #[must_use]
    pub const fn moments(&self) -> &'static [&'static str] {
        match self {
            Rule::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
            Rule::Sgd { .. } => &[],
        }
    }
}

/// Moments, master weights and the number of steps taken.
pub struct ShardedOptimizer<B: Optimizer, E: Scalar> {
    device: B,
    partition: Partition,
    rule: Rule,
    step: u64,
    parts: Vec<State<B, E>>,
}

/// State of one part, for `range` of it.
struct State<B: Backend, E: Scalar> {
    range: Range<usize>,
    /// In the order of [`Rule::moments`].
    moments: Vec<B::Buf<E::Acc>>,
    /// Where storage is narrower than the accumulation type.
    master: Option<B::Buf<E::Acc>>,
    /// Ranges of the part that decay, and that do not.
    cuts: Vec<(Range<usize>, bool)>,
}

impl<B: Optimizer, E: Scalar> ShardedOptimizer<B, E> {
    /// Moments of zero; master weights as `params` are now.
    ///
    /// # Errors
    /// Where the device has not that much memory.
    pub fn new(
        device: &B,
        partition: &Partition,
        rule: Rule,
        params: &ParamStore<B, E>,
    ) -> Result<Self, Error> {
        let mut parts = Vec::new();
        for part in 0..partition.layout().parts().len() {
            let range = partition.state(part);
            let zeros = |_| Ok(device.zeros(Tag::Optimizer, range.len())?);
            let moments = rule
                .moments()
                .iter()
                .map(zeros)
                .collect::<Result<_, Error>>()?;
            let master = if one_type::<E>() {
                None
            } else {
                let mut host = alloc::vec![E::from_f64(0.0); range.len()];
                device.download(params.part(part)?.cut(range.clone())?, &mut host)?;
                let wide: Vec<E::Acc> = host.into_iter().map(Float::to_acc).collect();
                Some(device.upload(Tag::Optimizer, &wide)?)
            };
            let cuts = cuts(partition.layout(), part, &range);
            parts.push(State {
                range,
                moments,
                master,
                cuts,
            });
        }
        Ok(Self {
            device: device.clone(),
            partition: partition.clone(),
            rule,
            step: 0,
            parts,
        })
    }

    /// Steps taken.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// The rule.
    #[must_use]
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &Arc<FlatLayout> {
        self.partition.layout()
    }

    /// One step with this learning rate on gradients times `grad_scale` (the clip factor). After
    /// it every rank has all parameters again that it holds at rest.
    ///
    /// # Errors
    /// [`Error::Order`] before [`GradSync::finish`] and while parameters are gathered, whose copies
    /// would be stale after it; what the device or a collective fails with.
    pub fn step<C: Collectives<B>>(
        &mut self,
        params: &mut ParamStore<B, E>,
        grads: &GradSync<B, C, E>,
        groups: &impl Groups<C>,
        lr: f64,
        grad_scale: f64,
    ) -> Result<(), Error> {
        self.start_step(params, grads, groups, lr, grad_scale)?
            .end(params)
    }

    /// [`ShardedOptimizer::step`] whose all-gathers are waited for later, bucket by bucket: those
    /// of the first layers are started first, and each begins while the next part is stepped.
    ///
    /// # Errors
    /// As [`ShardedOptimizer::step`].
    pub fn start_step<C: Collectives<B>>(
        &mut self,
        params: &mut ParamStore<B, E>,
        grads: &GradSync<B, C, E>,
        groups: &impl Groups<C>,
        lr: f64,
        grad_scale: f64,
    ) -> Result<Gathering<B, C, E>, Error> {
        let count = self.parts.len();
        let reduced = (0..count).map(|part| grads.part(part));
        let reduced: Vec<_> = reduced.collect::<Result<_, _>>()?;
        if !params.at_rest() {
            return Err(Error::Order {
                what: "step",
                index: self.step as usize + 1,
                why: "parameters are still gathered, and would be stale after it",
            });
        }
        self.step += 1;
        let numbers = Numbers {
            rule: self.rule,
            step: self.step,
            lr,
            grad_scale,
        };
        let mut gathering = Gathering::new();
        for (part, grad) in reduced.into_iter().enumerate().rev() {
            let (held, param) = params.rest_mut(part)?;
            self.parts[part].step(&self.device, &numbers, &grad, (held.start, param))?;
            if self.partition.scatters() && !self.partition.gathers(part) {
                gathering.push(part, params.start_gather::<C>(groups, part)?);
            }
        }
        Ok(gathering)
    }

    /// The kinds of state it keeps, in the order in which they are counted.
    #[must_use]
    pub fn kinds(&self) -> Vec<&'static str> {
        let master = (!one_type::<E>()).then_some("master");
        self.rule.moments().iter().copied().chain(master).collect()
    }

    /// The index among [`ShardedOptimizer::kinds`] of master weights, where there are any.
    pub(crate) fn master_kind(&self) -> Option<usize> {
        (!one_type::<E>()).then_some(self.rule.moments().len())
    }

    /// Reads `range` of a part, which lies within what this rank keeps, of the kind of this index.
    pub(crate) fn read_state(
        &self,
        kind: usize,
        part: usize,
        range: &Range<usize>,
        host: &mut [E::Acc],
    ) -> Result<(), Error> {
        let state = self.parts.get(part);
        let buffer = state.and_then(|s| s.moments.iter().chain(&s.master).nth(kind));
        if let (Some(state), Some(buffer)) = (state, buffer) {
            let own = range.start - state.range.start..range.end - state.range.start;
            self.device
                .download(B::slice(B::whole(buffer), own), host)?;
        }
        Ok(())
    }

    /// Sets every master weight that this rank keeps: `value(entry, logical index)`, in f64. Does
    /// nothing where parameters are their own. The parameters stay as they are: they are to be set
    /// to the same values, rounded.
    ///
    /// # Errors
    /// What the device fails with.
    pub fn fill_master(
        &mut self,
        mut value: impl FnMut(&Entry, usize) -> f64,
    ) -> Result<(), Error> {
        let layout = self.layout().clone();
        for (state, part) in self.parts.iter_mut().zip(layout.parts()) {
            if state.master.is_some() {
                let host = host_of::<E::Acc>(&layout, &part.entries, &state.range, &mut value);
                state.master = Some(self.device.upload(Tag::Optimizer, &host)?);
            }
        }
        Ok(())
    }

    /// Adds `by(logical index)` to a parameter that no gradient reaches, where steps are taken on it:
    /// to its master weight where there is one, which the next step writes to where it is used.
    ///
    /// # Errors
    /// As [`ParamStore::part`], and what the device fails with.
    pub fn shift(
        &mut self,
        params: &mut ParamStore<B, E>,
        entry: &Entry,
        by: impl Fn(usize) -> f64,
    ) -> Result<(), Error> {
        let moved = |x: f64, index| x + by(index);
        let layout = self.layout().clone();
        let Some(State {
            range,
            master: Some(master),
            ..
        }) = self.parts.get_mut(entry.part)
        else {
            let (mut values, runs) = params.read(entry)?;
            for (at, logical, len) in runs {
                for i in 0..len {
                    values[at + i] = E::from_f64(moved(values[at + i].to_f64(), logical + i));
                }
            }
            return params.write(entry, &values);
        };
        for (at, logical, len) in layout.runs(entry, range) {
            let own = at - range.start..at - range.start + len;
            let mut host = alloc::vec![E::Acc::from_f64(0.0); len];
            let held = B::slice(B::whole(master), own.clone());
            self.device.download(held, &mut host)?;
            for (i, x) in host.iter_mut().enumerate() {
                *x = E::Acc::from_f64(moved(x.to_f64(), logical + i));
            }
            let values = self.device.upload(Tag::Scratch, &host)?;
            let to = slice_mut::<B, _>(B::whole_mut(master), own);
            self.device.copy(B::whole(&values), to)?;
        }
        Ok(())
    }

    /// Sets the count and every element of state that this rank keeps:
    /// `value(kind, entry, logical index)`, in f64.
    ///
    /// # Errors
    /// What the device fails with.
    pub fn fill(
        &mut self,
        step: u64,
        mut value: impl FnMut(&'static str, &Entry, usize) -> f64,
    ) -> Result<(), Error> {
        let layout = self.layout().clone();
        let kinds = self.kinds();
        for (state, part) in self.parts.iter_mut().zip(layout.parts()) {
            for (buffer, &kind) in state
                .moments
                .iter_mut()
                .chain(&mut state.master)
                .zip(&kinds)
            {
                let value = |entry: &Entry, index| value(kind, entry, index);
                let host = host_of::<E::Acc>(&layout, &part.entries, &state.range, value);
                *buffer = self.device.upload(Tag::Optimizer, &host)?;
            }
        }
        self.step = step;
        Ok(())
    }

    /// The partition.
    #[must_use]
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Replaces state and count by what was loaded.
    #[cfg_attr(not(feature = "checkpoint"), allow(dead_code))]
    pub(crate) fn replace(&mut self, step: u64, state: Vec<Loaded<B, E>>) {
        self.step = step;
        for (part, (moments, master)) in self.parts.iter_mut().zip(state) {
            (part.moments, part.master) = (moments, master);
        }
    }
}

impl<B: Optimizer, E: Scalar> State<B, E> {
    fn step(
        &mut self,
        device: &B,
        numbers: &Numbers,
        grad: &Held<'_, B, E::Acc>,
        (first, param): (usize, &mut B::Buf<E>),
    ) -> Result<(), Error> {
        for (range, decay) in &self.cuts {
            let grad = grad.cut(range.clone())?;
            let held = range.start - first..range.end - first;
            let own = range.start - self.range.start..range.end - self.range.start;
            let mut moments = self.moments.iter_mut();
            let moments = (moments.next(), moments.next());
            let pair = (cut::<B, _>(moments.0, &own), cut::<B, _>(moments.1, &own));
            let (master, param) = match &mut self.master {
                Some(master) => {
                    let param = slice_mut::<B, E>(B::whole_mut(param), held);
                    (cut::<B, _>(Some(master), &own), Some(param))
                }
                None => (cut::<B, _>(as_acc::<B, E>(param), &held), None),
            };
            numbers.apply::<B, E>(device, *decay, grad, master, pair, param)?;
        }
        Ok(())
    }
}

/// Moments and master weights of a part.
pub(crate) type Loaded<B, E> = (
    Vec<<B as Backend>::Buf<<E as Float>::Acc>>,
    Option<<B as Backend>::Buf<<E as Float>::Acc>>,
);

/// Numbers of one step.
struct Numbers {
    rule: Rule,
    step: u64,
    lr: f64,
    grad_scale: f64,
}

impl Numbers {
    fn apply<B: Optimizer, E: Scalar>(
        &self,
        device: &B,
        decay: bool,
        grad: B::Ref<'_, E::Acc>,
        master: Option<B::Mut<'_, E::Acc>>,
        moments: (Option<B::Mut<'_, E::Acc>>, Option<B::Mut<'_, E::Acc>>),
        param: Option<B::Mut<'_, E>>,
    ) -> Result<(), Error> {
        let Self {
            rule,
            step,
            lr,
            grad_scale,
        } = *self;
        let of = |weight_decay| if decay { weight_decay } else { 0.0 };
        match (rule, master, moments) {
            (
                Rule::AdamW {
                    beta1,
                    beta2,
                    eps,
                    weight_decay,
                },
                Some(w),
                (Some(m), Some(v)),
            ) => {
                let weight_decay = of(weight_decay);
                let spec = AdamWSpec {
                    lr,
                    beta1,
                    beta2,
                    eps,
                    weight_decay,
                    step,
                    grad_scale,
                };
                device.adamw::<E>(&spec, grad, w, (m, v), param)?;
            }
            (Rule::Sgd { weight_decay }, Some(w), _) => {
                let spec = SgdSpec {
                    lr,
                    weight_decay: of(weight_decay),
                    grad_scale,
                };
                device.sgd::<E>(&spec, grad, w, param)?;
            }
            // Every state is made with what its rule and type need.
            _ => {}
        }
        Ok(())
    }
}

/// `range` of a part whose elements are `value(entry, logical index)`; padding is 0.
fn host_of<T: Float>(
    layout: &FlatLayout,
    entries: &[usize],
    range: &Range<usize>,
    mut value: impl FnMut(&Entry, usize) -> f64,
) -> Vec<T> {
    let mut host = alloc::vec![T::from_f64(0.0); range.len()];
    for &entry in entries {
        let entry = &layout.entries()[entry];
        for (at, logical, len) in layout.runs(entry, range) {
            for i in 0..len {
                host[at - range.start + i] = T::from_f64(value(entry, logical + i));
            }
        }
    }
    host
}

fn cut<'a, B: Backend, T: quintet_kernels::Data>(
    buffer: Option<&'a mut B::Buf<T>>,
    range: &Range<usize>,
) -> Option<B::Mut<'a, T>> {
    buffer.map(|b| slice_mut::<B, T>(B::whole_mut(b), range.clone()))
}

/// Whether storage and accumulation are one type: then parameters are their own master weights.
pub(crate) fn one_type<E: Scalar>() -> bool {
    TypeId::of::<E>() == TypeId::of::<E::Acc>()
}

/// The same buffer, where storage and accumulation are one type.
fn as_acc<B: Backend, E: Scalar>(buffer: &mut B::Buf<E>) -> Option<&mut B::Buf<E::Acc>> {
    (buffer as &mut dyn Any).downcast_mut()
}

/// `range` of a part cut where decay changes.
fn cuts(layout: &FlatLayout, part: usize, range: &Range<usize>) -> Vec<(Range<usize>, bool)> {
    let mut cuts: Vec<(Range<usize>, bool)> = Vec::new();
    for &entry in &layout.parts()[part].entries {
        let e = &layout.entries()[entry];
        let (start, end) = (e.offset.max(range.start), (e.offset + e.len).min(range.end));
        if start >= end {
            continue;
        }
        match cuts.last_mut() {
            Some((last, decay)) if *decay == e.spec.decay => last.end = end,
            _ => cuts.push((start..end, e.spec.decay)),
        }
    }
    cuts
}
