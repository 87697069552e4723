// Attention of packed float32 rows over some of their keys, forward and backward, as flash attention (Dao et al. 2022,
// arXiv:2205.14135, algorithms 1 and 4): nothing of the size rows x keys is kept.
//
// A row's result has the same bits whatever rows are computed with it and however many keys follow those that it sees: scores
// are summed over the head's dimensions in order, values over the keys in order, a chunk of keys at a time.
#include "kernels.h"
#include "simd.h"

namespace {

constexpr long CHUNK = 256;  // keys whose scores are held at once
constexpr long TILE = 16;    // rows that read a block of keys together
constexpr long WIDEST = 256; // dimensions of a head at most

typedef float Columns[WIDEST * LANES] __attribute__((aligned(64)));
typedef float Scores[TILE * CHUNK] __attribute__((aligned(64)));

// What all segments have in common.
struct Rule {
  long heads, kv, dim;
  float scale;
  bool causal; // the last row sees all keys, each row before it one less
  long window; // a row sees the last `window` of its keys; all where it is 0
};

// Some rows of all heads that read one kv head; they stand row by row, and for each row head by head.
struct Tile {
  long count, from, to; // the keys that any of them sees
  long row[TILE], head[TILE], start[TILE], stop[TILE];
};

INLINE Tile tile_of(const Segment &s, const Rule &rule, long kv_head, long first) {
  const long group = rule.heads / rule.kv, left = group * s.rows - first;
  Tile t;
  t.count = left < TILE ? left : TILE;
  t.from = s.keys, t.to = 0;
  for (long i = 0; i < t.count; i++) {
    const long r = (first + i) / group;
    t.row[i] = s.row + r;
    t.head[i] = kv_head * group + (first + i) % group;
    t.stop[i] = rule.causal ? s.keys - s.rows + r + 1 : s.keys;
    t.start[i] = rule.window > 0 && t.stop[i] > rule.window ? t.stop[i] - rule.window : 0;
    if (t.stop[i] > t.to) t.to = t.stop[i];
    if (t.start[i] < t.from) t.from = t.start[i];
  }
  return t;
}

template <long Q> INLINE void dot_some(const float *const *rows, const float *columns, long dim, float *to) {
  vec total[Q] = {};
  for (long d = 0; d < dim; d++) {
    vec column = load(columns + d * LANES);
    for (long i = 0; i < Q; i++) total[i] += column * rows[i][d];
  }
  for (long i = 0; i < Q; i++) store(to + i * CHUNK, total[i]);
}

// to[i * CHUNK + lane] = rows[i] . columns[lane]
INLINE void dot(const float *const *rows, long count, const float *columns, long dim, float *to) {
  long i = 0;
  for (; i + 8 <= count; i += 8) dot_some<8>(rows + i, columns, dim, to + i * CHUNK);
  for (; i + 2 <= count; i += 2) dot_some<2>(rows + i, columns, dim, to + i * CHUNK);
  for (; i < count; i++) dot_some<1>(rows + i, columns, dim, to + i * CHUNK);
}

// row . keys[lane], for `count` keys that are `stride` apart: what `dot` gives for their columns.
INLINE vec dot_alone(const float *row, const float *keys, long stride, long count, long dim) {
  vec total = {};
  long d = 0;
  for (; d + LANES <= dim; d += LANES) {
    vec columns[LANES];
    columns_of(keys + d, stride, count, columns);
    for (long i = 0; i < LANES; i++) total += columns[i] * row[d + i];
  }
  for (; d < dim; d++) total += column_of(keys + d, stride, count) * row[d];
  return total;
}

// Weights that `mix` multiplies: that of sum i and term j is at[i * by_sum + j * by_term].
struct Weights {
  const float *at;
  long by_sum, by_term;
};

// sums[i][0 .. V * LANES) += weight(i, j) * terms[j] over j; of a last, partial vector `some` floats are there.
template <long Q, long V> INLINE void mix_some(
    Weights w, const float *const *terms, long lead, long stop, float *const *sums, long d, long some) {
  vec total[Q][V];
  for (long i = 0; i < Q; i++)
    for (long x = 0; x < V; x++) total[i][x] = some ? load_some(sums[i] + d, some) : load(sums[i] + d + x * LANES);
  for (long j = lead; j < stop; j++) {
    vec term[V];
    for (long x = 0; x < V; x++) term[x] = some ? load_some(terms[j] + d, some) : load(terms[j] + d + x * LANES);
    for (long i = 0; i < Q; i++)
      for (long x = 0; x < V; x++) total[i][x] += term[x] * w.at[i * w.by_sum + j * w.by_term];
  }
  for (long i = 0; i < Q; i++)
    for (long x = 0; x < V; x++) some ? store_some(sums[i] + d, total[i][x], some) : store(sums[i] + d + x * LANES, total[i][x]);
}

template <long Q> INLINE void mix_rows(
    Weights w, const float *const *terms, long lead, long stop, float *const *sums, long dim) {
  long d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES) mix_some<Q, 4>(w, terms, lead, stop, sums, d, 0);
  for (; d + 2 * LANES <= dim; d += 2 * LANES) mix_some<Q, 2>(w, terms, lead, stop, sums, d, 0);
  for (; d + LANES <= dim; d += LANES) mix_some<Q, 1>(w, terms, lead, stop, sums, d, 0);
  if (d < dim) mix_some<Q, 1>(w, terms, lead, stop, sums, d, dim - d);
}

