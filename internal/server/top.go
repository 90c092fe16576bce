package server

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dewpoint/internal/engine"
	"dewpoint/internal/spec"
)

// Top implements api.Containers. It asks the cgroup, and proc(5) of each process.
func (c *containers) Top(ctx context.Context, name string) ([]spec.Process, error) {
	i, err := c.engine.Inspect(ctx, name)
	if err == nil && i.Pid == 0 {
		err = engine.ErrNotRunning
	}
	if err != nil {
		return nil, fmt.Errorf("processes of container %s: %w", name, err)
	}
	var all []spec.Process
	err = filepath.WalkDir(i.CgroupDir("memory"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return err
		}
		b, err := os.ReadFile(path)
		for _, pid := range strings.Fields(string(b)) {
			if p, ok := processOf(pid); ok {
				all = append(all, p)
			}
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) { // it has ended meanwhile
		err = engine.ErrNotRunning
	}
	if err != nil {
		return nil, fmt.Errorf("processes of container %s: %w", name, err)
	}
	slices.SortFunc(all, func(a, b spec.Process) int {
		return cmp.Or(a.Started.Compare(b.Started), cmp.Compare(a.PID, b.PID))
	})
	return all, nil
}

// ticks are those of a second in proc(5), on every architecture that Linux has with Go.
const ticks = 100

// processOf is false of a process that has ended.
func processOf(pid string) (p spec.Process, ok bool) {
	dir := "/proc/" + pid
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return p, false
	}
	name, rest, _ := strings.Cut(string(stat), "(")
	i := strings.LastIndexByte(rest, ')') // a name may have any letters
	if i < 0 {
		return p, false
	}
	f := strings.Fields(rest[i+1:])
	if len(f) < 22 {
		return p, false
	}
	n := func(s string) int64 { v, _ := strconv.ParseInt(strings.TrimSpace(s), 10, 64); return v }
	p = spec.Process{PID: int(n(name)), Parent: int(n(f[1])), CPU: float64(n(f[11])+n(f[12])) / ticks,
		Memory: n(f[21]) * int64(os.Getpagesize()), Command: rest[:i]}
	if st, err := os.Stat(dir); err == nil {
		p.UID = int(st.Sys().(*syscall.Stat_t).Uid)
	}
	if line, _ := os.ReadFile(dir + "/cmdline"); len(line) > 0 {
		p.Command = string(bytes.ReplaceAll(bytes.TrimRight(line, "\x00"), []byte{0}, []byte{' '}))
	}
	p.Started = booted().Add(time.Duration(n(f[19])) * time.Second / ticks)
	return p, true
}

// booted is when the machine was.
func booted() time.Time {
	b, _ := os.ReadFile("/proc/uptime")
	first, _, _ := strings.Cut(string(b), " ")
	s, _ := strconv.ParseFloat(first, 64)
	return time.Now().Add(-time.Duration(s * float64(time.Second)))
}
