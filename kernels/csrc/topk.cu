// Lightning top-k: the k largest of a row, exactly, ascending by position, in one launch.
//
// One cluster of C CTAs a row, each a contiguous chunk. The idea: the k-th largest *group maximum*
// of any sample is a lower bound T of the k-th largest score, and only scores >= T can be chosen.
//
//   1  load tile 0 (16 scores a thread, spread over the chunk); histogram the maxima of groups;
//      merge the histograms over the cluster; find T, by 12 + 10 + 10 bits, as far as it pays
//   2  stream the other tiles; append scores >= T to the CTA's candidates, tightening T when full
//   3  push the candidates' keys to every CTA; each finds the same k-th key, and how many chosen
//      scores stand in the chunks before its own
//   4  each CTA writes its own chosen positions in order, by buckets of positions
//
// When candidates overflow (heavy ties), all CTAs agree to select by radix over all scores.
// Keys order like scores: -0 as +0, NaN below -inf. Source: T from group maxima is this project's;
// radix selection with histograms over distributed shared memory as in SGLang's top-k (idea).
#include "common.cuh"

constexpr u32 THREADS = 1024;
constexpr u32 BLOCK = THREADS * 4;  // scores a block: one 16-byte load a thread
constexpr u32 TILE = 4;             // blocks a tile
constexpr u32 BINS = 4096;
constexpr u32 CLUSTER_MAX = 16;
constexpr u32 KEY_NEGATIVE_INFINITY = 0x007fffffu;

struct Found {
    u32 bin, above, count;
};

struct Shared {
    u32 hist[BINS];       // this CTA's counts
    u32 merged[2][BINS];  // the cluster's counts, by parity of the round; at the end the ordered list
    u32 warp_totals[2][32];
    Found found;
    u32 count, top;  // candidates of this CTA, the largest key among them
    u32 counts[CLUSTER_MAX], tops[CLUSTER_MAX];
    u32 greater[CLUSTER_MAX], equal[CLUSTER_MAX];
    u32 sums[2];
};

struct Row {
    const float* scores;
    u32 begin, end, tiles;  // this CTA's chunk
    u32 rank, ctas, k, cap;
};

__device__ __forceinline__ u32 key_of(float x) {
    if (x != x) return 0;
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Four scores at `at`, a multiple of 4. The last load may pass the chunk's end (never the row's):
// who uses it masks those.
__device__ __forceinline__ float4 load4(const Row& row, u32 at) {
    const float nan = __uint_as_float(0x7fffffffu);
    float4 v = make_float4(nan, nan, nan, nan);
    if (at < row.end)
        asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "l"(row.scores + at));
    return v;
}

// Where block i of tile `tile` begins for this thread: tiles sample the whole chunk.
__device__ __forceinline__ u32 offset_of(const Row& row, u32 tile, u32 i) {
    return row.begin + (i * row.tiles + tile) * BLOCK + threadIdx.x * 4;
}

__device__ __forceinline__ void load_tile(const Row& row, u32 tile, float4 (&v)[TILE]) {
#pragma unroll
    for (u32 i = 0; i < TILE; ++i) v[i] = load4(row, offset_of(row, tile, i));
}

// The largest of the scores at `at` that are in the chunk; NaN when there is none.
__device__ __forceinline__ float max4(const Row& row, const float4& v, u32 at) {
    const float nan = __uint_as_float(0x7fffffffu);
    const float first = fmaxf(at < row.end ? v.x : nan, at + 1 < row.end ? v.y : nan);
    return fmaxf(first, fmaxf(at + 2 < row.end ? v.z : nan, at + 3 < row.end ? v.w : nan));
}

// Sum of `v` over lower threads, and over all. Between two calls of the same `slot` the caller
// must pass a __syncthreads.
__device__ __forceinline__ u32 block_exclusive(Shared& s, u32 v, u32 slot, u32& total) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 inclusive = warp_inclusive_scan(v, lane);
    if (lane == 31) s.warp_totals[slot][warp] = inclusive;
    __syncthreads();
    const u32 of_warp = s.warp_totals[slot][lane];
    total = warp_sum(of_warp);
    return warp_sum(lane < warp ? of_warp : 0) + inclusive - v;
}

