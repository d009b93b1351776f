"""The machine's limits: bytes a second of a copy, operations a second of the fastest code there is for them.

On the CPU that is a loop of independent fused multiply-adds in registers, which waits for nothing, or torch's product where
that has instructions of its own, as AMX. On CUDA it is torch's product, and for float32 a sixth of
that in bfloat16 if it is more.
"""

from __future__ import annotations

import ctypes
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from benchmarks.contenders import compiled_cpp
from benchmarks.harness import ROUNDS, Clock, Function, short, time_cpu, time_cuda

LARGE = {"cpu": 2**26, "cuda": 2**28}  # elements of what is copied
STEPS = 2**22  # of the loop: milliseconds
LIKE = 1.5  # A processor that is so many times as fast is another one.
FLAGS = ("-march=native", "-ffp-contract=fast")

# Twelve chains hide the latency of two units with four cycles each, and fit into sixteen registers. What they start from
# comes from the caller, as a compiler leaves out a sum that it sees is constant.
LOOP = r"""
#include <cstdint>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif
constexpr int kChains = 12;

template <class T>
int64_t multiply_add(int64_t steps, double* result) {
  typedef T Vector __attribute__((vector_size(__BIGGEST_ALIGNMENT__)));
  Vector sums[kChains], half, one;
  for (unsigned i = 0; i < sizeof(Vector) / sizeof(T); ++i) half[i] = T(0.5), one[i] = T(1);
  for (int c = 0; c < kChains; ++c) sums[c] = one * T(*result + c);
  for (int64_t i = 0; i < steps; ++i)
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sums[c] = sums[c] * half + one;
  for (int c = 0; c < kChains; ++c) *result += sums[c][0];
  return steps * kChains * 2 * (sizeof(Vector) / sizeof(T));
}

extern "C" int64_t float32(int64_t steps, double* result) { return multiply_add<float>(steps, result); }
extern "C" int64_t float64(int64_t steps, double* result) { return multiply_add<double>(steps, result); }
#ifdef __AVX512BF16__
extern "C" int64_t bfloat16(int64_t steps, double* result) {
  __m512 sums[kChains];
  const __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.25f));
  for (int c = 0; c < kChains; ++c) sums[c] = _mm512_set1_ps(*result + c);
  for (int64_t i = 0; i < steps; ++i)
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sums[c] = _mm512_dpbf16_ps(sums[c], x, x);
  for (int c = 0; c < kChains; ++c) *result += sums[c][0];
  return steps * kChains * 64;
}
#endif
#ifdef __AMX_BF16__
struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static const Shapes shapes;

// Four sums in tiles; nothing where the system doesn't let the process use them.
extern "C" int64_t bfloat16_in_tiles(int64_t steps, double*) {
  if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 0;
  _tile_loadconfig(&shapes);
  for (int64_t i = 0; i < steps / 16; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return steps / 16 * 4 * 16 * 16 * 32 * 2;
}
#endif
"""


def best(device: str, clock: Clock, function: Function, *inputs: object) -> float:
    timer = time_cuda if device == "cuda" else time_cpu
    return min(timer(lambda: function(*inputs), clock) for _ in range(ROUNDS))


@cache
def copy(device: str, clock: Clock = time.perf_counter) -> float:
    """Bytes a second of a copy."""
    source, target = torch.ones(LARGE[device], device=device), torch.empty(LARGE[device], device=device)
    return short(8 * LARGE[device] / best(device, clock, target.copy_, source))


@cache
def product(device: str, dtype: str, clock: Clock = time.perf_counter) -> float:
    """Operations a second of a product of matrices."""
    for n in (256, 8192 if device == "cuda" else 2048):
        seconds = best(device, clock, torch.matmul, *torch.randn(2, n, n, device=device).to(getattr(torch, dtype)))
        # Where PyTorch has no fast product, as of float16 on the CPU, a large one takes minutes.
        if seconds > 0.005:
            break
    return short(2 * n**3 / seconds)


@cache
def multiply_adds(dtype: str, clock: Clock = time.perf_counter) -> float:
    """Operations a second of the loop, on as many threads as PyTorch uses; zero where it can't be compiled."""
    try:
        loop = getattr(compiled_cpp(LOOP, *FLAGS), dtype)
    except (OSError, subprocess.CalledProcessError, AttributeError):  # No compiler, or no instructions for this dtype.
        return 0.0
    loop.restype = ctypes.c_int64
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:

        def run(*_) -> int:
            return loop(ctypes.c_int64(STEPS), ctypes.byref(ctypes.c_double()))

        seconds = best("cpu", clock, lambda: list(pool.map(run, range(threads))))
        return short(threads * run() / seconds)


def measure(device: str, dtypes: Iterable[str], clock: Clock = time.perf_counter) -> dict:
    """What the machine can do, in its best round, measured once a run; `by` says what reached each rate."""
    found: dict[str, tuple[float, str]] = {}
    for dtype in sorted(dtypes):
        rates = [(product(device, dtype, clock), "a product")]
        if device == "cuda" and dtype == "float32":  # An element is a sum of three bfloat16s.
            rates.append((product(device, "bfloat16", clock) / 6, "six products in bfloat16"))
        if device == "cpu":  # Half precision may be computed in float32.
            half = dtype in ("bfloat16", "float16")
            names = (dtype, *["float32"] * half, *["bfloat16_in_tiles"] * (dtype == "bfloat16"))
            rates += [(multiply_adds(name, clock), "multiply-adds") for name in names]
        found[dtype] = max(rates)
    return {
        "bytes": copy(device, clock),
        "operations": {dtype: rate for dtype, (rate, _) in found.items()},
        "by": {dtype: by for dtype, (_, by) in found.items()},
    }


def of_another(committed: dict, clock: Clock = time.perf_counter) -> str:
    """What CPU these limits are of, if not of this one: of the same name, where a hypervisor hides the model."""
    then = committed["operations"].get("float32", 0.0)
    now = multiply_adds("float32", clock) if then else 0.0
    if not now or then / LIKE < now < then * LIKE:
        return ""
    return f"one with {then / 1e9:.0f} GFLOP/s in float32, where this one does {now / 1e9:.0f}"
