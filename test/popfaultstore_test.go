package test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit/popbed"
)

// Faults of a file system that is made of several servers and has a client on each node.
func TestPoPStoreFaults(t *testing.T) {
	t.Parallel()
	t.Run("distributed", func(t *testing.T) {
		t.Parallel()
		b := newFaultBed(t, popbed.Config{Store: popbed.Gluster, Template: faultConfig + lateConfig})
		b.try(t, "hangs on a node", storeHangs)
		b.try(t, "hangs while memory comes", lateHangs)
		b.try(t, "gone on a node", storeGone)
		b.try(t, "server lost", func(b *faultBed) {
			b.partLost(func() error { return b.LoseNode(2) }, func() error { return b.ReturnNode(2) })
		})
		b.try(t, "server's power is cut", func(b *faultBed) {
			b.partLost(func() error { return errors.Join(b.KillNode(2), b.KillBrick(2)) },
				func() error { return errors.Join(b.RestoreBrick(b.t.Context(), 2), b.RebootNode(b.t.Context(), 2)) })
		})
	})
	t.Run("replica 3", func(t *testing.T) {
		t.Parallel()
		b := newFaultBed(t, popbed.Config{Store: popbed.Gluster3})
		b.try(t, "server lost", copyLost)
	})
}

// awayTime is the longest that a deployment may take on a node whose store
// hangs: a few waits of its patience, and the deployment.
const awayTime = 30 * time.Second

// proved is how long a node may believe that what it has just attached is there.
const proved = 1200 * time.Millisecond

// Where the store hangs, what runs goes on with what it has read, and what its
// images lack comes from nodes that have it, or is fetched.
func storeHangs(b *faultBed) {
	images, runs := b.images(2, 4<<20, 0, 1)
	for _, c := range runs {
		c.right(0, 1)
	}
	b.must(b.HangStore(1, true))
	hung := true
	defer func() {
		if hung {
			b.HangStore(1, false)
		}
	}()
	time.Sleep(proved)
	b.fromPeers(1, images[0]) // its layers are attached
	later := b.push(2 << 20)
	b.runs(later, 0)
	b.fromPeers(1, later)
	fresh, err := b.runWithin(awayTime, 1, b.push(2<<20))
	b.must(err)
	fresh.right()
	for _, c := range runs {
		c.right(0, 1)
	}
	if level := b.doctor(1, "PoP store"); level != spec.LevelBad {
		b.t.Errorf("doctor says %q of a store that hangs", level)
	}
	if !b.said(1, "the PoP's store is away") {
		b.t.Error("dewd does not say that its store is away")
	}
	other, err := b.run(2, images[1]) // elsewhere it does not
	b.must(err)
	other.right()

	hung = false
	b.must(b.HangStore(1, false))
	b.heals(1, "PoP store")
	for _, c := range runs {
		c.right()
	}
	b.shows(fresh.img)
	b.fromStore(1)
	b.whole(2)
}

// fromPeers asserts that a node whose store is away gets all of an image, which another node has whole, from
// that one.
func (b *faultBed) fromPeers(i int, img *faultImage) {
	b.t.Helper()
	b.wan()
	c, err := b.runWithin(awayTime, i, img)
	b.must(err)
	c.right()
	own := img.Layers[len(img.Layers)-1].Size
	if n := b.wan(); n > own/4 || c.rec.Bytes.Registry != 0 || c.rec.Bytes.PoP < own {
		b.t.Errorf("%d bytes crossed the WAN for what another node has, record %+v", n, c.rec.Bytes)
	}
}

// fromStore asserts that a node mounts from the store what others have fetched.
func (b *faultBed) fromStore(i int) {
	b.t.Helper()
	img := b.push(1 << 20)
	b.runs(img, (i+2)%5)
	b.shows(img)
	b.wan()
	c, err := b.run(i, img)
	b.must(err)
	c.right()
	if n := b.wan(); n > 64<<10 {
		b.t.Errorf("%d bytes of what is in the store crossed the WAN", n)
	}
}

// Where the store has gone, it is the same, and what is deployed after it has come
// back stands on what has come back.
func storeGone(b *faultBed) {
	images, runs := b.images(2, 4<<20, 0, 1)
	for _, c := range runs {
		c.right(0, 1)
	}
	b.must(b.LoseStore(1))
	time.Sleep(proved)
	again, err := b.runWithin(awayTime, 1, images[0])
	b.must(err)
	again.right()
	fresh, err := b.runWithin(awayTime, 1, b.push(2<<20))
	b.must(err)
	fresh.right()
	for _, c := range runs {
		c.right(0, 1)
	}
	if level := b.doctor(1, "PoP store"); level != spec.LevelBad {
		b.t.Errorf("doctor says %q of a store that is gone", level)
	}
	b.must(b.MountStore(b.t.Context(), 1))
	b.heals(1, "PoP store")
	for _, img := range images { // of the second, layers are mounted that lie in what has gone
		late, err := b.run(1, img)
		b.must(err)
		late.right()
	}
	b.shows(fresh.img)
	b.fromStore(1)
	b.whole(2)
}

// partLost loses n3, which with its server of a distributed volume takes files with it. What they hold comes
// from elsewhere meanwhile, and they come back.
func (b *faultBed) partLost(lose, back func() error) {
	b.t.Helper()
	images, runs := b.images(3, 2<<20, 0, 1)
	before := b.records(eye)
	b.must(lose())
	time.Sleep(proved)
	for _, img := range images {
		for _, i := range []int{1, 3} {
			c, err := b.runWithin(awayTime, i, img)
			b.must(err)
			c.right()
		}
	}
	fresh := b.push(2 << 20)
	for _, i := range []int{3, 4} {
		c, err := b.runWithin(awayTime, i, fresh)
		b.must(err)
		c.right()
	}
	time.Sleep(2 * faultGrace) // what is judged by what can be seen, is now
	b.must(back())
	b.settled()
	for i := range b.Nodes {
		b.heals(i, "PoP store")
	}
	b.eventually("what was away", func() error {
		have := b.records(eye)
		for id := range before {
			if _, ok := have[id]; !ok {
				return fmt.Errorf("layer %s is not there", id)
			}
		}
		return nil
	})
	for k, c := range runs {
		if k%2 == 1 {
			c.right()
		}
	}
	b.shows(fresh)
	b.fromStore(1)
	b.whole(0)
}

// A server of a volume that keeps three copies is not missed.
func copyLost(b *faultBed) {
	images, runs := b.images(2, 4<<20, 0, 1)
	b.must(b.KillBrick(2))
	for _, c := range runs {
		c.right(0, 1, 2, 3)
	}
	b.wan()
	late := b.runs(images[0], 2, 3)
	for _, c := range late {
		c.right()
	}
	if n := b.wan(); n > 128<<10 {
		b.t.Errorf("%d bytes of what is in the store crossed the WAN", n)
	}
	fresh := b.runs(b.push(2<<20), 3, 4)
	b.shows(fresh[0].img)
	b.must(b.LoseNode(1)) // n2, with its brick: one copy of three is no majority
	slow, err := b.runWithin(awayTime, 4, b.push(2<<20))
	b.must(err)
	slow.right()
	b.must(b.ReturnNode(1))
	b.must(b.RestoreBrick(b.t.Context(), 2))
	b.settled()
	for i := range b.Nodes {
		b.heals(i, "PoP store")
	}
	for _, c := range runs {
		c.right()
	}
	b.shows(slow.img)
	b.fromStore(3)
	b.whole(3)
}
