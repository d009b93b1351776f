// Instructions of Hopper, architecture 9.0a: barriers that count bytes, the tensor memory accelerator (TMA), which
// copies boxes of tensors into shared memory, and products of warpgroups, 128 threads, of what lies there (wgmma).
//
// A factor lies in shared memory in rows of 64 halves, 128 bytes, swizzled: 8 rows are 1,024 bytes. It is transposed
// where its rows (of m or n) lie side by side, not its k's.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace extension_cpp::matmul::hopper {

// True in one lane of a warp, all of whose lanes call it. Of other conditions, as threadIdx.x == 0, ptxas doesn't know
// that they leave a single lane: it puts a loop over the lanes around each copy and each barrier that is made, which
// takes longer than the instruction.
__device__ __forceinline__ bool is_elected() {
  uint32_t elected;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.b32 %0, 1, 0, one;\n}" : "=r"(elected));
  return elected != 0;
}

__device__ inline void init_barrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

// For copies and other blocks of the cluster, once the blocks have met.
__device__ inline void make_barriers_visible() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ inline void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Where block `rank` of the cluster has what is at `own` in this one's shared memory.
__device__ inline uint32_t address_in(uint32_t own, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
  return there;
}

// Arrives at the barrier of block `rank` of the cluster that is where `barrier` is in this one. There is nothing to
// release at the scope of the cluster, and asking for it costs more than a step takes: wgmma has read what it needs.
__device__ inline void arrive_at(uint32_t barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, rank)) : "memory");
}

// Stores a vector into the shared memory of block `rank` of the cluster, and counts its bytes at a barrier there,
// unless that is this block, where no other thread waits for it.
__device__ __forceinline__ void send(uint32_t to, int rank, bool is_own, const float* values, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred own;\nsetp.ne.b32 own, %6, 0;\n"
      "@own st.shared.v4.f32 [%0], {%2, %3, %4, %5};\n"
      "@!own st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%1], {%2, %3, %4, %5}, [%7];\n}" ::"r"(
          to),
      "r"(address_in(to, rank)), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]),
      "r"(static_cast<int>(is_own)), "r"(address_in(barrier, rank))
      : "memory");
}
__device__ __forceinline__ void send(uint32_t to, int rank, bool is_own, const double* values, uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred own;\nsetp.ne.b32 own, %4, 0;\n"
      "@own st.shared.v2.f64 [%0], {%2, %3};\n"
      "@!own st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%1], {%2, %3}, [%5];\n}" ::"r"(to),
      "r"(address_in(to, rank)), "d"(values[0]), "d"(values[1]), "r"(static_cast<int>(is_own)),
      "r"(address_in(barrier, rank))
      : "memory");
}

__device__ inline void load_shared(uint32_t from, float* values) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
               : "r"(from)
               : "memory");
}
__device__ inline void load_shared(uint32_t from, double* values) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(values[0]), "=d"(values[1]) : "r"(from) : "memory");
}

__device__ inline double load_double(uint32_t from) {
  double value;
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(from) : "memory");
  return value;
}

__device__ inline float2 load_pair(uint32_t from) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(from) : "memory");
  return pair;
}

// How many registers a thread of this warpgroup has from now on, more or fewer than the kernel starts with.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Policies of the L2 cache, as CUTLASS has them: for what is read or written once, and for other things.
constexpr uint64_t kOnce = 0x12f0000000000000, kUsual = 0x1000000000000000;

// A box of a tensor to shared memory, of this block or, with kShared, of both of its cluster. Two instructions, with a
// policy of the L2 cache and without, take small products longer than one that always has one.
template <bool kShared>
__device__ __forceinline__ void copy_box(
    uint32_t to, const CUtensorMap& map, int x, int y, int z, uint32_t barrier, bool once = false) {
  if constexpr (kShared) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(static_cast<uint16_t>(3))
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(once ? kOnce : kUsual)
        : "memory");
  }
}

