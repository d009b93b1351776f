// bfloat16 on processors with AMX: one instruction multiplies 16 rows of 32 elements with 32 rows of 16, and adds the
// products to 16 by 16 sums in float32. Of those of an element it adds up the ones of even places and those of odd ones
// before it adds both to what is there. Further k's are added in ascending order, so that the bits don't depend on how
// the factors are cut. It takes subnormal numbers for zero, as the instruction for pairs does.
#pragma once

#include "packing.h"

#if defined(EXTENSION_CPP_PAIRS) && defined(EXTENSION_CPP_TRANSPOSE) && defined(__linux__)
#define EXTENSION_CPP_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace extension_cpp::matmul {

constexpr int kTile = 16;         // rows of a tile, and pairs or sums in a row of it
constexpr int kSide = 2 * kTile;  // rows of a, or columns of b, in a strip

// Whether this process may use tiles. It has to ask, as signals then need more room to save registers to.
inline bool has_tiles() {
  static const bool found = [] {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return simd::level() == simd::Level::kAmx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return found;
}

// The shapes of all tiles, as the processor reads them.
struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr Shapes() {
    for (int i = 0; i < 8; ++i) bytes[i] = kTile * sizeof(Pair), rows[i] = kTile;
  }
};
inline constexpr Shapes kShapes;

// The tiles of this thread, as long as it lives: released, they cost a switch to another thread nothing.
class Tiles {
 public:
  __attribute__((target("amx-tile"), noinline)) Tiles() { _tile_loadconfig(&kShapes); }
  __attribute__((target("amx-tile"), noinline)) ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// A strip of a: tiles of its first rows and of the others take turns.
inline Pair* tile_of(Pair* packed, int64_t i, int64_t tile) {
  return packed + (tile * kSide + i) * kTile;
}

// Rows of a whose elements lie next to each other; zero behind the last, and up to the next whole tile.
__attribute__((target("avx512f,avx512bw"))) inline void pack_rows(
    const Factor<bfloat16>& from, int64_t rows, int64_t terms, Pair* to) {
  constexpr int64_t kTerms = 2 * kTile;
  for (int64_t i = 0; i < kSide; ++i) {
    const bfloat16* const row = from.data + i * from.outer;
    for (int64_t p = 0; p < terms; p += kTerms) {
      const int64_t left = i < rows ? terms - p : 0;
      const auto there = static_cast<__mmask32>(left < kTerms ? (1u << left) - 1 : -1);
      _mm512_store_si512(tile_of(to, i, p / kTerms), _mm512_maskz_loadu_epi16(there, row + p));
    }
  }
}

// The same for any rows.
inline void pack_tiles(const Factor<bfloat16>& from, int64_t rows, int64_t terms, Pair* to) {
  if (from.inner == 1) return pack_rows(from, rows, terms, to);
  simd::run_apart<64>([=] {
    using Packed = Packing<bfloat16, Pair>;
    constexpr int64_t kTerms = 2 * kTile;
    const int64_t tiles = (terms + kTerms - 1) / kTerms;
    int64_t first = 0;  // the rows that are not written yet
    for (; from.outer == 1 && first + kTile <= rows; first += kTile) {
      for (int64_t tile = 0; tile < tiles; ++tile) {
        Vector<Pair, 64> block[kTile] = {};
        const int64_t left = terms - tile * kTerms;
        for (int p = 0; p < kTile && 2 * p < left; ++p) {
          const bfloat16* const pairs = from.data + first + (tile * kTerms + 2 * p) * from.inner;
          if (2 * p + 1 < left) {
            Packed::ones<kTile>(pairs, from.inner, reinterpret_cast<Pair*>(&block[p]));
          } else {
            for (int i = 0; i < kTile; ++i) block[p][i] = Packed::last(pairs + i);
          }
        }
        transpose<kTile>(block, std::make_integer_sequence<int, kTile>());
        std::memcpy(tile_of(to, first, tile), block, sizeof(block));
      }
    }
    for (int64_t i = first; i < kSide; ++i) {
      for (int64_t tile = 0; tile < tiles; ++tile) {
        Pair* const pairs = tile_of(to, i, tile);
        std::fill_n(pairs, kTile, Pair(0));
        if (i >= rows) continue;
        const int64_t left = std::min(terms - tile * kTerms, kTerms);
        const bfloat16* const at = from.data + i * from.outer + tile * kTerms * from.inner;
        for (int64_t p = 0; p < left / 2; ++p) pairs[p] = Packed::one(at + 2 * p * from.inner, from.inner);
        if (left % 2 != 0) pairs[left / 2] = Packed::last(at + (left - 1) * from.inner);
      }
    }
  });
}

// Lines of memory to bring into the second-level cache meanwhile, so many bytes apart.
struct Ahead {
  const char* from;
  int64_t step, lines;
};

// c, or zero, and the products of a strip of a with one of b, in so many rows and columns of c; all of their tiles are
// written.
__attribute__((target("amx-tile,amx-bf16"), noinline)) inline void add_tiles(
    int64_t depth, const Pair* a, const Pair* b, bool add, float* c, int64_t c_step, int64_t rows, int64_t columns,
    const Ahead& ahead) {
  asm volatile("" ::: "memory");  // GCC's intrinsics don't say what they read.
  constexpr int64_t kNext = kTile * kTile, kBytes = kTile * sizeof(Pair);
  const bool two_rows = rows > kTile, two_columns = columns > kTile;
  const int64_t c_bytes = c_step * static_cast<int64_t>(sizeof(float));
  float* const below = c + kTile * c_step;
  constexpr int kAtOnce = 4;
  const char* line = ahead.from;
  int64_t lines = ahead.lines;
  const int64_t step = ahead.step;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (add) {
    _tile_loadd(0, c, c_bytes);
    if (two_columns) _tile_loadd(1, c + kTile, c_bytes);
    if (two_rows) _tile_loadd(2, below, c_bytes);
    if (two_rows && two_columns) _tile_loadd(3, below + kTile, c_bytes);
  }
  for (int64_t p = 0; p < depth; p += kTile, a += 2 * kNext, b += 2 * kNext) {
    // All loads first, which is faster while the other thread of the processor is busy.
    _tile_loadd(4, a, kBytes);
    _tile_loadd(6, b, 2 * kBytes);
    if (two_columns) _tile_loadd(7, b + kTile, 2 * kBytes);
    if (two_rows) _tile_loadd(5, a + kNext, kBytes);
    _tile_dpbf16ps(0, 4, 6);
    if (two_rows) _tile_dpbf16ps(2, 5, 6);
    if (two_columns) _tile_dpbf16ps(1, 4, 7);
    if (two_rows && two_columns) _tile_dpbf16ps(3, 5, 7);
    for (int q = 0; q < kAtOnce && lines > 0; ++q, line += step) __builtin_prefetch(line, 0, 2);
    lines -= kAtOnce;
  }
  _tile_stored(0, c, c_bytes);
  if (two_columns) _tile_stored(1, c + kTile, c_bytes);
  if (two_rows) _tile_stored(2, below, c_bytes);
  if (two_rows && two_columns) _tile_stored(3, below + kTile, c_bytes);
}

// Sums as bfloat16. The instruction that rounds takes subnormal ones for zero, which tiles have done already.
__attribute__((target("avx512f,avx512bw,avx512bf16"))) inline void store_sums(
    const float* sums, int64_t step, int64_t rows, int64_t columns, bfloat16* c, int64_t c_step) {
  const auto there = static_cast<__mmask32>(columns < kSide ? (1u << columns) - 1 : -1);
  for (int64_t r = 0; r < rows; ++r, sums += step, c += c_step) {
    const __m512bh row = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(sums + kTile), _mm512_loadu_ps(sums));
    _mm512_mask_storeu_epi16(c, there, (__m512i)row);
  }
}

