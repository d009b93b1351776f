// Where the kernels of nms read boxes and classes, and the test of a pair.
#pragma once

#include "../nms.h"

namespace extension_cpp::nms {
namespace {

template <class T>
struct Source {
  using V = typename Compute<T>::type;

  __device__ Box<V> box(int64_t index) const {
    const T* at = boxes + index * down;
    return {
        static_cast<V>(at[0]), static_cast<V>(at[along]), static_cast<V>(at[2 * along]), static_cast<V>(at[3 * along])};
  }

  const T* boxes;
  int64_t down, along;
};

struct Classes {
  __device__ int64_t operator[](int64_t index) const { return values[index * stride]; }

  const int64_t* values = nullptr;
  int64_t stride = 0;
};

// As Threshold::exceeded, with the division only where the IoU is not clearly below the threshold.
template <class V>
class Test {
 public:
  __device__ Test(const Threshold<V>& threshold, const Box<V>& box)
      : threshold_(threshold),
        clearly_below_(threshold.prunes ? threshold.iou * V(0.999) : V(0)),
        box_(box),
        area_(area(box)) {}

  __device__ __forceinline__ bool operator()(const Box<V>& other) const {
    const V inter = intersection(box_, other), area_other = area(other);
    if (inter < clearly_below_ * (area_ + area_other - inter)) return false;
    return threshold_.exceeded(area_, area_other, inter);
  }

 private:
  const Threshold<V>& threshold_;
  const V clearly_below_;
  const Box<V> box_;
  const V area_;
};

}  // namespace
}  // namespace extension_cpp::nms
