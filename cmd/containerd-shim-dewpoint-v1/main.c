// containerd-shim-dewpoint-v1 is what containerd executes to get a shim for a
// container that dewd creates (package shimgroup), and what that shim executes
// to have crun make it (package launch). These packages make the directories
// that it works in, and document them.
//
// It is executed four times in a container's life, and each time what counts is
// how soon it is gone: a static C program takes a quarter of what one in Go does
// to start (docs/design/creation.md).
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

// die ends the program; why is errno's text where it is not 0.
__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *what, ...)
{
	int why = errno;
	va_list args;
	va_start(args, what);
	fputs("containerd-shim-dewpoint-v1: ", stderr);
	vfprintf(stderr, what, args);
	va_end(args);
	if (why)
		fprintf(stderr, ": %s", strerror(why));
	fputc('\n', stderr);
	exit(1);
}

// join returns dir/name.
static char *join(const char *dir, const char *name)
{
	char *path;
	if (asprintf(&path, "%s/%s", dir, name) < 0)
		die("memory");
	return path;
}

// dirOf returns the directory of a path.
static char *dirOf(const char *path)
{
	const char *slash = strrchr(path, '/');
	char *dir = slash == NULL ? strdup(".") : strndup(path, slash == path ? 1 : (size_t)(slash - path));
	if (dir == NULL)
		die("memory");
	return dir;
}

// slurp reads fd to its end, adds a zero, and closes it; NULL on an error. *len may be NULL.
static char *slurp(int fd, size_t *len)
{
	size_t have = 0, room = 4096;
	char *buf = malloc(room);
	while (buf != NULL) {
		ssize_t n = read(fd, buf + have, room - have - 1);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			if (n < 0) {
				free(buf);
				buf = NULL;
			}
			break;
		}
		have += (size_t)n;
		if (room - have < 2)
			buf = realloc(buf, room *= 2);
	}
	int why = errno;
	close(fd);
	errno = why;
	if (buf == NULL)
		return NULL;
	buf[have] = 0;
	if (len != NULL)
		*len = have;
	return buf;
}

// readFile returns what is in a file, as slurp does; NULL if it cannot be read.
static char *readFile(const char *path, size_t *len)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	return fd < 0 ? NULL : slurp(fd, len);
}

// put writes all of it, or fails with -1.
static int put(int fd, const char *buf, size_t len)
{
	while (len > 0) {
		ssize_t n = write(fd, buf, len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return -1;
		buf += n;
		len -= (size_t)n;
	}
	return 0;
}

// writeFile makes a file of that content that only root reads.
static void writeFile(const char *path, const char *buf, size_t len)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0 || put(fd, buf, len) < 0 || close(fd) < 0)
		die("write %s", path);
}

// become executes path with first as its name and then the arguments of argv from its second on.
__attribute__((noreturn)) static void become(char *path, char **argv)
{
	argv[0] = path;
	execve(path, argv, environ);
	die("exec %s", path);
}

// --- crun, for a shim: package launch ---------------------------------------

static const char controllers[] = "/sys/fs/cgroup/unified/cgroup.controllers";

// verbOf finds what the runtime is told to do, behind its general options, and
// the value of --root, NULL without one. At the end it is the arguments' end.
static char **verbOf(char **args, const char **root)
{
	*root = NULL;
	for (; *args != NULL; args++) {
		if (!strcmp(*args, "--root") || !strcmp(*args, "--log") || !strcmp(*args, "--log-format")) {
			if (args[1] == NULL)
				return args + 1;
			if (!strcmp(*args++, "--root"))
				*root = *args;
		} else if (**args != '-') {
			break;
		}
	}
	return args;
}

