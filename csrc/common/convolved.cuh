// Runs recurrences whose state is convolved on CUDA.
//
// What bounds them is the chain of T steps, of which each waits for the one before: shuffles, K multiply-adds and the
// function. All else is off the chain: inputs are loaded some steps before they are used, and results stored without
// waiting. Two numbers, of K = 3 and tanh in float32 on an H100: a step of a row that four warps hold takes 0.07 us,
// and blocks that meet wait 0.5 us for each other.
//
// So threads meet as rarely as they can. Three taps, and up to eight back in time or where a row is on several blocks,
// go through shuffled_kernel: a warp has a part of the row in registers and computes, beyond both its ends, what its
// neighbours have, so that warps meet in shared memory only every few steps, and blocks in memory every few dozen.
// Others have the state of a row in shared memory, twice, so that a step needs one barrier: vectors_kernel for more
// taps, and forward_kernel and backward_kernel, with an element a thread, for float64 and for few taps of short rows.
// What doesn't fit there goes through plain_kernel, which reads the last state where it was written, in y and grad_x.
// All compute an element in the same order, whatever its place: results don't depend on how a row lies on threads.
//
// Sums over a row are partial results, which finish_kernel adds up in a fixed order; where K sums don't fit into
// registers, products_kernel makes them.
#pragma once

#include <optional>

#include "convolved/registers.cuh"
#include "convolved/shared.cuh"
#include "convolved/vectors.cuh"
#include "launch.cuh"

