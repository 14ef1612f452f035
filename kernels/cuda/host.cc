// The compiler's access callbacks (those of -fsanitize=thread, answered by us, not by libtsan), and
// the copies that builtins would make unseen. Compiled without the callbacks.

extern "C" {
void emu_access(unsigned long at, unsigned long bytes, int write, int align, unsigned long pc);

#define PC ((unsigned long)__builtin_return_address(0))
#define ACCESS(n)                                                                                       \
    void __tsan_read##n(void* p) { emu_access((unsigned long)p, n, 0, n, PC); }                         \
    void __tsan_write##n(void* p) { emu_access((unsigned long)p, n, 1, n, PC); }                        \
    void __tsan_unaligned_read##n(void* p) { emu_access((unsigned long)p, n, 0, 1, PC); }               \
    void __tsan_unaligned_write##n(void* p) { emu_access((unsigned long)p, n, 1, 1, PC); }              \
    void __tsan_volatile_read##n(void* p) { emu_access((unsigned long)p, n, 0, n, PC); }                \
    void __tsan_volatile_write##n(void* p) { emu_access((unsigned long)p, n, 1, n, PC); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

void __tsan_read_range(void* p, unsigned long n) { emu_access((unsigned long)p, n, 0, 1, PC); }
void __tsan_write_range(void* p, unsigned long n) { emu_access((unsigned long)p, n, 1, 1, PC); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

void* emu_memcpy(void* to, const void* from, unsigned long n) {
    emu_access((unsigned long)from, n, 0, 1, PC);
    emu_access((unsigned long)to, n, 1, 1, PC);
    return __builtin_memcpy(to, from, n);
}
void* emu_memset(void* to, int value, unsigned long n) {
    emu_access((unsigned long)to, n, 1, 1, PC);
    return __builtin_memset(to, value, n);
}
}
