// x @ w.T for a few rows of x. A vector has one output of each of 16 rows of the weight, so that the sum of an output is made in the order
// of its inputs, as a product of many rows by YNNPACK makes it (XLA's library for them): in parts of 512 words (a float, or two numbers of
// bfloat16), each part from zero on, and the parts one after the other. Its bits are those of that product, for any number of rows.
//
// Sums of whole numbers of eight bits are exact in any order: these go the same way, by words of four numbers.
#include "few_rows.h"

#include "vec.h"

namespace jaxpage {
namespace JAXPAGE_ISA {

#if defined(__AVX512F__)
// Where the processor has it: the caller asks. What is called from such a function and inlined has to be one, too.
#define JAXPAGE_DOT __attribute__((target("avx512bf16,avx512vnni")))

struct I32 {
  typedef int32_t type;
};

template <>
struct Store<I32> {
  static void at(int32_t* x, Int value) { std::memcpy(x, &value, sizeof(value)); }
};

namespace {

constexpr int64_t kWordsOfPart = 512;

// Transposes 16 x 16 words.
static inline void transpose(Bits* v) {
  Bits u[kLanes];
  const Bits low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}, high = low + 2;
  const Bits low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, high2 = low2 + 2;
  const Bits even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}, odd = even + 4;
  for (int i = 0; i < 16; i += 2) {
    u[i] = __builtin_shuffle(v[i], v[i + 1], low);
    u[i + 1] = __builtin_shuffle(v[i], v[i + 1], high);
  }
  for (int i = 0; i < 16; i += 4) {  // v[i + j]: columns j, 4 + j, 8 + j and 12 + j of rows i to i + 3
    v[i] = __builtin_shuffle(u[i], u[i + 2], low2);
    v[i + 1] = __builtin_shuffle(u[i], u[i + 2], high2);
    v[i + 2] = __builtin_shuffle(u[i + 1], u[i + 3], low2);
    v[i + 3] = __builtin_shuffle(u[i + 1], u[i + 3], high2);
  }
  for (int j = 0; j < 4; ++j) {
    const Bits a = __builtin_shuffle(v[j], v[j + 4], even), b = __builtin_shuffle(v[j], v[j + 4], odd);
    const Bits c = __builtin_shuffle(v[j + 8], v[j + 12], even), d = __builtin_shuffle(v[j + 8], v[j + 12], odd);
    u[j] = __builtin_shuffle(a, c, even);
    u[j + 4] = __builtin_shuffle(b, d, even);
    u[j + 8] = __builtin_shuffle(a, c, odd);
    u[j + 12] = __builtin_shuffle(b, d, odd);
  }
  for (int i = 0; i < 16; ++i) v[i] = u[i];
}

// Of words: total + x * w. And the result, when all words of a row of x are in the total.
template <typename Stored>
struct Dot;

template <>
struct Dot<F32> {
  static constexpr int kNumbersOfWord = 1;
  typedef Vec Total;
  static Vec result(Vec total, const void*, int64_t) { return total; }
  static Vec add(Vec total, Bits x, Bits w) { return multiply_add(as_float(x), as_float(w), total); }
};

template <>
struct Dot<BF16> {
  static constexpr int kNumbersOfWord = 2;
  typedef Vec Total;
  static Vec result(Vec total, const void*, int64_t) { return total; }
  JAXPAGE_DOT static Vec add(Vec total, Bits x, Bits w) {
    return (Vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)x, (__m512bh)w);
  }
};

// The instruction takes one factor without a sign: w + 128, which is w with its highest bit turned. So a total has 128 * sum(x) too much.
template <>
struct Dot<I8> {
  static constexpr int kNumbersOfWord = 4;
  typedef Int Total;
  JAXPAGE_DOT static Int add(Int total, Bits x, Bits w) {
    return (Int)_mm512_dpbusd_epi32((__m512i)total, (__m512i)(w ^ 0x80808080u), (__m512i)x);
  }
  static Int result(Int total, const int8_t* x, int64_t num_in) {
    int32_t sum = 0;
    for (int64_t i = 0; i < num_in; ++i) sum += x[i];
    return total - 128 * sum;
  }
};

