// Which tiles a product is cut into, and into how many parts of k: an estimate of what takes the least time.
#pragma once

#include <cmath>
#include <limits>

#include "product.cuh"

namespace extension_cpp::matmul {

// A kernel's tile and what a multiprocessor does with it.
struct TileModel {
  int64_t m, n, k;
  int warps;    // of a block that compute
  int blocks;   // that a multiprocessor holds
  double rate;  // multiply-adds a nanosecond, of a multiprocessor that has enough warps
  int enough_warps;
  int processors = 1;  // that work on a tile together
};

struct Plan {
  int shape;  // the index of its tile
  Tiling tiling;
  double nanoseconds;
};

// The tiles and splits that should take the least time. Splitting k fills a device that there are too few tiles for,
// and costs another pass over the sums.
template <size_t kCount>
Plan plan(const TileModel (&shapes)[kCount], int64_t m, int64_t n, int64_t k, int64_t bytes, int processors) {
  constexpr double kBlock = 1500, kPass = 2500, kBytesOfProcessor = 50, kBytesOfDevice = 3000;
  constexpr int64_t kMostSplits = 64, kLeastSteps = 4;
  Plan best{0, {}, std::numeric_limits<double>::infinity()};
  for (size_t s = 0; s < kCount; ++s) {
    const TileModel& shape = shapes[s];
    Tiling tiling{ceil_div(m, shape.m), ceil_div(n, shape.n), ceil_div(k, shape.k), 0};
    const double tiles = static_cast<double>(tiling.tiles_m) * tiling.tiles_n;
    const double read = (std::min(m, shape.m) + std::min(n, shape.n)) * shape.k * bytes / kBytesOfProcessor;
    for (int64_t splits = 1; splits <= kMostSplits; ++splits) {
      const int64_t steps = ceil_div(tiling.steps, splits);
      if (splits > 1 && (steps < kLeastSteps || tiles * splits > 4.0 * processors * shape.blocks)) break;
      if (ceil_div(tiling.steps, steps) != splits) continue;
      const double turns = std::ceil(tiles * splits / (processors / shape.processors));
      const double busy = std::min(1.0, std::min<double>(turns, shape.blocks) * shape.warps / shape.enough_warps);
      const double step = std::max(shape.m * shape.n * shape.k / shape.rate, read) / busy;
      double time = turns * steps * step + std::ceil(turns / shape.blocks) * kBlock;
      if (splits > 1) time += kPass + (8.0 * splits + bytes) * m * n / kBytesOfDevice;
      if (time < best.nanoseconds) {
        tiling.steps_per_split = steps;
        best = {static_cast<int>(s), tiling, time};
      }
    }
  }
  return best;
}

}  // namespace extension_cpp::matmul
