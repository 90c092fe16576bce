package popbed

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const benchFile = 150 << 20

// BenchmarkStores writes a file of 150 MB on n1 with an fsync at the end, reads
// it on n2 with empty caches, and again. Run it with -benchtime 3x.
func BenchmarkStores(b *testing.B) {
	for _, kind := range Kinds() {
		b.Run(string(kind), func(b *testing.B) {
			begin := time.Now()
			bed := newBed(b, Config{Store: kind, StoreBytes: 8 << 30})
			b.ReportMetric(time.Since(begin).Seconds(), "up-s")
			b.ResetTimer()
			var wrote, cold, warm time.Duration
			for range b.N {
				wrote += bed.writeBig(b)
				if err := bed.MountStore(b.Context(), 1); err != nil {
					b.Fatal(err)
				}
				unix.Sync()
				if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
					b.Fatal(err)
				}
				cold += bed.readBig(b)
				warm += bed.readBig(b)
			}
			for unit, d := range map[string]time.Duration{"write-MB/s": wrote, "cold-MB/s": cold, "warm-MB/s": warm} {
				b.ReportMetric(float64(benchFile)/1e6*float64(b.N)/d.Seconds(), unit)
			}
			var servers int64
			for _, g := range bed.StoreServers() {
				servers += g.Resident()
			}
			b.ReportMetric(float64(servers)/1e6, "servers-MB")
			b.ReportMetric(float64(bed.Nodes[1].client.Resident())/1e6, "client-MB")
		})
	}
}

func (b *Bed) writeBig(t testing.TB) time.Duration {
	t.Helper()
	buf := make([]byte, 1<<20)
	for i := range buf {
		buf[i] = byte(i * i >> 3)
	}
	begin := time.Now()
	f, err := os.Create(filepath.Join(b.Nodes[0].Store, ".big.data.tmp1"))
	if err != nil {
		t.Fatal(err)
	}
	for range benchFile / len(buf) {
		if _, err := f.Write(buf); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(f.Sync(), f.Close(),
		os.Rename(f.Name(), filepath.Join(b.Nodes[0].Store, "big.data"))); err != nil {
		t.Fatal(err)
	}
	return time.Since(begin)
}

func (b *Bed) readBig(t testing.TB) time.Duration {
	t.Helper()
	begin := time.Now()
	f, err := os.Open(filepath.Join(b.Nodes[1].Store, "big.data"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if n, err := io.Copy(struct{ io.Writer }{io.Discard}, f); err != nil || n != benchFile {
		t.Fatalf("%d bytes, %v", n, err)
	}
	return time.Since(begin)
}

// BenchmarkStale measures for how long n2 sees what no longer is, after n1 has
// changed it and n2 has looked just before.
func BenchmarkStale(b *testing.B) {
	for _, c := range []struct {
		name   string
		kind   Kind
		mount  []string
		volume []string
	}{
		{"gluster", Gluster, nil, nil},
		{"gluster-0", Gluster, []string{"--entry-timeout=0", "--attribute-timeout=0", "--negative-timeout=0"}, nil},
		{"gluster-none", Gluster, []string{"--entry-timeout=0", "--attribute-timeout=0", "--negative-timeout=0"},
			[]string{"performance.stat-prefetch", "off", "performance.quick-read", "off"}},
		{"gluster-5", Gluster, []string{"--entry-timeout=5", "--attribute-timeout=5", "--negative-timeout=5"}, nil},
		{"gluster3", Gluster3, nil, nil},
		{"ceph", Ceph, nil, nil},
	} {
		b.Run(c.name, func(b *testing.B) {
			bed := newBed(b, Config{Store: c.kind, StoreBytes: 4 << 30, MountOptions: c.mount,
				VolumeOptions: c.volume})
			b.ResetTimer()
			worst := map[string]time.Duration{}
			for range b.N {
				for what, d := range bed.stale(b) {
					worst[what] = max(worst[what], d)
				}
			}
			for what, d := range worst {
				b.ReportMetric(float64(d.Microseconds())/1000, what+"-ms")
			}
		})
	}
}

func (b *Bed) stale(t testing.TB) map[string]time.Duration {
	t.Helper()
	at := func(i int, name string) string { return filepath.Join(b.Nodes[i].Store, name) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	put := func(name, text string) {
		t.Helper()
		must(os.WriteFile(at(0, "."+name+".tmp1"), []byte(text), 0o644))
		must(os.Rename(at(0, "."+name+".tmp1"), at(0, name)))
	}
	wait := func(done func() bool) time.Duration {
		t.Helper()
		begin := time.Now()
		for !done() {
			if time.Since(begin) > 30*time.Second {
				t.Fatal("n2 never sees it")
			}
			time.Sleep(time.Millisecond)
		}
		return time.Since(begin)
	}
	says := func(name, text string) func() bool {
		return func() bool { got, err := os.ReadFile(at(1, name)); return err == nil && string(got) == text }
	}
	sized := func(name string, size int64) func() bool {
		return func() bool { info, err := os.Stat(at(1, name)); return err == nil && info.Size() == size }
	}
	missing := func(name string) func() bool {
		return func() bool { _, err := os.Stat(at(1, name)); return errors.Is(err, os.ErrNotExist) }
	}
	found := map[string]time.Duration{}
	for _, name := range []string{"new", "over", "grown", "gone"} {
		os.Remove(at(0, name))
		wait(missing(name))
	}
	if !missing("new")() {
		t.Fatal("new is there")
	}
	put("new", "x")
	found["new-open"] = wait(says("new", "x"))
	found["new-size"] = wait(sized("new", 1))

	put("over", "one")
	wait(says("over", "one"))
	put("over", "three")
	found["replaced"] = wait(says("over", "three"))

	put("grown", "1234")
	wait(sized("grown", 4))
	f, err := os.OpenFile(at(0, "grown"), os.O_APPEND|os.O_WRONLY, 0)
	must(err)
	_, err = f.WriteString("5678")
	must(errors.Join(err, f.Sync()))
	found["grown-size"] = wait(sized("grown", 8))
	found["grown-read"] = found["grown-size"] + wait(says("grown", "12345678"))
	must(f.Close())

	put("gone", "x")
	wait(sized("gone", 1))
	must(os.Remove(at(0, "gone")))
	found["removed"] = wait(missing("gone"))
	return found
}
