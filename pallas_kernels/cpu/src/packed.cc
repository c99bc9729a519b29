// Computes x @ w.T for a weight in panels, and any number of rows of x.
//
// A vector has one word of each of 16 outputs. Each output has one sum, to which its inputs are
// added in their order: the same operations in the same order whichever tile a row is in. So a row
// has the same bits among any others. Sums of whole numbers of eight bits are exact in any order.
#include "packed.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "activations.h"
#include "vec.h"

namespace jaxpage {
namespace JAXPAGE_ISA {
namespace {

// The sums of a tile stay in registers: it has kMaxRows rows by kManyPanels panels, or kFewRows by
// kMaxPanels, so that no sum waits for the product before it.
#if defined(__AVX512F__)
constexpr int kMaxPanels = 4, kManyPanels = 4, kMaxRows = 6, kFewRows = 6;
// Marks a function that uses these instructions. The caller asks whether the processor has them.
// What such a function calls and inlines needs the mark, too.
#define JAXPAGE_DOT __attribute__((target("avx512bf16,avx512vnni")))
#else
constexpr int kMaxPanels = 2, kManyPanels = 1, kMaxRows = 6, kFewRows = 2;
#define JAXPAGE_DOT
#endif
// Words of a panel, codes and scales of groups are fetched so long before they are read; words into
// the second cache (2) or the first one (3). Only those for AVX2 were measured with threads that
// read their own parts.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kWordsAhead = 128, kCacheAhead = 2, kCodesAhead = 768, kGroupsAhead = 24;
constexpr int kNibblesAhead = 128;  // where one row is multiplied
#else
constexpr int kWordsAhead = 32, kCacheAhead = 3, kCodesAhead = 64, kGroupsAhead = 8;
#endif
static_assert(kRowsAtOnce % kMaxRows == 0, "a block of rows has whole tiles");

// Up to this many rows, make the parts of words in registers and multiply at once. With more rows
// each tile would make them again, so they are written to a buffer first.
constexpr int kMaxRowsOfWords = 2 * kMaxRows;
constexpr int kMaxColumns = kMaxPanels * kOutputsOfPanel;
// All rows are multiplied by so many words of a panel before the next ones are read, so that those
// of a tile stay in the second cache.
constexpr int64_t kWordsOfBlock = 1024;
// They are fewer with AMX, which reads faster than the second cache gives.
constexpr int64_t kTileWordsOfBlock = 256;

// Reads a word of the weight. It has kSteps parts, which are added one after the other: `part`
// gives one of them, `add` adds its product with x. As words of type PartWord they are read as
// parts.
struct FloatWord {
  typedef float X;
  typedef Floats Sum;
  typedef FloatWord PartWord;
  static constexpr int kSteps = 1;
  static constexpr bool kHasTiles = false;
  static Words part(Words w, int) { return w; }
  static Sum add(Sum sum, X x, Words w) { return multiply_add_part(splat_part(x), (Floats)w, sum); }
};

// Reads two numbers of bfloat16, which are made float; x has been.
struct BFloat16Word : FloatWord {
  static constexpr int kSteps = 2;
  static Words part(Words w, int step) { return step ? w & 0xffff0000u : w << 16; }
};

// Reads two numbers of 16 bits.
struct Int16Word {
  typedef uint32_t X;
  typedef Ints Sum;
  typedef Int16Word PartWord;
  static constexpr int kSteps = 1;
  static constexpr bool kHasTiles = false;
  static Words part(Words w, int) { return w; }
  static Sum add(Sum sum, X x, Words w) {
    const Ints both = (Ints)(Words{} + x), pair = (Ints)w;
#if defined(__AVX512F__)
    return sum + (Ints)_mm512_madd_epi16((__m512i)both, (__m512i)pair);
#elif defined(__AVX2__)
    return sum + (Ints)_mm256_madd_epi16((__m256i)both, (__m256i)pair);
#else
    return sum + (both << 16 >> 16) * (pair << 16 >> 16) + (both >> 16) * (pair >> 16);
#endif
  }
};

// Reads four numbers of int8 as two pairs of 16 bits: the numbers 0 and 2, then 1 and 3.
struct Int8Word : Int16Word {
  static constexpr int kSteps = 2;
  static Words part(Words w, int step) {
    typedef int16_t Shorts __attribute__((vector_size(kBytes)));
    return (Words)((step ? (Shorts)w : (Shorts)w << 8) >> 8);
  }
};

#if defined(__AVX512F__)
// Multiplies four numbers of int8 by one instruction. It takes one factor without a sign: w + 128,
// which is w with its highest bit flipped. So a sum has 128 times that of x too much, which `store`
// subtracts.
struct Int8Dot {
  typedef uint32_t X;
  typedef Ints Sum;
  typedef Int8Dot PartWord;
  static constexpr int kSteps = 1;
  static constexpr bool kHasTiles = true;
  static Words part(Words w, int) { return w ^ 0x80808080u; }
  JAXPAGE_DOT static Sum add(Sum sum, X x, Words w) {
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
  }
};

// Multiplies two numbers of bfloat16 by one instruction.
struct BFloat16Dot {
  typedef uint32_t X;
  typedef Floats Sum;
  typedef BFloat16Dot PartWord;
  static constexpr int kSteps = 1, kInputs = 2;
  static constexpr bool kHasTiles = true;
  static Words part(Words w, int) { return w; }
  JAXPAGE_DOT static Sum add(Sum sum, X x, Words w) {
    return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)w);
  }
};
#endif

#if defined(__AVX512F__)
// Tiles of AMX: rows of x by words, words by outputs (a panel as it is), and their sums. Sums of a
// row depend on no other row, as elsewhere.
#define JAXPAGE_AMX __attribute__((target("amx-tile,amx-bf16,amx-int8,avx512bf16,avx512vnni")))
constexpr int kWordsOfTile = 16, kRowsOfTile = 16;

// The numbers of tiles are written into the instructions.
#define JAXPAGE_ADD_TILES(sum, rows, weight)              \
  if constexpr (std::is_same<Word, BFloat16Dot>::value) { \
    _tile_dpbf16ps(sum, rows, weight);                    \
  } else {                                                \
    _tile_dpbssd(sum, rows, weight);                      \
  }

// The rows of the tiles of this thread. They are set when they change, and let go at the end of a
// unit: other code uses the registers, too.
class TileRows {
 public:
  // For `multiply_amx_square`; for `multiply_amx_tile` next_count is 0.
  JAXPAGE_AMX void set(int count, int next_count) {
    if (count == count_ && next_count == next_count_) return;
    count_ = count;
    next_count_ = next_count;
    const int square[8] = {count, count,      next_count,   next_count,
                           count, next_count, kWordsOfTile, kWordsOfTile};
    alignas(64) uint8_t config[64] = {1};
    for (int i = 0; i < 8; ++i) {
      config[16 + 2 * i] = 64;  // bytes of a row
      config[48 + i] = next_count ? square[i] : i < 5 ? count : kWordsOfTile;
    }
    _tile_loadconfig(config);
  }
  JAXPAGE_AMX ~TileRows() {
    if (count_) _tile_release();
  }

