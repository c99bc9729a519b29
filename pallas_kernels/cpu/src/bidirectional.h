// Describes attention among the tokens of a text, or the patches of a picture, that see each other
// both ways. Nothing is kept in pages.
#pragma once

#include <cstdint>

namespace jaxpage {

constexpr int64_t kQueriesOfUnit = 384;

// Letters as in pallas_kernels: T tokens, N query heads, K key/value heads, H head width.
struct Bidirectional {
  const float* q;  // [T, N, H]
  const float* k;  // [T, K, H]
  const float* v;
  float* out;  // [T, N, H]
  int64_t num_heads, num_kv_heads, head_dim;
  float scale;
  int64_t reach;  // how far a token sees to both sides; -1: all of its text
};

struct BidirectionalKernels {
  // The unit of work: the queries [first, last) of a head, at most kQueriesOfUnit, in the text
  // [begin, end).
  void (*attend)(const Bidirectional&, int64_t begin, int64_t end, int64_t first, int64_t last,
                 int64_t head);
};

namespace JAXPAGE_ISA {
extern const BidirectionalKernels kBidirectional;
}  // namespace JAXPAGE_ISA

}  // namespace jaxpage
