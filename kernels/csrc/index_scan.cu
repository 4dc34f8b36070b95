// Index scores in decode: every session's query against its FP8 keys, relu, weighted sum over heads.
//
// Work is cut into groups of 256 keys (4 pages of 64). A CTA of two warpgroups takes groups in turn.
// Keys are the A operand of wgmma m64n64k32, straight from global memory to registers (a row's bytes
// are permuted along K the same way in keys and queries, so that a lane loads 16 bytes at once), the
// next group's on their way. Queries are the B operand, in shared memory, two buffers: each session
// that reads the group is multiplied with the keys in registers, so a shared prefix is scanned once.
//
// Who reads which pages comes from a plan (segments of page columns and their sessions), or,
// without one, each session reads its own row of the table as far as it sees. A score's bits
// depend on its query and key alone.
#include "common.cuh"

constexpr u32 HEADS = 64;
constexpr u32 DIM = 128;
constexpr u32 PAGE = 64;
constexpr u32 GROUP = 256;
constexpr u32 SEGMENTS_MAX = 1024;

struct Shared {
    u32 query[2][HEADS * DIM / 4];
    float gates[2][HEADS];
    u32 ends[SEGMENTS_MAX];  // groups up to and including each segment
    u32 warp_totals[8];
};

struct Item {
    u32 segment, first;       // first entry
    u32 end;                  // entries of the segment end here
    u32 begin, members, leader;
};

struct Keys {
    uint4 a[2][4];  // [16 keys][row half, byte half]
    float scale;
};

struct Work {
    const int* table;
    i64 table_row;
    const int* visible;
    const int* segments;  // null: one a session
    const int* members;
    u32 pages, count;
};

__device__ __forceinline__ void multiply(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ uint4 load16(const unsigned char* p, bool there) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (there)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(p));
    return v;
}

// Groups of each segment, summed up: ends[i].
__device__ u32 sum_groups(Shared& s, const Work& work, const int* tile_ends) {
    if (work.segments) {
        for (u32 i = threadIdx.x; i < work.count; i += blockDim.x) s.ends[i] = tile_ends[i];
        __syncthreads();
        return work.count ? s.ends[work.count - 1] : 0;
    }
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 before = 0;
    for (u32 start = 0; start < work.count; start += blockDim.x) {
        const u32 i = start + threadIdx.x;
        u32 groups = 0;
        if (i < work.count) {
            const u32 seen = min(static_cast<u32>(max(work.visible[i], 0)), work.pages * PAGE);
            groups = (seen + GROUP - 1) / GROUP;
        }
        u32 sum = warp_inclusive_scan(groups, lane);
        if (lane == 31) s.warp_totals[warp] = sum;
        __syncthreads();
        u32 all = 0;
        for (u32 w = 0; w < 8; w++) {
            if (w < warp) sum += s.warp_totals[w];
            all += s.warp_totals[w];
        }
        if (i < work.count) s.ends[i] = before + sum;
        before += all;
        __syncthreads();
    }
    return before;
}

// The item's segment, walking on from the one before.
__device__ __forceinline__ Item find(const Shared& s, const Work& work, u32 item, u32 segment) {
    Item found;
    while (s.ends[segment] <= item) segment++;
    const u32 tile = item - (segment ? s.ends[segment - 1] : 0);
    found.segment = segment;
    if (work.segments) {
        const int4 row = __ldg(reinterpret_cast<const int4*>(work.segments) + segment);
        found.first = row.x * PAGE + tile * GROUP;
        found.end = row.y * PAGE;
        found.begin = row.z;
        found.members = row.w - row.z;
        found.leader = __ldg(work.members + row.z);
    } else {
        found.first = tile * GROUP;
        found.end = min(work.pages * PAGE, static_cast<u32>(work.visible[segment]));
        found.begin = found.leader = segment;
        found.members = 1;
    }
    return found;
}

// A warpgroup takes two pages; its warp w keys 16 w .. of each: a row of 128 bytes is read as two
// halves of 64, 16 bytes a lane.
__device__ __forceinline__ void load_keys(
    Keys& keys, const Work& work, const Item& item, const unsigned char* data, const unsigned char* scale, i64 data_page,
    i64 scale_page, u32 page_count) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, g = lane >> 2, t = lane & 3;
    keys.scale = 0.0f;
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
        const u32 entry = item.first + (threadIdx.x >> 7) * 2 * PAGE + m * PAGE;
        int page = -1;
        if (entry < item.end) page = __ldg(work.table + item.leader * work.table_row + entry / PAGE);
        const bool there = static_cast<u32>(page) < page_count;
        const u32 rows = there ? min(item.end - entry, PAGE) : 0;
        const unsigned char* at = data + (there ? page : 0) * data_page + t * 16;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 key = warp * 16 + r * 8 + g;
#pragma unroll
            for (u32 h = 0; h < 2; h++) keys.a[m][r * 2 + h] = load16(at + key * DIM + h * 64, key < rows);
        }
        const u32 mine = warp * 16 + (t & 1) * 8 + g;
        if (t >> 1 == m && mine < rows)
            keys.scale = __ldg(reinterpret_cast<const float*>(scale + page * scale_page) + mine);
    }
}

// A session's query on its way: 16 bytes of two heads, and a gate.
struct Coming {
    uint4 codes[2];
    float gate;

