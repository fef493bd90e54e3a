/* A CUDA runtime without a GPU. Device memory is host memory; a stream runs each operation at once, so that it is always empty and
 * an event has always happened. Loaded before torch, its functions are found before those of libcudart. Functions that torch is
 * linked with and never calls here are left out: they are bound lazily, and a call of one ends the process with its name.
 *
 * EMULATED_GPUS (2) and EMULATED_GPU_GB (16): number of devices, and memory of each. An empty CUDA_VISIBLE_DEVICES hides them. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void *handle;
enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NO_KERNEL = 98, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_SUPPORTED = 801 };
enum { PINNED = -1, PAGEABLE = -2, MAX_DEVICES = 64 };
static __thread int current_device;

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}
static int device_count(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    return visible && !*visible ? 0 : (int)setting("EMULATED_GPUS", 2);
}
static size_t device_memory(void) { return (size_t)setting("EMULATED_GPU_GB", 16) << 30; }

/* Synchronization, recorded for copies.py while copies are in flight. Python reads the records when it needs them: it is never
 * called from here, where the caller may hold a lock of the allocator. Operations: 's' stream, 'd' device or 'e' event synchronized,
 * 'q' event queried, 'r' event recorded on a stream, 'w' stream waits for an event, 'x' event destroyed. */
struct record { uintptr_t operation, stream, event; };
static struct record *records;
static size_t record_count, record_room;
static int recording;
static pthread_mutex_t record_lock = PTHREAD_MUTEX_INITIALIZER;

void emulated_record(int on) { recording = on; }
static int record(int operation, handle stream, handle event) {
    if (!recording) return SUCCESS;
    pthread_mutex_lock(&record_lock);
    if (record_count == record_room) records = realloc(records, (record_room = 2 * record_room + 64) * sizeof *records);
    records[record_count++] = (struct record){operation, (uintptr_t)stream, (uintptr_t)event};
    pthread_mutex_unlock(&record_lock);
    return SUCCESS;
}
size_t emulated_take_records(struct record *into, size_t most) { /* the oldest ones */
    pthread_mutex_lock(&record_lock);
    size_t count = record_count < most ? record_count : most;
    memcpy(into, records, count * sizeof *records);
    memmove(records, records + count, (record_count - count) * sizeof *records);
    record_count -= count;
    pthread_mutex_unlock(&record_lock);
    return count;
}

/* Memory */
struct block { char *start; size_t size; int device; struct block *next; };
static struct block *blocks;
static size_t used[MAX_DEVICES];
static pthread_mutex_t block_lock = PTHREAD_MUTEX_INITIALIZER;

