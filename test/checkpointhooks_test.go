package test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"dewpoint/internal/spec"
	"dewpoint/testkit/registrytest"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// saved waits for a checkpoint that nobody waits for.
func (m *machine) saved(t *testing.T) spec.Checkpoint {
	t.Helper()
	m.eventually("a checkpoint", func() bool { return len(m.checkpoints(t)) > 0 })
	return m.checkpoints(t)[0]
}

// An image that knows nothing of checkpoints is saved and restored by what its containers' own
// labels say; a file that is bound in is a hook as one of the image is.
func TestCheckpointOwnLabels(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := slowApp(t, reg, nil)
	m := newMachine(t, reg).start()
	program, err := os.ReadFile(filepath.Join(programs, "app"))
	if err != nil {
		t.Fatal(err)
	}
	hook := filepath.Join(filepath.Dir(m.root), "hook") // run without arguments it fails
	if err := os.WriteFile(hook, program, 0o755); err != nil {
		t.Fatal(err)
	}
	hooks := []string{"--label", "dewpoint.checkpoint=auto", "--label",
		"dewpoint.checkpoint.before=/app append /state before,",
		"-l", "dewpoint.restore.after=/app append /state after", "-l", "color=red"}
	_, url := m.boot(t, "first", img.Ref, hooks...)
	born := get(t, url+"/born")
	m.saved(t)
	if got := get(t, url+"/cat?/state"); got != born+"before," {
		t.Errorf("the file of the container that was saved reads %q", got)
	}
	rec, url := m.boot(t, "clone", img.Ref, append(hooks, "-l", "color=blue", "--restore", "always")...)
	if got := get(t, url+"/cat?/state"); rec.Way.Start != "restore" || got != born+"before,after" {
		t.Errorf("%+v: the clone's file reads %q", rec.Way, got)
	}
	rec, _ = m.boot(t, "plain", img.Ref)
	if got := whys(rec, "restore: "); rec.Way.Start != "boot" ||
		got != "restore: the container's labels differ: dewpoint.checkpoint.before dewpoint.restore.after" {
		t.Errorf("without hooks: started by %s, since %q", rec.Way.Start, got)
	}
	_, url = m.boot(t, "filed", img.Ref, "-v", hook+":/etc/dewpoint/before-checkpoint:ro")
	if r := m.dew("checkpoint", "filed"); r.code == 0 ||
		!strings.Contains(r.err, "hook /etc/dewpoint/before-checkpoint: status 2: usage: app") {
		t.Errorf("a hook that was bound in: %+v", r)
	}
	get(t, url+"/count")
	m.boot(t, "never", img.Ref, "-l", "dewpoint.checkpoint=never", "--restore", "never")
	if r := m.dew("checkpoint", "never"); r.code != 12 || !strings.Contains(r.err, "dewpoint.checkpoint=never") {
		t.Errorf("never: %+v", r)
	}
	if r := m.dew("run", "-d", "-l", `dewpoint.restore.after=sh -c "`, img.Ref); r.code != 2 ||
		!strings.Contains(r.err, "dewpoint.restore.after") {
		t.Errorf("an open quote: %+v", r)
	}
	m.must("rm", "-f", "first", "clone", "plain", "filed", "never")
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// A dewd that is killed while what follows a restore runs leaves a container that is not complete:
// the next one has all of it run again, and tells of the container when that is done. One of which that
// fails is taken back.
func TestCheckpointHookKilled(t *testing.T) {
	t.Parallel()
	b := newCheckpointBed(t, "", "dewpoint.restore.after", "/app once /hooked 1m")
	for _, detached := range []bool{true, false} {
		name := fmt.Sprint("clone-", detached)
		args := []string{"deploy", "--name", name, "--net", "bridge", "--ready", "http:80/", "--restore", "always",
			b.img.Ref}
		if detached {
			args = slices.Insert(args, 1, "-d")
		}
		done := make(chan result, 1)
		go func() { done <- b.dew(args...) }()
		b.eventually("the hook runs", func() bool {
			return strings.Contains(b.dew("exec", name, "/app", "cat", "/hooked").out, "once")
		})
		b.kill()
		<-done
		b.start()
		b.eventually("the deployment's end", func() bool {
			return !strings.Contains(b.must("deployments"), name)
		})
		if got := b.must("exec", name, "/app", "cat", "/hooked"); got != "once\nagain\n" {
			t.Errorf("%s: the hook left %q", name, got)
		}
		var found struct{ Container spec.Container }
		if err := json.Unmarshal([]byte(b.must("--json", "inspect", name)), &found); err != nil {
			t.Fatal(err)
		}
		if got := get(t, "http://"+found.Container.IP+"/born"); got != b.born {
			t.Errorf("%s was born as %q, not %q", name, got, b.born)
		}
	}
	b.end()
}

// Clones of interpreters that have agents draw other random numbers. The image asks for one of
// Python; those of Node and the JVM are images that know of none, whose containers do.
func TestCheckpointAgents(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	m := newMachine(t, reg).start()
	draws := drawPrograms(t)
	for agent, program := range map[string][]string{
		"python": {"/usr/bin/python3", "/draws/draw.py"}, "node": {"/usr/bin/node", "/draws/draw.js"},
		"jvm": {"/usr/bin/java", "-XX:-UsePerfData", "-Xmx64m", "-XX:+UseSerialGC", "-jar", "/draws/draw.jar"},
	} {
		t.Run(agent, func(t *testing.T) {
			port := freePort(t)
			var flags []string
			o := registrytest.Options{Config: ocispec.ImageConfig{Entrypoint: append(program, port),
				Env: []string{"PATH=/usr/bin"}}}
			if agent == "python" {
				o.Config.Labels = map[string]string{"dewpoint.hooks": agent}
			} else {
				flags = []string{"--label", "dewpoint.hooks=" + agent}
			}
			if agent == "jvm" {
				flags = append(flags, "-e", "JAVA_TOOL_OPTIONS=-Dport="+port)
			}
			img := reg.PushImage("team/"+agent+":1", appLayers(t, 0), o)
			start := func(restore string) (way string) {
				args := append([]string{"run", "-d", "--name", agent, "--ready", "tcp:" + port, "--restore", restore,
					"-v", draws + ":/draws:ro"}, flags...)
				for at, from := range map[string]string{"/usr": "/usr", "/lib": "/usr/lib", "/lib64": "/usr/lib64",
					"/etc/alternatives": "/etc/alternatives"} {
					args = append(args, "-v", from+":"+at+":ro")
				}
				confs, _ := filepath.Glob("/etc/java-*-openjdk")
				for _, c := range confs {
					args = append(args, "-v", c+":"+c+":ro")
				}
				return m.record(append(args, img.Ref)...).Way.Start
			}
			start("never")
			m.must("checkpoint", agent)
			var drawn [2]map[string]string
			for i := range drawn {
				m.must("rm", "-f", agent)
				if way := start("always"); way != "restore" {
					t.Errorf("it started by %s", way)
				}
				drawn[i] = draw(t, "127.0.0.1:"+port)
			}
			for k, v := range drawn[0] {
				if drawn[1][k] == v {
					t.Errorf("%s is %s in both clones", k, v)
				}
			}
			if len(drawn[0]) < map[string]int{"python": 8, "node": 8, "jvm": 4}[agent] ||
				len(drawn[0]) != len(drawn[1]) {
				t.Errorf("drawn: %v, %v", drawn[0], drawn[1])
			}
		})
	}
}

// A container that is started anew, since its memory was lost when dewd was killed, is one that has booted:
// it has what its agents need, and is saved as any other.
func TestCheckpointStartedAnew(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	m := newMachine(t, reg)
	m.config += "[checkpoint]\nlazy_above = \"1MB\"\n"
	m.start()
	programs := t.TempDir()
	program := "import http.server, os\nmemory, born = os.urandom(400 << 20), os.urandom(8).hex()\n" +
		"class Serve(http.server.BaseHTTPRequestHandler):\n def do_GET(self):\n  self.send_response(200)\n  self.end_headers()\n  self.wfile.write((born + '\\n').encode())\n" +
		"http.server.HTTPServer(('', 80), Serve).serve_forever()\n"
	if err := os.WriteFile(filepath.Join(programs, "serve.py"), []byte(program), 0o644); err != nil {
		t.Fatal(err)
	}
	o := registrytest.Options{Config: ocispec.ImageConfig{Entrypoint: []string{"/usr/bin/python3",
		"/programs/serve.py"}, Env: []string{"PATH=/usr/bin"},
		Labels: map[string]string{"dewpoint.hooks": "python"}}}
	img := reg.PushImage("team/anew:1", appLayers(t, 0), o)
	boot := func(name, restore string) string {
		t.Helper()
		rec, url := m.boot(t, name, img.Ref, "--restore", restore, "-v", programs+":/programs:ro", "-v",
			"/usr:/usr:ro", "-v", "/usr/lib:/lib:ro", "-v", "/usr/lib64:/lib64:ro")
		if restore == "always" && rec.Way.Start != "restore" {
			t.Fatalf("%+v", rec.Way)
		}
		return url
	}
	first := get(t, boot("first", "never"))
	saved := strings.TrimSpace(m.must("checkpoint", "first"))
	m.must("rm", "-f", "first")
	anew := false
	for range 5 { // until memory was still to come when dewd was killed
		url := boot("clone", "always")
		m.kill()
		m.start()
		var born string
		m.eventually("it serves", func() bool {
			r, err := http.Get(url)
			if err != nil {
				return false
			}
			defer r.Body.Close()
			b, err := io.ReadAll(r.Body)
			born = string(b)
			return err == nil && r.StatusCode == http.StatusOK
		})
		if anew = born != first; anew {
			break
		}
		m.must("rm", "-f", "clone")
	}
	if !anew {
		t.Fatal("memory came before dewd was killed, each time")
	}
	if spec := m.must("--json", "inspect", "clone"); strings.Contains(spec, `"dewpoint.restored":"`+saved) {
		t.Errorf("it is still told as restored: %s", spec)
	}
	if id := strings.TrimSpace(m.must("checkpoint", "clone")); id == saved {
		t.Error("it is the checkpoint that it was made with once")
	}
	m.must("rm", "-f", "clone")
	if again := get(t, boot("again", "always")); again == first {
		t.Error("it starts from the older checkpoint")
	}
	m.must("rm", "-f", "again")
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// drawPrograms is a directory of programs that answer with what their generators give next.
func drawPrograms(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	const from = "../internal/checkpoint/hooks/testdata/"
	for _, name := range []string{"draw.py", "draw.js", "draw.jar"} {
		b, err := os.ReadFile(from + name)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), b, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// draw asks a program for its next random values, by name.
func draw(t *testing.T, address string) map[string]string {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	text, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]string{}
	for f := range strings.FieldsSeq(string(text)) {
		k, v, _ := strings.Cut(f, "=")
		values[k] = v
	}
	return values
}
