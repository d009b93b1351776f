// nms of many boxes on CUDA: a grid finds what is near a box.
//
// Sorted by score, a box's rank is its place in the order of visits. Fit makes the grid; prepare_kernel brings the
// boxes into order and counts those in each cell; scan_kernel adds up the counts; scatter_kernel puts the boxes in
// order of cells, where what is near a box is some runs of consecutive entries, and finds the cells of these.
// resolve_kernel decides each box, a warp a box; compact_kernel writes the indices of those kept. Where less lies
// before a box than near it, as among boxes that all overlap, it looks at what is before it, from the first rank on:
// most of the boxes kept are there. With a threshold below zero that is all there is to do.
//
// Why resolve_kernel is right: a box is kept if and only if no kept box of a lower rank suppresses it. Its status is
// final once written, and written once all boxes of lower rank that suppress it are final or one of them is kept; so by
// induction over ranks there is one result, whatever the timing, and a status that is read too early only costs time.
// Why it ends: blocks draw ranks in order, so the lowest rank that is undecided is always in a running warp, and waits
// for none. No block needs another one to be resident, and nothing is launched or read back in between.
#pragma once

#include "../common/elementwise.cuh"
#include "../common/launch.cuh"
#include "../common/scan.cuh"
#include "source.cuh"

namespace extension_cpp::nms {
namespace {

constexpr int kThreads = 256, kResolveThreads = 128, kFitThreads = 1024;
constexpr uint32_t kNone = 0xffffffff, kMostListed = 4096;
constexpr uint32_t kIsKept = 1u << 31;  // Next to a rank, which is below 2^30: signatures say so.

enum : uint8_t { kUndecided = 0, kKept = 1, kDropped = 2 };

// The axes are cut where the boxes of a sample are, into segments with as many of them each: so a few boxes far off the
// others, or most boxes in a small part of the field, leave no cell with nearly all boxes. Classes share groups, of
// which each has a part of the cells; and so do sizes. As an intersection is no larger than either box, and the union
// no smaller, an IoU > t takes areas whose ratio is above t and below 1 / t: sizes lie so far apart, and a box
// suppresses others of its own size and of the two next to it alone. Sizes that are `sizes` apart share cells.
template <class V>
struct Grid {
  // Of a box with this area. An area of 0 may have any size, as such a box overlaps none.
  __device__ __forceinline__ uint32_t size(V area) const {
    float octave;
    if constexpr (sizeof(V) == 4) {
      octave = __log2f(area);
    } else {
      octave = static_cast<float>(log2(area));
    }
    return static_cast<int>(floorf(octave * sizes_per_octave)) & (sizes - 1);
  }

  // The cell at the beginning of a row.
  __device__ __forceinline__ uint32_t first(int64_t class_of_box, uint32_t size, uint32_t row) const {
    const uint32_t group = static_cast<uint64_t>(class_of_box) % groups;
    return ((group * sizes + size) * y.count() + row) * x.count();
  }

  int64_t count() const { return groups * sizes * x.count() * y.count(); }

  int64_t groups = 0;          // None without a grid. Of 64 bits, so that no padding follows, which kernels would copy.
  int sizes = 1;               // a power of two
  float sizes_per_octave = 0;  // of areas
  Axis<V> x, y;
};

// As many segments and cells in each as make about `cells` in all.
template <class V>
Axis<V> axis_of(int64_t cells) {
  constexpr int64_t kLeastCells = 4;  // in a segment: the fewer, the further off their sum is
  Axis<V> axis;
  while (axis.segments < Axis<V>::kMostSegments && 2 * kLeastCells * axis.segments <= cells) axis.segments *= 2;
  axis.cells = static_cast<int>(std::max<int64_t>(1, cells / axis.segments));
  return axis;
}

template <class V>
Grid<V> grid_for(int64_t n, bool batched, double threshold) {
  constexpr int64_t kMostCells = 1 << 22, kColumnsPerRow = 4, kGroups = 64;
  constexpr double kLeastForSizes = 0.03;  // Below, all boxes are of a few sizes.
  constexpr double kSlack = 1.0 / 1024;    // For rounding, of which there is much less.
  Grid<V> grid;
  grid.groups = batched ? kGroups : 1;
  if (threshold >= kLeastForSizes && !batched) {
    grid.sizes = 16;
    const double octaves = std::max(0.0, -std::log2(threshold));
    grid.sizes_per_octave = static_cast<float>(1 / (octaves * (1 + kSlack) + kSlack));
  }
  const int64_t count = std::min(n, kMostCells) / (grid.groups * grid.sizes);
  grid.y = axis_of<V>(std::sqrt(count / kColumnsPerRow));
  grid.x = axis_of<V>(count / grid.y.count());
  return grid;
}

// Cells that hold what is near a box: columns from `left` to before `right`, rows from `top` to before `bottom`.
struct alignas(16) Window {
  uint32_t left, right, top, bottom;
};

// Device memory, of one allocation; without a base, only how much of it.
template <class V>
struct Work {
  using Bits = std::conditional_t<sizeof(V) == 4, unsigned, unsigned long long>;

