//! Attention forward and backward.

use half::bf16;
use quintet_kernels::attention::naive::{self, Inputs};
use quintet_kernels::{Attention, AttentionSpec, Dropout, Error, Float, HeadDropout, Places, Tag};

use crate::support::{Random, close, download, upload, wide};

/// One problem: inputs, positions and the gradient that comes from above.
#[derive(Clone)]
pub struct Problem<E> {
    pub spec: AttentionSpec,
    pub q: Vec<E>,
    pub k: Vec<E>,
    pub v: Vec<E>,
    pub q_pos: Vec<i32>,
    pub k_pos: Vec<i32>,
    pub documents: Option<(Vec<i32>, Vec<i32>)>,
    /// Places in the sample, for dropout.
    pub at: Option<(Vec<i32>, Vec<i32>)>,
    pub do_: Vec<E>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Answer<E: Float> {
    pub o: Vec<E>,
    pub lse: Vec<E::Acc>,
    pub delta: Vec<E::Acc>,
    pub dq: Vec<E>,
    pub dk: Vec<E>,
    pub dv: Vec<E>,
}

pub fn naive_of<E: Float>(x: &Problem<E>) -> Answer<f64> {
    x.naive()
}

impl<E: Float> Problem<E> {
    pub fn random(rng: &mut Random, spec: AttentionSpec) -> Self {
        let q_len = spec.batch * spec.queries * spec.heads * spec.head_dim;
        let kv_len = spec.batch * spec.keys * spec.kv_heads * spec.head_dim;
        // Queries are the last of the keys, as a context-parallel rank may hold them.
        let first = spec.keys.saturating_sub(spec.queries);
        let pos = |len: usize, first: usize| -> Vec<i32> {
            (0..spec.batch * len)
                .map(|i| (first + i % len) as i32)
                .collect()
        };
        Self {
            spec,
            q: rng.vec(q_len),
            k: rng.vec(kv_len),
            v: rng.vec(kv_len),
            q_pos: pos(spec.queries, first),
            k_pos: pos(spec.keys, 0),
            documents: None,
            at: None,
            do_: rng.vec(q_len),
        }
    }

    /// The same with each sequence cut in documents, whose positions begin anew; queries are
    /// still the last of the keys.
    pub fn packed(mut self, rng: &mut Random) -> Self {
        let AttentionSpec {
            queries,
            keys,
            batch,
            ..
        } = self.spec;
        let len = queries.max(keys);
        let (mut q, mut k) = ((vec![], vec![]), (vec![], vec![]));
        for _ in 0..batch {
            let (mut pos, mut document) = (0, 0);
            let tokens: Vec<(i32, i32)> = (0..len)
                .map(|_| {
                    if rng.below(17) == 0 {
                        (pos, document) = (0, document + 1);
                    }
                    pos += 1;
                    (pos - 1, document)
                })
                .collect();
            for (count, (pos, doc)) in [(queries, &mut q), (keys, &mut k)] {
                pos.extend(tokens[len - count..].iter().map(|t| t.0));
                doc.extend(tokens[len - count..].iter().map(|t| t.1));
            }
        }
        self.at = Some((self.q_pos, self.k_pos));
        (self.q_pos, self.k_pos) = (q.0, k.0);
        self.documents = Some((q.1, k.1));
        self
    }

    /// The same with a share of the probabilities let go.
    pub fn dropping(mut self, share: f64) -> Self {
        self.spec.dropout = Some(HeadDropout {
            dropout: Dropout {
                share,
                seed: 3,
                step: 5,
                site: 1,
                sample: 6,
            },
            first_head: 2,
        });
        self
    }

    /// The same with scores capped.
    pub fn capped(mut self, cap: f64) -> Self {
        self.spec.softcap = Some(cap);
        self
    }

