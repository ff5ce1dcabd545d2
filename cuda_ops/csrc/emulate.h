// Runs CUDA kernels on the CPU, for tests: grids, blocks, warps, __syncthreads, shuffles and shared
// memory. Every thread of a block is a fiber; their order is shuffled for each block, so that a
// missing barrier shows. One block runs at a time, so races between blocks do not.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
inline uint4 make_uint4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return {a, b, c, d}; }
inline uint2 make_uint2(uint32_t a, uint32_t b) { return {a, b}; }

typedef int cudaError_t;
inline cudaError_t cudaGetLastError() { return 0; }
inline cudaError_t cudaDeviceSynchronize() { return 0; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaSetDevice(int) { return 0; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

template <class T>
const T* check_alignment(const T* p) {
  if ((uintptr_t)p % sizeof(T)) {
    std::fprintf(stderr, "emulate: misaligned access of %zu bytes\n", sizeof(T));
    std::abort();
  }
  return p;
}
template <class T>
T __ldcs(const T* p) {
  return *check_alignment(p);
}
template <class T>
void __stcs(T* p, T v) {
  *const_cast<T*>(check_alignment(p)) = v;
}

namespace emulate {

constexpr size_t STACK = 65536;
constexpr int WARP = 32;

struct Fiber {
  ucontext_t context;
  bool done;
  dim3 index;
};

struct Machine {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<char> stacks;
  std::function<void()> body;
  std::mt19937 shuffle{1};
  dim3 grid, block, block_index;
  int current = 0, alive = 0;
  int waiting = 0, barriers = 0;            // of the block
  int warp_waiting[32], warp_barriers[32];  // of each warp
  uint64_t exchanged[32][WARP];
};

inline Machine& machine() {
  static Machine m;
  return m;
}
inline void yield() {
  Machine& m = machine();
  swapcontext(&m.fibers[m.current].context, &m.scheduler);
}
inline void enter() {
  Machine& m = machine();
  m.body();
  m.fibers[m.current].done = true;
  --m.alive;
}
inline void wait_for(int members, int& waiting, int& passed) {
  const int now = passed;
  if (++waiting == members) {
    waiting = 0;
    ++passed;
    return;
  }
  while (passed == now) yield();
}
inline int warp_size(int warp) {
  return std::min<int>(WARP, (int)machine().fibers.size() - warp * WARP);
}
inline void warp_barrier(int warp) {
  Machine& m = machine();
  wait_for(warp_size(warp), m.warp_waiting[warp], m.warp_barriers[warp]);
}

inline void start(Machine& m, int i) {
  Fiber& f = m.fibers[i];
  f.done = false;
  f.index = dim3(i % m.block.x, i / m.block.x);
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = m.stacks.data() + STACK * i;
  f.context.uc_stack.ss_size = STACK;
  f.context.uc_link = &m.scheduler;
  makecontext(&f.context, enter, 0);
}

// A round in which nobody ends, passes a barrier or gives another round a chance is a deadlock.
inline uint64_t progress(const Machine& m) {
  uint64_t sum = (uint64_t)m.barriers - (uint64_t)m.alive;
  for (int passed : m.warp_barriers) sum += (uint64_t)passed;
  return sum;
}

inline void run_block(Machine& m, const std::vector<int>& order) {
  while (m.alive) {
    const uint64_t before = progress(m);
    for (int i : order) {
      if (m.fibers[i].done) continue;
      m.current = i;
      swapcontext(&m.scheduler, &m.fibers[i].context);
    }
    if (m.alive && progress(m) == before) {
      std::fprintf(stderr, "emulate: deadlock: threads of block %u wait for others that are gone\n", m.block_index.x);
      std::abort();
    }
  }
}

template <class F>
void launch(dim3 grid, dim3 block, F body) {
  Machine& m = machine();
  const int n = (int)block.x;
  if (!grid.x || grid.y != 1 || grid.z != 1 || n < 1 || n > 1024 || block.y != 1 || block.z != 1) {
    std::fprintf(stderr, "emulate: launch of %u x %d threads\n", grid.x, n);
    std::abort();
  }
  m.grid = grid;
  m.block = block;
  m.body = body;
  m.stacks.resize(STACK * (size_t)n);
  std::vector<int> order((size_t)n);
  for (unsigned b = 0; b < grid.x; ++b) {
    m.block_index = dim3(b, 0, 0);
    m.fibers.assign((size_t)n, Fiber{});
    m.alive = n;
    m.waiting = m.barriers = 0;
    std::memset(m.warp_waiting, 0, sizeof m.warp_waiting);
    std::memset(m.warp_barriers, 0, sizeof m.warp_barriers);
    for (int i = 0; i < n; ++i) {
      order[(size_t)i] = i;
      start(m, i);
    }
    std::shuffle(order.begin(), order.end(), m.shuffle);
    run_block(m, order);
  }
}

template <class T>
T exchange(T value, int from) {
  static_assert(sizeof(T) <= 8, "one register pair");
  Machine& m = machine();
  const int warp = m.current / WARP, lane = m.current % WARP;
  std::memcpy(&m.exchanged[warp][lane], &value, sizeof value);
  warp_barrier(warp);
  std::memcpy(&value, &m.exchanged[warp][from < warp_size(warp) ? from : lane], sizeof value);
  warp_barrier(warp);
  return value;
}

}  // namespace emulate

#define threadIdx (emulate::machine().fibers[emulate::machine().current].index)
#define blockIdx (emulate::machine().block_index)
#define blockDim (emulate::machine().block)

inline void __syncthreads() {
  emulate::Machine& m = emulate::machine();
  emulate::wait_for((int)m.fibers.size(), m.waiting, m.barriers);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  const int lane = emulate::machine().current % emulate::WARP, other = lane ^ mask;
  return emulate::exchange(value, other / width == lane / width ? other : lane);
}

#define GOOSE_LAUNCH(kernel, grid, block, stream, ...)      \
  do {                                                      \
    (void)(stream);                                         \
    emulate::launch(grid, block, [=]() { kernel(__VA_ARGS__); }); \
  } while (0)
