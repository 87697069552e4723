// Softmax over rows of logits without copying them: log-probs, entropy, sampling and gradients.
//
// Sums of exp are taken over blocks of ids in float32 and over the blocks in float64, always in the same order, so that the
// sampler and training get the same bits for the same logits.
#include "simd.h"

namespace {

constexpr long BLOCK = 128; // ids of a block

// The sum of exp(x - most) over some ids, and of exp(x - most) * (x - most).
struct Sums {
  float total, weighted;
};

INLINE Sums sums_of(const float *x, long count, float most, bool weigh) {
  vec total = {}, weighted = {};
  const auto add = [&](vec z) {
    const vec p = exponential(z);
    total += p;
    if (weigh) {
      const ivec there = p > 0.f;
      weighted += there ? p * z : vec{};
    }
  };
  long i = 0;
  for (; i + LANES <= count; i += LANES) add(load(x + i) - most);
  if (i < count) {
    vec z = load_some(x + i, count - i) - most;
    for (long l = count - i; l < LANES; l++) z[l] = -INFINITY;
    add(z);
  }
  return {sum(total), weigh ? sum(weighted) : 0.f};
}

INLINE float highest(const float *x, long count) {
  vec most[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
  long i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
    for (long v = 0; v < 4; v++) most[v] = largest(most[v], load(x + i + v * LANES));
  float top = largest(largest(largest(most[0], most[1]), largest(most[2], most[3])));
  for (; i < count; i++) top = x[i] > top ? x[i] : top;
  return top;
}

// The first id with this value; `count` if no id has it, for example if all are NaN.
INLINE long first_of(const float *x, long count, float value) {
  long i = 0;
  for (; i + BLOCK <= count; i += BLOCK) {
    ivec found = {};
    for (long v = 0; v < BLOCK; v += LANES) found |= load(x + i + v) == value;
    if (sum((vec)(found & (ivec)splat(1.f))) > 0.f) break;
  }
  while (i < count && x[i] != value) i++;
  return i;
}

} // namespace

// For each row of x [rows, size]: lse, and if not null, the entropy of its softmax in nats and its most likely id (the first on
// ties). A row of minus infinity has lse minus infinity and entropy 0.
extern "C" void weft_statistics(
    const float *x, float *lse, float *entropy, long *best, long rows, long size, long threads) {
#pragma omp parallel for schedule(dynamic) num_threads((int)threads)
  for (long r = 0; r < rows; r++) {
    const float *row = x + r * size, most = highest(row, size), from = most == -INFINITY ? 0.f : most;
    double total = 0, weighted = 0;
    for (long i = 0; i < size; i += BLOCK) {
      const Sums part = sums_of(row + i, size - i < BLOCK ? size - i : BLOCK, from, entropy != nullptr);
      total += part.total, weighted += part.weighted;
    }
    lse[r] = (float)(from + log(total));
    if (entropy) entropy[r] = total == 0 ? 0.f : (float)(log(total) - weighted / total);
    if (best) best[r] = first_of(row, size, most);
  }
}

// For each row of x [rows, size] the first id whose running sum of exp(x), in the order of the ids and in float64, exceeds
// uniforms[row] times the sum of all, and its log-prob. If rounding leaves none, the last id with nonzero probability.
extern "C" void weft_draw(
    const float *x, const double *uniforms, long *ids, float *logprobs, long rows, long size, long threads) {
#pragma omp parallel for schedule(dynamic) num_threads((int)threads)
  for (long r = 0; r < rows; r++) {
    const float *row = x + r * size, most = highest(row, size);
    const long blocks = (size + BLOCK - 1) / BLOCK;
    float parts[blocks];
    double total = 0, before = 0;
    for (long b = 0; b < blocks; b++) {
      const long count = size - b * BLOCK < BLOCK ? size - b * BLOCK : BLOCK;
      parts[b] = sums_of(row + b * BLOCK, count, most, false).total;
      total += parts[b];
    }
    const double target = uniforms[r] * total;
    long block = 0, last = 0;
    for (; block < blocks; block++) {
      if (parts[block] > 0.f) last = block;
      if (before + parts[block] > target) break;
      before += parts[block];
    }
    if (block == blocks) block = last, before = -INFINITY; // no sum above it: the last possible id
    long id = block * BLOCK, possible = id;
    const long end = id + BLOCK < size ? id + BLOCK : size;
    for (; id < end; id++) {
      const float p = exponential(splat(row[id] - most))[0];
      if (p > 0.f) possible = id;
      before += p;
      if (before > target && p > 0.f) break;
    }
    ids[r] = id < end ? id : possible;
    logprobs[r] = row[ids[r]] - (float)(most + log(total));
  }
}

// The gradients of logits x [rows, size], in their place, of grad_logprob * log p(label) + grad_entropy * entropy for p =
// softmax(x): grad_logprob * (1 at the label - p) - grad_entropy * p * (log p + entropy). `entropy` and `grad_entropy` can be
// null; a label below 0 means that the label is not among these ids.
extern "C" void weft_logit_gradients(
    float *x, const float *lse, const float *entropy, const long *labels, const float *grad_logprob, const float *grad_entropy,
    long rows, long size, long threads) {
#pragma omp parallel for schedule(dynamic) num_threads((int)threads)
  for (long r = 0; r < rows; r++) {
    float *row = x + r * size;
    for (long i = 0; i < size; i += LANES) {
      const long some = size - i < LANES ? size - i : LANES;
      const vec z = (some < LANES ? load_some(row + i, some) : load(row + i)) - lse[r], p = exponential(z);
      vec y = p * -grad_logprob[r];
      if (grad_entropy) {
        const ivec there = p > 0.f;
        y -= there ? p * (grad_entropy[r] * (z + entropy[r])) : vec{};
      }
      some < LANES ? store_some(row + i, y, some) : store(row + i, y);
    }
    if (labels[r] >= 0) row[labels[r]] += grad_logprob[r];
  }
}
