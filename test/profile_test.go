package test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/pack"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/registrytest"
)

// profiled is what dew --json profile prints.
type profiled struct {
	Container string
	Runs      []spec.Profile
	Pack      spec.Pack
}

// readOf is how much of a file is in a list.
func readOf(list []spec.FileRead, path string) int64 {
	for _, f := range list {
		if f.Path == path {
			return f.Read
		}
	}
	return 0
}

// script writes an executable file.
func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(path, []byte("#!/bin/sh\nset -e\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// A profile made by a script becomes a pack, which is published where another
// node finds it and starts from it.
func TestProfilePackPush(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	for _, q := range []registrytest.Quirks{{}, {NoReferrers: true}} {
		t.Run(fmt.Sprintf("%+v", q), func(t *testing.T) {
			reg.Be(q)
			repo := fmt.Sprintf("app%v", q.NoReferrers)
			img := reg.PushImage(repo+":1", appLayers(t, 8<<20), appOptions())
			m := newMachine(t, reg)
			m.config += "[pack]\nlearn = \"never\"\n"
			m.start()
			m.must("pull", img.Ref)
			if r := m.dew("pack", "inspect", img.Ref); r.code != 4 ||
				!strings.Contains(r.err, "the image has no startup pack; record one") {
				t.Errorf("inspect of an image without a pack: %+v", r)
			}
			m.must("rmi", img.Ref)
			if r := m.dew("pack", "inspect", img.Ref); r.code != 4 || !strings.Contains(r.err, "not here") {
				t.Errorf("inspect of an image that is not here: %+v", r)
			}
			port := freePort(t)
			use := script(t, fmt.Sprintf("test \"$DEW_NAME $DEW_IP\" = 'p 127.0.0.1'\n%s/dew exec $DEW_NAME /app cat /etc/motd | grep -q above\n", programs))
			var p profiled
			out := m.must("--json", "profile", "--name", "p", "--runs", "2", "--settle", "100ms", "--exercise", use,
				"--ready", "http:"+port+"/", img.Ref, "serve", port)
			if err := json.Unmarshal([]byte(out), &p); err != nil {
				t.Fatal(err)
			}
			for i, r := range p.Runs {
				if readOf(r.Largest, "etc/motd") == 0 || readOf(r.Largest, "app") < 100<<10 || r.Read > r.Total/2 ||
					r.Lost != 0 {
					t.Errorf("run %d: %+v", i, r)
				}
			}
			if len(p.Runs) != 2 || p.Pack.Runs != 2 || !p.Pack.Exercised || p.Pack.Share <= 0 || p.Pack.Share > 0.5 ||
				readOf(p.Pack.Largest, "app") == 0 {
				t.Errorf("%+v", p)
			}
			if out := m.must("ps", "-a"); strings.Contains(out, "p ") {
				t.Errorf("the container is left:\n%s", out)
			}
			key := filepath.Join(t.TempDir(), "key.pem")
			writeKey(t, key)
			m.must("pack", "push", "--key", key, img.Ref)
			list := reg.Artifacts(repo, img.Digest)
			if len(list) != 1 || list[0].Annotations[pack.AnnotationBlob] != p.Pack.Pack ||
				list[0].Annotations[pack.AnnotationSignature] == "" {
				t.Errorf("%+v", list)
			}
			other := newMachine(t, reg).start()
			rec := other.record("run", "-d", "--name", "web", "--ready", "http:"+port+"/", img.Ref, "serve", port)
			if rec.Way.Pull != "lazy" || rec.Way.Pack != "repository" {
				t.Errorf("another node started by %+v", rec.Way)
			}
			other.must("rm", "-f", "web")
			var there spec.Pack
			other.json(&there, "pack", "inspect", img.Ref)
			if there.From != spec.FromRepository || there.Trust != "repository" || there.Pack != p.Pack.Pack ||
				there.Files != p.Pack.Files || readOf(there.Largest, "app") == 0 {
				t.Errorf("the published pack is shown as %+v", there)
			}
			strict := newMachine(t, reg)
			strict.config += "[pack]\ntrust = \"pop\"\nlearn = \"never\"\n"
			strict.start()
			strict.must("pull", img.Ref)
			if out := strict.must("pack", "inspect", img.Ref); !strings.Contains(out, "the image's repository") ||
				!strings.Contains(out, "no: ") || !strings.Contains(out, "packs of registries are not used") {
				t.Errorf("a pack that is not believed is shown as:\n%s", out)
			}
		})
	}
}

func writeKey(t *testing.T, path string) {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}),
		0o600); err != nil {
		t.Fatal(err)
	}
}

