// What runs before and after a product: copies of factors to where a kernel can read them, and sums of its parts.
#pragma once

#include <optional>

#include "plan.cuh"

namespace extension_cpp::matmul {

constexpr int kCopyThreads = 256;
constexpr int64_t kMostCopyBlocks = 1 << 16;

// Launches a kernel that begins with wait_for_kernel_before: on Hopper it may start early.
template <class Kernel, class... Arguments>
void start(
    Launch& launch, const Device& device, bool early, Kernel* kernel, int64_t blocks, int threads, size_t bytes,
    const Arguments&... arguments) {
  if (early && device.hopper) {
    launch.clusters(kernel, blocks, 1, threads, bytes, true, arguments...);
  } else {
    launch(kernel, blocks, threads, bytes, arguments...);
  }
}

// A vector of columns a thread; where there are few of them, a share of the splits a thread, so that all are read at
// once.
template <class T, class V>
__global__ void __launch_bounds__(kCopyThreads) sum_splits_kernel(Product<T, V> product, int splits, int shares) {
  constexpr int kCount = 16 / sizeof(V);
  __shared__ V shared[kCopyThreads][kCount];
  const unsigned across = kCopyThreads / shares, share = threadIdx.x / across;
  // There are few, as only those of few tiles are split.
  const auto chunks = static_cast<unsigned>(ceil_div(product.n, kCount));
  const auto count = static_cast<unsigned>(product.m) * chunks;
  wait_for_kernel_before();
  for (unsigned first = blockIdx.x * across; first < count; first += gridDim.x * across) {
    const unsigned at = first + threadIdx.x % across;
    const int64_t i = at / chunks, j = static_cast<int64_t>(at % chunks) * kCount;
    V sums[kCount] = {};
    if (at < count) {
      const V* from = product.partial + (share * product.m + i) * product.partial_stride + j;
#pragma unroll 8
      for (int s = share; s < splits; s += shares, from += shares * product.m * product.partial_stride) {
        const Words<16> words = *reinterpret_cast<const Words<16>*>(from);
        V more[kCount];
        memcpy(more, &words, sizeof(words));
#pragma unroll
        for (int e = 0; e < kCount; ++e) sums[e] += more[e];
      }
    }
    for (unsigned distance = shares / 2; distance > 0; distance /= 2) {
      if (share >= distance && share < 2 * distance) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) shared[threadIdx.x][e] = sums[e];
      }
      __syncthreads();
      if (share < distance) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) sums[e] += shared[threadIdx.x + distance * across][e];
      }
      __syncthreads();
    }
    if (share != 0 || at >= count) continue;
    T* to = product.c + i * product.c_outer + j * product.c_inner;
    if (product.has_vectors(kCount)) {
      store_vector<T, kCount>(to, sums);
    } else {
      for (int e = 0; e < kCount && j + e < product.n; ++e) to[e * product.c_inner] = round_to<T>(sums[e]);
    }
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll 1
      for (int e = 0; e < kCount; ++e) restore_infinite(product, i, j + e);
    }
  }
}

// Runs `kernel(product, plan)`, which computes c, or where there are more splits than a cluster takes, partial sums
// that are then added up. What adds them up may start early, unless the blocks of `kernel` would then lie unevenly:
// those of float32 and float64 are several a multiprocessor.
template <class T, class V, class Kernel>
void with_splits(
    Launch& launch, const View& like, Product<T, V> product, const Device& device, const Plan& plan,
    const Kernel& kernel, bool early = sizeof(T) == 2) {
  const int64_t splits = plan.tiling.splits();
  std::optional<Tensor> memory;
  if (splits > 1 && !plan.in_cluster) {
    product.partial_stride = ceil_div(product.n, 8) * 8;
    memory = scratch(like, splits * product.m * product.partial_stride * static_cast<int64_t>(sizeof(V)));
    product.partial = static_cast<V*>(memory->mutable_data_ptr());
  }
  kernel(product, plan);
  if (product.partial == nullptr) return;
  constexpr int kMostShares = 8, kFew = 4;
  constexpr int64_t kMostThreads = 1 << 16;  // More take longer than what a thread adds up.
  const int64_t chunks = product.m * ceil_div(product.n, 16 / static_cast<int64_t>(sizeof(V)));
  int shares = 1;
  while (shares < kMostShares && 2 * shares * chunks <= kMostThreads && splits > kFew * shares) shares *= 2;
  const int64_t blocks = std::min(ceil_div(chunks * shares, kCopyThreads), kMostCopyBlocks);
  start(
      launch, device, early, sum_splits_kernel<T, V>, blocks, kCopyThreads, 0, product, static_cast<int>(splits),
      shares);
}

