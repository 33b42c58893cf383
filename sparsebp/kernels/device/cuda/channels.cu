// Channels' statistics, and maps with a few numbers a channel: arrays (batch, channels, size) and (channels,). Sums have a
// block a channel and the tree of their additions is fixed; maps have a thread an element. Bound by memory. The elements
// of a channel over the batch are fewer than 2^31.

#include "common.cuh"

constexpr int THREADS = 256;

// The sum over the block, for all of its threads.
__device__ __forceinline__ real block_sum(real value) {
    __shared__ real sums[THREADS / WARP];
    value = warp_sum(value);
    __syncthreads();  // the sums of a call before have been read
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = value;
    __syncthreads();
    real total = 0;
    for (int warp = 0; warp < THREADS / WARP; ++warp) total += sums[warp];
    return total;
}

// Where element i of a channel, counted over the batch, lies.
__device__ __forceinline__ int64 element_of(int i, int channel, int channels, int size) {
    const int sample = i / size;
    return (int64(sample) * channels + channel) * size + (i - sample * size);
}

extern "C" __global__ void __launch_bounds__(256) channel_moments(
    const real* __restrict__ x, real* __restrict__ mean, real* __restrict__ var, int batch, int channels, int size) {
    const int channel = blockIdx.x, count = batch * size;
    real sum = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) sum += x[element_of(i, channel, channels, size)];
    const real middle = block_sum(sum) / real(count);
    sum = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const real value = x[element_of(i, channel, channels, size)] - middle;
        sum += value * value;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) mean[channel] = middle, var[channel] = sum / real(count);
}

extern "C" __global__ void __launch_bounds__(256) channel_products(
    const real* __restrict__ gy, const real* __restrict__ x, const real* __restrict__ mean, real* __restrict__ sums,
    real* __restrict__ products, int batch, int channels, int size) {
    const int channel = blockIdx.x, count = batch * size;
    const real middle = mean[channel];
    real sum = 0, product = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const int64 element = element_of(i, channel, channels, size);
        sum += gy[element];
        product += gy[element] * (x[element] - middle);
    }
    sum = block_sum(sum);
    product = block_sum(product);
    if (threadIdx.x == 0) sums[channel] = sum, products[channel] = product;
}

extern "C" __global__ void __launch_bounds__(256) channel_scale(
    const real* __restrict__ x, const real* __restrict__ mean, const real* __restrict__ factor,
    const real* __restrict__ offset, real* __restrict__ out, int batch, int channels, int size) {
    const int64 element = int64(blockIdx.x) * THREADS + threadIdx.x;
    if (element >= int64(batch) * channels * size) return;
    const int channel = int(element / size % channels);
    out[element] = (x[element] - mean[channel]) * factor[channel] + offset[channel];
}

extern "C" __global__ void __launch_bounds__(256) channel_centre(
    const real* __restrict__ gy, const real* __restrict__ x, const real* __restrict__ mean,
    const real* __restrict__ offset, const real* __restrict__ slope, const real* __restrict__ factor,
    real* __restrict__ out, int batch, int channels, int size) {
    const int64 element = int64(blockIdx.x) * THREADS + threadIdx.x;
    if (element >= int64(batch) * channels * size) return;
    const int channel = int(element / size % channels);
    const real gradient = gy[element] - offset[channel] - (x[element] - mean[channel]) * slope[channel];
    out[element] = gradient * factor[channel];
}

// Running statistics, `momentum` towards new ones; keep = 1 - momentum.
extern "C" __global__ void __launch_bounds__(256) channel_track(
    const real* __restrict__ mean, const real* __restrict__ var, real momentum, real keep, real correction,
    real* __restrict__ running_mean, real* __restrict__ running_var, int channels) {
    const int channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel >= channels) return;
    running_mean[channel] = running_mean[channel] * keep + momentum * mean[channel];
    running_var[channel] = running_var[channel] * keep + momentum * (var[channel] * correction);
}

// Without a weight (null), factor is scale.
extern "C" __global__ void __launch_bounds__(256) channel_factors(
    const real* __restrict__ var, real eps, const real* __restrict__ weight, real* __restrict__ scale,
    real* __restrict__ factor, int channels) {
    const int channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel >= channels) return;
    const real found = real(1) / sqrt_of(var[channel] + eps);
    scale[channel] = found;
    factor[channel] = weight ? found * weight[channel] : found;
}

extern "C" __global__ void __launch_bounds__(256) channel_slopes(
    const real* __restrict__ sums, const real* __restrict__ products, const real* __restrict__ scale, real count,
    real* __restrict__ offset, real* __restrict__ slope, int channels) {
    const int channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel >= channels) return;
    offset[channel] = sums[channel] / count;
    slope[channel] = products[channel] * scale[channel] * scale[channel] / count;
}
