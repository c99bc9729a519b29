// The kernels as XLA calls them: buffers are checked, and the units of work are shared among XLA's
// own threads.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "attention.h"
#include "bidirectional.h"
#include "packed.h"
#include "parallel.h"
#include "rows.h"
#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxpage {

namespace {

namespace ffi = xla::ffi;

bool type_of(ffi::DataType element_type, bool is_page, Type* type) {
  switch (element_type) {
    case ffi::DataType::F32: *type = Type::kF32; return true;
    case ffi::DataType::BF16: *type = Type::kBF16; return true;
    case ffi::DataType::F16: *type = Type::kF16; return true;
    case ffi::DataType::S8: *type = Type::kI8; return is_page;
    case ffi::DataType::U8: *type = Type::kF8; return is_page;
    default: return false;
  }
}

constexpr int64_t kNumbersOfUnit = 8192;  // fewer are not worth another thread
constexpr int64_t kHeadsInCache = 6144;   // numbers of queries, sums and scores
constexpr int64_t kQueriesOfChunk = 32;
constexpr int64_t kSumsInCache = 400'000;  // bytes of queries and sums

using Pages = ffi::Result<ffi::AnyBuffer>;
using Scales = ffi::Result<ffi::Buffer<ffi::F32>>;

// Returns the best instructions for words of this type that the processor has and the kernels are
// built for.
Instructions best_instructions(Type type) {
#if defined(__AVX512F__) && defined(__linux__)
  if (type == Type::kBF16 ? !__builtin_cpu_supports("avx512bf16")
                          : type != Type::kI8 || !__builtin_cpu_supports("avx512vnni"))
    return kNone;
  static const bool has_tiles = [] {
    unsigned a = 7, b = 0, c = 0, d = 0;
    asm volatile("cpuid" : "+a"(a), "+b"(b), "+c"(c), "+d"(d));
    // AMX's bfloat16, tiles, int8; and ARCH_REQ_XCOMP_PERM lets the process use the registers.
    const bool has = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);
    return has && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  }();
  return has_tiles ? kTiles : kDot;
#else
  return kNone;
#endif
}

// Makes rows from one on zero.
void clear_rows(void* rows, int64_t first, int64_t num_rows, int64_t bytes_of_row) {
  std::memset(static_cast<char*>(rows) + first * bytes_of_row, 0,
              (num_rows - first) * bytes_of_row);
}

