// Top-k, steps 1 to 3: the bound, the candidates, and the k-th largest of them. See topk.cu.
#pragma once
#include "topk_common.cuh"

__device__ __forceinline__ float max4(const float4& v) { return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)); }

// One of the tile's 32 scores, by a number known at run time: a tree of selections, so that the
// tile stays in registers.
__device__ __forceinline__ float pick(const float4 (&v)[TILE], u32 which) {
    static_assert(TILE == 8, "a tree of five levels");
    float x[16], y[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        x[2 * i] = which & 1 ? v[i].y : v[i].x;
        x[2 * i + 1] = which & 1 ? v[i].w : v[i].z;
    }
#pragma unroll
    for (u32 i = 0; i < 8; ++i) y[i] = which & 2 ? x[2 * i + 1] : x[2 * i];
    const float a = which & 4 ? y[1] : y[0], b = which & 4 ? y[3] : y[2];
    const float c = which & 4 ? y[5] : y[4], d = which & 4 ? y[7] : y[6];
    const float low = which & 8 ? b : a, high = which & 8 ? d : c;
    return which & 16 ? high : low;
}

// Appends the tile's scores that reach the bound, with their positions. They are few: what every
// warp executes is two instructions a score.
__device__ __forceinline__ void filter(const Row& row, const Candidates& c, const float4 (&v)[TILE], u32 tile,
                                       float bound) {
    Shared& s = shared();
    const u32 lane = threadIdx.x % 32;
    u32 passing = 0;
    const auto test = [&](float x, u32 bit) {
        asm volatile("{.reg .pred p; setp.ge.f32 p, %1, %2; @p or.b32 %0, %0, %3;}"
                     : "+r"(passing)
                     : "f"(x), "f"(bound), "r"(bit));
    };
#pragma unroll
    for (u32 i = 0; i < TILE; ++i) {
        test(v[i].x, 1u << (i * 4));
        test(v[i].y, 2u << (i * 4));
        test(v[i].z, 4u << (i * 4));
        test(v[i].w, 8u << (i * 4));
    }
    if (!__any_sync(FULL_WARP, passing)) return;
    const u32 through = warp_inclusive_scan(__popc(passing), lane);
    u32 base = 0;
    if (lane == 31) base = atomicAdd(&s.count, through);
    base = __shfl_sync(FULL_WARP, base, 31);
    if (base + __shfl_sync(FULL_WARP, through, 31) > row.cap) return;  // overflow: seen in s.count
    u32 slot = base + through - __popc(passing);
    u32* keys = c.keys + row.rank * row.cap;
    const u32 first = offset_of(row, tile, 0), pitch = row.tiles * BLOCK;
#pragma unroll 1
    for (; passing; passing &= passing - 1, ++slot) {
        const u32 which = __ffs(passing) - 1;
        c.positions[slot] = first + which / 4 * pitch + which % 4;
        keys[slot] = __float_as_uint(pick(v, which));
    }
}

// Turns the scores of own candidates that are new into keys. Call in step, after a __syncthreads.
__device__ __forceinline__ void settle(const Row& row, const Candidates& c) {
    Shared& s = shared();
    const u32 count = s.count > row.cap ? 0 : s.count;  // after an overflow, places are empty
    u32* keys = c.keys + row.rank * row.cap;
    u32 top = 0;
#pragma unroll 1
    for (u32 i = s.settled + threadIdx.x; i < count; i += THREADS) {
        const u32 key = key_of(__uint_as_float(keys[i]));
        keys[i] = key;
        top = max(top, key);
    }
    top = __reduce_max_sync(FULL_WARP, top);
    if (threadIdx.x % 32 == 0 && top) atomicMax(&s.top, top);
}

// Step 1: a key that at least k scores of the row reach; 0 when the sample has too few groups.
__device__ __forceinline__ u32 lower_bound(const Row& row, const float4 (&v)[TILE], u32 length, u32& round) {
    Shared& s = shared();
    float maxima[TILE];
#pragma unroll
    for (u32 i = 0; i < TILE; ++i) maxima[i] = max4(v[i]);
    // Larger groups, fewer of them, as long as there are several times k.
    u32 groups = TILE, group = 4;
    if (length >= 32 * row.k && row.ctas * THREADS * TILE / 2 >= 4 * row.k) {
        groups = TILE / 2, group = 8;
#pragma unroll
        for (u32 i = 0; i < TILE / 2; ++i) maxima[i] = fmaxf(maxima[i], maxima[i + TILE / 2]);
        if (length >= 256 * row.k && row.ctas * THREADS >= 8 * row.k) {
            groups = 1, group = 32;
            maxima[0] = fmaxf(fmaxf(maxima[0], maxima[1]), fmaxf(maxima[2], maxima[3]));
        }
    }
    // A sample of which few groups reach the bound has few scores above it in each.
    const u32 sampled = min(length, row.ctas * TILE * BLOCK) / group;
    u32 bound = 0, need = row.k, shift = 20, above_shift = 31;
#pragma unroll 1
    while (true) {
        const u32 mask = shift == 20 ? BINS - 1 : 1023;
#pragma unroll
        for (u32 i = 0; i < TILE; ++i) {
            if (i >= groups) break;
            const u32 key = key_of(maxima[i]);  // 0: no score, or only NaN
            if (key && (shift == 20 || (key ^ bound) >> above_shift == 0)) atomicAdd(&s.hist[key >> shift & mask], 1);
        }
        Found found;
        const bool reached = find_from_top(merge(row, round), shift == 20, need, found);
        ++round;
        if (!reached) return 0;
        bound |= found.bin << shift;
        const u32 reaching = row.k - need + found.above + found.count;
        if (shift == 0 || (reaching * row.tiles * 3 <= row.ctas * row.cap && reaching * 3 <= sampled)) return bound;
        need -= found.above;
        above_shift = shift;
        shift -= 10;
    }
}

