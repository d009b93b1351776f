// The convrnn operators on CUDA.
//
// What bounds them is the chain of T steps, of which each waits for the one before: shuffles, K multiply-adds and a
// tanh. All else is off the chain: inputs are loaded some steps before they are used, and results stored without
// waiting. Two numbers, of K = 3 in float32 on an H200: a step of a row that one warp holds takes 0.1 us, and
// blocks that meet wait 0.35 us for each other.
//
// So threads meet as rarely as they can. Three taps, and up to eight back in time or where a row is on several blocks,
// go through shuffled_kernel: a warp has a part of the row in registers and computes, beyond both its ends, what its
// neighbours have, so that warps meet in shared memory only every few steps, and blocks in memory every few dozen.
// Others go through forward_kernel and backward_kernel, which have the state of a row in shared memory, twice, so that
// a step needs one barrier. What doesn't fit there goes through plain_kernel, which reads the last state where it was
// written, in y and grad_x. All compute an element in the same order, whatever its place: results don't depend on how a
// row lies on threads.
//
// Sums over a row are partial results, which finish_kernel adds up in a fixed order; where K sums don't fit into
// registers, products_kernel makes them.
#include "convrnn.h"

#include <cuda_bf16.h>

#include <optional>

#include <torch/csrc/stable/ops.h>

#include "common/elementwise.cuh"
#include "common/launch.cuh"

namespace extension_cpp::convrnn {
namespace {

constexpr int kWarp = 32, kThreads = 512, kProducts = 8;
constexpr int kMostThreads = 1024;      // of kernels that need few registers
constexpr unsigned kAll = 0xffffffff;   // lanes
constexpr int64_t kShared = 48 * 1024;  // bytes that every device has without being asked
constexpr int kExact = 3, kFew = 8;
constexpr int64_t kSplits = 1024;  // partial results of products_kernel, at most

template <class T>
using Wide = typename Compute<T>::type;

// A pass through time: forward, or back in time. Step i forward makes h_{i+1} of h_i and x_i; step i back makes d_{T-i}
// of d_{T-i+1}, which is 0 for i = 0, and of the gradient and the state there; its step T makes grad_hidden.
template <class T>
struct Pass {
  Rows<const T> in;      // x, or the gradient of y
  Rows<const T> states;  // back: y
  Rows<const T> hidden;  // forward
  const T* weights;
  int64_t weights_stride;
  int64_t taps;
  T* out;         // y, or grad_x
  T* out_hidden;  // back: grad_hidden
  int64_t batch, steps, n;
};

// Neighbouring elements, which are one access to memory.
template <class T, int kEach>
struct alignas(std::min<size_t>(kEach * sizeof(T), 16)) Pack {
  T values[kEach];
};

// The same as words, which the compiler keeps as they were loaded until keep(): halves it would take apart where they
// are loaded, and wait for them there.
template <class T, int kEach>
struct alignas(alignof(Pack<T, kEach>)) Words {
  __device__ __forceinline__ void keep() {
#pragma unroll
    for (uint32_t& word : words) asm volatile("" : "+r"(word));
  }

  __device__ __forceinline__ T get(int j) const {
    Pack<T, kEach> pack;
    memcpy(&pack, words, sizeof(pack));
    return pack.values[j];
  }

