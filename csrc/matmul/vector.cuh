// The product of a vector and a matrix, of any dtype: c[j] = sum over k of x[k] * b(j, k).
//
// Two numbers: 2 * N * K operations on N * K elements, so that it takes as long as reading the matrix.
//
// A sum is of 8 to 256 classes of k, each in ascending order; those are added up two by two. A class is a thread's:
// where the matrix lies along k, it reads vectors of it; where it lies along rows, vectors of columns.
#pragma once

#include "copies.cuh"

namespace extension_cpp::matmul {

constexpr int kVectorThreads = 256, kLeastClasses = 8, kOfWarp = 32;

// A vector of the matrix or of x, in kPieces, each of which lies together and is aligned.
template <int kPieces, class T, class V>
__device__ __forceinline__ void load_vector(V (&to)[16 / sizeof(T)], const T* from, int64_t stride) {
  constexpr int kVec = 16 / sizeof(T), kPiece = kVec / kPieces;
  using Word = Words<16 / kPieces>;
  T values[kVec];
#pragma unroll
  for (int e = 0; e < kVec; e += kPiece) {
    const Word word = *reinterpret_cast<const Word*>(from + (kPiece == 1 ? e * stride : e));
    memcpy(values + e, &word, sizeof(word));
  }
#pragma unroll
  for (int e = 0; e < kVec; ++e) to[e] = static_cast<V>(values[e]);
}

// Of the vector, which is in vectors of its own or isn't.
template <int kUnroll, class T, class V>
__device__ __forceinline__ void load_shared_vectors(
    V (&to)[kUnroll][16 / sizeof(T)], const Factor<T>& x, int64_t k, int64_t step) {
  if (x.inner == 1 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) load_vector<1>(to[u], x.data + k + u * step, 1);
  } else {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) load_vector<16 / sizeof(T)>(to[u], x.data + (k + u * step) * x.inner, x.inner);
  }
}

// Which part of k of which rows a block has: parts are the blocks of a cluster, or follow each other.
struct PlaceOfVector {
  bool in_cluster;
  int splits, split;
  int64_t first_row;

  template <class T, class V>
  __device__ PlaceOfVector(const Product<T, V>& product, const Tiling& tiling, int rows)
      : in_cluster(product.partial == nullptr && tiling.splits() > 1), splits(static_cast<int>(tiling.splits())) {
    const uint32_t tiles = static_cast<uint32_t>(tiling.tiles_n);
    split = static_cast<int>(in_cluster ? blockIdx.x % splits : blockIdx.x / tiles);
    first_row = int64_t(in_cluster ? blockIdx.x / splits : blockIdx.x % tiles) * rows;
  }
};

// Stores the sums of a block's rows, which it has in shared memory: those of a cluster are added up first, in the order
// of their parts of k.
template <class T, class V>
__device__ __forceinline__ void store_rows(
    const Product<T, V>& product, const PlaceOfVector& at, int rows, const V* sums_of_block) {
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (at.in_cluster) sync_cluster();
#endif
  for (int r = threadIdx.x; r < rows; r += blockDim.x) {
    const int64_t row = at.first_row + r;
    if (row >= product.n || (at.in_cluster && r % at.splits != at.split)) continue;
    V sum = sums_of_block[r];
    if (product.partial != nullptr) {
      product.partial[at.split * product.partial_stride + row] = sum;
      continue;
    }
#if __CUDA_ARCH__ >= 900
    if (at.in_cluster) {
      sum = 0;
      for (int s = 0; s < at.splits; ++s) sum += load_from(sums_of_block + r, s);
    }
#endif
    product.c[row * product.c_inner] = round_to<T>(sum);
  }
#if __CUDA_ARCH__ >= 900
  if (at.in_cluster) sync_cluster();  // Others may still read here.
#endif
}

