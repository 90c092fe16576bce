package fetch

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/registry"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// servedLayers is how many bytes of the image's layers the registry has served.
func (lb *lazyBed) servedLayers() (n int64) {
	for _, l := range lb.img.Layers {
		n += lb.reg.Served(l.Digest)
	}
	return n
}

// Layers are completed within the hours only; what is read comes at any time.
func TestLazyHours(t *testing.T) {
	lb := newLazyBed(t, image.Gzip)
	b, stats := lb.build(nil)
	lb.publish(b.Bytes(), stats.Header, false)
	var night atomic.Bool
	var looked atomic.Int64
	lb.restart(Config{Lazy: LazyConfig{Hours: hours(func() bool { looked.Add(1); return night.Load() })}})
	before := lb.servedLayers()
	pull := lb.start(lb.img.Ref)
	if pull.Lazy == nil {
		t.Fatalf("not lazy: %s", pull.Why)
	}
	pull.Background()
	lb.eventually("some looks at the clock", func() bool { return looked.Load() > 5 })
	if n := lb.servedLayers() - before; n != 0 || !pull.Deferred() {
		t.Errorf("by day %d bytes of the layers came", n)
	}
	lb.read(0, 2<<20, 2<<20+4096)
	night.Store(true)
	lb.must(pull.WaitComplete(t.Context()))
	for range lb.img.Layers {
		<-lb.whole
	}
}

// said is a log that can be asked.
type said struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

func (s *said) has(what string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Contains(s.b.String(), what)
}

// fullBed is a bed whose disk is full, with an image that runs lazily, and a layer
// that nothing uses and that can be fetched again.
type fullBed struct {
	*lazyBed
	log    said
	pull   *Pull
	unused digest.Digest
}

// hours says whether layers may be completed now.
type hours func() bool

func (h hours) Between(time.Time) bool { return h() }

// MakeFree has layers go that the bed's image does not have.
func (fb *fullBed) MakeFree(ctx context.Context, n int64) {
	used := func(id digest.Digest) bool { return id == fb.img.Layers[0].DiffID || id == fb.img.Layers[1].DiffID }
	if _, err := fb.Collect(ctx, n, used); err != nil {
		fb.t.Error(err)
	}
}

func newFullBed(t *testing.T, lazy LazyConfig) *fullBed {
	t.Helper()
	testkit.NeedRoot(t, "it mounts a small file system")
	fb := &fullBed{lazyBed: newLazyBed(t, image.Gzip)}
	b, stats := fb.build(nil)
	fb.publish(b.Bytes(), stats.Header, false)
	disk := t.TempDir()
	fb.must(unix.Mount("tmpfs", disk, "tmpfs", 0, "size=40m"))
	t.Cleanup(func() { unix.Unmount(disk, unix.MNT_DETACH) })
	fb.dir = filepath.Join(disk, "layers")
	lazy.Disk = fb
	fb.restart(Config{Link: link.New(link.Config{Inflaters: 1, Limit: 16e6}),
		Log: slog.New(slog.NewTextHandler(&fb.log, nil)), Lazy: lazy})
	other := fb.reg.PushImage("other:1",
		[]registrytest.Layer{{Tar: registrytest.RandomTar(99, 8, 12<<20), Compression: image.Gzip}},
		registrytest.Options{})
	fb.unused = fb.bed.pull(other).Layers[0].DiffID
	if fb.pull = fb.start(fb.img.Ref); fb.pull.Lazy == nil {
		t.Fatalf("not lazy: %s", fb.pull.Why)
	}
	<-fb.pull.Lazy.done
	fb.read(0, 4<<20, 4<<20+4096)
	var st unix.Statfs_t
	fb.must(unix.Statfs(disk, &st))
	fb.must(os.WriteFile(filepath.Join(disk, "ballast"), make([]byte, int64(st.Bavail)*st.Bsize-256<<10), 0o600))
	if !fb.has(fb.unused) {
		t.Fatal("the unused layer went before the disk was full")
	}
	return fb
}

