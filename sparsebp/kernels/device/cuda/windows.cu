// Sliding windows: laid side by side (unfold), added up again (fold), and their maxima. One thread an element of what is
// written (of several, where windows are laid side by side), and every element is written by one thread: no atomics. Bound
// by memory; neighbouring lanes hold neighbouring positions of the last axis.

#include "common.cuh"

__device__ __forceinline__ int64 number_of_thread() { return int64(blockIdx.x) * blockDim.x + threadIdx.x; }

// What an output meets through a tap, and back: -1 where there is none. The elements of a plane, and the planes, are
// fewer than 2^31.
__device__ __forceinline__ int input_at(int output, int tap, int stride, int before, int dilation, int length) {
    const int at = output * stride + tap * dilation - before;
    return at >= 0 && at < length ? at : -1;
}

__device__ __forceinline__ int output_at(int input, int tap, int stride, int before, int dilation, int outputs) {
    const int start = input + before - tap * dilation;
    return start >= 0 && start % stride == 0 && start / stride < outputs ? start / stride : -1;
}

// columns (channels, taps_d, taps_h, taps_w, batch, out_d, out_h, out_w); x (batch, channels, depth, height, width).
// A thread has one window of one sample, and ROWS taps: it finds its place by divisions once, and then counts. A block has
// windows beside each other; `tiles` blocks have them all.
constexpr int ROWS = 8;

extern "C" __global__ void __launch_bounds__(256) unfold(
    const real* __restrict__ x, real* __restrict__ columns, int64 tiles, int batch, int channels, int depth,
    int height, int width, int taps_d, int taps_h, int taps_w, int out_d, int out_h, int out_w, int stride_d,
    int stride_h, int stride_w, int before_d, int before_h, int before_w, int dilation_d, int dilation_h,
    int dilation_w) {
    const int64 windows = int64(batch) * out_d * out_h * out_w;
    const int64 window = int64(blockIdx.x % unsigned(tiles)) * blockDim.x + threadIdx.x;
    if (window >= windows) return;
    const int b = int(window / (out_d * out_h * out_w)), inside = int(window - int64(b) * (out_d * out_h * out_w));
    const int ow = inside % out_w, oh = inside / out_w % out_h, od = inside / out_w / out_h;
    const int first = int(blockIdx.x / unsigned(tiles)) * ROWS, rows = channels * taps_d * taps_h * taps_w;
    int kw = first % taps_w, kh = first / taps_w % taps_h, kd = first / taps_w / taps_h % taps_d;
    int c = first / taps_w / taps_h / taps_d;
    const real* const sample = x + int64(b) * channels * depth * height * width;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (first + r >= rows) return;
        const int w = input_at(ow, kw, stride_w, before_w, dilation_w, width);
        const int h = input_at(oh, kh, stride_h, before_h, dilation_h, height);
        const int d = input_at(od, kd, stride_d, before_d, dilation_d, depth);
        const bool there = d >= 0 && h >= 0 && w >= 0;
        columns[int64(first + r) * windows + window] =
            there ? sample[int64(c) * (depth * height * width) + (d * height + h) * width + w] : real(0);
        if (++kw < taps_w) continue;
        kw = 0;
        if (++kh < taps_h) continue;
        kh = 0;
        if (++kd < taps_d) continue;
        kd = 0, ++c;
    }
}

extern "C" __global__ void __launch_bounds__(256, 4) fold(
    const real* __restrict__ columns, real* __restrict__ x, int64 size, int batch, int channels, int depth,
    int height, int width, int taps_d, int taps_h, int taps_w, int out_d, int out_h, int out_w, int stride_d,
    int stride_h, int stride_w, int before_d, int before_h, int before_w, int dilation_d, int dilation_h,
    int dilation_w) {
    const int64 element = number_of_thread();
    if (element >= size) return;
    const int volume = depth * height * width;
    const int plane = int(element / volume), inside = int(element - int64(plane) * volume);
    const int w = inside % width, h = inside / width % height, d = inside / width / height;
    const int c = plane % channels, b = plane / channels;
    real sum = 0;
    for (int kd = 0; kd < taps_d; ++kd) {
        const int od = output_at(d, kd, stride_d, before_d, dilation_d, out_d);
        if (od < 0) continue;
        for (int kh = 0; kh < taps_h; ++kh) {
            const int oh = output_at(h, kh, stride_h, before_h, dilation_h, out_h);
            if (oh < 0) continue;
            for (int kw = 0; kw < taps_w; ++kw) {
                const int ow = output_at(w, kw, stride_w, before_w, dilation_w, out_w);
                if (ow < 0) continue;
                const int64 row = ((int64(c) * taps_d + kd) * taps_h + kh) * taps_w + kw;
                sum += columns[(((row * batch + b) * out_d + od) * out_h + oh) * out_w + ow];
            }
        }
    }
    x[element] = sum;
}

