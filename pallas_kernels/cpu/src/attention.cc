// Paged attention for the instruction set that JAXPAGE_ISA names.
//
// A unit is one query token and the query heads of some key/value heads. It is computed by one
// thread, and each head always with the same operations in the same order, whatever else is in the
// step: positions in tiles that begin at multiples of 64, within a tile one after the other.
#include "attention.h"

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "softmax.h"

namespace jaxpage {
namespace JAXPAGE_ISA {
namespace {

// Writes a token's keys or values in eight bits, as `pallas_kernels.quantized_pages.quantize` does.
void write_quantized(const Attention& a, const void* from, int64_t token, void* pages,
                     float* scales, int64_t slot) {
  const bool is_int = a.page_type == Type::kI8;
  const float inverse = static_cast<float>(1.0 / (is_int ? 127.0 : 448.0));
  for (int64_t head = 0; head < a.num_kv_heads; ++head) {
    const int64_t source = (token * a.num_kv_heads + head) * a.head_dim;
    const int64_t target = (slot * a.num_kv_heads + head) * a.head_dim;
    // Zero times NaN or infinity is NaN, so the sum of zeros finds them.
    Vec maxima = splat(0.0f), zeros = splat(0.0f);
    for (int64_t i = 0; i < a.head_dim; i += kLanes) {
      const Vec v = load(a.query_type, from, source + i);
      maxima = max(maxima, max(v, -v));
      zeros += v * splat(0.0f);
    }
    float scale = max_lane(maxima) * inverse;
    scale = scale > 0x1p-100f ? scale : 0x1p-100f;
    if (sum(zeros) != 0.0f) scale = std::numeric_limits<float>::quiet_NaN();
    scales[slot * a.num_kv_heads + head] = scale;
    for (int64_t i = 0; i < a.head_dim; i += kLanes) {
      const Vec v = load(a.query_type, from, source + i) / splat(scale);
      for (int lane = 0; lane < kLanes; ++lane)
        if (!is_int) static_cast<uint8_t*>(pages)[target + i + lane] = float8_of(v[lane]);
        else
          static_cast<int8_t*>(pages)[target + i + lane] =
              v[lane] == v[lane] ? static_cast<int8_t>(std::nearbyint(v[lane])) : 0;
    }
  }
}

// So many vectors of sums of kMaxHeads heads stay in registers.
constexpr int kVecsAtOnce = kParts == 1 ? 4 : 1;

// Functions that read the pages of one key/value head, from its first number on, for a vector of
// positions and some query heads. kVecs is the number of vectors of a head; 0: as the call says.
struct Steps {
  void (*score)(const Attention& a, Head* heads, const Tile& tile, const void* k_pages, int group);
  void (*add)(const Attention& a, Head* heads, const Tile& tile, const void* v_pages, int group);
};

// Computes the scores of the positions group, group + 1, ... of a tile. A position that is not seen
// scores 0, which `Head::weigh` replaces.
template <typename Page, int kHeads, int kVecs>
void score(const Attention& a, Head* heads, const Tile& tile, const void* k_pages, int group) {
  const int vecs = kVecs ? kVecs : static_cast<int>(a.head_dim / kLanes);
  // In registers where the width is known.
  Vec q[kHeads][kVecs ? kVecs : 1], lane_sums[kHeads][kLanes];
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < kVecs; ++i) q[h][i] = heads[h].q[i];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int j = group + lane;
    Vec sum_of[kHeads];
    for (int h = 0; h < kHeads; ++h) sum_of[h] = splat(0.0f);
    if (j >= tile.begin && j < tile.end) {
      const auto* k = static_cast<const typename Page::type*>(k_pages) +
                      tile.slots[j] * a.num_kv_heads * a.head_dim;
      for (int i = 0; i < vecs; ++i) {
        const Vec key = Load<Page>::at(k + i * kLanes);
        for (int h = 0; h < kHeads; ++h)
          sum_of[h] = multiply_add(kVecs ? q[h][i] : heads[h].q[i], key, sum_of[h]);
      }
    }
    for (int h = 0; h < kHeads; ++h) lane_sums[h][lane] = sum_of[h];
  }
  for (int h = 0; h < kHeads; ++h) {
    Store<F32>::at(heads[h].scores + group, sum_each(lane_sums[h]));
  }
}

// Adds the weighted values of these positions to the sums of the heads, kVecs vectors from the
// `first`-th on.
template <typename Page, int kHeads, int kVecs>
inline void add_vecs(const Attention& a, Head* heads, const Tile& tile, const void* v_pages,
                     int group, int first) {
  Vec acc[kHeads][kVecs];
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < kVecs; ++i) acc[h][i] = heads[h].acc[first + i];
  for (int j = group > tile.begin ? group : tile.begin; j < group + kLanes && j < tile.end; ++j) {
    const auto* v = static_cast<const typename Page::type*>(v_pages) +
                    tile.slots[j] * a.num_kv_heads * a.head_dim + first * kLanes;
    for (int i = 0; i < kVecs; ++i) {
      const Vec value = Load<Page>::at(v + i * kLanes);
      for (int h = 0; h < kHeads; ++h)
        acc[h][i] = multiply_add(splat(heads[h].scores[j]), value, acc[h][i]);
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < kVecs; ++i) heads[h].acc[first + i] = acc[h][i];
}

template <typename Page, int kHeads>
void add(const Attention& a, Head* heads, const Tile& tile, const void* v_pages, int group) {
  const int vecs = static_cast<int>(a.value_width / kLanes);
  int i = 0;
  for (; i + kVecsAtOnce <= vecs; i += kVecsAtOnce)
    add_vecs<Page, kHeads, kVecsAtOnce>(a, heads, tile, v_pages, group, i);
  for (; i < vecs; ++i) add_vecs<Page, kHeads, 1>(a, heads, tile, v_pages, group, i);
}

template <typename Page, int kHeads>
Steps choose_steps_of_width(const Attention& a) {
  const bool is_usual = a.head_dim == a.value_width;
  if (is_usual && a.head_dim == 4 * kLanes) return {score<Page, kHeads, 4>, add<Page, kHeads>};
  if (is_usual && a.head_dim == 8 * kLanes) return {score<Page, kHeads, 8>, add<Page, kHeads>};
  if (is_usual && a.head_dim == 16 * kLanes) return {score<Page, kHeads, 16>, add<Page, kHeads>};
  return {score<Page, kHeads, 0>, add<Page, kHeads>};
}

// Calls run(page) with the type of the pages.
template <typename Run>
void dispatch_page(Type type, const Run& run) {
  switch (type) {
    case Type::kF32: return run(F32());
    case Type::kBF16: return run(BF16());
    case Type::kF16: return run(F16());
    case Type::kI8: return run(I8());
    default: return run(F8());
  }
}

// Calls run(count) with the number of query heads, at most kMaxHeads, as a constant.
template <typename Run>
void dispatch_heads(int64_t count, const Run& run) {
  switch (count) {
    case 1: return run(std::integral_constant<int, 1>());
    case 2: return run(std::integral_constant<int, 2>());
    case 3: return run(std::integral_constant<int, 3>());
    default: return run(std::integral_constant<int, kMaxHeads>());
  }
}

Steps choose_steps(const Attention& a, int64_t num_heads) {
  Steps steps;
  dispatch_page(a.page_type, [&](auto page) {
    dispatch_heads(num_heads, [&](auto heads) {
      steps = choose_steps_of_width<decltype(page), decltype(heads)::value>(a);
    });
  });
  return steps;
}

// Computes `num_heads` query heads of each key/value head of a unit, from its `offset`-th on. What
// the key/value heads hold of a vector of positions lies side by side in memory, so they take
// turns, and the next positions are fetched: one head alone reads a few bytes here and there.
void attend_heads(const Attention& a, const Unit& unit, int64_t offset, int64_t num_heads) {
  static thread_local std::vector<Head> of_thread;
  const int64_t group_size = a.num_heads / a.num_kv_heads, count = unit.kv_end - unit.kv_begin;
  if (static_cast<int64_t>(of_thread.size()) < count * num_heads)
    of_thread.resize(count * num_heads);
  Head* const heads = of_thread.data();
  const auto head_of = [&](int64_t i) {
    return (unit.kv_begin + i / num_heads) * group_size + offset + i % num_heads;
  };
  for (int64_t i = 0; i < count * num_heads; ++i)
    heads[i].start(a, unit, head_of(i)), heads[i].load_query(a, unit, head_of(i));

  const Steps steps = choose_steps(a, num_heads);
  const int64_t width = bytes_of_head(a), stride = a.num_kv_heads * width;
  const char* const k_pages = static_cast<const char*>(a.k_pages) + unit.kv_begin * width;
  const char* const v_pages = static_cast<const char*>(a.v_pages) + unit.kv_begin * width;
  const bool fetches = count > 1;
  Tile tiles[2], *tile = tiles, *next = tiles + 1;
  int64_t position = unit.first / kTile * kTile;
  for (tile->find(a, unit, position); position <= unit.last;
       position += kTile, std::swap(tile, next)) {
    const bool goes_on = position + kTile <= unit.last;
    if (goes_on) next->find(a, unit, position + kTile);
    for (int group = tile->from; group < tile->end; group += kLanes)
      for (int64_t i = 0; i < count; ++i) {
        if (fetches && group + kLanes < tile->end)
          tile->fetch(k_pages + i * width, stride, width, group + kLanes);
        else if (fetches) tile->fetch(v_pages + i * width, stride, width, tile->from);
        steps.score(a, heads + i * num_heads, *tile, k_pages + i * width, group);
      }
    for (int64_t i = 0; i < count * num_heads; ++i)
      heads[i].weigh(a, *tile, unit.kv_begin + i / num_heads);
    for (int group = tile->from; group < tile->end; group += kLanes)
      for (int64_t i = 0; i < count; ++i) {
        if (fetches && group + kLanes < tile->end)
          tile->fetch(v_pages + i * width, stride, width, group + kLanes);
        else if (fetches && goes_on) next->fetch(k_pages + i * width, stride, width, next->from);
        steps.add(a, heads + i * num_heads, *tile, v_pages + i * width, group);
      }
  }
  for (int64_t i = 0; i < count * num_heads; ++i) heads[i].finish(a, unit.token, head_of(i));
}

// Reads what the pages hold of a tile and one key/value head, as numbers of float32: keys by number
// and position, values by position and number.
template <typename Page>
void read_tile(const Attention& a, const Tile& tile, const void* k_pages, const void* v_pages,
               Vec* keys, Vec* values) {
  const int64_t stride = a.num_kv_heads * a.head_dim, vecs = a.head_dim / kLanes,
                value_vecs = a.value_width / kLanes;
  const auto at = [&](const void* pages, int j) {
    return static_cast<const typename Page::type*>(pages) + tile.slots[j] * stride;
  };
  for (int group = tile.from; group < tile.end; group += kLanes)
    for (int64_t i = 0; i < vecs; ++i) {
      Vec square[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const int j = group + lane;
        square[lane] = j < tile.begin || j >= tile.end
                           ? splat(0.0f)
                           : Load<Page>::at(at(k_pages, j) + i * kLanes);
      }
      transpose(square);
      for (int lane = 0; lane < kLanes; ++lane)
        keys[(i * kLanes + lane) * kVecsOfTile + group / kLanes] = square[lane];
    }
  for (int j = tile.begin; j < tile.end; ++j)
    for (int64_t i = 0; i < value_vecs; ++i)
      values[j * value_vecs + i] = Load<Page>::at(at(v_pages, j) + i * kLanes);
}

// Computes the products of some queries with a tile's positions, as far as they belong to the
// numbers lane, lane + kStep, ... They are added as `sum_each` adds lanes, so that a score has the
// bits of `score`.
template <int kStep, int kHeads>
inline __attribute__((always_inline)) void add_lanes(const Vec* keys, const float* const* q,
                                                     int64_t width, int lane,
                                                     Vec (*sum)[kVecsAtOnce]) {
  if constexpr (kStep < kLanes) {
    Vec other[kHeads][kVecsAtOnce];
    add_lanes<2 * kStep, kHeads>(keys, q, width, lane, sum);
    add_lanes<2 * kStep, kHeads>(keys, q, width, lane + kStep, other);
    for (int h = 0; h < kHeads; ++h)
      for (int i = 0; i < kVecsAtOnce; ++i) sum[h][i] += other[h][i];
  } else {
    Vec lane_sums[kHeads][kVecsAtOnce];
    for (int h = 0; h < kHeads; ++h)
      for (int i = 0; i < kVecsAtOnce; ++i) lane_sums[h][i] = splat(0.0f);
    for (int64_t number = lane; number < width; number += kLanes)
      for (int i = 0; i < kVecsAtOnce; ++i) {
        const Vec key = keys[number * kVecsOfTile + i];
        for (int h = 0; h < kHeads; ++h)
          lane_sums[h][i] = multiply_add(splat(q[h][number]), key, lane_sums[h][i]);
      }
    for (int h = 0; h < kHeads; ++h)
      for (int i = 0; i < kVecsAtOnce; ++i) sum[h][i] = lane_sums[h][i];
  }
}

template <int kHeads>
void score_tile(const Attention& a, Head* heads, const Vec* keys) {
  const float* q[kHeads];
  Vec sum[kHeads][kVecsAtOnce];
  for (int h = 0; h < kHeads; ++h) q[h] = reinterpret_cast<const float*>(heads[h].q);
  for (int i = 0; i < kVecsOfTile; i += kVecsAtOnce) {
    add_lanes<1, kHeads>(keys + i, q, a.head_dim, 0, sum);
    for (int h = 0; h < kHeads; ++h)
      for (int k = 0; k < kVecsAtOnce; ++k)
        Store<F32>::at(heads[h].scores + (i + k) * kLanes, sum[h][k]);
  }
}

// Adds the weighted values of the positions from `begin` to `end` to the sums of some heads, in
// their order, kVecs vectors from the `first`-th on.
template <int kHeads, int kVecs>
void add_values(Head* heads, const Vec* values, int64_t value_vecs, int64_t first, int begin,
                int end) {
  Vec acc[kHeads][kVecs];
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < kVecs; ++i) acc[h][i] = heads[h].acc[first + i];
  for (int j = begin; j < end; ++j)
    for (int i = 0; i < kVecs; ++i) {
      const Vec value = values[j * value_vecs + first + i];
      for (int h = 0; h < kHeads; ++h)
        acc[h][i] = multiply_add(splat(heads[h].scores[j]), value, acc[h][i]);
    }
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < kVecs; ++i) heads[h].acc[first + i] = acc[h][i];
}

