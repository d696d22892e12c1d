// Operators of the simulated device: memory, views and copies here, all others on the CPU.

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "generator.h"

namespace sim {

at::Tensor as_cpu(const at::Tensor& tensor) {
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

namespace {

struct InKernel {
  bool before = std::exchange(in_kernel, true);
  ~InKernel() { in_kernel = before; }
};

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size,
      c10::GetAllocator(c10::DeviceType::PrivateUse1),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size,
      stride,
      c10::GetAllocator(c10::DeviceType::PrivateUse1),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// Asynchronous within a device, and with `non_blocking` between it and pinned memory; else the host waits.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const at::Tensor& on_device = target.is_privateuseone() ? target : source;
  c10::DeviceGuard guard(on_device.device());
  Queue& queue = current_queue(on_device.device().index());
  counts.launches += !in_kernel;
  if (source.device() == target.device()) {
    queue.push([from = as_cpu(source), to = as_cpu(target)]() mutable { to.copy_(from); });
    return target;
  }
  const at::Tensor& other = target.is_privateuseone() ? source : target;
  if (other.is_cpu() && non_blocking && other.is_pinned()) {
    // The storage of the host tensor is held, as CUDA's host allocator waits for the copy before it reuses memory.
    queue.push([from = as_cpu(source), to = as_cpu(target), held = other.storage()]() mutable {
      delay(copy_delay_us);
      to.copy_(from);
    });
    return target;
  }
  if (other.is_privateuseone()) {
    Queue& source_queue = current_queue(other.device().index());
    source_queue.wait_as_stream(source_queue.pushed());
  }
  // Copied to a layout that both sides have here, on the host: one that a user could not see on a GPU.
  synchronize(queue);
  at::Tensor from = source.is_cpu() ? source : as_cpu(source);
  at::Tensor to = target.is_cpu() ? target : as_cpu(target);
  at::NoGradGuard no_grad;
  to.copy_(from);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  synchronize(current_queue(self.device().index()));
  return at::native::_local_scalar_dense_cpu(as_cpu(self));
}

at::Tensor as_strided(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, std::move(offset));
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  Queue& queue = current_queue(self.device().index());
  queue.wait_as_stream(queue.pushed());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

at::Tensor& set_source_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_source_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

at::Tensor& set_source_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  auto on_cpu = bias.has_value() && bias->defined() ? bias->cpu() : at::Tensor();
  return at::convolution(
             input.cpu(), weight.cpu(), on_cpu, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient,
    const at::Tensor& input,
    const at::Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> mask) {
  std::array<int64_t, 1> bias{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto [input_grad, weight_grad, bias_grad] = at::convolution_backward(
      gradient.cpu(), input.cpu(), weight.cpu(), at::OptionalIntArrayRef(bias), stride, padding, dilation, transposed,
      output_padding, groups, mask);
  auto back = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(input.device()) : tensor; };
  return {back(input_grad), back(weight_grad), back(bias_grad)};
}

// A GPU has it for integers, too.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  return at::histc(self.cpu().to(at::kDouble), bins, low, high).to(self.scalar_type()).to(self.device());
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

// Lets `parameter.data = other` change the device, as for the devices in torch's own tree.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto is_ours = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_privateuseone());
  };
  return is_ours(self) && is_ours(from);
}

// Kernels of a GPU take tensors of one device, and from the host scalars and indices only.
void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::string& name = op.schema().name();
  static const std::set<std::string> kTakeIndices{
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
  if (kTakeIndices.count(name) != 0 || name.rfind("aten::_foreach_", 0) == 0) {
    return; // a list's items are an operation each
  }
  std::optional<c10::Device> first;
  auto check = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.dim() == 0) {
      return;
    }
    first = first.value_or(tensor.device());
    TORCH_CHECK(
        tensor.device() == *first, "Expected all tensors to be on the same device, but found at least two devices, ",
        *first, " and ", tensor.device(), "! (", name, ")");
  };
  for (size_t index = stack.size() - op.schema().arguments().size(); index < stack.size(); ++index) {
    if (stack[index].isTensor()) {
      check(stack[index].toTensor());
    } else if (stack[index].isTensorList()) {
      for (const at::Tensor& tensor : stack[index].toTensorVector()) {
        check(tensor);
      }
    }
  }
}

bool is_out_of_range(const c10::Error& error) {
  std::string text = error.what_without_backtrace();
  return dynamic_cast<const c10::IndexError*>(&error) != nullptr || text.find("out of bounds") != std::string::npos ||
      text.find("out of range") != std::string::npos;
}

SimGenerator& generator_of(const torch::jit::Stack& stack) {
  auto index = current_device();
  for (const auto& value : stack) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_privateuseone()) {
      index = value.toTensor().device().index();
    }
  }
  return *at::globalContext().defaultGenerator(device_at(index)).get<SimGenerator>();
}

