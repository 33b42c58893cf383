// Linear recurrences, element by element, and their gradients: a thread a unit of a sample, down the steps. Bound by
// memory where there are as many units as the device has threads; else by the time that loads take, which do not wait for
// the step before: several steps are loaded ahead.
//
// Few units and many steps are cut into chunks of steps (Martin & Cundy 2018, arXiv:1709.04057), in three launches: every
// chunk is reduced to its map, state -> P state + v; the maps are combined, which gives the state before each chunk; and
// the chunks run as one would alone, side by side. What is read is read twice.
//
// PAIRS = 1: a number is complex, the real part and the imaginary one side by side.
//
// The 1 of launch bounds: left to itself, ptxas aims at more blocks a multiprocessor, and spills.

#include "common.cuh"

constexpr int AHEAD = 8;
constexpr int PIECE = 64;  // steps whose products are added up before they join a sum over the steps

#if PAIRS
struct Number {
    real re, im;
};
__device__ __forceinline__ Number load(const real* p, int64 i) { return {p[2 * i], p[2 * i + 1]}; }
__device__ __forceinline__ void store(real* p, int64 i, Number x) { p[2 * i] = x.re, p[2 * i + 1] = x.im; }
__device__ __forceinline__ Number plus(Number x, Number y) { return {x.re + y.re, x.im + y.im}; }
__device__ __forceinline__ Number times(Number x, Number y) {
    return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}
__device__ __forceinline__ Number conj(Number x) { return {x.re, -x.im}; }
__device__ __forceinline__ Number zero() { return {real(0), real(0)}; }
__device__ __forceinline__ Number one() { return {real(1), real(0)}; }
__device__ __forceinline__ bool is_finite(Number x) { return x.re - x.re == 0 && x.im - x.im == 0; }
#else
typedef real Number;
__device__ __forceinline__ Number load(const real* p, int64 i) { return p[i]; }
__device__ __forceinline__ void store(real* p, int64 i, Number x) { p[i] = x; }
__device__ __forceinline__ Number plus(Number x, Number y) { return x + y; }
__device__ __forceinline__ Number times(Number x, Number y) { return x * y; }
__device__ __forceinline__ Number conj(Number x) { return x; }
__device__ __forceinline__ Number zero() { return 0; }
__device__ __forceinline__ Number one() { return 1; }
__device__ __forceinline__ bool is_finite(Number x) { return x - x == 0; }
#endif

// The recurrence of one thread: `element` is its unit of its sample, counted over both; its steps, in their order, lie at
// `element + first + i * apart`, and the factors at `factor + i * factors_apart`.
struct Chain {
    int64 element, first, apart, factor, factors_apart, steps;
};

// Of all recurrences: `count` units of samples, in `chunks` chunks of steps; how far the factors of neighbours lie apart.
struct Sizes {
    int64 of_step, of_sample, of_unit, steps, count, units;
    int reverse;
    int64 chunks;

    __device__ __forceinline__ Chain chain(int64 element, const int64* __restrict__ lengths) const {
        const int64 sample = element / units, own = lengths ? lengths[sample] : steps;
        const int64 at = sample * of_sample + element % units * of_unit;
        if (reverse) return {element, (own - 1) * count, -count, at + (own - 1) * of_step, -of_step, own};
        return {element, 0, count, at, of_step, own};
    }
};

// The steps of chunk `chunk`, from `begin` to `end` of all, and up to `stop` of this chain's own, in their order.
struct Part {
    int64 begin, end, stop;

    __device__ __forceinline__ Part(int64 chunk, const Sizes& of, int64 own)
        : begin(chunk * of.steps / of.chunks), end((chunk + 1) * of.steps / of.chunks), stop(end < own ? end : own) {}
};

// What a step of a recurrence reads: its factor, and what is added; on the way BACK b is gh.
struct Given {
    const real *__restrict__ a, *__restrict__ b;

    __device__ __forceinline__ Number factor(int64 from) const { return load(a, from); }
    template <bool BACK> __device__ __forceinline__ Number arriving(int64, int64 at) const { return load(b, at); }
};

#if !PAIRS
__device__ __forceinline__ real sigmoid(real x) { return real(1) / (real(1) + exp_of(-x)); }

__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }

// c(v) and its slope: 0 is v itself, 1 tanh(v), 2 v + 1/2 where v >= 0, else sigmoid(v).
__device__ __forceinline__ real candidate(int function, real v, real& slope) {
    slope = 1;
    if (function == 0) return v;
    if (function == 2 && v >= 0) return v + real(0.5);
    const real c = function == 1 ? tanh_of(v) : sigmoid(v);
    slope = function == 1 ? real(1) - c * c : c * (real(1) - c);
    return c;
}

