// What the CUDA kernels of matmul share: how the work is cut, how sums are stored, copies into shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>

#include "../common/launch.cuh"
#include "../common/memory.h"
#include "../matmul.h"

namespace extension_cpp {

template <>
inline int32_t dtype_of<__half>() {
  return dtypes::kFloat16;
}
template <>
inline int32_t dtype_of<__nv_bfloat16>() {
  return dtypes::kBFloat16;
}

}  // namespace extension_cpp

namespace extension_cpp::matmul {

// A product to compute: m by n sums over k. Of a and b, rows_a and rows_b rows may be read: more than m and n of a copy
// that is padded with zeros. Element (i, j) of the result is at c[i * c_outer + j * c_inner]. Where
// `partial` is given, kernels leave c to sum_splits_kernel and write their sums, those of split s over a part of k, to
// partial[(s * m + i) * partial_stride + j], with m, i and j of the product that with_splits was given, even if a
// kernel takes the transposed factors. Its rows are padded, so that whole vectors are written and read.
template <class T, class V>
struct Product {
  Factor<T> a, b;
  int64_t m, n, k, rows_a, rows_b, c_outer, c_inner, partial_stride;
  T* c;
  V* partial;

  // That of the transposed factors, whose result is the transposed one.
  Product swapped() const { return {b, a, n, m, k, rows_b, rows_a, c_inner, c_outer, partial_stride, c, partial}; }

  // Without the first `rows` rows.
  Product below(int64_t rows) const {
    Product rest = *this;
    rest.a.data += rows * a.outer, rest.c += rows * c_outer, rest.m -= rows, rest.rows_a -= rows;
    return rest;
  }

  // Whether rows of c consist of whole, aligned vectors.
  __host__ __device__ bool has_vectors(int size) const { return c_inner == 1 && c_outer % size == 0 && n % size == 0; }

  // The same of columns of a transposed c.
  __host__ __device__ bool has_columns(int size) const { return c_outer == 1 && c_inner % size == 0 && m % size == 0; }
};

// The largest piece, of 16, 8 or 4 bytes, of which every row of a factor begins at a multiple; 0 if there is none.
template <class T>
int piece_of(const Factor<T>& factor) {
  const bool transposed = factor.inner != 1;
  if (transposed && factor.outer != 1) return 0;
  const uint64_t stride = (transposed ? factor.inner : factor.outer) * sizeof(T);
  const uint64_t starts = reinterpret_cast<uintptr_t>(factor.data) | stride;
  return starts % 16 == 0 ? 16 : starts % 8 == 0 ? 8 : starts % 4 == 0 ? 4 : 0;
}

// Whether the L2 cache should be told that a factor of so many rows is read once. Its rows have to begin at a multiple
// of so many bytes, as reads that share a line would otherwise fetch it twice; and what is much larger than the cache
// gains nothing.
template <class T>
bool is_streamed(const Factor<T>& factor, int64_t rows, int64_t k, int alignment) {
  constexpr double kMostBytes = 190e6;
  const int64_t stride = factor.inner == 1 ? factor.outer : factor.inner;
  const bool aligned = (reinterpret_cast<uintptr_t>(factor.data) | stride * sizeof(T)) % alignment == 0;
  return aligned && static_cast<double>(rows) * k * sizeof(T) <= kMostBytes;
}

// Tiles of the result, and parts of k of a whole number of steps, in the order in which blocks take them.
struct Tiling {
  int64_t tiles_m, tiles_n, steps, steps_per_split;

  __host__ __device__ int64_t splits() const { return (steps + steps_per_split - 1) / steps_per_split; }
  __host__ __device__ int64_t count() const { return tiles_m * tiles_n * splits(); }
};

struct Place {
  int64_t m, n, split, begin, end;  // a tile, and a range of steps
};

// What the code at hand is compiled for, 90 for 9.0.
#if defined(__CUDA_ARCH__)
constexpr int kArchitecture = __CUDA_ARCH__ / 10;
#else
constexpr int kArchitecture = 0;
#endif

// Whether code for an architecture has tensor cores that take T, float32 as tf32.
template <class T>
__host__ __device__ constexpr bool has_mma(int architecture) {
  return architecture >= (std::is_same_v<T, __half> ? 75 : 80);
}

// Divides by a number that the host knows, by a product and a shift: a division takes a hundred cycles.
struct Divisor {
  uint32_t number, factor, shift = 0;

