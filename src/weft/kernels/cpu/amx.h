// Products of float32 by Intel's AMX tiles, which multiply bfloat16 and sum in float32.
//
// A float32 is the exact sum of three bfloat16 parts: its first eight binary digits, the first eight of the remainder, and the
// rest. Of the nine products of two numbers' parts, the six largest are computed (Henry, Tang and Heinecke 2019, "Leveraging the
// bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations"). The other three are at most 2^-22 of the whole
// product, and 2^-25.7 in the root mean square; the error of rounding to float32 is 2^-25.2. Parts below 2^-126 become zero.
// Infinities become NaN, and so do numbers from 3.396e38 on in the left matrix, which round to infinity.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define WEFT_AMX

namespace amx {

// True if this process can use the tiles; the operating system is asked once.
bool ready();

constexpr long SIDE = 16;           // rows of a tile, and columns of a result tile
constexpr long DEEP = 32;           // terms of a tile
constexpr long CELLS = SIDE * SIDE; // 32-bit words of a tile
constexpr long BLOCK = 3 * CELLS;   // words of 16 rows or columns times 32 terms: three parts, a tile each
enum Side { LEFT, RIGHT };

// The products of parts that are computed, in this order: {left part, right part}. Left parts are rounded and stored first part
// first; right parts are truncated and stored last part first.
constexpr int STEPS = 6, PARTS[STEPS][2] = {{0, 0}, {0, 1}, {1, 1}, {1, 2}, {2, 2}, {0, 2}};

// Terms that are summed separately before their sum is added to the total; their packed parts fit a core's L1 cache.
constexpr long PIECE = 128;
INLINE long piece_of(long terms) {
  const long pieces = (terms + PIECE - 1) / PIECE, even = (terms + pieces - 1) / pieces;
  return (even + DEEP - 1) / DEEP * DEEP;
}
INLINE long blocks_of(long terms) { return (terms + DEEP - 1) / DEEP; }

// Configures this thread's tiles for its lifetime.
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

// Calls work(0), work(1), ..., with numbers known at compile time.
template <int... N, typename Work> INLINE void each(std::integer_sequence<int, N...>, const Work &work) {
  (work(std::integral_constant<int, N>()), ...);
}
template <int COUNT, typename Work> INLINE void each(const Work &work) { each(std::make_integer_sequence<int, COUNT>(), work); }

// Adds to tiles 0 to I * J - 1, an I by J grid of result tiles, the products of their blocks of a and b. The blocks are
// interleaved with OF_A and OF_B blocks per part. In a transposed product, b is the left matrix (`LEFT_IS` RIGHT), so results
// have the same bits. `meanwhile(step)` is other work that the processor does at the same time.
template <int I, int J, int OF_A, int OF_B, Side LEFT_IS, typename Work>
INLINE void add_block(const float *a, const float *b, const Work &meanwhile) {
  constexpr int A = I * J, B = A + I; // first tiles for blocks of a and b
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

// The same for one block of a, the right matrix, and four of b: all parts of a stay in tiles, and those of b share one tile.
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

// Splits a and b into three parts each and interleaves their lanes in one row of three tiles that are `stride` apart. Parts are
// either rounded, and stored first part first, or truncated, and stored last part first, which is faster. With both matrices
// truncated, all omitted products would have the same sign.
template <bool ROUNDED> INLINE void split(vec a, vec b, float *to, long stride) {
  constexpr int HIGH = (int)0xffff0000;
  for (long part = 0; part < 3; part++) {
    const int half = ROUNDED && part < 2 ? 0x8000 : 0; // half of the last digit that is kept
    const ivec first = (ivec)a + half, second = (ivec)b + half;
    store(to + (ROUNDED ? part : 2 - part) * stride, (vec)((ivec)((uvec)first >> 16) | (second & HIGH)));
    a -= (vec)(first & HIGH), b -= (vec)(second & HIGH);
  }
}

// Loads the floats at from + row * down + lane * along; `down` or `along` is 1. Missing rows and lanes become zeros.
INLINE void lines(const float *from, long down, long along, long rows, long lanes, vec *to) {
  const bool lie = along == 1;
  const long stride = lie ? down : along, count = lie ? rows : lanes, some = lie ? lanes : rows;
  if (count >= SIDE && some >= SIDE)
    for (long i = 0; i < SIDE; i++) to[i] = load(from + i * stride);
  else
    for (long i = 0; i < SIDE; i++) to[i] = i < count && some > 0 ? load_up_to(from + i * stride, some) : vec{};
  if (!lie) exchange(to);
}

// Packs a block of the left matrix, 16 rows times 32 terms, or of the right, 32 terms times 16 columns, into tiles that are
// `stride` apart. `unit` is the distance between rows or columns, `term` that between terms. Term t is stored next to term 16 +
// t.
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
