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

/// The elements of a row that a lane has, ELEMENTS_PER_LANE of them, and where they lie in the source.
struct Elements {
    const u8* source;
    u8* target;
    i64 words;
    /// The first one, and how far apart they are in the target.
    i64 first;
    i64 step;
    /// Where the first one lies in the source, and how far apart they are there, in elements; `turn` more where a head
    /// ends. `rest` is the place of the first one in its head of `dim` elements, and moves by `rest_step`.
    i64 offset;
    i64 offset_step;
    i64 rest;
    i64 rest_step;
    i64 dim;
    i64 turn;
    /// They lie side by side, aligned, in the source and in the target.
    bool is_run;
};

/// What a run of elements must be aligned to.
__device__ __forceinline__ u64 run_alignment(i32 element_bytes) {
    return element_bytes == 1 ? 8 : 16;
}

/// The elements of the lane whose first one, taken in turns with the other lanes, is `first`.
__device__ __forceinline__ Elements
elements(const StorePart& part, const u8* source, u8* target, i32 target_bytes, i64 first) {
    // All lanes of a row must come to the same answer, so it rests on what they share.
    u64 apart = part.dim == part.words ? 0 : u64(part.head_stride * part.element_bytes);
    u64 misaligned = ((u64(source) | apart) & (run_alignment(part.element_bytes) - 1))
        | (u64(target) & (run_alignment(target_bytes) - 1));
    Elements its;
    its.source = source;
    its.target = target;
    its.words = part.words;
    its.is_run = part.dim_stride == 1 && part.dim % ELEMENTS_PER_LANE == 0 && misaligned == 0;
    its.step = its.is_run ? 1 : part.lanes;
    its.first = its.is_run ? first + (first & (part.lanes - 1)) * (ELEMENTS_PER_LANE - 1) : first;
    its.dim = part.dim;
    i64 head = quotient(its.first, part.dim);
    i64 head_step = quotient(its.step, part.dim);
    its.rest = its.first - head * part.dim;
    its.rest_step = its.step - head_step * part.dim;
    its.offset = head * part.head_stride + its.rest * part.dim_stride;
    its.offset_step = head_step * part.head_stride + its.rest_step * part.dim_stride;
    its.turn = part.head_stride - part.dim * part.dim_stride;
    return its;
}

/// Elements side by side, read and written in words as wide as can be.
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
    i64 rest = its.rest;
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

/// Bytes of an element of a buffer.
__device__ __forceinline__ i32 bytes_of(i32 dtype) {
    return dtype == DTYPE_F32 ? 4 : dtype == DTYPE_F16 || dtype == DTYPE_BF16 ? 2 : 1;
}

__device__ __forceinline__ void
convert_elements(const Elements& its, i32 source_dtype, i32 target_dtype, float divisor) {
    float held[ELEMENTS_PER_LANE];
    switch (source_dtype) {
        case DTYPE_F64: load_elements<F64>(its, held); break;
        case DTYPE_F32: load_elements<F32>(its, held); break;
        case DTYPE_F16: load_elements<F16>(its, held); break;
        case DTYPE_BF16: load_elements<BF16>(its, held); break;
        case DTYPE_F8E4M3: load_elements<F8E4M3>(its, held); break;
        default: load_elements<F8E5M2>(its, held); break;
    }
    if (divisor != 1.0f) {
#pragma unroll
        for (i32 i = 0; i < ELEMENTS_PER_LANE; i++) {
            held[i] /= divisor;
        }
    }
    switch (target_dtype) {
        case DTYPE_F32: return store_elements<F32>(its, held);
        case DTYPE_F16: return store_elements<F16>(its, held);
        case DTYPE_BF16: return store_elements<BF16>(its, held);
        case DTYPE_F8E4M3: return store_elements<F8E4M3>(its, held);
        default: return store_elements<F8E5M2>(its, held);
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
    bool converts = part.way == WAY_CONVERT;
    i32 target_bytes = converts ? bytes_of(part.target_dtype) : part.element_bytes;
    u8* target = part.target + row * part.words * target_bytes;
    Elements its = elements(part, source, target, target_bytes, at.first);
    if (its.first >= its.words) {
        return;
    }
    if (converts) {
        return convert_elements(its, part.source_dtype, part.target_dtype, part.divisor);
    }
    switch (part.element_bytes) {
        case 4: return copy_elements<u32>(its);
        case 2: return copy_elements<u16>(its);
        default: return copy_elements<u8>(its);
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

/// One of the buffers of both groups.
struct Buffer {
    const RowGroup& group;
    u8* base;
};

__device__ __forceinline__ Buffer buffer_of(const RowGroup* groups, i32 number) {
    bool is_second = number >= groups[0].buffers;
    const RowGroup& group = groups[is_second];
    return {group, group.base + (is_second ? number - groups[0].buffers : number) * group.step};
}

/// Row `target[i]` becomes row `source[i]` in every buffer. No row is both read and written.
KERNEL(kvpool_move, MoveParams) {
    i32 buffers = p.groups[0].buffers + p.groups[1].buffers;
    for (i32 buffer = blockIdx.y; buffer < buffers; buffer += gridDim.y) {
        Buffer its = buffer_of(p.groups, buffer);
        const RowGroup& group = its.group;
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
        if (to != from) {
            u8* target = its.base + to * row_bytes;
            copy_piece(target, its.base + from * row_bytes, at.first, group.lanes, group.words, group.word);
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
        Buffer its = buffer_of(p.groups, buffer);
        const RowGroup& group = its.group;
        if (word >= group.words) {
            continue;
        }
        switch (group.word) {
            case 16: move_word<Word16>(p, its.base, group.words, word); break;
            case 8: move_word<u64>(p, its.base, group.words, word); break;
            case 4: move_word<u32>(p, its.base, group.words, word); break;
            case 2: move_word<u16>(p, its.base, group.words, word); break;
            default: move_word<u8>(p, its.base, group.words, word); break;
        }
    }
}

/// Zeroes row `indices[i]` of every buffer.
KERNEL(kvpool_zero, ZeroParams) {
    i32 buffers = p.groups[0].buffers + p.groups[1].buffers;
    for (i32 buffer = blockIdx.y; buffer < buffers; buffer += gridDim.y) {
        Buffer its = buffer_of(p.groups, buffer);
        const RowGroup& group = its.group;
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
        zero_piece(its.base + row * group.words * group.word, at.first, group.lanes, group.words, group.word);
    }
}
