// The schemas of matmul, and its CPU kernel.
//
// Blocks of both factors are copied to where the innermost loop reads them in order, as BLIS does (Van Zee and van de
// Geijn, "BLIS: A framework for rapidly instantiating BLAS functionality", 2015): a strip of b stays in the first-level
// cache, a block of a in the second, and a tile of c in registers. Each element of c is a sum over k in ascending order
// within blocks of kDepth, whatever the layouts, the number of threads and the place in the matrix: the bits don't
// depend on them. One row is multiplied by row.h, in an order of its own.
#include "matmul.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>

#include "common/cpu_dtypes.h"
#include "common/memory.h"
#include "common/simd.h"
#include "matmul/amx.h"
#include "matmul/packing.h"
#include "matmul/row.h"

namespace extension_cpp::matmul {
namespace {

// How much of the factors is worked on at a time. The tile takes all of 32, 16 or 16 vector registers but those for a
// row of b and an element of a.
template <class V, int kBytes>
struct Blocking {
  static constexpr int kLanes = sizeof(Vector<V, kBytes>) / sizeof(V);
  static constexpr int kRows = kBytes == 64 ? 14 : kBytes == 32 ? 6 : 4, kColumns = 2 * kLanes;
  static constexpr int64_t kDepth = 256;
  static constexpr int64_t kHeight = 524'288 / (kDepth * sizeof(V)) / kRows * kRows;
  static constexpr int64_t kWidth = 2'097'152 / (kDepth * sizeof(V)) / kColumns * kColumns;
};

// What a tile does to c: the sums take its place, are added to it, or begin with it.
enum class Into { kEmpty, kAdd, kGoOn };

// A tile of c, in registers: rows of a strip of a, kStrip apart, with those of a strip of b, b_step apart, of which it
// takes kVectors.
template <class V, int kBytes, int kRows, int kVectors, class P>
void multiply_tile(
    int64_t depth, const P* a, const P* b, int64_t b_step, Into into, V* c, int64_t c_step, int64_t rows,
    int64_t columns) {
  using B = Blocking<V, kBytes>;
  using Lanes = Vector<V, kBytes>;
  using Anywhere = typename VectorOf<V, kBytes>::anywhere;
  constexpr int kColumns = kVectors * B::kLanes;
  const bool add = into == Into::kAdd, whole = rows == kRows && columns == kColumns;
  V edge[kRows][kColumns];
  V* to = whole ? c : edge[0];
  const int64_t step = whole ? c_step : kColumns;
  Lanes sums[kRows][kVectors];
  if constexpr (std::is_same_v<P, V>) {
    if (into == Into::kGoOn) {
      for (int64_t i = 0; !whole && i < rows; ++i) std::copy_n(c + i * c_step, columns, edge[i]);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const auto* row = reinterpret_cast<const Anywhere*>(to + i * step);
        for (int v = 0; v < kVectors; ++v) sums[i][v] = row[v];
      }
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {  // By std::memset, compilers write zeros to memory and read them from there.
        for (int v = 0; v < kVectors; ++v) sums[i][v] = Lanes{};
      }
    }
    // A processor whose other thread is busy decodes half as many instructions: several k's at a time take fewer, and
    // so do products that read their element of a by themselves, of which half do, as it reads two of them at a time.
    // A compiler would read one for both vectors of a row, did it know that it is the same.
    constexpr int kAtOnce = kRows == B::kRows ? 2 : 1;
    const P* same_a = a;
#if defined(__GNUC__)
    if constexpr (kBytes == 64) asm("" : "+r"(same_a));
#endif
    const auto add_rows = [&]<int kCount>(std::integral_constant<int, kCount>) {
#pragma GCC unroll 4
      for (int q = 0; q < kCount; ++q) {
        Lanes row[kVectors];
        for (int v = 0; v < kVectors; ++v) row[v] = reinterpret_cast<const Anywhere*>(b + q * b_step)[v];
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
          for (int v = 0; v < kVectors; ++v) {
            sums[i][v] += (v > 0 && i < kRows / 2 ? same_a : a)[q * B::kRows + i] * row[v];
          }
        }
      }
      b += kCount * b_step;
      a += kCount * B::kRows;
      same_a += kCount * B::kRows;
    };
    int64_t p = 0, ahead = add ? 0 : rows;
    for (; p + kAtOnce <= depth; p += kAtOnce) {
      if (ahead < rows) {  // Else the sums in c are waited for at the end.
        for (int64_t j = 0; j < kColumns; j += 64 / sizeof(V)) __builtin_prefetch(c + ahead * c_step + j, 1);
        ++ahead;
      }
      add_rows(std::integral_constant<int, kAtOnce>());
    }
    if constexpr (kAtOnce > 1) {
      for (; p < depth; ++p) add_rows(std::integral_constant<int, 1>());
    }
  } else {
    add_pairs<kRows, B::kRows, kVectors>(depth, a, b, reinterpret_cast<float*>(sums));
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    auto* row = reinterpret_cast<Anywhere*>(to + i * step);
    for (int v = 0; v < kVectors; ++v) {
      if (whole && add) sums[i][v] += row[v];
      row[v] = sums[i][v];
    }
  }
  if (whole) return;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) c[i * c_step + j] = add ? edge[i][j] + c[i * c_step + j] : edge[i][j];
  }
}