    /// The same problem with these keys alone.
    pub fn with_keys(&self, keys: &[usize]) -> Self {
        let width = self.spec.kv_heads * self.spec.head_dim;
        let all = |of: usize| (0..self.spec.batch).flat_map(move |b| (0..of).map(move |i| (b, i)));
        let at = |(b, i): (usize, usize)| b * self.spec.keys + keys[i];
        let rows = |x: &[E]| -> Vec<E> {
            let row = |place| x[at(place) * width..][..width].to_vec();
            all(keys.len()).flat_map(row).collect()
        };
        let ints = |x: &[i32]| all(keys.len()).map(|place| x[at(place)]).collect();
        let (documents, at) = (self.documents.as_ref(), self.at.as_ref());
        Self {
            spec: AttentionSpec {
                keys: keys.len(),
                ..self.spec
            },
            k: rows(&self.k),
            v: rows(&self.v),
            k_pos: ints(&self.k_pos),
            documents: documents.map(|(q, k)| (q.clone(), ints(k))),
            at: at.map(|(q, k)| (q.clone(), ints(k))),
            ..self.clone()
        }
    }

    /// Puts rows of these keys where they belong among all.
    pub fn put_keys<T: Copy>(&self, keys: &[usize], from: &[T], to: &mut [T]) {
        let width = self.spec.kv_heads * self.spec.head_dim;
        for (i, row) in from.chunks_exact(width).enumerate() {
            let at = i / keys.len() * self.spec.keys + keys[i % keys.len()];
            to[at * width..][..width].copy_from_slice(row);
        }
    }

    /// Calls `body` with the inputs on the device.
    pub fn call<B: Attention>(
        &self,
        dev: &B,
        body: impl FnOnce((B::Ref<'_, E>, B::Ref<'_, E>, B::Ref<'_, E>), Places<B::Ref<'_, i32>>),
    ) {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| upload(dev, x));
        let [q_pos, k_pos] = [&self.q_pos, &self.k_pos].map(|x| upload(dev, x));
        let documents = self.documents.as_ref();
        let documents = documents.map(|(q, k)| (upload(dev, q), upload(dev, k)));
        let at = self.at.as_ref();
        let at = at.map(|(q, k)| (upload(dev, q), upload(dev, k)));
        let places = Places {
            q_pos: B::whole(&q_pos),
            k_pos: B::whole(&k_pos),
            documents: documents.as_ref().map(|(q, k)| (B::whole(q), B::whole(k))),
            at: at.as_ref().map(|(q, k)| (B::whole(q), B::whole(k))),
        };
        body((B::whole(&q), B::whole(&k), B::whole(&v)), places);
    }

    pub fn solve<B: Attention>(&self, dev: &B) -> Answer<E> {
        let spec = &self.spec;
        let do_ = upload(dev, &self.do_);
        let zeros = |len| dev.zeros::<E>(Tag::Scratch, len).unwrap();
        let stats = spec.batch * spec.heads * spec.queries;
        let [mut lse, mut delta] = [0; 2].map(|_| dev.zeros(Tag::Scratch, stats).unwrap());
        // What was there must not matter.
        let [mut o, mut dq] = [0; 2].map(|_| upload(dev, &vec![E::from_f64(7.0); self.q.len()]));
        let [mut dk, mut dv] = [0; 2].map(|_| zeros(self.k.len()));
        let do_ = B::whole(&do_);
        self.call(dev, |qkv, places| {
            let (o_view, lse_view) = (B::whole_mut(&mut o), B::whole_mut(&mut lse));
            dev.attention(spec, qkv, places, o_view, lse_view).unwrap();
            dev.attention_delta(spec, do_, B::whole(&o), B::whole_mut(&mut delta))
                .unwrap();
            let stats = (B::whole(&lse), B::whole(&delta));
            let grads = (
                B::whole_mut(&mut dq),
                B::whole_mut(&mut dk),
                B::whole_mut(&mut dv),
            );
            dev.attention_backward(spec, qkv, places, do_, stats, grads)
                .unwrap();
        });
        Answer {
            o: download(dev, &o),
            lse: download(dev, &lse),
            delta: download(dev, &delta),
            dq: download(dev, &dq),
            dk: download(dev, &dk),
            dv: download(dev, &dv),
        }
    }