// Stores four matrices of 8 by 8 halves, which lie in a warp as wgmma's sums do, to shared memory, transposed or not:
// each thread says where one of their rows is to be.
template <bool kTransposed>
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&words)[4]) {
  if constexpr (kTransposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
}

// What a thread has of such a matrix that is transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t word) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

__device__ __forceinline__ void meet_in_warpgroup(int warpgroup) {
  __syncwarp();
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");  // The first is __syncthreads'.
}

// What threads wrote to shared memory, before one starts a copy from there.
__device__ __forceinline__ void make_visible_to_accelerator() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Starts to copy a box from shared memory to a tensor.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int x, int y, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], [%4], %5;\n"
      "cp.async.bulk.commit_group;" ::"l"(&map),
      "r"(x), "r"(y), "r"(0), "r"(from), "l"(kOnce)
      : "memory");
}

// Waits until the thread's boxes but for so many were read from shared memory.
template <int kLeft>
__device__ __forceinline__ void wait_for_boxes() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

// How wgmma finds a factor in shared memory: 8 by 8 matrices in rows of 128, 64 or 32 bytes, swizzled. Along k, 8 rows
// of a transposed factor follow each other, and 64 of its columns are a box; of another, 8 rows follow each other.
template <bool kTransposed, int kRowBytes = 128>
__device__ uint64_t describe(uint32_t at) {
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32);
  constexpr uint64_t kMode = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  constexpr uint64_t kSwizzle = kMode << 62, kStride = uint64_t(8 * kRowBytes / 16) << 32;
  constexpr uint64_t kLeading = uint64_t(kTransposed ? 64 * 128 / 16 : 1) << 16;
  return kSwizzle | kStride | kLeading | (at & 0x3ffff) >> 4;
}

// From one 16 of k to the next, in the descriptor's units of 16 bytes.
template <bool kTransposed, int kRowBytes = 128>
constexpr uint64_t kNext16 = (kTransposed ? 16 * kRowBytes : 32) / 16;

#define SUMS_8(i)                                                                                               \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
      "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define SUMS_64(i)                                                                                          \
  SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24), SUMS_8(i + 32), SUMS_8(i + 40), SUMS_8(i + 48), \
      SUMS_8(i + 56)
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)
#define OPERANDS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define OPERANDS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define OPERANDS_32                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define OPERANDS_64                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, " \
  "%59, %60, %61, %62, %63"
#define OPERANDS_96                                                                    \
  OPERANDS_64                                                                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define OPERANDS_128                                                                               \
  OPERANDS_96                                                                                      \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// sums = a * b, or with `add`, sums += a * b.
#define WGMMA(shape, type, operands, a, b, add, transposed_a, transposed_b, ...)                        \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add                                              \
               ", 0;\n"                                                                                 \
               "wgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" operands "}, " a ", " b \
               ", add, 1, 1, " transposed_a ", " transposed_b ";\n}\n"                                  \
               : __VA_ARGS__                                                                            \
               : "l"(from_a), "l"(from_b), "r"(add_to), "n"(static_cast<int>(kTransposedA)),            \
                 "n"(static_cast<int>(kTransposedB)))

#define WGMMA_OF_REGISTERS(shape, operands, a, b, add, ...)                                       \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add                                        \
               ", 0;\n"                                                                           \
               "wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 {" operands "}, {" a "}, " b \
               ", add, 1, 1, 0;\n}\n"                                                             \
               : __VA_ARGS__                                                                      \
               : "r"(from_a[0]), "r"(from_a[1]), "r"(from_a[2]), "r"(from_a[3]), "l"(from_b), "r"(add_to))

