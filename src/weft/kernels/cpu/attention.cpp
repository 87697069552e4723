// Attention of packed float32 rows over some of their keys, forward and backward, as flash attention (Dao et al. 2022,
// arXiv:2205.14135, algorithms 1 and 4): no matrix of size rows x keys is stored.
//
// A row's result has the same bits whatever the other rows are, and however many keys follow those that it sees: scores are
// summed over the head's dimensions in order, and values over the keys in order, a chunk of keys at a time.
#include "kernels.h"
#include "simd.h"

namespace {

constexpr long CHUNK = 256;  // keys whose scores are stored at once
constexpr long TILE = 16;    // rows that read a block of keys together
constexpr long WIDEST = 256; // largest number of dimensions of a head

typedef float Columns[WIDEST * LANES] __attribute__((aligned(64)));
typedef float Scores[TILE * CHUNK] __attribute__((aligned(64)));

// Parameters shared by all segments.
struct Rule {
  long heads, kv, dim;
  float scale;
  // if true, the last row sees all keys of its segment, each row one key fewer than the next
  bool causal;
  long window; // maximum number of keys that a row sees, the latest ones; 0 means no limit
};

// (Row, query head) pairs that read the same kv head, ordered by row, then by head.
struct Tile {
  long count, from, to; // number of pairs; range of keys that at least one of them sees
  long latest, least;   // range of keys that all of them see
  long row[TILE], head[TILE], start[TILE], stop[TILE];
};

INLINE Tile tile_of(const Segment &s, const Rule &rule, long kv_head, long first) {
  const long group = rule.heads / rule.kv, left = group * s.rows - first;
  Tile t;
  t.count = left < TILE ? left : TILE;
  t.from = t.least = s.keys, t.to = t.latest = 0;
  for (long i = 0; i < t.count; i++) {
    const long r = (first + i) / group;
    t.row[i] = s.row + r;
    t.head[i] = kv_head * group + (first + i) % group;
    t.stop[i] = rule.causal ? s.keys - s.rows + r + 1 : s.keys;
    t.start[i] = rule.window > 0 && t.stop[i] > rule.window ? t.stop[i] - rule.window : 0;
    if (t.stop[i] > t.to) t.to = t.stop[i];
    if (t.stop[i] < t.least) t.least = t.stop[i];
    if (t.start[i] < t.from) t.from = t.start[i];
    if (t.start[i] > t.latest) t.latest = t.start[i];
  }
  return t;
}

// Transposed rows of a tile: dimension d of row i is at [d * TILE + i].
typedef float Transposed[WIDEST * TILE] __attribute__((aligned(64)));

template <long Q> INLINE void dot_some(const float *rows, const float *columns, long dim, float *to) {
  vec total[Q] = {};
  for (long d = 0; d < dim; d++) {
    vec column = load(columns + d * LANES);
    for (long i = 0; i < Q; i++) total[i] += column * rows[d * TILE + i];
  }
  for (long i = 0; i < Q; i++) store(to + i * CHUNK, total[i]);
}

// to[i * CHUNK + lane] = row i . columns[lane]
INLINE void dot(const float *rows, long count, const float *columns, long dim, float *to) {
  long i = 0;
  for (; i + 8 <= count; i += 8) dot_some<8>(rows + i, columns, dim, to + i * CHUNK);
  for (; i + 2 <= count; i += 2) dot_some<2>(rows + i, columns, dim, to + i * CHUNK);
  for (; i < count; i++) dot_some<1>(rows + i, columns, dim, to + i * CHUNK);
}

// Rows of floats, `stride` floats apart.
struct Rows {
  float *at;
  long stride;
};

// sums[i][0 .. V * LANES) += weights[i * BY_SUM + j * BY_TERM] * terms[j] over j; with `SOME`, `some` floats only.
template <long Q, long V, long BY_SUM, long BY_TERM, bool SOME = false> INLINE void mix_some(
    const float *weights, Rows terms, long count, Rows sums, long d, long some = 0) {
  vec total[Q][V];
  for (long i = 0; i < Q; i++)
    for (long x = 0; x < V; x++) {
      const float *from = sums.at + i * sums.stride + d + x * LANES;
      if constexpr (SOME) total[i][x] = load_some(from, some);
      else total[i][x] = load(from);
    }
  const float *from = terms.at + d;
  for (long j = 0; j < count; j++, from += terms.stride, weights += BY_TERM) {
    vec term[V];
    for (long x = 0; x < V; x++)
      if constexpr (SOME) term[x] = load_some(from, some);
      else term[x] = once(load(from + x * LANES));
    for (long i = 0; i < Q; i++)
      for (long x = 0; x < V; x++) total[i][x] += term[x] * weights[i * BY_SUM];
  }
  for (long i = 0; i < Q; i++)
    for (long x = 0; x < V; x++) {
      float *to = sums.at + i * sums.stride + d + x * LANES;
      if constexpr (SOME) store_some(to, total[i][x], some);
      else store(to, total[i][x]);
    }
}

// All `number` sums: Q at a time as long as Q are left, then fewer at a time.
template <long Q, long V, long BY_SUM, long BY_TERM, bool SOME = false> INLINE void mix_all(
    const float *weights, Rows terms, long count, Rows sums, long number, long d, long some = 0) {
  for (; number >= Q; number -= Q, weights += Q * BY_SUM, sums.at += Q * sums.stride)
    mix_some<Q, V, BY_SUM, BY_TERM, SOME>(weights, terms, count, sums, d, some);
  if constexpr (Q > 1)
    if (number > 0) mix_all<(Q > 4 ? 4 : 1), V, BY_SUM, BY_TERM, SOME>(weights, terms, count, sums, number, d, some);
}

// Adds `count` terms to `number` sums of `dim` floats each; up to 16 vectors of sums stay in registers.
template <long BY_SUM, long BY_TERM> INLINE void mix(const float *weights, Rows terms, long count, Rows sums, long number, long dim) {
  long d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES) mix_all<4, 4, BY_SUM, BY_TERM>(weights, terms, count, sums, number, d);
  for (; d + 2 * LANES <= dim; d += 2 * LANES) mix_all<8, 2, BY_SUM, BY_TERM>(weights, terms, count, sums, number, d);
  for (; d + LANES <= dim; d += LANES) mix_all<8, 1, BY_SUM, BY_TERM>(weights, terms, count, sums, number, d);
  if (d < dim) mix_all<8, 1, BY_SUM, BY_TERM, true>(weights, terms, count, sums, number, d, dim - d);
}

