// Storing, gathering, copying and zeroing rows. Their limit is the bandwidth of memory: a thread has several words of
// 16 bytes in flight, and one launch covers K and V and all layers.

#include "convert.cuh"
#include "params.cuh"

struct alignas(16) Word16 {
    u32 parts[4];
};

/// Eight bytes, the first in the lowest of the first part.
struct alignas(8) Word8 {
    u32 parts[2];
};

/// The part of a batch that a thread works on: row `row` of the batch, and units from `first` on, 2^`lane_bits` apart.
struct Place {
    u32 row;
    u32 first;
};

/// The part of a thread in block `block` of a buffer: `per_lane` units of a row.
__device__ __forceinline__ Place place(u32 block, const Split& split, u32 per_lane) {
    u64 thread = u64(block) * BLOCK + threadIdx.x;
    // There are fewer than 2^31 pieces, and fewer than 2^31 units in a row.
    u32 piece = u32(thread >> split.lane_bits);
    u32 row = quotient(piece, split.pieces);
    u32 lane = threadIdx.x & ((1u << split.lane_bits) - 1);
    return {row, ((piece - row * split.pieces.by) << split.lane_bits) * per_lane + lane};
}

template <typename Word>
__device__ __forceinline__ void
read_words(Word (&held)[WORDS_PER_LANE], const u8* source, u32 first, u32 lanes, u32 words) {
#pragma unroll
    for (u32 step = 0; step < WORDS_PER_LANE; step++) {
        u32 word = first + step * lanes;
        if (word < words) {
            held[step] = reinterpret_cast<const Word*>(source)[word];
        }
    }
}

template <typename Word>
__device__ __forceinline__ void
write_words(u8* target, const Word (&held)[WORDS_PER_LANE], u32 first, u32 lanes, u32 words) {
#pragma unroll
    for (u32 step = 0; step < WORDS_PER_LANE; step++) {
        u32 word = first + step * lanes;
        if (word < words) {
            reinterpret_cast<Word*>(target)[word] = held[step];
        }
    }
}

/// Copies up to WORDS_PER_LANE words, all of them read before the first is written.
template <typename Word>
__device__ __forceinline__ void copy_words(u8* target, const u8* source, u32 first, u32 lanes, u32 words) {
    Word held[WORDS_PER_LANE];
    read_words(held, source, first, lanes, words);
    write_words(target, held, first, lanes, words);
}

template <typename Word>
__device__ __forceinline__ void zero_words(u8* target, u32 first, u32 lanes, u32 words) {
#pragma unroll
    for (u32 step = 0; step < WORDS_PER_LANE; step++) {
        u32 word = first + step * lanes;
        if (word < words) {
            reinterpret_cast<Word*>(target)[word] = Word{};
        }
    }
}

__device__ __forceinline__ void
copy_piece(u8* target, const u8* source, u32 first, u32 lanes, u32 words, i32 word) {
    // The widest word is found by one comparison.
    switch (__builtin_expect(word, 16)) {
        case 16: return copy_words<Word16>(target, source, first, lanes, words);
        case 8: return copy_words<u64>(target, source, first, lanes, words);
        case 4: return copy_words<u32>(target, source, first, lanes, words);
        case 2: return copy_words<u16>(target, source, first, lanes, words);
        default: return copy_words<u8>(target, source, first, lanes, words);
    }
}

__device__ __forceinline__ void zero_piece(u8* target, u32 first, u32 lanes, u32 words, i32 word) {
    switch (__builtin_expect(word, 16)) {
        case 16: return zero_words<Word16>(target, first, lanes, words);
        case 8: return zero_words<u64>(target, first, lanes, words);
        case 4: return zero_words<u32>(target, first, lanes, words);
        case 2: return zero_words<u16>(target, first, lanes, words);
        default: return zero_words<u8>(target, first, lanes, words);
    }
}

/// What a lane of a store has read: words, or elements as they lie in memory, side by side. Words below four bytes have a
/// part each.
typedef u32 Held[ELEMENTS_PER_LANE];

__device__ __forceinline__ void hold(u32* parts, const Word16& word) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        parts[i] = word.parts[i];
    }
}

