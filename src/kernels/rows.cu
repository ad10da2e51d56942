// Storing, gathering, copying and zeroing rows. Their limit is the bandwidth of memory: a thread has several words of
// 16 bytes in flight, and one launch covers K and V and all layers.

#include "convert.cuh"
#include "params.cuh"

struct alignas(16) Word16 {
    u32 parts[4];
};

/// The part of a batch that a thread works on: row `row` of the batch, and words from `first` on, 2^`lane_bits` apart.
struct Place {
    i64 row;
    i64 first;
};

/// The part of a thread in block `block` of a buffer: `per_lane` words of a row.
__device__ __forceinline__ Place place(u32 block, const Split& split, u32 per_lane) {
    u64 thread = u64(block) * BLOCK + threadIdx.x;
    // There are fewer than 2^31 pieces.
    u32 piece = u32(thread >> split.lane_bits);
    u32 row = quotient(piece, split.pieces);
    u32 lane = threadIdx.x & ((1u << split.lane_bits) - 1);
    return {row, i64((u64(piece - row * split.pieces.by) << split.lane_bits) * per_lane + lane)};
}

template <typename Word>
__device__ __forceinline__ void
read_words(Word (&held)[WORDS_PER_LANE], const u8* source, i64 first, u32 lanes, i64 words) {
#pragma unroll
    for (u32 step = 0; step < WORDS_PER_LANE; step++) {
        i64 word = first + i64(step * lanes);
        if (word < words) {
            held[step] = reinterpret_cast<const Word*>(source)[word];
        }
    }
}

template <typename Word>
__device__ __forceinline__ void
write_words(u8* target, const Word (&held)[WORDS_PER_LANE], i64 first, u32 lanes, i64 words) {
#pragma unroll
    for (u32 step = 0; step < WORDS_PER_LANE; step++) {
        i64 word = first + i64(step * lanes);
        if (word < words) {
            reinterpret_cast<Word*>(target)[word] = held[step];
        }
    }
}

/// Copies up to WORDS_PER_LANE words, all of them read before the first is written.
template <typename Word>
__device__ __forceinline__ void copy_words(u8* target, const u8* source, i64 first, u32 lanes, i64 words) {
    Word held[WORDS_PER_LANE];
    read_words(held, source, first, lanes, words);
    write_words(target, held, first, lanes, words);
}

template <typename Word>
__device__ __forceinline__ void zero_words(u8* target, i64 first, u32 lanes, i64 words) {
#pragma unroll
    for (u32 step = 0; step < WORDS_PER_LANE; step++) {
        i64 word = first + i64(step * lanes);
        if (word < words) {
            reinterpret_cast<Word*>(target)[word] = Word{};
        }
    }
}

__device__ __forceinline__ void
copy_piece(u8* target, const u8* source, i64 first, u32 lanes, i64 words, i32 word) {
    switch (word) {
        case 16: return copy_words<Word16>(target, source, first, lanes, words);
        case 8: return copy_words<u64>(target, source, first, lanes, words);
        case 4: return copy_words<u32>(target, source, first, lanes, words);
        case 2: return copy_words<u16>(target, source, first, lanes, words);
        default: return copy_words<u8>(target, source, first, lanes, words);
    }
}

__device__ __forceinline__ void zero_piece(u8* target, i64 first, u32 lanes, i64 words, i32 word) {
    switch (word) {
        case 16: return zero_words<Word16>(target, first, lanes, words);
        case 8: return zero_words<u64>(target, first, lanes, words);
        case 4: return zero_words<u32>(target, first, lanes, words);
        case 2: return zero_words<u16>(target, first, lanes, words);
        default: return zero_words<u8>(target, first, lanes, words);
    }
}

/// The elements of one lane, ELEMENTS_PER_LANE of a row, and their layout in the source.
struct Elements {
    const u8* source;
    u8* target;
    i64 words;
    /// The first one, and the distance between them in the target.
    i64 first;
    i64 step;
    /// The offset of the first one in the source, and the distance between them there, in elements; `turn` more where a head
    /// ends. `rest` is the place of the first one in its head of `dim` elements, and moves by `rest_step`.
    i64 offset;
    i64 offset_step;
    u32 rest;
    u32 rest_step;
    u32 dim;
    i64 turn;
    /// They are contiguous and aligned, in the source and in the target.
    bool is_run;
};