INLINE const float *head(const Heads &x, long row, long h) { return x.at + row * x.row_stride + h * x.head_stride; }

// Copies the rows of a tile to contiguous memory, and back.
INLINE void gather(const Tile &t, const Heads &x, long dim, float *to) {
  for (long i = 0; i < t.count; i++) memcpy(to + i * dim, head(x, t.row[i], t.head[i]), 4 * dim);
}
INLINE void scatter(const Tile &t, const float *from, long dim, const Heads &x) {
  for (long i = 0; i < t.count; i++) memcpy((float *)head(x, t.row[i], t.head[i]), from + i * dim, 4 * dim);
}

// Transposes contiguous rows; missing rows become zeros.
INLINE void transpose_rows(const float *rows, long count, long dim, float *to) {
  for (long i = 0; i < TILE; i += LANES) {
    const long left = count > i ? count - i : 0;
    transpose(rows + i * dim, dim, left < LANES ? left : LANES, dim, to + i, TILE);
  }
}

// True if all rows of the tile see all LANES keys from `at` on.
INLINE bool seen_by_all(const Tile &t, long at) { return at >= t.latest && at + LANES <= t.least; }

// The scores of LANES keys from `at` on, with minus infinity for those that row i of the tile does not see.
INLINE vec seen(vec scores, const Tile &t, long i, long at) {
  const ivec lane = numbers(EACH_LANE), there = (lane >= (int)(t.start[i] - at)) & (lane < (int)(t.stop[i] - at));
  return there ? scores : splat(-INFINITY);
}

