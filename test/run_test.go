package test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/image"
	"dewpoint/internal/spec"
	"dewpoint/testkit/registrytest"

	"golang.org/x/sys/unix"
)

// A deployment from instruction to answer, by each mount backend, and its end.
func TestRun(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("team/app:1", appLayers(t, 4<<20), appOptions("serve", "80"))
	for _, backend := range []string{"erofs", "loop", "tree"} {
		t.Run(backend, func(t *testing.T) {
			m := newMachine(t, reg)
			m.config = strings.Replace(m.config, "[node]\n", fmt.Sprintf("[node]\nmount = %q\n", backend), 1)
			m.start()
			port := freePort(t)
			rec := m.record("run", "-d", "--name", "web", "--ready", "http:"+port+"/", img.Ref, "serve", port)
			if rec.Name != "web" || rec.Node != "n1" || rec.Way.Pull != "whole" || rec.Way.Start != "boot" ||
				rec.Digest != img.Digest.String() {
				t.Errorf("record %+v", rec)
			}
			last := 0.0
			for _, s := range []string{spec.Resolved, spec.Mounted, spec.Created, spec.Started, spec.Ready} {
				if rec.Stages[s] <= last {
					t.Errorf("stage %s at %v, the one before at %v", s, rec.Stages[s], last)
				}
				last = rec.Stages[s]
			}
			if got := get(t, "http://127.0.0.1:"+port+"/cat?/etc/motd"); got != "above\n" {
				t.Errorf("the upper layer's file reads %q", got)
			}
			if got := get(t, "http://127.0.0.1:"+port+"/cat?/etc/gone"); !strings.Contains(got, "no such file") {
				t.Errorf("the file that a layer removed reads %q", got)
			}
			var ps []spec.Container
			if err := json.Unmarshal([]byte(m.must("--json", "ps")), &ps); err != nil || len(ps) != 1 ||
				ps[0].Name != "web" || ps[0].Status != spec.StatusRunning {
				t.Errorf("ps: %+v, %v", ps, err)
			}
			if out := m.must("exec", "web", "/app", "cat", "/etc/motd"); out != "above\n" {
				t.Errorf("exec gave %q", out)
			}
			if out := m.must("logs", "web"); !strings.Contains(out, "serving on "+port) {
				t.Errorf("logs gave %q", out)
			}
			if len(m.cgroups("/web")) == 0 || len(m.strangers()) == 0 || (len(m.loops()) > 0) != (backend == "loop") {
				t.Errorf("a container has cgroups %v, processes %v, loop devices %v", m.cgroups("/web"), m.strangers(),
					m.loops())
			}
			m.must("stop", "web")
			m.must("rm", "web")
			m.must("rmi", img.Ref)
			m.must("prune")
			checkNothingLeft(t, m)
		})
	}
}

// In the foreground dew shows what the container writes and ends as it does.
func TestForeground(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).start()
	if r := m.dew("run", "--rm", img.Ref, "cat", "/etc/motd"); r.out != "above\n" || r.code != 0 {
		t.Errorf("%+v", r)
	}
	if r := m.dew("run", "--rm", img.Ref, "exit", "7"); r.code != 7 {
		t.Errorf("%+v", r)
	}
	if out := m.must("ps", "-a"); strings.Contains(out, "app-") {
		t.Errorf("--rm left a container:\n%s", out)
	}
}

