// For the host: how a kernel is called with `void**` arguments, as cuLaunchKernel takes them.
// The build script writes one table per .cu file with the kernels it finds there.
#pragma once
#include <utility>

struct EmuKernel {
    const char* name;
    void (*call)(void**);
    unsigned args;
    const unsigned* bytes;  // of each argument
    unsigned max_threads;   // __launch_bounds__, or 1024
};

struct EmuModule {
    const char* name;
    const EmuKernel* kernels;
    unsigned count;
};

template <auto F> struct EmuCallOf;
template <class... A, void (*F)(A...)> struct EmuCallOf<F> {
    static constexpr unsigned args = sizeof...(A);
    static constexpr unsigned bytes[] = {(unsigned)sizeof(A)..., 0};

    template <unsigned long... I>
    __attribute__((no_sanitize("thread"))) static void spread(void** p, std::index_sequence<I...>) {
        F(*(A*)p[I]...);
    }
    __attribute__((no_sanitize("thread"))) static void call(void** p) { spread(p, std::index_sequence_for<A...>()); }
};

#define EMU_KERNEL(name, max_threads) \
    { #name, &EmuCallOf<&name>::call, EmuCallOf<&name>::args, EmuCallOf<&name>::bytes, max_threads }
