// The product of float32 on Hopper's tensor cores, as exact as by fused multiply-adds: an element is a sum of three
// bfloat16s, which hold its 24 bits, and a product of two elements one of six products of those.
//
// Two numbers: a tile of 128 by 128 takes 6 * 32,768 operations of bfloat16 and 1,280 bytes a step of k.
//
// The factor with fewer rows is split by a kernel of its own, as all tiles read it. The other is split on the way:
// threads read float32 from shared memory, and wgmma takes the parts from their registers. So a product of few rows by
// a large matrix reads that once, and writes no parts of it.
//
// With a = a0 + a1 + a2, where a1 is at most 2^-8 of a and a2 2^-16, what is left out, as a1 * b2, is at most 2^-25 of
// a * b: less than rounding a product takes. Tensor cores cut sums off where fused multiply-adds round them; so that
// this doesn't add up, they sum over 32 of k, the smallest products first, and ordinary additions do the rest.
#pragma once

#include "copies.cuh"
#include "hopper.cuh"

namespace extension_cpp::matmul {

// Parts of a factor: part p of element (i, k) at to[(p * rows + i) * stride + k].
struct Parts {
  Factor<float> from;
  int64_t rows, k, stride;
  __nv_bfloat16* to;

  static constexpr int kCount = 3, kRows = 32, kColumns = 64;
  __host__ __device__ int64_t blocks() const { return ceil_div(rows, kRows) * ceil_div(k, kColumns); }
};

static __global__ void __launch_bounds__(kCopyThreads) split_kernel(Parts parts) {
  __shared__ float square[Parts::kRows][Parts::kColumns + 1];
  const int64_t across = ceil_div(parts.k, Parts::kColumns);
  const int64_t first_row = blockIdx.x / across * Parts::kRows, first_k = blockIdx.x % across * Parts::kColumns;
  const bool along_k = parts.from.inner <= parts.from.outer;
  const int row = threadIdx.x / 8, k = threadIdx.x % 8 * 8;
  float left[8];
  start_kernel_behind();
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
  for (int p = 0; p < Parts::kCount; ++p) {
    __nv_bfloat16* to = parts.to + (p * parts.rows + first_row + row) * parts.stride + first_k + k;
    store_vector<__nv_bfloat16, 8>(to, left);
#pragma unroll
    for (int e = 0; e < 8; ++e) left[e] -= __bfloat162float(__float2bfloat16_rn(left[e]));
  }
}

namespace hopper {

// A tile of 128 rows, of which a warp splits 16, by kN of the other factor. A step is a row of 128 bytes of float32,
// and one of 64 of parts.
template <int kN_>
struct Split {
  using V = float;
  static constexpr int kM = 128, kN = kN_, kK = kInRow<float>, kCluster = 1;
  static constexpr int kComputing = 2 * kWarpgroup, kThreads = kComputing + kWarpgroup;
  static constexpr int kGroup = kWarpgroup, kSums = kN / 2;
  static constexpr int kBytesA = kM * kRow, kBytesB = kN * kRow / 2;
  static constexpr int kStageBytes = kBytesA + Parts::kCount * kBytesB, kStages = kSharedBytes / kStageBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The boxes of the rows, and of the parts of the other factor, which another kernel makes.
template <class H>
struct BoxesOfParts {
  const CUtensorMap &map_rows, &map_parts;
  Layout layout;
  int rows_of_part;
  bool is_first;
  int column, k;
  Boxes<false, H::kM, H::kK> rows;

  __device__ __forceinline__ void start(const Tiles<H>& tiles) {
    column = tiles.column, k = tiles.begin * H::kK;
    rows.start(layout, tiles.row, k);
  }
  __device__ __forceinline__ void copy(uint32_t to, uint32_t barrier) {
    rows.copy(to, map_rows, layout, barrier);
    if (is_first) wait_for_kernel_before(), is_first = false;
#pragma unroll
    for (int p = 0; p < Parts::kCount; ++p) {
      copy_box<false>(to + H::kBytesA + p * H::kBytesB, map_parts, k, p * rows_of_part + column, 0, barrier);
    }
    k += H::kK;
  }
};

// The parts of 64 rows over 16 of k, as the threads of a warpgroup pass them to wgmma: a thread has two neighbouring
// rows, and of each two times two neighbours along k, eight apart.
using SplitRows = uint32_t[Parts::kCount][4];

// Where a thread reads them in a stage: in one line of 128 bytes and in the next, whose vectors of 16 bytes are
// swizzled otherwise. A line has elements of a row, side by side along k, or if transposed, of 32 rows at one k.
template <class H, bool kTransposed>
struct PlaceInRows {
  uint32_t own;

