/* The lengths of an array of strings in a GGUF header. A turn of an interpreter's loop for each of 300,000 strings takes
 * 20 ms, and lists of so many numbers memory that has to be asked for while the driver maps its own. */
#include <stdint.h>
#include <string.h>

/* Walks `count` strings, each a little-endian u64 length and so many bytes, from `at` in a buffer of `size` bytes. Writes
 * each length, and where every `block`-th string begins. Returns where the last one ends, or 0 where the buffer ends
 * before it or a length does not fit. */
__attribute__((visibility("default"))) uint64_t reflex_string_lengths(const char *buffer, uint64_t size, uint64_t at,
                                                                      uint64_t count, uint64_t block,
                                                                      uint32_t *lengths, uint64_t *starts) {
    for (uint64_t i = 0; i < count; i++) {
        uint64_t length;
        if (at > size || size - at < sizeof length) return 0;
        memcpy(&length, buffer + at, sizeof length);
        if (length > size - at - sizeof length || length > UINT32_MAX) return 0;
        if (i % block == 0) starts[i / block] = at;
        lengths[i] = (uint32_t)length;
        at += sizeof length + length;
    }
    return at;
}
