/* A libcuda without a device, for tests: gives out host memory, records calls, and looks closely.
 *
 * It runs no kernel, but everything around one: it checks handles, the bounds of every copy, the parameters of every
 * launch, that the calling thread has the context, and what was never given back. Copies run at once or, with
 * "deferred", when someone waits for them, so that a missing wait shows as wrong bytes. Any call can be made to fail.
 *
 * fake_set("deferred", 1)         settings, listed in `settings`; also from the environment as FAKECUDA_DEFERRED=1
 * fake_fail(name, n, code, lost)  the n-th call (1 is the next; of `name`, or of any function if it is empty) returns
 *                                 code; with `lost`, so does every call after it. Calls that take something back do so
 *                                 all the same, as the real ones do. FAKECUDA_FAIL=name:n:code:lost
 * fake_kernels(path)              the kernels.txt that modules are made of. FAKECUDA_KERNELS=path
 * fake_log() fake_violations() fake_leaks()   texts, a line each; fake_calls() counts; fake_reset() forgets all
 * FAKECUDA_REPORT=path            what these say, written there when the process ends */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint64_t u64;
typedef int CUresult;
enum { OK, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
       INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801, CAPTURING = 906 };

static struct { const char *name; long value; } settings[] = {
    {"deferred", 0}, {"devices", 1}, {"major", 9}, {"minor", 0}, {"memory", 1L << 30}, {"virtual_memory", 1}, {"read_only_register", 1},
    {"compute_mode", 0}, {"version", 13000}, {"init_ms", 0}, {"context_ms", 0}, {"registrable", 1}, {"energy", 1},
};
enum { COUNT = sizeof settings / sizeof *settings, GRANULE = 2 << 20 };
static const struct { int code; const char *name, *text; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"}, {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"}, {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"}, {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}, {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}, {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}, {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}, {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

/* ---- texts ---- */
struct text { char *at; size_t size, room; };
static struct text logged, violated, leaking;
static void add(struct text *t, const char *format, va_list values) {
    char line[512];
    int n = vsnprintf(line, sizeof line - 1, format, values);
    if (n > (int)sizeof line - 2) n = sizeof line - 2;
    line[n] = '\n';
    if (t->size + (size_t)n + 2 > t->room) t->at = realloc(t->at, t->room = t->room * 2 + 4096);
    memcpy(t->at + t->size, line, (size_t)n + 1);
    t->size += (size_t)n + 1;
    t->at[t->size] = 0;
}
static void note(struct text *t, const char *format, ...) { va_list v; va_start(v, format); add(t, format, v); va_end(v); }
#define violation(...) note(&violated, __VA_ARGS__)

/* ---- what is alive ---- */
enum kind { MEMORY, HOST, REGISTERED, RESERVED, PHYSICAL, MAPPED, STREAM, EVENT, MODULE, GRAPH, EXEC, KINDS };
static const char *kind_names[] = {"device memory", "host memory", "registered memory", "address range", "physical memory", "mapping", "stream", "event", "module", "graph", "executable graph"};
enum op_kind { COPY, SET, RECORD, WAIT, LAUNCH };
struct op { enum op_kind kind; u64 to, from; size_t size; char *staged; int to_host; struct object *event; long version; struct op *next; };
struct object {
    enum kind kind; u64 at; size_t size; int open;              /* ranges: `open` once readable and writable */
    struct op *first, *last; struct object *capture;            /* streams */
    long recorded, done; struct object *stream;                 /* events */
    int nodes;                                                  /* graphs */
    struct object *next;
};
struct function { char name[256]; int count, shared; struct { char type[24]; size_t offset, size; } parameters[64]; struct function *next; };
static struct object *alive;
static struct function *functions;
static char *kernels_text;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int initialized, retained, context_word; static long calls;
static __thread int current;
static struct { char name[64]; long countdown; int code, lost; } planned;
static int lost_code;

static long setting(const char *name) {
    for (int i = 0; i < COUNT; i++) if (!strcmp(settings[i].name, name)) return settings[i].value;
    abort();
}
static struct object *born(enum kind kind, u64 at, size_t size) {
    struct object *o = calloc(1, sizeof *o);
    o->kind = kind; o->at = at ? at : (u64)(uintptr_t)o; o->size = size; o->next = alive;
    return alive = o;
}
static struct object *find(enum kind kind, u64 at) {
    for (struct object *o = alive; o; o = o->next) if (o->kind == kind && o->at == at) return o;
    return NULL;
}
static void dies(struct object *o) {
    for (struct object **p = &alive; *p; p = &(*p)->next) if (*p == o) { *p = o->next; return; }
}
static struct object *holding(enum kind kind, u64 at, size_t size) {
    for (struct object *o = alive; o; o = o->next) if (o->kind == kind && at >= o->at && at + size <= o->at + o->size) return o;
    return NULL;
}
static int on_device(u64 at, size_t size) {
    if (holding(MEMORY, at, size)) return 1;
    while (size) { /* a range may be mapped in several pieces */
        struct object *o = holding(MAPPED, at, 1);
        if (!o || !o->open) return 0;
        size_t here = o->at + o->size - at;
        if (here >= size) return 1;
        at += here; size -= here;
    }
    return 1;
}
static int on_host_pinned(u64 at, size_t size) { return holding(HOST, at, size) || holding(REGISTERED, at, size); }
static size_t in_use(void) {
    size_t sum = 0;
    for (struct object *o = alive; o; o = o->next) if (o->kind == MEMORY || o->kind == PHYSICAL) sum += o->size;
    return sum;
}

/* ---- every call ---- */
static int enter(const char *name, int needs_context, const char *format, ...) {
    char words[400]; va_list values; va_start(values, format); vsnprintf(words, sizeof words, format, values); va_end(values);
    note(&logged, *words ? "%s %s" : "%s", name, words);
    calls++;
    if (lost_code) return lost_code;
    if (planned.countdown && (!*planned.name || !strcmp(planned.name, name)) && --planned.countdown == 0) {
        if (planned.lost) lost_code = planned.code;
        return planned.code;
    }
    if (!initialized && strcmp(name, "cuInit") && strcmp(name, "cuDriverGetVersion")) return NOT_INITIALIZED;
    if (needs_context && !current) { violation("%s without a current context", name); return INVALID_CONTEXT; }
    return OK;
}
#define BEGIN(needs_context, ...) int code; pthread_mutex_lock(&lock); code = enter(__func__, needs_context, __VA_ARGS__); if (code) goto out
#define BEGIN_RELEASE(...) int code; pthread_mutex_lock(&lock); code = enter(__func__, 1, __VA_ARGS__) /* and go on */
#define END out: pthread_mutex_unlock(&lock); return code
#define REFUSE(what, ...) do { code = (what); violation(__VA_ARGS__); goto out; } while (0)
#define EXPECT(kind, handle) struct object *handle##_o = find(kind, (u64)(uintptr_t)(handle)); if (!handle##_o) REFUSE(INVALID_HANDLE, "%s: no such %s", __func__, kind_names[kind])

/* ---- streams ---- */
static void run_stream(struct object *s, struct object *event, long version);
static void run(struct object *s) {
    struct op *op = s->first;
    if (!(s->first = op->next)) s->last = NULL;
    if (op->kind == COPY) {
        u64 from = op->staged ? (u64)(uintptr_t)op->staged : op->from;
        int to_ok = op->to_host || on_device(op->to, op->size), from_ok = op->staged || on_device(op->from, op->size) || on_host_pinned(op->from, op->size);
        if (to_ok && from_ok) memcpy((void *)(uintptr_t)op->to, (void *)(uintptr_t)from, op->size);
        else violation("a queued copy of %zu bytes ran after its memory was given back", op->size);
    } else if (op->kind == SET) {
        if (on_device(op->to, op->size)) memset((void *)(uintptr_t)op->to, (int)op->from, op->size);
        else violation("a queued fill ran after its memory was given back");
    } else if (op->kind == RECORD) {
        if (op->version > op->event->done) op->event->done = op->version;
    } else if (op->kind == WAIT && op->event->done < op->version && op->event->stream) {
        run_stream(op->event->stream, op->event, op->version);
    }
    free(op->staged);
    free(op);
}
static void run_stream(struct object *s, struct object *event, long version) {
    while (s->first && !(event && event->done >= version)) run(s);
}
static void run_all(void) { for (struct object *o = alive; o; o = o->next) if (o->kind == STREAM) run_stream(o, NULL, 0); }
static void queue(struct object *s, struct op op) {
    if (s->capture) { s->capture->nodes++; free(op.staged); return; }
    struct op *kept = malloc(sizeof *kept);
    *kept = op; kept->next = NULL;
    if (s->last) s->last->next = kept; else s->first = kept;
    s->last = kept;
    if (!setting("deferred")) run_stream(s, NULL, 0);
}

/* ---- settings of the tests ---- */
void fake_set(const char *name, long value) {
    for (int i = 0; i < COUNT; i++) if (!strcasecmp(settings[i].name, name)) { settings[i].value = value; return; }
    fprintf(stderr, "fakecuda has no setting %s\n", name);
    abort();
}
void fake_fail(const char *name, long n, int code, int lost) {
    pthread_mutex_lock(&lock);
    snprintf(planned.name, sizeof planned.name, "%s", name);
    planned.countdown = n; planned.code = code; planned.lost = lost;
    pthread_mutex_unlock(&lock);
}
void fake_kernels(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) { perror(path); abort(); }
    size_t room = 0; ssize_t n;
    free(kernels_text); kernels_text = NULL;
    n = getdelim(&kernels_text, &room, 0, file);
    fclose(file);
    if (n < 0) abort();
    functions = NULL;
}
const char *fake_log(void) { return logged.at ? logged.at : ""; }
const char *fake_violations(void) { return violated.at ? violated.at : ""; }
const char *fake_leaks(void) {
    leaking.size = 0;
    if (leaking.at) *leaking.at = 0;
    for (struct object *o = alive; o; o = o->next) note(&leaking, "%s of %zu bytes", kind_names[o->kind], o->size);
    if (retained) note(&leaking, "context retained %d times", retained);
    return leaking.at ? leaking.at : "";
}
void fake_violations_forget(void) { violated.size = 0; if (violated.at) *violated.at = 0; }
long fake_calls(void) { return calls; }
int fake_fails_left(void) { return planned.countdown > 0; }
void fake_reset(void) {
    pthread_mutex_lock(&lock);
    struct object *old = alive; alive = NULL; (void)old; /* leaked on purpose: handles must not be given out twice */
    functions = NULL; retained = initialized = current = 0; calls = 0; lost_code = 0;
    memset(&planned, 0, sizeof planned);
    for (struct text *t[] = {&logged, &violated, &leaking}, **p = t; p < t + 3; p++) { (*p)->size = 0; if ((*p)->at) *(*p)->at = 0; }
    pthread_mutex_unlock(&lock);
}
__attribute__((constructor)) static void from_environment(void) {
    char name[64]; const char *value;
    for (int i = 0; i < COUNT; i++) {
        snprintf(name, sizeof name, "FAKECUDA_%s", settings[i].name);
        for (char *c = name; *c; c++) if (*c >= 'a' && *c <= 'z') *c -= 32;
        if ((value = getenv(name))) settings[i].value = atol(value);
    }
    if ((value = getenv("FAKECUDA_KERNELS"))) fake_kernels(value);
    if ((value = getenv("FAKECUDA_FAIL"))) {
        char function[64] = ""; long n = 1; int code = 999, lost = 0;
        sscanf(value, "%63[^:]:%ld:%d:%d", function, &n, &code, &lost);
        fake_fail(strcmp(function, "*") ? function : "", n, code, lost);
    }
}
__attribute__((destructor)) static void report(void) {
    const char *path = getenv("FAKECUDA_REPORT");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "calls %ld\n[log]\n%s[violations]\n%s[leaks]\n%s", calls, fake_log(), fake_violations(), fake_leaks());
    fclose(file);
}

