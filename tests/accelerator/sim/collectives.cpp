// `simccl`, the process group backend of the simulated device.

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/extension.h>

#include "device.h"

namespace sim {
namespace {

// A collective that a group runs on its own stream. As NCCL's: waiting for it blocks the current stream, not the host.
class Work final : public c10d::Work {
 public:
  struct Result {
    std::mutex mutex;
    std::exception_ptr error;
  };

  Work(
      int rank,
      c10d::OpType type,
      c10::DeviceIndex device,
      Queue& queue,
      uint64_t position,
      std::vector<at::Tensor> outputs,
      std::shared_ptr<Result> result)
      : c10d::Work(rank, type),
        device_(device),
        queue_(queue),
        position_(position),
        outputs_(std::move(outputs)),
        result_(std::move(result)) {}

  bool isCompleted() override { return queue_.has_run(position_); }
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> lock(result_->mutex);
    return result_->error;
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds) override {
    if (auto error = exception()) {
      std::rethrow_exception(error);
    }
    Queue& current = current_queue(device_);
    current.push([&current, &queue = queue_, position = position_, result = result_] {
      queue.wait_as_stream(position);
      std::lock_guard<std::mutex> lock(result->mutex);
      if (result->error) {
        current.fail(result->error);
      }
    });
    if (retrieveOpType() == c10d::OpType::BARRIER) {
      sim::synchronize(current);
    }
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_at(device_)});
    c10::DeviceGuard guard(device_at(device_));
    wait(kNoTimeout);
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  c10::DeviceIndex device_;
  Queue& queue_;
  uint64_t position_;
  std::vector<at::Tensor> outputs_;
  std::shared_ptr<Result> result_;
};

// A process group's backend with NCCL's manners, which runs over gloo on the same memory: collectives go to a stream of
// the group behind what the current stream holds, tensors are contiguous and on the group's device, and messages
// between two ranks may be coalesced.
class Simccl final : public c10d::Backend {
 public:
  using Started = std::vector<c10::intrusive_ptr<c10d::Work>>;

  struct Operation {
    std::function<Started()> start;
    std::function<void()> finish;
  };

  using Create = std::function<c10::intrusive_ptr<c10d::Backend>(
      c10::intrusive_ptr<c10d::Store>, int, int, std::chrono::milliseconds)>;

