//go:build soak

package test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/image"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/popbed"
	"dewpoint/testkit/registrytest"

	"github.com/opencontainers/go-digest"
)

// The soak plays schedules: each is a few steps on a node or on a PoP of three, an operation with a fault in
// its midst, or without. After each step an oracle compares what a container sees with its image, and what is
// listed with a model. A schedule ends with all removed, and nothing of it may be left.
//
//	make soak MINUTES=10 SEED=1 NODES=1
//
// The schedule's number is its seed: the same choices in the same order, though not at the same moments.

const (
	soakSteps = 8
	// soakLimit is how long an operation may take, also during a fault; what is longer hangs.
	soakLimit = 90 * time.Second
	// soakBed is how many schedules play on one bed, with one way to mount.
	soakBed = 40
)

func TestSoak(t *testing.T) {
	number := func(name string, or int) int {
		if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
			return n
		}
		return or
	}
	until := time.Now().Add(time.Duration(number("MINUTES", 10)) * time.Minute)
	seed, nodes, most := number("SEED", 1), number("NODES", 1), number("SCHEDULES", 1<<30)
	played, bad := 0, []int{}
	for bed := 0; time.Now().Before(until) && played < most; bed++ {
		t.Run(fmt.Sprintf("bed%d", bed), func(t *testing.T) {
			s := newSoak(t, nodes, backends[seed/soakBed%len(backends)])
			for time.Now().Before(until) && played < most {
				n := seed
				played, seed = played+1, seed+1
				if !t.Run(strconv.Itoa(n), func(t *testing.T) { s.play(t, n) }) {
					bad = append(bad, n)
					return
				}
				if seed%soakBed == 0 {
					return
				}
			}
		})
	}
	t.Logf("%d schedules on %d nodes, seeds %d to %d; with findings: %v", played, nodes, seed-played, seed-1,
		bad)
}

// soak is a PoP, or a node alone, and what is known of it.
type soak struct {
	*pop
	t      *testing.T
	rnd    *rand.Rand
	near   *registrytest.Server // the registry, as the test itself reaches it
	images []soakImage
	faults []fault
	clocks *clocks // of the nodes' dewds
	// known are the containers of each node, by name. What runs beside the schedule does not touch it.
	known []map[string]*container
	names int
}

// soakImage is an image, with what of its paths a container must see.
type soakImage struct {
	layers []registrytest.Layer
	tree   map[string]string
	pushed registrytest.Pushed
}

// container is one that a node was asked for.
type container struct {
	sure    bool // it is there
	running bool // and runs
	cut     bool // the node's power was cut since it was asked for
}

const soakTags = 3

func newSoak(t *testing.T, nodes int, backend string) *soak {
	const more = "[link]\nlimit = \"40Mbit\"\n" + noLearn + "[registries]\nstall_timeout = \"1s\"\n"
	s := &soak{t: t, clocks: newClocks(t, filepath.Join(programs, "dewd"))}
	cfg := popbed.Config{Nodes: nodes, Template: popbed.Basic + more, Dewd: s.clocks.program}
	for i := range nodes {
		s.clocks.set(i, "")
	}
	if nodes > 1 {
		cfg.Store, cfg.StoreBytes = popbed.Dir, 512<<20
		cfg.Template = sharingStore + more
	}
	cfg.Template = strings.Replace(cfg.Template, "[node]\n", "[node]\nmount = \""+backend+"\"\n", 1)
	if nodes == 1 {
		s.pop = newPop(t, cfg)
	} else {
		s.pop = newPoP(t, cfg)
	}
	s.near = registrytest.NewConfig(t, registrytest.Config{Store: s.reg.Store})
	for n := range 6 {
		s.images = append(s.images, s.image(n))
	}
	s.faults = soakFaults(nodes)
	for range nodes {
		s.known = append(s.known, map[string]*container{})
	}
	return s
}

