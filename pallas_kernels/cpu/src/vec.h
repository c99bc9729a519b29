// Vectors of 16 numbers of 32 bits: the same operations in the same order on every instruction set.
//
// A library is compiled for one instruction set (JAXPAGE_ISA). GCC keeps vectors that are longer
// than the processor's in memory, and takes each number out of them where it shuffles or selects.
// So such a vector is an array of the processor's own, which stay in registers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jaxpage {
namespace JAXPAGE_ISA {

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kBytes = 64;  // of the processor's vectors
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kNativeLanes = kBytes / 4, kParts = kLanes / kNativeLanes;

// The processor's own vectors, in GCC's and Clang's vector extension.
typedef float Floats __attribute__((vector_size(kBytes)));
typedef int32_t Ints __attribute__((vector_size(kBytes)));
typedef uint32_t Words __attribute__((vector_size(kBytes)));

template <typename Native>
struct Long {
  Native part[kParts];
  auto operator[](int lane) const { return part[lane / kNativeLanes][lane % kNativeLanes]; }
};

template <typename Native>
using Sixteen = typename std::conditional<kParts == 1, Native, Long<Native>>::type;
typedef Sixteen<Floats> Vec;
typedef Sixteen<Ints> Int;
typedef Sixteen<Words> Bits;

template <typename Native>
inline Native part_of(const Long<Native>& x, int i) {
  return x.part[i];
}
template <typename Native>
inline Native part_of(Native x, int) {
  return x;
}

// Returns a vector with the parts run(0), run(1), ...
template <typename Run, int... i>
inline auto join_parts(const Run& run, std::integer_sequence<int, i...>) {
  if constexpr (kParts == 1) return run(0);
  else return Long<decltype(run(0))>{run(i)...};
}
template <typename Run>
inline auto map_parts(const Run& run) {
  return join_parts(run, std::make_integer_sequence<int, kParts>());
}

#define JAXPAGE_BY_PARTS(op)                                                             \
  template <typename Native, typename Other>                                             \
  inline auto operator op(const Long<Native>& a, const Long<Other>& b) {                 \
    return map_parts([&](int i) { return a.part[i] op b.part[i]; });                     \
  }                                                                                      \
  template <typename Native, typename Number,                                            \
            typename = typename std::enable_if<std::is_arithmetic<Number>::value>::type> \
  inline auto operator op(const Long<Native>& a, Number b) {                             \
    return map_parts([&](int i) { return a.part[i] op b; });                             \
  }
JAXPAGE_BY_PARTS(+)
JAXPAGE_BY_PARTS(-)
JAXPAGE_BY_PARTS(*)
JAXPAGE_BY_PARTS(/)
JAXPAGE_BY_PARTS(&)
JAXPAGE_BY_PARTS(|)
JAXPAGE_BY_PARTS(<<)
JAXPAGE_BY_PARTS(>>)
JAXPAGE_BY_PARTS(<)
JAXPAGE_BY_PARTS(>)
JAXPAGE_BY_PARTS(>=)
JAXPAGE_BY_PARTS(==)
JAXPAGE_BY_PARTS(!=)
#undef JAXPAGE_BY_PARTS

template <typename Native>
inline auto operator-(const Long<Native>& a) {
  return map_parts([&](int i) { return -a.part[i]; });
}
template <typename Native>
inline auto& operator+=(Long<Native>& a, const Long<Native>& b) {
  return a = a + b;
}
template <typename Native>
inline auto& operator-=(Long<Native>& a, const Long<Native>& b) {
  return a = a - b;
}
template <typename Native>
inline auto& operator*=(Long<Native>& a, const Long<Native>& b) {
  return a = a * b;
}

// Reads a number or vector as its bytes lie in memory.
template <typename Raw>
inline Raw raw_at(const void* from) {
  if constexpr (kParts > 1 && sizeof(Raw) == 4 * kLanes) {
    return map_parts([&](int i) {
      return raw_at<decltype(part_of(Raw(), 0))>(static_cast<const char*>(from) + i * kBytes);
    });
  } else {
    Raw raw;
    std::memcpy(&raw, from, sizeof(raw));
    return raw;
  }
}

// These take the bits as they are.
template <typename From>
inline Vec as_float(const From& x) {
  return map_parts([&](int i) { return (Floats)part_of(x, i); });
}
template <typename From>
inline Int as_int(const From& x) {
  return map_parts([&](int i) { return (Ints)part_of(x, i); });
}
template <typename From>
inline Bits as_bits(const From& x) {
  return map_parts([&](int i) { return (Words)part_of(x, i); });
}
// These convert numbers.
inline Vec to_float(const Int& x) {
  return map_parts([&](int i) { return __builtin_convertvector(part_of(x, i), Floats); });
}
inline Int to_int(const Vec& x) {
  return map_parts([&](int i) { return __builtin_convertvector(part_of(x, i), Ints); });
}

// Returns a vector of this number. `Floats{} + x` would add zero to it: that makes 0 of -0, and so
// it is an addition.
inline Floats splat_part(float x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (Floats)_mm256_set1_ps(x);
#else
  return Floats{x, x, x, x};
#endif
}
inline Vec splat(float x) {
  return map_parts([&](int) { return splat_part(x); });
}

inline Vec lane_indices() {
  static constexpr float kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return raw_at<Vec>(kNumbers);
}

inline Vec select(const Int& mask, const Vec& a, const Vec& b) {
  return map_parts([&](int i) { return part_of(mask, i) ? part_of(a, i) : part_of(b, i); });
}
inline Vec max(const Vec& a, const Vec& b) { return select(a > b, a, b); }

// Returns x * w + sum, rounded once.
inline Floats multiply_add_part(Floats x, Floats w, Floats sum) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sum);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sum);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)w);
#else
  for (int i = 0; i < kNativeLanes; ++i) sum[i] = __builtin_fmaf(x[i], w[i], sum[i]);
  return sum;
