// Runs a row-wise operator on the CPU: rows in parallel, or the parts of long ones, and with the widest vectors that
// the machine has.
//
// A state is kept kLanes times, and lane l takes elements l, l + kLanes, ...: that makes vectors of a sum without
// changing what is added to what. A row is cut into segments of fixed length, whose states are combined in order, and
// sums over rows are made of parts of fixed numbers of rows: how many threads there are changes no bit.
#pragma once

#include <vector>

#include "cpu_dtypes.h"
#include "simd.h"

namespace extension_cpp::detail {

template <class Formula, class T>
class RowsOnCpu {
  using V = typename Compute<T>::type;
  using Shape = RowShape<Formula>;
  using State = typename StateOf<Formula, V>::type;
  static constexpr int kLanes = 32, kFields = sizeof(State) / sizeof(V);
  static constexpr int64_t kSegment = 1 << 16;  // a multiple of kBlock, which is one of kLanes
  static constexpr int64_t kGrain = 32'768;     // elements worth a thread
  static constexpr bool kConverts = !std::is_same_v<T, V>;
  // Elements that are converted at once, or asked for.
  static constexpr int64_t kBlock = kConverts ? 1024 : 256;
  // float16 is converted in blocks, by instructions that a loop over single elements doesn't get.
  static constexpr bool kInBlocks = std::is_same_v<T, float16>;
  static constexpr auto kEach = std::make_index_sequence<Shape::kElements>();

  struct Row {
    const RowsOnCpu& rows;
    int64_t index, size;
    V at(int k, int64_t i) const { return load(rows.row(k, index)[i]); }
  };

 public:
  RowsOnCpu(const Formula& formula, const RowArguments<Formula>& arguments, void* const* results)
      : formula_(formula), leading_(arguments.leading), results_(results), n_(arguments.size), count_(arguments.count) {
    for (int k = 0; k < Shape::kIn; ++k) {
      data_[k] = arguments.template data<void>(k);
      if (Shape::In::kAt[k] != kColumns) continue;
      columns_[k] = static_cast<const V*>(data_[k]);
      if constexpr (kConverts) {
        converted_[k].resize(n_);
        simd::run([&] { read(static_cast<const T*>(data_[k]), 1, converted_[k].data(), n_); });
        columns_[k] = converted_[k].data();
      }
    }
  }

