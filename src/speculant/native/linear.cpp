// y = x W^T for few rows of x: speculation lives from eight rows that cost little more than one.
//
// Weights are packed once, sixteen outputs side by side, so that a vector of them meets one number of x
// and nothing is ever summed across a vector. A weight is read and widened to float32 once for all rows.
// Every sum runs over the inputs in order, whatever the number of rows: a row's result is the same to
// the last bit alone and among others, which makes verifying a draft exactly plain decoding.
//
// The formats of rounded inputs round each row of x by itself, in groups of 32, to int8, and multiply
// integers: four products an instruction and lane where the processor has it, which leaves the memory
// as the bound up to some sixteen rows. bfloat16 times bfloat16 rounds x to that, two products at once.
//
// Plain C interface, called through ctypes; no OpenMP of its own (see parallel.h).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "calls.h"
#include "parallel.h"
#include "products.h"
#include "vectors.h"

namespace {

constexpr int64_t GROUP = 32;   // weights that share a scale in the grouped formats
constexpr int64_t AHEAD = 4096;  // bytes; the processor's own prefetching stops at the end of a page

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
      const char *at = from + p * size + k * F::bytes;
      if constexpr (T > 4) __builtin_prefetch(at + AHEAD);  // few rows wait for memory anyway
      const Vec w = F::get(at);
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
      if constexpr (T > 4)
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

// bfloat16 weights times x in bfloat16: a word holds two inputs of one output.
template <int P, int T>
void pairs(const LinearCall &call, int64_t panel, int64_t token, const uint16_t *all) {
  const int64_t inputs = call.inputs, size = inputs * 2 * LANES;
  const char *from = call.weight + panel * size;
  const uint16_t *x = all + token * inputs;
  Vec sums[P][T] = {};
  for (int64_t k = 0; k < inputs; k += 2)
    for (int p = 0; p < P; ++p) {
      const char *at = from + p * size + k * 2 * LANES;
      if constexpr (T > 4) __builtin_prefetch(at + AHEAD);
      const Words w = words(at);
      for (int t = 0; t < T; ++t) sums[p][t] = dot(sums[p][t], w, x + t * inputs + k);
    }
  for (int p = 0; p < P; ++p) {
    const int64_t n = (panel + p) * LANES;
    const Vec bias = call.bias ? load(call.bias + n) : Vec{};
    for (int t = 0; t < T; ++t) store(call.out + (token + t) * call.outputs + n, sums[p][t] + bias);
  }
}

enum Format { FLOAT32, BFLOAT16, INT8, INT8_GROUPS, INT4_GROUPS, INT8_ROUNDED, INT4_ROUNDED, BFLOAT16_ROUNDED };

// What a format needs to know of x beside x.
struct Inputs {
  std::vector<float> sums;  // over every group of 32 inputs [T, K / 32]
  Rounded rounded;
  std::vector<uint16_t> halves;  // [T, K]
};

template <int P, int T>
void any(const LinearCall &call, int format, int64_t panel, int64_t token, const Inputs &x) {
  switch (format) {
    case FLOAT32: return block<Float32, P, T>(call, panel, token);
    case BFLOAT16: return block<BFloat16, P, T>(call, panel, token);
    case INT8: return block<Int8, P, T>(call, panel, token);
    case INT8_GROUPS: return grouped<false, P, T>(call, panel, token, x.sums.data());
    case INT4_GROUPS: return grouped<true, P, T>(call, panel, token, x.sums.data());
    case INT8_ROUNDED: return integers<false, P, T>(call, panel, token, x.rounded);
    case INT4_ROUNDED: return integers<true, P, T>(call, panel, token, x.rounded);
    case BFLOAT16_ROUNDED: return pairs<P, T>(call, panel, token, x.halves.data());
  }
}

constexpr int STEP = 4;  // panels a thread takes at once
constexpr int MOST = (REGISTERS - 4) / PARTS < 8 ? (REGISTERS - 4) / PARTS : 8;  // rows whose sums stay in registers

// `count` panels, P at once while there are as many, times T rows.
template <int P, int T>
void tile(const LinearCall &call, int format, int64_t first, int64_t count, int64_t token, const Inputs &x) {
  int64_t p = 0;
  for (; p + P <= count; p += P) any<P, T>(call, format, first + p, token, x);
  for (; p < count; ++p) any<1, T>(call, format, first + p, token, x);
}

// Rows by as many as registers hold. A sum is a chain of dependent steps, so that few rows need several
// panels at once to keep the arithmetic busy.
// (Groups of nibbles have sums of their own beside those: four rows, where two registers hold a vector.)
void panels(const LinearCall &call, int format, int64_t first, int64_t count, const Inputs &x) {
  const int64_t most = format == INT4_GROUPS && PARTS > 1 ? std::min(MOST, 4) : MOST;
  for (int64_t token = 0; token < call.tokens;) {
    const int64_t rows = std::min<int64_t>(call.tokens - token, most);
    switch (rows) {
      case 1: tile<4, 1>(call, format, first, count, token, x); break;
      case 2: tile<2, 2>(call, format, first, count, token, x); break;
      case 3: tile<2, 3>(call, format, first, count, token, x); break;
      case 4: tile<PARTS == 1 ? 2 : 1, 4>(call, format, first, count, token, x); break;
      case 5: tile<1, 5>(call, format, first, count, token, x); break;
      case 6: tile<1, 6>(call, format, first, count, token, x); break;
      case 7: tile<1, 7>(call, format, first, count, token, x); break;
      case 8: tile<1, 8>(call, format, first, count, token, x); break;
    }
    token += rows;
  }
}

}  // namespace

extern "C" void speculant_linear(const LinearCall *call, int format, int threads) {
  static thread_local Inputs x;  // kept between calls: no allocation in the loop
  if (format == BFLOAT16_ROUNDED) {
    const int64_t count = call->tokens * call->inputs;  // of the last vector, the lanes that are there
    x.halves.resize((count + LANES - 1) / LANES * LANES);
    for (int64_t i = 0; i < count; i += LANES) {
      float last[LANES] = {};
      std::memcpy(last, call->x + i, sizeof(float) * std::min<int64_t>(LANES, count - i));
      store_halves(&x.halves[i], load(last));
    }
  } else if (format >= INT8_ROUNDED) {
    round_rows(*call, x.rounded);
  } else if (call->minima) {
    const int64_t groups = call->inputs / GROUP;
    x.sums.resize(call->tokens * groups);
    for (size_t i = 0; i < x.sums.size(); ++i) {
      float sum = 0;
      for (int64_t k = 0; k < GROUP; ++k) sum += call->x[i * GROUP + k];
      x.sums[i] = sum;
    }
  }
  const Inputs &shared = x;  // the caller's, for all threads
  const int64_t all = call->outputs / LANES, parts = (all + STEP - 1) / STEP;
  parallel(parts, threads, [&](int64_t i) {
    const int64_t first = i * STEP, count = all - first < STEP ? all - first : STEP;
    panels(*call, format, first, count, shared);
  });
}