static void add_block(void *start, size_t size, int device) {
    struct block *made = malloc(sizeof *made);
    pthread_mutex_lock(&block_lock);
    *made = (struct block){start, size, device, blocks};
    blocks = made;
    if (device >= 0) used[device] += size;
    pthread_mutex_unlock(&block_lock);
}
static int remove_block(void *start) {
    struct block *found = NULL;
    pthread_mutex_lock(&block_lock);
    for (struct block **at = &blocks; *at && !found; at = &(*at)->next)
        if ((*at)->start == (char *)start) { found = *at; *at = found->next; break; }
    if (found && found->device >= 0) used[found->device] -= found->size;
    pthread_mutex_unlock(&block_lock);
    free(found);
    return found != NULL;
}
static int allocate(void **pointer, size_t size, int device) {
    *pointer = NULL;
    if (device >= 0 && used[device] + size > device_memory()) return OUT_OF_MEMORY;
    if (posix_memalign(pointer, 512, size + 512)) return OUT_OF_MEMORY;
    memset(*pointer, 0xff, size); /* NaN */
    add_block(*pointer, size, device);
    return SUCCESS;
}
static int release(void *pointer) {
    if (remove_block(pointer)) free(pointer);
    return SUCCESS;
}
static int location(const void *pointer) { /* a device, PINNED or PAGEABLE */
    int found = PAGEABLE;
    pthread_mutex_lock(&block_lock);
    for (struct block *at = blocks; at; at = at->next)
        if ((char *)pointer >= at->start && (char *)pointer < at->start + at->size) { found = at->device; break; }
    pthread_mutex_unlock(&block_lock);
    return found;
}
int cudaMalloc(void **p, size_t n) { return allocate(p, n, current_device); }
int cudaMallocAsync(void **p, size_t n, handle s) { return allocate(p, n, current_device); }
int cudaFree(void *p) { return release(p); }
int cudaFreeAsync(void *p, handle s) { return release(p); }
int cudaHostAlloc(void **p, size_t n, unsigned flags) { return allocate(p, n, PINNED); }
int cudaFreeHost(void *p) { return release(p); }
int cudaHostRegister(void *p, size_t n, unsigned flags) { add_block(p, n, PINNED); return SUCCESS; }
int cudaHostUnregister(void *p) { remove_block(p); return SUCCESS; }
int cudaMemGetInfo(size_t *unused, size_t *all) { *all = device_memory(); *unused = *all - used[current_device]; return SUCCESS; }
int cudaMemcpy(void *to, const void *from, size_t n, int kind) { memmove(to, from, n); return SUCCESS; }
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, handle s) { memmove(to, from, n); return SUCCESS; }
int cudaMemcpyPeerAsync(void *to, int d, const void *from, int e, size_t n, handle s) { memmove(to, from, n); return SUCCESS; }
int cudaMemset(void *p, int value, size_t n) { memset(p, value, n); return SUCCESS; }
int cudaMemsetAsync(void *p, int value, size_t n, handle s) { memset(p, value, n); return SUCCESS; }
struct pointer_attributes { int type, device; void *on_device, *on_host; };
int cudaPointerGetAttributes(struct pointer_attributes *a, const void *p) {
    int found = location(p);
    a->type = found == PAGEABLE ? 0 : found == PINNED ? 1 : 2;
    a->device = found == PINNED ? current_device : found;
    a->on_device = found == PAGEABLE ? NULL : (void *)p;
    a->on_host = found == PINNED ? (void *)p : NULL;
    return SUCCESS;
}

/* Devices: H100's capability, 9.0 */
int cudaGetDeviceCount(int *n) { *n = device_count(); return *n ? SUCCESS : NO_DEVICE; }
int cudaGetDevice(int *d) { *d = current_device; return SUCCESS; }
int cudaSetDevice(int d) {
    if (d < 0 || d >= device_count()) return INVALID_DEVICE;
    current_device = d;
    return SUCCESS;
}
int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return SUCCESS; }
int cudaDeviceEnablePeerAccess(int d, unsigned flags) { return SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return SUCCESS;
}
int cudaDriverGetVersion(int *v) { *v = 13000; return SUCCESS; }
int cudaRuntimeGetVersion(int *v) { *v = 13000; return SUCCESS; }
int cudaDeviceGetPCIBusId(char *text, int n, int d) { snprintf(text, n, "0000:%02x:00.0", d + 1); return SUCCESS; }
int cudaDeviceGetAttribute(int *value, int attribute, int d) {
    switch (attribute) {
    case 10: *value = 32; break;    /* warp size */
    case 16: *value = 132; break;   /* multiprocessors */
    case 39: *value = 2048; break;  /* threads of a multiprocessor */
    case 75: *value = 9; break;     /* capability */
    default: *value = 0;
    }
    return SUCCESS;
}
struct properties { /* the beginning of CUDA 13's */
    char name[256], uuid[16], luid[8];
    unsigned mask;
    size_t memory, shared;
    int registers, warp;
    size_t pitch;
    int threads, dim[3], grid[3];
    size_t constant;
    int major, minor;
    size_t alignment, pitch_alignment;
    int processors;
};
int cudaGetDeviceProperties(struct properties *p, int d) {
    memset(p, 0, 1000); /* all of CUDA 13's */
    strcpy(p->name, "Emulated GPU");
    p->uuid[0] = (char)(1 + d);
    p->memory = device_memory();
    p->shared = 49152;
    p->registers = 65536;
    p->warp = 32;
    p->threads = p->dim[0] = p->dim[1] = 1024;
    p->dim[2] = 64;
    p->grid[0] = 2147483647;
    p->grid[1] = p->grid[2] = 65535;
    p->major = 9;
    p->processors = 132;
    return SUCCESS;
}
int cudaDeviceSynchronize(void) { return record('d', NULL, NULL); }