// Reads the pages, after the writes of `slots` where there are any.
ffi::Error run_attention(ffi::ThreadPool& pool, Attention& a, ffi::AnyBuffer& q,
                         ffi::AnyBuffer& k_pages, ffi::Buffer<ffi::F32>& k_scale,
                         ffi::Buffer<ffi::F32>& v_scale, int64_t num_written,
                         ffi::Buffer<ffi::S32>& block_table, ffi::Buffer<ffi::S32>& context_len,
                         ffi::Buffer<ffi::S32>& query_start, ffi::Buffer<ffi::PRED>& tree_mask,
                         ffi::Buffer<ffi::S32>& last_seen, ffi::Buffer<ffi::F32>& sinks,
                         ffi::Buffer<ffi::F32>& slopes, ffi::AnyBuffer& out) {
  if (!type_of(q.element_type(), false, &a.query_type) ||
      !type_of(k_pages.element_type(), true, &a.page_type))
    return ffi::Error::InvalidArgument("the types of queries or pages are not known here");
  const auto qd = q.dimensions(), pd = k_pages.dimensions(), td = block_table.dimensions();
  if (qd.size() != 3 || pd.size() != 4 || td.size() != 2)
    return ffi::Error::InvalidArgument("wrong number of axes");
  if (qd[2] % 16 || qd[2] > kMaxHeadDim)
    return ffi::Error::InvalidArgument("no kernel for this head width");
  a.num_tokens = qd[0];
  a.num_heads = qd[1];
  a.head_dim = qd[2];
  const bool within_keys = a.value_width > 0;
  if (!within_keys) a.value_width = a.head_dim;
  if (a.value_width % 16 || a.value_width > a.head_dim)
    return ffi::Error::InvalidArgument("no kernel for this width of values");
  if (within_keys) a.v_pages = a.k_pages;
  a.num_rows = td[0];
  a.table_width = td[1];
  a.block_size = pd[1];
  a.num_kv_heads = pd[2];
  a.num_slots = pd[0] * pd[1];
  a.q = q.untyped_data();
  a.out = out.untyped_data();
  const bool quantized = k_scale.element_count() > 0;
  a.k_scale = quantized ? k_scale.typed_data() : nullptr;
  a.v_scale = within_keys ? a.k_scale : v_scale.typed_data();
  if (!quantized) a.v_scale = nullptr;
  a.block_table = block_table.typed_data();
  a.context_len = context_len.typed_data();
  a.query_start = query_start.typed_data();
  a.tree_mask = tree_mask.element_count() ? reinterpret_cast<const uint8_t*>(tree_mask.typed_data())
                                          : nullptr;
  a.mask_width = tree_mask.element_count() ? tree_mask.dimensions()[1] : 0;
  if (a.mask_width > kMaxDrafts)
    return ffi::Error::InvalidArgument("more query tokens of a row with a tree than fit");
  a.last_seen = last_seen.element_count() ? last_seen.typed_data() : nullptr;
  a.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  a.slopes = slopes.element_count() ? slopes.typed_data() : nullptr;
  int64_t num_queries = a.query_start[a.num_rows];
  if (num_queries > a.num_tokens) num_queries = a.num_tokens;
  const bool is_paired = a.query_type == Type::kBF16 && a.page_type == Type::kBF16 &&
                         a.head_dim % 32 == 0 && a.value_width % 32 == 0;
  a.with_tiles = is_paired && best_instructions(Type::kBF16) == kTiles;
  const Kernels& k = JAXPAGE_ISA::kKernels;
  run_in_parallel(pool, num_written, 16, [&](int64_t token) { k.write(a, token); });
  const int64_t item = a.num_heads * a.value_width * (a.query_type == Type::kF32 ? 4 : 2);
  clear_rows(a.out, num_queries, a.num_tokens, item);  // padding
  // A row of few queries reads its pages once, all key/value heads that lie side by side: as many
  // as leave work for every thread, and whose queries stay in the cache. The many queries of a
  // prompt's chunk find those of one head there, some queries at once.
  const int64_t group_size = a.num_heads / a.num_kv_heads;
  const int64_t heads_in_cache = kHeadsInCache / (std::min<int64_t>(group_size, kMaxHeads) *
                                                  (a.head_dim + a.value_width + 64));
  const int64_t heads_of_thread = num_queries * a.num_kv_heads / (2 * pool.num_threads());
  const int64_t side_by_side =
      std::clamp<int64_t>(std::min(heads_in_cache, heads_of_thread), 1, a.num_kv_heads);
  const auto ceil_divide = [](int64_t count, int64_t divisor) {
    return (count + divisor - 1) / divisor;
  };
  // Tiles read keys and values once for all queries of a unit, whose sums stay in the second cache.
  const int64_t bytes_of_query = group_size * (4 * a.value_width + 2 * a.head_dim);
  const auto tokens_of_tiles = [&](int64_t queries) {
    const int64_t of_thread = ceil_divide(queries * a.num_kv_heads, 2 * pool.num_threads());
    return std::clamp<int64_t>(
        std::min(kSumsInCache / bytes_of_query, ceil_divide(of_thread, 16) * 16), 1,
        kTokensOfTiles);
  };
  const auto tokens_of_chunk = [&](int64_t queries) -> int64_t {
    if (a.tree_mask) return 1;
    return a.with_tiles ? tokens_of_tiles(queries)
                        : std::max<int64_t>(1, kHeadsOfChunk / group_size);
  };
  // Tiles share already what two queries read.
  const int64_t few = a.with_tiles && !a.tree_mask ? 2 : kQueriesOfChunk;
  const auto heads_of_unit = [&](int64_t queries) { return queries < few ? side_by_side : 1; };
  const auto queries_of_unit = [&](int64_t queries) {
    return queries < few ? 1 : tokens_of_chunk(queries);
  };
  std::vector<int64_t> first_query(a.num_rows + 1), first_unit(a.num_rows + 1);
  for (int64_t row = 0; row < a.num_rows; ++row) {
    first_query[row + 1] = std::min<int64_t>(a.query_start[row + 1], num_queries);
    const int64_t queries = first_query[row + 1] - first_query[row];
    first_unit[row + 1] = first_unit[row] + ceil_divide(queries, queries_of_unit(queries)) *
                                                ceil_divide(a.num_kv_heads, heads_of_unit(queries));
  }
  run_in_parallel(pool, first_unit[a.num_rows], 1, [&](int64_t unit) {
    const int64_t row =
        std::upper_bound(first_unit.begin(), first_unit.end(), unit) - first_unit.begin() - 1;
    const int64_t queries = first_query[row + 1] - first_query[row], heads = heads_of_unit(queries),
                  at_once = queries_of_unit(queries);
    const int64_t unit_of_row = unit - first_unit[row], of_head = ceil_divide(queries, at_once),
                  kv_begin = unit_of_row / of_head * heads;
    const int64_t query = unit_of_row % of_head * at_once, token = first_query[row] + query;
    if (at_once > 1) k.attend_chunk(a, row, token, std::min(at_once, queries - query), kv_begin);
    else k.attend(a, row, token, kv_begin, std::min(kv_begin + heads, a.num_kv_heads));
  });
  return ffi::Error::Success();
}

ffi::Error write_and_attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k_new,
                            ffi::AnyBuffer v_new, ffi::AnyBuffer k_in, ffi::AnyBuffer v_in,
                            ffi::Buffer<ffi::F32> k_scale_in, ffi::Buffer<ffi::F32> v_scale_in,
                            ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::S32> block_table,
                            ffi::Buffer<ffi::S32> context_len, ffi::Buffer<ffi::S32> query_start,
                            ffi::Buffer<ffi::PRED> tree_mask, ffi::Buffer<ffi::S32> last_seen,
                            ffi::Buffer<ffi::F32> sinks, ffi::Buffer<ffi::F32> slopes,
                            ffi::Result<ffi::AnyBuffer> out, Pages k_pages, Pages v_pages,
                            Scales k_scale, Scales v_scale, float scale, float softcap,
                            int64_t window, int64_t chunk, int64_t value_width) {
  if (k_pages->untyped_data() != k_in.untyped_data() ||
      (v_in.element_count() && v_pages->untyped_data() != v_in.untyped_data()) ||
      (k_scale_in.element_count() &&
       (k_scale->untyped_data() != k_scale_in.untyped_data() ||
        (v_scale_in.element_count() && v_scale->untyped_data() != v_scale_in.untyped_data()))))
    return ffi::Error::InvalidArgument("the pages must be given away: they are written in place");
  if (k_new.element_type() != q.element_type() || v_new.element_type() != q.element_type())
    return ffi::Error::InvalidArgument("queries, keys and values must have one type");
  Attention a{};
  a.k_new = k_new.untyped_data();
  a.v_new = v_new.element_count() || !value_width ? v_new.untyped_data() : nullptr;
  a.slots = slots.typed_data();
  a.k_pages = k_in.untyped_data();
  a.v_pages = v_in.untyped_data();
  a.scale = scale;
  a.softcap = softcap;
  a.window = window;
  a.chunk = chunk;
  a.value_width = value_width;
  return run_attention(pool, a, q, k_in, k_scale_in, v_scale_in, slots.element_count(), block_table,
                       context_len, query_start, tree_mask, last_seen, sinks, slopes, *out);
}

ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k_pages,
                  ffi::AnyBuffer v_pages, ffi::Buffer<ffi::F32> k_scale,
                  ffi::Buffer<ffi::F32> v_scale, ffi::Buffer<ffi::S32> block_table,
                  ffi::Buffer<ffi::S32> context_len, ffi::Buffer<ffi::S32> query_start,
                  ffi::Buffer<ffi::PRED> tree_mask, ffi::Buffer<ffi::S32> last_seen,
                  ffi::Buffer<ffi::F32> sinks, ffi::Buffer<ffi::F32> slopes,
                  ffi::Result<ffi::AnyBuffer> out, float scale, float softcap, int64_t window,
                  int64_t chunk, int64_t value_width) {
  Attention a{};
  a.k_pages = k_pages.untyped_data();
  a.v_pages = v_pages.untyped_data();
  a.scale = scale;
  a.softcap = softcap;
  a.window = window;
  a.chunk = chunk;
  a.value_width = value_width;
  return run_attention(pool, a, q, k_pages, k_scale, v_scale, 0, block_table, context_len,
                       query_start, tree_mask, last_seen, sinks, slopes, *out);
}

