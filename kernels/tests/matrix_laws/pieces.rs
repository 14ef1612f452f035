//! Keys that come in pieces, as on a ring: forward from carry to carry, backward added up.

use half::bf16;
use quintet_kernels::{Attention, AttentionSpec, Carry, Error, Float, Real, Tag};

use crate::attention::{Answer, Problem, naive_of, spec};
use crate::support::{Random, close, download, upload};

/// Keys that may begin a piece without changing a bit, on every device.
const ALIGNED: usize = 128;

/// What a piecewise run gives: gradients stay in Acc.
struct InPieces<E: Float> {
    o: Vec<E>,
    lse: Vec<E::Acc>,
    grads: [Vec<E::Acc>; 3],
}

/// Runs `x` with its keys in the pieces given, in that order.
fn solve<B: Attention, E: Float>(dev: &B, x: &Problem<E>, pieces: &[Vec<usize>]) -> InPieces<E> {
    let (q_len, stats) = (x.q.len(), x.spec.batch * x.spec.heads * x.spec.queries);
    let acc = |len| dev.alloc::<E::Acc>(Tag::Scratch, len).unwrap();
    let (mut o_acc, mut max) = (acc(q_len), acc(stats));
    let mut sum = dev.zeros::<E::Acc>(Tag::Scratch, stats).unwrap();
    let parts: Vec<Problem<E>> = pieces.iter().map(|keys| x.with_keys(keys)).collect();
    for part in &parts {
        let carry = Carry {
            o_bshd: B::whole_mut(&mut o_acc),
            max_bhs: B::whole_mut(&mut max),
            sum_bhs: B::whole_mut(&mut sum),
        };
        part.call(dev, |qkv, places| {
            dev.attention_step::<E>(&part.spec, qkv, places, carry)
                .unwrap();
        });
    }
    let (mut o, mut lse) = (dev.alloc(Tag::Scratch, q_len).unwrap(), acc(stats));
    let carry = Carry {
        o_bshd: B::whole(&o_acc),
        max_bhs: B::whole(&max),
        sum_bhs: B::whole(&sum),
    };
    let (o_view, lse_view) = (B::whole_mut(&mut o), B::whole_mut(&mut lse));
    dev.attention_finish::<E>(&x.spec, carry, o_view, lse_view)
        .unwrap();
    let (do_, mut delta) = (upload(dev, &x.do_), acc(stats));
    let do_ = B::whole(&do_);
    dev.attention_delta::<E>(&x.spec, do_, B::whole(&o), B::whole_mut(&mut delta))
        .unwrap();
    let zeros = |len| dev.zeros::<E::Acc>(Tag::Scratch, len).unwrap();
    let mut dq = zeros(q_len);
    let kv_len = x.k.len();
    let mut dkv = [0; 2].map(|_| vec![<E::Acc as Real>::ZERO; kv_len]);
    for (part, keys) in parts.iter().zip(pieces) {
        let [mut dk, mut dv] = [0; 2].map(|_| zeros(part.k.len()));
        part.call(dev, |qkv, places| {
            let rows = (B::whole(&lse), B::whole(&delta));
            let into = (
                B::whole_mut(&mut dq),
                B::whole_mut(&mut dk),
                B::whole_mut(&mut dv),
            );
            dev.attention_backward_step::<E>(&part.spec, qkv, places, do_, rows, into)
                .unwrap();
        });
        for (whole, part) in dkv.iter_mut().zip([dk, dv]) {
            x.put_keys(keys, &download(dev, &part), whole);
        }
    }
    let [dk, dv] = dkv;
    InPieces {
        o: download(dev, &o),
        lse: download(dev, &lse),
        grads: [download(dev, &dq), dk, dv],
    }
}

fn bits<E: Float>(x: &[E]) -> &[u8] {
    bytemuck::cast_slice(x)
}

/// A packed, windowed problem with many keys.
fn problem<E: Float>(seed: u64, (queries, keys): (usize, usize)) -> Problem<E> {
    let mut rng = Random(seed);
    let mut shape = spec((2, queries, keys), (4, 2, 8), true);
    shape.window = Some(150);
    Problem::random(&mut rng, shape).packed(&mut rng)
}

/// All keys in consecutive pieces of `len`.
fn cut(keys: usize, len: usize) -> Vec<Vec<usize>> {
    let all: Vec<usize> = (0..keys).collect();
    all.chunks(len).map(<[usize]>::to_vec).collect()
}

pub fn in_order_they_have_the_bits_of_one_call<B: Attention>(dev: &B) {
    in_order_of(dev, (90, 300));
}

pub fn in_order_of<B: Attention>(dev: &B, (queries, keys): (usize, usize)) {
    fn law<B: Attention, E: Float>(dev: &B, (queries, keys): (usize, usize)) {
        let plain = spec((1, queries, keys), (2, 1, 8), true);
        for x in [
            problem::<E>(1, (queries, keys)),
            Problem::random(&mut Random(2), plain),
        ] {
            let want: Answer<E> = x.solve(dev);
            for len in [keys, ALIGNED, 2 * ALIGNED] {
                let got = solve(dev, &x, &cut(keys, len));
                assert_eq!(bits(&got.o), bits(&want.o), "{len}");
                assert_eq!(bits(&got.lse), bits(&want.lse), "{len}");
                if len == keys {
                    let rounded = |acc: &[E::Acc]| -> Vec<E> {
                        acc.iter().map(|&x| E::from_acc(x)).collect()
                    };
                    let [dq, dk, dv] = got.grads.each_ref().map(|g| rounded(g));
                    assert_eq!(bits(&dq), bits(&want.dq));
                    assert_eq!(bits(&dk), bits(&want.dk));
                    assert_eq!(bits(&dv), bits(&want.dv));
                }
            }
        }
    }
    law::<B, f64>(dev, (queries, keys));
    law::<B, f32>(dev, (queries, keys));
    law::<B, bf16>(dev, (queries, keys));
}

