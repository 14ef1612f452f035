// y[i] = x[i] in another storage type, rounded once to nearest, ties to even.
//
//   shapes   x, y: n, at their first element
//   block    256 threads, one element each
//
// f64 -> bf16 goes through an f32 that is rounded to odd: it keeps a trace of what was cut off, so
// that the second rounding sees which side of a tie it stands on.

template <class O, class I> struct Convert {
    __device__ static O of(I x) { return narrow<O>((Acc<O>)widen(x)); }
};

template <> struct Convert<bf16, double> {
    __device__ static bf16 of(double x) {
        float near = (float)x;
        u32 bits = __float_as_uint(near);
        bool finite = (bits & 0x7f800000u) != 0x7f800000u;
        if (finite && (double)near != x && !(bits & 1)) bits += fabs((double)near) < fabs(x) ? 1 : ~0u;
        return narrow<bf16>(__uint_as_float(bits));
    }
};

template <class I, class O> __device__ void cast(const I* x, O* y, i64 n) {
    i64 i = first_element<1>();
    if (i < n) y[i] = Convert<O, I>::of(x[i]);
}

#define CAST(I, O, name) \
    KERNEL(256, cast_##name)(const I* x, O* y, i64 n) { cast<I, O>(x, y, n); }

CAST(float, double, f32_f64)
CAST(float, bf16, f32_bf16)
CAST(double, float, f64_f32)
CAST(double, bf16, f64_bf16)
CAST(bf16, float, bf16_f32)
CAST(bf16, double, bf16_f64)
