// The nms operators on CUDA.
//
// Two numbers: on float32 about 150 bytes are moved for a box, and 20 operations done for each pair that is tested: all
// of few boxes, and of many those that the grid leaves: with a threshold of 0.5 those of a similar area closer than
// half a side, some hundred for a box among 100,000 in a field of 20 by 20 sides.
#include "nms.h"

#include <tuple>

#include "common/elementwise.cuh"
#include "common/launch.cuh"
#include "nms/few.cuh"
#include "nms/grid.cuh"
#include "nms/sort.cuh"

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

// The indices of the boxes in the order of visits, by PyTorch's sort.
Tensor sorted_order(Launch& launch, const View& scores) {
  const auto is = [&](auto... dtypes) { return ((scores.dtype == dtypes) || ...); };
  if (!is(dtypes::kFloat16, dtypes::kBFloat16, dtypes::kFloat32, dtypes::kFloat64)) return descending(*scores.tensor);
  const Tensor plain = empty(scores, scores.dtype, scores.numel);
  dispatch(Floating(), scores.op, scores.dtype, [&]<class T>(T) {
    launch(
        plain_nan_kernel<T>, ceil_div(scores.numel, kThreads), kThreads, 0,
        static_cast<const T*>(scores.tensor->const_data_ptr()), scores.strides[0], scores.numel,
        static_cast<T*>(plain.mutable_data_ptr()));
  });
  return descending(plain);
}

// The same by the quickest way. Also writes `zeros` zeros to `zeroed`, and makes the grid of `fit`, if there is to be
// one.
template <class T>
Tensor visiting_order(Launch& launch, const View& scores, uint64_t* zeroed, uint32_t zeros, const Fit<T>& fit) {
  const int64_t n = scores.numel;
  const SortPlan plan(n, launch.processors());
  const bool is_float32 = scores.dtype == dtypes::kFloat32;
  // A float32 has every value of these.
  const std::array shorter{
      dtypes::kFloat16, dtypes::kBFloat16, aoti_torch_dtype_uint8(), aoti_torch_dtype_int8(), aoti_torch_dtype_int16()};
  const bool is_shorter = std::find(shorter.begin(), shorter.end(), scores.dtype) != shorter.end();
  const bool is_ranked = n <= kMostToRank;
  if (!(is_float32 || is_shorter) || !(is_ranked || (n <= kMostToSort && plan.fits()))) {
    launch.zero(zeroed, zeros * sizeof(*zeroed));
    if (fit.out) launch(fit_kernel<T>, 1, kFitThreads, 0, fit);
    return sorted_order(launch, scores);
  }
  const Tensor wide =
      is_float32 ? *scores.tensor : torch::stable::to(*scores.tensor, torch::headeronly::ScalarType::Float);
  const float* data = wide.const_data_ptr<float>();
  const int64_t stride = View(scores.op, "scores", wide).strides[0];
  const Tensor result = empty(scores, aoti_torch_dtype_int64(), n);
  int64_t* const order = result.mutable_data_ptr<int64_t>();
  if (is_ranked) {
    launch(
        rank_kernel, ceil_div(n, kWarp), kRankThreads, 0, data, stride, static_cast<uint32_t>(n), order, zeroed, zeros);
    if (fit.out) launch(fit_kernel<T>, 1, kFitThreads, 0, fit);
    return result;
  }
  const Tensor memory = scratch(scores, SortWork(nullptr, n, plan.blocks).bytes);
  launch.together(
      sort_kernel<T>, plan.blocks, kSortThreads, 0, data, stride, static_cast<uint32_t>(n),
      static_cast<uint32_t>(plan.part), SortWork(memory.mutable_data_ptr(), n, plan.blocks), order, zeroed, zeros, fit);
  return result;
}

