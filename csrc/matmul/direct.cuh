// The product of halves or of float64 over few k, or of few multiply-adds, on tensor cores by mma.sync: warps read both
// factors straight into registers. Hopper.
//
// Two numbers: over 16 of k, 16 rows by 64 columns of halves take 16,384 multiply-adds and 2.5 KB, most of which other
// warps read as well, and 2 KB are stored. So the product takes as long as that; or if it is small, as long as one read
// and as fetching the instructions, some fifty cycles for every eight that run once: stages in shared memory, and what
// is asked about layouts at run time, would double that.
#pragma once

#include "dmma.cuh"
#include "mma.cuh"

namespace extension_cpp::matmul {
namespace direct {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 16, kDeep = 16;  // of an instruction: rows, and of k

// How threads read a factor: in vectors along k or along rows, or one by one.
enum class Along { kK, kRows, kNeither };

template <class T>
constexpr bool kHalf = sizeof(T) == 2;

// As it is read, and summed; and four of k, as an instruction takes them.
template <class T>
using Element = std::conditional_t<kHalf<T>, uint16_t, T>;
template <class T>
using Sum = typename Compute<T>::type;
template <class T>
using Four = std::conditional_t<kHalf<T>, uint32_t[2], T[4]>;

template <class T>
struct Operands {
  const Element<T>*a, *b;
  T* c;
  int64_t a_outer, a_inner, b_outer, b_inner, c_outer;
  int m, n, k;
  Divisor columns;    // how many blocks lie side by side
  int across, tiles;  // the logarithm of how many warps of a block do, and how many tiles of rows a warp has

  Operands(const Product<T, Sum<T>>& product, int64_t columns, int across, int64_t tiles)
      : a(reinterpret_cast<const Element<T>*>(product.a.data)),
        b(reinterpret_cast<const Element<T>*>(product.b.data)),
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
template <class T, Along kAlong, int kCount>
__device__ __forceinline__ void read(
    Four<T> (&to)[kCount], const Element<T>* data, int64_t outer, int64_t inner, int row, int rows, int k, int depth) {
  const Element<T>* from = data + row * outer + k * inner;
  if constexpr (kAlong == Along::kK) {
    using Word = std::conditional_t<kHalf<T>, uint2, double2>;
    constexpr int kOfWord = sizeof(Word) / sizeof(T);
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
#pragma unroll
      for (int e = 0; e < 4; e += kOfWord) {
        Word word{};
        if (row + r < rows && k < depth) word = *reinterpret_cast<const Word*>(from + r * outer + e);
        memcpy(to[r] + e, &word, sizeof(word));
      }
    }
  } else if constexpr (kAlong == Along::kRows) {
    using Vector = Words<kCount * sizeof(T)>;
    std::conditional_t<kHalf<T>, uint32_t[kCount / 2], T[kCount]> vectors[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      Vector vector{};
      if (row < rows && k + e < depth) vector = *reinterpret_cast<const Vector*>(from + e * inner);
      memcpy(vectors[e], &vector, sizeof(vector));
    }
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      if constexpr (kHalf<T>) {
        constexpr int kLow = 0x5410, kHigh = 0x7632;
        const int which = r % 2 == 0 ? kLow : kHigh;
        to[r][0] = __byte_perm(vectors[0][r / 2], vectors[1][r / 2], which);
        to[r][1] = __byte_perm(vectors[2][r / 2], vectors[3][r / 2], which);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[r][e] = vectors[e][r];
      }
    }
  } else {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      Element<T> elements[4] = {};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (row + r < rows && k + e < depth) elements[e] = from[r * outer + e * inner];
      }
      memcpy(to[r], elements, sizeof(elements));
    }
  }
}

// sums += a * b, of two rows of a and a column of b a thread.
template <class T>
__device__ __forceinline__ void multiply_add(Sum<T> (&sums)[4], const Four<T> (&a)[2], const Four<T>& b) {
  if constexpr (kHalf<T>) {
    const uint32_t of_a[4] = {a[0][0], a[1][0], a[0][1], a[1][1]};
    matmul::multiply_add<T>(sums, of_a, b);
  } else {
    const T of_a[8] = {a[0][0], a[1][0], a[0][1], a[1][1], a[0][2], a[1][2], a[0][3], a[1][3]};
    matmul::multiply_add<kDeep>(sums, of_a, b);
  }
}

