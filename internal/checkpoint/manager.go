package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/checkpoint/lazypages"
	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/engine"
	"dewpoint/internal/image"
)

// Labels of images, and of containers over them, that say how they are to be treated. LabelCheckpoint is
// "auto" (make one once a container is ready), "never", or "stateful": clones would share what is to be one's
// alone. LabelFree names variables, with spaces between, that may differ between a checkpoint and what starts
// from it, LabelVolumes targets of volumes whose sources and contents may.
const (
	LabelCheckpoint = "dewpoint.checkpoint"
	LabelFree       = "dewpoint.restore.env"
	LabelVolumes    = "dewpoint.restore.volumes"
)

// LabelRestored is on containers that were started from a checkpoint: its ID.
const LabelRestored = "dewpoint.restored"

// LabelAnew is what LabelRestored becomes when such a container is started by its command: its
// processes are none of the checkpoint's, its files still stand on those of it.
const LabelAnew = "dewpoint.restored.anew"

// ErrNone says that there is no checkpoint of that ID.
var ErrNone = errors.New("there is no such checkpoint")

// ErrRestore is wrapped by errors of containers that were to be restored in any
// case and could not be.
var ErrRestore = errors.New("not restored")

// Containers is what a Manager needs of the container engine, *engine.Engine.
type Containers interface {
	Inspect(ctx context.Context, name string) (*engine.Info, error)
	SpecOf(ctx context.Context, name string) (*specs.Spec, error)
	TaskMade(name string) time.Time
	Plan(s engine.Spec) (*specs.Spec, error)
	Upper(ctx context.Context, name string) (string, error)
	Below(ctx context.Context, name string, img *image.Image) (string, error)
	Exec(ctx context.Context, name string, s engine.ExecSpec) (int, error)
	Extend(ctx context.Context, img *image.Image, layer digest.Digest) (release func(), err error)
	WorkDir(name string) string // where a container is restored
}

// Images are those that this node knows.
type Images interface {
	// Image finds the documents of a container's image; nil if they are gone.
	Image(ctx context.Context, ref string, target digest.Digest) *image.Image
}

// Audience is told what happens. No method but Lost may take long.
type Audience interface {
	// Made tells of a checkpoint of a container.
	Made(container string, r store.Record)
	// Unmade tells of one that was wanted, for which nobody waits.
	Unmade(container string, why error)
	// Quarantined tells of one that is not used any more.
	Quarantined(r store.Record, why error)
	// Lost tells of a container whose processes were killed, since their memory did not come. One that
	// served already is nobody else's business any more; any other is removed by who restores it, and its name
	// may be that of another one soon.
	Lost(container string, err error, served bool)
}

// Layers keeps the writable layers of checkpoints, as it keeps all layers.
type Layers interface {
	// Add makes the tar at path, whose sha256 is id, a layer of this node. It
	// survives a power cut once Add returns nil.
	Add(ctx context.Context, path string, id digest.Digest, size int64) error
	// Bring returns when the layer can be mounted. It may have to come from the PoP.
	Bring(ctx context.Context, id digest.Digest, size int64) error
	// UploadLayer puts the layer into the PoP's store.
	UploadLayer(ctx context.Context, id digest.Digest) error
}

// Config names the parts of a Manager. All but those that say so are required.
type Config struct {
	Engines    []Engine // the first that works is used
	Containers Containers
	Layers     Layers
	Store      *store.Store
	Dir        string // for what is measured
	// Restore are lines of CRIU's configuration for what is restored.
	Restore []string
	// RestoreLazy are those lines where memory comes while the processes run; nil brings it before.
	RestoreLazy []string
	LazyAbove   int64    // bytes of memory from which on that is so; 0 is 256 MiB, below 0 never
	Guard       []string // command that runs lazypages.Guard; required with RestoreLazy
	Node        string
	Auto        string // asked, measured, off; "" is asked
	Images      Images
	// Hold keeps what else the daemon does in a container away while it is saved; nil: there is nothing.
	Hold func(ctx context.Context, id string) (release func(), err error)
	// Audience is required with RestoreLazy; nil: nobody wants to know.
	Audience Audience
	Log      *slog.Logger // nil discards
}

// Manager makes checkpoints of this node's containers, and decides which of
// them a container starts from. It is safe for concurrent use.
type Manager struct {
	cfg   Config
	boots *times // seconds from start to readiness, by Fit.Key
	stats stats
	able  atomic.Pointer[able] // once it is known

	giving chan struct{} // has one of who publishes

	probing    sync.Mutex
	chosen     Engine  // guarded by probing
	passedOver []error // guarded by probing

	life    context.Context // of what memory comes late
	stop    context.CancelFunc
	serving serving

	agents agents

	making *making
	late   marks
}

