// The product on tensor cores by mma.sync: float16 from Turing on, bfloat16 and tf32 from Ampere on.
//
// Two numbers: a tile of 128 by 128 takes 32,768 operations and 256 elements a step of k; four warps have 64 by 64 of
// it each, 128 sums a thread.
//
// A stage has 128 rows of 64 bytes of each factor, in chunks of 16 bytes that are permuted so that the eight that
// ldmatrix reads at a time lie in different banks.
#pragma once

#include "product.cuh"

namespace extension_cpp::matmul {

template <class T>
struct Mma {
  static constexpr int kM = 128, kN = 128, kK = 64 / sizeof(T), kStages = 3, kThreads = 128;
  static constexpr int kChunk = 16 / sizeof(T), kStageBytes = 128 * 64;
};

// Where elements of a stage are, in bytes. Rows of k: 64 bytes a row. Rows of m (or n), for halves only: 256 bytes a k.
template <class T>
__device__ int at_row(int row, int k) {
  return row * 64 + (((k / Mma<T>::kChunk) ^ (row / 2 % 4)) * 16) + k % Mma<T>::kChunk * sizeof(T);
}
__device__ inline int at_k(int row, int k) {
  return k * 256 + (((row / 8) ^ (k % 8)) * 16) + row % 8 * 2;
}

enum class Order { kRows, kK, kAnyRows, kAnyK };

// How a factor goes into shared memory: rows of k or of m, in whole chunks where every row starts on one.
template <class T>
__device__ Order order_of(const Factor<T>& factor) {
  constexpr int64_t kChunk = Mma<T>::kChunk;
  const bool aligned = reinterpret_cast<uintptr_t>(factor.data) % 16 == 0;
  if (factor.outer == 1 && factor.inner != 1 && sizeof(T) == 2) {
    return aligned && factor.inner % kChunk == 0 ? Order::kK : Order::kAnyK;
  }
  return aligned && factor.inner == 1 && factor.outer % kChunk == 0 ? Order::kRows : Order::kAnyRows;
}

template <class T>
__device__ void load_mma(
    const Factor<T>& factor, Order order, int64_t first, int64_t size, int64_t k, int64_t depth, unsigned char* to) {
  using M = Mma<T>;
  const int t = threadIdx.x, rows = static_cast<int>(min(size - first, static_cast<int64_t>(M::kM)));
  const int ks = static_cast<int>(min(depth - k, static_cast<int64_t>(M::kK)));
  const T* from = factor.data + first * factor.outer + k * factor.inner;
  if (order == Order::kRows) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = t / 4 + c * 32, at = t % 4 * M::kChunk;
      const int valid = row < rows ? max(0, min(ks - at, M::kChunk)) : 0;
      const T* chunk = valid ? from + row * factor.outer + at : factor.data;
      copy_vector(to + at_row<T>(row, at), chunk, valid);
    }
  } else if (order == Order::kK) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = t % 16 * 8, at = t / 16 + c * 8;
      const int valid = at < ks ? max(0, min(rows - row, 8)) : 0;
      const T* chunk = valid ? from + row + at * factor.inner : factor.data;
      copy_vector(to + at_k(row, at), chunk, valid);
    }
  } else {
    // Neighbouring threads read along k, or along rows where those are nearer.
    const bool along_k = factor.inner <= factor.outer;
#pragma unroll 8
    for (int c = 0; c < M::kK; ++c) {
      const int element = c * M::kThreads + t;
      const int row = along_k ? element / M::kK : element % M::kM, at = along_k ? element % M::kK : element / M::kM;
      const bool valid = row < rows && at < ks;
      const T* source = valid ? from + row * factor.outer + at * factor.inner : factor.data;
      if constexpr (sizeof(T) == 4) {
        copy_async<4>(to + at_row<T>(row, at), source, valid);
      } else {
        const uint16_t bits = valid ? *reinterpret_cast<const uint16_t*>(source) : uint16_t(0);
        *reinterpret_cast<uint16_t*>(to + (order == Order::kAnyK ? at_k(row, at) : at_row<T>(row, at))) = bits;
      }
    }
  }
}

