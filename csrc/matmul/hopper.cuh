// The product of float16 or bfloat16 on Hopper: the tensor memory accelerator (TMA) copies tiles into shared memory,
// and warpgroups of 128 threads multiply them where they lie (wgmma). How stages and tiles pass from thread to thread
// holds for float32 and float64 too.
//
// Two numbers: a tile of 128 by 256 takes 65,536 operations and 768 bytes a step of k; at the chip's arithmetic rate
// that is more than the L2 cache gives, so that two blocks share a tile of b.
//
// A block has one to four warpgroups that compute, 64 rows each, and another, of which one thread keeps the stages
// filled, or all do (pieces.cuh).
// `full` and `empty` barriers pass a stage from one to the other and back. Blocks stay, and take tiles in turn, whose
// results the accelerator stores while they go on; or those of a cluster take parts of k of one tile.
#pragma once

#include "cluster.cuh"
#include "wgmma.cuh"

namespace extension_cpp::matmul::hopper {

constexpr int kWarp = 32, kWarpgroup = 128, kRow = 128;  // threads, and bytes of a row of a stage
constexpr int kOfCopying = 40;                           // registers that threads keep which only copy

template <class T>
constexpr int kInRow = kRow / sizeof(T);  // elements of a row of a stage

// A tile of m by n, how many blocks of a cluster share what they read of b, how many blocks a multiprocessor holds, how
// many boxes of the result a warpgroup stores at a time, and multiply-adds a nanosecond of all of them.
struct Tile {
  int m, n, cluster, blocks, boxes;
  double rate;
};
constexpr Tile kTiles[] = {
    {128, 256, 2, 1, 2, 3456}, {128, 256, 1, 1, 2, 3339}, {128, 128, 1, 1, 2, 2785}, {64, 64, 1, 3, 1, 2643},
    {128, 64, 1, 2, 1, 2837},  {128, 128, 2, 1, 2, 3244}, {64, 128, 2, 2, 2, 2183},  {192, 192, 2, 1, 1, 3309},
    {256, 32, 1, 1, 1, 1969},  {64, 32, 1, 4, 1, 1280},   {128, 16, 1, 2, 1, 854},   {64, 16, 1, 4, 1, 638},
};
constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);
constexpr int kMostOfNarrow = 32;  // columns of tiles that only products with no more columns have, or rows

// The tile of m by n whose blocks work alone.
constexpr int tile_of(int m, int n) {
  int at = 0;
  while (kTiles[at].m != m || kTiles[at].n != n || kTiles[at].cluster != 1) ++at;
  return at;
}

// The swizzle repeats every 1,024 bytes. All stages of a multiprocessor take no more than so many bytes: with one more
// of them, products over long k take up to 9% longer.
constexpr int kAlignment = 1024, kMostStages = 16, kSharedBytes = 208 * 1024;
constexpr int kBarrierBytes = (2 * kMostStages + 1) * 8;

template <class T_, int kTile>
struct Hopper {
  using T = T_;
  using V = float;
  static constexpr int kM = kTiles[kTile].m, kN = kTiles[kTile].n, kK = kInRow<T>, kCluster = kTiles[kTile].cluster;
  static constexpr int kComputing = kM / 64 * kWarpgroup, kThreads = kComputing + kWarpgroup;
  static constexpr int kGroup = kWarpgroup, kSums = kN / 2;  // threads that read together, and sums of one
  static constexpr int kRegisters = 0;                       // as many as a thread starts with
  static constexpr int kBytesA = kM * kRow, kBytesB = kN * kRow, kStageBytes = kBytesA + kBytesB;
  static constexpr int kBlocks = kTiles[kTile].blocks;
  // A transposed factor comes in boxes of 64 rows, or of as many as there are.
  static constexpr int kRowBytesB = std::min<int>(kN * sizeof(T), kRow);
  static_assert(kN == 16 || kN == 32 || kN % kInRow<T> == 0);
  // A warpgroup stores its 64 rows of the result in boxes, which lie behind the stages until they are on their way.
  static constexpr int kBox = std::min(kN, kInRow<T>), kBoxBytes = 64 * kBox * sizeof(T);
  static constexpr int kBoxes = kTiles[kTile].boxes, kOutBytes = kComputing / kWarpgroup * kBoxes * kBoxBytes;
  static_assert(kN / kBox % kBoxes == 0);
  // With as many stages as without boxes. Of each block, 1 KiB is the system's.
  static_assert(
      (kSharedBytes / kBlocks / kStageBytes * kStageBytes + kOutBytes + kBarrierBytes + 1024) * kBlocks <= 228 * 1024);
};

