// Runs an elementwise operator on CUDA.
//
// Such an operator is bound by memory: what counts is that accesses are wide and coalesced, and that little is computed
// for each. linear_kernel is for contiguous operands, row_kernel for strided and broadcast ones, tile_kernel for those
// of which some are transposed, and general_kernel for what is left.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "launch.cuh"
#include "loop.h"

namespace extension_cpp {

template <>
inline int32_t dtype_of<torch::headeronly::Half>() {
  return dtypes::kFloat16;
}
template <>
inline int32_t dtype_of<torch::headeronly::BFloat16>() {
  return dtypes::kBFloat16;
}

using Floating = Types<float, torch::headeronly::BFloat16, torch::headeronly::Half, double>;

namespace detail {

constexpr int kThreads = 128;
constexpr int kFastDims = 8;
constexpr int kTile = 32;

template <class T, int kVec>
struct alignas(sizeof(T) * kVec) Vec {
  T values[kVec];
};

// Division of an index below 2^31 by a constant: a multiplication and a shift (Granlund and Montgomery, 1994).
struct Divisor {
  uint32_t value = 1, magic = 1, shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : value(divisor) {
    while (shift < 32 && (uint64_t{1} << shift) < divisor) ++shift;
    magic = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }

  // Returns n % value and leaves n / value in n.
  __device__ uint32_t split(uint32_t& n) const {
    const uint32_t quotient = (__umulhi(n, magic) + n) >> shift;
    const uint32_t remainder = n - quotient * value;
    n = quotient;
    return remainder;
  }
};

template <int kOut, int kIn, class T, class Op>
__device__ __forceinline__ void apply(const T (&in)[kIn], T (&out)[kOut], const Op& op) {
  using V = typename Compute<T>::type;
  V values[kIn], results[kOut];
#pragma unroll
  for (int k = 0; k < kIn; ++k) values[k] = static_cast<V>(in[k]);
  op(values, results);
#pragma unroll
  for (int k = 0; k < kOut; ++k) out[k] = static_cast<T>(results[k]);
}

template <int kOut, int kIn, int kVec, class T, class Op>
__device__ __forceinline__ void apply(const Vec<T, kVec> (&in)[kIn], Vec<T, kVec> (&out)[kOut], const Op& op) {
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    T values[kIn], results[kOut];
#pragma unroll
    for (int k = 0; k < kIn; ++k) values[k] = in[k].values[j];
    apply<kOut, kIn, T>(values, results, op);
#pragma unroll
    for (int k = 0; k < kOut; ++k) out[k].values[j] = results[k];
  }
}

// All operands contiguous and aligned: one vector of each a thread.
template <int kOut, int kIn, int kVec, class T, class Op>
__global__ void __launch_bounds__(kThreads) linear_kernel(int64_t n, Pointers<T, kOut + kIn> data, Op op) {
  using Vector = Vec<T, kVec>;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec;
  if (i + kVec <= n) {
    Vector in[kIn], out[kOut];
#pragma unroll
    for (int k = 0; k < kIn; ++k) in[k] = *reinterpret_cast<const Vector*>(data.at[kOut + k] + i);
    apply<kOut, kIn>(in, out, op);
#pragma unroll
    for (int k = 0; k < kOut; ++k) *reinterpret_cast<Vector*>(data.at[k] + i) = out[k];
    return;
  }
  for (int64_t j = i; j < n; ++j) {
    T in[kIn], out[kOut];
#pragma unroll
    for (int k = 0; k < kIn; ++k) in[k] = data.at[kOut + k][j];
    apply<kOut, kIn, T>(in, out, op);
#pragma unroll
    for (int k = 0; k < kOut; ++k) data.at[k][j] = out[k];
  }
}

// The loop with dimension 0 cut into chunks, few enough of them for fast division.
template <int N>
struct Chunks {
  uint32_t count;
  int ndim;
  uint32_t row;              // elements in a row of dimension 0
  Divisor sizes[kFastDims];  // of dimension 0: chunks in a row
  int64_t strides[N][kFastDims];
};

// Anything strided or broadcast: a thread takes kVec neighbours of one row, as a vector where they lie that way.
template <int kOut, int kIn, int kVec, class T, class Op>
__global__ void __launch_bounds__(kThreads)
    row_kernel(const __grid_constant__ Chunks<kOut + kIn> chunks, Pointers<T, kOut + kIn> data, Op op) {
  constexpr int N = kOut + kIn;
  using Vector = Vec<T, kVec>;
  uint32_t rest = blockIdx.x * kThreads + threadIdx.x;
  if (rest >= chunks.count) return;
  const uint32_t column = chunks.sizes[0].split(rest) * kVec;
  T* at[N];
#pragma unroll
  for (int k = 0; k < N; ++k) at[k] = data.at[k] + column * chunks.strides[k][0];
  for (int d = 1; d < chunks.ndim; ++d) {
    const int64_t index = d + 1 < chunks.ndim ? chunks.sizes[d].split(rest) : rest;
#pragma unroll
    for (int k = 0; k < N; ++k) at[k] += index * chunks.strides[k][d];
  }
  const int n = min(chunks.row - column, static_cast<uint32_t>(kVec));
  auto is_vector = [&](int k) {
    return n == kVec && chunks.strides[k][0] == 1 && reinterpret_cast<uintptr_t>(at[k]) % sizeof(Vector) == 0;
  };
  Vector in[kIn], out[kOut];
#pragma unroll
  for (int k = 0; k < kIn; ++k) {
    const T* from = at[kOut + k];
    const int64_t stride = chunks.strides[kOut + k][0];
    if (is_vector(kOut + k)) {
      in[k] = *reinterpret_cast<const Vector*>(from);
    } else if (stride == 0) {
      const T value = *from;
#pragma unroll
      for (int j = 0; j < kVec; ++j) in[k].values[j] = value;
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) in[k].values[j] = j < n ? from[j * stride] : T(0);
    }
  }
  apply<kOut, kIn>(in, out, op);
#pragma unroll
  for (int k = 0; k < kOut; ++k) {
    if (is_vector(k)) {
      *reinterpret_cast<Vector*>(at[k]) = out[k];
    } else {
      const int64_t stride = chunks.strides[k][0];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (j < n) at[k][j * stride] = out[k].values[j];
      }
    }
  }
}