  uint32_t words[sizeof(Pack<T, kEach>) / sizeof(uint32_t)];
};

template <class T, int kEach>
struct Elements : Pack<T, kEach> {
  __device__ __forceinline__ void keep() {}
  __device__ __forceinline__ T get(int j) const { return this->values[j]; }
};

// Pairs of bfloat16 take one instruction, which is quicker than that for one.
template <class T, int kEach, class V>
__device__ __forceinline__ Pack<T, kEach> rounded(const V (&from)[kEach]) {
  Pack<T, kEach> to;
  constexpr bool kPairs = std::is_same_v<T, torch::headeronly::BFloat16> && kEach % 2 == 0;
#pragma unroll
  for (int j = 0; j < kEach; j += kPairs ? 2 : 1) {
    if constexpr (kPairs) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(from[j], from[j + 1]);
      memcpy(&to.values[j], &pair, sizeof(pair));
    } else {
      to.values[j] = static_cast<T>(from[j]);
    }
  }
  return to;
}

// What tanh's slope is where its value is h.
template <class V>
__device__ __forceinline__ V slope_at(V h) {
  return (1 - h) * (1 + h);
}

// The tanh of each. In float32, of small numbers an odd polynomial, of others 1 - 2 / (exp(2x) + 1), at most 2.5 units
// in the last place off; and step by step for all of them, as a warp that goes from one to the next waits for each
// result.
template <int kEach, class V>
__device__ __forceinline__ void apply_tanh(V (&x)[kEach]) {
  if constexpr (std::is_same_v<V, float>) {
    constexpr float kSmall = 0.55f, kTwiceLog2E = 2.885390082f;
    float large[kEach], square[kEach], small[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) large[j] = fabsf(x[j]) * kTwiceLog2E;
#pragma unroll
    for (int j = 0; j < kEach; ++j) asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(large[j]));
#pragma unroll
    for (int j = 0; j < kEach; ++j) square[j] = x[j] * x[j];
#pragma unroll
    for (int j = 0; j < kEach; ++j) small[j] = fmaf(0x1.0d502ap-6f, square[j], -0x1.af7ccap-5f);
#pragma unroll
    for (int j = 0; j < kEach; ++j) large[j] += 1;
#pragma unroll
    for (int j = 0; j < kEach; ++j) asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(large[j]));
#pragma unroll
    for (int j = 0; j < kEach; ++j) small[j] = fmaf(small[j], square[j], 0x1.10cef6p-3f);
#pragma unroll
    for (int j = 0; j < kEach; ++j) small[j] = fmaf(small[j], square[j], -0x1.555452p-2f);
#pragma unroll
    for (int j = 0; j < kEach; ++j) small[j] *= square[j];
#pragma unroll
    for (int j = 0; j < kEach; ++j) small[j] = fmaf(small[j], x[j], x[j]);
#pragma unroll
    for (int j = 0; j < kEach; ++j) large[j] = fmaf(large[j], -2, 1);
#pragma unroll
    for (int j = 0; j < kEach; ++j) x[j] = fabsf(x[j]) > kSmall ? copysignf(large[j], x[j]) : small[j];
  } else {
#pragma unroll
    for (int j = 0; j < kEach; ++j) x[j] = tanh(x[j]);
  }
}

// The sum over a block, in a fixed order; in thread 0.
template <class V>
__device__ V block_sum(V value) {
  __shared__ V sums[1024 / kWarp];
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_down_sync(kAll, value, step);
  __syncthreads();  // The last call's sums have been read.
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = value;
  __syncthreads();
  V total = 0;
  for (int w = 0; threadIdx.x == 0 && w < static_cast<int>(blockDim.x) / kWarp; ++w) total += sums[w];
  return total;
}

// A thread's way through a pass: it has kEach elements of row b, of which it reads the inputs and writes those results
// that it is to write. kVectors: they are neighbours in memory, all or none of which it writes.
//
// The inputs of kAhead steps are loaded at a time, while those before are in use. Were each step to load some, a warp
// would wait for the newest whenever it waits for the oldest, as it has but a few counters of what is under way.
template <bool kBack, bool kVectors, int kEach, int kAhead, class T>
struct Walk {
  using V = Wide<T>;
  using Few = Pack<T, kEach>;
  using Held = std::conditional_t<kVectors && sizeof(T) == 2 && kEach % 2 == 0, Words<T, kEach>, Elements<T, kEach>>;

  __device__ __forceinline__ Walk(const Pass<T>& pass, int64_t b, const int (&index)[kEach], unsigned writes)
      : writes(writes),
        rest(static_cast<int>(pass.steps) + kBack),
        from(pass.in.row(b, kBack ? pass.steps : 0)),
        in_step(kBack ? -pass.in.time : pass.in.time),
        to(pass.out + (kBack ? (b + 1) * pass.steps - 1 : b * (pass.steps + 1)) * pass.n),
        step(kBack ? -pass.n : pass.n) {
    if constexpr (kBack) {
      from_states = pass.states.row(b, pass.steps);
      states_step = -pass.states.time;
      to_hidden = pass.out_hidden + b * pass.n;
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      at[j] = index[j];
      in_at[j] = index[j] * pass.in.along;
      if constexpr (kBack) states_at[j] = index[j] * pass.states.along;
    }
    load(rest);
  }