// State of the online softmax, per row: the largest score so far, the sum of exp(score - largest), and the sum of the values
// weighted by exp(score - largest).
struct SoFar {
  float most[TILE], total[TILE], sums[TILE][WIDEST] __attribute__((aligned(64)));
};

// Replaces the scores of Q rows from `first` on, for keys `lead` to `end` of a chunk, by softmax weights, and rescales the
// earlier sums to the new largest score.
template <long Q> INLINE void weigh(
    float *scores, const Tile &t, long first, long chunk, long lead, long end, const Rule &rule, SoFar &so_far) {
  vec high[Q], part[Q] = {};
  float top[Q];
  for (long i = 0; i < Q; i++) high[i] = splat(so_far.most[first + i]);
  for (long j = lead; j < end; j += LANES) {
    const bool all = seen_by_all(t, chunk + j);
    for (long i = 0; i < Q; i++) {
      float *at = scores + (first + i) * CHUNK + j;
      vec x = load(at) * rule.scale;
      if (!all) x = seen(x, t, first + i, chunk + j);
      store(at, x);
      high[i] = largest(high[i], x);
    }
  }
  for (long i = 0; i < Q; i++) top[i] = largest(high[i]);
  for (long j = lead; j < end; j += LANES)
    for (long i = 0; i < Q; i++) {
      float *at = scores + (first + i) * CHUNK + j;
      const vec weight = exponential(load(at) - (top[i] == -INFINITY ? 0.f : top[i])); // no key seen yet: weight 0
      store(at, weight);
      part[i] += weight;
    }
  for (long i = 0; i < Q; i++) {
    float &most = so_far.most[first + i], &total = so_far.total[first + i], *sums = so_far.sums[first + i];
    const float shrink = top[i] == most ? 1.f : expf(most - top[i]);
    total = total * shrink + sum(part[i]);
    most = top[i];
    if (shrink != 1.f)
      for (long d = 0; d < rule.dim; d += LANES) store(sums + d, load(sums + d) * shrink);
  }
}

