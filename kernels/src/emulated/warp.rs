//! What warp instructions compute, from all lanes' operands: pure functions, per instruction.
//!
//! Lane maps (PTX ISA, Matrix Fragments), g = lane / 4, t = lane % 4:
//!
//! ```text
//! m16n8k16, 16 bit   A a0..a7: row g, +8 for i in {2,3,6,7}; column 2t + i%2, +8 for i >= 4
//!                    B b0..b3: k = 2t + i%2, +8 for i >= 2; n = g
//! m16n8k8, tf32      A a0..a3: row g, +8 for odd i; column t, +4 for i >= 2
//!                    B b0..b1: k = t + 4i; n = g
//! C and D            c0..c3: row g, +8 for i >= 2; column 2t + i%2
//! ldmatrix           register j of lane l: row l/4, columns 2(l%4) and +1 of matrix j
//! ```

/// Lanes of a warp.
pub(super) const LANES: usize = 32;

/// Operand registers of one lane.
pub(super) type In = [u32; 10];
/// Result registers of one lane.
pub(super) type Out = [u32; 4];

/// A warp instruction; the numbers are `EmuCall` of cuda/host.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Instr {
    SyncWarp,
    ShflIdx,
    ShflUp,
    ShflDown,
    ShflXor,
    Ballot,
    Any,
    All,
    ReduceAdd,
    ReduceMin,
    ReduceMax,
    ReduceAnd,
    ReduceOr,
    ReduceXor,
    MmaBf16,
    MmaF16,
    MmaTf32,
    LdMatrix,
    LdMatrixT,
    StMatrix,
    StMatrixT,
}

use Instr::*;

impl Instr {
    const ALL: [Instr; 21] = [
        SyncWarp, ShflIdx, ShflUp, ShflDown, ShflXor, Ballot, Any, All, ReduceAdd, ReduceMin,
        ReduceMax, ReduceAnd, ReduceOr, ReduceXor, MmaBf16, MmaF16, MmaTf32, LdMatrix, LdMatrixT,
        StMatrix, StMatrixT,
    ];

    pub(super) fn from_call(call: i32) -> Option<Self> {
        let i = usize::try_from(call).ok()?.checked_sub(16)?;
        Self::ALL.get(i).copied()
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            SyncWarp => "__syncwarp",
            ShflIdx => "__shfl_sync",
            ShflUp => "__shfl_up_sync",
            ShflDown => "__shfl_down_sync",
            ShflXor => "__shfl_xor_sync",
            Ballot => "__ballot_sync",
            Any => "__any_sync",
            All => "__all_sync",
            ReduceAdd => "__reduce_add_sync",
            ReduceMin => "__reduce_min_sync",
            ReduceMax => "__reduce_max_sync",
            ReduceAnd => "__reduce_and_sync",
            ReduceOr => "__reduce_or_sync",
            ReduceXor => "__reduce_xor_sync",
            MmaBf16 | MmaF16 | MmaTf32 => "mma.sync",
            LdMatrix | LdMatrixT => "ldmatrix",
            StMatrix | StMatrixT => "stmatrix",
        }
    }

    pub(super) fn is_mma(self) -> bool {
        matches!(self, MmaBf16 | MmaF16 | MmaTf32)
    }

    pub(super) fn is_matrix(self) -> bool {
        matches!(self, LdMatrix | LdMatrixT | StMatrix | StMatrixT)
    }
}

/// The lane a shuffle of `lane` reads from; `arg` and `width` as the CUDA functions take them.
/// A source outside the segment is the lane itself.
pub(super) fn shuffle_source(instr: Instr, lane: usize, arg: u32, width: u32) -> usize {
    let (lane, width) = (lane as i64, i64::from(width));
    let first = lane / width * width;
    let arg = i64::from(arg as i32);
    let source = match instr {
        ShflIdx => first + arg.rem_euclid(width),
        ShflUp => lane - arg,
        ShflDown => lane + arg,
        _ => lane ^ arg,
    };
    // Xor may reach earlier segments but not later ones.
    let low = if instr == ShflXor { 0 } else { first };
    if (low..first + width).contains(&source) {
        source as usize
    } else {
        lane as usize
    }
}

