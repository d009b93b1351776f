// Row-wise operators: an author writes a struct of passes over scalars, and what each tensor is to a row.
//
//   struct MeanSquare {                                         // "x: ... N -> ..."
//     using Arguments = Roles<kRows>;
//     using Results = Roles<kValues>;
//
//     template <class V>
//     struct State {
//       V sum = 0;
//     };
//
//     template <class V>
//     EXTENSION_CPP_INLINE void accumulate(State<V>& state, V x) const { state.sum += x * x; }
//     template <class V>
//     EXTENSION_CPP_INLINE void combine(State<V>& state, const State<V>& other) const { state.sum += other.sum; }
//     template <class V, class Row>
//     EXTENSION_CPP_INLINE V finish(const State<V>& state, const Row& row) const { return state.sum / row.size; }
//   };
//   Tensor mean_square(const Tensor& x) { return rowwise(kMeanSquare, MeanSquare{}, x); }
//
// accumulate takes the elements of a row one by one, of all arguments that have some, in any order; combine adds one
// state to another, and a new State changes nothing; finish makes of the state of the whole row what is kept of it: the
// results that have one value a row come first in it. write, where other results are wanted, takes that and the
// elements again, and returns the results' elements; if its second parameter is an int64_t, that is the position in the
// row. An operator with nothing to sum has neither State nor accumulate nor combine, and finish takes the row alone.
// The arguments that have one value a row are the last parameters of finish.
//
// V is float for float16, bfloat16 and float32, and double for float64. Elements are added up in an order that depends
// on the sizes alone: every layout and every run gives the same bits. The same file is compiled for the CPU and,
// included in a .cu file, for CUDA.
#pragma once

#include <array>
#include <tuple>

#include <torch/csrc/stable/ops.h>

#include "elementwise.h"
#include "functions.h"

namespace extension_cpp {

// What a tensor is to a row, by the shape that the operator's signature gives it.
enum Role {
  kRows,        // "... N": a value for each element
  kColumns,     // "N": a value for each position, for all rows; as a result, a sum over the rows
  kValues,      // "...": a value for each row
  kStatistics,  // "... of float64": the same with all digits, for the backward
  kIndices,     // "... of int64": the same, of an argument
};

template <Role... R>
struct Roles {
  static constexpr int kSize = sizeof...(R);
  static constexpr Role kAt[] = {R...};
  static constexpr int count(Role role) { return (0 + ... + (R == role)); }
};

// The mean and the variance of what was added, for a State: by Welford's method, which loses no digits where the mean
// is large next to the differences from it.
template <class V>
struct Moments {
  V count = 0, mean = 0, squares = 0;

  EXTENSION_CPP_INLINE void add(V x) {
    count += 1;
    const V delta = x - mean;
    mean += quotient(delta, count);
    squares += delta * (x - mean);
  }

  EXTENSION_CPP_INLINE void add(const Moments& other) {
    if (other.count == 0) return;
    const V sum = count + other.count, share = other.count / sum, delta = other.mean - mean;
    mean += delta * share;
    squares += other.squares + delta * delta * (count * share);
    count = sum;
  }

  EXTENSION_CPP_INLINE V variance() const { return squares / count; }
};

constexpr bool has_elements(Role role) {
  return role == kRows || role == kColumns;
}

namespace detail {

constexpr int kRowDims = 4;  // of the leading dimensions, once those that lie behind one another are merged

// Where the rows of K tensors begin. Dimension 0 varies fastest.
template <size_t K>
struct Leading {
  int ndim = 0;
  int64_t sizes[kRowDims], strides[K][kRowDims];