// A loop whose inputs disagree on the fastest dimension: 0 for some, 1 for those in the mask.
template <int N>
struct Tiles {
  uint32_t columns, rows;  // sizes of dimensions 0 and 1
  Divisor tiles_x, tiles_y;
  int ndim;
  Divisor sizes[kFastDims];
  int64_t strides[N][kFastDims];
  uint32_t transposed;  // bit k: input k
};

// Such inputs are read along dimension 1 and turned round in shared memory, so that all accesses are coalesced.
template <int kOut, int kIn, class T, class Op>
__global__ void __launch_bounds__(kTile * 8)
    tile_kernel(const __grid_constant__ Tiles<kOut + kIn> tiles, Pointers<T, kOut + kIn> data, Op op) {
  constexpr int N = kOut + kIn, kLines = 8, kEach = kTile / kLines;
  __shared__ T turned[kIn][kTile][kTile + 1];
  uint32_t rest = blockIdx.x;
  const uint32_t x0 = tiles.tiles_x.split(rest) * kTile, y0 = tiles.tiles_y.split(rest) * kTile;
  for (int d = 2; d < tiles.ndim; ++d) {
    const int64_t index = tiles.sizes[d].split(rest);
#pragma unroll
    for (int k = 0; k < N; ++k) data.at[k] += index * tiles.strides[k][d];
  }
  const int lane = threadIdx.x % kTile, line = threadIdx.x / kTile;
  auto at = [&](int k, uint32_t x, uint32_t y) {
    return data.at[k] + x * tiles.strides[k][0] + y * tiles.strides[k][1];
  };
  auto is_transposed = [&](int k) { return tiles.transposed >> k & 1; };
  // All that is read is on its way before anything is written, which a later read would wait for.
  T in[kEach][kIn];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
#pragma unroll
    for (int k = 0; k < kIn; ++k) {
      const int across = line + e * kLines;
      const uint32_t x = x0 + (is_transposed(k) ? across : lane), y = y0 + (is_transposed(k) ? lane : across);
      if (x < tiles.columns && y < tiles.rows) in[e][k] = *at(kOut + k, x, y);
    }
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
#pragma unroll
    for (int k = 0; k < kIn; ++k) {
      if (is_transposed(k)) turned[k][line + e * kLines][lane] = in[e][k];
    }
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int y = line + e * kLines;
    if (x0 + lane >= tiles.columns || y0 + y >= tiles.rows) continue;
    T out[kOut];
#pragma unroll
    for (int k = 0; k < kIn; ++k) {
      if (is_transposed(k)) in[e][k] = turned[k][lane][y];
    }
    apply<kOut, kIn, T>(in[e], out, op);
#pragma unroll
    for (int k = 0; k < kOut; ++k) *at(k, x0 + lane, y0 + y) = out[k];
  }
}

