// The product of float32 on Hopper's tensor cores, as exact as by fused multiply-adds: an element is a sum of three
// bfloat16s, which hold its 24 bits, and a product of two elements one of six products of those.
//
// Two numbers: a tile of 128 by 128 takes 6 * 32,768 operations of bfloat16 and 1,536 bytes a step of k.
//
// With a = a0 + a1 + a2, where a1 is at most 2^-8 of a and a2 2^-16, what is left out, as a1 * b2, is at most 2^-25 of
// a * b: less than rounding a product takes. Tensor cores cut sums off where fused multiply-adds round them; so that
// this doesn't add up, they sum over 64 of k, the smallest products first, and ordinary additions do the rest.
#pragma once

#include "copies.cuh"
#include "hopper.cuh"

namespace extension_cpp::matmul {

// Parts of a factor: part p of element (i, k) at to[(p * rows + i) * stride + k].
struct Parts {
  Factor<float> from;
  int64_t rows, k, stride;
  __nv_bfloat16* to;

  static constexpr int kRows = 32, kColumns = 64;
  __host__ __device__ int64_t blocks() const { return ceil_div(rows, kRows) * ceil_div(k, kColumns); }
};

static __global__ void __launch_bounds__(kCopyThreads) split_kernel(Parts a, Parts b) {
  __shared__ float square[Parts::kRows][Parts::kColumns + 1];
  const int64_t blocks_a = a.blocks();
  const bool is_a = blockIdx.x < blocks_a;
  const Parts parts = is_a ? a : b;
  const int64_t block = is_a ? blockIdx.x : blockIdx.x - blocks_a, across = ceil_div(parts.k, Parts::kColumns);
  const int64_t first_row = block / across * Parts::kRows, first_k = block % across * Parts::kColumns;
  const bool along_k = parts.from.inner <= parts.from.outer;
  const int row = threadIdx.x / 8, k = threadIdx.x % 8 * 8;
  float left[8];
  // What a thread takes on lies there in vectors, or else comes by shared memory.
  const bool vectors = parts.from.inner == 1 && parts.from.outer % 4 == 0 && parts.k % 8 == 0 &&
                       reinterpret_cast<uintptr_t>(parts.from.data) % 16 == 0;
  if (vectors) {
    if (first_row + row >= parts.rows || first_k + k >= parts.k) return;
    const auto* from =
        reinterpret_cast<const float4*>(parts.from.data + (first_row + row) * parts.from.outer + first_k + k);
    const float4 halves[2] = {from[0], from[1]};
    memcpy(left, halves, sizeof(left));
  } else {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int at = c * kCopyThreads + threadIdx.x;
      const int i = along_k ? at / Parts::kColumns : at % Parts::kRows;
      const int j = along_k ? at % Parts::kColumns : at / Parts::kRows;
      const bool valid = first_row + i < parts.rows && first_k + j < parts.k;
      square[i][j] =
          valid ? parts.from.data[(first_row + i) * parts.from.outer + (first_k + j) * parts.from.inner] : 0.0f;
    }
    __syncthreads();
    if (first_row + row >= parts.rows || first_k + k >= parts.stride) return;
#pragma unroll
    for (int e = 0; e < 8; ++e) left[e] = square[row][k + e];
  }
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    __nv_bfloat16* to = parts.to + (p * parts.rows + first_row + row) * parts.stride + first_k + k;
    store_vector<__nv_bfloat16, 8>(to, left);
#pragma unroll
    for (int e = 0; e < 8; ++e) left[e] -= __bfloat162float(__float2bfloat16_rn(left[e]));
  }
}

