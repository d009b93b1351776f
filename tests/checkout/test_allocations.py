"""Of each operator each allocation fails once, forward and backward: an error of the operator, with the arguments as they
were, nothing leaked, and a next call that is right."""

import os
import subprocess
import sys

import pytest
from clones import ROOT, environment

# The n-th allocation from now fails: of PyTorch's for tensors, and of the operators' library for anything.
SHIM = r"""
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <mutex>
#include <new>
#include <set>

namespace {
std::atomic<long> left{0};
std::mutex mutex;
std::set<void*>& blocks() { static auto* all = new std::set<void*>; return *all; }
bool fails() { return left.load() > 0 && left.fetch_sub(1) == 1; }
std::uintptr_t begin = 0, end = 0;  // where the operators' library lies
int find(dl_phdr_info* info, std::size_t, void*) {
  if (!info->dlpi_name || !std::strstr(info->dlpi_name, "extension_cpp/_C.")) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type == PT_LOAD) end = std::max(end, info->dlpi_addr + part.p_vaddr + part.p_memsz);
  }
  begin = info->dlpi_addr;
  return 1;
}
bool is_ours(void* caller) {
  const auto at = reinterpret_cast<std::uintptr_t>(caller);
  return begin <= at && at < end;
}
void* allocate(std::size_t n, std::size_t alignment, void* caller) {
  if (left.load() > 0 && is_ours(caller) && fails()) throw std::bad_alloc();
  const std::size_t to = alignment ? alignment : 16;
  void* memory = std::aligned_alloc(to, (n + to - 1) / to * to);
  if (!memory) throw std::bad_alloc();
  if (is_ours(caller)) {  // Whoever frees it: some of it LibTorch takes over.
    std::lock_guard lock(mutex);
    blocks().insert(memory);
  }
  return memory;
}
}  // namespace

extern "C" {
long find_library() { return dl_iterate_phdr(find, nullptr); }
void fail_allocation(long n) { left = n; }
long allocations_left() { return left; }
long live() { std::lock_guard lock(mutex); return static_cast<long>(blocks().size()); }
int posix_memalign(void** memory, size_t alignment, size_t n) {
  static const auto real = reinterpret_cast<int (*)(void**, size_t, size_t)>(dlsym(RTLD_NEXT, "posix_memalign"));
  if (fails()) return ENOMEM;
  const int status = real(memory, alignment, n);
  std::lock_guard lock(mutex);
  if (status == 0) blocks().insert(*memory);
  return status;
}
void free(void* memory) {
  static const auto real = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_NEXT, "free"));
  thread_local bool inside = false;
  if (memory && !inside) {
    inside = true;
    { std::lock_guard lock(mutex); blocks().erase(memory); }
    inside = false;
  }
  real(memory);
}
}
void* operator new(std::size_t n) { return allocate(n, 0, __builtin_return_address(0)); }
void* operator new(std::size_t n, std::align_val_t to) {
  return allocate(n, static_cast<std::size_t>(to), __builtin_return_address(0));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
"""
PROGRAM = r"""
import ctypes, re, sys
from itertools import islice
from pathlib import Path
import torch
from extension_cpp import testing

shim = ctypes.CDLL(None)
assert shim.find_library()
AGAIN = 10


def attempt(call, n):
    '''What a call raises when its n-th allocation fails; None once it has no n-th.'''
    shim.fail_allocation(n)
    try:
        call()
    except Exception as error:
        shim.fail_allocation(0)
        return str(error)
    reached = shim.allocations_left() == 0
    shim.fail_allocation(0)
    assert not reached, f"allocation {n} failed, and there was no error"
    return None


def check(name, call, args, named):
    call()
    before = [t.clone() for t in testing.tensors(args)]
    for n in range(1, 200):
        said = attempt(call, n)
        if said is None:
            return n - 1
        # PyTorch doesn't say why an operator of its own failed that a kernel called: it says which.
        assert "allocate" in said or "torch_call_dispatcher(" in said or not named, said
        assert not named or re.match(rf"{name}: ", said), f"allocation {n}: {said}"
        lives = shim.live()
        for _ in range(AGAIN):
            attempt(call, n)
        assert shim.live() - lives < AGAIN, f"allocation {n} of {name}: {shim.live() - lives} blocks were leaked"
        for was, now in zip(before, testing.tensors(args)):
            assert torch.equal(was, now.detach()), f"allocation {n} of {name}: an argument was changed"
    raise AssertionError(f"{name} has more than 200 allocations")


def largest(samples):
    every = ((sum(t.numel() for t in testing.tensors(args)), args) for args in samples)
    return [max((size, i, args) for i, (size, args) in enumerate(every) if size < 5000)[2]]


total = 0
for contract in testing.contracts(Path("tests").resolve()):
    case = contract.op
    dtypes = [torch.float32, torch.float16] if torch.float32 in case.dtypes else case.dtypes[:1]
    for dtype in dtypes:
        for args in largest(islice(case.samples("cpu", dtype), 6)):
            total += check(case.name, lambda: case.function(*args), args, True)
            if case.differentiable:
                leaves = contract.with_gradients(args)
                total += check(case.name, lambda: case.function(*leaves), leaves, True)
                results = [t for t in testing.tensors(case.function(*leaves)) if t.requires_grad]
                seeds, inputs = [t.detach().clone() for t in results], [t for t in testing.tensors(leaves) if t.requires_grad]
                backward = lambda: torch.autograd.grad(results, inputs, seeds, retain_graph=True)
                total += check(case.name, backward, leaves, False)
print("allocations", total)
"""


@pytest.mark.long
def test_each_allocation_fails(tmp_path):
    (tmp_path / "shim.cpp").write_text(SHIM)
    library = tmp_path / "shim.so"
    compiler = os.environ.get("CXX", "c++").split()[0]
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", str(tmp_path / "shim.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    env = environment(ROOT, ROOT / "tests", LD_PRELOAD=str(library), TRITON_INTERPRET="0", OMP_NUM_THREADS="2")
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    # Every operator allocates its results at least, with half types and with derivatives too.
    assert int(done.stdout.split()[-1]) > 50, done.stdout
