// nms: greedy non-maximum suppression. Boxes are visited in stable descending order of score; a box is dropped if its
// IoU with one kept before it is greater than the threshold. batched_nms does it for each class on its own; nms_padded
// has a result whose size doesn't depend on the values.
//
// What nms.cpp and nms.cu share: the declarations, the arithmetic of one pair, and which pairs need it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>

#include <torch/csrc/stable/ops.h>

#include "common/dispatch.h"
#include "common/register.h"

namespace extension_cpp::nms {

const Operator kNms(
    "nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor",
    "boxes: N 4 where N <= 1073741824; scores: N of real -> ? of int64");
const Operator kBatchedNms(
    "batched_nms(Tensor boxes, Tensor scores, Tensor idxs, float iou_threshold) -> Tensor",
    "boxes: N 4 where N <= 1073741824; scores: N of real; idxs: N of integer -> ? of int64");
const Operator kNmsPadded(
    "nms_padded(Tensor boxes, Tensor scores, float iou_threshold, Tensor? idxs=None) -> (Tensor keep, Tensor count)",
    "boxes: N 4 where N <= 1073741824; scores: N of real; idxs: N of integer -> N of int64, () of int64");

// The indices of a stable sort in descending order. PyTorch's own: it takes every dtype, and says where NaN goes.
inline Tensor descending(const Tensor& scores) {
  using torch::stable::detail::from;
  std::array<StableIValue, 4> stack{from(scores), from(std::optional<bool>(true)), from(int64_t{0}), from(true)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
  // The values, which nobody needs. First, as what follows allocates and can fail.
  TORCH_ERROR_CODE_CHECK(aoti_torch_delete_tensor_object(torch::stable::detail::to<AtenTensorHandle>(stack[0])));
  return torch::stable::detail::to<Tensor>(stack[1]);
}

// std::numeric_limits has functions, which device code can't call.
template <class V>
struct Limits {
  static constexpr V infinity = std::numeric_limits<V>::infinity(), greatest = std::numeric_limits<V>::max(),
                     epsilon = std::numeric_limits<V>::epsilon(), nan = std::numeric_limits<V>::quiet_NaN();
};

template <class V>
struct alignas(16) Box {
  V x1, y1, x2, y2;
};

// A product that is never fused with a sum, so that every device rounds alike. nms.cpp switches that off for the host.
template <class V>
EXTENSION_CPP_INLINE V product(V x, V y) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(V) == 4) {
    return __fmul_rn(x, y);
  } else {
    return __dmul_rn(x, y);
  }
#else
  return x * y;
#endif
}

template <class V>
EXTENSION_CPP_INLINE V area(const Box<V>& box) {
  return product(box.x2 - box.x1, box.y2 - box.y1);
}

// With a NaN coordinate the area is NaN, and so is the IoU, whatever min and max make of it.
template <class V>
EXTENSION_CPP_INLINE V intersection(const Box<V>& a, const Box<V>& b) {
#if defined(__CUDA_ARCH__)  // One instruction each.
  const V width = fmin(a.x2, b.x2) - fmax(a.x1, b.x1), height = fmin(a.y2, b.y2) - fmax(a.y1, b.y1);
  return product(fmax(width, V(0)), fmax(height, V(0)));
#else
  const V width = (a.x2 < b.x2 ? a.x2 : b.x2) - (a.x1 > b.x1 ? a.x1 : b.x1);
  const V height = (a.y2 < b.y2 ? a.y2 : b.y2) - (a.y1 > b.y1 ? a.y1 : b.y1);
  return product(width > 0 ? width : V(0), height > 0 ? height : V(0));
#endif
}

// The threshold, and how far apart two boxes can lie that suppress one another.
template <class V>
struct Threshold {
  explicit Threshold(double threshold) : iou(static_cast<V>(threshold)), prunes(threshold >= 0) {
    // A V is greater than the threshold where it is greater than the greatest V that isn't.
    if (iou > threshold) iou = std::nextafter(iou, -Limits<V>::infinity);
    if (!prunes) return;
    threshold = std::abs(threshold);  // 1 / -0.0 is not what is meant.
    factor = static_cast<V>(std::max({0.0, 2 - 2 * threshold, 1 / threshold - 1}));
    least_area = static_cast<V>((sizeof(V) == 4 ? 0x1p-100 : 0x1p-960) / threshold);
  }

