// Writing and reading the request table, and reading index tensors.

#include "params.cuh"

/// `table[row[i], column[i]] = value[i]`, and what was written to `echo`, if there is one.
KERNEL(kvpool_write_points, PointsParams) {
    i64 i = thread_number();
    if (i >= p.count) {
        return;
    }
    i64 row = number(p.row, i);
    i64 column = number(p.column, i);
    i64 value = number(p.value, i);
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

/// Row `rows[i]` from column `starts[i]` on becomes `values[indptr[i]..indptr[i + 1]]`, or as many zeros.
KERNEL(kvpool_write_ragged, RaggedParams) {
    for (i64 i = blockIdx.y; i < p.count; i += gridDim.y) {
        i64 begin = p.indptr[i];
        // The ends may have wrapped; their difference has not.
        i64 length = i32(u32(p.indptr[i + 1]) - u32(p.indptr[i]));
        i64 start = p.starts == nullptr ? 0 : p.starts[i];
        i32* row = p.table + p.rows[i] * p.columns + start;
        for (i64 at = thread_number(); at < length; at += i64(gridDim.x) * blockDim.x) {
            row[at] = p.values == nullptr ? 0 : p.values[begin + at];
        }
    }
}

/// `out[indptr[i]..indptr[i + 1]]` becomes the first slots of row `row[i]`.
KERNEL(kvpool_kv_indices, KvIndicesParams) {
    for (i64 i = blockIdx.y; i < p.count; i += gridDim.y) {
        i64 row = number(p.row, i);
        i64 begin = number(p.indptr, i);
        i64 end = number(p.indptr, i + 1);
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
        const i32* from = p.table + row * p.columns;
        for (i64 at = thread_number(); at < end - begin; at += i64(gridDim.x) * blockDim.x) {
            p.out[begin + at] = from[at];
        }
    }
}

/// `out[i]` becomes number i of an index tensor.
KERNEL(kvpool_read_indices, ReadParams) {
    i64 i = thread_number();
    if (i < p.count) {
        p.out[i] = number(p.from, i);
    }
}
