package profile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	usualTracing = "/sys/kernel/tracing"
	eventDir     = "events/filemap/mm_filemap_add_to_page_cache"
	clock        = "mono"
)

// tracing is the kernel's tracefs: where it is mounted, or a mount that no
// name leads to and that ends with its descriptor.
type tracing struct {
	path string
	fd   int // -1 if the path is of a mount of the system's
}

// openTracing finds tracefs, or mounts it for itself alone.
func openTracing() (*tracing, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(usualTracing, &fs); err == nil && fs.Type == unix.TRACEFS_MAGIC {
		return &tracing{usualTracing, -1}, nil
	}
	fd, err := mountTracing()
	if err != nil {
		return nil, fmt.Errorf("%w: mount tracefs: %w (the kernel needs CONFIG_FTRACE, dewd CAP_SYS_ADMIN; or mount tracefs at %s)",
			ErrUnsupported, err, usualTracing)
	}
	return &tracing{"/proc/self/fd/" + strconv.Itoa(fd), fd}, nil
}

func mountTracing() (int, error) {
	fs, err := unix.Fsopen("tracefs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, os.NewSyscallError("fsconfig", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC,
		unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return -1, os.NewSyscallError("fsmount", err)
	}
	return fd, nil
}

func (t *tracing) Close() {
	if t.fd >= 0 {
		unix.Close(t.fd)
	}
}

// layout checks that the kernel has what a recording needs, and reads how it
// writes events.
func (t *tracing) layout() (layout, error) {
	missing := func(what string, err error) error {
		return fmt.Errorf("%w: %s: %w (the kernel needs CONFIG_FTRACE and CONFIG_EVENT_TRACING, and must not be locked down)",
			ErrUnsupported, what, err)
	}
	format, err := os.ReadFile(filepath.Join(t.path, eventDir, "format"))
	if err != nil {
		return layout{}, missing("event of pages added to the page cache", err)
	}
	page, err := os.ReadFile(filepath.Join(t.path, "events/header_page"))
	if err != nil {
		return layout{}, missing("layout of the buffers", err)
	}
	if _, err := os.Stat(filepath.Join(t.path, "instances")); err != nil {
		return layout{}, missing("instances of tracing", err)
	}
	l, err := parseLayout(string(format), string(page))
	if err != nil {
		return layout{}, fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return l, nil
}

// instance is a set of ring buffers of the kernel's, of one recording.
type instance struct {
	*tracing
	name   string
	layout layout
	cpus   []string // names in per_cpu
	pipes  []int
	buf    []byte
	kb     int // size of each CPU's buffer
}

const (
	prefix      = "dewpoint-"
	minBufferKB = 256     // of each CPU
	allBufferKB = 8 << 10 // of all CPUs together, where that leaves each the least
)

// newInstance makes an instance that records nothing yet. bufferKB is the size
// of each CPU's buffer; 0 is the default.
func newInstance(bufferKB int) (_ *instance, err error) {
	t, err := openTracing()
	if err != nil {
		return nil, err
	}
	i := &instance{tracing: t}
	defer func() {
		if err != nil {
			err = errors.Join(err, i.remove())
		}
	}()
	if i.layout, err = t.layout(); err != nil {
		return nil, err
	}
	i.buf = make([]byte, i.layout.page)
	if err := i.create(); err != nil {
		return nil, fmt.Errorf("make an instance of tracing: %w", err)
	}
	return i, i.prepare(bufferKB)
}

// create takes the first free name of this process.
func (i *instance) create() error {
	own, err := identity(os.Getpid())
	if err != nil {
		return err
	}
	for n := 0; ; n++ {
		name := fmt.Sprintf("%s%s-%d", prefix, own, n)
		err := os.Mkdir(i.in("instances", name), 0o700)
		if err == nil {
			i.name = name
			return nil
		}
		if !errors.Is(err, os.ErrExist) {
			return err
		}
	}
}

func (i *instance) in(path ...string) string {
	return filepath.Join(append([]string{i.path}, path...)...)
}

func (i *instance) set(value string, path ...string) error {
	return os.WriteFile(i.in(append([]string{"instances", i.name}, path...)...), []byte(value), 0)
}

// prepare keeps the oldest events if a buffer fills, for the beginning of a
// start is what matters most of it.
func (i *instance) prepare(bufferKB int) error {
	cpus, err := os.ReadDir(i.in("instances", i.name, "per_cpu"))
	if err != nil {
		return err
	}
	for _, c := range cpus {
		i.cpus = append(i.cpus, c.Name())
	}
	if err := errors.Join(
		i.resize(bufferKB),
		i.set(clock, "trace_clock"),
		i.set("0", "options/overwrite"),
	); err != nil {
		return err
	}
	for _, c := range i.cpus {
		path := i.in("instances", i.name, "per_cpu", c, "trace_pipe_raw")
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return &os.PathError{Op: "open", Path: path, Err: err}
		}
		i.pipes = append(i.pipes, fd)
	}
	return nil
}

