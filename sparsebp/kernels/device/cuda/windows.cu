// The maxima of sliding windows. One thread an element of what is written: no atomics. Bound by memory; neighbouring lanes
// hold neighbouring positions of the last axis.

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