#endif
}
// Returns a * b + c, rounded once.
inline Vec multiply_add(const Vec& a, const Vec& b, const Vec& c) {
  return map_parts(
      [&](int i) { return multiply_add_part(part_of(a, i), part_of(b, i), part_of(c, i)); });
}

// Reads integers of 8 or 16 bits and makes those of 32 bits of them. GCC 12 makes scalar
// conversions of __builtin_convertvector for some of them.
#if defined(__AVX512F__)
inline Ints widen_part(const int8_t* x) { return (Ints)_mm512_cvtepi8_epi32(raw_at<__m128i>(x)); }
inline Ints widen_part(const uint8_t* x) { return (Ints)_mm512_cvtepu8_epi32(raw_at<__m128i>(x)); }
inline Ints widen_part(const uint16_t* x) {
  return (Ints)_mm512_cvtepu16_epi32(raw_at<__m256i>(x));
}
#elif defined(__AVX2__)
inline Ints widen_part(const int8_t* x) {
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
}
inline Ints widen_part(const uint8_t* x) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
}
inline Ints widen_part(const uint16_t* x) {
  return (Ints)_mm256_cvtepu16_epi32(raw_at<__m128i>(x));
}
#else
template <typename Number>
inline Ints widen_part(const Number* x) {
  typedef Number Numbers __attribute__((vector_size(kNativeLanes * sizeof(Number))));
  return __builtin_convertvector(raw_at<Numbers>(x), Ints);
}
#endif
template <typename Number>
inline Int widen(const Number* x) {
  return map_parts([&](int i) { return widen_part(x + i * kNativeLanes); });
}

#if defined(__AVX2__)
// Reads as many bytes as a vector of the processor has numbers.
inline __m128i bytes_at(const void* from) {
  return kNativeLanes == kLanes ? raw_at<__m128i>(from)
                                : _mm_loadl_epi64(static_cast<const __m128i*>(from));
}

