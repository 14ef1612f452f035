// The compiler's access callbacks (those of -fsanitize=thread, answered by us, not by libtsan), and
// the copies that builtins would make unseen. Compiled without the callbacks.

extern "C" {
void emu_access(unsigned long at, unsigned long bytes, int write, int align, unsigned long pc);

// The stack of the fiber that runs: a thread's own memory, which nobody asks about.
static thread_local unsigned long stack_low, stack_bytes;
void emu_stack(unsigned long low, unsigned long bytes) {
    stack_low = low;
    stack_bytes = bytes;
}

static inline void touch(const void* p, unsigned long bytes, int write, int align, unsigned long pc) {
    if ((unsigned long)p - stack_low >= stack_bytes) emu_access((unsigned long)p, bytes, write, align, pc);
}

#define PC ((unsigned long)__builtin_return_address(0))
#define ACCESS(n)                                                                                      \
    void __tsan_read##n(void* p) { touch(p, n, 0, n, PC); }                                            \
    void __tsan_write##n(void* p) { touch(p, n, 1, n, PC); }                                           \
    void __tsan_unaligned_read##n(void* p) { touch(p, n, 0, 1, PC); }                                  \
    void __tsan_unaligned_write##n(void* p) { touch(p, n, 1, 1, PC); }                                 \
    void __tsan_volatile_read##n(void* p) { touch(p, n, 0, n, PC); }                                   \
    void __tsan_volatile_write##n(void* p) { touch(p, n, 1, n, PC); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

void __tsan_read_range(void* p, unsigned long n) { touch(p, n, 0, 1, PC); }
void __tsan_write_range(void* p, unsigned long n) { touch(p, n, 1, 1, PC); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

void* emu_memcpy(void* to, const void* from, unsigned long n) {
    touch(from, n, 0, 1, PC);
    touch(to, n, 1, 1, PC);
    return __builtin_memcpy(to, from, n);
}
void* emu_memset(void* to, int value, unsigned long n) {
    touch(to, n, 1, 1, PC);
    return __builtin_memset(to, value, n);
}
}
