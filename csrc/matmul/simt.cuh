// The product by ordinary fused multiply-adds: float32 on every GPU, other types where tensor cores take none.
//
// Two numbers: a tile of kM by kN takes 2 * kM * kN operations and kM + kN elements a step of k. A thread reads
// kRows + kColumns of them from shared memory for kRows * kColumns multiply-adds, and as those alone can fill the slots
// in which instructions are issued, every other instruction costs its time: with 16 by 8, reads take 5%. So threads
// have tiles as large as registers allow, and step through memory with pointers that were worked out before.
#pragma once

#include "product.cuh"

namespace extension_cpp::matmul {

// A tile of kM by kN, of which a thread has kRows by kColumns, in steps of kK; a multiprocessor holds kBlocks of them.
template <class V, int kM_, int kN_, int kK_, int kRows_, int kColumns_, int kStages_, int kBlocks_>
struct Simt {
  static constexpr int kM = kM_, kN = kN_, kK = kK_, kRows = kRows_, kColumns = kColumns_, kStages = kStages_;
  static constexpr int kBlocks = kBlocks_, kThreads = kM / kRows * (kN / kColumns), kVec = 16 / sizeof(V);
  // How the 32 threads of a warp lie, and the warps of a block.
  static constexpr int kLanesM = kM / kRows < 4 ? kM / kRows : 4, kLanesN = 32 / kLanesM;
  static constexpr int kWarpsN = kN / (kColumns * kLanesN);
  static_assert(kLanesM * kLanesN == 32 && kN % (kColumns * kLanesN) == 0 && kThreads % kK == 0);
  static_assert(kRows % kVec == 0 && kColumns % kVec == 0 && kK % kVec == 0);
};

// How a factor goes into shared memory. Rows a vector longer than they need be lie in different banks.
enum class Reads {
  kElements,  // one by one, whatever their strides: to[k][row]
  kRows,      // in vectors, where they lie along rows: to[k][row]
  kAlongK,    // in vectors, where they lie along k: to[row][k]
};

template <class S, class V, Reads kReads, int kSize>
using SharedFactor = std::conditional_t<kReads == Reads::kAlongK, V[kSize][S::kK + S::kVec], V[S::kK][kSize + S::kVec]>;

template <class S, class V, Reads kB>
struct Stage {
  SharedFactor<S, V, Reads::kRows, S::kM> a;
  SharedFactor<S, V, kB, S::kN> b;
};

// Whether a factor consists of whole vectors along k, each from a multiple of 16 bytes on; or else along rows.
template <class T>
bool has_vectors_along_k(const Factor<T>& factor, int64_t k) {
  constexpr int64_t kVec = 16 / sizeof(T);
  const bool aligned = reinterpret_cast<uintptr_t>(factor.data) % 16 == 0;
  return aligned && factor.inner == 1 && factor.outer % kVec == 0 && k % kVec == 0;
}
template <class T>
bool has_vectors_along_rows(const Factor<T>& factor, int64_t rows) {
  return has_vectors_along_k(Factor<T>{factor.data, factor.inner, factor.outer}, rows);
}

template <class T, class V>
__device__ void copy_element(V* to, const T* from, bool valid) {
  if constexpr (std::is_same_v<T, V>) {
    copy_async<sizeof(V)>(to, from, valid);
  } else {
    *to = valid ? static_cast<V>(*from) : V(0);
  }
}

// A thread's share of kSize rows of a factor, from row `first` on: each call copies the next kK of k, of which `ks` are
// there. Neighbouring threads read neighbouring memory.
template <class S, class T, class V, Reads kReads, int kSize>
class Loads {
 public:
  __device__ Loads(const Factor<T>& factor, int64_t first, int64_t size, int64_t k) : factor_(factor) {
    rows_ = static_cast<int>(min(size - first, static_cast<int64_t>(kSize)));
    // Along k, or along rows where those are nearer.
    const bool along_k = factor.outer != 1;
    turns_ = along_k ? kSize / kRowsAtATime : kRowSteps;
    row_step_ = along_k ? kRowsAtATime : S::kThreads;
    k_step_ = along_k ? S::kK : kAtATime;
    row_ = along_k ? threadIdx.x / S::kK : threadIdx.x % kSize;
    k_ = along_k ? threadIdx.x % S::kK : threadIdx.x / kSize;
    from_ = factor.data + (first + row_) * factor.outer + (k + k_) * factor.inner;
    next_ = row_step_ * factor.outer, back_ = k_step_ * factor.inner - (turns_ - 1) * next_;
  }