template <typename Stored, typename Result, int kRows>
JAXPAGE_DOT void outputs(const FewRows& p, int64_t first) {
  typedef typename Dot<Stored>::Total Total;
  const int64_t num_words = p.num_in / Dot<Stored>::kNumbersOfWord;
  const uint32_t *x = static_cast<const uint32_t*>(p.x), *w = static_cast<const uint32_t*>(p.w) + first * num_words;
  Total total[kRows] = {};
  for (int64_t begin = 0; begin < num_words; begin += kWordsOfPart) {
    const int64_t end = begin + kWordsOfPart < num_words ? begin + kWordsOfPart : num_words;
    Total part[kRows] = {};
    for (int64_t i = begin; i < end; i += kLanes) {
      Bits words[kOutputsOfUnit];
      for (int o = 0; o < kOutputsOfUnit; ++o) words[o] = raw_at<Bits>(w + o * num_words + i);
      // Of the next unit, for the second cache: rows are too short for what a processor fetches of its own accord.
      for (int o = 0; o < kOutputsOfUnit; ++o) __builtin_prefetch(w + (kOutputsOfUnit + o) * num_words + i, 0, 2);
      transpose(words);
      for (int k = 0; k < kLanes; ++k)
        for (int t = 0; t < kRows; ++t) part[t] = Dot<Stored>::add(part[t], Bits{} + x[t * num_words + i + k], words[k]);
    }
    for (int t = 0; t < kRows; ++t) total[t] = begin ? total[t] + part[t] : part[t];
  }
  for (int t = 0; t < kRows; ++t) {
    const auto* row = static_cast<const typename Stored::type*>(p.x) + t * p.num_in;
    Store<Result>::at(static_cast<typename Result::type*>(p.out) + t * p.num_out + first, Dot<Stored>::result(total[t], row, p.num_in));
  }
}

template <typename Stored, typename Result>
void any_rows(const FewRows& p, int64_t first) {
  switch (p.num_rows) {
    case 1: return outputs<Stored, Result, 1>(p, first);
    case 2: return outputs<Stored, Result, 2>(p, first);
    case 3: return outputs<Stored, Result, 3>(p, first);
    case 4: return outputs<Stored, Result, 4>(p, first);
    case 5: return outputs<Stored, Result, 5>(p, first);
    case 6: return outputs<Stored, Result, 6>(p, first);
    case 7: return outputs<Stored, Result, 7>(p, first);
    default: return outputs<Stored, Result, kMostFewRows>(p, first);
  }
}

void multiply_few(const FewRows& p, int64_t first) {
  switch (p.type) {
    case Type::kBF16: return p.out_is_float ? any_rows<BF16, F32>(p, first) : any_rows<BF16, BF16>(p, first);
    case Type::kI8: return any_rows<I8, I32>(p, first);
    default: return any_rows<F32, F32>(p, first);
  }
}

}  // namespace

extern const MultiplyFew kMultiplyFew = multiply_few;
#else
extern const MultiplyFew kMultiplyFew = nullptr;
#endif

namespace {

// As `rounded_inputs` of jaxpage/layers/product.py, with the same operations. A number that is none makes the scale none.
void round_row(const float* x, int64_t num_in, int8_t* rounded, float* scale) {
  Vec most = {};
  for (int64_t i = 0; i < num_in; i += kLanes) {
    const Vec size = as_float(as_bits(raw_at<Vec>(x + i)) & 0x7fffffffu);
    most = select((size > most) | (size != size), size, most);
  }
  float largest = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    if (most[lane] > largest || most[lane] != most[lane]) largest = most[lane];
  *scale = largest * (1.0f / 127);
  if (*scale < 0x1p-100f) *scale = 0x1p-100f;
  const Vec inverse = splat(1.0f / *scale), magic = splat(12582912.0f);  // 1.5 * 2^23: the sum rounds to an integer
  for (int64_t i = 0; i < num_in; i += kLanes) {
    const Vec whole = raw_at<Vec>(x + i) * inverse;
    const Byte bytes = __builtin_convertvector(__builtin_convertvector(select(whole == whole, (whole + magic) - magic, Vec{}), Int), Byte);
    std::memcpy(rounded + i, &bytes, sizeof(bytes));
  }
}

}  // namespace

extern const RoundRow kRoundRow = round_row;

}  // namespace JAXPAGE_ISA
}  // namespace jaxpage
