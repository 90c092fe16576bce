package mount

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"dewpoint/internal/spec"

	"golang.org/x/sys/unix"
)

// Config says where Probe tries the backends and what it may choose.
type Config struct {
	Dir     string        // existing directory on the file system where layers will lie
	Force   string        // the only backend to try; "" is the best that works
	Timeout time.Duration // of the trial of one backend; 0 is 10 s
	Log     *slog.Logger  // nil is none
}

// Finding is what Probe learnt of one backend.
type Finding struct {
	Backend string
	Works   bool
	Took    time.Duration // of the trial
	Reason  string        // why it does not work, in one line; "" if it does
	Remedy  string        // what would make it work; "" if nothing is known
	Err     error         // below Reason; nil if it works
}

func (f Finding) String() string {
	switch {
	case f.Works:
		return f.Backend + " works"
	case f.Remedy == "":
		return f.Backend + " does not work: " + f.Reason
	}
	return f.Backend + " does not work: " + f.Reason + "; remedy: " + f.Remedy
}

const probePrefix = ".probe-"

// Probe mounts a small layer with each backend, reads it through overlayfs,
// and returns the best backend that gives back the right bytes, together with
// what it found of all it tried. If none works, or not the one that is forced,
// the error wraps ErrUnusable and says why.
//
// The trials run in a mount namespace of their own, so that other processes see
// nothing of them and nothing stays mounted whatever happens. A trial that does
// not end within the timeout is left to itself and counts as not working.
// Any number of processes may probe one directory at a time.
func Probe(ctx context.Context, cfg Config) (Backend, []Finding, error) {
	names := spec.Mounts
	if cfg.Force != "" {
		if !slices.Contains(names, cfg.Force) {
			_, err := New(cfg.Force)
			return nil, nil, err
		}
		names = []string{cfg.Force}
	}
	s, err := newSample(cfg.Dir)
	if err != nil {
		return nil, nil, fmt.Errorf("probe mounts in %s: %w", cfg.Dir, err)
	}
	defer s.remove()
	var best Backend
	var findings []Finding
	for _, name := range names {
		b, _ := New(name)
		f := s.examine(ctx, b, cfg.timeout())
		findings = append(findings, f)
		if f.Works && best == nil {
			best = b
		}
		if err := ctx.Err(); err != nil {
			return nil, findings, err
		}
		cfg.log().Debug("mount backend tried", "backend", name, "works", f.Works, "took", f.Took, "reason",
			f.Reason)
	}
	if best == nil {
		return nil, findings, unusable(findings)
	}
	return best, findings, nil
}

func (c Config) timeout() time.Duration {
	if c.Timeout > 0 {
		return c.Timeout
	}
	return 10 * time.Second
}

func (c Config) log() *slog.Logger {
	if c.Log != nil {
		return c.Log
	}
	return slog.New(slog.DiscardHandler)
}

func unusable(findings []Finding) error {
	lines := make([]string, len(findings))
	for i, f := range findings {
		lines[i] = f.String()
	}
	return fmt.Errorf("%w: %s", ErrUnusable, strings.Join(lines, "; "))
}

// examine tries one backend on the sample.
func (s *sample) examine(ctx context.Context, b Backend, timeout time.Duration) Finding {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	begin := time.Now()
	done := make(chan error, 1)
	go inMountNamespace(done, func() error { return s.trial(ctx, b) })
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = &trialError{stepWait, ctx.Err()}
	}
	f := Finding{Backend: b.Name(), Works: err == nil, Took: time.Since(begin), Err: err}
	if err != nil {
		f.Reason, f.Remedy = diagnose(b.Name(), err)
	}
	return f
}

// inMountNamespace runs fn in a thread with a mount namespace and a working
// directory of its own, both of which end with the thread, and sends its result.
func inMountNamespace(done chan<- error, fn func() error) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread stands for the process in /proc and must not change.
		// While this goroutine holds it, another gets another thread.
		through := make(chan error, 1)
		go inMountNamespace(through, fn)
		done <- <-through
		runtime.UnlockOSThread()
		return
	}
	// Not unlocked: the thread ends with this goroutine.
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		done <- &trialError{stepNamespace, os.NewSyscallError("unshare", err)}
		return
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		done <- &trialError{stepNamespace, os.NewSyscallError("mount", err)}
		return
	}
	done <- fn()
}

// trial mounts the sample by b, overlayfs above it, and looks through both.
func (s *sample) trial(ctx context.Context, b Backend) error {
	if err := unix.Chdir(s.dir); err != nil {
		return &trialError{stepNamespace, os.NewSyscallError("chdir", err)}
	}
	layer := filepath.Join(s.dir, "layer")
	if err := b.Mount(ctx, s.files, layer); err != nil {
		return &trialError{stepLayer, err}
	}
	defer Unmount(layer)
	// Names relative to the working directory: options must not hold colons and commas.
	if err := unix.Mount("overlay", "merged", "overlay", unix.MS_RDONLY, "lowerdir=layer:below"); err != nil {
		return &trialError{stepOverlay, os.NewSyscallError("mount overlay", err)}
	}
	defer Unmount("merged")
	if err := s.compare(os.DirFS("merged")); err != nil {
		return &trialError{stepRead, err}
	}
	return nil
}

// compare checks that the merged tree is what the sample says.
func (s *sample) compare(merged fs.FS) error {
	got, err := fs.ReadFile(merged, sampleFile)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, s.content) {
		return fmt.Errorf("%s: %d wrong bytes were read", sampleFile, len(got))
	}
	if _, err := fs.Stat(merged, sampleHidden); err == nil {
		return fmt.Errorf("%s: a whiteout does not hide it", sampleHidden)
	}
	left, err := fs.ReadDir(merged, sampleOpaque)
	if err == nil && len(left) != 0 {
		err = fmt.Errorf("%s: an opaque directory shows %s of the layer below", sampleOpaque, left[0].Name())
	}
	return err
}
