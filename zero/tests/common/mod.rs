//! A toy model with every kind of parameter, its gradients as a function of name, index and place,
//! and the same summed serially.
#![allow(dead_code, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use quintet_collectives::chunk::chunk;
use quintet_collectives::{
    Axis, Communicator, Degrees, DeviceMesh, Factor, Init, Local, ParamSpec, Placement,
    ProcessGroup, Transport,
};
use quintet_kernels::{Cpu, Float, Scalar};
use quintet_zero::{
    Error, FlatLayout, Full, Gathering, GradSync, GroupSet, LayoutSpec, ParamStore, Partition,
    Rule, ShardedOptimizer, Tied, ZeroStage,
};

pub type Comm = Communicator<Local>;

pub const ALL: [ZeroStage; 4] = [
    ZeroStage::Ddp,
    ZeroStage::One,
    ZeroStage::Two,
    ZeroStage::Three,
];

#[derive(Debug, Clone, Copy)]
pub struct Model {
    pub degrees: Degrees,
    pub hidden: usize,
    pub vocab: usize,
    pub blocks: usize,
    pub bucket_bytes: usize,
    pub tie: bool,
    /// Replicas that shard among themselves.
    pub within: Option<usize>,
    /// Microbatches of a step; some ranks have fewer, and some none.
    pub microbatches: u64,
}

impl Model {
    pub fn new(degrees: Degrees) -> Self {
        Self {
            degrees,
            hidden: 3,
            vocab: 5,
            blocks: 3,
            bucket_bytes: 100,
            tie: true,
            within: None,
            microbatches: 1,
        }
    }

    /// Whether a rank has this microbatch of a step. Replica 1 has none, where there are several.
    pub fn works(&self, rank: usize, microbatch: u64) -> bool {
        match self.mesh().index(rank, Axis::Dp) as u64 {
            1 => self.microbatches == 1,
            replica => microbatch == 0 || !(replica + microbatch).is_multiple_of(3),
        }
    }

    pub fn mesh(&self) -> DeviceMesh {
        DeviceMesh::new(self.degrees).unwrap()
    }

    pub fn layers(&self, rank: usize) -> Vec<Vec<ParamSpec>> {
        let mesh = self.mesh();
        let (stage, pp) = (mesh.index(rank, Axis::Pp), self.degrees.pp);
        let (h, v) = (self.hidden, self.vocab);
        let tp = mesh.factor(Axis::Tp);
        let whole = |p| vec![(tp, p)];
        let kv = if self.degrees.tp.is_multiple_of(2) {
            2
        } else {
            1
        };
        let (kv, rep) = mesh.split_axis(Axis::Tp, kv).unwrap();
        let heads = vec![
            (kv, Placement::shard_units(0, 2)),
            (rep, Placement::Replicate),
        ];
        let dense = |name: String, shape: &[usize], decay, at: Vec<(Factor, Placement)>| {
            let replicas = [Axis::Dp, Axis::Cp].map(|a| (mesh.factor(a), Placement::Replicate));
            let at_use = replicas.into_iter().chain(at).collect();
            spec(name, shape, decay, at_use)
        };
        let block = |b: usize| {
            let at_use = vec![
                (mesh.factor(Axis::Edp), Placement::Replicate),
                (mesh.factor(Axis::Ep), Placement::shard(0)),
                (mesh.factor(Axis::Etp), Placement::shard(1)),
            ];
            vec![
                dense(
                    format!("{b}.norm"),
                    &[h],
                    false,
                    whole(Placement::Replicate),
                ),
                dense(
                    format!("{b}.q"),
                    &[2 * h, h],
                    true,
                    whole(Placement::shard(0)),
                ),
                dense(format!("{b}.k"), &[4, h], true, heads.clone()),
                dense(
                    format!("{b}.o"),
                    &[h, 2 * h],
                    true,
                    whole(Placement::shard(1)),
                ),
                dense(
                    format!("{b}.bias"),
                    &[h],
                    false,
                    whole(Placement::Invariant),
                ),
                spec(format!("{b}.experts"), &[4, h, 2], true, at_use),
            ]
        };
        let embed = |name: &str| {
            let mut s = dense(name.into(), &[v, h], true, whole(Placement::shard(0)));
            s.tie = self.tie.then(|| "embed".into());
            s
        };
        let mut layers = Vec::new();
        if stage == 0 {
            layers.push(vec![embed("embed")]);
        }
        layers.extend(chunk(self.blocks, pp, stage).map(block));
        if stage == pp - 1 {
            let norm = dense("norm".into(), &[h], false, whole(Placement::Replicate));
            layers.push(vec![norm, embed(if self.tie { "embed" } else { "head" })]);
        }
        layers
    }

