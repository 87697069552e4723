// Where torch's tensors on a CPU come from.
//
// Large ones lie in one range of addresses, of which ever more is in use and none is given back: a page that is given back and
// asked for again costs a fault. A tensor takes the first free piece that holds it, what is left over stays free, and free
// neighbours join. Small ones, some of which live long, lie elsewhere: between large ones they would keep what is free from
// joining. Where the system has large pages for those who ask, the range lies in them.
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

#include <c10/core/CPUAllocator.h>

namespace {

constexpr size_t LINE = 64;              // bytes that every tensor is aligned to, as torch's own are
constexpr size_t LARGE = 1 << 15;        // bytes from which on a tensor is large
constexpr size_t STEP = 1 << 21;         // bytes of a large page: the part in use begins at one and grows by whole ones
constexpr size_t ROOM = size_t{1} << 43; // bytes of addresses, which cost nothing: more than machines have memory

using Pieces = std::map<char *, size_t>; // sizes by where they begin

class Range {
public:
  // Where the system has no such room (a limit on addresses) nothing can be taken. It counts as memory what is in use.
  Range() {
    void *const given = mmap(nullptr, ROOM + STEP, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (given == MAP_FAILED) return;
    begin = end = static_cast<char *>(given) + STEP - reinterpret_cast<size_t>(given) % STEP;
    madvise(begin, ROOM, MADV_HUGEPAGE);
  }

  // Null where there is no room.
  char *take(size_t bytes) {
    if (!begin || bytes > ROOM / 2) return nullptr;
    // A line more than is asked for: without it tensors of 2^n bytes would all begin at one place of a page, and of a cache.
    const size_t size = bytes / LINE * LINE + 2 * LINE;
    const std::lock_guard<std::mutex> held(mutex);
    auto found = std::find_if(free.begin(), free.end(), [&](const auto &piece) { return piece.second >= size; });
    if (found == free.end()) {
      if (!grow(size)) return nullptr;
      found = std::prev(free.end());
    }
    const auto [at, whole] = *found;
    taken.emplace(at, size); // may throw, and nothing is changed yet
    auto piece = free.extract(found);
    piece.key() = at + size, piece.mapped() = whole - size;
    if (whole > size) free.insert(std::move(piece));
    return at;
  }

  bool holds(const char *at) const { return begin && at >= begin && at < begin + ROOM; }

  void give_back(char *at) {
    const std::lock_guard<std::mutex> held(mutex);
    add(taken.extract(at));
  }

  std::mutex mutex;

private:
  // By what a free piece at the end lacks.
  bool grow(size_t size) {
    const auto last = free.empty() ? free.end() : std::prev(free.end());
    const size_t there = last != free.end() && last->first + last->second == end ? last->second : 0;
    const size_t more = (size - there + STEP - 1) / STEP * STEP;
    if (more > static_cast<size_t>(begin + ROOM - end) || mprotect(end, more, PROT_READ | PROT_WRITE) != 0) return false;
    Pieces made = {{end, more}};
    end += more;
    add(made.extract(made.begin()));
    return true;
  }

  // Needs no memory: what was taken must always find its way back.
  void add(Pieces::node_type piece) {
    auto next = free.upper_bound(piece.key());
    if (next != free.end() && next->first == piece.key() + piece.mapped()) {
      piece.mapped() += next->second;
      next = free.erase(next);
    }
    if (next != free.begin() && std::prev(next)->first + std::prev(next)->second == piece.key())
      std::prev(next)->second += piece.mapped();
    else
      free.insert(std::move(piece));
  }

  char *begin = nullptr, *end = nullptr; // of the part in use; it may grow to ROOM bytes
  Pieces free, taken;
};

// Never destroyed: tensors may outlive what is.
Range &range() {
  static Range *const range = new Range;
  return *range;
}

void give_back(void *data) {
  if (!data) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  if (auto *const at = static_cast<char *>(data); range().holds(at))
    range().give_back(at);
  else
    std::free(data);
}

struct Heap final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &give_back, cpu};
    void *data = bytes >= LARGE ? range().take(bytes) : nullptr;
    if (!data && posix_memalign(&data, LINE, bytes) != 0) {
      c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
      TORCH_CHECK(false, "not enough memory: you tried to allocate ", bytes, " bytes");
    }
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &give_back, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

// Tensors made from now on come from here; it stays to the end of the process.
extern "C" void weft_heap() {
  static Heap &heap = *new Heap; // as the range
  // A child begins with what its parent's threads have left: none of them may be in the middle of something.
  static const int registered =
      pthread_atfork([] { range().mutex.lock(); }, [] { range().mutex.unlock(); }, [] { range().mutex.unlock(); });
  if (registered == 0) c10::SetCPUAllocator(&heap, 1);
}
