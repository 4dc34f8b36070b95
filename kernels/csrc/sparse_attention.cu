// Sparse attention of one latent head (K = V) over FP8 rows, for Hopper: split over keys.
//
// One CTA: up to 64 heads of one query, a span of key blocks of 64 rows. Three warpgroups:
//
//   decoder     (attention_rows.cuh) e4m3 * 2**e to fp16 (two instructions for two values; bf16
//               would take six) into one of two shared tiles. Rows reach 57,344 so, which RMS-normed
//               latents never do
//   attender 0  scores = Q K^T, softmax, weights to shared memory; the next block's scores follow
//               the sums in the tensor cores without a pause, if that block is there by then
//   attender 1  waits for the weights
//   both        rescale, then sums[:, own 256 columns] += weights V, with V the same tile
//
// A block is whole before it is read (mbarrier `full`) and free once both have multiplied it
// (`empty`). The last valid id of the span bounds the loop. Partials are normalised, in fp16, with
// their log-sum beside; attention_merge.cu adds them in span order, with the sink. No atomics on
// floats. Source: one tile as both K and V, decoded by a warpgroup of its own, is FlashMLA's idea.
#include "attention_products.cuh"

__device__ __forceinline__ void named_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Named barriers: weights of even and of odd blocks, the decoders, what all start from, the end,
// attender 0.
constexpr u32 WEIGHTS = 2, DECODERS = 4, STARTED = 5, ENDED = 6, OWN = 7;

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Softmax {
    float top[2], total[2];
};

// Scores of a block to weights, packed as the A operand of the next product, and the shrink of
// what was summed before. A thread holds rows lane / 4 and that + 8, columns 8 n + 2 (lane % 4).
__device__ __forceinline__ void weigh(
    float (&scores)[32], const float* seen, float scale_log2, Softmax& soft, u32 (&packed)[16], float (&shrink)[2]) {
    const u32 lane = threadIdx.x & 31;
    float top[2] = {soft.top[0], soft.top[1]};
#pragma unroll
    for (u32 n = 0; n < 8; n++) {
        const float2 there = *reinterpret_cast<const float2*>(seen + 8 * n + 2 * (lane & 3));
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            scores[4 * n + e] = fmaf(scores[4 * n + e], scale_log2, e & 1 ? there.y : there.x);
            top[e >> 1] = fmaxf(top[e >> 1], scores[4 * n + e]);
        }
    }
    float anchor[2];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], 2));
        anchor[r] = top[r] == MINUS_INFINITY ? 0.0f : top[r];
        shrink[r] = exp2_fast(soft.top[r] - anchor[r]);
        soft.top[r] = top[r];
    }
    float total[2][2] = {};  // of even and of odd columns, so that two chains run
#pragma unroll
    for (u32 n = 0; n < 8; n++) {
        float w[4];
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            w[e] = exp2_fast(scores[4 * n + e] - anchor[e >> 1]);
            total[e >> 1][e & 1] += w[e];
        }
        packed[2 * n] = pack_fp16(w[0], w[1]);
        packed[2 * n + 1] = pack_fp16(w[2], w[3]);
    }
#pragma unroll
    for (u32 r = 0; r < 2; r++) soft.total[r] = fmaf(soft.total[r], shrink[r], total[r][0] + total[r][1]);
}

