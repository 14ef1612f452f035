// c = epilogue(op(a) op(b)) on the tensor cores: bf16 operands, sums in f32, rounded once.
//
//   shapes     op(a): m x k, stored m x k (AT = 0) or k x m (AT = 1)
//              op(b): k x n, stored k x n (BT = 0) or n x k (BT = 1)
//              c in O; what an epilogue reads stands above it
//   block      BM x BN of c; warps of WM x WN; k in slices of 32, STAGES of them in shared memory
//
//                          b_slice 32 x BN      global --cp.async 16 bytes--> stage s + STAGES - 1
//        a_slice BM x 32 | warp | warp |        stage s --ldmatrix--> fragments --mma.sync--> sums
//                        | warp | warp |        sums --16 rows a warp, shared--> epilogue --> c
//
//   swizzle    a slice lies as it is stored: rows of 32 k (4 chunks of 16 bytes), or rows of BM or BN
//              (8 chunks or more). Chunk q of row r lies at q ^ (r / 2 % 4), or at q ^ (r % 8): the 8
//              rows of a matrix that ldmatrix reads lie in 8 different bank groups either way.
//
// Each element is one chain of mma over k in steps of 16, from zero: its bits depend on its row of a,
// its column of b and nothing beside them, whatever tile it lies in. Beyond the edges slices hold
// zeros. Where rows are no multiples of 16 bytes (WIDE = 0) elements are moved one at a time, into the
// same slices. Grouped products (one matrix a group of rows) are the same kernel with another scheduler.
//
// An epilogue is a struct with apply(args, row, col, n, v): v holds n <= 4 neighbours of a row. A
// further one is a struct and a FORMS line, added as source.

constexpr int SLICE = 32;

template <int BM_, int BN_, int WM_, int WN_, int STAGES_> struct TileOf {
    static constexpr int BM = BM_, BN = BN_, WM = WM_, WN = WN_, STAGES = STAGES_;
    static constexpr int THREADS = BM / WM * (BN / WN) * 32;
    static constexpr int STAGE = (BM + BN) * SLICE;  // elements
};

// What an epilogue may use.
template <class O> struct Fused {
    const bf16* bias;
    const O* residual;
    O* c;
    i64 n;
    int accumulate, gelu, wide;
    O* kept;
};

// The offset of the 16-byte chunk of element (x, k) in a slice of X rows or columns.
template <int X, bool X_FAST> __device__ inline int chunk_at(int x, int k) {
    if constexpr (X_FAST) return k * X + ((x / 8) ^ (k % 8)) * 8;
    else return x * SLICE + ((k / 8) ^ (x / 2 % 4)) * 8;
}

// Begins to fill a slice with elements x0 .., k0 .. of a matrix of xs by ks.
template <int X, bool X_FAST, int THREADS, bool WIDE>
__device__ inline void fetch(bf16* slice, const bf16* from, i64 x0, i64 xs, i64 k0, i64 ks) {
    constexpr int CHUNKS = (X_FAST ? X : SLICE) / 8, ALL = X * SLICE / 8;
    for (int e = threadIdx.x; e < ALL; e += THREADS) {
        int slow = e / CHUNKS, fast = e % CHUNKS * 8;
        i64 row = (X_FAST ? k0 : x0) + slow, col = (X_FAST ? x0 : k0) + fast, cols = X_FAST ? xs : ks;
        i64 left = row < (X_FAST ? ks : xs) ? cols - col : 0;
        bf16* to = slice + (X_FAST ? chunk_at<X, true>(fast, slow) : chunk_at<X, false>(slow, fast));
        if constexpr (WIDE) {
            // Rows are whole chunks, so a chunk lies inside or beyond the edge.
            cp_async_16(to, left > 0 ? from + row * cols + col : from, left > 0 ? 16 : 0);
        } else {
            Pack<bf16, 8> pack = {};
            UNROLL for (int i = 0; i < 8; i++)
                if (i < left) pack.at[i] = from[row * cols + col + i];
            store(to, pack);
        }
    }
}

