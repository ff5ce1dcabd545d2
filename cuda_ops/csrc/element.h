// What happens to one element, for the CUDA kernels, the CPU loops and the emulator alike.
//
// Bits are the same everywhere because every operation is rounded by itself: no fused multiply-add
// (intrinsics on the device, -ffp-contract=off on the host), IEEE division and square root, and
// integer arithmetic for every rounding to fewer bits. cuda_ops/reference does the same in torch.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "abi.h"

#if defined(__CUDACC__)
#define GOOSE_FN __host__ __device__ __forceinline__
#else
#define GOOSE_FN inline __attribute__((always_inline))
#endif
#if defined(__CUDA_ARCH__)
#define GOOSE_ON_DEVICE 1
#endif

namespace goose {

constexpr int BLOCK = 64, CHUNK = 2048, VECTOR = 8;
constexpr int PHILOX_ROUNDS = 7;
constexpr uint16_t QUIET_NAN = 0x7fc0;

// ---------------------------------------------------------------- arithmetic, each op rounded once

#if defined(GOOSE_ON_DEVICE)
GOOSE_FN float mul(float a, float b) { return __fmul_rn(a, b); }
GOOSE_FN float add(float a, float b) { return __fadd_rn(a, b); }
GOOSE_FN float sub(float a, float b) { return __fadd_rn(a, -b); }
GOOSE_FN float divide(float a, float b) { return __fdiv_rn(a, b); }
GOOSE_FN float root(float a) { return __fsqrt_rn(a); }
GOOSE_FN double mul(double a, double b) { return __dmul_rn(a, b); }
GOOSE_FN double add(double a, double b) { return __dadd_rn(a, b); }
GOOSE_FN uint32_t bits(float x) { return __float_as_uint(x); }
GOOSE_FN float from_bits(uint32_t u) { return __uint_as_float(u); }
#else
GOOSE_FN float mul(float a, float b) { return a * b; }
GOOSE_FN float add(float a, float b) { return a + b; }
GOOSE_FN float sub(float a, float b) { return a - b; }
GOOSE_FN float divide(float a, float b) { return a / b; }
GOOSE_FN float root(float a) { return __builtin_sqrtf(a); }
GOOSE_FN double mul(double a, double b) { return a * b; }
GOOSE_FN double add(double a, double b) { return a + b; }
GOOSE_FN uint32_t bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
GOOSE_FN float from_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}
#endif

// ------------------------------------------------------------------------------- random numbers

struct Words {
  uint32_t w[4];
};

