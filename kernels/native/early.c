/* Preloaded before an interpreter (LD_PRELOAD), this does what a start waits for while the interpreter starts: it brings
 * up the CUDA driver and a context, reads the model's header into memory, and begins to copy the model to the device.
 * Later calls of cuInit and cuDevicePrimaryCtxRetain wait for what is under way here.
 *
 * The launcher sets REFLEX_EARLY to the number of the device and REFLEX_MODEL to what it takes for the model; without
 * the first, as when the library is loaded for its other functions, nothing happens. The variables are taken out of the
 * environment again: a child is nobody's business. All of it is a guess that the program confirms by taking it over:
 * the file is compared with the one that the program opened, and what nobody takes is given back. Where there is no
 * driver, or it fails, the program's own attempt finds out and says so. */
#define _GNU_SOURCE
#include "upload.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* As upload.py has them, with the measurements. */
#define LIBRARY "libcuda.so.1"
enum { THREADS = 12, BUFFERS = 2, CHUNK = 4 << 20, SAMPLES = 32 };
#ifndef FEW_CORES /* a test on a small machine wants none to be few */
#define FEW_CORES 2
#endif
enum { HEADER = 8 << 20, HUGE_PAGE = 2 << 20 };
#define MARGIN ((size_t)512 << 20) /* bytes of the device left to everything that is not weights */

enum { BEGUN, DRIVER, CONTEXT, FILE_READ, COPYING, TIMES }; /* native.py has their names */

static struct {
    double times[TIMES]; /* CLOCK_MONOTONIC seconds; 0 for what was not reached */
    int device, is_open;
    char *model, *header;
    size_t header_size;
    struct stat file;
    void *context;
    struct upload *upload; /* its reader threads; the program's own once it has taken the base */
    uint64_t base;         /* of the file's copy on the device, 0 without */
    int file_done, driver_done, is_claimed; /* under the lock */
    pthread_mutex_t lock;
    pthread_cond_t changed;
} early = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void stamp(int which) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    early.times[which] = (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void announce(int *flag) {
    pthread_mutex_lock(&early.lock);
    *flag = 1;
    pthread_cond_broadcast(&early.changed);
    pthread_mutex_unlock(&early.lock);
}

static void await(const int *flag) {
    pthread_mutex_lock(&early.lock);
    while (!*flag) pthread_cond_wait(&early.changed, &early.lock);
    pthread_mutex_unlock(&early.lock);
}

/* Processors this process may keep busy, as environment.usable_cpus counts them but for quotas of outer groups. */
static int usable_cpus(void) {
    cpu_set_t set;
    long quota = 0, period = 0;
    int cpus = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (!file) return cpus;
    if (fscanf(file, "%ld %ld", &quota, &period) == 2 && quota > 0 && period > 0) {
        long allowed = (quota + period - 1) / period;
        if (allowed < cpus) cpus = (int)allowed;
    }
    fclose(file);
    return cpus;
}

static int is_cold(int fd, off_t size) {
    char byte;
    struct iovec room = {&byte, 1};
    for (int i = 0; i < SAMPLES; i++)
        if (preadv2(fd, &room, 1, size / SAMPLES * i, RWF_NOWAIT) < 0 && errno == EAGAIN) return 1;
    return 0;
}

/* The file's beginning, in large pages: a fault for each small one would compete with the driver's own mappings. */
static int read_header(int fd, size_t size) {
    char *mapping = mmap(NULL, HEADER + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) return 0;
    char *room = (char *)(((uintptr_t)mapping + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    madvise(room, HEADER, MADV_HUGEPAGE);
    size_t want = size < HEADER ? size : HEADER, have = 0;
    while (have < want) {
        ssize_t n = pread(fd, room + have, want - have, (off_t)have);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        have += (size_t)n;
    }
    if (have < want || want < 4 || memcmp(room, "GGUF", 4)) {
        munmap(mapping, HEADER + HUGE_PAGE);
        return 0;
    }
    early.header = room; /* stays as long as the process: what is read from it may refer to it */
    early.header_size = have;
    return 1;
}

static void open_file(void) {
    int fd = open(early.model, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return;
    if (fstat(fd, &early.file) || !S_ISREG(early.file.st_mode) || !read_header(fd, (size_t)early.file.st_size)) {
        close(fd);
        return;
    }
    early.is_open = 1;
    int cpus = usable_cpus(), threads = cpus < THREADS ? cpus : THREADS;
    /* A ring larger than the file would only cost time to page-lock. */
    off_t most = (early.file.st_size + CHUNK * BUFFERS - 1) / (CHUNK * BUFFERS);
    if (threads > most) threads = (int)most;
    struct upload *upload = cpus > FEW_CORES ? reflex_upload_new(threads, BUFFERS, CHUNK) : NULL;
    if (upload && !reflex_upload_whole(upload, fd, (uint64_t)early.file.st_size, is_cold(fd, early.file.st_size))) {
        reflex_upload_free(upload);
        upload = NULL;
    }
    if (!upload) close(fd); /* an upload closes it */
    early.upload = upload;
}

static void *read_file(void *unused) {
    open_file();
    stamp(FILE_READ);
    announce(&early.file_done);
    return unused;
}

static void start_copying(void *library) {
    int (*set_current)(void *) = (int (*)(void *))dlsym(library, "cuCtxSetCurrent");
    int (*memory)(size_t *, size_t *) = (int (*)(size_t *, size_t *))dlsym(library, "cuMemGetInfo_v2");
    int (*allocate)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(library, "cuMemAlloc_v2");
    size_t size = (size_t)early.file.st_size, left, total;
    if (!set_current || !memory || !allocate || set_current(early.context)) return;
    if (memory(&left, &total) || size + MARGIN > left || allocate(&early.base, size)) {
        early.base = 0; /* the program finds out, too, and knows what to say of it */
        return;
    }
    reflex_upload_start(early.upload, LIBRARY, early.context, early.base);
    stamp(COPYING);
}

static void drop(void) {
    void *library = early.base ? dlopen(LIBRARY, RTLD_NOW) : NULL;
    int (*set_current)(void *) = library ? (int (*)(void *))dlsym(library, "cuCtxSetCurrent") : NULL;
    int (*release)(uint64_t) = library ? (int (*)(uint64_t))dlsym(library, "cuMemFree_v2") : NULL;
    if (set_current) set_current(early.context);
    if (early.upload) reflex_upload_free(early.upload);
    if (release) release(early.base);
    early.upload = NULL;
    early.base = 0;
}

/* The driver's own exit handlers must not run while it is still starting or copying. */
static void settle(void) {
    await(&early.driver_done);
    drop();
}

static void start_driver(void) {
    void *library = dlopen(LIBRARY, RTLD_NOW);
    if (!library) return;
    atexit(settle); /* after the driver's, so that it runs before them */
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(library, "cuDevicePrimaryCtxRetain");
    if (!init || !retain || init(0)) return;
    stamp(DRIVER);
    if (retain(&early.context, early.device)) return;
    stamp(CONTEXT);
    await(&early.file_done);
    if (early.upload) start_copying(library);
}

static void *bring_up(void *unused) {
    start_driver();
    announce(&early.driver_done);
    return unused;
}

/* In a thread of its own; where there is none to be had, not at all. */
static void begin(void *(*work)(void *), int *done) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, NULL))
        *done = 1;
    else
        pthread_detach(thread);
}

/* Take a variable out of the environment. What it held stays valid: the environment is not written over. */
static const char *taken(const char *name) {
    const char *value = getenv(name);
    if (value) unsetenv(name);
    return value;
}

__attribute__((constructor)) static void start(void) {
    const char *device = taken("REFLEX_EARLY"), *model = taken("REFLEX_MODEL"), *preloads = getenv("LD_PRELOAD");
    if (!device) return;
    /* What is opened here must not become standard input or output. */
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0) return;
    stamp(BEGUN);
    early.device = (int)strtol(device, NULL, 10);
    /* One connection makes the context in half the time. The driver reads the environment once, in cuInit. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 0);
    early.model = model ? strdup(model) : NULL;
    /* The launcher put this library first; what the user preloads comes after a colon. */
    const char *others = preloads ? strchr(preloads, ':') : NULL;
    if (others) {
        char *copy = strdup(others + 1); /* setenv may move what getenv gave out */
        if (copy) setenv("LD_PRELOAD", copy, 1);
        free(copy);
    } else {
        unsetenv("LD_PRELOAD");
    }
    early.file_done = !early.model; /* before any thread looks */
    if (early.model) begin(read_file, &early.file_done);
    begin(bring_up, &early.driver_done);
}

