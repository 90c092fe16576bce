package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy"
	"dewpoint/internal/deploy/ready"
	"dewpoint/internal/engine"
	"dewpoint/internal/engine/network"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/inflate"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/layer/toc"
	"dewpoint/internal/registry"
	"dewpoint/internal/server/metrics"
	"dewpoint/internal/snapshot"
	"dewpoint/internal/spec"

	"github.com/containerd/errdefs"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestClassify(t *testing.T) {
	for err, want := range map[error]api.Code{
		syscall.ENOSPC:          api.DiskFull,
		syscall.EDQUOT:          api.DiskFull,
		deploy.ErrRequest:       api.BadRequest,
		layer.ErrMismatch:       api.Mismatch,
		inflate.ErrCorrupt:      api.Mismatch,
		layer.ErrTooLarge:       api.BadImage,
		erofs.ErrTooLarge:       api.BadImage,
		toc.ErrUnsafe:           api.BadImage,
		toc.ErrCorrupt:          api.BadImage,
		toc.ErrLimit:            api.BadImage,
		image.ErrInvalid:        api.BadImage,
		image.ErrUnsupported:    api.BadImage,
		errImageInUse:           api.InUse,
		engine.ErrNoCommand:     api.CommandMissing,
		engine.ErrNotExecutable: api.NotExecutable,
		engine.ErrExists:        api.NameInUse,
		engine.ErrNotFound:      api.NotFound,
		engine.ErrPortTaken:     api.PortInUse,
		engine.ErrNotRunning:    api.NotRunning,
		engine.ErrRunning:       api.Running,
		engine.ErrMissing:       api.Unsupported,
		errdefs.ErrNotFound:     api.NotFound,

		&ready.ExitError{Status: 3}:                                 api.Exited,
		&ready.NotReadyError{Reason: context.DeadlineExceeded}:      api.NotReady,
		&ready.TakenError{Port: 80}:                                 api.PortInUse,
		api.New(api.Stopping, "ends"):                               api.Stopping,
		context.Canceled:                                            api.Canceled,
		context.DeadlineExceeded:                                    api.Deadline,
		syscall.EACCES:                                              api.Permission,
		errors.New("something else"):                                api.Internal,
		fmt.Errorf("%w: %w", engine.ErrNotFound, deploy.ErrRequest): api.BadRequest, // the request comes first

		checkpoint.ErrRestore: api.Unsupported,
		// it might boot
		fmt.Errorf("%w: %w", checkpoint.ErrRestore,
			&ready.NotReadyError{Reason: context.DeadlineExceeded}): api.Unsupported,
		fmt.Errorf("%w: %w", checkpoint.ErrRestore,
			&ready.ExitError{Status: 3}): api.Unsupported,
		fmt.Errorf("%w: %w", checkpoint.ErrRestore,
			syscall.ENOSPC): api.DiskFull,
		fmt.Errorf("%w: %w", checkpoint.ErrRestore,
			&ready.TakenError{Port: 80}): api.PortInUse,
	} {
		for _, e := range []error{err, fmt.Errorf("layer 3: %w", err), errors.Join(errors.New("first"), err)} {
			if got := classify(e); got.Code != want {
				t.Errorf("%v: %s, want %s", e, got.Code, want)
			}
		}
	}
}

// Every kind has a code and a remedy, its own where it has one, which is said once.
func TestClassifyRegistry(t *testing.T) {
	want := []api.Code{
		registry.Unreachable: api.Unreachable, registry.Stalled: api.Unreachable,
		registry.Unauthorized: api.Unauthorized,
		registry.Forbidden:    api.Forbidden, registry.NotFound: api.NotFound,
		registry.RateLimited: api.RateLimited,
		registry.ServerFault: api.RegistryFault, registry.Protocol: api.RegistryFault,
		registry.Mismatch:  api.Mismatch,
		registry.PlainHTTP: api.Unreachable, registry.Certificate: api.Unreachable,
		registry.BadConfig: api.BadRequest,
		registry.BadImage:  api.BadImage,
	}
	if len(want) != len(kinds) {
		t.Errorf("%d kinds have a code, want %d", len(kinds), len(want))
	}
	for kind, code := range want {
		err := &registry.Error{Kind: registry.Kind(kind), Host: "r.example", Op: "fetch sha256:0",
			Err: errors.New("because")}
		got := classify(fmt.Errorf("layer 1: %w", err))
		if got.Code != code || got.Remedy == "" || !strings.Contains(got.Message, "r.example") ||
			strings.Contains(got.Message, got.Remedy) {
			t.Errorf("kind %d: %+v, want code %s and a remedy that the message does not have", kind, got, code)
		}
		if own := err.Remedy(); own != "" && (got.Remedy != own || got.Error() != "layer 1: "+err.Error()) {
			t.Errorf("kind %d: %q, want %q", kind, got.Error(), "layer 1: "+err.Error())
		}
	}
}

