//! What we are measured against: `matrixmultiply`, and attention as a framework without a fused
//! kernel does it, score matrix and all, on products by `matrixmultiply`.
#![allow(unsafe_code)]

use quintet_kernels::{AttentionSpec, Cpu, GemmSpec, Trans};

/// A matrix inside a slice: element (i, j) is `data[i * row + j * col]`.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    data: &'a [f32],
    row: usize,
    col: usize,
}

impl<'a> View<'a> {
    /// Rows `row` elements apart, columns side by side.
    #[must_use]
    pub fn rows(data: &'a [f32], row: usize) -> Self {
        Self { data, row, col: 1 }
    }

    /// Rows and columns exchanged.
    #[must_use]
    pub fn t(self) -> Self {
        let Self { data, row, col } = self;
        Self {
            data,
            row: col,
            col: row,
        }
    }
}

/// `c = a b + beta c` by `matrixmultiply`, `shape` being m, k, n; rows of c are `c_row` apart.
///
/// # Panics
/// Where a slice is shorter than the shape says.
pub fn sgemm(shape: [usize; 3], a: View<'_>, b: View<'_>, beta: f32, c: &mut [f32], c_row: usize) {
    let [m, k, n] = shape;
    if m == 0 || k == 0 || n == 0 {
        return;
    }
    let holds = |x: &View<'_>, rows: usize, cols: usize| {
        (rows - 1) * x.row + (cols - 1) * x.col < x.data.len()
    };
    assert!(holds(&a, m, k) && holds(&b, k, n));
    assert!(c_row >= n && (m - 1) * c_row + n <= c.len());
    let steps = |x: &View<'_>| (x.data.as_ptr(), x.row as isize, x.col as isize);
    let (a, b) = (steps(&a), steps(&b));
    // SAFETY: the last elements of a, b and c are there (just checked), c is borrowed mutably, and
    // its rows do not overlap.
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            1.0,
            a.0,
            a.1,
            a.2,
            b.0,
            b.1,
            b.2,
            beta,
            c.as_mut_ptr(),
            c_row as isize,
            1,
        );
    }
}

/// The product of `spec` (its epilogue left out), rows of c cut evenly over the threads of `cpu`.
pub fn gemm(cpu: &Cpu, spec: &GemmSpec, a: &[f32], b: &[f32], c: &mut [f32]) {
    let GemmSpec { m, n, k, .. } = *spec;
    let rows = m.div_ceil(cpu.threads());
    let b = match spec.b {
        Trans::N => View::rows(b, n),
        Trans::T => View::rows(b, k).t(),
    };
    let beta = if spec.accumulate { 1.0 } else { 0.0 };
    cpu.for_each(c.chunks_mut(rows * n), |i, c| {
        let a = match spec.a {
            Trans::N => View::rows(&a[i * rows * k..], k),
            Trans::T => View::rows(&a[i * rows..], m).t(),
        };
        sgemm([c.len() / n, k, n], a, b, beta, c, n);
    });
}

/// Causal attention of one sequence with all of its scores in memory; positions are 0, 1, ...
#[derive(Debug)]
pub struct Materialised {
    spec: AttentionSpec,
    /// `p[h, s, z]`, which forward keeps for backward.
    p: Vec<f32>,
    ds: Vec<f32>,
}

impl Materialised {
    /// Room for one call of `spec`, whose batch is 1 and which has as many keys as queries.
    #[must_use]
    pub fn new(spec: &AttentionSpec) -> Self {
        let square = spec.queries * spec.keys;
        Self {
            spec: *spec,
            p: vec![0.0; spec.heads * square],
            ds: vec![0.0; square],
        }
    }

    /// `o = softmax(scale q k^T + mask) v`.
    pub fn forward(&mut self, q: &[f32], k: &[f32], v: &[f32], o: &mut [f32]) {
        let AttentionSpec { queries: s, .. } = self.spec;
        let d = self.spec.head_dim;
        let (q_row, kv_row, share) = self.strides();
        let scale = self.spec.scale as f32;
        for (head, p) in self.p.chunks_exact_mut(s * s).enumerate() {
            let (at, kv) = (head * d, head / share * d);
            let (q, k) = (View::rows(&q[at..], q_row), View::rows(&k[kv..], kv_row));
            sgemm([s, d, s], q, k.t(), 0.0, p, s);
            for (i, row) in p.chunks_exact_mut(s).enumerate() {
                let (seen, hidden) = row.split_at_mut(i + 1);
                let max = seen.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
                let mut sum = 0.0;
                for x in seen.iter_mut() {
                    *x = (scale * (*x - max)).exp();
                    sum += *x;
                }
                seen.iter_mut().for_each(|x| *x /= sum);
                hidden.fill(0.0);
            }
            let v = View::rows(&v[kv..], kv_row);
            sgemm([s, s, d], View::rows(p, s), v, 0.0, &mut o[at..], q_row);
        }
    }