// The bin, from the top, that holds the `need`-th entry; zeroes the bins. False when there are
// fewer than `need`. Every thread gets the same answer. Ends in step.
__device__ __forceinline__ bool find_from_top(Shared& s, u32* bins, u32 need, Found& found) {
    const u32 first = BINS - 4 - threadIdx.x * 4;
    uint4* place = reinterpret_cast<uint4*>(bins + first);
    const uint4 c = *place;
    *place = make_uint4(0, 0, 0, 0);
    const u32 sum = c.x + c.y + c.z + c.w;
    u32 total, above = block_exclusive(s, sum, 0, total);
    if (above < need && need <= above + sum) {
        const u32 counts[4] = {c.w, c.z, c.y, c.x};
        bool open = true;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            if (open && need <= above + counts[i]) {
                s.found = Found{first + 3 - i, above, counts[i]};
                open = false;
            }
            if (open) above += counts[i];
        }
    }
    __syncthreads();
    found = s.found;
    return total >= need;
}

// Adds this CTA's histogram into every CTA's merged one, and waits for all of them.
__device__ __forceinline__ u32* merge(Shared& s, const Row& row, u32 round) {
    __syncthreads();
    if (row.ctas == 1) return s.hist;
    u32* merged = s.merged[round & 1];
#pragma unroll 1
    for (u32 i = 0; i < BINS / THREADS; ++i) {
        const u32 bin = threadIdx.x + i * THREADS;
        const u32 count = s.hist[bin];
        if (!count) continue;
        s.hist[bin] = 0;
        const u32 address = shared_address(merged + bin);
#pragma unroll 1
        for (u32 r = 0; r < row.ctas; ++r) remote_add(remote_address(address, r), count);
    }
    cluster_sync();
    return merged;
}

struct Candidates {
    u32* keys;       // [ctas][cap], own list at rank
    u32* positions;  // [cap], of the own list
};

__device__ __forceinline__ void append(Shared& s, const Row& row, const Candidates& c, float x, u32 at) {
    const u32 slot = atomicAdd(&s.count, 1);
    if (slot >= row.cap) return;
    const u32 key = key_of(x);
    atomicMax(&s.top, key);
    c.keys[row.rank * row.cap + slot] = key;
    c.positions[slot] = at;
}

// Appends the tile's scores that reach the bound. Few do, so the code is kept small, not wide.
__device__ __forceinline__ void filter(Shared& s, const Row& row, const Candidates& c, const float4 (&v)[TILE],
                                       u32 tile, float bound, bool all) {
    float x[TILE * 4];
    u32 passing = 0;
#pragma unroll
    for (u32 i = 0; i < TILE; ++i) {
        const float of[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
            x[i * 4 + e] = of[e];
            passing |= (of[e] >= bound || all ? 1u : 0u) << (i * 4 + e);
        }
    }
#pragma unroll 1
    while (passing) {
        const u32 which = __ffs(passing) - 1;
        passing &= passing - 1;
        float score = x[0];
#pragma unroll
        for (u32 i = 1; i < TILE * 4; ++i) score = which == i ? x[i] : score;
        const u32 at = offset_of(row, tile, which / 4) + which % 4;
        if (at < row.end) append(s, row, c, score, at);
    }
}

