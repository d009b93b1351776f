// nms of few boxes on CUDA, without a grid: each pair is tested.
//
// rank_kernel counts for each box those that are visited before it: a comparison a pair takes less time than the passes
// of a sort, up to some thousand boxes. decide_kernel tests each pair and decides each box.
#pragma once

#include "../common/elementwise.cuh"
#include "../common/launch.cuh"
#include "../common/scan.cuh"
#include "source.cuh"

namespace extension_cpp::nms {
namespace {

constexpr int64_t kFewBoxes = 4096, kMostToRank = 8192;
constexpr int kRankThreads = 1024, kDecideThreads = 512;

// Less for a box that is visited earlier; of boxes with the same one, the first is.
__device__ __forceinline__ uint32_t visit_key(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 and 0 are equal.
  // Of positive numbers a greater one has greater bits, of negative ones the other way round; NaN comes first.
  return score != score ? 0 : bits >> 31 ? bits : 0x7fffffff - bits;
}

// order[r]: the index of the box of rank r. A block ranks kWarp boxes, and each of its warps compares them with a part
// of all boxes. Also writes `zeros` zeros to `zeroed`, which spares a launch.
__global__ void __launch_bounds__(kRankThreads)
    rank_kernel(const float* scores, int64_t stride, uint32_t n, int64_t* order, uint64_t* zeroed, uint32_t zeros) {
  constexpr uint32_t kNever = 0xffffffff, kPart = 2048;
  __shared__ __align__(16) uint32_t keys[kPart];
  __shared__ uint32_t ranks[kWarp];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, first = blockIdx.x * kWarp, i = first + lane;
  const uint32_t own = i < n ? visit_key(scores[i * stride]) : kNever;
  // Those before it in its own tile of 32 that have the same key.
  const uint32_t same = __match_any_sync(kAll, own);
  if (warp == 0) ranks[lane] = __popc(same & ((1u << lane) - 1));
  for (uint32_t k = blockIdx.x * kRankThreads + threadIdx.x; k < zeros; k += gridDim.x * kRankThreads) zeroed[k] = 0;
  uint32_t before = 0;
  for (uint32_t begin = 0; begin < n; begin += kPart) {
    __syncthreads();
    for (uint32_t k = threadIdx.x; k < kPart; k += kRankThreads) {
      const uint32_t other = begin + k;
      keys[k] = other < n ? visit_key(scores[other * stride]) : kNever;
    }
    __syncthreads();
    const uint32_t end = min(kPart, n - begin);
    for (uint32_t tile = warp * kWarp; tile < end; tile += kRankThreads) {
      const uint32_t limit = own + (begin + tile < first);  // In the tiles before its own, equal ones are before it.
#pragma unroll
      for (int k = 0; k < kWarp; k += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(keys + tile + k);
        before += (four.x < limit) + (four.y < limit) + (four.z < limit) + (four.w < limit);
      }
    }
  }
  atomicAdd(ranks + lane, before);
  __syncthreads();
  if (warp == 0 && i < n) order[ranks[lane]] = i;
}

__host__ __device__ inline int64_t tiles_of(int64_t n) {
  return ceil_div(n, kWarp);
}

// A number of each box. Where one box suppresses another, the area of their intersection is at least the sum of both
// numbers: with an IoU above t it is above t / (1 + t) of the sum of the areas, and rounding is far below what is taken
// off. What passes may still not suppress.
template <class V>
__device__ __forceinline__ V least_overlap(const Threshold<V>& threshold, const Box<V>& box) {
  if (!threshold.prunes) return -Limits<V>::infinity;
  if (!threshold.takes_part(box)) return Limits<V>::infinity;
  constexpr V kTiny = sizeof(V) == 4 ? V(0x1p-100) : V(0x1p-960);  // Where numbers have fewer bits.
  return V(0.999) * (threshold.iou / (1 + threshold.iou)) * area(box) - kTiny;
}

// An entry of the lists of a block's 32 boxes, of which each has one for every tile whose boxes suppress it, in any
// order: which boxes do, and which tile that is.
struct Suppressors {
  uint32_t boxes[kWarp];
  uint16_t tile[kWarp];
};

// A block decides a tile of 32 ranks, a lane a rank. Its warps test the boxes of each tile before, then one warp waits
// for those that suppress one of the block's, and decides: a box is dropped once one that is kept suppresses it, and
// kept once all that suppress it are dropped. What is decided of a tile is one number, the boxes decided above those
// kept, and is written for others as it grows. What it says of a box never changes, so that reads need no order. Why it
// ends: blocks draw tiles in order, so the first box that is undecided is in a running block, and waits for none.
template <bool kBatched, class T>
__global__ void __launch_bounds__(kDecideThreads) decide_kernel(
    Source<T> source, const int64_t* order, Classes classes, uint32_t n, Threshold<typename Source<T>::V> threshold,
    uint32_t* ticket, uint64_t* decided, int64_t* out, int64_t* count) {
  using V = typename Source<T>::V;
  constexpr int kMostTiles = kFewBoxes / kWarp, kWarps = kDecideThreads / kWarp;
  constexpr uint32_t kLooks = 2;  // Where a lane waits for more tiles, what is decided of all is read at once.
  extern __shared__ Suppressors suppressors[];
  __shared__ Box<V> boxes[kWarps][kWarp];  // For each warp: those of a tile, which may suppress the block's.
  __shared__ V least[kWarps][kWarp];
  __shared__ int64_t classes_of[kBatched ? kWarps : 1][kWarp];
  __shared__ uint32_t drawn, listed[kWarp], within[kWarp], total;
  __shared__ uint64_t seen[kMostTiles];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  if (warp == 0) {
    if (lane == 0) drawn = atomicAdd(ticket, 1u);
    listed[lane] = 0;
  }
  __syncthreads();
  const uint32_t tile = drawn, rank = tile * kWarp + lane;
  const int64_t index = order[min(rank, n - 1)];
  const Box<V> box = source.box(index);
  const V area_of_box = area(box), least_of_box = rank < n ? least_overlap(threshold, box) : Limits<V>::infinity;
  const int64_t class_of_box = kBatched ? classes[index] : 0;
  auto look = [&](uint32_t t) { return *static_cast<volatile uint64_t*>(decided + t); };
  for (uint32_t other_tile = warp; other_tile <= tile; other_tile += warps) {
    const int64_t other_index = order[min(other_tile * kWarp + lane, n - 1)];
    const Box<V> other_box = source.box(other_index);
    __syncwarp();
    boxes[warp][lane] = other_box;
    least[warp][lane] = least_overlap(threshold, other_box);
    if constexpr (kBatched) classes_of[warp][lane] = classes[other_index];
    __syncwarp();
    uint32_t rest = 0;
#pragma unroll
    for (int k = 0; k < kWarp; ++k) {
      rest |= static_cast<uint32_t>(intersection(boxes[warp][k], box) >= least[warp][k] + least_of_box) << k;
    }
    if (other_tile == tile) rest &= (1u << lane) - 1;
    uint32_t by = 0;  // Those that suppress the lane's box.
    for (; rest != 0; rest &= rest - 1) {
      const int k = __ffs(rest) - 1;
      if (kBatched && classes_of[warp][k] != class_of_box) continue;
      const Box<V> other = boxes[warp][k];
      if (threshold.exceeded(area_of_box, area(other), intersection(box, other))) by |= 1u << k;
    }
    if (other_tile == tile) {
      within[lane] = by;
    } else if (by != 0) {
      Suppressors& next = suppressors[atomicAdd(listed + lane, 1u)];
      next.boxes[lane] = by;
      next.tile[lane] = other_tile;
    }
  }
  __syncthreads();
  if (warp == 0) {
    const uint32_t by_own = within[lane];
    uint32_t left = rank < n ? listed[lane] : 0, written = 0, known = 0, kept = 0;
    uint32_t kept_if_dropped = 0, kept_else = 0;  // Of the one box that waits, once `foreseen`.
    bool dropped = rank >= n, foreseen = false;
    while (true) {
      const bool few = __all_sync(kAll, left <= kLooks);
      if (!few) {
        __syncwarp();  // All have read what was seen before.
        for (uint32_t t = lane; t < tile; t += kWarp) seen[t] = look(t);
        __syncwarp();
      }
      bool drops = false;
      for (uint32_t k = 0; k < left;) {
        const uint32_t by = suppressors[k].boxes[lane], from = suppressors[k].tile[lane];
        const uint64_t state = few ? look(from) : seen[from];
        if (by & static_cast<uint32_t>(state)) {
          drops = true;
          left = 0;
        } else if (by & ~static_cast<uint32_t>(state >> 32)) {
          ++k;
        } else {  // All are dropped: the last of the list takes its place.
          --left;
          suppressors[k].tile[lane] = suppressors[left].tile[lane];
          suppressors[k].boxes[lane] = suppressors[left].boxes[lane];
        }
      }
      dropped = dropped || drops;
      const uint32_t waiting = __ballot_sync(kAll, left != 0);
      if (foreseen) {
        if (waiting != 0) continue;
        kept = __any_sync(kAll, drops) ? kept_if_dropped : kept_else;
        known = kAll;
      }
      uint32_t last = ~known;
      while (known != kAll && known != last) {  // As many turns as the longest chain in the tile has links.
        last = known;
        const bool drop = dropped || (by_own & kept) != 0, keep = !drop && left == 0 && (by_own & ~known) == 0;
        kept = __ballot_sync(kAll, keep);
        known = __ballot_sync(kAll, drop || keep);
      }
      if (known != written && lane == 0) {
        *static_cast<volatile uint64_t*>(decided + tile) = static_cast<uint64_t>(known) << 32 | kept;
      }
      if (known == kAll) break;
      if (known == written && __popc(waiting) == 1) {
        // As in a long chain: what follows from either answer is found while it waits.
        const uint32_t out = __ballot_sync(kAll, dropped);
        for (int k = 0; k < kWarp; ++k) {
          const uint32_t by = within[k], bit = 1u << k;
          if ((by & kept_if_dropped) == 0 && !((out | waiting) & bit)) kept_if_dropped |= bit;
          if ((by & kept_else) == 0 && !(out & bit)) kept_else |= bit;
        }
        foreseen = true;
      }
      written = known;
    }
    uint32_t before;
    bool complete;
    do {
      complete = true, before = 0;
      for (uint32_t t = lane; t < tile; t += kWarp) {
        const uint64_t state = look(t);
        before += __popc(static_cast<uint32_t>(state));
        complete = complete && static_cast<uint32_t>(state >> 32) == kAll;
      }
    } while (!__all_sync(kAll, complete));
    before = warp_sum(before);
    if (kept >> lane & 1) out[before + __popc(kept & ((1u << lane) - 1))] = order[rank];
    if (lane == 0) total = before + __popc(kept);
  }
  if (tile + 1 < tiles_of(n)) return;
  __syncthreads();
  for (uint32_t i = total + threadIdx.x; i < n; i += blockDim.x) out[i] = -1;
  if (threadIdx.x == 0) *count = total;
}

}  // namespace
}  // namespace extension_cpp::nms
