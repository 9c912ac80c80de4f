// kernels/copy.cuh for the host. Copies arrive when their thread waits for them, and no earlier; what nobody waits for
// never does. Addresses of shared memory count from its beginning.
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
    static Copies all[1024];
    Copies &own = all[threadIdx.x];
    if (own.block != emulated_block) own = {emulated_block};
    return own;
}
inline void copy16(uint32_t to, const void *from, bool there) {
    static const unsigned char zeros[16] = {};
    own_copies().open.push_back({to, there ? from : zeros});
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
#ifdef EMULATED_GROUPS  // by one thread, which sees that it is there
struct Feed {
    Feed(uint32_t, uint32_t) {}
    void fill(uint32_t, uint32_t to, const void *from, int bytes) const {
        if (threadIdx.x == 0) memcpy(emulated_shared + to, from, bytes);
    }
    void commit() const {}
    void wait(uint32_t, uint32_t) const {}
};
#else
struct Feed {
    Feed(uint32_t, uint32_t) {}
    void fill(uint32_t, uint32_t to, const void *from, int bytes) const {
        for (int at = 16 * threadIdx.x; at < bytes; at += 16 * blockDim.x) copy16(to + at, (const char *)from + at, true);
    }
    void commit() const { commit_copies(); }
    void wait(uint32_t, uint32_t) const {}
};
#endif

}  // namespace reflex
