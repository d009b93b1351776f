// The product of float16 or bfloat16 on Hopper: the tensor memory accelerator (TMA) copies tiles into shared memory,
// and warpgroups of 128 threads multiply them where they lie (wgmma).
//
// Two numbers: a tile of 128 by 256 takes 65,536 operations and 768 bytes a step of k; at the chip's arithmetic rate
// that is more than the L2 cache gives, so that two blocks share a tile of b.
//
// A block has one or two warpgroups that compute, 64 rows each, and one thread of another that keeps the stages filled.
// `full` and `empty` barriers pass a stage from one to the other and back. Blocks stay, and take tiles in turn; or
// those of a cluster take parts of k of one tile.
#pragma once

#include "cluster.cuh"
#include "wgmma.cuh"

namespace extension_cpp::matmul::hopper {

constexpr int kWarpgroup = 128, kStep = 64, kRow = 2 * kStep;  // A row of a stage is kStep halves.

// A tile of m by n, how many blocks of a cluster share what they read of b, how many blocks a multiprocessor holds, and
// multiply-adds a nanosecond of all of them.
struct Tile {
  int m, n, cluster, blocks;
  double rate;
};
constexpr Tile kTiles[] = {{128, 256, 2, 1, 2104}, {128, 256, 1, 1, 1583}, {64, 256, 1, 1, 1748},
                           {64, 128, 1, 2, 1588},  {128, 128, 1, 1, 2105}, {64, 64, 1, 3, 990},
                           {128, 64, 1, 2, 1897},  {128, 128, 2, 1, 2143}};

template <class T_, int kTile>
struct Hopper {
  using T = T_;
  static constexpr int kM = kTiles[kTile].m, kN = kTiles[kTile].n;
  static constexpr int kCluster = kTiles[kTile].cluster, kConsumers = kM / 64;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kBytesA = kM * kRow, kBytesB = kN * kRow, kStageBytes = kBytesA + kBytesB;
  static constexpr int kBlocks = kTiles[kTile].blocks, kFit = 208 * 1024 / kBlocks / kStageBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  // The swizzle repeats every 1,024 bytes, which is more than what dynamic shared memory is aligned to.
  static constexpr int kSharedBytes = 1024 + kStages * (kStageBytes + 16);
  // Of a tile's sums in shared memory, where the stages were: rows eight apart lie in different banks.
  static constexpr int kSumsStride = kN + 8;
  static_assert(kM * kSumsStride * 4 <= kStages * kStageBytes);
};

// A factor is transposed where its rows (of m or n) lie side by side, not its k's.
struct Transposed {
  bool a, b;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// kRows rows of a factor, from `row` on, over kStep of k. A transposed one comes in boxes of 64 rows.
template <bool kShared, int kRows>
__device__ void copy_rows(
    uint32_t to, const CUtensorMap& map, bool transposed, int64_t row, int64_t k, uint32_t barrier) {
  if (transposed) {
#pragma unroll
    for (int r = 0; r < kRows; r += 64) copy_box<kShared>(to + r * kRow, map, row + r, k, barrier);
  } else {
    copy_box<kShared>(to, map, k, row, barrier);
  }
}

// Which stage is next, and how often all of them were used, modulo two.
template <int kStages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <class H>
__device__ __forceinline__ void fill(
    const CUtensorMap& map_a, const CUtensorMap& map_b, Transposed transposed, const Tiling& tiling,
    bool split_in_cluster, uint32_t stages, uint32_t full, uint32_t empty, int rank) {
  prefetch_map(map_a);
  prefetch_map(map_b);
  Turn<H::kStages> turn;
  constexpr int kShare = H::kN / H::kCluster;
  for (int64_t index = blockIdx.x / H::kCluster; index < tiling.count(); index += gridDim.x / H::kCluster) {
    const Place at = place(tiling, index, split_in_cluster);
    const int64_t row = (at.m * H::kCluster + rank) * H::kM, column = at.n * H::kN + rank * kShare;
    for (int64_t step = at.begin; step < at.end; ++step, turn.next()) {
      const uint32_t barrier = full + turn.stage * 8, stage = stages + turn.stage * H::kStageBytes;
      wait_barrier(empty + turn.stage * 8, turn.parity ^ 1);
      expect_bytes(barrier, H::kStageBytes);
      copy_rows<false, H::kM>(stage, map_a, transposed.a, row, step * kStep, barrier);
      copy_rows<H::kCluster == 2, kShare>(
          stage + H::kBytesA + rank * kShare * kRow, map_b, transposed.b, column, step * kStep, barrier);
    }
  }
}

// Exchanges 4 words among 4 neighbouring threads: thread q gets word q of each.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = __shfl_xor_sync(0xffffffff, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t received = __shfl_xor_sync(0xffffffff, high ? words[i] : words[i + 2], 2);
    (high ? words[i] : words[i + 2]) = received;
  }
}