// The blocks of a cluster copy a share of b each: of its rows, or if it is transposed and those don't fill boxes, of k.
template <class H>
constexpr int kShare = H::kN / H::kCluster;
template <class H>
constexpr bool kSharesK = H::kCluster == 2 && kShare<H> % kInRow<typename H::T> != 0;

// The stages of a block, in so many bytes of shared memory.
struct Memory {
  int bytes, stages;
};

// A factor is transposed where its rows (of m or n) lie side by side, not its k's; `whole` if these then fill rows of a
// stage, so that one copy takes several; and streamed `once` if one tile reads each element.
struct Layout {
  bool transposed = false, whole = false, once = false;

  template <class T>
  static Layout of(const Factor<T>& factor, int64_t rows) {
    const bool transposed = factor.inner != 1;
    return {transposed, transposed && rows % kInRow<T> == 0, false};
  }
};
struct Layouts {
  Layout a, b;

  template <class T, class V>
  static Layouts of(const Product<T, V>& product, const Tiling& tiling) {
    Layouts layouts{Layout::of(product.a, product.m), Layout::of(product.b, product.n)};
    layouts.a.once = tiling.tiles_n == 1 && is_streamed(product.a, product.m, product.k, kRow);
    layouts.b.once = tiling.tiles_m == 1 && is_streamed(product.b, product.n, product.k, kRow);
    return layouts;
  }
};

// Four sums of each thread that computes: of halves, eight columns of a tile.
template <class H>
constexpr int kFourBytes = H::kComputing * 4 * sizeof(typename H::V);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where the accelerator puts 16 bytes of a line, and looks for them.
template <int kLineBytes>
__device__ __forceinline__ int swizzled(int line, int chunk) {
  return chunk ^ line / (kRow / kLineBytes) % (kLineBytes / 16);
}

// Where the stages are, and behind them what is on its way out, and the barriers that pass stages on: `full` to those
// who compute, `empty` back. What the blocks of a cluster have of this one's sums comes to where the stages were, and
// is counted at `received`.
struct Stages {
  uint32_t start;
  const Memory& memory;

  template <class H>
  __device__ uint32_t out() const {
    return start + memory.stages * H::kStageBytes;
  }
  __device__ uint32_t full(int stage) const { return start + memory.bytes + stage * 8; }
  __device__ uint32_t empty(int stage) const { return full(kMostStages + stage); }
  __device__ uint32_t received() const { return full(2 * kMostStages); }
};

// Which stage is next, and how often all of them were used, modulo two.
struct Turn {
  const Memory& memory;
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++stage == memory.stages) stage = 0, parity ^= 1;
  }
};

// The tiles that a block takes, one after the other: the first row, column and step of one, and how many steps it has.
template <class H>
struct Tiles {
  const TileOrder& order;
  int row, column, split, begin, steps;
  uint32_t index = blockIdx.x / H::kCluster;

  __device__ explicit Tiles(const TileOrder& order) : order(order) { find(); }

  __device__ bool next() {
    index += gridDim.x / H::kCluster;
    if (index >= order.count) return false;
    find();
    return true;
  }

 private:
  __device__ void find() {
    const Place at = order[index];
    const int rank = H::kCluster == 1 ? 0 : rank_in_cluster();
    row = (static_cast<int>(at.m) * H::kCluster + rank) * H::kM, column = static_cast<int>(at.n) * H::kN;
    split = static_cast<int>(at.split), begin = static_cast<int>(at.begin);
    steps = static_cast<int>(at.end - at.begin);
  }
};

// The share of a tile that a block of a cluster stores, where those have parts of k: of every `blocks` groups of eight
// columns, the one at `rank`.
struct Share {
  int blocks, rank;
};