/* ---- driver and device ---- */
CUresult cuInit(unsigned flags) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *connections = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    BEGIN(0, "%u connections %s", flags, connections ? connections : "unset");
    usleep((unsigned)setting("init_ms") * 1000);
    if (!setting("devices") || (visible && !*visible)) { code = NO_DEVICE; goto out; }
    initialized = 1;
    END;
}
CUresult cuDriverGetVersion(int *version) { BEGIN(0, ""); *version = (int)setting("version"); END; }
CUresult cuGetErrorName(CUresult error, const char **name) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) if (errors[i].code == error) { *name = errors[i].name; return OK; }
    *name = NULL; return INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) if (errors[i].code == error) { *text = errors[i].text; return OK; }
    *text = NULL; return INVALID_VALUE;
}
CUresult cuDeviceGetCount(int *count) { BEGIN(0, ""); *count = (int)setting("devices"); END; }
CUresult cuDeviceGet(int *device, int ordinal) {
    BEGIN(0, "%d", ordinal);
    if (ordinal < 0 || ordinal >= setting("devices")) { code = INVALID_DEVICE; goto out; }
    *device = ordinal;
    END;
}
CUresult cuDeviceGetName(char *name, int size, int device) { BEGIN(0, "%d", device); snprintf(name, (size_t)size, "Fake %d", device); END; }
CUresult cuDeviceGetPCIBusId(char *name, int size, int device) { BEGIN(0, "%d", device); snprintf(name, (size_t)size, "0000:%02X:00.0", device); END; }
CUresult cuDeviceTotalMem_v2(size_t *size, int device) { BEGIN(0, "%d", device); *size = (size_t)setting("memory"); END; }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN(0, "%d %d", attribute, device);
    static const struct { int number; const char *name; } known[] = {{20, "compute_mode"}, {75, "major"}, {76, "minor"}, {102, "virtual_memory"}, {113, "read_only_register"}};
    static const int fixed[][2] = {{16, 132}, {38, 50 << 20}, {97, 227 << 10}};
    *value = 0;
    for (int i = 0; i < 5; i++) if (known[i].number == attribute) { *value = (int)setting(known[i].name); goto out; }
    for (int i = 0; i < 3; i++) if (fixed[i][0] == attribute) { *value = fixed[i][1]; goto out; }
    REFUSE(INVALID_VALUE, "attribute %d is not known here", attribute);
    END;
}
CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    BEGIN(0, "%d", device);
    if (!retained) usleep((unsigned)setting("context_ms") * 1000);
    retained++; *context = &context_word;
    END;
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    int code; pthread_mutex_lock(&lock);
    code = enter(__func__, 0, "%d", device);
    if (retained <= 0) REFUSE(INVALID_CONTEXT, "a context was released once too often");
    retained--;
    END;
}
CUresult cuCtxSetCurrent(void *context) { BEGIN(0, ""); current = context != NULL; END; }
CUresult cuCtxSynchronize(void) { BEGIN(1, ""); run_all(); END; }

