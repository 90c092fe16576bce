package server

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

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
	all, err := processes(i.CgroupDir("memory"))
	if err != nil {
		return nil, fmt.Errorf("processes of container %s: %w", name, err)
	}
	return all, nil
}

// What Top gives: so many processes, and so many bytes of each command. A container chooses both.
const (
	maxProcesses = 4096
	maxCommand   = 4096
)

// processes are those of a cgroup and of the cgroups below it, which may come and go meanwhile.
func processes(cgroup string) (all []spec.Process, err error) {
	err = filepath.WalkDir(cgroup, func(path string, d fs.DirEntry, err error) error {
		if err != nil && path == cgroup && errors.Is(err, fs.ErrNotExist) {
			return engine.ErrNotRunning // it has ended meanwhile
		}
		if err != nil || d.Name() != "cgroup.procs" {
			return passing(err)
		}
		f, err := os.Open(path)
		if err != nil {
			return passing(err)
		}
		defer f.Close()
		lines := bufio.NewScanner(f)
		for lines.Scan() {
			if len(all) == maxProcesses {
				return fs.SkipAll
			}
			if p, ok := processOf(lines.Text()); ok {
				all = append(all, p)
			}
		}
		return passing(lines.Err())
	})
	slices.SortFunc(all, func(a, b spec.Process) int {
		return cmp.Or(a.Started.Compare(b.Started), cmp.Compare(a.PID, b.PID))
	})
	return all, err
}

// passing is nil of an error of a cgroup that is gone, or that is threaded: the one above has its processes.
func passing(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
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
	if f, err := os.Open(dir + "/cmdline"); err == nil {
		if line, _ := io.ReadAll(io.LimitReader(f, maxCommand)); len(line) > 0 {
			p.Command = string(bytes.ReplaceAll(bytes.TrimRight(line, "\x00"), []byte{0}, []byte{' '}))
		}
		f.Close()
	}
	p.Command = strings.ToValidUTF8(p.Command, "?") // or it could not be told
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
