package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	"golang.org/x/sys/unix"

	"dewpoint/internal/engine/shimgroup"
	"dewpoint/internal/engine/tool"
)

// defaultPerShim is how many containers share a shim, and its fate.
const defaultPerShim = 32

// shims assigns tasks to groups of [shimgroup]. Two things that a shim does
// shape it. It ends when containerd deletes its last task, also when another is
// being made but is not in its books yet, and so does one that could not make
// its first: therefore a group's first task is made alone, and while others are
// made the last that stands is not deleted. And what it is told to end it may
// take a moment to end: a group whose last task is deleted takes no more.
//
// The zero value gives each task a shim of its own. It is safe for concurrent use.
type shims struct {
	dir        string // of the groups
	containers string // where the runtime keeps their states
	program    string // shimgroup.Program; "" is no groups
	real       string // shimgroup.Real
	max        int    // tasks in a group
	wide       int    // groups that are begun at the same time
	serial     bool   // a shim makes one task after the other: so many groups are filled at the same time

	mu      sync.Mutex
	groups  map[string]*shimGroup // by name; guarded by mu, also what they point to
	of      map[string]*shimGroup // by task; guarded by mu
	being   map[string]bool       // tasks that are being made; guarded by mu
	changed chan struct{}         // closed when a group changes; guarded by mu
	made    int                   // groups so far; guarded by mu

	ending sync.WaitGroup // of the shims of groups that are empty
}

type shimGroup struct {
	name    string
	making  int  // tasks that are being made
	stand   int  // that stand, and are not being deleted
	leaving int  // that are being deleted
	over    bool // takes no more
	ready   bool // its shim was started ahead
}

// full says whether the group takes no more tasks.
func (g *shimGroup) full(max int) bool { return g.over || g.room(max) <= 0 }

func (g *shimGroup) room(max int) int { return max - g.making - g.stand - g.leaving }

// spare says whether the group's shim runs and has no task yet.
func (g *shimGroup) spare() bool { return g.ready && g.making+g.stand+g.leaving == 0 }

func newShims(cfg Config) *shims {
	s := &shims{dir: cfg.shimsDir(), containers: filepath.Join(cfg.runcRoot(), cfg.Namespace), max: cfg.PerShim,
		groups: make(map[string]*shimGroup), of: make(map[string]*shimGroup), being: make(map[string]bool),
		changed: make(chan struct{})}
	if cfg.PerShim > 1 {
		s.program = tool.Find(cfg.ShimProgram, shimgroup.Program)
	}
	return s
}

// serve tells what shim the containerd has that answers at the socket, since
// those of other versions do not understand it. version is containerd's.
func (s *shims) serve(socket, version string) {
	s.real = shimOf(socket)
	s.wide = runtime.NumCPU()
	if s.serial = strings.HasPrefix(strings.TrimPrefix(version, "v"), "1."); s.serial {
		s.wide = 2 * runtime.NumCPU()
	}
}

// confuses says whether two tasks have a shim that tells ends apart by the number of the process alone,
// also those of processes that have ended long ago: it may take the end of one for that of the other.
func (s *shims) confuses(task, other string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.serial && s.of[task] != nil && s.of[task] == s.of[other]
}

// Shims says how containers get their shims, and whether the program is missing
// with which they would share them.
func (e *tasks) Shims() (how string, missing bool) {
	s := e.shims
	switch {
	case s.max <= 1:
		return "each container has one of its own", false
	case s.program == "":
		return "each container has one of its own: " + shimgroup.Program + " is not installed", true
	case s.real == "":
		return "each container has one of its own: " + shimgroup.Real +
			" is neither in containerd's PATH nor beside it", true
	}
	return fmt.Sprintf("up to %d containers share one", s.max), false
}

