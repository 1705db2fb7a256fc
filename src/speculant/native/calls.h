// Arguments of the library's functions; attention.py, linear.py and layers.py have the same structs.
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

extern "C" {
void speculant_linear(const LinearCall *call, int format, int threads);
void speculant_attend(const AttentionCall *call, int bfloat16, int threads);
}
