// What signature.h and register.h declare. Compiled once, and linked into both libraries.
#include "signature.h"

#include <bit>
#include <cctype>
#include <charconv>
#include <cstring>

#include "loop.h"
#include "overlap.h"
#include "register.h"

namespace extension_cpp {

namespace detail {
namespace {

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> split(std::string_view text, std::string_view separator) {
  std::vector<std::string_view> parts;
  for (size_t at; (at = text.find(separator)) != std::string_view::npos; text.remove_prefix(at + separator.size())) {
    parts.push_back(trim(text.substr(0, at)));
  }
  parts.push_back(trim(text));
  return parts;
}

// Whether text is a name or a number.
bool is_word(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

// What comes before `word`, which is taken out of `text` with what follows it; `text` is left with what was before.
std::string_view cut(std::string_view& text, std::string_view word) {
  const size_t at = text.find(word);
  if (at == std::string_view::npos) return {};
  const std::string_view after = trim(text.substr(at + word.size()));
  text = trim(text.substr(0, at));
  return after;
}

// "(Tensor(a!)? out=None, SymInt n)" -> Tensor? out, which is written, and int n. Results may have no names.
std::vector<Parameter> read_parameters(std::string_view list) {
  std::vector<Parameter> parameters;
  list = trim(list);
  if (list.starts_with('(')) list = list.substr(1, list.rfind(')') - 1);
  size_t begin = 0, depth = 0;
  bool quoted = false;
  for (size_t i = 0; i <= list.size(); ++i) {
    const char c = i < list.size() ? list[i] : ',';
    if (c == '"' || c == '\'') quoted = !quoted;
    if (c == '(' || c == '[') ++depth;
    if (c == ')' || c == ']') --depth;
    if (c != ',' || ((quoted || depth > 0) && i < list.size())) continue;
    std::string_view part = trim(list.substr(begin, i - begin));
    begin = i + 1;
    if (part.empty() || part == "*") continue;
    part = trim(part.substr(0, part.find('=')));
    const size_t space = part.rfind(' ');
    Parameter parameter;
    parameter.type = trim(part.substr(0, space));
    if (space != std::string_view::npos) parameter.name = part.substr(space + 1);
    if (const size_t alias = parameter.type.find('('); alias != std::string::npos) {
      const size_t size = parameter.type.find(')') - alias + 1;
      parameter.written = parameter.type.substr(alias, size).find('!') != std::string::npos;
      parameter.type.erase(alias, size);
    }
    if (parameter.type == "SymInt") parameter.type = "int";
    parameters.push_back(std::move(parameter));
  }
  return parameters;
}

}  // namespace
}  // namespace detail

Operator::Operator(const char* schema, const char* signature) : schema(schema), signature(signature) {
  const std::string_view text(schema);
  name_ = text.substr(0, text.find('('));
  try {
    read();
  } catch (const std::exception& what) {  // From a static initialiser it would end the process.
    error = what.what();
    if (!error.starts_with(name_)) error = name_ + ": " + error;
  }
}

void Operator::read() {
  using namespace detail;
  if (name_ == schema) fail(name(), "its schema must say its arguments, got no '('");
  const size_t arrow = std::string_view(signature).find("->");
  if (arrow == std::string_view::npos) fail(name(), "its signature must say its results, got no '->'");
  const std::string_view in_schema = std::string_view(schema).substr(name_.size());
  const size_t returns = in_schema.rfind("->");
  parameters_ = read_parameters(in_schema.substr(0, returns));
  for (std::string_view part : split(std::string_view(signature).substr(0, arrow), ";")) read_argument(part);
  const std::string_view described = trim(std::string_view(signature).substr(arrow + 2));
  // Commas inside of broadcast(a, b) don't part results.
  size_t begin = 0;
  for (size_t i = 0, depth = 0; !described.empty() && i <= described.size(); ++i) {
    if (i == described.size() || (described[i] == ',' && depth == 0)) {
      read_result(trim(described.substr(begin, i - begin)));
      begin = i + 1;
    } else if (described[i] == '(') {
      ++depth;
    } else if (described[i] == ')') {
      --depth;
    }
  }
  for (const Parameter& each : parameters_) {
    const auto same = [&](const Argument& argument) { return argument.name == each.name; };
    if (each.type.starts_with("Tensor") && std::none_of(arguments.begin(), arguments.end(), same)) {
      fail(name(), "its signature must describe its tensors, got none of ", each.name);
    }
  }
  if (returns == std::string_view::npos) return;  // PyTorch refuses it.
  const size_t wanted = read_parameters(in_schema.substr(returns + 2)).size();
  if (results.size() == wanted) return;
  fail(name(), "its signature must have as many results as its schema, ", wanted, ", got ", results.size());
}

void Operator::check_types(
    const std::vector<std::string_view>& takes, const std::vector<std::string_view>& returns) const {
  const std::string_view text(schema);
  const size_t arrow = text.rfind("->");
  if (arrow == std::string_view::npos) return;  // PyTorch refuses it.
  const auto check = [&](const char* what, std::string_view list, const std::vector<std::string_view>& got) {
    std::vector<std::string> want;
    for (const detail::Parameter& each : detail::read_parameters(list)) want.push_back(each.type);
    bool same = want.size() == got.size();
    for (size_t i = 0; same && i < got.size(); ++i) same = got[i].empty() || got[i] == want[i];
    if (same) return;
    const auto joined = [](const auto& names) {
      std::string line = "(";
      for (const auto& name : names) {
        line += (line.size() > 1 ? ", " : "") + (name.empty() ? "another type" : std::string(name));
      }
      return line + ')';
    };
    fail(name(), "its function must ", what, " what its schema says, ", joined(want), ", got ", joined(got));
  };
  check("take", text.substr(name_.size(), arrow - name_.size()), takes);
  check("return", text.substr(arrow + 2), returns);
}

int Operator::name_index(std::string_view name) const {
  const auto same = [&](const std::string& known) { return known[0] == name[0] && known == name; };
  const auto at = std::find_if(names_.begin(), names_.end(), same);
  return at == names_.end() ? -1 : static_cast<int>(at - names_.begin());
}

int Operator::index_of(std::string_view argument) const {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name == argument) return static_cast<int>(i);
  }
  fail(name(), "its signature names no argument '", argument, "'");
}