// Makes pairs of 16 bits of numbers of eight bits.
inline Words widen_pairs(__m128i low, __m128i high) {
  const __m128i first = _mm_unpacklo_epi8(low, high);
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(low, high), first));
#else
  return (Words)_mm256_cvtepi8_epi16(first);
#endif
}
#endif

// Loads a vector of numbers as they are stored.
template <typename Stored>
struct Load;

struct F32 {
  typedef float type;
};
struct BF16 {
  typedef uint16_t type;
};
struct F16 {
  typedef uint16_t type;
};
struct I8 {
  typedef int8_t type;
};
struct F8 {  // float8_e4m3fn, as its bits
  typedef uint8_t type;
  static Floats decode(Words bits) {
    const Words sign = (bits & 0x80u) << 24, magnitude = bits & 0x7fu;
    const Floats subnormal = __builtin_convertvector((Ints)magnitude, Floats) * 0x1p-9f;
    Floats value = magnitude < 8u ? subnormal : (Floats)((magnitude << 20) + (120u << 23));
    value = magnitude == 0x7fu ? (Floats)(Words{} + 0x7fc00000u) : value;
    return (Floats)((Words)value | sign);
  }
};

template <>
struct Load<F32> {
  static Vec at(const float* x) { return raw_at<Vec>(x); }
};

template <>
struct Load<BF16> {
  static Vec at(const uint16_t* x) { return as_float(widen(x) << 16); }
};

template <>
struct Load<F16> {
  static Vec at(const uint16_t* x) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(raw_at<__m256i>(x));
#elif defined(__F16C__)
    return map_parts([&](int i) { return (Floats)_mm256_cvtph_ps(raw_at<__m128i>(x + 8 * i)); });
#else
    // Subnormal numbers are made of integers: XLA's threads may take subnormal operands for zero.
    Bits bits = as_bits(widen(x));
    Bits sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    Bits normal = (magnitude << 13) + (112u << 23);
    Vec subnormal = to_float(as_int(magnitude)) * splat(0x1p-24f);
    Bits special = (magnitude << 13) | 0x7f800000u;
    Vec value = select(magnitude < 0x400u, subnormal, as_float(normal));
    value = select(magnitude >= 0x7c00u, as_float(special), value);
    return as_float(as_bits(value) | sign);
#endif
  }
};

// Returns what `Load<F16>` returns, for one number.
static inline float float_of(uint16_t half) {
#if defined(__F16C__)
  return _cvtsh_ss(half);
#else
  uint16_t stored[kLanes] = {half};
  return Load<F16>::at(stored)[0];
#endif
}

static inline float float_of_bfloat16(uint16_t number) {
  const uint32_t bits = uint32_t{number} << 16;
  return raw_at<float>(&bits);
}

template <>
struct Load<I8> {
  static Vec at(const int8_t* x) { return to_float(widen(x)); }
};

template <>
struct Load<F8> {
  static Vec at(const uint8_t* x) {
    return map_parts([&](int i) { return F8::decode((Words)widen_part(x + i * kNativeLanes)); });
  }
};

// Stores the lower halves of words.
inline void narrow_part(Words words, uint16_t* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i packed = _mm256_packus_epi32((__m256i)words, (__m256i)words);
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(ordered));
#else
  typedef uint16_t Halves __attribute__((vector_size(kBytes / 2)));
  const Halves halves = __builtin_convertvector(words, Halves);
  std::memcpy(to, &halves, sizeof(halves));
#endif
}

// Stores numbers rounded to the nearest, ties to even.
template <typename Stored>
struct Store;

template <>
struct Store<F32> {
  // By parts: a copy in shorter pieces could not be read again as whole vectors for some cycles.
  static void at(float* x, const Vec& value) {
    for (int i = 0; i < kParts; ++i) {
      const Floats part = part_of(value, i);
      std::memcpy(x + i * kNativeLanes, &part, kBytes);
    }
  }
};

