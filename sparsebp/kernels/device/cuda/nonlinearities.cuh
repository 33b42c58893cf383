// The nonlinearities of the recurrences.
//
// They lie on the one chain of a recurrence, so their latency counts. In float32 the hardware's exponential and reciprocal
// (errors of 2 ulp and 1 ulp) replace the library's versions, whose range reductions and branches double the time.

__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ double sigmoid_of(double x) { return 1 / (1 + exp(-x)); }

// Within 3 ulp: 1 - 2 / (exp(2 |x|) + 1) with the sign of x, and near zero a polynomial. Which of the two, and the sign,
// go into the last multiply-add: they are known long before the exponential, and nothing but it is waited for. The
// exponential is 2 to the power of 2 |x| / log 2, which saves a doubling.
__device__ __forceinline__ float tanh_of(float x) {
    const float size = fabsf(x), square = x * x, sign = copysignf(1.f, x);
    float small = -5.895158276e-3f;  // tanh(x) = x + x^3 q(x^2) for |x| <= 0.6, minimax, 0.75 ulp
    small = small * square + 2.079597116e-2f;
    small = small * square - 5.378383026e-2f;
    small = small * square + 1.333192437e-1f;
    small = small * square - 3.333329856e-1f;
    small = small * square * x + x;
    const bool near = size < 0.6f;
    const float factor = near ? 0.f : -2 * sign, term = near ? small : sign;
    // NaN stays NaN; an infinite divisor gives the sign.
    return __fdividef(1.f, exp2f(2.885390082f * size) + 1) * factor + term;
}

// Relative error about 2e-7 (1 + |x|); where exp(-x) overflows the result is 0.
__device__ __forceinline__ float sigmoid_of(float x) { return __fdividef(1.f, 1 + __expf(-x)); }