/* ---- memory ---- */
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    BEGIN(0, "");
    if (!current) { code = INVALID_CONTEXT; goto out; } /* no violation: who reports an error may not know */
    *total = (size_t)setting("memory"); *free_bytes = *total - in_use();
    END;
}
CUresult cuMemAlloc_v2(u64 *at, size_t size) {
    BEGIN(1, "%zu", size);
    if (!size) REFUSE(INVALID_VALUE, "an allocation of nothing");
    if (in_use() + size > (size_t)setting("memory")) { code = OUT_OF_MEMORY; goto out; }
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) { code = OUT_OF_MEMORY; goto out; }
    memset(p, 0xff, size < 1 << 20 ? size : 1 << 20); /* what nobody wrote is no number */
    *at = born(MEMORY, (u64)(uintptr_t)p, size)->at;
    END;
}
CUresult cuMemFree_v2(u64 at) {
    BEGIN_RELEASE("");
    EXPECT(MEMORY, at);
    run_all(); /* as the real one: it waits for the device */
    munmap((void *)(uintptr_t)at, at_o->size); dies(at_o);
    END;
}
CUresult cuMemHostAlloc(void **at, size_t size, unsigned flags) {
    BEGIN(1, "%zu %u", size, flags);
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(p, 0xff, size);
    *at = (void *)(uintptr_t)born(HOST, (u64)(uintptr_t)p, size)->at;
    END;
}
CUresult cuMemFreeHost(void *at) { BEGIN_RELEASE(""); EXPECT(HOST, at); run_all(); munmap(at, at_o->size); dies(at_o); END; }
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
    const int populate_read = 22; /* MADV_POPULATE_READ: what is not there, or behind a file's end, cannot be page-locked */
    if (madvise((void *)(uintptr_t)first, end - first, populate_read) && errno != EINVAL) { code = INVALID_VALUE; goto out; }
    if (!setting("registrable")) { code = NOT_SUPPORTED; goto out; }
    born(REGISTERED, (u64)(uintptr_t)at, size);
    END;
}
CUresult cuMemHostUnregister(void *at) { BEGIN_RELEASE(""); EXPECT(REGISTERED, at); run_all(); dies(at_o); END; }
CUresult cuMemAddressReserve(u64 *at, size_t size, size_t alignment, u64 wanted, u64 flags) {
    BEGIN(1, "%zu", size);
    (void)alignment; (void)wanted; (void)flags;
    if (size % GRANULE) REFUSE(INVALID_VALUE, "a range of %zu bytes is no whole number of granules", size);
    void *p = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *at = born(RESERVED, (u64)(uintptr_t)p, size)->at;
    END;
}
CUresult cuMemAddressFree(u64 at, size_t size) {
    BEGIN_RELEASE("%zu", size);
    EXPECT(RESERVED, at);
    for (struct object *o = alive; o; o = o->next) if (o->kind == MAPPED && o->at >= at && o->at < at + size) REFUSE(INVALID_VALUE, "a range was freed with mappings in it");
    munmap((void *)(uintptr_t)at, at_o->size); dies(at_o);
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
    if (properties[0] != 1 || properties[2] != 1) REFUSE(INVALID_VALUE, "physical memory that is not pinned on a device");
    if (size % GRANULE) REFUSE(INVALID_VALUE, "%zu bytes are no whole number of granules", size);
    if (in_use() + size > (size_t)setting("memory")) { code = OUT_OF_MEMORY; goto out; }
    *handle = born(PHYSICAL, 0, size)->at;
    END;
}
CUresult cuMemRelease(u64 handle) { BEGIN_RELEASE(""); EXPECT(PHYSICAL, handle); dies(handle_o); END; }
CUresult cuMemMap(u64 at, size_t size, size_t offset, u64 handle, u64 flags) {
    BEGIN(1, "%zu", size);
    EXPECT(PHYSICAL, handle);
    if (!holding(RESERVED, at, size) || holding(MAPPED, at, 1) || offset || flags || size != handle_o->size) REFUSE(INVALID_VALUE, "a mapping that does not fit");
    born(MAPPED, at, size);
    END;
}
CUresult cuMemUnmap(u64 at, size_t size) {
    BEGIN_RELEASE("%zu", size);
    EXPECT(MAPPED, at);
    run_all();
    mprotect((void *)(uintptr_t)at, size, PROT_NONE); dies(at_o);
    END;
}
CUresult cuMemSetAccess(u64 at, size_t size, const int *description, size_t count) {
    BEGIN(1, "%zu", size);
    EXPECT(MAPPED, at);
    if (count != 1 || description[0] != 1 || description[2] != 3) REFUSE(INVALID_VALUE, "access that lets nobody write");
    mprotect((void *)(uintptr_t)at, size, PROT_READ | PROT_WRITE); memset((void *)(uintptr_t)at, 0xff, size); at_o->open = 1;
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
    if (!on_device(from, size)) REFUSE(INVALID_VALUE, "a copy of %zu bytes from the device begins outside its memory", size);
    queue(stream_o, (struct op){.kind = COPY, .to = (u64)(uintptr_t)to, .from = from, .size = size, .to_host = 1});
    END;
}
CUresult cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t size, void *stream) {
    BEGIN(1, "%zu", size);
    EXPECT(STREAM, stream);
    if (!on_device(from, size) || !on_device(to, size)) REFUSE(INVALID_VALUE, "a copy of %zu bytes on the device leaves its memory", size);
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

/* ---- streams and events ---- */
CUresult cuStreamCreate(void **stream, unsigned flags) { BEGIN(1, "%u", flags); *stream = born(STREAM, 0, 0); END; }
CUresult cuStreamDestroy_v2(void *stream) { BEGIN_RELEASE(""); EXPECT(STREAM, stream); run_stream(stream_o, NULL, 0); dies(stream_o);
    for (struct object *o = alive; o; o = o->next) if (o->stream == stream_o) o->stream = NULL;
    END; }
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
CUresult cuEventCreate(void **event, unsigned flags) { BEGIN(1, "%u", flags); *event = born(EVENT, 0, 0); END; }
CUresult cuEventDestroy_v2(void *event) { BEGIN_RELEASE(""); EXPECT(EVENT, event); run_all(); dies(event_o); END; }
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
        if (event_o->stream && event_o->stream->first) run(event_o->stream); /* the device goes on, one step a question */
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
    if (!start_o->recorded || !end_o->recorded) REFUSE(INVALID_HANDLE, "the time between events that were not recorded");
    *milliseconds = 1.5f;
    END;
}