    /// Gradients of q, k, v, overwritten; after [`Materialised::forward`].
    pub fn backward(
        &mut self,
        (q, k, v): (&[f32], &[f32], &[f32]),
        o: &[f32],
        d_o: &[f32],
        (dq, dk, dv): (&mut [f32], &mut [f32], &mut [f32]),
    ) {
        let AttentionSpec { queries: s, .. } = self.spec;
        let d = self.spec.head_dim;
        let (q_row, kv_row, share) = self.strides();
        let scale = self.spec.scale as f32;
        for (head, p) in self.p.chunks_exact(s * s).enumerate() {
            let (at, kv) = (head * d, head / share * d);
            let add = if head % share == 0 { 0.0 } else { 1.0 };
            let all_do = View::rows(&d_o[at..], q_row);
            let p = View::rows(p, s);
            sgemm([s, s, d], p.t(), all_do, add, &mut dv[kv..], kv_row);
            let v = View::rows(&v[kv..], kv_row);
            sgemm([s, d, s], all_do, v.t(), 0.0, &mut self.ds, s);
            for (i, ds) in self.ds.chunks_exact_mut(s).enumerate() {
                let row = at + i * q_row..at + i * q_row + d;
                let pairs = d_o[row.clone()].iter().zip(&o[row]);
                let delta: f32 = pairs.map(|(x, y)| x * y).sum();
                for (ds, p) in ds.iter_mut().zip(&p.data[i * s..]) {
                    *ds = scale * p * (*ds - delta);
                }
            }
            let ds = View::rows(&self.ds, s);
            let (q, k) = (View::rows(&q[at..], q_row), View::rows(&k[kv..], kv_row));
            sgemm([s, s, d], ds, k, 0.0, &mut dq[at..], q_row);
            sgemm([s, s, d], ds.t(), q, add, &mut dk[kv..], kv_row);
        }
    }

    /// Elements from one token to the next in q, in k and v; query heads per KV head.
    fn strides(&self) -> (usize, usize, usize) {
        let AttentionSpec {
            heads, kv_heads, ..
        } = self.spec;
        let d = self.spec.head_dim;
        (heads * d, kv_heads * d, heads / kv_heads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintet_kernels::{Attention, Error};

    /// Both ways of attention give the same: what is compared for speed does the same work.
    #[test]
    fn materialised_is_attention() -> Result<(), Error> {
        let spec = AttentionSpec {
            batch: 1,
            queries: 40,
            keys: 40,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            scale: 0.35,
            causal: true,
            window: None,
            softcap: None,
            dropout: None,
        };
        let wave = |len: usize, step: f32| -> Vec<f32> {
            (0..len).map(|i| (i as f32 * step).sin()).collect()
        };
        let (q, k, v) = (wave(1280, 0.7), wave(640, 1.3), wave(640, 0.9));
        let (d_o, pos) = (wave(1280, 1.1), (0..40).collect::<Vec<i32>>());
        let (mut o, mut lse, mut delta) = (vec![0.0; 1280], vec![0.0; 160], vec![0.0; 160]);
        let (mut dq, mut dk, mut dv) = (vec![0.0; 1280], vec![0.0; 640], vec![0.0; 640]);
        let cpu = Cpu::new(1);
        let (qkv, at) = ((&q[..], &k[..], &v[..]), (&pos[..], &pos[..]));
        cpu.attention::<f32>(&spec, qkv, at.into(), &mut o, &mut lse)?;
        cpu.attention_delta::<f32>(&spec, &d_o, &o, &mut delta)?;
        let into = (&mut dq[..], &mut dk[..], &mut dv[..]);
        cpu.attention_backward::<f32>(&spec, qkv, at.into(), &d_o, (&lse, &delta), into)?;
        let mut plain = Materialised::new(&spec);
        let mut po = vec![0.0; 1280];
        let (mut pq, mut pk, mut pv) = (vec![0.0; 1280], vec![0.0; 640], vec![0.0; 640]);
        plain.forward(&q, &k, &v, &mut po);
        plain.backward(qkv, &po, &d_o, (&mut pq, &mut pk, &mut pv));
        for (x, y) in [(&o, &po), (&dq, &pq), (&dk, &pk), (&dv, &pv)] {
            assert!(x.iter().zip(y).all(|(x, y)| (x - y).abs() < 1e-4));
        }
        Ok(())
    }

    #[test]
    fn gemm_is_gemm() -> Result<(), Error> {
        use quintet_kernels::Gemm;
        let cpu = Cpu::new(2);
        let (m, n, k) = (13, 9, 11);
        let wave = |len: usize| (0..len).map(|i| (i as f32).sin()).collect::<Vec<f32>>();
        for (a_form, b_form) in [
            (Trans::N, Trans::T),
            (Trans::N, Trans::N),
            (Trans::T, Trans::N),
        ] {
            let spec = GemmSpec::new(m, n, k, a_form, b_form).accumulate();
            let (a, b) = (wave(m * k), wave(k * n));
            let (mut ours, mut theirs) = (vec![1.0; m * n], vec![1.0; m * n]);
            cpu.gemm::<f32, f32>(&spec, &a, &b, None, None, &mut ours)?;
            gemm(&cpu, &spec, &a, &b, &mut theirs);
            assert!(ours.iter().zip(&theirs).all(|(x, y)| (x - y).abs() < 1e-4));
        }
        Ok(())
    }
}
