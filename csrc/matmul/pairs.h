// bfloat16 on processors that multiply pairs of them: one instruction adds two products to a sum in float32, so that a
// product takes half the time of one in float32. A pair is two elements that follow each other along the sum, and is
// packed as one number.
#pragma once

#include <cmath>
#include <cstring>

#include "../common/cpu_dtypes.h"
#include "../matmul.h"

namespace extension_cpp::matmul {

using Pair = uint32_t;

// How elements are packed: kTerms of them as one V, with a step of `next` between them; `ones` takes kCount such next
// to each other, `row` kCount that follow each other along the sum.
template <class T, class V>
struct Packing {
  static constexpr int kTerms = 1;
  static V one(const T* at, int64_t) { return load_one(*at); }
  static V last(const T* at) { return one(at, 0); }
  template <int kCount>
  static void ones(const T* from, int64_t, V* to) {
    if constexpr (std::is_same_v<T, V>) {
      std::memcpy(to, from, kCount * sizeof(V));  // Vectors, which compilers don't make of so short a loop.
    } else {
      read(from, 1, to, kCount);
    }
  }
  template <int kCount>
  static void row(const T* from, V* to) {
    read(from, 1, to, kCount);
  }
};
template <>
struct Packing<bfloat16, Pair> {
  static constexpr int kTerms = 2;
  static Pair one(const bfloat16* at, int64_t next) { return at->bits | static_cast<Pair>(at[next].bits) << 16; }
  static Pair last(const bfloat16* at) { return at->bits; }  // of an odd number
  template <int kCount>
  static void ones(const bfloat16* from, int64_t next, Pair* to) {
#pragma GCC ivdep
    for (int i = 0; i < kCount; ++i) to[i] = one(from + i, next);
  }
  template <int kCount>
  static void row(const bfloat16* from, Pair* to) {
    std::memcpy(to, from, kCount * sizeof(Pair));
  }
};

#if defined(__x86_64__) && defined(__GNUC__)
#define EXTENSION_CPP_PAIRS

// Whether an element of `n` pairs is subnormal, which the instruction takes for zero.
inline __attribute__((target("avx512f,avx512bw"))) bool has_subnormal(const Pair* pairs, int64_t n) {
  constexpr int kLanes = 16, kAtOnce = 4;
  const __m512i minus_one = _mm512_set1_epi16(-1), without_sign = _mm512_set1_epi16(0x7fff);
  __m512i least[kAtOnce] = {minus_one, minus_one, minus_one, minus_one};  // of all less one: zero is the greatest
  for (int64_t i = 0; i < n; i += kAtOnce * kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < kAtOnce; ++v) {
      const int64_t left = std::clamp<int64_t>(n - i - v * kLanes, 0, kLanes);
      const __m512i some = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1 << left) - 1), pairs + i + v * kLanes);
      const __m512i less_one = _mm512_add_epi16(_mm512_and_si512(some, without_sign), minus_one);
      least[v] = _mm512_min_epu16(least[v], less_one);
    }
  }
  const __m512i all = _mm512_min_epu16(_mm512_min_epu16(least[0], least[1]), _mm512_min_epu16(least[2], least[3]));
  return _mm512_cmplt_epu16_mask(all, _mm512_set1_epi16(0x7f)) != 0;
}

// sums += the products of a pair with those of a row. The instruction reads the pair itself, for which compilers take a
// register and an instruction.
__attribute__((target(EXTENSION_CPP_BF16))) inline void add_pair(__m512& sums, __m512i row, const void* pair) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(row), "m"(*static_cast<const Pair*>(pair)));
}

