// Runs operators whose kernels are Triton's, compiled when this library was built.
//
// extension_cpp/triton/_ahead.py writes the file that includes this: of each formula a kernel for every dtype and what
// else is told apart here, with an image of machine code for each architecture. They are the kernels that Triton
// compiles just in time where this library isn't used (the files of each kind there), and take their arguments as those
// do.
#pragma once

#include <atomic>
#include <bit>
#include <mutex>
#include <optional>

#include <torch/csrc/stable/ops.h>

#include "launch.cuh"
#include "loop.h"
#include "recurrence.h"
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
  int block, threads, shared;  // elements, threads and bytes of shared memory of a block
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

  // Elements of a block, where they don't depend on the architecture.
  int block() const { return images_.front().block; }

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

// The kernels of a formula for one dtype.
//   elementwise: for operands that are contiguous and aligned, else for 1 to 3 dimensions; of each for few elements and
//                for many
//   rowwise:     for rows that are aligned, and for others; of each for blocks of some sizes, the smallest first
//   recurrence:  for channels that are aligned, and for others
//   selection:   that count, and that write; of each for tensors that are aligned, and for others
struct Row {
  int32_t dtype;
  int64_t itemsize;
  Kernel* kernels[16];
};

constexpr int64_t kMostSums = 1024;  // programs that each add up some of the rows

namespace detail {

// The arguments of a kernel, in the order of its parameters. Those that are constants in it are none of them.
template <size_t kMost>
class Arguments {
 public:
  void add(const void* pointer) { keep(reinterpret_cast<int64_t>(pointer)); }
  void add(int64_t value) { keep(value); }  // Of which a parameter of 32 bits reads the first half.
  template <size_t N>
  void add(const std::array<double, N>& numbers) {
    for (const double number : numbers) {
      const auto bits = std::bit_cast<int64_t>(number);
      keep(bits >> 32);
      keep(bits);
    }
  }

  // With Triton's own two, for memory that a formula doesn't need.
  void** all() {
    keep(0);
    keep(0);
    return pointers_;
  }

 private:
  void keep(int64_t value) {
    values_[count_] = value;
    pointers_[count_] = &values_[count_];
    ++count_;
  }

  size_t count_ = 0;
  int64_t values_[kMost + 2];
  void* pointers_[kMost + 2];
};

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
  Arguments<N + 2 * kNumbers + kMostDims + N * kMostDims> arguments;
  for (const char* pointer : part.data) arguments.add(pointer);
  arguments.add(numbers);
  arguments.add(n);
  for (int d = 0; d + 1 < layout; ++d) arguments.add(part.sizes[d]);
  for (int i = kOut; i < N; ++i) {
    for (int d = 0; d < layout; ++d) arguments.add(part.strides[i][d]);
  }
  launch.compiled(image.kernel, ceil_div(n, image.block), image.threads, image.shared, arguments.all());
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

namespace detail {

// A tensor of its own memory, contiguous.
inline Tensor copy_of(const Tensor& t) {
  Tensor copy = torch::stable::new_empty(t, t.sizes());
  torch::stable::copy_(copy, t);
  return copy;
}

inline bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// What kernels write where a result is a sum: a part each, of `parts`, in the type of the computation.
class Sums {
 public:
  Sums(const Tensor& result, int64_t parts, int64_t size)
      : result_(result), parts_(torch::stable::new_empty(result, {parts, size}, wide(result.scalar_type()))) {}

  void* data() const { return parts_.mutable_data_ptr(); }
  // The same on every run, as it would not be if kernels added to the same memory.
  void finish() { torch::stable::copy_(result_, torch::stable::sum(parts_, std::array<int64_t, 1>{0})); }

 private:
  using ScalarType = torch::headeronly::ScalarType;
  static ScalarType wide(ScalarType type) { return type == ScalarType::Double ? type : ScalarType::Float; }