/// The result of a vote or reduction, one for all lanes of `mask`.
pub(super) fn vote(instr: Instr, mask: u32, values: &[In; LANES]) -> u32 {
    let lanes = || (0..LANES).filter(|l| mask >> l & 1 == 1);
    let values = || lanes().map(|l| values[l][0]);
    match instr {
        Ballot => lanes()
            .zip(values())
            .fold(0, |b, (l, v)| b | (u32::from(v != 0) << l)),
        Any => values().any(|v| v != 0).into(),
        All => values().all(|v| v != 0).into(),
        ReduceAdd => values().fold(0, u32::wrapping_add),
        ReduceMin => values().min().unwrap_or(0),
        ReduceMax => values().max().unwrap_or(0),
        ReduceAnd => values().fold(u32::MAX, |x, v| x & v),
        ReduceOr => values().fold(0, |x, v| x | v),
        _ => values().fold(0, |x, v| x ^ v),
    }
}

/// `mma.sync`: operands of a lane are A's 4 registers, B's 2, C's 4. Products are exact; their
/// sum is taken in f64 and rounded to f32 once (tensor cores may differ by about an ulp, not where
/// all sums are whole numbers below 2^24).
pub(super) fn mma(instr: Instr, lanes: &[In; LANES]) -> [Out; LANES] {
    let (mut a_mk, mut b_kn) = ([[0.0; 16]; 16], [[0.0; 8]; 16]);
    let (k, a_len, b_len) = match instr {
        MmaTf32 => (8, 4, 2),
        _ => (16, 8, 4),
    };
    let value = |regs: &[u32], i: usize| match instr {
        MmaTf32 => tf32(regs[i]),
        _ => half(instr, regs[i / 2], i % 2),
    };
    for (lane, regs) in lanes.iter().enumerate() {
        for i in 0..a_len {
            let (row, p) = a_element(instr, lane, i);
            a_mk[row][p] = value(regs, i);
        }
        for i in 0..b_len {
            let (p, col) = b_element(instr, lane, i);
            b_kn[p][col] = value(&regs[4..], i);
        }
    }
    let mut d = [[0; 4]; LANES];
    for (lane, regs) in lanes.iter().enumerate() {
        for i in 0..4 {
            let (row, col) = c_element(lane, i);
            let c = f64::from(f32::from_bits(regs[6 + i]));
            let sum = (0..k).fold(c, |sum, p| sum + a_mk[row][p] * b_kn[p][col]);
            d[lane][i] = (sum as f32).to_bits();
        }
    }
    d
}

/// (row, k) of element `i` of A that `lane` holds.
fn a_element(instr: Instr, lane: usize, i: usize) -> (usize, usize) {
    let (g, t) = (lane / 4, lane % 4);
    match instr {
        MmaTf32 => (g + 8 * (i % 2), t + 4 * (i / 2)),
        _ => (g + 8 * (i / 2 % 2), 2 * t + i % 2 + 8 * (i / 4)),
    }
}

/// (k, column) of element `i` of B that `lane` holds.
fn b_element(instr: Instr, lane: usize, i: usize) -> (usize, usize) {
    let (g, t) = (lane / 4, lane % 4);
    match instr {
        MmaTf32 => (t + 4 * i, g),
        _ => (2 * t + i % 2 + 8 * (i / 2), g),
    }
}

/// (row, column) of element `i` of C and D that `lane` holds.
fn c_element(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2)
}

fn tf32(bits: u32) -> f64 {
    f64::from(f32::from_bits(bits & !0x1fff))
}

fn half(instr: Instr, register: u32, i: usize) -> f64 {
    let bits = (register >> (16 * i)) as u16;
    if instr == MmaBf16 {
        half::bf16::from_bits(bits).to_f64()
    } else {
        half::f16::from_bits(bits).to_f64()
    }
}

/// The element (matrix, row, column) that half `h` of register `j` of `lane` holds in `ldmatrix`
/// and `stmatrix`.
pub(super) fn matrix_element(
    trans: bool,
    lane: usize,
    j: usize,
    h: usize,
) -> (usize, usize, usize) {
    let (row, col) = (lane / 4, 2 * (lane % 4) + h);
    if trans { (j, col, row) } else { (j, row, col) }
}

#[cfg(test)]
mod tests {
    use std::format;
    use std::string::String;

    use super::*;

    #[test]
    fn shuffles_reach_within_their_segment() {
        assert_eq!(shuffle_source(ShflIdx, 5, 9, 8), 1);
        assert_eq!(shuffle_source(ShflIdx, 13, 9, 8), 9);
        assert_eq!(shuffle_source(ShflUp, 8, 1, 8), 8);
        assert_eq!(shuffle_source(ShflUp, 9, 1, 8), 8);
        assert_eq!(shuffle_source(ShflDown, 31, 1, 32), 31);
        assert_eq!(shuffle_source(ShflDown, 6, 1, 8), 7);
        assert_eq!(shuffle_source(ShflXor, 3, 16, 32), 19);
        assert_eq!(shuffle_source(ShflXor, 3, 8, 8), 3);
        assert_eq!(shuffle_source(ShflXor, 11, 8, 8), 3);
    }

