// The convrnn operators on CUDA.
//
// A block has a row of the batch and goes through time on its own: nothing but a barrier a step orders it. What bounds
// it is the chain of T steps, of which each waits for the one before: a barrier, a read from shared memory, K
// multiply-adds, a tanh and a write to shared memory. All else is off the chain: x is loaded some steps before it is
// used, and y stored without waiting. With K = 3 in float32 on an H200 that chain alone, of a row that one warp holds,
// takes 0.12 us a step forward and 0.11 backward. A row of 512 elements takes twice that, of 1,024 three times, as its
// warps share a multiprocessor's units between two barriers; for 64 rows of 1,024, which is where bytes come closest to
// mattering, these alone would take 0.12 us a step.
//
// forward_kernel and backward_kernel have the state in shared memory, twice, so that a step needs one barrier: it is
// read from one copy and written to the other. In backward_kernel the products for the kernel's gradient take no reads
// of their own: sum_k w[k] d[m - k + p] reads what d[m - k + p] h[m] needs. Sums over a row are partial results, which
// finish_kernel adds up in a fixed order. What doesn't fit goes through forward_large_kernel and backward_large_kernel,
// which read the last state where it was written, in y and grad_x; and where K sums don't fit into registers,
// products_kernel makes the partial results.
#include "convrnn.h"

#include <optional>

#include <torch/csrc/stable/ops.h>

#include "common/elementwise.cuh"
#include "common/launch.cuh"

namespace extension_cpp::convrnn {
namespace {

constexpr int kWarp = 32, kThreads = 512, kProducts = 8;
constexpr int kMostThreads = 1024;      // of kernels that need few registers
constexpr unsigned kAll = 0xffffffff;   // lanes
constexpr int64_t kShared = 48 * 1024;  // bytes that every device has without being asked
constexpr int kExact = 3, kFew = 8;
constexpr int64_t kSplits = 1024;  // partial results of products_kernel, at most

template <class T>
struct Kernel {
  const T* data;
  int64_t stride;
  int64_t taps;
};

template <class T>
using Wide = typename Compute<T>::type;

// How many steps ahead a thread loads its kEach elements: as many as there are registers for, and even.
template <class T, int kEach>
constexpr int kAheadOf = std::clamp<int>(128 / (kEach * kEach * sizeof(Wide<T>)), 2, 8);

// Where element i of a state is in shared memory, where the state's ends are repeated before and after it: an element
// at an end is there twice (never three times, as K <= H), others are written twice to the same place, which is cheaper
// than to branch. What is beyond the last element goes where nothing is read.
struct Place {
  Place() = default;
  __device__ Place(int i, int n, int before, int after) {
    here = i < n ? before + i : before + n + after;
    again = i >= n ? here : i >= n - before ? here - n : i < after ? here + n : here;
  }

  template <class V>
  __device__ __forceinline__ void put(V* ring, V value) const {
    ring[here] = value;
    ring[again] = value;
  }