ffi::Error attend_bidirectional(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q,
                                ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                                ffi::Buffer<ffi::S32> segments,
                                ffi::Result<ffi::Buffer<ffi::F32>> out, float scale,
                                int64_t reach) {
  Bidirectional a{};
  const auto qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions();
  if (qd.size() != 3 || kd.size() != 3 || vd.size() != 3 || kd[1] == 0 || qd[1] % kd[1] ||
      qd[0] != kd[0] || qd[2] != kd[2] || kd[1] != vd[1] || vd[0] != kd[0] || vd[2] != kd[2] ||
      qd[2] % 16 || segments.element_count() != static_cast<size_t>(qd[0]) ||
      out->element_count() != q.element_count())
    return ffi::Error::InvalidArgument("the shapes of queries, keys and values do not fit");
  a.q = q.typed_data();
  a.k = k.typed_data();
  a.v = v.typed_data();
  a.out = out->typed_data();
  a.num_heads = qd[1];
  a.num_kv_heads = kd[1];
  a.head_dim = qd[2];
  a.scale = scale;
  a.reach = reach;
  struct Unit {
    int64_t begin, end, first, last, head;
  };
  std::vector<Unit> units;
  const int32_t* segment = segments.typed_data();
  int64_t max_numbers = 1;
  for (int64_t begin = 0, end; begin < qd[0]; begin = end) {
    for (end = begin + 1; end < qd[0] && segment[end] == segment[begin];) ++end;
    if (segment[begin] < 0) {
      const int64_t width = a.num_heads * a.head_dim;
      std::memset(a.out + begin * width, 0, (end - begin) * width * sizeof(float));
      continue;
    }
    max_numbers = std::max(max_numbers, (end - begin) * a.head_dim);
    for (int64_t first = begin; first < end; first += kQueriesOfUnit)
      for (int64_t head = 0; head < a.num_heads; ++head)
        units.push_back({begin, end, first, std::min(first + kQueriesOfUnit, end), head});
  }
  const int64_t count = units.size();
  const int64_t at_once = std::clamp<int64_t>(
      std::min(kNumbersOfUnit / max_numbers, count / (4 * pool.num_threads())), 1, 16);
  run_in_parallel(pool, count, at_once, [&](int64_t index) {
    const Unit& unit = units[index];
    JAXPAGE_ISA::kBidirectional.attend(a, unit.begin, unit.end, unit.first, unit.last, unit.head);
  });
  return ffi::Error::Success();
}

// A product, and where the weights of its groups are.
struct Matmul {
  Packed p;
  // The weight, the scales and the zeros of a group are so many bytes after those of the one
  // before.
  int64_t num_groups, bytes_of_group, bytes_of_scales, bytes_of_zeros;
  // The rows of each group, which lie one group after the other; rows of none become zero. Null if
  // all rows are of one group.
  const int32_t* counts;
};

// Holds the words that products multiply by, of one product after the other, for the thread that
// calls.
class InputBuffers {
 public:
  // Makes room for the rows of a product, before any memory is given.
  void reserve(const Packed& p) {
    words_.resize(std::max<size_t>(words_.size(), p.num_rows * bytes_of_row(p) + 64));
    if (p.narrow) wide_.resize(std::max<size_t>(wide_.size(), p.num_rows * p.num_in));
    scales_.resize(std::max<size_t>(scales_.size(), p.num_rows));
    sums_.resize(std::max<size_t>(sums_.size(), p.num_rows));
  }

  // Gives a product its memory, and a phase that fills it where it needs one.
  void add_phase(Packed& p, std::vector<Phase>& phases) {
    if (p.narrow) p.x = wide_.data();
    p.words = p.x;
    p.row_scale = scales_.data();
    p.row_sum = sums_.data();
    const int64_t bytes = bytes_of_row(p);
    if (bytes == 0 && !p.narrow) return;
    char* words = words_.data();
    if (bytes) p.words = words;
    phases.push_back({p.num_rows, 16, [p, words, bytes](int64_t row) {
                        JAXPAGE_ISA::kPacked.prepare(p, row, words + row * bytes);
                      }});
  }