detail::Operand Operator::read_operand(std::string_view word, std::string_view size) {
  detail::Operand operand;
  const bool number = detail::is_word(word) && std::isdigit(static_cast<unsigned char>(word[0]));
  bool right = detail::is_word(word) && word != "as" && word != "of" && word != "where";
  if (number) {
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), operand.number);
    right = error == std::errc() && end == word.data() + word.size() && word.size() <= detail::kMostDigits;
  }
  if (!right) fail(name(), "its signature must have sizes such as N, 4, N+1 or 2*N, got '", size, "'");
  if (!number) operand.name = add_name(word);
  return operand;
}

detail::Size Operator::read_size(std::string_view text) {
  detail::Size size;
  const size_t operation = text.find_first_of("+-*");
  size.left = read_operand(text.substr(0, operation), text);
  if (operation != std::string_view::npos) {
    size.operation = text[operation];
    size.right = read_operand(text.substr(operation + 1), text);
  }
  for (const int name : {size.left.name, size.right.name}) size.names |= name < 0 ? 0 : 1u << name;
  return size;
}

// Raises for a name in `text` that is neither a number of the schema nor, so far, the size of a tensor.
void Operator::require_said(const detail::Size& size, std::string_view text, uint32_t said) const {
  const uint32_t lacking = size.names & ~(said | numbers_);
  if (lacking == 0) return;
  const std::string before = size.operation ? " before '" + std::string(text) + "'" : "";
  fail(name(), "its signature must say '", names_[std::countr_zero(lacking)], "' of an argument", before);
}