// On a full disk what a container reads pushes out what nothing uses.
func TestLazyEvictsOnDemand(t *testing.T) {
	fb := newFullBed(t, LazyConfig{Off: true})
	for n := range fb.img.Layers {
		fb.read(n, 0, 3<<20)
	}
	if fb.has(fb.unused) {
		t.Error("the unused layer is here")
	}
	if !fb.log.has("disk full") {
		t.Error("the operator is not told")
	}
}

// On a full disk nothing is completed, and that is said; what is read comes.
func TestLazyFullStopsBackground(t *testing.T) {
	fb := newFullBed(t, LazyConfig{})
	before := fb.servedLayers()
	fb.pull.Background()
	fb.eventually("a word on it", func() bool {
		return fb.log.has("not whole yet") && fb.log.has("no space left on device")
	})
	if n := fb.servedLayers() - before; n != 0 {
		t.Errorf("%d bytes of the layers came", n)
	}
	fb.eventually("the unused layer goes", func() bool { return !fb.has(fb.unused) })
	for n, l := range fb.img.Layers {
		fb.read(n, 0, 3<<20)
		if fb.layers.Partial(l.DiffID) == nil {
			t.Errorf("layer %d, which runs, is gone", n)
		}
	}
}

// logins writes a file of logins with one for the registry.
func (lb *lazyBed) logins(path, password string) {
	lb.t.Helper()
	auth := base64.StdEncoding.EncodeToString([]byte("dew:" + password))
	lb.must(os.WriteFile(path, fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, lb.reg.Host(), auth), 0o600))
}

// A registry that wants credentials: pack, misses and streams come with them.
// When they have expired, what is here starts and is read all the same; what is
// absent fails, and comes with new ones.
func TestLazyCredentials(t *testing.T) {
	for name, mode := range map[string]registrytest.AuthMode{"basic": registrytest.Basic,
		"bearer": registrytest.Bearer} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lb := newLazyBed(t, image.Gzip)
			b, stats := lb.build(nil)
			lb.publish(b.Bytes(), stats.Header, false)
			file := filepath.Join(t.TempDir(), "config.json")
			lb.logins(file, "first")
			lb.reg.Require(registrytest.Auth{Mode: mode, User: "dew", Password: "first"})
			client := newClient(t, file, lb.reg)
			lb.restartAs(client, Config{Lazy: LazyConfig{Off: true, Wait: 700 * time.Millisecond}})
			pull := lb.start(lb.img.Ref)
			if pull.Lazy == nil {
				t.Fatalf("not lazy: %s", pull.Why)
			}
			<-pull.Lazy.done
			for _, r := range lb.reads {
				lb.read(r.Layer, r.Offset, r.Offset+r.Length)
			}
			lb.read(0, 2<<20, 2<<20+4096)

			lb.reg.Require(registrytest.Auth{Mode: mode, User: "dew", Password: "second"})
			var refused *registry.Error
			if _, err := client.Resolve(t.Context(), lb.ref(lb.img.Ref), registry.ResolveOptions{}); !errors.As(err,
				&refused) || refused.Kind != registry.Unauthorized {
				t.Fatalf("the credentials have not expired: %v", err)
			}
			again, err := lb.Pull(t.Context(), lb.ref(lb.img.Ref), Options{Lazy: true, Local: true})
			lb.must(err)
			lb.must(again.WaitMountable(t.Context()))
			if !again.Local {
				t.Error("a start of what is here is not local")
			}
			for _, r := range lb.reads {
				lb.read(r.Layer, r.Offset, r.Offset+r.Length)
			}
			lb.Want(lb.img.Layers[1].DiffID, 5<<20, 5<<20+4096)
			lb.eventually("a read of absent bytes fails", func() bool {
				lb.server.mu.Lock()
				defer lb.server.mu.Unlock()
				return len(lb.server.failed) > 0
			})
			lb.logins(file, "second")
			lb.read(1, 5<<20, 5<<20+4096)
		})
	}
}