  int here, again;
};

template <class T>
__device__ __forceinline__ T* advance(T* pointer, int64_t bytes) {
  return reinterpret_cast<T*>(const_cast<char*>(reinterpret_cast<const char*>(pointer)) + bytes);
}

// What tanh's slope is where its value is h.
template <class V>
__device__ __forceinline__ V slope_at(V h) {
  return (1 - h) * (1 + h);
}

// The sum over a block, in a fixed order; in thread 0.
template <class V>
__device__ V block_sum(V value) {
  __shared__ V sums[1024 / kWarp];
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_down_sync(kAll, value, step);
  __syncthreads();  // The last call's sums have been read.
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = value;
  __syncthreads();
  V total = 0;
  for (int w = 0; threadIdx.x == 0 && w < static_cast<int>(blockDim.x) / kWarp; ++w) total += sums[w];
  return total;
}

// The kernel's weights in registers, kTaps of them: all for kTaps = kExact, else at most as many; for kTaps = 0 any
// number of them in shared memory. A thread has kEach elements of the state, blockDim.x apart; beyond the end it reads
// what the last element's thread does, and writes nothing.
template <int kTaps, int kEach, class T>
__global__ void __launch_bounds__(kMostThreads, 1)
    forward_kernel(Rows<const T> x, Kernel<T> kernel, Rows<const T> hidden, T* y, int64_t steps, int n) {
  using V = Wide<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kAhead = kAheadOf<T, kEach>;
  const int taps = kTaps == kExact ? kTaps : static_cast<int>(kernel.taps);
  const int before = taps / 2, after = taps - 1 - before, size = n + taps;
  V* const rings = reinterpret_cast<V*>(shared);
  V* const all_weights = rings + 2 * size;
  V weights[kTaps > 0 ? kTaps : 1];
  if constexpr (kTaps > 0) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) weights[k] = k < taps ? static_cast<V>(kernel.data[k * kernel.stride]) : V(0);
  } else {
    for (int k = threadIdx.x; k < taps; k += blockDim.x)
      all_weights[k] = static_cast<V>(kernel.data[k * kernel.stride]);
  }
  const int64_t b = blockIdx.x, x_step = x.time * sizeof(T), y_step = n * sizeof(T);
  int at[kEach];
  Place place[kEach];
  const auto is_active = [&](int j) { return static_cast<int>(threadIdx.x + j * blockDim.x) < n; };
  const T* from[kEach];
  T *to[kEach], ahead[kAhead][kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    at[j] = min(i, n - 1);
    place[j] = Place(i, n, before, after);
    from[j] = x.row(b, 0) + at[j] * x.along;
    to[j] = y + b * (steps + 1) * n + i;
    const T h = hidden.row(b, 0)[at[j] * hidden.along];
    if (is_active(j)) *to[j] = h;
    place[j].put(rings, static_cast<V>(h));
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      if (steps > 0) ahead[d][j] = *from[j];
      if (d + 1 < steps) from[j] = advance(from[j], x_step);
    }
  }
  for (int64_t rest = steps; rest > 0; rest -= kAhead) {
    const int here = static_cast<int>(min(rest, int64_t{2 * kAhead + 1}));
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      if (d >= here) break;
      V sums[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) sums[j] = static_cast<V>(ahead[d][j]);
      __syncthreads();
      const V* const last = rings + d % 2 * size;
      V* const next = rings + (d + 1) % 2 * size;
      if constexpr (kTaps > 0) {
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) sums[j] += weights[k] * (k < taps ? last[at[j] + k] : V(0));
        }
      } else {
#pragma unroll 4
        for (int k = 0; k < taps; ++k) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) sums[j] += all_weights[k] * last[at[j] + k];
        }
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const T h = static_cast<T>(tanh(sums[j]));
        place[j].put(next, static_cast<V>(h));
        to[j] = advance(to[j], y_step);
        if (is_active(j)) *to[j] = h;
        ahead[d][j] = *from[j];
        if (d + kAhead + 1 < here) from[j] = advance(from[j], x_step);
      }
    }
  }
}

