// Whole decoder layers of few rows in one call: what lies between the matrices costs a Python call
// each otherwise, twenty a layer, as much as the matrices of a small model together.
//
// Llama, Mistral, Qwen2 and Qwen3: RMS norm, fused QKV, optional norms of queries and keys, rotary
// embedding by halves, attention over the cache, SwiGLU. float32 throughout.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "calls.h"
#include "largest.h"
#include "parallel.h"
#include "vectors.h"

namespace {

void norm(const float *x, const float *weight, float *out, int64_t size, float eps) {
  Vec squares = {};
  float rest = 0;
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const Vec v = load(x + i);
    squares += v * v;
  }
  for (; i < size; ++i) rest += x[i] * x[i];
  const float factor = 1 / std::sqrt((total(squares) + rest) / size + eps);
  for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
  for (; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

void rotate(float *x, const float *cos, const float *sin, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

void multiply(const Matrix &m, const float *x, float *out, int64_t rows, int threads) {
  const LinearCall call{x, m.weight, m.scales, m.minima, m.bias, out, rows, m.inputs, m.outputs};
  speculant_linear(&call, static_cast<int>(m.format), threads);
}

void add(float *to, const float *from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

void gated(const float *both, float *out, int64_t size) {  // silu(gate) * up
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const Vec gate = load(both + i);
    const Vec e = exponential(choose(gate > 0.0f, -gate, gate));  // of -|gate|
    const Vec sigmoid = choose(gate > 0.0f, Vec{} + 1.0f, e) / (1.0f + e);
    store(out + i, gate * sigmoid * load(both + size + i));
  }
  for (; i < size; ++i) out[i] = both[i] / (1 + std::exp(-both[i])) * both[size + i];
}

struct Buffers {
  std::vector<float> normed, wide, mixed, back, inner;
};

void attention(const Model &m, const Layer &layer, const Pass &pass, int64_t index, Buffers &b) {
  const int64_t rows = pass.rows, width = layer.qkv.outputs, dim = m.dim;
  const int threads = static_cast<int>(pass.threads);
  for (int64_t r = 0; r < rows; ++r) {
    float *to = &b.normed[r * layer.qkv.inputs];
    if (layer.beside_norm) {
      norm(pass.beside + r * m.hidden, layer.beside_norm, to, m.hidden, m.eps);
      to += m.hidden;
    }
    norm(pass.hidden + r * m.hidden, layer.input_norm, to, m.hidden, m.eps);
  }
  multiply(layer.qkv, b.normed.data(), b.wide.data(), rows, threads);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < m.heads + m.kv_heads; ++h) {
      float *x = &b.wide[r * width + h * dim];
      const float *weight = h < m.heads ? layer.q_norm : layer.k_norm;
      if (weight) norm(x, weight, x, dim, m.eps);
      rotate(x, pass.cos + r * dim / 2, pass.sin + r * dim / 2, dim);
    }
  const float *q = b.wide.data(), *k = q + m.heads * dim, *v = k + m.kv_heads * dim;
  const int64_t s[3] = {pass.tokens * width, dim, width};
  const AttentionCall call{
      reinterpret_cast<const char *>(q), reinterpret_cast<const char *>(k), reinterpret_cast<const char *>(v),
      reinterpret_cast<char *>(pass.keys + index * pass.layer_stride),
      reinterpret_cast<char *>(pass.values + index * pass.layer_stride), b.mixed.data(), pass.slots,
      pass.starts, pass.mask, pass.firsts, pass.counts, {s[0], s[1], s[2]}, {s[0], s[1], s[2]}, {s[0], s[1], s[2]},
      pass.row_stride, pass.head_stride, pass.batch, m.kv_heads, m.heads / m.kv_heads, pass.tokens,
      dim, pass.behind, 1 / std::sqrt(static_cast<float>(dim))};
  speculant_attend(&call, 0, threads);
  multiply(layer.out, b.mixed.data(), b.back.data(), rows, threads);
  add(pass.hidden, b.back.data(), rows * m.hidden);
}

void feed_forward(const Model &m, const Layer &layer, const Pass &pass, Buffers &b) {
  const int64_t rows = pass.rows;
  const int threads = static_cast<int>(pass.threads);
  for (int64_t r = 0; r < rows; ++r)
    norm(pass.hidden + r * m.hidden, layer.mlp_norm, &b.normed[r * m.hidden], m.hidden, m.eps);
  multiply(layer.gate_up, b.normed.data(), b.wide.data(), rows, threads);
  for (int64_t r = 0; r < rows; ++r)
    gated(&b.wide[r * layer.gate_up.outputs], &b.inner[r * m.middle], m.middle);
  multiply(layer.down, b.inner.data(), b.back.data(), rows, threads);
  add(pass.hidden, b.back.data(), rows * m.hidden);
}

}  // namespace

extern "C" void speculant_layers(const Model *model, const Pass *pass) {
  static thread_local Buffers b;  // kept between calls: no allocation in the loop
  const int64_t rows = pass->rows, size = rows * model->hidden;
  int64_t wide = 0;
  for (int64_t i = 0; i < model->count; ++i) {
    const Layer &layer = model->layers[i];
    const int64_t most = layer.qkv.outputs > layer.gate_up.outputs ? layer.qkv.outputs : layer.gate_up.outputs;
    wide = most > wide ? most : wide;
  }
  b.normed.resize(pass->beside ? 2 * size : size);
  b.back.resize(size);
  b.wide.resize(rows * wide);
  b.mixed.resize(rows * model->heads * model->dim);
  b.inner.resize(rows * model->middle);
  for (int64_t i = 0; i < model->count; ++i) {
    if (pass->taps[i]) std::memcpy(pass->taps[i], pass->hidden, size * sizeof(float));
    attention(*model, model->layers[i], *pass, i, b);
    feed_forward(*model, model->layers[i], *pass, b);
  }
}

// x / root mean square * weight, row by row [rows, size].
extern "C" void speculant_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t size, float eps) {
  for (int64_t r = 0; r < rows; ++r) norm(x + r * size, weight, out + r * size, size, eps);
}

// The first place of the largest of each row [rows, count], or -1 where it is not finite or a NaN is there.
extern "C" void speculant_likeliest(
    const float *x, int64_t rows, int64_t stride, int64_t count, int64_t *ids, int threads) {
  parallel(rows, threads, [&](int64_t r) { ids[r] = likeliest(x + r * stride, count); });
}