// image makes contents number n: pairs of them share a layer, and the odd ones have a pack.
func (s *soak) image(n int) soakImage {
	r := rand.New(rand.NewPCG(uint64(n), 5))
	body := func(size int) string {
		b := make([]byte, size)
		for i := range b {
			b[i] = byte(r.IntN(30) + n)
		}
		return string(b)
	}
	shared := []registrytest.File{{Name: "data/"}, {Name: "data/sub/"}, {Name: "data/empty"}}
	for i := range 12 {
		f := fmt.Sprintf("data/f%d", i)
		shared = append(shared,
			registrytest.File{Name: f, Body: strings.Repeat(fmt.Sprint(n/2, i, " "), 40_000+i)})
	}
	own := []registrytest.File{{Name: "data/sub/.wh..wh..opq"}, {Name: "data/.wh.f3"},
		{Name: "data/f5", Body: body(70_001), Mode: 0o600}, {Name: "data/to5", Link: "f5"},
		{Name: "data/same5", Link: "data/f5", Type: tar.TypeLink, Mode: 0o600}, {Name: "data/sub/new", Body: body(1 << 20)},
		{Name: "data/run", Body: body(4096), Mode: 0o4755}}
	img := soakImage{layers: append(appLayers(s.t, 0),
		registrytest.Layer{Tar: registrytest.Tar(shared...)},
		registrytest.Layer{Tar: registrytest.Tar(own...),
			Compression: []image.Compression{image.Gzip, image.Zstd}[n%2]})}
	img.tree = map[string]string{}
	for _, l := range img.layers {
		apply(s.t, img.tree, l.Tar)
	}
	for tag := range soakTags {
		name := fmt.Sprintf("soak/app%d:content%d", tag, n)
		img.pushed = s.near.PushImage(name, img.layers, appOptions())
		if n%2 == 1 {
			li := &lazyImage{Pushed: img.pushed}
			made := packs.of(s.t, li, registryClient(s.t, s.near), img.layers)
			li.publish(s.t, registryClient(s.t, s.near), made.bytes, made.header)
		}
	}
	return img
}

