// matmul: c = a * b; a of shape (M, K), b of shape (K, N), c of shape (M, N), contiguous. Any strides of a and b.
//
// Two numbers: 2 * M * N * K operations on (M * K + K * N + M * N) elements. A square product is bound by arithmetic, a
// skinny one by reading the large factor.
//
// What matmul.cpp and matmul.cu share: the checks and how a factor is described.
#pragma once

#include <algorithm>

#include <torch/csrc/stable/ops.h>

#include "check.h"
#include "elementwise.h"

namespace extension_cpp {

// A factor, as rows of what is multiplied: element (i, k) is at data[i * outer + k * inner], where i counts rows of a
// or columns of b, and k is what is summed over. Both factors are then alike.
template <class T>
struct Factor {
  const T* data;
  int64_t outer, inner;
};

template <class T>
Factor<T> factor_a(const View& a) {
  return {static_cast<const T*>(a.tensor->const_data_ptr()), a.strides[0], a.strides[1]};
}
template <class T>
Factor<T> factor_b(const View& b) {
  return {static_cast<const T*>(b.tensor->const_data_ptr()), b.strides[1], b.strides[0]};
}

inline void check_factors(const char* op, const View& a, const View& b) {
  check_floating(op, a);
  check_same(op, b, a);
  for (const View* t : {&a, &b}) {
    if (t->ndim != 2) fail(op, t->name, " must have 2 dimensions, got shape ", tuple(t->sizes));
  }
  if (a.sizes[1] != b.sizes[0]) {
    fail(op, "a and b must have shapes (M, K) and (K, N), got ", tuple(a.sizes), " and ", tuple(b.sizes));
  }
}

// An uninitialised (m, n), contiguous, like a.
inline Tensor allocate_product(const View& a, int64_t m, int64_t n) {
  const int64_t sizes[2] = {m, n}, strides[2] = {std::max<int64_t>(n, 1), 1};
  return empty_strided_like(a, sizes, strides, 2);
}

}  // namespace extension_cpp
