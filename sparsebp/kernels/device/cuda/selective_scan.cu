// The selective scan: a thread a channel of a sample, down the steps, with some of its states in registers; more states
// take more passes. Bound by exponentials and, on the way back, by the sums over channels.
//
// The way back runs a chunk of steps forward again from its state, into scratch that the L2 cache holds, and then back.

#include "common.cuh"

constexpr int AT_ONCE = 8;  // of a pass
constexpr int CHANNELS = 128;  // of a block, all of one sample
constexpr int CHUNK = 32;  // steps between two states that are kept, as in spec.py

extern "C" __global__ void __launch_bounds__(128) selective_scan(
    const real* __restrict__ x, const real* __restrict__ dt, const real* __restrict__ a, const real* __restrict__ b,
    const real* __restrict__ c, const real* __restrict__ d, const real* __restrict__ h0, real* __restrict__ y,
    real* __restrict__ states, int64 steps, int64 batch, int64 channels, int64 order, int64 blocks) {
    const int64 sample = blockIdx.x / blocks, channel = blockIdx.x % blocks * CHANNELS + threadIdx.x;
    if (channel >= channels) return;
    for (int64 first = 0; first == 0 || first < order; first += AT_ONCE) {
        real h[AT_ONCE], rate[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            h[n] = first + n < order ? h0[(sample * order + first + n) * channels + channel] : 0;
            rate[n] = first + n < order ? a[(first + n) * channels + channel] : 0;
        }
        for (int64 t = 0; t < steps; ++t) {
            const int64 row = t * batch + sample, at = row * channels + channel;
            const real v = dt[at], u = x[at], through = v * u;
            real total = first ? y[at] : d[channel] * u;
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                if (first + n >= order) continue;
                if (t % CHUNK == 0) states[((t / CHUNK * batch + sample) * order + first + n) * channels + channel] = h[n];
                h[n] = exp_of(v * rate[n]) * h[n] + through * b[row * order + first + n];
                total += c[row * order + first + n] * h[n];
            }
            y[at] = total;
        }
        const int64 last = (steps + CHUNK - 1) / CHUNK * batch + sample;
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
            if (first + n < order) states[(last * order + first + n) * channels + channel] = h[n];
    }
}

// befores: scratch (CHUNK, AT_ONCE, threads of the grid). gb, gc: (warps of a sample, T, B, N), a warp's sums over channels.
// No thread leaves before the end: a warp's sums need all lanes.
extern "C" __global__ void __launch_bounds__(128, 1) selective_scan_grad(
    const real* __restrict__ x, const real* __restrict__ dt, const real* __restrict__ a, const real* __restrict__ b,
    const real* __restrict__ c, const real* __restrict__ d, const real* __restrict__ gy, const real* __restrict__ gh,
    const real* __restrict__ states, real* __restrict__ gx, real* __restrict__ gdt, real* __restrict__ ga,
    real* __restrict__ gb, real* __restrict__ gc, real* __restrict__ gd, real* __restrict__ gh0,
    real* __restrict__ befores, int64 steps, int64 batch, int64 channels, int64 order, int64 blocks) {
    const int64 sample = blockIdx.x / blocks, channel = blockIdx.x % blocks * CHANNELS + threadIdx.x;
    const int64 threads = int64(gridDim.x) * CHANNELS, self = int64(blockIdx.x) * CHANNELS + threadIdx.x;
    const int64 warp = channel / WARP, chunks = (steps + CHUNK - 1) / CHUNK;
    const bool there = channel < channels;
    const real skip = there ? d[channel] : 0;
    for (int64 first = 0; first == 0 || first < order; first += AT_ONCE) {
        real h[AT_ONCE], rate[AT_ONCE], carried[AT_ONCE], total[AT_ONCE], piece[AT_ONCE], total_d = 0;
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            carried[n] = there && first + n < order ? gh[(sample * order + first + n) * channels + channel] : 0;
            total[n] = 0;
            rate[n] = there && first + n < order ? a[(first + n) * channels + channel] : 0;
        }
        for (int64 chunk = chunks - 1; chunk >= 0; --chunk) {
            const int64 start = chunk * CHUNK, stop = start + CHUNK < steps ? start + CHUNK : steps;
            real piece_d = 0;
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const int64 at = ((chunk * batch + sample) * order + first + n) * channels + channel;
                h[n] = there && first + n < order ? states[at] : 0;
                piece[n] = 0;
            }
            for (int64 t = start; t < stop; ++t) {
                const int64 row = t * batch + sample, at = row * channels + channel;
                const real v = there ? dt[at] : 0, through = there ? v * x[at] : 0;
#pragma unroll
                for (int n = 0; n < AT_ONCE; ++n) {
                    if (first + n >= order) continue;
                    befores[((t - start) * AT_ONCE + n) * threads + self] = h[n];
                    h[n] = exp_of(v * rate[n]) * h[n] + through * b[row * order + first + n];
                }
            }
            for (int64 t = stop - 1; t >= start; --t) {
                const int64 row = t * batch + sample, at = row * channels + channel;
                const real v = there ? dt[at] : 0, u = there ? x[at] : 0, g_y = there ? gy[at] : 0, through = v * u;
                real of_dt = 0, of_input = 0;
#pragma unroll
                for (int n = 0; n < AT_ONCE; ++n) {
                    if (first + n >= order) continue;
                    const int64 place = row * order + first + n;
                    const real before = befores[((t - start) * AT_ONCE + n) * threads + self];
                    const real factor = exp_of(v * rate[n]), g = g_y * c[place] + carried[n];
                    const real back = g * before * factor;  // at dt a
                    const real of_b = warp_sum(there ? g * through : 0);
                    const real of_c = warp_sum(there ? g_y * (factor * before + through * b[place]) : 0);
                    if (threadIdx.x % WARP == 0) {
                        gb[warp * steps * batch * order + place] = of_b;
                        gc[warp * steps * batch * order + place] = of_c;
                    }
                    of_dt += back * rate[n];
                    of_input += g * b[place];
                    piece[n] += back * v;
                    carried[n] = factor * g;
                }
                if (!there) continue;
                gx[at] = v * of_input + (first ? gx[at] : skip * g_y);
                gdt[at] = u * of_input + of_dt + (first ? gdt[at] : 0);
                piece_d += g_y * u;
            }
            total_d += piece_d;
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) total[n] += piece[n];
        }
        if (!there) continue;
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int64 place = (sample * order + first + n) * channels + channel;
            if (first + n < order) ga[place] = total[n], gh0[place] = carried[n];
        }
        gd[sample * channels + channel] = total_d;
    }
}
