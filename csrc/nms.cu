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

struct Out {
  int64_t *indices, *count;
};

// NaN without a sign: PyTorch's sort on CUDA takes one with a sign for the least score.
template <class T>
__global__ void __launch_bounds__(kThreads) plain_nan_kernel(const T* from, int64_t stride, int64_t n, T* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const auto score = static_cast<typename Compute<T>::type>(from[i * stride]);
  to[i] = static_cast<T>(score == score ? score : Limits<float>::nan);
}

// The boxes' indices in the order of visits, by a sort: of very many.
Tensor sorted_order(Launch& launch, const View& scores) {
  const Tensor plain = empty(scores, scores.dtype, scores.numel);
  dispatch(Floating(), scores.op, scores.dtype, [&]<class T>(T) {
    launch(
        plain_nan_kernel<T>, ceil_div(scores.numel, kThreads), kThreads, 0,
        static_cast<const T*>(scores.tensor->const_data_ptr()), scores.strides[0], scores.numel,
        static_cast<T*>(plain.mutable_data_ptr()));
  });
  return descending(plain);
}

// The same of any number. Also writes `zeros` zeros to `zeroed`: few boxes are ranked by a kernel that can do so.
Tensor visiting_order(Launch& launch, const View& scores, uint64_t* zeroed, uint32_t zeros) {
  const int64_t n = scores.numel;
  // A float32 has every value of these.
  const auto is = [&](auto... dtypes) { return ((scores.dtype == dtypes) || ...); };
  const bool is_float32 = scores.dtype == dtypes::kFloat32, is_half = is(dtypes::kFloat16, dtypes::kBFloat16);
  const bool is_short = is(aoti_torch_dtype_uint8(), aoti_torch_dtype_int8(), aoti_torch_dtype_int16());
  if (n > kMostToRank || !(is_float32 || is_half || is_short)) {
    const bool is_floating = is_float32 || is_half || scores.dtype == dtypes::kFloat64;
    if (zeros > 0) launch.zero(zeroed, zeros * sizeof(*zeroed));
    return is_floating ? sorted_order(launch, scores) : descending(*scores.tensor);
  }
  const Tensor wide =
      is_float32 ? *scores.tensor : torch::stable::to(*scores.tensor, torch::headeronly::ScalarType::Float);
  const float* data = wide.const_data_ptr<float>();
  const int64_t stride = View(scores.op, "scores", wide).strides[0];
  const Tensor order = empty(scores, aoti_torch_dtype_int64(), n);
  constexpr int64_t kMostBlocks = 256;  // Beyond, that each box is read by every block costs more than it brings.
  auto run = [&](auto* kernel, int64_t each) {
    launch(
        kernel, ceil_div(n, kWarp * each), kRankThreads, 0, data, stride, static_cast<uint32_t>(n),
        order.mutable_data_ptr<int64_t>(), zeroed, zeros);
  };
  if (ceil_div(n, kWarp) <= kMostBlocks) {
    run(rank_kernel<1>, 1);
  } else {
    run(rank_kernel<4>, 4);
  }
  return order;
}

template <class T>
void select_few(
    Launch& launch, const Source<T>& source, const View& boxes, const int64_t* order, Classes classes,
    const Threshold<typename Source<T>::V>& threshold, uint64_t* decisions, const Out& out) {
  const uint32_t n = boxes.sizes[0];
  const int64_t tiles = tiles_of(n);
  launch(
      classes.values ? decide_kernel<true, T> : decide_kernel<false, T>, tiles,
      static_cast<int>(std::min<int64_t>(tiles * kWarp, kDecideThreads)), tiles * sizeof(Suppressors), source, order,
      classes, n, threshold, reinterpret_cast<uint32_t*>(decisions), decisions + 1, out.indices, out.count);
}

template <class T, class V = typename Source<T>::V>
void select_many(
    Launch& launch, const Source<T>& source, const View& boxes, const int64_t* order, Classes classes,
    const Threshold<V>& threshold, const Out& out) {
  const int64_t n = boxes.sizes[0], blocks = ceil_div(n, kThreads);
  const bool has_grid = threshold.prunes, batched = classes.values != nullptr;
  const Grid<V> grid = grid_for<V>(n, batched);
  const int64_t cells = has_grid ? grid.count() : 0;
  const Tensor memory = scratch(boxes, Work<V>(nullptr, n, cells, batched).bytes);
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
  launch(compact_kernel, ceil_div(n, part), kScanThreads, 0, work.status, order, n, part, out.indices, out.count);
}

