/* Waits for the last use of a range and moves it to another allocation, in one call from Python: see oneshot.py.

   The driver's functions come as pointers, so that neither its headers nor its library are needed to compile this. */

#include <stddef.h>
#include <time.h>

typedef unsigned long long address_t;

struct driver {
    int (*wait_all)(void);                                           /* cuCtxSynchronize */
    int (*wait_event)(void *);                                       /* cuEventSynchronize */
    int (*unmap)(address_t, size_t);                                 /* cuMemUnmap */
    int (*map)(address_t, size_t, size_t, address_t, address_t);     /* cuMemMap */
    int (*access)(address_t, size_t, const void *, size_t);          /* cuMemSetAccess */
};

struct access { int type, device, flags; };                          /* CUmemAccessDesc */

enum { ON_DEVICE = 1, READ_WRITE = 3 };
enum { WAIT_ALL, WAIT_EVENT, UNMAP, MAP, ACCESS };

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* Waits for `event`, without one for the whole device. Returns a CUresult; `step` says which call returned it,
   `seconds` how long the wait, unmap, map and access took. */
int wait_and_move(const struct driver *driver, void *event, address_t address, size_t nbytes, address_t handle,
                  int device, int *step, double seconds[4]) {
    const struct access access = {ON_DEVICE, device, READ_WRITE};
    double at[5];
    int status;
    at[0] = now();
    *step = event ? WAIT_EVENT : WAIT_ALL;
    status = event ? driver->wait_event(event) : driver->wait_all();
    at[1] = now();
    if (status == 0) { *step = UNMAP; status = driver->unmap(address, nbytes); }
    at[2] = now();
    if (status == 0) { *step = MAP; status = driver->map(address, nbytes, 0, handle, 0); }
    at[3] = now();
    if (status == 0) { *step = ACCESS; status = driver->access(address, nbytes, &access, 1); }
    at[4] = now();
    for (int i = 0; i < 4; i++) seconds[i] = at[i + 1] - at[i];
    return status;
}
