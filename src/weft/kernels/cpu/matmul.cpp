// Matrix products, out [rows, columns] = a b + bias for a [rows, terms] and b [terms, columns], either of which can be
// transposed.
//
// A tile of the result stays in registers for as many terms as fit a core's cache, so the result, which is larger than all
// caches for an output matrix, is rarely read and written. A cell has the same bits whatever other cells are computed with it.
#include "matmul.h"
#include "kernels.h"

namespace {

// One thread's tiles, in vector registers.
class Vectors {
public:
  static constexpr long WIDE = LANES == 16 ? 4 : 2, ROWS = 6; // tile size: vectors of columns, and rows; its sums fit registers
  static constexpr long COLUMNS = WIDE * LANES, BLOCK = 8 * ROWS, PART = 256;
  static long piece_of(long terms) { return ::piece_of(terms); }
  static long pieces_of(long, long) { return 1; }

  explicit Vectors(const Matrices &m) : m(m), columns(PIECE * PART), rows(PIECE * BLOCK) {}

  // Packs columns of b from `part` on into panels [count][COLUMNS]; missing columns become zeros.
  void pack_columns(long part, long wide, long first, long count) {
    float *to = columns;
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

  // Packs rows of a transposed a, from `row` on, into panels [count][ROWS]; missing rows become zeros. Other matrices are read
  // in place.
  void pack_rows(const Rows &some, const Rows &, long) {
    if (m.a_term == 1) return;
    const auto [row, first, count] = some;
    const long there = m.rows - row < BLOCK ? m.rows - row : BLOCK;
    float *const to = rows;
    if (there < BLOCK) memset(to, 0, 4 * BLOCK * count);
    for (long t = 0; t < count; t++) {
      const float *from = m.a + (first + t) * m.a_term + row;
      for (long r = 0; r < BLOCK; r += 16) __builtin_prefetch(from + BLOCK + r);
      if (there == BLOCK) // a size known at compile time is inlined
        for (long r = 0; r < BLOCK; r += ROWS) memcpy(to + r * count + t * ROWS, from + r, 4 * ROWS);
      else
        for (long r = 0; r < there; r += ROWS)
          memcpy(to + r * count + t * ROWS, from + r, 4 * (there - r < ROWS ? there - r : ROWS));
    }
  }

  // Computes the tile of the packed rows from `row` on and the part's columns from `column` on.
  void tile(const Rows &some, long row, long column, const Place &out) {
    const auto [block, first, count] = some;
    for (long i = 0; i < out.rows; i++)
      for (long c = 0; c < out.columns && c < COLUMNS; c += LANES) __builtin_prefetch(out.at + i * out.stride + c, 1);
    const bool packed = m.a_term != 1;
    const float *a[ROWS];
    for (long i = 0; i < ROWS; i++)
      a[i] = packed ? rows + (row - block) * count + i : m.a + (row + (i < out.rows ? i : 0)) * m.a_row + first;
    packed ? sums_of<ROWS>(a, columns + column * count, count, out) : sums_of<1>(a, columns + column * count, count, out);
  }

  void finish() {}

private:
  // a[i] are the tile's rows, with terms `step` apart; b is a panel.
  template <long step> static void sums_of(const float *const *a, const float *b, long count, const Place &out) {
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
      for (long v = 0; v < WIDE; v++) put(out, i, v * LANES, sums[i][v]);
  }

  const Matrices &m;
  const Buffer columns, rows;
};

} // namespace

// out = a b + bias, or out += a b with `adds`; out is contiguous, and `bias` can be null.
extern "C" void weft_matmul(
    const float *a, const float *b, const float *bias, float *out, long a_row, long a_term, long b_term, long b_column, long rows,
    long terms, long columns, long adds, long threads) {
  const Matrices m = {a, b, bias, out, a_row, a_term, b_term, b_column, rows, terms, columns, adds != 0};
  if (!weft_matmul_amx(m, threads)) multiply<Vectors>(m, threads);
}
