// Sparse attention of one latent head (K = V) over FP8 rows, for Hopper: split over keys.
//
// One CTA: up to 64 heads of one query, a span of key blocks of 64 rows. Four warpgroups:
//
//   decoders    two, half of a block's rows each, so that one's wait is the other's work: read row ids
//               three blocks ahead, ask for rows in the L2 two ahead and read them one ahead, half
//               by asynchronous copies and half in registers (either alone is too small); decode e4m3 * 2**e to fp16 (two
//               instructions for two values; bf16 would take six) into one of two shared tiles
//               (128-byte swizzle). Rows reach 57,344 so, which RMS-normed latents never do
//   attender 0  scores = Q K^T, softmax; keeps its weights in registers and hands a copy to 1
//   attender 1  waits for the weights
//   both        rescale, then sums[:, own 256 columns] += weights V, with V the same tile
//
// A block is whole before it is read (mbarrier `full`) and free once both have multiplied it
// (`empty`). The last valid id of the span bounds the loop. Partials are normalised, with their
// log-sum beside; sparse_attention_merge adds them in span order, with the sink. No atomics on
// floats. Source: one tile as both K and V, decoded by a warpgroup of its own, is FlashMLA's idea.
#include "common.cuh"

constexpr u32 HEADS = 64;   // of a CTA
constexpr u32 BLOCK = 64;   // rows of a tile
constexpr u32 DIM = 512;
constexpr u32 CHUNK = BLOCK * 128;  // 64 columns of bf16 for 64 rows
constexpr u32 TILE = 8 * CHUNK;
constexpr float LOG2_E = 1.4426950408889634f;
#define MINUS_INFINITY __int_as_float(0xff800000)
#define INFINITY_F __int_as_float(0x7f800000)

struct Shared {
    unsigned char q[TILE];
    unsigned char keys[2][TILE];
    u32 weights[16][128];
    float shrink[2][128];
    float total[2][128];
    uint4 raw[5][256];  // codes on their way, a decoder thread's own
    unsigned char seen[2][BLOCK];
    u64 full[2], empty[2];
    int last;
};

// Where rows lie: row id = page * page_rows + place.
struct Scope {
    const unsigned char *data, *scale;
    i64 data_page, data_row, scale_page, scale_row;
    u32 page_rows, page_shift, rows;  // page_rows = 1 << page_shift, or page_shift is 32
    const int* ids;
    u32 count;
};

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

__device__ __forceinline__ void named_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A tile's descriptor: 128-byte swizzle; leading and stride offsets in bytes.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ u32 pack_fp16(float low, float high) {
    u32 both;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Two bf16 to two fp16.