    fn naive(&self) -> Answer<f64> {
        let (q, k, v, do_) = (wide(&self.q), wide(&self.k), wide(&self.v), wide(&self.do_));
        let x = Inputs {
            q: &q,
            k: &k,
            v: &v,
            q_pos: &self.q_pos,
            k_pos: &self.k_pos,
            documents: self.documents.as_ref().map(|(q, k)| (&q[..], &k[..])),
            at: self.at.as_ref().map(|(q, k)| (&q[..], &k[..])),
        };
        let (o, lse) = naive::forward(&self.spec, x);
        let (dq, dk, dv) = naive::backward(&self.spec, x, &do_);
        Answer {
            o,
            lse,
            delta: Vec::new(),
            dq,
            dk,
            dv,
        }
    }
}

pub fn spec(
    (batch, queries, keys): (usize, usize, usize),
    (heads, kv_heads, head_dim): (usize, usize, usize),
    causal: bool,
) -> AttentionSpec {
    AttentionSpec {
        batch,
        queries,
        keys,
        heads,
        kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f64).sqrt(),
        causal,
        window: None,
        softcap: None,
        dropout: None,
    }
}

/// What a law is checked on, and how a device may differ from plain arithmetic in Acc.
#[derive(Clone)]
pub struct Size {
    pub shapes: Vec<AttentionSpec>,
    /// Tokens where a law has one shape.
    pub tokens: usize,
    /// Relative error of weights and their gradients, where those of 16-bit inputs are rounded
    /// before they are multiplied.
    pub rounded: f64,
}

impl Size {
    pub fn full() -> Self {
        Self {
            shapes: shapes(),
            tokens: 150,
            rounded: 0.0,
        }
    }
}

/// Every shape, plain, packed with documents, with a window, with both, and with dropout; capped too.
fn problems<E: Float>(seed: u64, shapes: &[AttentionSpec]) -> Vec<Problem<E>> {
    let windows = [1, 5, 64, 100_000, usize::MAX];
    let shapes = shapes.iter().copied().enumerate();
    shapes
        .flat_map(|(i, shape)| {
            let mut rng = Random(seed + i as u64);
            let near = AttentionSpec {
                window: Some(windows[i % windows.len()]),
                ..shape
            };
            let plain = Problem::random(&mut rng, shape);
            let window = Problem::random(&mut rng, near);
            let both = window.clone().packed(&mut rng);
            let [plain_dropped, both_dropped] = [&plain, &both].map(|x| x.clone().dropping(0.4));
            let packed = plain.clone().packed(&mut rng);
            let [capped, all] = [&packed, &both_dropped].map(|x| x.clone().capped(0.6));
            [
                plain,
                packed,
                window,
                both,
                plain_dropped,
                both_dropped,
                capped,
                all,
            ]
        })
        .collect()
}

fn shapes() -> Vec<AttentionSpec> {
    vec![
        spec((1, 1, 1), (1, 1, 1), true),
        spec((1, 3, 3), (2, 1, 8), false),
        spec((2, 65, 65), (4, 2, 16), true),
        spec((1, 70, 200), (3, 3, 5), true),
        spec((2, 113, 64), (2, 2, 32), false),
        spec((1, 130, 129), (6, 2, 20), true),
        spec((1, 2, 239), (4, 1, 64), true),
    ]
}

/// A query whose score stands far above at one key copies that key's value, exactly.
pub fn one_hot_keys_are_looked_up<B: Attention>(dev: &B) {
    one_hot_keys_of(dev, 100, 128);
}

