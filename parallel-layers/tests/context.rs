//! Attention over cp is attention: every kind, against one device.

#![allow(missing_docs)]

mod common;

use common::{Parts, Trio, Whole, weights};
use common::{assert_close, cut, distance, dot, dual, join, random, value};
use proptest::prelude::*;
use quintet_collectives::transport::local::World;
use quintet_collectives::{Axis, Communicator, Degrees, DeviceMesh, Factor, Local, ProcessGroup};
use quintet_kernels::{
    Attention, AttentionSpec, Backend, Cpu, CpuBuf, Float, Places, Real, Scalar, Tag,
};
use quintet_parallel_layers::context::{self, Gradients, held};
use quintet_parallel_layers::philox::Stream;
use quintet_parallel_layers::region::Region;
use quintet_parallel_layers::{
    Architecture, Block, BlockSpec, ContextGroups, ContextPlaces, Ctx, Error, Layer, MicroBatch,
};

type Comm = Communicator<Local>;

/// How sequences are cut.
#[derive(Debug, Clone, Copy)]
struct Way {
    cp: usize,
    ulysses: usize,
    gather: bool,
    tp: usize,
}

impl Way {
    fn mesh(&self) -> DeviceMesh {
        DeviceMesh::new(Degrees {
            cp: self.cp,
            tp: self.tp,
            ..Default::default()
        })
        .unwrap()
    }

    /// Runs `body` on every rank with its groups.
    fn run<R: Send>(&self, body: impl Fn(&Ctx<'_, Cpu, Comm>, usize) -> R + Sync) -> Vec<R> {
        let mesh = self.mesh();
        World::run(mesh.world(), |world| {
            let rank = world.rank();
            let group = |factors: &[Factor], name: &str| {
                let ranks = mesh.group(rank, factors);
                world.subgroup(&ProcessGroup::new(ranks, rank)?, name)
            };
            let (outer, inner) = mesh.split_axis(Axis::Cp, self.cp / self.ulysses)?;
            let tp = group(&[mesh.factor(Axis::Tp)], "tp")?;
            let keys = group(&[outer], "cp keys")?;
            let heads = group(&[inner], "cp heads")?;
            let (device, some) = (Cpu::new(1), |c: &Comm| c.world() > 1);
            let cp = ContextGroups {
                keys: Some(&keys).filter(|c| some(c)),
                gather: self.gather,
                heads: Some(&heads).filter(|c| some(c)),
            };
            // No layer here has experts.
            let ctx = Ctx {
                device: &device,
                tp: &tp,
                replica: &tp,
                ep: &tp,
                etp: &tp,
                cp,
            };
            let done = body(&ctx, rank);
            for tag in Tag::ALL {
                assert_eq!(device.meter().now(tag), 0, "{} left", tag.name());
            }
            Ok(done)
        })
        .unwrap()
    }
}

/// Sequences with their documents.
#[derive(Debug, Clone)]
struct Text {
    sequences: usize,
    len: usize,
    pos: Vec<i32>,
    doc: Option<Vec<i32>>,
}

impl Text {
    fn new(sequences: usize, len: usize, packed: bool) -> Self {
        let (stream, mut pos, mut doc) = (Stream::new(7, "documents"), vec![], vec![]);
        for b in 0..sequences {
            let (mut at, mut document) = (0, 0);
            for i in 0..len {
                if packed && i > 0 && stream.below((b * len + i) as u64, 5) == 0 {
                    (at, document) = (0, document + 1);
                }
                pos.push(at);
                doc.push(document);
                at += 1;
            }
        }
        Self {
            sequences,
            len,
            pos,
            doc: packed.then_some(doc),
        }
    }

    /// The rows that a rank of cp holds.
    fn rows(&self, cp: usize, place: usize) -> Vec<usize> {
        let of = |b: usize| held(self.len, cp, place).map(move |i| b * self.len + i);
        (0..self.sequences).flat_map(of).collect()
    }

