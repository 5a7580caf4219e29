// One workgroup on the host: its threads are fibers that run in turn, with real barriers for the block and for warps.
//
// A fiber that waits names the generation of the barrier that it waits for, so the next fiber that can go on is found
// without switching to those that cannot. When none can go on, threads wait for one another for ever: an error.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "host_fiber.hpp"

#ifndef WARP
#define WARP 32
#endif

namespace coldtune {

struct Index {
  unsigned x, y, z;
};

constexpr std::size_t EXCHANGE_BYTES = 256;

// All that a launch is; `invoke` calls the kernel with its arguments.
struct Launch {
  void (*invoke)(void** arguments);
  Index grid, size;
  unsigned shared_bytes;
  void** arguments;
};

struct Barrier {
  unsigned generation = 0;
  unsigned arrived = 0;
  unsigned members = 0;
  int line = 0;
};

struct Fiber {
  Context context;
  const unsigned* gate = nullptr;  // waits while *gate == closed
  unsigned closed = 0;
  unsigned phase = 0;  // which of the two exchange buffers the next shuffle uses
  int line = 0;        // where it waits; 0 while it runs
  bool done = false;
  Index index{};
};

class Block;
inline thread_local Block* block = nullptr;

class Block {
 public:
  // What the names of HIP refer to.
  std::vector<Fiber> fibers;
  unsigned current = 0;
  Index index{}, size{}, grid{};
  void* shared = nullptr;

  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { std::free(shared); }

  const std::string& error() const { return error_; }

  // Make ready for the blocks of one launch; false with an error if there is no memory.
  bool prepare(const Launch& launch) {
    launch_ = &launch;
    const bool same = size.x == launch.size.x && size.y == launch.size.y && size.z == launch.size.z;
    size = launch.size;
    grid = launch.grid;
    if (launch.shared_bytes > shared_bytes_) {
      std::free(shared);
      shared_bytes_ = 0;
      shared = std::aligned_alloc(64, (launch.shared_bytes + 63) / 64 * 64);
      if (shared == nullptr) return fail("no memory for the shared memory of a workgroup");
      shared_bytes_ = launch.shared_bytes;
    }
    return same && healthy_ ? true : build();
  }

  // Run one block to its end.
  bool run(Index which) {
    index = which;
    ended_ = 0;
    for (Fiber& fiber : fibers) {
      fiber.gate = &OPEN;
      fiber.closed = 1;
      fiber.phase = 0;
      fiber.line = 0;
      fiber.done = false;
    }
    current = 0;
    switch_to(thread_, fibers[0].context);
    return healthy_;
  }

  int lane() const { return static_cast<int>(current % WARP); }

  void wait_for_block(int line) { wait(whole_, line); }

  // Give `value` to the warp and take what lane `from` gave.
  template <typename T>
  T exchange(T value, int from, int line) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= EXCHANGE_BYTES, "values are copied byte by byte");
    exchange_bytes(&value, sizeof value, from, line);
    return value;
  }

  // Two buffers in turn: whoever is already at the next exchange does not write over what others still read.
  void exchange_bytes(void* value, std::size_t bytes, int from, int line) {
    const unsigned me = current;
    char* const buffer = buffers_[fibers[me].phase].data();
    fibers[me].phase ^= 1;
    std::memcpy(buffer + me * EXCHANGE_BYTES, value, bytes);
    wait(warps_[me / WARP], line);
    const unsigned other = me / WARP * WARP + static_cast<unsigned>(from);
    std::memcpy(value, buffer + (other < count_ ? other : me) * EXCHANGE_BYTES, bytes);
  }

 private:
  static constexpr unsigned OPEN = 0;
  Stacks stacks_;
  Context thread_;
  const Launch* launch_ = nullptr;
  Barrier whole_;
  std::vector<Barrier> warps_;
  std::vector<char> buffers_[2];
  std::string error_;
  std::size_t shared_bytes_ = 0;
  unsigned count_ = 0;
  unsigned ended_ = 0;
  bool healthy_ = false;

  bool fail(const std::string& text) {
    error_ = text;
    healthy_ = false;
    return false;
  }

  // Fibers for the block size; also after an error, which leaves fibers in the middle of a kernel.
  bool build() {
    const unsigned count = size.x * size.y * size.z;
    fibers.assign(count, Fiber{});
    count_ = count;
    if (!stacks_.reserve(count)) return fail("no memory for the stacks of a workgroup's threads");
    whole_ = Barrier{};
    whole_.members = count;
    warps_.assign((count + WARP - 1) / WARP, Barrier{});
    for (std::vector<char>& buffer : buffers_) buffer.assign(count * EXCHANGE_BYTES, 0);
    for (unsigned i = 0; i < count; ++i) {
      fibers[i].index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
      fibers[i].context.start(stacks_.low(i), STACK_BYTES, Stacks::shift(i), fiber_main);
      ++warps_[i / WARP].members;
    }
    healthy_ = true;
    return true;
  }

  // A fiber lives as long as its workgroup's size stays the same, and runs its thread of one block after another.
  static void fiber_main() {
    Block* const self = block;
    entered(self->thread_);
    for (;;) {
      self->launch_->invoke(self->launch_->arguments);
      self->end();
    }
  }

  void end() {
    Fiber& me = fibers[current];
    me.done = true;
    me.gate = &OPEN;
    me.closed = OPEN;
    if (!me.context.intact()) {
      fail("a thread needs more than " + std::to_string(STACK_BYTES / 1024) + " KB of stack");
      switch_to(me.context, thread_);
    } else if (++ended_ == count_) {
      switch_to(me.context, thread_);
    } else {
      next();
    }
  }

  void wait(Barrier& barrier, int line) {
    if (barrier.arrived == 0) barrier.line = line;
    Fiber& me = fibers[current];
    if (barrier.line != line) {
      fail(at() + ": divergent barrier: one thread waits at line " + std::to_string(line) + ", another at line " +
           std::to_string(barrier.line));
      switch_to(me.context, thread_);
    }
    if (++barrier.arrived == barrier.members) {
      barrier.arrived = 0;
      ++barrier.generation;
      return;
    }
    me.gate = &barrier.generation;
    me.closed = barrier.generation;
    me.line = line;
    next();
    fibers[current].line = 0;
  }

  // Switch to the next fiber that can go on; to the system thread, with an error, if there is none.
  void next() {
    const unsigned me = current;
    for (unsigned step = 1; step <= count_; ++step) {
      const unsigned i = me + step < count_ ? me + step : me + step - count_;
      if (*fibers[i].gate == fibers[i].closed) continue;
      if (i == me) return;
      current = i;
      switch_to(fibers[me].context, fibers[i].context);
      return;
    }
    describe_deadlock();
    switch_to(fibers[me].context, thread_);
  }

  void describe_deadlock() {
    unsigned waiting = 0;
    int line = 0;
    for (const Fiber& fiber : fibers) {
      if (fiber.done || fiber.line == 0) continue;
      ++waiting;
      line = fiber.line;
    }
    fail(at() + ": divergent barrier: " + std::to_string(waiting) + " of " + std::to_string(fibers.size()) +
         " threads wait, the last at line " + std::to_string(line) + ", and " + std::to_string(ended_) + " have ended");
  }

  std::string at() const {
    return "block (" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
  }
};

}  // namespace coldtune
