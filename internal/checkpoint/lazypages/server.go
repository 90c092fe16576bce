package lazypages

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/checkpoint/image"
)

// ChunkSize is how the files of pages are divided for a Source.
const ChunkSize = image.ChunkSize

// SocketName is where CRIU looks for its pages, in its work directory.
const SocketName = "lazy-pages.socket"

// Source gives the pages. It is used from several goroutines.
type Source interface {
	// Chunk is the chunk'th ChunkSize bytes of a file of pages ("pages-1.img"),
	// less only at the end, verified. It tries again itself what may succeed,
	// until ctx ends: any other error ends the restore. The bytes are not
	// changed, by neither side.
	Chunk(ctx context.Context, file string, chunk int) ([]byte, error)
}

// Page names a page by its place in a file of pages.
type Page struct {
	File string `json:"file"`
	Page int64  `json:"page"`
}

// Config is one restore.
type Config struct {
	Dir    string // with CRIU's images; the files of pages are not read
	Work   string // CRIU's work directory
	Source Source
	Order  []Page // pushed before all others, and fetched already while CRIU works

	// Wait bounds how long a process waits for a page; 0 is ten seconds.
	Wait time.Duration
	// Rate bounds, in bytes per second, what is pushed that nobody has asked for
	// and that is not in Order; 0 is 256 MiB.
	Rate int64
	// Fetches is how many chunks are asked of the Source at once for faults, and
	// as many again for the rest; 0 is four.
	Fetches int

	// Guard is the command of a process that calls the function Guard: it kills
	// the restored processes if this one dies before all is in. Without it they
	// would then read empty pages.
	Guard []string
	// Held is kept open by the guard until it ends, so that a lock on it says that it lives; may be nil.
	Held *os.File
	// Kill ends what else belongs to the restore. It is called once, after the
	// restored processes have been killed, when not all memory could be given.
	Kill func(err error)
	Log  *slog.Logger
}

// deathWait bounds how long killed processes are waited for.
const deathWait = 10 * time.Second

// ErrUnfinished is that CRIU went away before all processes were restored: what
// it had made of them it has killed itself.
var ErrUnfinished = errors.New("criu ended before the restore was finished")

// Server fills the memory of one restore.
type Server struct {
	cfg   Config
	start time.Time

	ctx    context.Context // ends when all is in, or when the restore has failed
	cancel context.CancelFunc
	wg     sync.WaitGroup
	done   chan struct{} // closed when every goroutine but the last has ended
	live   chan struct{} // closed when CRIU has finished

	plan  plan
	pace  pace
	ahead ahead
	guard *guard // nil if there is none

	// mu may be taken while a process's mu is held, not the other way round.
	mu       sync.Mutex
	procs    map[*process]struct{}
	tasks    []task
	ids      uint32 // numbers of address spaces given so far
	finished bool
	err      error
	touched  []Page
	stats    Stats
}

// Stats is what a Server has done so far.
type Stats struct {
	Processes, Forks int
	Faults           int           // on pages of the image
	Empty            int           // on pages that were never used
	Waited, Longest  time.Duration // for chunks that were faulted on
	FaultBytes       int64         // pushed with what a fault asked for
	OrderBytes       int64         // by Order
	RestBytes        int64         // by themselves
	Forgotten        int64         // bytes given back by the processes before they were in
	Restored         time.Duration // from Serve until CRIU had finished
	Filled           time.Duration // from Serve until all was in
}

// Serve listens in Work, before CRIU starts, and returns. The restore ends with
// ctx: then the processes are killed unless all their memory is in.
func Serve(ctx context.Context, cfg Config) (*Server, error) {
	cfg = withDefaults(cfg)
	l, err := listen(cfg.Work)
	if err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, start: time.Now(), procs: map[*process]struct{}{}, done: make(chan struct{}),
		live: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancel(ctx)
	if s.guard, err = startGuard(cfg.Guard, cfg.Held); err != nil {
		l.Close()
		return nil, err
	}
	s.plan.init(cfg.Order)
	s.pace.rate, s.pace.free = cfg.Rate, make(chan struct{})
	s.fetchAhead(s.plan.order)
	s.goDo(func() error { return s.receive(l) })
	for range cfg.Fetches {
		s.goDo(s.serveFaults)
		s.goDo(s.serveRest)
	}
	go s.finish()
	return s, nil
}

func withDefaults(cfg Config) Config {
	if cfg.Wait == 0 {
		cfg.Wait = 10 * time.Second
	}
	if cfg.Rate == 0 {
		cfg.Rate = 256 << 20
	}
	if cfg.Fetches == 0 {
		cfg.Fetches = 4
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return cfg
}

// Wait returns when all pages are in or the processes have ended by themselves;
// else the error says why not, and the processes have been killed.
func (s *Server) Wait() error {
	<-s.done
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Done is closed when Wait would return.
func (s *Server) Done() <-chan struct{} { return s.done }

// Restored is closed when CRIU has finished: from here the processes run.
func (s *Server) Restored() <-chan struct{} { return s.live }

// Hurry lets the rest come as fast as it can: whoever is about to end the context
// calls it and gives Wait some time first.
func (s *Server) Hurry() {
	s.pace.end()
	s.plan.hurry()
}

// Touched is the pages that were waited for, the first of each chunk, in the
// order of their faults. What Order brings in time is not among them: the next
// Order is the present one and then these.
func (s *Server) Touched() []Page {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Page(nil), s.touched...)
}

// Stats may be called at any time.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

// goDo runs f until it ends; its error fails the restore, unless that is over.
func (s *Server) goDo(f func() error) {
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		if err := f(); err != nil && s.ctx.Err() == nil {
			s.fail(err)
		}
	}()
}

