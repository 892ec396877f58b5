/* Make the n-th file system call under one folder fail, write short, or kill the process.
 *
 * Preloaded (LD_PRELOAD), so that what torch's and safetensors' own writers call is seen too. The
 * test arms it in its own process, by ctypes; until then every call passes through. Only calls whose
 * path or descriptor lies under the armed folder are counted. tests/faults/shim.py is the other side
 * and says what the numbers mean.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

/* The order is that of shim.KINDS. */
enum kind { OPEN_READ, OPEN_WRITE, READ, WRITE, FSYNC, RENAME, MKDIR, UNLINK, RMDIR, TRUNCATE, CLOSE };
static const char *const names[] = {"open-read", "open-write", "read",   "write",    "fsync", "rename",
                                    "mkdir",     "unlink",     "rmdir",  "truncate", "close"};
/* The order is that of shim.Action. */
enum action { NOTHING, FAIL, FAIL_FROM, SHORT, DIE, DIE_AFTER, DIE_TORN };

static struct {
    char root[4096];
    size_t length;
    unsigned mask;    /* kinds that are counted */
    unsigned failing; /* kinds that fail once FAIL_FROM has begun */
    long at;
    int action;
    int error;
    int no_exchange;
} plan;
static atomic_int armed;
static atomic_long count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char record[1 << 20];
static size_t used;
static char last[5000];

static void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

/* The absolute path of `path` seen from the directory `dirfd`; 0 when it cannot be told. */
static int absolute(int dirfd, const char *path, char *out, size_t size)
{
    char link[64];
    ssize_t n = 0;
    if (path && path[0] == '/') {
        if (strlen(path) >= size)
            return 0;
        strcpy(out, path);
        return 1;
    }
    if (dirfd == AT_FDCWD) {
        if (!getcwd(out, size))
            return 0;
        n = (ssize_t)strlen(out);
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
        n = readlink(link, out, size - 1);
        if (n <= 0)
            return 0;
        out[n] = 0;
    }
    if (path && path[0]) {
        if ((size_t)n + 1 + strlen(path) >= size)
            return 0;
        out[n] = '/';
        strcpy(out + n + 1, path);
    }
    return 1;
}

/* Count a call, and say what is to become of it. */
static int decide(enum kind kind, int dirfd, const char *path)
{
    char full[8192];
    int saved = errno, action = NOTHING;
    if (!atomic_load(&armed) || !(plan.mask & (1u << kind)))
        return NOTHING;
    if (!absolute(dirfd, path, full, sizeof full) || strncmp(full, plan.root, plan.length) ||
        (full[plan.length] != '/' && full[plan.length] != 0)) {
        errno = saved;
        return NOTHING;
    }
    long n = atomic_fetch_add(&count, 1) + 1;
    const char *inside = full + plan.length + (full[plan.length] == '/');
    pthread_mutex_lock(&lock);
    if (used + strlen(inside) + 16 < sizeof record)
        used += (size_t)sprintf(record + used, "%s %s\n", names[kind], inside);
    if (n == plan.at ||
        (plan.action == FAIL_FROM && n > plan.at && (plan.failing & (1u << kind)))) {
        action = plan.action == FAIL_FROM ? FAIL : plan.action;
        if (n == plan.at)
            snprintf(last, sizeof last, "%s %s", names[kind], inside);
    }
    pthread_mutex_unlock(&lock);
    if (action == DIE)
        die();
    errno = saved;
    return action;
}

/* Interface for ctypes. */
void fsfault_arm(const char *root, unsigned mask, unsigned failing, long at, int action, int error)
{
    atomic_store(&armed, 0);
    snprintf(plan.root, sizeof plan.root, "%s", root);
    plan.length = strlen(plan.root);
    plan.mask = mask;
    plan.failing = failing;
    plan.at = at;
    plan.action = action;
    plan.error = error;
    atomic_store(&count, 0);
    used = 0;
    record[0] = last[0] = 0;
    atomic_store(&armed, 1);
}
long fsfault_disarm(void)
{
    atomic_store(&armed, 0);
    return atomic_load(&count);
}
void fsfault_no_exchange(int on) { plan.no_exchange = on; }
const char *fsfault_record(void) { return record; }
const char *fsfault_last(void) { return last; }

#define REAL(name)                                                                                 \
    static __typeof__(&name) real;                                                                 \
    if (!real)                                                                                     \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name);