// New returns a Manager. Close must follow.
func New(cfg Config) *Manager {
	cfg.Auto = cmp.Or(cfg.Auto, "asked")
	cfg.LazyAbove = cmp.Or(cfg.LazyAbove, lazyAbove)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	life, stop := context.WithCancel(context.Background())
	return &Manager{cfg: cfg, giving: make(chan struct{}, 1), life: life, stop: stop,
		serving: serving{all: map[*lazypages.Server]string{}, claimed: map[string]bool{}},
		boots:   openTimes(filepath.Join(cfg.Dir, "boots.json")), making: newMaking(),
		late:   marks{dir: filepath.Join(cfg.Dir, "late"), log: cfg.Log},
		agents: agents{root: filepath.Join(cfg.Dir, "hooks")}}
}

// Probe finds out whether this node can make and use checkpoints.
func (m *Manager) Probe(ctx context.Context) (Ability, error) {
	a, err := m.probe(ctx)
	if err != nil {
		return Ability{}, err
	}
	return a.Ability, nil
}

// Holds reports whether a checkpoint of this node has the layer, so that it
// must stay.
func (m *Manager) Holds(id digest.Digest) bool {
	return m.making.holds(id) || m.cfg.Store.Uppers()[id]
}

// Known is a checkpoint as this node sees it.
type Known struct {
	store.Listed
	Unfit       string   // why it is of no use here; "" if it is
	Owner       string   // Fit.Owner
	RestoreTime float64  // seconds, as measured here; 0 is unknown
	Differs     []string // what others of its image have otherwise
}

// List gives all checkpoints, the newest first.
func (m *Manager) List(ctx context.Context) ([]Known, error) {
	all := m.list(ctx, "")
	a, aerr := m.Probe(ctx)
	out := make([]Known, 0, len(all))
	for _, l := range all {
		k := Known{Listed: l, RestoreTime: m.boots.median(l.ID)}
		switch {
		case l.Quarantined:
			k.Unfit = fmt.Sprintf("quarantined after %d failures", l.Failures)
		case aerr != nil:
			k.Unfit = aerr.Error()
		default:
			k.Unfit = nodeUnfit(l.Record, a)
		}
		k.Owner = OwnerOf(l.Record)
		out = append(out, k)
	}
	differ(out)
	return out, nil
}

// differ says how those of one image differ.
func differ(all []Known) {
	of := map[string][]int{}
	for i, k := range all {
		of[k.Image] = append(of[k.Image], i)
	}
	for _, group := range of {
		fits := make([]Fit, len(group))
		for i, at := range group {
			fits[i], _ = fitIn(all[at].Record) // what cannot be read has nothing
		}
		for i, d := range distinguish(fits) {
			all[group[i]].Differs = d
		}
	}
}

// list is what the store has; of a PoP's store that is away, nothing.
// Look looks for checkpoints in the PoP's store ahead of Plan, beside whatever has to be done before that.
func (m *Manager) Look(ctx context.Context) { m.cfg.Store.Look(ctx) }

func (m *Manager) list(ctx context.Context, manifest string) []store.Listed {
	all, err := m.cfg.Store.List(ctx, manifest)
	if err != nil {
		m.cfg.Log.Debug("look for checkpoints", "err", err)
	}
	return all
}

// nodeUnfit is why no container can start from a checkpoint on a node of ability a.
func nodeUnfit(r store.Record, a Ability) string {
	f, err := fitIn(r)
	if err != nil {
		return err.Error()
	}
	here := f
	here.Engine, here.Version, here.Runc, here.Kernel, here.PageSize, here.Cgroup, here.CPU = a.Engine,
		a.Version, a.Runc, a.Kernel, a.PageSize, a.CgroupMode, a.CPU
	return sentence(f.Why(here))
}

// OwnerOf is Fit.Owner of a record's fit.
func OwnerOf(r store.Record) string {
	f, _ := fitIn(r) // what cannot be read is of no use to anyone
	return f.Owner
}

// Remove removes a checkpoint by its ID, or what it begins with.
func (m *Manager) Remove(ctx context.Context, id string) error {
	all := m.list(ctx, "")
	var found []string
	for _, l := range all {
		if l.ID == id || len(id) >= 6 && strings.HasPrefix(l.ID, id) {
			found = append(found, l.ID)
		}
	}
	switch len(found) {
	case 0:
		return fmt.Errorf("%s: %w", id, ErrNone)
	case 1:
		return m.cfg.Store.Remove(ctx, found[0])
	}
	return fmt.Errorf("%s: %w: %d begin so", id, ErrNone, len(found))
}

// Prune removes this node's checkpoints of images that are not here, by their
// manifests, and gives their IDs. What is in the PoP's store stays: other nodes may have those images.
func (m *Manager) Prune(ctx context.Context, here map[string]bool) ([]string, error) {
	var gone []string
	for _, l := range m.list(ctx, "") {
		if !l.Local || here[l.Manifest] {
			continue
		}
		err := m.cfg.Store.Drop(l.ID)
		if errors.Is(err, store.ErrInUse) || errors.Is(err, store.ErrUnknown) {
			continue
		}
		if err != nil {
			return gone, err
		}
		gone = append(gone, l.ID)
	}
	return gone, nil
}
