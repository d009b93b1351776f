// The order in which many boxes are visited, on CUDA: a radix sort in one launch. PyTorch's takes some twenty, for
// longer on the host than on the device.
//
// Each pass takes 8 bits of the keys, from the lowest up. A block has a part of the keys. It adds up how many of each
// digit all blocks have, and those before it: so it knows where its own go to, which it puts there in the order that
// they have. It also counts them, by their next digit, for the block whose part that place is in. A pass in which all
// keys have the same digit ends there: scores in float16 and bfloat16 have keys of few bits.
#pragma once

#include <cooperative_groups.h>

#include "few.cuh"
#include "grid.cuh"

namespace extension_cpp::nms {
namespace {

constexpr int64_t kMostToSort = 1 << 19;
constexpr int kSortThreads = 1024, kDigitBits = 8, kDigits = 1 << kDigitBits, kPasses = 32 / kDigitBits;

// The parts of the blocks, of which as many are there at the same time. The last block has none.
struct SortPlan {
  SortPlan(int64_t n, int processors)
      : part(ceil_div(ceil_div(n, std::max(1, processors - 1)), kSortThreads) * kSortThreads),
        blocks(ceil_div(n, part) + 1) {}

  // Whether a warp that adds up what each block has of a digit needs no more than 16 bits.
  bool fits() const { return part * ceil_div(blocks, kWarp) < 1 << 16; }

  int64_t part, blocks;
};

// How many keys of each digit a block has, in 16 bits each, so that a warp reads all at once: those of lane, lane + 32
// and so on belong to a lane.
struct Counts {
  __device__ static uint32_t one(uint32_t digit) { return 1u << digit / kWarp % 2 * 16; }
  __device__ uint32_t* pair(uint32_t digit) { return pairs + digit % kWarp * kPairs + digit / kWarp / 2; }

  static constexpr int kPairs = kDigits / kWarp / 2;  // of a lane
  static_assert(kPairs == 4);
  alignas(16) uint32_t pairs[kWarp * kPairs];
};

// Device memory, of one allocation; without a base, only how much of it.
struct SortWork {
  SortWork(void* base, int64_t n, int64_t blocks) {
    items = static_cast<uint2*>(base);
    counts = reinterpret_cast<Counts*>(items + 2 * n);
    bytes = 2 * n * sizeof(*items) + 3 * blocks * sizeof(*counts);
  }