template <>
struct Store<BF16> {
  static void at(uint16_t* x, Vec value) {
    Bits bits = as_bits(value);
    Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    rounded = as_bits(select((bits & 0x7fffffffu) > 0x7f800000u, as_float((bits >> 16) | 0x40u),
                             as_float(rounded)));
    for (int i = 0; i < kParts; ++i) narrow_part(part_of(rounded, i), x + i * kNativeLanes);
  }
};

static inline uint16_t half_of(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // from 65520 on
  if (magnitude < 0x38800000u) {  // subnormal: the sum rounds where the last bit stands
    float shifted;
    std::memcpy(&shifted, &magnitude, 4);
    shifted += 0.5f;
    uint32_t moved;
    std::memcpy(&moved, &shifted, 4);
    return sign | (moved - 0x3f000000u);
  }
  magnitude += 0xc8000fffu + ((magnitude >> 13) & 1u);
  return sign | (magnitude >> 13);
}

template <>
struct Store<F16> {
  static void at(uint16_t* x, Vec value) {
    for (int i = 0; i < kLanes; ++i) x[i] = half_of(value[i]);
  }
};

// Rounds a number up to 448 to float8_e4m3fn: to the nearest, ties to even.
static inline uint8_t float8_of(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  uint32_t sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x43e80000u) return sign | 0x7fu;  // above 464, or no number
  if (magnitude < 0x3c800000u) {  // subnormal: the sum rounds where the last bit stands
    float shifted;
    std::memcpy(&shifted, &magnitude, 4);
    shifted += 16384.0f;
    std::memcpy(&magnitude, &shifted, 4);
    return sign | (magnitude - 0x46800000u);
  }
  magnitude -= 120u << 23;
  magnitude += 0x7ffffu + ((magnitude >> 20) & 1u);
  return sign | (magnitude >> 20);
}

// Returns lanes of both vectors; those of b have the numbers from kNativeLanes.
template <int... lanes>
inline Floats shuffle(Floats a, Floats b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, lanes...);
#else
  return __builtin_shuffle(a, b, Ints{lanes...});  // GCC has clang's function from version 12
#endif
}
typedef std::make_integer_sequence<int, kNativeLanes> NativeLanes;

template <int step, bool is_high, int... lane>
inline Floats zip_part(Floats a, Floats b, std::integer_sequence<int, lane...>) {
  return shuffle<(lane & step ? kNativeLanes + lane - !is_high * step : lane + is_high * step)...>(
      a, b);
}

// Divides the lanes of two vectors into groups of `step`, and returns the even groups of both in
// turns, or the odd ones.
template <int step, bool is_high>
inline Vec zip(const Vec& a, const Vec& b) {
  return map_parts([&](int i) {
    if constexpr (step < kNativeLanes) {
      return zip_part<step, is_high>(part_of(a, i), part_of(b, i), NativeLanes());
    } else {
      constexpr int kStep = step / kNativeLanes;
      return i & kStep ? part_of(b, i - !is_high * kStep) : part_of(a, i + is_high * kStep);
    }
  });
}

template <int step>
inline void add_halves(Vec* v) {
  for (int i = 0; i < step; ++i)
    v[i] = zip<step, false>(v[i], v[i + step]) + zip<step, true>(v[i], v[i + step]);
}

// Returns the sum of the lanes of each of 16 vectors: lane i of the result is of vector i, whatever
// the others hold.
inline Vec sum_each(Vec* v) {
  add_halves<8>(v);
  add_halves<4>(v);
  add_halves<2>(v);
  add_halves<1>(v);
  return v[0];
}

template <int step>
inline void swap_groups(Vec* v) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & step)) {
      const Vec a = v[i], b = v[i + step];
      v[i] = zip<step, false>(a, b);
      v[i + step] = zip<step, true>(a, b);
    }
}