// Stores a thread's sums: two neighbouring columns of every eight, of rows `row` and `row` + 8.
template <class H>
__device__ __forceinline__ void store(
    const Product<typename H::T, float>& product, const Place& at, int64_t row, int64_t column,
    const float (&sums)[H::kN / 2]) {
  using T = typename H::T;
  const int in_quad = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half, row += 8) {
    const int64_t first = column + in_quad * 2;
    if (product.partial != nullptr) {
      float* to = product.partial + (at.split * product.m + row) * product.partial_stride + first;
#pragma unroll
      for (int j = 0; j < H::kN / 8; ++j) {
        if (row < product.m && first + j * 8 < product.partial_stride) {
          store_vector<float, 2>(to + j * 8, sums + j * 4 + half * 2);
        }
      }
    } else if (product.has_vectors(8)) {
      const int64_t eight = column + in_quad * 8;
      T* to = product.c + row * product.c_outer + eight;
#pragma unroll
      for (int j = 0; j < H::kN / 8; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* pair = sums + (j + e) * 4 + half * 2;
          const T rounded[2] = {round_to<T>(pair[0]), round_to<T>(pair[1])};
          memcpy(&words[e], rounded, sizeof(rounded));
        }
        transpose_quad(words);
        if (row < product.m && eight + j * 8 < product.n) {
          *reinterpret_cast<uint4*>(to + j * 8) = {words[0], words[1], words[2], words[3]};
        }
      }
    } else if (row < product.m) {
      T* to = product.c + row * product.c_outer + first * product.c_inner;
#pragma unroll
      for (int j = 0; j < H::kN / 8; ++j, to += 8 * product.c_inner) {
        const float* pair = sums + j * 4 + half * 2;
        if (first + j * 8 < product.n) to[0] = round_to<T>(pair[0]);
        if (first + j * 8 + 1 < product.n) to[product.c_inner] = round_to<T>(pair[1]);
      }
    }
  }
}

