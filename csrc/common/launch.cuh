// What every launch needs: the tensor's device, PyTorch's current stream there, a grid that fits, and a check.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "check.h"

#define EXTENSION_CPP_QUOTE(x) #x
#define EXTENSION_CPP_TEXT(x) EXTENSION_CPP_QUOTE(x)
// "7.5/8.0/12.0+PTX": extension_cpp/_build.py defines the list that nvcc compiles for.
#define EXTENSION_CPP_BUILT_FOR EXTENSION_CPP_TEXT(EXTENSION_CPP_ARCHITECTURES)

namespace extension_cpp {

// extension_cpp/_elf.py finds it in the file, so that the driver is compared before the library is loaded: once loaded,
// its kernels are registered for good.
__attribute__((used)) inline constexpr char kBuiltFor[] =
    "extension_cpp: CUDA " EXTENSION_CPP_TEXT(CUDART_VERSION) ", architectures " EXTENSION_CPP_BUILT_FOR ";";

// What a failed launch means, and how to fix it, where the package and the machine don't fit together.
inline std::string explain(cudaError_t error, const std::string& architecture) {
  std::ostringstream text;
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
      text << "this package has no kernel for a GPU of architecture " << architecture << " with this driver, only for "
           << EXTENSION_CPP_BUILT_FOR
           << ". In a checkout of its version, build one: TORCH_CUDA_ARCH_LIST=" << architecture
           << (architecture == "9.0" ? "a" : "") << " pip install .";  // With Hopper's own instructions.
      break;
    case cudaErrorInsufficientDriver:
      text << "the NVIDIA driver is older than CUDA " << CUDART_VERSION / 1000 << '.' << CUDART_VERSION % 1000 / 10
           << ", which this package was built with: update the driver";
      break;
    default:
      text << "CUDA says '" << cudaGetErrorString(error) << "' (" << cudaGetErrorName(error)
           << "), of this launch or of something before it: CUDA_LAUNCH_BLOCKING=1 tells which";
  }
  return text.str();
}

// "9.0"
inline std::string architecture(int device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return std::to_string(major) + '.' + std::to_string(minor);
}

// While it lives, the tensor's device is current; the launch goes to PyTorch's current stream of that device.
class Launch {
 public:
  Launch(const char* op, const View& t) : op_(op), device_(t.device_index), guard_(t.device_index) {
    void* stream;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.device_index, &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  template <class... Parameters, class... Arguments>
  void operator()(
      void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes, const Arguments&... arguments) {
    if (blocks == 0) return;  // An empty grid is an error in CUDA.
    if (blocks > 0x7fffffff) fail(op_, "the tensors are too large for one launch: ", blocks, " blocks");
    allow_shared(kernel, shared_bytes);
    kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream_>>>(arguments...);
    check(cudaGetLastError());
  }

  // The same in clusters of `cluster` blocks, which share their shared memory. Hopper and later. With `early`, blocks
  // may start before the kernel in front of it ends: all of them have to wait for it (griddepcontrol.wait) before they
  // read or write memory.
  template <class... Parameters, class... Arguments>
  void clusters(
      void (*kernel)(Parameters...), int64_t blocks, int cluster, int threads, size_t shared_bytes, bool early,
      const Arguments&... arguments) {
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = early;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    extended(kernel, blocks, threads, shared_bytes, attributes, cluster > 1 ? 2 : 1, arguments...);
  }

  // The same with all blocks on the device at the same time, so that they may wait for each other.
  template <class... Parameters, class... Arguments>
  void together(
      void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes, const Arguments&... arguments) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    extended(kernel, blocks, threads, shared_bytes, &attribute, 1, arguments...);
  }

