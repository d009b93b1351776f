// Which tiles a product is cut into, and into how many parts of k: an estimate of what takes the least time.
#pragma once

#include <array>
#include <cmath>
#include <limits>

#include "cluster.cuh"

namespace extension_cpp::matmul {

// What a plan depends on.
struct Device {
  int architecture = 0;  // That the code for it was compiled for, which is an older one where it runs PTX.
  int processors = 0, shared_bytes = 0;  // The latter of a block.
  bool hopper = false;

  bool has_clusters() const { return architecture >= 90; }
  bool operator==(const Device&) const = default;
};

// A kernel's tile and what a multiprocessor does with it.
struct TileModel {
  int64_t m, n, k;
  int warps;    // of a block that compute
  int blocks;   // that a multiprocessor holds
  double rate;  // multiply-adds a nanosecond, of a multiprocessor that has enough warps
  int enough_warps;
  int processors = 1;    // that work on a tile together
  int shared_bytes = 0;  // of a block, where not every device has them
};

constexpr double kBytesOfDevice = 4000;  // that memory moves, a nanosecond

// What else takes time: nanoseconds, and bytes a nanosecond. Fitted to measured products, for the best tile to come
// first: no number by itself is one of the chip.
struct Costs {
  double block;                    // to start and end a tile's block
  double processor;                // bytes that a multiprocessor reads
  double cache;                    // bytes that all of them read, out of the L2 cache
  double pass;                     // to add up sums in another launch
  double sums;                     // bytes that it moves
  double cluster, per_split;       // to add up sums in a cluster
  double per_group = 0;            // the same, for eight columns of a block's share
  double per_element = 0;          // to store an element of a tile
  double after = 0.15;             // of that, what blocks of a multiprocessor add as they store one after the other
  double per_part = 0;             // to add up one part of k more in another launch
  double memory = kBytesOfDevice;  // bytes that memory moves
  double outside = 0;              // how much longer memory takes if tiles are twice as large as what they have to read
  double both = 0;                 // or for a factor that several tiles read, in both parts of the L2 cache
  bool overlaps = true;            // Memory takes its time next to all else, not for the most part only.
  double pair = 0;                 // to start blocks that work on a tile together
  double exchange = 0;             // to add up sums in a cluster, for 1,024 elements of a tile
  // By alignment of rows: how much longer it takes to read a factor along k, and how much more one across, of which a
  // tile has a line of the cache in each row; and what it takes to store the result, unless the plan is flipped.
  std::array<double, 3> along_k{1, 1, 1}, across{}, store{};
  // How much longer memory takes to be written: if all tiles are there at a time and not flipped, and if flipped ones
  // come in turn, and lie side by side in more than one group of those.
  double at_once = 0, in_turn = 0;
  double few = 0;  // the power of the share of multiprocessors that read by which memory is slower
};

// Bytes from row to row of a matrix: of a factor that lies along k, or across, or of the result.
struct Rows {
  int64_t bytes;
  bool along_k = true;

  // Whether rows begin with a line of the cache, with a sector of it, or between.
  int alignment() const { return bytes % 128 == 0 ? 0 : bytes % 32 == 0 ? 1 : 2; }
};

// How the matrices of a product lie in memory.
struct Placement {
  Rows a, b, c;
  bool reads_a = true, reads_b = true;  // The memory accelerator can.
  int piece = 16;                       // bytes that threads can read at a time

  Placement flipped() const { return {b, a, c, reads_b, reads_a, piece}; }
  // What differs between the layouts of two products of the same sizes.
  int key() const {
    int key = piece;
    for (const int e : {a.alignment(), b.alignment(), int{a.along_k}, int{b.along_k}, int{reads_a}, int{reads_b}}) {
      key = key * 3 + e;
    }
    return key;
  }
};

struct Plan {
  int shape;  // the index of its tile
  Tiling tiling;
  double nanoseconds;
  bool in_cluster = false;  // The parts of k are a cluster's blocks.
  bool flipped = false;     // The plan is of the transposed factors.
  // If not 0, the plan is only of the first so many rows or columns. Those behind them have a plan of their own.
  int64_t rows = 0, columns = 0;

