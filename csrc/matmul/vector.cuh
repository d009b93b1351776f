// The product of a vector and a matrix, of any dtype: c[j] = sum over k of x[k] * b(j, k).
//
// Two numbers: 2 * N * K operations on N * K elements, so that it takes as long as reading the matrix.
//
// A sum is of 8 to 256 classes of k, each in ascending order; those are added up two by two. A class is a thread's:
// where the matrix lies along k, it reads vectors of it; where it lies along rows, vectors of columns. A thread copies
// into slots of shared memory of its own, several steps ahead, so that it waits for no other.
#pragma once

#include <bit>
#include <utility>

#include "copies.cuh"

namespace extension_cpp::matmul {

constexpr int kLogThreads = 8, kVectorThreads = 1 << kLogThreads, kLeastClasses = 8, kOfWarp = 32;

// What a thread takes in a step: kCount vectors of the matrix, all with the same vector of x. Its copies are kSteps
// ahead.
template <class T, bool kAlongK>
struct VectorShape {
  static constexpr int kVec = 16 / sizeof(T), kLogVec = sizeof(T) == 2 ? 3 : sizeof(T) == 4 ? 2 : 1;
  static constexpr int kCount = !kAlongK ? kVec : sizeof(T) == 2 ? 2 : 1, kSteps = kAlongK ? 8 : 16 / kVec;
  static constexpr int kSums = kAlongK ? kCount : kVec;
  static constexpr int kSlot = kVectorThreads * 16, kStage = (kCount + 1) * kSlot;
};

// A vector, of which so many elements are there, in pieces of kPiece bytes or, where that is an element, from anywhere.
template <int kPiece, class T>
__device__ __forceinline__ uint4 read_pieces(const T* from, int64_t stride, int valid) {
  constexpr int kVec = 16 / sizeof(T), kEach = kPiece / sizeof(T);
  T values[kVec];
#pragma unroll
  for (int e = 0; e < kVec; e += kEach) {
    Words<kPiece> piece{};
    if (e < valid) piece = *reinterpret_cast<const Words<kPiece>*>(from + (kEach == 1 ? e * stride : e));
    memcpy(values + e, &piece, sizeof(piece));
  }
  uint4 words;
  memcpy(&words, values, sizeof(words));
  return words;
}

// The same, copied into shared memory while the thread goes on. Where some elements aren't there, a copy takes three
// times as many instructions.
template <int kPiece, bool kOnce, class T>
__device__ __forceinline__ void copy_pieces(uint32_t to, const T* from) {
#pragma unroll
  for (int at = 0; at < 16; at += kPiece) copy_all<kPiece, kOnce>(to + at, from + at / sizeof(T));
}
template <int kPiece, class T>
__device__ __forceinline__ void copy_some_pieces(uint32_t to, const T* from, int valid) {
#pragma unroll
  for (int at = 0; at < 16; at += kPiece) {
    const int bytes = max(0, min(valid * static_cast<int>(sizeof(T)) - at, kPiece));
    copy_async<kPiece>(to + at, from + at / sizeof(T), bytes);
  }
}

__device__ __forceinline__ void store_slot(uint32_t slot, const uint4& words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(slot), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

template <class T, class V>
__device__ __forceinline__ void load_slot(uint32_t slot, V (&to)[16 / sizeof(T)]) {
  constexpr int kVec = 16 / sizeof(T);
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(slot)
               : "memory");
  T values[kVec];
  memcpy(values, &words, sizeof(values));
#pragma unroll
  for (int e = 0; e < kVec; ++e) to[e] = static_cast<V>(values[e]);
}

// One element of it.
template <class T>
__device__ __forceinline__ T load_element(uint32_t at) {
  Words<sizeof(T)> word;
  if constexpr (sizeof(T) == 2) {
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(word) : "r"(at) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  } else {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(word.x), "=r"(word.y) : "r"(at) : "memory");
  }
  T value;
  memcpy(&value, &word, sizeof(value));
  return value;
}

