// What one thread of a kernel does with its eight elements: 16-byte streaming accesses, and every
// storage of main weights and moments in registers. Compiled by nvcc, or by g++ under emulate.h.
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

}  // namespace goose
