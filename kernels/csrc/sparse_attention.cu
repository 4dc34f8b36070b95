// Sparse attention of one latent head (K = V) over FP8 rows, for Hopper: split over keys.
//
// One CTA: up to 64 heads of one query, a span of key blocks of 64 rows. Four warpgroups:
//
//   decoders    two, half of a block's rows each (attention_rows.cuh): e4m3 * 2**e to fp16 (two
//               instructions for two values; bf16 would take six) into one of two shared tiles.
//               Rows reach 57,344 so, which RMS-normed latents never do
//   attender 0  scores = Q K^T, softmax; keeps its weights in registers and hands a copy to 1
//   attender 1  waits for the weights
//   both        rescale, then sums[:, own 256 columns] += weights V, with V the same tile
//
// A block is whole before it is read (mbarrier `full`) and free once both have multiplied it
// (`empty`). The last valid id of the span bounds the loop. Partials are normalised, in fp16, with
// their log-sum beside; attention_merge.cu adds them in span order, with the sink. No atomics on
// floats. Source: one tile as both K and V, decoded by a warpgroup of its own, is FlashMLA's idea.
#include "attention_rows.cuh"

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

__device__ __forceinline__ void named_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Named barriers: weights of even and of odd blocks, the decoders, what all start from, the end.
constexpr u32 WEIGHTS = 2, DECODERS = 4, STARTED = 5, ENDED = 6;

// A tile's descriptor: 128-byte swizzle; leading and stride offsets in bytes. Adding to it moves the
// address, in units of 16 bytes.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void multiply_scores(float (&d)[32], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
        "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, "
        "%29, %30, %31},"
        " %32, %33, p, 1, 1, 0, 0; }"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate));
}

// The 64 registers of a thread for 64 heads and 128 columns, named and bound.
#define SUM_NAMES \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
    "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
    "%62, %63 "
#define SUM_REGISTERS(d) \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

// d += a b, a in registers or in shared memory.
__device__ __forceinline__ void multiply_values(float* d, const u32* a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" SUM_NAMES
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : SUM_REGISTERS(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void multiply_values(float* d, u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" SUM_NAMES "}, %64, %65, 1, 1, 1, 0, 1;"
                 : SUM_REGISTERS(d)
                 : "l"(a), "l"(b));
}

struct Softmax {
    float top[2], total[2];
};

// Scores of a block to weights, packed as the A operand of the next product, and the shrink of
// what was summed before. A thread holds rows lane / 4 and that + 8, columns 8 n + 2 (lane % 4).
__device__ __forceinline__ void weigh(
    float (&scores)[32], const unsigned char* seen, float scale_log2, Softmax& soft, u32 (&packed)[16], float (&shrink)[2]) {
    const u32 lane = threadIdx.x & 31;
    float top[2] = {soft.top[0], soft.top[1]};
#pragma unroll
    for (u32 n = 0; n < 8; n++) {
        const u32 pair = *reinterpret_cast<const unsigned short*>(seen + 8 * n + 2 * (lane & 3));
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            const bool there = e & 1 ? pair >> 8 : pair & 255u;
            const float x = there ? scores[4 * n + e] * scale_log2 : MINUS_INFINITY;
            scores[4 * n + e] = x;
            top[e >> 1] = fmaxf(top[e >> 1], x);
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
        soft.total[r] *= shrink[r];
    }
#pragma unroll
    for (u32 n = 0; n < 8; n++) {
        float w[4];
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            w[e] = exp2_fast(scores[4 * n + e] - anchor[e >> 1]);
            soft.total[e >> 1] += w[e];
        }
        packed[2 * n] = pack_fp16(w[0], w[1]);
        packed[2 * n + 1] = pack_fp16(w[2], w[3]);
    }
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