// Step 1: a key that at least k scores of the row reach. 0 when the sample has too few groups.
__device__ __forceinline__ u32 lower_bound(Shared& s, const Row& row, const float4 (&v)[TILE], u32 length, u32& round) {
    // One group a thread suffices when there are several times k of them.
    const bool whole = length >= 64 * row.k && row.ctas * THREADS >= 2 * row.k;
    u32 keys[TILE];
    bool valid[TILE];
#pragma unroll
    for (u32 i = 0; i < TILE; ++i) {
        const u32 at = offset_of(row, 0, i);
        keys[i] = key_of(max4(row, v[i], at));
        valid[i] = at < row.end;
    }
    if (whole) {
#pragma unroll
        for (u32 i = 1; i < TILE; ++i) {
            if (valid[i]) keys[0] = max(keys[0], keys[i]);
            valid[i] = false;
        }
    }
    const u32 enough = max(row.ctas * row.cap / 3 / row.tiles, 1u);
    u32 bound = 0, need = row.k, shift = 20, above_shift = 31;
#pragma unroll 1
    while (true) {
        const u32 mask = shift == 20 ? BINS - 1 : 1023;
#pragma unroll
        for (u32 i = 0; i < TILE; ++i)
            if (valid[i] && (shift == 20 || (keys[i] ^ bound) >> above_shift == 0))
                atomicAdd(&s.hist[keys[i] >> shift & mask], 1);
        Found found;
        const bool reached = find_from_top(s, merge(s, row, round), need, found);
        ++round;
        if (!reached) return 0;
        bound |= found.bin << shift;
        if (shift == 0 || row.k - need + found.above + found.count <= enough) return bound;
        need -= found.above;
        above_shift = shift;
        shift -= 10;
    }
}

struct Threshold {
    u32 key, take, tied;  // chosen: keys > key, and `take` of the `tied` equal ones, lowest positions first
};

// The need-th largest key of `lists` lists, all within [low, high]. Every thread gets the answer.
__device__ __noinline__ Threshold select(Shared& s, const u32* keys, const u32* counts, u32 lists, u32 cap, u32 low,
                                            u32 high, u32 need) {
    const u32 warp = threadIdx.x / 32, list = warp % lists;
    const u32* mine = keys + list * cap;
    const u32 count = counts[list], begin = warp / lists * 32 + threadIdx.x % 32, step = 32 / lists * 32;
#pragma unroll 1
    while (true) {
        const u32 bits = 32 - __clz(high - low);
        const u32 shift = bits > 12 ? bits - 12 : 0;
#pragma unroll 1
        for (u32 i = begin; i < count; i += step) {
            const u32 key = mine[i];
            if (key >= low && key <= high) atomicAdd(&s.hist[(key - low) >> shift], 1);
        }
        __syncthreads();
        Found found;
        find_from_top(s, s.hist, need, found);
        low += found.bin << shift;
        need -= found.above;
        if (shift == 0) return Threshold{low, need, found.count};
        // All of the bin is chosen: nothing is tied at a key just below it.
        if (need == found.count) return Threshold{low - 1, 0, 0};
        high = min(high, low + (1u << shift) - 1);
    }
}

// Step 2's relief: keep only the CTA's own k best (and ties) when candidates pile up.
__device__ __noinline__ u32 tighten(Shared& s, const Row& row, const Candidates& c, u32 bound) {
    const u32 count = s.count, top = s.top;
    u32* own = c.keys + row.rank * row.cap;
    const u32 low = bound <= KEY_NEGATIVE_INFINITY ? 0 : bound;
    const Threshold t = select(s, own, &s.count, 1, row.cap, low, top, row.k);
    const u32 keep = t.tied ? t.key : t.key + 1;
    u32 keys[8], positions[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const u32 at = threadIdx.x + i * THREADS;
        keys[i] = at < count ? own[at] : 0;
        positions[i] = at < count ? c.positions[at] : 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        if (threadIdx.x + i * THREADS >= count || keys[i] < keep) continue;
        const u32 slot = atomicAdd(&s.count, 1);
        own[slot] = keys[i];
        c.positions[slot] = positions[i];
    }
    __syncthreads();
    return keep;
}

struct Out {
    int* positions;    // [k] of this row
    int* rows;         // [k] or null
    const int* pages;  // page table of this row's request, or null
};

__device__ __forceinline__ void emit(const Out& out, u32 at, u32 position) {
    out.positions[at] = static_cast<int>(position);
    if (out.rows) out.rows[at] = out.pages[position / ROWS_PER_PAGE] * ROWS_PER_PAGE + position % ROWS_PER_PAGE;
}

