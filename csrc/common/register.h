// Registers a file's operators: their schemas and kernels, and the lines that Python asks for.
//
//   EXTENSION_CPP_REGISTER(m) { m.add<&scale>(kScale); }
//
// One block works for both compilers: a .cpp file registers schemas and CPU kernels, a .cu file CUDA kernels.
#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "signature.h"

// Of torch.ops. A file of operators outside of this package defines its own before it includes this.
#ifndef EXTENSION_CPP_NAMESPACE
#define EXTENSION_CPP_NAMESPACE extension_cpp
#endif

namespace extension_cpp {

struct Registered {
  std::string name;  // with its namespace
  const Operator* op;
};

std::vector<Registered>& registered();

// What went wrong in this library's registrations, a line for each file. Python asks for it once the library is loaded:
// an exception from a static initialiser would end the process.
std::string& registration_errors();

namespace detail {

// What a schema calls a type of C++; empty for those that nothing here knows.
template <class T>
constexpr const char* type_name() {
  using U = std::remove_cvref_t<T>;
  static_assert(!std::is_same_v<U, float>, "a float of a schema is a double in C++, and this function has float");
  static_assert(
      !std::is_integral_v<U> || std::is_same_v<U, int64_t> || std::is_same_v<U, bool>,
      "an int of a schema is an int64_t in C++, and this function has another integer");
  if constexpr (std::is_same_v<U, Tensor>) {
    return "Tensor";
  } else if constexpr (std::is_same_v<U, std::optional<Tensor>>) {
    return "Tensor?";
  } else if constexpr (std::is_same_v<U, double>) {
    return "float";
  } else if constexpr (std::is_same_v<U, int64_t>) {
    return "int";
  } else if constexpr (std::is_same_v<U, bool>) {
    return "bool";
  } else {
    return "";
  }
}

using TypeNames = std::vector<std::string_view>;

template <class T>
struct Returned {
  static TypeNames names() { return {type_name<T>()}; }
};
template <>
struct Returned<void> {
  static TypeNames names() { return {}; }
};
template <class... T>
struct Returned<std::tuple<T...>> {
  static TypeNames names() { return {type_name<T>()...}; }
};

template <class F>
struct FunctionTypes;
template <class R, class... A>
struct FunctionTypes<R (*)(A...)> {
  static TypeNames takes() { return {type_name<A>()...}; }
  static TypeNames returns() { return Returned<R>::names(); }
};

}  // namespace detail

class Registration {
 public:
  Registration(const char* name_space, void (*add_all)(Registration&), const char* file, uint32_t line)
#if defined(__CUDACC__)
      : kernels_(Library::Kind::IMPL, name_space, "CUDA", file, line) {
#else
      : name_space_(name_space),
        schemas_(Library::Kind::FRAGMENT, name_space, nullptr, file, line),
        kernels_(Library::Kind::IMPL, name_space, "CPU", file, line) {
#endif
    try {
      add_all(*this);
    } catch (const std::exception& error) {
      registration_errors() += std::string(file) + ':' + std::to_string(line) + ": " + error.what() + '\n';
    }
  }

  // A function takes and returns what the schema says. What it would find in place of an argument of another type is
  // no value of it.
  template <auto kFunction>
  void add(const Operator& op) {
    using Types = detail::FunctionTypes<decltype(kFunction)>;
    add(op, TORCH_BOX(kFunction));
    op.check_types(Types::takes(), Types::returns());
  }

 private:
  // <op>.kernel is the same kernel without the derivatives that Python registers for <op>. A call that needs none is
  // led there (extension_cpp/ops/_operator.py): entering a Python formula takes longer than a small operator.
  void add(const Operator& op, void (*kernel)(StableIValue*, uint64_t, uint64_t)) {
    if (!op.error.empty()) throw std::runtime_error(op.error);
    const std::string overload = std::string(op.name()) + ".kernel";
#if !defined(__CUDACC__)
    try {
      schemas_.def(op.schema);
      schemas_.def((overload + std::strchr(op.schema, '(')).c_str());
    } catch (const std::exception&) {  // The stable ABI says no more than that; Python finds out why.
      fail(op.name(), "PyTorch refuses the schema ", op.schema);
    }
    registered().push_back({name_space_ + "::" + op.name(), &op});
#endif
    kernels_.impl(op.name(), kernel);
    kernels_.impl(overload.c_str(), kernel);
  }

  using Library = torch::stable::detail::StableLibrary;
#if !defined(__CUDACC__)
  std::string name_space_;
  Library schemas_;
#endif
  Library kernels_;
};

}  // namespace extension_cpp

#define EXTENSION_CPP_STRING(x) #x
#define EXTENSION_CPP_NAME_OF(x) EXTENSION_CPP_STRING(x)
#define EXTENSION_CPP_REGISTER(m)                                                               \
  static void register_operators(extension_cpp::Registration&);                                 \
  static const extension_cpp::Registration registration(                                        \
      EXTENSION_CPP_NAME_OF(EXTENSION_CPP_NAMESPACE), &register_operators, __FILE__, __LINE__); \
  static void register_operators(extension_cpp::Registration& m)