__device__ __forceinline__ u32 narrow(u32 pair) {
    return pack_fp16(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
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

__device__ __forceinline__ void multiply_values(float* d, const u32* a, u64 b) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
        "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, "
        "%29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},"
        " {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
          "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
          "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
          "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Four e4m3 codes to fp16, times a power of two (in both halves).
__device__ __forceinline__ uint2 decode4(u32 codes, u32 factor) {
    uint2 v;
    asm("{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 x, a;\n"
        "cvt.rn.f16x2.e4m3x2 y, b;\n"
        "mul.rn.f16x2 %0, x, %3;\n"
        "mul.rn.f16x2 %1, y, %3; }"
        : "=r"(v.x), "=r"(v.y)
        : "r"(codes), "r"(factor));
    return v;
}

__device__ __forceinline__ uint4 load16(const unsigned char* p, bool there) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (there) asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ uint2 load8(const unsigned char* p, bool there) {
    uint2 v = make_uint2(0, 0);
    if (there) asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// 16 bytes to shared memory, later; zeros where not there.
__device__ __forceinline__ void copy16(u32 shared, const unsigned char* p, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(p), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void store16(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Place of 16 bytes `unit` (of 64 a row) of `row` in a tile.
__device__ __forceinline__ u32 place(u32 row, u32 unit) {
    return (unit >> 3) * CHUNK + row * 128 + (((unit & 7) ^ (row & 7)) << 4);
}

// 16 codes of `row` from column `column` (a multiple of 16) into the tile. Lanes of the upper half
// of eight store their two units in the other order, so that eight lanes meet eight bank groups.
__device__ __forceinline__ void decode16(u32 tile, u32 row, u32 column, uint4 codes, u32 factor, bool swap) {
    const uint2 a = decode4(codes.x, factor), b = decode4(codes.y, factor);
    const uint2 c = decode4(codes.z, factor), d = decode4(codes.w, factor);
    const u32 unit = column >> 3;
    const u32 first = place(row, unit + swap), second = place(row, unit + !swap);
    if (swap) {
        store16(tile + first, c.x, c.y, d.x, d.y);
        store16(tile + second, a.x, a.y, b.x, b.y);
    } else {
        store16(tile + first, a.x, a.y, b.x, b.y);
        store16(tile + second, c.x, c.y, d.x, d.y);
    }
}

// 2**(byte - 127) in both halves of a word; at most 2**7, so that no code overflows.
__device__ __forceinline__ u32 factor_of(uint2 scales, u32 group) {
    const u32 byte = min((group < 4 ? scales.x : scales.y) >> ((group & 3) * 8) & 255u, 134u);
    const float factor = __uint_as_float(byte << 23);
    return pack_fp16(factor, factor);
}

__device__ __forceinline__ u32 shift_of(i64 count) { return count & (count - 1) ? 32 : __ffsll(count) - 1; }

struct Span {
    Scope window, extra;
    u32 window_blocks, first;
};

// The id in a slot; -1 past the ids or where it names no row.
__device__ __forceinline__ int read_id(const Scope& scope, u32 slot) {
    const int id = slot < scope.count ? __ldg(scope.ids + slot) : -1;
    return static_cast<u32>(id) < scope.rows ? id : -1;
}

__device__ __forceinline__ int read_id(const Span& span, u32 block, u32 lane) {
    if (block < span.window_blocks) return read_id(span.window, block * BLOCK + lane);
    return read_id(span.extra, (block - span.window_blocks) * BLOCK + lane);
}

// One warp decodes 8 rows of a block, four at a time, eight lanes a row.
struct Decoder {
    // Columns 16 l and 128 + 16 l as [2 row + part][thread]; then columns 384 + 16 l of both rows,
    // four lanes each, as [4][thread].
    uint4 (*raw)[256];
    const unsigned char* base;  // any address, for copies of nothing
    uint4 body[2];  // columns 256 + 16 l
    uint4 rope[2];
    uint2 scales[2];
    int ids[2];                  // of the block after the one at hand
    const unsigned char* at[2];  // data of the block at hand, null where a row is absent
    const unsigned char* scale_at[2];

    __device__ __forceinline__ void read_ids(const Span& span, u32 block, u32 warp, u32 lane) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) ids[i] = read_id(span, block, warp * 8 + i * 4 + (lane >> 3));
    }

    __device__ __forceinline__ u32 valid() const { return (at[0] != nullptr) | (at[1] != nullptr) << 1; }

    // Addresses of the ids' rows, and their bytes asked for in the L2.
    __device__ __forceinline__ void locate(const Span& span, u32 block, u32 lane) {
        if (block < span.window_blocks) {
            locate(span.window, lane);
        } else {
            locate(span.extra, lane);
        }
    }

    __device__ __forceinline__ void locate(const Scope& scope, u32 lane) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            at[i] = nullptr;
            if (ids[i] < 0) continue;
            const u32 id = ids[i];
            const u32 page = scope.page_shift < 32 ? id >> scope.page_shift : id / scope.page_rows;
            const u32 row = id - page * scope.page_rows;
            at[i] = scope.data + page * scope.data_page + row * scope.data_row;
            scale_at[i] = scope.scale + page * scope.scale_page + row * scope.scale_row;
            const u32 l = lane & 7;
            const unsigned char* line = l < 5 ? at[i] + l * 128 : l == 5 ? at[i] + 575 : scale_at[i];
            asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
        }
    }

    __device__ __forceinline__ void load(u32 lane) {
        const u32 l = lane & 7;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const bool there = at[i] != nullptr;
            scales[i] = load8(scale_at[i], there);
#pragma unroll
            for (u32 part = 0; part < 2; part++)
                copy16(shared_address(&raw[2 * i + part][threadIdx.x & 255]),
                       there ? at[i] + part * 128 + l * 16 : base, there);
            body[i] = load16(at[i] + 256 + l * 16, there);
            rope[i] = load16(at[i] + 448 + l * 16, there);
        }
        const unsigned char* from = l >= 4 ? at[1] : at[0];
        copy16(shared_address(&raw[4][threadIdx.x & 255]), from ? from + 384 + (l & 3) * 16 : base, from != nullptr);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    __device__ __forceinline__ void store(u32 tile, u32 warp, u32 lane) const {
        const u32 l = lane & 7, row = warp * 8 + (lane >> 3), thread = threadIdx.x & 255;
        const bool second = l >= 4;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
#pragma unroll
            for (u32 part = 0; part < 2; part++)
                decode16(tile, row + 4 * i, part * 128 + l * 16, raw[2 * i + part][thread],
                         factor_of(scales[i], part * 2 + second), second);
            decode16(tile, row + 4 * i, 256 + l * 16, body[i], factor_of(scales[i], 4 + second), second);
            store16(tile + place(row + 4 * i, 56 + l), narrow(rope[i].x), narrow(rope[i].y), narrow(rope[i].z),
                    narrow(rope[i].w));
        }
        const u32 factor = factor_of(second ? scales[1] : scales[0], 6);
        decode16(tile, row + (second ? 4 : 0), 384 + (l & 3) * 16, raw[4][thread], factor, second);
    }
};

