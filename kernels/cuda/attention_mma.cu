// Flash attention on the tensor cores: bf16 operands, scores, weights' sums and outputs in f32.
//
//   score      s = scale <q, k>, or cap tanh(scale <q, k> / cap); minus infinity where hidden
//   forward    w = e^(s - max), sum = sum of w, o = (sum of w v) / sum, lse = max + ln sum
//   backward   p = e^(s - lse)     ds = p (<do, v> - delta) scale [1 - (s / cap)^2]
//              dv = sum of p do    dk = sum of ds q    dq = sum of ds k    delta = <do, o>
//   rounding   w, p and ds are rounded to bf16 before they are multiplied, and nothing else inside
//   dropout    w and p are multiplied by what is left of them before v and do, not in sums; ds takes
//              <do, v> times it. The draws are those of the places of query and key in their sample
//   hidden     key z from query s: another document, pos[z] > pos[s] (causal), or
//              pos[s] - pos[z] >= window. A query that sees nothing: o = 0, lse = -inf, dq = 0
//
//   shapes     q, do, o, dq: b x queries x heads x dim      k, v, dk, dv: b x keys x kv_heads x dim
//              lse, delta, max, sum: b x heads x queries, f32    positions, documents: b x queries, b x keys
//              head h reads KV head h / (heads / kv_heads)
//              dim: a multiple of 8, at most W (64, 128 or 256), padded with zeros in shared memory
//   block      4 warps of 16 rows: 64 queries (forward, dq) or 64 keys (dk and dv); the others come in
//              blocks through two stages, the next one on its way while one is used
//
//                     keys --cp.async--> stage        warp    S = Q K^T     16 x keys, from ldmatrix
//        queries 64   [ Q ] shared                            W = e^(S - max), as it lies in registers
//                                                             acc += W V    V turned by ldmatrix
//
//   swizzle    a tile has rows of W elements; chunk c of 16 bytes of row r lies at c ^ (r % 8)
//
// dk and dv: a block of keys goes over the queries of each head that reads it, with keys as rows, so
// that P^T and dS^T too are used where they lie; 128 columns a block, so that W = 256 does it in two.
// No two blocks add into one place: no atomics, and every sum has one order. The step of a ring is the
// forward kernel that begins at a carry (acc, max, sum) and ends at one. Blocks of keys begin at
// multiples of their length; one that by the ranges of positions and documents no row sees is skipped,
// which changes no bit.

constexpr int ROWS = 64, THREADS = 128;

// Tokens of all sequences: positions, and where they are given documents and places in the sample.
struct Tokens {
    const int *pos, *doc, *at;
    i64 len;
};

// Of a call: its lengths, and who sees whom.
struct Call {
    i64 queries, keys, heads, kv_heads, dim;
    Tokens q, k;
    i64 window;
    int causal;
    float scale, cap;
    Dropout dropout;
    i64 first_head;
};

// Rows of one head: row r is dim elements from at + r * stride on.
template <class T> struct Head {
    T* at;
    i64 stride, len, dim;
};

template <class T> __device__ inline Head<T> head_of(T* x, i64 sequence, i64 len, i64 heads, i64 h, i64 dim) {
    return {x + (sequence * len * heads + h) * dim, heads * dim, len, dim};
}

__device__ inline int lane() { return threadIdx.x % 32; }
// The first of this warp's rows of a tile of 64.
__device__ inline int warp_row() { return threadIdx.x / 32 * 16; }

template <int W> __device__ inline int at(int row, int col) { return row * W + ((col / 8) ^ (row % 8)) * 8; }

// Begins to fill a tile with N rows from `first` on; zeros beyond the edges.
template <int N, int W> __device__ inline void fetch(bf16* tile, const Head<const bf16>& from, i64 first) {
    for (int e = threadIdx.x; e < N * W / 8; e += THREADS) {
        int row = e / (W / 8), col = e % (W / 8) * 8;
        bool inside = first + row < from.len && col < from.dim;
        const bf16* source = inside ? from.at + (first + row) * from.stride + col : from.at;
        cp_async_16(tile + at<W>(row, col), source, inside ? 16 : 0);
    }
}

