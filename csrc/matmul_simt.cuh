// The product by ordinary fused multiply-adds: float32 and float64 on every GPU, halves where tensor cores take none.
//
// Two numbers: a tile of kM by kN takes 2 * kM * kN operations and kM + kN elements a step of k. A thread reads
// kRows + kColumns of them from shared memory for kRows * kColumns multiply-adds: with 8 by 8, all that it gives.
#pragma once

#include "matmul.cuh"

namespace extension_cpp {

// A tile of kM by kN, of which a thread has kRows by kColumns, in steps of kK; a multiprocessor holds kBlocks of them.
// Shared memory has a row a k, or of b with kAlongK, which takes whole vectors where they lie along k, a row a column.
template <class V, int kM_, int kN_, int kK_, int kRows_, int kColumns_, int kStages_, int kBlocks_, bool kAlongK_>
struct Simt {
  static constexpr int kM = kM_, kN = kN_, kK = kK_, kRows = kRows_, kColumns = kColumns_, kStages = kStages_;
  static constexpr int kBlocks = kBlocks_, kThreads = kM / kRows * (kN / kColumns), kVec = 16 / sizeof(V);
  static constexpr bool kAlongK = kAlongK_;
  // How the 32 threads of a warp lie, and the warps of a block.
  static constexpr int kLanesM = kM / kRows < 4 ? kM / kRows : 4, kLanesN = 32 / kLanesM;
  static constexpr int kWarpsN = kN / (kColumns * kLanesN);
  static_assert(kLanesM * kLanesN == 32 && kN % (kColumns * kLanesN) == 0 && kThreads % kK == 0);
  static_assert(kRows % kVec == 0 && kColumns % kVec == 0 && kK % kVec == 0);
  // A thread's columns: vectors, or single ones, so that neighbouring threads read neighbouring rows of shared memory.
  static constexpr int kWide = kAlongK ? 1 : kVec;

