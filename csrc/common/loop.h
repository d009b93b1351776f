// The loop of an elementwise operator: which elements of its tensors meet, and in what order they are visited.
//
// Shapes broadcast by PyTorch's rules. An output that the operator allocates gets the strides that PyTorch's own
// TensorIterator would give it (two channels_last inputs make a channels_last output), and dimensions that lie behind
// one another in all operands are merged: two contiguous tensors of any shape become one dimension.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <utility>

#include "dispatch.h"
#include "huge_pages.h"
#include "memory.h"

namespace extension_cpp {

constexpr int kMaxDims = 64;

// N operands, outputs first. Dimension 0 varies fastest; strides count elements; a broadcast dimension has stride 0.
template <int N>
struct Loop {
  int ndim = 0;
  int64_t numel = 1;
  int64_t sizes[kMaxDims];
  int64_t strides[N][kMaxDims];

  bool is_linear() const {
    if (ndim > 1) return false;
    for (int i = 0; i < N; ++i) {
      if (strides[i][0] != 1) return false;
    }
    return true;
  }
};

struct Shape {
  int ndim = 0;
  int64_t dims[kMaxDims];

  size_t size() const { return ndim; }
  int64_t operator[](size_t i) const { return dims[i]; }
};

// Of tensors with at most kMaxDims dimensions.
inline Shape broadcast_shapes(const char* op, std::span<const View> tensors) {
  Shape shape;
  for (const View& t : tensors) shape.ndim = std::max(shape.ndim, static_cast<int>(t.ndim));
  std::fill_n(shape.dims, shape.ndim, 1);
  for (const View& t : tensors) {
    for (int64_t i = 0; i < t.ndim; ++i) {
      int64_t& dim = shape.dims[shape.ndim - t.ndim + i];
      if (dim == 1) {
        dim = t.sizes[i];
      } else if (t.sizes[i] != 1 && t.sizes[i] != dim) {
        std::string names, got;
        for (const View& each : tensors) {
          const char* separator = got.empty() ? "" : " and ";
          names += separator + std::string(each.name);
          got += separator + tuple(each.sizes);
        }
        fail(op, names, " must have shapes that broadcast, got ", got);
      }
    }
  }
  return shape;
}

namespace detail {

// TensorIterator's order: the operand that comes first decides, broadcast dimensions decide nothing, and a tie keeps
// the order of the dimensions. > 0: x must vary slower than y.
template <int N>
int compare_dims(const Shape& shape, const int64_t (&strides)[N][kMaxDims], int first, int x, int y) {
  for (int i = first; i < N; ++i) {
    const int64_t sx = strides[i][x], sy = strides[i][y];
    if (sx == 0 || sy == 0) continue;
    if (sx != sy) return sx < sy ? -1 : 1;
    if (shape[x] > shape[y]) return 1;
  }
  return 0;
}

// perm[k] is the dimension that varies k-th fastest; operands before `first` have no strides yet.
template <int N>
void sort_dims(const Shape& shape, const int64_t (&strides)[N][kMaxDims], int first, int* perm) {
  for (int k = 0; k < shape.ndim; ++k) perm[k] = shape.ndim - 1 - k;
  for (int k = 1; k < shape.ndim; ++k) {
    int moving = k;
    for (int below = k - 1; below >= 0; --below) {
      const int order = compare_dims(shape, strides, first, perm[below], perm[moving]);
      if (order < 0) break;
      if (order > 0) {
        std::swap(perm[below], perm[moving]);
        moving = below;
      }
    }
  }
}

inline void expand_strides(const View& t, const Shape& shape, int64_t* strides) {
  const int64_t missing = shape.ndim - t.ndim;
  std::fill_n(strides, missing, 0);
  for (int64_t i = 0; i < t.ndim; ++i) {
    strides[missing + i] = t.sizes[i] == 1 && shape[missing + i] != 1 ? 0 : t.strides[i];
  }
}

}  // namespace detail

namespace detail {

// Strides of a dense tensor whose dimension perm[k] varies k-th fastest.
template <class Sizes>
void dense_strides(const Sizes& sizes, int ndim, const int* perm, int64_t* strides) {
  int64_t step = 1;
  for (int k = 0; k < ndim; ++k) {
    strides[perm[k]] = step;
    step = times(step, std::max<int64_t>(sizes[perm[k]], 1));
  }
}

template <int N>
void linear_loop(Loop<N>& loop, int64_t numel) {
  loop.ndim = 1;
  loop.numel = loop.sizes[0] = numel;
  for (int i = 0; i < N; ++i) loop.strides[i][0] = 1;
}

template <size_t K>
bool are_linear(const std::array<View, K>& tensors) {
  for (const View& t : tensors) {
    if (!t.contiguous || !t.same_sizes(tensors[0])) return false;
  }
  return true;
}

// Whether the elements lie one after another in some order of the dimensions, and none twice.
inline bool is_dense(const View& t) {
  int64_t step = 1;
  while (step < t.numel) {
    int64_t d = 0;
    while (d < t.ndim && (t.sizes[d] < 2 || t.strides[d] != step)) ++d;
    if (d == t.ndim) return false;
    step *= t.sizes[d];
  }
  return true;
}

inline bool is_channels_last(const View& t) {
  int64_t step = 1;
  for (int d : {1, 3, 2, 0}) {
    if (t.ndim != 4 || (t.sizes[d] != 1 && t.strides[d] != step)) return false;
    step *= t.sizes[d];
  }
  return true;
}

// TensorIterator sorts no dimensions where the elements of all inputs lie alike, so that those of size 1 may get other
// strides: those of channels_last, or of the inputs. Inputs that are contiguous have no need of it.
template <size_t K>
bool strides_without_sorting(const std::array<View, K>& inputs, int64_t* strides) {
  const View& first = inputs[0];
  bool channels_last = true, same = true;
  for (const View& t : inputs) {
    if (!t.same_sizes(first)) return false;
    channels_last = channels_last && is_channels_last(t);
    same = same && std::equal(t.strides.begin(), t.strides.end(), first.strides.begin());
  }
  if (channels_last) {
    constexpr int kPerm[4] = {1, 3, 2, 0};
    dense_strides(first.sizes, 4, kPerm, strides);
  } else if (same && is_dense(first)) {
    std::copy(first.strides.begin(), first.strides.end(), strides);
  } else {
    return false;
  }
  return true;
}

// Takes the dimensions in the order of perm and merges those that lie behind one another in every operand.
template <int N>
void collapse_dims(const Shape& shape, const int64_t (&strides)[N][kMaxDims], const int* perm, Loop<N>& loop) {
  if (std::find(shape.dims, shape.dims + shape.ndim, 0) != shape.dims + shape.ndim) return linear_loop(loop, 0);
  for (int k = 0; k < shape.ndim; ++k) {
    const int64_t size = shape[perm[k]];
    loop.numel = times(loop.numel, size);  // It wraps around only where no result can be allocated.
    if (size == 1) continue;
    const int last = loop.ndim - 1;
    bool merge = last >= 0;
    for (int i = 0; merge && i < N; ++i) merge = strides[i][perm[k]] == times(loop.strides[i][last], loop.sizes[last]);
    if (merge) {
      loop.sizes[last] = times(loop.sizes[last], size);
      continue;
    }
    loop.sizes[loop.ndim] = size;
    for (int i = 0; i < N; ++i) loop.strides[i][loop.ndim] = strides[i][perm[k]];
    ++loop.ndim;
  }
  if (loop.ndim == 0) linear_loop(loop, loop.numel);
}

}  // namespace detail

// The loop over inputs and over kOut outputs that it allocates, with the dtype and the device of the first input.
template <size_t kOut, size_t kIn>
std::array<Tensor, kOut> allocate_outputs(const char* op, const std::array<View, kIn>& inputs, Loop<kOut + kIn>& loop) {
  const View& first = inputs[0];
  const Shape shape = broadcast_shapes(op, inputs);
  int64_t strides[kOut + kIn][kMaxDims];
  if (detail::are_linear(inputs)) {
    int perm[kMaxDims];
    for (int k = 0; k < shape.ndim; ++k) perm[k] = shape.ndim - 1 - k;
    detail::dense_strides(shape, shape.ndim, perm, strides[0]);
    detail::linear_loop(loop, first.numel);
  } else if (detail::strides_without_sorting(inputs, strides[0])) {
    detail::linear_loop(loop, first.numel);
  } else {
    int perm[kMaxDims];
    for (size_t i = 0; i < kIn; ++i) detail::expand_strides(inputs[i], shape, strides[kOut + i]);
    detail::sort_dims(shape, strides, kOut, perm);
    for (size_t i = 0; i < kOut; ++i) detail::dense_strides(shape, shape.ndim, perm, strides[i]);
    detail::collapse_dims(shape, strides, perm, loop);
  }
  const auto outputs = [&]<size_t... I>(std::index_sequence<I...>) {
    return std::array<Tensor, kOut>{
        (static_cast<void>(I), empty_strided(first, -1, shape.dims, strides[0], shape.ndim))...};
  }(std::make_index_sequence<kOut>());
  if (first.device_type == aoti_torch_device_type_cpu()) {
    for (const Tensor& out : outputs) ask_for_huge_pages(out);
  }
  return outputs;
}

// The loop over given operands: an output, which has the shape that the inputs broadcast to, and the inputs.
template <size_t N>
void loop_over(const std::array<View, N>& operands, Loop<N>& loop) {
  const View& out = operands[0];
  if (detail::are_linear(operands)) return detail::linear_loop(loop, out.numel);
  Shape shape;
  shape.ndim = static_cast<int>(out.ndim);
  std::copy(out.sizes.begin(), out.sizes.end(), shape.dims);
  int64_t strides[N][kMaxDims];
  int perm[kMaxDims];
  for (size_t i = 0; i < N; ++i) detail::expand_strides(operands[i], shape, strides[i]);
  detail::sort_dims(shape, strides, 0, perm);
  detail::collapse_dims(shape, strides, perm, loop);
}

// Where the operands' elements are, outputs first.
template <class T, int N>
struct Pointers {
  T* at[N];
};

template <class T, size_t kOut, size_t N>
Pointers<T, N> pointers(const std::array<const Tensor*, N>& operands) {
  Pointers<T, N> data;
  for (size_t i = 0; i < N; ++i) {
    data.at[i] =
        static_cast<T*>(i < kOut ? operands[i]->mutable_data_ptr() : const_cast<void*>(operands[i]->const_data_ptr()));
  }
  return data;
}

}  // namespace extension_cpp
