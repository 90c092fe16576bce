package bench

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"dewpoint/testkit/demo"

	"golang.org/x/sys/unix"
)

// The registry, the web server and what exercises a container are this program in another process.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && slices.Contains([]string{"registry", "web", "ask"}, os.Args[1]) {
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
		defer stop()
		if err := Main(ctx, os.Args[1:], io.Discard, os.Stderr); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Setenv("DEWPOINT_TUNING", "1") // as dewlab does
	os.Exit(m.Run())
}

func testOptions(t *testing.T) options {
	t.Helper()
	layout := os.Getenv("DEWPOINT_IMAGES")
	if layout == "" {
		layout = demo.Dir
	}
	return options{images: []string{"nginx:1"}, mbit: []float64{0}, rounds: 1,
		what:   []string{pullImage, firstAnswer},
		layout: layout, dir: filepath.Join(t.TempDir(), "bed"), tools: toolsDir(),
		out: filepath.Join(t.TempDir(), "out")}
}

// build builds programs as make does, so that what is compiled already is taken.
func build(t *testing.T, dir string, packages ...string) {
	t.Helper()
	args := []string{"build", "-o", dir + "/", "-tags", "grpcnotrace"}
	if exec.Command("pkg-config", "--exists", "libisal").Run() == nil {
		args[len(args)-1] += ",isal"
	}
	cmd := exec.Command("go", append(args, packages...)...)
	if strings.HasPrefix(packages[0], "dewpoint/cmd") { // the product's module has them
		cmd.Dir = filepath.Join("..", "..")
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %v: %v\n%s", packages, err, out)
	}
}

// Containerd is on every machine that runs the tests, so it stands for all engines.
func TestMeasureContainerd(t *testing.T) {
	o := testOptions(t)
	bed, err := o.bed(t.Context(), os.Stderr, os.Args[:1])
	if err != nil {
		t.Fatal(err)
	}
	defer bed.Close()
	c := containerd{tools: o.containerd(), snapshotter: "overlayfs"}
	if why := c.missing(); why != "" {
		t.Fatal(why)
	}
	r := newReport(io.Discard, io.Discard, "test", o.out)
	if err := o.measureAll(t.Context(), bed, []engine{c}, r); err != nil {
		t.Fatal(err)
	}
	if err := r.write(); err != nil {
		t.Fatal(err)
	}
	m, err := demo.Manifest(o.layout, "nginx:1")
	if err != nil {
		t.Fatal(err)
	}
	var size int64
	for _, l := range m.Layers {
		size += l.Size
	}
	checkSamples(t, r.samples, size)
	checkNothingLeft(t, o.dir)
}

func checkSamples(t *testing.T, samples []Sample, size int64) {
	t.Helper()
	if len(samples) != 2 {
		t.Fatalf("%d samples, want one pull and one answer", len(samples))
	}
	for _, s := range samples {
		if s.Seconds <= 0 || s.CPU <= 0.05 || s.Peak < 20<<20 || s.Idle < 10<<20 {
			t.Errorf("%s: implausible: %+v", s.What, s)
		}
		if s.Wire < size || s.Wire > size*11/10 {
			t.Errorf("%s: %d bytes came over the link for layers of %d", s.What, s.Wire, size)
		}
		if s.PerProgram["containerd"] == 0 || s.PerProgram["ctr"] == 0 {
			t.Errorf("%s: programs seen: %v", s.What, s.PerProgram)
		}
	}
}

// checkNothingLeft looks for what a session of an engine might forget.
func checkNothingLeft(t *testing.T, dir string) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), dir) {
		t.Errorf("a mount is left below %s", dir)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) > 0 {
		t.Errorf("left in %s: %v", dir, entries)
	}
	groups, _ := filepath.Glob(fmt.Sprintf("/sys/fs/cgroup{/unified,}/dewpoint-%d-containerd*", os.Getpid()))
	if len(groups) > 0 {
		t.Errorf("cgroups are left: %v", groups)
	}
}