  Tensor result_, parts_;
};

template <class In, class Out>
struct RowFormula {
  using Arguments = In;
  using Results = Out;
};

}  // namespace detail

// The results of a formula of a row, which takes all tensors of a call, and numbers. Rows that are aligned are added up
// in another order than others: so that the length of the rows alone decides which, a tensor of the other kind is
// copied.
template <class In, class Out, size_t kNumbers, size_t kIn>
auto rowwise(const Call<kIn>& call, std::span<const Row> rows, const std::array<double, kNumbers>& numbers) {
  using namespace extension_cpp::detail;
  constexpr int kOut = Out::kSize;
  using Formula = detail::RowFormula<In, Out>;
  const char* const op = call.op.name();
  const auto results = allocate_results<kOut>(call);
  check_roles<Formula>(op, call.views, results);
  std::array<const Tensor*, kIn> tensors;
  for (size_t k = 0; k < kIn; ++k) tensors[k] = call.views[k].tensor;
  RowArguments<Formula, 1> given(op, tensors, call.views);
  const int64_t size = given.size, count = given.count;
  const Row& row = detail::row_of(op, rows, call.views[0].dtype);
  const int64_t blocks = std::find(std::begin(row.kernels), std::end(row.kernels), nullptr) - row.kernels;
  const int64_t longest = row.kernels[blocks - 1]->block();
  if (size > longest) {
    fail(
        op, "the kernels that Triton compiled with the package are for rows of at most ", longest,
        " elements, got rows of ", size, ": extension_cpp.use_backend(\"reference\") takes them");
  }
  const bool aligned = size % 16 == 0;
  int64_t aparts[kIn];
  for (size_t k = 0; k < kIn; ++k) {
    const Role role = In::kAt[k];
    aparts[k] = given.leading.ndim ? given.leading.strides[k][0] : 0;
    if (!aligned || !has_elements(role) || (aparts[k] % 16 == 0 && detail::is_aligned(*given.tensors[k]))) continue;
    given.tensors[k] = detail::copy_of(*given.tensors[k]);
    if (role == kRows) aparts[k] = size;
  }
  Launch launch(op, call.views[0]);
  Kernel* const* kernel = row.kernels + (aligned ? 0 : blocks / 2);
  while ((*kernel)->block() < size) ++kernel;
  constexpr int64_t kMostPrograms = 0x7fffffff;
  const int64_t of_program = std::max<int64_t>(1, ceil_div(count, Out::count(kColumns) ? kMostSums : kMostPrograms));
  const int64_t programs = ceil_div(count, of_program);
  detail::Arguments<kOut + 2 * kIn + 2 * kNumbers + 3> arguments;
  std::vector<detail::Sums> sums;
  for (int k = 0; k < kOut; ++k) {
    if (Out::kAt[k] == kColumns) {
      arguments.add(sums.emplace_back(results[k], programs, size).data());
    } else {
      arguments.add(results[k].mutable_data_ptr());
    }
  }
  for (const auto& tensor : given.tensors) arguments.add(tensor->const_data_ptr());
  arguments.add(numbers);
  for (const int64_t value : {size, count, of_program}) arguments.add(value);
  for (size_t k = 0; k < kIn; ++k) {
    if (In::kAt[k] != kColumns) arguments.add(aparts[k]);
  }
  if (programs > 0) {
    const Image& image = (*kernel)->on(launch, call.views[0].device_index);
    launch.compiled(image.kernel, programs, image.threads, image.shared, arguments.all());
  }
  for (detail::Sums& sum : sums) sum.finish();
  return returned(results);
}

// The results of a cell's formula, forward or backward.
template <int kStates, int kInputs, int kWeights, bool kBackward, size_t kNumbers, size_t kIn>
auto recurrence(const Call<kIn>& call, std::span<const Row> rows, const std::array<double, kNumbers>& numbers) {
  using namespace extension_cpp::detail;
  constexpr size_t kOut = kBackward ? kInputs + kWeights + kStates : kStates;
  const char* const op = call.op.name();
  const auto results = allocate_results<kOut>(call);
  const View& first = call.views[0];  // (B, T, H)
  const int64_t batch = first.sizes[0], steps = first.sizes[1], width = first.sizes[2];
  bool aligned = width % 16 == 0;
  std::array<std::optional<Tensor>, kIn> given;
  for (size_t k = 0; k < kIn; ++k) {
    given[k] = torch::stable::contiguous(*call.views[k].tensor);
    aligned = aligned && detail::is_aligned(*given[k]);
  }
  detail::Arguments<kOut + kIn + 2 * kNumbers + 2> arguments;
  std::vector<detail::Sums> sums;
  for (size_t k = 0; k < kOut; ++k) {
    if (kBackward && k >= kInputs && k < kInputs + kWeights) {
      arguments.add(sums.emplace_back(results[k], batch, width).data());
    } else {
      arguments.add(results[k].mutable_data_ptr());
    }
  }
  for (const auto& tensor : given) arguments.add(tensor->const_data_ptr());
  arguments.add(numbers);
  arguments.add(steps);
  arguments.add(width);
  Launch launch(op, first);
  const Row& row = detail::row_of(op, rows, first.dtype);
  const Image& image = row.kernels[aligned ? 0 : 1]->on(launch, first.device_index);
  const int64_t programs = times(batch, ceil_div(width, image.block));
  if (programs > 0x7fffffff) fail(op, "the tensors are too large for one launch: ", programs, " blocks");
  if (programs > 0) launch.compiled(image.kernel, programs, image.threads, image.shared, arguments.all());
  for (detail::Sums& sum : sums) sum.finish();
  return returned(results);
}

// The results of a formula that keeps some elements.
template <size_t kOut, size_t kNumbers, size_t kIn>
auto selection(const Call<kIn>& call, std::span<const Row> rows, const std::array<double, kNumbers>& numbers) {
  const char* const op = call.op.name();
  const View& first = call.views[0];
  const int64_t n = first.numel;
  const auto allocate = [&](int64_t kept) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return std::array<Tensor, kOut>{(static_cast<void>(I), torch::stable::new_empty(*first.tensor, {kept}))...};
    }(std::make_index_sequence<kOut>());
  };
  if (n == 0) return extension_cpp::detail::returned(allocate(0));
  Launch launch(op, first);
  if (launch.is_capturing()) fail(op, "the size of its result is not known inside a CUDA graph");
  bool aligned = true;
  std::array<std::optional<Tensor>, kIn> given;
  for (size_t k = 0; k < kIn; ++k) {
    given[k] = torch::stable::contiguous(*call.views[k].tensor);
    aligned = aligned && detail::is_aligned(*given[k]);
  }
  const Row& row = detail::row_of(op, rows, first.dtype);
  const int64_t block = row.kernels[0]->block();
  const int64_t part = ceil_div(ceil_div(n, kMostSums), block) * block;
  const int64_t programs = ceil_div(n, part);
  // Of each program, and of all of them together.
  const Tensor counts = torch::stable::new_empty(*first.tensor, {programs + 1}, torch::headeronly::ScalarType::Long);
  auto* const count = static_cast<int64_t*>(counts.mutable_data_ptr());
  launch.zero(count + programs, sizeof(int64_t));
  const auto run = [&](const std::array<void*, kOut>& to, int kernel) {
    detail::Arguments<kOut + kIn + 2 * kNumbers + 3> arguments;
    for (const void* pointer : to) arguments.add(pointer);
    for (const auto& tensor : given) arguments.add(tensor->const_data_ptr());
    arguments.add(numbers);
    arguments.add(count);
    for (const int64_t value : {n, part}) arguments.add(value);
    const Image& image = row.kernels[kernel + (aligned ? 0 : 1)]->on(launch, first.device_index);
    launch.compiled(image.kernel, programs, image.threads, image.shared, arguments.all());
  };
  run({}, 0);
  const auto results = allocate(launch.read(count + programs));
  std::array<void*, kOut> to;
  for (size_t k = 0; k < kOut; ++k) to[k] = results[k].mutable_data_ptr();
  run(to, 2);
  return extension_cpp::detail::returned(results);
}

}  // namespace extension_cpp::triton
