package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/containerd/containerd/api/types/runc/options"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/internal/engine/cgroup"
	"dewpoint/internal/engine/confine"
	"dewpoint/internal/engine/launch"
	"dewpoint/internal/engine/limits"
	"dewpoint/internal/engine/mounts"
	"dewpoint/internal/engine/shimgroup"
	"dewpoint/internal/engine/tool"
)

// What makes containers, as Config.Runtime names it.
const (
	RuntimeAuto = "auto" // crun where it was seen to work, else runc
	RuntimeCrun = "crun"
	RuntimeRunc = "runc"
)

// defaultRuntime is that of a Config that names none.
const defaultRuntime = RuntimeAuto

// maker is the runtime that makes containers. What runc once made, and what is
// restored, stays runc's: the shim remembers it for each task.
type maker struct {
	program string // what shims execute; "" is "runc" in their PATH
	detail  string // for a person: which, and why not the other
	lacking bool   // of auto: crun is not what it is for want of something
}

// Runtime says what makes containers, and whether that is runc though crun was
// to be taken where it works.
func (e *runtimes) Runtime() (detail string, lacking bool) { return e.maker.detail, e.maker.lacking }

// runtimeOptions are those of a task that is booted.
func (e *runtimes) runtimeOptions() *options.Options {
	return &options.Options{BinaryName: e.maker.program, Root: e.cfg.runcRoot()}
}

// chooseRuntime finds out what is to make containers.
func (e *runtimes) chooseRuntime(ctx context.Context) error {
	want := cmp.Or(e.cfg.Runtime, defaultRuntime)
	e.maker = maker{program: e.runc, detail: "runc: engine.runtime says so"}
	switch want {
	case RuntimeRunc:
		return nil
	case RuntimeAuto, RuntimeCrun:
	default:
		return fmt.Errorf("engine.runtime = %q: want auto, crun or runc", want)
	}
	m, err := e.crunMaker(ctx)
	if err == nil {
		e.maker = m
		return nil
	}
	if want == RuntimeCrun {
		return fmt.Errorf("engine.runtime = %q: %w", want, err)
	}
	e.log.Info("runc makes containers", "because", err)
	e.maker.detail, e.maker.lacking = "runc, since crun does not work here: "+err.Error(), true
	return nil
}

// crunMaker finds crun and has it make a container.
func (e *runtimes) crunMaker(ctx context.Context) (maker, error) {
	argv, version, err := findCrun(ctx, e.cfg.Crun)
	if err != nil {
		return maker{}, err
	}
	program := tool.Find(e.cfg.ShimProgram, shimgroup.Program)
	if program == "" {
		return maker{}, fmt.Errorf("%w: %s is neither beside this program nor in PATH", tool.ErrMissing,
			shimgroup.Program)
	}
	runc, err := exec.LookPath(cmp.Or(e.runc, "runc"))
	if err != nil {
		runc = "/usr/sbin/runc" // should it come; only checkpoints need it
	}
	dir, hide := filepath.Join(e.cfg.Root, "bin", "crun.d"), launch.Crowded()
	if err := launch.Make(dir, program, argv, runc, hide); err != nil {
		return maker{}, err
	}
	if err := e.plainMasks(); err != nil {
		return maker{}, err
	}
	m := maker{program: launch.Path(dir), detail: "crun " + version + " at " + argv[len(argv)-1]}
	return m, e.provenCrun(ctx, m.program, append(argv, program), hide)
}

// plainMasks has crun hide directories of /proc and /sys beneath an empty tmpfs
// each, as runc does, and as CRIU can dump. Newer ones show a directory of the
// machine there, which cannot be made where there is a file.
func (e *runtimes) plainMasks() error {
	dir := filepath.Join(e.cfg.runcRoot(), e.cfg.Namespace)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	empty := filepath.Join(dir, ".empty-directory")
	if st, err := os.Lstat(empty); err == nil && st.Mode().IsRegular() {
		return nil
	}
	_ = os.RemoveAll(empty) // a crun that we did not start
	return os.WriteFile(empty, nil, 0o400)
}

// The oldest crun that is taken.
const oldestCrunMajor, oldestCrunMinor = 1, 20

var crunLine = regexp.MustCompile(`(?m)^crun version (\d+)\.(\d+)\S*`)

// findCrun returns how crun is executed, and its version: the configured one,
// else the first that is new enough beside this program, in the directory of
// scripts/install, and in PATH.
func findCrun(ctx context.Context, configured string) (argv []string, version string, err error) {
	err = fmt.Errorf("%w: crun is not installed: scripts/install demo brings one, or name one of %d.%d or newer in the configuration",
		tool.ErrMissing, oldestCrunMajor, oldestCrunMinor)
	for _, p := range crunCandidates(configured) {
		out, xerr := exec.CommandContext(ctx, p, "--version").Output()
		m := crunLine.FindStringSubmatch(string(out))
		var major, minor int
		if m != nil {
			_, _ = fmt.Sscan(m[1]+" "+m[2], &major, &minor)
		}
		switch {
		case xerr != nil:
			err = fmt.Errorf("%s --version: %w", p, xerr)
		case m == nil:
			err = fmt.Errorf("%s --version is not crun's: %q", p, strings.TrimSpace(string(out)))
		case major < oldestCrunMajor || major == oldestCrunMajor && minor < oldestCrunMinor:
			err = fmt.Errorf("crun at %s is %d.%d: %d.%d or newer is needed", p, major, minor, oldestCrunMajor,
				oldestCrunMinor)
		default:
			return crunArgv(p), m[1] + "." + m[2], nil
		}
	}
	return nil, "", err
}