/// The elements of the lane whose first one, taken in turns with the other lanes, is `first`.
__device__ __forceinline__ Elements elements(const StorePart& part, const u8* source, u8* target, i64 first) {
    u32 lanes = 1u << part.split.lane_bits;
    Elements its;
    its.source = source;
    its.target = target;
    its.words = part.words;
    its.is_run = part.is_run;
    its.step = its.is_run ? 1 : i64(lanes);
    its.first = its.is_run ? first + (first & (lanes - 1)) * (ELEMENTS_PER_LANE - 1) : first;
    its.dim = part.dim.by;
    // A row has fewer than 2^31 elements.
    u32 head = quotient(u32(its.first), part.dim);
    its.rest = u32(its.first) - head * its.dim;
    its.offset = head * part.head_stride + its.rest * part.dim_stride;
    if (!its.is_run) {
        u32 head_step = quotient(lanes, part.dim);
        its.rest_step = lanes - head_step * its.dim;
        its.offset_step = head_step * part.head_stride + its.rest_step * part.dim_stride;
        its.turn = part.head_stride - its.dim * part.dim_stride;
    }
    return its;
}

/// Contiguous elements, read and written in the widest possible words.
template <typename Bits>
struct alignas(sizeof(Bits) == 1 ? 8 : 16) Run {
    Bits elements[ELEMENTS_PER_LANE];
};

template <typename Bits>
__device__ __forceinline__ void read_elements(const Elements& its, Bits* held) {
    const Bits* source = reinterpret_cast<const Bits*>(its.source);
    if (its.is_run) {
        Run<Bits> run = *reinterpret_cast<const Run<Bits>*>(source + its.offset);
#pragma unroll
        for (i32 i = 0; i < ELEMENTS_PER_LANE; i++) {
            held[i] = run.elements[i];
        }
        return;
    }
    i64 offset = its.offset;
    u32 rest = its.rest;
#pragma unroll
    for (i32 i = 0; i < ELEMENTS_PER_LANE; i++) {
        held[i] = its.first + i * its.step < its.words ? source[offset] : Bits(0);
        offset += its.offset_step;
        rest += its.rest_step;
        if (rest >= its.dim) {
            rest -= its.dim;
            offset += its.turn;
        }
    }
}

template <typename Bits>
__device__ __forceinline__ void write_elements(const Elements& its, const Bits* held) {
    Bits* target = reinterpret_cast<Bits*>(its.target) + its.first;
    if (its.is_run) {
        Run<Bits> run;
#pragma unroll
        for (i32 i = 0; i < ELEMENTS_PER_LANE; i++) {
            run.elements[i] = held[i];
        }
        *reinterpret_cast<Run<Bits>*>(target) = run;
        return;
    }
#pragma unroll
    for (i32 i = 0; i < ELEMENTS_PER_LANE; i++) {
        if (its.first + i * its.step < its.words) {
            target[i * its.step] = held[i];
        }
    }
}

template <typename Bits>
__device__ __forceinline__ void copy_elements(const Elements& its) {
    Bits held[ELEMENTS_PER_LANE];
    read_elements(its, held);
    write_elements(its, held);
}

template <typename Type>
__device__ __forceinline__ void load_elements(const Elements& its, float* held) {
    typename Type::Bits bits[ELEMENTS_PER_LANE];
    read_elements(its, bits);
#pragma unroll
    for (i32 i = 0; i < ELEMENTS_PER_LANE; i++) {
        held[i] = Type::load(bits[i]);
    }
}

template <typename Type>
__device__ __forceinline__ void store_elements(const Elements& its, const float* held) {
    typename Type::Bits bits[ELEMENTS_PER_LANE];
#pragma unroll
    for (i32 i = 0; i < ELEMENTS_PER_LANE; i++) {
        bits[i] = Type::store(held[i]);
    }
    write_elements(its, bits);
}

/// Eight bytes, the first in the lowest of the first part.
struct alignas(8) Word8 {
    u32 parts[2];
};

template <typename Type>
__device__ __forceinline__ void store_eighths(const Elements& its, const StorePart& part, const float* held) {
    static_assert(ELEMENTS_PER_LANE == 8, "as many as store_eight takes");
    Word8 bytes;
    store_eight<Type>(held, part.divisor, part.reciprocal, bytes.parts);
    if (its.is_run) {
        *reinterpret_cast<Word8*>(its.target + its.first) = bytes;
        return;
    }
    u8 elements[ELEMENTS_PER_LANE];
#pragma unroll
    for (u32 i = 0; i < ELEMENTS_PER_LANE; i++) {
        elements[i] = u8(bytes.parts[i / 4] >> i % 4 * 8);
    }
    write_elements(its, elements);
}

/// Bytes of an element of a buffer.
__device__ __forceinline__ i32 bytes_of(i32 dtype) {
    return dtype == DTYPE_F32 ? 4 : dtype == DTYPE_F16 || dtype == DTYPE_BF16 ? 2 : 1;
}