// Terms from `lead` to `stop`, to `count` sums, each of `dim` floats.
INLINE void mix(Weights w, const float *const *terms, long lead, long stop, float *const *sums, long count, long dim) {
  long i = 0;
  for (; i + 4 <= count; i += 4) mix_rows<4>({w.at + i * w.by_sum, w.by_sum, w.by_term}, terms, lead, stop, sums + i, dim);
  for (; i < count; i++) mix_rows<1>({w.at + i * w.by_sum, w.by_sum, w.by_term}, terms, lead, stop, sums + i, dim);
}

INLINE const float *head(const Heads &x, long row, long h) { return x.at + row * x.by_row + h * x.by_head; }

// Scaled scores of LANES keys from `at` on, minus infinity for those that row i of the tile does not see.
INLINE vec seen(vec scores, const Tile &t, long i, long at) {
  if (at < t.start[i] || at + LANES > t.stop[i])
    for (long l = 0; l < LANES; l++)
      if (at + l < t.start[i] || at + l >= t.stop[i]) scores[l] = -INFINITY;
  return scores;
}

// One tile over its keys.
void forward(const Segment &s, const Rule &rule, const Tile &t, long kv_head, Heads q, Heads k, Heads v, Heads out, float *lse) {
  const long dim = rule.dim;
  Columns columns;
  Scores scores;
  float sums[TILE][WIDEST] __attribute__((aligned(64))), most[TILE], total[TILE];
  const float *rows[TILE], *values[CHUNK];
  float *to[TILE];
  for (long i = 0; i < t.count; i++) {
    rows[i] = head(q, t.row[i], t.head[i]);
    to[i] = sums[i];
    most[i] = -INFINITY, total[i] = 0.f;
    memset(sums[i], 0, 4 * padded(dim));
  }
  for (long chunk = t.from / CHUNK * CHUNK; chunk < t.to; chunk += CHUNK) {
    const long end = t.to - chunk < CHUNK ? t.to - chunk : CHUNK;
    const long lead = t.from > chunk ? (t.from - chunk) / LANES * LANES : 0;
    for (long j = lead; j < end; j++) values[j] = head(v, s.key + chunk + j, kv_head);
    for (long j = lead; j < end; j += LANES) {
      if (t.count < TILE) // memory is what few rows wait for: into the second cache, the values that come next
        for (long l = j; l < j + LANES; l++)
          for (long d = 0; d < dim; d += 16) {
            __builtin_prefetch(head(k, s.key + chunk + l + 2 * LANES, kv_head) + d, 0, 2);
            __builtin_prefetch(head(v, s.key + chunk + l, kv_head) + d, 0, 2);
          }
      const float *keys = head(k, s.key + chunk + j, kv_head);
      const long there = end - j < LANES ? end - j : LANES;
      if (t.count == 1) {
        store(scores + j, dot_alone(rows[0], keys, k.by_row, there, dim));
      } else {
        transpose(keys, k.by_row, there, dim, columns);
        dot(rows, t.count, columns, dim, scores + j);
      }
    }
    for (long i = 0; i < t.count; i++) {
      float *row = scores + i * CHUNK;
      vec high = splat(most[i]);
      for (long j = lead; j < end; j += LANES) {
        vec x = seen(load(row + j) * rule.scale, t, i, chunk + j);
        store(row + j, x);
        high = largest(high, x);
      }
      const float top = largest(high);
      if (top == -INFINITY) { // nothing seen yet
        memset(row + lead, 0, 4 * (padded(end) - lead));
        continue;
      }
      vec part = {};
      for (long j = lead; j < end; j += LANES) {
        vec weight = exponential(load(row + j) - top);
        store(row + j, weight);
        part += weight;
      }
      const float factor = top == most[i] ? 1.f : expf(most[i] - top);
      total[i] = total[i] * factor + sum(part);
      most[i] = top;
      if (factor != 1.f)
        for (long d = 0; d < dim; d += LANES) store(sums[i] + d, load(sums[i] + d) * factor);
    }
    if (t.count == TILE) {
      mix({scores, CHUNK, 1}, values, lead, end, to, t.count, dim);
      continue;
    }
    // With the values what is read after them: the keys of the next chunk, or of the next task.
    const bool more = chunk + CHUNK < t.to;
    const float *next = more ? head(k, s.key + chunk + CHUNK, kv_head) : head(k, s.key, kv_head + 1);
    for (long j = lead; j < end; j += LANES) {
      for (long l = j; l < j + LANES; l++)
        for (long d = 0; d < dim; d += 16) __builtin_prefetch(next + l * k.by_row + d, 0, 2);
      mix({scores, CHUNK, 1}, values, j, end - j < LANES ? end : j + LANES, to, t.count, dim);
    }
  }
  for (long i = 0; i < t.count; i++) {
    float *row = (float *)head(out, t.row[i], t.head[i]);
    const float share = total[i] > 0.f ? 1.f / total[i] : 0.f;
    for (long d = 0; d < dim; d++) row[d] = sums[i][d] * share;
    lse[t.row[i] * rule.heads + t.head[i]] = most[i] + logf(total[i]);
  }
}

