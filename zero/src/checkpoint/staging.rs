//! What is read on its way to the device: which elements have been seen, and host copies of those
//! that this rank needs.

use std::borrow::ToOwned;
use std::collections::BTreeMap;
use std::format;
use std::string::String;
use std::vec;
use std::vec::Vec;

use quintet_kernels::{Backend, Float, Optimizer, Scalar, Tag};
use safetensors::Dtype;

use super::Target;
use super::format::Meta;
use crate::Error;
use crate::optimizer::Loaded;

/// A chunk on the device: its parts, and the state of each.
pub(super) type Uploaded<B, E> = (Vec<<B as Backend>::Buf<E>>, Option<Vec<Loaded<B, E>>>);

/// Elements of a shape, where they can be counted.
pub(super) fn len(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1_usize, |len, &n| len.checked_mul(n))
}

/// Which logical elements have been seen: runs by kind (none: the parameter) and name.
#[derive(Default)]
pub(super) struct Cover(BTreeMap<(Option<usize>, String), Vec<(usize, usize)>>);

impl Cover {
    pub(super) fn add(&mut self, kind: Option<usize>, name: &str, runs: &[(usize, usize)]) {
        self.0
            .entry((kind, name.to_owned()))
            .or_default()
            .extend(runs);
    }

    /// Every element of every shape once, for every kind.
    pub(super) fn complete(mut self, meta: &Meta, with_state: bool) -> Result<(), String> {
        let kinds = if with_state {
            meta.optimizer.kinds.len()
        } else {
            0
        };
        for kind in core::iter::once(None).chain((0..kinds).map(Some)) {
            let what = kind.map_or("parameter", |k| &meta.optimizer.kinds[k]);
            for (name, shape) in &meta.shapes {
                let mut runs = self.0.remove(&(kind, name.clone())).unwrap_or_default();
                runs.retain(|(_, n)| *n > 0);
                runs.sort_unstable();
                let mut at = 0;
                for (start, n) in runs {
                    if start != at {
                        let fault = if start > at { "missing" } else { "there twice" };
                        let at = at.min(start);
                        return Err(format!("{what} {name}: element {at} is {fault}"));
                    }
                    at += n;
                }
                if Some(at) != len(shape) {
                    return Err(format!("{what} {name}: element {at} is missing"));
                }
            }
        }
        Ok(())
    }
}

/// Host copies of what this rank needs.
pub(super) struct Staging<E: Scalar> {
    chunks: Vec<Chunk<E>>,
    /// By name: where its elements go.
    needs: BTreeMap<String, Need>,
}

struct Chunk<E: Scalar> {
    params: Vec<Vec<E>>,
    /// Per part, per kind.
    state: Option<Vec<Vec<Vec<E::Acc>>>>,
    moments: usize,
}

#[derive(Default)]
struct Need {
    chunk: usize,
    part: usize,
    /// `(logical, index in the buffer, length)`, ascending.
    params: Vec<(usize, usize, usize)>,
    state: Vec<(usize, usize, usize)>,
}

impl<E: Scalar> Staging<E> {
    pub(super) fn new<B: Optimizer>(targets: &[Target<'_, B, E>]) -> Self {
        let (mut chunks, mut needs) = (Vec::new(), BTreeMap::new());
        for (chunk, Target { params, optimizer }) in targets.iter().enumerate() {
            let layout = params.layout();
            let zeros = |len| vec![E::from_f64(0.0); len];
            let state = optimizer.as_ref().map(|o| {
                let zeros = |part| {
                    let len = o.partition().state(part).len();
                    vec![vec![E::Acc::from_f64(0.0); len]; o.kinds().len()]
                };
                (0..layout.parts().len()).map(zeros).collect()
            });
            let moments = optimizer.as_ref().map_or(0, |o| o.rule().moments().len());
            let at_rest = |part| params.partition().param(part);
            let own = (0..layout.parts().len()).map(|part| zeros(at_rest(part).len()));
            let own = own.collect();
            chunks.push(Chunk {
                params: own,
                state,
                moments,
            });
            for entry in layout.entries() {
                let part = entry.part;
                let runs = |range, from| {
                    let runs = layout.runs(entry, &range).into_iter();
                    let mut runs: Vec<_> = runs.map(|(at, i, n)| (i, at - from, n)).collect();
                    runs.sort_unstable();
                    runs
                };
                let own = optimizer
                    .as_ref()
                    .map_or(0..0, |o| o.partition().state(part));
                let held = at_rest(part);
                let params = runs(held.clone(), held.start);
                let state = runs(own.clone(), own.start);
                needs.insert(
                    entry.spec.name.clone(),
                    Need {
                        chunk,
                        part,
                        params,
                        state,
                    },
                );
            }
        }
        Self { chunks, needs }
    }

    pub(super) fn put(
        &mut self,
        kind: Option<usize>,
        name: &str,
        runs: &[(usize, usize)],
        bytes: &[u8],
        dtype: Dtype,
    ) {
        let Some(need) = self.needs.get(name) else {
            return;
        };
        let chunk = &mut self.chunks[need.chunk];
        let (to, wanted): (&mut [u8], _) = match (kind, &mut chunk.state) {
            (None, _) => (
                bytemuck::cast_slice_mut(&mut chunk.params[need.part]),
                &need.params,
            ),
            (Some(kind), Some(state)) => (
                bytemuck::cast_slice_mut(&mut state[need.part][kind]),
                &need.state,
            ),
            (Some(_), None) => return,
        };
        let width = dtype.bitsize() / 8;
        let mut from = 0;
        for &(start, n) in runs {
            let first = wanted.partition_point(|&(logical, _, len)| logical + len <= start);
            for &(logical, at, len) in wanted[first..].iter().take_while(|w| w.0 < start + n) {
                let (low, high) = (logical.max(start), (logical + len).min(start + n));
                let source = (from + low - start) * width..(from + high - start) * width;
                let target = (at + low - logical) * width..(at + high - logical) * width;
                to[target].copy_from_slice(&bytes[source]);
            }
            from += n;
        }
    }

    pub(super) fn upload<B: Optimizer>(self, device: &B) -> Result<Vec<Uploaded<B, E>>, Error> {
        let mut loaded = Vec::new();
        for Chunk {
            params,
            state,
            moments,
        } in self.chunks
        {
            let params = params.iter().map(|host| device.upload(Tag::Param, host));
            let params = params.collect::<Result<Vec<_>, _>>()?;
            let part = |kinds: Vec<Vec<E::Acc>>| {
                let kinds = kinds.iter().map(|host| device.upload(Tag::Optimizer, host));
                let mut kinds = kinds.collect::<Result<Vec<_>, _>>()?;
                let master = kinds.drain(moments.min(kinds.len())..).next();
                Ok::<_, Error>((kinds, master))
            };
            let state = state.map(|s| s.into_iter().map(part).collect::<Result<Vec<_>, _>>());
            loaded.push((params, state.transpose()?));
        }
        Ok(loaded)
    }
}
