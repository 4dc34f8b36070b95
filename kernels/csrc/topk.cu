// Lightning top-k: the k largest of a row, exactly, ascending by position, in one launch.
//
// One cluster of C CTAs a row, each a contiguous chunk. The idea: the k-th largest *group maximum*
// of any sample is a lower bound T of the k-th largest score, and only scores >= T can be chosen.
//
//   1  load tile 0 (32 scores a thread, spread over the chunk); histogram the maxima of groups;
//      merge the histograms over the cluster; find T, by 12 + 10 + 10 bits, as far as it pays
//   2  stream the other tiles; append scores >= T to the CTA's candidates, tightening T when full
//   3  push the candidates' keys to every CTA; each finds the same k-th key, and how many chosen
//      scores stand in the chunks before its own
//   4  each CTA writes its own chosen positions in order, through a bitmap of positions
//
// When candidates overflow (heavy ties) or are too few (NaN), all CTAs agree to select by radix
// over all scores. The time is instruction issue, not bytes, up to 256K scores: hence 16 warps,
// few instructions a score, and no unrolling where little is done.
// Keys order like scores: -0 as +0, NaN below -inf. Source: T from group maxima is this project's;
// radix selection with histograms over distributed shared memory as in SGLang's top-k (idea).
#include "common.cuh"

constexpr u32 THREADS = 512;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 BLOCK = THREADS * 4;  // scores a block: one 16-byte load a thread
constexpr u32 TILE = 8;             // blocks a tile
constexpr u32 BINS = 4096;
constexpr u32 FEW_BINS = 1024;      // of a later round, and of the selection
constexpr u32 CLUSTER_MAX = 16;
constexpr u32 KEY_NEGATIVE_INFINITY = 0x007fffffu;

struct Found {
    u32 bin, above, count;
};

struct Shared {
    u32 hist[BINS];       // this CTA's counts
    u32 merged[2][BINS];  // the cluster's counts, by parity of the round; follows hist
    u32 warp_totals[2][32];
    Found found;
    u32 count, settled, top;  // candidates of this CTA, those that are keys already, the largest key
    u32 counts[CLUSTER_MAX], tops[CLUSTER_MAX];
    u32 close[32], close_count;  // keys of the bin that holds the k-th
    u32 sums[2];  // chosen for sure, and tied, in the chunks before
};

// Shared, then the own candidates' positions [cap], then every CTA's candidates' keys [ctas][cap].
extern __shared__ __align__(16) unsigned char memory[];

__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(memory); }

struct Candidates {
    u32* positions;
    u32* keys;  // own list at rank

    __device__ __forceinline__ explicit Candidates(u32 cap)
        : positions(reinterpret_cast<u32*>(memory + sizeof(Shared))), keys(positions + cap) {}
};

struct Row {
    const float* scores;
    u32 begin, end, tiles;  // this CTA's chunk
    u32 rank, ctas, shift;  // ctas = 1 << shift
    u32 k, cap;
};

#define NOTHING __uint_as_float(0x7fffffffu)  // NaN: never the largest, never reaches a bound