// The same for a strip of a of as many rows as there are, and of b of as many columns. Compiled apart, as all tiles
// take much code.
template <class V, int kBytes, class P>
void multiply_strip(
    int64_t depth, const P* a, const P* b, int64_t b_step, Into into, V* c, int64_t c_step, int64_t rows,
    int64_t columns) {
  simd::run_apart<kBytes>([=] {
    constexpr int kRows = Blocking<P, kBytes>::kRows;
    // Of the lowest tile that has so many rows.
    const auto multiply_rows = [&]<int kVectors, int... kMost>(
                                   std::integral_constant<int, kVectors>, std::integer_sequence<int, kMost...>) {
      ((rows <= kMost &&
        (multiply_tile<V, kBytes, kMost, kVectors>(depth, a, b, b_step, into, c, c_step, rows, columns), true)) ||
       ...);
    };
    using Heights = std::conditional_t<
        kRows == 14, std::integer_sequence<int, 1, 4, 7, 10, 14>, std::integer_sequence<int, 1, kRows / 2, kRows>>;
    if (columns <= Blocking<P, kBytes>::kLanes) {
      multiply_rows(std::integral_constant<int, 1>(), Heights());
    } else {
      multiply_rows(std::integral_constant<int, 2>(), Heights());
    }
  });
}

constexpr int64_t kFewColumns = 2048, kSlice = 16;  // columns, and rows, of b that are read at a time

constexpr int64_t kInL2 = 128 * 1024;  // Bytes of b that stay there.

// Whether b lies in rows, of no more than so many bytes in all.
template <class V>
bool has_rows_of(const Factor<V>& b, int64_t k, int64_t bytes) {
  return b.outer == 1 && b.inner <= bytes / static_cast<int64_t>(sizeof(V)) / k;
}

// Whether a is to be packed as a whole, and b not: a has few rows, so that reading b takes the most time, or few k's,
// so that writing c does, or both are small.
template <class V, int kBytes>
bool is_few(int64_t m, int64_t k, const Factor<V>& b) {
  constexpr int64_t kRows = Blocking<V, kBytes>::kRows, kMostElements = 1 << 20, kSmall = 1 << 16;
  if (b.outer == 1 && k <= kSlice && m <= kSmall / k) return true;
  return (m <= 4 * kRows && (b.outer == 1 || k <= kMostElements / (4 * kRows))) ||
         (k <= kSmall / m && has_rows_of(b, k, kInL2));
}

