package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// dockerRun are the options of docker run, version 27. why tells the difference of those that dew run has,
// and what there is instead of the others.
var dockerRun = []struct{ name, why string }{
	{"add-host", "NAME:ADDRESS; not host-gateway"},
	{"annotation", "use --label"},
	{"attach", "dew run shows both outputs, and dew run -d none"},
	{"blkio-weight", "set it on the container's cgroup"},
	{"blkio-weight-device", "set it on the container's cgroup"},
	{"cap-add", ""},
	{"cap-drop", ""},
	{"cgroup-parent", "dewd chooses the cgroups"},
	{"cgroupns", "a container has a cgroup namespace of its own where cgroups are version 2"},
	{"cidfile", "the file has the container's name"},
	{"cpu-count", "of Windows"},
	{"cpu-percent", "of Windows"},
	{"cpu-period", "use --cpus"},
	{"cpu-quota", "use --cpus"},
	{"cpu-rt-period", "use --ulimit rtprio and --cap-add SYS_NICE"},
	{"cpu-rt-runtime", "use --ulimit rtprio and --cap-add SYS_NICE"},
	{"cpu-shares", "use --cpus"},
	{"cpus", ""},
	{"cpuset-cpus", "use --cpus"},
	{"cpuset-mems", "use --memory"},
	{"detach", "returns when the container is ready"},
	{"detach-keys", "the keys are ctrl-p ctrl-q"},
	{"device", "each device by itself, no directories"},
	{"device-cgroup-rule", "use --device"},
	{"device-read-bps", "set it on the container's cgroup"},
	{"device-read-iops", "set it on the container's cgroup"},
	{"device-write-bps", "set it on the container's cgroup"},
	{"device-write-iops", "set it on the container's cgroup"},
	{"disable-content-trust", "name the image by its digest"},
	{"dns", ""},
	{"dns-option", ""},
	{"dns-search", ""},
	{"domainname", "use --hostname with the domain in it"},
	{"entrypoint", ""},
	{"env", ""},
	{"env-file", ""},
	{"expose", "use -p; containers on the bridge reach all ports of each other"},
	{"gpus", "use --device for the GPU's device nodes, and -v for its libraries"},
	{"group-add", "use --user USER:GROUP"},
	{"health-cmd", "also [\"PROGRAM\",\"ARG\"] without a shell; with --restart, what is unhealthy is started again"},
	{"health-interval", ""},
	{"health-retries", ""},
	{"health-start-interval", "also before the first check"},
	{"health-start-period", ""},
	{"health-timeout", ""},
	{"help", "-h is help, not the host name"},
	{"hostname", "without -h, which is help"},
	{"init", "where the node has tini, catatonit or docker-init, linked statically"},
	{"interactive", "its input ends with yours, and stays open when dew goes away"},
	{"io-maxbandwidth", "of Windows"},
	{"io-maxiops", "of Windows"},
	{"ip", "dewd gives the addresses of the bridge"},
	{"ip6", "the bridge has IPv4 alone: use --net host"},
	{"ipc", "a container has an IPC namespace of its own; --shm-size sets its size"},
	{"isolation", "of Windows"},
	{"kernel-memory", "use --memory"},
	{"label", ""},
	{"label-file", "use --label"},
	{"link", "use --add-host"},
	{"link-local-ip", "dewd gives the addresses of the bridge"},
	{"log-driver", "dewd keeps the output in files, which dew logs reads"},
	{"log-opt", "dewd bounds the files of the output by itself"},
	{"mac-address", "CNI's plugins give the addresses of the bridge"},
	{"memory", ""},
	{"memory-reservation", "use --memory"},
	{"memory-swap", "use --memory"},
	{"memory-swappiness", "set it on the container's cgroup"},
	{"mount", "bind, volume and tmpfs; a source of bind that is missing becomes a directory"},
	{"name", ""},
	{"network", "host (the default), bridge or none"},
	{"network-alias", "use --add-host"},
	{"no-healthcheck", ""},
	{"oom-kill-disable", "set it on the container's cgroup"},
	{"oom-score-adj", "use --memory"},
	{"pid", "a container has a PID namespace of its own; dew exec runs a command in it"},
	{"pids-limit", ""},
	{"platform", "dewd takes the image of the node's platform"},
	{"privileged", ""},
	{"publish", "IPv4 addresses; the host's port is said: -p 80 is -p 80:80"},
	{"publish-all", "use -p for each port"},
	{"pull", ""},
	{"quiet", "no progress"},
	{"read-only", ""},
	{"restart", ""},
	{"rm", ""},
	{"runtime", "engine.runtime in dewd's configuration chooses it"},
	{"security-opt", "no-new-privileges alone"},
	{"shm-size", ""},
	{"sig-proxy", "SIGINT, SIGTERM and SIGHUP stop the container"},
	{"stop-signal", "the image's STOPSIGNAL counts"},
	{"stop-timeout", "use dew stop -t TIME"},
	{"storage-opt", "the writable layer is bounded by the disk"},
	{"sysctl", "of the container's own namespaces"},
	{"tmpfs", ""},
	{"tty", "dew logs has what it showed since its last start"},
	{"ulimit", ""},
	{"use-api-socket", "bind dewd's socket by -v"},
	{"user", ""},
	{"userns", "a container has the node's users"},
	{"uts", "a container has a UTS namespace of its own; use --hostname"},
	{"volume", "paths and named volumes, :ro; no volumes without a name, no :z"},
	{"volume-driver", "volumes are directories of the node: bind what is mounted there"},
	{"volumes-from", "use -v with the same named volume"},
	{"workdir", ""},
}

