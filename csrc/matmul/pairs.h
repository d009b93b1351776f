// bfloat16 on processors that multiply pairs of them: one instruction adds two products to a sum in float32, so that a
// product takes half the time of one in float32. A pair is two elements that follow each other along the sum, and is
// packed as one number.
#pragma once

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
  static V one(const T* at, int64_t) {
    if constexpr (std::is_same_v<T, float16>) {
      V number;
      detail::read_apart(at, 1, &number, 1);
      return number;
    } else {
      return load(*at);
    }
  }
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

// sums[i]: the sum of the products of row i of a, which are side by side in a strip of kStrip, or where kLies, a_step
// elements apart where they lie, with those of kVectors of b's two vectors.
template <int kRows, int kStrip, int kVectors, bool kLies>
__attribute__((target("avx512f,avx512bf16"))) void add_pairs(
    int64_t depth, const Pair* a, int64_t a_step, const Pair* b, float* sums) {
  constexpr int kLanes = 16, kOfThree = (kRows + 2) / 3;
  __m512 of[kRows][kVectors] = {};
  // An instruction adds once or twice the step to a pointer: with one for each row, there are too few registers.
  const bfloat16* rows[kOfThree];
#pragma GCC unroll 8
  for (int i = 0; kLies && i < kOfThree; ++i) {
    rows[i] = reinterpret_cast<const bfloat16*>(a) + 3 * i * a_step;
    asm("" : "+r"(rows[i]));
  }
  for (int64_t p = 0; p < depth; ++p, b += 2 * kLanes) {
    __m512bh row[kVectors];
    for (int v = 0; v < kVectors; ++v) row[v] = (__m512bh)_mm512_loadu_si512(b + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      Pair terms;
      std::memcpy(&terms, kLies ? static_cast<const void*>(rows[i / 3] + i % 3 * a_step) : a + i, sizeof(terms));
      const auto pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(terms));
      for (int v = 0; v < kVectors; ++v) of[i][v] = _mm512_dpbf16_ps(of[i][v], pair, row[v]);
    }
#pragma GCC unroll 8
    for (int i = 0; kLies && i < kOfThree; ++i) rows[i] += 2;
    if (!kLies) a += kStrip;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(sums + (i * kVectors + v) * kLanes, of[i][v]);
  }
}

#endif

}  // namespace extension_cpp::matmul
