// c = epilogue(op(a) op(b) [+ c]) on the ordinary cores: exact f32 and f64. For bf16 see gemm_mma.cu.
//
//   epilogue   + bias[n], then GELU (tanh form) if asked, then + residual[m, n]
//   shapes     op(a): m x k, stored m x k (AT = 0) or k x m (AT = 1)
//              op(b): k x n, stored k x n (BT = 0) or n x k (BT = 1)
//              c, residual: m x n     bias: n     bias and residual may be null
//   types      a, b, bias in I; c and residual in O; sums in Acc, rounded once
//
//   block      64 x 64 of c, 256 threads of 4 x 4; k in slices of 16 through shared memory
//
//                       b_slice 16 x 64        thread (tx, ty) has rows ty + 16 i and columns
//   a_slice 64 x 16     c tile  64 x 64        tx + 16 j: neighbours read neighbouring words
//   (stored 16 x 64)
//
// Grouped products (one matrix a group of rows, or groups along k) are the same tiles: a block finds
// its group by the rows that begin at starts[g].
//
// Each element is one chain over k in order, from zero: its bits depend on its row of a, its column
// of b and nothing beside them. Beyond the edges the slices hold zeros.

constexpr int TILE = 64, SLICE = 16, PAD = 1;

// Fills slice[kk][x] with element (x0 + x, k0 + kk) of a matrix of `xs` by `ks`, where x runs
// fastest in memory if X_FAST.
template <class T, bool X_FAST>
__device__ inline void fill(Acc<T> (&slice)[SLICE * (TILE + PAD)], const T* from, i64 x0, i64 xs, i64 k0, i64 ks) {
    for (int e = threadIdx.x; e < TILE * SLICE; e += 256) {
        int x = X_FAST ? e % TILE : e / SLICE, kk = X_FAST ? e / TILE : e % SLICE;
        i64 gx = x0 + x, gk = k0 + kk;
        Acc<T> value = 0;
        if (gx < xs && gk < ks) value = widen(from[X_FAST ? gk * xs + gx : gx * ks + gk]);
        slice[kk * (TILE + PAD) + x] = value;
    }
}

template <class A> __device__ inline A gelu_of(A x) {
    const A twice = (A)1.5957691216057308, cubic = (A)0.044715;
    return x / (1 + exponential(-(twice * (x + cubic * x * x * x))));
}

// One tile of c, number `block` of them.
template <class I, class O, bool AT, bool BT>
__device__ void gemm(i64 block, const I* a, const I* b, const I* bias, const O* residual, O* c, i64 m, i64 n, i64 k,
                     int accumulate, int gelu) {
    SHARED(Acc<I>, a_slice, SLICE * (TILE + PAD));
    SHARED(Acc<I>, b_slice, SLICE * (TILE + PAD));
    i64 across = (n + TILE - 1) / TILE;  // tiles in a row of tiles
    i64 row0 = block / across * TILE, col0 = block % across * TILE;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    Acc<I> sum[4][4] = {};
    for (i64 k0 = 0; k0 < k; k0 += SLICE) {
        fill<I, AT>(a_slice, a, row0, m, k0, k);
        fill<I, !BT>(b_slice, b, col0, n, k0, k);
        __syncthreads();
        for (int kk = 0; kk < SLICE; kk++) {
            Acc<I> x[4], y[4];
            UNROLL for (int i = 0; i < 4; i++) x[i] = a_slice[kk * (TILE + PAD) + ty + 16 * i];
            UNROLL for (int j = 0; j < 4; j++) y[j] = b_slice[kk * (TILE + PAD) + tx + 16 * j];
            UNROLL for (int i = 0; i < 4; i++)
                UNROLL for (int j = 0; j < 4; j++) sum[i][j] = multiply_add(x[i], y[j], sum[i][j]);
        }
        __syncthreads();
    }
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int j = 0; j < 4; j++) {
            i64 row = row0 + ty + 16 * i, col = col0 + tx + 16 * j;
            if (row >= m || col >= n) continue;
            Acc<I> value = sum[i][j];
            if (accumulate) value += widen(c[row * n + col]);
            if (bias) value += widen(bias[col]);
            if (gelu) value = gelu_of(value);
            if (residual) value += widen(residual[row * n + col]);
            c[row * n + col] = narrow<O>(value);
        }
    }
}

#define GEMM(I, O, AT, BT, name)                                                                                  \
    KERNEL(256, gemm_##name)                                                                                      \
    (const I* a, const I* b, const I* bias, const O* residual, O* c, i64 m, i64 n, i64 k, int accumulate,         \
     int gelu) {                                                                                                  \
        gemm<I, O, AT, BT>(blockIdx.x, a, b, bias, residual, c, m, n, k, accumulate, gelu);                                   \
    }
#define FORMS(I, O, types)            \
    GEMM(I, O, false, false, nn_##types) \
    GEMM(I, O, false, true, nt_##types)  \
    GEMM(I, O, true, false, tn_##types)  \
    GEMM(I, O, true, true, tt_##types)

FORMS(float, float, f32_f32)
FORMS(double, double, f64_f64)
FORMS(float, bf16, f32_bf16)

// c[rows of g] = a[rows of g] op(b[g]) [+ c]
template <class T, bool BT>
__device__ void grouped(const T* a, const T* b, T* c, const i64* starts, i64 n, i64 k, int accumulate) {
    i64 block = blockIdx.x, across = (n + TILE - 1) / TILE, g = 0;
    for (;; g++) {
        i64 blocks = (starts[g + 1] - starts[g] + TILE - 1) / TILE * across;
        if (block < blocks) break;
        block -= blocks;
    }
    i64 first = starts[g], m = starts[g + 1] - first;
    gemm<T, T, false, BT>(block, a + first * k, b + g * n * k, (const T*)0, (const T*)0, c + first * n, m, n, k,
                          accumulate, 0);
}

// c[g] += a[rows of g]^T b[rows of g]
template <class T> __device__ void grouped_weight(const T* a, const T* b, Acc<T>* c, const i64* starts, i64 m, i64 n) {
    i64 tiles = (m + TILE - 1) / TILE * ((n + TILE - 1) / TILE), g = blockIdx.x / tiles;
    i64 first = starts[g], k = starts[g + 1] - first;
    if (k == 0) return;
    gemm<T, Acc<T>, true, false>(blockIdx.x % tiles, a + first * m, b + first * n, (const T*)0, (const Acc<T>*)0,
                                 c + g * m * n, m, n, k, 1, 0);
}

#define GROUPED(T, t)                                                                                              \
    KERNEL(256, grouped_nn_##t)                                                                                    \
    (const T* a, const T* b, T* c, const i64* starts, i64 n, i64 k, int accumulate) {                              \
        grouped<T, false>(a, b, c, starts, n, k, accumulate);                                                      \
    }                                                                                                              \
    KERNEL(256, grouped_nt_##t)                                                                                    \
    (const T* a, const T* b, T* c, const i64* starts, i64 n, i64 k, int accumulate) {                              \
        grouped<T, true>(a, b, c, starts, n, k, accumulate);                                                       \
    }                                                                                                              \
    KERNEL(256, grouped_weight_##t)(const T* a, const T* b, T* c, const i64* starts, i64 m, i64 n) {               \
        grouped_weight<T>(a, b, c, starts, m, n);                                                                  \
    }

GROUPED(float, f32)
GROUPED(double, f64)