__device__ __forceinline__ u32 key_of(float x) {
    if (x != x) return 0;
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Four scores at `at`, a multiple of 4. The last load may pass the chunk's end, never the row's.
__device__ __forceinline__ float4 load4(const Row& row, u32 at) {
    float4 v = make_float4(NOTHING, NOTHING, NOTHING, NOTHING);
    asm volatile(
        "{.reg .pred p; setp.lt.u32 p, %5, %6;\n"
        "@p ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];}"
        : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
        : "l"(row.scores + at), "r"(at), "r"(row.end));
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

// Scores past the chunk's end become NaN.
__device__ __forceinline__ void mask_tile(const Row& row, u32 tile, float4 (&v)[TILE]) {
    if (row.begin + ((TILE - 1) * row.tiles + tile + 1) * BLOCK <= row.end) return;
#pragma unroll
    for (u32 i = 0; i < TILE; ++i) {
        const u32 at = offset_of(row, tile, i);
        if (at + 1 >= row.end) v[i].y = NOTHING;
        if (at + 2 >= row.end) v[i].z = NOTHING;
        if (at + 3 >= row.end) v[i].w = NOTHING;
    }
}

// Sum of `v` over lower threads, and over all. Between two calls of the same `slot` the caller
// must pass a __syncthreads.
__device__ __forceinline__ u32 block_exclusive(u32 v, u32 slot, u32& total) {
    Shared& s = shared();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 inclusive = warp_inclusive_scan(v, lane);
    if (lane == 31) s.warp_totals[slot][warp] = inclusive;
    __syncthreads();
    const u32 of_warp = lane < WARPS ? s.warp_totals[slot][lane] : 0;
    total = warp_sum(of_warp);
    return warp_sum(lane < warp ? of_warp : 0) + inclusive - v;
}

// Where, from the top, the `need`-th entry of THREADS * W bins is; zeroes them. Returns how many
// entries there are; s.found is set, for who passes the next barrier, when that suffices.
template <typename Vector>
__device__ __forceinline__ u32 find_in(u32* bins, u32 need, u32 slot) {
    Shared& s = shared();
    constexpr u32 W = sizeof(Vector) / 4;
    const u32 first = (THREADS - 1 - threadIdx.x) * W;
    union {
        Vector vector;
        u32 of[W];
    } counts, zero;
    counts.vector = *reinterpret_cast<Vector*>(bins + first);
    u32 sum = 0;
#pragma unroll
    for (u32 i = 0; i < W; ++i) {
        sum += counts.of[i];
        zero.of[i] = 0;
    }
    *reinterpret_cast<Vector*>(bins + first) = zero.vector;
    u32 total, above = block_exclusive(sum, slot, total);
    if (above < need && need <= above + sum) {
#pragma unroll
        for (u32 i = 0; i < W; ++i) {
            const u32 count = counts.of[W - 1 - i];
            if (above < need && need <= above + count) s.found = Found{first + W - 1 - i, above, count};
            above += count;
        }
    }
    return total;
}

// The bin, from the top, that holds the `need`-th entry of all BINS or of FEW_BINS; zeroes them.
// False when there are fewer. Every thread gets the same answer.
__device__ __forceinline__ bool find_from_top(u32* bins, bool all, u32 need, Found& found) {
    Shared& s = shared();
    u32 upper = 0, lower = 0, offset = 0;
    if (all) {  // the upper half first: scores above zero
        upper = find_in<uint4>(bins + BINS / 2, need, 0);
        offset = BINS / 2;
        if (upper < need) {
            lower = find_in<uint4>(bins, need - upper, 1);
            offset = 0;
        } else {
            reinterpret_cast<uint4*>(bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
            upper = 0;
            lower = need;
        }
    } else {
        lower = find_in<uint2>(bins, need, 0);
    }
    __syncthreads();
    found = s.found;
    found.bin += offset;
    found.above += upper;
    return upper + lower >= need;
}

// Adds this CTA's histogram into every CTA's merged one, and waits for all of them.
__device__ __forceinline__ u32* merge(const Row& row, u32 round) {
    Shared& s = shared();
    __syncthreads();
    if (row.ctas == 1) return s.hist;
    u32* merged = s.merged[round & 1];
    u32 counts[BINS / THREADS];
#pragma unroll
    for (u32 i = 0; i < BINS / THREADS; ++i) counts[i] = s.hist[threadIdx.x + i * THREADS];
#pragma unroll
    for (u32 i = 0; i < BINS / THREADS; ++i) {
        if (!counts[i]) continue;
        const u32 bin = threadIdx.x + i * THREADS;
        s.hist[bin] = 0;
        const u32 address = shared_address(merged + bin);
#pragma unroll 1
        for (u32 r = 0; r < row.ctas; ++r) remote_add(remote_address(address, r), counts[i]);
    }
    cluster_sync();
    return merged;
}

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

struct Out {
    int* positions;    // [k] of this row
    int* rows;         // [k] or null
    const int* pages;  // page table of this row's request, or null
};

__device__ __forceinline__ void emit(const Out& out, u32 at, u32 position) {
    out.positions[at] = static_cast<int>(position);
    if (out.rows) out.rows[at] = out.pages[position / ROWS_PER_PAGE] * ROWS_PER_PAGE + position % ROWS_PER_PAGE;
}

// Steps 3's second half and 4: what stands before this chunk, then this chunk's part in order,
// through two bitmaps of positions, one window of the chunk at a time.
__device__ __forceinline__ void emit_candidates(const Row& row, const Candidates& c, const Threshold& t,
                                                const Out& out) {
    Shared& s = shared();
    constexpr u32 WINDOW = BINS * 32;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, list = warp & (row.ctas - 1);
    if (list < row.rank) {
        const u32 listed = s.counts[list], step = (WARPS >> row.shift) * 32;
        u32 greater = 0, tied = 0;
#pragma unroll 1
        for (u32 i = (warp >> row.shift) * 32 + lane; i < listed; i += step) {
            const u32 key = c.keys[list * row.cap + i];
            greater += key > t.key;
            tied += key == t.key;
        }
        greater = warp_sum(greater);
        if (t.tied) tied = warp_sum(tied);
        if (lane == 0 && greater) atomicAdd(&s.sums[0], greater);
        if (lane == 0 && t.tied && tied) atomicAdd(&s.sums[1], tied);
    }
    const u32 count = s.counts[row.rank];
    const u32* own = c.keys + row.rank * row.cap;
    // The bitmaps take the histograms' place, all zero by now; a word of padding after each 8, so
    // that threads which each look at some words in a row do not meet in one bank.
    const auto padded = [](u32 word) { return word + word / 8; };
    u32 *sure = reinterpret_cast<u32*>(memory), *maybe = sure + BINS + BINS / 8;
    u32 greater_before = 0, tied_before = 0;
#pragma unroll 1
    for (u32 begin = row.begin; begin < row.end; begin += WINDOW) {
        const u32 words = (min(row.end - begin, WINDOW) + 31) / 32;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < count; i += THREADS) {
            const u32 key = own[i], place = c.positions[i] - begin;
            const bool ties = t.tied && key == t.key;
            if (place < WINDOW && (key > t.key || ties))
                atomicOr((ties ? maybe : sure) + padded(place / 32), 1u << place % 32);
        }
        __syncthreads();
        const u32 each = (words + THREADS - 1) / THREADS, first = threadIdx.x * each;
        u32 bits = 0;  // tied ones in the high half
#pragma unroll 1
        for (u32 w = first; w < min(first + each, words); ++w)
            bits += __popc(sure[padded(w)]) + (__popc(maybe[padded(w)]) << 16);
        u32 total;
        bits = block_exclusive(bits, 1, total);
        const u32 base = s.sums[0], spare = t.take - min(s.sums[1], t.take), given = min(s.sums[1], t.take);
        u32 greater = greater_before + (bits & 0xffff), tied = tied_before + (bits >> 16);
#pragma unroll 1
        for (u32 w = first; w < min(first + each, words); ++w) {
            u32 chosen = sure[padded(w)], open = maybe[padded(w)];
            if (!(chosen | open)) continue;
            u32 at = base + given + greater + min(tied, spare);
            greater += __popc(chosen);
            for (; open && tied < spare; ++tied, open &= open - 1) chosen |= open & -open;
            tied += __popc(open);
            for (; chosen; chosen &= chosen - 1) emit(out, at++, begin + w * 32 + __ffs(chosen) - 1);
            sure[padded(w)] = maybe[padded(w)] = 0;
        }
        if (begin + WINDOW >= row.end) return;
        greater_before += total & 0xffff;
        tied_before += total >> 16;
        __syncthreads();
    }
}

// Adds to the histogram; one add where a warp agrees, so that equal scores do not queue.
__device__ __forceinline__ void count_bin(u32 bin, bool valid) {
    Shared& s = shared();
    const u32 lanes = __ballot_sync(FULL_WARP, valid);
    if (!lanes) return;
    const u32 leader = __ffs(lanes) - 1;
    const u32 common = __shfl_sync(FULL_WARP, bin, leader);
    const u32 same = __ballot_sync(FULL_WARP, valid && bin == common);
    if (threadIdx.x % 32 == leader) atomicAdd(&s.hist[common], __popc(same));
    else if (valid && bin != common) atomicAdd(&s.hist[bin], 1);
}

// Every score by radix, 12 + 10 + 10 bits, then written in order: exact whatever the ties.
__device__ __noinline__ void select_all(const Row row, const Out out, u32 round) {
    Shared& s = shared();
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
                count_bin(key >> shift & mask, at + e < row.end && fits);
            }
        }
        Found found;
        find_from_top(merge(row, round++), shift == 20, need, found);
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
        u32 total, before = block_exclusive(counts, b & 1, total);
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
    Shared& s = shared();
    const u32 ctas = cluster_size(), rank = cluster_rank(), shift = 31 - __clz(ctas);
    const i64 t = blockIdx.x >> shift;
    int seen;  // asked for before anything else: the loads of the scores wait for it
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(seen) : "l"(visible + t));
    const auto clear = [](u32* bins) {
#pragma unroll
        for (u32 i = 0; i < BINS / THREADS / 4; ++i)
            reinterpret_cast<uint4*>(bins)[threadIdx.x + i * THREADS] = make_uint4(0, 0, 0, 0);
    };
    clear(s.merged[0]);
    if (threadIdx.x == 0) s.count = s.settled = s.top = s.sums[0] = s.sums[1] = 0;
    // Nobody may add to a histogram that is not yet cleared; the wait is after the first loads.
    if (ctas > 1) cluster_arrive();
    const u32 length = max(min(seen, static_cast<int>(columns)), 0);
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
    const u32 chunk = ((length + ctas - 1 >> shift) + 127) / 128 * 128;
    Row row{scores + t * stride, min(rank * chunk, length), min(rank * chunk + chunk, length), 0,
            rank, ctas, shift, static_cast<u32>(k), static_cast<u32>(cap)};
    row.tiles = max((chunk + TILE * BLOCK - 1) / (TILE * BLOCK), 1u);
    const Candidates c(row.cap);

    float4 even[TILE], odd[TILE];
    load_tile(row, 0, even);
    if (row.tiles > 1) load_tile(row, 1, odd);
    clear(s.hist);
    clear(s.merged[1]);
    if (ctas > 1) cluster_wait();
    __syncthreads();

    mask_tile(row, 0, even);
    u32 round = 0;
    u32 bound = max(lower_bound(row, even, length, round), KEY_NEGATIVE_INFINITY);
    // Two tiles in turn, so that one is on its way while the other is looked at.
    const auto look = [&](float4(&v)[TILE], u32 tile) {
        if (tile) {
            if (__syncthreads_or(s.count > row.cap / 2)) {  // agreed on: the count moves on after it
                const u32 count = s.count;
                __syncthreads();
                if (count > row.k && count <= row.cap) bound = max(bound, tighten(row, bound));
            }
            mask_tile(row, tile, v);
        }
        filter(row, c, v, tile, score_of(bound));
        if (tile + 2 < row.tiles) load_tile(row, tile + 2, v);
    };
