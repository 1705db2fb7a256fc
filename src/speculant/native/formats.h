// How weights of the formats lie in memory, sixteen outputs side by side, and how they are widened.
#pragma once

#include <cstdint>
#include <type_traits>

#include "vectors.h"

namespace {

constexpr int64_t GROUP = 32;   // weights that share a scale in the grouped formats
constexpr int MOST = (REGISTERS - 4) / PARTS < 8 ? (REGISTERS - 4) / PARTS : 8;  // rows whose sums stay in registers
constexpr int64_t AHEAD = 4096;  // bytes; the processor's own prefetching stops at the end of a page
template <int T>
constexpr bool PREFETCHED = T * PARTS > 4;  // fewer rows wait for memory anyway

struct Float32 {
  static constexpr int64_t bytes = 64;  // of sixteen weights
  static Vec get(const char *at) { return load(reinterpret_cast<const float *>(at)); }
};

struct BFloat16 {
  static constexpr int64_t bytes = 32;
  static Vec get(const char *at) { return load(reinterpret_cast<const Bf16 *>(at)); }
};

struct Int8 {
  static constexpr int64_t bytes = 16;
  static Vec get(const char *at) {
    return floats(widen(reinterpret_cast<const int8_t *>(at)));
  }
};

// Two inputs in one byte: k in the low half, k + 16 of the same group of 32 in the high one, as in GGUF.
static inline void nibbles(const char *at, Vec &low, Vec &high) {
  const Ints both = widen(reinterpret_cast<const uint8_t *>(at));
  low = floats(both & 15);
  high = floats(both >> 4);
}

// f with a number of rows that the compiler knows, 1 to 8.
template <class F>
void counted(int64_t rows, const F &f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    case 4: return f(std::integral_constant<int, 4>());
    case 5: return f(std::integral_constant<int, 5>());
    case 6: return f(std::integral_constant<int, 6>());
    case 7: return f(std::integral_constant<int, 7>());
    case 8: return f(std::integral_constant<int, 8>());
  }
}

}  // namespace
