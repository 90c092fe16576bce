package popbed

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestStores(t *testing.T) {
	for _, kind := range Kinds() {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			size := int64(512 << 20)
			if kind == Ceph {
				size = 4 << 30
			}
			b := newBed(t, Config{Store: kind, StoreBytes: size})
			var servers int64
			for _, g := range b.StoreServers() {
				servers += g.Resident()
			}
			t.Logf("servers: %d MiB, a client: %d MiB", servers>>20, b.Nodes[2].StoreClient().Resident()>>20)
			t.Run("shared", func(t *testing.T) { testShared(t, b) })
			t.Run("mounts", func(t *testing.T) { testMounts(t, b) })
			if kind == Gluster {
				t.Run("hashes", func(t *testing.T) { testHashes(t, b) })
			}
			t.Run("away", func(t *testing.T) { testAway(t, b) })
			t.Run("full", func(t *testing.T) { testFull(t, b) })
			if kind != Ceph {
				t.Run("crowded", func(t *testing.T) { testCrowded(t, b) })
			}
			t.Run("flipped", func(t *testing.T) { testFlipped(t, b) })
			if kind != Dir {
				t.Run("brick", func(t *testing.T) { testBrick(t, b) })
				t.Run("unplugged", func(t *testing.T) { testUnplugged(t, b) })
			}
		})
	}
}

func testShared(t *testing.T, b *Bed) {
	for i := range b.Nodes {
		name, text := b.Nodes[i].Name, strings.Repeat(b.Nodes[i].Name, 1000)
		b.write(t, i, name, text)
		for j := range b.Nodes {
			b.reads(t, j, name, text)
		}
	}
	if err := os.Rename(filepath.Join(b.Nodes[0].Store, "n1"),
		filepath.Join(b.Nodes[0].Store, "moved")); err != nil {
		t.Fatal(err)
	}
	b.reads(t, 1, "moved", strings.Repeat("n1", 1000))
}

func testAway(t *testing.T, b *Bed) {
	b.write(t, 0, "away", "here")
	if err := b.LoseStore(1); err != nil {
		t.Fatal(err)
	}
	if _, err := os.ReadFile(filepath.Join(b.Nodes[1].Store, "away")); err == nil {
		t.Error("n2 reads from a store that it has lost")
	}
	b.reads(t, 2, "away", "here")
	if err := b.MountStore(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	b.reads(t, 1, "away", "here")
}

func testFull(t *testing.T, b *Bed) {
	if err := b.FillStore(t.Context()); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(b.Nodes[1].Store, "too-much")
	write := func() error {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
		if err != nil {
			return err
		}
		_, err = f.Write(make([]byte, 8<<20))
		return errors.Join(err, f.Sync(), f.Close())
	}
	err := until(t.Context(), 20*time.Second, func() error { // Ceph's clients hear of it a little later
		if err := write(); !errors.Is(err, unix.ENOSPC) {
			return errors.Join(errors.New("a full store takes more"), err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if err := b.FreeStore(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := until(t.Context(), 30*time.Second, write); err != nil {
		t.Errorf("after it was freed: %v", err)
	}
	os.Remove(path)
}

func testCrowded(t *testing.T, b *Bed) {
	if err := b.CrowdStore(t.Context(), 0.1); err != nil {
		t.Fatal(err)
	}
	var st unix.Statfs_t
	free := func() float64 { return float64(st.Bavail) / float64(st.Blocks) }
	if err := unix.Statfs(b.Nodes[1].Store, &st); err != nil || free() < 0.05 || free() > 0.11 {
		t.Errorf("a tenth is to be free, and %.3f is; %v", free(), err)
	}
	b.write(t, 1, "crowded", strings.Repeat("x", 1<<20))
	b.reads(t, 2, "crowded", strings.Repeat("x", 1<<20))
	if err := b.FreeStore(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func testFlipped(t *testing.T, b *Bed) {
	text := strings.Repeat("0123456789abcdef", 64<<10)
	b.write(t, 0, "flip", text)
	if err := b.FlipBytes("flip", 500_000, 3); err != nil {
		t.Fatal(err)
	}
	if err := b.FlipBytes("none", 0, 1); err == nil {
		t.Error("bytes of no file were flipped")
	}
	for i := range b.Nodes {
		if err := b.MountStore(t.Context(), i); err != nil { // with empty caches
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(filepath.Join(b.Nodes[1].Store, "flip"))
	if err != nil || len(got) != len(text) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	for i := range got {
		if wrong := i >= 500_000 && i < 500_003; (got[i] != text[i]) != wrong {
			t.Fatalf("byte %d is %q, was %q", i, got[i], text[i])
		}
	}
}

// testBrick takes one server away, and brings it back.
func testBrick(t *testing.T, b *Bed) {
	names := []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"}
	for _, name := range names {
		b.write(t, 0, name, name)
	}
	if err := b.KillBrick(2); err != nil {
		t.Fatal(err)
	}
	if b.cfg.Store == Gluster {
		if readable(t, b, names) == len(names) {
			t.Error("a brick was killed, and nothing is missing")
		}
	} else {
		for _, name := range names {
			b.reads(t, 1, name, name)
		}
		b.write(t, 0, "while", "away")
	}
	if err := b.RestoreBrick(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		b.reads(t, 1, name, name)
	}
}

func readable(t *testing.T, b *Bed, names []string) (n int) {
	t.Helper()
	for _, name := range names {
		got, err := os.ReadFile(filepath.Join(b.Nodes[1].Store, name))
		if err == nil && !bytes.Equal(got, []byte(name)) {
			t.Errorf("%s reads %q", name, got)
		}
		if err == nil {
			n++
		}
	}
	return n
}

// testUnplugged takes a node's cable.
func testUnplugged(t *testing.T, b *Bed) {
	if err := b.LoseNode(2); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if c, err := b.Dial(ctx, 0, b.Nodes[2].Address+":1"); err == nil || errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("n3 is unplugged and answers: %v, %v", c, err)
	}
	if b.cfg.Store != Gluster {
		b.write(t, 0, "unplugged", "x")
		b.reads(t, 1, "unplugged", "x")
	}
	if err := b.ReturnNode(2); err != nil {
		t.Fatal(err)
	}
	b.write(t, 0, "plugged", "y")
	b.reads(t, 2, "plugged", "y")
}