__device__ __forceinline__ void hold(u32* parts, const Word8& word) {
    parts[0] = word.parts[0];
    parts[1] = word.parts[1];
}

__device__ __forceinline__ void hold(u32* parts, u32 word) { parts[0] = word; }

__device__ __forceinline__ void take(Word16& word, const u32* parts) {
    word = Word16{{parts[0], parts[1], parts[2], parts[3]}};
}

__device__ __forceinline__ void take(Word8& word, const u32* parts) { word = Word8{{parts[0], parts[1]}}; }

template <typename Word>
__device__ __forceinline__ void take(Word& word, const u32* parts) {
    word = Word(parts[0]);
}

/// Parts of a word.
template <typename Word>
__device__ __forceinline__ constexpr u32 parts_of() {
    return sizeof(Word) < 4 ? 1 : sizeof(Word) / 4;
}

/// Element `i`, of at most four bytes.
template <typename Bits>
__device__ __forceinline__ Bits element(const Held& held, u32 i) {
    return Bits(held[i * sizeof(Bits) / 4] >> i * sizeof(Bits) % 4 * 8);
}

/// Adds element `i`, after those before it.
__device__ __forceinline__ void put_element(Held& held, u32 i, u32 size, u32 bits) {
    u32 shift = i * size % 4 * 8;
    u32& part = held[i * size / 4];
    part = shift == 0 ? bits : part | bits << shift;
}

template <typename Word>
__device__ __forceinline__ void hold_words(Held& held, const StorePart& part, const u8* source, u32 first) {
    u32 lanes = 1u << part.split.lane_bits;
#pragma unroll
    for (u32 step = 0; step < WORDS_PER_LANE; step++) {
        u32 word = first + step * lanes;
        if (step < part.per_lane && word < part.units) {
            Word read = reinterpret_cast<const Word*>(source)[word];
            hold(held + step * parts_of<Word>(), read);
        }
    }
}

template <typename Word>
__device__ __forceinline__ void take_words(const Held& held, const StorePart& part, u8* target, u32 first) {
    u32 lanes = 1u << part.split.lane_bits;
#pragma unroll
    for (u32 step = 0; step < WORDS_PER_LANE; step++) {
        u32 word = first + step * lanes;
        if (step < part.per_lane && word < part.units) {
            take(reinterpret_cast<Word*>(target)[word], held + step * parts_of<Word>());
        }
    }
}

/// Reads runs of `WORDS` words each; what is beyond the row is zero.
template <typename Word, u32 WORDS>
__device__ __forceinline__ void hold_runs(Held& held, const StorePart& part, const u8* source, u32 first) {
    u32 lanes = 1u << part.split.lane_bits;
#pragma unroll
    for (u32 step = 0; step < RUNS_PER_LANE; step++) {
        u32 run = first + step * lanes;
        u32 head = quotient(run * RUN, part.dim);
        u32 rest = run * RUN - head * part.dim.by;
        const u8* its = source + head * part.head_stride + i64(rest) * part.size;
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            Word word = run < part.units ? reinterpret_cast<const Word*>(its)[i] : Word{};
            u32 at = step * WORDS + i;
            hold(held + at * parts_of<Word>(), word);
        }
    }
}

/// As `hold_runs<Word, 1>`, of rows that are contiguous.
template <typename Word>
__device__ __forceinline__ void hold_row(Held& held, const StorePart& part, const u8* source, u32 first) {
    u32 lanes = 1u << part.split.lane_bits;
#pragma unroll
    for (u32 step = 0; step < RUNS_PER_LANE; step++) {
        u32 run = first + step * lanes;
        Word word = run < part.units ? reinterpret_cast<const Word*>(source)[run] : Word{};
        hold(held + step * parts_of<Word>(), word);
    }
}

template <typename Word, u32 WORDS>
__device__ __forceinline__ void take_runs(const Held& held, const StorePart& part, u8* target, u32 first) {
    u32 lanes = 1u << part.split.lane_bits;
#pragma unroll
    for (u32 step = 0; step < RUNS_PER_LANE; step++) {
        u32 run = first + step * lanes;
        if (run < part.units) {
#pragma unroll
            for (u32 i = 0; i < WORDS; i++) {
                take(reinterpret_cast<Word*>(target)[run * WORDS + i], held + (step * WORDS + i) * parts_of<Word>());
            }
        }
    }
}

