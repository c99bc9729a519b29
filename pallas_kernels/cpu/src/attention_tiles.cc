// Paged attention with AMX, for queries and pages of bfloat16.
//
// Scores are products of tiles of positions (rows) with tiles of queries (columns). Values are
// added by products of tiles of weights, which are rounded to bfloat16, with pairs of positions. A
// head has the same operations in the same order in a prompt's chunk, in decoding and in a tree of
// drafts.
#include <algorithm>
#include <vector>

#include "softmax.h"

namespace jaxpage {
namespace JAXPAGE_ISA {

#if defined(__AVX512F__)
namespace {

#define JAXPAGE_AMX __attribute__((target("amx-tile,amx-bf16,avx512bf16")))

constexpr int kRowsOfTile = 16, kBytesOfRow = 64;
constexpr int kWordsOfTile = kTile / 2;  // a word has the weights, or the values, of two positions

// Tiles 0 to 3 have 16 rows, tiles 4 to 7 one for each query head. They are let go at the end:
// other code uses the registers, too.
class Configured {
 public:
  JAXPAGE_AMX explicit Configured(int num_heads) {
    alignas(64) uint8_t config[64] = {1};
    for (int i = 0; i < 8; ++i) {
      config[16 + 2 * i] = kBytesOfRow;
      config[48 + i] = i < 4 ? kRowsOfTile : num_heads;
    }
    _tile_loadconfig(config);
  }
  JAXPAGE_AMX ~Configured() { _tile_release(); }
};

// A query head, and the weights that its scores become.
struct TileHead : Head {
  uint32_t weights[kWordsOfTile] __attribute__((aligned(64)));