// So many threads to a row of the matrix as there are classes; a thread reads kRows. Of blocks that a multiprocessor
// holds there are enough for all to start at once, or clusters would wait for each other.
template <class T, class V, int kPieces, int kRows>
__global__ void __launch_bounds__(kVectorThreads, sizeof(T) == 8 ? 4 : 3)
    vector_along_k_kernel(Product<T, V> product, Tiling tiling, int classes) {
  constexpr int kVec = 16 / sizeof(T), kPiece = kVec / kPieces, kUnroll = kPieces < kVec ? 8 / kRows : 1;
  using Word = Words<16 / kPieces>;
  __shared__ V sums_of_block[kVectorThreads / kLeastClasses * kRows];
  const int rows = kVectorThreads / classes * kRows, lane = threadIdx.x % classes;
  const PlaceOfVector at(product, tiling, rows);
  const int64_t row = at.first_row + threadIdx.x / classes * kRows;
  const int64_t begin = at.split * tiling.steps_per_split, end = min(begin + tiling.steps_per_split, product.k);
  const int step = classes * kVec;
  const T *x = product.a.data, *first = product.b.data + min(row, product.n - 1) * product.b.outer;
  const auto last = static_cast<int>(max(min(product.n - 1 - row, int64_t(kRows - 1)), int64_t(0)));
  V sums[kRows] = {};
  int64_t k = begin + lane * kVec;
  auto add = [&]<int kCount>(std::integral_constant<int, kCount>) {
    V a[kCount][kVec];
    Word words[kCount][kRows][kPieces];
    load_shared_vectors<kCount>(a, product.a, k, step);
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const T* from = first + min(r, last) * product.b.outer + (k + u * step) * product.b.inner;
#pragma unroll
        for (int e = 0; e < kPieces; ++e) {
          words[u][r][e] = *reinterpret_cast<const Word*>(from + e * (kPiece == 1 ? product.b.inner : kPiece));
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        T values[kVec];
        memcpy(values, words[u][r], sizeof(values));
#pragma unroll
        for (int e = 0; e < kVec; ++e) sums[r] = fma(a[u][e], static_cast<V>(values[e]), sums[r]);
      }
    }
    k += kCount * step;
  };
  while (kUnroll > 1 && k + (kUnroll - 1) * step + kVec <= end) add(std::integral_constant<int, kUnroll>());
  while (k + kVec <= end) add(std::integral_constant<int, 1>());
#pragma unroll 1
  for (; k < end; k += step) {
#pragma unroll 1
    for (int e = 0; e < kVec && k + e < end; ++e) {
      const V factor = static_cast<V>(x[(k + e) * product.a.inner]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const T value = first[min(r, last) * product.b.outer + (k + e) * product.b.inner];
        sums[r] = fma(factor, static_cast<V>(value), sums[r]);
      }
    }
  }
  if (classes > kOfWarp) {  // Those of a warp are of one row: what is added to a thread's sums is another warp's.
    __shared__ V others[kVectorThreads][kRows];
    for (int distance = classes / 2; distance >= kOfWarp; distance /= 2) {
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kRows; ++r) others[threadIdx.x][r] = sums[r];
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] += others[threadIdx.x ^ distance][r];
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    for (int distance = min(classes, kOfWarp) / 2; distance > 0; distance /= 2) {
      sums[r] += __shfl_xor_sync(0xffffffff, sums[r], distance);
    }
    if (lane == 0) sums_of_block[threadIdx.x / classes * kRows + r] = sums[r];
  }
  store_rows(product, at, rows, sums_of_block);
}