// What a thread of a block does: threads of the first warpgroups compute, and one of the last copies.
template <class H>
struct Role {
  const int warp;               // The number of the thread's warp among those that copy; negative where it computes.
  const bool elected;           // This is the lane of the warp that makes barriers, or copies.
  const bool split_in_cluster;  // The blocks of a cluster are the splits of one tile.
  const Stages stages;
  const Tiles<H> tiles;

  __device__ __forceinline__ Role(const unsigned char* shared, const Memory& memory, const TileOrder& order)
      : warp(__shfl_sync(0xffffffff, (static_cast<int>(threadIdx.x) - H::kComputing) / kWarp, 0)),
        elected(is_elected()),
        split_in_cluster(H::kCluster == 1 && order.in_cluster),
        stages{shared_address(shared), memory},
        tiles(order) {}

  // Returns once the barriers are there, of all blocks that this one has to do with, and the thread that copies has
  // called copy_first(). `copying` threads fill a stage. A barrier takes some fifty cycles to make: the warp of that
  // thread makes those of the first stage alone, and those next to it the others.
  template <class First>
  __device__ __forceinline__ void begin(const First& copy_first, int copying = 1) const {
    constexpr int kOthers = kWarpgroup / kWarp - 1;
    if (warp >= 0 && elected) {
      for (int s = warp; s < stages.memory.stages; s += warp == 0 ? kMostStages : kOthers) {
        init_barrier(stages.full(s), copying);
        init_barrier(stages.empty(s), H::kComputing / H::kGroup * H::kCluster);
      }
      make_barriers_visible();
    } else if (threadIdx.x == 0 && split_in_cluster) {
      const int fours = (H::kSums / 4 - share().rank + share().blocks - 1) / share().blocks;
      init_barrier(stages.received(), 1);
      make_barriers_visible();
      expect_bytes(stages.received(), (share().blocks - 1) * fours * kFourBytes<H>);
    }
    if (H::kCluster == 1 && copies()) copy_first();
    __syncthreads();
    if (H::kCluster == 1) return;
    meet_in_cluster();
    if (copies()) copy_first();
  }

  __device__ Share share() const {
    return split_in_cluster ? Share{static_cast<int>(tiles.order.splits), rank_in_cluster()} : Share{1, 0};
  }
  __device__ bool computes() const { return threadIdx.x < H::kComputing; }
  __device__ bool copies() const { return warp == 0 && elected; }

  __device__ __forceinline__ void end() const {
    if (split_in_cluster && !computes()) meet_in_cluster();  // As those who compute do, in add_of_cluster.
  }
};

// Where the boxes of a factor are that fill a stage: rows from `row` on, over kBox of k. A transposed factor comes in
// boxes of kBox rows: all of kRows at once where `whole`, as starting a copy takes long.
template <bool kShared, int kRows, int kBox>
struct Boxes {
  int x, y, z;

  __device__ __forceinline__ void start(Layout layout, int row, int k) {
    x = layout.transposed ? layout.whole ? 0 : row : k;
    y = layout.transposed ? k : row;
    z = layout.whole ? row / kBox : 0;
  }

  __device__ __forceinline__ void copy(uint32_t to, const CUtensorMap& map, Layout layout, uint32_t barrier) {
    copy_box<kShared>(to, map, x, y, z, barrier, layout.once);
    if (layout.transposed && !layout.whole) {
#pragma unroll
      for (int r = kBox; r < kRows; r += kBox) copy_box<kShared>(to + r * kRow, map, x + r, y, z, barrier, layout.once);
    }
    (layout.transposed ? y : x) += kBox;
  }
};

// What the thread that copies does: step() fills a stage, rest() all that follow. boxes.start(tiles) sets boxes to the
// first step of a tile, and boxes.copy(to, barrier) starts a step's copies.
template <class H, class Boxes>
struct Copies {
  const Stages& stages;
  Boxes boxes;
  Tiles<H> tiles;
  Turn turn;
  int left;  // steps of the tile

  __device__ __forceinline__ Copies(const Role<H>& role, const Boxes& boxes)
      : stages(role.stages), boxes(boxes), tiles(role.tiles), turn{role.stages.memory}, left(role.tiles.steps) {
    this->boxes.start(tiles);
  }

