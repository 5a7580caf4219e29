// Launches on the host: worker threads take blocks from the grid, one at a time, and run them as fibers.
//
// Worker threads, with their fibers, wait for the next launch and end when none comes for a while, so that a process that
// has loaded many kernels does not keep threads for all of them. The library must stay mapped once it has launched.
#pragma once
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>

#include "host_block.hpp"

namespace coldtune {

constexpr unsigned MAX_THREADS = 1024;
#ifndef COLDTUNE_IDLE_MS
#define COLDTUNE_IDLE_MS 2000
#endif
constexpr auto IDLE_LIMIT = std::chrono::milliseconds(COLDTUNE_IDLE_MS);

class Pool {
 public:
  // Run every block of a launch on `threads` workers; the text of the first error, or an empty one.
  std::string run(const Launch& launch, unsigned threads) {
    const std::lock_guard<std::mutex> one_launch(launching_);
    std::unique_lock<std::mutex> lock(mutex_);
    const std::uint64_t blocks = std::uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
    const unsigned wanted = static_cast<unsigned>(threads < blocks ? threads : blocks);
    while (idle_ < wanted) {
      try {
        std::thread(&Pool::work, this).detach();
      } catch (const std::exception& error) {
        return std::string("cannot start a worker thread: ") + error.what();
      }
      ++idle_;
    }
    launch_ = &launch;
    blocks_ = blocks;
    next_.store(0, std::memory_order_relaxed);
    failed_.store(false, std::memory_order_relaxed);
    error_.clear();
    running_ = tickets_ = wanted;
    wake_.notify_all();
    ended_.wait(lock, [this] { return running_ == 0; });
    return error_;
  }

 private:
  std::mutex launching_, mutex_;
  std::condition_variable wake_, ended_;
  unsigned idle_ = 0, tickets_ = 0, running_ = 0;
  const Launch* launch_ = nullptr;
  std::uint64_t blocks_ = 0;
  std::atomic<std::uint64_t> next_{0};
  std::atomic<bool> failed_{false};
  std::string error_;

  void work() {
    Block mine;
    block = &mine;
    std::unique_lock<std::mutex> lock(mutex_);
    while (wake_.wait_for(lock, IDLE_LIMIT, [this] { return tickets_ > 0; })) {
      --tickets_;
      --idle_;
      lock.unlock();
      const bool good = take_blocks(mine);
      lock.lock();
      if (!good && error_.empty()) error_ = mine.error();
      ++idle_;
      if (--running_ == 0) ended_.notify_one();
    }
    --idle_;
    block = nullptr;
  }

  bool take_blocks(Block& mine) {
    const Launch& launch = *launch_;
    if (!mine.prepare(launch)) return give_up();
    for (std::uint64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < blocks_;) {
      if (failed_.load(std::memory_order_relaxed)) return true;
      const std::uint64_t row = i / launch.grid.x;
      const Index which = {static_cast<unsigned>(i % launch.grid.x), static_cast<unsigned>(row % launch.grid.y),
                           static_cast<unsigned>(row / launch.grid.y)};
      if (!mine.run(which)) return give_up();
    }
    return true;
  }

  bool give_up() {
    failed_.store(true, std::memory_order_relaxed);
    return false;
  }
};

// The pool of this process; a forked child has none of its parent's threads and gets a pool of its own. Never deleted:
// its threads may outlive everything else.
inline Pool& pool() {
  static std::mutex mutex;
  static Pool* current = nullptr;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (current == nullptr || owner != getpid()) {
    current = new Pool;
    owner = getpid();
  }
  return *current;
}

inline std::string& last_error() {
  static thread_local std::string text;
  return text;
}

template <auto KERNEL>
struct Entry;
template <typename... Arguments, void (*KERNEL)(Arguments...)>
struct Entry<KERNEL> {
  static void invoke(void** arguments) { call(arguments, std::index_sequence_for<Arguments...>{}); }
  template <std::size_t... I>
  static void call(void** arguments, std::index_sequence<I...>) {
    (void)arguments;
    KERNEL(*static_cast<std::remove_reference_t<Arguments>*>(arguments[I])...);
  }
};

// 0, or 1 with a text in last_error().
inline int launch(void (*invoke)(void**), Index grid, Index size, unsigned shared_bytes, void** arguments, int threads) {
  const std::uint64_t count = std::uint64_t{size.x} * size.y * size.z;
  if (count == 0 || count > MAX_THREADS || grid.x == 0 || grid.y == 0 || grid.z == 0) {
    last_error() = "a launch needs at least one block, of 1 to " + std::to_string(MAX_THREADS) + " threads";
    return 1;
  }
  const Launch what = {invoke, grid, size, shared_bytes, arguments};
  last_error() = pool().run(what, threads < 1 ? 1u : static_cast<unsigned>(threads));
  return last_error().empty() ? 0 : 1;
}

}  // namespace coldtune

extern "C" __attribute__((visibility("default"), used)) inline const char* coldtune_error() {
  return coldtune::last_error().c_str();
}

// Export a kernel; a launch takes the address of each argument.
#define COLDTUNE_EXPORT(kernel)                                                                                     \
  extern "C" __attribute__((visibility("default"))) int coldtune_launch_##kernel(                                   \
      unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes,          \
      void** arguments, int threads) {                                                                              \
    return ::coldtune::launch(&::coldtune::Entry<&kernel>::invoke, {gx, gy, gz}, {bx, by, bz}, shared_bytes, arguments, \
                              threads);                                                                             \
  }