template <class T, class V = typename Source<T>::V>
void select_few(
    Launch& launch, const Source<T>& source, const Call<3>& call, Classes classes, const Threshold<V>& threshold,
    const Out& out) {
  const uint32_t n = call.views[0].sizes[0];
  const int64_t tiles = tiles_of(n), zeros = 1 + tiles;  // A ticket, and what is decided of each tile.
  const Tensor memory = empty(call.views[0], aoti_torch_dtype_int64(), zeros);
  auto* const decisions = static_cast<uint64_t*>(memory.mutable_data_ptr());
  const Tensor order =
      visiting_order(launch, call.views[1], decisions, zeros, Fit<T>{source, n, threshold, Grid<V>(), nullptr});
  launch(
      classes.values ? decide_kernel<true, T> : decide_kernel<false, T>, tiles,
      static_cast<int>(std::min<int64_t>(tiles * kWarp, kDecideThreads)), tiles * sizeof(Suppressors), source,
      order.const_data_ptr<int64_t>(), classes, n, threshold, reinterpret_cast<uint32_t*>(decisions), decisions + 1,
      out.indices, out.count);
}

template <class T, class V = typename Source<T>::V>
void select_many(
    Launch& launch, const Source<T>& source, const Call<3>& call, Classes classes, const Threshold<V>& threshold,
    const Out& out) {
  const View& boxes = call.views[0];
  const int64_t n = boxes.sizes[0], blocks = ceil_div(n, kThreads);
  const bool has_grid = threshold.prunes, batched = classes.values != nullptr;
  const Grid<V> grid = has_grid ? grid_for<V>(n, batched, threshold.iou) : Grid<V>();
  const int64_t cells = grid.count();
  const Tensor memory = scratch(boxes, Work<V>(nullptr, n, cells, batched).bytes);
  const Work<V> work(memory.mutable_data_ptr(), n, cells, batched);
  const Tensor order_of = visiting_order(
      launch, call.views[1], reinterpret_cast<uint64_t*>(work.ticket), work.zeroed / sizeof(uint64_t),
      Fit<T>{source, n, threshold, grid, has_grid ? work.grid : nullptr});
  const int64_t* order = order_of.const_data_ptr<int64_t>();
  if (has_grid) {
    const int64_t part = scan_part(cells);
    launch(prepare_kernel<true, T>, blocks, kThreads, 0, source, order, classes, n, threshold, work);
    launch(scan_kernel, ceil_div(cells, part), kScanThreads, 0, work.counts, work.starts, cells, part);
    launch(scatter_kernel<V>, blocks, kThreads, 0, n, batched, threshold, work);
  } else {
    launch(prepare_kernel<false, T>, blocks, kThreads, 0, source, order, classes, n, threshold, work);
  }
  launch(
      batched ? resolve_kernel<true, V> : resolve_kernel<false, V>, ceil_div(n, kResolveThreads / kWarp),
      kResolveThreads, 0, static_cast<uint32_t>(n), grid, threshold, work);
  const int64_t part = scan_part(n);
  launch(compact_kernel, ceil_div(n, part), kScanThreads, 0, work.status, order, n, part, out.indices, out.count);
}

void select(Launch& launch, const Call<3>& call, const Tensor* idxs, double iou_threshold, const Out& out) {
  const View& boxes = call.views[0];
  Classes classes;
  std::optional<Tensor> wide;
  if (idxs) {
    wide = torch::stable::to(*idxs, torch::headeronly::ScalarType::Long);
    classes = {wide->const_data_ptr<int64_t>(), View(boxes.op, "idxs", *wide).strides[0]};
  }
  dispatch(Floating(), boxes.op, boxes.dtype, [&]<class T>(T) {
    const Source<T> source{static_cast<const T*>(boxes.tensor->const_data_ptr()), boxes.strides[0], boxes.strides[1]};
    const Threshold<typename Source<T>::V> threshold(iou_threshold);
    const auto select = boxes.sizes[0] <= kFewBoxes ? select_few<T> : select_many<T>;
    select(launch, source, call, classes, threshold, out);
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
