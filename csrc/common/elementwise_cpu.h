// Runs an elementwise operator on the CPU: in parallel above a grain, and with the widest vectors that the machine has.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu_dtypes.h"
#include "loop.h"
#include "simd.h"

namespace extension_cpp {

namespace detail {

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

// The formula of a vector of numbers. A loop that stays one becomes instructions for the vector; the arrays, registers.
template <int kLanes, size_t kIn, size_t kOut, class V, class Op>
void apply(const V (&in)[kIn][kLanes], V (&out)[kOut][kLanes], const Op& op) {
#pragma GCC ivdep
#pragma GCC unroll 1
  for (int lane = 0; lane < kLanes; ++lane) {
    V of_lane[kIn], results[kOut];
    for (size_t k = 0; k < kIn; ++k) of_lane[k] = in[k][lane];
    op(of_lane, results);
    for (size_t k = 0; k < kOut; ++k) out[k][lane] = results[k];
  }
}

// Halves in registers, a vector at a time, of rows that are any steps apart.
template <size_t kOut, size_t kIn, class T, class Op>
void in_vectors(
    const Pointers<T, kOut + kIn>& data, const int64_t (&steps)[kOut + kIn], const Stack<kOut + kIn>& rows,
    const Op& op) {
  constexpr size_t N = kOut + kIn;
  simd::run_for_width([&]<int kBytes>() {
    constexpr int kLanes = kBytes / sizeof(float);
    const auto line = [&](const Pointers<T, N>& data, const int64_t (&steps)[N], int64_t n) {
      alignas(64) float in[kIn][kLanes], out[kOut][kLanes];
      alignas(64) T lanes[kLanes] = {};
      for (size_t k = 0; k < kIn; ++k) {
        if (steps[kOut + k] != 0) continue;
        collect<kBytes>(data.at[kOut + k], 0, lanes);
        load_vector<kBytes>(lanes, in[k]);
      }
      for (int64_t i = 0; i < n; i += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, n - i);
        for (size_t k = 0; k < kIn; ++k) {
          const int64_t step = steps[kOut + k];
          const T* const from = data.at[kOut + k] + i * step;
          if (step == 0) continue;
          if (step != 1 && count == kLanes) collect<kBytes>(from, step, lanes);
          for (int64_t lane = 0; count < kLanes && lane < count; ++lane) lanes[lane] = from[lane * step];
          load_vector<kBytes>(step == 1 && count == kLanes ? from : lanes, in[k]);
        }
        apply(in, out, op);
        for (size_t k = 0; k < kOut; ++k) {
          T* const to = data.at[k] + i * steps[k];
          if (steps[k] == 1 && count == kLanes) {
            store_vector<kBytes>(to, out[k]);
            continue;
          }
          store_vector<kBytes>(lanes, out[k]);
          for (int64_t lane = 0; lane < count; ++lane) to[lane * steps[k]] = lanes[lane];
        }
      }
    };
    // Vectors of short rows would be empty for the most part: they go down the rows, so many that these stay cached.
    constexpr int64_t kRows = 256;
    const bool down = rows.size < kLanes && rows.count > rows.size;
    const int64_t at_once = down ? kRows : 1, lines = down ? rows.size : 1;
    Pointers<T, N> first = data;
    for (int64_t row = 0; row < rows.count; row += at_once) {
      Pointers<T, N> at = first;
      for (int64_t i = 0; i < lines; ++i) {
        line(at, down ? rows.down : steps, down ? std::min(kRows, rows.count - row) : rows.size);
        for (size_t k = 0; k < N; ++k) at.at[k] += steps[k];
      }
      for (size_t k = 0; k < N; ++k) first.at[k] += at_once * rows.down[k];
    }
  });
}

// Contiguous rows, of which input kSame has the first element only. Operands are distinct memory or the very same
// (overlap.h), so iterations are independent.
template <size_t kOut, size_t kIn, size_t kSame, class T, class Op>
void contiguous(const Pointers<T, kOut + kIn>& data, const Stack<kOut + kIn>& rows, const Op& op) {
  const auto row = [&](const Pointers<T, kOut + kIn>& data) {
    T same{};
    if constexpr (kSame < kIn) same = *data.at[kOut + kSame];
#pragma GCC ivdep
    for (int64_t i = 0; i < rows.size; ++i) {
      T in[kIn], out[kOut];
      for (size_t k = 0; k < kIn; ++k) in[k] = k == kSame ? same : data.at[kOut + k][i];
      op(in, out);
      for (size_t k = 0; k < kOut; ++k) data.at[k][i] = out[k];
    }
  };
  simd::run_on_memory([&] { rows.each(data, row); });
}

constexpr int64_t kMostLanes = 64 / sizeof(float);

// Rows of halves, of kMostLanes elements or more, whose conversions are instructions that the compiler makes of no
// loop. Of input `same` they have the first element only; kIn: of none.
template <size_t kOut, size_t kIn, class T, class Op>
void contiguous_halves(const Pointers<T, kOut + kIn>& data, size_t same, const Stack<kOut + kIn>& rows, const Op& op) {
  simd::run_for_width([&]<int kBytes>() {
    constexpr int64_t kLanes = kBytes / sizeof(float);
    rows.each(data, [&](const Pointers<T, kOut + kIn>& data) {
      alignas(64) T lanes[kLanes] = {};
      if (same < kIn) collect<kBytes>(data.at[kOut + same], 0, lanes);
      const auto read = [&](int64_t i, float (&in)[kIn][kLanes]) {
        for (size_t k = 0; k < kIn; ++k) load_vector<kBytes>(k == same ? lanes : data.at[kOut + k] + i, in[k]);
      };
      const auto write = [&](int64_t i, const float (&in)[kIn][kLanes]) {
        alignas(64) float out[kOut][kLanes];
        apply(in, out, op);
        for (size_t k = 0; k < kOut; ++k) store_vector<kBytes>(data.at[k] + i, out[k]);
      };
      // The last vector shares elements with the one before. It is read first, as an input may be written.
      const bool overlaps = rows.size % kLanes != 0;
      alignas(64) float last[kIn][kLanes];
      if (overlaps) read(rows.size - kLanes, last);
      for (int64_t i = 0; i + kLanes <= rows.size; i += kLanes) {
        alignas(64) float in[kIn][kLanes];
        read(i, in);
        write(i, in);
      }
      if (overlaps) write(rows.size - kLanes, last);
    });
  });
}

// Contiguous rows, of which an input that is known at run time has the first element only; kIn: none.
template <size_t kOut, size_t kIn, class T, class Op>
void contiguous(const Pointers<T, kOut + kIn>& data, size_t same, const Stack<kOut + kIn>& rows, const Op& op) {
  [&]<size_t... kSame>(std::index_sequence<kSame...>) {
    static_cast<void>(((kSame == same && (contiguous<kOut, kIn, kSame>(data, rows, op), true)) || ...));
  }(std::make_index_sequence<kIn + 1>());
}

// A row of n elements, next to each other but for inputs of which there is one: those fill buffers, of which a block
// has no more than stays in the first-level cache.
template <size_t kOut, size_t kIn, class T, class Op>
void row(const Pointers<T, kOut + kIn>& data, const int64_t (&steps)[kOut + kIn], int64_t n, const Op& op) {
  constexpr int64_t kBlock = 512;
  alignas(64) T buffers[kIn][kBlock];
  Pointers<T, kOut + kIn> block = data;
  for (size_t k = 0; k < kIn; ++k) {
    if (steps[kOut + k] != 0) continue;
    std::fill_n(buffers[k], std::min(n, kBlock), *data.at[kOut + k]);
    block.at[kOut + k] = buffers[k];
  }
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    contiguous<kOut, kIn, kIn>(block, {std::min(kBlock, n - begin)}, op);
    for (size_t k = 0; k < kOut + kIn; ++k) block.at[k] += kBlock * steps[k];
  }
}

