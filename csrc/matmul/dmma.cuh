// The product of float64 on tensor cores by mma.sync, from Ampere on; on Hopper, of what doubles.cuh can't read.
//
// Two numbers: a tile of 128 by 128 takes 32,768 operations and 2 KB a step of k; eight warps have 32 by 64 of it each,
// 64 sums a thread.
//
// A stage has rows of 16 elements of k, 128 bytes, of each factor. Groups of 4, 32 bytes, are permuted so that the 4
// rows by 4 that half a warp reads at a time lie in different banks, and so do the 4 by 4, or 1 by 16, that it writes.
// Elements are copied one by one, 8 bytes each: in both orders a warp reads whole sectors, so that one kernel does for
// every layout.
#pragma once

#include "copies.cuh"

namespace extension_cpp::matmul {

// A tile of kM by kN, of which a warp has kRows by kColumns; a multiprocessor holds kBlocks of them.
template <int kM_, int kN_, int kRows_, int kColumns_, int kStages_, int kBlocks_>
struct Dmma {
  static constexpr int kM = kM_, kN = kN_, kK = 16, kRows = kRows_, kColumns = kColumns_, kStages = kStages_;
  static constexpr int kBlocks = kBlocks_, kWarpsN = kN / kColumns, kThreads = 32 * (kM / kRows) * kWarpsN;
  static constexpr int kRowBytes = kK * sizeof(double), kStageBytes = (kM + kN) * kRowBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kM * kN * sizeof(double) <= kSharedBytes);  // Where sums are exchanged.
};

// A thread's share of kSize rows of a factor, from row `first` on, over 16 of k at a time. Elements are counted so that
// number c is (c % kAcross) and (c / kAcross) strides away from the first, in the factor and in shared memory, where
// the latter of the two is an exclusive or.
template <int kSize, int kThreads>
class LoadsOfDoubles {
 public:
  static constexpr int kCopies = kSize * 16 / kThreads;

  __device__ LoadsOfDoubles(const Factor<double>& factor, int64_t first, int64_t size, int64_t k) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    rows_ = static_cast<int>(min(size - first, static_cast<int64_t>(kSize)));
    along_k_ = factor.outer != 1 || factor.inner == 1;
    if (along_k_) {
      row_ = threadIdx.x / 16, k_ = threadIdx.x % 16;
      next_ = kThreads / 16 * factor.outer, next_group_ = kAcross * next_;
    } else {  // A warp copies 8 rows by 4 of k.
      row_ = warp % kGroups * 8 + lane % 4 + lane / 16 * 4, k_ = warp / kGroups * 4 + lane / 4 % 4;
      next_ = kWarps * 8 * factor.outer, next_group_ = kDeep * factor.inner;
    }
    from_ = factor.data + (first + row_) * factor.outer + (k + k_) * factor.inner;
    step_ = 16 * factor.inner;
    at_ = row_ * 128 + ((k_ / 4) ^ (row_ % 4)) * 32 + k_ % 4 * 8;
    prepare(16);
  }

  // For the next 16 of k, of which `ks` are there.
  __device__ void prepare(int ks) {
    if (ks == ks_) return;
    ks_ = ks, valid_ = 0;
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
      const int row = row_ + (along_k_ ? c * (kThreads / 16) : c % kAcross * kWarps * 8);
      const int k = k_ + (along_k_ ? 0 : c / kAcross * kDeep);
      valid_ |= (row < rows_ && k < ks) << c;
    }
  }

  template <int kBegin, int kEnd>
  __device__ __forceinline__ void copy(uint32_t stage) const {
    const uint32_t row_bytes = along_k_ ? kThreads / 16 * 128 : kWarps * 8 * 128;
    const uint32_t group_bytes = along_k_ ? kAcross * (kThreads / 16) * 128 : 0, group_bits = along_k_ ? 0 : kDeep * 8;
#pragma unroll
    for (int c = kBegin; c < kEnd; ++c) {
      const int across = c % kAcross, group = c / kAcross;
      const uint32_t to = stage + (at_ ^ group * group_bits) + across * row_bytes + group * group_bytes;
      const double* from = from_ + across * next_ + group * next_group_;
      copy_double(to, from, (valid_ >> c & 1) * 8);
    }
  }

  __device__ void next() { from_ += step_; }

 private:
  static constexpr int kWarps = kThreads / 32, kGroups = kSize / 8;
  static constexpr int kAcross = kGroups > kWarps ? kGroups / kWarps : 1;  // how many rows a thread copies of each k
  static constexpr int kDeep = kGroups < kWarps ? 4 * (kWarps / kGroups) : 4;  // from one k to the next

  static __device__ void copy_double(uint32_t to, const double* from, int bytes) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes));
