package snapshot_test

import (
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"
)

// An unmount that does not return holds up no call but its own.
func TestStuckUnmount(t *testing.T) {
	for at, stick := range map[string]func(b *bed, own string) error{
		"1": func(b *bed, own string) error { return b.Remove(background, own) },
		"7": func(b *bed, _ string) error { return b.Cleanup(background) }, // which belongs to no layer
	} {
		t.Run(at, func(t *testing.T) {
			b := newBed(t)
			own := b.pull(b.layer("a", "goes"))
			point := filepath.Join(b.root(), "m", at)
			if err := os.Mkdir(point, 0o700); err != nil && !os.IsExist(err) {
				t.Fatal(err)
			}
			stuck, release := make(chan struct{}), make(chan struct{})
			once := sync.OnceFunc(func() { close(stuck) })
			b.backend.BeforeUnmount(func(target string) {
				if filepath.Base(target) == at {
					once()
					<-release
				}
			})
			ended := make(chan error, 1)
			go func() { ended <- stick(b, own) }()
			within(t, "the unmount", stuck)

			others := make(chan struct{})
			go func() {
				defer close(others)
				for i := range 8 { // more than the numbers below the stuck one's
					dir := b.mount(b.prepare("c"+strconv.Itoa(i), b.pull(b.layer("a", strconv.Itoa(i)))))
					b.want(filepath.Join(dir, "a"), strconv.Itoa(i))
					b.unmount(dir)
				}
				if len(b.InUse()) < 8 {
					t.Errorf("in use: %v", b.InUse())
				}
				if err := b.Remove(background, "c0"); err != nil {
					t.Error(err)
				}
				if err := b.Cleanup(background); err != nil {
					t.Error(err)
				}
			}()
			within(t, "other calls", others)
			close(release)
			if err := <-ended; err != nil {
				t.Error(err)
			}
			if err := b.Cleanup(background); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(point); !os.IsNotExist(err) {
				t.Errorf("the mount point stays: %v", err)
			}
		})
	}
}

func within(t *testing.T, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(10 * time.Second):
		t.Fatalf("%s: not within ten seconds", what)
	}
}