// On entry the first block's bytes are on their way and the second's ids are there.
__device__ __forceinline__ void decode_blocks(Shared& s, Decoder& d, const Span& span, u32 blocks) {
    const u32 lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 7;
    u32 valid = d.valid();
    d.locate(span, span.first + 1, lane);
    d.read_ids(span, span.first + 2, warp, lane);
    for (u32 j = 0; j < blocks; j++) {
        const u32 buffer = j & 1, tile = shared_address(s.keys[buffer]);
        if (j > 1) mbarrier_wait(shared_address(&s.empty[buffer]), (j >> 1 & 1) ^ 1);
        if ((lane & 7) == 0) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) s.seen[buffer][warp * 8 + i * 4 + (lane >> 3)] = valid >> i & 1;
        }
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        d.store(tile, warp, lane);
        proxy_fence();
        mbarrier_arrive(shared_address(&s.full[buffer]));
        if (j + 1 < blocks) {
            d.load(lane);
            valid = d.valid();
            d.locate(span, span.first + j + 2, lane);
            d.read_ids(span, span.first + j + 3, warp, lane);
        }
    }
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

__device__ __forceinline__ void rescale(float (&sums)[128], const float (&shrink)[2]) {
#pragma unroll
    for (u32 n = 0; n < 32; n++) {
        sums[4 * n] *= shrink[0];
        sums[4 * n + 1] *= shrink[0];
        sums[4 * n + 2] *= shrink[1];
        sums[4 * n + 3] *= shrink[1];
    }
}

// sums [64 heads, 256 columns from 256 * half] += weights [64, 64 rows] * tile.
__device__ __forceinline__ void add_values(float (&sums)[128], const u32 (&packed)[16], u32 tile, u32 half) {
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < 4; k++)
#pragma unroll
        for (u32 n = 0; n < 2; n++)
            multiply_values(sums + 64 * n, packed + 4 * k,
                            descriptor(tile + (half * 4 + n * 2) * CHUNK + k * 2048, CHUNK, 1024));
    wgmma_commit();
    wgmma_wait();
}

__device__ __forceinline__ void free_tile(Shared& s, u32 buffer) {
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared_address(&s.empty[buffer]));
}

// 2**log / (2**log + 2**sink), for any infinities.
__device__ __forceinline__ float share(float log, float sink) {
    if (log == MINUS_INFINITY || sink == INFINITY_F) return 0.0f;
    return 1.0f / (1.0f + exp2f(sink - log));
}

// cos and sin of position * inv_freq (rounded to fp32, as the model defines the angle).
__device__ __forceinline__ float2 turn_of(i64 position, float inv_freq) {
    // 2 pi in parts whose products with the turns (below 2**19) are exact.
    const float angle = static_cast<float>(position) * inv_freq, turns = rintf(angle * 0.15915494309189535f);
    float rest = fmaf(turns, -6.25f, angle);
    rest = fmaf(turns, -0.033203125f, rest);
    rest = fmaf(turns, 1.7817820413e-5f, rest);
    return make_float2(__cosf(rest), __sinf(rest));
}