template <bool kTransposed>
__device__ void load_matrices(uint32_t (&to)[4], const unsigned char* from) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(from)));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(from)));
  }
}

// sums += a * b, of 16 by 8 over 32 bytes of k.
template <class T>
__device__ void multiply_add(float (&sums)[4], const uint32_t (&a)[4], const uint32_t* b) {
#define EXTENSION_CPP_MMA(shape_and_types)                                                                            \
  asm volatile("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    EXTENSION_CPP_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    EXTENSION_CPP_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  } else {
    EXTENSION_CPP_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
  }
#elif __CUDA_ARCH__ >= 750
  for (int half = 0; half < 2; ++half) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
  }
#endif
#undef EXTENSION_CPP_MMA
}

// The nearest tf32 of a float32 whose bits are `bits`.
__device__ inline uint32_t to_tf32(uint32_t bits) {
  uint32_t result = bits;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(__uint_as_float(bits)));
#endif
  return result;
}

// The fragments of 64 rows of a stage over 32 bytes of k: of a as 4 of 16 rows; of b as pairs of 8.
template <class T, bool kIsA>
__device__ void load_fragments(uint32_t (&to)[4][4], const unsigned char* from, bool by_k, int first, int k) {
  const int lane = threadIdx.x % 32, in_matrix = lane % 8, matrix = lane / 8;
  // A lane names a row of 16 bytes of one of four matrices: two of rows by two of k.
  const int by_row = kIsA ? matrix % 2 : matrix / 2, by_chunk = kIsA ? matrix / 2 : matrix % 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first + i * 16 + by_row * 8;
    if constexpr (sizeof(T) == 2) {
      if (by_k) {
        load_matrices<true>(to[i], from + at_k(row, k + by_chunk * 8 + in_matrix));
        continue;
      }
    }
    load_matrices<false>(to[i], from + at_row<T>(row + in_matrix, k + by_chunk * Mma<T>::kChunk));
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int r = 0; r < 4; ++r) to[i][r] = to_tf32(to[i][r]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(Mma<T>::kThreads, 2) mma_kernel(Product<T, float> product, TileOrder order) {
  if constexpr (has_mma<T>(kArchitecture)) {
    using M = Mma<T>;
    __shared__ __align__(128) unsigned char stages[M::kStages][2][M::kStageBytes];
    const Place at = order[blockIdx.x];
    const int64_t first_m = at.m * M::kM, first_n = at.n * M::kN;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp / 2 * 64, column = warp % 2 * 64;
    const Order order_a = order_of(product.a), order_b = order_of(product.b);
    const bool by_k_a = order_a == Order::kK || order_a == Order::kAnyK;
    const bool by_k_b = order_b == Order::kK || order_b == Order::kAnyK;
    float sums[4][8][4] = {};
    int64_t step = at.begin;
    auto load = [&](int stage) {
      load_mma(product.a, order_a, first_m, product.m, step * M::kK, product.k, stages[stage][0]);
      load_mma(product.b, order_b, first_n, product.n, step * M::kK, product.k, stages[stage][1]);
      ++step;
    };
    auto compute = [&](int stage) {
#pragma unroll
      for (int k = 0; k < M::kK; k += 2 * M::kChunk) {
        uint32_t a[4][4], b[4][4];
        load_fragments<T, true>(a, stages[stage][0], by_k_a, row, k);
        load_fragments<T, false>(b, stages[stage][1], by_k_b, column, k);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) multiply_add<T>(sums[i][j], a[i], b[j / 2] + j % 2 * 2);
        }
      }
    };
    pipeline<M::kStages>(static_cast<int>(at.end - at.begin), load, compute);  // More would take hours.
    store_sums<2>(product, at.split, [&](const auto& store) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t m = first_m + row + i * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int64_t n = first_n + column + j * 8 + lane % 4 * 2;
          store(m, n, sums[i][j]);
          store(m + 8, n, sums[i][j] + 2);
        }
      }
    });
  }
}

}  // namespace extension_cpp::matmul
