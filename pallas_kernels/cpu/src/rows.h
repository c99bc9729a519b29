// Computes what a layer does between two products, row by row: no row's bits depend on another.
#pragma once

#include <cstdint>

#include "attention.h"

namespace jaxpage {

enum class Activation : int64_t { kNone, kSilu, kGeluTanh, kGelu };

// Letters as in pallas_kernels: T rows, F columns, N heads of H numbers, E pairs of a head. Numbers
// are float or bfloat16; all is computed in float.
struct Rows {
  Type type;
  const void* x;
  void* out;
  int64_t width;  // of a row of `out`

  Activation activation;  // of gates

  Type scale_type;    // of norms, and of their biases
  const void* scale;  // null for a factor of one, in layer norms
  const void* bias;   // of layer norms; or null
  float epsilon, offset;

  const void* added;  // to x, alone or before a norm; or null
  void* sum;          // what is normed then, rounded; null if nobody wants it, in layer norms

  const float *cos, *sin;  // [T, E], of rotations
  int64_t num_heads, num_pairs;
  // The heads of keys, and of values, which follow those of queries in x; or 0.
  int64_t num_keys;
  void *keys, *values;  // [T, num_keys, width]
};

struct RowKernels {
  // The inputs x [T, 2 F] are gates, then what they multiply.
  void (*gate)(const Rows&, int64_t row);
  void (*add)(const Rows&, int64_t row);
  void (*rms_norm)(const Rows&, int64_t row);
  void (*layer_norm)(const Rows&, int64_t row);
  // Rotates a head of x, of which the numbers i and E + i are a pair. What follows the pairs stays,
  // and so do values.
  void (*rotate)(const Rows&, int64_t row);
};

namespace JAXPAGE_ISA {
extern const RowKernels kRows;
}  // namespace JAXPAGE_ISA

}  // namespace jaxpage
