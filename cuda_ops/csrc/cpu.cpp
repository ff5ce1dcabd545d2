// The CPU library's C interface: checks, and the loops for the processor that it runs on.
#include <system_error>
#include <thread>
#include <vector>

#include "cpu_table.h"
#include "element.h"

namespace {

using namespace goose;

const Table& choose() {
#if defined(__x86_64__) && !defined(GOOSE_BASELINE_ONLY)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
    return table_v4;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return table_v3;
#endif
  return table_baseline;
}

const Table& table() {
  static const Table& chosen = choose();
  return chosen;
}

bool chunks_fit(const goose_segments& s, int64_t first, int64_t chunks) {
  return s.numel > 0 && s.numel % BLOCK == 0 && s.count > 0 && first >= 0 && chunks > 0 &&
         (first + chunks - 1) * CHUNK < s.numel;
}
// Gives each thread a range of chunks, which are independent of each other. Few chunks are not worth
// a thread: one takes as long to start as 16 chunks to step.
template <class Args>
void in_parallel(void (*loop)(const Args&), const Args& args) {
  const int64_t worth = args.chunks / 64, wanted = args.threads < worth ? args.threads : worth;
  const int64_t parts = wanted < 1 ? 1 : wanted;
  std::vector<std::thread> others;
  int64_t first = args.first_chunk;
  const int64_t end = args.first_chunk + args.chunks;
  for (int64_t part = 1; part < parts; ++part) {
    Args mine = args;
    mine.first_chunk = first;
    mine.chunks = args.chunks / parts;
    try {
      others.emplace_back([loop, mine] { loop(mine); });
    } catch (const std::system_error&) {
      break;  // No more threads: the caller's own does the rest.
    }
    first += mine.chunks;
  }
  Args rest = args;
  rest.first_chunk = first;
  rest.chunks = end - first;
  loop(rest);
  for (std::thread& other : others) other.join();
}

bool moment_kind(int kind) { return kind >= GOOSE_MOMENT_NONE && kind <= GOOSE_MOMENT_BLOCK8; }
bool main_kind(int kind) { return kind >= GOOSE_MAIN_FP32 && kind <= GOOSE_MAIN_BF16; }

}  // namespace

extern "C" {

int goose_abi_version(void) { return GOOSE_ABI_VERSION; }
const char* goose_build(void) {
#if defined(__x86_64__) && !defined(GOOSE_BASELINE_ONLY)
  return &table() == &table_v4 ? "AVX-512" : &table() == &table_v3 ? "AVX2" : "baseline";
#else
  return "baseline";
#endif
}
const char* goose_error(int code) {
  if (code == GOOSE_BAD_ARGUMENT) return "a size, range or pointer is wrong";
  if (code == GOOSE_UNKNOWN_KIND) return "no loop for this combination of kinds";
  return "unknown";
}
int goose_probe(int) { return 0; }

int goose_sum_of_squares(const goose_norm_args* a, void*) {
  if (!a->chunks) return 0;
  if (!chunks_fit(a->segments, a->first_chunk, a->chunks)) return GOOSE_BAD_ARGUMENT;
  in_parallel(table().sum_of_squares, *a);
  return 0;
}
int goose_unpack(const goose_norm_args* a, void*) {
  if (!a->chunks) return 0;
  if (!chunks_fit(a->segments, a->first_chunk, a->chunks) || a->dp < 1) return GOOSE_BAD_ARGUMENT;
  in_parallel(table().unpack, *a);
  return 0;
}

int goose_reduce(const double* partials, int64_t count, double* out, int, void*) {
  double tree[1024] = {0};
  for (int64_t i = 0; i < count; ++i) tree[i % 1024] = add(tree[i % 1024], partials[i]);
  for (int half = 16; half; half >>= 1)
    for (int warp = 0; warp < 1024; warp += 32)
      for (int lane = 0; lane < half; ++lane) tree[warp + lane] = add(tree[warp + lane], tree[warp + lane + half]);
  for (int half = 16; half; half >>= 1)
    for (int warp = 0; warp < half; ++warp) tree[32 * warp] = add(tree[32 * warp], tree[32 * (warp + half)]);
  *out = tree[0];
  return 0;
}

int goose_prepare(const goose_prepare_args* a, void*) {
  if (a->groups < 0) return GOOSE_BAD_ARGUMENT;
  const Decision d = decide(*a);
  for (int group = 0; d.good && group < a->groups; ++group) prepare_group(*a, group);
  conclude(*a, d);
  return 0;
}

int goose_step(const goose_step_args* a, void*) {
  if (!a->chunks) return 0;
  if (!chunks_fit(a->segments, a->first_chunk, a->chunks)) return GOOSE_BAD_ARGUMENT;
  const bool adam = a->algorithm == GOOSE_ADAM, sgd = a->algorithm == GOOSE_SGD;
  const bool has_first = a->first_kind != GOOSE_MOMENT_NONE, has_second = a->second_kind != GOOSE_MOMENT_NONE;
  if (a->algorithm < GOOSE_ADAM || a->algorithm > GOOSE_SGD || has_second != adam || !(has_first || sgd) ||
      !moment_kind(a->first_kind) || !moment_kind(a->second_kind) || !main_kind(a->main_kind))
    return GOOSE_UNKNOWN_KIND;
  in_parallel(table().step, *a);
  return 0;
}

#define GOOSE_CONVERT(name, known)                                       \
  int goose_##name(const goose_convert_args* a, void*) {                 \
    if (a->numel < 0 || a->numel % BLOCK) return GOOSE_BAD_ARGUMENT;     \
    if (!(known)) return GOOSE_UNKNOWN_KIND;                             \
    table().name(*a);                                                    \
    return 0;                                                            \
  }
GOOSE_CONVERT(split_main, main_kind(a->kind))
GOOSE_CONVERT(join_main, main_kind(a->kind))
GOOSE_CONVERT(write_moment, moment_kind(a->kind) && a->kind != GOOSE_MOMENT_NONE)
GOOSE_CONVERT(read_moment, moment_kind(a->kind) && a->kind != GOOSE_MOMENT_NONE)
}