/* Run `call`, unless it is to fail with `bad`; `cut` is what a torn call does before the end. */
#define AROUND(kind, dirfd, path, type, bad, call, cut)                                            \
    int action = decide(kind, dirfd, path);                                                        \
    if (action == FAIL) {                                                                          \
        errno = plan.error;                                                                        \
        return bad;                                                                                \
    }                                                                                              \
    if (action == SHORT)                                                                           \
        return cut;                                                                                \
    if (action == DIE_TORN) {                                                                      \
        (void)(cut);                                                                               \
        die();                                                                                     \
    }                                                                                              \
    type result = call;                                                                            \
    if (action == DIE_AFTER)                                                                       \
        die();                                                                                     \
    return result

static enum kind of_flags(int flags)
{
    return (flags & O_ACCMODE) == O_RDONLY && !(flags & O_CREAT) ? OPEN_READ : OPEN_WRITE;
}

#define MODE                                                                                       \
    mode_t mode = 0;                                                                               \
    if (flags & (O_CREAT | __O_TMPFILE)) {                                                         \
        va_list list;                                                                              \
        va_start(list, flags);                                                                     \
        mode = va_arg(list, mode_t);                                                               \
        va_end(list);                                                                              \
    }
#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...)                                                     \
    {                                                                                              \
        MODE REAL(name) AROUND(of_flags(flags), AT_FDCWD, path, int, -1, real(path, flags, mode),  \
                               real(path, flags, mode));                                           \
    }
#define OPENAT(name)                                                                               \
    int name(int dirfd, const char *path, int flags, ...)                                          \
    {                                                                                              \
        MODE REAL(name) AROUND(of_flags(flags), dirfd, path, int, -1,                              \
                               real(dirfd, path, flags, mode), real(dirfd, path, flags, mode));    \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

FILE *fopen(const char *path, const char *how)
{
    REAL(fopen)
    AROUND(how[0] == 'r' && !strchr(how, '+') ? OPEN_READ : OPEN_WRITE, AT_FDCWD, path, FILE *, NULL,
           real(path, how), real(path, how));
}
FILE *fopen64(const char *path, const char *how)
{
    REAL(fopen64)
    AROUND(how[0] == 'r' && !strchr(how, '+') ? OPEN_READ : OPEN_WRITE, AT_FDCWD, path, FILE *, NULL,
           real(path, how), real(path, how));
}

#define HALF(n) ((n) > 1 ? (n) / 2 : (n))
ssize_t write(int fd, const void *data, size_t n)
{
    REAL(write) AROUND(WRITE, fd, NULL, ssize_t, -1, real(fd, data, n), real(fd, data, HALF(n)));
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at)
{
    REAL(pwrite)
    AROUND(WRITE, fd, NULL, ssize_t, -1, real(fd, data, n, at), real(fd, data, HALF(n), at));
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at)
{
    REAL(pwrite64)
    AROUND(WRITE, fd, NULL, ssize_t, -1, real(fd, data, n, at), real(fd, data, HALF(n), at));
}
/* A short gathered write is half of its first buffer. */
static struct iovec half(const struct iovec *parts, int n)
{
    struct iovec first = {NULL, 0};
    if (n > 0) {
        first.iov_base = parts[0].iov_base;
        first.iov_len = HALF(parts[0].iov_len);
    }
    return first;
}
ssize_t writev(int fd, const struct iovec *parts, int n)
{
    REAL(writev)
    struct iovec first = half(parts, n);
    AROUND(WRITE, fd, NULL, ssize_t, -1, real(fd, parts, n), real(fd, &first, 1));
}
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at)
{
    REAL(pwritev)
    struct iovec first = half(parts, n);
    AROUND(WRITE, fd, NULL, ssize_t, -1, real(fd, parts, n, at), real(fd, &first, 1, at));
}
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off64_t at)
{
    REAL(pwritev64)
    struct iovec first = half(parts, n);
    AROUND(WRITE, fd, NULL, ssize_t, -1, real(fd, parts, n, at), real(fd, &first, 1, at));
}
ssize_t pwritev2(int fd, const struct iovec *parts, int n, off_t at, int flags)
{
    REAL(pwritev2)
    struct iovec first = half(parts, n);
    AROUND(WRITE, fd, NULL, ssize_t, -1, real(fd, parts, n, at, flags),
           real(fd, &first, 1, at, flags));
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int n, off64_t at, int flags)
{
    REAL(pwritev64v2)
    struct iovec first = half(parts, n);
    AROUND(WRITE, fd, NULL, ssize_t, -1, real(fd, parts, n, at, flags),
           real(fd, &first, 1, at, flags));
}

