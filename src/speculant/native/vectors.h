// Sixteen numbers at a time, in the compiler's own vector types: AVX-512, AVX2, or 16 bytes by flags.
//
// Where no register holds sixteen they lie in two or four that one does hold: a vector type wider than
// the registers would look simpler, but compilers keep such a one in memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
constexpr int PARTS = 4 * LANES / BYTES;  // registers that hold sixteen numbers

struct Bf16 {
  uint16_t bits;
};

// One register's numbers.
typedef float Floats __attribute__((vector_size(BYTES)));
typedef int32_t Numbers __attribute__((vector_size(BYTES)));
typedef uint32_t Bits __attribute__((vector_size(BYTES)));

template <class H>
struct Two {
  H a, b;
};

template <class P, int N>
struct Several {
  typedef Two<typename Several<P, N / 2>::Type> Type;
};
template <class P>
struct Several<P, 1> {
  typedef P Type;
};
typedef Several<Floats, PARTS>::Type Vec;
typedef Several<Numbers, PARTS>::Type Ints;
typedef Several<Bits, PARTS>::Type Words;

#define OPERATOR(op)                                                                          \
  template <class H>                                                                          \
  static inline auto operator op(const Two<H> &x, const Two<H> &y)->Two<decltype(x.a op y.a)> { \
    return {x.a op y.a, x.b op y.b};                                                          \
  }                                                                                           \
  template <class H, class S, class = std::enable_if_t<std::is_arithmetic<S>::value>>         \
  static inline auto operator op(const Two<H> &x, S y)->Two<decltype(x.a op y)> {             \
    return {x.a op y, x.b op y};                                                              \
  }                                                                                           \
  template <class H, class S, class = std::enable_if_t<std::is_arithmetic<S>::value>>         \
  static inline auto operator op(S x, const Two<H> &y)->Two<decltype(x op y.a)> {             \
    return {x op y.a, x op y.b};                                                              \
  }
OPERATOR(+)
OPERATOR(-)
OPERATOR(*)
OPERATOR(/)
OPERATOR(&)
OPERATOR(|)
OPERATOR(<<)
OPERATOR(>>)
OPERATOR(<)
OPERATOR(>)
OPERATOR(!=)
#undef OPERATOR

template <class H>
static inline Two<H> operator-(const Two<H> &x) {
  return {-x.a, -x.b};
}
template <class H, class Y>
static inline void operator+=(Two<H> &x, const Y &y) {
  x = x + y;
}
template <class H, class Y>
static inline void operator|=(Two<H> &x, const Y &y) {
  x = x | y;
}

// A function of registers becomes one of all sixteen numbers.
#define LIFTED(f)                                                  \
  template <class... H>                                            \
  static inline auto f(const Two<H> &...x)->Two<decltype(f(x.a...))> { \
    return {f(x.a...), f(x.b...)};                                 \
  }

static inline Floats as_floats(Bits x) { return reinterpret_cast<Floats>(x); }
static inline Floats as_floats(Numbers x) { return reinterpret_cast<Floats>(x); }
static inline Bits as_words(Floats x) { return reinterpret_cast<Bits>(x); }
static inline Numbers as_ints(Bits x) { return reinterpret_cast<Numbers>(x); }
static inline Floats floats(Numbers x) { return __builtin_convertvector(x, Floats); }
static inline Numbers whole(Floats x) { return __builtin_convertvector(x, Numbers); }  // towards zero
static inline Floats choose(Numbers yes, Floats a, Floats b) { return yes ? a : b; }
LIFTED(as_floats)
LIFTED(as_words)
LIFTED(as_ints)
LIFTED(floats)
LIFTED(whole)
LIFTED(choose)

// Sixteen numbers of which f makes the register that begins at a lane.
template <class V>
struct Made {
  template <class F>
  static V by(F f, int lane = 0) {
    return f(lane);
  }
};
template <class H>
struct Made<Two<H>> {
  template <class F>
  static Two<H> by(F f, int lane = 0) {
    return {Made<H>::by(f, lane), Made<H>::by(f, lane + static_cast<int>(sizeof(H)) / 4)};
  }
};

template <class P, class E>
static inline P read(const E *from) {
  P p;
  std::memcpy(&p, from, sizeof p);
  return p;
}

static inline Vec load(const float *from) {
  return Made<Vec>::by([=](int lane) { return read<Floats>(from + lane); });
}

static inline Words words(const char *from) {
  return Made<Words>::by([=](int lane) { return read<Bits>(from + 4 * lane); });
}

// Bytes and halves as numbers of 32 bits. Compilers know the instructions, but not always that they are meant.
#if defined(__AVX512F__)
static inline Numbers widened(const int8_t *from) { return reinterpret_cast<Numbers>(_mm512_cvtepi8_epi32(read<__m128i>(from))); }
static inline Numbers widened(const uint8_t *from) { return reinterpret_cast<Numbers>(_mm512_cvtepu8_epi32(read<__m128i>(from))); }
static inline Numbers widened(const Bf16 *from) { return reinterpret_cast<Numbers>(_mm512_cvtepu16_epi32(read<__m256i>(from))); }
#elif defined(__AVX2__)
static inline __m128i eight(const void *from) { return _mm_loadl_epi64(static_cast<const __m128i *>(from)); }
static inline Numbers widened(const int8_t *from) { return reinterpret_cast<Numbers>(_mm256_cvtepi8_epi32(eight(from))); }
static inline Numbers widened(const uint8_t *from) { return reinterpret_cast<Numbers>(_mm256_cvtepu8_epi32(eight(from))); }
static inline Numbers widened(const Bf16 *from) { return reinterpret_cast<Numbers>(_mm256_cvtepu16_epi32(read<__m128i>(from))); }
#else
static inline Numbers widened(const int8_t *from) { return Numbers{from[0], from[1], from[2], from[3]}; }
static inline Numbers widened(const uint8_t *from) { return Numbers{from[0], from[1], from[2], from[3]}; }
static inline Numbers widened(const Bf16 *from) { return Numbers{from[0].bits, from[1].bits, from[2].bits, from[3].bits}; }
#endif
template <class E>
static inline Ints widen(const E *from) {
  return Made<Ints>::by([=](int lane) { return widened(from + lane); });
}

