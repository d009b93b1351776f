// The product of one row and a matrix on the CPU. Each element of b is read once, so that nothing is packed: b is read
// in the order of its memory, along its rows or its columns.
//
// Whatever the layout, the number of threads and the machine's vectors, an element of c is the same sum: blocks of
// kBlockOfRow k's follow each other, and one is the sum of kPartial partial sums, whose k's are so many apart. Those
// are what lies next to each other where b is read along k.
#pragma once

#include <algorithm>
#include <cstring>

#include "packing.h"

namespace extension_cpp::matmul {

// Of a lambda: Clang flattens what a function calls, but not what its lambdas call, which would be for the baseline.
#if defined(__GNUC__)
#define EXTENSION_CPP_INLINED __attribute__((always_inline))
#else
#define EXTENSION_CPP_INLINED
#endif

template <class V>
constexpr int kPartial = 32 / sizeof(V);

// The k's of a block, whatever else the sizes are: an element of c doesn't depend on how many others there are.
constexpr int64_t kBlockOfRow = 512;

// A vector of elements that follow each other, as numbers to compute with.
template <int kBytes, class T, class Lanes>
[[gnu::always_inline]] inline void load_lanes(const T* from, Lanes& to) {
  using V = decltype(load(T()));
  constexpr int kLanes = sizeof(Lanes) / sizeof(V);
  V* const numbers = reinterpret_cast<V*>(&to);
#if defined(__x86_64__) && defined(__GNUC__)
  if constexpr (std::is_same_v<T, float16>) return static_cast<void>(detail::load_f16c(from, numbers, kLanes));
#endif
  read(from, 1, numbers, kLanes);
}

// The sum of partial sums, in place of the first. Not of a zero's sign, which would tell whether a layout has terms of
// zero besides.
template <int kCount, bool kWhole = true, class Sum>
[[gnu::always_inline]] inline void add_up(Sum* partial) {
  if constexpr (kCount > 1) {
    add_up<kCount / 2, false>(partial);
    add_up<kCount / 2, false>(partial + kCount / 2);
    partial[0] += partial[kCount / 2];
  }
  if constexpr (kWhole) partial[0] += Sum{};
}

// Where sums of blocks of `depth` k's go: all to c, or those of each to a row of its own.
template <class V>
struct Blocks {
  V* c;
  int64_t depth;
  int64_t step = 0;   // from row to row
  bool first = true;  // There is nothing in c yet.

