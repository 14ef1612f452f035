//! Layers on threads as ranks, seen as logical tensors.
//!
//! ```text
//! logical x, dy, weights --cut--> ranks run the layer --joined--> logical y, dx, gradients
//! ```
//!
//! Every layer is a `Trio`: a thing with an input, an output and parameters, each a line of a
//! ledger, whose gradients have the dual placements.
#![allow(dead_code, unreachable_pub, missing_docs)]

pub mod trios;

use quintet_collectives::transport::local::World;
use quintet_collectives::{
    Axis, Communicator, Degrees, DeviceMesh, Factor, Init, Local, ParamSpec, Placement,
    ProcessGroup,
};
use quintet_kernels::{Backend, Cpu, CpuBuf, Tag};
use quintet_parallel_layers::init::{init_random, local};
use quintet_parallel_layers::philox::Stream;
use quintet_parallel_layers::{Ctx, Error, MicroBatch};

pub type Comm = Communicator<Local>;
pub type TestCtx<'a> = Ctx<'a, Cpu, Comm>;
pub type Batch = MicroBatch<Cpu, f64>;

/// The tokens of a test.
#[derive(Debug, Clone, Copy)]
pub struct Tokens {
    pub sequences: usize,
    pub positions: usize,
    pub vocab: usize,
}

impl Tokens {
    pub const fn new(sequences: usize, positions: usize, vocab: usize) -> Self {
        Self {
            sequences,
            positions,
            vocab,
        }
    }

    pub fn len(&self) -> usize {
        self.sequences * self.positions
    }

    pub fn batch(&self, device: &Cpu) -> Batch {
        let (n, ids) = (self.len(), Stream::new(5, "ids"));
        let id = |i: usize| ids.below(i as u64, self.vocab as u64) as i32;
        let put = |f: &dyn Fn(usize) -> i32| {
            let host: Vec<i32> = (0..n).map(f).collect();
            device.upload(Tag::Scratch, &host).unwrap()
        };
        // Every third token is masked.
        let weight = |i: usize| if i % 3 == 2 { 0.0 } else { 1.0 / n as f64 };
        let weights: Vec<f64> = (0..n).map(weight).collect();
        MicroBatch {
            sequences: self.sequences,
            positions: self.positions,
            ids_t: put(&|i| id(i)),
            pos_t: put(&|i| (i % self.positions) as i32),
            doc_t: None,
            context: None,
            labels_t: put(&|i| id(i + 100)),
            weight_t: device.upload(Tag::Scratch, &weights).unwrap(),
            share: 0.25,
            drawn: None,
        }
    }
}

/// A layer as the tests see it.
pub trait Trio: Sync {
    /// Input and output; `None` where there is no input.
    fn input(&self) -> Option<ParamSpec>;
    fn output(&self) -> ParamSpec;
    fn params(&self) -> Vec<ParamSpec>;
    /// y, dx; adds to the gradients.
    fn run(
        &self,
        ctx: &TestCtx<'_>,
        batch: &Batch,
        params: &[&[f64]],
        x: CpuBuf<f64>,
        dy: CpuBuf<f64>,
        grads: &mut [&mut [f64]],
    ) -> Result<(CpuBuf<f64>, CpuBuf<f64>), Error>;
}

/// A value as a line of a ledger, so that it is cut and joined as parameters are.
pub fn value(name: &str, shape: [usize; 2], on_tp: &[(Factor, Placement)]) -> ParamSpec {
    ParamSpec {
        name: name.into(),
        shape: shape.to_vec(),
        at_use: on_tp.to_vec(),
        tie: None,
        init: Init::Zeros,
        decay: false,
    }
}

pub fn tp_mesh(tp: usize) -> DeviceMesh {
    DeviceMesh::new(Degrees {
        tp,
        ..Default::default()
    })
    .unwrap()
}

pub fn on_tp(mesh: &DeviceMesh, placement: Placement) -> [(Factor, Placement); 1] {
    [(mesh.factor(Axis::Tp), placement)]
}

/// The line of a value's gradient.
pub fn dual(spec: &ParamSpec) -> ParamSpec {
    let mut spec = spec.clone();
    for (_, placement) in &mut spec.at_use {
        *placement = placement.dual();
    }
    spec
}

/// This rank's part of a logical tensor. A Partial falls into arbitrary summands.
pub fn cut(spec: &ParamSpec, mesh: &DeviceMesh, rank: usize, logical: &[f64]) -> Vec<f64> {
    let partial = |p: Placement| p == Placement::Partial;
    let degree: usize = factors(spec, partial).map(|f| f.degree).product();
    let place: usize = factors(spec, partial).fold(0, |at, f| at * f.degree + mesh.place(rank, f));
    let noise = |r: usize, i: usize| Stream::new(r as u64, "noise").normal(i as u64);
    local(spec, mesh, rank, |i| match place {
        0 => logical[i] - (1..degree).map(|r| noise(r, i)).sum::<f64>(),
        r => noise(r, i),
    })
}

