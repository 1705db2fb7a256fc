// The largest of many numbers, and where it stands.
#pragma once

#include <cmath>

#include "vectors.h"

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