  // How many multiprocessors the device has.
  int processors() const {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device_));
    return count;
  }

  // A kernel that nvcc didn't compile; `arguments` point to its parameters.
  void compiled(cudaKernel_t kernel, int64_t blocks, int threads, size_t shared_bytes, void** arguments) {
    check(cudaLaunchKernel(kernel, static_cast<unsigned>(blocks), threads, arguments, shared_bytes, stream_));
  }

  // A kernel has no more than 48 KiB of shared memory unless it asks for it: of these bytes, and of up to 32 KiB that
  // it declares itself. What it may have only grows, as another thread may be about to launch it with more.
  template <class Kernel>
  void allow_shared(Kernel* kernel, size_t bytes) {
    constexpr size_t kGranted = 16 * 1024;
    if (bytes <= kGranted) return;
    const std::lock_guard lock(allowed().mutex);
    size_t& most = allowed().bytes[{reinterpret_cast<const void*>(kernel), device_}];
    if (bytes <= most) return;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    most = bytes;
  }

  void zero(void* memory, size_t bytes) const { check(cudaMemsetAsync(memory, 0, bytes, stream_)); }

  // A value on the device, once all that was launched before is done.
  template <class T>
  T read(const T* value) const {
    T result;
    check(cudaMemcpyAsync(&result, value, sizeof(T), cudaMemcpyDeviceToHost, stream_));
    wait();
    return result;
  }

  // Returns once all that was launched before is done.
  void wait() const { check(cudaStreamSynchronize(stream_)); }

  void check(cudaError_t error) const {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // So that PyTorch's next check doesn't find it.
    fail(op_, explain(error, architecture(device_)));
  }

  bool is_capturing() const {
    cudaStreamCaptureStatus status;
    check(cudaStreamIsCapturing(stream_, &status));
    return status != cudaStreamCaptureStatusNone;
  }

 private:
  struct Allowed {
    std::mutex mutex;
    std::map<std::pair<const void*, int>, size_t> bytes;  // of a kernel on a device
  };

  static Allowed& allowed() {
    static auto* const allowed = new Allowed;  // Never destroyed, as a thread may outlive what is.
    return *allowed;
  }

  template <class... Parameters, class... Arguments>
  void extended(
      void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes, cudaLaunchAttribute* attributes,
      int count, const Arguments&... arguments) {
    if (blocks > 0x7fffffff) fail(op_, "the tensors are too large for one launch: ", blocks, " blocks");
    allow_shared(kernel, shared_bytes);
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(blocks);
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_;
    config.attrs = attributes;
    config.numAttrs = count;
    check(cudaLaunchKernelEx(&config, kernel, arguments...));
  }

  const char* op_;
  int device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// A number that a kernel writes and the host reads, in memory of the host: a copy takes as long as waiting does.
class HostNumber {
 public:
  explicit HostNumber(const Launch& launch) : launch_(launch) {
    constexpr int kPage = 4096;
    const std::lock_guard lock(pool().mutex);
    auto& free = pool().free;
    if (free.empty()) {
      void* page;
      launch.check(cudaHostAlloc(&page, kPage, cudaHostAllocPortable | cudaHostAllocMapped));
      for (size_t i = 0; i < kPage / sizeof(int64_t); ++i) free.push_back(static_cast<int64_t*>(page) + i);
    }
    number_ = free.back();
    free.pop_back();
    *static_cast<volatile int64_t*>(number_) = kUnwritten;
  }

  // What no kernel may still write to is there for the next call.
  ~HostNumber() {
    if (!is_written_) return;
    const std::lock_guard lock(pool().mutex);
    pool().free.push_back(number_);
  }

  HostNumber(const HostNumber&) = delete;

  int64_t* pointer() const { return number_; }

  // Returns once it is written, which the driver would tell some microseconds later. What takes longer may have failed,
  // which the driver tells.
  int64_t wait() {
    constexpr std::chrono::microseconds kMost(200);
    const auto begin = std::chrono::steady_clock::now();
    auto number = [&] { return *static_cast<volatile int64_t*>(number_); };
    while (number() == kUnwritten && std::chrono::steady_clock::now() - begin < kMost) {
    }
    if (number() == kUnwritten) launch_.wait();
    is_written_ = true;
    return number();
  }

 private:
  struct Pool {
    std::mutex mutex;
    std::vector<int64_t*> free;
  };

  static Pool& pool() {
    static auto* const pool = new Pool;  // Never destroyed, as a thread may outlive what is.
    return *pool;
  }

  static constexpr int64_t kUnwritten = -1;

  const Launch& launch_;
  int64_t* number_;
  bool is_written_ = false;
};

__host__ __device__ inline int64_t ceil_div(int64_t x, int64_t y) {
  return (x + y - 1) / y;
}

}  // namespace extension_cpp