 private:
  static int64_t bytes_of_row(const Packed& p) { return JAXPAGE_ISA::kPacked.bytes_of_row(p); }

  std::vector<char> words_;
  std::vector<float> wide_;
  std::vector<float> scales_;
  std::vector<int32_t> sums_;
};

InputBuffers& input_buffers() {
  static thread_local InputBuffers of_thread;
  return of_thread;
}

// Adds the phases in which rows are multiplied.
void add_phases(Matmul m, std::vector<Phase>& phases) {
  Packed& p = m.p;
  const PackedKernels& k = JAXPAGE_ISA::kPacked;
  const auto ceil_divide = [](int64_t count, int64_t divisor) {
    return (count + divisor - 1) / divisor;
  };
  const int64_t num_panels = ceil_divide(p.num_out, kOutputsOfPanel);
  struct Group {
    int64_t index, row, end_row, end_unit;
  };
  std::vector<Group> groups;
  int64_t row = 0, num_units = 0;
  for (int64_t index = 0; index < m.num_groups; ++index) {
    const int64_t end = m.counts ? std::clamp(row + m.counts[index], row, p.num_rows) : p.num_rows;
    num_units += ceil_divide(end - row, kRowsAtOnce) * ceil_divide(num_panels, k.panels_at_once);
    if (end > row) groups.push_back({index, row, end, num_units});
    row = end;
  }
  clear_rows(p.out, row, p.num_rows, p.num_out * (p.out_is_float ? 4 : 2));
  p.num_rows = row;
  input_buffers().add_phase(p, phases);
  // Units of the same panels are neighbours, so that a thread reads these once.
  phases.push_back(
      {num_units, 1, [m, k, num_panels, ceil_divide, groups = std::move(groups)](int64_t unit) {
         auto group = groups.begin();
         while (group->end_unit <= unit) ++group;
         const int64_t blocks = ceil_divide(group->end_row - group->row, kRowsAtOnce);
         if (group != groups.begin()) unit -= (group - 1)->end_unit;
         const int64_t row = group->row + unit % blocks * kRowsAtOnce,
                       panel = unit / blocks * k.panels_at_once;
         const auto after = [&](const void* array, int64_t bytes) {
           return array ? static_cast<const char*>(array) + group->index * bytes : nullptr;
         };
         Packed group_packed = m.p;
         group_packed.panels = after(group_packed.panels, m.bytes_of_group);
         group_packed.scale = after(group_packed.scale, m.bytes_of_scales);
         group_packed.minimum = after(group_packed.minimum, m.bytes_of_scales);
         group_packed.zero = after(group_packed.zero, m.bytes_of_zeros);
         k.multiply(group_packed, row, std::min(row + kRowsAtOnce, group->end_row), panel,
                    std::min(panel + k.panels_at_once, num_panels));
       }});
}

// Rows of numbers, as an operation reads them.
struct Matrix {
  ffi::DataType type;
  const void* data;
  int64_t num_rows, width;
};

// Gives a product its inputs. Those of bfloat16 may be multiplied in float32.
bool read_inputs(Packed& p, const Matrix& x, bool in_float32) {
  p.num_rows = x.num_rows;
  p.num_in = x.width;
  p.x = x.data;
  if (in_float32 && x.type == ffi::DataType::BF16) {
    p.narrow = static_cast<const uint16_t*>(x.data);
    return true;
  }
  return x.type == (in_float32 ? ffi::DataType::F32 : ffi::DataType::BF16);
}

// Describes a product with a weight in panels whose scales are of outputs.
ffi::Error read_packed(Matmul& m, const Matrix& x, const ffi::AnyBuffer& panels,
                       const ffi::AnyBuffer& scale, ffi::AnyBuffer& out, int64_t instructions) {
  Packed& p = m.p;
  const auto pd = panels.dimensions(), od = out.dimensions();
  p.out_is_float = out.element_type() == ffi::DataType::F32;
  if (!type_of(panels.element_type(), true, &p.type) || p.type == Type::kF16 ||
      p.type == Type::kF8 || !read_inputs(p, x, p.type != Type::kBF16) ||
      (p.narrow && p.type == Type::kF32) ||
      (!p.out_is_float && out.element_type() != ffi::DataType::BF16) ||
      scale.element_type() != ffi::DataType::F32 || instructions > best_instructions(p.type))
    return ffi::Error::InvalidArgument("no kernel for a product of these types");
  const int64_t numbers = p.type == Type::kF32 ? 1 : p.type == Type::kBF16 ? 2 : 4;
  if (od.size() != 2 || pd.size() != 5 || od[0] != x.num_rows || pd[3] != kOutputsOfPanel ||
      pd[4] != numbers || (x.width + numbers - 1) / numbers != pd[2] ||
      (od[1] + kOutputsOfPanel - 1) / kOutputsOfPanel != pd[1] ||
      scale.element_count() != static_cast<size_t>(p.type == Type::kI8 ? pd[0] * od[1] : 0))
    return ffi::Error::InvalidArgument("the shapes of a weight in panels do not fit");
  p.instructions = static_cast<int>(instructions);
  p.panels = panels.untyped_data();
  p.out = out.untyped_data();
  p.scale = p.type == Type::kI8 ? scale.untyped_data() : nullptr;
  p.num_out = od[1];
  p.num_words = pd[2];
  m.num_groups = pd[0];
  m.bytes_of_group = panels.size_bytes() / pd[0];
  m.bytes_of_scales = scale.size_bytes() / pd[0];
  return ffi::Error::Success();
}

