//! Times of the CUDA kernels by the device's own clock: medians, random data, one JSON line a case.
//!
//! `cargo run --release -p quintet-kernels --features cuda --example gpu_times -- [--small]`
//!
//! benches/gpu-check puts torch's times of the same cases beside them; a figure here means nothing
//! without one there. `--small` is for a device that is not there.

use half::bf16;
use quintet_kernels::cuda::Cuda;
use quintet_kernels::gpu::GpuBuf;
use quintet_kernels::launch::{Launch, Stream};
use quintet_kernels::{
    AdamWSpec, Attention, AttentionSpec, Backend, Error, Float, Gemm, GemmSpec, Gpu, Norm,
    NormSpec, Optimizer, Pointwise, Tag, Trans,
};

type Device = Gpu<Cuda>;
type Buf<T> = GpuBuf<Cuda, T>;

const STREAM: Stream = Stream(0);

/// How long cases are, and how often each runs.
struct Scale {
    small: bool,
    rounds: usize,
}

impl Scale {
    fn of(&self, n: usize) -> usize {
        if self.small { n.min(64) } else { n }
    }
}

/// Uniform in [-1, 1): a chip is slower on random numbers than on zeros.
fn random<E: Float>(device: &Device, n: usize, seed: u64) -> Result<Buf<E>, Error> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        E::from_f64((state >> 11) as f64 / (1u64 << 52) as f64 - 1.0)
    };
    let host: Vec<E> = (0..n).map(|_| next()).collect();
    device.upload(Tag::Scratch, &host)
}

