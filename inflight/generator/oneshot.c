/* Waits for the device and moves a range to another allocation, in one call from Python: see oneshot.py.

   The driver's functions come as pointers, so that neither its headers nor its library are needed to compile this. */

#include <stddef.h>
#include <time.h>

typedef unsigned long long address_t;

struct driver {
    int (*synchronize)(void);                                        /* cuCtxSynchronize */
    int (*unmap)(address_t, size_t);                                 /* cuMemUnmap */
    int (*map)(address_t, size_t, size_t, address_t, address_t);     /* cuMemMap */
    int (*access)(address_t, size_t, const void *, size_t);          /* cuMemSetAccess */
};

struct access { int type, device, flags; };                          /* CUmemAccessDesc */

enum { ON_DEVICE = 1, READ_WRITE = 3 };
enum { WAIT, UNMAP, MAP, ACCESS };

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

/* CUresult; `step` says which call returned it, `seconds` how long the wait and the move took. */
int wait_and_move(const struct driver *driver, address_t address, size_t nbytes, address_t handle, int device,
                  int *step, double seconds[2]) {
    const struct access access = {ON_DEVICE, device, READ_WRITE};
    const double started = now();
    int status;
    *step = WAIT;
    status = driver->synchronize();
    const double waited = now();
    if (status == 0) { *step = UNMAP; status = driver->unmap(address, nbytes); }
    if (status == 0) { *step = MAP; status = driver->map(address, nbytes, 0, handle, 0); }
    if (status == 0) { *step = ACCESS; status = driver->access(address, nbytes, &access, 1); }
    seconds[0] = waited - started;
    seconds[1] = now() - waited;
    return status;
}
