// The CPU library's loops over tiles, simple enough for the compiler to vectorize. Compiled once per
// instruction set, with GOOSE_TABLE naming the result.
#include "cpu_table.h"
#include "cpu_tiles.h"

namespace goose {
namespace {

struct Run {  // elements of one segment
  int64_t segment, group;
  Derived d;
  float factor;
  uint32_t step;
};

template <int BF16>
void update_adam(float* __restrict p, float* __restrict m, float* __restrict v, const void* grad, int n, const Run& run) {
  const Derived d = run.d;
  const float factor = run.factor;
  for (int k = 0; k < n; ++k) {
    const float g = BF16 ? from_bf16(((const uint16_t*)grad)[k]) : ((const float*)grad)[k];
    adam(p[k], m[k], v[k], mul(g, factor), d);
  }
}
template <int BF16>
void update_lion(float* __restrict p, float* __restrict m, const void* grad, int n, const Run& run) {
  const Derived d = run.d;
  const float factor = run.factor;
  for (int k = 0; k < n; ++k) {
    const float g = BF16 ? from_bf16(((const uint16_t*)grad)[k]) : ((const float*)grad)[k];
    lion(p[k], m[k], mul(g, factor), d);
  }
}
template <int BF16, bool MOMENTUM>
void update_sgd(float* __restrict p, float* __restrict m, const void* grad, int n, const Run& run) {
  const Derived d = run.d;
  const float factor = run.factor;
  for (int k = 0; k < n; ++k) {
    const float g = BF16 ? from_bf16(((const uint16_t*)grad)[k]) : ((const float*)grad)[k];
    float unused = 0.0f;
    sgd(p[k], MOMENTUM ? m[k] : unused, mul(g, factor), d, MOMENTUM);
  }
}
template <int BF16>
void update(const goose_step_args& a, float* p, float* m, float* v, const void* grad, int n, const Run& run) {
  if (a.algorithm == GOOSE_ADAM) update_adam<BF16>(p, m, v, grad, n, run);
  if (a.algorithm == GOOSE_LION) update_lion<BF16>(p, m, grad, n, run);
  if (a.algorithm == GOOSE_SGD && a.first_kind != GOOSE_MOMENT_NONE) update_sgd<BF16, true>(p, m, grad, n, run);
  if (a.algorithm == GOOSE_SGD && a.first_kind == GOOSE_MOMENT_NONE) update_sgd<BF16, false>(p, m, grad, n, run);
}

void step_tile(const goose_step_args& a, int64_t i, int n, const Run& run) {
  Buffer main_buffer, first_buffer, second_buffer;
  Halves main_random, second_random;
  const goose_segments& s = a.segments;
  float* p = read_main(a.main_kind, a.weight, a.rest, i, n, main_buffer);
  float* m = read_moment(a.first_kind, false, a.exp_avg, a.exp_avg_scale, i, n, first_buffer);
  float* v = read_moment(a.second_kind, true, a.exp_avg_sq, a.exp_avg_sq_scale, i, n, second_buffer);
  if (a.grad_kind == GOOSE_GRAD_BF16) update<1>(a, p, m, v, at<uint16_t>(a.grad, i), n, run);
  else update<0>(a, p, m, v, at<float>(a.grad, i), n, run);
  const uint64_t key = s.key[run.segment];
  const uint64_t counter = (uint64_t)(s.first[run.segment] + i - s.start[run.segment]) / VECTOR;
  const bool random_main = a.main_kind == GOOSE_MAIN_SPLIT8 || a.main_kind == GOOSE_MAIN_BF16;
  if (random_main) random_halves(main_random, n, key, counter, 0, run.step);
  write_main(a.main_kind, a.weight, a.rest, i, n, p, random_main ? &main_random : nullptr);
  if (a.first_kind != GOOSE_MOMENT_NONE) write_moment(a.first_kind, false, a.exp_avg, a.exp_avg_scale, i, n, m, nullptr);
  const bool random_second = a.second_kind == GOOSE_MOMENT_BF16 || a.second_kind == GOOSE_MOMENT_BLOCK8;
  if (random_second) random_halves(second_random, n, key, counter, 1, run.step);
  if (a.second_kind != GOOSE_MOMENT_NONE)
    write_moment(a.second_kind, true, a.exp_avg_sq, a.exp_avg_sq_scale, i, n, v, random_second ? &second_random : nullptr);
}

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

void step(const goose_step_args& a) {
  if (a.counters[3] || !a.chunks) return;
  const goose_segments& s = a.segments;
  const int64_t end = smaller((a.first_chunk + a.chunks) * CHUNK, s.numel);
  int64_t i = a.first_chunk * CHUNK, segment = s.chunk_segment[a.first_chunk];
  for (; i < end; ++segment) {
    const int64_t stop = segment + 1 < s.count ? smaller(s.start[segment + 1], end) : end;
    Run run;
    run.segment = segment;
    run.group = s.group[segment];
    run.step = (uint32_t)a.counters[0];
    if (run.group < 0) {
      i = stop;
      continue;
    }
    run.d = ((const Derived*)a.derived)[run.group];
    run.factor = mul(a.scalars[0], run.d.sign);
    for (; i < stop; i += TILE) step_tile(a, i, (int)smaller(TILE, stop - i), run);
    i = stop;
  }
}

// ------------------------------------------------------------------------------------------ norm

// Sums of eight squares each, in the order of sum8. n is a multiple of 64.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define GOOSE_SHUFFLE 1
#endif
#endif
void sums_of_eight(const float* __restrict x, int n, float* __restrict out) {
#if defined(GOOSE_SHUFFLE)
  typedef float V __attribute__((vector_size(64), aligned(4), may_alias));
  typedef float H __attribute__((vector_size(32), aligned(4), may_alias));
  for (int i = 0; i < n; i += 64) {
    V q[4], fours[2];
    for (int k = 0; k < 4; ++k) {
      q[k] = *(const V*)(x + i + 16 * k);
      q[k] = q[k] * q[k];
    }
    for (int k = 0; k < 2; ++k) {
      const V a = q[2 * k], b = q[2 * k + 1];
      fours[k] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                 __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
    const V a = fours[0], b = fours[1];
    const V twos = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                   __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    *(H*)(out + i / 8) = __builtin_shufflevector(twos, twos, 0, 2, 4, 6, 8, 10, 12, 14) +
                         __builtin_shufflevector(twos, twos, 1, 3, 5, 7, 9, 11, 13, 15);
  }
#else
  for (int t = 0; t < n / VECTOR; ++t) out[t] = sum8(x + VECTOR * t);
#endif
}

template <int HALF>
inline void fold(double* __restrict x) {
  for (int lane = 0; lane < HALF; ++lane) x[lane] = add(x[lane], x[lane + HALF]);
}

// The tree of kernels.cuh: 256 threads of eight elements, halves of a warp, halves of the warps.
void chunk_partial(const goose_segments& s, int64_t chunk, const float* x, int n, double* out) {
  alignas(64) float sums[CHUNK / VECTOR];
  sums_of_eight(x, n, sums);
  alignas(64) double tree[CHUNK / VECTOR] = {0};
  int64_t segment = s.chunk_segment[chunk];
  for (int t = 0; t < n / VECTOR;) {
    const int64_t next = segment + 1 < s.count ? s.start[segment + 1] - chunk * CHUNK : n;
    const int stop = (int)smaller(next, n) / VECTOR;
    const float weight = s.norm_weight[segment];
    if (weight == 1.0f) {  // almost always; a product with 1 is exact
      for (; t < stop; ++t) tree[t] = (double)sums[t];
    } else {
      for (; t < stop; ++t) tree[t] = weigh(sums[t], weight);
    }
    ++segment;
  }
  double warps[8];
  for (int w = 0; w < 8; ++w) {
    double* lanes = tree + 32 * w;
    fold<16>(lanes);
    fold<8>(lanes);
    fold<4>(lanes);
    fold<2>(lanes);
    warps[w] = add(lanes[0], lanes[1]);
  }
  for (int half = 4; half; half >>= 1)
    for (int w = 0; w < half; ++w) warps[w] = add(warps[w], warps[w + half]);
  *out = warps[0];
}

void sum_of_squares(const goose_norm_args& a) {
  for (int64_t chunk = a.first_chunk; chunk < a.first_chunk + a.chunks; ++chunk) {
    const int64_t i = chunk * CHUNK;
    const int n = (int)smaller(CHUNK, a.segments.numel - i);
    alignas(64) float x[CHUNK];
    const float* values = at<float>(a.values, i);
    if (a.kind == GOOSE_GRAD_BF16) {
      const uint16_t* __restrict h = at<uint16_t>(a.values, i);
      for (int k = 0; k < n; ++k) x[k] = from_bf16(h[k]);
      values = x;
    }
    chunk_partial(a.segments, chunk, values, n, a.partials + chunk);
  }
}

void unpack(const goose_norm_args& a) {
  const float scale = a.scale ? *a.scale : 1.0f;
  for (int64_t chunk = a.first_chunk; chunk < a.first_chunk + a.chunks; ++chunk) {
    const int64_t i = chunk * CHUNK;
    const int n = (int)smaller(CHUNK, a.segments.numel - i);
    alignas(64) float x[CHUNK];
    for (int rank = 0; rank < a.dp; ++rank) {
      const uint16_t* __restrict h = at<uint16_t>(a.values, rank * a.segments.numel + i);
      if (rank) {
        for (int k = 0; k < n; ++k) x[k] = add(x[k], from_bf16(h[k]));
      } else {
        for (int k = 0; k < n; ++k) x[k] = from_bf16(h[k]);
      }
    }
    if (a.scale)
      for (int k = 0; k < n; ++k) x[k] = mul(x[k], scale);
    if (a.kind == GOOSE_GRAD_BF16) {
      uint16_t* __restrict out = at<uint16_t>(a.out, i);
      for (int k = 0; k < n; ++k) {
        out[k] = nearest_bf16(x[k]);
        x[k] = from_bf16(out[k]);
      }
    } else {
      memcpy(at<float>(a.out, i), x, (size_t)n * 4);
    }
    chunk_partial(a.segments, chunk, x, n, a.partials + chunk);
  }
}

// ---------------------------------------------------------------------------------- whole shards

template <class F>
void tiles(const goose_convert_args& a, F f) {
  for (int64_t i = 0; i < a.numel; i += TILE) f(i, (int)smaller(TILE, a.numel - i));
}
void split_main(const goose_convert_args& a) {
  tiles(a, [&](int64_t i, int n) { write_main(a.kind, a.codes, a.extra, i, n, at<float>(a.values, i), nullptr); });
}
void join_main(const goose_convert_args& a) {
  tiles(a, [&](int64_t i, int n) {
    Buffer buffer;
    memcpy(at<float>(a.values, i), read_main(a.kind, a.codes, a.extra, i, n, buffer), (size_t)n * 4);
  });
}
void write_moments(const goose_convert_args& a) {
  tiles(a, [&](int64_t i, int n) {
    write_moment(a.kind, a.second != 0, a.codes, a.extra, i, n, at<float>(a.values, i), nullptr);
  });
}
void read_moments(const goose_convert_args& a) {
  tiles(a, [&](int64_t i, int n) {
    Buffer buffer;
    memcpy(at<float>(a.values, i), read_moment(a.kind, a.second != 0, a.codes, a.extra, i, n, buffer), (size_t)n * 4);
  });
}

}  // namespace

extern const Table GOOSE_TABLE = {step, sum_of_squares, unpack, split_main, join_main, write_moments, read_moments};

}  // namespace goose