// installedTools is where scripts/install puts programs.
const installedTools = "/var/cache/dewpoint/tools"

func crunCandidates(configured string) []string {
	if configured != "" {
		return []string{configured}
	}
	var paths []string
	if self, err := os.Executable(); err == nil {
		paths = append(paths, filepath.Join(filepath.Dir(self), "crun"))
	}
	paths = append(paths, filepath.Join(cmp.Or(os.Getenv("DEWPOINT_TOOLS"), installedTools), "crun/bin/crun"))
	if p, err := exec.LookPath("crun"); err == nil {
		paths = append(paths, p)
	}
	var there []string
	for _, p := range paths {
		if tool.Executable(p) {
			there = append(there, p)
		}
	}
	return there
}

// crunArgv is how a program is executed without the shell's help, where
// scripts/install has left word of that beside it.
func crunArgv(program string) []string {
	b, err := os.ReadFile(program + ".argv")
	argv := strings.Split(strings.TrimSpace(string(b)), "\n")
	if err != nil || !tool.Executable(argv[0]) || !tool.Executable(argv[len(argv)-1]) {
		if abs, err := filepath.Abs(program); err == nil {
			program = abs
		}
		return []string{program}
	}
	return argv
}

// provenCrun tries crun, unless that was done since the machine has started,
// with the same files.
func (e *runtimes) provenCrun(ctx context.Context, program string, files []string, hide bool) error {
	var of strings.Builder
	fmt.Fprintln(&of, hide)
	for _, p := range files {
		if st, err := os.Stat(p); err == nil {
			fmt.Fprintln(&of, p, st.Size(), st.ModTime().UnixNano())
		}
	}
	proof := filepath.Join(e.cfg.State, "crun-works")
	if b, err := os.ReadFile(proof); err == nil && string(b) == of.String() {
		return nil
	}
	if err := e.tryCrun(ctx, program, files[len(files)-1]); err != nil {
		return fmt.Errorf("a container to try it: %w", err)
	}
	return os.WriteFile(proof, []byte(of.String()), 0o600)
}

// trialCgroup is that of the container that crun is tried with. No other one can be called so.
const trialCgroup = ".trial"

const trialTimeout = time.Minute

// tryCrun makes, starts and deletes a container with namespaces, a cgroup, a
// limit and the filter of system calls, whose process tells how it finds itself.
func (e *runtimes) tryCrun(ctx context.Context, program, report string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, trialTimeout)
	defer cancel()
	dir := filepath.Join(e.cfg.State, "crun-trial")
	crun := func(ctx context.Context, stdout *os.File, args ...string) error {
		cmd := exec.CommandContext(ctx, program,
			append([]string{"--root", filepath.Join(dir, "state")}, args...)...)
		var said strings.Builder
		cmd.Stderr = &said
		if stdout != nil { // the container's too
			cmd.Stdout, cmd.Stderr = stdout, stdout
		}
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s: %w %s", args[0], err, strings.TrimSpace(said.String()))
		}
		return nil
	}
	end := func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), trialTimeout)
		defer cancel()
		err := crun(ctx, nil, "delete", "--force", launch.Trial)
		cgroup.Remove(e.cfg.places().Cgroup(trialCgroup))
		return errors.Join(err, os.RemoveAll(dir))
	}
	if _, err := os.Lstat(dir); err == nil { // of a trial that was killed
		_ = end()
	}
	if err := e.writeTrial(dir, report); err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	defer func() { err = errors.Join(err, end()) }()
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	err = crun(ctx, w, "create", "--bundle", dir, launch.Trial)
	w.Close()
	if err != nil {
		said, _ := io.ReadAll(io.LimitReader(r, 1<<10))
		return fmt.Errorf("%w%s", err, strings.TrimSpace(string(said)))
	}
	if err := crun(ctx, nil, "start", launch.Trial); err != nil {
		return err
	}
	deadline, _ := ctx.Deadline()
	_ = r.SetReadDeadline(deadline)
	said, err := io.ReadAll(io.LimitReader(r, 1<<10)) // until its process ends
	if err == nil && string(said) != launch.Wanted {
		err = fmt.Errorf("its process says %q where %q is right", said, launch.Wanted)
	}
	return err
}

// writeTrial makes the bundle of the container that crun is tried with.
func (e *runtimes) writeTrial(dir, report string) error {
	for _, d := range []string{"rootfs", "state"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			return err
		}
	}
	s := Spec{Name: launch.Trial, Net: NetHost, Memory: 64 << 20}
	ns := append(e.cfg.namespaces(&s), specs.LinuxNamespace{Type: specs.NetworkNamespace})
	b, err := json.Marshal(&specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{Args: []string{"/" + launch.Trial}, Cwd: "/", Env: []string{defaultPath},
			Capabilities: &specs.LinuxCapabilities{Bounding: confine.Capabilities, Permitted: confine.Capabilities,
				Effective: confine.Capabilities}},
		Root:     &specs.Root{Path: filepath.Join(dir, "rootfs")},
		Hostname: launch.Trial,
		Mounts: append(mounts.System(),
			specs.Mount{Destination: "/" + launch.Trial, Type: "bind", Source: report,
				Options: []string{"bind", "ro"}}),
		Linux: &specs.Linux{CgroupsPath: e.cfg.places().Cgroup(trialCgroup), Namespaces: ns,
			Resources:     limits.Limits{Memory: s.Memory}.Resources(),
			MaskedPaths:   confine.MaskedPaths,
			ReadonlyPaths: confine.ReadonlyPaths, Seccomp: confine.Filter(false, false, confine.Capabilities)},
	})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), b, fs.FileMode(0o600))
}
