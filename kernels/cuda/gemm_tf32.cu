// c = epilogue(op(a) op(b) [+ c]) of f32 on the tensor cores, where that is asked for: operands are rounded to
// tf32 (10 bits of fraction, ties away from zero), sums are f32. Nobody asked: gemm_simt.cu, which is exact.
//
//   epilogue   + bias[n], then GELU (tanh form) if asked, then + residual[m, n]
//   shapes     op(a): m x k, stored m x k (AT = 0) or k x m (AT = 1)
//              op(b): k x n, stored k x n (BT = 0) or n x k (BT = 1)
//              c, residual: m x n     bias: n     bias and residual may be null
//
//   block      64 x 64 of c, 4 warps of 32 x 32; k in slices of 16, STAGES of them in shared memory
//
//                    b_slice 16 x 64      global --cp.async--> stage s + STAGES - 1
//   a_slice 64 x 16  c tile  64 x 64      stage s --rounded--> fragments --mma.sync--> sums
//
//   warp       2 x 4 products m16n8k8 for each 8 of k; lane 4 g + t holds rows g, g + 8 and columns 2 t, 2 t + 1 of each
//   slices     of an operand whose k runs fastest in memory: rows of 16 words, chunk q of 4 words of row x at
//              q ^ (x / 2 % 4); of one whose rows or columns do: rows of k, 64 words and 8 to spare. Either way 8
//              rows of fragments fall on all 32 banks.
//
// Each element is one chain over k in order, from zero: its bits depend on its row of a, its column of b and
// nothing beside them. Beyond the edges the slices hold zeros.

constexpr int TILE = 64, SLICE = 16, THREADS = 128, LINE = TILE + 8, STAGES = 3;
constexpr int HALF = SLICE * LINE, STAGE = 2 * HALF;  // words of one operand's slice, and of both

typedef Pack<float, 4> Four;

// Where element kk of row (or column) x lies in a slice.
template <bool X_FAST> __device__ inline int at(int x, int kk) {
    return X_FAST ? kk * LINE + x : x * SLICE + (kk / 4 ^ x / 2 % 4) * 4 + kk % 4;
}

// Begins to fill a slice with rows x0 ... of a matrix of `xs` by `ks`, from k0 on, V neighbours in memory at a time.
template <bool X_FAST, int V>
__device__ inline void fetch(float* slice, const float* from, i64 x0, i64 xs, i64 k0, i64 ks) {
    constexpr int PACKS = (X_FAST ? TILE : SLICE) / V;
    UNROLL_NOT for (int e = threadIdx.x; e < TILE * SLICE / V; e += THREADS) {
        int fast = e % PACKS * V, slow = e / PACKS;
        int x = X_FAST ? fast : slow, kk = X_FAST ? slow : fast;
        i64 gx = x0 + x, gk = k0 + kk;
        // V neighbours are all inside or none.
        bool inside = gx < xs && gk < ks;
        const float* source = inside ? from + (X_FAST ? gk * xs + gx : gx * ks + gk) : from;
        if constexpr (V == 4) cp_async_16(slice + at<X_FAST>(x, kk), source, inside ? 16 : 0);
        else cp_async_4(slice + at<X_FAST>(x, kk), source, inside ? 4 : 0);
    }
}

__device__ inline float gelu_of(float x) {
    return x / (1 + exponential(-(1.5957691216057308f * (x + 0.044715f * x * x * x))));
}