  // h_0, which it writes, or what comes before the first step back.
  __device__ __forceinline__ void begin(const Pass<T>& pass, int64_t b, V (&state)[kEach]) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      state[j] = 0;
      if constexpr (!kBack) {
        const T h = pass.hidden.row(b, 0)[at[j] * pass.hidden.along];
        if (writes >> j & 1) to[at[j]] = h;
        state[j] = static_cast<V>(h);
      }
    }
    if constexpr (!kBack) to += step;
  }

  // What the next kAhead steps need, or `more` of them.
  __device__ __forceinline__ void load(int more) {
    if (more >= kAhead) {
#pragma unroll
      for (int d = 0; d < kAhead; ++d) load_step(d);
    } else {
#pragma unroll
      for (int d = 0; d < kAhead; ++d) {
        if (d < more) load_step(d);
      }
    }
  }

  __device__ __forceinline__ void load_step(int d) {
    if constexpr (kVectors) {
      next[d] = *reinterpret_cast<const Held*>(from + in_at[0]);
      if constexpr (kBack) next_states[d] = *reinterpret_cast<const Held*>(from_states + states_at[0]);
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        next[d].values[j] = from[in_at[j]];
        if constexpr (kBack) next_states[d].values[j] = from_states[states_at[j]];
      }
    }
    from += in_step;
    if constexpr (kBack) from_states += states_step;
  }

  // To the next kAhead steps.
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      now[d] = next[d];
      now[d].keep();
      if constexpr (kBack) now_states[d] = next_states[d], now_states[d].keep();
    }
    here = min(rest, kAhead);
    rest -= kAhead;
    load(rest);
  }

  __device__ __forceinline__ V input(int d, int j) const { return static_cast<V>(now[d].get(j)); }
  __device__ __forceinline__ V state_at(int d, int j) const { return static_cast<V>(now_states[d].get(j)); }

  // Makes the new state of the convolved one.
  __device__ __forceinline__ void make(int d, V (&sums)[kEach], V (&state)[kEach]) {
    if constexpr (!kBack) apply_tanh(sums);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if constexpr (kBack) {
        const V slope = slope_at(state_at(d, j));
        sums[j] = (input(d, j) + sums[j]) * (is_last(d) ? V(1) : slope);
      }
    }
    made = rounded<T>(sums);
#pragma unroll
    for (int j = 0; j < kEach; ++j) state[j] = static_cast<V>(made.values[j]);
  }

  __device__ __forceinline__ void write(int d) {
    T* const row = is_last(d) ? to_hidden : to;
    to += step;
    if constexpr (kVectors) {
      if (writes) *reinterpret_cast<Few*>(row + at[0]) = made;
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (writes >> j & 1) row[at[j]] = made.values[j];
      }
    }
  }

  // Whether a step back makes grad_hidden.
  __device__ __forceinline__ bool is_last(int d) const { return kBack && rest <= 0 && d + 1 == here; }

  unsigned writes;  // a bit an element
  int here = 0;     // steps until the next turn
  int rest;         // steps from then on
  const T *from, *from_states;
  int64_t in_step, in_at[kEach], states_step, states_at[kEach];
  T *to, *to_hidden;
  int64_t step;
  int at[kEach];
  Few made;
  Held now[kAhead], next[kAhead], now_states[kBack ? kAhead : 1], next_states[kBack ? kAhead : 1];
};

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

__device__ __forceinline__ float hear(const uint64_t* word, uint32_t meeting) {
  constexpr uint32_t kPatience = 1 << 26;  // A minute: the other block is running, as the launch was a cooperative one.
#pragma unroll 1
  for (uint32_t i = 0; i < kPatience; ++i) {
    const uint64_t value = *reinterpret_cast<const volatile uint64_t*>(word);
    if (static_cast<uint32_t>(value >> 32) == meeting) return __uint_as_float(static_cast<uint32_t>(value));
  }
  __trap();
}

