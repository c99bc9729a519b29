// Runs the kernels for CPUs on a fixed list of cases, without XLA: check_instructions.py builds it
// with them. Each line of the output has four fields:
//
//   NAME <tab> HASH <tab> ERROR <tab> VERDICT
//
// Results with the same name must have the same hash, whatever the instruction set: what one of
// them has right, all have. Those of dot products and tiles of bfloat16 have other bits, and their
// error is the difference from the results without them. The verdict is "ok", or what is wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "attention.h"
#include "bidirectional.h"
#include "packed.h"
#include "parallel.h"
#include "rows.h"

extern "C" int jaxpage_instructions(bool of_int8);

namespace jaxpage {
namespace {

using namespace JAXPAGE_ISA;

constexpr Type kF32 = Type::kF32, kBF16 = Type::kBF16, kF16 = Type::kF16, kI8 = Type::kI8;
const char* const kTypes[] = {"float32", "bfloat16", "float16", "int8", "float8"};
int num_wrong = 0;

int64_t size_of(Type type) { return type == kF32 ? 4 : type < kI8 ? 2 : 1; }
std::string name_of(Type type) { return kTypes[static_cast<int>(type)]; }

uint64_t random_bits() {
  static uint64_t state = 1;
  uint64_t x = state += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// Holds numbers as kernels read and write them. Those that nobody sets or writes are NaN.
struct Array {
  Type type;
  std::vector<char> bytes;

  Array(Type type, int64_t count) : type(type), bytes(count * size_of(type), '\xff') {}

  int64_t count() const { return bytes.size() / size_of(type); }
  const char* at(int64_t i) const { return bytes.data() + i * size_of(type); }
  char* at(int64_t i) { return bytes.data() + i * size_of(type); }
  float* floats() { return reinterpret_cast<float*>(bytes.data()); }

  uint32_t bits(int64_t i) const {
    uint32_t bits = 0;
    std::memcpy(&bits, at(i), size_of(type));
    return bits;
  }
  float operator[](int64_t i) const {
    const uint32_t float_bits = bits(i) << (type == kF32 ? 0 : 16);
    float number;
    std::memcpy(&number, &float_bits, 4);
    return number;
  }
  // Sets a number that the type has exactly, and which is not subnormal in float16.
  void set(int64_t i, float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    if (type == kBF16) bits >>= 16;
    if (type == kF16 && number != 0)
      bits = (bits >> 16 & 0x8000) | (((bits & 0x7fffffff) >> 13) - (112 << 10));
    std::memcpy(at(i), &bits, size_of(type));
  }
  // Sets numbers between -factor and factor, a power of two; codes may be any but NaN.
  void fill(int64_t first, int64_t count, float factor = 1) {
    const int digits = type == kF32 ? 24 : type == kBF16 ? 8 : 11;
    for (int64_t i = first; i < first + count; ++i) {
      const int64_t number = static_cast<int64_t>(random_bits() >> (63 - digits)) - (1 << digits);
      if (size_of(type) > 1) set(i, std::ldexp(static_cast<float>(number), -digits) * factor);
      else bytes[i] = static_cast<char>(number & ((number & 127) == 127 ? 254 : 255));
    }
  }
};

Array random_array(Type type, int64_t count, float factor = 1) {
  Array array(type, count);
  array.fill(0, count, factor);
  return array;
}

// Returns a hash of some numbers. All NaNs count as one: which one results is nobody's promise.
uint64_t hash_of(const Array& array, int64_t first, int64_t count, uint64_t hash = 1469598103u) {
  const uint32_t infinity = array.type == kF32 ? 0x7f800000 : array.type == kF16 ? 0x7c00 : 0x7f80;
  for (int64_t i = first; i < first + count; ++i) {
    const uint32_t bits = array.bits(i), size = bits & (array.type == kF32 ? ~0u >> 1 : 0x7fff);
    hash = (hash ^ (size > infinity ? infinity + 1 : bits)) * 1099511628211u;
  }
  return hash;
}
uint64_t hash_of(const Array& array) { return hash_of(array, 0, array.count()); }

// Returns the largest difference, beside the largest expected number of its row.
double error_of(const Array& results, const Array& expected, int64_t width) {
  double error = 0;
  for (int64_t first = 0; first < results.count(); first += width) {
    double difference = 0, size = 1e-20;
    for (int64_t i = first; i < first + width; ++i) {
      if (std::isnan(expected[i]) != std::isnan(results[i])) return INFINITY;
      if (std::isnan(expected[i])) continue;
      size = std::max<double>(size, std::fabs(expected[i]));
      difference = std::max<double>(difference, std::fabs(results[i] - expected[i]));
    }
    error = std::max(error, difference / size);
  }
  return error;
}

void report(const std::string& name, uint64_t hash, const std::string& other_bits = "",
            double error = 0, double bound = 0) {
  const bool is_large = !(error <= bound);
  num_wrong += is_large || !other_bits.empty();
  std::printf("%s\t%016llx\t%.1e\t%s%s\n", name.c_str(), static_cast<unsigned long long>(hash),
              error,
              is_large             ? "the error is too large"
              : other_bits.empty() ? "ok"
                                   : "other bits: ",
              other_bits.c_str());
  std::fflush(stdout);
}

enum Extra { kPlain, kZeros, kMinima, kSharedScales };

// Describes a product. `code` is -1 for a weight of numbers, or of int8 with rounded inputs.
struct ProductCase {
  Type type, x_type;
  int64_t num_in, num_out;
  Type out = kF32;
  Activation activation = Activation::kNone;
  int code = -1;
  Extra extra = kPlain;
  int64_t group_size = 1;
  Type scale_type = kF32;
};

class Product {
 public:
  explicit Product(const ProductCase& c)
      : c_(c),
        x_(c.x_type, kRows * c.num_in),
        panels_(c.code < 0    ? c.type
                : c.code == 2 ? Type::kF8
                              : kI8,
                0),
        bias_(random_array(kF32, c.num_out)) {
    // Some rows are large, zero, and so small that products count as zero; one has a NaN.
    for (int64_t t = 0; t < kRows; ++t) {
      const float factor = t == 2 ? 0x1p10f : t == 5 ? 0 : t == 11 ? 0x1p-125f : 1;
      x_.fill(t * c.num_in, c.num_in, factor);
    }
    x_.set(7 * c.num_in + 30, NAN);
    Packed& p = packed_;
    p.type = c.type;
    p.num_in = c.num_in;
    p.num_out = c.num_out;
    p.out_is_float = c.out == kF32;
    p.activation = c.activation;
    if (c.activation != Activation::kNone) p.bias = bias_.floats();
    const int64_t numbers = c.code < 0 ? 4 / size_of(c.type) : 2;
    p.num_words = (c.num_in + numbers - 1) / numbers;
    const int64_t bytes_of_panel = c.code < 0 ? p.num_words * 64 : c.num_in * (c.code % 2 ? 8 : 16);
    const int64_t num_panels = (c.num_out + 15) / 16;
    panels_ = random_array(panels_.type, num_panels * bytes_of_panel / size_of(panels_.type));
    // What fills no word is zero.
    const int64_t tail = c.code < 0 ? (p.num_words * numbers - c.num_in) * size_of(c.type) : 0;
    for (int64_t end = bytes_of_panel; end <= num_panels * bytes_of_panel; end += bytes_of_panel)
      for (int64_t output = 0; output < 16; ++output)
        std::memset(panels_.bytes.data() + end - output * 4 - tail, 0, tail);
    p.panels = panels_.at(0);
    p.num_groups = c.code < 0 ? num_panels : (c.num_in + c.group_size - 1) / c.group_size;
    scale_ = random_array(c.scale_type, num_panels * p.num_groups * 16);
    zero_ = random_array(c.extra == kZeros ? kF32 : c.scale_type, scale_.count(), 8);
    p.scale = scale_.at(0);
    if (c.extra == kZeros) p.zero = zero_.at(0);
    if (c.extra == kMinima) p.minimum = zero_.at(0);
    for (int64_t output = 0; output < c.num_out; ++output) scale_row_.push_back(output % 3);
    if (c.extra == kSharedScales) p.scale_row = scale_row_.data();
    p.scale_type = c.scale_type;
    p.is_coded = c.code >= 0;
    p.code = static_cast<CodeFormat>(c.code);
    p.group_size = c.group_size;
  }

  void check() const {
    const bool is_int8 = c_.type == kI8 && c_.code < 0;
    const int best = is_int8              ? jaxpage_instructions(true)
                     : c_.x_type == kBF16 ? jaxpage_instructions(false)
                                          : kNone;
    const Array expected = multiply(kNone, 0, kRows);
    for (int instructions = kNone; instructions <= best; ++instructions) {
      const Array all = multiply(instructions, 0, kRows);
      std::string other_bits;
      for (int64_t count : {1, 2, 3, 4, 5, 6, 7, 12, 13, 15, 16, 17, 31, 33, 48, 64, 96}) {
        const int64_t first = count % 2 ? 0 : kRows - count;
        const Array some = multiply(instructions, first, count);
        if (hash_of(some) != hash_of(all, first * c_.num_out, some.count()))
          other_bits += std::to_string(count) + " rows, ";
      }
      const double bound = is_int8 ? 0 : c_.out == kBF16 ? 4e-3 : c_.code < 0 ? 1e-5 : 5e-4;
      report(name(instructions), hash_of(all), other_bits, error_of(all, expected, c_.num_out),
             bound);
    }
  }

 private:
  static constexpr int64_t kRows = 100;

  std::string name(int instructions) const {
    constexpr const char* kCodes[] = {"int8", "int4", "fp8", "fp4"};
    constexpr const char* kExtras[] = {"", ", zeros", ", minima", ", shared scales"};
    constexpr const char* kInstructions[] = {"", ", dot", ", tiles"};
    std::string name = name_of(c_.x_type) + " by ";
    if (c_.code < 0) name += name_of(c_.type);
    else name += kCodes[c_.code] + (" in groups of " + std::to_string(c_.group_size));
    name += kExtras[c_.extra] + (", " + std::to_string(c_.num_in)) + " inputs";
    // Sums of rounded numbers are exact, and those of float32 have one order.
    if (c_.x_type == kF32 || (c_.type == kI8 && c_.code < 0)) return name;
#if defined(__aarch64__)
    // Only x86 rounds inputs of bfloat16 to pairs of 16 bits.
    if (c_.code >= 0 && packed_.code != CodeFormat::kFloat8) name += ", ARM";
#endif
    return name + kInstructions[instructions];
  }

  // Multiplies some rows in a call of their own, as ffi.cc does.
  Array multiply(int instructions, int64_t first, int64_t count) const {
    Packed p = packed_;
    std::vector<float> wide(count * c_.num_in, NAN), scales(count);
    std::vector<int32_t> sums(count);
    p.num_rows = count;
    p.instructions = instructions;
    p.x = x_.at(first * c_.num_in);
    if (c_.x_type == kBF16 && (c_.code >= 0 ? !instructions : c_.type == kI8)) {
      p.narrow = static_cast<const uint16_t*>(p.x);
      p.x = wide.data();
    }
    p.words = p.x;
    p.row_scale = scales.data();
    p.row_sum = sums.data();
    const int64_t bytes = kPacked.bytes_of_row(p);
    std::vector<char> words(bytes * count + 64, '\xff');
    if (bytes) p.words = words.data();
    for (int64_t row = 0; row < count && (bytes || p.narrow); ++row)
      kPacked.prepare(p, row, words.data() + row * bytes);
    Array out(c_.out, count * c_.num_out);
    p.out = out.at(0);
    const int64_t num_panels = (c_.num_out + 15) / 16, at_once = kPacked.panels_at_once;
    for (int64_t panel = 0; panel < num_panels; panel += at_once)
      for (int64_t row = 0; row < count; row += kRowsAtOnce)
        kPacked.multiply(p, row, std::min(row + kRowsAtOnce, count), panel,
                         std::min(panel + at_once, num_panels));
    return out;
  }

  ProductCase c_;
  Packed packed_{};
  Array x_, panels_, scale_{kF32, 0}, zero_{kF32, 0}, bias_;
  std::vector<int32_t> scale_row_;
};

void check_products() {
  std::vector<ProductCase> cases = {
      {kF32, kF32, 77, 100},
      {kF32, kF32, 64, 100, kF32, Activation::kSilu},
      {kF32, kF32, 78, 50, kF32, Activation::kGelu},
      {kF32, kF32, 1100, 40, kBF16, Activation::kGeluTanh},
      {kBF16, kBF16, 77, 100},
      {kBF16, kBF16, 64, 130, kBF16},
      {kBF16, kBF16, 2100, 40},
      {kI8, kF32, 77, 100},
      {kI8, kBF16, 192, 130, kBF16},
      {kI8, kF32, 4200, 20},
  };
  for (int code = 0; code < 4; ++code)
    for (Type x_type : {kF32, kBF16}) {
      const auto add = [&](int64_t num_in, int64_t num_out, Extra extra, int64_t group_size,
                           Type scale_type) {
        cases.push_back({kI8, x_type, num_in, num_out, kF32, Activation::kNone, code, extra,
                         group_size, scale_type});
      };
      add(328, 100, kPlain, 32, kBF16);
      add(320, 40, kZeros, 64, kF16);
      add(270, 40, kMinima, 6, kF32);
      add(512, 70, kMinima, 256, kF16);
      add(400, 40, kSharedScales, 400, kF32);
    }
  for (const ProductCase& c : cases) Product(c).check();
}

void check_rows(Type type, int64_t width) {
  constexpr int64_t kNumRows = 3, kHeads = 4, kKeys = 2, kAll = kHeads + 2 * kKeys;
  const Array x = random_array(type, kNumRows * kAll * width, 4);
  const Array added = random_array(type, x.count()), scale = random_array(type, width);
  Array cos = random_array(kF32, kNumRows * width / 2), sin = random_array(kF32, cos.count());
  Rows p{};
  p.type = p.scale_type = type;
  p.width = width;
  p.x = x.at(0);
  p.epsilon = 1e-5f;
  p.offset = 1;
  const auto check = [&](const std::string& name, void (*kernel)(const Rows&, int64_t),
                         int64_t num_rows) {
    Array out(type, num_rows * width), sum = out, keys = out, values = out;
    p.out = out.at(0);
    p.sum = sum.at(0);
    p.keys = keys.at(0);
    p.values = values.at(0);
    for (int64_t row = 0; row < num_rows; ++row) kernel(p, row);
    uint64_t hash = hash_of(out);
    for (const Array* each : {&sum, &keys, &values}) hash = hash_of(*each, 0, each->count(), hash);
    report(name + " of " + name_of(type) + ", width " + std::to_string(width), hash);
  };
  p.activation = Activation::kSilu;
  check("SiLU", kRows.gate, kNumRows);
  p.activation = Activation::kGelu;
  check("GELU", kRows.gate, kNumRows);
  p.activation = Activation::kGeluTanh;
  check("GELU (tanh)", kRows.gate, kNumRows);
  p.scale = scale.at(0);
  p.bias = added.at(0);
  check("RMS norm", kRows.rms_norm, kNumRows);
  check("layer norm", kRows.layer_norm, kNumRows);
  p.added = added.at(0);
  check("sum", kRows.add, kNumRows);
  check("sum and RMS norm", kRows.rms_norm, kNumRows);
  check("sum and layer norm", kRows.layer_norm, kNumRows);
  p.cos = cos.floats();
  p.sin = sin.floats();
  p.num_pairs = width / 2 - 3;
  p.num_heads = kHeads;
  p.num_keys = kKeys;
  check("rotation", kRows.rotate, kNumRows * kAll);
}

struct AttentionCase {
  std::string name;
  Type q_type, page_type;
  int64_t num_heads, num_kv_heads, width, value_width = 0;  // 0: values are no part of the keys
  int64_t window = 0, chunk = 0;
  float softcap = 0;
  bool has_sinks = false, has_slopes = false, is_tree = false, sees_ahead = false, has_nan = false;
};

// Four rows of a step: two that decode, one with a chunk, one with drafts; and two tokens of
// padding.
class AttentionStep {
 public:
  explicit AttentionStep(const AttentionCase& c)
      : c_(c),
        q_(random_array(c.q_type, kTokens * c.num_heads * c.width)),
        k_new_(random_array(c.q_type, kTokens * c.num_kv_heads * c.width)),
        v_new_(random_array(c.q_type, kTokens * c.num_kv_heads * c.width)),
        k_(c.page_type, kSlots * c.num_kv_heads * c.width),
        v_(k_),
        k_scale_(kF32, kSlots * c.num_kv_heads),
        v_scale_(k_scale_),
        sinks_(random_array(kF32, c.num_heads, 4)),
        slopes_(random_array(kF32, c.num_heads, 0.5f)) {
    Attention& a = a_;
    a.query_type = c.q_type;
    a.page_type = c.page_type;
    a.q = q_.at(0);
    a.k_new = k_new_.at(0);
    a.k_pages = k_.at(0);
    a.v_new = c.value_width ? nullptr : v_new_.at(0);
    a.v_pages = c.value_width ? a.k_pages : v_.at(0);
    if (size_of(c.page_type) == 1) a.k_scale = k_scale_.floats();
    if (a.k_scale) a.v_scale = c.value_width ? a.k_scale : v_scale_.floats();
    a.num_tokens = kTokens;
    a.num_rows = 4;
    a.head_dim = c.width;
    a.num_heads = c.num_heads;
    a.num_kv_heads = c.num_kv_heads;
    a.value_width = c.value_width ? c.value_width : c.width;
    a.num_slots = kSlots;
    a.block_size = kBlock;
    a.table_width = kTable;
    a.mask_width = kChunk;
    a.scale = 4 / std::sqrt(static_cast<float>(c.width));
    a.softcap = c.softcap;
    a.window = c.window;
    a.chunk = c.chunk;
    a.context_len = kContexts;
    a.query_start = kStarts;
    if (c.has_sinks) a.sinks = sinks_.floats();
    if (c.has_slopes) a.slopes = slopes_.floats();
    if (c.has_nan) v_new_.set((kStarts[3] - 1) * c.num_kv_heads * c.width + 3, NAN);
    fill();
  }

  void check() {
    for (int64_t token = 0; token < kTokens; ++token) kKernels.write(a_, token);
    report("pages, " + c_.name, hash_of(v_, 0, v_.count(), hash_of(k_)));
    const Array expected = attend_heads();
    report("attention, " + c_.name, hash_of(expected), compare(expected));
    a_.with_tiles = c_.q_type == kBF16 && c_.page_type == kBF16 && c_.width % 32 == 0 &&
                    a_.value_width % 32 == 0 && jaxpage_instructions(false) == kTiles;
    if (!a_.with_tiles) return;
    const Array out = attend_heads();
    report("attention, " + c_.name + ", tiles", hash_of(out), compare(out),
           error_of(out, expected, a_.value_width), 2e-2);
  }

 private:
  static constexpr int64_t kBlock = 8, kTable = 17, kSlots = 38 * kBlock, kChunk = 41;
  static constexpr int32_t kContexts[] = {6, 131, 71, 67}, kStarts[] = {0, 1, 2, 43, 46};
  static constexpr int64_t kTokens = 48;

  // Slots that no token has hold no numbers.
  void fill() {
    int index = 0;
    for (int64_t row = 0; row < 4; ++row) {
      const int64_t num_queries = kStarts[row + 1] - kStarts[row];
      for (int64_t position = 0; position < kContexts[row]; ++position) {
        int32_t& block = table_[row * kTable + position / kBlock];
        if (position % kBlock == 0) block = 1 + 7 * index++ % 37;
        const int64_t slot = block * kBlock + position % kBlock, heads = c_.num_kv_heads,
                      query = position - kContexts[row] + num_queries, token = kStarts[row] + query;
        for (Array* pages : {&k_, &v_}) pages->fill(slot * heads * c_.width, heads * c_.width);
        for (Array* scales : {&k_scale_, &v_scale_}) scales->fill(slot * heads, heads, 0x1p-7f);
        if (query < 0) continue;
        slots_[token] = static_cast<int32_t>(slot);
        last_seen_[token] =
            static_cast<int32_t>(position + (num_queries == kChunk && query < 12 ? 12 - query : 0));
        // In a tree the first token has two children, and the others follow the second.
        for (int64_t i = 0; i <= query; ++i)
          mask_[token * kChunk + i] = !c_.is_tree || i != 1 || query < 2;
      }
    }
    a_.block_table = table_, a_.slots = slots_;
    if (c_.sees_ahead) a_.last_seen = last_seen_;
    if (c_.is_tree) a_.tree_mask = mask_;
  }

  template <typename Run>
  Array attend(const Run& run) {
    Array out(c_.q_type, kStarts[4] * c_.num_heads * a_.value_width);
    a_.out = out.at(0);
    for (int64_t row = 0; row < 4; ++row)
      for (int64_t token = kStarts[row]; token < kStarts[row + 1]; ++token) run(row, token);
    return out;
  }

  Array attend_heads(int64_t at_once = 1 << 20) {
    return attend([&](int64_t row, int64_t token) {
      for (int64_t kv = 0; kv < c_.num_kv_heads; kv += at_once)
        kKernels.attend(a_, row, token, kv, std::min(kv + at_once, c_.num_kv_heads));
    });
  }

  // Computes the same in other units, and says which of them have other bits.
  std::string compare(const Array& expected) {
    std::string other_bits = hash_of(attend_heads(1)) == hash_of(expected) ? "" : "single heads, ";
    if (c_.is_tree) return other_bits;
    const int64_t most =
        a_.with_tiles ? kTokensOfTiles : kHeadsOfChunk / (c_.num_heads / c_.num_kv_heads);
    for (int64_t size : {int64_t{2}, int64_t{5}, int64_t{17}, most}) {
      if (size > most) continue;
      const Array out = attend([&](int64_t row, int64_t token) {
        const int64_t count = std::min<int64_t>(size, kStarts[row + 1] - token);
        if ((token - kStarts[row]) % size) return;
        for (int64_t kv = 0; kv < c_.num_kv_heads; ++kv)
          kKernels.attend_chunk(a_, row, token, count, kv);
      });
      if (hash_of(out) != hash_of(expected)) other_bits += std::to_string(size) + " tokens, ";
    }
    if (c_.sees_ahead) return other_bits;
    a_.tree_mask = mask_;
    if (hash_of(attend_heads()) != hash_of(expected)) other_bits += "a chain as a tree, ";
    a_.tree_mask = nullptr;
    return other_bits;
  }

  AttentionCase c_;
  Attention a_{};
  Array q_, k_new_, v_new_, k_, v_, k_scale_, v_scale_, sinks_, slopes_;
  int32_t table_[4 * kTable] = {}, slots_[kTokens] = {}, last_seen_[kTokens] = {};
  uint8_t mask_[kTokens * kChunk] = {};
};

void check_attention() {
  std::vector<AttentionCase> cases = {
      {"float16", kF16, kF16, 6, 2, 80},
      {"int8", kF32, kI8, 6, 2, 64},
      {"float8", kBF16, Type::kF8, 6, 2, 64},
      {"bfloat16, wide", kBF16, kBF16, 3, 3, 256},
      {"bfloat16, 80 wide", kBF16, kBF16, 4, 4, 80},
      {"bfloat16, 12 heads", kBF16, kBF16, 12, 1, 32},
      {"bfloat16, latents", kBF16, kBF16, 20, 1, 96, 64},
      {"int8, latents", kF32, kI8, 5, 1, 96, 64},
  };
  for (Type type : {kF32, kBF16})
    for (int64_t heads : {6, 20}) {
      const auto add = [&](const char* option, const auto& change) {
        const std::string name = name_of(type) + ", " + std::to_string(heads) + " heads, " + option;
        cases.push_back({name, type, type, heads, 2, 64});
        change(cases.back());
      };
      add("plain", [](AttentionCase&) {});
      add("window", [](AttentionCase& c) { c.window = 20; });
      add("chunk", [](AttentionCase& c) { c.chunk = 48; });
      add("sinks", [](AttentionCase& c) { c.has_sinks = true; });
      add("ALiBi and softcap", [](AttentionCase& c) { c.has_slopes = true, c.softcap = 2; });
      add("tree", [](AttentionCase& c) { c.is_tree = true; });
      add("tree, window", [](AttentionCase& c) { c.is_tree = c.has_slopes = true, c.window = 20; });
      add("ahead", [](AttentionCase& c) { c.sees_ahead = true; });
      add("NaN", [](AttentionCase& c) { c.has_nan = true; });
    }
  for (const AttentionCase& c : cases) AttentionStep(c).check();
}

// Three texts side by side, and each alone.
void check_bidirectional(int64_t width, int64_t reach) {
  constexpr int64_t kHeads = 4, kKeys = 2, kEnds[] = {0, 5, 75, 480};
  const int64_t numbers = kHeads * width, keys = kKeys * width;
  Array q = random_array(kF32, kEnds[3] * numbers), k = random_array(kF32, kEnds[3] * keys),
        v = random_array(kF32, kEnds[3] * keys), out(kF32, q.count()), alone = out;
  const auto attend = [&](int64_t before, int64_t begin, int64_t end, Array& to) {
    const Bidirectional a = {q.floats() + before * numbers,
                             k.floats() + before * keys,
                             v.floats() + before * keys,
                             to.floats() + before * numbers,
                             kHeads,
                             kKeys,
                             width,
                             0.5f,
                             reach};
    for (int64_t first = begin; first < end; first += kQueriesOfUnit)
      for (int64_t head = 0; head < kHeads; ++head)
        kBidirectional.attend(a, begin - before, end - before, first - before,
                              std::min(first + kQueriesOfUnit, end) - before, head);
  };
  for (int i = 0; i < 3; ++i) {
    attend(0, kEnds[i], kEnds[i + 1], out);
    attend(kEnds[i], kEnds[i], kEnds[i + 1], alone);
  }
  report("both ways, width " + std::to_string(width) + ", reach " + std::to_string(reach),
         hash_of(out), hash_of(out) == hash_of(alone) ? "" : "a text alone");
}

}  // namespace
}  // namespace jaxpage

int main() {
  const jaxpage::FlushSubnormals flushed;
  jaxpage::check_products();
  for (auto type : {jaxpage::Type::kF32, jaxpage::Type::kBF16})
    for (int64_t width : {77, 256}) jaxpage::check_rows(type, width);
  jaxpage::check_attention();
  for (int64_t width : {32, 80})
    for (int64_t reach : {-1, 8}) jaxpage::check_bidirectional(width, reach);
  std::printf("instructions of bfloat16 and int8: %d, %d; wrong: %d\n", jaxpage_instructions(false),
              jaxpage_instructions(true), jaxpage::num_wrong);
  return jaxpage::num_wrong > 0;
}