template <bool AT, bool BT>
__device__ void gemm(const float* a, const float* b, const float* bias, const float* residual, float* c, i64 m, i64 n,
                     i64 k, int accumulate, int gelu, int a_fours, int b_fours) {
    SHARED(Four, fours, STAGES * STAGE / 4);  // copies of 16 bytes want multiples of 16
    float* memory = (float*)fours;            // at the end the tile of c
    i64 across = (n + TILE - 1) / TILE, row0 = blockIdx.x / across * TILE, col0 = blockIdx.x % across * TILE;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    int warp_row = warp / 2 * 32, warp_col = warp % 2 * 32;
    auto fill = [&](i64 slice) {
        float *a_slice = memory + slice % STAGES * STAGE, *b_slice = a_slice + HALF;
        if (a_fours) fetch<AT, 4>(a_slice, a, row0, m, slice * SLICE, k);
        else fetch<AT, 1>(a_slice, a, row0, m, slice * SLICE, k);
        if (b_fours) fetch<!BT, 4>(b_slice, b, col0, n, slice * SLICE, k);
        else fetch<!BT, 1>(b_slice, b, col0, n, slice * SLICE, k);
    };
    i64 slices = (k + SLICE - 1) / SLICE;
    float sum[2][4][4] = {};
    for (i64 s = 0; s < STAGES - 1; s++) {
        if (s < slices) fill(s);
        cp_async_commit();  // of nothing too: groups are counted
    }
    for (i64 s = 0; s < slices; s++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // slice s is there for all, and nobody reads slice s - 1 any more
        if (s + STAGES - 1 < slices) fill(s + STAGES - 1);
        cp_async_commit();
        const float *a_slice = memory + s % STAGES * STAGE, *b_slice = a_slice + HALF;
        UNROLL for (int kk = 0; kk < SLICE; kk += 8) {
            u32 x[2][4], y[4][2];
            UNROLL for (int i = 0; i < 2; i++) {
                UNROLL for (int e = 0; e < 4; e++)
                    x[i][e] = cvt_rna_tf32(a_slice[at<AT>(warp_row + 16 * i + g + e % 2 * 8, kk + t + e / 2 * 4)]);
            }
            UNROLL for (int j = 0; j < 4; j++) {
                UNROLL for (int e = 0; e < 2; e++)
                    y[j][e] = cvt_rna_tf32(b_slice[at<!BT>(warp_col + 8 * j + g, kk + t + e * 4)]);
            }
            UNROLL for (int i = 0; i < 2; i++)
                UNROLL for (int j = 0; j < 4; j++) mma_m16n8k8_tf32(sum[i][j], x[i], y[j], sum[i][j]);
        }
    }
    // Through shared memory, so that neighbours write neighbours.
    __syncthreads();  // the slices' memory is written again
    float* tile = memory;
    UNROLL for (int i = 0; i < 2; i++) {
        UNROLL for (int j = 0; j < 4; j++) {
            UNROLL for (int half = 0; half < 2; half++) {
                int row = warp_row + 16 * i + g + 8 * half, col = warp_col + 8 * j + 2 * t;
                store(tile + row * LINE + col, Pack<float, 2>{sum[i][j][2 * half], sum[i][j][2 * half + 1]});
            }
        }
    }
    __syncthreads();
    UNROLL_NOT for (int e = threadIdx.x; e < TILE * TILE; e += THREADS) {
        i64 row = row0 + e / TILE, col = col0 + e % TILE;
        if (row >= m || col >= n) continue;
        float value = tile[e / TILE * LINE + e % TILE];
        if (accumulate) value += c[row * n + col];
        if (bias) value += bias[col];
        if (gelu) value = gelu_of(value);
        if (residual) value += residual[row * n + col];
        c[row * n + col] = value;
    }
}

#define GEMM(AT, BT, form)                                                                                           \
    KERNEL(128, gemm_tf32_##form)                                                                                    \
    (const float* a, const float* b, const float* bias, const float* residual, float* c, i64 m, i64 n, i64 k,        \
     int accumulate, int gelu, int a_fours, int b_fours) {                                                           \
        gemm<AT, BT>(a, b, bias, residual, c, m, n, k, accumulate, gelu, a_fours, b_fours);                          \
    }

GEMM(false, false, nn)
GEMM(false, true, nt)
GEMM(true, false, tn)
GEMM(true, true, tt)
