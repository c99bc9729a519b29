// Norms, gates and other work on single rows for the instruction set that JAXPAGE_ISA names.
//
// A row is computed by one thread, in an order that its width alone decides.
#include "rows.h"

#include <cmath>
#include <vector>

#include "activations.h"

namespace jaxpage {
namespace JAXPAGE_ISA {
namespace {

// Loads sixteen numbers, or fewer at the end of a row, with zeros after them.
template <typename Stored>
inline Vec load(const void* x, int64_t at, int64_t end) {
  typedef typename Stored::type Number;
  const Number* from = static_cast<const Number*>(x) + at;
  if (at + kLanes <= end) return Load<Stored>::at(from);
  Number tail[kLanes] = {};
  std::memcpy(tail, from, (end - at) * sizeof(Number));
  return Load<Stored>::at(tail);
}

inline Vec load(Type type, const void* x, int64_t at, int64_t end) {
  if (type == Type::kF32) return load<F32>(x, at, end);
  if (type == Type::kBF16) return load<BF16>(x, at, end);
  return load<F16>(x, at, end);
}

template <typename Stored>
inline void store(void* out, int64_t at, int64_t end, Vec value) {
  typedef typename Stored::type Number;
  Number* to = static_cast<Number*>(out) + at;
  if (at + kLanes <= end) return Store<Stored>::at(to, value);
  Number tail[kLanes];
  Store<Stored>::at(tail, value);
  std::memcpy(to, tail, (end - at) * sizeof(Number));
}

template <typename Stored>
void gate(const Rows& p, int64_t row) {
  typedef typename Stored::type Number;
  const Number* gates = static_cast<const Number*>(p.x) + row * 2 * p.width;
  Number* out = static_cast<Number*>(p.out) + row * p.width;
  for (int64_t i = 0; i < p.width; i += kLanes)
    store<Stored>(out, i, p.width,
                  activate(p.activation, load<Stored>(gates, i, p.width)) *
                      load<Stored>(gates + p.width, i, p.width));
}

template <typename Stored>
void add(const Rows& p, int64_t row) {
  typedef typename Stored::type Number;
  const Number* x = static_cast<const Number*>(p.x) + row * p.width;
  const Number* added = static_cast<const Number*>(p.added) + row * p.width;
  Number* both = static_cast<Number*>(p.sum) + row * p.width;
  for (int64_t i = 0; i < p.width; i += kLanes)
    store<Stored>(both, i, p.width, load<Stored>(x, i, p.width) + load<Stored>(added, i, p.width));
}

template <typename Stored>
void rms_norm(const Rows& p, int64_t row) {
  typedef typename Stored::type Number;
  const Number* x = static_cast<const Number*>(p.x) + row * p.width;
  Number* out = static_cast<Number*>(p.out) + row * p.width;
  if (p.added) {
    add<Stored>(p, row);
    x = static_cast<const Number*>(p.sum) + row * p.width;
  }
  // Four sums, because one alone would wait for each addition before it.
  Vec squares[4] = {};
  for (int64_t i = 0, turn = 0; i < p.width; i += kLanes, turn = (turn + 1) % 4) {
    const Vec numbers = load<Stored>(x, i, p.width);
    squares[turn] = multiply_add(numbers, numbers, squares[turn]);
  }
  const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / p.width;
  const Vec factor = splat(1.0f / std::sqrt(mean + p.epsilon)), offset = splat(p.offset);
  for (int64_t i = 0; i < p.width; i += kLanes)
    store<Stored>(
        out, i, p.width,
        load<Stored>(x, i, p.width) * factor * (load(p.scale_type, p.scale, i, p.width) + offset));
}

// Returns the sum of all lanes of some vectors. It has four sums, so that an addition need not wait
// for the one before it.
template <typename Part>
inline float sum_vectors(int64_t num_vectors, const Part& part) {
  Vec sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= num_vectors; i += 4)
    for (int turn = 0; turn < 4; ++turn) sums[turn] += part(i + turn);
  for (; i < num_vectors; ++i) sums[0] += part(i);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename Stored>
void layer_norm(const Rows& p, int64_t row) {
  typedef typename Stored::type Number;
  static thread_local std::vector<Vec> of_thread;
  const int64_t width = p.width, num_vectors = (width + kLanes - 1) / kLanes, first = row * width;
  of_thread.resize(num_vectors);
  Vec* const numbers = of_thread.data();
  const auto read_row = [&](const void* array, int64_t i) {
    return load<Stored>(static_cast<const Number*>(array) + first, i * kLanes, width);
  };
  for (int64_t i = 0; i < num_vectors; ++i) {
    numbers[i] = read_row(p.x, i);
    if (!p.added) continue;
    Number rounded[kLanes];
    Store<Stored>::at(rounded, numbers[i] + read_row(p.added, i));
    numbers[i] = Load<Stored>::at(rounded);
    if (p.sum) store<Stored>(static_cast<Number*>(p.sum) + first, i * kLanes, width, numbers[i]);
  }
  const Vec mean = splat(sum_vectors(num_vectors, [&](int64_t i) { return numbers[i]; }) / width);
  for (int64_t i = 0; i < num_vectors; ++i) numbers[i] -= mean;
  if (const int64_t count = width % kLanes) {
    Vec& last = numbers[num_vectors - 1];
    last = select(lane_indices() < splat(static_cast<float>(count)), last, Vec{});
  }
  const float variance =
      sum_vectors(num_vectors, [&](int64_t i) { return numbers[i] * numbers[i]; }) / width;
  const Vec factor = splat(1.0f / std::sqrt(variance + p.epsilon)), offset = splat(p.offset);
  Number* out = static_cast<Number*>(p.out) + first;
  for (int64_t i = 0; i < num_vectors; ++i) {
    Vec normed = numbers[i] * factor;
    const int64_t at = i * kLanes;
    if (p.scale) normed *= load(p.scale_type, p.scale, at, width) + offset;
    if (p.bias) normed += load(p.scale_type, p.bias, at, width);
    store<Stored>(out, at, width, normed);
  }
}

template <typename Stored>
void rotate(const Rows& p, int64_t row) {
  typedef typename Stored::type Number;
  const Number* x = static_cast<const Number*>(p.x) + row * p.width;
  const int64_t heads_of_token = p.num_heads + 2 * p.num_keys, token = row / heads_of_token,
                head = row % heads_of_token;
  const int64_t key = head - p.num_heads, value = key - p.num_keys;
  if (value >= 0) {
    std::memcpy(static_cast<Number*>(p.values) + (token * p.num_keys + value) * p.width, x,
                p.width * sizeof(Number));
    return;
  }
  Number* out = key >= 0 ? static_cast<Number*>(p.keys) + (token * p.num_keys + key) * p.width
                         : static_cast<Number*>(p.out) + (token * p.num_heads + head) * p.width;
  const int64_t pairs = p.num_pairs;
  for (int64_t i = 0; i < pairs; i += kLanes) {
    const Vec cos = load<F32>(p.cos + token * pairs, i, pairs),
              sin = load<F32>(p.sin + token * pairs, i, pairs);
    const Vec first = load<Stored>(x, i, pairs), second = load<Stored>(x + pairs, i, pairs);
    store<Stored>(out, i, pairs, first * cos - second * sin);
    store<Stored>(out + pairs, i, pairs, second * cos + first * sin);
  }
  std::memcpy(out + 2 * pairs, x + 2 * pairs, (p.width - 2 * pairs) * sizeof(Number));
}

#define JAXPAGE_OF_TYPE(name) \
  [](const Rows& p, int64_t row) { p.type == Type::kF32 ? name<F32>(p, row) : name<BF16>(p, row); }

}  // namespace

extern const RowKernels kRows = {JAXPAGE_OF_TYPE(gate), JAXPAGE_OF_TYPE(add),
                                 JAXPAGE_OF_TYPE(rms_norm), JAXPAGE_OF_TYPE(layer_norm),
                                 JAXPAGE_OF_TYPE(rotate)};

}  // namespace JAXPAGE_ISA
}  // namespace jaxpage
