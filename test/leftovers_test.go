package test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/engine/network"
	"dewpoint/testkit/registrytest"

	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// checkNothingLeft asserts that a node whose containers and images were
// removed has no more of them than one on which none ever were: only dewd, its
// containerd, datafs with its mount and no file in it, the parent cgroup and
// the bridge stay.
func checkNothingLeft(t *testing.T, m *machine) {
	t.Helper()
	files := func(pattern ...string) func() []string {
		return func() []string {
			left, _ := filepath.Glob(filepath.Join(pattern...))
			return left
		}
	}
	for what, left := range map[string]func() []string{
		"mounts":             m.strangeMounts,
		"datafs's files":     m.served,
		"layers":             files(m.root, "layers", "*", "*"),
		"image records":      files(m.root, "images", "*"),
		"snapshots":          files(m.root, "snapshotter", "snapshots", "*"),
		"container files":    files(m.root, "engine", "containers", "*"),
		"network namespaces": files(m.state, "netns", "*"),
		"runc's state":       files(m.state, "runc", "*", "[^.]*"),
		"CRIU's files":       files(m.state, "restore", "*"),
		"marks of memory":    files(m.root, "checkpoints", "late", "*"),
		"unfinished dumps":   files(m.root, "checkpoints", "store", "scratch-*"),
		"unpacked memory":    files(m.root, "checkpoints", "store", "cache", "[0-9a-f][0-9a-f]*"),
		"processes":          m.strangers,
		"cgroups":            func() []string { return m.cgroups("/*") },
		"loop devices":       m.loops,
		"bridge devices":     m.connected,
		"bridge addresses":   m.addresses,
	} {
		if got := gone(left); len(got) > 0 {
			t.Errorf("%s left: %v", what, got)
		}
	}
}

// gone waits half a minute for nothing to be left, since the kernel, shims, probes and
// containerd clean up behind what they have answered, and returns what is.
func gone(left func() []string) []string {
	for range 600 {
		if len(left()) == 0 {
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	return left()
}

// strangeMounts are the node's mounts but for datafs's.
func (m *machine) strangeMounts() []string {
	return slices.DeleteFunc(m.mounts(), func(at string) bool { return at == filepath.Join(m.state, "datafs") })
}

// datafs is the pid of the node's datafs, or 0. While one takes another's place
// it is that of the newer one.
func (m *machine) datafs() int {
	newest := 0
	for _, pid := range m.processes() {
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if bytes.Contains(line, []byte("\x00datafs\x00")) {
			newest = max(newest, pid)
		}
	}
	return newest
}

// served are the files of layers that datafs has open.
func (m *machine) served() []string {
	var out []string
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", m.datafs()))
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && strings.HasPrefix(to, filepath.Join(m.root, "layers")+"/") {
			out = append(out, to)
		}
	}
	return out
}

// strangers are the node's processes but for dewd, its containerd and datafs.
func (m *machine) strangers() []string {
	var out []string
	spare := m.cmd == nil // a daemon has one shim wait for a container, not more
	for _, pid := range m.processes() {
		if !spare && m.isSpareShim(pid) {
			spare = true
			continue
		}
		if pid == m.privateContainerd() || pid == m.datafs() || m.cmd != nil && pid == m.cmd.Process.Pid {
			continue
		}
		line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil {
			out = append(out, fmt.Sprintf("%d %s", pid, strings.ReplaceAll(string(line), "\x00", " ")))
		}
	}
	return out
}

// isSpareShim says whether the process is a shim that has no container.
func (m *machine) isSpareShim(pid int) bool {
	dir, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
	if err != nil || filepath.Dir(dir) != filepath.Join(m.state, "shims") {
		return false
	}
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, t := range threads {
		if b, err := os.ReadFile(t); err != nil || len(b) > 0 {
			return false
		}
	}
	return len(threads) > 0
}

// suffix is that of everything that must differ between the nodes of a machine.
func (m *machine) suffix() string {
	h := sha256.Sum256([]byte(m.state))
	return hex.EncodeToString(h[:4])
}

// cgroups are the directories of the node's parent cgroup, or, with a pattern
// for what is below, of its containers, in every hierarchy.
func (m *machine) cgroups(below string) []string {
	var dirs []string
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		all, _ := filepath.Glob(root + "/dewpoint-" + m.suffix() + below)
		for _, d := range all {
			if st, err := os.Stat(d); err == nil && st.IsDir() {
				dirs = append(dirs, d)
			}
		}
	}
	return dirs
}

