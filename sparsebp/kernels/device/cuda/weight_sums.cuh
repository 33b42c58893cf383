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
