// The product of halves over few k, or of few multiply-adds, on tensor cores by mma.sync: warps read both factors
// straight into registers. Hopper.
//
// Two numbers: over 16 of k, 16 rows by 64 columns take 16,384 multiply-adds and 2.5 KB, most of which other warps read
// as well, and 2 KB are stored. So the product takes as long as that; or if it is small, as long as one read and as
// fetching the instructions, some fifty cycles for every eight that run once: stages in shared memory, and what is
// asked about layouts at run time, would double that.
#pragma once

#include "mma.cuh"

namespace extension_cpp::matmul {
namespace direct {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 16, kDeep = 16;  // of an instruction: rows, and of k

// How threads read a factor: in vectors along k or along rows, or one by one.
enum class Along { kK, kRows, kNeither };

template <class T>
struct Operands {
  const uint16_t *a, *b;
  T* c;
  int64_t a_outer, a_inner, b_outer, b_inner, c_outer;
  int m, n, k;
  Divisor columns;    // how many blocks lie side by side
  int across, tiles;  // the logarithm of how many warps of a block do, and how many tiles of rows a warp has

  Operands(const Product<T, float>& product, int64_t columns, int across, int64_t tiles)
      : a(reinterpret_cast<const uint16_t*>(product.a.data)),
        b(reinterpret_cast<const uint16_t*>(product.b.data)),
        c(product.c),
        a_outer(product.a.outer),
        a_inner(product.a.inner),
        b_outer(product.b.outer),
        b_inner(product.b.inner),
        c_outer(product.c_outer),
        m(static_cast<int>(product.m)),
        n(static_cast<int>(product.n)),
        k(static_cast<int>(product.k)),
        columns(columns),
        across(across),
        tiles(static_cast<int>(tiles)) {}
};

// What a thread has of a factor: of each of kCount rows from `row` on, four of k from `k` on. What isn't there is zero.
template <Along kAlong, int kCount>
__device__ __forceinline__ void read(
    uint32_t (&to)[kCount][2], const uint16_t* data, int64_t outer, int64_t inner, int row, int rows, int k,
    int depth) {
  const uint16_t* from = data + row * outer + k * inner;
  if constexpr (kAlong == Along::kK) {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      uint2 words{};
      if (row + r < rows && k < depth) words = *reinterpret_cast<const uint2*>(from + r * outer);
      to[r][0] = words.x, to[r][1] = words.y;
    }
  } else if constexpr (kAlong == Along::kRows) {
    uint32_t words[4][kCount / 2];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      Words<kCount * 2> vector{};
      if (row < rows && k < depth) vector = *reinterpret_cast<const Words<kCount * 2>*>(from + e * inner);
      memcpy(words[e], &vector, sizeof(vector));
    }
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      constexpr int kLow = 0x5410, kHigh = 0x7632;
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        to[r][e / 2] = __byte_perm(words[e][r / 2], words[e + 1][r / 2], r % 2 == 0 ? kLow : kHigh);
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      uint16_t elements[4] = {};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (row + r < rows && k + e < depth) elements[e] = from[r * outer + e * inner];
      }
      memcpy(to[r], elements, sizeof(elements));
    }
  }
}

// A warp's tile of 16 rows by 8 * kVec columns. Which rows, columns and k's an instruction takes for its first, second
// and so on is as well any other order: here a thread has two neighbouring rows, four neighbours of k, and reads kVec
// neighbouring columns. Neighbouring threads store vectors side by side.
template <class T, int kVec, Along kA, Along kB>
struct Tile {
  static constexpr int kColumns = 8 * kVec, kOfRow = 2 * kVec;  // of the tile, and sums that a thread has of a row
  static constexpr int kStored = std::max(kVec, 4);

  const Operands<T>& p;
  int row, column;  // of the tile
  uint32_t a[2][2], b[kVec][2];
  float sums[kVec][4];

  __device__ __forceinline__ int own_row() const { return row + threadIdx.x % 32 / 4 * 2; }

