//! The three products of a linear layer, on plain slices.
//!
//! `cargo run --release -p quintet-kernels --example 01_gemm`

use quintet_kernels::{Cpu, Error, Gemm, GemmSpec, Trans};

fn main() -> Result<(), Error> {
    let cpu = Cpu::new(2);
    // 4 tokens, 3 features in, 2 features out; weights are stored [out, in].
    let (t, d, f) = (4, 3, 2);
    let x_td: Vec<f32> = (0..t * d).map(|i| i as f32).collect();
    let w_fd = [1.0, 0.0, -1.0, 0.5, 0.5, 0.5];

    let forward = GemmSpec::new(t, f, d, Trans::N, Trans::T);
    let mut y_tf = vec![0.0_f32; t * f];
    cpu.gemm(&forward, &x_td, &w_fd, None, None, &mut y_tf)?;
    println!("y  = {y_tf:?}");

    let dy_tf = vec![1.0_f32; t * f];
    let backward_input = GemmSpec::new(t, d, f, Trans::N, Trans::N);
    let mut dx_td = vec![0.0_f32; t * d];
    cpu.gemm(&backward_input, &dy_tf, &w_fd, None, None, &mut dx_td)?;
    println!("dx = {dx_td:?}");

    // Weight gradients are added to what is there.
    let backward_weight = GemmSpec::new(f, d, t, Trans::T, Trans::N).accumulate();
    let mut dw_fd = vec![0.0_f32; f * d];
    cpu.gemm(&backward_weight, &dy_tf, &x_td, None, None, &mut dw_fd)?;
    println!("dw = {dw_fd:?}");

    assert_eq!(y_tf[..2], [-2.0, 1.5]);
    assert_eq!(dx_td[..3], [1.5, 0.5, -0.5]);
    assert_eq!(dw_fd[..3], [18.0, 22.0, 26.0]);
    Ok(())
}
