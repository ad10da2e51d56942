// Kernel parameters and shared helpers. `launch/params.rs` has the same structures.
//
// The source is CUDA C++ without includes of its own, barriers, shared memory or atomics, so that it also runs as plain
// loops on a host. Blocks are one-dimensional.

#pragma once

// A kernel, and its variant with a list that is passed with the launch. `KERNELS` begins the body of both, where the
// parameters are `p`; `list` is null in the first.
#ifndef KERNEL
#define KERNEL(name, Params) extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Params p)
#endif

typedef long long i64;
typedef unsigned long long u64;
typedef int i32;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

enum { BLOCK = 256, WORDS_PER_LANE = 4, ELEMENTS_PER_LANE = 8 };

/// A divisor of numbers below 2^31, as a factor: `number / by` is `number * factor >> shift`.
///
/// `shift` is 31 + l for the smallest l with `by <= 2^l`, and `factor` is 2^shift / `by`, rounded up. So `factor * by`
/// exceeds 2^shift by less than 2^l, too little to change the quotient of such numbers, and `factor` has 32 bits.
struct Divisor {
    u32 by;
    u32 factor;
    u32 shift;
};
static_assert(sizeof(Divisor) == 12, "as launch/params.rs has it");

/// A row divided among 2^`lane_bits` threads, the lanes. Each lane does one piece at a time.
struct Split {
    Divisor pieces;
    u32 lane_bits;
};
static_assert(sizeof(Split) == 16, "as launch/params.rs has it");

/// An invalid number that a kernel found. It lies in page-locked host memory, which the host may read at any time; of several
/// faults any one may remain. `what` is 0 for none, otherwise the position in the batch, shifted, and one of the kinds.
struct alignas(16) Fault {
    u64 what;
    i64 value;
};
static_assert(sizeof(Fault) == 16, "as launch.rs has it");

enum { FAULT_ROW = 1, FAULT_COLUMN = 2, FAULT_VALUE = 3, FAULT_LAST = 4 };

/// The numbers of a batch: `value + step * i` without data, or those from `value` on in the list that is passed with
/// the launch; otherwise elements of an int32 or int64 tensor, in row-major order, strides in elements.
struct Index {
    const void* data;
    i64 value;
    i64 step;
    /// One of the kinds.
    i32 kind;
    i32 ndim;
    i64 shape[8];
    i64 strides[8];
};
static_assert(sizeof(Index) == 160, "as launch/params.rs has it");

enum { INDEX_NARROW = 0, INDEX_WIDE = 1, INDEX_LISTED = 2 };

/// Parameters of a kernel followed by numbers from the host: `bytes` together, at first the 4 KiB that every driver
/// accepts. A list that is read in place needs no copy, and no memory that must stay valid until the kernel has run.
template <typename Params, i64 bytes = 4096>
struct WithList {
    Params params;
    i32 list[(bytes - sizeof(Params)) / sizeof(i32)];
};

/// Values of K or V to store in a buffer.
struct StorePart {
    u8* target;
    const u8* source;
    i64 words;
    i64 head_stride;
    i64 dim_stride;
    i64 lead_shape[8];
    i64 lead_strides[8];
    Split split;
    /// Elements of a head.
    Divisor dim;
    i32 lead_ndim;
    i32 way;
    i32 word;
    i32 source_dtype;
    i32 target_dtype;
    i32 element_bytes;
    /// Whether the elements of a lane are contiguous and aligned, in the source and in the target.
    i32 is_run;
    /// The divisor of values that become 8-bit floats, and 1 / `divisor`, or 0 where `divide` of
    /// convert.cuh must not be used.
    float divisor;
    float reciprocal;
};
static_assert(sizeof(StorePart) == 232, "as launch/params.rs has it");

/// How values are stored: copied as words, converted, or copied element by element.
enum { WAY_WORDS = 0, WAY_CONVERT = 1, WAY_ELEMENTS = 2 };

/// The dtypes of conversions.
enum { DTYPE_F64 = 0, DTYPE_F32 = 1, DTYPE_F16 = 2, DTYPE_BF16 = 3, DTYPE_F8E4M3 = 4, DTYPE_F8E5M2 = 5 };

