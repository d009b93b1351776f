// The nms operators on CUDA.
//
// Two numbers: on float32 about 150 bytes are moved for a box, and 20 operations done for each pair that is tested: all
// of few boxes, and of many those that the grid leaves: with a threshold of 0.5 those closer than half a side, some
// hundred for a box among 100,000 in a field of 20 by 20 sides.
#include "nms.h"

#include <tuple>

#include "common/elementwise.cuh"
#include "common/launch.cuh"
#include "nms/few.cuh"
#include "nms/grid.cuh"

namespace extension_cpp::nms {
namespace {

struct Selection {
  Tensor indices, count;
};

// The boxes' indices in the order of visits.
Tensor visiting_order(Launch& launch, const View& scores) {
  const int64_t n = scores.numel;
  // A float32 has every value of these.
  const auto is = [&](auto... dtypes) { return ((scores.dtype == dtypes) || ...); };
  const bool is_float32 = scores.dtype == dtypes::kFloat32;
  const bool fits = is_float32 || is(dtypes::kFloat16, dtypes::kBFloat16, aoti_torch_dtype_uint8(),
                                     aoti_torch_dtype_int8(), aoti_torch_dtype_int16());
  if (n > kMostToRank || !fits) return descending(*scores.tensor);
  const Tensor wide =
      is_float32 ? *scores.tensor : torch::stable::to(*scores.tensor, torch::headeronly::ScalarType::Float);
  const float* data = wide.const_data_ptr<float>();
  const int64_t stride = View(scores.op, "scores", wide).strides[0];
  const Tensor order = empty(scores, aoti_torch_dtype_int64(), n);
  constexpr int64_t kMostBlocks = 256;  // Beyond, that each box is read by every block costs more than it brings.
  auto run = [&](auto* kernel, int64_t each) {
    launch(kernel, ceil_div(n, kWarp * each), kRankThreads, 0, data, stride, static_cast<uint32_t>(n),
           order.mutable_data_ptr<int64_t>());
  };
  n <= kMostBlocks * kWarp ? run(rank_kernel<1>, 1) : run(rank_kernel<4>, 4);
  return order;
}

template <class T>
void select_few(
    Launch& launch, const Source<T>& source, const View& boxes, const int64_t* order, Classes classes,
    const Threshold<typename Source<T>::V>& threshold, const Selection& out) {
  const uint32_t n = boxes.sizes[0];
  const int64_t tiles = tiles_of(n), pairs = tiles * (tiles + 1) / 2;
  const Tensor memory = empty(boxes, aoti_torch_dtype_int32(), tiles * tiles * kWarp);
  auto* mask = static_cast<uint32_t*>(memory.mutable_data_ptr());
  launch(
      classes.values ? mask_kernel<true, T> : mask_kernel<false, T>, ceil_div(pairs, kMaskThreads / kWarp), kMaskThreads,
      0, source, order, classes, n, threshold, mask);
  launch(
      decide_kernel, 1, std::min<int64_t>(tiles * kWarp, kDecideThreads), 0, mask, order, n,
      out.indices.mutable_data_ptr<int64_t>(), out.count.mutable_data_ptr<int64_t>());
}

template <class T, class V = typename Source<T>::V>
void select_many(
    Launch& launch, const Source<T>& source, const View& boxes, const int64_t* order, Classes classes,
    const Threshold<V>& threshold, const Selection& out) {
  const int64_t n = boxes.sizes[0], blocks = ceil_div(n, kThreads);
  const bool has_grid = threshold.prunes, batched = classes.values != nullptr;
  const Grid<V> grid = grid_for<V>(n, batched);
  const int64_t cells = has_grid ? grid.count() : 0;
  const Tensor memory = empty(boxes, aoti_torch_dtype_uint8(), Work<V>(nullptr, n, cells, batched).bytes);
  const Work<V> work(memory.mutable_data_ptr(), n, cells, batched);
  launch.zero(work.ticket, work.zeroed);
  if (has_grid) {
    const int64_t part = scan_part(cells);
    launch(fit_kernel<T>, 1, kFitThreads, 0, source, n, threshold, grid, work.grid);
    launch(prepare_kernel<true, T>, blocks, kThreads, 0, source, order, classes, n, threshold, work);
    launch(scan_kernel, ceil_div(cells, part), kScanThreads, 0, work.counts, work.starts, cells, part);
    launch(scatter_kernel<V>, blocks, kThreads, 0, n, batched, work);
  } else {
    launch(prepare_kernel<false, T>, blocks, kThreads, 0, source, order, classes, n, threshold, work);
  }
  launch(
      batched ? resolve_kernel<true, V> : resolve_kernel<false, V>, ceil_div(n, kResolveThreads / kWarp),
      kResolveThreads, 0, static_cast<uint32_t>(n), has_grid, threshold, work);
  const int64_t part = scan_part(n);
  launch(
      compact_kernel, ceil_div(n, part), kScanThreads, 0, work.status, order, n, part,
      out.indices.mutable_data_ptr<int64_t>(), out.count.mutable_data_ptr<int64_t>());
}

Selection select(
    const Operator& op, const Tensor& boxes, const Tensor& scores, const Tensor* idxs, double iou_threshold,
    bool waits) {
  const Call<3> call(op, {&boxes, &scores, idxs});
  const View& view = call.views[0];
  Launch launch(op.name(), view);
  if (waits && launch.is_capturing()) {
    fail(op.name(), "the size of its result is not known inside a CUDA graph; nms_padded has one that is");
  }
  const int64_t n = view.sizes[0];
  constexpr auto kLong = torch::headeronly::ScalarType::Long;
  Selection out{empty(view, aoti_torch_dtype_int64(), n), empty_scalar(view, aoti_torch_dtype_int64())};
  if (n == 0) {
    launch.zero(out.count.mutable_data_ptr(), sizeof(int64_t));
    return out;
  }
  const Tensor order_of = visiting_order(launch, call.views[1]);
  const int64_t* order = order_of.const_data_ptr<int64_t>();
  Classes classes;
  std::optional<Tensor> wide;
  if (idxs) {
    wide = torch::stable::to(*idxs, kLong);
    classes = {wide->const_data_ptr<int64_t>(), View(op.name(), "idxs", *wide).strides[0]};
  }
  dispatch(Floating(), op.name(), view.dtype, [&]<class T>(T) {
    const Source<T> source{static_cast<const T*>(view.tensor->const_data_ptr()), view.strides[0], view.strides[1]};
    const Threshold<typename Source<T>::V> threshold(iou_threshold);
    (n <= kFewBoxes ? select_few<T> : select_many<T>)(launch, source, view, order, classes, threshold, out);
  });
  if (!waits) return out;
  const int64_t count = launch.read(out.count.const_data_ptr<int64_t>());
  out.indices = torch::stable::narrow(out.indices, 0, 0, count);
  constexpr int64_t kWorthACopy = 1 << 16;
  if (n > kWorthACopy && 2 * count < n) out.indices = torch::stable::clone(out.indices);  // Don't hold on to memory for the rest.
  return out;
}

Tensor nms(const Tensor& boxes, const Tensor& scores, double iou_threshold) {
  return select(kNms, boxes, scores, nullptr, iou_threshold, true).indices;
}

Tensor batched_nms(const Tensor& boxes, const Tensor& scores, const Tensor& idxs, double iou_threshold) {
  return select(kBatchedNms, boxes, scores, &idxs, iou_threshold, true).indices;
}

std::tuple<Tensor, Tensor> nms_padded(
    const Tensor& boxes, const Tensor& scores, double iou_threshold, const std::optional<Tensor>& idxs) {
  const Selection out = select(kNmsPadded, boxes, scores, idxs ? &*idxs : nullptr, iou_threshold, false);
  return {out.indices, out.count};
}

}  // namespace

EXTENSION_CPP_REGISTER(m) {
  m.add(kNms, TORCH_BOX(&nms));
  m.add(kBatchedNms, TORCH_BOX(&batched_nms));
  m.add(kNmsPadded, TORCH_BOX(&nms_padded));
}

}  // namespace extension_cpp::nms