  __device__ PlaceInRows() {
    const int warp = threadIdx.x / 32, r = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    if (kTransposed) {
      own = warp / 2 * H::kK * kRow + 2 * q * kRow + ((warp % 2 * 4 + r / 2) ^ (2 * q)) * 16 + r % 2 * 8;
    } else {
      own = (warp * 16 + 2 * r) * kRow + ((q / 2) ^ (2 * r % 8)) * 16 + q % 2 * 8;
    }
  }

  // Reads and splits what is at 16 * `i` along k.
  __device__ __forceinline__ void split(uint32_t stage, int i, SplitRows& parts) const {
    float2 pairs[2][2];  // of row `e`, from neighbour 8 * `half` along k on
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 read[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t at = stage + own + e * kRow;
        if (kTransposed) {
          read[e] = load_pair((at ^ (e * 16)) + (i * 16 + half * 8) * kRow);
        } else {
          read[e] = load_pair(at ^ (e * 16 + i * 64 + half * 32));
        }
      }
      pairs[0][half] = kTransposed ? float2{read[0].x, read[1].x} : read[0];
      pairs[1][half] = kTransposed ? float2{read[0].y, read[1].y} : read[1];
    }
#pragma unroll
    for (int p = 0; p < Parts::kCount; ++p) {
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        float2& left = pairs[at % 2][at / 2];
        const __nv_bfloat162 part = __floats2bfloat162_rn(left.x, left.y);
        memcpy(&parts[p][at], &part, sizeof(part));
        left.x -= __uint_as_float(parts[p][at] << 16), left.y -= __uint_as_float(parts[p][at] & 0xffff0000);
      }
    }
  }
};

// A tile's sums, of so many steps. What is multiplied next is split meanwhile.
template <class H, bool kTransposed>
__device__ __forceinline__ void add_parts(float (&totals)[H::kN / 2], Turn& turn, int count, const Stages& stages) {
  using OfStep = SplitRows[H::kK / 16];
  const PlaceInRows<H, kTransposed> place;
  const auto split = [&](OfStep& parts) {
    wait_barrier(stages.full(turn.stage), turn.parity);
#pragma unroll
    for (int i = 0; i < H::kK / 16; ++i) place.split(stages.start + turn.stage * H::kStageBytes, i, parts[i]);
  };
  const auto step = [&](const OfStep& parts, OfStep& next) {
    const int stage = turn.stage;
    float sums[H::kN / 2];
    pin(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    constexpr int kOrder[6][2] = {{2, 0}, {1, 1}, {0, 2}, {1, 0}, {0, 1}, {0, 0}};
#pragma unroll
    for (int o = 0; o < 6; ++o) {
      const uint64_t b =
          describe<false, kRow / 2>(stages.start + stage * H::kStageBytes + H::kBytesA + kOrder[o][1] * H::kBytesB);
#pragma unroll
      for (int i = 0; i < H::kK / 16; ++i) {
        multiply_add<H::kN>(sums, parts[i][kOrder[o][0]], b + i * kNext16<false>, o > 0 || i > 0);
      }
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    turn.next();
    if (count > 1) split(next);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    pin(sums);
    release<H>(stages, stage);
#pragma unroll
    for (int i = 0; i < H::kN / 2; ++i) totals[i] += sums[i];
  };
  OfStep even, odd;
  split(even);
  while (true) {
    step(even, odd);
    if (--count == 0) break;
    step(odd, even);
    if (--count == 0) break;
  }
}

template <class H>
__device__ __forceinline__ void consume_parts(
    const Product<float, float>& product, bool flipped, bool transposed, const Role<H>& role) {
  const Stages& stages = role.stages;
  Tiles<H> tiles = role.tiles;
  Turn turn{stages.memory};
  do {
    float totals[H::kN / 2] = {};
    if (transposed) {
      add_parts<H, true>(totals, turn, tiles.steps, stages);
    } else {
      add_parts<H, false>(totals, turn, tiles.steps, stages);
    }
    const int row = tiles.row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 * 2;
    const int column = tiles.column + threadIdx.x % 4 * 2;
    const auto store_group = [&](int j, const float* sums, const auto& store) {
      const float across[4] = {sums[0], sums[2], sums[1], sums[3]};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (flipped) {
          store(column + j * 8 + e, row, across + e * 2);
        } else {
          store(row + e, column + j * 8, sums + e * 2);
        }
      }
    };
    const auto restore_group = [&](int j) {
#pragma unroll 1
      for (int e = 0; e < 4; ++e) {
        const int64_t r = row + e / 2, c = column + j * 8 + e % 2;
        restore_infinite(product, flipped ? c : r, flipped ? r : c);
      }
    };
    if (role.split_in_cluster) {
      add_of_cluster<H>(totals, role.share(), stages, [&](int j, const float* added) {
        store_sums<2>(product, 0, [&](const auto& store) { store_group(j, added, store); });
        restore_group(j);
      });
      continue;
    }
    store_sums<2>(product, tiles.split, [&](const auto& store) {
#pragma unroll
      for (int j = 0; j < H::kN / 8; ++j) store_group(j, totals + j * 4, store);
    });
    if (product.partial != nullptr) continue;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < H::kN / 2; ++i) finite = finite && isfinite(totals[i]);
    if (finite) continue;
#pragma unroll 1
    for (int j = 0; j < H::kN / 8; ++j) restore_group(j);
  } while (tiles.next());
}

#endif

// With `flipped`, the rows of b are those that are split on the way, and the result's columns.
template <class H>
__global__ void __launch_bounds__(H::kThreads, 1) split_product_kernel(
    const __grid_constant__ TileOrder order, const __grid_constant__ Memory memory, const Layout layout, bool flipped,
    const __grid_constant__ Product<float, float> product, const __grid_constant__ CUtensorMap map_rows,
    const __grid_constant__ CUtensorMap map_parts) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kAlignment) unsigned char shared[];
  const Role<H> role(shared, memory, order);
  const int rows_of_part = static_cast<int>(flipped ? product.m : product.n);
  Copies<H, BoxesOfParts<H>> copies(role, {map_rows, map_parts, layout, rows_of_part, true});
  role.begin([&] { copies.step(); });
  if (role.computes()) {
    take_registers<232>();
    consume_parts<H>(product, flipped, layout.transposed, role);
  } else {
    leave_registers<kOfCopying>();
    if (role.copies()) copies.rest();
  }
  role.end();
