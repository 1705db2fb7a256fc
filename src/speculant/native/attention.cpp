// Attention of few new tokens over a long cache, read in place.
//
// Reading keys and values is what a decoding step of attention costs, so each is read once, for all
// query heads that share it and all new tokens, and only as far as its own row goes. Arithmetic is
// float32 whatever the cache holds. A query's sums run over the columns that it sees, in their order,
// and depend on nothing else: neither on the other rows of a batch, nor on how many tokens one forward
// holds, nor on what stands between: a node of a tree gets what its path would get as a chain.
//
// Plain C interface, called through ctypes; no OpenMP of its own (see parallel.h).

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "calls.h"
#include "crosswise.h"
#include "parallel.h"
#include "vectors.h"

namespace {

// Where a row's new tokens begin, in elements: rows lie a stride apart, or close together.
inline int64_t place(const AttentionCall &call, const int64_t *strides, int64_t row) {
  return call.counts ? call.firsts[row] * strides[2] : row * strides[0];
}

inline int64_t tokens_of(const AttentionCall &call, int64_t row) {
  return call.counts ? call.counts[row] : call.tokens;
}

// One row and one key/value head of it. Queries come in fours; the last four may be padded.
template <class E, int CHUNKS>
struct Pair {
  static constexpr int64_t dim = CHUNKS * LANES;
  const AttentionCall &call;
  const int64_t row, head, tokens, queries, columns, width;
  const E *keys, *values;
  float *q, *scores;  // [queries, D], [queries, width: columns in whole vectors]

  // Scores of four queries: four columns at a time, summed crosswise (see `cross`).
  void score(int64_t first) const {
    Vec mine[4][CHUNKS];
    for (int i = 0; i < 4; ++i)
      for (int d = 0; d < CHUNKS; ++d) mine[i][d] = load(q + (first + i) * dim + d * LANES);
    float *to = scores + first * width;
    for (int64_t c = 0; c < columns; c += 4) {
      Vec part[4];
      for (int64_t j = 0; j < 4; ++j) {
        const E *key = keys + (c + j < columns ? c + j : c) * dim;
        Vec sums[4] = {};
        for (int d = 0; d < CHUNKS; ++d) {
          const Vec k = load(key + d * LANES);
          for (int i = 0; i < 4; ++i) sums[i] += k * mine[i][d];
        }
        part[j] = quarter(sums[0], sums[1], sums[2], sums[3]);
      }
      const Vec sum = cross(part[0], part[1], part[2], part[3]);  // [query, column]
      for (int i = 0; i < 4; ++i)
        std::memcpy(to + i * width + c, reinterpret_cast<const float *>(&sum) + 4 * i, 16);
    }
  }

  // Scores -> weights that sum to one, 0 in the columns that are padding or not to be seen. Seen ones
  // move together first, since a column's lane is its place in the sum.
  void soften(int64_t query) const {
    float *s = scores + query * width;
    const int64_t start = call.starts[row], token = query % tokens;
    int64_t kept = start;
    for (int64_t c = start; c < columns; ++c)
      if (seen(token, c - start)) s[kept++] = s[c];
    for (int64_t c = kept; c < width; ++c) s[c] = -INFINITY;
    Vec tops = Vec{} - INFINITY, sums = {};
    for (int64_t c = 0; c < width; c += LANES) tops = larger(tops, load(s + c));
    const float top = most(tops);
    for (int64_t c = 0; c < width; c += LANES) {
      const Vec e = exponential(load(s + c) - top);
      store(s + c, e);
      sums += e;
    }
    const float inverse = 1 / total(sums);
    for (int64_t c = 0; c < width; c += LANES) store(s + c, load(s + c) * inverse);
    for (int64_t c = columns - 1; c >= start && kept <= c; --c)  // and back, from the last one on
      s[c] = seen(token, c - start) ? s[--kept] : 0;
  }

  bool seen(int64_t token, int64_t offset) const {
    if (!call.mask) return offset <= call.behind + token;
    return call.mask[(row * call.tokens + token) * (call.behind + call.tokens) + offset] != 0;
  }

