// The state in shared memory, for float and many taps: a thread has neighbouring elements.
//
// Reading bounds a step: a multiprocessor multiplies 128 pairs in the time that it reads 32 numbers. A thread reads a
// state once for the products of all its elements. Few warps do so, which wait for what they start: so there is no
// branch between the reads of a step, nor between its products.
#pragma once

#include "pass.cuh"

namespace extension_cpp::convolved {
namespace {

constexpr int kTogether = 4;      // elements of a thread: a vector
constexpr int kMostTogether = 8;  // vectors of the kernel that are read at once
constexpr int64_t kMostWidth = kTogether * kThreads;

// As one store, of which the compiler makes four.
__device__ __forceinline__ void put_vector(float* to, const float (&v)[kTogether]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

// How a state lies in shared memory, where its ends are repeated before and after it: element 0 is at the start of a
// vector, so that a thread writes its elements at once, and reads from `skip` elements before those that it needs.
struct Ring {
  Ring(const Sizes& sizes, bool is_back)
      : n(static_cast<int>(sizes.width)),
        taps(static_cast<int>(sizes.taps)),
        before(is_back ? taps - 1 - taps / 2 : taps / 2),
        start((before + kTogether - 1) / kTogether * kTogether),
        skip(start - before),
        last((n - 1) / kTogether * kTogether) {
    constexpr int kMostTaps = kMostTogether * kTogether;
    of_weights = (skip + taps + kMostTaps - 1) / kMostTaps * kMostTaps;
    size = last + kTogether + of_weights;
    bytes = (2 * size + of_weights) * static_cast<int64_t>(sizeof(float));
  }

  // Elements i to i + kTogether.
  template <bool kVectors>
  __device__ __forceinline__ void put(float* ring, int i, const float (&state)[kTogether]) const {
    const int after = taps - 1 - before;
    ring += start;
    if constexpr (kVectors) {
      if (i >= n) return;
      put_vector(ring + i, state);
      if (i < after) put_vector(ring + n + i, state);
      if (i + kTogether > n - before) put_vector(ring + i - n, state);
    } else {
#pragma unroll
      for (int j = 0; j < kTogether; ++j, ++i) {
        if (i >= n) return;
        ring[i] = state[j];
        if (i < after) ring[n + i] = state[j];
        if (i >= n - before) ring[i - n] = state[j];
      }
    }
  }

  int n, taps, before, start, skip;
  int last;  // vector of the row
  int of_weights, size;
  int64_t bytes;  // for two states and the weights
};

// The state is there twice, so that a step needs one barrier: it is read from one copy and written to the other. Of the
// kernel, `kAtOnce` vectors are read at once, and what is not of it is skipped by predicates. kIsAll: these are all
// that it has, or one more, and stay in registers.
template <bool kBack, bool kVectors, int kAtOnce, bool kIsAll, class T, class F>
__global__ void __launch_bounds__(kThreads, 1) vectors_kernel(Pass<T, F> pass, Ring ring) {
  using Vector = Pack<float, kTogether>;
  constexpr int kAhead = 4;
  extern __shared__ __align__(16) unsigned char shared[];
  float* const rings = reinterpret_cast<float*>(shared);
  float* const weights = rings + 2 * ring.size;
  for (int k = threadIdx.x; k < ring.taps; k += blockDim.x) {
    weights[ring.skip + k] = static_cast<float>(pass.weights[(kBack ? ring.taps - 1 - k : k) * pass.weights_stride]);
  }
  const int first = threadIdx.x * kTogether, from = min(first, ring.last);
  int index[kTogether];
  unsigned writes = 0;
#pragma unroll
  for (int j = 0; j < kTogether; ++j) {
    index[j] = min(from + j, ring.n - 1);
    writes |= unsigned{first + (kVectors ? 0 : j) < ring.n} << j;
  }
  Walk<kBack, kVectors, kTogether, kAhead, T, F> walk(pass, blockIdx.x, ring.n, index, writes);
  float state[kTogether];
  walk.begin(pass, blockIdx.x, state);
  ring.put<kVectors>(rings, first, state);
  Vector w[kAtOnce];
  const auto read_weights = [&](const Vector* factors) {
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) w[v] = factors[v];
  };
  if constexpr (kIsAll) {
    __syncthreads();
    read_weights(reinterpret_cast<const Vector*>(weights));
  }
  bool is_convolved = !kBack;  // What comes before the first step back is 0, whatever the weights are.
  while (walk.rest > 0) {
    walk.turn();
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      if (d >= walk.here) break;
      float sums[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) sums[j] = kBack ? 0 : walk.input(d, j);
      __syncthreads();
      const auto* states = reinterpret_cast<const Vector*>(rings + d % 2 * ring.size + from);
      const auto* factors = reinterpret_cast<const Vector*>(weights);
      int begin = ring.skip, end = ring.skip + ring.taps;
      asm volatile("" : "+r"(begin), "+r"(end));  // Or all steps have their predicates in registers, which are few.
#pragma unroll 1
      while (is_convolved && end > 0) {
        Vector window[kAtOnce + 1];
#pragma unroll
        for (int v = 0; v <= kAtOnce; ++v) window[v] = states[v];
        if constexpr (!kIsAll) read_weights(factors);
#pragma unroll
        for (int k = 0; k < kAtOnce * kTogether; ++k) {
          const bool may_end = !kIsAll || k >= (kAtOnce - 2) * kTogether;
          if ((k < kTogether && k < begin) || (may_end && k >= end)) continue;
#pragma unroll
          for (int j = 0; j < kTogether; ++j) {
            sums[j] += w[k / kTogether].values[k % kTogether] * window[(j + k) / kTogether].values[(j + k) % kTogether];
          }
        }
        if constexpr (kIsAll) break;
        states += kAtOnce, factors += kAtOnce, begin = 0, end -= kAtOnce * kTogether;
      }
      is_convolved = true;
      walk.make(pass.f, d, sums, state);
      ring.put<kVectors>(rings + (d + 1) % 2 * ring.size, first, state);
      walk.write(d);
    }
  }
}

}  // namespace
}  // namespace extension_cpp::convolved
