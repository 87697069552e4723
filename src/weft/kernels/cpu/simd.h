// Vectors of floats in GCC's vector extensions, as wide as the processor's, and other helpers of the kernels.
#pragma once

#if !defined(__GNUC__) || defined(__clang__)
#error "these kernels are written in GCC's vector extensions"
#endif

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include <omp.h>

#if defined(__AVX512F__)
constexpr long LANES = 16;
#elif defined(__AVX2__)
constexpr long LANES = 8;
#else
constexpr long LANES = 4;
#endif

#define INLINED inline __attribute__((always_inline))
#define INLINE static INLINED

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int ivec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); // can be unaligned

constexpr long LARGE = 12 << 10; // amount of work, in cells, from which a second thread pays

INLINE long padded(long count) { return (count + LANES - 1) / LANES * LANES; }
INLINE vec splat(float x) { return x - vec{}; }
INLINE vec load(const float *from) { return *(const loose *)from; }
INLINE void store(float *to, vec x) { *(loose *)to = x; }

// Returns x, kept in a register; without this, GCC reads it from memory again at every use.
INLINE vec once(vec x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#endif
  return x;
}
INLINE vec largest(vec a, vec b) { return a > b ? a : b; }

// Loads `count` < LANES floats, followed by zeros.
INLINE vec load_some(const float *from, long count) {
  vec x = {};
  memcpy(&x, from, 4 * count);
  return x;
}
INLINE void store_some(float *to, vec x, long count) { memcpy(to, &x, 4 * count); }

// The same for any `count`, including a full vector or more.
INLINE vec load_up_to(const float *from, long count) { return count < LANES ? load_some(from, count) : load(from); }
INLINE void store_up_to(float *to, vec x, long count) { count < LANES ? store_some(to, x, count) : store(to, x); }

// Uninitialized memory for floats, aligned for vectors.
class Buffer {
public:
  explicit Buffer(long count) : at(new (std::align_val_t(64)) float[count]) {}
  Buffer(const Buffer &) = delete;
  ~Buffer() { operator delete[](at, std::align_val_t(64)); }
  operator float *() const { return at; }

private:
  float *at;
};

// Division of parts of work among a team of threads. Each thread works through its own share in order, because it has already
// prefetched the start of the next part, and then helps other threads.
class Shares {
public:
  Shares(long parts, long team) : team(team), shares(new Share[team]) {
    for (long i = 0; i < team; i++) shares[i].next = parts * i / team, shares[i].end = parts * (i + 1) / team;
  }
  // Calls `work(part)` for the parts that the calling thread does.
  template <typename Work> void take(const Work &work) const {
    for (long turn = 0, own = omp_get_thread_num(); turn < team; turn++) {
      Share &share = shares[(own + turn) % team];
      for (long part; (part = share.next++) < share.end;) work(part);
    }
  }

private:
  struct alignas(64) Share {
    std::atomic<long> next;
    long end;
  };
  const long team;
  const std::unique_ptr<Share[]> shares;
};

constexpr auto EACH_LANE = std::make_integer_sequence<int, LANES>();

// 0, 1, 2, ...
template <int... L> INLINE ivec numbers(std::integer_sequence<int, L...>) { return ivec{L...}; }

// Rotates lanes: lane l gets the value of lane l + HALF, cyclically.
template <int HALF, int... L> INLINE vec shifted(vec x, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(x, x, ((L + HALF) % LANES)...);
}

// Sums of all lanes, halves first: always in the same order.
template <int HALF = LANES / 2> INLINE float sum(vec x) {
  x += shifted<HALF>(x, EACH_LANE);
  if constexpr (HALF == 1) return x[0];
  else return sum<HALF / 2>(x);
}

template <int HALF = LANES / 2> INLINE float largest(vec x) {
  x = largest(x, shifted<HALF>(x, EACH_LANE));
  if constexpr (HALF == 1) return x[0];
  else return largest<HALF / 2>(x);
}

// e to the x for x <= 88, within 2 units in the last place; 0 below -87. After Cephes' expf: x = n log 2 + r, a polynomial in r.
INLINE vec exponential(vec x) {
  constexpr float MAGIC = 12582912.f; // 1.5 * 2^23: adding it rounds to a whole number
  ivec under = x < splat(-87.f);
  x = under ? splat(-87.f) : x;
  vec n = (x * 1.44269504088896341f + MAGIC) - MAGIC;
  vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vec y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.f;
  ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
  y = y * (vec)power;
  return under ? vec{} : y;
}

