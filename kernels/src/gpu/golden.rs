//! The table of the compiled kernels (.ci/gate.txt) says how much dynamic shared memory each gets:
//! as much as the ops launch it with.
//!
//! A device that only writes launches down runs the ops that have such kernels, in every tile, form
//! and width. Who adds a kernel adds its launch here, for each listed one must have been seen.
//! `QUINTET_WRITE_GOLDEN=1` writes the table's column anew.

use std::collections::BTreeMap;
use std::string::{String, ToString};
use std::sync::{Arc, Mutex};
use std::vec::Vec;
use std::{env, format, fs, vec};

use half::bf16;

use super::{Activation, FusedSpec, Gpu, GpuBuf};
use crate::launch::{Arch, Call, Launch, Stream};
use crate::{
    Attention, AttentionSpec, Backend, Carry, Data, Error, Float, Gemm, GemmSpec, GroupedGemm,
    GroupedSpec, Tag, Trans,
};

const TABLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../.ci/gate.txt");
const MATRIX: [&str; 2] = ["gemm_mma", "attention_mma"];

/// Dynamic shared bytes by module and kernel.
type Log = BTreeMap<(String, String), u32>;

/// A device that writes down what is launched.
#[derive(Debug, Clone)]
struct Recorder {
    multiprocessors: u32,
    log: Arc<Mutex<Log>>,
}

impl Launch for Recorder {
    type Event = ();

    fn arch(&self) -> Arch {
        Arch(80)
    }

    fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    fn alloc(&self, _: &'static str, _: usize) -> Result<u64, Error> {
        Ok(256)
    }

    fn free(&self, _: Stream, _: u64) {}

    fn launch(&self, _: Stream, call: &Call<'_>) -> Result<(), Error> {
        let name = (call.module.to_string(), call.function.to_string());
        let other = self.log.lock().unwrap().insert(name, call.shared);
        assert!(other.is_none_or(|o| o == call.shared), "{call:?}");
        Ok(())
    }

    fn fill(&self, _: Stream, _: u64, _: u8, _: usize) -> Result<(), Error> {
        Ok(())
    }

    fn copy(&self, _: Stream, _: u64, _: u64, _: usize) -> Result<(), Error> {
        Ok(())
    }

    fn upload(&self, _: Stream, _: &[u8], _: u64) -> Result<(), Error> {
        Ok(())
    }

    fn download(&self, _: Stream, _: u64, _: &mut [u8]) -> Result<(), Error> {
        Ok(())
    }

    fn record(&self, _: Stream) {}

    fn wait(&self, _: Stream, _: &()) {}

    fn synchronize(&self, _: Stream) -> Result<(), Error> {
        Ok(())
    }
}

type Device = Gpu<Recorder>;

fn buf<T: Data>(device: &Device, len: usize) -> GpuBuf<Recorder, T> {
    device.alloc(Tag::Scratch, len).unwrap()
}

fn gemm<O: Float<Acc = f32>>(device: &Device, [m, n, k]: [usize; 3]) {
    for a in [Trans::N, Trans::T] {
        for b in [Trans::N, Trans::T] {
            let spec = GemmSpec::new(m, n, k, a, b);
            let (x, y) = (buf::<bf16>(device, m * k), buf::<bf16>(device, k * n));
            let (x, y) = (Gpu::whole(&x), Gpu::whole(&y));
            let mut c = buf::<O>(device, m * n);
            let c = Gpu::whole_mut(&mut c);
            device.gemm(&spec, x, y, None, None, c).unwrap();
        }
    }
}

fn fused(device: &Device, [m, n, k]: [usize; 3]) {
    for activation in [Activation::Gelu, Activation::Swiglu] {
        let spec = FusedSpec {
            m,
            n,
            k,
            activation,
        };
        let (y_len, wide) = match activation {
            Activation::Gelu => (m * n, m * n),
            Activation::Swiglu => (m * n / 2, m * n * 2),
        };
        let (x, w) = (buf::<bf16>(device, m * k), buf::<bf16>(device, k * n));
        let (x, w) = (Gpu::whole(&x), Gpu::whole(&w));
        let (mut kept, mut y) = (buf(device, m * n), buf(device, y_len));
        let (kept, y) = (Gpu::whole_mut(&mut kept), Gpu::whole_mut(&mut y));
        device.gemm_activation(&spec, x, w, None, kept, y).unwrap();
        let (kept, mut dkept) = (buf(device, wide), buf(device, wide));
        let (kept, dkept) = (Gpu::whole(&kept), Gpu::whole_mut(&mut dkept));
        device
            .gemm_activation_backward(&spec, x, w, kept, dkept)
            .unwrap();
    }
}