pub fn one_hot_keys_of<B: Attention>(dev: &B, s: usize, d: usize) {
    fn law<B: Attention, E: Float>(dev: &B, s: usize, d: usize) {
        let mut rng = Random(11);
        let shape = AttentionSpec {
            scale: 800.0,
            ..spec((2, s, s), (4, 2, d), false)
        };
        let mut x = Problem::<E>::random(&mut rng, shape);
        x.v = rng.integers(x.v.len(), 99);
        let hot = |i: usize, len: usize| E::from_f64(f64::from(u8::from(i == len)));
        let row = |z: usize| (0..d).map(move |i| hot(i, z));
        x.k = (0..2 * s * 2).flat_map(|i| row(i / 2 % s)).collect();
        // Query s of head h looks for key (7 s + h) mod 100.
        let target = |row: usize| (7 * (row / 4 % s) + row % 4) % s;
        x.q = (0..2 * s * 4).flat_map(|i| row(target(i))).collect();
        let got = x.solve(dev).o;
        for (i, o) in got.chunks(d).enumerate() {
            let (b, h) = (i / 4 / s, i % 4);
            let v = ((b * s + target(i)) * 2 + h / 2) * d;
            assert_eq!(o, &x.v[v..v + d], "row {i}");
        }
    }
    law::<B, f64>(dev, s, d);
    law::<B, f32>(dev, s, d);
    law::<B, bf16>(dev, s, d);
}

/// All values lie in [-1, 1]. Errors of the scores are at most (d + 2) u; weights carry them and
/// some units of the exponential; sums over keys add at most (keys / 64 + 64) u. Gradients go
/// through d values of size 2 and as many sums. Storage rounds o once, and delta is taken from
/// that o.
pub fn near_naive<B: Attention>(dev: &B) {
    near_naive_on(dev, &Size::full());
}

pub fn near_naive_on<B: Attention>(dev: &B, size: &Size) {
    fn law<B: Attention, E: Float>(dev: &B, size: &Size) {
        let (acc, out) = (<E::Acc as Float>::UNIT_ROUNDOFF, E::UNIT_ROUNDOFF);
        let rounded = if out > acc { size.rounded } else { 0.0 };
        for x in problems::<E>(0, &size.shapes) {
            let (spec, got, want) = (x.spec, x.solve(dev), x.naive());
            let d = spec.head_dim as f64;
            // What stays under dropout is scaled up.
            let up = spec.dropout.map_or(1.0, |of| of.dropout.scale());
            let (exact, rounded) = (up * acc * (2.0 * d + 100.0) * d.sqrt(), up * rounded);
            // Weights of a row sum to 1, values are at most 1.
            let one = exact + rounded;
            close("o", &got.o, &want.o, |i| one + out * want.o[i].abs());
            close("lse", &got.lse, &want.lse, |_| exact);
            let ds = (exact + rounded / 4.0) * d.sqrt() * 8.0
                + if out > acc { d.sqrt() * out * 2.0 } else { 0.0 };
            let bound = |w: &[f64]| w.iter().map(|w| out * w.abs() + ds).collect::<Vec<_>>();
            let (dq, dk, dv) = (bound(&want.dq), bound(&want.dk), bound(&want.dv));
            close("dq", &got.dq, &want.dq, |i| dq[i]);
            // A key is read by every query of its heads.
            let reads = (spec.queries * spec.heads / spec.kv_heads) as f64;
            close("dk", &got.dk, &want.dk, |i| {
                dk[i] + ds * reads / spec.keys as f64
            });
            close("dv", &got.dv, &want.dv, |i| {
                dv[i] + one * reads / spec.keys as f64
            });
            assert_eq!(got.delta.len(), got.lse.len());
        }
    }
    law::<B, f64>(dev, size);
    law::<B, f32>(dev, size);
    law::<B, bf16>(dev, size);
}

/// Some of the queries, at any place and in another order, get the same bits.
pub fn rows_do_not_know_each_other<B: Attention>(dev: &B) {
    rows_on(dev, &Size::full());
}

