// Memory for results, and for what kernels compute in between.
#pragma once

#include <exception>
#include <mutex>

#include <torch/csrc/stable/ops.h>

#include "check.h"

namespace extension_cpp {

// Raises for an allocation that failed. LibTorch's C interface says no more than that it did: the message has the
// operator, and PyTorch's own words or as many bytes as were asked for, by which callers know that memory ran out.
[[noreturn]] void refuse_memory(const View& like, int32_t dtype, const int64_t* sizes, int64_t ndim);

// On the device of `like`, and of its dtype unless another is given. The memory isn't written.
inline Tensor empty_strided(
    const View& like, int32_t dtype, const int64_t* sizes, const int64_t* strides, int64_t ndim) {
  AtenTensorHandle handle;
  if (dtype < 0) dtype = like.dtype;
  if (aoti_torch_empty_strided(ndim, sizes, strides, dtype, like.device_type, like.device_index, &handle) != 0) {
    refuse_memory(like, dtype, sizes, ndim);
  }
  return Tensor(handle);
}

// The same with one dimension, or with none.
inline Tensor empty(const View& like, int32_t dtype, int64_t size) {
  const int64_t stride = 1;
  return empty_strided(like, dtype, &size, &stride, 1);
}

inline Tensor empty_scalar(const View& like, int32_t dtype) {
  return empty_strided(like, dtype, nullptr, nullptr, 0);
}

// Memory of the operator's own.
inline Tensor scratch(const View& like, int64_t bytes) {
  return empty(like, aoti_torch_dtype_uint8(), bytes);
}

// PyTorch's, of which an exception of the body comes out as it was: LibTorch's C interface would lose what it says.
template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  std::exception_ptr error;
  std::mutex mutex;
  torch::stable::parallel_for(begin, end, grain, [&](int64_t from, int64_t to) {
    try {
      body(from, to);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace extension_cpp
