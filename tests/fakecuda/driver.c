/* The driver, the device, memory, streams and events. */
#include "fake.h"

CUresult cuInit(unsigned flags) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    BEGIN(0, "%u connections %s", flags, connections ? connections : "unset");
    if (!initialized) usleep((unsigned)setting("init_ms") * 1000);
    if (!setting("devices") || (visible && !*visible)) {
        code = NO_DEVICE;
        goto out;
    }
    initialized = 1;
    END;
}
CUresult cuDriverGetVersion(int *version) {
    BEGIN(0, "");
    *version = (int)setting("version");
    END;
}
CUresult cuDeviceGetCount(int *count) {
    BEGIN(0, "");
    *count = (int)setting("devices");
    END;
}
CUresult cuDeviceGet(int *device, int ordinal) {
    BEGIN(0, "%d", ordinal);
    if (ordinal < 0 || ordinal >= setting("devices")) {
        code = INVALID_DEVICE;
        goto out;
    }
    *device = ordinal;
    END;
}
CUresult cuDeviceGetName(char *name, int size, int device) {
    BEGIN(0, "%d", device);
    snprintf(name, (size_t)size, "Fake %d", device);
    END;
}
CUresult cuDeviceGetPCIBusId(char *name, int size, int device) {
    BEGIN(0, "%d", device);
    snprintf(name, (size_t)size, "0000:%02X:00.0", device);
    END;
}
CUresult cuDeviceTotalMem_v2(size_t *size, int device) {
    BEGIN(0, "%d", device);
    *size = (size_t)setting("memory");
    END;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN(0, "%d %d", attribute, device);
    static const struct {
        int number;
        const char *name;
    } known[] = {
        {20, "compute_mode"}, {75, "major"}, {76, "minor"}, {102, "virtual_memory"}, {113, "read_only_register"}};
    static const int fixed[][2] = {{16, 132}, {38, 50 << 20}, {97, 227 << 10}};
    *value = 0;
    for (int i = 0; i < 5; i++)
        if (known[i].number == attribute) {
            *value = (int)setting(known[i].name);
            goto out;
        }
    for (int i = 0; i < 3; i++)
        if (fixed[i][0] == attribute) {
            *value = fixed[i][1];
            goto out;
        }
    REFUSE(INVALID_VALUE, "attribute %d is not known here", attribute);
    END;
}
CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    BEGIN(0, "%d", device);
    if (!retained) usleep((unsigned)setting("context_ms") * 1000);
    retained++;
    *context = &context_word;
    END;
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    int code;
    pthread_mutex_lock(&lock);
    code = enter(__func__, 0, "%d", device);
    if (retained <= 0) REFUSE(INVALID_CONTEXT, "a context was released once too often");
    retained--;
    END;
}
CUresult cuCtxSetCurrent(void *context) {
    BEGIN(0, "");
    current = context != NULL;
    END;
}
CUresult cuCtxSynchronize(void) {
    BEGIN(1, "");
    run_all();
    END;
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    BEGIN(0, "");
    if (!current) {
        code = INVALID_CONTEXT;
        goto out;
    } /* no violation: who reports an error may not know */
    *total = (size_t)setting("memory");
    *free_bytes = *total - in_use();
    END;
}
CUresult cuMemAlloc_v2(u64 *at, size_t size) {
    BEGIN(1, "%zu", size);
    if (!size) REFUSE(INVALID_VALUE, "an allocation of nothing");
    if (in_use() + size > (size_t)setting("memory")) {
        code = OUT_OF_MEMORY;
        goto out;
    }
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        code = OUT_OF_MEMORY;
        goto out;
    }
    memset(p, 0xff, size < 1 << 20 ? size : 1 << 20); /* what nobody wrote is no number */
    *at = born(MEMORY, (u64)(uintptr_t)p, size)->at;
    END;
}
CUresult cuMemFree_v2(u64 at) {
    BEGIN_RELEASE("");
    EXPECT(MEMORY, at);
    run_all(); /* as the real one: it waits for the device */
    munmap((void *)(uintptr_t)at, at_o->size);
    dies(at_o);
    END;
}
CUresult cuMemHostAlloc(void **at, size_t size, unsigned flags) {
    BEGIN(1, "%zu %u", size, flags);
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(p, 0xff, size);
    *at = (void *)(uintptr_t)born(HOST, (u64)(uintptr_t)p, size)->at;
    END;
}
CUresult cuMemFreeHost(void *at) {
    BEGIN_RELEASE("");
    EXPECT(HOST, at);
    run_all();
    munmap(at, at_o->size);
    dies(at_o);
    END;
}
CUresult cuMemHostGetDevicePointer_v2(u64 *on_device_at, void *at, unsigned flags) {
    BEGIN(1, "%u", flags);
    EXPECT(HOST, at);
    *on_device_at = at_o->at;
    END;
}
CUresult cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    BEGIN(1, "%zu %u", size, flags);
    u64 first = (u64)(uintptr_t)at & ~4095ULL, end = ((u64)(uintptr_t)at + size + 4095) & ~4095ULL;
    for (struct object *o = alive; o; o = o->next)
        if (o->kind == REGISTERED && o->at < end && first < o->at + o->size) REFUSE(712, "memory was registered twice");
    const int populate_read =
        22; /* MADV_POPULATE_READ: what is not there, or behind a file's end, cannot be page-locked */
    if (madvise((void *)(uintptr_t)first, end - first, populate_read) && errno != EINVAL) {
        code = INVALID_VALUE;
        goto out;
    }
    if (!setting("registrable")) {
        code = NOT_SUPPORTED;
        goto out;
    }
    born(REGISTERED, (u64)(uintptr_t)at, size);
    END;
}
CUresult cuMemHostUnregister(void *at) {
    BEGIN_RELEASE("");
    EXPECT(REGISTERED, at);
    run_all();
    dies(at_o);
    END;
}
CUresult cuMemAddressReserve(u64 *at, size_t size, size_t alignment, u64 wanted, u64 flags) {
    BEGIN(1, "%zu", size);
    (void)alignment;
    (void)wanted;
    (void)flags;
    if (size % GRANULE) REFUSE(INVALID_VALUE, "a range of %zu bytes is no whole number of granules", size);
    void *p = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *at = born(RESERVED, (u64)(uintptr_t)p, size)->at;
    END;
}
CUresult cuMemAddressFree(u64 at, size_t size) {
    BEGIN_RELEASE("%zu", size);
    EXPECT(RESERVED, at);
    for (struct object *o = alive; o; o = o->next)
        if (o->kind == MAPPED && o->at >= at && o->at < at + size)
            REFUSE(INVALID_VALUE, "a range was freed with mappings in it");
    munmap((void *)(uintptr_t)at, at_o->size);
    dies(at_o);
    END;
}
CUresult cuMemGetAllocationGranularity(size_t *granule, const void *properties, int option) {
    BEGIN(1, "%d", option);
    (void)properties;
    *granule = GRANULE;
    END;
}
CUresult cuMemCreate(u64 *handle, size_t size, const int *properties, u64 flags) {
    BEGIN(1, "%zu", size);
    (void)flags;
    if (properties[0] != 1 || properties[2] != 1)
        REFUSE(INVALID_VALUE, "physical memory that is not pinned on a device");
    if (size % GRANULE) REFUSE(INVALID_VALUE, "%zu bytes are no whole number of granules", size);
    if (in_use() + size > (size_t)setting("memory")) {
        code = OUT_OF_MEMORY;
        goto out;
    }
    *handle = born(PHYSICAL, 0, size)->at;
    END;
}
CUresult cuMemRelease(u64 handle) {
    BEGIN_RELEASE("");
    EXPECT(PHYSICAL, handle);
    dies(handle_o);
    END;
}
CUresult cuMemMap(u64 at, size_t size, size_t offset, u64 handle, u64 flags) {
    BEGIN(1, "%zu", size);
    EXPECT(PHYSICAL, handle);
    if (!holding(RESERVED, at, size) || holding(MAPPED, at, 1) || offset || flags || size != handle_o->size)
        REFUSE(INVALID_VALUE, "a mapping that does not fit");
    born(MAPPED, at, size);
    END;
}
CUresult cuMemUnmap(u64 at, size_t size) {
    BEGIN_RELEASE("%zu", size);
    EXPECT(MAPPED, at);
    run_all();
    mprotect((void *)(uintptr_t)at, size, PROT_NONE);
    dies(at_o);
    END;
}
CUresult cuMemSetAccess(u64 at, size_t size, const int *description, size_t count) {
    BEGIN(1, "%zu", size);
    EXPECT(MAPPED, at);
    if (count != 1 || description[0] != 1 || description[2] != 3)
        REFUSE(INVALID_VALUE, "access that lets nobody write");
    mprotect((void *)(uintptr_t)at, size, PROT_READ | PROT_WRITE);
    memset((void *)(uintptr_t)at, 0xff, size);
    at_o->open = 1;
    END;
}
CUresult cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t size, void *stream) {
    BEGIN(1, "%zu", size);
    EXPECT(STREAM, stream);
    if (!on_device(to, size)) REFUSE(INVALID_VALUE, "a copy of %zu bytes to the device ends outside its memory", size);
    struct op op = {.kind = COPY, .to = to, .from = (u64)(uintptr_t)from, .size = size};
    if (!on_host_pinned(op.from, size)) memcpy(op.staged = malloc(size + 1), from, size);
    queue(stream_o, op);
    END;
}
CUresult cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t size, void *stream) {
    BEGIN(1, "%zu", size);
    EXPECT(STREAM, stream);
    if (!on_device(from, size))
        REFUSE(INVALID_VALUE, "a copy of %zu bytes from the device begins outside its memory", size);
    queue(stream_o, (struct op){.kind = COPY, .to = (u64)(uintptr_t)to, .from = from, .size = size, .to_host = 1});
    END;
}
CUresult cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t size, void *stream) {
    BEGIN(1, "%zu", size);
    EXPECT(STREAM, stream);
    if (!on_device(from, size) || !on_device(to, size))
        REFUSE(INVALID_VALUE, "a copy of %zu bytes on the device leaves its memory", size);
    if (from < to + size && to < from + size) REFUSE(INVALID_VALUE, "a copy on the device onto itself");
    queue(stream_o, (struct op){.kind = COPY, .to = to, .from = from, .size = size});
    END;
}
CUresult cuMemsetD8Async(u64 to, unsigned byte, size_t size, void *stream) {
    BEGIN(1, "%u %zu", byte, size);
    EXPECT(STREAM, stream);
    if (!on_device(to, size)) REFUSE(INVALID_VALUE, "a fill of %zu bytes leaves the device's memory", size);
    queue(stream_o, (struct op){.kind = SET, .to = to, .from = byte, .size = size});
    END;
}

