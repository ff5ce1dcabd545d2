// The CUDA kernels: 256 threads of 8 elements per chunk of 2048, all loads before the first use, 64-bit
// indices. Compiled by nvcc, or by g++ under emulate.h for tests.
#pragma once
#include "registers.cuh"

namespace goose {

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
