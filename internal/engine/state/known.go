package state

import (
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/containerd/api/types/task"

	"dewpoint/internal/engine/process"
)

// known is the memory of a State: see the package comment. It asks nobody itself. It is safe for
// concurrent use.
type known struct {
	mu         sync.Mutex
	containers map[string]*kept      // guarded by mu, as all that follows
	images     map[string]*keptImage // by name
	said       uint64                // changes of anything
	reading    bool                  // what is there is being read: what goes meanwhile leaves its entry
	doubts     doubts
}

// kept is what is known of one container.
type kept struct {
	rec    *Record // nil: there is none of ours
	base   Info    // what rec says
	others bool    // there is one of another client
	task   taskNow
	said   uint64 // when something was said of it last
	doubt  bool
	asked  bool    // somebody asks about it
	held   int     // changes by the engine that are under way
	early  []Event // that did not fit meanwhile
}

// keptImage is what is known of one image.
type keptImage struct {
	info  *ImageInfo // nil: there is none
	said  uint64
	doubt bool
	asked bool
}

// taskNow is the state of a task; the zero value, that it is not known.
type taskNow struct {
	status  Status // Stopped also where there is no task
	pid     uint32 // 0 without a task, and before a restore
	started uint64 // startTime of a process that runs
	exit    *Exit
}

func (t taskNow) runs() bool { return t.status == Created || t.status == Running || t.status == Paused }

// taskOf is what containerd says of a task; nil is that there is none.
func taskOf(p *task.Process) taskNow {
	if p == nil {
		return taskNow{status: Stopped}
	}
	t := taskNow{pid: p.Pid}
	switch p.Status {
	case task.Status_CREATED:
		t.status = Created
	case task.Status_RUNNING:
		t.status = Running
	case task.Status_PAUSED, task.Status_PAUSING:
		t.status = Paused
	case task.Status_STOPPED:
		t.status, t.exit = Stopped, &Exit{int(p.ExitStatus), p.ExitedAt.AsTime()}
	default:
		return taskNow{}
	}
	if t.runs() && t.pid != 0 {
		t.started, _ = process.Started(int(t.pid)) // 0 is that of no process that lives
	}
	return t
}

func newKnown() *known {
	return &known{doubts: doubts{wake: make(chan struct{}, 1)}, containers: map[string]*kept{},
		images: map[string]*keptImage{}}
}

// Hold says that the engine is about to change a container: events about it that
// do not fit are kept until release.
func (k *known) Hold(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.of(name).held++
}

func (k *known) Release(name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.of(name)
	if c.held--; c.held > 0 {
		return
	}
	early := c.early
	c.early = nil
	for _, ev := range early {
		k.apply(ev)
	}
	if c.doubt {
		k.doubts.nudge()
	}
	k.tidy(name, c)
}

// recorded says that a container's record was made, whose task comes next.
func (k *known) recorded(r Record, base Info) {
	k.write(r.Name, func(c *kept) {
		c.rec, c.base, c.others, c.task = &r, base, false, taskNow{status: Created}
	})
}

// Unrecorded says that a container's record was removed.
func (k *known) Unrecorded(name string) {
	k.write(name, func(c *kept) { c.rec, c.base, c.others, c.task = nil, Info{}, false, taskNow{} })
}

// relabelled says that a container's record was changed.
func (k *known) relabelled(f found) {
	k.write(f.name, func(c *kept) { c.set(f) })
}

// Addressed says at which address a container is.
func (k *known) Addressed(name string, addr netip.Addr) {
	k.write(name, func(c *kept) { c.base.Addr = addr })
}

// Made says that a task is there, whose first process waits for its start; a
// restore makes that only then, and pid is 0.
func (k *known) Made(name string, pid uint32) {
	t := taskOf(&task.Process{Pid: pid, Status: task.Status_CREATED})
	k.write(name, func(c *kept) { c.task = t })
}

// Begun says that a task runs, unless it has ended already.
func (k *known) Begun(name string, pid uint32) {
	t := taskOf(&task.Process{Pid: pid, Status: task.Status_RUNNING})
	k.write(name, func(c *kept) {
		if c.task.status != Stopped || c.task.pid != pid {
			c.task = t
		}
	})
}

// Untasked says that a container has no task; end is how its last one ended, nil where that is not to be
// known.
func (k *known) Untasked(name string, end *Exit) {
	k.write(name, func(c *kept) { c.task = taskNow{status: Stopped, exit: end} })
}

// EndedWith names the containers that have ended and whose task had that process.
func (k *known) EndedWith(pid uint32) (names []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, c := range k.containers {
		if c.task.status == Stopped && c.task.pid == pid && pid != 0 {
			names = append(names, name)
		}
	}
	return names
}

