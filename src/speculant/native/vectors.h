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

static inline Vec larger(const Vec &a, const Vec &b) { return choose(a > b, a, b); }

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