// dot = 16 rows of x times N rows of y, one chain over the head in order.
template <int N, int W>
__device__ inline void dots(float (&dot)[N / 8][4], const bf16* x, int row, const bf16* y, i64 dim) {
    int matrix = lane() / 8, r = lane() % 8;
    UNROLL for (int j = 0; j < N / 8; j++)
        UNROLL for (int i = 0; i < 4; i++) dot[j][i] = 0;
    UNROLL for (int k = 0; k < W; k += 16) {
        if (k >= dim) break;
        u32 a[4], b[4];
        ldmatrix<4, false>(a, x + at<W>(row + matrix % 2 * 8 + r, k + matrix / 2 * 8));
        UNROLL for (int n = 0; n < N; n += 16) {
            ldmatrix<4, false>(b, y + at<W>(n + matrix / 2 * 8 + r, k + matrix % 2 * 8));
            mma_m16n8k16_bf16(dot[n / 8], a, b, dot[n / 8]);
            mma_m16n8k16_bf16(dot[n / 8 + 1], a, b + 2, dot[n / 8 + 1]);
        }
    }
}

// acc += weights (16 x N, as products leave them) times N rows of a tile, columns c0 .. c0 + COLS.
template <int N, int COLS, int W>
__device__ inline void mix(float (&acc)[COLS / 8][4], const float (&weight)[N / 8][4], const bf16* tile, int c0,
                           i64 dim) {
    int matrix = lane() / 8, r = lane() % 8;
    UNROLL for (int z = 0; z < N; z += 16) {
        const float *low = weight[z / 8], *high = weight[z / 8 + 1];
        u32 a[4] = {cvt_rn_bf16x2(low[0], low[1]), cvt_rn_bf16x2(low[2], low[3]), cvt_rn_bf16x2(high[0], high[1]),
                    cvt_rn_bf16x2(high[2], high[3])},
            b[4];
        UNROLL for (int c = 0; c < COLS; c += 16) {
            if (c0 + c >= dim) break;
            ldmatrix<4, true>(b, tile + at<W>(z + matrix % 2 * 8 + r, c0 + c + matrix / 2 * 8));
            mma_m16n8k16_bf16(acc[c / 8], a, b, acc[c / 8]);
            mma_m16n8k16_bf16(acc[c / 8 + 1], a, b + 2, acc[c / 8 + 1]);
        }
    }
}

// What is known of a block of tokens without looking at each.
struct Span {
    int pos_low, pos_high, doc_low, doc_high;
    bool full;
};

template <int N> __device__ inline void range(const int* x, i64 first, i64 len, int* low, int* high) {
    u32 least = 0xffffffffu, most = 0;
    for (int i = lane(); i < N && first + i < len; i += 32) {
        u32 value = (u32)x[first + i] ^ 0x80000000u;
        least = min(least, value);
        most = max(most, value);
    }
    *low = (int)(__reduce_min_sync(FULL_WARP, least) ^ 0x80000000u);
    *high = (int)(__reduce_max_sync(FULL_WARP, most) ^ 0x80000000u);
}

template <int N> __device__ inline Span span_of(const Tokens& of, i64 sequence, i64 first) {
    Span span = {0, 0, 0, 0, first + N <= of.len};
    i64 at = sequence * of.len;
    range<N>(of.pos + at, first, of.len, &span.pos_low, &span.pos_high);
    if (of.doc) range<N>(of.doc + at, first, of.len, &span.doc_low, &span.doc_high);
    return span;
}

__device__ inline bool none_sees(const Call& call, const Span& q, const Span& k) {
    return (call.causal && k.pos_low > q.pos_high) || (i64)q.pos_low - k.pos_high >= call.window ||
           k.doc_low > q.doc_high || k.doc_high < q.doc_low;
}

__device__ inline bool all_see(const Call& call, const Span& q, const Span& k) {
    return q.full && k.full && (!call.causal || k.pos_high <= q.pos_low) &&
           (i64)q.pos_high - k.pos_low < call.window && q.doc_low == k.doc_high && q.doc_high == k.doc_low;
}