/// An element as it is held: a float for one of eight bytes.
__device__ __forceinline__ u32 held_bits(u64 bits) { return to_bits(F64::load(bits)); }

template <typename Bits>
__device__ __forceinline__ u32 held_bits(Bits bits) {
    return bits;
}

/// Reads elements in turns with the other lanes; what is beyond the row is zero.
template <typename Bits>
__device__ __forceinline__ void
hold_elements(Held& held, const StorePart& part, const u8* source, u32 first) {
    u32 lanes = 1u << part.split.lane_bits;
    u32 dim = part.dim.by;
    u32 head = quotient(first, part.dim);
    u32 rest = first - head * dim;
    i64 offset = head * part.head_stride + rest * part.dim_stride;
    u32 head_step = quotient(lanes, part.dim);
    u32 rest_step = lanes - head_step * dim;
    i64 step = head_step * part.head_stride + rest_step * part.dim_stride;
    // What the place of an element moves by beyond a step, where a head ends.
    i64 turn = part.head_stride - dim * part.dim_stride;
#pragma unroll
    for (u32 i = 0; i < ELEMENTS_PER_LANE; i++) {
        bool is_inside = first + i * lanes < part.units;
        Bits bits = is_inside ? *reinterpret_cast<const Bits*>(source + offset) : Bits(0);
        put_element(held, i, sizeof(Bits) < 4 ? sizeof(Bits) : 4, held_bits(bits));
        offset += step;
        rest += rest_step;
        if (rest >= dim) {
            rest -= dim;
            offset += turn;
        }
    }
}

template <typename Bits>
__device__ __forceinline__ void
take_elements(const Held& held, const StorePart& part, u8* target, u32 first) {
    u32 lanes = 1u << part.split.lane_bits;
#pragma unroll
    for (u32 i = 0; i < ELEMENTS_PER_LANE; i++) {
        u32 at = first + i * lanes;
        if (at < part.units) {
            reinterpret_cast<Bits*>(target)[at] = element<Bits>(held, i);
        }
    }
}

/// Makes floats of elements. The last come first: each float takes the place of elements that follow it.
template <typename Type>
__device__ __forceinline__ void widen_elements(Held& held) {
#pragma unroll
    for (u32 i = ELEMENTS_PER_LANE; i-- > 0;) {
        held[i] = to_bits(Type::load(element<typename Type::Bits>(held, i)));
    }
}

template <typename Type>
__device__ __forceinline__ void narrow_elements(Held& held) {
#pragma unroll
    for (u32 i = 0; i < ELEMENTS_PER_LANE; i++) {
        put_element(held, i, sizeof(typename Type::Bits), Type::store(from_bits(held[i])));
    }
}

template <typename Type>
__device__ __forceinline__ void divide_elements(Held& held, const StorePart& part) {
    static_assert(ELEMENTS_PER_LANE == 16, "as many as store_quickly takes");
    Floats floats;
#pragma unroll
    for (u32 i = 0; i < ELEMENTS_PER_LANE; i++) {
        floats.held[i] = from_bits(held[i]);
    }
    if (!store_quickly<Type>(floats.held, part.divisor, part.reciprocal, held)) {
        store_slowly<Type>(floats, part.divisor, held);
    }
}

/// 16-bit floats of type `Source`, divided, as 8-bit floats of type `Target`. A lane that may have to divide again keeps what
/// it has read, which is half as much as the floats.
template <typename Source, typename Target>
__device__ __forceinline__ void narrow_held(Held& held, const StorePart& part) {
    Halves<Source> halves;
#pragma unroll
    for (u32 i = 0; i < ELEMENTS_PER_LANE / 2; i++) {
        halves.held[i] = held[i];
    }
    float values[ELEMENTS_PER_LANE];
#pragma unroll
    for (u32 i = 0; i < ELEMENTS_PER_LANE; i++) {
        values[i] = Source::load(element<u16>(held, i));
    }
    if (!store_quickly<Target>(values, part.divisor, part.reciprocal, held)) {
        store_slowly<Target>(halves, part.divisor, held);
    }
}