#endif
}

template <class H>
void run_split(
    Launch& launch, const Product<float, float>& product, bool flipped, const Tiling& tiling, const Factor<float>& rows,
    const Factor<__nv_bfloat16>& parts, int processors) {
  CUtensorMap map_rows, map_parts;
  const int64_t count = flipped ? product.n : product.m, others = flipped ? product.m : product.n;
  const bool once = tiling.tiles_n == 1 && is_streamed(rows, count, product.k, kRow);
  const Layout layout{rows.inner != 1, false, once};
  if (!encode(rows, layout, count, product.k, H::kM, &map_rows, H::kK) ||
      !encode(parts, {}, Parts::kCount * others, product.k, H::kN, &map_parts, H::kK)) {
    fail("matmul", "the driver can't describe the matrices to the GPU");
  }
  constexpr Memory kMemory{H::kStages * H::kStageBytes, H::kStages};
  const bool in_cluster = tiling.splits() > 1 && product.partial == nullptr;
  const int64_t blocks = in_cluster ? tiling.count() : std::min<int64_t>(tiling.count(), processors);
  launch.clusters(
      split_product_kernel<H>, blocks, in_cluster ? static_cast<int>(tiling.splits()) : 1, H::kThreads,
      kMemory.bytes + kBarrierBytes, true, TileOrder(tiling, in_cluster), kMemory, layout, flipped, product, map_rows,
      map_parts);
}

