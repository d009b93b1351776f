// The schemas of the convrnn operators, and their CPU kernels.
//
// Rows of the batch are independent and go to threads. A row's state lies in the first-level cache, with its ends
// repeated beyond them, so that a tap is a shifted read; a step is a few passes of whole vectors over it, of which that
// of tanh takes most.
#include "convrnn.h"

#include <vector>

#include <torch/csrc/stable/ops.h>

#include "common/cpu_dtypes.h"
#include "common/functions.h"
#include "common/huge_pages.h"
#include "common/simd.h"

namespace extension_cpp::convrnn {
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

  template <class T>
  void fill(const T* from, int64_t step) {
    V* at = values.data() + before;
    read(from, step, at, n);
    for (int64_t i = 0; i < before; ++i) values[i] = at[n - before + i];
    for (int64_t i = 0; i < after; ++i) at[n + i] = at[i];
  }

  int64_t n, before, after;
  std::vector<V> values;
};

template <class T, class V>
std::vector<V> weights_of(const View& kernel) {
  const Rows<const T> from = rows<T>(kernel);
  std::vector<V> weights(kernel.sizes[2]);
  for (size_t k = 0; k < weights.size(); ++k) weights[k] = load(from.data[k * from.along]);
  return weights;
}

// In parallel over the rows of the batch, where there is enough to do.
template <class Body>
void for_rows(const Sizes& sizes, const Body& body) {
  constexpr int64_t kGrain = 16'384;  // elements worth a thread
  if (sizes.batch == 0) return;
  const auto groups = static_cast<double>(1 + sizes.taps / kLanes);
  const double work = static_cast<double>(sizes.steps + 1) * static_cast<double>(sizes.width) * groups;
  const int64_t grain = std::max<int64_t>(1, static_cast<int64_t>(kGrain / work));
  if (sizes.batch <= grain) return body(0, sizes.batch);
  parallel_for(0, sizes.batch, grain, body);
}

struct OnCpu {
  static void forward(const Sizes& sizes, const View& x, const View& kernel, const View& hidden, const Tensor& y) {
    ask_for_huge_pages(y);
    dispatch(Floating(), kForward.name(), x.dtype, [&]<class T>(T) {
      using V = typename Compute<T>::type;
      const auto weights = weights_of<T, V>(kernel);
      const Rows<const T> from = rows<T>(x), first = rows<T>(hidden);
      T* const out = static_cast<T*>(y.mutable_data_ptr());
      const int64_t n = sizes.width, padded = (n + kLanes - 1) / kLanes * kLanes;
      for_rows(sizes, [&](int64_t begin, int64_t end) {
        Ring<V> state(n, padded, sizes.taps, sizes.taps / 2);
        std::vector<V> sums(padded);
        simd::run([&] {
          T* to = out + begin * (sizes.steps + 1) * n;
          for (int64_t b = begin; b < end; ++b) {
            const T* initial = first.row(b, 0);
            for (int64_t i = 0; i < n; ++i) to[i] = initial[i * first.along];
            for (int64_t t = 0; t < sizes.steps; ++t, to += n) {
              state.fill(to, 1);
              read(from.row(b, t), from.along, sums.data(), n);
              convolve(state.values.data(), weights, sums.data(), padded);
              V* z = sums.data();
              for (int64_t i = 0; i < padded; ++i) z[i] = hyperbolic_tangent(z[i]);
              write(to + n, z, n);
            }
            to += n;
          }
        });
      });
    });
  }

  static void backward(
      const Sizes& sizes, const View& grad, const View& y, const View& kernel, const Tensor& grad_x,
      const Tensor* grad_kernel, const Tensor& grad_hidden) {
    ask_for_huge_pages(grad_x);
    dispatch(Floating(), kBackward.name(), grad.dtype, [&]<class T>(T) {
      using V = typename Compute<T>::type;
      auto weights = weights_of<T, V>(kernel);
      std::reverse(weights.begin(), weights.end());
      const Rows<const T> grads = rows<T>(grad), states = rows<T>(y);
      T* const out_x = static_cast<T*>(grad_x.mutable_data_ptr());
      T* const out_hidden = static_cast<T*>(grad_hidden.mutable_data_ptr());
      const int64_t n = sizes.width, taps = sizes.taps, padded = (n + kLanes - 1) / kLanes * kLanes;
      std::vector<double> parts(grad_kernel ? sizes.batch * taps : 0);  // of each row of the batch
      for_rows(sizes, [&](int64_t begin, int64_t end) {
        Ring<V> deltas(n, padded, taps, taps - 1 - taps / 2);
        std::vector<V> sums(padded), from_later(padded), now(padded), before(padded);
        std::vector<double> totals(taps * kLanes);
        simd::run([&] {
          for (int64_t b = begin; b < end; ++b) {
            std::fill(from_later.begin(), from_later.end(), V(0));
            std::fill(totals.begin(), totals.end(), 0.0);
            read(states.row(b, sizes.steps), states.along, now.data(), n);
            for (int64_t t = sizes.steps; t > 0; --t) {
              T* const to = out_x + (b * sizes.steps + t - 1) * n;
              read(grads.row(b, t), grads.along, sums.data(), n);
              V *delta = sums.data(), *g = from_later.data(), *h = now.data();
#pragma GCC ivdep
              for (int64_t i = 0; i < padded; ++i) delta[i] = (delta[i] + g[i]) * ((1 - h[i]) * (1 + h[i]));
              write(to, delta, n);
              deltas.fill(to, 1);
              for (int64_t i = 0; i < padded; ++i) g[i] = 0;
              convolve(deltas.values.data(), weights, g, padded);
              read(states.row(b, t - 1), states.along, before.data(), n);
              for (int64_t k = 0; grad_kernel && k < taps; ++k) {
                add_products(deltas.values.data() + taps - 1 - k, before.data(), totals.data() + k * kLanes, n);
              }
              now.swap(before);
            }
            read(grads.row(b, 0), grads.along, sums.data(), n);
            for (int64_t i = 0; i < n; ++i) store(out_hidden[b * n + i], sums[i] + from_later[i]);
            for (int64_t k = 0; grad_kernel && k < taps; ++k) {
              for (int64_t l = 0; l < kLanes; ++l) parts[b * taps + k] += totals[k * kLanes + l];
            }
          }
        });
      });
      for (int64_t k = 0; grad_kernel && k < taps; ++k) {
        double sum = 0;
        for (int64_t b = 0; b < sizes.batch; ++b) sum += parts[b * taps + k];
        store(static_cast<T*>(grad_kernel->mutable_data_ptr())[k], static_cast<V>(sum));
      }
    });
  }
};

}  // namespace

EXTENSION_CPP_REGISTER(m) {
  m.add(kForward, TORCH_BOX(&convrnn_forward<OnCpu>));
  m.add(kBackward, TORCH_BOX(&convrnn_backward<OnCpu>));
}

}  // namespace extension_cpp::convrnn