 private:
  int count_ = 0, next_count_ = 0;
};

// The first kCount tiles get the sums so far, or zero at the beginning.
template <int kCount>
JAXPAGE_AMX inline void load_sums(bool are_some, uint32_t* const (&sums)[4]) {
  constexpr int kStride = kMaxColumns * 4;
  if (!are_some) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, sums[0], kStride);
  if constexpr (kCount == 4) {
    _tile_loadd(1, sums[1], kStride);
    _tile_loadd(2, sums[2], kStride);
    _tile_loadd(3, sums[3], kStride);
  }
}

template <int kCount>
JAXPAGE_AMX inline void store_sums(uint32_t* const (&sums)[4]) {
  constexpr int kStride = kMaxColumns * 4;
  _tile_stored(0, sums[0], kStride);
  if constexpr (kCount == 4) {
    _tile_stored(1, sums[1], kStride);
    _tile_stored(2, sums[2], kStride);
    _tile_stored(3, sums[3], kStride);
  }
}

// Does what `multiply_tile` does, for whole tiles of words.
template <typename Word, int kPanels>
JAXPAGE_AMX void multiply_amx_tile(TileRows& tile_rows, int count, const uint32_t* x,
                                   int64_t num_words, const uint32_t* w, int64_t panel,
                                   int64_t begin, int64_t end, uint32_t* total) {
  tile_rows.set(count, 0);
  uint32_t* const sums[4] = {total, total + kOutputsOfPanel, total + 2 * kOutputsOfPanel,
                             total + 3 * kOutputsOfPanel};
  load_sums<kPanels>(begin, sums);
  for (int64_t k = begin; k < end; k += kWordsOfTile) {
    const uint32_t* from = w + k * kOutputsOfPanel;
    for (int p = 0; p < kPanels; ++p)
      for (int line = 0; line < kWordsOfTile; ++line)
        __builtin_prefetch(from + p * panel + (kWordsOfTile * 2 + line) * kOutputsOfPanel);
    _tile_loadd(4, x + k, num_words * 4);
    _tile_loadd(5, from, 64);
    JAXPAGE_ADD_TILES(0, 4, 5)
    if constexpr (kPanels == 4) {
      _tile_loadd(6, from + panel, 64);
      JAXPAGE_ADD_TILES(1, 4, 6)
      _tile_loadd(7, from + 2 * panel, 64);
      JAXPAGE_ADD_TILES(2, 4, 7)
      _tile_loadd(5, from + 3 * panel, 64);
      JAXPAGE_ADD_TILES(3, 4, 5)
    }
  }
  store_sums<kPanels>(sums);
}

// Does the same for two tiles of rows and two panels: with four tiles of sums, each tile that is
// loaded is used twice.
template <typename Word>
JAXPAGE_AMX void multiply_amx_square(TileRows& tile_rows, int count, int next_count,
                                     const uint32_t* x, int64_t num_words, const uint32_t* w,
                                     int64_t panel, int64_t begin, int64_t end, uint32_t* total) {
  tile_rows.set(count, next_count);
  const uint32_t* next_x = x + count * num_words;
  uint32_t* next = total + count * kMaxColumns;
  uint32_t* const sums[4] = {total, total + kOutputsOfPanel, next, next + kOutputsOfPanel};
  load_sums<4>(begin, sums);
  for (int64_t k = begin; k < end; k += kWordsOfTile) {
    const uint32_t* from = w + k * kOutputsOfPanel;
    _tile_loadd(6, from, 64);
    _tile_loadd(4, x + k, num_words * 4);
    JAXPAGE_ADD_TILES(0, 4, 6)
    _tile_loadd(7, from + panel, 64);
    JAXPAGE_ADD_TILES(1, 4, 7)
    _tile_loadd(5, next_x + k, num_words * 4);
    JAXPAGE_ADD_TILES(2, 5, 6)
    JAXPAGE_ADD_TILES(3, 5, 7)
  }
  store_sums<4>(sums);
}
#undef JAXPAGE_ADD_TILES
#else
class TileRows {};
#endif

// Reads the words of some panels, each of which begins `panel` words after the one before it. The
// words that follow are fetched some time before: at the end of these panels, those of the next.
struct WordReader {
  const uint32_t* first;
  int64_t panel, last_fetched, to_next;

  WordReader(const uint32_t* first, int64_t panel, int64_t num_words, int num_panels)
      : first(first),
        panel(panel),
        last_fetched(num_words - kWordsAhead),
        to_next((num_panels - 1) * panel) {}

  Words at(int v, int64_t k) const {
    const uint32_t* from =
        first + v / kParts * panel + k * kOutputsOfPanel + v % kParts * kNativeLanes;
    if (v % kParts == 0)
      __builtin_prefetch(from + kWordsAhead * kOutputsOfPanel + (k < last_fetched ? 0 : to_next), 0,
                         kCacheAhead);
    return raw_at<Words>(from);
  }
};

// Adds products with some words of some panels to sums, which are in `total`.
template <typename Word, int kRows, int kPanels, typename Source>
JAXPAGE_DOT inline void multiply_tile(const typename Word::X* x, int64_t num_words, const Source& w,
                                      int64_t begin, int64_t end, uint32_t* total) {
  constexpr int kVectors = kPanels * kParts;
  typename Word::Sum sum[kRows][kVectors];
  for (int t = 0; t < kRows; ++t)
    for (int v = 0; v < kVectors; ++v)
      sum[t][v] = begin ? raw_at<typename Word::Sum>(total + t * kMaxColumns + v * kNativeLanes)
                        : typename Word::Sum{};
  for (int64_t k = begin; k < end; ++k) {
    Words word[kVectors];
    for (int v = 0; v < kVectors; ++v) word[v] = w.at(v, k);
    for (int step = 0; step < Word::kSteps; ++step) {
      Words part[kVectors];
      for (int v = 0; v < kVectors; ++v) part[v] = Word::part(word[v], step);
      for (int t = 0; t < kRows; ++t) {
        const auto number = x[(t * num_words + k) * Word::kSteps + step];
        for (int v = 0; v < kVectors; ++v) sum[t][v] = Word::add(sum[t][v], number, part[v]);
      }
    }
  }
#pragma GCC unroll kMaxRows
  for (int t = 0; t < kRows; ++t)
#pragma GCC unroll kMaxPanels* kParts
    for (int v = 0; v < kVectors; ++v)
      std::memcpy(total + t * kMaxColumns + v * kNativeLanes, &sum[t][v], kBytes);
}

