/* The smallest Triton backend in C: FP32 x -> FP32 y, the same values, after as many milliseconds as the largest x says.
 *
 * It stands for backends that have no waker of their own, as Triton's C++ ones. The parts of the TRITONBACKEND API that it
 * needs are declared by hand (triton-inference-server/core, include/triton/core/tritonbackend.h):
 *
 *     gcc -shared -fPIC -O2 -o libtriton_sleep.so sleep_backend.c
 *
 * Triton also finds the library in the folder of a model that says `backend: "sleep"`.
 */
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct Error Error;
typedef struct Instance Instance;
typedef struct Request Request;
typedef struct Input Input;
typedef struct Response Response;
typedef struct Output Output;

enum { FP32 = 11, CPU = 0, RELEASE_ALL = 1, COMPLETE_FINAL = 1 };

extern Error *TRITONBACKEND_RequestInputByIndex(Request *, uint32_t, Input **);
extern Error *TRITONBACKEND_InputProperties(
    Input *, const char **name, uint32_t *type, const int64_t **shape, uint32_t *dims, uint64_t *bytes, uint32_t *buffers);
extern Error *TRITONBACKEND_InputBuffer(
    Input *, uint32_t index, const void **buffer, uint64_t *bytes, uint32_t *memory, int64_t *memory_id);
extern Error *TRITONBACKEND_RequestRelease(Request *, uint32_t flags);
extern Error *TRITONBACKEND_ResponseNew(Response **, Request *);
extern Error *TRITONBACKEND_ResponseOutput(
    Response *, Output **, const char *name, uint32_t type, const int64_t *shape, uint32_t dims);
extern Error *TRITONBACKEND_OutputBuffer(
    Output *, void **buffer, uint64_t bytes, uint32_t *memory, int64_t *memory_id);
extern Error *TRITONBACKEND_ResponseSend(Response *, uint32_t flags, Error *);
extern Error *TRITONBACKEND_ModelInstanceReportStatistics(
    Instance *, Request *, bool success, uint64_t start, uint64_t compute_start, uint64_t compute_end, uint64_t end);
extern Error *TRITONBACKEND_ModelInstanceReportBatchStatistics(
    Instance *, uint64_t batch, uint64_t start, uint64_t compute_start, uint64_t compute_end, uint64_t end);

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static const float *values(Request *request, const int64_t **shape, uint32_t *dims, uint64_t *bytes) {
    Input *input;
    const char *name;
    const void *buffer;
    uint32_t type, buffers, memory = CPU;
    int64_t memory_id = 0;
    TRITONBACKEND_RequestInputByIndex(request, 0, &input);
    TRITONBACKEND_InputProperties(input, &name, &type, shape, dims, bytes, &buffers);
    TRITONBACKEND_InputBuffer(input, 0, &buffer, bytes, &memory, &memory_id);
    return buffer;
}

Error *TRITONBACKEND_ModelInstanceExecute(Instance *instance, Request **requests, uint32_t count) {
    uint64_t start = now_ns(), bytes, rows = 0;
    const int64_t *shape;
    uint32_t dims;
    float longest_ms = 0;
    for (uint32_t i = 0; i < count; ++i) {
        const float *x = values(requests[i], &shape, &dims, &bytes);
        rows += (uint64_t)shape[0];
        for (uint64_t j = 0; j < bytes / sizeof(float); ++j)
            if (x[j] > longest_ms)
                longest_ms = x[j];
    }
    if (longest_ms > 0) {
        struct timespec pause = {(time_t)(longest_ms / 1000), (long)((int64_t)(longest_ms * 1e6f) % 1000000000)};
        nanosleep(&pause, NULL);
    }
    uint64_t end = now_ns();
    for (uint32_t i = 0; i < count; ++i) {
        Response *response;
        Output *output;
        void *y;
        uint32_t memory = CPU;
        int64_t memory_id = 0;
        const float *x = values(requests[i], &shape, &dims, &bytes);
        TRITONBACKEND_ResponseNew(&response, requests[i]);
        TRITONBACKEND_ResponseOutput(response, &output, "y", FP32, shape, dims);
        TRITONBACKEND_OutputBuffer(output, &y, bytes, &memory, &memory_id);
        memcpy(y, x, bytes);
        TRITONBACKEND_ResponseSend(response, COMPLETE_FINAL, NULL);
        TRITONBACKEND_ModelInstanceReportStatistics(instance, requests[i], true, start, start, end, end);
        TRITONBACKEND_RequestRelease(requests[i], RELEASE_ALL);
    }
    TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, rows, start, start, end, end);
    return NULL;
}