  // Weighted sums of the values for four queries, N chunks of them from `chunk` on.
  template <int N>
  void mix(int64_t first, int chunk) const {
    Vec sums[4][N] = {};
    const float *weight = scores + first * width;
    for (int64_t c = 0; c < columns; ++c)
      for (int d = 0; d < N; ++d) {
        const Vec value = load(values + c * dim + (chunk + d) * LANES);
        for (int i = 0; i < 4; ++i) sums[i][d] += value * weight[i * width + c];
      }
    for (int i = 0; i < 4 && first + i < queries; ++i)
      for (int d = 0; d < N; ++d) store(out(first + i) + (chunk + d) * LANES, sums[i][d]);
  }

  float *out(int64_t query) const {
    const int64_t token = query % tokens, group = query / tokens;
    const int64_t heads = call.kv_heads * call.groups, h = head * call.groups + group;
    const int64_t first = call.counts ? call.firsts[row] : row * call.tokens;
    return call.out + ((first + token) * heads + h) * dim;
  }

  void run() const {
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t t = i % tokens, h = head * call.groups + i / tokens;
      const int64_t *step = call.q_strides;
      const E *from = reinterpret_cast<const E *>(call.q) + place(call, step, row) + h * step[1] + t * step[2];
      for (int d = 0; d < CHUNKS; ++d) store(q + i * dim + d * LANES, load(from + d * LANES) * call.scale);
    }
    for (int64_t i = 0; i < queries; i += 4) score(i);
    for (int64_t i = 0; i < queries; ++i) soften(i);
    for (int64_t i = 0; i < queries; i += 4) {
      constexpr int AT_ONCE = PARTS == 1 ? 4 : 1;  // so that the sums stay in registers
      int chunk = 0;
      for (; chunk + AT_ONCE <= CHUNKS; chunk += AT_ONCE) mix<AT_ONCE>(i, chunk);
      if constexpr (CHUNKS % AT_ONCE != 0) mix<CHUNKS % AT_ONCE>(i, chunk);
    }
  }
};

template <class E>
void append(E *to, const char *from, const int64_t *strides, const AttentionCall &call, int64_t row, int64_t head) {
  const E *source = reinterpret_cast<const E *>(from) + place(call, strides, row) + head * strides[1];
  for (int64_t t = 0; t < tokens_of(call, row); ++t)
    std::memcpy(to + t * call.dim, source + t * strides[2], call.dim * sizeof(E));
}

template <class E, int CHUNKS>
void attend_pair(const AttentionCall &call, int64_t row, int64_t head) {
  const int64_t start = call.starts[row] + call.behind;
  const int64_t base = call.slots[row] * call.row_stride + head * call.head_stride;
  E *keys = reinterpret_cast<E *>(call.keys) + base, *values = reinterpret_cast<E *>(call.values) + base;
  append(keys + start * call.dim, call.k_new, call.k_strides, call, row, head);
  append(values + start * call.dim, call.v_new, call.v_strides, call, row, head);
  const int64_t tokens = tokens_of(call, row);
  const int64_t queries = call.groups * tokens, padded = (queries + 3) / 4 * 4;
  const int64_t columns = start + tokens, width = (columns + LANES - 1) / LANES * LANES;
  static thread_local std::vector<float> memory;
  memory.assign(padded * call.dim, 0);
  memory.resize(padded * (call.dim + width));
  float *q = memory.data();
  Pair<E, CHUNKS>{call, row, head, tokens, queries, columns, width, keys, values, q, q + padded * call.dim}.run();
}

template <class E>
void attend_any(const AttentionCall &call, int64_t row, int64_t head) {
  switch (call.dim / LANES) {
    case 1: return attend_pair<E, 1>(call, row, head);
    case 2: return attend_pair<E, 2>(call, row, head);
    case 3: return attend_pair<E, 3>(call, row, head);
    case 4: return attend_pair<E, 4>(call, row, head);
    case 5: return attend_pair<E, 5>(call, row, head);
    case 6: return attend_pair<E, 6>(call, row, head);
    case 7: return attend_pair<E, 7>(call, row, head);
    case 8: return attend_pair<E, 8>(call, row, head);
  }
}

}  // namespace

extern "C" void speculant_attend(const AttentionCall *call, int bfloat16, int threads) {
  parallel(call->batch * call->kv_heads, threads, [&](int64_t i) {
    const int64_t row = i / call->kv_heads, head = i % call->kv_heads;
    if (bfloat16) attend_any<Bf16>(*call, row, head);
    else attend_any<float>(*call, row, head);
  });
}
