// Attention in both directions for the instruction set that JAXPAGE_ISA names.
//
// Scores and weighted values are two products, whose right sides are made of panels as weights are
// (packed.h): 16 keys side by side, and 16 numbers of values. Each sum adds its products in their
// order, over the numbers of a head or over the keys of the text. So a token has the same bits in
// any stream of texts.
#include "bidirectional.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "vec.h"

namespace jaxpage {
namespace JAXPAGE_ISA {
namespace {

// The sums of a tile of rows and vectors stay in registers.
constexpr int kMaxRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMaxVecs = 4;
#else
constexpr int kMaxVecs = 1;
#endif
// So many queries share what is read of keys and values. Their scores stay in the caches.
constexpr int64_t kQueriesAtOnce = 48;
constexpr float kLog2E = 1.44269504088896341f;  // weights are powers of two
constexpr int64_t kKeysAtOnce = 256;            // whose values stay in the first cache

// A matrix whose rows are `width` numbers apart.
struct Matrix {
  float* first;
  int64_t width;
  float* at(int64_t row, int64_t column) const { return first + row * width + column; }
};

// Adds the product of some rows of x, from its column `begin` to `end`, and some panels of w to
// sums; from column 0 on sums begin. A panel is `panel` numbers long.
template <int kRows, int kVecs>
inline void multiply_tile(const Matrix& x, const float* w, int64_t panel, int64_t begin,
                          int64_t end, const Matrix& sums) {
  Vec sum[kRows][kVecs];
  for (int t = 0; t < kRows; ++t)
    for (int v = 0; v < kVecs; ++v) sum[t][v] = begin ? raw_at<Vec>(sums.at(t, v * kLanes)) : Vec{};
  for (int64_t i = begin; i < end; ++i) {
    Vec numbers[kVecs];
    for (int v = 0; v < kVecs; ++v) numbers[v] = raw_at<Vec>(w + v * panel + i * kLanes);
    for (int t = 0; t < kRows; ++t) {
      const Vec factor = splat(*x.at(t, i));
      for (int v = 0; v < kVecs; ++v) sum[t][v] = multiply_add(factor, numbers[v], sum[t][v]);
    }
  }
  for (int t = 0; t < kRows; ++t)
    for (int v = 0; v < kVecs; ++v) Store<F32>::at(sums.at(t, v * kLanes), sum[t][v]);
}

// Does the same for any number of rows, in tiles of nearly equal numbers of them.
template <int kVecs>
void multiply_rows(int64_t num_rows, const Matrix& x, const float* w, int64_t panel, int64_t begin,
                   int64_t end, const Matrix& sums) {
  const int64_t num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t first = i * num_rows / num_tiles, count = (i + 1) * num_rows / num_tiles - first;
    const Matrix x_rows = {x.at(first, 0), x.width}, to = {sums.at(first, 0), sums.width};
    switch (count) {
      case 1: multiply_tile<1, kVecs>(x_rows, w, panel, begin, end, to); break;
      case 2: multiply_tile<2, kVecs>(x_rows, w, panel, begin, end, to); break;
      case 3: multiply_tile<3, kVecs>(x_rows, w, panel, begin, end, to); break;
      case 4: multiply_tile<4, kVecs>(x_rows, w, panel, begin, end, to); break;
      case 5: multiply_tile<5, kVecs>(x_rows, w, panel, begin, end, to); break;
      default: multiply_tile<kMaxRows, kVecs>(x_rows, w, panel, begin, end, to);
    }
  }
}

// Does the same for any number of panels.
void multiply(int64_t num_rows, const Matrix& x, const float* w, int64_t num_panels, int64_t panel,
              int64_t begin, int64_t end, const Matrix& sums) {
  for (int64_t p = 0, count; p < num_panels; p += count) {
    const float* from = w + p * panel;
    const Matrix to = {sums.at(0, p * kLanes), sums.width};
    const auto run = [&](auto vecs) {
      count = vecs;
      multiply_rows<vecs>(num_rows, x, from, panel, begin, end, to);
    };
    if (kMaxVecs >= 4 && num_panels - p >= 4) run(std::integral_constant<int, 4>());
    else if (kMaxVecs >= 2 && num_panels - p >= 2) run(std::integral_constant<int, 2>());
    else run(std::integral_constant<int, 1>());
  }
}

// Puts the keys [begin, end) of a head into panels of 16 keys, the last one filled up with zeros.
void pack_keys(const Bidirectional& a, int64_t begin, int64_t end, int64_t head, float* to) {
  const int64_t width = a.num_kv_heads * a.head_dim;
  for (int64_t key = begin; key < end; key += kLanes)
    for (int64_t i = 0; i < a.head_dim; i += kLanes) {
      Vec square[kLanes];
      for (int lane = 0; lane < kLanes; ++lane)
        square[lane] = key + lane < end
                           ? raw_at<Vec>(a.k + (key + lane) * width + head * a.head_dim + i)
                           : Vec{};
      transpose(square);
      std::memcpy(to, square, sizeof(square));
      to += kLanes * kLanes;
    }
}

// Puts the values [begin, end) of a head into panels of 16 numbers.
void pack_values(const Bidirectional& a, int64_t begin, int64_t end, int64_t head, float* to) {
  const int64_t width = a.num_kv_heads * a.head_dim, count = end - begin;
  for (int64_t key = 0; key < count; ++key)
    for (int64_t i = 0; i < a.head_dim; i += kLanes)
      std::memcpy(to + i * count + key * kLanes,
                  a.v + (begin + key) * width + head * a.head_dim + i, sizeof(Vec));
}

// Makes weights of the scores of a query, which sees the columns [begin, end) of `num_columns`.
// Returns the sum of the weights. Four vectors take turns, so that none waits for the one before.
float weigh(float* scores, int64_t num_columns, int64_t begin, int64_t end) {
  const Vec unseen = splat(-std::numeric_limits<float>::infinity());
  const auto hide = [&](int64_t i) {
    const Vec column = splat(static_cast<float>(i)) + lane_indices();
    const Int is_seen =
        (column >= splat(static_cast<float>(begin))) & (column < splat(static_cast<float>(end)));
    const Vec score = select(is_seen, raw_at<Vec>(scores + i), unseen);
    Store<F32>::at(scores + i, score);
  };
  for (int64_t i = 0; i < begin; i += kLanes) hide(i);
  for (int64_t i = end / kLanes * kLanes; i < num_columns; i += kLanes) hide(i);
  const int64_t num_fours = num_columns / (4 * kLanes) * (4 * kLanes);
  Vec maxima[4] = {unseen, unseen, unseen, unseen};
  const auto update_max = [&](int64_t i, int turn) {
    maxima[turn] = max(raw_at<Vec>(scores + i), maxima[turn]);
  };
  int64_t i = 0;
  for (; i < num_fours; i += 4 * kLanes)
    for (int turn = 0; turn < 4; ++turn) update_max(i + turn * kLanes, turn);
  for (; i < num_columns; i += kLanes) update_max(i, 0);
  const Vec highest = splat(max_lane(max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3]))));
  Vec total[4] = {};
  const auto make_weight = [&](int64_t i, int turn) {
    const Vec weight = power_of_two(raw_at<Vec>(scores + i) - highest);
    Store<F32>::at(scores + i, weight);
    total[turn] += weight;
  };
  for (i = 0; i < num_fours; i += 4 * kLanes)
    for (int turn = 0; turn < 4; ++turn) make_weight(i + turn * kLanes, turn);
  for (; i < num_columns; i += kLanes) make_weight(i, 0);
  return sum((total[0] + total[1]) + (total[2] + total[3]));
}

