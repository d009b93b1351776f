// bfloat16 on processors that multiply pairs, of few rows: b is as large as all that is multiplied with it, so that
// packing it takes longer than multiplying. It is read where it lies, or, if not in rows, packed a tile at a time.
#pragma once

#include <array>

#include "packing.h"

namespace extension_cpp::matmul {

// A panel of b has so many columns, which are kWide for each tile. So many pairs of its rows, which the first-level
// cache holds, are multiplied with all rows of a at a time.
constexpr int64_t kWide = 16, kPanel = 256, kPairsAtOnce = 32;
constexpr int kFewRows = 16;  // of a strip of a

// Whether b isn't packed as a whole, but a is.
constexpr bool is_few_pairs(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kMostRows = 128, kMostPacked = 1 << 23;
  return m <= kMostRows && n >= kWide && k >= 4 * m && k <= kMostPacked / m;
}

#if defined(EXTENSION_CPP_PAIRS)

// How the numbers of two rows of b become pairs: from rows next to each other, or already so.
struct Order {
  alignas(64) std::array<uint16_t, 2 * kWide> from;
};
constexpr Order kOfRows = [] {
  Order order{};
  for (int i = 0; i < 2 * kWide; ++i) order.from[i] = static_cast<uint16_t>(i / 2 + i % 2 * kWide);
  return order;
}();
constexpr Order kOfPairs = [] {
  Order order{};
  for (int i = 0; i < 2 * kWide; ++i) order.from[i] = static_cast<uint16_t>(i);
  return order;
}();

// For each row of a strip of a: what is at `from`, if anything is, and the products with kWide columns of b's rows, the
// second of each pair at `second`. The sums go to `to`, or are added to what is there. Whether a number of b is
// subnormal.
template <int kRows>
__attribute__((target(EXTENSION_CPP_BF16))) bool add_few(
    int64_t depth, const Pair* a, const bfloat16* b, const bfloat16* second, int64_t b_step, const Order& order,
    const bfloat16* ahead, const float* from, float* to, bool add) {
  const __m512i in_pairs = _mm512_load_si512(order.from.data()), minus_one = _mm512_set1_epi16(-1);
  const __m512i without_sign = _mm512_set1_epi16(0x7fff);
  __m512i least = minus_one;  // of all less one: zero is the greatest
  __m512 of[kRows];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) of[i] = from ? _mm512_load_ps(from + i * kWide) : _mm512_setzero_ps();
  for (int64_t p = 0; p < depth; ++p) {
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
    const __m512i both =
        _mm512_maskz_inserti64x4(0xff, first, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)), 1);
    const __m512i row = _mm512_permutexvar_epi16(in_pairs, both);
    __builtin_prefetch(ahead);
    least = _mm512_min_epu16(least, _mm512_add_epi16(_mm512_and_si512(both, without_sign), minus_one));
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) add_pair(of[i], row, a + i);
    a += kFewRows, b += 2 * b_step, second += 2 * b_step, ahead += 2 * b_step;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    float* const at = to + i * kWide;
    _mm512_store_ps(at, add ? _mm512_add_ps(of[i], _mm512_load_ps(at)) : of[i]);
  }
  return _mm512_cmplt_epu16_mask(least, _mm512_set1_epi16(0x7f)) != 0;
}