  struct Stage {  // Rows a vector longer than the tile, so that those of a column lie in different banks.
    V a[kK][kM + kVec];
    V b[kAlongK ? kN : kK][(kAlongK ? kK : kN) + kVec];
  };
  static constexpr int kSharedBytes = kStages * sizeof(Stage);
  static_assert(kSharedBytes <= 64 * 1024);  // Turing has no more.
};

template <class T, class V>
__device__ void copy_element(V* to, const T* from, bool valid) {
  if constexpr (std::is_same_v<T, V>) {
    copy_async<sizeof(V)>(to, from, valid ? sizeof(V) : 0);
  } else {
    *to = valid ? static_cast<V>(*from) : V(0);
  }
}

// kSize rows of a factor, from `first` on, and kK of k, to to[k][row]. Neighbouring threads read neighbouring elements.
template <class S, int kSize, class T, class V>
__device__ void load_simt(
    const Factor<T>& factor, int64_t first, int64_t size, int64_t k, int64_t depth, V (*to)[kSize + S::kVec]) {
  const int t = threadIdx.x, rows = static_cast<int>(min(size - first, static_cast<int64_t>(kSize)));
  const int ks = static_cast<int>(min(depth - k, static_cast<int64_t>(S::kK)));
  const T* from = factor.data + first * factor.outer + k * factor.inner;
  constexpr int kVec = std::is_same_v<T, V> ? S::kVec : 1, kChunks = kSize / kVec;
  const bool aligned = reinterpret_cast<uintptr_t>(factor.data) % 16 == 0 && factor.inner % kVec == 0;
  // Pointers move on from copy to copy: worked out for each, they would take more registers than there are.
  if (kVec > 1 && factor.outer == 1 && aligned) {
    constexpr int kAtATime = S::kThreads / kChunks;
    static_assert(S::kThreads % kChunks == 0 && S::kK % kAtATime == 0);
    const int row = t % kChunks * kVec, valid = max(0, min(rows - row, kVec));
    int at = t / kChunks;
    from += row + at * factor.inner;
#pragma unroll
    for (int c = 0; c < S::kK / kAtATime; ++c, at += kAtATime, from += kAtATime * factor.inner) {
      const bool any = at < ks && valid > 0;
      if constexpr (kVec > 1) copy_vector(&to[at][row], any ? from : factor.data, any ? valid : 0);
    }
  } else {
    // Along k, or along rows where those are nearer.
    constexpr int kAlong = S::kK, kCount = kSize * S::kK / S::kThreads;
    const bool along_k = factor.outer != 1;
    constexpr int kRowsAtATime = S::kThreads / kAlong, kRowTurns = kSize / kRowsAtATime;
    constexpr int kRowSteps = kSize > S::kThreads ? kSize / S::kThreads : 1;
    constexpr int kAtATime = kSize < S::kThreads ? S::kThreads / kSize : 1;
    static_assert(kSize % kRowsAtATime == 0 && (kSize % S::kThreads == 0 || S::kThreads % kSize == 0));
    const int turns = along_k ? kRowTurns : kRowSteps, row_step = along_k ? kRowsAtATime : S::kThreads;
    const int at_step = along_k ? kAlong : kAtATime;
    int row = along_k ? t / kAlong : t % kSize, at = along_k ? t % kAlong : t / kSize;
    from += row * factor.outer + at * factor.inner;
    const int64_t next = row_step * factor.outer, back = at_step * factor.inner - (turns - 1) * next;
    int turn = 0;
#pragma unroll 4
    for (int c = 0; c < kCount; ++c) {
      const bool valid = at < ks && row < rows;
      copy_element(&to[at][row], valid ? from : factor.data, valid);
      if (++turn == turns) {
        turn = 0, row -= (turns - 1) * row_step, at += at_step, from += back;
      } else {
        row += row_step, from += next;
      }
    }
  }
}

// Whether load_along_k can take a factor.
template <class T>
bool has_vectors_along_k(const Factor<T>& factor) {
  constexpr int64_t kVec = 16 / sizeof(T);
  const bool aligned = reinterpret_cast<uintptr_t>(factor.data) % 16 == 0;
  return aligned && factor.inner == 1 && factor.outer % kVec == 0;
}

// The same to to[row][k], in whole vectors.
template <class S, class V>
__device__ void load_along_k(
    const Factor<V>& factor, int64_t first, int64_t size, int64_t k, int64_t depth, V (*to)[S::kK + S::kVec]) {
  constexpr int kChunks = S::kK / S::kVec, kAtATime = S::kThreads / kChunks;
  static_assert(S::kThreads % kChunks == 0 && S::kN % kAtATime == 0);
  const int rows = static_cast<int>(min(size - first, static_cast<int64_t>(S::kN)));
  const int at = threadIdx.x % kChunks * S::kVec;
  const int valid = static_cast<int>(max(min(depth - k - at, static_cast<int64_t>(S::kVec)), int64_t(0)));
  int row = threadIdx.x / kChunks;
  const V* from = factor.data + (first + row) * factor.outer + k + at;
#pragma unroll 4
  for (int c = 0; c < S::kN / kAtATime; ++c, row += kAtATime, from += kAtATime * factor.outer) {
    const bool any = row < rows && valid > 0;
    copy_vector(&to[row][at], any ? from : factor.data, any ? valid : 0);
  }
}

template <class S, class T, class V>
__device__ __forceinline__ void multiply_simt(const Product<T, V>& product, const Tiling& tiling) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto* stages = reinterpret_cast<typename S::Stage*>(shared);
  const Place at = place(tiling, blockIdx.x);
  const int64_t first_m = at.m * S::kM, first_n = at.n * S::kN;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // A thread's rows and columns come in vectors, and those of a warp's threads lie side by side. Of eight threads, two
  // read one vector of b, so that a warp's reads are of fewer different ones.
  const bool pairs = S::kLanesM == 4;
  const int lane_m = pairs ? lane % 2 + lane / 16 * 2 : lane / S::kLanesN;
  const int lane_n = pairs ? lane / 2 % 8 : lane % S::kLanesN;
  const int row = warp / S::kWarpsN * S::kLanesM * S::kRows + lane_m * S::kVec;
  const int column = warp % S::kWarpsN * S::kLanesN * S::kColumns + lane_n * S::kWide;
  V sums[S::kRows][S::kColumns] = {};
  auto load = [&](int64_t step, int stage) {
    load_simt<S, S::kM>(product.a, first_m, product.m, step * S::kK, product.k, stages[stage].a);
    if constexpr (S::kAlongK) {
      load_along_k<S>(product.b, first_n, product.n, step * S::kK, product.k, stages[stage].b);
    } else {
      load_simt<S, S::kN>(product.b, first_n, product.n, step * S::kK, product.k, stages[stage].b);
    }
  };
  auto fetch_a = [&](int stage, int k, V* a) {
#pragma unroll
    for (int i = 0; i < S::kRows; i += S::kVec) {
      *reinterpret_cast<uint4*>(a + i) = *reinterpret_cast<const uint4*>(&stages[stage].a[k][row + i * S::kLanesM]);
    }
  };
  auto fetch_b = [&](int stage, int k, V* b) {
#pragma unroll
    for (int j = 0; j < S::kColumns; j += S::kVec) {
      *reinterpret_cast<uint4*>(b + j) = *reinterpret_cast<const uint4*>(&stages[stage].b[k][column + j * S::kLanesN]);
    }
  };
  auto compute = [&](int stage) {
    if constexpr (S::kAlongK) {
#pragma unroll
      for (int k = 0; k < S::kK; k += S::kVec) {
        alignas(16) V a[S::kRows], b[S::kColumns][S::kVec];
#pragma unroll
        for (int j = 0; j < S::kColumns; ++j) {
          *reinterpret_cast<uint4*>(b[j]) =
              *reinterpret_cast<const uint4*>(&stages[stage].b[column + j * S::kLanesN][k]);
        }
#pragma unroll
        for (int e = 0; e < S::kVec; ++e) {
          fetch_a(stage, k + e, a);
#pragma unroll
          for (int i = 0; i < S::kRows; ++i) {
#pragma unroll
            for (int j = 0; j < S::kColumns; ++j) sums[i][j] = fma(a[i], b[j][e], sums[i][j]);
          }
        }
      }
    } else {
      alignas(16) V a[2][S::kRows], b[2][S::kColumns];  // Those of one k are fetched while those before are multiplied.
      fetch_a(stage, 0, a[0]);
      fetch_b(stage, 0, b[0]);
#pragma unroll
      for (int k = 0; k < S::kK; ++k) {
        if (k + 1 < S::kK) {
          fetch_a(stage, k + 1, a[(k + 1) % 2]);
          fetch_b(stage, k + 1, b[(k + 1) % 2]);
        }
#pragma unroll
        for (int i = 0; i < S::kRows; ++i) {
#pragma unroll
          for (int j = 0; j < S::kColumns; ++j) sums[i][j] = fma(a[k % 2][i], b[k % 2][j], sums[i][j]);
        }
      }
    }
  };
  pipeline<S::kStages>(at, load, compute);
  store_sums<S::kWide>(product, at, [&](const auto& store) {
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) {
      const int64_t m = first_m + row + i / S::kVec * S::kVec * S::kLanesM + i % S::kVec;
#pragma unroll
      for (int j = 0; j < S::kColumns; j += S::kWide) store(m, first_n + column + j * S::kLanesN, sums[i] + j);
    }
  });
}

constexpr int kMostBlocks = kArchitecture < 80 ? 1 : 4;  // Turing's shared memory holds one.

template <class S, class T, class V>
__global__ void __launch_bounds__(S::kThreads, std::min(S::kBlocks, kMostBlocks))
    simt_kernel(Product<T, V> product, Tiling tiling) {
  if constexpr (sizeof(T) > 2 || !has_mma<T>(kArchitecture)) multiply_simt<S>(product, tiling);
}

}  // namespace extension_cpp