// shimOf finds the shim as the containerd at the socket does, in its PATH, then
// beside its program; "" if that cannot be told.
func shimOf(socket string) string {
	c, err := net.Dial("unix", socket)
	if err != nil {
		return ""
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return ""
	}
	var peer *unix.Ucred
	var perr error
	if err := raw.Control(func(fd uintptr) {
		peer, perr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || perr != nil {
		return ""
	}
	proc := "/proc/" + strconv.Itoa(int(peer.Pid))
	env, _ := os.ReadFile(proc + "/environ")
	var dirs []string
	for v := range strings.SplitSeq(string(env), "\x00") {
		if path, ok := strings.CutPrefix(v, "PATH="); ok {
			dirs = filepath.SplitList(path)
		}
	}
	if exe, err := os.Readlink(proc + "/exe"); err == nil {
		dirs = append(dirs, filepath.Dir(exe))
	}
	for _, d := range dirs {
		if p := filepath.Join(d, shimgroup.Real); filepath.IsAbs(p) && tool.Executable(p) {
			return p
		}
	}
	return ""
}

// seat is a task's place in a group while it is made.
type seat struct {
	s     *shims
	group *shimGroup // nil: a shim of its own
	task  string
}

// path is what containerd is told to execute; "" is its own shim.
func (p seat) path() string {
	if p.group == nil {
		return ""
	}
	return shimgroup.Path(filepath.Join(p.s.dir, p.group.name))
}

func (p seat) name() string {
	if p.group == nil {
		return ""
	}
	return p.group.name
}

// takeSeat finds a place for a task that is to be made; done must follow.
func (s *shims) takeSeat(ctx context.Context, task string) (seat, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.being[task] = true
	if s.program == "" || s.real == "" {
		return seat{s: s, task: task}, nil
	}
	for {
		g, wait := s.choose()
		var err error
		switch {
		case wait:
			err = s.await(ctx)
		case g == nil:
			g, err = s.found()
		}
		if err != nil {
			delete(s.being, task)
			return seat{}, err
		}
		if !wait {
			g.making++
			return seat{s, g, task}, nil
		}
	}
}

// await waits for a change. It needs mu, which it gives up meanwhile.
func (s *shims) await(ctx context.Context) error {
	changed := s.changed
	s.mu.Unlock()
	defer s.mu.Lock()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// choose gives the group that a task joins, nil if another one is to be founded,
// or says that a change is to be awaited. It needs mu.
func (s *shims) choose() (g *shimGroup, wait bool) {
	var best, spare *shimGroup
	begun, soon, open, room := 0, false, 0, 0
	for _, g := range s.groups {
		switch {
		case g.full(s.max):
			continue
		case g.stand > 0:
			room += g.room(s.max)
			if best == nil || cmp.Or(cmp.Compare(g.making, best.making), cmp.Compare(best.stand, g.stand)) < 0 {
				best = g
			}
		case g.making > 0: // its first, which is alone
			begun++
			soon = soon || g.ready
		default:
			spare = g
		}
		open++
	}
	more := begun < s.wide && !soon
	switch {
	case best != nil && s.serial:
		if best.making > 0 && open < s.wide {
			return spare, false
		}
		return best, false
	case best != nil && (begun > 0 || room > s.ahead()):
		return best, false
	case spare != nil && begun == 0, more:
		return spare, false // nil: the others need not wait for the group that comes next
	}
	return best, best == nil
}

// ahead is how few places are left when the next group is begun.
func (s *shims) ahead() int { return min(2*runtime.NumCPU(), s.max/4) }

// short says whether a task that came now could not join a shim that runs, or
// many could not. It needs mu.
func (s *shims) short() bool {
	room := 0
	for _, g := range s.groups {
		if g.spare() || g.making > 0 && g.stand == 0 {
			return false
		}
		if g.stand > 0 && !g.full(s.max) {
			room += g.room(s.max)
		}
	}
	return room <= s.ahead()
}

// anyStanding names a group with a task. It needs mu.
func (s *shims) anyStanding() string {
	for name, g := range s.groups {
		if g.stand > 0 {
			return name
		}
	}
	return ""
}

// found makes a group that tasks may join. It needs mu.
func (s *shims) found() (*shimGroup, error) {
	g, err := s.newGroup()
	if err == nil {
		s.groups[g.name] = g
	}
	return g, err
}

// newGroup makes a group that nobody knows of. It needs mu.
func (s *shims) newGroup() (*shimGroup, error) {
	s.made++
	name := strconv.FormatInt(time.Now().UnixMicro(), 36) + "-" + strconv.Itoa(s.made)
	if err := shimgroup.Make(filepath.Join(s.dir, name), s.program, s.real, s.containers); err != nil {
		return nil, err
	}
	return &shimGroup{name: name}, nil
}

// done ends the making of a task: it stands, or nothing is left of it.
func (p seat) done(stands bool) {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	delete(p.s.being, p.task)
	if p.group == nil {
		return
	}
	p.group.making--
	if stands {
		p.group.stand++
		p.s.of[p.task] = p.group
	}
	p.s.settle(p.group)
}

// leave is to be called before a task is deleted, and what it returns after
// that. It waits until the group can do without the task.
func (s *shims) leave(ctx context.Context, task string) (func(gone bool), error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.of[task]
	if g == nil {
		return func(bool) {}, nil
	}
	for g.stand == 1 && g.making > 0 {
		g.over = true // or it would not end
		if err := s.await(ctx); err != nil {
			return nil, err
		}
	}
	g.stand--
	g.leaving++
	g.over = g.stand == 0
	return func(gone bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		g.leaving--
		if gone {
			delete(s.of, task)
		} else {
			g.stand++ // it runs, say: the shim goes on
			g.over = false
		}
		s.settle(g)
	}, nil
}

// settle removes a group that nothing is in, and wakes who waits. It needs mu.
func (s *shims) settle(g *shimGroup) {
	if g.making+g.stand+g.leaving == 0 {
		delete(s.groups, g.name)
		dir := filepath.Join(s.dir, g.name)
		shim := shimgroup.Find(dir)
		_ = shimgroup.Remove(dir) // else at the next start
		s.ending.Go(shim.End)
	}
	s.wake()
}

// wake tells who awaits a change. It needs mu.
func (s *shims) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// shimFile keeps the name of a task's group in the container's directory.
func (e *tasks) shimFile(name string) string { return filepath.Join(e.cfg.dir(name), "shim") }

// adoptShims learns which task is in which group from what an earlier process
// has left, and removes groups that no container names: of one that does, the
// task may be under way still.
func (e *tasks) adoptShims(ctx context.Context) error {
	tasks, err := e.taskNames(ctx)
	if err != nil {
		return err
	}
	s := e.shims
	s.mu.Lock()
	defer s.mu.Unlock()
	groupOf, named, err := e.namedShims()
	if err != nil {
		return err
	}
	for _, task := range tasks {
		name := groupOf[task]
		if name == "" {
			continue
		}
		g := s.groups[name]
		if g == nil {
			g = &shimGroup{name: name}
			s.groups[name] = g
		}
		g.stand++
		s.of[task] = g
	}
	dirs, err := os.ReadDir(s.dir)
	for _, d := range dirs {
		if !named[d.Name()] {
			err = errors.Join(err, shimgroup.End(filepath.Join(s.dir, d.Name()))) // a spare one's may run
		}
	}
	return err
}

// tasks are the names of the tasks that containerd has. It asks the shims about them, one after the other,
// and one that restores a container does not answer: then they are those that it has directories of.
func (e *tasks) taskNames(ctx context.Context) (names []string, err error) {
	some, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	r, err := e.c.Tasks.List(some, &tasksapi.ListTasksRequest{})
	if err == nil {
		for _, t := range r.Tasks {
			names = append(names, t.ID)
		}
		return names, nil
	}
	entries, derr := os.ReadDir(filepath.Dir(e.cfg.bundle("x")))
	if some.Err() == nil || derr != nil {
		return nil, err
	}
	for _, d := range entries {
		names = append(names, d.Name())
	}
	return names, nil
}

// namedShims reads which container names which group, and which groups are named.
func (e *tasks) namedShims() (of map[string]string, named map[string]bool, err error) {
	of, named = make(map[string]string), make(map[string]bool)
	containers, err := os.ReadDir(e.cfg.containersDir())
	for _, c := range containers {
		if b, err := os.ReadFile(e.shimFile(c.Name())); err == nil && ValidName(string(b)) == nil {
			of[c.Name()], named[string(b)] = string(b), true
		}
	}
	return of, named, err
}
