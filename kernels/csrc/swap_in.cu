// Plan + swap-in: bring the chosen mirror rows into the hot set, in one launch of one cluster.
//
//   1  look every row up, by a compare-and-swap that also claims it when it is missing (one winner
//      a row, whoever chose it): stamp the hits, start the copies of claimed rows from pinned memory
//   -  cluster barrier: after it, no slot of this step's hits can be a victim
//   2  a victim for each claimed row: the oldest stamp of 32 hashed slots, never this step's, taken
//      by compare-and-swap; tell the tables and who claimed; while earlier rows arrive in shared
//      memory, store them to their slots and start the next copies
//   -  cluster barrier
//   3  the slots of rows that another claimed; the last rows to their slots
//
// Latency is the cost below a few hundred rows, so whatever can be read early is; above, the link
// is, and 8 CTAs with bulk copies fill it and leave the other multiprocessors free.
// Source: SGLang's HiSparse (idea: lookup, then copy, on the device); the claim, the hashed
// victims and the early copy are this project's.
#include "common.cuh"

constexpr u32 THREADS = 512;
constexpr u32 GROUP = 8;  // threads a missing row: 8 x 4 stamps make a probe
constexpr u32 BUFFERS = THREADS / GROUP;
constexpr u32 SCALE_FETCH = SCALE_BYTES ? 16 : 0;  // bulk copies are 16-byte aligned
constexpr u32 FETCH_BYTES = DATA_BYTES + SCALE_FETCH;
// The copy engine is 1.6 times slower into addresses that are not multiples of 64 bytes.
constexpr u32 BUFFER_BYTES = (FETCH_BYTES + 127) / 128 * 128;
constexpr u32 SECTOR = 8;           // slots whose stamps share 32 bytes
constexpr u32 HASHED_PROBES = 16;   // then slots in turn, so that a free one is surely met
constexpr int ABSENT = -1, CLAIMED = -2;

struct Pool {
    unsigned char* data;
    i64 data_pitch;  // bytes a page
    unsigned char* scale;
    i64 scale_pitch;
};

struct Shared {
    alignas(128) unsigned char buffers[BUFFERS][BUFFER_BYTES];
    u64 arrived[BUFFERS];  // mbarriers
    u32 missing;
    int claims[1];  // [cap] claimed rows, [cap] the pairs that claimed them, [cap] their slots
};