  __device__ __forceinline__ void step() {
    const uint32_t barrier = stages.full(turn.stage);
    wait_barrier(stages.empty(turn.stage), turn.parity ^ 1);
    expect_bytes(barrier, H::kStageBytes);
    boxes.copy(stages.start + turn.stage * H::kStageBytes, barrier);
    turn.next();
    --left;
  }

  __device__ __forceinline__ void rest() {
    while (true) {
      while (left > 0) step();
      if (!tiles.next()) break;
      boxes.start(tiles);
      left = tiles.steps;
    }
    if constexpr (H::kCluster > 1) {
      // The barriers must be there until the other block has arrived at them for the last time.
      for (int s = 0; s < stages.memory.stages; ++s) {
        wait_barrier(stages.empty(turn.stage), turn.parity ^ 1);
        turn.next();
      }
    }
  }
};

// The boxes of both factors.
template <class H>
struct BoxesOfBoth {
  const CUtensorMap &map_a, &map_b;
  const Layouts& layouts;
  int from;  // the line of the stage where this block's share of b begins
  Boxes<false, H::kM, H::kK> a;
  Boxes<H::kCluster == 2, kSharesK<H> ? H::kN : kShare<H>, H::kK> b;

  __device__ __forceinline__ void start(const Tiles<H>& tiles) {
    const int rank = H::kCluster == 1 ? 0 : rank_in_cluster(), k = tiles.begin * H::kK;
    const bool of_k = kSharesK<H> && layouts.b.transposed;
    from = rank * (of_k ? H::kK / 2 : kShare<H>);
    a.start(layouts.a, tiles.row, k);
    b.start(layouts.b, tiles.column + (of_k ? 0 : from), k + (of_k ? from : 0));
  }
  __device__ __forceinline__ void copy(uint32_t to, uint32_t barrier) {
    a.copy(to, map_a, layouts.a, barrier);
    b.copy(to + H::kBytesA + from * kRow, map_b, layouts.b, barrier);
  }
};

// Adds up what the blocks of a cluster have of a tile's sums, each of its part of k, in the order of those, and calls
// f(j, added) for the fours j of this block's share. The sums are sent from thread to thread, by stores that a barrier
// counts. They stay as they are: nvcc serializes the instructions of wgmma if others write where these do.
template <class H, class V, class Function>
__device__ __forceinline__ void add_of_cluster(
    const V (&sums)[H::kSums], Share share, const Stages& stages, const Function& f) {
  constexpr int kVec = 16 / sizeof(V), kVectorBytes = H::kComputing * 16;
  const int most = (H::kSums / 4 + share.blocks - 1) / share.blocks;  // fours of a share
  const uint32_t own = stages.start + threadIdx.x * 16;
  meet_in_cluster();  // Nobody reads the stages any more.
  uint32_t to = own + share.rank * most * kFourBytes<H>;
  int owner = 0;
#pragma unroll
  for (int j = 0; j < H::kSums / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 4; e += kVec) {
      const uint32_t at = to + e / kVec * kVectorBytes;
      send(at, owner, owner == share.rank, sums + j * 4 + e, stages.received());
    }
    if (++owner == share.blocks) owner = 0, to += kFourBytes<H>;
  }
  wait_barrier(stages.received(), 0);
  for (int j = share.rank, turn = 0; j < H::kSums / 4; j += share.blocks, ++turn) {
    V added[4] = {};
#pragma unroll 4
    for (int s = 0; s < share.blocks; ++s) {
      V more[4];
#pragma unroll
      for (int e = 0; e < 4; e += kVec) {
        load_shared(own + (s * most + turn) * kFourBytes<H> + e / kVec * kVectorBytes, more + e);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) added[e] += more[e];
    }
    f(j, added);
  }
}

// The first of a warp's sixteen rows of a tile, and which of eight a thread has sums of: of that one, and of the one
// eight behind.
__device__ inline int rows_of_warp() {
  return threadIdx.x / kWarp * 16;
}
__device__ inline int row_in_warp() {
  return threadIdx.x % kWarp / 4;
}

// Two neighbouring sums of a group of eight columns, as they are stored.
template <class T>
__device__ __forceinline__ uint32_t rounded_pair(const float* sums) {
  const T rounded[2] = {round_to<T>(sums[0]), round_to<T>(sums[1])};
  uint32_t word;
  memcpy(&word, rounded, sizeof(rounded));
  return word;
}