// Calls `multiply_tile` with the number of rows as a constant, so that its sums are registers.
template <typename Word, int kPanels, typename Source>
JAXPAGE_DOT void multiply_rows(int count, const typename Word::X* x, int64_t num_words,
                               const Source& w, int64_t begin, int64_t end, uint32_t* total) {
  switch (count) {
    case 1: return multiply_tile<Word, 1, kPanels>(x, num_words, w, begin, end, total);
    case 2: return multiply_tile<Word, 2, kPanels>(x, num_words, w, begin, end, total);
    case 3: return multiply_tile<Word, 3, kPanels>(x, num_words, w, begin, end, total);
    case 4: return multiply_tile<Word, 4, kPanels>(x, num_words, w, begin, end, total);
    case 5: return multiply_tile<Word, 5, kPanels>(x, num_words, w, begin, end, total);
    default: return multiply_tile<Word, kMaxRows, kPanels>(x, num_words, w, begin, end, total);
  }
}

// Stores the sums of a row and a panel, with what follows them, in the type of the result.
template <Activation kActivation>
inline void store(const Packed& p, int64_t row, int64_t output, const uint32_t* total,
                  const Vec* bias) {
  const int64_t count = std::min<int64_t>(kOutputsOfPanel, p.num_out - output),
                at = row * p.num_out + output;
  const int64_t bytes = p.out_is_float ? 4 : 2;
  Vec value = raw_at<Vec>(total);
  if (p.type == Type::kI8 && !p.is_coded) {
    Vec scale = {};
    std::memcpy(&scale, static_cast<const float*>(p.scale) + output, count * 4);
    value = to_float(as_int(value) - (p.instructions ? 128 * p.row_sum[row] : 0)) *
            splat(p.row_scale[row]) * scale;
  }
  if (bias) value += *bias;
  value = activate(kActivation, value);
  // The last panel may have fewer outputs: its vector is stored here first, and a part of it
  // copied.
  alignas(64) char buffer[64];
  char* to = static_cast<char*>(p.out) + at * bytes;
  char* first = count == kOutputsOfPanel ? to : buffer;
  if (p.out_is_float) Store<F32>::at(reinterpret_cast<float*>(first), value);
  else Store<BF16>::at(reinterpret_cast<uint16_t*>(first), value);
  if (first == buffer) std::memcpy(to, buffer, count * bytes);
}

// Multiplies all rows of a unit, in tiles of nearly equal numbers of rows: 7 rows are 3 and 4, not
// 6 and 1. x begins with the first of them.
template <typename Word, int kPanels, typename Source>
JAXPAGE_DOT void multiply_in_tiles(int64_t num_rows, const typename Word::X* x, int64_t num_words,
                                   const Source& w, int64_t begin, int64_t end, uint32_t* total) {
  const int64_t num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
  for (int64_t i = 0; i < num_tiles; ++i) {
    const int64_t first = i * num_rows / num_tiles, count = (i + 1) * num_rows / num_tiles - first;
    multiply_rows<Word, kPanels>(count, x + first * num_words * Word::kSteps, num_words, w, begin,
                                 end, total + first * kMaxColumns);
  }
}

template <int kPanels, Activation kActivation>
void store(const Packed& p, int64_t row, int64_t end_row, int64_t panel, const uint32_t* total) {
  Vec bias[kPanels] = {};
  for (int i = 0; i < kPanels && p.bias; ++i) {
    const int64_t output = (panel + i) * kOutputsOfPanel;
    std::memcpy(&bias[i], p.bias + output,
                std::min<int64_t>(kOutputsOfPanel, p.num_out - output) * 4);
  }
  for (int64_t t = 0; t < end_row - row; ++t)
    for (int i = 0; i < kPanels; ++i)
      store<kActivation>(p, row + t, (panel + i) * kOutputsOfPanel,
                         total + t * kMaxColumns + i * kOutputsOfPanel,
                         p.bias ? &bias[i] : nullptr);
}

template <int kPanels>
void store(const Packed& p, int64_t row, int64_t end_row, int64_t panel, const uint32_t* total) {
  const auto run = [&](auto activation) {
    store<kPanels, activation>(p, row, end_row, panel, total);
  };
  dispatch_activation(p.activation, run);
}

// Adds products with the words [begin, end) to the sums of all rows of a unit. With tiles, words
// that fill none are multiplied as others are.
template <typename Word, int kPanels>
JAXPAGE_DOT void multiply_words(TileRows& tile_rows, int instructions, int64_t num_rows,
                                const typename Word::X* x, int64_t num_words, const uint32_t* w,
                                int64_t panel, int64_t begin, int64_t end, uint32_t* total) {
#if defined(__AVX512F__)
  if constexpr (Word::kHasTiles)
    if (instructions == kTiles) {
      const int64_t whole = begin + (end - begin) / kWordsOfTile * kWordsOfTile,
                    count = (num_rows + kRowsOfTile - 1) / kRowsOfTile;
      for (int64_t i = 0; i < count && begin < whole; ++i) {
        const int64_t first = i * num_rows / count, last = (i + 1) * num_rows / count;
        const uint32_t* x_rows = x + first * num_words;
        uint32_t* sums = total + first * kMaxColumns;
        if (kPanels == kMaxPanels && i + 1 < count) {
          const int64_t next = (++i + 1) * num_rows / count;
          for (int p = 0; p < kPanels; p += 2)
            multiply_amx_square<Word>(tile_rows, last - first, next - last, x_rows, num_words,
                                      w + p * panel, panel, begin, whole,
                                      sums + p * kOutputsOfPanel);
        } else {
          multiply_amx_tile<Word, kPanels>(tile_rows, last - first, x_rows, num_words, w, panel,
                                           begin, whole, sums);
        }
      }
      if (whole == end) return;
      begin = whole;
    }
#endif
  multiply_in_tiles<Word, kPanels>(num_rows, x, num_words, WordReader(w, panel, num_words, kPanels),
                                   begin, end, total);
}

// The words of a panel in a buffer, which stays in the first cache.
constexpr int64_t kWordsOfBuffer = 64, kPanelOfBuffer = kWordsOfBuffer * kOutputsOfPanel;

// Where inputs are rounded to 16 bits, so many share a scale at most: a product with a code of
// eight bits has 22 bits, and a sum 32. Those of a larger group are parts of a size that does not
// depend on the group: devices that share its inputs have the same parts, if each has more.
constexpr int64_t kMaxInputsOfPart = 128, kInputsOfPart = 32;
static_assert(kMaxInputsOfPart <= 2 * kWordsOfBuffer, "a part is made at once");

// Writes the parts of some words of some panels into a buffer, as words of type PartWord.
template <typename Word, int kPanels, typename Source>
JAXPAGE_DOT inline void make_words(const Source& source, int64_t begin, int64_t end,
                                   uint32_t* buffer) {
  for (int v = 0; v < kPanels * kParts; ++v) {
    uint32_t* to = buffer + v / kParts * kPanelOfBuffer + v % kParts * kNativeLanes;
    for (int64_t k = begin; k < end; ++k)
      for (int step = 0; step < Word::kSteps; ++step, to += kOutputsOfPanel) {
        const Words word = Word::part(source.at(v, k), step);
        std::memcpy(to, &word, kBytes);
      }
  }
}

