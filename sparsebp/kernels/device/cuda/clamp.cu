// Cutting off at two values, and its gradient: one pass over memory each, a thread an element.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) clamp(
    const real* __restrict__ x, real low, real high, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const real above = x[i] < low ? low : x[i];  // a NaN stays
    out[i] = above > high ? high : above;
}

extern "C" __global__ void __launch_bounds__(256) clamp_grad(
    const real* __restrict__ gy, const real* __restrict__ y, real low, real high, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = y[i] <= low || y[i] > high ? real(0) : gy[i];  // a NaN lets it through
}
