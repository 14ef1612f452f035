// Dropout of rows: x[r, d] times what is left of it, in place.
//
//   left       1 / (1 - share), or 0, by the place of the row in its sample and the column
//   shapes     x: rows x width     at: rows, the place of each row in its sample
//              row r belongs to sequence (first + r) / len of the microbatch
//   block      256 threads, four neighbours of a row each: they share their draws

template <class T>
__device__ void dropout(T* x, const int* at, i64 rows, i64 width, i64 first, i64 len, const Dropout& of) {
    i64 fours = (width + 3) / 4, number = first_element<1>();
    if (number >= rows * fours) return;
    i64 r = number / fours, column = number % fours * 4;
    Words draws = draws_of(of, (first + r) / len, 0);
    for (i64 d = column; d < column + 4 && d < width; d++) {
        bool stay = stays(of, draws, {(u32)at[r], (u32)d});
        x[r * width + d] = narrow<T>(stay ? widen(x[r * width + d]) * (Acc<T>)of.scale : 0);
    }
}

#define DROPOUT(T, t)                                                                                            \
    KERNEL(256, dropout_##t)                                                                                     \
    (T* x, const int* at, i64 rows, i64 width, i64 first, i64 len, u32 least, u32 site, double left, i64 seed,   \
     i64 step, i64 sample) {                                                                                     \
        dropout<T>(x, at, rows, width, first, len, {least, site, left, (u64)seed, (u64)step, (u64)sample});      \
    }

DROPOUT(float, f32)
DROPOUT(double, f64)
DROPOUT(bf16, bf16)
