// matmul: c = a * b; a of shape (M, K), b of shape (K, N), c of shape (M, N), contiguous. Any strides of a and b.
//
// Two numbers: 2 * M * N * K operations on (M * K + K * N + M * N) elements. A square product is bound by arithmetic, a
// skinny one by reading the large factor.
//
// What matmul.cpp and matmul.cu share: the declaration, and how a factor is described.
#pragma once

#include <algorithm>

#include <torch/csrc/stable/ops.h>

#include "common/dispatch.h"
#include "common/register.h"

namespace extension_cpp::matmul {

const Operator kMatmul("matmul(Tensor a, Tensor b, bool allow_tf32=False) -> Tensor", "a: M K; b: K N as a -> M N");

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

}  // namespace extension_cpp::matmul