namespace extension_cpp::convolved {
namespace {

// Any size: the last state is read where it was written. A block's barrier is one for its writes to memory, too.
template <bool kBack, class T, class F>
__global__ void __launch_bounds__(kMostThreads, 1) plain_kernel(Pass<T, F> pass) {
  using V = Wide<T>;
  const int64_t b = blockIdx.x, n = pass.n, taps = pass.taps, before = kBack ? taps - 1 - taps / 2 : taps / 2;
  T* to = pass.out + (kBack ? (b + 1) * pass.steps - 1 : b * (pass.steps + 1)) * n;
  if constexpr (!kBack) {
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) to[i] = pass.hidden.row(b, 0)[i * pass.hidden.along];
    to += n;
  }
  for (int64_t step = 0; step < pass.steps + kBack; ++step, to += kBack ? -n : n) {
    const T* const last = kBack ? to + n : to - n;
    const int64_t t = kBack ? pass.steps - step : step;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
      const V input = static_cast<V>(pass.in.row(b, t)[i * pass.in.along]);
      V sum = kBack ? V(0) : input;
      int64_t m = i < before ? i - before + n : i - before;
      for (int64_t k = 0; (!kBack || step > 0) && k < taps; ++k) {
        sum += static_cast<V>(pass.weights[(kBack ? taps - 1 - k : k) * pass.weights_stride]) * static_cast<V>(last[m]);
        if (++m == n) m = 0;
      }
      if constexpr (!kBack) {
        V h[] = {sum};
        apply(pass.f, h);
        to[i] = static_cast<T>(h[0]);
      } else if (t == 0) {
        pass.out_hidden[b * n + i] = static_cast<T>(input + sum);
      } else {
        const V h = static_cast<V>(pass.states.row(b, t)[i * pass.states.along]);
        to[i] = static_cast<T>((input + sum) * pass.f.slope(h));
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

// Whether vectors_kernel is quicker than those that have an element a thread, or it is theirs to do.
template <bool kBack>
bool is_for_vectors(const Sizes& sizes) {
  if (sizes.width > kMostWidth || sizes.steps > kMostSteps || Ring(sizes, kBack).bytes > kShared) return false;
  return sizes.taps > kFew || (!kBack && sizes.width > 256 && sizes.width % kTogether == 0);
}

// How a row lies for shuffled_kernel: as takes the least time, of as many blocks and steps between their meetings as
// are powers of two. No blocks: it is for another kernel.
template <bool kBack, class T>
Tiles tiles_of(const Sizes& sizes, int processors) {
  Tiles best;
  best.blocks = 0;
  if (sizeof(Wide<T>) != 4 || sizes.taps > kFew || sizes.width > int64_t{processors} * kThreads ||
      sizes.steps > kMostSteps) {
    return best;
  }
  const bool is_exact = sizes.taps == kExact;
  const int64_t each = is_exact ? kEachOf<kExact> : kEachOf<kFew>, span = each * kWarp;
  const int64_t ahead = is_exact ? kAheadOf<kExact> : kAheadOf<kFew>;
  const int64_t most_warps = (is_exact ? kMostThreadsOf<kBack, kExact> : kMostThreadsOf<kBack, kFew>) / kWarp;
  const int64_t step_before = kBack ? sizes.taps - 1 - sizes.taps / 2 : sizes.taps / 2;
  const int64_t step_after = sizes.taps - 1 - step_before;
  const auto whole = [&](int64_t x) { return ceil_div(x, each) * each; };
  // About what a step takes, in cycles of an H100: `alone` where a scheduler has one warp, else `shared` and `of_warps`
  // for each; and its share of what a meeting takes, and of what a launch of blocks that meet takes more.
  const double alone = !is_exact ? 430 : kBack ? 100 : 130, shared = !is_exact ? 210 : kBack ? 0 : 20;
  const double of_warps = !is_exact ? 145 : kBack ? 80 : 65, meeting = 130, far_meeting = 930, far_launch = 4400;
  double least = 1e300;
  for (int64_t blocks = 1; blocks <= processors; blocks *= 2) {
    for (int64_t apart = 16; apart <= (blocks > 1 ? 64 : 16); apart *= 2) {
      Tiles t;
      const int64_t own = whole(ceil_div(sizes.width, blocks)), rest = sizes.width - (blocks - 1) * own;
      const int64_t before = blocks > 1 ? whole(apart * step_before) : 0,
                    after = blocks > 1 ? whole(apart * step_after) : 0;
      if (rest < std::max<int64_t>({1, before, after})) continue;
      const int64_t width = blocks > 1 ? before + own + after : sizes.width;
      const auto margins = [&](int64_t steps) { return whole(steps * step_before) + steps * step_after; };
      int64_t warps = ceil_div(width, (span - margins(ahead)) / each * each);
      if (warps > 1) warps = ceil_div(warps, 4) * 4;
      if (warps > most_warps) continue;
      const int64_t tile = whole(ceil_div(width, warps));
      int64_t rounds = 1;
      const int64_t most = blocks > 1 ? apart / ahead : 64;
      for (int64_t r = 2; r <= most; ++r) {
        if (margins(r * ahead) + tile <= span && (blocks == 1 || most % r == 0)) rounds = r;
      }
      const double turns = static_cast<double>(ceil_div(sizes.batch, std::max<int64_t>(1, processors / blocks)));
      double cost = std::max(alone, shared + static_cast<double>(ceil_div(warps, 4)) * of_warps);
      cost += meeting / (rounds * ahead);
      if (blocks > 1) cost += far_meeting / apart + far_launch / static_cast<double>(sizes.steps + 1);
      if (blocks == 1 && !kBack && !is_exact) {  // Other kernels' cost.
        cost = (is_for_vectors<kBack>(sizes) ? 160 : 200) + static_cast<double>(width) / 3;
      }
      if (cost * turns >= least) continue;
      least = cost * turns;
      t.blocks = blocks, t.own = own, t.before = before, t.after = after, t.width = width, t.warps = warps,
      t.tile = tile;
      t.margin = whole(rounds * ahead * step_before), t.apart = rounds * ahead;
      t.around = ceil_div(t.margin, sizes.width) * sizes.width;
      t.meetings = blocks > 1 ? apart / ahead / rounds : 0;
      best = t;
    }
  }
  return best;
}

template <int kEach, class T>
bool has_vectors(const Rows<const T>& rows, int64_t n) {
  return rows.along == 1 && n % kEach == 0 && rows.batch % kEach == 0 && rows.time % kEach == 0 &&
         reinterpret_cast<uintptr_t>(rows.data) % alignof(Pack<T, kEach>) == 0;
}

// How the state lies on a block, in shared memory.
template <class V>
struct Layout {
  Layout(const Sizes& sizes, bool is_back) {
    const int64_t n = sizes.width, limit = is_back ? kThreads : kMostThreads;
    bytes = (2 * (n + sizes.taps) + sizes.taps + 4) / 4 * 4 * sizeof(V);
    if (n > 2 * kMostThreads || bytes > kShared) return;
    each = n <= limit ? 1 : n <= 2 * limit ? 2 : 4;
    is_few = !is_back && kHasFew && sizes.taps <= kFew;
    threads = static_cast<int>(ceil_div(ceil_div(n, each), kWarp) * kWarp);
  }

  // Calls f with the constants that this stands for.
  template <bool kBack, class F>
  void dispatch(F f) const {
    if (each == 1) return with_each<kBack, 1>(f);
    if constexpr (kBack) {
      if (each == 4) return with_each<kBack, 4>(f);
    }
    with_each<kBack, 2>(f);
  }

  template <bool kBack, int kEach, class F>
  void with_each(F f) const {
    if constexpr (kHasFew && !kBack) {
      if (is_few) return f.template operator()<kFew, kEach>();
    }
    f.template operator()<0, kEach>();
  }

  static constexpr bool kHasFew = sizeof(V) == 4;  // In float64 they would take as much code as all others together.
  int each = 0;                                    // Elements of a thread; 0: it doesn't fit.
  bool is_few = false;
  int threads;
  int64_t bytes;
};

// Launches the kernel for these sizes. `parts` and `grad_kernel` are shuffled_kernel's.
template <bool kBack, class T, class F>
void start(
    Launch& launch, const View& like, const Sizes& sizes, const Pass<T, F>& pass, [[maybe_unused]] const Tiles& tiles,
    [[maybe_unused]] Wide<T>* parts, [[maybe_unused]] T* grad_kernel, [[maybe_unused]] int processors) {
  using V = Wide<T>;
  if (sizes.batch == 0) return;
  if constexpr (sizeof(V) == 4) {
    if (tiles.blocks > 1 || (tiles.blocks == 1 && (kBack || sizes.taps == kExact))) {
      const int threads = tiles.rows * tiles.warps * kWarp;
      const int64_t bytes = tiles.rows * 2 * tiles.width * sizeof(V);
      const bool is_exact = sizes.taps == kExact;
      const auto has = [&](const Rows<const T>& r) {
        return is_exact ? has_vectors<kEachOf<kExact>>(r, pass.n) : has_vectors<kEachOf<kFew>>(r, pass.n);
      };
      const bool is_vectors = has(pass.in) && (!kBack || has(pass.states));
      const auto kernel = is_exact     ? is_vectors ? shuffled_kernel<kBack, kExact, true, T, F>
                                                    : shuffled_kernel<kBack, kExact, false, T, F>
                          : is_vectors ? shuffled_kernel<kBack, kFew, true, T, F>
                                       : shuffled_kernel<kBack, kFew, false, T, F>;
      if (tiles.blocks == 1) {
        return launch(
            kernel, sizes.batch / tiles.rows, threads, bytes, pass, tiles, static_cast<uint64_t*>(nullptr), parts,
            grad_kernel);
      }
      const int64_t groups = std::min<int64_t>(sizes.batch, processors / tiles.blocks);
      const int64_t bytes_of_words = groups * 2 * tiles.blocks * (tiles.before + tiles.after) * sizeof(uint64_t);
      const Tensor memory = scratch(like, bytes_of_words);
      launch.zero(memory.mutable_data_ptr(), bytes_of_words);
      return launch.together(
          kernel, groups * tiles.blocks, threads, bytes, pass, tiles, static_cast<uint64_t*>(memory.mutable_data_ptr()),
          parts, grad_kernel);
    }
  }
  if constexpr (sizeof(V) == 4) {
    if (is_for_vectors<kBack>(sizes)) {
      const Ring ring(sizes, kBack);
      const bool has =
          has_vectors<kTogether>(pass.in, pass.n) && (!kBack || has_vectors<kTogether>(pass.states, pass.n));
      const int vectors = (ring.skip + ring.taps + kTogether - 1) / kTogether;
      const auto kernel = [&] {
        if (!has) return vectors_kernel<kBack, false, kMostTogether, false, T, F>;
        if constexpr (!kBack) {
          if (vectors <= 2) return vectors_kernel<kBack, true, 2, true, T, F>;
          // To have this for five and six vectors too, or back in time, where it gains 5%, takes much code.
          if (vectors == 7 || vectors == 8) return vectors_kernel<kBack, true, 8, true, T, F>;
        }
        if (vectors <= 4) return vectors_kernel<kBack, true, 4, true, T, F>;
        return vectors_kernel<kBack, true, kMostTogether, false, T, F>;
      }();
      const int64_t threads = ceil_div(ceil_div(sizes.width, kTogether), kWarp) * kWarp;
      return launch(kernel, sizes.batch, static_cast<int>(threads), ring.bytes, pass, ring);
    }
  }
  const Layout<V> layout(sizes, kBack);
  if (layout.each == 0) return launch(plain_kernel<kBack, T, F>, sizes.batch, kMostThreads, 0, pass);
  layout.template dispatch<kBack>([&]<int kTaps, int kEach>() {
    const auto kernel = [] {
      if constexpr (kBack) {
        return backward_kernel<kEach, T, F>;
      } else {
        return forward_kernel<kTaps, kEach, T, F>;
      }
    }();
    launch(kernel, sizes.batch, layout.threads, layout.bytes, pass);
  });
}

template <class F>
void forward(
    const char* op, const F& f, const Sizes& sizes, const View& x, const View& kernel, const View& hidden,
    const Tensor& y) {
  Launch launch(op, x);
  dispatch(Floating(), op, x.dtype, [&]<class T>(T) {
    const Pass<T, F> pass{
        rows<T>(x),
        {},
        rows<T>(hidden),
        rows<T>(kernel).data,
        kernel.strides[2],
        sizes.taps,
        static_cast<T*>(y.mutable_data_ptr()),
        nullptr,
        sizes.batch,
        sizes.steps,
        sizes.width,
        f};
    const int processors = launch.processors();
    start<false, T>(launch, x, sizes, pass, tiles_of<false, T>(sizes, processors), nullptr, nullptr, processors);
  });
}

template <class F>
void backward(
    const char* op, const F& f, const Sizes& sizes, const View& grad, const View& y, const View& kernel,
    const Tensor& grad_x, const Tensor* grad_kernel, const Tensor& grad_hidden) {
  Launch launch(op, grad);
  dispatch(Floating(), op, grad.dtype, [&]<class T>(T) {
    using V = Wide<T>;
    T* const to_x = static_cast<T*>(grad_x.mutable_data_ptr());
    const Pass<T, F> pass{rows<T>(grad),     rows<T>(y),  {},          rows<T>(kernel).data,
                          kernel.strides[2], sizes.taps,  to_x,        static_cast<T*>(grad_hidden.mutable_data_ptr()),
                          sizes.batch,       sizes.steps, sizes.width, f};
    T* to_kernel = grad_kernel ? static_cast<T*>(grad_kernel->mutable_data_ptr()) : nullptr;
    const int64_t count = sizes.batch * sizes.steps;
    if (to_kernel && count == 0) {
      launch.zero(to_kernel, sizes.taps * sizeof(T));
      to_kernel = nullptr;
    }
    const int processors = launch.processors();
    Tiles tiles = tiles_of<true, T>(sizes, processors);
    const bool apart = tiles.blocks == 0;
    // Few and short rows have a block together, which saves the launch that adds up partial results.
    const bool alone = tiles.blocks == 1 && count > 0 && sizes.batch * tiles.warps * kWarp <= kThreads;
    if (alone) tiles.rows = static_cast<int>(sizes.batch);
    const int64_t splits = apart ? std::min(ceil_div(count, kThreads / kWarp), kSplits) : sizes.batch * tiles.blocks;
    std::optional<Tensor> memory;
    V* parts = nullptr;
    if (to_kernel && !alone) {
      memory = scratch(grad, splits * sizes.taps * static_cast<int64_t>(sizeof(V)));
      parts = static_cast<V*>(memory->mutable_data_ptr());
    }
    start<true, T>(launch, grad, sizes, pass, tiles, parts, to_kernel, processors);
    if (parts == nullptr) return;
    if (apart) {
      launch(
          products_kernel<T>, splits * ceil_div(sizes.taps, kProducts), kThreads, 0, to_x, pass.states, parts, splits,
          count, sizes.steps, sizes.width, sizes.taps);
    }
    const int threads = static_cast<int>(std::clamp<int64_t>(ceil_div(splits, kWarp) * kWarp, kWarp, kThreads));
    launch(finish_kernel<T>, sizes.taps, threads, 0, parts, to_kernel, splits, sizes.taps);
  });
}

}  // namespace
}  // namespace extension_cpp::convolved