struct Threshold {
    u32 key, take, tied;  // chosen: keys > key, and `take` of the `tied` equal ones, lowest positions first
};

// The need-th largest of `count` keys in s.close, by comparing all; every warp does it alone.
__device__ __forceinline__ Threshold select_close(u32 count, u32 need) {
    Shared& s = shared();
    const u32 lane = threadIdx.x % 32, key = lane < count ? s.close[lane] : 0;
    u32 greater = 0, equal = 0;
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
        const u32 other = s.close[i];
        greater += other > key;
        equal += other == key;
    }
    const u32 holders = __ballot_sync(FULL_WARP, lane < count && greater < need && need <= greater + equal);
    const u32 from = __ffs(holders) - 1;
    return Threshold{__shfl_sync(FULL_WARP, key, from), need - __shfl_sync(FULL_WARP, greater, from),
                     __shfl_sync(FULL_WARP, equal, from)};
}

// The need-th largest key of 1 << list_shift lists, all within [low, high]. Every thread gets the answer.
__device__ __forceinline__ Threshold select(const u32* keys, const u32* counts, u32 list_shift, u32 cap, u32 low,
                                         u32 high, u32 need) {
    Shared& s = shared();
    const u32 warp = threadIdx.x / 32, list = warp & ((1 << list_shift) - 1);
    const u32* mine = keys + list * cap;
    const u32 count = counts[list], begin = (warp >> list_shift) * 32 + threadIdx.x % 32;
    const u32 step = (WARPS >> list_shift) * 32;
    if (threadIdx.x == 0) s.close_count = 0;
#pragma unroll 1
    while (true) {
        const u32 bits = 32 - __clz(high - low);
        const u32 shift = bits > 10 ? bits - 10 : 0;
#pragma unroll 1
        for (u32 i = begin; i < count; i += step) {
            const u32 key = mine[i];
            if (key >= low && key <= high) atomicAdd(&s.hist[(key - low) >> shift], 1);
        }
        __syncthreads();
        Found found;
        find_from_top(s.hist, false, need, found);
        low += found.bin << shift;
        need -= found.above;
        if (shift == 0) return Threshold{low, need, found.count};
        // All of the bin is chosen: nothing is tied at a key just below it.
        if (need == found.count) return Threshold{low - 1, 0, 0};
        high = min(high, low + (1u << shift) - 1);
        if (found.count <= 32) {
#pragma unroll 1
            for (u32 i = begin; i < count; i += step) {
                const u32 key = mine[i];
                if (key >= low && key <= high) s.close[atomicAdd(&s.close_count, 1)] = key;
            }
            __syncthreads();
            return select_close(found.count, need);
        }
    }
}

// Step 2's relief: keep only the CTA's own k best (and ties) when candidates pile up.
__device__ __noinline__ u32 tighten(const Row row, u32 bound) {
    Shared& s = shared();
    const Candidates c(row.cap);
    constexpr u32 EACH = 8192 / THREADS;  // the largest cap
    settle(row, c);
    __syncthreads();
    const u32 count = s.count;
    u32* own = c.keys + row.rank * row.cap;
    const Threshold t = select(own, &s.count, 0, row.cap, bound, s.top, row.k);
    const u32 keep = t.tied ? t.key : t.key + 1;
    u32 keys[EACH], positions[EACH];
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        const u32 at = threadIdx.x + i * THREADS;
        keys[i] = at < count ? own[at] : 0;
        positions[i] = at < count ? c.positions[at] : 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < EACH; ++i) {
        if (threadIdx.x + i * THREADS >= count || keys[i] < keep) continue;
        const u32 slot = atomicAdd(&s.count, 1);
        own[slot] = keys[i];
        c.positions[slot] = positions[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) s.settled = s.count;
    __syncthreads();
    return keep;
}