// Whatever is too large or has too many dimensions for the kernels above.
template <int kOut, int kIn, class T, class Op>
__global__ void __launch_bounds__(kThreads)
    general_kernel(const __grid_constant__ Loop<kOut + kIn> loop, Pointers<T, kOut + kIn> data, Op op) {
  int64_t rest = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (rest >= loop.numel) return;
  for (int d = 0; d < loop.ndim; ++d) {
    const int64_t index = rest % loop.sizes[d];
    rest /= loop.sizes[d];
#pragma unroll
    for (int k = 0; k < kOut + kIn; ++k) data.at[k] += index * loop.strides[k][d];
  }
  T in[kIn], out[kOut];
#pragma unroll
  for (int k = 0; k < kIn; ++k) in[k] = *data.at[kOut + k];
  apply<kOut, kIn, T>(in, out, op);
#pragma unroll
  for (int k = 0; k < kOut; ++k) *data.at[k] = out[k];
}

template <class T, int N>
bool aligned(const Pointers<T, N>& data, int vec) {
  for (const T* pointer : data.at) {
    if (reinterpret_cast<uintptr_t>(pointer) % (sizeof(T) * vec) != 0) return false;
  }
  return true;
}

constexpr int64_t kFastLimit = int64_t{1} << 31;

// The dimension along which some inputs are contiguous while the outputs are so along dimension 0; 0 if there is none.
template <int kOut, int N>
int transposed_dim(const Loop<N>& loop) {
  if (loop.ndim > kFastDims || loop.sizes[0] < kTile / 2) return 0;
  for (int k = kOut; k < N; ++k) {
    if (loop.strides[k][0] <= 1) continue;
    for (int d = 1; d < loop.ndim; ++d) {
      if (loop.strides[k][d] == 1 && loop.sizes[d] >= kTile / 2) return d;
    }
  }
  return 0;
}

template <int kOut, int N>
Tiles<N> make_tiles(Loop<N> loop, int turned) {
  std::swap(loop.sizes[1], loop.sizes[turned]);
  for (auto& strides : loop.strides) std::swap(strides[1], strides[turned]);
  Tiles<N> tiles;
  tiles.columns = static_cast<uint32_t>(loop.sizes[0]);
  tiles.rows = static_cast<uint32_t>(loop.sizes[1]);
  tiles.tiles_x = Divisor(static_cast<uint32_t>(ceil_div(loop.sizes[0], kTile)));
  tiles.tiles_y = Divisor(static_cast<uint32_t>(ceil_div(loop.sizes[1], kTile)));
  tiles.ndim = loop.ndim;
  tiles.transposed = 0;
  for (int d = 0; d < loop.ndim; ++d) {
    tiles.sizes[d] = Divisor(static_cast<uint32_t>(loop.sizes[d]));
    for (int k = 0; k < N; ++k) tiles.strides[k][d] = loop.strides[k][d];
  }
  for (int k = kOut; k < N; ++k) {
    if (loop.strides[k][1] == 1 && loop.strides[k][0] > 1) tiles.transposed |= 1u << (k - kOut);
  }
  return tiles;
}

