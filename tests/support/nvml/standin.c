/* A stand-in for libnvidia-ml.so.1: the functions pynvml calls, with answers from a text file.
 *
 * STANDIN_NVML names the file. It is read anew at every call, so a test can change the machine at any moment:
 *
 *   order 0 1                    the devices NVML counts, in its order
 *   0.name Tesla Nothing         also .uuid .total .used .util .mode .mig
 *   0.compute 100:5000 200:-     processes as pid:bytes, "-" is "not available"; .graphics likewise
 *   0.samples 100:7000000:40     utilisation as pid:time stamp:percent
 *   fail nvmlInitWithFlags 9     the error a function returns; for one device: fail 0.nvmlDeviceGetName 15
 *   hang nvmlDeviceGetUtilizationRates 3
 *
 * Every call of nvmlInitWithFlags adds a byte to the file named by STANDIN_NVML with ".inits" at its end.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9 };

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Rates;
typedef struct { unsigned int pid; unsigned long long bytes; unsigned int gpu_instance, compute_instance; } Process;
typedef struct { unsigned int pid; unsigned long long time; unsigned int sm, memory, encoder, decoder; } Sample;

static int open_count = 0;

/* The rest of the line that begins with `key`, or NULL. */
static const char *value_of(const char *key)
{
    static char line[4096];
    size_t length = strlen(key);
    const char *name = getenv("STANDIN_NVML");
    FILE *file = name ? fopen(name, "r") : NULL;
    const char *found = NULL;
    while (file && !found && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, key, length) && (line[length] == ' ' || !line[length]))
            found = line + length + (line[length] == ' ');
    }
    if (file)
        fclose(file);
    return found;
}

static int device_of(void *handle) { return (int)(intptr_t)handle - 1; }

static const char *of_device(void *handle, const char *what)
{
    char key[128];
    snprintf(key, sizeof key, "%d.%s", device_of(handle), what);
    return value_of(key);
}

static unsigned long long number(void *handle, const char *what)
{
    const char *value = of_device(handle, what);
    return value ? strtoull(value, NULL, 10) : 0;
}

static int failure(const char *function)
{
    char key[128];
    snprintf(key, sizeof key, "hang %s", function);
    const char *value = value_of(key);
    if (value)
        usleep((useconds_t)(atof(value) * 1e6));
    snprintf(key, sizeof key, "fail %s", function);
    value = value_of(key);
    return value ? atoi(value) : SUCCESS;
}

static int device_failure(void *handle, const char *function)
{
    char key[128];
    if (open_count <= 0)
        return UNINITIALIZED;
    int error = failure(function);
    if (error)
        return error;
    snprintf(key, sizeof key, "fail %d.%s", device_of(handle), function);
    const char *value = value_of(key);
    return value ? atoi(value) : SUCCESS;
}

int nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    char name[4096];
    snprintf(name, sizeof name, "%s.inits", getenv("STANDIN_NVML") ? getenv("STANDIN_NVML") : "/dev/null");
    FILE *file = fopen(name, "a");
    if (file) {
        fputc('.', file);
        fclose(file);
    }
    int error = failure("nvmlInitWithFlags");
    if (!error)
        open_count++;
    return error;
}

int nvmlShutdown(void)
{
    if (open_count <= 0)
        return UNINITIALIZED;
    open_count--;
    return failure("nvmlShutdown");
}

const char *nvmlErrorString(int error)
{
    static char text[32];
    snprintf(text, sizeof text, "stand-in error %d", error);
    return text;
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    if (open_count <= 0)
        return UNINITIALIZED;
    const char *order = value_of("order");
    char *end;
    for (*count = 0; order && (strtol(order, &end, 10), end != order); order = end)
        ++*count;
    return failure("nvmlDeviceGetCount_v2");
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle)
{
    if (open_count <= 0)
        return UNINITIALIZED;
    const char *order = value_of("order");
    char *end;
    for (; order; order = end, index--) {
        long device = strtol(order, &end, 10);
        if (end == order)
            break;
        if (index == 0) {
            *handle = (void *)(intptr_t)(device + 1);
            return device_failure(*handle, "nvmlDeviceGetHandleByIndex_v2");
        }
    }
    return INVALID;
}