// A few taps: the state is in registers, and a lane gets its neighbours' elements by shuffles. kTaps: that many, for
// kExact, or at most that many. `parts`: for each row and block of it, and each tap, the sum of its products; null
// where there is but one block, whose sums are the gradient of the kernel.
template <bool kBack, int kTaps, bool kVectors, class T>
__global__ void __launch_bounds__(kMostThreadsOf<kBack, kTaps>, 1)
    shuffled_kernel(Pass<T> pass, Tiles tiles, uint64_t* words, float* parts, T* grad_kernel) {
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
  for (int64_t b = group * tiles.rows + row; b < pass.batch; b += groups * tiles.rows) {
    Walk<kBack, kVectors, kEach, kAhead, T> walk(pass, b, index, writes);
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
        walk.make(d, sums, state);
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
        for (int i = threadIdx.x; i < beyond; i += blockDim.x) {
          const bool is_before = i < tiles.before;  // The last elements are what comes before the next block's.
          tell(now + (is_before ? right : left) * beyond + i, meeting, ring[is_before ? own + i : i]);
        }
        for (int i = threadIdx.x; i < beyond; i += blockDim.x) {
          ring[i < tiles.before ? i : own + i] = hear(now + block * beyond + i, meeting);
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

// How many steps ahead a thread loads its kEach elements: as many as there are registers for, and even.
template <class T, int kEach>
constexpr int kStepsAhead = std::clamp<int>(128 / (kEach * kEach * sizeof(Wide<T>)), 2, 8);

// Where element i of a state is in shared memory, where the state's ends are repeated before and after it: an element
// at an end is there twice (never three times, as K <= H), others are written twice to the same place, which is cheaper
// than to branch. What is beyond the last element goes where nothing is read.
struct Place {
  Place() = default;
  __device__ Place(int i, int n, int before, int after) {
    here = i < n ? before + i : before + n + after;
    again = i >= n ? here : i >= n - before ? here - n : i < after ? here + n : here;
  }

  template <class V>
  __device__ __forceinline__ void put(V* ring, V value) const {
    ring[here] = value;
    ring[again] = value;
  }

  int here, again;
};

template <class T>
__device__ __forceinline__ T* advance(T* pointer, int64_t bytes) {
  return reinterpret_cast<T*>(const_cast<char*>(reinterpret_cast<const char*>(pointer)) + bytes);
}

// The state in shared memory, twice, so that a step needs one barrier: it is read from one copy and written to the
// other. The kernel's weights in registers, at most kTaps of them, or for kTaps = 0 any number of them in shared
// memory. A thread has kEach elements of the state, blockDim.x apart; beyond the end it reads what the last element's
// thread does, and writes nothing.
template <int kTaps, int kEach, class T>
__global__ void __launch_bounds__(kMostThreads, 1) forward_kernel(Pass<T> pass) {
  using V = Wide<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kAhead = kStepsAhead<T, kEach>;
  const Rows<const T>&x = pass.in, &hidden = pass.hidden;
  const int64_t steps = pass.steps;
  const int taps = static_cast<int>(pass.taps), n = static_cast<int>(pass.n);
  const int before = taps / 2, after = taps - 1 - before, size = n + taps;
  V* const rings = reinterpret_cast<V*>(shared);
  V* const all_weights = rings + 2 * size;
  V weights[kTaps > 0 ? kTaps : 1];
  if constexpr (kTaps > 0) {
#pragma unroll
    for (int k = 0; k < kTaps; ++k) {
      weights[k] =
          k < taps ? static_cast<V>(pass.weights[k * pass.weights_stride]) : V(-0.0);  // -0 adds nothing to -0.
    }
  } else {
    for (int k = threadIdx.x; k < taps; k += blockDim.x)
      all_weights[k] = static_cast<V>(pass.weights[k * pass.weights_stride]);
  }
  const int64_t b = blockIdx.x, x_step = x.time * sizeof(T), y_step = n * sizeof(T);
  int at[kEach];
  Place place[kEach];
  const auto is_active = [&](int j) { return static_cast<int>(threadIdx.x + j * blockDim.x) < n; };
  const T* from[kEach];
  T *to[kEach], ahead[kAhead][kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    at[j] = min(i, n - 1);
    place[j] = Place(i, n, before, after);
    from[j] = x.row(b, 0) + at[j] * x.along;
    to[j] = pass.out + b * (steps + 1) * n + i;
    const T h = hidden.row(b, 0)[at[j] * hidden.along];
    if (is_active(j)) *to[j] = h;
    place[j].put(rings, static_cast<V>(h));
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      if (steps > 0) ahead[d][j] = *from[j];
      if (d + 1 < steps) from[j] = advance(from[j], x_step);
    }
  }
  for (int64_t rest = steps; rest > 0; rest -= kAhead) {
    const int here = static_cast<int>(min(rest, int64_t{2 * kAhead + 1}));
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      if (d >= here) break;
      V sums[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) sums[j] = static_cast<V>(ahead[d][j]);
      __syncthreads();
      const V* const last = rings + d % 2 * size;
      V* const next = rings + (d + 1) % 2 * size;
      if constexpr (kTaps > 0) {
#pragma unroll
        for (int k = 0; k < kTaps; ++k) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) sums[j] += weights[k] * (k < taps ? last[at[j] + k] : V(0));
        }
      } else {
#pragma unroll 4
        for (int k = 0; k < taps; ++k) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) sums[j] += all_weights[k] * last[at[j] + k];
        }
      }
      apply_tanh(sums);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const T h = static_cast<T>(sums[j]);
        place[j].put(next, static_cast<V>(h));
        to[j] = advance(to[j], y_step);
        if (is_active(j)) *to[j] = h;
        ahead[d][j] = *from[j];
        if (d + kAhead + 1 < here) from[j] = advance(from[j], x_step);
      }
    }
  }
}

