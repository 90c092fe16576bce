package test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/image"
	popstore "dewpoint/internal/pop"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/popbed"
	"dewpoint/testkit/registrytest"
)

// The faults of a PoP, on five nodes. Of each it is asserted that no deployment
// fails that could have succeeded, that containers read what their images hold, and that
// what the store shows is whole.

const (
	faultLease = 3 * time.Second // of sharing
	faultGrace = 6 * time.Second
	faultRate  = 100  // Mbit/s of the WAN, if a fault needs no other
	crowded    = 0.02 // of the store is free then
	eye        = 4    // the node that no fault befalls: the store is looked at from there
	// the one beside it that serves no part of the store: when it goes, all others see all of the store
	bare = 3
)

// faultBed is a PoP that is used for many faults, one after the other.
type faultBed struct {
	*pop
	base   []registrytest.Layer // the test program's
	pushed int
	ports  int
	rand   *rand.Rand
}

// faultConfig is the nodes' configuration, if a fault needs no other. SlowRedis concerns them.
var faultConfig = strings.Replace(sharingStore, "{{.Redis}}", "{{.SlowRedis}}", 1) + "copy = \"never\"\n" +
	noLearn

func newFaultBed(t *testing.T, cfg popbed.Config) *faultBed {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	cfg.StoreBytes, cfg.Mbit = 512<<20, faultRate
	if cfg.Template == "" {
		cfg.Template = faultConfig
	}
	return &faultBed{pop: newPoP(t, cfg), base: appLayers(t, 0), ports: 1000,
		rand: rand.New(rand.NewPCG(seed, 0))}
}

// try is one fault. After it the PoP is as it was before, but for what is in
// its store.
func (b *faultBed) try(t *testing.T, name string, fault func(b *faultBed)) {
	t.Helper()
	outer := b.t
	t.Run(name, func(t *testing.T) {
		b.t = t
		defer func() { b.t = outer }()
		began := time.Now()
		fault(b)
		b.clear()
		b.settled()
		t.Logf("took %v", time.Since(began).Round(time.Second))
	})
	if t.Failed() {
		t.FailNow() // what follows would only say so again
	}
}

// must ends the test if there is an error.
func (b *faultBed) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// faultImage is an image of its own, with files whose bytes are known.
type faultImage struct {
	registrytest.Pushed
	sums []string // of /data/f0 …
}

const faultFiles = 8

// push pushes an image that has nothing but the test program in common with others.
func (b *faultBed) push(size int) *faultImage {
	b.pushed++
	img := &faultImage{}
	r := rand.NewChaCha8([32]byte{byte(b.pushed)})
	files := []registrytest.File{{Name: "data/", Mode: 0o755}}
	for i := range faultFiles {
		body := make([]byte, size/faultFiles)
		r.Read(body)
		files = append(files, registrytest.File{Name: fmt.Sprintf("data/f%d", i), Body: string(body)})
		img.sums = append(img.sums, fmt.Sprintf("%x", sha256.Sum256(body)))
	}
	own := registrytest.Layer{Tar: registrytest.Tar(files...), Compression: image.Gzip}
	layers := append(slices.Clone(b.base), own)
	img.Pushed = b.reg.PushImage(fmt.Sprintf("team/app%d:1", b.pushed), layers, appOptions())
	return img
}

// own is the layer that only this image has.
func (img *faultImage) own() string { return img.Layers[len(img.Layers)-1].DiffID.String() }

// faultRun is a container that serves.
type faultRun struct {
	b    *faultBed
	node int
	name string
	port int
	img  *faultImage
	rec  spec.Record
}

// faultTime is the longest that a deployment may take, whatever the fault is.
const faultTime = 60 * time.Second

// run deploys an image on a node. It may be called for several nodes at once.
func (b *faultBed) run(i int, img *faultImage) (*faultRun, error) {
	return b.runWithin(faultTime, i, img)
}

func (b *faultBed) runWithin(limit time.Duration, i int, img *faultImage) (*faultRun, error) {
	c := b.prepare(i, img)
	return c, c.start(limit)
}

