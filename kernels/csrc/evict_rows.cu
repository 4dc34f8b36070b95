#include "common.cuh"

// Forgets mirror rows that are about to get other content; their slots are free again.
extern "C" __global__ void evict_rows(const int* rows, i64 count, int* residency, int* owner, int* stamp) {
    const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count || rows[i] < 0) return;
    const int slot = residency[rows[i]];
    residency[rows[i]] = -1;
    if (slot < 0) return;
    owner[slot] = -1;
    stamp[slot] = -1;
}
