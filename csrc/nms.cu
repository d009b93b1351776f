// The nms operators on CUDA.
//
// Two numbers: on float32 about 150 bytes are moved for a box, and 20 operations done for each pair that the grid
// leaves: with a threshold of 0.5 those closer than half a side, some hundred for a box among 100,000 in a field of 20
// by 20 sides.
//
// Sorted by score, a box's rank is its place in the order of visits. prepare_kernel brings the boxes into that order
// and counts those in each cell of a grid; scan_kernel adds up the counts; scatter_kernel puts the boxes in order of
// cells, where what is near a box is a few runs of consecutive entries. resolve_kernel decides each box, a warp a box;
// compact_kernel writes the indices of those kept. Few boxes need no grid, and with a threshold below zero none helps:
// then the entries are in order of rank, and what may suppress a box is all that is before it.
//
// Why resolve_kernel is right: a box is kept if and only if no kept box of a lower rank suppresses it. Its status is
// final once written, and written once all boxes of lower rank that suppress it are final or one of them is kept; so by
// induction over ranks there is one result, whatever the timing, and a status that is read too early only costs time.
// Why it ends: blocks draw ranks in order, so the lowest rank that is undecided is always in a running warp, and waits
// for none. No block needs another one to be resident, and nothing is launched or read back in between.
#include "nms.h"

#include <tuple>

#include "common/elementwise.cuh"
#include "common/launch.cuh"
#include "common/scan.cuh"

namespace extension_cpp::nms {
namespace {

constexpr int kThreads = 256, kSample = 512;
constexpr int64_t kFewBoxes = 4096, kMostCells = 1 << 22, kColumnsPerRow = 8, kGroups = 64;

constexpr uint32_t kNone = 0xffffffff;
enum : uint32_t { kUndecided = 0, kDropped = 1, kKept = 2 };  // The low two bits of a status; above them is the rank.

template <class T>
struct Source {
  template <class V>
  __device__ Box<V> box(int64_t index) const {
    const T* at = boxes + index * down;
    return {
        static_cast<V>(at[0]), static_cast<V>(at[along]), static_cast<V>(at[2 * along]), static_cast<V>(at[3 * along])};
  }

  const T* boxes;
  int64_t down, along;
};

struct Classes {
  const int64_t* values;
  int64_t stride;
};

// Classes share groups, of which each has a grid of its own.
struct Cells {
  int groups = 1, rows = 1, columns = 1;

  __host__ __device__ int64_t count() const { return static_cast<int64_t>(groups) * rows * columns; }
};

template <class V>
struct Grid {
  Axis<V> x, y;
};

// Device memory, of one allocation; without a base, only how much of it.
template <class V>
struct Work {
  using Bits = std::conditional_t<sizeof(V) == 4, unsigned, unsigned long long>;

  Work(void* base, int64_t n, const Cells& cells, bool batched) {
    const auto address = reinterpret_cast<uintptr_t>(base);
    auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<std::decay_t<decltype(array)>>(address + bytes);
      bytes += (count * sizeof(*array) + 255) / 256 * 256;
    };
    const bool has_grid = cells.count() > 1;
    take(ticket, 1);
    take(greatest_side, 2);
    take(counts, has_grid ? cells.count() : 0);
    zeroed = bytes;
    take(starts, has_grid ? cells.count() + 1 : 0);
    take(grid, 1);
    take(ranked, n);
    take(entries, has_grid ? n : 0);
    take(classes, batched ? n : 0);
    take(status, n);
    take(place, n);
    take(cell, has_grid ? n : 0);
    take(keep, n);
    if (!has_grid) entries = ranked;
  }