#endif
  }

  const double* from_;
  int64_t next_, next_group_, step_;
  int rows_, row_, k_, ks_ = 0;
  uint32_t at_, valid_;
  bool along_k_;
};

// sums += a * b, of 16 by 8 over kDeep of k.
template <int kDeep>
__device__ __forceinline__ void multiply_add(double* sums, const double* a, const double* b) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kDeep == 16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
        "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
          "d"(b[2]), "d"(b[3]));
  } else if constexpr (kDeep == 8) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
  } else {
    asm volatile("mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
                 : "d"(a[0]), "d"(a[1]), "d"(b[0]));
  }
#elif __CUDA_ARCH__ >= 800
#pragma unroll
  for (int k = 0; k < kDeep / 4; ++k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                   : "+d"(sums[half * 2]), "+d"(sums[half * 2 + 1])
                   : "d"(a[k * 2 + half]), "d"(b[k]));
    }
  }
#endif
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    dmma_kernel(Product<double, double> product, TileOrder order) {
  if constexpr (has_mma<double>(kArchitecture)) {
    constexpr int kDeep = 4;  // of k a product
    extern __shared__ __align__(16) unsigned char shared[];
    const Place at = order[blockIdx.x];
    const int64_t first_m = at.m * S::kM, first_n = at.n * S::kN;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp / S::kWarpsN * S::kRows, column = warp % S::kWarpsN * S::kColumns;
    const int64_t first_k = at.begin * S::kK;
    const int count = static_cast<int>(at.end - at.begin);  // More would take hours.
    using A = LoadsOfDoubles<S::kM, S::kThreads>;
    using B = LoadsOfDoubles<S::kN, S::kThreads>;
    A load_a(product.a, first_m, product.m, first_k);
    B load_b(product.b, first_n, product.n, first_k);
    int64_t left = product.k - first_k;
    auto prepare = [&](bool more) {
      const int ks = more ? static_cast<int>(min(left, static_cast<int64_t>(S::kK))) : 0;
      load_a.prepare(ks), load_b.prepare(ks);
      left -= S::kK;
    };
    // A part of the copies of a step: those of factors that end here become zeros.
    auto copy = [&]<int kPart, int kParts>(uint32_t stage, std::integer_sequence<int, kPart, kParts>) {
      load_a.template copy<A::kCopies * kPart / kParts, A::kCopies*(kPart + 1) / kParts>(stage);
      load_b.template copy<B::kCopies * kPart / kParts, B::kCopies*(kPart + 1) / kParts>(stage + S::kM * S::kRowBytes);
    };
    const int in_row = lane / 4 * S::kRowBytes + lane / 4 % 4 * 32 + lane % 4 * 8;
    // What a lane reads of rows 8 * i, and of the group of 4 of k.
    auto read = [&](int from, int i, int group) {
      return *reinterpret_cast<const double*>(shared + from + (in_row ^ group * 32) + i * 8 * S::kRowBytes);
    };
    double sums[S::kRows / 16][S::kColumns / 8][4] = {};
    // Copies start between products, which take their time meanwhile; so do the reads of what comes next.
    constexpr int kParts = S::kK / kDeep;
    static_assert(kParts % 2 == 0);
    double a[2][S::kRows / 16][kDeep / 2], b[2][S::kColumns / 8][kDeep / 4];
    auto fetch = [&](int stage, int part) {
      const int stage_a = stage * S::kStageBytes + row * S::kRowBytes;
      const int stage_b = stage * S::kStageBytes + (S::kM + column) * S::kRowBytes, group = part * kDeep / 4;
#pragma unroll
      for (int e = 0; e < kDeep / 2; ++e) {
#pragma unroll
        for (int i = 0; i < S::kRows / 16; ++i) a[part % 2][i][e] = read(stage_a, i * 2 + e % 2, group + e / 2);
      }
#pragma unroll
      for (int e = 0; e < kDeep / 4; ++e) {
#pragma unroll
        for (int j = 0; j < S::kColumns / 8; ++j) b[part % 2][j][e] = read(stage_b, j, group + e);
      }
    };
    const uint32_t stages = shared_address(shared);
#pragma unroll 1
    for (int s = 0; s < S::kStages - 1; ++s) {
      prepare(s < count);
      copy(stages + s * S::kStageBytes, std::integer_sequence<int, 0, 1>());
      load_a.next(), load_b.next();
      commit_copies();
    }
    wait_for_copies<S::kStages - 2>();
    __syncthreads();
    fetch(0, 0);
    int stage = 0, free = S::kStages - 1;
    for (int step = 0; step < count; ++step) {
      prepare(step + S::kStages - 1 < count);
      const uint32_t to = stages + free * S::kStageBytes;
      free = stage;
      stage = stage + 1 == S::kStages ? 0 : stage + 1;
      auto part = [&]<int kPart>(std::integral_constant<int, kPart>) {
        copy(to, std::integer_sequence<int, kPart, kParts>());
        if constexpr (kPart + 1 < kParts) {
          fetch(free, kPart + 1);
        } else {
          commit_copies();
          wait_for_copies<S::kStages - 2>();
          __syncthreads();
          fetch(stage, 0);
        }
#pragma unroll
        for (int j = 0; j < S::kColumns / 8; ++j) {
#pragma unroll
          for (int i = 0; i < S::kRows / 16; ++i) multiply_add<kDeep>(sums[i][j], a[kPart % 2][i], b[kPart % 2][j]);
        }
      };
      [&]<int... kPart>(std::integer_sequence<int, kPart...>) {
        (part(std::integral_constant<int, kPart>()), ...);
      }(std::make_integer_sequence<int, kParts>());
      load_a.next(), load_b.next();
    }
    auto each = [&](const auto& store) {
#pragma unroll
      for (int i = 0; i < S::kRows / 16; ++i) {
        const int m = row + i * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < S::kColumns / 8; ++j) {
          const int n = column + j * 8 + lane % 4 * 2;
          store(m, n, sums[i][j]);
          store(m + 8, n, sums[i][j] + 2);
        }
      }
    };
    if (order.in_cluster) {
      wait_for_copies<0>();
      __syncthreads();  // All have read the last stage.
      auto* to = reinterpret_cast<double*>(shared);
      each([&](int m, int n, const double* pair) { store_vector<double, 2>(to + m * S::kN + n, pair); });
      store_of_cluster<S::kM, S::kN, S::kN>(product, at, static_cast<int>(order.splits), to);
    } else {
      store_sums<2>(product, at.split, [&](const auto& store) {
        each([&](int m, int n, const double* pair) { store(first_m + m, first_n + n, pair); });
      });
    }
  }
}