// Describes a product with codes in panels. Scales, zeros and minima are in panels as codes are;
// with `scale_row`, which all groups share, they are as they were.
ffi::Error read_coded(Matmul& m, const Matrix& x, const ffi::AnyBuffer& panels,
                      const ffi::AnyBuffer& scale, const ffi::AnyBuffer& zero,
                      const ffi::AnyBuffer& minimum, const ffi::Buffer<ffi::S32>* scale_row,
                      ffi::AnyBuffer& out, CodeFormat code, int64_t group_size,
                      int64_t instructions) {
  Packed& p = m.p;
  const auto pd = panels.dimensions(), sd = scale.dimensions(), od = out.dimensions();
  if (od.size() != 2 || pd.size() != 5 || sd.size() < 3)
    return ffi::Error::InvalidArgument("wrong number of axes");
  p.is_coded = true;
  p.code = code;
  p.group_size = group_size;
  p.num_out = od[1];
  p.num_groups = scale_row ? sd[sd.size() - 1] : sd[2];
  const int64_t codes = p.code == CodeFormat::kInt4 || p.code == CodeFormat::kFloat4 ? 2 : 1;
  p.out_is_float = out.element_type() == ffi::DataType::F32;
  if (!type_of(scale.element_type(), false, &p.scale_type) ||
      minimum.element_type() != scale.element_type() || zero.element_type() != ffi::DataType::F32 ||
      (scale_row && p.scale_type != Type::kF32) || instructions > best_instructions(Type::kBF16) ||
      !read_inputs(p, x, !instructions) ||
      (!p.out_is_float && out.element_type() != ffi::DataType::BF16))
    return ffi::Error::InvalidArgument("no kernel for a product of these types");
  if (od[0] != x.num_rows || pd[3] != kOutputsOfPanel || pd[4] != 1 || pd[2] * codes != p.num_in ||
      group_size % codes || (instructions && (p.num_in % 2 || group_size % 2)) ||
      (p.num_out + kOutputsOfPanel - 1) / kOutputsOfPanel != pd[1] ||
      (p.num_in + group_size - 1) / group_size != p.num_groups || sd[0] != pd[0] ||
      (scale_row ? scale_row->element_count() != static_cast<size_t>(p.num_out) : sd[1] != pd[1]) ||
      (zero.element_count() && zero.element_count() != scale.element_count()) ||
      (minimum.element_count() && minimum.element_count() != scale.element_count()))
    return ffi::Error::InvalidArgument("the shapes of a weight in panels do not fit");
  const auto data = [](const ffi::AnyBuffer& array) {
    return array.element_count() ? array.untyped_data() : nullptr;
  };
  p.instructions = static_cast<int>(instructions);
  p.num_words = p.num_in / 2;
  p.panels = panels.untyped_data();
  p.out = out.untyped_data();
  p.scale = scale.untyped_data();
  p.zero = data(zero);
  p.minimum = data(minimum);
  p.scale_row = scale_row ? scale_row->typed_data() : nullptr;
  m.num_groups = pd[0];
  m.bytes_of_group = panels.size_bytes() / pd[0];
  m.bytes_of_scales = scale.size_bytes() / pd[0];
  m.bytes_of_zeros = zero.size_bytes() / pd[0];
  return ffi::Error::Success();
}

// Multiplies rows by the weight of their group. Without counts there is one group of all rows.
ffi::Error multiply(ffi::ThreadPool& pool, Matmul& m, const ffi::Buffer<ffi::S32>& counts) {
  const size_t num_counts = counts.element_count();
  if (num_counts ? num_counts != static_cast<size_t>(m.num_groups) : m.num_groups != 1)
    return ffi::Error::InvalidArgument("the shapes of a weight in panels do not fit");
  m.counts = num_counts ? counts.typed_data() : nullptr;
  input_buffers().reserve(m.p);
  std::vector<Phase> phases;
  add_phases(m, phases);
  run_phases(pool, std::move(phases));
  return ffi::Error::Success();
}

// Returns the rows of an array with two axes; an array with others has no rows that fit.
Matrix as_matrix(const ffi::AnyBuffer& x) {
  const auto d = x.dimensions();
  return {x.element_type(), x.untyped_data(), d.size() == 2 ? d[0] : -1, d.size() == 2 ? d[1] : -1};
}

ffi::Error multiply_packed(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels,
                           ffi::AnyBuffer scale, ffi::Buffer<ffi::F32> bias,
                           ffi::Buffer<ffi::S32> counts, ffi::Result<ffi::AnyBuffer> out,
                           int64_t instructions, int64_t activation) {
  Matmul m{};
  if (auto error = read_packed(m, as_matrix(x), panels, scale, *out, instructions); error.failure())
    return error;
  if (bias.element_count() &&
      (bias.element_count() != static_cast<size_t>(m.p.num_out) || m.num_groups != 1))
    return ffi::Error::InvalidArgument("the shapes of a weight in panels do not fit");
  m.p.bias = bias.element_count() ? bias.typed_data() : nullptr;
  m.p.activation = static_cast<Activation>(activation);
  return multiply(pool, m, counts);
}

ffi::Error multiply_coded(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels,
                          ffi::AnyBuffer scale, ffi::AnyBuffer zero, ffi::AnyBuffer minimum,
                          ffi::Buffer<ffi::S32> scale_row, ffi::Buffer<ffi::S32> counts,
                          ffi::Result<ffi::AnyBuffer> out, int64_t code, int64_t group_size,
                          int64_t instructions) {
  Matmul m{};
  if (auto error = read_coded(m, as_matrix(x), panels, scale, zero, minimum,
                              scale_row.element_count() ? &scale_row : nullptr, *out,
                              static_cast<CodeFormat>(code), group_size, instructions);
      error.failure())
    return error;
  return multiply(pool, m, counts);
}

typedef void (*RowKernel)(const Rows&, int64_t row);

