// Runs a recurrence on the CPU: some channels of a row of the batch are a thread's, through all steps, with their
// states in the first-level cache. Which channels these are depends on the sizes alone, and sums over the batch are
// made of those of its rows, in order: how many threads there are changes no bit.
#pragma once

#include <vector>

#include "cpu_dtypes.h"
#include "simd.h"

namespace extension_cpp::detail {

template <class Cell, class T>
class StepsOnCpu {
  using V = typename Compute<T>::type;
  using S = Step<Cell>;
  static constexpr int kStates = S::kStates, kInputs = S::kInputs, kWeights = S::kWeights, kVariables = S::kVariables;
  static constexpr int64_t kChunk = 512;     // channels that are a thread's
  static constexpr int64_t kGrain = 32'768;  // elements worth a thread
  static constexpr bool kConverts = !std::is_same_v<T, V>;
  using Buffer = V[kChunk];

 public:
  StepsOnCpu(const Cell& cell, const Sequences<Cell>& p) : cell_(cell), p_(p) {}

  void forward() const {
    for_chunks([&](int64_t b, int64_t first, int n) {
      const Cell cell = cell_;  // Of which the compiler knows that no result overwrites it.
      alignas(64) Buffer buffers[kVariables], states[kStates];
      const V* at[kVariables];
      for (int k = 0; k < kVariables; ++k) {
        if (!is_input(k)) at[k] = elements(p_.variables[k], b, 0, first, n, buffers[k]);
      }
      for (int64_t t = 0; t < p_.steps; ++t) {
        V* to[kStates];
        for (int k = kStates; k < kStates + kInputs; ++k) at[k] = elements(p_.variables[k], b, t, first, n, buffers[k]);
        for (int s = 0; s < kStates; ++s) to[s] = target(p_.results[s], b, t, first, states[s]);
#pragma GCC ivdep
        for (int i = 0; i < n; ++i) {
          V values[kVariables], after[kStates];
          for (int k = 0; k < kVariables; ++k) values[k] = at[k][i];
          S::next(cell, values, after);
          for (int s = 0; s < kStates; ++s) to[s][i] = after[s];
        }
        for (int s = 0; s < kStates; ++s) {
          at[s] = to[s];
          if constexpr (kConverts) {
            T* const result = place(p_.results[s], b, t, first);
            write(result, to[s], n);
            read(result, 1, buffers[s], n);
            at[s] = buffers[s];
          }
        }
      }
    });
  }

  void backward() const {
    std::vector<V> sums(times(times(p_.batch, kWeights), p_.width));  // of each row of the batch
    for_chunks([&](int64_t b, int64_t first, int n) {
      const Cell cell = cell_;
      alignas(64) Buffer buffers[kVariables], grad_buffers[kStates], carried[kStates] = {}, written[kInputs];
      V* sum[kWeights + 1];
      for (int w = 0; w < kWeights; ++w) sum[w] = sums.data() + (b * kWeights + w) * p_.width + first;
      const V *at[kVariables], *grads[kStates];
      for (int k = kStates + kInputs; k < kVariables; ++k)
        at[k] = elements(p_.variables[k], b, 0, first, n, buffers[k]);
      for (int64_t t = p_.steps; t-- > 0;) {
        V* to[kInputs];
        for (int s = 0; s < kStates; ++s) {
          at[s] = t > 0 ? elements(p_.states[s], b, t - 1, first, n, buffers[s])
                        : elements(p_.variables[s], b, 0, first, n, buffers[s]);
          grads[s] = elements(p_.grads[s], b, t, first, n, grad_buffers[s]);
        }
        for (int k = 0; k < kInputs; ++k) {
          const int v = kStates + k;
          at[v] = elements(p_.variables[v], b, t, first, n, buffers[v]);
          to[k] = target(p_.results[v], b, t, first, written[k]);
        }
#pragma GCC ivdep
        for (int i = 0; i < n; ++i) {
          V values[kVariables], grad[kStates], results[kVariables];
          for (int k = 0; k < kVariables; ++k) values[k] = at[k][i];
          for (int s = 0; s < kStates; ++s) grad[s] = grads[s][i] + carried[s][i];
          S::back(cell, values, grad, results);
          for (int s = 0; s < kStates; ++s) carried[s][i] = results[s];
          for (int k = 0; k < kInputs; ++k) to[k][i] = results[kStates + k];
          for (int w = 0; w < kWeights; ++w) sum[w][i] += results[kStates + kInputs + w];
        }
        if constexpr (kConverts) {
          for (int k = 0; k < kInputs; ++k) write(place(p_.results[kStates + k], b, t, first), to[k], n);
        }
      }
      for (int s = 0; s < kStates; ++s) {
        write(static_cast<T*>(p_.results[s]) + b * p_.width + first, carried[s], n);
      }
    });
    for (int w = 0; w < kWeights; ++w) add_rows(sums.data() + w * p_.width, p_.results[kStates + kInputs + w]);
  }

 private:
  static constexpr bool is_input(int k) { return k >= kStates && k < kStates + kInputs; }

  // The body on each row of the batch and its channels from `first` on.
  template <class Body>
  void for_chunks(const Body& body) const {
    const int64_t chunks = (p_.width + kChunk - 1) / kChunk, items = p_.batch * chunks;
    const double work = static_cast<double>(p_.steps + 1) * std::min(kChunk, p_.width);
    const int64_t grain = std::max<int64_t>(1, static_cast<int64_t>(kGrain / std::max(work, 1.0)));
    auto some = [&](int64_t begin, int64_t end) {
      simd::run([&] {
        for (int64_t item = begin; item < end; ++item) {
          const int64_t first = item % chunks * kChunk;
          body(item / chunks, first, static_cast<int>(std::min(kChunk, p_.width - first)));
        }
      });
    };
    items <= grain ? some(0, items) : torch::stable::parallel_for(0, items, grain, some);
  }

  // n elements of a step, from channel `first` on, in the type of the computation.
  static const V* elements(const Sequence& from, int64_t b, int64_t t, int64_t first, int n, V* buffer) {
    const T* const data = from.at<T>(b, t, first);
    if constexpr (!kConverts) {
      if (from.channel == 1) return data;
    }
    read(data, from.channel, buffer, n);
    return buffer;
  }

  T* place(void* result, int64_t b, int64_t t, int64_t first) const {
    return static_cast<T*>(result) + (b * p_.steps + t) * p_.width + first;
  }

  // Where results are computed.
  V* target(void* result, int64_t b, int64_t t, int64_t first, V* buffer) const {
    if constexpr (kConverts) {
      return buffer;
    } else {
      return place(result, b, t, first);
    }
  }

  void add_rows(const V* from, void* to) const {
    simd::run([&] {
      alignas(64) Buffer total;
      for (int64_t first = 0; first < p_.width; first += kChunk) {
        const int64_t n = std::min(kChunk, p_.width - first);
        std::fill_n(total, n, V(0));
        for (int64_t b = 0; b < p_.batch; ++b) {
          const V* row = from + b * kWeights * p_.width + first;
#pragma GCC ivdep
          for (int64_t i = 0; i < n; ++i) total[i] += row[i];
        }
        write(static_cast<T*>(to) + first, total, n);
      }
    });
  }

  const Cell& cell_;
  const Sequences<Cell>& p_;
};

template <bool kBackward, class T, class Cell>
void run_steps(const char*, const View&, const Cell& cell, const Sequences<Cell>& p) {
  const StepsOnCpu<Cell, T> steps(cell, p);
  if constexpr (kBackward) {
    steps.backward();
  } else {
    steps.forward();
  }
}

}  // namespace extension_cpp::detail
