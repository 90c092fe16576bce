package bench

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"dewpoint/testkit/demo"
)

func TestApplicationsAreKnown(t *testing.T) {
	for _, image := range strings.Split(lazyImages, ",") {
		if _, err := applicationOf(image); err != nil {
			t.Error(err)
		}
	}
	if _, err := applicationOf("no:1"); err == nil {
		t.Error("an unknown image answers")
	}
	if err := askOnce(t.Context(), []string{"no:1"}, io.Discard, io.Discard); err == nil {
		t.Error("an unknown image was asked")
	}
}

// A small image over a narrow link: with a pack it starts lazily, by fewer
// bytes than the image has, and becomes whole; without one it comes whole.
func TestLazyStarts(t *testing.T) {
	o := testOptions(t)
	bin := t.TempDir()
	build(t, bin, "dewpoint/cmd/dewd", "dewpoint/cmd/dew")
	var out strings.Builder
	err := compareLazy(t.Context(),
		[]string{"-images", "redis:1", "-parts", "start", "-rates", "100", "-rounds", "1", "-engines",
			"dewd,dewd-nopack",
			"-layout", o.layout, "-dir", o.dir, "-bin", bin, "-tools", o.tools, "-out", o.out}, &out, os.Stderr,
		os.Args[:1])
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(o.out + "-start.json")
	if err != nil {
		t.Fatal(err)
	}
	var results struct{ Samples []Sample }
	if err := json.Unmarshal(raw, &results); err != nil {
		t.Fatal(err)
	}
	found := map[string]Sample{}
	for _, s := range results.Samples {
		found[s.Engine+" "+s.What] = s
	}
	m, err := demo.Manifest(o.layout, "redis:1")
	if err != nil {
		t.Fatal(err)
	}
	var size int64
	for _, l := range m.Layers {
		size += l.Size
	}
	if s := found["dewd answer"]; !strings.HasPrefix(s.Way, "lazy") || s.Wire > size {
		t.Errorf("with a pack: %s, %d bytes of %d", s.Way, s.Wire, size)
	}
	if s := found["dewd complete"]; s.Wire < size || s.Seconds <= found["dewd answer"].Seconds {
		t.Errorf("complete: %+v", s)
	}
	if s := found["dewd-nopack answer"]; !strings.HasPrefix(s.Way, "whole") {
		t.Errorf("without a pack: %s", s.Way)
	}
	if s := found["dewd warm"]; s.Way != "local" {
		t.Errorf("the second start: %s", s.Way)
	}
	if !strings.Contains(out.String(), "pack/link + boot") {
		t.Errorf("no table of the targets: %s", out.String())
	}
	for _, dir := range []string{o.dir, o.dir + ".pushed"} {
		if _, err := os.Stat(dir); err == nil {
			t.Errorf("%s is left", dir)
		}
	}
}

func TestTreeIsTheImages(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{"etc/a": "text", "etc/hosts": "x", "proc/1": "x", "var/lib/b": "x",
		"var/log/c": "x", "etc/empty": ""} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	tr, err := treeAt(root)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.close()
	if want := []string{"etc/a", "var/lib/b"}; !slices.Equal(tr.files, want) {
		t.Errorf("files %v, want %v", tr.files, want)
	}
	if n, err := tr.read("etc/a", make([]byte, 3)); err != nil || n != 4 {
		t.Errorf("read %d bytes: %v", n, err)
	}
	if n, err := tr.cached(); err != nil || n != 2*int64(os.Getpagesize()) {
		t.Errorf("%d bytes are cached: %v", n, err)
	}
	for _, c := range []struct {
		name         string
		exist, right bool
	}{{"etc/a", true, true}, {"etc/a", false, false}, {"etc/none", false, true}, {"etc/none", true, false}} {
		if _, err := tr.opens([]string{c.name}, c.exist); (err == nil) != c.right {
			t.Errorf("open %s, which is to exist: %v: %v", c.name, c.exist, err)
		}
	}
}

// A file that was just written and read is in the page cache, by both ways of asking.
func TestCachedPages(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), make([]byte, 1<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	n := map[string]int64{}
	if err := cachedBelow(dir, n); err != nil || n["files"] != 1<<20 {
		t.Errorf("cachestat: %v, %v", n, err)
	}
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if n, err := resident(int(d.Fd()), "f"); err != nil || n != 1<<20 {
		t.Errorf("mincore: %d, %v", n, err)
	}
	if n, err := cached(filepath.Join(dir, "none")); err != nil || n != 0 {
		t.Errorf("a file that is not there: %d, %v", n, err)
	}
}

func TestFigures(t *testing.T) {
	var all []figure
	all = merge(all, []figure{{"i", "base", "x", "us", []float64{2}}, {"i", "mine", "x", "us", []float64{1}}})
	all = merge(all, []figure{{"i", "mine", "x", "us", []float64{5, 3}}})
	if f := find(all, "i", "mine", "x"); f == nil || f.median() != 3 || len(all) != 2 {
		t.Fatalf("merged: %+v", all)
	}
	var out strings.Builder
	tabulate(&out, all, "base")
	if f := strings.Fields(strings.Split(out.String(), "\n")[2]); f[3] != "3" || f[7] != "1.500" || f[8] != "3" {
		t.Errorf("row: %q", f)
	}
	prefix := filepath.Join(t.TempDir(), "f")
	if err := writeFigures(prefix, all); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(prefix + "-figures.json")
	if err != nil {
		t.Fatal(err)
	}
	var back struct{ Figures []figure }
	if err := json.Unmarshal(raw, &back); err != nil || len(back.Figures) != 2 ||
		len(back.Figures[1].Values) != 3 {
		t.Errorf("written: %s, %v", raw, err)
	}
}

func TestSpread(t *testing.T) {
	names := strings.Split("abcdefghij", "")
	if got := strings.Join(spread(names, 5), ""); got != "acegi" {
		t.Errorf("spread: %s", got)
	}
	if got := spread(names[:2], 5); len(got) != 2 {
		t.Errorf("spread of few: %v", got)
	}
}

func TestScriptQuoting(t *testing.T) {
	if got := quoted([]string{"/a b", "it's"}); got != `'/a b' 'it'\''s'` {
		t.Error(got)
	}
}