// prepare gives a container a name and a port.
func (b *faultBed) prepare(i int, img *faultImage) *faultRun {
	b.ports++
	return &faultRun{b: b, node: i, name: fmt.Sprintf("c%d", b.ports), port: b.ports, img: img}
}

func (c *faultRun) start(limit time.Duration) (err error) {
	ctx, cancel := context.WithTimeout(c.b.t.Context(), limit)
	defer cancel()
	c.rec, err = c.b.Deploy(ctx, c.node, spec.Request{Image: c.img.Ref, Name: c.name, Net: "host",
		Ready: fmt.Sprintf("http:%d/", c.port), Cmd: []string{"serve", fmt.Sprint(c.port)}})
	if err != nil {
		err = fmt.Errorf("deploy on %s: %w", c.b.Nodes[c.node].Name, err)
	}
	return err
}

// runs is run on several nodes at once, which have to succeed.
func (b *faultBed) runs(img *faultImage, nodes ...int) []*faultRun {
	b.t.Helper()
	all := make([]*faultRun, len(nodes))
	errs := make([]error, len(nodes))
	var wait sync.WaitGroup
	for k, i := range nodes {
		all[k] = b.prepare(i, img)
		wait.Go(func() { errs[k] = all[k].start(faultTime) })
	}
	wait.Wait()
	b.must(errors.Join(errs...))
	return all
}

// ask gets what the container says.
func (c *faultRun) ask(path string) (string, error) {
	tr := &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return c.b.Dial(ctx, c.node, address)
		}}
	resp, err := (&http.Client{Transport: tr,
		Timeout: 20 * time.Second}).Get(fmt.Sprintf("http://127.0.0.1:%d%s", c.port, path))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return strings.TrimSpace(string(body)), err
}

// right asserts that the container reads the right bytes from files of its
// image; all if none are named.
func (c *faultRun) right(files ...int) {
	c.b.t.Helper()
	if len(files) == 0 {
		files = []int{0, 1, 2, 3, 4, 5, 6, 7}
	}
	for _, k := range files {
		if got, err := c.ask(fmt.Sprintf("/sum?/data/f%d", k)); err != nil || got != c.img.sums[k] {
			c.b.t.Errorf("container %s on %s reads /data/f%d as %q, not %s: %v", c.name, c.b.Nodes[c.node].Name, k,
				got, c.img.sums[k], err)
			return
		}
	}
}

func (c *faultRun) remove() {
	c.b.t.Helper()
	ctx, cancel := context.WithTimeout(c.b.t.Context(), faultTime)
	defer cancel()
	c.b.must(c.b.Remove(ctx, c.node, c.name))
}

// clear removes all containers and images, so that nothing of the store is in use.
func (b *faultBed) clear() {
	b.t.Helper()
	b.all(b.clearNode)
}

func (b *faultBed) clearNode(i int) error {
	return b.client(i, func(ctx context.Context, c *api.Client) error {
		list, err := c.List(ctx, true)
		for _, have := range list {
			err = errors.Join(err, c.Remove(ctx, have.Name, true))
		}
		if err == nil {
			_, err = c.Prune(ctx, spec.PruneOptions{Images: true})
		}
		return err
	})
}

// clearNodes is clearNode for several at once.
func (b *faultBed) clearNodes(nodes ...int) {
	b.t.Helper()
	errs := make([]error, len(nodes))
	var all sync.WaitGroup
	for k, i := range nodes {
		all.Go(func() { errs[k] = b.clearNode(i) })
	}
	all.Wait()
	b.must(errors.Join(errs...))
}

