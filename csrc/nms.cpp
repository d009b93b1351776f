// The schemas of the nms operators, and their CPU kernels.
//
// Two numbers: on float32 the boxes are read once, 16 bytes each, and a pair takes 14 operations; but a pair is only
// looked at where a grid says that it may matter, so that most of the time goes into sorting the scores and the boxes.
//
// Boxes lie in the order of the grid's cells, row by row, so that what is near a box is a few runs of consecutive
// slots. Going down the scores, a box that nothing has marked is kept and marks what it suppresses, whole vectors at a
// time. Marking more than the near ones changes nothing: each mark is the exact test, and a box of a higher score is
// decided.
#ifdef __clang__  // A fused multiply-add rounds the union differently.
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "nms.h"

#include <bit>
#include <numeric>
#include <tuple>
#include <vector>

#include "common/cpu_dtypes.h"
#include "common/elementwise.h"
#include "common/simd.h"

namespace extension_cpp::nms {
namespace {

using Ranks = std::vector<uint32_t>;

constexpr int64_t kVector = 16;  // Slots that are marked together.

template <class V>
struct Slots {
  using Mark = std::conditional_t<sizeof(V) == 4, int32_t, int64_t>;

  explicit Slots(int64_t n) : x1(n + kVector), y1(x1), x2(x1), y2(x1), areas(x1), marks(n + kVector) {}

  void set(int64_t slot, const Box<V>& box) {
    x1[slot] = box.x1, y1[slot] = box.y1, x2[slot] = box.x2, y2[slot] = box.y2;
    areas[slot] = area(box);
  }

  void mark(const Box<V>& box, const Threshold<V>& threshold, int64_t begin, int64_t end) {
    const V area_of_box = area(box);
    for (; begin < end; begin += kVector) {
#pragma GCC ivdep
      for (int64_t i = begin; i < begin + kVector; ++i) {
        const V inter = intersection(box, Box<V>{x1[i], y1[i], x2[i], y2[i]});
        marks[i] |= threshold.exceeded(area_of_box, areas[i], inter) ? 1 : 0;
      }
    }
  }

  std::vector<V> x1, y1, x2, y2, areas;
  std::vector<Mark> marks;
};

template <class V>
struct Grid {
  // Few long rows: a row near a box is one run of slots, whatever its cells.
  Grid(const std::vector<Box<V>>& boxes, const Ranks& members) {
    constexpr int64_t kBoxesInCell = 2, kColumnsPerRow = 4, kMostCells = 1 << 22;
    constexpr int64_t kBoxesOfSample =
        16;  // One box in so many is enough: more would take longer to sort than they save.
    const int64_t n = members.size(), cells = std::min(n / kBoxesInCell, kMostCells);
    y.cells = std::max(1, static_cast<int>(std::sqrt(static_cast<double>(cells / kColumnsPerRow))));
    x.cells = std::max(1, static_cast<int>(cells / y.cells));
    const int64_t sampled = std::min<int64_t>(Axis<V>::kSample, n / kBoxesOfSample + 1);
    std::vector<V> sums[2];
    for (int64_t i = 0, next = 0; i < n; ++i) {
      const Box<V>& box = boxes[members[i]];
      greatest_side[0] = std::max(greatest_side[0], box.x2 - box.x1);
      greatest_side[1] = std::max(greatest_side[1], box.y2 - box.y1);
      if (i < next) continue;
      sums[0].push_back(box.x1 + box.x2), sums[1].push_back(box.y1 + box.y2);
      next = static_cast<int64_t>(sums[0].size()) * n / sampled;
    }
    fit(x, sums[0]);
    fit(y, sums[1]);
  }

  // Where most of the sample is, so that a few boxes far off the others don't leave one cell with nearly all. Segments
  // that follow the boxes, as on CUDA, take longer to look up than they save here.
  static void fit(Axis<V>& axis, std::vector<V>& sample) {
    constexpr V kOutside = V(0.1);
    std::sort(sample.begin(), sample.end());
    if (sample.empty()) return axis.set(0, 0, 0);
    const size_t last = sample.size() - 1, twentieth = (last + 19) / 20;
    const V low = sample[twentieth], high = sample[last - twentieth], beyond = kOutside * (high - low);
    axis.set(0, std::max(sample[0], low - beyond), std::min(sample[last], high + beyond));
  }

  int64_t cell(const Box<V>& box) const {
    return static_cast<int64_t>(y.cell(box.y1 + box.y2)) * x.count() + x.cell(box.x1 + box.x2);
  }