// resize gives each CPU a buffer of kb KiB. If kb is 0 it leaves the kernel's
// own size, for to change it takes time, unless there are many CPUs.
func (i *instance) resize(kb int) error {
	if kb == 0 {
		b, err := os.ReadFile(i.in("instances", i.name, "buffer_size_kb"))
		if err != nil {
			return err
		}
		now, err := strconv.Atoi(strings.TrimSpace(string(b)))
		if err == nil && now >= minBufferKB && now*len(i.cpus) <= allBufferKB {
			i.kb = now
			return nil
		}
		kb = max(allBufferKB/max(len(i.cpus), 1), minBufferKB)
	}
	i.kb = kb
	return i.set(strconv.Itoa(kb), "buffer_size_kb")
}

// fills is how long the buffers take to fill at the least: an event takes 48
// bytes, and to read a page 2 µs.
func (i *instance) fills() time.Duration {
	return time.Duration(max(i.kb, 1)) << 10 / 48 * 2 * time.Microsecond
}

// enable begins or ends the recording of events.
func (i *instance) enable(on bool) error {
	return i.set(map[bool]string{true: "1", false: "0"}[on], eventDir, "enable")
}

// filter restricts the events to the layers' mounts. It may be changed while
// events are recorded.
func (i *instance) filter(layers map[uint32]*source) error {
	devs := make([]uint32, 0, len(layers))
	for d := range layers {
		devs = append(devs, d)
	}
	slices.Sort(devs)
	return i.set(filterOf(devs), eventDir, "filter")
}

// filterOf matches the devices, which ascend; none of them if there are none.
func filterOf(devs []uint32) string {
	if len(devs) == 0 {
		return fmt.Sprintf("s_dev == %d", uint32(1<<32-1))
	}
	var terms []string
	for i := 0; i < len(devs); {
		k := i
		for k+1 < len(devs) && devs[k+1] == devs[k]+1 {
			k++
		}
		if i == k {
			terms = append(terms, fmt.Sprintf("s_dev == %d", devs[i]))
		} else {
			terms = append(terms, fmt.Sprintf("(s_dev >= %d && s_dev <= %d)", devs[i], devs[k]))
		}
		i = k + 1
	}
	return strings.Join(terms, " || ")
}

// drain appends what the buffers hold to events, at most room; over is how
// many there were beyond.
func (i *instance) drain(events []event, room int) (_ []event, over int64) {
	for _, fd := range i.pipes {
		for {
			n, err := unix.Read(fd, i.buf)
			if err == unix.EINTR {
				continue
			}
			if err != nil || n <= 0 {
				break
			}
			i.layout.each(i.buf[:n], func(e event) {
				if room > 0 {
					events = append(events, e)
					room--
				} else {
					over++
				}
			})
		}
	}
	return events, over
}

// lost is how many events found no room in the buffers.
func (i *instance) lost() (int64, error) {
	var sum int64
	for _, c := range i.cpus {
		b, err := os.ReadFile(i.in("instances", i.name, "per_cpu", c, "stats"))
		if err != nil {
			return sum, err
		}
		for line := range strings.Lines(string(b)) {
			what, count, _ := strings.Cut(strings.TrimSpace(line), ": ")
			switch what {
			case "overrun", "commit overrun", "dropped events":
				n, _ := strconv.ParseInt(count, 10, 64)
				sum += n
			}
		}
	}
	return sum, nil
}

// remove gives everything back.
func (i *instance) remove() error {
	for _, fd := range i.pipes {
		unix.Close(fd)
	}
	i.pipes = nil
	var err error
	if i.name != "" {
		err = unix.Rmdir(i.in("instances", i.name))
		if err == unix.ENOENT {
			err = nil
		}
		err = os.NewSyscallError("remove the instance of tracing", err)
		i.name = ""
	}
	i.Close()
	i.tracing = &tracing{fd: -1}
	return err
}
