// What the forward kernels share: what a step's sums start from, and the order of the steps.

// What the weighted state is added to at a step: OUTPUTS values a unit, in rounds of DEPTH steps (an even number, as two
// copies of the state alternate).
//   begin:      makes the first of `steps` steps ready for `read` behind the next barrier.
//   read:       what the sums of step s of a round start from.
//   next_step:  called at every step s, behind what the step itself waits for: as `read`, for the step that follows.
//   next_round: called behind the barrier of every step: at the first of a round, loads the next, of which `steps` steps are
//               there. That stands between two barriers, where nothing else is loaded that could share its scoreboard and
//               be waited for with it. (For the same reason a round is loaded at once: were it a step at a time, a wait for
//               an old load would be a wait for the newest.)
// `shared` has SHARED values of room for it.

// Brings into L2 what will be loaded two rounds later, where DRAM takes longer than a round. Each lane asks for a line of
// its own, at `at`, and goes on by `way` a round, up to `end`.
struct Prefetch {
    const real *at, *end;
    int64 way;

    __device__ __forceinline__ void next_round() {
        if (at < end) {
#ifndef SPARSEBP_ON_CPU
            asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#else
            volatile const real brought = *at;  // checked as a load is
            (void)brought;
#endif
        }
        at += way;
    }
};

// A unit's biases: b_ih, plus b_hh for the first `both` outputs (null for none).
template <int OUTPUTS> struct InputBias {
    real of[OUTPUTS];

    __device__ __forceinline__ InputBias(const real* b_ih, const real* b_hh, int both, int H, int unit) {
#pragma unroll
        for (int q = 0; q < OUTPUTS; ++q)
            of[q] = (b_ih ? b_ih[q * H + unit] : real(0)) + (b_hh && q < both ? b_hh[q * H + unit] : real(0));
    }
};

