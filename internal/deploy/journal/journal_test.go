package journal

import (
	"context"
	"encoding/json"
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

	"dewpoint/internal/durable"
	"dewpoint/internal/spec"
	"dewpoint/testkit"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, cfg Config) *Journal {
	t.Helper()
	j, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j
}

func inDir(t *testing.T) Config {
	return Config{Path: filepath.Join(t.TempDir(), "deployments"), Log: slog.New(slog.DiscardHandler)}
}

// entry is an acceptance.
func entry(id, key string) Entry {
	return Entry{Sum: "sum of " + id, Request: spec.Request{Image: "web", Name: id, Env: []string{"A=" + id}},
		Deployment: spec.Deployment{ID: id, Name: id, Image: "web", Caller: "me", Key: key, State: spec.StateQueued,
			Asked: time.Now().UTC(), Detached: true}}
}

// over is how an entry's deployment ends.
func over(id string) spec.Deployment {
	return spec.Deployment{ID: id, State: spec.StateDone, Ended: time.Now().UTC(),
		Record: &spec.Record{Name: id, Image: "web", Stages: map[string]float64{"ready": 1.5}}}
}

func accept(t *testing.T, j *Journal, entries ...Entry) {
	t.Helper()
	seq, err := j.Accept(entries)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Durable(t.Context(), seq); err != nil {
		t.Fatal(err)
	}
}

// ids are those of the open deployments.
func ids(j *Journal) string {
	var out []string
	for _, e := range j.Open() {
		out = append(out, e.ID)
	}
	return strings.Join(out, " ")
}

func TestWhatWasAcceptedIsThereAfterwards(t *testing.T) {
	cfg := inDir(t)
	j := open(t, cfg)
	two := entry("two", "k2")
	two.Until, two.Group, two.Parallel = time.Now().Add(time.Hour).UTC().Truncate(time.Second), "g", 3
	accept(t, j, entry("one", "k1"), two)
	j.End(over("one"), false)
	failed := over("three")
	accept(t, j, entry("three", "k3"))
	failed.State, failed.Record, failed.Failure = spec.StateFailed, nil,
		&spec.Failure{Code: "busy", Message: "no", Exit: 13}
	j.End(failed, true)
	for range 2 {
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		j = open(t, cfg)
		list := j.Open()
		if len(list) != 1 || list[0].ID != "two" || list[0].Request.Env[0] != "A=two" ||
			!list[0].Until.Equal(two.Until) || list[0].Group != "g" || list[0].Parallel != 3 || !list[0].Detached {
			t.Fatalf("open: %+v", list)
		}
		d, sum, ok := j.Key("me", "k1")
		if !ok || d.State != spec.StateDone || d.Record == nil || d.Record.Stages["ready"] != 1.5 ||
			sum != "sum of one" {
			t.Errorf("by its key: %+v, %q, %t", d, sum, ok)
		}
		if _, _, ok := j.Key("you", "k1"); ok {
			t.Error("another caller's key is known")
		}
		if _, _, ok := j.Key("me", "k3"); ok {
			t.Error("a key that is free again is known")
		}
		if d, ok := j.Get("three"); !ok || d.State != spec.StateFailed || d.Failure == nil ||
			d.Failure.Code != "busy" {
			t.Errorf("one that failed: %+v", d)
		}
		if r, ok := j.Request("one"); !ok || r.Name != "one" {
			t.Errorf("request: %+v, %t", r, ok)
		}
		if l := j.List(1); len(l) != 1 || l[0].ID != "three" {
			t.Errorf("the newest that has ended: %+v", l)
		}
	}
}

