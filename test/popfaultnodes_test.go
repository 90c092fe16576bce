package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/image"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/popbed"
	"dewpoint/testkit/registrytest"
)

// Faults of nodes, of what the store holds, and of Redis.
func TestPoPFaults(t *testing.T) {
	t.Parallel()
	for _, bed := range []struct {
		name   string
		faults func(t *testing.T, b *faultBed)
	}{
		{"nodes", func(t *testing.T, b *faultBed) {
			b.try(t, "killed while fetching", killedFetching)
			b.try(t, "killed while copying", killedCopying)
			b.try(t, "killed while evicting", killedEvicting)
			b.try(t, "two evict at once", twoEvict)
		}},
		{"files", func(t *testing.T, b *faultBed) {
			b.try(t, "back with stale knowledge", backStale)
			b.try(t, "file times are off", timesOff)
			b.try(t, "flipped bytes", flippedBytes)
			b.try(t, "store full", storeFull)
			b.try(t, "store and a node's cache full", cacheFull)
		}},
		{"Redis", func(t *testing.T, b *faultBed) {
			b.try(t, "away, and empty", redisAway)
			b.try(t, "away from some", redisPartitioned)
			b.try(t, "hangs, is slow", redisHangs)
		}},
	} {
		t.Run(bed.name, func(t *testing.T) {
			t.Parallel()
			bed.faults(t, newFaultBed(t, popbed.Config{Store: popbed.Gluster, Template: faultConfig + boundedCache,
				Args: []string{"--debug"}}))
		})
	}
}

// A layer whose fetching node dies goes on from the last checkpoint in the store, for who
// waits and for who comes later.
func killedFetching(b *faultBed) {
	const mbit = 20
	b.must(b.Rate(b.t.Context(), mbit))
	defer func() { b.must(b.Rate(b.t.Context(), faultRate)) }()
	b.runs(b.push(8<<10), 0) // the test program is in the store
	const size = 16 << 20
	for _, waits := range []bool{true, false} {
		img := b.push(size)
		b.wan()
		var deployed sync.WaitGroup
		dying := b.prepare(bare, img)
		deployed.Go(func() { dying.start(faultTime) }) // it fails
		other := b.prepare(1, img)
		var err error
		if waits {
			b.served(img, int64(size/8))
			deployed.Go(func() { err = other.start(faultTime) })
		}
		b.served(img, int64(size*3/4))
		b.must(b.KillNode(bare))
		if !waits {
			err = other.start(faultTime)
		}
		deployed.Wait()
		b.must(err)
		// Two seconds between checkpoints, one more for making them.
		if n, most := b.wan(), int64(size)*106/100+3*mbit*1_000_000/8; n > most {
			b.t.Errorf("%d bytes crossed the WAN, the layer has %d: more than a checkpoint's interval was lost", n,
				size)
		}
		if !waits && !b.said(1, "goes on from where another node") {
			b.t.Error("it did not go on from a checkpoint")
		}
		other.right()
		b.must(b.RebootNode(b.t.Context(), bare))
		b.shows(img)
		b.wan()
		again, err := b.run(bare, img)
		b.must(err)
		again.right()
		if n := b.wan(); n > 128<<10 {
			b.t.Errorf("the node that was killed had %d bytes over the WAN", n)
		}
	}
	b.whole(2)
}

// Whenever a node dies that copies into the store, the store shows whole layers
// only, others go on, and what it left goes.
func killedCopying(b *faultBed) {
	for range 3 {
		img := b.push(4 << 20)
		dying := b.prepare(bare, img)
		var deployed sync.WaitGroup
		deployed.Go(func() { dying.start(faultTime) })
		b.served(img, 3<<20)
		time.Sleep(time.Duration(b.rand.IntN(700)) * time.Millisecond)
		b.must(b.KillNode(bare))
		deployed.Wait()
		b.whole(2)
		run, err := b.run(2, img)
		b.must(err)
		run.right()
		b.shows(img)
		b.must(b.RebootNode(b.t.Context(), bare))
	}
	b.whole(bare)
	b.tidy()
}