// Stores a thread's sums of a group of eight columns from `column` on, of rows from `row` on: two neighbours of either
// of its rows, or of a transposed result, what another thread has, of either of its columns.
template <class T>
__device__ __forceinline__ void store_group(
    const Product<T, float>& product, int64_t row, int64_t column, const float* sums) {
  const bool flipped = product.c_inner != 1;
  const int line = row_in_warp(), pair = static_cast<int>(threadIdx.x % 4) * 2;
  const int64_t i = row + (flipped ? pair : line), j = column + (flipped ? line : pair);
  const bool vectors = flipped ? product.has_columns(2) : product.has_vectors(2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t word = rounded_pair<T>(sums + half * 2);
    if (flipped) word = transposed(word);
    const int64_t at = i + half * 8;
    if (at >= product.m || j >= product.n) continue;
    T* to = product.c + at * product.c_outer + j * product.c_inner;
    if (vectors) {
      *reinterpret_cast<uint32_t*>(to) = word;
    } else {
      T values[2];
      memcpy(values, &word, sizeof(word));
      to[0] = values[0];
      if (flipped ? at + 1 < product.m : j + 1 < product.n) to[1] = values[1];
    }
  }
}

// Stores a thread's sums of a tile by the memory accelerator, which writes whole lines while the warpgroup goes on. Of
// a transposed result, the rows of a warpgroup lie side by side.
template <class H, bool kFlipped>
__device__ __forceinline__ void store_boxes(
    const CUtensorMap& map, const Tiles<H>& tiles, const Stages& stages, const float (&sums)[H::kN / 2]) {
  constexpr int kLine = kFlipped ? kRow : H::kBox * sizeof(typename H::T), kGroups = H::kBox / 8;
  const int warpgroup = threadIdx.x / kWarpgroup, warp = threadIdx.x % kWarpgroup / kWarp, lane = threadIdx.x % kWarp;
  const bool stores = is_elected() && warp == 0;
  const int row = tiles.row + warpgroup * 64;
  const uint32_t own = stages.template out<H>() + warpgroup * H::kBoxes * H::kBoxBytes;
#pragma unroll
  for (int box = 0; box < H::kN / H::kBox; ++box) {
    const uint32_t buffer = own + box % H::kBoxes * H::kBoxBytes;
    const int column = tiles.column + box * H::kBox;
    if (stores) wait_for_boxes<H::kBoxes - 1>();
    meet_in_warpgroup(warpgroup);
#pragma unroll
    for (int g = 0; g < kGroups; g += 2) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) words[e] = rounded_pair<typename H::T>(sums + (box * kGroups + g) * 4 + e * 2);
      const int line = kFlipped ? g * 8 + lane / 16 * 8 + lane % 8 : warp * 16 + lane % 16;
      const int chunk = kFlipped ? warp * 2 + lane / 8 % 2 : g + lane / 16;
      store_matrices<kFlipped>(buffer + line * kLine + swizzled<kLine>(line, chunk) * 16, words);
    }
    make_visible_to_accelerator();
    meet_in_warpgroup(warpgroup);
    if (stores) store_box(map, kFlipped ? row : column, kFlipped ? column : row, buffer);
  }
}

// Stores a thread's sums of a part of k, where they lie as the result does.
template <class H>
__device__ __forceinline__ void store_partial(
    const Product<typename H::T, float>& product, const Tiles<H>& tiles, const float (&sums)[H::kN / 2]) {
  const bool flipped = product.c_inner != 1;
  const int64_t stride = product.partial_stride, first = tiles.column + threadIdx.x % 4 * 2;
  const int64_t rows = flipped ? product.n : product.m;
  float* of_split = product.partial + tiles.split * rows * stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = tiles.row + rows_of_warp() + row_in_warp() + half * 8;
    if (row >= product.m) continue;
#pragma unroll
    for (int j = 0; j < H::kN / 8; ++j) {
      const int64_t column = first + j * 8;
      const float* pair = sums + j * 4 + half * 2;
      if (flipped) {
        if (column < product.n) of_split[column * stride + row] = pair[0];
        if (column + 1 < product.n) of_split[(column + 1) * stride + row] = pair[1];
      } else if (column < stride) {
        store_vector<float, 2>(of_split + row * stride + column, pair);
      }
    }
  }
}