template <int kHeads>
void add_tile(const Attention& a, Head* heads, const Vec* values, int begin, int end) {
  const int64_t vecs = a.value_width / kLanes;
  int64_t i = 0;
  for (; i + kVecsAtOnce <= vecs; i += kVecsAtOnce)
    add_values<kHeads, kVecsAtOnce>(heads, values, vecs, i, begin, end);
  for (; i < vecs; ++i) add_values<kHeads, 1>(heads, values, vecs, i, begin, end);
}

// Computes query tokens of a prompt's chunk, one after the other, with one key/value head: at most
// kHeadsOfChunk query heads in all. A tile is read and made float32 once for all of them. Each head
// has the operations of `attend_heads` in the same order.
void attend_together(const Attention& a, const Unit* units, int num_tokens) {
  static thread_local std::vector<Head> of_thread(kHeadsOfChunk);
  static thread_local std::vector<Vec> numbers;
  const int group_size = static_cast<int>(a.num_heads / a.num_kv_heads),
            num_heads = num_tokens * group_size;
  const int64_t kv_head = units->kv_begin, width = bytes_of_head(a);
  const char* const k_pages = static_cast<const char*>(a.k_pages) + kv_head * width;
  const char* const v_pages = static_cast<const char*>(a.v_pages) + kv_head * width;
  numbers.resize(kVecsOfTile * (a.head_dim + a.value_width));
  Head* const heads = of_thread.data();
  Vec *const keys = numbers.data(), *const values = keys + kVecsOfTile * a.head_dim;
  for (int i = 0; i < num_heads; ++i) {
    const Unit& unit = units[i / group_size];
    const int64_t head = kv_head * group_size + i % group_size;
    heads[i].start(a, unit, head), heads[i].load_query(a, unit, head);
  }
  const Unit all = join_units(units, num_tokens);
  Tile tile, token_tile;
  for (int64_t position = all.first / kTile * kTile; position <= all.last; position += kTile) {
    tile.find(a, all, position);
    dispatch_page(a.page_type, [&](auto page) {
      read_tile<decltype(page)>(a, tile, k_pages, v_pages, keys, values);
    });
    for (int i = 0; i < num_heads; i += kMaxHeads)
      dispatch_heads(std::min(kMaxHeads, num_heads - i),
                     [&](auto some) { score_tile<decltype(some)::value>(a, heads + i, keys); });
    token_tile = tile;
    for (int t = 0; t < num_tokens; ++t) {
      token_tile.see(units[t]);
      if (token_tile.begin >= token_tile.end) continue;
      for (int i = t * group_size; i < (t + 1) * group_size; ++i)
        heads[i].weigh(a, token_tile, kv_head);
    }
    for (int i = 0, count; i < num_heads; i += count) {
      token_tile.see(units[i / group_size]);
      const int begin = token_tile.begin, end = token_tile.end;
      for (count = 1; count < kMaxHeads && i + count < num_heads; ++count) {
        token_tile.see(units[(i + count) / group_size]);
        if (token_tile.begin != begin || token_tile.end != end) break;
      }
      if (begin < end)
        dispatch_heads(count, [&](auto some) {
          add_tile<decltype(some)::value>(a, heads + i, values, begin, end);
        });
    }
  }
  for (int i = 0; i < num_heads; ++i)
    heads[i].finish(a, units[i / group_size].token, kv_head * group_size + i % group_size);
}

