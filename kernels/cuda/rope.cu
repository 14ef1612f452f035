// RoPE in place, half-split form: of the first 2 half elements of a head, element i of the first
// half and element i of the second turn, (a, b) -> (a cos - b sin, a sin + b cos), at the angle
// pos frequency[i] with frequency[i] = theta^(-i/half), which the host works out once. Elements
// after them stay.
//
//   backward   the turn by the negative angle (sign = -1)
//   shapes     x: rows x heads x head_dim     pos: rows     frequency: half, f64
//   block      256 threads over rows x half; a thread turns its pair of all heads of a token, so
//              sine and cosine are taken once
//
// The angle is taken in f64 and brought into one turn there, so far positions turn as exactly as
// near ones; only then is it rounded.

__device__ inline void sine_cosine(float x, float* s, float* c) { sincosf(x, s, c); }
__device__ inline void sine_cosine(double x, double* s, double* c) { sincos(x, s, c); }

template <class T>
__device__ void rope(T* x, const int* pos, const double* frequency, i64 rows, i64 heads, i64 head_dim, i64 half,
                     int sign) {
    i64 at = first_element<1>();
    if (at >= rows * half) return;
    i64 t = at / half, i = at % half;
    double angle = sign * pos[t] * frequency[i];
    const double turn = 6.283185307179586, turn_low = 2.4492935982947064e-16;
    double turns = rint(angle / turn);
    angle = fma(-turns, turn_low, fma(-turns, turn, angle));
    Acc<T> sin, cos;
    sine_cosine((Acc<T>)angle, &sin, &cos);
    for (i64 h = 0; h < heads; h++) {
        T* pair = x + (t * heads + h) * head_dim + i;
        Acc<T> a = widen(pair[0]), b = widen(pair[half]);
        pair[0] = narrow<T>(a * cos - b * sin);
        pair[half] = narrow<T>(a * sin + b * cos);
    }
}

#define ROPE(T, t)                                                                                            \
    KERNEL(256, rope_##t)                                                                                     \
    (T* x, const int* pos, const double* frequency, i64 rows, i64 heads, i64 head_dim, i64 half, int sign) {  \
        rope<T>(x, pos, frequency, rows, heads, head_dim, half, sign);                                        \
    }

ROPE(float, f32)
ROPE(double, f64)
ROPE(bf16, bf16)