// begin starts a container as crun's "start" does, without becoming crun, which
// takes five times as long to load itself: the container's process waits for one
// byte in a pipe beside its state (crun's src/libcrun/status.c, 1.20 to 1.29). It
// returns, and has done nothing, where there is more to do or anything is not as
// expected: crun does it then, or says why not.
static void begin(const char *root, const char *id)
{
	if (root == NULL || id == NULL || *id == 0 || *id == '-' || strchr(id, '/') != NULL || getenv("NOTIFY_SOCKET") != NULL)
		return;
	char *dir = join(root, id), *fifo = join(dir, "exec.fifo"), *config = readFile(join(dir, "config.json"), NULL);
	if (config == NULL || strstr(config, "\"poststart\"") != NULL)
		return;
	struct stat st;
	int fd = open(fifo, O_WRONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC); // fails without a process that reads
	if (fd < 0)
		return;
	if (fstat(fd, &st) < 0 || !S_ISFIFO(st.st_mode) || unlink(fifo) < 0) {
		close(fd);
		return;
	}
	signal(SIGPIPE, SIG_IGN);
	if (put(fd, "", 1) < 0)
		die("start %s", id);
	exit(0);
}

// hide puts the empty file over the list of controllers, for this process and
// what it starts; all other mounts stay as they are to the rest of the machine.
static void hide(const char *empty)
{
	if (access(empty, F_OK) < 0 && errno == ENOENT)
		return;
	char *dir = dirOf(controllers);
	if (unshare(CLONE_NEWNS) < 0)
		die("unshare");
	if (mount("", dir, "", MS_PRIVATE, NULL) < 0)
		die("mount %s", dir);
	if (mount(empty, controllers, "", MS_BIND, NULL) < 0)
		die("mount %s", controllers);
}

// The numbers of these calls are the same on every architecture.
#ifndef SYS_open_tree
#define SYS_open_tree 428
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif

// readOnly returns a path of the file on a mount of its own that cannot be
// written to; the path as it is if the kernel is too old for that.
static char *readOnly(char *path)
{
	struct {
		unsigned long long set, clear, propagation, userns;
	} attr = {.set = 1}; // MOUNT_ATTR_RDONLY
	static char sealed[32];
	int fd = (int)syscall(SYS_open_tree, AT_FDCWD, path, 1 | O_CLOEXEC); // OPEN_TREE_CLONE
	if (fd < 0 || syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &attr, sizeof attr) < 0)
		return path;
	snprintf(sealed, sizeof sealed, "/proc/self/fd/%d", fd);
	return sealed;
}

static void launch(int argc, char **argv)
{
	char *dir = dirOf(argv[0]);
	const char *root;
	char **rest = verbOf(argv + 1, &root), *verb = *rest == NULL ? "" : *rest;
	if (!strcmp(verb, "checkpoint"))
		become(join(dir, "runc"), argv);
	if (!strcmp(verb, "start") && rest[1] != NULL && rest[2] == NULL)
		begin(root, rest[1]);
	char *file = join(dir, "argv"), *text = readFile(file, NULL);
	if (text == NULL)
		die("read %s", file);
	size_t lines = 1;
	for (char *p = text; *p; p++)
		lines += *p == '\n';
	char **args = calloc(lines + (size_t)argc + 1, sizeof *args), *at = text;
	if (args == NULL)
		die("memory");
	char *how = strsep(&at, "\n");
	size_t n = 0;
	for (char *line; (line = strsep(&at, "\n")) != NULL;)
		if (*line)
			args[n++] = line;
	if (n == 0) {
		errno = 0;
		die("%s names no program", file);
	}
	memcpy(args + n, argv + 1, sizeof *argv * (size_t)(argc - 1));
	if (!strcmp(verb, "create"))
		hide(join(dir, "empty"));
	execve(strcmp(how, "sealed") ? args[0] : readOnly(args[0]), args, environ);
	die("exec %s", args[0]);
}

// report says how the process finds itself, in a container that crun is tried with.
static void report(void)
{
	char host[HOST_NAME_MAX + 1] = "", *status = readFile("/proc/self/status", NULL);
	if (status == NULL || gethostname(host, sizeof host - 1) < 0)
		die("the process's status");
	char *filtered = strstr(status, "\nSeccomp:\t");
	filtered = filtered == NULL ? "" : filtered + strlen("\nSeccomp:\t");
	printf("process %d of host %s, system calls filtered: %.*s\n", (int)getpid(), host, (int)strcspn(filtered, "\n"), filtered);
}

