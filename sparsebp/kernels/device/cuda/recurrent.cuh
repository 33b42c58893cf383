// What the recurrent kernels share: the weights of one hidden unit, and the derivatives of a step.
//
// One thread a hidden unit. With -DHIDDEN the size is known when compiling, a thread keeps its weights in registers and a
// block of at most 32 units is one warp that never waits for another. Without, the size comes as an argument and weights
// are streamed from global memory (L2). The state goes round through shared memory in wide broadcasts: about 30 cycles for
// all of it, where shuffles would cost 2 cycles an entry on top of 23.
//
// Where a unit has too many weights for one thread, -DSPLIT neighbouring lanes share it: each multiplies every SPLIT-th
// piece of the state, log2(SPLIT) shuffles add up their sums, and all of them go on with the same numbers, of which the
// first stores. With -DKEPT so many pieces of a lane's weights are in registers, the others in its own places of shared
// memory, which hands them out four times as slowly as the units multiply: still far faster than L2.
//
// Kernels with weights in registers ask for one block a multiprocessor: left to itself, ptxas aims at more and spills.

#ifndef SPLIT
#define SPLIT 1
#endif

#ifdef HIDDEN
#define STREAMED 0
constexpr int UNIT_BLOCK = (HIDDEN * SPLIT + WARP - 1) / WARP * WARP;
#define HIDDEN_SIZE(argument) constexpr int H = HIDDEN
__device__ __forceinline__ void unit_barrier() {
    if (UNIT_BLOCK == WARP)
        __syncwarp();
    else
        __syncthreads();
}
#else
#define STREAMED 1
constexpr int UNIT_BLOCK = 1024;  // leaves a thread 64 registers
#define HIDDEN_SIZE(argument) const int H = argument
__device__ __forceinline__ void unit_barrier() { __syncthreads(); }
#endif

// Threads past the last unit (a block is whole warps) repeat that unit's work into places of their own, so nothing but
// the stores to global memory asks which thread it is. The state of a step is FOLD vectors, SEGMENT apart.
//
// The strides (input, output, unit) at which `load` finds them: in registers, straight from w_hh, rows forward and columns
// backward; streamed, from an array that has units side by side (forward: the transpose of w_hh).
#ifdef HIDDEN
#define SEGMENT (UNIT_BLOCK / SPLIT)
#define FORWARD_STRIDES(outputs) 1, H * H, H
#define BACKWARD_STRIDES H, 0, 1
#else
#define SEGMENT int(blockDim.x)
#define FORWARD_STRIDES(outputs) (outputs) * H, H, 1
#define BACKWARD_STRIDES H, 0, 1
#endif

// This thread's place in a vector of the state, whether it is the first of the lanes that share its unit, and the unit.
__device__ __forceinline__ int unit_place() { return int(threadIdx.x) / SPLIT; }
__device__ __forceinline__ bool is_first() { return SPLIT == 1 || threadIdx.x % SPLIT == 0; }
__device__ __forceinline__ int unit_of(int H) { return min(unit_place(), H - 1); }

// Whether this thread writes the unit's values to global memory.
__device__ __forceinline__ bool is_writer(int H) { return is_first() && unit_place() < H; }

// Steps of so many multiply-adds that few need be loaded ahead, and that much unrolled code would only take long to compile:
// half a minute where weights are in shared memory, too.
#ifdef KEPT
constexpr bool LONGEST_STEPS = true;
#else
constexpr bool LONGEST_STEPS = STREAMED;
#endif
constexpr bool LONG_STEPS = LONGEST_STEPS || SPLIT > 1;

// Passes a unit's value round, at `vector`; a barrier later all may read it.
__device__ __forceinline__ void put(real* vector, real value) {
    if (is_first()) vector[unit_place()] = value;
}

