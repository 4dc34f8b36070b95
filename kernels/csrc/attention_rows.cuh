// The decoders of sparse attention: FP8 rows by id from global memory to fp16 tiles in shared memory.
#pragma once
#include "attention.cuh"

constexpr u32 BLOCK = 64;           // rows of a tile
constexpr u32 CHUNK = BLOCK * 128;  // 64 columns of fp16 for 64 rows
constexpr u32 TILE = 8 * CHUNK;

constexpr u32 DECODING = 128;  // threads that decode, after those that attend

struct Shared {
    unsigned char q[TILE];
    unsigned char keys[2][TILE];
    unsigned char weights[2][HEADS * 128];  // fp16, swizzled as a tile's chunk
    float shrink[2][2][128];
    uint4 rope[4][DECODING];    // on their way, a decoding thread's own: rotated values
    uint2 scales[4][DECODING];  // and scales
    float total[2][128];
    float seen[2][BLOCK];  // what is added to a row's scores: 0, or -inf where the row is absent
    u64 full[2], empty[2];
    int last;
};

// Where rows lie: row id = page * page_rows + its place in the page. Strides in bytes.
struct Scope {
    const unsigned char *data, *scale;
    u32 data_page, data_row, scale_page, scale_row;
    u32 page_rows, magic, shift, rows;  // id / page_rows = id * magic >> shift, for ids below 2**31
    const int* ids;
    u32 count;
};

__device__ __forceinline__ Scope scope_of(
    const unsigned char* data, const unsigned char* scale, i64 data_page, i64 data_row, i64 scale_page, i64 scale_row,
    i64 page_rows, i64 magic, i64 shift, i64 rows, const int* ids, i64 count) {
    return {data, scale, static_cast<u32>(data_page), static_cast<u32>(data_row), static_cast<u32>(scale_page),
            static_cast<u32>(scale_row), static_cast<u32>(page_rows), static_cast<u32>(magic), static_cast<u32>(shift),
            static_cast<u32>(rows), ids, static_cast<u32>(count)};
}

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

// BYTES to shared memory, later.
template <int BYTES>
__device__ __forceinline__ void copy(u32 shared, const unsigned char* p) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(p), "n"(BYTES) : "memory");
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

// One warp decodes 16 rows of a block, eight lanes a row: this lane's are lane / 8 and every fourth
// after. Of each it has codes 16 l, 128 + 16 l and 256 + 16 l (l = lane % 8) and rotated values 8 l; the
// last 64 codes of two rows are four lanes' each. A block's bytes fly while the one before is decoded:
// codes to registers, the rest to shared memory. Where the warp's rows lie is found for two blocks at
// once, a row a lane. Nothing here may spill: local loads would wait behind the rows' bytes.
struct Decoder {
    static constexpr u32 ABSENT = ~0u, ROWS = 4;

    Shared& s;
    const Span& span;
    uint4 codes[ROWS][3], last[ROWS / 2];
    u32 page, in_page;  // of this lane's row of two blocks
    int id;             // of the two after them, unchecked
    u32 seen;           // which of the rows on their way are there
    const u32 lane, own, row;

    __device__ __forceinline__ Decoder(Shared& shared, const Span& where)
        : s(shared), span(where), seen(0), lane(threadIdx.x & 31), own(threadIdx.x & (DECODING - 1)),
          row((own >> 5) * 16 + (lane >> 3)) {}

    // This lane's id of the two blocks from number `j` of the span on.
    __device__ __forceinline__ void read_ids(u32 j) {
        const u32 block = span.first + j + (lane >> 4), in_block = (own >> 5) * 16 + (lane & 15);
        const bool near = block < span.window_blocks;
        const u32 slot = (near ? block : block - span.window_blocks) * BLOCK + in_block;
        const int* ids = near ? span.window.ids : span.extra.ids;
        id = slot < (near ? span.window.count : span.extra.count) ? __ldg(ids + slot) : -1;
    }

    __device__ __forceinline__ void find_pages(u32 j) {
        const bool near = span.first + j + (lane >> 4) < span.window_blocks;
        const u64 magic = near ? span.window.magic : span.extra.magic;
        const u32 rows = near ? span.window.page_rows : span.extra.page_rows, x = id;
        page = static_cast<u32>(x * magic >> (near ? span.window.shift : span.extra.shift));
        in_page = x - page * rows;
        if (x >= (near ? span.window.rows : span.extra.rows)) page = ABSENT;
    }

    struct Address {
        const unsigned char *data, *scale;  // data: where this lane's part of the row begins
    };

