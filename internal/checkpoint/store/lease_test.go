package store_test

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/pop"
	"dewpoint/testkit"

	"github.com/opencontainers/go-digest"
)

// stalling is a file system that takes nothing of a data file from its first bytes on, until it may.
type stalling struct {
	pop.FS
	once    sync.Once
	stalled chan struct{} // closed when something is held up
	goOn    chan struct{}
}

type stallingFile struct {
	pop.File
	of *stalling
}

func (s *stalling) Append(ctx context.Context, name string) (pop.File, error) {
	f, err := s.FS.Append(ctx, name)
	return stallingFile{f, s}, err
}

func (f stallingFile) WriteAt(b []byte, at int64) (int, error) {
	f.of.once.Do(func() {
		close(f.of.stalled)
		<-f.of.goOn
	})
	return f.File.WriteAt(b, at)
}

// TestStalledCopy holds a copy up for longer than the store's grace, while another node sweeps: it is
// published nevertheless, and who publishes the same meanwhile waits. What nobody has a lease of is swept.
func TestStalledCopy(t *testing.T) {
	testkit.Long(t)
	const ttl, grace = 5 * time.Second, 50 * time.Millisecond
	b, ctx := newPoP(t), t.Context()
	slow := &stalling{FS: pop.NewDir(b.dir, 0), stalled: make(chan struct{}), goOn: make(chan struct{})}
	xs, ys := b.sharedFor("x", slow, ttl, grace), b.sharedFor("y", nil, ttl, grace)
	x := open(t, store.Config{Dir: t.TempDir(), Node: "x", PoP: func() *pop.Store { return xs }})
	r := put(t, x, "text", nil)
	published := make(chan error, 2)
	go func() { published <- x.Publish(ctx, r.ID) }()
	<-slow.stalled
	go func() { published <- x.Publish(ctx, r.ID) }()
	dead := digest.FromString("of one that died")
	if _, err := ys.Draft(ctx, dead, 1); err != nil {
		t.Fatal(err)
	}
	left := func() []string { return b.files("fill") }
	of := func(file string) bool { return strings.HasPrefix(filepath.Base(file), dead.Encoded()) }
	for deadline := time.Now().Add(2 * testkit.Limit); slices.ContainsFunc(left(), of); time.Sleep(grace) {
		if _, err := ys.Sweep(ctx); err != nil || time.Now().After(deadline) {
			t.Fatalf("%v; still there are %v", err, left())
		}
	}
	if len(left()) != 1 {
		t.Errorf("after sweeping there are %v, not the copy", left())
	}
	close(slow.goOn)
	for range 2 {
		if err := <-published; err != nil {
			t.Error(err)
		}
	}
	if all, err := ys.Checkpoints(ctx); err != nil || len(all) != 1 {
		t.Errorf("%d are published, %v", len(all), err)
	}
}
