// Flash attention on the ordinary cores: exact f32 and f64, and bf16 with weights in f32.
//
//   score      s = scale <q, k>, or cap tanh(scale <q, k> / cap); minus infinity where hidden
//   forward    w = e^(s - max), sum = sum of w, o = (sum of w v) / sum, lse = max + ln sum
//   backward   p = e^(s - lse)     ds = p (<do, v> - delta) scale [1 - (s / cap)^2]
//              dv = sum of p do    dk = sum of ds q    dq = sum of ds k    delta = <do, o>
//   dropout    w and p are multiplied by what is left of them before v and do, not in sums; ds takes
//              <do, v> times it. The draws are those of the places of query and key in their sample
//   hidden     key z from query s: another document, pos[z] > pos[s] (causal), or
//              pos[s] - pos[z] >= window. A query that sees nothing: o = 0, lse = -inf, dq = 0
//
//   shapes     q, do, o, dq: b x queries x heads x dim      k, v, dk, dv: b x keys x kv_heads x dim
//              lse, delta, max, sum: b x heads x queries, Acc    positions, documents: b x queries, b x keys
//              head h reads KV head h / (heads / kv_heads); dim at most 64 C
//   block      128 threads, 16 across and 8 down: a tile of 32 rows by 64 columns, 4 x 4 a thread
//
//                         keys 64   keys 64 ...      forward, dq: a block of 32 queries goes over the keys
//              queries 32 [ S -> W | S -> W |        dk and dv: a block of 32 keys goes over the queries of
//                           acc += W V               each head that reads it, so no two blocks add;
//                                                    of heads wider than 128 a block gives 128 columns
//
// The step of a ring is the same kernel that begins at a carry (acc, max, sum) and ends at one. Key
// blocks begin at multiples of 64 and those that no row sees are skipped: a row's bits depend on the
// row and its keys alone, and a skipped block changes none. No atomics: every sum has one order.

constexpr int ROWS = 32, COLS = 64, SLICE = 16, THREADS = 128;

// Rows of one head: row r is dim elements from at + r * stride on.
template <class T> struct Head {
    T* at;
    i64 stride, len;
};

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
    double scale, cap;
    Dropout dropout;
    i64 first_head;
};

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

