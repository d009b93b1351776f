// matmul on CUDA: which kernel computes a product, with what tiles, and in how many parts of k.
//
// That is decided by the dtype, the sizes and the device alone, and every kernel adds up k in the same order for all
// layouts, so that the bits of the result don't depend on the layouts.
#include "matmul.cuh"

#include <limits>
#include <optional>

#include <torch/csrc/stable/library.h>

#include "matmul_copies.cuh"
#include "matmul_hopper.cuh"
#include "matmul_mma.cuh"
#include "matmul_plan.cuh"
#include "matmul_simt.cuh"

namespace extension_cpp {
namespace {

constexpr const char* kOp = "matmul";

// What a plan depends on.
struct Device {
  int architecture = 0;  // That the code for it was compiled for, which is an older one where it runs PTX.
  int processors = 0;
  bool hopper = false;
};

// The device that is current. Asked once a thread, as it takes as long as a launch.
const Device& current_device(const Launch& launch, int index) {
  thread_local int known = -1;
  thread_local Device device;
  if (known != index) {
    cudaFuncAttributes code;
    launch.check(cudaFuncGetAttributes(&code, mma_kernel<__half>));
    launch.check(cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, index));
    device.architecture = code.ptxVersion;
    device.hopper = hopper::has_code();
    known = index;
  }
  return device;
}

Tensor workspace(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, torch::headeronly::ScalarType::Byte);
}

// The factor as the tensor memory accelerator can read it: itself, or a copy that `memory` holds.
template <class T>
Factor<T> readable(
    Launch& launch, const Tensor& like, const Factor<T>& factor, int64_t rows, int64_t k,
    std::optional<Tensor>& memory) {
  if (hopper::reads(factor, rows, k)) return factor;
  const bool by_k = factor.outer == 1 && factor.inner != 1;
  const Padded shape = by_k ? Padded{k, rows, factor.inner, factor.outer} : Padded{rows, k, factor.outer, factor.inner};
  const int64_t stride = ceil_div(shape.columns, 8) * 8;
  memory = workspace(like, shape.rows * stride * static_cast<int64_t>(sizeof(T)));
  T* to = static_cast<T*>(memory->mutable_data_ptr());
  constexpr int64_t kMostBlocks = 1 << 16;
  launch(
      pad_kernel, std::min(ceil_div(shape.rows * stride / 8, kCopyThreads), kMostBlocks), kCopyThreads, 0,
      reinterpret_cast<const uint16_t*>(factor.data), shape, reinterpret_cast<uint16_t*>(to));
  return by_k ? Factor<T>{to, 1, stride} : Factor<T>{to, stride, 1};
}

// Runs `kernel(product, plan)`, which computes c, or where there are splits, partial sums that are then added up.
template <class T, class V, class Kernel>
void with_splits(Launch& launch, const Tensor& like, Product<T, V> product, const Plan& plan, const Kernel& kernel) {
  const int64_t splits = plan.tiling.splits();
  std::optional<Tensor> memory;
  if (splits > 1) {
    product.partial_stride = ceil_div(product.n, 8) * 8;
    memory = workspace(like, splits * product.m * product.partial_stride * static_cast<int64_t>(sizeof(V)));
    product.partial = static_cast<V*>(memory->mutable_data_ptr());
  }
  kernel(product, plan);
  if (product.partial == nullptr) return;
  constexpr int64_t kMostBlocks = 1 << 16;
  const int64_t blocks = std::min(ceil_div(product.m * ceil_div(product.n, 16 / sizeof(V)), kCopyThreads), kMostBlocks);
  launch(sum_splits_kernel<T, V>, blocks, kCopyThreads, 0, product, splits);
}

template <class S, class T, class V>
void run_simt(Launch& launch, const Product<T, V>& product, const Tiling& tiling) {
  launch(simt_kernel<S, T, V>, tiling.count(), S::kThreads, S::kSharedBytes, product, tiling);
}

