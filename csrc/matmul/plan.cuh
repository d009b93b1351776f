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
  double exchange = 0;             // to add up sums in a cluster, for 1,024 elements of a tile
  // By alignment of rows: how much longer it takes to read a factor along k, and how much more one across, of which a
  // tile has a line of the cache in each row.
  std::array<double, 3> along_k{1, 1, 1}, across{};
  double at_once = 0;  // how much longer memory takes to be written if all tiles are there at a time and not flipped
  double few = 0;      // the power of the share of multiprocessors that read by which memory is slower
};

// Bytes from row to row of a factor, which lies along k or across.
struct Rows {
  int64_t bytes;
  bool along_k;

  // Whether rows begin with a line of the cache, with a sector of it, or between.
  int alignment() const { return bytes % 128 == 0 ? 0 : bytes % 32 == 0 ? 1 : 2; }
};

// How the factors of a product lie in memory.
struct Placement {
  Rows a, b;
  bool reads_a = true, reads_b = true;  // The memory accelerator can.
  int piece = 16;                       // bytes that threads can read at a time

  Placement flipped() const { return {b, a, reads_b, reads_a, piece}; }
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
  bool in_pieces = false;   // Threads copy the tiles, not the memory accelerator.
  // If not 0, the product is cut in two behind so many rows or columns, and this is no plan of either.
  int64_t rows = 0, columns = 0;
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

// How long a product takes with tiles of a shape, for parts of k of any size: an estimate. The product is `flipped` if
// its m was n.
class Estimate {
 public:
  Estimate(
      const TileModel& shape, const Costs& costs, int64_t m, int64_t n, int64_t k, int64_t bytes, const Device& device,
      bool adds_in_clusters, const Placement* placement = nullptr, bool flipped = false)
      : shape_(shape),
        costs_(costs),
        bytes_(bytes),
        processors_(device.processors),
        fits_clusters_(adds_in_clusters && device.has_clusters() && shape.processors == 1),
        flipped_(flipped),
        tiling_{ceil_div(m, shape.m), ceil_div(n, shape.n), ceil_div(k, shape.k), 0},
        result_(static_cast<double>(m) * n) {
    constexpr int64_t kLine = 128;
    const int64_t height = shape.m / shape.processors;
    const auto longer = [&](const Rows& rows, int64_t of_tile) {
      const double lines = static_cast<double>(of_tile * bytes) / kLine;
      return rows.along_k ? costs.along_k[rows.alignment()] : 1 + costs.across[rows.alignment()] / lines;
    };
    const double of_a = placement == nullptr ? 1 : longer(placement->a, height);
    const double of_b = placement == nullptr ? 1 : longer(placement->b, shape.n);
    read_ = static_cast<double>(shape.k * bytes) * (std::min(m, shape.m) * of_a + std::min(n, shape.n) * of_b);
    // Rows of a stage that lie outside of the matrices could be other ones on their way.
    const int64_t inside = std::min(m, height) + std::min(n, shape.n);
    emptier_ = 1 + costs.outside * static_cast<double>(height + shape.n - inside) / inside;
    const double twice = (tiling_.tiles_n > 1 ? m * k : 0) + (tiling_.tiles_m * shape.processors > 1 ? n * k : 0);
    moved_ = static_cast<double>(m * k + n * k + m * n) + costs.both * twice;
  }

  Tiling tiling(int64_t steps) const { return {tiling_.tiles_m, tiling_.tiles_n, tiling_.steps, steps}; }