struct StoreParams {
    Index indices;
    i64 count;
    i64 rows;
    Fault* fault;
    /// Blocks of the first part; the rest belong to the second.
    i64 first_blocks;
    StorePart parts[2];
};
static_assert(sizeof(StoreParams) == 656, "as launch/params.rs has it");

struct GatherPart {
    const u8* source;
    u8* target;
    i64 words;
    Split split;
    i32 word;
    i32 unused;
};

struct GatherParams {
    Index indices;
    i64 count;
    i64 rows;
    Fault* fault;
    /// Blocks of the first part; the rest belong to the second.
    i64 first_blocks;
    GatherPart parts[2];
};
static_assert(sizeof(GatherParams) == 288, "as launch/params.rs has it");

/// Equal buffers, `step` bytes apart.
struct RowGroup {
    u8* base;
    i64 step;
    i64 words;
    Split split;
    /// Blocks of each buffer.
    Divisor blocks;
    u32 buffers;
    i32 word;
    i32 unused;
};
static_assert(sizeof(RowGroup) == 64, "as launch/params.rs has it");

struct MoveParams {
    Index target;
    Index source;
    i64 count;
    i64 rows;
    Fault* fault;
    RowGroup groups[2];
};
static_assert(sizeof(MoveParams) == 472, "as launch/params.rs has it");

/// `steps` is null when they are passed with the launch.
struct OrderParams {
    const i32* steps;
    i64 count;
    RowGroup groups[2];
};
static_assert(sizeof(OrderParams) == 144, "as launch/params.rs has it");

struct ZeroParams {
    Index indices;
    i64 count;
    i64 rows;
    Fault* fault;
    RowGroup groups[2];
};
static_assert(sizeof(ZeroParams) == 312, "as launch/params.rs has it");

/// Where the pages of a group are copied to. Its pages are rows that lie `source_stride` apart in each buffer of the
/// source, and `stride` apart in each of the target; buffers of the target are `step` bytes apart.
struct PageTarget {
    u8* base;
    i64 step;
    i64 stride;
    i64 source_stride;
};

/// Passed with the launch are `count` pairs: a page of the source and the page of the target that it is copied to. The
/// blocks of a launch take turns at `blocks` blocks of work.
struct PagesParams {
    i64 count;
    i64 blocks;
    RowGroup groups[2];
    PageTarget targets[2];
};
static_assert(sizeof(PagesParams) == 208, "as launch/params.rs has it");

struct PointsParams {
    i32* table;
    i64 rows;
    i64 columns;
    Index row;
    Index column;
    Index value;
    i64 count;
    i32* echo;
    Fault* fault;
};
static_assert(sizeof(PointsParams) == 528, "as launch/params.rs has it");

/// Without `rows`, they are passed with the launch, followed by `indptr`; there are no starts and values then.
struct RaggedParams {
    i32* table;
    i64 columns;
    const i32* rows;
    const i32* starts;
    const i32* indptr;
    const i32* values;
    i64 count;
};
static_assert(sizeof(RaggedParams) == 56, "as launch/params.rs has it");

struct KvIndicesParams {
    const i32* table;
    i64 rows;
    i64 columns;
    Index row;
    Index indptr;
    i32* out;
    i64 capacity;
    i64 count;
    Fault* fault;
};
static_assert(sizeof(KvIndicesParams) == 376, "as launch/params.rs has it");

/// One request of a plan. Positions from `start` on go into the table; those from `prefix` on are new tokens. Its pages
/// from the page of `start` on are `pages[page_begin..]`.
struct PlanRequest {
    i32 row;
    i32 start;
    i32 prefix;
    i32 seq;
    i32 qo_begin;
    i32 kv_begin;
    i32 page_begin;
    /// Entries of its line of the block table before this one are up to date, and from `block_until` on they are 0.
    i32 block_from;
    i32 block_until;
};
static_assert(sizeof(PlanRequest) == 36, "as pool/batch_planner.rs has it");

