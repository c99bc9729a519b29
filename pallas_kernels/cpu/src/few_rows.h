// A product with weights as they are, for a few rows.
#pragma once

#include <cstdint>

namespace jaxpage {

constexpr int kMostFewRows = 8, kOutputsOfUnit = 16;

// Letters as in pallas_kernels: T rows, I inputs, O outputs. Numbers are float, or bfloat16 as its bits.
struct FewRows {
  const void* x;  // [T, I]
  const void* w;  // [O, I], of the type of x
  void* out;      // [T, O]
  int64_t num_rows, num_in, num_out;
  bool is_bfloat16, out_is_bfloat16;
};

// The unit of work: kOutputsOfUnit outputs of all rows, from `first` on. Null where there is no kernel for this instruction set.
typedef void (*MultiplyFew)(const FewRows&, int64_t first);

}  // namespace jaxpage