CUresult cuStreamCreate(void **stream, unsigned flags) {
    BEGIN(1, "%u", flags);
    *stream = born(STREAM, 0, 0);
    END;
}
CUresult cuStreamDestroy_v2(void *stream) {
    BEGIN_RELEASE("");
    EXPECT(STREAM, stream);
    run_stream(stream_o, NULL, 0);
    dies(stream_o);
    for (struct object *o = alive; o; o = o->next)
        if (o->stream == stream_o) o->stream = NULL;
    END;
}
CUresult cuStreamSynchronize(void *stream) {
    BEGIN(1, "");
    EXPECT(STREAM, stream);
    if (stream_o->capture) REFUSE(CAPTURING, "waiting for a stream that is being recorded");
    run_stream(stream_o, NULL, 0);
    END;
}
CUresult cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    BEGIN(1, "%u", flags);
    EXPECT(STREAM, stream);
    EXPECT(EVENT, event);
    queue(stream_o, (struct op){.kind = WAIT, .event = event_o, .version = event_o->recorded});
    END;
}
CUresult cuEventCreate(void **event, unsigned flags) {
    BEGIN(1, "%u", flags);
    struct object *made = born(EVENT, 0, 0);
    made->untimed = flags & 2;
    *event = made;
    END;
}
CUresult cuEventDestroy_v2(void *event) {
    BEGIN_RELEASE("");
    EXPECT(EVENT, event);
    run_all();
    dies(event_o);
    END;
}
CUresult cuEventRecord(void *event, void *stream) {
    BEGIN(1, "");
    EXPECT(EVENT, event);
    EXPECT(STREAM, stream);
    event_o->stream = stream_o;
    queue(stream_o, (struct op){.kind = RECORD, .event = event_o, .version = ++event_o->recorded});
    END;
}
CUresult cuEventQuery(void *event) {
    BEGIN(1, "");
    EXPECT(EVENT, event);
    if (event_o->done < event_o->recorded) {
        if (event_o->stream && event_o->stream->first)
            run(event_o->stream); /* the device goes on, one step a question */
        code = NOT_READY;
    }
    END;
}
CUresult cuEventSynchronize(void *event) {
    BEGIN(1, "");
    EXPECT(EVENT, event);
    if (event_o->stream) run_stream(event_o->stream, event_o, event_o->recorded);
    END;
}
CUresult cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    BEGIN(1, "");
    EXPECT(EVENT, start);
    EXPECT(EVENT, end);
    if (!start_o->recorded || !end_o->recorded)
        REFUSE(INVALID_HANDLE, "the time between events that were not recorded");
    if (start_o->untimed || end_o->untimed) REFUSE(INVALID_HANDLE, "the time between events without timing");
    if (start_o->done < start_o->recorded || end_o->done < end_o->recorded)
        code = NOT_READY;
    else
        *milliseconds = (float)((double)(int64_t)(end_o->passed - start_o->passed) / 1e6);
    END;
}