// Stores a thread's sums of a tile.
template <class H>
__device__ __forceinline__ void store(
    const Product<typename H::T, float>& product, const CUtensorMap* map, const Tiles<H>& tiles, const Stages& stages,
    const float (&sums)[H::kN / 2]) {
  using T = typename H::T;
  if (product.partial != nullptr) return store_partial<H>(product, tiles, sums);
  if (map != nullptr && product.has_vectors(8)) return store_boxes<H, false>(*map, tiles, stages, sums);
  if (map != nullptr && product.has_columns(8)) return store_boxes<H, true>(*map, tiles, stages, sums);
  const int64_t first = tiles.row + rows_of_warp();
  if (!product.has_vectors(4)) {
#pragma unroll
    for (int j = 0; j < H::kN / 8; ++j) store_group(product, first, tiles.column + j * 8, sums + j * 4);
    return;
  }
  // Fours of columns, of two groups: those of the first are for threads that are even.
  const bool odd = threadIdx.x & 1;
  const int64_t four = tiles.column + odd * 8 + threadIdx.x % 4 / 2 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first + row_in_warp() + half * 8;
    T* to = product.c + row * product.c_outer + four;
#pragma unroll
    for (int j = 0; j < H::kN / 8; j += 2) {
      const uint32_t of_first = rounded_pair<T>(sums + half * 2 + j * 4);
      const uint32_t of_second = rounded_pair<T>(sums + half * 2 + j * 4 + 4);
      const uint32_t received = __shfl_xor_sync(0xffffffff, odd ? of_first : of_second, 1);
      if (row < product.m && four + j * 8 < product.n) {
        *reinterpret_cast<uint2*>(to + j * 8) = odd ? uint2{received, of_second} : uint2{of_first, received};
      }
    }
  }
}

// Gives a stage back, once a group of threads has read it.
template <class H>
__device__ __forceinline__ void release(const Stages& stages, int stage) {
  const int thread = threadIdx.x % H::kGroup;
  if (thread >= H::kCluster) return;
  H::kCluster == 1 ? arrive(stages.empty(stage)) : arrive_at(stages.empty(stage), thread);
}