template <typename Source>
__device__ __forceinline__ void narrow_held(Held& held, const StorePart& part) {
    part.target_dtype == DTYPE_F8E4M3 ? narrow_held<Source, F8E4M3>(held, part)
                                      : narrow_held<Source, F8E5M2>(held, part);
}

__device__ __forceinline__ void convert_elements(Held& held, const StorePart& part) {
    switch (part.source_dtype) {
        case DTYPE_F16: widen_elements<F16>(held); break;
        case DTYPE_BF16: widen_elements<BF16>(held); break;
        case DTYPE_F8E4M3: widen_elements<F8E4M3>(held); break;
        case DTYPE_F8E5M2: widen_elements<F8E5M2>(held); break;
        default: break;
    }
    switch (part.target_dtype) {
        case DTYPE_F16: return narrow_elements<F16>(held);
        case DTYPE_BF16: return narrow_elements<BF16>(held);
        case DTYPE_F8E4M3: return divide_elements<F8E4M3>(held, part);
        case DTYPE_F8E5M2: return divide_elements<F8E5M2>(held, part);
        default: return;
    }
}

/// Reads what a lane stores of a value, and converts it.
__device__ __forceinline__ void
hold_piece(Held& held, const StorePart& part, const u8* source, u32 first) {
    if (part.way == WAY_WORDS) {
        switch (part.size) {
            case 16: return hold_words<Word16>(held, part, source, first);
            case 8: return hold_words<Word8>(held, part, source, first);
            case 4: return hold_words<u32>(held, part, source, first);
            case 2: return hold_words<u16>(held, part, source, first);
            default: return hold_words<u8>(held, part, source, first);
        }
    }
    if (part.way == WAY_RUNS) {
        switch (part.size) {
            case 4: hold_runs<Word16, 2>(held, part, source, first); break;
            case 2: hold_runs<Word16, 1>(held, part, source, first); break;
            default: hold_runs<Word8, 1>(held, part, source, first); break;
        }
    } else {
        switch (part.size) {
            case 8: hold_elements<u64>(held, part, source, first); break;
            case 4: hold_elements<u32>(held, part, source, first); break;
            case 2: hold_elements<u16>(held, part, source, first); break;
            default: hold_elements<u8>(held, part, source, first); break;
        }
    }
    if (part.source_dtype != part.target_dtype) {
        convert_elements(held, part);
    }
}

__device__ __forceinline__ void
take_piece(const Held& held, const StorePart& part, u8* target, u32 first) {
    if (part.way == WAY_WORDS) {
        switch (part.size) {
            case 16: return take_words<Word16>(held, part, target, first);
            case 8: return take_words<Word8>(held, part, target, first);
            case 4: return take_words<u32>(held, part, target, first);
            case 2: return take_words<u16>(held, part, target, first);
            default: return take_words<u8>(held, part, target, first);
        }
    }
    if (part.way == WAY_RUNS) {
        switch (part.target_size) {
            case 4: return take_runs<Word16, 2>(held, part, target, first);
            case 2: return take_runs<Word16, 1>(held, part, target, first);
            default: return take_runs<Word8, 1>(held, part, target, first);
        }
    }
    switch (part.target_size) {
        case 4: return take_elements<u32>(held, part, target, first);
        case 2: return take_elements<u16>(held, part, target, first);
        default: return take_elements<u8>(held, part, target, first);
    }
}

/// The values that a kernel stores. Of few rows, a store takes as long as its instructions and what it waits for, and of many
/// rows of 8 bits as long as its instructions: so the usual values have kernels of their own.
enum class Values {
    ANY,
    /// Those of K and of V are stored in words of 16 bytes.
    WIDE,
    /// Both are contiguous rows of 16-bit floats that become 8-bit floats, run by run.
    NARROWED,
};

