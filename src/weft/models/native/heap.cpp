// Where torch's tensors on a CPU come from.
#include <cstdint>
#include <cstdlib>
#include <limits>

#include <c10/core/CPUAllocator.h>

namespace {

constexpr std::uintptr_t ALIGNED = 64;             // bytes, as torch's own
constexpr size_t MORE = ALIGNED + sizeof(void *);  // room to move to an aligned address behind a pointer to the block

void give_back(void *data) {
  if (!data) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  std::free(static_cast<void **>(data)[-1]);
}

// Aligned inside a larger block of malloc's. `posix_memalign`, which torch calls, frees what it cuts off in front and behind
// on its own (glibc before 2.38): pieces of some 50 bytes, which small things of long life then fill, and what lies between
// two of them no longer joins when it is free.
struct Heap final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &give_back, cpu};
    void *const block = bytes <= std::numeric_limits<size_t>::max() - MORE ? std::malloc(bytes + MORE) : nullptr;
    if (!block) {
      c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
      TORCH_CHECK(false, "not enough memory: you tried to allocate ", bytes, " bytes");
    }
    const auto behind = reinterpret_cast<std::uintptr_t>(block) + MORE;
    void *const data = reinterpret_cast<void *>(behind - behind % ALIGNED);
    static_cast<void **>(data)[-1] = block;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &give_back, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

// Tensors made from now on come from here; it stays to the end of the process.
extern "C" void weft_heap() {
  static Heap heap;
  c10::SetCPUAllocator(&heap, 1);
}
