/* Makes the k-th system call that writes below a folder fail. Preloaded by a test.

   All that changes a disk is counted: open for writing, write, pwrite, ftruncate,
   fsync, rename, mkdir. On a disk that is full or broken, all that follows fails as
   well. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum Fault { kNone, kKill, kFull, kBroken, kTorn };

static const char* folder;
static int fault = kNone;
static long left, count;

void faults_arm(const char* below, int kind, long k) {
  folder = strdup(below);
  fault = kind;
  left = k;
  count = 0;
}

long faults_count(void) { return count; }

static int Below(const char* path) {
  return folder && path && !strncmp(path, folder, strlen(folder));
}

static int DescriptorBelow(int fd) {
  char link[64], path[PATH_MAX];
  if (!folder) return 0;
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof(path) - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return Below(path);
}

/* Returns whether this call fails. */
static int Fails(void) {
  ++count;
  if (fault == kNone || --left > 0) return 0;
  if (fault == kKill) kill(getpid(), SIGKILL);
  if (fault == kTorn) return 1;
  errno = fault == kFull ? ENOSPC : EIO;
  return 1;
}

#define NEXT(name, type) ((type)dlsym(RTLD_NEXT, #name))

static ssize_t Written(int fd, const void* data, size_t size, off_t offset) {
  typedef ssize_t (*Write)(int, const void*, size_t);
  typedef ssize_t (*Pwrite)(int, const void*, size_t, off_t);
  int fails = DescriptorBelow(fd) && Fails();
  if (fails && fault != kTorn) return -1;
  if (fails) size /= 2;
  ssize_t done = offset < 0 ? NEXT(write, Write)(fd, data, size)
                            : NEXT(pwrite, Pwrite)(fd, data, size, offset);
  if (fails) kill(getpid(), SIGKILL);
  return done;
}

ssize_t write(int fd, const void* data, size_t size) {
  return Written(fd, data, size, -1);
}
ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) {
  return Written(fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t size, off_t offset) {
  return Written(fd, data, size, offset);
}

int fsync(int fd) {
  if (fault != kTorn && DescriptorBelow(fd) && Fails()) return -1;
  return NEXT(fsync, int (*)(int))(fd);
}
int ftruncate(int fd, off_t size) {
  if (fault != kTorn && DescriptorBelow(fd) && Fails()) return -1;
  return NEXT(ftruncate, int (*)(int, off_t))(fd, size);
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int rename(const char* from, const char* to) {
  if (fault != kTorn && Below(from) && Fails()) return -1;
  return NEXT(rename, int (*)(const char*, const char*))(from, to);
}
int mkdir(const char* path, mode_t mode) {
  if (fault != kTorn && Below(path) && Fails()) return -1;
  return NEXT(mkdir, int (*)(const char*, mode_t))(path, mode);
}
static int Opened(const char* name, const char* path, int flags, mode_t mode) {
  if (fault != kTorn && (flags & O_CREAT) && Below(path) && Fails()) return -1;
  return ((int (*)(const char*, int, ...))dlsym(RTLD_NEXT, name))(path, flags, mode);
}
#define DEFINE_OPEN(name)                                     \
  int name(const char* path, int flags, ...) {                \
    va_list rest;                                             \
    va_start(rest, flags);                                    \
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                             \
    return Opened(#name, path, flags, mode);                  \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)
