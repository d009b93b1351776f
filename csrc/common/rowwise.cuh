// Runs a row-wise operator on CUDA.
//
// Such an operator is bound by memory: what counts is that each row is read once, by wide accesses of which many are
// under way, and that little is computed for each element. resident_kernel keeps a row in the registers of a warp or a
// block between accumulate and write; streamed_kernel reads a row that is longer twice, by one block or, where there
// are too few rows for the GPU, by several. Sums over rows are made without atomics: each block adds up the rows that
// it has, and sum_kernel the blocks' sums, in order; for rows that are too long for that columns_kernel reads them
// again.
//
// Element i of a row is accumulated by the thread that has chunk i / kWidth, where the width of a chunk depends on the
// length and the dtype alone: a layout without that alignment is read element by element in the same order.
#pragma once

#include "elementwise.cuh"
#include "launch.cuh"

namespace extension_cpp::detail {

constexpr int kWarp = 32, kSumThreads = 1024;
constexpr unsigned kAllLanes = 0xffffffff;

// Threads of resident_kernel at most, of a block or of two. Sums next to a row take registers: with few of them there
// can be more threads, which was faster there, and slower where there are no sums.
template <class T>
constexpr int threads_of(int sums, int elements) {
  return sums && sizeof(T) * elements <= 32 ? 1024 : 512;
}

// The same of streamed_kernel. Where it writes, the blocks under way should be few, so that rows are still in the cache
// when they are read again.
template <class Formula>
constexpr int kStreamThreads = RowShape<Formula>::kWrites ? 512 : 256;

template <class Formula>
struct RowParameters {
  const void* data[RowShape<Formula>::kIn];
  void* results[RowShape<Formula>::kOut];
  Leading<RowShape<Formula>::kIn> leading;
  int64_t count, size;  // of rows, of elements in one
  bool wide;            // the chunks of all arguments are aligned
};

// std::bit_cast, which device code can't call.
template <class To, class From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <class State>
__device__ __forceinline__ State shuffle_xor(const State& state, int mask) {
  static_assert(sizeof(State) % 4 == 0);
  uint32_t words[sizeof(State) / 4];
  memcpy(words, &state, sizeof(State));
#pragma unroll
  for (uint32_t& word : words) word = __shfl_xor_sync(kAllLanes, word, mask);
  State other;
  memcpy(&other, words, sizeof(State));
  return other;
}

// The state of all lanes, with the same bits in each: of two lanes' states the lower lane's comes first. Each lane
// combines in both orders, of which sums are one to the compiler: in two branches lanes would wait for each other.
template <class Formula, class State>
__device__ __forceinline__ State combine_warp(const Formula& formula, State state) {
#pragma unroll
  for (int mask = 1; mask < kWarp; mask *= 2) {
    const State other = shuffle_xor(state, mask);
    State swapped = other;
    formula.combine(swapped, state);
    formula.combine(state, other);
    if (threadIdx.x & mask) state = swapped;
  }
  return state;
}

// The same of a block, unless the formula writes nothing: then only its first warp has it. Calls alternate between two
// places, so that one barrier is enough.
template <class Formula, class State>
__device__ __forceinline__ State combine_block(const Formula& formula, State state, bool odd) {
  __shared__ alignas(16) unsigned char memory[2 * kWarp * sizeof(State)];
  State* const states = reinterpret_cast<State*>(memory) + odd * kWarp;
  state = combine_warp(formula, state);
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) states[threadIdx.x / kWarp] = state;
  __syncthreads();
  if (!RowShape<Formula>::kWrites && threadIdx.x >= kWarp) return state;
  return combine_warp(formula, lane < static_cast<int>(blockDim.x) / kWarp ? states[lane] : State{});
}