// evict evicts on a node what no node uses. It is asked again while another node evicts or sweeps, and where
// a machine that is busy with other things keeps Redis from answering in time.
func (b *faultBed) evict(i int) (err error) {
	for end := time.Now().Add(testkit.Limit); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		err = b.client(i, func(ctx context.Context, c *api.Client) error {
			r, err := c.Prune(ctx, spec.PruneOptions{PoP: true})
			if err == nil && r.PoPWhy != "" {
				err = errors.New(r.PoPWhy)
			}
			return err
		})
		if err == nil || !strings.Contains(err.Error(), popstore.ErrAway.Error()) &&
			!strings.HasSuffix(err.Error(), " is evicting") {
			break
		}
		b.t.Logf("%s is asked again: %v", b.Nodes[i].Name, err)
	}
	return err
}

// doctor is what the doctor of a node says of the PoP's store, or of its coordinator.
func (b *faultBed) doctor(i int, what string) (level string) {
	b.t.Helper()
	b.must(b.client(i, func(ctx context.Context, c *api.Client) error {
		found, err := c.Doctor(ctx)
		for _, f := range found {
			if f.What == what {
				level = f.Level
			}
		}
		return err
	}))
	return level
}

// heals waits until the doctor of a node has nothing to say against it.
func (b *faultBed) heals(i int, what string) {
	b.t.Helper()
	b.eventually(what+" on "+b.Nodes[i].Name, func() error {
		if level := b.doctor(i, what); level != spec.LevelOK {
			return fmt.Errorf("level %q", level)
		}
		return nil
	})
}

// said reports whether the dewd of a node has said it.
func (b *faultBed) said(i int, text string) bool {
	b.t.Helper()
	log, err := os.ReadFile(b.Nodes[i].Log())
	b.must(err)
	return strings.Contains(string(log), text)
}

// at is a path in the store, as a node sees it.
func (b *faultBed) at(i int, name string) string { return filepath.Join(b.Nodes[i].Store, name) }

// records are what the store shows, by diffID, as a node sees it.
func (b *faultBed) records(i int) map[string]popstore.Layer {
	b.t.Helper()
	files, err := filepath.Glob(b.at(i, "layers/*.json"))
	b.must(err)
	all := map[string]popstore.Layer{}
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		b.must(err)
		var l popstore.Layer
		b.must(json.Unmarshal(raw, &l))
		all[l.DiffID.String()] = l
	}
	return all
}

// shows waits until the store has an image, whole.
func (b *faultBed) shows(img *faultImage) {
	b.t.Helper()
	b.eventually("the image in the store", func() error {
		have := b.records(eye)
		for _, l := range img.Layers {
			if _, ok := have[l.DiffID.String()]; !ok {
				return fmt.Errorf("layer %s is not there", l.DiffID)
			}
		}
		return nil
	})
}

// keeps asserts that the store shows an image.
func (b *faultBed) keeps(i int, images ...*faultImage) {
	b.t.Helper()
	have := b.records(i)
	for _, img := range images {
		if _, ok := have[img.own()]; !ok {
			b.t.Errorf("layer %s of %s is in use, or could not be known not to be, and has left the store", img.own(),
				img.Ref)
		}
	}
}

// evicted waits until a crowded store shows nothing of images that are not in use. What is deleted meanwhile
// goes to the crowd: what nodes have ready they let go of when there is nothing else to evict.
func (b *faultBed) evicted(images ...*faultImage) {
	b.t.Helper()
	b.eventually("eviction", func() error {
		b.must(b.CrowdStore(b.t.Context(), crowded))
		have := b.records(eye)
		for _, img := range images {
			if _, ok := have[img.own()]; ok {
				return fmt.Errorf("%s stays", img.Ref)
			}
		}
		return nil
	})
}