// sums [64 heads, 256 columns from 256 * half] += weights [64, 64 rows] * tile.
template <typename Weights>
__device__ __forceinline__ void add_values(float (&sums)[128], const Weights& weights, u32 tile, u32 half) {
    const u64 values = descriptor(tile + half * 4 * CHUNK, CHUNK, 1024);
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < 4; k++)
#pragma unroll
        for (u32 n = 0; n < 2; n++)
            multiply_values(sums + 64 * n, weights(k), values + ((n * 2 * CHUNK + k * 2048) >> 4));
    wgmma_commit();
    wgmma_wait();
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
    for (u32 at = threadIdx.x & 255; at < span_blocks * BLOCK; at += 256) {
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
    const u64 q = descriptor(shared_address(s.q), 16, 1024);
    for (u32 j = 0; j < blocks; j++) {
        const u32 buffer = j & 1, tile = shared_address(s.keys[0]) + buffer * TILE;
        const u64 keys = descriptor(tile, 16, 1024);
        mbarrier_wait(shared_address(&s.full[buffer]), j >> 1 & 1);
        float scores[32];
        wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 32; k++) {
            const u32 at = ((k >> 2) * CHUNK + (k & 3) * 32) >> 4;
            multiply_scores(scores, q + at, keys + at, k > 0);
        }
        wgmma_commit();
        wgmma_wait();
        u32 packed[16];
        float shrink[2];
        weigh(scores, s.seen[buffer], scale_log2, soft, packed, shrink);
        // Who read these two blocks ago has since freed that block's tile, which this one is in.
        const u32 copy = shared_address(s.weights[buffer]) + row * 128 + (thread & 3) * 4;
#pragma unroll
        for (u32 i = 0; i < 16; i++) store4(copy + (i & 1) * 1024 + ((i >> 1 ^ row & 7) << 4), packed[i]);
        proxy_fence();
        s.shrink[buffer][0][thread] = shrink[0];
        s.shrink[buffer][1][thread] = shrink[1];
        named_arrive(WEIGHTS + buffer, 256);
        rescale(sums, shrink);
        add_values(sums, [&](u32 k) { return packed + 4 * k; }, tile, 0);
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
        const u64 weights = descriptor(shared_address(s.weights[buffer]), 16, 1024);
        rescale(sums, shrink);
        add_values(sums, [&](u32 k) { return weights + 2 * k; }, tile, 1);
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

extern "C" __global__ void __launch_bounds__(512, 1) sparse_attention(
    const void* q, i64 q_wide, i64 q_token, i64 q_head,  //
    const unsigned char* window_data, const unsigned char* window_scale, i64 window_data_page, i64 window_data_row,
    i64 window_scale_page, i64 window_scale_row, i64 window_page_rows, i64 window_rows,  //
    const int* window_ids, i64 window_ids_token, i64 window_count,                       //
    const unsigned char* extra_data, const unsigned char* extra_scale, i64 extra_data_page, i64 extra_data_row,
    i64 extra_scale_page, i64 extra_scale_row, i64 extra_page_rows, i64 extra_rows,  //
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
            mbarrier_init(shared_address(&s.full[b]), 256);
            mbarrier_init(shared_address(&s.empty[b]), 8);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (group >= 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
        Span span;
        span.window = {window_data, window_scale, window_data_page, window_data_row, window_scale_page, window_scale_row,
                       static_cast<u32>(window_page_rows), shift_of(window_page_rows), static_cast<u32>(window_rows),
                       window_ids + token * window_ids_token, static_cast<u32>(window_count)};
        span.extra = {extra_data, extra_scale, extra_data_page, extra_data_row, extra_scale_page, extra_scale_row,
                      static_cast<u32>(extra_page_rows), shift_of(extra_page_rows), static_cast<u32>(extra_rows),
                      extra_ids + token * extra_ids_token, static_cast<u32>(extra_count)};
        span.window_blocks = (span.window.count + BLOCK - 1) / BLOCK;
        span.first = split * static_cast<u32>(span_blocks);
        Decoder d;
        d.read_ids(span, span.first);
        d.seen = d.valid();
        d.locate(span, span.first);
        d.load_all();
        d.read_ids(span, span.first + 1);
        find_last(s, span, static_cast<u32>(span_blocks));
        named_sync(DECODERS, 256);
        named_arrive(STARTED, 512);
        const u32 blocks = __shfl_sync(FULL_WARP, (s.last + BLOCK) / BLOCK, 0);
        if (blocks) decode_blocks(s, d, span, blocks);
    } else {
        const i64 element = token * q_token + head * q_head;
        if (q_wide) {
            load_queries<true>(s, static_cast<const float*>(q) + element, q_head, here);
        } else {
            load_queries<false>(s, static_cast<const unsigned short*>(q) + element, q_head, here);
        }
        named_sync(STARTED, 512);
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
            asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
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
            asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
            attend_1(s, blocks, sums);
            named_sync(ENDED, 256);
            factor[0] = s.total[0][thread];
            factor[1] = s.total[1][thread];
            if (whole) store_result(sums, factor, target(), 1);
            else if (blocks) store_partial(sums, factor, partial, 1);
        }
    }
}