// Orders own candidates with key in [low, high] by position, by bins of positions and a count
// within the bin, which holds at most (chunk / BINS) positions. Writes them from `base` on; or,
// when `raise` is not 0, only raises the key of the first `raise` of them above `high`.
__device__ __noinline__ void in_order(Shared& s, const Row& row, const Candidates& c, u32 low, u32 high, u32 base,
                                      u32 raise, const Out& out) {
    const u32 n = s.counts[row.rank];
    u32* own = c.keys + row.rank * row.cap;
    u32* ordered = s.merged[0];  // 2 * BINS = the largest cap
    const u32 bits = 32 - __clz(row.end - row.begin);
    const u32 shift = bits > 12 ? bits - 12 : 0;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < n; i += THREADS)
        if (own[i] >= low && own[i] <= high) atomicAdd(&s.hist[(c.positions[i] - row.begin) >> shift], 1);
    __syncthreads();
    uint4* place = reinterpret_cast<uint4*>(s.hist) + threadIdx.x;
    const uint4 v = *place;
    u32 total;
    const u32 first = block_exclusive(s, v.x + v.y + v.z + v.w, 1, total);
    *place = make_uint4(first, first + v.x, first + v.x + v.y, first + v.x + v.y + v.z);
    __syncthreads();
#pragma unroll 1
    for (u32 i = threadIdx.x; i < n; i += THREADS)
        if (own[i] >= low && own[i] <= high)
            ordered[atomicAdd(&s.hist[(c.positions[i] - row.begin) >> shift], 1)] = i;
    __syncthreads();
#pragma unroll 1
    for (u32 j = threadIdx.x; j < total; j += THREADS) {
        const u32 slot = ordered[j], position = c.positions[slot], bin = (position - row.begin) >> shift;
        const u32 start = bin ? s.hist[bin - 1] : 0, stop = s.hist[bin];
        u32 rank = start;
        if (stop - start > 1)
#pragma unroll 1
            for (u32 q = start; q < stop; ++q) rank += c.positions[ordered[q]] < position;
        if (!raise) emit(out, base + rank, position);
        else if (rank < raise) own[slot] = high + 1;
    }
    if (!raise) return;  // the last use of the histogram
    __syncthreads();
    *place = make_uint4(0, 0, 0, 0);
    __syncthreads();
}

// Steps 3's second half and 4: what stands before this chunk, then this chunk's part in order.
__device__ __forceinline__ void emit_candidates(Shared& s, const Row& row, const Candidates& c, const Threshold& t,
                                                const Out& out) {
    const u32 warp = threadIdx.x / 32, list = warp % row.ctas;
    const u32 count = s.counts[list], begin = warp / row.ctas * 32 + threadIdx.x % 32, step = 32 / row.ctas * 32;
    if (list < row.rank || (list == row.rank && t.tied)) {
        u32 greater = 0, equal = 0;
#pragma unroll 1
        for (u32 i = begin; i < count; i += step) {
            const u32 key = c.keys[list * row.cap + i];
            greater += key > t.key;
            equal += t.tied && key == t.key;
        }
        greater = warp_sum(greater);
        equal = warp_sum(equal);
        if (threadIdx.x % 32 == 0) {
            if (list < row.rank && greater) atomicAdd(&s.sums[0], greater);
            if (equal) atomicAdd(list < row.rank ? &s.sums[1] : &s.equal[row.rank], equal);
        }
    }
    __syncthreads();
    const u32 tied_before = s.sums[1], tied_here = s.equal[row.rank];
    const u32 base = s.sums[0] + min(tied_before, t.take);
    const u32 quota = min(t.take - min(tied_before, t.take), tied_here);
    u32 low = t.key + 1;
    if (t.tied && quota == tied_here) low = t.key;
    else if (quota) in_order(s, row, c, t.key, t.key, 0, quota, out);  // only some of the tied ones
    in_order(s, row, c, low, 0xffffffffu, base, 0, out);
}

// Adds to the histogram; one add where a warp agrees, so that equal scores do not queue.
__device__ __forceinline__ void count_bin(Shared& s, u32 bin, bool valid) {
    const u32 lanes = __ballot_sync(FULL_WARP, valid);
    if (!lanes) return;
    const u32 leader = __ffs(lanes) - 1;
    const u32 common = __shfl_sync(FULL_WARP, bin, leader);
    const u32 same = __ballot_sync(FULL_WARP, valid && bin == common);
    if (threadIdx.x % 32 == leader) atomicAdd(&s.hist[common], __popc(same));
    else if (valid && bin != common) atomicAdd(&s.hist[bin], 1);
}

