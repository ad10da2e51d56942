// Kernel parameters and shared helpers. `launch/params.rs` has the same structures.
//
// The source is CUDA C++ without includes of its own, barriers, shared memory or atomics, so that it also runs as plain
// loops on a host. Blocks are one-dimensional.

#pragma once

// A kernel, and its variant with a list that is passed with the launch. `KERNELS` begins the body of both, where the
// parameters are `p`; `list` is null in the first. `bounds` are the threads of a block and, where a kernel must not have more
// registers than that, the blocks that share a multiprocessor.
#ifndef KERNEL_WITHIN
#define KERNEL_WITHIN(bounds, name, Params)                                                                          \
    extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ Params p)
#endif
#define KERNEL(name, Params) KERNEL_WITHIN((256), name, Params)

typedef long long i64;
typedef unsigned long long u64;
typedef int i32;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

enum { BLOCK = 256 };

/// What a thread reads before it writes: words of a row, runs of elements or single elements that are stored, or numbers.
enum { WORDS_PER_LANE = 4, RUNS_PER_LANE = 2, ELEMENTS_PER_LANE = 16, NUMBERS_PER_THREAD = 8 };
/// Elements that are read or written together, if they are contiguous.
enum { RUN = ELEMENTS_PER_LANE / RUNS_PER_LANE };

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

/// The numbers of a batch: elements of an int32 or int64 tensor, in row-major order, strides in elements; those from
/// `value` on in the list that is passed with the launch; or `value + step * i`. What most calls need lies together, as it
/// does in the structures below: a multiprocessor reads parameters line by line.
struct Index {
    const void* data;
    i64 value;
    i64 step;
    /// One of the kinds.
    i32 kind;
    i32 ndim;
    i64 strides[8];
    i64 shape[8];
};
static_assert(sizeof(Index) == 160, "as launch/params.rs has it");

/// A number has 64 bits if its kind is odd. The tensors of the last two kinds have several dimensions.
enum {
    INDEX_NARROW = 0,
    INDEX_WIDE = 1,
    INDEX_LISTED = 2,
    INDEX_COMPUTED = 3,
    INDEX_NARROW_TENSOR = 4,
    INDEX_WIDE_TENSOR = 5,
};

/// Parameters of a kernel followed by numbers from the host: `bytes` together, at first the 4 KiB that every driver
/// accepts. A list that is read in place needs no copy, and no memory that must stay valid until the kernel has run.
template <typename Params, i64 bytes = 4096>
struct WithList {
    Params params;
    i32 list[(bytes - sizeof(Params)) / sizeof(i32)];
};

/// Values of K or V to store in a buffer. Strides of the source are in bytes.
struct StorePart {
    u8* target;
    const u8* source;
    /// Bytes of a row of the target.
    i64 row_bytes;
    Split split;
    /// Words, runs or elements of a row, and of a lane.
    u32 units;
    u32 per_lane;
    i32 way;
    /// Bytes of a word, or of an element of the source.
    i32 size;
    i32 lead_ndim;
    /// Bytes of an element of the target.
    i32 target_size;
    i32 source_dtype;
    i32 target_dtype;
    /// The divisor of values that become 8-bit floats, and 1 / `divisor`, or 0 where `divide` of
    /// convert.cuh must not be used.
    float divisor;
    float reciprocal;
    i32 unused;
    /// Elements of a head.
    Divisor dim;
    i64 head_stride;
    i64 dim_stride;
    i64 lead_strides[8];
    i64 lead_shape[8];
};
static_assert(sizeof(StorePart) == 240, "as launch/params.rs has it");

/// How values are stored: as words, as contiguous and aligned runs of RUN elements, or element by element.
enum { WAY_WORDS = 0, WAY_RUNS = 1, WAY_ELEMENTS = 2 };

/// The dtypes of conversions.
enum { DTYPE_F64 = 0, DTYPE_F32 = 1, DTYPE_F16 = 2, DTYPE_BF16 = 3, DTYPE_F8E4M3 = 4, DTYPE_F8E5M2 = 5 };

struct StoreParams {
    Fault* fault;
    u32 count;
    u32 rows;
    /// Blocks of the first part; the rest belong to the second.
    u32 first_blocks;
    u32 unused;
    Index indices;
    StorePart parts[2];
};
static_assert(sizeof(StoreParams) == 664, "as launch/params.rs has it");

