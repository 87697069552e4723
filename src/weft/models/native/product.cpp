// Products of a few float32 rows with a matrix that is read once, as it lies: what a decode step consists of.
//
// A vector holds one column of LANES rows, so that each weight is multiplied with all of them at once. To copy the matrix first,
// as `weft_matmul` does, would take longer than the product.
#include "kernels.h"
#include "simd.h"

namespace {

// Sums kept in registers at once: half of those that there are, or more.
constexpr long SUMS = LANES == 16 ? 24 : 12;

// sums[l][j] = x[l] . weight[j] + bias[j] for L vectors of rows and N columns. x[k * L + l] is what vector l has of term k.
template <long L, long N> INLINE void tile(const float *x, const float *weight, const float *bias, long terms, vec (*sums)[LANES]) {
  const long piece = piece_of(terms);
  for (long first = 0; first < terms; first += piece) {
    vec part[L][N] = {};
    const long end = first + piece < terms ? first + piece : terms;
    for (long k = first; k < end;) {
      for (long j = 0; j < N; j++) __builtin_prefetch(weight + (N + j) * terms + k, 0, 2); // into the second cache
      for (const long stop = k + 16 < end ? k + 16 : end; k < stop; k++) {
        vec column[L];
        for (long l = 0; l < L; l++) column[l] = load(x + (k * L + l) * LANES);
        for (long j = 0; j < N; j++)
          for (long l = 0; l < L; l++) part[l][j] += column[l] * weight[j * terms + k];
      }
    }
    for (long l = 0; l < L; l++)
      for (long j = 0; j < N; j++) sums[l][j] = first ? sums[l][j] + part[l][j] : part[l][j];
  }
  for (long j = 0; bias && j < N; j++)
    for (long l = 0; l < L; l++) sums[l][j] += bias[j];
}

// G times N columns, as many as fit a vector, to the first of their rows in `out`.
template <long L, long N, long G> INLINE void tiles(
    const float *x, const float *weight, const float *bias, long terms, long rows, float *out, long by_row) {
  vec sums[L][LANES]; // those past the last are never looked at
  for (long g = 0; g < G; g++)
    tile<L, N>(x, weight + g * N * terms, bias ? bias + g * N : nullptr, terms, (vec(*)[LANES])&sums[0][g * N]);
  for (long l = 0; l < L; l++) {
    exchange(sums[l]);
    for (long r = 0; r < LANES && l * LANES + r < rows; r++) store_some(out + (l * LANES + r) * by_row, sums[l][r], G * N);
  }
}

// Columns `from` to `to` for L vectors of rows.
template <long L> INLINE void columns(
    const float *x, const float *weight, const float *bias, long terms, long rows, float *out, long by_row, long from, long to) {
  constexpr long N = SUMS / L < LANES ? SUMS / L : LANES - LANES / 4, G = LANES / N, WIDE = G * N;
  long j = from;
  for (; j + WIDE <= to; j += WIDE)
    tiles<L, N, G>(x, weight + j * terms, bias ? bias + j : nullptr, terms, rows, out + j, by_row);
  for (; j + N <= to; j += N) tiles<L, N, 1>(x, weight + j * terms, bias ? bias + j : nullptr, terms, rows, out + j, by_row);
  for (; j < to; j++) tiles<L, 1, 1>(x, weight + j * terms, bias ? bias + j : nullptr, terms, rows, out + j, by_row);
}

} // namespace

// out [rows, size] = x [rows, terms] weight^T + bias for weight [size, terms], contiguous but for the rows of out, which are
// `by_row` apart; `bias` may be null.
extern "C" void weft_product(
    const float *x, const float *weight, const float *bias, float *out, long by_row, long rows, long size, long terms,
    long threads) {
  constexpr long MOST = LANES == 16 ? 4 : 2; // vectors of rows at once
  const long vectors = (rows + LANES - 1) / LANES;
  const Buffer packed(vectors * LANES * terms);
  const int team = rows * size * terms > LARGE * 8 ? (int)threads : 1;
  // Columns that a thread takes at a time: whole tiles, some parts for each thread, and no more than a core's cache holds.
  constexpr long UNIT = 24, WIDEST_PART = 192;
  const long even = (size / (4 * team) + UNIT - 1) / UNIT * UNIT;
  const long wide_part = even < UNIT ? UNIT : even > WIDEST_PART ? WIDEST_PART : even;
#pragma omp parallel num_threads(team)
  {
#pragma omp for
    for (long v = 0; v < vectors; v++) {
      const long first = v / MOST * MOST, wide = vectors - first < MOST ? vectors - first : MOST;
      float *to = packed + first * LANES * terms + (v - first) * LANES;
      const long there = rows - v * LANES < LANES ? rows - v * LANES : LANES;
      float column[LANES * LANES];
      for (long k = 0; k < terms; k += LANES) {
        const long some = terms - k < LANES ? terms - k : LANES;
        transpose(x + v * LANES * terms + k, terms, there, some, column);
        for (long d = 0; d < some; d++) store(to + (k + d) * wide * LANES, load(column + d * LANES));
      }
    }
#pragma omp for schedule(dynamic)
    for (long part = 0; part < (size + wide_part - 1) / wide_part; part++) {
      const long from = part * wide_part, to = from + wide_part < size ? from + wide_part : size;
      for (long v = 0; v < vectors; v += MOST) {
        const float *mine = packed + v * LANES * terms;
        float *there = out + v * LANES * by_row;
        const long left = rows - v * LANES;
        switch (vectors - v) {
        case 1: columns<1>(mine, weight, bias, terms, left, there, by_row, from, to); break;
        case 2: columns<2>(mine, weight, bias, terms, left, there, by_row, from, to); break;
        case 3: columns<MOST < 3 ? MOST : 3>(mine, weight, bias, terms, left, there, by_row, from, to); break;
        default: columns<MOST>(mine, weight, bias, terms, left, there, by_row, from, to);
        }
      }
    }
  }
}
