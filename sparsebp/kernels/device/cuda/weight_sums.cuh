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

// The weight gradients, summed while the backward runs: W_hh' = sum of ga[t] h[t-1]', W_ih' = sum of ga[t] x[t]', and the
// biases' sum of ga[t]. With -DINPUTS (room for so many inputs), where weights are in registers.
//
// A lane holds the rows of its own hidden unit and needs all of h[t-1] and x[t]; they lie behind the state in shared memory
// and are read in the same wide broadcasts. This stands in the shadow of the recursion: nothing on its chain waits for it.

// What a kernel needs for it, all null where nothing is summed.
struct SumOperands {
    const real* x;       // (T, B, features)
    const real* before;  // (T, B, H): h[t - 1]
    real* parts;         // (chunks, B, VALUES, H): each block's sums, see weight_sums.cu
    int features;
};

#ifdef INPUTS
constexpr bool SUMS = true;
static_assert(SPLIT == 1, "a lane has all sums of its unit");
constexpr int INPUT_SLOTS = padded(INPUTS);
#else
constexpr bool SUMS = false;
constexpr int INPUT_SLOTS = 0;
#endif
#define SUM_PLACE (SUMS ? SEGMENT + INPUT_SLOTS : 0)  // values of shared memory that a step takes besides its state

#ifdef INPUTS
// GATES rows of each weight matrix: ga has COLUMNS columns, the first GATES belong to the input, the last to the state.
template <int COLUMNS, int GATES> struct WeightSums {
    static constexpr int VALUES = GATES * (HIDDEN + INPUTS) + COLUMNS;
    real of_state[GATES][HIDDEN] = {}, of_inputs[GATES][INPUTS] = {}, of_bias[COLUMNS] = {};
    Walk<const real> next;
    int64 stride;

    __device__ __forceinline__ WeightSums(const SumOperands& operands, int64 end, int sample, int batch) {
        const int features = operands.features, own = min(int(threadIdx.x), features - 1);
        stride = int64(batch) * features;
        next = Walk<const real>{operands.x + (end - 1) * stride + sample * features + own};
    }

    // This thread's input at one step, for one step after the other. Threads behind the last input repeat it, into sums that
    // nobody reads.
    __device__ __forceinline__ real input(bool valid) {
        const real value = valid ? next[0] : real(0);
        next += -stride;
        return value;
    }

    // Passes h[t - 1] and x[t] round, at `place`; a barrier later all may add.
    __device__ __forceinline__ void put(real* place, real before, real input) const {
        place[threadIdx.x] = before;
        if (threadIdx.x < INPUT_SLOTS) place[SEGMENT + threadIdx.x] = input;
    }

    __device__ __forceinline__ void add(const real* place, const real (&ga)[COLUMNS]) {
        add_rows(of_state, place, ga, COLUMNS - GATES);
        add_rows(of_inputs, place + SEGMENT, ga, 0);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) of_bias[c] += ga[c];
    }

    __device__ __forceinline__ void store(const SumOperands& operands, int64 part, int unit) const {
        real* const out = operands.parts + part * (VALUES * HIDDEN) + unit;
#pragma unroll
        for (int q = 0; q < GATES; ++q) {
#pragma unroll
            for (int k = 0; k < HIDDEN; ++k) out[(q * HIDDEN + k) * HIDDEN] = of_state[q][k];
#pragma unroll
            for (int i = 0; i < INPUTS; ++i) out[(GATES * HIDDEN + q * INPUTS + i) * HIDDEN] = of_inputs[q][i];
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) out[(GATES * (HIDDEN + INPUTS) + c) * HIDDEN] = of_bias[c];
    }

  private:
    template <int COUNT>
    static __device__ __forceinline__ void add_rows(
        real (&rows)[GATES][COUNT], const real* vector, const real (&ga)[COLUMNS], int first) {
#pragma unroll
        for (int k = 0; k < COUNT; k += WIDTH) {
            real piece[WIDTH];
            load_wide(vector + k, piece);
#pragma unroll
            for (int c = 0; c < WIDTH; ++c)
#pragma unroll
                for (int q = 0; q < GATES; ++q)
                    if (k + c < COUNT) rows[q][k + c] += ga[first + q] * piece[c];
        }
    }
};
#else
template <int COLUMNS, int GATES> struct WeightSums {
    __device__ __forceinline__ WeightSums(const SumOperands&, int64, int, int) {}
    __device__ __forceinline__ real input(bool) { return 0; }
    __device__ __forceinline__ void put(real*, real, real) const {}
    __device__ __forceinline__ void add(const real*, const real (&)[COLUMNS]) {}
    __device__ __forceinline__ void store(const SumOperands&, int64, int) const {}
};
#endif
