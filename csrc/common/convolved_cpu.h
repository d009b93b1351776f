// Runs recurrences whose state is convolved on the CPU.
//
// Rows of the batch are independent and go to threads. A row's state lies in the first-level cache, with its ends
// repeated beyond them, so that a tap is a shifted read; a step is a few passes of whole vectors over it, of which that
// of the function takes most.
#pragma once

#include <vector>

#include "cpu_dtypes.h"
#include "huge_pages.h"
#include "simd.h"

namespace extension_cpp::convolved {
namespace {

constexpr int64_t kLanes = 16;  // of the widest vectors; loops go on to a multiple

template <int kTaps, class V>
void add_taps(const V* from, const V* weights, V* to, int64_t n) {
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    V sum = to[i];
    for (int k = 0; k < kTaps; ++k) sum += weights[k] * from[i + k];
    to[i] = sum;
  }
}

// to[i] += sum_k weights[k] from[i + k]
template <class V>
void convolve(const V* from, const std::vector<V>& weights, V* to, int64_t n) {
  constexpr int64_t kMost = 8;
  const int64_t taps = weights.size();
  int64_t k = 0;
  for (; k + kMost <= taps; k += kMost) add_taps<kMost>(from + k, weights.data() + k, to, n);
  switch (taps - k) {
    case 1: return add_taps<1>(from + k, weights.data() + k, to, n);
    case 2: return add_taps<2>(from + k, weights.data() + k, to, n);
    case 3: return add_taps<3>(from + k, weights.data() + k, to, n);
    case 4: return add_taps<4>(from + k, weights.data() + k, to, n);
    case 5: return add_taps<5>(from + k, weights.data() + k, to, n);
    case 6: return add_taps<6>(from + k, weights.data() + k, to, n);
    case 7: return add_taps<7>(from + k, weights.data() + k, to, n);
  }
}

// totals[i % kLanes] += a[i] b[i]: short sums in V, long ones in float64.
template <class V>
void add_products(const V* a, const V* b, double* totals, int64_t n) {
  V sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) sums[l] += a[i + l] * b[i + l];
  }
  for (int64_t l = 0; i + l < n; ++l) sums[l] += a[i + l] * b[i + l];
  for (int64_t l = 0; l < kLanes; ++l) totals[l] += sums[l];
}

// A state of n elements that begins after `before` of its last ones, and goes on with its first ones.
template <class V>
struct Ring {
  Ring(int64_t n, int64_t padded, int64_t taps, int64_t before)
      : n(n), before(before), after(taps - 1 - before), values(padded + taps - 1) {}

  V* state() { return values.data() + before; }

  void close() {
    V* at = state();
    for (int64_t i = 0; i < before; ++i) values[i] = at[n - before + i];
    for (int64_t i = 0; i < after; ++i) at[n + i] = at[i];
  }

  int64_t n, before, after;
  std::vector<V> values;
};

// As read, of a ring of n elements from `first` on.
template <class T, class V>
void read_around(const T* from, int64_t step, int64_t n, int64_t first, V* to, int64_t count) {
  for (int64_t size; count > 0; first = 0, to += size, count -= size) {
    size = std::min(n - first, count);
    read(from + first * step, step, to, size);
  }
}

// What goes to threads: rows, or parts of long rows where these are few. A part computes, beyond both its ends, what
// its neighbours have: as a ring of its own, of which a step makes as many elements wrong as it reads beyond the ends.
// So parts meet only every `steps` steps. How many there are depends on sizes alone, and with it the order of sums.
struct Parts {
  Parts(const Sizes& sizes, int64_t steps, int64_t before) : own(sizes.width), steps(std::max<int64_t>(steps, 1)) {
    constexpr int64_t kMost = 64, kLeast = 1024, kShare = 16;  // A kShare-th of a part is others'.
    const int64_t lost = sizes.taps - 1;
    count = std::min(sizes.width / std::max(kLeast, 4 * kShare * lost), kMost / std::max<int64_t>(sizes.batch, 1));
    if (count >= 2) {
      own = (sizes.width + count - 1) / count;
      count = (sizes.width + own - 1) / own;
      this->steps = std::min(this->steps, own / kShare / std::max<int64_t>(lost, 1));
      margin = before * this->steps;
      span = own + lost * this->steps;
    } else {
      count = 1, span = own;
    }
    padded = (span + kLanes - 1) / kLanes * kLanes;
  }