// Multiplies the rows of a unit by some panels, a block of words after the other.
template <typename Word, int kPanels>
JAXPAGE_DOT void multiply_panels(const Packed& p, int64_t row, int64_t end_row,
                                 int64_t first_panel) {
  typedef typename Word::PartWord PartWord;
  constexpr int kSteps = Word::kSteps;
  alignas(64) static thread_local uint32_t total[kRowsAtOnce * kMaxColumns];
  alignas(64) uint32_t buffer[kPanels * kPanelOfBuffer];
  const int64_t panel = p.num_words * kOutputsOfPanel, num_rows = end_row - row;
  const auto* x = static_cast<const typename Word::X*>(p.words) + row * p.num_words * kSteps;
  const uint32_t* w = static_cast<const uint32_t*>(p.panels) + first_panel * panel;
  const bool in_buffer = !std::is_same<Word, PartWord>::value && num_rows > kMaxRowsOfWords;
  const int64_t block = in_buffer                  ? kWordsOfBuffer / kSteps
                        : p.instructions == kTiles ? kTileWordsOfBlock
                                                   : kWordsOfBlock;
  TileRows tile_rows;
  int64_t begin = 0;
  do {
    const int64_t end = std::min(begin + block, p.num_words);
    if (in_buffer) {
      make_words<Word, kPanels>(WordReader(w, panel, p.num_words, kPanels), begin, end, buffer);
      const uint32_t* from = buffer - begin * kSteps * kOutputsOfPanel;  // where word 0 would be
      multiply_words<PartWord, kPanels>(tile_rows, p.instructions, num_rows, x,
                                        p.num_words * kSteps, from, kPanelOfBuffer, begin * kSteps,
                                        end * kSteps, total);
    } else {
      multiply_words<Word, kPanels>(tile_rows, p.instructions, num_rows, x, p.num_words, w, panel,
                                    begin, end, total);
    }
    begin = end;
  } while (begin < p.num_words);
  store<kPanels>(p, row, end_row, first_panel, total);
}

// Reads the scales, zeros or minima of a group of inputs: a vector, one of each output of a panel.
inline Vec read_group(const Packed& p, Type type, const void* values, int64_t panel,
                      int64_t group) {
  if (!p.scale_row) {
    const int64_t at = (panel * p.num_groups + group) * kOutputsOfPanel;
    __builtin_prefetch(static_cast<const char*>(values) +
                       (at + kGroupsAhead * kOutputsOfPanel) * (type == Type::kF32 ? 4 : 2));
    if (type == Type::kF32) return Load<F32>::at(static_cast<const float*>(values) + at);
    if (type == Type::kBF16) return Load<BF16>::at(static_cast<const uint16_t*>(values) + at);
    return Load<F16>::at(static_cast<const uint16_t*>(values) + at);
  }
  float gathered[kLanes] = {};
  for (int lane = 0; lane < kLanes && panel * kOutputsOfPanel + lane < p.num_out; ++lane)
    gathered[lane] = static_cast<const float*>(
        values)[p.scale_row[panel * kOutputsOfPanel + lane] * p.num_groups + group];
  return raw_at<Vec>(gathered);
}

// Makes numbers of codes.
template <CodeFormat code>
inline Floats decode(Ints bits) {
  if constexpr (code == CodeFormat::kFloat8) return F8::decode((Words)bits);
  if constexpr (code != CodeFormat::kFloat4) return __builtin_convertvector(bits, Floats);
  // From 2 on a code has an exponent in two bits and one bit after the point; 1 is a half.
  const Ints size = bits & 7;
  const Floats value =
      size < 2 ? __builtin_convertvector(size, Floats) * 0.5f : (Floats)((size + 252) << 22);
  return (Floats)((Ints)value | (bits & 8) << 28);
}

// Reads a code of eight bits, or two of four bits, which are made float; x is. From codes of int4
// `middle` is subtracted.
template <CodeFormat code, int middle>
struct CodeWord : FloatWord {
  static constexpr int kSteps = code == CodeFormat::kInt4 || code == CodeFormat::kFloat4 ? 2 : 1,
                       kInputs = kSteps;
  static Words part(Words w, int step) {
    if constexpr (kSteps == 2) w = step ? w >> 4 : w & 15;
    return (Words)decode<code>((Ints)w - middle);
  }
};

// Reads the codes of some panels, from a word on.
template <CodeFormat code>
struct CodeReader {
  const uint8_t* first;
  int64_t panel;  // the bytes of one
  CodeReader from(int64_t word) const { return {first + word * kOutputsOfPanel, panel}; }
  Words at(int v, int64_t k) const {
    const uint8_t* at =
        first + v / kParts * panel + k * kOutputsOfPanel + v % kParts * kNativeLanes;
    if (v % kParts == 0) __builtin_prefetch(at + kCodesAhead * kOutputsOfPanel);
    if constexpr (code == CodeFormat::kInt8)
      return (Words)widen_part(reinterpret_cast<const int8_t*>(at));
    return (Words)widen_part(at);
  }
};

#if defined(__AVX2__)
struct CodePairWord : Int16Word {
  static constexpr int kInputs = 2;
};

// Reads the codes of two inputs at a time as pairs of 16 bits; those of fp4 are doubled, and whole
// numbers then.
template <CodeFormat code>
struct ShortPairReader {
  static constexpr int64_t kBytesOfWord = kOutputsOfPanel * (code == CodeFormat::kInt8 ? 2 : 1);
  const uint8_t* first;
  int64_t panel;
  ShortPairReader from(int64_t word) const { return {first + word * kBytesOfWord, panel}; }
  Words at(int v, int64_t k) const {
    const uint8_t* at = first + v / kParts * panel + k * kBytesOfWord + v % kParts * kNativeLanes;
    if (v % kParts == 0) __builtin_prefetch(at + kCodesAhead * kOutputsOfPanel);
    if constexpr (code == CodeFormat::kInt8)
      return widen_pairs(bytes_at(at), bytes_at(at + kOutputsOfPanel));
    if constexpr (code == CodeFormat::kInt4) {
      const Words two = (Words)widen_part(at);
      return (two | two << 12) & 0x000f000fu;
    }
    const __m128i numbers = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i both = bytes_at(at), nibble = _mm_set1_epi8(15);
    return widen_pairs(_mm_shuffle_epi8(numbers, _mm_and_si128(both, nibble)),
                       _mm_shuffle_epi8(numbers, _mm_and_si128(_mm_srli_epi16(both, 4), nibble)));
  }
};
#endif