__device__ inline float hyperbolic(float x) { return tanhf(x); }
__device__ inline double hyperbolic(double x) { return tanh(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

template <class A> __device__ inline A scored(const Call& call, A dot) {
    A s = (A)call.scale * dot, cap = (A)call.cap;
    return cap > 0 ? cap * hyperbolic(s / cap) : s;
}

// What the gradient of a score is times, to be that of the dot product.
template <class A> __device__ inline A slope(const Call& call, A s) {
    A cap = (A)call.cap, part = cap > 0 ? s / cap : 0;
    return (A)call.scale * (1 - part * part);
}

template <class T> __device__ inline Head<T> head_of(T* x, i64 sequence, i64 len, i64 heads, i64 h, i64 dim) {
    return {x + (sequence * len * heads + h) * dim, heads * dim, len};
}

template <class T> __device__ inline Head<T> from_column(Head<T> rows, i64 c0) {
    return {rows.at + c0, rows.stride, rows.len};
}

// Thread (tx, ty) has rows ty + 8 i and columns tx + 16 j.
__device__ inline int across() { return threadIdx.x % 16; }
__device__ inline int down() { return threadIdx.x / 16; }

// Element 4 i + j of a thread is its [i][j]: in this row and column of a tile.
__device__ inline int part_row(int e) { return down() + e / 4 * 8; }
__device__ inline int part_col(int e) { return across() + e % 4 * 16; }

__device__ inline Place place_of(const Call& call, i64 sequence, i64 query, i64 key) {
    return {place(call.q, sequence, query), place(call.k, sequence, key)};
}

// What is left of element e, as a factor, where `stay` has a bit for each that stays.
template <class A> __device__ inline A left_of(const Call& call, u32 stay, int e) {
    return stay >> e & 1 ? (A)call.dropout.scale : 0;
}

// slice[d][x] = element d0 + d of row first + x, zeros beyond the edges.
template <int N, class T>
__device__ inline void fill(Acc<T>* slice, Head<const T> from, i64 first, i64 d0, i64 dim) {
    for (int e = threadIdx.x; e < N * SLICE; e += THREADS) {
        int x = e / SLICE, d = e % SLICE;
        bool inside = first + x < from.len && d0 + d < dim;
        slice[d * (N + 1) + x] = inside ? widen(from.at[(first + x) * from.stride + d0 + d]) : (Acc<T>)0;
    }
}

// dot[i][j] = <row of x, row of y>, one chain over the head in order.
template <class T>
__device__ void dots(Acc<T> (&dot)[4][4], Acc<T>* x_slice, Acc<T>* y_slice, Head<const T> x, i64 x0, Head<const T> y,
                     i64 y0, i64 dim) {
    UNROLL for (int i = 0; i < 4; i++)
        UNROLL for (int j = 0; j < 4; j++) dot[i][j] = 0;
    for (i64 d0 = 0; d0 < dim; d0 += SLICE) {
        fill<ROWS, T>(x_slice, x, x0, d0, dim);
        fill<COLS, T>(y_slice, y, y0, d0, dim);
        __syncthreads();
        int deep = (int)min((i64)SLICE, dim - d0);
        UNROLL_SOME for (int d = 0; d < deep; d++) {
            Acc<T> a[4], b[4];
            UNROLL for (int i = 0; i < 4; i++) a[i] = x_slice[d * (ROWS + 1) + down() + 8 * i];
            UNROLL for (int j = 0; j < 4; j++) b[j] = y_slice[d * (COLS + 1) + across() + 16 * j];
            UNROLL for (int i = 0; i < 4; i++)
                UNROLL for (int j = 0; j < 4; j++) dot[i][j] = multiply_add(a[i], b[j], dot[i][j]);
        }
        __syncthreads();  // before the slices are filled again
    }
}

// acc[c] += weight times rows first .. first + 64 of `from`, columns 64 c .. of the head. The first
// barrier also shows what other threads wrote to weight; the last lets them write it again.
template <int C, class T>
__device__ void mix(Acc<T> (&acc)[C][4][4], const Acc<T>* weight, Acc<T>* slice, Head<const T> from, i64 first,
                    i64 dim) {
    UNROLL for (int c = 0; c < C; c++) {
        if ((i64)c * COLS >= dim) break;
        for (int z0 = 0; z0 < COLS && (z0 == 0 || first + z0 < from.len); z0 += SLICE) {
            for (int e = threadIdx.x; e < SLICE * COLS; e += THREADS) {
                i64 row = first + z0 + e / COLS, col = c * COLS + e % COLS;
                bool inside = row < from.len && col < dim;
                slice[e / COLS * (COLS + 1) + e % COLS] = inside ? widen(from.at[row * from.stride + col]) : (Acc<T>)0;
            }
            __syncthreads();
            UNROLL_SOME for (int z = 0; z < SLICE; z++) {
                Acc<T> a[4];
                UNROLL for (int i = 0; i < 4; i++) a[i] = weight[(down() + 8 * i) * (COLS + 1) + z0 + z];
                UNROLL for (int j = 0; j < 4; j++) {
                    if (c * COLS + 16 * j >= dim) break;
                    Acc<T> b = slice[z * (COLS + 1) + across() + 16 * j];
                    UNROLL for (int i = 0; i < 4; i++) acc[c][i][j] = multiply_add(a[i], b, acc[c][i][j]);
                }
            }
            __syncthreads();
        }
    }
}

// Calls body(i, j) of each element of a thread's part of a tile.
template <class Body> __device__ inline void each(Body body) {
    UNROLL for (int i = 0; i < 4; i++)
        UNROLL for (int j = 0; j < 4; j++) body(i, j);
}

// Calls body(address, value) of each element of the rows that a thread has, within the edges.
template <int C, class T, class A, class Body>
__device__ inline void each_of(Head<T> to, i64 first, i64 dim, A (&acc)[C][4][4], Body body) {
    UNROLL for (int i = 0; i < 4; i++) {
        i64 row = first + down() + 8 * i, cols = dim - across();
        if (row >= to.len) continue;
        T* at = to.at + row * to.stride + across();
        UNROLL for (int c = 0; c < C; c++)
            UNROLL for (int j = 0; j < 4; j++)
                if (c * COLS + 16 * j < cols) body(at + c * COLS + 16 * j, acc[c][i][j], i);
    }
}

template <class A> __device__ inline A larger(A m, A x) { return x > m ? x : m; }
template <class A> __device__ inline A minus_infinity() { return (A)-__uint_as_float(0x7f800000u); }

// o (T, or Acc where STEP) and its statistics: lse, or the carry's max and sum.
template <class T, int C, bool STEP, class O>
__device__ void forward(const Call& call, const T* q, const T* k, const T* v, O* o, Acc<T>* max_or_lse, Acc<T>* sums) {
    typedef Acc<T> A;
    SHARED(A, row_slice, SLICE*(ROWS + 1));
    SHARED(A, col_slice, SLICE*(COLS + 1));
    SHARED(A, weight, ROWS*(COLS + 1));
    i64 tiles = (call.queries + ROWS - 1) / ROWS, dim = call.dim;
    i64 first = blockIdx.x % tiles * ROWS, bh = blockIdx.x / tiles, b = bh / call.heads, h = bh % call.heads;
    i64 g = h / (call.heads / call.kv_heads);
    Head<const T> q_rows = head_of(q, b, call.queries, call.heads, h, dim);
    Head<const T> k_rows = head_of(k, b, call.keys, call.kv_heads, g, dim);
    Head<const T> v_rows = head_of(v, b, call.keys, call.kv_heads, g, dim);
    Head<O> o_rows = head_of(o, b, call.queries, call.heads, h, dim);
    Words draws = draws_of(call.dropout, b, call.first_head + h);
    Token query[4];
    A top[4], sum[4], acc[C][4][4] = {};
    UNROLL for (int i = 0; i < 4; i++) {
        i64 s = first + down() + 8 * i;
        query[i] = token(call.q, b, s);
        top[i] = minus_infinity<A>();
        sum[i] = 0;
        if (STEP && s < call.queries) sum[i] = sums[bh * call.queries + s];
        if (sum[i] > 0) top[i] = max_or_lse[bh * call.queries + s];
    }
    if constexpr (STEP) {
        each_of(o_rows, first, dim, acc, [&](A* at, A& value, int i) {
            if (sum[i] > 0) value = *at;
        });
    }
    for (i64 z0 = 0; z0 < call.keys; z0 += COLS) {
        Token key[4];
        bool any = false;
        UNROLL for (int j = 0; j < 4; j++) key[j] = token(call.k, b, z0 + across() + 16 * j);
        each([&](int i, int j) { any |= sees(call, query[i], key[j]); });
        if (!__syncthreads_or(any)) continue;
        A s[4][4];
        dots<T>(s, row_slice, col_slice, q_rows, first, k_rows, z0, dim);
        u32 stay = staying<16>(call.dropout, draws, [&](int e) {
            return place_of(call, b, first + part_row(e), z0 + part_col(e));
        });
        UNROLL for (int i = 0; i < 4; i++) {
            A m = top[i], part = 0;
            UNROLL for (int j = 0; j < 4; j++) {
                s[i][j] = sees(call, query[i], key[j]) ? scored(call, s[i][j]) : minus_infinity<A>();
                m = larger(m, s[i][j]);
            }
            for (int far = 8; far > 0; far /= 2) m = larger(m, __shfl_xor_sync(FULL_WARP, m, far));
            // Of a row that has seen nothing yet: minus infinity less itself would be no number.
            A base = m == minus_infinity<A>() ? 0 : m, fade = exponential(top[i] - base);
            UNROLL for (int j = 0; j < 4; j++) {
                A w = exponential(s[i][j] - base);
                part += w;
                weight[(down() + 8 * i) * (COLS + 1) + across() + 16 * j] = w * left_of<A>(call, stay, 4 * i + j);
            }
            for (int far = 8; far > 0; far /= 2) part += __shfl_xor_sync(FULL_WARP, part, far);
            top[i] = m;
            sum[i] = sum[i] * fade + part;
            UNROLL for (int c = 0; c < C; c++)
                UNROLL for (int j = 0; j < 4; j++) acc[c][i][j] *= fade;
        }
        mix<C, T>(acc, weight, col_slice, v_rows, z0, dim);
    }
    each_of(o_rows, first, dim, acc, [&](O* at, A value, int i) {
        if constexpr (STEP) *at = value;
        else *at = narrow<O>(sum[i] > 0 ? value * (1 / sum[i]) + 0 : 0);
    });
    // The sixteen threads of a row have read its carry; where no key is seen no barrier has parted that from
    // what follows.
    if (STEP) __syncwarp();
    UNROLL for (int i = 0; i < 4; i++) {
        i64 s = first + down() + 8 * i;
        if (across() != 0 || s >= call.queries) continue;
        if (STEP) sums[bh * call.queries + s] = sum[i];
        A lse = sum[i] > 0 ? top[i] + logarithm(sum[i]) : minus_infinity<A>();
        max_or_lse[bh * call.queries + s] = STEP ? top[i] : lse;
    }
}

// One thread an element.
template <class T>
__device__ void finish(const Acc<T>* acc, const Acc<T>* max, const Acc<T>* sums, T* o, Acc<T>* lse, i64 queries,
                       i64 heads, i64 dim, i64 n) {
    i64 at = first_element<1>();
    if (at >= n) return;
    i64 row = at / dim, stat = (row / heads / queries * heads + row % heads) * queries + row / heads % queries;
    Acc<T> sum = sums[stat];
    o[at] = narrow<T>(sum > 0 ? acc[at] * (1 / sum) + 0 : 0);
    if (at % dim == 0) lse[stat] = sum > 0 ? max[stat] + logarithm(sum) : minus_infinity<Acc<T>>();
}

// One thread a row: the chain of dots, so that <do, v> has the same bits where o is v.
template <class T>
__device__ void delta(const T* dout, const T* o, Acc<T>* delta, i64 queries, i64 heads, i64 dim, i64 rows) {
    i64 row = first_element<1>();
    if (row >= rows) return;
    Acc<T> sum = 0;
    for (i64 d = 0; d < dim; d++) sum = multiply_add(widen(dout[row * dim + d]), widen(o[row * dim + d]), sum);
    delta[(row / heads / queries * heads + row % heads) * queries + row / heads % queries] = sum;
}

template <class T, int C, bool ADD, class O>
__device__ void backward_q(const Call& call, const T* q, const T* k, const T* v, const T* dout, const Acc<T>* lse,
                           const Acc<T>* delta, O* dq) {
    typedef Acc<T> A;
    SHARED(A, row_slice, SLICE*(ROWS + 1));
    SHARED(A, col_slice, SLICE*(COLS + 1));
    SHARED(A, weight, ROWS*(COLS + 1));
    i64 tiles = (call.queries + ROWS - 1) / ROWS, dim = call.dim;
    i64 first = blockIdx.x % tiles * ROWS, bh = blockIdx.x / tiles, b = bh / call.heads, h = bh % call.heads;
    i64 g = h / (call.heads / call.kv_heads);
    Head<const T> q_rows = head_of(q, b, call.queries, call.heads, h, dim);
    Head<const T> do_rows = head_of(dout, b, call.queries, call.heads, h, dim);
    Head<const T> k_rows = head_of(k, b, call.keys, call.kv_heads, g, dim);
    Head<const T> v_rows = head_of(v, b, call.keys, call.kv_heads, g, dim);
    Words draws = draws_of(call.dropout, b, call.first_head + h);
    Token query[4];
    A log_sum[4], pull[4], acc[C][4][4] = {};
    UNROLL for (int i = 0; i < 4; i++) {
        i64 s = first + down() + 8 * i;
        query[i] = token(call.q, b, s);
        log_sum[i] = s < call.queries ? lse[bh * call.queries + s] : (A)0;
        pull[i] = s < call.queries ? delta[bh * call.queries + s] : (A)0;
    }
    for (i64 z0 = 0; z0 < call.keys; z0 += COLS) {
        Token key[4];
        bool any = false;
        UNROLL for (int j = 0; j < 4; j++) key[j] = token(call.k, b, z0 + across() + 16 * j);
        each([&](int i, int j) { any |= sees(call, query[i], key[j]); });
        if (!__syncthreads_or(any)) continue;
        A s[4][4], dp[4][4];
        dots<T>(s, row_slice, col_slice, q_rows, first, k_rows, z0, dim);
        dots<T>(dp, row_slice, col_slice, do_rows, first, v_rows, z0, dim);
        u32 stay = staying<16>(call.dropout, draws, [&](int e) {
            return place_of(call, b, first + part_row(e), z0 + part_col(e));
        });
        each([&](int i, int j) {
            A score = scored(call, s[i][j]), ds = 0;
            dp[i][j] *= left_of<A>(call, stay, 4 * i + j);
            if (sees(call, query[i], key[j]))
                ds = exponential(score - log_sum[i]) * slope(call, score) * (dp[i][j] - pull[i]);
            weight[(down() + 8 * i) * (COLS + 1) + across() + 16 * j] = ds;
        });
        mix<C, T>(acc, weight, col_slice, k_rows, z0, dim);
    }
    Head<O> dq_rows = head_of(dq, b, call.queries, call.heads, h, dim);
    each_of(dq_rows, first, dim, acc, [&](O* at, A value, int) { *at = narrow<O>(value + (ADD ? widen(*at) : 0)); });
}

// Columns of dk and dv of a block, in units of 64: those of both lie in registers.
__device__ constexpr int own_columns(int c) { return c < 2 ? c : 2; }

template <class T, int C, bool ADD, class O>
__device__ void backward_kv(const Call& call, const T* q, const T* k, const T* v, const T* dout, const Acc<T>* lse,
                            const Acc<T>* delta, O* dk, O* dv) {
    typedef Acc<T> A;
    SHARED(A, row_slice, SLICE*(ROWS + 1));
    SHARED(A, col_slice, SLICE*(COLS + 1));
    SHARED(A, weight, ROWS*(COLS + 1));
    constexpr int OWN = own_columns(C), PARTS = C / OWN;
    i64 tiles = (call.keys + ROWS - 1) / ROWS, dim = call.dim, group = call.heads / call.kv_heads;
    i64 part = blockIdx.x / PARTS, bg = part / tiles, b = bg / call.kv_heads, g = bg % call.kv_heads;
    i64 first = part % tiles * ROWS, c0 = blockIdx.x % PARTS * OWN * COLS;
    if (c0 >= dim) return;
    Head<const T> k_rows = head_of(k, b, call.keys, call.kv_heads, g, dim);
    Head<const T> v_rows = head_of(v, b, call.keys, call.kv_heads, g, dim);
    Token key[4];
    A dk_acc[OWN][4][4] = {}, dv_acc[OWN][4][4] = {};
    UNROLL for (int i = 0; i < 4; i++) key[i] = token(call.k, b, first + down() + 8 * i);
    for (i64 h = g * group; h < (g + 1) * group; h++) {
        Head<const T> q_rows = head_of(q, b, call.queries, call.heads, h, dim);
        Head<const T> do_rows = head_of(dout, b, call.queries, call.heads, h, dim);
        i64 stat = (b * call.heads + h) * call.queries;
        Words draws = draws_of(call.dropout, b, call.first_head + h);
        for (i64 s0 = 0; s0 < call.queries; s0 += COLS) {
            Token query[4];
            bool any = false;
            UNROLL for (int j = 0; j < 4; j++)
                query[j] = token(call.q, b, s0 + across() + 16 * j);
            each([&](int i, int j) { any |= sees(call, query[j], key[i]); });
            if (!__syncthreads_or(any)) continue;
            A s[4][4], dp[4][4];
            dots<T>(s, row_slice, col_slice, k_rows, first, q_rows, s0, dim);
            dots<T>(dp, row_slice, col_slice, v_rows, first, do_rows, s0, dim);
            u32 stay = staying<16>(call.dropout, draws, [&](int e) {
                return place_of(call, b, s0 + part_col(e), first + part_row(e));
            });
            each([&](int i, int j) {
                A score = scored(call, s[i][j]), p = 0;
                s[i][j] = 0;
                if (sees(call, query[j], key[i])) {
                    i64 at = stat + s0 + across() + 16 * j;
                    A left = left_of<A>(call, stay, 4 * i + j);
                    p = exponential(score - lse[at]);
                    s[i][j] = p * slope(call, score) * (dp[i][j] * left - delta[at]);
                    p *= left;
                }
                weight[(down() + 8 * i) * (COLS + 1) + across() + 16 * j] = p;
            });
            mix<OWN, T>(dv_acc, weight, col_slice, from_column(do_rows, c0), s0, dim - c0);
            each([&](int i, int j) { weight[(down() + 8 * i) * (COLS + 1) + across() + 16 * j] = s[i][j]; });
            mix<OWN, T>(dk_acc, weight, col_slice, from_column(q_rows, c0), s0, dim - c0);
        }
    }
    auto give = [](O* at, A value, int) { *at = narrow<O>(value + (ADD ? widen(*at) : 0)); };
    Head<O> dk_rows = head_of(dk, b, call.keys, call.kv_heads, g, dim);
    Head<O> dv_rows = head_of(dv, b, call.keys, call.kv_heads, g, dim);
    each_of(from_column(dk_rows, c0), first, dim - c0, dk_acc, give);
    each_of(from_column(dv_rows, c0), first, dim - c0, dv_acc, give);
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
            causal, (double)scale, (double)cap, {least, site, left, (u64)seed, (u64)step, (u64)sample}, first_head     \
    }

#define BY_WIDTH(T, C, t)                                                                                           \
    KERNEL(BOUNDS, attention_##t##_##C)                                                                                \
    (const T* q, const T* k, const T* v, T* o, Acc<T>* lse, CALL_PARAMS) {                                          \
        forward<T, C, false>(CALL, q, k, v, o, lse, (Acc<T>*)0);                                                    \
    }                                                                                                               \
    KERNEL(BOUNDS, attention_step_##t##_##C)                                                                           \
    (const T* q, const T* k, const T* v, Acc<T>* acc, Acc<T>* max, Acc<T>* sum, CALL_PARAMS) {                      \
        forward<T, C, true>(CALL, q, k, v, acc, max, sum);                                                          \
    }                                                                                                               \
    KERNEL(BOUNDS, attention_backward_q_##t##_##C)                                                                     \
    (const T* q, const T* k, const T* v, const T* dout, const Acc<T>* lse, const Acc<T>* delta, T* dq,              \
     CALL_PARAMS) {                                                                                                 \
        backward_q<T, C, false>(CALL, q, k, v, dout, lse, delta, dq);                                               \
    }                                                                                                               \
    KERNEL(BOUNDS, attention_backward_step_q_##t##_##C)                                                                \
    (const T* q, const T* k, const T* v, const T* dout, const Acc<T>* lse, const Acc<T>* delta, Acc<T>* dq,         \
     CALL_PARAMS) {                                                                                                 \
        backward_q<T, C, true>(CALL, q, k, v, dout, lse, delta, dq);                                                \
    }                                                                                                               \
    KERNEL(BOUNDS, attention_backward_kv_##t##_##C)                                                                    \
    (const T* q, const T* k, const T* v, const T* dout, const Acc<T>* lse, const Acc<T>* delta, T* dk, T* dv,       \
     CALL_PARAMS) {                                                                                                 \
        backward_kv<T, C, false>(CALL, q, k, v, dout, lse, delta, dk, dv);                                          \
    }                                                                                                               \
    KERNEL(BOUNDS, attention_backward_step_kv_##t##_##C)                                                               \
    (const T* q, const T* k, const T* v, const T* dout, const Acc<T>* lse, const Acc<T>* delta, Acc<T>* dk,         \
     Acc<T>* dv, CALL_PARAMS) {                                                                                     \
        backward_kv<T, C, true>(CALL, q, k, v, dout, lse, delta, dk, dv);                                           \
    }

#define ATTENTION(T, t)                                                                                              \
    BY_WIDTH(T, 1, t)                                                                                                \
    BY_WIDTH(T, 2, t)                                                                                                \
    BY_WIDTH(T, 4, t)                                                                                                \
    KERNEL(256, attention_finish_##t)                                                                                \
    (const Acc<T>* acc, const Acc<T>* max, const Acc<T>* sum, T* o, Acc<T>* lse, i64 queries, i64 heads, i64 dim,    \
     i64 n) {                                                                                                        \
        finish<T>(acc, max, sum, o, lse, queries, heads, dim, n);                                                    \
    }                                                                                                                \
    KERNEL(256, attention_delta_##t)                                                                                 \
    (const T* dout, const T* o, Acc<T>* delta_bhs, i64 queries, i64 heads, i64 dim, i64 rows) {                      \
        delta<T>(dout, o, delta_bhs, queries, heads, dim, rows);                                                     \
    }

ATTENTION(float, f32)
ATTENTION(double, f64)
ATTENTION(bf16, bf16)