  bool has_parts(int64_t steps, bool of_cluster) const {
    return tiling.steps_per_split == steps && in_cluster == of_cluster;
  }
};

// How many clusters of `size` blocks run at a time, a block a multiprocessor: as many as the driver says of an H200,
// which has 132. A cluster lies in one part of the chip, of 18 or fewer, and chips differ in those.
inline int64_t clusters_at_a_time(int64_t processors, int64_t size) {
  constexpr int64_t kOf = 132, kFit[kMostInCluster + 1] = {0, kOf, kOf / 2, 39, 30, 22, 16, 15, 15};
  return std::max<int64_t>(processors * kFit[size] / kOf, 1);
}

// Of reading a and b and writing c once: the least that a product takes, in nanoseconds.
inline double time_of_memory(int64_t m, int64_t n, int64_t k, int64_t bytes) {
  return static_cast<double>(m * k + n * k + m * n) * bytes / kBytesOfDevice;
}

inline double cube(double x) {
  return x * x * x;
}

// The tiles and splits that should take the least time, for a product that is `flipped` if its m was n, or of those
// tiles that have the same parts of k as a plan. Splitting k fills a device that there are too few tiles for, and costs
// the time to add up the sums: in a cluster of the tile's blocks, if the kernel does that, or by another pass.
template <size_t kCount>
Plan plan(
    const TileModel (&shapes)[kCount], const Costs& costs, int64_t m, int64_t n, int64_t k, int64_t bytes,
    const Device& device, bool adds_in_clusters, const Placement* placement = nullptr, bool flipped = false,
    const Plan* same_parts = nullptr) {
  constexpr int64_t kMostSplits = 512, kLeastSteps = 2, kLeastDepth = 64, kLine = 128;
  Plan best{0, {}, std::numeric_limits<double>::infinity()};
  for (size_t s = 0; s < kCount; ++s) {
    const TileModel& shape = shapes[s];
    if (shape.shared_bytes > device.shared_bytes) continue;
    Tiling tiling{ceil_div(m, shape.m), ceil_div(n, shape.n), ceil_div(k, shape.k), 0};
    const double tiles = static_cast<double>(tiling.tiles_m) * tiling.tiles_n;
    const double most = 2.2 * device.processors * shape.blocks / shape.processors;
    const int64_t height = shape.m / shape.processors;
    const auto longer = [&](const Rows& rows, int64_t of_tile) {
      const double lines = static_cast<double>(of_tile * bytes) / kLine;
      return rows.along_k ? costs.along_k[rows.alignment()] : 1 + costs.across[rows.alignment()] / lines;
    };
    const double of_a = placement == nullptr ? 1 : longer(placement->a, height);
    const double of_b = placement == nullptr ? 1 : longer(placement->b, shape.n);
    const double read =
        static_cast<double>(shape.k * bytes) * (std::min(m, shape.m) * of_a + std::min(n, shape.n) * of_b);
    const double of_block = costs.per_element * static_cast<double>(shape.m * shape.n) / shape.processors;
    // Rows of a stage that lie outside of the matrices could be other ones on their way.
    const int64_t inside = std::min(m, height) + std::min(n, shape.n);
    const double empty = static_cast<double>(height + shape.n - inside) / inside;
    const double twice = (tiling.tiles_n > 1 ? m * k : 0) + (tiling.tiles_m * shape.processors > 1 ? n * k : 0);
    const double moved = static_cast<double>(m * k + n * k + m * n) + costs.both * twice;
    const double of_result = !flipped && placement != nullptr ? costs.store[placement->c.alignment()] : 0;
    for (int64_t splits = 1, next; splits <= kMostSplits; splits = next) {
      const int64_t steps = ceil_div(tiling.steps, splits);
      // Numbers of parts between the two would leave some empty.
      next = std::max(splits + 1, ceil_div(tiling.steps, std::max<int64_t>(steps - 1, 1)));
      const bool deep = steps >= kLeastSteps && steps * shape.k >= kLeastDepth;
      if (splits > 1 && (!deep || tiles * splits > most)) break;
      const bool fits_cluster =
          adds_in_clusters && device.has_clusters() && shape.processors == 1 && splits > 1 && splits <= kMostInCluster;
      for (const bool in_cluster : {true, false}) {
        if (in_cluster && !fits_cluster) continue;
        if (same_parts != nullptr && !same_parts->has_parts(steps, in_cluster)) continue;
        double turns = std::ceil(tiles * splits / (device.processors / shape.processors));
        if (in_cluster) {
          // Those that find no free multiprocessors share some.
          const int64_t at_a_time = clusters_at_a_time(device.processors, splits), count = static_cast<int64_t>(tiles);
          const int64_t whole = (count - 1) / (at_a_time * shape.blocks);
          const int64_t last = ceil_div(count - whole * at_a_time * shape.blocks, at_a_time);
          turns = std::max(turns, static_cast<double>(whole * shape.blocks + last));
        }
        const double busy = std::min(1.0, std::min<double>(turns, shape.blocks) * shape.warps / shape.enough_warps);
        const double step =
            std::max(shape.m * shape.n * shape.k / shape.rate, read / (costs.processor * shape.processors)) / busy;
        double time = std::max(turns * steps * step, tiles * splits * steps * read / costs.cache);
        const double rounds = std::ceil(turns / shape.blocks);
        const double stored = 1 + (rounds - 1) * (1 + costs.after * (shape.blocks - 1));
        time += rounds * (costs.block + (shape.processors > 1 ? costs.pair : 0)) + stored * of_block;
        double written = 0;
        if (splits == 1) {
          time += of_result;
          written = flipped ? (rounds > 1 && tiling.tiles_m > TileOrder::kHeight ? costs.in_turn : 0)
                            : (rounds == 1 ? costs.at_once : 0);
        }
        double at_least = (moved + written * static_cast<double>(m * n)) * bytes / costs.memory;
        at_least *= 1 + costs.outside * empty;
        const double active = tiles * splits * shape.processors / device.processors;
        if (active < 1) at_least *= std::pow(active, -costs.few);
        time = costs.overlaps ? std::max(time, at_least) : std::cbrt(cube(time) + cube(at_least));
        if (in_cluster) {
          const double groups = static_cast<double>(ceil_div(ceil_div(shape.n, 8), splits));
          const double sums = static_cast<double>(shape.m * shape.n) / 1024 * (splits - 1) / splits;
          time += costs.cluster + (costs.per_split * splits + costs.per_group * groups + costs.exchange * sums) * turns;
        } else if (splits > 1) {
          time += costs.pass + costs.per_part * splits + (8.0 * splits + bytes) * m * n / costs.sums;
        }
        if (time < best.nanoseconds) {
          tiling.steps_per_split = steps;
          best = {static_cast<int>(s), tiling, time, in_cluster};
        }
      }
    }
  }
  return best;
}

// What make() plans for a product, which takes it up to some thirty microseconds: a thread remembers the last plans of
// each function, of products that differ in their sizes or in `kind`.
template <class Make>
Plan remembered(int64_t m, int64_t n, int64_t k, const Device& device, const Make& make, int kind = 0) {
  struct Known {
    int64_t m, n, k;  // all of them 0 at first, which no product has
    int kind;
    Device device;
    Plan plan;
  };
  constexpr int kBits = 6;
  constexpr uint64_t kMix = 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio
  thread_local std::array<Known, 1 << kBits> all{};
  Known& known = all[(((m * kMix + n) * kMix + k) * kMix + kind) * kMix >> (64 - kBits)];
  if (known.m != m || known.n != n || known.k != k || known.kind != kind || !(known.device == device)) {
    known = {m, n, k, kind, device, make()};
  }
  return known.plan;
}

}  // namespace extension_cpp::matmul
