// What emitted loops of a compiled tape call: functions by the names that NumPy has for them, with its rules for NaN,
// zeros and signs. Loops are translated from Python, and say np::sqrt where that says np.sqrt.

#include "common.cuh"

namespace math {
__device__ __forceinline__ double inf() { return __longlong_as_double(0x7ff0000000000000LL); }
__device__ __forceinline__ double nan() { return __longlong_as_double(0x7ff8000000000000LL); }
__device__ __forceinline__ real erf(real x) { return ::erf(x); }
__device__ __forceinline__ real erfc(real x) { return ::erfc(x); }
}  // namespace math

namespace np {
#define ALIKE(RESULT, NAME, FUNCTION) \
    __device__ __forceinline__ RESULT NAME(real x) { return FUNCTION(x); }
ALIKE(real, sqrt, ::sqrt)
ALIKE(real, cbrt, ::cbrt)
ALIKE(real, exp, ::exp)
ALIKE(real, exp2, ::exp2)
ALIKE(real, expm1, ::expm1)
ALIKE(real, log, ::log)
ALIKE(real, log2, ::log2)
ALIKE(real, log10, ::log10)
ALIKE(real, log1p, ::log1p)
ALIKE(real, sin, ::sin)
ALIKE(real, cos, ::cos)
ALIKE(real, tan, ::tan)
ALIKE(real, arcsin, ::asin)
ALIKE(real, arccos, ::acos)
ALIKE(real, arctan, ::atan)
ALIKE(real, sinh, ::sinh)
ALIKE(real, cosh, ::cosh)
ALIKE(real, tanh, ::tanh)
ALIKE(real, arcsinh, ::asinh)
ALIKE(real, arccosh, ::acosh)
ALIKE(real, arctanh, ::atanh)
ALIKE(real, floor, ::floor)
ALIKE(real, ceil, ::ceil)
ALIKE(real, trunc, ::trunc)
ALIKE(real, rint, ::rint)
ALIKE(real, absolute, ::fabs)
ALIKE(bool, isfinite, ::isfinite)
ALIKE(bool, isinf, ::isinf)
ALIKE(bool, isnan, ::isnan)
ALIKE(bool, signbit, ::signbit)
#undef ALIKE

__device__ __forceinline__ real sign(real x) { return x > 0 ? real(1) : x < 0 ? real(-1) : x == 0 ? real(0) : x; }
__device__ __forceinline__ real power(real x, real y) { return ::pow(x, y); }
__device__ __forceinline__ real arctan2(real y, real x) { return ::atan2(y, x); }
__device__ __forceinline__ real hypot(real x, real y) { return ::hypot(x, y); }
__device__ __forceinline__ real copysign(real x, real y) { return ::copysign(x, y); }
__device__ __forceinline__ real fmod(real x, real y) { return ::fmod(x, y); }

__device__ __forceinline__ real remainder(real x, real y) {
    const real r = ::fmod(x, y);
    if (y == 0 || r != r) return r;
    if (r == 0) return ::copysign(real(0), y);
    return (y < 0) != (r < 0) ? r + y : r;
}

__device__ __forceinline__ real logaddexp(real x, real y) {
    if (x == y) return x + real(0.693147180559945309417232121458176568);  // infinities too
    const real d = x - y;
    return d > 0 ? x + ::log1p(::exp(-d)) : d <= 0 ? y + ::log1p(::exp(d)) : d;
}

__device__ __forceinline__ real logaddexp2(real x, real y) {
    if (x == y) return x + 1;
    const real d = x - y, log2e = real(1.442695040888963407359924681001892137);
    return d > 0 ? x + log2e * ::log1p(::exp2(-d)) : d <= 0 ? y + log2e * ::log1p(::exp2(d)) : d;
}

// Rounded by itself, never a part of a fused multiply-add: where a branch hangs on the result, it is NumPy's.
__device__ __forceinline__ float multiply(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double multiply(double x, double y) { return __dmul_rn(x, y); }
__device__ __forceinline__ int64 multiply(int64 x, int64 y) { return x * y; }
}  // namespace np

// The turn of a thread of `samples` turns at each index: neighbouring threads have neighbouring samples.
__device__ __forceinline__ int64 index_of(int64 turn, int64 samples) { return samples == 1 ? turn : turn / samples; }

// Sums of the parts order[ends[s]] … order[ends[s + 1] - 1], each by as many lanes, 1 or a warp, in the same order at every
// launch: added to out[to[s]], or stored in out[s] where there is no `to`. `count`: of lanes, of all sums and samples.
__device__ __forceinline__ void sum_parts(const real* parts, const unsigned* order, const unsigned* ends,
                                          const unsigned* to, real* out, int lanes, int64 samples, int64 count) {
    const int64 first = int64(blockIdx.x) * blockDim.x + threadIdx.x, step = int64(gridDim.x) * blockDim.x;
    const int lane = first % lanes;
    for (int64 turn = first / lanes; turn < count / lanes; turn += step / lanes) {
        const int64 s = index_of(turn, samples), b = turn - s * samples;
        real sum = 0;
        for (int64 k = int64(ends[s]) + lane; k < ends[s + 1]; k += lanes) sum += parts[order[k] * samples + b];
        if (lanes > 1) sum = warp_sum(sum);
        if (lane) continue;
        if (to) out[to[s] * samples + b] += sum;
        else out[turn] = sum;
    }
}