  // Nanoseconds with parts of so many steps, whose sums are added up in a cluster of the tile's blocks or by another
  // pass; infinite where parts would be too short, or more than fill the device.
  double operator()(int64_t steps, bool in_cluster) const {
    constexpr int64_t kLeastSteps = 2, kLeastDepth = 64;
    constexpr double kNever = std::numeric_limits<double>::infinity();
    const int64_t splits = ceil_div(tiling_.steps, steps), at_a_time = processors_ / shape_.processors;
    const double tiles = static_cast<double>(tiling_.tiles_m) * tiling_.tiles_n, count = tiles * splits;
    const bool too_many = count > 2.2 * processors_ * shape_.blocks / shape_.processors;
    if (splits > 1 && (too_many || steps < kLeastSteps || steps * shape_.k < kLeastDepth)) return kNever;
    if (in_cluster && !(fits_clusters_ && splits > 1 && splits <= kMostInCluster)) return kNever;
    double turns = std::ceil(count / at_a_time);
    if (in_cluster) {
      // Those that find no free multiprocessors share some.
      const int64_t clusters = static_cast<int64_t>(tiles), free = clusters_at_a_time(processors_, splits);
      const int64_t whole = (clusters - 1) / (free * shape_.blocks);
      const int64_t last = ceil_div(clusters - whole * free * shape_.blocks, free);
      turns = std::max(turns, static_cast<double>(whole * shape_.blocks + last));
    }
    const double busy = std::min(1.0, std::min<double>(turns, shape_.blocks) * shape_.warps / shape_.enough_warps);
    const double multiplied = shape_.m * shape_.n * shape_.k / shape_.rate;
    const double step = std::max(multiplied, read_ / (costs_.processor * shape_.processors)) / busy;
    double time = std::max(turns * steps * step, count * steps * read_ / costs_.cache);
    const double rounds = std::ceil(turns / shape_.blocks);
    const double stored = 1 + (rounds - 1) * (1 + costs_.after * (shape_.blocks - 1));
    const double elements = static_cast<double>(shape_.m * shape_.n);
    time += rounds * costs_.block + stored * costs_.per_element * elements / shape_.processors;
    const double written = splits == 1 && !flipped_ && rounds == 1 ? costs_.at_once * result_ : 0;
    double at_least = (moved_ + written) * bytes_ / costs_.memory * emptier_;
    if (count < at_a_time) at_least *= std::pow(count / at_a_time, -costs_.few);
    time = costs_.overlaps ? std::max(time, at_least) : std::sqrt(time * time + at_least * at_least);
    if (in_cluster) {
      const double groups = static_cast<double>(ceil_div(ceil_div(shape_.n, 8), splits));
      const double sums = elements / 1024 * (splits - 1) / splits;
      return time + costs_.cluster +
             (costs_.per_split * splits + costs_.per_group * groups + costs_.exchange * sums) * turns;
    }
    if (splits == 1) return time;
    return time + costs_.pass + costs_.per_part * splits + (8.0 * splits + bytes_) * result_ / costs_.sums;
  }

 private:
  TileModel shape_;
  const Costs& costs_;
  int64_t bytes_, processors_;
  bool fits_clusters_, flipped_;
  Tiling tiling_;
  double result_, read_, emptier_, moved_;
};

// Calls f for numbers of steps of a part, from all steps on, until it returns false. Of many parts not every number is
// tried.
template <class Function>
void for_parts(int64_t steps, const Function& f) {
  constexpr int64_t kMost = 512, kEvery = 8;
  for (int64_t splits = 1; splits <= kMost;) {
    const int64_t of_part = ceil_div(steps, splits);
    if (!f(of_part)) return;
    // Numbers of parts between the two would leave some empty.
    splits =
        std::max(splits + std::max<int64_t>(splits / kEvery, 1), ceil_div(steps, std::max<int64_t>(of_part - 1, 1)));
  }
}

// The tiles and parts of k that should take the least time. Splitting k fills a device that there are too few tiles
// for, and costs the time to add up the sums.
template <size_t kCount>
Plan plan(
    const TileModel (&shapes)[kCount], const Costs& costs, int64_t m, int64_t n, int64_t k, int64_t bytes,
    const Device& device, bool adds_in_clusters) {
  Plan best{0, {}, std::numeric_limits<double>::infinity()};
  for (size_t s = 0; s < kCount; ++s) {
    if (shapes[s].shared_bytes > device.shared_bytes) continue;
    const Estimate estimate(shapes[s], costs, m, n, k, bytes, device, adds_in_clusters);
    for_parts(ceil_div(k, shapes[s].k), [&](int64_t steps) {
      const double by_pass = estimate(steps, false), in_cluster = estimate(steps, true);
      const double time = std::min(by_pass, in_cluster);
      if (time < best.nanoseconds) best = {static_cast<int>(s), estimate.tiling(steps), time, in_cluster <= by_pass};
      return std::isfinite(by_pass);
    });
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
