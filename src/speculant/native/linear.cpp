// y = x W^T for few rows of x: speculation lives from eight rows that cost little more than one.
//
// Weights are packed once, sixteen outputs side by side, so that a vector of them meets one number of x
// and nothing is ever summed across a vector. A weight is read and widened to float32 once for all rows.
// Every sum runs over the inputs in order, whatever the number of rows: a row's result is the same to
// the last bit alone and among others, which makes verifying a draft exactly plain decoding.
//
// Plain C interface, called through ctypes; no OpenMP of its own (see parallel.h).

#include <cstdint>
#include <cstring>
#include <vector>

#include "calls.h"
#include "parallel.h"
#include "vectors.h"

namespace {

constexpr int64_t GROUP = 32;  // weights that share a scale in the grouped formats

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

// P panels of sixteen outputs times T rows: one scale an output, or none.
template <class F, int P, int T>
void block(const LinearCall &call, int64_t panel, int64_t token) {
  const int64_t inputs = call.inputs, size = inputs * F::bytes;
  const char *from = call.weight + panel * size;
  const float *x = call.x + token * inputs;
  Vec sums[P][T] = {};
  for (int64_t k = 0; k < inputs; ++k)
    for (int p = 0; p < P; ++p) {
      const Vec w = F::get(from + p * size + k * F::bytes);
      for (int t = 0; t < T; ++t) sums[p][t] += w * x[t * inputs + k];
    }
  for (int p = 0; p < P; ++p) {
    const int64_t n = (panel + p) * LANES;
    const Vec scale = call.scales ? load(call.scales + n) : Vec{} + 1.0f;
    const Vec bias = call.bias ? load(call.bias + n) : Vec{};
    for (int t = 0; t < T; ++t) store(call.out + (token + t) * call.outputs + n, sums[p][t] * scale + bias);
  }
}

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

enum Format { FLOAT32, BFLOAT16, INT8, INT8_GROUPS, INT4_GROUPS };

template <int P, int T>
void any(const LinearCall &call, int format, int64_t panel, int64_t token, const float *sums) {
  switch (format) {
    case FLOAT32: return block<Float32, P, T>(call, panel, token);
    case BFLOAT16: return block<BFloat16, P, T>(call, panel, token);
    case INT8: return block<Int8, P, T>(call, panel, token);
    case INT8_GROUPS: return grouped<false, P, T>(call, panel, token, sums);
    case INT4_GROUPS: return grouped<true, P, T>(call, panel, token, sums);
  }
}

constexpr int STEP = 4;  // panels a thread takes at once

// `count` panels, P at once while there are as many, times T rows.
template <int P, int T>
void tile(const LinearCall &call, int format, int64_t first, int64_t count, int64_t token, const float *sums) {
  int64_t p = 0;
  for (; p + P <= count; p += P) any<P, T>(call, format, first + p, token, sums);
  for (; p < count; ++p) any<1, T>(call, format, first + p, token, sums);
}

// Rows by eights, then the rest. A sum is a chain of dependent steps, so that few rows need several
// panels at once to keep the arithmetic busy.
void panels(const LinearCall &call, int format, int64_t first, int64_t count, const float *sums) {
  int64_t token = 0;
  for (; token + 8 <= call.tokens; token += 8) tile<1, 8>(call, format, first, count, token, sums);
  switch (call.tokens - token) {
    case 1: return tile<4, 1>(call, format, first, count, token, sums);
    case 2: return tile<2, 2>(call, format, first, count, token, sums);
    case 3: return tile<2, 3>(call, format, first, count, token, sums);
    case 4: return tile<2, 4>(call, format, first, count, token, sums);
    case 5: return tile<1, 5>(call, format, first, count, token, sums);
    case 6: return tile<1, 6>(call, format, first, count, token, sums);
    case 7: return tile<1, 7>(call, format, first, count, token, sums);
  }
}

}  // namespace

extern "C" void speculant_linear(const LinearCall *call, int format, int threads) {
  std::vector<float> sums;  // of x over every group of 32 inputs [T, K / 32]
  if (call->minima) {
    const int64_t groups = call->inputs / GROUP;
    sums.resize(call->tokens * groups);
    for (size_t i = 0; i < sums.size(); ++i) {
      float sum = 0;
      for (int64_t k = 0; k < GROUP; ++k) sum += call->x[i * GROUP + k];
      sums[i] = sum;
    }
  }
  const int64_t all = call->outputs / LANES, parts = (all + STEP - 1) / STEP;
  parallel(parts, threads, [&](int64_t i) {
    const int64_t first = i * STEP, count = all - first < STEP ? all - first : STEP;
    panels(*call, format, first, count, sums.data());
  });
}
