// The schemas of matmul, and its CPU kernel.
//
// Blocks of both factors are copied to where the innermost loop reads them in order, as BLIS does (Van Zee and van de
// Geijn, "BLIS: A framework for rapidly instantiating BLAS functionality", 2015): a strip of b stays in the first-level
// cache, a block of a in the second, and a tile of c in registers. Each element of c is a sum over k in ascending order
// within blocks of kDepth, whatever the layouts, the number of threads and the place in the matrix: the bits don't
// depend on them. One row is multiplied by row.h, and bfloat16 by pairs.h or amx.h, in orders of their own.
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
#include "matmul/few.h"
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

// Terms that P is packed of, and that are summed one after the other.
template <class P>
constexpr int kTermsOf = Packing<bfloat16, P>::kTerms;
template <class P>
constexpr int64_t kDepthOf = Blocking<P, 16>::kDepth * kTermsOf<P>;

// What a tile does to c: the sums take its place, are added to it, or begin with it.
enum class Into { kEmpty, kAdd, kGoOn };

// A tile of c, in registers: rows of a strip of a, kStrip apart, with those of a strip of b, b_step apart, of which it
// takes kVectors. Meanwhile, as much as a strip of b has is fetched from `next` on, where there is one.
template <class V, int kBytes, int kRows, int kVectors, class P>
void multiply_tile(
    int64_t depth, const P* a, const P* b, int64_t b_step, Into into, V* c, int64_t c_step, int64_t rows,
    int64_t columns, const P* next) {
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
    // A processor whose other thread is busy decodes half as many instructions: several k's at a time take fewer.
    constexpr int kAtOnce = kRows == B::kRows ? 2 : 1;
    const auto add_rows = [&]<int kCount>(std::integral_constant<int, kCount>) {
#pragma GCC unroll 4
      for (int q = 0; q < kCount; ++q) {
        Lanes row[kVectors];
        for (int v = 0; v < kVectors; ++v) row[v] = reinterpret_cast<const Anywhere*>(b + q * b_step)[v];
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
          for (int v = 0; v < kVectors; ++v) sums[i][v] += a[q * B::kRows + i] * row[v];
        }
      }
      b += kCount * b_step;
      a += kCount * B::kRows;
    };
    int64_t p = 0, ahead = add ? 0 : rows;
    for (; p + kAtOnce <= depth; p += kAtOnce) {
      if (ahead < rows) {  // Else the sums in c are waited for at the end.
        for (int64_t j = 0; j < kColumns; j += 64 / sizeof(V)) __builtin_prefetch(c + ahead * c_step + j, 1);
        ++ahead;
      }
      if (kBytes == 64 && next) {
        constexpr int kLines = 2 * kAtOnce, kLine = 64 / sizeof(P);
#pragma GCC unroll 4
        for (int line = 0; line < kLines; ++line) __builtin_prefetch(next + line * kLine, 0, 2);
        next += kLines * kLine;
      }
      add_rows(std::integral_constant<int, kAtOnce>());
    }
    if constexpr (kAtOnce > 1) {
      for (; p < depth; ++p) add_rows(std::integral_constant<int, 1>());
    }
  } else {
    multiply_pairs<kRows, B::kRows, kVectors, false>(depth, a, 0, b, to, step, rows, columns, whole && add);
  }