// c = a * b in one thread, where is_few_pairs. Of b, rows are read where they lie; else a tile is packed right before
// its products. The sums of blocks of kDepth k's are added up. False if it is wrong, as numbers were taken for zero.
template <int64_t kDepth, class C>
bool multiply_few_pairs(
    const Factor<bfloat16>& a, const Factor<bfloat16>& b, int64_t m, int64_t n, int64_t k, C* c, int64_t c_step) {
  constexpr int64_t kSlice = 2 * kPairsAtOnce, kTile = kFewRows * kWide, kLine = 32, kBehind = 16;
  constexpr bfloat16 kZeros[kWide] = {};
  const bool lies = b.outer == 1;
  const int64_t panel = lies ? kPanel : kWide, pairs = (k + 1) / 2, strips = (m + kFewRows - 1) / kFewRows;
  const int64_t of_strip = pairs * kFewRows, of_sums = strips * kFewRows * panel;
  Scratch scratch(Scratch::bytes<Pair>(strips * of_strip + kBehind) + 2 * Scratch::bytes<float>(of_sums));
  Pair* const packed = scratch.take<Pair>(strips * of_strip + kBehind);
  float *const all = scratch.take<float>(of_sums), *const of_block = scratch.take<float>(of_sums);
  alignas(64) Pair packed_b[kPairsAtOnce * kWide + kBehind];
  const auto* const halves_of_b = reinterpret_cast<const bfloat16*>(packed_b);
  for (int64_t i = 0; i < m; i += kFewRows) {
    const Factor<bfloat16> strip{a.data + i * a.outer, a.outer, a.inner};
    pack_strip<kFewRows, 64>(strip, std::min<int64_t>(kFewRows, m - i), k, packed + i * pairs);
  }
  bool wrong = has_subnormal(packed, strips * of_strip);
  for (int64_t j = 0; j < n && !wrong; j += panel) {
    const int64_t width = std::min(panel, n - j), tiles = (width + kWide - 1) / kWide;
    const auto column = [&](int64_t tile) { return std::min(j + tile * kWide, n - kWide); };  // Some of them twice.
    for (int64_t p = 0; p < k; p += kSlice) {
      const int64_t terms = std::min(kSlice, k - p), last = terms / 2;
      const bfloat16* const next = p + kSlice < k ? b.data + (p + kSlice) * b.inner + j : b.data + j + kPanel;
      const bool odd = terms % 2 != 0, begins = p % kDepth == 0, ends = p + terms == k || (p + terms) % kDepth == 0;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const bfloat16* const at = b.data + column(tile) * b.outer + p * b.inner;
        const bfloat16* const ahead = next + tile % 2 * b.inner + tile / 2 * kLine;
        if (!lies) pack_strip<kWide, 64>(Factor<bfloat16>{at, b.outer, b.inner}, kWide, terms, packed_b);
        for (int64_t i = 0; i < m; i += kFewRows) {
          const int64_t height = m - i, first = i * panel + tile * kTile;
          auto* const add_rows = height <= 4    ? add_few<4>
                                 : height <= 8  ? add_few<8>
                                 : height <= 12 ? add_few<12>
                                                : add_few<16>;
          const Pair* const of_a = packed + i * pairs + p / 2 * kFewRows;
          const float* const from = begins ? nullptr : of_block + first;
          float* const to = (ends ? all : of_block) + first;
          const bool add_up = ends && p >= kDepth;
          if (!lies) {
            wrong |= add_rows(
                last + odd, of_a, halves_of_b, halves_of_b + kWide, kWide, kOfPairs, halves_of_b, from, to, add_up);
          } else if (!odd) {
            wrong |= add_rows(last, of_a, at, at + b.inner, b.inner, kOfRows, ahead, from, to, add_up);
          } else {
            float* const of_pairs = of_block + first;
            wrong |= add_rows(last, of_a, at, at + b.inner, b.inner, kOfRows, ahead, from, of_pairs, false);
            const bfloat16* const row = at + 2 * last * b.inner;
            wrong |= add_rows(1, of_a + last * kFewRows, row, kZeros, 0, kOfRows, row, of_pairs, to, add_up);
          }
        }
      }
    }
    for (int64_t tile = 0; tile < tiles; ++tile) {
      for (int64_t i = 0; i < m; i += kFewRows) {
        const float* const from = all + i * panel + tile * kTile;
        C* const to = c + i * c_step + column(tile);
        const int64_t height = std::min<int64_t>(kFewRows, m - i);
        if constexpr (std::is_same_v<C, float>) {
          for (int64_t r = 0; r < height; ++r) std::copy_n(from + r * kWide, kWide, to + r * c_step);
        } else {
          store_rows(to, c_step, from, kWide, height, kWide);
        }
      }
    }
  }
  return !wrong;
}

#endif

}  // namespace extension_cpp::matmul
