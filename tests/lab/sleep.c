/* Preloaded in front of libfaketime. That refuses sleeps until a moment of a clock that it does not fake, such as
   Python's time.sleep(), and lets waits for one return at once, again and again, so that a thread of Python that
   waits for the interpreter keeps a processor busy. Those go to the kernel and to the C library as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MONOTONIC 2 /* in the flags of a condition of glibc: its clock */

typedef int sleeper(clockid_t, int, const struct timespec *, struct timespec *);
typedef int waiter(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *left)
{
    if (clock == CLOCK_REALTIME)
        return ((sleeper *)dlsym(RTLD_NEXT, "clock_nanosleep"))(clock, flags, time, left);
    int before = errno;
    int result = syscall(SYS_clock_nanosleep, clock, flags, time, left) == 0 ? 0 : errno;
    errno = before;
    return result;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until)
{
    static waiter *faked, *real;
    if (real == NULL) {
        faked = (waiter *)dlsym(RTLD_NEXT, "pthread_cond_timedwait");
        real = (waiter *)dlsym(dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD), "pthread_cond_timedwait");
    }
    return (cond->__data.__wrefs & MONOTONIC ? real : faked)(cond, mutex, until);
}