// c = a * b for few rows, in one thread: b is read along its rows or columns, as far as they go, since what lies in
// other pages of memory is waited for. `packed_a` has room for all of a, or for kDepth of it where b lies in rows,
// `sums` for m rows of kFewColumns.
template <int kBytes, class V>
void multiply_few(
    const Factor<V>& a, const Factor<V>& b, int64_t m, int64_t n, int64_t k, V* c, int64_t c_step, V* packed_a,
    V* packed_b, V* sums) {
  using B = Blocking<V, kBytes>;
  const int64_t strips = (m + B::kRows - 1) / B::kRows;
  const auto rows_from = [&](int64_t i) { return std::min<int64_t>(B::kRows, m - i * B::kRows); };
  const auto pack = [&](int64_t p0, int64_t depth, V* to) {
    for (int64_t i = 0; i < strips; ++i) {
      const Factor<V> strip{a.data + i * B::kRows * a.outer + p0 * a.inner, a.outer, a.inner};
      pack_strip<B::kRows, kBytes>(strip, rows_from(i), depth, to + i * depth * B::kRows);
    }
  };
  const auto multiply = [&](const V* packed, int64_t depth, int64_t from, int64_t to, const V* rows_of_b,
                            int64_t b_step, Into into, V* into_c, int64_t step, int64_t columns, int64_t first,
                            int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      multiply_strip<V, kBytes>(
          to - from, packed + (i * depth + from) * B::kRows, rows_of_b, b_step, into, into_c + i * B::kRows * step,
          step, rows_from(i), columns);
    }
  };
  const auto strip_of_b = [&](int64_t p, int64_t j) {
    return Factor<V>{b.data + j * b.outer + p * b.inner, b.outer, b.inner};
  };
  if (b.outer != 1) {
    for (int64_t p0 = 0; p0 < k; p0 += B::kDepth) {
      pack(p0, std::min(B::kDepth, k - p0), packed_a + p0 * strips * B::kRows);
    }
    for (int64_t j = 0; j < n; j += B::kColumns) {
      const int64_t columns = std::min<int64_t>(B::kColumns, n - j);
      for (int64_t p0 = 0; p0 < k; p0 += B::kDepth) {
        const int64_t depth = std::min(B::kDepth, k - p0);
        pack_strip<B::kColumns, kBytes>(strip_of_b(p0, j), columns, depth, packed_b);
        multiply(
            packed_a + p0 * strips * B::kRows, depth, 0, depth, packed_b, B::kColumns,
            p0 == 0 ? Into::kEmpty : Into::kAdd, c + j, c_step, columns, 0, strips);
      }
    }
    return;
  }
  constexpr int64_t kAhead = 2 * B::kColumns;
  constexpr int64_t kInAnyCache = 1024 * 1024;  // Where the order of reading doesn't matter.
  const int64_t most = has_rows_of(b, k, kInAnyCache) || has_rows_of(b, B::kDepth, kInL2) ? B::kDepth : kSlice;
  for (int64_t j0 = 0; j0 < n; j0 += kFewColumns) {
    const int64_t width = std::min(kFewColumns, n - j0);
    for (int64_t p0 = 0; p0 < k; p0 += B::kDepth) {
      const int64_t depth = std::min(B::kDepth, k - p0);
      V* const to = p0 == 0 ? c + j0 : sums;
      const int64_t step = p0 == 0 ? c_step : width;
      if (j0 == 0 || k > B::kDepth) pack(p0, depth, packed_a);
      for (int64_t p = 0; p < depth; p += most) {
        const int64_t slice = std::min(most, depth - p);
        // Of few k's, a strip of rows is multiplied with all columns, as c is written to fewer pages at a time.
        const int64_t at_once = depth <= kSlice ? 1 : strips;
        for (int64_t i = 0; i < strips; i += at_once) {
          for (int64_t j = 0; j < width; j += B::kColumns) {
            const int64_t columns = std::min<int64_t>(B::kColumns, width - j);
            const Factor<V> strip = strip_of_b(p0 + p, j0 + j);
            const bool in_place = columns == B::kColumns || columns == B::kLanes;
            if (!in_place) pack_strip<B::kColumns, kBytes>(strip, columns, slice, packed_b);
            // Several rows at a time are too many for the processor to see that each is read in order.
            for (int64_t q = 0; i == 0 && j + kAhead < width && most == kSlice && q < slice; ++q) {
              const V* const ahead = strip.data + q * b.inner + kAhead;
              for (int64_t v = 0; v < B::kColumns; v += 64 / sizeof(V)) __builtin_prefetch(ahead + v);
            }
            multiply(
                packed_a, depth, p, p + slice, in_place ? strip.data : packed_b, in_place ? b.inner : B::kColumns,
                p == 0 ? Into::kEmpty : Into::kGoOn, to + j, step, columns, i, i + at_once);
          }
        }
      }
      for (int64_t i = 0; p0 > 0 && i < m; ++i) {
        for (int64_t j = 0; j < width; ++j) c[i * c_step + j0 + j] = sums[i * width + j] + c[i * c_step + j0 + j];
      }
    }
  }
}

// A tile of kRows rows, of rows of a that are read where they lie, a_step apart, with a strip of b.
template <class V, int kBytes, int kVectors>
void multiply_where_it_lies(
    int64_t depth, const V* a, int64_t a_step, const V* b, bool add, V* c, int64_t c_step, int64_t columns) {
  simd::run_apart<kBytes>([=] {
    using B = Blocking<V, kBytes>;
    using Lanes = Vector<V, kBytes>;
    using Anywhere = typename VectorOf<V, kBytes>::anywhere;
    constexpr int kRows = B::kRows, kAtOnce = 4, kOfThree = (kRows + 2) / 3;
    Lanes sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVectors; ++v) sums[i][v] = Lanes{};
    }
    // An instruction adds once or twice the step to a pointer: with one for each row, there are too few registers.
    const V *rows[kOfThree], *strip = b;
#pragma GCC unroll 8
    for (int i = 0; i < kOfThree; ++i) {
      rows[i] = a + 3 * i * a_step;
#if defined(__GNUC__)
      asm("" : "+r"(rows[i]));
#endif
    }
    const auto add_rows = [&]<int kCount>(std::integral_constant<int, kCount>) {
#pragma GCC unroll 4
      for (int q = 0; q < kCount; ++q) {
        Lanes of_b[kVectors];
        for (int v = 0; v < kVectors; ++v) of_b[v] = reinterpret_cast<const Anywhere*>(strip + q * B::kColumns)[v];
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
          for (int v = 0; v < kVectors; ++v) sums[i][v] += rows[i / 3][i % 3 * a_step + q] * of_b[v];
        }
      }
      strip += kCount * B::kColumns;
#pragma GCC unroll 8
      for (int i = 0; i < kOfThree; ++i) rows[i] += kCount;
    };
    int64_t p = 0;
    for (; p + kAtOnce <= depth; p += kAtOnce) add_rows(std::integral_constant<int, kAtOnce>());
