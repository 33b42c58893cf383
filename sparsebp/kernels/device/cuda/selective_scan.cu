// The selective scan: 1, 2 or 4 lanes share a channel of a sample and go down its steps, each with some of the states in
// registers; more states take more passes. Bound by exponentials and, on the way back, by the sums over channels.
//
// Memory would take longer than all of these: so a block takes b and c of a chunk of steps into shared memory, and a
// thread asks for its inputs some steps ahead.
//
// The way back runs a chunk of steps forward again from its state, into scratch that the L2 cache holds, and then back.

#include "common.cuh"

constexpr int AT_ONCE = 8;  // states of a lane
constexpr int MOST = 4;  // lanes that share a channel
constexpr int THREADS = 128;  // of a block, all of one sample
constexpr int CHUNK = 32;  // steps between two states that are kept, as in spec.py
constexpr int AHEAD = 8;  // steps forward for which a thread asks at once
constexpr int BEHIND = sizeof(real) == 4 ? 4 : 2;  // the same on the way back, where more is asked for

// Where a thread is: which channel, and which of its states.
struct Place {
    int64 sample, channel;
    bool there;
    int group, width;

    __device__ Place(int64 channels, int64 blocks, int groups) {
        sample = blockIdx.x / blocks;
        channel = blockIdx.x % blocks * (THREADS / groups) + threadIdx.x / groups;
        there = channel < channels;
        group = threadIdx.x % groups;
        width = groups * AT_ONCE;
    }
};

// Takes `many` steps of b or c into shared memory, zeros for states that are not; a barrier must follow.
__device__ __forceinline__ void take(
    real* tile, const real* __restrict__ source, int64 start, int many, int64 batch, int64 order, int64 pass,
    const Place& at) {
    for (int e = threadIdx.x; e < many * at.width; e += THREADS) {
        const int64 n = pass + e % at.width, row = (start + e / at.width) * batch + at.sample;
        tile[e] = n < order ? source[row * order + n] : 0;
    }
}

// Takes the resets of `many` steps of a sample; a barrier must follow.
__device__ __forceinline__ void take(
    bool* anew, const unsigned char* __restrict__ reset, int64 start, int many, int64 batch, const Place& at) {
    if (threadIdx.x < many) anew[threadIdx.x] = reset && reset[(start + threadIdx.x) * batch + at.sample];
}

// The states' values of one step in the tile.
__device__ __forceinline__ void read(const real* tile, int t, const Place& at, real (&out)[AT_ONCE]) {
#pragma unroll
    for (int piece = 0; piece < AT_ONCE / WIDTH; ++piece) {
        real values[WIDTH];
        load_wide(tile + t * at.width + at.group * AT_ONCE + piece * WIDTH, values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) out[piece * WIDTH + i] = values[i];
    }
}

