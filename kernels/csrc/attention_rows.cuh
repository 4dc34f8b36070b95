// The decoders of sparse attention: FP8 rows by id from global memory to fp16 tiles in shared memory.
#pragma once
#include "attention.cuh"

constexpr u32 BLOCK = 64;           // rows of a tile
constexpr u32 CHUNK = BLOCK * 128;  // 64 columns of fp16 for 64 rows
constexpr u32 TILE = 8 * CHUNK;

struct Shared {
    unsigned char q[TILE];
    unsigned char keys[2][TILE];
    unsigned char weights[2][HEADS * 128];  // fp16, swizzled as a tile's chunk
    float shrink[2][2][128];
    float total[2][128];
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

struct Span {
    Scope window, extra;
    u32 window_blocks, first;
};

// What an absent row's bytes are read from.
__device__ const uint4 NO_ROW[36] = {};

// Place of 16 bytes `unit` (of 64 a row) of `row` in a tile: 128-byte swizzle.
__device__ __forceinline__ u32 place(u32 row, u32 unit) {
    return (unit >> 3) * CHUNK + row * 128 + (((unit & 7) ^ (row & 7)) << 4);
}

__device__ __forceinline__ uint4 load16(const unsigned char* p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ uint2 load8(const unsigned char* p) {
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

__device__ __forceinline__ void store16(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store4(u32 address, u32 a) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}

// Two bf16 to two fp16.
__device__ __forceinline__ u32 narrow(u32 pair) {
    return pack_fp16(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
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

// 2**(byte - 127) in both halves of a word, of byte `group`; at most 2**7, so that no code overflows.
__device__ __forceinline__ u32 factor_of(uint2 scales, u32 group) {
    const u32 byte = min(__byte_perm(scales.x, scales.y, group) & 255u, 134u);
    const float factor = __uint_as_float(byte << 23);
    return pack_fp16(factor, factor);
}

__device__ __forceinline__ u32 shift_of(i64 count) { return count & (count - 1) ? 32 : __ffsll(count) - 1; }

// The id in a slot; -1 past the ids or where it names no row.
__device__ __forceinline__ int read_id(const Scope& scope, u32 slot) {
    const int id = slot < scope.count ? __ldg(scope.ids + slot) : -1;
    return static_cast<u32>(id) < scope.rows ? id : -1;
}

__device__ __forceinline__ int read_id(const Span& span, u32 block, u32 lane) {
    if (block < span.window_blocks) return read_id(span.window, block * BLOCK + lane);
    return read_id(span.extra, (block - span.window_blocks) * BLOCK + lane);
}

// One warp decodes 8 rows of a block, eight lanes a row: this lane's are lane / 4 and the fourth after.
// Of each it has codes 16 l, 128 + 16 l and 256 + 16 l (l = lane % 8) and rotated values 8 l; the
// last 64 codes of both rows are four lanes' each. A block's bytes fly while the one before is decoded.
struct Decoder {
    uint4 codes[2][3], last, rope[2];
    uint2 scales[2];
    const unsigned char *at[2], *scale_at[2];  // of the block after that
    int ids[2];                                // of the one after that
    u32 seen;                                  // which rows of the block on its way are there
    u32 lane, row;

    __device__ __forceinline__ explicit Decoder() {
        lane = threadIdx.x & 31;
        row = (threadIdx.x >> 5 & 7) * 8 + (lane >> 3);
    }

    __device__ __forceinline__ void read_ids(const Span& span, u32 block) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) ids[i] = read_id(span, block, row + 4 * i);
    }

    // Where the ids' rows are.
    __device__ __forceinline__ void locate(const Span& span, u32 block) {
        if (block < span.window_blocks) {
            locate(span.window);
        } else {
            locate(span.extra);
        }
    }

    __device__ __forceinline__ void locate(const Scope& scope) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 id = max(ids[i], 0);
            const u32 page = scope.page_shift < 32 ? id >> scope.page_shift : id / scope.page_rows;
            const u32 in_page = id - page * scope.page_rows;
            const unsigned char* data = scope.data + page * scope.data_page + in_page * scope.data_row;
            const unsigned char* scale = scope.scale + page * scope.scale_page + in_page * scope.scale_row;
            const unsigned char* none = reinterpret_cast<const unsigned char*>(NO_ROW);
            at[i] = (ids[i] < 0 ? none : data) + (lane & 7) * 16;
            scale_at[i] = ids[i] < 0 ? none : scale;
        }
    }

    __device__ __forceinline__ u32 valid() const { return (ids[0] >= 0) | (ids[1] >= 0) << 1; }

    __device__ __forceinline__ void load_codes(u32 i, u32 part) { codes[i][part] = load16(at[i] + part * 128); }
    __device__ __forceinline__ void load_last() { last = load16((lane & 4 ? at[1] - 64 : at[0]) + 384); }
    __device__ __forceinline__ void load_rope(u32 i) { rope[i] = load16(at[i] + 448); }
    __device__ __forceinline__ void load_scales() {
#pragma unroll
        for (u32 i = 0; i < 2; i++) scales[i] = load8(scale_at[i]);
    }

    __device__ __forceinline__ void load_all() {
        load_scales();
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
#pragma unroll
            for (u32 part = 0; part < 3; part++) load_codes(i, part);
            load_rope(i);
        }
        load_last();
    }