// As forward_kernel, back in time, with the weights in reverse; and a block has one or more rows. `parts`: for each
// block and tap, the sum of its products; null where there is but one block, whose sums are the gradient of the kernel.
template <int kTaps, int kEach, class T>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(
    Rows<const T> grad, Rows<const T> y, Kernel<T> kernel, T* grad_x, T* grad_hidden, Wide<T>* parts, T* grad_kernel,
    int64_t steps, int n, int rows) {
  using V = Wide<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kAhead = kAheadOf<T, kEach>;
  const int taps = kTaps == kExact ? kTaps : static_cast<int>(kernel.taps);
  const int after = taps / 2, before = taps - 1 - after, size = n + taps;
  const int threads = blockDim.x / rows, row = threadIdx.x / threads, thread = threadIdx.x % threads;
  V* const rings = reinterpret_cast<V*>(shared) + row * 2 * size;
  V* const all_weights = rings + 2 * size;  // of a block with one row
  V weights[kTaps > 0 ? kTaps : 1], products[kTaps > 0 ? kTaps : 1];
  if constexpr (kTaps > 0) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      weights[k] = k < taps ? static_cast<V>(kernel.data[(taps - 1 - k) * kernel.stride]) : V(0);
      products[k] = 0;
    }
  } else {
    for (int k = threadIdx.x; k < taps; k += blockDim.x) {
      all_weights[k] = static_cast<V>(kernel.data[(taps - 1 - k) * kernel.stride]);
    }
  }
  const int64_t b = int64_t{blockIdx.x} * rows + row, grad_step = grad.time * sizeof(T), y_step = y.time * sizeof(T),
                x_step = n * sizeof(T);
  int at[kEach];
  Place place[kEach];
  const auto is_active = [&](int j) { return thread + j * threads < n; };
  const T *from[kEach], *states[kEach];
  T *to[kEach], grads_ahead[kAhead][kEach], states_ahead[kAhead][kEach];
  V slope[kEach], from_later[kEach];  // slope: 1 - h_t^2
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = thread + j * threads;
    at[j] = min(i, n - 1);
    place[j] = Place(i, n, before, after);
    from[j] = grad.row(b, steps) + at[j] * grad.along;
    states[j] = y.row(b, steps) + at[j] * y.along;
    to[j] = grad_x + (b + 1) * steps * n + i;
    slope[j] = slope_at(static_cast<V>(*states[j]));
    from_later[j] = 0;
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      if (d < steps) states[j] = advance(states[j], -y_step);
      grads_ahead[d][j] = *from[j], states_ahead[d][j] = *states[j];
      if (d < steps) from[j] = advance(from[j], -grad_step);
    }
  }
  if constexpr (kTaps == 0) __syncthreads();
  for (int64_t rest = steps; rest > 0; rest -= kAhead) {
    const int here = static_cast<int>(min(rest, int64_t{2 * kAhead + 1}));
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      if (d >= here) break;
      V* const ring = rings + d % 2 * size;
      V earlier[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const T delta = static_cast<T>((static_cast<V>(grads_ahead[d][j]) + from_later[j]) * slope[j]);
        place[j].put(ring, static_cast<V>(delta));
        to[j] = advance(to[j], -x_step);
        if (is_active(j)) *to[j] = delta;
        earlier[j] = static_cast<V>(states_ahead[d][j]);
        slope[j] = slope_at(earlier[j]);
        from_later[j] = 0;
      }
      __syncthreads();
      if constexpr (kTaps > 0) {
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) {
            const V delta = k < taps ? ring[at[j] + k] : V(0);
            from_later[j] += weights[k] * delta;
            if (is_active(j)) products[k] += delta * earlier[j];
          }
        }
      } else {
#pragma unroll 4
        for (int k = 0; k < taps; ++k) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) from_later[j] += all_weights[k] * ring[at[j] + k];
        }
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (d + kAhead < here) states[j] = advance(states[j], -y_step);
        grads_ahead[d][j] = *from[j], states_ahead[d][j] = *states[j];
        if (d + kAhead < here) from[j] = advance(from[j], -grad_step);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (!is_active(j)) continue;
    const V grad_0 = static_cast<V>(grad.row(b, 0)[at[j] * grad.along]);
    grad_hidden[b * n + at[j]] = static_cast<T>(grad_0 + from_later[j]);
  }
  if constexpr (kTaps > 0) {
    if (grad_kernel == nullptr) return;
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      if (k >= taps) break;
      const V sum = block_sum(products[k]);
      if (threadIdx.x != 0) continue;
      if (parts != nullptr) {
        parts[int64_t{blockIdx.x} * taps + taps - 1 - k] = sum;
      } else {
        grad_kernel[taps - 1 - k] = static_cast<T>(sum);
      }
    }
  }
}

// Any size: the last state is read where it was written. A block's barrier is one for its writes to y, too.
template <class T>
__global__ void __launch_bounds__(kMostThreads, 1)
    forward_large_kernel(Rows<const T> x, Kernel<T> kernel, Rows<const T> hidden, T* y, int64_t steps, int64_t n) {
  using V = Wide<T>;
  const int64_t b = blockIdx.x, before = kernel.taps / 2;
  T* last = y + b * (steps + 1) * n;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) last[i] = hidden.row(b, 0)[i * hidden.along];
  for (int64_t t = 0; t < steps; ++t, last += n) {
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
      V sum = static_cast<V>(x.row(b, t)[i * x.along]);
      int64_t m = i < before ? i - before + n : i - before;
      for (int64_t k = 0; k < kernel.taps; ++k) {
        sum += static_cast<V>(kernel.data[k * kernel.stride]) * static_cast<V>(last[m]);
        if (++m == n) m = 0;
      }
      last[n + i] = static_cast<T>(tanh(sum));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kMostThreads, 1) backward_large_kernel(
    Rows<const T> grad, Rows<const T> y, Kernel<T> kernel, T* grad_x, T* grad_hidden, int64_t steps, int64_t n) {
  using V = Wide<T>;
  const int64_t b = blockIdx.x, before = kernel.taps - 1 - kernel.taps / 2;
  T* to = grad_x + (b + 1) * steps * n;
  for (int64_t t = steps; t >= 0; --t) {
    to -= n;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
      V from_later = 0;
      int64_t m = i < before ? i - before + n : i - before;
      for (int64_t k = kernel.taps - 1; t < steps && k >= 0; --k) {
        from_later += static_cast<V>(kernel.data[k * kernel.stride]) * static_cast<V>(to[n + m]);
        if (++m == n) m = 0;
      }
      const V sum = static_cast<V>(grad.row(b, t)[i * grad.along]) + from_later;
      if (t == 0) {
        grad_hidden[b * n + i] = static_cast<T>(sum);
      } else {
        const V h = static_cast<V>(y.row(b, t)[i * y.along]);
        to[i] = static_cast<T>(sum * slope_at(h));
      }
    }
  }
}