// sum += the product over one slice, of this warp's part at (row, col) of the tile.
template <class Tile, bool AT, bool BT>
__device__ inline void multiply(float (&sum)[Tile::WM / 16][Tile::WN / 8][4], const bf16* a, const bf16* b, int row,
                                int col) {
    int matrix = threadIdx.x % 32 / 8, r = threadIdx.x % 8;
    UNROLL for (int k = 0; k < SLICE; k += 16) {
        u32 x[Tile::WM / 16][4], y[Tile::WN / 8][2];
        UNROLL for (int i = 0; i < Tile::WM / 16; i++) {
            int m = row + 16 * i + matrix % 2 * 8, kk = k + matrix / 2 * 8;
            ldmatrix<4, AT>(x[i], a + chunk_at<Tile::BM, AT>(AT ? m : m + r, AT ? kk + r : kk));
        }
        UNROLL for (int j = 0; j < Tile::WN / 16; j++) {
            int n = col + 16 * j + matrix / 2 * 8, kk = k + matrix % 2 * 8;
            ldmatrix<4, !BT>(y[2 * j], b + chunk_at<Tile::BN, !BT>(BT ? n + r : n, BT ? kk : kk + r));
        }
        UNROLL for (int i = 0; i < Tile::WM / 16; i++)
            UNROLL for (int j = 0; j < Tile::WN / 8; j++) mma_m16n8k16_bf16(sum[i][j], x[i], y[j], sum[i][j]);
    }
}

// Gives the sums to the epilogue, 16 rows at a time through this warp's part of shared memory: lanes
// then hold 4 neighbours each, and a row of the warp's part is written at once.
template <class Tile, class Epilogue, class Args>
__device__ inline void finish(const Args& args, float (&sum)[Tile::WM / 16][Tile::WN / 8][4], float* staged, i64 row,
                              i64 col, i64 m, i64 n) {
    constexpr int STRIDE = Tile::WN + 8, ACROSS = Tile::WN / 4;
    int lane = threadIdx.x % 32;
    UNROLL for (int i = 0; i < Tile::WM / 16; i++) {
        UNROLL for (int j = 0; j < Tile::WN / 8; j++) {
            UNROLL for (int half = 0; half < 2; half++) {
                float* to = staged + (lane / 4 + 8 * half) * STRIDE + 8 * j + lane % 4 * 2;
                st_8(to, &sum[i][j][2 * half]);
            }
        }
        __syncwarp();
        for (int e = lane; e < 16 * ACROSS; e += 32) {
            i64 y = row + 16 * i + e / ACROSS, x = col + e % ACROSS * 4;
            Pack<float, 4> v = load<float, 4>(staged + e / ACROSS * STRIDE + e % ACROSS * 4);
            if (y < m && x < n) Epilogue::apply(args, y, x, (int)min((i64)4, n - x), v);
        }
        __syncwarp();  // before the next rows are written
    }
}

// One tile of c, whose first row and column are (row0, col0).
template <class Tile, class Epilogue, bool AT, bool BT, bool WIDE, class Args>
__device__ void product(const bf16* a, const bf16* b, const Args& args, i64 row0, i64 col0, i64 m, i64 n, i64 k) {
    DYNAMIC_SHARED(memory);
    bf16* stages = (bf16*)memory;
    auto fill = [&](i64 slice) {
        bf16* stage = stages + slice % Tile::STAGES * Tile::STAGE;
        fetch<Tile::BM, AT, Tile::THREADS, WIDE>(stage, a, row0, m, slice * SLICE, k);
        fetch<Tile::BN, !BT, Tile::THREADS, WIDE>(stage + Tile::BM * SLICE, b, col0, n, slice * SLICE, k);
    };
    int warp = threadIdx.x / 32, row = warp / (Tile::BN / Tile::WN) * Tile::WM;
    int col = warp % (Tile::BN / Tile::WN) * Tile::WN;
    i64 slices = (k + SLICE - 1) / SLICE;
    float sum[Tile::WM / 16][Tile::WN / 8][4] = {};
    for (i64 s = 0; s < Tile::STAGES - 1; s++) {
        if (s < slices) fill(s);
        cp_async_commit();  // of nothing too: groups are counted
    }
    for (i64 s = 0; s < slices; s++) {
        cp_async_wait<Tile::STAGES - 2>();
        __syncthreads();  // slice s is there for all, and nobody reads slice s - 1 any more
        if (s + Tile::STAGES - 1 < slices) fill(s + Tile::STAGES - 1);
        cp_async_commit();
        const bf16* stage = stages + s % Tile::STAGES * Tile::STAGE;
        multiply<Tile, AT, BT>(sum, stage, stage + Tile::BM * SLICE, row, col);
    }
    __syncthreads();  // the slices' memory is written again
    float* staged = (float*)memory + warp * 16 * (Tile::WN + 8);
    finish<Tile, Epilogue>(args, sum, staged, row0 + row, col0 + col, m, n);
}