  Simccl(c10::intrusive_ptr<c10d::Backend> gloo, Create create)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), create_(std::move(create)) {}

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void abort() override { gloo_->abort(); }
  void shutdown() override {
    if (queue_ != nullptr) {
      queue_->wait_as_stream(queue_->pushed());
    }
    gloo_->shutdown();
  }

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    auto found = std::find(ranks.begin(), ranks.end(), getRank());
    if (found == ranks.end()) {
      return nullptr;
    }
    // The host's backend is split over the same store.
    auto own = c10::make_intrusive<c10d::PrefixStore>("simccl", store);
    return create_(own, found - ranks.begin(), ranks.size(), options->timeout);
  }

  void startCoalescing() override { is_coalescing_ = true; }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    is_coalescing_ = false;
    return submit(c10d::OpType::COALESCED, std::exchange(coalesced_tensors_, {}), std::exchange(coalesced_, {}));
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return enqueue(c10d::OpType::BROADCAST, tensors, {[gloo = gloo_, on_cpu = aliases(tensors), options]() mutable {
                     return Started{gloo->broadcast(on_cpu, options)};
                   }});
  }

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    auto on_cpu = aliases(tensors);
    auto summed = options;
    auto [before, after] = factors(options.reduceOp);
    summed.reduceOp = plain(options.reduceOp);
    return enqueue(
        c10d::OpType::ALLREDUCE,
        tensors,
        {[gloo = gloo_, on_cpu, summed, before = before]() mutable {
           scale(on_cpu[0], before);
           return Started{gloo->allreduce(on_cpu, summed)};
         },
         [on_cpu, after = after]() mutable { scale(on_cpu[0], after); }});
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override {
    std::vector<std::vector<at::Tensor>> to{aliases(outputs[0])};
    auto tensors = outputs[0];
    tensors.push_back(inputs[0]);
    return enqueue(c10d::OpType::ALLGATHER, tensors, {[gloo = gloo_, to, from = aliases(inputs), options]() mutable {
                     return Started{gloo->allgather(to, from, options)};
                   }});
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(output.numel() == input.numel() * getSize(), "output is not world size times as large as input");
    return enqueue(
        c10d::OpType::_ALLGATHER_BASE, {output, input},
        {[gloo = gloo_, to = as_cpu(output), from = as_cpu(input), options]() mutable {
          return Started{gloo->_allgather_base(to, from, options)};
        }});
  }

  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override {
    startCoalescing();
    for (size_t index = 0; index < inputs.size(); ++index) {
      _allgather_base(outputs[index], inputs[index], options);
    }
    return endCoalescing();
  }

  // As a sum of everything of which each rank keeps its part: what gloo has for every dtype.
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK_VALUE(input.numel() == output.numel() * getSize(), "input is not world size times as large as output");
    auto [before, after] = factors(options.reduceOp);
    c10d::AllreduceOptions summed;
    summed.reduceOp = plain(options.reduceOp);
    summed.timeout = options.timeout;
    auto all = std::make_shared<std::vector<at::Tensor>>();
    return enqueue(
        c10d::OpType::_REDUCE_SCATTER_BASE,
        {output, input},
        {[gloo = gloo_, all, from = as_cpu(input), summed, before = before] {
           all->push_back(from.flatten().clone());
           scale(all->at(0), before);
           return Started{gloo->allreduce(*all, summed)};
         },
         [all, to = as_cpu(output), rank = getRank(), after = after] {
           auto mine = all->at(0).narrow(0, rank * to.numel(), to.numel());
           scale(mine, after);
           to.copy_(mine.view_as(to));
         }});
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return enqueue(
        c10d::OpType::ALLTOALL_BASE,
        {output, input},
        {[gloo = gloo_, to = as_cpu(output), from = as_cpu(input), output_sizes, input_sizes, options]() mutable {
          return Started{gloo->alltoall_base(to, from, output_sizes, input_sizes, options)};
        }});
  }

  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& options) override {
    auto tensors = outputs;
    std::vector<std::vector<at::Tensor>> from;
    for (const auto& some : inputs) {
      tensors.insert(tensors.end(), some.begin(), some.end());
      from.push_back(aliases(some));
    }
    return enqueue(c10d::OpType::SCATTER, tensors, {[gloo = gloo_, to = aliases(outputs), from, options]() mutable {
                     return Started{gloo->scatter(to, from, options)};
                   }});
  }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int rank, int tag) override {
    return enqueue(c10d::OpType::SEND, tensors, {[gloo = gloo_, on_cpu = aliases(tensors), rank, tag]() mutable {
                     return Started{gloo->send(on_cpu, rank, tag)};
                   }});
  }

  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int rank, int tag) override {
    return enqueue(c10d::OpType::RECV, tensors, {[gloo = gloo_, on_cpu = aliases(tensors), rank, tag]() mutable {
                     return Started{gloo->recv(on_cpu, rank, tag)};
                   }});
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return enqueue(c10d::OpType::BARRIER, {}, {[gloo = gloo_] {
                     return Started{gloo->barrier(c10d::BarrierOptions())};
                   }});
  }

 private:
  static std::vector<at::Tensor> aliases(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> found;
    for (const auto& tensor : tensors) {
      found.push_back(as_cpu(tensor));
    }
    return found;
  }

  static void scale(at::Tensor& tensor, double factor) {
    if (factor != 1) { // integers have no other
      tensor.mul_(factor);
    }
  }

  // gloo has neither AVG nor PREMUL_SUM: each is a sum between two factors.
  std::pair<double, double> factors(const c10d::ReduceOp& op) const {
    if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
      auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      const at::Tensor& factor = supplement->tensor_factor;
      return {factor.defined() ? factor.item<double>() : supplement->double_factor, 1};
    }
    return {1, op.op_ == c10d::ReduceOp::AVG ? 1.0 / getSize() : 1};
  }
  static c10d::ReduceOp plain(const c10d::ReduceOp& op) {
    bool is_sum = op.op_ == c10d::ReduceOp::AVG || op.op_ == c10d::ReduceOp::PREMUL_SUM;
    return is_sum ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  }

  void check(const std::vector<at::Tensor>& tensors) const {
    auto device = getBoundDeviceId().value_or(device_at(current_device()));
    for (const auto& tensor : tensors) {
      TORCH_CHECK_VALUE(tensor.is_privateuseone(), "simccl: tensors must be on a sim device, not ", tensor.device());
      TORCH_CHECK_VALUE(
          tensor.device() == device, "simccl: a tensor on ", tensor.device(), " in a group of ", device);
      TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), "simccl: tensors must be contiguous");
    }
  }

  c10::intrusive_ptr<c10d::Work> enqueue(
      c10d::OpType type, const std::vector<at::Tensor>& tensors, Operation operation) {
    check(tensors);
    if (!is_coalescing_) {
      return submit(type, tensors, {std::move(operation)});
    }
    coalesces_messages_ = coalesces_messages_ || is_message(type);
    coalesced_.push_back(std::move(operation));
    coalesced_tensors_.insert(coalesced_tensors_.end(), tensors.begin(), tensors.end());
    return nullptr;
  }

  static bool is_message(c10d::OpType type) {
    return type == c10d::OpType::SEND || type == c10d::OpType::RECV;
  }

  c10::intrusive_ptr<c10d::Work> submit(
      c10d::OpType type, std::vector<at::Tensor> tensors, std::vector<Operation> operations) {
    bool is_messages = std::exchange(coalesces_messages_, false) || is_message(type);
    TORCH_CHECK_VALUE(
        sequence_ > 0 || !is_messages || getSize() == 1,
        "simccl: the first operation of a group is one of all its ranks, not messages: NCCL leaves that undefined");
    auto index = tensors.empty() ? getBoundDeviceId().value_or(device_at(current_device())).index()
                                 : tensors[0].device().index();
    if (queue_ == nullptr) {
      stream_ = c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getNewStream(device_at(index));
      queue_ = &queue_of(*stream_);
    }
    TORCH_CHECK_WITH(DistBackendError, !*has_failed_, "simccl: the communicator failed in an earlier collective");
    c10::Event event(c10::DeviceType::PrivateUse1);
    event.record(current_stream(index));
    event.block(*stream_);
    for (const auto& tensor : tensors) {
      record_stream(tensor.storage().data_ptr(), *stream_);
    }
    ++sequence_;
    auto result = std::make_shared<Work::Result>();
    auto position = queue_->push([operations = std::move(operations), result, failed = has_failed_] {
      delay(collective_delay_us);
      run(operations, *result, *failed);
    });
    return c10::make_intrusive<Work>(getRank(), type, index, *queue_, position, std::move(tensors), result);
  }

  static void run(const std::vector<Operation>& operations, Work::Result& result, std::atomic<bool>& failed) {
    try {
      Started all;
      for (const auto& operation : operations) {
        auto started = operation.start();
        all.insert(all.end(), started.begin(), started.end());
      }
      for (const auto& work : all) {
        work->wait();
      }
      for (const auto& operation : operations) {
        if (operation.finish) {
          operation.finish();
        }
      }
    } catch (const std::exception& error) {
      failed = true;
      auto* known = dynamic_cast<const c10::Error*>(&error);
      try {
        TORCH_CHECK_WITH(
            DistBackendError, false, "simccl: ", known ? known->what_without_backtrace() : error.what());
      } catch (...) {
        std::lock_guard<std::mutex> lock(result.mutex);
        result.error = std::current_exception();
      }
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  Create create_;
  std::optional<c10::Stream> stream_;
  Queue* queue_ = nullptr;
  uint64_t sequence_ = 0;
  std::shared_ptr<std::atomic<bool>> has_failed_ = std::make_shared<std::atomic<bool>>(false);
  bool is_coalescing_ = false;
  bool coalesces_messages_ = false;
  std::vector<Operation> coalesced_;
  std::vector<at::Tensor> coalesced_tensors_;
};

} // namespace

void bind_collectives(py::module& m) {
  py::class_<Simccl, c10::intrusive_ptr<Simccl>, c10d::Backend>(m, "Simccl")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, Simccl::Create>())
      // What torch hands to a split; without them each backend takes its own.
      .def_property_readonly("options", [](const Simccl&) { return py::none(); });
}

} // namespace sim
