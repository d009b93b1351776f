// Runs an elementwise operator on the CPU: in parallel above a grain, and with the widest vectors that the machine has.
//
// An operator is a functor that maps the values of the inputs to those of the outputs, in float32 for float16, bfloat16
// and float32, in float64 for float64:
//
//   struct Add { template <class V> void operator()(const V (&in)[2], V (&out)[1]) const { out[0] = in[0] + in[1]; } };
#pragma once

#include <torch/csrc/stable/ops.h>

#include "cpu_dtypes.h"
#include "elementwise.h"
#include "simd.h"

namespace extension_cpp {

namespace detail {

// One row of n elements. kUnit: every stride is 1, which the compiler turns into vectors. The operands are distinct
// memory or the same element (overlap.h), so no iteration depends on another.
template <bool kUnit, size_t kOut, size_t kIn, class T, class Op>
void row(const Pointers<T, kOut + kIn>& data, const int64_t* steps, int64_t n, const Op& op) {
  using V = typename Compute<T>::type;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    V in[kIn], out[kOut];
    for (size_t k = 0; k < kIn; ++k) in[k] = load(data.at[kOut + k][kUnit ? i : i * steps[kOut + k]]);
    op(in, out);
    for (size_t k = 0; k < kOut; ++k) store(data.at[k][kUnit ? i : i * steps[k]], out[k]);
  }
}

// A contiguous row of float16, by way of float32 in blocks that stay in the first-level cache.
template <size_t kOut, size_t kIn, class Op>
void float16_row(const Pointers<float16, kOut + kIn>& data, int64_t n, const Op& op) {
  constexpr int64_t kBlock = 512;
  alignas(64) float in[kIn][kBlock], out[kOut][kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t size = std::min(kBlock, n - begin);
    for (size_t k = 0; k < kIn; ++k) load(data.at[kOut + k] + begin, in[k], size);
    Pointers<float, kOut + kIn> block;
    for (size_t k = 0; k < kOut; ++k) block.at[k] = out[k];
    for (size_t k = 0; k < kIn; ++k) block.at[kOut + k] = in[k];
    simd::run([&] { row<true, kOut, kIn>(block, nullptr, size, op); });
    for (size_t k = 0; k < kOut; ++k) store(data.at[k] + begin, out[k], size);
  }
}

template <size_t kOut, size_t kIn, class T, class Op>
void contiguous_row(const Pointers<T, kOut + kIn>& data, int64_t n, const Op& op) {
  if constexpr (std::is_same_v<T, float16>) {
    float16_row<kOut, kIn>(data, n, op);
  } else {
    simd::run([&] { row<true, kOut, kIn>(data, nullptr, n, op); });
  }
}

template <size_t kOut, size_t kIn, class T, class Op>
void rows(const Loop<kOut + kIn>& loop, Pointers<T, kOut + kIn> data, int64_t begin, int64_t end, const Op& op) {
  constexpr size_t N = kOut + kIn;
  int64_t index[kMaxDims], rest = begin;
  for (int d = 0; d < loop.ndim; ++d) {
    index[d] = rest % loop.sizes[d];
    rest /= loop.sizes[d];
    for (size_t k = 0; k < N; ++k) data.at[k] += index[d] * loop.strides[k][d];
  }
  int64_t steps[N];
  bool unit = true;
  for (size_t k = 0; k < N; ++k) {
    steps[k] = loop.strides[k][0];
    unit = unit && steps[k] == 1;
  }
  for (int64_t done = begin; done < end;) {
    const int64_t n = std::min(loop.sizes[0] - index[0], end - done);
    if (unit) {
      contiguous_row<kOut, kIn>(data, n, op);
    } else {
      simd::run([&] { row<false, kOut, kIn>(data, steps, n, op); });
    }
    done += n;
    index[0] += n;
    for (size_t k = 0; k < N; ++k) data.at[k] += n * steps[k];
    for (int d = 0; d + 1 < loop.ndim && index[d] == loop.sizes[d]; ++d) {
      index[d] = 0;
      ++index[d + 1];
      for (size_t k = 0; k < N; ++k) data.at[k] += loop.strides[k][d + 1] - loop.sizes[d] * loop.strides[k][d];
    }
  }
}

template <size_t kOut, size_t kIn, class T, class Op>
void run(const Loop<kOut + kIn>& loop, const Pointers<T, kOut + kIn>& data, const Op& op) {
  constexpr int64_t kGrain = 32'768;  // PyTorch's own grain for elementwise loops.
  auto body = [&](int64_t begin, int64_t end) {
    if (!loop.is_linear()) return rows<kOut, kIn>(loop, data, begin, end, op);
    auto from = data;
    for (T*& pointer : from.at) pointer += begin;
    contiguous_row<kOut, kIn>(from, end - begin, op);
  };
  if (loop.numel <= kGrain) return body(0, loop.numel);
  torch::stable::parallel_for(0, loop.numel, kGrain, body);
}

}  // namespace detail

struct Cpu {
  template <size_t kOut, size_t kIn, class Op>
  static void run(
      const char*, const View& first, const Loop<kOut + kIn>& loop,
      const std::array<const Tensor*, kOut + kIn>& operands, const Op& op) {
    if (loop.numel == 0) return;
    dispatch_floating_cpu(
        first.dtype, [&]<class T>(T) { detail::run<kOut, kIn, T>(loop, pointers<T, kOut>(operands), op); });
  }
};

}  // namespace extension_cpp
