"""What a user writes first: a call, a training step, a compiled function."""

import torch

import extension_cpp

for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
    a, b = torch.randn(64, 32, device=device), torch.randn(32, device=device)
    torch.testing.assert_close(extension_cpp.mymuladd(a, b, 2.0), a * b + 2.0)
    out = torch.empty_like(a)
    extension_cpp.myadd_out(a, b, out)
    torch.testing.assert_close(out, a + b)

    weight = torch.nn.Parameter(torch.ones(32, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.5)

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return extension_cpp.mymuladd(x, weight, 0.5).sub(1.0).square().mean()

    before = loss(a, weight)
    before.backward()
    optimizer.step()
    after = torch.compile(loss, fullgraph=True)(a, weight)
    assert after < before, (after, before)
    print(
        f"extension_cpp {extension_cpp.__version__}, torch {torch.__version__}, {device}: loss {before:.3f}, then {after:.3f}"
    )