template <class S>
void run_dmma(Launch& launch, const Product<double, double>& product, const Plan& plan) {
  Tiling tiling = plan.tiling;
  tiling.tiles_m = ceil_div(product.m, S::kM), tiling.tiles_n = ceil_div(product.n, S::kN);
  const TileOrder order(tiling, plan.in_cluster);
  if (plan.in_cluster) {
    const int splits = static_cast<int>(tiling.splits());
    launch.clusters(dmma_kernel<S>, tiling.count(), splits, S::kThreads, S::kSharedBytes, false, product, order);
  } else {
    launch(dmma_kernel<S>, tiling.count(), S::kThreads, S::kSharedBytes, product, order);
  }
}

template <class S>
constexpr TileModel dmma_model(double rate) {
  return {S::kM, S::kN, S::kK, S::kThreads / 32, S::kBlocks, rate, 8, 1, S::kSharedBytes};
}

inline void mma(Launch& launch, const View& like, const Product<double, double>& product, const Device& device) {
  using Large = Dmma<128, 128, 32, 64, 4, 1>;
  using Middle = Dmma<64, 128, 32, 64, 4, 2>;
  using Small = Dmma<64, 64, 32, 32, 4, 3>;
  using Flat = Dmma<16, 128, 16, 32, 4, 3>;
  constexpr TileModel kModels[] = {
      dmma_model<Large>(298), dmma_model<Middle>(241), dmma_model<Small>(212), dmma_model<Flat>(68)};
  constexpr Costs kCosts{977, 202, 1e9, 14133, 3096, 1481, 495, 0, 0.417};
  const Plan chosen = remembered(product.m, product.n, product.k, device, [&] {
    return plan(kModels, kCosts, product.m, product.n, product.k, sizeof(double), device, true);
  });
  with_splits(launch, like, product, device, chosen, [&](const Product<double, double>& p, const Plan& plan) {
    constexpr decltype(&run_dmma<Large>) kRuns[] = {run_dmma<Large>, run_dmma<Middle>, run_dmma<Small>, run_dmma<Flat>};
    kRuns[plan.shape](launch, p, plan);
  });
}

}  // namespace extension_cpp::matmul