#pragma GCC unroll 1
    for (; p < depth; ++p) add_rows(std::integral_constant<int, 1>());
    V edge[kRows][kVectors * B::kLanes];
    const bool whole = columns == kVectors * B::kLanes;
    V* const to = whole ? c : edge[0];
    const int64_t step = whole ? c_step : kVectors * B::kLanes;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      auto* row = reinterpret_cast<Anywhere*>(to + i * step);
      for (int v = 0; v < kVectors; ++v) {
        if (whole && add) sums[i][v] += row[v];
        row[v] = sums[i][v];
      }
    }
    for (int64_t i = 0; !whole && i < kRows; ++i) {
      for (int64_t j = 0; j < columns; ++j) c[i * c_step + j] = add ? edge[i][j] + c[i * c_step + j] : edge[i][j];
    }
  });
}

// Whether a is read where it lies, as there are so few columns that copying it takes as long as multiplying.
template <class V, int kBytes>
bool is_narrow(const Factor<V>& a, int64_t m, int64_t n) {
  using B = Blocking<V, kBytes>;
  return a.inner == 1 && n <= 2 * B::kColumns && m >= 2 * B::kRows;
}

constexpr int64_t kNarrowDepth = 4096;  // Of b, so many rows are packed at once.

// c = a * b for few columns, in one thread.
template <int kBytes, class V>
void multiply_narrow(
    const Factor<V>& a, const Factor<V>& b, int64_t m, int64_t n, int64_t k, V* c, int64_t c_step, V* packed_a,
    V* packed_b) {
  using B = Blocking<V, kBytes>;
  for (int64_t k0 = 0; k0 < k; k0 += kNarrowDepth) {
    const int64_t end = std::min(k0 + kNarrowDepth, k), width = round_up(n, B::kColumns);
    // For each kDepth of k, and each strip of b in it.
    const auto each = [&](const auto& body) {
      for (int64_t p = k0; p < end; p += B::kDepth) {
        const int64_t depth = std::min(B::kDepth, end - p);
        for (int64_t j = 0; j < n; j += B::kColumns) {
          body(p, depth, j, std::min<int64_t>(B::kColumns, n - j), packed_b + (p - k0) * width + j * depth);
        }
      }
    };
    each([&](int64_t p, int64_t depth, int64_t j, int64_t columns, V* packed) {
      const Factor<V> strip{b.data + j * b.outer + p * b.inner, b.outer, b.inner};
      pack_strip<B::kColumns, kBytes>(strip, columns, depth, packed);
    });
    for (int64_t i = 0; i < m; i += B::kRows) {
      const int64_t rows = std::min<int64_t>(B::kRows, m - i);
      const V* const from = a.data + i * a.outer;
      each([&](int64_t p, int64_t depth, int64_t j, int64_t columns, const V* packed) {
        V* const to = c + i * c_step + j;
        if (rows < B::kRows) {
          if (j == 0) pack_strip<B::kRows, kBytes>(Factor<V>{from + p, a.outer, 1}, rows, depth, packed_a);
          multiply_strip<V, kBytes>(
              depth, packed_a, packed, B::kColumns, p == 0 ? Into::kEmpty : Into::kAdd, to, c_step, rows, columns);
        } else if (columns <= B::kLanes) {
          multiply_where_it_lies<V, kBytes, 1>(depth, from + p, a.outer, packed, p > 0, to, c_step, columns);
        } else {
          multiply_where_it_lies<V, kBytes, 2>(depth, from + p, a.outer, packed, p > 0, to, c_step, columns);
        }
      });
    }
  }
}

constexpr int64_t kShallow = 4;