    pub fn layout(&self, rank: usize) -> Arc<FlatLayout> {
        let ends = if self.tie {
            vec![0, self.degrees.pp - 1]
        } else {
            vec![]
        };
        let tied = [Tied {
            name: "embed".into(),
            stages: ends,
        }];
        let spec = LayoutSpec {
            bucket_bytes: self.bucket_bytes,
            element_bytes: 4,
            tied: &tied,
            shard_within: self.within,
        };
        Arc::new(FlatLayout::build(&self.layers(rank), &self.mesh(), rank, &spec).unwrap())
    }

    /// What a rank's layer adds to the gradient of an element in a microbatch.
    pub fn grad(&self, rank: usize, layer: usize, s: &ParamSpec, index: usize, step: u64) -> f64 {
        let mesh = self.mesh();
        let own = s.at_use.iter().filter(|(_, p)| *p != Placement::Invariant);
        let places = own.map(|(f, _)| mesh.place(rank, *f) as u64);
        let stage = mesh.index(rank, Axis::Pp) as u64;
        let key = places.chain([stage, layer as u64, index as u64, step]);
        let key = key.chain(s.name.bytes().map(u64::from)).fold(7, mix);
        (key % 17) as f64 - 8.0
    }

    /// What a rank's layer adds in all microbatches of a step.
    fn grads(&self, rank: usize, layer: usize, s: &ParamSpec, index: usize, step: u64) -> f64 {
        let all = (0..self.microbatches).filter(|mb| self.works(rank, *mb));
        all.map(|mb| self.grad(rank, layer, s, index, 100 * step + mb))
            .sum()
    }

    /// The gradient of every logical element, summed serially.
    pub fn full_grad(&self, step: u64) -> Full {
        let mesh = self.mesh();
        let mut full: Full = BTreeMap::new();
        for rank in 0..mesh.world() {
            for (layer, specs) in self.layers(rank).iter().enumerate() {
                for s in specs {
                    let sum = full.entry(s.name.clone()).or_insert(vec![0.0; s.len()]);
                    let mut same = s.at_use.iter().filter(|(_, p)| *p == Placement::Invariant);
                    if same.all(|(f, _)| mesh.place(rank, *f) == 0) {
                        for (_, start, len) in s.runs(&mesh, rank) {
                            for i in start..start + len {
                                sum[i] += self.grads(rank, layer, s, i, step);
                            }
                        }
                    }
                }
            }
        }
        full
    }

    /// The value a parameter begins with: by name and logical index.
    pub fn init(name: &str, index: usize) -> f64 {
        (name
            .bytes()
            .map(u64::from)
            .chain([index as u64])
            .fold(3, mix)
            % 1000) as f64
            / 512.0
            - 1.0
    }
}

fn spec(name: String, shape: &[usize], decay: bool, at_use: Vec<(Factor, Placement)>) -> ParamSpec {
    ParamSpec {
        name,
        shape: shape.to_vec(),
        at_use,
        tie: None,
        init: Init::Zeros,
        decay,
    }
}