    /// The maps as text: `.ci/lane_maps.py` compares it with a source that is not ours. Rewritten by
    /// running this test with QUINTET_WRITE_GOLDEN=1.
    #[test]
    fn fragments_are_the_golden_ones() {
        let mut text = String::new();
        let mut map = |name: &str, len: usize, of: &dyn Fn(usize, usize) -> (usize, usize)| {
            for lane in 0..LANES {
                let pairs = (0..len)
                    .map(|i| of(lane, i))
                    .map(|(x, y)| format!(" {x},{y}"));
                text += &format!("{name} {lane}:{}\n", pairs.collect::<String>());
            }
        };
        map("m16n8k16.a", 8, &|l, i| a_element(MmaBf16, l, i));
        map("m16n8k16.b", 4, &|l, i| b_element(MmaBf16, l, i));
        map("m16n8k16.c", 4, &c_element);
        map("m16n8k8.tf32.a", 4, &|l, i| a_element(MmaTf32, l, i));
        map("m16n8k8.tf32.b", 2, &|l, i| b_element(MmaTf32, l, i));
        let matrix = |trans| {
            move |l, h| {
                let (_, row, col) = matrix_element(trans, l, 0, h);
                (row, col)
            }
        };
        map("ldmatrix", 2, &matrix(false));
        map("ldmatrix.trans", 2, &matrix(true));
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/emulated/fragments.txt");
        if std::env::var_os("QUINTET_WRITE_GOLDEN").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).unwrap(), text);
    }

    /// A times the identity is A, each element in the lane and register the tables above name.
    #[test]
    fn identities_show_the_fragment_maps() {
        let bits = |x: usize| u32::from(half::bf16::from_f32(x as f32).to_bits());
        let mut lanes = [[0; 10]; LANES];
        for (lane, regs) in lanes.iter_mut().enumerate() {
            let (g, t) = (lane / 4, lane % 4);
            // A[m][k] = 16 m + k, whole numbers up to 255; B[k][n] = (k == n + 8).
            for (r, (row, col)) in [
                (g, 2 * t),
                (g + 8, 2 * t),
                (g, 2 * t + 8),
                (g + 8, 2 * t + 8),
            ]
            .into_iter()
            .enumerate()
            {
                regs[r] = bits(16 * row + col) | bits(16 * row + col + 1) << 16;
            }
            for (r, k) in [2 * t, 2 * t + 8].into_iter().enumerate() {
                let one = |k: usize| if k == g + 8 { bits(1) } else { 0 };
                regs[4 + r] = one(k) | one(k + 1) << 16;
            }
            regs[6] = 1000.0f32.to_bits();
        }
        for (lane, d) in mma(MmaBf16, &lanes).iter().enumerate() {
            let (g, t) = (lane / 4, lane % 4);
            let want = |row: usize, col: usize| (16 * row + col + 8) as f32;
            let got = d.map(f32::from_bits);
            assert_eq!(
                got,
                [
                    1000.0 + want(g, 2 * t),
                    want(g, 2 * t + 1),
                    want(g + 8, 2 * t),
                    want(g + 8, 2 * t + 1)
                ]
            );
        }
    }

    #[test]
    fn tf32_ignores_the_low_bits() {
        let mut lanes = [[0; 10]; LANES];
        for (lane, regs) in lanes.iter_mut().enumerate() {
            let (g, t) = (lane / 4, lane % 4);
            for (r, (row, col)) in [(g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)]
                .into_iter()
                .enumerate()
            {
                regs[r] = ((8 * row + col) as f32).to_bits() | 0x7ff;
            }
            for (r, k) in [t, t + 4].into_iter().enumerate() {
                regs[4 + r] = f32::from(u8::from(k == g)).to_bits();
            }
        }
        for (lane, d) in mma(MmaTf32, &lanes).iter().enumerate() {
            let (g, t) = (lane / 4, lane % 4);
            let want = |row: usize, col: usize| (8 * row + col) as f32;
            assert_eq!(f32::from_bits(d[0]), want(g, 2 * t));
            assert_eq!(f32::from_bits(d[3]), want(g + 8, 2 * t + 1));
        }
    }
}