// Unsure says that it is not known what a call did to a container, which came to an error.
func (k *known) Unsure(name string) {
	k.write(name, func(c *kept) { k.doubts.set(&c.doubt, true) })
}

// Ended says how a task's first process ended, which was pid.
func (k *known) Ended(name string, pid uint32, x Exit) {
	k.happened(Event{Kind: EventExited, Name: name, Pid: pid, Exit: x.Status, Time: x.At})
}

// Pid is that of a task, 0 where none is known.
func (k *known) Pid(name string) uint32 {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.containers[name]; c != nil {
		return c.task.pid
	}
	return 0
}

// happened takes in an event.
func (k *known) happened(ev Event) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.apply(ev)
}

// lost says that events may be missed from now on.
func (k *known) lost() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.doubts.read = false
}

// begin says that there is a new stream of events, and that what there is will be
// read. It returns the mark that reread wants.
func (k *known) begin() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.reading = true
	for _, c := range k.containers {
		k.doubts.set(&c.doubt, true)
	}
	return k.said
}

// found is a container as containerd has it: one of ours, of another client, or none.
type found struct {
	name   string
	rec    *Record
	base   Info
	others bool
}

// reread says what containers and images there are, as they were read since begin gave mark.
// What has been said of one since then counts more.
func (k *known) reread(mark uint64, all []found, images []ImageInfo) {
	k.mu.Lock()
	defer k.mu.Unlock()
	have := map[string]bool{}
	for _, f := range all {
		have[f.name] = true
		if c := k.of(f.name); c.said <= mark {
			c.set(f)
			k.doubts.set(&c.doubt, !f.others) // its task was not read
		}
	}
	k.reading = false
	for name, c := range k.containers {
		if !have[name] && c.said <= mark {
			c.set(found{})
			c.task = taskNow{}
			k.doubts.set(&c.doubt, false)
		}
		k.tidy(name, c)
	}
	k.rereadImages(mark, images)
	k.doubts.read = true
	k.doubts.settle()
}

// mark is what answer wants.
func (k *known) mark() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.said
}

// answer says what containerd said since mark was given; false if something else was said meanwhile.
func (k *known) answer(mark uint64, f found, p *task.Process) bool {
	t := taskOf(p)
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.of(f.name)
	switch {
	case c.held > 0: // it is asked about again when it is not
		c.asked = false
		return true
	case c.said > mark:
		return false
	}
	c.set(f)
	c.task, c.asked = t, false
	k.say(c)
	k.doubts.set(&c.doubt, false)
	k.tidy(f.name, c)
	return true
}

// questions are the doubts that nobody asks about yet, and that the engine is not about to settle itself.
// unanswered is to be called for those that get no answer.
func (k *known) questions() (containers, images []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, c := range k.containers {
		if c.doubt && !c.asked && c.held == 0 {
			c.asked = true
			containers = append(containers, name)
		}
	}
	for name, i := range k.images {
		if i.doubt && !i.asked {
			i.asked = true
			images = append(images, name)
		}
	}
	return containers, images
}

// unanswered has what was asked about a container, or an image, asked again.
func (k *known) unanswered(container, image string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.containers[container]; c != nil {
		c.asked = false
	}
	if i := k.images[image]; i != nil {
		i.asked = false
	}
	k.doubts.nudge()
}

// doubtful are the containers that are in doubt, and whether that is all.
func (k *known) doubtful() (names []string, all bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, c := range k.containers {
		if c.doubt {
			names = append(names, name)
		}
	}
	return names, k.doubts.read && len(names) == k.doubts.open
}

