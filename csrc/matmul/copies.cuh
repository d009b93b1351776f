// What runs before and after a product: copies of factors to where a kernel can read them, and sums of its parts.
#pragma once

#include "product.cuh"

namespace extension_cpp::matmul {

constexpr int kCopyThreads = 256;

// A vector of columns a thread.
template <class T, class V>
__global__ void sum_splits_kernel(Product<T, V> product, int64_t splits) {
  constexpr int kCount = 16 / sizeof(V);
  const int64_t chunks = ceil_div(product.n, kCount), count = product.m * chunks;
  for (int64_t at = int64_t(blockIdx.x) * kCopyThreads + threadIdx.x; at < count;
       at += int64_t(gridDim.x) * kCopyThreads) {
    const int64_t i = at / chunks, j = at % chunks * kCount;
    V sums[kCount] = {};
    const V* from = product.partial + i * product.partial_stride + j;
#pragma unroll 4
    for (int64_t s = 0; s < splits; ++s, from += product.m * product.partial_stride) {
      const Words<16> words = *reinterpret_cast<const Words<16>*>(from);
      V more[kCount];
      memcpy(more, &words, sizeof(words));
#pragma unroll
      for (int e = 0; e < kCount; ++e) sums[e] += more[e];
    }
    T* to = product.c + i * product.c_outer + j * product.c_inner;
    if (product.has_vectors(kCount)) {
      store_vector<T, kCount>(to, sums);
    } else {
      for (int e = 0; e < kCount && j + e < product.n; ++e) to[e * product.c_inner] = round_to<T>(sums[e]);
    }
  }
}

// Rows of a multiple of 8 elements, each from a multiple of 16 bytes on.
struct Padded {
  int64_t rows, columns, row_stride, column_stride;
};

static __global__ void pad_kernel(const uint16_t* from, Padded shape, uint16_t* to) {
  const int64_t chunks = ceil_div(shape.columns, 8), count = shape.rows * chunks;
  for (int64_t i = int64_t(blockIdx.x) * kCopyThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kCopyThreads) {
    const int64_t row = i / chunks, column = i % chunks * 8;
    const uint16_t* source = from + row * shape.row_stride + column * shape.column_stride;
    uint16_t values[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) values[e] = column + e < shape.columns ? source[e * shape.column_stride] : uint16_t(0);
    store_vector<uint16_t, 8>(to + i * 8, values);
  }
}

constexpr int kSquare = 32;

// to[k * stride + row] = factor(row, k), and zero for rows from there to the stride.
static __global__ void transpose_kernel(Factor<float> factor, int64_t rows, int64_t k, int64_t stride, float* to) {
  __shared__ float square[kSquare][kSquare + 1];
  constexpr int kAtATime = kCopyThreads / kSquare;
  const int64_t across = ceil_div(k, kSquare);
  const int64_t first_row = blockIdx.x / across * kSquare, first_k = blockIdx.x % across * kSquare;
  const int x = threadIdx.x % kSquare, y = threadIdx.x / kSquare;
  for (int i = y; i < kSquare; i += kAtATime) {
    const bool valid = first_row + i < rows && first_k + x < k;
    square[i][x] = valid ? factor.data[(first_row + i) * factor.outer + (first_k + x) * factor.inner] : 0.0f;
  }
  __syncthreads();
  for (int i = y; i < kSquare; i += kAtATime) {
    if (first_row + x < stride && first_k + i < k) to[(first_k + i) * stride + first_row + x] = square[x][i];
  }
}

}  // namespace extension_cpp::matmul
