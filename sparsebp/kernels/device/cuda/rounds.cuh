// Steps whose values are loaded from global memory a round ahead, for kernels that wait for one chain of operations.
//
// A scoreboard (a warp has six) counts loads and is waited for until it is zero, and ptxas takes one for most loads. Of one
// load a step each would be waited for as soon as the next is issued; so all loads of a round stand together, behind its first
// step, and two sets of registers take turns, as copies from one to the other would wait as well.

// A pointer into global memory that walks from step to step. The compiler is kept from seeing through it: it would work out
// each address anew inside a branch around a store, where two additions and a predicate do, and move loads to the end of a
// round.
template <class T> struct Walk {
    T* at;

    __device__ __forceinline__ T& operator[](int e) const {
#ifndef SPARSEBP_ON_CPU
        __builtin_assume(__isGlobal(at));
#endif
        return at[e];
    }

    __device__ __forceinline__ void operator+=(int64 stride) {
        at += stride;
#ifndef SPARSEBP_ON_CPU
        asm("" : "+l"(at));
#endif
    }
};

// True for a positive number, which the compiler does not know to be one. What stands behind such an `if` is a block of
// instructions of its own: loads of a round would otherwise be scheduled among those of the product, on their scoreboards.
__device__ __forceinline__ bool holds(int positive) {
#ifndef SPARSEBP_ON_CPU
    asm volatile("" : "+r"(positive));
#endif
    return positive > 0;
}

template <int DEPTH, class Values, class Load, class Step>
__device__ __forceinline__ void full_round(
    int first, int positive, Values (&now)[DEPTH], Values (&next)[DEPTH], const Load& load, const Step& step) {
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
        step((first + s) % 2, now[s], s + 1 < DEPTH ? now[(s + 1) % DEPTH] : next[0]);
        if (s == 0 && holds(positive))
#pragma unroll
            for (int n = 0; n < DEPTH; ++n) load(next[n], true);
    }
}

// `count` steps in rounds of DEPTH. load(values, valid) is called for one step after the other, a round ahead of
// step(turn, values, following); `turn` is 0 and 1 alternately, `following` are the next step's values. `valid` is a constant
// but for the first round and the last ones, which are peeled off. start(values of the first step) comes before all steps.
// `positive` is any number above zero that the host passed.
template <int DEPTH, class Values, class Load, class Start, class Step>
__device__ __forceinline__ void in_rounds(
    int64 count, int positive, const Load& load, const Start& start, const Step& step) {
    Values now[DEPTH], next[DEPTH];
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) load(now[s], s < count);
    start(now[0]);
    if (DEPTH == 1) {
        for (int turn = 0; count > 0; --count, turn ^= 1) {
            load(next[0], count > 1);
            step(turn, now[0], next[0]);
            now[0] = next[0];
        }
        return;
    }
    for (; count >= 3 * DEPTH; count -= 2 * DEPTH) {
        full_round(0, positive, now, next, load, step);
        full_round(DEPTH, positive, next, now, load, step);
    }
    for (int first = 0; count > 0; count -= DEPTH, first ^= DEPTH & 1) {
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) load(next[s], s + DEPTH < count);
#pragma unroll
        for (int s = 0; s < DEPTH; ++s)
            if (s < count) step((first + s) % 2, now[s], s + 1 < DEPTH ? now[(s + 1) % DEPTH] : next[0]);
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) now[s] = next[s];
    }
}

// run(value), with a constant that says whether there is a gradient at every step: where there is none, nothing is loaded.
template <bool B> struct Constant {
    static constexpr bool value = B;
};

template <class Run> __device__ __forceinline__ void if_arriving(const real* gy, const Run& run) {
    if (gy)
        run(Constant<true>{});
    else
        run(Constant<false>{});
}