ssize_t read(int fd, void *data, size_t n)
{
    REAL(read) AROUND(READ, fd, NULL, ssize_t, -1, real(fd, data, n), real(fd, data, HALF(n)));
}
ssize_t pread(int fd, void *data, size_t n, off_t at)
{
    REAL(pread)
    AROUND(READ, fd, NULL, ssize_t, -1, real(fd, data, n, at), real(fd, data, HALF(n), at));
}
ssize_t pread64(int fd, void *data, size_t n, off64_t at)
{
    REAL(pread64)
    AROUND(READ, fd, NULL, ssize_t, -1, real(fd, data, n, at), real(fd, data, HALF(n), at));
}
ssize_t preadv(int fd, const struct iovec *parts, int n, off_t at)
{
    REAL(preadv)
    struct iovec first = half(parts, n);
    AROUND(READ, fd, NULL, ssize_t, -1, real(fd, parts, n, at), real(fd, &first, 1, at));
}
ssize_t preadv64(int fd, const struct iovec *parts, int n, off64_t at)
{
    REAL(preadv64)
    struct iovec first = half(parts, n);
    AROUND(READ, fd, NULL, ssize_t, -1, real(fd, parts, n, at), real(fd, &first, 1, at));
}

#define ONE(name, kind, type, declared, fd, path, ...)                                             \
    int name declared                                                                              \
    {                                                                                              \
        REAL(name) AROUND(kind, fd, path, type, -1, real(__VA_ARGS__), real(__VA_ARGS__));         \
    }
ONE(fsync, FSYNC, int, (int fd), fd, NULL, fd)
ONE(fdatasync, FSYNC, int, (int fd), fd, NULL, fd)
ONE(ftruncate, TRUNCATE, int, (int fd, off_t n), fd, NULL, fd, n)
ONE(ftruncate64, TRUNCATE, int, (int fd, off64_t n), fd, NULL, fd, n)
ONE(mkdir, MKDIR, int, (const char *path, mode_t mode), AT_FDCWD, path, path, mode)
ONE(mkdirat, MKDIR, int, (int dir, const char *path, mode_t mode), dir, path, dir, path, mode)
ONE(unlink, UNLINK, int, (const char *path), AT_FDCWD, path, path)
ONE(rmdir, RMDIR, int, (const char *path), AT_FDCWD, path, path)
ONE(unlinkat, flags &AT_REMOVEDIR ? RMDIR : UNLINK, int, (int dir, const char *path, int flags), dir,
    path, dir, path, flags)
ONE(rename, RENAME, int, (const char *from, const char *to), AT_FDCWD, from, from, to)
ONE(renameat, RENAME, int, (int a, const char *from, int b, const char *to), a, from, a, from, b, to)

int posix_fallocate(int fd, off_t at, off_t n)
{
    REAL(posix_fallocate)
    int error = plan.error; /* it returns the error and leaves errno alone */
    AROUND(TRUNCATE, fd, NULL, int, error, real(fd, at, n), real(fd, at, n));
}
ONE(fallocate, TRUNCATE, int, (int fd, int mode, off_t at, off_t n), fd, NULL, fd, mode, at, n)

int renameat2(int a, const char *from, int b, const char *to, unsigned flags)
{
    REAL(renameat2)
    if (flags && plan.no_exchange) { /* as on NFS */
        errno = EINVAL;
        return -1;
    }
    AROUND(RENAME, a, from, int, -1, real(a, from, b, to, flags), real(a, from, b, to, flags));
}

/* The descriptor is closed whatever is reported, as Linux does. Only files that were written count:
 * network file systems report a full disk there. */
int close(int fd)
{
    REAL(close)
    int flags = atomic_load(&armed) ? fcntl(fd, F_GETFL) : -1;
    if (flags == -1 || (flags & O_ACCMODE) == O_RDONLY)
        return real(fd);
    int action = decide(CLOSE, fd, NULL);
    int result = real(fd);
    if (action >= DIE)
        die();
    if (action == FAIL) {
        errno = plan.error;
        return -1;
    }
    return result;
}
