// The product of float64 on Hopper: the tensor memory accelerator copies tiles into shared memory, as for halves, and
// warps read them from there into registers, and multiply them by mma.sync.
//
// Two numbers: a tile of 64 by 128 takes 8,192 operations and 1,536 bytes a step of k; eight warps have 32 by 32 of it
// each, 32 sums a thread.
#pragma once

#include "dmma.cuh"
#include "hopper.cuh"

namespace extension_cpp::matmul {
namespace hopper {

// A tile of kM by kN, of which a warp has kRows by kColumns; a multiprocessor holds kBlocks of them.
template <int kM_, int kN_, int kRows_, int kColumns_, int kBlocks_>
struct Doubles {
  using T = double;
  using V = double;
  static constexpr int kM = kM_, kN = kN_, kK = kInRow<T>, kRows = kRows_, kColumns = kColumns_, kBlocks = kBlocks_;
  static constexpr int kCluster = 1, kGroup = 32, kWarpsN = kN / kColumns, kSums = kRows * kColumns / 32;
  static constexpr int kComputing = 32 * (kM / kRows) * kWarpsN, kThreads = kComputing + kWarpgroup;
  static constexpr int kBytesA = kM * kRow, kStageBytes = kBytesA + kN * kRow, kOutBytes = 0;
  // Threads start with equal shares of what a multiprocessor has, a multiple of eight.
  static constexpr int kAtStart = 64 * 1024 / (kThreads * kBlocks) / 8 * 8;
  static constexpr int kRegisters = (kAtStart * kThreads - kOfCopying * kWarpgroup) / kComputing / 8 * 8;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where a lane has elements of a factor in a stage: of 16 rows two, of four k's one. A line of 128 bytes has elements
// of a row, side by side along k, or if transposed, of 16 rows at one k, in vectors of 16 bytes that are swizzled.
// Which rows a lane has is such that half a warp reads from different banks, and that sums of 4 neighbours fill
// sectors.
struct PlaceOfDoubles {
  bool transposed;
  int next_row;          // how far a lane's second row is from its first
  uint32_t first[2][4];  // of either row, and of a group of four k's: bytes from the first of the 16 rows on

  // The first of the two rows that are number `r` of eight in an instruction.
  __device__ int row(int r) const {
    const int half = r % 2, pair = r / 2 % 2 * 2 + r / 4;
    return transposed ? r % 2 + r / 2 % 2 * 8 + r / 4 * 2 : half * 8 + (pair ^ half) * 2;
  }

  __device__ explicit PlaceOfDoubles(bool transposed) : transposed(transposed), next_row(transposed ? 4 : 1) {
#pragma unroll
    for (int second = 0; second < 2; ++second) {
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        const int at = row(threadIdx.x % 32 / 4) + second * next_row, k = group * 4 + threadIdx.x % 4;
        const int line = transposed ? k : at, element = transposed ? at : k;
        first[second][group] = line * kRow + ((element / 2) ^ (line % 8)) * 16 + element % 2 * 8;
      }
    }
  }
};

// A tile's sums, of so many steps. Elements are read while those before are multiplied: those of a are in registers
// twice, and those of b are read where the last product took them from.
template <class H>
__device__ __forceinline__ void add_steps(
    double (&sums)[H::kSums], Turn& turn, int count, const Stages& stages, const PlaceOfDoubles& place_a,
    const PlaceOfDoubles& place_b) {
  constexpr int kDeep = 8, kGroups = kDeep / 4, kAcross = H::kColumns / 8, kDown = H::kRows / 16;
  static_assert(H::kK == 2 * kDeep);
  const int warp = threadIdx.x / 32;
  const uint32_t rows_a = stages.start + warp / H::kWarpsN * H::kRows * kRow;
  const uint32_t rows_b = stages.start + H::kBytesA + warp % H::kWarpsN * H::kColumns * kRow;
  double a[2][kDown][2 * kGroups], b[kAcross][kGroups];
  const auto fetch_a = [&](int half) {
#pragma unroll
    for (int e = 0; e < 2 * kGroups; ++e) {
      const uint32_t at = rows_a + turn.stage * H::kStageBytes + place_a.first[e % 2][half * kGroups + e / 2];
#pragma unroll
      for (int i = 0; i < kDown; ++i) a[half][i][e] = load_double(at + i * 16 * kRow);
    }
  };
  const auto fetch_b = [&](int half, int j) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint32_t at = rows_b + turn.stage * H::kStageBytes + place_b.first[j % 2][half * kGroups + g];
      b[j][g] = load_double(at + j / 2 * 16 * kRow);
    }
  };
  wait_barrier(stages.full(turn.stage), turn.parity);
  fetch_a(0);
#pragma unroll
  for (int j = 0; j < kAcross; ++j) fetch_b(0, j);
  int stage = 0;
  while (true) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 1) {
        stage = turn.stage;
        turn.next();
        if (--count > 0) wait_barrier(stages.full(turn.stage), turn.parity);  // Else nobody takes what is read.
      }
      fetch_a(1 - half);
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
#pragma unroll
        for (int i = 0; i < kDown; ++i) {
          matmul::multiply_add<kDeep>(sums + (i * kAcross + j) * 4, a[half][i], b[j]);
        }
        // All that was read of the stage has arrived, as it is multiplied: reads that are under way don't hold up
        // others from writing there.
        if (half == 1 && j == kAcross - 1) release<H>(stages, stage);
        fetch_b(1 - half, j);
      }
    }
    if (count == 0) break;
  }
}