// Rows whose elements are any steps apart, where operands have the type of the computation and gain nothing from being
// copied together.
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

// How far apart operands have the elements of a row, and which loop goes through such rows.
template <size_t kOut, size_t kIn, class T>
struct Steps {
  static constexpr size_t N = kOut + kIn;

  explicit Steps(const int64_t (&steps)[N]) {
    for (size_t k = 0; k < N; ++k) {
      at[k] = steps[k];
      const bool is_same = steps[k] == 0 && k >= kOut && same == kIn;
      if (is_same) same = k - kOut;
      unit = unit && (is_same || steps[k] == 1);
      apart = apart || steps[k] > 1;
    }
  }

  // Not inlined: its two callers share the loops, of which there is one for each of the machine's vectors.
  template <class Op>
  [[gnu::noinline]] void go_through(const Pointers<T, N>& data, const Stack<N>& rows, const Op& op) const {
    if constexpr (!std::is_same_v<T, typename Compute<T>::type>) {
      if (unit && rows.size >= kMostLanes) return contiguous_halves<kOut, kIn>(data, same, rows, op);
      in_vectors<kOut, kIn>(data, at, rows, op);
    } else if (unit) {
      contiguous<kOut, kIn>(data, same, rows, op);
    } else if (apart || rows.size < kMostLanes) {
      strided<kOut, kIn>(data, at, rows, op);
    } else {
      rows.each(data, [&](const Pointers<T, N>& data) { row<kOut, kIn>(data, at, rows.size, op); });
    }
  }

