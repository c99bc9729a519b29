// A product with a weight in panels: 16 outputs lie side by side, a word of inputs of each after
// the other.
//
//   panels  [P][K][16]   word k of output 16 p + 0, word k of output 16 p + 1, ... , word k of
//   output 16 p + 15, word k + 1 of output 16 p + 0, ...
//
// A word has 32 bits: a number of float32, two of bfloat16, or four of int8, of consecutive inputs.
// What fills no word or no panel is zero.
#pragma once

#include <cstdint>

#include "rows.h"

namespace jaxpage {

constexpr int kOutputsOfPanel = 16;
constexpr int64_t kRowsAtOnce = 96;  // a multiple of the rows of every tile

// Which instructions multiply words of bfloat16 and int8: none, those for vectors of words, or
// those for tiles (AMX).
enum Instructions : int { kNone, kDot, kTiles };

// How a weight of few bits is stored. Of two codes in a byte the low nibble is of the first input.
enum class CodeFormat : int64_t { kInt8, kInt4, kFloat8, kFloat4 };

// Letters as in pallas_kernels: T rows, I inputs, O outputs, J groups of inputs that share a scale.
// P panels, K words of inputs.
struct Packed {
  Type type;         // of the weight: kF32, kBF16 or kI8
  int instructions;  // kNone, kDot or kTiles
  // The inputs [T, I]: float32 for kI8, and for codes without instructions; bfloat16 for codes with
  // them; else of the weight's type.
  const void* x;
  // The inputs in bfloat16, of which `prepare` makes those in float32; or null.
  const uint16_t* narrow;
  // The words of x [T, ...] as `prepare` makes them, or x itself. For codes these are the sums
  // [T, J] of x, or rows that it rounds to 16 bits, with the scales and sums of their parts.
  const void* words;
  const void* panels;  // [P, K, 16] words; of codes [P, I, 16] or [P, I / 2, 16] bytes
  void* out;           // [T, O]
  bool out_is_float;   // else of bfloat16
  int64_t num_rows, num_in, num_out, num_words;

  // These follow the sums, before they are rounded:
  const float* bias;  // [O], or null
  Activation activation;

  // With kI8, whose inputs are rounded to eight bits:
  const void* scale;  // [O] of float; of codes see below
  float* row_scale;   // [T]: what `prepare` rounds a row with
  int32_t* row_sum;   // [T]: of the rounded x, what a sum has 128 times too much

  // With codes, which are made float32, with instructions bfloat16, or pairs of 16 bits where x is
  // rounded; a group is scaled when it is summed:
  bool is_coded;
  CodeFormat code;
  Type scale_type;  // of scales and minima
  // These numbers of float are subtracted from the codes. Null subtracts 8 from the codes of kInt4,
  // and nothing from others.
  const void* zero;
  // These are added to codes times scales, from which nothing is subtracted then. It may be null.
  const void* minimum;
  // The row [O] of scales, zeros and minima [..., J], all of float. Null: these are in panels
  // [P, J, 16].
  const int32_t* scale_row;
  int64_t num_groups, group_size;
};

struct PackedKernels {
  int panels_at_once;
  // The bytes of a row of `words`; 0 where x is multiplied as it is.
  int64_t (*bytes_of_row)(const Packed&);
  // Makes a row of `words`.
  void (*prepare)(const Packed&, int64_t row, void* words);
  // The unit of work: at most kRowsAtOnce rows of at most panels_at_once panels.
  void (*multiply)(const Packed&, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel);
};

namespace JAXPAGE_ISA {
extern const PackedKernels kPacked;
}  // namespace JAXPAGE_ISA

}  // namespace jaxpage
