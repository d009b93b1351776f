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

// An element among others that are no vector.
template <class T>
auto load_one(T x) {
  return load(x);
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

__attribute__((target("avx2,f16c"))) inline float load_f16c(float16 x) {
  return _cvtsh_ss(x.bits);
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

__attribute__((target("avx2,f16c"))) inline __m128i collect_eight(const uint16_t* from, int64_t step) {
  const auto at = [&](int i) { return static_cast<int16_t>(from[i * step]); };
  return _mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}
__attribute__((target("avx2,f16c"))) inline void collect(const uint16_t* from, int64_t step, uint16_t (&to)[8]) {
  _mm_store_si128(reinterpret_cast<__m128i*>(to), collect_eight(from, step));
}
__attribute__((target("avx2,f16c"))) inline void collect(const uint16_t* from, int64_t step, uint16_t (&to)[16]) {
  const __m256i first = _mm256_castsi128_si256(collect_eight(from, step));
  const __m256i all = _mm256_inserti128_si256(first, collect_eight(from + 8 * step, step), 1);
  _mm256_store_si256(reinterpret_cast<__m256i*>(to), all);
}

// A vector of numbers; bfloat16 is rounded as store() does it.
__attribute__((target("avx2,f16c"))) inline void load_avx2(const float16* from, float* to) {
  load_f16c(from, to, 8);
}
__attribute__((target("avx2,f16c"))) inline void store_avx2(float16* to, const float* from) {
  store_f16c(to, from, 8);
}
__attribute__((target("avx2,f16c"))) inline void load_avx2(const bfloat16* from, float* to) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)));
}
__attribute__((target("avx2,f16c"))) inline void store_avx2(bfloat16* to, const float* from) {
  const __m256 numbers = _mm256_loadu_ps(from);
  const __m256i bits = _mm256_castps_si256(numbers), high = _mm256_srli_epi32(bits, 16);
  const __m256i half = _mm256_add_epi32(_mm256_and_si256(high, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}

#define EXTENSION_CPP_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"

constexpr __mmask16 kLanes = 0xffff;  // All; without a mask GCC 12 warns of what no lane has.

__attribute__((target(EXTENSION_CPP_AVX512))) inline void load_avx512(const float16* from, float* to) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  _mm512_storeu_ps(to, _mm512_maskz_cvtph_ps(kLanes, halves));
}
__attribute__((target(EXTENSION_CPP_AVX512))) inline void store_avx512(float16* to, const float* from) {
  const __m256i halves = _mm512_maskz_cvtps_ph(kLanes, _mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
__attribute__((target(EXTENSION_CPP_AVX512))) inline void load_avx512(const bfloat16* from, float* to) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m512i words = _mm512_maskz_cvtepu16_epi32(kLanes, halves);
  _mm512_storeu_si512(to, _mm512_maskz_slli_epi32(kLanes, words, 16));
}
__attribute__((target(EXTENSION_CPP_AVX512))) inline void store_avx512(bfloat16* to, const float* from) {
  const __m512 numbers = _mm512_loadu_ps(from);
  const __m512i bits = _mm512_loadu_si512(from), high = _mm512_maskz_srli_epi32(kLanes, bits, 16);
  const __m512i half = _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_maskz_srli_epi32(kLanes, _mm512_add_epi32(bits, half), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
  const __m512i words = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtepi32_epi16(kLanes, words));
}

#undef EXTENSION_CPP_AVX512

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
inline float load_one(float16 x) {
  if (detail::has_f16c()) return detail::load_f16c(x);
  float number;
  detail::load_slowly(&x, &number, 1);
  return number;
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

// Halves that are `step` apart, side by side, in such code. Written one by one, they would all have to reach the cache
// before they can be read as a vector.
template <int kBytes, class T>
inline void collect(const T* from, int64_t step, T* to) {
#if defined(__x86_64__) && defined(__GNUC__)
  if constexpr (kBytes > 16) {
    return detail::collect(&from->bits, step, reinterpret_cast<uint16_t (&)[kBytes / 4]>(to->bits));
  }
#endif
  for (int i = 0; i < kBytes / 4; ++i) to[i] = from[i * step];
}

// As many halves as a vector of kBytes has numbers, inside of code for such vectors.
template <int kBytes, class T>
inline void load_vector(const T* from, float* to) {
#if defined(__x86_64__) && defined(__GNUC__)
  if constexpr (kBytes == 64) return detail::load_avx512(from, to);
  if constexpr (kBytes == 32) return detail::load_avx2(from, to);
#endif
  for (int i = 0; i < kBytes / 4; ++i) to[i] = load(from[i]);
}
template <int kBytes, class T>
inline void store_vector(T* to, const float* from) {
#if defined(__x86_64__) && defined(__GNUC__)
  if constexpr (kBytes == 64) return detail::store_avx512(to, from);
  if constexpr (kBytes == 32) return detail::store_avx2(to, from);
#endif
  for (int i = 0; i < kBytes / 4; ++i) store(to[i], from[i]);
}

// The same inside of simd::run: n elements, `step` apart.
template <class T, class V>
void read(const T* from, int64_t step, V* to, int64_t n) {
  if (step != 1) {
    for (int64_t i = 0; i < n; ++i) to[i] = load_one(from[i * step]);
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