  EXTENSION_CPP_INLINE int64_t offset(int k, int64_t row) const {
    int64_t at = 0;
#pragma unroll 1  // It is rarely entered, and divisions are long.
    for (int d = 0; d + 1 < ndim; ++d, row /= sizes[d - 1]) at += row % sizes[d] * strides[k][d];
    return ndim == 0 ? 0 : at + row * strides[k][ndim - 1];
  }
};

// All results of a call, contiguous.
template <size_t kOut, size_t kIn>
std::array<Tensor, kOut> allocate_results(const Call<kIn>& call, bool large = true) {
  const auto results = [&]<size_t... I>(std::index_sequence<I...>) {
    return std::array<Tensor, kOut>{call.empty(I)...};
  }(std::make_index_sequence<kOut>());
  if (large && call.views[0].device_type == aoti_torch_device_type_cpu()) {
    for (const Tensor& result : results) ask_for_huge_pages(result);
  }
  return results;
}

// False where that takes more dimensions than `most`.
template <size_t K>
bool merge_leading(
    const std::array<View, K>& views, const std::array<bool, K>& has_rows, int leading, int most, Leading<K>& to) {
  to = {};
  for (int d = leading; d-- > 0;) {
    int64_t size = 1;
    for (size_t k = 0; k < K; ++k) size = has_rows[k] ? views[k].sizes[d] : size;
    if (size == 1) continue;
    const int last = to.ndim - 1;
    bool merge = last >= 0;
    for (size_t k = 0; k < K; ++k) {
      merge = merge && (!has_rows[k] || views[k].strides[d] == to.strides[k][last] * to.sizes[last]);
    }
    if (merge) {
      to.sizes[last] *= size;
      continue;
    }
    if (to.ndim == most) return false;
    to.sizes[to.ndim] = size;
    for (size_t k = 0; k < K; ++k) to.strides[k][to.ndim] = has_rows[k] ? views[k].strides[d] : 0;
    ++to.ndim;
  }
  return true;
}

// The arguments with dense rows: those whose rows aren't, and all if their rows lie too irregularly, are copied.
template <class Formula, int kMostDims = kRowDims>
struct RowArguments {
  static constexpr size_t K = Formula::Arguments::kSize;

  RowArguments(const char* op, const std::array<const Tensor*, K>& given, std::array<View, K> views) {
    std::array<bool, K> has_rows;
    int leading = 0;
    for (size_t k = 0; k < K; ++k) {
      const Role role = Formula::Arguments::kAt[k];
      has_rows[k] = role != kColumns;
      const View& t = views[k];
      if (role == kRows) leading = static_cast<int>(t.ndim) - 1;
      tensors[k] = *given[k];
      if (has_elements(role) && t.sizes[t.ndim - 1] > 1 && t.strides[t.ndim - 1] != 1) make_dense(op, k, views);
    }
    size = 1;
    for (size_t k = 0; k < K; ++k) {
      if (Formula::Arguments::kAt[k] != kRows) continue;
      size = views[k].sizes[leading];
      count = 1;
      for (int d = 0; d < leading; ++d) count = times(count, views[k].sizes[d]);
    }
    if (count == 0 || merge_leading(views, has_rows, leading, kMostDims, this->leading)) return;
    for (size_t k = 0; k < K; ++k) make_dense(op, k, views);
    merge_leading(views, has_rows, leading, kMostDims, this->leading);
  }

  template <class T>
  const T* data(int k) const {
    return static_cast<const T*>(tensors[k]->const_data_ptr());
  }

  std::array<std::optional<Tensor>, K> tensors;
  Leading<K> leading;
  int64_t count, size;  // of rows, of elements in one

