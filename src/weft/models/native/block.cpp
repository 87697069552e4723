// A block of a network that is trained, or that scores a pack: the kernels that each part calls, called in a row, forward and
// backward. Between them nobody waits for the host.
#include "kernels.h"
#include "simd.h"

#include <vector>

// Weights of the norms before attention and MLP; queries, keys and values side by side, as gate and up are.
struct Weights {
  const float *norm1, *norm2;
  Linear qkv, o, gate_up, down;
};

// Where the gradients of each go; null for those that are not wanted.
struct ByLinear {
  float *weight, *bias;
};
struct ByWeights {
  float *norm1, *norm2;
  ByLinear qkv, o, gate_up, down;
};

// Rows of a pack, all of which are keys and queries. Of those that are `wanted`, in any order, the block goes on to the end.
struct Pass {
  const float *x, *cos, *sin;  // [rows, hidden]; [rows, half], null without a rotation
  const Segment *own, *across; // who sees what: [owns], as far as its own row, and [acrosses], all
  const long *wanted;          // [wants]; null for all, and then wants is rows
  float *out, *kept, *room;    // [wants, hidden]; as many floats as `weft_block_kept` and `weft_block_..._room` say
  const float *by_out;         // [wants, hidden]
  float *by_x;                 // [rows, hidden]; null where it is not wanted
  long owns, acrosses, rows, wants, hidden, heads, kv, dim, half, inner, window;
  long keeps;        // whether there will be a backward pass
  long few, threads; // `few`: rows that `weft_product` multiplies, and `weft_matmul` more
  double eps, offset, scale;
  long query() const { return heads * dim; }
  long wide() const { return (heads + 2 * kv) * dim; }
};

namespace {

long most(long a, long b) { return a > b ? a : b; }

// What the backward pass reads of the forward pass; without one `normed2` takes the place of `normed1`, and `opened` of `turned`.
struct Kept {
  float *normed1, *inverse1;          // [rows, hidden], [rows]
  float *turned, *lse;                // [rows, (heads + 2 kv) dim], queries and keys turned; [rows, heads]
  float *mixed, *asked;               // [rows, heads dim]; [wants, heads dim], which is `mixed` where all are wanted
  float *middle, *normed2, *inverse2; // [wants, hidden] each, and [wants]
  float *opened;                      // [wants, 2 inner]
  long count = 0;                     // floats in all

  explicit Kept(const Pass &p) {
    const auto next = [&](long floats) {
      float *const at = p.kept + count;
      count += padded(floats);
      return at;
    };
    const long opens = p.wants * 2 * p.inner, turns = p.rows * p.wide();
    normed1 = next((p.keeps ? p.rows : most(p.rows, p.wants)) * p.hidden), inverse1 = next(p.rows);
    turned = next(p.keeps ? turns : most(turns, opens)), lse = next(p.rows * p.heads);
    mixed = next(p.rows * p.query()), asked = p.wanted ? next(p.wants * p.query()) : mixed;
    middle = next(p.wants * p.hidden), normed2 = p.keeps ? next(p.wants * p.hidden) : normed1, inverse2 = next(p.wants);
    opened = p.keeps ? next(opens) : turned;
  }
};

void fill_with_zeros(float *to, long rows, long size, long threads) {
  const int team = rows * size > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long i = 0; i < rows; i++) memset(to + i * size, 0, 4 * size);
}

// by_bias[d] = sum of by[r, d] over the rows, which are summed in blocks, then these in order.
void add_up(const float *by, float *by_bias, long rows, long size, long threads) {
  constexpr long BLOCK = 64;
  const int team = rows * size > LARGE ? (int)threads : 1;
#pragma omp parallel for num_threads(team)
  for (long d = 0; d < size; d += LANES) {
    vec total = {};
    for (long block = 0; block < rows; block += BLOCK) {
      vec part = {};
      for (long r = block; r < rows && r < block + BLOCK; r++) part += load_up_to(by + r * size + d, size - d);
      total += part;
    }
    store_up_to(by_bias + d, total, size - d);
  }
}

// The gradients of out = x weight^T + bias by weight and bias, those that are wanted, and by x, where `by_x` is not null.
void multiply_back(
    const float *by, const float *x, const float *weight, ByLinear to, float *by_x, long rows, long size, long terms,
    long threads) {
  if (by_x) weft_matmul(by, weight, nullptr, by_x, size, 1, terms, 1, rows, size, terms, 0, threads);
  if (to.weight) weft_matmul(by, x, nullptr, to.weight, 1, size, terms, 1, size, rows, terms, 0, threads);
  if (to.bias) add_up(by, to.bias, rows, size, threads);
}

