// Package learn makes startup packs of what it sees containers read.
//
// A start is recorded on mounts that nothing has read from yet, so that all it
// reads is new to the page cache, and becomes a profile; a profile and the
// image's layers become a pack:
//
//	Begin ─▶ Watch (mounts are fresh) ─▶ Ready ─▶ settle ─▶ PACKS/<manifest>.profile.json
//	            │                                                    │ one at a time, in a
//	            └─ Drop: nothing is kept                             ▼ process of its own
//	                                                         PACKS/<manifest>.pack
//
// Who deploys calls Begin, Watch and Ready itself. Starts that it does not see,
// those of other clients of containerd, begin with Prepared and end after a
// fixed time, since nobody says when they are ready. No recording outlasts its
// container, whose layers it would keep mounted. Of its own accord the
// package records an image's first start on this node, if there is neither a
// profile nor a pack, and such a recording never fails a start: what goes wrong
// is logged. A recording that was asked for tells its errors.
//
// Only layers that are here and readable are recorded, and two recordings do
// not share a layer: what containers read of one would be in both.
//
// Building takes memory and a core for seconds, so a child process of the
// lowest priority does it (see Child).
package learn

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/fetch"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/pack"
	"dewpoint/internal/pack/profile"
	"dewpoint/internal/registry"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Mounts gives fresh mounts of layers; snapshot.Snapshotter does.
type Mounts interface {
	Fresh(ctx context.Context, id digest.Digest) (path string, release func(), err error)
}

// Layers are the readable layers; layer.Store has them.
type Layers interface {
	Peek(id digest.Digest) (*layer.Layer, error)
}

// Packs are the node's own packs; fetch.Puller has them.
type Packs interface {
	PackPath(manifest digest.Digest) string
	Absolve(manifest digest.Digest) error
}

// Published finds packs that registries have; fetch.Puller does.
type Published interface {
	Published(ctx context.Context, img *image.Image) (*fetch.Published, error)
}

// Shared is what other nodes get; fetch.Member has it.
type Shared interface {
	// SharePack gives others a pack that was made of a recording that nobody asked for. It does not block.
	SharePack(manifest digest.Digest)
}

// Images are those that this node knows; fetch.Catalog has them.
type Images interface {
	// WithLayer finds the images that have a layer.
	WithLayer(diffID digest.Digest) []*image.Image
}

// Registry publishes packs; registry.Client does.
type Registry interface {
	PushArtifact(ctx context.Context, ref image.Reference, a registry.Artifact) (ocispec.Descriptor, error)
}

// Config says what a Learner works with. Mounts, Layers, Packs and Exec are
// required.
type Config struct {
	Mounts   Mounts
	Layers   Layers
	Packs    Packs
	Registry Registry // for Push
	// Published is for Inspect, of images that have no pack here; nil: they have none.
	Published Published
	Images    Images // for Prepared; nil: it records nothing
	Shared    Shared // nil: nothing is shared
	// Exec is the command line of a program that calls Child.
	Exec []string

	Dir    string        // state of recordings (profile.Config.Dir)
	Node   string        // this node's name, for packs
	Never  bool          // record only what is asked for
	After  time.Duration // from ready to the end of a recording that nobody asked for; 0 is 5 s
	Others time.Duration // how long starts are recorded that nobody calls ready; 0 is 30 s
	Log    *slog.Logger  // nil discards
}

// Learner learns. It is safe for concurrent use.
type Learner struct {
	cfg  Config
	life context.Context
	stop context.CancelFunc
	work sync.WaitGroup
	turn chan struct{} // held by the one build there is

	mu      sync.Mutex
	running map[*Recording]bool    // guarded by mu
	queued  map[digest.Digest]bool // builds that wait or go on, by manifest; guarded by mu
	closed  bool                   // guarded by mu
}

// New returns a Learner, and removes what recordings and builds of a dead
// process have left. Close must follow.
func New(cfg Config) *Learner {
	if cfg.After == 0 {
		cfg.After = 5 * time.Second
	}
	if cfg.Others == 0 {
		cfg.Others = 30 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	l := &Learner{cfg: cfg, turn: make(chan struct{}, 1), running: map[*Recording]bool{},
		queued: map[digest.Digest]bool{}}
	l.life, l.stop = context.WithCancel(context.Background())
	if err := errors.Join(profile.Clean(cfg.Dir),
		sweep(filepath.Dir(cfg.Packs.PackPath(digest.FromString(""))))); err != nil {
		cfg.Log.Warn("remove what earlier recordings have left", "err", err)
	}
	return l
}

// sweep removes what was not finished.
func sweep(dir string) error {
	left, err := filepath.Glob(filepath.Join(dir, "*.tmp"))
	for _, path := range left {
		if rerr := os.Remove(path); !errors.Is(rerr, os.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
	}
	return err
}

// Close throws away what is being recorded and ends a build.
func (l *Learner) Close() {
	l.mu.Lock()
	l.closed = true
	all := make([]*Recording, 0, len(l.running))
	for r := range l.running {
		all = append(all, r)
	}
	l.mu.Unlock()
	l.stop()
	for _, r := range all {
		r.Drop()
	}
	l.work.Wait()
}

// spawn runs f unless the Learner is closed, and reports whether it does.
func (l *Learner) spawn(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.work.Go(f)
	return true
}

func (l *Learner) profilePath(id digest.Digest) string {
	return strings.TrimSuffix(l.cfg.Packs.PackPath(id), ".pack") + ".profile.json"
}

// Profile returns what is known of an image's starts: an Error of kind
// not_found if that is nothing.
func (l *Learner) Profile(id digest.Digest) (*pack.Profile, error) {
	b, err := os.ReadFile(l.profilePath(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, problem(notFound, "no start of the image has been recorded here",
			"record one with \"dew profile IMAGE\"")
	}
	if err != nil {
		return nil, err
	}
	p, err := pack.ParseProfile(b)
	if err == nil && p.Image != id {
		err = fmt.Errorf("it is of %s: %w", p.Image, pack.ErrInvalid)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", l.profilePath(id), err)
	}
	return p, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Error is an error that says what to do.
type Error struct {
	kind, text, remedy string
	err                error
}

// The kinds of an Error are codes of the API.
const (
	notFound    = "not_found"
	unsupported = "unsupported"
	inUse       = "in_use"
	badRequest  = "bad_request"
)

func problem(kind, text, remedy string) *Error { return &Error{kind: kind, text: text, remedy: remedy} }

func (e *Error) Error() string {
	if e.err != nil {
		return e.text + ": " + e.err.Error()
	}
	return e.text
}
func (e *Error) Unwrap() error  { return e.err }
func (e *Error) Kind() string   { return e.kind }
func (e *Error) Remedy() string { return e.remedy }