// c = a * b over kDepth k's, in one thread: rows of c are written one after the other, as that takes the most time.
// With `copies`, rows of b come to `rows_of_b` first.
template <int kBytes, int kDepth, class V>
void multiply_shallow(
    const Factor<V>& a, const Factor<V>& b, int64_t m, int64_t n, V* c, int64_t c_step, bool copies, V* rows_of_b) {
  simd::run_apart<kBytes>([=] {
    using Lanes = Vector<V, kBytes>;
    using Anywhere = typename VectorOf<V, kBytes>::anywhere;
    constexpr int kLanes = Blocking<V, kBytes>::kLanes;
    const int64_t step = copies ? round_up(n, kLanes) : b.inner;
    for (int64_t q = 0; copies && q < kDepth; ++q) {
      read(b.data + q * b.inner, b.outer, rows_of_b + q * step, n);
      std::fill_n(rows_of_b + q * step + n, step - n, V(0));
    }
    const V* const rows = copies ? rows_of_b : b.data;
    V* to = c;
    for (int64_t i = 0; i < m; ++i, to += c_step) {
      V of_a[kDepth];
      for (int q = 0; q < kDepth; ++q) of_a[q] = a.data[i * a.outer + q * a.inner];
      const auto put = [&](int64_t j, V* at) {
        Lanes sum{};
        for (int q = 0; q < kDepth; ++q) sum += of_a[q] * *reinterpret_cast<const Anywhere*>(rows + q * step + j);
        *reinterpret_cast<Anywhere*>(at) = sum;
      };
      int64_t j = 0;
      for (; j + 4 * kLanes <= n; j += 4 * kLanes) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) put(j + v * kLanes, to + j + v * kLanes);
      }
#pragma GCC unroll 1
      for (; j + kLanes <= n; j += kLanes) put(j, to + j);
      if (j == n) continue;
      if (n >= kLanes) {
        put(n - kLanes, to + n - kLanes);  // Some of them once more.
      } else if (c_step == n && (m - i) * n >= kLanes) {
        put(0, to);  // What is behind the row is that of the next.
      } else {
        V each[kLanes];
        put(0, each);
        std::copy_n(each, n, to);
      }
    }
  });
}

// c = a * b, of m by n sums over k, in one thread. False if it is wrong, as numbers were taken for zero.
template <int kBytes, class T, class P, class V>
bool multiply(
    const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k, V* c, int64_t c_step, P* packed_a,
    P* packed_b) {
  using B = Blocking<P, kBytes>;
  constexpr int kTerms = Packing<T, P>::kTerms;
  bool right = true;
  const int64_t most_width = part_of(n, B::kWidth, B::kColumns), most_height = part_of(m, B::kHeight, B::kRows);
  // Of rows of b, what several strips take is read at once.
  const int64_t at_once = (b.outer == 1 ? 8 : 1) * B::kColumns, slice = b.outer == 1 ? kSlice * kTerms : k;
  for (int64_t j0 = 0; j0 < n; j0 += most_width) {
    const int64_t width = std::min(most_width, n - j0);
    for (int64_t p0 = 0; p0 < k; p0 += B::kDepth * kTerms) {
      const int64_t terms = std::min(B::kDepth * kTerms, k - p0), depth = (terms + kTerms - 1) / kTerms;
      for (int64_t i0 = 0; i0 < m; i0 += most_height) {
        const int64_t height = std::min(most_height, m - i0);
        for (int64_t i = 0; i < height; i += B::kRows) {
          const Factor<T> strip{a.data + (i0 + i) * a.outer + p0 * a.inner, a.outer, a.inner};
          pack_strip<B::kRows, kBytes>(strip, std::min<int64_t>(B::kRows, height - i), terms, packed_a + i * depth);
          if constexpr (kTerms > 1) right = right && !has_subnormal(packed_a + i * depth, B::kRows * depth);
        }
        for (int64_t j = 0; j < width; j += B::kColumns) {
          // One block of a is done with strips before the next are packed, which then go where those were.
          P* const packed = packed_b + (m > most_height ? j : j % at_once) * depth;
          if (i0 == 0 && j % at_once == 0) {
            const int64_t end = std::min(j + at_once, width);
            for (int64_t p = 0; p < terms; p += slice) {
              for (int64_t s = j; s < end; s += B::kColumns) {
                const Factor<T> strip{b.data + (j0 + s) * b.outer + (p0 + p) * b.inner, b.outer, b.inner};
                pack_strip<B::kColumns, kBytes>(
                    strip, std::min<int64_t>(B::kColumns, end - s), std::min(slice, terms - p),
                    packed + (s - j) * depth + p / kTerms * B::kColumns);
              }
            }
            if constexpr (kTerms > 1) right = right && !has_subnormal(packed, round_up(end - j, B::kColumns) * depth);
          }
          const int64_t columns = std::min<int64_t>(B::kColumns, width - j);
          for (int64_t i = 0; i < height; i += B::kRows) {
            multiply_strip<V, kBytes>(
                depth, packed_a + i * depth, packed, B::kColumns, p0 == 0 ? Into::kEmpty : Into::kAdd,
                c + (i0 + i) * c_step + j0 + j, c_step, std::min<int64_t>(B::kRows, height - i), columns);
          }
        }
      }
    }
  }
  return right;
}