  // Rounds the weights of the positions that are seen, and makes those of others zero.
  JAXPAGE_AMX void round_weights(const Tile& tile) {
    for (int group = 0; group < kTile; group += 2 * kLanes) {
      Vec part[2];
      for (int i = 0; i < 2; ++i) {
        const int from = group + i * kLanes;
        part[i] = from >= tile.from && from < tile.end ? raw_at<Vec>(scores + from) : splat(0.0f);
      }
      const auto rounded = _mm512_cvtne2ps_pbh((__m512)part[1], (__m512)part[0]);
      std::memcpy(weights + group / 2, &rounded, sizeof(rounded));
    }
  }
};

// Holds what a unit reads and computes of a tile. Each thread has its own.
struct Scratch {
  std::vector<TileHead> heads;
  std::vector<Vec> queries;  // [blocks of 16 heads, words of a head, 16 heads]
  std::vector<Vec> values;   // [pairs of positions, value width]
  std::vector<Vec> keys;     // [16 positions, words of a head], where the pages have them elsewhere
  Vec products[2][kRowsOfTile];  // [16 positions, 16 heads]
};

// Returns the keys of 16 positions of a tile, `stride` bytes apart: in the pages, or copied, with
// zeros for those that are not seen.
const char* keys_of(const Attention& a, const Unit& unit, const Tile& tile, int group,
                    const char* pages, int64_t page_stride, Vec* copy, int64_t* stride) {
  const bool is_seen = group >= tile.begin && group + kRowsOfTile <= tile.end;
  if (is_seen && !unit.branch && a.block_size % kRowsOfTile == 0) {
    *stride = page_stride;
    return pages + tile.slots[group] * page_stride;
  }
  *stride = a.head_dim * 2;
  char* to = reinterpret_cast<char*>(copy);
  for (int j = group; j < group + kRowsOfTile; ++j, to += *stride) {
    if (j >= tile.begin && j < tile.end)
      std::memcpy(to, pages + tile.slots[j] * page_stride, *stride);
    else std::memset(to, 0, *stride);
  }
  return reinterpret_cast<const char*>(copy);
}

// Reads the values of a tile as words of two positions, with zeros for those that are not seen.
// Returns whether all are finite.
bool read_values(const Attention& a, const Tile& tile, const char* pages, int64_t page_stride,
                 Vec* values) {
  const int64_t vecs = a.value_width / kLanes;
  const auto at = [&](int j) {
    return j >= tile.begin && j < tile.end ? pages + tile.slots[j] * page_stride : nullptr;
  };
  const int end = (tile.end + 2 * kRowsOfTile - 1) / (2 * kRowsOfTile) * 2 * kRowsOfTile;
  Bits exponents = {};
  for (int j = tile.begin / (2 * kRowsOfTile) * 2 * kRowsOfTile; j < end; j += 2) {
    const char *low = at(j), *high = at(j + 1);
    Vec* to = values + j / 2 * vecs;
    for (int64_t i = 0; i < vecs; ++i) {
      Bits word = {};
      if (low) word |= widened(raw_at<Half>(low + i * 32));
      if (high) word |= widened(raw_at<Half>(high + i * 32)) << 16;
      // Where all bits of an exponent are set, the sum reaches the next bit.
      exponents |= (word & 0x7f807f80u) + 0x00800080u;
      to[i] = as_float(word);
    }
  }
  uint32_t all = 0;
  for (int i = 0; i < kLanes; ++i) all |= exponents[i];
  return (all & 0x80008000u) == 0;
}

// Computes the scores of 16 query heads with the positions of a tile.
JAXPAGE_AMX void score(const Attention& a, TileHead* heads, int num_heads, const Tile& tile,
                       const char* const* keys, const int64_t* strides, const Vec* queries,
                       Vec (*products)[kRowsOfTile]) {
  const int64_t words = a.head_dim / 2;
  for (int group = tile.from; group < tile.end; group += 2 * kRowsOfTile) {
    const bool are_two = group + kRowsOfTile < tile.end;
    const int i = group / kRowsOfTile;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < words; k += kRowsOfTile) {
      _tile_loadd(3, queries + k, kBytesOfRow);
      _tile_loadd(2, keys[i] + k * 4, strides[i]);
      _tile_dpbf16ps(0, 2, 3);
      if (!are_two) continue;
      _tile_loadd(2, keys[i + 1] + k * 4, strides[i + 1]);
      _tile_dpbf16ps(1, 2, 3);
    }
    _tile_stored(0, products[0], kBytesOfRow);
    if (are_two) _tile_stored(1, products[1], kBytesOfRow);
    for (int part = 0; part <= are_two; ++part) {
      transpose(products[part]);
      for (int h = 0; h < num_heads; ++h) {
        const Vec scaled = products[part][h] * splat(a.scale);
        std::memcpy(heads[h].scores + group + part * kRowsOfTile, &scaled, sizeof(scaled));
      }
    }
  }
}

// Adds the weighted values of a tile to the sums of at most 16 query heads.
JAXPAGE_AMX void add(const Attention& a, TileHead* heads, const Tile& tile, const Vec* values) {
  const int64_t vecs = a.value_width / kLanes, stride = vecs * kBytesOfRow,
                lower = kRowsOfTile * vecs;
  const bool is_low = tile.begin < kTile / 2;
  const bool is_high = kTile / 2 < tile.end;
  _tile_loadd(6, heads->weights, sizeof(TileHead));
  _tile_loadd(7, heads->weights + kRowsOfTile, sizeof(TileHead));
  for (int64_t i = 0; i < vecs; i += 2) {
    _tile_loadd(4, heads->acc + i, sizeof(TileHead));
    _tile_loadd(5, heads->acc + i + 1, sizeof(TileHead));
    if (is_low) {
      _tile_loadd(0, values + i, stride);
      _tile_dpbf16ps(4, 6, 0);
      _tile_loadd(1, values + i + 1, stride);
      _tile_dpbf16ps(5, 6, 1);
    }
    if (is_high) {
      _tile_loadd(2, values + lower + i, stride);
      _tile_dpbf16ps(4, 7, 2);
      _tile_loadd(3, values + lower + i + 1, stride);
      _tile_dpbf16ps(5, 7, 3);
    }
    _tile_stored(4, heads->acc + i, sizeof(TileHead));
    _tile_stored(5, heads->acc + i + 1, sizeof(TileHead));
  }
}

// Computes `per_token` query heads of each token and each key/value head of the units, from its
// `offset`-th on. Key/value heads, which lie side by side in memory, take turns. For several tokens
// it returns false, and has computed nothing, if a value is not finite: times a weight of zero it
// would reach tokens that do not see it.
JAXPAGE_AMX bool attend_heads(const Attention& a, const Unit* units, int num_tokens, int64_t offset,
                              int per_token) {
  static thread_local Scratch scratch;
  const Unit all = all_of(units, num_tokens);
  const int num_heads = num_tokens * per_token,
            num_blocks = (num_heads + kRowsOfTile - 1) / kRowsOfTile;
  const int num_kv_heads = static_cast<int>(all.kv_end - all.kv_begin);
  const int64_t group_size = a.num_heads / a.num_kv_heads, words = a.head_dim / 2,
                width = bytes_of_head(a), stride = a.num_kv_heads * width;
  scratch.heads.resize(
      std::max<size_t>(scratch.heads.size(), num_kv_heads * num_blocks * kRowsOfTile));
  scratch.queries.resize(num_kv_heads * num_blocks * words);
  scratch.values.resize(kWordsOfTile * (a.value_width / kLanes));
  scratch.keys.resize(kTile * words / kLanes);
  // Calls run(place, unit, head) for each query head, which has that place among the blocks of 16.
  const auto for_each_head = [&](const auto& run) {
    for (int kv = 0; kv < num_kv_heads; ++kv)
      for (int i = 0; i < num_heads; ++i)
        run(kv * num_blocks * kRowsOfTile + i, units[i / per_token],
            (all.kv_begin + kv) * group_size + offset + i % per_token);
  };
  for_each_head([&](int place, const Unit& unit, int64_t head) {
    scratch.heads[place].start(a, unit, head);
    const char* from = static_cast<const char*>(a.q) + (unit.token * a.num_heads + head) * width;
    uint32_t* to =
        reinterpret_cast<uint32_t*>(scratch.queries.data() + place / kRowsOfTile * words) +
        place % kRowsOfTile;
    for (int64_t k = 0; k < words; ++k) std::memcpy(to + k * kRowsOfTile, from + k * 4, 4);
  });
  const Configured configured(std::min(num_heads, kRowsOfTile));
  Tile tile, own;
  for (int64_t position = all.first / kTile * kTile; position <= all.last; position += kTile) {
    tile.find(a, all, position);
    for (int kv = 0; kv < num_kv_heads; ++kv) {
      const char* const k_pages = static_cast<const char*>(a.k_pages) + (all.kv_begin + kv) * width;
      const char* const v_pages = static_cast<const char*>(a.v_pages) + (all.kv_begin + kv) * width;
      // Memory brings what lies side by side at once, and not a few bytes for each key/value head.
      if (kv == 0 && num_kv_heads > 1) {
        for (int group = tile.from; group < tile.end; group += kLanes)
          tile.fetch(v_pages, stride, num_kv_heads * width, group);
        for (int group = tile.from; group < tile.end; group += kLanes)
          tile.fetch(k_pages, stride, num_kv_heads * width, group);
      }
      if (!read_values(a, tile, v_pages, stride, scratch.values.data()) && num_tokens > 1)
        return false;
      const char* keys[kVecsOfTile];
      int64_t strides[kVecsOfTile];
      for (int group = tile.from; group < tile.end; group += kRowsOfTile) {
        const int i = group / kRowsOfTile;
        keys[i] = keys_of(a, all, tile, group, k_pages, stride, scratch.keys.data() + i * words,
                          strides + i);
      }
      for (int first = 0; first < num_heads; first += kRowsOfTile) {
        const int count = std::min(kRowsOfTile, num_heads - first),
                  place = kv * num_blocks * kRowsOfTile + first;
        TileHead* const heads = scratch.heads.data() + place;
        score(a, heads, count, tile, keys, strides,
              scratch.queries.data() + place / kRowsOfTile * words, scratch.products);
        own = tile;
        for (int i = 0; i < count; ++i) {
          own.see(units[(first + i) / per_token]);
          if (own.begin < own.end) heads[i].weigh(a, own, all.kv_begin + kv);
          heads[i].round_weights(own);
        }
        add(a, heads, tile, scratch.values.data());
      }
    }
  }
  for_each_head([&](int place, const Unit& unit, int64_t head) {
    scratch.heads[place].finish(a, unit.token, head);
  });
  return true;
}

}  // namespace

void attend_tiles(const Attention& a, const Unit* units, int num_tokens) {
  const int group_size = static_cast<int>(a.num_heads / a.num_kv_heads);
  for (int offset = 0; offset < group_size; offset += kHeadsOfChunk) {
    const int per_token = std::min(group_size - offset, kHeadsOfChunk);
    if (attend_heads(a, units, num_tokens, offset, per_token)) continue;
    for (int t = 0; t < num_tokens; ++t) attend_heads(a, units + t, 1, offset, per_token);
  }
}
#else
// Nobody calls it: `with_tiles` is never true here.
void attend_tiles(const Attention&, const Unit*, int) {}
#endif

}  // namespace JAXPAGE_ISA
}  // namespace jaxpage
