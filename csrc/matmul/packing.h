// How the CPU kernels of matmul hold what they work on: vectors, memory for copies, and both factors packed in the
// order in which the innermost loop reads them.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "../common/simd.h"
#include "pairs.h"

namespace extension_cpp::matmul {

// A vector, and one that may lie anywhere.
#if defined(__GNUC__)
template <class V, int kBytes>
struct VectorOf {
  typedef V type __attribute__((vector_size(kBytes)));
  typedef V anywhere __attribute__((vector_size(kBytes), aligned(alignof(V)), may_alias));
};
#else
template <class V, int kBytes>
struct VectorOf {
  using type = V;
  using anywhere = V;
};
#endif
template <class V, int kBytes>
using Vector = typename VectorOf<V, kBytes>::type;

// Memory for copies and sums: on the stack for small products, for which allocating takes longer than multiplying. One
// block of it: of several, malloc gives some back to the system each time, whose pages are then new to the next call.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : next_(small_) {
    if (bytes <= kSmall) return;
    large_.reset(static_cast<unsigned char*>(::operator new(bytes, kLine)));
    next_ = large_.get();
  }

  template <class V>
  static constexpr int64_t bytes(int64_t n) {
    constexpr auto line = static_cast<int64_t>(kLine);
    return (n * static_cast<int64_t>(sizeof(V)) + line - 1) / line * line;
  }

  template <class V>
  V* take(int64_t n) {
    return reinterpret_cast<V*>(std::exchange(next_, next_ + bytes<V>(n)));
  }

 private:
  static constexpr std::align_val_t kLine{64};
  static constexpr int64_t kSmall = 24'576;

  struct Free {
    void operator()(unsigned char* memory) const { ::operator delete(memory, kLine); }
  };
  std::unique_ptr<unsigned char[], Free> large_;
  alignas(64) unsigned char small_[kSmall];
  unsigned char* next_;
};

inline int64_t round_up(int64_t x, int64_t to) {
  return (x + to - 1) / to * to;
}

// The size of the parts that n is cut into, of at most `most`: alike, as a small one takes as much packing as a large.
inline int64_t part_of(int64_t n, int64_t most, int64_t unit) {
  const int64_t parts = (n + most - 1) / most;
  return round_up((n + parts - 1) / parts, unit);
}

#if defined(__GNUC__)
#if __has_builtin(__builtin_shufflevector)
#define EXTENSION_CPP_TRANSPOSE  // GCC 12 and Clang; without it, elements are copied one by one.

template <class Lanes, int... kFrom>
[[gnu::always_inline]] inline void shuffle(
    Lanes& to, const Lanes& x, const Lanes& y, std::integer_sequence<int, kFrom...>) {
  to = __builtin_shufflevector(x, y, kFrom...);
}

// rows[i][p] for rows[p][i] in each square of kSide rows and lanes: by exchanging neighbours, then pairs, and so on.
template <int kSide, int kStep = 1, class Lanes, int... kLane>
[[gnu::always_inline]] inline void transpose(Lanes* rows, std::integer_sequence<int, kLane...> lanes) {
  constexpr int kLanes = sizeof...(kLane);
  if constexpr (kStep == 1 && sizeof(Lanes) == 4 * kLanes) {
    // Four rows at a time: x86 has no instruction that exchanges neighbours of four bytes, but it interleaves them.
    using Low = std::integer_sequence<int, (kLane / 4 * 4 + kLane % 4 / 2 + kLane % 2 * kLanes)...>;
    using High = std::integer_sequence<int, (kLane / 4 * 4 + kLane % 4 / 2 + kLane % 2 * kLanes + 2)...>;
    using First = std::integer_sequence<int, (kLane & 2 ? kLanes + kLane - 2 : kLane)...>;
    using Second = std::integer_sequence<int, (kLane & 2 ? kLanes + kLane : kLane + 2)...>;
#pragma GCC unroll 16
    for (int i = 0; i < kSide; i += 4) {
      Lanes low[2], high[2];
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        shuffle(low[j], rows[i + 2 * j], rows[i + 2 * j + 1], Low());
        shuffle(high[j], rows[i + 2 * j], rows[i + 2 * j + 1], High());
      }
      shuffle(rows[i], low[0], low[1], First());
      shuffle(rows[i + 1], low[0], low[1], Second());
      shuffle(rows[i + 2], high[0], high[1], First());
      shuffle(rows[i + 3], high[0], high[1], Second());
    }
    transpose<kSide, 4>(rows, lanes);
  } else if constexpr (kStep < kSide) {
    using First = std::integer_sequence<int, (kLane & kStep ? kLanes + kLane - kStep : kLane)...>;
    using Second = std::integer_sequence<int, (kLane & kStep ? kLanes + kLane : kLane + kStep)...>;
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) {
      if (i & kStep) continue;
      const Lanes low = rows[i], high = rows[i + kStep];
      shuffle(rows[i], low, high, First());
      shuffle(rows[i + kStep], low, high, Second());
    }
    transpose<kSide, 2 * kStep>(rows, lanes);
  }
}

#endif
#endif

#if defined(EXTENSION_CPP_TRANSPOSE) && defined(__x86_64__)

