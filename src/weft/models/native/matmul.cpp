// Matrix products, out [rows, columns] = a b + bias for a [rows, terms] and b [terms, columns], either of which may lie transposed.
//
// A tile of the result stays in registers for as many terms as a core's cache holds, so that the result, which for an output
// matrix is larger than all caches, is read and written seldom. A cell has the same bits whatever cells are computed with it.
#include "kernels.h"
#include "simd.h"

#include <omp.h>

namespace {

constexpr long ROWS = 6, WIDE = LANES == 16 ? 4 : 2; // of a tile: rows, and vectors of columns; as many sums as fit registers
constexpr long COLUMNS = WIDE * LANES;
constexpr long BLOCK = 8 * ROWS; // rows that are packed together
constexpr long PART = 256;       // columns that are packed together, at most
constexpr long MANY = 512;       // rows for which a thread may as well pack all columns

struct Matrices {
  const float *a, *b, *bias;
  float *out;
  long a_row, a_term, b_term, b_column; // from one to the next, in floats; 1 for one of each two
  long rows, terms, columns;
  bool adds;
};

// Some columns of b from `part` on as panels [count][COLUMNS], zeros where there are none.
INLINE void pack_columns(const Matrices &m, long part, long wide, long first, long count, float *to) {
  for (long c = 0; c < wide; c += COLUMNS, to += count * COLUMNS) {
    const float *from = m.b + first * m.b_term + (part + c) * m.b_column;
    if (m.b_column == 1)
      for (long t = 0; t < count; t++)
        for (long v = 0; v < WIDE; v++) {
          const float *here = from + t * m.b_term + v * LANES;
          const long some = wide - c - v * LANES;
          store(to + t * COLUMNS + v * LANES, some > 0 ? load_up_to(here, some) : vec{});
        }
    else
      for (long v = 0; v < WIDE; v++) {
        const long some = wide - c - v * LANES, there = some < 0 ? 0 : some < LANES ? some : LANES;
        transpose(from + v * LANES * m.b_column, m.b_column, there, count, to + v * LANES, COLUMNS);
      }
  }
}

// Rows of a that lie transposed, from `row` on, as panels [count][ROWS], zeros where there are none.
INLINE void pack_rows(const Matrices &m, long row, long first, long count, float *to) {
  const long there = m.rows - row < BLOCK ? m.rows - row : BLOCK;
  if (there < BLOCK) memset(to, 0, 4 * BLOCK * count);
  for (long t = 0; t < count; t++) {
    const float *from = m.a + (first + t) * m.a_term + row;
    for (long r = 0; r < BLOCK; r += 16) __builtin_prefetch(from + BLOCK + r);
    if (there == BLOCK) // known sizes: no calls
      for (long r = 0; r < BLOCK; r += ROWS) memcpy(to + r * count + t * ROWS, from + r, 4 * ROWS);
    else
      for (long r = 0; r < there; r += ROWS) memcpy(to + r * count + t * ROWS, from + r, 4 * (there - r < ROWS ? there - r : ROWS));
  }
}

// Where a tile's cells go.
struct Place {
  float *at;
  const float *bias; // null where it is added later, or not at all
  long by, rows, columns;
  bool adds;
};

// One tile over `count` terms: a[i] are its rows, whose terms are `step` apart, b a panel.
template <long step> INLINE void tile(const float *const *a, const float *b, long count, const Place &out) {
  for (long i = 0; i < out.rows; i++)
    for (long c = 0; c < out.columns && c < COLUMNS; c += LANES) __builtin_prefetch(out.at + i * out.by + c, 1);
  vec sums[ROWS][WIDE];
  for (long i = 0; i < ROWS; i++)
    for (long v = 0; v < WIDE; v++) sums[i][v] = vec{};
  for (long t = 0; t < count; t++) {
    vec terms[WIDE];
    for (long v = 0; v < WIDE; v++) terms[v] = load(b + t * COLUMNS + v * LANES);
    for (long i = 0; i < ROWS; i++)
      for (long v = 0; v < WIDE; v++) sums[i][v] += terms[v] * a[i][t * step];
  }
  for (long i = 0; i < out.rows; i++)
    for (long v = 0; v < WIDE; v++) {
      const long some = out.columns - v * LANES;
      if (some <= 0) continue;
      float *to = out.at + i * out.by + v * LANES;
      vec y = sums[i][v];
      if (out.adds) y += load_up_to(to, some);
      if (out.bias) y += load_up_to(out.bias + v * LANES, some);
      store_up_to(to, y, some);
    }
}

// What will be packed next, as runs of floats in memory: fetched into the second cache, some lines a tile.
struct Coming {
  const float *at;
  long by_run, runs, lines; // from one run to the next, runs left, lines of each
  long line = 0;
  void fetch(long count) {
    for (; count > 0 && runs > 0; count--) {
      __builtin_prefetch(at + line * 16, 0, 2);
      if (++line == lines) line = 0, at += by_run, runs--;
    }
  }
};

INLINE Coming coming(const Matrices &m, long part, long wide, long first, long count) {
  const float *at = m.b + first * m.b_term + part * m.b_column;
  if (m.b_column == 1) return {at, m.b_term, count, (wide + 15) / 16};
  return {at, m.b_column, wide, (count + 15) / 16};
}

// Tiles `from` to `to` of the rows, of the columns from `part` on; `next` columns behind these are this thread's too.
void tiles_of(const Matrices &m, long part, long wide, long next, long from, long to, float *columns, float *rows) {
  const long piece = piece_of(m.terms), tiles = (to - from) * ((wide + COLUMNS - 1) / COLUMNS);
  const long stop = to * ROWS < m.rows ? to * ROWS : m.rows;
  for (long first = 0; first < m.terms; first += piece) {
    const long count = m.terms - first < piece ? m.terms - first : piece;
    const bool packed = m.a_term != 1;
    pack_columns(m, part, wide, first, count, columns);
    const long left = m.terms - first - count;
    Coming ahead = left > 0 ? coming(m, part, wide, first + count, left < piece ? left : piece)
                            : coming(m, part + wide, next, 0, m.terms < piece ? m.terms : piece);
    const long each = (ahead.runs * ahead.lines + tiles - 1) / tiles;
    for (long block = from * ROWS; block < stop; block += BLOCK) {
      if (packed) pack_rows(m, block, first, count, rows);
      for (long row = block; row < stop && row < block + BLOCK; row += ROWS) {
        const long there = m.rows - row < ROWS ? m.rows - row : ROWS;
        const float *a[ROWS];
        for (long i = 0; i < ROWS; i++)
          a[i] = packed ? rows + (row - block) * count + i : m.a + (row + (i < there ? i : 0)) * m.a_row + first;
        for (long c = 0; c < wide; c += COLUMNS) {
          const float *bias = m.bias && first + count == m.terms ? m.bias + part + c : nullptr;
          const Place out = {m.out + row * m.columns + part + c, bias, m.columns, there, wide - c, m.adds || first > 0};
          ahead.fetch(each);
          packed ? tile<ROWS>(a, columns + c * count, count, out) : tile<1>(a, columns + c * count, count, out);
        }
      }
    }
  }
}

} // namespace