// What was summed before, shrunk to the new maximum; nothing to do where no maximum moved.
__device__ __forceinline__ void rescale(float (&sums)[128], const float (&shrink)[2]) {
    if (!__any_sync(FULL_WARP, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
    for (u32 n = 0; n < 32; n++) {
        sums[4 * n] *= shrink[0];
        sums[4 * n + 1] *= shrink[0];
        sums[4 * n + 2] *= shrink[1];
        sums[4 * n + 3] *= shrink[1];
    }
}

__device__ __forceinline__ void free_tile(Shared& s, u32 buffer) {
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared_address(&s.empty[buffer]));
}

// Loads are in flight together before the first store.
template <bool WIDE>
__device__ __forceinline__ void load_queries(Shared& s, const void* q, i64 q_head, u32 heads) {
    constexpr u32 FLIGHT = WIDE ? 4 : 16, VECTORS = WIDE ? 2 : 1;
#pragma unroll 1
    for (u32 first = 0; first < 16; first += FLIGHT) {
        uint4 v[FLIGHT][VECTORS];
#pragma unroll
        for (u32 i = 0; i < FLIGHT; i++) {
            const u32 at = threadIdx.x + (first + i) * 256, row = at >> 6, unit = at & 63;
            const unsigned char* p = static_cast<const unsigned char*>(q) + (row * q_head + unit * 8) * (WIDE ? 4 : 2);
#pragma unroll
            for (u32 k = 0; k < VECTORS; k++)
                v[i][k] = load16(row < heads ? p + 16 * k : reinterpret_cast<const unsigned char*>(NO_ROW));
        }
#pragma unroll
        for (u32 i = 0; i < FLIGHT; i++) {
            const u32 at = threadIdx.x + (first + i) * 256, row = at >> 6, unit = at & 63;
            const u32 to = shared_address(s.q) + place(row, unit);
            const uint4 a = v[i][0], b = v[i][VECTORS - 1];
            if (WIDE) {
                store16(to, pack_fp16(__uint_as_float(a.x), __uint_as_float(a.y)),
                        pack_fp16(__uint_as_float(a.z), __uint_as_float(a.w)),
                        pack_fp16(__uint_as_float(b.x), __uint_as_float(b.y)),
                        pack_fp16(__uint_as_float(b.z), __uint_as_float(b.w)));
            } else {
                store16(to, narrow(a.x), narrow(a.y), narrow(a.z), narrow(a.w));
            }
        }
    }
    proxy_fence();
}

__device__ __forceinline__ void find_last(Shared& s, const Span& span, u32 span_blocks) {
    int last = -1;
#pragma unroll 8
    for (u32 at = threadIdx.x & (DECODING - 1); at < span_blocks * BLOCK; at += DECODING) {
        const u32 slot = span.first * BLOCK + at, window_slots = span.window_blocks * BLOCK;
        const bool near = slot < window_slots;
        const u32 place = near ? slot : slot - window_slots;
        const bool inside = place < (near ? span.window.count : span.extra.count);
        const int id = inside ? __ldg((near ? span.window.ids : span.extra.ids) + place) : -1;
        if (static_cast<u32>(id) < (near ? span.window.rows : span.extra.rows)) last = at;
    }
    last = __reduce_max_sync(FULL_WARP, last);
    if ((threadIdx.x & 31) == 0 && last >= 0) atomicMax(&s.last, last);
}

__device__ __forceinline__ void attend_0(Shared& s, u32 blocks, float scale_log2, float (&sums)[128], Softmax& soft) {
    const u32 thread = threadIdx.x & 127, row = (thread >> 5) * 16 + ((thread & 31) >> 2);
    const u32 q = shared_address(s.q);
    float scores[32];
    bool begun = false;
    for (u32 j = 0; j < blocks; j++) {
        const u32 buffer = j & 1, tile = shared_address(s.keys[0]) + buffer * TILE;
        if (!begun) {
            mbarrier_wait(shared_address(&s.full[buffer]), j >> 1 & 1);
            begin_scores(scores, q, tile);
        }
        products_wait<0>();
        u32 packed[16];
        float shrink[2];
        weigh(scores, s.seen[buffer], scale_log2, soft, packed, shrink);
        // Who read these two blocks ago has since freed that block's tile, which this one is in.
        const u32 copy = shared_address(s.weights[buffer]) + row * 128 + (thread & 3) * 4;
#pragma unroll
        for (u32 i = 0; i < 16; i++) store4(copy + (i & 1) * 1024 + ((i >> 1 ^ row & 7) << 4), packed[i]);
        s.shrink[buffer][0][thread] = shrink[0];
        s.shrink[buffer][1][thread] = shrink[1];
        proxy_fence();
        named_arrive(WEIGHTS + buffer, 256);
        rescale(sums, shrink);
        named_sync(OWN, 128);
        begin_values(sums, shared_address(s.weights[buffer]), tile, 0);
        begun = j + 1 < blocks && mbarrier_passed(shared_address(&s.full[buffer ^ 1]), j + 1 >> 1 & 1);
        if (begun) {
            begin_scores(scores, q, shared_address(s.keys[0]) + (buffer ^ 1) * TILE);
            products_wait<1>();
        } else {
            products_wait<0>();
        }
        free_tile(s, buffer);
    }
}

__device__ __forceinline__ void attend_1(Shared& s, u32 blocks, float (&sums)[128]) {
    const u32 thread = threadIdx.x & 127;
    for (u32 j = 0; j < blocks; j++) {
        const u32 buffer = j & 1, tile = shared_address(s.keys[0]) + buffer * TILE;
        mbarrier_wait(shared_address(&s.full[buffer]), j >> 1 & 1);
        named_sync(WEIGHTS + buffer, 256);
        const float shrink[2] = {s.shrink[buffer][0][thread], s.shrink[buffer][1][thread]};
        rescale(sums, shrink);
        begin_values(sums, shared_address(s.weights[buffer]), tile, 1);
        products_wait<0>();
        free_tile(s, buffer);
    }
}

// Where the result goes.
struct Target {
    void* rows[2];  // of this thread's two heads, or null
    i64 wide;       // fp32, else bf16
    const float* inv_freq;
    i64 position;
};

__device__ __forceinline__ void store_partial(const float (&sums)[128], const float (&factor)[2], uint4* to, u32 half) {
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        const u32 r = step & 1;
        u32 v[4];
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            const u32 n = 4 * (step >> 1) + q;
            v[q] = pack_fp16(sums[4 * n + 2 * r] * factor[r], sums[4 * n + 2 * r + 1] * factor[r]);
        }
        to[(half * STEPS + step) * 128 + (threadIdx.x & 127)] = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

__device__ __forceinline__ void store_result(const float (&sums)[128], const float (&factor)[2], const Target& to, u32 half) {
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (u32 n = 0; n < 32; n++) {
        const u32 column = half * 256 + 8 * n + 2 * (lane & 3);
        float2 turn = make_float2(1.0f, 0.0f);
        if (half && n >= 24 && to.inv_freq) turn = turn_of(to.position, to.inv_freq[(column - 448) >> 1]);
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            float2 x = make_float2(sums[4 * n + 2 * r] * factor[r], sums[4 * n + 2 * r + 1] * factor[r]);
            if (half && n >= 24) x = turned_back(x.x, x.y, turn);
            if (to.rows[r]) store_pair(to.rows[r], to.wide, column, x.x, x.y);
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) sparse_attention(
    const void* q, i64 q_wide, i64 q_token, i64 q_head,  //
    const unsigned char* window_data, const unsigned char* window_scale, i64 window_data_page, i64 window_data_row,
    i64 window_scale_page, i64 window_scale_row, i64 window_page_rows, i64 window_magic, i64 window_shift, i64 window_rows,  //
    const int* window_ids, i64 window_ids_token, i64 window_count,                       //
    const unsigned char* extra_data, const unsigned char* extra_scale, i64 extra_data_page, i64 extra_data_row,
    i64 extra_scale_page, i64 extra_scale_row, i64 extra_page_rows, i64 extra_magic, i64 extra_shift, i64 extra_rows,  //
    const int* extra_ids, i64 extra_ids_token, i64 extra_count,                      //
    const float* sink, const void* positions, i64 positions_wide, const float* inv_freq,  //
    void* out, i64 out_wide, i64 out_token, i64 out_head,                                 //
    uint4* sums_out, float* logs_out, i64 sums_token, i64 sums_split, i64 logs_token, i64 logs_split,
    i64 heads, i64 head_blocks, i64 splits, i64 span_blocks, i64 scale_bits) {
    asm volatile("griddepcontrol.launch_dependents;");  // the merge may come, and waits for the sums
    extern __shared__ unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory + ((1024 - (shared_address(memory) & 1023)) & 1023));
    const u32 head_block = blockIdx.x % static_cast<u32>(head_blocks);
    const u32 split = blockIdx.x / static_cast<u32>(head_blocks) % static_cast<u32>(splits);
    const u32 token = blockIdx.x / static_cast<u32>(head_blocks * splits);
    const u32 head = head_block * HEADS, group = __shfl_sync(FULL_WARP, threadIdx.x >> 7, 0);
    const u32 here = min(static_cast<u32>(heads) - head, HEADS);
    const float scale_log2 = __uint_as_float(static_cast<u32>(scale_bits)) * LOG2_E;

    if (threadIdx.x == 0) {
        s.last = -1;
        for (u32 b = 0; b < 2; b++) {
            mbarrier_init(shared_address(&s.full[b]), DECODING);
            mbarrier_init(shared_address(&s.empty[b]), 8);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (group >= 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 144;");
        Span span;
        span.window = scope_of(window_data, window_scale, window_data_page, window_data_row, window_scale_page,
                               window_scale_row, window_page_rows, window_magic, window_shift, window_rows,
                               window_ids + token * window_ids_token, window_count);
        span.extra = scope_of(extra_data, extra_scale, extra_data_page, extra_data_row, extra_scale_page,
                              extra_scale_row, extra_page_rows, extra_magic, extra_shift, extra_rows,
                              extra_ids + token * extra_ids_token, extra_count);
        span.window_blocks = (span.window.count + BLOCK - 1) / BLOCK;
        span.first = split * static_cast<u32>(span_blocks);
        Decoder d(s, span);
        d.read_ids(0);
        d.find_pages(0);
        d.load_first();
        d.read_ids(2);
        find_last(s, span, static_cast<u32>(span_blocks));
        named_sync(DECODERS, DECODING);
        named_arrive(STARTED, 256 + DECODING);
        const u32 blocks = __shfl_sync(FULL_WARP, (s.last + BLOCK) / BLOCK, 0);
        if (blocks) decode_blocks(s, d, blocks);
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else {
        const i64 element = token * q_token + head * q_head;
        if (q_wide) {
            load_queries<true>(s, static_cast<const float*>(q) + element, q_head, here);
        } else {
            load_queries<false>(s, static_cast<const unsigned short*>(q) + element, q_head, here);
        }
        named_sync(STARTED, 256 + DECODING);
        const u32 blocks = __shfl_sync(FULL_WARP, (s.last + BLOCK) / BLOCK, 0);
        const u32 thread = threadIdx.x & 127, lane = thread & 31;
        const u32 row[2] = {(thread >> 5) * 16 + (lane >> 2), (thread >> 5) * 16 + (lane >> 2) + 8};
        float sums[128], factor[2];
#pragma unroll
        for (u32 i = 0; i < 128; i++) sums[i] = 0.0f;
        const bool whole = splits == 1;
        uint4* partial = sums_out + token * sums_token + split * sums_split + head_block * UNITS;
        const auto target = [&] {
            Target to = {{nullptr, nullptr}, out_wide, inv_freq, 0};
            if (inv_freq) to.position = read_position(positions, positions_wide, token);
#pragma unroll
            for (u32 r = 0; r < 2; r++)
                if (row[r] < here)
                    to.rows[r] = static_cast<unsigned char*>(out) +
                                 (token * out_token + (head + row[r]) * out_head) * (out_wide ? 4 : 2);
            return to;
        };
        if (group == 0) {
            asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
            Softmax soft = {{MINUS_INFINITY, MINUS_INFINITY}, {0.0f, 0.0f}};
            attend_0(s, blocks, scale_log2, sums, soft);
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                float total = soft.total[r];
                total += __shfl_xor_sync(FULL_WARP, total, 1);
                total += __shfl_xor_sync(FULL_WARP, total, 2);
                const float log = total > 0.0f ? soft.top[r] + log2f(total) : MINUS_INFINITY;
                factor[r] = total > 0.0f ? 1.0f / total : 0.0f;
                if (whole && row[r] < here) factor[r] *= share(log, sink[head + row[r]] * LOG2_E);
                if (!whole && row[r] < here && (lane & 3) == 0)
                    logs_out[token * logs_token + split * logs_split + head + row[r]] = log;
                s.total[r][thread] = factor[r];
            }
            named_arrive(ENDED, 256);
            if (whole) store_result(sums, factor, target(), 0);
            else if (blocks) store_partial(sums, factor, partial, 0);
        } else {
            asm volatile("setmaxnreg.dec.sync.aligned.u32 160;");
            attend_1(s, blocks, sums);
            named_sync(ENDED, 256);
            factor[0] = s.total[0][thread];
            factor[1] = s.total[1][thread];
            if (whole) store_result(sums, factor, target(), 1);
            else if (blocks) store_partial(sums, factor, partial, 1);
        }
    }
}
