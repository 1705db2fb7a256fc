// Many sums at once: what attention needs of four queries and four columns.
#pragma once

#include "vectors.h"

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