/// Pieces of any length, empty ones too, of any keys.
pub fn in_any_cut_and_order_they_sum_up<B: Attention>(dev: &B) {
    in_any_cut_of(dev, (75, 140), 12);
}

pub fn in_any_cut_of<B: Attention>(dev: &B, (queries, keys): (usize, usize), rounds: u64) {
    for seed in 0..rounds {
        let mut rng = Random(seed);
        let x = problem::<f64>(50 + seed, (queries, keys));
        let count = 1 + rng.below(9);
        let mut pieces = vec![vec![]; count];
        for key in 0..keys {
            pieces[rng.below(count)].push(key);
        }
        let (got, want) = (solve(dev, &x, &pieces), naive_of(&x));
        close("o", &got.o, &want.o, |_| 1e-13);
        close("lse", &got.lse, &want.lse, |_| 1e-13);
        for (got, want) in got.grads.iter().zip([&want.dq, &want.dk, &want.dv]) {
            close("a gradient", got, want, |_| 1e-12);
        }
    }
}

/// A piece of which no query sees a key, before, between or after others, and alone.
pub fn unseen_ones_change_no_bit<B: Attention>(dev: &B) {
    fn law<B: Attention, E: Float>(dev: &B) {
        let mut x = Problem::<E>::random(&mut Random(5), spec((1, 70, 200), (2, 1, 8), true));
        x.q_pos = (0..70).map(|s| 40 + s).collect();
        let (seen, later): (Vec<_>, Vec<_>) = (0..200).partition(|&z| z < 100);
        let one = solve(dev, &x, std::slice::from_ref(&seen));
        for pieces in [
            [seen.clone(), later[10..].to_vec(), vec![]],
            [later[10..50].to_vec(), seen.clone(), later[50..].to_vec()],
            [vec![], later[10..].to_vec(), seen.clone()],
        ] {
            let got = solve(dev, &x, &pieces);
            assert!(bits(&got.o) == bits(&one.o) && bits(&got.lse) == bits(&one.lse));
            for (got, one) in got.grads.iter().zip(&one.grads) {
                assert_eq!(bits(got), bits(one));
            }
        }
        let none = solve(dev, &x, &[later[20..].to_vec(), later[10..20].to_vec()]);
        assert!(none.o.iter().all(|o| o.to_f64() == 0.0));
        assert!(
            none.lse
                .iter()
                .all(|l| *l == <E::Acc as Real>::NEG_INFINITY)
        );
        assert!(none.grads.iter().flatten().all(|g| g.to_f64() == 0.0));
    }
    law::<B, f64>(dev);
    law::<B, f32>(dev);
    law::<B, bf16>(dev);
}

/// What a carry in f32 is for: 16 pieces are as exact as 2.
pub fn error_does_not_grow_with_their_number<B: Attention>(dev: &B) {
    error_of(dev, 256, 3);
}

pub fn error_of<B: Attention>(dev: &B, len: usize, rounds: u64) {
    let off = |x: &Problem<f32>, pieces: usize| {
        let (got, want) = (solve(dev, x, &cut(len, len / pieces)), naive_of(x));
        let far = |got: &[f32], want: &[f64]| {
            let off = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).abs());
            off.fold(0.0, f64::max)
        };
        let grads = got.grads.iter().zip([&want.dq, &want.dk, &want.dv]);
        let grads = grads.map(|(g, w)| far(g, w)).fold(0.0, f64::max);
        (far(&got.o, &want.o), grads)
    };
    for seed in 0..rounds {
        let shape = spec((1, len, len), (4, 2, 32), true);
        let x = Problem::<f32>::random(&mut Random(70 + seed), shape);
        let ((o2, g2), (o16, g16)) = (off(&x, 2), off(&x, 16));
        println!("2 pieces: o {o2:.2e} gradients {g2:.2e}; 16: o {o16:.2e} gradients {g16:.2e}");
        assert!(o16 <= 2.0 * o2 && g16 <= 2.0 * g2);
    }
}

pub fn refuses_what_does_not_fit<B: Attention>(dev: &B) {
    let good: AttentionSpec = spec((1, 2, 2), (2, 1, 4), true);
    let x = Problem::<f32>::random(&mut Random(9), good);
    let [mut o, mut max, mut sum] = [16, 4, 3].map(|n| upload(dev, &vec![5.0_f32; n]));
    x.call(dev, |qkv, places| {
        let carry = Carry {
            o_bshd: B::whole_mut(&mut o),
            max_bhs: B::whole_mut(&mut max),
            sum_bhs: B::whole_mut(&mut sum),
        };
        let refused = dev.attention_step::<f32>(&good, qkv, places, carry);
        assert!(matches!(
            refused,
            Err(Error::Len {
                what: "the carry's sum",
                ..
            })
        ));
    });
    assert_eq!(download(dev, &o), [5.0; 16]);
}
