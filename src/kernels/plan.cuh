// A step of a batch: writes the request table and the metadata of attention kernels, in one launch.

#pragma once

#include "params.cuh"

/// Pages that a thread reads before it writes the first.
enum { PAGES_AT_ONCE = 4 };

/// Writes the new slots to the table and every field of the plan.
///
/// Blocks in the second dimension of the grid share the requests, those in the first the positions of each. What a request
/// had before is read from a part of the table that no thread writes.
__device__ __forceinline__ void write_plan(const PlanParams& p, const i32* list) {
    i64 step = i64(gridDim.x) * BLOCK;
    const PlanRequest* requests = list != nullptr ? reinterpret_cast<const PlanRequest*>(list) : p.requests;
    const i32* all_pages = list != nullptr ? reinterpret_cast<const i32*>(requests + p.padded_batch) : p.pages;
    if (blockIdx.y == 0 && thread_number() == 0) {
        p.qo_indptr[p.padded_batch] = p.tokens;
        p.kv_indptr[p.padded_batch] = p.kv_len;
    }
    for (i32 i = blockIdx.y; i < p.padded_batch; i += gridDim.y) {
        const PlanRequest request = requests[i];
        bool is_real = i < p.batch;
        u32 page_size = p.page_size;
        if (thread_number() == 0) {
            p.req_pool_indices[i] = request.row;
            p.seq_lens[i] = request.seq;
            p.qo_indptr[i] = request.qo_begin;
            p.kv_indptr[i] = request.kv_begin;
            p.kv_last_page_len[i] = request.seq == 0 ? 0 : i32(u32(request.seq - 1) % page_size) + 1;
        }
        i32* row = p.table + request.row * p.columns;
        i32 first_page = i32(u32(request.start) / page_size);
        const i32* pages = all_pages + request.page_begin;
        for (i64 at = request.start + thread_number(); at < request.seq; at += step) {
            u32 page = u32(at) / page_size;
            i32 slot = is_real ? i32(u32(pages[page - first_page]) * page_size + u32(at) % page_size) : 0;
            if (is_real) {
                row[at] = slot;
            }
            if (at >= request.prefix) {
                i64 token = request.qo_begin + (at - request.prefix);
                p.out_cache_loc[token] = slot;
                p.positions[token] = i32(at);
                p.slot_mapping[token] = is_real ? slot : -1;
            }
        }
        i64 count = (i64(request.seq) + page_size - 1) / page_size;
        // Without `kv_indices` only the visible part of the line is needed.
        bool shows = p.block_table != nullptr;
        i64 begin = p.kv_indices != nullptr ? 0 : shows ? request.block_from : count;
        i32* line = p.block_table + i * i64(p.width);
        for (i64 first = begin + thread_number(); first < count; first += PAGES_AT_ONCE * step) {
            i32 held[PAGES_AT_ONCE];
#pragma unroll
            for (i32 next = 0; next < PAGES_AT_ONCE; next++) {
                i64 at = first + next * step;
                if (at < count) {
                    held[next] = at < first_page ? row[at * page_size] : pages[at - first_page];
                }
            }
#pragma unroll
            for (i32 next = 0; next < PAGES_AT_ONCE; next++) {
                i64 at = first + next * step;
                if (at < count) {
                    i32 page = at < first_page ? i32(u32(held[next]) / page_size) : held[next];
                    if (p.kv_indices != nullptr) {
                        p.kv_indices[request.kv_begin + at] = page;
                    }
                    if (shows && at >= request.block_from) {
                        line[at] = page;
                    }
                }
            }
        }
        if (shows) {
            for (i64 at = count + thread_number(); at < request.block_until; at += step) {
                line[at] = 0;
            }
        }
    }
}
