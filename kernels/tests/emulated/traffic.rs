//! What kernels that are bound by memory move, by the emulator's counters: as many bytes as their formula says, in no
//! more sectors than hold them, without a bank conflict.
//!
//! `QUINTET_GOLDEN=write` writes traffic.txt anew; without it a difference fails.

use half::bf16;
use quintet_kernels::emulated::Emulated;
use quintet_kernels::gpu::{Fold, GpuBuf};
use quintet_kernels::{
    AdamWSpec, Backend, CrossEntropy, CrossEntropySpec, Data, Embedding, EmbeddingSpec, Error, Gpu,
    Norm, NormSpec, Optimizer, Pointwise, Rope, RopeSpec, SgdSpec, Tag,
};

use crate::golden::{counted, line};
use crate::laws::gpu;
use crate::support::{Random, upload};

type Device = Gpu<Emulated>;
type Buf<T> = GpuBuf<Emulated, T>;

const ROWS: usize = 4;
const DIM: usize = 512;
const N: usize = ROWS * DIM;
/// Threads of a block that takes a row: what all of them read of it.
const THREADS: usize = 256;

struct Book {
    device: Device,
    text: String,
}

impl Book {
    /// One op, and the bytes that its lanes read and write.
    fn op(
        &mut self,
        name: &str,
        bytes: (usize, usize),
        body: impl FnOnce(&Device) -> Result<(), Error>,
    ) {
        counted(&self.device);
        body(&self.device).unwrap();
        let counters = counted(&self.device);
        line(&mut self.text, name, &counters);
        let got = (
            counters.global_read as usize,
            counters.global_written as usize,
        );
        assert_eq!(got, bytes, "{name}");
    }

    fn zeros<T: Data>(&self, n: usize) -> Buf<T> {
        self.device.zeros(Tag::Scratch, n).unwrap()
    }
}

fn whole<T: Data>(buf: &Buf<T>) -> <Device as Backend>::Ref<'_, T> {
    Device::whole(buf)
}

fn out<T: Data>(buf: &mut Buf<T>) -> <Device as Backend>::Mut<'_, T> {
    Device::whole_mut(buf)
}

fn norms(book: &mut Book, x: &Buf<bf16>, w: &Buf<bf16>) {
    let spec = NormSpec {
        rows: ROWS,
        dim: DIM,
        eps: 1e-5,
    };
    let (mut y, [mut mean, mut rstd]) = (
        book.zeros::<bf16>(N),
        [0; 2].map(|_| book.zeros::<f32>(ROWS)),
    );
    // A statistic a row, written by one thread and read by each.
    let (one, each) = (4 * ROWS, 4 * ROWS * THREADS);
    book.op("layer_norm", (2 * 5 * N, 2 * N + 2 * one), |d| {
        d.layer_norm(
            &spec,
            whole(x),
            None,
            (whole(w), whole(w)),
            out(&mut y),
            (out(&mut mean), out(&mut rstd)),
        )
    });
    let mut dx = book.zeros::<bf16>(N);
    book.op(
        "layer_norm_backward_input",
        (2 * 6 * N + 2 * each, 2 * N),
        |d| {
            d.layer_norm_backward_input(
                &spec,
                whole(x),
                whole(w),
                (whole(&mean), whole(&rstd)),
                whole(&y),
                None,
                out(&mut dx),
            )
        },
    );
    book.op("rms_norm", (2 * 3 * N, 2 * N + one), |d| {
        d.rms_norm(&spec, whole(x), None, whole(w), out(&mut y), out(&mut rstd))
    });
    book.op("rms_norm_backward_input", (2 * 6 * N + each, 2 * N), |d| {
        d.rms_norm_backward_input(
            &spec,
            whole(x),
            whole(w),
            whole(&rstd),
            whole(&y),
            None,
            out(&mut dx),
        )
    });
}

