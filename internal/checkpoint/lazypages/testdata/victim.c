// victim holds memory with a known pattern in several processes and threads, and
// does on command what processes do to their memory.
//
//	victim MEGABYTES CHILDREN FILE
//
// It prints the port that it listens on. Each connection carries one command and
// gets one line back, "ok" or what was wrong.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <pthread.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096L
#define SHARED (4L << 20)
#define FILED (1L << 20)

static char *mem, *shared, *filed;
static long size;
static uint64_t seed;
static char wrong[200];

static uint64_t mix(uint64_t x)
{
	x ^= x >> 33; x *= 0xff51afd7ed558ccdULL; x ^= x >> 33; x *= 0xc4ceb9fe1a85ec53ULL;
	return x ^ x >> 33;
}

// Every third page of every other 64 is never touched.
static int hole(long page) { return page / 64 % 2 && page % 3 == 0; }

static void paint(char *p, long page, uint64_t s)
{
	uint64_t *w = (uint64_t *)p;
	for (int i = 0; i < PAGE / 8; i++)
		w[i] = mix(s + page * 512 + (i & 7)) & 0xffff;
}

static int painted(char *p, long page, uint64_t s)
{
	uint64_t *w = (uint64_t *)p;
	for (int i = 0; i < PAGE / 8; i++)
		if (w[i] != (mix(s + page * 512 + (i & 7)) & 0xffff)) {
			snprintf(wrong, sizeof wrong, "page %ld word %d is %llx in %d\n", page, i, (unsigned long long)w[i], getpid());
			return 0;
		}
	return 1;
}

static int empty(char *p)
{
	for (int i = 0; i < PAGE; i++)
		if (p[i]) {
			snprintf(wrong, sizeof wrong, "%p is not empty\n", (void *)p);
			return 0;
		}
	return 1;
}

static int right(long from, long to)
{
	for (long p = from; p < to; p++)
		if (hole(p) ? !empty(mem + p * PAGE) : !painted(mem + p * PAGE, p, seed))
			return 0;
	return 1;
}

static int rest(void)
{
	for (long p = 0; p < SHARED / PAGE; p++)
		if (!painted(shared + p * PAGE, p, 7))
			return 0;
	for (long p = 0; p < FILED / PAGE; p++)
		if (p % 2 ? !painted(filed + p * PAGE, p, 9) : !painted(filed + p * PAGE, p, 8))
			return 0;
	return 1;
}

struct part { long from, to; int ok; };

static void *part(void *a)
{
	struct part *p = a;
	p->ok = right(p->from, p->to);
	return NULL;
}

static int everything(void)
{
	pthread_t t[4];
	struct part parts[4];
	long n = size / PAGE;
	int ok = 1;
	for (int i = 0; i < 4; i++) {
		parts[i] = (struct part){ n * i / 4, n * (i + 1) / 4, 0 };
		pthread_create(&t[i], NULL, part, &parts[i]);
	}
	for (int i = 0; i < 4; i++) {
		pthread_join(t[i], NULL);
		ok = ok && parts[i].ok;
	}
	return ok && rest();
}

static int child_ok(int (*f)(void))
{
	int status;
	pid_t pid = fork();
	if (pid == 0)
		_exit(f() ? 0 : 1);
	waitpid(pid, &status, 0);
	if (!WIFEXITED(status) || WEXITSTATUS(status)) {
		snprintf(wrong, sizeof wrong, "a child found wrong pages or died: %x\n", status);
		return 0;
	}
	return 1;
}

static int family(void) { return child_ok(everything) && everything(); }

static int another(void)
{
	execl("/proc/self/exe", "victim", (char *)NULL);
	return 0;
}

// The parent writes what the child must not see.
static int forked(void)
{
	long n = size / PAGE;
	int status;
	if (!child_ok(another)) return 0; // while nearly nothing is there
	pid_t pid = fork();
	if (pid == 0) {
		_exit(family() ? 0 : 1);
	}
	for (long p = 0; p < n; p += 7)
		mem[p * PAGE] ^= 0x55;
	waitpid(pid, &status, 0);
	for (long p = 0; p < n; p += 7)
		mem[p * PAGE] ^= 0x55;
	if (!WIFEXITED(status) || WEXITSTATUS(status)) {
		snprintf(wrong, sizeof wrong, "the child saw other pages: %x\n", status);
		return 0;
	}
	return child_ok(another) && everything();
}