// --- a shim, for containerd: package shimgroup ------------------------------

// socketIn finds the path of the socket in what a shim said when it started: the
// bare address (containerd 1.6), JSON, or a message of protobuf.
static int socketIn(const char *boot, size_t len, struct sockaddr_un *a)
{
	static const char scheme[] = "unix://";
	const char *at = boot == NULL ? NULL : memmem(boot, len, scheme, strlen(scheme));
	if (at == NULL)
		return -1;
	at += strlen(scheme);
	size_t n = 0;
	while (at + n < boot + len && at[n] &&
	       strchr("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-", at[n]) != NULL)
		n++;
	memset(a, 0, sizeof *a);
	if (n == 0 || n >= sizeof a->sun_path)
		return -1;
	a->sun_family = AF_UNIX;
	memcpy(a->sun_path, at, n);
	return 0;
}

// answers says whether something listens at the socket.
static int answers(const char *boot, size_t len)
{
	struct sockaddr_un a;
	if (socketIn(boot, len, &a) < 0)
		return 0;
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return 0;
	int ok = connect(fd, (struct sockaddr *)&a, sizeof a) == 0;
	close(fd);
	return ok;
}

// shimOf is the real shim of a group.
static char *shimOf(const char *dir)
{
	char *link = join(dir, "shim"), *real = realpath(link, NULL);
	if (real == NULL)
		die("%s", link);
	return real;
}

// note writes down how containerd asks for a shim, so that one can be started
// ahead: arguments and environment, each list's strings with a zero behind each
// and one more behind the last, then what comes from the standard input. It
// returns that input, as a file to read.
static int note(const char *dir, char **argv)
{
	size_t n, len = 2;
	char *in = slurp(fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3), &n), *path = join(dir, "asked");
	if (in == NULL)
		in = "", n = 0;
	for (char **a = argv + 1; *a != NULL; a++)
		len += strlen(*a) + 1;
	for (char **e = environ; *e != NULL; e++)
		len += strlen(*e) + 1;
	char *all = malloc(len + n), *at = all;
	if (all == NULL)
		die("memory");
	for (char **a = argv + 1; *a != NULL; a++)
		at = stpcpy(at, *a) + 1;
	*at++ = 0;
	for (char **e = environ; *e != NULL; e++)
		at = stpcpy(at, *e) + 1;
	*at++ = 0;
	memcpy(at, in, n);
	writeFile(path, all, len + n);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || lseek(fd, (off_t)len, SEEK_SET) < 0)
		die("%s", path);
	return fd;
}

// output executes the real shim in the group's directory and returns what it
// says; what it says of errors goes where ours does.
static char *output(const char *dir, char **argv, size_t *len)
{
	char *real = shimOf(dir);
	int ends[2], status, in = note(dir, argv);
	if (pipe2(ends, O_CLOEXEC) < 0)
		die("pipe");
	pid_t self = getpid(), pid = fork();
	if (pid < 0)
		die("fork");
	if (pid == 0) {
		// Who ends us wants no shim that nobody knows of.
		if (prctl(PR_SET_PDEATHSIG, SIGKILL) < 0 || getppid() != self)
			die("prctl");
		if (chdir(dir) < 0 || dup2(in, STDIN_FILENO) < 0 || dup2(ends[1], STDOUT_FILENO) < 0)
			die("%s", dir);
		become(real, argv);
	}
	close(in);
	close(ends[1]);
	char *out = slurp(ends[0], len);
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			die("wait for %s", real);
	errno = 0;
	if (out == NULL)
		die("%s: nothing can be read of it", real);
	if (status != 0) {
		fwrite(out, 1, *len, stderr);
		if (WIFSIGNALED(status))
			die("%s: signal %d", real, WTERMSIG(status));
		die("%s: exit status %d", real, WEXITSTATUS(status));
	}
	return out;
}