// A script that fails leaves neither container nor profile.
func TestProfileScriptFails(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg)
	m.config += "[pack]\nlearn = \"never\"\n"
	m.start()
	port := freePort(t)
	r := m.dew("profile", "--settle", "0s", "--exercise", script(t, "exit 3"), "--ready", "http:"+port+"/",
		img.Ref, "serve", port)
	if r.code != 9 || !strings.Contains(r.err, "exit status 3") {
		t.Errorf("%+v", r)
	}
	if out := m.must("ps", "-a"); strings.Contains(out, "app-") {
		t.Errorf("a container is left:\n%s", out)
	}
	if left, _ := filepath.Glob(filepath.Join(m.root, "packs", "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if r := m.dew("pack", "build", img.Ref); r.code != 4 || !strings.Contains(r.err, "dew profile") {
		t.Errorf("%+v", r)
	}
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// A container that is not ready in time, or ends before, is not left behind.
func TestProfileNotReady(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg)
	m.start()
	for _, cmd := range [][]string{{"sleep", "1h"}, {"exit", "3"}} {
		r := m.dew(append([]string{"profile", "--name", "late", "--ready", "tcp:" + freePort(t), "--ready-timeout",
			"1s", img.Ref}, cmd...)...)
		if r.code != 9 || !strings.Contains(r.err, "nothing of this run is kept") {
			t.Errorf("%q: %+v", cmd, r)
		}
		if out := m.must("ps", "-a"); strings.Contains(out, "late") {
			t.Errorf("%q: the container is left:\n%s", cmd, out)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(m.root, "packs", "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	port := freePort(t)
	m.must("profile", "--name", "late", "--settle", "0s", "--ready", "http:"+port+"/", img.Ref, "serve", port)
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// The first ordinary start becomes a pack, and the next ones are not recorded.
func TestFirstStartIsLearned(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 8<<20), appOptions())
	for _, backend := range []string{"erofs", "loop"} {
		t.Run(backend, func(t *testing.T) {
			m := newMachine(t, reg)
			m.config = strings.Replace(m.config, "[node]\n", fmt.Sprintf("[node]\nmount = %q\n", backend), 1) +
				"[pack]\nafter = \"200ms\"\n"
			m.start()
			port := freePort(t)
			m.must("run", "-d", "--name", "web", "--ready", "http:"+port+"/", img.Ref, "serve", port)
			file := filepath.Join(m.root, "packs", img.Digest.Encoded()+".pack")
			b := await(t, file)
			h, _, err := pack.ReadHeader(bytes.NewReader(b))
			if err != nil || h.Image != img.Digest || h.Profile.Runs != 1 || h.Profile.Node != "n1" ||
				h.Profile.Exercised || h.Needed < 100<<10 {
				t.Errorf("%+v, %v", h, err)
			}
			m.must("rm", "-f", "web")
			var p spec.Pack
			if err := json.Unmarshal([]byte(m.must("--json", "pack", "inspect", img.Ref)), &p); err != nil ||
				p.Trust != "pop" || readOf(p.Largest, "app") == 0 {
				t.Errorf("%+v, %v", p, err)
			}
			if readOf(p.Largest, "etc/motd") > 0 {
				t.Error("it holds a file that the start did not read")
			}
			m.must("run", "--rm", img.Ref, "cat", "/etc/motd")
			time.Sleep(400 * time.Millisecond)
			if again, err := os.ReadFile(file); err != nil || !bytes.Equal(b, again) {
				t.Errorf("the second start changed the pack, or %v", err)
			}
			m.must("rmi", img.Ref)
			m.must("prune")
			checkNothingLeft(t, m)
			if out := m.must("doctor"); !strings.Contains(out, "recording of starts") {
				t.Errorf("doctor is silent:\n%s", out)
			}
		})
	}
}

// The recording of a start ends with the container, which leaves nothing mounted.
func TestRecordingEndsWithItsContainer(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 8<<20), appOptions())
	m := newMachine(t, reg)
	m.config += "[pack]\nafter = \"1h\"\n"
	m.start()
	port := freePort(t)
	m.must("run", "-d", "--name", "web", "--ready", "http:"+port+"/", img.Ref, "serve", port)
	m.must("rm", "-f", "web")
	b := await(t, filepath.Join(m.root, "packs", img.Digest.Encoded()+".pack"))
	if h, _, err := pack.ReadHeader(bytes.NewReader(b)); err != nil || h.Needed < 100<<10 {
		t.Errorf("%+v, %v", h, err)
	}
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

func await(t *testing.T, file string) []byte {
	t.Helper()
	var b []byte
	testkit.Retry(t, file+" comes", func() (err error) {
		b, err = os.ReadFile(file)
		return err
	})
	return b
}
