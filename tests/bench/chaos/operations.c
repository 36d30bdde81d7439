/* Preloaded into every process of a world. Counts the operations that change files below ROOT. At the N-th it stops the
 * thread until the harness releases it, or fails every later operation that needs room, as on a full disk.
 *
 * The plan is a file that all processes map: they count together, and the harness reads the counters. The environment of
 * the first process of a tree names it; forks inherit the map. System calls that bypass the C library are not counted. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT = 0, STOP = 1, FULL = 2 };

struct plan {
    _Atomic long seen, seen_record, at, action, reached, go_on, pid;
    long record; /* count operations on MLflow's record too; they are the majority */
    char what[448];
    char root[512];
};

static struct plan *plan;
static char record[560];

__attribute__((constructor)) static void start(void) {
    const char *name = getenv("CHAOS_PLAN");
    int file = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *map = mmap(NULL, sizeof(struct plan), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (map == MAP_FAILED) return;
    plan = map;
    snprintf(record, sizeof record, "%s/data/tracking/", plan->root);
}

/* Return whether the path belongs to the world and counts. Relative paths are made absolute. */
static int counts(int folder, const char *path, char *full) {
    if (!plan || !path) return 0;
    size_t length = strlen(plan->root);
    if (!length) return 0;
    if (path[0] == '/') {
        if (path != full) snprintf(full, PATH_MAX, "%s", path);
    } else {
        char link[64], base[PATH_MAX];
        if (folder == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t got = readlink(link, base, sizeof base - 1);
            if (got < 0) return 0;
            base[got] = 0;
        }
        size_t used = strlen(base);
        if (used + strlen(path) + 2 > PATH_MAX) return 0;
        memcpy(full, base, used);
        full[used] = '/';
        strcpy(full + used + 1, path);
    }
    if (strncmp(full, plan->root, length) || full[length] != '/') return 0;
    if (strstr(full, "/__pycache__/")) return 0;
    if (plan->record || strncmp(full, record, strlen(record))) return 1;
    atomic_fetch_add(&plan->seen_record, 1);
    return 0;
}

static int counts_file(int file, char *full) {
    char link[64];
    if (!plan || file < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t got = readlink(link, full, PATH_MAX - 1);
    if (got < 0) return 0;
    full[got] = 0;
    return full[0] == '/' && counts(AT_FDCWD, full, full); /* pipes and sockets are not files */
}

/* Count one operation. Return whether it must fail. */
static int happens(const char *name, const char *path, int needs_room) {
    int before = errno;
    long number = atomic_fetch_add(&plan->seen, 1) + 1, action = plan->action;
    if (number == plan->at) {
        plan->pid = getpid();
        snprintf(plan->what, sizeof plan->what, "%s %s", name, path + strlen(plan->root) + 1);
        plan->reached = 1;
        while (action == STOP && !plan->go_on && number == plan->at) usleep(2000);
    }
    errno = before;
    if (action == FULL && number >= plan->at && needs_room) {
        errno = ENOSPC;
        return 1;
    }
    return 0;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = dlsym(RTLD_NEXT, #name)

#define AT(folder, path, name, room) \
    char full[PATH_MAX]; \
    if (counts(folder, path, full) && happens(name, full, room)) return -1

#define ON(file, name, room) \
    char full[PATH_MAX]; \
    if (counts_file(file, full) && happens(name, full, room)) return -1

static int changes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC); }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (changes(flags)) { AT(AT_FDCWD, path, "open", flags & O_CREAT); } \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        if (changes(flags)) { AT(folder, path, "open", flags & O_CREAT); } \
        return real(folder, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void *data, size_t size) { REAL(write); ON(file, "write", 1); return real(file, data, size); }
ssize_t pwrite(int file, const void *data, size_t size, off_t at) { REAL(pwrite); ON(file, "write", 1); return real(file, data, size, at); }
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) { REAL(pwrite64); ON(file, "write", 1); return real(file, data, size, at); }
ssize_t writev(int file, const struct iovec *data, int parts) { REAL(writev); ON(file, "write", 1); return real(file, data, parts); }
ssize_t copy_file_range(int from, off64_t *start, int to, off64_t *at, size_t size, unsigned flags) { REAL(copy_file_range); ON(to, "copy", 1); return real(from, start, to, at, size, flags); }
ssize_t sendfile(int to, int from, off_t *at, size_t size) { __typeof__(sendfile) *real = dlsym(RTLD_NEXT, "sendfile"); ON(to, "copy", 1); return real(to, from, at, size); }
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) { __typeof__(sendfile64) *real = dlsym(RTLD_NEXT, "sendfile64"); ON(to, "copy", 1); return real(to, from, at, size); }
int ftruncate(int file, off_t size) { REAL(ftruncate); ON(file, "truncate", size > 0); return real(file, size); }
int ftruncate64(int file, off64_t size) { REAL(ftruncate64); ON(file, "truncate", size > 0); return real(file, size); }
int fsync(int file) { REAL(fsync); ON(file, "fsync", 0); return real(file); }
int fdatasync(int file) { REAL(fdatasync); ON(file, "fsync", 0); return real(file); }
int rename(const char *from, const char *to) { REAL(rename); AT(AT_FDCWD, to, "rename to", 0); return real(from, to); }
int renameat(int a, const char *from, int b, const char *to) { REAL(renameat); AT(b, to, "rename to", 0); return real(a, from, b, to); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { REAL(renameat2); AT(b, to, "rename to", 0); return real(a, from, b, to, flags); }
int link(const char *from, const char *to) { REAL(link); AT(AT_FDCWD, to, "link", 1); return real(from, to); }
int linkat(int a, const char *from, int b, const char *to, int flags) { REAL(linkat); AT(b, to, "link", 1); return real(a, from, b, to, flags); }
int symlink(const char *from, const char *to) { REAL(symlink); AT(AT_FDCWD, to, "symlink", 1); return real(from, to); }
int unlink(const char *path) { REAL(unlink); AT(AT_FDCWD, path, "unlink", 0); return real(path); }
int unlinkat(int folder, const char *path, int flags) { REAL(unlinkat); AT(folder, path, "unlink", 0); return real(folder, path, flags); }
int rmdir(const char *path) { REAL(rmdir); AT(AT_FDCWD, path, "rmdir", 0); return real(path); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); AT(AT_FDCWD, path, "mkdir", 1); return real(path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { REAL(mkdirat); AT(folder, path, "mkdir", 1); return real(folder, path, mode); }