// The file is cut at every ninth byte and around the ends of what was written, as a crash may leave it: what
// was accepted together is there whole or not at all, an end is there or the deployment is open, and what
// came before the cut is there. It goes on from there.
func TestTornAnywhere(t *testing.T) {
	cfg := inDir(t)
	j := open(t, cfg)
	accept(t, j, entry("a", "ka"))
	before := size(t, cfg.Path)
	accept(t, j, entry("b", ""), entry("c", "kc"), entry("d", ""))
	accepted := size(t, cfg.Path)
	j.End(over("c"), false)
	whole, err := os.ReadFile(cfg.Path)
	if err != nil {
		t.Fatal(err)
	}
	for cut := before; cut <= len(whole); cut++ {
		if cut%9 > 0 && cut > before+2 && (cut < accepted-2 || cut > accepted+2) && cut < len(whole)-2 {
			continue
		}
		torn := Config{Path: filepath.Join(t.TempDir(), "torn"), Log: cfg.Log}
		if err := os.WriteFile(torn.Path, whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		j := open(t, torn)
		want := "a"
		switch {
		case cut == len(whole):
			want = "a b d"
		case cut >= accepted:
			want = "a b c d"
		}
		if got := ids(j); got != want {
			t.Fatalf("cut at %d of %d: open %q, want %q", cut, len(whole), got, want)
		}
		accept(t, j, entry("e", "ke"))
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		if got := ids(open(t, torn)); got != want+" e" {
			t.Fatalf("cut at %d, then written: open %q, want %q", cut, got, want+" e")
		}
	}
}

func size(t *testing.T, path string) int {
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return int(fi.Size())
}

// A bit that has changed on the disk costs the line that it is in, and what was accepted with it.
func TestRot(t *testing.T) {
	cfg := inDir(t)
	j := open(t, cfg)
	accept(t, j, entry("a", ""))
	from := size(t, cfg.Path)
	accept(t, j, entry("b", ""))
	to := size(t, cfg.Path)
	accept(t, j, entry("c", ""))
	j.Close()
	whole, err := os.ReadFile(cfg.Path)
	if err != nil {
		t.Fatal(err)
	}
	for at := from; at < to-1; at += 7 {
		bad := append([]byte{}, whole...)
		bad[at] ^= 1
		if err := os.WriteFile(cfg.Path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		j := open(t, cfg)
		if got := ids(j); got != "a c" {
			t.Fatalf("byte %d: open %q", at, got)
		}
		j.Close()
	}
}

// A thousand that come at once share a few syncs, and who waits gets an answer only after one.
func TestManyShareASync(t *testing.T) {
	cfg := inDir(t)
	j := open(t, cfg)
	var syncs atomic.Int64
	durable.OnSync(func(path string) {
		if path == cfg.Path {
			syncs.Add(1)
			time.Sleep(20 * time.Millisecond) // a slow disk
		}
	})
	defer durable.OnSync(nil)
	var g sync.WaitGroup
	for i := range 1000 {
		g.Go(func() {
			seq, err := j.Accept([]Entry{entry(fmt.Sprint(i), "")})
			if err == nil {
				err = j.Durable(t.Context(), seq)
			}
			if err != nil {
				t.Error(err)
			}
			if syncs.Load() == 0 {
				t.Error("durable without a sync")
			}
		})
	}
	g.Wait()
	if n := syncs.Load(); n > 200 {
		t.Errorf("%d syncs", n)
	}
	if n := len(j.Open()); n != 1000 {
		t.Errorf("%d are open", n)
	}
}

// onTmpfs is a journal on a file system of so many bytes.
func onTmpfs(t *testing.T, bytes int) Config {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", bytes)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return Config{Path: filepath.Join(dir, "deployments"), Log: slog.New(slog.DiscardHandler)}
}

// When the disk is full nothing is accepted by half, what was accepted stays, and an end is
// known and reaches the disk when there is room.
func TestFullDisk(t *testing.T) {
	testkit.NeedRoot(t, "it mounts a small file system")
	cfg := onTmpfs(t, 256<<10)
	j := open(t, cfg)
	accept(t, j, entry("first", "k"))
	stuffing := filepath.Join(filepath.Dir(cfg.Path), "stuffing")
	fill(t, stuffing)
	var many []Entry
	for i := range 100 {
		e := entry(fmt.Sprint("many-", i), "")
		e.Request.Env = []string{"A=" + strings.Repeat("x", 1000)}
		many = append(many, e)
	}
	if _, err := j.Accept(many); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("accepted on a full disk: %v", err)
	}
	if got := ids(j); got != "first" {
		t.Errorf("open: %q", got)
	}
	long := over("first")
	long.Record.Error = strings.Repeat("x", 8<<10)
	j.End(long, false)
	if d, _, ok := j.Key("me", "k"); !ok || d.Record == nil || len(d.Record.Error) != 8<<10 {
		t.Errorf("the end is not known while the disk is full: %+v", d)
	}
	if err := os.Remove(stuffing); err != nil {
		t.Fatal(err)
	}
	accept(t, j, many...)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = open(t, cfg)
	if d, _ := j.Get("first"); d.State != spec.StateDone || d.Record == nil {
		t.Errorf("the end that was not written: %+v", d)
	}
	if n := len(j.Open()); n != 100 {
		t.Errorf("%d are open", n)
	}
	j.Close()
}

func fill(t *testing.T, path string) {
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, n := range []int{4096, 1} {
		for err = error(nil); err == nil; {
			_, err = f.Write(make([]byte, n))
		}
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

// What has ended is kept for its time and up to its number; its key goes with it. The file
// does not grow for ever, nor does what is open suffer.
func TestBounds(t *testing.T) {
	cfg := inDir(t)
	cfg.Most = 50
	j := open(t, cfg)
	accept(t, j, entry("open", "open"))
	for i := range 4000 {
		id := fmt.Sprint("e", i)
		if _, err := j.Accept([]Entry{entry(id, id)}); err != nil {
			t.Fatal(err)
		}
		j.End(over(id), false)
	}
	if l := j.List(1000); len(l) != 50 || l[49].ID != "e3999" || l[0].ID != "e3950" {
		t.Errorf("%d are kept", len(l))
	}
	if _, _, ok := j.Key("me", "e0"); ok {
		t.Error("an old key is known")
	}
	if _, _, ok := j.Key("me", "e3999"); !ok {
		t.Error("a new key is not known")
	}
	if n := size(t, cfg.Path); n > 3<<20 {
		t.Errorf("the file has %d bytes", n)
	}
	j.Close()
	cfg.Keep = time.Nanosecond
	j = open(t, cfg)
	if l := j.List(1000); len(l) != 0 || ids(j) != "open" {
		t.Errorf("%d are kept beyond their time, open %q", len(l), ids(j))
	}
	if n := size(t, cfg.Path); n > 4<<10 {
		t.Errorf("the file of one open deployment has %d bytes", n)
	}
}

// Who lists again and again, while deployments end, has the newest each time, with their records.
func TestListedAgain(t *testing.T) {
	const before, more = keepParsed + 50, 200
	j := open(t, inDir(t))
	end := func(i int) {
		id := fmt.Sprint("e", i)
		if _, err := j.Accept([]Entry{entry(id, "")}); err != nil {
			t.Error(err)
		}
		d := over(id)
		d.Record.Bytes.Registry = int64(i)
		j.End(d, false)
	}
	for i := range before {
		end(i)
	}
	look := func(most int) (newest int) {
		l := j.List(most)
		if len(l) != most {
			t.Fatalf("%d are listed of %d", len(l), most)
		}
		for n, d := range l {
			i := int(l[0].Record.Bytes.Registry) + n
			if d.ID != fmt.Sprint("e", i) || d.State != spec.StateDone || d.Record.Name != d.ID ||
				d.Record.Bytes.Registry != int64(i) {
				t.Fatalf("of %d number %d is %+v with %+v", most, n, d, d.Record)
			}
			newest = i
		}
		return newest
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		for i := range more {
			end(before + i)
		}
	}()
	for last := 0; ; {
		now := look(keepParsed + 20)
		if now < last {
			t.Fatalf("the newest is e%d, and was e%d", now, last)
		}
		last = now
		look(10) // keeps fewer
		select {
		case <-over:
			if now := look(keepParsed); now != before+more-1 {
				t.Errorf("the newest is e%d", now)
			}
			return
		default:
		}
	}
}

// Nobody waits for ever for a journal that is closed.
func TestClosed(t *testing.T) {
	j := open(t, inDir(t))
	seq, err := j.Accept([]Entry{entry("a", "")})
	if err != nil {
		t.Fatal(err)
	}
	waits := make(chan error, 1)
	go func() { waits <- j.Durable(context.Background(), seq+1) }()
	j.Close()
	if err := j.Durable(t.Context(), seq); err != nil {
		t.Errorf("what was made durable by Close: %v", err)
	}
	if err := <-waits; !errors.Is(err, ErrClosed) {
		t.Errorf("what was never written: %v", err)
	}
	if _, err := j.Accept([]Entry{entry("b", "")}); !errors.Is(err, ErrClosed) {
		t.Errorf("accepted: %v", err)
	}
}

func FuzzRead(f *testing.F) {
	text, err := json.Marshal(line{Accept: &accepted{entry("a", "k")}})
	if err != nil {
		f.Fatal(err)
	}
	b, _ := seal(nil, 0, text)
	f.Add(b)
	f.Add([]byte("00000000 0 {}\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		cfg := Config{Path: filepath.Join(t.TempDir(), "j")}
		if err := os.WriteFile(cfg.Path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		j, err := Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		was := ids(j)
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		if j = open(t, cfg); ids(j) != was {
			t.Errorf("open %q, then %q", was, ids(j))
		}
	})
}