  int64_t bytes = 0, zeroed;
  uint32_t* ticket;     // the next rank to be drawn
  Bits* greatest_side;  // width and height
  uint32_t *counts, *starts;
  Grid<V>* grid;
  Box<V>*ranked, *entries;  // in order of rank, and of cell
  int64_t* classes;         // of entries
  uint32_t* status;         // of entries
  uint32_t *place, *cell;   // of ranks: the entry, and the cell
  uint8_t* keep;            // of ranks
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

// Where the boxes are, from a sample of them, in which one that is far off all others rarely is.
template <class V, class T>
__device__ Grid<V> fit(const Source<T>& source, int64_t n, const Threshold<V>& threshold, const Cells& cells) {
  constexpr V kInfinity = Limits<V>::infinity;
  __shared__ V parts[kThreads / kWarp][4];
  V low[4] = {kInfinity, kInfinity, kInfinity, kInfinity};  // x, y, -x, -y
  for (int64_t i = threadIdx.x; i < kSample; i += kThreads) {
    const Box<V> box = source.template box<V>(i * n / kSample);
    if (!threshold.takes_part(box)) continue;
    const V x = box.x1 + box.x2, y = box.y1 + box.y2;
    const V sums[4] = {x, y, -x, -y};
    for (int d = 0; d < 4; ++d) low[d] = sums[d] < low[d] ? sums[d] : low[d];
  }
  for (int d = 0; d < 4; ++d) {
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const V other = __shfl_xor_sync(kAll, low[d], step);
      low[d] = other < low[d] ? other : low[d];
    }
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp][d] = low[d];
  }
  __syncthreads();
  for (int d = 0; d < 4; ++d) {
    for (int w = 0; w < kThreads / kWarp; ++w) low[d] = parts[w][d] < low[d] ? parts[w][d] : low[d];
  }
  return {Axis<V>::fit(low[0], -low[2], cells.columns), Axis<V>::fit(low[1], -low[3], cells.rows)};
}

__device__ __forceinline__ int64_t first_cell(const Cells& cells, int64_t class_of_box, int row) {
  return (static_cast<uint64_t>(class_of_box) % cells.groups * cells.rows + row) * cells.columns;
}

// A thread a rank; the last block goes on to the end of its share of `keep`, which compact_kernel reads in vectors.
template <bool kGrid, class V, class T>
__global__ void __launch_bounds__(kThreads) prepare_kernel(
    Source<T> source, const int64_t* order, Classes classes, int64_t n, Threshold<V> threshold, Cells cells,
    Work<V> work) {
  Grid<V> grid;
  if constexpr (kGrid) {
    grid = fit(source, n, threshold, cells);
    if (blockIdx.x == 0 && threadIdx.x == 0) *work.grid = grid;
  }
  const int64_t rank = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (rank >= n) {
    work.keep[rank] = 0;
    return;
  }
  const int64_t index = order[rank];
  const Box<V> box = source.template box<V>(index);
  work.ranked[rank] = box;
  if constexpr (kGrid) {
    if (!threshold.takes_part(box)) {
      work.place[rank] = kNone;
      work.keep[rank] = 1;
      return;
    }
    const int64_t class_of_box = classes.values ? classes.values[index * classes.stride] : 0;
    const uint32_t cell = first_cell(cells, class_of_box, grid.y.cell(box.y1 + box.y2)) + grid.x.cell(box.x1 + box.x2);
    work.cell[rank] = cell;
    work.place[rank] = atomicAdd(work.counts + cell, 1u);
    raise(work.greatest_side, box.x2 - box.x1);
    raise(work.greatest_side + 1, box.y2 - box.y1);
  } else {
    work.place[rank] = rank;
    work.status[rank] = rank << 2;
    if (classes.values) work.classes[rank] = classes.values[index * classes.stride];
  }
}

template <class V>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const int64_t* order, Classes classes, int64_t n, Work<V> work) {
  const int64_t rank = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (rank >= n || work.place[rank] == kNone) return;
  const uint32_t at = work.starts[work.cell[rank]] + work.place[rank];
  work.place[rank] = at;
  work.entries[at] = work.ranked[rank];
  work.status[at] = rank << 2;
  if (classes.values) work.classes[at] = classes.values[order[rank] * classes.stride];
}

// As Threshold::exceeded, with the division only where the IoU is not clearly below the threshold.
template <class V>
__device__ __forceinline__ bool suppresses(
    const Threshold<V>& threshold, V clearly_below, const Box<V>& a, V area_a, const Box<V>& b) {
  const V inter = intersection(a, b), area_b = area(b);
  if (inter < clearly_below * (area_a + area_b - inter)) return false;
  return threshold.exceeded(area_a, area_b, inter);
}