template <class V>
__device__ __forceinline__ V sum_of_eight(const V (&v)[8]) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// Over the lanes that differ in the bits below `width`.
template <class V>
__device__ __forceinline__ V sum_over_lanes(V sum, int width) {
#pragma unroll 1
  for (int distance = width / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  return sum;
}

// There are 2^log_classes classes. A block has one part of k, of `part`, of some rows; blocks of the same part follow
// each other. Copies are `ahead` steps ahead.
template <class T, class V, int kPiece, bool kAlongK>
__global__ void __launch_bounds__(kVectorThreads) vector_kernel(
    const __grid_constant__ Product<T, V> product, const __grid_constant__ Divisor tiles, int64_t part, int log_classes,
    int ahead, int stages, bool once) {
  using Shape = VectorShape<T, kAlongK>;
  constexpr int kVec = Shape::kVec, kCount = Shape::kCount;
  extern __shared__ __align__(16) unsigned char slots[];
  start_kernel_behind();
  const int thread = threadIdx.x, classes = 1 << log_classes, log_across = kLogThreads - log_classes;
  const int own = kAlongK ? thread & (classes - 1) : thread >> log_across;
  const int group = kAlongK ? thread >> log_classes : thread & ((1 << log_across) - 1);
  const uint32_t split = tiles.quotient(blockIdx.x), tile = blockIdx.x - split * tiles.number;
  const int64_t first_row = (int64_t(tile) << log_across) * Shape::kSums;
  const int64_t row = first_row + group * Shape::kSums;
  const int64_t begin = split * part + own * kVec, end = min(split * part + part, product.k);
  const int step = classes * kVec;
  const int count =
      begin < end && row < product.n ? static_cast<int>((end - begin + step - 1) >> (log_classes + Shape::kLogVec)) : 0;
  const auto rows_there = static_cast<int>(max(int64_t(0), min(product.n - row, int64_t(Shape::kSums))));
  const bool x_in_vectors =
      kArchitecture >= 80 && product.a.inner == 1 && reinterpret_cast<uintptr_t>(product.a.data) % 16 == 0;
  const T* const rows = product.b.data + row * product.b.outer;
  constexpr bool kCopies = kArchitecture >= 80 && kPiece > sizeof(T);
  const int64_t to_next = kAlongK ? product.b.outer : product.b.inner;
  auto load = [&](int s, uint32_t slot) {
    const int64_t k = begin + int64_t(s) * step;
    const auto valid = static_cast<int>(min(end - k, int64_t(kVec)));
    const T *x = product.a.data + k * product.a.inner, *from = rows + k * product.b.inner;
    if (x_in_vectors) {
      copy_of_many(slot, x, valid * static_cast<int>(sizeof(T)));
    } else {
      store_slot(slot, read_pieces<sizeof(T)>(x, product.a.inner, valid));
    }
    slot += Shape::kSlot;
    const bool whole = valid == kVec && rows_there == Shape::kSums;
    if (kCopies && !whole) {
#pragma unroll 1
      for (int r = 0; r < kCount; ++r, from += to_next, slot += Shape::kSlot) {
        const int there = kAlongK ? r < rows_there ? valid : 0 : r < valid ? rows_there : 0;
        copy_some_pieces<kCopies ? kPiece : 4>(slot, from, there);
      }
    } else if (kCopies && once) {
#pragma unroll
      for (int r = 0; r < kCount; ++r, from += to_next) copy_pieces<kPiece, true>(slot + r * Shape::kSlot, from);
    } else if constexpr (kCopies) {
#pragma unroll
      for (int r = 0; r < kCount; ++r, from += to_next) copy_pieces<kPiece, false>(slot + r * Shape::kSlot, from);
    } else {
      const int64_t stride = kAlongK ? product.b.inner : product.b.outer;
      uint4 words[kCount];
#pragma unroll
      for (int r = 0; r < kCount; ++r, from += to_next) {
        const int there = kAlongK ? r < rows_there ? valid : 0 : r < valid ? rows_there : 0;
        words[r] = kPiece > sizeof(T) && whole ? read_pieces<kPiece>(from, stride, there)
                                               : read_pieces<sizeof(T)>(from, stride, there);
      }
#pragma unroll
      for (int r = 0; r < kCount; ++r) store_slot(slot + r * Shape::kSlot, words[r]);
    }
  };
  V sums[Shape::kSums] = {};
  auto add = [&](uint32_t slot) {
    if constexpr (kAlongK) {
      V a[kVec];
      load_slot<T>(slot, a);
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
        V b[kVec];
        load_slot<T>(slot += Shape::kSlot, b);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sums[r] = fma(a[e], b[e], sums[r]);
      }
    } else {
      const uint32_t stage_of_x = slot;
#pragma unroll 2
      for (int r = 0; r < kCount; ++r) {
        const V a = static_cast<V>(load_element<T>(stage_of_x + r * sizeof(T)));
        V b[kVec];
        load_slot<T>(slot += Shape::kSlot, b);
#pragma unroll
        for (int e = 0; e < kVec; ++e) sums[e] = fma(a, b[e], sums[e]);
      }
    }
  };
  // Addresses, not indices: nvcc 13 makes of a copy with a policy, to an index that is uniform, no legal instruction.
  const uint32_t first = shared_address(slots) + thread * 16, last = first + stages * Shape::kStage;
  uint32_t next = first, stage = first;
#pragma unroll 1
  for (int s = -ahead; s < count; ++s) {
    if (s >= 0) {
      wait_for_copies<Shape::kSteps - 1>();
      add(stage);
      if ((stage += Shape::kStage) == last) stage = first;
    }
    if (s + ahead < count) load(s + ahead, next);
    if ((next += Shape::kStage) == last) next = first;
    commit_copies();
  }
  auto store = [&](int64_t row, V sum) {
    if (row >= product.n) return;
    if (product.partial != nullptr) {
      product.partial[split * product.partial_stride + row] = sum;
    } else {
      product.c[row * product.c_inner] = round_to<T>(sum);
    }
  };
  // Eight classes or fewer are added up by one thread, those sums by threads of a warp.
  constexpr int kOfThread = 8, kLogOfThread = 3;
  V* const shared = reinterpret_cast<V*>(slots);
  if constexpr (kAlongK) {
    if (classes > kOfWarp) {
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kCount; ++r) shared[r * kVectorThreads + thread] = sums[r];
      __syncthreads();
      if (own >= kOfWarp) return;
#pragma unroll
      for (int r = 0; r < kCount; ++r) {
        V more[kOfThread];
#pragma unroll
        for (int w = 0; w < kOfThread; ++w) {
          more[w] = w * kOfWarp < classes ? shared[r * kVectorThreads + thread + w * kOfWarp] : V(-0.0);
        }
        sums[r] = sum_of_eight(more);
      }
    }
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const V sum = sum_over_lanes(sums[r], min(classes, kOfWarp));
      if (own == 0) store(row + r, sum);
    }
  } else {
    constexpr int kOfWord = 16 / sizeof(V);  // The rows of classes are so much longer, to lie in different banks.
    const int width = (kVec << log_across) + kOfWord, log_of_column = log_classes - kLogOfThread;
    const int threads = 1 << log_of_column, column = thread >> log_of_column, own_part = thread & (threads - 1);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kVec; e += kOfWord) {
      uint4 word;
      memcpy(&word, sums + e, sizeof(word));
      *reinterpret_cast<uint4*>(shared + own * width + group * kVec + e) = word;
    }
    __syncthreads();
    if (thread / kOfWarp * kOfWarp >> log_of_column >= kVec << log_across) return;
    V more[kOfThread];