// sums (+)= a * b, of 64 rows of a and kN of b, float16 or bfloat16, over 16 of k.
template <class T, int kN, bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void multiply_add(float (&sums)[kN / 2], uint64_t from_a, uint64_t from_b, int add_to) {
  static_assert(kN == 16 || kN == 32 || kN == 64 || kN == 128 || kN == 192 || kN == 256);
  constexpr bool kHalf = std::is_same_v<T, __half>;
  if constexpr (kN == 256 && kHalf) {
    WGMMA("m64n256k16", "f16", OPERANDS_128, "%128", "%129", "%130", "%131", "%132", SUMS_64(0), SUMS_64(64));
  } else if constexpr (kN == 256) {
    WGMMA("m64n256k16", "bf16", OPERANDS_128, "%128", "%129", "%130", "%131", "%132", SUMS_64(0), SUMS_64(64));
  } else if constexpr (kN == 192 && kHalf) {
    WGMMA("m64n192k16", "f16", OPERANDS_96, "%96", "%97", "%98", "%99", "%100", SUMS_64(0), SUMS_32(64));
  } else if constexpr (kN == 192) {
    WGMMA("m64n192k16", "bf16", OPERANDS_96, "%96", "%97", "%98", "%99", "%100", SUMS_64(0), SUMS_32(64));
  } else if constexpr (kN == 16 && kHalf) {
    WGMMA("m64n16k16", "f16", OPERANDS_8, "%8", "%9", "%10", "%11", "%12", SUMS_8(0));
  } else if constexpr (kN == 16) {
    WGMMA("m64n16k16", "bf16", OPERANDS_8, "%8", "%9", "%10", "%11", "%12", SUMS_8(0));
  } else if constexpr (kN == 32 && kHalf) {
    WGMMA("m64n32k16", "f16", OPERANDS_16, "%16", "%17", "%18", "%19", "%20", SUMS_8(0), SUMS_8(8));
  } else if constexpr (kN == 32) {
    WGMMA("m64n32k16", "bf16", OPERANDS_16, "%16", "%17", "%18", "%19", "%20", SUMS_8(0), SUMS_8(8));
  } else if constexpr (kN == 64 && kHalf) {
    WGMMA("m64n64k16", "f16", OPERANDS_32, "%32", "%33", "%34", "%35", "%36", SUMS_32(0));
  } else if constexpr (kN == 64) {
    WGMMA("m64n64k16", "bf16", OPERANDS_32, "%32", "%33", "%34", "%35", "%36", SUMS_32(0));
  } else if constexpr (kHalf) {
    WGMMA("m64n128k16", "f16", OPERANDS_64, "%64", "%65", "%66", "%67", "%68", SUMS_64(0));
  } else {
    WGMMA("m64n128k16", "bf16", OPERANDS_64, "%64", "%65", "%66", "%67", "%68", SUMS_64(0));
  }
}

// sums (+)= a * b, of 64 rows of a, whose bfloat16s are in registers, and kN of b, over 16 of k.
template <int kN>
__device__ __forceinline__ void multiply_add(
    float (&sums)[kN / 2], const uint32_t (&from_a)[4], uint64_t from_b, int add_to) {
  static_assert(kN == 64 || kN == 128);
  if constexpr (kN == 64) {
    WGMMA_OF_REGISTERS("m64n64k16", OPERANDS_32, "%32, %33, %34, %35", "%36", "%37", SUMS_32(0));
  } else {
    WGMMA_OF_REGISTERS("m64n128k16", OPERANDS_64, "%64, %65, %66, %67", "%68", "%69", SUMS_64(0));
  }
}

#undef SUMS_8
#undef SUMS_32
#undef SUMS_64
#undef OPERANDS_8
#undef OPERANDS_16
#undef OPERANDS_32
#undef OPERANDS_64
#undef OPERANDS_96
#undef OPERANDS_128
#undef WGMMA
#undef WGMMA_OF_REGISTERS

// Keeps the compiler from moving what it does with the sums across this place.
template <int kSize>
__device__ __forceinline__ void pin(float (&sums)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

}  // namespace extension_cpp::matmul::hopper

#endif