// The same for rows and columns of c of the type of the factors, which are packed as P: halves are summed in float32 a
// block at a time.
template <int kBytes, class P, class T>
bool multiply_block(const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k, T* c, int64_t c_step) {
  constexpr bool kInPlace = !std::is_same_v<T, float16> && !std::is_same_v<T, bfloat16>;
  using V = std::conditional_t<kInPlace, T, float>;
  using B = Blocking<P, kBytes>;
  const int64_t depth = std::min(B::kDepth, k), width = round_up(std::min(B::kWidth, n), B::kColumns);
  const int64_t height = round_up(std::min(B::kHeight, m), B::kRows);
  constexpr int64_t kBehind = 64;  // What pack_strip writes behind a strip.
  const int64_t of_a = height * depth + kBehind, of_b = width * depth + kBehind;
  if constexpr (kInPlace) {
    if (k <= kShallow) {
      const bool copies = b.outer != 1 || n < B::kLanes;
      const int64_t at_once = copies ? std::min(n, kFewColumns) : n,
                    of_rows = copies ? round_up(at_once, B::kLanes) * k : 0;
      Scratch scratch(Scratch::bytes<V>(of_rows));
      V* const rows_of_b = scratch.take<V>(of_rows);
      for (int64_t j = 0; j < n; j += at_once) {
        const Factor<V> part{b.data + j * b.outer, b.outer, b.inner};
        const int64_t columns = std::min(at_once, n - j);
        [&]<int... kLess>(std::integer_sequence<int, kLess...>) {
          ((k == kLess + 1 &&
            (multiply_shallow<kBytes, kLess + 1>(a, part, m, columns, c + j, c_step, copies, rows_of_b), true)) ||
           ...);
        }(std::make_integer_sequence<int, kShallow>());
      }
      return true;
    }
    if constexpr (kBytes > 16) {
      if (is_narrow<V, kBytes>(a, m, n)) {
        const int64_t of_rows = B::kRows * depth + kBehind;
        const int64_t of_columns = round_up(n, B::kColumns) * std::min(kNarrowDepth, k) + kBehind;
        Scratch scratch(Scratch::bytes<V>(of_rows) + Scratch::bytes<V>(of_columns));
        V *const packed_a = scratch.take<V>(of_rows), *const packed_b = scratch.take<V>(of_columns);
        multiply_narrow<kBytes>(a, b, m, n, k, c, c_step, packed_a, packed_b);
        return true;
      }
    }
    if (is_few<V, kBytes>(m, k, b)) {
      const int64_t of_all = round_up(m, B::kRows) * (b.outer == 1 ? depth : k) + kBehind,
                    of_sums = k > B::kDepth ? m * std::min(n, kFewColumns) : 0;
      const int64_t of_strip = B::kColumns * depth + kBehind;
      Scratch scratch(Scratch::bytes<V>(of_all) + Scratch::bytes<V>(of_strip) + Scratch::bytes<V>(of_sums));
      V *const packed_a = scratch.take<V>(of_all), *const packed_b = scratch.take<V>(of_strip);
      V* const sums = scratch.take<V>(of_sums);
      // A c that no cache holds is written a few rows at a time, in the order of its memory.
      constexpr int64_t kHeld = 1024 * 1024 / sizeof(V);
      const int64_t at_once = has_rows_of(b, k, kInL2) && n > kHeld / m ? B::kRows : m;
      for (int64_t i = 0; i < m; i += at_once) {
        const Factor<V> part{a.data + i * a.outer, a.outer, a.inner};
        multiply_few<kBytes>(part, b, std::min(at_once, m - i), n, k, c + i * c_step, c_step, packed_a, packed_b, sums);
      }
      return true;
    }
    Scratch scratch(Scratch::bytes<P>(of_a) + Scratch::bytes<P>(of_b));
    P *const packed_a = scratch.take<P>(of_a), *const packed_b = scratch.take<P>(of_b);
    return multiply<kBytes>(a, b, m, n, k, c, c_step, packed_a, packed_b);
  } else {
    // b is packed once for so many rows.
    const int64_t most_rows = part_of(m, 4 * B::kHeight, B::kRows), most_columns = part_of(n, B::kWidth, B::kColumns);
    const int64_t of_sums = std::min(most_rows, m) * std::min(most_columns, n);
    Scratch scratch(Scratch::bytes<P>(of_a) + Scratch::bytes<P>(of_b) + Scratch::bytes<V>(of_sums));
    P *const packed_a = scratch.take<P>(of_a), *const packed_b = scratch.take<P>(of_b);
    V* const sums = scratch.take<V>(of_sums);
    bool right = true;
    for (int64_t i = 0; i < m; i += most_rows) {
      const int64_t rows = std::min(most_rows, m - i);
      for (int64_t j = 0; j < n; j += most_columns) {
        const int64_t columns = std::min(most_columns, n - j);
        const Factor<T> part_a{a.data + i * a.outer, a.outer, a.inner}, part_b{b.data + j * b.outer, b.outer, b.inner};
        right = multiply<kBytes>(part_a, part_b, rows, columns, k, sums, columns, packed_a, packed_b) && right;
        for (int64_t r = 0; r < rows; ++r) {
          store(c + (i + r) * c_step + j, sums + r * columns, columns);
        }
      }
    }
    return right;
  }
}

