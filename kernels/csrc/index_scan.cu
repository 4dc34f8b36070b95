// Index scores in decode: every session's query against its FP8 keys, relu, weighted sum over heads.
//
// Work is cut into groups of 256 keys (4 pages of 64). A CTA of two warpgroups takes groups in turn.
// Keys are the A operand of wgmma m64n64k32 (of mma.sync where there is no wgmma, or PORTABLE is
// defined), straight from global memory to registers (a row's bytes are permuted along K the same way
// in keys and queries, so that a lane loads 16 bytes at once), the next group's on their way. Queries
// are the B operand, in shared memory, two buffers: each session
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
constexpr u32 RUN = 16;  // groups whose page ids are read at once

struct Shared {
    u32 query[2][HEADS * DIM / 4];
    float gates[2][HEADS];
    uint2 ends[SEGMENTS_MAX];  // groups, and their cost, up to and including each segment
    uint2 warp_totals[8];
    int pages[RUN * 4];
};

// A run of groups of one segment, and who reads them.
struct Run {
    u32 first, end;  // entries first .. of a segment that ends at end
    u32 begin, members;
    i64 table;  // the first reader's row of the table
};

struct Keys {
    uint4 a[2][4];  // [page][row half, byte half]
    float scale;
};

struct Work {
    const int* table;
    i64 table_row;
    const int* visible;
    const int* segments;  // null: `together` queries in a row read the first one's pages
    const int* members;
    u32 pages, count, together, queries;
};

__device__ __forceinline__ uint4 load16(const unsigned char* p, bool there) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (there)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "l"(p));
    return v;
}

__device__ __forceinline__ u32 seen_by(const Work& work, u32 query) {
    return min(static_cast<u32>(max(__ldg(work.visible + query), 0)), work.pages * PAGE);
}

// Without a plan: entries that a segment's queries see.
__device__ __forceinline__ u32 seen_in(const Work& work, u32 segment) {
    u32 most = 0;
    for (u32 i = segment * work.together; i < min((segment + 1) * work.together, work.queries); i++)
        most = max(most, seen_by(work, i));
    return most;
}

// Groups and cost (groups times readers, and one for the keys) of each segment, summed up.
__device__ uint2 sum_groups(Shared& s, const Work& work) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    uint2 before = make_uint2(0, 0);
    for (u32 start = 0; start < work.count; start += blockDim.x) {
        const u32 i = start + threadIdx.x;
        u32 groups = 0, readers = work.together;
        if (i < work.count && work.segments) {
            const int4 row = __ldg(reinterpret_cast<const int4*>(work.segments) + i);
            groups = ((row.y - row.x) * PAGE + GROUP - 1) / GROUP;
            readers = row.w - row.z;
        } else if (i < work.count) {
            groups = (seen_in(work, i) + GROUP - 1) / GROUP;
        }
        u32 sum = warp_inclusive_scan(groups, lane), cost = warp_inclusive_scan(groups * (readers + 1), lane);
        if (lane == 31) s.warp_totals[warp] = make_uint2(sum, cost);
        __syncthreads();
        uint2 all = make_uint2(0, 0);
        for (u32 w = 0; w < 8; w++) {
            const uint2 x = s.warp_totals[w];
            if (w < warp) sum += x.x, cost += x.y;
            all.x += x.x, all.y += x.y;
        }
        if (i < work.count) s.ends[i] = make_uint2(before.x + sum, before.y + cost);
        before.x += all.x, before.y += all.y;
        __syncthreads();
    }
    return before;
}

// The first item whose cost reaches `cost`, as its number in all.
__device__ __forceinline__ u32 item_at(const Shared& s, u32 count, u32 total, u32 cost) {
    u32 low = 0, high = count;
    while (low < high) {
        const u32 middle = (low + high) / 2;
        if (s.ends[middle].y > cost) high = middle; else low = middle + 1;
    }
    if (low == count) return total;
    const uint2 from = low ? s.ends[low - 1] : make_uint2(0, 0), to = s.ends[low];
    const u32 each = (to.y - from.y) / (to.x - from.x);
    return from.x + (cost - from.y + each - 1) / each;
}