// Every score by radix, 12 + 10 + 10 bits, then written in order: exact whatever the ties.
__device__ __noinline__ void select_all(Shared& s, const Row& row, const Out& out, u32 round) {
    const u32 blocks = (row.end - row.begin + BLOCK - 1) / BLOCK;
    u32 prefix = 0, need = row.k, above_shift = 0;
    for (u32 shift = 20;; shift -= 10) {
        const u32 mask = shift == 20 ? BINS - 1 : 1023;
#pragma unroll 1
        for (u32 b = 0; b < blocks; ++b) {
            const u32 at = row.begin + b * BLOCK + threadIdx.x * 4;
            const float4 v = load4(row, at);
            const float x[4] = {v.x, v.y, v.z, v.w};
            for (u32 e = 0; e < 4; ++e) {
                const u32 key = key_of(x[e]);
                const bool fits = shift == 20 || (key ^ prefix) >> above_shift == 0;
                count_bin(s, key >> shift & mask, at + e < row.end && fits);
            }
        }
        Found found;
        find_from_top(s, merge(s, row, round++), need, found);
        prefix |= found.bin << shift;
        need -= found.above;
        above_shift = shift;
        if (shift == 0) break;
    }
    // How many of each kind stand in the chunks before this one.
    u32 greater = 0, equal = 0;
#pragma unroll 1
    for (u32 b = 0; b < blocks; ++b) {
        const u32 at = row.begin + b * BLOCK + threadIdx.x * 4;
        const float4 v = load4(row, at);
        const float x[4] = {v.x, v.y, v.z, v.w};
        for (u32 e = 0; e < 4; ++e) {
            const u32 key = key_of(x[e]);
            greater += at + e < row.end && key > prefix;
            equal += at + e < row.end && key == prefix;
        }
    }
    greater = warp_sum(greater);
    equal = warp_sum(equal);
    if (threadIdx.x % 32 == 0) {
        for (u32 r = row.rank + 1; r < row.ctas; ++r) {
            remote_add(remote_address(shared_address(&s.sums[0]), r), greater);
            remote_add(remote_address(shared_address(&s.sums[1]), r), equal);
        }
    }
    if (row.ctas > 1) cluster_sync();
    else __syncthreads();
    const u32 tied_before = min(s.sums[1], need);
    const u32 base = s.sums[0] + tied_before, quota = need - tied_before;
    u32 greater_so_far = 0, equal_so_far = 0;
#pragma unroll 1
    for (u32 b = 0; b < blocks; ++b) {
        const u32 at = row.begin + b * BLOCK + threadIdx.x * 4;
        const float4 v = load4(row, at);
        const float x[4] = {v.x, v.y, v.z, v.w};
        u32 counts = 0;  // equal in the high half
        for (u32 e = 0; e < 4; ++e) {
            const u32 key = key_of(x[e]);
            if (at + e < row.end) counts += (key > prefix) + ((key == prefix) << 16);
        }
        u32 total, before = block_exclusive(s, counts, b & 1, total);
        u32 g = greater_so_far + (before & 0xffff), q = equal_so_far + (before >> 16);
        for (u32 e = 0; e < 4; ++e) {
            const u32 key = key_of(x[e]);
            if (at + e >= row.end || key < prefix) continue;
            if (key > prefix) emit(out, base + g++ + min(q, quota), at + e);
            else if (q++ < quota) emit(out, base + g + q - 1, at + e);
        }
        greater_so_far += total & 0xffff;
        equal_so_far += total >> 16;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    topk(const float* scores,      // [T, columns] fp32, columns a multiple of 4, rows 16-byte aligned, `stride` apart
         i64 stride, const int* visible,  // [T]
         i64 columns, i64 k, i64 cap,     // cap: candidates a CTA may hold
         int* positions,           // [T, k]
         int* rows,                // [T, k] or null: mirror rows of the positions
         const int* pages,         // [requests, pages_stride] or null: mirror pages
         i64 pages_stride, i64 tokens_per_request) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const u32 ctas = cluster_size(), rank = cluster_rank();
    for (u32 i = threadIdx.x; i < 3 * BINS / 4; i += THREADS)
        reinterpret_cast<uint4*>(s.hist)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < CLUSTER_MAX) s.equal[threadIdx.x] = 0;
    if (threadIdx.x == 0) s.count = s.top = s.sums[0] = s.sums[1] = 0;
    // Nobody may add to a histogram that is not yet cleared; the wait is after the first loads.
    if (ctas > 1) cluster_arrive();
    const i64 t = blockIdx.x / ctas;
    const int seen = min(visible[t], static_cast<int>(columns));
    const u32 length = max(seen, 0);
    const Out out{positions + t * k, rows ? rows + t * k : nullptr,
                  pages ? pages + static_cast<u32>(t) / static_cast<u32>(tokens_per_request) * pages_stride : nullptr};
    if (length <= k) {
        if (ctas > 1) cluster_wait();
#pragma unroll 1
        for (u32 i = rank * THREADS + threadIdx.x; i < k; i += ctas * THREADS) {
            if (i < length) {
                emit(out, i, i);
            } else {
                out.positions[i] = -1;
                if (out.rows) out.rows[i] = -1;
            }
        }
        return;
    }
    const u32 chunk = ((length + ctas - 1) / ctas + 127) / 128 * 128;
    Row row{scores + t * stride, min(rank * chunk, length), min(rank * chunk + chunk, length), 0,
            rank, ctas, static_cast<u32>(k), static_cast<u32>(cap)};
    row.tiles = max((chunk + TILE * BLOCK - 1) / (TILE * BLOCK), 1u);
    Candidates c;
    c.positions = reinterpret_cast<u32*>(memory + sizeof(Shared));
    c.keys = c.positions + cap;

    float4 now[TILE], next[TILE];
    load_tile(row, 0, now);
    if (row.tiles > 1) load_tile(row, 1, next);
    if (ctas > 1) cluster_wait();
    else __syncthreads();

    u32 round = 0;
    u32 bound = lower_bound(s, row, now, length, round);
#pragma unroll 1
    for (u32 tile = 0; tile < row.tiles; ++tile) {
        const bool all = bound <= KEY_NEGATIVE_INFINITY;
        const float score = all ? 0.0f : score_of(bound);
        filter(s, row, c, now, tile, score, all);
        if (tile + 1 == row.tiles) break;
#pragma unroll
        for (u32 i = 0; i < TILE; ++i) now[i] = next[i];
        if (tile + 2 < row.tiles) load_tile(row, tile + 2, next);
        __syncthreads();
        const u32 count = s.count;
        __syncthreads();
        if (count > row.cap / 2 && count > row.k && count <= row.cap) bound = max(bound, tighten(s, row, c, bound));
    }
    __syncthreads();

    // Step 3: everyone gets every candidate's key.
    const u32 count = s.count, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x < ctas) {
        remote_store(remote_address(shared_address(&s.counts[rank]), threadIdx.x), count);
        remote_store(remote_address(shared_address(&s.tops[rank]), threadIdx.x), s.top);
    }
    if (ctas > 1 && count <= cap) {
        const u32 to = warp % ctas;
        u32* own = c.keys + rank * row.cap;
        if (to != rank)
#pragma unroll 1
            for (u32 i = warp / ctas * 32 + lane; i < count; i += 32 / ctas * 32)
                remote_store(remote_address(shared_address(own + i), to), own[i]);
    }
    if (ctas > 1) cluster_sync();
    else __syncthreads();
    u32 top = 0;
    bool overflow = false;
#pragma unroll 1
    for (u32 r = 0; r < ctas; ++r) {
        overflow |= s.counts[r] > cap;
        top = max(top, s.tops[r]);
    }
    if (overflow) {
        select_all(s, row, out, round);
        return;
    }
    const u32 floor = bound <= KEY_NEGATIVE_INFINITY ? 0 : bound;
    emit_candidates(s, row, c, select(s, c.keys, s.counts, ctas, row.cap, floor, top, row.k), out);
}