// Indices for a shuffle of two vectors: `in_quarters` permutes floats within each 128-bit quarter, `of_quarters` picks whole
// quarters.
INLINE ivec in_quarters(int p0, int p1, int p2, int p3) {
  ivec from;
  const int pick[4] = {p0, p1, p2, p3};
  for (long l = 0; l < LANES; l++) from[l] = l / 4 * 4 + pick[l % 4] % 4 + (pick[l % 4] >= 4 ? LANES : 0);
  return from;
}
INLINE ivec of_quarters(int start) {
  ivec from;
  for (long l = 0; l < LANES; l++) {
    const long quarter = l / 4 * 2 + start; // every other quarter, of the first vector, then of the second
    from[l] = quarter * 4 + l % 4;
  }
  return from;
}

// Transposes in place: rows[i][l] becomes rows[l][i].
INLINE void exchange(vec *rows) {
  vec t[LANES], u[LANES];
  for (long i = 0; i < LANES; i += 2) {
    t[i] = __builtin_shuffle(rows[i], rows[i + 1], in_quarters(0, 4, 1, 5));
    t[i + 1] = __builtin_shuffle(rows[i], rows[i + 1], in_quarters(2, 6, 3, 7));
  }
  for (long i = 0; i < LANES; i += 4)
    for (long j = 0; j < 2; j++) {
      u[i + 2 * j] = __builtin_shuffle(t[i + j], t[i + j + 2], in_quarters(0, 1, 4, 5));
      u[i + 2 * j + 1] = __builtin_shuffle(t[i + j], t[i + j + 2], in_quarters(2, 3, 6, 7));
    }
  // u[4 g + c] holds, quarter by quarter, columns c, 4 + c, ... of rows 4 g to 4 g + 3.
  for (long c = 0; c < 4; c++) {
    if constexpr (LANES == 4) rows[c] = u[c];
    if constexpr (LANES == 8) {
      rows[c] = __builtin_shuffle(u[c], u[4 + c], of_quarters(0));
      rows[4 + c] = __builtin_shuffle(u[c], u[4 + c], of_quarters(1));
    }
    if constexpr (LANES == 16)
      for (int odd = 0; odd < 2; odd++) {
        const vec left = __builtin_shuffle(u[c], u[4 + c], of_quarters(odd));
        const vec right = __builtin_shuffle(u[8 + c], u[12 + c], of_quarters(odd));
        rows[4 * odd + c] = __builtin_shuffle(left, right, of_quarters(0));
        rows[8 + 4 * odd + c] = __builtin_shuffle(left, right, of_quarters(1));
      }
  }
}

// Loads the columns of a block of LANES rows; rows past `count` are zeros.
INLINE void columns_of(const float *rows, long stride, long count, vec *columns) {
  if (count == LANES)
    for (long j = 0; j < LANES; j++) columns[j] = load(rows + j * stride);
  else
    for (long j = 0; j < LANES; j++) columns[j] = j < count ? load(rows + j * stride) : vec{};
  exchange(columns);
}
// Loads one such column.
INLINE vec column_of(const float *rows, long stride, long count) {
  vec column = {};
  for (long j = 0; j < LANES; j++)
    if (j < count) column[j] = rows[j * stride];
  return column;
}

// Transposes LANES rows (those past `count` are zeros) to to[d * to_stride + row].
INLINE void transpose(const float *rows, long stride, long count, long dim, float *to, long to_stride = LANES) {
  long d = 0;
  for (; d + LANES <= dim; d += LANES) {
    vec block[LANES];
    columns_of(rows + d, stride, count, block);
    for (long i = 0; i < LANES; i++) store(to + (d + i) * to_stride, block[i]);
  }
  for (; d < dim; d++) store(to + d * to_stride, column_of(rows + d, stride, count));
}

// Terms of a product that are summed separately before their sum is added to the total. All kernels that multiply in vectors
// use the same number, so they give the same bits.
constexpr long PIECE = 320;
INLINE long piece_of(long terms) {
  const long pieces = (terms + PIECE - 1) / PIECE, even = (terms + pieces - 1) / pieces;
  return (even + 15) / 16 * 16;
}