// c = a * b in one thread. False if it is wrong, as numbers were taken for zero.
inline bool multiply_in_tiles(
    const Factor<bfloat16>& a, const Factor<bfloat16>& b, int64_t m, int64_t n, int64_t k, bfloat16* c,
    int64_t c_step) {
  // A block of a stays in the second-level cache. Sums over longer k wait in memory, for so many rows.
  constexpr int64_t kBlock = 1 << 18, kSmallB = 1 << 16, kWidth = 2048, kDepth = 1024, kMostRows = 2048;
  const int64_t depth = part_of((k + 1) / 2, kDepth, kTile), width = part_of(n, kWidth, kSide);
  const bool waits = k > 2 * depth;
  const int64_t most_rows = waits ? part_of(m, kMostRows, kSide) : m;
  const int64_t height = part_of(std::min(m, most_rows), kBlock / depth / kSide * kSide, kSide);
  // A block of b that stays in that cache too is packed at once: c is then written row by row.
  const bool small_b = width * depth <= kSmallB;
  const bool kept = small_b || std::min(m, most_rows) > height;  // Strips of b are multiplied with several blocks of a.
  const int64_t at_once = (b.outer == 1 ? 8 : 1) * kSide, slice = b.outer == 1 ? 32 : k;
  // Rows of sums begin at different places of a page.
  const int64_t step = waits ? width + kTile : kSide;
  const int64_t of_a = height * depth, of_b = (kept ? width : std::min(width, at_once)) * depth;
  const int64_t of_sums = (waits ? round_up(std::min(m, most_rows), kSide) : 2 * kSide) * step;
  Scratch scratch(Scratch::bytes<Pair>(of_a) + Scratch::bytes<Pair>(of_b) + Scratch::bytes<float>(of_sums));
  Pair *const packed_a = scratch.take<Pair>(of_a), *const packed_b = scratch.take<Pair>(of_b);
  float* const sums = scratch.take<float>(of_sums);
  const Tiles tiles;
  bool right = true;
  // Sums are stored while the next are computed: they would be waited for.
  struct {
    const float* sums = nullptr;
    int64_t rows = 0, columns = 0;
    bfloat16* to = nullptr;
  } done;
  const auto store = [&] { store_sums(done.sums, step, done.rows, done.columns, done.to, c_step); };
  const auto multiply_block = [&](int64_t i1, int64_t i0, int64_t j0, int64_t p0) {
    const int64_t rows = std::min({height, i1 + most_rows - i0, m - i0}), columns = std::min(width, n - j0);
    const int64_t terms = std::min(2 * depth, k - p0), pairs = (terms + 1) / 2, deep = round_up(pairs, kTile);
    for (int64_t i = 0; i < rows; i += kSide) {
      const Factor<bfloat16> strip{a.data + (i0 + i) * a.outer + p0 * a.inner, a.outer, a.inner};
      pack_tiles(strip, std::min<int64_t>(kSide, rows - i), terms, packed_a + i * deep);
      right = right && !has_subnormal(packed_a + i * deep, kSide * deep);
    }
    const auto strip_of_b = [&](int64_t j) { return packed_b + (kept ? j : j % at_once) * deep; };
    const auto pack_b = [&](int64_t j) {
      Pair* const packed = strip_of_b(j);
      const int64_t end = std::min(j + at_once, columns);
      for (int64_t p = 0; p < terms; p += slice) {
        for (int64_t s = j; s < end; s += kSide) {
          const Factor<bfloat16> strip{b.data + (j0 + s) * b.outer + (p0 + p) * b.inner, b.outer, b.inner};
          pack_strip<kSide, 64>(
              strip, std::min<int64_t>(kSide, end - s), std::min(slice, terms - p),
              packed + (s - j) * deep + p / 2 * kSide);
        }
      }
      for (int64_t s = j; s < end; s += kSide) {
        std::fill_n(packed + (s - j) * deep + pairs * kSide, (deep - pairs) * kSide, Pair(0));
      }
      right = right && !has_subnormal(packed, round_up(end - j, kSide) * deep);
    };
    const auto multiply_strips = [&](int64_t i, int64_t j, const Ahead& ahead) {
      const int64_t rows_of_c = std::min<int64_t>(kSide, rows - i), of_c = std::min<int64_t>(kSide, columns - j);
      float* const to = waits ? sums + (i0 - i1 + i) * step + j : done.sums == sums ? sums + kSide * kSide : sums;
      add_tiles(deep, packed_a + i * deep, strip_of_b(j), p0 > 0, to, step, rows_of_c, of_c, ahead);
      if (p0 + terms < k) return;
      store();
      done = {to, rows_of_c, of_c, c + (i0 + i) * c_step + j0 + j};
    };
    if (small_b) {
      for (int64_t j = 0; i0 == i1 && j < columns; j += at_once) pack_b(j);
      for (int64_t i = 0; i < rows; i += kSide) {
        for (int64_t j = 0; j < columns; j += kSide) multiply_strips(i, j, Ahead{});
      }
    }
    for (int64_t j = 0; !small_b && j < columns; j += kSide) {
      if (i0 == i1 && j % at_once == 0) pack_b(j);
      // The next strip, or where b lies in rows, what of it is packed after all that are packed at once.
      Ahead ahead{reinterpret_cast<const char*>(strip_of_b(j) + deep * kSide), 64, 0};
      if (i0 > i1) {
        ahead.lines = 2 * deep;
      } else if (b.outer == 1 && j + at_once < columns) {
        ahead = {reinterpret_cast<const char*>(b.data + j0 + j + at_once + p0 * b.inner), 2 * b.inner, terms};
      }
      ahead.lines = (ahead.lines * kSide + rows - 1) / rows;  // for each strip of a
      for (int64_t i = 0; i < rows; i += kSide, ahead.from += ahead.lines * ahead.step) multiply_strips(i, j, ahead);
    }
    store();
    done = {};
  };
  for (int64_t i1 = 0; i1 < m; i1 += most_rows) {
    for (int64_t j0 = 0; j0 < n; j0 += width) {
      for (int64_t p0 = 0; p0 < k; p0 += 2 * depth) {
        for (int64_t i0 = i1; i0 < std::min(m, i1 + most_rows); i0 += height) multiply_block(i1, i0, j0, p0);
      }
    }
  }
  return right;
}

}  // namespace extension_cpp::matmul

#else

namespace extension_cpp::matmul {

inline bool has_tiles() {
  return false;
}

}  // namespace extension_cpp::matmul

#endif
