package snapshot_test

import (
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"
)

func TestDeactivate(t *testing.T) {
	onEach(t, func(b *bed) {
		low, high := b.layer("a", "low"), b.layer("b", "high")
		top := b.pull(low, high)
		rest := func(want ...digest.Digest) {
			b.t.Helper()
			busy, err := b.Deactivate(background, low, high, digest.FromString("unknown"))
			if err != nil || !slices.Equal(busy, want) || b.mounted() != len(want) || len(b.InUse()) != 2 {
				b.t.Errorf("%v stay mounted, %d mounts, %v in use, %v; want %v", busy, b.mounted(), b.InUse(), err, want)
			}
		}
		b.prepare("c1", b.store.AddChain(low).String())
		rest(low)
		if err := b.Remove(background, "c1"); err != nil {
			b.t.Fatal(err)
		}
		rest()
		if _, err := b.View(background, "v", top); err != nil {
			b.t.Fatal(err)
		}
		rest(low, high)
		if err := b.Remove(background, "v"); err != nil {
			b.t.Fatal(err)
		}
		rest()
		dir := b.mount(b.prepare("c2", top))
		b.want(filepath.Join(dir, "a"), "low")
		b.want(filepath.Join(dir, "b"), "high")
		rest(low, high)
		b.unmount(dir)
	})
}

// Whoever makes a container while its layers are being unmounted gets one with all of them.
func TestRestWhileContainersAreMade(t *testing.T) {
	b := newBed(t)
	low, high := b.layer("a", "low"), b.layer("b", "high")
	top := b.pull(low, high)
	done := make(chan struct{})
	var resting sync.WaitGroup
	resting.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			if _, err := b.Deactivate(background, low, high); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for i := range 40 {
		key := fmt.Sprint("c", i)
		dir := b.mount(b.prepare(key, top))
		b.want(filepath.Join(dir, "a"), "low")
		b.want(filepath.Join(dir, "b"), "high")
		b.unmount(dir)
		if err := b.Remove(background, key); err != nil {
			t.Fatal(err)
		}
	}
	close(done)
	resting.Wait()
}