static inline Vec load(const Bf16 *from) { return as_floats(widen(from) << 16); }  // the upper half of a float32

template <class P>
static inline void put(float *to, P part) {
  std::memcpy(to, &part, sizeof part);
}
template <class H>
static inline void put(float *to, const Two<H> &x) {
  put(to, x.a);
  put(to + sizeof(H) / 4, x.b);
}
static inline void store(float *to, const Vec &v) { put(to, v); }

// What a register's size is no help with: the sixteen numbers one by one, or as a compiler sees fit.
template <class E, class V>
struct Listed {
  E at[LANES];
  explicit Listed(const V &v) { std::memcpy(at, &v, sizeof at); }
};

static inline float total(const Vec &v) {  // as a tree: every number meets the one half the rest away
  Listed<float, Vec> n(v);
  for (int half = LANES / 2; half > 1; half /= 2)
    for (int i = 0; i < half; ++i) n.at[i] += n.at[i + half];
  return n.at[0] + n.at[1];
}

static inline int32_t total(const Ints &v) {
  const Listed<int32_t, Ints> n(v);
  int32_t sum = 0;
  for (int i = 0; i < LANES; ++i) sum += n.at[i];
  return sum;
}

static inline float most(const Vec &v) {
  const Listed<float, Vec> n(v);
  float top = n.at[0];
  for (int i = 1; i < LANES; ++i) top = n.at[i] > top ? n.at[i] : top;
  return top;
}

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

static inline Vec larger(const Vec &a, const Vec &b) { return choose(a > b, a, b); }

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

// Sums of quarters: lane group i of the result adds up to the sum of argument i.
#if defined(__AVX512F__)
static inline Vec quarter(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  const Vec cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 __builtin_shufflevector(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  return __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#elif defined(__AVX2__)
static inline Floats halves(Floats a, Floats b) {  // the sum of a's halves, then that of b's
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
static inline Vec quarter(const Vec &a, const Vec &b, const Vec &c, const Vec &d) {
  return {halves(a.a + a.b, b.a + b.b), halves(c.a + c.b, d.a + d.b)};
}
#else
static inline Floats quarters(const Vec &v) { return (v.a.a + v.b.a) + (v.a.b + v.b.b); }
static inline Vec quarter(const Vec &a, const Vec &b, const Vec &c, const Vec &d) {
  return {{quarters(a), quarters(b)}, {quarters(c), quarters(d)}};
}
#endif

// Within each group of four lanes: lane j of the result is the sum of argument j's four lanes.
#if defined(__AVX512F__)
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#define FIRST(a, b) __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define LAST(a, b) __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#elif defined(__AVX2__)
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15)
#define FIRST(a, b) __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define LAST(a, b) __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#else
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 4, 2, 6)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 5, 3, 7)
#define FIRST(a, b) __builtin_shufflevector(a, b, 0, 1, 4, 5)
#define LAST(a, b) __builtin_shufflevector(a, b, 2, 3, 6, 7)
#endif
static inline Floats cross(Floats a, Floats b, Floats c, Floats d) {
  const Floats ab = EVEN(a, b) + ODD(a, b), cd = EVEN(c, d) + ODD(c, d);
  return FIRST(ab, cd) + LAST(ab, cd);
}
#undef EVEN
#undef ODD
#undef FIRST
#undef LAST
LIFTED(cross)

// e^x for x <= 0, within 2 units in the last place; 0 below -87. 2^n by the exponent, 2^f by the
// polynomial of Cephes' expf.
static inline Vec exponential(Vec x) {
  const Ints tiny = x < -87.0f;
  x = choose(tiny, Vec{} - 87.0f, x);
  const Ints n = whole(x * 1.44269504088896341f - 0.5f);  // rounds to nearest for x <= 0
  const Vec power = floats(n);
  const Vec f = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  Vec p = Vec{} + 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  const Vec e = (p * f * f + f + 1.0f) * as_floats((n + 127) << 23);
  return choose(tiny, Vec{}, e);
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
  float top = most(tops);
  bool bad = total(broken) != 0;
  for (; i < count; ++i) {
    top = x[i] > top ? x[i] : top;
    bad |= x[i] != x[i];
  }
  return bad ? NAN : top;
}

// The first place of the largest of x, or -1 where one of them is NaN or it is infinite.
static inline int64_t likeliest(const float *x, int64_t count) {
  constexpr int64_t STRETCH = 1024;  // of which only the best is looked through
  float top = -INFINITY;
  int64_t at = 0;
  for (int64_t i = 0; i < count; i += STRETCH) {
    const float mine = largest(x + i, count - i < STRETCH ? count - i : STRETCH);
    if (mine != mine) return -1;
    if (mine > top) {
      top = mine;
      at = i;
    }
  }
  if (!std::isfinite(top)) return -1;
  while (x[at] != top) ++at;
  return at;
}