// out = a b + bias, or out += a b where it `adds`; out is contiguous, and `bias` may be null.
extern "C" void weft_matmul(
    const float *a, const float *b, const float *bias, float *out, long a_row, long a_term, long b_term, long b_column, long rows,
    long terms, long columns, long adds, long threads) {
  const Matrices m = {a, b, bias, out, a_row, a_term, b_term, b_column, rows, terms, columns, adds != 0};
  const int team = rows * terms * columns > LARGE * 8 ? (int)threads : 1;
  const long down = (rows + ROWS - 1) / ROWS, all = (columns + COLUMNS - 1) / COLUMNS;
  // Threads share the rows: what one has written of them it also reads next. Where these are few they share tasks, part after
  // part of the columns and of each row after row; and the columns alone where rows are fewer still.
  const bool by_rows = a_term == 1 && rows >= MANY * team;
  const long even = (all + team - 1) / team * COLUMNS, narrow = a_term == 1 ? even : COLUMNS;
  const long part = rows >= 2 * BLOCK * team || narrow > PART ? PART : narrow;
#pragma omp parallel num_threads(team)
  {
    const Buffer panels(PIECE * (PART + BLOCK));
    const long number = omp_get_thread_num(), crew = omp_get_num_threads();
    const long top = by_rows ? down * number / crew : 0, high = by_rows ? down * (number + 1) / crew - top : down;
    const long total = all * COLUMNS * high, whole = part * high;
    for (long at = by_rows ? 0 : total * number / crew, end = by_rows ? total : total * (number + 1) / crew; at < end;) {
      const long first = at / whole * part, wide = columns - first < part ? columns - first : part;
      const long width = (wide + COLUMNS - 1) / COLUMNS * COLUMNS, start = at - at / whole * whole;
      const long behind = at - start + whole, stop = end - (at - start), rest = columns - first - wide;
      const long from = (start + width - 1) / width, to = stop < width * high ? (stop + width - 1) / width : high;
      const long next = behind >= end ? 0 : rest < part ? rest : part;
      if (from < to) tiles_of(m, first, wide, next, top + from, top + to, panels, panels + PIECE * PART);
      at = behind;
    }
  }
}
