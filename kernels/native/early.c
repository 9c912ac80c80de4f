/* Preloaded before an interpreter (LD_PRELOAD), this starts the CUDA driver in a thread, so that the interpreter's own
 * start costs nothing: later calls of cuInit and cuDevicePrimaryCtxRetain wait for what is under way here.
 *
 * The launcher sets REFLEX_EARLY to the number of the device; without it, as when the library is loaded for its other
 * functions, nothing happens. Both variables are taken out of the environment again: a child is nobody's business.
 * Where there is no driver, or it fails, the program's own attempt finds out and says so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double times[3]; /* CLOCK_MONOTONIC seconds: begun, cuInit done, context made */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;

/* The driver's own exit handlers must not run while it is still starting. */
static void settle(void) { pthread_mutex_lock(&busy); }

static void start_driver(int device) {
    void *context, *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return;
    atexit(settle); /* after the driver's, so that it runs before them */
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(library, "cuDevicePrimaryCtxRetain");
    if (!init || !retain || init(0)) return;
    times[1] = now();
    if (retain(&context, device) == 0) times[2] = now();
}

static void *bring_up(void *device) {
    pthread_mutex_lock(&busy);
    start_driver((int)(long)device);
    pthread_mutex_unlock(&busy);
    return NULL;
}

__attribute__((constructor)) static void begin(void) {
    const char *device = getenv("REFLEX_EARLY"), *preloads = getenv("LD_PRELOAD");
    pthread_t thread;
    if (!device) return;
    times[0] = now();
    /* One connection makes the context in half the time. The driver reads the environment once, in cuInit. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 0);
    if (pthread_create(&thread, NULL, bring_up, (void *)strtol(device, NULL, 10)) == 0) pthread_detach(thread);
    unsetenv("REFLEX_EARLY");
    /* The launcher put this library first; what the user preloads comes after a colon. */
    const char *others = preloads ? strchr(preloads, ':') : NULL;
    if (others) {
        char *copy = strdup(others + 1); /* setenv may move what getenv gave out */
        if (copy) setenv("LD_PRELOAD", copy, 1);
        free(copy);
    } else {
        unsetenv("LD_PRELOAD");
    }
}

/* When the early start reached its three steps; zero for a step not reached. */
__attribute__((visibility("default"))) void reflex_early_times(double out[3]) { memcpy(out, times, sizeof times); }
