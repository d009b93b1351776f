// Sums over what comes before, on the device.
#pragma once

#include <cstdint>
#include <type_traits>

#include "launch.cuh"

namespace extension_cpp {

constexpr int kWarp = 32, kScanThreads = 1024;
constexpr unsigned kAll = 0xffffffff;  // lanes

// How much of n a block of scan_kernel or compact_kernel takes: a multiple of what it takes at a time, for few blocks.
inline int64_t scan_part(int64_t n) {
  constexpr int64_t kParts = 64;
  return ceil_div(ceil_div(n, kParts), kScanThreads) * kScanThreads;
}

namespace {

__device__ __forceinline__ uint32_t warp_sum(uint32_t value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
  return value;
}

// The sum over the lanes before this one.
template <class N>
__device__ __forceinline__ N warp_sum_before(N value) {
  N inclusive = value;
  for (int step = 1; step < kWarp; step *= 2) {
    const N other = __shfl_up_sync(kAll, inclusive, step);
    if (static_cast<int>(threadIdx.x % kWarp) >= step) inclusive += other;
  }
  return inclusive - value;
}

// The sum over the threads before this one, and in `total` over all of the block. All threads call it.
template <class N>
__device__ N block_scan(std::type_identity_t<N> value, N& total) {
  __shared__ N sums[kScanThreads / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const N before_in_warp = warp_sum_before(value);
  __syncthreads();  // The last call's sums have been read.
  if (lane == kWarp - 1) sums[warp] = before_in_warp + value;
  __syncthreads();
  N before = 0;
  total = 0;
  for (int w = 0; w < kScanThreads / kWarp; ++w) {
    if (w == warp) before = total;
    total += sums[w];
  }
  return before + before_in_warp;
}

// starts[i]: the sum of the counts before i, for i up to `n` itself. Each block adds up what lies before its own part:
// more reads than a scan needs, but one launch, and no block waits for another.
__global__ void __launch_bounds__(kScanThreads, 1)
    scan_kernel(const uint32_t* counts, uint32_t* starts, int64_t n, int64_t part) {
  const int64_t begin = blockIdx.x * part, end = min(begin + part, n);
  uint32_t sum = 0, total;
  for (int64_t i = threadIdx.x; i < begin / 4; i += kScanThreads) {
    const uint4 four = reinterpret_cast<const uint4*>(counts)[i];
    sum += four.x + four.y + four.z + four.w;
  }
  block_scan(sum, total);
  uint32_t before = total;
  for (int64_t at = begin + threadIdx.x; at - threadIdx.x < end; at += kScanThreads) {
    const uint32_t exclusive = block_scan(at < end ? counts[at] : 0, total);
    if (at < end) starts[at] = before + exclusive;
    before += total;
  }
  if (end == n && threadIdx.x == 0) starts[n] = before;
}

// The values for which the lowest bit of `keep` is set, in order, then -1, and how many they are. As scan_kernel;
// `keep` goes on with zeros to a multiple of 16.
__global__ void __launch_bounds__(kScanThreads, 1)
    compact_kernel(const uint8_t* keep, const int64_t* values, int64_t n, int64_t part, int64_t* out, int64_t* count) {
  const int64_t begin = blockIdx.x * part, end = min(begin + part, n);
  uint32_t sum = 0, sum_before = 0, kept, before, total;
  for (int64_t i = threadIdx.x; i < (n + 15) / 16; i += kScanThreads) {
    const uint4 sixteen = reinterpret_cast<const uint4*>(keep)[i];
    constexpr uint32_t kLowest = 0x01010101;
    const uint32_t ones = __popc(sixteen.x & kLowest) + __popc(sixteen.y & kLowest) + __popc(sixteen.z & kLowest) +
                          __popc(sixteen.w & kLowest);
    sum += ones;
    if (i < begin / 16) sum_before += ones;
  }
  block_scan(sum, kept);
  block_scan(sum_before, before);
  if (blockIdx.x == 0 && threadIdx.x == 0) *count = kept;
  for (int64_t at = begin + threadIdx.x; at - threadIdx.x < end; at += kScanThreads) {
    const bool is_kept = at < end && keep[at] & 1;
    const uint32_t exclusive = block_scan(is_kept, total);
    if (is_kept) out[before + exclusive] = values[at];
    if (at < end && at >= kept) out[at] = -1;
    before += total;
  }
}

}  // namespace
}  // namespace extension_cpp
