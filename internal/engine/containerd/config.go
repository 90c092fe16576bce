package containerd

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/plugins/snapshots/overlay/overlayutils"

	"dewpoint/internal/durable"
)

// disabled1 and disabled2 are the plugins that a private containerd 1.x and
// 2.x do without: Kubernetes, other snapshotters, metrics of its own.
var (
	disabled1 = []string{
		"io.containerd.grpc.v1.cri", "io.containerd.nri.v1.nri",
		"io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
		"io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
		"io.containerd.internal.v1.restart", "io.containerd.internal.v1.opt",
		"io.containerd.monitor.v1.cgroups",
	}
	disabled2 = []string{
		"io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime",
		"io.containerd.nri.v1.nri", "io.containerd.podsandbox.controller.v1.podsandbox",
		"io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs",
		"io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.erofs",
		"io.containerd.snapshotter.v1.zfs", "io.containerd.differ.v1.erofs", "io.containerd.mount-handler.v1.erofs",
		"io.containerd.monitor.container.v1.restart", "io.containerd.internal.v1.opt",
		"io.containerd.image-verifier.v1.bindir", "io.containerd.monitor.task.v1.cgroups",
		"io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
		"io.containerd.metrics.v1.grpc-prometheus", "io.containerd.metrics.v1.grpc-otel",
		"io.containerd.http.v1.pprof",
	}
)

// containerdVersion is what `containerd --version` says.
type containerdVersion struct{ major, minor, patch int }

func (v containerdVersion) atLeast(major, minor, patch int) bool {
	if v.major != major {
		return v.major > major
	}
	if v.minor != minor {
		return v.minor > minor
	}
	return v.patch >= patch
}

// diffs says whether proxy plugins may be diff plugins; older ones do not
// start with one in their configuration.
func (v containerdVersion) diffs() bool { return v.atLeast(1, 7, 4) }

// remaps says whether containerd can mount what a snapshotter that remaps ids
// returns. 1.7.23 and newer ask for the capability, but their mounts know no
// uidmap; older ones overlook the key.
func (v containerdVersion) remaps() bool { return v.atLeast(2, 0, 0) }

// unsynced says whether containerd can be told not to flush its database.
func (v containerdVersion) unsynced() bool { return v.atLeast(2, 1, 0) }

// parseVersion reads lines such as
//
//	containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3
//	containerd github.com/containerd/containerd/v2 v2.4.2 8a1e…
func parseVersion(line string) (containerdVersion, error) {
	f := strings.Fields(line)
	if len(f) < 3 {
		return containerdVersion{}, fmt.Errorf("containerd's version %q is not understood", strings.TrimSpace(line))
	}
	major, rest, _ := strings.Cut(strings.TrimPrefix(f[2], "v"), ".")
	minor, rest, _ := strings.Cut(rest, ".")
	v := containerdVersion{patch: leadingNumber(rest)}
	var err error
	if v.major, err = strconv.Atoi(major); err != nil {
		return v, fmt.Errorf("containerd's version %q: %w", f[2], err)
	}
	v.minor, _ = strconv.Atoi(minor)
	if !v.atLeast(1, 6, 0) {
		return v, fmt.Errorf("containerd %s is too old: 1.6 or newer is needed", f[2])
	}
	return v, nil
}

// leadingNumber reads 20 of "20~ds1"; without one it is 0.
func leadingNumber(s string) int {
	end := strings.IndexFunc(s, func(r rune) bool { return r < '0' || r > '9' })
	if end >= 0 {
		s = s[:end]
	}
	n, _ := strconv.Atoi(s)
	return n
}

// privateConfig is the configuration of a private containerd. Version 3 is
// what 2.x introduced; newer ones still read it.
func privateConfig(cfg Config, v containerdVersion, root, state, socket string) string {
	var b strings.Builder
	format, off := 2, disabled1
	if v.major >= 2 {
		format, off = 3, disabled2
	}
	fmt.Fprintf(&b, "version = %d\nroot = %q\nstate = %q\n", format, root, state)
	fmt.Fprintf(&b, "disabled_plugins = [%s]\nimports = []\n\n[grpc]\n  address = %q\n\n", quoted(off), socket)
	if !builtin[cfg.Snapshotter] {
		b.WriteString(proxySnippet(cfg.Snapshotter, cfg.SnapshotterSocket))
		if v.remaps() && kernelRemaps() {
			b.WriteString("  capabilities = [\"remap-ids\"]\n")
		}
		if v.major >= 2 {
			fmt.Fprintf(&b, "  [proxy_plugins.%s.exports]\n    enable_remote_snapshot_annotations = \"true\"\n",
				cfg.Snapshotter)
			writeTransfer(&b, cfg)
		}
		b.WriteByte('\n')
	}
	if !synced(v) {
		b.WriteString("[plugins.\"io.containerd.metadata.v1.bolt\"]\n  no_sync = true\n\n")
	}
	if cfg.DiffSocket != "" && v.diffs() {
		name := diffName(cfg)
		fmt.Fprintf(&b, "[proxy_plugins.%s]\n  type = \"diff\"\n  address = %q\n\n", name, cfg.DiffSocket)
		fmt.Fprintf(&b, "[plugins.\"io.containerd.service.v1.diff-service\"]\n  default = [%q, \"walking\"]\n",
			name)
	}
	return b.String()
}

// synced says whether a private containerd of the version flushes its database.
func synced(v containerdVersion) bool {
	return !v.unsynced() || durable.BootID() == ""
}

// kernelRemaps says whether overlayfs takes id-mapped mounts, without which the
// snapshotter does not map ids and containerd has to change owners.
func kernelRemaps() bool {
	ok, err := overlayutils.SupportsIDMappedMounts()
	return err == nil && ok
}

// writeTransfer lets the transfer service (ctr and nerdctl of 2.x) unpack into
// the snapshotter and, since the list replaces containerd's own, into overlayfs
// as ever.
func writeTransfer(b *strings.Builder, cfg Config) {
	differ := "walking"
	if cfg.DiffSocket != "" {
		differ = diffName(cfg)
	}
	for _, u := range [][2]string{{cfg.Snapshotter, differ}, {"overlayfs", "walking"}} {
		fmt.Fprintf(b, "\n[[plugins.\"io.containerd.transfer.v1.local\".unpack_config]]\n  platform = \"linux\"\n  snapshotter = %q\n  differ = %q\n",
			u[0], u[1])
	}
}

func diffName(cfg Config) string { return cfg.Snapshotter + "-diff" }

// builtin are containerd's own snapshotters, which need no proxy plugin.
var builtin = map[string]bool{"overlayfs": true, "native": true}

func quoted(s []string) string {
	q := make([]string, len(s))
	for i, v := range s {
		q[i] = strconv.Quote(v)
	}
	return strings.Join(q, ", ")
}
