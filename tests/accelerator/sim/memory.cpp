// Memory of the simulated device, and pinned memory of the host.

#include "device.h"

#include <c10/core/Allocator.h>

namespace sim {
namespace {

constexpr size_t kAlignment = 512;

// Memory of a device or pinned memory. It is never given back to the system: a task may still write to it.
struct Block {
  void* data;
  size_t size; // requested
  size_t capacity;
  c10::DeviceIndex device;
  c10::StreamId stream; // that was current when it was allocated
  std::vector<Queue*> users; // other streams, by recordDataPtrOnStream
};

// Freed blocks are given out again on the stream that they came from, whose tasks run in order, as CUDA's allocator
// does. What they hold then is garbage: NaN, as a floating-point number.
class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    auto index = current_device();
    DeviceState& state = touch(index);
    if (size == 0) {
      return {nullptr, nullptr, &free, device_at(index)};
    }
    {
      std::lock_guard<std::mutex> lock(state.mutex);
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          state.allocated + size <= state.limit,
          "SIM out of memory. Tried to allocate ", size, " bytes; sim:", int(index), " has ", state.allocated,
          " bytes allocated of ", state.limit);
      state.allocated += size;
      state.peak = std::max(state.peak, state.allocated);
    }
    auto* block = take(size, index, current_stream(index).id());
    current_queue(index).push([block] { std::memset(block->data, 0xFF, block->size); });
    return {block->data, block, &free, device_at(index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }

 private:
  using Key = std::tuple<c10::DeviceIndex, c10::StreamId, size_t>;

  static std::multimap<Key, Block*>& unused() {
    static auto* blocks = new std::multimap<Key, Block*>();
    return *blocks;
  }
  static std::mutex& mutex() {
    static auto* one = new std::mutex();
    return *one;
  }
  static Block* take(size_t size, c10::DeviceIndex device, c10::StreamId stream) {
    size_t capacity = (size + kAlignment - 1) / kAlignment * kAlignment;
    std::lock_guard<std::mutex> lock(mutex());
    auto found = unused().find({device, stream, capacity});
    if (found == unused().end()) {
      return new Block{std::aligned_alloc(kAlignment, capacity), size, capacity, device, stream, {}};
    }
    Block* block = found->second;
    unused().erase(found);
    block->size = size;
    return block;
  }
  static void give_back(Block* block) {
    std::lock_guard<std::mutex> lock(mutex());
    unused().emplace(Key{block->device, block->stream, block->capacity}, block);
  }
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    if (block == nullptr) {
      return;
    }
    DeviceState& state = devices()[block->device];
    {
      std::lock_guard<std::mutex> lock(state.mutex);
      state.allocated -= block->size;
    }
    // Each stream that used the block has to pass this point before the next owner may have it.
    auto users = std::exchange(block->users, {});
    auto left = std::make_shared<std::atomic<size_t>>(users.size());
    for (Queue* user : users) {
      user->push([block, left] {
        if (--*left == 0) {
          give_back(block);
        }
      });
    }
    if (users.empty()) {
      give_back(block);
    }
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    touch(current_device());
    size_t capacity = 1;
    while (capacity < size) {
      capacity *= 2;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = unused_.find(capacity);
    void* data = found == unused_.end() ? std::aligned_alloc(4096, std::max<size_t>(capacity, 4096)) : found->second;
    if (found != unused_.end()) {
      unused_.erase(found);
    }
    used_[data] = capacity;
    memory.allocated += capacity;
    memory.peak = std::max(memory.peak, memory.allocated);
    return {data, data, &free, c10::Device(c10::DeviceType::CPU)};
  }
  bool owns(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = used_.upper_bound(const_cast<void*>(data));
    return after != used_.begin() && data < static_cast<const char*>((--after)->first) + after->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }

  PinnedMemory memory;

 private:
  static void free(void* data);

  std::mutex mutex_;
  std::map<void*, size_t> used_;
  std::multimap<size_t, void*> unused_;
};

PinnedAllocator& pinned() {
  static auto* one = new PinnedAllocator();
  return *one;
}

void PinnedAllocator::free(void* data) {
  PinnedAllocator& mine = pinned();
  std::lock_guard<std::mutex> lock(mine.mutex_);
  auto found = mine.used_.find(data);
  mine.memory.allocated -= found->second;
  mine.unused_.emplace(found->second, data);
  mine.used_.erase(found);
}

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_allocator);

} // namespace

PinnedMemory& pinned_memory() {
  return pinned().memory;
}

c10::Allocator* pinned_allocator() {
  return &pinned();
}

bool is_pinned(const void* data) {
  return pinned().owns(data);
}

void record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  if (auto* block = static_cast<Block*>(data.get_context()); block != nullptr && block->stream != stream.id()) {
    block->users.push_back(&queue_of(stream));
  }
}

} // namespace sim