// Copies of 16 bytes into shared memory, under way until this thread waits for them.
__device__ __forceinline__ void copy_async(uint4* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
#else
  *to = *static_cast<const uint4*>(from);
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Stores kWidth values. Where there are several, the first is aligned to 16 bytes, and so wide are the stores: a
// thread's values lie apart from the next thread's, so that single ones would each write a part of a sector of memory.
template <int kWidth, class V>
__device__ __forceinline__ void store_wide(V* to, const V* values) {
  if constexpr (kWidth == 1) {
    *to = *values;
  } else {
    uint4 words[kWidth * sizeof(V) / 16];
    static_assert(sizeof(words) == kWidth * sizeof(V));
    memcpy(words, values, sizeof(words));
#pragma unroll
    for (const uint4& word : words) reinterpret_cast<uint4*>(to)[&word - words] = word;
  }
}

template <class V>
struct ConvertTo {
  template <class T>
  EXTENSION_CPP_INLINE V operator()(const T& value) const {
    return static_cast<V>(value);
  }
};

// What kernels do with a row, in chunks of kWidth elements, of which a thread has kEach at a time.
template <class Formula, class T, int kWidth, int kEach>
struct RowOnCuda {
  using V = typename Compute<T>::type;
  using Shape = RowShape<Formula>;
  using State = typename StateOf<Formula, V>::type;
  using Vector = Vec<T, kWidth>;
  // A chunk in registers. As words: values of 16 bits would be unpacked where they are loaded, for which each load
  // would be waited for before the next one.
  using Raw = std::conditional_t<kWidth == 1, Vector, uint4>;
  // Chunks of kColumns are loaded with those of the row if registers can hold both, and otherwise where they are used.
  static constexpr bool kKeepsColumns = kEach * sizeof(Raw) <= 64;
  // Whether a row of a block comes by way of shared memory, while the one before is worked at. A multiprocessor that
  // has one block would otherwise not read while that computes. In float32 it reads so long that the way itself costs
  // more.
  static constexpr bool kMayStage = Shape::kSums > 0 && Accumulates<Formula, V>&& kWidth > 1 && sizeof(T) == 2;
  static constexpr int kElements = Shape::kElements;
  static constexpr auto kElementsSequence = std::make_index_sequence<kElements>();
  static constexpr auto kWrittenSequence = std::make_index_sequence<Shape::kRowsOut + Shape::kSums>();

  // How many arguments with rows are before an element in what is staged.
  template <size_t E>
  static constexpr int kStagedBefore = [] {
    int before = 0;
    for (int e = 0; e < static_cast<int>(E); ++e) before += Shape::In::kAt[Shape::kElementsAt[e]] == kRows;
    return before;
  }();

  struct Row {
    const RowParameters<Formula>& p;
    int64_t index, size;

    __device__ V at(int k, int64_t i) const {
      return static_cast<V>(static_cast<const T*>(p.data[k])[p.leading.offset(k, index) + i]);
    }
  };

  __device__ RowOnCuda(const RowParameters<Formula>& p, const Formula& formula)
      : p(p), formula(formula), chunks(p.size / kWidth) {
    place<kColumns>(kElementsSequence);
  }

  __device__ __forceinline__ void go_to(int64_t row) {
    index = row;
    place<kRows>(kElementsSequence);
    place_results(kWrittenSequence);
  }

  // Has those of row `next` on their way into `memory`, where take finds them. Each thread copies what it will read.
  template <class Index>
  __device__ __forceinline__ void stage(uint4* memory, int64_t next, Index first, Index step, Index end) const {
    stage_all(memory, next, first, step, end, kElementsSequence);
  }

  // In place of load, of what was staged.
  template <class Index>
  __device__ __forceinline__ void take(const uint4* memory, Index first, Index step, Index end) {
    wait_for_copies();
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const Index chunk = first + j * step;
      if (chunk >= end) continue;
      take_chunk(memory, j, chunk, end, kElementsSequence);
      if constexpr (kKeepsColumns) load_chunk<kColumns, true>(raw[j], chunk, kElementsSequence);
    }
  }

  // Chunks first, first + step, ... up to `end`.
  template <class Index>
  __device__ __forceinline__ void load(Index first, Index step, Index end) {
    if (kWidth == 1 || p.wide) {
      load_all<true>(first, step, end);
    } else {
      load_all<false>(first, step, end);
    }
  }

  template <class Index>
  __device__ __forceinline__ void accumulate(State& state, Index first, Index step, Index end) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (first + j * step >= end) continue;
      load_columns(j, first + j * step);
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        V in[kElements];
        values(in, j, w);
        accumulate_one(formula, state, in, kElementsSequence);
      }
    }
  }

  // What finish returns. Not by a function of the device alone, which the host's compiler knows nothing of.
  using Kept = decltype(finish_row<Formula, T, V>(
      std::declval<const Formula&>(), std::declval<const State&>(), std::declval<const Row&>(), nullptr,
      std::declval<const Leading<Shape::kIn>&>(), 0, ConvertTo<V>(), std::make_index_sequence<Shape::kOne>()));

  // What is kept of the row; `stores` in one thread.
  __device__ __forceinline__ Kept finish(const State& state, bool stores) const {
    const Kept kept = finish_row<Formula, T, V>(
        formula, state, Row{p, index, p.size}, p.data, p.leading, index, ConvertTo<V>(),
        std::make_index_sequence<Shape::kOne>());
    if (stores) {
      keep_row<Formula, T, V>(
          kept, p.results, index, [](T& to, V value) { to = static_cast<T>(value); },
          std::make_index_sequence<Shape::kOneOut>());
    }
    return kept;
  }

  // Writes the results with rows, and calls add(s, j, w, value) for the s-th sum over rows.
  template <class Kept, class Index, class Add>
  __device__ __forceinline__ void write(const Kept& kept, Index first, Index step, Index end, const Add& add) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const Index chunk = first + j * step;
      if (chunk >= end) continue;
      load_columns(j, chunk);
      Vector out[Shape::kRowsOut + 1];
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        V in[kElements];
        values(in, j, w);
        const int64_t i = static_cast<int64_t>(chunk) * kWidth + w;
        put(write_one(formula, kept, i, in, kElementsSequence), out, j, w, add, kWrittenSequence);
      }
      store(out, chunk, kWrittenSequence);
    }
  }

  // The sums over rows alone, of the first chunk that is loaded.
  template <class Kept, class Add>
  __device__ __forceinline__ void add_only(const Kept& kept, int64_t chunk, const Add& add) {
    load_columns(0, chunk);
    Vector out[Shape::kRowsOut + 1];
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      V in[kElements];
      values(in, 0, w);
      put(write_one(formula, kept, chunk * kWidth + w, in, kElementsSequence), out, 0, w, add, kWrittenSequence);
    }
  }

  const RowParameters<Formula>& p;
  const Formula& formula;
  const int64_t chunks;
  int64_t index;
  const T* at[kElements];
  T* to[Shape::kRowsOut + 1];
  Raw raw[kEach][kElements];

 private:
  template <Role role, size_t... E>
  __device__ __forceinline__ void place(std::index_sequence<E...>) {
    (place_one<role, E>(), ...);
  }

  template <Role role, size_t E>
  __device__ __forceinline__ void place_one() {
    constexpr int k = Shape::template element_at<E>;
    if constexpr (Shape::In::kAt[k] == role) {
      at[E] = static_cast<const T*>(p.data[k]) + (role == kRows ? p.leading.offset(k, index) : 0);
    }
  }

  template <size_t... O>
  __device__ __forceinline__ void place_results(std::index_sequence<O...>) {
    (place_result<O>(), ...);
  }

  template <size_t O>
  __device__ __forceinline__ void place_result() {
    constexpr int k = Shape::template written_at<O>;
    if constexpr (Shape::Out::kAt[k] == kRows) {
      to[Shape::template written_place<O>] = static_cast<T*>(p.results[k]) + index * p.size;
    }
  }

  template <class Index, size_t... E>
  __device__ __forceinline__ void stage_all(
      uint4* memory, int64_t next, Index first, Index step, Index end, std::index_sequence<E...>) const {
    (stage_one<E>(memory, next, first, step, end), ...);
  }

  template <size_t E, class Index>
  __device__ __forceinline__ void stage_one(uint4* memory, int64_t next, Index first, Index step, Index end) const {
    constexpr int k = Shape::template element_at<E>;
    if constexpr (Shape::In::kAt[k] == kRows) {
      const T* const from = static_cast<const T*>(p.data[k]) + p.leading.offset(k, next);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const Index chunk = first + j * step;
        if (chunk < end) copy_async(memory + kStagedBefore<E> * end + chunk, from + chunk * kWidth);
      }
    }
  }

  template <class Index, size_t... E>
  __device__ __forceinline__ void take_chunk(
      const uint4* memory, int j, Index chunk, Index end, std::index_sequence<E...>) {
    (take_one<E>(memory, j, chunk, end), ...);
  }

  template <size_t E, class Index>
  __device__ __forceinline__ void take_one(const uint4* memory, int j, Index chunk, Index end) {
    if constexpr (Shape::In::kAt[Shape::template element_at<E>] == kRows && kWidth > 1) {
      raw[j][E] = memory[kStagedBefore<E> * end + chunk];
    }
  }

  template <bool kWide, class Index>
  __device__ __forceinline__ void load_all(Index first, Index step, Index end) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const Index chunk = first + j * step;
      if (chunk >= end) continue;
      load_chunk<kRows, kWide>(raw[j], chunk, kElementsSequence);
      if constexpr (kKeepsColumns) load_chunk<kColumns, kWide>(raw[j], chunk, kElementsSequence);
    }
  }

  // What `load` has left.
  __device__ __forceinline__ void load_columns(int j, int64_t chunk) {
    if constexpr (kKeepsColumns) {
      return;
    } else if (kWidth == 1 || p.wide) {
      load_chunk<kColumns, true>(raw[j], chunk, kElementsSequence);
    } else {
      load_chunk<kColumns, false>(raw[j], chunk, kElementsSequence);
    }
  }

  template <Role role, bool kWide, size_t... E>
  __device__ __forceinline__ void load_chunk(Raw* to, int64_t chunk, std::index_sequence<E...>) const {
    (load_one<role, kWide, E>(to[E], chunk), ...);
  }

  template <Role role, bool kWide, size_t E>
  __device__ __forceinline__ void load_one(Raw& to, int64_t chunk) const {
    if constexpr (Shape::In::kAt[Shape::template element_at<E>] == role) {
      const T* from = at[E] + chunk * kWidth;
      if constexpr (kWide) {
        to = *reinterpret_cast<const Raw*>(from);
      } else {
        Vector values;
#pragma unroll
        for (int w = 0; w < kWidth; ++w) values.values[w] = from[w];
        to = bits_as<Raw>(values);
      }
    }
  }

  __device__ __forceinline__ void values(V* in, int j, int w) const {
#pragma unroll
    for (int e = 0; e < kElements; ++e) in[e] = static_cast<V>(bits_as<Vector>(raw[j][e]).values[w]);
  }

  template <class Result, class Add, size_t... O>
  __device__ __forceinline__ void put(
      const Result& result, Vector* out, int j, int w, const Add& add, std::index_sequence<O...>) const {
    (put_one<O>(value_at(result, O), out, j, w, add), ...);
  }

  template <size_t O, class Add>
  __device__ __forceinline__ void put_one(V value, Vector* out, int j, int w, const Add& add) const {
    constexpr int k = Shape::template written_at<O>, place = Shape::template written_place<O>;
    if constexpr (Shape::Out::kAt[k] == kRows) {
      out[place].values[w] = static_cast<T>(value);
    } else {
      add(place, j, w, value);
    }
  }

  template <size_t... O>
  __device__ __forceinline__ void store(const Vector* out, int64_t chunk, std::index_sequence<O...>) const {
    (store_one<O>(out, chunk), ...);
  }

  template <size_t O>
  __device__ __forceinline__ void store_one(const Vector* out, int64_t chunk) const {
    constexpr int k = Shape::template written_at<O>, place = Shape::template written_place<O>;
    if constexpr (Shape::Out::kAt[k] == kRows) {
      *reinterpret_cast<Vector*>(to[place] + chunk * kWidth) = out[place];
    }
  }
};