// Whenever a node dies that evicts, the store shows whole layers, those in use
// among them.
func killedEvicting(b *faultBed) {
	used, runs := b.images(1, 2<<20, 0, 1)
	runs[0].remove() // n2 has it from the store
	b.clearNodes(0)
	for range 2 {
		idle, _ := b.images(2, 1<<20, 0, 4)
		b.clearNodes(0, 4)
		before := len(b.records(eye))
		pruned := make(chan error, 1)
		go func() { pruned <- b.evict(bare) }()
		testkit.Eventually(b.t, "something is evicted", func() bool { return len(b.records(eye)) != before })
		time.Sleep(time.Duration(b.rand.IntN(5000)) * time.Microsecond)
		b.must(b.KillNode(bare))
		<-pruned // an answer, if it has evicted all before
		b.whole(2)
		b.keeps(2, used...)
		for _, img := range idle { // gone or not
			run, err := b.run(4, img)
			b.must(err)
			run.right(0)
		}
		b.must(b.RebootNode(b.t.Context(), bare))
	}
	runs[1].right()
	b.clear()
	b.must(b.evict(bare))
	b.whole(bare)
	b.tidy()
}

// Nodes that evict at once, and others that begin to use what is evicted.
func twoEvict(b *faultBed) {
	used, runs := b.images(1, 4<<20, 0, 3)
	runs[0].remove()
	b.clearNodes(0)
	idle, _ := b.images(2, 1<<20, 0, 1)
	spare, _ := b.images(1, 1<<20, 0, 1) // nobody deploys it again
	for range 2 {
		b.clearNodes(0, 1)
		var all sync.WaitGroup
		errs := make([]error, 4)
		all.Go(func() { errs[0] = b.evict(0) })
		all.Go(func() { errs[1] = b.evict(1) })
		fresh := []*faultRun{b.prepare(2, idle[0]), b.prepare(4, idle[1])}
		for k, c := range fresh {
			all.Go(func() {
				time.Sleep(time.Duration(k) * 100 * time.Millisecond)
				errs[2+k] = c.start(faultTime)
			})
		}
		all.Wait()
		b.must(errors.Join(errs...))
		b.keeps(1, used...)
		for _, c := range fresh {
			c.right()
			c.remove()
		}
		b.clearNodes(2, 4)
		b.whole(1)
	}
	time.Sleep(faultGrace + faultLease) // what was evicted wrongly would be deleted now
	runs[1].right()
	b.whole(2)
	b.eventually("what nobody uses is evicted", func() error {
		if err := errors.Join(b.evict(0), b.evict(1)); err != nil {
			return err
		}
		if _, ok := b.records(1)[spare[0].own()]; ok {
			return fmt.Errorf("%s is still in the store", spare[0].Ref)
		}
		return nil
	})
}

// A node that was away from everything, and one that stood still, find what they
// use as they left it, though the others had to evict.
func backStale(b *faultBed) {
	away, gone := b.images(1, 4<<20, 0, bare)
	still, stood := b.images(1, 4<<20, 0, 2)
	idle, _ := b.images(1, 4<<20, 0, 1)
	b.restsOn(idle[0], 2, bare) // else they use it
	b.clearNodes(0, 1)
	b.must(b.LoseNode(bare)) // what it runs has what the page cache has, and is left alone
	b.must(b.FreezeNode(2))
	time.Sleep(faultLease + time.Second) // for Redis they are gone
	end := b.crowd()
	b.evicted(idle[0])
	time.Sleep(2 * faultGrace)
	b.keeps(0, away[0], still[0])
	b.must(b.ReturnNode(bare))
	b.must(b.ThawNode(2))
	b.settled()
	end()
	gone[1].right()
	stood[1].right()
	b.keeps(0, away[0], still[0])
	for _, i := range []int{2, bare} {
		for _, img := range []*faultImage{away[0], still[0], idle[0]} {
			run, err := b.run(i, img)
			b.must(err)
			run.right(4)
		}
	}
	b.whole(1)
}

