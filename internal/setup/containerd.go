package setup

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/pelletier/go-toml/v2"
	"golang.org/x/sys/unix"
)

// version is a containerd's.
type version struct{ major, minor, patch int }

func (v version) atLeast(major, minor, patch int) bool {
	return slices.Compare([]int{v.major, v.minor, v.patch}, []int{major, minor, patch}) >= 0
}

var versionNumber = regexp.MustCompile(`v?(\d+)\.(\d+)\.(\d+)`)

// versionOf asks a containerd's program.
func versionOf(ctx context.Context, program string) (version, error) {
	out, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return version{}, fmt.Errorf("%s --version: %w", program, err)
	}
	return parseVersion(string(out))
}

func parseVersion(s string) (version, error) {
	m := versionNumber.FindStringSubmatch(s)
	if m == nil {
		return version{}, fmt.Errorf("%q names no version of containerd", s)
	}
	var n [3]int
	for i := range n {
		n[i], _ = strconv.Atoi(m[i+1])
	}
	return version{n[0], n[1], n[2]}, nil
}

const (
	cri1      = "io.containerd.grpc.v1.cri"
	cri2      = "io.containerd.cri.v1.images"
	diffs     = "io.containerd.service.v1.diff-service"
	transfers = "io.containerd.transfer.v1.local"
)

// containerdConfig is the configuration of a containerd of version v with dewd's snapshotter at socket.
func containerdConfig(text []byte, v version, socket string) ([]byte, error) {
	if len(text) == 0 {
		format := 2
		if v.major >= 2 {
			format = 3
		}
		text = fmt.Appendf(nil, "%s\nversion = %d%s\n", created, format, mark)
	}
	var doc map[string]any
	if err := toml.Unmarshal(text, &doc); err != nil {
		return nil, err
	}
	format, _ := doc["version"].(int64)
	if format < 2 {
		return nil, errors.New("its version is 1, in which plugins have other names: " +
			"\"containerd config migrate\" writes it as a newer one")
	}
	if lookup(doc, []string{"proxy_plugins", "dewpoint"}) != nil {
		return nil, errors.New("it has a proxy plugin \"dewpoint\" that dew setup has not written: remove that first")
	}
	add := proxies(v, socket)
	var sets []set
	if v.atLeast(1, 7, 4) {
		list := []any{"walking"}
		if l, ok := lookup(doc, []string{"plugins", diffs, "default"}).([]any); ok {
			list = l
		}
		sets = append(sets, set{[]string{"plugins", diffs}, "default", quote(append([]any{"dewpoint-diff"}, list...))})
		unpack, err := unpackConfig(doc)
		if err != nil {
			return nil, err
		}
		if unpack != nil && len(unpack) == 0 { // "unpack_config = []" stands in the way of [[…unpack_config]]
			sets = append(sets, set{[]string{"plugins", transfers}, "unpack_config", ""})
		}
		add = append(add, unpackLines(unpack)...)
	}
	return edit(text, append(sets, criSets(doc, format)...), add)
}

// proxies are the lines of the snapshotter and, where containerd has those, the diff plugin.
func proxies(v version, socket string) []string {
	add := []string{"[proxy_plugins.dewpoint]", `  type = "snapshot"`, fmt.Sprintf("  address = %q", socket)}
	if v.major >= 2 {
		if kernelRemaps() {
			add = append(add, `  capabilities = ["remap-ids"]`)
		}
		add = append(add, "  [proxy_plugins.dewpoint.exports]", `    enable_remote_snapshot_annotations = "true"`)
	}
	if v.atLeast(1, 7, 4) {
		add = append(add, "[proxy_plugins.dewpoint-diff]", `  type = "diff"`, fmt.Sprintf("  address = %q", socket))
	}
	return add
}

// unpackConfig is what the transfer service unpacks into; nil if the document does not say.
func unpackConfig(doc map[string]any) ([]any, error) {
	v := lookup(doc, []string{"plugins", transfers, "unpack_config"})
	list, ok := v.([]any)
	if v != nil && !ok {
		return nil, fmt.Errorf("%w: unpack_config is no list", errByHand)
	}
	return list, nil
}

// unpackLines adds dewpoint to the list. A list replaces containerd's own, so overlayfs is named besides.
func unpackLines(list []any) []string {
	entry := func(snapshotter, differ string) []string {
		return []string{`[[plugins."` + transfers + `".unpack_config]]`,
			fmt.Sprintf("  platform = %q", "linux/"+runtime.GOARCH),
			fmt.Sprintf("  snapshotter = %q", snapshotter), fmt.Sprintf("  differ = %q", differ)}
	}
	lines := entry("dewpoint", "dewpoint-diff")
	if len(list) == 0 {
		lines = append(lines, entry("overlayfs", "walking")...)
	}
	return lines
}

// criSets has Kubernetes' interface use the snapshotter, unless it is turned off.
func criSets(doc map[string]any, format int64) []set {
	off, _ := doc["disabled_plugins"].([]any)
	if slices.ContainsFunc(off, func(p any) bool { return strings.Contains(fmt.Sprint(p), "cri") }) {
		return nil
	}
	table := []string{"plugins", cri1, "containerd"}
	if format >= 3 {
		table = []string{"plugins", cri2}
	}
	return []set{{table, "snapshotter", `"dewpoint"`}, {table, "disable_snapshot_annotations", "false"}}
}

func quote(list []any) string {
	var q []string
	for _, v := range list {
		q = append(q, fmt.Sprintf("%q", v))
	}
	return "[" + strings.Join(q, ", ") + "]"
}

// kernelRemaps says whether overlayfs takes id-mapped mounts: from Linux 5.19 on.
func kernelRemaps() bool {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}
	var major, minor int
	fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor)
	return major > 5 || major == 5 && minor >= 19
}