using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

c10::IValue mapped(const c10::IValue& value, const TensorMap& map) {
  if (value.isTensor()) {
    return map(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      all.push_back(map(tensor));
    }
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      all.push_back(tensor.has_value() ? std::optional(map(*tensor)) : std::nullopt);
    }
    return all;
  }
  return value;
}

// True if a kernel can go to a stream: the shapes of its results are known, and nothing but data is passed.
bool can_queue(const c10::FunctionSchema& schema, c10::ArrayRef<at::Tag> tags, const torch::jit::Stack& stack) {
  static const std::set<at::Tag> kDepends{
      at::Tag::nondeterministic_seeded, at::Tag::data_dependent_output, at::Tag::dynamic_output_shape};
  if (std::any_of(tags.begin(), tags.end(), [](at::Tag tag) { return kDepends.count(tag) != 0; })) {
    return false;
  }
  bool has_device = false;
  bool is_plain = true;
  for (size_t index = 0; index < schema.arguments().size(); ++index) {
    const c10::Argument& argument = schema.arguments()[index];
    is_plain = is_plain && argument.name() != "generator";
    mapped(stack[stack.size() - schema.arguments().size() + index], [&](const at::Tensor& tensor) {
      if (tensor.defined()) {
        has_device = has_device || tensor.is_privateuseone();
        is_plain = is_plain && !tensor.is_conj() && !tensor.is_neg() && tensor.layout() == at::kStrided &&
            (tensor.is_privateuseone() || tensor.dim() == 0);
      }
      return tensor;
    });
  }
  for (const auto& result : schema.returns()) {
    is_plain = is_plain && (result.alias_info() == nullptr || result.alias_info()->isWrite());
  }
  return has_device && is_plain;
}

// The argument that a result is, of an operator that works in place.
std::optional<size_t> written(const c10::FunctionSchema& schema, const c10::Argument& result) {
  for (size_t index = 0; result.alias_info() != nullptr && index < schema.arguments().size(); ++index) {
    const auto* alias = schema.arguments()[index].alias_info();
    if (alias != nullptr && alias->beforeSets() == result.alias_info()->beforeSets()) {
      return index;
    }
  }
  return std::nullopt;
}

// All that the shapes of an operator's results hang on; empty if that is not known.
std::string key_of(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  std::ostringstream key;
  key << op.operator_name() << at::get_default_dtype() << std::hexfloat;
  for (const c10::IValue& argument : arguments) {
    key << ';';
    if (argument.isTensor() || argument.isTensorList() || argument.isOptionalTensorList()) {
      mapped(argument, [&](const at::Tensor& tensor) {
        key << '|';
        if (tensor.defined()) {
          key << tensor.scalar_type() << tensor.sizes() << tensor.strides() << tensor.device().type()
              << tensor.unsafeGetTensorImpl()->is_wrapped_number();
        }
        return tensor;
      });
    } else if (argument.isDouble()) {
      key << argument.toDouble();
    } else if (argument.isNone() || argument.isInt() || argument.isBool() || argument.isString() ||
               argument.isDevice() || argument.isIntList() || argument.isBoolList()) {
      key << argument.tagKind() << argument;
    } else {
      return "";
    }
  }
  return key.str();
}

// Returns tensors on meta like an operator's results; none where it has no kernel there, and so blocks. Kernels on meta
// may be of Python, and take as long as all else that a step does here: what they say is kept.
std::optional<std::vector<c10::IValue>> shapes_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static thread_local std::unordered_map<std::string, std::vector<c10::IValue>> known;
  const size_t first = stack.size() - op.schema().arguments().size();
  auto arguments = c10::ArrayRef<c10::IValue>(stack).slice(first);
  const std::string key = key_of(op, arguments);
  if (auto found = known.find(key); found != known.end()) {
    return found->second;
  }
  torch::jit::Stack shapes;
  for (const c10::IValue& argument : arguments) {
    shapes.push_back(mapped(argument, [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.is_privateuseone()
          ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta))
          : tensor;
    }));
  }
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  std::vector<c10::IValue> results(shapes.end() - op.schema().returns().size(), shapes.end());
  if (!key.empty()) {
    known.emplace(key, results);
  }
  return results;
}