// Whether a box is kept; all lanes of a warp together.
template <bool kGrid, bool kBatched, class V>
__device__ bool is_kept(const Threshold<V>& threshold, const Cells& cells, const Work<V>& work, uint32_t rank) {
  constexpr uint32_t kChunk = 8 * kWarp;
  const uint32_t lane = threadIdx.x % kWarp;
  const Box<V> box = work.ranked[rank];
  const V area_of_box = area(box), clearly_below = threshold.prunes ? threshold.iou * V(0.999) : V(0);
  const int64_t class_of_box = kBatched ? work.classes[work.place[rank]] : 0;
  while (true) {
    bool dropped = false, more = false;
    uint32_t waiting = kNone, waiting_for = 0;  // of the lane: a status and its entry, of the lowest rank undecided
    auto visit = [&](uint32_t begin, uint32_t end) {
      for (; begin < end; begin += kChunk) {
        for (uint32_t i = begin + lane; i < min(begin + kChunk, end); i += kWarp) {
          if (kBatched && work.classes[i] != class_of_box) continue;
          if (!suppresses(threshold, clearly_below, box, area_of_box, work.entries[i])) continue;
          const uint32_t status = *static_cast<volatile uint32_t*>(work.status + i);
          if (status >> 2 >= rank) continue;
          if ((status & 3) == kKept) dropped = true;
          if ((status & 3) != kUndecided) continue;
          more = more || waiting != kNone;
          if (status < waiting) waiting = status, waiting_for = i;
        }
        if (__any_sync(kAll, dropped)) return true;
      }
      return false;
    };
    if constexpr (kGrid) {
      const Grid<V> grid = *work.grid;
      const auto [left, right] = reach(threshold, box.x1, box.x2, area_of_box, from_bits(work.greatest_side[0]));
      const auto [top, bottom] = reach(threshold, box.y1, box.y2, area_of_box, from_bits(work.greatest_side[1]));
      const int first = grid.x.cell(left), last = grid.x.cell(right), end = grid.y.cell(bottom) + 1;
      for (int row = grid.y.cell(top); row < end; row += kWarp) {
        uint2 run = {0, 0};  // A lane looks up a row.
        if (row + static_cast<int>(lane) < end) {
          const uint32_t* starts = work.starts + first_cell(cells, class_of_box, row + lane);
          run = {starts[first], starts[last + 1]};
        }
        for (int k = 0; k < min(kWarp, end - row); ++k) {
          if (visit(__shfl_sync(kAll, run.x, k), __shfl_sync(kAll, run.y, k))) return false;
        }
      }
    } else {
      if (visit(0, rank)) return false;
    }
    for (bool waits = __any_sync(kAll, waiting != kNone); waits;) {
      if (waiting != kNone) {
        const uint32_t decision = *static_cast<volatile uint32_t*>(work.status + waiting_for) & 3;
        dropped = decision == kKept;
        if (decision != kUndecided) waiting = kNone;
      }
      if (__any_sync(kAll, dropped)) return false;
      waits = __any_sync(kAll, waiting != kNone);
      if (waits) __nanosleep(20);
    }
    if (!__any_sync(kAll, more)) return true;
  }
}

// A block draws as many ranks as it has warps. Without a bound on the blocks of a multiprocessor ptxas would spill
// registers for a rounder number of them.
template <bool kGrid, bool kBatched, class V>
__global__ void __launch_bounds__(kThreads, 1)
    resolve_kernel(int64_t n, Threshold<V> threshold, Cells cells, Work<V> work) {
  __shared__ uint32_t first;
  if (threadIdx.x == 0) first = atomicAdd(work.ticket, kThreads / kWarp);
  __syncthreads();
  const uint32_t rank = first + threadIdx.x / kWarp;
  if (rank >= n) return;
  const uint32_t place = work.place[rank];
  if (place == kNone) return;
  const bool kept = is_kept<kGrid, kBatched>(threshold, cells, work, rank);
  if (threadIdx.x % kWarp != 0) return;
  *static_cast<volatile uint32_t*>(work.status + place) = rank << 2 | (kept ? kKept : kDropped);
  work.keep[rank] = kept;
}

Cells cells_for(int64_t n, bool batched) {
  Cells cells;
  cells.groups = batched ? kGroups : 1;
  const int64_t count = std::min(n, kMostCells) / cells.groups;
  cells.rows = std::max(1.0, std::sqrt(count / kColumnsPerRow));
  cells.columns = std::max<int64_t>(1, count / cells.rows);
  return cells;
}

struct Selection {
  Tensor indices, count;
};