// Rows that the registers hold, of a warp each or of a block. sums: of each block, [block][sum][element].
template <class Formula, class T, int kWidth, int kEach, bool kOfWarp, class V>
__global__ void __launch_bounds__(
    threads_of<T>(RowShape<Formula>::kSums, kEach* kWidth), RowShape<Formula>::kSums ? 1 : 2)
    resident_kernel(const __grid_constant__ RowParameters<Formula> p, Formula formula, V* sums, bool staged) {
  using Code = RowOnCuda<Formula, T, kWidth, kEach>;
  using Shape = typename Code::Shape;
  constexpr int kHeld = Shape::kSums ? kEach * kWidth : 1;
  V held[Shape::kSums + 1][kHeld] = {};
  const int step = kOfWarp ? kWarp : blockDim.x, first = kOfWarp ? threadIdx.x % kWarp : threadIdx.x;
  const int of_block = kOfWarp ? blockDim.x / kWarp : 1;
  Code row(p, formula);
  const int chunks = static_cast<int>(row.chunks);
  extern __shared__ __align__(16) unsigned char shared[];
  uint4* const memory = reinterpret_cast<uint4*>(shared);
  constexpr bool kStages = Code::kMayStage && !kOfWarp;
  bool odd = false;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * of_block + (kOfWarp ? threadIdx.x / kWarp : 0);
  const int64_t apart = static_cast<int64_t>(gridDim.x) * of_block;
  if (kStages && staged) row.stage(memory, begin, first, step, chunks);
  for (int64_t r = begin; r < p.count; r += apart) {
    row.go_to(r);
    if (kStages && staged) {
      row.take(memory, first, step, chunks);
    } else {
      row.load(first, step, chunks);
    }
    typename Code::State state{};
    if constexpr (Accumulates<Formula, V>) {
      row.accumulate(state, first, step, chunks);
      // While the threads meet and write, the next row comes.
      if (kStages && staged && r + apart < p.count) row.stage(memory, r + apart, first, step, chunks);
      if constexpr (kOfWarp) {
        state = combine_warp(formula, state);
      } else {
        state = combine_block(formula, state, odd);
        odd = !odd;
      }
    }
    if (!Shape::kWrites && first > 0) continue;
    const auto kept = row.finish(state, first == 0);
    if constexpr (Shape::kWrites) {
      auto add = [&](int s, int j, int w, V value) { held[s][j * kWidth + w] += value; };
      row.write(kept, first, step, chunks, add);
    }
  }
  if constexpr (Shape::kSums > 0) {
    V* const to = sums + static_cast<int64_t>(blockIdx.x) * Shape::kSums * p.size;
    V* const total = reinterpret_cast<V*>(shared);
    auto for_each = [&](const auto& body) {
#pragma unroll
      for (int s = 0; s < Shape::kSums; ++s) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          const int chunk = first + j * step;
          if (chunk < chunks) body(s * p.size + chunk * kWidth, held[s] + j * kWidth);
        }
      }
    };
    if constexpr (kOfWarp) {
      for (int turn = 0; turn < of_block; ++turn) {
        if (static_cast<int>(threadIdx.x) / kWarp == turn) {
          for_each([&](int64_t i, const V* values) {
#pragma unroll
            for (int w = 0; w < kWidth; ++w) total[i + w] = turn == 0 ? values[w] : total[i + w] + values[w];
          });
        }
        __syncthreads();
      }
      for (int64_t i = threadIdx.x; i < Shape::kSums * p.size; i += blockDim.x) to[i] = total[i];
    } else {
      for_each([&](int64_t i, const V* values) { store_wide<kWidth>(to + i, values); });
    }
  }
}

