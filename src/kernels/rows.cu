// Storing, gathering, copying and zeroing rows. Their limit is the bandwidth of memory: a thread has several words of
// 16 bytes in flight, and one launch covers K and V and all layers.

#include "convert.cuh"
#include "params.cuh"

struct alignas(16) Word16 {
    u32 parts[4];
};

/// The part of a batch that a thread works on: row `row` of the batch, and words from `first` on, `lanes` apart.
struct Place {
    i64 row;
    i64 first;
};

/// `per_lane` words of a row for each of `lanes` threads, in `pieces` pieces.
__device__ __forceinline__ Place place(i64 pieces, i32 lanes, i32 per_lane) {
    i64 thread = thread_number();
    // The number of lanes is a power of two.
    i32 shift = 0;
    while (1 << shift < lanes) {
        shift++;
    }
    i64 group = thread >> shift;
    i64 row = pieces == 1 ? group : quotient(group, pieces);
    return {row, (group - row * pieces) * lanes * per_lane + (thread & (lanes - 1))};
}

/// Copies up to WORDS_PER_LANE words, all of them read before the first is written.
template <typename Word>
__device__ __forceinline__ void copy_words(u8* target, const u8* source, i64 first, i32 lanes, i64 words) {
    Word held[WORDS_PER_LANE];
#pragma unroll
    for (i32 step = 0; step < WORDS_PER_LANE; step++) {
        i64 word = first + step * lanes;
        if (word < words) {
            held[step] = reinterpret_cast<const Word*>(source)[word];
        }
    }
#pragma unroll
    for (i32 step = 0; step < WORDS_PER_LANE; step++) {
        i64 word = first + step * lanes;
        if (word < words) {
            reinterpret_cast<Word*>(target)[word] = held[step];
        }
    }
}

template <typename Word>
__device__ __forceinline__ void zero_words(u8* target, i64 first, i32 lanes, i64 words) {
#pragma unroll
    for (i32 step = 0; step < WORDS_PER_LANE; step++) {
        i64 word = first + step * lanes;
        if (word < words) {
            reinterpret_cast<Word*>(target)[word] = Word{};
        }
    }
}

__device__ __forceinline__ void
copy_piece(u8* target, const u8* source, i64 first, i32 lanes, i64 words, i32 word) {
    switch (word) {
        case 16: return copy_words<Word16>(target, source, first, lanes, words);
        case 8: return copy_words<u64>(target, source, first, lanes, words);
        case 4: return copy_words<u32>(target, source, first, lanes, words);
        case 2: return copy_words<u16>(target, source, first, lanes, words);
        default: return copy_words<u8>(target, source, first, lanes, words);
    }
}

__device__ __forceinline__ void zero_piece(u8* target, i64 first, i32 lanes, i64 words, i32 word) {
    switch (word) {
        case 16: return zero_words<Word16>(target, first, lanes, words);
        case 8: return zero_words<u64>(target, first, lanes, words);
        case 4: return zero_words<u32>(target, first, lanes, words);
        case 2: return zero_words<u16>(target, first, lanes, words);
        default: return zero_words<u8>(target, first, lanes, words);
    }
}

/// Where element `element` of a row lies from the row's first one, in elements.
__device__ __forceinline__ i64 element_offset(const StorePart& part, i64 element) {
    i64 head = quotient(element, part.dim);
    return head * part.head_stride + (element - head * part.dim) * part.dim_stride;
}

template <typename Element>
__device__ __forceinline__ void
copy_elements(const StorePart& part, u8* target, const u8* source, i64 first) {
    Element held[ELEMENTS_PER_LANE];
#pragma unroll
    for (i32 step = 0; step < ELEMENTS_PER_LANE; step++) {
        i64 element = first + step * part.lanes;
        if (element < part.words) {
            held[step] = reinterpret_cast<const Element*>(source)[element_offset(part, element)];
        }
    }
#pragma unroll
    for (i32 step = 0; step < ELEMENTS_PER_LANE; step++) {
        i64 element = first + step * part.lanes;
        if (element < part.words) {
            reinterpret_cast<Element*>(target)[element] = held[step];
        }
    }
}

__device__ __forceinline__ i32 target_bytes(i32 dtype) {
    return dtype == F32 ? 4 : dtype == F16 || dtype == BF16 ? 2 : 1;
}

__device__ __forceinline__ void
convert_elements(const StorePart& part, u8* target, const u8* source, i64 first) {
    float held[ELEMENTS_PER_LANE];
#pragma unroll
    for (i32 step = 0; step < ELEMENTS_PER_LANE; step++) {
        i64 element = first + step * part.lanes;
        if (element < part.words) {
            const u8* from = source + element_offset(part, element) * part.element_bytes;
            held[step] = load(from, part.source_dtype);
        }
    }
    i32 bytes = target_bytes(part.target_dtype);
#pragma unroll
    for (i32 step = 0; step < ELEMENTS_PER_LANE; step++) {
        i64 element = first + step * part.lanes;
        if (element < part.words) {
            float value = part.divisor == 1.0f ? held[step] : held[step] / part.divisor;
            store(target + element * bytes, part.target_dtype, value);
        }
    }
}

