package test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/spec"
	"dewpoint/testkit/registrytest"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// pushLayout puts the image of that name in an OCI layout into the registry.
func pushLayout(b *testing.B, reg *registrytest.Server, dir, name string) string {
	b.Helper()
	blob := func(d ocispec.Descriptor) []byte {
		raw, err := os.ReadFile(filepath.Join(dir, "blobs", d.Digest.Algorithm().String(), d.Digest.Encoded()))
		if err != nil {
			b.Fatal(err)
		}
		return raw
	}
	var idx ocispec.Index
	raw, err := os.ReadFile(filepath.Join(dir, "index.json"))
	if err != nil {
		b.Fatalf("no images (make images): %v", err)
	}
	if err := json.Unmarshal(raw, &idx); err != nil {
		b.Fatal(err)
	}
	for _, d := range idx.Manifests {
		if d.Annotations[ocispec.AnnotationRefName] != name {
			continue
		}
		var m ocispec.Manifest
		body := blob(d)
		if err := json.Unmarshal(body, &m); err != nil {
			b.Fatal(err)
		}
		for _, l := range append(m.Layers, m.Config) {
			reg.PushBlob(blob(l))
		}
		return reg.PushManifest(name, d.MediaType, body).Ref
	}
	b.Fatalf("no image %s in %s (make images)", name, dir)
	return ""
}

// BenchmarkRecordedStart starts a real image for the first time on two nodes in
// turn, of which one records. It gives the medians, in milliseconds, of the time
// from the mount of the image until the container is created, until it is ready,
// and of the whole.
func BenchmarkRecordedStart(b *testing.B) {
	dir := os.Getenv("DEWPOINT_IMAGES")
	if dir == "" {
		dir = "/var/cache/dewpoint/images"
	}
	reg := registrytest.New(b)
	for _, name := range []string{"nginx:1", "redis:1", "python:1"} {
		b.Run(strings.ReplaceAll(name, ":", "-"), func(b *testing.B) {
			ref := pushLayout(b, reg, dir, name)
			nodes := map[string]*machine{}
			for how, learn := range map[string]string{"recorded": "auto", "plain": "never"} {
				m := newMachine(b, reg)
				m.config += "[lazy]\nmode = \"never\"\n[pack]\nafter = \"700ms\"\nlearn = \"" + learn + "\"\n"
				nodes[how] = m.start()
			}
			took := map[string][]float64{}
			for i := 0; b.Loop(); i++ {
				turn := []string{"recorded", "plain"}
				if i%2 == 1 {
					slices.Reverse(turn)
				}
				for _, how := range turn {
					r := firstStart(nodes[how], ref)
					took[how] = append(took[how], r.Stages[spec.Ready]-r.Stages[spec.Mounted])
					took[how+"-created"] = append(took[how+"-created"], r.Stages[spec.Created]-r.Stages[spec.Mounted])
					took[how+"-all"] = append(took[how+"-all"], r.Stages[spec.Ready])
				}
			}
			for how, all := range took {
				slices.Sort(all)
				b.ReportMetric(all[len(all)/2]*1000, how+"-ms")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// firstStart runs an image until it is ready and removes all of it again.
func firstStart(m *machine, ref string) spec.Record {
	args := []string{"run", "-d", "--name", "x", "--net", "none"}
	switch {
	case strings.Contains(ref, "nginx"):
		args = append(args, "--ready", "tcp:80", ref)
	case strings.Contains(ref, "redis"):
		args = append(args, "--ready", "tcp:6379", ref)
	default:
		args = append(args, "--ready", "tcp:8000", ref, "python3", "-m", "http.server")
	}
	r := m.record(args...)
	m.must("rm", "-f", "x")
	m.must("rmi", ref)
	m.must("prune")
	time.Sleep(time.Second) // the recording has ended, and finds nothing to build a pack of
	if err := os.RemoveAll(filepath.Join(m.root, "packs")); err != nil {
		m.t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(m.root, "packs"), 0o700); err != nil {
		m.t.Fatal(err)
	}
	return r
}