#pragma unroll
    for (int w = 0; w < kOfThread; ++w) more[w] = shared[(w * threads + own_part) * width + column];
    const V sum = sum_over_lanes(sum_of_eight(more), threads);
    if (own_part == 0) store(first_row + column, sum);
  }
}

// Of which classes a sum is, and of how many parts of k: by sizes alone, so that the bits don't depend on layouts.
template <class T>
std::pair<int, int64_t> cut_vector(int64_t n, int64_t k) {
  // Fitted to the times of all cuts on two GPUs: how many threads keep a device busy, how many bytes one block may read
  // before parts are worth another launch, and how many vectors of columns a block of a part has.
  constexpr bool kHalves = sizeof(T) == 2;
  constexpr int64_t kVec = 16 / sizeof(T), kFewSums = 200, kLong = 16'384, kMostOfBlock = 82'000;
  constexpr double kLarge = 60e6;
  constexpr int kAcross = 4, kAcrossOfLong = 16;
  const double bytes = static_cast<double>(n) * k * sizeof(T);
  const bool is_large = sizeof(T) == 4 && bytes > kLarge;
  const int64_t threads = kHalves ? 85'000 : is_large ? 100'000 : 50'000;
  const int64_t threads_of_parts = kHalves || is_large ? 1 << 18 : 1 << 16;
  const int most = n < kFewSums ? kVectorThreads : kVectorThreads / 2;
  int classes = kLeastClasses;
  while (classes < most && classes * kVec < k && n * classes < threads) classes *= 2;
  const int64_t blocks = ceil_div(n * classes, kVectorThreads * kVec);
  if (k < kLong && (n * classes >= threads || bytes <= static_cast<double>(kMostOfBlock * blocks))) return {classes, 1};
  int of_part = kVectorThreads / (k < kLong ? kAcross : kAcrossOfLong);
  while (of_part < kVectorThreads && n * of_part * 2 <= kVectorThreads * kVec) of_part *= 2;
  const int64_t parts = std::min((threads_of_parts + n * of_part / 2) / (n * of_part), k / (of_part * kVec));
  return parts > 1 ? std::pair(of_part, parts) : std::pair(classes, int64_t(1));
}

