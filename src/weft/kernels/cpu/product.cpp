// Products of a few float32 rows with a matrix, which is read once and in place. Decode steps consist of these.
//
// A vector has one column of LANES rows, so each weight is multiplied by all of them at once. Copying the matrix first, as
// `weft_matmul` does, would take longer than the product.
#include "kernels.h"
#include "simd.h"

#pragma GCC optimize("no-ivopts") // a pointer per column of a tile would exceed the registers

namespace {

// Sums kept in registers at once: at least half of the registers.
constexpr long SUMS = LANES == 16 ? 24 : 12;

// Rows that leave half a vector of 16 empty are multiplied as a vector of 8, which many processors do in half the time.
constexpr long UNIT = LANES == 16 ? 8 : LANES, UNITS = LANES / UNIT;
constexpr long MOST = LANES == 16 ? 64 : 16; // rows multiplied at once
constexpr long FEW = 4; // up to this many threads, each packs all rows itself, which takes less time than waiting for each other
typedef float unit __attribute__((vector_size(4 * UNIT)));
typedef float loose_unit __attribute__((vector_size(4 * UNIT), aligned(4), may_alias));

// sums[l][j] = x[l] . weight[j] + bias[j] for L vectors of rows, plus one unit of rows if H is 1, and N columns. Term k of all
// rows is stored at x + k * (L * LANES + H * UNIT).
template <long L, long H, long N> INLINE void tile(
    const float *x, const float *weight, const float *bias, long terms, vec (*sums)[LANES]) {
  const long piece = piece_of(terms);
  const auto low = [&](long j) -> loose_unit & { return *(loose_unit *)&sums[L][j]; };
  for (long first = 0; first < terms; first += piece) {
    vec part[L + 1][N] = {};
    unit rest[N] = {};
    const long end = first + piece < terms ? first + piece : terms;
    for (long k = first; k < end;) {
      for (long j = 0; j < N; j++) // prefetch the next columns into the L2 cache
        __builtin_prefetch(weight + N * (terms + k) + j * 16, 0, 2);
      const float *at = x + k * (L * LANES + H * UNIT), *w = weight + k;
      for (const long stop = k + 16 < end ? k + 16 : end; k < stop; k++, at += L * LANES + H * UNIT, w++) {
        vec column[L + 1];
        for (long l = 0; l < L; l++) column[l] = load(at + l * LANES);
        const unit last = H ? *(const loose_unit *)(at + L * LANES) : unit{};
        for (long j = 0; j < N; j++) {
          for (long l = 0; l < L; l++) part[l][j] += column[l] * w[j * terms];
          if (H) rest[j] += last * w[j * terms];
        }
      }
    }
    for (long l = 0; l < L; l++)
      for (long j = 0; j < N; j++) sums[l][j] = first ? sums[l][j] + part[l][j] : part[l][j];
    for (long j = 0; H && j < N; j++) low(j) = first ? low(j) + rest[j] : rest[j];
  }
  for (long j = 0; bias && j < N; j++) {
    for (long l = 0; l < L; l++) sums[l][j] += bias[j];
    if (H) low(j) += bias[j];
  }
}

// Computes G times N columns, at most a vector of them; `out` points to these columns in the first row.
template <long L, long H, long N, long G> INLINE void tiles(
    const float *x, const float *weight, const float *bias, long terms, long rows, float *out, long row_stride) {
  vec sums[L + H][LANES]; // entries past the last are not read
  for (long g = 0; g < G; g++)
    tile<L, H, N>(x, weight + g * N * terms, bias ? bias + g * N : nullptr, terms, (vec(*)[LANES])&sums[0][g * N]);
  for (long l = 0; l < L + H; l++) {
    exchange(sums[l]);
    for (long r = 0; r < LANES && l * LANES + r < rows; r++) store_some(out + (l * LANES + r) * row_stride, sums[l][r], G * N);
  }
}

// Computes columns `from` to `to` for `units` units of rows, at most U.
template <long U> void columns(
    long units, const float *x, const float *weight, const float *bias, long terms, long rows, float *out, long row_stride,
    long from, long to) {
  if constexpr (U > 1)
    if (units < U) return columns<U - 1>(units, x, weight, bias, terms, rows, out, row_stride, from, to);
  constexpr long L = U / UNITS, H = U % UNITS, V = L + H;
  constexpr long N = SUMS / V < LANES ? SUMS / V : LANES - LANES / 4, G = LANES / N, WIDE = G * N;
  const auto bias_at = [&](long j) { return bias ? bias + j : nullptr; };
  long j = from;
  for (; j + WIDE <= to; j += WIDE) tiles<L, H, N, G>(x, weight + j * terms, bias_at(j), terms, rows, out + j, row_stride);
  for (; j + N <= to; j += N) tiles<L, H, N, 1>(x, weight + j * terms, bias_at(j), terms, rows, out + j, row_stride);
  for (; j + 4 <= to; j += 4) tiles<L, H, 4, 1>(x, weight + j * terms, bias_at(j), terms, rows, out + j, row_stride);
  for (; j < to; j++) tiles<L, H, 1, 1>(x, weight + j * terms, bias_at(j), terms, rows, out + j, row_stride);
}

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long units_of(long rows) { return (rows + UNIT - 1) / UNIT; }

// Packs a vector of rows from `row` on, or a unit if the remaining rows fit it, so that term k of all rows is contiguous.
INLINE void pack(const float *x, long row, long rows, long terms, float *packed) {
  const long first = row / MOST * MOST, all = least(units_of(rows - first) * UNIT, MOST);
  const bool whole = row - first + LANES <= all;
  float *to = packed + first * terms + (row - first), column[LANES * LANES];
  for (long k = 0; k < terms; k += LANES) {
    const long some = least(terms - k, LANES);
    transpose(x + row * terms + k, terms, least(rows - row, LANES), some, column);
    for (long d = 0; d < some; d++)
      if (whole) store(to + (k + d) * all, load(column + d * LANES));
      else *(loose_unit *)(to + (k + d) * all) = *(loose_unit *)(column + d * LANES);
  }
}

} // namespace

