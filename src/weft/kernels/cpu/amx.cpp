// Leave to use the tiles of Intel's AMX, which a process asks the system for.
#include "amx.h"

#ifdef WEFT_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace {

std::atomic<bool> wanted{true};

} // namespace

bool amx::ready() {
  constexpr long ASK = 0x1023, TILES = 18; // ARCH_REQ_XCOMP_PERM, and the state's number, of Linux's arch_prctl
  static const bool given = syscall(SYS_arch_prctl, ASK, TILES) == 0;
  return given && wanted;
}
#endif

// Whether products are computed in the processor's tiles from now on: not where it has none, and where they are not `wanted`.
extern "C" long weft_tiles(long want) {
#ifdef WEFT_AMX
  wanted = want != 0;
  return amx::ready();
#else
  return 0 * want;
#endif
}