// parts[s, k]: the sum of d[m - k + p] h[m] over every `splits`-th row by batch and time from s on. A warp takes a row,
// a block kProducts taps.
template <class T>
__global__ void __launch_bounds__(kThreads, 1) products_kernel(
    const T* grad_x, Rows<const T> y, Wide<T>* parts, int64_t splits, int64_t count, int64_t steps, int64_t n,
    int64_t taps) {
  using V = Wide<T>;
  const int64_t split = blockIdx.x % splits, first = blockIdx.x / splits * kProducts;
  const int64_t warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  V products[kProducts] = {};
  for (int64_t r = split * warps + warp; r < count; r += splits * warps) {
    const T* const deltas = grad_x + r * n;
    const T* const states = y.row(r / steps, r % steps);
    for (int64_t m = threadIdx.x % kWarp; m < n; m += kWarp) {
      const V h = static_cast<V>(states[m * y.along]);
      int64_t i = m - first + taps / 2;
      i = i < 0 ? i + n : i >= n ? i - n : i;
#pragma unroll
      for (int k = 0; k < kProducts; ++k) {
        products[k] += static_cast<V>(deltas[i]) * h;
        i = i == 0 ? n - 1 : i - 1;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kProducts; ++k) {
    const V sum = block_sum(products[k]);
    if (threadIdx.x == 0 && first + k < taps) parts[split * taps + first + k] = sum;
  }
}

// A block a tap.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    finish_kernel(const Wide<T>* parts, T* grad_kernel, int64_t count, int64_t taps) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += parts[i * taps + blockIdx.x];
  const double total = block_sum(sum);
  if (threadIdx.x == 0) grad_kernel[blockIdx.x] = static_cast<T>(static_cast<Wide<T>>(total));
}

// How the state lies on a block of at most kLimit threads, of which each has at most kMostEach elements.
template <class V, int kLimit, int kMostEach>
struct Layout {
  explicit Layout(const Sizes& sizes) {
    const int64_t n = sizes.width;
    bytes = (2 * (n + sizes.taps) + sizes.taps + 4) / 4 * 4 * sizeof(V);
    if (n > kMostEach * kLimit || bytes > kShared) return;
    each = n <= kLimit ? 1 : n <= 2 * kLimit ? 2 : 4;
    taps = kHasFew && sizes.taps == kExact ? kExact : kHasFew && sizes.taps <= kFew ? kFew : 0;
    threads = static_cast<int>(ceil_div(ceil_div(n, each), kWarp) * kWarp);
  }

  // Calls f with the constants that this stands for.
  template <class F>
  void dispatch(F f) const {
    if (each == 1) return with_each<1>(f);
    if constexpr (kMostEach >= 4) {
      if (each == 4) return with_each<4>(f);
    }
    with_each<2>(f);
  }

  template <int kEach, class F>
  void with_each(F f) const {
    if constexpr (kHasFew) {
      if (taps == kExact) return f.template operator()<kExact, kEach>();
      if (taps == kFew) return f.template operator()<kFew, kEach>();
    }
    f.template operator()<0, kEach>();
  }

  static constexpr bool kHasFew = sizeof(V) == 4;  // In float64 they would take as much code as all others together.
  int each = 0, taps = 0;                          // The kernels' kEach, 0 for those of any size, and kTaps.
  int threads = kThreads;
  int64_t bytes;
};

struct OnCuda {
  static void forward(const Sizes& sizes, const View& x, const View& kernel, const View& hidden, const Tensor& y) {
    Launch launch(kForward.name(), x);
    dispatch(Floating(), kForward.name(), x.dtype, [&]<class T>(T) {
      const Layout<Wide<T>, kMostThreads, 2> layout(sizes);
      const Rows<const T> from = rows<T>(x), first = rows<T>(hidden);
      const Kernel<T> weights{rows<T>(kernel).data, kernel.strides[2], sizes.taps};
      T* const to = static_cast<T*>(y.mutable_data_ptr());
      if (layout.each == 0) {
        return launch(
            forward_large_kernel<T>, sizes.batch, kMostThreads, 0, from, weights, first, to, sizes.steps, sizes.width);
      }
      layout.dispatch([&]<int kTaps, int kEach>() {
        launch(
            forward_kernel<kTaps, kEach, T>, sizes.batch, layout.threads, layout.bytes, from, weights, first, to,
            sizes.steps, static_cast<int>(sizes.width));
      });
    });
  }

  static void backward(
      const Sizes& sizes, const View& grad, const View& y, const View& kernel, const Tensor& grad_x,
      const Tensor* grad_kernel, const Tensor& grad_hidden) {
    Launch launch(kBackward.name(), grad);
    dispatch(Floating(), kBackward.name(), grad.dtype, [&]<class T>(T) {
      using V = Wide<T>;
      const Layout<V, kThreads, 4> layout(sizes);
      const Rows<const T> grads = rows<T>(grad), states = rows<T>(y);
      const Kernel<T> weights{rows<T>(kernel).data, kernel.strides[2], sizes.taps};
      T* const to_x = static_cast<T*>(grad_x.mutable_data_ptr());
      T* const to_hidden = static_cast<T*>(grad_hidden.mutable_data_ptr());
      T* to_kernel = grad_kernel ? static_cast<T*>(grad_kernel->mutable_data_ptr()) : nullptr;
      const int64_t count = sizes.batch * sizes.steps;
      if (to_kernel && count == 0) {
        launch.zero(to_kernel, sizes.taps * sizeof(T));
        to_kernel = nullptr;
      }
      const bool apart = layout.taps == 0;
      // Few and short rows have a block together, which saves the launch that adds up partial results.
      const bool alone =
          !apart && count > 0 && sizes.batch * layout.threads <= kThreads && sizes.batch * layout.bytes <= kShared;
      const int rows_of_block = alone ? static_cast<int>(sizes.batch) : 1;
      const int64_t splits = apart ? std::min(ceil_div(count, kThreads / kWarp), kSplits) : sizes.batch;
      std::optional<Tensor> memory;
      V* parts = nullptr;
      if (to_kernel && !alone) {
        memory = empty_contiguous<1>(grad, {splits * sizes.taps * static_cast<int64_t>(sizeof(V) / sizeof(T))});
        parts = static_cast<V*>(memory->mutable_data_ptr());
      }
      if (layout.each == 0) {
        launch(
            backward_large_kernel<T>, sizes.batch, kMostThreads, 0, grads, states, weights, to_x, to_hidden,
            sizes.steps, sizes.width);
      } else {
        layout.dispatch([&]<int kTaps, int kEach>() {
          launch(
              backward_kernel<kTaps, kEach, T>, sizes.batch / rows_of_block, layout.threads * rows_of_block,
              layout.bytes * rows_of_block, grads, states, weights, to_x, to_hidden, parts, to_kernel, sizes.steps,
              static_cast<int>(sizes.width), rows_of_block);
        });
      }
      if (parts == nullptr) return;
      if (apart) {
        launch(
            products_kernel<T>, splits * ceil_div(sizes.taps, kProducts), kThreads, 0, to_x, states, parts, splits,
            count, sizes.steps, sizes.width, sizes.taps);
      }
      const int threads = static_cast<int>(std::clamp<int64_t>(ceil_div(splits, kWarp) * kWarp, kWarp, kThreads));
      launch(finish_kernel<T>, sizes.taps, threads, 0, parts, to_kernel, splits, sizes.taps);
    });
  }
};

}  // namespace

EXTENSION_CPP_REGISTER(m) {
  m.add(kForward, TORCH_BOX(&convrnn_forward<OnCuda>));
  m.add(kBackward, TORCH_BOX(&convrnn_backward<OnCuda>));
}

}  // namespace extension_cpp::convrnn
