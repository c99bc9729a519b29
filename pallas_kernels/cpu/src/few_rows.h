// A product with weights as they are, for a few rows.
#pragma once

#include <cstdint>

#include "attention.h"

namespace jaxpage {

constexpr int kMostFewRows = 8, kOutputsOfUnit = 16;

// Letters as in pallas_kernels: T rows, I inputs, O outputs.
struct FewRows {
  Type type;      // of x and w: kF32, kBF16 or kI8
  const void* x;  // [T, I]
  const void* w;  // [O, I]
  void* out;      // [T, O]: int32_t with kI8
  bool out_is_float;  // else of the type of x
  int64_t num_rows, num_in, num_out;
};

// The unit of work: kOutputsOfUnit outputs of all rows, from `first` on. Null where there is no kernel for this instruction set.
typedef void (*MultiplyFew)(const FewRows&, int64_t first);

// To eight bits, with a scale of its own.
typedef void (*RoundRow)(const float* x, int64_t num_in, int8_t* rounded, float* scale);

}  // namespace jaxpage
