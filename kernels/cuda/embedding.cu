// Table lookup for a shard of the vocabulary, and its adjoint.
//
//   forward    y[t] = table[id[t] - first], zeros where the shard does not hold the token
//   backward   dtable[id[t] - first] += dy[t], in token order
//
//   shapes     id: tokens     table: rows x dim     dtable: rows x dim, Acc     y, dy: tokens x dim
//   forward    a block a token, 256 threads of V elements (16 bytes, or one where that does not fit)
//   backward   a block a token. The block of an id's first token adds all tokens of that id, 256 ids
//              at a time; the other blocks end. Thread d owns columns d, d + 256, ...
//
//              ids   7 3 7 9 7 ...     block 0: tokens 0, 2, 4     block 1: token 1     block 2: ends
//
// No row is touched by two blocks and each sum runs in token order: deterministic without atomics.

// The shard's row of a token, below 0 where it is not there.
__device__ inline i64 shard_row(int id, i64 first, i64 rows) {
    i64 row = (i64)id - first;
    return row < rows ? row : -1;
}

template <class T, int V>
__device__ void embedding(const int* id, const T* table, T* y, i64 first, i64 rows, i64 dim) {
    i64 t = blockIdx.x, row = shard_row(id[t], first, rows);
    for (i64 d = threadIdx.x * V; d < dim; d += blockDim.x * V) {
        Pack<T, V> pack = {};
        if (row >= 0) pack = load<T, V>(table + row * dim + d);
        store(y + t * dim + d, pack);
    }
}

template <class T>
__device__ void embedding_backward(
    const int* id, const T* dy, Acc<T>* dtable, i64 tokens, i64 first, i64 rows, i64 dim) {
    SHARED(u32, same, 8);
    i64 mine = blockIdx.x;
    int wanted = id[mine];
    i64 row = shard_row(wanted, first, rows);
    if (row < 0) return;
    bool seen = false;
    for (i64 t = threadIdx.x; t < mine; t += blockDim.x) seen |= id[t] == wanted;
    if (__syncthreads_or(seen)) return;
    for (i64 from = mine; from < tokens; from += 256) {
        i64 t = from + threadIdx.x;
        u32 found = __ballot_sync(FULL_WARP, t < tokens && id[t] == wanted);
        if (threadIdx.x % 32 == 0) same[threadIdx.x / 32] = found;
        __syncthreads();
        for (int k = 0; k < 8; k++) {
            for (u32 left = same[k]; left; left &= left - 1) {
                i64 token = from + 32 * k + __ffs((int)left) - 1;
                for (i64 d = threadIdx.x; d < dim; d += 256) dtable[row * dim + d] += widen(dy[token * dim + d]);
            }
        }
        __syncthreads();  // before the next words are written
    }
}

#define EMBEDDING(T, V, t)                                                                                      \
    KERNEL(256, embedding_##t)(const int* id, const T* table, T* y, i64 first, i64 rows, i64 dim) {             \
        embedding<T, V>(id, table, y, first, rows, dim);                                                        \
    }
#define EMBEDDING_BACKWARD(T, t)                                                                                \
    KERNEL(256, embedding_backward_##t)                                                                         \
    (const int* id, const T* dy, Acc<T>* dtable, i64 tokens, i64 first, i64 rows, i64 dim) {                    \
        embedding_backward<T>(id, dy, dtable, tokens, first, rows, dim);                                        \
    }

EMBEDDING(float, 1, f32)
EMBEDDING(double, 1, f64)
EMBEDDING(bf16, 1, bf16)
EMBEDDING(float, 4, f32_wide)
EMBEDDING(double, 2, f64_wide)
EMBEDDING(bf16, 8, bf16_wide)
EMBEDDING_BACKWARD(float, f32)
EMBEDDING_BACKWARD(double, f64)
EMBEDDING_BACKWARD(bf16, bf16)
