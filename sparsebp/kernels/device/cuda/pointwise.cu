// Pointwise operators and channels' statistics: one or two passes over memory, so the floor is bytes / bandwidth.

#include "common.cuh"

// Slopes of pointwise operators: what a forward kept, batch first, becomes a diagonal's values, batch last. Bound by
// memory: read once, written once.

constexpr int TILE = 32;

// 0: the slope itself was kept; 1: relu, 2: tanh, 3: sigmoid, from y.
__device__ __forceinline__ real slope_of(int function, real y) {
    if (function == 1) return y <= real(0) ? real(0) : real(1);  // 1 at a NaN
    if (function == 2) return real(1) - y * y;
    return function == 3 ? y * (real(1) - y) : y;
}

extern "C" __global__ void __launch_bounds__(256) pointwise_slopes_single(
    const real* __restrict__ kept, int function, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = slope_of(function, kept[i]);
}

// A tile goes through shared memory, so that both sides are read and written in whole segments. Blocks number the tiles
// along the elements first.
extern "C" __global__ void __launch_bounds__(256) pointwise_slopes(
    const real* __restrict__ kept, int function, real* __restrict__ out, int64 size, int64 batch, int64 tiles) {
    __shared__ real tile[TILE][TILE + 1];
    const int64 first = blockIdx.x % tiles * TILE, sample = blockIdx.x / tiles * TILE;
    for (int b = threadIdx.y; b < TILE; b += blockDim.y)
        if (sample + b < batch && first + threadIdx.x < size)
            tile[b][threadIdx.x] = slope_of(function, kept[(sample + b) * size + first + threadIdx.x]);
    __syncthreads();
    for (int i = threadIdx.y; i < TILE; i += blockDim.y)
        if (first + i < size && sample + threadIdx.x < batch)
            out[(first + i) * batch + sample + threadIdx.x] = tile[threadIdx.x][i];
}

// Channels' statistics, and maps with a few numbers a channel: arrays (batch, channels, size) and (channels,). Sums have a
// block a channel and the tree of their additions is fixed; maps have a thread an element. Bound by memory. The elements
// of a channel over the batch are fewer than 2^31.

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

// Cutting off at two values, and its gradient: one pass over memory each, a thread an element.

extern "C" __global__ void __launch_bounds__(256) clamp(
    const real* __restrict__ x, real low, real high, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const real above = x[i] < low ? low : x[i];  // a NaN stays
    out[i] = above > high ? high : above;
}

extern "C" __global__ void __launch_bounds__(256) clamp_grad(
    const real* __restrict__ gy, const real* __restrict__ y, real low, real high, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = y[i] <= low || y[i] > high ? real(0) : gy[i];  // a NaN lets it through
}

// GELU, x times a probability, and its gradient: one pass over memory each, a thread an element.

constexpr real ROOT = real(0.7978845608028654), CUBE = real(0.044715);  // sqrt(2 / pi)
constexpr real HALF_ROOT = real(0.7071067811865476), DENSITY = real(0.3989422804014327);

__device__ __forceinline__ float tail_of(float z) { return erfcf(z); }
__device__ __forceinline__ double tail_of(double z) { return erfc(z); }
__device__ __forceinline__ float steep_of(float x) { return tanhf(x); }
__device__ __forceinline__ double steep_of(double x) { return tanh(x); }

__device__ __forceinline__ real probability(real x, bool approximate) {
    if (approximate) return real(0.5) + real(0.5) * steep_of(ROOT * (x + CUBE * x * x * x));
    return real(0.5) * tail_of(-HALF_ROOT * x);
}

extern "C" __global__ void __launch_bounds__(256) gelu(
    const real* __restrict__ x, int approximate, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < size) out[i] = x[i] * probability(x[i], approximate);
}

extern "C" __global__ void __launch_bounds__(256) gelu_grad(
    const real* __restrict__ gy, const real* __restrict__ x, int approximate, real* __restrict__ out, int64 size) {
    const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const real v = x[i], p = probability(v, approximate);
    if (approximate) {
        const real square = real(1e4) < v * v ? real(1e4) : v * v;  // from there on p is 0 or 1 to the last digit
        const real density = real(2) * p * (real(1) - p) * ROOT * (real(1) + real(3) * CUBE * square);
        out[i] = gy[i] * (p + v * density);
    } else {
        out[i] = gy[i] * (p + v * DENSITY * exp_of(real(-0.5) * v * v));
    }
}

// The loss: one pass over memory, so the floor is bytes / bandwidth.

// A warp a row. Bytes: logits read (twice, the second time from cache), grad written. Operations: about 10 an entry.
extern "C" __global__ void __launch_bounds__(256) softmax_cross_entropy(
    const real* __restrict__ logits, const int64* __restrict__ target, real* __restrict__ losses,
    real* __restrict__ grad, int64 rows, int64 classes) {
    const int64 row = int64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const int lane = threadIdx.x;
    const real* const in = logits + row * classes;
    real* const out = grad + row * classes;

    const int64 wanted = target[row];
    if (wanted < 0 || wanted >= classes) {  // as on the host: the row shows the mistake, nothing is read elsewhere
        for (int64 c = lane; c < classes; c += WARP) out[c] = real(nan(""));
        if (lane == 0) losses[row] = real(nan(""));
        return;
    }

    real largest = in[0];
    for (int64 c = lane; c < classes; c += WARP) largest = in[c] > largest ? in[c] : largest;
    largest = warp_max(largest);
    real total = 0;  // an entry that is NaN or infinite makes this NaN, and with it the loss
    for (int64 c = lane; c < classes; c += WARP) {
        const real value = exp_of(in[c] - largest);
        out[c] = value;  // read again below by the same lane
        total += value;
    }
    total = warp_sum(total);
    for (int64 c = lane; c < classes; c += WARP) out[c] = out[c] / total - (c == wanted ? real(1) : real(0));
    if (lane == 0) losses[row] = log_of(total) - (in[wanted] - largest);
}
