// Devices, events and the guard of the simulated device: what torch asks of any accelerator.

#include "device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <fcntl.h>
#include <sys/file.h>

#include "generator.h"

namespace sim {
namespace {

std::atomic<bool> has_died{false};
thread_local c10::DeviceIndex device_now = 0;
thread_local std::array<c10::StreamId, kDevices> streams_now{};

[[noreturn]] void raise_dead(const std::string& what) {
  throw c10::AcceleratorError(
      {__func__, __FILE__, __LINE__}, 710, "SIM error: device-side assert triggered" + what);
}

std::string thread_name() {
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return name;
}

c10::Stream make_stream(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(index), id);
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : device_now;
}

} // namespace

bool is_dead() {
  return has_died;
}

void die(const std::string& what) {
  has_died = true;
  raise_dead(what);
}

c10::DeviceIndex current_device() {
  return device_now;
}

void set_device(c10::DeviceIndex index) {
  touch(index);
  device_now = index;
}

std::array<DeviceState, kDevices>& devices() {
  static auto* all = new std::array<DeviceState, kDevices>(); // never destroyed: streams run until the process ends
  return *all;
}

DeviceState& touch(c10::DeviceIndex index) {
  if (is_dead()) {
    raise_dead(" earlier in this process");
  }
  TORCH_CHECK(index >= 0 && index < kDevices, "SIM error: invalid device ordinal ", int(index));
  DeviceState& state = devices()[index];
  std::lock_guard<std::mutex> lock(state.mutex);
  if (state.queues.empty()) {
    if (const char* directory = std::getenv("SIM_EXCLUSIVE")) {
      int file = open(c10::str(directory, "/sim", int(index)).c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
      TORCH_CHECK(
          file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0,
          "SIM error: sim:", int(index), " is in exclusive mode and in use by another process");
    }
    state.queues.push_back(std::make_unique<Queue>());
  }
  state.threads.insert(thread_name());
  return state;
}

c10::Stream current_stream(c10::DeviceIndex index) {
  return make_stream(index, streams_now[index]);
}

Queue& queue_of(const c10::Stream& stream) {
  DeviceState& state = touch(stream.device_index());
  std::lock_guard<std::mutex> lock(state.mutex);
  return *state.queues.at(stream.id());
}

Queue& current_queue(c10::DeviceIndex index) {
  return queue_of(current_stream(index));
}

void synchronize(Queue& queue) {
  queue.wait(queue.pushed());
}

void synchronize_device(c10::DeviceIndex index) {
  size_t count;
  {
    DeviceState& state = touch(index);
    std::lock_guard<std::mutex> lock(state.mutex);
    count = state.queues.size();
  }
  for (size_t id = 0; id < count; ++id) {
    synchronize(queue_of(make_stream(index, static_cast<c10::StreamId>(id))));
  }
}

namespace {

struct Event {
  Queue* queue = nullptr;
  uint64_t position = 0;
  std::shared_ptr<double> ms = std::make_shared<double>(0);
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device getDevice() const override { return device_at(device_now); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  // As cudaSetDevice since CUDA 12: makes a context.
  void setDevice(c10::Device device) const override {
    sim::set_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    if (before != device) {
      setDevice(device);
    }
    return before;
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = device.index(); }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(index_of(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto index = index_of(device);
    DeviceState& state = touch(index);
    std::lock_guard<std::mutex> lock(state.mutex);
    state.queues.push_back(std::make_unique<Queue>());
    return make_stream(index, static_cast<c10::StreamId>(state.queues.size() - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    streams_now[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Queue& queue = queue_of(stream);
    return queue.has_run(queue.pushed());
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(queue_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize_device(index); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    auto* mine = static_cast<Event*>(*event);
    mine->queue = &queue_of(stream);
    mine->position = mine->queue->push([ms = mine->ms] {
      *ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
    });
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* mine = static_cast<Event*>(event);
    if (mine != nullptr && mine->queue != nullptr && mine->queue != &queue_of(stream)) {
      queue_of(stream).push([queue = mine->queue, position = mine->position] { queue->wait_as_stream(position); });
    }
  }
  bool queryEvent(void* event) const override {
    auto* mine = static_cast<Event*>(event);
    return mine == nullptr || mine->queue->has_run(mine->position);
  }
  void synchronizeEvent(void* event) const override {
    if (auto* mine = static_cast<Event*>(event)) {
      mine->queue->wait(mine->position);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return *static_cast<Event*>(second)->ms - *static_cast<Event*>(first)->ms;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    std::lock_guard<std::mutex> lock(devices()[index].mutex);
    return !devices()[index].queues.empty();
  }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return device_now; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice(device_at(index)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice(device_at(index)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return device_at(device_now); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<SimGenerator>(index < 0 ? device_now : index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    DeviceState& state = devices()[index < 0 ? device_now : index];
    std::lock_guard<std::mutex> lock(state.mutex);
    if (!state.generator.defined()) {
      state.generator = at::make_generator<SimGenerator>(index < 0 ? device_now : index);
    }
    return state.generator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    Queue& queue = current_queue(storage.device().index());
    auto data = c10::GetAllocator(c10::DeviceType::PrivateUse1)->allocate(size);
    queue.push([target = data.get(), source = storage.data_ptr().get(), count = std::min(size, storage.nbytes())] {
      if (count > 0) {
        std::memcpy(target, source, count);
      }
    });
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

const bool has_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

} // namespace
} // namespace sim
