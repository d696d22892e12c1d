// A simulated accelerator, as torch's PrivateUse1 device: memory, streams, events, generators and collectives.
//
// Its memory is host memory, and its kernels run on the CPU. What it has of a GPU is order: a stream is a thread that
// runs tasks one after the other, and a copy between pinned and device memory returns before it has run. A program that
// forgets to wait reads old bytes, for certain if copies are delayed (`set_copy_delay_us`).
//
// Kernels go to the current stream, too, if the shapes of their results do not depend on data, and they draw no random
// numbers. Others block the host until they have run: `at::native::cpu_fallback` copies their inputs to the host on the
// current stream, and their results back.
//
// streams.h: streams. device.cpp: devices, events, guard. memory.cpp: device and pinned memory. kernels.cpp: operators.
// collectives.cpp: the backend `simccl`. module.cpp: what Python sees.

#pragma once

#include "streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <set>

namespace sim {

constexpr c10::DeviceIndex kDevices = 4;
constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

inline c10::Device device_at(c10::DeviceIndex index) {
  return {c10::DeviceType::PrivateUse1, index};
}

struct DeviceState {
  std::mutex mutex;
  std::vector<std::unique_ptr<Queue>> queues; // by stream id; 0 is the default stream
  std::set<std::string> threads; // that have touched the device
  size_t allocated = 0; // bytes requested
  size_t peak = 0;
  size_t limit = kNoLimit;
  at::Generator generator;
};

std::array<DeviceState, kDevices>& devices();

// Makes the context of a device with its first use in a process, as CUDA does. In exclusive mode (SIM_EXCLUSIVE names a
// directory) the first process that does so holds the device until it ends.
DeviceState& touch(c10::DeviceIndex index);

// After what would be a device-side assert, every call of the process fails.
bool is_dead();
[[noreturn]] void die(const std::string& what);

c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex index);
c10::Stream current_stream(c10::DeviceIndex index);
Queue& queue_of(const c10::Stream& stream);
Queue& current_queue(c10::DeviceIndex index);
void synchronize(Queue& queue);
void synchronize_device(c10::DeviceIndex index);

struct PinnedMemory {
  size_t allocated = 0; // rounded up to powers of two, as CUDA's host allocator does
  size_t peak = 0;
};
PinnedMemory& pinned_memory();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

// Keeps memory from being given out again before a stream has passed the point at which it is freed.
void record_stream(const c10::DataPtr& data, const c10::Stream& stream);

// The memory of a device tensor as a CPU tensor, which owns nothing.
at::Tensor as_cpu(const at::Tensor& tensor);

} // namespace sim