/// The logical tensor of all ranks' parts. Where ranks hold equal values they must be equal.
pub fn join(spec: &ParamSpec, mesh: &DeviceMesh, parts: &[Vec<f64>]) -> Vec<f64> {
    let same = |p: Placement| matches!(p, Placement::Replicate | Placement::Invariant);
    let mut logical = vec![0.0; spec.len()];
    for (rank, part) in parts.iter().enumerate() {
        assert_eq!(part.len(), spec.local_len(mesh, rank), "{}", spec.name);
        let copies: Vec<Factor> = factors(spec, same).collect();
        let first = mesh.group(rank, &copies)[0];
        if first != rank {
            assert_eq!(part, &parts[first], "{} on rank {rank}", spec.name);
            continue;
        }
        for (at, logical_at, len) in spec.runs(mesh, rank) {
            for i in 0..len {
                logical[logical_at + i] += part[at + i];
            }
        }
    }
    logical
}

/// `<value, gradient>` from the parts of all ranks: the pairing under which backwards are adjoint.
pub fn pair(spec: &ParamSpec, mesh: &DeviceMesh, value: &[Vec<f64>], grad: &[Vec<f64>]) -> f64 {
    let once: Vec<Factor> = factors(spec, |p| p == Placement::Invariant).collect();
    (0..value.len())
        .filter(|&rank| mesh.group(rank, &once)[0] == rank)
        .map(|rank| dot(&value[rank], &grad[rank]))
        .sum()
}

fn factors(spec: &ParamSpec, keep: impl Fn(Placement) -> bool) -> impl Iterator<Item = Factor> {
    let chosen = spec.at_use.iter().filter(move |(_, p)| keep(*p));
    chosen.map(|(f, _)| *f)
}

pub fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

pub fn random(name: &str, len: usize) -> Vec<f64> {
    let stream = Stream::new(11, name);
    (0..len as u64).map(|i| stream.normal(i)).collect()
}

/// What a layer did, rank by rank.
pub struct Parts {
    pub x: Vec<Vec<f64>>,
    pub y: Vec<Vec<f64>>,
    pub dy: Vec<Vec<f64>>,
    pub dx: Vec<Vec<f64>>,
    /// By parameter, then rank.
    pub weights: Vec<Vec<Vec<f64>>>,
    pub grads: Vec<Vec<Vec<f64>>>,
}

/// What a layer did, as logical tensors.
pub struct Whole {
    pub y: Vec<f64>,
    pub dx: Vec<f64>,
    pub grads: Vec<(String, Vec<f64>)>,
}

/// The logical weights of a layer.
pub fn weights(layer: &dyn Trio) -> Vec<Vec<f64>> {
    let one = |p: &ParamSpec| (0..p.len()).map(|i| init_random(p, 3, i)).collect();
    layer.params().iter().map(one).collect()
}