// Nothing is judged by the times of files: the clocks of nodes and of the store's
// servers differ.
func timesOff(b *faultBed) {
	used, runs := b.images(1, 2<<20, 0, 1)
	old, new := time.Unix(86400, 0), time.Now().Add(100*365*24*time.Hour)
	touch := func() {
		b.must(filepath.WalkDir(b.Nodes[eye].Store, func(path string, d os.DirEntry, err error) error {
			if err == nil {
				when := old
				if b.rand.IntN(2) == 0 {
					when = new
				}
				err = os.Chtimes(path, when, when)
			}
			if errors.Is(err, os.ErrNotExist) {
				err = nil
			}
			return err
		}))
	}
	before := keys(b.records(eye))
	b.must(b.Rate(b.t.Context(), 8))
	img := b.push(12 << 20) // while it is copied, sweeps pass by
	run := b.prepare(2, img)
	var err error
	var deployed sync.WaitGroup
	deployed.Go(func() { err = run.start(faultTime) })
	b.served(img, 2<<20)
	for range 4 {
		touch()
		time.Sleep(2 * time.Second)
	}
	b.must(b.Rate(b.t.Context(), faultRate))
	deployed.Wait()
	b.must(err)
	touch()
	time.Sleep(faultGrace)
	for _, id := range before {
		if _, ok := b.records(eye)[id]; !ok {
			b.t.Errorf("%s was evicted", id)
		}
	}
	run.right()
	runs[1].right()
	b.shows(img)
	b.keeps(0, used...)
	b.wan()
	late, err := b.run(4, img)
	b.must(err)
	late.right()
	if n := b.wan(); n > 64<<10 {
		b.t.Errorf("%d bytes crossed the WAN again", n)
	}
	b.whole(0)
}

// Bytes that a disk has changed are found, told of and replaced.
func flippedBytes(b *faultBed) {
	images, _ := b.images(1, 4<<20, 0, 1)
	b.clearNodes(0) // nobody has a copy of it
	copied, _ := b.images(1, 4<<20, 0, 1)
	images = append(images, copied...)
	for _, img := range images {
		l := b.records(eye)[img.own()]
		b.must(b.FlipBytes(l.Data(), 1<<20+b.rand.Int64N(2<<20), 1+b.rand.IntN(100)))
	}
	found := map[string]spec.PoPVerified{}
	b.must(b.client(1, func(ctx context.Context, c *api.Client) error {
		return c.PoPVerify(ctx, nil, func(v spec.PoPVerified) error { found[v.DiffID] = v; return nil })
	}))
	for _, img := range images {
		if v := found[img.own()]; v.State != spec.PoPReplaced || v.Error == "" {
			b.t.Errorf("verification found %+v", v)
		}
		b.must(b.event(1, spec.EventDamaged, img.own()))
		b.must(b.event(1, spec.EventReplaced, img.own()))
		b.must(b.event(1, spec.EventLost, img.own())) // a container runs with it
		for _, i := range []int{1, 4} {
			run, err := b.run(i, img)
			b.must(err)
			run.right()
		}
	}
	for id, v := range found {
		if v.State != spec.PoPWhole && id != images[0].own() && id != images[1].own() {
			b.t.Errorf("nobody has touched it: %+v", v)
		}
	}
	b.whole(2)
}

// event asserts that a node's event stream tells of a layer.
func (b *faultBed) event(i int, kind, id string) error {
	found := errors.New("found")
	err := b.client(i, func(ctx context.Context, c *api.Client) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		return c.Events(ctx, &spec.Mark{}, nil, func(e spec.Event) error {
			if e.Kind == kind && e.Layer == id {
				return found
			}
			return nil
		})
	})
	if !errors.Is(err, found) {
		return fmt.Errorf("no event %s of %s: %w", kind, id, err)
	}
	return nil
}

// A store that is full to the last byte takes nothing: deployments go on. What no node uses is evicted and
// deleted, and what did not fit follows when there is room.
func storeFull(b *faultBed) {
	used, runs := b.images(1, 4<<20, 0, 1)
	idle, _ := b.images(3, 8<<20, 0, 2)
	b.clearNodes(2)
	b.must(b.FillStore(b.t.Context()))
	for _, c := range b.runs(b.push(6<<20), 2, 3, 4) {
		c.right()
	}
	b.whole(0)
	b.keeps(0, used...)
	runs[1].right()
	b.evicted(idle...)
	b.tidy()
	b.keeps(0, used...)
	b.whole(0)

	b.must(b.FillStore(b.t.Context()))
	img := b.push(6 << 20)
	for _, c := range b.runs(img, 2, 3, 4) {
		c.right()
	}
	if _, ok := b.records(0)[img.own()]; ok {
		b.t.Error("a full store has taken it")
	}
	b.must(b.FreeStore(b.t.Context()))
	b.shows(img)
	late := b.runs(b.push(1<<20), 2)
	b.shows(late[0].img)
	b.tidy()
}

