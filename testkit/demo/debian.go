package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/pkg/archive"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// app is an application installed from Debian packages over the base.
type app struct {
	packages []string
	before   string // shell, run in the tree before the packages are installed
	// files, unless nil, makes files in an empty directory, which are copied into the tree before the packages
	// are installed.
	files  func(ctx context.Context, dir string) error
	setup  string // shell, run in the tree after the packages are there
	config ocispec.ImageConfig
}

// The applications run as the official images of the same name do: in the
// foreground, logging to their standard output, on their well-known port.
var apps = map[string]app{
	"nginx": {
		packages: []string{"nginx-light"},
		setup: `ln -sf /dev/stdout /var/log/nginx/access.log
ln -sf /dev/stderr /var/log/nginx/error.log
rm -f /var/www/html/*
echo '<!doctype html><title>Dewpoint</title><h1>It serves.</h1>' > /var/www/html/index.html`,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv}, Cmd: []string{"nginx", "-g", "daemon off;"},
			ExposedPorts: ports("80/tcp"), StopSignal: "SIGQUIT",
		},
	},
	"redis": {
		packages: []string{"redis-server"},
		setup:    `mkdir -p /data && chown redis:redis /data`,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv}, Cmd: []string{"redis-server", "--bind", "0.0.0.0", "--protected-mode", "no"},
			ExposedPorts: ports("6379/tcp"), WorkingDir: "/data",
		},
	},
	"python": {
		packages: []string{"python3", "python3-flask", "python3-numpy"},
		setup: `mkdir -p /srv
cat > /srv/app.py <<'PY'
import flask
import numpy

app = flask.Flask(__name__)


@app.route("/")
def index():
    m = numpy.arange(16.0).reshape(4, 4) + numpy.eye(4)
    return {"determinant": float(numpy.linalg.det(m))}


app.run(host="0.0.0.0", port=8000)
PY`,
		config: ocispec.ImageConfig{
			Env: []string{pathEnv, "PYTHONUNBUFFERED=1"}, Cmd: []string{"python3", "/srv/app.py"},
			ExposedPorts: ports("8000/tcp"), WorkingDir: "/srv",
		},
	},
}

const pathEnv = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// sleeper only runs: what the papers wait for.
var sleeper = ocispec.ImageConfig{Env: []string{pathEnv}, Cmd: []string{"sleep", "infinity"}}

func ports(names ...string) map[string]struct{} {
	m := map[string]struct{}{}
	for _, n := range names {
		m[n] = struct{}{}
	}
	return m
}

// tree is a directory with the layer that was packed from it.
type tree struct {
	dir   string
	layer layer
}

func (a app) layers(ctx context.Context, b *builder) ([]layer, error) {
	base, err := b.baseTree(ctx)
	if err != nil {
		return nil, err
	}
	top, err := b.install(ctx, base, a)
	return []layer{base.layer, top}, err
}

// baseTree is the smallest Debian with apt, without documentation and
// translations. It stays beside the layout: images that are built later share it.
func (b *builder) baseTree(ctx context.Context) (*tree, error) {
	if b.base != nil {
		return b.base, nil
	}
	dir := filepath.Join(b.store.dir, "base")
	base := &tree{dir: filepath.Join(dir, "tree")}
	raw, err := os.ReadFile(filepath.Join(dir, "layer.json"))
	if err == nil {
		b.base = base
		return base, json.Unmarshal(raw, &base.layer)
	}
	if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o755)); err != nil {
		return nil, err
	}
	if err := bootstrap(ctx, base.dir); err != nil {
		return nil, err
	}
	base.layer, err = b.store.pack(ocispec.MediaTypeImageLayerGzip, gzip6, func(l *layerWriter) error {
		return archive.WriteDiff(ctx, l, "", base.dir)
	})
	if err != nil {
		return nil, err
	}
	b.base = base
	return base, b.store.writeJSON("base/layer.json", base.layer)
}

func bootstrap(ctx context.Context, dir string) error {
	sources, codename, err := aptSources(ctx)
	if err != nil {
		return err
	}
	args := []string{"--quiet", "--mode=root", "--variant=minbase", "--format=directory",
		// else usrmerge brings perl
		"--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr", "--include=usr-is-merged"}
	for _, path := range []string{"/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*",
		"/usr/share/info/*"} {
		args = append(args, "--dpkgopt=path-exclude="+path)
	}
	for _, option := range aptOptions(ctx) {
		args = append(args, "--aptopt="+option)
	}
	args = append(args,
		`--customize-hook=rm -f "$1"/etc/apt/apt.conf.d/99mmdebstrap && : > "$1/etc/resolv.conf" && : > "$1/etc/hostname"`,
		`--customize-hook=printf '#!/bin/sh\nexit 101\n' > "$1/usr/sbin/policy-rc.d" && chmod 755 "$1/usr/sbin/policy-rc.d"`,
		codename, dir)
	return run(exec.CommandContext(ctx, "mmdebstrap", append(args, sources...)...))
}