// apply lays a layer over a tree, as the OCI's image specification has it.
func apply(t testing.TB, tree map[string]string, layer []byte) {
	remove := func(at string, itself bool) {
		maps.DeleteFunc(tree, func(p, _ string) bool { return p == at && itself || strings.HasPrefix(p, at+"/") })
	}
	for r := tar.NewReader(bytes.NewReader(layer)); ; {
		h, err := r.Next()
		if err == io.EOF {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		at := path.Clean(h.Name)
		dir, base := path.Split(at)
		switch {
		case base == ".wh..wh..opq":
			remove(path.Clean(dir), false)
		case strings.HasPrefix(base, ".wh."):
			remove(dir+strings.TrimPrefix(base, ".wh."), true)
		case h.Typeflag == tar.TypeDir:
			tree[at] = fmt.Sprintf("dir %o", h.Mode)
		case h.Typeflag == tar.TypeSymlink:
			tree[at] = "link " + h.Linkname
		case h.Typeflag == tar.TypeLink:
			tree[at] = tree[path.Clean(h.Linkname)]
		default:
			sum := sha256.New()
			if _, err := io.Copy(sum, r); err != nil {
				t.Fatal(err)
			}
			tree[at] = fmt.Sprintf("file %o %x", h.Mode, sum.Sum(nil))
		}
	}
}

// treeOf is the tree that a process has as its root, but for what the engine mounts into each.
func treeOf(pid int) (map[string]string, error) {
	root, tree := fmt.Sprintf("/proc/%d/root", pid), map[string]string{}
	err := filepath.WalkDir(root+"/", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		at := strings.TrimPrefix(p, root+"/")
		switch at {
		case "":
			return nil
		case "proc", "sys", "dev":
			return fs.SkipDir
		case "etc/hosts", "etc/hostname", "etc/resolv.conf":
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		mode := int64(info.Mode().Perm())
		for bit, in := range map[fs.FileMode]int64{fs.ModeSticky: 0o1000, fs.ModeSetuid: 0o4000} {
			if info.Mode()&bit != 0 {
				mode |= in
			}
		}
		switch {
		case d.IsDir():
			tree[at] = fmt.Sprintf("dir %o", mode)
		case d.Type() == fs.ModeSymlink:
			to, err := os.Readlink(p)
			tree[at] = "link " + to
			return err
		default:
			b, err := os.ReadFile(p)
			tree[at] = fmt.Sprintf("file %o %x", mode, sha256.Sum256(b))
			return err
		}
		return nil
	})
	return tree, err
}

// play plays the schedule of a seed.
func (s *soak) play(t *testing.T, seed int) {
	s.t, s.pop.t = t, t
	s.rnd = rand.New(rand.NewPCG(uint64(seed), 77))
	for tag := range soakTags {
		s.retag(tag, s.rnd.IntN(len(s.images)))
	}
	for n := range soakSteps {
		if len(s.Nodes) > 1 && s.rnd.IntN(4) == 0 {
			s.settled()
			s.lie(s.rnd.IntN(len(s.Nodes)), s.rnd.IntN(1<<16))
		}
		s.step(n)
		if t.Failed() {
			return
		}
	}
	s.end()
}

// retag has a tag name other contents from now on.
func (s *soak) retag(tag, n int) {
	s.near.PushImage(fmt.Sprintf("soak/app%d:1", tag), s.images[n].layers, appOptions())
}

func ref(tag int) string { return fmt.Sprintf("%s/soak/app%d:1", popbed.Registry, tag) }

// step carries out an operation on a node, perhaps with a fault in its midst.
func (s *soak) step(n int) {
	i := s.rnd.IntN(len(s.Nodes))
	what, do, after := s.operation(i)
	var f *fault
	if s.rnd.IntN(2) == 0 {
		f = &s.faults[s.rnd.IntN(len(s.faults))]
	}
	delay := time.Duration(s.rnd.IntN(600)) * time.Millisecond
	if s.rnd.IntN(3) == 0 {
		delay = 0
	}
	name := "nothing"
	if f != nil {
		name = f.name
	}
	at, began := s.rnd.IntN(1<<16), time.Now()
	var err error
	if f == nil {
		err = s.afterRestart(do)
	} else {
		done := make(chan error, 1)
		go func() { done <- s.within(do) }()
		time.Sleep(delay)
		heal := f.begin(s, i, at)
		select { // a fault that lasts is over before who waits for its end gives up
		case err = <-done:
			heal()
		case <-time.After(3 * time.Second):
			heal()
			err = <-done
		}
	}
	after(err)
	s.t.Logf("%d: n%d %s; %s after %s (%d): %v [%s]", n, i+1, what, name, delay, at, err, time.Since(began))
	if f == nil && err != nil || errors.Is(err, context.DeadlineExceeded) {
		s.t.Errorf("%s: %v", what, err)
	}
	for i := range s.Nodes {
		s.check(i)
	}
}

// within is do with a limit of time.
func (s *soak) within(do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), soakLimit)
	defer cancel()
	err := do(ctx)
	if ctx.Err() != nil {
		return fmt.Errorf("it hangs: %w: %v", ctx.Err(), err)
	}
	return err
}

// ask asks the dewd of a node.
func (s *soak) ask(i int, do func(context.Context, *api.Client) error) error {
	return s.afterRestart(func(ctx context.Context) error {
		c, err := api.Dial(s.Nodes[i].Host())
		if err != nil {
			return err
		}
		defer c.Close()
		return do(ctx, c)
	})
}

// afterRestart is within, again for what a containerd refuses that has not found its new dewd yet.
func (s *soak) afterRestart(do func(context.Context) error) (err error) {
	for began := time.Now(); time.Since(began) < testkit.Limit; time.Sleep(100 * time.Millisecond) {
		if err = s.within(do); err == nil || !strings.Contains(err.Error(), "unavailable") {
			break
		}
	}
	return err
}