  V* row(int64_t p) const { return c + p / depth * step; }
  bool adds(int64_t p) const { return step == 0 && !(first && p == 0); }
  Blocks behind(int64_t p) const { return {row(p), depth, step, first && p == 0}; }
};

#if defined(EXTENSION_CPP_TRANSPOSE)

// The sums of neighbours in each 16 bytes of x, and then in those of y, in place of x.
template <class Lanes, int... kLane>
[[gnu::always_inline]] inline void add_neighbours(Lanes& x, const Lanes& y, std::integer_sequence<int, kLane...>) {
  constexpr int kLanes = sizeof...(kLane), kPiece = 16 * kLanes / sizeof(Lanes), kHalf = kPiece / 2;
  using Even = std::integer_sequence<
      int, (kLane / kPiece * kPiece + kLane % kHalf * 2 + (kLane % kPiece < kHalf ? 0 : kLanes))...>;
  using Odd = std::integer_sequence<
      int, (kLane / kPiece * kPiece + kLane % kHalf * 2 + (kLane % kPiece < kHalf ? 1 : kLanes + 1))...>;
  Lanes even, odd;
  shuffle(even, x, y, Even());
  shuffle(odd, x, y, Odd());
  x = even + odd;
}

#endif

// Columns, or blocks of few columns, that are multiplied at once, as each sum waits for its last term.
template <int kBytes>
constexpr int kStreams = kBytes == 16 ? 4 : 8;

// The sums of blocks of columns, at of_b, with what is at of_a; at of_a[0] for all if kOneA. Then those may have
// elements behind the last kPartial, with which those at `ends` are multiplied, of which others are zero. `readable` if
// kPartial of each column can be read.
template <int kBytes, bool kOneA, class T, class V>
[[gnu::always_inline]] inline void multiply_streams(
    const V* const* of_a, const T* const* of_b, int64_t depth, const V* ends, bool readable, V* to) {
  constexpr int kWidth = std::min(kBytes, 32), kCount = kStreams<kBytes>, kTerms = kPartial<V>;
  using Lanes = Vector<V, kWidth>;
  using Anywhere = typename VectorOf<V, kWidth>::anywhere;
  constexpr int kLanes = sizeof(Lanes) / sizeof(V), kVectors = kTerms / kLanes;
  Lanes sums[kCount][kVectors] = {};
  const int64_t whole = depth / kTerms * kTerms;
  for (int64_t p = 0; p < whole; p += kTerms) {
    Lanes x[kVectors], y;
#pragma GCC unroll 8
    for (int s = 0; s < kCount; ++s) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        if (!kOneA || s == 0) x[v] = reinterpret_cast<const Anywhere*>(of_a[s] + p)[v];
        load_lanes<kBytes>(of_b[s] + p + v * kLanes, y);
        sums[s][v] += x[v] * y;
      }
    }
  }
  if (kOneA && whole < depth) {
    V rest[kCount][kTerms] = {};
    for (int s = 0; s < kCount; ++s) {
      for (int64_t q = 0; !readable && q < depth - whole; ++q) rest[s][q] = load(of_b[s][whole + q]);
    }
    Lanes index[kVectors];
    for (int q = 0; q < kTerms; ++q) reinterpret_cast<V*>(index)[q] = static_cast<V>(q);
#pragma GCC unroll 8
    for (int s = 0; s < kCount; ++s) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        Lanes y = reinterpret_cast<const Anywhere*>(rest[s])[v];
        if (readable) load_lanes<kBytes>(of_b[s] + whole + v * kLanes, y);
        y = index[v] < static_cast<V>(depth - whole) ? y : Lanes{};
        sums[s][v] += reinterpret_cast<const Anywhere*>(ends)[v] * y;
      }
    }
  }
#if defined(EXTENSION_CPP_TRANSPOSE)
  constexpr auto kAll = std::make_integer_sequence<int, kLanes>();
  constexpr int kPiece = 16 / sizeof(V);
#pragma GCC unroll 8
  for (int s = 0; s < kCount; s += kPiece) {
    for (int v = 0; v < kVectors; ++v) {
      for (int step = 1; step < kPiece; step *= 2) {
        for (int i = s; i < s + kPiece; i += 2 * step) add_neighbours(sums[i][v], sums[i + step][v], kAll);
      }
    }
    Vector<V, 16> halves[2];
    std::memcpy(halves, sums[s], sizeof(halves));
    add_up<2>(halves);
    std::memcpy(to + s, halves, sizeof(halves[0]));
  }
#else
  for (int s = 0; s < kCount; ++s) {
    V partial[kTerms];
    std::memcpy(partial, sums[s], sizeof(partial));
    add_up<kTerms>(partial);
    to[s] = partial[0];
  }
#endif
}

// Whether halves are copied as numbers first, as no instruction makes these of them.
template <int kBytes, class T>
constexpr bool kConverts = kBytes == 16 && sizeof(T) == 2;