    // Row i of block `j` of the span.
    __device__ __forceinline__ Address locate(u32 j, u32 i) {
        const bool near = span.first + j < span.window_blocks;
        const Scope &a = span.window, &b = span.extra;  // told apart field by field: in registers
        const u32 from = (j & 1) * 16 + (lane >> 3) + 4 * i;
        const u32 p = __shfl_sync(FULL_WARP, page, from), r = __shfl_sync(FULL_WARP, in_page, from);
        const unsigned char* none = reinterpret_cast<const unsigned char*>(NO_ROW);
        Address at = {none, none};
        if (p != ABSENT) {
            at.data = (near ? a.data : b.data) + static_cast<u64>(p) * (near ? a.data_page : b.data_page) +
                      static_cast<u64>(r) * (near ? a.data_row : b.data_row);
            at.scale = (near ? a.scale : b.scale) + static_cast<u64>(p) * (near ? a.scale_page : b.scale_page) +
                       static_cast<u64>(r) * (near ? a.scale_row : b.scale_row);
            seen |= 1 << i;
        }
        at.data += (lane & 7) * 16;
        return at;
    }

    __device__ __forceinline__ void load_codes(u32 i, u32 part, const Address& at) {
        codes[i][part] = load16(at.data + part * 128);
    }

    __device__ __forceinline__ void load_last(u32 pair, const Address& even, const Address& odd) {
        last[pair] = load16((lane & 4 ? odd.data - 64 : even.data) + 384);
    }

    __device__ __forceinline__ void load_beside(u32 i, const Address& at) {
        copy<16>(shared_address(&s.rope[i][own]), at.data + 448);
        copy<8>(shared_address(&s.scales[i][own]), at.scale);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    __device__ __forceinline__ void load_first() {
        Address even;
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) {
            const Address at = locate(0, i);
            load_beside(i, at);
#pragma unroll
            for (u32 part = 0; part < 3; part++) load_codes(i, part, at);
            if (i & 1) load_last(i / 2, even, at);
            even = at;
        }
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

    // The block at hand into its tile; with `more` the bytes of block `next` take its place.
    __device__ __forceinline__ void store(u32 tile, u32 next, bool more) {
        const u32 l = lane & 7, upper = l >> 2, pair = 2 * (l & 3) + upper;
        const u32 mine = tile + row * 128 + ((pair ^ (row & 7)) << 4), other = (mine ^ 64) + 512;
        const u32 turned = tile + 7 * CHUNK + row * 128 + ((l ^ (row & 7)) << 4);
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        seen = 0;
        Address even;
        uint2 scale_even;
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) {
            const u32 below = (i >> 1) * 1024;
            const uint2 scale = s.scales[i][own];
            const uint4 v = s.rope[i][own];
            store16((i & 1 ? (turned ^ 64) + 512 : turned) + below, narrow(v.x), narrow(v.y), narrow(v.z), narrow(v.w));
            Address at;
            if (more) {
                at = locate(next, i);
                load_beside(i, at);
            }
#pragma unroll
            for (u32 part = 0; part < 3; part++) {
                decode16((i & 1 ? other : mine) + upper * CHUNK + part * 2 * CHUNK + below, codes[i][part],
                         factor_of(scale, part * 2 + upper));
                if (more) load_codes(i, part, at);
            }
            if (i & 1) {
                decode16((upper ? other : mine) + 6 * CHUNK + below, last[i / 2], factor_of(upper ? scale : scale_even, 6));
                if (more) load_last(i / 2, even, at);
            }
            even = at;
            scale_even = scale;
        }
    }
};

// On entry the first block's bytes are on their way, and the ids of blocks 2 and 3.
__device__ __forceinline__ void decode_blocks(Shared& s, Decoder& d, u32 blocks) {
    for (u32 j = 0; j < blocks; j++) {
        const u32 buffer = j & 1;
        if (buffer) {
            d.find_pages(j + 1);
            d.read_ids(j + 3);
        }
        if (j > 1) mbarrier_wait(shared_address(&s.empty[buffer]), (j >> 1 & 1) ^ 1);
        if ((d.lane & 7) == 0) {
#pragma unroll
            for (u32 i = 0; i < Decoder::ROWS; i++)
                s.seen[buffer][d.row + 4 * i] = d.seen >> i & 1 ? 0.0f : MINUS_INFINITY;
        }
        d.store(shared_address(s.keys[0]) + buffer * TILE, j + 1, j + 1 < blocks);
        proxy_fence();
        mbarrier_arrive(shared_address(&s.full[buffer]));
    }
}
