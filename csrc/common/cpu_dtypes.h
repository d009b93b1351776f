// float16 and bfloat16 on the CPU, computed with in float32. Written without branches, so that the compiler turns a
// loop over them into vectors, which it doesn't with the types of torch/headeronly.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#include "dispatch.h"
#include "simd.h"

namespace extension_cpp {

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};
template <>
inline int32_t dtype_of<float16>() {
  return dtypes::kFloat16;
}
template <>
inline int32_t dtype_of<bfloat16>() {
  return dtypes::kBFloat16;
}

using Floating = Types<float, bfloat16, float16, double>;

namespace detail {

// condition ? x : y on bits; a ternary on computed floats would become a branch.
inline uint32_t select(bool condition, uint32_t x, uint32_t y) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return (x & mask) | (y & ~mask);
}

}  // namespace detail

template <class T>
  requires std::is_arithmetic_v<T>
inline T load(T x) {
  return x;
}

inline float load(bfloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

inline float load(float16 x) {
  const uint32_t magnitude = x.bits & 0x7fff, sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t subnormal = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t finite = detail::select(magnitude < 0x0400, subnormal, normal);
  return std::bit_cast<float>(sign | finite | detail::select(magnitude >= 0x7c00, 0x7f800000, 0));
}

template <class T>
  requires std::is_arithmetic_v<T>
inline void store(T& to, T value) {
  to = value;
}

inline void store(bfloat16& to, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t nearest_even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = static_cast<uint16_t>(detail::select((bits & 0x7fffffff) > 0x7f800000, 0x7fc0, nearest_even));
}

inline void store(float16& to, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
  const uint32_t nearest_even = (magnitude + 0x0fff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  // Adding 0.5 rounds to a multiple of 2^-24, the smallest float16.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  uint32_t half = detail::select(magnitude < 0x38800000, subnormal, nearest_even);
  half = detail::select(magnitude >= 0x477ff000, 0x7c00, half);
  half = detail::select(magnitude > 0x7f800000, 0x7e00, half);
  to.bits = static_cast<uint16_t>(sign | half);
}

// Contiguous elements to and from the type of the computation.
template <class T, class V>
void load(const T* from, V* to, int64_t n) {
  simd::run([&] {
    for (int64_t i = 0; i < n; ++i) to[i] = load(from[i]);
  });
}
template <class T, class V>
void store(T* to, const V* from, int64_t n) {
  simd::run([&] {
    for (int64_t i = 0; i < n; ++i) store(to[i], from[i]);
  });
}

// The same for float16 and to bfloat16, by the instructions for them where the machine has those.
#if defined(__x86_64__) && defined(__GNUC__)

namespace detail {

// Without them: not inlined, as it takes much code.
[[gnu::noinline]] inline void load_slowly(const float16* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = load(from[i]);
}
[[gnu::noinline]] inline void store_slowly(float16* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store(to[i], from[i]);
}

inline bool has_f16c() {
  return simd::level() != simd::Level::kBaseline;
}

__attribute__((target("avx2,f16c"))) inline int64_t load_f16c(const float16* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  return i;
}

__attribute__((target("avx2,f16c"))) inline int64_t store_f16c(float16* to, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  return i;
}

inline bool has_bf16() {
  return simd::level() >= simd::Level::kAvx512Bf16;
}

#define EXTENSION_CPP_BF16 "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma"

// The first n of 32 halves. Not by a mask, for which AMD's take thirty times as long.
__attribute__((target(EXTENSION_CPP_BF16))) inline void store_first(bfloat16* to, __m512i halves, int64_t n) {
  constexpr int kLanes = 32;
  if (n >= kLanes) return _mm512_storeu_si512(to, halves);
  if (n == kLanes / 2) {
    std::memcpy(to, &halves, kLanes / 2 * sizeof(bfloat16));
    return;
  }
  alignas(64) bfloat16 each[kLanes];
  _mm512_store_si512(each, halves);
  int64_t done = 0;
#pragma GCC unroll 5
  for (int size = kLanes / 2; size > 0; size /= 2) {
    if ((n & size) == 0) continue;
    std::memcpy(to + done, each + done, size * sizeof(bfloat16));
    done += size;
  }
}

// What the instruction that rounds to bfloat16 doesn't as store() does: it takes subnormal numbers for zero, and keeps
// what a NaN says.
__attribute__((target(EXTENSION_CPP_BF16))) inline __mmask16 others(__m512 numbers) {
  constexpr int kNanOrSubnormal = 0x01 | 0x20 | 0x80;
  return _mm512_fpclass_ps_mask(numbers, kNanOrSubnormal);
}

// Rows of n numbers.
__attribute__((target(EXTENSION_CPP_BF16))) inline void store_bf16(
    bfloat16* to, int64_t to_step, const float* from, int64_t from_step, int64_t rows, int64_t n) {
  constexpr int kLanes = 16;
  for (; rows > 0; --rows, to += to_step, from += from_step) {
    for (int64_t i = 0; i < n; i += 2 * kLanes) {
      const int64_t count = std::min<int64_t>(2 * kLanes, n - i);
      const auto some = count == 2 * kLanes ? ~__mmask32(0) : (__mmask32(1) << count) - 1;
      const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(some), from + i);
      const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(some >> kLanes), from + i + kLanes);
      if (__builtin_expect((others(low) | others(high)) != 0, 0)) {
        for (int64_t j = i; j < i + count; ++j) store(to[j], from[j]);
      } else {
        store_first(to + i, (__m512i)_mm512_cvtne2ps_pbh(high, low), count);
      }
    }
  }
}

}  // namespace detail