  int64_t count, own;    // of a row; elements of a part
  int64_t steps;         // between two meetings
  int64_t margin = 0;    // before its own elements
  int64_t span, padded;  // with others' elements; to a multiple of kLanes
};

template <class T, class V>
std::vector<V> weights_of(const View& kernel) {
  const Rows<const T> from = rows<T>(kernel);
  std::vector<V> weights(kernel.sizes[2]);
  for (size_t k = 0; k < weights.size(); ++k) weights[k] = load(from.data[k * from.along]);
  return weights;
}

// Calls body(begin, end, from, to) for parts and `steps` steps, in parallel over parts where there is enough to do.
template <class Body>
void for_parts(const Sizes& sizes, const Parts& parts, int64_t steps, const Body& body) {
  constexpr int64_t kGrain = 16'384;  // elements worth a thread
  const int64_t items = sizes.batch * parts.count;
  for (int64_t from = 0; items > 0 && (from == 0 || from < steps); from += parts.steps) {
    const int64_t to = std::min(from + parts.steps, steps);
    const auto groups = static_cast<double>(1 + sizes.taps / kLanes);
    const double work = static_cast<double>(to - from + 1) * static_cast<double>(parts.span) * groups;
    const int64_t grain = std::max<int64_t>(1, static_cast<int64_t>(kGrain / work));
    const auto some = [&](int64_t begin, int64_t end) { body(begin, end, from, to); };
    items <= grain ? some(0, items) : parallel_for(0, items, grain, some);
  }
}

template <class F>
void forward(
    const char* op, const F& f, const Sizes& sizes, const View& x, const View& kernel, const View& hidden,
    const Tensor& y) {
  ask_for_huge_pages(y);
  dispatch(Floating(), op, x.dtype, [&]<class T>(T) {
    using V = typename Compute<T>::type;
    const auto weights = weights_of<T, V>(kernel);
    const Rows<const T> inputs = rows<T>(x), initial = rows<T>(hidden);
    T* const out = static_cast<T*>(y.mutable_data_ptr());
    const int64_t n = sizes.width;
    const Parts parts(sizes, sizes.steps, sizes.taps / 2);
    for_parts(sizes, parts, sizes.steps, [&](int64_t begin, int64_t end, int64_t from, int64_t to) {
      Ring<V> state(parts.span, parts.padded, sizes.taps, sizes.taps / 2);
      std::vector<V> sums(parts.padded);
      std::vector<T> made(parts.count > 1 ? parts.span : 0);
      simd::run([&] {
        for (int64_t item = begin; item < end; ++item) {
          const int64_t b = item / parts.count, at = item % parts.count * parts.own, own = std::min(parts.own, n - at);
          const int64_t first = (at + (parts.margin / n + 1) * n - parts.margin) % n;
          T* row = out + (b * (sizes.steps + 1) + from) * n;
          if (from == 0) {
            const T* const h = initial.row(b, 0);
            for (int64_t i = at; i < at + own; ++i) row[i] = h[i * initial.along];
            read_around(h, initial.along, n, first, state.state(), parts.span);
          } else {
            read_around(row, 1, n, first, state.state(), parts.span);
          }
          for (int64_t t = from; t < to; ++t) {
            row += n;
            state.close();
            read_around(inputs.row(b, t), inputs.along, n, first, sums.data(), parts.span);
            convolve(state.values.data(), weights, sums.data(), parts.padded);
            V* z = sums.data();
            for (int64_t i = 0; i < parts.padded; ++i) z[i] = f(z[i]);
            T* const h = parts.count > 1 ? made.data() : row;
            write(h, z, parts.span);
            if (parts.count > 1) std::copy_n(h + parts.margin, own, row + at);
            read(h, 1, state.state(), parts.span);
          }
        }
      });
    });
  });
}

