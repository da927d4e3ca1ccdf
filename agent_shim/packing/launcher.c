/* Starts the bundle's own Python through the bundle's own loader, wherever the folder is mounted.
 *
 * Static and without the C library's start-up of locales and the like: an image may hold nothing at
 * all. It also does what Python can only do late or not at all: it blocks signals before the
 * interpreter starts, since PID 1 loses those that come earlier, and becomes the reaper of orphans
 * where it is not PID 1.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <unistd.h>

#ifndef LOADER
#error "define LOADER, the file name of the dynamic loader in runtime/lib"
#endif

#define KEEP "PODSETTLE_KEEP_"
#define SHIM_FAILED 70

extern char **environ;

static int fail(const char *what) {
    dprintf(2, "agent-shim: cannot start: %s: %s\n", what, strerror(errno));
    return SHIM_FAILED;
}

int main(int argc, char **argv) {
    char home[4096];
    ssize_t length = readlink("/proc/self/exe", home, sizeof home - 1);
    if (length < 0) {
        /* No /proc here: the path that execve was given is the next best. */
        const char *given = (const char *)getauxval(AT_EXECFN);
        length = given == NULL ? 0 : (ssize_t)strlen(given);
        if ((size_t)length >= sizeof home) {
            errno = ENAMETOOLONG;
            return fail("the path of this program");
        }
        memcpy(home, given, (size_t)length);
    }
    while (length > 0 && home[length - 1] != '/') length--;
    home[length] = '\0';
    if (length == 0) strcpy(home, "./");

    char loader[4224], library[4224], python[4224], shim[4224];
    snprintf(loader, sizeof loader, "%sruntime/lib/%s", home, LOADER);
    snprintf(library, sizeof library, "%sruntime/lib", home);
    snprintf(python, sizeof python, "%sruntime/bin/python3", home);
    snprintf(shim, sizeof shim, "%sruntime/agent-shim.pyc", home);

    char **words = calloc((size_t)argc + 9, sizeof *words);
    if (words == NULL) return fail("memory");
    /* Neither the image's library cache nor its LD_* variables may mix its libraries with ours. */
    char *first[] = {loader, "--inhibit-cache", "--library-path", library, python, "-I", "-S", shim};
    size_t count = sizeof first / sizeof *first;
    memcpy(words, first, sizeof first);
    for (int i = 1; i < argc; i++) words[count++] = argv[i];

    for (char **entry = environ; *entry != NULL; entry++) {
        if (strncmp(*entry, "LD_", 3) != 0) continue;
        char *kept = malloc(sizeof KEEP + strlen(*entry));
        if (kept == NULL) return fail("memory");
        strcpy(kept, KEEP);
        strcat(kept, *entry);
        *entry = kept;
    }

    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);

    execve(loader, words, environ);
    return fail(loader);
}
