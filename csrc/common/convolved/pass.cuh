// What the passes through time on CUDA share: their arguments, and how a thread reads inputs ahead and writes results.
#pragma once

#include <cuda_bf16.h>

#include <torch/csrc/stable/ops.h>

#include "../elementwise.cuh"

namespace extension_cpp::convolved {
namespace {

constexpr int kWarp = 32, kThreads = 512, kProducts = 8;
constexpr int kMostThreads = 1024;      // of kernels that need few registers
constexpr unsigned kAll = 0xffffffff;   // lanes
constexpr int64_t kShared = 48 * 1024;  // bytes that every device has without being asked
constexpr int kExact = 3, kFew = 8;
constexpr int64_t kMostSteps = 0x7ffffff0;  // of kernels that count them in 32 bits
constexpr int64_t kSplits = 1024;           // partial results of products_kernel, at most

template <class T>
using Wide = typename Compute<T>::type;

// A pass through time: forward, or back in time. Step i forward makes h_{i+1} of h_i and x_i; step i back makes d_{T-i}
// of d_{T-i+1}, which is 0 for i = 0, and of the gradient and the state there; its step T makes grad_hidden.
template <class T, class F>
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
  F f;
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

// The function of each. Of all of them at once, as a warp that goes from one to the next waits for each result.
template <class F, int kEach, class V>
__device__ __forceinline__ void apply(const F& f, V (&z)[kEach]) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) z[j] = f(z[j]);
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

template <class T>
__device__ __forceinline__ T* advance(T* pointer, int64_t bytes) {
  return reinterpret_cast<T*>(const_cast<char*>(reinterpret_cast<const char*>(pointer)) + bytes);
}

// A thread's way through a pass: it has kEach elements of row b, of which it reads the inputs and writes those results
// that it is to write. kVectors: they are neighbours in memory, all or none of which it writes.
//
// The inputs of kAhead steps are loaded at a time, while those before are in use. Were each step to load some, a warp
// would wait for the newest whenever it waits for the oldest, as it has but a few counters of what is under way.
template <bool kBack, bool kVectors, int kEach, int kAhead, class T, class F>
struct Walk {
  using V = Wide<T>;
  using Few = Pack<T, kEach>;
  using Held = std::conditional_t<kVectors && sizeof(T) == 2 && kEach % 2 == 0, Words<T, kEach>, Elements<T, kEach>>;

  __device__ __forceinline__
  Walk(const Pass<T, F>& pass, int64_t b, int width, const int (&index)[kEach], unsigned writes)
      : writes(writes),
        rest(static_cast<int>(pass.steps) + kBack),
        from(pass.in.row(b, kBack ? pass.steps : 0)),
        in_step(kBack ? -pass.in.time : pass.in.time),
        to(pass.out + (kBack ? (b + 1) * pass.steps - 1 : b * (pass.steps + 1)) * pass.n),
        step((kBack ? -pass.n : pass.n) * static_cast<int64_t>(sizeof(T))) {
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
    if constexpr (kVectors) {
      constexpr int kLanes = 128 / (sizeof(T) * kEach);  // of a line
      const int steps = width * static_cast<int>(sizeof(T)) > 1024 ? 8 : 16;
      const int lane = threadIdx.x % kWarp, line = lane / kAhead, first = line * kLanes;
      far = first < kWarp ? steps - kAhead + lane % kAhead : kNever;
      far_at = __shfl_sync(kAll, in_at[0], first) + far * in_step;
      if constexpr (kBack) far_states_at = __shfl_sync(kAll, states_at[0], first) + far * states_step;
#pragma unroll 1
      for (int sooner = steps - kAhead; sooner >= 0; sooner -= kAhead) prefetch(sooner);
    }
  }

  // Asks the L2 cache for what is loaded 8 or 16 steps after the next load, or `sooner` steps before that: a read of
  // memory takes longer than the steps whose inputs fit into registers. That is 8 to 32 KB of a block under way; where
  // it was more, all took longer. A lane asks for a line of a step.
  __device__ __forceinline__ void prefetch(int sooner = 0) {
    if (far - sooner >= rest - kAhead) return;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + far_at - sooner * in_step));
    if constexpr (kBack) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from_states + far_states_at - sooner * states_step));
    }
  }

  // h_0, which it writes, or what comes before the first step back.
  __device__ __forceinline__ void begin(const Pass<T, F>& pass, int64_t b, V (&state)[kEach]) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      state[j] = 0;
      if constexpr (!kBack) {
        const T h = pass.hidden.row(b, 0)[at[j] * pass.hidden.along];
        if (writes >> j & 1) to[at[j]] = h;
        state[j] = static_cast<V>(h);
      }
    }
    if constexpr (!kBack) to = advance(to, step);
    if constexpr (kVectors) to += at[0], to_hidden += kBack ? at[0] : 0;
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
    if constexpr (kVectors) prefetch();
  }

  __device__ __forceinline__ V input(int d, int j) const { return static_cast<V>(now[d].get(j)); }
  __device__ __forceinline__ V state_at(int d, int j) const { return static_cast<V>(now_states[d].get(j)); }

  // Makes the new state of the convolved one.
  __device__ __forceinline__ void make(const F& f, int d, V (&sums)[kEach], V (&state)[kEach]) {
    if constexpr (!kBack) apply(f, sums);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if constexpr (kBack) {
        const V slope = f.slope(state_at(d, j));
        sums[j] = (input(d, j) + sums[j]) * (is_last(d) ? V(1) : slope);
      }
    }
    made = rounded<T>(sums);
#pragma unroll
    for (int j = 0; j < kEach; ++j) state[j] = static_cast<V>(made.values[j]);
  }

  __device__ __forceinline__ void write(int d) {
    T* const row = is_last(d) ? to_hidden : to;
    int64_t by = step;
    asm volatile("" : "+l"(by));  // Or the compiler makes each step's address of the first one's, which takes longer.
    to = advance(to, by);
    if constexpr (kVectors) {
      if (writes) *reinterpret_cast<Few*>(row) = made;
    } else {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (writes >> j & 1) row[at[j]] = made.values[j];
      }
    }
  }

  // Whether a step back makes grad_hidden.
  __device__ __forceinline__ bool is_last(int d) const { return kBack && rest <= 0 && d + 1 == here; }

  static constexpr int kNever = 0x7fffffff;
  unsigned writes;  // a bit an element
  int far;          // steps from the next load to what this lane prefetches
  int64_t far_at, far_states_at;
  int here = 0;  // steps until the next turn
  int rest;      // steps from then on
  const T *from, *from_states;
  int64_t in_step, in_at[kEach], states_step, states_at[kEach];
  T *to, *to_hidden = nullptr;
  int64_t step;
  int at[kEach];
  Few made;
  Held now[kAhead], next[kAhead], now_states[kBack ? kAhead : 1], next_states[kBack ? kAhead : 1];
};

}  // namespace
}  // namespace extension_cpp::convolved
