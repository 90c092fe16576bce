package deploy

import (
	"bufio"
	"bytes"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
)

// limits are the containers that run with a limit of memory, by the directories of their
// cgroups. They idle, most of them: what they may yet take is nobody else's. It is safe for
// concurrent use.
type limits struct {
	mu  sync.Mutex
	all map[string]int64 // guarded by mu; bytes by directory
}

// add takes a container in, or takes it out if it has no limit any more.
func (l *limits) add(dir string) {
	bytes, ok := limitIn(dir)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !ok {
		delete(l.all, dir)
		return
	}
	if l.all == nil {
		l.all = map[string]int64{}
	}
	l.all[dir] = bytes
}

// Unused is how many bytes the containers may yet take, beside what their processes have. Those that
// have ended are forgotten.
func (l *limits) Unused() (sum int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for dir, limit := range l.all {
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			delete(l.all, dir)
			continue
		}
		sum += max(0, limit-memoryIn(dir))
	}
	return sum
}

// limitIn is the limit of memory of a cgroup, in bytes, of version 1 or 2.
func limitIn(dir string) (int64, bool) {
	if dir == "" {
		return 0, false
	}
	for _, name := range []string{"memory.max", "memory.limit_in_bytes"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			continue
		}
		n, err := strconv.ParseInt(string(bytes.TrimSpace(b)), 10, 64)
		return n, err == nil && n < math.MaxInt64/2 // "max", and what version 1 says instead, is none
	}
	return 0, false
}

// memoryIn is how many bytes of memory the processes of a cgroup take that is not
// of files; 0 if it has ended, or that is not known.
func memoryIn(dir string) int64 {
	f, err := os.Open(filepath.Join(dir, "memory.stat"))
	if dir == "" || err != nil {
		return 0
	}
	defer f.Close()
	in := bufio.NewScanner(f)
	for in.Scan() {
		name, n, _ := strings.Cut(in.Text(), " ")
		if name == "anon" || name == "total_rss" { // of cgroup v2, v1
			n, _ := strconv.ParseInt(n, 10, 64)
			return n
		}
	}
	return 0
}
