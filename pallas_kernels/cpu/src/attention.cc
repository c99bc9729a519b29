// Paged attention for the instruction set that JAXPAGE_ISA names.
//
// A unit is one query token and the query heads that share a key/value head. It is computed by one thread, always with the same operations in
// the same order, whatever else is in the step: positions in tiles that begin at multiples of 64, within a tile one after the other.
#include "attention.h"

#include <cmath>
#include <limits>

#include "vec.h"

namespace jaxpage {
namespace JAXPAGE_ISA {
namespace {

constexpr int kTile = 64;       // positions
constexpr int kMostHeads = 4;   // of a group that are computed together
constexpr int kMostVecs = kMostHeadWidth / kLanes;

// Where the pages hold a position of a row, as a slot.
inline int64_t slot_of(const Attention& a, int64_t row, int64_t position) {
  int64_t block = a.block_table[row * a.table_width + position / a.block_size];
  return block * a.block_size + position % a.block_size;
}

// A vector of an array of this type, from or to its `index`-th number on. Pages of eight bits are written by `write_quantized`.
Vec load(Type type, const void* array, int64_t index) {
  switch (type) {
    case Type::kF32: return Load<F32>::at(static_cast<const float*>(array) + index);
    case Type::kBF16: return Load<BF16>::at(static_cast<const uint16_t*>(array) + index);
    default: return Load<F16>::at(static_cast<const uint16_t*>(array) + index);
  }
}

void store(Type type, void* array, int64_t index, Vec value) {
  switch (type) {
    case Type::kF32: return Store<F32>::at(static_cast<float*>(array) + index, value);
    case Type::kBF16: return Store<BF16>::at(static_cast<uint16_t*>(array) + index, value);
    default: return Store<F16>::at(static_cast<uint16_t*>(array) + index, value);
  }
}

// As `pallas_kernels.quantized_pages.quantize`.
void write_quantized(const Attention& a, const void* from, int64_t token, void* pages, float* scales, int64_t slot) {
  const bool is_int = a.page_type == Type::kI8;
  const float inverse = static_cast<float>(1.0 / (is_int ? 127.0 : 448.0));
  for (int64_t head = 0; head < a.num_kv_heads; ++head) {
    const int64_t source = (token * a.num_kv_heads + head) * a.head_width;
    const int64_t target = (slot * a.num_kv_heads + head) * a.head_width;
    Vec most = splat(0.0f), zeros = splat(0.0f);
    for (int64_t i = 0; i < a.head_width; i += kLanes) {
      const Vec v = load(a.query_type, from, source + i);
      most = max(most, max(v, -v));
      zeros += v * splat(0.0f);
    }
    float scale = largest(most) * inverse;
    scale = scale > 0x1p-100f ? scale : 0x1p-100f;
    if (sum(zeros) != 0.0f) scale = std::numeric_limits<float>::quiet_NaN();  // NaN or infinity is in it
    scales[slot * a.num_kv_heads + head] = scale;
    for (int64_t i = 0; i < a.head_width; i += kLanes) {
      const Vec v = load(a.query_type, from, source + i) / splat(scale);
      for (int lane = 0; lane < kLanes; ++lane)
        if (!is_int)
          static_cast<uint8_t*>(pages)[target + i + lane] = float8_of(v[lane]);
        else
          static_cast<int8_t*>(pages)[target + i + lane] =
              v[lane] == v[lane] ? static_cast<int8_t>(std::nearbyint(v[lane])) : 0;
    }
  }
}

// The softmax of some heads of one token, as it goes from tile to tile.
struct Running {
  float most[kMostHeads];
  float total[kMostHeads];
  Vec acc[kMostHeads][kMostVecs];
};

// A query token and what it sees: positions `first` to `last` of its row. In a tree of drafts the positions from `num_before` on are the tokens of
// its branch, one behind the other, as they will stand when they are accepted.
struct Unit {
  int64_t row, token, kv_head, first, last, num_before;
  const int32_t* branch;  // places in the row, or null: every position is where it says