func TestInterference(t *testing.T) {
	o := testOptions(t)
	bed, err := o.bed(t.Context(), os.Stderr, os.Args[:1])
	if err != nil {
		t.Fatal(err)
	}
	defer bed.Close()
	web, err := startWeb(t.Context(), bed)
	if err != nil {
		t.Fatal(err)
	}
	defer web.Close()
	c := containerd{tools: o.containerd(), snapshotter: "overlayfs"}
	var seen *Latency
	var l timeline
	_, err = measure(t.Context(), bed, c, "nginx:1", pullImage, func(s *session) func() {
		stop, stopLine := load(t.Context(), bed), l.watch(s)
		return func() { seen = stop(); stopLine() }
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen.Requests < 5 || seen.Failed > 0 || seen.P99 < seen.P50 {
		t.Errorf("the web server's users saw %+v", seen)
	}
	var wire float64
	for _, i := range l.instants {
		wire += i.network
	}
	if len(l.instants) < 3 || wire == 0 {
		t.Errorf("timeline %+v", l.instants)
	}
}

func TestMedianAndRatio(t *testing.T) {
	if m := median([]float64{3, 1, 2}); m != 2 {
		t.Errorf("median of three: %g", m)
	}
	if m := median([]float64{4, 1, 2, 3}); m != 2.5 {
		t.Errorf("median of four: %g", m)
	}
	if r := ratio(1, []float64{4, 2, 2}); r != "0.50" {
		t.Errorf("ratio %s", r)
	}
}

func TestTable(t *testing.T) {
	var out strings.Builder
	r := newReport(&out, io.Discard, "pull", "")
	for i, seconds := range []float64{1, 3, 2} {
		r.add(Sample{Engine: "dewd", Image: "x", What: pullImage, Round: i, Seconds: seconds, CPU: 1})
		r.add(Sample{Engine: "other", Image: "x", What: pullImage, Round: i, Seconds: 2 * seconds, CPU: 4})
	}
	r.table("other")
	lines := strings.Split(out.String(), "\n")
	if f := strings.Fields(lines[1]); f[4] != "2.000" || f[11] != "0.50" || f[12] != "0.25" || f[13] != "3" {
		t.Errorf("row of dewd: %q", lines[1])
	}
}

func TestPlotIsXML(t *testing.T) {
	svg := plot("a & b",
		[]timeline{{engine: "<dewd>", instants: []instant{{t: 0.1, network: 20}, {t: 0.2, cpu: 1}}},
			{engine: "idle"}})
	var doc struct {
		Lines []struct {
			Points string `xml:"points,attr"`
		} `xml:"polyline"`
	}
	if err := xml.Unmarshal([]byte(svg), &doc); err != nil {
		t.Fatal(err)
	}
	if len(doc.Lines) != 8 {
		t.Fatalf("%d lines, want two engines in four panels", len(doc.Lines))
	}
	if got := doc.Lines[0].Points; !strings.HasPrefix(got, "420.0,56.0 ") {
		t.Errorf("the first point is at %q, want half way and at the top", got)
	}
}

func TestStagesInOrder(t *testing.T) {
	var record struct{ Stages map[string]float64 }
	if err := json.Unmarshal([]byte(`{"stages":{"ready":0.31,"resolved":0.02,"mounted":0.13}}`),
		&record); err != nil {
		t.Fatal(err)
	}
	if got, want := stages(record.Stages), "resolved 0.02, mounted 0.13, ready 0.31"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestUnknownCommandAndImage(t *testing.T) {
	if err := Main(t.Context(), []string{"nonsense"}, io.Discard, io.Discard); err == nil ||
		!strings.Contains(err.Error(), "usage") {
		t.Errorf("unknown command: %v", err)
	}
	err := Main(t.Context(), []string{"images", "-dir", t.TempDir(), "no:such"}, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "no:such") {
		t.Errorf("unknown image: %v", err)
	}
}