// Makes a row of each column of 16 vectors.
inline void transpose(Vec* v) {
  swap_groups<8>(v);
  swap_groups<4>(v);
  swap_groups<2>(v);
  swap_groups<1>(v);
}

// Combines each lane of a vector with the one `count` lanes after it, then those that are left.
template <int count, typename Combine, int... lane>
inline float combine_part(Floats x, const Combine& combine,
                          std::integer_sequence<int, lane...> lanes) {
  x = combine(x, shuffle<(lane + count) % kNativeLanes...>(x, x));
  if constexpr (count > 1) return combine_part<count / 2>(x, combine, lanes);
  return x[0];
}
template <typename Combine>
inline float combine_lanes(const Vec& v, const Combine& combine) {
  Floats parts[kParts];
  for (int i = 0; i < kParts; ++i) parts[i] = part_of(v, i);
  for (int count = kParts / 2; count > 0; count /= 2)
    for (int i = 0; i < count; ++i) parts[i] = combine(parts[i], parts[i + count]);
  return combine_part<kNativeLanes / 2>(parts[0], combine, NativeLanes());
}
inline float sum(const Vec& v) {
  return combine_lanes(v, [](Floats a, Floats b) { return a + b; });
}
inline float max_lane(const Vec& v) {
  return combine_lanes(v, [](Floats a, Floats b) { return a > b ? a : b; });
}

// Returns e^x for x up to 88, and 0 below -87.3 (and for -inf): a polynomial after the range is
// reduced, within 1.1 ulp.
static inline Vec exp(Vec x) {
  const Int is_zero = x < splat(-87.3f);
  x = select(is_zero, splat(-87.3f), x);
  Vec magic = splat(12582912.0f);  // 1.5 * 2^23: the sum rounds to an integer
  Vec whole = multiply_add(x, splat(1.44269504088896341f), magic) - magic;
  Vec remainder = multiply_add(whole, splat(-0.693359375f), x);
  remainder = multiply_add(whole, splat(2.12194440e-4f), remainder);
  Vec y = splat(1.9875691500e-4f);
  y = multiply_add(y, remainder, splat(1.3981999507e-3f));
  y = multiply_add(y, remainder, splat(8.3334519073e-3f));
  y = multiply_add(y, remainder, splat(4.1665795894e-2f));
  y = multiply_add(y, remainder, splat(1.6666665459e-1f));
  y = multiply_add(y, remainder, splat(5.0000001201e-1f));
  y = multiply_add(y, remainder * remainder, remainder) + splat(1.0f);
  Int exponent = to_int(whole);
  Vec power = as_float((exponent + 127) << 23);
  return select(is_zero, splat(0.0f), y * power);
}

// Returns 2^x for x up to 127 within 2 ulp, and 0 below -126 (and for -inf): a polynomial of what x
// differs from a whole number.
static inline Vec power_of_two(Vec x) {
  const Vec magic = splat(12582912.0f);  // as in `exp`
  const Vec shifted = x + magic, part = x - (shifted - magic);
  Vec y = splat(1.5337578e-4f);
  y = multiply_add(y, part, splat(1.3399860e-3f));
  y = multiply_add(y, part, splat(9.6185198e-3f));
  y = multiply_add(y, part, splat(5.5503290e-2f));
  y = multiply_add(y, part, splat(2.4022646e-1f));
  y = multiply_add(y, part, splat(6.9314718e-1f));
  y = multiply_add(y, part, splat(1.0f));
  const Vec power = as_float((as_bits(shifted) << 23) + 0x3f800000u);
  return select(x < splat(-126.0f), Vec{}, y * power);
}

static inline Vec tanh(Vec x) {
  Vec bounded = max(splat(-15.0f), select(x < splat(15.0f), x, splat(15.0f)));
  return splat(1.0f) - splat(2.0f) / (exp(bounded + bounded) + splat(1.0f));
}

}  // namespace JAXPAGE_ISA
}  // namespace jaxpage