// whole reads what the store shows, and asserts that it is what was published:
// as this test reads it, not as dewd does.
func (b *faultBed) whole(i int) {
	b.t.Helper()
	for id, l := range b.records(i) {
		if len(l.Checkpoint) > 0 {
			continue // which is not named by its data
		}
		f, err := os.Open(b.at(i, l.Data()))
		for end := time.Now().Add(testkit.Limit); errors.Is(err, os.ErrNotExist) &&
			time.Now().Before(end); f, err = os.Open(b.at(i, l.Data())) {
			if now, ok := b.records(i)[id]; !ok || now.Name != l.Name {
				break
			}
			// a client of GlusterFS sees a brick that came back a moment after others do
			time.Sleep(100 * time.Millisecond)
		}
		if errors.Is(err, os.ErrNotExist) && b.records(i)[id].Name != l.Name {
			continue // it was evicted meanwhile
		}
		b.must(err)
		h := sha256.New()
		_, err = io.Copy(h, f)
		b.must(errors.Join(err, f.Close()))
		if got := fmt.Sprintf("sha256:%x", h.Sum(nil)); got != id {
			b.t.Errorf("the store shows %s, and its data hash to %s", id, got)
		}
		if _, err := os.Stat(b.at(i, strings.TrimSuffix(l.Data(), ".data")+".table")); err != nil {
			b.t.Error(err)
		}
	}
}

// leftovers are files of the store that belong to no layer that it shows.
func (b *faultBed) leftovers() (names []string) {
	b.t.Helper()
	kept := map[string]bool{}
	for id, l := range b.records(eye) {
		base := strings.TrimSuffix(l.Data(), ".data")
		kept[base+".data"], kept[base+".table"], kept["layers/"+strings.TrimPrefix(id, "sha256:")+".json"] = true,
			true, true
	}
	for _, dir := range []string{"layers", "fill", "trash"} {
		entries, err := os.ReadDir(b.at(eye, dir))
		b.must(err)
		for _, e := range entries {
			if name := dir + "/" + e.Name(); !kept[name] && !strings.HasPrefix(e.Name(), ".") {
				names = append(names, name)
			}
		}
	}
	return names
}

// tidy waits until nothing is left over.
func (b *faultBed) tidy() {
	b.t.Helper()
	b.eventually("leftovers", func() error {
		if left := b.leftovers(); len(left) > 0 {
			return fmt.Errorf("%d: %q, beside %v", len(left), left, keys(b.records(eye)))
		}
		return nil
	})
}

// crowd takes space in the store's file system so that it is above its high
// watermark, and returns what gives it back.
func (b *faultBed) crowd() (end func()) {
	b.t.Helper()
	b.must(b.CrowdStore(b.t.Context(), crowded))
	return func() { b.must(b.FreeStore(b.t.Context())) }
}

// served waits until the registry has given so many bytes of an image's own layer.
func (b *faultBed) served(img *faultImage, bytes int64) {
	b.t.Helper()
	l := img.Layers[len(img.Layers)-1]
	b.eventually("bytes from the registry", func() error {
		if n := b.reg.Served(l.Digest); n < bytes {
			return fmt.Errorf("%d of %d", n, bytes)
		}
		return nil
	})
}

// images are several images, each deployed on the first of two nodes (which has a copy of its
// own), and then on the second, which mounts it from the store.
func (b *faultBed) images(n, size, first, second int) (images []*faultImage, runs []*faultRun) {
	b.t.Helper()
	for range n {
		img := b.push(size)
		images = append(images, img)
		runs = append(runs, b.runs(img, first)...)
		b.shows(img)
		runs = append(runs, b.runs(img, second)...)
	}
	return images, runs
}

// restsOn waits until nodes have made an image ready that others have deployed and use, and use nothing of
// it, since the store needed room.
func (b *faultBed) restsOn(img *faultImage, nodes ...int) {
	b.t.Helper()
	await := func(what string, uses bool) {
		for _, i := range nodes {
			name := b.Nodes[i].Name
			b.eventually(fmt.Sprintf("%s %s on %s", img.Ref, what, name), func() error {
				known, err := b.knows(i, img.Ref)
				s, serr := b.status(eye)
				used := slices.ContainsFunc(s.Layers, func(l spec.PoPLayer) bool {
					return l.DiffID == img.own() && slices.Contains(l.Users, name)
				})
				if err = errors.Join(err, serr); err == nil && (!known || used != uses) {
					err = fmt.Errorf("known there: %v, used: %v", known, used)
				}
				return err
			})
		}
	}
	await("is ready", true)
	b.must(b.evict(eye))
	await("rests", false)
}

func keys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