// The same back in time, with the weights in reverse, which are in shared memory.
template <int kEach, class T>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(Pass<T> pass) {
  using V = Wide<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr int kAhead = kStepsAhead<T, kEach>;
  const Rows<const T>&grad = pass.in, &y = pass.states;
  const int64_t steps = pass.steps;
  const int taps = static_cast<int>(pass.taps), n = static_cast<int>(pass.n);
  const int after = taps / 2, before = taps - 1 - after, size = n + taps;
  V* const rings = reinterpret_cast<V*>(shared);
  V* const weights = rings + 2 * size;
  for (int k = threadIdx.x; k < taps; k += blockDim.x) {
    weights[k] = static_cast<V>(pass.weights[(taps - 1 - k) * pass.weights_stride]);
  }
  const int64_t b = blockIdx.x, grad_step = grad.time * sizeof(T), y_step = y.time * sizeof(T), x_step = n * sizeof(T);
  int at[kEach];
  Place place[kEach];
  const auto is_active = [&](int j) { return static_cast<int>(threadIdx.x + j * blockDim.x) < n; };
  const T *from[kEach], *states[kEach];
  T *to[kEach], grads_ahead[kAhead][kEach], states_ahead[kAhead][kEach];
  V slope[kEach], from_later[kEach];  // slope: 1 - h_t^2
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    at[j] = min(i, n - 1);
    place[j] = Place(i, n, before, after);
    from[j] = grad.row(b, steps) + at[j] * grad.along;
    states[j] = y.row(b, steps) + at[j] * y.along;
    to[j] = pass.out + (b + 1) * steps * n + i;
    slope[j] = slope_at(static_cast<V>(*states[j]));
    from_later[j] = 0;
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      if (d < steps) states[j] = advance(states[j], -y_step);
      grads_ahead[d][j] = *from[j], states_ahead[d][j] = *states[j];
      if (d < steps) from[j] = advance(from[j], -grad_step);
    }
  }
  __syncthreads();
  for (int64_t rest = steps; rest > 0; rest -= kAhead) {
    const int here = static_cast<int>(min(rest, int64_t{2 * kAhead + 1}));
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      if (d >= here) break;
      V* const ring = rings + d % 2 * size;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const T delta = static_cast<T>((static_cast<V>(grads_ahead[d][j]) + from_later[j]) * slope[j]);
        place[j].put(ring, static_cast<V>(delta));
        to[j] = advance(to[j], -x_step);
        if (is_active(j)) *to[j] = delta;
        slope[j] = slope_at(static_cast<V>(states_ahead[d][j]));
        from_later[j] = 0;
      }
      __syncthreads();
#pragma unroll 4
      for (int k = 0; k < taps; ++k) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) from_later[j] += weights[k] * ring[at[j] + k];
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (d + kAhead < here) states[j] = advance(states[j], -y_step);
        grads_ahead[d][j] = *from[j], states_ahead[d][j] = *states[j];
        if (d + kAhead < here) from[j] = advance(from[j], -grad_step);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (!is_active(j)) continue;
    const V grad_0 = static_cast<V>(grad.row(b, 0)[at[j] * grad.along]);
    pass.out_hidden[b * n + at[j]] = static_cast<T>(grad_0 + from_later[j]);
  }
}

// Any size: the last state is read where it was written. A block's barrier is one for its writes to memory, too.
template <bool kBack, class T>
__global__ void __launch_bounds__(kMostThreads, 1) plain_kernel(Pass<T> pass) {
  using V = Wide<T>;
  const int64_t b = blockIdx.x, n = pass.n, taps = pass.taps, before = kBack ? taps - 1 - taps / 2 : taps / 2;
  T* to = pass.out + (kBack ? (b + 1) * pass.steps - 1 : b * (pass.steps + 1)) * n;
  if constexpr (!kBack) {
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) to[i] = pass.hidden.row(b, 0)[i * pass.hidden.along];
    to += n;
  }
  for (int64_t step = 0; step < pass.steps + kBack; ++step, to += kBack ? -n : n) {
    const T* const last = kBack ? to + n : to - n;
    const int64_t t = kBack ? pass.steps - step : step;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
      const V input = static_cast<V>(pass.in.row(b, t)[i * pass.in.along]);
      V sum = kBack ? V(0) : input;
      int64_t m = i < before ? i - before + n : i - before;
      for (int64_t k = 0; (!kBack || step > 0) && k < taps; ++k) {
        sum += static_cast<V>(pass.weights[(kBack ? taps - 1 - k : k) * pass.weights_stride]) * static_cast<V>(last[m]);
        if (++m == n) m = 0;
      }
      if constexpr (!kBack) {
        V h[] = {sum};
        apply_tanh(h);
        to[i] = static_cast<T>(h[0]);
      } else if (t == 0) {
        pass.out_hidden[b * n + i] = static_cast<T>(input + sum);
      } else {
        const V h = static_cast<V>(pass.states.row(b, t)[i * pass.states.along]);
        to[i] = static_cast<T>((input + sum) * slope_at(h));
      }
    }
  }
}

