"""What csrc/common/rowwise.h has for formulas, and no operator of the package uses."""

import pytest
import torch
from clones import environment

from extension_cpp import jit
from extension_cpp.testing import DEVICES

SOURCE = """
#define EXTENSION_CPP_NAMESPACE moments
#include "common/rowwise.h"

namespace extension_cpp::moments {

const Operator kVariance("variance(Tensor x) -> (Tensor mean, Tensor variance)", "x: ... N -> ..., ...");

struct Variance {
  using Arguments = Roles<kRows>;
  using Results = Roles<kValues, kValues>;

  template <class V>
  using State = Moments<V>;

  template <class V>
  EXTENSION_CPP_INLINE void accumulate(Moments<V>& state, V x) const {
    state.add(x);
  }
  template <class V>
  EXTENSION_CPP_INLINE void combine(Moments<V>& state, const Moments<V>& other) const {
    state.add(other);
  }
  template <class V, class Row>
  EXTENSION_CPP_INLINE Values<V, 2> finish(const Moments<V>& state, const Row&) const {
    return {state.mean, state.variance()};
  }
};

std::tuple<Tensor, Tensor> variance(const Tensor& x) {
  return rowwise(kVariance, Variance{}, x);
}

EXTENSION_CPP_REGISTER(m) {
  m.add<&variance>(kVariance);
}

}  // namespace extension_cpp::moments
"""


@pytest.fixture(scope="module")
def variance(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moments")
    sources = [folder / "moments.cpp"]
    sources[0].write_text(SOURCE)
    if "cuda" in DEVICES:
        sources.append(folder / "moments.cu")
        sources[1].write_text('#include "moments.cpp"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "cache"))
        patch.setenv("PATH", environment(folder)["PATH"])
        patch.setenv("DEBUG", "1")
        jit.load(*sources)
    return torch.ops.moments.variance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 7, 300, 5000])
def test_moments(variance, size, dtype, device):
    """Also far from zero, and where the first element is far from all others: the mean of the squares less the square of the
    mean would be off by the square of `condition`."""
    condition = 1000
    x = torch.randn(4, size, device=device, dtype=torch.float64)
    x[1], x[2, 0], x[3] = x[1] + condition, condition, condition
    x = x.to(dtype)
    wide = x.double()
    want = wide.mean(-1), wide.var(-1, correction=0)
    for got, value in zip(variance(x), want):
        assert got.dtype == dtype
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        rounded = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), value, rtol=rounded + 4 * condition * eps, atol=4 * eps)


@pytest.mark.parametrize("device", DEVICES)
def test_no_moments(variance, device):
    """Of no elements the mean is what a State begins with; of infinite ones there is no variance."""
    mean, found = variance(torch.ones(3, 0, device=device))
    assert (mean == 0).all() and found.isnan().all()
    mean, found = variance(torch.full((2, 9), torch.inf, device=device))
    assert not mean.isfinite().any() and found.isnan().all()
