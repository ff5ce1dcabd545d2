// Tiles of the CPU library's loops: a few hundred elements, decoded into fp32 buffers in the
// first-level cache and encoded again. What is fp32 already stays where it lies. Included once, by
// cpu_loops.cpp, for each instruction set.
#pragma once
#include "element.h"

namespace goose {
namespace {

constexpr int TILE = 512;
constexpr int COUNTERS = TILE / VECTOR;

struct Buffer {
  alignas(64) float x[TILE];
};
struct Halves {
  alignas(64) uint16_t x[TILE];
};

template <class T>
T* at(void* base, int64_t i) {
  return (T*)base + i;
}
template <class T>
const T* at(const void* base, int64_t i) {
  return (const T*)base + i;
}

void random_halves(Halves& out, int n, uint64_t key, uint64_t counter, uint32_t stream, uint32_t step) {
  alignas(64) uint32_t low[COUNTERS], high[COUNTERS];
  for (int c = 0; c < n / VECTOR; ++c) {
    low[c] = (uint32_t)(counter + (uint64_t)c);
    high[c] = (uint32_t)((counter + (uint64_t)c) >> 32);
  }
  const uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
  alignas(64) uint32_t words[4][COUNTERS];
  for (int c = 0; c < n / VECTOR; ++c) {
    uint32_t c0 = low[c], c1 = high[c], c2 = stream, c3 = step, k0 = key0, k1 = key1;
#pragma GCC unroll 7
    for (int r = 0; r < PHILOX_ROUNDS; ++r) {
      const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
      c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
      c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
      c1 = (uint32_t)p1;
      c3 = (uint32_t)p0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words[0][c] = c0;
    words[1][c] = c1;
    words[2][c] = c2;
    words[3][c] = c3;
  }
  alignas(64) uint32_t rows[TILE / 2];
  for (int c = 0; c < n / VECTOR; ++c)
    for (int j = 0; j < 4; ++j) rows[4 * c + j] = words[j][c];
  memcpy(out.x, rows, (size_t)n * 2);
}

// ---------------------------------------------------------------------------------- main weights

// Returns fp32 main weights of a tile: the tensor itself, or the buffer.
float* read_main(int kind, const void* weight, void* rest, int64_t i, int n, Buffer& buffer) {
  float* __restrict x = buffer.x;
  const uint16_t* __restrict w = at<uint16_t>(weight, i);
  switch (kind) {
    case GOOSE_MAIN_FP32: return at<float>(rest, i);
    case GOOSE_MAIN_SPLIT16: {
      const int16_t* __restrict r = at<int16_t>(rest, i);
      for (int k = 0; k < n; ++k) x[k] = join16(w[k], r[k]);
      break;
    }
    case GOOSE_MAIN_SPLIT8: {
      const int8_t* __restrict r = at<int8_t>(rest, i);
      for (int k = 0; k < n; ++k) x[k] = join8(w[k], r[k]);
      break;
    }
    default:
      for (int k = 0; k < n; ++k) x[k] = from_bf16(w[k]);
  }
  return x;
}

// random: nullptr rounds to nearest.
void write_main(int kind, void* weight, void* rest, int64_t i, int n, const float* __restrict x, const Halves* random) {
  uint16_t* __restrict w = at<uint16_t>(weight, i);
  const uint16_t* __restrict h = random ? random->x : nullptr;
  switch (kind) {
    case GOOSE_MAIN_FP32:
      if (x != at<float>(rest, i)) memcpy(at<float>(rest, i), x, (size_t)n * 4);
      if (weight)
        for (int k = 0; k < n; ++k) w[k] = nearest_bf16(x[k]);
      break;
    case GOOSE_MAIN_SPLIT16: {
      int16_t* __restrict r = at<int16_t>(rest, i);
      for (int k = 0; k < n; ++k) {
        const Split s = split16(x[k]);
        w[k] = s.high;
        r[k] = (int16_t)s.rest;
      }
      break;
    }
    case GOOSE_MAIN_SPLIT8: {
      int8_t* __restrict r = at<int8_t>(rest, i);
      if (h) {
        for (int k = 0; k < n; ++k) {
          const Split s = split8(x[k], h[k] & 0xffu);
          w[k] = s.high;
          r[k] = (int8_t)s.rest;
        }
      } else {
        for (int k = 0; k < n; ++k) {
          const Split s = split8(x[k], 0x80u);
          w[k] = s.high;
          r[k] = (int8_t)s.rest;
        }
      }
      break;
    }
    default:
      if (h) {
        for (int k = 0; k < n; ++k) w[k] = stochastic_bf16(x[k], h[k]);
      } else {
        for (int k = 0; k < n; ++k) w[k] = nearest_bf16(x[k]);
      }
  }
}

// --------------------------------------------------------------------------------------- moments

float* read_moment(int kind, bool second, void* values, const void* scales, int64_t i, int n, Buffer& buffer) {
  float* __restrict x = buffer.x;
  if (kind == GOOSE_MOMENT_FP32) return at<float>(values, i);
  if (kind == GOOSE_MOMENT_BF16) {
    const uint16_t* __restrict h = at<uint16_t>(values, i);
    for (int k = 0; k < n; ++k) x[k] = from_bf16(h[k]);
  }
  if (kind == GOOSE_MOMENT_BLOCK8) {
    const uint8_t* __restrict c = at<uint8_t>(values, i);
    for (int b = 0; b < n; b += BLOCK) {
      const int64_t block = (i + b) / BLOCK;
      if (second) {
        const float scale = *at<float>(scales, block);
        for (int k = b; k < b + BLOCK; ++k) x[k] = from_second_code(c[k], scale);
      } else {
        const float scale = from_bf16(*at<uint16_t>(scales, block));
        for (int k = b; k < b + BLOCK; ++k) x[k] = mul(from_e4m3(c[k]), scale);
      }
    }
  }
  return x;
}

uint32_t largest_bits(const float* __restrict x) {
  int32_t largest = 0;
  for (int k = 0; k < BLOCK; ++k) {
    const int32_t u = (int32_t)(bits(x[k]) & 0x7fffffffu);
    largest = u > largest ? u : largest;
  }
  return (uint32_t)largest;
}

void encode_second(uint8_t* __restrict c, float* scale, const float* __restrict v, const uint16_t* __restrict random) {
  alignas(64) float r[BLOCK];
  for (int k = 0; k < BLOCK; ++k) r[k] = root(root(v[k]));
  *scale = second_scale(largest_bits(r));
  const float inv = inverse(*scale);
  if (random) {
    for (int k = 0; k < BLOCK; ++k) c[k] = to_second_code(r[k], inv, fraction_of(random[k]));
  } else {
    for (int k = 0; k < BLOCK; ++k) c[k] = to_second_code(r[k], inv, 0.5f);
  }
}

void encode_first(uint8_t* __restrict c, uint16_t* scale, const float* __restrict m) {
  const float s = first_scale(largest_bits(m)), inv = inverse(s);
  *scale = (uint16_t)(bits(s) >> 16);
  for (int k = 0; k < BLOCK; ++k) c[k] = to_e4m3(first_code_value(m[k], inv));
}

void write_moment(int kind, bool second, void* values, void* scales, int64_t i, int n, const float* __restrict x,
                  const Halves* random) {
  if (kind == GOOSE_MOMENT_FP32 && x != at<float>(values, i)) memcpy(at<float>(values, i), x, (size_t)n * 4);
  if (kind == GOOSE_MOMENT_BF16) {
    uint16_t* __restrict h = at<uint16_t>(values, i);
    if (random) {
      const uint16_t* __restrict r = random->x;
      for (int k = 0; k < n; ++k) h[k] = stochastic_bf16(x[k], r[k]);
    } else {
      for (int k = 0; k < n; ++k) h[k] = nearest_bf16(x[k]);
    }
  }
  if (kind == GOOSE_MOMENT_BLOCK8) {
    uint8_t* __restrict c = at<uint8_t>(values, i);
    for (int b = 0; b < n; b += BLOCK) {
      const int64_t block = (i + b) / BLOCK;
      if (second) encode_second(c + b, at<float>(scales, block), x + b, random ? random->x + b : nullptr);
      else encode_first(c + b, at<uint16_t>(scales, block), x + b);
    }
  }
}

}  // namespace
}  // namespace goose
