// Products of float32 in the tiles of Intel's AMX, which multiply bfloat16 and add up in float32.
//
// Three bfloat16 hold a float32 to its last digit: its first eight binary digits, of the rest the first eight, and what is left.
// Of the nine products of two numbers' parts the six largest are taken (Henry, Tang and Heinecke 2019, "Leveraging the bfloat16
// Artificial Intelligence Datatype For Higher-Precision Computations"). The other three come to 2^-22 of the whole at most, and
// to 2^-25.7 in the root mean square, where rounding to float32 takes 2^-25.2. Parts below 2^-126 become zero; infinities, and
// on the left side numbers from 3.396e38 on, which round to one, become NaN.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define WEFT_AMX

namespace amx {

// Whether this process may use the tiles; asked of the system once.
bool ready();

constexpr long SIDE = 16;           // rows of a tile, and of a result's tile columns
constexpr long DEEP = 32;           // terms of a tile
constexpr long CELLS = SIDE * SIDE; // words of a tile
constexpr long BLOCK = 3 * CELLS;   // of the parts of 16 rows or columns times 32 terms, a tile each
enum Side { LEFT, RIGHT };

// Which parts are multiplied, in this order: of the left side, rounded, the first one first; of the right, cut off, the last.
constexpr int STEPS = 6, PARTS[STEPS][2] = {{0, 0}, {0, 1}, {1, 1}, {1, 2}, {2, 2}, {0, 2}};

// Terms whose products are summed from zero before the sum joins the others: what is packed of them fits a core's first cache.
constexpr long PIECE = 128;
INLINE long piece_of(long terms) {
  const long pieces = (terms + PIECE - 1) / PIECE, even = (terms + pieces - 1) / pieces;
  return (even + DEEP - 1) / DEEP * DEEP;
}
INLINE long blocks_of(long terms) { return (terms + DEEP - 1) / DEEP; }

// The tiles are this thread's while one of these is there.
class Session {
public:
  Session() {
    struct alignas(64) {
      unsigned char palette = 1, start = 0, none[14] = {};
      unsigned short bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  Session(const Session &) = delete;
  ~Session() { asm volatile("tilerelease"); }
};

struct Tile {
  float cells[CELLS];
};

template <int T> INLINE void clear() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> INLINE void read(const float *from) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(64L), "m"(*(const Tile *)from));
}
template <int T> INLINE void write(float *to, long stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(4 * stride) : "memory");
}
template <int C, int A, int B> INLINE void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// work(0), work(1), ..., each number a type of its own.
template <int... N, typename Work> INLINE void each(std::integer_sequence<int, N...>, const Work &work) {
  (work(std::integral_constant<int, N>()), ...);
}
template <int COUNT, typename Work> INLINE void each(const Work &work) { each(std::make_integer_sequence<int, COUNT>(), work); }

// Tiles 0 to I * J - 1 are sums of I times J of them: to each is added the product of its blocks of a and b, which are among OF_A
// and OF_B beside each other. Of a product that is computed transposed the left side is b, `LEFT_IS` RIGHT: so it has the same
// bits. `meanwhile(step)` is other work, which the processor does at the same time.
template <int I, int J, int OF_A, int OF_B, Side LEFT_IS, typename Work>
INLINE void add_block(const float *a, const float *b, const Work &meanwhile) {
  constexpr int A = I * J, B = A + I; // where blocks are read to
  static_assert(B + J <= 8, "eight tiles");
  each<STEPS>([&](auto step) {
    constexpr bool flip = LEFT_IS == RIGHT;
    constexpr int last = step ? step - 1 : 0, p = PARTS[step][flip], q = PARTS[step][!flip];
    if constexpr (step == 0 || p != PARTS[last][flip]) each<I>([&](auto i) { read<A + i>(a + (p * OF_A + i) * CELLS); });
    if constexpr (step == 0 || q != PARTS[last][!flip]) each<J>([&](auto j) { read<B + j>(b + (q * OF_B + j) * CELLS); });
    each<I>([&](auto i) { each<J>([&](auto j) { add_product<i * J + j, A + i, B + j>(); }); });
    meanwhile(step);
  });
}

