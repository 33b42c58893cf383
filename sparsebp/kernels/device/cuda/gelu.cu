// GELU, x times a probability, and its gradient: one pass over memory each, a thread an element.

#include "common.cuh"

constexpr real ROOT = real(0.7978845608028654), CUBE = real(0.044715);  // sqrt(2 / pi)
constexpr real HALF_ROOT = real(0.7071067811865476), DENSITY = real(0.3989422804014327);

__device__ __forceinline__ float tail_of(float z) { return erfcf(z); }
__device__ __forceinline__ double tail_of(double z) { return erfc(z); }
__device__ __forceinline__ float steep_of(float x) { return tanhf(x); }
__device__ __forceinline__ double steep_of(double x) { return tanh(x); }

__device__ __forceinline__ real probability(real x, bool approximate) {
    if (approximate) return real(0.5) + real(0.5) * steep_of(ROOT * (x + CUBE * x * x * x));
    return real(0.5) * tail_of(-HALF_ROOT * x);
}

extern "C" __global__ void __launch_bounds__(256) gelu(
    const real* __restrict__ x, int approximate, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = x[i] * probability(x[i], approximate);
}

extern "C" __global__ void __launch_bounds__(256) gelu_grad(
    const real* __restrict__ gy, const real* __restrict__ x, int approximate, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const real v = x[i], p = probability(v, approximate);
    if (approximate) {
        const real square = real(1e4) < v * v ? real(1e4) : v * v;  // from there on p is 0 or 1 to the last digit
        const real density = real(2) * p * (real(1) - p) * ROOT * (real(1) + real(3) * CUBE * square);
        out[i] = gy[i] * (p + v * density);
    } else {
        out[i] = gy[i] * (p + v * DENSITY * exp_of(real(-0.5) * v * v));
    }
}
