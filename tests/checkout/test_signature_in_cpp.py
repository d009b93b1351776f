"""What csrc/common/signature.cpp makes of signatures that no operator of the package has; the same as Python."""

import pytest
import torch
from clones import environment

from extension_cpp import jit

SOURCE = """
#define EXTENSION_CPP_NAMESPACE signatures
#include "common/elementwise.h"

namespace extension_cpp::signatures {

const Tensor* pointer(const std::optional<Tensor>& t) {
  return t ? &*t : nullptr;
}

const Operator kCount("count(Tensor x, Tensor(a!)? running=None) -> ()", "x: N of float32; running: N as x ->");
void count(const Tensor& x, const std::optional<Tensor>& running) {
  const Call<2> call(kCount, {&x, pointer(running)});
  if (running) static_cast<float*>(running->mutable_data_ptr())[0] += 1;
}

EXTENSION_CPP_REGISTER(m) {
  m.add<&count>(kCount);
}

}  // namespace extension_cpp::signatures
"""


@pytest.fixture(scope="module")
def ops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signatures")
    source = folder / "signatures.cpp"
    source.write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "cache"))
        patch.setenv("PATH", environment(folder)["PATH"])
        patch.setenv("DEBUG", "1")
        jit.load(source)
    return torch.ops.signatures


def test_an_optional_tensor_that_is_written(ops):
    """Autograd learns of the write, and what overlaps is refused; no write if it is None."""
    x, w, running = torch.ones(3), torch.ones(3, requires_grad=True), torch.ones(3)
    product = (w * running).sum()
    ops.count(x, running)
    assert running.tolist() == [2, 1, 1] and running._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    ops.count(x)
    assert x._version == 0
    buffer = torch.ones(4)
    with pytest.raises(
        RuntimeError, match=r"^count: running must be x itself or not overlap it, got a partial overlap"
    ):
        ops.count(buffer[:3], buffer[1:])
    with pytest.raises(
        RuntimeError, match=r"^count: running must not overlap itself, got shape \(3,\) with strides \(0,\)"
    ):
        ops.count(x, torch.ones(1).expand(3))