// out [rows, size] = x [rows, terms] weight^T + bias for weight [size, terms], contiguous except for the rows of out, which
// are `row_stride` apart; `bias` can be null.
extern "C" void weft_product(
    const float *x, const float *weight, const float *bias, float *out, long row_stride, long rows, long size, long terms,
    long threads) {
  if (weft_product_amx(x, weight, bias, out, row_stride, rows, size, terms, threads)) return;
  const int team = rows * size * terms > LARGE * 8 ? (int)threads : 1;
  // Columns per part of the work: whole tiles, several parts per thread, and no more than fit a core's cache.
  constexpr long TILES = 24, WIDEST = 192;
  const long even = (size / (4 * team) + TILES - 1) / TILES * TILES, wide = even < TILES ? TILES : least(even, WIDEST);
  const Shares shares((size + wide - 1) / wide, team);
  const bool alone = team <= FEW;
  const long room = units_of(rows) * UNIT * terms;
  const Buffer common(alone ? 0 : room);
#pragma omp parallel num_threads(team)
  {
    const Buffer own(alone ? room : 0);
    float *const packed = alone ? own : common;
    if (alone) {
      for (long row = 0; row < rows; row += LANES) pack(x, row, rows, terms, packed);
    } else {
#pragma omp for
      for (long row = 0; row < rows; row += LANES) pack(x, row, rows, terms, packed);
    }
    shares.take([&](long part) {
      for (long row = 0, from = part * wide; row < rows; row += MOST) {
        const long left = least(rows - row, MOST);
        columns<MOST / UNIT>(
            units_of(left), packed + row * terms, weight, bias, terms, left, out + row * row_stride, row_stride, from,
            least(from + wide, size));
      }
    });
  }
}
