// A decode step of a network, from tokens to the states that its head reads: the kernels that each part calls, called in a row.
#include "kernels.h"
#include "simd.h"

#include <memory>
#include <vector>

struct Linear {
  const float *weight, *bias; // [out, in], and [out] or null
};

// Pointers that may be null: q_norm and k_norm, weights [dim] of the norms of each head.
struct Block {
  const float *norm1, *norm2, *q_norm, *k_norm;
  Linear q, k, v, o, gate, up, down;
  float *keys, *values; // [slots, kv, room, dim]
  double scale;
  long window;
};

// A prefix that some rows go on from.
struct Prefix {
  const long *rows; // [count]
  long count, keys, room;
  const float *const *stored; // keys and values of each block
};

struct Step {
  float *states;                  // [rows, hidden], to be filled
  const float *embedding, *norm;  // [vocabulary, hidden]; weight of the last norm
  const float *cos, *sin;         // [positions, half]; null without rotation
  const long *tokens, *positions; // [rows]
  const long *slots, *news, *lengths; // [count]: of each sequence its slot, its new tokens, and all it has there with them
  long rows, count, blocks, vocabulary, hidden, heads, kv, dim, inner, half, room, threads;
  double eps, offset; // of the norms
  const Prefix *prefixes;
  long shared;            // how many prefixes
};

// How the tokens of some steps are drawn from the states of each.
struct Draws {
  const float *head, *bias;     // [vocabulary, hidden], and [vocabulary] or null
  const double *uniforms;       // [steps, rows]
  const unsigned char *is_stop; // [vocabulary]: tokens that end a completion
  const long *early;            // [rows]: steps in which a row may not draw them
  long *ids;                    // [steps, rows] and
  float *logprobs;              // [steps, rows], to be filled
  double temperature;
  long steps;
};

namespace {

// Whether `next` lies behind a layer of `size` x `terms`, as `weft.models.fused_linear` lays them: one product is then both.
bool adjoin(Linear layer, Linear next, long size, long terms) {
  if (next.weight != layer.weight + size * terms) return false;
  return layer.bias ? next.bias == layer.bias + size : !next.bias;
}

void add(float *x, const float *y, long count) {
  for (long i = 0; i < count; i++) x[i] += y[i];
}

// Each head of x [rows, heads, dim], rows `by_row` apart, normed in its place.
void norm_heads(float *x, const float *weight, long by_row, long heads, const Step &s) {
  const Buffer normed(heads * s.dim), inverse(heads);
  for (long r = 0; r < s.rows; r++) {
    weft_rms_norm(x + r * by_row, weight, normed, inverse, heads, s.dim, s.eps, s.offset, 1);
    memcpy(x + r * by_row, normed, 4 * heads * s.dim);
  }
}

// What the rows of prefix `p` see of it, joined into `a.out`; q is that of all rows.
void attend_prefix(const Prefix &p, long block, const Arguments &own, const Step &s) {
  const long inner = s.heads * s.dim;
  const Buffer asked(p.count * inner), seen(p.count * inner), lse(p.count * s.heads);
  for (long i = 0; i < p.count; i++) memcpy(&asked[i * inner], own.q.at + p.rows[i] * own.q.by_row, 4 * inner);
  const Segment all = {0, p.count, 0, p.keys};
  Arguments a = own;
  a.q = {asked, inner, s.dim}, a.out = {seen, inner, s.dim};
  a.k = {(float *)p.stored[2 * block], s.dim, p.room * s.dim};
  a.v = {(float *)p.stored[2 * block + 1], s.dim, p.room * s.dim};
  a.lse = lse, a.segments = &all, a.count = 1, a.causal = 0, a.window = 0;
  weft_attend(&a);
  weft_join(own.out.at, own.lse, seen, lse, p.rows, p.count, s.heads, s.dim, own.out.by_row, s.threads);
}

// The tokens of a step from its logits, of which those that rows may not draw become minus infinity. They count for the
// log-probs all the same.
void draw(float *logits, const Draws &d, const std::vector<long> &ends, long step, const Step &s) {
  long *ids = d.ids + step * s.rows;
  float *logprobs = d.logprobs + step * s.rows;
  const auto early = [&](long row) { return step < d.early[row] && !ends.empty(); };
  bool any = false;
  for (long r = 0; r < s.rows; r++) any |= early(r);
  const Buffer lse(any ? s.rows : 0);
  if (any) weft_statistics(logits, lse, nullptr, nullptr, s.rows, s.vocabulary, s.threads);
  for (long r = 0; any && r < s.rows; r++)
    for (long id : ends)
      if (early(r)) logits[r * s.vocabulary + id] = -INFINITY;
  weft_draw(logits, d.uniforms + step * s.rows, ids, logprobs, s.rows, s.vocabulary, s.threads);
  for (long r = 0; any && r < s.rows; r++) logprobs[r] = logits[r * s.vocabulary + ids[r]] - lse[r];
}

} // namespace