int Operator::add_name(std::string_view name) {
  int index = name_index(name);
  if (index < 0) {
    index = static_cast<int>(names_.size());
    if (index == detail::kMostNames) {
      fail(this->name(), "its signature must have at most ", detail::kMostNames, " names");
    }
    names_.emplace_back(name);
    for (const detail::Parameter& each : parameters_) {
      if (each.name == name && (each.type == "int" || each.type == "bool")) numbers_ |= 1u << index;
    }
  }
  return index;
}

detail::Pattern Operator::read_pattern(std::string_view text, bool result) {
  detail::Pattern pattern;
  if (text.starts_with("broadcast(")) {
    std::string_view names = text.substr(std::strlen("broadcast("));
    if (names.find(')') + 1 != names.size() || names.empty()) {
      fail(name(), "its signature must have nothing next to broadcast(...) in a shape, got '", text, "'");
    }
    names.remove_suffix(1);
    for (std::string_view part : detail::split(names, ",")) {
      pattern.broadcast.push_back(index_of(part));
    }
    broadcasts_ = true;
    return pattern;
  }
  int count = 0;
  uint32_t said = said_;  // Not by another alternative, which may be that of no tensor.
  for (std::string_view part : detail::split(text, " ")) {
    if (part.empty() || part == "()") continue;
    pattern.text += (count++ ? ", " : "(") + std::string(part);
    if (part == "...") {
      if (count > 1) fail(name(), "its signature must have '...' first in a shape, got '", text, "'");
      pattern.pack = true;
    } else if (part == "?") {
      if (!result) fail(name(), "its signature must have '?' in a result only, got '", text, "'");
      pattern.open = true;
    } else {
      const detail::Size size = read_size(part);
      if (!result && size.is_name()) said |= size.names;
      require_said(size, part, said);
      pattern.sizes.push_back(size);
    }
  }
  pattern.text += count == 0 ? "()" : count == 1 ? ",)" : ")";
  return pattern;
}

// A tensor's number of dimensions says which of the alternatives it has.
void Operator::require_different(const std::vector<detail::Pattern>& alternatives, std::string_view text) const {
  const auto same = [](const detail::Pattern& one, const detail::Pattern& other) {
    const bool any = one.pack || other.pack || !one.broadcast.empty() || !other.broadcast.empty();
    return any || one.sizes.size() == other.sizes.size();
  };
  for (size_t i = 0; i < alternatives.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (!same(alternatives[i], alternatives[j])) continue;
      fail(name(), "its signature must have alternatives of different numbers of dimensions, got '", text, "'");
    }
  }
}

void Operator::read_argument(std::string_view text) {
  detail::Argument argument;
  std::string_view shapes = text;
  argument.name = text.substr(0, text.find(':'));
  const auto named = [&](const detail::Parameter& each) { return each.name == argument.name; };
  if (argument.name == text || std::none_of(parameters_.begin(), parameters_.end(), named)) {
    fail(name(), "its signature must describe its tensors, got '", text, "'");
  }
  shapes = detail::trim(shapes.substr(argument.name.size() + 1));
  const std::string_view where = detail::cut(shapes, " where ");
  const std::string_view dtypes = detail::cut(shapes, " of "), like = detail::cut(shapes, " as ");
  if (!like.empty() && !dtypes.empty()) {
    fail(name(), "its signature must have 'as' or 'of' for an argument, not both, got '", text, "'");
  }
  if (!like.empty()) {
    argument.like = index_of(like);
  } else {
    read_dtypes(argument, dtypes.empty() ? "floating" : dtypes);
  }
  for (std::string_view part : detail::split(shapes, "|")) argument.patterns.push_back(read_pattern(part, false));
  require_different(argument.patterns, shapes);
  for (const detail::Pattern& pattern : argument.patterns) {
    for (const detail::Size& size : pattern.sizes) said_ |= size.names;
  }
  argument.conditions_text = where;
  if (!where.empty()) {  // 1 <= K <= H
    std::vector<detail::Size> sizes;
    const auto parts = detail::split(where, "<=");
    for (std::string_view part : parts) {
      if (parts.size() < 2 || part.find_first_of("<=>!") != std::string_view::npos) {
        fail(name(), "its signature must have conditions such as 1 <= K <= N, got '", where, "'");
      }
      sizes.push_back(read_size(part));
      require_said(sizes.back(), part, said_);
    }
    for (size_t i = 1; i < sizes.size(); ++i) argument.conditions.push_back({sizes[i - 1], sizes[i]});
  }
  for (const detail::Parameter& parameter : parameters_) {
    argument.written |= parameter.written && parameter.name == argument.name;
  }
  arguments.push_back(std::move(argument));
}