// A tile's sums, of so many steps.
template <class H, bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void add_steps(float (&sums)[H::kN / 2], Turn& turn, int count, const Stages& stages) {
  const int warpgroup = threadIdx.x / kWarpgroup;
  int before = -1;
  for (; count > 0; --count, turn.next()) {
    wait_barrier(stages.full(turn.stage), turn.parity);
    const uint32_t stage = stages.start + turn.stage * H::kStageBytes;
    const uint64_t a = describe<kTransposedA>(stage + warpgroup * 64 * kRow);
    const uint64_t b = describe<kTransposedB, kTransposedB ? H::kRowBytesB : kRow>(stage + H::kBytesA);
    pin(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < H::kK / 16; ++i) {
      multiply_add<typename H::T, H::kN, kTransposedA, kTransposedB>(
          sums, a + i * kNext16<kTransposedA>, b + i * kNext16<kTransposedB, H::kRowBytesB>, before >= 0 || i > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    pin(sums);
    if (before >= 0) {  // The step before is done; this one goes on while the next is waited for.
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      release<H>(stages, before);
    }
    before = turn.stage;
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  pin(sums);
  release<H>(stages, before);
}

// With a map of the result, whole vectors are stored in boxes.
template <class T, int kTile>
__device__ __forceinline__ void consume(
    const Product<T, float>& product, const CUtensorMap* map, const Layouts& layouts,
    const Role<Hopper<T, kTile>>& role) {
  using H = Hopper<T, kTile>;
  const Stages& stages = role.stages;
  Tiles<H> tiles = role.tiles;
  Turn turn{stages.memory};
  wait_for_kernel_before();
  do {
    float sums[H::kN / 2];
    // Not by a function of the layouts: nvcc then serializes the instructions of wgmma.
    if (layouts.a.transposed) {
      layouts.b.transposed ? add_steps<H, true, true>(sums, turn, tiles.steps, stages)
                           : add_steps<H, true, false>(sums, turn, tiles.steps, stages);
    } else {
      layouts.b.transposed ? add_steps<H, false, true>(sums, turn, tiles.steps, stages)
                           : add_steps<H, false, false>(sums, turn, tiles.steps, stages);
    }
    if (role.split_in_cluster) {
      add_of_cluster<H>(sums, role.share(), stages, [&](int j, const float* added) {
        store_group(product, tiles.row + rows_of_warp(), tiles.column + j * 8, added);
      });
    } else {
      store<H>(product, map, tiles, stages, sums);
    }
  } while (tiles.next());
  wait_for_boxes<0>();
}

#endif

template <class H>
__global__ void __launch_bounds__(H::kThreads, H::kBlocks) hopper_kernel(
    const __grid_constant__ TileOrder order, const __grid_constant__ Memory memory,
    const __grid_constant__ Layouts layouts, const __grid_constant__ Product<typename H::T, typename H::V> product,
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
    const __grid_constant__ CUtensorMap map_c) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kAlignment) unsigned char shared[];
  start_kernel_behind();
  if (threadIdx.x == H::kComputing) {
    prefetch_map(map_a);
    prefetch_map(map_b);
  }
  const Role<H> role(shared, memory, order);
  Copies<H, BoxesOfBoth<H>> copies(role, {map_a, map_b, layouts});
  role.begin([&] {
    wait_for_kernel_before();
    copies.step();
  });
  if (role.computes()) {
    if constexpr (H::kRegisters != 0) take_registers<H::kRegisters>();
    consume(product, &map_c, layouts, role);
  } else {
    if constexpr (H::kRegisters != 0) leave_registers<kOfCopying>();
    if (role.copies()) copies.rest();
  }
  role.end();
#endif
}

// From the driver at run time, so that the library needs no libcuda.so.
inline auto tensor_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    const bool there = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(there ? function : nullptr);
  }();
  return encode;
}