// A warp's tile of 16 rows by 8 * kVec columns. Which rows, columns and k's an instruction takes for its first, second
// and so on is as well any other order: here a thread has two neighbouring rows, four neighbours of k, and reads kVec
// neighbouring columns. Neighbouring threads store vectors side by side.
template <class T, int kVec, Along kA, Along kB>
struct Tile {
  static constexpr int kColumns = 8 * kVec, kOfRow = 2 * kVec;  // of the tile, and sums that a thread has of a row
  static constexpr int kStored = std::max(kVec, kHalf<T> ? 4 : 2);
  static constexpr int kStaged = kColumns + 8 / sizeof(T);  // Neighbouring rows lie in different banks.

  const Operands<T>& p;
  int row, column;  // of the tile
  Four<T> a[2], b[kVec];
  Sum<T> sums[kVec][4];

  __device__ __forceinline__ int own_row() const { return row + threadIdx.x % 32 / 4 * 2; }

  // Of the tile, or so many rows below.
  __device__ __forceinline__ void read_a(int step, int below = 0) {
    const int k = step * kDeep + threadIdx.x % 4 * 4;
    read<T, kA>(a, p.a, p.a_outer, p.a_inner, own_row() + below, p.m, k, p.k);
  }
  __device__ __forceinline__ void read_b(int step) {
    const int k = step * kDeep + threadIdx.x % 4 * 4, eighth = threadIdx.x % 32 / 4;
    const int own = kVec == kStored ? eighth % 2 * (kColumns / 2) + eighth / 2 * kVec : eighth * kVec;
    read<T, kB>(b, p.b, p.b_outer, p.b_inner, column + own, p.n, k, p.k);
  }
  __device__ __forceinline__ void add() {
#pragma unroll
    for (int j = 0; j < kVec; ++j) multiply_add<T>(sums[j], a, b[j]);
  }

  // Sum number e of the thread's row r, in the order of columns, but those from kStored on may lie further on.
  __device__ __forceinline__ Sum<T> sum(int r, int e) const { return sums[e % kVec][2 * r + e / kVec]; }

  __device__ __forceinline__ int column_of(int e) const {
    return threadIdx.x % 4 * kStored + e / kStored * (kColumns / 2) + e % kStored;
  }

  // Stores the warp's sums where rows don't begin with a vector: through shared memory, as writing elements that don't
  // lie side by side takes many times as long.
  __device__ __forceinline__ void store_elements(Element<T> (*staged)[kStaged]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int e = 0; e < kOfRow; ++e) {
        const T rounded = round_to<T>(sum(r, e));
        memcpy(&staged[own_row() - row + r][column_of(e)], &rounded, sizeof(T));
      }
    }
    __syncwarp();
    auto* const c = reinterpret_cast<Element<T>*>(p.c);
    constexpr int kAtOnce = kHalf<T> ? 2 : 1;  // a word of halves, which a row may begin within
    const int columns = min(kColumns, p.n - column);
#pragma unroll 4
    for (int at = threadIdx.x % 32; at < kRows * kColumns / kAtOnce; at += 32) {
      const int i = at / (kColumns / kAtOnce);
      if (row + i >= p.m) break;
      Element<T>* const to = c + (row + i) * p.c_outer + column;
      const int before = kHalf<T> ? reinterpret_cast<uintptr_t>(to) / sizeof(T) % 2 : 0;
      const int j = at % (kColumns / kAtOnce) * kAtOnce + before;
      if (before != 0 && j == before) to[0] = staged[i][0];
      if constexpr (kHalf<T>) {
        if (j + 1 < columns) {
          *reinterpret_cast<uint32_t*>(to + j) = staged[i][j] | uint32_t{staged[i][j + 1]} << 16;
          continue;
        }
      }
      if (j < columns) to[j] = staged[i][j];
    }
    __syncwarp();
  }

  // Stores kCount sums of the thread's row r, from number e on.
  template <int kCount>
  __device__ __forceinline__ void store(int r, int e, const Sum<T>* values) const {
    const int i = own_row() + r, j = column + column_of(e);
    if (i >= p.m || j >= p.n) return;
    T* to = p.c + i * p.c_outer + j;
    if (kB != Along::kNeither || p.n % kCount == 0) {
      store_vector<T, kCount>(to, values);
    } else {
#pragma unroll
      for (int v = 0; v < kCount; ++v) {
        if (j + v < p.n) to[v] = round_to<T>(values[v]);
      }
    }
  }
};