/* Streams and events */
static int create_stream(handle *s) {
    static long created;
    *s = (handle)(uintptr_t)(4096 + 64 * __sync_add_and_fetch(&created, 1));
    return SUCCESS;
}
int cudaStreamCreate(handle *s) { return create_stream(s); }
int cudaStreamCreateWithFlags(handle *s, unsigned flags) { return create_stream(s); }
int cudaStreamCreateWithPriority(handle *s, unsigned flags, int priority) { return create_stream(s); }
int cudaStreamDestroy(handle s) { return SUCCESS; }
int cudaStreamGetPriority(handle s, int *p) { *p = 0; return SUCCESS; }
int cudaStreamQuery(handle s) { return SUCCESS; }
int cudaStreamSynchronize(handle s) { return record('s', s, NULL); }
int cudaStreamWaitEvent(handle s, handle e, unsigned flags) { return record('w', s, e); }
int cudaStreamAddCallback(handle s, void (*f)(handle, int, void *), void *data, unsigned flags) { f(s, 0, data); return SUCCESS; }
int cudaLaunchHostFunc(handle s, void (*f)(void *), void *data) { f(data); return SUCCESS; }
int cudaStreamIsCapturing(handle s, int *status) { *status = 0; return SUCCESS; }
int cudaStreamGetCaptureInfo(handle s, int *status, unsigned long long *id) {
    *status = 0;
    if (id) *id = 0;
    return SUCCESS;
}
int cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }
struct event { double milliseconds; };
int cudaEventCreateWithFlags(handle *e, unsigned flags) { *e = calloc(1, sizeof(struct event)); return SUCCESS; }
int cudaEventCreate(handle *e) { return cudaEventCreateWithFlags(e, 0); }
int cudaEventDestroy(handle e) { record('x', NULL, e); free(e); return SUCCESS; }
int cudaEventRecord(handle e, handle s) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    ((struct event *)e)->milliseconds = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    return record('r', s, e);
}
int cudaEventRecordWithFlags(handle e, handle s, unsigned flags) { return cudaEventRecord(e, s); }
int cudaEventQuery(handle e) { return record('q', NULL, e); }
int cudaEventSynchronize(handle e) { return record('e', NULL, e); }
int cudaEventElapsedTime(float *ms, handle a, handle b) {
    *ms = (float)(((struct event *)b)->milliseconds - ((struct event *)a)->milliseconds);
    return SUCCESS;
}

/* Kernels are registered and never launched: kernels.py replaces those that torch's operators have. */
static handle binary;
handle *__cudaRegisterFatBinary(void *image) { return &binary; }
void __cudaRegisterFatBinaryEnd(handle *image) {}
void __cudaUnregisterFatBinary(handle *image) {}
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(handle *image) { return 0; }
int __cudaPushCallConfiguration(void) { return SUCCESS; }
int __cudaPopCallConfiguration(void) { return SUCCESS; }
int __cudaGetKernel(void) { return NO_KERNEL; }
int cudaLaunchKernel(void) { return NO_KERNEL; }
int __cudaLaunchKernel(void) { return NO_KERNEL; }
int cudaLaunchKernelExC(void) { return NO_KERNEL; }
int cudaFuncSetAttribute(void) { return SUCCESS; }

/* Errors, and functions of other libraries that are called while torch is imported or a job starts */
int cudaGetLastError(void) { return SUCCESS; }
int cudaPeekAtLastError(void) { return SUCCESS; }
const char *cudaGetErrorString(int error) {
    switch (error) {
    case SUCCESS: return "no error";
    case OUT_OF_MEMORY: return "out of memory";
    case NO_KERNEL: return "a kernel of CUDA that the emulated device does not replace";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    default: return "not supported by the emulated device";
    }
}
const char *cudaGetErrorName(int error) { return cudaGetErrorString(error); }
static int not_supported(void) { return NOT_SUPPORTED; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = 1;
    return SUCCESS;
}
int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags, int *status) {
    *f = strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)not_supported : (void *)cuDevicePrimaryCtxGetState;
    if (status) *status = 0;
    return SUCCESS;
}
int cudaProfilerStart(void) { return SUCCESS; }
int cudaProfilerStop(void) { return SUCCESS; }
size_t cudnnGetVersion(void) { return 99900; }
int ncclGetVersion(int *v) { *v = 22900; return SUCCESS; }
void nvshmem_init(void) {}
void nvshmemi_get_mem_handle(void) {}
char nvshmemi_device_only_state[65536];