// Rows and columns of a part of c, which end between vectors.
struct Part {
  Part(int64_t m, int64_t n, int64_t parts_m, int64_t parts_n, int64_t unit)
      : rows(round_up((m + parts_m - 1) / parts_m, 16)), columns(round_up((n + parts_n - 1) / parts_n, unit)) {}

  // What it takes for each of k, in multiply-adds: to pack an element takes as long as some of them.
  int64_t cost() const {
    constexpr int64_t kPacking = 16;
    return rows * columns + kPacking * (rows + columns);
  }

  int64_t rows, columns;
};

// Into how many parts to cut rows and columns for `threads` threads: each part packs what it needs by itself. Rows if
// columns gain little, as parts of a row end within lines of the cache, for which threads would wait.
std::array<int64_t, 2> cut(int64_t m, int64_t n, int64_t threads, int64_t unit) {
  const auto cost = [&](int64_t rows) {
    return threads % rows == 0 ? Part(m, n, rows, threads / rows, unit).cost() : std::numeric_limits<int64_t>::max();
  };
  int64_t best = threads;
  for (int64_t rows = threads; rows > 0; --rows) {
    if (cost(rows) < cost(best)) best = rows;
  }
  const int64_t most = cost(best) + cost(best) / 16;
  int64_t rows = threads;
  while (cost(rows) > most) --rows;
  return {rows, threads / rows};
}

// The same by the widest vectors.
template <class T>
bool multiply_part(const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k, T* c, int64_t c_step) {
  bool right = true;
  simd::run_for_width(
      [&]<int kBytes>() { right = multiply_block<kBytes, decltype(load(T()))>(a, b, m, n, k, c, c_step); });
  return right;
}

constexpr int64_t kInBlocks = 4096;  // Of so many elements of c, threads may share the blocks of k.

// c = a * b, whose sums are long and so few that threads would have nothing to do: they share the blocks of k, which
// are added in order then. The bits are those of one thread.
template <class T>
void run_in_blocks(const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k, int64_t threads, T* c) {
  constexpr int64_t kDepth = Blocking<T, 16>::kDepth;
  const int64_t blocks = (k + kDepth - 1) / kDepth, size = m * n;
  Scratch scratch(Scratch::bytes<T>(blocks * size));
  T* const sums = scratch.take<T>(blocks * size);
  parallel_for(0, blocks, (blocks + threads - 1) / threads, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t p = block * kDepth;
      const Factor<T> part_a{a.data + p * a.inner, a.outer, a.inner}, part_b{b.data + p * b.inner, b.outer, b.inner};
      multiply_part(part_a, part_b, m, n, std::min(kDepth, k - p), sums + block * size, n);
    }
  });
  std::copy_n(sums, size, c);
  for (int64_t block = 1; block < blocks; ++block) {
    for (int64_t i = 0; i < size; ++i) c[i] = sums[block * size + i] + c[i];
  }
}

// c = a * b for one row.
template <class T>
void run_row(const Factor<T>& a, const Factor<T>& b, int64_t n, int64_t k, T* c) {
  using V = decltype(load(T()));
  constexpr int64_t kWorthAThread = 256 * 1024;  // Bytes to read.
  const double bytes = static_cast<double>(n + 1) * static_cast<double>(k) * sizeof(V);
  const auto threads =
      static_cast<int64_t>(std::clamp<double>(bytes / kWorthAThread, 1, torch::stable::get_num_threads()));
  const auto multiply = [&](int64_t j, int64_t columns, int64_t p, int64_t depth, const Blocks<V>& to) {
    const Factor<T> part_a{a.data + p * a.inner, a.outer, a.inner};
    const Factor<T> part_b{b.data + j * b.outer + p * b.inner, b.outer, b.inner};
    simd::run_for_width([&]<int kBytes>() { multiply_row<kBytes>(part_a, part_b, columns, depth, to); });
  };
  const int64_t unit =
      b.outer == 1 ? 64 : 8;  // of columns, of which rows have whole lines, or as many are read at once
  const int64_t columns = round_up((n + threads - 1) / threads, unit);
  const int64_t parts = (n + columns - 1) / columns, blocks = (k + kDepthOfRow - 1) / kDepthOfRow;
  if (parts < threads && blocks > 1 && n <= kInBlocks) {  // Threads share the blocks of k, which are added up then.
    Scratch scratch(Scratch::bytes<V>(blocks * n));
    V* const sums = scratch.take<V>(blocks * n);
    parallel_for(0, blocks, (blocks + threads - 1) / threads, [&](int64_t begin, int64_t end) {
      const int64_t p = begin * kDepthOfRow;
      multiply(0, n, p, std::min(end * kDepthOfRow, k) - p, {sums + begin * n, n});
    });
    for (int64_t block = 1; block < blocks; ++block) {
      for (int64_t j = 0; j < n; ++j) sums[j] = sums[block * n + j] + sums[j];
    }
    store(c, sums, n);
    return;
  }
  const auto body = [&](int64_t begin, int64_t end) {
    const int64_t first = begin * columns, count = std::min(end * columns, n) - first;
    if constexpr (std::is_same_v<T, V>) {
      multiply(first, count, 0, k, {c + first});
    } else {
      Scratch scratch(Scratch::bytes<V>(count));
      V* const sums = scratch.take<V>(count);
      multiply(first, count, 0, k, {sums});
      store(c + first, sums, count);
    }
  };
  parts == 1 ? body(0, 1) : parallel_for(0, parts, 1, body);
}