pub fn rows_on<B: Attention>(dev: &B, size: &Size) {
    fn law<B: Attention, E: Float>(dev: &B, packed: bool, n: usize) {
        let mut shape = spec((1, n, n), (4, 2, 16), true);
        let mut rng = Random(12);
        shape.window = packed.then_some(9);
        let mut whole = Problem::<E>::random(&mut rng, shape);
        if packed {
            whole = whole.packed(&mut rng).dropping(0.3);
        }
        let want = whole.solve(dev);
        for count in [1, 13, 64, 100].map(|count| count.min(n / 2 + 7)) {
            let mut some = whole.clone();
            some.spec.queries = count;
            let chosen: Vec<_> = (0..count).map(|_| rng.below(n)).collect();
            let width = 4 * 16;
            let pick = |x: &[E]| -> Vec<E> {
                let row = |&s: &usize| x[s * width..(s + 1) * width].to_vec();
                chosen.iter().flat_map(row).collect()
            };
            (some.q, some.do_) = (pick(&whole.q), pick(&whole.do_));
            some.q_pos = chosen.iter().map(|&s| whole.q_pos[s]).collect();
            for (q, _) in some.documents.iter_mut().chain(&mut some.at) {
                *q = chosen.iter().map(|&s| q[s]).collect();
            }
            let got = some.solve(dev);
            let same = |got: &[E], want: &[E]| {
                let bits = |x: &[E]| bytemuck::cast_slice::<E, u8>(x).to_vec();
                bits(got) == bits(&pick(want))
            };
            assert!(same(&got.o, &want.o) && same(&got.dq, &want.dq));
            for (i, &s) in chosen.iter().enumerate() {
                for h in 0..4 {
                    assert_eq!(got.lse[h * count + i], want.lse[h * n + s]);
                }
            }
        }
    }
    for packed in [false, true] {
        law::<B, f64>(dev, packed, size.tokens);
        law::<B, f32>(dev, packed, size.tokens);
        law::<B, bf16>(dev, packed, size.tokens);
    }
}

/// A query before all keys, keys that nobody sees, no keys and no queries.
pub fn nothing_seen_gives_zero<B: Attention>(dev: &B) {
    let mut x = Problem::<f32>::random(&mut Random(13), spec((1, 80, 80), (2, 1, 8), true));
    x.q_pos[3] = -1;
    x.k_pos[79] = 1000;
    let got = x.solve(dev);
    let row = 3 * 16..4 * 16;
    assert_eq!(got.o[row.clone()], [0.0; 16]);
    assert_eq!(got.dq[row], [0.0; 16]);
    assert_eq!(
        (got.lse[3], got.lse[83]),
        (f32::NEG_INFINITY, f32::NEG_INFINITY)
    );
    assert_eq!(
        (&got.dk[79 * 8..], &got.dv[79 * 8..]),
        (&[0.0; 8][..], &[0.0; 8][..])
    );
    let finite = [&got.o, &got.dq, &got.dk, &got.dv];
    assert!(finite.into_iter().flatten().all(|x| x.is_finite()));

    let none = Problem::<f32>::random(&mut Random(14), spec((2, 3, 0), (2, 1, 4), true));
    let got = none.solve(dev);
    assert_eq!((got.o, got.dq), (vec![0.0; 48], vec![0.0; 48]));
    assert_eq!(got.lse, [f32::NEG_INFINITY; 12]);

    let mut none = Problem::<f64>::random(&mut Random(15), spec((2, 0, 3), (2, 1, 4), false));
    none.k_pos = vec![0; 6];
    let got = none.solve(dev);
    assert_eq!((got.dk, got.dv), (vec![0.0; 24], vec![0.0; 24]));
}

/// The derivative of <do, o> along a random direction, by central differences.
pub fn finite_differences<B: Attention>(dev: &B) {
    finite_differences_on(dev, &Size::full());
}

