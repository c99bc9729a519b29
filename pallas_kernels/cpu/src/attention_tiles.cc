// Paged attention with AMX, for queries and pages of bfloat16.
//
// Scores are products of tiles of positions (rows) with tiles of query heads (columns). A head's
// weights are powers of two, rounded to bfloat16, and their sum is that of the rounded ones: values
// have a column of ones.
//
// Few query heads have a row each, and their positions the lanes of vectors. Many have a lane each,
// and their values and sums are transposed: no vector is added up across its lanes then. Both have
// the same operations in the same order, so that a head has the same bits in a prompt's chunk, in
// decoding and in a tree of drafts.
#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "softmax.h"

namespace jaxpage {
namespace JAXPAGE_ISA {

#if defined(__AVX512F__)
namespace {

#define JAXPAGE_AMX __attribute__((target("amx-tile,amx-bf16,avx512bf16")))

constexpr int kRowsOfTile = 16, kBytesOfRow = 64, kNumbersOfRow = 32;
constexpr int kWordsOfTile = kTile / 2;  // a word has the weights, or the values, of two positions
constexpr int kHalf = kTile / 2;         // the positions of a tile of weights
constexpr int kMaxFewHeads = 8;
constexpr float kLog2E = 1.44269504088896341f;
// A head's largest score is replaced by one that is larger by this, as a logarithm, or more: its
// sums need not be corrected for less. Weights are up to 2 to this.
constexpr float kStep = 8.0f;
constexpr float kLowest = -std::numeric_limits<float>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Holds the shape of the tiles of a call. They are let go at the end: other code uses the
// registers, too.
class TileConfig {
 public:
  // Tiles 4 to 6 have the rows of few heads. With many heads tiles 6 and 7 have one row: ones, and
  // the sums of weights.
  JAXPAGE_AMX explicit TileConfig(bool are_few, int num_heads) {
    alignas(64) uint8_t config[64] = {1};
    for (int i = 0; i < 8; ++i) {
      config[16 + 2 * i] = kBytesOfRow;
      config[48 + i] = are_few ? (i < 4 ? kRowsOfTile : num_heads) : (i < 6 ? kRowsOfTile : 1);
    }
    _tile_loadconfig(config);
  }
  JAXPAGE_AMX ~TileConfig() { _tile_release(); }
};

// Returns 2^x within 3e-6 of it: a polynomial of what x is above a whole number. 2^0 is
// `power_of_zero` exactly, and 2^-inf is 0.
inline Vec rough_power_of_two(Vec x, float power_of_zero = 1.0f) {
  const Vec part = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec y = splat(1.3426689431e-2f);
  y = multiply_add(y, part, splat(5.2242465317e-2f));
  y = multiply_add(y, part, splat(2.4128021300e-1f));
  y = multiply_add(y, part, splat(6.9304484129e-1f));
  y = multiply_add(y, part, splat(power_of_zero));
  return (Vec)_mm512_scalef_ps((__m512)y, (__m512)x);
}

// Returns 2^x and 2^y in bfloat16, those of y in the upper halves. Half of the last bit that stays
// is added, so that what is cut off was rounded.
inline Vec make_weights(Vec x, Vec y) {
  constexpr float kPowerOfZero = 1.0f + 0x1p-8f;
  return as_float(as_bits(rough_power_of_two(x, kPowerOfZero)) >> 16 |
                  (as_bits(rough_power_of_two(y, kPowerOfZero)) & 0xffff0000u));
}

// Returns the larger lanes; b where a is NaN.
inline Vec max_lanes(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }

// Holds what the query heads of a call have in common.
struct Softmax {
  bool is_plain;  // scores are products with a factor
  float factor;   // of scores, which makes them logarithms to the base 2

  explicit Softmax(const Attention& a)
      : is_plain(a.softcap == 0.0f && !a.slopes && a.scale > 0.0f),
        factor(is_plain ? a.scale * kLog2E : kLog2E) {}

