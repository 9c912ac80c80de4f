// kernels/copy.cuh for the host. Copies arrive when a thread waits for them, and no earlier; what nobody waits for never
// does. Or, where EMULATED_EARLY is set, at once: as late and as early as a device may have them. Addresses of shared memory count from its beginning.
#pragma once

#include <deque>
#include <vector>

namespace reflex {

inline uint32_t shared_address(const void *p) { return uint32_t((const unsigned char *)p - emulated_shared); }
struct Copied { uint32_t to; const void *from; };
struct Copies {  // of a thread
    int block = -1;
    std::deque<std::vector<Copied>> groups;
    std::vector<Copied> open;
};
inline Copies &own_copies() {
    static Copies all[8][1024];
    Copies &own = all[emulated_rank][threadIdx.x];
    if (own.block != emulated_block) own = {emulated_block};
    return own;
}
inline void copy16(uint32_t to, const void *from, bool there) {
    static const unsigned char zeros[16] = {};
    if (!there) from = zeros;
    if (getenv("EMULATED_EARLY")) memcpy(emulated_shared + to, from, 16);
    else own_copies().open.push_back({to, from});
}
inline void commit_copies() {
    Copies &own = own_copies();
    own.groups.push_back(std::move(own.open));
    own.open.clear();
}
template <int pending>
inline void wait_copies() {
    Copies &own = own_copies();
    for (; own.groups.size() > pending; own.groups.pop_front())
        for (const Copied &copied : own.groups.front()) memcpy(emulated_shared + copied.to, copied.from, 16);
}
inline void publish_copies() {}

// --- barriers that count bytes, where four warps multiply together ---------------------------------------------------
// What a device would hang at, or not take, ends the process.

#ifdef EMULATED_GROUPS
constexpr bool has_copy_engine = true;
#else
constexpr bool has_copy_engine = false;
#endif

struct Brought { uint32_t to; const void *from; uint32_t bytes; };
struct Barrier {
    int block = -1;
    bool is_armed = false;
    uint32_t phase = 0, expected = 0, asked = 0;
    std::vector<Brought> copies;
};
inline Barrier &barrier_at(uint32_t at) {
    static std::map<std::pair<int, uint32_t>, Barrier> all;
    if (at % 8) refuse("a barrier's address is no multiple of 8");
    return all[{emulated_rank, at}];
}
inline Barrier &begun(uint32_t at) {
    Barrier &barrier = barrier_at(at);
    if (barrier.block != emulated_block) refuse("a barrier that was not begun");
    return barrier;
}
// A device may write to a barrier at any time until the block ends.
inline void begin_barriers(uint32_t barriers, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        barrier_at(barriers + 8 * i) = {emulated_block};
        keep_until_end(barriers + 8 * i, 8);
    }
}
inline void expect_bytes(uint32_t at, uint32_t n) {
    Barrier &barrier = begun(at);
    if (barrier.is_armed) refuse("more bytes are expected while the barrier waits for others");
    barrier.is_armed = true;
    barrier.expected = n;
}
inline void land(const Brought &copy) { memcpy(emulated_shared + copy.to, copy.from, copy.bytes); }
inline void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t at) {
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16 || !bytes) refuse("a copy that is not of whole 16 bytes");
    Barrier &barrier = begun(at);
    barrier.asked += bytes;
    if (getenv("EMULATED_EARLY")) {
        land({to, from, bytes});
    } else {
        barrier.copies.push_back({to, from, bytes});
    }
}
inline void wait_barrier(uint32_t at, uint32_t phase) {
    for (int turns = 0;; turns++) {
        Barrier &barrier = begun(at);
        if (barrier.phase != phase) return;
        if (barrier.is_armed && barrier.asked == barrier.expected) {
            for (const Brought &copy : barrier.copies) land(copy);
            barrier.copies.clear();
            barrier.is_armed = false;
            barrier.asked = 0;
            barrier.phase ^= 1;
            return;
        }
        if (turns == 10000) refuse("nobody fills what a barrier waits for");
        let_others_run();
    }
}
inline uint32_t count_up(uint32_t at, uint32_t last) {
    uint32_t &count = *(uint32_t *)(emulated_shared + at), before = count;
    count = before >= last ? 0 : before + 1;
    return before;
}
inline void begin_counts(uint32_t counts, uint32_t n) { memset(emulated_shared + counts, 0, 4 * n); }
inline uint32_t sum_of_warp(uint32_t n) {
    uint32_t sum = 0;
    for (int lane = 0; lane < 32; lane++) sum += exchange(n, lane);
    return sum;
}

// --- clusters, where four warps multiply together ---------------------------------------------------------------------

constexpr bool has_clusters = has_copy_engine;
inline void cluster_barrier() { cluster_meets(); }
inline float4 load_of_block(uint32_t address, uint32_t block) {
    if (address % 16) refuse("an address that is no multiple of 16");
    float4 v;
    memcpy(&v, emulated_shared_of(block) + address, sizeof v);
    return v;
}

}  // namespace reflex
