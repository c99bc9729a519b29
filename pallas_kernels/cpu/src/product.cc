// x @ w.T for weights w = (code - zero) * scale, or code * scale + minimum, which are made in registers or in a buffer of a few rows,
// never as a whole.
//
// An output is 16 sums, one of each lane, over the inputs in their order, and then the sum of these: the same operations in the same
// order however many tokens and outputs are computed beside it. So a result depends on its token alone, to the last bit.
#include "product.h"

#include <vector>

#include "vec.h"

namespace jaxpage {
namespace JAXPAGE_ISA {
namespace {

constexpr int kFewTokens = 4;

// 16 codes from the one at `index` on, which is a multiple of 16.
static inline Int nibbles(const void* values, int64_t index) {
  typedef uint64_t Twice __attribute__((vector_size(16)));
  const uint64_t bytes = raw_at<uint64_t>(static_cast<const uint8_t*>(values) + index / 2);
  const UByte doubled = __builtin_shuffle((UByte)Twice{bytes, bytes}, UByte{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7});
  const Int shift = {0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4};
  return ((Int)widened(doubled) >> shift) & 15;
}

template <Code code>
static inline Vec number_at(const void* values, int64_t index) {
  if constexpr (code == Code::kInt8) return Load<I8>::at(static_cast<const int8_t*>(values) + index);
  if constexpr (code == Code::kFloat8) return Load<F8>::at(static_cast<const uint8_t*>(values) + index);
  if constexpr (code == Code::kInt4) return __builtin_convertvector(nibbles(values, index), Vec);
  const Vec numbers = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.f, -.5, -1, -1.5, -2, -3, -4, -6};
  return __builtin_shuffle(numbers, nibbles(values, index));
}

// Of a scale or a minimum.
static inline float number_of_group(const Product& p, const void* values, int64_t index) {
  return p.half ? float_of(static_cast<const uint16_t*>(values)[index]) : static_cast<const float*>(values)[index];
}

// Calls take(input, weights) with the weights of some outputs for 16 inputs, and then for the next 16.
template <Code code, bool kMinimum, int kOutputs, typename Take>
static inline void each_weight(const Product& p, int64_t output, const Take& take) {
  for (int64_t group = 0, i = 0; group < p.num_groups; ++group) {
    Vec scale[kOutputs], offset[kOutputs];
    for (int o = 0; o < kOutputs; ++o) {
      const int64_t index = (output + o) * p.num_groups + group;
      scale[o] = splat(number_of_group(p, p.scale, index));
      if constexpr (kMinimum) offset[o] = splat(number_of_group(p, p.minimum, index));
      else offset[o] = splat(p.zero ? p.zero[index] : code == Code::kInt4 ? 8.0f : 0.0f);
    }
    const int64_t end = i + p.group_size < p.num_in ? i + p.group_size : p.num_in;
    for (; i < end; i += kLanes) {
      Vec weights[kOutputs];
      for (int o = 0; o < kOutputs; ++o) {
        const Vec number = number_at<code>(p.values, (output + o) * p.num_in + i);
        weights[o] = kMinimum ? multiply_add(number, scale[o], offset[o]) : (number - offset[o]) * scale[o];
      }
      take(i, weights);
    }
  }
}

// Some outputs of a few tokens: a weight is used as it is made.
template <Code code, bool kMinimum, int kTokens, int kOutputs>
void few_tokens(const Product& p, int64_t output) {
  Vec total[kOutputs][kTokens] = {};
  each_weight<code, kMinimum, kOutputs>(p, output, [&](int64_t i, const Vec* weights) {
    for (int t = 0; t < kTokens; ++t) {
      const Vec x = raw_at<Vec>(p.x + t * p.num_in + i);
      for (int o = 0; o < kOutputs; ++o) total[o][t] = multiply_add(x, weights[o], total[o][t]);
    }
  });
  for (int o = 0; o < kOutputs; ++o)
    for (int t = 0; t < kTokens; ++t) p.out[t * p.num_out + output + o] = sum(total[o][t]);
}

template <Code code, bool kMinimum, int kOutputs>
void few_tokens(const Product& p, int64_t output) {
  switch (p.num_tokens) {
    case 1: return few_tokens<code, kMinimum, 1, kOutputs>(p, output);
    case 2: return few_tokens<code, kMinimum, 2, kOutputs>(p, output);
    case 3: return few_tokens<code, kMinimum, 3, kOutputs>(p, output);
    default: return few_tokens<code, kMinimum, 4, kOutputs>(p, output);
  }
}

// Some outputs of some tokens, whose weights [outputs, I] are in a buffer.
template <int kTokens, int kOutputs>
void tile(const Product& p, const float* weights, int64_t output, int64_t token) {
  Vec total[kOutputs][kTokens] = {};
  for (int64_t i = 0; i < p.num_in; i += kLanes) {
    Vec x[kTokens];
    for (int t = 0; t < kTokens; ++t) x[t] = raw_at<Vec>(p.x + (token + t) * p.num_in + i);
    for (int o = 0; o < kOutputs; ++o) {
      const Vec weight = raw_at<Vec>(weights + o * p.num_in + i);
      for (int t = 0; t < kTokens; ++t) total[o][t] = multiply_add(x[t], weight, total[o][t]);
    }
  }
  for (int o = 0; o < kOutputs; ++o)
    for (int t = 0; t < kTokens; ++t) p.out[(token + t) * p.num_out + output + o] = sum(total[o][t]);
}

template <int kTokens>
void tiles(const Product& p, const float* weights, int64_t first, int64_t end, int64_t token) {
  int64_t output = first;
  for (; output + 4 <= end; output += 4) tile<kTokens, 4>(p, weights + (output - first) * p.num_in, output, token);
  for (; output < end; ++output) tile<kTokens, 1>(p, weights + (output - first) * p.num_in, output, token);
}

template <Code code, bool kMinimum = false>
void outputs(const Product& p, int64_t first) {
  const int64_t end = first + kOutputsAtOnce < p.num_out ? first + kOutputsAtOnce : p.num_out;
  if (p.num_tokens <= kFewTokens) {
    int64_t output = first;
    for (; output + 4 <= end; output += 4) few_tokens<code, kMinimum, 4>(p, output);
    for (; output < end; ++output) few_tokens<code, kMinimum, 1>(p, output);
    return;
  }
  static thread_local std::vector<float> buffer;
  buffer.resize(kOutputsAtOnce * p.num_in);
  for (int64_t output = first; output < end; ++output) {
    float* row = buffer.data() + (output - first) * p.num_in;
    each_weight<code, kMinimum, 1>(p, output, [&](int64_t i, const Vec* weights) { Store<F32>::at(row + i, weights[0]); });
  }
  int64_t token = 0;
  for (; token + 4 <= p.num_tokens; token += 4) tiles<4>(p, buffer.data(), first, end, token);
  for (; token < p.num_tokens; ++token) tiles<1>(p, buffer.data(), first, end, token);
}

void multiply(const Product& p, int64_t first) {
  switch (p.code) {
    case Code::kInt8: outputs<Code::kInt8>(p, first); break;
    case Code::kInt4: p.minimum ? outputs<Code::kInt4, true>(p, first) : outputs<Code::kInt4>(p, first); break;
    case Code::kFloat8: outputs<Code::kFloat8>(p, first); break;
    case Code::kFloat4: outputs<Code::kFloat4>(p, first); break;
  }
}

}  // namespace

extern const Multiply kMultiply = multiply;

}  // namespace JAXPAGE_ISA
}  // namespace jaxpage
