//! A kernel of ours among somebody else's work: their context, their stream, their memory.
//!
//! `cargo run --release -p quintet-kernels --features cuda --example foreign`
//!
//! The types are cudarc's, as candle and burn have them; anything that gives a `CUcontext`, a
//! `CUstream` and addresses does.

#![allow(unsafe_code)] // a promise about somebody else's context

use std::error::Error;

use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut};
use quintet_kernels::cuda::Cuda;
use quintet_kernels::launch::{Arg, Call, Launch, Stream};

fn main() -> Result<(), Box<dyn Error>> {
    // Without a driver cudarc panics; ours says so first.
    Cuda::count()?;
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let n = 1000;
    let host: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let (mut x, y) = (stream.clone_htod(&host)?, stream.clone_htod(&host)?);

    // SAFETY: context and stream are dropped after `cuda`.
    let cuda = unsafe { Cuda::in_context(context.cu_ctx(), &[stream.cu_stream()]) }?;
    {
        let ((x, _x), (y, _y)) = (x.device_ptr_mut(&stream), y.device_ptr(&stream));
        let args = [Arg::Ptr(x), Arg::Ptr(y), Arg::I64(n)];
        let call = Call {
            module: "add",
            function: "add_f32",
            grid: [(n as u32).div_ceil(256), 1, 1],
            block: [256, 1, 1],
            shared: 0,
            args: &args,
        };
        // Stream 0 of the handle is theirs: what they put on it before comes before.
        cuda.launch(Stream(0), &call)?;
    }
    let sums = stream.clone_dtoh(&x)?;
    assert!(sums.iter().zip(&host).all(|(s, h)| *s == 2.0 * h));
    println!("{n} sums on {}", cuda.name());
    drop(cuda);
    Ok(())
}