// parts[s, k]: the sum of d[m - k + p] h[m] over every `splits`-th row by batch and time from s on. A warp takes a row,
// a block kProducts taps.
template <class T>
__global__ void __launch_bounds__(kThreads, 1) products_kernel(
    const T* grad_x, Rows<const T> y, Wide<T>* parts, int64_t splits, int64_t count, int64_t steps, int64_t n,
    int64_t taps) {
  using V = Wide<T>;
  const int64_t split = blockIdx.x % splits, first = blockIdx.x / splits * kProducts;
  const int64_t warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  V products[kProducts] = {};
  for (int64_t r = split * warps + warp; r < count; r += splits * warps) {
    const T* const deltas = grad_x + r * n;
    const T* const states = y.row(r / steps, r % steps);
    for (int64_t m = threadIdx.x % kWarp; m < n; m += kWarp) {
      const V h = static_cast<V>(states[m * y.along]);
      int64_t i = m - first + taps / 2;
      i = i < 0 ? i + n : i >= n ? i - n : i;
#pragma unroll
      for (int k = 0; k < kProducts; ++k) {
        products[k] += static_cast<V>(deltas[i]) * h;
        i = i == 0 ? n - 1 : i - 1;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kProducts; ++k) {
    const V sum = block_sum(products[k]);
    if (threadIdx.x == 0 && first + k < taps) parts[split * taps + first + k] = sum;
  }
}

// A block a tap.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    finish_kernel(const Wide<T>* parts, T* grad_kernel, int64_t count, int64_t taps) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += parts[i * taps + blockIdx.x];
  const double total = block_sum(sum);
  if (threadIdx.x == 0) grad_kernel[blockIdx.x] = static_cast<T>(static_cast<Wide<T>>(total));
}

// How a row lies for shuffled_kernel: as takes the least time, of as many blocks and steps between their meetings as
// are powers of two. No blocks: it is for another kernel.
template <bool kBack, class T>
Tiles tiles_of(const Sizes& sizes, int processors) {
  Tiles best;
  best.blocks = 0;
  if (sizeof(Wide<T>) != 4 || sizes.taps > kFew || sizes.width > int64_t{processors} * kThreads ||
      sizes.steps > 0x7ffffff0) {
    return best;
  }
  const bool is_exact = sizes.taps == kExact;
  const int64_t each = is_exact ? kEachOf<kExact> : kEachOf<kFew>, span = each * kWarp;
  const int64_t ahead = is_exact ? kAheadOf<kExact> : kAheadOf<kFew>;
  const int64_t most_warps = (is_exact ? kMostThreadsOf<kBack, kExact> : kMostThreadsOf<kBack, kFew>) / kWarp;
  const int64_t step_before = kBack ? sizes.taps - 1 - sizes.taps / 2 : sizes.taps / 2;
  const int64_t step_after = sizes.taps - 1 - step_before;
  const auto whole = [&](int64_t x) { return ceil_div(x, each) * each; };
  // What a step takes, about, in cycles.
  const double alone = is_exact ? 150 : 300, shared = is_exact ? 50 : 100, meeting = 120, far_meeting = 700;
  double least = 1e300;
  for (int64_t blocks = 1; blocks <= processors; blocks *= 2) {
    for (int64_t apart = 16; apart <= (blocks > 1 ? 64 : 16); apart *= 2) {
      Tiles t;
      const int64_t own = whole(ceil_div(sizes.width, blocks)), rest = sizes.width - (blocks - 1) * own;
      const int64_t before = blocks > 1 ? whole(apart * step_before) : 0,
                    after = blocks > 1 ? whole(apart * step_after) : 0;
      if (rest < std::max<int64_t>({1, before, after})) continue;
      const int64_t width = blocks > 1 ? before + own + after : sizes.width;
      const auto margins = [&](int64_t steps) { return whole(steps * step_before) + steps * step_after; };
      int64_t warps = ceil_div(width, (span - margins(ahead)) / each * each);
      if (warps > 1) warps = ceil_div(warps, 4) * 4;
      if (warps > most_warps) continue;
      const int64_t tile = whole(ceil_div(width, warps));
      int64_t rounds = 1;
      const int64_t most = blocks > 1 ? apart / ahead : 64;
      for (int64_t r = 2; r <= most; ++r) {
        if (margins(r * ahead) + tile <= span && (blocks == 1 || most % r == 0)) rounds = r;
      }
      const double turns = static_cast<double>(ceil_div(sizes.batch, std::max<int64_t>(1, processors / blocks)));
      double cost = std::max(alone, static_cast<double>(ceil_div(warps, 4)) * shared) + meeting / (rounds * ahead);
      if (blocks > 1) cost += far_meeting / apart;
      if (blocks == 1 && !kBack && !is_exact) cost = 200 + static_cast<double>(width) / 3;  // forward_kernel's
      if (cost * turns >= least) continue;
      least = cost * turns;
      t.blocks = blocks, t.own = own, t.before = before, t.after = after, t.width = width, t.warps = warps,
      t.tile = tile;
      t.margin = whole(rounds * ahead * step_before), t.apart = rounds * ahead;
      t.around = ceil_div(t.margin, sizes.width) * sizes.width;
      t.meetings = blocks > 1 ? apart / ahead / rounds : 0;
      best = t;
    }
  }
  return best;
}

template <int kEach, class T>
bool has_vectors(const Rows<const T>& rows, int64_t n) {
  return rows.along == 1 && n % kEach == 0 && rows.batch % kEach == 0 && rows.time % kEach == 0 &&
         reinterpret_cast<uintptr_t>(rows.data) % alignof(Pack<T, kEach>) == 0;
}

// How the state lies on a block, in shared memory.
template <class V>
struct Layout {
  Layout(const Sizes& sizes, bool is_back) {
    const int64_t n = sizes.width, limit = is_back ? kThreads : kMostThreads;
    bytes = (2 * (n + sizes.taps) + sizes.taps + 4) / 4 * 4 * sizeof(V);
    if (n > 2 * kMostThreads || bytes > kShared) return;
    each = n <= limit ? 1 : n <= 2 * limit ? 2 : 4;
    is_few = !is_back && kHasFew && sizes.taps <= kFew;
    threads = static_cast<int>(ceil_div(ceil_div(n, each), kWarp) * kWarp);
  }

  // Calls f with the constants that this stands for.
  template <bool kBack, class F>
  void dispatch(F f) const {
    if (each == 1) return with_each<kBack, 1>(f);
    if constexpr (kBack) {
      if (each == 4) return with_each<kBack, 4>(f);
    }
    with_each<kBack, 2>(f);
  }

  template <bool kBack, int kEach, class F>
  void with_each(F f) const {
    if constexpr (kHasFew && !kBack) {
      if (is_few) return f.template operator()<kFew, kEach>();
    }
    f.template operator()<0, kEach>();
  }

  static constexpr bool kHasFew = sizeof(V) == 4;  // In float64 they would take as much code as all others together.
  int each = 0;                                    // Elements of a thread; 0: it doesn't fit.
  bool is_few = false;
  int threads;
  int64_t bytes;
};

// Launches the kernel for these sizes. `parts` and `grad_kernel` are shuffled_kernel's.
template <bool kBack, class T>
void start(
    Launch& launch, const View& like, const Sizes& sizes, const Pass<T>& pass, [[maybe_unused]] const Tiles& tiles,
    [[maybe_unused]] Wide<T>* parts, [[maybe_unused]] T* grad_kernel, [[maybe_unused]] int processors) {
  using V = Wide<T>;
  if (sizes.batch == 0) return;
  if constexpr (sizeof(V) == 4) {
    if (tiles.blocks > 1 || (tiles.blocks == 1 && (kBack || sizes.taps == kExact))) {
      const int threads = tiles.rows * tiles.warps * kWarp;
      const int64_t bytes = tiles.rows * 2 * tiles.width * sizeof(V);
      const bool is_exact = sizes.taps == kExact;
      const auto has = [&](const Rows<const T>& r) {
        return is_exact ? has_vectors<kEachOf<kExact>>(r, pass.n) : has_vectors<kEachOf<kFew>>(r, pass.n);
      };
      const bool is_vectors = has(pass.in) && (!kBack || has(pass.states));
      const auto kernel =
          is_exact     ? is_vectors ? shuffled_kernel<kBack, kExact, true, T> : shuffled_kernel<kBack, kExact, false, T>
          : is_vectors ? shuffled_kernel<kBack, kFew, true, T>
                       : shuffled_kernel<kBack, kFew, false, T>;
      if (tiles.blocks == 1) {
        return launch(
            kernel, sizes.batch / tiles.rows, threads, bytes, pass, tiles, static_cast<uint64_t*>(nullptr), parts,
            grad_kernel);
      }
      const int64_t groups = std::min<int64_t>(sizes.batch, processors / tiles.blocks);
      const int64_t words = groups * 2 * tiles.blocks * (tiles.before + tiles.after) * sizeof(uint64_t);
      const Tensor memory = empty_contiguous<1>(like, {words / static_cast<int64_t>(sizeof(T))});
      launch.zero(memory.mutable_data_ptr(), words);
      return launch.together(
          kernel, groups * tiles.blocks, threads, bytes, pass, tiles, static_cast<uint64_t*>(memory.mutable_data_ptr()),
          parts, grad_kernel);
    }
  }
  const Layout<V> layout(sizes, kBack);
  if (layout.each == 0) return launch(plain_kernel<kBack, T>, sizes.batch, kMostThreads, 0, pass);
  layout.template dispatch<kBack>([&]<int kTaps, int kEach>() {
    const auto kernel = [] {
      if constexpr (kBack) {
        return backward_kernel<kEach, T>;
      } else {
        return forward_kernel<kTaps, kEach, T>;
      }
    }();
    launch(kernel, sizes.batch, layout.threads, layout.bytes, pass);
  });
}

struct OnCuda {
  static void forward(const Sizes& sizes, const View& x, const View& kernel, const View& hidden, const Tensor& y) {
    Launch launch(kForward.name(), x);
    dispatch(Floating(), kForward.name(), x.dtype, [&]<class T>(T) {
      const Pass<T> pass{
          rows<T>(x),
          {},
          rows<T>(hidden),
          rows<T>(kernel).data,
          kernel.strides[2],
          sizes.taps,
          static_cast<T*>(y.mutable_data_ptr()),
          nullptr,
          sizes.batch,
          sizes.steps,
          sizes.width};
      const int processors = launch.processors();
      start<false, T>(launch, x, sizes, pass, tiles_of<false, T>(sizes, processors), nullptr, nullptr, processors);
    });
  }

  static void backward(
      const Sizes& sizes, const View& grad, const View& y, const View& kernel, const Tensor& grad_x,
      const Tensor* grad_kernel, const Tensor& grad_hidden) {
    Launch launch(kBackward.name(), grad);
    dispatch(Floating(), kBackward.name(), grad.dtype, [&]<class T>(T) {
      using V = Wide<T>;
      T* const to_x = static_cast<T*>(grad_x.mutable_data_ptr());
      const Pass<T> pass{rows<T>(grad),     rows<T>(y),  {},         rows<T>(kernel).data,
                         kernel.strides[2], sizes.taps,  to_x,       static_cast<T*>(grad_hidden.mutable_data_ptr()),
                         sizes.batch,       sizes.steps, sizes.width};
      T* to_kernel = grad_kernel ? static_cast<T*>(grad_kernel->mutable_data_ptr()) : nullptr;
      const int64_t count = sizes.batch * sizes.steps;
      if (to_kernel && count == 0) {
        launch.zero(to_kernel, sizes.taps * sizeof(T));
        to_kernel = nullptr;
      }
      const int processors = launch.processors();
      Tiles tiles = tiles_of<true, T>(sizes, processors);
      const bool apart = tiles.blocks == 0;
      // Few and short rows have a block together, which saves the launch that adds up partial results.
      const bool alone = tiles.blocks == 1 && count > 0 && sizes.batch * tiles.warps * kWarp <= kThreads;
      if (alone) tiles.rows = static_cast<int>(sizes.batch);
      const int64_t splits = apart ? std::min(ceil_div(count, kThreads / kWarp), kSplits) : sizes.batch * tiles.blocks;
      std::optional<Tensor> memory;
      V* parts = nullptr;
      if (to_kernel && !alone) {
        memory = empty_contiguous<1>(grad, {splits * sizes.taps * static_cast<int64_t>(sizeof(V) / sizeof(T))});
        parts = static_cast<V*>(memory->mutable_data_ptr());
      }
      start<true, T>(launch, grad, sizes, pass, tiles, parts, to_kernel, processors);
      if (parts == nullptr) return;
      if (apart) {
        launch(
            products_kernel<T>, splits * ceil_div(sizes.taps, kProducts), kThreads, 0, to_x, pass.states, parts, splits,
            count, sizes.steps, sizes.width, sizes.taps);
      }
      const int threads = static_cast<int>(std::clamp<int64_t>(ceil_div(splits, kWarp) * kWarp, kWarp, kThreads));
      launch(finish_kernel<T>, sizes.taps, threads, 0, parts, to_kernel, splits, sizes.taps);
    });
  }
};

}  // namespace

EXTENSION_CPP_REGISTER(m) {
  m.add(kForward, TORCH_BOX(&convrnn_forward<OnCuda>));
  m.add(kBackward, TORCH_BOX(&convrnn_backward<OnCuda>));
}

}  // namespace extension_cpp::convrnn
