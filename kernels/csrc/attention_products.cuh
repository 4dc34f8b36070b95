// The two products of sparse attention, by a warpgroup, of operands in shared memory: with wgmma on
// sm_90a, and with mma.sync elsewhere (Blackwell has no wgmma) or where PORTABLE is defined. A thread
// holds the same values of both products either way.
#pragma once
#include "attention_rows.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(PORTABLE)

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most PENDING of the committed groups are on their way.
template <int PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// A tile's descriptor: 128-byte swizzle; leading and stride offsets in bytes. Adding to it moves the
// address, in units of 16 bytes.
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32 | 1ull << 62;
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

// The 128 registers of a thread for 64 heads and 256 columns, named and bound.
#define SUM_NAMES \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
    "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
    "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, " \
    "%102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, " \
    "%119, %120, %121, %122, %123, %124, %125, %126, %127 "
#define SUM_REGISTERS(d) \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), \
    "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), \
    "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), \
    "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
    "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), \
    "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), \
    "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), \
    "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), \
    "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), \
    "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

__device__ __forceinline__ void multiply_values(float (&d)[128], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" SUM_NAMES "}, %128, %129, 1, 1, 1, 0, 1;"
                 : SUM_REGISTERS(d)
                 : "l"(a), "l"(b));
}

// scores [64 heads, 64 rows] = Q tile^T, on its way.
__device__ __forceinline__ void begin_scores(float (&scores)[32], u32 q, u32 tile) {
    const u64 a = descriptor(q, 16, 1024), b = descriptor(tile, 16, 1024);
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < 32; k++) {
        const u32 at = ((k >> 2) * CHUNK + (k & 3) * 32) >> 4;
        multiply_scores(scores, a + at, b + at, k > 0);
    }
    wgmma_commit();
}

// sums [64 heads, 256 columns from 256 * half] += weights [64, 64 rows] * tile, on its way.
__device__ __forceinline__ void begin_values(float (&sums)[128], u32 weights, u32 tile, u32 half) {
    const u64 a = descriptor(weights, 16, 1024), b = descriptor(tile + half * 4 * CHUNK, CHUNK, 1024);
    wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < 4; k++) multiply_values(sums, a + 2 * k, b + (k * 2048 >> 4));
    wgmma_commit();
}

#else

template <int PENDING>
__device__ __forceinline__ void products_wait() {}

__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_transposed(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void multiply(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void begin_scores(float (&scores)[32], u32 q, u32 tile) {
    const u32 lane = threadIdx.x & 31, head = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
    const u32 row = (lane & 7) + (lane >> 4) * 8;
#pragma unroll
    for (u32 i = 0; i < 32; i++) scores[i] = 0.0f;
#pragma unroll 4
    for (u32 k = 0; k < 32; k++) {
        u32 a[4];
        load_matrices(a, q + place(head, 2 * k + (lane >> 4)));
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            u32 b[4];
            load_matrices(b, tile + place(16 * n + row, 2 * k + (lane >> 3 & 1)));
            multiply(scores + 8 * n, a, b[0], b[1]);
            multiply(scores + 8 * n + 4, a, b[2], b[3]);
        }
    }
}

__device__ __forceinline__ void begin_values(float (&sums)[128], u32 weights, u32 tile, u32 half) {
    const u32 lane = threadIdx.x & 31, head = (threadIdx.x >> 5 & 3) * 16 + (lane & 15);
#pragma unroll 1
    for (u32 k = 0; k < 4; k++) {
        u32 a[4];
        load_matrices(a, weights + place(head, 2 * k + (lane >> 4)));
#pragma unroll
        for (u32 n = 0; n < 16; n++) {
            u32 b[4];
            load_transposed(b, tile + place(16 * k + (lane & 15), half * 32 + 2 * n + (lane >> 4)));
            multiply(sums + 8 * n, a, b[0], b[1]);
            multiply(sums + 8 * n + 4, a, b[2], b[3]);
        }
    }
}

#endif