inline void load(const float16* from, float* to, int64_t n) {
  const int64_t done = detail::has_f16c() ? detail::load_f16c(from, to, n) : 0;
  if (done < n) detail::load_slowly(from + done, to + done, n - done);
}
inline void store(float16* to, const float* from, int64_t n) {
  const int64_t done = detail::has_f16c() ? detail::store_f16c(to, from, n) : 0;
  if (done < n) detail::store_slowly(to + done, from + done, n - done);
}
inline void store(bfloat16* to, const float* from, int64_t n) {
  if (detail::has_bf16()) return detail::store_bf16(to, n, from, n, 1, n);
  store<bfloat16, float>(to, from, n);
}

#endif

namespace detail {

// Elements that are `step` apart. Not inlined, as the conversion takes much code.
[[gnu::noinline]] inline void read_apart(const float16* from, int64_t step, float* to, int64_t n) {
  constexpr int64_t kAtOnce = 256;
  float16 halves[kAtOnce];
  for (int64_t done = 0; done < n; done += kAtOnce) {
    const int64_t count = std::min(kAtOnce, n - done);
    for (int64_t i = 0; i < count; ++i) halves[i] = from[(done + i) * step];
    load(halves, to + done, count);
  }
}

}  // namespace detail

// The same inside of simd::run: n elements, `step` apart.
template <class T, class V>
void read(const T* from, int64_t step, V* to, int64_t n) {
  if (step != 1) {
    if constexpr (std::is_same_v<T, float16>) return detail::read_apart(from, step, to, n);
    for (int64_t i = 0; i < n; ++i) to[i] = load(from[i * step]);
  } else if constexpr (std::is_same_v<T, float16>) {
    load(from, to, n);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) to[i] = load(from[i]);
  }
}

template <class T, class V>
void write(T* to, const V* from, int64_t n) {
  if constexpr (std::is_same_v<T, float16>) {
    store(to, from, n);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) store(to[i], from[i]);
  }
}

// Rows of n numbers as halves.
template <class T>
void store_rows(T* to, int64_t to_step, const float* from, int64_t from_step, int64_t rows, int64_t n) {
#if defined(__x86_64__) && defined(__GNUC__)
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (detail::has_bf16()) return detail::store_bf16(to, to_step, from, from_step, rows, n);
  }
#endif
  simd::run([=] {
    for (int64_t i = 0; i < rows; ++i) write(to + i * to_step, from + i * from_step, n);
  });
}

}  // namespace extension_cpp