// Over up to 16 of k: a warp has some tiles, one below the other.
template <class T, int kVec, Along kA, Along kB>
__global__ void __launch_bounds__(kThreads, 3) low_rank_kernel(const __grid_constant__ Operands<T> p) {
  if constexpr (kArchitecture >= 90) {
    const uint32_t row = p.columns.quotient(blockIdx.x), column = blockIdx.x - row * p.columns.number;
    const int warp = threadIdx.x / 32, row_of_warp = warp >> p.across,
              column_of_warp = warp - (row_of_warp << p.across);
    Tile<T, kVec, kA, kB> tile{p};
    tile.row = static_cast<int>((row * (kWarps >> p.across) + row_of_warp) * p.tiles) * kRows;
    tile.column = static_cast<int>((column << p.across) + column_of_warp) * tile.kColumns;
    const int end = min(tile.row + p.tiles * kRows, p.m);
    __shared__ Element<T> staged[kB == Along::kNeither ? kWarps * kRows : 1][tile.kStaged];
    if (tile.column >= p.n || tile.row >= end) return;
    tile.read_a(0);
    tile.read_b(0);
#pragma unroll 1
    for (bool more = true; more; tile.row += kRows) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) tile.sums[j][e] = 0;
      }
      tile.add();
      more = tile.row + kRows < end;
      if (more) tile.read_a(0, kRows);  // Before these are stored.
      if (kB == Along::kNeither && p.n % tile.kStored != 0) {
        tile.store_elements(staged + warp * kRows);
        continue;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int e = 0; e < tile.kOfRow; e += tile.kStored) {
          Sum<T> values[tile.kStored];
#pragma unroll
          for (int v = 0; v < tile.kStored; ++v) values[v] = tile.sum(r, e + v);
          tile.template store<tile.kStored>(r, e, values);
        }
      }
    }
  }
}

// A small product: a block has one tile, and each of its warps some steps of k.
template <class T, int kVec, Along kA, Along kB>
__global__ void __launch_bounds__(kThreads) small_kernel(const __grid_constant__ Operands<T> p) {
  if constexpr (kArchitecture >= 90) {
    // A thread's sums, in vectors of 16 bytes.
    constexpr int kOfVector = 16 / sizeof(Sum<T>), kVectors = kVec * 4 / kOfVector, kVectorsOfRow = kVectors / 2;
    struct alignas(16) Vector {
      Sum<T> sums[kOfVector];
    };
    static_assert(kVectors <= kWarps);
    __shared__ Vector parts[kWarps][kVectors][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = (p.k + kDeep - 1) / kDeep;
    const uint32_t row = p.columns.quotient(blockIdx.x), column = blockIdx.x - row * p.columns.number;
    using Tile = Tile<T, kVec, kA, kB>;
    Tile tile{p, static_cast<int>(row) * kRows, static_cast<int>(column) * Tile::kColumns};
#pragma unroll 1
    for (int step = warp; step < steps; step += kWarps) {
      tile.read_a(step);
      tile.read_b(step);
      tile.add();
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Vector vector;
#pragma unroll
      for (int e = 0; e < kOfVector; ++e) {
        vector.sums[e] = tile.sum(v / kVectorsOfRow, v % kVectorsOfRow * kOfVector + e);
      }
      parts[warp][v][lane] = vector;
    }
    __syncthreads();
    if (warp >= kVectors) return;  // Each of the others adds up one vector of every thread's.
    Vector added{};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w >= steps) break;
      const Vector part = parts[w][warp][lane];
#pragma unroll
      for (int e = 0; e < kOfVector; ++e) added.sums[e] += part.sums[e];
    }
    tile.template store<kOfVector>(warp / kVectorsOfRow, warp % kVectorsOfRow * kOfVector, added.sums);
  }
}

constexpr int64_t kFewColumns = 16;  // Of the narrowest tile.

