// Vectors of 16 floats in GCC's and Clang's vector extension: the same operations in the same order
// on every instruction set.
//
// A library is compiled for one instruction set (JAXPAGE_ISA). GCC makes two or four operations of
// one where vectors are shorter.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxpage {
namespace JAXPAGE_ISA {

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t Int __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Half __attribute__((vector_size(32)));
typedef int16_t Short __attribute__((vector_size(32)));
typedef int8_t Byte __attribute__((vector_size(16)));
typedef uint8_t UByte __attribute__((vector_size(16)));

constexpr int kLanes = 16;

// `Vec{} + x` would add zero to it: that makes 0 of -0, and so it is an addition.
static inline Vec splat(float x) { return Vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
static inline Vec ascending() { return Vec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
static inline Vec as_float(Bits x) { return (Vec)x; }
static inline Bits as_bits(Vec x) { return (Bits)x; }
static inline Vec select(Int mask, Vec a, Vec b) { return mask ? a : b; }
static inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }

// Returns a * b + c, rounded once.
static inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  typedef float Half8 __attribute__((vector_size(32)));
  Half8 x[2], y[2], z[2];
  std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64);
  for (int i = 0; i < 2; ++i)
    z[i] = (Half8)_mm256_fmadd_ps((__m256)x[i], (__m256)y[i], (__m256)z[i]);
  std::memcpy(&c, z, 64);
  return c;
#else
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

template <typename Raw>
static inline Raw raw_at(const void* at) {
  Raw raw;
  std::memcpy(&raw, at, sizeof(Raw));
  return raw;
}

// Makes integers of 32 bits of those of 8 and 16. GCC 12 makes sixteen scalar conversions of
// __builtin_convertvector for some of them.
#if defined(__AVX512F__)
static inline Int widened(Byte x) { return (Int)_mm512_cvtepi8_epi32((__m128i)x); }
static inline Bits widened(UByte x) { return (Bits)_mm512_cvtepu8_epi32((__m128i)x); }
static inline Bits widened(Half x) { return (Bits)_mm512_cvtepu16_epi32((__m256i)x); }
#elif defined(__AVX2__)
static inline Bits joined(__m256i low, __m256i high) {
  __m256i both[2] = {low, high};
  return raw_at<Bits>(both);
}
static inline Int widened(Byte x) {
  return (Int)joined(_mm256_cvtepi8_epi32((__m128i)x),
                     _mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)x, 8)));
}
static inline Bits widened(UByte x) {
  return joined(_mm256_cvtepu8_epi32((__m128i)x),
                _mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)x, 8)));
}
static inline Bits widened(Half x) {
  __m128i part[2];
  std::memcpy(part, &x, sizeof(x));
  return joined(_mm256_cvtepu16_epi32(part[0]), _mm256_cvtepu16_epi32(part[1]));
}
#else
static inline Int widened(Byte x) {
  return __builtin_convertvector(__builtin_convertvector(x, Short), Int);
}
static inline Bits widened(UByte x) {
  return __builtin_convertvector(__builtin_convertvector(x, Half), Bits);
}
static inline Bits widened(Half x) { return __builtin_convertvector(x, Bits); }
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
};

template <>
struct Load<F32> {
  static Vec at(const float* x) { return raw_at<Vec>(x); }
};

template <>
struct Load<BF16> {
  static Vec at(const uint16_t* x) { return as_float(widened(raw_at<Half>(x)) << 16); }
};

