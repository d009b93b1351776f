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
constexpr int kRankThreads = 1024, kMaskThreads = 128, kDecideThreads = 1024;

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

// One block. A warp has every so many-th pair of tiles, takes out what the tiles before suppress as soon as each is
// decided, and decides its own. What a pair waits for is the pair before, which takes some hundred cycles and no
// barrier: racecheck, which knows no order but that of barriers, reports each access to `decided` before the last of
// them.
__global__ void __launch_bounds__(kDecideThreads, 1)
    decide_kernel(const uint32_t* mask, const int64_t* order, uint32_t n, int64_t* out, int64_t* count) {
  constexpr int kMostTiles = kFewBoxes / kWarp, kAhead = 8;
  constexpr uint32_t kNext = 2;                     // So many pairs ahead a warp doesn't sleep while it waits.
  constexpr uint64_t kDecided = uint64_t{1} << 32;  // Above a tile's bits, for one access to both.
  __shared__ uint64_t decided[kMostTiles];
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const uint32_t tiles = tiles_of(n), stride = tiles * kWarp;
  for (uint32_t t = threadIdx.x; t < kMostTiles; t += blockDim.x) decided[t] = 0;
  __syncthreads();
  auto decision = [&](uint32_t tile) { return *static_cast<volatile uint64_t*>(decided + tile); };
  for (uint32_t pair = warp; 2 * pair < tiles; pair += warps) {
    const uint32_t a = 2 * pair * kWarp + lane, b = a + kWarp;  // ranks of this lane
    const bool has_b = 2 * pair + 1 < tiles;                    // Only the last pair may lack it.
    const uint32_t* const own = mask + 2 * pair * stride;
    const uint32_t a_by_a = own[a], b_by_a = has_b ? own[b] : 0, b_by_b = has_b ? own[stride + b] : 0;
    uint32_t hit_a = a >= n, hit_b = b >= n;
    for (uint32_t begin = 0; begin < pair; begin += kAhead) {
      uint32_t words[kAhead][4] = {};
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (begin + k >= pair) continue;
        const uint32_t* const from = mask + 2 * (begin + k) * stride;
        words[k][0] = from[a], words[k][1] = from[stride + a];
        if (has_b) words[k][2] = from[b], words[k][3] = from[stride + b];
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (begin + k >= pair) break;
        uint64_t first, second;
        while (true) {
          first = decision(2 * (begin + k)), second = decision(2 * (begin + k) + 1);
          if (first != 0 && second != 0) break;
          if (begin + k + kNext < pair) __nanosleep(20);  // Else those that wait take the turns of the one that works.
        }
        const auto kept_a = static_cast<uint32_t>(first), kept_b = static_cast<uint32_t>(second);
        hit_a |= (words[k][0] & kept_a) | (words[k][1] & kept_b);
        hit_b |= (words[k][2] & kept_a) | (words[k][3] & kept_b);
      }
    }
    // Of the ranks in the pair, those that nothing kept suppresses: after as many turns as the longest chain has links.
    uint32_t last_a, last_b, now_a = __ballot_sync(kAll, hit_a == 0), now_b = __ballot_sync(kAll, hit_b == 0);
    do {
      last_a = now_a, last_b = now_b;
      now_a = __ballot_sync(kAll, hit_a == 0 && (a_by_a & last_a) == 0);
      now_b = __ballot_sync(kAll, hit_b == 0 && ((b_by_a & last_a) | (b_by_b & last_b)) == 0);
    } while (now_a != last_a || now_b != last_b);
    if (lane < 2) *static_cast<volatile uint64_t*>(decided + 2 * pair + lane) = kDecided | (lane == 0 ? now_a : now_b);
  }
  __syncthreads();
  for (uint32_t tile = warp; tile < tiles; tile += warps) {
    uint32_t before = 0, all = 0;
    for (uint32_t t = lane; t < tiles; t += kWarp) {
      const uint32_t ones = __popc(static_cast<uint32_t>(decided[t]));
      all += ones;
      if (t < tile) before += ones;
    }
    before = warp_sum(before), all = warp_sum(all);
    const uint32_t rank = tile * kWarp + lane, ones = decided[tile];
    if (ones >> lane & 1) out[before + __popc(ones & ((1u << lane) - 1))] = order[rank];
    if (rank >= all && rank < n) out[rank] = -1;
    if (rank == 0) *count = all;
  }
}

}  // namespace
}  // namespace extension_cpp::nms