static int text(void *handle, const char *function, const char *what, char *into, unsigned int size)
{
    int error = device_failure(handle, function);
    if (error)
        return error;
    const char *value = of_device(handle, what);
    snprintf(into, size, "%s", value ? value : "");
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned int size)
{
    return text(handle, "nvmlDeviceGetName", "name", name, size);
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned int size)
{
    return text(handle, "nvmlDeviceGetUUID", "uuid", uuid, size);
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory)
{
    int error = device_failure(handle, "nvmlDeviceGetMemoryInfo");
    if (error)
        return error;
    memory->total = number(handle, "total");
    memory->used = number(handle, "used");
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeMode(void *handle, unsigned int *mode)
{
    *mode = (unsigned int)number(handle, "mode");
    return device_failure(handle, "nvmlDeviceGetComputeMode");
}

int nvmlDeviceGetMigMode(void *handle, unsigned int *current, unsigned int *pending)
{
    const char *value = of_device(handle, "mig");
    if (!value)
        return NOT_SUPPORTED;
    *current = *pending = (unsigned int)atoi(value);
    return device_failure(handle, "nvmlDeviceGetMigMode");
}

int nvmlDeviceGetUtilizationRates(void *handle, Rates *rates)
{
    int error = device_failure(handle, "nvmlDeviceGetUtilizationRates");
    rates->gpu = (unsigned int)number(handle, "util");
    rates->memory = 0;
    return error;
}

/* The processes listed under `what`; like NVML, says how many there are when there is too little room. */
static int processes(void *handle, const char *function, const char *what, unsigned int *count, Process *into)
{
    int error = device_failure(handle, function);
    if (error)
        return error;
    const char *at = of_device(handle, what);
    unsigned int found = 0, room = into ? *count : 0;
    while (at && *at) {
        char *end;
        unsigned int pid = (unsigned int)strtoul(at, &end, 10);
        if (end == at || *end != ':')
            break;
        at = end + 1;
        unsigned long long bytes = *at == '-' ? ~0ULL : strtoull(at, NULL, 10);
        if (found < room)
            into[found] = (Process){pid, bytes, ~0U, ~0U};
        found++;
        at += strcspn(at, " ");
        at += strspn(at, " ");
    }
    *count = found;
    return found > room ? TOO_SMALL : SUCCESS;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *count, Process *into)
{
    return processes(handle, "nvmlDeviceGetComputeRunningProcesses_v3", "compute", count, into);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned int *count, Process *into)
{
    return processes(handle, "nvmlDeviceGetGraphicsRunningProcesses_v3", "graphics", count, into);
}
#endif

int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned int *count, Process *into)
{
    return processes(handle, "nvmlDeviceGetComputeRunningProcesses_v2", "compute", count, into);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(void *handle, unsigned int *count, Process *into)
{
    return processes(handle, "nvmlDeviceGetGraphicsRunningProcesses_v2", "graphics", count, into);
}

int nvmlDeviceGetProcessUtilization(void *handle, Sample *into, unsigned int *count, unsigned long long since)
{
    int error = device_failure(handle, "nvmlDeviceGetProcessUtilization");
    if (error)
        return error;
    const char *at = of_device(handle, "samples");
    if (!at)
        return NOT_SUPPORTED;
    unsigned int found = 0, room = into ? *count : 0, pid, sm;
    unsigned long long time;
    int length;
    for (; sscanf(at, " %u:%llu:%u%n", &pid, &time, &sm, &length) == 3; at += length) {
        if (time <= since)
            continue;
        if (found < room)
            into[found] = (Sample){pid, time, sm, 0, 0, 0};
        found++;
    }
    *count = found;
    if (!found)
        return NOT_FOUND;
    return found > room ? TOO_SMALL : SUCCESS;
}
