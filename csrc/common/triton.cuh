// Runs elementwise operators whose kernels are Triton's, compiled when this library was built.
//
// extension_cpp/triton/_ahead.py writes the file that includes this: of each formula a kernel for every dtype, layout
// of the operands and size, with an image of machine code for each architecture. They are the kernels that Triton
// compiles just in time where this library isn't used (extension_cpp/triton/elementwise.py), and take their arguments
// as those do.
#pragma once

#include <atomic>
#include <bit>
#include <mutex>
#include <optional>

#include <torch/csrc/stable/ops.h>

#include "launch.cuh"
#include "loop.h"
#include "register.h"

// All images, one behind the other.
extern "C" __attribute__((visibility("hidden"))) const char extension_cpp_triton_images[];

namespace extension_cpp::triton {

constexpr int kMostDevices = 128;  // An index of a device is 7 bits in PyTorch.
constexpr int kMostDims = 3;
constexpr int64_t kMany = int64_t{1} << 20;  // Elements from which on a kernel may have another configuration.
// Offsets are 32 bits wide. What comes after the last element of a block may be past it by one block.
constexpr int64_t kLastOffset = (int64_t{1} << 31) - 4096 - 1;

// A kernel for GPUs of one architecture.
struct Image {
  const char* entry;
  int architecture;  // 90 for 9.0
  bool exact;        // no other GPUs run it: it is for 9.0a
  bool ptx;          // which the driver compiles
  size_t offset;
  int block, threads;  // elements and threads of a block
  cudaKernel_t kernel = nullptr;

  bool runs_on(int gpu) const {
    if (exact) return architecture == gpu;
    return architecture <= gpu && (ptx || architecture / 10 == gpu / 10);
  }
};

// A kernel for one dtype, layout and size. Loaded where it is first called on a device, also while a graph is captured.
class Kernel {
 public:
  template <size_t N>
  constexpr explicit Kernel(Image (&images)[N]) : images_(images) {}

  const Image& on(Launch& launch, int device) {
    if (const Image* found = loaded_[device].load(std::memory_order_acquire)) return *found;
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    const Image& image = choose(launch, device);
    loaded_[device].store(&image, std::memory_order_release);
    return image;
  }

 private:
  // Machine code before PTX, and of each the newest.
  const Image& choose(Launch& launch, int device) {
    int major = 0, minor = 0;
    launch.check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    launch.check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    Image* best = nullptr;
    for (Image& each : images_) {
      if (!each.runs_on(10 * major + minor)) continue;
      if (!best || (best->ptx && !each.ptx) || (best->ptx == each.ptx && best->architecture < each.architecture)) {
        best = &each;
      }
    }
    if (!best) launch.check(cudaErrorNoKernelImageForDevice);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    launch.check(cudaThreadExchangeStreamCaptureMode(&mode));
    const cudaError_t error = load(*best);
    launch.check(cudaThreadExchangeStreamCaptureMode(&mode));
    launch.check(error);
    return *best;
  }

  // For all devices, and then into the current one.
  static cudaError_t load(Image& image) {
    if (!image.kernel) {
      cudaLibrary_t library;
      const char* code = extension_cpp_triton_images + image.offset;
      cudaError_t error = cudaLibraryLoadData(&library, code, nullptr, nullptr, 0, nullptr, nullptr, 0);
      if (error != cudaSuccess) return error;
      error = cudaLibraryGetKernel(&image.kernel, library, image.entry);
      if (error != cudaSuccess) return error;
    }
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, image.kernel);
  }

  std::span<Image> images_;
  std::array<std::atomic<const Image*>, kMostDevices> loaded_{};
};

// The kernels of a formula for one dtype: for operands that are contiguous and aligned, else for 1 to 3 dimensions; of
// each for few elements and for many.
struct Row {
  int32_t dtype;
  int64_t itemsize;
  Kernel* kernels[2 * (kMostDims + 1)];
};

namespace detail {

// One launch: results first, which lie behind one another in the order of the dimensions.
template <int N>
struct Part {
  int ndim = 1;
  int64_t sizes[kMostDims];
  int64_t strides[N][kMostDims];
  char* data[N];

  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= sizes[d];
    return n;
  }
};

template <size_t kOut, int N, size_t kNumbers>
void launch_part(
    Launch& launch, int device, const Row& row, Part<N> part, const std::array<double, kNumbers>& numbers) {
  while (part.ndim > 1 && part.sizes[part.ndim - 1] == 1) --part.ndim;
  bool vectors = part.ndim == 1;
  for (int i = 0; vectors && i < N; ++i) {
    vectors = part.strides[i][0] == 1 && reinterpret_cast<uintptr_t>(part.data[i]) % 16 == 0;
  }
  const int layout = vectors ? 0 : part.ndim;
  const int64_t n = part.numel();
  const Image& image = row.kernels[2 * layout + (n >= kMany)]->on(launch, device);
  // In the order of the kernel's parameters. Those that are constants in it are none of its parameters.
  int32_t values[2 * kNumbers + 1 + kMostDims - 1 + N * kMostDims];
  void* arguments[N + std::size(values) + 2];
  int32_t* value = values;
  void** argument = arguments;
  auto add = [&](int64_t x) {
    *value = static_cast<int32_t>(x);
    *argument++ = value++;
  };
  for (char*& pointer : part.data) *argument++ = &pointer;
  for (const double number : numbers) {
    const auto bits = std::bit_cast<int64_t>(number);
    add(bits >> 32);
    add(bits);
  }
  add(n);
  for (int d = 0; d + 1 < layout; ++d) add(part.sizes[d]);
  for (int i = kOut; i < N; ++i) {
    for (int d = 0; d < layout; ++d) add(part.strides[i][d]);
  }
  void* scratch = nullptr;  // Triton's own two, for memory that a formula doesn't need.
  *argument++ = &scratch;
  *argument++ = &scratch;
  launch.compiled(image.kernel, ceil_div(n, image.block), image.threads, arguments);
}