template <class T, class V, class... Shapes>
void simt(Launch& launch, const Tensor& like, const Product<T, V>& product, const Device& device, double rate) {
  const TileModel shapes[] = {
      {Shapes::kM, Shapes::kN, Shapes::kK, Shapes::kThreads / 32, Shapes::kBlocks, rate * (Shapes::kM >= 128 ? 1 : 0.8),
       8}...};
  const Plan chosen = plan(shapes, product.m, product.n, product.k, sizeof(T), device.processors);
  with_splits(launch, like, product, chosen, [&](const Product<T, V>& p, const Plan& plan) {
    constexpr void (*kRuns[])(Launch&, const Product<T, V>&, const Tiling&) = {run_simt<Shapes, T, V>...};
    kRuns[plan.shape](launch, p, plan.tiling);
  });
}

template <class T>
void mma(Launch& launch, const Tensor& like, const Product<T, float>& product, const Device& device) {
  using M = Mma<T>;
  const TileModel shapes[] = {{M::kM, M::kN, M::kK, 4, 2, 2000.0 / sizeof(T), 8}};
  const Plan chosen = plan(shapes, product.m, product.n, product.k, sizeof(T), device.processors);
  with_splits(launch, like, product, chosen, [&](const Product<T, float>& p, const Plan& plan) {
    launch(mma_kernel<T>, plan.tiling.count(), M::kThreads, 0, p, plan.tiling);
  });
}

template <class T>
void wgmma(Launch& launch, const Tensor& like, Product<T, float> product, const Device& device) {
  constexpr int kCount = sizeof(hopper::kTiles) / sizeof(hopper::kTiles[0]);
  TileModel shapes[kCount];
  for (int i = 0; i < kCount; ++i) {
    const auto [m, n, cluster] = hopper::kTiles[i];
    const double rate = n == 256 ? 2500 : 2000;
    shapes[i] = {m * cluster, n, hopper::kStep, 4, 1, cluster * rate, 4, cluster};
  }
  std::optional<Tensor> memory_a, memory_b;
  product.a = readable(launch, like, product.a, product.m, product.k, memory_a);
  product.b = readable(launch, like, product.b, product.n, product.k, memory_b);
  const Plan chosen = plan(shapes, product.m, product.n, product.k, sizeof(T), device.processors);
  with_splits(launch, like, product, chosen, [&](const Product<T, float>& p, const Plan& plan) {
    constexpr decltype(&hopper::multiply<T, 0>) kRuns[] = {
        hopper::multiply<T, 0>, hopper::multiply<T, 1>, hopper::multiply<T, 2>, hopper::multiply<T, 3>};
    static_assert(std::size(kRuns) == kCount);
    kRuns[plan.shape](launch, p, plan.tiling, device.processors);
  });
}

bool fits_wgmma(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max() - 1024;
  constexpr double kWorthCopies = 128.0 * 128 * 128;  // Where the memory accelerator can't read the factors.
  return std::max({m, n, k}) <= kLargest && static_cast<double>(m) * n * k >= kWorthCopies;
}

// The factor as a kernel takes it in whole vectors, which lie along k or along rows: itself, or where a copy takes a
// small part of the product's time, one that `memory` holds.
Factor<float> in_vectors(
    Launch& launch, const Tensor& like, const Factor<float>& factor, bool along_k, int64_t rows, int64_t k,
    int64_t other_rows, std::optional<Tensor>& memory) {
  constexpr int64_t kWorthACopy = 1024;
  const Factor<float> along_rows{factor.data, factor.inner, factor.outer};
  const bool has_vectors = has_vectors_along_k(along_k ? factor : along_rows);
  if (has_vectors || std::min(rows, other_rows) < kWorthACopy) return factor;
  const int64_t inner = along_k ? k : rows, outer = along_k ? rows : k, stride = ceil_div(inner, 4) * 4;
  memory = workspace(like, outer * stride * static_cast<int64_t>(sizeof(float)));
  float* to = static_cast<float*>(memory->mutable_data_ptr());
  launch(
      transpose_kernel, ceil_div(inner, kSquare) * ceil_div(outer, kSquare), kCopyThreads, 0,
      along_k ? along_rows : factor, inner, outer, stride, to);
  return along_k ? Factor<float>{to, stride, 1} : Factor<float>{to, 1, stride};
}

