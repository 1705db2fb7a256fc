// Integer weights times inputs that are rounded to integers.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "formats.h"
#include "products.h"

namespace {

// x in integers: a scale for every 32 inputs of a row, and the sums that zero points and minima need.
struct Rounded {
  std::vector<int8_t> codes;          // [T, K]
  std::vector<float> scales, totals;  // [T, K / 32]; totals: of the rounded x
  std::vector<int32_t> offsets;       // [T, K / 32]: -128 times the codes' sum
};

void round_rows(const LinearCall &call, Rounded &r) {
  const int64_t groups = call.tokens * call.inputs / GROUP;
  r.codes.resize(groups * GROUP);
  r.scales.resize(groups);
  r.totals.resize(groups);
  r.offsets.resize(groups);
  for (int64_t g = 0; g < groups; ++g) {
    const Vec low = load(call.x + g * GROUP), high = load(call.x + g * GROUP + LANES);
    const Vec sizes = larger(larger(low, -low), larger(high, -high));
    const float top = most(sizes), scale = top / 127, inverse = top > 0 ? 127 / top : 0;
    const Ints a = nearest(low * inverse), b = nearest(high * inverse);
    store_bytes(&r.codes[g * GROUP], a);
    store_bytes(&r.codes[g * GROUP + LANES], b);
    const int32_t sum = total(a + b);
    r.scales[g] = scale;
    r.totals[g] = scale * sum;
    r.offsets[g] = -128 * sum;
  }
}

// Integer weights times rounded x: bytes of 0..255 (128 is zero), or nibbles of 0..15 with minima. A
// word holds four inputs of one output, or eight.
template <bool FOUR, int P, int T>
void integers(const LinearCall &call, int64_t panel, int64_t token, const Rounded &r) {
  const int64_t inputs = call.inputs, groups = inputs / GROUP, bytes = FOUR ? 256 : 512;
  Vec sums[P][T] = {};
  for (int64_t g = 0; g < groups; ++g)
    for (int p = 0; p < P; ++p) {
      const int64_t at = (panel + p) * groups + g;
      const char *from = call.weight + at * bytes;
      const int8_t *x = r.codes.data() + token * inputs + g * GROUP;
      if constexpr (PREFETCHED<T>)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i + AHEAD);
      std::conditional_t<FOUR, Nibbles, Octets> part[T];
      for (int64_t k = 0; k < (FOUR ? 16 : GROUP); k += 4) {
        const Words w = words(from + k * LANES);
        if constexpr (FOUR) {
          const Words low = w & 0x0F0F0F0Fu, high = (w >> 4) & 0x0F0F0F0Fu;
          for (int t = 0; t < T; ++t) part[t].add(low, x + t * inputs + k);
          for (int t = 0; t < T; ++t) part[t].add(high, x + t * inputs + k + 16);
        } else {
          for (int t = 0; t < T; ++t) part[t].add(w, x + t * inputs + k);
        }
      }
      const Vec scale = load(call.scales + at * LANES);
      for (int t = 0; t < T; ++t) {
        const int64_t of = (token + t) * groups + g;
        const Ints sum = FOUR ? part[t].sum() : part[t].sum() + r.offsets[of];
        sums[p][t] += floats(sum) * (scale * r.scales[of]);
      }
      if (call.minima) {
        const Vec least = load(call.minima + at * LANES);
        for (int t = 0; t < T; ++t) sums[p][t] += least * r.totals[(token + t) * groups + g];
      }
    }
  for (int p = 0; p < P; ++p) {
    const int64_t n = (panel + p) * LANES;
    const Vec bias = call.bias ? load(call.bias + n) : Vec{};
    for (int t = 0; t < T; ++t) store(call.out + (token + t) * call.outputs + n, sums[p][t] + bias);
  }
}

}  // namespace