// The run of groups from number `skip` of a segment on.
__device__ __forceinline__ Run enter(const Work& work, u32 segment, u32 skip) {
    Run run;
    run.first = skip * GROUP;
    if (work.segments) {
        const int4 row = __ldg(reinterpret_cast<const int4*>(work.segments) + segment);
        run.first += row.x * PAGE;
        run.end = row.y * PAGE;
        run.begin = row.z;
        run.members = row.w - row.z;
        run.table = __ldg(work.members + row.z) * work.table_row;
    } else {
        run.end = seen_in(work, segment);
        run.begin = segment * work.together;
        run.members = min(work.together, work.queries - run.begin);
        run.table = run.begin * work.table_row;
    }
    return run;
}

// A warpgroup takes two pages; its warp w keys 16 w .. of each: a row of 128 bytes is read as two
// halves of 64, 16 bytes a lane.
__device__ __forceinline__ void load_keys(
    Keys& keys, const int* pages, u32 first, u32 end, const unsigned char* data, const unsigned char* scale, i64 data_page,
    i64 scale_page, u32 page_count) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, g = lane >> 2, t = lane & 3;
    keys.scale = 0.0f;
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
        const u32 at = (threadIdx.x >> 7) * 2 + m, entry = first + at * PAGE;
        const int page = pages[at];
        const bool there = static_cast<u32>(page) < page_count;
        const u32 rows = there && entry < end ? min(end - entry, PAGE) : 0;
        const unsigned char* from = data + (there ? page : 0) * data_page + t * 16;
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            const u32 key = warp * 16 + r * 8 + g;
#pragma unroll
            for (u32 h = 0; h < 2; h++) keys.a[m][r * 2 + h] = load16(from + key * DIM + h * 64, key < rows);
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

__device__ __forceinline__ void add_gated(float2& sum, const float* d, const float* gates, u32 n) {
    const float2 gate = *reinterpret_cast<const float2*>(gates + 8 * n + 2 * (threadIdx.x & 3));
    sum.x = fmaf(fmaxf(d[0], 0.0f), gate.x, sum.x);
    sum.x = fmaf(fmaxf(d[1], 0.0f), gate.y, sum.x);
    sum.y = fmaf(fmaxf(d[2], 0.0f), gate.x, sum.y);
    sum.y = fmaf(fmaxf(d[3], 0.0f), gate.y, sum.y);
}

// The two products of a lane's keys g and 8 + g of a page with two heads of eight, relu, times gates,
// added up over the eights.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(PORTABLE)

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