// x (planes, height, width); y, winner (planes, out_h, out_w). The first maximum wins, of several NaN the last.
extern "C" __global__ void __launch_bounds__(256) max_pool(
    const real* __restrict__ x, real* __restrict__ y, WINNER* __restrict__ winner, int64 size, int height,
    int width, int out_h, int out_w, int taps_h, int taps_w, int stride_h, int stride_w, int before_h,
    int before_w, int dilation_h, int dilation_w) {
    const int64 element = number_of_thread();
    if (element >= size) return;
    const int64 row = element / out_w, plane = row / out_h;
    const int ow = int(element % out_w), oh = int(row % out_h);
    real best = 0;
    int place = -1;
    for (int kh = 0; kh < taps_h; ++kh) {
        const int h = input_at(oh, kh, stride_h, before_h, dilation_h, height);
        if (h < 0) continue;
        for (int kw = 0; kw < taps_w; ++kw) {
            const int w = input_at(ow, kw, stride_w, before_w, dilation_w, width);
            if (w < 0) continue;
            const real value = x[(plane * height + h) * width + w];
            if (place < 0 || value > best || value != value) best = value, place = kh * taps_w + kw;
        }
    }
    y[element] = best;
    winner[element] = static_cast<WINNER>(place);
}

extern "C" __global__ void __launch_bounds__(256) max_pool_grad(
    const real* __restrict__ gy, const WINNER* __restrict__ winner, real* __restrict__ gx, int64 size, int height,
    int width, int out_h, int out_w, int taps_h, int taps_w, int stride_h, int stride_w, int before_h,
    int before_w, int dilation_h, int dilation_w) {
    const int64 element = number_of_thread();
    if (element >= size) return;
    const int64 row = element / width, plane = row / height;
    const int w = int(element % width), h = int(row % height);
    real sum = 0;
    for (int kh = taps_h - 1; kh >= 0; --kh) {  // so that windows come in their order, as on the host
        const int oh = output_at(h, kh, stride_h, before_h, dilation_h, out_h);
        if (oh < 0) continue;
        for (int kw = taps_w - 1; kw >= 0; --kw) {
            const int ow = output_at(w, kw, stride_w, before_w, dilation_w, out_w);
            if (ow < 0) continue;
            const int64 window = (plane * out_h + oh) * out_w + ow;
            if (int(winner[window]) == kh * taps_w + kw) sum += gy[window];
        }
    }
    gx[element] = sum;
}

#ifdef INDEX
// Values of max-pooling's transposed Jacobian, batch last: winners are read once for every row of the kernel.
// A block is (lanes along the batch, entries). `taps` entries beside each other belong to one window, `windows` windows
// beside each other to one line.
extern "C" __global__ void __launch_bounds__(256) max_pool_values(
    const WINNER* __restrict__ winner, int64 columns, const INDEX* __restrict__ window, const int* __restrict__ offset,
    int64 windows, int64 taps, real* __restrict__ out, int64 entries, int batch) {
    const int64 entry = int64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (entry >= entries) return;
    const int64 nth = entry / taps, line = nth / windows;
    const int64 column = window[line] + nth % windows;
    const int place = offset[line] + int(entry % taps);
    for (int b = threadIdx.x; b < batch; b += blockDim.x)
        out[entry * batch + b] = int(winner[b * columns + column]) == place ? real(1) : real(0);
}
#endif