__device__ __forceinline__ int load_relaxed(const int* p) {
    int v;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void store_relaxed(int* p, int v) {
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ int4 load4_volatile(const int* p) {
    int4 v;
    asm volatile("ld.volatile.global.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

// Starts the copy of a mirror row into a buffer. One thread.
__device__ __forceinline__ void fetch(Shared& s, const Pool& mirror, u32 buffer, u32 row) {
    const u32 page = row / MIRROR_ROWS, place = row % MIRROR_ROWS;
    const u32 barrier = shared_address(&s.arrived[buffer]), to = shared_address(s.buffers[buffer]);
    mbarrier_expect(barrier, FETCH_BYTES);
    bulk_load(to, mirror.data + page * mirror.data_pitch + place * i64(DATA_BYTES), DATA_BYTES, barrier);
    if constexpr (SCALE_FETCH > 0)
        bulk_load(to + DATA_BYTES, mirror.scale + page * mirror.scale_pitch + place * SCALE_BYTES / 16 * 16, 16, barrier);
}

// Sends a buffer that has arrived to its slot. One thread; commits a bulk group.
__device__ __forceinline__ void store(Shared& s, const Pool& hot, u32 buffer, u32 row, u32 slot) {
    const u32 page = slot / HOT_ROWS, place = slot % HOT_ROWS;
    const unsigned char* from = s.buffers[buffer];
    bulk_store(hot.data + page * hot.data_pitch + place * i64(DATA_BYTES), shared_address(from), DATA_BYTES);
    bulk_commit();
    if constexpr (SCALE_BYTES > 0) {
        const u32* words = reinterpret_cast<const u32*>(from + DATA_BYTES + row % MIRROR_ROWS * SCALE_BYTES % 16);
        u32* to = reinterpret_cast<u32*>(hot.scale + page * hot.scale_pitch + place * SCALE_BYTES);
#pragma unroll
        for (u32 i = 0; i < SCALE_BYTES / 4; ++i) to[i] = words[i];
    }
}

// First of this lane's four slots in the given probe: 4 sectors of 8 slots a group of 8 lanes.
__device__ __forceinline__ u32 probed(u32 seed, u32 probe, u32 lane, u32 sectors) {
    const u32 which = lane / 2 % 4;
    u32 h = seed * 0x9e3779b1u;
    h ^= h >> 15;
    u32 sector;
    if (probe < HASHED_PROBES) {
        h = (h + (probe * 4 + which) * 0x85ebca77u) * 0xc2b2ae3du;
        h ^= h >> 13;
        sector = __umulhi(h * 0x27d4eb2fu, sectors);
    } else {
        sector = (__umulhi(h, sectors) + (probe - HASHED_PROBES) * 4 + which) % sectors;
    }
    return sector * SECTOR + lane % 2 * 4;
}

__device__ __forceinline__ void prefetch(const int* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// The lane's best slot of four: (stamp, slot), all ones when every one is of this step.
__device__ __forceinline__ u64 oldest(const int4& stamps, u32 slot, int step) {
    const int of[4] = {stamps.x, stamps.y, stamps.z, stamps.w};
    u64 best = ~0ull;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u64 key = u64(u32(of[i]) ^ 0x80000000u) << 32 | (slot + i);
        if (of[i] != step && key < best) best = key;
    }
    return best;
}

struct Victim {
    u32 slot;
    int owner;
};

// Takes a slot in each group of 8 lanes that is `active`, starting from the stamps of probe 0. Whole
// warps. Who loses a slot tries the next oldest of its 32. The owner is read while the slot is taken:
// only who takes a slot changes its owner, so what the taker reads is right.
__device__ __forceinline__ Victim take(int* stamp, const int* owner, u32 sectors, int step, u32 seed, bool active,
                                       int4 stamps) {
    const u32 lane = threadIdx.x % 32;
    u32 first = probed(seed, 0, lane, sectors), probe = 0;
    bool done = !active;
    Victim taken{0, -1};
#pragma unroll 1
    while (true) {
        u64 best = oldest(stamps, first, step);
#pragma unroll
        for (u32 d = 1; d < GROUP; d <<= 1) best = min(best, __shfl_xor_sync(FULL_WARP, best, d));
        const u32 slot = u32(best);
        bool won = false;
        int held = -1;
        if (!done && lane % GROUP == 0 && best != ~0ull) {
            const int seen = static_cast<int>(u32(best >> 32) ^ 0x80000000u);
            held = load_relaxed(owner + slot);
            won = atomicCAS(stamp + slot, seen, step) == seen;
        }
        won = __shfl_sync(FULL_WARP, won, lane / GROUP * GROUP);
        if (!done && won) {
            taken = Victim{slot, held};
            done = true;
        }
        if (__all_sync(FULL_WARP, done)) return taken;
        if (done) continue;
        if (best == ~0ull) {
            // Every slot was seen and is of this step: the caller broke its promise of free slots.
            if (++probe > HASHED_PROBES + sectors / 4 + 1) __trap();
            first = probed(seed, probe, lane, sectors);
            stamps = load4_volatile(stamp + first);
        }
        if (slot == first) stamps.x = step;
        if (slot == first + 1) stamps.y = step;
        if (slot == first + 2) stamps.z = step;
        if (slot == first + 3) stamps.w = step;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    swap_in(const int* rows, i64 pairs,                         // [pairs] mirror rows, -1 padded
            int* residency, int* owner, int* stamp, i64 slot_count,  // [M], [S], [S]; S a multiple of 8
            const int* step_now,                                // [1]
            unsigned char* hot_data, i64 hot_data_pitch, unsigned char* hot_scale, i64 hot_scale_pitch,
            unsigned char* mirror_data, i64 mirror_data_pitch, unsigned char* mirror_scale, i64 mirror_scale_pitch,
            i64 cap,                                            // claimed rows a CTA may hold
            int* slots,                                         // [pairs], written
            u64* counters) {                                    // [2]: += distinct hits, misses
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const Pool hot{hot_data, hot_data_pitch, hot_scale, hot_scale_pitch};
    const Pool mirror{mirror_data, mirror_data_pitch, mirror_scale, mirror_scale_pitch};
    const u32 ctas = cluster_size(), rank = cluster_rank(), lane = threadIdx.x % 32;
    // Pairs go to CTAs in runs of 8 in turn, so that sessions that chose alike load all CTAs alike.
    const auto pair_of = [&](u32 i) { return (i / 8 * ctas + rank) * 8 + i % 8; };
    // Asked for before the barriers are set up: the first link of the chain that ends at the host.
    const bool any = pair_of(threadIdx.x) < pairs;
    int row = any ? rows[pair_of(threadIdx.x)] : -1;
    const int step = *step_now;
    // Where this group will look for its first victim, should it need one.
    const u32 sectors = slot_count / SECTOR, group = threadIdx.x / GROUP;
    const auto seed_of = [&](u32 m) { return step * 0x85ebca6bu + m * ctas + rank; };
    u32 first = probed(seed_of(group), 0, lane, sectors);
    prefetch(stamp + first);
    prefetch(owner + first);
    if (threadIdx.x < BUFFERS) mbarrier_init(shared_address(&s.arrived[threadIdx.x]), 1);
    if (threadIdx.x == 0) s.missing = 0;
    mbarrier_init_fence();
    __syncthreads();

    int *claimed = s.claims, *claimants = s.claims + cap, *given = s.claims + 2 * cap;
    u64 pending = 0;  // by round: a pair whose row another claimed
    u32 hits = 0;
    int last = step;  // the stamp that the last hit replaced: looked at a round later, when it is there
    for (u32 i = threadIdx.x, turn = 0; pair_of(i) < pairs; i += THREADS, ++turn) {
        const u32 p = pair_of(i);
        if (turn) row = rows[p];
        if (row < 0) {
            slots[p] = -1;
            continue;
        }
        // One round trip tells where the row is and, when it is nowhere, claims it.
        const int at = atomicCAS(residency + row, ABSENT, CLAIMED);
        if (at == ABSENT) {
            const u32 m = atomicAdd(&s.missing, 1);
            claimed[m] = row;
            claimants[m] = p;
            if (m < BUFFERS) fetch(s, mirror, m, row);
        } else if (at < 0) {
            pending |= 1ull << turn;
        } else {
            slots[p] = at;
            hits += last != step;
            last = atomicExch(stamp + at, step);
        }
    }
    __syncthreads();
    cluster_arrive();
    const u32 missing = s.missing;
    u32 mine = group;
    int4 stamps = make_int4(step, step, step, step);
    if (mine < missing) stamps = load4_volatile(stamp + first);
    cluster_wait();

    // Buffers in turn: a claimed row gets its slot, then waits here while it arrives.
    const u32 turns = (missing + BUFFERS - 1) / BUFFERS;
#pragma unroll 1
    for (u32 turn = 0; turn < turns; ++turn, mine += BUFFERS) {
        const bool active = mine < missing;
        const u32 missed = active ? claimed[mine] : 0;
        if (turn && active) stamps = load4_volatile(stamp + probed(seed_of(mine), 0, lane, sectors));
        if (turn && active && lane % GROUP == 0) {
            mbarrier_wait(shared_address(&s.arrived[group]), turn - 1 & 1);
            store(s, hot, group, claimed[mine - BUFFERS], given[mine - BUFFERS]);
            bulk_wait_read();
            proxy_fence();
        }
        __syncwarp();
        if (turn && active && lane % GROUP == 0) fetch(s, mirror, group, missed);
        __syncwarp();
        const Victim victim = take(stamp, owner, sectors, step, seed_of(mine), active, stamps);
        if (active && lane % GROUP == 0) {
            const int slot = static_cast<int>(victim.slot);
            if (victim.owner >= 0) store_relaxed(residency + victim.owner, ABSENT);
            store_relaxed(owner + slot, missed);
            store_relaxed(residency + missed, slot);
            given[mine] = slot;
            slots[claimants[mine]] = slot;
        }
    }
    cluster_arrive();

    // The last row of each buffer, while the others get here.
    if (lane % GROUP == 0 && group < missing) {
        const u32 turn = (missing - 1 - group) / BUFFERS, m = group + turn * BUFFERS;
        mbarrier_wait(shared_address(&s.arrived[group]), turn & 1);
        store(s, hot, group, claimed[m], given[m]);
    }
    __syncwarp();
    cluster_wait();

    for (u32 i = threadIdx.x, turn = 0; pending; i += THREADS, ++turn, pending >>= 1)
        if (pending & 1) slots[pair_of(i)] = load_relaxed(residency + rows[pair_of(i)]);
    hits = warp_sum(hits + (last != step));
    if (lane == 0 && hits) atomicAdd(counters, u64(hits));
    if (threadIdx.x == 0 && missing) atomicAdd(counters + 1, u64(missing));
    bulk_wait_read();
}