// Holds the keys and values of a head that some queries see, in panels.
struct VisibleKeys {
  int64_t begin, count;  // the position of the first key, and the number of keys
  const float *keys, *values;
};

// Computes at most kQueriesAtOnce queries [first, last) of a head. `buffer` is theirs.
void attend_block(const Bidirectional& a, const VisibleKeys& visible, int64_t first, int64_t last,
                  int64_t head, float* buffer) {
  const int64_t num_rows = last - first, width = a.head_dim;
  // The keys that any of these queries sees, in whole panels.
  const int64_t begin =
      a.reach < 0 ? 0 : std::max<int64_t>(0, first - a.reach - visible.begin) / kLanes * kLanes;
  const int64_t end =
      a.reach < 0 ? visible.count : std::min(visible.count, last + a.reach - visible.begin);
  const int64_t num_panels = (end - begin + kLanes - 1) / kLanes;
  const Matrix q = {buffer, width}, mixed = {q.at(num_rows, 0), width},
               scores = {mixed.at(num_rows, 0), num_panels * kLanes};
  const auto offset_of = [&](int64_t row) { return ((first + row) * a.num_heads + head) * width; };
  for (int64_t t = 0; t < num_rows; ++t)
    for (int64_t i = 0; i < width; i += kLanes) {
      Store<F32>::at(q.at(t, i), raw_at<Vec>(a.q + offset_of(t) + i) * splat(kLog2E * a.scale));
    }
  multiply(num_rows, q, visible.keys + begin * width, num_panels, kLanes * width, 0, width, scores);
  float totals[kQueriesAtOnce];
  for (int64_t t = 0; t < num_rows; ++t) {
    const int64_t column = first + t - visible.begin - begin;
    const int64_t from = a.reach < 0 ? 0 : std::max<int64_t>(0, column - a.reach);
    const int64_t to = a.reach < 0 ? end - begin : std::min(end - begin, column + a.reach + 1);
    totals[t] = weigh(scores.at(t, 0), scores.width, from, to);
  }
  for (int64_t key = 0; key < end - begin; key += kKeysAtOnce)
    multiply(num_rows, scores, visible.values + begin * kLanes, width / kLanes,
             visible.count * kLanes, key, std::min(key + kKeysAtOnce, end - begin), mixed);
  for (int64_t t = 0; t < num_rows; ++t) {
    const Vec factor = splat(1.0f / totals[t]);
    for (int64_t i = 0; i < width; i += kLanes) {
      Store<F32>::at(a.out + offset_of(t) + i, raw_at<Vec>(mixed.at(t, i)) * factor);
    }
  }
}

