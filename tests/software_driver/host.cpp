// The kernels of kvpool as plain loops: what CUDA adds to C++ is defined here, then their sources are included.

#include <cstddef>

#define __device__
#define __global__
#define __host__
#define __restrict__ __restrict
#define __forceinline__ inline __attribute__((always_inline))

// With one rounding, as devices have it.
extern "C" float fmaf(float a, float b, float c) noexcept;

struct Coordinates {
    unsigned x;
    unsigned y;
    unsigned z;
};

// The quickest model of thread-local storage; it is few bytes, so that a library that is opened late may use it.
#define PER_THREAD static thread_local __attribute__((tls_model("initial-exec")))
PER_THREAD Coordinates threadIdx;
PER_THREAD Coordinates blockIdx;
PER_THREAD Coordinates blockDim;
PER_THREAD Coordinates gridDim;

struct Kernel {
    const char* name;
    size_t params_bytes;
    // Where a list of numbers begins in the parameter: only before it are there addresses.
    size_t list_begin;
    void (*run)(const void* params, Coordinates grid, Coordinates block);
};

static Kernel kernels[64];
static size_t kernel_count = 0;

struct Registration {
    Registration(const Kernel& kernel) {
        if (kernel_count < sizeof kernels / sizeof *kernels) {
            kernels[kernel_count++] = kernel;
        }
    }
};

// What decides the order of the next launch; 0 for the last first.
static unsigned long long seed = 0;

/// The numbers below `count`, each once, in an order that `salt` decides: steps of one length around a circle.
struct Order {
    unsigned long long count;
    unsigned long long at;
    unsigned long long step;

    Order(unsigned long long count, unsigned long long salt) : count(count), at(count - 1), step(count - 1) {
        if (seed == 0) {
            return;
        }
        unsigned long long mixed = seed ^ (salt + 1) * 0xBF58476D1CE4E5B9;
        mixed = (mixed ^ mixed >> 30) * 0x94D049BB133111EB;
        mixed ^= mixed >> 31;
        at = mixed % count;
        step = (mixed >> 32) % count;
        while (!reaches_all()) {
            step = (step + 1) % count;
        }
    }

    bool reaches_all() const {
        unsigned long long a = count, b = step;
        while (b != 0) {
            const unsigned long long rest = a % b;
            a = b;
            b = rest;
        }
        return a == 1;
    }

    unsigned long long next() {
        const unsigned long long now = at;
        at += step;
        at -= at >= count ? count : 0;
        return now;
    }
};

/// Calls `body` for each thread of a grid, in no order that anything may rely on.
template <typename Body>
static inline void for_each_thread(Coordinates grid, Coordinates block, Body body) {
    gridDim = grid;
    blockDim = block;
    Order blocks(static_cast<unsigned long long>(grid.x) * grid.y, 0);
    for (unsigned long long left = blocks.count; left > 0; left--) {
        const unsigned long long number = blocks.next();
        blockIdx = {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x), 0};
        Order threads(block.x, number + 1);
        for (unsigned thread = block.x; thread > 0; thread--) {
            threadIdx = {static_cast<unsigned>(threads.next()), 0, 0};
            body();
        }
    }
}

#define KERNEL_WITHIN(bounds, name, Params)                                                                          \
    static inline void name(const Params& p);                                                                        \
    static void name##_run(const void* params, Coordinates grid, Coordinates block) {                                \
        const Params& p = *static_cast<const Params*>(params);                                                       \
        for_each_thread(grid, block, [&p] { name(p); });                                                             \
    }                                                                                                                \
    static const Registration name##_registration({#name, sizeof(Params), list_begin<Params>, name##_run});          \
    static inline void name(const Params& p)

#include "params.cuh"

template <typename Params>
static constexpr size_t list_begin = sizeof(Params);
template <typename Params, i64 bytes>
static constexpr size_t list_begin<WithList<Params, bytes>> = sizeof(Params);

#include "plan.cu"
#include "plan_long.cu"
#include "rows.cu"
#include "table.cu"

extern "C" size_t software_kernels(const Kernel** found) {
    *found = kernels;
    return kernel_count;
}

// What the kernels rest on, for tests that try it with more values than a kernel could be given.

extern "C" float software_divide(float value, float divisor, float reciprocal) {
    return divide(value, divisor, reciprocal);
}

template <typename Type, typename Numbers>
static void store_all(Numbers numbers, const float* values, float divisor, float reciprocal, u32* bytes) {
    if (!store_quickly<Type>(values, divisor, reciprocal, bytes)) {
        store_slowly<Type>(numbers, divisor, bytes);
    }
}

/// Sixteen values as 8-bit floats, four in each of `bytes`, as the kernels store them.
extern "C" void
software_store_sixteen(i32 dtype, const float* values, float divisor, float reciprocal, u32* bytes) {
    Floats floats;
    for (int i = 0; i < 16; i++) {
        floats.held[i] = values[i];
    }
    dtype == DTYPE_F8E4M3 ? store_all<F8E4M3>(floats, values, divisor, reciprocal, bytes)
                          : store_all<F8E5M2>(floats, values, divisor, reciprocal, bytes);
}

/// A value as an 8-bit float, by the definition.
extern "C" u8 software_store_one(i32 dtype, float value) {
    return dtype == DTYPE_F8E4M3 ? F8E4M3::store(value) : F8E5M2::store(value);
}

/// The value of an 8-bit float.
extern "C" float software_load(i32 dtype, u8 bits) {
    return dtype == DTYPE_F8E4M3 ? F8E4M3::load(bits) : F8E5M2::load(bits);
}

extern "C" void software_order(unsigned long long next) { seed = next; }

/// The order in which `count` threads of the first block run.
extern "C" void software_threads(unsigned count, unsigned* found) {
    Order threads(count, 1);
    for (unsigned at = 0; at < count; at++) {
        found[at] = static_cast<unsigned>(threads.next());
    }
}
