// softmax_cross_entropy: loss[r] = lse - (1 - s) x[target] - s mean(x) for a row x of N logits, with lse =
// log(sum(exp(x))) and s for the label smoothing; 0 where the target is ignore_index. Its gradient is exp(x - lse) - q,
// with 1 - s of q on the target and s spread over all classes.
//
// Two numbers: forward reads each logit once for an exp and some 8 operations, backward reads it and writes its
// gradient. lse is what backward needs to do that in one pass.
#define EXTENSION_CPP_NAMESPACE my_ops
#include "common/rowwise.h"

namespace my_ops {

using namespace extension_cpp;

const Operator kCrossEntropy(
    "softmax_cross_entropy(Tensor logits, Tensor target, int ignore_index=-100, float label_smoothing=0.0)"
    " -> (Tensor loss, Tensor lse)",
    "logits: ... N where 1 <= N; target: ... of int64 -> ... as logits, ... of float64");
const Operator kCrossEntropyBackward(
    "softmax_cross_entropy_backward(Tensor grad, Tensor grad_lse, Tensor logits, Tensor target, Tensor lse,"
    " int ignore_index=-100, float label_smoothing=0.0) -> Tensor",
    "grad: ...; grad_lse: ... of float64; logits: ... N as grad where 1 <= N; target: ... of int64;"
    " lse: ... of float64 -> ... N");

struct CrossEntropy {
  using Arguments = Roles<kRows, kIndices>;     // logits, target
  using Results = Roles<kValues, kStatistics>;  // loss, lse

  int64_t ignore_index;
  double smoothing;

  // The sum is that of exp(x - max), whose largest term is 1.
  template <class V>
  struct State {
    V max = std::numeric_limits<V>::lowest(), sum = 0, total = 0;
  };

  // One exp: either x or what the maximum was until now is the smaller one.
  template <class V>
  EXTENSION_CPP_INLINE void accumulate(State<V>& state, V x) const {
    const V larger = x > state.max ? x : state.max, term = exponential_term(-std::abs(x - state.max));
    state.sum = x > state.max ? state.sum * term + 1 : state.sum + term;
    state.max = larger;
    state.total += x;
  }

  template <class V>
  EXTENSION_CPP_INLINE void combine(State<V>& state, const State<V>& other) const {
    const V larger = other.max > state.max ? other.max : state.max;
    state.sum = state.sum * exponential_term(state.max - larger) + other.sum * exponential_term(other.max - larger);
    state.max = larger;
    state.total += other.total;
  }

  template <class V, class Row>
  EXTENSION_CPP_INLINE Values<V, 2> finish(const State<V>& state, const Row& row, int64_t target) const {
    const V lse = state.max + std::log(state.sum), s = static_cast<V>(smoothing);
    const bool ignored = target == ignore_index || target < 0 || target >= row.size;
    const V mean = s == 0 ? V(0) : s * (state.total / static_cast<V>(row.size));
    return {ignored ? V(0) : lse - (1 - s) * row.at(0, target) - mean, lse};
  }
};

struct CrossEntropyBackward {
  using Arguments = Roles<kValues, kStatistics, kRows, kIndices, kStatistics>;  // grad, grad_lse, logits, target, lse
  using Results = Roles<kRows>;

  int64_t ignore_index;
  double smoothing;

  template <class V>
  struct Kept {
    V grad, slope, even, lse;  // slope: of the loss and of lse in exp(x - lse)
    int64_t target;
  };

  template <class Row, class V>
  EXTENSION_CPP_INLINE auto finish(const Row& row, V grad, V grad_lse, int64_t target, V lse) const {
    const bool ignored = target == ignore_index || target < 0 || target >= row.size;
    const V of_loss = ignored ? V(0) : grad, s = static_cast<V>(smoothing);
    return Kept<V>{of_loss * (1 - s), of_loss + grad_lse, of_loss * s / static_cast<V>(row.size), lse, target};
  }

  template <class V>
  EXTENSION_CPP_INLINE V write(const Kept<V>& kept, int64_t i, V x) const {
    const V here = i == kept.target ? kept.grad : V(0);
    return exponential(x - kept.lse) * kept.slope - kept.even - here;
  }
};

std::tuple<Tensor, Tensor> softmax_cross_entropy(
    const Tensor& logits, const Tensor& target, int64_t ignore_index, double smoothing) {
  return rowwise(kCrossEntropy, CrossEntropy{ignore_index, smoothing}, logits, target);
}

Tensor softmax_cross_entropy_backward(
    const Tensor& grad, const Tensor& grad_lse, const Tensor& logits, const Tensor& target, const Tensor& lse,
    int64_t ignore_index, double smoothing) {
  const CrossEntropyBackward backward{ignore_index, smoothing};
  return rowwise(kCrossEntropyBackward, backward, grad, grad_lse, logits, target, lse);
}

EXTENSION_CPP_REGISTER(m) {
  m.add<&softmax_cross_entropy>(kCrossEntropy);
  m.add<&softmax_cross_entropy_backward>(kCrossEntropyBackward);
}

}  // namespace my_ops