// The minGRU: a = 1 - z and b = z * c(v), with z = sigmoid(u) and (u, v) a step's projected input.
struct Gated {
    const real *__restrict__ x, *__restrict__ gh;
    int64 units;
    int function;

    __device__ __forceinline__ real factor(int64 from) const { return real(1) - sigmoid(x[from]); }
    template <bool BACK> __device__ __forceinline__ real arriving(int64 from, int64 at) const {
        real slope;
        return BACK ? gh[at] : sigmoid(x[from]) * candidate(function, x[from + units], slope);
    }
};
#endif

// The state behind these steps, from `state` before them; or on the way BACK what is carried on to earlier ones. `product` is
// that of the factors met.
template <bool BACK, class Terms>
__device__ __forceinline__ Number run(
    const Terms& terms, const Chain& c, const Part& part, Number state, Number& product) {
    const int64 first = BACK ? part.stop - 1 : part.begin, way = BACK ? -1 : 1;
    int64 at = c.element + c.first + first * c.apart, from = c.factor + first * c.factors_apart;
#pragma unroll AHEAD
    for (int64 i = part.begin; i < part.stop; ++i) {
        const Number by = BACK ? conj(terms.factor(from)) : terms.factor(from);
        const Number arriving = terms.template arriving<BACK>(from, at);
        state = BACK ? times(by, plus(arriving, state)) : plus(times(by, state), arriving);
        product = times(by, product);
        at += way * c.apart, from += way * c.factors_apart;
    }
    return state;
}

template <class Terms>
__device__ __forceinline__ Number run(
    int back, const Terms& terms, const Chain& c, const Part& part, Number state, Number& product) {
    return back ? run<true>(terms, c, part, state, product) : run<false>(terms, c, part, state, product);
}

// First phase: products, ends (chunks - 1, count), the maps of all chunks but the one that nothing comes behind.
template <class Terms>
__device__ __forceinline__ void reduce(
    const Terms& terms, const int64* __restrict__ lengths, real* __restrict__ products, real* __restrict__ ends,
    const Sizes& of, int back) {
    const int64 thread = int64(blockIdx.x) * blockDim.x + threadIdx.x, map = thread / of.count;
    if (map >= of.chunks - 1) return;
    const Chain c = of.chain(thread % of.count, lengths);
    Number product = one();
    store(ends, thread, run(back, terms, c, Part(map + back, of, c.steps), zero(), product));
    store(products, thread, product);
}