    fn batch<E: Scalar>(&self, device: &Cpu, way: &Way, place: usize) -> MicroBatch<Cpu, E> {
        let rows = self.rows(way.cp, place);
        let put = |all: &[i32]| {
            let host: Vec<i32> = rows.iter().map(|&i| all[i]).collect();
            device.upload(Tag::Scratch, &host).unwrap()
        };
        let outer = way.cp / way.ulysses;
        let whole = || {
            ContextPlaces::upload(
                device,
                self.sequences,
                outer,
                &self.pos,
                self.doc.as_deref(),
            )
        };
        MicroBatch {
            sequences: self.sequences,
            positions: rows.len() / self.sequences,
            ids_t: put(&vec![0; self.pos.len()]),
            pos_t: put(&self.pos),
            doc_t: self.doc.as_ref().map(|doc| put(doc)),
            context: (way.cp > 1).then(|| whole().unwrap()),
            labels_t: put(&vec![0; self.pos.len()]),
            weight_t: device
                .upload(Tag::Scratch, &vec![<E::Acc as Real>::ONE; rows.len()])
                .unwrap(),
            share: 1.0,
            drawn: None,
        }
    }
}

/// Rows of `width` elements.
fn pick<T: Copy>(x: &[T], rows: &[usize], width: usize) -> Vec<T> {
    rows.iter()
        .flat_map(|&i| x[i * width..][..width].to_vec())
        .collect()
}

fn put<T: Copy>(rows: &[usize], part: &[T], whole: &mut [T]) {
    let width = part.len() / rows.len().max(1);
    for (part, &i) in part.chunks_exact(width.max(1)).zip(rows) {
        whole[i * width..][..width].copy_from_slice(part);
    }
}

/// Queries, keys, values and the gradient of the output, of all tokens.
struct Inputs<E> {
    spec: AttentionSpec,
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    d_o: Vec<E>,
}

#[derive(Debug, PartialEq)]
struct Done<E> {
    o: Vec<E>,
    dq: Vec<E>,
    dk: Vec<E>,
    dv: Vec<E>,
}

impl<E: Scalar> Inputs<E> {
    fn new(text: &Text, (heads, kv_heads, head_dim): (usize, usize, usize)) -> Self {
        let of = |name: &str, heads: usize| -> Vec<E> {
            let x = random(name, text.pos.len() * heads * head_dim);
            x.into_iter().map(E::from_f64).collect()
        };
        Self {
            spec: AttentionSpec {
                batch: text.sequences,
                queries: text.len,
                keys: text.len,
                heads,
                kv_heads,
                head_dim,
                scale: 1.0 / (head_dim as f64).sqrt(),
                causal: true,
                window: None,
                softcap: None,
                dropout: None,
            },
            q: of("q", heads),
            k: of("k", kv_heads),
            v: of("v", kv_heads),
            d_o: of("do", heads),
        }
    }

    fn widths(&self) -> (usize, usize) {
        let s = &self.spec;
        (s.heads * s.head_dim, s.kv_heads * s.head_dim)
    }

    /// By one call of the kernel.
    fn dense(&self, text: &Text) -> Done<E> {
        let (cpu, s) = (Cpu::new(1), &self.spec);
        let stats = vec![<E::Acc as Real>::ZERO; s.batch * s.heads * s.queries];
        let (mut lse, mut delta) = (stats.clone(), stats);
        let mut done = Done {
            o: self.q.clone(),
            dq: self.q.clone(),
            dk: self.k.clone(),
            dv: self.v.clone(),
        };
        let qkv = (&self.q[..], &self.k[..], &self.v[..]);
        let places = Places {
            q_pos: &text.pos[..],
            k_pos: &text.pos[..],
            documents: text.doc.as_deref().map(|doc| (doc, doc)),
            at: None,
        };
        cpu.attention::<E>(s, qkv, places, &mut done.o, &mut lse)
            .unwrap();
        cpu.attention_delta::<E>(s, &self.d_o, &done.o, &mut delta)
            .unwrap();
        let into = (&mut done.dq[..], &mut done.dk[..], &mut done.dv[..]);
        cpu.attention_backward::<E>(s, qkv, places, &self.d_o, (&lse, &delta), into)
            .unwrap();
        done
    }

