package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"dewpoint/testkit/testbed"

	"golang.org/x/sys/unix"
)

// noBackground keeps an image from becoming whole.
const noBackground = "[lazy]\nmode = \"on-demand\"\n"

// pid is the process of an engine's container.
func pid(ctx context.Context, s *session, e engine) (int, error) {
	name := containerName(e)
	switch e := e.(type) {
	case dewd:
		var said struct {
			Containers []struct {
				Name string
				PID  int
			}
		}
		if err := dewdCall(ctx, s, "List", "{}", &said); err != nil {
			return 0, err
		}
		for _, c := range said.Containers {
			if c.Name == name {
				return c.PID, nil
			}
		}
	case containerd:
		out, err := e.ctr(ctx, s, "tasks", "list")
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(string(out)) {
			if f := strings.Fields(line); len(f) > 1 && f[0] == name {
				return strconv.Atoi(f[1])
			}
		}
	case docker:
		out, err := e.docker(ctx, s, "inspect", "--format", "{{.State.Pid}}", name)
		if err != nil {
			return 0, err
		}
		return strconv.Atoi(strings.TrimSpace(string(out)))
	}
	return 0, fmt.Errorf("%s has no container %s", e.name(), name)
}

// tree is a container's root as its processes see it. The harness enters it
// once, by a descriptor, and names files relative to that: what it measures is
// the container's own mounts.
type tree struct {
	dir   *os.File
	files []string // regular files of the image that are not empty, sorted
}

// notImage are the directories that are not the image's, or that its services write to.
var notImage = []string{"proc", "sys", "dev", "run", "tmp", "var/cache", "var/log", "var/run", "var/tmp",
	"var/lib/mysql"}

// mountedIn are the files that engines mount into a container.
var mountedIn = []string{"etc/resolv.conf", "etc/hosts", "etc/hostname"}

func openTree(pid int) (*tree, error) { return treeAt(fmt.Sprintf("/proc/%d/root", pid)) }