func TestShortOf(t *testing.T) {
	for avail, want := range map[uint64]int64{101: -4096, 100: 0, 99: 4096, 40: 60 * 4096, 0: 100 * 4096} {
		if got := shortOf(&unix.Statfs_t{Blocks: 1000, Bavail: avail, Bsize: 4096}); got != want {
			t.Errorf("%d of 1000 blocks free: short of %d bytes, want %d", avail, got, want)
		}
	}
}

// Of files, their blocks count, abandoned fills' too.
func TestExcess(t *testing.T) {
	d := &room{root: t.TempDir()}
	d.maxBytes.Store(1 << 20)
	deep := filepath.Join(d.root, "layers", "x.part")
	if err := os.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(deep, "data"), make([]byte, 3<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := d.excess(); got < 2<<20 {
		t.Errorf("3 MiB of 1 MiB allowed: %d bytes too many", got)
	}
	d.root = t.TempDir()
	var s unix.Statfs_t
	if err := unix.Statfs(d.root, &s); err != nil {
		t.Fatal(err)
	}
	if got := d.excess(); shortOf(&s) < 0 && got > 0 {
		t.Errorf("an empty store on a disk with room has %d bytes too many", got)
	}
}

func TestEventsAreBounded(t *testing.T) {
	e := newEvents()
	const over = 7
	for range keepEvents + over {
		e.add(spec.Event{Kind: spec.EventStage})
	}
	got, _ := e.after(0)
	if len(got) != keepEvents || got[0].Seq != over+1 || got[len(got)-1].Seq != keepEvents+over {
		t.Fatalf("%d events from %d to %d", len(got), got[0].Seq, got[len(got)-1].Seq)
	}
	if got, _ := e.after(keepEvents + over - 2); len(got) != 2 {
		t.Errorf("%d events after all but two", len(got))
	}
	got, more := e.after(keepEvents + over)
	if len(got) != 0 {
		t.Errorf("%d events after the last", len(got))
	}
	at := time.Unix(5, 0)
	e.add(spec.Event{Kind: spec.EventExited, Time: at})
	select {
	case <-more:
	default:
		t.Error("who waits is not woken")
	}
	if got, _ := e.after(keepEvents + over); len(got) != 1 || !got[0].Time.Equal(at) {
		t.Errorf("the event came out as %+v", got)
	}
}

// Without a number a watcher sees what comes, with one also what was.
func TestEventsStream(t *testing.T) {
	d := newEvents()
	d.add(spec.Event{Name: "old"})
	d.add(spec.Event{Name: "new"})
	for _, c := range []struct {
		after *spec.Mark
		want  []string
	}{{nil, []string{"next"}}, {&spec.Mark{}, []string{"old", "new", "next"}},
		{&spec.Mark{Seq: 1}, []string{"new", "next"}},
		{&spec.Mark{Epoch: "another", Seq: 1}, []string{"resync", "old", "new", "next"}},
		{&spec.Mark{Seq: 9}, []string{"resync", "old", "new", "next"}}} {
		ctx, cancel := context.WithCancel(t.Context())
		var got []string
		var wg sync.WaitGroup
		emitted := make(chan struct{}, 10)
		wg.Go(func() {
			err := d.Events(ctx, c.after, nil, func(ev spec.Event) error {
				if ev.Kind == spec.EventResync {
					ev.Name = ev.Kind
				}
				got = append(got, ev.Name)
				emitted <- struct{}{}
				return nil
			})
			if !errors.Is(err, context.Canceled) {
				t.Errorf("ended with %v", err)
			}
		})
		for range len(c.want) - 1 {
			<-emitted
		}
		time.Sleep(10 * time.Millisecond) // a watcher without a number has to be there first
		d.add(spec.Event{Name: "next"})
		<-emitted
		cancel()
		wg.Wait()
		if !slices.Equal(got, c.want) {
			t.Errorf("after %v: %v, want %v", c.after, got, c.want)
		}
		d = newEvents()
		d.add(spec.Event{Name: "old"})
		d.add(spec.Event{Name: "new"})
	}
	broken := errors.New("the watcher has gone")
	if err := d.Events(t.Context(), &spec.Mark{}, nil, func(spec.Event) error {
		return broken
	}); !errors.Is(err, broken) {
		t.Errorf("ended with %v", err)
	}
}

// Who comes back behind an event goes on there; if some are missing he is told so first: those of
// an earlier daemon, though this one has counted further, and those that were forgotten.
func TestEventsEpoch(t *testing.T) {
	d := newEvents()
	for range 5 {
		d.add(spec.Event{Kind: spec.EventStage})
	}
	enough := errors.New("enough")
	first := func(after spec.Mark) (got spec.Event) {
		if err := d.Events(t.Context(), &after, nil, func(e spec.Event) error {
			got = e
			return enough
		}); !errors.Is(err, enough) {
			t.Errorf("ended with %v", err)
		}
		return got
	}
	own := d.epoch
	if e := first(spec.Mark{Epoch: own, Seq: 2}); e.Kind != spec.EventStage || e.Seq != 3 || e.Epoch != own {
		t.Errorf("behind the second comes %+v", e)
	}
	d = newEvents() // the next daemon's
	for range keepEvents + 5 {
		d.add(spec.Event{Kind: spec.EventStage})
	}
	if d.epoch == own {
		t.Fatal("two daemons have one epoch")
	}
	if e := first(spec.Mark{Epoch: own, Seq: 20}); e.Kind != spec.EventResync || e.Seq != 5 ||
		e.Epoch != d.epoch || e.Error == "" {
		t.Errorf("with an earlier daemon's mark comes %+v", e)
	}
	if e := first(spec.Mark{Epoch: d.epoch, Seq: 4}); e.Kind != spec.EventResync {
		t.Errorf("behind one that is forgotten comes %+v", e)
	}
	if e := first(spec.Mark{Epoch: d.epoch, Seq: 5}); e.Kind != spec.EventStage || e.Seq != 6 {
		t.Errorf("behind the last that is forgotten comes %+v", e)
	}
	if e := first(spec.Mark{}); e.Kind != spec.EventStage || e.Seq != 6 {
		t.Errorf("of all that is known the first is %+v", e)
	}
	// Whoever reads so slowly that events pass him is told.
	slow := spec.Mark{Epoch: d.epoch, Seq: keepEvents + 4}
	var kinds []string
	err := d.Events(t.Context(), &slow, nil, func(e spec.Event) error {
		if kinds = append(kinds, e.Kind); len(kinds) == 3 {
			return enough
		}
		for range keepEvents + 2 {
			d.add(spec.Event{Kind: spec.EventExited})
		}
		return nil
	})
	if !errors.Is(err, enough) ||
		!slices.Equal(kinds, []string{spec.EventStage, spec.EventResync, spec.EventExited}) {
		t.Errorf("a slow reader is told %v, %v", kinds, err)
	}
}

func TestContainer(t *testing.T) {
	d := &containers{node: "n1"}
	made := time.Unix(1000, 0)
	got := d.container(&engine.Info{Name: "web", Image: "r/app:1", Digest: "sha256:0", Created: made,
		Status: engine.Running, Pid: 7,
		Addr: netip.MustParseAddr("10.88.240.2"), Ports: []network.Port{
			{Host: 8080, Container: 80, Protocol: "tcp"},
			{HostIP: netip.MustParseAddr("127.0.0.1"), Host: 53, Container: 53, Protocol: "udp"}}})
	want := spec.Container{ID: "web@cre66i9s", Name: "web", Image: "r/app:1", Digest: "sha256:0", Created: made,
		Status: spec.StatusRunning, PID: 7,
		IP: "10.88.240.2", Node: "n1", Ports: []spec.Port{
			{Host: 8080, Container: 80, Protocol: "tcp"},
			{HostIP: "127.0.0.1", Host: 53, Container: 53, Protocol: "udp"}}}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got := d.container(&engine.Info{Status: engine.Stopped,
		Exit: &engine.Exit{Status: 137}}); got.Status != spec.StatusExited || got.ExitCode != 137 {
		t.Errorf("one that has ended: %+v", got)
	}
	if got := d.container(&engine.Info{Status: engine.Stopped}); got.Status != spec.StatusExited ||
		got.IP != "" {
		t.Errorf("one that a reboot has ended: %+v", got)
	}
}

func TestMountFindings(t *testing.T) {
	b, err := mount.New(mount.Tree)
	if err != nil {
		t.Fatal(err)
	}
	d := mounts{backend: b, tried: []mount.Finding{
		{Backend: mount.EROFS, Reason: "the kernel has no EROFS", Remedy: "modprobe erofs"},
		{Backend: mount.Tree, Works: true}}}
	got := d.findings(t.Context())
	if len(got) != 2 || got[0].Level != spec.LevelNote || got[0].Remedy != "modprobe erofs" ||
		got[0].Detail != "the kernel has no EROFS" {
		t.Errorf("what does not work: %+v", got)
	}
	if got[1].Level != spec.LevelOK || !strings.Contains(got[1].Detail, "the best that works") {
		t.Errorf("what is in use: %+v", got[1])
	}
	d.forced = true
	if got := d.findings(t.Context()); !strings.Contains(got[1].Detail, "node.mount") {
		t.Errorf("what the configuration forces: %+v", got[1])
	}
}

// --mount asks for what the node does; it does not change it.
func TestDeployRefusesAnotherMount(t *testing.T) {
	b, err := mount.New(mount.Tree)
	if err != nil {
		t.Fatal(err)
	}
	_, err = (&deployments{mount: b.Name()}).Deploy(t.Context(), spec.Request{Image: "app:1", Mount: mount.EROFS},
		spec.Watch{})
	if classify(err).Code != api.BadRequest || !strings.Contains(err.Error(), "node.mount") {
		t.Errorf("got %v", err)
	}
}

func TestNotHere(t *testing.T) {
	if err := notHere(fmt.Errorf("x: %w", layer.ErrUnknown)); !errors.Is(err, snapshot.ErrNotHere) ||
		!errors.Is(err, layer.ErrUnknown) {
		t.Errorf("an unknown layer: %v", err)
	}
	other := errors.New("other")
	if err := notHere(other); err != other {
		t.Errorf("another error: %v", err)
	}
	if err := notHere(nil); err != nil {
		t.Errorf("none: %v", err)
	}
}

func TestOnce(t *testing.T) {
	if _, err := (&once{r: strings.NewReader("x")}).Open(t.Context(), nil, 1); err == nil {
		t.Error("it was opened in the middle")
	}
	o := &once{r: strings.NewReader("x")}
	if _, err := o.Open(t.Context(), nil, 0); err != nil {
		t.Error(err)
	}
	if _, err := o.Open(t.Context(), nil, 0); err == nil {
		t.Error("it was opened twice")
	}
}

func TestForwardEnds(t *testing.T) {
	in, out := make(chan spec.Size), make(chan engine.WinSize)
	var wg sync.WaitGroup
	wg.Go(func() { forward(t.Context(), in, out) })
	in <- spec.Size{Rows: 24, Cols: 80}
	if got := <-out; got != (engine.WinSize{Width: 80, Height: 24}) {
		t.Errorf("size %+v", got)
	}
	close(in)
	wg.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	in = make(chan spec.Size, 1)
	wg.Go(func() { forward(ctx, in, out) })
	in <- spec.Size{Rows: 1} // which nobody takes
	cancel()
	wg.Wait()
}

func TestChunks(t *testing.T) {
	broken := errors.New("gone")
	var got []spec.LogChunk
	c := chunks{mu: new(sync.Mutex), stream: spec.Stderr, emit: func(l spec.LogChunk) error {
		got = append(got, l)
		return nil
	}}
	if n, err := c.Write([]byte("abc")); n != 3 || err != nil || len(got) != 1 || got[0].Stream != spec.Stderr ||
		string(got[0].Data) != "abc" {
		t.Errorf("%d, %v, %+v", n, err, got)
	}
	c.emit = func(spec.LogChunk) error { return broken }
	if n, err := c.Write([]byte("abc")); n != 0 || !errors.Is(err, broken) {
		t.Errorf("%d, %v", n, err)
	}
}

func TestDone(t *testing.T) {
	d := &news{metrics: metrics.New(""), events: newEvents(), log: slog.New(slog.DiscardHandler)}
	d.Done(spec.Record{Image: "app:1"})
	d.Done(spec.Record{Image: "app:1", Name: "web"})
	got, _ := d.events.after(0)
	if len(got) != 2 || got[0].Kind != spec.EventPulled || got[1].Kind != spec.EventRecord ||
		got[1].Record.Name != "web" || d.work.Load() != 2 {
		t.Errorf("%+v", got)
	}
}

// The log has one short line for each deployment: named fields, and no step of the work.
func TestLogLine(t *testing.T) {
	var out strings.Builder
	r := spec.Record{Name: "web", Image: "team/web:1", Node: "n1",
		Stages: map[string]float64{spec.Ready: 0.3120004, spec.Resolved: 0.02},
		Bytes:  spec.Bytes{Registry: 7}, Way: spec.Way{Pull: "lazy", Start: "boot"}, Error: "late",
		Spans: []spec.Span{{Name: "create/network"}}}
	slog.New(slog.NewTextHandler(&out, nil)).LogAttrs(t.Context(), slog.LevelInfo, "deployment", summary(r)...)
	want := "msg=deployment name=web image=team/web:1 node=n1 pull=lazy start=boot stages.resolved=0.02 stages.ready=0.312 bytes.registry=7 bytes.pop=0 bytes.local=0 error=late\n"
	if !strings.HasSuffix(out.String(), want) {
		t.Errorf("%q, want %q", out.String(), want)
	}
}
