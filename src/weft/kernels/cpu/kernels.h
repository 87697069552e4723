// Kernels that other kernels call; each is documented at its definition.
#pragma once

struct Arguments;
struct Matrices;

// Products by AMX tiles; return false if the processor has none.
bool weft_product_amx(
    const float *x, const float *weight, const float *bias, float *out, long row_stride, long rows, long size, long terms,
    long threads);
bool weft_matmul_amx(const Matrices &m, long threads);

extern "C" {
void weft_attend(const Arguments *given);
void weft_attend_backward(const Arguments *given);
void weft_merge_rows(
    float *out, float *lse, const float *more, const float *more_lse, const long *rows, long count, long heads, long dim,
    long row_stride, long threads);
void weft_rms_norm(
    const float *x, const float *weight, float *out, float *inverse, long rows, long size, double eps, double offset,
    long threads);
void weft_rotate(
    const float *x, const float *cos, const float *sin, float *out, long token_stride, long head_stride, long tokens, long heads,
    long rotated, long dim, long half, double direction, long threads);
void weft_gather(const float *from, const long *at, long rows, long size, float *to, long threads);
void weft_add_rows(float *to, const float *from, long rows, long size, long threads);
void weft_rms_norm_backward(
    const float *x, const float *weight, const float *inverse, const float *grad_y, float *grad_x, float *grad_weight, long rows,
    long size, double offset, long threads);
void weft_silu(const float *gate, const float *up, float *out, long row_stride, long rows, long size, long threads);
void weft_silu_backward(
    const float *gate, const float *up, const float *grad_out, float *out, float *grad_gate, float *grad_up, long row_stride,
    long rows, long size, long threads);
void weft_store(
    const float *k, const float *v, float *keys, float *values, const long *places, long k_token, long k_head, long v_token,
    long v_head, long tokens, long heads, long dim, long room, long threads);
void weft_statistics(
    const float *x, float *lse, float *entropy, long *best, long rows, long size, long threads);
void weft_draw(
    const float *x, const double *uniforms, long *ids, float *logprobs, long rows, long size, long threads);
void weft_product(
    const float *x, const float *weight, const float *bias, float *out, long row_stride, long rows, long size, long terms,
    long threads);
void weft_matmul(
    const float *a, const float *b, const float *bias, float *out, long a_row, long a_term, long b_term, long b_column, long rows,
    long terms, long columns, long adds, long threads);
}

// Result of a forward pass. OUTSIDE: a token is outside the vocabulary or a wanted row does not exist; nothing was computed.
enum Outcome : long { DONE = 0, OUTSIDE = -1, NO_MEMORY = -2 };

struct Linear {
  const float *weight, *bias; // [out, in], and [out] or null
};

// out [rows, size] = x [rows, terms] weight^T + bias; `weft_product` is used for up to `few` rows, else `weft_matmul`.
inline void multiply(
    const float *x, Linear layer, float *out, long rows, long size, long terms, long few, long threads) {
  if (rows <= few) weft_product(x, layer.weight, layer.bias, out, size, rows, size, terms, threads);
  else weft_matmul(x, layer.weight, layer.bias, out, terms, 1, 1, terms, rows, terms, size, 0, threads);
}

// Tensor [tokens, heads, dim]; `row_stride` and `head_stride` in floats.
struct Heads {
  float *at;
  long row_stride, head_stride;
};

// Rows `row` to `row + rows` attend to keys `key` to `key + keys`.
struct Segment {
  long row, rows, key, keys;
};

// Arguments of attention. Tensors are [tokens, heads, dim]; k and v have `kv` heads and query head h reads kv head h / (heads /
// kv). dim is at most 256. lse [tokens, heads]. The result of a row that sees no key is 0, its lse minus infinity.
struct Arguments {
  Heads q, k, v, out, grad_out, grad_q, grad_k, grad_v;
  float *lse;
  const Segment *segments;
  long count, heads, kv, dim, causal, window, threads;
  double scale;
};