/// Runs `body` a few times unmeasured, then `rounds` times; prints the median with what it did.
fn time(
    device: &Device,
    scale: &Scale,
    (case, work, unit): (&str, f64, &str),
    body: impl Fn() -> Result<(), Error>,
) -> Result<(), Error> {
    let cuda = device.launcher();
    for _ in 0..scale.rounds.min(5) {
        body()?;
    }
    let mut times = Vec::new();
    for _ in 0..scale.rounds {
        let before = cuda.timed(STREAM);
        body()?;
        let after = cuda.timed(STREAM);
        cuda.synchronize(STREAM)?;
        times.extend(after.ms_since(&before));
    }
    times.sort_by(f32::total_cmp);
    let ms = f64::from(times.get(times.len() / 2).copied().unwrap_or(f32::NAN));
    let per_second = work / ms * 1e-9;
    println!(r#"{{"case": "{case}", "ms": {ms:.5}, "{unit}": {per_second:.3}}}"#);
    Ok(())
}

fn gemm(device: &Device, scale: &Scale, n: usize) -> Result<(), Error> {
    let m = scale.of(n);
    let (a, b) = (
        random::<bf16>(device, m * m, 1)?,
        random::<bf16>(device, m * m, 2)?,
    );
    for (form, trans) in [
        ("nn", [Trans::N, Trans::N]),
        ("nt", [Trans::N, Trans::T]),
        ("tn", [Trans::T, Trans::N]),
    ] {
        let spec = GemmSpec::new(m, m, m, trans[0], trans[1]);
        let c = std::cell::RefCell::new(device.alloc::<bf16>(Tag::Scratch, m * m)?);
        let case = format!("gemm_{form} {n}");
        let work = 2.0 * (m as f64).powi(3);
        time(device, scale, (&case, work, "tflops"), || {
            let mut c = c.borrow_mut();
            let views = (Gpu::whole(&a), Gpu::whole(&b), Gpu::whole_mut(&mut *c));
            device.gemm(&spec, views.0, views.1, None, None, views.2)
        })?;
    }
    Ok(())
}

fn attention(device: &Device, scale: &Scale, [b, s, h, d]: [usize; 4]) -> Result<(), Error> {
    let spec = AttentionSpec {
        batch: if scale.small { 1 } else { b },
        queries: scale.of(s),
        keys: scale.of(s),
        heads: if scale.small { 1 } else { h },
        kv_heads: if scale.small { 1 } else { h },
        head_dim: d,
        scale: 1.0 / (d as f64).sqrt(),
        causal: true,
        window: None,
        softcap: None,
        dropout: None,
    };
    let len = spec.batch * spec.queries * spec.heads * d;
    let rows = spec.batch * spec.heads * spec.queries;
    let new = |seed| random::<bf16>(device, len, seed);
    let (q, k, v, dout) = (new(1)?, new(2)?, new(3)?, new(4)?);
    let places: Vec<i32> = (0..spec.batch)
        .flat_map(|_| 0..spec.queries as i32)
        .collect();
    let pos = device.upload(Tag::Scratch, &places)?;
    let stored = || {
        device
            .alloc::<bf16>(Tag::Scratch, len)
            .map(std::cell::RefCell::new)
    };
    let summed = || {
        device
            .alloc::<f32>(Tag::Scratch, rows)
            .map(std::cell::RefCell::new)
    };
    let (o, dq, dk, dv) = (stored()?, stored()?, stored()?, stored()?);
    let (lse, delta) = (summed()?, summed()?);
    let qkv = (Gpu::whole(&q), Gpu::whole(&k), Gpu::whole(&v));
    let at = Gpu::whole(&pos);
    // Half of 4 b h s s d, for half of the scores are hidden; backward 2.5 times that.
    let work =
        2.0 * spec.batch as f64 * spec.heads as f64 * (spec.queries as f64).powi(2) * d as f64;
    let name = format!("b{b} s{s} h{h} d{d}");
    time(
        device,
        scale,
        (&format!("attention {name}"), work, "tflops"),
        || {
            let (mut o, mut lse) = (o.borrow_mut(), lse.borrow_mut());
            let outs = (Gpu::whole_mut(&mut *o), Gpu::whole_mut(&mut *lse));
            device.attention(&spec, qkv, (at, at).into(), outs.0, outs.1)
        },
    )?;
    time(
        device,
        scale,
        (&format!("attention_backward {name}"), 2.5 * work, "tflops"),
        || {
            let (o, lse, mut delta) = (o.borrow(), lse.borrow(), delta.borrow_mut());
            let dout = Gpu::whole(&dout);
            device.attention_delta(&spec, dout, Gpu::whole(&o), Gpu::whole_mut(&mut *delta))?;
            let stats = (Gpu::whole(&lse), Gpu::whole(&delta));
            let (mut dq, mut dk, mut dv) = (dq.borrow_mut(), dk.borrow_mut(), dv.borrow_mut());
            let into = (
                Gpu::whole_mut(&mut *dq),
                Gpu::whole_mut(&mut *dk),
                Gpu::whole_mut(&mut *dv),
            );
            device.attention_backward(&spec, qkv, (at, at).into(), dout, stats, into)
        },
    )
}

fn memory_bound(device: &Device, scale: &Scale) -> Result<(), Error> {
    let (rows, dim) = (scale.of(16_384), scale.of(4096));
    let n = rows * dim;
    let (x, y) = (random::<bf16>(device, n, 1)?, random::<bf16>(device, n, 2)?);
    let new = || {
        device
            .alloc::<bf16>(Tag::Scratch, n)
            .map(std::cell::RefCell::new)
    };
    let out = new()?;
    let bytes = |each: usize| (n * each) as f64;
    time(device, scale, ("copy 16384x4096", bytes(4), "tbps"), || {
        device.copy(Gpu::whole(&x), Gpu::whole_mut(&mut *out.borrow_mut()))
    })?;
    let weight = random::<bf16>(device, dim, 3)?;
    let stats = std::cell::RefCell::new(device.alloc::<f32>(Tag::Scratch, rows)?);
    let spec = NormSpec {
        rows,
        dim,
        eps: 1e-5,
    };
    time(
        device,
        scale,
        ("rms_norm 16384x4096", bytes(4), "tbps"),
        || {
            let (mut out, mut stats) = (out.borrow_mut(), stats.borrow_mut());
            let outs = (Gpu::whole_mut(&mut *out), Gpu::whole_mut(&mut *stats));
            device.rms_norm(
                &spec,
                Gpu::whole(&x),
                None,
                Gpu::whole(&weight),
                outs.0,
                outs.1,
            )
        },
    )?;
    time(
        device,
        scale,
        ("swiglu 16384x4096", bytes(6), "tbps"),
        || {
            let mut out = out.borrow_mut();
            device.swiglu(Gpu::whole(&x), Gpu::whole(&y), Gpu::whole_mut(&mut *out))
        },
    )?;
    let spec = AdamWSpec {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 1,
        grad_scale: 1.0,
    };
    let floats = || random::<f32>(device, n, 5).map(std::cell::RefCell::new);
    let (p, g, m) = (floats()?, floats()?, floats()?);
    let v = std::cell::RefCell::new(device.zeros::<f32>(Tag::Scratch, n)?);
    time(device, scale, ("adamw 67108864", bytes(28), "tbps"), || {
        let (mut p, g, mut m, mut v) = (p.borrow_mut(), g.borrow(), m.borrow_mut(), v.borrow_mut());
        let (p, m, v) = (
            Gpu::whole_mut(&mut *p),
            Gpu::whole_mut(&mut *m),
            Gpu::whole_mut(&mut *v),
        );
        device.adamw::<f32>(&spec, Gpu::whole(&g), p, (m, v), None)
    })
}

fn main() -> Result<(), Error> {
    let small = std::env::args().any(|a| a == "--small");
    let rounds = if small { 1 } else { 20 };
    let scale = Scale { small, rounds };
    let cuda = Cuda::new(0)?;
    eprintln!("{} (sm_{})", cuda.name(), cuda.arch().0);
    let device = Gpu::new(cuda)?;
    for n in [1024, 4096, 8192] {
        gemm(&device, &scale, n)?;
    }
    for shape in [[2, 8192, 16, 128], [4, 4096, 16, 64], [2, 4096, 8, 256]] {
        attention(&device, &scale, shape)?;
    }
    memory_bound(&device, &scale)
}