/* ---- modules and launches ---- */
CUresult cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) {
    BEGIN(1, "%s", memcmp(image, "\177ELF", 4) ? "ptx" : "cubin");
    for (unsigned i = 0; i < count; i++) if (options[i] == 5) strcpy(values[i], "");
    if (memcmp(image, "\177ELF", 4) && !strstr(image, ".version")) { code = INVALID_IMAGE; goto out; }
    *module = born(MODULE, 0, 0);
    END;
}
CUresult cuModuleUnload(void *module) { BEGIN_RELEASE(""); EXPECT(MODULE, module); run_all(); dies(module_o); END; }
CUresult cuModuleGetFunction(void **result, void *module, const char *name) {
    BEGIN(1, "%s", name);
    EXPECT(MODULE, module);
    for (const char *line = kernels_text; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : "") {
        size_t n = strlen(name);
        if (strncmp(line, name, n) || line[n] != ' ') continue;
        struct function *f = calloc(1, sizeof *f);
        snprintf(f->name, sizeof f->name, "%s", name);
        f->shared = 48 << 10;
        const char *word = strchr(line + n + 1, ' '), *end = strchrnul(line, '\n');
        for (; word && word < end && f->count < 64; word = strchr(word + 1, ' '), f->count++) {
            sscanf(word, " %23[^@]@%zu", f->parameters[f->count].type, &f->parameters[f->count].offset);
            const char *type = f->parameters[f->count].type, *bracket = strchr(type, '[');
            f->parameters[f->count].size = bracket ? (size_t)atol(bracket + 1) : (size_t)atol(type + 1) / 8;
        }
        f->next = functions; functions = f; *result = f;
        goto out;
    }
    code = NOT_FOUND;
    END;
}
static struct function *known(void *handle) {
    for (struct function *f = functions; f; f = f->next) if (f == handle) return f;
    return NULL;
}
#define FUNCTION(handle) struct function *f = known(handle); if (!f) REFUSE(INVALID_HANDLE, "%s: no such function", __func__)
CUresult cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
    BEGIN(1, "%zu", index);
    FUNCTION(function);
    if (index >= (size_t)f->count) { code = INVALID_VALUE; goto out; }
    *offset = f->parameters[index].offset; *size = f->parameters[index].size;
    END;
}
CUresult cuFuncGetAttribute(int *value, int attribute, void *function) {
    BEGIN(1, "%d", attribute);
    FUNCTION(function);
    *value = attribute == 0 ? 1024 : attribute == 8 ? f->shared : 0;
    END;
}
CUresult cuFuncSetAttribute(void *function, int attribute, int value) {
    BEGIN(1, "%d %d", attribute, value);
    FUNCTION(function);
    if (attribute == 8) { if (value > 227 << 10) REFUSE(INVALID_VALUE, "%d bytes of shared memory", value); f->shared = value; }
    END;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
    BEGIN(1, "%d %zu", threads, shared);
    FUNCTION(function);
    *blocks = 2048 / threads;
    END;
}
struct config { unsigned grid[3], block[3], shared; void *stream; void *attributes; unsigned count; };
static CUresult look_at_launch(const char *who, struct function *f, const unsigned *grid, const unsigned *block, unsigned shared, void **parameters) {
    int code = OK;
    u64 threads = (u64)block[0] * block[1] * block[2];
    if (!grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535 || !threads || threads > 1024) REFUSE(INVALID_VALUE, "%s of %s: grid %u %u %u, block %u %u %u", who, f->name, grid[0], grid[1], grid[2], block[0], block[1], block[2]);
    if (shared > (unsigned)f->shared) REFUSE(INVALID_VALUE, "%s of %s: %u bytes of shared memory, %d allowed", who, f->name, shared, f->shared);
    for (int i = 0; i < f->count; i++) {
        if (!parameters || !parameters[i]) REFUSE(INVALID_VALUE, "%s of %s: parameter %d is missing", who, f->name, i);
        u64 word = 0;
        if (strcmp(f->parameters[i].type, "u64")) continue;
        memcpy(&word, parameters[i], 8);
        /* Whatever looks like an address must be one. */
        if (word >> 40 && !(word >> 47) && !on_device(word, 1) && !holding(HOST, word, 1)) REFUSE(700, "%s of %s: parameter %d points at no memory", who, f->name, i);
    }
out:
    return code;
}
CUresult cuLaunchKernelEx(const struct config *c, void *function, void **parameters, void **extra) {
    struct function *named = known(function);
    BEGIN(1, "%s grid %u %u %u block %u %u %u shared %u attributes %u", named ? named->name : "?", c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, c->count);
    FUNCTION(function);
    void *stream = c->stream;
    EXPECT(STREAM, stream);
    if (extra) REFUSE(INVALID_VALUE, "a launch with extra options");
    if (!(code = look_at_launch(__func__, f, c->grid, c->block, c->shared, parameters))) queue(stream_o, (struct op){.kind = LAUNCH});
    END;
}

