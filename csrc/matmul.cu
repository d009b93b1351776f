// matmul on CUDA: which kernel computes a product, with what tiles, and in how many parts of k.
//
// Whether a product goes straight into registers, and in how many parts of k, is decided by the dtype, the sizes and
// the device alone, tiles by the layouts too. All kernels for the same sizes of a dtype add up k in the same order, so
// that the bits of the result don't depend on the layouts.
#include "matmul/product.cuh"

#include <limits>
#include <optional>
#include <vector>

#include "matmul/copies.cuh"
#include "matmul/direct.cuh"
#include "matmul/dmma.cuh"
#include "matmul/doubles.cuh"
#include "matmul/hopper.cuh"
#include "matmul/mma.cuh"
#include "matmul/outer.cuh"
#include "matmul/pieces.cuh"
#include "matmul/plan.cuh"
#include "matmul/simt.cuh"
#include "matmul/split.cuh"
#include "matmul/vector.cuh"

namespace extension_cpp::matmul {
namespace {

// The device that is current. Asked once a thread, as it takes as long as a launch.
const Device& current_device(const Launch& launch, int index) {
  thread_local int known = -1;
  thread_local Device device;
  if (known != index) {
    cudaFuncAttributes code;
    launch.check(cudaFuncGetAttributes(&code, mma_kernel<__half>));
    launch.check(cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, index));
    launch.check(cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
    device.architecture = code.ptxVersion;
    device.hopper = hopper::has_code();
    known = index;
  }
  return device;
}

template <class T>
bool lies_along_rows(const Factor<T>& factor) {
  return factor.outer == 1 && factor.inner != 1;
}

// Lets the tensor memory accelerator read both factors: those that it can't become copies that `memory` holds, and so
// does one that has to lie along k.
template <class T>
void make_readable(
    Launch& launch, const View& like, const Device& device, Product<T, float>& product, bool a_along_k, bool b_along_k,
    std::optional<Tensor> (&memory)[2]) {
  Pad pads[2] = {};
  auto pad = [&](Factor<T>& factor, int64_t rows, bool along_k, Pad& copy, std::optional<Tensor>& memory) {
    if (hopper::reads(factor, rows, product.k) && (factor.inner == 1 || !along_k)) return;
    const bool by_k = !along_k && lies_along_rows(factor);
    copy = by_k ? Pad{product.k, rows, factor.inner, factor.outer} : Pad{rows, product.k, factor.outer, factor.inner};
    const int64_t stride = ceil_div(copy.columns, 8) * 8;
    memory = scratch(like, copy.rows * stride * static_cast<int64_t>(sizeof(T)));
    T* to = static_cast<T*>(memory->mutable_data_ptr());
    copy.from = reinterpret_cast<const uint16_t*>(factor.data), copy.to = reinterpret_cast<uint16_t*>(to);
    factor = by_k ? Factor<T>{to, 1, stride} : Factor<T>{to, stride, 1};
  };
  pad(product.a, product.m, a_along_k, pads[0], memory[0]);
  pad(product.b, product.n, b_along_k, pads[1], memory[1]);
  const int64_t count = pads[0].chunks() + pads[1].chunks();
  if (count == 0) return;
  const bool squares = pads[0].in_squares() || pads[1].in_squares();
  start(
      launch, device, true, squares ? pad_kernel<true> : pad_kernel<false>,
      std::min(ceil_div(count, kCopyThreads), kMostCopyBlocks), kCopyThreads, 0, pads[0], pads[1]);
}

// With the plan's parts of k, which are in steps of S::kK, and tiles of S.
template <class S, Reads kA, Reads kB, class T, class V>
void run_simt(Launch& launch, const Product<T, V>& product, const Plan& plan) {
  Tiling tiling = plan.tiling;
  tiling.tiles_m = ceil_div(product.m, S::kM), tiling.tiles_n = ceil_div(product.n, S::kN);
  constexpr size_t kBytes = S::kStages * sizeof(Stage<S, V, kB>), kOfTuring = 64 * 1024;
  static_assert(kBytes <= kOfTuring);
  launch(simt_kernel<S, kA, kB, T, V>, tiling.count(), S::kThreads, kBytes, product, TileOrder(tiling, false));
}

template <class S>
constexpr TileModel simt_model(double rate) {
  return {S::kM, S::kN, S::kK, S::kThreads / 32, S::kBlocks, rate, 8};
}

constexpr Costs kCosts{1793, 228, 3986, 5500, 2544, 3205, 247};

using Wide = Simt<float, 128, 256, 16, 16, 8, 2, 1>;
using Narrow = Simt<float, 64, 128, 16, 8, 8, 4, 4>;
using NarrowAlongK = Simt<float, 64, 128, 16, 8, 8, 3, 3>;  // It takes more registers.
using Small = Simt<float, 64, 64, 16, 8, 4, 4, 4>;
using Few = Simt<float, 16, 128, 16, 8, 4, 4, 4>;
using Fewest = Simt<float, 4, 256, 16, 4, 4, 3, 4>;
enum Shape { kWide, kNarrow, kFew, kFewest, kSmall };
// Parts of k that are multiples of every tile's steps are the same parts, whichever tile the layouts ask for.
static_assert(
    Wide::kK == Narrow::kK && NarrowAlongK::kK == Narrow::kK && Few::kK == Narrow::kK && Fewest::kK == Narrow::kK &&
    Small::kK == Narrow::kK);

Plan plan_simt(const Product<float, float>& product, const Device& device) {
  constexpr TileModel kModels[] = {
      simt_model<Wide>(178), simt_model<Narrow>(170), simt_model<Few>(150), simt_model<Fewest>(118),
      simt_model<Small>(155)};
  constexpr double kStart = 2500;
  constexpr int64_t kFewSteps = 8;
  const int64_t m = product.m, n = product.n, k = product.k;
  return remembered(m, n, k, device, [&] {
    Plan chosen = plan(kModels, kCosts, m, n, k, sizeof(float), device, false);
    chosen.nanoseconds += kStart;
    // Tiles of few steps read, multiply and store one after the other.
    if (chosen.tiling.steps_per_split <= kFewSteps) chosen.nanoseconds += time_of_memory(m, n, k, sizeof(float));
    return chosen;
  });
}

void simt(
    Launch& launch, const View& like, const Product<float, float>& product, const Device& device, const Plan& plan) {
  constexpr Reads kElements = Reads::kElements, kRows = Reads::kRows, kAlongK = Reads::kAlongK;
  with_splits(launch, like, product, device, plan, [&](const Product<float, float>& p, const Plan& plan) {
    const bool rows_a = has_vectors_along_rows(p.a, p.rows_a), rows_b = has_vectors_along_rows(p.b, p.rows_b);
    const bool along_k = has_vectors_along_k(p.b, p.k);
    if (plan.shape == kWide && rows_a && rows_b) return run_simt<Wide, kRows, kRows>(launch, p, plan);
    if (plan.shape == kFew && rows_b) return run_simt<Few, kElements, kRows>(launch, p, plan);
    if (plan.shape == kFew && along_k) return run_simt<Few, kElements, kAlongK>(launch, p, plan);
    if (plan.shape == kSmall && rows_a && rows_b) return run_simt<Small, kRows, kRows>(launch, p, plan);
    if (plan.shape == kSmall && rows_b) return run_simt<Small, kElements, kRows>(launch, p, plan);
    if (plan.shape == kSmall && along_k) return run_simt<Small, kElements, kAlongK>(launch, p, plan);
    if (plan.shape == kFewest && rows_b) return run_simt<Fewest, kElements, kRows>(launch, p, plan);
    if (plan.shape == kFewest && along_k) return run_simt<Fewest, kElements, kAlongK>(launch, p, plan);
    if (rows_a && rows_b) return run_simt<Narrow, kRows, kRows>(launch, p, plan);
    if (rows_b) return run_simt<Narrow, kElements, kRows>(launch, p, plan);
    if (rows_a && along_k) return run_simt<NarrowAlongK, kRows, kAlongK>(launch, p, plan);
    if (along_k) return run_simt<NarrowAlongK, kElements, kAlongK>(launch, p, plan);
    run_simt<Narrow, kElements, kElements>(launch, p, plan);
  });
}

void simt(Launch& launch, const View& like, const Product<double, double>& product, const Device& device) {
  using Shape = Simt<double, 64, 64, 16, 8, 4, 3, 3>;
  constexpr TileModel kModels[] = {simt_model<Shape>(50)};
  const Plan chosen = remembered(product.m, product.n, product.k, device, [&] {
    return plan(kModels, kCosts, product.m, product.n, product.k, sizeof(double), device, false);
  });
  with_splits(launch, like, product, device, chosen, [&](const Product<double, double>& p, const Plan& plan) {
    const bool rows_b = has_vectors_along_rows(p.b, p.rows_b);
    if (rows_b) return run_simt<Shape, Reads::kElements, Reads::kRows>(launch, p, plan);
    run_simt<Shape, Reads::kElements, Reads::kElements>(launch, p, plan);
  });
}

// Halves.
template <class T>
void simt(Launch& launch, const View& like, const Product<T, float>& product, const Device& device) {
  using Shape = Simt<float, 64, 128, 16, 8, 8, 2, 3>;
  constexpr TileModel kModels[] = {simt_model<Shape>(100)};
  const Plan chosen = remembered(product.m, product.n, product.k, device, [&] {
    return plan(kModels, kCosts, product.m, product.n, product.k, sizeof(T), device, false);
  });
  with_splits(launch, like, product, device, chosen, [&](const Product<T, float>& p, const Plan& plan) {
    run_simt<Shape, Reads::kElements, Reads::kElements>(launch, p, plan);
  });
}

template <class T>
void mma(Launch& launch, const View& like, const Product<T, float>& product, const Device& device) {
  using M = Mma<T>;
  const TileModel shapes[] = {{M::kM, M::kN, M::kK, 4, 2, 2000.0 / sizeof(T), 8}};
  const Plan chosen = remembered(product.m, product.n, product.k, device, [&] {
    return plan(shapes, kCosts, product.m, product.n, product.k, sizeof(T), device, false);
  });
  with_splits(launch, like, product, device, chosen, [&](const Product<T, float>& p, const Plan& plan) {
    launch(mma_kernel<T>, plan.tiling.count(), M::kThreads, 0, p, TileOrder(plan.tiling, false));
  });
}

constexpr Costs kCostsOfHalves{
    .block = 0,
    .processor = 1e9,
    .cache = 14250,
    .pass = 1768,
    .sums = 5692,
    .cluster = 0,
    .per_split = 0,
    .per_group = 210,
    .per_element = 0.0487,
    .after = 0.668,
    .per_part = 5.59,
    .memory = 4599,
    .outside = 0.506,
    .both = 0.0311,
    .overlaps = false,
    .exchange = 110,
    .along_k = {1, 1.62, 2.2},
    .across = {0, 0, 1.66},
    .at_once = 0.243,
    .few = 0.172,
};
constexpr double kStartOfHalves = 2225, kLaunchOfCopies = 1120, kBytesOfCopies = 1666;

// The same where threads copy pieces of so many bytes.
constexpr Costs costs_of_pieces(int piece) {
  constexpr double kBytesOfPiece = 5.51;
  Costs costs = kCostsOfHalves;
  costs.processor = piece * kBytesOfPiece, costs.per_element = 0.179;
  costs.memory = 4409, costs.outside = 2.89, costs.both = 0.342;
  costs.across = {0, 0.599, 0.547};
  costs.at_once = 0, costs.few = 1.12;
  return costs;
}
constexpr double kStartOfPieces = 2502;

// How a factor of `rows` rows lies, or its copy if the memory accelerator can't read it.
template <class T>
Rows rows_of(const Factor<T>& factor, int64_t rows, int64_t k) {
  constexpr int64_t kSize = sizeof(T);
  if (hopper::reads(factor, rows, k)) {
    return factor.inner == 1 ? Rows{factor.outer * kSize, true} : Rows{factor.inner * kSize, false};
  }
  const bool along_k = !lies_along_rows(factor);
  return {ceil_div(along_k ? k : rows, 8) * 8 * kSize, along_k};
}

template <class T>
Placement placement_of(const Factor<T>& a, const Factor<T>& b, int64_t m, int64_t n, int64_t k) {
  return {
      rows_of(a, m, k), rows_of(b, n, k), hopper::reads(a, m, k), hopper::reads(b, n, k),
      std::min(piece_of(a), piece_of(b))};
}

// The plans of a product, but for its parts of k.
struct Candidates {
  struct Candidate {
    Plan plan;
    double before;  // nanoseconds until it starts
    Estimate estimate;
  };
  std::vector<Candidate> all;

