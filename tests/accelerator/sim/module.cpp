// What Python sees of the simulated device; `device.py` makes `torch.sim` of it.

#include <torch/extension.h>

#include "device.h"

namespace sim {
void bind_collectives(py::module& m);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using sim::devices;
  m.def("current_device", &sim::current_device);
  m.def("set_device", &sim::set_device);
  m.def("synchronize", &sim::synchronize_device, py::call_guard<py::gil_scoped_release>());
  m.def("set_copy_delay_us", [](int64_t us) { sim::copy_delay_us = us; });
  m.def("set_collective_delay_us", [](int64_t us) { sim::collective_delay_us = us; });
  m.def("counts", [] {
    return std::map<std::string, int64_t>{
        {"launches", sim::counts.launches}, {"waits", sim::counts.waits}, {"drains", sim::counts.drains}};
  });
  m.def("is_dead", &sim::is_dead);
  m.def("set_limit", [](c10::DeviceIndex index, std::optional<size_t> bytes) {
    devices().at(index).limit = bytes.value_or(sim::kNoLimit);
  });
  m.def("limit", [](c10::DeviceIndex index) { return devices().at(index).limit; });
  m.def("memory_allocated", [](c10::DeviceIndex index) { return devices().at(index).allocated; });
  m.def("max_memory_allocated", [](c10::DeviceIndex index) { return devices().at(index).peak; });
  m.def("reset_peak_memory_stats", [](c10::DeviceIndex index) {
    devices().at(index).peak = devices().at(index).allocated;
  });
  m.def("pinned_allocated", [] { return sim::pinned_memory().allocated; });
  m.def("max_pinned_allocated", [] { return sim::pinned_memory().peak; });
  m.def("reset_peak_pinned", [] { sim::pinned_memory().peak = sim::pinned_memory().allocated; });
  m.def("touched", [] {
    std::map<int, std::set<std::string>> found;
    for (int index = 0; index < sim::kDevices; ++index) {
      std::lock_guard<std::mutex> lock(devices()[index].mutex);
      if (!devices()[index].queues.empty()) {
        found[index] = devices()[index].threads;
      }
    }
    return found;
  });
  m.def("default_generator", [](c10::DeviceIndex index) {
    return at::globalContext().defaultGenerator(sim::device_at(index));
  });
  sim::bind_collectives(m);
}
