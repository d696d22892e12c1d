// A stream of the simulated device: a thread with a queue of tasks.

#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <thread>

namespace sim {

// Each asynchronous copy, and each collective, takes so much longer.
inline std::atomic<int64_t> copy_delay_us{0};
inline std::atomic<int64_t> collective_delay_us{0};

// What the host has done since the process began.
struct Counts {
  std::atomic<int64_t> launches{0}; // kernels, and copies of a device
  std::atomic<int64_t> waits{0}; // for a stream
  std::atomic<int64_t> drains{0}; // waits for all that a stream then held: what follows finds it idle
};
inline Counts counts;
inline thread_local bool in_kernel = false; // one that blocks, by copies and waits that no GPU's kernel has

inline void delay(int64_t us) {
  std::this_thread::sleep_for(std::chrono::microseconds(us));
}

// A stream: a thread that runs tasks in order. Streams live as long as the process.
class Queue {
 public:
  using Task = std::function<void()>;

  Queue() {
    std::thread([this] { run(); }).detach();
  }

  // Returns the task's position: the number of tasks that have run when it has.
  uint64_t push(Task task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
    return ++pushed_;
  }

  uint64_t pushed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return pushed_;
  }

  bool has_run(uint64_t position) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= position;
  }

  // Blocks the calling thread until a task has run. An error of this stream is raised by the first host that waits.
  void wait(uint64_t position) {
    std::unique_lock<std::mutex> lock(mutex_);
    counts.waits += !in_kernel;
    counts.drains += !in_kernel && position == pushed_;
    changed_.wait(lock, [&] { return done_ >= position; });
    if (error_) {
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

  // Blocks a stream, which has no use for another stream's error.
  void wait_as_stream(uint64_t position) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= position; });
  }

  void fail(std::exception_ptr error) {
    std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::move(error);
  }

 private:
  void run() {
    at::NoGradGuard no_grad;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      {
        Task task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        try {
          task();
        } catch (...) {
          fail(std::current_exception());
        }
      } // what the task held goes before the host is told
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t pushed_ = 0;
  uint64_t done_ = 0;
  std::exception_ptr error_;
};

} // namespace sim
