// Describes one call of paged attention.
#pragma once

#include <cstdint>

namespace jaxpage {

constexpr int kMaxDrafts = 1024;  // query tokens of a row with a tree
constexpr int kMaxHeadDim = 640;
constexpr int kMaxHeads = 4;  // query heads that are computed together
// The query heads of a prompt's chunk that share what is read of the pages.
constexpr int kHeadsOfChunk = 48;
// The query tokens of a prompt's chunk that do so with tiles, whatever their query heads.
constexpr int kTokensOfTiles = 256;

enum class Type : int { kF32, kBF16, kF16, kI8, kF8 };

// Letters as in pallas_kernels: T query tokens, B rows, N query heads, K key/value heads, H head
// width, P blocks, S slots, M blocks of a table.
struct Attention {
  Type query_type, page_type;
  const void* q;      // [T, N, H]
  const void* k_new;  // [T, K, H], in the queries' type
  const void* v_new;
  void* k_pages;   // [P, S, K, H]
  void* v_pages;   // those of the keys, where values are the first numbers of these
  float* k_scale;  // [P, S, K] of quantised pages, else null
  float* v_scale;
  const int32_t* slots;        // [T]: where each token's key and value go
  const int32_t* block_table;  // [B, M]
  const int32_t* context_len;  // [B]
  const int32_t* query_start;  // [B + 1]
  const uint8_t* tree_mask;    // [T, Q], or null: causal
  const int32_t* last_seen;    // [T]: the last position of the row that is seen, or null: the own
  const float* sinks;          // [N], or null
  const float* slopes;         // [N], of ALiBi, or null
  void* out;                   // [T, N, value_width]
  int64_t num_tokens, num_rows, num_heads, num_kv_heads, head_dim, value_width, num_slots,
      block_size, table_width, mask_width;
  float scale, softcap;   // softcap 0: none
  int64_t window, chunk;  // 0: none
  // Queries and pages of bfloat16 are multiplied by AMX, and weights are rounded for it.
  bool with_tiles;
};

// The units of work: every token's key and value, then every token's queries of the key/value heads
// from `kv_begin` to `kv_end`.
struct Kernels {
  void (*write)(const Attention&, int64_t token);
  void (*attend)(const Attention&, int64_t row, int64_t token, int64_t kv_begin, int64_t kv_end);
  // The same of some tokens of a row without a tree and one key/value head: at most kHeadsOfChunk
  // query heads in all, or kTokensOfTiles tokens with tiles.
  void (*attend_chunk)(const Attention&, int64_t row, int64_t token, int64_t num_tokens,
                       int64_t kv_head);
};

namespace JAXPAGE_ISA {
extern const Kernels kKernels;
}  // namespace JAXPAGE_ISA

}  // namespace jaxpage