// Blocks of as many threads for a vector of columns as there are classes.
template <class T, class V, int kPieces>
__global__ void __launch_bounds__(kVectorThreads, 4)
    vector_along_rows_kernel(Product<T, V> product, Tiling tiling, int classes) {
  constexpr int kVec = 16 / sizeof(T), kUnroll = kPieces < kVec ? 8 / kVec : 1;
  __shared__ V shared[kVectorThreads][kVec];
  const int across = kVectorThreads / classes, own = threadIdx.x / across;
  const PlaceOfVector at(product, tiling, across * kVec);
  const int64_t own_row = at.first_row + threadIdx.x % across * kVec;
  // The last vector may begin among the columns of the one before.
  const int64_t last = product.n % (kVec / kPieces) == 0 ? max(product.n - kVec, int64_t(0)) : product.n;
  const int64_t row = min(own_row, last);
  const int64_t begin = at.split * tiling.steps_per_split, end = min(begin + tiling.steps_per_split, product.k);
  const int step = classes * kVec;
  const T *x = product.a.data, *from = product.b.data + row * product.b.outer;
  V sums[kVec] = {};
  if (own_row < product.n && row + kVec <= product.n) {
    int64_t k = begin + own * kVec;
    auto add = [&]<int kCount>(std::integral_constant<int, kCount>) {
      V a[kCount][kVec], b[kCount][kVec][kVec];
      load_shared_vectors<kCount>(a, product.a, k, step);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
          load_vector<kPieces>(b[u][e], from + (k + u * step + e) * product.b.inner, product.b.outer);
        }
      }
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
#pragma unroll
        for (int e = 0; e < kVec; ++e) {
#pragma unroll
          for (int j = 0; j < kVec; ++j) sums[j] = fma(a[u][e], b[u][e][j], sums[j]);
        }
      }
      k += kCount * step;
    };
    while (kUnroll > 1 && k + (kUnroll - 1) * step + kVec <= end) add(std::integral_constant<int, kUnroll>());
    while (k + kVec <= end) add(std::integral_constant<int, 1>());
#pragma unroll 1
    for (; k < end; k += step) {
#pragma unroll 1
      for (int e = 0; e < kVec && k + e < end; ++e) {
        const V factor = static_cast<V>(x[(k + e) * product.a.inner]);
        V b[kVec];
        load_vector<kPieces>(b, from + (k + e) * product.b.inner, product.b.outer);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[j] = fma(factor, b[j], sums[j]);
      }
    }
  } else if (own_row < product.n) {
#pragma unroll 1
    for (int64_t k = begin + own * kVec; k < end; k += step) {
#pragma unroll 1
      for (int e = 0; e < kVec && k + e < end; ++e) {
        const V factor = static_cast<V>(x[(k + e) * product.a.inner]);
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          if (row + j < product.n) {
            const T value = from[j * product.b.outer + (k + e) * product.b.inner];
            sums[j] = fma(factor, static_cast<V>(value), sums[j]);
          }
        }
      }
    }
  }
  for (int distance = classes / 2; distance > 0; distance /= 2) {
    if (own >= distance && own < 2 * distance) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) shared[threadIdx.x][j] = sums[j];
    }
    __syncthreads();
    if (own < distance) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) sums[j] += shared[threadIdx.x + distance * across][j];
    }
  }
  if (own == 0) {
    const auto twice = static_cast<int>(min(own_row - row, int64_t(kVec)));
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if (j >= twice) shared[threadIdx.x][j - twice] = sums[j];
    }
  }
  store_rows(product, at, across * kVec, shared[0]);
}

