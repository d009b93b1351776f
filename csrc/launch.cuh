// What every launch needs: the tensor's device, PyTorch's current stream there, a grid that fits, and a check.
#pragma once

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "check.h"

namespace extension_cpp {

// While it lives, the tensor's device is current; the launch goes to PyTorch's current stream of that device.
class Launch {
 public:
  Launch(const char* op, const View& t) : op_(op), guard_(t.device_index) {
    void* stream;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.device_index, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  template <class... Parameters, class... Arguments>
  void operator()(
      void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes, const Arguments&... arguments) {
    if (blocks == 0) return;  // An empty grid is an error in CUDA.
    if (blocks > 0x7fffffff) fail(op_, "the tensors are too large for one launch: ", blocks, " blocks");
    kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream_>>>(arguments...);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  void zero(void* memory, size_t bytes) { STD_CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream_)); }

  // A value on the device, once all that was launched before is done.
  template <class T>
  T read(const T* value) {
    T result;
    STD_CUDA_CHECK(cudaMemcpyAsync(&result, value, sizeof(T), cudaMemcpyDeviceToHost, stream_));
    STD_CUDA_CHECK(cudaStreamSynchronize(stream_));
    return result;
  }

  bool is_capturing() const {
    cudaStreamCaptureStatus status;
    STD_CUDA_CHECK(cudaStreamIsCapturing(stream_, &status));
    return status != cudaStreamCaptureStatusNone;
  }

 private:
  const char* op_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

inline int64_t ceil_div(int64_t x, int64_t y) {
  return (x + y - 1) / y;
}

}  // namespace extension_cpp
