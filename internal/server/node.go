package server

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/deploy"
	"dewpoint/internal/engine"
	"dewpoint/internal/engine/shimgroup"
	"dewpoint/internal/image"
	"dewpoint/internal/layer/inflate"
	"dewpoint/internal/server/doctor"
	"dewpoint/internal/spec"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// defaultStop is how long a container may take to end when it is asked to.
const defaultStop = 10 * time.Second

// Pull implements api.Deployer.
func (d *Daemon) Pull(ctx context.Context, req spec.PullRequest, w spec.Watch) (spec.Record, error) {
	return d.deployer.Pull(ctx, req, d.watched(req.Image, w))
}

// watched tells the event stream what w is told.
func (d *Daemon) watched(img string, w spec.Watch) spec.Watch {
	tell := w.Reached
	w.Reached = func(name, stage string, at float64) {
		d.events.add(spec.Event{Kind: spec.EventStage, Name: name, Image: img, Stage: stage, At: at})
		if tell != nil {
			tell(name, stage, at)
		}
	}
	return w
}

// List implements api.Containers.
func (d *Daemon) List(ctx context.Context, all bool) ([]spec.Container, error) {
	infos, err := d.engine.List(ctx)
	if err != nil {
		return nil, err
	}
	out := []spec.Container{}
	for _, i := range infos {
		if all || i.Status != engine.Stopped {
			out = append(out, d.container(i))
		}
	}
	d.markFailedReads(out)
	slices.SortStableFunc(out, func(a, b spec.Container) int { return a.Created.Compare(b.Created) })
	return out, nil
}

func (d *Daemon) container(i *engine.Info) spec.Container {
	c := spec.Container{Name: i.Name, Image: i.Image, Digest: i.Digest.String(), Status: string(i.Status),
		PID: int(i.Pid), Created: i.Created, Node: d.name,
		Caller: i.Labels[deploy.LabelCaller]}
	if i.Status == engine.Stopped {
		c.Status = spec.StatusExited
		if i.Exit != nil {
			c.ExitCode = i.Exit.Status
		}
	}
	if i.Addr.IsValid() {
		c.IP = i.Addr.String()
	}
	for _, p := range i.Ports {
		np := spec.Port{Host: p.Host, Container: p.Container, Protocol: p.Protocol}
		if p.HostIP.IsValid() {
			np.HostIP = p.HostIP.String()
		}
		c.Ports = append(c.Ports, np)
	}
	return c
}

// Logs implements api.Containers.
func (d *Daemon) Logs(ctx context.Context, name string, o spec.LogOptions,
	emit func(spec.LogChunk) error) error {
	if err := validName(name); err != nil {
		return err
	}
	var mu sync.Mutex
	stream := func(s string) chunks { return chunks{&mu, s, emit} }
	return d.engine.Logs(ctx, name,
		engine.LogOptions{Follow: o.Follow, Tail: o.Tail, Stdout: stream(spec.Stdout), Stderr: stream(spec.Stderr)})
}

// chunks passes what is written to it to emit, one call at a time.
type chunks struct {
	mu     *sync.Mutex
	stream string
	emit   func(spec.LogChunk) error
}

func (c chunks) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.emit(spec.LogChunk{Stream: c.stream, Data: b}); err != nil {
		return 0, err
	}
	return len(b), nil
}

// Exec implements api.Containers.
func (d *Daemon) Exec(ctx context.Context, name string, req spec.ExecRequest, io spec.ExecIO) (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sizes := make(chan engine.WinSize, 1)
	if req.Size != (spec.Size{}) {
		sizes <- engine.WinSize{Width: uint32(req.Size.Cols), Height: uint32(req.Size.Rows)}
	}
	if io.Resize != nil {
		go forward(ctx, io.Resize, sizes)
	}
	return d.engine.Exec(ctx, name,
		engine.ExecSpec{Args: req.Args, Env: req.Env, User: req.User, WorkingDir: req.Dir,
			TTY: req.TTY, Stdin: io.Stdin, Stdout: io.Stdout, Stderr: io.Stderr, Resize: sizes})
}

