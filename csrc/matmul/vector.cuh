// The product of a vector and a matrix, of any dtype: c[j] = sum over k of x[k] * b(j, k).
//
// Two numbers: 2 * N * K operations on N * K elements, so that it takes as long as reading the matrix.
//
// A sum is of 8 or 32 classes of k, each in ascending order; those are added up two by two. Where the matrix lies
// along k, a class is a lane's, which reads vectors of it; where it lies along rows, a thread's, which reads vectors of
// columns.
#pragma once

#include "copies.cuh"

namespace extension_cpp::matmul {

constexpr int kVectorThreads = 256;

// Elements of a vector, and rows of the matrix that a lane reads along k.
template <class T>
struct OfVector {
  static constexpr int kVec = 16 / sizeof(T), kRows = 2;
};

template <bool kAligned, class T, class V>
__device__ __forceinline__ void load_vector(V (&to)[16 / sizeof(T)], const T* from, int64_t stride) {
  constexpr int kVec = 16 / sizeof(T);
  if constexpr (kAligned) {
    T values[kVec];
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    memcpy(values, &words, sizeof(words));
#pragma unroll
    for (int e = 0; e < kVec; ++e) to[e] = static_cast<V>(values[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kVec; ++e) to[e] = static_cast<V>(from[e * stride]);
  }
}

// Of the vector, which is in vectors of its own or isn't.
template <int kUnroll, class T, class V>
__device__ __forceinline__ void load_shared_vectors(
    V (&to)[kUnroll][16 / sizeof(T)], const Factor<T>& x, int64_t k, int64_t step) {
  if (x.inner == 1 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) load_vector<true>(to[u], x.data + k + u * step, 1);
  } else {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) load_vector<false>(to[u], x.data + (k + u * step) * x.inner, x.inner);
  }
}

// Whole warps to so many lanes a row of the matrix as there are classes.
template <class T, class V, bool kAligned>
__global__ void __launch_bounds__(kVectorThreads)
    vector_along_k_kernel(Product<T, V> product, Tiling tiling, int classes) {
  const int64_t split = blockIdx.x / tiling.tiles_n, block = blockIdx.x % tiling.tiles_n;
  constexpr int kVec = OfVector<T>::kVec, kRows = OfVector<T>::kRows, kUnroll = kAligned ? 4 : 1;
  const int lane = threadIdx.x % classes;
  const int64_t row = (block * (kVectorThreads / classes) + threadIdx.x / classes) * kRows;
  const int64_t begin = split * tiling.steps_per_split, end = min(begin + tiling.steps_per_split, product.k);
  const int step = classes * kVec;
  const T *x = product.a.data, *from[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) from[r] = product.b.data + min(row + r, product.n - 1) * product.b.outer;
  V sums[kRows] = {};
  int64_t k = begin + lane * kVec;
  auto add = [&]<int kCount>(std::integral_constant<int, kCount>) {
    V a[kCount][kVec], b[kCount][kRows][kVec];
    load_shared_vectors<kCount>(a, product.a, k, step);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        load_vector<kAligned>(b[u][r], from[r] + (k + u * step) * product.b.inner, product.b.inner);
      }
    }
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r] = fma(a[u][e], b[u][r][e], sums[r]);
      }
    }
    k += kCount * step;
  };
  while (kUnroll > 1 && k + (kUnroll - 1) * step + kVec <= end) add(std::integral_constant<int, kUnroll>());
  while (k + kVec <= end) add(std::integral_constant<int, 1>());
  for (; k < end; k += step) {
    for (int e = 0; e < kVec && k + e < end; ++e) {
      const V factor = static_cast<V>(x[(k + e) * product.a.inner]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[r] = fma(factor, static_cast<V>(from[r][(k + e) * product.b.inner]), sums[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    for (int distance = classes / 2; distance > 0; distance /= 2) {
      sums[r] += __shfl_xor_sync(0xffffffff, sums[r], distance);
    }
    if (lane != 0 || row + r >= product.n) continue;
    if (product.partial != nullptr) {
      product.partial[split * product.partial_stride + row + r] = sums[r];
    } else {
      product.c[(row + r) * product.c_inner] = round_to<T>(sums[r]);
    }
  }
}

// Blocks of as many threads for a vector of columns as there are classes.
template <class T, class V, bool kAligned>
__global__ void __launch_bounds__(kVectorThreads)
    vector_along_rows_kernel(Product<T, V> product, Tiling tiling, int classes) {
  const int64_t split = blockIdx.x / tiling.tiles_n, block = blockIdx.x % tiling.tiles_n;
  constexpr int kVec = OfVector<T>::kVec, kUnroll = kAligned ? 8 / kVec : 1;
  __shared__ V shared[kVectorThreads][kVec];
  const int across = kVectorThreads / classes, own = threadIdx.x / across;
  const int64_t row = (block * across + threadIdx.x % across) * kVec;
  const int64_t begin = split * tiling.steps_per_split, end = min(begin + tiling.steps_per_split, product.k);
  const int step = classes * kVec;
  const T *x = product.a.data, *from = product.b.data + row * product.b.outer;
  V sums[kVec] = {};
  if (row + kVec <= product.n) {
    int64_t k = begin + own * kVec;
    auto add = [&]<int kCount>(std::integral_constant<int, kCount>) {
      V a[kCount][kVec], b[kCount][kVec][kVec];
      load_shared_vectors<kCount>(a, product.a, k, step);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          load_vector<kAligned>(b[u][e], from + (k + u * step + e) * product.b.inner, product.b.outer);
        }
      }
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
#pragma unroll
          for (int j = 0; j < kVec; ++j) sums[j] = fma(a[u][e], b[u][e][j], sums[j]);
        }
      }
      k += kCount * step;
    };
    while (kUnroll > 1 && k + (kUnroll - 1) * step + kVec <= end) add(std::integral_constant<int, kUnroll>());
    while (k + kVec <= end) add(std::integral_constant<int, 1>());
    for (; k < end; k += step) {
      for (int e = 0; e < kVec && k + e < end; ++e) {
        const V factor = static_cast<V>(x[(k + e) * product.a.inner]);
        V b[kVec];
        load_vector<kAligned>(b, from + (k + e) * product.b.inner, product.b.outer);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[j] = fma(factor, b[j], sums[j]);
      }
    }
  } else if (row < product.n) {
    for (int64_t k = begin + own * kVec; k < end; k += step) {
      for (int e = 0; e < kVec && k + e < end; ++e) {
        const V factor = static_cast<V>(x[(k + e) * product.a.inner]);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          if (row + j < product.n) {
            const T value = from[j * product.b.outer + (k + e) * product.b.inner];
            sums[j] = fma(factor, static_cast<V>(value), sums[j]);
          }
        }
      }
    }
  }
  for (int distance = classes / 2; distance > 0; distance /= 2) {
    if (own >= distance && own < 2 * distance) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) shared[threadIdx.x][j] = sums[j];
    }
    __syncthreads();
    if (own < distance) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) sums[j] += shared[threadIdx.x + distance * across][j];
    }
    __syncthreads();
  }
  if (own != 0) return;
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    if (row + j >= product.n) continue;
    if (product.partial != nullptr) {
      product.partial[split * product.partial_stride + row + j] = sums[j];
    } else {
      product.c[(row + j) * product.c_inner] = round_to<T>(sums[j]);
    }
  }
}

