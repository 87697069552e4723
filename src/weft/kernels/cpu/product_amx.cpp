// `weft_product` by Intel's AMX tiles. The matrix is read in place, once for each 64 rows. While the tiles multiply one block
// of it, the next block is split into bfloat16 parts.
#include "amx.h"
#include "kernels.h"

#ifdef WEFT_AMX
using namespace amx;

namespace {

constexpr long MOST = 4 * SIDE; // rows multiplied at once
constexpr long FEW = 4;         // up to this many threads, each packs all rows itself, which is faster than waiting for others
constexpr long AHEAD = 256;     // distance in terms between split and prefetched values

struct Weights {
  const float *at;
  long terms, end; // rows of the matrix (columns of the result) up to `end`
};

// Splits rows `from` to `to`, counted from `first`, of the 32 terms from `term` on into parts. Also prefetches terms that are
// split later, of these rows or of the next `wide` rows.
INLINE void split_rows(const Weights &w, long first, long wide, long term, long from, long to, float *parts) {
  const float *at = w.at + (first + from) * w.terms + term;
  const long left = w.terms - term, ahead = left > AHEAD ? AHEAD : AHEAD + (wide - 1) * w.terms;
  if (left >= DEEP)
    for (long row = from; row < to; row++, at += w.terms) {
      __builtin_prefetch(at + ahead, 0, 2);
      __builtin_prefetch(at + ahead + SIDE, 0, 2);
      split<false>(load(at), load(at + SIDE), parts + row * SIDE, wide * SIDE);
    }
  else
    for (long row = from; row < to; row++, at += w.terms) {
      const vec second = left > SIDE ? load_up_to(at + SIDE, left - SIDE) : vec{};
      split<false>(load_up_to(at, left), second, parts + row * SIDE, wide * SIDE);
    }
}

// Computes columns `from` to `w.end`, 16 * I at a time, for the rows of J tiles. `x` has the blocks of the rows, with the J
// blocks of the same terms together.
template <int I, int J> void columns(
    const float *x, const Weights &w, const float *bias, long rows, float *out, long row_stride, long from) {
  constexpr long WIDE = I * SIDE;
  const long blocks = blocks_of(w.terms), piece = amx::piece_of(w.terms) / DEEP;
  alignas(64) float room[2 * I * BLOCK], sums[I * J * CELLS], part[I * J * CELLS];
  float *now = room, *coming = room + I * BLOCK;
  const auto there = [&](long column) { return w.end - column < WIDE ? w.end - column : WIDE; };
  split_rows(w, from, WIDE, 0, 0, there(from), now);
  for (long column = from; column < w.end; column += WIDE) {
    for (long r = 0; r < rows; r++)
      for (long i = 0; i < I; i++) __builtin_prefetch(out + r * row_stride + column + i * SIDE, 1);
    for (long first = 0; first < blocks; first += piece) {
      each<I * J>([](auto tile) { clear<tile>(); });
      for (long block = first; block < blocks && block < first + piece; block++) {
        const bool last = block + 1 == blocks;
        const long next = last ? column + WIDE : column, term = last ? 0 : (block + 1) * DEEP;
        const long count = next < w.end ? there(next) : 0;
        const float *terms = x + block * J * BLOCK;
        const auto meanwhile = [&](long step) {
          split_rows(w, next, WIDE, term, count * step / STEPS, count * (step + 1) / STEPS, coming);
        };
        if constexpr (J == 4) add_row(now, terms, meanwhile);
        else add_block<I, J, I, J, RIGHT>(now, terms, meanwhile);
        std::swap(now, coming);
      }
      each<I * J>([&](auto tile) { write<tile>((first ? part : sums) + tile * CELLS, SIDE); });
      for (long at = 0; first && at < I * J * CELLS; at += LANES) store(sums + at, load(sums + at) + load(part + at));
    }
    for (long i = 0; i < I && column + i * SIDE < w.end; i++)
      for (long j = 0; j < J; j++) {
        const long start = column + i * SIDE, some = w.end - start < SIDE ? w.end - start : SIDE;
        vec cells[SIDE];
        for (long c = 0; c < SIDE; c++) {
          cells[c] = load(sums + (i * J + j) * CELLS + c * SIDE);
          if (bias && c < some) cells[c] += bias[start + c];
        }
        exchange(cells);
        for (long r = 0; r < SIDE && j * SIDE + r < rows; r++)
          store_up_to(out + (j * SIDE + r) * row_stride + start, cells[r], some);
      }
  }
}

} // namespace

bool weft_product_amx(
    const float *x, const float *weight, const float *bias, float *out, long row_stride, long rows, long size, long terms,
    long threads) {
  if (!ready()) return false;
  const int team = rows * size * terms > LARGE * 8 ? (int)threads : 1;
  constexpr long WIDEST = 256; // limit on the columns per part of the work; each thread gets several parts
  const long each = 2 * SIDE, even = (size / (4 * team) + each - 1) / each * each;
  const long wide = even < each ? each : even < WIDEST ? even : WIDEST;
  const long blocks = blocks_of(terms), most = rows < MOST ? rows : MOST, room = (most + SIDE - 1) / SIDE * blocks * BLOCK;
  const bool alone = team <= FEW;
  for (long first = 0; first < rows; first += MOST) {
    const Shares shares((size + wide - 1) / wide, team);
    const long count = rows - first < MOST ? rows - first : MOST, tiles = (count + SIDE - 1) / SIDE;
    const Buffer common(alone ? 0 : room);
#pragma omp parallel num_threads(team)
    {
      const Buffer own(alone ? room : 0);
      float *const packed = alone ? own : common;
      const auto put = [&](long at) {
        const long row = at % tiles * SIDE, term = at / tiles * DEEP;
        float *const to = packed + (at / tiles * 3 * tiles + at % tiles) * CELLS;
        pack<RIGHT, true>(x + (first + row) * terms + term, terms, 1, count - row, terms - term, to, tiles * CELLS);
      };
      if (alone) {
        for (long at = 0; at < tiles * blocks; at++) put(at);
      } else {
#pragma omp for
        for (long at = 0; at < tiles * blocks; at++) put(at);
      }
      const Session session;
      shares.take([&](long part) {
        const long from = part * wide;
        const Weights w = {weight, terms, from + wide < size ? from + wide : size};
        constexpr decltype(&columns<2, 1>) BY_TILES[] = {columns<2, 1>, columns<2, 2>, columns<1, 3>, columns<1, 4>};
        BY_TILES[tiles - 1](packed, w, bias, count, out + first * row_stride, row_stride, from);
      });
    }
  }
  return true;
}
#else
bool weft_product_amx(const float *, const float *, const float *, float *, long, long, long, long, long) { return false; }
#endif