#pragma GCC unroll 16
  for (int i = 0; std::is_same_v<P, V> && i < kRows; ++i) {
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

// body for the lowest tile that has so many rows and columns.
template <class P, int kBytes, class Body>
[[gnu::always_inline]] inline void for_tile(int64_t rows, int64_t columns, const Body& body) {
  constexpr int kRows = Blocking<P, kBytes>::kRows;
  const auto for_rows =
      [&]<int kVectors, int... kMost>(std::integral_constant<int, kVectors>, std::integer_sequence<int, kMost...>)
          EXTENSION_CPP_INLINED {
            static_cast<void>(((rows <= kMost && (body.template operator()<kMost, kVectors>(), true)) || ...));
          };
  using Heights = std::conditional_t<
      kRows == 14, std::integer_sequence<int, 1, 4, 8, 11, 14>, std::integer_sequence<int, 1, kRows / 2, kRows>>;
  if (columns <= Blocking<P, kBytes>::kLanes) {
    for_rows(std::integral_constant<int, 1>(), Heights());
  } else {
    for_rows(std::integral_constant<int, 2>(), Heights());
  }
}

// The same for a strip of a of as many rows as there are, and as many strips of b, b_next apart, as columns take.
// Compiled apart, as all tiles take much code.
template <class V, int kBytes, class P>
void multiply_strips(
    int64_t depth, const P* a, const P* b, int64_t b_step, int64_t b_next, Into into, V* c, int64_t c_step,
    int64_t rows, int64_t columns, const P* next = nullptr) {
  simd::run_apart<kBytes>([=] {
    constexpr int64_t kColumns = Blocking<P, kBytes>::kColumns;
    const P* strip = b;
    for (int64_t j = 0; j < columns; j += kColumns, strip += b_next) {
      const int64_t width = std::min(kColumns, columns - j);
      for_tile<P, kBytes>(rows, width, [=]<int kRows, int kVectors>() EXTENSION_CPP_INLINED {
        multiply_tile<V, kBytes, kRows, kVectors>(depth, a, strip, b_step, into, c + j, c_step, rows, width, next);
      });
    }
  });
}

#if defined(EXTENSION_CPP_PAIRS)

// A tile of as many rows as there can be, of pairs of a that are read where they lie, a_step halves apart.
template <int kBytes>
void multiply_pairs_where_they_lie(
    int64_t depth, const bfloat16* a, int64_t a_step, const Pair* b, bool add, float* c, int64_t c_step,
    int64_t columns) {
  simd::run_apart<kBytes>([=] {
    using B = Blocking<Pair, kBytes>;
    constexpr int kRows = B::kRows;
    alignas(64) float sums[kRows * B::kColumns];
    const auto* const pairs = reinterpret_cast<const Pair*>(a);
    if (columns <= B::kLanes) {
      multiply_pairs<kRows, kRows, 1, true>(depth, pairs, a_step, b, sums, B::kColumns, kRows, columns);
    } else {
      multiply_pairs<kRows, kRows, 2, true>(depth, pairs, a_step, b, sums, B::kColumns, kRows, columns);
    }
    for (int i = 0; i < kRows; ++i) {
      float* const to = c + i * c_step;
      for (int64_t j = 0; j < columns; ++j) to[j] = add ? sums[i * B::kColumns + j] + to[j] : sums[i * B::kColumns + j];
    }
  });
}

// A strip of pairs whose sums are halves at once, of a packed or of `lying` rows, a_step halves apart.
template <int kBytes>
void multiply_pairs_once(
    int64_t depth, const Pair* a, const bfloat16* lying, int64_t a_step, const Pair* b, bfloat16* c, int64_t c_step,
    int64_t rows, int64_t columns) {
  constexpr int kStrip = Blocking<Pair, kBytes>::kRows;
  for_tile<Pair, kBytes>(rows, columns, [=]<int kRows, int kVectors>() EXTENSION_CPP_INLINED {
    if constexpr (kRows == kStrip) {
      if (lying) {
        const auto* const pairs = reinterpret_cast<const Pair*>(lying);
        return multiply_pairs<kRows, kStrip, kVectors, true>(depth, pairs, a_step, b, c, c_step, rows, columns);
      }
    }
    multiply_pairs<kRows, kStrip, kVectors, false>(depth, a, 0, b, c, c_step, rows, columns);
  });
}

#endif

constexpr int64_t kFewTerms = 64;                   // terms of sums that take as long to write as to add up
constexpr int64_t kFewColumns = 2048, kSlice = 16;  // columns, and rows, of b that are read at a time

constexpr int64_t kInL2 = 128 * 1024;  // Bytes of b that stay there.

// Whether rows lie whole pages apart: of their lines, the first-level cache holds eight at a time.
template <class T>
bool is_paged(int64_t step) {
  return step % (4096 / static_cast<int64_t>(sizeof(T))) == 0;
}

// Whether b lies in rows, of no more than so many bytes in all.
template <class V>
bool has_rows_of(const Factor<V>& b, int64_t k, int64_t bytes) {
  return b.outer == 1 && b.inner <= bytes / static_cast<int64_t>(sizeof(V)) / k;
}

// How many of so many rows a strip takes: strips of 14 and of 2 take longer than two of 8.
template <class V, int kBytes>
int64_t strip_of(int64_t rows) {
  constexpr int64_t kMost = Blocking<V, kBytes>::kRows, kHalf = std::min<int64_t>(8, kMost);
  return rows > kMost && rows <= 2 * kHalf ? kHalf : std::min(rows, kMost);
}

// Whether few rows of a are packed once, and not for each part of b.
template <class V, int kBytes>
bool is_packed_once(int64_t k) {
  return k <= (1 << 20) / (4 * Blocking<V, kBytes>::kRows);
}

// Whether a is to be packed as a whole, and b not: a has few rows, so that reading b takes the most time, or few k's,
// so that writing c does, or both are small.
template <class V, int kBytes>
bool is_few(int64_t m, int64_t k, const Factor<V>& b) {
  constexpr int64_t kRows = Blocking<V, kBytes>::kRows, kSmall = 1 << 16;
  if (b.outer == 1 && k <= kSlice && m <= kSmall / k) return true;
  return (m <= 4 * kRows && (b.outer == 1 || is_packed_once<V, kBytes>(k))) ||
         (k <= kSmall / m && has_rows_of(b, k, kInL2));
}

// c = a * b for few rows, in one thread: b is read along its rows or columns. With vectors of a whole line, while rows
// that follow each other, or long ones, are multiplied, those behind them are fetched in the order of memory, as
// processors do by themselves with what is read in that order. In panels of rows, those that are read next are fetched
// before; from memory, rows are read as far as they go, since what lies in other pages is waited for. Rows that lie
// whole pages apart, of which the first-level cache holds eight, are copied for several strips, or, with vectors of a
// whole line, read as far as they go. `packed_a` has room for all of a, or for kDepth of it if it isn't packed once,
// `sums` for m rows of kFewColumns.
template <int kBytes, class V>
void multiply_few(
    const Factor<V>& a, const Factor<V>& b, int64_t m, int64_t n, int64_t k, V* c, int64_t c_step, V* packed_a,
    V* packed_b, V* sums) {
  using B = Blocking<V, kBytes>;
  const int64_t height = strip_of<V, kBytes>(m), strips = (m + height - 1) / height;
  const auto rows_from = [&](int64_t i) { return std::min(height, m - i * height); };
  const auto pack = [&](int64_t p0, int64_t depth, V* to) {
    for (int64_t i = 0; i < strips; ++i) {
      const Factor<V> strip{a.data + i * height * a.outer + p0 * a.inner, a.outer, a.inner};
      pack_strip<B::kRows, kBytes>(strip, rows_from(i), depth, to + i * depth * B::kRows);
    }
  };
  const auto multiply = [&](const V* packed, int64_t depth, int64_t from, int64_t to, const V* rows_of_b,
                            int64_t b_step, Into into, V* into_c, int64_t step, int64_t columns, int64_t first,
                            int64_t last, const V* next = nullptr) {
    for (int64_t i = first; i < last; ++i) {
      multiply_strips<V, kBytes>(
          to - from, packed + (i * depth + from) * B::kRows, rows_of_b, b_step, B::kColumns, into,
          into_c + i * height * step, step, rows_from(i), columns, i == 0 ? next : nullptr);
    }
  };
  const auto strip_of_b = [&](int64_t p, int64_t j) {
    return Factor<V>{b.data + j * b.outer + p * b.inner, b.outer, b.inner};
  };
  const bool once = is_packed_once<V, kBytes>(k);
  const auto packed_at = [&](int64_t p0) { return packed_a + (once ? p0 * strips * B::kRows : 0); };
  for (int64_t p0 = 0; once && p0 < k; p0 += B::kDepth) pack(p0, std::min(B::kDepth, k - p0), packed_at(p0));
  if (b.outer != 1) {
    for (int64_t j = 0; j < n; j += B::kColumns) {
      const int64_t columns = std::min<int64_t>(B::kColumns, n - j);
      for (int64_t p0 = 0; p0 < k; p0 += B::kDepth) {
        const int64_t depth = std::min(B::kDepth, k - p0);
        pack_strip<B::kColumns, kBytes>(strip_of_b(p0, j), columns, depth, packed_b);
        multiply(
            packed_at(p0), depth, 0, depth, packed_b, B::kColumns, p0 == 0 ? Into::kEmpty : Into::kAdd, c + j, c_step,
            columns, 0, strips);
      }
    }
    return;
  }
  constexpr int64_t kAhead = 2 * B::kColumns, kPanelWidth = 256, kPanelDepth = 64;
  constexpr int64_t kInAnyCache = 1024 * 1024;  // Where the order of reading doesn't matter.
  constexpr int64_t kInL3 = 16 * kInAnyCache;
  // A block of whole rows may be one of a matrix that no cache holds.
  const bool is_block = kBytes == 64 && k == B::kDepth && b.inner == n;
  const bool cached = has_rows_of(b, B::kDepth, kInL2) || (!is_block && has_rows_of(b, k, kInAnyCache));
  const bool in_order = kBytes == 64 && !cached && (b.inner == n || n >= kFewColumns), ordered = cached || in_order;
  const bool paged = is_paged<V>(b.inner), in_panels = !ordered && has_rows_of(b, k, kInL3) && (kBytes < 64 || !paged);
  const bool copies = in_panels && paged && strips > 1;
  const int64_t most_width = in_panels ? kPanelWidth : kFewColumns,
                of_rows = in_panels || in_order ? kPanelDepth : kSlice;
  const int64_t most = cached ? B::kDepth : of_rows;
  for (int64_t j0 = 0; j0 < n; j0 += most_width) {
    const int64_t width = std::min(most_width, n - j0);
    for (int64_t p0 = 0; p0 < k; p0 += B::kDepth) {
      const int64_t depth = std::min(B::kDepth, k - p0);
      V* const to = p0 == 0 ? c + j0 : sums;
      const int64_t step = p0 == 0 ? c_step : width;
      if (!once) pack(p0, depth, packed_a);
      for (int64_t p = 0; p < depth; p += most) {
        const int64_t slice = std::min(most, depth - p);
        // Of few k's, a strip of rows is multiplied with all columns, as c is written to fewer pages at a time.
        const int64_t at_once = depth <= (cached ? kFewTerms : kSlice) ? 1 : strips;
        for (int64_t i = 0; i < strips; i += at_once) {
          const int64_t whole = width / B::kColumns * B::kColumns;
          for (int64_t j = 0, columns = 0; j < width; j += columns) {
            columns = at_once == 1 && cached && j < whole ? whole - j : std::min<int64_t>(B::kColumns, width - j);
            const Factor<V> strip = strip_of_b(p0 + p, j0 + j);
            const bool in_place = !copies && (columns % B::kColumns == 0 || columns == B::kLanes);
            if (!in_place) pack_strip<B::kColumns, kBytes>(strip, columns, slice, packed_b);
            // Several rows at a time are too many for the processor to see that each is read in order.
            const bool ends = p0 + p + slice == k;
            const V* const below = ends ? b.data + j0 + j + kPanelWidth : strip.data + slice * b.inner;
            const V* const next = in_panels ? below : strip.data + kAhead;
            for (int64_t q = 0; i == 0 && !ordered && (in_panels || j + kAhead < width) && q < slice; ++q) {
              const V* const ahead = next + q * b.inner;
              for (int64_t v = 0; v < B::kColumns; v += 64 / sizeof(V)) __builtin_prefetch(ahead + v);
            }
            const int64_t share = j * slice;  // elements of the rows behind, of which others fetched so many
            const V* const behind = in_order && (is_block || !ends)
                                        ? strip_of_b(p0 + p + slice + share / width, j0 + share % width).data
                                        : nullptr;
            multiply(
                packed_at(p0), depth, p, p + slice, in_place ? strip.data : packed_b, in_place ? b.inner : B::kColumns,
                p == 0 ? Into::kEmpty : Into::kGoOn, to + j, step, columns, i, i + at_once, behind);
          }
        }
      }
      for (int64_t i = 0; p0 > 0 && i < m; ++i) {
        for (int64_t j = 0; j < width; ++j) c[i * c_step + j0 + j] = sums[i * width + j] + c[i * c_step + j0 + j];
      }
    }
  }
}

// A tile of kRows rows of a that are read where they lie, a_step apart, with a strip of b.
template <class V, int kBytes, int kRows, int kVectors>
void multiply_where_it_lies(
    int64_t depth, const V* a, int64_t a_step, const V* b, bool add, V* c, int64_t c_step, int64_t columns) {
  simd::run_apart<kBytes>([=] {
    using B = Blocking<V, kBytes>;
    using Lanes = Vector<V, kBytes>;
    using Anywhere = typename VectorOf<V, kBytes>::anywhere;
    constexpr int kAtOnce = 4, kOfThree = (kRows + 2) / 3;
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

// Rows of a tile that has one vector of columns.
template <class V, int kBytes>
constexpr int kTall = kBytes == 64 ? 16 : Blocking<V, kBytes>::kRows;

// Of one for few rows, or for rows that lie whole pages apart, of which a set of the first-level cache has eight lines.
template <class V, int kBytes>
constexpr int kLow = std::min(8, Blocking<V, kBytes>::kRows);

constexpr int64_t kNarrowBytes = 512;  // Of a row of b: columns that are few next to as many rows.

// Whether a is read where it lies, as there are so few columns that copying it takes as long as multiplying.
template <class V, int kBytes>
bool is_narrow(const Factor<V>& a, int64_t m, int64_t n) {
  using B = Blocking<V, kBytes>;
  if (a.inner != 1) return false;
  if (n <= B::kLanes) return m >= kTall<V, kBytes>;
  if (n <= 2 * B::kColumns) return m >= 2 * kLow<V, kBytes>;
  return n * static_cast<int64_t>(sizeof(V)) <= kNarrowBytes && m >= n * 3 / 4;
}

// Of b, so many rows are packed at once, which the second-level cache holds. Fewer columns are packed with zeros.
template <class V>
int64_t narrow_depth(int64_t n) {
  constexpr int64_t kBlock = Blocking<V, 16>::kDepth, kMost = 262'144 / sizeof(V), kLeastColumns = 16;
  return std::max(kMost / std::max(n, kLeastColumns) / kBlock * kBlock, kBlock);
}

// c = a * b for few columns, in one thread.
template <int kBytes, class V>
void multiply_narrow(
    const Factor<V>& a, const Factor<V>& b, int64_t m, int64_t n, int64_t k, V* c, int64_t c_step, V* packed_a,
    V* packed_b) {
  using B = Blocking<V, kBytes>;
  const int64_t most_depth = narrow_depth<V>(n);
  for (int64_t k0 = 0; k0 < k; k0 += most_depth) {
    const int64_t end = std::min(k0 + most_depth, k), width = round_up(n, B::kColumns);
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
    const bool low = is_paged<V>(a.outer) || (n > B::kLanes && m < 2 * B::kRows);
    const int64_t height = low ? kLow<V, kBytes> : n <= B::kLanes ? kTall<V, kBytes> : B::kRows;
    // Some of the last rows are computed twice, where it is from the beginning.
    const bool overlaps = m >= height && k <= most_depth;
    for (int64_t i = 0, rows = 0; i < m; i += rows) {
      if (overlaps) i = std::min(i, m - height);
      const bool whole = m - i >= height;
      rows = whole ? height : strip_of<V, kBytes>(m - i);
      const V* const from = a.data + i * a.outer;
      each([&](int64_t p, int64_t depth, int64_t j, int64_t columns, const V* packed) {
        V* const to = c + i * c_step + j;
        if (!whole) {
          if (j == 0) pack_strip<B::kRows, kBytes>(Factor<V>{from + p, a.outer, 1}, rows, depth, packed_a);
          multiply_strips<V, kBytes>(
              depth, packed_a, packed, B::kColumns, 0, p == 0 ? Into::kEmpty : Into::kAdd, to, c_step, rows, columns);
        } else {
          const auto multiply = [&]<int kRows, int kVectors>() {
            multiply_where_it_lies<V, kBytes, kRows, kVectors>(
                depth, from + p, a.outer, packed, p > 0, to, c_step, columns);
          };
          if (low) {
            constexpr int kRows = kLow<V, kBytes>;
            columns <= B::kLanes ? multiply.template operator()<kRows, 1>() : multiply.template operator()<kRows, 2>();
          } else if (n <= B::kLanes) {
            multiply.template operator()<kTall<V, kBytes>, 1>();
          } else {
            constexpr int kRows = B::kRows;
            columns <= B::kLanes ? multiply.template operator()<kRows, 1>() : multiply.template operator()<kRows, 2>();
          }
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

// The same for up to kShallow k's.
template <int kBytes, class V>
void multiply_shallow(
    const Factor<V>& a, const Factor<V>& b, int64_t m, int64_t n, int64_t k, V* c, int64_t c_step, bool copies,
    V* rows_of_b) {
  [&]<int... kLess>(std::integer_sequence<int, kLess...>) {
    const auto multiply = [&]<int kDepth>(std::integral_constant<int, kDepth>) {
      if (k == kDepth) multiply_shallow<kBytes, kDepth>(a, b, m, n, c, c_step, copies, rows_of_b);
    };
    (multiply(std::integral_constant<int, kLess + 1>()), ...);
  }(std::make_integer_sequence<int, kShallow>());
}

// c = a * b, of m by n sums over k, in one thread. False if it is wrong, as numbers were taken for zero. Tiles of
// halves are sums that are stored at once, for which k must be one block.
template <int kBytes, class T, class P, class V>
bool multiply(
    const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k, V* c, int64_t c_step, P* packed_a,
    P* packed_b) {
  using Sum = decltype(load(T()));
  using B = Blocking<P, kBytes>;
  constexpr int kTerms = Packing<T, P>::kTerms;
  bool right = true;
  const int64_t most_width = part_of(n, B::kWidth, B::kColumns), most_height = part_of(m, B::kHeight, B::kRows);
  // Pairs of a lie as they are packed: of few columns, whole strips are read there.
  const bool narrow = kTerms > 1 && a.inner == 1 && k % 2 == 0 && n <= 2 * B::kColumns && !is_paged<T>(a.outer);
  const auto lies = [&](int64_t rows) { return narrow && rows >= B::kRows; };
  // Of few k's, c is written along its rows, with all strips of b that the second-level cache holds, as that takes the
  // most time. Else, of rows of b, what several strips take is read at once.
  const bool along = k <= kFewTerms;
  const int64_t at_once =
      along ? kInL2 / static_cast<int64_t>(sizeof(P)) / ((k + kTerms - 1) / kTerms) / B::kColumns * B::kColumns
            : (b.outer == 1 ? 8 : 1) * B::kColumns;
  const int64_t slice = b.outer == 1 ? kSlice * kTerms : k;
  for (int64_t j0 = 0; j0 < n; j0 += most_width) {
    const int64_t width = std::min(most_width, n - j0);
    for (int64_t p0 = 0; p0 < k; p0 += B::kDepth * kTerms) {
      const int64_t terms = std::min(B::kDepth * kTerms, k - p0), depth = (terms + kTerms - 1) / kTerms;
      for (int64_t i0 = 0; i0 < m; i0 += most_height) {
        const int64_t height = std::min(most_height, m - i0);
        for (int64_t i = 0; i < height; i += B::kRows) {
          const Factor<T> strip{a.data + (i0 + i) * a.outer + p0 * a.inner, a.outer, a.inner};
          if (lies(height - i)) {
            if constexpr (kTerms > 1) {
              const int64_t together = a.outer == terms ? B::kRows : 1;  // Rows that are next to each other.
              for (int64_t r = 0; r < B::kRows; r += together) {
                const auto* const pairs = reinterpret_cast<const P*>(strip.data + r * a.outer);
                right = right && !has_subnormal(pairs, together * depth);
              }
            }
            continue;
          }
          pack_strip<B::kRows, kBytes>(strip, std::min<int64_t>(B::kRows, height - i), terms, packed_a + i * depth);
          if constexpr (kTerms > 1) right = right && !has_subnormal(packed_a + i * depth, B::kRows * depth);
        }
        for (int64_t first = 0; first < width; first += at_once) {
          // One block of a is done with strips before the next are packed, which then go where those were.
          P* const packed_strips = packed_b + (m > most_height ? first * depth : 0);
          const int64_t end = std::min(first + at_once, width);
          if (i0 == 0) {
            for (int64_t p = 0; p < terms; p += slice) {
              for (int64_t j = first; j < end; j += B::kColumns) {
                const Factor<T> strip{b.data + (j0 + j) * b.outer + (p0 + p) * b.inner, b.outer, b.inner};
                pack_strip<B::kColumns, kBytes>(
                    strip, std::min<int64_t>(B::kColumns, end - j), std::min(slice, terms - p),
                    packed_strips + (j - first) * depth + p / kTerms * B::kColumns);
              }
            }
            if constexpr (kTerms > 1) {
              right = right && !has_subnormal(packed_strips, round_up(end - first, B::kColumns) * depth);
            }
          }
          const bool whole_rows = along && std::is_same_v<V, Sum> && kTerms == 1;
          const int64_t columns_together = whole_rows ? end - first : B::kColumns;
          const auto multiply_at = [&](int64_t i, int64_t j) {
            const P* const packed = packed_strips + (j - first) * depth;
            const int64_t columns = std::min(columns_together, end - j);
            const int64_t rows = std::min<int64_t>(B::kRows, height - i);
            V* const to = c + (i0 + i) * c_step + j0 + j;
            const T* const lying = lies(rows) ? a.data + (i0 + i) * a.outer + p0 : nullptr;
            const auto multiply = [&](Into into, Sum* to, int64_t step) {
#if defined(EXTENSION_CPP_PAIRS)
              if constexpr (kTerms > 1) {
                if (lying) {
                  return multiply_pairs_where_they_lie<kBytes>(
                      depth, lying, a.outer, packed, into == Into::kAdd, to, step, columns);
                }
              }
#endif
              multiply_strips<Sum, kBytes>(
                  depth, packed_a + i * depth, packed, B::kColumns, depth * B::kColumns, into, to, step, rows, columns);
            };
            if constexpr (std::is_same_v<V, Sum>) {
              multiply(p0 == 0 ? Into::kEmpty : Into::kAdd, to, c_step);
#if defined(EXTENSION_CPP_PAIRS)
            } else if constexpr (kTerms > 1) {
              multiply_pairs_once<kBytes>(
                  depth, packed_a + i * depth, lying, a.outer, packed, to, c_step, rows, columns);
#endif
            } else {
              alignas(64) Sum tile[B::kRows * B::kColumns];
              multiply(Into::kEmpty, tile, B::kColumns);
              store_rows(to, c_step, tile, B::kColumns, rows, columns);
            }
          };
          // A row of tiles after the other, or a column.
          const int64_t rows_at_once = along ? B::kRows : height, columns_at_once = along ? end - first : B::kColumns;
          for (int64_t left = first; left < end; left += columns_at_once) {
            for (int64_t top = 0; top < height; top += rows_at_once) {
              for (int64_t j = left; j < std::min(left + columns_at_once, end); j += columns_together) {
                for (int64_t i = top; i < std::min(top + rows_at_once, height); i += B::kRows) multiply_at(i, j);
              }
            }
          }
        }
      }
    }
  }
  return right;
}

constexpr int64_t kBehind = 64;  // What pack_strip writes behind a strip.

// The same, with room for what is packed.
template <int kBytes, class P, class T, class C>
bool multiply_packed(const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k, C* c, int64_t c_step) {
  using B = Blocking<P, kBytes>;
  const int64_t depth = std::min(B::kDepth, k), width = round_up(std::min(B::kWidth, n), B::kColumns);
  const int64_t height = round_up(std::min(B::kHeight, m), B::kRows);
  const int64_t of_a = height * depth + kBehind, of_b = width * depth + kBehind;
  Scratch scratch(Scratch::bytes<P>(of_a) + Scratch::bytes<P>(of_b));
  P *const packed_a = scratch.take<P>(of_a), *const packed_b = scratch.take<P>(of_b);
  return multiply<kBytes>(a, b, m, n, k, c, c_step, packed_a, packed_b);
}

// c = a * b of numbers, in one thread, in the way that suits the sizes.
template <int kBytes, class V>
void multiply_numbers(const Factor<V>& a, const Factor<V>& b, int64_t m, int64_t n, int64_t k, V* c, int64_t c_step) {
  using B = Blocking<V, kBytes>;
  const int64_t depth = std::min(B::kDepth, k);
  if (k <= kShallow) {
    const bool copies = b.outer != 1 || n < B::kLanes;
    const int64_t at_once = copies ? std::min(n, kFewColumns) : n,
                  of_rows = copies ? round_up(at_once, B::kLanes) * k : 0;
    Scratch scratch(Scratch::bytes<V>(of_rows));
    V* const rows_of_b = scratch.take<V>(of_rows);
    for (int64_t j = 0; j < n; j += at_once) {
      const Factor<V> part{b.data + j * b.outer, b.outer, b.inner};
      multiply_shallow<kBytes>(a, part, m, std::min(at_once, n - j), k, c + j, c_step, copies, rows_of_b);
    }
    return;
  }
  if constexpr (kBytes > 16) {
    if (is_narrow<V, kBytes>(a, m, n)) {
      const int64_t of_rows = B::kRows * depth + kBehind;
      const int64_t of_columns = round_up(n, B::kColumns) * std::min(narrow_depth<V>(n), k) + kBehind;
      Scratch scratch(Scratch::bytes<V>(of_rows) + Scratch::bytes<V>(of_columns));
      V *const packed_a = scratch.take<V>(of_rows), *const packed_b = scratch.take<V>(of_columns);
      multiply_narrow<kBytes>(a, b, m, n, k, c, c_step, packed_a, packed_b);
      return;
    }
  }
  if (is_few<V, kBytes>(m, k, b)) {
    const int64_t of_all = round_up(m, B::kRows) * (is_packed_once<V, kBytes>(k) ? k : depth) + kBehind,
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
    return;
  }
  multiply_packed<kBytes, V>(a, b, m, n, k, c, c_step);
}

// Rows and columns of a part of c, which end between vectors.
struct Part {
  Part(int64_t m, int64_t n, int64_t parts_m, int64_t parts_n, int64_t unit)
      : rows(round_up((m + parts_m - 1) / parts_m, 16)), columns(round_up((n + parts_n - 1) / parts_n, unit)) {}

  // What it takes for each of k, in multiply-adds: to pack an element takes as long as some of them. Of up to `narrow`
  // columns, a is read where it lies.
  int64_t cost(int64_t narrow) const {
    constexpr int64_t kPacking = 16, kReading = 4;
    const bool lies = columns <= narrow && rows >= columns * 3 / 4;
    return rows * columns + kPacking * columns + (lies ? kReading : kPacking) * rows;
  }

  int64_t rows, columns;
};

// Into how many parts to cut rows and columns for `threads` threads: each part packs what it needs by itself. Rows if
// columns gain little, as parts of a row end within lines of the cache, for which threads would wait.
std::array<int64_t, 2> cut(int64_t m, int64_t n, int64_t threads, int64_t unit, int64_t narrow) {
  const auto cost = [&](int64_t rows) {
    return threads % rows == 0 ? Part(m, n, rows, threads / rows, unit).cost(narrow)
                               : std::numeric_limits<int64_t>::max();
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

// c = a * b of numbers, in one thread, by the widest vectors.
template <class V>
void multiply_part(const Factor<V>& a, const Factor<V>& b, int64_t m, int64_t n, int64_t k, V* c, int64_t c_step) {
  simd::run_for_width([&]<int kBytes>() { multiply_numbers<kBytes>(a, b, m, n, k, c, c_step); });
}

// c = a * b of halves that are packed as P, in one thread. False if it is wrong, as numbers were taken for zero.
template <class P, class T, class C>
bool multiply_packed(const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k, C* c, int64_t c_step) {
#if defined(EXTENSION_CPP_PAIRS)
  if constexpr (kTermsOf<P> > 1) {
    if (is_few_pairs(m, n, k)) return multiply_few_pairs<kDepthOf<P>>(a, b, m, n, k, c, c_step);
  }
#endif
  bool right = false;
  simd::run_for_width([&]<int kBytes>() {
    if constexpr (kTermsOf<P> == 1 || kBytes == 64) right = multiply_packed<kBytes, P>(a, b, m, n, k, c, c_step);
  });
  return right;
}
// The same for any k, of which the sums of blocks are added up before they are halves.
template <class P, class T>
bool multiply_halves(const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k, T* c, int64_t c_step) {
  const bool at_once = k <= kDepthOf<P> || (kTermsOf<P> > 1 && is_few_pairs(m, n, k));
  if (at_once) return multiply_packed<P>(a, b, m, n, k, c, c_step);
  // b is packed once for so many rows, which are whole tiles of any height.
  constexpr int64_t kHeight = 2016, kWidth = 2048, kTileHeights = 84, kTileWidth = 64;
  const int64_t height = part_of(m, kHeight, kTileHeights), width = part_of(n, kWidth, kTileWidth);
  const int64_t size = std::min(height, m) * std::min(width, n);
  Scratch scratch(Scratch::bytes<float>(size));
  float* const sums = scratch.take<float>(size);
  bool right = true;
  for (int64_t i = 0; i < m; i += height) {
    const int64_t rows = std::min(height, m - i);
    for (int64_t j = 0; j < n; j += width) {
      const int64_t columns = std::min(width, n - j);
      const Factor<T> part_a{a.data + i * a.outer, a.outer, a.inner}, part_b{b.data + j * b.outer, b.outer, b.inner};
      right = multiply_packed<P>(part_a, part_b, rows, columns, k, sums, columns) && right;
      store_rows(c + i * c_step + j, c_step, sums, columns, rows, columns);
    }
  }
  return right;
}

// A factor of halves as numbers, which `to` has room for.
template <class T>
Factor<float> numbers_of(const Factor<T>& from, int64_t rows, int64_t k, float* to) {
  constexpr int64_t kVector = 8;
  if (from.inner == 1 && (from.outer == k || k >= kVector)) {
    if (from.outer == k) {
      load(from.data, to, rows * k);
    } else {
      for (int64_t i = 0; i < rows; ++i) load(from.data + i * from.outer, to + i * k, k);
    }
    return {to, k, 1};
  }
  for (int64_t p = 0; p < k; ++p) {
    const T* const row = from.data + p * from.inner;
    from.outer == 1 ? load(row, to + p * rows, rows) : read(row, from.outer, to + p * rows, rows);
  }
  return {to, 1, rows};
}

#if defined(EXTENSION_CPP_PAIRS)

// The same on processors that round to bfloat16.
void multiply_and_round(
    const Factor<bfloat16>& a, const Factor<bfloat16>& b, int64_t m, int64_t n, int64_t k, bfloat16* c,
    int64_t c_step) {
  constexpr int64_t kAtOnce = 4096, kVectors = 32;  // numbers of a factor, and those that two vectors have
  const int64_t width = std::min(n, kAtOnce / k), height = std::min(m, kAtOnce / k), step = round_up(width, kVectors);
  Scratch scratch(Scratch::bytes<float>(height * k) + Scratch::bytes<float>(step * k));
  float *const of_a = scratch.take<float>(height * k), *const of_b = scratch.take<float>(step * k);
  for (int64_t j = 0; j < n; j += width) {
    const int64_t columns = std::min(width, n - j);
    for (int64_t q = 0; q < k; ++q) {
      simd::run([=] { read(b.data + j * b.outer + q * b.inner, b.outer, of_b + q * step, columns); });
      std::fill_n(of_b + q * step + columns, step - columns, 0.0f);
    }
    for (int64_t i = 0; i < m; i += height) {
      const int64_t rows = std::min(height, m - i);
      const Factor<float> part = numbers_of<bfloat16>({a.data + i * a.outer, a.outer, a.inner}, rows, k, of_a);
      [&]<int... kLess>(std::integer_sequence<int, kLess...>) {
        const auto multiply = [&]<int kDepth>(std::integral_constant<int, kDepth>) {
          if (k == kDepth) multiply_shallow<kDepth>(part, of_b, step, rows, columns, c + i * c_step + j, c_step);
        };
        (multiply(std::integral_constant<int, kLess + 1>()), ...);
      }(std::make_integer_sequence<int, kShallow>());
    }
  }
}

#endif

// c = a * b of halves, in one thread: for few k's, for which packing takes longer than multiplying. As many rows and
// columns at a time as caches hold.
template <class T>
void multiply_as_numbers(
    const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k, T* c, int64_t c_step) {
#if defined(EXTENSION_CPP_PAIRS)
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (detail::has_bf16()) return multiply_and_round(a, b, m, n, k, c, c_step);
  }
#endif
  constexpr int64_t kAtOnce = 8192, kMostColumns = 2048;  // sums, and columns of them
  const int64_t width = std::min(n, kMostColumns), height = std::min(kAtOnce / std::max(width, k), m);
  const int64_t of_sums = Scratch::bytes<float>(height * width);
  Scratch scratch(of_sums + Scratch::bytes<float>(width * k) + Scratch::bytes<float>(height * k));
  float* const sums = scratch.take<float>(height * width);
  float *const of_b = scratch.take<float>(width * k), *const of_a = scratch.take<float>(height * k);
  for (int64_t j = 0; j < n; j += width) {
    const int64_t columns = std::min(width, n - j);
    const Factor<float> part_b = numbers_of<T>({b.data + j * b.outer, b.outer, b.inner}, columns, k, of_b);
    for (int64_t i = 0; i < m; i += height) {
      const int64_t rows = std::min(height, m - i);
      const Factor<float> part_a = numbers_of<T>({a.data + i * a.outer, a.outer, a.inner}, rows, k, of_a);
      multiply_part(part_a, part_b, rows, columns, k, sums, columns);
      store_rows(c + i * c_step + j, c_step, sums, columns, rows, columns);
    }
  }
}

constexpr int64_t kInBlocks = 4096;  // Elements of c that are too few for threads to share them, or to add them up.

// Whether each thread has about as many of k in blocks of so many.
bool shares_evenly(int64_t k, int64_t depth, int64_t threads) {
  const int64_t blocks = (k + depth - 1) / depth;
  return threads > 1 && (blocks + threads - 1) / threads * threads * depth <= k + k / 8;
}

// Whether threads share the blocks of k because there are few rows, next to which reading b takes the most time: so
// they read it in the order of its memory. Not where the sums of all blocks would take much memory.
template <class V>
bool shares_rows_of_b(int64_t m, int64_t n, int64_t k, const Factor<V>& b, int64_t threads) {
  constexpr int64_t kMostRows = 56, kLeast = 1 << 18, kMostSums = 1 << 22;
  return m <= kMostRows && m * n <= 4 * kInBlocks && b.outer == 1 && b.inner == n && n > kLeast / k &&
         k / kDepthOf<V> * m * n <= kMostSums && shares_evenly(k, kDepthOf<V>, threads);
}

// To c: the sums of so many blocks of k, of `size` elements each, added up in their order.
template <class T, class V>
void store_sum_of_blocks(T* c, V* sums, int64_t blocks, int64_t size) {
  parallel_for(0, size, kInBlocks, [&](int64_t begin, int64_t end) {
    for (int64_t block = 1; block < blocks; ++block) {
      for (int64_t i = begin; i < end; ++i) sums[i] = sums[block * size + i] + sums[i];
    }
    store(c + begin, sums + begin, end - begin);
  });
}

// c = a * b by threads that share the blocks of k, which are added in order then. The bits are those of one thread.
// False if it is wrong.
template <class P, class T>
bool run_in_blocks(const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k, int64_t threads, T* c) {
  using V = decltype(load(T()));
  constexpr int64_t kDepth = kDepthOf<P>;
  const int64_t blocks = (k + kDepth - 1) / kDepth, size = m * n;
  Scratch scratch(Scratch::bytes<V>(blocks * size));
  V* const sums = scratch.take<V>(blocks * size);
  std::atomic<bool> right = true;
  parallel_for(0, blocks, (blocks + threads - 1) / threads, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t p = block * kDepth, depth = std::min(kDepth, k - p);
      const Factor<T> part_a{a.data + p * a.inner, a.outer, a.inner}, part_b{b.data + p * b.inner, b.outer, b.inner};
      if constexpr (std::is_same_v<T, V>) {
        multiply_part(part_a, part_b, m, n, depth, sums + block * size, n);
      } else if (!multiply_packed<P>(part_a, part_b, m, n, depth, sums + block * size, n)) {
        right = false;
      }
    }
  });
  store_sum_of_blocks(c, sums, blocks, size);
  return right;
}

// c = a * b for one row.
template <class T>
void run_row(const Factor<T>& a, const Factor<T>& b, int64_t n, int64_t k, T* c) {
  using V = decltype(load(T()));
  constexpr int64_t kWorthAThread = 256 * 1024;  // Bytes of what is read, as numbers to compute with.
  const double bytes = static_cast<double>(n + 1) * static_cast<double>(k) * sizeof(V);
  const auto threads =
      static_cast<int64_t>(std::clamp<double>(bytes / kWorthAThread, 1, torch::stable::get_num_threads()));
  const auto multiply = [&](int64_t j, int64_t columns, int64_t p, int64_t depth, const Blocks<V>& to) {
    const Factor<T> part_a{a.data + p * a.inner, a.outer, a.inner};
    const Factor<T> part_b{b.data + j * b.outer + p * b.inner, b.outer, b.inner};
    simd::run_for_width([&]<int kBytes>() { multiply_row<kBytes>(part_a, part_b, columns, depth, to); });
  };
  const int64_t unit = b.outer == 1 ? 64 : 8;  // Whole lines of rows, or the columns that are read at once.
  const int64_t columns = round_up((n + threads - 1) / threads, unit);
  const int64_t parts = (n + columns - 1) / columns, blocks = (k + kBlockOfRow - 1) / kBlockOfRow;
  // Threads read whole rows where the parts of these are short, or where the caches of all hold b.
  constexpr int64_t kShort = 1024;
  const bool gains =
      columns * static_cast<int64_t>(sizeof(T)) <= kShort || bytes <= static_cast<double>(threads * kSecondLevel);
  const bool in_order = b.outer == 1 && gains && shares_evenly(k, kBlockOfRow, threads);
  if (blocks > 1 && n <= kInBlocks && (parts < threads || in_order)) {
    Scratch scratch(Scratch::bytes<V>(blocks * n));
    V* const sums = scratch.take<V>(blocks * n);
    parallel_for(0, blocks, (blocks + threads - 1) / threads, [&](int64_t begin, int64_t end) {
      const int64_t p = begin * kBlockOfRow;
      multiply(0, n, p, std::min(end * kBlockOfRow, k) - p, {sums + begin * n, kBlockOfRow, n});
    });
    return store_sum_of_blocks(c, sums, blocks, n);
  }
  const auto body = [&](int64_t begin, int64_t end) {
    const int64_t first = begin * columns, count = std::min(end * columns, n) - first;
    if constexpr (std::is_same_v<T, V>) {
      multiply(first, count, 0, k, {c + first, kBlockOfRow});
    } else {
      Scratch scratch(Scratch::bytes<V>(count));
      V* const sums = scratch.take<V>(count);
      multiply(first, count, 0, k, {sums, kBlockOfRow});
      store(c + first, sums, count);
    }
  };
  parts == 1 ? body(0, 1) : parallel_for(0, parts, 1, body);
}

template <class T>
void run(const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k, T* c) {
  using V = decltype(load(T()));
  if (m == 1 && k > kShallow) return run_row(a, b, n, k, c);
  // Where elements are multiplied a few times, writing them takes longer.
  const double worth_a_thread = k <= kShallow ? 64 * 64 * 16 : 64 * 64 * 32;
  const double work = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  const auto threads =
      static_cast<int64_t>(std::clamp<double>(work / worth_a_thread, 1, torch::stable::get_num_threads()));
  const int64_t narrow = a.inner == 1 && std::is_same_v<T, V> ? kNarrowBytes / sizeof(T) : 0;
  // Whole lines, of which a thread that reads b along rows takes several if there are many.
  const int64_t unit = b.outer == 1 && n > 2 * narrow ? 64 : 32;
  const auto [parts_m, parts_n] = cut(m, n, threads, unit, narrow);
  const auto [rows, columns] = Part(m, n, parts_m, parts_n, unit);
  const bool idle = ((m + rows - 1) / rows) * ((n + columns - 1) / columns) < threads;
  bool in_blocks = idle && k >= 4 * kDepthOf<V> && m * n >= 8 && m * n <= kInBlocks;
  if constexpr (std::is_same_v<T, V>) in_blocks = in_blocks || shares_rows_of_b(m, n, k, b, threads);
  const auto in_parts = [&, parts_m = parts_m, parts_n = parts_n, rows = rows,
                         columns = columns](const auto& multiply) {
    auto body = [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        const int64_t i = part / parts_n * rows, j = part % parts_n * columns;
        if (i >= m || j >= n) continue;
        const Factor<T> part_a{a.data + i * a.outer, a.outer, a.inner}, part_b{b.data + j * b.outer, b.outer, b.inner};
        multiply(part_a, part_b, std::min(rows, m - i), std::min(columns, n - j), k, c + i * n + j, n);
      }
    };
    threads == 1 ? body(0, 1) : parallel_for(0, parts_m * parts_n, 1, body);
  };
  if constexpr (std::is_same_v<T, V>) {
    in_blocks ? static_cast<void>(run_in_blocks<T>(a, b, m, n, k, threads, c)) : in_parts(multiply_part<T>);
  } else {
    // Packing pairs of b takes longer than their products with few rows.
    constexpr int64_t kManyRows = 32;
    const bool in_pairs = std::is_same_v<T, bfloat16> && simd::multiplies_pairs() && k > 1 && m > kManyRows;
    if (k <= kShallow && !in_pairs) return in_parts(multiply_as_numbers<T>);
    const auto run_packed = [&]<class P>(P) {
      if (in_blocks) return run_in_blocks<P>(a, b, m, n, k, threads, c);
      std::atomic<bool> right = true;
      in_parts([&](const auto&... arguments) {
        if (right && !multiply_halves<P>(arguments...)) right = false;
      });
      return right.load();
    };
#if defined(EXTENSION_CPP_PAIRS)
    if constexpr (std::is_same_v<T, bfloat16>) {
#if defined(EXTENSION_CPP_AMX)
      std::atomic<bool> right = has_tiles();
      if (right) {
        in_parts([&](const auto&... arguments) {
          simd::run_for_width([&]<int kBytes>() {
            if constexpr (kBytes == 64) {
              if (right && !multiply_in_tiles(arguments...)) right = false;
            }
          });
        });
      }
      if (right) return;
#endif
      if (!has_tiles() && simd::multiplies_pairs() && run_packed(Pair())) return;
    }
#endif
    run_packed(V());  // All of it again, so that the bits don't depend on the parts.
  }
}

// The factor, or where its elements lie next to each other neither along rows nor along k, a copy in which they do, as
// both would be read one by one, and again for each tile.
template <class T>
Factor<T> laid_out(const Factor<T>& factor, int64_t rows, int64_t k, std::unique_ptr<T[]>& memory) {
  constexpr int64_t kGrain = 32'768;
  if (rows == 1 || k == 1 || factor.outer <= 1 || factor.inner <= 1) return factor;
  const bool along_k = factor.inner < factor.outer;
  const int64_t lines = along_k ? rows : k, length = along_k ? k : rows;
  const int64_t far = std::max(factor.outer, factor.inner), near = std::min(factor.outer, factor.inner);
  memory = std::make_unique_for_overwrite<T[]>(lines * length);
  T* const to = memory.get();
  parallel_for(0, lines, std::max<int64_t>(kGrain / length, 1), [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line) {
      for (int64_t i = 0; i < length; ++i) to[line * length + i] = factor.data[line * far + i * near];
    }
  });
  return along_k ? Factor<T>{to, k, 1} : Factor<T>{to, 1, rows};
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
      std::unique_ptr<T[]> memory[2];
      const Factor<T> factors[] = {
          laid_out(factor_a<T>(view_a), m, k, memory[0]), laid_out(factor_b<T>(view_b), n, k, memory[1])};
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
