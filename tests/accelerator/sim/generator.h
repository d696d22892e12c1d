// Random generators of the simulated device.

#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include "device.h"

namespace sim {

struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(c10::DeviceIndex index)
      : GeneratorImpl(device_at(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a generator of a sim device has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "a generator of a sim device has no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  SimGenerator* clone_impl() const override {
    auto* copy = new SimGenerator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }

  at::Generator cpu; // makes the numbers, so that equal seeds give a CPU's
};

} // namespace sim
