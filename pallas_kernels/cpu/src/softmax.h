// Keeps of a query, while attention goes over the pages, the positions that it sees and its softmax
// so far.
#pragma once

#include <cmath>
#include <limits>

#include "attention.h"
#include "vec.h"

namespace jaxpage {
namespace JAXPAGE_ISA {

constexpr int kTile = 64;  // positions
constexpr int kMaxVecs = kMaxHeadDim / kLanes;
constexpr int kVecsOfTile = kTile / kLanes;

// Returns the slot in which the pages hold a position of a row.
inline int64_t slot_of(const Attention& a, int64_t row, int64_t position) {
  int64_t block = a.block_table[row * a.table_width + position / a.block_size];
  return block * a.block_size + position % a.block_size;
}

// Returns the bytes that the pages hold of one key/value head of a position.
inline int64_t bytes_of_head(const Attention& a) {
  return a.head_dim * (a.page_type == Type::kF32 ? 4 : a.k_scale ? 1 : 2);
}

// Loads or stores a vector of an array of this type, from its `index`-th number on. Pages of eight
// bits are written by `write_quantized`.
inline Vec load(Type type, const void* array, int64_t index) {
  switch (type) {
    case Type::kF32: return Load<F32>::at(static_cast<const float*>(array) + index);
    case Type::kBF16: return Load<BF16>::at(static_cast<const uint16_t*>(array) + index);
    default: return Load<F16>::at(static_cast<const uint16_t*>(array) + index);
  }
}

inline void store(Type type, void* array, int64_t index, Vec value) {
  switch (type) {
    case Type::kF32: return Store<F32>::at(static_cast<float*>(array) + index, value);
    case Type::kBF16: return Store<BF16>::at(static_cast<uint16_t*>(array) + index, value);
    default: return Store<F16>::at(static_cast<uint16_t*>(array) + index, value);
  }
}

// A query token, what it sees (positions `first` to `last` of its row), and key/value heads. In a
// tree of drafts the positions from `num_before` on are the tokens of its branch, one after the
// other, as they will stand when they are accepted.
struct Unit {
  int64_t row, token, kv_begin, kv_end, first, last, num_before;
  const int32_t* branch;  // indices in the row, or null: every position is where it says

  int64_t slot(const Attention& a, int64_t position) const {
    if (branch && position >= num_before) position = num_before + branch[position - num_before];
    return slot_of(a, row, position);
  }
};

// Returns scores that stay between -softcap and softcap.
inline Vec cap_scores(const Attention& a, Vec score) {
  return tanh(score / splat(a.softcap)) * splat(a.softcap);
}

// Returns a unit that sees what some tokens of a row see together.
inline Unit join_units(const Unit* units, int num_tokens) {
  Unit all = units[num_tokens - 1];
  for (int t = 0; t < num_tokens; ++t) {
    if (units[t].first < all.first) all.first = units[t].first;
    if (units[t].last > all.last) all.last = units[t].last;
  }
  return all;
}

// Holds 64 positions and says which of them a unit sees: `begin` to `end`. The vector of the first
// of these begins at `from`.
struct Tile {
  int64_t slots[kTile];
  int begin, end, from;
  int64_t position;  // of the first of the 64

  // Sets what a unit sees of the positions.
  void see(const Unit& unit) {
    begin = static_cast<int>(unit.first > position ? unit.first - position : 0);
    end = static_cast<int>(unit.last - position < kTile ? unit.last - position + 1 : kTile);
    from = begin / kLanes * kLanes;
  }

  void find(const Attention& a, const Unit& unit, int64_t start) {
    position = start;
    see(unit);
    for (int j = begin; j < end;) {  // none where the unit sees nothing here
      slots[j] = unit.slot(a, position + j);
      // The positions after it, as far as its block goes, need no division.
      int64_t num_left = unit.branch ? 0 : a.block_size - 1 - (position + j) % a.block_size;
      for (++j; num_left > 0 && j < end; --num_left, ++j) slots[j] = slots[j - 1] + 1;
    }
  }

  // Has memory bring what the positions of a vector hold: `width` bytes each, of `stride` bytes in
  // all.
  void fetch(const char* pages, int64_t stride, int64_t width, int group) const {
    for (int j = group > begin ? group : begin; j < group + kLanes && j < end; ++j)
      for (int64_t i = 0; i < width; i += 64)
        __builtin_prefetch(pages + slots[j] * stride + i, 0, 2);
  }
};

// A query head: its softmax, as it goes from tile to tile.
struct Head {
  Vec q[kMaxVecs], acc[kMaxVecs];
  float scores[kTile] __attribute__((aligned(64)));
  float max_score, total, slope;
  int64_t query_position;  // the query token's position

