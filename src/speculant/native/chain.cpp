// A greedy chain of a one-layer draft head in one call: what the last round committed, run from the
// target's states; then norm, LM head, the likeliest token, its embedding, the layer, and again. Between
// those, a step in Python costs as much as the step itself.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "calls.h"
#include "largest.h"
#include "vectors.h"

namespace {

void multiply(const Matrix &m, const float *x, float *out, int64_t rows, int64_t threads) {
  const LinearCall call{x, m.weight, m.scales, m.minima, m.bias, out, rows, m.inputs, m.outputs};
  speculant_linear(&call, static_cast<int>(m.format), static_cast<int>(threads));
}

struct Buffers {
  std::vector<float> hidden, normed, logits, beside, cos, sin;
  std::vector<int64_t> rows, slots, starts;
};

}  // namespace

// Run the pairs made of the target's states; the last output of each row into pass.hidden.
extern "C" void speculant_catch_up(const ChainCall *to) {
  const ChainCall &call = *to;
  Pass pass = *call.pass;
  const int64_t size = call.model->hidden;
  multiply(call.fc, call.taps, call.features, pass.rows, pass.threads);
  pass.hidden = call.features;
  speculant_layers(call.model, &pass);
  for (int64_t b = 0; b < pass.batch; ++b) {
    const int64_t last = pass.firsts[b] + pass.counts[b] - 1;
    std::memcpy(call.pass->hidden + b * size, call.features + last * size, size * sizeof(float));
  }
}

extern "C" void speculant_chain(const ChainCall *call) {
  static thread_local Buffers b;  // kept between calls: no allocation in the loop
  const Model &m = *call->model;
  if (call->taps) speculant_catch_up(call);
  Pass pass = *call->pass;
  const int64_t size = m.hidden, half = m.dim / 2, batch = pass.batch, width = call->head.outputs;
  b.hidden.assign(pass.hidden, pass.hidden + batch * size);
  b.slots.assign(pass.slots, pass.slots + batch);
  b.starts.assign(pass.starts, pass.starts + batch);
  b.rows.resize(batch);
  b.normed.resize(batch * size);
  b.beside.resize(batch * size);
  b.logits.resize(batch * width);
  b.cos.resize(batch * half);
  b.sin.resize(batch * half);
  for (int64_t r = 0; r < batch; ++r) {
    b.rows[r] = r;
    if (call->taps) b.starts[r] += pass.counts[r];
  }
  pass.firsts = pass.counts = nullptr;
  pass.tokens = 1;
  for (int64_t i = 0; i < batch * call->steps; ++i) call->ids[i] = -1;
  int64_t live = batch;
  for (int64_t step = 0; live; ++step) {
    speculant_norm(b.hidden.data(), call->norm, b.normed.data(), live, size, m.eps);
    multiply(call->head, b.normed.data(), b.logits.data(), live, pass.threads);
    int64_t kept = 0;
    for (int64_t i = 0; i < live; ++i) {
      const int64_t row = b.rows[i], id = likeliest(&b.logits[i * width], call->tokens);
      call->ids[row * call->steps + step] = id;
      if (id < 0 || step + 1 >= call->depths[row]) continue;
      const int64_t turn = (step * batch + row) * half;
      std::memcpy(&b.beside[kept * size], call->embeddings + id * size, size * sizeof(float));
      std::memmove(&b.hidden[kept * size], &b.hidden[i * size], size * sizeof(float));
      std::memcpy(&b.cos[kept * half], call->cos + turn, half * sizeof(float));
      std::memcpy(&b.sin[kept * half], call->sin + turn, half * sizeof(float));
      b.rows[kept] = row;
      b.slots[kept] = b.slots[i];
      b.starts[kept++] = b.starts[i];
    }
    live = kept;
    if (!live) return;
    pass.hidden = b.hidden.data();
    pass.beside = b.beside.data();
    pass.cos = b.cos.data();
    pass.sin = b.sin.data();
    pass.slots = b.slots.data();
    pass.starts = b.starts.data();
    pass.rows = pass.batch = live;
    pass.behind = step;
    speculant_layers(&m, &pass);
  }
}
