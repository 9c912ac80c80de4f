/* What the fake keeps: texts, settings, what is alive, what is queued, and which call is to fail. */
#include "fake.h"

static struct {
    const char *name;
    long value;
} settings[] = {
    {"deferred", 0},
    {"devices", 1},
    {"major", 9},
    {"minor", 0},
    {"memory", 1L << 30},
    {"virtual_memory", 1},
    {"read_only_register", 1},
    {"compute_mode", 0},
    {"version", 13000},
    {"init_ms", 0},
    {"context_ms", 0},
    {"registrable", 1},
    {"energy", 1},
};
enum { COUNT = sizeof settings / sizeof *settings };
static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

struct text logged, violated;
static struct text leaking;
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
void note(struct text *t, const char *format, ...) {
    va_list v;
    va_start(v, format);
    add(t, format, v);
    va_end(v);
}

const char *kind_names[] = {"device memory", "host memory",     "registered memory",
                            "address range", "physical memory", "mapping",
                            "stream",        "event",           "module",
                            "graph",         "executable graph"};
struct object *alive;
struct function *functions;
char *kernels_text;
pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
int initialized, retained, context_word;
static long calls;
__thread int current;
static struct {
    char name[64];
    long countdown;
    int code, lost;
} planned;
static int lost_code;

long setting(const char *name) {
    for (int i = 0; i < COUNT; i++)
        if (!strcmp(settings[i].name, name)) return settings[i].value;
    abort();
}
struct object *born(enum kind kind, u64 at, size_t size) {
    struct object *o = calloc(1, sizeof *o);
    o->kind = kind;
    o->at = at ? at : (u64)(uintptr_t)o;
    o->size = size;
    o->next = alive;
    return alive = o;
}
struct object *find(enum kind kind, u64 at) {
    for (struct object *o = alive; o; o = o->next)
        if (o->kind == kind && o->at == at) return o;
    return NULL;
}
void dies(struct object *o) {
    for (struct object **p = &alive; *p; p = &(*p)->next)
        if (*p == o) {
            *p = o->next;
            return;
        }
}
struct object *holding(enum kind kind, u64 at, size_t size) {
    for (struct object *o = alive; o; o = o->next)
        if (o->kind == kind && at >= o->at && at + size <= o->at + o->size) return o;
    return NULL;
}
int on_device(u64 at, size_t size) {
    if (holding(MEMORY, at, size)) return 1;
    while (size) { /* a range may be mapped in several pieces */
        struct object *o = holding(MAPPED, at, 1);
        if (!o || !o->open) return 0;
        size_t here = o->at + o->size - at;
        if (here >= size) return 1;
        at += here;
        size -= here;
    }
    return 1;
}
int on_host_pinned(u64 at, size_t size) { return holding(HOST, at, size) || holding(REGISTERED, at, size); }
size_t in_use(void) {
    size_t sum = 0;
    for (struct object *o = alive; o; o = o->next)
        if (o->kind == MEMORY || o->kind == PHYSICAL) sum += o->size;
    return sum;
}

