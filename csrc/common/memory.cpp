// What memory.h declares. Compiled once, and linked into both libraries.
#include "memory.h"

#include <dlfcn.h>

namespace extension_cpp {
namespace {

// The message of the exception that a call into LibTorch has just met, which torch 2.13 and later keep; else nothing.
std::string said_by_pytorch() {
  using Function = const char* (*)();
  static const auto what =
      reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  return what ? what() : "";
}

// Whether the device gives any memory at all. After an error that it doesn't recover from, it doesn't.
bool gives_memory(const View& like) {
  const int64_t size = 1, stride = 1;
  AtenTensorHandle handle;
  const auto failed =
      aoti_torch_empty_strided(1, &size, &stride, like.dtype, like.device_type, like.device_index, &handle);
  if (failed == 0) Tensor freed(handle);
  return failed == 0;
}

}  // namespace

void refuse_memory(const View& like, int32_t dtype, const int64_t* sizes, int64_t ndim) {
  const std::span<const int64_t> shape(sizes, static_cast<size_t>(ndim));
  int64_t bytes = aoti_torch_dtype_element_size(dtype);
  bool too_many = false;
  for (int64_t size : shape) {
    too_many = too_many || (size != 0 && bytes > INT64_MAX / size);
    bytes = times(bytes, size);
  }
  if (too_many) fail(like.op, "can't allocate memory: a tensor of shape ", tuple(shape), " has more than 2^63 bytes");
  if (const std::string said = said_by_pytorch(); !said.empty()) fail(like.op, said);
  const std::string wanted = "ried to allocate " + std::to_string(bytes) + " bytes";
  if (like.device_type == aoti_torch_device_type_cpu()) {
    fail(like.op, "DefaultCPUAllocator: can't allocate memory: you t", wanted);
  }
  if (gives_memory(like)) fail(like.op, "CUDA out of memory. T", wanted, " on ", device_name(like));
  fail(like.op, device_name(like), " gives no memory, after an earlier error or as none is left; t", wanted);
}

}  // namespace extension_cpp