// A map of a factor, of boxes of `box_rows` rows over `depth` of k; where it is transposed, of as many rows as fill one
// of a stage, or if `whole`, of box_rows.
template <class T>
bool encode(
    const Factor<T>& factor, Layout layout, int64_t rows, int64_t k, int box_rows, CUtensorMap* map,
    int depth = kInRow<T>) {
  const auto stride = static_cast<cuuint64_t>((layout.transposed ? factor.inner : factor.outer) * sizeof(T));
  cuuint64_t sizes[3] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows), 1}, strides[2] = {stride, stride};
  cuuint32_t box[3] = {static_cast<cuuint32_t>(depth), static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  if (layout.transposed) {
    std::swap(sizes[0], sizes[1]);
    box[0] = std::min(kInRow<T>, box_rows), box[1] = static_cast<cuuint32_t>(depth);
  }
  if (layout.whole) {
    sizes[0] = kInRow<T>, sizes[2] = static_cast<cuuint64_t>(rows / kInRow<T>), strides[1] = kRow;
    box[2] = static_cast<cuuint32_t>(box_rows / kInRow<T>);
  }
  const auto type = std::is_same_v<T, double>   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT64
                    : std::is_same_v<T, float>  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                    : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const auto line = box[0] * sizeof(T);
  const auto swizzle = line == kRow       ? CU_TENSOR_MAP_SWIZZLE_128B
                       : line == kRow / 2 ? CU_TENSOR_MAP_SWIZZLE_64B
                                          : CU_TENSOR_MAP_SWIZZLE_32B;
  const auto function = tensor_map_encoder();
  return function != nullptr &&
         function(
             map, type, 3, const_cast<T*>(factor.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// As many stages as fit where so many blocks are on a multiprocessor, and as a block has steps; behind them `out`
// bytes; and at least as much memory as a block's share of a cluster's sums takes.
template <class H>
Memory memory_of(const Tiling& tiling, int64_t blocks, bool split_in_cluster, int out, int processors) {
  const int64_t at_a_time = std::min<int64_t>(ceil_div(blocks, processors), H::kBlocks), splits = tiling.splits();
  const int64_t fit = kSharedBytes / at_a_time / H::kStageBytes;
  const int64_t steps = tiling.steps_per_split * ceil_div(tiling.count() * H::kCluster, blocks);
  const auto stages = static_cast<int>(std::min({fit, steps, int64_t(kMostStages)}));
  const int64_t received = split_in_cluster ? splits * ceil_div(H::kSums / 4, splits) * kFourBytes<H> : 0;
  return {std::max(stages * H::kStageBytes + out, static_cast<int>(received)), stages};
}

// Launches a kernel of H for all tiles. Their parts of k are a cluster's blocks, or are added up later.
template <class H, class Kernel, class... Arguments>
void launch_tiles(
    Launch& launch, Kernel* kernel, const Tiling& tiling, int processors, bool added_later, int out,
    const Arguments&... arguments) {
  const bool split_in_cluster = H::kCluster == 1 && tiling.splits() > 1 && !added_later;
  const int64_t clusters =
      split_in_cluster ? tiling.count() : std::min<int64_t>(tiling.count(), processors / H::kCluster * H::kBlocks);
  const Memory memory = memory_of<H>(tiling, clusters * H::kCluster, split_in_cluster, out, processors);
  launch.clusters(
      kernel, clusters * H::kCluster, split_in_cluster ? static_cast<int>(tiling.splits()) : H::kCluster, H::kThreads,
      memory.bytes + kBarrierBytes, true, TileOrder(tiling, split_in_cluster), memory, arguments...);
}

template <class H>
void multiply(
    Launch& launch, const Product<typename H::T, typename H::V>& product, const Tiling& tiling, int processors) {
  Layouts layouts = Layouts::of(product, tiling);
  layouts.b.whole &= H::kN > kInRow<typename H::T> && !kSharesK<H>;  // Else one box is all of a stage, or half of k.
  const int depth = kSharesK<H> && layouts.b.transposed ? H::kK / 2 : H::kK;
  const bool flipped = product.has_columns(8);
  const bool in_boxes = H::kOutBytes != 0 && tiling.splits() == 1 && (flipped || product.has_vectors(8));
  CUtensorMap map_a, map_b, map_c{};
  bool encoded = encode(product.a, layouts.a, product.m, product.k, H::kM, &map_a) &&
                 encode(product.b, layouts.b, product.n, product.k, kShare<H>, &map_b, depth);
  if constexpr (H::kOutBytes != 0) {
    const Factor<typename H::T> result{product.c, flipped ? product.c_inner : product.c_outer, 1};
    if (in_boxes) {
      encoded &= flipped ? encode(result, {}, product.n, product.m, H::kBox, &map_c)
                         : encode(result, {}, product.m, product.n, 64, &map_c, H::kBox);
    }
  }
  if (!encoded) fail("matmul", "the driver can't describe the matrices to the GPU");
  launch_tiles<H>(
      launch, hopper_kernel<H>, tiling, processors, product.partial != nullptr, in_boxes ? H::kOutBytes : 0, layouts,
      product, map_a, map_b, map_c);
}

// Whether the current device runs code for architecture 9.0a: it is of 9.0, and the library has such code.
inline bool has_code() {
  using H = Hopper<__half, 0>;
  cudaFuncAttributes code;
  const cudaError_t error = cudaFuncGetAttributes(&code, hopper_kernel<H>);
  cudaGetLastError();
  return error == cudaSuccess && code.numRegs > H::kN / 2;  // It has so many sums; code for others is empty.
}

constexpr int64_t kLargest = std::numeric_limits<int32_t>::max() - 1024;  // That the memory accelerator counts.

// Whether the tensor memory accelerator can read a factor of `rows` rows as it lies.
template <class T>
bool reads(const Factor<T>& factor, int64_t rows, int64_t k) {
  if (reinterpret_cast<uintptr_t>(factor.data) % 16 != 0) return false;
  constexpr int64_t kVec = 16 / sizeof(T);
  auto is_stride = [](int64_t stride, int64_t size) {
    return stride % kVec == 0 && stride >= size && stride < (1ll << 38);
  };
  return factor.inner == 1 ? is_stride(factor.outer, k) : factor.outer == 1 && is_stride(factor.inner, rows);
}

}  // namespace extension_cpp::matmul::hopper
