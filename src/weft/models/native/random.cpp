// threefry-2x32 with 20 rounds (Salmon et al. 2011), as in `weft.randomness`, whose numbers these are.
#include <cstdint>

namespace {

inline uint32_t rotated(uint32_t x, int by) { return x << by | x >> (32 - by); }

uint32_t first_word(const uint32_t *key, uint32_t counter) {
  constexpr int BY[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t schedule[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
  uint32_t x = counter + key[0], y = key[1];
  for (uint32_t block = 0; block < 5; block++) {
    for (int by : BY[block % 2]) {
      x += y;
      y = rotated(y, by) ^ x;
    }
    x += schedule[(block + 1) % 3];
    y += schedule[(block + 2) % 3] + block + 1;
  }
  return x;
}

} // namespace

// out[i] in [0, 1), a multiple of 2^-24, of key i of keys [count, 2] and its position.
extern "C" void weft_uniforms(const uint32_t *keys, const uint32_t *positions, double *out, long count, long) {
  for (long i = 0; i < count; i++) out[i] = (first_word(keys + 2 * i, positions[i]) >> 8) / 16777216.0;
}
