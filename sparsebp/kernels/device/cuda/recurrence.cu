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
// `element + first + i * apart`, the factors at `factor + i * factors_apart`, and resets, if any, at `flag + i * flags_apart`.
struct Chain {
    int64 element, first, apart, factor, factors_apart, steps, flag, flags_apart;
};

// How far the factors, or the resets, of neighbours lie apart.
struct Apart {
    int64 step, sample, unit;
};

// Of all recurrences: `count` units of samples, in `chunks` chunks of steps.
struct Sizes {
    Apart factors, flags;
    int64 steps, count, units;
    int reverse;
    int64 chunks;

    __device__ __forceinline__ Chain chain(int64 element, const int64* __restrict__ lengths) const {
        const int64 sample = element / units, own = lengths ? lengths[sample] : steps;
        const int64 unit = element % units, last = own - 1;
        const int64 at = sample * factors.sample + unit * factors.unit, flag = sample * flags.sample + unit * flags.unit;
        if (reverse)
            return {element, last * count, -count, at + last * factors.step, -factors.step, own,
                    flag + last * flags.step, -flags.step};
        return {element, 0, count, at, factors.step, own, flag, flags.step};
    }
};

// The steps of chunk `chunk`, from `begin` to `end` of all, and up to `stop` of this chain's own, in their order.
struct Part {
    int64 begin, end, stop;

    __device__ __forceinline__ Part(int64 chunk, const Sizes& of, int64 own)
        : begin(chunk * of.steps / of.chunks), end((chunk + 1) * of.steps / of.chunks), stop(end < own ? end : own) {}
};

// What a step of a recurrence reads: its factor, what is added, on the way BACK gh, and whether the state before is cleared.
struct Given {
    const real *__restrict__ a, *__restrict__ b;
    const unsigned char* __restrict__ reset;

    __device__ __forceinline__ bool clears(int64 flag) const { return reset && reset[flag]; }
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

// A step's z and 1 - z, and of a minLSTM the complements of its gates i and f.
struct Shares {
    real z, rest, shut_i, shut_f;
};

// sigmoid(p) and its complement, both with small relative error.
__device__ __forceinline__ real gate(real p, real& shut) {
    const real small = exp_of(p < 0 ? p : -p), large = real(1) / (real(1) + small), low = small * large;
    shut = p < 0 ? large : low;
    return p < 0 ? low : large;
}

// The minGRU: a = 1 - z and b = z * c(v), with z = sigmoid(u) and (u, v) a step's projected input. The minLSTM: three parts
// (p, q, v), z = i / (i + f) with i = sigmoid(p) and f = sigmoid(q).
struct Gated {
    const real *__restrict__ x, *__restrict__ gh;
    int64 units;
    int function, parts;