// Moves, gives back and unmaps parts, while another thread reads the others.
static int churn(void)
{
	long n = size / PAGE, eighth = n / 8;
	pthread_t t;
	struct part quiet = { 4 * eighth, n, 0 };
	pthread_create(&t, NULL, part, &quiet);

	for (long p = 0; p < eighth; p += 16) { // 1st eighth: every second 8 pages are given back
		if (madvise(mem + p * PAGE, 8 * PAGE, MADV_DONTNEED)) return 0;
		mem[p * PAGE] = 1;
	}
	char *at = mem + eighth * PAGE; // 2nd: moved, in pieces
	char *to = mmap(NULL, 2 * eighth * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	long piece = eighth / 4;
	for (int i = 0; i < 4; i++)
		if (mremap(at + i * piece * PAGE, piece * PAGE, piece * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to + (3 - i) * piece * PAGE) == MAP_FAILED)
			return 0;
	if (munmap(mem + 2 * eighth * PAGE, eighth * PAGE)) return 0; // 3rd: gone, and mapped anew
	char *anew = mmap(mem + 2 * eighth * PAGE, eighth * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	if (anew == MAP_FAILED) return 0;
	if (mprotect(mem + 3 * eighth * PAGE, eighth / 2 * PAGE, PROT_READ)) return 0; // 4th: two mappings

	pthread_join(t, NULL);
	if (!quiet.ok) return 0;
	for (long p = 0; p < eighth; p++) {
		if (p % 16 == 0) {
			if (mem[p * PAGE] != 1) { snprintf(wrong, sizeof wrong, "a written page is lost\n"); return 0; }
			mem[p * PAGE] = 0;
		}
		if (p % 16 < 8 || hole(p) ? !empty(mem + p * PAGE) : !painted(mem + p * PAGE, p, seed)) return 0;
	}
	for (long p = 0; p < 4 * piece; p++) {
		long was = eighth + (3 - p / piece) * piece + p % piece;
		if (hole(was) ? !empty(to + p * PAGE) : !painted(to + p * PAGE, was, seed)) return 0;
	}
	for (long p = 0; p < eighth; p++)
		if (!empty(anew + p * PAGE)) return 0;
	return right(3 * eighth, 4 * eighth);
}

static int children, order[16][2], answer[16][2];

static int all(void)
{
	for (int i = 0; i < children; i++)
		if (write(order[i][1], "v", 1) != 1) return 0;
	int ok = everything();
	for (int i = 0; i < children; i++) {
		char c = 0;
		if (read(answer[i][0], &c, 1) != 1 || c != 'o') {
			snprintf(wrong, sizeof wrong, "child %d: %c\n", i, c);
			ok = 0;
		}
	}
	return ok;
}

static int run(const char *cmd)
{
	if (!strncmp(cmd, "page ", 5)) { long p = atol(cmd + 5); return right(p, p + 1); }
	if (!strncmp(cmd, "ping", 4)) return 1;
	if (!strncmp(cmd, "verify", 6)) return all();
	if (!strncmp(cmd, "fork", 4)) return forked();
	if (!strncmp(cmd, "churn", 5)) return churn();
	if (!strncmp(cmd, "exit", 4)) exit(0);
	snprintf(wrong, sizeof wrong, "what is %s?\n", cmd);
	return 0;
}

static void *idle(void *a)
{
	for (;;) usleep(5000);
	return a;
}

static void fill(uint64_t s)
{
	seed = s;
	for (long p = 0; p < size / PAGE; p++)
		if (!hole(p)) paint(mem + p * PAGE, p, seed);
}

static void be_child(int i)
{
	char c;
	fill(2000003ULL * (i + 1)); // its own pages instead of the parent's, which it had shared
	if (write(answer[i][1], "r", 1) != 1) _exit(1);
	while (read(order[i][0], &c, 1) == 1) {
		c = everything() ? 'o' : 'w';
		if (write(answer[i][1], &c, 1) != 1) break;
	}
	_exit(0);
}

int main(int argc, char **argv)
{
	if (argc < 4) return 0;
	size = atol(argv[1]) << 20;
	children = atoi(argv[2]);
	mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	shared = mmap(NULL, SHARED, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int fd = open(argv[3], O_RDWR | O_CREAT, 0600);
	if (ftruncate(fd, FILED)) return 1;
	filed = mmap(NULL, FILED, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	for (long p = 0; p < FILED / PAGE; p++) paint(filed + p * PAGE, p, 8);
	munmap(filed, FILED);
	filed = mmap(NULL, FILED, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	for (long p = 1; p < FILED / PAGE; p += 2) paint(filed + p * PAGE, p, 9);
	close(fd);
	for (long p = 0; p < SHARED / PAGE; p++) paint(shared + p * PAGE, p, 7);
	fill(1);
	for (int i = 0; i < children; i++) {
		char c;
		if (pipe(order[i]) || pipe(answer[i])) return 1;
		if (fork() == 0) be_child(i);
		if (read(answer[i][0], &c, 1) != 1) return 1;
	}
	pthread_t t;
	for (int i = 0; i < 3; i++) pthread_create(&t, NULL, idle, NULL);

	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof a;
	int l = socket(AF_INET, SOCK_STREAM, 0), on = 1;
	setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	if (argc > 4) a.sin_port = htons(atoi(argv[4]));
	if (bind(l, (struct sockaddr *)&a, sizeof a) || listen(l, 16) || getsockname(l, (struct sockaddr *)&a, &len)) return 1;
	printf("%d\n", ntohs(a.sin_port));
	fflush(stdout);
	if (argc <= 4) {
		int null = open("/dev/null", O_RDWR);
		dup2(null, 1);
		close(null);
	}
	for (;;) {
		char cmd[64] = "";
		int c = accept(l, NULL, NULL);
		if (c < 0) continue;
		if (read(c, cmd, sizeof cmd - 1) > 0) {
			wrong[0] = 0;
			int ok = run(cmd);
			const char *say = ok ? "ok\n" : wrong[0] ? wrong : "wrong\n";
			if (write(c, say, strlen(say)) < 0) {}
		}
		close(c);
	}
}