__device__ __forceinline__ void convert_elements(const Elements& its, const StorePart& part) {
    float held[ELEMENTS_PER_LANE];
    switch (part.source_dtype) {
        case DTYPE_F64: load_elements<F64>(its, held); break;
        case DTYPE_F32: load_elements<F32>(its, held); break;
        case DTYPE_F16: load_elements<F16>(its, held); break;
        case DTYPE_BF16: load_elements<BF16>(its, held); break;
        case DTYPE_F8E4M3: load_elements<F8E4M3>(its, held); break;
        default: load_elements<F8E5M2>(its, held); break;
    }
    switch (part.target_dtype) {
        case DTYPE_F32: return store_elements<F32>(its, held);
        case DTYPE_F16: return store_elements<F16>(its, held);
        case DTYPE_BF16: return store_elements<BF16>(its, held);
        case DTYPE_F8E4M3: return store_eighths<F8E4M3>(its, part, held);
        default: return store_eighths<F8E5M2>(its, part, held);
    }
}

/// The row that value `at` is stored to, or -1 for none. Notes a row that does not exist.
__device__ __forceinline__ i64 target_row(const StoreParams& p, const Place& at, const i32* list) {
    i64 row = number(p.indices, at.row, list);
    if (row < p.rows) {
        return row < 0 ? -1 : row;
    }
    if (at.first == 0) {
        note(p.fault, FAULT_ROW, at.row, row);
    }
    return -1;
}

/// Stores words of a value, which are read while the index of their row is: of few rows, a store takes as long as what
/// it waits for.
template <typename Word>
__device__ __forceinline__ void
store_words(const StoreParams& p, const StorePart& part, const Place& at, const u8* source, const i32* list) {
    Word held[WORDS_PER_LANE];
    u32 lanes = 1u << part.split.lane_bits;
    read_words(held, source, at.first, lanes, part.words);
    i64 row = target_row(p, at, list);
    if (row >= 0) {
        write_words(part.target + row * part.words * part.word, held, at.first, lanes, part.words);
    }
}

/// Row `indices[i]` of the target becomes row i of the values, for K and V. Negative indices are skipped.
KERNELS(kvpool_store, StoreParams) {
    bool is_second = blockIdx.x >= u32(p.first_blocks);
    const StorePart& part = p.parts[is_second];
    bool as_words = part.way == WAY_WORDS;
    u32 block = is_second ? blockIdx.x - u32(p.first_blocks) : blockIdx.x;
    Place at = place(block, part.split, as_words ? WORDS_PER_LANE : ELEMENTS_PER_LANE);
    if (at.row >= p.count) {
        return;
    }
    i64 lead = offset_of(at.row, part.lead_ndim, part.lead_shape, part.lead_strides);
    const u8* source = part.source + lead * part.element_bytes;
    if (as_words) {
        switch (part.word) {
            case 16: return store_words<Word16>(p, part, at, source, list);
            case 8: return store_words<u64>(p, part, at, source, list);
            case 4: return store_words<u32>(p, part, at, source, list);
            case 2: return store_words<u16>(p, part, at, source, list);
            default: return store_words<u8>(p, part, at, source, list);
        }
    }
    i64 row = target_row(p, at, list);
    if (row < 0) {
        return;
    }
    bool converts = part.way == WAY_CONVERT;
    i32 target_bytes = converts ? bytes_of(part.target_dtype) : part.element_bytes;
    u8* target = part.target + row * part.words * target_bytes;
    Elements its = elements(part, source, target, at.first);
    if (its.first >= its.words) {
        return;
    }
    if (converts) {
        return convert_elements(its, part);
    }
    switch (part.element_bytes) {
        case 4: return copy_elements<u32>(its);
        case 2: return copy_elements<u16>(its);
        default: return copy_elements<u8>(its);
    }
}

/// Row i of the target becomes row `indices[i]` of the source, for K and V, or zeros if that row does not exist.
KERNELS(kvpool_gather, GatherParams) {
    bool is_second = blockIdx.x >= u32(p.first_blocks);
    const GatherPart& part = p.parts[is_second];
    u32 block = is_second ? blockIdx.x - u32(p.first_blocks) : blockIdx.x;
    u32 lanes = 1u << part.split.lane_bits;
    Place at = place(block, part.split, WORDS_PER_LANE);
    if (at.row >= p.count) {
        return;
    }
    i64 row_bytes = part.words * part.word;
    u8* target = part.target + at.row * row_bytes;
    i64 row = number(p.indices, at.row, list);
    if (!within(row, p.rows)) {
        if (at.first == 0) {
            note(p.fault, FAULT_ROW, at.row, row);
        }
        return zero_piece(target, at.first, lanes, part.words, part.word);
    }
    copy_piece(target, part.source + row * row_bytes, at.first, lanes, part.words, part.word);
}

/// The buffer, of either group, that a block works on: its number in the group, and the number of the block within it.
struct Buffer {
    const RowGroup& group;
    u8* base;
    u32 block;
    u32 number;
    bool is_second;
};

