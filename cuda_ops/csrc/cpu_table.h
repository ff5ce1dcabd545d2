// The loops of the CPU library, once per instruction set.
#pragma once
#include "abi.h"

namespace goose {

struct Table {
  void (*step)(const goose_step_args&);
  void (*sum_of_squares)(const goose_norm_args&);
  void (*unpack)(const goose_norm_args&);
  void (*split_main)(const goose_convert_args&);
  void (*join_main)(const goose_convert_args&);
  void (*write_moment)(const goose_convert_args&);
  void (*read_moment)(const goose_convert_args&);
};

extern const Table table_baseline;
#if defined(__x86_64__)
extern const Table table_v3;  // AVX2
extern const Table table_v4;  // AVX-512
#endif

}  // namespace goose
