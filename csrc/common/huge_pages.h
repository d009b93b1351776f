// Asks for huge pages under a large result.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace extension_cpp {

// Large results lie in memory that the allocator has just got from the system, and the first touch of each 4 KiB page
// enters the kernel: for an elementwise operator that takes longer than all else. With huge pages it is once in 2 MiB.
// Most systems give them to those who ask. Only pages that lie within the result: no more memory is taken than without.
inline void ask_for_huge_pages([[maybe_unused]] const torch::stable::Tensor& result) {
#ifdef MADV_HUGEPAGE
  constexpr int64_t kHugePage = 2 << 20, kLeast = 16 << 20;  // Less is mostly memory that was used before.
  int64_t bytes;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(result.get(), &bytes));
  if (bytes < kLeast) return;
  const auto data = reinterpret_cast<uintptr_t>(result.data_ptr());
  const uintptr_t begin = (data + kHugePage - 1) / kHugePage * kHugePage, end = (data + bytes) / kHugePage * kHugePage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // Advice: what it returns changes nothing.
#endif
}

}  // namespace extension_cpp