// Calls run(code) with the code as a constant.
template <typename Run>
void dispatch_code(CodeFormat code, const Run& run) {
  switch (code) {
    case CodeFormat::kInt8: return run(std::integral_constant<CodeFormat, CodeFormat::kInt8>());
    case CodeFormat::kInt4: return run(std::integral_constant<CodeFormat, CodeFormat::kInt4>());
    case CodeFormat::kFloat8: return run(std::integral_constant<CodeFormat, CodeFormat::kFloat8>());
    case CodeFormat::kFloat4: return run(std::integral_constant<CodeFormat, CodeFormat::kFloat4>());
  }
}

#if defined(__AVX512F__)
// Returns the numbers of the codes of four bits, in bfloat16, twice: where they are looked up, the
// fifth bit of an index belongs to another code.
__m512i tabulate_codes(const Packed& p) {
  if (p.code != CodeFormat::kInt4 && p.code != CodeFormat::kFloat4) return __m512i{};
  const Int bits = to_int(lane_indices());
  const Vec numbers = p.code == CodeFormat::kFloat4 ? decode<CodeFormat::kFloat4>(bits)
                                                    : decode<CodeFormat::kInt4>(bits) -
                                                          splat(p.zero || p.minimum ? 0.0f : 8.0f);
  uint16_t table[32];
  for (int i = 0; i < 32; ++i) table[i] = static_cast<uint16_t>(as_bits(numbers)[i % kLanes] >> 16);
  return raw_at<__m512i>(table);
}

// Makes words of two numbers of bfloat16 of the codes of some panels. They are exact: no code has
// more than eight bits.
template <CodeFormat code>
struct BFloat16PairReader {
  static constexpr bool kOfNibbles = code == CodeFormat::kInt4 || code == CodeFormat::kFloat4;
  static constexpr int64_t kBytesOfWord = kOutputsOfPanel * (kOfNibbles ? 1 : 2);
  const uint8_t* first;
  int64_t num_words;
  __m512i numbers;

  BFloat16PairReader(const Packed& p, __m512i numbers, int64_t panel)
      : first(static_cast<const uint8_t*>(p.panels) + panel * p.num_words * kBytesOfWord),
        num_words(p.num_words),
        numbers(numbers) {}

  BFloat16PairReader from(int64_t word) const {
    BFloat16PairReader source = *this;
    source.first += word * kBytesOfWord;
    return source;
  }

  Words at(int panel, int64_t k) const {
    const uint8_t* from = first + (panel * num_words + k) * kBytesOfWord;
    __builtin_prefetch(from + kCodesAhead * kBytesOfWord);
    if constexpr (kOfNibbles) {
      const Bits both = as_bits(widen(from));
      return (Words)_mm512_permutexvar_epi16((__m512i)(both | both << 12), numbers);
    } else {
      typedef typename std::conditional<code == CodeFormat::kInt8, I8, F8>::type Number;
      const auto* codes = reinterpret_cast<const typename Number::type*>(from);
      return (Words)(as_bits(Load<Number>::at(codes)) >> 16 |
                     (as_bits(Load<Number>::at(codes + kOutputsOfPanel)) & 0xffff0000u));
    }
  }
};
#endif

// Tells whether inputs of bfloat16 are rounded to 16 bits, so that one instruction multiplies pairs
// of them by codes, which would be made float one by one. Codes of fp8 are no whole numbers.
bool rounds_inputs(const Packed& p) {
#if defined(__AVX2__)
  return p.is_coded && p.narrow && p.code != CodeFormat::kFloat8 && p.num_in % 2 == 0 &&
         p.group_size % 2 == 0 &&
         (p.group_size <= kMaxInputsOfPart || p.group_size % kInputsOfPart == 0);
#else
  return false;
#endif
}

// Tells whether rounded inputs are there as halves of eight bits, too: codes of int4 have no sign,
// and one instruction multiplies pairs of such by pairs of eight bits.
bool has_halves(const Packed& p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return rounds_inputs(p) && p.code == CodeFormat::kInt4 && p.num_in % 4 == 0 &&
         p.group_size % 4 == 0;
#else
  return false;
#endif
}

// Returns how many inputs are a part, which share a scale of the weight and one of their own.
int64_t inputs_of_part(const Packed& p) {
  return rounds_inputs(p) && p.group_size > kMaxInputsOfPart ? kInputsOfPart : p.group_size;
}

int64_t parts_of_row(const Packed& p) {
  const int64_t size = inputs_of_part(p);
  return (p.num_in + size - 1) / size;
}

// Returns the bytes that `prepare` writes for a row; 0 where x is multiplied as it is.
int64_t bytes_of_row(const Packed& p) {
  if (rounds_inputs(p)) return p.num_in * (has_halves(p) ? 4 : 2) + parts_of_row(p) * 8;
  if (p.is_coded) return p.zero || p.minimum ? p.num_groups * 4 : 0;
  if (p.type == Type::kF32 || (p.type == Type::kBF16 && p.instructions && p.num_in % 2 == 0))
    return 0;
  return std::max<int64_t>(p.num_words, 1) * (p.instructions ? 4 : 8);
}

// Holds where the rows are that are multiplied by codes. A rounded row is followed by its halves,
// by the scales of its parts, and by their sums.
template <typename Word>
struct RowsOfCodes {
  static constexpr bool kRounded = std::is_same<typename Word::Sum, Ints>::value;
  int64_t inputs, size;  // of a part, and the words that they are
  int64_t num_words;     // of a row
  int64_t num_parts, parts_of_group;
  int64_t x_stride, sum_stride;  // from a row to the next: of x, and of scales and sums
  const typename Word::X* x;
  const uint8_t* halves;
  const float *scale, *sum;

  RowsOfCodes(const Packed& p, int64_t row)
      : inputs(inputs_of_part(p)),
        size(inputs / Word::kInputs),
        num_words(p.num_in / Word::kInputs),
        num_parts(parts_of_row(p)),
        parts_of_group(p.group_size / inputs),
        x_stride(kRounded ? bytes_of_row(p) / 4 : num_words),
        sum_stride(kRounded ? x_stride : num_parts),
        x(static_cast<const typename Word::X*>(kRounded ? p.words : p.x) +
          row * x_stride * Word::kSteps),
        halves(reinterpret_cast<const uint8_t*>(x + num_words)),
        scale(kRounded ? reinterpret_cast<const float*>(halves + (has_halves(p) ? p.num_in * 2 : 0))
                       : nullptr),
        sum(kRounded ? scale + num_parts : static_cast<const float*>(p.words) + row * sum_stride) {}

  int64_t group_of(int64_t part) const {
    return parts_of_group == 1 ? part : part / parts_of_group;
  }
};

// Holds the scales of a part of some panels, and what is added to it for each of its inputs.
template <int kPanels>
struct ScalesOfPart {
  Vec scale[kPanels], offset[kPanels];