  int64_t at[N];
  bool unit = true, apart = false;  // contiguous but for the input `same`, and whether there is a step above 1
  size_t same = kIn;
};

// Transposes a square of as many elements as a vector of 16 bytes has. Interleaving is an instruction of every x86-64;
// exchanges of lanes in wider vectors would take up to 30% longer here for float32.
template <class T>
void transpose_square(const T* from, int64_t step, T* to, int64_t pitch) {
  constexpr int kLanes = 16 / sizeof(T);
  using Bits = std::conditional_t<
      sizeof(T) == 1, uint8_t,
      std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;
  static_assert(sizeof(T) == sizeof(Bits));
  typedef Bits Vector __attribute__((vector_size(16)));
  Vector rows[kLanes], interleaved[kLanes];
  for (int i = 0; i < kLanes; ++i) memcpy(&rows[i], from + i * step, sizeof(Vector));
  // The first half of the rows and the second are interleaved, as often as it takes for each element to arrive.
  [&]<int... kLane>(std::integer_sequence<int, kLane...>) {
    for (int stage = 1; stage < kLanes; stage *= 2) {
      for (int i = 0; i < kLanes / 2; ++i) {
        const Vector &x = rows[i], &y = rows[i + kLanes / 2];
        interleaved[2 * i] = Vector{(kLane % 2 ? y : x)[kLane / 2]...};
        interleaved[2 * i + 1] = Vector{(kLane % 2 ? y : x)[(kLanes + kLane) / 2]...};
      }
      for (int i = 0; i < kLanes; ++i) rows[i] = interleaved[i];
    }
  }(std::make_integer_sequence<int, kLanes>());
  for (int i = 0; i < kLanes; ++i) memcpy(to + i * pitch, &rows[i], sizeof(Vector));
}

// Copies columns, `step` elements apart, of elements next to each other into the rows of a tile.
template <class T>
[[gnu::noinline]] void transpose(const T* from, int64_t step, int64_t columns, int64_t rows, T* to, int64_t pitch) {
  constexpr int64_t kAhead = 32, kSide = 16 / sizeof(T);
  int64_t i = 0;
  for (; i + kSide <= columns; i += kSide) {
    const T* const column = from + i * step;
    // The processor foresees neighbouring lines alone.
    for (int64_t k = kAhead; k < kAhead + kSide; ++k) __builtin_prefetch(column + k * step);
    int64_t r = 0;
    for (; r + kSide <= rows; r += kSide) transpose_square(column + r, step, to + r * pitch + i, pitch);
    for (; r < rows; ++r) {
      for (int64_t k = 0; k < kSide; ++k) to[r * pitch + i + k] = column[k * step + r];
    }
  }
  for (; i < columns; ++i) {
    for (int64_t r = 0; r < rows; ++r) to[r * pitch + i] = from[i * step + r];
  }
}