  __device__ __forceinline__ void operator()(V (*to)[kSize + S::kVec], int ks) {
    int row = row_, k = k_, turn = 0;
    const T* from = from_;
#pragma unroll 4
    for (int c = 0; c < kSize * S::kK / S::kThreads; ++c) {
      const bool valid = k < ks && row < rows_;
      copy_element(&to[k][row], valid ? from : factor_.data, valid);
      if (++turn == turns_) {
        turn = 0, row -= (turns_ - 1) * row_step_, k += k_step_, from += back_;
      } else {
        row += row_step_, from += next_;
      }
    }
    from_ += S::kK * factor_.inner;
  }

 private:
  static constexpr int kRowsAtATime = S::kThreads / S::kK;
  static constexpr int kRowSteps = kSize > S::kThreads ? kSize / S::kThreads : 1;
  static constexpr int kAtATime = kSize < S::kThreads ? S::kThreads / kSize : 1;
  static_assert(kSize % kRowsAtATime == 0 && (kSize % S::kThreads == 0 || S::kThreads % kSize == 0));
  const Factor<T>& factor_;
  const T* from_;
  int64_t next_, back_;
  int rows_, turns_, row_step_, k_step_, row_, k_;
};

template <class S, class V, int kSize>
class Loads<S, V, V, Reads::kRows, kSize> {
 public:
  __device__ Loads(const Factor<V>& factor, int64_t first, int64_t size, int64_t k) {
    row_ = threadIdx.x % kChunks * S::kVec, k_ = threadIdx.x / kChunks;
    valid_ = first + row_ < size;
    from_ = factor.data + (valid_ ? first + row_ + (k + k_) * factor.inner : 0);
    next_ = valid_ ? kAtATime * factor.inner : 0;
  }

  __device__ __forceinline__ void operator()(V (*to)[kSize + S::kVec], int ks) {
#pragma unroll
    for (int k = k_, c = 0; c < kTurns; ++c, k += kAtATime, from_ += next_) {
      copy_async<16>(&to[k][row_], from_, valid_ && k < ks);
    }
  }

 private:
  static constexpr int kChunks = kSize / S::kVec, kAtATime = S::kThreads / kChunks, kTurns = S::kK / kAtATime;
  static_assert(S::kThreads % kChunks == 0 && S::kK % kAtATime == 0);
  const V* from_;
  int64_t next_;
  int row_, k_;
  bool valid_;
};

template <class S, class V, int kSize>
class Loads<S, V, V, Reads::kAlongK, kSize> {
 public:
  __device__ Loads(const Factor<V>& factor, int64_t first, int64_t size, int64_t k) {
    row_ = threadIdx.x / kChunks, k_ = threadIdx.x % kChunks * S::kVec;
    rows_ = static_cast<int>(min(size - first, static_cast<int64_t>(kSize)));
    from_ = factor.data + (first + row_) * factor.outer + k + k_;
    next_ = kAtATime * factor.outer;
  }

  __device__ __forceinline__ void operator()(V (*to)[S::kK + S::kVec], int ks) {
    const V* from = from_;
#pragma unroll
    for (int row = row_, c = 0; c < kTurns; ++c, row += kAtATime, from += next_) {
      copy_async<16>(&to[row][k_], from, k_ < ks && row < rows_);
    }
    from_ += S::kK;
  }

 private:
  static constexpr int kChunks = S::kK / S::kVec, kAtATime = S::kThreads / kChunks, kTurns = kSize / kAtATime;
  static_assert(S::kThreads % kChunks == 0 && kSize % kAtATime == 0);
  const V* from_;
  int64_t next_;
  int row_, k_, rows_;
};

template <class S, Reads kA, Reads kB, class T, class V>
__device__ __forceinline__ void multiply_simt(const Product<T, V>& product, const TileOrder& order) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto* stages = reinterpret_cast<Stage<S, V, kB>*>(shared);
  // A thread's columns: vectors, or single ones, so that neighbouring threads read neighbouring rows of shared memory.
  constexpr int kWide = kB == Reads::kAlongK ? 1 : S::kVec;
  const Place at = order[blockIdx.x];
  const int64_t first_m = at.m * S::kM, first_n = at.n * S::kN;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // A thread's rows and columns come in vectors, and those of a warp's threads lie side by side. Of eight threads, two
  // read one vector of b, so that a warp's reads are of fewer different ones.
  const bool pairs = S::kLanesM == 4;
  const int lane_m = pairs ? lane % 2 + lane / 16 * 2 : lane / S::kLanesN;
  const int lane_n = pairs ? lane / 2 % 8 : lane % S::kLanesN;
  const int row = warp / S::kWarpsN * S::kLanesM * S::kRows + lane_m * S::kVec;
  const int column = warp % S::kWarpsN * S::kLanesN * S::kColumns + lane_n * kWide;
  V sums[S::kRows][S::kColumns] = {};

