//! The same block in every element type: f32 and bf16 come as near to f64 as their roundings let.

mod common;

use common::*;
use half::bf16;
use quintet_kernels::{Backend, Cpu, Scalar, Tag};
use quintet_parallel_layers::init::{init_random, local};
use quintet_parallel_layers::{Architecture, Block, BlockSpec, Layer, MicroBatch};

const TOKENS: usize = 6;

/// dx of a block on two ranks under sequence parallelism, and the gradient of its first norm.
fn backward<E: Scalar>() -> Vec<Vec<f64>> {
    let spec = BlockSpec {
        hidden: 8,
        heads: 4,
        kv_heads: 2,
        head_dim: 4,
        ffn: 9,
        theta: 100.0,
        eps: 1e-5,
        layers: 2,
        sequence_parallel: true,
        moe: None,
        window: None,
        architecture: Architecture::LLAMA,
    };
    let mesh = tp_mesh(2);
    let block = Block::new(&mesh, 0, &spec).unwrap();
    ranks(2, |ctx| {
        let dev = ctx.device;
        let round = |x: &[f64]| -> Vec<E> { x.iter().map(|&x| E::from_f64(x)).collect() };
        let put = |x: &[f64]| dev.upload(Tag::Activation, &round(x)).unwrap();
        let acc = |x: f64| <E::Acc as quintet_kernels::Float>::from_f64(x);
        let ints = |x: Vec<i32>| dev.upload(Tag::Scratch, &x).unwrap();
        let batch: MicroBatch<Cpu, E> = MicroBatch {
            sequences: 2,
            positions: 3,
            ids_t: ints(vec![0; TOKENS]),
            pos_t: ints(vec![0, 1, 2, 0, 1, 2]),
            doc_t: None,
            context: None,
            labels_t: ints(vec![0; TOKENS]),
            weight_t: dev.upload(Tag::Scratch, &[acc(1.0); TOKENS]).unwrap(),
            share: 1.0,
            drawn: None,
        };
        let specs = block.params();
        let rank = ctx.tp.rank();
        let params: Vec<Vec<E>> = specs
            .iter()
            .map(|s| local(s, &mesh, rank, |i| init_random(s, 3, i)))
            .collect();
        let views: Vec<&[E]> = params.iter().map(Vec::as_slice).collect();
        let mut grads: Vec<Vec<E::Acc>> = params.iter().map(|p| vec![acc(0.0); p.len()]).collect();
        let mut grad_views: Vec<&mut [E::Acc]> = grads.iter_mut().map(Vec::as_mut_slice).collect();
        let part = rank * 24..rank * 24 + 24;
        let (x, dy) = (random("x", 48), random("dy", 48));
        let x = put(&x[part.clone()]);
        let (_, mut saved) = block.forward(ctx, &batch, &views, x).unwrap();
        let dx = block
            .backward_input(ctx, &batch, &views, &mut saved, put(&dy[part]))
            .unwrap();
        block
            .backward_weight(ctx, &batch, saved, &mut grad_views)
            .unwrap();
        let dx = dx
            .as_ref()
            .iter()
            .map(|x| quintet_kernels::Float::to_f64(*x));
        let dw = grads[0].iter().map(|x| quintet_kernels::Float::to_f64(*x));
        dx.chain(dw).collect()
    })
}

#[test]
fn f32_and_bf16_are_near_f64() {
    let exact = backward::<f64>();
    for (got, bound) in [(backward::<f32>(), 1e-5), (backward::<bf16>(), 0.1)] {
        for (got, exact) in got.iter().zip(&exact) {
            let off = distance(got, exact);
            assert!(off < bound, "{off:e}");
            assert!(off > bound * 1e-4, "{off:e}: a bound that binds nothing");
        }
    }
}
