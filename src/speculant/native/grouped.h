// Integer weights in groups of 32 inputs, times float32.
#pragma once

#include <cstdint>

#include "calls.h"
#include "formats.h"

namespace {

// The same with a scale, and a minimum where there are minima, for every 32 inputs of an output.
template <bool FOUR, int P, int T>
void grouped(const LinearCall &call, int64_t panel, int64_t token, const float *sums_of_x) {
  const int64_t inputs = call.inputs, groups = inputs / GROUP, bytes = FOUR ? 256 : 512;
  const float *x = call.x + token * inputs;
  Vec sums[P][T] = {};
  for (int64_t g = 0; g < groups; ++g)
    for (int p = 0; p < P; ++p) {
      const int64_t at = (panel + p) * groups + g;
      const char *from = call.weight + at * bytes;
      Vec part[T] = {};
      if constexpr (FOUR) {
        for (int64_t k = 0; k < 16; ++k) {
          Vec low, high;
          nibbles(from + k * 16, low, high);
          const float *mine = x + g * GROUP + k;
          for (int t = 0; t < T; ++t) part[t] += low * mine[t * inputs];
          for (int t = 0; t < T; ++t) part[t] += high * mine[t * inputs + 16];
        }
      } else {
        for (int64_t k = 0; k < GROUP; ++k) {
          const Vec w = Int8::get(from + k * 16);
          for (int t = 0; t < T; ++t) part[t] += w * x[t * inputs + g * GROUP + k];
        }
      }
      const Vec scale = load(call.scales + at * LANES);
      for (int t = 0; t < T; ++t) sums[p][t] += part[t] * scale;
      if (call.minima) {
        const Vec least = load(call.minima + at * LANES);
        for (int t = 0; t < T; ++t) sums[p][t] += least * sums_of_x[(token + t) * groups + g];
      }
    }
  for (int p = 0; p < P; ++p) {
    const int64_t n = (panel + p) * LANES;
    const Vec bias = call.bias ? load(call.bias + n) : Vec{};
    for (int t = 0; t < T; ++t) store(call.out + (token + t) * call.outputs + n, sums[p][t] + bias);
  }
}

}  // namespace
