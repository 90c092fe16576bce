package test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"dewpoint/internal/server/doctor"
	"dewpoint/testkit/containerdtest"
	"dewpoint/testkit/registrytest"
)

// A containerd that dew setup has joined runs containers from dewd's layers, with the configuration that
// it had else, and after the undo its file is what it was.
func TestSetup(t *testing.T) {
	t.Parallel()
	for _, v := range []containerdtest.Version{containerdtest.V16, containerdtest.V24} {
		t.Run(string(v), func(t *testing.T) {
			reg := registrytest.New(t)
			img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
			m := newMachine(t, reg)
			dir := t.TempDir()
			file := filepath.Join(dir, "config.toml")
			m.args = []string{"--containerd", filepath.Join(dir, "c.sock")}
			format := map[containerdtest.Version]int{containerdtest.V16: 2, containerdtest.V24: 3}[v]
			before := fmt.Sprintf("# an operator's\nversion = %d\nroot = %q\nstate = %q\n"+
				"disabled_plugins = [\"io.containerd.internal.v1.opt\", \"io.containerd.nri.v1.nri\", \"io.containerd.grpc.v1.cri\",\n"+
				"  \"io.containerd.cri.v1.images\", \"io.containerd.cri.v1.runtime\"]\n[grpc]\n  address = %q # here\n", format,
				filepath.Join(dir, "root"), filepath.Join(dir, "state"), filepath.Join(dir, "c.sock"))
			if err := os.WriteFile(file, []byte(before), 0o600); err != nil {
				t.Fatal(err)
			}
			setup := func(args ...string) string {
				t.Helper()
				out, err := exec.Command(filepath.Join(programs, "dew"), append([]string{"setup", "containerd", "--config", file,
					"--containerd", filepath.Join(v.Dir(), "containerd"), "--socket", filepath.Join(m.state, "snapshotter.sock")},
					args...)...).CombinedOutput()
				if err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				return string(out)
			}
			setup()
			c := containerdtest.StartAs(t, v, dir)
			if known, err := doctor.Knows(t.Context(), filepath.Join(dir, "c.sock")); err != nil || !known {
				t.Errorf("a doctor sees the snapshotter: %v, %v", known, err)
			}
			m.start()
			c.Ctr("images", "pull", "--plain-http", "--snapshotter", "dewpoint", img.Ref)
			want(t, c.Ctr("run", "--rm", "--snapshotter", "dewpoint", img.Ref, "check", "/app", "cat", "/etc/motd"), "above")
			if v == containerdtest.V24 { // the transfer service tells dewd what it pulls
				if got := c.Ctr("snapshots", "--snapshotter", "dewpoint", "ls"); !strings.Contains(got, "sha256:") {
					t.Errorf("no layers of the image in %q", got)
				}
				wantFiles(t, m, len(img.Layers))
			}
			m.stop()
			c.Stop()
			setup("--undo")
			if after, err := os.ReadFile(file); err != nil || string(after) != before {
				t.Errorf("%v, after the undo it is\n%s", err, after)
			}
		})
	}
}
