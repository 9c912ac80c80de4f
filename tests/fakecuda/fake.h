/* A libcuda without a device, for tests: gives out host memory, records calls, and looks closely.
 *
 * It runs no kernel, but everything around one: it checks handles, the bounds of every copy, the parameters of every
 * launch, that the calling thread has the context, and what was never given back. Copies run at once or, with
 * "deferred", when someone waits for them, so that a missing wait shows as wrong bytes. Events are timed by the host's
 * clock. Any call can be made to fail.
 *
 * fake_set("deferred", 1)         settings, listed in `settings`; also from the environment as FAKECUDA_DEFERRED=1
 * fake_fail(name, n, code, lost)  the n-th call (1 is the next; of `name`, or of any function if it is empty) returns
 *                                 code; with `lost`, so does every call after it. Calls that take something back do so
 *                                 all the same, as the real ones do. FAKECUDA_FAIL=name:n:code:lost
 * fake_kernels(path)              the kernels.txt that modules are made of. FAKECUDA_KERNELS=path
 * fake_log() fake_violations() fake_leaks()   texts, a line each; fake_calls() counts; fake_reset() forgets all
 * FAKECUDA_REPORT=path            what these say, written there when the process ends */
#pragma once
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
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
typedef int CUresult;
enum {
    OK,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
    CAPTURING = 906
};

enum { GRANULE = 2 << 20 };

#pragma GCC visibility push(hidden)
struct text {
    char *at;
    size_t size, room;
};
enum kind { MEMORY, HOST, REGISTERED, RESERVED, PHYSICAL, MAPPED, STREAM, EVENT, MODULE, GRAPH, EXEC, KINDS };
enum op_kind { COPY, SET, RECORD, WAIT, LAUNCH };
struct op {
    enum op_kind kind;
    u64 to, from;
    size_t size;
    char *staged;
    int to_host;
    struct object *event;
    long version;
    struct op *next;
};
struct object {
    enum kind kind;
    u64 at;
    size_t size;
    int open; /* ranges: `open` once readable and writable */
    struct op *first, *last;
    struct object *capture; /* streams */
    long recorded, done;
    struct object *stream; /* events */
    u64 passed;            /* when the last record ran: nanoseconds */
    int untimed;
    struct object *next;
};
struct function {
    char name[256];
    int count, shared;
    struct {
        char type[24];
        size_t offset, size;
    } parameters[64];
    struct function *next;
};

extern const char *kind_names[];
extern struct object *alive;
extern struct function *functions;
extern char *kernels_text;
extern pthread_mutex_t lock;
extern struct text logged, violated;
extern int initialized, retained, context_word;
extern __thread int current;

void note(struct text *t, const char *format, ...);
#define violation(...) note(&violated, __VA_ARGS__)
long setting(const char *name);
struct object *born(enum kind kind, u64 at, size_t size);
struct object *find(enum kind kind, u64 at);
void dies(struct object *o);
struct object *holding(enum kind kind, u64 at, size_t size);
int on_device(u64 at, size_t size);
int on_host_pinned(u64 at, size_t size);
size_t in_use(void);
int enter(const char *name, int needs_context, const char *format, ...);
void run(struct object *s);
void run_stream(struct object *s, struct object *event, long version);
void run_all(void);
void queue(struct object *s, struct op op);
#pragma GCC visibility pop

/* A function is BEGIN, its work, END; one that takes something back goes on although it was made to fail. */
#define BEGIN(needs_context, ...)                                                                                      \
    int code;                                                                                                          \
    pthread_mutex_lock(&lock);                                                                                         \
    code = enter(__func__, needs_context, __VA_ARGS__);                                                                \
    if (code) goto out
#define BEGIN_RELEASE(...)                                                                                             \
    int code;                                                                                                          \
    pthread_mutex_lock(&lock);                                                                                         \
    code = enter(__func__, 1, __VA_ARGS__) /* and go on */
#define END                                                                                                            \
    out:                                                                                                               \
    pthread_mutex_unlock(&lock);                                                                                       \
    return code
#define REFUSE(what, ...)                                                                                              \
    do {                                                                                                               \
        code = (what);                                                                                                 \
        violation(__VA_ARGS__);                                                                                        \
        goto out;                                                                                                      \
    } while (0)
#define EXPECT(kind, handle)                                                                                           \
    struct object *handle##_o = find(kind, (u64)(uintptr_t)(handle));                                                  \
    if (!handle##_o) REFUSE(INVALID_HANDLE, "%s: no such %s", __func__, kind_names[kind])