// c = a * b, where the elements of a column of b lie next to each other; elsewhere kBlockOfRow of kStreams columns come
// to `kept` first.
template <int kBytes, class T, class V>
void multiply_by_columns(const V* a, const Factor<T>& b, int64_t n, int64_t k, Blocks<V> c, V* kept) {
  simd::run_apart<kBytes>([=] {
    constexpr int kCount = kStreams<kBytes>, kTerms = kPartial<V>;
    const bool copies = kConverts<kBytes, T> || b.inner != 1;
    V sums[kCount], ends[kTerms] = {};
    std::copy_n(a + k / kTerms * kTerms, k % kTerms, ends);
    const V *of_a[kCount], *of_copies[kCount];
    const T* of_b[kCount];
    for (int s = 0; s < kCount; ++s) of_copies[s] = kept + s * kBlockOfRow;
    for (int64_t j = 0, columns; j < n; j += columns) {
      columns = std::min<int64_t>(kCount, n - j);
      const bool readable = (j + columns - 1) * b.outer + round_up(k, kTerms) <= (n - 1) * b.outer + k;
      for (int64_t p0 = 0, blocks; p0 < k; p0 += blocks * c.depth) {
        const int64_t depth = std::min(c.depth, k - p0);
        const T* const from = b.data + j * b.outer + p0 * b.inner;
        of_a[0] = a + p0, blocks = 1;
        if (copies) {
          for (int64_t s = 0; s < columns; ++s) read(from + s * b.outer, b.inner, kept + s * kBlockOfRow, depth);
          multiply_streams<kBytes, true>(of_a, of_copies, depth, ends, true, sums);
        } else if constexpr (!kConverts<kBytes, T>) {
          // What is lacking is another one once more.
          if (columns > kCount / 2 || k - p0 < 2 * c.depth) {
            for (int64_t s = 0, offset = 0; s < kCount; ++s) {
              of_b[s] = from + offset;
              if (s + 1 < columns) offset += b.outer;
            }
            multiply_streams<kBytes, true>(of_a, of_b, depth, ends, readable, sums);
          } else {
            blocks = std::min((k - p0) / c.depth, kCount / columns);
#pragma GCC unroll 1
            for (int64_t s = 0, block = 0, column = 0; s < kCount; ++s) {
              of_a[s] = a + p0 + block * c.depth, of_b[s] = from + column * b.outer + block * c.depth;
              if (++column == columns) column = 0, block = block + 1 < blocks ? block + 1 : 0;
            }
            multiply_streams<kBytes, false>(of_a, of_b, c.depth, ends, false, sums);
          }
        }
        for (int64_t block = 0; block < blocks; ++block) {
          const int64_t p = p0 + block * c.depth;
          V* const to = c.row(p) + j;
          const V* const of_block = sums + block * columns;
          for (int64_t i = 0; i < columns; ++i) to[i] = c.adds(p) ? of_block[i] + to[i] : of_block[i];
        }
      }
    }
  });
}

// Columns whose partial sums stay in the first-level cache: with vectors of a line, half as many next to rows of a b
// that the second-level cache holds, which come fast. Others are read as far as they go.
constexpr int64_t kColumnsAtOnce = 1024;
constexpr int64_t kSecondLevel = 2 * 1024 * 1024;  // Bytes of b that it holds.

