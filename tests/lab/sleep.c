/* Preloaded in front of libfaketime, which refuses sleeps until a moment of a clock that it does not fake:
   Python's time.sleep() is such a one. Those go to the kernel as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef int sleeper(clockid_t, int, const struct timespec *, struct timespec *);

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *left)
{
    if (clock == CLOCK_REALTIME)
        return ((sleeper *)dlsym(RTLD_NEXT, "clock_nanosleep"))(clock, flags, time, left);
    int before = errno;
    int result = syscall(SYS_clock_nanosleep, clock, flags, time, left) == 0 ? 0 : errno;
    errno = before;
    return result;
}
