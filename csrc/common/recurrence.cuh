// Runs a recurrence on CUDA: a thread has a channel of a row of the batch through all steps, in one launch.
//
// What limits it is that steps wait for each other, and at large sizes memory. So what a step reads is loaded some
// steps before it is needed, while the steps between are computed; neighbouring threads have neighbouring channels.
#pragma once

#include "launch.cuh"

namespace extension_cpp::detail {

// Steps that are loaded at once, so that two of these groups fit into registers.
template <class T, int kStreams, int kFit = 128 / (static_cast<int>(sizeof(T)) * kStreams)>
constexpr int kStepsAhead = kFit >= 8   ? 8
                            : kFit >= 4 ? 4
                            : kFit >= 2 ? 2
                                        : 1;

template <class Cell, class T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const __grid_constant__ Sequences<Cell> p, const __grid_constant__ Cell cell) {
  using V = typename Compute<T>::type;
  using S = Step<Cell>;
  constexpr int kAhead = kStepsAhead<T, S::kInputs>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.batch * p.width) return;
  const int64_t b = index / p.width, h = index % p.width;
  V at[S::kVariables];
#pragma unroll
  for (int k = 0; k < S::kVariables; ++k) {
    const bool is_input = k >= S::kStates && k < S::kStates + S::kInputs;
    if (!is_input) at[k] = static_cast<V>(*p.variables[k].template at<T>(b, 0, h));
  }
  T now[kAhead][S::kInputs], later[kAhead][S::kInputs];
  auto load = [&](T(&to)[kAhead][S::kInputs], int64_t first) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
#pragma unroll
      for (int k = 0; k < S::kInputs; ++k) {
        if (first + j < p.steps) to[j][k] = *p.variables[S::kStates + k].template at<T>(b, first + j, h);
      }
    }
  };
  load(now, 0);
  for (int64_t first = 0; first < p.steps; first += kAhead) {
    load(later, first + kAhead);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (first + j >= p.steps) break;
      V after[S::kStates];
#pragma unroll
      for (int k = 0; k < S::kInputs; ++k) at[S::kStates + k] = static_cast<V>(now[j][k]);
      S::next(cell, at, after);
#pragma unroll
      for (int s = 0; s < S::kStates; ++s) {
        const T rounded = static_cast<T>(after[s]);
        static_cast<T*>(p.results[s])[(b * p.steps + first + j) * p.width + h] = rounded;
        at[s] = static_cast<V>(rounded);
      }
    }
    memcpy(now, later, sizeof(now));
  }
}

// sums: of each row of the batch, [batch][weight][channel].
template <class Cell, class T, class V>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const __grid_constant__ Sequences<Cell> p, const __grid_constant__ Cell cell, V* sums) {
  using S = Step<Cell>;
  constexpr int kLoads = 2 * S::kStates + S::kInputs, kAhead = kStepsAhead<T, kLoads>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= p.batch * p.width) return;
  const int64_t b = index / p.width, h = index % p.width;
  V at[S::kVariables], sum[S::kWeights + 1] = {}, carried[S::kStates] = {};
#pragma unroll
  for (int k = S::kStates + S::kInputs; k < S::kVariables; ++k) {
    at[k] = static_cast<V>(*p.variables[k].template at<T>(b, 0, h));
  }
  T now[kAhead][kLoads], later[kAhead][kLoads];
  auto load = [&](T(&to)[kAhead][kLoads], int64_t last) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t t = last - j;
      if (t < 0) continue;
#pragma unroll
      for (int s = 0; s < S::kStates; ++s) {
        to[j][s] = t > 0 ? *p.states[s].template at<T>(b, t - 1, h) : *p.variables[s].template at<T>(b, 0, h);
        to[j][S::kStates + S::kInputs + s] = *p.grads[s].template at<T>(b, t, h);
      }
#pragma unroll
      for (int k = 0; k < S::kInputs; ++k) {
        to[j][S::kStates + k] = *p.variables[S::kStates + k].template at<T>(b, t, h);
      }
    }
  };
  load(now, p.steps - 1);
  for (int64_t last = p.steps - 1; last >= 0; last -= kAhead) {
    load(later, last - kAhead);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64_t t = last - j;
      if (t < 0) break;
      V grad[S::kStates], results[S::kVariables];
#pragma unroll
      for (int k = 0; k < S::kStates + S::kInputs; ++k) at[k] = static_cast<V>(now[j][k]);
#pragma unroll
      for (int s = 0; s < S::kStates; ++s) {
        grad[s] = static_cast<V>(now[j][S::kStates + S::kInputs + s]) + carried[s];
      }
      S::back(cell, at, grad, results);
#pragma unroll
      for (int s = 0; s < S::kStates; ++s) carried[s] = results[s];
#pragma unroll
      for (int k = S::kStates; k < S::kStates + S::kInputs; ++k) {
        static_cast<T*>(p.results[k])[(b * p.steps + t) * p.width + h] = static_cast<T>(results[k]);
      }
#pragma unroll
      for (int w = 0; w < S::kWeights; ++w) sum[w] += results[S::kStates + S::kInputs + w];
    }
    memcpy(now, later, sizeof(now));
  }
#pragma unroll
  for (int s = 0; s < S::kStates; ++s) static_cast<T*>(p.results[s])[index] = static_cast<T>(carried[s]);
#pragma unroll
  for (int w = 0; w < S::kWeights; ++w) sums[(b * S::kWeights + w) * p.width + h] = sum[w];
}

template <bool kBackward, class T, class Cell>
void run_steps(const char* op, const View& first, const Cell& cell, const Sequences<Cell>& p) {
  using V = typename Compute<T>::type;
  using S = Step<Cell>;
  Launch launch(op, first);
  const int64_t blocks = ceil_div(p.batch * p.width, kThreads);
  if constexpr (kBackward) {
    const int64_t of_row = S::kWeights * p.width;
    const Tensor memory = scratch(first, p.batch * of_row * sizeof(V));
    V* const sums = static_cast<V*>(memory.mutable_data_ptr());
    launch(backward_kernel<Cell, T, V>, blocks, kThreads, 0, p, cell, sums);
    for (int w = 0; w < S::kWeights; ++w) {
      T* const to = static_cast<T*>(p.results[S::kStates + S::kInputs + w]);
      sum_parts(launch, sums + w * p.width, p.batch, of_row, p.width, to);
    }
  } else {
    launch(forward_kernel<Cell, T>, blocks, kThreads, 0, p, cell);
  }
}

}  // namespace extension_cpp::detail