func TestNetworksAndLimits(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions("serve", "80"))
	m := newMachine(t, reg).start()
	host := t.TempDir()
	if err := os.WriteFile(filepath.Join(host, "f"), []byte("from the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	port := freePort(t)
	bridged := fmt.Sprintf("b%d", os.Getpid())
	m.must("run", "-d", "--name", bridged, "-p", port+":80", "-v", host+":/data", "--memory", "64m", "--cpus",
		"0.5", "--ready", "http:80/", img.Ref)
	if got := get(t, "http://127.0.0.1:"+port+"/cat?/data/f"); got != "from the host" {
		t.Errorf("the volume's file reads %q", got)
	}
	m.must("run", "-d", "--name", "n", "--net", "none", "--ready", "tcp:80", img.Ref)
	if len(rulesOf(t, bridged)) == 0 || len(m.connected()) != 1 || len(m.addresses()) != 1 {
		t.Errorf("a container on the bridge has rules %v, devices %v, addresses %v", rulesOf(t, bridged),
			m.connected(), m.addresses())
	}
	m.must("rm", "-f", bridged, "n")
	if left := rulesOf(t, bridged); len(left) > 0 {
		t.Errorf("rules left: %v", left)
	}
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
}

// All layer forms that registries serve come out the same.
func TestForms(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	m := newMachine(t, reg).start()
	for i, c := range []registrytest.Layer{
		{Compression: image.Gzip}, {Compression: image.Gzip, MemberSize: 100_000}, {Compression: image.Zstd},
		{Compression: image.Zstd, MemberSize: 100_000}, {Compression: image.Plain},
	} {
		for _, docker := range []bool{false, true} {
			if docker && c.Compression == image.Zstd {
				continue // Docker's media types know no zstd
			}
			layers := appLayers(t, 1<<20)
			for j := range layers {
				layers[j].Compression, layers[j].MemberSize = c.Compression, c.MemberSize
			}
			o := appOptions()
			o.Docker = docker
			img := reg.PushImage(fmt.Sprintf("form:%d-%v", i, docker), layers, o)
			if r := m.dew("run", "--rm", img.Ref, "cat", "/etc/motd"); r.out != "above\n" {
				t.Errorf("%s, members of %d, docker %v: %+v", c.Compression, c.MemberSize, docker, r)
			}
			m.must("rmi", img.Ref)
			m.must("prune")
		}
	}
}

func Test127Layers(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	layers := appLayers(t, 0)
	for i := len(layers); i < 127; i++ {
		layers = append(layers,
			registrytest.Layer{Tar: registrytest.Tar(registrytest.File{Name: fmt.Sprintf("f%d", i),
				Body: fmt.Sprint(i)})})
	}
	img := reg.PushImage("many:1", layers, appOptions())
	m := newMachine(t, reg).start()
	if r := m.dew("run", "--rm", img.Ref, "cat", "/f126"); r.out != "126" {
		t.Errorf("%+v", r)
	}
	if r := m.dew("run", "--rm", img.Ref, "cat", "/etc/motd"); r.out != "above\n" {
		t.Errorf("%+v", r)
	}
}

// Deployments at once share the fetch of each layer.
func TestDeploymentsShareFetches(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 8<<20), appOptions())
	m := newMachine(t, reg).start()
	reg.Forget()
	var cmds []*exec.Cmd
	for range 4 {
		c := exec.Command(filepath.Join(programs, "dew"), "-H", "unix://"+m.state+"/dewd.sock", "run", "--rm",
			img.Ref, "cat", "/etc/motd")
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		cmds = append(cmds, c)
	}
	for _, c := range cmds {
		if err := c.Wait(); err != nil {
			t.Error(err)
		}
	}
	for _, l := range img.Layers {
		if n := reg.Served(l.Digest); n != l.Size {
			t.Errorf("layer of %d bytes: %d were fetched", l.Size, n)
		}
	}
}

// A restart of dewd does not disturb containers, and a reboot needs no registry.
func TestContainersOutliveDewd(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 1<<20), appOptions())
	m := newMachine(t, reg).start()
	port := freePort(t)
	m.must("run", "-d", "--name", "web", "--ready", "http:"+port+"/", img.Ref, "serve", port)
	m.kill()
	get(t, "http://127.0.0.1:"+port+"/")
	m.start()
	if out := m.must("ps"); !strings.Contains(out, "web") {
		t.Errorf("ps after a restart:\n%s", out)
	}
	if out := m.must("exec", "web", "/app", "cat", "/etc/motd"); out != "above\n" {
		t.Errorf("exec after a restart gave %q", out)
	}
	m.reboot()
	reg.Close()
	m.start()
	m.must("rm", "-f", "web")
	if r := m.dew("run", "--rm", img.Ref, "cat", "/etc/motd"); r.out != "above\n" {
		t.Errorf("after a reboot without a registry: %+v", r)
	}
}

// dewd that is told to end does so at once and in order: containers and
// containerd go on, and the next dewd takes them over.
func TestDaemonEndsInOrder(t *testing.T) {
	t.Parallel()
	reg := registrytest.New(t)
	img := reg.PushImage("app:1", appLayers(t, 0), appOptions())
	m := newMachine(t, reg).start()
	port := freePort(t)
	m.must("run", "-d", "--name", "web", "--ready", "http:"+port+"/", img.Ref, "serve", port)
	containerd := m.privateContainerd()
	begin := time.Now()
	m.stop() // wants status 0
	if d := time.Since(begin); d > 10*time.Second {
		t.Errorf("dewd took %s to end", d)
	}
	if left, _ := filepath.Glob(filepath.Join(m.state, "*.sock")); len(left) > 0 {
		t.Errorf("sockets left: %v", left)
	}
	if containerd == 0 || unix.Kill(containerd, 0) != nil {
		t.Errorf("containerd, process %d, has ended with dewd", containerd)
	}
	get(t, "http://127.0.0.1:"+port+"/")

	m.start()
	if now := m.privateContainerd(); now != containerd {
		t.Errorf("containerd is process %d, was %d", now, containerd)
	}
	m.must("exec", "web", "/app", "cat", "/etc/motd")
	m.must("rm", "-f", "web")
	m.must("rmi", img.Ref)
	m.must("prune")
	checkNothingLeft(t, m)
	m.stop()
	if left := m.cgroups(""); len(left) > 0 {
		t.Errorf("cgroups left: %v", left)
	}
	log, err := os.ReadFile(m.log)
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"panic:", "fatal error:", "DATA RACE", "level=ERROR"} {
		if strings.Contains(string(log), bad) {
			t.Errorf("dewd's log has %q", bad)
		}
	}
}