// 0, or 1 where a token is outside the vocabulary: nothing is computed then.
extern "C" long weft_decode(const Block *blocks, const Step *given) {
  const Step s = *given;
  for (long r = 0; r < s.rows; r++)
    if (s.tokens[r] < 0 || s.tokens[r] >= s.vocabulary) return 1;
  const long inner = s.heads * s.dim, shared = s.kv * s.dim, wide = inner + 2 * shared, turned_wide = inner + shared;
  const Buffer normed(s.rows * s.hidden), inverse(s.rows), heads(s.rows * wide), turned(s.rows * turned_wide);
  const Buffer mixed(s.rows * inner), lse(s.rows * s.heads), more(s.rows * s.hidden);
  const Buffer opened(s.rows * 2 * s.inner), gated(s.rows * s.inner);
  const auto apply = [&](const float *x, Linear layer, float *out, long by_row, long size, long terms) {
    weft_product(x, layer.weight, layer.bias, out, by_row, s.rows, size, terms, s.threads);
  };
  const Buffer cos(s.cos ? s.rows * s.half : 0), sin(s.cos ? s.rows * s.half : 0);
  for (long r = 0; r < s.rows; r++) {
    memcpy(s.states + r * s.hidden, s.embedding + s.tokens[r] * s.hidden, 4 * s.hidden);
    if (!s.cos) continue;
    memcpy(&cos[r * s.half], s.cos + s.positions[r] * s.half, 4 * s.half);
    memcpy(&sin[r * s.half], s.sin + s.positions[r] * s.half, 4 * s.half);
  }
  const std::unique_ptr<Segment[]> segments(new Segment[s.count]); // each sequence's rows and the keys that they see
  const std::unique_ptr<long[]> places(new long[s.rows]);          // where each row's keys and values go
  for (long i = 0, row = 0; i < s.count; row += s.news[i++]) {
    const long first = s.slots[i] * s.kv * s.room;
    segments[i] = {row, s.news[i], first, s.lengths[i]};
    for (long r = 0; r < s.news[i]; r++) places[row + r] = first + s.lengths[i] - s.news[i] + r;
  }
  for (const Block *b = blocks; b < blocks + s.blocks; b++) {
    weft_rms_norm(s.states, b->norm1, normed, inverse, s.rows, s.hidden, s.eps, s.offset, s.threads);
    float *q = heads, *k = q + inner, *v = k + shared;
    if (adjoin(b->q, b->k, inner, s.hidden) && adjoin(b->k, b->v, shared, s.hidden)) {
      apply(normed, b->q, q, wide, wide, s.hidden);
    } else {
      apply(normed, b->q, q, wide, inner, s.hidden);
      apply(normed, b->k, k, wide, shared, s.hidden);
      apply(normed, b->v, v, wide, shared, s.hidden);
    }
    if (b->q_norm) norm_heads(q, b->q_norm, wide, s.heads, s);
    if (b->k_norm) norm_heads(k, b->k_norm, wide, s.kv, s);
    long by_row = wide;
    if (s.cos) {
      weft_rotate(q, cos, sin, turned, wide, s.dim, s.rows, s.heads + s.kv, s.dim, s.half, 1.0, s.threads);
      q = turned, k = q + inner, by_row = turned_wide;
    }
    weft_store(k, v, b->keys, b->values, places.get(), by_row, s.dim, wide, s.dim, s.rows, s.kv, s.dim, s.room, s.threads);
    Arguments a = {};
    a.q = {q, by_row, s.dim};
    a.k = {b->keys, s.dim, s.room * s.dim};
    a.v = {b->values, s.dim, s.room * s.dim};
    a.out = {mixed, inner, s.dim};
    a.lse = lse, a.segments = segments.get(), a.count = s.count;
    a.heads = s.heads, a.kv = s.kv, a.dim = s.dim, a.causal = 1, a.window = b->window, a.threads = s.threads;
    a.scale = b->scale;
    weft_attend(&a);
    for (long p = 0; p < s.shared; p++) attend_prefix(s.prefixes[p], b - blocks, a, s);
    apply(mixed, b->o, more, s.hidden, s.hidden, inner);
    add(s.states, more, s.rows * s.hidden);
    weft_rms_norm(s.states, b->norm2, normed, inverse, s.rows, s.hidden, s.eps, s.offset, s.threads);
    if (adjoin(b->gate, b->up, s.inner, s.hidden)) {
      apply(normed, b->gate, opened, 2 * s.inner, 2 * s.inner, s.hidden);
    } else {
      apply(normed, b->gate, opened, 2 * s.inner, s.inner, s.hidden);
      apply(normed, b->up, opened + s.inner, 2 * s.inner, s.inner, s.hidden);
    }
    weft_silu(opened, opened + s.inner, gated, 2 * s.inner, s.rows, s.inner, s.threads);
    apply(gated, b->down, more, s.hidden, s.hidden, s.inner);
    add(s.states, more, s.rows * s.hidden);
  }
  weft_rms_norm(s.states, s.norm, s.states, inverse, s.rows, s.hidden, s.eps, s.offset, s.threads);
  return 0;
}

