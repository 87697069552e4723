// Operations of a block between its matrix products, each in one pass over memory.
#include "kernels.h"
#include "simd.h"

// out = x / sqrt(mean(x^2) + eps) * (offset + weight), row by row [rows, size]; `inverse` [rows] is 1 / sqrt(...).
extern "C" void weft_rms_norm(
    const float *x, const float *weight, float *out, float *inverse, long rows, long size, double eps, double offset,
    long threads) {
  const int team = rows * size > LARGE ? (int)threads : 1;
  const float add = (float)offset;
#pragma omp parallel for num_threads(team)
  for (long r = 0; r < rows; r++) {
    const float *row = x + r * size;
    float *to = out + r * size;
    vec squares = {};
    long d = 0;
    for (; d + LANES <= size; d += LANES) squares += load(row + d) * load(row + d);
    if (d < size) {
      const vec rest = load_some(row + d, size - d);
      squares += rest * rest;
    }
    const float scale = 1.f / sqrtf(sum(squares) / size + (float)eps);
    inverse[r] = scale;
    for (d = 0; d + LANES <= size; d += LANES) store(to + d, load(row + d) * scale * (load(weight + d) + add));
    for (; d < size; d++) to[d] = row[d] * scale * (weight[d] + add);
  }
}

// The gradients of `weft_rms_norm`: with n = x inverse and g = grad_y (offset + weight), grad_x = inverse (g - n mean(g n)) and
// grad_weight [size] = sum over rows of grad_y n; either can be null. Rows are summed in blocks, then the blocks in order.
extern "C" void weft_rms_norm_backward(
    const float *x, const float *weight, const float *inverse, const float *grad_y, float *grad_x, float *grad_weight, long rows,
    long size, double offset, long threads) {
  constexpr long BLOCK = 64;
  const int team = rows * size > LARGE ? (int)threads : 1;
  const float add = (float)offset;
  const long blocks = (rows + BLOCK - 1) / BLOCK, wide = padded(size);
  const Buffer parts(grad_weight ? blocks * wide : 0);
#pragma omp parallel for num_threads(team)
  for (long b = 0; b < blocks; b++) {
    if (grad_weight) memset(parts + b * wide, 0, 4 * wide);
    for (long r = b * BLOCK; r < rows && r < (b + 1) * BLOCK; r++) {
      const float *row = x + r * size, *grad = grad_y + r * size, scale = inverse[r];
      vec along = {};
      for (long d = 0; d < size; d += LANES) {
        const vec product = load_up_to(row + d, size - d) * load_up_to(grad + d, size - d);
        along += product * (load_up_to(weight + d, size - d) + add);
        if (!grad_weight) continue;
        float *part = parts + b * wide + d;
        store(part, load(part) + product * scale);
      }
      if (!grad_x) continue;
      const float share = sum(along) * scale * scale * scale / size;
      for (long d = 0; d < size; d += LANES) {
        const vec g = load_up_to(grad + d, size - d) * (load_up_to(weight + d, size - d) + add);
        store_up_to(grad_x + r * size + d, g * scale - load_up_to(row + d, size - d) * share, size - d);
      }
    }
  }
  for (long d = 0; grad_weight && d < size; d++) {
    grad_weight[d] = 0.f;
    for (long b = 0; b < blocks; b++) grad_weight[d] += parts[b * wide + d];
  }
}

// x [tokens, heads, dim] with dimension i < half and i + half of the first `rotated` heads rotated by the angles of cos and sin
// [tokens, half], everything else copied; out is contiguous and can be x. `direction` -1 rotates back.
extern "C" void weft_rotate(
    const float *x, const float *cos, const float *sin, float *out, long token_stride, long head_stride, long tokens, long heads,
    long rotated, long dim, long half, double direction, long threads) {
  const int team = tokens * heads * dim > LARGE ? (int)threads : 1;
  const float way = (float)direction;
#pragma omp parallel for num_threads(team)
  for (long t = 0; t < tokens; t++)
    for (long h = 0; h < heads; h++) {
      const float *from = x + t * token_stride + h * head_stride, *c = cos + t * half, *s = sin + t * half;
      float *to = out + (t * heads + h) * dim;
      const long pairs = h < rotated ? half : 0;
      for (long d = 0; d < pairs; d += LANES) {
        const long left = pairs - d;
        const vec a = load_up_to(from + d, left), b = load_up_to(from + half + d, left);
        const vec cosine = load_up_to(c + d, left), sine = load_up_to(s + d, left) * way;
        store_up_to(to + d, a * cosine - b * sine, left);
        store_up_to(to + half + d, b * cosine + a * sine, left);
      }
      if (to != from) memcpy(to + 2 * pairs, from + 2 * pairs, 4 * (dim - 2 * pairs));
    }
}