  explicit Divisor(int64_t divisor) : number(static_cast<uint32_t>(divisor)) {
    while ((uint64_t{1} << shift) < number) ++shift;
    factor = static_cast<uint32_t>((((uint64_t{1} << shift) - number) << 32) / number + 1);
  }

  // Of x, which is below 2^31.
  __device__ uint32_t quotient(uint32_t x) const { return (__umulhi(x, factor) + x) >> shift; }
};

// In which order blocks take tiles. Those that run at the same time lie in a block of the result, so that they find
// each other's factors in the L2 cache. There are fewer than 2^31 of them, or there would be no such launch. Where the
// blocks of a cluster have the parts of one tile, those follow each other.
class TileOrder {
 public:
  TileOrder(const Tiling& tiling, bool in_cluster)
      : count(static_cast<uint32_t>(tiling.count())),
        splits(static_cast<uint32_t>(tiling.splits())),
        in_cluster(in_cluster),
        last_group_(static_cast<uint32_t>((tiling.tiles_m - 1) / kHeight)),
        inner_(in_cluster ? tiling.splits() : tiling.tiles_m * tiling.tiles_n),
        group_(std::min(kHeight, tiling.tiles_m) * tiling.tiles_n),
        height_(std::min(kHeight, tiling.tiles_m)),
        last_height_((tiling.tiles_m - 1) % kHeight + 1),
        steps_(tiling.steps),
        steps_per_split_(tiling.steps_per_split) {}

  static constexpr int64_t kHeight = 8;

  uint32_t count, splits;
  bool in_cluster;

  __device__ Place operator[](uint32_t index) const {
    const uint32_t outside = inner_.quotient(index), inside = index - outside * inner_.number;
    const uint32_t split = in_cluster ? inside : outside, tile = in_cluster ? outside : inside;
    const uint32_t group = group_.quotient(tile), in_group = tile - group * group_.number;
    const Divisor height = group == last_group_ ? last_height_ : height_;
    const uint32_t column = height.quotient(in_group), row = in_group - column * height.number;
    const int64_t begin = split * steps_per_split_;
    return {group * height_.number + row, column, split, begin, min(begin + steps_per_split_, steps_)};
  }

 private:
  uint32_t last_group_;
  Divisor inner_, group_, height_, last_height_;
  int64_t steps_, steps_per_split_;
};

template <class T, class V>
__device__ T round_to(V value) {
  return static_cast<T>(value);
}
template <>
__device__ inline __half round_to(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 round_to(float value) {
  return __float2bfloat16_rn(value);
}

// What kBytes are copied as.
template <int kBytes>
struct WordsOf;
template <>
struct WordsOf<2> {
  using type = uint16_t;
};
template <>
struct WordsOf<4> {
  using type = uint32_t;
};
template <>
struct WordsOf<8> {
  using type = uint2;
};
template <>
struct WordsOf<16> {
  using type = uint4;
};
template <int kBytes>
using Words = typename WordsOf<kBytes>::type;

template <class To, int kCount, class V>
__device__ __forceinline__ auto rounded_words(const V* values) {
  To rounded[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) rounded[e] = round_to<To>(values[e]);
  Words<sizeof(rounded)> words;
  memcpy(&words, rounded, sizeof(rounded));
  return words;
}

// To global memory, in one instruction.
template <class To, int kCount, class V>
__device__ __forceinline__ void store_at_once(To* to, const V* values) {
  const auto words = rounded_words<To, kCount>(values);
  if constexpr (sizeof(words) == 16) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z),
                 "r"(words.w)
                 : "memory");
  } else if constexpr (sizeof(words) == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words.x), "r"(words.y) : "memory");
  } else {
    *reinterpret_cast<Words<sizeof(words)>*>(to) = words;
  }
}

// The same. Of four elements or more, nvcc would make a store for each word; of two it makes one as a rule, which it
// moves and predicates better than what it is told, or writes to shared memory too.
template <class To, int kCount, class V>
__device__ __forceinline__ void store_vector(To* to, const V* values) {
  if constexpr (kCount > 2) {
    store_at_once<To, kCount>(to, values);
  } else {
    *reinterpret_cast<Words<sizeof(To) * kCount>*>(to) = rounded_words<To, kCount>(values);
  }
}