// The same for one block of a, the right side, and four of b: all parts of a stay, and there is a single tile for those of b.
template <typename Work> INLINE void add_row(const float *a, const float *b, const Work &meanwhile) {
  constexpr int J = 4, A = J, B = A + 3;
  each<3>([&](auto p) { read<A + p>(a + p * CELLS); });
  each<STEPS>([&](auto step) {
    constexpr int last = step ? step - 1 : 0, next = step + 1 < STEPS ? step + 1 : step, q = PARTS[step][LEFT];
    if constexpr (step == 0 || q != PARTS[last][LEFT])
      each<J>([&](auto j) {
        read<B>(b + (q * J + j) * CELLS);
        add_product<j, A + PARTS[step][RIGHT], B>();
        if constexpr (next != step && q == PARTS[next][LEFT]) add_product<j, A + PARTS[next][RIGHT], B>();
      });
    meanwhile(step);
  });
}

typedef unsigned uvec __attribute__((vector_size(4 * LANES)));

// The parts of a and b, lane by lane beside each other, in a row of three tiles that are `by` apart. They are rounded, the first part
// first, or cut off, the last part first, which is faster; were both sides cut off, all that is left out would have one sign.
template <bool ROUNDED> INLINE void split(vec a, vec b, float *to, long stride) {
  constexpr int HIGH = (int)0xffff0000;
  for (long part = 0; part < 3; part++) {
    const int half = ROUNDED && part < 2 ? 0x8000 : 0; // of the last digit that stays
    const ivec first = (ivec)a + half, second = (ivec)b + half;
    store(to + (ROUNDED ? part : 2 - part) * stride, (vec)((ivec)((uvec)first >> 16) | (second & HIGH)));
    a -= (vec)(first & HIGH), b -= (vec)(second & HIGH);
  }
}

// Numbers at from + row * down + lane * along, of which one is 1; zeros where there are none.
INLINE void lines(const float *from, long down, long along, long rows, long lanes, vec *to) {
  const bool lie = along == 1;
  const long stride = lie ? down : along, count = lie ? rows : lanes, some = lie ? lanes : rows;
  if (count >= SIDE && some >= SIDE)
    for (long i = 0; i < SIDE; i++) to[i] = load(from + i * stride);
  else
    for (long i = 0; i < SIDE; i++) to[i] = i < count && some > 0 ? load_up_to(from + i * stride, some) : vec{};
  if (!lie) exchange(to);
}

// A block of the left side, 16 rows times 32 terms, or of the right, 32 terms times 16 columns, to tiles that are `by` apart: `unit`
// is from one row or column to the next, `term` from one term to the next. Term t stands beside term 16 + t.
template <Side SIDE_OF, bool ROUNDED> INLINE void pack(
    const float *from, long unit, long term, long units, long terms, float *to, long stride) {
  constexpr bool of_rows = SIDE_OF == LEFT;
  const long down = of_rows ? unit : term, along = of_rows ? term : unit;
  const float *const second = from + SIDE * term;
  if (along == 1 && units >= SIDE && terms >= DEEP) {
    for (long row = 0; row < SIDE; row++)
      split<ROUNDED>(load(from + row * down), load(second + row * down), to + row * SIDE, stride);
    return;
  }
  vec low[SIDE], high[SIDE];
  lines(from, down, along, of_rows ? units : terms, of_rows ? terms : units, low);
  lines(second, down, along, of_rows ? units : terms - SIDE, of_rows ? terms - SIDE : units, high);
  for (long row = 0; row < SIDE; row++) split<ROUNDED>(low[row], high[row], to + row * SIDE, stride);
}

} // namespace amx
#endif