struct GatherPart {
    const u8* source;
    u8* target;
    i64 row_bytes;
    Split split;
    u32 words;
    i32 word;
};

struct GatherParams {
    Fault* fault;
    u32 count;
    u32 rows;
    /// Blocks of the first part; the rest belong to the second.
    u32 first_blocks;
    u32 unused;
    GatherPart parts[2];
    Index indices;
};
static_assert(sizeof(GatherParams) == 280, "as launch/params.rs has it");

/// Equal buffers, `step` bytes apart.
struct RowGroup {
    u8* base;
    i64 step;
    i64 row_bytes;
    Split split;
    /// Blocks of each buffer.
    Divisor blocks;
    u32 buffers;
    u32 words;
    i32 word;
};
static_assert(sizeof(RowGroup) == 64, "as launch/params.rs has it");

struct MoveParams {
    RowGroup groups[2];
    Fault* fault;
    u32 count;
    u32 rows;
    Index target;
    Index source;
};
static_assert(sizeof(MoveParams) == 464, "as launch/params.rs has it");

/// `steps` is null when they are passed with the launch.
struct OrderParams {
    const i32* steps;
    i64 count;
    RowGroup groups[2];
};
static_assert(sizeof(OrderParams) == 144, "as launch/params.rs has it");

struct ZeroParams {
    RowGroup groups[2];
    Fault* fault;
    u32 count;
    u32 rows;
    Index indices;
};
static_assert(sizeof(ZeroParams) == 304, "as launch/params.rs has it");

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

/// Without `rows`, they are passed with the launch, followed by `indptr`.
struct ColumnsParams {
    i32* table;
    i64 columns;
    const i32* rows;
    const i32* indptr;
    i64 count;
};
static_assert(sizeof(ColumnsParams) == 40, "as launch/params.rs has it");

struct KvIndicesParams {
    const i32* table;
    i32* out;
    i64 columns;
    i64 capacity;
    u32 rows;
    u32 count;
    Fault* fault;
    Index row;
    Index indptr;
};
static_assert(sizeof(KvIndicesParams) == 368, "as launch/params.rs has it");

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

/// What the places of a unit plan's arrays are multiples of, in bytes.
enum { UNIT_PLAN_ALIGNMENT = 256 };

/// A group of a unit plan. Places are those of arrays from `base` on, in units of UNIT_PLAN_ALIGNMENT; -1 for none. A group
/// of states has no `kv_indptr`, and its `out_cache_loc` is the place of its `state_indices`.
struct UnitGroup {
    /// The units of each request row by their positions, `width` a row.
    i32 table;
    i32 width;
    /// Tokens of a unit, and of an entry.
    i32 unit_tokens;
    i32 stride;
    i32 out_cache_loc;
    i32 slot_mapping;
    i32 kv_indptr;
    i32 kv_last_page_len;
    i32 kv_indices;
    i32 block_table;
    /// Units of all requests in `kv_indices`.
    i32 kv_len;
};
static_assert(sizeof(UnitGroup) == 44, "as launch/unit_plan.rs has it");

/// A request of a unit plan: positions from `prefix` to `seq` are new tokens.
struct UnitRequest {
    i32 row;
    i32 prefix;
    i32 seq;
    i32 qo_begin;
};
static_assert(sizeof(UnitRequest) == 16, "as launch/unit_plan.rs has it");

/// A request in a group: its units are at positions 0 to `sinks`, and `first` to `end`. Those from `sent` on are
/// `units[unit_begin..]`.
struct UnitSpan {
    i32 sinks;
    i32 first;
    i32 end;
    i32 sent;
    i32 unit_begin;
    i32 kv_begin;
    /// Entries of its line of the block table before this one are up to date. From `zero_from` to `zero_until` those that
    /// it has no unit for become 0.
    i32 line_from;
    i32 zero_from;
    i32 zero_until;
};
static_assert(sizeof(UnitSpan) == 36, "as launch/unit_plan.rs has it");