// Subnormal numbers are made of integers: XLA's threads may take subnormal operands for zero.
template <>
struct Load<F16> {
  static Vec at(const uint16_t* x) {
    Bits bits = widened(raw_at<Half>(x));
    Bits sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    Bits normal = (magnitude << 13) + (112u << 23);
    Vec subnormal = __builtin_convertvector((Int)magnitude, Vec) * splat(0x1p-24f);
    Bits special = (magnitude << 13) | 0x7f800000u;
    Vec value = select((Int)(magnitude < 0x400u), subnormal, as_float(normal));
    value = select((Int)(magnitude >= 0x7c00u), as_float(special), value);
    return as_float(as_bits(value) | sign);
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

template <>
struct Load<I8> {
  static Vec at(const int8_t* x) { return __builtin_convertvector(widened(raw_at<Byte>(x)), Vec); }
};

template <>
struct Load<F8> {
  static Vec at(const uint8_t* x) {
    Bits bits = widened(raw_at<UByte>(x));
    Bits sign = (bits & 0x80u) << 24, magnitude = bits & 0x7fu;
    Bits normal = (magnitude << 20) + (120u << 23);
    Vec subnormal = __builtin_convertvector((Int)magnitude, Vec) * splat(0x1p-9f);
    Vec value = select((Int)(magnitude < 8u), subnormal, as_float(normal));
    value = select((Int)(magnitude == 0x7fu), as_float(Bits{} + 0x7fc00000u), value);
    return as_float(as_bits(value) | sign);
  }
};

// Stores numbers rounded to the nearest, ties to even.
template <typename Stored>
struct Store;

template <>
struct Store<F32> {
  static void at(float* x, Vec value) { std::memcpy(x, &value, sizeof(value)); }
};

template <>
struct Store<BF16> {
  static void at(uint16_t* x, Vec value) {
    Bits bits = as_bits(value);
    Int is_nan = (Int)((bits & 0x7fffffffu) > 0x7f800000u);
    Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    rounded = (Bits)select(is_nan, (Vec)((bits >> 16) | 0x40u), (Vec)rounded);
    Half half = __builtin_convertvector(rounded, Half);
    std::memcpy(x, &half, sizeof(half));
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

// Returns lanes of both vectors; those of b have the numbers from 16.
template <int... lanes>
static inline Vec shuffled(Vec a, Vec b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, lanes...);
#else
  return __builtin_shuffle(a, b, Int{lanes...});  // GCC has clang's function from version 12
#endif
}

// Returns the sum of the lanes of each of 16 vectors: lane i of the result is of vector i, whatever
// the others hold.
static inline Vec sums(Vec* v) {
  for (int i = 0; i < 8; ++i)
    v[i] = shuffled<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(v[i], v[i + 8]) +
           shuffled<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(v[i], v[i + 8]);
  for (int i = 0; i < 4; ++i)
    v[i] = shuffled<0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27>(v[i], v[i + 4]) +
           shuffled<4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31>(v[i], v[i + 4]);
  for (int i = 0; i < 2; ++i)
    v[i] = shuffled<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(v[i], v[i + 2]) +
           shuffled<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(v[i], v[i + 2]);
  return shuffled<0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30>(v[0], v[1]) +
         shuffled<1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31>(v[0], v[1]);
}

// Makes a row of each column of 16 vectors.
static inline void transpose(Vec* v) {
  const auto swap = [v](int step, auto low, auto high) {
    for (int i = 0; i < kLanes; ++i)
      if (!(i & step)) {
        const Vec a = v[i], b = v[i + step];
        v[i] = low(a, b);
        v[i + step] = high(a, b);
      }
  };
  swap(8, shuffled<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>,
       shuffled<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>);
  swap(4, shuffled<0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27>,
       shuffled<4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31>);
  swap(2, shuffled<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>,
       shuffled<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>);
  swap(1, shuffled<0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30>,
       shuffled<1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31>);
}

static inline float sum(Vec v) {
  float half[8], result;
  for (int i = 0; i < 8; ++i) half[i] = v[i] + v[i + 8];
  for (int i = 0; i < 4; ++i) half[i] += half[i + 4];
  for (int i = 0; i < 2; ++i) half[i] += half[i + 2];
  result = half[0] + half[1];
  return result;
}

static inline float largest(Vec v) {
  float half[8];
  for (int i = 0; i < 8; ++i) half[i] = v[i] > v[i + 8] ? v[i] : v[i + 8];
  for (int i = 0; i < 4; ++i) half[i] = half[i] > half[i + 4] ? half[i] : half[i + 4];
  for (int i = 0; i < 2; ++i) half[i] = half[i] > half[i + 2] ? half[i] : half[i + 2];
  return half[0] > half[1] ? half[0] : half[1];
}

// Returns e^x for x up to 88, and 0 below -87.3 (and for -inf): a polynomial after the range is
// reduced, within 1.1 ulp.
static inline Vec exp(Vec x) {
  const Int is_zero = x < splat(-87.3f);
  x = select(is_zero, splat(-87.3f), x);
  Vec magic = splat(12582912.0f);  // 1.5 * 2^23: the sum rounds to an integer
  Vec whole = multiply_add(x, splat(1.44269504088896341f), magic) - magic;
  Vec rest = multiply_add(whole, splat(-0.693359375f), x);
  rest = multiply_add(whole, splat(2.12194440e-4f), rest);
  Vec y = splat(1.9875691500e-4f);
  y = multiply_add(y, rest, splat(1.3981999507e-3f));
  y = multiply_add(y, rest, splat(8.3334519073e-3f));
  y = multiply_add(y, rest, splat(4.1665795894e-2f));
  y = multiply_add(y, rest, splat(1.6666665459e-1f));
  y = multiply_add(y, rest, splat(5.0000001201e-1f));
  y = multiply_add(y, rest * rest, rest) + splat(1.0f);
  Int exponent = __builtin_convertvector(whole, Int);
  Vec power = (Vec)((exponent + 127) << 23);
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
