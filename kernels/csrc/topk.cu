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
// over all scores. Up to 256K scores the time is a chain of short phases, not bytes: hence 16 warps,
// few instructions a score, few barriers, and no unrolling where little is done.
// Keys order like scores: -0 as +0, NaN below -inf. Source: T from group maxima is this project's;
// radix selection with histograms over distributed shared memory as in SGLang's top-k (idea).
#include "topk_emit.cuh"

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