void select(Launch& launch, const Call<3>& call, const Tensor* idxs, double iou_threshold, const Out& out) {
  const View& boxes = call.views[0];
  const bool is_few = boxes.sizes[0] <= kFewBoxes;
  // For decide_kernel, which starts from zeros: a ticket, and what is decided of each tile.
  const int64_t zeros = is_few ? 1 + tiles_of(boxes.sizes[0]) : 0;
  const Tensor memory = empty(boxes, aoti_torch_dtype_int64(), zeros);
  auto* const decisions = static_cast<uint64_t*>(memory.mutable_data_ptr());
  const Tensor order_of = visiting_order(launch, call.views[1], decisions, zeros);
  const int64_t* order = order_of.const_data_ptr<int64_t>();
  Classes classes;
  std::optional<Tensor> wide;
  if (idxs) {
    wide = torch::stable::to(*idxs, torch::headeronly::ScalarType::Long);
    classes = {wide->const_data_ptr<int64_t>(), View(boxes.op, "idxs", *wide).strides[0]};
  }
  dispatch(Floating(), boxes.op, boxes.dtype, [&]<class T>(T) {
    const Source<T> source{static_cast<const T*>(boxes.tensor->const_data_ptr()), boxes.strides[0], boxes.strides[1]};
    const Threshold<typename Source<T>::V> threshold(iou_threshold);
    if (is_few) {
      select_few<T>(launch, source, boxes, order, classes, threshold, decisions, out);
    } else {
      select_many<T>(launch, source, boxes, order, classes, threshold, out);
    }
  });
}

// The first of `all`, without the memory of the rest where that is worth a copy.
Tensor first_of(const Tensor& all, int64_t count) {
  constexpr int64_t kWorthACopy = 1 << 16;
  const int64_t stride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(all.get(), 1, &count, &stride, 0, &handle));
  const Tensor first(handle);
  return all.numel() > kWorthACopy && 2 * count < all.numel() ? torch::stable::clone(first) : first;
}

Tensor keep(const Operator& op, const Tensor& boxes, const Tensor& scores, const Tensor* idxs, double iou_threshold) {
  const Call<3> call(op, {&boxes, &scores, idxs});
  Launch launch(op.name(), call.views[0]);
  if (launch.is_capturing()) {
    fail(op.name(), "the size of its result is not known inside a CUDA graph; nms_padded has one that is");
  }
  const Tensor indices = empty(call.views[0], aoti_torch_dtype_int64(), call["N"]);
  if (call["N"] == 0) return indices;
  HostNumber count(launch);
  select(launch, call, idxs, iou_threshold, {indices.mutable_data_ptr<int64_t>(), count.pointer()});
  return first_of(indices, count.wait());
}

Tensor nms(const Tensor& boxes, const Tensor& scores, double iou_threshold) {
  return keep(kNms, boxes, scores, nullptr, iou_threshold);
}

Tensor batched_nms(const Tensor& boxes, const Tensor& scores, const Tensor& idxs, double iou_threshold) {
  return keep(kBatchedNms, boxes, scores, &idxs, iou_threshold);
}

std::tuple<Tensor, Tensor> nms_padded(
    const Tensor& boxes, const Tensor& scores, double iou_threshold, const std::optional<Tensor>& idxs) {
  const Call<3> call(kNmsPadded, {&boxes, &scores, idxs ? &*idxs : nullptr});
  const View& view = call.views[0];
  Launch launch(kNmsPadded.name(), view);
  const Tensor indices = empty(view, aoti_torch_dtype_int64(), call["N"]);
  const Tensor count = empty_scalar(view, aoti_torch_dtype_int64());
  const Out out{indices.mutable_data_ptr<int64_t>(), count.mutable_data_ptr<int64_t>()};
  if (call["N"] == 0) {
    launch.zero(out.count, sizeof(int64_t));
  } else {
    select(launch, call, idxs ? &*idxs : nullptr, iou_threshold, out);
  }
  return {indices, count};
}

}  // namespace

EXTENSION_CPP_REGISTER(m) {
  m.add<&nms>(kNms);
  m.add<&batched_nms>(kBatchedNms);
  m.add<&nms_padded>(kNmsPadded);
}

}  // namespace extension_cpp::nms