// A copy in rows of a multiple of 8 elements, each from a multiple of 16 bytes on.
struct Pad {
  int64_t rows, columns, row_stride, column_stride;
  const uint16_t* from;
  uint16_t* to;

  // Whether rows lie side by side, in whole vectors: a thread then copies eight of eight rows.
  __host__ __device__ bool in_squares() const {
    return row_stride == 1 && (rows | column_stride) % 8 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0;
  }
  __host__ __device__ int64_t chunks() const { return rows / (in_squares() ? 8 : 1) * ceil_div(columns, 8); }

  __device__ void copy_square(int64_t row, int64_t column, int64_t across) const {
    uint32_t of_columns[8][4];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      uint4 vector{};
      if (column + e < columns) vector = *reinterpret_cast<const uint4*>(from + row + (column + e) * column_stride);
      memcpy(of_columns[e], &vector, sizeof(vector));
    }
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      uint32_t of_row[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int which = r % 2 == 0 ? 0x5410 : 0x7632;  // the low halves of both words, or the high ones
        of_row[e] = __byte_perm(of_columns[2 * e][r / 2], of_columns[2 * e + 1][r / 2], which);
      }
      const uint4 vector{of_row[0], of_row[1], of_row[2], of_row[3]};
      *reinterpret_cast<uint4*>(to + ((row + r) * across * 8 + column)) = vector;
    }
  }

  template <bool kSquares>
  __device__ void copy(int64_t chunk) const {
    const int64_t across = ceil_div(columns, 8), row = chunk / across, column = chunk % across * 8;
    if (kSquares && in_squares()) return copy_square(row * 8, column, across);
    const uint16_t* source = from + row * row_stride + column * column_stride;
    const bool in_fours =
        column_stride == 1 && columns % 4 == 0 && row_stride % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 8 == 0;
    uint16_t values[8] = {};
    if (in_fours) {
      uint2 words[2] = {*reinterpret_cast<const uint2*>(source), {}};
      if (column + 4 < columns) words[1] = *reinterpret_cast<const uint2*>(source + 4);
      memcpy(values, words, sizeof(words));
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (column + e < columns) values[e] = source[e * column_stride];
      }
    }
    store_vector<uint16_t, 8>(to + chunk * 8, values);
  }
};

// Either may have no rows. Squares take more registers, with which others would be copied more slowly.
template <bool kSquares>
__global__ void pad_kernel(Pad a, Pad b) {
  wait_for_kernel_before();
  const int64_t of_a = a.chunks(), count = of_a + b.chunks();
  for (int64_t i = int64_t(blockIdx.x) * kCopyThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kCopyThreads) {
    i < of_a ? a.copy<kSquares>(i) : b.copy<kSquares>(i - of_a);
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

// A copy, which `memory` holds, that lies along k or along rows, in whole vectors.
inline Factor<float> copied(
    Launch& launch, const View& like, const Factor<float>& factor, int64_t rows, int64_t k, bool along_k,
    std::optional<Tensor>& memory) {
  constexpr int64_t kVec = 4;
  const Factor<float> along_rows{factor.data, factor.inner, factor.outer};
  const int64_t inner = along_k ? k : rows, outer = along_k ? rows : k, stride = ceil_div(inner, kVec) * kVec;
  memory = scratch(like, outer * stride * static_cast<int64_t>(sizeof(float)));
  float* to = static_cast<float*>(memory->mutable_data_ptr());
  launch(
      transpose_kernel, ceil_div(inner, kSquare) * ceil_div(outer, kSquare), kCopyThreads, 0,
      along_k ? along_rows : factor, inner, outer, stride, to);
  return along_k ? Factor<float>{to, stride, 1} : Factor<float>{to, 1, stride};
}

}  // namespace extension_cpp::matmul