  void run() {
    if constexpr (Shape::kSums > 0) {
      // Few enough rows a part that rounding errors don't grow, and few enough parts that they take little memory.
      const int64_t of_part = std::clamp<int64_t>(count_ / 64, 8, 256), parts = (count_ + of_part - 1) / of_part;
      sums_.assign(times(times(parts, Shape::kSums), n_), V(0));
      parallel(parts, of_part * n_, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
          rows(p * of_part, std::min((p + 1) * of_part, count_), sums_.data() + p * Shape::kSums * n_);
        }
      });
      add_parts(parts);
    } else {
      parallel(count_, n_, [&](int64_t begin, int64_t end) { rows(begin, end, nullptr); });
    }
  }

 private:
  const T* row(int k, int64_t index) const { return static_cast<const T*>(data_[k]) + leading_.offset(k, index); }

  // Over items of so many elements; not where there are too few of them to share, whose segments are then shared out.
  template <class Body>
  void parallel(int64_t items, int64_t elements, const Body& body) {
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(elements, 1));
    const bool by_segments = n_ >= 4 * kSegment && items < 16;
    if (items <= grain || by_segments) return body(0, items);
    torch::stable::parallel_for(0, items, grain, body);
  }

  template <class Body>
  void for_segments(const Body& body) {
    const int64_t segments = (n_ + kSegment - 1) / kSegment;
    auto each = [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) body(s, s * kSegment, std::min((s + 1) * kSegment, n_));
    };
    // Inside of a parallel region this is a plain loop.
    segments < 4 ? each(0, segments) : torch::stable::parallel_for(0, segments, 1, each);
  }

  void rows(int64_t begin, int64_t end, V* sums) {
    for (int64_t r = begin; r < end; ++r) {
      State state{};
      if constexpr (Accumulates<Formula, V>) {
        if (n_ <= kSegment) {
          if (n_ > 0) state = accumulate(r, 0, n_);
        } else {
          std::vector<State> states((n_ + kSegment - 1) / kSegment);
          for_segments([&](int64_t s, int64_t from, int64_t to) { states[s] = accumulate(r, from, to); });
          state = states[0];
          for (size_t s = 1; s < states.size(); ++s) formula_.combine(state, states[s]);
        }
      }
      const Row where{*this, r, n_};
      const auto kept = finish_row<Formula, T, V>(
          formula_, state, where, data_, leading_, r, [](const T& value) { return load(value); },
          std::make_index_sequence<Shape::kOne>());
      keep_row<Formula, T, V>(
          kept, results_, r, [](T& to, V value) { store(to, value); }, std::make_index_sequence<Shape::kOneOut>());
      if constexpr (Shape::kWrites) {
        if (n_ <= kSegment) {
          write_row(r, kept, 0, n_, sums);
        } else {
          for_segments([&](int64_t, int64_t from, int64_t to) { write_row(r, kept, from, to, sums); });
        }
      }
    }
  }

  // Where the arguments' elements from `begin` on are, of which element() makes what is computed with.
  void elements(int64_t r, int64_t begin, int64_t n, V (*buffers)[kBlock], const void** in) const {
    for (int e = 0; e < Shape::kElements; ++e) {
      const int k = Shape::kElementsAt[e];
      if (Shape::In::kAt[k] == kColumns) {
        in[e] = columns_[k] + begin;
      } else if constexpr (kInBlocks) {
        read(row(k, r) + begin, 1, buffers[e], n);
        in[e] = buffers[e];
      } else {
        in[e] = row(k, r) + begin;
      }
    }
  }

  static V element(const void* const* in, int e, int64_t i) {
    if (kInBlocks || Shape::In::kAt[Shape::kElementsAt[e]] == kColumns) return static_cast<const V*>(in[e])[i];
    return load(static_cast<const T*>(in[e])[i]);
  }

  State accumulate(int64_t r, int64_t begin, int64_t end) const {
    using Fields = std::array<V, kFields>;
    static_assert(sizeof(State) == sizeof(Fields), "a State has members of type V alone");
    State result;
    simd::run([&] {
      const Formula formula = formula_;
      // In this function, of which nothing else can change them: then they are kept in registers.
      alignas(64) V lanes[kFields][kLanes];
      const Fields initial = std::bit_cast<Fields>(State{});
      for (int f = 0; f < kFields; ++f) std::fill_n(lanes[f], kLanes, initial[f]);
      auto get = [&](int l) {
        Fields fields;
        for (int f = 0; f < kFields; ++f) fields[f] = lanes[f][l];
        return std::bit_cast<State>(fields);
      };
      auto put = [&](int l, const State& state) {
        const Fields fields = std::bit_cast<Fields>(state);
        for (int f = 0; f < kFields; ++f) lanes[f][l] = fields[f];
      };
      alignas(64) V buffers[kInBlocks ? Shape::kElements : 1][kBlock];
      for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t n = std::min(kBlock, end - at);
        const void* in[Shape::kElements];
        elements(r, at, n, buffers, in);
        auto add = [&](int64_t i, int l) {
          V values[Shape::kElements];
          for (int e = 0; e < Shape::kElements; ++e) values[e] = element(in, e, i + l);
          State state = get(l);
          accumulate_one(formula, state, values, kEach);
          put(l, state);
        };
        int64_t i = 0;
        for (; i + kLanes <= n; i += kLanes) {
#pragma GCC ivdep
          for (int l = 0; l < kLanes; ++l) add(i, l);
        }
        for (int l = 0; i + l < n; ++l) add(i, l);
      }
      for (int step = kLanes / 2; step > 0; step /= 2) {
        for (int l = 0; l < step; ++l) {
          State state = get(l);
          formula.combine(state, get(l + step));
          put(l, state);
        }
      }
      result = get(0);
    });
    return result;
  }

  // Whether, while a row is written, the next one is asked for: the processor does so by itself within a page of
  // memory, and conversions take longer than reading.
  bool asks_for(int64_t r) const { return !kConverts && r < count_ && n_ <= int64_t{8192 / sizeof(T)}; }

  void ask_for(int64_t r, int64_t begin, int64_t n) const {
    for (int k = 0; k < Shape::kIn; ++k) {
      if (Shape::In::kAt[k] != kRows) continue;
      for (int64_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(row(k, r) + begin + i, 0, 2);
    }
  }

  template <class Kept>
  void write_row(int64_t r, const Kept& given, int64_t begin, int64_t end, V* all_sums) const {
    simd::run([&] {
      const Kept kept = given;  // Of which the compiler knows that no result overwrites it.
      const Formula formula = formula_;
      constexpr int kOut = Shape::kRowsOut + Shape::kSums;
      const bool asks = asks_for(r + 1);
      alignas(64) V buffers[kInBlocks ? Shape::kElements : 1][kBlock];
      alignas(64) V written[kConverts ? kOut : 1][kBlock];
      for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t n = std::min(kBlock, end - at);
        if (asks) ask_for(r + 1, at, n);
        const void* in[Shape::kElements];
        V* out[kOut];
        elements(r, at, n, buffers, in);
        for (int o = 0; o < kOut; ++o) {
          const int k = Shape::kWrittenAt[o];
          if (Shape::Out::kAt[k] == kColumns) {
            out[o] = all_sums + place_of<typename Shape::Out>(k) * n_ + at;
          } else if constexpr (kConverts) {
            out[o] = written[o];
          } else {
            out[o] = static_cast<V*>(results_[k]) + r * n_ + at;
          }
        }
#pragma GCC ivdep
        for (int i = 0; i < static_cast<int>(n); ++i) {
          V values[Shape::kElements];
          for (int e = 0; e < Shape::kElements; ++e) values[e] = element(in, e, i);
          const auto result = write_one(formula, kept, at + i, values, kEach);
          for (int o = 0; o < kOut; ++o) {
            if (Shape::Out::kAt[Shape::kWrittenAt[o]] == kColumns) {
              out[o][i] += value_at(result, o);
            } else {
              out[o][i] = value_at(result, o);
            }
          }
        }
        if constexpr (kConverts) {
          for (int o = 0; o < kOut; ++o) {
            const int k = Shape::kWrittenAt[o];
            if (Shape::Out::kAt[k] == kRows) write(static_cast<T*>(results_[k]) + r * n_ + at, written[o], n);
          }
        }
      }
    });
  }

  // The parts of the sums over rows, in order.
  void add_parts(int64_t parts) {
    for (int o = 0; o < Shape::kOut; ++o) {
      if (Shape::Out::kAt[o] != kColumns) continue;
      const V* from = sums_.data() + place_of<typename Shape::Out>(o) * n_;
      T* const to = static_cast<T*>(results_[o]);
      const int64_t step = Shape::kSums * n_;
      auto body = [&](int64_t begin, int64_t end) {
        simd::run([&] {
          alignas(64) V total[kBlock];
          for (int64_t at = begin; at < end; at += kBlock) {
            const int64_t n = std::min(kBlock, end - at);
            std::fill_n(total, n, V(0));
            for (int64_t p = 0; p < parts; ++p) {
              const V* part = from + p * step + at;
#pragma GCC ivdep
              for (int64_t i = 0; i < n; ++i) total[i] += part[i];
            }
            write(to + at, total, n);
          }
        });
      };
      const int64_t grain = std::max(kBlock, kGrain / std::max<int64_t>(parts, 1));
      n_ <= grain ? body(0, n_) : torch::stable::parallel_for(0, n_, grain, body);
    }
  }

  const Formula& formula_;
  const Leading<Shape::kIn>& leading_;
  void* const* results_;
  int64_t n_, count_;
  const void* data_[Shape::kIn];
  const V* columns_[Shape::kIn];
  std::vector<V> converted_[Shape::kIn], sums_;
};

template <class Formula>
void run_rows(
    const char* op, const View& first, const Formula& formula, const RowArguments<Formula>& arguments,
    void* const* results) {
  dispatch(Floating(), op, first.dtype, [&]<class T>(T) { RowsOnCpu<Formula, T>(formula, arguments, results).run(); });
}

}  // namespace extension_cpp::detail
