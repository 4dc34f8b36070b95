// Top-k, step 4: chosen positions in order, from candidates or from all scores. See topk.cu.
#pragma once
#include "topk_select.cuh"

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
