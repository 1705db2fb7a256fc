// Sixteen sums of products of narrow numbers, and how inputs become narrow: bytes, and bfloat16.
#pragma once

#include "vectors.h"

static inline void store_bytes(int8_t *to, const Ints &v) {
  const Listed<int32_t, Ints> n(v);
  for (int i = 0; i < LANES; ++i) to[i] = static_cast<int8_t>(n.at[i]);
}

// x to the nearest bfloat16, ties to even.
static inline void store_halves(uint16_t *to, const Vec &x) {
  const Words bits = as_words(x);
  const Listed<uint32_t, Words> n(bits + 0x7FFFu + ((bits >> 16) & 1u));
  for (int i = 0; i < LANES; ++i) to[i] = static_cast<uint16_t>(n.at[i] >> 16);
}

// To the nearest integer, halves to even, for |x| < 2^22: adding 1.5 * 2^23 rounds.
static inline Ints nearest(const Vec &x) { return whole((x + 12582912.0f) - 12582912.0f); }

// Products of bytes: to every lane, those of its word's four unsigned ones with the four signed ones at
// x. `Nibbles` takes words whose bytes are 0 to 15, at most eight of them; `Octets` any, as many.
#if defined(__AVX512VNNI__)
struct Octets {
  Ints sums = {};
  void add(Words w, const int8_t *x) {
    sums = reinterpret_cast<Ints>(_mm512_dpbusd_epi32(
        reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(w), _mm512_set1_epi32(read<int32_t>(x))));
  }
  Ints sum() const { return sums; }
};
typedef Octets Nibbles;
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
// Pairs of products are added in 16 bits: eight times 2 x 15 x 128 are below 2^15. A byte is two nibbles.
typedef int16_t Shorts __attribute__((vector_size(BYTES)));
#if defined(__AVX512BW__)
static inline Shorts products(Bits w, const int8_t *x) {
  return reinterpret_cast<Shorts>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(w), _mm512_set1_epi32(read<int32_t>(x))));
}
static inline Numbers joined(Shorts a) {
  return reinterpret_cast<Numbers>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), _mm512_set1_epi16(1)));
}
#else
static inline Shorts products(Bits w, const int8_t *x) {
  return reinterpret_cast<Shorts>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(w), _mm256_set1_epi32(read<int32_t>(x))));
}
static inline Numbers joined(Shorts a) {
  return reinterpret_cast<Numbers>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), _mm256_set1_epi16(1)));
}
#endif
LIFTED(joined)
static inline void add_products(Shorts &sums, Bits w, const int8_t *x) { sums += products(w, x); }
template <class H, class S>
static inline void add_products(Two<S> &sums, const Two<H> &w, const int8_t *x) {
  add_products(sums.a, w.a, x);
  add_products(sums.b, w.b, x);
}
struct Nibbles {
  Several<Shorts, PARTS>::Type sums = {};
  void add(const Words &w, const int8_t *x) { add_products(sums, w, x); }
  Ints sum() const { return joined(sums); }
};
struct Octets {
  Nibbles low, high;
  void add(const Words &w, const int8_t *x) {
    low.add(w & 0x0F0F0F0Fu, x);
    high.add((w >> 4) & 0x0F0F0F0Fu, x);
  }
  Ints sum() const { return low.sum() + (high.sum() << 4); }
};
#else
struct Octets {
  Ints sums = {};
  void add(const Words &w, const int8_t *x) {
    for (int j = 0; j < 4; ++j) sums += as_ints((w >> (8 * j)) & 255u) * static_cast<int32_t>(x[j]);
  }
  Ints sum() const { return sums; }
};
typedef Octets Nibbles;
#endif

// To every lane, the products of its word's two bfloat16 with the two at x.
static inline Vec dot(const Vec &sums, const Words &w, const uint16_t *x) {
  const uint32_t two = read<uint32_t>(x);
#if defined(__AVX512BF16__)
  return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums),
      reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(two)))));
#else
  const Words ends = Words{} + two;
  return (sums + as_floats(w << 16) * as_floats(ends << 16)) + as_floats(w & 0xFFFF0000u) * as_floats(ends & 0xFFFF0000u);
#endif
}
