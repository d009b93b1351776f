// The product over one k, of any dtype: the outer product of two vectors, as long as the result takes to be written.
#pragma once

#include "plan.cuh"

namespace extension_cpp::matmul {

constexpr int kOuterThreads = 256;

// A thread has kVec columns of some rows, and `across` neighbours have a row.
template <class T, class V, int kVec, int kRowsOfThread>
__global__ void __launch_bounds__(kOuterThreads) outer_kernel(Product<T, V> product, int across, int64_t tiles_n) {
  const int down = kOuterThreads / across;
  const int64_t column = (blockIdx.x % tiles_n * across + threadIdx.x % across) * kVec;
  const int64_t row = blockIdx.x / tiles_n * down * kRowsOfThread + threadIdx.x / across;
  if (column >= product.n) return;
  V a[kRowsOfThread], b[kVec];
#pragma unroll
  for (int e = 0; e < kVec; ++e) b[e] = static_cast<V>(product.b.data[(column + e) * product.b.outer]);
#pragma unroll
  for (int r = 0; r < kRowsOfThread; ++r) {
    a[r] = static_cast<V>(product.a.data[min(row + r * down, product.m - 1) * product.a.outer]);
  }
#pragma unroll
  for (int r = 0; r < kRowsOfThread; ++r) {
    if (row + r * down >= product.m) return;
    V products[kVec];  // As a sum that begins with 0: -0 becomes 0.
#pragma unroll
    for (int e = 0; e < kVec; ++e) products[e] = fma(a[r], b[e], V(0));
    store_at_once<T, kVec>(product.c + (row + r * down) * product.c_outer + column, products);
  }
}

template <class T, class V>
void multiply_outer(Launch& launch, Product<T, V> product, const Device& device) {
  if (product.c_inner != 1) product = product.swapped();  // Rows of c lie side by side.
  auto run = [&]<int kVec>(std::integral_constant<int, kVec>) {
    int across = 1;
    while (across < kOuterThreads && across * kVec < product.n) across *= 2;
    const int64_t tiles_n = ceil_div(product.n, int64_t(across) * kVec);
    const auto tiles_of = [&](int rows) {
      return ceil_div(product.m, int64_t(kOuterThreads / across) * rows) * tiles_n;
    };
    // Memory takes fewer and larger blocks faster, if they are many.
    constexpr int kFewRows = 4, kManyRows = kVec * sizeof(T) < 16 ? kFewRows : sizeof(T) == 8 ? 16 : 8;
    const bool many = tiles_of(kManyRows) >= 4 * device.processors;
    auto* kernel = many ? outer_kernel<T, V, kVec, kManyRows> : outer_kernel<T, V, kVec, kFewRows>;
    launch(kernel, tiles_of(many ? kManyRows : kFewRows), kOuterThreads, 0, product, across, tiles_n);
  };
  constexpr int kVec = 16 / sizeof(T);
  if (product.has_vectors(kVec)) return run(std::integral_constant<int, kVec>());
  if (product.has_vectors(kVec / 2)) return run(std::integral_constant<int, kVec / 2>());
  run(std::integral_constant<int, 1>());
}

}  // namespace extension_cpp::matmul
