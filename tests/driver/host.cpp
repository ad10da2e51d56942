// The kernels of kvpool as plain loops: what CUDA adds to C++ is defined here, then their sources are included.

#include <cstddef>

#define __device__
#define __forceinline__ inline __attribute__((always_inline))

struct Coordinates {
    unsigned x;
    unsigned y;
};

static thread_local Coordinates threadIdx, blockIdx, blockDim, gridDim;

struct Kernel {
    const char* name;
    size_t params_bytes;
    void (*thread)(const void* params);
};

static Kernel kernels[32];
static size_t kernel_count = 0;

struct Registration {
    Registration(const char* name, size_t params_bytes, void (*thread)(const void*)) {
        kernels[kernel_count++] = {name, params_bytes, thread};
    }
};

#define KERNEL(name, Params)                                                                       \
    static void name(const Params& p);                                                             \
    static void name##_thread(const void* params) { name(*static_cast<const Params*>(params)); }   \
    static const Registration name##_registration(#name, sizeof(Params), name##_thread);           \
    static void name(const Params& p)

#include "rows.cu"
#include "table.cu"

extern "C" size_t software_kernels(const Kernel** found) {
    *found = kernels;
    return kernel_count;
}

/// Runs a kernel thread by thread. Blocks go backwards, so that nothing relies on an order that a GPU does not have.
extern "C" void software_run(const Kernel* kernel, const void* params, unsigned x, unsigned y, unsigned threads) {
    gridDim = {x, y};
    blockDim = {threads, 1};
    for (unsigned j = y; j-- > 0;) {
        for (unsigned i = x; i-- > 0;) {
            blockIdx = {i, j};
            for (unsigned thread = threads; thread-- > 0;) {
                threadIdx = {thread, 0};
                kernel->thread(params);
            }
        }
    }
}
