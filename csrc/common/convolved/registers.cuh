// The state in registers: warps meet in shared memory every few steps, blocks in memory every few dozen.
#pragma once

#include "pass.cuh"

namespace extension_cpp::convolved {
namespace {

template <int kTaps>
constexpr int kEachOf = kTaps == kExact ? 2 : 4;

template <bool kBack, int kTaps>
constexpr int kMostThreadsOf = kEachOf<kTaps> == 4 || kBack ? 512 : 768;
template <int kTaps>
constexpr int kAheadOf = kEachOf<kTaps> == 4 ? 4 : 8;

// How a row lies on the warps of a block, and on blocks where it has several. Each has a part of its own and computes,
// beyond both its ends, what its neighbours have: of these margins a step makes the outermost elements wrong, as many
// as a step reads on that side, and where neighbours meet they become right again.
struct Tiles {
  int blocks = 1, own;        // of a row; elements that a block has
  int before = 0, after = 0;  // a block's margins
  int width;                  // with them
  int warps, tile, margin;    // of a row in a block; elements that a warp has; its margin before them
  int around;                 // a multiple of the row's elements that is no less than the margin
  int rows = 1;               // of a block
  int apart, meetings = 0;    // steps until warps meet, a multiple of kAhead; how often until blocks do
};

// Parts of a row that blocks tell each other, in memory: for each block, what its margins become. A word has an element
// and the number of the meeting, so that whoever waits for it needs nothing else; and there are words for two meetings,
// as a block that meets a neighbour again has read what that wrote the last time.
__device__ __forceinline__ void tell(uint64_t* word, uint32_t meeting, float value) {
  *reinterpret_cast<volatile uint64_t*>(word) = uint64_t{meeting} << 32 | __float_as_uint(value);
}

// For all lanes of a warp at once, or the compiler takes them to be apart from then on, and has every shuffle of the
// steps after it gather them first.
__device__ __forceinline__ float hear(const uint64_t* word, uint32_t meeting, bool wants) {
  constexpr uint32_t kPatience = 1 << 26;  // A minute: the other block is running, as the launch was a cooperative one.
  uint64_t value = uint64_t{meeting} << 32;
#pragma unroll 1
  for (uint32_t i = 0; i < kPatience; ++i) {
    if (wants) value = *reinterpret_cast<const volatile uint64_t*>(word);
    const bool is_there = static_cast<uint32_t>(value >> 32) == meeting;
    if (__all_sync(kAll, is_there)) return __uint_as_float(static_cast<uint32_t>(value));
  }
  __trap();
}

// A few taps: the state is in registers, and a lane gets its neighbours' elements by shuffles. kTaps: that many, for
// kExact, or at most that many. `parts`: for each row and block of it, and each tap, the sum of its products; null
// where there is but one block, whose sums are the gradient of the kernel.
template <bool kBack, int kTaps, bool kVectors, class T, class F>
__global__ void __launch_bounds__(kMostThreadsOf<kBack, kTaps>, 1)
    shuffled_kernel(Pass<T, F> pass, Tiles tiles, uint64_t* words, float* parts, T* grad_kernel) {
  constexpr int kEach = kEachOf<kTaps>, kAhead = kAheadOf<kTaps> / (kBack && !kVectors ? 2 : 1);
  constexpr int kBefore = kBack ? kTaps - 1 - kTaps / 2 : kTaps / 2, kAfter = kTaps - 1 - kBefore;
  extern __shared__ __align__(16) unsigned char shared[];
  const int taps = kTaps == kExact ? kTaps : static_cast<int>(pass.taps), n = static_cast<int>(pass.n);
  const int first = kTaps == kExact ? 0 : kBefore - (kBack ? taps - 1 - taps / 2 : taps / 2), end = first + taps;
  const auto tap_of = [&](int k) { return kBack ? end - 1 - k : k - first; };
  float weights[kTaps], products[kBack ? kTaps : 1] = {};
#pragma unroll
  for (int k = 0; k < kTaps; ++k) {
    const bool is_tap = k >= first && k < end;
    weights[k] = is_tap ? static_cast<float>(pass.weights[tap_of(k) * pass.weights_stride]) : 0;
  }
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % tiles.warps,
            row = threadIdx.x / kWarp / tiles.warps;
  const int block = blockIdx.x % tiles.blocks, own = min(tiles.own, n - block * tiles.own);
  const int width = tiles.blocks == 1 ? n : tiles.before + own + tiles.after;
  float* const rings = reinterpret_cast<float*>(shared) + row * 2 * tiles.width;
  const int e = lane * kEach - tiles.margin, i = warp * tiles.tile + e;  // in the warp's part, in the block's
  const int around = tiles.blocks == 1 ? tiles.around : width;
  int at[kEach], index[kEach];  // in the block's part, which is a ring, and in the row
  unsigned has = 0, writes = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const bool is_its_own = e + j >= 0 && e + j < tiles.tile && i + j < width;
    has |= unsigned{is_its_own} << j;
    writes |= unsigned{is_its_own && i + j >= tiles.before && i + j < tiles.before + own} << j;
    at[j] = j == 0 ? static_cast<unsigned>(i + around) % static_cast<unsigned>(width) : at[j - 1] + 1;
    if (at[j] == width) at[j] = 0;
    index[j] = block * tiles.own - tiles.before + at[j];
    index[j] += index[j] < 0 ? n : index[j] >= n ? -n : 0;
  }
  const int64_t group = blockIdx.x / tiles.blocks, groups = gridDim.x / tiles.blocks;
  const int beyond = tiles.before + tiles.after, right = block + 1 < tiles.blocks ? block + 1 : 0;
  const int left = block > 0 ? block - 1 : tiles.blocks - 1;
  words += group * 2 * tiles.blocks * beyond;
  uint32_t meeting = 0;
  int turn = 0;
  for (int64_t first_row = group * tiles.rows; first_row < pass.batch; first_row += groups * tiles.rows) {
    const int64_t b = first_row + row;
    Walk<kBack, kVectors, kEach, kAhead, T, F> walk(pass, b, width, index, writes);
    float state[kEach];
    walk.begin(pass, b, state);
    float window[kBefore + kEach + kAfter];
    const auto widen = [&] {
#pragma unroll
      for (int i = 0; i < kBefore; ++i) {
        const int lanes = (kBefore - i + kEach - 1) / kEach;
        window[i] = __shfl_up_sync(kAll, state[lanes * kEach - kBefore + i], lanes);
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j) window[kBefore + j] = state[j];
#pragma unroll
      for (int i = 0; i < kAfter; ++i) {
        window[kBefore + kEach + i] = __shfl_down_sync(kAll, state[i % kEach], i / kEach + 1);
      }
    };
    widen();
    for (int until_warps = tiles.apart, until_blocks = tiles.meetings; walk.rest > 0;) {
      walk.turn();
#pragma unroll
      for (int d = 0; d < kAhead; ++d) {
        if (d >= walk.here) break;
        float sums[kEach];
#pragma unroll
        for (int j = 0; j < kEach; ++j) sums[j] = kBack ? 0 : walk.input(d, j);
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
          if (kTaps != kExact && (k < first || k >= end)) continue;
#pragma unroll
          for (int j = 0; j < kEach; ++j) {
            sums[j] += weights[k] * window[j + k];
            if constexpr (kBack) {
              if (kVectors || writes >> j & 1) products[k] += window[j + k] * walk.state_at(d, j);
            }
          }
        }
        walk.make(pass.f, d, sums, state);
        widen();  // Before all that the next step doesn't wait for.
        walk.write(d);
      }
      until_warps -= kAhead;
      if (walk.rest <= 0 || until_warps > 0) continue;
      until_warps = tiles.apart;
      float* const ring = rings + turn * tiles.width;  // Read until the next turn but one.
      turn = 1 - turn;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (has >> j & 1) ring[at[j]] = state[j];
      }
      __syncthreads();
      if (tiles.blocks > 1 && --until_blocks == 0) {
        until_blocks = tiles.meetings;
        ++meeting;
        uint64_t* const now = words + meeting % 2 * tiles.blocks * beyond;
        for (int from = 0; from < beyond; from += blockDim.x) {
          const int i = from + threadIdx.x;
          const bool is_before = i < tiles.before;  // The last elements are what comes before the next block's.
          if (i < beyond) tell(now + (is_before ? right : left) * beyond + i, meeting, ring[is_before ? own + i : i]);
        }
        for (int from = 0; from < beyond; from += blockDim.x) {
          const int i = from + threadIdx.x;
          const float value = hear(now + block * beyond + i, meeting, i < beyond);
          if (i < beyond) ring[i < tiles.before ? i : own + i] = value;
        }
        __syncthreads();
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j) state[j] = ring[at[j]];
      widen();
    }
    if constexpr (kBack) {
      if (grad_kernel == nullptr) continue;
#pragma unroll
      for (int k = 0; k < kTaps; ++k) {
        if (k < first || k >= end) continue;
        const float sum = block_sum(writes ? products[k] : 0);
        products[k] = 0;
        if (threadIdx.x != 0) continue;
        if (parts != nullptr) {
          parts[(b * tiles.blocks + block) * taps + tap_of(k)] = sum;
        } else {
          grad_kernel[tap_of(k)] = static_cast<T>(sum);
        }
      }
    }
  }
}

}  // namespace
}  // namespace extension_cpp::convolved