/// Without `requests`, they are passed with the launch, followed by the pages of all of them.
struct PlanParams {
    const PlanRequest* requests;
    const i32* pages;
    i32* table;
    i64 columns;
    i32* out_cache_loc;
    i32* positions;
    i64* slot_mapping;
    i32* req_pool_indices;
    i32* seq_lens;
    i32* qo_indptr;
    i32* kv_indptr;
    i32* kv_last_page_len;
    i32* kv_indices;
    i32* block_table;
    i32 page_size;
    i32 width;
    i32 batch;
    i32 padded_batch;
    i32 tokens;
    i32 kv_len;
};
static_assert(sizeof(PlanParams) == 136, "as launch/params.rs has it");

/// Requests `first..first + count` of a batch that grows. Passed with the launch are, for each, the slots that are taken in
/// its last page, and then where its new slots begin in `out`, with the end of all.
struct ContinueParams {
    void* out;
    Index last_loc;
    i64 first;
    i64 count;
    /// The number of slots, without the padding page.
    i64 slots;
    Fault* fault;
    i32 page_size;
    /// Whether `out` is int64.
    i32 is_wide;
};
static_assert(sizeof(ContinueParams) == 208, "as launch/params.rs has it");

struct ReadParams {
    Index from;
    i64* out;
    i64 count;
};
static_assert(sizeof(ReadParams) == 176, "as launch/params.rs has it");

#define KERNELS(name, Params)                                                                                        \
    static_assert(sizeof(WithList<Params>) == 4096, "as launch/params.rs has it");                                   \
    static __device__ __forceinline__ void name##_body(const Params& p, const i32* list);                            \
    KERNEL(name, Params) { name##_body(p, nullptr); }                                                                \
    KERNEL(name##_listed, WithList<Params>) { name##_body(p.params, p.list); }                                       \
    static __device__ __forceinline__ void name##_body(const Params& p, const i32* list)

/// The number of this thread in the first dimension of the grid.
__device__ __forceinline__ i64 thread_number() {
    return i64(blockIdx.x) * BLOCK + threadIdx.x;
}

/// `number / divisor.by`, for a number below 2^31.
__device__ __forceinline__ u32 quotient(u32 number, const Divisor& divisor) {
    return u32(u64(number) * divisor.factor >> divisor.shift);
}

/// `number / by`; most numbers fit 32 bits, which are divided several times faster.
__device__ __forceinline__ i64 quotient(i64 number, i64 by) {
    if ((u64(number) | u64(by)) >> 32 == 0) {
        return i64(u32(number) / u32(by));
    }
    return number / by;
}

/// The offset, in elements, of element `i` of a tensor in row-major order.
__device__ __forceinline__ i64 offset_of(i64 i, i32 ndim, const i64* shape, const i64* strides) {
    i64 offset = 0;
#pragma unroll 1
    for (i32 axis = ndim - 1; axis > 0; axis--) {
        i64 rest = quotient(i, shape[axis]);
        offset += (i - rest * shape[axis]) * strides[axis];
        i = rest;
    }
    return offset + i * strides[0];
}

/// Number `i` of a batch; `list` is passed with the launch, or null.
__device__ __forceinline__ i64 number(const Index& index, i64 i, const i32* list) {
    if (index.data == nullptr) {
        if (list != nullptr && index.kind == INDEX_LISTED) {
            return list[index.value + i];
        }
        return index.value + index.step * i;
    }
    i64 at = offset_of(i, index.ndim, index.shape, index.strides);
    bool is_wide = index.kind == INDEX_WIDE;
    return is_wide ? static_cast<const i64*>(index.data)[at] : i64(static_cast<const i32*>(index.data)[at]);
}

__device__ __forceinline__ void note(Fault* fault, i32 kind, i64 position, i64 value) {
    // One store of 16 bytes, so that the two numbers belong together.
    *fault = Fault{u64(position) << 8 | u64(kind), value};
}

__device__ __forceinline__ bool within(i64 number, i64 bound) {
    return u64(number) < u64(bound);
}