// Row i of c: the sums of the products of row i of a, which are side by side in a strip of kStrip, or where kLies,
// a_step elements apart where they lie, with those of kVectors of b's two vectors. All kRows in float32, where they may
// be added to what is there; or the first rows and columns in bfloat16.
template <int kRows, int kStrip, int kVectors, bool kLies, class C>
__attribute__((target(EXTENSION_CPP_BF16))) void multiply_pairs(
    int64_t depth, const Pair* a, int64_t a_step, const Pair* b, C* c, int64_t c_step, int64_t rows, int64_t columns,
    bool add = false) {
  constexpr int kLanes = 16, kOfThree = (kRows + 2) / 3;
  __m512 of[kRows][kVectors] = {};
  for (int64_t i = 0; add && i < rows; ++i) {
    for (int v = 0; v < kVectors; ++v) __builtin_prefetch(c + i * c_step + v * kLanes, 1);
  }
  // An instruction adds once or twice the step to a pointer: with one for each row, there are too few registers.
  const bfloat16* at[kOfThree];
#pragma GCC unroll 8
  for (int i = 0; kLies && i < kOfThree; ++i) {
    at[i] = reinterpret_cast<const bfloat16*>(a) + 3 * i * a_step;
    asm("" : "+r"(at[i]));
  }
  for (int64_t p = 0; p < depth; ++p, b += 2 * kLanes) {
    __m512i row[kVectors];
    for (int v = 0; v < kVectors; ++v) row[v] = _mm512_loadu_si512(b + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const void* const terms = kLies ? static_cast<const void*>(at[i / 3] + i % 3 * a_step) : a + i;
      if (kVectors == 1 || i < kRows / 2) {
        for (int v = 0; v < kVectors; ++v) add_pair(of[i][v], row[v], terms);
      } else {  // A register takes the place of one of two reads: the processor does two at a time.
        Pair both;
        std::memcpy(&both, terms, sizeof(both));
        const auto pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(both));
        for (int v = 0; v < kVectors; ++v) of[i][v] = _mm512_dpbf16_ps(of[i][v], (__m512bh)row[v], pair);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; kLies && i < kOfThree; ++i) at[i] += 2;
    if (!kLies) a += kStrip;
  }
  if constexpr (std::is_same_v<C, float>) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        float* const to = c + i * c_step + v * kLanes;
        _mm512_storeu_ps(to, add ? _mm512_add_ps(of[i][v], _mm512_loadu_ps(to)) : of[i][v]);
      }
    }
  } else {
    alignas(64) bfloat16 edge[kRows][2 * kLanes];
    const bool whole = rows == kRows && columns == kVectors * kLanes;
    C* const to = whole ? c : edge[0];
    const int64_t step = whole ? c_step : 2 * kLanes;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      // No sum is subnormal, as the instruction takes such for zero. All NaN are the same.
      const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(of[i][kVectors - 1], of[i][0]);
      const __m512i magnitude = _mm512_and_si512(halves, _mm512_set1_epi16(0x7fff));
      const __mmask32 nan = _mm512_cmpgt_epu16_mask(magnitude, _mm512_set1_epi16(0x7f80));
      const __m512i stored = _mm512_mask_mov_epi16(halves, nan, _mm512_set1_epi16(0x7fc0));
      std::memcpy(to + i * step, &stored, kVectors * kLanes * sizeof(C));
    }
#pragma GCC unroll 1
    for (int64_t i = 0; !whole && i < rows; ++i) {
      detail::store_first(c + i * c_step, _mm512_load_si512(edge[i]), columns);
    }
  }
}

// c = a * b over kDepth k's of numbers, with sums rounded in registers. Rows of b are `step` apart, a multiple of two
// vectors; what is behind their n columns is zero.
template <int kDepth>
__attribute__((target(EXTENSION_CPP_BF16))) void multiply_shallow(
    const Factor<float>& a, const float* b, int64_t step, int64_t m, int64_t n, bfloat16* c, int64_t c_step) {
  constexpr int kLanes = 16, kTwo = 2 * kLanes;
  for (int64_t i = 0; i < m; ++i, c += c_step) {
    __m512 of_a[kDepth];
    for (int q = 0; q < kDepth; ++q) of_a[q] = _mm512_set1_ps(a.data[i * a.outer + q * a.inner]);
    __mmask16 others = 0;
    int64_t left = n;
    const float* at = b;
    bfloat16* to = c;
#pragma GCC unroll 1
    while (true) {
      __m512 sums[2] = {};
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        for (int q = 0; q < kDepth; ++q) {
          sums[v] = _mm512_fmadd_ps(of_a[q], _mm512_loadu_ps(at + q * step + v * kLanes), sums[v]);
        }
        others |= detail::others(sums[v]);
      }
      const auto halves = (__m512i)_mm512_cvtne2ps_pbh(sums[1], sums[0]);
      // What is behind a row is that of the next.
      if (left < kTwo && (c_step != n || (m - i) * n < kTwo)) {
        detail::store_first(to, halves, left);
        break;
      }
      _mm512_storeu_si512(to, halves);
      if (left <= kTwo) break;
      const int64_t next = left < 2 * kTwo ? left - kTwo : kTwo;  // Some of the last ones once more.
      left -= next, at += next, to += next;
    }
    if (!others) continue;
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (int q = 0; q < kDepth; ++q) sum = std::fma(a.data[i * a.outer + q * a.inner], b[q * step + j], sum);
      store(c[j], sum);
    }
  }
}

#endif

}  // namespace extension_cpp::matmul
