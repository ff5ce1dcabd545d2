// Launches: one thread block per chunk, on the caller's stream and device.
#include "kernels.cuh"

namespace {

using namespace goose;

// Makes `device` current for a launch, and puts the caller's back.
struct OnDevice {
  int before = -1;
  int error = 0;
  explicit OnDevice(int device) {
    error = (int)cudaGetDevice(&before);
    if (!error && before != device) error = (int)cudaSetDevice(device);
    else before = -1;
  }
  ~OnDevice() {
    if (before >= 0) cudaSetDevice(before);
  }
};

bool aligned(const void* p) { return ((uintptr_t)p & 15) == 0; }
dim3 grid_of(int64_t chunks) { return dim3((unsigned)chunks); }
bool fits(int64_t chunks) { return chunks >= 0 && chunks <= 0x7fffffff; }
int64_t chunks_of(int64_t numel) { return (numel + CHUNK - 1) / CHUNK; }

template <int ALGORITHM, int MAIN, int FIRST, int SECOND>
int launch_step(const goose_step_args& a, void* stream) {
  auto kernel = step_kernel<ALGORITHM, MAIN, FIRST, SECOND>;
  GOOSE_LAUNCH(kernel, grid_of(a.chunks), dim3(THREADS), stream, a);
  return (int)cudaGetLastError();
}

template <int ALGORITHM, int MAIN, int FIRST>
int second_of(const goose_step_args& a, void* stream) {
  if constexpr (ALGORITHM != GOOSE_ADAM) {
    if (a.second_kind != GOOSE_MOMENT_NONE) return GOOSE_UNKNOWN_KIND;
    return launch_step<ALGORITHM, MAIN, FIRST, GOOSE_MOMENT_NONE>(a, stream);
  } else {
    switch (a.second_kind) {
      case GOOSE_MOMENT_FP32: return launch_step<ALGORITHM, MAIN, FIRST, GOOSE_MOMENT_FP32>(a, stream);
      case GOOSE_MOMENT_BF16: return launch_step<ALGORITHM, MAIN, FIRST, GOOSE_MOMENT_BF16>(a, stream);
      case GOOSE_MOMENT_BLOCK8: return launch_step<ALGORITHM, MAIN, FIRST, GOOSE_MOMENT_BLOCK8>(a, stream);
    }
    return GOOSE_UNKNOWN_KIND;
  }
}

template <int ALGORITHM, int MAIN>
int first_of(const goose_step_args& a, void* stream) {
  switch (a.first_kind) {
    case GOOSE_MOMENT_NONE:
      if constexpr (ALGORITHM == GOOSE_SGD) return second_of<ALGORITHM, MAIN, GOOSE_MOMENT_NONE>(a, stream);
      break;
    case GOOSE_MOMENT_FP32: return second_of<ALGORITHM, MAIN, GOOSE_MOMENT_FP32>(a, stream);
    case GOOSE_MOMENT_BF16: return second_of<ALGORITHM, MAIN, GOOSE_MOMENT_BF16>(a, stream);
    case GOOSE_MOMENT_BLOCK8: return second_of<ALGORITHM, MAIN, GOOSE_MOMENT_BLOCK8>(a, stream);
  }
  return GOOSE_UNKNOWN_KIND;
}

template <int ALGORITHM>
int main_of(const goose_step_args& a, void* stream) {
  switch (a.main_kind) {
    case GOOSE_MAIN_FP32: return first_of<ALGORITHM, GOOSE_MAIN_FP32>(a, stream);
    case GOOSE_MAIN_SPLIT16: return first_of<ALGORITHM, GOOSE_MAIN_SPLIT16>(a, stream);
    case GOOSE_MAIN_SPLIT8: return first_of<ALGORITHM, GOOSE_MAIN_SPLIT8>(a, stream);
    case GOOSE_MAIN_BF16: return first_of<ALGORITHM, GOOSE_MAIN_BF16>(a, stream);
  }
  return GOOSE_UNKNOWN_KIND;
}

template <int KIND, bool WRITE>
int launch_main(const goose_convert_args& a, void* stream) {
  auto kernel = main_kernel<KIND, WRITE>;
  GOOSE_LAUNCH(kernel, grid_of(chunks_of(a.numel)), dim3(THREADS), stream, a);
  return (int)cudaGetLastError();
}

template <bool WRITE>
int convert_main(const goose_convert_args& a, void* stream) {
  if (a.numel < 0 || a.numel % BLOCK || !fits(chunks_of(a.numel))) return GOOSE_BAD_ARGUMENT;
  if (!aligned(a.values) || !aligned(a.codes) || !aligned(a.extra)) return GOOSE_MISALIGNED;
  if (!a.numel) return 0;
  const OnDevice on(a.device);
  if (on.error) return on.error;
  switch (a.kind) {
    case GOOSE_MAIN_FP32: return launch_main<GOOSE_MAIN_FP32, WRITE>(a, stream);
    case GOOSE_MAIN_SPLIT16: return launch_main<GOOSE_MAIN_SPLIT16, WRITE>(a, stream);
    case GOOSE_MAIN_SPLIT8: return launch_main<GOOSE_MAIN_SPLIT8, WRITE>(a, stream);
    case GOOSE_MAIN_BF16: return launch_main<GOOSE_MAIN_BF16, WRITE>(a, stream);
  }
  return GOOSE_UNKNOWN_KIND;
}

template <int KIND, bool SECOND, bool WRITE>
int launch_moment(const goose_convert_args& a, void* stream) {
  auto kernel = moment_kernel<KIND, SECOND, WRITE>;
  GOOSE_LAUNCH(kernel, grid_of(chunks_of(a.numel)), dim3(THREADS), stream, a);
  return (int)cudaGetLastError();
}

template <bool SECOND, bool WRITE>
int moment_of(const goose_convert_args& a, void* stream) {
  switch (a.kind) {
    case GOOSE_MOMENT_FP32: return launch_moment<GOOSE_MOMENT_FP32, SECOND, WRITE>(a, stream);
    case GOOSE_MOMENT_BF16: return launch_moment<GOOSE_MOMENT_BF16, SECOND, WRITE>(a, stream);
    case GOOSE_MOMENT_BLOCK8: return launch_moment<GOOSE_MOMENT_BLOCK8, SECOND, WRITE>(a, stream);
  }
  return GOOSE_UNKNOWN_KIND;
}

template <bool WRITE>
int convert_moment(const goose_convert_args& a, void* stream) {
  if (a.numel < 0 || a.numel % BLOCK || !fits(chunks_of(a.numel))) return GOOSE_BAD_ARGUMENT;
  if (!aligned(a.values) || !aligned(a.codes)) return GOOSE_MISALIGNED;
  if (!a.numel) return 0;
  const OnDevice on(a.device);
  if (on.error) return on.error;
  return a.second ? moment_of<true, WRITE>(a, stream) : moment_of<false, WRITE>(a, stream);
}

int norm_check(const goose_norm_args& a) {
  if (a.segments.numel < 0 || a.segments.numel % BLOCK || !fits(a.chunks) || a.first_chunk < 0 ||
      (a.first_chunk + a.chunks - 1) * CHUNK >= a.segments.numel)
    return GOOSE_BAD_ARGUMENT;
  return aligned(a.values) && aligned(a.out) ? 0 : GOOSE_MISALIGNED;
}

}  // namespace