func treeAt(root string) (*tree, error) {
	dir, err := os.OpenFile(root, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	t := &tree{dir: dir}
	err = filepath.WalkDir(fmt.Sprintf("/proc/self/fd/%d/", dir.Fd()),
		func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			_, name, _ := strings.Cut(strings.TrimPrefix(path, "/proc/self/fd/"), "/")
			if d.IsDir() && slices.Contains(notImage, name) {
				return fs.SkipDir
			}
			if !d.Type().IsRegular() || slices.Contains(mountedIn, name) {
				return nil
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			if info.Size() > 0 {
				t.files = append(t.files, name)
			}
			return nil
		})
	if err != nil {
		dir.Close()
		return nil, err
	}
	slices.Sort(t.files)
	return t, nil
}

func (t *tree) close() { t.dir.Close() }

// read reads a whole file into buf, piece by piece.
func (t *tree) read(name string, buf []byte) (int64, error) {
	fd, err := unix.Openat(int(t.dir.Fd()), name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOATIME, 0)
	if err != nil {
		return 0, fmt.Errorf("open %s: %w", name, err)
	}
	defer unix.Close(fd)
	var all int64
	for {
		n, err := unix.Read(fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return all, fmt.Errorf("read %s: %w", name, err)
		}
		if n == 0 {
			return all, nil
		}
		all += int64(n)
	}
}

// sweep reads every file once; it returns MB/s.
func (t *tree) sweep() (float64, error) {
	buf := make([]byte, 1<<20)
	var all int64
	start := time.Now()
	for _, name := range t.files {
		n, err := t.read(name, buf)
		if err != nil {
			return 0, err
		}
		all += n
	}
	return float64(all) / 1e6 / time.Since(start).Seconds(), nil
}

// opens opens and closes each name once; it returns microseconds per name. A
// file that does not exist is expected to fail so.
func (t *tree) opens(names []string, exist bool) (float64, error) {
	start := time.Now()
	for _, name := range names {
		fd, err := unix.Openat(int(t.dir.Fd()), name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			unix.Close(fd)
		}
		if (err == nil) != exist || err != nil && err != unix.ENOENT {
			return 0, fmt.Errorf("open %s: %v", name, err)
		}
	}
	return float64(time.Since(start).Nanoseconds()) / 1e3 / float64(max(1, len(names))), nil
}

// repeat takes a measurement n times after one that does not count.
func repeat(n int, f func() (float64, error)) ([]float64, error) {
	var all []float64
	for i := range n + 1 {
		v, err := f()
		if err != nil {
			return nil, err
		}
		if i > 0 {
			all = append(all, v)
		}
	}
	return all, nil
}

// --- opens ---------------------------------------------------------------------

// mapped are the files that a process has mapped: its program and libraries,
// which are here if it runs.
func mapped(pid int) (names []string) {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	for line := range bytes.Lines(raw) {
		f := strings.Fields(string(line))
		if len(f) == 6 && strings.HasPrefix(f[5], "/") && !strings.HasPrefix(f[5], "/dev/") {
			if name := strings.TrimPrefix(f[5], "/"); !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// opens measures what opening files costs in a container (figure 11): files
// that are here, files of the image that are not, and files that do not exist;
// and what the first read of a file that is not here costs.
func (l *lazy) opens(ctx context.Context) error {
	engines, err := l.contenders(l.dewd("-partial", noBackground, false),
		l.dewd("-complete", "", false, "--lazy", "never"),
		containerd{tools: l.tools, snapshotter: "overlayfs"})
	if err != nil {
		return err
	}
	err = l.turns(engines, func(e engine, image string, _ int) error {
		return l.container(ctx, e, image, func(s *session, process int) error {
			return l.opensIn(s, e, image, process)
		})
	})
	tabulate(l.stdout, l.figures, "containerd-overlayfs")
	return err
}

// container runs an image cold until it answers, and calls f with its process.
// dewd's image is whole by then, unless its background is off.
func (l *lazy) container(ctx context.Context, e engine, image string,
	f func(s *session, process int) error) error {
	if err := l.bed.Rate(ctx, 0); err != nil {
		return err
	}
	s, err := open(ctx, l.bed, e)
	if err != nil {
		return err
	}
	err = func() error {
		if err := l.bed.Cool(image); err != nil {
			return err
		}
		if err := answer(ctx, s, e, reference(e, testbed.Address, image), image); err != nil {
			return err
		}
		if d, ours := e.(dewd); ours && !strings.Contains(d.config, noBackground) {
			if err := awaitComplete(ctx, s); err != nil {
				return err
			}
		}
		process, err := pid(ctx, s, e)
		if err != nil {
			return err
		}
		fmt.Fprintf(l.stderr, "%s: %s runs, pulled %s\n", e.name(), image, wayOf(s))
		return errors.Join(f(s, process), e.remove(ctx, s, containerName(e)))
	}()
	return errors.Join(err, s.close(e))
}

const opensOfAFile = 20 // as in the paper

func (l *lazy) opensIn(s *session, e engine, image string, process int) error {
	t, err := openTree(process)
	if err != nil {
		return err
	}
	defer t.close()
	present := mapped(process)
	others := spread(t.files, 200)
	others = slices.DeleteFunc(others, func(n string) bool { return slices.Contains(present, n) })
	missing := make([]string, len(others))
	for i, n := range others {
		missing[i] = n + ".missing"
	}
	for _, c := range []struct {
		what  string
		names []string
		exist bool
	}{{"open present", present, true}, {"open others", others, true}, {"open non-existing", missing, false}} {
		if len(c.names) == 0 {
			continue
		}
		v, err := repeat(opensOfAFile, func() (float64, error) { return t.opens(c.names, c.exist) })
		if err != nil {
			return err
		}
		l.figures = merge(l.figures, []figure{{image, e.name(), c.what, "us", v}})
	}
	first, err := l.firstReads(t, others)
	if err == nil && len(first) > 0 {
		l.figures = merge(l.figures, []figure{{image, e.name(), "first read of 4 KiB, others", "us", first}})
	}
	return err
}

// firstReads reads the beginning of each file, cold; microseconds each.
func (l *lazy) firstReads(t *tree, names []string) ([]float64, error) {
	if err := dropCaches(); err != nil {
		return nil, err
	}
	var all []float64
	buf := make([]byte, 4096)
	for _, name := range names {
		fd, err := unix.Openat(int(t.dir.Fd()), name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("open %s: %w", name, err)
		}
		start := time.Now()
		_, err = unix.Read(fd, buf)
		took := time.Since(start)
		unix.Close(fd)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		all = append(all, float64(took.Nanoseconds())/1e3)
	}
	return all, nil
}

// spread takes n of the names at even distances.
func spread(names []string, n int) (some []string) {
	if len(names) <= n {
		return slices.Clone(names)
	}
	for i := range n {
		some = append(some, names[i*len(names)/n])
	}
	return some
}

func dropCaches() error {
	unix.Sync()
	return os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0)
}

// --- after ---------------------------------------------------------------------

const sweeps = 5

// after measures reads and opens of all of an image's files, against overlayfs
// over directories: in a container that was started lazily and whose image has
// all bytes by reads on demand, in one whose image was completed behind it, and
// in one that was started after that.
func (l *lazy) after(ctx context.Context) error {
	engines, err := l.contenders(l.dewd("-partial", noBackground, false), l.dewd("", "", false),
		containerd{tools: l.tools, snapshotter: "overlayfs"})
	if err != nil {
		return err
	}
	err = l.turns(engines, func(e engine, image string, _ int) error {
		return l.container(ctx, e, image, func(s *session, process int) error {
			state := map[string]string{"dewd-partial": "lazy, all present",
				"dewd": "started lazily, complete"}[e.name()]
			if state == "" {
				state = e.name()
			}
			if err := l.sweepIn(image, state, process); err != nil || e.name() != "dewd" {
				return err
			}
			return l.sweepAgain(ctx, s, e, image)
		})
	})
	tabulate(l.stdout, l.figures, "containerd-overlayfs")
	return err
}

// sweepAgain measures a new container of an image that is complete.
func (l *lazy) sweepAgain(ctx context.Context, s *session, e engine, image string) error {
	if err := e.remove(ctx, s, containerName(e)); err != nil {
		return err
	}
	if err := answer(ctx, s, e, reference(e, testbed.Address, image), image); err != nil {
		return err
	}
	process, err := pid(ctx, s, e)
	if err != nil {
		return err
	}
	return l.sweepIn(image, "complete", process)
}

func (l *lazy) sweepIn(image, state string, process int) error {
	t, err := openTree(process)
	if err != nil {
		return err
	}
	defer t.close()
	if _, err := t.sweep(); err != nil { // what is absent comes now
		return err
	}
	if err := dropCaches(); err != nil {
		return err
	}
	cold, err := t.sweep()
	if err != nil {
		return err
	}
	warm, err := repeat(sweeps, t.sweep)
	if err != nil {
		return err
	}
	opens, err := repeat(sweeps, func() (float64, error) { return t.opens(t.files, true) })
	if err != nil {
		return err
	}
	l.figures = merge(l.figures, []figure{
		{image, state, "read all, cold", "MB/s", []float64{cold}},
		{image, state, "read all, warm", "MB/s", warm},
		{image, state, "open all", "us", opens},
		{image, state, "files", "files", []float64{float64(len(t.files))}},
	})
	return nil
}
