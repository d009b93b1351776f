// From a dtype to the C++ type of its elements.
#pragma once

#include <cstdint>
#include <type_traits>

#include "check.h"

namespace extension_cpp {

// The types that a kernel is compiled for.
template <class... T>
struct Types {};

namespace detail {

template <class List, class... More>
struct Joined;
template <class... T, class... More>
struct Joined<Types<T...>, More...> {
  using type = Types<T..., More...>;
};

}  // namespace detail

// A list and more: With<Floating, int32_t>.
template <class List, class... More>
using With = typename detail::Joined<List, More...>::type;

template <class T>
int32_t dtype_of();
template <>
inline int32_t dtype_of<float>() {
  return dtypes::kFloat32;
}
template <>
inline int32_t dtype_of<double>() {
  return dtypes::kFloat64;
}
template <>
inline int32_t dtype_of<uint8_t>() {
  return aoti_torch_dtype_uint8();
}
template <>
inline int32_t dtype_of<int8_t>() {
  return aoti_torch_dtype_int8();
}
template <>
inline int32_t dtype_of<int16_t>() {
  return aoti_torch_dtype_int16();
}
template <>
inline int32_t dtype_of<int32_t>() {
  return aoti_torch_dtype_int32();
}
template <>
inline int32_t dtype_of<int64_t>() {
  return aoti_torch_dtype_int64();
}

// What is computed in: float for the two half types and float, and every other type itself.
template <class T>
struct Compute {
  using type = std::conditional_t<std::is_integral_v<T> || std::is_same_v<T, double>, T, float>;
};

// Calls f with a value of the type that has this dtype.
template <class... T, class F>
void dispatch(Types<T...>, const char* op, int32_t dtype, F f) {
  const bool found = ((dtype == dtype_of<T>() && (f(T{}), true)) || ...);
  if (!found) fail(op, "has no kernel for dtype ", dtypes::name(dtype));
}

}  // namespace extension_cpp
