// The CUDA kernels: 256 threads of 8 elements per chunk of 2048, 16-byte streaming accesses, all loads
// before the first use, 64-bit indices. Compiled by nvcc, or by g++ under emulate.h for tests.
#pragma once
#include "element.h"

#if defined(GOOSE_EMULATE)
#include "emulate.h"
#else
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#define GOOSE_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<grid, block, 0, (cudaStream_t)(stream)>>>(__VA_ARGS__)
#endif

namespace goose {

constexpr int THREADS = CHUNK / VECTOR, REDUCE_THREADS = 1024;
constexpr unsigned ALL_LANES = 0xffffffffu;

// ------------------------------------------------------------------------------- memory accesses

template <int BYTES>
struct Raw {  // the bytes of a thread's eight elements
  uint32_t w[BYTES / 4];
};

template <int BYTES>
__device__ __forceinline__ Raw<BYTES> load(const void* base, int64_t element) {
  const char* p = (const char*)base + element * (BYTES / VECTOR);
  Raw<BYTES> r;
  if constexpr (BYTES >= 16) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 t = __ldcs((const uint4*)p + i);
      r.w[4 * i] = t.x;
      r.w[4 * i + 1] = t.y;
      r.w[4 * i + 2] = t.z;
      r.w[4 * i + 3] = t.w;
    }
  } else {
    const uint2 t = __ldcs((const uint2*)p);
    r.w[0] = t.x;
    r.w[1] = t.y;
  }
  return r;
}

template <int BYTES>
__device__ __forceinline__ void store(void* base, int64_t element, const Raw<BYTES>& r) {
  char* p = (char*)base + element * (BYTES / VECTOR);
  if constexpr (BYTES >= 16) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i)
      __stcs((uint4*)p + i, make_uint4(r.w[4 * i], r.w[4 * i + 1], r.w[4 * i + 2], r.w[4 * i + 3]));
  } else {
    __stcs((uint2*)p, make_uint2(r.w[0], r.w[1]));
  }
}

// Element k of packed registers; the modulo keeps unused instantiations inside the array.
template <int BYTES>
__device__ __forceinline__ float get32(const Raw<BYTES>& r, int k) { return from_bits(r.w[k % (BYTES / 4)]); }
template <int BYTES>
__device__ __forceinline__ uint16_t get16(const Raw<BYTES>& r, int k) {
  return (uint16_t)(r.w[k >> 1] >> ((k & 1) * 16));
}
template <int BYTES>
__device__ __forceinline__ uint8_t get8(const Raw<BYTES>& r, int k) {
  return (uint8_t)(r.w[k >> 2] >> ((k & 3) * 8));
}
template <int BYTES>
__device__ __forceinline__ void put32(Raw<BYTES>& r, int k, float x) { r.w[k % (BYTES / 4)] = bits(x); }
template <int BYTES>
__device__ __forceinline__ void put16(Raw<BYTES>& r, int k, uint16_t x) {
  r.w[k >> 1] = (k & 1) ? r.w[k >> 1] | ((uint32_t)x << 16) : x;
}
template <int BYTES>
__device__ __forceinline__ void put8(Raw<BYTES>& r, int k, uint8_t x) {
  r.w[k >> 2] = (k & 3) ? r.w[k >> 2] | ((uint32_t)x << ((k & 3) * 8)) : x;
}

__device__ __forceinline__ void load_gradients(const void* grad, int64_t i, int bf16, float* g) {
  if (bf16) {
    const Raw<16> r = load<16>(grad, i);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) g[k] = from_bf16(get16(r, k));
  } else {
    const Raw<32> r = load<32>(grad, i);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) g[k] = get32(r, k);
  }
}

// ------------------------------------------------------------------------- conversions of 8 bits

__device__ __forceinline__ void unpack_e4m3(const Raw<8>& r, float* x) {
#pragma unroll
  for (int k = 0; k < VECTOR; k += 2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)get16(r, k / 2), __NV_E4M3);
    const float2 f = __half22float2(__half2(h));
    x[k] = f.x;
    x[k + 1] = f.y;
#else
    x[k] = from_e4m3(get8(r, k));
    x[k + 1] = from_e4m3(get8(r, k + 1));
#endif
  }
}

__device__ __forceinline__ void pack_e4m3(Raw<8>& r, const float* x) {
#pragma unroll
  for (int k = 0; k < VECTOR; k += 2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    put16(r, k / 2, (uint16_t)__nv_cvt_float2_to_fp8x2(make_float2(x[k], x[k + 1]), __NV_SATFINITE, __NV_E4M3));
#else
    put16(r, k / 2, (uint16_t)(to_e4m3(x[k]) | ((uint32_t)to_e4m3(x[k + 1]) << 8)));
#endif
  }
}