template <class F>
void backward(
    const char* op, const F& f, const Sizes& sizes, const View& grad, const View& y, const View& kernel,
    const Tensor& grad_x, const Tensor* grad_kernel, const Tensor& grad_hidden) {
  ask_for_huge_pages(grad_x);
  dispatch(Floating(), op, grad.dtype, [&]<class T>(T) {
    using V = typename Compute<T>::type;
    auto weights = weights_of<T, V>(kernel);
    std::reverse(weights.begin(), weights.end());
    const Rows<const T> grads = rows<T>(grad), states = rows<T>(y);
    T* const out_x = static_cast<T*>(grad_x.mutable_data_ptr());
    T* const out_hidden = static_cast<T*>(grad_hidden.mutable_data_ptr());
    const int64_t n = sizes.width, taps = sizes.taps, last = taps - 1 - taps / 2;
    const Parts parts(sizes, sizes.steps + 1, last);
    std::vector<double> products(grad_kernel ? sizes.batch * parts.count * taps : 0);
    for_parts(sizes, parts, sizes.steps + 1, [&](int64_t begin, int64_t end, int64_t from, int64_t to) {
      Ring<V> deltas(parts.span, parts.padded, taps, last);
      std::vector<V> sums(parts.padded), state(parts.padded);
      std::vector<T> made(parts.count > 1 ? parts.span : 0);
      std::vector<double> totals(taps * kLanes);
      simd::run([&] {
        for (int64_t item = begin; item < end; ++item) {
          const int64_t b = item / parts.count, at = item % parts.count * parts.own, own = std::min(parts.own, n - at);
          const int64_t first = (at + (parts.margin / n + 1) * n - parts.margin) % n;
          std::fill(totals.begin(), totals.end(), 0.0);
          for (int64_t i = from; i < to; ++i) {
            const int64_t t = sizes.steps - i;
            T* const row = out_x + (b * sizes.steps + t) * n;  // of t + 1
            V *const g = sums.data(), *const h = state.data();
            read_around(states.row(b, t), states.along, n, first, h, parts.span);
            for (int64_t j = 0; j < parts.padded; ++j) g[j] = 0;
            if (i > 0) {
              if (i == from) read_around(row, 1, n, first, deltas.state(), parts.span);
              deltas.close();
              convolve(deltas.values.data(), weights, g, parts.padded);
              for (int64_t k = 0; grad_kernel && k < taps; ++k) {
                const V* const shifted = deltas.values.data() + parts.margin + taps - 1 - k;
                add_products(shifted, h + parts.margin, totals.data() + k * kLanes, own);
              }
            }
            read_around(grads.row(b, t), grads.along, n, first, deltas.state(), parts.span);
            const V* const now = deltas.state();
#pragma GCC ivdep
            for (int64_t j = 0; j < parts.span; ++j) g[j] += now[j];
            if (t == 0) {
              for (int64_t j = 0; j < own; ++j) store(out_hidden[b * n + at + j], g[parts.margin + j]);
              continue;
            }
#pragma GCC ivdep
            for (int64_t j = 0; j < parts.span; ++j) g[j] *= f.slope(h[j]);
            T* const delta = parts.count > 1 ? made.data() : row - n;
            write(delta, g, parts.span);
            if (parts.count > 1) std::copy_n(delta + parts.margin, own, row - n + at);
            read(delta, 1, deltas.state(), parts.span);
          }
          for (int64_t k = 0; grad_kernel && k < taps; ++k) {
            for (int64_t l = 0; l < kLanes; ++l) products[item * taps + k] += totals[k * kLanes + l];
          }
        }
      });
    });
    for (int64_t k = 0; grad_kernel && k < taps; ++k) {
      double sum = 0;
      for (int64_t item = 0; item < sizes.batch * parts.count; ++item) sum += products[item * taps + k];
      store(static_cast<T*>(grad_kernel->mutable_data_ptr())[k], static_cast<V>(sum));
    }
  });
}

}  // namespace
}  // namespace extension_cpp::convolved