// Calls f with how many columns a thread reads at a time, up to kWidest, and how.
template <int kWidest, class T, class Function>
void with_layout(const Product<T, Sum<T>>& product, const Function& f) {
  constexpr Along kK = Along::kK, kRows = Along::kRows, kNeither = Along::kNeither;
  constexpr int kLeast = kHalf<T> ? 8 : 16;  // bytes that threads read along k
  constexpr int kPair = 2 * static_cast<int>(sizeof(T));
  const int64_t n = product.n;
  const bool fours = product.k % 4 == 0, along_k = product.b.inner == 1;
  const int piece_a = piece_of(product.a), piece_b = piece_of(product.b);
  const bool rows_a = product.a.inner != 1 && product.m % 2 == 0 && piece_a >= kPair;
  const bool vectors_a = rows_a || (fours && product.a.inner == 1 && piece_a >= kLeast);
  const int piece = vectors_a && (fours || !along_k) ? piece_b : 0;
  const auto call = [&]<int kVec>(std::integral_constant<int, kVec>) {
    if (rows_a) return along_k ? f.template operator()<kVec, kRows, kK>() : f.template operator()<kVec, kRows, kRows>();
    along_k ? f.template operator()<kVec, kK, kK>() : f.template operator()<kVec, kK, kRows>();
  };
  if (!kHalf<T> || n <= kFewColumns) {
    if (n % (kHalf<T> ? 4 : 2) != 0 || piece < (along_k ? kLeast : kPair)) {
      return f.template operator()<2, kNeither, kNeither>();
    }
    return call(std::integral_constant<int, 2>());
  }
  if constexpr (kHalf<T>) {
    if (n % kWidest == 0 && piece >= (along_k ? kLeast : 2 * kWidest)) {
      return call(std::integral_constant<int, kWidest>());
    }
    if (n % 4 == 0 && piece >= kLeast) return call(std::integral_constant<int, 4>());
    f.template operator()<kWidest, kNeither, kNeither>();
  }
}

// Whether a product is over few k, or of no more tiles than the processors hold at a time, and a few steps for a warp.
inline bool is_low_rank(int64_t k) {
  return k <= kDeep;
}
template <class T>
bool is_small(int64_t m, int64_t n, int64_t k, const Device& device) {
  constexpr int64_t kMostSteps = kWarps, kAtATime = kHalf<T> ? 4 : 2;
  const int64_t columns = kHalf<T> && n > kFewColumns ? 2 * kFewColumns : kFewColumns;
  return k <= kMostSteps * kDeep && ceil_div(m, kRows) * ceil_div(n, columns) <= kAtATime * device.processors;
}

// Of a result whose rows lie together.
template <class T>
void multiply(Launch& launch, const Product<T, Sum<T>>& product, const Device& device) {
  const int64_t rows = ceil_div(product.m, kRows);
  if (!is_low_rank(product.k)) {
    return with_layout<4>(product, [&]<int kVec, Along kA, Along kB>() {
      const int64_t columns = ceil_div(product.n, 8 * kVec);
      launch(small_kernel<T, kVec, kA, kB>, rows * columns, kThreads, 0, Operands<T>(product, columns, 0, 1));
    });
  }
  with_layout<8>(product, [&]<int kVec, Along kA, Along kB>() {
    constexpr int64_t kBlocks = 4, kSector = 32 / sizeof(T), kLongRow = 1 << 16;
    const bool is_long = product.n > kLongRow;
    const int most_across = is_long && !kHalf<T> ? 2 : kWarps;
    int across = 0;
    while ((1 << across) < most_across && (8 * kVec << across) < product.n) ++across;
    const int64_t columns = ceil_div(product.n, 8 * kVec << across), below = ceil_div(rows, kWarps >> across);
    // A warp reads its columns of b once for some tiles, as long as there is work for all. Where neighbours share
    // sectors of memory, it is written fastest in order.
    const bool in_order = product.n % kSector != 0 && kB != Along::kNeither;
    const int64_t most = in_order ? 1 : !is_long ? 4 : kHalf<T> ? 2 : 8;
    const int64_t tiles = std::clamp<int64_t>(below * columns / (kBlocks * device.processors), 1, most);
    launch(
        low_rank_kernel<T, kVec, kA, kB>, ceil_div(below, tiles) * columns, kThreads, 0,
        Operands<T>(product, columns, across, tiles));
  });
}

}  // namespace direct
}  // namespace extension_cpp::matmul