template <class T, class V>
void multiply_vector(Launch& launch, const View& like, const Product<T, V>& product, const Device& device) {
  constexpr int kVec = 16 / sizeof(T);
  // Many sums are better off with fewer classes, as more of them lie side by side; so are short ones.
  constexpr int64_t kManySums = 16384, kSomeSums = 4096, kShort = 128;
  const bool is_short = product.n >= kSomeSums && product.k <= kShort;
  int classes = is_short ? kLeastClasses : product.n >= kManySums ? kOfWarp / 2 : kOfWarp;
  // Few long sums have more, as many as fill the device; but neighbours along rows read a sector of memory, 32 bytes.
  constexpr int kFewRows = 2, kVectorsOfThread = 4;
  constexpr int64_t kMostBytes = 16 << 20;  // More are read faster in whole lines.
  const int most_classes = product.n <= kVec ? kVectorThreads : kVectorThreads / 2;
  const int64_t threads = int64_t(device.processors) * kVectorThreads * kFewRows / kMostInCluster;
  const bool is_small = product.n * product.k * static_cast<int64_t>(sizeof(T)) <= kMostBytes;
  while (is_small && classes < most_classes && product.n * classes < threads &&
         product.k >= classes * kVec * kVectorsOfThread) {
    classes *= 2;
  }
  // Some sums that are neither short nor long have as many classes as fill the device, and are not cut into parts of k:
  // blocks of a cluster take a microsecond to find each other.
  constexpr int64_t kSomeRows = 256, kLong = 4096, kThreadsOfAll = 1 << 17;
  const bool is_whole = is_small && product.n >= kSomeRows && product.n < kManySums && product.k <= kLong;
  while (is_whole && classes < kVectorThreads / 2 && product.n * classes < kThreadsOfAll &&
         classes * kVec < product.k) {
    classes *= 2;
  }
  const int64_t chunk = int64_t(classes) * kVec;
  // Parts of k are as many as fill the device; those that a cluster can't hold are long enough to be worth a pass.
  constexpr int64_t kOfProcessor = sizeof(T) == 8 ? 3 : 2, kLeastPart = 128, kWorthAPass = 1024;
  constexpr double kLeastBytes = 128 * 1024;  // of a block in a cluster
  const int64_t blocks = ceil_div(product.n, kVectorThreads / classes * kVec), most = kOfProcessor * device.processors;
  const int64_t wanted = (most + blocks / 2) / blocks, in_cluster = device.has_clusters() ? kMostInCluster : 1;
  int64_t splits = std::min(wanted, product.k / std::max(kLeastPart, chunk));
  if (splits > in_cluster) {
    const double bytes = static_cast<double>(product.n) * product.k * sizeof(T) / (blocks * in_cluster);
    const bool worth_a_pass = in_cluster == 1 || !is_small || bytes > kLeastBytes;
    splits = worth_a_pass ? std::max(in_cluster, std::min(wanted, product.k / kWorthAPass)) : in_cluster;
  }
  splits = is_whole ? 1 : std::max<int64_t>(splits, 1);
  const bool along_rows = product.b.outer == 1 && product.b.inner != 1;
  constexpr int kTwo = std::min(kVec, 2);
  const int piece = piece_of(product.b), pieces = piece == 16 ? 1 : piece == 8 ? kTwo : kVec;  // of a vector
  // Along k, a lane that reads more rows reads less of the vector, where blocks fill the device.
  const bool many = pieces < kVec && blocks * splits >= device.processors;
  const int64_t rows = kVectorThreads / classes * (along_rows || many ? kVec : kFewRows);
  const Tiling tiling{1, ceil_div(product.n, rows), product.k, ceil_div(ceil_div(product.k, splits), chunk) * chunk};
  const Plan plan{0, tiling, 0, tiling.splits() <= in_cluster};
  with_splits(launch, like, product, device, plan, [&](const Product<T, V>& p, const Plan& plan) {
    auto kernel_of = [&]<int kPieces>(std::integral_constant<int, kPieces>) {
      constexpr int kManyRows = kPieces == kVec ? kFewRows : kVec;
      return along_rows ? vector_along_rows_kernel<T, V, kPieces>
             : many     ? vector_along_k_kernel<T, V, kPieces, kManyRows>
                        : vector_along_k_kernel<T, V, kPieces, kFewRows>;
    };
    auto* kernel = pieces == 1      ? kernel_of(std::integral_constant<int, 1>())
                   : pieces == kTwo ? kernel_of(std::integral_constant<int, kTwo>())
                                    : kernel_of(std::integral_constant<int, kVec>());
    const auto splits = static_cast<int>(plan.tiling.splits());
    if (plan.in_cluster && splits > 1) {
      launch.clusters(kernel, plan.tiling.count(), splits, kVectorThreads, 0, false, p, plan.tiling, classes);
    } else {  // Also of GPUs that have no clusters.
      launch(kernel, plan.tiling.count(), kVectorThreads, 0, p, plan.tiling, classes);
    }
  });
}

}  // namespace extension_cpp::matmul