// c = a * b, where elements of a row of b lie next to each other. `sums` has room for the partial sums of
// kColumnsAtOnce columns.
template <int kBytes, class T, class V>
void multiply_by_rows(const V* a, const Factor<T>& b, int64_t n, int64_t k, Blocks<V> c, V* sums) {
  simd::run_apart<kBytes>([=] {
    constexpr int kWidth = std::is_same_v<T, V> ? kBytes : std::min(kBytes, 32);
    using Lanes = Vector<V, kWidth>;
    using Anywhere = typename VectorOf<V, kWidth>::anywhere;
    constexpr int kLanes = sizeof(Lanes) / sizeof(V), kTerms = kPartial<V>, kAtOnce = 16;
    // A line of a row is read at once, as no cache holds those of rows that lie whole pages apart, and so many of its
    // partial sums are added to together, which registers hold.
    constexpr int kVectors = kBytes == 32 ? 2 : 1, kTogether = kTerms / kVectors;
    const auto each_block = [&](const auto& body) EXTENSION_CPP_INLINED {
      for (int64_t p = 0; p < k; p += c.depth) body(p, std::min(p + c.depth, k));
    };
    // The sums in the last lanes of a vector: those of the others are there.
    const auto put = [&](const Lanes& sums, int64_t begin, int64_t first, int64_t count) EXTENSION_CPP_INLINED {
      V each[kLanes];
      std::memcpy(each, &sums, sizeof(each));
      V* const to = c.row(begin) + first;
#pragma GCC unroll 1
      for (int64_t i = 0; i < count; ++i) {
        const V sum = each[n < kLanes ? i : kLanes - count + i];
        to[i] = c.adds(begin) ? sum + to[i] : sum;
      }
    };
    if (n <= kLanes) {  // The partial sums stay in registers.
      // So many rows can be read as vectors: of the last, these would end behind the matrix.
      const int64_t step = std::max<int64_t>(b.inner, 1);
      const int64_t readable = n == kLanes ? k : b.inner == 0 ? 0 : k - (kLanes - n + step - 1) / step;
      return each_block([&](int64_t begin, int64_t end) EXTENSION_CPP_INLINED {
        Lanes partial[kTerms] = {};
        const T* from = b.data + begin * b.inner;
        int64_t p = begin;
        for (; p + kTerms <= std::min(end, readable); p += kTerms) {
#pragma GCC unroll 8
          for (int q = 0; q < kTerms; ++q, from += b.inner) {
            Lanes row;
            load_lanes<kBytes>(from, row);
            partial[q] += a[p + q] * row;
          }
        }
#pragma GCC unroll 1
        for (; p < end; p += kTerms) {  // Zeros for what is lacking.
          V of_a[kTerms] = {}, rows[kTerms][kLanes] = {};
          for (int64_t q = 0; q < std::min<int64_t>(kTerms, end - p); ++q, from += b.inner) {
            of_a[q] = a[p + q];
            read(from, 1, rows[q], n);
          }
#pragma GCC unroll 8
          for (int q = 0; q < kTerms; ++q) partial[q] += of_a[q] * *reinterpret_cast<const Anywhere*>(rows[q]);
        }
        add_up<kTerms>(partial);
        put(partial[0], begin, 0, n);
      });
    }
    // The last vector of columns ends with them, and has some of those of the one before.
    constexpr int64_t kInCache = kSecondLevel / sizeof(T);
    const int64_t at_once = kBytes < 64 || k > kInCache / n ? kColumnsAtOnce : kColumnsAtOnce / 2;
    for (int64_t j0 = 0; j0 < n; j0 += at_once) {
      const int64_t width = std::min(at_once, n - j0);
      each_block([&](int64_t begin, int64_t end) EXTENSION_CPP_INLINED {
        // So many rows at once. Those that are lacking are zero.
        const auto add = [&](auto all, int64_t p, const T* const* rows, const V* of_a) EXTENSION_CPP_INLINED {
          V x[kAtOnce], *to = sums;
          std::copy_n(of_a, kAtOnce, x);  // The compiler can't know that it isn't written to.
          const bool ends = p + kAtOnce >= end;
#pragma GCC unroll 1
          for (int64_t i = 0; i < width; i += kVectors * kLanes, to += kVectors * kTerms * kLanes) {
            int64_t at[kVectors];
            for (int v = 0; v < kVectors; ++v) at[v] = std::min<int64_t>(i + v * kLanes, width - kLanes);
            Lanes totals[kVectors];
#pragma GCC unroll 2
            for (int part = 0; part < kVectors; ++part) {
              Lanes partial[kVectors][kTogether];
              auto* const kept = reinterpret_cast<Anywhere*>(to) + part * kTerms;
              for (int v = 0; v < kVectors; ++v) {
                for (int q = 0; q < kTogether; ++q) partial[v][q] = p == begin ? Lanes{} : kept[v * kTogether + q];
              }
#pragma GCC unroll 16
              for (int s = 0; s < kAtOnce / kVectors; ++s) {
                const int q = s % kTogether, r = s / kTogether * kTerms + part * kTogether + q;
                const T* const from = decltype(all)::value ? rows[0] + r * b.inner : rows[r];
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; ++v) {
                  Lanes row;
                  load_lanes<kBytes>(from + at[v], row);
                  partial[v][q] += x[r] * row;
                }
              }
              for (int v = 0; v < kVectors; ++v) {
                if (ends) {
                  add_up<kTogether, kVectors == 1>(partial[v]);
                  totals[v] = part == 0 ? partial[v][0] : totals[v] + partial[v][0] + Lanes{};
                } else {
                  for (int q = 0; q < kTogether; ++q) kept[v * kTogether + q] = partial[v][q];
                }
              }
            }
            if (!ends) continue;
            for (int v = 0; v < kVectors; ++v) {
              const int64_t first = i + v * kLanes;
              if (first == at[v]) {
                auto& sum = *reinterpret_cast<Anywhere*>(c.row(begin) + j0 + first);
                if (c.adds(begin)) totals[v] += sum;
                sum = totals[v];
              } else if (first < width) {
                put(totals[v], begin, j0 + first, width - first);
              }
            }
          }
        };
        const auto row_at = [&](int64_t p) { return b.data + j0 + p * b.inner; };
        int64_t p = begin;
        const T* rows[kAtOnce];
        for (; p + kAtOnce <= end; p += kAtOnce) {
          rows[0] = row_at(p);
          add(std::true_type(), p, rows, a + p);
        }
        if (p == end) return;
        T zeros[kLanes + kColumnsAtOnce];
        V of_a[kAtOnce] = {};
        std::memset(zeros, 0, (kLanes + width) * sizeof(T));
        std::copy(a + p, a + end, of_a);
        for (int64_t q = 0; q < kAtOnce; ++q) rows[q] = p + q < end ? row_at(p + q) : zeros + kLanes;
        add(std::false_type(), p, rows, of_a);
      });
    }
  });
}

