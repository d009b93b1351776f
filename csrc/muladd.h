// mymuladd: a * b + c;  mymul: a * b;  myadd_out: writes a + b into out;  a and b broadcast.
// mymul_backward: the gradients of a and b, of one shape, from one pass over grad, a and b.
//
// Two numbers: mymuladd, mymul and myadd_out on float32 move 12 bytes an element for 1 or 2 operations, mymul_backward
// 20 for 2. Every machine is bound by memory there.
//
// The formulas, the checks and the host functions; muladd.cpp and muladd.cu compile them for their device.
#pragma once

#include <cmath>
#include <tuple>

#include "elementwise.h"
#include "overlap.h"

namespace extension_cpp {

// a * b + c, rounded once (a fused multiply-add) on every device.
struct MulAdd {
  double c;
  EXTENSION_CPP_INLINE void operator()(const float (&in)[2], float (&out)[1]) const {
    out[0] = fmaf(in[0], in[1], static_cast<float>(c));
  }
  EXTENSION_CPP_INLINE void operator()(const double (&in)[2], double (&out)[1]) const { out[0] = fma(in[0], in[1], c); }
};

struct Mul {
  template <class V>
  EXTENSION_CPP_INLINE void operator()(const V (&in)[2], V (&out)[1]) const {
    out[0] = in[0] * in[1];
  }
};

struct Add {
  template <class V>
  EXTENSION_CPP_INLINE void operator()(const V (&in)[2], V (&out)[1]) const {
    out[0] = in[0] + in[1];
  }
};

// in: grad, a, b; out: grad_a, grad_b.
struct MulBackward {
  template <class V>
  EXTENSION_CPP_INLINE void operator()(const V (&in)[3], V (&out)[2]) const {
    out[0] = in[0] * in[2];
    out[1] = in[0] * in[1];
  }
};

inline void check_inputs(const char* op, const View& a, const View& b) {
  check_floating(op, a);
  check_same(op, b, a);
}

inline void check_out(const char* op, const View& a, const View& b, const View& out) {
  check_same(op, out, a);
  const Shape shape = broadcast_shapes<2>(op, {a, b});
  if (!std::equal(out.sizes.begin(), out.sizes.end(), shape.dims, shape.dims + shape.ndim)) {
    fail(op, "out must have the shape that a and b broadcast to, ", tuple(shape), ", got ", tuple(out.sizes));
  }
  if (has_internal_overlap(out)) {
    fail(op, "out must not overlap itself, got shape ", tuple(out.sizes), " with strides ", tuple(out.strides));
  }
  for (const View& in : {a, b}) {
    if (partially_overlap(in, out))
      fail(op, "out must be ", in.name, " itself or not overlap it, got a partial overlap");
  }
}

inline void check_backward(const char* op, const View& grad, const View& a, const View& b) {
  check_floating(op, grad);
  for (const View& in : {a, b}) {
    check_same(op, in, grad);
    if (!in.same_sizes(grad)) {
      fail(op, in.name, " must have the shape of grad, ", tuple(grad.sizes), ", got ", tuple(in.sizes));
    }
  }
}

// The operators, for Device = Cpu (elementwise_cpu.h) or Cuda (elementwise.cuh).

template <class Device, class Op>
Tensor binary(const char* name, const Tensor& a, const Tensor& b, const Op& op) {
  const View view_a(name, "a", a), view_b(name, "b", b);
  check_inputs(name, view_a, view_b);
  Loop<3> loop;
  const auto [out] = allocate_outputs<1, 2>(name, {view_a, view_b}, loop);
  Device::template run<1, 2>(name, view_a, loop, {&out, &a, &b}, op);
  return out;
}

template <class Device>
Tensor mymuladd(const Tensor& a, const Tensor& b, double c) {
  return binary<Device>("mymuladd", a, b, MulAdd{c});
}

template <class Device>
Tensor mymul(const Tensor& a, const Tensor& b) {
  return binary<Device>("mymul", a, b, Mul{});
}

template <class Device>
void myadd_out(const Tensor& a, const Tensor& b, const Tensor& out) {
  constexpr const char* name = "myadd_out";
  const View view_a(name, "a", a), view_b(name, "b", b), view_out(name, "out", out);
  check_inputs(name, view_a, view_b);
  check_out(name, view_a, view_b, view_out);
  Loop<3> loop;
  loop_over<3>({view_out, view_a, view_b}, loop);
  Device::template run<1, 2>(name, view_a, loop, {&out, &a, &b}, Add{});
}

template <class Device>
std::tuple<Tensor, Tensor> mymul_backward(const Tensor& grad, const Tensor& a, const Tensor& b) {
  constexpr const char* name = "mymul_backward";
  const View view_grad(name, "grad", grad), view_a(name, "a", a), view_b(name, "b", b);
  check_backward(name, view_grad, view_a, view_b);
  Loop<5> loop;
  const auto [grad_a, grad_b] = allocate_outputs<2, 3>(name, {view_grad, view_a, view_b}, loop);
  Device::template run<2, 3>(name, view_grad, loop, {&grad_a, &grad_b, &grad, &a, &b}, MulBackward{});
  return {grad_a, grad_b};
}

}  // namespace extension_cpp
