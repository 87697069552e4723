// The gradient of a weight matrix, out [rows, size] = g^T x for g [terms, rows] and x [terms, size]: a sum of outer products.
//
// Both are read as they lie. A tile of the result stays in registers for as many terms as a core's cache holds, so that the
// result, which for an output matrix is larger than all caches, is read and written seldom. oneDNN copies one side transposed
// first.
#include "kernels.h"
#include "simd.h"

#include <omp.h>
#include <vector>

namespace {

constexpr long ROWS = 6, WIDE = LANES == 16 ? 4 : 2; // of a tile: rows, and vectors of columns; as many sums as fit registers
constexpr long COLUMNS = WIDE * LANES;
constexpr long BLOCK = 8 * ROWS; // rows that are packed together
constexpr long TERMS = 320;      // summed at once, at most
constexpr long PART = 256;       // columns that are packed together, at most

struct Matrices {
  const float *g, *x;
  float *out;
  long by_g, by_x, by_out, rows, terms, size;
  bool adds;
};

// Columns from `part` on as panels [count][COLUMNS], zeros where there are none.
INLINE void pack_columns(const Matrices &m, long part, long wide, long first, long count, float *to) {
  for (long c = 0; c < wide; c += COLUMNS)
    for (long t = 0; t < count; t++, to += COLUMNS) {
      const float *from = m.x + (first + t) * m.by_x + part + c;
      for (long v = 0; v < WIDE; v++) {
        const long some = wide - c - v * LANES;
        store(to + v * LANES, some >= LANES ? load(from + v * LANES) : some > 0 ? load_some(from + v * LANES, some) : vec{});
      }
    }
}

// Rows from `row` on as panels [count][ROWS], zeros where there are none.
INLINE void pack_rows(const Matrices &m, long row, long first, long count, float *to) {
  const long there = m.rows - row < BLOCK ? m.rows - row : BLOCK;
  if (there < BLOCK) memset(to, 0, 4 * BLOCK * count);
  for (long t = 0; t < count; t++) {
    const float *from = m.g + (first + t) * m.by_g + row;
    for (long r = 0; r < there; r += ROWS)
      memcpy(to + (r * count + t * ROWS), from + r, 4 * (there - r < ROWS ? there - r : ROWS));
  }
}

// One tile over `count` terms, added to what is there or put in its place.
INLINE void tile(const float *g, const float *x, long count, float *out, long by_out, long rows, long columns, bool adds) {
  for (long i = 0; i < rows; i++)
    for (long c = 0; c < columns; c += LANES) __builtin_prefetch(out + i * by_out + c, 1);
  vec sums[ROWS][WIDE] = {};
  for (long t = 0; t < count; t++) {
    vec terms[WIDE];
    for (long v = 0; v < WIDE; v++) terms[v] = load(x + t * COLUMNS + v * LANES);
    for (long i = 0; i < ROWS; i++)
      for (long v = 0; v < WIDE; v++) sums[i][v] += terms[v] * g[t * ROWS + i];
  }
  for (long i = 0; i < rows; i++)
    for (long v = 0; v < WIDE; v++) {
      const long some = columns - v * LANES;
      float *to = out + i * by_out + v * LANES;
      if (some >= LANES) store(to, adds ? load(to) + sums[i][v] : sums[i][v]);
      else if (some > 0) store_some(to, adds ? load_some(to, some) + sums[i][v] : sums[i][v], some);
    }
}

// Blocks `from` to `to` of the columns from `part` on.
void blocks_of(const Matrices &m, long part, long wide, long from, long to, float *columns, float *rows) {
  const long pieces = (m.terms + TERMS - 1) / TERMS, even = (m.terms + pieces - 1) / pieces;
  for (long first = 0; first < m.terms; first += even) {
    const long count = m.terms - first < even ? m.terms - first : even;
    pack_columns(m, part, wide, first, count, columns);
    for (long block = from; block < to; block++) {
      pack_rows(m, block * BLOCK, first, count, rows);
      for (long row = block * BLOCK; row < m.rows && row < (block + 1) * BLOCK; row += ROWS)
        for (long c = 0; c < wide; c += COLUMNS)
          tile(rows + (row - block * BLOCK) * count, columns + c * count, count, m.out + row * m.by_out + part + c, m.by_out,
               m.rows - row < ROWS ? m.rows - row : ROWS, wide - c, m.adds || first > 0);
    }
  }
}

} // namespace

// out [rows, size] = g^T x, or out += g^T x where it `adds`; g [terms, rows] and x [terms, size] have rows `by_g` and `by_x` apart.
extern "C" void weft_weight_gradient(
    const float *g, const float *x, float *out, long by_g, long by_x, long rows, long terms, long size, long adds, long threads) {
  const Matrices m = {g, x, out, by_g, by_x, size, rows, terms, size, adds != 0};
  const int team = rows * terms * size > LARGE * 8 ? (int)threads : 1;
  const long blocks = (rows + BLOCK - 1) / BLOCK, part = blocks >= 2 * team ? PART : COLUMNS;
  const long tasks = (size + part - 1) / part * blocks;
#pragma omp parallel num_threads(team)
  {
    std::vector<float> held(TERMS * (PART + BLOCK) + 16);
    float *columns = (float *)(((size_t)held.data() + 63) / 64 * 64);
    const long number = omp_get_thread_num(), all = omp_get_num_threads();
    long task = tasks * number / all;
    const long end = tasks * (number + 1) / all;
    while (task < end) { // whole blocks of one part after another
      const long at = task / blocks * part, from = task % blocks, to = from + (end - task) < blocks ? from + (end - task) : blocks;
      blocks_of(m, at, size - at < part ? size - at : part, from, to, columns, columns + TERMS * PART);
      task += to - from;
    }
  }
}