// n <= 4 neighbours from p on, in one access where the row allows it.
template <class T> __device__ inline Pack<float, 4> neighbours(const T* p, int n, int wide) {
    Pack<float, 4> out = {};
    if (wide && n == 4) {
        Pack<T, 4> pack = load<T, 4>(p);
        UNROLL for (int i = 0; i < 4; i++) out.at[i] = widen(pack.at[i]);
    } else {
        UNROLL for (int i = 0; i < 4; i++)
            if (i < n) out.at[i] = widen(p[i]);
    }
    return out;
}

template <class O> __device__ inline void give(O* p, int n, int wide, const Pack<float, 4>& v) {
    Pack<O, 4> pack;
    UNROLL for (int i = 0; i < 4; i++) pack.at[i] = narrow<O>(v.at[i]);
    if (wide && n == 4) {
        store(p, pack);
    } else {
        UNROLL for (int i = 0; i < 4; i++)
            if (i < n) p[i] = pack.at[i];
    }
}

__device__ inline float gelu_of(float x) {
    const float twice = 1.5957691216057308f, cubic = 0.044715f;
    return x / (1 + expf(-(twice * (x + cubic * x * x * x))));
}

// c = sum [+ c] [+ bias[col]], then GELU (tanh form) if asked, then [+ residual]
struct Linear {
    template <class O>
    __device__ static void apply(const Fused<O>& args, i64 row, i64 col, int n, Pack<float, 4> v) {
        O* c = args.c + row * args.n + col;
        auto add = [&](const Pack<float, 4>& x) {
            UNROLL for (int i = 0; i < 4; i++) v.at[i] += x.at[i];
        };
        if (args.accumulate) add(neighbours(c, n, args.wide));
        if (args.bias) add(neighbours(args.bias + col, n, args.wide));
        if (args.gelu)
            UNROLL for (int i = 0; i < 4; i++) v.at[i] = gelu_of(v.at[i]);
        if (args.residual) add(neighbours(args.residual + row * args.n + col, n, args.wide));
        give(c, n, args.wide, v);
    }
};

// What a layer and its activation do in one pass. `kept` is what the activation was given, m x n,
// rounded as it is stored; backward reads it.
//   GeluKeep         kept = sum + bias, c = gelu(kept)
//   GeluBackward     c = sum gelu'(kept): sum is the gradient of gelu's output
//   SwigluKeep       columns 2i are gates, 2i + 1 are what they let through: kept = sum,
//                    c[i] = silu(kept[2i]) kept[2i + 1], of n / 2 columns
//   SwigluBackward   sum[i] is the gradient of that: c of 2n columns, as kept
struct GeluKeep {
    template <class O>
    __device__ static void apply(const Fused<O>& args, i64 row, i64 col, int n, Pack<float, 4> v) {
        i64 at = row * args.n + col;
        if (args.bias) {
            Pack<float, 4> bias = neighbours(args.bias + col, n, args.wide);
            UNROLL for (int i = 0; i < 4; i++) v.at[i] += bias.at[i];
        }
        give(args.kept + at, n, args.wide, v);
        UNROLL for (int i = 0; i < 4; i++) v.at[i] = gelu_of(v.at[i]);
        give(args.c + at, n, args.wide, v);
    }
};

struct GeluBackward {
    template <class O>
    __device__ static void apply(const Fused<O>& args, i64 row, i64 col, int n, Pack<float, 4> v) {
        Pack<float, 4> kept = neighbours<O>(args.kept + row * args.n + col, n, args.wide);
        const float twice = 1.5957691216057308f, cubic = 0.044715f;
        UNROLL for (int i = 0; i < 4; i++) {
            float x = kept.at[i], s = 1 / (1 + expf(-(twice * (x + cubic * x * x * x))));
            v.at[i] *= s + x * s * (1 - s) * twice * (1 + 3 * cubic * x * x);
        }
        give(args.c + row * args.n + col, n, args.wide, v);
    }
};