/// Row `indices[i]` of the target becomes row i of the values, for K and V. Negative indices are skipped.
KERNEL(kvpool_store, StoreParams) {
    const StorePart& part = p.parts[blockIdx.y];
    bool as_words = part.way == WAY_WORDS;
    Place at = place(part.pieces, part.lanes, as_words ? WORDS_PER_LANE : ELEMENTS_PER_LANE);
    if (at.row >= p.count) {
        return;
    }
    i64 row = number(p.indices, at.row);
    if (row < 0) {
        return;
    }
    if (row >= p.rows) {
        if (at.first == 0) {
            note(p.fault, FAULT_ROW, at.row, row);
        }
        return;
    }
    i64 lead = offset_of(at.row, part.lead_ndim, part.lead_shape, part.lead_strides);
    const u8* source = part.source + lead * part.element_bytes;
    if (as_words) {
        u8* target = part.target + row * part.words * part.word;
        return copy_piece(target, source, at.first, part.lanes, part.words, part.word);
    }
    if (part.way == WAY_CONVERT) {
        u8* target = part.target + row * part.words * target_bytes(part.target_dtype);
        return convert_elements(part, target, source, at.first);
    }
    u8* target = part.target + row * part.words * part.element_bytes;
    switch (part.element_bytes) {
        case 4: return copy_elements<u32>(part, target, source, at.first);
        case 2: return copy_elements<u16>(part, target, source, at.first);
        default: return copy_elements<u8>(part, target, source, at.first);
    }
}

/// Row i of the target becomes row `indices[i]` of the source, for K and V; zeros where there is no such row.
KERNEL(kvpool_gather, GatherParams) {
    const GatherPart& part = p.parts[blockIdx.y];
    Place at = place(part.pieces, part.lanes, WORDS_PER_LANE);
    if (at.row >= p.count) {
        return;
    }
    i64 row_bytes = part.words * part.word;
    u8* target = part.target + at.row * row_bytes;
    i64 row = number(p.indices, at.row);
    if (!within(row, p.rows)) {
        if (at.first == 0) {
            note(p.fault, FAULT_ROW, at.row, row);
        }
        return zero_piece(target, at.first, part.lanes, part.words, part.word);
    }
    copy_piece(target, part.source + row * row_bytes, at.first, part.lanes, part.words, part.word);
}

/// Row `target[i]` becomes row `source[i]` in every buffer. No row is both read and written.
KERNEL(kvpool_move, MoveParams) {
    i32 buffers = p.groups[0].buffers + p.groups[1].buffers;
    for (i32 buffer = blockIdx.y; buffer < buffers; buffer += gridDim.y) {
        bool is_second = buffer >= p.groups[0].buffers;
        const RowGroup& group = p.groups[is_second];
        Place at = place(group.pieces, group.lanes, WORDS_PER_LANE);
        if (at.row >= p.count) {
            continue;
        }
        i64 to = number(p.target, at.row);
        i64 from = number(p.source, at.row);
        if (!within(to, p.rows) || !within(from, p.rows)) {
            if (at.first == 0) {
                note(p.fault, FAULT_ROW, at.row, within(to, p.rows) ? from : to);
            }
            continue;
        }
        i64 row_bytes = group.words * group.word;
        u8* base = group.base + (buffer - (is_second ? p.groups[0].buffers : 0)) * group.step;
        if (to != from) {
            copy_piece(
                base + to * row_bytes, base + from * row_bytes, at.first, group.lanes, group.words, group.word);
        }
    }
}

/// Carries out the steps of a plan for one word of every row, in order.
template <typename Word>
__device__ __forceinline__ void move_word(const OrderParams& p, u8* base, i64 words, i64 word) {
    Word* column = reinterpret_cast<Word*>(base) + word;
    for (i64 step = 0; step < p.count; step++) {
        const i32* move = p.steps + 3 * step;
        Word* a = column + move[1] * words;
        Word* b = column + move[2] * words;
        Word read = *b;
        if (move[0] != 0) {
            *b = *a;
        }
        *a = read;
    }
}

/// The moves of `steps`, triples of kind, a and b: row a becomes row b, or both trade places. Each thread owns one
/// word of every row of a buffer, so the order of its steps is all the order there is.
KERNEL(kvpool_move_in_order, OrderParams) {
    i32 buffers = p.groups[0].buffers + p.groups[1].buffers;
    i64 word = thread_number();
    for (i32 buffer = blockIdx.y; buffer < buffers; buffer += gridDim.y) {
        bool is_second = buffer >= p.groups[0].buffers;
        const RowGroup& group = p.groups[is_second];
        if (word >= group.words) {
            continue;
        }
        u8* base = group.base + (buffer - (is_second ? p.groups[0].buffers : 0)) * group.step;
        switch (group.word) {
            case 16: move_word<Word16>(p, base, group.words, word); break;
            case 8: move_word<u64>(p, base, group.words, word); break;
            case 4: move_word<u32>(p, base, group.words, word); break;
            case 2: move_word<u16>(p, base, group.words, word); break;
            default: move_word<u8>(p, base, group.words, word); break;
        }
    }
}

/// Zeroes row `indices[i]` of every buffer.
KERNEL(kvpool_zero, ZeroParams) {
    i32 buffers = p.groups[0].buffers + p.groups[1].buffers;
    for (i32 buffer = blockIdx.y; buffer < buffers; buffer += gridDim.y) {
        bool is_second = buffer >= p.groups[0].buffers;
        const RowGroup& group = p.groups[is_second];
        Place at = place(group.pieces, group.lanes, WORDS_PER_LANE);
        if (at.row >= p.count) {
            continue;
        }
        i64 row = number(p.indices, at.row);
        if (!within(row, p.rows)) {
            if (at.first == 0) {
                note(p.fault, FAULT_ROW, at.row, row);
            }
            continue;
        }
        u8* base = group.base + (buffer - (is_second ? p.groups[0].buffers : 0)) * group.step;
        zero_piece(base + row * group.words * group.word, at.first, group.lanes, group.words, group.word);
    }
}
