// The state in shared memory: a barrier a step.
#pragma once

#include "pass.cuh"

namespace extension_cpp::convolved {
namespace {

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

// The state in shared memory, twice, so that a step needs one barrier: it is read from one copy and written to the
// other. The kernel's weights in registers, at most kTaps of them, or for kTaps = 0 any number of them in shared
// memory. A thread has kEach elements of the state, blockDim.x apart; beyond the end it reads what the last element's
// thread does, and writes nothing.
template <int kTaps, int kEach, class T, class F>
__global__ void __launch_bounds__(kMostThreads, 1) forward_kernel(Pass<T, F> pass) {
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
      apply(pass.f, sums);
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
template <int kEach, class T, class F>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(Pass<T, F> pass) {
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
  V slope[kEach], from_later[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    at[j] = min(i, n - 1);
    place[j] = Place(i, n, before, after);
    from[j] = grad.row(b, steps) + at[j] * grad.along;
    states[j] = y.row(b, steps) + at[j] * y.along;
    to[j] = pass.out + (b + 1) * steps * n + i;
    slope[j] = pass.f.slope(static_cast<V>(*states[j]));
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
        slope[j] = pass.f.slope(static_cast<V>(states_ahead[d][j]));
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

}  // namespace
}  // namespace extension_cpp::convolved