    __device__ __forceinline__ Shares shares(int64 from) const {
        if (parts == 2) {
            const real z = sigmoid(x[from]);
            return {z, real(1) - z, real(1), real(1)};
        }
        // Both may be as small as they like: below e⁻⁶⁰ a gate is eˣ, and both are scaled alike.
        const real p = x[from], q = x[from + units], most = (p > q ? p : q) + real(60), shift = most < 0 ? most : real(0);
        Shares found;
        const real i = gate(p - shift, found.shut_i), f = gate(q - shift, found.shut_f), share = real(1) / (i + f);
        found.z = i * share, found.rest = f * share;
        return found;
    }
    __device__ __forceinline__ int64 candidate_at(int64 from) const { return from + (parts - 1) * units; }
    __device__ __forceinline__ bool clears(int64) const { return false; }
    __device__ __forceinline__ real factor(int64 from) const { return shares(from).rest; }
    template <bool BACK> __device__ __forceinline__ real arriving(int64 from, int64 at) const {
        real slope;
        return BACK ? gh[at] : shares(from).z * candidate(function, x[candidate_at(from)], slope);
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
    int64 flag = c.flag + first * c.flags_apart;
#pragma unroll AHEAD
    for (int64 i = part.begin; i < part.stop; ++i) {
        const Number by = BACK ? conj(terms.factor(from)) : terms.factor(from);
        const bool clears = terms.clears(flag);
        const Number arriving = terms.template arriving<BACK>(from, at);
        if (clears) {
            state = BACK ? zero() : arriving, product = zero();
        } else {
            state = BACK ? times(by, plus(arriving, state)) : plus(times(by, state), arriving);
            product = times(by, product);
        }
        at += way * c.apart, from += way * c.factors_apart, flag += way * c.flags_apart;
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

#define GIVEN_SIZES                                                                                                     \
    const unsigned char *__restrict__ reset, int64 of_step, int64 of_sample, int64 of_unit, int64 reset_of_step,       \
        int64 reset_of_sample, int64 reset_of_unit
#define GIVEN_APART {of_step, of_sample, of_unit}, {reset_of_step, reset_of_sample, reset_of_unit}

extern "C" __global__ void __launch_bounds__(256) linear_reduce(
    const real* __restrict__ a, const real* __restrict__ b, const int64* __restrict__ lengths,
    real* __restrict__ products, real* __restrict__ ends, GIVEN_SIZES, int64 steps,
    int64 count, int64 units, int reverse, int64 chunks, int back) {
    reduce(Given{a, b, reset}, lengths, products, ends, {GIVEN_APART, steps, count, units, reverse, chunks}, back);
}

extern "C" __global__ void __launch_bounds__(256) linear_combine(
    const real* __restrict__ a, const real* __restrict__ b, const real* __restrict__ h0,
    const int64* __restrict__ lengths, const real* __restrict__ products, real* __restrict__ carries, GIVEN_SIZES, int64 steps, int64 count, int64 units, int reverse, int64 chunks, int back) {
    const Sizes of{GIVEN_APART, steps, count, units, reverse, chunks};
    combine(Given{a, b, reset}, h0, lengths, products, carries, of, back);
}

// A thread a chain and chunk. carries: the states before all chunks but the first.
extern "C" __global__ void __launch_bounds__(256, 1) linear_recurrence(
    const real* __restrict__ a, const real* __restrict__ b, const real* __restrict__ h0,
    const int64* __restrict__ lengths, real* __restrict__ h, const real* __restrict__ carries, GIVEN_SIZES, int64 steps, int64 count, int64 units, int reverse, int64 chunks) {
    const int64 thread = int64(blockIdx.x) * blockDim.x + threadIdx.x, chunk = thread / count, element = thread % count;
    if (chunk >= chunks) return;
    const Sizes of{GIVEN_APART, steps, count, units, reverse, chunks};
    const Chain c = of.chain(element, lengths);
    const Part part(chunk, of, c.steps);
    Number state = chunk ? load(carries, thread - count) : load(h0, element);
    int64 at = element + c.first + part.begin * c.apart, factor = c.factor + part.begin * c.factors_apart;
    int64 flag = c.flag + part.begin * c.flags_apart;
#pragma unroll AHEAD
    for (int64 i = part.begin; i < part.stop; ++i) {
        const Number next = plus(times(load(a, factor), state), load(b, at));
        state = reset && reset[flag] ? load(b, at) : next;
        store(h, at, state);
        at += c.apart, factor += c.factors_apart, flag += c.flags_apart;
    }
    for (int64 t = max(part.begin, c.steps); t < part.end; ++t) store(h, element + t * count, zero());
}

// gb[t] = gh[t] + carried, where carried = conj(a[t+1]) * gb[t+1]; ga[t] = gb[t] * conj(h[t-1]), or the sum over t: with
// chunks, (chunks, count), that over each. carries: what comes into all chunks but the last.
extern "C" __global__ void __launch_bounds__(256, 1) linear_recurrence_grad(
    const real* __restrict__ a, const real* __restrict__ h, const real* __restrict__ gh, const real* __restrict__ h0,
    const int64* __restrict__ lengths, real* __restrict__ ga, real* __restrict__ gb, real* __restrict__ gh0,
    const real* __restrict__ carries, GIVEN_SIZES, int64 steps, int64 count,
    int64 units, int reverse, int64 chunks, int summed) {
    const int64 thread = int64(blockIdx.x) * blockDim.x + threadIdx.x, chunk = thread / count, element = thread % count;
    if (chunk >= chunks) return;
    const Sizes of{GIVEN_APART, steps, count, units, reverse, chunks};
    const Chain c = of.chain(element, lengths);
    const Part part(chunk, of, c.steps);
    Number carried = chunk < chunks - 1 ? load(carries, thread) : zero(), total = zero(), piece = zero();
    int64 at = element + c.first + (part.stop - 1) * c.apart, factor = c.factor + (part.stop - 1) * c.factors_apart;
    int64 flag = c.flag + (part.stop - 1) * c.flags_apart;
#pragma unroll AHEAD
    for (int64 i = part.stop - 1; i >= part.begin; --i) {
        const Number g = plus(load(gh, at), carried);
        const bool clears = reset && reset[flag];
        const Number before = i ? load(h, at - c.apart) : load(h0, element);
        const Number product = clears ? zero() : times(g, conj(before));
        carried = clears ? zero() : times(conj(load(a, factor)), g);
        store(gb, at, g);
        if (!summed) store(ga, at, product);
        piece = plus(piece, product);
        if (i % PIECE == 0) total = plus(total, piece), piece = zero();
        at -= c.apart, factor -= c.factors_apart, flag -= c.flags_apart;
    }
    if (!chunk) store(gh0, element, carried);
    if (summed) store(ga, thread, plus(total, piece));
    for (int64 t = max(part.begin, c.steps); t < part.end; ++t) {
        store(gb, element + t * count, zero());
        if (!summed) store(ga, element + t * count, zero());
    }
}

#if !PAIRS
// As the kernels of given factors; what they read lies at x (steps, samples, parts * units).
__device__ __forceinline__ Sizes gated_sizes(
    int64 steps, int64 count, int64 units, int reverse, int64 chunks, int parts) {
    return {{parts * count, parts * units, 1}, {0, 0, 0}, steps, count, units, reverse, chunks};
}

extern "C" __global__ void __launch_bounds__(256, 1) min_gru_reduce(
    const real* __restrict__ x, const real* __restrict__ gh, const int64* __restrict__ lengths,
    real* __restrict__ products, real* __restrict__ ends, int64 steps, int64 count, int64 units, int reverse,
    int64 chunks, int function, int parts, int back) {
    const Sizes of = gated_sizes(steps, count, units, reverse, chunks, parts);
    reduce(Gated{x, gh, units, function, parts}, lengths, products, ends, of, back);
}

extern "C" __global__ void __launch_bounds__(256, 1) min_gru_combine(
    const real* __restrict__ x, const real* __restrict__ gh, const real* __restrict__ h0,
    const int64* __restrict__ lengths, const real* __restrict__ products, real* __restrict__ carries, int64 steps,
    int64 count, int64 units, int reverse, int64 chunks, int function, int parts, int back) {
    const Sizes of = gated_sizes(steps, count, units, reverse, chunks, parts);
    combine(Gated{x, gh, units, function, parts}, h0, lengths, products, carries, of, back);
}

extern "C" __global__ void __launch_bounds__(256, 1) min_gru_forward(
    const real* __restrict__ x, const real* __restrict__ h0, const int64* __restrict__ lengths, real* __restrict__ h,
    const real* __restrict__ carries, int64 steps, int64 count, int64 units, int reverse, int64 chunks, int function, int parts) {
    const int64 thread = int64(blockIdx.x) * blockDim.x + threadIdx.x, chunk = thread / count, element = thread % count;
    if (chunk >= chunks) return;
    const Sizes of = gated_sizes(steps, count, units, reverse, chunks, parts);
    const Chain c = of.chain(element, lengths);
    const Part part(chunk, of, c.steps);
    const Gated terms{x, x, units, function, parts};
    real state = chunk ? carries[thread - count] : h0[element], slope;
    int64 at = element + c.first + part.begin * c.apart, from = c.factor + part.begin * c.factors_apart;
#pragma unroll 4
    for (int64 i = part.begin; i < part.stop; ++i) {
        state += terms.shares(from).z * (candidate(function, x[terms.candidate_at(from)], slope) - state);
        h[at] = state;
        at += c.apart, from += c.factors_apart;
    }
    for (int64 t = max(part.begin, c.steps); t < part.end; ++t) h[element + t * count] = 0;
}

extern "C" __global__ void __launch_bounds__(256, 1) min_gru_backward(
    const real* __restrict__ x, const real* __restrict__ h, const real* __restrict__ gh, const real* __restrict__ h0,
    const int64* __restrict__ lengths, real* __restrict__ gx, real* __restrict__ gh0, const real* __restrict__ carries,
    int64 steps, int64 count, int64 units, int reverse, int64 chunks, int function, int parts) {
    const int64 thread = int64(blockIdx.x) * blockDim.x + threadIdx.x, chunk = thread / count, element = thread % count;
    if (chunk >= chunks) return;
    const Sizes of = gated_sizes(steps, count, units, reverse, chunks, parts);
    const Chain c = of.chain(element, lengths);
    const Part part(chunk, of, c.steps);
    const Gated terms{x, gh, units, function, parts};
    real carried = chunk < chunks - 1 ? carries[thread] : real(0), slope;
    int64 at = element + c.first + (part.stop - 1) * c.apart, from = c.factor + (part.stop - 1) * c.factors_apart;
#pragma unroll 4
    for (int64 i = part.stop - 1; i >= part.begin; --i) {
        const Shares own = terms.shares(from);
        const real made = candidate(function, x[terms.candidate_at(from)], slope);
        const real before = i ? h[at - c.apart] : h0[element], g = gh[at] + carried;
        const real through = g * own.z * (made - before) * own.rest;
        gx[from] = through * own.shut_i;
        if (parts == 3) gx[from + units] = -through * own.shut_f;
        gx[terms.candidate_at(from)] = g * own.z * slope;
        carried = own.rest * g;
        at -= c.apart, from -= c.factors_apart;
    }
    if (!chunk) gh0[element] = carried;
    const int64 own = element / units * parts * units + element % units;
    for (int64 t = max(part.begin, c.steps); t < part.end; ++t)
        for (int part_of_x = 0; part_of_x < parts; ++part_of_x) gx[own + (t * count * parts) + part_of_x * units] = 0;
}
#endif
