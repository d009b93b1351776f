// The wording of errors: operator, argument, what was expected, what came. The fake kernels in Python use the same
// words (extension_cpp/ops/_check.py), so that an error reads alike whether it comes from a kernel or from
// torch.compile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
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
  View(const char* op, const char* name, const Tensor& t) : tensor(&t), name(name) {
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
    for (int64_t k = ndim; k-- > 0; numel *= sizes[k])
      contiguous = contiguous && (sizes[k] == 1 || strides[k] == numel);
    contiguous = contiguous || numel == 0;
  }

  bool same_sizes(const View& other) const {
    return std::equal(sizes.begin(), sizes.end(), other.sizes.begin(), other.sizes.end());
  }

  const Tensor* tensor;
  const char* name;
  std::span<const int64_t> sizes, strides;
  int64_t ndim, numel = 1;
  int32_t dtype, device_type, device_index;
  bool contiguous = true;
};

namespace dtypes {

inline const int32_t kFloat16 = aoti_torch_dtype_float16();
inline const int32_t kBFloat16 = aoti_torch_dtype_bfloat16();
inline const int32_t kFloat32 = aoti_torch_dtype_float32();
inline const int32_t kFloat64 = aoti_torch_dtype_float64();

inline std::string name(int32_t dtype) {
  const std::pair<int32_t, const char*> names[] = {
      {kFloat16, "float16"},
      {kBFloat16, "bfloat16"},
      {kFloat32, "float32"},
      {kFloat64, "float64"},
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
  for (const auto& [id, name] : names) {
    if (id == dtype) return name;
  }
  return "another dtype";
}

}  // namespace dtypes

inline std::string device_name(const View& t) {
  if (t.device_type == aoti_torch_device_type_cpu()) return "cpu";
  const std::string type = t.device_type == aoti_torch_device_type_cuda() ? "cuda" : "another device type";
  return type + ':' + std::to_string(t.device_index);
}

inline void check_floating(const char* op, const View& t) {
  using namespace dtypes;
  if (t.dtype == kFloat32 || t.dtype == kBFloat16 || t.dtype == kFloat16 || t.dtype == kFloat64) return;
  fail(op, t.name, " must have dtype float16, bfloat16, float32 or float64, got ", dtypes::name(t.dtype));
}

inline bool is_integer(int32_t dtype) {
  return dtype == aoti_torch_dtype_int64() || dtype == aoti_torch_dtype_int32() || dtype == aoti_torch_dtype_int16() ||
         dtype == aoti_torch_dtype_int8() || dtype == aoti_torch_dtype_uint8();
}

inline void check_integer(const char* op, const View& t) {
  if (is_integer(t.dtype)) return;
  fail(op, t.name, " must have dtype uint8, int8, int16, int32 or int64, got ", dtypes::name(t.dtype));
}

inline void check_real(const char* op, const View& t) {
  using namespace dtypes;
  if (t.dtype == kFloat32 || t.dtype == kBFloat16 || t.dtype == kFloat16 || t.dtype == kFloat64) return;
  if (is_integer(t.dtype)) return;
  const char* wanted = " must have dtype float16, bfloat16, float32, float64, uint8, int8, int16, int32 or int64, got ";
  fail(op, t.name, wanted, dtypes::name(t.dtype));
}

inline void check_device(const char* op, const View& t, const View& like) {
  if (t.device_type != like.device_type || t.device_index != like.device_index) {
    fail(op, t.name, " must be on the device of ", like.name, ", ", device_name(like), ", got ", device_name(t));
  }
}

// `t` must have the dtype and the device of `like`.
inline void check_same(const char* op, const View& t, const View& like) {
  if (t.dtype != like.dtype) {
    const std::string want = dtypes::name(like.dtype), got = dtypes::name(t.dtype);
    fail(op, t.name, " must have the dtype of ", like.name, ", ", want, ", got ", got);
  }
  check_device(op, t, like);
}

}  // namespace extension_cpp
