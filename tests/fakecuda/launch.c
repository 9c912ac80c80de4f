/* Modules, launches and graphs; and NVML, as far as its energy counter. */
#include "fake.h"

CUresult cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) {
    BEGIN(1, "%s", memcmp(image, "\177ELF", 4) ? "ptx" : "cubin");
    for (unsigned i = 0; i < count; i++)
        if (options[i] == 5) strcpy(values[i], "");
    if (memcmp(image, "\177ELF", 4) && !strstr(image, ".version")) {
        code = INVALID_IMAGE;
        goto out;
    }
    *module = born(MODULE, 0, 0);
    END;
}
CUresult cuModuleUnload(void *module) {
    BEGIN_RELEASE("");
    EXPECT(MODULE, module);
    run_all();
    dies(module_o);
    END;
}
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
        f->next = functions;
        functions = f;
        *result = f;
        goto out;
    }
    code = NOT_FOUND;
    END;
}
static struct function *known(void *handle) {
    for (struct function *f = functions; f; f = f->next)
        if (f == handle) return f;
    return NULL;
}
#define FUNCTION(handle)                                                                                               \
    struct function *f = known(handle);                                                                                \
    if (!f) REFUSE(INVALID_HANDLE, "%s: no such function", __func__)
CUresult cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
    BEGIN(1, "%zu", index);
    FUNCTION(function);
    if (index >= (size_t)f->count) {
        code = INVALID_VALUE;
        goto out;
    }
    *offset = f->parameters[index].offset;
    *size = f->parameters[index].size;
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
    if (attribute == 8) {
        if (value > 227 << 10) REFUSE(INVALID_VALUE, "%d bytes of shared memory", value);
        f->shared = value;
    }
    END;
}
struct config {
    unsigned grid[3], block[3], shared;
    void *stream;
    void *attributes;
    unsigned count;
};
static CUresult look_at_launch(const char *who, struct function *f, const unsigned *grid, const unsigned *block,
                               unsigned shared, void **parameters) {
    int code = OK;
    u64 threads = (u64)block[0] * block[1] * block[2];
    if (!grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535 || !threads || threads > 1024)
        REFUSE(INVALID_VALUE, "%s of %s: grid %u %u %u, block %u %u %u", who, f->name, grid[0], grid[1], grid[2],
               block[0], block[1], block[2]);
    if (shared > (unsigned)f->shared)
        REFUSE(INVALID_VALUE, "%s of %s: %u bytes of shared memory, %d allowed", who, f->name, shared, f->shared);
    for (int i = 0; i < f->count; i++) {
        if (!parameters || !parameters[i]) REFUSE(INVALID_VALUE, "%s of %s: parameter %d is missing", who, f->name, i);
        u64 word = 0;
        if (strcmp(f->parameters[i].type, "u64")) continue;
        memcpy(&word, parameters[i], 8);
        /* Whatever looks like an address must be one. */
        if (word >> 40 && !(word >> 47) && !on_device(word, 1) && !holding(HOST, word, 1))
            REFUSE(700, "%s of %s: parameter %d points at no memory", who, f->name, i);
    }
out:
    return code;
}
CUresult cuLaunchKernelEx(const struct config *c, void *function, void **parameters, void **extra) {
    struct function *named = known(function);
    BEGIN(1, "%s grid %u %u %u block %u %u %u shared %u attributes %u", named ? named->name : "?", c->grid[0],
          c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, c->count);
    FUNCTION(function);
    void *stream = c->stream;
    EXPECT(STREAM, stream);
    if (extra) REFUSE(INVALID_VALUE, "a launch with extra options");
    if (!(code = look_at_launch(__func__, f, c->grid, c->block, c->shared, parameters)))
        queue(stream_o, (struct op){.kind = LAUNCH});
    END;
}

CUresult cuStreamBeginCapture_v2(void *stream, int mode) {
    BEGIN(1, "%d", mode);
    EXPECT(STREAM, stream);
    stream_o->capture = born(GRAPH, 0, 0);
    END;
}
CUresult cuStreamEndCapture(void *stream, void **graph) {
    BEGIN_RELEASE("");
    EXPECT(STREAM, stream);
    if (!stream_o->capture) REFUSE(INVALID_VALUE, "a recording ended that never began");
    *graph = code ? NULL : stream_o->capture;
    if (code) dies(stream_o->capture);
    stream_o->capture = NULL;
    END;
}
CUresult cuGraphInstantiateWithFlags(void **exec, void *graph, u64 flags) {
    BEGIN(1, "%lu", flags);
    EXPECT(GRAPH, graph);
    *exec = born(EXEC, 0, 0);
    END;
}
CUresult cuGraphLaunch(void *exec, void *stream) {
    BEGIN(1, "");
    EXPECT(EXEC, exec);
    EXPECT(STREAM, stream);
    queue(stream_o, (struct op){.kind = LAUNCH});
    END;
}
CUresult cuGraphDestroy(void *graph) {
    BEGIN_RELEASE("");
    EXPECT(GRAPH, graph);
    dies(graph_o);
    END;
}
CUresult cuGraphExecDestroy(void *exec) {
    BEGIN_RELEASE("");
    EXPECT(EXEC, exec);
    dies(exec_o);
    END;
}

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    *device = &context_word;
    return *bus ? 0 : 2;
}
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    *millijoules = 1234567;
    return device && setting("energy") ? 0 : 3;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.00.fake");
    return 0;
}