// operation chooses what to do on a node, and what is known after it.
func (s *soak) operation(i int) (what string, do func(context.Context) error, after func(error)) {
	tag, n := s.rnd.IntN(soakTags), s.rnd.IntN(len(s.images))
	names := slices.Sorted(maps.Keys(s.known[i]))
	one := ""
	if len(names) > 0 {
		one = names[s.rnd.IntN(len(names))]
	}
	ask := func(do func(ctx context.Context, c *api.Client) error) func(context.Context) error {
		return func(ctx context.Context) error {
			c, err := api.Dial(s.Nodes[i].Host())
			if err != nil {
				return err
			}
			defer c.Close()
			return do(ctx, c)
		}
	}
	nothing := func(error) {}
	switch k := s.rnd.IntN(20); {
	case one != "" && k < 4:
		do, after = s.remove(i, one)
		return "remove " + one, do, after
	case one != "" && k < 6 && s.known[i][one].running:
		return "checkpoint " + one, ask(func(ctx context.Context, c *api.Client) error {
			_, err := c.Checkpoint(ctx, spec.CheckpointRequest{Name: one, Share: true})
			return err
		}), nothing
	case k < 7:
		all := s.rnd.IntN(2) == 0
		return fmt.Sprintf("prune %v", all), ask(func(ctx context.Context, c *api.Client) error {
			_, err := c.Prune(ctx, spec.PruneOptions{Images: all})
			return err
		}), nothing
	case k < 9:
		return fmt.Sprintf("contents %d become app%d:1", n, tag), func(context.Context) error {
			s.retag(tag, n)
			return nil
		}, nothing
	case k < 11:
		return "pull " + ref(tag), ask(func(ctx context.Context, c *api.Client) error {
			_, err := c.Pull(ctx, spec.PullRequest{Image: ref(tag)}, spec.Watch{})
			return err
		}), nothing
	}
	s.names++
	have, way := &container{}, spec.Way{}
	r := spec.Request{Image: ref(tag), Net: "none", Ready: "none", Cmd: []string{"sleep", "1h"},
		Name:    fmt.Sprintf("c%d", s.names),
		Lazy:    []string{"auto", "never"}[s.rnd.IntN(2)],
		Restore: []string{"auto", "never"}[s.rnd.IntN(2)]}
	s.known[i][r.Name] = have
	return fmt.Sprintf("deploy %s of %s lazy=%s restore=%s", r.Name, r.Image, r.Lazy, r.Restore),
		ask(func(ctx context.Context, c *api.Client) error {
			rec, err := c.Deploy(ctx, r, spec.Watch{})
			way = rec.Way
			return err
		}), func(err error) {
			if err == nil {
				have.sure, have.running = true, !have.cut
				s.t.Logf("%s came %+v", r.Name, way)
			}
		}
}

// remove removes a container of a node. One that may not have come may not be there.
func (s *soak) remove(i int, name string) (do func(context.Context) error, after func(error)) {
	have := s.known[i][name]
	was := have.sure
	have.sure, have.running = false, false
	return func(ctx context.Context) error {
			c, err := api.Dial(s.Nodes[i].Host())
			if err != nil {
				return err
			}
			defer c.Close()
			err = c.Remove(ctx, name, true)
			if e := (*api.Error)(nil); errors.As(err, &e) && e.Code == api.NotFound && !was {
				return nil
			}
			return err
		}, func(err error) {
			if err == nil {
				delete(s.known[i], name)
			}
		}
}

// lie changes a byte of a layer in the store, as a hostile neighbour would, and has node i verify the layer.
// It is one that no container stands on: those that do read what is there until then. Afterwards nobody may,
// which check sees.
func (s *soak) lie(i, at int) {
	free := map[string]bool{} // layers of the images, but those of containers that are there, or come
	for _, img := range s.images {
		for _, l := range img.layers {
			free[digest.FromBytes(l.Tar).String()] = true
		}
	}
	for k := range s.Nodes {
		err := s.ask(k, func(ctx context.Context, c *api.Client) error {
			under, err := c.ListDeployments(ctx, spec.DeploymentQuery{})
			if err != nil || len(under) > 0 {
				return errors.Join(err, errBusy)
			}
			list, err := c.List(ctx, true)
			for _, c := range list {
				for _, img := range s.images {
					for _, l := range img.layers {
						if img.pushed.Digest.String() == c.Digest {
							delete(free, digest.FromBytes(l.Tar).String())
						}
					}
				}
			}
			return err
		})
		if err != nil {
			return
		}
	}
	id, was := s.falsify(i, free, at)
	if id == "" {
		return
	}
	said := spec.PoPVerified{}
	err := s.ask(i, func(ctx context.Context, c *api.Client) error {
		return c.PoPVerify(ctx, []string{id}, func(v spec.PoPVerified) error { said = v; return nil })
	})
	s.t.Logf("a byte of %s is another one: n%d says %+v, %v", id, i+1, said, err)
	if e := (*api.Error)(nil); errors.As(err, &e) && e.Code == api.NotFound {
		return // it was evicted
	}
	if err != nil || said.State != spec.PoPDamaged && said.State != spec.PoPReplaced {
		s.t.Errorf("n%d verifies %s, in which a byte was changed at %d: %+v, %v", i+1, id, was, said, err)
	}
}

