// Sums of a product whose parts of k are computed by the blocks of a cluster, which read each other's shared memory.
// Hopper and later.
#pragma once

#include "product.cuh"

namespace extension_cpp::matmul {

constexpr int kMostInCluster = 8;  // What every GPU with clusters has.

#if __CUDA_ARCH__ >= 900

__device__ inline int rank_in_cluster() {
  return static_cast<int>(__clusterRelativeBlockRank());
}

__device__ inline void sync_cluster() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}

// The same without ordering memory, which takes a thousand cycles: for what is counted at barriers in shared memory.
__device__ inline void meet_in_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// What lies in the shared memory of block `rank` where `own` is in this one's.
template <class V>
__device__ inline V load_from(const V* own, int rank) {
  return *static_cast<const V*>(__cluster_map_shared_rank(const_cast<V*>(own), rank));
}

#endif

// Adds up what the blocks of a cluster have of a tile's sums, in the order of their parts of k, and stores it. The sums
// are in the shared memory of each, in rows of kStride. Each block stores the rows of its turn.
template <int kM, int kN, int kStride, class T, class V>
__device__ __forceinline__ void store_of_cluster(
    const Product<T, V>& product, const Place& at, int splits, const V* sums_of_block) {
#if __CUDA_ARCH__ >= 900
  constexpr int kVec = 16 / sizeof(V), kChunks = kN / kVec;
  sync_cluster();
  const bool vectors = product.has_vectors(kVec);
  const int rank = rank_in_cluster();
  for (int c = threadIdx.x; c / kChunks * splits + rank < kM; c += blockDim.x) {
    const int row = c / kChunks * splits + rank, column = c % kChunks * kVec;
    const int64_t i = at.m * kM + row, j = at.n * kN + column;
    if (i >= product.m || j >= product.n) continue;
    V sums[kVec] = {};
#pragma unroll 4
    for (int s = 0; s < splits; ++s) {
      const uint4 words = load_from(reinterpret_cast<const uint4*>(sums_of_block + row * kStride + column), s);
      V more[kVec];
      memcpy(more, &words, sizeof(words));
#pragma unroll
      for (int e = 0; e < kVec; ++e) sums[e] += more[e];
    }
    T* to = product.c + i * product.c_outer + j * product.c_inner;
    if (vectors) {
      store_vector<T, kVec>(to, sums);
    } else {
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        if (j + e < product.n) to[e * product.c_inner] = round_to<T>(sums[e]);
      }
    }
  }
  sync_cluster();  // Others may still read here.
#endif
}

}  // namespace extension_cpp::matmul