// boundedCache lets one node keep a few images near.
var boundedCache = fmt.Sprintf("{{if eq .Index %d}}[cache]\nmax_bytes = \"%d\"\n{{end}}", bare, boundedBytes)

const boundedBytes = 80 << 20

// Where there is room neither in the store nor in the node's own cache, deployments go on: what no container
// has makes room, though the store has not taken it yet, and comes over the WAN once more.
func cacheFull(b *faultBed) {
	b.must(b.FillStore(b.t.Context()))
	used := b.runs(b.push(8<<20), bare)[0]
	var images []*faultImage
	for range 12 {
		c := b.runs(b.push(8<<20), bare)[0]
		c.right()
		c.remove()
		images = append(images, c.img)
	}
	b.eventually("the bound of the cache", func() error {
		s, err := b.status(bare)
		for _, n := range s.Nodes {
			if n.Name == b.Nodes[bare].Name && n.Cache > boundedBytes {
				err = errors.Join(err, fmt.Errorf("layers of %d bytes stay", n.Cache))
			}
		}
		return err
	})
	used.right()
	b.wan()
	again := b.runs(images[0], bare)[0]
	again.right()
	if n := b.wan(); n < 8<<20 {
		b.t.Errorf("%d bytes crossed the WAN for an image that was to have gone", n)
	}
	b.must(b.FreeStore(b.t.Context()))
	b.shows(again.img)
	b.shows(used.img)
	b.whole(0)
	b.tidy()
}

// Without Redis deployments go on and nothing is evicted; nor for a lease period
// after it has come back empty.
func redisAway(b *faultBed) {
	used, runs := b.images(1, 2<<20, 0, 1)
	idle, _ := b.images(2, 2<<20, 0, 2)
	b.clearNodes(0)
	b.must(b.KillRedis())
	b.clearNodes(2) // now nobody uses them
	end := b.crowd()
	img := b.push(2 << 20)
	for _, c := range b.runs(img, 2, 3) {
		c.right()
	}
	b.wan()
	stored, err := b.run(4, used[0]) // from the store
	b.must(err)
	stored.right()
	if n := b.wan(); n > 64<<10 {
		b.t.Errorf("%d bytes of what is in the store crossed the WAN", n)
	}
	if level := b.doctor(0, "PoP coordinator"); level != spec.LevelBad {
		b.t.Errorf("doctor says %q of a Redis that is away", level)
	}
	time.Sleep(faultLease + faultGrace/2)
	b.keeps(0, append(idle, used...)...)
	b.must(b.StartRedis(b.t.Context(), true))
	came := time.Now()
	for ; time.Since(came) < faultLease-200*time.Millisecond; time.Sleep(50 * time.Millisecond) {
		b.keeps(0, append(idle, used...)...)
	}
	b.eventually("references", func() error {
		s, err := b.status(3)
		for _, l := range s.Layers {
			if l.DiffID == used[0].own() && len(l.Users) == 2 {
				return err
			}
		}
		return errors.Join(err, errors.New("Redis does not know who uses the layer"))
	})
	b.evicted(idle...)
	end()
	b.keeps(0, used...)
	runs[1].right()
	b.settled()
	b.shows(b.runs(b.push(1<<20), 2)[0].img)
	b.whole(0)
}

