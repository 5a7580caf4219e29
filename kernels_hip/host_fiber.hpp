// Fibers: contexts of execution that switch among themselves within one system thread.
//
// On x86-64 a switch is a dozen instructions. Elsewhere (or with COLDTUNE_PORTABLE_FIBERS) it is _setjmp and _longjmp.
// AddressSanitizer is told of every switch, so that it knows which stack it looks at.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#define COLDTUNE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define COLDTUNE_ASAN 1
#endif
#endif
#ifdef COLDTUNE_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) || !defined(__LP64__)
#define COLDTUNE_PORTABLE_FIBERS 1
#endif
#ifdef COLDTUNE_PORTABLE_FIBERS
#include <setjmp.h>
#include <ucontext.h>
#endif

namespace coldtune {

#ifdef COLDTUNE_ASAN
constexpr std::size_t STACK_BYTES = 512 * 1024;
#else
constexpr std::size_t STACK_BYTES = 128 * 1024;
#endif
// Below all stacks, so that the lowest cannot run over into foreign memory. Between stacks a mark is enough.
constexpr std::size_t GUARD_BYTES = 64 * 1024;
constexpr std::uint64_t STACK_MARK = 0x9d1c5a7be3f08246u;

// A suspended flow of execution: a fiber, or the system thread that runs them.
struct Context {
#ifdef COLDTUNE_PORTABLE_FIBERS
  jmp_buf place;
  ucontext_t origin;
  bool fresh = false;
#else
  void* stack = nullptr;
  void* resume = nullptr;
  void* frame = nullptr;
  void* base = nullptr;
#endif
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  void* fake = nullptr;

  // Start anew on a stack; what ran there before is forgotten. `main` never returns.
  void start(char* low, std::size_t size, std::size_t shift, void (*main)()) {
    bottom = low;
    bytes = size;
    *reinterpret_cast<std::uint64_t*>(low) = STACK_MARK;
#ifdef COLDTUNE_ASAN
    __asan_unpoison_memory_region(low, size);
#endif
#ifdef COLDTUNE_PORTABLE_FIBERS
    fresh = true;
    getcontext(&origin);
    origin.uc_stack.ss_sp = low;
    origin.uc_stack.ss_size = size - shift;
    origin.uc_link = nullptr;
    makecontext(&origin, main, 0);
#else
    // As behind a call: 8 below a multiple of 16, with a return address that ends any walk over the frames.
    std::uintptr_t top = (reinterpret_cast<std::uintptr_t>(low) + size - shift) & ~std::uintptr_t{15};
    top -= 8;
    *reinterpret_cast<std::uintptr_t*>(top) = 0;
    stack = reinterpret_cast<void*>(top);
    resume = reinterpret_cast<void*>(main);
    frame = base = nullptr;
#endif
  }

  // True while the lowest word of the stack is as `start` left it.
  bool intact() const { return *static_cast<const std::uint64_t*>(bottom) == STACK_MARK; }
};

#ifdef COLDTUNE_PORTABLE_FIBERS
inline void swap(Context& from, Context& to) {
  if (_setjmp(from.place) != 0) return;
  if (to.fresh) {
    to.fresh = false;
    setcontext(&to.origin);
  }
  _longjmp(to.place, 1);
}
#else
#ifdef __AVX512F__
#define COLDTUNE_WIDE_REGISTERS                                                                                      \
  , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", \
      "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7"
#else
#define COLDTUNE_WIDE_REGISTERS
#endif
// Every register but the stack, frame and base pointer is given up here, so the compiler saves what it needs. Not
// inlined, so that all switches jump from one place, whose target the processor predicts well.
__attribute__((noinline)) inline void swap(Context& from, Context& to) {
  Context* out = &from;
  Context* in = &to;
  static_assert(offsetof(Context, base) == 24, "the offsets below are those of Context");
  asm volatile(
      "leaq 1f(%%rip), %%rax\n\t"
      "movq %%rsp, 0(%%rdi)\n\t"
      "movq %%rax, 8(%%rdi)\n\t"
      "movq %%rbp, 16(%%rdi)\n\t"
      "movq %%rbx, 24(%%rdi)\n\t"
      "movq 0(%%rsi), %%rsp\n\t"
      "movq 16(%%rsi), %%rbp\n\t"
      "movq 24(%%rsi), %%rbx\n\t"
      "jmpq *8(%%rsi)\n"
      "1:\n\t"
      : "+D"(out), "+S"(in)
      :
      : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc", "xmm0", "xmm1",
        "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14",
        "xmm15" COLDTUNE_WIDE_REGISTERS);
}
#endif

// Leave `from` for `to`; returns when something switches back to `from`.
inline void switch_to(Context& from, Context& to) {
#ifdef COLDTUNE_ASAN
  __sanitizer_start_switch_fiber(&from.fake, to.bottom, to.bytes);
  swap(from, to);
  __sanitizer_finish_switch_fiber(from.fake, nullptr, nullptr);
#else
  swap(from, to);
#endif
}

// The first thing a fiber does. `thread` is the context of the system thread, whose stack it learns.
inline void entered(Context& thread) {
#ifdef COLDTUNE_ASAN
  const void* bottom = nullptr;
  std::size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (thread.bottom == nullptr) {
    thread.bottom = bottom;
    thread.bytes = bytes;
  }
#else
  (void)thread;
#endif
}

// Memory for the stacks of many fibers. Pages are taken when they are touched.
class Stacks {
 public:
  Stacks() = default;
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  ~Stacks() { clear(); }

  bool reserve(std::size_t count) {
    clear();
    const std::size_t bytes = GUARD_BYTES + count * STACK_BYTES;
    void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return false;
    memory_ = static_cast<char*>(got);
    bytes_ = bytes;
    return mprotect(memory_, GUARD_BYTES, PROT_NONE) == 0;
  }
  char* low(std::size_t i) const { return memory_ + GUARD_BYTES + i * STACK_BYTES; }
  // Stacks that all began at the same offset would fight for the same few lines of the cache.
  static std::size_t shift(std::size_t i) { return i * 832 % 16384; }

 private:
  void clear() {
    if (memory_ == nullptr) return;
#ifdef COLDTUNE_ASAN
    __asan_unpoison_memory_region(memory_, bytes_);
#endif
    munmap(memory_, bytes_);
    memory_ = nullptr;
  }
  char* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace coldtune
