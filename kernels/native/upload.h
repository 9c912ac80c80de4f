/* What early.c and upload.c share: an upload, as its maker sees it. */
#ifndef REFLEX_UPLOAD_H
#define REFLEX_UPLOAD_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* A piece of a file. It belongs to the groups first..last, more than one where it crosses a border. With `slabs` it is a
 * tensor of that many experts. */
struct chunk {
    int32_t fd;
    uint32_t first, last, slabs;
    uint64_t offset, size, place; /* in the file; bytes; on the device, counted from the base */
};

struct upload;

EXPORT struct upload *reflex_upload_new(int threads, int buffers, size_t chunk_size);
int reflex_upload_whole(struct upload *u, int fd, uint64_t size, int read_it_ahead);
EXPORT void reflex_upload_start(struct upload *u, const char *library, void *context, uint64_t base);
EXPORT void reflex_upload_free(struct upload *u);

#endif