/* When the early start reached its steps; zero for a step not reached. */
EXPORT void reflex_early_times(double out[TIMES]) { memcpy(out, early.times, sizeof early.times); }

/* The device that was started early, or -1. */
EXPORT int reflex_early_device(void) { return early.times[BEGUN] ? early.device : -1; }

/* Whether this file is the one that was opened early; its beginning, if so. Waits until that is known. */
EXPORT int reflex_early_header(uint64_t device, uint64_t inode, uint64_t size, const char **at, size_t *length) {
    if (!early.model) return 0;
    await(&early.file_done);
    if (!early.is_open || early.file.st_dev != device || early.file.st_ino != inode ||
        (uint64_t)early.file.st_size != size)
        return 0;
    *at = early.header;
    *length = early.header_size;
    return 1;
}

/* The upload of that file, for the first who asks: to be given an order, and to be taken over or dropped. */
EXPORT struct upload *reflex_early_upload(void) {
    pthread_mutex_lock(&early.lock);
    struct upload *upload = early.is_claimed ? NULL : early.upload;
    early.is_claimed |= upload != NULL;
    pthread_mutex_unlock(&early.lock);
    return upload;
}

/* Take the upload over. The address of the file's copy, which is the caller's, too; 0 where it was not started, because
 * there is no driver or not enough memory. Waits until that is known. */
EXPORT uint64_t reflex_early_base(void) {
    await(&early.driver_done);
    uint64_t base = early.base;
    early.upload = NULL;
    early.base = 0;
    return base;
}

/* Give back what nobody took over; waits for what is under way. What somebody has asked for is theirs to give back. */
EXPORT void reflex_early_drop(int is_theirs) {
    if (!early.times[BEGUN]) return;
    await(&early.driver_done);
    pthread_mutex_lock(&early.lock);
    int is_mine = is_theirs || !early.is_claimed;
    if (is_mine) early.is_claimed = 1;
    pthread_mutex_unlock(&early.lock);
    if (is_mine) drop();
}