// The sum over the lanes of a channel, or over a warp's channels.
__device__ __forceinline__ real sum_lanes(real value, int from, int to) {
    for (int step = from; step < to; step *= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

extern "C" __global__ void __launch_bounds__(128, 1) selective_scan(
    const real* __restrict__ x, const real* __restrict__ dt, const real* __restrict__ a, const real* __restrict__ b,
    const real* __restrict__ c, const real* __restrict__ d, const real* __restrict__ h0,
    const unsigned char* __restrict__ reset, real* __restrict__ y, real* __restrict__ states, int64 steps, int64 batch,
    int64 channels, int64 order, int64 blocks, int groups) {
    __shared__ __align__(16) real of_b[CHUNK * MOST * AT_ONCE], of_c[CHUNK * MOST * AT_ONCE];
    __shared__ bool anew[CHUNK];
    const Place at(channels, blocks, groups);
    const real skip = at.there ? d[at.channel] : 0;
    for (int64 pass = 0; pass == 0 || pass < order; pass += at.width) {
        const int64 first = pass + at.group * AT_ONCE;
        real h[AT_ONCE], rate[AT_ONCE], v[AHEAD], u[AHEAD];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const bool used = at.there && first + n < order;
            h[n] = used ? h0[(at.sample * order + first + n) * channels + at.channel] : 0;
            rate[n] = used ? a[(first + n) * channels + at.channel] : 0;
        }
        const auto ask = [&](int64 start) {
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                const bool used = at.there && start + k < steps;
                const int64 place = ((start + k) * batch + at.sample) * channels + at.channel;
                v[k] = used ? dt[place] : 0;
                u[k] = used ? x[place] : 0;
            }
        };
        ask(0);
        for (int64 start = 0; start < steps; start += CHUNK) {
            const int many = steps - start < CHUNK ? steps - start : CHUNK;
            __syncthreads();  // the chunk before has been read
            take(of_b, b, start, many, batch, order, pass, at);
            take(of_c, c, start, many, batch, order, pass, at);
            take(anew, reset, start, many, batch, at);
            __syncthreads();
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n)
                if (at.there && first + n < order)
                    states[((start / CHUNK * batch + at.sample) * order + first + n) * channels + at.channel] = h[n];
            for (int begin = 0; begin < many; begin += AHEAD) {
                real v_now[AHEAD], u_now[AHEAD];
#pragma unroll
                for (int k = 0; k < AHEAD; ++k) v_now[k] = v[k], u_now[k] = u[k];
                ask(start + begin + AHEAD);
#pragma unroll
                for (int k = 0; k < AHEAD; ++k) {
                    const int t = begin + k;
                    if (t >= many) break;
                    const real through = v_now[k] * u_now[k];
                    real total = 0, b_now[AT_ONCE], c_now[AT_ONCE];
                    read(of_b, t, at, b_now);
                    read(of_c, t, at, c_now);
#pragma unroll
                    for (int n = 0; n < AT_ONCE; ++n) {
                        if (first + n >= order) continue;
                        h[n] = (anew[t] ? 0 : exp_of(v_now[k] * rate[n]) * h[n]) + through * b_now[n];
                        total += c_now[n] * h[n];
                    }
                    total = sum_lanes(total, 1, groups);
                    if (at.there && at.group == 0) {
                        real& written = y[((start + t) * batch + at.sample) * channels + at.channel];
                        written = total + (pass ? written : skip * u_now[k]);
                    }
                }
            }
        }
        const int64 last = (steps + CHUNK - 1) / CHUNK * batch + at.sample;
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
            if (at.there && first + n < order) states[(last * order + first + n) * channels + at.channel] = h[n];
    }
}