template <class T, class V>
void multiply_vector(Launch& launch, const View& like, const Product<T, V>& product, const Device& device) {
  constexpr int kVec = 16 / sizeof(T), kElement = sizeof(T), kOfTuring = 48 * 1024;
  const auto [classes, parts] = cut_vector<T>(product.n, product.k);
  const bool along_rows = product.b.outer == 1 && product.b.inner != 1;
  const int piece = piece_of(product.b);
  const bool once = is_streamed(product.b, product.n, product.k, 16);
  const int64_t chunk = int64_t(classes) * kVec, part = ceil_div(ceil_div(product.k, parts), chunk) * chunk;
  auto run = [&]<int kPiece, bool kAlongK>(const Product<T, V>& product, const Plan& plan) {
    using Shape = VectorShape<T, kAlongK>;
    const int most = device.architecture < 80 ? kOfTuring / Shape::kStage : Shape::kSteps;
    const auto stages = static_cast<int>(std::min<int64_t>(most, part / chunk));
    const int64_t tiles = ceil_div(product.n, int64_t(kVectorThreads) / classes * Shape::kSums);
    launch(
        vector_kernel<T, V, kPiece, kAlongK>, tiles * plan.tiling.splits(), kVectorThreads,
        static_cast<size_t>(stages) * Shape::kStage, product, Divisor(tiles), part, std::countr_zero(unsigned(classes)),
        most, stages, once);
  };
  const Plan plan{0, {1, 1, product.k, part}, 0};
  const auto run_parts = [&](const Product<T, V>& p, const Plan& plan) {
    auto with = [&]<int kPiece>(std::integral_constant<int, kPiece>) {
      along_rows ? run.template operator()<kPiece, false>(p, plan) : run.template operator()<kPiece, true>(p, plan);
    };
    if (piece == 16) return with(std::integral_constant<int, 16>());
    if (piece == 8) return with(std::integral_constant<int, 8>());
    with(std::integral_constant<int, kElement>());
  };
  with_splits(launch, like, product, device, plan, run_parts, true);
}

}  // namespace extension_cpp::matmul