    /// On the ranks of cp.
    fn over(&self, text: &Text, way: &Way) -> Done<E> {
        let (q_width, kv_width) = self.widths();
        let parts = way.run(|ctx, rank| {
            let (dev, rows) = (ctx.device, text.rows(way.cp, rank));
            let batch = text.batch::<E>(dev, way, rank);
            let spec = AttentionSpec {
                queries: batch.positions,
                keys: batch.positions,
                ..self.spec
            };
            let up = |x: &[E], width| dev.upload(Tag::Activation, &pick(x, &rows, width)).unwrap();
            let qkv = [
                up(&self.q, q_width),
                up(&self.k, kv_width),
                up(&self.v, kv_width),
            ];
            let (o, saved) = context::forward(ctx, &batch, &spec, qkv).unwrap();
            let d_o = up(&self.d_o, q_width);
            let Gradients { dq, dk, dv } =
                context::backward(ctx, &batch, &spec, saved, &o, d_o).unwrap();
            [o, dq, dk, dv].map(|buf: CpuBuf<E>| buf.as_ref().to_vec())
        });
        let mut done = Done {
            o: self.q.clone(),
            dq: self.q.clone(),
            dk: self.k.clone(),
            dv: self.v.clone(),
        };
        for (rank, parts) in parts.iter().enumerate() {
            let rows = text.rows(way.cp, rank);
            let wholes = [&mut done.o, &mut done.dq, &mut done.dk, &mut done.dv];
            for (part, whole) in parts.iter().zip(wholes) {
                put(&rows, part, whole);
            }
        }
        done
    }
}

fn wide<E: Float>(x: &[E]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

/// Largest difference of any result, relative to the largest of that result.
fn off<E: Float>(got: &Done<E>, want: &Done<f64>) -> [f64; 4] {
    [
        distance(&wide(&got.o), &want.o),
        distance(&wide(&got.dq), &want.dq),
        distance(&wide(&got.dk), &want.dk),
        distance(&wide(&got.dv), &want.dv),
    ]
}

/// Every way to cut for cp 1 to 6 whose heads fit.
fn ways(heads: usize, kv_heads: usize) -> Vec<Way> {
    let mut all = vec![];
    for cp in 1..=6 {
        for ulysses in
            (1..=cp).filter(|u: &usize| cp.is_multiple_of(*u) && heads.is_multiple_of(*u))
        {
            if !kv_heads.is_multiple_of(ulysses) && !ulysses.is_multiple_of(kv_heads) {
                continue;
            }
            for gather in [false, true] {
                if gather && cp == ulysses {
                    continue;
                }
                all.push(Way {
                    cp,
                    ulysses,
                    gather,
                    tp: 1,
                });
            }
        }
    }
    all
}

#[test]
fn every_kind_equals_one_device() {
    for (heads, kv) in [(6, 6), (6, 3), (12, 2), (4, 1)] {
        for (packed, window) in [
            (false, None),
            (true, None),
            (false, Some(5)),
            (true, Some(7)),
        ] {
            for way in ways(heads, kv) {
                // Two sequences; pieces of three tokens.
                let text = Text::new(2, 6 * way.cp, packed);
                let mut x = Inputs::<f64>::new(&text, (heads, kv, 4));
                x.spec.window = window;
                let far = off(&x.over(&text, &way), &x.dense(&text));
                let what = format!("{way:?} heads {heads}/{kv} packed {packed} {window:?}");
                assert!(far.iter().all(|off| *off < 1e-12), "{what}: {far:?}");
            }
        }
    }
}

/// All-gather and ulysses let each kernel see keys where one device sees them: o has its bits. A
/// ring has another order of sums, and must not be called equal.
#[test]
fn forward_has_the_bits_of_one_device_but_for_the_ring() {
    fn law<E: Scalar>() {
        for packed in [false, true] {
            let text = Text::new(1, 240, packed);
            let x = Inputs::<E>::new(&text, (6, 2, 8));
            let dense = x.dense(&text);
            let (mut equal, mut ring) = (0, 0);
            for way in ways(6, 2) {
                let got = x.over(&text, &way);
                let same = got.o == dense.o;
                if way.gather || way.ulysses == way.cp {
                    assert!(same, "{way:?} packed {packed}");
                    equal += 1;
                } else {
                    ring += usize::from(!same);
                }
            }
            assert!(equal > 5 && ring > 2, "{equal} {ring}");
        }
    }
    law::<f64>();
    law::<f32>();
}

/// In v attention is linear: <do, A v> = <A' do, v>, whatever moves k and v.
#[test]
fn adjoint() {
    for way in ways(6, 3) {
        let text = Text::new(2, 4 * way.cp, true);
        let x = Inputs::<f64>::new(&text, (6, 3, 2));
        let got = x.over(&text, &way);
        let (there, back) = (dot(&x.d_o, &got.o), dot(&got.dv, &x.v));
        assert!((there - back).abs() < 1e-11, "{way:?} {there} {back}");
    }
}

/// A ring of 16 is as exact as a ring of 2 (zhuzilin/ring-flash-attention issue 42 tells of errors
/// that grow with the ring).
#[test]
fn error_does_not_grow_with_the_ring() {
    let text = Text::new(1, 256, false);
    let exact = Inputs::<f64>::new(&text, (2, 1, 16));
    let want = exact.dense(&text);
    let far = |cp| {
        let way = Way {
            cp,
            ulysses: 1,
            gather: false,
            tp: 1,
        };
        // The same numbers, rounded once to f32; the rounding of inputs is in both.
        let x = Inputs::<f32>::new(&text, (2, 1, 16));
        off(&x.over(&text, &way), &want)
    };
    let (two, sixteen) = (far(2), far(16));
    println!("f32 against f64 dense, o dq dk dv: ring 2 {two:?}, ring 16 {sixteen:?}");
    for (two, sixteen) in two.iter().zip(sixteen) {
        assert!(sixteen <= 2.0 * two && *two > 0.0);
    }
}

#[test]
fn bf16_is_as_near_on_a_ring_as_on_one_device() {
    use half::bf16;
    let text = Text::new(1, 240, true);
    let (exact, x) = (
        Inputs::<f64>::new(&text, (4, 2, 8)),
        Inputs::<bf16>::new(&text, (4, 2, 8)),
    );
    let (want, one) = (
        exact.dense(&text),
        off(&x.dense(&text), &exact.dense(&text)),
    );
    for way in ways(4, 2) {
        let far = off(&x.over(&text, &way), &want);
        for (far, one) in far.iter().zip(one) {
            assert!(*far <= 1.5 * one, "{way:?} {far:e} {one:e}");
        }
    }
}

#[test]
fn sequences_without_equal_pieces_are_refused() {
    let cpu = Cpu::new(1);
    let upload = |len: i32, outer| {
        let pos: Vec<i32> = (0..len).collect();
        ContextPlaces::upload(&cpu, 1, outer, &pos, None)
    };
    assert!(upload(12, 3).is_ok() && upload(0, 2).is_ok());
    for (len, outer) in [(5, 1), (10, 4), (6, 0)] {
        assert!(matches!(upload(len, outer), Err(Error::Layout(_))));
    }
}

#[test]
fn heads_that_a_group_cannot_share_are_refused() {
    for (heads, kv, ulysses) in [(4, 4, 3), (6, 2, 3), (6, 3, 2)] {
        let way = Way {
            cp: ulysses,
            ulysses,
            gather: false,
            tp: 1,
        };
        let text = Text::new(1, 2 * ulysses, false);
        let refused = way.run(|ctx, rank| {
            let batch = text.batch::<f64>(ctx.device, &way, rank);
            let mut spec = Inputs::<f64>::new(&text, (heads, kv, 2)).spec;
            (spec.queries, spec.keys) = (2, 2);
            let up = |heads: usize| {
                ctx.device
                    .upload(Tag::Activation, &vec![0.0; 2 * heads * 2])
                    .unwrap()
            };
            let done = context::forward(ctx, &batch, &spec, [up(heads), up(kv), up(kv)]);
            matches!(done, Err(Error::Layout(_)))
        });
        assert!(
            refused.iter().all(|refused| *refused),
            "{heads} {kv} {ulysses}"
        );
    }
}

/// A whole block, tp and sequence parallelism inside cp, as logical tensors.
fn block_over(text: &Text, way: &Way, spec: &BlockSpec) -> Whole {
    let mesh = way.mesh();
    let block = Block::new(&mesh, 0, spec).unwrap();
    let specs = block.params();
    let trio = common::trios::block(&mesh, common::Tokens::new(1, 1, 1), spec);
    let weights = weights(&trio as &dyn Trio);
    let (d, t) = (spec.hidden, text.pos.len());
    let (x, dy) = (random("x", t * d), random("dy", t * d));
    let tp_mesh = common::tp_mesh(way.tp);
    let outside = Region::new(spec.sequence_parallel).unwrap().outside();
    let line = value("x", [t / way.cp, d], &common::on_tp(&tp_mesh, outside));
    let parts = way.run(|ctx, rank| {
        let (dev, tp) = (ctx.device, ctx.tp.rank());
        let rows = text.rows(way.cp, rank / way.tp);
        let batch = text.batch::<f64>(dev, way, rank / way.tp);
        let local = |x: &[f64]| cut(&line, &tp_mesh, tp, &pick(x, &rows, d));
        let up = |x: &[f64]| dev.upload(Tag::Activation, &local(x)).unwrap();
        let mine: Vec<Vec<f64>> = specs
            .iter()
            .zip(&weights)
            .map(|(s, w)| cut(s, &mesh, rank, w))
            .collect();
        let views: Vec<&[f64]> = mine.iter().map(Vec::as_slice).collect();
        let mut grads: Vec<Vec<f64>> = mine.iter().map(|w| vec![0.0; w.len()]).collect();
        let mut into: Vec<&mut [f64]> = grads.iter_mut().map(Vec::as_mut_slice).collect();
        let (y, mut saved) = block.forward(ctx, &batch, &views, up(&x)).unwrap();
        let dx = block
            .backward_input(ctx, &batch, &views, &mut saved, up(&dy))
            .unwrap();
        block
            .backward_weight(ctx, &batch, saved, &mut into)
            .unwrap();
        (y.as_ref().to_vec(), dx.as_ref().to_vec(), grads)
    });
    let logical = |part: &dyn Fn(usize) -> Vec<f64>| {
        let mut whole = vec![0.0; t * d];
        for place in 0..way.cp {
            let of_tp: Vec<_> = (0..way.tp).map(|tp| part(place * way.tp + tp)).collect();
            let rows = text.rows(way.cp, place);
            put(&rows, &join(&line, &tp_mesh, &of_tp), &mut whole);
        }
        whole
    };
    let grad = |(i, spec): (usize, &quintet_collectives::ParamSpec)| {
        let of_rank: Vec<_> = parts.iter().map(|p| p.2[i].clone()).collect();
        (spec.name.clone(), join(&dual(spec), &mesh, &of_rank))
    };
    Whole {
        y: logical(&|rank| parts[rank].0.clone()),
        dx: logical(&|rank| parts[rank].1.clone()),
        grads: specs.iter().enumerate().map(grad).collect(),
    }
}

const ONE: Way = Way {
    cp: 1,
    ulysses: 1,
    gather: false,
    tp: 1,
};

fn block_spec(heads: usize, kv_heads: usize, window: Option<usize>, sp: bool) -> BlockSpec {
    BlockSpec {
        hidden: 10,
        heads,
        kv_heads,
        head_dim: 4,
        ffn: 9,
        theta: 100.0,
        eps: 1e-5,
        layers: 3,
        sequence_parallel: sp,
        moe: None,
        window,
        // Norms of queries and keys where there is a window, so that both are seen.
        architecture: Architecture {
            qk_norm: window.is_some(),
            ..Architecture::LLAMA
        },
    }
}

#[test]
fn a_block_with_tp_and_sequence_parallelism_inside() {
    for (cp, ulysses, gather) in [(2, 1, false), (2, 2, false), (3, 1, true), (4, 2, false)] {
        for (tp, sp) in [(1, false), (2, false), (2, true)] {
            for (packed, window) in [(false, None), (true, Some(6))] {
                let (way, text) = (
                    Way {
                        cp,
                        ulysses,
                        gather,
                        tp,
                    },
                    Text::new(2, 4 * cp, packed),
                );
                let spec = block_spec(8, 2, window, sp);
                let plain = block_spec(8, 2, window, false);
                let (got, want) = (
                    block_over(&text, &way, &spec),
                    block_over(&text, &ONE, &plain),
                );
                assert_close(&format!("{way:?} sp {sp}"), &got, &want, 1e-12, true);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_cut(
        outer in 1..=4usize, ulysses in 1..=3usize, each in 1..=2usize, group in 1..=3usize,
        few: bool, gather: bool, sequences in 1..=3usize, piece in 1..=5usize, packed: bool,
        window in prop::option::of(1..30usize),
    ) {
        prop_assume!(outer * ulysses <= 6);
        let way = Way { cp: outer * ulysses, ulysses, gather, tp: 1 };
        let kv = if few { 1 } else { ulysses * each };
        let heads = kv * group * if few { ulysses } else { 1 };
        let text = Text::new(sequences, 2 * way.cp * piece, packed);
        let mut x = Inputs::<f64>::new(&text, (heads, kv, 2));
        x.spec.window = window;
        let (got, want) = (x.over(&text, &way), x.dense(&text));
        // With one key for each query gradients are zero: absolute where small.
        for (got, want) in [(&got.o, &want.o), (&got.dq, &want.dq), (&got.dk, &want.dk), (&got.dv, &want.dv)] {
            for (g, w) in got.iter().zip(want) {
                prop_assert!((g - w).abs() < 1e-12 * w.abs().max(1.0), "{:?} {} {}", way, g, w);
            }
        }
    }
}

/// `Parts` is used by other tests of this folder.
const _: fn(Parts) = drop;
