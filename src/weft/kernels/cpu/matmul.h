// Code shared by the matrix product kernels: their arguments, and the division of work among threads.
#pragma once

#include "simd.h"

struct Matrices {
  const float *a, *b, *bias;
  float *out;
  long a_row, a_term, b_term, b_column; // strides in floats; one stride of each matrix is 1
  long rows, terms, columns;
  bool adds;
};

// Destination of a tile's cells.
struct Place {
  float *at;
  const float *bias; // null if it is added later, or not at all
  long stride, rows, columns;
  bool adds;
};

// Stores a vector of row `i` of a tile, cut off at the tile's last column.
INLINE void put(const Place &out, long i, long column, vec y) {
  const long some = out.columns - column;
  if (some <= 0) return;
  float *to = out.at + i * out.stride + column;
  if (out.adds) y += load_up_to(to, some);
  if (out.bias) y += load_up_to(out.bias + column, some);
  store_up_to(to, y, some);
}

// Rows of a from `row` on, with `count` terms from `first` on.
struct Rows {
  long row, first, count;
};

// Computes row tiles `from` to `to` of the `wide` columns from `part` on.
template <typename Way> void multiply_tiles(Way &way, const Matrices &m, long part, long wide, long from, long to) {
  constexpr long ROWS = Way::ROWS, COLUMNS = Way::COLUMNS, BLOCK = Way::BLOCK;
  const long width = (wide + COLUMNS - 1) / COLUMNS * COLUMNS;
  const long piece = Way::piece_of(m.terms), chunk = piece * Way::pieces_of(width, (to - from) * ROWS * width);
  const long stop = to * ROWS < m.rows ? to * ROWS : m.rows;
  const auto least = [](long a, long b) { return a < b ? a : b; };
  for (long first = 0; first < m.terms; first += chunk) {
    const long end = least(first + chunk, m.terms);
    way.pack_columns(part, wide, first, end - first);
    for (long block = from * ROWS; block < stop; block += BLOCK)
      for (long start = first; start < end; start += piece) {
        const Rows rows = {block, start, least(end - start, piece)};
        const bool last = start + piece >= end; // last piece of the chunk
        const long after = last ? first : start + piece;
        way.pack_rows(rows, {last ? block + BLOCK : block, after, least(end - after, piece)}, stop);
        for (long row = block; row < stop && row < block + BLOCK; row += ROWS)
          for (long c = 0; c < wide; c += COLUMNS) {
            const float *bias = m.bias && start + piece >= m.terms ? m.bias + part + c : nullptr;
            const Place out = {m.out + row * m.columns + part + c, bias, m.columns, least(m.rows - row, ROWS), wide - c,
                               m.adds || start > 0};
            way.tile(rows, row, c, out);
          }
      }
    way.finish();
  }
}

// Computes all tiles. A `Way` computes one thread's tiles of Way::ROWS rows and Way::COLUMNS columns. It packs Way::BLOCK rows
// at a time, and at most Way::PART columns and Way::pieces_of(columns, cells of the result) pieces of the terms.
template <typename Way> void multiply(const Matrices &m, long threads) {
  constexpr long ROWS = Way::ROWS, COLUMNS = Way::COLUMNS, PART = Way::PART;
  constexpr long MANY = 512; // rows per thread from which it pays that each thread packs all columns
  const int team = m.rows * m.terms * m.columns > LARGE * 8 ? (int)threads : 1;
  const long down = (m.rows + ROWS - 1) / ROWS, all = (m.columns + COLUMNS - 1) / COLUMNS;
  // With many rows, threads divide the rows, so that each reads what it wrote before. With fewer rows, they divide the sequence
  // of tasks: one part of the columns after the other, and within a part row after row. With very few rows, they divide only
  // the columns.
  const bool by_rows = m.a_term == 1 && m.rows >= MANY * team;
  const long even = (all + team - 1) / team * COLUMNS, narrow = m.a_term == 1 ? even : COLUMNS;
  const long part = m.rows >= 2 * Way::BLOCK * team || narrow > PART ? PART : narrow;
#pragma omp parallel num_threads(team)
  {
    Way way(m);
    const long number = omp_get_thread_num(), crew = omp_get_num_threads();
    const long top = by_rows ? down * number / crew : 0, high = by_rows ? down * (number + 1) / crew - top : down;
    const long total = all * COLUMNS * high, whole = part * high;
    for (long at = by_rows ? 0 : total * number / crew, end = by_rows ? total : total * (number + 1) / crew; at < end;) {
      const long first = at / whole * part, wide = m.columns - first < part ? m.columns - first : part;
      const long width = (wide + COLUMNS - 1) / COLUMNS * COLUMNS, start = at - at / whole * whole;
      const long stop = end - (at - start);
      const long from = (start + width - 1) / width, to = stop < width * high ? (stop + width - 1) / width : high;
      if (from < to) multiply_tiles(way, m, first, wide, top + from, top + to);
      at += whole - start;
    }
  }
}