__device__ __forceinline__ i64 read_position(const void* positions, i64 wide, u32 token) {
    return wide ? static_cast<const i64*>(positions)[token] : static_cast<const int*>(positions)[token];
}

__device__ __forceinline__ void store_pair(void* row, i64 wide, u32 column, float x, float y) {
    if (wide) {
        *reinterpret_cast<float2*>(static_cast<float*>(row) + column) = make_float2(x, y);
    } else {
        *reinterpret_cast<u32*>(static_cast<unsigned short*>(row) + column) = pack_bf16(x, y);
    }
}

struct Target {
    void* rows[2];  // of this thread's two heads, or null
    i64 wide;       // fp32, else bf16
    const float* inv_freq;
    i64 position;
};

__device__ __forceinline__ void store_sums(const float (&sums)[128], const float (&factor)[2], const Target& to, u32 half) {
    const u32 lane = threadIdx.x & 31;
#pragma unroll
    for (u32 n = 0; n < 32; n++) {
        const u32 column = half * 256 + 8 * n + 2 * (lane & 3);
        float2 turn = make_float2(1.0f, 0.0f);
        const bool turned = half && n >= 24 && to.inv_freq;
        if (turned) turn = turn_of(to.position, to.inv_freq[(column - 448) >> 1]);
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            float x = sums[4 * n + 2 * r] * factor[r], y = sums[4 * n + 2 * r + 1] * factor[r];
            if (turned) {
                const float even = x * turn.x + y * turn.y;
                y = y * turn.x - x * turn.y;
                x = even;
            }
            if (to.rows[r]) store_pair(to.rows[r], to.wide, column, x, y);
        }
    }
}

// All loads of a half before the first store, so that they fly together.
template <bool WIDE>
__device__ __forceinline__ void load_queries(Shared& s, const void* q, i64 q_head, u32 heads) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        uint4 v[8][WIDE ? 2 : 1];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const u32 at = threadIdx.x + (half * 8 + i) * 256, row = at >> 6, unit = at & 63;
            const unsigned char* p = static_cast<const unsigned char*>(q) + (row * q_head + unit * 8) * (WIDE ? 4 : 2);
#pragma unroll
            for (u32 k = 0; k < (WIDE ? 2 : 1); k++) v[i][k] = load16(p + 16 * k, row < heads);
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const u32 at = threadIdx.x + (half * 8 + i) * 256, row = at >> 6, unit = at & 63;
            const u32 to = shared_address(s.q) + place(row, unit);
            const uint4 a = v[i][0], b = v[i][WIDE ? 1 : 0];
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
    const u32 thread = threadIdx.x & 127, q = shared_address(s.q);
    for (u32 j = 0; j < blocks; j++) {
        const u32 buffer = j & 1, tile = shared_address(s.keys[buffer]);
        mbarrier_wait(shared_address(&s.full[buffer]), j >> 1 & 1);
        float scores[32];
        wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 32; k++) {
            const u32 at = (k >> 2) * CHUNK + (k & 3) * 32;
            multiply_scores(scores, descriptor(q + at, 16, 1024), descriptor(tile + at, 16, 1024), k > 0);
        }
        wgmma_commit();
        wgmma_wait();
        u32 packed[16];
        float shrink[2];
        weigh(scores, s.seen[buffer], scale_log2, soft, packed, shrink);
        if (j) named_sync(3, 256);  // the copy before has been read
#pragma unroll
        for (u32 i = 0; i < 16; i++) s.weights[i][thread] = packed[i];
        s.shrink[0][thread] = shrink[0];
        s.shrink[1][thread] = shrink[1];
        named_arrive(2, 256);
        rescale(sums, shrink);
        add_values(sums, packed, tile, 0);
        free_tile(s, buffer);
    }
}