template <int N>
int64_t count_chunks(const Loop<N>& loop, int vec) {
  return loop.numel / loop.sizes[0] * ceil_div(loop.sizes[0], vec);
}

template <int N>
Chunks<N> make_chunks(const Loop<N>& loop, int vec) {
  Chunks<N> chunks;
  const int64_t in_row = ceil_div(loop.sizes[0], vec);
  chunks.count = static_cast<uint32_t>(count_chunks(loop, vec));
  chunks.ndim = loop.ndim;
  chunks.row = static_cast<uint32_t>(loop.sizes[0]);
  for (int d = 0; d < loop.ndim; ++d) {
    chunks.sizes[d] = Divisor(static_cast<uint32_t>(d == 0 ? in_row : loop.sizes[d]));
    for (int k = 0; k < N; ++k) chunks.strides[k][d] = loop.strides[k][d];
  }
  return chunks;
}

template <int kOut, int kIn, class T, class Op>
void run(Launch& launch, const Loop<kOut + kIn>& loop, const Pointers<T, kOut + kIn>& data, const Op& op) {
  constexpr int kVec = 16 / sizeof(T);
  if (loop.is_linear() && aligned(data, kVec)) {
    const int64_t blocks = ceil_div(loop.numel, kThreads * kVec);
    return launch(linear_kernel<kOut, kIn, kVec, T, Op>, blocks, kThreads, 0, loop.numel, data, op);
  }
  const bool wide_rows = loop.sizes[0] >= kVec;
  const int64_t count = count_chunks(loop, wide_rows ? kVec : 1);
  if (count >= kFastLimit || loop.sizes[0] >= kFastLimit || loop.ndim > kFastDims) {
    return launch(general_kernel<kOut, kIn, T, Op>, ceil_div(loop.numel, kThreads), kThreads, 0, loop, data, op);
  }
  if (const int turned = transposed_dim<kOut>(loop)) {
    const auto tiles = make_tiles<kOut>(loop, turned);
    int64_t blocks = int64_t{tiles.tiles_x.value} * tiles.tiles_y.value;
    for (int d = 2; d < tiles.ndim; ++d) blocks *= tiles.sizes[d].value;
    return launch(tile_kernel<kOut, kIn, T, Op>, blocks, kTile * 8, 0, tiles, data, op);
  }
  const int64_t blocks = ceil_div(count, kThreads);
  if (wide_rows) {
    launch(row_kernel<kOut, kIn, kVec, T, Op>, blocks, kThreads, 0, make_chunks(loop, kVec), data, op);
  } else {
    launch(row_kernel<kOut, kIn, 1, T, Op>, blocks, kThreads, 0, make_chunks(loop, 1), data, op);
  }
}

}  // namespace detail

template <class Kernels, size_t kOut, size_t kIn, class Op>
void run_elementwise(
    const char* name, const View& first, const Loop<kOut + kIn>& loop,
    const std::array<const Tensor*, kOut + kIn>& operands, const Op& op) {
  if (loop.numel == 0) return;
  Launch launch(name, first);
  dispatch(Kernels(), name, first.dtype, [&]<class T>(T) {
    detail::run<kOut, kIn, T>(launch, loop, pointers<T, kOut>(operands), op);
  });
}

}  // namespace extension_cpp