// Gives rows their memory, of the same type before and after.
ffi::Error set_arrays(Rows& p, ffi::DataType type, const void* x, ffi::AnyBuffer& out) {
  if (!type_of(type, false, &p.type) || p.type == Type::kF16 || out.element_type() != type)
    return ffi::Error::InvalidArgument("no kernel for rows of these types");
  p.x = x;
  p.out = out.untyped_data();
  return ffi::Error::Success();
}

Phase make_phase(const Rows& p, RowKernel kernel, int64_t num_rows) {
  return {num_rows, std::max<int64_t>(1, kNumbersOfUnit / std::max<int64_t>(1, p.width)),
          [p, kernel](int64_t row) { kernel(p, row); }};
}

ffi::Error run_rows(ffi::ThreadPool& pool, Rows& p, RowKernel kernel, int64_t num_rows,
                    ffi::AnyBuffer& x, ffi::Result<ffi::AnyBuffer>& out) {
  if (auto error = set_arrays(p, x.element_type(), x.untyped_data(), *out); error.failure())
    return error;
  run_phases(pool, {make_phase(p, kernel, num_rows)});
  return ffi::Error::Success();
}

ffi::Error gate(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out,
                int64_t activation) {
  Rows p{};
  const auto xd = x.dimensions(), od = out->dimensions();
  if (xd.size() != 2 || od.size() != 2 || xd[0] != od[0] || xd[1] != 2 * od[1])
    return ffi::Error::InvalidArgument("the shapes of gates do not fit");
  p.width = od[1];
  p.activation = static_cast<Activation>(activation);
  return run_rows(pool, p, JAXPAGE_ISA::kRows.gate, xd[0], x, out);
}

ffi::Error norm_rows(ffi::ThreadPool& pool, Rows& p, ffi::AnyBuffer& x, ffi::AnyBuffer& scale,
                     ffi::Result<ffi::AnyBuffer>& out, float epsilon, float offset) {
  const auto xd = x.dimensions();
  if (xd.size() != 2 || out->element_count() != x.element_count() ||
      scale.element_count() != static_cast<size_t>(xd[1]) ||
      !type_of(scale.element_type(), false, &p.scale_type))
    return ffi::Error::InvalidArgument("the shapes of a norm do not fit");
  p.width = xd[1];
  p.scale = scale.untyped_data();
  p.epsilon = epsilon;
  p.offset = offset;
  return run_rows(pool, p, JAXPAGE_ISA::kRows.rms_norm, xd[0], x, out);
}

ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                    ffi::Result<ffi::AnyBuffer> out, float epsilon, float offset) {
  Rows p{};
  return norm_rows(pool, p, x, scale, out, epsilon, offset);
}

ffi::Error add_and_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer added,
                        ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> sum,
                        ffi::Result<ffi::AnyBuffer> out, float epsilon, float offset) {
  Rows p{};
  for (const auto* same : {&added, &*sum})
    if (same->element_count() != x.element_count() || same->element_type() != x.element_type())
      return ffi::Error::InvalidArgument("the shapes of a sum do not fit");
  p.added = added.untyped_data();
  p.sum = sum->untyped_data();
  return norm_rows(pool, p, x, scale, out, epsilon, offset);
}

// Where `added` (and with it the sum), the scale or the bias are not there, they have no elements.
ffi::Error layer_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer added,
                      ffi::AnyBuffer scale, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> sum,
                      ffi::Result<ffi::AnyBuffer> out, float epsilon, float offset) {
  Rows p{};
  const auto xd = x.dimensions();
  const size_t count = x.element_count(), width = xd.size() == 2 ? xd[1] : 0;
  const auto fits = [](const ffi::AnyBuffer& array, size_t size, const ffi::AnyBuffer& like) {
    return array.element_count() == 0 ||
           (array.element_count() == size && array.element_type() == like.element_type());
  };
  if (xd.size() != 2 || out->element_count() != count || !fits(added, count, x) ||
      !fits(*sum, added.element_count(), x) || !fits(scale, width, scale) ||
      !fits(bias, width, scale) || !type_of(scale.element_type(), false, &p.scale_type))
    return ffi::Error::InvalidArgument("the shapes of a norm do not fit");
  const auto data = [](ffi::AnyBuffer& array) {
    return array.element_count() ? array.untyped_data() : nullptr;
  };
  p.width = width;
  p.added = data(added);
  p.sum = data(*sum);
  p.scale = data(scale);
  p.bias = data(bias);
  p.epsilon = epsilon;
  p.offset = offset;
  return run_rows(pool, p, JAXPAGE_ISA::kRows.layer_norm, xd[0], x, out);
}

ffi::Error rotate_heads(ffi::ThreadPool& pool, Rows& p, int64_t num_tokens, ffi::AnyBuffer& x,
                        ffi::Buffer<ffi::F32>& cos, ffi::Buffer<ffi::F32>& sin,
                        ffi::Result<ffi::AnyBuffer>& out) {
  const auto cd = cos.dimensions(), od = out->dimensions();
  const int64_t heads_of_token = p.num_heads + 2 * p.num_keys;
  if (cd.size() != 2 || cd[0] != num_tokens || 2 * cd[1] > p.width ||
      sin.element_count() != cos.element_count() || od.size() != 3 || od[0] != num_tokens ||
      od[1] != p.num_heads || od[2] != p.width ||
      x.element_count() != static_cast<size_t>(num_tokens * heads_of_token * p.width))
    return ffi::Error::InvalidArgument("the shapes of a rotation do not fit");
  p.num_pairs = cd[1];
  p.cos = cos.typed_data();
  p.sin = sin.typed_data();
  return run_rows(pool, p, JAXPAGE_ISA::kRows.rotate, num_tokens * heads_of_token, x, out);
}