 private:
  void make_dense(const char* op, size_t k, std::array<View, K>& views) {
    tensors[k] = torch::stable::contiguous(*tensors[k]);
    views[k] = View(op, views[k].name, *tensors[k]);
  }
};

// Roles and signature are two texts. Where they differ, the loops would read and write outside of a tensor.
template <class Formula, size_t kIn, size_t kOut>
void check_roles(const char* op, const std::array<View, kIn>& views, const std::array<Tensor, kOut>& results) {
  int64_t rows = 1, size = -1, ndim = 0;
  for (size_t k = kIn; k-- > 0;) {
    if (Formula::Arguments::kAt[k] != kRows) continue;
    if (views[k].ndim == 0) fail(op, "the role of ", views[k].name, " is kRows, and it has no dimensions");
    ndim = views[k].ndim, size = views[k].sizes[ndim - 1], rows = 1;
    for (int64_t d = 0; d + 1 < ndim; ++d) rows *= views[k].sizes[d];
  }
  const auto fits = [&](Role role, int64_t numel, int64_t dims) {
    const bool whole = role == kRows, columns = role == kColumns;
    return numel == (whole ? rows * size : columns ? size : rows) && dims == (whole ? ndim : columns ? 1 : ndim - 1);
  };
  for (size_t k = 0; k < kIn; ++k) {
    if (fits(Formula::Arguments::kAt[k], views[k].numel, views[k].ndim)) continue;
    fail(
        op, "Arguments must have the role of ", views[k].name,
        " that its shape in the signature says, in the same order");
  }
  for (size_t k = 0; k < kOut; ++k) {
    if (fits(Formula::Results::kAt[k], results[k].numel(), results[k].dim())) continue;
    fail(op, "Results must have the role of result ", k, " that its shape in the signature says, in the same order");
  }
}

template <class Formula, class V>
concept Accumulates = requires { typename Formula::template State<V>; };

template <class V>
struct NoState {};

template <class Formula, class V>
struct StateOf {
  using type = NoState<V>;
};
template <class Formula, class V>
  requires Accumulates<Formula, V>
struct StateOf<Formula, V> {
  using type = typename Formula::template State<V>;
};

// The values that a formula returned, one or several.
template <class V>
EXTENSION_CPP_INLINE V value_at(const V& value, int) {
  return value;
}
template <class V, int N>
EXTENSION_CPP_INLINE V value_at(const Values<V, N>& values, int k) {
  return values.at[k];
}

// A type's place among those of its role: how many there are before position k.
template <class R>
constexpr int place_of(int k) {
  int place = 0;
  for (int i = 0; i < k; ++i) place += R::kAt[i] == R::kAt[k];
  return place;
}

// The positions of the roles for which `wanted` holds, in order.
template <class R, class Wanted>
constexpr auto positions_of(Wanted wanted) {
  std::array<int, R::kSize> at{};
  int n = 0;
  for (int k = 0; k < R::kSize; ++k) {
    if (wanted(R::kAt[k])) at[n++] = k;
  }
  return at;
}

template <class Formula>
struct RowShape {
  using In = typename Formula::Arguments;
  using Out = typename Formula::Results;
  static constexpr int kIn = In::kSize, kOut = Out::kSize;
  static constexpr int kElements = In::count(kRows) + In::count(kColumns);
  static constexpr int kOne = kIn - kElements;  // arguments with one value a row
  static constexpr int kRowsOut = Out::count(kRows), kSums = Out::count(kColumns);
  static constexpr int kOneOut = kOut - kRowsOut - kSums;
  static constexpr bool kWrites = kRowsOut + kSums > 0;
  static constexpr auto kElementsAt = positions_of<In>([](Role role) { return has_elements(role); });
  static constexpr auto kOneAt = positions_of<In>([](Role role) { return !has_elements(role); });
  static constexpr auto kWrittenAt = positions_of<Out>([](Role role) { return has_elements(role); });
  static constexpr auto kOneOutAt = positions_of<Out>([](Role role) { return !has_elements(role); });
  // The same as numbers, for device code.
  template <size_t I>
  static constexpr int element_at = kElementsAt[I];
  template <size_t I>
  static constexpr int one_at = kOneAt[I];
  template <size_t I>
  static constexpr int written_at = kWrittenAt[I];
  template <size_t I>
  static constexpr int written_place = place_of<Out>(kWrittenAt[I]);
  template <size_t I>
  static constexpr int one_out_at = kOneOutAt[I];
};

// An argument's value of a row, as finish takes it.
template <Role role, class T, class V, class Load>
EXTENSION_CPP_INLINE auto value_of(const void* data, int64_t at, const Load& load) {
  if constexpr (role == kIndices) {
    return static_cast<const int64_t*>(data)[at];
  } else if constexpr (role == kStatistics) {
    return static_cast<V>(static_cast<const double*>(data)[at]);
  } else {
    return load(static_cast<const T*>(data)[at]);
  }
}

// finish, with the arguments that have one value a row.
template <class Formula, class T, class V, class State, class Row, class Load, size_t... I>
EXTENSION_CPP_INLINE auto finish_row(
    const Formula& formula, const State& state, const Row& row, const void* const* data,
    const Leading<RowShape<Formula>::kIn>& leading, int64_t index, const Load& load, std::index_sequence<I...>) {
  using Shape = RowShape<Formula>;
  if constexpr (Accumulates<Formula, V>) {
    return formula.finish(
        state, row,
        value_of<Shape::In::kAt[Shape::template one_at<I>], T, V>(
            data[Shape::template one_at<I>], leading.offset(Shape::template one_at<I>, index), load)...);
  } else {
    return formula.finish(
        row, value_of<Shape::In::kAt[Shape::template one_at<I>], T, V>(
                 data[Shape::template one_at<I>], leading.offset(Shape::template one_at<I>, index), load)...);
  }
}

// The results that have one value a row.
template <Role role, class T, class V, class Store>
EXTENSION_CPP_INLINE void keep_value(void* data, int64_t index, V value, const Store& store) {
  if constexpr (role == kStatistics) {
    static_cast<double*>(data)[index] = static_cast<double>(value);
  } else {
    store(static_cast<T*>(data)[index], value);
  }
}

template <class Formula, class T, class V, class Kept, class Store, size_t... I>
EXTENSION_CPP_INLINE void keep_row(
    const Kept& kept, void* const* data, int64_t index, const Store& store, std::index_sequence<I...>) {
  using Shape = RowShape<Formula>;
  (keep_value<Shape::Out::kAt[Shape::template one_out_at<I>], T, V>(
       data[Shape::template one_out_at<I>], index, value_at(kept, I), store),
   ...);
}

template <class Formula, class State, class V, size_t... I>
EXTENSION_CPP_INLINE void accumulate_one(const Formula& formula, State& state, const V* in, std::index_sequence<I...>) {
  formula.accumulate(state, in[I]...);
}

template <class Formula, class Kept, class V, size_t... I>
EXTENSION_CPP_INLINE auto write_one(
    const Formula& formula, const Kept& kept, int64_t at, const V* in, std::index_sequence<I...>) {
  if constexpr (requires { formula.write(kept, at, in[I]...); }) {
    return formula.write(kept, at, in[I]...);
  } else {
    return formula.write(kept, in[I]...);
  }
}

}  // namespace detail
}  // namespace extension_cpp

