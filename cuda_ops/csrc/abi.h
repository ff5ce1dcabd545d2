// The C interface of both libraries (CPU and CUDA): plain pointers, no torch and no Python.
//
// Tensors and their types are described in cuda_ops/layout.py and cuda_ops/state.py. Every function
// returns 0, a positive cudaError_t, or a negative code of ours. `stream` is a CUDA stream handle,
// `device` the ordinal of the card; the CPU library ignores both.
#pragma once
#include <stdint.h>

#define GOOSE_ABI_VERSION 1
#define GOOSE_BAD_ARGUMENT (-1)
#define GOOSE_UNKNOWN_KIND (-2)
#define GOOSE_MISALIGNED (-3)

#ifdef __cplusplus
extern "C" {
#endif

enum goose_algorithm { GOOSE_ADAM = 0, GOOSE_LION = 1, GOOSE_SGD = 2 };
enum goose_grad { GOOSE_GRAD_FP32 = 0, GOOSE_GRAD_BF16 = 1 };
enum goose_main { GOOSE_MAIN_FP32 = 0, GOOSE_MAIN_SPLIT16 = 1, GOOSE_MAIN_SPLIT8 = 2, GOOSE_MAIN_BF16 = 3 };
enum goose_moment { GOOSE_MOMENT_NONE = 0, GOOSE_MOMENT_FP32 = 1, GOOSE_MOMENT_BF16 = 2, GOOSE_MOMENT_BLOCK8 = 3 };

typedef struct {
  const int64_t* start;
  const int32_t* group;
  const float* norm_weight;
  const uint64_t* key;
  const int64_t* first;
  const int32_t* chunk_segment;
  int64_t numel;
  int64_t count;
} goose_segments;

typedef struct {
  goose_segments segments;
  void* weight;
  void* rest;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* exp_avg_scale;
  void* exp_avg_sq_scale;
  const float* derived;      // [groups, 12]
  const int64_t* counters;   // [4]
  const float* scalars;      // [4]
  int64_t first_chunk;       // chunks [first_chunk, first_chunk + chunks) are stepped
  int64_t chunks;
  int32_t algorithm;
  int32_t grad_kind;
  int32_t main_kind;
  int32_t first_kind;
  int32_t second_kind;
  int32_t device;
  int32_t threads;           // of the CPU library; bits do not depend on it
} goose_step_args;

typedef struct {
  double* hyper;             // [groups, 8]
  double* powers;            // [groups, 2]
  float* derived;            // [groups, 12]
  int64_t* counters;         // [4]
  float* scalars;            // [4]
  const double* norm2;       // [1]
  const float* scale;        // [1] or NULL
  float max_norm;
  int32_t groups;
  int32_t algorithm;
  int32_t device;
} goose_prepare_args;

typedef struct {
  goose_segments segments;
  const void* values;        // [n] fp32 or bf16; unpack: [dp, n] bf16
  void* out;                 // unpack: [n] fp32 or bf16
  double* partials;          // [chunks]
  const float* scale;        // unpack: [1] or NULL
  int64_t first_chunk;
  int64_t chunks;
  int32_t kind;              // type of the gradients that are summed: goose_grad
  int32_t dp;
  int32_t device;
  int32_t threads;
} goose_norm_args;

typedef struct {
  void* values;              // [n] fp32
  void* codes;               // weight, or the moment's values
  void* extra;               // rest, or the moment's scales; may be NULL
  int64_t numel;
  int32_t kind;              // goose_main, or goose_moment
  int32_t second;            // a moment: 0 the first, 1 the second
  int32_t device;
} goose_convert_args;

int goose_abi_version(void);
const char* goose_build(void);       // what it was built for
const char* goose_error(int code);   // what a code says
int goose_probe(int device);         // one launch, waited for

int goose_sum_of_squares(const goose_norm_args*, void* stream);
int goose_reduce(const double* partials, int64_t count, double* out, int device, void* stream);
int goose_prepare(const goose_prepare_args*, void* stream);
int goose_step(const goose_step_args*, void* stream);
int goose_unpack(const goose_norm_args*, void* stream);
int goose_split_main(const goose_convert_args*, void* stream);
int goose_join_main(const goose_convert_args*, void* stream);
int goose_write_moment(const goose_convert_args*, void* stream);
int goose_read_moment(const goose_convert_args*, void* stream);

#ifdef __cplusplus
}
#endif
