// Lets user-mode Linux 6.1 run on a processor with AMX.
//
// User-mode Linux keeps 2,696 bytes of floating point state per thread (HOST_FP_SIZE). PTRACE_SETREGSET takes nothing
// but the host's whole XSAVE area and fails with EFAULT, and the first guest process dies. Linux 6.13 asks the host for
// the size. Loaded with LD_PRELOAD, this fills the rest of the area up with zeroes: the state of AMX, which no guest
// process may use.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

// No XSAVE area is larger than this. User-mode Linux has one thread that traces.
static char area[1 << 16];

typedef long ptrace_function(enum __ptrace_request, pid_t, void *, void *);

long ptrace(enum __ptrace_request request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    pid_t pid = va_arg(arguments, pid_t);
    void *address = va_arg(arguments, void *);
    void *data = va_arg(arguments, void *);
    va_end(arguments);

    ptrace_function *next = (ptrace_function *)dlsym(RTLD_NEXT, "ptrace");
    if (request == PTRACE_SETREGSET && address == (void *)NT_X86_XSTATE) {
        struct iovec *given = data;
        struct iovec whole = {.iov_base = area, .iov_len = sizeof(area)};
        // A read tells how large the host's area is.
        if (next(PTRACE_GETREGSET, pid, address, &whole) == 0 && whole.iov_len > given->iov_len) {
            memset(area, 0, whole.iov_len);
            memcpy(area, given->iov_base, given->iov_len);
            return next(request, pid, address, &whole);
        }
    }
    return next(request, pid, address, data);
}