// Nodes that do not reach Redis deploy for themselves, and share afterwards what
// they have fetched.
func redisPartitioned(b *faultBed) {
	used, runs := b.images(1, 2<<20, 0, 1)
	for _, i := range []int{1, 2} {
		b.must(b.PartitionRedis(i))
	}
	img := b.push(2 << 20)
	for _, c := range b.runs(img, 1, 3) {
		c.right()
	}
	b.shows(img)
	alone := b.push(2 << 20)
	for _, c := range b.runs(alone, 2) {
		c.right()
	}
	time.Sleep(faultLease + time.Second) // for Redis they are gone
	b.must(b.evict(3))
	b.keeps(0, used...)
	b.eventually("a node that is gone", func() error {
		s, err := b.status(0)
		if err == nil && len(s.Nodes) != 3 {
			err = fmt.Errorf("%d nodes", len(s.Nodes))
		}
		return err
	})
	for _, i := range []int{1, 2} {
		b.must(b.HealRedis(i))
	}
	b.settled()
	runs[1].right()
	b.shows(alone)
	b.whole(0)
}

// A Redis that keeps its connections and says nothing costs deployments a
// bounded time; one that is slow costs nothing but that.
func redisHangs(b *faultBed) {
	used, runs := b.images(1, 2<<20, 0, 1)
	b.must(b.HangRedis(true))
	fresh := b.push(2 << 20)
	c, err := b.runWithin(30*time.Second, 2, fresh)
	b.must(err)
	c.right()
	c, err = b.runWithin(30*time.Second, 3, used[0])
	b.must(err)
	c.right()
	b.must(b.HangRedis(false))
	b.settled()
	b.shows(fresh)
	runs[1].right()

	// So slow that, with leases as short as here, it is as good as away now and then.
	b.SlowRedis(200 * time.Millisecond)
	img := b.push(4 << 20)
	for _, c := range b.runs(img, 0, 1, 2, 3, 4) {
		c.right(0)
	}
	b.SlowRedis(0)
	b.settled()
	b.shows(img)
	b.whole(0)
}

// What many nodes start at once crosses the WAN once.
func TestPoPOnce(t *testing.T) {
	t.Parallel()
	b := newFaultBed(t, popbed.Config{Store: popbed.Gluster, Template: patient.Replace(faultConfig) + slowLink})
	b.must(b.Rate(t.Context(), 50))
	b.try(t, "lazily", lazyOnce)
	b.try(t, "Redis is slow", slowOnce)
}

// once asserts that so many bytes have crossed the WAN once.
func (b *faultBed) once(unique int64) {
	b.t.Helper()
	asked := b.asked
	n := b.wan()
	b.t.Logf("%d bytes crossed the WAN, of %d: %.3f", n, unique, float64(n)/float64(unique))
	if n > unique*102/100+64<<10 {
		b.t.Errorf("%d bytes crossed the WAN, and there are %d", n, unique)
		b.spent(asked)
	}
}

// An image that starts before it is whole.
func lazyOnce(b *faultBed) {
	t := b.t.(*testing.T)
	// the test cannot push over the WAN
	near := registrytest.NewConfig(t, registrytest.Config{Store: b.reg.Store})
	li := pushLazy(t, near, "team/lazy:1", 16<<20, image.Gzip)
	ref := popbed.Registry + strings.TrimPrefix(li.Ref, near.Host())
	unique := int64(len(li.pack))
	for _, l := range li.Layers {
		unique += l.Size
	}
	b.wan()
	b.all(func(i int) error {
		if i == 4 {
			time.Sleep(time.Second) // the pack has come, the layers have not
		}
		rec, err := b.deploy(i, ref, "web")
		if err == nil && i < 4 && rec.Way.Pull != "lazy" {
			err = fmt.Errorf("way %+v", rec.Way)
		}
		return err
	})
	b.all(b.answers)
	b.stored(len(li.Layers))
	b.once(unique)
	b.all(func(i int) error {
		for path, sum := range li.files {
			if got, err := b.get(i, "/sum?"+path); err != nil || strings.TrimSpace(got) != sum {
				return fmt.Errorf("%s reads %q, %v", path, got, err)
			}
		}
		return nil
	})
}

// An image while each answer of Redis takes its time.
func slowOnce(b *faultBed) {
	b.SlowRedis(200 * time.Millisecond)
	defer b.SlowRedis(0)
	img := b.push(8 << 20)
	b.wan()
	for _, c := range b.runs(img, 0, 1, 2, 3, 4) {
		c.right()
	}
	b.once(img.Layers[len(img.Layers)-1].Size) // the store has the others
	b.shows(img)
}