  Work(void* base, int64_t n, int64_t cells, bool batched) {
    const auto address = reinterpret_cast<uintptr_t>(base);
    auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<std::decay_t<decltype(array)>>(address + bytes);
      bytes += (count * sizeof(*array) + 255) / 256 * 256;
    };
    const int64_t entries_of_grid = cells > 0 ? n : 0;
    take(ticket, 1);
    take(greatest_side, 2);
    take(listed, 1);
    take(list, kMostListed);
    take(counts, cells);
    zeroed = bytes;
    take(starts, cells > 0 ? cells + 1 : 0);
    take(grid, 1);
    take(ranked, n);
    take(entries, entries_of_grid);
    take(classes, batched ? n : 0);
    take(entry_classes, batched ? entries_of_grid : 0);
    take(entry_ranks, entries_of_grid);
    take(cell, entries_of_grid);
    take(place, entries_of_grid);
    take(windows, entries_of_grid);
    take(status, n);
  }

  int64_t bytes = 0, zeroed;
  uint32_t* ticket;         // the next rank to be drawn
  Bits* greatest_side;      // width and height
  uint32_t *listed, *list;  // How many, and ranks of boxes that are kept, plus one, as they come.
  uint32_t *counts, *starts;
  Grid<V>* grid;
  Box<V>*ranked, *entries;           // in order of rank, and of cell
  int64_t *classes, *entry_classes;  // the same
  uint32_t* entry_ranks;             // with kIsKept once the box is kept, kNone once it is dropped
  uint32_t *cell, *place;            // of ranks: the cell, and the place in it, later among all entries
  Window* windows;                   // of ranks, as are these:
  uint8_t* status;
};

// Raises a number that isn't negative; its bits are in the same order.
__device__ __forceinline__ void raise(unsigned* to, float value) {
  const unsigned bits = __float_as_uint(value);
  if (bits > *static_cast<volatile unsigned*>(to)) atomicMax(to, bits);
}
__device__ __forceinline__ void raise(unsigned long long* to, double value) {
  const unsigned long long bits = __double_as_longlong(value);
  if (bits > *static_cast<volatile unsigned long long*>(to)) atomicMax(to, bits);
}
__device__ __forceinline__ float from_bits(unsigned bits) {
  return __uint_as_float(bits);
}
__device__ __forceinline__ double from_bits(unsigned long long bits) {
  return __longlong_as_double(bits);
}

// One block makes the grid, from a sample of the boxes, in steps: one that takes the sample, and one for each axis.
// Four threads count the boxes of the sample that are less than one of them, which is its place in their order.
template <class T>
class Fit {
 public:
  using V = typename Source<T>::V;

 private:
  static constexpr int kSample = Axis<V>::kSample, kSegments = Axis<V>::kMostSegments;

 public:
  static constexpr int kSteps = 3;

  struct Shared {
    V values[2][kSample], sorted[kSample];
    int places[kSample], taking_part;
  };

  __device__ void operator()(int step, Shared& shared) const {
    if (step == 0) {
      sample(shared);
    } else if (step == 1) {
      set(grid.x, shared.values[0], shared, out->x);
    } else if (step == 2) {
      set(grid.y, shared.values[1], shared, out->y);
    }
  }

  Source<T> source;
  int64_t n;
  Threshold<V> threshold;
  Grid<V> grid;  // as many groups, segments and cells
  Grid<V>* out;  // null where none is to be made