struct Token {
    int pos, doc;
    bool there;
};

__device__ inline Token token(const Tokens& of, i64 sequence, i64 number) {
    Token t = {0, 0, number < of.len};
    if (!t.there) return t;
    i64 at = sequence * of.len + number;
    t.pos = of.pos[at];
    if (of.doc) t.doc = of.doc[at];
    return t;
}

// Its place in its sample, by which it is drawn.
__device__ inline u32 place(const Tokens& of, i64 sequence, i64 number) {
    if (number >= of.len) return 0;
    return (of.at ? of.at : of.pos)[sequence * of.len + number];
}

__device__ inline bool sees(const Call& call, Token q, Token k) {
    i64 before = (i64)q.pos - k.pos;
    return q.there && k.there && q.doc == k.doc && (!call.causal || before >= 0) && before < call.window;
}

__device__ inline float scored(const Call& call, float dot) {
    float s = call.scale * dot;
    return call.cap > 0 ? call.cap * tanhf(s / call.cap) : s;
}

// What the gradient of a score is times, to be that of the dot product.
__device__ inline float slope(const Call& call, float s) {
    float part = call.cap > 0 ? s / call.cap : 0;
    return call.scale * (1 - part * part);
}

// Element 4 j + i of a thread is its [j][i]: of a warp's products in this row and column.
__device__ inline int part_row(int e) { return lane() / 4 + e % 4 / 2 * 8; }
__device__ inline int part_col(int e) { return e / 4 * 8 + lane() % 4 * 2 + e % 2; }

__device__ inline Place place_of(const Call& call, i64 sequence, i64 query, i64 key) {
    return {place(call.q, sequence, query), place(call.k, sequence, key)};
}

// A bit for each element of a thread whose query sees its key.
template <int KEYS>
__device__ inline u32 seen_of(const Call& call, i64 sequence, const Token (&query)[2], i64 first_key) {
    u32 bits = 0;
    UNROLL_SOME for (int pair = 0; pair < KEYS / 4; pair++) {  // of elements with the same key
        int e = pair / 2 * 4 + pair % 2;
        Token key = token(call.k, sequence, first_key + part_col(e));
        bits |= (u32)sees(call, query[0], key) << e | (u32)sees(call, query[1], key) << (e + 2);
    }
    return bits;
}

// What is left of element e, as a factor, where `stay` has a bit for each that stays.
__device__ inline float left_of(const Call& call, u32 stay, int e) {
    return stay >> e & 1 ? (float)call.dropout.scale : 0;
}

__device__ inline float minus_infinity() { return -__uint_as_float(0x7f800000u); }
__device__ inline float power(float x) { return ex2(x * 1.4426950408889634f); }