template <class V, class T>
void select(
    Launch& launch, const View& boxes, const Tensor& order_of, Classes classes, double iou_threshold,
    const Selection& out) {
  const int64_t n = boxes.sizes[0], blocks = ceil_div(n, kThreads);
  const Threshold<V> threshold(iou_threshold);
  const bool has_grid = n > kFewBoxes && threshold.prunes, batched = classes.values != nullptr;
  const Cells cells = has_grid ? cells_for(n, batched) : Cells{};
  const int64_t bytes = Work<V>(nullptr, n, cells, batched).bytes;
  const Tensor memory = empty(boxes, aoti_torch_dtype_uint8(), bytes);
  const Work<V> work(memory.mutable_data_ptr(), n, cells, batched);
  const Source<T> source{static_cast<const T*>(boxes.tensor->const_data_ptr()), boxes.strides[0], boxes.strides[1]};
  const int64_t* order = order_of.const_data_ptr<int64_t>();

  launch.zero(work.ticket, work.zeroed);
  if (has_grid) {
    const int64_t count = cells.count(), part = scan_part(count);
    launch(prepare_kernel<true, V, T>, blocks, kThreads, 0, source, order, classes, n, threshold, cells, work);
    launch(scan_kernel, ceil_div(count, part), kScanThreads, 0, work.counts, work.starts, count, part);
    launch(scatter_kernel<V>, blocks, kThreads, 0, order, classes, n, work);
  } else {
    launch(prepare_kernel<false, V, T>, blocks, kThreads, 0, source, order, classes, n, threshold, cells, work);
  }
  auto* resolve = has_grid ? (batched ? resolve_kernel<true, true, V> : resolve_kernel<true, false, V>)
                           : (batched ? resolve_kernel<false, true, V> : resolve_kernel<false, false, V>);
  launch(resolve, ceil_div(n, kThreads / kWarp), kThreads, 0, n, threshold, cells, work);
  const int64_t part = scan_part(n);
  launch(
      compact_kernel, ceil_div(n, part), kScanThreads, 0, work.keep, order, n, part,
      out.indices.mutable_data_ptr<int64_t>(), out.count.mutable_data_ptr<int64_t>());
}

Selection select(
    const Operator& op, const Tensor& boxes, const Tensor& scores, const Tensor* idxs, double iou_threshold,
    bool waits) {
  const Call<3> call(op, {&boxes, &scores, idxs});
  const View& view = call.views[0];
  Launch launch(op.name(), view);
  if (waits && launch.is_capturing()) {
    fail(op.name(), "the size of its result is not known inside a CUDA graph; nms_padded has one that is");
  }
  const int64_t n = view.sizes[0];
  constexpr auto kLong = torch::headeronly::ScalarType::Long;
  Selection out{empty(view, aoti_torch_dtype_int64(), n), empty_scalar(view, aoti_torch_dtype_int64())};
  if (n == 0) {
    launch.zero(out.count.mutable_data_ptr(), sizeof(int64_t));
    return out;
  }
  const Tensor order = descending(scores);
  Classes classes{nullptr, 0};
  std::optional<Tensor> wide;
  if (idxs) {
    wide = torch::stable::to(*idxs, kLong);
    classes = {wide->const_data_ptr<int64_t>(), View(op.name(), "idxs", *wide).strides[0]};
  }
  dispatch(Floating(), op.name(), view.dtype, [&]<class T>(T) {
    using V = typename Compute<T>::type;
    select<V, T>(launch, view, order, classes, iou_threshold, out);
  });
  if (!waits) return out;
  const int64_t count = launch.read(out.count.const_data_ptr<int64_t>());
  out.indices = torch::stable::narrow(out.indices, 0, 0, count);
  if (2 * count < n) out.indices = torch::stable::clone(out.indices);  // Don't hold on to memory for the rest.
  return out;
}

Tensor nms(const Tensor& boxes, const Tensor& scores, double iou_threshold) {
  return select(kNms, boxes, scores, nullptr, iou_threshold, true).indices;
}

Tensor batched_nms(const Tensor& boxes, const Tensor& scores, const Tensor& idxs, double iou_threshold) {
  return select(kBatchedNms, boxes, scores, &idxs, iou_threshold, true).indices;
}

std::tuple<Tensor, Tensor> nms_padded(
    const Tensor& boxes, const Tensor& scores, double iou_threshold, const std::optional<Tensor>& idxs) {
  const Selection out = select(kNmsPadded, boxes, scores, idxs ? &*idxs : nullptr, iou_threshold, false);
  return {out.indices, out.count};
}

}  // namespace

EXTENSION_CPP_REGISTER(m) {
  m.add(kNms, TORCH_BOX(&nms));
  m.add(kBatchedNms, TORCH_BOX(&batched_nms));
  m.add(kNmsPadded, TORCH_BOX(&nms_padded));
}

}  // namespace extension_cpp::nms