// Largest of 64 elements: eight lanes of eight.
__device__ __forceinline__ uint32_t block_largest(uint32_t mine) {
#pragma unroll
  for (int x = 1; x < BLOCK / VECTOR; x <<= 1) {
    const uint32_t other = __shfl_xor_sync(ALL_LANES, mine, x);
    mine = other > mine ? other : mine;
  }
  return mine;
}

// ---------------------------------------------------------------------------- storage of a thread

// Main weights, eight per thread. weight: bf16; rest: fp32, int16, int8 or nothing.
template <int KIND>
struct MainOf {
  static constexpr int REST = KIND == GOOSE_MAIN_FP32 ? 32 : KIND == GOOSE_MAIN_SPLIT16 ? 16 : 8;
  static constexpr bool HAS_REST = KIND != GOOSE_MAIN_BF16;
  static constexpr bool READS_WEIGHT = KIND != GOOSE_MAIN_FP32;
  Raw<16> high;
  Raw<REST> rest;

  __device__ __forceinline__ void read(const void* w, const void* r, int64_t i) {
    if constexpr (READS_WEIGHT) high = load<16>(w, i);
    if constexpr (HAS_REST) rest = load<REST>(r, i);
  }
  __device__ __forceinline__ void write(void* w, void* r, int64_t i) const {
    if (READS_WEIGHT || w) store<16>(w, i, high);
    if constexpr (HAS_REST) store<REST>(r, i, rest);
  }
  __device__ __forceinline__ float get(int k) const {
    if constexpr (KIND == GOOSE_MAIN_FP32) return get32(rest, k);
    if constexpr (KIND == GOOSE_MAIN_SPLIT16) return join16(get16(high, k), (int16_t)get16(rest, k));
    if constexpr (KIND == GOOSE_MAIN_SPLIT8) return join8(get16(high, k), (int8_t)get8(rest, k));
    return from_bf16(get16(high, k));
  }
  __device__ __forceinline__ void put(int k, float x, uint32_t random16) {
    if constexpr (KIND == GOOSE_MAIN_FP32) {
      put32(rest, k, x);
      put16(high, k, nearest_bf16(x));
    } else if constexpr (KIND == GOOSE_MAIN_SPLIT16) {
      const Split s = split16(x);
      put16(high, k, s.high);
      put16(rest, k, (uint16_t)s.rest);
    } else if constexpr (KIND == GOOSE_MAIN_SPLIT8) {
      const Split s = split8(x, random16 & 0xffu);
      put16(high, k, s.high);
      put8(rest, k, (uint8_t)s.rest);
    } else {
      put16(high, k, stochastic_bf16(x, random16));
    }
  }
};

// One moment, eight elements per thread.
template <int KIND, bool SECOND>
struct MomentOf {
  static constexpr int BYTES = KIND == GOOSE_MOMENT_FP32 ? 32 : KIND == GOOSE_MOMENT_BF16 ? 16 : 8;
  static constexpr bool BLOCKED = KIND == GOOSE_MOMENT_BLOCK8;
  Raw<BYTES> raw;
  float scale;

  __device__ __forceinline__ void read(const void* values, const void* scales, int64_t i) {
    if constexpr (KIND == GOOSE_MOMENT_NONE) return;
    raw = load<BYTES>(values, i);
    if constexpr (BLOCKED)
      scale = SECOND ? ((const float*)scales)[i / BLOCK] : from_bf16(((const uint16_t*)scales)[i / BLOCK]);
  }
  __device__ __forceinline__ void decode(float* x) const {
    if constexpr (BLOCKED && !SECOND) unpack_e4m3(raw, x);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      if constexpr (KIND == GOOSE_MOMENT_FP32) x[k] = get32(raw, k);
      if constexpr (KIND == GOOSE_MOMENT_BF16) x[k] = from_bf16(get16(raw, k));
      if constexpr (BLOCKED && !SECOND) x[k] = mul(x[k], scale);
      if constexpr (BLOCKED && SECOND) x[k] = from_second_code(get8(raw, k), scale);
    }
  }
  // random: four words of eight halves, or nullptr to round to nearest. All lanes call it.
  __device__ __forceinline__ void encode(float* x, const uint32_t* random) {
    if constexpr (BLOCKED) {
      uint32_t largest = 0;
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        if (SECOND) x[k] = root(root(x[k]));
        const uint32_t u = bits(x[k]) & 0x7fffffffu;
        largest = u > largest ? u : largest;
      }
      largest = block_largest(largest);
      scale = SECOND ? second_scale(largest) : first_scale(largest);
      const float inv = inverse(scale);
      if constexpr (!SECOND) {
        float y[VECTOR];
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) y[k] = first_code_value(x[k], inv);
        pack_e4m3(raw, y);
        return;
      } else {
#pragma unroll
        for (int k = 0; k < VECTOR; ++k) {
          const float f = random ? fraction_of((random[k >> 1] >> ((k & 1) * 16)) & 0xffffu) : 0.5f;
          put8(raw, k, to_second_code(x[k], inv, f));
        }
      }
    }
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      if constexpr (KIND == GOOSE_MOMENT_FP32) put32(raw, k, x[k]);
      if constexpr (KIND == GOOSE_MOMENT_BF16) {
        const uint32_t half = random ? (random[k >> 1] >> ((k & 1) * 16)) & 0xffffu : 0;
        put16(raw, k, SECOND && random ? stochastic_bf16(x[k], half) : nearest_bf16(x[k]));
      }
    }
  }
  __device__ __forceinline__ void write(void* values, void* scales, int64_t i) const {
    if constexpr (KIND == GOOSE_MOMENT_NONE) return;
    store<BYTES>(values, i, raw);
    if (BLOCKED && i % BLOCK == 0) {
      if (SECOND) ((float*)scales)[i / BLOCK] = scale;
      else ((uint16_t*)scales)[i / BLOCK] = (uint16_t)(bits(scale) >> 16);
    }
  }
};

