/* The floor of a cold start: bring the CUDA driver up and copy a file from the page cache to the device, nothing else.
 * What `reflex run` takes beyond it is ours; every cold-start figure is reported against it, in the same run.
 *
 *   cc -O1 bench/floor.c -o floor -ldl -lpthread
 *   ./floor T              the driver only
 *   ./floor T FILE         the driver, and the file on the device
 *
 * T is CLOCK_MONOTONIC in seconds when the process was started. Prints milliseconds since T: cuInit done, context done,
 * everything on the device. One connection (CUDA_DEVICE_MAX_CONNECTIONS=1 unless set); 12 reader threads with 2 buffers
 * of 4 MiB each, whose pages are touched while the driver starts. */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 12, BUFFERS = 2, CHUNK = 4 << 20, HUGE_PAGE = 2 << 20 };

static struct {
    int (*init)(unsigned);
    int (*context)(void **, int);
    int (*set_current)(void *);
    int (*alloc)(uint64_t *, size_t);
    int (*host_register)(void *, size_t, unsigned);
    int (*copy)(uint64_t, const void *, size_t, void *);
    int (*stream_create)(void **, unsigned);
    int (*stream_synchronize)(void *);
    int (*event_create)(void **, unsigned);
    int (*event_record)(void *, void *);
    int (*event_synchronize)(void *);
} cu;

static void *context;
static uint64_t device;
static char *ring;
static int fd;
static size_t size;
static atomic_size_t next;
static atomic_int ready;

static double milliseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void check(int code, const char *what) {
    if (code) {
        fprintf(stderr, "floor: %s failed: error %d\n", what, code);
        _exit(1);
    }
}

static void *reader(void *number) {
    char *mine = ring + (size_t)number * BUFFERS * CHUNK;
    void *stream, *events[BUFFERS];
    const unsigned non_blocking = 1, no_timing = 2;
    for (size_t at = 0; at < (size_t)BUFFERS * CHUNK; at += 4096) mine[at] = 0;
    while (!ready) usleep(50);
    check(cu.set_current(context), "making the context current");
    check(cu.host_register(mine, (size_t)BUFFERS * CHUNK, 0), "page-locking");
    check(cu.stream_create(&stream, non_blocking), "creating a stream");
    for (int b = 0; b < BUFFERS; b++) check(cu.event_create(&events[b], no_timing), "creating an event");
    for (int turn = 0;; turn++) {
        size_t at = atomic_fetch_add(&next, (size_t)CHUNK);
        if (at >= size) break;
        int b = turn % BUFFERS;
        char *buffer = mine + (size_t)b * CHUNK;
        if (turn >= BUFFERS) check(cu.event_synchronize(events[b]), "waiting for a copy");
        size_t n = size - at < CHUNK ? size - at : CHUNK;
        if (pread(fd, buffer, n, (off_t)at) != (ssize_t)n) check(1, "reading");
        check(cu.copy(device + at, buffer, n, stream), "copying");
        check(cu.event_record(events[b], stream), "recording an event");
    }
    check(cu.stream_synchronize(stream), "waiting for the copies");
    return NULL;
}

static void load_driver(void) {
    static const char *names[] = {"cuInit",         "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent",
                                  "cuMemAlloc_v2",  "cuMemHostRegister_v2",     "cuMemcpyHtoDAsync_v2",
                                  "cuStreamCreate", "cuStreamSynchronize",      "cuEventCreate",
                                  "cuEventRecord",  "cuEventSynchronize"}; /* as in `cu` */
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "floor: %s\n", dlerror());
        _exit(2);
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(((void **)&cu)[i] = dlsym(library, names[i]))) check(1, names[i]);
}

int main(int count, char **arguments) {
    pthread_t threads[THREADS];
    if (count < 2) {
        fprintf(stderr, "usage: floor T [FILE]\n");
        return 2;
    }
    double start = atof(arguments[1]) * 1e3;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 0);
    if (count > 2) {
        struct stat st;
        fd = open(arguments[2], O_RDONLY);
        if (fd < 0 || fstat(fd, &st)) check(1, "opening the file");
        size = (size_t)st.st_size;
        size_t bytes = (size_t)THREADS * BUFFERS * CHUNK;
        ring = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (ring == MAP_FAILED) check(1, "mapping the ring");
        ring = (char *)(((uintptr_t)ring + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
        madvise(ring, bytes, MADV_HUGEPAGE);
        for (size_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, reader, (void *)i);
    }
    load_driver();
    check(cu.init(0), "cuInit");
    double driver = milliseconds();
    check(cu.context(&context, 0), "making the context");
    check(cu.set_current(context), "making the context current");
    double made = milliseconds(), done = made;
    if (count > 2) {
        check(cu.alloc(&device, size), "allocating");
        ready = 1;
        for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
        done = milliseconds();
    }
    printf("%.0f %.0f %.0f\n", driver - start, made - start, done - start);
    fflush(stdout);
    _exit(0);
}