pub fn mix(a: u64, b: u64) -> u64 {
    let x = (a ^ b.wrapping_add(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 29)
}

/// Everything a rank holds.
pub struct Rank<E: Scalar> {
    pub model: Model,
    pub rank: usize,
    pub device: Cpu,
    pub groups: GroupSet<Comm>,
    pub params: ParamStore<Cpu, E>,
    pub sync: GradSync<Cpu, Comm, E>,
    pub optimizer: ShardedOptimizer<Cpu, E>,
}

pub const ADAMW: Rule = Rule::AdamW {
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
};

impl<E: Scalar> Rank<E> {
    pub fn new(model: Model, world: Comm, stage: ZeroStage, rule: Rule) -> Result<Self, Error> {
        let (rank, device) = (world.rank(), Cpu::new(1));
        let layout = model.layout(rank);
        let groups = groups(&layout, world)?;
        let partition = Partition::new(layout.clone(), stage);
        let mut params = ParamStore::zeros(&device, &partition)?;
        params.fill_with(|e, i| E::from_f64(Model::init(&e.spec.name, i)))?;
        let sync = GradSync::new(&device, &partition, &groups)?;
        let optimizer = ShardedOptimizer::new(&device, &partition, rule, &params)?;
        Ok(Self {
            model,
            rank,
            device,
            groups,
            params,
            sync,
            optimizer,
        })
    }

    /// Forward, which looks at every parameter, gathered one bucket ahead.
    pub fn forward(&mut self) -> Result<(), Error> {
        let layout = self.params.layout().clone();
        let mut gathering = Gathering::<Cpu, Comm, E>::new();
        let last = layout.buckets().len();
        if last > 0 {
            gathering.ahead(&mut self.params, &self.groups, last - 1)?;
        }
        for bucket in (0..last).rev() {
            gathering.end_bucket(&mut self.params, bucket)?;
            if bucket > 0 {
                gathering.ahead(&mut self.params, &self.groups, bucket - 1)?;
            }
            self.look(layout.buckets()[bucket].layers.clone())?;
            self.params.release(bucket)?;
        }
        assert!(self.params.at_rest());
        Ok(())
    }

    /// What a whole view shows is what is at rest, where this rank has that.
    fn look(&self, layers: core::ops::Range<usize>) -> Result<(), Error> {
        for layer in layers {
            let views = self.params.views(layer)?;
            for (view, &e) in views.iter().zip(self.params.layout().layer(layer)?) {
                let entry = &self.params.layout().entries()[e];
                assert_eq!(view.len(), entry.len);
                let (host, runs) = self.params.read(entry)?;
                let whole = entry.spec.runs(self.params.layout().mesh(), self.rank);
                for (at, logical, len) in runs {
                    let run = whole.iter().find(|r| (r.1..r.1 + r.2).contains(&logical));
                    let from = run.map(|r| r.0 + logical - r.1).unwrap();
                    assert_eq!(host[at..at + len], view[from..from + len]);
                }
            }
        }
        Ok(())
    }

    /// Fills and reduces, bucket by bucket in the order of backward; gradients times `scale`.
    pub fn backward(&mut self, step: u64, scale: f64) -> Result<(), Error> {
        self.sync.zero()?;
        let (model, layout) = (self.model, self.sync.layout().clone());
        for mb in 0..model.microbatches {
            self.forward()?;
            for bucket in 0..layout.buckets().len() {
                if model.works(self.rank, mb) {
                    self.params.gather(&self.groups, bucket)?;
                    self.add(bucket, 100 * step + mb, scale)?;
                    self.params.release(bucket)?;
                } else {
                    // It shares its part of the parameters with those that have the microbatch.
                    self.params.gather(&self.groups, bucket)?;
                    self.params.release(bucket)?;
                }
                let each = self.sync.partition().cuts_grads();
                if each || mb + 1 == model.microbatches {
                    self.sync.reduce(&self.groups, bucket)?;
                }
            }
        }
        self.sync.finish(&self.groups)
    }

    fn add(&mut self, bucket: usize, microbatch: u64, scale: f64) -> Result<(), Error> {
        let (layout, model) = (self.sync.layout().clone(), self.model);
        let layers = model.layers(self.rank);
        for layer in layout.buckets()[bucket].layers.clone().rev() {
            let mut views = self.sync.views_mut(layer)?;
            assert_eq!(views.len(), layers[layer].len());
            for (view, s) in views.iter_mut().zip(&layers[layer]) {
                assert_eq!(view.len(), s.local_len(layout.mesh(), self.rank));
                for (local, logical, len) in s.runs(layout.mesh(), self.rank) {
                    for i in 0..len {
                        let g = model.grad(self.rank, layer, s, logical + i, microbatch) * scale;
                        view[local + i] += E::Acc::from_f64(g);
                    }
                }
            }
        }
        Ok(())
    }

    pub fn step(&mut self, lr: f64, grad_scale: f64) -> Result<(), Error> {
        let Self {
            params,
            sync,
            groups,
            optimizer,
            ..
        } = self;
        optimizer.step(params, sync, groups, lr, grad_scale)
    }
}

pub fn groups<T: Transport + Send + 'static>(
    layout: &FlatLayout,
    world: Communicator<T>,
) -> Result<GroupSet<Communicator<T>>, Error> {
    let parent = world.subgroup(world.group(), "zero")?;
    let rank = world.rank();
    let make = |name: &str, ranks: &[usize]| {
        Ok::<_, Error>(parent.subgroup(&ProcessGroup::new(ranks, rank)?, name)?)
    };
    GroupSet::build(&[layout], world, make)?.with_gathering(&[layout], make)
}

pub fn degrees(pp: usize, dp: usize, cp: usize, tp: usize, ep: usize) -> Degrees {
    Degrees {
        pp,
        dp,
        cp,
        tp,
        ep,
        etp: 1,
    }
}
