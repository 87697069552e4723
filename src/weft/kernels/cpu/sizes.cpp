// Sizes of the structures shared by C++ and Python, in the order of `library.py`.
#include "forward.h"

extern "C" void weft_sizes(long *sizes) {
  const long all[] = {sizeof(Heads), sizeof(Arguments), sizeof(Block), sizeof(Prefix), sizeof(Step), sizeof(Draws)};
  for (long size : all) *sizes++ = size;
}