// The first elements of a vector, so many as are there, and zero.
template <class V>
__attribute__((target("avx512f"))) inline void load_some(const void* from, int64_t count, Vector<V, 64>& to) {
  const __m512i some = sizeof(V) == 4 ? _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1 << count) - 1), from)
                                      : _mm512_maskz_loadu_epi64(static_cast<__mmask8>((1 << count) - 1), from);
  std::memcpy(&to, &some, sizeof(to));
}

#endif

// to[p * kStrip + i] = from(i, p), or the terms of pair p; zero for the rows from `rows` to kStrip, and for the term
// that the last pair lacks. Up to a vector behind the strip is written. It is compiled apart: inlined, the constants of
// its permutations take four of the registers that a tile needs.
template <int kStrip, int kBytes, class T, class V>
void pack_strip(const Factor<T>& from, int64_t rows, int64_t terms, V* to) {
  simd::run_apart<kBytes>([=] {
    using Packed = Packing<T, V>;
    constexpr int kTerms = Packed::kTerms;
    const int64_t whole = terms / kTerms;
    const auto clear = [=](int64_t p) { std::fill_n(to + p * kStrip + rows, kStrip - rows, V(0)); };
    int64_t done = 0;
    if (from.outer == 1) {
      // What lies between two rows is read too, as nothing depends on it: but subnormal pairs would be noticed.
      const int64_t last = kTerms == 1 && terms > 0 ? (terms - 1) * from.inner + rows : 0;
      int64_t reads = rows == kStrip ? whole : 0;
      if (rows < kStrip && last >= kStrip) reads = std::min((last - kStrip) / from.inner + 1, whole);
      const int64_t step = kTerms * from.inner;
      const T* row = from.data;
      V* at = to;
      for (; done < reads; ++done, row += step, at += kStrip) {
        using Anywhere = typename VectorOf<V, kBytes>::anywhere;
        constexpr int kOfRow = kStrip * sizeof(V) / sizeof(Anywhere);
        if constexpr (std::is_same_v<T, V> && kOfRow * sizeof(Anywhere) == kStrip * sizeof(V)) {
#pragma GCC unroll 4
          for (int v = 0; v < kOfRow; ++v) {
            reinterpret_cast<Anywhere*>(at)[v] = reinterpret_cast<const Anywhere*>(row)[v];
          }
        } else {
          Packed::template ones<kStrip>(row, from.inner, at);
        }
      }
      for (; done < whole; ++done, row += step, at += kStrip) {
        for (int64_t i = 0; i < rows; ++i) at[i] = Packed::one(row + i, from.inner);
        clear(done);
      }
    }
#if defined(EXTENSION_CPP_TRANSPOSE)
    constexpr int kLanes = kBytes / sizeof(V), kBlocks = (kStrip + kLanes - 1) / kLanes;
    if (from.inner == 1 && rows > kStrip / 2) {
      const auto pack = [&](int count, const auto& load_row) {
        Vector<V, kBytes> blocks[kBlocks][kLanes];
        for (int i = kStrip; i < kBlocks * kLanes; ++i) blocks[i / kLanes][i % kLanes] = Vector<V, kBytes>{};
        for (int i = 0; i < kStrip; ++i) {
          auto& row = blocks[i / kLanes][i % kLanes];
          i < rows ? load_row(from.data + i * from.outer + done * kTerms, row)
                   : static_cast<void>(row = Vector<V, kBytes>{});
        }
        for (auto& block : blocks) transpose<kLanes>(block, std::make_integer_sequence<int, kLanes>());
        // In the order of the addresses: what is written behind a row is overwritten by the next.
        for (int p = 0; p < count; ++p) {
          for (int k = 0; k < kBlocks; ++k) {
            V* row = to + (done + p) * kStrip + k * kLanes;
            *reinterpret_cast<typename VectorOf<V, kBytes>::anywhere*>(row) = blocks[k][p];
          }
        }
        done += count;
      };
      while (done + kLanes <= whole) {
        pack(kLanes, [](const T* row, auto& lanes) {
          __builtin_prefetch(row + 8 * kLanes, 0, 2);  // Rows lie too far apart for the processor to see a pattern.
          Packed::template row<kLanes>(row, reinterpret_cast<V*>(&lanes));
        });
      }
#if defined(__x86_64__)
      if constexpr (kBytes == 64 && sizeof(V) == kTerms * sizeof(T)) {
        const auto left = static_cast<int>(whole - done);
        if (left > 0) pack(left, [&](const T* row, auto& lanes) { load_some<V>(row, left, lanes); });
      }
#endif
    }
#endif
    if (done * kTerms == terms) return;
    for (int64_t p = done; p * kTerms < terms; ++p) clear(p);
    for (int64_t i = 0; i < rows; ++i) {
      const T* row = from.data + i * from.outer;
      for (int64_t p = done; p < whole; ++p) {
        to[p * kStrip + i] = Packed::one(row + p * kTerms * from.inner, from.inner);
      }
      if (whole * kTerms < terms) to[whole * kStrip + i] = Packed::last(row + whole * kTerms * from.inner);
    }
  });
}

}  // namespace extension_cpp::matmul