void attend(const Bidirectional& a, int64_t begin, int64_t end, int64_t first, int64_t last,
            int64_t head) {
  static thread_local std::vector<float> of_thread;
  const int64_t width = a.head_dim, kv_head = head * a.num_kv_heads / a.num_heads;
  if (a.reach >= 0) {
    begin = std::max(begin, first - a.reach);
    end = std::min(end, last + a.reach);
  }
  const int64_t count = end - begin, num_columns = (count + kLanes - 1) / kLanes * kLanes;
  of_thread.resize(2 * num_columns * width + kQueriesAtOnce * (2 * width + num_columns));
  float* const keys = of_thread.data();
  float* const values = keys + num_columns * width;
  pack_keys(a, begin, end, kv_head, keys);
  pack_values(a, begin, end, kv_head, values);
  const VisibleKeys visible = {begin, count, keys, values};
  const int64_t num_blocks = (last - first + kQueriesAtOnce - 1) / kQueriesAtOnce;
  for (int64_t i = 0; i < num_blocks; ++i)
    attend_block(a, visible, first + i * (last - first) / num_blocks,
                 first + (i + 1) * (last - first) / num_blocks, head, values + num_columns * width);
}

}  // namespace

extern const BidirectionalKernels kBidirectional = {attend};

}  // namespace JAXPAGE_ISA
}  // namespace jaxpage