// Computes attention of one tile over its keys.
void forward(const Segment &s, const Rule &rule, const Tile &t, long kv_head, Heads q, Heads k, Heads v, Heads out, float *lse) {
  const long dim = rule.dim;
  Columns columns;
  Scores scores;
  Transposed rows;
  SoFar so_far;
  for (long i = 0; i < t.count; i++) {
    so_far.most[i] = -INFINITY, so_far.total[i] = 0.f;
    memset(so_far.sums[i], 0, 4 * padded(dim));
  }
  float side_by_side[TILE * WIDEST];
  gather(t, q, dim, side_by_side), transpose_rows(side_by_side, t.count, dim, rows);
  for (long chunk = t.from / CHUNK * CHUNK; chunk < t.to; chunk += CHUNK) {
    const long end = t.to - chunk < CHUNK ? t.to - chunk : CHUNK;
    const long lead = t.from > chunk ? (t.from - chunk) / LANES * LANES : 0;
    const auto values = [&](long j) { return Rows{(float *)head(v, s.key + chunk + j, kv_head), v.row_stride}; };
    for (long j = lead; j < end; j += LANES) {
      if (t.count < TILE) // few rows are limited by memory: prefetch the values used next into the L2 cache
        for (long l = j; l < j + LANES; l++)
          for (long d = 0; d < dim; d += 16) __builtin_prefetch(head(v, s.key + chunk + l, kv_head) + d, 0, 2);
      const float *keys = head(k, s.key + chunk + j, kv_head);
      const long there = end - j < LANES ? end - j : LANES;
      transpose(keys, k.row_stride, there, dim, columns);
      dot(rows, t.count, columns, dim, scores + j);
    }
    long i = 0;
    for (; i + 4 <= t.count; i += 4) weigh<4>(scores, t, i, chunk, lead, end, rule, so_far);
    for (; i < t.count; i++) weigh<1>(scores, t, i, chunk, lead, end, rule, so_far);
    if (t.count == TILE) {
      mix<CHUNK, 1>(scores + lead, values(lead), end - lead, {so_far.sums[0], WIDEST}, t.count, dim);
      continue;
    }
    // While reading the values, prefetch the keys used next: those of the next chunk, or of the next task.
    const bool more = chunk + CHUNK < t.to;
    const float *next = more ? head(k, s.key + chunk + CHUNK, kv_head) : head(k, s.key, kv_head + 1);
    for (long j = lead; j < end; j += LANES) {
      for (long l = j; l < j + LANES; l++)
        for (long d = 0; d < dim; d += 16) __builtin_prefetch(next + l * k.row_stride + d, 0, 2);
      mix<CHUNK, 1>(scores + j, values(j), end - j < LANES ? end - j : LANES, {so_far.sums[0], WIDEST}, t.count, dim);
    }
  }
  for (long i = 0; i < t.count; i++) {
    float *row = (float *)head(out, t.row[i], t.head[i]);
    const float total = so_far.total[i], share = total > 0.f ? 1.f / total : 0.f;
    for (long d = 0; d < dim; d++) row[d] = so_far.sums[i][d] * share;
    lse[t.row[i] * rule.heads + t.head[i]] = so_far.most[i] + logf(total);
  }
}

struct Gradients {
  Heads q, k, v;
};

// Keys `first` to `first + count` of a segment and their values, transposed in blocks of LANES.
struct Chunk {
  long first, count;
  float *keys, *values; // [CHUNK / LANES][dim * LANES] each
};

INLINE void fill(const Segment &s, const Rule &rule, long kv_head, Heads k, Heads v, const Chunk &c) {
  for (long j = 0; j < c.count; j += LANES) {
    const long there = c.count - j < LANES ? c.count - j : LANES, key = s.key + c.first + j;
    transpose(head(k, key, kv_head), k.row_stride, there, rule.dim, c.keys + j * rule.dim);
    transpose(head(v, key, kv_head), v.row_stride, there, rule.dim, c.values + j * rule.dim);
  }
}

// Adds to the gradients of one tile's queries, and of the keys and values that it sees in one chunk.
void backward(
    const Segment &s, const Rule &rule, const Tile &t, const Chunk &c, long kv_head, Heads q, Heads k, Heads out, const float *lse,
    Heads grad_out, Gradients grads) {
  const long dim = rule.dim, end = t.to - c.first < c.count ? t.to - c.first : c.count;
  const long lead = t.from > c.first ? (t.from - c.first) / LANES * LANES : 0, count = end - lead;
  if (count <= 0) return;
  Scores weights, gradients; // softmax weights; gradients of the weights, then of the scores
  Transposed rows, grad_ends;
  float queries[TILE * WIDEST], grad_queries[TILE * WIDEST], grad_outs[TILE * WIDEST], delta[TILE], sums[TILE];
  gather(t, q, dim, queries), gather(t, grad_out, dim, grad_outs), gather(t, grads.q, dim, grad_queries);
  transpose_rows(queries, t.count, dim, rows), transpose_rows(grad_outs, t.count, dim, grad_ends);
  for (long i = 0; i < t.count; i++) {
    const float *end = head(out, t.row[i], t.head[i]), *grad_end = grad_outs + i * dim;
    vec total = {};
    for (long d = 0; d < dim; d += LANES) total += load_up_to(end + d, dim - d) * load_up_to(grad_end + d, dim - d);
    delta[i] = sum(total);
    sums[i] = lse[t.row[i] * rule.heads + t.head[i]];
  }
  for (long j = lead; j < end; j += LANES) {
    dot(rows, t.count, c.keys + j * dim, dim, weights + j);
    dot(grad_ends, t.count, c.values + j * dim, dim, gradients + j);
    const bool all = seen_by_all(t, c.first + j);
    for (long i = 0; i < t.count; i++) {
      float *at = weights + i * CHUNK + j, *grad_at = gradients + i * CHUNK + j;
      vec score = load(at) * rule.scale - sums[i];
      if (!all) score = seen(score, t, i, c.first + j);
      const vec weight = exponential(score);
      store(at, weight);
      store(grad_at, weight * (load(grad_at) - delta[i]) * rule.scale);
    }
  }
  const auto of = [&](const Heads &x) { return Rows{(float *)head(x, s.key + c.first + lead, kv_head), x.row_stride}; };
  mix<CHUNK, 1>(gradients + lead, of(k), count, {grad_queries, dim}, t.count, dim);
  mix<1, CHUNK>(gradients + lead, {queries, dim}, t.count, of(grads.k), count, dim);
  mix<1, CHUNK>(weights + lead, {grad_outs, dim}, t.count, of(grads.v), count, dim);
  scatter(t, grad_queries, dim, grads.q);
}