// start has the real shim start in the group's directory. old is what an
// earlier one said, that is no more.
static char *start(const char *dir, const char *old, size_t oldLen, char **argv, size_t *len)
{
	struct sockaddr_un a;
	if (socketIn(old, oldLen, &a) == 0)
		unlink(a.sun_path);
	// Another name each time: the socket is named for it, and one that dies
	// must not be found by who looks for a new one.
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	const char *slash = strrchr(dir, '/');
	char *spec;
	int n = asprintf(&spec, "{\"annotations\":{\"io.containerd.runc.v2.group\":\"%s.%llx\"}}",
		slash == NULL ? dir : slash + 1, (unsigned long long)now.tv_sec * 1000000000ULL + (unsigned long long)now.tv_nsec);
	if (n < 0)
		die("memory");
	writeFile(join(dir, "config.json"), spec, (size_t)n);
	writeFile(join(dir, "log"), "", 0);
	char *boot = output(dir, argv, len), *tmp = join(dir, "boot.new");
	writeFile(tmp, boot, *len);
	if (rename(tmp, join(dir, "boot")) < 0)
		die("rename %s", tmp);
	return boot;
}

// varint writes a number as protobuf does.
static size_t varint(unsigned char *to, unsigned long long v)
{
	size_t n = 0;
	for (; v >= 0x80; v >>= 7)
		to[n++] = (unsigned char)(v | 0x80);
	to[n++] = (unsigned char)v;
	return n;
}

// deleted answers what containerd asks behind each container's end: to clean up
// what a shim that died has left. If the runtime does not know the container any
// more and nothing is mounted in its bundle, which is where we are, there is
// nothing left; else it returns, and the real shim has to look. The answer is a
// DeleteResponse: process, exit status 137, the time.
static void deleted(const char *dir, char **argv)
{
	const char *id = NULL;
	for (char **a = argv + 1; *a != NULL && a[1] != NULL; a++)
		if (!strcmp(*a, "-id"))
			id = a[1];
	struct stat bundle, root;
	char *containers = join(dir, "containers");
	if (id == NULL || *id == 0 || strchr(id, '/') != NULL || stat(containers, &root) < 0)
		return;
	if (stat(join(containers, id), &root) == 0 || errno != ENOENT)
		return;
	if (stat(".", &bundle) < 0 || (stat("rootfs", &root) < 0 ? errno != ENOENT : root.st_dev != bundle.st_dev))
		return;
	unsigned char said[64];
	size_t n = 0, m;
	char *pid = readFile("init.pid", NULL);
	if (pid != NULL && atoi(pid) > 0) {
		said[n++] = 1 << 3;
		n += varint(said + n, (unsigned long long)atoi(pid));
	}
	said[n++] = 2 << 3;
	n += varint(said + n, 128 + 9);
	m = varint(said + n + 3, (unsigned long long)time(NULL));
	said[n++] = 3 << 3 | 2;
	said[n++] = (unsigned char)(m + 1);
	said[n++] = 1 << 3;
	n += m;
	if (put(STDOUT_FILENO, (char *)said, n) < 0)
		die("write");
	exit(0);
}

static void shim(int argc, char **argv)
{
	char *dir = dirOf(argv[0]);
	const char *verb = argv[argc - 1];
	int d = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (!strcmp(verb, "delete"))
		deleted(dir, argv);
	if (strcmp(verb, "start") || d < 0)
		become(shimOf(dir), argv);
	while (flock(d, LOCK_EX) < 0) // ends with the process
		if (errno != EINTR)
			die("flock %s", dir);
	size_t len = 0;
	char *boot = readFile(join(dir, "boot"), &len);
	if (!answers(boot, len))
		boot = start(dir, boot, len, argv, &len);
	size_t n;
	char *address = readFile(join(dir, "address"), &n);
	if (address != NULL)
		writeFile("address", address, n);
	if (put(STDOUT_FILENO, boot, len) < 0)
		die("write");
}

int main(int argc, char **argv)
{
	if (argc < 1 || argv[0] == NULL)
		return 1;
	const char *slash = strrchr(argv[0], '/'), *name = slash == NULL ? argv[0] : slash + 1;
	if (!strcmp(name, "crun"))
		launch(argc, argv);
	else if (!strcmp(name, "trial"))
		report();
	else
		shim(argc, argv);
	return 0;
}