  Axis<V> x, y;
  V greatest_side[2] = {};
};

// Keeps the first of the members and erases what it suppresses, as long as that is most of them, as among boxes that
// are all alike: for what is left, a grid takes less time. Whether it is most is seen in a sample.
template <class V>
void keep_first(const std::vector<Box<V>>& boxes, Ranks& members, const Threshold<V>& threshold, uint8_t* keep) {
  constexpr size_t kSample = 64;
  for (size_t n = members.size(), erased = n; n > 2 * kSample && erased > n / 4; n -= erased) {
    const uint32_t first = members[0];
    const V area_of_first = area(boxes[first]);
    auto is_suppressed = [&](uint32_t i) {
      return threshold.exceeded(area_of_first, area(boxes[i]), intersection(boxes[first], boxes[i]));
    };
    size_t suppressed = 0;
    for (size_t k = 0; k < kSample; ++k) suppressed += is_suppressed(members[1 + k * (n - 1) / kSample]);
    if (suppressed <= kSample / 2) return;
    keep[first] = 1;
    erased = std::erase_if(members, [&](uint32_t i) { return i == first || is_suppressed(i); });
  }
}

// Which of the boxes `members`, in descending order of score, are kept.
template <class V>
void select(const std::vector<Box<V>>& boxes, Ranks members, const Threshold<V>& threshold, uint8_t* keep) {
  std::erase_if(members, [&](uint32_t i) { return !threshold.takes_part(boxes[i]) && (keep[i] = 1); });
  if (threshold.prunes) keep_first(boxes, members, threshold, keep);
  const int64_t n = members.size();
  Slots<V> slots(n);
  if (!threshold.prunes) {
    simd::run([&] {
      for (int64_t k = 0; k < n; ++k) slots.set(k, boxes[members[k]]);
      for (int64_t k = 0; k < n; ++k) {
        if (slots.marks[k]) continue;
        keep[members[k]] = 1;
        slots.mark(boxes[members[k]], threshold, k + 1, n);
      }
    });
    return;
  }
  const Grid<V> grid(boxes, members);
  std::vector<int32_t> slot_of(n), starts(static_cast<int64_t>(grid.x.count()) * grid.y.count() + 1);
  for (int64_t k = 0; k < n; ++k) ++starts[slot_of[k] = static_cast<int32_t>(grid.cell(boxes[members[k]]))];
  for (int32_t next = 0; int32_t& start : starts) next += std::exchange(start, next);
  for (int64_t k = 0; k < n; ++k) {
    slot_of[k] = starts[slot_of[k]]++;
    slots.set(slot_of[k], boxes[members[k]]);
  }
  // Each start has moved to where the next cell begins.
  auto begin_of = [&](int64_t cell) { return cell == 0 ? 0 : starts[cell - 1]; };
  simd::run([&] {
    for (int64_t k = 0; k < n; ++k) {
      if (slots.marks[slot_of[k]]) continue;
      const Box<V>& box = boxes[members[k]];
      keep[members[k]] = 1;
      const V area_of_box = area(box);
      const auto [left, right] = reach(threshold, box.x1, box.x2, area_of_box, grid.greatest_side[0]);
      const auto [top, bottom] = reach(threshold, box.y1, box.y2, area_of_box, grid.greatest_side[1]);
      const int first = grid.x.cell(left), last = grid.x.cell(right), end = grid.y.cell(bottom) + 1;
      for (int64_t row = grid.y.cell(top); row < end; ++row) {
        slots.mark(box, threshold, begin_of(row * grid.x.count() + first), begin_of(row * grid.x.count() + last + 1));
      }
    }
  });
}

// As torch.sort(stable=True, descending=True).indices. For 32 bits, counting sorts of 11 bits from the lowest up, which
// take a tenth of the time of PyTorch's merge sort.
Ranks visiting_order(const View& scores) {
  const int64_t n = scores.numel;
  Ranks order(n);
  if (scores.dtype != dtypes::kFloat32) {
    const Tensor indices = descending(*scores.tensor);
    std::copy_n(indices.const_data_ptr<int64_t>(), n, order.begin());
    return order;
  }
  constexpr int kPasses = 3, kBits = 11, kBins = 1 << kBits;
  const float* values = scores.tensor->const_data_ptr<float>();
  std::vector<uint32_t> keys(n), next_keys(n), counts(kPasses * kBins);
  Ranks next_order(n);
  for (int64_t i = 0; i < n; ++i) {
    const float value = values[i * scores.strides[0]];
    const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 and 0 are equal.
    // Of positive numbers a greater one has greater bits, of negative ones the other way round; NaN comes first.
    keys[i] = std::isnan(value) ? 0 : bits >> 31 ? bits : 0x7fffffff - bits;
    order[i] = static_cast<uint32_t>(i);
    for (int pass = 0; pass < kPasses; ++pass) ++counts[pass * kBins + (keys[i] >> pass * kBits) % kBins];
  }
  for (int pass = 0; pass < kPasses; ++pass) {
    uint32_t* next = counts.data() + pass * kBins;
    if (next[(keys[0] >> pass * kBits) % kBins] == n) continue;
    for (uint32_t bin = 0, before = 0; bin < kBins; ++bin) before += std::exchange(next[bin], before);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t to = next[(keys[i] >> pass * kBits) % kBins]++;
      next_keys[to] = keys[i], next_order[to] = order[i];
    }
    keys.swap(next_keys), order.swap(next_order);
  }
  return order;
}

// The ranks of each class, in order.
std::vector<Ranks> by_class(const std::vector<int64_t>& classes) {
  const int64_t n = classes.size();
  std::vector<Ranks> groups;
  const auto [least, greatest] = std::minmax_element(classes.begin(), classes.end());
  if (static_cast<uint64_t>(*greatest) - static_cast<uint64_t>(*least) < static_cast<uint64_t>(4 * n)) {
    groups.resize(*greatest - *least + 1);
    for (int64_t r = 0; r < n; ++r) groups[classes[r] - *least].push_back(static_cast<uint32_t>(r));
    return groups;
  }
  Ranks ranks(n);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::stable_sort(ranks.begin(), ranks.end(), [&](uint32_t p, uint32_t q) { return classes[p] < classes[q]; });
  for (int64_t k = 0; k < n; ++k) {
    if (k == 0 || classes[ranks[k]] != classes[ranks[k - 1]]) groups.emplace_back();
    groups.back().push_back(ranks[k]);
  }
  return groups;
}

// The indices of the kept boxes by descending score.
Ranks kept(const Call<3>& call, double iou_threshold) {
  const View &view = call.views[0], &view_scores = call.views[1], &view_idxs = call.views[2];
  const int64_t n = view.sizes[0];
  if (n == 0) return {};
  const Ranks order = visiting_order(view_scores);
  std::vector<Ranks> groups;
  if (view_idxs) {
    const Tensor wide =
        torch::stable::contiguous(torch::stable::to(*view_idxs.tensor, torch::headeronly::ScalarType::Long));
    const int64_t* values = wide.const_data_ptr<int64_t>();
    std::vector<int64_t> classes(n);
    for (int64_t r = 0; r < n; ++r) classes[r] = values[order[r]];
    groups = by_class(classes);
  } else {
    Ranks& all = groups.emplace_back(n);
    std::iota(all.begin(), all.end(), 0);
  }
  std::vector<uint8_t> keep(n);
  dispatch(Floating(), view.op, view.dtype, [&]<class T>(T) {
    using V = typename Compute<T>::type;
    const T* data = static_cast<const T*>(view.tensor->const_data_ptr());
    const int64_t down = view.strides[0], along = view.strides[1];
    std::vector<Box<V>> sorted(n);
    for (int64_t r = 0; r < n; ++r) {
      const T* from = data + order[r] * down;
      sorted[r] = {load(from[0]), load(from[along]), load(from[2 * along]), load(from[3 * along])};
    }
    const Threshold<V> threshold(iou_threshold);
    constexpr int64_t kGrain = 32'768;  // Boxes worth a thread.
    const int64_t count = groups.size();
    parallel_for(0, count, (count * kGrain + n - 1) / n, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) select(sorted, std::move(groups[g]), threshold, keep.data());
    });
  });
  Ranks indices;
  for (int64_t r = 0; r < n; ++r) {
    if (keep[r]) indices.push_back(order[r]);
  }
  return indices;
}