var errBusy = errors.New("something is under way")

// falsify changes a byte of the data of a layer in the store, which it gives; "" is none.
func (s *soak) falsify(i int, free map[string]bool, at int) (id string, off int64) {
	pids := s.pids(i, "/dewd\x00--config\x00")
	if len(pids) != 1 {
		return "", 0
	}
	dir := filepath.Join(fmt.Sprintf("/proc/%d/root", pids[0]), s.Nodes[i].Store, "layers")
	records, _ := filepath.Glob(filepath.Join(dir, "*.json"))
	for k := range records {
		text, _ := os.ReadFile(records[(k+at)%len(records)])
		var rec struct {
			DiffID string `json:"diff_id"`
			Name   string `json:"name"`
			Size   int64  `json:"size"`
		}
		if json.Unmarshal(text, &rec) != nil || !free[rec.DiffID] {
			continue
		}
		f, err := os.OpenFile(filepath.Join(dir, rec.Name+".data"), os.O_RDWR, 0)
		if err != nil {
			continue
		}
		defer f.Close()
		b, off := []byte{0}, int64(at)%rec.Size
		_, err = f.ReadAt(b, off)
		b[0] ^= 1
		if _, werr := f.WriteAt(b, off); err != nil || werr != nil {
			s.t.Errorf("change %s: %v, %v", rec.Name, err, werr)
		}
		return rec.DiffID, off
	}
	return "", 0
}

// check is the oracle: what a node lists is what it is known to have, and containers see their images.
func (s *soak) check(i int) {
	var list []spec.Container
	if err := s.ask(i, func(ctx context.Context, c *api.Client) (err error) {
		list, err = c.List(ctx, true)
		return err
	}); err != nil {
		s.t.Errorf("n%d does not list: %v", i+1, err)
		return
	}
	there := map[string]spec.Container{}
	for _, c := range list {
		there[c.Name] = c
		if s.known[i][c.Name] == nil {
			s.t.Errorf("n%d lists %s, which is removed", i+1, c.Name)
		}
	}
	var running []spec.Container
	for name, have := range s.known[i] {
		c, ok := there[name]
		switch {
		case have.sure && !ok:
			s.t.Errorf("n%d does not list %s", i+1, name)
		case have.running && c.Status != "running":
			s.t.Errorf("%s on n%d is %s, exit status %d", name, i+1, c.Status, c.ExitCode)
		case c.Status == "running":
			running = append(running, c)
		}
	}
	if len(running) > 0 {
		slices.SortFunc(running, func(a, b spec.Container) int { return strings.Compare(a.Name, b.Name) })
		s.compare(i, running[s.rnd.IntN(len(running))])
	}
}

// compare reads all that a container sees, and compares it with its image.
func (s *soak) compare(i int, c spec.Container) {
	k := slices.IndexFunc(s.images, func(img soakImage) bool { return img.pushed.Digest.String() == c.Digest })
	if k < 0 {
		s.t.Errorf("%s on n%d is of %s, which nobody pushed", c.Name, i+1, c.Digest)
		return
	}
	want := s.images[k].tree
	type reading struct {
		tree map[string]string
		err  error
	}
	for began := time.Now(); ; time.Sleep(200 * time.Millisecond) {
		done := make(chan reading, 1)
		go func() {
			tree, err := treeOf(c.PID)
			done <- reading{tree, err}
		}()
		var got reading
		select {
		case got = <-done:
		case <-time.After(soakLimit):
			s.t.Errorf("%s on n%d hangs in a read", c.Name, i+1)
			return
		}
		if got.err != nil && time.Since(began) < testkit.Limit {
			continue // absent pages that did not come while the registry was away
		}
		if got.err != nil {
			s.t.Errorf("%s on n%d: %v", c.Name, i+1, got.err)
			return
		}
		for at, is := range want {
			if at != "dev" && got.tree[at] != is {
				s.t.Errorf("%s on n%d: %s is %q, and has to be %q", c.Name, i+1, at, got.tree[at], is)
			}
		}
		for at, is := range got.tree {
			if want[at] == "" {
				s.t.Errorf("%s on n%d: there is %s, %s", c.Name, i+1, at, is)
			}
		}
		return
	}
}