ffi::Error rotate(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> cos,
                  ffi::Buffer<ffi::F32> sin, ffi::Result<ffi::AnyBuffer> out) {
  Rows p{};
  const auto xd = x.dimensions();
  if (xd.size() != 3) return ffi::Error::InvalidArgument("the shapes of a rotation do not fit");
  p.num_heads = xd[1];
  p.width = xd[2];
  return rotate_heads(pool, p, xd[0], x, cos, sin, out);
}

ffi::Error split_and_rotate(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> cos,
                            ffi::Buffer<ffi::F32> sin, ffi::Result<ffi::AnyBuffer> queries,
                            ffi::Result<ffi::AnyBuffer> keys, ffi::Result<ffi::AnyBuffer> values) {
  Rows p{};
  const auto xd = x.dimensions(), qd = queries->dimensions(), kd = keys->dimensions();
  if (xd.size() != 2 || qd.size() != 3 || kd.size() != 3)
    return ffi::Error::InvalidArgument("the shapes of a rotation do not fit");
  for (const auto* each : {&*keys, &*values})
    if (each->element_count() != static_cast<size_t>(xd[0] * kd[1] * qd[2]) ||
        each->element_type() != x.element_type())
      return ffi::Error::InvalidArgument("the shapes of keys and values do not fit");
  p.num_heads = qd[1];
  p.num_keys = kd[1];
  p.width = qd[2];
  p.keys = keys->untyped_data();
  p.values = values->untyped_data();
  return rotate_heads(pool, p, xd[0], x, cos, sin, queries);
}

// Names the operation of a stage, on the rows that the one before it made.
enum class Operation : int64_t {
  kMultiply,    // takes panels, scales, zeros and minima
  kNorm,        // takes scales
  kAddAndNorm,  // takes rows and scales; gives sums and normed sums
  kGate,
  kAdd  // adds the sums of the last kAddAndNorm
};
constexpr size_t kNumArgs[] = {4, 1, 2, 0, 0}, kNumRets[] = {1, 1, 2, 1, 1};

struct Stage {
  Operation operation;
  // A product has the code (-1 for a weight of numbers or of int8), the inputs that share a scale,
  // and the instructions; a gate has the activation.
  int64_t numbers[3];
};

// Reads the stages of a fusion and their arrays, and makes phases of them.
class Fusion {
 public:
  // Rows from `num_rows` on are padding, whose results are zero.
  Fusion(const ffi::AnyBuffer& x, int64_t num_rows, const ffi::RemainingArgs& args,
         const ffi::RemainingRets& rets, float epsilon, float offset)
      : args_(args),
        rets_(rets),
        x_(as_matrix(x)),
        num_rows_(std::clamp<int64_t>(num_rows, 0, std::max<int64_t>(0, x_.num_rows))),
        epsilon_(epsilon),
        offset_(offset) {}

  ffi::Error read(const Stage& stage) {
    const size_t operation = static_cast<size_t>(stage.operation);
    if (operation > static_cast<size_t>(Operation::kAdd) ||
        next_arg_ + kNumArgs[operation] > args_.size() ||
        next_ret_ + kNumRets[operation] > rets_.size())
      return ffi::Error::InvalidArgument("a fusion lacks arrays");
    ffi::AnyBuffer out = ret(kNumRets[operation] - 1);
    if (auto error = stage.operation == Operation::kMultiply ? read_matmul(stage, out)
                                                             : read_rows(stage, out);
        error.failure())
      return error;
    for (size_t i = 0; i < kNumRets[operation]; ++i)
      if (x_.num_rows > 0)
        clear_rows(ret(i).untyped_data(), num_rows_, x_.num_rows,
                   ret(i).size_bytes() / x_.num_rows);
    next_arg_ += kNumArgs[operation];
    next_ret_ += kNumRets[operation];
    x_ = as_matrix(out);
    return ffi::Error::Success();
  }

  // All products are prepared in the same memory, one after the other.
  std::vector<Phase> phases() const {
    for (const Part& part : parts_)
      if (!part.kernel) input_buffers().reserve(part.matmul.p);
    std::vector<Phase> phases;
    for (const Part& part : parts_) {
      if (part.kernel) phases.push_back(make_phase(part.rows, part.kernel, num_rows_));
      else add_phases(part.matmul, phases);
    }
    return phases;
  }

 private:
  struct Part {
    Matmul matmul;
    Rows rows;
    RowKernel kernel;  // null for a product
  };

  ffi::AnyBuffer arg(size_t i) const { return *args_.get<ffi::AnyBuffer>(next_arg_ + i); }
  ffi::AnyBuffer ret(size_t i) const { return **rets_.get<ffi::AnyBuffer>(next_ret_ + i); }

  ffi::Error read_matmul(const Stage& stage, ffi::AnyBuffer& out) {
    Matmul m{};
    const auto [code, group_size, instructions] = stage.numbers;
    if (auto error = code < 0 ? read_packed(m, x_, arg(0), arg(1), out, instructions)
                              : read_coded(m, x_, arg(0), arg(1), arg(2), arg(3), nullptr, out,
                                           static_cast<CodeFormat>(code), group_size, instructions);
        error.failure())
      return error;
    if (m.num_groups != 1)
      return ffi::Error::InvalidArgument("the shapes of a weight in panels do not fit");
    m.p.num_rows = num_rows_;
    parts_.push_back({m, {}, nullptr});
    return ffi::Error::Success();
  }