Arguments attention_of(const Pass &p, const Kept &k) {
  Arguments a = {};
  const long wide = p.wide();
  a.q = {k.turned, wide, p.dim}, a.k = {k.turned + p.query(), wide, p.dim};
  a.v = {k.turned + p.query() + p.kv * p.dim, wide, p.dim};
  a.out = {k.mixed, p.query(), p.dim}, a.lse = k.lse;
  a.segments = p.own, a.count = p.owns, a.heads = p.heads, a.kv = p.kv, a.dim = p.dim;
  a.causal = 1, a.window = p.window, a.threads = p.threads, a.scale = p.scale;
  return a;
}

Arguments across(Arguments a, const Pass &p) {
  a.segments = p.across, a.count = p.acrosses, a.causal = 0, a.window = 0;
  return a;
}

void attend(const Pass &p, const Kept &k) {
  const Arguments own = attention_of(p, k);
  weft_attend(&own);
  if (!p.acrosses) return;
  float *const more = p.room, *const more_lse = more + p.rows * p.query();
  Arguments other = across(own, p);
  other.out.at = more, other.lse = more_lse;
  weft_attend(&other);
  std::vector<long> rows;
  for (const Segment *s = p.across; s < p.across + p.acrosses; s++) {
    rows.resize(s->rows);
    for (long r = 0; r < s->rows; r++) rows[r] = s->row + r;
    weft_join(
        k.mixed, k.lse, more + s->row * p.query(), more_lse + s->row * p.heads, rows.data(), s->rows, p.heads, p.dim, p.query(),
        p.threads);
  }
}

void forward(const Weights &w, const Pass &p) {
  const Kept k(p);
  const auto apply = [&](const float *from, Linear layer, float *to, long rows, long size, long terms) {
    multiply(from, layer, to, rows, size, terms, p.few, p.threads);
  };
  weft_rms_norm(p.x, w.norm1, k.normed1, k.inverse1, p.rows, p.hidden, p.eps, p.offset, p.threads);
  apply(k.normed1, w.qkv, k.turned, p.rows, p.wide(), p.hidden);
  if (p.cos)
    weft_rotate(
        k.turned, p.cos, p.sin, k.turned, p.wide(), p.dim, p.rows, p.heads + 2 * p.kv, p.heads + p.kv, p.dim, p.half, 1.0,
        p.threads);
  attend(p, k);
  if (p.wanted) weft_gather(k.mixed, p.wanted, p.wants, p.query(), k.asked, p.threads);
  apply(k.asked, w.o, k.middle, p.wants, p.hidden, p.query());
  weft_add_rows(k.middle, p.x, p.wanted, p.wants, p.hidden, p.threads);
  weft_rms_norm(k.middle, w.norm2, k.normed2, k.inverse2, p.wants, p.hidden, p.eps, p.offset, p.threads);
  apply(k.normed2, w.gate_up, k.opened, p.wants, 2 * p.inner, p.hidden);
  weft_silu(k.opened, k.opened + p.inner, p.room, 2 * p.inner, p.wants, p.inner, p.threads);
  apply(p.room, w.down, p.out, p.wants, p.hidden, p.inner);
  weft_add_rows(p.out, k.middle, nullptr, p.wants, p.hidden, p.threads);
}