  __device__ __forceinline__ void read_a(int step) {
    const int k = step * kDeep + threadIdx.x % 4 * 4;
    read<kA>(a, p.a, p.a_outer, p.a_inner, own_row(), p.m, k, p.k);
  }
  __device__ __forceinline__ void read_b(int step) {
    const int k = step * kDeep + threadIdx.x % 4 * 4, eighth = threadIdx.x % 32 / 4;
    const int own = kVec == kStored ? eighth % 2 * (kColumns / 2) + eighth / 2 * kVec : eighth * kVec;
    read<kB>(b, p.b, p.b_outer, p.b_inner, column + own, p.n, k, p.k);
  }
  __device__ __forceinline__ void add() {
    const uint32_t of_a[4] = {a[0][0], a[1][0], a[0][1], a[1][1]};
#pragma unroll
    for (int j = 0; j < kVec; ++j) multiply_add<T>(sums[j], of_a, b[j]);
  }

  // Sum number e of the thread's row r, in the order of columns, but those from kStored on may lie further on.
  __device__ __forceinline__ float sum(int r, int e) const { return sums[e % kVec][2 * r + e / kVec]; }

  // Stores kCount sums of the thread's row r, from number e on.
  template <int kCount>
  __device__ __forceinline__ void store(int r, int e, const float* values) const {
    const int i = own_row() + r;
    const int j = column + threadIdx.x % 4 * kStored + e / kStored * (kColumns / 2) + e % kStored;
    if (i >= p.m || j >= p.n) return;
    T* to = p.c + i * p.c_outer + j;
    if constexpr (kB != Along::kNeither) return store_vector<T, kCount>(to, values);
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (j + v < p.n) to[v] = round_to<T>(values[v]);
    }
  }
};

// Over up to 16 of k: a warp has some tiles, one below the other.
template <class T, int kVec, Along kA, Along kB>
__global__ void __launch_bounds__(kThreads, 3) low_rank_kernel(const __grid_constant__ Operands<T> p) {
  if constexpr (kArchitecture >= 90) {
    const uint32_t below = p.columns.quotient(blockIdx.x), beside = blockIdx.x - below * p.columns.number;
    const int warp = threadIdx.x / 32, warp_below = warp >> p.across, warp_beside = warp - (warp_below << p.across);
    Tile<T, kVec, kA, kB> tile{p};
    tile.row = static_cast<int>((below * (kWarps >> p.across) + warp_below) * p.tiles) * kRows;
    tile.column = static_cast<int>((beside << p.across) + warp_beside) * tile.kColumns;
    const int end = min(tile.row + p.tiles * kRows, p.m);
    if (tile.column >= p.n || tile.row >= end) return;
    tile.read_a(0);
    tile.read_b(0);
#pragma unroll 1
    while (true) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) tile.sums[j][e] = 0;
      }
      tile.add();
      tile.row += kRows;
      const bool more = tile.row < end;
      if (more) tile.read_a(0);  // Those that follow, before these are stored.
      tile.row -= kRows;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int e = 0; e < tile.kOfRow; e += tile.kStored) {
          float values[tile.kStored];
#pragma unroll
          for (int v = 0; v < tile.kStored; ++v) values[v] = tile.sum(r, e + v);
          tile.template store<tile.kStored>(r, e, values);
        }
      }
      if (!more) return;
      tile.row += kRows;
    }
  }
}

// A small product: a block has one tile, and each of its warps some steps of k.
template <class T, int kVec, Along kA, Along kB>
__global__ void __launch_bounds__(kThreads) small_kernel(const __grid_constant__ Operands<T> p) {
  if constexpr (kArchitecture >= 90) {
    __shared__ float4 parts[kWarps][kVec][32];  // A thread's sums are kVec fours.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = (p.k + kDeep - 1) / kDeep;
    const uint32_t below = p.columns.quotient(blockIdx.x), beside = blockIdx.x - below * p.columns.number;
    using Tile = Tile<T, kVec, kA, kB>;
    Tile tile{p, static_cast<int>(below) * kRows, static_cast<int>(beside) * Tile::kColumns};
#pragma unroll 1
    for (int step = warp; step < steps; step += kWarps) {
      tile.read_a(step);
      tile.read_b(step);
      tile.add();
    }
#pragma unroll
    for (int four = 0; four < kVec; ++four) {
      const int r = four / (kVec / 2), e = four % (kVec / 2) * 4;
      parts[warp][four][lane] = {tile.sum(r, e), tile.sum(r, e + 1), tile.sum(r, e + 2), tile.sum(r, e + 3)};
    }
    __syncthreads();
    if (warp >= kVec) return;  // Each of the others adds up a four of every thread's.
    float added[4] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w >= steps) break;
      const float4 part = parts[w][warp][lane];
      added[0] += part.x, added[1] += part.y, added[2] += part.z, added[3] += part.w;
    }
    tile.template store<4>(warp / (kVec / 2), warp % (kVec / 2) * 4, added);
  }
}