 private:
  __device__ void sample(Shared& shared) const {
    const int i = threadIdx.x;
    if (i == 0) {
      shared.taking_part = 0;
      out->groups = grid.groups, out->sizes = grid.sizes, out->sizes_per_octave = grid.sizes_per_octave;
    }
    __syncthreads();
    if (i < kSample) {
      const Box<V> box = source.box(i * n / kSample);
      const bool takes_part = threshold.takes_part(box);
      shared.values[0][i] = takes_part ? box.x1 + box.x2 : Limits<V>::infinity;
      shared.values[1][i] = takes_part ? box.y1 + box.y2 : Limits<V>::infinity;
      if (takes_part) atomicAdd(&shared.taking_part, 1);
    }
  }

  __device__ void set(const Axis<V>& axis, const V* values, Shared& shared, Axis<V>& to) const {
    constexpr int kPart = kSample * kSample / kFitThreads;
    const int i = threadIdx.x % kSample, part = threadIdx.x / kSample;
    if (part == 0) shared.places[i] = 0;
    __syncthreads();
    const V own = values[i];
    int before = 0;
#pragma unroll 8
    for (int k = part * kPart; k < (part + 1) * kPart; ++k) {
      const V other = values[k];
      before += other < own || (other == own && k < i);
    }
    atomicAdd(&shared.places[i], before);
    __syncthreads();
    if (part == 0) shared.sorted[shared.places[i]] = own;
    __syncthreads();
    const int segment = threadIdx.x;
    if (segment >= kSegments) return;
    to.low[segment] = to.scale[segment] = 0;  // Of segments that there aren't, which are copied with the others.
    if (segment >= axis.segments) return;
    const auto quantile = [&](int s) {
      const int count = shared.taking_part;
      return count == 0 ? V(0) : shared.sorted[s * (count - 1) / axis.segments];
    };
    to.segments = axis.segments, to.cells = axis.cells;
    to.set(segment, quantile(segment), quantile(segment + 1));
  }
};

template <class T>
__global__ void __launch_bounds__(kFitThreads) fit_kernel(Fit<T> fit) {
  __shared__ typename Fit<T>::Shared shared;
  for (int step = 0; step < Fit<T>::kSteps; ++step) fit(step, shared);
}

// A copy in shared memory, made by all threads of a block; of words, as shared memory has no constructors.
template <class V>
__device__ __forceinline__ const Grid<V>& copied(const Grid<V>* from) {
  using Word = int64_t;
  constexpr int kWords = sizeof(Grid<V>) / sizeof(Word);
  static_assert(sizeof(Grid<V>) % sizeof(Word) == 0 && alignof(Grid<V>) <= alignof(Word));
  __shared__ Word words[kWords];
  for (int k = threadIdx.x; k < kWords; k += kThreads) words[k] = reinterpret_cast<const Word*>(from)[k];
  __syncthreads();
  return *reinterpret_cast<const Grid<V>*>(words);
}

// A thread a rank; the last block goes on to the end of its share of `status`, which compact_kernel reads in vectors.
template <bool kGrid, class T, class V = typename Source<T>::V>
__global__ void __launch_bounds__(kThreads) prepare_kernel(
    Source<T> source, const int64_t* order, Classes classes, int64_t n, Threshold<V> threshold, Work<V> work) {
  const Grid<V>* grid = nullptr;
  if constexpr (kGrid) grid = &copied(work.grid);
  const int64_t rank = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (rank >= n) {
    work.status[rank] = kUndecided;
    return;
  }
  const int64_t index = order[rank];
  const Box<V> box = source.box(index);
  const bool takes_part = threshold.takes_part(box);
  const int64_t class_of_box = classes.values ? classes[index] : 0;
  work.ranked[rank] = box;
  work.status[rank] = takes_part ? kUndecided : kKept;
  if (classes.values) work.classes[rank] = class_of_box;
  if constexpr (kGrid) {
    uint32_t cell = kNone;
    if (takes_part) {
      const uint32_t row = grid->y.cell(box.y1 + box.y2), column = grid->x.cell(box.x1 + box.x2);
      cell = grid->first(class_of_box, grid->size(area(box)), row) + column;
      work.place[rank] = atomicAdd(work.counts + cell, 1u);
      raise(work.greatest_side, box.x2 - box.x1);
      raise(work.greatest_side + 1, box.y2 - box.y1);
    }
    work.cell[rank] = cell;
  }
}

template <class V>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(int64_t n, bool batched, Threshold<V> threshold, Work<V> work) {
  const Grid<V>& grid = copied(work.grid);
  const int64_t rank = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (rank >= n) return;
  if (work.cell[rank] == kNone) {
    work.windows[rank] = {}, work.place[rank] = kNone;
    return;
  }
  const uint32_t at = work.starts[work.cell[rank]] + work.place[rank];
  const Box<V> box = work.ranked[rank];
  const auto x = reach(threshold, box.x1, box.x2, area(box), from_bits(work.greatest_side[0]));
  const auto y = reach(threshold, box.y1, box.y2, area(box), from_bits(work.greatest_side[1]));
  const auto cells = [](const Axis<V>& axis, const Interval<V>& interval) {
    return uint2{static_cast<uint32_t>(axis.cell(interval.low)), static_cast<uint32_t>(axis.cell(interval.high)) + 1};
  };
  const uint2 columns = cells(grid.x, x), rows = cells(grid.y, y);
  work.windows[rank] = {columns.x, columns.y, rows.x, rows.y};
  work.entries[at] = box;
  work.entry_ranks[at] = rank;
  work.place[rank] = at;
  if (batched) work.entry_classes[at] = work.classes[rank];
}

// Blocks of resolve_kernel that a multiprocessor holds at least, as far as registers go: most warps wait. With more of
// them ptxas spills registers, as it would of float64; Turing holds no more threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <class V>
constexpr int kResolveBlocks = 1;
#else
template <class V>
constexpr int kResolveBlocks = sizeof(V) == 4 ? 8 : 1;
#endif

// A block draws as many ranks as it has warps, and a warp decides a rank: few of them, as another block takes its place
// once the slowest is done. racecheck reports the accesses to `decided`, which need no barrier: a status that is read
// too early only costs time.
template <bool kBatched, class V>
__global__ void __launch_bounds__(kResolveThreads, kResolveBlocks<V>)
    resolve_kernel(uint32_t n, Grid<V> grid, Threshold<V> threshold, Work<V> work) {
  constexpr uint32_t kRanks = kResolveThreads / kWarp;
  constexpr uint32_t kChunk = 8 * kWarp;  // Between two a warp looks whether it is done.
  constexpr uint32_t kLong = 16384;
  constexpr uint32_t kPart = kWarp * kWarp;  // numbers of entries that a warp has bits for
  constexpr int kLooks = 8;  // of a lane that waits, before it asks what the others saw: most wait for one alone
  __shared__ uint32_t begins_of_warps[kRanks][kWarp], offsets_of_warps[kRanks][kWarp];
  __shared__ uint32_t drawn;
  __shared__ uint8_t
      decided[kRanks];  // As work.status, of the block's own ranks, which wait for one another in chains.
  if (threadIdx.x == 0) drawn = atomicAdd(work.ticket, kRanks);
  if (threadIdx.x < kRanks) decided[threadIdx.x] = kUndecided;
  __syncthreads();
  const uint32_t lane = threadIdx.x % kWarp, first = drawn, rank = first + threadIdx.x / kWarp;
  if (rank >= n) return;
  // With a grid, a box that doesn't take part has no window, and so is kept.
  const bool has_grid = grid.groups > 0;
  const Box<V> box = work.ranked[rank];
  const Window window = has_grid ? work.windows[rank] : Window{};
  const uint32_t own_entry = has_grid ? work.place[rank] : kNone;
  const Test<V> suppresses(threshold, box);
  const int64_t class_of_box = kBatched ? work.classes[rank] : 0;
  bool dropped = false, more = false;
  uint32_t waits_for = kNone;  // of the lane: the lowest rank that is undecided and suppresses the box
  auto test = [&](uint32_t other, const Box<V>& other_box, int64_t other_class) {
    const bool is_kept = other & kIsKept;
    other &= ~kIsKept;
    if (other >= rank || (kBatched && other_class != class_of_box) || !suppresses(other_box)) return;
    const uint8_t status = is_kept ? uint8_t(kKept) : static_cast<volatile uint8_t*>(work.status)[other];
    if (status == kKept) dropped = true;
    if (status != kUndecided) return;
    more = more || waits_for != kNone;
    waits_for = min(waits_for, other);
  };

  // What lies near the box: runs of entries, one of each row of cells and size, with the box's own size first. A lane
  // has a run at a time, and the entries of all lanes are numbered as if they were one run. Returns how many there are.
  const uint32_t rows = window.bottom - window.top, runs = rows * min(grid.sizes, 3), size = grid.size(area(box));
  uint32_t number_of_run = 0, length_of_run = 0;  // the number of its first entry
  uint32_t offset_of_run = 0;                     // from numbers to entries
  auto load_runs = [&](uint32_t first_run) {
    const uint32_t run = first_run + lane;
    uint32_t begin = 0;
    length_of_run = 0;
    if (run < runs) {
      const uint32_t apart = run < rows ? 0 : run < 2 * rows ? 1 : 2, row = window.top + run - apart * rows;
      const uint32_t of_size = (size + (apart < 2 ? apart : grid.sizes - 1)) & (grid.sizes - 1);
      const uint32_t first = grid.first(class_of_box, of_size, row);
      begin = work.starts[first + window.left], length_of_run = work.starts[first + window.right] - begin;
    }
    number_of_run = warp_sum_before(length_of_run);
    offset_of_run = begin - number_of_run;
    return __shfl_sync(kAll, number_of_run + length_of_run, kWarp - 1);
  };
  uint32_t near = rank;
  if (has_grid) {
    near = load_runs(0);
    for (uint32_t run = kWarp; run < runs; run += kWarp) near += load_runs(run);
  }
  // Of kPart numbers from `part` on: a bit for each that a run begins with, and the offsets of these runs.
  uint32_t *const begins = begins_of_warps[threadIdx.x / kWarp], *const offsets = offsets_of_warps[threadIdx.x / kWarp];
  auto mark_runs = [&](uint32_t part) {
    __syncwarp();
    begins[lane] = 0;
    __syncwarp();
    const bool is_here = length_of_run > 0 && number_of_run < part + kPart && number_of_run + length_of_run > part;
    const uint32_t lanes = __ballot_sync(kAll, is_here), at = max(number_of_run, part) - part;
    if (is_here) {
      atomicOr(&begins[at / kWarp], 1u << at % kWarp);
      offsets[__popc(lanes & ((1u << lane) - 1))] = offset_of_run;
    }
    __syncwarp();
  };
  // Whether a box that is kept suppresses it.
  auto look_at_ranks = [&] {
    for (uint32_t begin = 0; begin < rank; begin += kChunk) {
      const uint32_t stop = min(begin + kChunk, rank);
      for (uint32_t i = begin + lane; i < stop; i += 2 * kWarp) {  // Two are read before one is tested.
        const uint32_t next = i + kWarp;
        const bool has_next = next < stop;
        const Box<V> one = work.ranked[i], other = has_next ? work.ranked[next] : Box<V>{};
        test(i, one, kBatched ? work.classes[i] : 0);
        test(has_next ? next : kNone, other, kBatched && has_next ? work.classes[next] : 0);
      }
      if (__any_sync(kAll, dropped)) return true;
    }
    return false;
  };
  // Where very many are near, among boxes that all overlap, few are kept: it looks at those that it finds listed, then
  // at all that isn't dropped.
  const bool is_long = near > kLong;
  auto look_at_listed = [&] {
    const uint32_t count = min(*static_cast<volatile uint32_t*>(work.listed), kMostListed);
    for (uint32_t begin = 0; begin < count; begin += kWarp) {
      const uint32_t at = begin + lane;
      const uint32_t other = at < count ? static_cast<volatile uint32_t*>(work.list)[at] - 1 : kNone;
      if (other < rank) test(other, work.ranked[other], kBatched ? work.classes[other] : 0);
      if (__any_sync(kAll, dropped)) return true;
    }
    return false;
  };
  auto look_at_rest = [&] {
    constexpr uint32_t kTurns = 2, kVector = sizeof(uint4), kStep = kTurns * kWarp * kVector;
    for (uint32_t begin = 0; begin < rank; begin += kStep) {
      uint4 statuses[kTurns];
#pragma unroll
      for (uint32_t turn = 0; turn < kTurns; ++turn) {
        const uint32_t at = begin + (turn * kWarp + lane) * kVector;
        constexpr uint32_t kAllDropped = 0x01010101 * kDropped;
        statuses[turn] = make_uint4(kAllDropped, kAllDropped, kAllDropped, kAllDropped);
        if (at < rank) statuses[turn] = __ldcg(reinterpret_cast<const uint4*>(work.status + at));
      }
#pragma unroll
      for (uint32_t turn = 0; turn < kTurns; ++turn) {
        const uint32_t words[] = {statuses[turn].x, statuses[turn].y, statuses[turn].z, statuses[turn].w};
#pragma unroll
        for (uint32_t word = 0; word < 4; ++word) {
          for (uint32_t rest = ~words[word] & 0x01010101 * kDropped; rest != 0; rest &= rest - 1) {
            const uint32_t other = begin + (turn * kWarp + lane) * kVector + word * 4 + (__ffs(rest) - 1) / 8;
            if (other < rank) test(other, work.ranked[other], kBatched ? work.classes[other] : 0);
          }
        }
      }
      if (__any_sync(kAll, dropped)) return true;
    }
    return false;
  };
  auto look = [&] {
    if (is_long && rank > kLong) return look_at_listed() || look_at_rest();
    if (rank <= near) return look_at_ranks();
    for (uint32_t run = 0; run < runs; run += kWarp) {
      const uint32_t count = runs <= kWarp ? near : load_runs(run);
      uint32_t begun = 0;  // Runs, of those that are marked.
      auto entry_of = [&](uint32_t at) {
        const uint32_t bits = begins[at % kPart / kWarp], here = begun + __popc(bits & ((2u << lane) - 1));
        begun += __popc(bits);
        return at + lane + offsets[here - 1];
      };
      for (uint32_t at = 0; at < count; at += 2 * kWarp) {  // Two are read before one is tested.
        if (at % kPart == 0) mark_runs(at), begun = 0;
        const uint32_t one = entry_of(at), other = entry_of(at + kWarp);
        const bool has_one = at + lane < count, has_other = at + kWarp + lane < count;
        const uint32_t rank_of_one = has_one ? work.entry_ranks[one] : kNone;
        const uint32_t rank_of_other = has_other ? work.entry_ranks[other] : kNone;
        const Box<V> box_of_one = has_one ? work.entries[one] : Box<V>{};
        const Box<V> box_of_other = has_other ? work.entries[other] : Box<V>{};
        test(rank_of_one, box_of_one, kBatched && has_one ? work.entry_classes[one] : 0);
        test(rank_of_other, box_of_other, kBatched && has_other ? work.entry_classes[other] : 0);
        if (__any_sync(kAll, dropped)) return true;
      }
    }
    return false;
  };
  bool is_dropped;
  do {
    more = false;
    is_dropped = look();
    for (bool waits = !is_dropped && __any_sync(kAll, waits_for != kNone); waits;) {
      if (waits_for != kNone) {
        const uint8_t* of = waits_for >= first ? decided + (waits_for - first) : work.status + waits_for;
        uint8_t status = kUndecided;
        for (int k = 0; k < kLooks && status == kUndecided; ++k) status = *static_cast<const volatile uint8_t*>(of);
        dropped = status == kKept;
        if (status != kUndecided) waits_for = kNone;
      }
      is_dropped = __any_sync(kAll, dropped);
      waits = !is_dropped && __any_sync(kAll, waits_for != kNone);
    }
  } while (!is_dropped && __any_sync(kAll, more));
  if (lane != 0) return;
  const uint8_t status = is_dropped ? kDropped : kKept;
  static_cast<volatile uint8_t*>(decided)[rank - first] = status;
  static_cast<volatile uint8_t*>(work.status)[rank] = status;
  if (own_entry != kNone) {  // Spares others the test, or a look at the status; too late, it only costs time.
    static_cast<volatile uint32_t*>(work.entry_ranks)[own_entry] = is_dropped ? kNone : rank | kIsKept;
  }
  if (is_dropped || !is_long || *static_cast<volatile uint32_t*>(work.listed) >= kMostListed) return;
  const uint32_t at = atomicAdd(work.listed, 1);
  if (at < kMostListed) work.list[at] = rank + 1;
}

}  // namespace
}  // namespace extension_cpp::nms
