// An operator as it is declared: its schema, and its signature, one line of the shapes and dtypes of its arguments and
// results. The checks and the results' shapes come from it, here and, in the same words, in Python
// (extension_cpp/ops/_signature.py), which asks this library for the line. The guide to adding an operator has its
// grammar.
#pragma once

#include <array>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "check.h"

namespace extension_cpp {

namespace detail {

constexpr int kMostNames = 16;
constexpr size_t kMostDigits = 18;  // of a number, so that a sum of two fits

// An argument or a result of a schema.
struct Parameter {
  std::string type, name;  // the type without what it aliases: "Tensor?" of Tensor(a!)?
  bool written = false;
};

// A name of the signature, or a number.
struct Operand {
  int name = -1;
  int64_t number = 0;

  int64_t value(const int64_t* dims) const { return name < 0 ? number : dims[name]; }
};

// "N", "4", "T+1", "2*N" or "K*flag": an operand, or an operation on two.
struct Size {
  Operand left, right;
  char operation = 0;
  uint32_t names = 0;  // a bit for each that it has

  // The first tensor that has it sets it.
  bool is_name() const { return operation == 0 && left.name >= 0; }
  int64_t value(const int64_t* dims) const {
    const int64_t x = left.value(dims), y = right.value(dims);
    return operation == '*' ? times(x, y) : operation == '-' ? x - y : x + y;
  }
};

struct Pattern {
  bool pack = false;           // begins with "...", any number of dimensions
  std::vector<int> broadcast;  // the shape that these arguments broadcast to
  std::vector<Size> sizes;
  bool open = false;  // has "?", a size that the kernel finds
  std::string text;   // "(B, T, H)"
};

struct Condition {
  Size low, high;  // low <= high
};

struct Argument {
  std::string name;
  std::vector<Pattern> patterns;
  int like = -1;        // the argument that has the same dtype
  uint64_t dtypes = 0;  // else a bit for each that is allowed
  std::string dtype_names, conditions_text;
  std::vector<Condition> conditions;
  bool written = false;
};

struct Result {
  Pattern pattern;
  int like = -1;       // the argument that has the same dtype; else the first that is given
  int32_t dtype = -1;  // of its own, if >= 0
};

}  // namespace detail

// A kernel's file has one of each operator, as a constant.
class Operator {
 public:
  Operator(const char* schema, const char* signature);
  Operator(const Operator&) = delete;

  const char* name() const { return name_.c_str(); }
  // Of a dimension or number in the signature; -1 if it has none of that name.
  int name_index(std::string_view name) const;
  // Raises for a function of other types than those in the schema. An empty name is of a type that is not known here.
  void check_types(const std::vector<std::string_view>& takes, const std::vector<std::string_view>& returns) const;

  const char *schema, *signature;
  std::string error;  // in them; registering the operator throws it
  std::vector<detail::Argument> arguments;
  std::vector<detail::Result> results;

 private:
  friend class Checks;

  void read();
  int index_of(std::string_view argument) const;
  int add_name(std::string_view name);
  detail::Operand read_operand(std::string_view word, std::string_view size);
  detail::Size read_size(std::string_view text);
  void require_said(const detail::Size& size, std::string_view text, uint32_t said) const;
  detail::Pattern read_pattern(std::string_view text, bool result);
  void require_different(const std::vector<detail::Pattern>& alternatives, std::string_view text) const;
  void read_argument(std::string_view text);
  void read_dtypes(detail::Argument& argument, std::string_view text);
  void read_result(std::string_view text);

  std::string name_;
  std::vector<detail::Parameter> parameters_;  // that it takes
  std::vector<std::string> names_;
  uint32_t numbers_ = 0;     // the names that are numbers of the schema, a bit for each
  uint32_t said_ = 0;        // those that are sizes of the arguments read so far
  bool broadcasts_ = false;  // arguments that are "..." may differ in shape
};

using Numbers = std::initializer_list<std::pair<const char*, int64_t>>;

// The checks of one call, and the sizes that they find.
class Checks {
 public:
  Checks(const Operator& op, std::span<const View> views, Numbers numbers);

  int64_t operator[](std::string_view name) const;
  Tensor empty(size_t result, std::span<const View> views) const;

 private:
  void bind(int name, int64_t value);
  int64_t value(const detail::Size& size) const;
  [[noreturn]] void refuse_names(uint32_t names, const char* how) const;
  void check(const detail::Argument& argument, const View& t, std::span<const View> views);
  bool matches(const detail::Pattern& pattern, const View& t, std::span<const View> views);
  [[noreturn]] void refuse(
      const detail::Argument& argument, const View& t, uint32_t bound_before, bool pack_before,
      std::span<const View> views, bool conditions) const;
  void check_overlap(const View& out, std::span<const View> views) const;
  void announce_write(const View& t) const;

  const Operator& op_;
  const View* first_;  // of the tensors that are given
  int64_t dims_[detail::kMostNames] = {};
  uint32_t bound_ = 0;
  bool has_pack_ = false;
  const char* pack_name_ = nullptr;
  std::span<const int64_t> pack_;
};

// A call of an operator with N tensors, in the order of its signature, checked.
template <size_t N>
class Call {
 public:
  // `numbers` are arguments that the signature computes with. nullptr stands for an optional tensor that is None.
  Call(const Operator& op, const std::array<const Tensor*, N>& tensors, Numbers numbers = {})
      : op(op), views(read(op, tensors, std::make_index_sequence<N>())), checks_(op, views, numbers) {}

  int64_t operator[](std::string_view dimension) const { return checks_[dimension]; }

  // For a kernel that has one type for both: a signature without `as` takes others.
  void check_dtype(size_t k, size_t like) const {
    const View &t = views[k], &other = views[like];
    if (t.dtype == other.dtype) return;
    fail(
        op.name(), t.name, " must have the dtype of ", other.name, ", ", dtypes::name(other.dtype), ", got ",
        dtypes::name(t.dtype), "; its signature must say \"as ", other.name, "\"");
  }
  void check_dtypes() const {
    for (size_t k = 1; k < N; ++k) check_dtype(k, 0);
  }

  // For a kernel that writes a result in this dtype: the signature may give it another.
  void check_result(size_t k, const Tensor& result, int32_t dtype) const {
    int32_t got = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(result.get(), &got));
    if (got == dtype) return;
    fail(
        op.name(), "its signature must give result ", k, " of this formula dtype ", dtypes::name(dtype), ", got ",
        dtypes::name(got));
  }

  // A result, contiguous and not yet written.
  Tensor empty(size_t result = 0) const { return checks_.empty(result, views); }

  const Operator& op;
  const std::array<View, N> views;

 private:
  template <size_t... I>
  static std::array<View, N> read(
      const Operator& op, const std::array<const Tensor*, N>& tensors, std::index_sequence<I...>) {
    return {(tensors[I] ? View(op.name(), op.arguments[I].name.c_str(), *tensors[I]) : View())...};
  }

  Checks checks_;
};

template <size_t N>
Call(const Operator&, const Tensor* const (&)[N]) -> Call<N>;

}  // namespace extension_cpp