/// Each block works on one buffer: blocks of the first group come first, and each buffer has as many as it needs.
__device__ __forceinline__ Buffer buffer_of(const RowGroup* groups, u32 of_all) {
    u32 first_blocks = groups[0].buffers * groups[0].blocks.by;
    bool is_second = of_all >= first_blocks;
    const RowGroup& group = groups[is_second];
    u32 block = is_second ? of_all - first_blocks : of_all;
    u32 number = quotient(block, group.blocks);
    return {group, group.base + number * group.step, block - number * group.blocks.by, number, is_second};
}

/// Row `target[i]` becomes row `source[i]` in every buffer. No row is both read and written.
KERNELS(kvpool_move, MoveParams) {
    Buffer its = buffer_of(p.groups, blockIdx.x);
    const RowGroup& group = its.group;
    Place at = place(its.block, group.split, WORDS_PER_LANE);
    if (at.row >= p.count) {
        return;
    }
    i64 to = number(p.target, at.row, list);
    i64 from = number(p.source, at.row, list);
    if (!within(to, p.rows) || !within(from, p.rows)) {
        if (at.first == 0) {
            note(p.fault, FAULT_ROW, at.row, within(to, p.rows) ? from : to);
        }
        return;
    }
    if (to != from) {
        i64 row_bytes = group.words * group.word;
        u8* target = its.base + to * row_bytes;
        const u8* source = its.base + from * row_bytes;
        copy_piece(target, source, at.first, 1u << group.split.lane_bits, group.words, group.word);
    }
}

/// Carries out the steps of a plan for one word of every row, in order.
template <typename Word>
__device__ __forceinline__ void move_word(const i32* steps, i64 count, u8* base, i64 words, i64 word) {
    Word* column = reinterpret_cast<Word*>(base) + word;
    for (i64 step = 0; step < count; step++) {
        const i32* move = steps + 3 * step;
        Word* a = column + move[1] * words;
        Word* b = column + move[2] * words;
        Word read = *b;
        if (move[0] != 0) {
            *b = *a;
        }
        *a = read;
    }
}

/// The moves of `steps`, triples of kind, a and b: row a becomes row b, or both are exchanged. Each thread owns one
/// word of every row of a buffer, so only the order of its own steps matters.
KERNELS(kvpool_move_in_order, OrderParams) {
    Buffer its = buffer_of(p.groups, blockIdx.x);
    const RowGroup& group = its.group;
    i64 word = i64(its.block) * BLOCK + threadIdx.x;
    if (word >= group.words) {
        return;
    }
    const i32* steps = list != nullptr ? list : p.steps;
    switch (group.word) {
        case 16: return move_word<Word16>(steps, p.count, its.base, group.words, word);
        case 8: return move_word<u64>(steps, p.count, its.base, group.words, word);
        case 4: return move_word<u32>(steps, p.count, its.base, group.words, word);
        case 2: return move_word<u16>(steps, p.count, its.base, group.words, word);
        default: return move_word<u8>(steps, p.count, its.base, group.words, word);
    }
}

/// Zeroes row `indices[i]` of every buffer.
KERNELS(kvpool_zero, ZeroParams) {
    Buffer its = buffer_of(p.groups, blockIdx.x);
    const RowGroup& group = its.group;
    Place at = place(its.block, group.split, WORDS_PER_LANE);
    if (at.row >= p.count) {
        return;
    }
    i64 row = number(p.indices, at.row, list);
    if (!within(row, p.rows)) {
        if (at.first == 0) {
            note(p.fault, FAULT_ROW, at.row, row);
        }
        return;
    }
    u8* target = its.base + row * group.words * group.word;
    zero_piece(target, at.first, 1u << group.split.lane_bits, group.words, group.word);
}

/// Page `list[2 i + 1]` of the target becomes page `list[2 i]` of the source, in every buffer. Either may be page-locked
/// host memory. The bus to it is slow, so few blocks keep it busy, and leave the device to other work.
KERNEL(kvpool_copy_pages, WithList<PagesParams>) {
    const PagesParams& its = p.params;
#pragma unroll 1
    for (u32 block = blockIdx.x; block < u32(its.blocks); block += gridDim.x) {
        Buffer from = buffer_of(its.groups, block);
        const RowGroup& group = from.group;
        Place at = place(from.block, group.split, WORDS_PER_LANE);
        if (at.row < its.count) {
            const PageTarget& to = its.targets[from.is_second];
            const u8* source = from.base + p.list[2 * at.row] * to.source_stride;
            u8* target = to.base + from.number * to.step + p.list[2 * at.row + 1] * to.stride;
            copy_piece(target, source, at.first, 1u << group.split.lane_bits, group.words, group.word);
        }
    }
}