pub fn finite_differences_on<B: Attention>(dev: &B, size: &Size) {
    let mut rng = Random(99);
    for x in problems::<f64>(100, &size.shapes) {
        let (shape, got) = (x.spec, x.solve(dev));
        let directions = [&x.q, &x.k, &x.v].map(|v| rng.vec::<f64>(v.len()));
        let at = |t: f64| {
            let mut y = x.clone();
            for (v, dir) in [&mut y.q, &mut y.k, &mut y.v].into_iter().zip(&directions) {
                v.iter_mut().zip(dir).for_each(|(v, dir)| *v += t * dir);
            }
            dot(&y.solve(dev).o, &x.do_)
        };
        let step = 1e-4;
        // Fourth order: the error is about step^4.
        let slope =
            (8.0 * (at(step) - at(-step)) - (at(2.0 * step) - at(-2.0 * step))) / (12.0 * step);
        let want: f64 = [&got.dq, &got.dk, &got.dv]
            .into_iter()
            .zip(&directions)
            .map(|(g, dir)| dot(g, dir))
            .sum();
        let size = 1.0 + want.abs();
        assert!(
            (slope - want).abs() < 1e-8 * size,
            "{slope} {want} {shape:?}"
        );
    }
}

/// In v attention is linear: <do, A v> = <A' do, v>.
pub fn adjoint<B: Attention>(dev: &B) {
    adjoint_on(dev, &Size::full());
}

pub fn adjoint_on<B: Attention>(dev: &B, size: &Size) {
    for x in problems::<f64>(200, &size.shapes) {
        let got = x.solve(dev);
        let (there, back) = (dot(&x.do_, &got.o), dot(&got.dv, &x.v));
        assert!((there - back).abs() < 1e-11, "{there} {back}");
    }
}

pub fn refuses_what_does_not_fit<B: Attention>(dev: &B) {
    let good = spec((1, 2, 2), (2, 1, 4), true);
    let x = upload(dev, &[1.0_f32; 16]);
    let pos = upload(dev, &[0, 1]);
    let mut o = upload(dev, &[5.0_f32; 16]);
    let mut lse = upload(dev, &[5.0_f32; 4]);
    let (all, half) = (B::whole(&x), B::slice(B::whole(&x), 0..8));
    let at = B::whole(&pos);
    let mut call = |spec: &AttentionSpec, k, k_pos| {
        let (o, lse) = (B::whole_mut(&mut o), B::whole_mut(&mut lse));
        dev.attention(spec, (all, k, half), (at, k_pos).into(), o, lse)
    };
    assert!(matches!(
        call(&good, all, at),
        Err(Error::Len { what: "k", .. })
    ));
    let short = B::slice(at, 0..1);
    assert!(matches!(call(&good, half, short), Err(Error::Len { .. })));
    for bad in [
        AttentionSpec {
            kv_heads: 0,
            ..good
        },
        AttentionSpec {
            heads: 3,
            kv_heads: 2,
            ..good
        },
        AttentionSpec {
            head_dim: 0,
            ..good
        },
        AttentionSpec {
            batch: usize::MAX,
            ..good
        },
        AttentionSpec {
            window: Some(0),
            ..good
        },
        AttentionSpec {
            softcap: Some(0.0),
            ..good
        },
        AttentionSpec {
            softcap: Some(f64::INFINITY),
            ..good
        },
    ] {
        assert!(matches!(call(&bad, half, at), Err(Error::Spec { .. })));
    }
    assert_eq!(
        download(dev, &o),
        [5.0; 16],
        "a refused call writes nothing"
    );
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// A query with one key gives that key all its weight whatever the score: the gradient of the
/// score is zero to the last bit, for o is v and delta is taken as `do v^T` is.
pub fn one_key_has_no_gradient<B: Attention>(dev: &B) {
    one_key_on(dev, &Size::full());
}

pub fn one_key_on<B: Attention>(dev: &B, size: &Size) {
    fn law<B: Attention, E: Float>(dev: &B, size: &Size) {
        for (seed, shape) in size.shapes.iter().copied().enumerate() {
            let near = AttentionSpec {
                window: Some(1),
                causal: true,
                ..shape
            };
            let x = Problem::<E>::random(&mut Random(300 + seed as u64), near);
            let got = x.solve(dev);
            assert!(got.dq.iter().chain(&got.dk).all(|g| g.to_f64() == 0.0));
        }
    }
    law::<B, f64>(dev, size);
    law::<B, f32>(dev, size);
    law::<B, bf16>(dev, size);
}