struct SwigluKeep {
    template <class O>
    __device__ static void apply(const Fused<O>& args, i64 row, i64 col, int n, Pack<float, 4> v) {
        give(args.kept + row * args.n + col, n, args.wide, v);
        UNROLL for (int i = 0; i < 4; i += 2) {
            if (i + 1 >= n) break;
            float gate = v.at[i], y = gate / (1 + expf(-gate)) * v.at[i + 1];
            args.c[(row * args.n + col + i) / 2] = narrow<O>(y);
        }
    }
};

struct SwigluBackward {
    template <class O>
    __device__ static void apply(const Fused<O>& args, i64 row, i64 col, int n, Pack<float, 4> v) {
        UNROLL for (int i = 0; i < 4; i += 2) {
            if (i >= n) break;
            i64 at = 2 * (row * args.n + col + i);
            int pairs = 2 * (n - i < 2 ? n - i : 2);
            Pack<float, 4> x = neighbours<O>(args.kept + at, pairs, args.wide), dx = {};
            UNROLL for (int p = 0; p < 2; p++) {
                float gate = x.at[2 * p], up = x.at[2 * p + 1], s = 1 / (1 + expf(-gate)), dy = v.at[i + p];
                dx.at[2 * p] = dy * up * s * (1 + gate * (1 - s));
                dx.at[2 * p + 1] = dy * gate * s;
            }
            give(args.c + at, pairs, args.wide, dx);
        }
    }
};

typedef TileOf<64, 64, 32, 32, 3> Small;
typedef TileOf<128, 128, 64, 32, 4> Middle;
typedef TileOf<128, 256, 64, 64, 4> Large;

// Tiles go down 8 rows of tiles before they go on to the next column, so that those which run at the
// same time read the same rows and columns.
template <class Tile> __device__ inline void tile_of(i64 block, i64 m, i64 n, i64* row0, i64* col0) {
    const i64 deep = 8;
    i64 down = (m + Tile::BM - 1) / Tile::BM, across = (n + Tile::BN - 1) / Tile::BN;
    i64 band = block / (deep * across), rows = min(deep, down - band * deep), at = block - band * deep * across;
    *row0 = (band * deep + at % rows) * Tile::BM;
    *col0 = at / rows * Tile::BN;
}