void attend_unit(const Attention& a, const Unit& unit) {
  const int64_t group_size = a.num_heads / a.num_kv_heads;
  for (int64_t done = 0; done < group_size; done += kMaxHeads)
    attend_heads(a, unit, done, group_size - done < kMaxHeads ? group_size - done : kMaxHeads);
}

void write(const Attention& a, int64_t token) {
  const int64_t slot = a.slots[token], width = a.num_kv_heads * a.head_dim;
  // Slot 0 takes padding: nobody reads it, and several threads would write it at once.
  if (slot <= 0 || slot >= a.num_slots) return;
  if (a.k_scale) {
    write_quantized(a, a.k_new, token, a.k_pages, a.k_scale, slot);
    if (a.v_new) write_quantized(a, a.v_new, token, a.v_pages, a.v_scale, slot);
    return;
  }
  for (int64_t i = 0; i < width; i += kLanes) {
    store(a.page_type, a.k_pages, slot * width + i, load(a.query_type, a.k_new, token * width + i));
    if (a.v_new)
      store(a.page_type, a.v_pages, slot * width + i,
            load(a.query_type, a.v_new, token * width + i));
  }
}

Unit make_unit(const Attention& a, int64_t row, int64_t token, int64_t kv_begin, int64_t kv_end,
               int32_t* branch) {
  const int64_t num_queries = a.query_start[row + 1] - a.query_start[row];
  const int64_t num_before = a.context_len[row] - num_queries;
  Unit unit{row,        token,  kv_begin, kv_end, 0, num_before + token - a.query_start[row],
            num_before, nullptr};
  if (a.tree_mask) {
    int32_t depth = 0;
    for (int64_t index = 0; index < num_queries && index < a.mask_width; ++index)
      if (a.tree_mask[token * a.mask_width + index]) branch[depth++] = static_cast<int32_t>(index);
    unit.branch = branch;
    unit.last = num_before + depth - 1;
  }
  if (a.window > 0 && unit.last + 1 > a.window) unit.first = unit.last + 1 - a.window;
  if (a.chunk > 0 && unit.last - unit.last % a.chunk > unit.first)
    unit.first = unit.last - unit.last % a.chunk;
  if (a.last_seen)
    unit.last =
        std::max<int64_t>(unit.last, std::min<int64_t>(a.last_seen[token], a.context_len[row] - 1));
  return unit;
}

void attend(const Attention& a, int64_t row, int64_t token, int64_t kv_begin, int64_t kv_end) {
  int32_t branch[kMaxDrafts];
  const Unit unit = make_unit(a, row, token, kv_begin, kv_end, branch);
  a.with_tiles ? attend_tiles(a, &unit, 1) : attend_unit(a, unit);
}

void attend_chunk(const Attention& a, int64_t row, int64_t token, int64_t num_tokens,
                  int64_t kv_head) {
  Unit units[kTokensOfTiles];
  for (int64_t t = 0; t < num_tokens; ++t)
    units[t] = make_unit(a, row, token + t, kv_head, kv_head + 1, nullptr);
  (a.with_tiles ? attend_tiles : attend_together)(a, units, static_cast<int>(num_tokens));
}

}  // namespace

extern const Kernels kKernels = {write, attend, attend_chunk};

}  // namespace JAXPAGE_ISA
}  // namespace jaxpage
