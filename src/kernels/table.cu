// Writing and reading the request table, and reading and writing index tensors.

#include "params.cuh"

/// `table[row[i], column[i]] = value[i]`; the written values also go to `echo`, if there is one.
KERNELS(kvpool_write_points, PointsParams) {
    u32 i = u32(thread_number());
    if (i >= p.count) {
        return;
    }
    Fetched fetched[] = {fetch(p.row, i, list), fetch(p.column, i, list), fetch(p.value, i, list)};
    i64 row = value_of(p.row, fetched[0]);
    i64 column = value_of(p.column, fetched[1]);
    i64 value = value_of(p.value, fetched[2]);
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

/// Numbers that the blocks in the first dimension of the grid take at once: each thread NUMBERS_PER_THREAD, BLOCK apart.
enum { TURN = BLOCK * NUMBERS_PER_THREAD };

/// Copies `length` numbers; those that a thread takes at once are read before the first is written.
__device__ __forceinline__ void copy_numbers(i32* target, const i32* source, u32 length) {
    for (u32 first = blockIdx.x * TURN + threadIdx.x; first < length; first += gridDim.x * TURN) {
        const i32* from = source + first;
        i32* to = target + first;
        i32 held[NUMBERS_PER_THREAD];
#pragma unroll
        for (u32 i = 0; i < NUMBERS_PER_THREAD; i++) {
            if (i * BLOCK < length - first) {
                held[i] = from[i * BLOCK];
            }
        }
#pragma unroll
        for (u32 i = 0; i < NUMBERS_PER_THREAD; i++) {
            if (i * BLOCK < length - first) {
                to[i * BLOCK] = held[i];
            }
        }
    }
}

/// The first `indptr[i + 1] - indptr[i]` columns of row `rows[i]` become zero.
KERNELS(kvpool_zero_columns, ColumnsParams) {
    const i32* rows = list != nullptr ? list : p.rows;
    const i32* indptr = list != nullptr ? list + p.count : p.indptr;
    for (u32 i = blockIdx.y; i < p.count; i += gridDim.y) {
        // The ends may have wrapped; their difference has not.
        u32 length = u32(indptr[i + 1]) - u32(indptr[i]);
        i32* row = p.table + rows[i] * p.columns;
        for (u32 first = blockIdx.x * TURN + threadIdx.x; first < length; first += gridDim.x * TURN) {
#pragma unroll
            for (u32 step = 0; step < NUMBERS_PER_THREAD; step++) {
                if (step * BLOCK < length - first) {
                    (row + first)[step * BLOCK] = 0;
                }
            }
        }
    }
}

/// `out[indptr[i]..indptr[i + 1]]` becomes the first slots of row `row[i]`.
KERNELS(kvpool_kv_indices, KvIndicesParams) {
    bool is_first = thread_number() == 0;
    for (u32 i = blockIdx.y; i < p.count; i += gridDim.y) {
        Fetched fetched[] = {fetch(p.row, i, list), fetch(p.indptr, i, list), fetch(p.indptr, i + 1, list)};
        i64 row = value_of(p.row, fetched[0]);
        i64 begin = value_of(p.indptr, fetched[1]);
        i64 end = value_of(p.indptr, fetched[2]);
        if (!within(row, p.rows)) {
            if (is_first) {
                note(p.fault, FAULT_ROW, i, row);
            }
        } else if (begin < 0 || end < begin || end > p.capacity || end - begin > p.columns) {
            if (is_first) {
                note(p.fault, FAULT_COLUMN, i, end);
            }
        } else {
            copy_numbers(p.out + begin, p.table + row * p.columns, u32(end - begin));
        }
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
    i64 last = number(p.params.last_loc, u32(p.params.first + i), nullptr);
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

/// The slots of runs, one after the other.
KERNEL(kvpool_list_runs, WithList<RunsParams>) {
    u32 i = u32(thread_number());
    if (i >= p.params.count) {
        return;
    }
    const i32* begins = p.list;
    u32 run = 0;
    u32 end = p.params.runs;
    // The last run that does not begin behind `i`.
    while (end - run > 1) {
        u32 middle = (run + end) / 2;
        if (u32(begins[middle]) <= i) {
            run = middle;
        } else {
            end = middle;
        }
    }
    i32 slot = p.list[p.params.runs + run] + i32(i) - begins[run];
    if (p.params.is_wide) {
        static_cast<i64*>(p.params.out)[i] = slot;
    } else {
        static_cast<i32*>(p.params.out)[i] = slot;
    }
}

/// `out[i]` becomes number i of an index tensor.
KERNEL(kvpool_read_indices, ReadParams) {
    u32 i = u32(thread_number());
    if (i < p.count) {
        p.out[i] = number(p.from, i, nullptr);
    }
}
