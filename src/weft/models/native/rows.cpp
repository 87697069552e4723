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

// The gradients of `weft_rms_norm`: with n = x inverse and g = by_y (offset + weight), by_x = inverse (g - n mean(g n)) and
// by_weight [size] = sum over rows of by_y n; either may be null. Rows are summed in blocks, then these in order.
extern "C" void weft_rms_norm_backward(
    const float *x, const float *weight, const float *inverse, const float *by_y, float *by_x, float *by_weight, long rows,
    long size, double offset, long threads) {
  constexpr long BLOCK = 64;
  const int team = rows * size > LARGE ? (int)threads : 1;
  const float add = (float)offset;
  const long blocks = (rows + BLOCK - 1) / BLOCK, wide = padded(size);
  const Buffer parts(by_weight ? blocks * wide : 0);
#pragma omp parallel for num_threads(team)
  for (long b = 0; b < blocks; b++) {
    if (by_weight) memset(parts + b * wide, 0, 4 * wide);
    for (long r = b * BLOCK; r < rows && r < (b + 1) * BLOCK; r++) {
      const float *row = x + r * size, *by = by_y + r * size, scale = inverse[r];
      vec along = {};
      for (long d = 0; d < size; d += LANES) {
        const vec product = load_up_to(row + d, size - d) * load_up_to(by + d, size - d);
        along += product * (load_up_to(weight + d, size - d) + add);
        if (!by_weight) continue;
        float *part = parts + b * wide + d;
        store(part, load(part) + product * scale);
      }
      if (!by_x) continue;
      const float share = sum(along) * scale * scale * scale / size;
      for (long d = 0; d < size; d += LANES) {
        const vec g = load_up_to(by + d, size - d) * (load_up_to(weight + d, size - d) + add);
        store_up_to(by_x + r * size + d, g * scale - load_up_to(row + d, size - d) * share, size - d);
      }
    }
  }
  for (long d = 0; by_weight && d < size; d++) {
    by_weight[d] = 0.f;
    for (long b = 0; b < blocks; b++) by_weight[d] += parts[b * wide + d];
  }
}

// x [tokens, heads, dim] with dimension i < half and i + half of the first `turned` heads turned by the angles of cos and sin
// [tokens, half], all else copied, to out, contiguous, which may be x. `direction` -1 turns back.
extern "C" void weft_rotate(
    const float *x, const float *cos, const float *sin, float *out, long by_token, long by_head, long tokens, long heads,
    long turned, long dim, long half, double direction, long threads) {
  const int team = tokens * heads * dim > LARGE ? (int)threads : 1;
  const float way = (float)direction;
#pragma omp parallel for num_threads(team)
  for (long t = 0; t < tokens; t++)
    for (long h = 0; h < heads; h++) {
      const float *from = x + t * by_token + h * by_head, *c = cos + t * half, *s = sin + t * half;
      float *to = out + (t * heads + h) * dim;
      const long pairs = h < turned ? half : 0;
      for (long d = 0; d < pairs; d += LANES) {
        const long left = pairs - d;
        const vec a = load_up_to(from + d, left), b = load_up_to(from + half + d, left);
        const vec by = load_up_to(c + d, left), across = load_up_to(s + d, left) * way;
        store_up_to(to + d, a * by - b * across, left);
        store_up_to(to + half + d, b * by + a * across, left);
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

// to[i] += from[at[i]], rows of `size`; each its own where `at` is null.
extern "C" void weft_add_rows(float *to, const float *from, const long *at, long rows, long size, long threads) {
  const int team = rows * size > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long i = 0; i < rows; i++) {
    const float *more = from + (at ? at[i] : i) * size;
    for (long d = 0; d < size; d++) to[i * size + d] += more[d];
  }
}

// to[at[i]] += from[i], rows of `size`, in order; a row may be named more than once, so threads share the columns.
extern "C" void weft_add_to_rows(float *to, const float *from, const long *at, long rows, long size, long threads) {
  constexpr long PART = 64;
  const int team = rows * size > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long part = 0; part < size; part += PART) {
    const long end = part + PART < size ? part + PART : size;
    for (long i = 0; i < rows; i++)
      for (long d = part; d < end; d++) to[at[i] * size + d] += from[i * size + d];
  }
}

// 1 / (1 + exp(-x)), 0 where x is so low that x times it vanishes.
INLINE vec sigmoid(vec x) {
  const vec low = splat(-87.f), bound = x > low ? x : low;
  const ivec vanishes = x < low; // not so for what is no number
  return vanishes ? vec{} : 1.f / (1.f + exponential(-bound));
}

// out [rows, size] = silu(opened) * factor, or silu(opened) where `factor` is null; silu(x) = x / (1 + exp(-x)). Both inputs
// have rows `by_row` apart.
extern "C" void weft_silu(const float *opened, const float *factor, float *out, long by_row, long rows, long size, long threads) {
  const int team = rows * size > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long r = 0; r < rows; r++) {
    const float *x = opened + r * by_row, *f = factor ? factor + r * by_row : nullptr;
    for (long d = 0; d < size; d += LANES) {
      const vec open = load_up_to(x + d, size - d);
      vec y = open * sigmoid(open);
      if (f) y *= load_up_to(f + d, size - d);
      store_up_to(out + r * size + d, y, size - d);
    }
  }
}

// What `weft_silu` made, `out` [rows, size], once more, and its gradients given the one by it, contiguous: by_opened and
// by_factor, which have rows `by_row` apart as the inputs do. `out` may be null, and both of factor and by_factor.
extern "C" void weft_silu_backward(
    const float *opened, const float *factor, const float *by_out, float *out, float *by_opened, float *by_factor, long by_row,
    long rows, long size, long threads) {
  const int team = rows * size > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long r = 0; r < rows; r++)
    for (long d = 0; d < size; d += LANES) {
      const long at = r * by_row + d, to = r * size + d, left = size - d;
      const vec x = load_up_to(opened + at, left), share = sigmoid(x), value = x * share, by = load_up_to(by_out + to, left);
      const vec f = factor ? load_up_to(factor + at, left) : splat(1.f);
      store_up_to(by_opened + at, by * f * (share + value * (1.f - share)), left);
      if (factor) store_up_to(by_factor + at, by * value, left);
      if (out) store_up_to(out + to, value * f, left);
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