  ScalesOfPart(const Packed& p, int64_t first_panel, int64_t group) {
#pragma GCC unroll kMaxPanels
    for (int i = 0; i < kPanels; ++i) {
      scale[i] = read_group(p, p.scale_type, p.scale, first_panel + i, group);
      offset[i] = p.minimum ? read_group(p, p.scale_type, p.minimum, first_panel + i, group)
                  : p.zero  ? -scale[i] * read_group(p, Type::kF32, p.zero, first_panel + i, group)
                            : Vec{};
    }
  }
};

// Adds the sum of a part of a row and a panel to that of all parts: scaled, and with what its zeros
// or minima give.
template <typename Rows>
inline Vec add_part(const Packed& p, const Rows& rows, int64_t row, int64_t part, Vec sum,
                    Vec scale, Vec offset, Vec total) {
  const bool has_sums = p.minimum || p.zero;
  const int64_t at = row * rows.sum_stride + part;
  if constexpr (Rows::kRounded) {
    const int32_t excess = has_sums ? 0 : reinterpret_cast<const int32_t*>(rows.sum)[at];
    sum = to_float(as_int(sum) - excess) * splat(rows.scale[at]);
  }
  total = multiply_add(sum, scale, total);
  return has_sums ? multiply_add(splat(rows.sum[at]), offset, total) : total;
}

// Does this for some rows and panels, whose sums are in `part` and in `total`.
template <int kPanels, typename Rows>
void add_part(const Packed& p, const Rows& rows, int64_t num_rows, int64_t first_panel,
              int64_t index, const uint32_t* part, uint32_t* total) {
  const ScalesOfPart<kPanels> scales(p, first_panel, rows.group_of(index));
#pragma GCC unroll kMaxPanels
  for (int i = 0; i < kPanels; ++i)
    for (int64_t t = 0; t < num_rows; ++t) {
      const int64_t at = t * kMaxColumns + i * kOutputsOfPanel;
      const Vec sum = add_part(p, rows, t, index, raw_at<Vec>(part + at), scales.scale[i],
                               scales.offset[i], raw_at<Vec>(total + at));
      Store<F32>::at(reinterpret_cast<float*>(total + at), sum);
    }
}

// Multiplies weights of few bits: the codes of a part are multiplied as they are, and its sum by
// the scale. Some words are made at a time, so that they stay in the first cache, and multiplied by
// all rows. With AMX and few rows, some small groups take each step one after the other, so that
// no step waits for the one before it.
template <typename Word, int kPanels, typename Source>
JAXPAGE_DOT void multiply_codes_of_many_rows(const Packed& p, int64_t row, int64_t end_row,
                                             int64_t first_panel, const Source& source) {
  typedef typename Word::PartWord PartWord;
  constexpr int64_t kSteps = Word::kSteps, kWords = kWordsOfBuffer / kSteps,
                    kSums = kRowsAtOnce * kMaxColumns, kMaxParts = 4;
  alignas(64) static thread_local uint32_t total[kSums], sums[kMaxParts * kSums];
  alignas(64) uint32_t buffer[kPanels * kPanelOfBuffer];
  const int64_t num_rows = end_row - row;
  const RowsOfCodes<Word> rows(p, row);
  const int64_t size = rows.size, at_once = num_rows > kMaxRows
                                                ? 1
                                                : std::clamp<int64_t>(kWords / size, 1, kMaxParts);
  TileRows tile_rows;
  std::memset(total, 0, num_rows * kMaxColumns * 4);
  for (int64_t part = 0; part < rows.num_parts; part += at_once) {
    const int64_t first = part * size, count = std::min(at_once * size, rows.num_words - first);
    for (int64_t begin = 0; begin < count; begin += kWords) {
      const int64_t end = std::min(begin + kWords, count);
      make_words<Word, kPanels>(source, first + begin, first + end, buffer);
      // One part, perhaps in several blocks, or several in one block.
      for (int64_t i = 0; i < at_once && i * size < end; ++i) {
        const uint32_t* from = buffer + (i * size - begin) * kSteps *
                                            kOutputsOfPanel;  // where the part's word 0 would be
        const int64_t stop = std::min(end - i * size, size);
        multiply_words<PartWord, kPanels>(tile_rows, p.instructions, num_rows,
                                          rows.x + (first + i * size) * kSteps,
                                          rows.x_stride * kSteps, from, kPanelOfBuffer,
                                          begin * kSteps, stop * kSteps, sums + i * kSums);
      }
    }
    for (int64_t i = 0; i < at_once && part + i < rows.num_parts; ++i)
      add_part<kPanels>(p, rows, num_rows, first_panel, part + i, sums + i * kSums, total);
  }
  store<kPanels>(p, row, end_row, first_panel, total);
}

// Does the same for few rows: the words of a part are multiplied as they are made.
template <typename Word, int kPanels, typename Source>
JAXPAGE_DOT void multiply_codes_of_few_rows(const Packed& p, int64_t row, int64_t end_row,
                                            int64_t first_panel, const Source& source) {
  constexpr int64_t kSums = kMaxRowsOfWords * kMaxColumns;
  alignas(64) uint32_t total[kSums] = {}, sums[kSums];
  const RowsOfCodes<Word> rows(p, row);
  for (int64_t part = 0; part < rows.num_parts; ++part) {
    const int64_t first = part * rows.size, count = std::min(rows.size, rows.num_words - first);
    multiply_in_tiles<Word, kPanels>(end_row - row, rows.x + first * Word::kSteps, rows.x_stride,
                                     source.from(first), 0, count, sums);
    add_part<kPanels>(p, rows, end_row - row, first_panel, part, sums, total);
  }
  store<kPanels>(p, row, end_row, first_panel, total);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// So many products of codes of int4 and halves have a sum of 16 bits at most. That of low halves
// has no sign.
constexpr int64_t kInputsOfSum = 32;

// Adds the products of a row, of at most kInputsOfSum inputs, with the codes of a panel to sums of
// eight outputs each.
template <bool kIsWhole>
inline void add_nibbles(const uint8_t* x, const uint8_t* codes, int64_t num_inputs,
                        __m256i (&sums)[2]) {
  const __m256i nibble = _mm256_set1_epi8(15),
                pairs = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1,  //
                                         2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
  const auto halves_at = [&](int64_t i) {
    return _mm256_shuffle_epi8(_mm256_set1_epi32(raw_at<int32_t>(x + i)), pairs);
  };
  __m256i high_sums[2] = {}, low_sums[2] = {};
#pragma GCC unroll 8
  for (int64_t i = 0; i < (kIsWhole ? kInputsOfSum : num_inputs); i += 4) {
    const __m256i high = halves_at(i * 2), low = halves_at(i * 2 + 4);
    const uint8_t* from = codes + i / 2 * kOutputsOfPanel;
    if (i % 8 == 0) __builtin_prefetch(from + kNibblesAhead * kOutputsOfPanel);
    // A lane has the codes of two inputs, for all outputs.
    const auto both = raw_at<__m256i>(from);
    const __m256i even = _mm256_and_si256(both, nibble),
                  odd = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    const __m256i numbers[2] = {_mm256_unpacklo_epi8(even, odd), _mm256_unpackhi_epi8(even, odd)};
    for (int j = 0; j < 2; ++j) {
      high_sums[j] = _mm256_add_epi16(high_sums[j], _mm256_maddubs_epi16(numbers[j], high));
      low_sums[j] = _mm256_add_epi16(low_sums[j], _mm256_maddubs_epi16(low, numbers[j]));
    }
  }
  // The two lanes of a vector are sums of the same outputs.
  for (int j = 0; j < 2; ++j)
    for (int lane = 0; lane < 2; ++lane) {
      const auto high = raw_at<__m128i>(reinterpret_cast<const char*>(&high_sums[j]) + lane * 16),
                 low = raw_at<__m128i>(reinterpret_cast<const char*>(&low_sums[j]) + lane * 16);
      const __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(_mm256_cvtepi16_epi32(high), 8),
                                           _mm256_cvtepu16_epi32(low));
      sums[j] = _mm256_add_epi32(sums[j], sum);
    }
}

