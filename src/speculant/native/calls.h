// Arguments of the library's functions; attention.py, linear.py, layers.py and chain.py have the same structs.
#pragma once

#include <cstdint>

struct LinearCall {
  const float *x;      // [T, K]
  const char *weight;  // [N / 16, K, 16] in the format's own bytes
  const float *scales, *minima;  // per channel [N]; grouped [N / 16, K / 32, 16]; or null
  const float *bias;   // [N] or null
  float *out;          // [T, N]
  int64_t tokens, inputs, outputs;
};

struct AttentionCall {
  const char *q;              // [B, H, T, D], strides below, in elements
  const char *k_new, *v_new;  // [B, Hkv, T, D], strides below
  char *keys, *values;        // [R, Hkv, C, D]
  float *out;                 // [B, T, H, D]
  const int64_t *slots, *starts;  // [B]
  const uint8_t *mask;        // [B, T, behind + T] or null: causal
  const int64_t *firsts, *counts;  // [B] or null: rows of fewer than T tokens, one behind the other
  int64_t q_strides[3], k_strides[3], v_strides[3], row_stride, head_stride;
  int64_t batch, kv_heads, groups, tokens, dim, behind;
  float scale;
};

struct Matrix {
  const char *weight;
  const float *scales, *minima, *bias;
  int64_t format, inputs, outputs;  // outputs: in whole panels of sixteen
};

struct Layer {
  const float *input_norm, *q_norm, *k_norm, *mlp_norm;  // [H], [D] or null, [D] or null, [H]
  const float *beside_norm;  // [H] or null: an EAGLE layer, see Pass.beside
  Matrix qkv, out, gate_up, down;
};

struct Model {
  const Layer *layers;
  int64_t count, hidden, heads, kv_heads, dim, middle;
  float eps;
};

struct Pass {
  float *hidden;            // [R, H], in and out; R is B * T, or the sum of counts
  const float *beside;      // [R, H] or null: its norm stands before hidden's in QKV's input
  const float *cos, *sin;   // [R, D / 2]
  float *keys, *values;     // of layer 0; the next one's lie layer_stride further on
  float *const *taps;       // [count + 1]: where to copy the state that enters a layer, or null
  const int64_t *slots, *starts;
  const uint8_t *mask;
  const int64_t *firsts, *counts;  // [B] or null: see AttentionCall
  int64_t rows, batch, tokens, behind, layer_stride, row_stride, head_stride;
  int64_t threads;
};

struct ChainCall {
  const Model *model;       // of one layer
  const Pass *pass;         // hidden [B, H] in, or out with taps: predicts each row's first token
  const float *norm;        // [H], before the LM head
  Matrix fc, head;          // fc: taps to features; head: over the draft vocabulary
  const float *embeddings;  // [N, H], of the draft vocabulary's tokens
  const float *cos, *sin;   // [steps - 1, B, D / 2]
  const int64_t *depths;    // [B]: how many tokens to draft for each row
  int64_t steps, tokens;    // the deepest of them; N
  int64_t *ids;             // [B, steps] out: draft ids, -1 from where logits are no numbers
  const float *taps;        // [R, fc.inputs] or null: pairs to run first, pass.counts of each row; then
  float *features;          // [R, H], room for what they become; pass.beside, cos, sin: [R, ...]
};

struct TreeCall {
  const ChainCall *draft;   // steps, ids: not read; depths: levels of each row's tree
  int64_t branch, count;    // k, nodes expanded a level and children of each; most nodes of a tree
  const float *const *node_ms;  // [B] of [priced[b]], or null for a row without prices; see prices.py
  const int64_t *priced;    // [B]
  const float *rates, *step_ms, *trust;  // [B]
  int64_t *ids, *parents;   // [B, count] out: draft ids, and places in the tree or -1
  int64_t *sizes;           // [B] out: nodes of each
  float *hoped;             // [B] out: the sum of their confidences
  uint8_t *broken;          // [B] out: numbers that are none may lie behind the row's length
};

extern "C" {
void speculant_catch_up(const ChainCall *call);
void speculant_layers(const Model *model, const Pass *pass);
void speculant_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t size, float eps);
void speculant_linear(const LinearCall *call, int format, int threads);
void speculant_attend(const AttentionCall *call, int bfloat16, int threads);
}