constexpr int64_t kFewColumns = 16;  // Of a tile of vectors of two.

// Calls f with how many columns a thread reads at a time, up to kWidest, and how.
template <int kWidest, class T, class Function>
void with_layout(const Product<T, float>& product, const Function& f) {
  constexpr Along kK = Along::kK, kRows = Along::kRows, kNeither = Along::kNeither;
  const int64_t n = product.n;
  const int piece = product.k % 4 == 0 && product.a.inner == 1 && piece_of(product.a) >= 8 ? piece_of(product.b) : 0;
  const bool along_k = product.b.inner == 1;
  if (n <= kFewColumns) {
    if (n % 4 != 0 || piece < (along_k ? 8 : 4)) return f.template operator()<2, kNeither, kNeither>();
    return along_k ? f.template operator()<2, kK, kK>() : f.template operator()<2, kK, kRows>();
  }
  if (n % kWidest == 0 && along_k && piece >= 8) return f.template operator()<kWidest, kK, kK>();
  if (n % kWidest == 0 && !along_k && piece >= 2 * kWidest) return f.template operator()<kWidest, kK, kRows>();
  if (n % 4 == 0 && piece >= 8) {
    return along_k ? f.template operator()<4, kK, kK>() : f.template operator()<4, kK, kRows>();
  }
  f.template operator()<kWidest, kNeither, kNeither>();
}

// Whether direct kernels compute a product of these sizes: a small one, if there are no more tiles than processors hold
// at a time.
inline bool is_low_rank(int64_t k) {
  return k <= kDeep;
}
inline bool is_small(int64_t m, int64_t n, int64_t k, const Device& device) {
  constexpr int64_t kMostSteps = kWarps, kColumns = 2 * kFewColumns, kAtATime = 4;
  const int64_t tiles = ceil_div(m, kRows) * ceil_div(n, n <= kFewColumns ? kFewColumns : kColumns);
  return k <= kMostSteps * kDeep && tiles <= kAtATime * device.processors;
}

template <class T>
void multiply(Launch& launch, const Product<T, float>& product, const Device& device) {
  const int64_t rows = ceil_div(product.m, kRows);
  if (!is_low_rank(product.k)) {
    return with_layout<4>(product, [&]<int kVec, Along kA, Along kB>() {
      const int64_t columns = ceil_div(product.n, 8 * kVec);
      launch(small_kernel<T, kVec, kA, kB>, rows * columns, kThreads, 0, Operands<T>(product, columns, 0, 1));
    });
  }
  with_layout<8>(product, [&]<int kVec, Along kA, Along kB>() {
    int across = 0;
    while ((1 << across) < kWarps && (8 * kVec << across) < product.n) ++across;
    const int64_t columns = ceil_div(product.n, 8 * kVec << across), below = ceil_div(rows, kWarps >> across);
    // A warp reads its columns of b once for some tiles, as long as there is work for all. Not where blocks share
    // sectors of memory, or have little of each row: it is written fastest in order.
    constexpr int64_t kMostTiles = 4, kBlocks = 4, kSector = 32 / sizeof(T), kLongRow = 1 << 16;
    const bool in_order = product.n % kSector != 0 || product.n > kLongRow;
    const int64_t fill = below * columns / (kBlocks * device.processors);
    const int64_t tiles = std::clamp<int64_t>(fill, 1, in_order ? 1 : kMostTiles);
    launch(
        low_rank_kernel<T, kVec, kA, kB>, ceil_div(below, tiles) * columns, kThreads, 0,
        Operands<T>(product, columns, across, tiles));
  });
}

}  // namespace direct
}  // namespace extension_cpp::matmul