__device__ __forceinline__ int64_t find_segment(const goose_segments& s, int64_t chunk, int64_t i) {
  int64_t at = s.chunk_segment[chunk];
  while (at + 1 < s.count && s.start[at + 1] <= i) ++at;
  return at;
}

// ---------------------------------------------------------------------------------------- kernels

template <int ALGORITHM, int MAIN, int FIRST, int SECOND>
__global__ void __launch_bounds__(THREADS) step_kernel(const goose_step_args a) {
  if (a.counters[3]) return;
  const int64_t chunk = a.first_chunk + blockIdx.x, at = chunk * CHUNK + (int64_t)threadIdx.x * VECTOR;
  // Lanes beyond the end stay: the others of their warp exchange values with all of them.
  const bool inside = at < a.segments.numel;
  const int64_t i = inside ? at : chunk * CHUNK;
  MainOf<MAIN> main;
  MomentOf<FIRST, false> first;
  MomentOf<SECOND, true> second;
  float p[VECTOR], g[VECTOR], m[VECTOR], v[VECTOR];
  load_gradients(a.grad, i, a.grad_kind, g);
  main.read(a.weight, a.rest, i);
  first.read(a.exp_avg, a.exp_avg_scale, i);
  second.read(a.exp_avg_sq, a.exp_avg_sq_scale, i);
  const int64_t s = find_segment(a.segments, chunk, i);
  const int group = a.segments.group[s];
  const bool live = inside && group >= 0;
  const Derived d = ((const Derived*)a.derived)[group < 0 ? 0 : group];
  const float factor = mul(a.scalars[0], d.sign);
  const uint32_t step = (uint32_t)a.counters[0];
  const uint64_t counter = (uint64_t)(a.segments.first[s] + i - a.segments.start[s]) / VECTOR;
  constexpr bool RANDOM_MAIN = MAIN == GOOSE_MAIN_SPLIT8 || MAIN == GOOSE_MAIN_BF16;
  constexpr bool RANDOM_SECOND = SECOND == GOOSE_MOMENT_BF16 || SECOND == GOOSE_MOMENT_BLOCK8;
  Words r0 = {{0, 0, 0, 0}}, r1 = {{0, 0, 0, 0}};
  if (RANDOM_MAIN) r0 = philox(a.segments.key[s], counter, 0, step);
  if (RANDOM_SECOND) r1 = philox(a.segments.key[s], counter, 1, step);
  first.decode(m);
  second.decode(v);
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) p[k] = main.get(k);
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) {
    const float x = mul(g[k], factor);
    if constexpr (ALGORITHM == GOOSE_ADAM) adam(p[k], m[k], v[k], x, d);
    if constexpr (ALGORITHM == GOOSE_LION) lion(p[k], m[k], x, d);
    if constexpr (ALGORITHM == GOOSE_SGD) sgd(p[k], m[k], x, d, FIRST != GOOSE_MOMENT_NONE);
    main.put(k, p[k], (r0.w[k >> 1] >> ((k & 1) * 16)) & 0xffffu);
  }
  first.encode(m, nullptr);
  second.encode(v, RANDOM_SECOND ? r1.w : nullptr);
  if (!live) return;
  main.write(a.weight, a.rest, i);
  first.write(a.exp_avg, a.exp_avg_scale, i);
  second.write(a.exp_avg_sq, a.exp_avg_sq_scale, i);
}