template <Values VALUES>
__device__ __forceinline__ void hold_values(Held& held, const StorePart& part, const u8* source, u32 first) {
    switch (VALUES) {
        case Values::ANY: return hold_piece(held, part, source, first);
        case Values::WIDE: return hold_words<Word16>(held, part, source, first);
        case Values::NARROWED:
            hold_row<Word16>(held, part, source, first);
            return part.source_dtype == DTYPE_F16 ? narrow_held<F16>(held, part) : narrow_held<BF16>(held, part);
    }
}

template <Values VALUES>
__device__ __forceinline__ void take_values(const Held& held, const StorePart& part, u8* target, u32 first) {
    switch (VALUES) {
        case Values::ANY: return take_piece(held, part, target, first);
        case Values::WIDE: return take_words<Word16>(held, part, target, first);
        case Values::NARROWED: return take_runs<Word8, 1>(held, part, target, first);
    }
}

/// Row `indices[i]` of the target becomes row i of the values, for K and V. Negative indices are skipped. Values are read
/// while the index of their row is.
template <Values VALUES>
__device__ __forceinline__ void store(const StoreParams& p, const i32* list) {
    bool is_second = blockIdx.x >= p.first_blocks;
    const StorePart& part = p.parts[is_second];
    u32 block = is_second ? blockIdx.x - p.first_blocks : blockIdx.x;
    Place at = place(block, part.split, VALUES == Values::NARROWED ? u32(RUNS_PER_LANE) : part.per_lane);
    if (at.row >= p.count) {
        return;
    }
    Fetched index = fetch(p.indices, at.row, list);
    const u8* source = part.source + offset_of(at.row, part.lead_ndim, part.lead_shape, part.lead_strides);
    Held held;
    hold_values<VALUES>(held, part, source, at.first);
    i64 row = value_of(p.indices, index);
    if (!within(row, p.rows)) {
        if (row >= 0 && at.first == 0) {
            note(p.fault, FAULT_ROW, at.row, row);
        }
        return;
    }
    take_values<VALUES>(held, part, part.target + row * part.row_bytes, at.first);
}

KERNELS(kvpool_store, StoreParams) {
    store<Values::ANY>(p, list);
}

KERNELS(kvpool_store_wide, StoreParams) {
    store<Values::WIDE>(p, list);
}

// With fewer blocks too little is under way, for more there are too few registers (H200, 2026-11-27).
#ifdef HAS_FLOAT8
#define NARROWED_BOUNDS (256, 6)
#else
#define NARROWED_BOUNDS (256)
#endif

KERNELS_WITHIN(NARROWED_BOUNDS, kvpool_store_narrowed, StoreParams) {
    store<Values::NARROWED>(p, list);
}

/// Row i of the target becomes row `indices[i]` of the source, for K and V, or zeros if that row does not exist.
KERNELS(kvpool_gather, GatherParams) {
    bool is_second = blockIdx.x >= p.first_blocks;
    const GatherPart& part = p.parts[is_second];
    u32 block = is_second ? blockIdx.x - p.first_blocks : blockIdx.x;
    u32 lanes = 1u << part.split.lane_bits;
    Place at = place(block, part.split, WORDS_PER_LANE);
    if (at.row >= p.count) {
        return;
    }
    u8* target = part.target + at.row * part.row_bytes;
    i64 row = number(p.indices, at.row, list);
    if (!within(row, p.rows)) {
        if (at.first == 0) {
            note(p.fault, FAULT_ROW, at.row, row);
        }
        return zero_piece(target, at.first, lanes, part.words, part.word);
    }
    copy_piece(target, part.source + row * part.row_bytes, at.first, lanes, part.words, part.word);
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
    Fetched target_row = fetch(p.target, at.row, list);
    Fetched source_row = fetch(p.source, at.row, list);
    i64 to = value_of(p.target, target_row);
    i64 from = value_of(p.source, source_row);
    if (!within(to, p.rows) || !within(from, p.rows)) {
        if (at.first == 0) {
            note(p.fault, FAULT_ROW, at.row, within(to, p.rows) ? from : to);
        }
        return;
    }
    if (to != from) {
        u8* target = its.base + to * group.row_bytes;
        const u8* source = its.base + from * group.row_bytes;
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
    u32 word = its.block * BLOCK + threadIdx.x;
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
    u8* target = its.base + row * group.row_bytes;
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