// Pointers to the rows of a tile in one tensor.
INLINE void rows_of(const Tile &t, const Heads &x, float **to) {
  for (long i = 0; i < t.count; i++) to[i] = (float *)head(x, t.row[i], t.head[i]);
}

struct Gradients {
  Heads q, k, v;
};

// One tile over its keys: adds to the gradients of its queries, and of the keys and values.
void backward(
    const Segment &s, const Rule &rule, const Tile &t, long kv_head, Heads q, Heads k, Heads v, Heads out, const float *lse,
    Heads by_out, Gradients by) {
  const long dim = rule.dim;
  Columns columns;
  Scores weights, gradients; // softmax weights, then what they get; gradients of scores
  float *rows[TILE], *by_rows[TILE], *ends[TILE], *by_ends[TILE], delta[TILE], sums[TILE];
  float *keys[CHUNK], *by_keys[CHUNK], *by_values[CHUNK];
  rows_of(t, q, rows), rows_of(t, by.q, by_rows), rows_of(t, out, ends), rows_of(t, by_out, by_ends);
  for (long i = 0; i < t.count; i++) {
    vec total = {};
    long d = 0;
    for (; d + LANES <= dim; d += LANES) total += load(ends[i] + d) * load(by_ends[i] + d);
    if (d < dim) total += load_some(ends[i] + d, dim - d) * load_some(by_ends[i] + d, dim - d);
    delta[i] = sum(total);
    sums[i] = lse[t.row[i] * rule.heads + t.head[i]];
  }
  for (long chunk = t.from / CHUNK * CHUNK; chunk < t.to; chunk += CHUNK) {
    const long end = t.to - chunk < CHUNK ? t.to - chunk : CHUNK;
    const long lead = t.from > chunk ? (t.from - chunk) / LANES * LANES : 0;
    for (long j = lead; j < end; j++) {
      const long key = s.key + chunk + j;
      keys[j] = (float *)head(k, key, kv_head);
      by_keys[j] = (float *)head(by.k, key, kv_head), by_values[j] = (float *)head(by.v, key, kv_head);
    }
    for (long j = lead; j < end; j += LANES) {
      const long there = end - j < LANES ? end - j : LANES;
      transpose(keys[j], k.by_row, there, dim, columns);
      dot(rows, t.count, columns, dim, weights + j);
      transpose(head(v, s.key + chunk + j, kv_head), v.by_row, there, dim, columns);
      dot(by_ends, t.count, columns, dim, gradients + j);
      for (long i = 0; i < t.count; i++) {
        float *at = weights + i * CHUNK + j, *by_at = gradients + i * CHUNK + j;
        const vec weight = exponential(seen(load(at) * rule.scale - sums[i], t, i, chunk + j));
        store(at, weight);
        store(by_at, weight * (load(by_at) - delta[i]) * rule.scale);
      }
    }
    mix({gradients, CHUNK, 1}, keys, lead, end, by_rows, t.count, dim);
    mix({gradients + lead, 1, CHUNK}, rows, 0, t.count, by_keys + lead, end - lead, dim);
    mix({weights + lead, 1, CHUNK}, by_ends, 0, t.count, by_values + lead, end - lead, dim);
  }
}