// fail ends the restore with the first error.
func (s *Server) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil && !s.complete() {
		s.err = err
	}
	s.stop()
}

// stop lets every goroutine end. Callers hold mu.
func (s *Server) stop() {
	s.cancel()
	s.plan.close()
}

// complete: nothing is missing any more. Callers hold mu.
func (s *Server) complete() bool { return s.finished && len(s.procs) == 0 }

// finish waits for all to end, and kills what cannot go on.
func (s *Server) finish() {
	defer close(s.done)
	<-s.ctx.Done()
	s.fail(fmt.Errorf("lazy pages: %w", context.Cause(s.ctx)))
	s.wg.Wait()
	if err := s.Err(); err != nil {
		s.kill(err)
	}
	for p := range s.procs {
		p.file.Close()
	}
	s.guard.end()
	closeTasks(s.tasks)
}

// Err is why the restore has failed, nil as long as it has not.
func (s *Server) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// kill ends the processes. Their memory stays guarded until they are dead: a
// process that got empty pages for what is missing would do harm.
func (s *Server) kill(err error) {
	killTasks(s.tasks)
	if s.cfg.Kill != nil {
		s.cfg.Kill(err)
	}
	deadline := time.Now().Add(deathWait)
	awaitTasks(s.tasks, deadline)
	for p := range s.procs {
		awaitGone(p.fd, deadline)
	}
	s.cfg.Log.Warn("a restore's memory could not be given", "dir", s.cfg.Dir, "err", err, "processes",
		len(s.tasks))
}

// add takes a process; chunks that it misses are put into the plan. t is nil for
// one that was forked.
func (s *Server) add(p *process, t *task) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	chunks := slices.Sorted(maps.Keys(p.mem.chunks)) // nobody else knows p yet
	s.ids++
	p.id = s.ids
	s.procs[p] = struct{}{}
	fds := []int{p.fd}
	switch {
	case t == nil:
		s.stats.Forks++
	case t.pidfd < 0:
		s.stats.Processes++
	default:
		s.tasks = append(s.tasks, *t)
		fds = append(fds, t.pidfd)
		s.stats.Processes++
	}
	s.plan.want(p.name, chunks)
	s.goDo(func() error { return s.watch(p) })
	return s.guard.hold(p.id, fds...)
}

// watch reads what the kernel says of p until p is filled or gone, and then
// closes its descriptor. If the restore ends first, finish does.
func (s *Server) watch(p *process) error {
	conn, err := p.file.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(s.ctx, func() { p.file.SetReadDeadline(time.Now()) })
	defer stop()
	var failed error
	err = conn.Read(func(uintptr) bool {
		for failed == nil {
			more, err := s.hear(p)
			failed = err
			if !more {
				break
			}
			time.Sleep(50 * time.Microsecond) // the process is just changing its memory
		}
		return failed != nil || s.settled(p)
	})
	if failed == nil && err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		failed = err
	}
	s.mu.Lock()
	_, guarded := s.procs[p]
	s.mu.Unlock()
	if !guarded {
		p.file.Close()
	}
	return failed
}

// hear reads what there is, and whether some of it must be looked at again.
func (s *Server) hear(p *process) (more bool, err error) {
	var n news
	p.mu.Lock()
	err = p.listen(&n)
	more = len(p.unsure) > 0
	p.mu.Unlock()
	return more, errors.Join(err, s.spread(p, &n))
}

// spread passes on what was heard of p. Callers do not hold p's mu.
func (s *Server) spread(p *process, n *news) error {
	var errs error
	for _, c := range n.children {
		errs = errors.Join(errs, s.add(c, nil))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Empty += n.zeroed
	s.stats.Forgotten += int64(n.forget)
	for _, offset := range n.faults {
		s.stats.Faults++
		page := Page{File: p.name, Page: offset / int64(pageSize)}
		if s.plan.urge(p.name, offset, time.Now()) {
			s.touched = append(s.touched, page)
			s.bound(p.name, offset)
		}
	}
	return errs
}

// bound fails the restore if the chunk at offset is not in within Wait.
func (s *Server) bound(name string, offset int64) {
	k := keyOf(name, offset)
	timer := time.AfterFunc(s.cfg.Wait, func() {
		s.fail(fmt.Errorf("a process waited %v for chunk %d of %s", s.cfg.Wait, k.chunk, k.file))
	})
	s.plan.atEnd(k, timer)
}

// settled drops p if nothing of it is missing any more, and ends the restore
// with the last.
func (s *Server) settled(p *process) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.finished || p.mem.left > 0 {
		return false
	}
	p.gone = true
	if _, there := s.procs[p]; there {
		delete(s.procs, p)
		p.file.SetReadDeadline(time.Now()) // watch closes it
		s.guard.drop(p.id)
	}
	if s.complete() {
		s.stats.Filled = time.Since(s.start)
		s.stop()
	}
	return true
}
