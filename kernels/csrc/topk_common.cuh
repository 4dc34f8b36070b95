// Top-k: the memory of a CTA, keys, tiles of scores, and histograms of the cluster. See topk.cu.
#pragma once
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
    static_assert(BINS == 8 * THREADS && FEW_BINS == 2 * THREADS, "a vector of bins a thread");
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