#if defined(__CUDACC__)
#include "rowwise.cuh"
#else
#include "rowwise_cpu.h"
#endif

namespace extension_cpp {

// A row-wise operator's results, contiguous, of tensors in the order of its signature.
template <class Formula, class... Tensors>
auto rowwise(const Operator& op, const Formula& formula, const Tensors&... tensors) {
  using Shape = detail::RowShape<Formula>;
  constexpr size_t kIn = Shape::kIn, kOut = Shape::kOut;
  static_assert(sizeof...(Tensors) == kIn, "as many tensors as Arguments has roles");
  const Call<kIn> call(op, {&tensors...});
  for (size_t k = 0; k < kIn; ++k) {
    const Role role = Shape::In::kAt[k];
    if (role != kStatistics && role != kIndices) call.check_dtype(k, Shape::kElementsAt[0]);
  }
  const auto results = detail::allocate_results<kOut>(call, Shape::kRowsOut > 0);
  detail::check_roles<Formula>(op.name(), call.views, results);
  const detail::RowArguments<Formula> arguments(op.name(), {&tensors...}, call.views);
  // The dtype is that of the first argument that has elements.
  const View& first = call.views[Shape::kElementsAt[0]];
  void* data[kOut];
  for (size_t k = 0; k < kOut; ++k) {
    const bool all_digits = Formula::Results::kAt[k] == kStatistics;
    call.check_result(k, results[k], all_digits ? dtypes::kFloat64 : first.dtype);
    data[k] = results[k].mutable_data_ptr();
  }
  detail::run_rows(op.name(), first, formula, arguments, data);
  return detail::returned(results);
}

}  // namespace extension_cpp