__device__ __forceinline__ void attend_1(Shared& s, u32 blocks, float (&sums)[128]) {
    const u32 thread = threadIdx.x & 127;
    for (u32 j = 0; j < blocks; j++) {
        const u32 buffer = j & 1, tile = shared_address(s.keys[buffer]);
        mbarrier_wait(shared_address(&s.full[buffer]), j >> 1 & 1);
        named_sync(2, 256);
        u32 packed[16];
#pragma unroll
        for (u32 i = 0; i < 16; i++) packed[i] = s.weights[i][thread];
        const float shrink[2] = {s.shrink[0][thread], s.shrink[1][thread]};
        if (j + 1 < blocks) named_arrive(3, 256);
        rescale(sums, shrink);
        add_values(sums, packed, tile, 1);
        free_tile(s, buffer);
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
    float* sums_out, float* logs_out, i64 sums_token, i64 sums_split, i64 logs_token, i64 logs_split,
    i64 heads, i64 head_blocks, i64 splits, i64 span_blocks, i64 scale_bits) {
    extern __shared__ unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory + ((1024 - (shared_address(memory) & 1023)) & 1023));
    const u32 head_block = blockIdx.x % static_cast<u32>(head_blocks);
    const u32 split = blockIdx.x / static_cast<u32>(head_blocks) % static_cast<u32>(splits);
    const u32 token = blockIdx.x / static_cast<u32>(head_blocks * splits);
    const u32 head = head_block * HEADS, group = __shfl_sync(FULL_WARP, threadIdx.x >> 7, 0);
    const u32 here = min(static_cast<u32>(heads) - head, HEADS);
    const float scale_log2 = __uint_as_float(static_cast<u32>(scale_bits)) * LOG2_E;
    Span span;
    span.window = {window_data, window_scale, window_data_page, window_data_row, window_scale_page, window_scale_row,
                   static_cast<u32>(window_page_rows), shift_of(window_page_rows), static_cast<u32>(window_rows),
                   window_ids + token * window_ids_token, static_cast<u32>(window_count)};
    span.extra = {extra_data, extra_scale, extra_data_page, extra_data_row, extra_scale_page, extra_scale_row,
                  static_cast<u32>(extra_page_rows), shift_of(extra_page_rows), static_cast<u32>(extra_rows),
                  extra_ids + token * extra_ids_token, static_cast<u32>(extra_count)};
    span.window_blocks = (span.window.count + BLOCK - 1) / BLOCK;
    span.first = split * static_cast<u32>(span_blocks);

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
        const u32 lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 7;
        Decoder d;
        d.raw = s.raw;
        d.base = window_data;
        d.read_ids(span, span.first, warp, lane);
        d.locate(span, span.first, lane);
        d.load(lane);
        d.read_ids(span, span.first + 1, warp, lane);
        find_last(s, span, static_cast<u32>(span_blocks));
        __syncthreads();
        const u32 blocks = __shfl_sync(FULL_WARP, (s.last + BLOCK) / BLOCK, 0);
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        if (blocks) decode_blocks(s, d, span, blocks);
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else {
        const i64 element = token * q_token + head * q_head;
        if (q_wide) {
            load_queries<true>(s, static_cast<const float*>(q) + element, q_head, here);
        } else {
            load_queries<false>(s, static_cast<const unsigned short*>(q) + element, q_head, here);
        }
        __syncthreads();
        const u32 blocks = __shfl_sync(FULL_WARP, (s.last + BLOCK) / BLOCK, 0);
        asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
        const u32 thread = threadIdx.x & 127, lane = thread & 31;
        float sums[128];
#pragma unroll
        for (u32 i = 0; i < 128; i++) sums[i] = 0.0f;
        Softmax soft = {{MINUS_INFINITY, MINUS_INFINITY}, {0.0f, 0.0f}};
        if (group == 0) {
            attend_0(s, blocks, scale_log2, sums, soft);
        } else {
            attend_1(s, blocks, sums);
        }
        const bool whole = splits == 1;
        float factor[2];
        u32 row[2] = {(thread >> 5) * 16 + (lane >> 2), (thread >> 5) * 16 + (lane >> 2) + 8};
        if (group == 0) {
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
        }
        named_sync(4, 256);
        Target to;
        to.wide = whole ? out_wide : 1;
        to.inv_freq = whole ? inv_freq : nullptr;
        to.position = to.inv_freq ? read_position(positions, positions_wide, token) : 0;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            factor[r] = s.total[r][thread];
            const u32 h = head + row[r];
            to.rows[r] = nullptr;
            if (row[r] < here && whole)
                to.rows[r] = static_cast<unsigned char*>(out) + (token * out_token + h * out_head) * (out_wide ? 4 : 2);
            if (row[r] < here && !whole) to.rows[r] = sums_out + token * sums_token + split * sums_split + h * i64{DIM};
        }
        if (whole || blocks) {
            if (group == 0) {
                store_sums(sums, factor, to, 0);
            } else {
                store_sums(sums, factor, to, 1);
            }
        }
    }
}

