/* A library to preload into PostgreSQL 15: the server reads and writes the files of its tables and indexes with O_DIRECT, page
 * by page, as PostgreSQL 16 and newer do with debug_io_direct = data. */
#define _GNU_SOURCE
#include <ctype.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* O_DIRECT needs aligned memory, which the server's buffers are not. The server has no threads. */
static char page[8192] __attribute__((aligned(8192)));

/* The server works in its data directory. The name of such a file is a number, for instance base/5/16384. A directory
 * cannot be opened for writing. */
static int is_relation(const char *path, int flags)
{
    int place = !strncmp(path, "base/", 5) || !strncmp(path, "global/", 7);
    return place && isdigit(strrchr(path, '/')[1]) && (flags & O_ACCMODE) == O_RDWR;
}

int open(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    return openat(AT_FDCWD, path, is_relation(path, flags) ? flags | O_DIRECT : flags, mode);
}

ssize_t pread(int file, void *data, size_t length, off_t at)
{
    if (length != sizeof page)
        return syscall(SYS_pread64, file, data, length, at);
    ssize_t count = syscall(SYS_pread64, file, page, length, at);
    if (count > 0)
        memcpy(data, page, count);
    return count;
}

ssize_t pwrite(int file, const void *data, size_t length, off_t at)
{
    if (length == sizeof page)
        data = memcpy(page, data, length);
    return syscall(SYS_pwrite64, file, data, length, at);
}