int enter(const char *name, int needs_context, const char *format, ...) {
    char words[400];
    va_list values;
    va_start(values, format);
    vsnprintf(words, sizeof words, format, values);
    va_end(values);
    note(&logged, *words ? "%s %s" : "%s", name, words);
    calls++;
    if (lost_code) return lost_code;
    if (planned.countdown && (!*planned.name || !strcmp(planned.name, name)) && --planned.countdown == 0) {
        if (planned.lost) lost_code = planned.code;
        return planned.code;
    }
    if (!initialized && strcmp(name, "cuInit") && strcmp(name, "cuDriverGetVersion")) return NOT_INITIALIZED;
    if (needs_context && !current) {
        violation("%s without a current context", name);
        return INVALID_CONTEXT;
    }
    return OK;
}
void run_stream(struct object *s, struct object *event, long version);
void run(struct object *s) {
    struct op *op = s->first;
    if (!(s->first = op->next)) s->last = NULL;
    if (op->kind == COPY) {
        u64 from = op->staged ? (u64)(uintptr_t)op->staged : op->from;
        int to_ok = op->to_host || on_device(op->to, op->size),
            from_ok = op->staged || on_device(op->from, op->size) || on_host_pinned(op->from, op->size);
        if (to_ok && from_ok)
            memcpy((void *)(uintptr_t)op->to, (void *)(uintptr_t)from, op->size);
        else
            violation("a queued copy of %zu bytes ran after its memory was given back", op->size);
    } else if (op->kind == SET) {
        if (on_device(op->to, op->size))
            memset((void *)(uintptr_t)op->to, (int)op->from, op->size);
        else
            violation("a queued fill ran after its memory was given back");
    } else if (op->kind == RECORD) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        op->event->passed = (u64)t.tv_sec * 1000000000 + (u64)t.tv_nsec;
        if (op->version > op->event->done) op->event->done = op->version;
    } else if (op->kind == WAIT && op->event->done < op->version && op->event->stream) {
        run_stream(op->event->stream, op->event, op->version);
    }
    free(op->staged);
    free(op);
}
void run_stream(struct object *s, struct object *event, long version) {
    while (s->first && !(event && event->done >= version)) run(s);
}
void run_all(void) {
    for (struct object *o = alive; o; o = o->next)
        if (o->kind == STREAM) run_stream(o, NULL, 0);
}
void queue(struct object *s, struct op op) {
    if (s->capture) {
        free(op.staged);
        return;
    }
    struct op *kept = malloc(sizeof *kept);
    *kept = op;
    kept->next = NULL;
    if (s->last)
        s->last->next = kept;
    else
        s->first = kept;
    s->last = kept;
    if (!setting("deferred")) run_stream(s, NULL, 0);
}

void fake_set(const char *name, long value) {
    for (int i = 0; i < COUNT; i++)
        if (!strcasecmp(settings[i].name, name)) {
            settings[i].value = value;
            return;
        }
    fprintf(stderr, "fakecuda has no setting %s\n", name);
    abort();
}
void fake_fail(const char *name, long n, int code, int lost) {
    pthread_mutex_lock(&lock);
    snprintf(planned.name, sizeof planned.name, "%s", name);
    planned.countdown = n;
    planned.code = code;
    planned.lost = lost;
    pthread_mutex_unlock(&lock);
}
void fake_kernels(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) {
        perror(path);
        abort();
    }
    size_t room = 0;
    ssize_t n;
    free(kernels_text);
    kernels_text = NULL;
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
void fake_violations_forget(void) {
    violated.size = 0;
    if (violated.at) *violated.at = 0;
}
long fake_calls(void) { return calls; }
int fake_fails_left(void) { return planned.countdown > 0; }
void fake_reset(void) {
    pthread_mutex_lock(&lock);
    struct object *old = alive;
    alive = NULL;
    (void)old; /* leaked on purpose: handles must not be given out twice */
    functions = NULL;
    retained = initialized = current = 0;
    calls = 0;
    lost_code = 0;
    memset(&planned, 0, sizeof planned);
    for (struct text *t[] = {&logged, &violated, &leaking}, **p = t; p < t + 3; p++) {
        (*p)->size = 0;
        if ((*p)->at) *(*p)->at = 0;
    }
    pthread_mutex_unlock(&lock);
}
__attribute__((constructor)) static void from_environment(void) {
    char name[64];
    const char *value;
    for (int i = 0; i < COUNT; i++) {
        snprintf(name, sizeof name, "FAKECUDA_%s", settings[i].name);
        for (char *c = name; *c; c++)
            if (*c >= 'a' && *c <= 'z') *c -= 32;
        if ((value = getenv(name))) settings[i].value = atol(value);
    }
    if ((value = getenv("FAKECUDA_KERNELS"))) fake_kernels(value);
    if ((value = getenv("FAKECUDA_FAIL"))) {
        char function[64] = "";
        long n = 1;
        int code = 999, lost = 0;
        sscanf(value, "%63[^:]:%ld:%d:%d", function, &n, &code, &lost);
        fake_fail(strcmp(function, "*") ? function : "", n, code, lost);
    }
}
__attribute__((destructor)) static void report(void) {
    const char *path = getenv("FAKECUDA_REPORT");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "calls %ld\n[log]\n%s[violations]\n%s[leaks]\n%s", calls, fake_log(), fake_violations(),
            fake_leaks());
    fclose(file);
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error) {
            *name = errors[i].name;
            return OK;
        }
    *name = NULL;
    return INVALID_VALUE;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error) {
            *text = errors[i].text;
            return OK;
        }
    *text = NULL;
    return INVALID_VALUE;
}