// Philox4x32-7. counter: element of the tp-local parameter / 8.
GOOSE_FN Words philox(uint64_t key, uint64_t counter, uint32_t stream, uint32_t step) {
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = stream, c3 = step;
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 7
#endif
  for (int r = 0; r < PHILOX_ROUNDS; ++r) {
    const uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
    const uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c1 = (uint32_t)p1;
    c3 = (uint32_t)p0;
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// --------------------------------------------------------------------------- fp32 to fewer bits

GOOSE_FN bool is_nan(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }
GOOSE_FN bool is_special(uint32_t u) { return (u & 0x7f800000u) == 0x7f800000u; }
GOOSE_FN float from_bf16(uint16_t h) { return from_bits((uint32_t)h << 16); }

GOOSE_FN uint16_t nearest_bf16(float x) {
  const uint32_t u = bits(x), v = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (uint16_t)(is_nan(u) ? QUIET_NAN : v);
}

GOOSE_FN uint16_t stochastic_bf16(float x, uint32_t random16) {
  const uint32_t u = bits(x), v = u + random16;
  const uint32_t w = is_special(v) ? u : v;  // finite values stay finite, inf stays inf
  return (uint16_t)(is_nan(u) ? QUIET_NAN : w >> 16);
}

struct Split {
  uint16_t high;
  int32_t rest;
};

GOOSE_FN Split split16(float x) {
  const uint32_t u = bits(x);
  const bool nan = is_nan(u);
  return {(uint16_t)(nan ? QUIET_NAN : (u + 0x8000u) >> 16), nan ? 0 : (int32_t)(int16_t)u};
}
GOOSE_FN float join16(uint16_t high, int32_t rest) { return from_bits(((uint32_t)high << 16) + (uint32_t)rest); }

// random8: 0..255; 0x80 rounds to nearest.
GOOSE_FN Split split8(float x, uint32_t random8) {
  const uint32_t u = bits(x), t = u + random8, v = is_special(t) ? u : t;
  const uint32_t high = is_special(u) ? u >> 16 : (v + 0x8000u) >> 16;
  return {(uint16_t)(is_nan(u) ? QUIET_NAN : high), is_special(u) ? 0 : (int32_t)(int8_t)(v >> 8)};
}
GOOSE_FN float join8(uint16_t high, int32_t rest) {
  return from_bits(((uint32_t)high << 16) + ((uint32_t)rest << 8));
}

// --------------------------------------------------------------------------------- 8-bit moments

// Bits of non-negative floats are ordered like the floats; NaN is above inf.
GOOSE_FN float first_scale(uint32_t largest_bits) {
  const float largest = mul(from_bits(largest_bits), 1.0f / 448.0f);
  uint32_t u = (bits(largest) + 0xffffu) & 0xffff0000u;
  u = is_special(u) ? 0x7f7f0000u : u;
  return largest < 1.17549435e-38f ? 0.0f : from_bits(u);
}
GOOSE_FN float second_scale(uint32_t largest_bits) { return mul(from_bits(largest_bits), 1.0f / 255.0f); }
GOOSE_FN float inverse(float scale) { return scale > 0.0f ? divide(1.0f, scale) : 0.0f; }

GOOSE_FN float first_code_value(float x, float inverse_scale) {
  const float y = mul(x, inverse_scale), z = y < -448.0f ? -448.0f : y;
  return z > 448.0f ? 448.0f : z;
}

// e4m3, to nearest even; |x| <= 448.
GOOSE_FN uint8_t to_e4m3(float x) {
  const uint32_t u = bits(x), sign = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
  const float tiny = sub(add(mul(from_bits(a), 512.0f), 8388608.0f), 8388608.0f);
  const uint32_t denormal = (uint32_t)(int32_t)(a < 0x3c800000u ? tiny : 0.0f);
  const uint32_t normal = ((a + 0x7ffffu + ((a >> 20) & 1u)) >> 20) - (120u << 3);
  const uint32_t code = a < 0x3c800000u ? denormal : normal;
  return (uint8_t)(sign | (is_nan(u) ? 0x7fu : code));
}
GOOSE_FN float from_e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu, sign = (uint32_t)(code & 0x80u) << 24;
  const float tiny = mul((float)(int32_t)magnitude, 0.001953125f);
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t u = magnitude < 8u ? bits(tiny) : magnitude == 0x7fu ? 0x7fc00000u : normal;
  return from_bits(u | sign);
}

GOOSE_FN uint8_t to_second_code(float fourth_root, float inverse_scale, float fraction) {
  const int32_t c = (int32_t)add(mul(fourth_root, inverse_scale), fraction);
  const int32_t least = fourth_root > 0.0f ? 1 : 0, most = c > 255 ? 255 : c;
  return (uint8_t)(most > least ? most : least);
}
GOOSE_FN float from_second_code(uint8_t code, float scale) {
  const float y = mul((float)(int32_t)code, scale), z = mul(y, y);
  return mul(z, z);
}
GOOSE_FN float fraction_of(uint32_t random16) { return mul((float)(int32_t)random16, 1.0f / 65536.0f); }

// --------------------------------------------------------------------------------------- updates

struct Derived {  // one row of StepState.derived
  float decay, l2, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_root2, eps, sign, nesterov, unused;
};

GOOSE_FN void adam(float& p, float& m, float& v, float g, const Derived& d) {
  g = add(g, mul(d.l2, p));
  m = add(m, mul(d.one_minus_beta1, sub(g, m)));
  v = add(mul(v, d.beta2), mul(d.one_minus_beta2, mul(g, g)));
  const float denominator = add(mul(root(v), d.inv_root2), d.eps);
  p = sub(mul(p, d.decay), mul(d.step_size, divide(m, denominator)));
}

GOOSE_FN void lion(float& p, float& m, float g, const Derived& d) {
  g = add(g, mul(d.l2, p));
  const float blend = add(mul(m, d.beta1), mul(d.one_minus_beta1, g));
  const float sign = (blend > 0.0f ? 1.0f : 0.0f) - (blend < 0.0f ? 1.0f : 0.0f);
  m = add(mul(m, d.beta2), mul(d.one_minus_beta2, g));
  p = sub(mul(p, d.decay), mul(d.step_size, sign));
}

GOOSE_FN void sgd(float& p, float& m, float g, const Derived& d, bool momentum) {
  g = add(g, mul(d.l2, p));
  float direction = g;
  if (momentum) {
    m = add(mul(m, d.beta1), mul(d.one_minus_beta2, g));
    const float ahead = add(g, mul(d.beta1, m));
    direction = d.nesterov != 0.0f ? ahead : m;
  }
  p = sub(mul(p, d.decay), mul(d.step_size, direction));
}

// Eight squares, by halves: (0,4)(1,5)(2,6)(3,7), then (0,2)(1,3), then the last two.
GOOSE_FN float sum8(const float* x) {
  float s[4];
  for (int k = 0; k < 4; ++k) s[k] = add(mul(x[k], x[k]), mul(x[k + 4], x[k + 4]));
  return add(add(s[0], s[2]), add(s[1], s[3]));
}
GOOSE_FN double weigh(float sum, float weight) {
  const double s = (double)sum;  // what counts nothing still reports NaN and inf: s - s is 0 or NaN
  return weight != 0.0f ? mul(s, (double)weight) : add(s, -s);
}

// -------------------------------------------------------------------------------------- prepare

GOOSE_FN void prepare_group(const goose_prepare_args& a, int group) {
  const double* h = a.hyper + 8 * group;
  double* powers = a.powers + 2 * group;
  float* out = a.derived + 12 * group;
  const double lr = h[0], beta1 = h[1], beta2 = h[2], decay = h[4];
  const bool decoupled = h[7] != 0.0, first = powers[1] == 1.0;
  const double power1 = mul(powers[0], beta1);
  const double power2 = a.algorithm == GOOSE_SGD ? 0.0 : mul(powers[1], beta2);
  double step_size = lr, inverse_root = 1.0, gain = add(1.0, -beta2);
  if (a.algorithm == GOOSE_ADAM) {
    step_size = lr / add(1.0, -power1);
    inverse_root = 1.0 / sqrt(add(1.0, -power2));
  }
  if (a.algorithm == GOOSE_SGD && first) gain = 1.0;
  out[0] = (float)(decoupled ? add(1.0, -mul(lr, decay)) : 1.0);
  out[1] = (float)(decoupled ? 0.0 : decay);
  out[2] = (float)beta1;
  out[3] = (float)add(1.0, -beta1);
  out[4] = (float)beta2;
  out[5] = (float)gain;
  out[6] = (float)step_size;
  out[7] = (float)inverse_root;
  out[8] = (float)h[3];
  out[9] = (float)h[5];
  out[10] = (float)h[6];
  powers[0] = power1;
  powers[1] = power2;
}

struct Decision {
  float factor, norm, clip;
  bool good;
};
GOOSE_FN Decision decide(const goose_prepare_args& a) {
  const float scale = a.scale ? *a.scale : 1.0f;
  const float norm = mul((float)sqrt(*a.norm2), scale);
  float clip = 1.0f;
  if (a.max_norm > 0.0f) {
    clip = divide(a.max_norm, add(norm, 1e-6f));
    clip = clip > 1.0f ? 1.0f : clip;
  }
  return {mul(scale, clip), norm, clip, !is_special(bits(norm))};
}
GOOSE_FN void conclude(const goose_prepare_args& a, const Decision& d) {
  a.scalars[1] = d.norm;
  if (d.good) {
    a.scalars[0] = d.factor;
    a.scalars[2] = d.clip;
  }
  a.counters[0] += d.good ? 1 : 0;
  a.counters[1] += d.good ? 0 : 1;
  a.counters[2] = d.good ? 0 : a.counters[2] + 1;
  a.counters[3] = d.good ? 0 : 1;
}

}  // namespace goose