namespace hopper {

template <int kCluster_>
struct Split {
  using T = __nv_bfloat16;
  static constexpr int kM = 128, kN = 128, kCluster = kCluster_, kConsumers = 2, kStages = 2, kParts = 3;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kBytesA = kM * kRow, kBytesB = kN * kRow, kStageBytes = kParts * (kBytesA + kBytesB);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class H>
__device__ __forceinline__ void fill_parts(
    const CUtensorMap& map_a, const CUtensorMap& map_b, const Product<float, float>& product, const Role<H>& role) {
  constexpr int kShare = H::kN / H::kCluster;
  const Stages& stages = role.stages;
  Tiles<H> tiles = role.tiles;
  Turn turn{stages.memory};
  const int from = H::kCluster == 1 ? 0 : rank_in_cluster() * kShare;
  do {
    int k = tiles.begin * kStep;
    for (int count = tiles.steps; count > 0; --count, k += kStep, turn.next()) {
      const uint32_t barrier = stages.full(turn.stage), stage = stages.start + turn.stage * H::kStageBytes;
      wait_barrier(stages.empty(turn.stage), turn.parity ^ 1);
      expect_bytes(barrier, H::kStageBytes);
#pragma unroll
      for (int p = 0; p < H::kParts; ++p) {
        copy_box<false>(stage + p * H::kBytesA, map_a, k, p * static_cast<int>(product.m) + tiles.row, 0, barrier);
        copy_box<H::kCluster == 2>(
            stage + H::kParts * H::kBytesA + p * H::kBytesB + from * kRow, map_b, k,
            p * static_cast<int>(product.n) + tiles.column + from, 0, barrier);
      }
    }
  } while (tiles.next());
}

// Of what a thread has stored of a group of columns.
__device__ inline void restore_group(const Product<float, float>& product, int64_t row, int64_t column) {
#pragma unroll 1
  for (int e = 0; e < 4; ++e) restore_infinite(product, row + e / 2 * 8, column + e % 2);
}

template <class H>
__device__ __forceinline__ void consume_parts(const Product<float, float>& product, const Role<H>& role) {
  const int warpgroup = threadIdx.x / kWarpgroup;
  const Stages& stages = role.stages;
  Tiles<H> tiles = role.tiles;
  Turn turn{stages.memory};
  do {
    float totals[H::kN / 2] = {};
    for (int count = tiles.steps; count > 0; --count, turn.next()) {
      float sums[H::kN / 2];
      wait_barrier(stages.full(turn.stage), turn.parity);
      const uint32_t stage = stages.start + turn.stage * H::kStageBytes;
      pin(sums);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      constexpr int kOrder[6][2] = {{2, 0}, {1, 1}, {0, 2}, {1, 0}, {0, 1}, {0, 0}};
#pragma unroll
      for (int o = 0; o < 6; ++o) {
        const uint64_t a = describe<false>(stage + kOrder[o][0] * H::kBytesA + warpgroup * 64 * kRow);
        const uint64_t b = describe<false>(stage + H::kParts * H::kBytesA + kOrder[o][1] * H::kBytesB);
#pragma unroll
        for (int i = 0; i < kStep / 16; ++i) {
          multiply_add<typename H::T, H::kN, false, false>(
              sums, a + i * kNext16<false>, b + i * kNext16<false>, o > 0 || i > 0);
        }
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      pin(sums);
      release<H>(stages, turn.stage);
#pragma unroll
      for (int i = 0; i < H::kN / 2; ++i) totals[i] += sums[i];
    }
    const int64_t row = tiles.row + row_in_tile(), column = tiles.column + threadIdx.x % 4 * 2;
    if (role.split_in_cluster) {
      add_of_cluster<H>(totals, role.share(), stages, [&](int j, const float* added) {
        store_group(product, row, tiles.column + j * 8, added);
        restore_group(product, row, column + j * 8);
      });
      continue;
    }
    store_sums<2>(product, tiles.split, [&](const auto& store) {
#pragma unroll
      for (int j = 0; j < H::kN / 8; ++j) {
        store(row, column + j * 8, totals + j * 4);
        store(row + 8, column + j * 8, totals + j * 4 + 2);
      }
    });
    if (product.partial != nullptr) continue;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < H::kN / 2; ++i) finite = finite && isfinite(totals[i]);
    if (finite) continue;
#pragma unroll 1
    for (int j = 0; j < H::kN / 8; ++j) restore_group(product, row, column + j * 8);
  } while (tiles.next());
}

#endif

template <class H>
__global__ void __launch_bounds__(H::kThreads, 1) split_product_kernel(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
    const __grid_constant__ Product<float, float> product, const __grid_constant__ Tiling tiling,
    const __grid_constant__ Memory memory) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char shared[];
  const Role<H> role(shared, memory, tiling, product.partial != nullptr);
  if (role.computes()) {
    consume_parts<H>(product, role);
  } else if (role.copies()) {
    fill_parts<H>(map_a, map_b, product, role);
  }
  role.end();
#endif
}

template <class H>
void run_split(
    Launch& launch, const Product<float, float>& product, const Tiling& tiling, const Factor<__nv_bfloat16>& parts_a,
    const Factor<__nv_bfloat16>& parts_b, int processors) {
  CUtensorMap map_a, map_b;
  if (!encode(parts_a, {}, 3 * product.m, product.k, H::kM, &map_a) ||
      !encode(parts_b, {}, 3 * product.n, product.k, H::kN / H::kCluster, &map_b)) {
    fail("matmul", "the driver can't describe the matrices to the GPU");
  }
  constexpr Memory kMemory{H::kStages * H::kStageBytes, H::kStages};
  const bool in_cluster = H::kCluster == 1 && tiling.splits() > 1 && product.partial == nullptr;
  const int64_t clusters = in_cluster ? tiling.count() : std::min<int64_t>(tiling.count(), processors / H::kCluster);
  launch.clusters(
      split_product_kernel<H>, clusters * H::kCluster, in_cluster ? static_cast<int>(tiling.splits()) : H::kCluster,
      H::kThreads, kAlignment + kMemory.bytes + kBarrierBytes, false, map_a, map_b, product, tiling, kMemory);
}

constexpr int64_t kBytesOfParts = 3 * sizeof(__nv_bfloat16);

inline Plan plan_split(int64_t m, int64_t n, int64_t k, const Device& device) {
  constexpr TileModel kModels[] = {
      {256, 128, kStep, 4, 1, 1121, 4, Split<2>::kCluster}, {128, 128, kStep, 4, 1, 577, 4}};
  constexpr Costs kCosts{1745, 228, 3986, 1369, 2544, 3205, 247};
  constexpr double kStart = 7400, kBytesOfDevice = 2925;
  Plan chosen = plan(kModels, kCosts, m, n, k, kBytesOfParts, device, AddUp::kInCluster);
  chosen.nanoseconds += kStart + static_cast<double>(m + n) * k * (sizeof(float) + kBytesOfParts) / kBytesOfDevice;
  return chosen;
}

inline void multiply_split(
    Launch& launch, const View& like, const Product<float, float>& product, const Device& device) {
  constexpr int64_t kMostBytes = 1 << 30;  // of the parts of a factor, more of which take turns
  const int64_t stride = ceil_div(product.k, 8) * 8;
  const int64_t most = std::max<int64_t>(kMostBytes / (stride * kBytesOfParts) / 256, 1) * 256;
  const int64_t rows = std::min(product.m, most), columns = std::min(product.n, most);
  Tensor memory = scratch(like, (rows + columns) * stride * kBytesOfParts);
  auto* parts_a = static_cast<__nv_bfloat16*>(memory.mutable_data_ptr());
  auto* parts_b = parts_a + 3 * rows * stride;
  for (int64_t i = 0; i < product.m; i += rows) {
    for (int64_t j = 0; j < product.n; j += columns) {
      Product<float, float> block = product;
      block.m = std::min(rows, product.m - i), block.n = std::min(columns, product.n - j);
      block.a.data += i * product.a.outer, block.b.data += j * product.b.outer;
      block.c += i * product.c_outer + j * product.c_inner;
      const Parts a{block.a, j == 0 ? block.m : 0, product.k, stride, parts_a};
      const Parts b{block.b, block.n, product.k, stride, parts_b};
      launch(split_kernel, a.blocks() + b.blocks(), kCopyThreads, 0, a, b);
      const Plan chosen = plan_split(block.m, block.n, block.k, device);
      with_splits(launch, like, block, device, chosen, [&](const Product<float, float>& p, const Plan& plan) {
        auto* run = plan.shape == 0 ? run_split<Split<2>> : run_split<Split<1>>;
        run(launch, p, plan.tiling, {parts_a, stride, 1}, {parts_b, stride, 1}, device.processors);
      });
    }
  }
}

}  // namespace hopper

}  // namespace extension_cpp::matmul