// loops are the loop devices over the node's files.
func (m *machine) loops() []string {
	var out []string
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), filepath.Dir(m.root)+"/") {
			out = append(out, strings.Split(f, "/")[3]+" "+strings.TrimSpace(string(b)))
		}
	}
	return out
}

func (m *machine) bridge() string { return "dew-" + m.suffix() }

// connected are the devices on the node's bridge.
func (m *machine) connected() []string {
	devices, _ := filepath.Glob("/sys/class/net/" + m.bridge() + "/brif/*")
	return devices
}

// addresses are the files in which CNI keeps who has which address.
func (m *machine) addresses() []string {
	files, _ := filepath.Glob(filepath.Join(m.state, "cni", "ipam", "*", "*.*.*.*"))
	return files
}

// rulesOf are the machine's iptables rules that name the container.
func rulesOf(t *testing.T, name string) []string {
	t.Helper()
	out, err := exec.Command("iptables-save").Output()
	if err != nil {
		t.Fatalf("iptables-save: %v", err)
	}
	var rules []string
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, name) {
			rules = append(rules, strings.TrimSpace(line))
		}
	}
	return rules
}

// clean takes away what a node leaves on the machine when it was killed: its
// bridge and its cgroups.
func (m *machine) clean() {
	m.removeBridge()
	for _, below := range []string{"/*/*", "/*", ""} {
		for _, d := range m.cgroups(below) {
			unix.Rmdir(d)
		}
	}
	if left := gone(func() []string { return m.cgroups("") }); len(left) > 0 {
		m.t.Errorf("cgroups left: %v", left)
	}
}

func (m *machine) removeBridge() {
	if _, err := os.Stat("/sys/class/net/" + m.bridge()); err != nil {
		return
	}
	if err := network.NewBridge(network.Config{Dir: filepath.Join(m.state, "cni"),
		Bridge: m.bridge()}).Destroy(); err != nil {
		m.t.Errorf("the bridge: %v", err)
	}
}

// A snapshot that containerd has forgotten, as one whose removal was under way when the
// node lost power, keeps no layer from being removed.
func TestForgottenSnapshot(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 1<<20), appOptions())
	m := newMachine(t, reg).start()
	m.must("pull", img.Ref)
	ctx := metadata.AppendToOutgoingContext(t.Context(), "containerd-namespace", "dewpoint")
	removed := &imagesapi.DeleteImageRequest{Name: img.Ref, Sync: true}
	if _, err := imagesapi.NewImagesClient(dial(t, m.state+"/containerd/containerd.sock")).Delete(ctx,
		removed); err != nil {
		t.Fatal(err)
	}
	chain := img.Layers[0].DiffID.String()
	_, err := snapshotsapi.NewSnapshotsClient(dial(t, m.state+"/snapshotter.sock")).Prepare(ctx,
		&snapshotsapi.PrepareSnapshotRequest{
			Key: "dewpoint/4711/forgotten", Labels: map[string]string{"containerd.io/snapshot.ref": chain}})
	if status.Code(err) != codes.AlreadyExists {
		t.Fatalf("the layer is no snapshot now: %v", err)
	}
	m.must("prune", "-a")
	if left, _ := filepath.Glob(filepath.Join(m.root, "layers", "*", "*")); len(left) > 0 {
		t.Errorf("layers left: %q", left)
	}
}

func dial(t testing.TB, socket string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}