    // 16 codes to two units, 16 bytes apart. Lanes 4 .. 7 of eight store the upper one first, so that
    // eight lanes meet eight bank groups.
    __device__ __forceinline__ void decode16(u32 address, uint4 c, u32 factor) const {
        const bool upper = lane & 4;
        const uint2 a = decode4(upper ? c.z : c.x, factor), b = decode4(upper ? c.w : c.y, factor);
        store16(address, a.x, a.y, b.x, b.y);
        const uint2 d = decode4(upper ? c.x : c.z, factor), e = decode4(upper ? c.y : c.w, factor);
        store16(address ^ 16, d.x, d.y, e.x, e.y);
    }

    // The block at hand into its tile; with `more` the next one's bytes take its place.
    __device__ __forceinline__ void store(u32 tile, bool more) {
        const u32 l = lane & 7, upper = l >> 2, pair = 2 * (l & 3) + upper;
        const u32 own = tile + row * 128 + ((pair ^ (row & 7)) << 4), other = (own ^ 64) + 512;
        const u32 turned = tile + 7 * CHUNK + row * 128 + ((l ^ (row & 7)) << 4);
        const uint2 scale[2] = {scales[0], scales[1]};
        if (more) load_scales();
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
#pragma unroll
            for (u32 part = 0; part < 3; part++) {
                decode16((i ? other : own) + upper * CHUNK + part * 2 * CHUNK, codes[i][part],
                         factor_of(scale[i], part * 2 + upper));
                if (more) load_codes(i, part);
            }
        }
        decode16((upper ? other : own) + 6 * CHUNK, last, factor_of(upper ? scale[1] : scale[0], 6));
        if (more) load_last();
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            store16(i ? (turned ^ 64) + 512 : turned, narrow(rope[i].x), narrow(rope[i].y), narrow(rope[i].z),
                    narrow(rope[i].w));
            if (more) load_rope(i);
        }
    }
};

// On entry the first block's bytes are on their way and the second's ids are there.
__device__ __forceinline__ void decode_blocks(Shared& s, Decoder& d, const Span& span, u32 blocks) {
    u32 coming = d.seen;
    for (u32 j = 0; j < blocks; j++) {
        const u32 buffer = j & 1, seen = coming;
        d.locate(span, span.first + j + 1);
        coming = d.valid();
        d.read_ids(span, span.first + j + 2);
        if (j > 1) mbarrier_wait(shared_address(&s.empty[buffer]), (j >> 1 & 1) ^ 1);
        if ((d.lane & 7) == 0) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) s.seen[buffer][d.row + 4 * i] = seen >> i & 1;
        }
        d.store(shared_address(s.keys[0]) + buffer * TILE, j + 1 < blocks);
        proxy_fence();
        mbarrier_arrive(shared_address(&s.full[buffer]));
    }
}
