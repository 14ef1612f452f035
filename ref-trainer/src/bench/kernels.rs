//! Times of kernels on this machine, as `quintet plan --times` reads them.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use quintet_kernels::{
    Attention, AttentionSpec, Backend, Cpu, Gemm, GemmSpec, Places, Pointwise, Scalar, Tag, Trans,
    bf16,
};

use crate::cli::print;
use crate::failure::{Exit, Failure};
use crate::job::Dtype;

/// Widths of products, from one that is mostly overhead to one that is as good as any.
const WIDTHS: [usize; 4] = [32, 128, 512, 1024];
/// Tokens of a sequence, heads, width of a head.
const ATTENTION: (usize, usize, usize) = (1024, 4, 64);
/// Elements of an element-wise pass: more than any cache has.
const PASS: usize = 16 << 20;
/// Each kernel is timed for about so long, and five times at least.
const PATIENCE: Duration = Duration::from_millis(300);

/// Times and prints.
///
/// # Errors
/// What a kernel refuses; a closed standard output.
pub fn kernels(dtype: Dtype, threads: usize) -> Result<Exit, Failure> {
    let device = Cpu::new(threads);
    let mut text = format!(
        "# kernels on {threads} thread(s) of this CPU in {}, medians; for quintet plan --times\n",
        dtype.name()
    );
    text += &match dtype {
        Dtype::F64 => timed::<_, f64>(&device)?,
        Dtype::F32 => timed::<_, f32>(&device)?,
        Dtype::Bf16 => timed::<_, bf16>(&device)?,
    };
    print(&text)?;
    Ok(Exit::Fine)
}

fn timed<B, E>(device: &B) -> Result<String, Failure>
where
    B: Backend + Gemm + Attention + Pointwise,
    E: Scalar,
{
    let mut text = String::new();
    for width in WIDTHS {
        let us = product::<B, E>(device, width)?;
        let _ = write!(
            text,
            "\n[[gemm]]\nm = {width}\nn = {width}\nk = {width}\nus = {us:.2}\n"
        );
    }
    let (tokens, heads, head_dim) = ATTENTION;
    let us = attention::<B, E>(device)?;
    let _ = write!(
        text,
        "\n[[attention]]\nsequences = 1\ntokens = {tokens}\nheads = {heads}\nhead_dim = {head_dim}\nus = {us:.2}\n"
    );
    let us = pass::<B, E>(device)?;
    // Two are read, one is written.
    let bytes = 3 * PASS * size_of::<E>();
    let _ = write!(text, "\n[[memory]]\nbytes = {bytes}\nus = {us:.2}\n");
    Ok(text)
}

fn product<B: Backend + Gemm, E: Scalar>(device: &B, n: usize) -> Result<f64, Failure> {
    let (a, b) = (some::<B, E>(device, n * n)?, some::<B, E>(device, n * n)?);
    let mut c = device.zeros::<E>(Tag::Scratch, n * n)?;
    let spec = GemmSpec::new(n, n, n, Trans::N, Trans::T);
    median(|| {
        let out = B::whole_mut(&mut c);
        Ok(device.gemm::<E, E>(&spec, B::whole(&a), B::whole(&b), None, None, out)?)
    })
}

fn attention<B: Backend + Attention, E: Scalar>(device: &B) -> Result<f64, Failure> {
    let (tokens, heads, head_dim) = ATTENTION;
    let spec = AttentionSpec {
        batch: 1,
        queries: tokens,
        keys: tokens,
        heads,
        kv_heads: heads,
        head_dim,
        scale: 1.0 / (head_dim as f64).sqrt(),
        causal: true,
        window: None,
        softcap: None,
        dropout: None,
    };
    let len = tokens * heads * head_dim;
    let q = some::<B, E>(device, len)?;
    let positions: Vec<i32> = (0..).take(tokens).collect();
    let positions = device.upload(Tag::Scratch, &positions)?;
    let mut o = device.zeros::<E>(Tag::Scratch, len)?;
    let mut lse = device.zeros::<E::Acc>(Tag::Scratch, tokens * heads)?;
    median(|| {
        let places = Places {
            q_pos: B::whole(&positions),
            k_pos: B::whole(&positions),
            documents: None,
            at: None,
        };
        let qkv = (B::whole(&q), B::whole(&q), B::whole(&q));
        let (o, lse) = (B::whole_mut(&mut o), B::whole_mut(&mut lse));
        Ok(device.attention::<E>(&spec, qkv, places, o, lse)?)
    })
}

fn pass<B: Backend + Pointwise, E: Scalar>(device: &B) -> Result<f64, Failure> {
    let (mut x, y) = (some::<B, E>(device, PASS)?, some::<B, E>(device, PASS)?);
    median(|| Ok(device.add::<E>(B::whole_mut(&mut x), B::whole(&y))?))
}

/// Numbers that are neither all alike nor large.
fn some<B: Backend, E: Scalar>(device: &B, len: usize) -> Result<B::Buf<E>, Failure> {
    let value = |i: usize| E::from_f64((i % 61) as f64 / 61.0 - 0.5);
    let values: Vec<E> = (0..len).map(value).collect();
    Ok(device.upload(Tag::Scratch, &values)?)
}

/// The median time of a call in microseconds; the first is not counted.
fn median(mut call: impl FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
    call()?;
    let (begun, mut times) = (Instant::now(), Vec::new());
    while times.len() < 5 || begun.elapsed() < PATIENCE {
        let call_begun = Instant::now();
        call()?;
        times.push(call_begun.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
