/* The task of an image that holds nothing else: `program DEED ARG...`, linked statically. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

extern char **environ;

static void leave(int number) {
    (void)number;
    _exit(0);
}

static void put(const char *path, const char *text) {
    int file = open(path, O_WRONLY | O_CREAT, 0644);
    if (file < 0 || write(file, text, strlen(text)) < 0) _exit(99);
    close(file);
}

int main(int argc, char **argv) {
    const char *deed = argc > 1 ? argv[1] : "";
    char path[4096];
    if (strcmp(deed, "exit") == 0) return atoi(argv[2]);
    if (strcmp(deed, "kill") == 0) {
        raise(atoi(argv[2]));
        return 0;
    }
    if (strcmp(deed, "environment") == 0) {
        for (char **entry = environ; *entry != NULL; entry++) puts(*entry);
        return 0;
    }
    if (strcmp(deed, "reschedule") == 0) {
        put(getenv("PODSETTLE_RESCHEDULE_FILE"), argv[2]);
        return 75;
    }
    if (strcmp(deed, "push") == 0) {
        snprintf(path, sizeof path, "%s/return_value.json", getenv("PODSETTLE_PUSH_DIR"));
        put(path, argv[2]);
        return 0;
    }
    if (strcmp(deed, "wait") == 0) {
        signal(SIGTERM, leave);
        dprintf(1, "ready\n");
        for (;;) pause();
    }
    if (strcmp(deed, "daemon") == 0) {
        /* A process of another session, whose parent ends. */
        int gate[2];
        if (pipe(gate) != 0) return 98;
        int pid = fork();
        if (pid == 0) {
            setsid();
            if (write(gate[1], "x", 1) != 1) _exit(97);
            for (;;) pause();
        }
        char byte;
        if (read(gate[0], &byte, 1) != 1) return 96;
        dprintf(1, "%d\n", pid);
        return 0;
    }
    return 95;
}