void backward(const Weights &w, const ByWeights &to, const Pass &p) {
  const Kept k(p);
  const long query = p.query(), wide = p.wide(), whole = p.inner * p.wants;
  float *const by_middle = p.room, *const room = by_middle + p.wants * p.hidden;

  // The MLP.
  float *const by_value = room, *const value = by_value + whole, *const by_opened = value + whole;
  float *const by_normed2 = by_opened + 2 * whole;
  multiply_back(p.by_out, nullptr, w.down.weight, {}, by_value, p.wants, p.hidden, p.inner, p.threads);
  weft_silu_backward(
      k.opened, k.opened + p.inner, by_value, to.down.weight ? value : nullptr, by_opened, by_opened + p.inner, 2 * p.inner, p.wants, p.inner, p.threads);
  multiply_back(p.by_out, value, w.down.weight, to.down, nullptr, p.wants, p.hidden, p.inner, p.threads);
  multiply_back(by_opened, k.normed2, w.gate_up.weight, to.gate_up, by_normed2, p.wants, 2 * p.inner, p.hidden, p.threads);
  weft_rms_norm_backward(
      k.middle, w.norm2, k.inverse2, by_normed2, by_middle, to.norm2, p.wants, p.hidden, p.offset, p.threads);
  weft_add_rows(by_middle, p.by_out, nullptr, p.wants, p.hidden, p.threads);

  // Attention.
  const bool passes = p.by_x || to.norm1, asks = passes || to.qkv.weight || to.qkv.bias; // anything before the norm, or it
  float *const by_mixed = room, *const by_normed1 = by_mixed + p.rows * query, *const by_turned = by_normed1 + p.rows * p.hidden;
  if (p.wanted) {
    float *const by_asked = asks ? by_turned : nullptr; // whose turn comes later
    multiply_back(by_middle, k.asked, w.o.weight, to.o, by_asked, p.wants, p.hidden, query, p.threads);
    if (!asks) return;
    fill_with_zeros(by_mixed, p.rows, query, p.threads);
    weft_add_to_rows(by_mixed, by_asked, p.wanted, p.wants, query, p.threads);
  } else {
    multiply_back(by_middle, k.mixed, w.o.weight, to.o, asks ? by_mixed : nullptr, p.rows, p.hidden, query, p.threads);
    if (!asks) return;
  }
  fill_with_zeros(by_turned, p.rows, wide, p.threads);
  Arguments a = attention_of(p, k);
  a.by_out = {by_mixed, query, p.dim}, a.by_q = {by_turned, wide, p.dim}, a.by_k = {by_turned + query, wide, p.dim};
  a.by_v = {by_turned + query + p.kv * p.dim, wide, p.dim};
  weft_attend_backward(&a);
  if (p.acrosses) {
    const Arguments other = across(a, p);
    weft_attend_backward(&other);
  }
  if (p.cos)
    weft_rotate(
        by_turned, p.cos, p.sin, by_turned, wide, p.dim, p.rows, p.heads + 2 * p.kv, p.heads + p.kv, p.dim, p.half, -1.0,
        p.threads);
  multiply_back(by_turned, k.normed1, w.qkv.weight, to.qkv, passes ? by_normed1 : nullptr, p.rows, wide, p.hidden, p.threads);
  if (passes)
    weft_rms_norm_backward(p.x, w.norm1, k.inverse1, by_normed1, p.by_x, to.norm1, p.rows, p.hidden, p.offset, p.threads);
  if (!p.by_x) return;
  float *past = by_middle; // what goes past the norm and attention
  if (p.wanted) {
    past = by_turned;
    fill_with_zeros(past, p.rows, p.hidden, p.threads);
    weft_add_to_rows(past, by_middle, p.wanted, p.wants, p.hidden, p.threads);
  }
  weft_add_rows(p.by_x, past, nullptr, p.rows, p.hidden, p.threads);
}

} // namespace

// Floats of `kept`, and of `room`, which each of the two takes.
extern "C" long weft_block_kept(const Pass *pass) { return Kept(*pass).count; }
extern "C" long weft_block_forward_room(const Pass *pass) {
  const Pass &p = *pass;
  return most(p.wants * p.inner, p.acrosses ? p.rows * (p.query() + p.heads) : 0);
}
extern "C" long weft_block_backward_room(const Pass *pass) {
  const Pass &p = *pass;
  const long turns = most(p.rows * most(p.wide(), p.hidden), p.wants * p.query());
  return p.wants * p.hidden + most(p.wants * (4 * p.inner + p.hidden), p.rows * (p.query() + p.hidden) + turns);
}

// Fills `out` and what is kept; an `Outcome`.
extern "C" long weft_block_forward(const Weights *weights, const Pass *pass) {
  const Pass &p = *pass;
  for (long i = 0; p.wanted && i < p.wants; i++)
    if (p.wanted[i] < 0 || p.wanted[i] >= p.rows) return OUTSIDE;
  forward(*weights, p);
  return DONE;
}

// Fills `by_x` and the weights' gradients, those that are wanted.
extern "C" void weft_block_backward(const Weights *weights, const ByWeights *to, const Pass *pass) {
  backward(*weights, *to, *pass);
}