constexpr int64_t kBytesOfParts = Parts::kCount * sizeof(__nv_bfloat16);

// Of a factor of `rows` rows that is split on the way, and one of `others` that is split before.
inline Plan plan_split(int64_t rows, int64_t others, int64_t k, const Device& device) {
  constexpr TileModel kModels[] = {{128, 128, Split<128>::kK, 8, 1, 541, 8}, {128, 64, Split<64>::kK, 8, 1, 416, 8}};
  constexpr Costs kCosts{3570, 95, 16255, 4526, 20450, 0, 293, 624};
  constexpr double kStart = 5894, kBytesOfSplit = 1996;
  return remembered(rows, others, k, device, [&] {
    Plan chosen = plan(kModels, kCosts, rows, others, k, sizeof(float), device, true);
    chosen.nanoseconds += kStart + static_cast<double>(others) * k * (sizeof(float) + kBytesOfParts) / kBytesOfSplit;
    return chosen;
  });
}

inline Plan plan_split(const Product<float, float>& product, const Device& device) {
  return plan_split(std::max(product.m, product.n), std::min(product.m, product.n), product.k, device);
}

inline void multiply_split(Launch& launch, const View& like, const Product<float, float>& given, const Device& device) {
  // Rows of the result lie side by side.
  const Product<float, float> product = given.c_inner == 1 ? given : given.swapped();
  const bool flipped = product.n > product.m;
  const Factor<float>&rows = flipped ? product.b : product.a, &others = flipped ? product.a : product.b;
  const int64_t row_count = std::max(product.m, product.n), other_count = std::min(product.m, product.n);
  const int64_t stride = ceil_div(product.k, 8) * 8;
  // Of copies and parts that take more memory, some rows at a time.
  const auto most_of = [&](int64_t count, int64_t bytes) {
    constexpr int64_t kMostBytes = 1 << 30, kTile = 128;
    return std::min(count, std::max<int64_t>(kMostBytes / (stride * bytes) / kTile, 1) * kTile);
  };
  const bool as_it_is = reads(rows, row_count, product.k);
  const int64_t most_rows = as_it_is ? row_count : most_of(row_count, sizeof(float));
  const int64_t most_others = most_of(other_count, kBytesOfParts);
  Tensor memory = scratch(like, most_others * stride * kBytesOfParts);
  auto* to = static_cast<__nv_bfloat16*>(memory.mutable_data_ptr());
  const auto from = [](const Factor<float>& factor, int64_t row) {
    return Factor<float>{factor.data + row * factor.outer, factor.outer, factor.inner};
  };
  for (int64_t i = 0; i < row_count; i += most_rows) {
    Factor<float> block_rows = from(rows, i);
    const int64_t count = std::min(most_rows, row_count - i);
    std::optional<Tensor> copy;
    if (!as_it_is) block_rows = copied(launch, like, block_rows, count, product.k, rows.outer == 1, copy);
    for (int64_t j = 0; j < other_count; j += most_others) {
      Product<float, float> block = product;
      const int64_t others_here = std::min(most_others, other_count - j);
      (flipped ? block.n : block.m) = count, (flipped ? block.m : block.n) = others_here;
      (flipped ? block.b : block.a) = from(rows, i), (flipped ? block.a : block.b) = from(others, j);
      block.c += (flipped ? j : i) * product.c_outer + (flipped ? i : j) * product.c_inner;
      const Parts parts{from(others, j), others_here, product.k, stride, to};
      launch(split_kernel, parts.blocks(), kCopyThreads, 0, parts);
      // The bits don't depend on whether there is a copy.
      Plan chosen = plan_split(row_count, others_here, product.k, device);
      chosen.tiling.tiles_m = ceil_div(count, Split<128>::kM);
      with_splits(launch, like, block, device, chosen, [&](const Product<float, float>& p, const Plan& plan) {
        auto* run = plan.shape == 0 ? run_split<Split<128>> : run_split<Split<64>>;
        run(launch, p, flipped, plan.tiling, block_rows, {to, stride, 1}, device.processors);
      });
    }
  }
}

}  // namespace hopper

}  // namespace extension_cpp::matmul