// Second phase, a thread a chain: carries (chunks - 1, count) has the ends, and gets the states between chunks. h0: null on
// the way back; `back` is 0 or 1. A map that has overflowed, or meets an infinite state, says nothing: those chunks are run
// again, from their states.
template <class Terms>
__device__ __forceinline__ void combine(
    const Terms& terms, const real* __restrict__ h0, const int64* __restrict__ lengths,
    const real* __restrict__ products, real* __restrict__ carries, const Sizes& of, int back) {
    const int64 element = int64(blockIdx.x) * blockDim.x + threadIdx.x, chunks = of.chunks, count = of.count;
    if (element >= count) return;
    const Chain c = of.chain(element, lengths);
    Number state = h0 ? load(h0, element) : zero();
    for (int64 first = 0; first < chunks - 1; first += AHEAD) {
        const auto map_of = [&](int n) { return back ? chunks - 2 - first - n : first + n; };
        Number products_of[AHEAD], found[AHEAD], last = state;
#pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            const bool there = first + n < chunks - 1;
            products_of[n] = there ? load(products, map_of(n) * count + element) : one();
            found[n] = there ? load(carries, map_of(n) * count + element) : zero();
        }
        bool finite = true;
#pragma unroll
        for (int n = 0; n < AHEAD; ++n) {
            last = found[n] = plus(times(products_of[n], last), found[n]);
            finite = finite && is_finite(last);
        }
        if (finite) {
            state = last;
#pragma unroll
            for (int n = 0; n < AHEAD; ++n)
                if (first + n < chunks - 1) store(carries, map_of(n) * count + element, found[n]);
            continue;
        }
        for (int n = 0; n < AHEAD && first + n < chunks - 1; ++n) {
            Number product = one();
            state = run(back, terms, c, Part(map_of(n) + back, of, c.steps), state, product);
            store(carries, map_of(n) * count + element, state);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) linear_reduce(
    const real* __restrict__ a, const real* __restrict__ b, const int64* __restrict__ lengths,
    real* __restrict__ products, real* __restrict__ ends, int64 of_step, int64 of_sample, int64 of_unit, int64 steps,
    int64 count, int64 units, int reverse, int64 chunks, int back) {
    reduce(Given{a, b}, lengths, products, ends, {of_step, of_sample, of_unit, steps, count, units, reverse, chunks}, back);
}

extern "C" __global__ void __launch_bounds__(256) linear_combine(
    const real* __restrict__ a, const real* __restrict__ b, const real* __restrict__ h0,
    const int64* __restrict__ lengths, const real* __restrict__ products, real* __restrict__ carries, int64 of_step,
    int64 of_sample, int64 of_unit, int64 steps, int64 count, int64 units, int reverse, int64 chunks, int back) {
    const Sizes of{of_step, of_sample, of_unit, steps, count, units, reverse, chunks};
    combine(Given{a, b}, h0, lengths, products, carries, of, back);
}

// A thread a chain and chunk. carries: the states before all chunks but the first.
extern "C" __global__ void __launch_bounds__(256) linear_recurrence(
    const real* __restrict__ a, const real* __restrict__ b, const real* __restrict__ h0,
    const int64* __restrict__ lengths, real* __restrict__ h, const real* __restrict__ carries, int64 of_step,
    int64 of_sample, int64 of_unit, int64 steps, int64 count, int64 units, int reverse, int64 chunks) {
    const int64 thread = int64(blockIdx.x) * blockDim.x + threadIdx.x, chunk = thread / count, element = thread % count;
    if (chunk >= chunks) return;
    const Sizes of{of_step, of_sample, of_unit, steps, count, units, reverse, chunks};
    const Chain c = of.chain(element, lengths);
    const Part part(chunk, of, c.steps);
    Number state = chunk ? load(carries, thread - count) : load(h0, element);
    int64 at = element + c.first + part.begin * c.apart, factor = c.factor + part.begin * c.factors_apart;
#pragma unroll AHEAD
    for (int64 i = part.begin; i < part.stop; ++i) {
        state = plus(times(load(a, factor), state), load(b, at));
        store(h, at, state);
        at += c.apart, factor += c.factors_apart;
    }
    for (int64 t = max(part.begin, c.steps); t < part.end; ++t) store(h, element + t * count, zero());
}

// gb[t] = gh[t] + carried, where carried = conj(a[t+1]) * gb[t+1]; ga[t] = gb[t] * conj(h[t-1]), or the sum over t: with
// chunks, (chunks, count), that over each. carries: what comes into all chunks but the last.
extern "C" __global__ void __launch_bounds__(256, 1) linear_recurrence_grad(
    const real* __restrict__ a, const real* __restrict__ h, const real* __restrict__ gh, const real* __restrict__ h0,
    const int64* __restrict__ lengths, real* __restrict__ ga, real* __restrict__ gb, real* __restrict__ gh0,
    const real* __restrict__ carries, int64 of_step, int64 of_sample, int64 of_unit, int64 steps, int64 count,
    int64 units, int reverse, int64 chunks, int summed) {
    const int64 thread = int64(blockIdx.x) * blockDim.x + threadIdx.x, chunk = thread / count, element = thread % count;
    if (chunk >= chunks) return;
    const Sizes of{of_step, of_sample, of_unit, steps, count, units, reverse, chunks};
    const Chain c = of.chain(element, lengths);
    const Part part(chunk, of, c.steps);
    Number carried = chunk < chunks - 1 ? load(carries, thread) : zero(), total = zero(), piece = zero();
    int64 at = element + c.first + (part.stop - 1) * c.apart, factor = c.factor + (part.stop - 1) * c.factors_apart;
#pragma unroll AHEAD
    for (int64 i = part.stop - 1; i >= part.begin; --i) {
        const Number g = plus(load(gh, at), carried);
        const Number product = times(g, conj(i ? load(h, at - c.apart) : load(h0, element)));
        carried = times(conj(load(a, factor)), g);
        store(gb, at, g);
        if (!summed) store(ga, at, product);
        piece = plus(piece, product);
        if (i % PIECE == 0) total = plus(total, piece), piece = zero();
        at -= c.apart, factor -= c.factors_apart;
    }
    if (!chunk) store(gh0, element, carried);
    if (summed) store(ga, thread, plus(total, piece));
    for (int64 t = max(part.begin, c.steps); t < part.end; ++t) {
        store(gb, element + t * count, zero());
        if (!summed) store(ga, element + t * count, zero());
    }
}

#if !PAIRS
// As the kernels of given factors; what they read lies at x (steps, samples, 2 units).
__device__ __forceinline__ Sizes gated_sizes(int64 steps, int64 count, int64 units, int reverse, int64 chunks) {
    return {2 * count, 2 * units, 1, steps, count, units, reverse, chunks};
}

extern "C" __global__ void __launch_bounds__(256, 1) min_gru_reduce(
    const real* __restrict__ x, const real* __restrict__ gh, const int64* __restrict__ lengths,
    real* __restrict__ products, real* __restrict__ ends, int64 steps, int64 count, int64 units, int reverse,
    int64 chunks, int function, int back) {
    const Sizes of = gated_sizes(steps, count, units, reverse, chunks);
    reduce(Gated{x, gh, units, function}, lengths, products, ends, of, back);
}

extern "C" __global__ void __launch_bounds__(256, 1) min_gru_combine(
    const real* __restrict__ x, const real* __restrict__ gh, const real* __restrict__ h0,
    const int64* __restrict__ lengths, const real* __restrict__ products, real* __restrict__ carries, int64 steps,
    int64 count, int64 units, int reverse, int64 chunks, int function, int back) {
    const Sizes of = gated_sizes(steps, count, units, reverse, chunks);
    combine(Gated{x, gh, units, function}, h0, lengths, products, carries, of, back);
}

extern "C" __global__ void __launch_bounds__(256, 1) min_gru_forward(
    const real* __restrict__ x, const real* __restrict__ h0, const int64* __restrict__ lengths, real* __restrict__ h,
    const real* __restrict__ carries, int64 steps, int64 count, int64 units, int reverse, int64 chunks, int function) {
    const int64 thread = int64(blockIdx.x) * blockDim.x + threadIdx.x, chunk = thread / count, element = thread % count;
    if (chunk >= chunks) return;
    const Sizes of = gated_sizes(steps, count, units, reverse, chunks);
    const Chain c = of.chain(element, lengths);
    const Part part(chunk, of, c.steps);
    real state = chunk ? carries[thread - count] : h0[element], slope;
    int64 at = element + c.first + part.begin * c.apart, from = c.factor + part.begin * c.factors_apart;
#pragma unroll 4
    for (int64 i = part.begin; i < part.stop; ++i) {
        const real z = sigmoid(x[from]);
        state += z * (candidate(function, x[from + units], slope) - state);
        h[at] = state;
        at += c.apart, from += c.factors_apart;
    }
    for (int64 t = max(part.begin, c.steps); t < part.end; ++t) h[element + t * count] = 0;
}

extern "C" __global__ void __launch_bounds__(256, 1) min_gru_backward(
    const real* __restrict__ x, const real* __restrict__ h, const real* __restrict__ gh, const real* __restrict__ h0,
    const int64* __restrict__ lengths, real* __restrict__ gx, real* __restrict__ gh0, const real* __restrict__ carries,
    int64 steps, int64 count, int64 units, int reverse, int64 chunks, int function) {
    const int64 thread = int64(blockIdx.x) * blockDim.x + threadIdx.x, chunk = thread / count, element = thread % count;
    if (chunk >= chunks) return;
    const Sizes of = gated_sizes(steps, count, units, reverse, chunks);
    const Chain c = of.chain(element, lengths);
    const Part part(chunk, of, c.steps);
    real carried = chunk < chunks - 1 ? carries[thread] : real(0), slope;
    int64 at = element + c.first + (part.stop - 1) * c.apart, from = c.factor + (part.stop - 1) * c.factors_apart;
#pragma unroll 4
    for (int64 i = part.stop - 1; i >= part.begin; --i) {
        const real z = sigmoid(x[from]), made = candidate(function, x[from + units], slope);
        const real before = i ? h[at - c.apart] : h0[element], g = gh[at] + carried, rest = real(1) - z;
        gx[from] = g * z * (made - before) * rest;
        gx[from + units] = g * z * slope;
        carried = rest * g;
        at -= c.apart, from -= c.factors_apart;
    }
    if (!chunk) gh0[element] = carried;
    const int64 own = element / units * 2 * units + element % units;
    for (int64 t = max(part.begin, c.steps); t < part.end; ++t) gx[own + t * 2 * count] = gx[own + t * 2 * count + units] = 0;
}
#endif