// Puts a kernel on the current stream, as a GPU does, and returns before it has run. False if this cannot be.
bool queue_kernel(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  // The CPU's have other saved statistics than a GPU's, which is what their shapes are computed for.
  static const std::set<std::string> kBlocking{"aten::native_batch_norm", "aten::native_batch_norm_backward"};
  if (kBlocking.count(schema.name()) != 0 || !can_queue(schema, op.getTags(), stack)) {
    return false;
  }
  const size_t first = stack.size() - schema.arguments().size();
  auto device = device_at(current_device());
  torch::jit::Stack locals;
  for (size_t index = first; index < stack.size(); ++index) {
    const bool is_out = schema.arguments()[index - first].is_out();
    // Numbers of the host are those of this moment. What only receives a result is copied to, as if it were new.
    locals.push_back(mapped(stack[index], [is_out, &device](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_privateuseone()) {
        return tensor.defined() ? tensor.clone() : tensor;
      }
      device = tensor.device();
      return is_out ? at::empty({0}, tensor.options().device(c10::kCPU)) : as_cpu(tensor);
    }));
  }
  torch::jit::Stack results;
  std::vector<bool> is_new;
  std::vector<bool> is_copied;
  for (const auto& result : schema.returns()) {
    auto argument = written(schema, result);
    is_new.push_back(!argument.has_value());
    is_copied.push_back(is_new.back() || schema.arguments()[*argument].is_out());
    results.push_back(argument.has_value() ? stack[first + *argument] : c10::IValue());
  }
  bool has_out = std::any_of(
      schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& one) { return one.is_out(); });
  if (has_out || std::count(is_new.begin(), is_new.end(), true) > 0) {
    auto shapes = shapes_of(op, stack);
    if (!shapes.has_value()) {
      return false;
    }
    for (size_t index = 0; index < results.size(); ++index) {
      const auto& shape = shapes->at(index);
      if (!is_new[index]) {
        if (shape.isTensor() && shape.toTensor().sizes() != results[index].toTensor().sizes()) {
          return false; // the kernel is to resize what it writes to
        }
        continue;
      }
      if (!shape.isTensor() && !shape.isTensorList()) {
        return false;
      }
      results[index] = mapped(shape, [&](const at::Tensor& like) {
        return like.defined() ? at::empty_strided(like.sizes(), like.strides(), like.options().device(device)) : like;
      });
    }
  }
  torch::jit::Stack targets;
  for (size_t index = 0; index < results.size(); ++index) {
    targets.push_back(mapped(results[index], [](const at::Tensor& tensor) {
      return tensor.defined() ? as_cpu(tensor) : tensor;
    }));
  }
  current_queue(device.index()).push([op, is_copied, locals = std::move(locals), targets]() mutable {
    try {
      op.callBoxed(&locals);
    } catch (c10::Error& error) {
      if (is_out_of_range(error)) {
        die(c10::str(" in ", op.schema().name(), ": ", error.what_without_backtrace()));
      }
      error.add_context("in the kernel " + op.schema().name()); // the host raises it where it waits
      throw;
    }
    for (size_t index = 0; index < targets.size(); ++index) {
      std::vector<at::Tensor> found;
      auto take = [&](const at::Tensor& tensor) {
        found.push_back(tensor);
        return tensor;
      };
      mapped(locals[index], take);
      size_t next = 0;
      mapped(targets[index], [&](const at::Tensor& target) {
        const at::Tensor& value = found.at(next++);
        if (is_copied[index] && target.defined() && value.defined()) {
          at::Tensor(target).copy_(value);
        }
        return target;
      });
    }
  });
  torch::jit::drop(stack, schema.arguments().size());
  stack.insert(stack.end(), results.begin(), results.end());
  return true;
}

// Runs an operator on the CPU. Random numbers come from the device's generator, and an index that is out of range is
// not an error of the host: it kills the device, as CUDA's assert in a kernel does.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  touch(current_device());
  check_devices(op, *stack);
  counts.launches += !in_kernel;
  if (queue_kernel(op, *stack)) {
    return;
  }
  const auto& arguments = op.schema().arguments();
  bool takes_generator = false;
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  SimGenerator& mine = generator_of(*stack);
  for (size_t index = 0; index < arguments.size(); ++index) {
    auto& value = (*stack)[stack->size() - arguments.size() + index];
    if (arguments[index].name() == "generator") {
      takes_generator = true;
      value = value.isNone() ? mine.cpu : value.toGenerator().get<SimGenerator>()->cpu;
    }
  }
  const auto tags = op.getTags();
  // Fused kernels such as dropout's take the default generator of the CPU.
  bool is_random = !takes_generator && std::count(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) > 0;
  at::Tensor before = is_random ? cpu.get_state() : at::Tensor();
  if (is_random) {
    cpu.set_state(mine.cpu.get_state());
  }
  InKernel inside;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (const c10::Error& error) {
    if (!is_out_of_range(error)) {
      throw;
    }
    die(c10::str(" in ", op.schema().name(), ": ", error.what_without_backtrace()));
  }
  if (is_random) {
    mine.cpu.set_state(cpu.get_state());
    cpu.set_state(before);
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_.source_Storage_storage_offset", set_source_storage_offset);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("histc", histc);
  m.impl("record_stream", record_stream_of);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

} // namespace
} // namespace sim