/// Runs body on tp ranks.
pub fn ranks<R: Send>(tp: usize, body: impl Fn(&TestCtx<'_>) -> R + Sync) -> Vec<R> {
    ranks_of(&tp_mesh(tp), body)
}

/// Runs body on the ranks of a mesh of tp alone, experts folded into it.
pub fn ranks_of<R: Send>(mesh: &DeviceMesh, body: impl Fn(&TestCtx<'_>) -> R + Sync) -> Vec<R> {
    World::run(mesh.world(), |tp| {
        let device = Cpu::new(1);
        let group = |axis: Axis| {
            let ranks = mesh.group(tp.rank(), &[mesh.factor(axis)]);
            tp.subgroup(&ProcessGroup::new(ranks, tp.rank())?, axis.name())
        };
        let (ep, etp) = (group(Axis::Ep)?, group(Axis::Etp)?);
        Ok(body(&Ctx {
            device: &device,
            tp: &tp,
            replica: &tp,
            ep: &ep,
            etp: &etp,
            cp: Default::default(),
        }))
    })
    .unwrap()
}

/// Forward and backward on tp ranks from given logical weights and input.
pub fn run_with(
    layer: &dyn Trio,
    mesh: &DeviceMesh,
    tokens: Tokens,
    weights: &[Vec<f64>],
    x: &[f64],
) -> Parts {
    let (specs, output) = (layer.params(), layer.output());
    let none = value("x", [0, 0], &[]);
    let input = layer.input().unwrap_or(none);
    let dy = random("dy", output.len());
    let by_rank = ranks_of(mesh, |ctx| {
        let rank = ctx.tp.rank();
        let cut = |spec: &ParamSpec, logical: &[f64]| cut(spec, mesh, rank, logical);
        let (x, dy) = (cut(&input, x), cut(&dual(&output), &dy));
        let mine: Vec<Vec<f64>> = specs.iter().zip(weights).map(|(s, w)| cut(s, w)).collect();
        let params: Vec<&[f64]> = mine.iter().map(Vec::as_slice).collect();
        // Gradients are added to what is there.
        let mut grads: Vec<Vec<f64>> = mine.iter().map(|w| vec![0.5; w.len()]).collect();
        let mut views: Vec<&mut [f64]> = grads.iter_mut().map(Vec::as_mut_slice).collect();
        let put = |host: &[f64]| ctx.device.upload(Tag::Activation, host).unwrap();
        let batch = tokens.batch(ctx.device);
        let (y, dx) = layer
            .run(ctx, &batch, &params, put(&x), put(&dy), &mut views)
            .unwrap();
        drop(batch);
        for g in grads.iter_mut().flatten() {
            *g -= 0.5;
        }
        let get = |buf: &CpuBuf<f64>| buf.as_ref().to_vec();
        let kept = (get(&y), get(&dx));
        drop((y, dx));
        for tag in Tag::ALL {
            assert_eq!(ctx.device.meter().now(tag), 0, "{} left", tag.name());
        }
        (x, kept.0, dy, kept.1, mine, grads)
    });
    let mut parts = Parts {
        x: vec![],
        y: vec![],
        dy: vec![],
        dx: vec![],
        weights: vec![vec![]; specs.len()],
        grads: vec![vec![]; specs.len()],
    };
    for (x, y, dy, dx, weights, grads) in by_rank {
        parts.x.push(x);
        parts.y.push(y);
        parts.dy.push(dy);
        parts.dx.push(dx);
        for (i, (w, g)) in weights.into_iter().zip(grads).enumerate() {
            parts.weights[i].push(w);
            parts.grads[i].push(g);
        }
    }
    parts
}

/// Forward and backward from random weights and input.
pub fn run(layer: &dyn Trio, mesh: &DeviceMesh, tokens: Tokens) -> Parts {
    let x = random("x", layer.input().map_or(0, |x| x.len()));
    run_with(layer, mesh, tokens, &weights(layer), &x)
}

/// The parts joined: the gradient of a parameter is summed as its line says.
pub fn whole(layer: &dyn Trio, mesh: &DeviceMesh, parts: &Parts) -> Whole {
    let grad = |(spec, parts): (&ParamSpec, &Vec<Vec<f64>>)| {
        (spec.name.clone(), join(&dual(spec), mesh, parts))
    };
    Whole {
        y: join(&layer.output(), mesh, &parts.y),
        dx: layer
            .input()
            .map_or(vec![], |x| join(&dual(&x), mesh, &parts.dx)),
        grads: layer.params().iter().zip(&parts.grads).map(grad).collect(),
    }
}

/// Largest difference, relative to the largest of what was wanted.
pub fn distance(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let max = |it: &mut dyn Iterator<Item = f64>| it.fold(0.0, f64::max);
    let scale = max(&mut want.iter().map(|w| w.abs()));
    let off = max(&mut got.iter().zip(want).map(|(g, w)| (g - w).abs()));
    assert!(got.iter().all(|g| g.is_finite()));
    if off == 0.0 {
        0.0
    } else {
        off / scale.max(f64::MIN_POSITIVE)
    }
}

/// Every output and gradient within `bound` of what was wanted, both relative to 1 or, where it is
/// `tight`, to the largest element: for gradients that are not zero but for rounding.
pub fn assert_close(what: &str, got: &Whole, want: &Whole, bound: f64, tight: bool) {
    let near = |name: &str, got: &[f64], want: &[f64]| {
        let scale = want.iter().fold(0.0, |m: f64, w| m.max(w.abs()));
        let off = distance(got, want) * if tight { 1.0 } else { scale.min(1.0) };
        assert!(off <= bound, "{what}: {name} is off by {off:e}");
        assert!(!tight || scale > 0.0, "{what}: {name} is all zero");
    };
    near("y", &got.y, &want.y);
    if !want.dx.is_empty() {
        near("dx", &got.dx, &want.dx);
    }
    for ((name, got), (same, want)) in got.grads.iter().zip(&want.grads) {
        assert_eq!(name, same);
        near(name, got, want);
    }
}