// Does what `multiply_codes_of_few_rows` does, for one row and codes of int4. One panel after the
// other is read faster than two at once.
void multiply_nibbles_of_one_row(const Packed& p, int64_t row, int64_t panel,
                                 const uint8_t* codes) {
  const RowsOfCodes<CodePairWord> rows(p, row);
  Vec total = {};
  for (int64_t part = 0; part < rows.num_parts; ++part) {
    const int64_t first = part * rows.inputs, end = std::min(first + rows.inputs, p.num_in);
    __m256i sums[2] = {};
    const auto add = [&](auto is_whole, int64_t i) {
      add_nibbles<is_whole>(rows.halves + i * 2, codes + i / 2 * kOutputsOfPanel, end - i, sums);
    };
    // Most parts have so many inputs, and their sums stay in registers then.
    if (end - first == kInputsOfSum) add(std::true_type(), first);
    else
      for (int64_t i = first; i < end; i += kInputsOfSum) {
        if (i + kInputsOfSum <= end) add(std::true_type(), i);
        else add(std::false_type(), i);
      }
    const ScalesOfPart<1> scales(p, panel, rows.group_of(part));
    total = add_part(p, rows, 0, part, raw_at<Vec>(sums), scales.scale[0], scales.offset[0], total);
  }
  store<1>(p, row, row + 1, panel, reinterpret_cast<const uint32_t*>(&total));
}
#endif

template <typename Word, int kPanels, typename Source>
void multiply_codes(const Packed& p, int64_t row, int64_t end_row, int64_t panel,
                    const Source& source) {
  const bool is_few = end_row - row <= kMaxRowsOfWords;
  if (is_few && p.instructions != kTiles)
    multiply_codes_of_few_rows<Word, kPanels>(p, row, end_row, panel, source);
  else multiply_codes_of_many_rows<Word, kPanels>(p, row, end_row, panel, source);
}

template <int kPanels>
void multiply_codes(const Packed& p, int64_t row, int64_t end_row, int64_t panel) {
#if defined(__AVX512F__)
  if (p.instructions)
    return dispatch_code(p.code, [&](auto code) {
      const BFloat16PairReader<decltype(code)::value> source(p, tabulate_codes(p), panel);
      multiply_codes<BFloat16Dot, kPanels>(p, row, end_row, panel, source);
    });
#endif
  dispatch_code(p.code, [&](auto code) {
    constexpr CodeFormat kCode = decltype(code)::value;
    constexpr int kMiddle = kCode == CodeFormat::kInt4 ? 8 : 0;
    const int64_t bytes = p.num_in / CodeWord<kCode, 0>::kInputs * kOutputsOfPanel;
    const auto* first = static_cast<const uint8_t*>(p.panels) + panel * bytes;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (end_row - row == 1 && has_halves(p)) {
      for (int i = 0; i < kPanels; ++i)
        multiply_nibbles_of_one_row(p, row, panel + i, first + i * bytes);
      return;
    }
#endif
#if defined(__AVX2__)
    if (rounds_inputs(p))
      return multiply_codes<CodePairWord, kPanels>(p, row, end_row, panel,
                                                   ShortPairReader<kCode>{first, bytes});
#endif
    const CodeReader<kCode> source{first, bytes};
    if (p.zero || p.minimum)
      multiply_codes<CodeWord<kCode, 0>, kPanels>(p, row, end_row, panel, source);
    else multiply_codes<CodeWord<kCode, kMiddle>, kPanels>(p, row, end_row, panel, source);
  });
}

// Calls run(count, first) with the number of panels that are multiplied together, as a constant.
template <typename Word, typename Run>
void for_panel_groups(int64_t num_rows, int64_t panel, int64_t end_panel, const Run& run) {
  // Sums of integers take one cycle, and wait for nothing.
  constexpr bool kWaits = std::is_same<typename Word::Sum, Floats>::value;
  if (kWaits && num_rows <= kFewRows && panel + kMaxPanels <= end_panel)
    return run(std::integral_constant<int, kMaxPanels>(), panel);
  for (; panel + kManyPanels <= end_panel; panel += kManyPanels)
    run(std::integral_constant<int, kManyPanels>(), panel);
  for (; panel < end_panel; ++panel) run(std::integral_constant<int, 1>(), panel);
}

template <typename Word>
void multiply(const Packed& p, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel) {
  for_panel_groups<Word>(end_row - row, panel, end_panel, [&](auto count, int64_t first) {
    multiply_panels<Word, count>(p, row, end_row, first);
  });
}

void multiply(const Packed& p, int64_t row, int64_t end_row, int64_t panel, int64_t end_panel) {
  if (p.is_coded)
    return for_panel_groups<FloatWord>(
        end_row - row, panel, end_panel,
        [&](auto count, int64_t first) { multiply_codes<count>(p, row, end_row, first); });
  if (p.type == Type::kF32) return multiply<FloatWord>(p, row, end_row, panel, end_panel);
  if (p.type == Type::kI8) {
#if defined(__AVX512F__)
    if (p.instructions) return multiply<Int8Dot>(p, row, end_row, panel, end_panel);
#endif
    return multiply<Int8Word>(p, row, end_row, panel, end_panel);
  }
#if defined(__AVX512F__)
  if (p.instructions) return multiply<BFloat16Dot>(p, row, end_row, panel, end_panel);
#endif
  multiply<BFloat16Word>(p, row, end_row, panel, end_panel);
}

