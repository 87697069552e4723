// What a block does between its products, one pass over memory each.
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

// x [tokens, heads, dim] with dimension i < half and i + half turned by the angles of cos and sin [tokens, half], the others
// copied, to out, contiguous. `direction` -1 turns back.
extern "C" void weft_rotate(
    const float *x, const float *cos, const float *sin, float *out, long by_token, long by_head, long tokens, long heads,
    long dim, long half, double direction, long threads) {
  const int team = tokens * heads * dim > LARGE ? (int)threads : 1;
  const float way = (float)direction;
#pragma omp parallel for num_threads(team)
  for (long t = 0; t < tokens; t++)
    for (long h = 0; h < heads; h++) {
      const float *a = x + t * by_token + h * by_head, *b = a + half, *c = cos + t * half, *s = sin + t * half;
      float *to = out + (t * heads + h) * dim;
      for (long d = 0; d < half; d++) to[d] = a[d] * c[d] - b[d] * (s[d] * way);
      for (long d = 0; d < half; d++) to[half + d] = b[d] * c[d] + a[d] * (s[d] * way);
      memcpy(to + 2 * half, a + 2 * half, 4 * (dim - 2 * half));
    }
}

// out [rows, size] = silu(opened) * factor, or silu(opened) where `factor` is null; silu(x) = x / (1 + exp(-x)). Both inputs
// have rows `by_row` apart.
extern "C" void weft_silu(const float *opened, const float *factor, float *out, long by_row, long rows, long size, long threads) {
  const int team = rows * size > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long r = 0; r < rows; r++) {
    const float *x = opened + r * by_row, *f = factor ? factor + r * by_row : nullptr;
    float *to = out + r * size;
    for (long d = 0; d < size; d += LANES) {
      const long some = size - d < LANES ? size - d : LANES;
      const vec open = some < LANES ? load_some(x + d, some) : load(x + d);
      const vec low = splat(-87.f), bound = open > low ? open : low;
      const ivec vanishes = open < low; // not so for what is no number
      vec y = vanishes ? vec{} : open / (1.f + exponential(-bound));
      if (f) y *= some < LANES ? load_some(f + d, some) : load(f + d);
      some < LANES ? store_some(to + d, y, some) : store(to + d, y);
    }
  }
}

// Keys k and values v [tokens, heads, dim] (strides of a token and a head) into a cache [slots, heads, room, dim]: token t is
// row `places[t]` of its slot's first head, counted in rows of `dim` from the cache's beginning.
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
