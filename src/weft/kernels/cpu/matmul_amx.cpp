// `weft_matmul` by Intel's AMX tiles: both matrices are packed in bfloat16 parts, and four result tiles stay in registers.
#include "amx.h"
#include "kernels.h"
#include "matmul.h"

#ifdef WEFT_AMX
namespace {

// One thread's tiles. While the processor multiplies for one tile, the sums of the previous tile are added to the result, and
// the rows of the next block are packed.
class Parts {
public:
  static constexpr long SIDE = amx::SIDE, ROWS = 2 * SIDE, COLUMNS = 2 * SIDE, BLOCK = ROWS, PART = 512, PIECES = 3, CACHED = 1 << 20;
  static long piece_of(long terms) { return amx::piece_of(terms); }
  // A result larger than the cache is visited as rarely as the room for packed columns allows.
  static long pieces_of(long width, long cells) { return cells > CACHED ? PIECES * PART / width : PIECES; }

  explicit Parts(const Matrices &m) : m(m), columns(room()), rows(columns + WIDEST) {}

  // Packs columns of b from `part` on into panels [blocks of terms][parts][2] of tiles.
  void pack_columns(long part, long wide, long first, long count) {
    float *to = columns;
    for (long c = 0; c < wide; c += COLUMNS)
      for (long t = 0; t < count; t += amx::DEEP, to += 2 * amx::BLOCK)
        for (long half = 0; half < 2 && c + half * SIDE < wide; half++) {
          const long column = c + half * SIDE;
          const float *from = m.b + (first + t) * m.b_term + (part + column) * m.b_column;
          amx::pack<amx::RIGHT, false>(
              from, m.b_column, m.b_term, wide - column, count - t, to + half * amx::CELLS, 2 * amx::CELLS);
        }
    chunk = first, depth = amx::blocks_of(count), packed = -1;
  }

  // Packs rows of a into such a panel. Those of the next panel, up to `stop`, are packed during multiplications.
  void pack_rows(const Rows &rows, const Rows &next, long stop) {
    if (packed < 0) packing = rows, packed = 0;
    while (packed < blocks_of(packing)) pack_block();
    now = !now, packing = next, packed = next.row < stop ? 0 : blocks_of(next);
  }

  void tile(const Rows &some, long, long column, const Place &out) {
    const bool tall = out.rows > SIDE, wide = out.columns > SIDE;
    const float *b = columns + (column / COLUMNS * depth + (some.first - chunk) / amx::DEEP) * 2 * amx::BLOCK;
    if (tall && wide) sums_of<2, 2>(some, b, out);
    else if (tall) sums_of<2, 1>(some, b, out);
    else if (wide) sums_of<1, 2>(some, b, out);
    else sums_of<1, 1>(some, b, out);
  }

  void finish() { add(done.rows); }

private:
  // Size in floats of a panel of 32 rows or columns, and of all panels of a part's columns.
  static constexpr long PANEL = amx::PIECE / amx::DEEP * 2 * amx::BLOCK, WIDEST = PIECES * PANEL * PART / COLUMNS;

  // Each thread keeps its buffer: if this much memory were freed after each product, every page would fault again.
  static float *room() {
    static thread_local const Buffer kept(WIDEST + 2 * PANEL);
    return kept;
  }

  static long blocks_of(const Rows &some) { return 2 * amx::blocks_of(some.count); }

  void pack_block() {
    const long row = packing.row + packed % 2 * SIDE, term = packed / 2 * amx::DEEP;
    if (row < m.rows) {
      float *const to = rows + !now * PANEL + (packed / 2 * 6 + packed % 2) * amx::CELLS;
      amx::pack<amx::LEFT, true>(place(row, term), m.a_row, m.a_term, m.rows - row, packing.count - term, to, 2 * amx::CELLS);
    }
    packed++;
    const float *next = place(packing.row + packed % 2 * SIDE, packed / 2 * amx::DEEP); // packed by the next call: prefetch
    for (long i = 0; i < 2 * SIDE; i++)
      __builtin_prefetch(m.a_term == 1 ? next + i / 2 * m.a_row + i % 2 * SIDE : next + i * m.a_term);
  }
  const float *place(long row, long term) const { return m.a + row * m.a_row + (packing.first + term) * m.a_term; }

  // Adds the next `some` rows of the waiting sums to the result.
  void add(long some) {
    for (; some > 0 && done.rows > 0; some--, done.rows--, done.at += done.stride, waiting += COLUMNS)
      for (long c = 0; c < COLUMNS; c += SIDE) put(done, 0, c, load(waiting + c));
  }

  template <int I, int J> void sums_of(const Rows &some, const float *b, const Place &out) {
    const float *a = rows + now * PANEL, *from = waiting;
    const long blocks = amx::blocks_of(some.count), turns = amx::STEPS * blocks, each = (ROWS + turns - 1) / turns;
    if (done.columns < COLUMNS || done.bias) add(done.rows);
    long left = done.rows;
    float *to = done.at;
    const bool adds = done.adds;
    amx::each<I * J>([](auto tile) { amx::clear<tile>(); });
    for (long at = 0; at < blocks; at++, a += 2 * amx::BLOCK, b += 2 * amx::BLOCK)
      amx::add_block<I, J, 2, 2, amx::LEFT>(a, b, [&](long step) {
        const long now = each < left ? each : left;
        for (long i = 0; i < now; i++, to += done.stride, from += COLUMNS) {
          const vec low = load(from), high = load(from + SIDE);
          store(to, adds ? load(to) + low : low);
          store(to + SIDE, adds ? load(to + SIDE) + high : high);
        }
        left -= now;
        if (step == 3 && packed < blocks_of(packing)) pack_block();
      });
    amx::each<I>([&](auto i) {
      amx::each<J>([&](auto j) { amx::write<i * J + j>(sums + (i * COLUMNS + j) * SIDE, COLUMNS); });
    });
    done = out, waiting = sums;
  }

  const amx::Session session;
  const Matrices &m;
  float *const columns, *const rows;
  alignas(64) float sums[ROWS * COLUMNS];
  const float *waiting = sums;   // rows of sums not yet added to the result
  Place done = {};               // their destination
  long chunk = 0, depth = 0; // first term of the packed columns, and their number of blocks of terms
  long now = 0;              // index of the panel of rows that is multiplied (of two)
  Rows packing = {};         // rows of the other panel, and its number of packed blocks; -1 before the first
  long packed = -1;
};

} // namespace

bool weft_matmul_amx(const Matrices &m, long threads) {
  if (!amx::ready()) return false;
  multiply<Parts>(m, threads);
  return true;
}
#else
bool weft_matmul_amx(const Matrices &, long) { return false; }
#endif
