// The maxima of sliding windows. One thread an element of what is written: no atomics. Bound by memory; neighbouring lanes
// hold neighbouring positions of the last axis.

#include "common.cuh"

__device__ __forceinline__ int64 number_of_thread() { return int64(blockIdx.x) * blockDim.x + threadIdx.x; }

// Windows on an axis are rows of three numbers: start, first tap, end of the taps; starts ascend. The elements of a plane,
// and the planes, are fewer than 2^31.
__device__ __forceinline__ int first_window(const int64* windows, int count, int least) {
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (windows[3 * middle] < least) low = middle + 1;
        else high = middle;
    }
    return low;
}

// x (planes, height, width); y, winner (planes, out_h, out_w). The first maximum wins, of several NaN the last.
extern "C" __global__ void __launch_bounds__(256) max_pool(
    const real* __restrict__ x, real* __restrict__ y, WINNER* __restrict__ winner, const int64* __restrict__ rows,
    const int64* __restrict__ columns, int64 size, int height, int width, int out_h, int out_w, int taps_h, int taps_w,
    int dilation_h, int dilation_w) {
    const int64 element = number_of_thread();
    if (element >= size) return;
    const int64 line = element / out_w, plane = line / out_h;
    const int64 *across = columns + element % out_w * 3, *down = rows + line % out_h * 3;
    real best = 0;
    int place = -1;
    for (int kh = int(down[1]); kh < int(down[2]); ++kh) {
        const int64 h = down[0] + kh * dilation_h;
        for (int kw = int(across[1]); kw < int(across[2]); ++kw) {
            const real value = x[(plane * height + h) * width + across[0] + kw * dilation_w];
            if (place < 0 || value > best || value != value) best = value, place = kh * taps_w + kw;
        }
    }
    y[element] = best;
    winner[element] = static_cast<WINNER>(place);
}

extern "C" __global__ void __launch_bounds__(256) max_pool_grad(
    const real* __restrict__ gy, const WINNER* __restrict__ winner, real* __restrict__ gx,
    const int64* __restrict__ rows, const int64* __restrict__ columns, int64 size, int height, int width, int out_h,
    int out_w, int taps_h, int taps_w, int dilation_h, int dilation_w) {
    const int64 element = number_of_thread();
    if (element >= size) return;
    const int64 line = element / width, plane = line / height;
    const int w = int(element % width), h = int(line % height);
    const int left = first_window(columns, out_w, w - (taps_w - 1) * dilation_w);
    real sum = 0;
    for (int oh = first_window(rows, out_h, h - (taps_h - 1) * dilation_h); oh < out_h; ++oh) {
        const int down = h - int(rows[3 * oh]);
        if (down < 0) break;
        if (down % dilation_h) continue;
        for (int ow = left; ow < out_w; ++ow) {  // windows come in their order, as on the host
            const int across = w - int(columns[3 * ow]);
            const int64 window = (plane * out_h + oh) * out_w + ow;
            if (across < 0) break;
            if (across % dilation_w) continue;
            if (winner[window] == down / dilation_h * taps_w + across / dilation_w) sum += gy[window];
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