fn pointwise(book: &mut Book, x: &Buf<bf16>) {
    let [mut y, mut z] = [0; 2].map(|_| book.zeros::<bf16>(N));
    let mut wide = book.zeros::<f32>(N);
    book.op("swiglu", (4 * N, 2 * N), |d| {
        d.swiglu(whole(x), whole(x), out(&mut y))
    });
    book.op("swiglu_backward", (6 * N, 4 * N), |d| {
        d.swiglu_backward(whole(x), whole(x), whole(x), out(&mut y), out(&mut z))
    });
    book.op("gelu", (2 * N, 2 * N), |d| d.gelu(whole(x), out(&mut y)));
    book.op("gelu_backward", (4 * N, 2 * N), |d| {
        d.gelu_backward(whole(x), whole(x), out(&mut y))
    });
    book.op("add", (4 * N, 2 * N), |d| d.add(out(&mut y), whole(x)));
    book.op("fold of 4", (8 * N, 2 * N), |d| {
        d.fold(Fold::Sum, &[whole(x); 4], out(&mut y))
    });
    book.op("cast bf16 to f32", (2 * N, 4 * N), |d| {
        d.cast(whole(x), out(&mut wide))
    });
    book.op("cast f32 to bf16", (4 * N, 2 * N), |d| {
        d.cast(whole(&wide), out(&mut y))
    });
    let spec = RopeSpec {
        rows: ROWS,
        heads: 4,
        head_dim: 128,
        rotary: 128,
        theta: 1e4,
        inverse: false,
    };
    let pos = upload(&book.device, &[0, 1, 2, 3]);
    // A place and a frequency a pair of each token.
    book.op("rope", (2 * N + ROWS * 64 * (4 + 8), 2 * N), |d| {
        d.rope(&spec, whole(&pos), out(&mut y))
    });
}

fn vocabulary(book: &mut Book, x: &Buf<bf16>) {
    let spec = EmbeddingSpec {
        tokens: ROWS,
        first: 0,
        rows: ROWS,
        dim: DIM,
    };
    let ids = upload(&book.device, &[3, 1, 1, 0]);
    let mut y = book.zeros::<bf16>(N);
    book.op("embedding", (2 * N + 4 * ROWS * THREADS, 2 * N), |d| {
        d.embedding(&spec, whole(&ids), whole(x), out(&mut y))
    });
    let spec = CrossEntropySpec {
        tokens: ROWS,
        first: 0,
        entries: DIM,
    };
    let [mut max, mut loss, weight] = [0; 3].map(|_| book.zeros::<f32>(ROWS));
    let mut stats = book.zeros::<f32>(2 * ROWS);
    // What each thread of a row reads, and what its first one adds.
    let each = 4 * ROWS * THREADS;
    book.op("logit_max", (2 * N, 4 * ROWS), |d| {
        d.logit_max(&spec, whole(x), out(&mut max))
    });
    book.op("logit_sums", (2 * N + 2 * each + 2 * ROWS, 8 * ROWS), |d| {
        d.logit_sums(&spec, whole(x), whole(&ids), whole(&max), out(&mut stats))
    });
    book.op("token_loss", (12 * ROWS, 4 * ROWS), |d| {
        d.token_loss(whole(&stats), whole(&weight), out(&mut loss))
    });
    book.op("logit_backward", (2 * N + 3 * each + 4 * N, 2 * N), |d| {
        d.logit_backward(
            &spec,
            whole(x),
            whole(&ids),
            whole(&max),
            whole(&stats),
            whole(&weight),
            out(&mut y),
        )
    });
}

fn optimizers(book: &mut Book, g: &Buf<f32>) {
    let [mut w, mut m, mut v] = [0; 3].map(|_| book.zeros::<f32>(N));
    let mut param = book.zeros::<bf16>(N);
    let spec = AdamWSpec {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 1,
        grad_scale: 1.0,
    };
    book.op("adamw", (16 * N, 14 * N), |d| {
        d.adamw::<bf16>(
            &spec,
            whole(g),
            out(&mut w),
            (out(&mut m), out(&mut v)),
            Some(out(&mut param)),
        )
    });
    let spec = SgdSpec {
        lr: 1e-3,
        weight_decay: 0.1,
        grad_scale: 1.0,
    };
    book.op("sgd", (8 * N, 6 * N), |d| {
        d.sgd::<bf16>(&spec, whole(g), out(&mut w), Some(out(&mut param)))
    });
}

#[test]
fn bytes_are_the_formulas_in_fewest_sectors() {
    let (device, mut rng) = (gpu(0), Random(5));
    device.launcher().count_accesses();
    let x = upload(&device, &rng.vec::<bf16>(N));
    let w = upload(&device, &rng.vec::<bf16>(DIM));
    let g = upload(&device, &rng.vec::<f32>(N));
    let mut book = Book {
        device,
        text: String::new(),
    };
    norms(&mut book, &x, &w);
    pointwise(&mut book, &x);
    vocabulary(&mut book, &x);
    optimizers(&mut book, &g);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/emulated/traffic.txt");
    if std::env::var("QUINTET_GOLDEN").is_ok_and(|word| word == "write") {
        std::fs::write(path, &book.text).unwrap();
    }
    assert_eq!(book.text, std::fs::read_to_string(path).unwrap());
}
