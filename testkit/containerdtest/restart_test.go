package containerdtest_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dewpoint/testkit/snapshottest"
)

// A container outlives the snapshotter, and starts again after a reboot.
func TestRestarts(t *testing.T) {
	for _, v := range versions {
		t.Run(string(v), func(t *testing.T) {
			n := newNode(t, v)
			n.know()
			n.pull()
			id := fmt.Sprintf("snap-r-%d-%s", os.Getpid(), strings.ReplaceAll(string(v), ".", ""))
			n.Ctr("run", "-d", "--snapshotter", "dewpoint", n.image.Ref, id, "/cat", "/fifo")
			defer n.Try(t.Context(), "task", "rm", "-f", id) // when the test failed
			n.execs(id, "1")
			n.down()
			n.execs(id, "2")
			n.up()
			n.execs(id, "3")
			n.reconnected()
			n.greet(n.image.Ref)
			n.reboot(id)
			n.reconnected()
			n.Ctr("task", "start", "-d", id)
			n.execs(id, "4")
			n.end(id)
			n.Ctr("container", "rm", id)
			n.forget(n.image.Ref)
		})
	}
}

func (n *node) execs(id, exec string) {
	n.t.Helper()
	if out := n.Ctr("task", "exec", "--exec-id", "e"+exec, id, "/cat", "/greeting"); !strings.Contains(out,
		"hello") {
		n.t.Errorf("the container says %q", out)
	}
}

// reconnected waits until containerd has found the snapshotter again, which it
// looks for after pauses of up to 3 s.
func (n *node) reconnected() {
	n.t.Helper()
	for range 100 {
		if _, err := n.Try(n.t.Context(), "snapshots", "--snapshotter", "dewpoint", "prepare",
			"probe"); err == nil {
			n.Ctr("snapshots", "--snapshotter", "dewpoint", "rm", "probe")
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	n.t.Fatal("containerd does not find the snapshotter again")
}

// reboot ends the container and everything else, unmounts all, and starts
// containerd and the snapshotter again, in this order, as may happen.
func (n *node) reboot(id string) {
	n.t.Helper()
	n.end(id)
	n.Stop()
	n.down()
	if err := snapshottest.UnmountAll(n.dir); err != nil {
		n.t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(n.dir, "c", "state")); err != nil {
		n.t.Fatal(err)
	}
	n.Up()
	n.up()
}

// end kills a container's task and waits until it is gone.
func (n *node) end(id string) {
	n.t.Helper()
	n.Ctr("task", "kill", "-s", "KILL", id)
	for range 100 {
		if _, err := n.Try(n.t.Context(), "task", "rm", id); err == nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	n.t.Fatalf("container %s does not end", id)
}