#pragma unroll 1
    for (u32 tile = 0; tile < row.tiles; tile += 2) {
        look(even, tile);
        if (tile + 1 < row.tiles) look(odd, tile + 1);
    }
    __syncthreads();
    settle(row, c);
    __syncthreads();

    // Step 3: everyone gets every candidate's key.
    const u32 count = s.count, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x < ctas) {
        remote_store(remote_address(shared_address(&s.counts[rank]), threadIdx.x), count);
        remote_store(remote_address(shared_address(&s.tops[rank]), threadIdx.x), s.top);
    }
    if (ctas > 1 && count <= row.cap) {
        const u32 to = warp & (ctas - 1);
        u32* own = c.keys + rank * row.cap;
        if (to != rank)
#pragma unroll 1
            for (u32 i = (warp >> shift) * 32 + lane; i < count; i += (WARPS >> shift) * 32)
                remote_store(remote_address(shared_address(own + i), to), own[i]);
    }
    if (ctas > 1) cluster_sync();
    else __syncthreads();
    const u32 listed = lane < ctas ? s.counts[lane] : 0;
    const u32 top = __reduce_max_sync(FULL_WARP, lane < ctas ? s.tops[lane] : 0);
    if (__any_sync(FULL_WARP, listed > row.cap) || warp_sum(listed) < row.k) {
        select_all(row, out, round);
        return;
    }
    emit_candidates(row, c, select(c.keys, s.counts, row.shift, row.cap, bound, top, row.k), out);
}
