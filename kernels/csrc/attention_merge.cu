// Adds the spans' partials of sparse attention, with the sink, and turns the result back.
//
// One thread a unit of a partial (attention.cuh). Spans are summed in eight classes, i modulo 8, then
// class by class: an order that neither the number of spans nor that of threads changes. Up to eight
// spans a warp takes them all; beyond, eight warps take a class each. Launched while the spans are
// still being attended to, it waits for them.
#include "attention.cuh"

constexpr u32 CLASSES = 8;
constexpr u32 SPANS_MAX = 1024;

struct Sum {
    float of[8];

    __device__ __forceinline__ void add(float weight, uint4 unit) {
        const u32 pairs[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
        for (u32 q = 0; q < 4; q++) {
            const float2 v = unpack_fp16(pairs[q]);
            of[2 * q] = __fadd_rn(of[2 * q], __fmul_rn(weight, v.x));
            of[2 * q + 1] = __fadd_rn(of[2 * q + 1], __fmul_rn(weight, v.y));
        }
    }
};

struct Shared {
    float logs[SPANS_MAX][CLASSES];  // of the eight heads that a warp's units are in
    float parts[CLASSES][8][32];
    float totals[CLASSES][32];
};

__device__ __forceinline__ uint4 load_unit(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

extern "C" __global__ void __launch_bounds__(256) sparse_attention_merge(
    const uint4* sums, const float* logs, i64 sums_token, i64 sums_split, i64 logs_token, i64 logs_split, i64 splits,
    const float* sink, const void* positions, i64 positions_wide, const float* inv_freq, void* out, i64 out_wide,
    i64 out_token, i64 out_head, i64 heads, i64 head_blocks) {
    extern __shared__ unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const u32 count = static_cast<u32>(splits), warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const bool few = count <= CLASSES;
    const u32 pieces = UNITS / (few ? 256 : 32), place = blockIdx.x / pieces;
    const u32 token = place / static_cast<u32>(head_blocks), block = place % static_cast<u32>(head_blocks);
    const u32 unit = blockIdx.x % pieces * (few ? 256 : 32) + (few ? threadIdx.x : lane);
    const u32 head = block * HEADS + unit_head(unit), first = head - (lane >> 2);
    const bool there = head < heads, turned = inv_freq && unit_column(unit, 0) >= 448;
    const float sink_log = there ? sink[head] * LOG2_E : 0.0f;
    const i64 position = turned ? read_position(positions, positions_wide, token) : 0;
    const float* log = logs + token * logs_token + first;
    const uint4* part = sums + token * sums_token + block * UNITS + unit;
    asm volatile("griddepcontrol.wait;" ::: "memory");

    Sum sum = {};
    float top = MINUS_INFINITY, total = 0.0f;
    if (few) {
        float own[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 span = (lane & 3) + 4 * i;
            own[i] = there && span < count ? __ldcg(log + (lane >> 2) + span * logs_split) : MINUS_INFINITY;
        }
        uint4 units[CLASSES];
#pragma unroll
        for (u32 c = 0; c < CLASSES; c++) {
            units[c] = make_uint4(0, 0, 0, 0);
            const float present = __shfl_sync(FULL_WARP, own[c >> 2], lane & 28 | c & 3);
            if (present > MINUS_INFINITY) units[c] = load_unit(part + c * sums_split);
        }
        top = fmaxf(own[0], own[1]);
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
        const float anchor = top == MINUS_INFINITY ? 0.0f : top;
#pragma unroll
        for (u32 c = 0; c < CLASSES; c++) {
            const float w = exp2f(__shfl_sync(FULL_WARP, own[c >> 2], lane & 28 | c & 3) - anchor);
            sum.add(w, units[c]);
            total += w;
        }
    } else {
        for (u32 i = threadIdx.x; i < count * CLASSES; i += 256) {
            const u32 span = i / CLASSES, h = i % CLASSES;
            s.logs[span][h] = first + h < heads ? __ldcg(log + h + span * logs_split) : MINUS_INFINITY;
        }
        __syncthreads();
        for (u32 i = lane & 3; i < count; i += 4) top = fmaxf(top, s.logs[i][lane >> 2]);
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
        const float anchor = top == MINUS_INFINITY ? 0.0f : top;
        Sum own = {};
        float weight = 0.0f;
#pragma unroll 4
        for (u32 i = warp; i < count; i += CLASSES) {
            const float w = exp2f(s.logs[i][lane >> 2] - anchor);
            if (w > 0.0f) own.add(w, load_unit(part + i * sums_split));
            weight += w;
        }
#pragma unroll
        for (u32 e = 0; e < 8; e++) s.parts[warp][e][lane] = own.of[e];
        s.totals[warp][lane] = weight;
        __syncthreads();
        if (warp) return;
#pragma unroll
        for (u32 c = 0; c < CLASSES; c++) {
#pragma unroll
            for (u32 e = 0; e < 8; e++) sum.of[e] += s.parts[c][e][lane];
            total += s.totals[c][lane];
        }
    }
    if (!there) return;
    const float all = total > 0.0f ? top + log2f(total) : MINUS_INFINITY;
    const float factor = total > 0.0f ? share(all, sink_log) / total : 0.0f;
    void* row = static_cast<unsigned char*>(out) + (token * out_token + head * out_head) * (out_wide ? 4 : 2);
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
        const u32 column = unit_column(unit, q);
        float2 x = make_float2(sum.of[2 * q] * factor, sum.of[2 * q + 1] * factor);
        if (turned) x = turned_back(x.x, x.y, turn_of(position, inv_freq[(column - 448) >> 1]));
        store_pair(row, out_wide, column, x.x, x.y);
    }
}
