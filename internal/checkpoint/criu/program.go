package criu

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/durable"
)

// The oldest version that works with newer kernels.
const oldestMajor, oldestMinor = 4, 2

const remedy = "run scripts/install demo, which unpacks a newer suite's CRIU into a prefix of its own, or name one of 4.2 or newer in the configuration"

// tools is where scripts/install puts programs.
const tools = "/var/cache/dewpoint/tools"

// Find returns the path of CRIU: the configured one, else the first of version
// 4.2 or newer beside this program, in the directory of scripts/install, and in
// PATH, else the first at all. "" if there is none.
func Find(ctx context.Context, configured string) string {
	if configured != "" {
		return configured
	}
	var candidates []string
	if self, err := os.Executable(); err == nil {
		candidates = append(candidates, filepath.Join(filepath.Dir(self), "criu"))
	}
	candidates = append(candidates, filepath.Join(cmp.Or(os.Getenv("DEWPOINT_TOOLS"), tools), "criu/bin/criu"))
	if p, err := exec.LookPath("criu"); err == nil {
		candidates = append(candidates, p)
	}
	first := ""
	for _, p := range candidates {
		v, err := version(ctx, p)
		if err == nil && newEnough(v) {
			return p
		}
		if err == nil && first == "" {
			first = p
		}
	}
	return first
}

var versionLine = regexp.MustCompile(`(?m)^Version: (\S+)`)

func version(ctx context.Context, program string) (string, error) {
	if program == "" {
		return "", fmt.Errorf("%w: CRIU is missing: %s", checkpoint.ErrUnable, remedy)
	}
	out, err := exec.CommandContext(ctx, program, "--version").CombinedOutput()
	m := versionLine.FindSubmatch(out)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, exec.ErrNotFound):
		return "", fmt.Errorf("%w: there is no CRIU at %s: %s", checkpoint.ErrUnable, program, remedy)
	case err != nil:
		return "", fmt.Errorf("%w: %s --version: %w: %s", checkpoint.ErrUnable, program, err,
			strings.TrimSpace(string(out)))
	case m == nil:
		return "", fmt.Errorf("%w: %s --version says %q: is it CRIU? %s", checkpoint.ErrUnable, program,
			strings.TrimSpace(string(out)), remedy)
	}
	return string(m[1]), nil
}

func newEnough(version string) bool {
	var major, minor int
	_, _ = fmt.Sscanf(version, "%d.%d", &major, &minor)
	return major > oldestMajor || major == oldestMajor && minor >= oldestMinor
}

var runcLine = regexp.MustCompile(`(?m)^runc version (\S+)`)

func runcVersion(ctx context.Context, program string) (string, error) {
	out, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%w: runc, which runs CRIU: %w; install the package runc", checkpoint.ErrUnable, err)
	}
	m := runcLine.FindSubmatch(out)
	if m == nil {
		return "", fmt.Errorf("%w: %s --version is not runc's: %q", checkpoint.ErrUnable, program,
			strings.TrimSpace(string(out)))
	}
	return string(m[1]), nil
}

// learnFeatures sees to it that CRIU finds what the kernel can do, which takes
// it three times as long to learn as restoring a small container does. It keeps
// that under /run, and only if that is a tmpfs, since it must not outlive the
// kernel; it reads it from anywhere. Where /run is none, it is let learn with
// one of its own, and the file is put in its place at every start of the daemon.
func learnFeatures(ctx context.Context, program string) error {
	var st unix.Statfs_t
	if err := unix.Statfs("/run", &st); err != nil || st.Type == unix.TMPFS_MAGIC {
		return err
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", learn, program)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	out, err := cmd.Output()
	path, content, ok := bytes.Cut(out, []byte("\n"))
	if err != nil || !ok {
		return fmt.Errorf("CRIU learns the kernel's features at each start: %s: %w", out, err)
	}
	return keepFeatures(string(path), content)
}

// keepFeatures puts the file in its place. Other daemons on this machine may be doing the same.
func keepFeatures(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	return durable.WriteFile(path, content, 0o600)
}

// Where the file lies is chosen when CRIU is built.
const learn = `mount -t tmpfs tmpfs /run && mkdir /run/criu || exit
"$0" check >/dev/null 2>&1
for f in /run/criu.kdat /run/criu/criu.kdat; do
	if [ -s $f ]; then echo $f; cat $f; exit; fi
done
exit 1
`
