// Consecutive decode steps of a network; each runs on the tokens that the previous step drew.
#include "forward.h"
#include "simd.h"

#include <memory>
#include <new>
#include <vector>

namespace {

// Draws the tokens of a step. Logits of tokens that a row may not draw become minus infinity, but they still count in its
// log-probs.
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

// Runs the steps; returns their number, or the `Outcome` of a failed step.
long steps_of(const Block *blocks, const Draws &d, Step s) {
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
    if (const long outcome = weft_forward(blocks, &s)) return outcome;
    multiply(s.states, {d.head, d.bias}, logits, s.rows, s.vocabulary, s.hidden, s.few, s.threads);
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

} // namespace

// Runs decode steps until one draws a stop token or gets a log-prob that is not finite; returns the number of steps, or an
// `Outcome`. Each row has one new token per step: the one that the previous step drew.
extern "C" long weft_decode_ahead(const Block *blocks, const Draws *draws, const Step *given) {
  try {
    return steps_of(blocks, *draws, *given);
  } catch (const std::bad_alloc &) {
    return NO_MEMORY;
  }
}