// In parts whose offsets are 32 bits wide: along the outermost dimension. False if one step of it is too much.
template <size_t kOut, int N, size_t kNumbers>
bool launch_parts(
    const char* op, const View& first, const Row& row, const Loop<N>& loop, const Pointers<char, N>& data,
    const std::array<double, kNumbers>& numbers) {
  if (loop.ndim > kMostDims) return false;
  const int outermost = loop.ndim - 1;
  int64_t inner = 0, step = 1;
  for (int i = 0; i < N; ++i) {
    int64_t last = 0;
    for (int d = 0; d < outermost; ++d) last += (loop.sizes[d] - 1) * loop.strides[i][d];
    inner = std::max(inner, last);
    step = std::max(step, loop.strides[i][outermost]);
  }
  if (inner > kLastOffset) return false;
  const int64_t most = 1 + (kLastOffset - inner) / step;
  Part<N> part;
  part.ndim = loop.ndim;
  for (int d = 0; d < loop.ndim; ++d) {
    part.sizes[d] = loop.sizes[d];
    for (int i = 0; i < N; ++i) part.strides[i][d] = loop.strides[i][d];
  }
  Launch launch(op, first);
  for (int64_t at = 0; at < loop.sizes[outermost]; at += most) {
    part.sizes[outermost] = std::min(most, loop.sizes[outermost] - at);
    for (int i = 0; i < N; ++i) part.data[i] = data.at[i] + at * loop.strides[i][outermost] * row.itemsize;
    launch_part<kOut>(launch, first.device_index, row, part, numbers);
  }
  return true;
}

inline const Row& row_of(const char* op, std::span<const Row> rows, int32_t dtype) {
  for (const Row& row : rows) {
    if (row.dtype == dtype) return row;
  }
  fail(op, "has no kernel for dtype ", dtypes::name(dtype));
}

// Results whose elements lie behind one another in the order of the loop.
template <size_t kOut, int N>
bool has_dense_outputs(const Loop<N>& loop) {
  for (size_t i = 0; i < kOut; ++i) {
    int64_t step = 1;
    for (int d = 0; d < loop.ndim; step *= loop.sizes[d++]) {
      if (loop.strides[i][d] != step) return false;
    }
  }
  return true;
}

template <size_t kOut, size_t kIn, size_t kNumbers>
void run(
    const char* op, const View& first, std::span<const Row> rows, const Loop<kOut + kIn>& loop,
    const std::array<const Tensor*, kOut + kIn>& operands, const std::array<double, kNumbers>& numbers) {
  constexpr int N = kOut + kIn;
  if (loop.numel == 0) return;
  const Row& row = row_of(op, rows, first.dtype);
  Pointers<char, N> data = pointers<char, kOut>(operands);
  if (launch_parts<kOut>(op, first, row, loop, data, numbers)) return;
  // Too many dimensions, or too long a step: copied, the inputs are as the results are.
  std::array<std::optional<Tensor>, kIn> copies;
  Loop<N> dense;
  extension_cpp::detail::linear_loop(dense, loop.numel);
  const Tensor& out = *operands[0];
  for (size_t i = 0; i < kIn; ++i) {
    const Tensor& input = *operands[kOut + i];
    copies[i] = torch::stable::empty_like(out);
    torch::stable::copy_(*copies[i], input);
    data.at[kOut + i] = static_cast<char*>(copies[i]->mutable_data_ptr());
  }
  launch_parts<kOut>(op, first, row, dense, data, numbers);
}

}  // namespace detail

// The results of a formula, which takes these of the tensors of a call, and numbers.
template <size_t kOut, size_t kIn, size_t kNumbers, size_t kTensors>
auto compute(
    const Call<kTensors>& call, std::span<const Row> rows, const std::array<int, kIn>& at,
    const std::array<double, kNumbers>& numbers) {
  return [&]<size_t... O, size_t... I>(std::index_sequence<O...>, std::index_sequence<I...>) {
    const std::array<View, kIn> inputs{call.views[at[I]]...};
    Loop<kOut + kIn> loop;
    const auto outputs = allocate_outputs<kOut, kIn>(call.op.name(), inputs, loop);
    detail::run<kOut, kIn>(call.op.name(), inputs[0], rows, loop, {&outputs[O]..., inputs[I].tensor...}, numbers);
    if constexpr (kOut == 1) {
      return outputs[0];
    } else {
      return std::make_tuple(outputs[O]...);
    }
  }(std::make_index_sequence<kOut>(), std::make_index_sequence<kIn>());
}

// The same into the tensor `to` of the call, of the shape that the inputs broadcast to.
template <size_t kIn, size_t kNumbers, size_t kTensors>
void write(
    int to, const Call<kTensors>& call, std::span<const Row> rows, const std::array<int, kIn>& at,
    const std::array<double, kNumbers>& numbers) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    const View& out = call.views[to];
    Loop<1 + kIn> loop;
    loop_over<1 + kIn>({out, call.views[at[I]]...}, loop);
    if (detail::has_dense_outputs<1>(loop)) {
      detail::run<1, kIn>(call.op.name(), out, rows, loop, {out.tensor, call.views[at[I]].tensor...}, numbers);
    } else {
      Tensor written = *out.tensor;
      torch::stable::copy_(written, compute<1, kIn>(call, rows, at, numbers));
    }
  }(std::make_index_sequence<kIn>());
}

}  // namespace extension_cpp::triton