void Operator::read_dtypes(detail::Argument& argument, std::string_view text) {
  static constexpr std::string_view kFloating = "float16|bfloat16|float32|float64";
  static constexpr std::string_view kInteger = "uint8|int8|int16|int32|int64";
  std::vector<std::string_view> names;
  for (std::string_view part : detail::split(text, "|")) {
    if (part == "floating" || part == "real") names = detail::split(kFloating, "|");
    if (part == "integer" || part == "real") {
      for (std::string_view each : detail::split(kInteger, "|")) names.push_back(each);
    }
    if (part != "floating" && part != "integer" && part != "real") names.push_back(part);
  }
  for (size_t i = 0; i < names.size(); ++i) {
    argument.dtypes |= uint64_t{1} << dtypes::find(names[i]);
    argument.dtype_names += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + std::string(names[i]);
  }
}

void Operator::read_result(std::string_view text) {
  detail::Result result;
  const std::string_view dtype = detail::cut(text, " of "), like = detail::cut(text, " as ");
  if (!like.empty()) result.like = index_of(like);
  if (!dtype.empty()) result.dtype = dtypes::find(dtype);
  result.pattern = read_pattern(text, true);
  const auto packed = [](const detail::Argument& argument) {
    return std::any_of(argument.patterns.begin(), argument.patterns.end(), [](const auto& each) { return each.pack; });
  };
  if (result.pattern.pack && std::none_of(arguments.begin(), arguments.end(), packed)) {
    fail(name(), "its signature must say '...' of an argument");
  }
  results.push_back(std::move(result));
}

namespace {

std::vector<View> select(const detail::Pattern& pattern, std::span<const View> views) {
  std::vector<View> chosen;
  for (int i : pattern.broadcast) {
    if (views[i]) chosen.push_back(views[i]);
  }
  return chosen;
}

}  // namespace

Checks::Checks(const Operator& op, std::span<const View> views, Numbers numbers) : op_(op) {
  first_ = std::find_if(views.data(), views.data() + views.size(), [](const View& t) { return bool(t); });
  for (const auto& [name, value] : numbers) {
    const int index = op.name_index(name);
    if (index >= 0) bind(index, value);
  }
  if (const uint32_t lacking = op.numbers_ & ~bound_)
    refuse_names(lacking, "its function must give that number to Call");
  for (size_t i = 0; i < views.size(); ++i) {
    if (views[i]) check(op.arguments[i], views[i], views);
  }
  for (size_t i = 0; i < views.size(); ++i) {
    if (views[i] && op.arguments[i].written) check_overlap(views[i], views);
  }
  for (size_t i = 0; i < views.size(); ++i) {
    if (views[i] && op.arguments[i].written) announce_write(views[i]);
  }
}

// The stable ABI has no function for a new version, without which autograd can't notice that a value it needs was
// overwritten. A copy of a tensor to itself makes one, refuses what PyTorch's own operators don't write into, and
// copies nothing. Below autograd, where Python's kernel did all this, it does nothing.
void Checks::announce_write(const View& t) const {
  if (aoti_torch_copy_(t.tensor->get(), t.tensor->get(), 0) == 0) return;
  fail(
      op_.name(), t.name,
      " must be neither a leaf that requires a gradient, while gradients are recorded, nor an inference tensor outside "
      "of inference mode, got one");
}