  // Returns the scores of products: with all but the factor.
  Vec score(const Attention& a, Vec raw_score, Vec slope, Vec distance) const {
    if (is_plain) return raw_score;
    Vec score = raw_score * splat(a.scale);
    if (a.softcap > 0.0f) score = cap_scores(a, score);
    return multiply_add(slope, distance, score);
  }
};

// Holds up to 16 query heads, one in each lane: their positions, what they see, and the largest
// score so far, as a logarithm.
struct Block {
  Vec max_scores, slope, positions;
  Int first, last;
  int count;
  int64_t begin, end;                // what any of them sees
  int64_t begin_of_all, end_of_all;  // what all of them see

  // Adds a head; the first one begins the block.
  void add(const Attention& a, const Unit& unit, int64_t head, int index) {
    if (index == 0) begin = begin_of_all = unit.first, end = end_of_all = unit.last + 1;
    begin = std::min(begin, unit.first);
    end = std::max(end, unit.last + 1);
    begin_of_all = std::max(begin_of_all, unit.first);
    end_of_all = std::min(end_of_all, unit.last + 1);
    // Lanes without a head see what the last one sees.
    for (int lane = index; lane < kLanes; ++lane) {
      max_scores[lane] = a.sinks ? std::max(a.sinks[head] * kLog2E, kLowest) : kLowest;
      slope[lane] = a.slopes ? a.slopes[head] : 0.0f;
      positions[lane] = static_cast<float>(unit.last);
      first[lane] = static_cast<int32_t>(unit.first);
      last[lane] = static_cast<int32_t>(unit.last);
    }
    count = index + 1;
  }
};

// Holds what a unit reads and computes. Each thread has its own.
struct Scratch {
  std::vector<Block> blocks;  // [key/value heads, blocks]
  std::vector<Vec> queries;   // [blocks, words of a head, 16 heads]
  // The shape is [16 heads, vectors of values and one of the sum] for few heads, and [values and
  // their sum, 16 heads] for many.
  std::vector<Vec> sums;
  std::vector<Vec> values;  // [two halves of the positions, vectors of values, 16 rows]
  std::vector<Vec> keys;    // [vectors of a head, positions]
  // The products of a block, for two blocks that take turns. Their sizes keep them apart: a store
  // holds up a load that is a multiple of 4,096 bytes away.
  struct {
    Vec scores[kTile];  // [positions, 16 heads]
    Vec weights[kWordsOfTile];
  } turns[2];
  Vec ones[kRowsOfTile];
};

// Copies the keys of a tile, from `begin` to `end`, in the order in which tiles are loaded: of 32
// numbers of a head, all positions. There are zeros for those that are not seen.
void read_keys(const Attention& a, const Tile& tile, const char* pages, int64_t page_stride,
               int begin, int end, Vec* keys) {
  const int64_t vecs = a.head_dim / kNumbersOfRow;
  for (int j = begin; j < end; ++j) {
    const bool is_seen = j >= tile.begin && j < tile.end;
    const char* const from = is_seen ? pages + tile.slots[j] * page_stride : nullptr;
    for (int64_t k = 0; k < vecs; ++k)
      keys[k * kTile + j] = is_seen ? raw_at<Vec>(from + k * kBytesOfRow) : Vec{};
  }
}

// Reads the values of a tile as words of two positions, with zeros for those that are not seen: of
// 32 numbers those 0 to 3, 8 to 11, 16 to 19 and 24 to 27, then the others. For many heads the
// words of a number are side by side. Returns whether all are finite.
template <bool kAreFew>
bool read_values(const Attention& a, const Tile& tile, const char* pages, int64_t page_stride,
                 Vec* values) {
  const int64_t vecs = a.value_width / kLanes;
  const auto at = [&](int j, int64_t i) {
    return j >= tile.begin && j < tile.end
               ? _mm512_loadu_si512(pages + tile.slots[j] * page_stride + i * 32)
               : __m512i{};
  };
  __m512i maxima = {};
  for (int half = tile.begin / kHalf; half * kHalf < tile.end; ++half)
    for (int64_t i = 0; i < vecs; i += 2) {
      Vec* const to = values + (half * vecs + i) * kRowsOfTile;
      for (int pair = 0; pair < kRowsOfTile; ++pair) {
        const int j = half * kHalf + pair;
        const __m512i low = at(j, i), high = at(j + kRowsOfTile, i);
        to[pair] = (Vec)_mm512_unpacklo_epi16(low, high);
        to[kRowsOfTile + pair] = (Vec)_mm512_unpackhi_epi16(low, high);
        if (kAreFew) continue;
        const __m512i sizes = _mm512_set1_epi16(0x7fff);
        maxima = _mm512_max_epu16(maxima, _mm512_and_si512(low, sizes));
        maxima = _mm512_max_epu16(maxima, _mm512_and_si512(high, sizes));
      }
      if (!kAreFew) transpose(to), transpose(to + kRowsOfTile);
    }
  return _mm512_cmpge_epu16_mask(maxima, _mm512_set1_epi16(0x7f80)) == 0;
}

// Computes the products of the query heads of a block with the positions from `begin` to `end`.
JAXPAGE_AMX inline void multiply(const Attention& a, const Vec* keys, const Vec* queries, int begin,
                                 int end, Vec* scores) {
  for (int first = begin; first < end; first += kHalf) {
    const int second = first + kRowsOfTile;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < a.head_dim / kNumbersOfRow; ++k) {
      _tile_loadd(2, queries + k * kRowsOfTile, kBytesOfRow);
      _tile_loadd(3, keys + k * kTile + first, kBytesOfRow);
      _tile_dpbf16ps(0, 3, 2);
      _tile_loadd(3, keys + k * kTile + second, kBytesOfRow);
      _tile_dpbf16ps(1, 3, 2);
    }
    _tile_stored(0, scores + first, kBytesOfRow);
    _tile_stored(1, scores + second, kBytesOfRow);
  }
}

// Makes weights of the scores of few heads, [16 heads, words of a tile].
JAXPAGE_AMX void weigh_few(const Attention& a, const Softmax& softmax, Block& block, int64_t start,
                           int begin, int end, Vec* raw_scores, Vec* weights, Vec* sums) {
  const int64_t vecs = a.value_width / kLanes + 1;
  for (int j = begin; j < end; j += kLanes) transpose(raw_scores + j);
  for (int h = 0; h < block.count; ++h) {
    Vec scores[kVecsOfTile], largest_lanes = splat(-kInfinity);
    for (int j = begin, i = 0; j < end; j += kLanes, ++i) {
      const Vec position = splat(static_cast<float>(start + j)) + lane_indices();
      const Int lane = to_int(lane_indices()) + static_cast<int32_t>(start + j);
      const Int is_seen = (lane >= block.first[h]) & (lane <= block.last[h]);
      scores[i] = softmax.score(a, raw_scores[j + h], splat(block.slope[h]),
                                position - splat(block.positions[h]));
      scores[i] = select(is_seen, scores[i], splat(-kInfinity));
      largest_lanes = max_lanes(scores[i], largest_lanes);
    }
    const float before = block.max_scores[h], score = max_lane(largest_lanes) * softmax.factor,
                max_score = score > before + kStep ? score : before;
    block.max_scores[h] = max_score;
    const float correction = rough_power_of_two(splat(before - max_score))[0];
    for (int64_t i = 0; i < vecs && correction != 1.0f; ++i)
      sums[h * vecs + i] *= splat(correction);
    const Vec factor = splat(softmax.factor);
    for (int j = begin, i = 0; j < end; j += kHalf, i += 2)
      weights[j / 2 + h] = make_weights(multiply_add(scores[i], factor, splat(-max_score)),
                                        multiply_add(scores[i + 1], factor, splat(-max_score)));
  }
}

// Adds the weighted values of a tile, and the weights, to the sums of few heads.
JAXPAGE_AMX void add_few(const Attention& a, int begin, int end, const Scratch& scratch,
                         const Vec* weights, Vec* sums) {
  const int64_t vecs = a.value_width / kLanes, stride = (vecs + 1) * kBytesOfRow;
  const Vec* const values = scratch.values.data();
  const bool is_low = begin < kHalf, is_high = kHalf < end;
  _tile_loadd(4, weights, kBytesOfRow);
  _tile_loadd(5, weights + kRowsOfTile, kBytesOfRow);
  for (int64_t i = 0; i <= vecs; ++i) {
    _tile_loadd(6, sums + i, stride);
    if (is_low) {
      _tile_loadd(0, i == vecs ? scratch.ones : values + i * kRowsOfTile, kBytesOfRow);
      _tile_dpbf16ps(6, 4, 0);
    }
    if (is_high) {
      _tile_loadd(1, i == vecs ? scratch.ones : values + (vecs + i) * kRowsOfTile, kBytesOfRow);
      _tile_dpbf16ps(6, 5, 1);
    }
    _tile_stored(6, sums + i, stride);
  }
}

// Does the same for many heads.
JAXPAGE_AMX void add_many(const Attention& a, int begin, int end, const Scratch& scratch,
                          const Vec* weights, Vec* sums) {
  const int64_t vecs = a.value_width / kLanes;
  const bool is_low = begin < kHalf, is_high = kHalf < end;
  const Vec *const low = scratch.values.data(), *const high = low + vecs * kRowsOfTile;
  _tile_loadd(4, weights, kBytesOfRow);
  _tile_loadd(5, weights + kRowsOfTile, kBytesOfRow);
  for (int64_t i = 0; i < vecs; i += 2) {
    Vec* const to = sums + i * kRowsOfTile;
    _tile_loadd(0, to, kBytesOfRow);
    _tile_loadd(1, to + kRowsOfTile, kBytesOfRow);
    if (is_low) {
      _tile_loadd(2, low + i * kRowsOfTile, kBytesOfRow);
      _tile_dpbf16ps(0, 2, 4);
      _tile_loadd(3, low + (i + 1) * kRowsOfTile, kBytesOfRow);
      _tile_dpbf16ps(1, 3, 4);
    }
    if (is_high) {
      _tile_loadd(2, high + i * kRowsOfTile, kBytesOfRow);
      _tile_dpbf16ps(0, 2, 5);
      _tile_loadd(3, high + (i + 1) * kRowsOfTile, kBytesOfRow);
      _tile_dpbf16ps(1, 3, 5);
    }
    _tile_stored(0, to, kBytesOfRow);
    _tile_stored(1, to + kRowsOfTile, kBytesOfRow);
  }
  _tile_loadd(6, scratch.ones, kBytesOfRow);
  _tile_loadd(7, sums + a.value_width, kBytesOfRow);
  if (is_low) _tile_dpbf16ps(7, 6, 4);
  if (is_high) _tile_dpbf16ps(7, 6, 5);
  _tile_stored(7, sums + a.value_width, kBytesOfRow);
}

// Makes weights of the scores of many heads, [words of a tile, 16 heads].
JAXPAGE_AMX void weigh_many(const Attention& a, const Softmax& softmax, Block& block, int64_t start,
                            int begin, int end, Vec* scores, Vec* weights, Vec* sums) {
  const bool is_whole = block.begin_of_all <= start + begin && start + end <= block.end_of_all;
  if (!is_whole || !softmax.is_plain)
    for (int j = begin; j < end; ++j) {
      const Int position = Int{} + static_cast<int32_t>(start + j);
      const Int is_seen = (position >= block.first) & (position <= block.last);
      const Vec score = softmax.score(a, scores[j], block.slope,
                                      splat(static_cast<float>(start + j)) - block.positions);
      scores[j] = select(is_seen, score, splat(-kInfinity));
    }
  Vec maxima[4];
  for (int i = 0; i < 4; ++i) maxima[i] = splat(-kInfinity);
  for (int j = begin; j < end; j += 4)
    for (int i = 0; i < 4; ++i) maxima[i] = max_lanes(scores[j + i], maxima[i]);
  for (int i = 0; i < 2; ++i) maxima[i] = max_lanes(maxima[i], maxima[i + 2]);
  const Vec factor = splat(softmax.factor), before = block.max_scores,
            score = max_lanes(maxima[0], maxima[1]) * factor;
  const Int is_larger = score > before + splat(kStep);
  if (_mm512_movepi32_mask((__m512i)is_larger)) {
    block.max_scores = select(is_larger, score, before);
    const Vec correction = rough_power_of_two(before - block.max_scores);
    for (int64_t i = 0; i <= a.value_width; ++i) sums[i] *= correction;
  }
  const Vec offset = -block.max_scores;
  for (int half = begin; half < end; half += kHalf)
    for (int j = half; j < half + kRowsOfTile; ++j)
      weights[j - half / 2] = make_weights(multiply_add(scores[j], factor, offset),
                                           multiply_add(scores[j + kRowsOfTile], factor, offset));
}

// Stores the result of a head: its sums by that of its weights.
JAXPAGE_AMX inline void store_head(const Attention& a, const Vec* sums, int64_t stride, Vec total,
                                   int64_t at) {
  const Vec factor = splat(1.0f) / total;
  uint16_t* to = static_cast<uint16_t*>(a.out) + at;
  for (int64_t i = 0; i < a.value_width / kLanes; i += 2, to += 2 * kLanes) {
    const Vec low = sums[i * stride] * factor, high = sums[(i + 1) * stride] * factor;
    const Vec first = shuffle<0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23>(low, high);
    const Vec second =
        shuffle<8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31>(low, high);
    const auto rounded = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    std::memcpy(to, &rounded, sizeof(rounded));
  }
}

// Goes over a tile for one key/value head, with the blocks from `first` to `last`.
template <bool kAreFew>
JAXPAGE_AMX void attend_tile(const Attention& a, const Softmax& softmax, int64_t position, int from,
                             int to, int first, int last, Scratch& scratch) {
  const int64_t words = a.head_dim / 2, sums_of_block = a.value_width + kRowsOfTile;
  const Vec* const keys = scratch.keys.data();
  // The halves of the tile that a block sees begin here.
  const auto begin_of = [&](int i) {
    return static_cast<int>(std::max<int64_t>(scratch.blocks[i].begin - position, from) / kHalf *
                            kHalf);
  };
  const auto end_of = [&](int i) {
    return static_cast<int>((std::min<int64_t>(scratch.blocks[i].end - position, to) + kHalf - 1) /
                            kHalf * kHalf);
  };
  const auto after = [&](int i) {
    for (++i; i < last && begin_of(i) >= end_of(i);) ++i;
    return i;
  };
  int i = after(first - 1);
  if (i == last) return;
  multiply(a, keys, scratch.queries.data() + i * words, begin_of(i), end_of(i),
           scratch.turns[0].scores);
  if (kAreFew) {
    Vec* const sums = scratch.sums.data() + i * sums_of_block;
    weigh_few(a, softmax, scratch.blocks[i], position, begin_of(i), end_of(i),
              scratch.turns[0].scores, scratch.turns[0].weights, sums);
    add_few(a, begin_of(i), end_of(i), scratch, scratch.turns[0].weights, sums);
    return;
  }
  // The next products are begun before a block is weighed, so that none waits for them.
  for (int next, turn = 0; i < last; i = next, turn ^= 1) {
    next = after(i);
    if (next < last)
      multiply(a, keys, scratch.queries.data() + next * words, begin_of(next), end_of(next),
               scratch.turns[turn ^ 1].scores);
    Vec* const sums = scratch.sums.data() + i * sums_of_block;
    weigh_many(a, softmax, scratch.blocks[i], position, begin_of(i), end_of(i),
               scratch.turns[turn].scores, scratch.turns[turn].weights, sums);
    add_many(a, begin_of(i), end_of(i), scratch, scratch.turns[turn].weights, sums);
  }
}

// Computes the query heads of each token and each key/value head of the units. Key/value heads,
// which lie side by side in memory, take turns. For several tokens it returns false, and has
// computed nothing, if a value is not finite: times a weight of zero it would reach tokens that do
// not see it.
template <bool kAreFew>
JAXPAGE_AMX bool attend_heads(const Attention& a, const Unit* units, int num_tokens) {
  // By its address: that of a thread's own variable would be asked for again and again.
  static thread_local const std::unique_ptr<Scratch> of_thread(new Scratch);
  Scratch& scratch = *of_thread;
  const Unit all = join_units(units, num_tokens);
  const Softmax softmax(a);
  const int per_token = static_cast<int>(a.num_heads / a.num_kv_heads),
            num_heads = num_tokens * per_token,
            num_blocks = (num_heads + kRowsOfTile - 1) / kRowsOfTile,
            num_kv_heads = static_cast<int>(all.kv_end - all.kv_begin);
  const int64_t words = a.head_dim / 2, width = bytes_of_head(a), stride = a.num_kv_heads * width,
                vecs = a.value_width / kLanes, sums_of_block = (vecs + 1) * kRowsOfTile;
  scratch.blocks.resize(num_kv_heads * num_blocks);
  scratch.queries.assign(num_kv_heads * num_blocks * words, Vec{});
  scratch.sums.assign(num_kv_heads * num_blocks * sums_of_block, Vec{});
  scratch.values.resize(2 * vecs * kRowsOfTile);
  scratch.keys.resize(kTile * words / kLanes);
  for (Vec& each : scratch.ones) each = as_float(Bits{} + 0x3f803f80u);
  // Calls run(block, index in it, unit, head) for each query head.
  const auto for_each_head = [&](const auto& run) {
    for (int kv = 0; kv < num_kv_heads; ++kv)
      for (int i = 0; i < num_heads; ++i)
        run(kv * num_blocks + i / kRowsOfTile, i % kRowsOfTile, units[i / per_token],
            (all.kv_begin + kv) * per_token + i % per_token);
  };
  for_each_head([&](int block, int index, const Unit& unit, int64_t head) {
    scratch.blocks[block].add(a, unit, head, index);
    Vec* const sums = scratch.sums.data() + block * sums_of_block;
    if (a.sinks && kAreFew) sums[index * (vecs + 1) + vecs] = splat(1.0f);
    if (a.sinks && !kAreFew) sums[a.value_width][index] = 1.0f;
    const char* from = static_cast<const char*>(a.q) + (unit.token * a.num_heads + head) * width;
    for (int64_t k = 0; k < words; k += kRowsOfTile)
      scratch.queries[block * words + k + index] = raw_at<Vec>(from + k * 4);
  });
  for (int64_t k = 0; k < num_kv_heads * num_blocks * words; k += kRowsOfTile)
    transpose(scratch.queries.data() + k);
  const TileConfig configured(kAreFew, num_heads);
  Tile tile;
  for (int64_t position = all.first / kTile * kTile; position <= all.last; position += kTile) {
    tile.find(a, all, position);
    const int from = tile.begin / kHalf * kHalf, to = (tile.end + kHalf - 1) / kHalf * kHalf;
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
      if (!read_values<kAreFew>(a, tile, v_pages, stride, scratch.values.data()) && num_tokens > 1)
        return false;
      read_keys(a, tile, k_pages, stride, from, to, scratch.keys.data());
      attend_tile<kAreFew>(a, softmax, position, from, to, kv * num_blocks, (kv + 1) * num_blocks,
                           scratch);
    }
  }
  for_each_head([&](int block, int index, const Unit& unit, int64_t head) {
    Vec* const sums = scratch.sums.data() + block * sums_of_block;
    const int64_t at = (unit.token * a.num_heads + head) * a.value_width;
    if (kAreFew) {
      const Vec* const first = sums + index * (vecs + 1);
      store_head(a, first, 1, first[vecs], at);
      return;
    }
    for (int64_t i = 0; i < vecs && index == 0; ++i) transpose(sums + i * kRowsOfTile);
    store_head(a, sums + index, kRowsOfTile, splat(sums[a.value_width][index]), at);
  });
  return true;
}

}  // namespace

void attend_tiles(const Attention& a, const Unit* units, int num_tokens) {
  if (num_tokens == 1 && a.num_heads / a.num_kv_heads <= kMaxFewHeads)
    attend_heads<true>(a, units, 1);
  else if (!attend_heads<false>(a, units, num_tokens))
    for (int t = 0; t < num_tokens; ++t) attend_tiles(a, units + t, 1);
}
#else
// Nobody calls it: `with_tiles` is never true here.
void attend_tiles(const Attention&, const Unit*, int) {}
#endif

}  // namespace JAXPAGE_ISA
}  // namespace jaxpage
