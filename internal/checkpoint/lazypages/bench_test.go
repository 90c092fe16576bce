package lazypages_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"dewpoint/internal/checkpoint/image"
	"dewpoint/internal/checkpoint/lazypages"
)

// BenchmarkRestore restores a process of $LAZY_MB MB (1000) in turn
//
//	eager   by CRIU, all before it runs
//	daemon  lazily, by the daemon criu lazy-pages
//	dir     lazily, by this package, from files of pages
//	packed  the same, from the compressed file of a checkpoint
//	again   the same, with the pages touched by the one before first
//
// and reports the seconds until CRIU is through, until the process has answered a request that reads pages
// all over its memory, until all memory is in, and of CPU, of all processes.
//
//	go test -tags isal -run - -bench Restore -benchtime 5x ./internal/checkpoint/lazypages
func BenchmarkRestore(b *testing.B) {
	mb, err := strconv.Atoi(os.Getenv("LAZY_MB"))
	if err != nil {
		mb = 1000
	}
	img := dump(b, mb, 0)
	full := img.full(b)
	packed := pack(b, full)
	var order []lazypages.Page
	for _, way := range []struct {
		name string
		run  func(b *testing.B, m *meter)
	}{
		{"eager", func(b *testing.B, m *meter) { m.eager(b, full) }},
		{"daemon", func(b *testing.B, m *meter) { m.daemon(b, full) }},
		{"dir", func(b *testing.B, m *meter) { m.ours(b, img.pages, nil) }},
		{"packed", func(b *testing.B, m *meter) { order = m.ours(b, packed, nil).Touched() }},
		{"again", func(b *testing.B, m *meter) { m.ours(b, packed, order) }},
	} {
		b.Run(way.name, func(b *testing.B) {
			m := &meter{img: img, pages: mb * 256}
			for b.Loop() {
				way.run(b, m)
			}
			n := float64(b.N)
			b.ReportMetric(m.ready.Seconds()/n, "s-criu")
			b.ReportMetric(m.answer.Seconds()/n, "s-answer")
			b.ReportMetric(m.filled.Seconds()/n, "s-filled")
			b.ReportMetric(m.cpu.Seconds()/n, "s-cpu")
			b.ReportMetric(m.faults/n, "faults")
			b.ReportMetric(0, "ns/op")
		})
	}
}

type meter struct {
	pages                      int
	img                        dumped
	ready, answer, filled, cpu time.Duration
	faults                     float64
	started                    time.Time
	before                     time.Duration
}

func (m *meter) begin() { m.before, m.started = cpuTime(), time.Now() }

// answered asks for pages all over the memory.
func (m *meter) answered(b *testing.B) {
	for i := range 50 {
		m.img.must(b, "page "+strconv.Itoa(i*m.pages/50))
	}
	m.answer += time.Since(m.started)
}

// restored notes that CRIU is through.
func (m *meter) restored() { m.ready += time.Since(m.started) }

func (m *meter) end() {
	m.filled += time.Since(m.started)
	m.img.kill()
	m.cpu += cpuTime() - m.before
}

func (m *meter) eager(b *testing.B, full string) {
	work := b.TempDir()
	m.begin()
	if err := criu(b, work, "restore", "-d", "-D", full); err != nil {
		b.Fatal(err)
	}
	m.restored()
	m.answered(b)
	m.end()
}

func (m *meter) daemon(b *testing.B, full string) {
	work := b.TempDir()
	m.begin()
	cmd := exec.Command(criuPath(), "lazy-pages", "-D", full, "--work-dir", work, "-o", "lazy.log")
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(work, lazypages.SocketName)); err == nil {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if err := criu(b, work, "restore", "-d", "-D", full, "--lazy-pages"); err != nil {
		b.Fatal(err)
	}
	m.restored()
	m.answered(b)
	if err := cmd.Wait(); err != nil {
		b.Fatal(err)
	}
	m.end()
}

func (m *meter) ours(b *testing.B, src lazypages.Source, order []lazypages.Page) *lazypages.Server {
	m.begin()
	s := m.img.restore(b, lazypages.Config{Source: src, Order: order, Guard: guard()})
	m.restored()
	m.answered(b)
	if err := s.Wait(); err != nil {
		b.Fatal(err)
	}
	m.end()
	m.faults += float64(s.Stats().Faults)
	return s
}

func cpuTime() time.Duration {
	var sum time.Duration
	for _, who := range []int{syscall.RUSAGE_SELF, syscall.RUSAGE_CHILDREN} {
		var u syscall.Rusage
		syscall.Getrusage(who, &u)
		sum += time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	return sum
}

// full is a directory with the files of pages too.
func (img *dumped) full(b *testing.B) string {
	b.Helper()
	full := b.TempDir()
	link := func(pattern string) {
		files, _ := filepath.Glob(pattern)
		for _, f := range files {
			if err := os.Link(f, filepath.Join(full, filepath.Base(f))); err != nil && !os.IsExist(err) {
				b.Fatal(err)
			}
		}
	}
	link(filepath.Join(string(img.pages), "pages-*.img"))
	link(filepath.Join(img.dir, "*"))
	return full
}

func pack(b *testing.B, full string) *image.Reader {
	b.Helper()
	f, err := os.Create(filepath.Join(b.TempDir(), "data"))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { f.Close() })
	if _, err := image.Pack(b.Context(), f, full); err != nil {
		b.Fatal(err)
	}
	st, err := f.Stat()
	if err != nil {
		b.Fatal(err)
	}
	r, err := image.Open(f, st.Size())
	if err != nil {
		b.Fatal(err)
	}
	return r
}