// One block a (query, head), four columns a thread. Splits are summed in eight classes, i modulo 8,
// then class by class: an order that neither the number of splits nor that of threads changes.
constexpr u32 CLASSES = 8;

__device__ __forceinline__ void add(float4& sum, float w, float4 x) {
    sum.x = __fadd_rn(sum.x, __fmul_rn(w, x.x));
    sum.y = __fadd_rn(sum.y, __fmul_rn(w, x.y));
    sum.z = __fadd_rn(sum.z, __fmul_rn(w, x.z));
    sum.w = __fadd_rn(sum.w, __fmul_rn(w, x.w));
}

extern "C" __global__ void __launch_bounds__(1024) sparse_attention_merge(
    const float* sums, const float* logs, i64 sums_token, i64 sums_split, i64 logs_token, i64 logs_split, i64 splits,
    const float* sink, const void* positions, i64 positions_wide, const float* inv_freq, void* out, i64 out_wide,
    i64 out_token, i64 out_head, i64 heads) {
    __shared__ float weights[1024];
    __shared__ float4 parts[CLASSES][128];
    __shared__ float totals[CLASSES];
    const u32 token = blockIdx.x / static_cast<u32>(heads), head = blockIdx.x % static_cast<u32>(heads);
    const u32 count = static_cast<u32>(splits), column = threadIdx.x & 127;
    const u32 team = threadIdx.x >> 7, teams = blockDim.x >> 7;
    const float* log = logs + token * logs_token + head;
    const float sink_log = sink[head] * LOG2_E;
    const bool turned = inv_freq && column >= 112 && !team;
    float2 frequency = make_float2(0.0f, 0.0f);
    i64 position = 0;
    if (turned) {
        position = read_position(positions, positions_wide, token);
        frequency = *reinterpret_cast<const float2*>(inv_freq + 2 * (column - 112));
    }
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) weights[i] = log[i * logs_split];
    __syncthreads();
    float top = MINUS_INFINITY;
    for (u32 i = threadIdx.x & 31; i < count; i += 32) top = fmaxf(top, weights[i]);
    for (u32 d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, d));
    const float anchor = top == MINUS_INFINITY ? 0.0f : top;
    const float* part = sums + token * sums_token + head * i64{DIM} + column * 4;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float total = 0.0f;
    if (teams == 1) {  // at most one split a class
#pragma unroll
        for (u32 i = 0; i < CLASSES; i++) {
            const float w = i < count ? exp2f(weights[i] - anchor) : 0.0f;
            if (w > 0.0f) add(sum, w, __ldcs(reinterpret_cast<const float4*>(part + i * sums_split)));
            total += w;
        }
    } else {
        float4 own = sum;
        float weight = 0.0f;
#pragma unroll 8
        for (u32 i = team; i < count; i += CLASSES) {
            const float w = exp2f(weights[i] - anchor);
            if (w > 0.0f) add(own, w, __ldcs(reinterpret_cast<const float4*>(part + i * sums_split)));
            weight += w;
        }
        parts[team][column] = own;
        if (column == 0) totals[team] = weight;
        __syncthreads();
        if (team) return;
        for (u32 c = 0; c < CLASSES; c++) {
            const float4 x = parts[c][column];
            sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
            total += totals[c];
        }
    }
    const float all = total > 0.0f ? top + log2f(total) : MINUS_INFINITY;
    const float factor = total > 0.0f ? share(all, sink_log) / total : 0.0f;
    sum = make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
    if (turned) {
        const float2 a = turn_of(position, frequency.x), b = turn_of(position, frequency.y);
        sum = make_float4(sum.x * a.x + sum.y * a.y, sum.y * a.x - sum.x * a.y, sum.z * b.x + sum.w * b.y,
                          sum.w * b.x - sum.z * b.y);
    }
    void* row = static_cast<unsigned char*>(out) + (token * out_token + head * out_head) * (out_wide ? 4 : 2);
    store_pair(row, out_wide, column * 4, sum.x, sum.y);
    store_pair(row, out_wide, column * 4 + 2, sum.z, sum.w);
}
