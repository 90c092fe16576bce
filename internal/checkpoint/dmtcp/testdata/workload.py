# What enginetest/workload is, for an engine that needs dynamically linked programs.
import ctypes
import fcntl
import mmap
import os
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time

libc = ctypes.CDLL(None, use_errno=True)


def same(got, want):
    return "ok" if got == want else "%r is not %r" % (got, want)


def children():
    cats = [subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]

    def check():
        for c in cats:
            c.stdin.write(b"hello\n")
            c.stdin.flush()
            if c.stdout.readline() != b"hello\n":
                return "no echo"
        return "ok"

    return check


def unlinked():
    f = open("/work/unlinked", "w+b")
    f.write(b"kept " * 1000)
    f.flush()
    os.unlink("/work/unlinked")

    def check():
        f.write(b"more")
        f.flush()
        return same(os.pread(f.fileno(), 5, 4995), b"kept ")

    return check


def flock():
    f = open("/work/lock", "w")
    fcntl.flock(f, fcntl.LOCK_EX)

    def check():
        with open("/work/lock") as g:
            try:
                fcntl.flock(g, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return "locked twice"
            except BlockingIOError:
                return same(f.closed, False)

    return check


def timer():
    fd = libc.timerfd_create(1, 0)
    libc.timerfd_settime(fd, 0, (ctypes.c_long * 4)(0, 20000000, 0, 20000000), None)

    def check():
        os.read(fd, 8)
        began = time.monotonic()
        os.read(fd, 8)
        return same(time.monotonic() - began < 1, True)

    return check


def inotify():
    fd = libc.inotify_init1(0o4000)
    libc.inotify_add_watch(fd, b"/work", 0x100)

    def check():
        if os.path.exists("/work/new"):
            os.unlink("/work/new")
        open("/work/new", "w").close()
        return same(len(os.read(fd, 4096)) > 0, True)

    return check


def pidfd():
    fd = os.pidfd_open(subprocess.Popen(["sleep", "1000"]).pid)

    def check():
        signal.pidfd_send_signal(fd, 0)
        return "ok"

    return check


def memfd():
    fd = os.memfd_create("m")
    os.ftruncate(fd, 1 << 16)
    m = mmap.mmap(fd, 1 << 16)
    m[50000:50004] = b"kept"

    def check():
        m[:4] = b"more"
        return same(os.pread(fd, 4, 50000) + m[50000:50004], b"keptkept")

    return check


def shm():
    libc.shmat.restype = ctypes.c_void_p
    at = libc.shmat(libc.shmget(0, 1 << 16, 0o1600), None, 0)
    ctypes.memmove(at, b"kept", 4)
    return lambda: same(ctypes.string_at(at, 4), b"kept")


def unix():
    a, b = socket.socketpair()

    def check():
        a.send(b"hello")
        return same(b.recv(5), b"hello")

    return check


def epoll():
    r, w = os.pipe()
    e = select.epoll()
    e.register(r, select.EPOLLIN)

    def check():
        os.write(w, b"x")
        got = e.poll(1)
        os.read(r, 1)
        return same(got, [(r, select.EPOLLIN)])

    return check


def uring():
    fd = libc.syscall(425, 8, (ctypes.c_char * 120)())
    return lambda: "ok" if fd >= 0 else "refused"


def mptcp():
    try:
        s = socket.create_server(("", 7001))
        s.close()
        s = socket.socket(proto=262)
        s.bind(("", 7001))
        s.listen()
    except OSError:
        s = socket.create_server(("", 7001))
    return lambda: same(s.fileno() > 0, True)


def memory():
    block = os.urandom(64 << 20)
    ends = block[:16], block[-16:]
    return lambda: same((block[:16], block[-16:]), ends)


count, conns = [0], [0]


def counting():
    while True:
        time.sleep(0.001)
        count[0] += 1


class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        conns[0] += 1
        try:
            for line in self.rfile:
                check = answers.get(line.decode().strip(), lambda: "unknown")
                try:
                    said = str(check())
                except Exception as e:
                    said = repr(e)
                self.wfile.write(said.encode() + b"\n")
        except OSError:
            pass
        finally:
            conns[0] -= 1


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


answers = {"count": lambda: count[0], "conns": lambda: conns[0], "host": socket.gethostname}
for name in sys.argv[1:]:
    answers[name] = globals()[name]()
threading.Thread(target=counting, daemon=True).start()
Server(("", 7000), Answer).serve_forever()