  // Whether the IoU of boxes with these areas and this intersection is greater than the threshold.
  EXTENSION_CPP_INLINE bool exceeded(V area_a, V area_b, V inter) const {
    return inter / (area_a + area_b - inter) > iou;
  }

  // Whether a box can suppress or be suppressed. With a threshold >= 0 that takes an intersection > 0, which an empty
  // or inverted box has with none, and a union that is finite, which an infinite or NaN box has with none.
  EXTENSION_CPP_INLINE bool takes_part(const Box<V>& box) const {
    return !prunes || (box.x1 < box.x2 && box.y1 < box.y2 && area(box) < Limits<V>::infinity);
  }

  V iou;
  bool prunes;
  V factor = 0, least_area = 0;
};

template <class V>
struct Interval {
  V low, high;
};

// Along one axis: the range of low + high (twice the centre) of the boxes that can suppress a given one, or be
// suppressed by it. Of two boxes of sides p and q that overlap by o, twice the centres differ by at most p + q - 2o. An
// IoU > t takes o > t * max(p, q) along each axis, as the union is no smaller than either box; so q < p / t, and they
// differ by at most max(2 - 2t, 1/t - 1) * p. That needs an IoU with a relative error; a box with an area that may
// underflow only has o > 0, as any box does: less than p + q. The slack is for rounding, and a thousand times what that
// can amount to.
template <class V>
EXTENSION_CPP_INLINE Interval<V> reach(const Threshold<V>& threshold, V low, V high, V area, V greatest_side) {
  constexpr V kSlack = V(1) / 1024, kRounding = 16 * Limits<V>::epsilon;
  constexpr V kLarge = Limits<V>::greatest / 4, kInfinity = Limits<V>::infinity;
  const V side = high - low, sum = low + high;
  const V magnitude = sum < 0 ? -sum : sum;
  if (!(magnitude < kLarge)) return {-kInfinity, kInfinity};
  V distance = side + greatest_side;
  if (area >= threshold.least_area && threshold.factor * side < distance) distance = threshold.factor * side;
  distance += kSlack * (distance + side) + kRounding * magnitude;
  return {sum - distance, sum + distance};
}

// Cells along one axis, by the sum of low and high: segments that are cut evenly into cells. Monotone in the sum, so
// that the cells from that of a range's low end to that of its high end have every box in the range; what lies outside
// is in the outer cells.
template <class V>
struct Axis {
  static constexpr int kMostSegments = 32, kSample = 256;

  // Segments begin where the one before ends.
  EXTENSION_CPP_INLINE void set(int segment, V begin, V end) {
    const V cells_per_unit = static_cast<V>(cells) / (end - begin);
    low[segment] = begin;
    scale[segment] = cells_per_unit > 0 && cells_per_unit <= Limits<V>::greatest ? cells_per_unit : V(1);
  }

  EXTENSION_CPP_INLINE int cell(V sum) const {
    int segment = 0;
    for (int step = segments / 2; step > 0; step /= 2) segment += sum >= low[segment + step] ? step : 0;
    return segment * cells + cell_of(sum, low[segment], scale[segment], cells);
  }

  EXTENSION_CPP_INLINE static int cell_of(V sum, V low, V scale, int cells) {
    const V at = (sum - low) * scale;  // NaN where both are infinite.
    if (!(at > 0)) return 0;
    return at < static_cast<V>(cells - 1) ? static_cast<int>(at) : cells - 1;
  }

  EXTENSION_CPP_INLINE int count() const { return segments * cells; }

  int segments = 1;  // a power of two
  int cells = 1;     // of a segment
  V low[kMostSegments], scale[kMostSegments];
};

}  // namespace extension_cpp::nms