// The weights that one unit needs: OUTPUTS results from FOLD vectors of state.
//   load:  takes them, or this lane's share, from `source`; returns where in shared memory the state can begin.
//   add:   out[o] += sum over f, k of weight(f * H + k, o) * state[f * SEGMENT + k].
// Weight (k, o) of a unit lies at source[k * input_stride + o * output_stride + unit * unit_stride].
#ifdef HIDDEN
template <int OUTPUTS, int FOLD> struct UnitWeights {
    static constexpr int CHAINS = 4;  // independent sums, to hide the latency of an addition
    static constexpr int PIECES = (padded(HIDDEN) / WIDTH + SPLIT - 1) / SPLIT;  // of a vector, that a lane multiplies
#ifdef KEPT
    static constexpr int HELD = KEPT;
#else
    static constexpr int HELD = FOLD * PIECES;
#endif
    real values[HELD][WIDTH][OUTPUTS];
    real* others;  // weight c of piece p: at (p - HELD) * OUTPUTS * STRIDE + o * STRIDE + c
    static constexpr int STRIDE = UNIT_BLOCK * WIDTH;

    // Where in a vector piece p of this lane begins, and whether entry c of it is there for all lanes.
    static __device__ __forceinline__ int begin(int p) { return (p * SPLIT + int(threadIdx.x) % SPLIT) * WIDTH; }
    static __device__ __forceinline__ constexpr bool whole(int p, int c) {
        return (p * SPLIT + SPLIT - 1) * WIDTH + c < HIDDEN;
    }

    __device__ __forceinline__ real* load(
        const real* source, int input_stride, int output_stride, int unit_stride, int unit, real* shared) {
        others = shared + threadIdx.x * WIDTH;
#pragma unroll
        for (int f = 0; f < FOLD; ++f)
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
#pragma unroll
                for (int o = 0; o < OUTPUTS; ++o) {
                    real piece[WIDTH] = {};
#pragma unroll
                    for (int c = 0; c < WIDTH; ++c) {
                        const int k = begin(p) + c;
                        if (whole(p, c) || k < HIDDEN)
                            piece[c] = source[(f * HIDDEN + k) * input_stride + o * output_stride + unit * unit_stride];
                    }
                    const int number = f * PIECES + p;
                    if (number >= HELD)
                        store_wide(others + ((number - HELD) * OUTPUTS + o) * STRIDE, piece);
                    else
#pragma unroll
                        for (int c = 0; c < WIDTH; ++c) values[number][c][o] = piece[c];
                }
        return shared + (FOLD * PIECES - HELD) * OUTPUTS * STRIDE;
    }

    __device__ __forceinline__ void add(const real* state, real (&out)[OUTPUTS]) const {
        real sums[CHAINS][OUTPUTS] = {};
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) sums[0][o] = is_first() ? out[o] : real(0);
#pragma unroll
        for (int f = 0; f < FOLD; ++f)
#pragma unroll
            for (int p = 0; p < PIECES; ++p) {
                const int number = f * PIECES + p;
                real piece[WIDTH] = {}, row[OUTPUTS][WIDTH];
                if (whole(p, 0) || begin(p) < HIDDEN) load_wide(state + f * SEGMENT + begin(p), piece);
#pragma unroll
                for (int o = 0; o < OUTPUTS; ++o)
                    if (number >= HELD) load_wide(others + ((number - HELD) * OUTPUTS + o) * STRIDE, row[o]);
#pragma unroll
                for (int c = 0; c < WIDTH; ++c)
#pragma unroll
                    for (int o = 0; o < OUTPUTS; ++o)
                        if (whole(p, c) || begin(p) + c < HIDDEN)
                            sums[(p * WIDTH + c) % CHAINS][o] +=
                                (number < HELD ? values[min(number, HELD - 1)][c][o] : row[o][c]) * piece[c];
            }
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            out[o] = (sums[0][o] + sums[2][o]) + (sums[1][o] + sums[3][o]);
#pragma unroll
            for (int away = 1; away < SPLIT; away *= 2) out[o] += __shfl_xor_sync(ALL_LANES, out[o], away);
        }
    }
};
#else
template <int OUTPUTS, int FOLD> struct UnitWeights {
    static constexpr int SIZE = OUTPUTS * sizeof(real);
    static constexpr int TOGETHER = SIZE >= 32 ? 2 : SIZE >= 16 ? 4 : 8;  // as 64 registers allow
    const real* values;
    int H;

    __device__ __forceinline__ real* load(const real* source, int input_stride, int, int, int unit, real* shared) {
        H = input_stride / OUTPUTS;
        values = source + unit;
        return shared;
    }

    __device__ __forceinline__ void add(const real* state, real (&out)[OUTPUTS]) const {
        real sums[OUTPUTS] = {};
        for (int f = 0; f < FOLD; ++f)
#pragma unroll TOGETHER
            for (int k = 0; k < H; ++k)
#pragma unroll
                for (int o = 0; o < OUTPUTS; ++o)
                    sums[o] += values[((f * H + k) * OUTPUTS + o) * H] * state[f * SEGMENT + k];
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) out[o] += sums[o];
    }
};
#endif

// step(s, t) for t = first, first + WAY ... in turn, ahead of `stop`; s counts round to DEPTH and is known when compiling.
template <int DEPTH, int WAY, class Step>
__device__ __forceinline__ void in_turn(int64 first, int64 stop, const Step& step) {
    for (; WAY > 0 ? first + DEPTH <= stop : first - DEPTH >= stop; first += WAY * DEPTH)
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) step(s, first + WAY * s);
#pragma unroll
    for (int s = 0; s < DEPTH; ++s)
        if (WAY > 0 ? first + s < stop : first - s > stop) step(s, first + WAY * s);
}

// ---- one step's derivatives, needed by the sequential backward, the scan and the materialised Jacobians ----------------

#ifdef RELU
// f' of an Elman step, from the output of f. RELU picks f: 0 is tanh, 1 is relu.
__device__ __forceinline__ real slope(real h) {
#if RELU
    return h <= 0 ? real(0) : real(1);  // 1 at a NaN
#else
    return 1 - h * h;
#endif
}
#endif

// The factors of a GRU's transposed Jacobian at one unit (BPPSA Eq. 11):
// J = W_hr' diag(of_r) + W_hz' diag(of_z) + W_hn' diag(of_n) + diag(z).
struct GruFactors {
    real of_r, of_z, of_n, z;
};

__device__ __forceinline__ GruFactors gru_factors(real r, real z, real n, real m, real before) {
    const real to_n = (1 - z) * (1 - n * n);
    return GruFactors{to_n * (m * r * (1 - r)), (before - n) * z * (1 - z), to_n * r, z};
}

// Chunk c of a sequence covers the steps from chunk_begin(c) to chunk_begin(c + 1).
__device__ __forceinline__ int64 chunk_begin(int64 chunk, int64 chunks, int64 steps) { return chunk * steps / chunks; }

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
