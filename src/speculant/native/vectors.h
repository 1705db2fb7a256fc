// Sixteen float32 at a time, in the compiler's own vector types: AVX-512, AVX2 or NEON by flags.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

struct Bf16 {
  uint16_t bits;
};

static inline Vec load(const float *from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

static inline Vec load(const Bf16 *from) {  // the upper half of a float32
  Halves h;
  std::memcpy(&h, from, sizeof h);
  return reinterpret_cast<Vec>(__builtin_convertvector(h, Words) << 16);
}

// Sixteen bytes as int32. Compilers know this instruction, but not always that it is meant here.
static inline Ints widen(const int8_t *from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))));
#else
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  Bytes b;
  std::memcpy(&b, from, sizeof b);
  return __builtin_convertvector(b, Ints);
#endif
}

static inline Ints widen(const uint8_t *from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))));
#else
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));
  Bytes b;
  std::memcpy(&b, from, sizeof b);
  return __builtin_convertvector(b, Ints);
#endif
}

static inline Words words(const char *from) {
  Words w;
  std::memcpy(&w, from, sizeof w);
  return w;
}

// To every lane, the products of its word's four unsigned bytes with the four signed ones at x.
static inline Ints dot(Ints sums, Words w, const int8_t *x) {
#if defined(__AVX512VNNI__)
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(
      reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(w), _mm512_set1_epi32(four)));
#else
  for (int j = 0; j < 4; ++j) sums += reinterpret_cast<Ints>((w >> (8 * j)) & 255) * static_cast<int32_t>(x[j]);
  return sums;
#endif
}

// x to the nearest bfloat16, ties to even.
static inline Halves halves(Vec x) {
  const Words bits = reinterpret_cast<Words>(x);
  return __builtin_convertvector((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, Halves);
}

// To every lane, the products of its word's two bfloat16 with the two at x.
static inline Vec dot(Vec sums, Words w, const uint16_t *x) {
  uint32_t two;
  std::memcpy(&two, x, sizeof two);
#if defined(__AVX512BF16__)
  return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums),
      reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(two)))));
#else
  const Words ends = Words{} + two;
  sums += reinterpret_cast<Vec>(w << 16) * reinterpret_cast<Vec>(ends << 16);
  return sums + reinterpret_cast<Vec>(w & 0xFFFF0000u) * reinterpret_cast<Vec>(ends & 0xFFFF0000u);
#endif
}

static inline Vec floats(Ints i) { return __builtin_convertvector(i, Vec); }

static inline void store(float *to, Vec v) { std::memcpy(to, &v, sizeof v); }

static inline float total(Vec v) {
  typedef float Half __attribute__((vector_size(2 * LANES)));
  typedef float Quarter __attribute__((vector_size(LANES)));
  Half a, b;
  std::memcpy(&a, &v, sizeof a);
  std::memcpy(&b, reinterpret_cast<const char *>(&v) + sizeof a, sizeof b);
  a += b;
  Quarter c, d;
  std::memcpy(&c, &a, sizeof c);
  std::memcpy(&d, reinterpret_cast<const char *>(&a) + sizeof c, sizeof d);
  c += d;
  return (c[0] + c[1]) + (c[2] + c[3]);
}

static inline int32_t total(Ints v) {
  int32_t sum = 0;
  for (int i = 0; i < LANES; ++i) sum += v[i];
  return sum;
}

// To the nearest integer, halves to even, for |x| < 2^22: adding 1.5 * 2^23 rounds.
static inline Ints nearest(Vec x) { return __builtin_convertvector((x + 12582912.0f) - 12582912.0f, Ints); }

static inline void store_bytes(int8_t *to, Ints v) {
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  const Bytes b = __builtin_convertvector(v, Bytes);
  std::memcpy(to, &b, sizeof b);
}

static inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// Sums of quarters: lane group i of the result adds up to the sum of argument i.
static inline Vec quarter(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  const Vec cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  return __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// Within each group of four lanes: lane j of the result is the sum of argument j's four lanes.
static inline Vec cross(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
                 __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  const Vec cd = __builtin_shufflevector(c, d, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
                 __builtin_shufflevector(c, d, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  return __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

// e^x for x <= 0, within 2 units in the last place; 0 below -87. 2^n by the exponent, 2^f by the
// polynomial of Cephes' expf.
static inline Vec exponential(Vec x) {
  const Ints tiny = x < -87.0f;
  x = tiny ? (Vec{} - 87.0f) : x;
  const Ints n = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, Ints);  // rounds to nearest for x <= 0
  const Vec whole = __builtin_convertvector(n, Vec);
  const Vec f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vec p = Vec{} + 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  const Vec power = reinterpret_cast<Vec>((n + 127) << 23);
  const Vec e = (p * f * f + f + 1.0f) * power;
  return tiny ? Vec{} : e;
}

// The largest of x: NaN where one of them is.
static inline float largest(const float *x, int64_t count) {
  Vec tops = Vec{} - INFINITY;
  Ints broken = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Vec v = load(x + i);
    tops = larger(v, tops);
    broken |= v != v;
  }
  float top = -INFINITY;
  bool bad = total(broken) != 0;
  for (int k = 0; k < LANES; ++k) top = tops[k] > top ? tops[k] : top;
  for (; i < count; ++i) {
    top = x[i] > top ? x[i] : top;
    bad |= x[i] != x[i];
  }
  return bad ? NAN : top;
}