  void start(const Attention& a, const Unit& unit, int64_t head) {
    for (int64_t i = 0; i < a.value_width; i += kLanes) acc[i / kLanes] = splat(0.0f);
    // A sink is a score without a value, which every query sees.
    max_score = a.sinks ? a.sinks[head] : -std::numeric_limits<float>::infinity();
    total = a.sinks ? 1.0f : 0.0f;
    slope = a.slopes ? a.slopes[head] : 0.0f;
    query_position = unit.last;
  }

  // Takes the query's numbers, scaled: scores need no factor then.
  void load_query(const Attention& a, const Unit& unit, int64_t head) {
    for (int64_t i = 0; i < a.head_dim; i += kLanes)
      q[i / kLanes] = load(a.query_type, a.q, (unit.token * a.num_heads + head) * a.head_dim + i) *
                      splat(a.scale);
  }

  // Makes weights of the scores of a tile.
  void weigh(const Attention& a, const Tile& tile, int64_t kv_head) {
    if (tile.begin == 0 && tile.end == kTile) return weigh<true>(a, tile, kv_head);
    weigh<false>(a, tile, kv_head);
  }

  // With kWhole all positions are seen, and the compiler can unroll the loops.
  template <bool kWhole>
  void weigh(const Attention& a, const Tile& tile, int64_t kv_head) {
    const int begin = kWhole ? 0 : tile.begin, end = kWhole ? kTile : tile.end,
              from = kWhole ? 0 : tile.from;
    if (a.k_scale)
      for (int j = begin; j < end; ++j)
        scores[j] *= a.k_scale[tile.slots[j] * a.num_kv_heads + kv_head];
    if (a.softcap > 0.0f)
      for (int group = from; group < end; group += kLanes)
        Store<F32>::at(scores + group, cap_scores(a, raw_at<Vec>(scores + group)));
    if (slope != 0.0f)
      for (int group = from; group < end; group += kLanes) {
        const Vec distance =
            splat(static_cast<float>(tile.position + group - query_position)) + lane_indices();
        Store<F32>::at(scores + group,
                       multiply_add(splat(slope), distance, raw_at<Vec>(scores + group)));
      }
    for (int j = from; j < begin; ++j) scores[j] = -std::numeric_limits<float>::infinity();
    for (int j = end; j % kLanes; ++j) scores[j] = -std::numeric_limits<float>::infinity();
    Vec max_scores = splat(max_score);
    for (int group = from; group < end; group += kLanes)
      max_scores = max(raw_at<Vec>(scores + group), max_scores);
    const float largest = max_lane(max_scores);
    // The first tile finds nothing to correct, and later ones not often.
    const bool is_same = max_score == largest;
    const float correction = is_same         ? 1.0f
                             : total == 0.0f ? 0.0f
                                             : exp(splat(max_score - largest))[0];
    Vec added = splat(0.0f);
    for (int group = from; group < end; group += kLanes) {
      const Vec weight = exp(raw_at<Vec>(scores + group) - splat(largest));
      Store<F32>::at(scores + group, weight);
      added += weight;
    }
    max_score = largest;
    total = total * correction + sum(added);
    for (int64_t i = 0; i < a.value_width && !is_same; i += kLanes)
      acc[i / kLanes] *= splat(correction);
    if (a.v_scale)
      for (int j = begin; j < end; ++j)
        scores[j] *= a.v_scale[tile.slots[j] * a.num_kv_heads + kv_head];
  }

  void finish(const Attention& a, int64_t token, int64_t head) const {
    for (int64_t i = 0; i < a.value_width; i += kLanes)
      store(a.query_type, a.out, (token * a.num_heads + head) * a.value_width + i,
            acc[i / kLanes] / splat(total));
  }
};

// With AMX: query tokens of a row, one after the other, with the key/value heads of the units. With
// several tokens it is one key/value head, which has at most kHeadsOfChunk query heads in all.
void attend_tiles(const Attention& a, const Unit* units, int num_tokens);

}  // namespace JAXPAGE_ISA
}  // namespace jaxpage