// What a launch of streamed_kernel does: all of it, or what comes before or after the blocks of a row have met.
enum Stage { kWhole, kAccumulate, kWrite };

// Rows of any length: `splits` blocks each. states: of each block; kept: of each row, where columns_kernel needs it.
template <class Formula, class T, int kWidth, class State, class Kept>
__global__ void __launch_bounds__(kStreamThreads<Formula>, 1024 / kStreamThreads<Formula>) streamed_kernel(
    const __grid_constant__ RowParameters<Formula> p, Formula formula, Stage stage, int splits, State* states,
    Kept* all_kept) {
  constexpr int kEach = 4;
  using Code = RowOnCuda<Formula, T, kWidth, kEach>;
  Code row(p, formula);
  const int64_t part = ceil_div(row.chunks, splits), step = blockDim.x;
  bool odd = false;
  for (int64_t item = blockIdx.x; item < p.count * splits; item += gridDim.x) {
    row.go_to(item / splits);
    const int64_t begin = item % splits * part, end = min(begin + part, row.chunks);
    State state{};
    if constexpr (Accumulates<Formula, typename Code::V>) {
      if (stage == kWrite) {
        const State* const of_row = states + item / splits * splits;
        for (int s = threadIdx.x; s < splits; s += blockDim.x) formula.combine(state, of_row[s]);
      } else {
        for (int64_t first = begin + threadIdx.x; first < end; first += step * kEach) {
          row.load(first, step, end);
          row.accumulate(state, first, step, end);
        }
      }
      state = combine_block(formula, state, odd);
      odd = !odd;
      if (stage == kAccumulate) {
        if (threadIdx.x == 0) states[item] = state;
        continue;
      }
    }
    if (!Code::Shape::kWrites && threadIdx.x > 0) continue;
    const bool stores = threadIdx.x == 0 && item % splits == 0;
    const Kept kept = row.finish(state, stores);
    if (stores && all_kept) all_kept[item / splits] = kept;
    if constexpr (Code::Shape::kRowsOut > 0) {
      for (int64_t first = begin + threadIdx.x; first < end; first += step * kEach) {
        row.load(first, step, end);
        row.write(kept, first, step, end, [](int, int, int, auto) {});
      }
    }
  }
}

