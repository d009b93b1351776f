// nms of few boxes on CUDA, without a grid: each pair is tested.
//
// rank_kernel counts for each box those that are visited before it: a comparison a pair takes less time than the passes
// of a sort, up to some ten thousand boxes. mask_kernel tests each pair, and decide_kernel goes through the ranks.
#pragma once

#include "../common/elementwise.cuh"
#include "../common/launch.cuh"
#include "../common/scan.cuh"
#include "source.cuh"

namespace extension_cpp::nms {
namespace {

constexpr int64_t kFewBoxes = 4096, kMostToRank = 16384;
constexpr int kRankThreads = 1024, kMaskThreads = 128, kDecideThreads = 512;

// A number that is less the earlier a box is visited, and no two are equal.
__device__ __forceinline__ uint64_t visit_key(float score, uint32_t index) {
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 and 0 are equal.
  // Of positive numbers a greater one has greater bits, of negative ones the other way round; NaN comes first.
  const uint32_t key = score != score ? 0 : bits >> 31 ? bits : 0x7fffffff - bits;
  return static_cast<uint64_t>(key) << 32 | index;
}

// order[r]: the index of the box of rank r. A block ranks kWarp * kEach boxes, and each of its warps compares them with
// a part of all boxes.
template <int kEach>
__global__ void __launch_bounds__(kRankThreads)
    rank_kernel(const float* scores, int64_t stride, uint32_t n, int64_t* order) {
  constexpr uint32_t kNever = 0xffffffff, kPart = 2048;
  __shared__ __align__(16) uint64_t keys[kPart];
  __shared__ uint32_t ranks[kWarp * kEach];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, first = blockIdx.x * kWarp * kEach + lane;
  uint64_t own[kEach];
  uint32_t before[kEach] = {};
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const uint32_t i = first + e * kWarp;
    own[e] = i < n ? visit_key(scores[i * stride], i) : 0;
  }
  if (threadIdx.x < kWarp * kEach) ranks[threadIdx.x] = 0;
  for (uint32_t begin = 0; begin < n; begin += kPart) {
    __syncthreads();
    for (uint32_t k = threadIdx.x; k < kPart; k += kRankThreads) {
      const uint32_t i = begin + k;
      keys[k] = i < n ? visit_key(scores[i * stride], i) : static_cast<uint64_t>(kNever) << 32 | kNever;
    }
    __syncthreads();
    const uint32_t end = min(kPart, n - begin);
    for (uint32_t tile = warp * kWarp; tile < end; tile += kRankThreads) {
#pragma unroll 8
      for (int k = 0; k < kWarp; k += 2) {
        const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(keys + tile + k);
#pragma unroll
        for (int e = 0; e < kEach; ++e) before[e] += (two.x < own[e]) + (two.y < own[e]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) atomicAdd(ranks + e * kWarp + lane, before[e]);
  __syncthreads();
  const uint32_t i = blockIdx.x * kWarp * kEach + threadIdx.x;
  if (threadIdx.x < kWarp * kEach && i < n) order[ranks[threadIdx.x]] = i;
}

__host__ __device__ inline int64_t tiles_of(int64_t n) {
  return ceil_div(n, kWarp);
}

// mask[w][j], for tiles of 32 ranks: which of the boxes of tile w suppress that of rank j, for those before j. A warp
// takes a pair of tiles, a lane a rank j.
template <bool kBatched, class T>
__global__ void __launch_bounds__(kMaskThreads) mask_kernel(
    Source<T> source, const int64_t* order, Classes classes, uint32_t n, Threshold<typename Source<T>::V> threshold,
    uint32_t* mask) {
  using V = typename Source<T>::V;
  constexpr int kWarps = kMaskThreads / kWarp;
  __shared__ Box<V> boxes[kWarps][kWarp];
  __shared__ int64_t classes_of[kBatched ? kWarps : 1][kWarp];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, pair = blockIdx.x * kWarps + warp;
  // Pairs are numbered by rows of the triangle: those of tile t begin at t (t + 1) / 2.
  uint32_t tile = (sqrtf(8.0f * pair + 1) - 1) / 2;
  if ((tile + 1) * (tile + 2) / 2 <= pair) ++tile;
  if (tile * (tile + 1) / 2 > pair) --tile;
  const uint32_t other_tile = pair - tile * (tile + 1) / 2;
  if (tile >= tiles_of(n)) return;
  const uint32_t rank = tile * kWarp + lane, other = other_tile * kWarp + lane;
  const int64_t index = rank < n ? order[rank] : order[0], other_index = other < n ? order[other] : index;
  boxes[warp][lane] = source.box(other_index);
  if constexpr (kBatched) classes_of[warp][lane] = classes[other_index];
  const Test<V> suppresses(threshold, source.box(index));
  const int64_t class_of_box = kBatched ? classes[index] : 0;
  __syncwarp();
  uint32_t bits = 0;
#pragma unroll 4
  for (int k = 0; k < kWarp; ++k) {
    const bool same_class = !kBatched || classes_of[warp][k] == class_of_box;
    bits |= static_cast<uint32_t>(suppresses(boxes[warp][k]) && same_class) << k;
  }
  if (tile == other_tile) bits &= (1u << lane) - 1;
  mask[other_tile * tiles_of(n) * kWarp + rank] = bits;
}

// One block. Its first warp decides a tile after the other: what it waits for are the tiles that it has just decided, in
// its registers, and whether tiles further back suppress a box, which the other warps look up meanwhile.
__global__ void __launch_bounds__(kDecideThreads, 1)
    decide_kernel(const uint32_t* mask, const int64_t* order, uint32_t n, int64_t* out, int64_t* count) {
  constexpr uint32_t kMostTiles = kFewBoxes / kWarp, kNear = 8, kGroup = 4, kBatch = 32, kDue = 8;
  constexpr uint64_t kReady = uint64_t{1} << 32;  // Above the bits, for one access to both.
  __shared__ uint64_t kept[kMostTiles], dropped_before[kMostTiles];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const uint32_t tiles = tiles_of(n), stride = tiles * kWarp;
  for (uint32_t t = threadIdx.x; t < tiles; t += blockDim.x) kept[t] = dropped_before[t] = 0;
  __syncthreads();
  if (warp == 0) {
    uint32_t recent[kNear] = {};  // What is kept of the tile before, and of those before that.
    uint32_t next[kGroup][kNear + 1];
    auto load = [&](uint32_t base) {
#pragma unroll
      for (uint32_t g = 0; g < kGroup; ++g) {
#pragma unroll
        for (uint32_t k = 0; k <= kNear; ++k) {
          const uint32_t tile = base + g;
          next[g][k] = tile < tiles && k <= tile ? mask[(tile - k) * stride + tile * kWarp + lane] : 0;
        }
      }
    };
    load(0);
    for (uint32_t base = 0; base < tiles; base += kGroup) {
      uint32_t words[kGroup][kNear + 1];
#pragma unroll
      for (uint32_t g = 0; g < kGroup; ++g) {
#pragma unroll
        for (uint32_t k = 0; k <= kNear; ++k) words[g][k] = next[g][k];
      }
      load(base + kGroup);
#pragma unroll
      for (uint32_t g = 0; g < kGroup; ++g) {
        const uint32_t tile = base + g;
        if (tile >= tiles) break;
        uint32_t hit = tile * kWarp + lane >= n;
        if (tile > kNear) {
          uint64_t before;
          while ((before = *static_cast<volatile uint64_t*>(dropped_before + tile)) == 0) {
          }
          hit |= static_cast<uint32_t>(before) >> lane & 1;
        }
#pragma unroll
        for (uint32_t k = kNear; k > 0; --k) hit |= words[g][k] & recent[k - 1];
        // Of the tile, those that nothing kept suppresses: after as many turns as the longest chain has links.
        uint32_t last, now = __ballot_sync(kAll, hit == 0);
        do {
          last = now;
          now = __ballot_sync(kAll, hit == 0 && (words[g][0] & last) == 0);
        } while (now != last);
        if (lane == 0) *static_cast<volatile uint64_t*>(kept + tile) = kReady | now;
#pragma unroll
        for (uint32_t k = kNear - 1; k > 0; --k) recent[k] = recent[k - 1];
        recent[0] = now;
      }
    }
  } else {
    for (uint32_t tile = kNear + warp; tile < tiles; tile += warps - 1) {
      const uint32_t end = tile - kNear;
      uint32_t hit = 0;
      for (uint32_t begin = 0; begin < end; begin += kBatch) {
        uint32_t words[kBatch];
#pragma unroll
        for (uint32_t k = 0; k < kBatch; ++k) {
          words[k] = begin + k < end ? mask[(begin + k) * stride + tile * kWarp + lane] : 0;
        }
#pragma unroll
        for (uint32_t k = 0; k < kBatch; ++k) {
          if (begin + k >= end) break;
          uint64_t of_tile;
          while ((of_tile = *static_cast<volatile uint64_t*>(kept + begin + k)) == 0) {
            if (begin + k + kDue < end) __nanosleep(100);  // Else those that wait take the turns of the one that decides.
          }
          hit |= words[k] & static_cast<uint32_t>(of_tile);
        }
      }
      const uint32_t dropped = __ballot_sync(kAll, hit != 0);
      if (lane == 0) *static_cast<volatile uint64_t*>(dropped_before + tile) = kReady | dropped;
    }
  }
  __syncthreads();
  for (uint32_t tile = warp; tile < tiles; tile += warps) {
    uint32_t before = 0, all = 0;
    for (uint32_t t = lane; t < tiles; t += kWarp) {
      const uint32_t ones = __popc(static_cast<uint32_t>(kept[t]));
      all += ones;
      if (t < tile) before += ones;
    }
    before = warp_sum(before), all = warp_sum(all);
    const uint32_t rank = tile * kWarp + lane, ones = kept[tile];
    if (ones >> lane & 1) out[before + __popc(ones & ((1u << lane) - 1))] = order[rank];
    if (rank >= all && rank < n) out[rank] = -1;
    if (rank == 0) *count = all;
  }
}

}  // namespace
}  // namespace extension_cpp::nms