/// Without `groups`, they are passed with the launch, followed by the requests, their spans group by group, and the units.
struct UnitPlanParams {
    const UnitGroup* groups;
    const UnitRequest* requests;
    const UnitSpan* spans;
    const i32* units;
    u8* base;
    i32* positions;
    i32* req_pool_indices;
    i32* seq_lens;
    i32* qo_indptr;
    i32 groups_count;
    i32 batch;
    i32 padded_batch;
    i32 tokens;
};
static_assert(sizeof(UnitPlanParams) == 88, "as launch/params.rs has it");

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

/// Passed with the launch are, for each of `runs` runs of ascending slots, its place in `out` and, after all places, its
/// first slot. A run ends where the next begins, and the last one after `count` slots.
struct RunsParams {
    void* out;
    u32 count;
    u32 runs;
    /// Whether `out` is int64.
    i32 is_wide;
    i32 unused;
};
static_assert(sizeof(RunsParams) == 24, "as launch/params.rs has it");

struct ReadParams {
    Index from;
    i64* out;
    i64 count;
};
static_assert(sizeof(ReadParams) == 176, "as launch/params.rs has it");

#define KERNELS(name, Params) KERNELS_WITHIN((256), name, Params)
#define KERNELS_WITHIN(bounds, name, Params)                                                                         \
    static_assert(sizeof(WithList<Params>) == 4096, "as launch/params.rs has it");                                   \
    static __device__ __forceinline__ void name##_body(const Params& p, const i32* list);                            \
    KERNEL_WITHIN(bounds, name, Params) { name##_body(p, nullptr); }                                                 \
    KERNEL_WITHIN(bounds, name##_listed, WithList<Params>) { name##_body(p.params, p.list); }                        \
    static __device__ __forceinline__ void name##_body(const Params& p, const i32* list)

/// The number of this thread in the first dimension of the grid.
__device__ __forceinline__ i64 thread_number() {
    return i64(blockIdx.x) * BLOCK + threadIdx.x;
}

/// `number / divisor.by`, for a number below 2^31.
__device__ __forceinline__ u32 quotient(u32 number, const Divisor& divisor) {
    return u32(u64(number) * divisor.factor >> divisor.shift);
}

/// The offset of element `i` of a tensor in row-major order, in the unit of its strides. A batch has fewer than 2^31 of
/// them.
__device__ __forceinline__ i64 offset_of(u32 i, i32 ndim, const i64* shape, const i64* strides) {
    i64 offset = 0;
#pragma unroll 1
    for (i32 axis = ndim - 1; axis > 0; axis--) {
        u32 extent = u32(shape[axis]);
        u32 rest = i / extent;
        offset += (i - rest * extent) * strides[axis];
        i = rest;
    }
    return offset + i * strides[0];
}

/// A number of a batch in two halves. A thread that only passes it on does not wait until it is read.
struct Fetched {
    u32 low;
    u32 high;
};

/// Number `i` of a batch, for `value_of`; `list` is passed with the launch, or null.
__device__ __forceinline__ Fetched fetch(const Index& index, u32 i, const i32* list) {
    i64 at = i * index.strides[0];
    if (index.kind > INDEX_WIDE) {
        if (index.kind < INDEX_NARROW_TENSOR) {
            bool is_listed = list != nullptr && index.kind == INDEX_LISTED;
            i64 value = is_listed ? list[index.value + i] : index.value + index.step * i;
            return {u32(value), u32(u64(value) >> 32)};
        }
        at = offset_of(i, index.ndim, index.shape, index.strides);
    }
    // The second half of a narrow number is the first once more, which takes no time and no branch.
    u32 is_wide = index.kind & 1;
    const u32* halves = static_cast<const u32*>(index.data) + (at << is_wide);
    return {halves[0], halves[is_wide]};
}

__device__ __forceinline__ i64 value_of(const Index& index, const Fetched& number) {
    return index.kind & 1 ? i64(u64(number.high) << 32 | number.low) : i64(i32(number.low));
}

/// Number `i` of a batch. Of several, all are fetched before the first is used.
__device__ __forceinline__ i64 number(const Index& index, u32 i, const i32* list) {
    return value_of(index, fetch(index, i, list));
}

__device__ __forceinline__ void note(Fault* fault, i32 kind, i64 position, i64 value) {
    // One store of 16 bytes, so that the two numbers belong together.
    *fault = Fault{u64(position) << 8 | u64(kind), value};
}

__device__ __forceinline__ bool within(i64 number, i64 bound) {
    return u64(number) < u64(bound);
}