// end takes all away, and nothing may be left of it.
func (s *soak) end() {
	began := time.Now()
	for i := range s.Nodes {
		err := s.ask(i, func(ctx context.Context, c *api.Client) error { return s.empty(ctx, i, c) })
		if err != nil {
			s.t.Errorf("n%d at the end: %v", i+1, err)
			return
		}
	}
	for i, n := range s.Nodes {
		pruned := s.pruned(i)
		s.must(pruned(true))
		for what, left := range s.leftovers(n) {
			if got := gone(func() []string { s.must(pruned(false)); return left() }); len(got) > 0 {
				s.t.Errorf("n%d: %s left: %v", i+1, what, got)
			}
		}
	}
	s.t.Logf("all is removed [%s]", time.Since(began))
}

// empty removes a node's containers, once what was accepted before a crash is over.
func (s *soak) empty(ctx context.Context, i int, c *api.Client) error {
	for under := true; under; time.Sleep(20 * time.Millisecond) {
		all, err := c.ListDeployments(ctx, spec.DeploymentQuery{})
		if err != nil {
			return err
		}
		under = len(all) > 0
	}
	for name := range s.known[i] {
		do, after := s.remove(i, name)
		err := do(ctx)
		if after(err); err != nil {
			return fmt.Errorf("remove %s: %w", name, err)
		}
	}
	list, err := c.List(ctx, true)
	if err != nil || len(list) > 0 {
		return fmt.Errorf("it lists %+v, %w", list, err)
	}
	return nil
}

// pruned removes a node's images, and what they leave; once more only what was prewarmed meanwhile.
func (s *soak) pruned(i int) func(first bool) error {
	return func(first bool) error {
		return s.ask(i, func(ctx context.Context, c *api.Client) error {
			images, err := c.Images(ctx)
			if err != nil || len(images) == 0 && !first {
				return err
			}
			for _, img := range images {
				if !first {
					s.t.Logf("n%d has prewarmed %s", i+1, img.Name)
				}
				err = errors.Join(err, c.RemoveImage(ctx, img.Name))
			}
			if err != nil {
				return err
			}
			_, err = c.Prune(ctx, spec.PruneOptions{Images: true})
			return err
		})
	}
}

// leftovers are what a node has of containers and images.
func (s *soak) leftovers(n *popbed.Node) map[string]func() []string {
	files := func(pattern ...string) func() []string {
		return func() []string {
			left, _ := filepath.Glob(filepath.Join(pattern...))
			return left
		}
	}
	return map[string]func() []string{
		"layers":           files(n.Root(), "layers", "*", "*"),
		"snapshots":        files(n.Root(), "snapshotter", "snapshots", "*"),
		"container files":  files(n.Root(), "engine", "containers", "*"),
		"runc's state":     files(n.State(), "runc", "*", "[^.]*"),
		"CRIU's files":     files(n.State(), "restore", "*"),
		"unfinished dumps": files(n.Root(), "checkpoints", "store", "scratch-*"),
		"unpacked memory":  files(n.Root(), "checkpoints", "store", "cache", "[0-9a-f][0-9a-f]*"),
		"mounts": func() (left []string) {
			for _, at := range nodeMounts(n) {
				if at != filepath.Join(n.State(), "datafs") {
					left = append(left, at)
				}
			}
			return left
		},
	}
}

// nodeMounts are what a node's programs have mounted below its directories.
func nodeMounts(n *popbed.Node) (at []string) {
	pids := n.Group().Processes("dewd")
	if len(pids) == 0 {
		return []string{"dewd does not run"}
	}
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pids[0]))
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line)
		for _, dir := range []string{n.Root(), n.State()} {
			if len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
				at = append(at, f[4])
			}
		}
	}
	return at
}
