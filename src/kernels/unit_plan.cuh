// A step of a batch over the groups of a layout: writes the page tables of all groups and the metadata of attention
// kernels, in one launch.

#pragma once

#include "params.cuh"

/// The positions at which a request has units of a group: 0 to `sinks`, and `first` to `end`.
struct KeptUnits {
    i32 sinks;
    i32 first;
    i32 end;

    __device__ __forceinline__ i32 count() const {
        return sinks + (end - first);
    }

    /// The number of units before a position.
    __device__ __forceinline__ i32 before(i32 at) const {
        return at < first ? (at < sinks ? at : sinks) : sinks + (at - first);
    }

    __device__ __forceinline__ i32 position(i32 number) const {
        return number < sinks ? number : first + (number - sinks);
    }

    __device__ __forceinline__ bool has(i32 at) const {
        return at < sinks || (at >= first && at < end);
    }
};

/// The units of a request, by their positions: those before `sent` are in the table, the others in a list.
struct RequestUnits {
    const i32* line;
    const i32* list;
    i32 listed_from;
    i32 sent;
    KeptUnits kept;

    __device__ __forceinline__ i32 at(i32 position) const {
        return position < sent ? line[position] : list[kept.before(position) - listed_from];
    }
};

__device__ __forceinline__ i32* array_at(const UnitPlanParams& p, i32 place) {
    return place < 0 ? nullptr : reinterpret_cast<i32*>(p.base + i64(place) * UNIT_PLAN_ALIGNMENT);
}

/// Writes what a step changes of a request in a group. What it had before is read from a part of the table that no thread
/// writes.
__device__ __forceinline__ void write_pages(
    const UnitPlanParams& p, const UnitGroup& group, const UnitRequest& request, const UnitSpan& span, i32 i,
    const RequestUnits& units, i32* line, i64 step
) {
    bool is_real = i < p.batch;
    u32 tokens = u32(group.unit_tokens), stride = u32(group.stride), entries = tokens / stride;
    u32 filled = u32(request.seq) / stride;
    i32 filled_units = i32((filled + entries - 1) / entries);
    if (thread_number() == 0) {
        array_at(p, group.kv_indptr)[i] = span.kv_begin;
        array_at(p, group.kv_last_page_len)[i] = filled == 0 ? 0 : i32((filled - 1) % entries) + 1;
    }
    if (is_real) {
        for (i64 at = span.sent + thread_number(); at < span.end; at += step) {
            if (units.kept.has(i32(at))) {
                line[at] = units.at(i32(at));
            }
        }
    }
    i32* out_cache_loc = array_at(p, group.out_cache_loc);
    i64* slot_mapping = reinterpret_cast<i64*>(array_at(p, group.slot_mapping));
    for (i64 at = request.prefix + thread_number(); at < request.seq; at += step) {
        u32 within = u32(at) % tokens;
        bool is_entry = is_real && u32(at + 1) % stride == 0;
        i32 slot = is_entry ? units.at(i32(u32(at) / tokens)) * i32(entries) + i32(within / stride) : 0;
        i64 token = request.qo_begin + (at - request.prefix);
        out_cache_loc[token] = slot;
        slot_mapping[token] = is_entry ? slot : -1;
    }
    if (group.kv_indices >= 0) {
        i32* kv_indices = array_at(p, group.kv_indices) + span.kv_begin;
        KeptUnits shown = units.kept;
        shown.end = shown.end < filled_units ? shown.end : filled_units;
        shown.first = shown.first < shown.end ? shown.first : shown.end;
        shown.sinks = shown.sinks < shown.end ? shown.sinks : shown.end;
        for (i64 number = thread_number(); number < shown.count(); number += step) {
            kv_indices[number] = is_real ? units.at(shown.position(i32(number))) : 0;
        }
    }
    if (group.block_table >= 0) {
        i32* shown = array_at(p, group.block_table) + i64(i) * group.width;
        for (i64 at = span.zero_from + thread_number(); at < span.zero_until; at += step) {
            if (!(is_real && units.kept.has(i32(at)))) {
                shown[at] = 0;
            }
        }
        if (is_real) {
            for (i64 at = span.line_from + thread_number(); at < span.end; at += step) {
                if (units.kept.has(i32(at))) {
                    shown[at] = units.at(i32(at));
                }
            }
        }
    }
}

/// Writes the numbers of a request's state, one row of the result for each number.
__device__ __forceinline__ void write_state(
    const UnitPlanParams& p, const UnitGroup& group, const UnitSpan& span, i32 i, const RequestUnits& units, i32* line,
    i64 step
) {
    i32* state_indices = array_at(p, group.out_cache_loc);
    for (i64 at = thread_number(); at < group.width; at += step) {
        i32 unit = i < p.batch ? units.at(i32(at)) : 0;
        if (i < p.batch && at >= span.sent) {
            line[at] = unit;
        }
        state_indices[at * p.padded_batch + i] = unit;
    }
}

/// Blocks in the second dimension of the grid share the pairs of a group and a request, those in the first the positions
/// of each.
__device__ __forceinline__ void write_unit_plan(const UnitPlanParams& p, const i32* list) {
    i64 step = i64(gridDim.x) * BLOCK;
    i64 pairs = i64(p.groups_count) * p.padded_batch;
    const UnitGroup* groups = p.groups;
    const UnitRequest* requests = p.requests;
    const UnitSpan* spans = p.spans;
    const i32* all_units = p.units;
    if (list != nullptr) {
        groups = reinterpret_cast<const UnitGroup*>(list);
        requests = reinterpret_cast<const UnitRequest*>(groups + p.groups_count);
        spans = reinterpret_cast<const UnitSpan*>(requests + p.padded_batch);
        all_units = reinterpret_cast<const i32*>(spans + pairs);
    }
    if (blockIdx.y == 0) {
        for (i64 g = thread_number(); g < p.groups_count; g += step) {
            if (groups[g].kv_indptr >= 0) {
                array_at(p, groups[g].kv_indptr)[p.padded_batch] = groups[g].kv_len;
            }
        }
        if (thread_number() == 0) {
            p.qo_indptr[p.padded_batch] = p.tokens;
        }
    }
    for (i64 pair = blockIdx.y; pair < pairs; pair += gridDim.y) {
        i32 g = i32(u32(pair) / u32(p.padded_batch)), i = i32(u32(pair) % u32(p.padded_batch));
        const UnitGroup group = groups[g];
        const UnitRequest request = requests[i];
        const UnitSpan span = spans[pair];
        KeptUnits kept = {span.sinks, span.first, span.end};
        i32* line = array_at(p, group.table) + i64(request.row) * group.width;
        RequestUnits units = {line, all_units + span.unit_begin, kept.before(span.sent), span.sent, kept};
        if (g == 0) {
            if (thread_number() == 0) {
                p.req_pool_indices[i] = request.row;
                p.seq_lens[i] = request.seq;
                p.qo_indptr[i] = request.qo_begin;
            }
            for (i64 at = request.prefix + thread_number(); at < request.seq; at += step) {
                p.positions[request.qo_begin + (at - request.prefix)] = i32(at);
            }
        }
        if (group.kv_indptr < 0) {
            write_state(p, group, span, i, units, line, step);
        } else {
            write_pages(p, group, request, span, i, units, line, step);
        }
    }
}