  int64_t left = product.k - at.begin * S::kK;
  Loads<S, T, V, kA, S::kM> load_a(product.a, first_m, product.rows_a, product.k - left);
  Loads<S, T, V, kB, S::kN> load_b(product.b, first_n, product.rows_b, product.k - left);
  auto load = [&](int stage) {
    const int ks = static_cast<int>(min(left, static_cast<int64_t>(S::kK)));
    left -= S::kK;
    load_a(stages[stage].a, ks);
    load_b(stages[stage].b, ks);
  };
  auto fetch_a = [&](int stage, int k, V* a) {
#pragma unroll
    for (int i = 0; i < S::kRows; i += S::kVec) {
      *reinterpret_cast<uint4*>(a + i) = *reinterpret_cast<const uint4*>(&stages[stage].a[k][row + i * S::kLanesM]);
    }
  };
  auto add = [&](const V* a, const auto& b) {
#pragma unroll
    for (int j = 0; j < S::kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < S::kRows; ++i) sums[i][j] = fma(a[i], b(j), sums[i][j]);
    }
  };

  const int count = static_cast<int>(at.end - at.begin);  // More would take hours.
  if constexpr (kB == Reads::kAlongK) {
    pipeline<S::kStages>(count, load, [&](int stage) {
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
          add(a, [&](int j) { return b[j][e]; });
        }
      }
    });
  } else {
    // What one k needs is fetched while that before is multiplied, across stages too.
    alignas(16) V a[2][S::kRows], b[2][S::kColumns];
    auto fetch = [&](int stage, int k) {
      fetch_a(stage, k, a[k % 2]);
#pragma unroll
      for (int j = 0; j < S::kColumns; j += S::kVec) {
        *reinterpret_cast<uint4*>(b[k % 2] + j) =
            *reinterpret_cast<const uint4*>(&stages[stage].b[k][column + j * S::kLanesN]);
      }
    };
#pragma unroll
    for (int s = 0; s < S::kStages - 1; ++s) {
      if (s < count) load(s);
      commit_copies();
    }
    wait_for_copies<S::kStages - 2>();
    __syncthreads();
    fetch(0, 0);
    int stage = 0, free = S::kStages - 1;
    for (int step = 0; step < count; ++step) {
      if (step + S::kStages - 1 < count) load(free);
      commit_copies();
      free = stage;
      const int then = stage + 1 == S::kStages ? 0 : stage + 1;
#pragma unroll
      for (int k = 0; k < S::kK; ++k) {
        if (k + 1 < S::kK) {
          fetch(stage, k + 1);
        } else if (step + 1 < count) {
          wait_for_copies<S::kStages - 2>();
          __syncthreads();
          fetch(then, 0);
        }
        add(a[k % 2], [&](int j) { return b[k % 2][j]; });
      }
      stage = then;
    }
  }

  if (product.partial == nullptr && product.c_outer == 1 && product.c_inner != 1 && product.m % S::kVec == 0) {
    // Rows of c lie side by side, so that vectors of them are stored.
#pragma unroll
    for (int j = 0; j < S::kColumns; ++j) {
      const int64_t n = first_n + column + j / kWide * kWide * S::kLanesN + j % kWide;
#pragma unroll
      for (int i = 0; i < S::kRows; i += S::kVec) {
        const int64_t m = first_m + row + i * S::kLanesM;
        V rows[S::kVec];
#pragma unroll
        for (int e = 0; e < S::kVec; ++e) rows[e] = sums[i + e][j];
        if (m < product.m && n < product.n) store_vector<T, S::kVec>(product.c + m + n * product.c_inner, rows);
      }
    }
    return;
  }
  store_sums<kWide>(product, at.split, [&](const auto& store) {
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) {
      const int64_t m = first_m + row + i / S::kVec * S::kVec * S::kLanesM + i % S::kVec;
#pragma unroll
      for (int j = 0; j < S::kColumns; j += kWide) store(m, first_n + column + j * S::kLanesN, sums[i] + j);
    }
  });
}

constexpr int kMostBlocks = kArchitecture < 80 ? 1 : 4;  // Turing's shared memory holds one.

template <class S, Reads kA, Reads kB, class T, class V>
__global__ void __launch_bounds__(S::kThreads, std::min(S::kBlocks, kMostBlocks))
    simt_kernel(Product<T, V> product, TileOrder order) {
  if constexpr (std::is_same_v<T, float> || !has_mma<T>(kArchitecture)) multiply_simt<S, kA, kB>(product, order);
}

}  // namespace extension_cpp::matmul