/* ---- graphs ---- */
CUresult cuStreamBeginCapture_v2(void *stream, int mode) { BEGIN(1, "%d", mode); EXPECT(STREAM, stream); stream_o->capture = born(GRAPH, 0, 0); END; }
CUresult cuStreamEndCapture(void *stream, void **graph) {
    BEGIN_RELEASE("");
    EXPECT(STREAM, stream);
    if (!stream_o->capture) REFUSE(INVALID_VALUE, "a recording ended that never began");
    *graph = code ? NULL : stream_o->capture;
    if (code) dies(stream_o->capture);
    stream_o->capture = NULL;
    END;
}
CUresult cuStreamGetCaptureInfo_v3(void *stream, int *status, u64 *id, void **graph, void ***nodes, void **edges, size_t *count) {
    BEGIN(1, "");
    EXPECT(STREAM, stream);
    (void)id; (void)graph;
    static void *node; node = stream_o->capture ? (char *)stream_o->capture + stream_o->capture->nodes : NULL;
    *status = node != NULL; *nodes = &node; *edges = NULL; *count = stream_o->capture && stream_o->capture->nodes ? 1 : 0;
    END;
}
CUresult cuGraphInstantiateWithFlags(void **exec, void *graph, u64 flags) {
    BEGIN(1, "%lu", flags);
    EXPECT(GRAPH, graph);
    struct object *made = born(EXEC, 0, 0);
    made->nodes = graph_o->nodes; *exec = made;
    END;
}
CUresult cuGraphLaunch(void *exec, void *stream) {
    BEGIN(1, "");
    EXPECT(EXEC, exec);
    EXPECT(STREAM, stream);
    queue(stream_o, (struct op){.kind = LAUNCH});
    END;
}
CUresult cuGraphDestroy(void *graph) { BEGIN_RELEASE(""); EXPECT(GRAPH, graph); dies(graph_o); END; }
CUresult cuGraphExecDestroy(void *exec) { BEGIN_RELEASE(""); EXPECT(EXEC, exec); dies(exec_o); END; }
CUresult cuGraphExecUpdate_v2(void *exec, void *graph, int *result) {
    BEGIN(1, "");
    EXPECT(EXEC, exec);
    EXPECT(GRAPH, graph);
    *result = graph_o->nodes == exec_o->nodes ? 0 : 2;
    if (*result) code = 910;
    END;
}
struct node { void *function; unsigned grid[3], block[3], shared; void **parameters, **extra; void *kernel, *context; };
CUresult cuGraphExecKernelNodeSetParams_v2(void *exec, void *node, const struct node *p) {
    BEGIN(1, "grid %u %u %u", p->grid[0], p->grid[1], p->grid[2]);
    EXPECT(EXEC, exec);
    FUNCTION(p->function);
    if (!node || p->extra || p->kernel) REFUSE(INVALID_VALUE, "a node that is none");
    code = look_at_launch(__func__, f, p->grid, p->block, p->shared, p->parameters);
    END;
}

/* ---- NVML, as far as its energy counter ---- */
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { *device = &context_word; return *bus ? 0 : 2; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) { *millijoules = 1234567; return device && setting("energy") ? 0 : 3; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.00.fake"); return 0; }