// c = a * b for one row, in one thread.
template <int kBytes, class T, class V>
void multiply_row(const Factor<T>& a, const Factor<T>& b, int64_t n, int64_t k, Blocks<V> c) {
  constexpr int64_t kCopied = 16 * kBlockOfRow;  // of a at a time, where it isn't numbers that follow each other
  const bool by_rows = !kConverts<kBytes, T> && b.outer == 1 && n > 1;
  const bool copies = a.inner != 1 || !std::is_same_v<T, V>, copies_b = kConverts<kBytes, T> || b.inner != 1;
  const int64_t at_once = copies ? std::min(kCopied, k) : k, of_row = copies ? at_once : 0;
  const int64_t of_rows = kPartial<V> * std::min<int64_t>(round_up(n, 64 / sizeof(V)), kColumnsAtOnce);
  const int64_t of_columns = copies_b ? kStreams<kBytes> * kBlockOfRow : 0, of_sums = by_rows ? of_rows : of_columns;
  Scratch scratch(Scratch::bytes<V>(of_row) + Scratch::bytes<V>(of_sums));
  V *const row = scratch.take<V>(of_row), *const sums = scratch.take<V>(of_sums);
  for (int64_t p = 0; p < k; p += at_once) {
    const int64_t depth = std::min(at_once, k - p);
    const V* from = row;
    if (copies) {
      read(a.data + p * a.inner, a.inner, row, depth);
    } else if constexpr (std::is_same_v<T, V>) {
      from = a.data;
    }
    const Factor<T> part{b.data + p * b.inner, b.outer, b.inner};
    if (!by_rows) {
      multiply_by_columns<kBytes>(from, part, n, depth, c.behind(p), sums);
    } else if constexpr (!kConverts<kBytes, T>) {
      multiply_by_rows<kBytes>(from, part, n, depth, c.behind(p), sums);
    }
  }
}

}  // namespace extension_cpp::matmul