// A contiguous result.
Tensor Checks::empty(size_t result, std::span<const View> views) const {
  const detail::Result& described = op_.results[result];
  if (described.pattern.open || !described.pattern.broadcast.empty()) {
    fail(op_.name(), "its function must allocate a result of ? or broadcast(...), whose sizes Call doesn't know");
  }
  if (described.pattern.pack && !has_pack_)
    fail(op_.name(), "its size ... has no value: no tensor of this call has it");
  std::array<int64_t, kMaxDims> sizes, strides;
  size_t ndim = 0;
  if (described.pattern.pack) {
    for (int64_t size : pack_) sizes[ndim++] = size;
  }
  for (const detail::Size& size : described.pattern.sizes) sizes[ndim++] = value(size);
  int64_t step = 1;
  for (size_t d = ndim; d-- > 0; step = times(step, std::max<int64_t>(sizes[d], 1))) strides[d] = step;
  const View* like = first_;
  if (described.dtype < 0 && described.like >= 0) {
    const size_t at = static_cast<size_t>(described.like);
    like = at < views.size() ? &views[at] : nullptr;
    if (!like || !*like) {
      fail(op_.name(), op_.arguments[described.like].name, " must be a tensor, as a result has its dtype, got None");
    }
  }
  return empty_strided(*like, described.dtype, sizes.data(), strides.data(), ndim);
}

int64_t Checks::operator[](std::string_view name) const {
  const int index = op_.name_index(name);
  if (index < 0) fail(op_.name(), "its signature must say '", name, "' of an argument");
  if (!(bound_ >> index & 1)) refuse_names(1u << index, "no tensor of this call has it");
  return dims_[index];
}

int64_t Checks::value(const detail::Size& size) const {
  if (const uint32_t lacking = size.names & ~bound_) refuse_names(lacking, "no tensor of this call has it");
  return size.value(dims_);
}

void Checks::refuse_names(uint32_t names, const char* how) const {
  fail(op_.name(), "its size ", op_.names_[std::countr_zero(names)], " has no value: ", how);
}

void Checks::bind(int name, int64_t value) {
  dims_[name] = value;
  bound_ |= 1u << name;
}

void Checks::check(const detail::Argument& argument, const View& t, std::span<const View> views) {
  const char* op = op_.name();
  const detail::Argument* described = &argument;  // In place of an argument that is None stands what is said of it.
  while (described->like >= 0 && !views[described->like]) described = &op_.arguments[described->like];
  if (described->like >= 0) {
    const View& like = views[described->like];
    if (t.dtype != like.dtype) {
      const std::string want = dtypes::name(like.dtype), got = dtypes::name(t.dtype);
      fail(op, t.name, " must have the dtype of ", like.name, ", ", want, ", got ", got);
    }
  } else if (!(described->dtypes >> t.dtype & 1)) {
    fail(op, t.name, " must have dtype ", described->dtype_names, ", got ", dtypes::name(t.dtype));
  }
  const View& first = *first_;
  if (t.device_type != first.device_type || t.device_index != first.device_index) {
    fail(op, t.name, " must be on the device of ", first.name, ", ", device_name(first), ", got ", device_name(t));
  }
  if (t.ndim > kMaxDims) fail(op, t.name, " must have at most ", kMaxDims, " dimensions, got ", t.ndim);
  const uint32_t before = bound_;
  const bool pack_before = has_pack_;
  for (const detail::Pattern& pattern : argument.patterns) {
    if (matches(pattern, t, views)) {
      for (const auto& [low, high] : argument.conditions) {
        if (value(low) > value(high)) refuse(argument, t, before, pack_before, views, true);
      }
      return;
    }
    bound_ = before;
  }
  refuse(argument, t, before, pack_before, views, false);
}

