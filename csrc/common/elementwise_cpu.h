// Runs an elementwise operator on the CPU: in parallel above a grain, and with the widest vectors that the machine has.
#pragma once

#include "cpu_dtypes.h"
#include "loop.h"
#include "simd.h"

namespace extension_cpp {

namespace detail {

constexpr int64_t kBlock = 512;  // Elements that stay in the first-level cache, of every operand.

// So many rows of `size` elements: operand k has the next one `down[k]` elements further on. To call a loop that is
// compiled for the machine's vectors takes longer than a short row, so that one call goes through all of them.
template <size_t N>
struct Stack {
  int64_t size, count = 1;
  int64_t down[N] = {};

  template <class T, class Function>
  void each(Pointers<T, N> data, const Function& f) const {
    for (int64_t r = 0; r < count; ++r) {
      f(data);
      for (size_t k = 0; k < N; ++k) data.at[k] += down[k];
    }
  }
};

// Contiguous rows, of which input kSame has the first element only. Operands are distinct memory or the very same
// (overlap.h), so iterations are independent.
template <size_t kOut, size_t kIn, size_t kSame, class T, class Op>
void contiguous(const Pointers<T, kOut + kIn>& data, const Stack<kOut + kIn>& rows, const Op& op) {
  using V = typename Compute<T>::type;
  const auto row = [&](const Pointers<T, kOut + kIn>& data) {
    V same{};
    if constexpr (kSame < kIn) same = load(*data.at[kOut + kSame]);
#pragma GCC ivdep
    for (int64_t i = 0; i < rows.size; ++i) {
      V in[kIn], out[kOut];
      for (size_t k = 0; k < kIn; ++k) in[k] = k == kSame ? same : load(data.at[kOut + k][i]);
      op(in, out);
      for (size_t k = 0; k < kOut; ++k) store(data.at[k][i], out[k]);
    }
  };
  const auto body = [&] { rows.each(data, row); };
  std::is_same_v<T, V> ? simd::run_on_memory(body) : simd::run(body);  // Conversions take longer than reading.
}

// The same for an input that is known at run time; kIn: none.
template <size_t kOut, size_t kIn, class T, class Op>
void contiguous(const Pointers<T, kOut + kIn>& data, size_t same, const Stack<kOut + kIn>& rows, const Op& op) {
  [&]<size_t... kSame>(std::index_sequence<kSame...>) {
    static_cast<void>(((kSame == same && (contiguous<kOut, kIn, kSame>(data, rows, op), true)) || ...));
  }(std::make_index_sequence<kIn + 1>());
}

template <class T, class V>
void load_strided(const T* from, int64_t step, V* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = load(from[i * step]);
}

template <class T, class V>
void store_strided(T* to, int64_t step, const V* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store(to[i * step], from[i]);
}

// One row of n elements, in blocks: what is strided, broadcast or float16 goes through buffers in the type of the
// computation, what is contiguous is used where it lies.
template <size_t kOut, size_t kIn, class T, class Op>
void row(const Pointers<T, kOut + kIn>& data, const int64_t* steps, int64_t n, const Op& op) {
  using V = typename Compute<T>::type;
  alignas(64) V buffers[kOut + kIn][kBlock];
  Pointers<V, kOut + kIn> block;
  auto in_place = [&](size_t k) { return std::is_same_v<T, V> && steps[k] == 1; };
  for (size_t k = kOut; k < kOut + kIn; ++k) {
    if (steps[k] == 0) std::fill_n(buffers[k], std::min(n, kBlock), load(*data.at[k]));
  }
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t size = std::min(kBlock, n - begin);
    for (size_t k = 0; k < kOut + kIn; ++k) {
      T* at = data.at[k] + begin * steps[k];
      block.at[k] = in_place(k) ? reinterpret_cast<V*>(at) : buffers[k];
      if (k < kOut || in_place(k) || steps[k] == 0) continue;
      if (steps[k] == 1) {
        load(at, buffers[k], size);
      } else {
        load_strided(at, steps[k], buffers[k], size);
      }
    }
    contiguous<kOut, kIn, kIn>(block, {size}, op);
    for (size_t k = 0; k < kOut; ++k) {
      if (in_place(k)) continue;
      T* at = data.at[k] + begin * steps[k];
      if (steps[k] == 1) {
        store(at, buffers[k], size);
      } else {
        store_strided(at, steps[k], buffers[k], size);
      }
    }
  }
}

// The same where operands have the type of the computation and gain nothing from being copied together.
template <size_t kOut, size_t kIn, class T, class Op>
void strided(const Pointers<T, kOut + kIn>& data, const int64_t* steps, const Stack<kOut + kIn>& rows, const Op& op) {
  const auto row = [&](const Pointers<T, kOut + kIn>& data) {
    for (int64_t i = 0; i < rows.size; ++i) {
      T in[kIn], out[kOut];
      for (size_t k = 0; k < kIn; ++k) in[k] = data.at[kOut + k][i * steps[kOut + k]];
      op(in, out);
      for (size_t k = 0; k < kOut; ++k) data.at[k][i * steps[k]] = out[k];
    }
  };
  simd::run([&] { rows.each(data, row); });
}

template <size_t kOut, size_t kIn, class T, class Op>
void rows(const Loop<kOut + kIn>& loop, Pointers<T, kOut + kIn> data, int64_t begin, int64_t end, const Op& op) {
  constexpr size_t N = kOut + kIn;
  int64_t index[kMaxDims], steps[N], rest = begin;
  for (int d = 0; d < loop.ndim; ++d) {
    index[d] = rest % loop.sizes[d];
    rest /= loop.sizes[d];
    for (size_t k = 0; k < N; ++k) data.at[k] += index[d] * loop.strides[k][d];
  }
  constexpr bool kComputesInT = std::is_same_v<T, typename Compute<T>::type>;
  // Contiguous but for the input `same`; for float16 there are instructions for whole blocks only.
  bool unit = !std::is_same_v<T, float16>, apart = false;
  size_t same = kIn;
  for (size_t k = 0; k < N; ++k) {
    steps[k] = loop.strides[k][0];
    const bool is_same = steps[k] == 0 && k >= kOut && same == kIn;
    if (is_same) same = k - kOut;
    unit = unit && (is_same || steps[k] == 1);
    apart = apart || steps[k] > 1;
  }
  for (int64_t done = begin; done < end;) {
    Stack<N> part{std::min(loop.sizes[0] - index[0], end - done)};
    if (part.size == loop.sizes[0] && loop.ndim > 1) {
      part.count = std::min(loop.sizes[1] - index[1], (end - done) / part.size);
      for (size_t k = 0; k < N; ++k) part.down[k] = loop.strides[k][1];
    }
    if (unit) {
      contiguous<kOut, kIn>(data, same, part, op);
    } else if (kComputesInT && apart) {
      if constexpr (kComputesInT) strided<kOut, kIn>(data, steps, part, op);
    } else {
      part.each(data, [&](const Pointers<T, N>& data) { row<kOut, kIn>(data, steps, part.size, op); });
    }
    done += part.size * part.count;
    // To the end of the last row.
    index[0] += part.size;
    if (part.count > 1) index[1] += part.count - 1;
    for (size_t k = 0; k < N; ++k) data.at[k] += part.size * steps[k] + (part.count - 1) * part.down[k];
    for (int d = 0; d + 1 < loop.ndim && index[d] == loop.sizes[d]; ++d) {
      index[d] = 0;
      ++index[d + 1];
      for (size_t k = 0; k < N; ++k) data.at[k] += loop.strides[k][d + 1] - loop.sizes[d] * loop.strides[k][d];
    }
  }
}

// Where an operand lies across the rows, as a transposed one does, a row touches a cache line for each of its elements
// and the next row the same lines again. Cutting rows into pieces, and going down a column of pieces, finds them in the
// cache, unless they lie so many bytes apart that they push each other out of its few sets.
template <class T, int N>
Loop<N> cut_rows(const Loop<N>& loop) {
  constexpr int64_t kLeast = 16, kMost = 128, kSets = 16'384;
  int down = 0;
  for (int k = 0; k < N && down == 0; ++k) {
    const int64_t apart = loop.strides[k][0] * static_cast<int64_t>(sizeof(T));
    if (loop.strides[k][0] <= 1 || apart % kSets == 0) continue;
    for (int d = 1; d < loop.ndim; ++d) {
      if (loop.strides[k][d] == 1) down = d;
    }
  }
  int64_t piece = std::min(kMost, loop.sizes[0] / 2);
  while (piece >= kLeast && loop.sizes[0] % piece != 0) --piece;
  if (down == 0 || piece < kLeast || loop.ndim == kMaxDims) return loop;
  Loop<N> cut;
  cut.numel = loop.numel;
  auto add = [&](int d, int64_t size, int64_t step) {
    cut.sizes[cut.ndim] = size;
    for (int k = 0; k < N; ++k) cut.strides[k][cut.ndim] = loop.strides[k][d] * step;
    ++cut.ndim;
  };
  add(0, piece, 1);
  add(down, loop.sizes[down], 1);
  add(0, loop.sizes[0] / piece, piece);
  for (int d = 1; d < loop.ndim; ++d) {
    if (d != down) add(d, loop.sizes[d], 1);
  }
  return cut;
}

template <size_t kOut, size_t kIn, class T, class Op>
void run(const Loop<kOut + kIn>& loop, const Pointers<T, kOut + kIn>& data, const Op& op) {
  constexpr int64_t kGrain = 32'768;  // PyTorch's own grain for elementwise loops.
  if (loop.numel <= kGrain) return rows<kOut, kIn>(loop, data, 0, loop.numel, op);
  auto parallel = [&](const Loop<kOut + kIn>& order) {
    auto body = [&](int64_t begin, int64_t end) { rows<kOut, kIn>(order, data, begin, end, op); };
    parallel_for(0, order.numel, kGrain, body);
  };
  loop.is_linear() ? parallel(loop) : parallel(cut_rows<T>(loop));
}

}  // namespace detail

template <class Kernels, size_t kOut, size_t kIn, class Op>
void run_elementwise(
    const char* name, const View& first, const Loop<kOut + kIn>& loop,
    const std::array<const Tensor*, kOut + kIn>& operands, const Op& op) {
  if (loop.numel == 0) return;
  dispatch(Kernels(), name, first.dtype, [&]<class T>(T) {
    detail::run<kOut, kIn, T>(loop, pointers<T, kOut>(operands), op);
  });
}

}  // namespace extension_cpp
