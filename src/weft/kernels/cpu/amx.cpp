// Permission to use Intel's AMX tiles, which a process must request from the operating system.
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

// Turns the use of AMX tiles on or off; returns 1 if products use them from now on, 0 if not, or if the processor has none.
extern "C" long weft_tiles(long want) {
#ifdef WEFT_AMX
  wanted = want != 0;
  return amx::ready();
#else
  return 0 * want;
#endif
}