INLINE long tiles_of(const Segment &s, const Rule &rule) { return (s.rows * (rule.heads / rule.kv) + TILE - 1) / TILE; }

} // namespace

INLINE Rule rule_of(const Arguments &a) { return {a.heads, a.kv, a.dim, (float)a.scale, a.causal != 0, a.window}; }

// Fills `out` and `lse` at the rows of all segments.
extern "C" void weft_attend(const Arguments *given) {
  const Arguments a = *given;
  const Rule rule = rule_of(a);
  long tiles = 0, work = 0;
  for (long s = 0; s < a.count; s++) {
    tiles = tiles_of(a.segments[s], rule) > tiles ? tiles_of(a.segments[s], rule) : tiles;
    work += a.segments[s].rows * a.segments[s].keys;
  }
  const int threads = work * a.heads * a.dim > LARGE ? (int)a.threads : 1;
  const Shares shares(a.count * a.kv * tiles, threads);
#pragma omp parallel num_threads(threads)
  shares.take([&](long part) {
    const Segment &s = a.segments[part / (a.kv * tiles)];
    const long h = part / tiles % a.kv, tile = part % tiles;
    if (tile < tiles_of(s, rule)) forward(s, rule, tile_of(s, rule, h, tile * TILE), h, a.q, a.k, a.v, a.out, a.lse);
  });
}

// Adds to by_q, by_k and by_v what `by_out` gives, for `out` and `lse` of the whole rows: those that segments over other keys
// had a part in, too. Segments of one call have no row and no key in common.
extern "C" void weft_attend_backward(const Arguments *given) {
  const Arguments a = *given;
  const Rule rule = rule_of(a);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads((int)a.threads)
  for (long s = 0; s < a.count; s++)
    for (long h = 0; h < a.kv; h++)
      for (long tile = 0; tile < tiles_of(a.segments[s], rule); tile++)
        backward(a.segments[s], rule, tile_of(a.segments[s], rule, h, tile * TILE), h, a.q, a.k, a.v, a.out, a.lse, a.by_out,
                 {a.by_q, a.by_k, a.by_v});
}

// Attention of some rows over other keys, more [count, heads, dim] and more_lse [count, heads], joined into that of rows[i] of
// out and lse: with w = exp(lse - most) for each, out = sum of w out / sum of w and lse = most + log(sum of w).
extern "C" void weft_join(
    float *out, float *lse, const float *more, const float *more_lse, const long *rows, long count, long heads, long dim,
    long by_row, long threads) {
  const int team = count * heads * dim > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long i = 0; i < count; i++)
    for (long h = 0; h < heads; h++) {
      float *to = out + rows[i] * by_row + h * dim, &own = lse[rows[i] * heads + h];
      const float *from = more + (i * heads + h) * dim, other = more_lse[i * heads + h];
      const float most = own > other ? own : other, w = expf(own - most), v = expf(other - most), total = w + v;
      const float mine = w / total, theirs = v / total;
      for (long d = 0; d < dim; d++) to[d] = to[d] * mine + from[d] * theirs;
      own = most + logf(total);
    }
}
