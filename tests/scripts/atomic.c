/* atomic FILE: writes with RWF_ATOMIC, in lengths up to what statx says the file or device can, and reads back. A write
 * that is longer must be refused. atomic --unit FILE: only prints what statx says. The C library may be older than all
 * this. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define RWF_ATOMIC 0x40
#define STATX_WRITE_ATOMIC 0x10000
/* Offset of stx_atomic_write_unit_max. */
#define UNIT_MAX 0xac

static void fail(const char *what)
{
    printf("guest: %s: %s\n", what, strerror(errno));
    exit(1);
}

int main(int count, char **arguments)
{
    int only_unit = count > 2 && !strcmp(arguments[1], "--unit");
    int file = count > 1 ? open(arguments[1 + only_unit], O_RDWR | O_DIRECT) : -1;
    if (file < 0)
        fail("open");
    unsigned status[64] = {0};
    if (syscall(SYS_statx, file, "", AT_EMPTY_PATH, STATX_WRITE_ATOMIC, status))
        fail("statx");
    unsigned most = status[UNIT_MAX / sizeof *status];
    printf("guest: statx %u\n", most);
    if (!most || only_unit)
        return !most;
    unsigned lengths[] = {4096, 65536, most, 2 * most};
    for (int number = 0; number < 4; number++) {
        unsigned length = lengths[number];
        unsigned char *written, *read;
        if (posix_memalign((void **)&written, 4096, length) || posix_memalign((void **)&read, 4096, length))
            fail("memory");
        for (unsigned at = 0; at < length; at++)
            written[at] = at / 512 + at + number + 1;
        /* Each at a multiple of its length, and none over another. */
        off_t place = number < 3 ? (off_t)number * most : 4 * (off_t)most;
        struct iovec data = {written, length};
        ssize_t done = syscall(SYS_pwritev2, file, &data, 1, place, 0, RWF_ATOMIC);
        if (done < 0) {
            printf("guest: RWF_ATOMIC %u: %s\n", length, strerror(errno));
            continue;
        }
        if (pread(file, read, length, place) != length)
            fail("pread");
        printf("guest: RWF_ATOMIC %u: %s\n", length,
               done == length && !memcmp(written, read, length) ? "read back" : "something else is read back");
    }
    return 0;
}