__device__ __forceinline__ float2 gated(const Shared& s, u32 buffer, const uint4 (&a)[4]) {
    const u32 query = shared_address(s.query[buffer]);
    const u64 b = static_cast<u64>((query & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
    float d[32];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply(d, a[0].x, a[2].x, a[0].y, a[2].y, b, 0);
    multiply(d, a[0].z, a[2].z, a[0].w, a[2].w, b + 2, 1);
    multiply(d, a[1].x, a[3].x, a[1].y, a[3].y, b + 4, 1);
    multiply(d, a[1].z, a[3].z, a[1].w, a[3].w, b + 6, 1);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (u32 n = 0; n < HEADS / 8; n++) add_gated(sum, d + 4 * n, s.gates[buffer], n);
    return sum;
}

#else

__device__ __forceinline__ void multiply(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float2 gated(const Shared& s, u32 buffer, const uint4 (&a)[4]) {
    const u32 lane = threadIdx.x & 31;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 1
    for (u32 n = 0; n < HEADS / 8; n++) {
        const u32 head = 8 * n + (lane & 7), row = shared_address(s.query[buffer]) + head * DIM;
        u32 b[2][4];  // of two steps each: words t and 4 + t of this lane's head
#pragma unroll
        for (u32 h = 0; h < 2; h++)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(b[h][0]), "=r"(b[h][1]), "=r"(b[h][2]), "=r"(b[h][3])
                         : "r"(row + ((4 * h + (lane >> 3) ^ head & 7) << 4))
                         : "memory");
        float d[4] = {};
        multiply(d, a[0].x, a[2].x, a[0].y, a[2].y, b[0][0], b[0][1]);
        multiply(d, a[0].z, a[2].z, a[0].w, a[2].w, b[0][2], b[0][3]);
        multiply(d, a[1].x, a[3].x, a[1].y, a[3].y, b[1][0], b[1][1]);
        multiply(d, a[1].z, a[3].z, a[1].w, a[3].w, b[1][2], b[1][3]);
        add_gated(sum, d, s.gates[buffer], n);
    }
    return sum;
}

#endif

// The score of one key a lane: of page t / 2 of the warpgroup's two, key 16 w + (t % 2) * 8 + g.
__device__ __forceinline__ float score(const Shared& s, u32 buffer, const Keys& keys) {
    const u32 lane = threadIdx.x & 31, t = lane & 3;
    float sums[4];
#pragma unroll
    for (u32 m = 0; m < 2; m++) {
        const float2 sum = gated(s, buffer, keys.a[m]);
        sums[2 * m] = sum.x;
        sums[2 * m + 1] = sum.y;
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
    i64 queries, i64 together, i64 count, const int* segments, const int* members) {
    __shared__ __align__(1024) Shared s;
    const Work work = {table,
                       table_row,
                       visible,
                       segments,
                       members,
                       static_cast<u32>(pages),
                       static_cast<u32>(count),
                       static_cast<u32>(together),
                       static_cast<u32>(queries)};
    const uint2 total = sum_groups(s, work);
    const u32 lane = threadIdx.x & 31, t = lane & 3;
    const u32 own = (threadIdx.x >> 7) * 2 * PAGE + (t >> 1) * PAGE + (threadIdx.x >> 5 & 3) * 16 + (t & 1) * 8 + (lane >> 2);
    // Every CTA takes a run of items of about the same cost.
    const u64 share = total.y;
    const u32 from = item_at(s, work.count, total.x, static_cast<u32>(share * blockIdx.x / gridDim.x));
    const u32 to = item_at(s, work.count, total.x, static_cast<u32>(share * (blockIdx.x + 1) / gridDim.x));
    if (from >= to) return;
    Keys keys, keys_next;
    Coming query;
    u32 held = 0xffffffffu, buffer = 0, segment = 0;
    for (u32 at = from; at < to;) {
        while (s.ends[segment].x <= at) segment++;
        const Run run = enter(work, segment, at - (segment ? s.ends[segment - 1].x : 0));
        const u32 groups = min(min(RUN, to - at), s.ends[segment].x - at);
        __syncthreads();  // the pages of the run before have been read
        if (threadIdx.x < groups * 4) {
            const u32 entry = run.first + threadIdx.x * PAGE;
            s.pages[threadIdx.x] = entry < run.end ? __ldg(work.table + run.table + entry / PAGE) : -1;
        }
        __syncthreads();
        load_keys(keys, s.pages, run.first, run.end, data, scale, data_page, scale_page, static_cast<u32>(page_count));
        for (u32 i = 0; i < groups; i++) {
            const u32 first = run.first + i * GROUP, entry = first + own;
            if (i + 1 < groups)
                load_keys(keys_next, s.pages + 4 * (i + 1), first + GROUP, run.end, data, scale, data_page, scale_page,
                          static_cast<u32>(page_count));
            u32 row = work.segments ? __ldg(work.members + run.begin) : run.begin;
            if (row != held) {
                query.load(codes, gates, row);
                buffer ^= 1;  // what the others may still read is the other one
                query.store(s, buffer);
                __syncthreads();
            }
            for (u32 m = 0; m < run.members; m++) {
                held = row;
                const bool more = m + 1 < run.members;
                if (more) {
                    held = work.segments ? __ldg(work.members + run.begin + m + 1) : row + 1;
                    query.load(codes, gates, held);
                }
                const u32 limit = static_cast<u32>(max(__ldg(visible + row), 0));
                const float x = score(s, buffer, keys);
                if (first < limit && entry < (work.segments ? run.end : work.pages * PAGE))
                    out[row * out_row + entry] = entry < limit ? x : __int_as_float(0xff800000);
                if (more) {
                    buffer ^= 1;
                    query.store(s, buffer);
                    __syncthreads();
                    row = held;
                }
            }
            keys = keys_next;
        }
        at += groups;
    }
}
