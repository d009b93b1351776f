// An argument as a kernel reads it, and what error messages are made of: operator, argument, what was expected, what
// came.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include <torch/csrc/stable/tensor.h>

// For the formulas, which both compilers compile.
#if defined(__CUDACC__)
#define EXTENSION_CPP_INLINE __host__ __device__ __forceinline__
#else
#define EXTENSION_CPP_INLINE inline
#endif

namespace extension_cpp {

using torch::stable::Tensor;

template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// A product of sizes. Next to a size of 0 the others may be anything: their product wraps around, and nothing uses it.
EXTENSION_CPP_INLINE int64_t times(int64_t x, int64_t y) {
  return static_cast<int64_t>(static_cast<uint64_t>(x) * static_cast<uint64_t>(y));
}

// "(2, 3)", "(4,)" and "()", as Python prints a tuple.
template <class Ints>
std::string tuple(const Ints& values) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < values.size(); ++i) text << (i ? ", " : "") << values[i];
  text << (values.size() == 1 ? ",)" : ")");
  return text.str();
}

// An argument: its name and what there is to know of the tensor, read once. Each reading is a call into LibTorch, which
// is what an operator on a small tensor spends its time on. It borrows from the tensor.
struct View {
  View() = default;  // of an optional argument that is None

  View(const char* op, const char* name, const Tensor& t) : tensor(&t), op(op), name(name) {
    bool defined;
    TORCH_ERROR_CODE_CHECK(aoti_torch_is_defined(t.get(), &defined));
    if (!defined) fail(op, name, " must be a tensor, got None");
    int64_t *size_data, *stride_data;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(t.get(), &ndim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t.get(), &size_data));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t.get(), &stride_data));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &device_index));
    sizes = {size_data, static_cast<size_t>(ndim)};
    strides = {stride_data, static_cast<size_t>(ndim)};
    for (int64_t k = ndim; k-- > 0; numel = times(numel, sizes[k]))
      contiguous = contiguous && (sizes[k] == 1 || strides[k] == numel);
    contiguous = contiguous || numel == 0;
    int64_t bytes;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
    if (bytes == 0 && numel != 0) fail(op, name, " must have memory, got a tensor whose storage has 0 bytes");
  }

  bool same_sizes(const View& other) const {
    return std::equal(sizes.begin(), sizes.end(), other.sizes.begin(), other.sizes.end());
  }

  explicit operator bool() const { return tensor != nullptr; }

  const Tensor* tensor = nullptr;
  const char *op = nullptr, *name = nullptr;
  std::span<const int64_t> sizes, strides;
  int64_t ndim = 0, numel = 1;
  int32_t dtype = 0, device_type = 0, device_index = 0;
  bool contiguous = true;
};

namespace dtypes {

inline const int32_t kFloat16 = aoti_torch_dtype_float16();
inline const int32_t kBFloat16 = aoti_torch_dtype_bfloat16();
inline const int32_t kFloat32 = aoti_torch_dtype_float32();
inline const int32_t kFloat64 = aoti_torch_dtype_float64();

inline std::span<const std::pair<int32_t, const char*>> all() {
  static const std::pair<int32_t, const char*> names[] = {
      {aoti_torch_dtype_float16(), "float16"},
      {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_float32(), "float32"},
      {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_uint16(), "uint16"},
      {aoti_torch_dtype_uint32(), "uint32"},
      {aoti_torch_dtype_uint64(), "uint64"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int32(), "int32"},
      {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_complex32(), "complex32"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
      {aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz"},
  };
  return names;
}

inline std::string name(int32_t dtype) {
  for (const auto& [id, name] : all()) {
    if (id == dtype) return name;
  }
  return "another dtype";
}

inline int32_t find(std::string_view wanted) {
  for (const auto& [id, name] : all()) {
    if (name == wanted) return id;
  }
  throw std::logic_error("its signature has no dtype '" + std::string(wanted) + "'");
}

}  // namespace dtypes

inline std::string device_name(const View& t) {
  if (t.device_type == aoti_torch_device_type_cpu()) return "cpu";
  const std::string type = t.device_type == aoti_torch_device_type_cuda() ? "cuda" : "another device type";
  return type + ':' + std::to_string(t.device_index);
}

}  // namespace extension_cpp