template <class T, class V>
void multiply_vector(Launch& launch, const View& like, const Product<T, V>& product, const Device& device) {
  constexpr int64_t kVec = OfVector<T>::kVec, kManyRows = 8192, kShort = 2048, kWorthASplit = 1024;
  // Many short sums are better off with fewer classes, and few long ones with parts of k.
  const int classes = product.n >= kManyRows && product.k <= kShort ? 8 : 32;
  const int64_t chunk = classes * kVec, blocks = ceil_div(product.n, 128 / static_cast<int64_t>(sizeof(T)));
  const int64_t splits = std::max<int64_t>(1, std::min(2 * device.processors / blocks, product.k / kWorthASplit));
  const bool along_rows = product.b.outer == 1 && product.b.inner != 1;
  const int64_t rows = kVectorThreads / classes * (along_rows ? kVec : OfVector<T>::kRows);
  const Plan plan{
      0, {1, ceil_div(product.n, rows), product.k, ceil_div(ceil_div(product.k, splits), chunk) * chunk}, 0};
  with_splits(launch, like, product, device, plan, [&](const Product<T, V>& p, const Plan& plan) {
    const bool vectors = reinterpret_cast<uintptr_t>(p.b.data) % 16 == 0 &&
                         (along_rows ? p.b.inner % kVec == 0 : p.b.inner == 1 && p.b.outer % kVec == 0);
    auto* kernel = along_rows ? (vectors ? vector_along_rows_kernel<T, V, true> : vector_along_rows_kernel<T, V, false>)
                              : (vectors ? vector_along_k_kernel<T, V, true> : vector_along_k_kernel<T, V, false>);
    launch(kernel, plan.tiling.count(), kVectorThreads, 0, p, plan.tiling, classes);
  });
}

}  // namespace extension_cpp::matmul
