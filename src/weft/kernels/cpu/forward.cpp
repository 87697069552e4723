// Forward pass of a network over new tokens of cached sequences, a prefill or a decode step, from tokens to the states that its
// head reads. It calls the same kernels as the parts of the network do, in sequence.
#include "forward.h"
#include "simd.h"

#include <new>
#include <vector>

namespace {

// Rows whose queries and states are computed: all rows, but in the last block only the wanted ones.
struct Asking {
  long rows;
  std::vector<Segment> segments;        // the rows and the keys that they see
  std::vector<std::vector<long>> after; // the rows that continue each prefix
  std::vector<float> cos, sin;          // [rows, half]
};

void rotations(Asking &asking, const long *positions, const Step &s) {
  asking.cos.resize(asking.rows * s.half), asking.sin.resize(asking.rows * s.half);
  weft_gather(s.cos, positions, asking.rows, s.half, asking.cos.data(), s.threads);
  weft_gather(s.sin, positions, asking.rows, s.half, asking.sin.data(), s.threads);
}

Asking all_of(const Step &s) {
  Asking all = {s.rows};
  for (long i = 0, row = 0; i < s.count; row += s.new_tokens[i++])
    all.segments.push_back({row, s.new_tokens[i], s.slots[i] * s.kv * s.room, s.lengths[i]});
  for (long p = 0; p < s.shared; p++)
    all.after.emplace_back(s.prefixes[p].rows, s.prefixes[p].rows + s.prefixes[p].count);
  if (s.cos) rotations(all, s.positions, s);
  return all;
}

Asking wanted_of(const Step &s, const Asking &all) {
  Asking wanted = {s.num_wanted};
  std::vector<Segment> of(s.rows); // segment of each single row
  std::vector<long> after(s.rows, -1), positions;
  for (const Segment &own : all.segments)
    for (long r = 0; r < own.rows; r++) of[own.row + r] = {0, 1, own.key, own.keys - own.rows + r + 1};
  for (long p = 0; p < s.shared; p++)
    for (long row : all.after[p]) after[row] = p;
  wanted.after.resize(s.shared);
  for (long i = 0; i < s.num_wanted; i++) {
    const long row = s.wanted[i];
    wanted.segments.push_back({i, 1, of[row].key, of[row].keys});
    if (after[row] >= 0) wanted.after[after[row]].push_back(i);
    if (s.cos) positions.push_back(s.positions[row]);
  }
  if (s.cos) rotations(wanted, positions.data(), s);
  return wanted;
}

// Normalizes each head of x [rows, heads, dim] in place; rows are `row_stride` apart.
void norm_heads(float *x, const float *weight, long row_stride, long rows, long heads, const Step &s) {
  const int team = rows * heads * s.dim > LARGE ? (int)s.threads : 1;
#pragma omp parallel num_threads(team)
  {
    const Buffer normed(heads * s.dim), inverse(heads);
#pragma omp for
    for (long r = 0; r < rows; r++) {
      weft_rms_norm(x + r * row_stride, weight, normed, inverse, heads, s.dim, s.eps, s.offset, 1);
      memcpy(x + r * row_stride, normed, 4 * heads * s.dim);
    }
  }
}

// Computes attention of `rows` over prefix `p` and merges it into `own.out`.
void attend_prefix(const Prefix &p, const std::vector<long> &rows, long block, const Arguments &own, const Step &s) {
  const long inner = s.heads * s.dim, count = (long)rows.size();
  const Buffer asked(count * inner), seen(count * inner), lse(count * s.heads);
  for (long i = 0; i < count; i++) memcpy(&asked[i * inner], own.q.at + rows[i] * own.q.row_stride, 4 * inner);
  const Segment all = {0, count, 0, p.keys};
  Arguments a = own;
  a.q = {asked, inner, s.dim}, a.out = {seen, inner, s.dim};
  a.k = {(float *)p.stored[2 * block], s.dim, p.room * s.dim};
  a.v = {(float *)p.stored[2 * block + 1], s.dim, p.room * s.dim};
  a.lse = lse, a.segments = &all, a.count = 1, a.causal = 0, a.window = 0;
  weft_attend(&a);
  weft_merge_rows(own.out.at, own.lse, seen, lse, rows.data(), count, s.heads, s.dim, own.out.row_stride, s.threads);
}

void forward(const Block *blocks, const Step &s) {
  const long inner = s.heads * s.dim, shared = s.kv * s.dim, wide = inner + 2 * shared, rotated_width = inner + shared;
  const auto most = [](long a, long b) { return a > b ? a : b; };
  const Asking all = all_of(s), wanted = s.wanted ? wanted_of(s, all) : Asking{};
  const Buffer states(s.rows * s.hidden), normed(s.rows * s.hidden), inverse(s.rows), lse(s.rows * s.heads);
  // `projected`: all heads, then the rotated queries and keys; in the MLP, the result of its first matrices.
  const Buffer projected(s.rows * most(wide + rotated_width, 2 * s.inner)), mixed(s.rows * most(inner, s.inner));
  const Buffer late_rows(2 * wanted.rows * s.hidden);
  float *x = states, *y = normed; // states of the computed rows, and the result of a part of the block
  long rows = s.rows;             // number of computed rows

  const auto norm = [&](const float *from, const float *weight, float *to) {
    weft_rms_norm(from, weight, to, inverse, rows, s.hidden, s.eps, s.offset, s.threads);
  };
  const auto apply = [&](const float *from, Linear layer, float *out, long size, long terms) {
    multiply(from, layer, out, rows, size, terms, s.few, s.threads);
  };
  const auto rotate = [&](const Asking &asking, Heads &from, long heads, float *to) {
    weft_rotate(
        from.at, asking.cos.data(), asking.sin.data(), to, from.row_stride, s.dim, asking.rows, heads, heads, s.dim, s.half, 1.0,
        s.threads);
    from = {to, heads * s.dim, s.dim};
  };

  weft_gather(s.embedding, s.tokens, rows, s.hidden, states, s.threads);
  std::vector<long> places; // cache rows of each row's keys and values
  for (const Segment &own : all.segments)
    for (long r = 0; r < own.rows; r++) places.push_back(own.key + own.keys - own.rows + r);
  for (const Block *b = blocks; b < blocks + s.blocks; b++) {
    const bool late = s.wanted && b + 1 == blocks + s.blocks;
    const Asking &asking = late ? wanted : all;
    norm(states, b->norm1, normed);
    Heads q = {projected, wide, s.dim}, k = {projected + inner, wide, s.dim}, v = {projected + inner + shared, wide, s.dim};
    float *const rotated = projected + s.rows * wide;
    if (!late) {
      apply(normed, b->qkv, projected, wide, s.hidden);
    } else {
      apply(normed, {b->qkv.weight + inner * s.hidden, b->qkv.bias ? b->qkv.bias + inner : nullptr}, projected, 2 * shared, s.hidden);
      k = {projected, 2 * shared, s.dim}, v = {projected + shared, 2 * shared, s.dim};
      x = late_rows, y = late_rows + s.num_wanted * s.hidden, rows = s.num_wanted;
      weft_gather(states, s.wanted, rows, s.hidden, x, s.threads);
      weft_gather(normed, s.wanted, rows, s.hidden, y, s.threads);
      q = {projected + s.rows * 2 * shared, inner, s.dim};
      apply(y, b->qkv, q.at, inner, s.hidden);
    }
    if (b->q_norm) norm_heads(q.at, b->q_norm, q.row_stride, rows, s.heads, s);
    if (b->k_norm) norm_heads(k.at, b->k_norm, k.row_stride, s.rows, s.kv, s);
    if (s.cos && !late) {
      rotate(all, q, s.heads + s.kv, rotated);
      k = {q.at + inner, rotated_width, s.dim};
    } else if (s.cos) {
      rotate(asking, q, s.heads, rotated);
      rotate(all, k, s.kv, rotated + rows * inner);
    }
    weft_store(
        k.at, v.at, b->keys, b->values, places.data(), k.row_stride, s.dim, v.row_stride, s.dim, s.rows, s.kv, s.dim, s.room, s.threads);
    Arguments a = {};
    a.q = q, a.out = {mixed, inner, s.dim};
    a.k = {b->keys, s.dim, s.room * s.dim};
    a.v = {b->values, s.dim, s.room * s.dim};
    a.lse = lse, a.segments = asking.segments.data(), a.count = (long)asking.segments.size();
    a.heads = s.heads, a.kv = s.kv, a.dim = s.dim, a.causal = 1, a.window = b->window, a.threads = s.threads;
    a.scale = b->scale;
    weft_attend(&a);
    for (long p = 0; p < s.shared; p++)
      if (!asking.after[p].empty()) attend_prefix(s.prefixes[p], asking.after[p], b - blocks, a, s);
    apply(mixed, b->o, y, s.hidden, inner);
    weft_add_rows(x, y, rows, s.hidden, s.threads);
    norm(x, b->norm2, y);
    apply(y, b->gate_up, projected, 2 * s.inner, s.hidden);
    weft_silu(projected, projected + s.inner, mixed, 2 * s.inner, rows, s.inner, s.threads);
    apply(mixed, b->down, y, s.hidden, s.inner);
    weft_add_rows(x, y, rows, s.hidden, s.threads);
  }
  norm(x, s.norm, s.states);
}

} // namespace

extern "C" long weft_forward(const Block *blocks, const Step *given) {
  const Step &s = *given;
  for (long r = 0; r < s.rows; r++)
    if (s.tokens[r] < 0 || s.tokens[r] >= s.vocabulary) return OUTSIDE;
  for (long i = 0; s.wanted && i < s.num_wanted; i++)
    if (s.wanted[i] < 0 || s.wanted[i] >= s.rows) return OUTSIDE;
  try {
    forward(blocks, s);
  } catch (const std::bad_alloc &) {
    return NO_MEMORY;
  }
  return DONE;
}