INLINE long tiles_of(const Segment &s, const Rule &rule) { return (s.rows * (rule.heads / rule.kv) + TILE - 1) / TILE; }

} // namespace

INLINE Rule rule_of(const Arguments &a) { return {a.heads, a.kv, a.dim, (float)a.scale, a.causal != 0, a.window}; }

// Computes `out` and `lse` for the rows of all segments.
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

// Adds the gradients of these segments to grad_q, grad_k and grad_v, given `grad_out`. `out` and `lse` are those of the whole
// rows, including segments over other keys. Segments of one call have no row and no key in common.
extern "C" void weft_attend_backward(const Arguments *given) {
  const Arguments a = *given;
  const Rule rule = rule_of(a);
  const Shares shares(a.count * a.kv, a.threads);
#pragma omp parallel num_threads((int)a.threads)
  {
    const Buffer columns(2 * CHUNK * a.dim);
    shares.take([&](long part) {
      const Segment &s = a.segments[part / a.kv];
      const long h = part % a.kv;
      for (long chunk = 0; chunk < s.keys; chunk += CHUNK) {
        const Chunk c = {chunk, s.keys - chunk < CHUNK ? s.keys - chunk : CHUNK, columns, columns + CHUNK * a.dim};
        fill(s, rule, h, a.k, a.v, c);
        for (long tile = 0; tile < tiles_of(s, rule); tile++)
          backward(s, rule, tile_of(s, rule, h, tile * TILE), c, h, a.q, a.k, a.out, a.lse, a.grad_out, {a.grad_q, a.grad_k, a.grad_v});
      }
    });
  }
}

// Merges attention over other keys, more [count, heads, dim] and more_lse [count, heads], into rows[i] of out and lse: with w =
// exp(lse - most) for each, out = sum of w out / sum of w and lse = most + log(sum of w).
extern "C" void weft_merge_rows(
    float *out, float *lse, const float *more, const float *more_lse, const long *rows, long count, long heads, long dim,
    long row_stride, long threads) {
  const int team = count * heads * dim > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long i = 0; i < count; i++)
    for (long h = 0; h < heads; h++) {
      float *to = out + rows[i] * row_stride + h * dim, &own = lse[rows[i] * heads + h];
      const float *from = more + (i * heads + h) * dim, other = more_lse[i * heads + h];
      const float most = own > other ? own : other, w = expf(own - most), v = expf(other - most), total = w + v;
      const float mine = w / total, theirs = v / total;
      for (long d = 0; d < dim; d++) to[d] = to[d] * mine + from[d] * theirs;
      own = most + logf(total);
    }
}