Tensor to_tensor(const View& like, const Ranks& indices, int64_t size) {
  Tensor result = empty(like, aoti_torch_dtype_int64(), size);
  int64_t* data = result.mutable_data_ptr<int64_t>();
  std::fill(std::copy(indices.begin(), indices.end(), data), data + size, -1);
  return result;
}

Tensor nms(const Tensor& boxes, const Tensor& scores, double iou_threshold) {
  const Call<3> call(kNms, {&boxes, &scores, nullptr});
  const auto indices = kept(call, iou_threshold);
  return to_tensor(call.views[0], indices, indices.size());
}

Tensor batched_nms(const Tensor& boxes, const Tensor& scores, const Tensor& idxs, double iou_threshold) {
  const Call<3> call(kBatchedNms, {&boxes, &scores, &idxs});
  const auto indices = kept(call, iou_threshold);
  return to_tensor(call.views[0], indices, indices.size());
}

std::tuple<Tensor, Tensor> nms_padded(
    const Tensor& boxes, const Tensor& scores, double iou_threshold, const std::optional<Tensor>& idxs) {
  const Call<3> call(kNmsPadded, {&boxes, &scores, idxs ? &*idxs : nullptr});
  const auto indices = kept(call, iou_threshold);
  const View& view = call.views[0];
  Tensor count = empty_scalar(view, aoti_torch_dtype_int64());
  *count.mutable_data_ptr<int64_t>() = indices.size();
  return {to_tensor(view, indices, view.sizes[0]), count};
}

}  // namespace

EXTENSION_CPP_REGISTER(m) {
  m.add<&nms>(kNms);
  m.add<&batched_nms>(kBatchedNms);
  m.add<&nms_padded>(kNmsPadded);
}

}  // namespace extension_cpp::nms