// A tile's sums, of the steps from `begin` to `end`.
template <class H, bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void add_steps(
    float (&sums)[H::kN / 2], Turn<H::kStages>& turn, int64_t count, uint32_t stages, uint32_t full, uint32_t empty) {
  const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
  auto release = [&](int stage) {
    if (thread < H::kCluster) arrive_at(empty + stage * 8, H::kCluster == 1 ? rank_in_cluster() : thread);
  };
  int before = -1;
  for (; count > 0; --count, turn.next()) {
    wait_barrier(full + turn.stage * 8, turn.parity);
    const uint32_t stage = stages + turn.stage * H::kStageBytes;
    const uint64_t a = describe<kTransposedA>(stage + warpgroup * 64 * kRow);
    const uint64_t b = describe<kTransposedB>(stage + H::kBytesA);
    pin(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < kStep / 16; ++i) {
      multiply_add<typename H::T, H::kN, kTransposedA, kTransposedB>(
          sums, a + i * kNext16<kTransposedA>, b + i * kNext16<kTransposedB>, before >= 0 || i > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    pin(sums);
    if (before >= 0) {  // The step before is done; this one goes on while the next is waited for.
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      release(before);
    }
    before = turn.stage;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  pin(sums);
  release(before);
}

// Puts sums where the other blocks of the cluster find them: in the stages, once all warpgroups have read the last.
template <class H>
__device__ __forceinline__ void store_to_cluster(float* shared, int row, const float (&sums)[H::kN / 2]) {
  asm volatile("bar.sync 1, %0;" ::"n"(H::kConsumers * kWarpgroup) : "memory");
  float* to = shared + row * H::kSumsStride + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < H::kN / 8; ++j) {
    store_vector<float, 2>(to + j * 8, sums + j * 4);
    store_vector<float, 2>(to + 8 * H::kSumsStride + j * 8, sums + j * 4 + 2);
  }
}

template <class H>
__device__ __forceinline__ void consume(
    const Product<typename H::T, float>& product, Transposed transposed, const Tiling& tiling, bool split_in_cluster,
    unsigned char* shared, uint32_t stages, uint32_t full, uint32_t empty, int rank) {
  const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
  Turn<H::kStages> turn;
  for (int64_t index = blockIdx.x / H::kCluster; index < tiling.count(); index += gridDim.x / H::kCluster) {
    const Place at = place(tiling, index, split_in_cluster);
    float sums[H::kN / 2];
    if (transposed.a) {
      transposed.b ? add_steps<H, true, true>(sums, turn, at.end - at.begin, stages, full, empty)
                   : add_steps<H, true, false>(sums, turn, at.end - at.begin, stages, full, empty);
    } else {
      transposed.b ? add_steps<H, false, true>(sums, turn, at.end - at.begin, stages, full, empty)
                   : add_steps<H, false, false>(sums, turn, at.end - at.begin, stages, full, empty);
    }
    const int in_tile = warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    if (split_in_cluster) {
      store_to_cluster<H>(reinterpret_cast<float*>(shared), in_tile, sums);
    } else {
      store<H>(product, at, (at.m * H::kCluster + rank) * H::kM + in_tile, at.n * H::kN, sums);
    }
  }
}

#endif

// Where there are splits and no memory for partial sums, the blocks of a cluster are the splits of one tile.
template <class H>
__global__ void __launch_bounds__(H::kThreads, H::kBlocks) hopper_kernel(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
    const __grid_constant__ Product<typename H::T, float> product, const __grid_constant__ Tiling tiling,
    Transposed transposed) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char shared[];
  const uint32_t start = shared_address(shared), stages = (start + 1023) / 1024 * 1024;
  const uint32_t full = stages + H::kStages * H::kStageBytes, empty = full + H::kStages * 8;
  const int rank = H::kCluster == 1 ? 0 : rank_in_cluster(), splits = static_cast<int>(tiling.splits());
  const bool split_in_cluster = H::kCluster == 1 && splits > 1 && product.partial == nullptr;
  if (threadIdx.x == 0) {
    for (int s = 0; s < H::kStages; ++s) {
      init_barrier(full + s * 8, 1);
      init_barrier(empty + s * 8, H::kConsumers * H::kCluster);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  H::kCluster == 1 ? __syncthreads() : sync_cluster();
  wait_for_kernel_before();
  if (threadIdx.x >= H::kConsumers * kWarpgroup) {
    if (threadIdx.x == H::kConsumers * kWarpgroup) {
      fill<H>(map_a, map_b, transposed, tiling, split_in_cluster, stages, full, empty, rank);
    }
  } else {
    consume<H>(product, transposed, tiling, split_in_cluster, shared + (stages - start), stages, full, empty, rank);
  }
  __syncwarp();
  if (split_in_cluster) {
    store_of_cluster<H::kM, H::kN, H::kSumsStride>(
        product, place(tiling, blockIdx.x, true), splits, reinterpret_cast<const float*>(shared + (stages - start)));
  } else if (H::kCluster > 1) {
    sync_cluster();  // The other block may still write here, and arrive at these barriers.
  }
#endif
}

// From the driver at run time, so that the library needs no libcuda.so.
inline auto tensor_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    const bool there = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(there ? function : nullptr);
  }();
  return encode;
}

template <class T>
bool encode(const Factor<T>& factor, bool transposed, int64_t rows, int64_t k, int box_rows, CUtensorMap* map) {
  const cuuint64_t sizes[2] = {
      static_cast<cuuint64_t>(transposed ? rows : k), static_cast<cuuint64_t>(transposed ? k : rows)};
  const cuuint64_t stride = (transposed ? factor.inner : factor.outer) * sizeof(T);
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(transposed ? kStep : box_rows)}, steps[2] = {1, 1};
  const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto function = tensor_map_encoder();
  return function != nullptr &&
         function(
             map, type, 2, const_cast<T*>(factor.data), sizes, &stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class T, int kTile>
void multiply(Launch& launch, const Product<T, float>& product, const Tiling& tiling, int processors) {
  using H = Hopper<T, kTile>;
  const Transposed transposed{product.a.inner != 1, product.b.inner != 1};
  CUtensorMap map_a, map_b;
  if (!encode(product.a, transposed.a, product.m, product.k, H::kM, &map_a) ||
      !encode(product.b, transposed.b, product.n, product.k, H::kN / H::kCluster, &map_b)) {
    fail("matmul", "the driver can't describe the matrices to the GPU");
  }
  const bool split_in_cluster = H::kCluster == 1 && tiling.splits() > 1 && product.partial == nullptr;
  const int64_t clusters =
      split_in_cluster ? tiling.count() : std::min<int64_t>(tiling.count(), processors / H::kCluster * H::kBlocks);
  launch.clusters(
      hopper_kernel<H>, clusters * H::kCluster, split_in_cluster ? static_cast<int>(tiling.splits()) : H::kCluster,
      H::kThreads, H::kSharedBytes, true, map_a, map_b, product, tiling, transposed);
}

// Whether the current device runs code for architecture 9.0a: it is of 9.0, and the library has such code.
inline bool has_code() {
  using H = Hopper<__half, 0>;
  cudaFuncAttributes code;
  const cudaError_t error = cudaFuncGetAttributes(&code, hopper_kernel<H>);
  cudaGetLastError();
  return error == cudaSuccess && code.numRegs > H::kN / 2;  // It has so many sums; code for others is empty.
}

// Whether the tensor memory accelerator can read a factor of `rows` rows as it lies.
template <class T>
bool reads(const Factor<T>& factor, int64_t rows, int64_t k) {
  if (reinterpret_cast<uintptr_t>(factor.data) % 16 != 0) return false;
  auto is_stride = [](int64_t stride, int64_t size) {
    return stride % 8 == 0 && stride >= size && stride < (1ll << 38);
  };
  return factor.inner == 1 ? is_stride(factor.outer, k) : factor.outer == 1 && is_stride(factor.inner, rows);
}

}  // namespace extension_cpp::matmul::hopper
