package engine

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"dewpoint/internal/spec"
)

// A container is the same whichever runtime has made it: what the kernel says of
// its process, of one that was executed in it, of its mounts, devices and limits.
func TestRuntimesAgree(t *testing.T) {
	two := containerds(t)["2.x"]
	views := make(map[string]string)
	for _, runtime := range []string{RuntimeRunc, RuntimeCrun} {
		b := newBedOf(t, two, runtime)
		dir := t.TempDir()
		i := b.run(Spec{Name: "one", Net: NetNone, Cmd: []string{"stubborn"}, Memory: 64 << 20, CPUs: 0.5,
			Options: spec.Options{User: "1234:5678"},
			Volumes: []Volume{{Source: dir, Target: "/in", ReadOnly: true}, {Source: dir, Target: "/out"}}})
		b.awaitLog("one", "ignoring")
		var out strings.Builder
		args := []string{"/probe", "cat", "/proc/self/status", "/proc/self/limits", "/proc/self/oom_score_adj",
			"/proc/self/environ"}
		if st, err := b.Exec(t.Context(), "one", ExecSpec{Args: args, Stdout: &out}); err != nil || st != 0 {
			t.Fatalf("exec: %d, %v", st, err)
		}
		views[runtime] = b.seen(i, dir) + "executed:\n" + ofProcess(out.String())
	}
	for of, to := range crunsOwn {
		views[RuntimeCrun] = strings.ReplaceAll(views[RuntimeCrun], of, to)
	}
	runc, crun := strings.Split(views[RuntimeRunc], "\n"), strings.Split(views[RuntimeCrun], "\n")
	for _, l := range runc {
		if !slices.Contains(crun, l) {
			t.Errorf("by runc alone: %s", l)
		}
	}
	for _, l := range crun {
		if !slices.Contains(runc, l) {
			t.Errorf("by crun alone: %s", l)
		}
	}
	if t.Failed() {
		t.Logf("by runc:\n%s", views[RuntimeRunc])
	}
}

// crunsOwn is where crun differs, and what runc has there: its mounts of cgroups
// do not follow symbolic links, /dev/core is a link to what is masked, and the
// console's device can be opened, as in Docker's containers.
var crunsOwn = map[string]string{
	",nosymfollow": "", "file dev/core Lrwxrwxrwx /proc/kcore\n": "", "c 5:1 rwm, ": "",
}

// ofProcess keeps of /proc files what a runtime decides.
func ofProcess(text string) string {
	var out []string
	keep := regexp.MustCompile(`^(Uid|Gid|Groups|Umask|Cap[A-Z][a-z]+|NoNewPrivs|Seccomp|Seccomp_filters|Sig(Blk|Ign)|Cpus_allowed|Max .*):?\s|^-?\d+$|\x00`)
	for l := range strings.Lines(text) {
		if l = strings.TrimSpace(l); keep.MatchString(l) {
			out = append(out, l)
		}
	}
	return strings.Join(out, "\n") + "\n"
}

// seen tells what the kernel says of a container, without what differs from one
// to the next.
func (b *bed) seen(i *Info, volume string) string {
	b.t.Helper()
	proc := fmt.Sprintf("/proc/%d/", i.Pid)
	read := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			b.t.Error(err)
		}
		return string(text)
	}
	var out strings.Builder
	out.WriteString(ofProcess(read(proc+"status") + read(proc+"limits") + read(proc+"oom_score_adj") +
		read(proc+"environ")))
	for l := range strings.Lines(read(proc + "cgroup")) {
		_, path, _ := strings.Cut(l, ":")
		out.WriteString("cgroup " + strings.ReplaceAll(path, b.cfg.CgroupParent, "PARENT"))
	}
	for _, ns := range []string{"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"} {
		ours, _ := os.Readlink("/proc/self/ns/" + ns)
		its, _ := os.Readlink(proc + "ns/" + ns)
		fmt.Fprintf(&out, "namespace %s is its own: %t\n", ns, ours != its)
	}
	var mounts []string
	for l := range strings.Lines(read(proc + "mountinfo")) {
		f := strings.Fields(l)
		dash := slices.Index(f, "-")
		m := fmt.Sprintf("mount %s %s %s %s", f[4], f[5], strings.Join(f[6:dash], " "), f[dash+1])
		if f[3] == "/null" { // of the container's /dev, or of the machine's
			m = "mount " + f[4] + " of null"
		}
		mounts = append(mounts, m+"\n")
	}
	slices.Sort(mounts)
	out.WriteString(strings.Join(mounts, ""))
	for _, d := range []string{"dev", "dev/shm", "dev/pts"} {
		files, err := os.ReadDir(proc + "root/" + d)
		if err != nil {
			b.t.Error(err)
		}
		for _, f := range files {
			st, err := os.Lstat(proc + "root/" + d + "/" + f.Name())
			if err == nil {
				to, _ := os.Readlink(proc + "root/" + d + "/" + f.Name())
				fmt.Fprintf(&out, "file %s/%s %v %s\n", d, f.Name(), st.Mode(), to)
			}
		}
	}
	for _, f := range []string{"memory/memory.limit_in_bytes", "memory/memory.swappiness",
		"cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us", "cpu/cpu.shares", "devices/devices.list",
		"pids/pids.max"} {
		dir, file := filepath.Split(f)
		if text, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", dir, b.cfg.places().Cgroup(i.Name), file)); err == nil {
			lines := strings.Split(strings.TrimSpace(string(text)), "\n")
			slices.Sort(lines)
			fmt.Fprintf(&out, "%s: %s\n", f, strings.Join(lines, ", "))
		}
	}
	return strings.ReplaceAll(out.String(), volume, "VOLUME")
}
