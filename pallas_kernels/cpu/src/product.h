// A product with weights that are stored in few bits.
#pragma once

#include <cstdint>

namespace jaxpage {

// How a weight is stored. Of two in a byte the low nibble is the first.
enum class Code : int64_t { kInt8, kInt4, kFloat8, kFloat4 };

constexpr int kOutputsAtOnce = 8;  // rows of the weight that one unit of work multiplies by

// Letters as in pallas_kernels: T tokens, I inputs, O outputs, J groups of inputs that share a scale.
struct Product {
  Code code;
  const float* x;       // [T, I]
  const void* values;   // [O, I], or [O, I / 2] bytes with two codes
  const void* scale;    // [O, J]: float, or half precision
  const float* zero;    // [O, J]: subtracted from the codes; null: 8 from the codes of kInt4, nothing from others
  const void* minimum;  // [O, J], as scales: added to codes times scales, of kInt4 alone, from which nothing is subtracted then; or null
  bool half;
  float* out;           // [T, O]
  int64_t num_tokens, num_in, num_out, num_groups, group_size;
};

// The unit of work: kOutputsAtOnce outputs of all tokens, from `first` on.
typedef void (*Multiply)(const Product&, int64_t first);

}  // namespace jaxpage