// Over the 4 lanes that share a row.
__device__ inline float row_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}
__device__ inline float row_max(float x) {
    x = max(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return max(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

// Gives a warp's 16 rows, columns c0 .. c0 + COLS: f32 as they lie, added where ADD; bf16 through the
// warp's own rows of a tile, in chunks of 16 bytes. A zero is +0.
template <int COLS, int W, bool ADD>
__device__ inline void give(const Head<float>& to, i64 first, int c0, const float (&acc)[COLS / 8][4], bf16*, int) {
    UNROLL for (int half = 0; half < 2; half++) {
        i64 row = first + lane() / 4 + 8 * half, col = c0 + lane() % 4 * 2;
        if (row >= to.len) continue;
        float* mine = to.at + row * to.stride + col;
        UNROLL for (int j = 0; j < COLS / 8; j++) {
            if (8 * j >= to.dim - col) break;
            Pack<float, 2> old = {};
            if constexpr (ADD) old = load<float, 2>(mine + 8 * j);
            store(mine + 8 * j, Pack<float, 2>{acc[j][2 * half] + old.at[0], acc[j][2 * half + 1] + old.at[1]});
        }
    }
}
template <int COLS, int W, bool ADD>
__device__ inline void give(const Head<bf16>& to, i64 first, int c0, const float (&acc)[COLS / 8][4], bf16* tile,
                            int row) {
    static_assert(!ADD, "gradients are added in f32");
    __syncwarp();  // others of the warp may still read its rows
    UNROLL for (int j = 0; j < COLS / 8; j++) {
        UNROLL for (int half = 0; half < 2; half++) {
            int y = row + lane() / 4 + 8 * half;
            u32 pair = cvt_rn_bf16x2(acc[j][2 * half] + 0.0f, acc[j][2 * half + 1] + 0.0f);
            *(u32*)(tile + at<W>(y, c0 + 8 * j) + lane() % 4 * 2) = pair;
        }
    }
    __syncwarp();
    for (int e = lane(); e < 16 * COLS / 8; e += 32) {
        i64 y = e / (COLS / 8), col = c0 + e % (COLS / 8) * 8;
        if (first + y >= to.len || col >= to.dim) continue;
        store(to.at + (first + y) * to.stride + col, load<bf16, 8>(tile + at<W>(row + (int)y, (int)col)));
    }
}

// Goes over the blocks of N rows of two heads that are seen, the next two tiles on their way meanwhile:
// use(block's first row, tile of x, tile of y). seen(first) is the same in all threads. The stages are
// free again when it returns.
template <int N, int W, class Seen, class Use>
__device__ inline void pass(bf16* stages, const Head<const bf16>& x, const Head<const bf16>& y, Seen seen, Use use) {
    auto next = [&](i64 from) {
        while (from < x.len && !seen(from)) from += N;
        return from;
    };
    auto bring = [&](i64 block, int stage) {
        if (block < x.len) {
            fetch<N, W>(stages + stage * 2 * N * W, x, block);
            fetch<N, W>(stages + (stage * 2 + 1) * N * W, y, block);
        }
        cp_async_commit();  // of nothing too: groups are counted
    };
    i64 block = next(0);
    bring(block, 0);
    for (int stage = 0; block < x.len; stage ^= 1) {
        i64 after = next(block + N);
        bring(after, stage ^ 1);
        cp_async_wait<1>();
        __syncthreads();  // the block's tiles are there for all
        use(block, stages + stage * 2 * N * W, stages + (stage * 2 + 1) * N * W);
        __syncthreads();  // before the stage is filled again
        block = after;
    }
}

// o (bf16, or f32 where STEP) and its statistics: lse, or the carry's max and sum.
template <int W, int KEYS, bool STEP, class O>
__device__ void forward(const Call& call, const bf16* q, const bf16* k, const bf16* v, O* o, float* max_or_lse,
                        float* sums) {
    DYNAMIC_SHARED(memory);
    bf16 *q_tile = (bf16*)memory, *stages = q_tile + ROWS * W;
    i64 tiles = (call.queries + ROWS - 1) / ROWS, bh = blockIdx.x / tiles, b = bh / call.heads, h = bh % call.heads;
    // Later queries see more keys and begin first.
    i64 first = (tiles - 1 - blockIdx.x % tiles) * ROWS, g = h / (call.heads / call.kv_heads);
    i64 row = first + warp_row();
    Head<O> o_rows = head_of(o, b, call.queries, call.heads, h, call.dim);
    Span span = span_of<ROWS>(call.q, b, first);
    fetch<ROWS, W>(q_tile, head_of(q, b, call.queries, call.heads, h, call.dim), first);
    Words draws = draws_of(call.dropout, b, call.first_head + h);
    Token query[2];
    float top[2], sum[2], acc[W / 8][4] = {};
    UNROLL for (int half = 0; half < 2; half++) {
        i64 s = row + lane() / 4 + 8 * half;
        query[half] = token(call.q, b, s);
        top[half] = minus_infinity();
        sum[half] = 0;
        if (STEP && s < call.queries) sum[half] = sums[bh * call.queries + s];
        if (!(sum[half] > 0)) continue;
        top[half] = max_or_lse[bh * call.queries + s];
        if constexpr (STEP) {
            const float* carry = o_rows.at + s * o_rows.stride + lane() % 4 * 2;
            UNROLL for (int j = 0; j < W / 8; j++) {
                if (8 * j >= call.dim) break;
                Pack<float, 2> pair = load<float, 2>(carry + 8 * j);
                acc[j][2 * half] = pair.at[0];
                acc[j][2 * half + 1] = pair.at[1];
            }
        }
    }
    auto k_rows = head_of(k, b, call.keys, call.kv_heads, g, call.dim);
    auto v_rows = head_of(v, b, call.keys, call.kv_heads, g, call.dim);
    auto key_span = [&](i64 z0) { return span_of<KEYS>(call.k, b, z0); };
    auto seen = [&](i64 z0) { return !none_sees(call, span, key_span(z0)); };
    pass<KEYS, W>(stages, k_rows, v_rows, seen, [&](i64 z0, const bf16* k_tile, const bf16* v_tile) {
        float s[KEYS / 8][4], m[2] = {top[0], top[1]}, base[2], part[2] = {};
        dots<KEYS, W>(s, q_tile, warp_row(), k_tile, call.dim);
        UNROLL for (int j = 0; j < KEYS / 8; j++)
            UNROLL for (int i = 0; i < 4; i++) s[j][i] = scored(call, s[j][i]);
        if (!all_see(call, span, key_span(z0))) {
            u32 bits = seen_of<KEYS>(call, b, query, z0);
            UNROLL for (int j = 0; j < KEYS / 8; j++)
                UNROLL for (int i = 0; i < 4; i++)
                    if (!(bits >> (4 * j + i) & 1)) s[j][i] = minus_infinity();
        }
        UNROLL for (int j = 0; j < KEYS / 8; j++)
            UNROLL for (int i = 0; i < 4; i++) m[i / 2] = max(m[i / 2], s[j][i]);
        UNROLL for (int half = 0; half < 2; half++) {
            m[half] = row_max(m[half]);
            // Of a row that has seen nothing yet: minus infinity less itself would be no number.
            base[half] = m[half] == minus_infinity() ? 0 : m[half];
        }
        UNROLL for (int j = 0; j < KEYS / 8; j++) {
            UNROLL for (int i = 0; i < 4; i++) {
                s[j][i] = power(s[j][i] - base[i / 2]);
                part[i / 2] += s[j][i];
            }
        }
        if (call.dropout.least) {
            u32 stay = staying<KEYS / 2>(call.dropout, draws, [&](int e) {
                return place_of(call, b, row + part_row(e), z0 + part_col(e));
            });
            UNROLL for (int j = 0; j < KEYS / 8; j++)
                UNROLL for (int i = 0; i < 4; i++) s[j][i] *= left_of(call, stay, 4 * j + i);
        }
        UNROLL for (int half = 0; half < 2; half++) {
            float fade = power(top[half] - base[half]);
            sum[half] = sum[half] * fade + row_sum(part[half]);
            top[half] = m[half];
            UNROLL for (int j = 0; j < W / 8; j++) {
                acc[j][2 * half] *= fade;
                acc[j][2 * half + 1] *= fade;
            }
        }
        mix<KEYS, W, W>(acc, s, v_tile, 0, call.dim);
    });
    // The four threads of a row have read its carry; where no key is seen nothing has parted that from what
    // follows.
    if (STEP) __syncwarp();
    UNROLL for (int half = 0; half < 2; half++) {
        i64 s = row + lane() / 4 + 8 * half;
        bool some = sum[half] > 0;
        if (!STEP) {
            float norm = some ? 1 / sum[half] : 0;
            UNROLL for (int j = 0; j < W / 8; j++) {
                acc[j][2 * half] = some ? acc[j][2 * half] * norm : 0;
                acc[j][2 * half + 1] = some ? acc[j][2 * half + 1] * norm : 0;
            }
        }
        if (lane() % 4 != 0 || s >= call.queries) continue;
        if (STEP) sums[bh * call.queries + s] = sum[half];
        float lse = some ? top[half] + logf(sum[half]) : minus_infinity();
        max_or_lse[bh * call.queries + s] = STEP ? top[half] : lse;
    }
    cp_async_wait<0>();  // the queries' rows, where no key was seen
    __syncthreads();
    give<W, W, false>(o_rows, row, 0, acc, q_tile, warp_row());
}

// The gradient's own queries: 64 a block, keys in blocks of N.
template <int W, int N, bool ADD, class O>
__device__ void backward_q(const Call& call, const bf16* q, const bf16* k, const bf16* v, const bf16* dout,
                           const float* lse, const float* delta, O* dq) {
    DYNAMIC_SHARED(memory);
    bf16 *q_tile = (bf16*)memory, *do_tile = q_tile + ROWS * W, *stages = do_tile + ROWS * W;
    i64 tiles = (call.queries + ROWS - 1) / ROWS, bh = blockIdx.x / tiles, b = bh / call.heads, h = bh % call.heads;
    i64 first = (tiles - 1 - blockIdx.x % tiles) * ROWS, g = h / (call.heads / call.kv_heads);
    Span span = span_of<ROWS>(call.q, b, first);
    fetch<ROWS, W>(q_tile, head_of(q, b, call.queries, call.heads, h, call.dim), first);
    fetch<ROWS, W>(do_tile, head_of(dout, b, call.queries, call.heads, h, call.dim), first);
    Words draws = draws_of(call.dropout, b, call.first_head + h);
    Token query[2];
    float log_sum[2] = {}, pull[2] = {}, acc[W / 8][4] = {};
    UNROLL for (int half = 0; half < 2; half++) {
        i64 s = first + warp_row() + lane() / 4 + 8 * half;
        query[half] = token(call.q, b, s);
        if (s >= call.queries) continue;
        log_sum[half] = lse[bh * call.queries + s];
        pull[half] = delta[bh * call.queries + s];
    }
    auto k_rows = head_of(k, b, call.keys, call.kv_heads, g, call.dim);
    auto v_rows = head_of(v, b, call.keys, call.kv_heads, g, call.dim);
    auto seen = [&](i64 z0) {
        return !none_sees(call, span, span_of<N>(call.k, b, z0));
    };
    pass<N, W>(stages, k_rows, v_rows, seen, [&](i64 z0, const bf16* k_tile, const bf16* v_tile) {
        float s[N / 8][4], dp[N / 8][4];
        dots<N, W>(s, q_tile, warp_row(), k_tile, call.dim);
        dots<N, W>(dp, do_tile, warp_row(), v_tile, call.dim);
        u32 stay = staying<N / 2>(call.dropout, draws, [&](int e) {
            return place_of(call, b, first + warp_row() + part_row(e), z0 + part_col(e));
        });
        UNROLL for (int j = 0; j < N / 8; j++) {
            i64 z = z0 + 8 * j + lane() % 4 * 2;
            Token keys[2] = {token(call.k, b, z), token(call.k, b, z + 1)};
            UNROLL for (int i = 0; i < 4; i++) {
                const Token& key = keys[i % 2];
                float score = scored(call, s[j][i]), p = power(score - log_sum[i / 2]);
                bool there = sees(call, query[i / 2], key);
                float left = left_of(call, stay, 4 * j + i);
                s[j][i] = there ? p * slope(call, score) * (dp[j][i] * left - pull[i / 2]) : 0;
            }
        }
        mix<N, W, W>(acc, s, k_tile, 0, call.dim);
    });
    cp_async_wait<0>();
    __syncthreads();
    Head<O> dq_rows = head_of(dq, b, call.queries, call.heads, h, call.dim);
    give<W, W, ADD>(dq_rows, first + warp_row(), 0, acc, q_tile, warp_row());
}

// The gradients' own keys: 64 a block and COLS columns of them, queries in blocks of N.
template <int W, int COLS, int N, bool ADD, class O>
__device__ void backward_kv(const Call& call, const bf16* q, const bf16* k, const bf16* v, const bf16* dout,
                            const float* lse, const float* delta, O* dk, O* dv) {
    DYNAMIC_SHARED(memory);
    bf16 *k_tile = (bf16*)memory, *v_tile = k_tile + ROWS * W, *stages = v_tile + ROWS * W;
    i64 tiles = (call.keys + ROWS - 1) / ROWS, group = call.heads / call.kv_heads;
    i64 part = blockIdx.x / (W / COLS), bg = part / tiles, b = bg / call.kv_heads, g = bg % call.kv_heads;
    i64 first = part % tiles * ROWS;
    int c0 = blockIdx.x % (W / COLS) * COLS;
    if (c0 >= call.dim) return;
    Span span = span_of<ROWS>(call.k, b, first);
    fetch<ROWS, W>(k_tile, head_of(k, b, call.keys, call.kv_heads, g, call.dim), first);
    fetch<ROWS, W>(v_tile, head_of(v, b, call.keys, call.kv_heads, g, call.dim), first);
    Token key[2];
    float dk_acc[COLS / 8][4] = {}, dv_acc[COLS / 8][4] = {};
    UNROLL for (int half = 0; half < 2; half++)
        key[half] = token(call.k, b, first + warp_row() + lane() / 4 + 8 * half);
    auto seen = [&](i64 s0) {
        return !none_sees(call, span_of<N>(call.q, b, s0), span);
    };
    for (i64 h = g * group; h < (g + 1) * group; h++) {
        i64 stat = (b * call.heads + h) * call.queries;
        Words draws = draws_of(call.dropout, b, call.first_head + h);
        auto q_rows = head_of(q, b, call.queries, call.heads, h, call.dim);
        auto do_rows = head_of(dout, b, call.queries, call.heads, h, call.dim);
        pass<N, W>(stages, q_rows, do_rows, seen, [&](i64 s0, const bf16* q_tile, const bf16* do_tile) {
            float s[N / 8][4], dp[N / 8][4];
            dots<N, W>(s, k_tile, warp_row(), q_tile, call.dim);
            dots<N, W>(dp, v_tile, warp_row(), do_tile, call.dim);
            u32 stay = staying<N / 2>(call.dropout, draws, [&](int e) {
                return place_of(call, b, s0 + part_col(e), first + warp_row() + part_row(e));
            });
            UNROLL for (int j = 0; j < N / 8; j++) {
                i64 s1 = s0 + 8 * j + lane() % 4 * 2;
                Token queries[2] = {token(call.q, b, s1), token(call.q, b, s1 + 1)};
                UNROLL for (int i = 0; i < 4; i++) {
                    i64 at = s1 + i % 2;
                    const Token& query = queries[i % 2];
                    float score = scored(call, s[j][i]), pull = dp[j][i];
                    s[j][i] = dp[j][i] = 0;
                    if (!sees(call, query, key[i / 2])) continue;
                    float left = left_of(call, stay, 4 * j + i), p = power(score - lse[stat + at]);
                    s[j][i] = p * left;
                    dp[j][i] = p * slope(call, score) * (pull * left - delta[stat + at]);
                }
            }
            mix<N, COLS, W>(dv_acc, s, do_tile, c0, call.dim);
            mix<N, COLS, W>(dk_acc, dp, q_tile, c0, call.dim);
        });
    }
    cp_async_wait<0>();
    __syncthreads();
    Head<O> dk_rows = head_of(dk, b, call.keys, call.kv_heads, g, call.dim);
    Head<O> dv_rows = head_of(dv, b, call.keys, call.kv_heads, g, call.dim);
    give<COLS, W, ADD>(dk_rows, first + warp_row(), c0, dk_acc, k_tile, warp_row());
    give<COLS, W, ADD>(dv_rows, first + warp_row(), c0, dv_acc, v_tile, warp_row());
}

// A warp takes 16 rows: the diagonal of do o^T by the products that backward takes do v^T with, so
// that where o is v both have the same bits.
template <int W>
__device__ void delta(const bf16* dout, const bf16* o, float* delta, i64 queries, i64 heads, i64 dim) {
    DYNAMIC_SHARED(memory);
    bf16 *do_tile = (bf16*)memory, *o_tile = do_tile + ROWS * W;
    i64 tiles = (queries + ROWS - 1) / ROWS, bh = blockIdx.x / tiles, first = blockIdx.x % tiles * ROWS;
    fetch<ROWS, W>(do_tile, head_of(dout, bh / heads, queries, heads, bh % heads, dim), first);
    fetch<ROWS, W>(o_tile, head_of(o, bh / heads, queries, heads, bh % heads, dim), first);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    float square[2][4];
    dots<16, W>(square, do_tile, warp_row(), o_tile + warp_row() * W, dim);
    // Row r of 16 stands in column r: of lane 4 (r % 8) + r % 8 / 2 the element r % 2 of its half.
    int r = lane() / 4;
    if (lane() % 4 != r / 2) return;
    UNROLL for (int half = 0; half < 2; half++) {
        i64 s = first + warp_row() + r + 8 * half;
        if (s < queries) delta[bh * queries + s] = r % 2 ? square[half][2 * half + 1] : square[half][2 * half];
    }
}

// One block a multiprocessor will do: ptxas would spill to make room for one more.
#define BOUNDS 128, 1

#define CALL_PARAMS                                                                                                \
    i64 queries, i64 keys, i64 heads, i64 kv_heads, i64 dim, const int *q_pos, const int *k_pos, const int *q_doc, \
        const int *k_doc, const int *q_at, const int *k_at, i64 window, int causal, double scale, double cap,      \
        u32 least, u32 site, double left, i64 seed, i64 step, i64 sample, i64 first_head
#define CALL                                                                                                       \
    Call {                                                                                                         \
        queries, keys, heads, kv_heads, dim, {q_pos, q_doc, q_at, queries}, {k_pos, k_doc, k_at, keys}, window,    \
            causal, (float)scale, (float)cap, {least, site, left, (u64)seed, (u64)step, (u64)sample}, first_head     \
    }

#define GIVEN const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *dout, const float *lse, const float *delta_bhs

// W, keys a block of forward, columns of dk and dv a block, rows a block of backward.
#define BY_WIDTH(W, KEYS, COLS, N)                                                                                   \
    KERNEL(BOUNDS, attention_##W)                                                                                       \
    (const bf16* q, const bf16* k, const bf16* v, bf16* o, float* lse, CALL_PARAMS) {                                \
        forward<W, KEYS, false>(CALL, q, k, v, o, lse, (float*)0);                                                   \
    }                                                                                                                \
    KERNEL(BOUNDS, attention_step_##W)                                                                                  \
    (const bf16* q, const bf16* k, const bf16* v, float* acc, float* max, float* sum, CALL_PARAMS) {                 \
        forward<W, KEYS, true>(CALL, q, k, v, acc, max, sum);                                                        \
    }                                                                                                                \
    KERNEL(BOUNDS, attention_backward_q_##W)(GIVEN, bf16* dq, CALL_PARAMS) {                                            \
        backward_q<W, N, false>(CALL, q, k, v, dout, lse, delta_bhs, dq);                                            \
    }                                                                                                                \
    KERNEL(BOUNDS, attention_backward_step_q_##W)(GIVEN, float* dq, CALL_PARAMS) {                                      \
        backward_q<W, N, true>(CALL, q, k, v, dout, lse, delta_bhs, dq);                                             \
    }                                                                                                                \
    KERNEL(BOUNDS, attention_backward_kv_##W)(GIVEN, bf16* dk, bf16* dv, CALL_PARAMS) {                                 \
        backward_kv<W, COLS, N, false>(CALL, q, k, v, dout, lse, delta_bhs, dk, dv);                                 \
    }                                                                                                                \
    KERNEL(BOUNDS, attention_backward_step_kv_##W)(GIVEN, float* dk, float* dv, CALL_PARAMS) {                          \
        backward_kv<W, COLS, N, true>(CALL, q, k, v, dout, lse, delta_bhs, dk, dv);                                  \
    }                                                                                                                \
    KERNEL(BOUNDS, attention_delta_##W)                                                                                 \
    (const bf16* dout, const bf16* o, float* delta_bhs, i64 queries, i64 heads, i64 dim) {                           \
        delta<W>(dout, o, delta_bhs, queries, heads, dim);                                                           \
    }

BY_WIDTH(64, 64, 64, 32)
BY_WIDTH(128, 64, 128, 32)
BY_WIDTH(256, 32, 128, 16)