#if defined(INPUTS)
// From the input x (T, B, `inputs`): W_ih x[t] and the biases. Two rounds of it lie in shared memory: one is in use, the next is stored into the other before it ends. Entries
// from `inputs` to INPUTS are zero, and so are their weights. Streamed, these weights are read at every step, as those of the
// state are.
template <int OUTPUTS> class StepInput {
  public:
    static constexpr int DEPTH = LONG_STEPS ? 4 : 8, ROUND = DEPTH * INPUTS, SHARED = 2 * ROUND;  // the launcher counts on it

  private:
    static constexpr int PIECES = (ROUND + WARP - 1) / WARP;
    static_assert(INPUTS == 1 || INPUTS % WIDTH == 0, "read in wide accesses");
    static_assert(ROUND <= WARP || ROUND % WARP == 0, "brought by whole warps");
    real next[PIECES];
    const InputBias<OUTPUTS> bias;
#if STREAMED
    const real* weights;
    int gate;
#else
    real weights[OUTPUTS][INPUTS];
#endif
    real* now;  // the round in use
    int other;  // where the other one is from there
    int length;
    const real* source;
    int64 stride;
    static constexpr bool PREFETCHES = OUTPUTS == 1 && !STREAMED;
    Prefetch ahead;  // a lane a step

    // Whether this thread brings entries of the input: the first warp does, for all.
    static __device__ __forceinline__ bool brings() { return int(threadIdx.x) < (ROUND < WARP ? ROUND : WARP); }

    __device__ __forceinline__ void load(int64 steps) {
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            const int e = p * WARP + threadIdx.x, s = e / INPUTS, i = e % INPUTS;
            next[p] = brings() && s < steps && i < length ? source[s * stride + i] : real(0);
        }
        if (PREFETCHES) ahead.next_round();
        source += DEPTH * stride;
    }

    __device__ __forceinline__ void store(real* place) const {
#pragma unroll
        for (int p = 0; p < PIECES; ++p)
            if (brings()) place[p * WARP + threadIdx.x] = next[p];
    }

  public:
    __device__ __forceinline__ StepInput(
        const real* x, const real* w_ih, const real* b_ih, const real* b_hh, int both, int inputs, int batch, int H,
        int unit, real* shared)
        : bias(b_ih, b_hh, both, H, unit), now(shared), other(ROUND), length(inputs),
          source(x + int64(blockIdx.x) * inputs), stride(int64(batch) * inputs) {
#if STREAMED
        weights = w_ih + unit * inputs, gate = H * inputs;
#else
#pragma unroll
        for (int q = 0; q < OUTPUTS; ++q)
#pragma unroll
            for (int i = 0; i < INPUTS; ++i) weights[q][i] = i < inputs ? w_ih[(q * H + unit) * inputs + i] : real(0);
#endif
    }

    __device__ __forceinline__ void begin(int64 steps) {
        const real* const end = source - int64(blockIdx.x) * length + steps * stride;
        ahead = {int(threadIdx.x) < DEPTH ? source + (2 * DEPTH + threadIdx.x) * stride : end, end, DEPTH * stride};
        load(steps);
        store(now);
    }

    __device__ __forceinline__ void read(int s, real (&out)[OUTPUTS]) const {
#pragma unroll
        for (int q = 0; q < OUTPUTS; ++q) out[q] = bias.of[q];
#if STREAMED
#pragma unroll 1
        for (int i = 0; i < length; ++i)
#pragma unroll
            for (int q = 0; q < OUTPUTS; ++q) out[q] += weights[q * gate + i] * now[s * INPUTS + i];
#else
        real x[INPUTS];
        if (INPUTS == 1)
            x[0] = now[s];
        else
#pragma unroll
            for (int i = 0; i < INPUTS; i += WIDTH) {
                real piece[WIDTH];
                load_wide(now + s * INPUTS + i, piece);
#pragma unroll
                for (int c = 0; c < WIDTH; ++c) x[i + c] = piece[c];
            }
#pragma unroll
        for (int i = 0; i < INPUTS; ++i)
#pragma unroll
            for (int q = 0; q < OUTPUTS; ++q) out[q] += weights[q][i] * x[i];
#endif
    }

    __device__ __forceinline__ void next_step(int s, real (&out)[OUTPUTS]) {
        if (s == DEPTH - 2) store(now + other);
        if (s == DEPTH - 1) now += other, other = -other;
        read((s + 1) % DEPTH, out);
    }

    __device__ __forceinline__ void next_round(int s, int64 steps) {
        if (s != 0) return;
        load(steps);
        __syncwarp();
    }
};
#elif STREAMED
// From the input's product (T, B, OUTPUTS * H), and the biases. Steps are long and registers few: a step is read while the one before runs.
template <int OUTPUTS> class StepInput {
    const InputBias<OUTPUTS> bias;
    const real* source;
    int64 stride, left = 0;  // steps from the one at `source` on
    int gate;

  public:
    static constexpr int DEPTH = 2, SHARED = 0;

    __device__ __forceinline__ StepInput(
        const real* x, const real*, const real* b_ih, const real* b_hh, int both, int, int batch, int H, int unit, real*)
        : bias(b_ih, b_hh, both, H, unit), source(x + int64(blockIdx.x) * OUTPUTS * H + unit), stride(int64(batch) * OUTPUTS * H), gate(H) {}

    __device__ __forceinline__ void begin(int64 steps) { left = steps; }

    __device__ __forceinline__ void read(int, real (&out)[OUTPUTS]) const {
#pragma unroll
        for (int q = 0; q < OUTPUTS; ++q) out[q] = source[q * gate] + bias.of[q];
    }

    __device__ __forceinline__ void next_step(int s, real (&out)[OUTPUTS]) {
        if (--left > 0) source += stride;
        read(s, out);
    }

    __device__ __forceinline__ void next_round(int, int64) {}
};
#else
// The same, in registers.
template <int OUTPUTS> class StepInput {
  public:
    static constexpr int DEPTH = LONG_STEPS || OUTPUTS * sizeof(real) > 16 ? 2 : OUTPUTS == 1 ? 8 : 4, SHARED = 0;

  private:
    const InputBias<OUTPUTS> bias;
    real now[DEPTH][OUTPUTS], next[DEPTH][OUTPUTS];
    const real* source;
    int64 stride;
    Prefetch ahead;  // a lane an end of the values of a warp, from one step and gate
    static constexpr bool PREFETCHES = OUTPUTS * sizeof(real) < 16;  // else a round is longer
    static_assert(!PREFETCHES || 2 * DEPTH * OUTPUTS <= WARP, "one line each");

    __device__ __forceinline__ void load(int64 steps) {
#pragma unroll
        for (int s = 0; s < DEPTH; ++s)
#pragma unroll
            for (int q = 0; q < OUTPUTS; ++q) next[s][q] = s < steps ? source[s * stride + q * HIDDEN] : real(0);
        if (PREFETCHES) ahead.next_round();
        source += DEPTH * stride;
    }

    __device__ __forceinline__ void take() {
#pragma unroll
        for (int s = 0; s < DEPTH; ++s)
#pragma unroll
            for (int q = 0; q < OUTPUTS; ++q) now[s][q] = next[s][q] + bias.of[q];
    }

  public:
    __device__ __forceinline__ StepInput(
        const real* x, const real*, const real* b_ih, const real* b_hh, int both, int, int batch, int H, int unit, real*)
        : bias(b_ih, b_hh, both, H, unit), source(x + int64(blockIdx.x) * OUTPUTS * H + unit), stride(int64(batch) * OUTPUTS * H) {}

    __device__ __forceinline__ void begin(int64 steps) {
        const int lane = threadIdx.x % WARP, row = lane / 2, first = (int(threadIdx.x) - lane) / SPLIT;
        const int unit = lane % 2 ? min(first + WARP / SPLIT, HIDDEN) - 1 : first;
        const real* const begin = source - unit_of(HIDDEN);  // of this sample's values
        const real* const end = begin + (steps - 1) * stride + OUTPUTS * HIDDEN;
        const int64 offset = (2 * DEPTH + row / OUTPUTS) * stride + row % OUTPUTS * HIDDEN + unit;
        ahead = {row < DEPTH * OUTPUTS ? begin + offset : end, end, DEPTH * stride};
        load(steps);
        take();
    }

    __device__ __forceinline__ void read(int s, real (&out)[OUTPUTS]) const {
#pragma unroll
        for (int q = 0; q < OUTPUTS; ++q) out[q] = now[s][q];
    }

    __device__ __forceinline__ void next_step(int s, real (&out)[OUTPUTS]) {
        if (s == DEPTH - 1) take();
        read((s + 1) % DEPTH, out);
    }

    __device__ __forceinline__ void next_round(int s, int64 steps) {
        if (s != 0) return;
        load(steps);
        __syncwarp();
    }
};
#endif

// step(s, behind) for all steps in turn, in rounds of DEPTH; s counts round to DEPTH and is known when compiling, `behind`
// are the steps that come after the round (where they are more than a round: one).
template <int DEPTH, class Step> __device__ __forceinline__ void all_steps(int64 steps, const Step& step) {
    for (; steps >= 2 * DEPTH; steps -= DEPTH)
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) step(s, DEPTH);
    for (; steps > 0; steps -= DEPTH)
#pragma unroll
        for (int s = 0; s < DEPTH; ++s)
            if (s < steps) step(s, steps - DEPTH);
}