// Rounds a row to eight bits as `round_inputs` of jaxpage/layers/matmul.py does, with the same
// operations. A NaN makes the scale NaN.
void round_row(const Packed& p, int64_t row, void* words) {
  const auto* x = static_cast<const float*>(p.x) + row * p.num_in;
  const auto at = [&](int64_t i) {
    if (i + kLanes <= p.num_in) return raw_at<Vec>(x + i);
    Vec tail = {};
    std::memcpy(&tail, x + i, (p.num_in - i) * 4);
    return tail;
  };
  Vec maxima = {};
  for (int64_t i = 0; i < p.num_in; i += kLanes) {
    const Vec size = as_float(as_bits(at(i)) & 0x7fffffffu);
    maxima = select((size > maxima) | (size != size), size, maxima);
  }
  float largest = 0;
  for (int lane = 0; lane < kLanes; ++lane)
    if (maxima[lane] > largest || maxima[lane] != maxima[lane]) largest = maxima[lane];
  float scale = largest * (1.0f / 127);
  if (scale < 0x1p-100f) scale = 0x1p-100f;
  p.row_scale[row] = scale;
  // The sum with 1.5 * 2^23 rounds to an integer: float32 has no bits for what is below one there.
  const Vec inverse = splat(1.0f / scale), magic = splat(12582912.0f);
  // The words before it are multiplied in tiles of AMX, whose sums have nothing too much.
  const int64_t first_dot = p.instructions == kTiles ? p.num_words / 16 * 16 : 0;
  Int sums = {};
  for (int64_t i = 0; i < p.num_in; i += kLanes) {
    const Vec whole = at(i) * inverse;
    const Int rounded = to_int(select(whole == whole, (whole + magic) - magic, Vec{}));
    if (i >= first_dot * 4) sums += rounded;
    int32_t n[kLanes];
    std::memcpy(n, &rounded, sizeof(n));
    const int64_t count = std::min<int64_t>(kLanes, p.num_words * 4 - i);
    if (p.instructions) {
      int8_t bytes[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) bytes[lane] = static_cast<int8_t>(n[lane]);
      std::memcpy(static_cast<int8_t*>(words) + i, bytes, count);
    } else {
      int16_t pairs[kLanes];  // as `Int8Word` has them
      for (int lane = 0; lane < kLanes; lane += 4) {
        pairs[lane] = static_cast<int16_t>(n[lane]);
        pairs[lane + 1] = static_cast<int16_t>(n[lane + 2]);
        pairs[lane + 2] = static_cast<int16_t>(n[lane + 1]);
        pairs[lane + 3] = static_cast<int16_t>(n[lane + 3]);
      }
      std::memcpy(static_cast<int16_t*>(words) + i, pairs, count * 2);
    }
  }
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  p.row_sum[row] = sum;
}

// Computes the sum of each group of inputs, which is multiplied by zeros or minima.
void sum_groups(const Packed& p, int64_t row, float* sums) {
  for (int64_t group = 0; group < p.num_groups; ++group) {
    float sum = 0;
    for (int64_t i = group * p.group_size; i < std::min(p.num_in, (group + 1) * p.group_size); ++i)
      sum += p.instructions
                 ? float_of_bfloat16(static_cast<const uint16_t*>(p.x)[row * p.num_in + i])
                 : static_cast<const float*>(p.x)[row * p.num_in + i];
    sums[group] = sum;
  }
}

// Rounds a row of bfloat16 to 16 bits, each part beside its largest number: the scale is a power of
// two, so that numbers of at least its 128th part, which have eight bits, stay as they are (if they
// exceed 2^-111). With a number that is not finite the scale is NaN, and the part may be anything.
// The sums are those of the rounded numbers, of codes without zeros and minima what 8 in each code
// of int4 makes too much.
void round_parts(const Packed& p, int64_t row, char* words) {
  const uint16_t* x = p.narrow + row * p.num_in;
  auto* rounded = reinterpret_cast<int16_t*>(words);
  auto* halves = reinterpret_cast<uint8_t*>(words + p.num_in * 2);
  const bool with_halves = has_halves(p);
  const int64_t size = inputs_of_part(p), num_parts = parts_of_row(p);
  auto* scales = reinterpret_cast<float*>(words + p.num_in * (with_halves ? 4 : 2));
  float* sums = scales + num_parts;
  const int32_t middle = p.code == CodeFormat::kInt4 ? 8 : 0;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t first = part * size, end = std::min(first + size, p.num_in);
    uint16_t max_bits = 0;
    for (int64_t i = first; i < end; ++i) max_bits = std::max<uint16_t>(max_bits, x[i] & 0x7fff);
    // 2^15 times the scale is the next power of two after the largest number; but no scale is less
    // than 2^-125, so that its inverse is a number.
    const bool is_finite = max_bits < 0x7f80;
    const int exponent = std::max(max_bits >> 7, 16) - 14 - 127;
    const float scale = is_finite ? std::ldexp(1.0f, exponent) : NAN,
                inverse = std::ldexp(1.0f, -exponent);
    int32_t sum = 0;
    for (int64_t i = first; i < end && is_finite; ++i) {
      // The sum with 1.5 * 2^23 rounds, as in `round_row`.
      const float whole = (float_of_bfloat16(x[i]) * inverse + 12582912.0f) - 12582912.0f;
      rounded[i] = static_cast<int16_t>(static_cast<int32_t>(whole));
      sum += rounded[i];
    }
    for (int64_t i = first; i < end && with_halves; ++i) {
      halves[i / 4 * 8 + i % 4] = static_cast<uint8_t>(rounded[i] >> 8);
      halves[i / 4 * 8 + 4 + i % 4] = static_cast<uint8_t>(rounded[i]);
    }
    scales[part] = p.code == CodeFormat::kFloat4 ? scale * 0.5f : scale;  // codes are doubled
    if (p.zero || p.minimum) sums[part] = static_cast<float>(sum) * scale;
    else reinterpret_cast<int32_t*>(sums)[part] = middle * sum;
  }
}

void prepare(const Packed& p, int64_t row, void* words) {
  if (rounds_inputs(p)) return round_parts(p, row, static_cast<char*>(words));
  if (p.narrow) {
    auto* wide = static_cast<uint32_t*>(const_cast<void*>(p.x)) + row * p.num_in;
    for (int64_t i = 0; i < p.num_in; ++i) wide[i] = uint32_t{p.narrow[row * p.num_in + i]} << 16;
  }
  if (p.is_coded) {
    if (p.zero || p.minimum) sum_groups(p, row, static_cast<float*>(words));
    return;
  }
  if (p.type == Type::kI8) return round_row(p, row, words);
  const uint16_t* x = static_cast<const uint16_t*>(p.x) + row * p.num_in;
  if (p.instructions) {
    static_cast<uint32_t*>(words)[p.num_words - 1] = 0;
    std::memcpy(words, x, p.num_in * 2);
    return;
  }
  auto* numbers = static_cast<uint32_t*>(words);
  for (int64_t i = 0; i < p.num_in; ++i) numbers[i] = static_cast<uint32_t>(x[i]) << 16;
  if (p.num_in % 2) numbers[p.num_in] = 0;
}

}  // namespace

extern const PackedKernels kPacked = {kMaxPanels, bytes_of_row, prepare, multiply};

}  // namespace JAXPAGE_ISA
}  // namespace jaxpage
