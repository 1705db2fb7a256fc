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
#include <cstdint>
#include <cstring>
#include <vector>

#include "calls.h"
#include "grouped.h"
#include "parallel.h"
#include "rounded.h"
#include "vectors.h"

namespace {

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
      if constexpr (PREFETCHED<T>) __builtin_prefetch(at + AHEAD);
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
      if constexpr (PREFETCHED<T>) __builtin_prefetch(at + AHEAD);
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

// `count` panels, P at once while there are as many, times T rows.
template <int P, int T>
void tile(const LinearCall &call, int format, int64_t first, int64_t count, int64_t token, const Inputs &x) {
  int64_t p = 0;
  for (; p + P <= count; p += P) any<P, T>(call, format, first + p, token, x);
  for (; p < count; ++p) any<1, T>(call, format, first + p, token, x);
}

// A sum is a chain of dependent steps, so that few rows need several panels at once to keep the
// arithmetic busy.
constexpr int together(int rows) { return rows == 1 ? 4 : rows < 4 || (rows == 4 && PARTS == 1) ? 2 : 1; }

// Rows by as many as registers hold the sums of. (Of groups of nibbles there are others beside these: four
// rows are faster than six, where two registers hold sixteen numbers.)
void panels(const LinearCall &call, int format, int64_t first, int64_t count, const Inputs &x) {
  const int64_t most = format == INT4_GROUPS && PARTS > 1 ? std::min(MOST, 4) : MOST;
  for (int64_t token = 0; token < call.tokens; token += most)
    counted(std::min<int64_t>(call.tokens - token, most), [&](auto rows) {
      constexpr int T = decltype(rows)::value;
      tile<together(T), T>(call, format, first, count, token, x);
    });
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