  // The fastest with parts of so many steps.
  Plan best(int64_t steps, bool in_cluster) const {
    Plan best{0, {}, std::numeric_limits<double>::infinity()};
    for (const Candidate& candidate : all) {
      const double time = candidate.before + candidate.estimate(steps, in_cluster);
      if (time >= best.nanoseconds) continue;
      best = candidate.plan;
      best.nanoseconds = time, best.tiling = candidate.estimate.tiling(steps), best.in_cluster = in_cluster;
    }
    return best;
  }
};

// With every tile, of the product and of the transposed factors. A factor that the memory accelerator can't read is
// copied first, or by threads, in pieces.
template <class T>
Candidates candidates(int64_t m, int64_t n, int64_t k, const Device& device, const Placement& placement) {
  static constexpr Costs kOfPieces[] = {costs_of_pieces(4), costs_of_pieces(8)};
  constexpr int64_t kFew = 1 << 18;  // of a result that threads store one by one
  const bool narrow = std::min(m, n) <= hopper::kMostOfNarrow, may_flip = n % 8 == 0 || m * n <= kFew;
  const double copied = (placement.reads_a ? 0 : m * k) + (placement.reads_b ? 0 : k * n);
  const double copies = copied == 0 ? 0 : kLaunchOfCopies + copied * sizeof(T) / kBytesOfCopies;
  Candidates result;
  result.all.reserve(3 * hopper::kTileCount);
  for (int shape = 0; shape < hopper::kTileCount; ++shape) {
    const auto [tile_m, tile_n, cluster, blocks, boxes, rate] = hopper::kTiles[shape];
    if (narrow != (tile_n <= hopper::kMostOfNarrow)) continue;
    const TileModel model{tile_m * cluster, tile_n, hopper::kInRow<T>, 4, blocks, rate * cluster, 4, cluster};
    for (const bool flipped : {false, true}) {
      if (narrow ? (flipped ? m : n) > tile_n : flipped && !may_flip) continue;
      const Placement given = flipped ? placement.flipped() : placement;
      const auto add = [&](const Costs& costs, double before, bool in_pieces) {
        const Plan plan{.shape = shape, .flipped = flipped, .in_pieces = in_pieces};
        const int64_t rows = flipped ? n : m, columns = flipped ? m : n;
        result.all.push_back(
            {plan, before, Estimate(model, costs, rows, columns, k, sizeof(T), device, true, &given, flipped)});
      };
      add(kCostsOfHalves, kStartOfHalves + copies, false);
      const bool of_pieces = placement.piece == 4 || placement.piece == 8;
      if (of_pieces && hopper::run_of_pieces<T>(shape) != nullptr) {
        add(kOfPieces[placement.piece / 8], kStartOfPieces, true);
      }
    }
  }
  return result;
}

// Parts of k, and so the bits, follow from the sizes alone: they are those with which the product takes the least time
// where both factors lie along k, and where both lie across, by the product of the two times.
template <class T>
Plan plan_wgmma(int64_t m, int64_t n, int64_t k, const Device& device, const Placement& placement) {
  const auto of = [&](const Factor<T>& a, const Factor<T>& b) {
    return candidates<T>(m, n, k, device, placement_of(a, b, m, n, k));
  };
  const Candidates along_k = of({nullptr, k, 1}, {nullptr, k, 1}), across = of({nullptr, 1, m}, {nullptr, 1, n});
  double least = std::numeric_limits<double>::infinity();
  int64_t steps = 0;
  bool in_cluster = false;
  for_parts(ceil_div(k, hopper::kInRow<T>), [&](int64_t of_part) {
    const auto time = [&](bool in_cluster) {
      return along_k.best(of_part, in_cluster).nanoseconds * across.best(of_part, in_cluster).nanoseconds;
    };
    const double by_pass = time(false), of_cluster = time(true);
    if (std::min(by_pass, of_cluster) < least) {
      least = std::min(by_pass, of_cluster), steps = of_part, in_cluster = of_cluster <= by_pass;
    }
    return std::isfinite(by_pass);
  });
  return candidates<T>(m, n, k, device, placement).best(steps, in_cluster);
}

// Where the last tiles would leave most multiprocessors idle, the product is cut in two, as parts of k by its sizes
// alone: the first rows or columns are as many as give all multiprocessors tiles to the end, and the others have tiles
// and parts of k of their own.
template <class T>
Plan plan_in_two(int64_t m, int64_t n, int64_t k, const Device& device) {
  constexpr double kLaunch = 3000, kWorth = 0.95, kLeast = 15000, kFastest = 3300;
  Plan best{};
  if (std::min(m, n) <= hopper::kMostOfNarrow || (m | n | k) % 8 != 0) return best;
  const auto row_major = [&](int64_t rows, int64_t columns) {
    return placement_of<T>({nullptr, k, 1}, {nullptr, 1, columns}, rows, columns, k);
  };
  const auto time_of = [&](int64_t rows, int64_t columns) {
    return plan_wgmma<T>(rows, columns, k, device, row_major(rows, columns)).nanoseconds;
  };
  // Of what fills all multiprocessors, over all of k.
  const auto time_of_first = [&](int64_t rows, int64_t columns) {
    const Candidates all = candidates<T>(rows, columns, k, device, row_major(rows, columns));
    return all.best(ceil_div(k, hopper::kInRow<T>), false).nanoseconds;
  };
  const auto at_least = [&](double elements) { return elements * k / (kFastest * device.processors); };
  const double of_all = at_least(static_cast<double>(m) * n);
  if (of_all < kLeast / 4) return best;  // That is not worth two plans.
  const double whole = time_of(m, n);
  double least = kWorth * whole;
  if (whole < kLeast || kLaunch + of_all >= least) return best;
  for (const hopper::Tile& tile : hopper::kTiles) {
    const int64_t at_a_time = device.processors / tile.cluster * tile.blocks, height = tile.m * tile.cluster;
    if (tile.n <= hopper::kMostOfNarrow) continue;
    for (const bool of_rows : {true, false}) {
      const int64_t size = of_rows ? height : tile.n, across = of_rows ? ceil_div(n, tile.n) : ceil_div(m, height);
      const int64_t length = of_rows ? m : n, others = of_rows ? n : m;
      const int64_t rounds = across * ceil_div(length, size) / at_a_time;
      const int64_t first = rounds * at_a_time / across * size, left = length - first;
      if (first == 0 || left <= 0) continue;
      double time = kLaunch + (of_rows ? time_of_first(first, n) : time_of_first(m, first));
      if (time + at_least(static_cast<double>(left) * others) >= least) continue;
      time += of_rows ? time_of(left, n) : time_of(m, left);
      if (time < least) least = time, best.rows = of_rows ? first : 0, best.columns = of_rows ? 0 : first;
    }
  }
  return best;
}

// Of a product that isn't cut in two.
template <class T>
void multiply_planned(
    Launch& launch, const View& like, Product<T, float> product, const Device& device, const Plan& chosen) {
  // Short rows of a factor, one for each k, share lines of the L2 cache, at which requests of all blocks would wait.
  constexpr int64_t kShort = 16, kCrowded = 1 << 22, kAsMuchAs = 2048;
  const int64_t m = product.m, n = product.n, least = std::min(m, n);
  const bool crowded = least < kShort && std::max(m, n) * (product.k + kAsMuchAs) >= kCrowded * least;
  std::optional<Tensor> memory[2];
  if (!chosen.in_pieces) make_readable(launch, like, device, product, crowded && m < n, crowded && m >= n, memory);
  with_splits(launch, like, product, device, chosen, [&](const Product<T, float>& given, const Plan& plan) {
    using hopper::Hopper;
    const Product<T, float> p = plan.flipped ? given.swapped() : given;
    if (plan.in_pieces) return hopper::run_of_pieces<T>(plan.shape)(launch, p, plan.tiling, device.processors);
    [&]<int... kTile>(std::integer_sequence<int, kTile...>) {
      constexpr decltype(&hopper::multiply<Hopper<T, 0>>) kRuns[] = {hopper::multiply<Hopper<T, kTile>>...};
      kRuns[plan.shape](launch, p, plan.tiling, device.processors);
    }(std::make_integer_sequence<int, hopper::kTileCount>());
  });
}

template <class T>
void wgmma(Launch& launch, const View& like, const Product<T, float>& product, const Device& device) {
  const auto plan_of = [&](const Product<T, float>& of, bool may_cut) {
    const int64_t m = of.m, n = of.n, k = of.k;
    const Placement given = placement_of(of.a, of.b, m, n, k);
    const auto make = [&] {
      const Plan cut = may_cut ? plan_in_two<T>(m, n, k, device) : Plan{};
      return cut.rows + cut.columns != 0 ? cut : plan_wgmma<T>(m, n, k, device, given);
    };
    return remembered(m, n, k, device, make, 2 * given.key() + may_cut);
  };
  const Plan chosen = plan_of(product, true);
  Product<T, float> first = product, rest = product;
  if (chosen.rows != 0) {
    first.m = chosen.rows, rest = product.below(chosen.rows);
  } else if (chosen.columns != 0) {
    first.n = chosen.columns, rest = product.swapped().below(chosen.columns).swapped();
  } else {
    return multiply_planned(launch, like, product, device, chosen);
  }
  multiply_planned(launch, like, first, device, plan_of(first, false));
  multiply_planned(launch, like, rest, device, plan_of(rest, false));
}

template <class T, class V>
bool fits_hopper(const Product<T, V>& product) {
  return std::max({product.m, product.n, product.k}) <= hopper::kLargest;
}

// Sums of a few products have their own bound, and parts of very long rows don't fit.
bool fits_split(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kShortest = 64, kLongest = 1 << 18;
  return std::max(m, n) <= hopper::kLargest / 3 && k >= kShortest && k <= kLongest;
}

// Makes of a factor, of which `rows` rows may be read, what a kernel takes in whole vectors, along k or along rows:
// where that takes a small part of the product's time, by a copy that `memory` holds.
void make_vectors(
    Launch& launch, const View& like, Factor<float>& factor, int64_t& rows, bool along_k, int64_t k, int64_t other_rows,
    std::optional<Tensor>& memory) {
  constexpr int64_t kFewRows = 64, kWorthACopy = 1024;
  constexpr double kLeastWork = 512.0 * 512 * 1024;
  const bool worth =
      rows >= kFewRows && other_rows >= kWorthACopy && static_cast<double>(rows) * other_rows * k >= kLeastWork;
  if (!worth || (along_k ? has_vectors_along_k(factor, k) : has_vectors_along_rows(factor, rows))) return;
  factor = copied(launch, like, factor, rows, k, along_k, memory);
  if (!along_k) rows = factor.inner;
}

template <class T>
void run(Launch& launch, const View& like, Product<T, float> product, const Device& device, bool allow_tf32) {
  if constexpr (std::is_same_v<T, float>) {
    const bool tf32 = allow_tf32 && has_mma<float>(device.architecture);
    const Plan of_simt = plan_simt(product, device);
    if (!tf32 && device.hopper && fits_split(product.m, product.n, product.k)) {
      const Plan of_split = hopper::plan_split(product, device);
      if (of_split.nanoseconds < of_simt.nanoseconds) return hopper::multiply_split(launch, like, product, device);
    }
    std::optional<Tensor> memory_a, memory_b;  // Until the product is launched.
    make_vectors(launch, like, product.a, product.rows_a, tf32, product.k, product.n, memory_a);
    make_vectors(launch, like, product.b, product.rows_b, tf32, product.k, product.m, memory_b);
    tf32 ? mma(launch, like, product, device) : simt(launch, like, product, device, of_simt);
  } else if (device.hopper && fits_hopper(product)) {
    wgmma(launch, like, product, device);
  } else if (has_mma<T>(device.architecture)) {
    mma(launch, like, product, device);
  } else {
    simt(launch, like, product, device);
  }
}

void run(Launch& launch, const View& like, const Product<double, double>& product, const Device& device, bool) {
  if (device.hopper && fits_hopper(product)) {
    hopper::multiply_doubles(launch, like, product, device);
  } else if (has_mma<double>(device.architecture)) {
    mma(launch, like, product, device);
  } else {
    simt(launch, like, product, device);
  }
}

template <class T, class V>
void multiply(Launch& launch, const View& a, const View& b, const Tensor& c, bool allow_tf32) {
  Product<T, V> product{
      factor_a<T>(a),
      factor_b<T>(b),
      a.sizes[0],
      b.sizes[1],
      a.sizes[1],
      a.sizes[0],
      b.sizes[1],
      b.sizes[1],
      1,
      0,
      static_cast<T*>(c.mutable_data_ptr()),
      nullptr};
  const Device& device = current_device(launch, a.device_index);
  // Tiles are wide: few columns are better as few rows. Those of Hopper are of any shape.
  const bool of_hopper = device.hopper && fits_hopper(product);
  bool direct = false;
  if constexpr (!std::is_same_v<T, float>) {
    const bool few = direct::is_low_rank(product.k) || direct::is_small<T>(product.m, product.n, product.k, device);
    direct = of_hopper && product.k > 1 && few;
  }
  const int64_t few_rows = direct || (sizeof(T) == 2 && of_hopper) ? 1 : 64;
  if (product.n <= few_rows && product.m > product.n) product = product.swapped();
  // The stride of a dimension of size 1 means nothing, and would look as if rows were not aligned.
  auto normalise = [&](Factor<T>& factor, int64_t rows) {
    constexpr int64_t kAligned = 16;
    if (product.k == 1) factor.inner = factor.outer == 1 ? (rows + kAligned - 1) / kAligned * kAligned : 1;
    if (rows == 1) factor.outer = factor.inner == 1 ? (product.k + kAligned - 1) / kAligned * kAligned : 1;
  };
  normalise(product.a, product.m);
  normalise(product.b, product.n);
  constexpr int64_t kLeastOfVector = std::is_same_v<T, float> ? 64 : 8;  // of k, for warps to have something to do
  if constexpr (!std::is_same_v<T, float>) {
    if (direct) return direct::multiply(launch, product, device);
  }
  if (product.m == 1 && product.k >= kLeastOfVector) return multiply_vector(launch, a, product, device);
  if (product.k == 1) return multiply_outer(launch, product, device);
  run(launch, a, product, device, allow_tf32);
}

template <class T>
using Sum = typename Compute<T>::type;

Tensor matmul(const Tensor& a, const Tensor& b, bool allow_tf32) {
  const Call<2> call(kMatmul, {&a, &b});
  const Tensor c = call.empty();
  if (call["M"] == 0 || call["N"] == 0) return c;
  Launch launch(kMatmul.name(), call.views[0]);
  if (call["K"] == 0) {
    launch.zero(c.mutable_data_ptr(), call["M"] * call["N"] * c.element_size());
    return c;
  }
  dispatch(Types<float, double, __half, __nv_bfloat16>(), kMatmul.name(), call.views[0].dtype, [&]<class T>(T) {
    multiply<T, Sum<T>>(launch, call.views[0], call.views[1], c, allow_tf32);
  });
  return c;
}

}  // namespace

EXTENSION_CPP_REGISTER(m) {
  m.add<&matmul>(kMatmul);
}

}  // namespace extension_cpp::matmul
