// A libcuda that runs kernels, one thread after the other, on the host: everything at once, in the order of the calls.
#include "cuda_host.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <functional>
#include <vector>

dim3_host threadIdx, blockIdx, blockDim, gridDim;
constexpr unsigned SHARED = 256 << 10, CLUSTER = 8;
static unsigned char shared_of_blocks[CLUSTER][SHARED] __attribute__((aligned(256)));
unsigned char *emulated_shared = shared_of_blocks[0];
int emulated_block, emulated_rank;
unsigned char *emulated_shared_of(int rank) { return shared_of_blocks[rank]; }
std::map<std::string, std::pair<Emulated, int>> &emulated() {
    static std::map<std::string, std::pair<Emulated, int>> kernels;
    return kernels;
}

// --- fibers -----------------------------------------------------------------------------------------------------------

extern "C" void switch_fiber(void **from, void *to);
asm(R"(
.globl switch_fiber
switch_fiber:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
)");

namespace {
struct Fiber { void *stack_pointer; char *stack; bool is_done; dim3_host index; unsigned block, thread; };
struct WarpState { int arrived, alive; int generation; unsigned char slots[32 * 32]; };
struct Meeting { int arrived, alive, generation; };
struct Kept { uint32_t at; std::vector<unsigned char> bytes; };
struct Block { dim3_host index; int number; Meeting meeting; std::vector<WarpState> warps; std::vector<Kept> kept; };
constexpr size_t STACK = 64 << 10;
std::vector<Fiber> fibers;
std::vector<Block> blocks;  // of the cluster that runs; most are alone
Meeting cluster;
void *scheduler;
int running;
const std::function<void()> *body;

Block &own_block() { return blocks[fibers[running].block]; }
WarpState &own_warp() { return own_block().warps[fibers[running].thread / 32]; }
void turn_to(int fiber) {
    running = fiber;
    threadIdx = fibers[fiber].index;
    emulated_rank = fibers[fiber].block;
    blockIdx = own_block().index;
    emulated_block = own_block().number;
    emulated_shared = shared_of_blocks[emulated_rank];
}
void yield() {
    int me = running;
    switch_fiber(&fibers[me].stack_pointer, scheduler);
    turn_to(me);
}
template <class M>
void release(M &m) { if (m.alive && m.arrived == m.alive) { m.arrived = 0; m.generation++; } }
template <class M>
void meet(M &m) {
    int generation = m.generation;
    m.arrived++;
    release(m);
    while (m.generation == generation) yield();
}
template <class M>
void leave(M &m) { m.alive--; release(m); }

void fiber_main() {
    (*body)();
    fibers[running].is_done = true;
    leave(own_warp()); leave(own_block().meeting); leave(cluster);
    void *dead;
    switch_fiber(&dead, scheduler);
    abort();
}

// Variables that are `__shared__` are those of all blocks, so kernels of clusters have none.
void run_cluster(std::vector<dim3_host> indices, unsigned threads) {
    static int number;
    unsigned count = threads * indices.size();
    if (fibers.size() < count) {
        size_t old = fibers.size();
        fibers.resize(count);
        for (size_t i = old; i < count; i++)
            fibers[i].stack = (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    blocks.clear();
    for (dim3_host index : indices) {
        memset(shared_of_blocks[blocks.size()], 0xff, SHARED);
        blocks.push_back({index, ++number, {0, int(threads), 0}, std::vector<WarpState>((threads + 31) / 32), {}});
    }
    cluster = {0, int(count), 0};
    for (unsigned i = 0; i < count; i++) {
        Fiber &f = fibers[i];
        void **top = (void **)(f.stack + STACK - 64);
        *--top = nullptr;
        *--top = (void *)fiber_main;
        for (int k = 0; k < 6; k++) *--top = nullptr;
        f.stack_pointer = top; f.is_done = false;
        f.block = i / threads; f.thread = i % threads;
        f.index = {f.thread % blockDim.x, f.thread / blockDim.x % blockDim.y, f.thread / blockDim.x / blockDim.y};
        blocks[f.block].warps[f.thread / 32].alive++;
    }
    for (bool some = true; some;) {
        some = false;
        for (unsigned i = 0; i < count; i++)
            if (!fibers[i].is_done) {
                some = true;
                turn_to(i);
                switch_fiber(&scheduler, fibers[i].stack_pointer);
            }
    }
    for (size_t i = 0; i < blocks.size(); i++)
        for (const Kept &kept : blocks[i].kept)
            if (memcmp(shared_of_blocks[i] + kept.at, kept.bytes.data(), kept.bytes.size()))
                refuse("shared memory that is the hardware's was written to");
}
}  // namespace

void __syncthreads() { meet(own_block().meeting); }
void cluster_meets() { meet(cluster); }
int __syncthreads_or(int predicate) {
    static int some;
    __syncthreads();
    if (predicate) some = 1;
    __syncthreads();
    int found = some;
    __syncthreads();
    some = 0;
    return found;
}
void __syncwarp(unsigned) { meet(own_warp()); }
void let_others_run() { yield(); }
void keep_until_end(uint32_t at, uint32_t bytes) {
    unsigned char *from = emulated_shared + at;
    own_block().kept.push_back({at, std::vector<unsigned char>(from, from + bytes)});
}
void refuse(const char *why) {
    fprintf(stderr, "the emulated device: %s\n", why);
    abort();
}
void *warp_slots() { return own_warp().slots; }

// --- the driver -------------------------------------------------------------------------------------------------------

struct Config { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; };
struct Attribute { int id, unused; unsigned value[16]; };
struct Queued { Emulated f; Config config; std::vector<std::vector<unsigned char>> values; unsigned deep; };
static std::vector<Queued> *recording;

static void launch(const Queued &q) {
    gridDim = {q.config.grid[0], q.config.grid[1], q.config.grid[2]};
    blockDim = {q.config.block[0], q.config.block[1], q.config.block[2]};
    std::vector<void *> pointers;
    for (auto &v : q.values) pointers.push_back((void *)v.data());
    std::function<void()> work = [&] { q.f(pointers.data()); };
    body = &work;
    unsigned deep = std::max(1u, q.deep);  // blocks of a cluster, one behind the other
    for (unsigned z = 0; z < gridDim.z; z += deep)
        for (unsigned y = 0; y < gridDim.y; y++)
            for (unsigned x = 0; x < gridDim.x; x++) {
                std::vector<dim3_host> indices;
                for (unsigned i = 0; i < deep; i++) indices.push_back({x, y, z + i});
                run_cluster(indices, blockDim.x * blockDim.y * blockDim.z);
            }
}

struct Function { Emulated f; std::vector<int> sizes; };
static std::map<std::string, std::vector<int>> sizes_of;

extern "C" {
void emulator_kernel(const char *name, const int *sizes, int n) { sizes_of[name] = std::vector<int>(sizes, sizes + n); }
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuGetErrorName(int, const char **s) { *s = "CUDA_ERROR_EMULATED"; return 0; }
int cuGetErrorString(int, const char **s) { *s = "emulated"; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int) { *d = 0; return 0; }
int cuDeviceGetName(char *s, int n, int) { snprintf(s, n, "emulated"); return 0; }
int cuDeviceGetAttribute(int *v, int a, int) {
    *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 4 : a == 97 ? 232448 : a == 102 ? 1 : 0;
    return 0;
}
int cuDeviceGetPCIBusId(char *s, int n, int) { snprintf(s, n, "none"); return 0; }
int cuDeviceTotalMem_v2(size_t *n, int) { *n = 1ull << 33; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int) { *c = (void *)1; return 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void *) { return 0; }
int cuCtxSynchronize() { return 0; }
int cuMemGetInfo_v2(size_t *f, size_t *t) { *f = *t = 1ull << 33; return 0; }
int cuMemAlloc_v2(uint64_t *p, size_t n) { *p = (uint64_t)aligned_alloc(256, (n + 255) / 256 * 256); memset((void *)*p, 0xff, n); return 0; }
int cuMemFree_v2(uint64_t p) { free((void *)p); return 0; }
int cuMemHostAlloc(void **p, size_t n, unsigned) { *p = aligned_alloc(256, (n + 255) / 256 * 256); return 0; }
int cuMemFreeHost(void *p) { free(p); return 0; }
int cuMemHostGetDevicePointer_v2(uint64_t *d, void *p, unsigned) { *d = (uint64_t)p; return 0; }
int cuMemHostRegister_v2(void *, size_t, unsigned) { return 0; }
int cuMemHostUnregister(void *) { return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t d, const void *s, size_t n, void *) { memcpy((void *)d, s, n); return 0; }
int cuMemcpyDtoHAsync_v2(void *d, uint64_t s, size_t n, void *) { memcpy(d, (void *)s, n); return 0; }
int cuMemcpyDtoDAsync_v2(uint64_t d, uint64_t s, size_t n, void *) { memcpy((void *)d, (void *)s, n); return 0; }
int cuMemsetD8Async(uint64_t d, unsigned char v, size_t n, void *) { memset((void *)d, v, n); return 0; }
int cuMemAddressReserve(uint64_t *p, size_t n, size_t, uint64_t, uint64_t) {
    *p = (uint64_t)mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return 0;
}
int cuMemAddressFree(uint64_t p, size_t n) { munmap((void *)p, n); return 0; }
int cuMemGetAllocationGranularity(size_t *g, void *, int) { *g = 2 << 20; return 0; }
int cuMemCreate(uint64_t *h, size_t, void *, uint64_t) { *h = 1; return 0; }
int cuMemRelease(uint64_t) { return 0; }
int cuMemMap(uint64_t p, size_t n, size_t, uint64_t, uint64_t) { memset((void *)p, 0xff, n); return 0; }
int cuMemUnmap(uint64_t, size_t) { return 0; }
int cuMemSetAccess(uint64_t, size_t, void *, size_t) { return 0; }
int cuStreamCreate(void **s, unsigned) { *s = (void *)1; return 0; }
int cuStreamDestroy_v2(void *) { return 0; }
int cuStreamSynchronize(void *) { return 0; }
int cuStreamWaitEvent(void *, void *, unsigned) { return 0; }
int cuStreamBeginCapture_v2(void *, int) { recording = new std::vector<Queued>; return 0; }
int cuStreamEndCapture(void *, void **g) { *g = recording; recording = nullptr; return 0; }
int cuEventCreate(void **e, unsigned) { *e = (void *)1; return 0; }
int cuEventDestroy_v2(void *) { return 0; }
int cuEventRecord(void *, void *) { return 0; }
int cuEventQuery(void *) { return 0; }
int cuEventSynchronize(void *) { return 0; }
int cuEventElapsedTime(float *t, void *, void *) { *t = 0; return 0; }
int cuModuleLoadDataEx(void **m, const void *, unsigned, void *, void *) { *m = (void *)1; return 0; }
int cuModuleUnload(void *) { return 0; }
int cuModuleGetFunction(void **f, void *, const char *name) {
    auto it = emulated().find(name);
    if (it == emulated().end()) return 500;
    *f = new Function{it->second.first, sizes_of[name]};
    return 0;
}
int cuFuncGetParamInfo(void *f, size_t i, size_t *offset, size_t *size) {
    auto &sizes = ((Function *)f)->sizes;
    if (i >= sizes.size()) return 1;
    *offset = 0; *size = sizes[i];
    return 0;
}
int cuFuncGetAttribute(int *v, int, void *) { *v = 0; return 0; }
int cuFuncSetAttribute(void *, int, int) { return 0; }
int cuLaunchKernelEx(const Config *c, void *f, void **p, void **) {
    auto &function = *(Function *)f;
    Queued q{function.f, *c, {}, 1};
    for (unsigned i = 0; i < c->count; i++) {
        const Attribute &attribute = ((const Attribute *)c->attributes)[i];
        if (attribute.id != 4) continue;  // a cluster
        q.deep = attribute.value[2];
        if (attribute.value[0] != 1 || attribute.value[1] != 1 || !q.deep || q.deep > CLUSTER || c->grid[2] % q.deep) return 1;
    }
    for (size_t i = 0; i < function.sizes.size(); i++) q.values.emplace_back((unsigned char *)p[i], (unsigned char *)p[i] + function.sizes[i]);
    if (recording) recording->push_back(q); else launch(q);
    return 0;
}
int cuGraphInstantiateWithFlags(void **e, void *g, uint64_t) { *e = new std::vector<Queued>(*(std::vector<Queued> *)g); return 0; }
int cuGraphLaunch(void *e, void *) { for (auto &q : *(std::vector<Queued> *)e) launch(q); return 0; }
int cuGraphDestroy(void *g) { delete (std::vector<Queued> *)g; return 0; }
int cuGraphExecDestroy(void *g) { delete (std::vector<Queued> *)g; return 0; }
}
