//! Any number of CPU threads gives the same bits.

use half::bf16;
use proptest::prelude::*;
use quintet_kernels::{Cpu, Float, GemmSpec};

use crate::attention::{Problem, spec};
use crate::support::{FORMS, Random, gemm};

fn products_agree<E: Float>(cpus: &[Cpu], spec: &GemmSpec, seed: u64) {
    let mut rng = Random(seed);
    let (a, b) = (rng.vec::<E>(spec.m * spec.k), rng.vec(spec.k * spec.n));
    let c = rng.vec::<E>(spec.m * spec.n);
    let want = gemm(&cpus[0], spec, &a, &b, &c);
    for cpu in &cpus[1..] {
        assert_eq!(gemm(cpu, spec, &a, &b, &c), want, "{cpu:?} {spec:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn gemm_bits_do_not_depend_on_threads(
        (m, n, k) in (0_usize..200, 0_usize..100, 0_usize..600),
        form in 0_usize..4,
        accumulate: bool,
        seed: u64,
    ) {
        let mut spec = GemmSpec::new(m, n, k, FORMS[form].0, FORMS[form].1);
        spec.accumulate = accumulate;
        let cpus = [1, 2, 3, 4].map(Cpu::new);
        products_agree::<f32>(&cpus, &spec, seed);
        products_agree::<bf16>(&cpus, &spec, seed);
    }
}

#[test]
fn attention_bits_do_not_depend_on_threads() {
    let shape = spec((2, 130, 130), (4, 2, 32), true);
    let x = Problem::<f32>::random(&mut Random(21), shape);
    let want = x.solve(&Cpu::new(1));
    for threads in 2..=4 {
        assert_eq!(x.solve(&Cpu::new(threads)), want);
    }
}