// Some steps of rows with one new token each, every one from the tokens that the one before drew, until one draws an end or a
// log-prob that is not finite: how many steps that were. 0 where a token is outside the vocabulary.
extern "C" long weft_decode_ahead(const Block *blocks, const Draws *draws, const Step *given) {
  const Draws d = *draws;
  Step s = *given;
  const Buffer logits(s.rows * s.vocabulary);
  const std::unique_ptr<long[]> positions(new long[s.rows]), lengths(new long[s.rows]);
  for (long r = 0; r < s.rows; r++) positions[r] = s.positions ? s.positions[r] : 0, lengths[r] = s.lengths[r];
  s.positions = positions.get(), s.lengths = lengths.get();
  std::vector<long> ends;
  for (long id = 0; id < s.vocabulary; id++)
    if (d.is_stop[id]) ends.push_back(id);
  for (long step = 0; step < d.steps; step++) {
    long *ids = d.ids + step * s.rows;
    float *logprobs = d.logprobs + step * s.rows;
    if (weft_decode(blocks, &s)) return 0;
    weft_product(s.states, d.head, d.bias, logits, s.vocabulary, s.rows, s.vocabulary, s.hidden, s.threads);
    const float temperature = (float)d.temperature;
    if (temperature != 1.f) {
#pragma omp parallel for num_threads((int)s.threads)
      for (long i = 0; i < s.rows * s.vocabulary; i++) logits[i] = logits[i] / temperature;
    }
    draw(logits, d, ends, step, s);
    bool last = false;
    for (long r = 0; r < s.rows; r++) {
      last |= d.is_stop[ids[r]] || !std::isfinite(logprobs[r]);
      positions[r]++, lengths[r]++;
    }
    if (last) return step + 1;
    s.tokens = ids;
  }
  return d.steps;
}