// Sum over a block in a fixed tree: halves of a warp, then halves of the warps.
__device__ __forceinline__ double block_sum(double x) {
  __shared__ double shared[32];
#pragma unroll
  for (int o = 16; o; o >>= 1) x = add(x, __shfl_xor_sync(ALL_LANES, x, o));
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  x = lane < warps ? shared[lane] : 0.0;
  for (int o = warps >> 1; o; o >>= 1) x = add(x, __shfl_xor_sync(ALL_LANES, x, o));
  return x;
}

__device__ __forceinline__ void write_partial(const goose_norm_args& a, int64_t chunk, const float* x, int64_t i, bool inside) {
  double mine = 0.0;
  if (inside) mine = weigh(sum8(x), a.segments.norm_weight[find_segment(a.segments, chunk, i)]);
  const double total = block_sum(mine);
  if (threadIdx.x == 0) a.partials[chunk] = total;
}

__global__ void __launch_bounds__(THREADS) sum_kernel(const goose_norm_args a) {
  const int64_t chunk = a.first_chunk + blockIdx.x, i = chunk * CHUNK + (int64_t)threadIdx.x * VECTOR;
  const bool inside = i < a.segments.numel;
  float x[VECTOR];
  if (inside) load_gradients(a.values, i, a.kind, x);
  write_partial(a, chunk, x, i, inside);
}

__global__ void __launch_bounds__(THREADS) unpack_kernel(const goose_norm_args a) {
  const int64_t chunk = a.first_chunk + blockIdx.x, i = chunk * CHUNK + (int64_t)threadIdx.x * VECTOR;
  const bool inside = i < a.segments.numel;
  float x[VECTOR];
  if (inside) {
    load_gradients(a.values, i, 1, x);
    for (int rank = 1; rank < a.dp; ++rank) {
      float y[VECTOR];
      load_gradients(a.values, rank * a.segments.numel + i, 1, y);
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) x[k] = add(x[k], y[k]);
    }
    Raw<32> wide;
    Raw<16> narrow;
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) {
      if (a.scale) x[k] = mul(x[k], *a.scale);
      put32(wide, k, x[k]);
      put16(narrow, k, nearest_bf16(x[k]));
      if (a.kind) x[k] = from_bf16(get16(narrow, k));
    }
    if (a.kind) store<16>(a.out, i, narrow);
    else store<32>(a.out, i, wide);
  }
  write_partial(a, chunk, x, i, inside);
}

__global__ void reduce_kernel(const double* partials, int64_t count, double* out) {
  double mine = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += REDUCE_THREADS) mine = add(mine, partials[i]);
  const double total = block_sum(mine);
  if (threadIdx.x == 0) *out = total;
}

__global__ void prepare_kernel(const goose_prepare_args a) {
  const Decision d = decide(a);
  for (int group = threadIdx.x; d.good && group < a.groups; group += blockDim.x) prepare_group(a, group);
  if (threadIdx.x == 0) conclude(a, d);
}

// Whole shards in and out of a storage: WRITE rounds to nearest.
template <int KIND, bool WRITE>
__global__ void __launch_bounds__(THREADS) main_kernel(const goose_convert_args a) {
  const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
  if (i >= a.numel) return;
  MainOf<KIND> main;
  Raw<32> x;
  if (WRITE) x = load<32>(a.values, i);
  else main.read(a.codes, a.extra, i);
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) {
    if constexpr (!WRITE) put32(x, k, main.get(k));
    else if constexpr (KIND == GOOSE_MAIN_BF16) put16(main.high, k, nearest_bf16(get32(x, k)));
    else main.put(k, get32(x, k), 0x80u);
  }
  if (WRITE) main.write(a.codes, a.extra, i);
  else store<32>(a.values, i, x);
}

template <int KIND, bool SECOND, bool WRITE>
__global__ void __launch_bounds__(THREADS) moment_kernel(const goose_convert_args a) {
  const int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
  const bool inside = at < a.numel;
  const int64_t i = inside ? at : 0;
  MomentOf<KIND, SECOND> moment;
  Raw<32> raw;
  float x[VECTOR];
  if (WRITE) {
    raw = load<32>(a.values, i);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) x[k] = get32(raw, k);
    moment.encode(x, nullptr);
  } else {
    moment.read(a.codes, a.extra, i);
    moment.decode(x);
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) put32(raw, k, x[k]);
  }
  if (!inside) return;
  if (WRITE) moment.write(a.codes, a.extra, i);
  else store<32>(a.values, i, raw);
}

__global__ void probe_kernel() {}

}  // namespace goose