  uint2* items;    // twice all keys, each with its box: what a pass reads and what it writes
  Counts* counts;  // three times, of each block: those of this pass, of the next, and zeros for the one after
  int64_t bytes;
};

// The lanes that have the same digit, of those that take part.
__device__ __forceinline__ unsigned lanes_with(uint32_t digit, bool takes_part) {
  unsigned lanes = __ballot_sync(kAll, takes_part);
#pragma unroll
  for (int bit = 0; bit < kDigitBits; ++bit) {
    const bool is_set = digit >> bit & 1;
    const unsigned set = __ballot_sync(kAll, is_set);
    lanes &= is_set ? set : ~set;
  }
  return lanes;
}

// order[r]: the index of the box of rank r. All blocks are there at the same time. The last one has no keys, and makes
// the grid meanwhile; all write `zeros` zeros to `zeroed`: that spares two launches.
template <class T>
__global__ void __launch_bounds__(kSortThreads, 1) sort_kernel(
    const float* scores, int64_t stride, uint32_t n, uint32_t part, SortWork work, int64_t* order, uint64_t* zeroed,
    uint32_t zeros, Fit<T> fit) {
  static_assert(kSortThreads == kFitThreads && kPasses > Fit<T>::kSteps);
  constexpr int kWarps = kSortThreads / kWarp;
  __shared__ typename Fit<T>::Shared shared;
  __shared__ uint32_t next[kDigits], of_warps[kWarps][kDigits], sums[kDigits / kWarp];
  __shared__ Counts counted;
  const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, below = (1u << lane) - 1;
  const uint32_t begin = min(blockIdx.x * part, n), end = min(begin + part, n);
  const uint32_t own = threadIdx.x;  // The digit of a thread, where there is one.
  const uint2* from = nullptr;       // The scores themselves, until a pass has written keys.
  auto item = [&](uint32_t i) { return from ? __ldcg(from + i) : make_uint2(visit_key(scores[i * stride]), i); };
  auto digit_of = [](uint2 one, int pass) { return one.x >> pass * kDigitBits & (kDigits - 1); };
  auto counts_of = [&](int pass, uint32_t block) { return work.counts + pass % 3 * gridDim.x + block; };
  constexpr int kAllPairs = sizeof(Counts) / sizeof(uint32_t);
  auto write = [&](int pass, uint32_t pair) { __stcg(counts_of(pass, blockIdx.x)->pairs + threadIdx.x, pair); };
  // Counts the block's own keys.
  auto count = [&](int pass) {
    if (threadIdx.x < kAllPairs) counted.pairs[threadIdx.x] = 0;
    __syncthreads();
    for (uint32_t tile = begin; tile < end; tile += kSortThreads) {
      const uint32_t i = tile + threadIdx.x, digit = i < end ? digit_of(item(i), pass) : 0;
      const unsigned same = lanes_with(digit, i < end);
      if (i < end && (same & below) == 0) atomicAdd(counted.pair(digit), Counts::one(digit) * __popc(same));
    }
    __syncthreads();
    if (threadIdx.x < kAllPairs) write(pass, counted.pairs[threadIdx.x]);
  };
  for (uint32_t k = blockIdx.x * kSortThreads + threadIdx.x; k < zeros; k += gridDim.x * kSortThreads) zeroed[k] = 0;
  if (threadIdx.x < kAllPairs) write(1, 0);
  count(0);

  for (int pass = 0; pass < kPasses; ++pass) {
    cooperative_groups::this_grid().sync();
    if (blockIdx.x == gridDim.x - 1 && fit.out) fit(pass, shared);
    // How many keys of each digit there are, and how many before this block's: a warp adds up some blocks, in 16 bits.
    uint4 total = {}, before = {};
    for (uint32_t block = warp; block < gridDim.x - 1; block += kWarps) {
      const uint4 four = __ldcg(reinterpret_cast<const uint4*>(counts_of(pass, block)->pairs) + lane);
      total.x += four.x, total.y += four.y, total.z += four.z, total.w += four.w;
      if (block < blockIdx.x) before.x += four.x, before.y += four.y, before.z += four.z, before.w += four.w;
    }
    auto put = [&](int k, uint32_t totals, uint32_t befores) {
      of_warps[warp][2 * k * kWarp + lane] = __byte_perm(totals, befores, 0x5410);
      of_warps[warp][(2 * k + 1) * kWarp + lane] = __byte_perm(totals, befores, 0x7632);
    };
    put(0, total.x, before.x), put(1, total.y, before.y), put(2, total.z, before.z), put(3, total.w, before.w);
    if (threadIdx.x < kAllPairs) write(pass + 2, 0);
    __syncthreads();
    uint32_t all = 0, at = 0;
    if (own < kDigits) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) all += of_warps[w][own] & 0xffff, at += of_warps[w][own] >> 16;
      const uint32_t lower = warp_sum_before(all);
      at += lower;
      if (lane == kWarp - 1) sums[warp] = lower + all;
    }
    const bool is_last = pass == kPasses - 1;
    if (__syncthreads_or(all == n)) {
      if (!is_last) count(pass + 1);
      continue;
    }
    if (own < kDigits) {
      for (uint32_t w = 0; w < warp; ++w) at += sums[w];
      next[own] = at;
    }

    // Where each key goes to: behind those of its digit in the tiles and warps before, and in its own warp.
    uint2* const to = from == work.items ? work.items + n : work.items;
    for (uint32_t tile = begin; tile < end; tile += kSortThreads) {
      const uint32_t i = tile + threadIdx.x;
      const uint2 one = i < end ? item(i) : make_uint2(0, 0);
      const uint32_t digit = digit_of(one, pass);
      const unsigned same = lanes_with(digit, i < end);
      __syncwarp();  // The last tile's have been read.
      for (int k = 0; k < kDigits; k += kWarp) of_warps[warp][k + lane] = 0;
      __syncwarp();
      if (i < end && (same & below) == 0) of_warps[warp][digit] = __popc(same);
      __syncthreads();
      if (own < kDigits) {
        uint32_t at = next[own];
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const uint32_t count = of_warps[w][own];
          of_warps[w][own] = at;
          at += count;
        }
        next[own] = at;
      }
      __syncthreads();
      if (i >= end) continue;
      const uint32_t at = of_warps[warp][digit] + __popc(same & below);
      if (is_last) {
        order[at] = one.y;
      } else {
        __stcg(to + at, one);
        const uint32_t following = digit_of(one, pass + 1);
        atomicAdd(counts_of(pass + 1, at / part)->pair(following), Counts::one(following));
      }
    }
    if (is_last) return;
    from = to;
  }
  // The last pass had nothing to do.
  for (uint32_t i = begin + threadIdx.x; i < end; i += kSortThreads) order[i] = item(i).y;
}

}  // namespace
}  // namespace extension_cpp::nms