// check raises a doubt about each task whose process is gone though no event says so, if
// that was so before too. It returns those that are gone.
func (k *known) check(before map[string]uint32) map[string]uint32 {
	tasks := k.running()
	gone := map[string]uint32{}
	for name, t := range tasks {
		if !process.Lives(t.pid, t.started) {
			gone[name] = t.pid
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, pid := range gone {
		if c := k.containers[name]; c != nil && before[name] == pid && c.task.pid == pid && c.task.runs() {
			k.say(c)
			k.doubts.set(&c.doubt, true)
		}
	}
	return gone
}

func (k *known) running() map[string]taskNow {
	k.mu.Lock()
	defer k.mu.Unlock()
	tasks := map[string]taskNow{}
	for name, c := range k.containers {
		if c.task.runs() && c.task.pid != 0 && !c.doubt {
			tasks[name] = c.task
		}
	}
	return tasks
}

// list describes all containers, by name.
func (k *known) list() []*Info {
	k.mu.Lock()
	out := make([]*Info, 0, len(k.containers))
	unsure := map[*Info]taskNow{}
	for _, c := range k.containers {
		if c.rec == nil {
			continue
		}
		i := c.info()
		out = append(out, i)
		if c.doubt || !k.doubts.read {
			unsure[i] = c.task
		}
	}
	k.mu.Unlock()
	for i, t := range unsure {
		i.confirm(t)
	}
	slices.SortFunc(out, func(a, b *Info) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// Get describes a container. Without sure, that there is none, or only another client's, is not certain.
func (k *known) Get(name string) (i *Info, others, sure bool) {
	k.mu.Lock()
	c := k.containers[name]
	if c == nil || c.rec == nil {
		defer k.mu.Unlock()
		return nil, c != nil && c.others, k.doubts.read && (c == nil || !c.doubt && c.held == 0)
	}
	i, sure = c.info(), k.doubts.read && !c.doubt
	t := c.task
	k.mu.Unlock()
	if !sure {
		i.confirm(t)
	}
	return i, false, sure
}

// The rest needs mu.

// of is the entry of a container, made if need be.
func (k *known) of(name string) *kept {
	c := k.containers[name]
	if c == nil {
		c = new(kept)
		k.containers[name] = c
	}
	return c
}

// tidy drops an entry that says nothing.
func (k *known) tidy(name string, c *kept) {
	if c.rec == nil && !c.others && c.held == 0 && !c.doubt && !k.reading {
		delete(k.containers, name)
	}
}

// write says what the engine has done to a container. A doubt stays: it may be another's doing.
func (k *known) write(name string, f func(c *kept)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.of(name)
	f(c)
	k.say(c)
	k.tidy(name, c)
}

func (k *known) say(c *kept) {
	k.said++
	c.said = k.said
}

func (k *known) apply(ev Event) {
	if ev.Kind == eventImage {
		k.imageChanged(ev.Name)
		return
	}
	c := k.containers[ev.Name]
	if c == nil && ev.Kind != eventRecorded && !k.reading {
		return // another client's, or one that is gone
	}
	c = k.of(ev.Name)
	fits, news := c.take(ev)
	if news || ev.Kind == EventRemoved && k.reading {
		k.say(c)
	}
	switch {
	case fits:
	case c.held > 0:
		c.early = append(c.early, ev)
	default:
		k.say(c) // an answer that is on its way is older
		k.doubts.set(&c.doubt, true)
	}
	k.tidy(ev.Name, c)
}

// take applies an event that fits what is known, and says whether it brought news.
func (c *kept) take(ev Event) (fits, news bool) {
	t := &c.task
	same := t.status != "" && t.pid == ev.Pid
	there := c.rec != nil || c.others
	switch ev.Kind {
	case eventRecorded:
		return there && !c.doubt, false
	case eventRelabelled:
		return false, false
	case EventRemoved:
		return !there && !c.doubt, false
	}
	if c.others {
		return true, false
	}
	switch ev.Kind {
	case EventCreated:
		return same, false
	case EventStarted:
		if t.status == Created && (same || t.pid == 0) {
			*t = taskOf(&task.Process{Pid: ev.Pid, Status: task.Status_RUNNING})
			return true, true
		}
		return same, false
	case EventExited:
		if same && t.runs() {
			*t = taskNow{status: Stopped, pid: ev.Pid, exit: &Exit{ev.Exit, ev.Time}}
			return true, true
		}
		return same || c.old(), false
	case eventUntasked:
		if same {
			*t = taskNow{status: Stopped}
			return true, true
		}
		return c.old(), false
	case EventPaused:
		return t.turn(Running, Paused)
	case EventResumed:
		return t.turn(Paused, Running)
	}
	return true, false
}

// old says that the end of a process that is not the known one is that of an earlier one.
func (c *kept) old() bool { return c.held == 0 && !c.doubt }

func (t *taskNow) turn(from, to Status) (fits, news bool) {
	news = t.status == from
	if news {
		t.status = to
	}
	return t.status == to, news
}

func (c *kept) set(f found) {
	c.rec, c.base, c.others = f.rec, f.base, f.others
}

func (c *kept) info() *Info {
	i := c.base
	i.Status, i.Exit = c.task.status, c.task.exit
	if i.Status == "" {
		i.Status = Unknown
	}
	if c.task.runs() {
		i.Pid = c.task.pid
	}
	return &i
}

// confirm looks whether the process is there that i is said to have.
func (i *Info) confirm(t taskNow) {
	if t.runs() && t.pid != 0 && !process.Lives(t.pid, t.started) {
		i.Status, i.Pid = Unknown, 0
	}
}
