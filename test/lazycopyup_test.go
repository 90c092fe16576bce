package test

import (
	"crypto/sha256"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"dewpoint/internal/spec"
)

// A container changes files whose bytes are absent: overlayfs copies them up,
// which gives the right bytes, or an error and no change.
func TestLazyCopyUp(t *testing.T) { onBackends(t, testLazyCopyUp) }

func testLazyCopyUp(t *testing.T, backend string) {
	b := newLazyBed(t, backend, off+"wait = \"1s\"\n")
	b.run()
	b.reads(file(40)) // points are here
	longer, private, moved := file(5), file(25), file(60)
	changes := [][]string{{"append", longer, "more"}, {"chmod", private, "0600"}, {"rename", moved, "/data/new"}}
	change := func(c []string) result { return b.dew(append([]string{"exec", "web", "/app"}, c...)...) }
	b.hang()
	for _, c := range changes {
		if b.here(c[1]) == 1 {
			t.Fatalf("%s is here", c[1])
		}
		if r := change(c); r.code == 0 || !strings.Contains(r.err, "input/output error") {
			t.Errorf("%q while its bytes do not come: %+v", c, r)
		}
	}
	b.reg.Heal()
	for _, c := range changes {
		b.eventually(fmt.Sprintf("%q", c), func() bool {
			r := change(c)
			if r.code != 0 && !strings.Contains(r.err, "input/output error") {
				t.Fatalf("%q: %+v", c, r)
			}
			return r.code == 0
		})
	}
	got, more := strings.CutSuffix(get(t, "http://127.0.0.1:"+b.port+"/cat?"+longer), "more")
	if sum := fmt.Sprintf("%x", sha256.Sum256([]byte(got))); !more || sum != b.li.files[longer] {
		t.Errorf("what was appended to has %d bytes, which hash to %s, and the addition: %v", len(got), sum, more)
	}
	b.reads(private)
	if fi, err := os.Stat(b.inside(private)); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("after chmod: %v, %v", fi, err)
	}
	if a := <-b.ask("/data/new"); a.said != b.li.files[moved] {
		t.Errorf("what was renamed: %q", a.said)
	}
	if a := <-b.ask(moved); !strings.Contains(a.said, "no such file") {
		t.Errorf("the old name: %q", a.said)
	}
	port := freePort(t)
	b.must("run", "-d", "--name", "two", "--ready", "http:"+port+"/", b.li.Ref, "serve", port)
	for _, path := range []string{longer, private, moved} { // another container has the image's
		b.right(path, ask(port, path))
	}
	b.must("rm", "-f", "web", "two")
}

// inside is a path of the container web's, as the host sees it.
func (b *lazyBed) inside(path string) string {
	b.t.Helper()
	var all []spec.Container
	b.json(&all, "ps")
	i := slices.IndexFunc(all, func(c spec.Container) bool { return c.Name == "web" })
	if i < 0 {
		b.t.Fatalf("web does not run: %+v", all)
	}
	return fmt.Sprintf("/proc/%d/root%s", all[i].PID, path)
}