template <int... kShape>
__device__ __forceinline__ void consume(
    const Product<double, double>& product, const CUtensorMap*, const Layouts& layouts,
    const Role<Doubles<kShape...>>& role) {
  using H = Doubles<kShape...>;
  const Stages& stages = role.stages;
  Tiles<H> tiles = role.tiles;
  Turn turn{stages.memory};
  const int warp = threadIdx.x / 32, q = threadIdx.x % 4;
  const PlaceOfDoubles place_a(layouts.a.transposed), place_b(layouts.b.transposed);
  wait_for_kernel_before();
  do {
    double sums[H::kSums] = {};
    add_steps<H>(sums, turn, tiles.steps, stages, place_a, place_b);
    if (!place_b.transposed) {  // Columns of two neighbouring fours become neighbours in one.
#pragma unroll
      for (int four = 0; four < H::kSums; four += 8) {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const double other = sums[four + e + 1];
          sums[four + e + 1] = sums[four + e + 4];
          sums[four + e + 4] = other;
        }
      }
    }
    const int row = tiles.row + warp / H::kWarpsN * H::kRows + place_a.row(threadIdx.x % 32 / 4);
    const int first = place_b.row(2 * q), column = tiles.column + warp % H::kWarpsN * H::kColumns + first;
    const int next_column = place_b.transposed ? place_b.next_row : place_b.row(2 * q + 1) - first;
    const auto store_four = [&](int four, const double* values, const auto& store) {
      constexpr int kAcross = H::kColumns / 8;
      const int i = four / kAcross, j = four % kAcross;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        store(row + i * 16 + e * place_a.next_row, column + j / 2 * 16 + j % 2 * next_column, values + e * 2);
      }
    };
    if (role.split_in_cluster) {
      add_of_cluster<H>(sums, role.share(), stages, [&](int four, const double* added) {
        store_sums<2>(product, 0, [&](const auto& store) { store_four(four, added, store); });
      });
    } else {
      store_sums<2>(product, tiles.split, [&](const auto& store) {
#pragma unroll
        for (int four = 0; four < H::kSums / 4; ++four) store_four(four, sums + four * 4, store);
      });
    }
  } while (tiles.next());
}

#endif

template <class H>
constexpr TileModel model_of(double rate) {
  return {H::kM, H::kN, H::kK, H::kComputing / 32, H::kBlocks, rate, 8};
}

// Factors that the memory accelerator can't read are multiplied by the other kernel, in the same parts of k.
inline void multiply_doubles(
    Launch& launch, const View& like, const Product<double, double>& product, const Device& device) {
  using Large = Doubles<64, 128, 32, 32, 1>;
  using Middle = Doubles<64, 64, 32, 32, 2>;
  using Lone = Doubles<64, 64, 32, 16, 1>;
  using Small = Doubles<32, 64, 16, 32, 3>;
  using Smallest = Doubles<32, 32, 16, 16, 3>;
  using Largest = Doubles<128, 128, 32, 64, 1>;
  using Narrow = Doubles<128, 16, 16, 16, 2>;
  using Wide = Doubles<96, 128, 48, 32, 1>;
  constexpr TileModel kModels[] = {
      model_of<Large>(248), model_of<Middle>(205), model_of<Lone>(222), model_of<Small>(204), model_of<Smallest>(152)};
  constexpr TileModel kOfSome[] = {model_of<Wide>(254)}, kOfLong[] = {model_of<Largest>(248)};
  constexpr TileModel kOfNarrow[] = {model_of<Narrow>(120)};
  constexpr Costs kCosts{1423, 129, 1e9, 8285, 1e9, 1525, 347, 297, 0.071};
  const int64_t most = std::max(product.m, product.n), least = std::min(product.m, product.n);
  // Few rows become columns of a narrow tile: other tiles would leave much of a stage empty.
  const bool narrow = least <= Narrow::kN && most > Middle::kM;
  const int64_t m = narrow ? most : product.m, n = narrow ? least : product.n, k = product.k;
  const auto plan_of = [&](const auto& models, int first) {
    Plan made = plan(models, kCosts, m, n, k, sizeof(double), device, true);
    made.shape += first;
    return made;
  };
  constexpr decltype(&multiply<Large>) kRuns[] = {multiply<Large>,   multiply<Middle>,   multiply<Lone>,
                                                  multiply<Small>,   multiply<Smallest>, multiply<Wide>,
                                                  multiply<Largest>, multiply<Narrow>};
  constexpr int kWide = 5, kLargest = 6, kNarrow = 7;
  const Plan chosen = remembered(m, n, k, device, [&] {
    if (narrow) return plan_of(kOfNarrow, kNarrow);
    // What takes long is bound by the power that the device may take, of which the largest tile needs less.
    constexpr double kSome = 5e5, kLong = 1e6;
    const Plan of_any = plan_of(kModels, 0);
    if (of_any.nanoseconds > kLong) return plan_of(kOfLong, kLargest);
    if (of_any.nanoseconds < kSome) return of_any;
    const Plan wide = plan_of(kOfSome, kWide);
    return wide.nanoseconds < of_any.nanoseconds ? wide : of_any;
  });
  const bool reads_both = reads(product.a, product.m, product.k) && reads(product.b, product.n, product.k);
  const bool swaps = narrow && reads_both && product.m < product.n;
  const auto multiply_parts = [&](const Product<double, double>& p, const Plan& plan) {
    if (!reads_both) return run_dmma<Dmma<64, 64, 32, 32, 4, 3>>(launch, p, plan);
    kRuns[plan.shape](launch, p, plan.tiling, device.processors);
  };
  with_splits(launch, like, swaps ? product.swapped() : product, device, chosen, multiply_parts);
}

}  // namespace hopper
}  // namespace extension_cpp::matmul