// Stores a thread's sums: each(f) calls f(i, j, sums) for every kCount of them in a row, from element (i, j) on.
template <int kCount, class T, class V, class Each>
__device__ __forceinline__ void store_sums(const Product<T, V>& product, int64_t split, const Each& each) {
  if (product.partial != nullptr) {
    V* base = product.partial + split * product.m * product.partial_stride;
    each([&](int64_t i, int64_t j, const V* sums) {
      if (i < product.m && j < product.partial_stride) {
        store_vector<V, kCount>(base + i * product.partial_stride + j, sums);
      }
    });
  } else if (product.has_vectors(kCount)) {
    each([&](int64_t i, int64_t j, const V* sums) {
      if (i < product.m && j < product.n) store_vector<T, kCount>(product.c + i * product.c_outer + j, sums);
    });
  } else {
    each([&](int64_t i, int64_t j, const V* sums) {
      if (i >= product.m) return;
      T* to = product.c + i * product.c_outer + j * product.c_inner;
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if (j + e < product.n) to[e * product.c_inner] = round_to<T>(sums[e]);
      }
    });
  }
}

// Element (i, j) of the result, where it isn't finite, once more by fused multiply-adds: an infinite part of an element
// times a part of another that is zero is NaN, and a part of the largest numbers is infinite.
template <class V>
__device__ inline void restore_infinite(const Product<float, V>& product, int64_t i, int64_t j) {
  if (i >= product.m || j >= product.n) return;
  float* to = product.c + i * product.c_outer + j * product.c_inner;
  if (isfinite(*to)) return;
  const float* a = product.a.data + i * product.a.outer;
  const float* b = product.b.data + j * product.b.outer;
  float sum = 0;
#pragma unroll 1
  for (int64_t k = 0; k < product.k; ++k, a += product.a.inner, b += product.b.inner) sum = fma(*a, *b, sum);
  *to = sum;
}

__device__ inline uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Copies into shared memory that are under way until wait_for_copies. Of kBytes, so many are there: the others become
// zero, and aren't read. Of a line in the L2 cache whose other half is read next, both are fetched.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(bytes));
  }
#endif
}

// How the L2 cache keeps what is read once: it leaves before what other kernels wrote there, which would have to be
// written to memory.
__device__ __forceinline__ uint64_t policy_of_once() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// The same of all bytes, which with kOnce are read once.
template <int kBytes, bool kOnce>
__device__ __forceinline__ void copy_all(uint32_t to, const void* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16 && kOnce) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "l"(policy_of_once())
                 : "memory");
  } else if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
  }
#endif
}

// The same of 16 bytes that many threads copy: through the L1 cache, as the L2 cache gives one line to one thread
// after the other.
__device__ __forceinline__ void copy_of_many(uint32_t to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#endif
}

// All of them, where `valid`.
template <int kBytes>
__device__ void copy_async(void* to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  copy_async<kBytes>(shared_address(to), from, valid ? kBytes : 0);
#else
  *static_cast<Words<kBytes>*>(to) = valid ? *static_cast<const Words<kBytes>*>(from) : Words<kBytes>{};
#endif
}

// A vector of elements, of which `valid` are there. No other byte is read.
template <class T>
__device__ void copy_vector(void* to, const T* from, int valid) {
  constexpr int kCount = 16 / sizeof(T);
  if (valid == kCount || valid == 0) {
    copy_async<16>(to, from, valid != 0);
    return;
  }
#pragma unroll 1
  for (int e = 0; e < kCount; ++e) static_cast<T*>(to)[e] = e < valid ? from[e] : T(0);
}

__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all but the last kPending groups of copies are done, of this thread.
template <int kPending>
__device__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Lets the kernel behind this one start, if it is one that waits.
__device__ inline void start_kernel_behind() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Lets the kernel behind this one start, and waits for what the kernel before wrote.
__device__ inline void wait_for_kernel_before() {
  start_kernel_behind();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// One block's share of a product, of `count` steps: `load` starts the copies of the next step into a stage of shared
// memory, and `compute` works on a stage.
template <int kStages, class Load, class Compute>
__device__ __forceinline__ void pipeline(int count, const Load& load, const Compute& compute) {
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < count) load(s);
    commit_copies();
  }
  int stage = 0, next = kStages - 1;
  for (int step = 0; step < count; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < count) load(next);
    commit_copies();
    compute(stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    next = next + 1 == kStages ? 0 : next + 1;
  }
}

}  // namespace extension_cpp::matmul