func forward(ctx context.Context, in <-chan spec.Size, out chan<- engine.WinSize) {
	for {
		select {
		case s, ok := <-in:
			if !ok {
				return
			}
			select {
			case out <- engine.WinSize{Width: uint32(s.Cols), Height: uint32(s.Rows)}:
			case <-ctx.Done():
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// Stop implements api.Containers.
func (d *Daemon) Stop(ctx context.Context, name string, timeout time.Duration) error {
	if timeout < 0 {
		timeout = defaultStop
	}
	err := d.engine.Stop(ctx, name, timeout)
	if errors.Is(err, engine.ErrNotRunning) {
		return nil
	}
	return err
}

// Remove implements api.Containers.
func (d *Daemon) Remove(ctx context.Context, name string, force bool) error {
	if err := validName(name); err != nil {
		return err
	}
	return d.engine.Remove(ctx, name, force)
}

// validName refuses what no container is named.
func validName(name string) error {
	if err := engine.ValidName(name); err != nil {
		return fmt.Errorf("%w: %w", deploy.ErrRequest, err)
	}
	return nil
}

// Wait implements api.Containers.
func (d *Daemon) Wait(ctx context.Context, name string) (int, error) {
	e, err := d.engine.Wait(ctx, name)
	if errors.Is(err, engine.ErrNotRunning) {
		if _, unknown := d.engine.Inspect(ctx, name); errors.Is(unknown, engine.ErrNotFound) {
			err = unknown
		}
	}
	if err == nil {
		err = d.engine.Unexecuted(ctx, name, e.Status)
	}
	return e.Status, err
}

// Images implements api.Images.
func (d *Daemon) Images(ctx context.Context) ([]spec.Image, error) {
	infos, err := d.engine.Images(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, documentsWait)
	defer cancel()
	out := make([]spec.Image, 0, len(infos))
	for _, i := range infos {
		out = append(out, d.image(ctx, i))
	}
	d.foreign.keep(infos)
	return out, nil
}

func (d *Daemon) image(ctx context.Context, i engine.ImageInfo) spec.Image {
	out := spec.Image{Name: i.Name, Digest: i.Digest.String(), Created: i.Created, Layers: []spec.Layer{}}
	for _, l := range d.layersOf(ctx, i) {
		n := spec.Layer{Digest: l.Digest.String(), DiffID: l.DiffID.String(), Size: l.Size, State: "absent"}
		if have, err := d.layers.Peek(l.DiffID); err == nil {
			n.Disk, n.State = have.DiskUse(), "verified"
			if have.Complete() {
				n.State = "complete"
			}
		}
		out.Size += n.Size
		out.Disk += n.Disk
		out.Layers = append(out.Layers, n)
	}
	return out
}

// layersOf finds the layers of an image that containerd lists.
func (d *Daemon) layersOf(ctx context.Context, i engine.ImageInfo) []image.Layer {
	ref, err := image.ParseReference(i.Name)
	if img := d.catalog.Manifest(ref, i.Digest); img != nil {
		return img.Layers
	}
	if err != nil {
		return nil
	}
	return d.foreign.layers(ctx, ref, i)
}

// known finds the documents of an image that containerd lists.
func (d *Daemon) known(ctx context.Context, i engine.ImageInfo) *image.Image {
	ref, err := image.ParseReference(i.Name)
	if img := d.catalog.Manifest(ref, i.Digest); img != nil {
		return img
	}
	if err != nil {
		return nil
	}
	img, err := d.engine.LocalImage(ctx, ref)
	if err != nil {
		return nil
	}
	return img
}

// RemoveImage implements api.Images.
func (d *Daemon) RemoveImage(ctx context.Context, name string) error {
	ref, err := image.ParseReference(name)
	if err != nil {
		return fmt.Errorf("%w: %w", deploy.ErrRequest, err)
	}
	users, err := d.usersOf(ctx, ref.String())
	if err != nil {
		return err
	}
	if len(users) > 0 {
		return fmt.Errorf("image %s: %w: %v", ref, errImageInUse, users)
	}
	err = d.engine.RemoveImage(ctx, ref.String(), true)
	if err := errors.Join(err, d.catalog.Forget(ref)); err != nil {
		return err
	}
	d.events.add(spec.Event{Kind: spec.EventDeleted, Image: ref.String()})
	return nil
}

var errImageInUse = errors.New("containers use it")

func (d *Daemon) usersOf(ctx context.Context, ref string) ([]string, error) {
	all, err := d.engine.List(ctx)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, c := range all {
		if c.Image == ref {
			names = append(names, c.Name)
		}
	}
	return names, nil
}

// idleImages has the images of containerd, and whether they may go when the disk needs room: dewd has
// registered them, and no container has them.
func (d *Daemon) idleImages() (map[string]bool, error) {
	ctx := context.Background() // both answer from memory
	images, err := d.engine.Images(ctx)
	if err != nil {
		return nil, err
	}
	containers, err := d.engine.List(ctx)
	if err != nil {
		return nil, err
	}
	idle := make(map[string]bool, len(images))
	for _, i := range images {
		idle[i.Name] = i.Own()
	}
	for _, c := range containers {
		if idle[c.Image] {
			idle[c.Image] = false
		}
	}
	return idle, nil
}

// removeImages has containerd forget images that no container has, and collect what only they needed.
func (d *Daemon) removeImages(ctx context.Context, refs []image.Reference) error {
	var errs error
	gone := false
	for _, ref := range refs {
		users, err := d.usersOf(ctx, ref.String())
		if err == nil && len(users) > 0 {
			continue
		}
		if err == nil {
			err = d.engine.RemoveImage(ctx, ref.String(), false)
		}
		if errdefs.IsNotFound(err) { // somebody else has
			continue
		}
		if errs = errors.Join(errs, err); err == nil {
			gone = true
			d.log.Info("image removed: nothing uses it, and the cache is full", "image", ref)
			d.events.add(spec.Event{Kind: spec.EventDeleted, Image: ref.String()})
		}
	}
	if gone {
		errs = errors.Join(errs, d.engine.Collect(ctx))
	}
	return errs
}

// Prune implements api.Images.
func (d *Daemon) Prune(ctx context.Context, o spec.PruneOptions) (spec.PruneReport, error) {
	var r spec.PruneReport
	if o.Images {
		infos, err := d.engine.Images(ctx)
		if err != nil {
			return r, err
		}
		for _, i := range infos {
			err := d.RemoveImage(ctx, i.Name)
			switch {
			case err == nil:
				r.Images = append(r.Images, i.Name)
			case !errors.Is(err, errImageInUse):
				return r, err
			}
		}
		if err := d.engine.Collect(ctx); err != nil {
			return r, err
		}
	}
	var err error
	if r.Checkpoints, err = d.pruneCheckpoints(ctx); err != nil {
		return r, checkpointProblem(err)
	}
	freed, err := d.puller.Prune(ctx, d.inUse)
	r.Layers, r.Bytes = freed.Layers, freed.Bytes
	if o.PoP && err == nil {
		err = d.prunePoP(ctx, &r)
	}
	return r, err
}

func (d *Daemon) inUse(id digest.Digest) bool {
	return d.snaps.InUse()[id] || d.checkpoints != nil && d.checkpoints.Holds(id)
}

// Doctor implements api.Observer.
func (d *Daemon) Doctor(ctx context.Context) ([]spec.Finding, error) {
	out := doctor.Examine(ctx, doctor.Config{Root: d.cfg.Root, CNI: pluginDirs(d.cfg.File.Engine.CNI)})
	out = append(out, d.engineFinding(ctx), d.runtimeFinding(), d.shimFinding(), d.pressureFinding(),
		d.lazyFinding(), d.recordFinding())
	out = append(out, d.readFindings()...)
	out = append(out, d.popFindings(ctx)...)
	out = append(out, d.checkpointFinding(ctx)...)
	return append(out, d.mountFindings()...), nil
}

// engineFinding asks containerd for the snapshotter: only then is it certain
// that a container could start.
func (d *Daemon) engineFinding(ctx context.Context) spec.Finding {
	f := spec.Finding{What: "containerd", Level: spec.LevelOK,
		Detail: d.engine.Version() + " at " + d.engine.Socket()}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := d.engine.Check(ctx); err != nil {
		f.Level, f.Detail, f.Remedy = spec.LevelBad, err.Error(),
			"see its log ("+d.cfg.State+"/containerd/containerd.log of a private one); restart it, or dewd"
	}
	return f
}

// runtimeFinding says what makes containers.
func (d *Daemon) runtimeFinding() spec.Finding {
	f := spec.Finding{What: "runtime", Level: spec.LevelOK}
	var lacking bool
	if f.Detail, lacking = d.engine.Runtime(); lacking {
		f.Level, f.Remedy = spec.LevelNote,
			"containers start faster by crun: scripts/install demo brings one; then restart dewd"
	}
	return f
}

// shimFinding says whether containers share shims.
func (d *Daemon) shimFinding() spec.Finding {
	f := spec.Finding{What: "shims", Level: spec.LevelOK}
	var missing bool
	if f.Detail, missing = d.engine.Shims(); missing {
		f.Level, f.Remedy = spec.LevelNote,
			"install "+shimgroup.Program+
				" beside dewd or in PATH, and restart dewd: containers start faster and share memory"
	}
	return f
}

func (d *Daemon) mountFindings() []spec.Finding {
	var out []spec.Finding
	for _, f := range d.backends {
		n := spec.Finding{What: "mount by " + f.Backend, Level: spec.LevelOK, Detail: "works", Remedy: f.Remedy}
		if f.Backend == d.backend.Name() {
			n.Detail = "in use: the best that works here"
			if d.cfg.File.Node.Mount != "" {
				n.Detail = "in use: node.mount says so"
			}
		}
		if !f.Works {
			n.Level, n.Detail = spec.LevelNote, f.Reason
		}
		out = append(out, n)
	}
	return out
}

// Version implements api.Observer.
func (d *Daemon) Version(context.Context) (spec.Version, error) {
	var u unix.Utsname
	unix.Uname(&u)
	return spec.Version{Version: d.cfg.Version, Node: d.name, Engine: "containerd " + d.engine.Version(),
		Mount:    d.backend.Name(),
		Inflater: inflate.Engine(), Kernel: unix.ByteSliceToString(u.Release[:]), Go: runtime.Version()}, nil
}

// pluginDirs are the directories to look for CNI plugins in.
func pluginDirs(configured string) []string {
	if configured != "" {
		return []string{configured}
	}
	return []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}
}