// to[i] = from[at[i]], rows of `size`.
extern "C" void weft_gather(const float *from, const long *at, long rows, long size, float *to, long threads) {
  const int team = rows * size > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long i = 0; i < rows; i++) memcpy(to + i * size, from + at[i] * size, 4 * size);
}

// to += from, both [rows, size].
extern "C" void weft_add_rows(float *to, const float *from, long rows, long size, long threads) {
  const int team = rows * size > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long i = 0; i < rows; i++) {
    const float *more = from + i * size;
    for (long d = 0; d < size; d++) to[i * size + d] += more[d];
  }
}

// 1 / (1 + exp(-x)), or 0 if x is so low that x times it underflows to 0.
INLINE vec sigmoid(vec x) {
  const vec low = splat(-87.f), bound = x > low ? x : low;
  const ivec vanishes = x < low; // false for NaN
  return vanishes ? vec{} : 1.f / (1.f + exponential(-bound));
}

// out [rows, size] = silu(gate) * up, or silu(gate) if `up` is null; silu(x) = x / (1 + exp(-x)). Both inputs
// have rows `row_stride` apart.
extern "C" void weft_silu(const float *gate, const float *up, float *out, long row_stride, long rows, long size, long threads) {
  const int team = rows * size > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long r = 0; r < rows; r++) {
    const float *x = gate + r * row_stride, *f = up ? up + r * row_stride : nullptr;
    for (long d = 0; d < size; d += LANES) {
      const vec gated = load_up_to(x + d, size - d);
      vec y = gated * sigmoid(gated);
      if (f) y *= load_up_to(f + d, size - d);
      store_up_to(out + r * size + d, y, size - d);
    }
  }
}

// Recomputes the result of `weft_silu`, `out` [rows, size], and computes its gradients grad_gate and grad_up, given the
// gradient by that result, contiguous. Rows of the gradients, like those of the inputs, are `row_stride` apart. `out` can be
// null, and so can both up and grad_up.
extern "C" void weft_silu_backward(
    const float *gate, const float *up, const float *grad_out, float *out, float *grad_gate, float *grad_up, long row_stride,
    long rows, long size, long threads) {
  const int team = rows * size > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long r = 0; r < rows; r++)
    for (long d = 0; d < size; d += LANES) {
      const long at = r * row_stride + d, to = r * size + d, left = size - d;
      const vec x = load_up_to(gate + at, left), share = sigmoid(x), value = x * share, grad = load_up_to(grad_out + to, left);
      const vec f = up ? load_up_to(up + at, left) : splat(1.f);
      store_up_to(grad_gate + at, grad * f * (share + value * (1.f - share)), left);
      if (up) store_up_to(grad_up + at, grad * value, left);
      if (out) store_up_to(out + to, value * f, left);
    }
}

// Writes keys k and values v [tokens, heads, dim] (with strides of tokens and heads) to a cache [slots, heads, room, dim]:
// token t is row `places[t]` of its slot's first head, counted in rows of `dim` from the start of the cache.
extern "C" void weft_store(
    const float *k, const float *v, float *keys, float *values, const long *places, long k_token, long k_head, long v_token,
    long v_head, long tokens, long heads, long dim, long room, long threads) {
  const int team = tokens * heads * dim > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long t = 0; t < tokens; t++)
    for (long h = 0; h < heads; h++) {
      const long at = (places[t] + h * room) * dim;
      memcpy(keys + at, k + t * k_token + h * k_head, 4 * dim);
      memcpy(values + at, v + t * v_token + h * v_head, 4 * dim);
    }
}