  int64_t slot(const Attention& a, int64_t position) const {
    if (branch && position >= num_before) position = num_before + branch[position - num_before];
    return slot_of(a, row, position);
  }
};

template <typename Page, int kHeads>
void attend_heads(const Attention& a, const Unit& unit, int64_t first_head) {
  const int64_t width = a.head_width, stride = a.num_kv_heads * width;
  const int vecs = static_cast<int>(width / kLanes), value_vecs = static_cast<int>(a.value_width / kLanes);
  Vec q[kHeads][kMostVecs];
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < vecs; ++i)
      q[h][i] = load(a.query_type, a.q, ((unit.token * a.num_heads + first_head + h) * width) + i * kLanes) * splat(a.scale);
  Running state;
  for (int h = 0; h < kHeads; ++h) {
    state.most[h] = a.sinks ? a.sinks[first_head + h] : -std::numeric_limits<float>::infinity();
    state.total[h] = a.sinks ? 1.0f : 0.0f;
    for (int i = 0; i < value_vecs; ++i) state.acc[h][i] = splat(0.0f);
  }
  const auto* k_pages = static_cast<const typename Page::type*>(a.k_pages) + unit.kv_head * width;
  const auto* v_pages = static_cast<const typename Page::type*>(a.v_pages) + unit.kv_head * width;
  for (int64_t tile = unit.first / kTile * kTile; tile <= unit.last; tile += kTile) {
    int64_t slots[kTile];
    float scores[kHeads][kTile] __attribute__((aligned(64)));
    const int begin = static_cast<int>(unit.first > tile ? unit.first - tile : 0);
    const int end = static_cast<int>(unit.last - tile < kTile ? unit.last - tile + 1 : kTile);
    const int from = begin / kLanes * kLanes;
    for (int j = begin; j < end; ++j) slots[j] = unit.slot(a, tile + j);
    for (int group = from; group < end; group += kLanes) {
      Vec products[kHeads][kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        const int j = group + lane;
        Vec sum_of[kHeads];
        for (int h = 0; h < kHeads; ++h) sum_of[h] = splat(0.0f);
        if (j >= begin && j < end) {
          const auto* k = k_pages + slots[j] * stride;
          for (int i = 0; i < vecs; ++i) {
            Vec key = Load<Page>::at(k + i * kLanes);
            for (int h = 0; h < kHeads; ++h) sum_of[h] += q[h][i] * key;
          }
        }
        for (int h = 0; h < kHeads; ++h) products[h][lane] = sum_of[h];
      }
      for (int h = 0; h < kHeads; ++h) {
        Vec score = sums(products[h]);
        std::memcpy(scores[h] + group, &score, sizeof(score));
      }
    }
    for (int h = 0; h < kHeads; ++h) {
      float* s = scores[h];
      if (a.k_scale)
        for (int j = begin; j < end; ++j) s[j] *= a.k_scale[slots[j] * a.num_kv_heads + unit.kv_head];
      float most = state.most[h];
      Vec added = splat(0.0f);
      if (a.softcap > 0.0f)
        for (int group = from; group < end; group += kLanes) {
          Vec score;
          std::memcpy(&score, s + group, sizeof(score));
          score = tanh(score / splat(a.softcap)) * splat(a.softcap);
          std::memcpy(s + group, &score, sizeof(score));
        }
      for (int j = from; j < begin; ++j) s[j] = -std::numeric_limits<float>::infinity();
      for (int j = end; j % kLanes; ++j) s[j] = -std::numeric_limits<float>::infinity();
      for (int j = begin; j < end; ++j) most = s[j] > most ? s[j] : most;
      // The first tile finds nothing to correct.
      const float correction = state.total[h] == 0.0f ? 0.0f : exp(splat(state.most[h] - most))[0];
      for (int group = from; group < end; group += kLanes) {
        Vec score;
        std::memcpy(&score, s + group, sizeof(score));
        Vec weight = exp(score - splat(most));
        std::memcpy(s + group, &weight, sizeof(weight));
        added += weight;
      }
      state.most[h] = most;
      state.total[h] = state.total[h] * correction + sum(added);
      for (int i = 0; i < value_vecs; ++i) state.acc[h][i] *= splat(correction);
      if (a.v_scale)
        for (int j = begin; j < end; ++j) s[j] *= a.v_scale[slots[j] * a.num_kv_heads + unit.kv_head];
    }
    for (int j = begin; j < end; ++j) {
      const auto* v = v_pages + slots[j] * stride;
      for (int i = 0; i < value_vecs; ++i) {
        Vec value = Load<Page>::at(v + i * kLanes);
        for (int h = 0; h < kHeads; ++h) state.acc[h][i] += splat(scores[h][j]) * value;
      }
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < value_vecs; ++i)
      store(a.query_type, a.out, (unit.token * a.num_heads + first_head + h) * a.value_width + i * kLanes,
            state.acc[h][i] / splat(state.total[h]));
}

template <typename Page>
void attend_pages(const Attention& a, const Unit& unit) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  for (int64_t done = 0; done < group; done += kMostHeads) {
    const int64_t head = unit.kv_head * group + done, left = group - done;
    if (left >= 4)
      attend_heads<Page, 4>(a, unit, head);
    else if (left == 3)
      attend_heads<Page, 3>(a, unit, head);
    else if (left == 2)
      attend_heads<Page, 2>(a, unit, head);
    else
      attend_heads<Page, 1>(a, unit, head);
  }
}

void attend_unit(const Attention& a, const Unit& unit) {
  switch (a.page_type) {
    case Type::kF32: attend_pages<F32>(a, unit); break;
    case Type::kBF16: attend_pages<BF16>(a, unit); break;
    case Type::kF16: attend_pages<F16>(a, unit); break;
    case Type::kI8: attend_pages<I8>(a, unit); break;
    case Type::kF8: attend_pages<F8>(a, unit); break;
  }
}

void write(const Attention& a, int64_t token) {
  const int64_t slot = a.slots[token], width = a.num_kv_heads * a.head_width;
  if (slot <= 0 || slot >= a.num_slots) return;  // slot 0 takes padding: nobody reads it, and threads would write it at once
  if (a.k_scale) {
    write_quantized(a, a.k_new, token, a.k_pages, a.k_scale, slot);
    if (a.v_new) write_quantized(a, a.v_new, token, a.v_pages, a.v_scale, slot);
    return;
  }
  for (int64_t i = 0; i < width; i += kLanes) {
    store(a.page_type, a.k_pages, slot * width + i, load(a.query_type, a.k_new, token * width + i));
    if (a.v_new) store(a.page_type, a.v_pages, slot * width + i, load(a.query_type, a.v_new, token * width + i));
  }
}

void attend(const Attention& a, int64_t row, int64_t token, int64_t kv_head) {
  const int64_t num_queries = a.query_start[row + 1] - a.query_start[row];
  const int64_t num_before = a.context_len[row] - num_queries;
  Unit unit{row, token, kv_head, 0, num_before + token - a.query_start[row], num_before, nullptr};
  int32_t branch[kMostDrafts];
  if (a.tree_mask) {
    int32_t depth = 0;
    for (int64_t place = 0; place < num_queries && place < a.mask_width; ++place)
      if (a.tree_mask[token * a.mask_width + place]) branch[depth++] = static_cast<int32_t>(place);
    unit.branch = branch;
    unit.last = num_before + depth - 1;
  }
  if (a.window > 0 && unit.last + 1 > a.window) unit.first = unit.last + 1 - a.window;
  attend_unit(a, unit);
}

}  // namespace

extern const Kernels kKernels = {write, attend};

}  // namespace JAXPAGE_ISA
}  // namespace jaxpage