// installScript runs in a mount namespace of its own, so that its mounts end with it.
const installScript = `
mount -t overlay overlay -o "lowerdir=$base,upperdir=$top/upper,workdir=$top/work" "$top/tree"
mount --rbind /dev "$top/tree/dev"
mount -t proc proc "$top/tree/proc"
mount --bind /etc/resolv.conf "$top/tree/etc/resolv.conf"
mount -t tmpfs tmpfs "$top/tree/tmp"
mount -t tmpfs tmpfs "$top/tree/var/lib/apt/lists"
mount -t tmpfs tmpfs "$top/tree/var/cache/apt"
cp -a "$top/files/." "$top/tree/"
cat > "$top/tree/tmp/apt.conf"
chroot "$top/tree" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive \
	APT_CONFIG=/tmp/apt.conf sh -ec "$inside"
rm -rf "$top"/tree/var/log/apt "$top"/tree/var/log/*.log "$top"/tree/var/cache/debconf/*-old \
	"$top"/tree/var/lib/dpkg/*-old "$top"/tree/var/cache/ldconfig
`

// install makes the layer that installing the application over base changes.
func (b *builder) install(ctx context.Context, base *tree, a app) (layer, error) {
	top, err := os.MkdirTemp(b.work, "app")
	if err != nil {
		return layer{}, err
	}
	defer os.RemoveAll(top)
	for _, d := range []string{"upper", "work", "tree", "files"} {
		if err := os.Mkdir(filepath.Join(top, d), 0o755); err != nil {
			return layer{}, err
		}
	}
	if a.files != nil {
		if err := a.files(ctx, filepath.Join(top, "files")); err != nil {
			return layer{}, err
		}
	}
	cmd := exec.CommandContext(ctx, "unshare", "--mount", "--propagation", "private", "sh", "-ec", installScript)
	cmd.Env = append(os.Environ(), "base="+base.dir, "top="+top, "inside="+a.inside())
	cmd.Stdin = strings.NewReader(strings.Join(aptOptions(ctx), "\n"))
	if err := run(cmd); err != nil {
		return layer{}, err
	}
	merged := filepath.Join(top, "tree")
	options := "lowerdir=" + filepath.Join(top, "upper") + ":" + base.dir
	if err := unix.Mount("overlay", merged, "overlay", unix.MS_RDONLY, options); err != nil {
		return layer{}, fmt.Errorf("mount overlay %s: %w", options, err)
	}
	defer unix.Unmount(merged, unix.MNT_DETACH)
	return b.store.pack(ocispec.MediaTypeImageLayerGzip, gzip6, func(l *layerWriter) error {
		return archive.WriteDiff(ctx, l, base.dir, merged)
	})
}

// inside is the shell script that installs the application.
func (a app) inside() string {
	install := ""
	if len(a.packages) > 0 {
		install = "apt-get -qq update\napt-get -qq install -y --no-install-recommends " +
			strings.Join(a.packages, " ")
	}
	return strings.Join([]string{a.before, install, a.setup}, "\n")
}

// aptSources gives the sources.list lines of the machine's own Debian suites.
func aptSources(ctx context.Context) (lines []string, codename string, err error) {
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return nil, "", err
	}
	for line := range strings.Lines(string(release)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "VERSION_CODENAME="); ok {
			codename = name
		}
	}
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format",
		"$(REPO_URI) $(RELEASE) $(COMPONENT)", "Created-By: Packages").Output()
	if err != nil {
		return nil, "", fmt.Errorf("apt-get indextargets: %w", err)
	}
	seen := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) != 3 || f[2] != "main" || !strings.HasPrefix(f[1], codename) || seen[line] {
			continue
		}
		seen[line] = true
		lines = append(lines, "deb "+strings.Join(f, " "))
	}
	if len(lines) == 0 {
		return nil, "", fmt.Errorf("apt is not set up for Debian's suite %q", codename)
	}
	return lines, codename, nil
}

// aptOptions are the machine's own settings for reaching its mirror.
func aptOptions(ctx context.Context) []string {
	out, _ := exec.CommandContext(ctx, "apt-config", "dump", "Acquire").Output()
	var options []string
	for line := range strings.Lines(string(out)) {
		for _, prefix := range []string{"Acquire::http", "Acquire::Check-", "Acquire::Retries"} {
			if strings.HasPrefix(line, prefix) {
				options = append(options, strings.TrimSpace(line))
			}
		}
	}
	return options
}

// run gives the last lines of a failed command's output with its error.
func run(cmd *exec.Cmd) error {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		return fmt.Errorf("%s: %w: %s", cmd.Args[0], err, strings.Join(lines[max(0, len(lines)-8):], "\n"))
	}
	return nil
}
