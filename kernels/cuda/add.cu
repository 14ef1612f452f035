// add        x[i] += y[i], rounded once.                       x, y: n
// add_rows   db[d] += sum over t of dy[t, d]: a bias's gradient.   dy: rows x dim; db: dim, Acc
//
//   add        256 threads, V elements each: 16 bytes, or one where that does not fit
//   add_rows   a block takes 32 columns, 32 threads each:
//
//              row 0   ty = 0 |  thread (tx, ty) sums rows ty, ty + 32, ... of column tx,
//              row 1   ty = 1 |  then thread (tx, 0) adds the 32 sums in order of ty
//
// The order of each sum depends on the number of rows alone.

template <class T, int V> __device__ void add(T* x, const T* y, i64 n) {
    i64 i = first_element<V>();
    if (i >= n) return;
    Pack<T, V> xs = load<T, V>(x + i), ys = load<T, V>(y + i);
    for (int k = 0; k < V; k++) xs.at[k] = narrow<T>(widen(xs.at[k]) + widen(ys.at[k]));
    store(x + i, xs);
}

template <class T> __device__ void add_rows(const T* dy, Acc<T>* db, i64 rows, i64 dim) {
    SHARED(Acc<T>, part, 32 * 33);
    u32 tx = threadIdx.x, ty = threadIdx.y;
    i64 d = (i64)blockIdx.x * 32 + tx;
    Acc<T> sum = 0;
    if (d < dim)
        for (i64 t = ty; t < rows; t += 32) sum += widen(dy[t * dim + d]);
    part[ty * 33 + tx] = sum;
    __syncthreads();
    if (ty != 0 || d >= dim) return;
    for (u32 k = 1; k < 32; k++) sum += part[k * 33 + tx];
    db[d] += sum;
}

#define ADD(T, V, t) \
    KERNEL(256, add_##t)(T* x, const T* y, i64 n) { add<T, V>(x, y, n); }
#define ADD_ROWS(T, t) \
    KERNEL(1024, add_rows_##t)(const T* dy, Acc<T>* db, i64 rows, i64 dim) { add_rows<T>(dy, db, rows, dim); }

ADD(float, 1, f32)
ADD(double, 1, f64)
ADD(bf16, 1, bf16)
ADD(float, 4, f32_wide)
ADD(double, 2, f64_wide)
ADD(bf16, 8, bf16_wide)
ADD_ROWS(float, f32)
ADD_ROWS(double, f64)
ADD_ROWS(bf16, bf16)