// dockerShort are the letters of docker run's options.
var dockerShort = map[string]string{"a": "attach", "c": "cpu-shares", "i": "interactive", "P": "publish-all",
	"t": "tty"}

// dockerCommands are Docker's commands, and what there is instead of those that dew has not.
var dockerCommands = map[string]string{
	"build":   "build with BuildKit or Docker, push, and run it here",
	"commit":  "build the image anew; dew checkpoint keeps a container's memory and files",
	"cp":      "bind a directory by -v, or use dew exec with tar",
	"create":  "use dew run -d",
	"diff":    "use dew exec to look",
	"export":  "use dew exec with tar",
	"history": "use dew images, or ctr",
	"import":  "push the image to a registry, and pull it",
	"info":    "use dew doctor and dew version",
	"load":    "use ctr images import, or push the image to a registry",
	"network": "the networks are host, bridge and none: dew run --net",
	"pause":   "use dew checkpoint, or dew stop",
	"port":    "use dew ps",
	"push":    "use ctr images push, after dew pull --blobs",
	"rename":  "use dew run --name",
	"save":    "use ctr images export, after dew pull --blobs",
	"search":  "ask the registry",
	"stats":   "use the metrics, or dew exec",
	"system":  "use dew prune, dew doctor or dew events",
	"tag":     "push it to the registry by its other name",
	"top":     "use dew exec NAME ps",
	"unpause": "use dew run, which starts from a checkpoint",
}

// unknownCommand is the error of a command that dew has not.
func unknownCommand(name string) error {
	if why := dockerCommands[name]; why != "" {
		return misuse(nil, "dew has no %s: %s", name, why)
	}
	var names []string
	for _, c := range commands() {
		names = append(names, c.name)
	}
	return misuse(nil, "%q is not a command%s", name, didYouMean(name, "dew ", names))
}

// unknownFlag is the error of an option that the command has not; nil of other errors.
func (c *call) unknownFlag(err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) {
		return nil
	}
	name := unknown.GetSpecifiedName()
	long := name
	if unknown.GetSpecifiedShortnames() != "" {
		long = dockerShort[name]
	}
	if c.flags.Lookup("publish") != nil { // run and its like
		for _, o := range dockerRun {
			if o.name == long && runFlag(long) == nil {
				return misuse(c, "dew has no --%s: %s", o.name, o.why)
			}
		}
	}
	var names []string
	c.flags.VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, f.Name)
		}
	})
	return misuse(c, "%v%s", err, didYouMean(long, "--", names))
}

// runFlag is a flag of dew run; nil if it has none of that name.
func runFlag(name string) *pflag.Flag {
	c := &call{flags: pflag.NewFlagSet("run", pflag.ContinueOnError)}
	runFlags(c)
	return c.flags.Lookup(name)
}

// didYouMean asks for the nearest of the names, if one is near.
func didYouMean(name, prefix string, names []string) string {
	best, least := "", 1+len(name)/3
	for _, n := range names {
		d := distance(name, n)
		if strings.HasPrefix(n, name) && len(name) > 2 {
			d = 1
		}
		if d <= least && (best == "" || d < least) {
			best, least = n, d
		}
	}
	if best == "" || name == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %s%s?", prefix, best)
}

// distance is how many letters have to be added, removed, changed or exchanged with the next.
func distance(a, b string) int {
	var rows [3][]int
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
	}
	before, last, now := rows[0], rows[1], rows[2]
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		now[0] = i
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			now[j] = min(last[j]+1, now[j-1]+1, last[j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				now[j] = min(now[j], before[j-2]+1)
			}
		}
		before, last, now = last, now, before
	}
	return last[len(b)]
}
