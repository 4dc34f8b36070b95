// What both kernels of sparse attention share: fp16 and bf16 pairs, the sink's share, the rotation.
#pragma once
#include "common.cuh"

constexpr u32 HEADS = 64;  // of a CTA
constexpr u32 DIM = 512;
constexpr float LOG2_E = 1.4426950408889634f;
#define MINUS_INFINITY __int_as_float(0xff800000)
#define INFINITY_F __int_as_float(0x7f800000)

// A partial [64 heads, 512 columns] is 4,096 units of 16 bytes, eight fp16 values each, in the order
// in which the attenders' threads hold them: unit = (half * 16 + step) * 128 + thread. It is head
// (thread / 32) * 16 + (thread % 32) / 4 + 8 * (step % 2) and, for q = 0 .. 3, columns
// half * 256 + 8 * (4 * (step / 2) + q) + 2 * (thread % 4) and the one after.
constexpr u32 UNITS = HEADS * DIM / 8;
constexpr u32 STEPS = 16;

__device__ __forceinline__ u32 unit_head(u32 unit) {
    return ((unit >> 5 & 3) << 4) + ((unit & 31) >> 2) + ((unit >> 7 & 1) << 3);
}

__device__ __forceinline__ u32 unit_column(u32 unit, u32 q) {
    return (unit >> 11) * 256 + 8 * (4 * (unit >> 8 & 7) + q) + 2 * (unit & 3);
}

__device__ __forceinline__ u32 pack_fp16(float low, float high) {
    u32 both;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float2 unpack_fp16(u32 both) {
    float2 v;
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(v.x), "=f"(v.y)
        : "r"(both));
    return v;
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
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

// (x, y) turned back.
__device__ __forceinline__ float2 turned_back(float x, float y, float2 turn) {
    return make_float2(x * turn.x + y * turn.y, y * turn.x - x * turn.y);
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