#ifndef GOOSE_BUILT_FOR
#define GOOSE_BUILT_FOR "unknown"
#endif

extern "C" {

int goose_abi_version(void) { return GOOSE_ABI_VERSION; }
const char* goose_build(void) { return GOOSE_BUILT_FOR; }
const char* goose_error(int code) {
  if (code == GOOSE_BAD_ARGUMENT) return "a size, range or pointer is wrong";
  if (code == GOOSE_UNKNOWN_KIND) return "no kernel for this combination of kinds";
  if (code == GOOSE_MISALIGNED) return "a tensor does not start at a multiple of 16 bytes";
  return cudaGetErrorString((cudaError_t)code);
}

int goose_probe(int device) {
  const OnDevice on(device);
  if (on.error) return on.error;
  GOOSE_LAUNCH(probe_kernel, dim3(1), dim3(1), nullptr);
  const int error = (int)cudaGetLastError();
  return error ? error : (int)cudaDeviceSynchronize();
}

int goose_sum_of_squares(const goose_norm_args* a, void* stream) {
  if (!a->chunks) return 0;
  if (const int error = norm_check(*a)) return error;
  const OnDevice on(a->device);
  if (on.error) return on.error;
  GOOSE_LAUNCH(sum_kernel, grid_of(a->chunks), dim3(THREADS), stream, *a);
  return (int)cudaGetLastError();
}

int goose_unpack(const goose_norm_args* a, void* stream) {
  if (!a->chunks) return 0;
  if (a->dp < 1) return GOOSE_BAD_ARGUMENT;
  if (const int error = norm_check(*a)) return error;
  const OnDevice on(a->device);
  if (on.error) return on.error;
  GOOSE_LAUNCH(unpack_kernel, grid_of(a->chunks), dim3(THREADS), stream, *a);
  return (int)cudaGetLastError();
}

int goose_reduce(const double* partials, int64_t count, double* out, int device, void* stream) {
  const OnDevice on(device);
  if (on.error) return on.error;
  GOOSE_LAUNCH(reduce_kernel, dim3(1), dim3(REDUCE_THREADS), stream, partials, count, out);
  return (int)cudaGetLastError();
}

int goose_prepare(const goose_prepare_args* a, void* stream) {
  if (a->groups < 0) return GOOSE_BAD_ARGUMENT;
  const OnDevice on(a->device);
  if (on.error) return on.error;
  GOOSE_LAUNCH(prepare_kernel, dim3(1), dim3(32), stream, *a);
  return (int)cudaGetLastError();
}

int goose_step(const goose_step_args* a, void* stream) {
  const goose_segments& s = a->segments;
  if (!a->chunks) return 0;
  if (s.numel <= 0 || s.numel % BLOCK || s.count < 1 || !fits(a->chunks) || a->first_chunk < 0 ||
      (a->first_chunk + a->chunks - 1) * CHUNK >= s.numel)
    return GOOSE_BAD_ARGUMENT;
  const void* tensors[] = {a->weight, a->rest, a->grad, a->exp_avg, a->exp_avg_sq};
  for (const void* tensor : tensors)
    if (!aligned(tensor)) return GOOSE_MISALIGNED;
  const OnDevice on(a->device);
  if (on.error) return on.error;
  switch (a->algorithm) {
    case GOOSE_ADAM: return main_of<GOOSE_ADAM>(*a, stream);
    case GOOSE_LION: return main_of<GOOSE_LION>(*a, stream);
    case GOOSE_SGD: return main_of<GOOSE_SGD>(*a, stream);
  }
  return GOOSE_UNKNOWN_KIND;
}

int goose_split_main(const goose_convert_args* a, void* stream) { return convert_main<true>(*a, stream); }
int goose_join_main(const goose_convert_args* a, void* stream) { return convert_main<false>(*a, stream); }
int goose_write_moment(const goose_convert_args* a, void* stream) { return convert_moment<true>(*a, stream); }
int goose_read_moment(const goose_convert_args* a, void* stream) { return convert_moment<false>(*a, stream); }
}