// Sums over the rows of a part, of one chunk a thread: sums[part][sum][element].
template <class Formula, class T, int kWidth, class V, class Kept>
__global__ void __launch_bounds__(kThreads) columns_kernel(
    const __grid_constant__ RowParameters<Formula> p, Formula formula, const Kept* kept, int64_t of_part, V* sums) {
  using Code = RowOnCuda<Formula, T, kWidth, 1>;
  Code row(p, formula);
  const int64_t blocks = ceil_div(row.chunks, kThreads), part = blockIdx.x / blocks;
  const int64_t chunk = blockIdx.x % blocks * kThreads + threadIdx.x;
  if (chunk >= row.chunks) return;
  V held[Code::Shape::kSums][kWidth] = {};
  for (int64_t r = part * of_part; r < min((part + 1) * of_part, p.count); ++r) {
    row.go_to(r);
    row.load(chunk, int64_t{1}, row.chunks);
    row.add_only(kept[r], chunk, [&](int s, int, int w, V value) { held[s][w] += value; });
  }
#pragma unroll
  for (int s = 0; s < Code::Shape::kSums; ++s) {
    store_wide<kWidth>(sums + (part * Code::Shape::kSums + s) * p.size + chunk * kWidth, held[s]);
  }
}

// The sums of all parts, in a fixed order. A block has kAtOnce elements, and a warp a part or several at a time.
template <int kAtOnce, class T, class V>
__global__ void __launch_bounds__(kSumThreads)
    sum_kernel(const V* sums, int64_t parts, int64_t apart, int64_t n, T* to) {
  constexpr int kLines = kSumThreads / kAtOnce, kAhead = 8;
  __shared__ V all[kSumThreads / kWarp][kAtOnce];
  const int lane = threadIdx.x % kAtOnce, warp = threadIdx.x / kWarp;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kAtOnce + lane;
  V sum = 0;
  for (int64_t first = threadIdx.x / kAtOnce; i < n && first < parts; first += kLines * kAhead) {
    V some[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t part = first + k * kLines;
      some[k] = part < parts ? sums[part * apart + i] : V(0);
    }
#pragma unroll
    for (const V& one : some) sum += one;
  }
#pragma unroll
  for (int mask = kAtOnce; mask < kWarp; mask *= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
  if (threadIdx.x % kWarp < kAtOnce) all[warp][lane] = sum;
  __syncthreads();
  if (threadIdx.x >= kAtOnce || i >= n) return;
  for (int k = 1; k < kSumThreads / kWarp; ++k) sum += all[k][lane];
  to[i] = static_cast<T>(sum);
}

// to[i]: the sum of sums[part * apart + i] over the parts.
template <class T, class V>
void sum_parts(Launch& launch, const V* sums, int64_t parts, int64_t apart, int64_t n, T* to) {
  auto run = [&]<int kAtOnce>(std::integral_constant<int, kAtOnce>) {
    launch(sum_kernel<kAtOnce, T, V>, ceil_div(n, kAtOnce), kSumThreads, 0, sums, parts, apart, n, to);
  };
  if (n <= int64_t{16} * launch.processors()) {  // Short sums have many parts, and would have few blocks.
    run(std::integral_constant<int, 8>());
  } else {
    run(std::integral_constant<int, kWarp>());
  }
}

template <class Formula, class T, int kWidth>
class RowLaunches {
  using V = typename Compute<T>::type;
  using Shape = RowShape<Formula>;
  using State = typename StateOf<Formula, V>::type;
  using Kept = typename RowOnCuda<Formula, T, kWidth, 1>::Kept;
  // Chunks of a row that a thread holds, of short rows and of long ones.
  static constexpr int kUsual = Shape::kSums ? (kWidth == 1 ? 8 : 16 / kWidth) : 4;
  static constexpr int kMost = Shape::kSums ? (kWidth >= 4 ? 2 * kUsual : kUsual) : std::min(8, 32 / kWidth);
  static constexpr int64_t kLeastRows = 8;  // of which a block makes one sum, so that sums take little memory

 public:
  RowLaunches(Launch& launch, const View& first, const RowParameters<Formula>& p, const Formula& formula)
      : launch_(launch), first_(first), p_(p), formula_(formula), chunks_(p.size / kWidth) {
    cudaDeviceGetAttribute(&processors_, cudaDevAttrMultiProcessorCount, first.device_index);
  }

  void run() {
    if (chunks_ <= kWarp * kUsual) return resident<kUsual, true>(Shape::kSums ? 512 : kThreads);
    if constexpr (Shape::kWrites) {  // Otherwise a row isn't read again.
      // Twice the chunks a thread take less time than twice the threads: what a row takes besides its elements is half.
      constexpr int kThreadsAtMost = kMost > kUsual ? 512 : threads_of<T>(Shape::kSums, kUsual * kWidth);
      const int64_t threads = std::min<int64_t>(ceil_div(chunks_, kUsual * kWarp) * kWarp, kThreadsAtMost);
      if (chunks_ <= threads * kUsual) return resident<kUsual, false>(static_cast<int>(threads));
      if constexpr (kMost > kUsual) {
        if (chunks_ <= threads * kMost && !few()) return resident<kMost, false>(static_cast<int>(threads));
      }
    }
    streamed();
  }

 private:
  // Whether rows are so few that a block each would leave most of the GPU idle.
  bool few() const { return p_.count * 4 < processors_; }

  template <int kEach, bool kOfWarp>
  void resident(int threads) {
    const auto kernel = resident_kernel<Formula, T, kWidth, kEach, kOfWarp, V>;
    int64_t blocks = std::min<int64_t>(ceil_div(p_.count, kOfWarp ? threads / kWarp : 1), 0x7fffffff);
    if constexpr (Shape::kSums == 0) {
      launch_(kernel, blocks, threads, 0, p_, formula_, static_cast<V*>(nullptr), false);
    } else {
      // Of every layout, also where rows are not staged for want of alignment: the blocks, and with them the order of
      // the sums, are the same.
      const int64_t staged = kOfWarp || kEach == kUsual ? 0 : bytes_to_stage<kEach>();
      const size_t shared = kOfWarp ? Shape::kSums * p_.size * sizeof(V) : staged;
      launch_.allow_shared(kernel, shared);
      int at_once = 1;
      launch_.check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, kernel, threads, shared));
      if (at_once == 0) launch_.check(cudaErrorLaunchOutOfResources);
      blocks = std::min({blocks, int64_t{at_once} * processors_, ceil_div(p_.count, kLeastRows)});
      const Tensor memory = scratch(first_, blocks * Shape::kSums * p_.size * sizeof(V));
      V* const sums = static_cast<V*>(memory.mutable_data_ptr());
      launch_(kernel, blocks, threads, shared, p_, formula_, sums, staged > 0 && p_.wide);
      add_parts(sums, blocks);
    }
  }

  // Of a row of all arguments, 0 if it isn't to be staged.
  template <int kEach>
  int64_t bytes_to_stage() const {
    if (!RowOnCuda<Formula, T, kWidth, kEach>::kMayStage) return 0;
    constexpr int kOthers = 1024 + 2 * kWarp * sizeof(State);  // bytes of shared memory: what a block has of its own
    static_assert(kOthers < 32 * 1024, "State must be small enough for shared memory to hold one of each warp, twice");
    int most = 0;
    launch_.check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, first_.device_index));
    const int64_t bytes = Shape::In::count(kRows) * p_.size * static_cast<int64_t>(sizeof(T));
    return bytes <= most - kOthers ? bytes : 0;
  }

  void streamed() {
    const auto kernel = streamed_kernel<Formula, T, kWidth, State, Kept>;
    // The states of a row's threads take as long to combine as some of its chunks: short rows have fewer threads.
    const int64_t warps =
        std::clamp<int64_t>(ceil_div(chunks_, 4 * kUsual * kWarp), 1, kStreamThreads<Formula> / kWarp);
    const int threads = Shape::kWrites ? kStreamThreads<Formula> : static_cast<int>(warps * kWarp);
    const int64_t least = int64_t{kStreamThreads<Formula>} * kUsual;  // chunks that are worth a block
    const int64_t wanted = few() ? ceil_div(2 * processors_, p_.count) : 1;
    const int splits = static_cast<int>(std::clamp<int64_t>(std::min(wanted, chunks_ / least), 1, 512));
    const int64_t blocks = std::min<int64_t>(p_.count * splits, 0x7fffffff);
    const Tensor states = scratch(first_, splits > 1 ? blocks * sizeof(State) : 0);
    const Tensor kept = scratch(first_, Shape::kSums ? p_.count * sizeof(Kept) : 0);
    State* const state = static_cast<State*>(states.mutable_data_ptr());
    Kept* const keep = Shape::kSums ? static_cast<Kept*>(kept.mutable_data_ptr()) : nullptr;
    if (splits > 1 && Accumulates<Formula, V>) {
      launch_(kernel, blocks, threads, 0, p_, formula_, kAccumulate, splits, state, keep);
    }
    launch_(kernel, blocks, threads, 0, p_, formula_, splits > 1 ? kWrite : kWhole, splits, state, keep);
    if constexpr (Shape::kSums > 0) {
      const int64_t columns = ceil_div(chunks_, kThreads);
      const int64_t parts = std::min<int64_t>(p_.count, std::max<int64_t>(1, 16 * processors_ / columns));
      const int64_t of_part = ceil_div(p_.count, parts), used = ceil_div(p_.count, of_part);
      const Tensor memory = scratch(first_, used * Shape::kSums * p_.size * sizeof(V));
      V* const sums = static_cast<V*>(memory.mutable_data_ptr());
      launch_(
          columns_kernel<Formula, T, kWidth, V, Kept>, used * columns, kThreads, 0, p_, formula_, keep, of_part, sums);
      add_parts(sums, used);
    }
  }

  void add_parts(const V* sums, int64_t parts) {
    for (int k = 0; k < Shape::kOut; ++k) {
      if (Shape::Out::kAt[k] != kColumns) continue;
      const V* from = sums + place_of<typename Shape::Out>(k) * p_.size;
      T* const to = static_cast<T*>(p_.results[k]);
      sum_parts(launch_, from, parts, Shape::kSums * p_.size, p_.size, to);
    }
  }

  Launch& launch_;
  const View& first_;
  const RowParameters<Formula>& p_;
  const Formula& formula_;
  const int64_t chunks_;
  int processors_ = 1;
};