// Where an input lies across the rows, as a transposed one does, a row touches a cache line for each of its elements,
// and the next row the same lines again. So whole lines are read, into as many rows of a tile as they have elements.
template <size_t kOut, size_t kIn, class T, class Op>
void in_tiles(
    const Pointers<T, kOut + kIn>& data, const int64_t (&steps)[kOut + kIn], const bool (&across)[kOut + kIn],
    const Stack<kOut + kIn>& part, const Op& op) {
  constexpr size_t N = kOut + kIn;
  constexpr int64_t kRows = 64 / sizeof(T), kColumns = 512 / sizeof(T);
  alignas(64) T tiles[kIn][kRows * kColumns];
  // Where rows are short, a tile has more of them.
  const int64_t columns = std::min(kColumns, part.size), most_rows = kColumns / columns * kRows;
  int64_t steps_in_tiles[N];
  for (size_t k = 0; k < N; ++k) steps_in_tiles[k] = across[k] ? 1 : steps[k];
  const Steps<kOut, kIn, T> of_tiles(steps_in_tiles);
  for (int64_t first = 0; first < part.count; first += most_rows) {
    for (int64_t begin = 0; begin < part.size; begin += columns) {
      Stack<N> tile{std::min(columns, part.size - begin), std::min(most_rows, part.count - first)};
      Pointers<T, N> at;
      for (size_t k = 0; k < N; ++k) {
        at.at[k] = data.at[k] + begin * steps[k] + first * part.down[k];
        tile.down[k] = part.down[k];
      }
      for (size_t k = 0; k < kIn; ++k) {
        if (!across[kOut + k]) continue;
        transpose(at.at[kOut + k], steps[kOut + k], tile.size, tile.count, tiles[k], columns);
        at.at[kOut + k] = tiles[k];
        tile.down[kOut + k] = columns;
      }
      of_tiles.go_through(at, tile, op);
    }
  }
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
  bool across[N] = {}, any_across = false;
  for (size_t k = 0; k < N; ++k) {
    steps[k] = loop.strides[k][0];
    across[k] = k >= kOut && steps[k] > 1 && loop.ndim > 1 && loop.strides[k][1] == 1;
    any_across = any_across || across[k];
  }
  // Rows that are shorter than a vector are not transposed in vectors; other loops go through them in less time.
  if (loop.sizes[0] * sizeof(T) < 16) any_across = false;
  const Steps<kOut, kIn, T> in_rows(steps);
  for (int64_t done = begin; done < end;) {
    Stack<N> part{std::min(loop.sizes[0] - index[0], end - done)};
    if (part.size == loop.sizes[0] && loop.ndim > 1) {
      part.count = std::min(loop.sizes[1] - index[1], (end - done) / part.size);
      for (size_t k = 0; k < N; ++k) part.down[k] = loop.strides[k][1];
    }
    if (any_across && part.count > 1) {
      in_tiles<kOut, kIn>(data, steps, across, part, op);
    } else {
      in_rows.go_through(data, part, op);
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

// The dimension that an input lies along, and rows don't, comes behind that of the rows.
template <int kOut, int N>
Loop<N> across_second(Loop<N> loop) {
  for (int k = kOut; k < N; ++k) {
    if (loop.strides[k][0] <= 1) continue;
    for (int d = 2; d < loop.ndim; ++d) {
      if (loop.strides[k][d] != 1 || loop.sizes[d] == 1) continue;
      std::swap(loop.sizes[1], loop.sizes[d]);
      for (auto& strides : loop.strides) std::swap(strides[1], strides[d]);
      return loop;
    }
  }
  return loop;
}

template <size_t kOut, size_t kIn, class T, class Op>
void run(const Loop<kOut + kIn>& loop, const Pointers<T, kOut + kIn>& data, const Op& op) {
  constexpr int64_t kGrain = 32'768;  // PyTorch's own grain for elementwise loops.
  if (loop.numel <= kGrain && loop.ndim < 3) return rows<kOut, kIn>(loop, data, 0, loop.numel, op);
  const Loop<kOut + kIn> order = across_second<kOut>(loop);
  auto body = [&](int64_t begin, int64_t end) { rows<kOut, kIn>(order, data, begin, end, op); };
  parallel_for(0, order.numel, kGrain, body);
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
