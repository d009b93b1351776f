// PyTorch's parallel loop, in threads that ThreadSanitizer understands: OpenMP's synchronise by what it can't see. A
// library that is loaded before PyTorch takes the place of these two functions. Each range is cut into kThreads parts,
// however small it is.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

constexpr int64_t kThreads = 4;

extern "C" {

int32_t torch_get_num_threads(uint32_t* threads) {
  *threads = kThreads;
  return 0;
}

int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  const int64_t part = std::max<int64_t>(1, (end - begin + kThreads - 1) / kThreads);
  std::vector<std::thread> threads;
  for (int64_t at = begin; at < end; at += part) threads.emplace_back(body, at, std::min(at + part, end), context);
  for (std::thread& thread : threads) thread.join();
  return 0;
}
}