#define GEMM(Tile, Epilogue, O, AT, BT, WIDE, name)                                                                  \
    KERNEL(Tile::THREADS, gemm_##name)                                                                               \
    (const bf16* a, const bf16* b, const bf16* bias, const O* residual, O* c, i64 m, i64 n, i64 k, int accumulate,   \
     int gelu, int wide) {                                                                                           \
        i64 row0, col0;                                                                                              \
        tile_of<Tile>(blockIdx.x, m, n, &row0, &col0);                                                               \
        Fused<O> args = {bias, residual, c, n, accumulate, gelu, wide, 0};                                              \
        product<Tile, Epilogue, AT, BT, WIDE>(a, b, args, row0, col0, m, n, k);                                      \
    }

#define FUSED(Tile, Epilogue, BT, WIDE, name)                                                                        \
    KERNEL(Tile::THREADS, fused_##name)                                                                              \
    (const bf16* a, const bf16* b, const bf16* bias, bf16* kept, bf16* c, i64 m, i64 n, i64 k, int wide) {           \
        i64 row0, col0;                                                                                              \
        tile_of<Tile>(blockIdx.x, m, n, &row0, &col0);                                                               \
        Fused<bf16> args = {bias, 0, c, n, 0, 0, wide, kept};                                                        \
        product<Tile, Epilogue, false, BT, WIDE>(a, b, args, row0, col0, m, n, k);                                   \
    }

// Rows of group g lie from starts[g] on; b holds a matrix a group. The blocks of a group follow those
// of the group before.
#define GROUPED(Tile, Epilogue, O, BT, WIDE, name)                                                                   \
    KERNEL(Tile::THREADS, grouped_##name)                                                                            \
    (const bf16* a, const bf16* b, O* c, const i64* starts, i64 n, i64 k, int accumulate, int wide) {                \
        i64 block = blockIdx.x, across = (n + Tile::BN - 1) / Tile::BN, g = 0;                                       \
        for (;; g++) {                                                                                               \
            i64 blocks = (starts[g + 1] - starts[g] + Tile::BM - 1) / Tile::BM * across;                             \
            if (block < blocks) break;                                                                               \
            block -= blocks;                                                                                         \
        }                                                                                                            \
        i64 first = starts[g], m = starts[g + 1] - first, row0, col0;                                                \
        tile_of<Tile>(block, m, n, &row0, &col0);                                                                    \
        Fused<O> args = {0, 0, c + first * n, n, accumulate, 0, wide, 0};                                               \
        product<Tile, Epilogue, false, BT, WIDE>(a + first * k, b + g * n * k, args, row0, col0, m, n, k);           \
    }

// c[g] += a[rows of g]^T b[rows of g]: groups along k. Blocks go group by group.
#define GROUPED_WEIGHT(Tile, Epilogue, WIDE, name)                                                                   \
    KERNEL(Tile::THREADS, grouped_weight_##name)                                                                     \
    (const bf16* a, const bf16* b, float* c, const i64* starts, i64 m, i64 n, int wide) {                             \
        i64 tiles = (m + Tile::BM - 1) / Tile::BM * ((n + Tile::BN - 1) / Tile::BN), g = blockIdx.x / tiles;         \
        i64 first = starts[g], k = starts[g + 1] - first, row0, col0;                                                \
        if (k == 0) return;                                                                                          \
        tile_of<Tile>(blockIdx.x % tiles, m, n, &row0, &col0);                                                       \
        Fused<float> args = {0, 0, c + g * m * n, n, 1, 0, wide, 0};                                                    \
        product<Tile, Epilogue, true, false, WIDE>(a + first * m, b + first * n, args, row0, col0, m, n, k);         \
    }

#define FORMS(Tile, Epilogue, O, WIDE, name)                   \
    GEMM(Tile, Epilogue, O, false, false, WIDE, nn_##name)     \
    GEMM(Tile, Epilogue, O, false, true, WIDE, nt_##name)      \
    GEMM(Tile, Epilogue, O, true, false, WIDE, tn_##name)      \
    GEMM(Tile, Epilogue, O, true, true, WIDE, tt_##name)

FORMS(Small, Linear, bf16, true, bf16_bf16_64x64)
FORMS(Small, Linear, float, true, bf16_f32_64x64)
FORMS(Small, Linear, bf16, false, bf16_bf16_64x64_narrow)
FORMS(Small, Linear, float, false, bf16_f32_64x64_narrow)
FORMS(Middle, Linear, bf16, true, bf16_bf16_128x128)
FORMS(Middle, Linear, float, true, bf16_f32_128x128)
FORMS(Large, Linear, bf16, true, bf16_bf16_128x256)
FORMS(Large, Linear, float, true, bf16_f32_128x256)
GROUPED(Small, Linear, bf16, false, true, nn_bf16_64x64)
GROUPED(Small, Linear, bf16, true, true, nt_bf16_64x64)
GROUPED(Small, Linear, bf16, false, false, nn_bf16_64x64_narrow)
GROUPED(Small, Linear, bf16, true, false, nt_bf16_64x64_narrow)
GROUPED(Middle, Linear, bf16, false, true, nn_bf16_128x128)
GROUPED(Middle, Linear, bf16, true, true, nt_bf16_128x128)
GROUPED_WEIGHT(Small, Linear, true, bf16_64x64)
GROUPED_WEIGHT(Small, Linear, false, bf16_64x64_narrow)
GROUPED_WEIGHT(Middle, Linear, true, bf16_128x128)

#define ACTIVATION(Tile, WIDE, name)                                  \
    FUSED(Tile, GeluKeep, true, WIDE, gelu_##name)                    \
    FUSED(Tile, GeluBackward, false, WIDE, gelu_backward_##name)      \
    FUSED(Tile, SwigluKeep, true, WIDE, swiglu_##name)                \
    FUSED(Tile, SwigluBackward, false, WIDE, swiglu_backward_##name)

ACTIVATION(Small, true, 64x64)
ACTIVATION(Small, false, 64x64_narrow)
ACTIVATION(Middle, true, 128x128)