template <class T>
void run(const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k, T* c) {
  if (m == 1 && k > kShallow) return run_row(a, b, n, k, c);
  // Where elements are multiplied a few times, writing them takes longer.
  const double worth_a_thread = k <= kShallow ? 64 * 64 * 16 : 64 * 64 * 64;
  const double work = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  const auto threads =
      static_cast<int64_t>(std::clamp<double>(work / worth_a_thread, 1, torch::stable::get_num_threads()));
  const int64_t unit = b.outer == 1 ? 64 : 32;  // Whole lines, of which a thread that reads b along rows takes several.
  const auto [parts_m, parts_n] = cut(m, n, threads, unit);
  if constexpr (std::is_floating_point_v<T>) {
    const Part part(m, n, parts_m, parts_n, unit);
    const bool idle = ((m + part.rows - 1) / part.rows) * ((n + part.columns - 1) / part.columns) < threads;
    if (idle && k >= 4 * Blocking<T, 16>::kDepth && m * n >= 8 && m * n <= kInBlocks) {
      return run_in_blocks(a, b, m, n, k, threads, c);
    }
  }
  const bool in_tiles = std::is_same_v<T, bfloat16> && has_tiles();
  std::atomic<bool> by_pairs = in_tiles || (std::is_same_v<T, bfloat16> && simd::multiplies_pairs());
  const auto [rows, columns] = Part(m, n, parts_m, parts_n, unit);
  auto body = [&, parts_n = parts_n, rows = rows, columns = columns](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t i = part / parts_n * rows, j = part % parts_n * columns;
      if (i >= m || j >= n) continue;
      const Factor<T> part_a{a.data + i * a.outer, a.outer, a.inner}, part_b{b.data + j * b.outer, b.outer, b.inner};
      const int64_t to_m = std::min(rows, m - i), to_n = std::min(columns, n - j);
      T* const to = c + i * n + j;
#if defined(EXTENSION_CPP_PAIRS)
      if constexpr (std::is_same_v<T, bfloat16>) {
        if (by_pairs) {
          bool right = false;
          simd::run_for_width([&]<int kBytes>() {
            if constexpr (kBytes == 64) {
#if defined(EXTENSION_CPP_AMX)
              if (in_tiles) right = multiply_in_tiles(part_a, part_b, to_m, to_n, k, to, n);
#endif
              if (!in_tiles) right = multiply_block<kBytes, Pair>(part_a, part_b, to_m, to_n, k, to, n);
            }
          });
          if (!right) by_pairs = false;
          continue;
        }
      }
#endif
      multiply_part(part_a, part_b, to_m, to_n, k, to, n);
    }
  };
  bool tried = by_pairs;
  do {
    threads == 1 ? body(0, 1) : parallel_for(0, parts_m * parts_n, 1, body);
  } while (std::exchange(tried, false) && !by_pairs);  // All of it again, so that the bits don't depend on the parts.
}

Tensor matmul(const Tensor& a, const Tensor& b, bool) {
  const Call<2> call(kMatmul, {&a, &b});
  const View &view_a = call.views[0], &view_b = call.views[1];
  const int64_t m = call["M"], k = call["K"], n = call["N"];
  const Tensor c = call.empty();
  if (m == 0 || n == 0) return c;
  dispatch(Floating(), kMatmul.name(), view_a.dtype, [&]<class T>(T) {
    T* out = static_cast<T*>(c.mutable_data_ptr());
    if (k == 0) {
      std::memset(out, 0, m * n * sizeof(T));
    } else {
      const Factor<T> factors[] = {factor_a<T>(view_a), factor_b<T>(view_b)};
      const bool swapped = n == 1 && m > 1;  // c has its elements in a row in either case.
      run<T>(factors[swapped], factors[!swapped], swapped ? n : m, swapped ? m : n, k, out);
    }
  });
  return c;
}

}  // namespace

EXTENSION_CPP_REGISTER(m) {
  m.add<&matmul>(kMatmul);
}

}  // namespace extension_cpp::matmul