fn grouped(device: &Device, [m, n, k]: [usize; 3]) {
    let counts = [m];
    let spec = GroupedSpec {
        counts: &counts,
        n,
        k,
    };
    let (x, w) = (buf::<bf16>(device, m * k), buf::<bf16>(device, k * n));
    let (dy, mut c, mut dw) = (
        buf::<bf16>(device, m * n),
        buf(device, m * n),
        buf(device, n * k),
    );
    for form in [Trans::N, Trans::T] {
        let (x, w) = (Gpu::whole(&x), Gpu::whole(&w));
        let c = Gpu::whole_mut(&mut c);
        device.grouped_gemm(&spec, (form, false), x, w, c).unwrap();
    }
    let (dy, x, dw) = (Gpu::whole(&dy), Gpu::whole(&x), Gpu::whole_mut(&mut dw));
    device.grouped_gemm_weight(&spec, dy, x, dw).unwrap();
}

fn attention(device: &Device, head_dim: usize) {
    let spec = AttentionSpec {
        batch: 1,
        queries: 1,
        keys: 1,
        heads: 1,
        kv_heads: 1,
        head_dim,
        scale: 1.0,
        causal: true,
        window: None,
        softcap: None,
        dropout: None,
    };
    let stored = || buf::<bf16>(device, head_dim);
    let summed = |n| buf::<f32>(device, n);
    let (x, pos, stat) = (stored(), buf::<i32>(device, 1), summed(1));
    let (x, pos, stat) = (Gpu::whole(&x), Gpu::whole(&pos), Gpu::whole(&stat));
    let qkv = (x, x, x);
    let (mut o, mut lse, mut acc) = (stored(), summed(1), summed(head_dim));
    let (mut max, mut sum) = (summed(1), summed(1));
    let places = || (pos, pos).into();
    let (o, lse) = (Gpu::whole_mut(&mut o), Gpu::whole_mut(&mut lse));
    device.attention(&spec, qkv, places(), o, lse).unwrap();
    let carry = Carry {
        o_bshd: Gpu::whole_mut(&mut acc),
        max_bhs: Gpu::whole_mut(&mut max),
        sum_bhs: Gpu::whole_mut(&mut sum),
    };
    device
        .attention_step::<bf16>(&spec, qkv, places(), carry)
        .unwrap();
    let mut delta = summed(1);
    let delta = Gpu::whole_mut(&mut delta);
    device.attention_delta(&spec, x, x, delta).unwrap();
    let mut into = [stored(), stored(), stored()];
    let [dq, dk, dv] = into.each_mut().map(Gpu::whole_mut);
    device
        .attention_backward(&spec, qkv, places(), x, (stat, stat), (dq, dk, dv))
        .unwrap();
    let mut into = [(); 3].map(|()| summed(head_dim));
    let [dq, dk, dv] = into.each_mut().map(Gpu::whole_mut);
    device
        .attention_backward_step(&spec, qkv, places(), x, (stat, stat), (dq, dk, dv))
        .unwrap();
}

fn launched() -> Log {
    let log = Arc::default();
    let device = |multiprocessors| {
        let log = Arc::clone(&log);
        Gpu::new(Recorder {
            multiprocessors,
            log,
        })
        .unwrap()
    };
    // A tile is taken where each multiprocessor gets one.
    let (one, two, many) = (device(1), device(2), device(1 << 20));
    for (device, shape) in [
        (&one, [128, 256, 64]),
        (&two, [128, 256, 64]),
        (&one, [128, 128, 64]),
        (&many, [64, 64, 64]),
        (&many, [66, 66, 66]),
    ] {
        gemm::<bf16>(device, shape);
        gemm::<f32>(device, shape);
        fused(device, shape);
        grouped(device, shape);
    }
    for width in [64, 128, 256] {
        attention(&one, width);
    }
    let log = log.lock().unwrap();
    log.clone()
}

#[test]
fn the_table_says_what_ops_launch() {
    let (log, text) = (launched(), fs::read_to_string(TABLE).unwrap());
    let (mut lines, mut wrong) = (vec![], vec![]);
    for line in text.lines() {
        if line.starts_with('#') {
            lines.push(line.to_string());
            continue;
        }
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [module, kernel, _, dynamic, ..] = fields[..] else {
            panic!("{line}");
        };
        let seen = log.get(&(module.to_string(), kernel.to_string()));
        let want = match seen {
            Some(bytes) => *bytes,
            None if MATRIX.contains(&module) => {
                wrong.push(format!("{kernel} is launched by no op"));
                continue;
            }
            // Their shared memory is static.
            None => 0,
        };
        if dynamic != want.to_string() {
            wrong.push(format!(
                "{kernel} has {dynamic} bytes and is launched with {want}"
            ));
        }
        let (before, after) = (&line[..62], &line[69..]);
        lines.push(format!("{before} {want:>6}{after}"));
    }
    if env::var_os("QUINTET_WRITE_GOLDEN").is_some() {
        fs::write(TABLE, lines.join("\n") + "\n").unwrap();
        return;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
