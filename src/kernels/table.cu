// Writing and reading the request table, and reading and writing index tensors.

#include "params.cuh"

/// `table[row[i], column[i]] = value[i]`; the written values also go to `echo`, if there is one.
KERNELS(kvpool_write_points, PointsParams) {
    i64 i = thread_number();
    if (i >= p.count) {
        return;
    }
    i64 row = number(p.row, i, list);
    i64 column = number(p.column, i, list);
    i64 value = number(p.value, i, list);
    bool is_right = true;
    if (!within(row, p.rows)) {
        note(p.fault, FAULT_ROW, i, row);
        is_right = false;
    } else if (!within(column, p.columns)) {
        note(p.fault, FAULT_COLUMN, i, column);
        is_right = false;
    } else if (value != i64(i32(value))) {
        note(p.fault, FAULT_VALUE, i, value);
        is_right = false;
    } else {
        p.table[row * p.columns + column] = i32(value);
    }
    if (p.echo != nullptr) {
        p.echo[3 * i] = is_right ? i32(row) : -1;
        p.echo[3 * i + 1] = i32(column);
        p.echo[3 * i + 2] = i32(value);
    }
}

/// Copies `length` numbers, or writes zeros without a source; each thread has several in flight.
__device__ __forceinline__ void copy_numbers(i32* target, const i32* source, i64 length) {
    i64 step = i64(gridDim.x) * BLOCK;
    for (i64 first = thread_number(); first < length; first += WORDS_PER_LANE * step) {
        i32 held[WORDS_PER_LANE];
#pragma unroll
        for (i32 i = 0; i < WORDS_PER_LANE; i++) {
            i64 at = first + i * step;
            held[i] = source != nullptr && at < length ? source[at] : 0;
        }
#pragma unroll
        for (i32 i = 0; i < WORDS_PER_LANE; i++) {
            i64 at = first + i * step;
            if (at < length) {
                target[at] = held[i];
            }
        }
    }
}

/// Row `rows[i]` from column `starts[i]` on becomes `values[indptr[i]..indptr[i + 1]]`, or as many zeros.
KERNELS(kvpool_write_ragged, RaggedParams) {
    const i32* rows = list != nullptr ? list : p.rows;
    const i32* indptr = list != nullptr ? list + p.count : p.indptr;
    for (i64 i = blockIdx.y; i < p.count; i += gridDim.y) {
        i64 begin = indptr[i];
        // The ends may have wrapped; their difference has not.
        i64 length = i32(u32(indptr[i + 1]) - u32(indptr[i]));
        i64 start = p.starts == nullptr ? 0 : p.starts[i];
        i32* row = p.table + rows[i] * p.columns + start;
        copy_numbers(row, p.values == nullptr ? nullptr : p.values + begin, length);
    }
}

/// `out[indptr[i]..indptr[i + 1]]` becomes the first slots of row `row[i]`.
KERNELS(kvpool_kv_indices, KvIndicesParams) {
    for (i64 i = blockIdx.y; i < p.count; i += gridDim.y) {
        i64 row = number(p.row, i, list);
        i64 begin = number(p.indptr, i, list);
        i64 end = number(p.indptr, i + 1, list);
        bool is_first = thread_number() == 0;
        if (!within(row, p.rows)) {
            if (is_first) {
                note(p.fault, FAULT_ROW, i, row);
            }
            continue;
        }
        if (begin < 0 || end < begin || end > p.capacity || end - begin > p.columns) {
            if (is_first) {
                note(p.fault, FAULT_COLUMN, i, end);
            }
            continue;
        }
        copy_numbers(p.out + begin, p.table + row * p.columns, end - begin);
    }
}

/// The slots behind `last_loc` in the page that a request continues. A last slot that is not the end of its request leaves
/// `out` as it is.
KERNEL(kvpool_continue_pages, WithList<ContinueParams>) {
    i64 i = thread_number();
    if (i >= p.params.count) {
        return;
    }
    i64 offset = p.list[i];
    const i32* indptr = p.list + p.params.count;
    i64 begin = indptr[i];
    i64 grown = indptr[i + 1] - begin;
    if (offset == 0 || grown == 0) {
        return;
    }
    i64 last = number(p.params.last_loc, p.params.first + i, nullptr);
    if (!within(last - p.params.page_size, p.params.slots) || (last + 1) % p.params.page_size != offset) {
        note(p.params.fault, FAULT_LAST, p.params.first + i, last);
        return;
    }
    i64 open = p.params.page_size - offset;
    for (i64 k = 0; k < open && k < grown; k++) {
        if (p.params.is_wide) {
            static_cast<i64*>(p.params.out)[begin + k] = last + 1 + k;
        } else {
            static_cast<i32*>(p.params.out)[begin + k] = i32(last + 1 + k);
        }
    }
}

/// `out[i]` becomes number i of an index tensor.
KERNEL(kvpool_read_indices, ReadParams) {
    i64 i = thread_number();
    if (i < p.count) {
        p.out[i] = number(p.from, i, nullptr);
    }
}
