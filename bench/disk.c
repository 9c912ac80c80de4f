/* The disk's own rate: a file read as fast as the disk gives it, and nothing done with it. What a start with a cold page
 * cache is measured against, in the same rounds.
 *
 *   cc -O1 bench/disk.c -o disk -lpthread
 *   ./disk FILE direct             past the page cache (O_DIRECT)
 *   ./disk FILE buffered           through it
 *   ./disk FILE direct 4 1         with 4 threads, 1 MiB at a time (12 and 4)
 *
 * Each thread reads the next piece that nobody has. Prints the bytes when all are there. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST = 256, PAGE = 4096 };

static int fd;
static size_t size, piece;
static atomic_size_t next;

static void fail(const char *what, int error) {
    fprintf(stderr, "disk: %s: %s\n", what, strerror(error));
    _exit(1);
}

static void *reader(void *unused) {
    void *buffer;
    if (posix_memalign(&buffer, PAGE, piece)) fail("room for a piece", ENOMEM);
    for (size_t at; (at = atomic_fetch_add(&next, piece)) < size;)
        for (size_t end = size - at < piece ? size : at + piece; at < end;) {
            /* What is asked for is whole pages, to the file's end and beyond. */
            size_t n = (end - at + PAGE - 1) / PAGE * PAGE;
            ssize_t got = pread(fd, buffer, n, (off_t)at);
            if (got <= 0) fail("reading", got ? errno : ENODATA);
            at += (size_t)got;
        }
    return unused;
}

int main(int count, char **arguments) {
    static pthread_t threads[MOST];
    if (count < 3 || (strcmp(arguments[2], "direct") && strcmp(arguments[2], "buffered"))) {
        fprintf(stderr, "usage: disk FILE direct|buffered [THREADS [MIB]]\n");
        return 2;
    }
    int n = count > 3 ? atoi(arguments[3]) : 12;
    piece = (size_t)(count > 4 ? atoi(arguments[4]) : 4) << 20;
    if (n < 1 || n > MOST || piece < 1 << 20) {
        fprintf(stderr, "disk: 1 to %d threads, and at least 1 MiB\n", MOST);
        return 2;
    }
    struct stat st;
    fd = open(arguments[1], O_RDONLY | (arguments[2][0] == 'd' ? O_DIRECT : 0));
    if (fd < 0 || fstat(fd, &st)) fail(arguments[1], errno);
    size = (size_t)st.st_size;
    for (int i = 0; i < n; i++) {
        int error = pthread_create(&threads[i], NULL, reader, NULL);
        if (error) fail("a thread", error);
    }
    for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
    printf("%zu\n", size);
    return 0;
}