  ffi::Error read_rows(const Stage& stage, ffi::AnyBuffer& out) {
    const RowKernels& k = JAXPAGE_ISA::kRows;
    RowKernel kernel = k.rms_norm;
    Rows p{};
    p.width = stage.operation == Operation::kGate ? x_.width / 2 : x_.width;
    p.epsilon = epsilon_;
    p.offset = offset_;
    if (!have_rows(out, p.width))
      return ffi::Error::InvalidArgument("the shapes of a fusion do not fit");
    if (stage.operation == Operation::kGate) {
      kernel = k.gate;
      p.activation = static_cast<Activation>(stage.numbers[0]);
    } else if (stage.operation == Operation::kAdd) {
      if (!sum_ || sum_width_ != p.width)
        return ffi::Error::InvalidArgument("a fusion lacks a sum");
      kernel = k.add;
      p.added = sum_;
      p.sum = out.untyped_data();
    } else {
      const ffi::AnyBuffer scale = arg(kNumArgs[static_cast<size_t>(stage.operation)] - 1);
      if (scale.element_count() != static_cast<size_t>(p.width) ||
          !type_of(scale.element_type(), false, &p.scale_type))
        return ffi::Error::InvalidArgument("the shapes of a norm do not fit");
      p.scale = scale.untyped_data();
    }
    if (stage.operation == Operation::kAddAndNorm) {
      const ffi::AnyBuffer added = arg(0);
      ffi::AnyBuffer both = ret(0);
      if (!have_rows(added, p.width) || !have_rows(both, p.width))
        return ffi::Error::InvalidArgument("the shapes of a sum do not fit");
      p.added = added.untyped_data();
      p.sum = sum_ = both.untyped_data();
      sum_width_ = p.width;
    }
    parts_.push_back({{}, p, kernel});
    return set_arrays(parts_.back().rows, x_.type, x_.data, out);
  }

  bool have_rows(const ffi::AnyBuffer& array, int64_t width) const {
    const Matrix numbers = as_matrix(array);
    return numbers.type == x_.type && numbers.num_rows == x_.num_rows && numbers.width == width;
  }

  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
  size_t next_arg_ = 0, next_ret_ = 0;
  Matrix x_;  // what the last stage made
  int64_t num_rows_;
  void* sum_ = nullptr;
  int64_t sum_width_ = 0;
  float epsilon_, offset_;
  std::vector<Part> parts_;
};

// Computes stages one after the other, each as it is computed alone, in the phases of one call: the
// threads stay together, and XLA starts no operation in between.
ffi::Error run_fusion(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> num_rows,
                      ffi::RemainingArgs args, ffi::RemainingRets rets,
                      ffi::Span<const int64_t> stages, float epsilon, float offset) {
  const bool has_padding = num_rows.element_count();
  Fusion fusion(x, has_padding ? *num_rows.typed_data() : as_matrix(x).num_rows, args, rets,
                epsilon, offset);
  constexpr size_t kNumbers = sizeof(Stage) / sizeof(int64_t);
  for (size_t i = 0; i + kNumbers <= stages.size(); i += kNumbers) {
    const int64_t* s = stages.begin() + i;
    if (auto error = fusion.read({static_cast<Operation>(s[0]), {s[1], s[2], s[3]}});
        error.failure())
      return error;
  }
  run_phases(pool, fusion.phases());
  return ffi::Error::Success();
}

}  // namespace

extern "C" int jaxpage_instructions(bool of_int8) {
  return best_instructions(of_int8 ? Type::kI8 : Type::kBF16);
}

#define JAXPAGE_READ(binding)          \
  binding.Arg<ffi::Buffer<ffi::S32>>() \
      .Arg<ffi::Buffer<ffi::S32>>()    \
      .Arg<ffi::Buffer<ffi::S32>>()    \
      .Arg<ffi::Buffer<ffi::PRED>>()   \
      .Arg<ffi::Buffer<ffi::S32>>()    \
      .Arg<ffi::Buffer<ffi::F32>>()    \
      .Arg<ffi::Buffer<ffi::F32>>()    \
      .Ret<ffi::AnyBuffer>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_write_and_attend, write_and_attend,
                              JAXPAGE_READ(ffi::Ffi::Bind()
                                               .Ctx<ffi::ThreadPool>()
                                               .Arg<ffi::AnyBuffer>()
                                               .Arg<ffi::AnyBuffer>()
                                               .Arg<ffi::AnyBuffer>()
                                               .Arg<ffi::AnyBuffer>()
                                               .Arg<ffi::AnyBuffer>()
                                               .Arg<ffi::Buffer<ffi::F32>>()
                                               .Arg<ffi::Buffer<ffi::F32>>()
                                               .Arg<ffi::Buffer<ffi::S32>>())
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunk")
                                  .Attr<int64_t>("value_width"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_attend, attend,
                              JAXPAGE_READ(ffi::Ffi::Bind()
                                               .Ctx<ffi::ThreadPool>()
                                               .Arg<ffi::AnyBuffer>()
                                               .Arg<ffi::AnyBuffer>()
                                               .Arg<ffi::AnyBuffer>()
                                               .Arg<ffi::Buffer<ffi::F32>>()
                                               .Arg<ffi::Buffer<ffi::F32>>())
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("chunk")
                                  .Attr<int64_t>("value_width"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_attend_bidirectional, attend_bidirectional,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("reach"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_multiply_packed, multiply_packed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("instructions")
                                  .Attr<int64_t>("activation"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_multiply_coded, multiply_coded,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("code")
                                  .Attr<int64_t>("group_size")
                                  .Attr<int64_t>("instructions"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_run_fusion, run_fusion,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("stages")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_gate, gate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("activation"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_rms_norm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_add_and_norm, add_and_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_layer_norm, layer_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_rotate, rotate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpage_split_and_rotate, split_and_rotate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

}  // namespace jaxpage