template <class T>
void run(Launch& launch, const Tensor& like, Product<T, float> product, const Device& device, bool allow_tf32) {
  if constexpr (std::is_same_v<T, float>) {
    const bool tf32 = allow_tf32 && has_mma<float>(device.architecture);
    std::optional<Tensor> memory_a, memory_b;
    product.a = in_vectors(launch, like, product.a, tf32, product.m, product.k, product.n, memory_a);
    product.b = in_vectors(launch, like, product.b, tf32, product.n, product.k, product.m, memory_b);
    if (tf32) return mma(launch, like, product, device);
    using Large = Simt<float, 128, 128, 16, 8, 8, 3, 2, false>;
    using Small = Simt<float, 64, 128, 16, 8, 8, 4, 4, false>;
    if (has_vectors_along_k(product.b)) {
      simt<float, float, Large, Small, Simt<float, 16, 128, 16, 8, 4, 5, 4, true>>(launch, like, product, device, 170);
    } else {
      simt<float, float, Large, Small, Simt<float, 16, 128, 16, 8, 4, 6, 4, false>>(launch, like, product, device, 170);
    }
  } else {
    if (device.hopper && fits_wgmma(product.m, product.n, product.k)) return wgmma(launch, like, product, device);
    if (has_mma<T>(device.architecture)) return mma(launch, like, product, device);
    simt<T, float, Simt<float, 64, 128, 16, 8, 8, 2, 3, false>>(launch, like, product, device, 100);
  }
}

void run(Launch& launch, const Tensor& like, const Product<double, double>& product, const Device& device, bool) {
  simt<double, double, Simt<double, 64, 64, 16, 8, 4, 3, 3, false>>(launch, like, product, device, 50);
}

template <class T, class V>
void multiply(Launch& launch, const View& a, const View& b, const Tensor& c, bool allow_tf32) {
  Product<T, V> product{
      factor_a<T>(a),
      factor_b<T>(b),
      a.sizes[0],
      b.sizes[1],
      a.sizes[1],
      b.sizes[1],
      1,
      0,
      static_cast<T*>(c.mutable_data_ptr()),
      nullptr};
  constexpr int64_t kFewRows = 64;
  if (product.n <= kFewRows && product.m > product.n) {  // Tiles are wide: few columns are better as few rows.
    std::swap(product.a, product.b);
    std::swap(product.m, product.n);
    std::swap(product.c_outer, product.c_inner);
  }
  // The stride of a dimension of size 1 means nothing, and would look as if rows were not aligned.
  auto normalise = [&](Factor<T>& factor, int64_t rows) {
    constexpr int64_t kAligned = 16;
    if (product.k == 1) factor.inner = factor.outer == 1 ? (rows + kAligned - 1) / kAligned * kAligned : 1;
    if (rows == 1) factor.outer = factor.inner == 1 ? (product.k + kAligned - 1) / kAligned * kAligned : 1;
  };
  normalise(product.a, product.m);
  normalise(product.b, product.n);
  run(launch, *a.tensor, product, current_device(launch, a.device_index), allow_tf32);
}

Tensor matmul(const Tensor& a, const Tensor& b, bool allow_tf32) {
  const View view_a(kOp, "a", a), view_b(kOp, "b", b);
  check_factors(kOp, view_a, view_b);
  const int64_t m = view_a.sizes[0], n = view_b.sizes[1];
  const Tensor c = allocate_product(view_a, m, n);
  if (m == 0 || n == 0) return c;
  Launch launch(kOp, view_a);
  if (view_a.sizes[1] == 0) {
    launch.zero(c.mutable_data_ptr(), View(kOp, "c", c).numel * c.element_size());
  } else if (view_a.dtype == dtypes::kFloat32) {
    multiply<float, float>(launch, view_a, view_b, c, allow_tf32);
  } else if (view_a.dtype == dtypes::kFloat64) {
    multiply<double, double>(launch, view_a, view_b, c, allow_tf32);
  } else if (view_a.dtype == dtypes::kFloat16) {
    multiply<__half, float>(launch, view_a, view_b, c, allow_tf32);
  } else {
    multiply<__nv_bfloat16, float>(launch, view_a, view_b, c, allow_tf32);
  }
  return c;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(extension_cpp, CUDA, m) {
  m.impl("matmul", TORCH_BOX(&matmul));
  m.impl("matmul.no_grad", TORCH_BOX(&matmul));
}

}  // namespace extension_cpp
