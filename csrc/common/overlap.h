// Which elements of strided tensors share memory. Exact, where PyTorch's own check gives up on tensors that are not
// dense, so that an operator with an `out` argument never reads what it has just written.
//
// Two elements meet where sum(stride * index) of both tensors agree: a linear equation in bounded integers. Terms with
// the same stride are one term with the sum of their bounds; the rest is searched from the largest stride down, pruned
// by what the smaller strides can still reach.
#pragma once

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "check.h"

namespace extension_cpp {
namespace detail {

struct Term {
  int64_t stride, low, high;
};

inline std::vector<Term> merged(std::vector<Term> terms) {
  std::sort(terms.begin(), terms.end(), [](const Term& x, const Term& y) { return x.stride > y.stride; });
  std::vector<Term> result;
  for (const Term& t : terms) {
    if (!result.empty() && result.back().stride == t.stride) {
      result.back().low += t.low;
      result.back().high += t.high;
    } else {
      result.push_back(t);
    }
  }
  return result;
}

inline int64_t floor_div(int64_t x, int64_t positive) {
  return x / positive - (x % positive < 0);
}

// Whether sum(stride * x) over terms[i...] can be `target`. A search that takes too long counts as yes: refusing an
// absurd view is better than a wrong result.
inline bool reaches(const std::vector<Term>& terms, size_t i, int64_t target, int& budget) {
  if (i == terms.size()) return target == 0;
  if (--budget < 0) return true;
  int64_t low = 0, high = 0, common = terms[i].stride;
  for (size_t k = i + 1; k < terms.size(); ++k) {
    low += terms[k].stride * terms[k].low;
    high += terms[k].stride * terms[k].high;
    common = std::gcd(common, terms[k].stride);
  }
  if (target % common != 0) return false;
  const auto& [stride, least, most] = terms[i];
  const int64_t begin = std::max(least, -floor_div(high - target, stride));
  const int64_t end = std::min(most, floor_div(target - low, stride));
  for (int64_t x = begin; x <= end; ++x) {
    if (reaches(terms, i + 1, target - stride * x, budget)) return true;
  }
  return false;
}

inline bool reaches(std::vector<Term> terms, int64_t target) {
  int budget = 100'000;
  return reaches(merged(std::move(terms)), 0, target, budget);
}

// The dimensions that matter: those with more than one index.
inline std::vector<Term> index_terms(const View& t) {
  std::vector<Term> terms;
  for (int64_t i = 0; i < t.ndim; ++i) {
    if (t.sizes[i] > 1) terms.push_back({t.strides[i], 0, t.sizes[i] - 1});
  }
  return terms;
}

}  // namespace detail

// Whether two indices of t name the same element.
inline bool has_internal_overlap(const View& t) {
  if (t.numel < 2 || t.contiguous) return false;
  auto terms = detail::index_terms(t);
  std::sort(terms.begin(), terms.end(), [](const auto& x, const auto& y) { return x.stride > y.stride; });
  if (terms.back().stride == 0) return true;
  // Two indices differ first in some dimension k, by 1 or more, and in the faster ones by anything.
  for (size_t k = 0; k < terms.size(); ++k) {
    std::vector<detail::Term> difference{{terms[k].stride, 1, terms[k].high}};
    for (size_t j = k + 1; j < terms.size(); ++j) {
      difference.push_back({terms[j].stride, -terms[j].high, terms[j].high});
    }
    if (detail::reaches(difference, 0)) return true;
  }
  return false;
}

// Whether x and y share an element without being the very same view. Same dtype, both on one device.
inline bool partially_overlap(const View& x, const View& y) {
  if (x.numel == 0 || y.numel == 0) return false;
  auto terms = detail::index_terms(x);
  const auto others = detail::index_terms(y);
  const int64_t size = aoti_torch_dtype_element_size(x.dtype);
  auto address = [](const View& t) { return static_cast<const char*>(t.tensor->const_data_ptr()); };
  const int64_t bytes = address(y) - address(x);
  auto extent = [](const auto& all) {
    int64_t last = 0;
    for (const auto& t : all) last += t.stride * t.high;
    return last;
  };
  if (bytes >= (extent(terms) + 1) * size || -bytes >= (extent(others) + 1) * size) return false;
  if (bytes % size != 0) return true;
  auto equal = [](const detail::Term& p, const detail::Term& q) { return p.stride == q.stride && p.high == q.high; };
  if (bytes == 0 && std::equal(terms.begin(), terms.end(), others.begin(), others.end(), equal)) return false;
  for (const auto& t : others) terms.push_back({t.stride, -t.high, 0});
  std::erase_if(terms, [](const auto& t) { return t.stride == 0; });  // Broadcast: it moves no address.
  return detail::reaches(std::move(terms), bytes / size);
}

}  // namespace extension_cpp
