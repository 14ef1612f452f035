KERNEL(256, cast_probe)(const float* x, bf16* y, i64 n) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = narrow<bf16>(x[i]);
}