    __device__ __forceinline__ void load(const unsigned char* all, const float* gates, u32 row) {
        const uint4* from = reinterpret_cast<const uint4*>(all + static_cast<i64>(row) * HEADS * DIM);
#pragma unroll
        for (u32 i = 0; i < 2; i++) codes[i] = __ldg(from + threadIdx.x + i * 256);
        gate = threadIdx.x < HEADS ? __ldg(gates + static_cast<i64>(row) * HEADS + threadIdx.x) : 0.0f;
    }

    // Along K the bytes go where the keys' fragments have theirs: 16 bytes at 64 h + 16 t are words
    // 4 t and 16 + 4 t of steps 2 h and 2 h + 1, 32 bytes a step. Rows of 128 bytes, swizzled.
    __device__ __forceinline__ void store(Shared& s, u32 buffer) const {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 at = threadIdx.x + i * 256, head = at >> 3, h = at >> 2 & 1, t = at & 3;
            const u32 words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
#pragma unroll
            for (u32 w = 0; w < 4; w++) {
                const u32 unit = (2 * h + (w >> 1)) * 2 + (w & 1);
                s.query[buffer][(head * 128 + ((unit ^ (head & 7)) << 4)) / 4 + t] = words[w];
            }
        }
        if (threadIdx.x < HEADS) s.gates[buffer][threadIdx.x] = gate;
        proxy_fence();
    }
};

// The score of one key a lane: of page t / 2 of the warpgroup's two, key 16 w + (t % 2) * 8 + g.
__device__ __forceinline__ float score(const Shared& s, u32 buffer, const Keys& keys) {
    const u32 lane = threadIdx.x & 31, t = lane & 3, address = shared_address(s.query[buffer]);
    const u64 query = static_cast<u64>((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
    float sums[4];
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
        const uint4(&a)[4] = keys.a[m];
        float d[32];
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        multiply(d, a[0].x, a[2].x, a[0].y, a[2].y, query, 0);
        multiply(d, a[0].z, a[2].z, a[0].w, a[2].w, query + 2, 1);
        multiply(d, a[1].x, a[3].x, a[1].y, a[3].y, query + 4, 1);
        multiply(d, a[1].z, a[3].z, a[1].w, a[3].w, query + 6, 1);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (u32 n = 0; n < HEADS / 8; n++) {
            const float2 gate = *reinterpret_cast<const float2*>(&s.gates[buffer][8 * n + 2 * t]);
            low = fmaf(fmaxf(d[4 * n], 0.0f), gate.x, low);
            low = fmaf(fmaxf(d[4 * n + 1], 0.0f), gate.y, low);
            high = fmaf(fmaxf(d[4 * n + 2], 0.0f), gate.x, high);
            high = fmaf(fmaxf(d[4 * n + 3], 0.0f), gate.y, high);
        }
        sums[2 * m] = low;
        sums[2 * m + 1] = high;
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        sums[i] += __shfl_xor_sync(FULL_WARP, sums[i], 1);
        sums[i] += __shfl_xor_sync(FULL_WARP, sums[i], 2);
    }
    const float own = t < 2 ? (t ? sums[1] : sums[0]) : (t & 1 ? sums[3] : sums[2]);
    return own * keys.scale;
}

extern "C" __global__ void __launch_bounds__(256, 2) index_scan(
    const unsigned char* codes, const float* gates, const unsigned char* data, const unsigned char* scale, i64 data_page,
    i64 scale_page, i64 page_count, const int* visible, float* out, i64 out_row, const int* table, i64 table_row, i64 pages,
    i64 count, const int* segments, const int* tile_ends, const int* members) {
    __shared__ __align__(1024) Shared s;
    const Work work = {table, table_row, visible, segments, members, static_cast<u32>(pages), static_cast<u32>(count)};
    const u32 total = sum_groups(s, work, tile_ends);
    const u32 lane = threadIdx.x & 31, t = lane & 3;
    const u32 own = (threadIdx.x >> 7) * 2 * PAGE + (t >> 1) * PAGE + (threadIdx.x >> 5 & 3) * 16 + (t & 1) * 8 + (lane >> 2);
    if (blockIdx.x >= total) return;
    Item item = find(s, work, blockIdx.x, 0), next = item;
    Keys keys, keys_after;
    Coming query;
    u32 held = 0xffffffffu, buffer = 0;
    load_keys(keys, work, item, data, scale, data_page, scale_page, static_cast<u32>(page_count));
    for (u32 at = blockIdx.x; at < total; at += gridDim.x) {
        if (at + gridDim.x < total) {
            next = find(s, work, at + gridDim.x, item.segment);
            load_keys(keys_after, work, next, data, scale, data_page, scale_page, static_cast<u32>(page_count));
        }
        u32 row = item.leader;
        if (row != held) {
            query.load(codes, gates, row);
            buffer ^= 1;  // what the others may still read is the other one
            query.store(s, buffer);
            __syncthreads();
            held = row;
        }
        for (u32 m = 0; m < item.members; m++) {
            const bool more = m + 1 < item.members;
            if (more) {
                held = __ldg(work.members + item.begin + m + 1);
                query.load(codes, gates, held);
            }
            const u32 entry = item.first + own, limit = static_cast<u32>(max(__ldg(visible + row), 0));
            const float x = score(s, buffer, keys);
            if (item.first < limit && entry < (work.segments ? item.end : work.pages * PAGE))
                out[row * out_row + entry] = entry < limit ? x : __int_as_float(0xff800000);
            if (more) {
                buffer ^= 1;
                query.store(s, buffer);
                __syncthreads();
                row = held;
            }
        }
        item = next;
        keys = keys_after;
    }
}
