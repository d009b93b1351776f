// One binary for every x86-64: code is compiled for the baseline, for AVX2 and for AVX-512, and the machine's own is
// chosen at run time. No -march. EXTENSION_CPP_SIMD=baseline, avx2, avx512 or avx512_bf16 holds it to less, to test
// those or to find a fault.
#pragma once

#include <cstdlib>
#include <string_view>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace extension_cpp::simd {

#if defined(__x86_64__) && defined(__GNUC__)

// The last two differ in what they do with bfloat16. Levels are as _machine.py has them.
enum class Level { kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmx };

inline Level level() {
  static const Level found = [] {
    const char* variable = std::getenv("EXTENSION_CPP_SIMD");
    const std::string_view wanted = variable ? variable : "";
    if (wanted == "baseline") return Level::kBaseline;
    unsigned a, b, c, d = 0;  // Not by __builtin_cpu_supports, to which Clang 14's f16c and amx-bf16 are unknown.
    const bool halves = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
    if (!halves || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Level::kBaseline;
    if (wanted == "avx2") return Level::kAvx2;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!avx512) return Level::kAvx2;
    if (!__builtin_cpu_supports("avx512bf16") || wanted == "avx512") return Level::kAvx512;
    if (wanted == "avx512_bf16") return Level::kAvx512Bf16;
    constexpr unsigned kAmx = 1 << 22 | 1 << 24;  // amx-bf16 and amx-tile
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAmx) == kAmx) return Level::kAmx;
    // Intel's take longer for a pair than for two products in float32.
    return __builtin_cpu_is("intel") ? Level::kAvx512 : Level::kAvx512Bf16;
  }();
  return found;
}

namespace detail {

// `flatten` inlines all that body calls, and so compiles it again for these instructions. `noinline` is for run_apart:
// other callers are compiled for the baseline, where this can't be inlined. `noclone`, as another copy for an argument
// that is a constant is as much code once more.
#ifdef __clang__  // It makes no copies, and ignores a target with a part that it doesn't know.
#define EXTENSION_CPP_APART flatten, noinline
#define EXTENSION_CPP_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#else
#define EXTENSION_CPP_APART flatten, noinline, noclone
#define EXTENSION_CPP_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512"
#endif
template <class Body>
__attribute__((target("avx2,fma,f16c"), EXTENSION_CPP_APART)) void run_avx2(const Body& body) {
  body();
}
template <class Body>
__attribute__((target(EXTENSION_CPP_AVX512), EXTENSION_CPP_APART)) void run_avx512(const Body& body) {
  body();
}
#undef EXTENSION_CPP_APART
#undef EXTENSION_CPP_AVX512

}  // namespace detail

template <class Body>
void run(const Body& body) {
  switch (level()) {
    case Level::kAmx:
    case Level::kAvx512Bf16:
    case Level::kAvx512: return detail::run_avx512(body);
    case Level::kAvx2: return detail::run_avx2(body);
    case Level::kBaseline: return body();
  }
}

// The same for a body that waits for memory more than it computes. Zen 4 takes vectors of 512 bits in two halves, which
// gain nothing, and reads ahead later if a cache line is one access.
template <class Body>
void run_on_memory(const Body& body) {
  static const bool in_halves = level() >= Level::kAvx512 && __builtin_cpu_is("amdfam19h");
  in_halves ? detail::run_avx2(body) : run(body);
}

// The same for a body that is told how many bytes a vector has: body.operator()<64>(), <32> or <16>.
template <class Body>
void run_for_width(const Body& body) {
  switch (level()) {
    case Level::kAmx:
    case Level::kAvx512Bf16:
    case Level::kAvx512: return detail::run_avx512([&] { body.template operator()<64>(); });
    case Level::kAvx2: return detail::run_avx2([&] { body.template operator()<32>(); });
    case Level::kBaseline: return body.template operator()<16>();
  }
}

// Within such a body: another that is compiled apart, so that its constants take no registers of the loops around it.
template <int kBytes, class Body>
void run_apart(const Body& body) {
  if constexpr (kBytes == 64) {
    detail::run_avx512(body);
  } else if constexpr (kBytes == 32) {
    detail::run_avx2(body);
  } else {
    body();
  }
}

// Whether the processor adds products of pairs of bfloat16 (AVX512-BF16).
inline bool multiplies_pairs() {
  return level() == Level::kAvx512Bf16;
}

#else

inline bool multiplies_pairs() {
  return false;
}
template <class Body>
void run(const Body& body) {
  body();
}
template <class Body>
void run_on_memory(const Body& body) {
  body();
}
template <class Body>
void run_for_width(const Body& body) {
  body.template operator()<16>();
}
template <int kBytes, class Body>
void run_apart(const Body& body) {
  body();
}

#endif

}  // namespace extension_cpp::simd