// befores: scratch (CHUNK, AT_ONCE, threads of the grid). gb, gc: (warps of a sample, T, B, N), a warp's sums over channels.
// No thread leaves before the end: a warp's sums need all lanes.
extern "C" __global__ void __launch_bounds__(128, 1) selective_scan_grad(
    const real* __restrict__ x, const real* __restrict__ dt, const real* __restrict__ a, const real* __restrict__ b,
    const real* __restrict__ c, const real* __restrict__ d, const real* __restrict__ gy, const real* __restrict__ gh,
    const real* __restrict__ states, const unsigned char* __restrict__ reset, real* __restrict__ gx,
    real* __restrict__ gdt, real* __restrict__ ga, real* __restrict__ gb, real* __restrict__ gc, real* __restrict__ gd,
    real* __restrict__ gh0, real* __restrict__ befores, int64 steps, int64 batch, int64 channels, int64 order,
    int64 blocks, int groups) {
    __shared__ __align__(16) real of_b[CHUNK * MOST * AT_ONCE], of_c[CHUNK * MOST * AT_ONCE];
    __shared__ bool anew[CHUNK];
    const Place at(channels, blocks, groups);
    const int64 threads = int64(gridDim.x) * THREADS, self = int64(blockIdx.x) * THREADS + threadIdx.x;
    const int64 warp = (blockIdx.x % blocks * THREADS + threadIdx.x) / WARP, chunks = (steps + CHUNK - 1) / CHUNK;
    const real skip = at.there ? d[at.channel] : 0;
    for (int64 pass = 0; pass == 0 || pass < order; pass += at.width) {
        const int64 first = pass + at.group * AT_ONCE;
        real h[AT_ONCE], rate[AT_ONCE], carried[AT_ONCE], total[AT_ONCE], piece[AT_ONCE], total_d = 0;
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const bool used = at.there && first + n < order;
            carried[n] = used ? gh[(at.sample * order + first + n) * channels + at.channel] : 0;
            total[n] = 0;
            rate[n] = used ? a[(first + n) * channels + at.channel] : 0;
        }
        for (int64 chunk = chunks - 1; chunk >= 0; --chunk) {
            const int64 start = chunk * CHUNK;
            const int many = steps - start < CHUNK ? steps - start : CHUNK;
            real v[BEHIND], u[BEHIND], g_y[BEHIND], piece_d = 0;
            const auto ask = [&](int begin, bool back) {
#pragma unroll
                for (int k = 0; k < BEHIND; ++k) {
                    const bool used = at.there && begin + k < many;
                    const int64 place = ((start + begin + k) * batch + at.sample) * channels + at.channel;
                    v[k] = used ? dt[place] : 0;
                    u[k] = used ? x[place] : 0;
                    g_y[k] = used && back ? gy[place] : 0;
                }
            };
            __syncthreads();  // the chunk before has been read
            take(of_b, b, start, many, batch, order, pass, at);
            take(of_c, c, start, many, batch, order, pass, at);
            take(anew, reset, start, many, batch, at);
            __syncthreads();
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const int64 place = ((chunk * batch + at.sample) * order + first + n) * channels + at.channel;
                h[n] = at.there && first + n < order ? states[place] : 0;
                piece[n] = 0;
            }
            for (int begin = 0; begin < many; begin += BEHIND) {
                ask(begin, false);
#pragma unroll
                for (int k = 0; k < BEHIND; ++k) {
                    if (begin + k >= many) break;
                    const real through = v[k] * u[k];
                    real b_now[AT_ONCE];
                    read(of_b, begin + k, at, b_now);
#pragma unroll
                    for (int n = 0; n < AT_ONCE; ++n) {
                        const real before = anew[begin + k] ? 0 : h[n];
                        befores[((begin + k) * AT_ONCE + n) * threads + self] = before;
                        h[n] = (anew[begin + k] ? 0 : exp_of(v[k] * rate[n]) * before) + through * b_now[n];
                    }
                }
            }
            for (int begin = (many - 1) / BEHIND * BEHIND; begin >= 0; begin -= BEHIND) {
                real before[BEHIND][AT_ONCE];
                ask(begin, true);
#pragma unroll
                for (int k = 0; k < BEHIND; ++k)
#pragma unroll
                    for (int n = 0; n < AT_ONCE; ++n)
                        before[k][n] = begin + k < many ? befores[((begin + k) * AT_ONCE + n) * threads + self] : 0;
#pragma unroll
                for (int k = BEHIND - 1; k >= 0; --k) {
                    if (begin + k >= many) continue;
                    const int64 row = (start + begin + k) * batch + at.sample;
                    const real through = v[k] * u[k];
                    const bool cut = anew[begin + k];
                    real of_dt = 0, of_input = 0, b_now[AT_ONCE], c_now[AT_ONCE];
                    read(of_b, begin + k, at, b_now);
                    read(of_c, begin + k, at, c_now);
#pragma unroll
                    for (int n = 0; n < AT_ONCE; ++n) {
                        const real factor = cut ? 0 : exp_of(v[k] * rate[n]), g = g_y[k] * c_now[n] + carried[n];
                        const real back = g * before[k][n] * factor;  // at dt a
                        // no channel, no part in the sums: its zeros times an infinite b or c are not zero
                        const real part_b = at.there ? g * through : 0;
                        const real part_c = at.there ? g_y[k] * (factor * before[k][n] + through * b_now[n]) : 0;
                        const real at_b = sum_lanes(part_b, groups, WARP), at_c = sum_lanes(part_c, groups, WARP);
                        if (threadIdx.x % WARP < groups && first + n < order) {
                            gb[(warp * steps * batch + row) * order + first + n] = at_b;
                            gc[(warp * steps * batch + row) * order + first + n] = at_c;
                        }
                        if (first + n >= order) continue;  // only now: the sums need all lanes
                        of_input += g * b_now[n];
                        carried[n] = cut ? 0 : factor * g;
                        if (cut) continue;  // not even NaN passes
                        of_dt += back * rate[n];
                        piece[n] += back * v[k];
                    }
                    of_dt = sum_lanes(of_dt, 1, groups);
                    of_input = sum_lanes(of_input, 1, groups);
                    piece_d += g_y[k] * u[k];
                    if (at.there && at.group == 0) {
                        const int64 place = row * channels + at.channel;
                        gx[place] = v[k] * of_input + (pass ? gx[place] : skip * g_y[k]);
                        gdt[place] = u[k] * of_input + of_dt + (pass ? gdt[place] : 0);
                    }
                }
            }
            total_d += piece_d;
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) total[n] += piece[n];
        }
        if (!at.there) continue;
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int64 place = (at.sample * order + first + n) * channels + at.channel;
            if (first + n < order) ga[place] = total[n], gh0[place] = carried[n];
        }
        if (at.group == 0) gd[at.sample * channels + at.channel] = total_d;
    }
}