bool Checks::matches(const detail::Pattern& pattern, const View& t, std::span<const View> views) {
  if (!pattern.broadcast.empty()) {
    const Shape shape = broadcast_shapes(op_.name(), select(pattern, views));
    return std::equal(t.sizes.begin(), t.sizes.end(), shape.dims, shape.dims + shape.ndim);
  }
  const int64_t named = static_cast<int64_t>(pattern.sizes.size()), leading = t.ndim - named;
  if (pattern.pack ? leading < 0 : leading != 0) return false;
  if (pattern.pack && !(op_.broadcasts_ && named == 0)) {
    const auto pack = t.sizes.first(leading);
    if (has_pack_ && !std::equal(pack.begin(), pack.end(), pack_.begin(), pack_.end())) return false;
    if (!has_pack_) pack_name_ = t.name;
    has_pack_ = true;
    pack_ = pack;
  }
  for (int64_t d = 0; d < named; ++d) {
    const detail::Size& size = pattern.sizes[d];
    const int64_t got = t.sizes[leading + d];
    if (size.is_name() && (size.names & ~bound_)) {
      bind(size.left.name, got);
    } else if (value(size) != got) {
      return false;
    }
  }
  return true;
}

void Checks::refuse(
    const detail::Argument& argument, const View& t, uint32_t bound_before, bool pack_before,
    std::span<const View> views, bool conditions) const {
  const char* op = op_.name();
  const detail::Pattern& first = argument.patterns[0];
  if (!first.broadcast.empty()) {
    std::string names;
    for (size_t i = 0; i < first.broadcast.size(); ++i) {
      names += (i == 0 ? "" : " and ") + op_.arguments[first.broadcast[i]].name;
    }
    const Shape shape = broadcast_shapes(op, select(first, views));
    fail(op, t.name, " must have the shape that ", names, " broadcast to, ", tuple(shape), ", got ", tuple(t.sizes));
  }
  if (first.pack && first.sizes.empty()) {
    fail(op, t.name, " must have the shape of ", pack_name_, ", ", tuple(pack_), ", got ", tuple(t.sizes));
  }
  std::string shapes, with = conditions ? argument.conditions_text : "";
  auto add = [&](const std::string& text) { with += (with.empty() ? "" : " and ") + text; };
  uint32_t known = bound_before;  // and not yet said
  auto say = [&](int name) {
    if (name < 0 || !(known >> name & 1)) return;
    known &= ~(1u << name);
    add(op_.names_[name] + " = " + std::to_string(dims_[name]));
  };
  for (const detail::Pattern& pattern : argument.patterns) {
    shapes += (shapes.empty() ? "" : " or ") + pattern.text;
    if (pattern.pack && pack_before) add("... = " + tuple(pack_));
    for (const detail::Size& size : pattern.sizes) {
      say(size.left.name);
      say(size.right.name);
    }
  }
  for (size_t i = 0; conditions && i < argument.conditions.size(); ++i) {
    for (const detail::Size& size : {argument.conditions[i].low, argument.conditions[i].high}) {
      say(size.left.name);
      say(size.right.name);
    }
  }
  fail(op, t.name, " must have shape ", shapes, with.empty() ? "" : " with ", with, ", got ", tuple(t.sizes));
}

void Checks::check_overlap(const View& out, std::span<const View> views) const {
  const char* op = op_.name();
  if (has_internal_overlap(out)) {
    const std::string sizes = tuple(out.sizes), strides = tuple(out.strides);
    fail(op, out.name, " must not overlap itself, got shape ", sizes, " with strides ", strides);
  }
  for (const View& in : views) {
    if (in.tensor == out.tensor || !in) continue;
    if (partially_overlap(in, out)) {
      fail(op, out.name, " must be ", in.name, " itself or not overlap it, got a partial overlap");
    }
  }
}

std::vector<Registered>& registered() {
  static std::vector<Registered> operators;
  return operators;
}

std::string& registration_errors() {
  static std::string errors;
  return errors;
}

}  // namespace extension_cpp

// C functions, for ctypes.

extern "C" __attribute__((visibility("default"))) const char* extension_cpp_registration_errors() {
  return extension_cpp::registration_errors().c_str();
}

// The signature of an operator that this library registered, by its name with its namespace; or null.
extern "C" __attribute__((visibility("default"))) const char* extension_cpp_signature(const char* name) {
  for (const extension_cpp::Registered& each : extension_cpp::registered()) {
    if (each.name == name) return each.op->signature;
  }
  return nullptr;
}
