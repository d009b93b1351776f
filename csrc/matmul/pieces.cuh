// Halves whose rows don't begin where the tensor memory accelerator can read: threads copy them to where it would, in
// pieces of 16, 8 or 4 bytes, so that nothing is copied before. Only for the small tiles, whose time is that of
// reading.
#pragma once

#include "hopper.cuh"

namespace extension_cpp::matmul::hopper {

struct Pieces {
  int a, b;  // bytes
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Copies lines of kLineBytes, of which `lines` are there with so many elements each, and swizzles them.
template <int kPiece, int kLines, int kLineBytes, class T>
__device__ __forceinline__ void copy_lines(uint32_t to, const T* from, int64_t stride, int lines, int elements) {
  constexpr int kAcross = kLineBytes / kPiece, kAtATime = kWarpgroup / kAcross;
  const int thread = threadIdx.x % kWarpgroup, byte = thread % kAcross * kPiece;
  const int bytes = min(max(min(elements, kLineBytes) * static_cast<int>(sizeof(T)) - byte, 0), kPiece);
  from += byte / sizeof(T);
#pragma unroll
  for (int i = 0; i < kLines / kAtATime; ++i) {
    const int line = thread / kAcross + i * kAtATime;
    const bool valid = line < lines && bytes > 0;
    copy_async<kPiece>(
        to + line * kLineBytes + swizzled<kLineBytes>(line, byte / 16) * 16 + byte % 16,
        valid ? from + line * stride : nullptr, valid ? bytes : 0);
  }
}

// Copies the rows from `row` on, over a step of k from `k` on, as boxes of the tensor memory accelerator lie.
template <int kRows, int kK, int kLineBytes, class T>
__device__ __forceinline__ void copy_rows(
    uint32_t to, const Factor<T>& factor, bool transposed, int piece, int row, int64_t rows, int k, int64_t depth) {
  constexpr int kBox = kLineBytes / sizeof(T);
  const T* from = factor.data + row * factor.outer + k * factor.inner;
  const int rows_left = static_cast<int>(rows) - row, k_left = static_cast<int>(depth) - k;
  auto copy = [&]<int kPiece>(std::integral_constant<int, kPiece>) {
    if (!transposed) return copy_lines<kPiece, kRows, kRow>(to, from, factor.outer, rows_left, k_left);
#pragma unroll
    for (int r = 0; r < kRows; r += kBox) {
      copy_lines<kPiece, kK, kLineBytes>(to + r * kRow, from + r, factor.inner, k_left, rows_left - r);
    }
  };
  if (piece == 16) return copy(std::integral_constant<int, 16>());
  if (piece == 8) return copy(std::integral_constant<int, 8>());
  copy(std::integral_constant<int, 4>());
}

// What the threads that copy do. A stage is given to those who compute once its copies are done, while others go on.
template <class H>
__device__ __forceinline__ void copy_stages(
    const Product<typename H::T, float>& product, Layouts layouts, Pieces pieces, const Role<H>& role) {
  const Stages& stages = role.stages;
  Tiles<H> tiles = role.tiles;
  Turn turn{stages.memory}, done{stages.memory};
  auto give = [&] {
    make_visible_to_accelerator();  // And to wgmma, which reads in the same way.
    arrive(stages.full(done.stage));
    done.next();
  };
  auto run = [&]<int kOnTheirWay>(std::integral_constant<int, kOnTheirWay>) {
    int started = 0;  // but not given
    do {
      for (int step = 0; step < tiles.steps; ++step) {
        wait_barrier(stages.empty(turn.stage), turn.parity ^ 1);
        const uint32_t to = stages.start + turn.stage * H::kStageBytes;
        const int k = (tiles.begin + step) * H::kK;
        copy_rows<H::kM, H::kK, kRow>(
            to, product.a, layouts.a.transposed, pieces.a, tiles.row, product.m, k, product.k);
        copy_rows<H::kN, H::kK, H::kRowBytesB>(
            to + H::kBytesA, product.b, layouts.b.transposed, pieces.b, tiles.column, product.n, k, product.k);
        commit_copies();
        turn.next();
        if (started < kOnTheirWay) {
          ++started;
        } else {
          wait_for_copies<kOnTheirWay>();
          give();
        }
      }
    } while (tiles.next());
    wait_for_copies<0>();
    for (; started > 0; --started) give();
  };
  // A stage comes back once the one after it was given too. So there are two more, or as many as a block has steps.
  constexpr int kFew = 2, kMany = 6;
  static_assert(kSharedBytes / H::kBlocks / H::kStageBytes >= kFew + 2);
  if (stages.memory.stages >= kMany + 2) return run(std::integral_constant<int, kMany>());
  run(std::integral_constant<int, kFew>());
}

#endif

template <class H>
__global__ void __launch_bounds__(H::kThreads, H::kBlocks) pieces_kernel(
    const __grid_constant__ TileOrder order, const __grid_constant__ Memory memory,
    const __grid_constant__ Layouts layouts, const __grid_constant__ Product<typename H::T, float> product,
    Pieces pieces) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kAlignment) unsigned char shared[];
  start_kernel_behind();
  const Role<H> role(shared, memory, order);
  role.begin([] {}, kWarpgroup);
  if (role.computes()) {
    consume(product, nullptr, layouts, role);  // Memory for boxes would be the L1 cache's, where lines are read again.
  } else {
    wait_for_kernel_before();
    copy_stages(product, layouts, pieces, role);
  }
  role.end();
#endif
}

template <class H>
void multiply_pieces(
    Launch& launch, const Product<typename H::T, float>& product, const Tiling& tiling, int processors) {
  static_assert(H::kCluster == 1);
  const Layouts layouts{Layout::of(product.a, product.m), Layout::of(product.b, product.n)};
  launch_tiles<H>(
      launch, pieces_kernel<H>, tiling, processors, product.partial != nullptr, 0, layouts, product,
      Pieces{piece_of(product.a), piece_of(product.b)});
}

// What multiplies in pieces with tiles of a shape, if anything does.
template <class T>
auto run_of_pieces(int shape) {
  constexpr int kSmall = tile_of(64, 64), kTall = tile_of(128, 64), kNarrow = tile_of(64, 32);
  constexpr decltype(&multiply_pieces<Hopper<T, kSmall>>) kNone = nullptr;
  return shape == kNarrow  ? multiply_pieces<Hopper<T, kNarrow>>
         : shape == kSmall ? multiply_pieces<Hopper<T, kSmall>>
         : shape == kTall  ? multiply_pieces<Hopper<T, kTall>>
                           : kNone;
}

}  // namespace extension_cpp::matmul::hopper