template <class Formula>
void run_rows(
    const char* op, const View& first, const Formula& formula, const RowArguments<Formula>& arguments,
    void* const* results) {
  using Shape = RowShape<Formula>;
  RowParameters<Formula> p;
  p.count = arguments.count;
  p.size = arguments.size;
  p.leading = arguments.leading;
  for (int k = 0; k < Shape::kIn; ++k) p.data[k] = arguments.template data<void>(k);
  for (int k = 0; k < Shape::kOut; ++k) p.results[k] = results[k];
  Launch launch(op, first);
  dispatch(Floating(), op, first.dtype, [&]<class T>(T) {
    if (p.count == 0) {
      for (int k = 0; k < Shape::kOut; ++k) {
        if (Shape::Out::kAt[k] == kColumns && p.size > 0) launch.zero(p.results[k], p.size * sizeof(T));
      }
      return;
    }
    constexpr int kWidth = 16 / sizeof(T);
    p.wide = true;
    for (int e = 0; e < Shape::kElements; ++e) {
      const int k = Shape::kElementsAt[e];
      p.wide = p.wide && reinterpret_cast<uintptr_t>(p.data[k]) % 16 == 0;
      for (int d = 0; Shape::In::kAt[k] == kRows && d < p.leading.ndim; ++d) {
        p.wide = p.wide && p.leading.strides[k][d] % kWidth == 0;
      }
    }
    if (p.size % kWidth == 0) {
      RowLaunches<Formula, T, kWidth>(launch, first, p, formula).run();
    } else {
      RowLaunches<Formula, T, 1>(launch, first, p, formula).run();
    }
  });
}

}  // namespace extension_cpp::detail
