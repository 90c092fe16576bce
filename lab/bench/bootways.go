package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/testkit/popbed"
	"dewpoint/testkit/testbed"

	"golang.org/x/sync/errgroup"
)

// instance is a container to be started.
type instance struct {
	image, name string
	env         []string
}

// way is how an engine brings a container up, behind an address of its own.
type way interface {
	name() string
	// up returns when the engine says that the container runs, with what it says of how.
	up(ctx context.Context, i instance) (how string, err error)
	// address is where the container listens, seen from the node.
	address(ctx context.Context, name string) (string, error)
	remove(ctx context.Context, name string) error
	// cpu is what the engine and its containers have used so far, in seconds.
	cpu() (float64, error)
}

// lineup is the engines of a part, each with the images whole on its disk.
type lineup struct {
	bed     *testbed.Bed
	only    []string  // of the ways; empty is all
	dewd    *bootDewd // boots
	docker  *bootDocker
	engines []engine
	open    []*session
}

// ways are those that are compared.
func (l *lineup) ways() []way {
	all := []way{l.dewd, l.dewd.with("restore")}
	if l.docker != nil {
		all = append(all, l.docker)
	}
	if len(l.only) > 0 {
		all = slices.DeleteFunc(all, func(w way) bool { return !slices.Contains(l.only, w.name()) })
	}
	return all
}

// bootSubnet stays the same when a second dewd follows on the bridge of the first.
const bootSubnet = "subnet = \"10.88.240.0/20\"\n"

// lineup starts the engines that were asked for; the caller closes it.
func (b *bootBench) lineup(ctx context.Context, config string, images ...string) (*lineup, error) {
	d := dewd{bin: b.o.bin, tools: b.o.containerd(), config: neverLearn + "[engine]\n" + bootSubnet + config}
	engines, err := b.o.chosen([]engine{d, docker{bridge: true}}, b.stdout)
	if err != nil {
		return nil, err
	}
	l := &lineup{bed: b.bed, only: b.ways}
	for _, e := range engines {
		s, err := open(ctx, b.bed, e)
		if err != nil {
			return nil, errors.Join(err, l.close())
		}
		l.engines, l.open = append(l.engines, e), append(l.open, s)
		switch e := e.(type) {
		case dewd:
			e.flags = []string{"--lazy", "never"}
			l.dewd = &bootDewd{dewd: e, session: s, restore: "never"}
			err = b.pullAll(ctx, e, s, images)
		case docker:
			l.docker = &bootDocker{docker: e, session: s}
			err = b.pullAll(ctx, e, s, images)
		}
		if err != nil {
			return nil, errors.Join(err, l.close())
		}
	}
	return l, nil
}

func (b *bootBench) pullAll(ctx context.Context, e engine, s *session, images []string) error {
	for _, image := range images {
		if err := e.pull(ctx, s, testbed.Address+"/"+image); err != nil {
			return fmt.Errorf("%s: %w", image, err)
		}
	}
	return nil
}

func (l *lineup) close() error {
	var errs []error
	if l.dewd != nil { // whose containers outlive it; Docker's do not
		errs = append(errs, l.dewd.removeAll(context.Background()))
	}
	for i, s := range l.open {
		errs = append(errs, s.close(l.engines[i]))
	}
	return errors.Join(errs...)
}

// --- dewd ------------------------------------------------------------------------

type bootDewd struct {
	dewd
	session *session
	restore string // never, always, auto
}

// with is the same dewd, told otherwise whether to restore.
func (d *bootDewd) with(way string) *bootDewd {
	other := *d
	other.restore = map[string]string{"boot": "never", "restore": "always", "auto": "auto"}[way]
	return &other
}

func (d *bootDewd) name() string {
	return map[string]string{"never": "boot", "always": "restore", "auto": "auto"}[d.restore]
}

func (d *bootDewd) up(ctx context.Context, i instance) (string, error) {
	r, err := d.record(ctx, i)
	return startOf(r), err
}

// record brings an instance up, and gives dew's record of it.
func (d *bootDewd) record(ctx context.Context, i instance) (r spec.Record, err error) {
	args, err := d.arguments(i)
	if err != nil {
		return r, err
	}
	said, err := d.dew(ctx, d.session, "run", args...)
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(said, &r)
}

// arguments are those of dew run.
func (d *bootDewd) arguments(i instance) ([]string, error) {
	app, err := applicationOf(i.image)
	if err != nil {
		return nil, err
	}
	args := []string{"-d", "--lazy", "never", "--net", "bridge", "--ready", app.ready, "--ready-timeout", "3m",
		"--restore", d.restore, "--name", i.name}
	for _, e := range i.env {
		args = append(args, "-e", e)
	}
	return append(args, testbed.Address+"/"+i.image), nil
}

// startOf says how a container came to run.
func startOf(r spec.Record) string {
	if len(r.Way.Why) == 0 {
		return r.Way.Start
	}
	return fmt.Sprintf("%s (%s)", r.Way.Start, strings.Join(r.Way.Why, "; "))
}

func (d *bootDewd) host() string { return "unix://" + d.session.path("state/dewd.sock") }

func (d *bootDewd) address(ctx context.Context, name string) (string, error) {
	return addressAt(ctx, d.host(), name)
}

// addressAt asks the dewd at host for a container's address.
func addressAt(ctx context.Context, host, name string) (string, error) {
	c, err := api.Dial(host)
	if err != nil {
		return "", err
	}
	defer c.Close()
	all, err := c.List(ctx, true)
	if err != nil {
		return "", err
	}
	for _, one := range all {
		if one.Name == name && one.IP != "" {
			return one.IP, nil
		}
	}
	return "", fmt.Errorf("container %s has no address", name)
}

func (d *bootDewd) remove(ctx context.Context, name string) error {
	return d.dewd.remove(ctx, d.session, name)
}

// removeAll ends what a part that failed has left.
func (d *bootDewd) removeAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	c, err := api.Dial(d.host())
	if err != nil {
		return err
	}
	defer c.Close()
	all, err := c.List(ctx, true)
	for _, one := range all {
		err = errors.Join(err, c.Remove(ctx, one.Name, true))
	}
	return err
}

func (d *bootDewd) cpu() (float64, error) {
	return engineCPU(d.session.group, popbed.ParentCgroup(d.session.path("state")))
}

// checkpointed is what dew says of a checkpoint that it has made.
type checkpointed struct {
	ID     string  `json:"id"`
	Size   int64   `json:"size"`   // bytes stored
	Pages  int64   `json:"pages"`  // bytes of memory
	Upper  int64   `json:"upper"`  // bytes of the writable layer
	Paused float64 `json:"paused"` // seconds
}

// checkpoint makes one of a container that runs.
func (d *bootDewd) checkpoint(ctx context.Context, name string) (checkpointed, error) {
	var c checkpointed
	said, err := d.dew(ctx, d.session, "checkpoint", "--stateful", name)
	if err == nil {
		err = json.Unmarshal(said, &c)
	}
	return c, err
}

// --- Docker ----------------------------------------------------------------------

type bootDocker struct {
	docker
	session *session
}

func (d *bootDocker) name() string { return "docker" }

func (d *bootDocker) up(ctx context.Context, i instance) (string, error) {
	args := []string{"run", "--detach", "--name", i.name}
	for _, e := range i.env {
		args = append(args, "--env", e)
	}
	_, err := d.docker.docker(ctx, d.session, append(args, testbed.Address+"/"+i.image)...)
	return "boot", err
}

// address asks over Docker's socket: its client would take longer than some restores.
func (d *bootDocker) address(ctx context.Context, name string) (string, error) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dial net.Dialer
			return dial.DialContext(ctx, "unix", d.session.path("sock"))
		}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://docker/containers/"+name+"/json", nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var said struct {
		NetworkSettings struct{ IPAddress string }
	}
	if err := json.NewDecoder(resp.Body).Decode(&said); err != nil || said.NetworkSettings.IPAddress == "" {
		return "", errors.Join(fmt.Errorf("docker says no address of %s", name), err)
	}
	return said.NetworkSettings.IPAddress, nil
}

func (d *bootDocker) remove(ctx context.Context, name string) error {
	return d.docker.remove(ctx, d.session, name)
}

func (d *bootDocker) cpu() (float64, error) { return engineCPU(d.session.group, "docker") }

// engineCPU adds what an engine's programs have used to what its containers
// have, whose cgroups are below parent.
func engineCPU(g *testbed.Group, parent string) (float64, error) {
	used, err := g.CPU()
	return used.Seconds() + containersCPU(parent), err
}

// containersCPU is 0 until there has been a container.
func containersCPU(parent string) float64 {
	for _, file := range []string{"/sys/fs/cgroup/cpuacct", "/sys/fs/cgroup/cpu,cpuacct"} {
		if raw, err := os.ReadFile(filepath.Join(file, parent, "cpuacct.usage")); err == nil {
			ns, _ := strconv.ParseFloat(strings.TrimSpace(string(raw)), 64)
			return ns / 1e9
		}
	}
	raw, _ := os.ReadFile(filepath.Join("/sys/fs/cgroup", parent, "cpu.stat"))
	for line := range strings.Lines(string(raw)) {
		if us, ok := strings.CutPrefix(line, "usage_usec "); ok {
			v, _ := strconv.ParseFloat(strings.TrimSpace(us), 64)
			return v / 1e6
		}
	}
	return 0
}

// --- timing ----------------------------------------------------------------------

// answerAt asks an image's application at an address other than the loopback's.
func answerAt(ctx context.Context, image, address string, dial dialer) error {
	app, err := applicationOf(image)
	if err != nil {
		return err
	}
	return app.ask(ctx, func(ctx context.Context, network, at string) (net.Conn, error) {
		_, port, err := net.SplitHostPort(at)
		if err != nil {
			return nil, err
		}
		return dial(ctx, network, net.JoinHostPort(address, port))
	})
}

// bring starts an instance and returns when it has answered, with what the engine says.
func bring(ctx context.Context, bed *testbed.Bed, w way, i instance) (string, error) {
	how, err := w.up(ctx, i)
	if err != nil {
		return how, err
	}
	return how, answered(ctx, bed, w, i)
}

// answered returns when an instance that is up has answered.
func answered(ctx context.Context, bed *testbed.Bed, w way, i instance) error {
	address, err := w.address(ctx, i.name)
	if err != nil {
		return err
	}
	return bed.Wait(ctx, 3*time.Minute, func(ctx context.Context) error {
		return answerAt(ctx, i.image, address, bed.Dial)
	})
}

// together brings up n instances at once and removes them; seconds are until the last has answered.
func (b *bootBench) together(ctx context.Context, w way, like instance, n int) (Sample, error) {
	s := Sample{Engine: w.name(), Image: like.image}
	before, err := w.cpu()
	if err != nil {
		return s, err
	}
	start := time.Now()
	var all errgroup.Group
	for k := range n {
		one := like
		one.name = fmt.Sprintf("%s-%s-%d", like.name, w.name(), k)
		all.Go(func() error {
			how, err := bring(ctx, b.bed, w, one)
			if k == 0 {
				s.Way = how
			}
			return err
		})
	}
	err = all.Wait()
	s.Seconds = time.Since(start).Seconds()
	after, cerr := w.cpu()
	s.CPU = after - before
	for k := range n {
		rerr := w.remove(context.WithoutCancel(ctx), fmt.Sprintf("%s-%s-%d", like.name, w.name(), k))
		if err == nil { // else some were never there
			err = rerr
		}
	}
	if err = errors.Join(err, cerr); err != nil {
		return s, fmt.Errorf("%s %s: %w", w.name(), like.image, err)
	}
	return s, nil
}

// prepare makes a checkpoint of an instance that has just booted, and removes
// the instance. What cannot be checkpointed is noted and left out of the part.
func (b *bootBench) prepare(ctx context.Context, d *bootDewd, like instance) (checkpointed, error) {
	like.name += "-origin"
	if _, err := bring(ctx, b.bed, d.with("boot"), like); err != nil {
		return checkpointed{}, err
	}
	c, err := d.checkpoint(ctx, like.name)
	if err != nil {
		b.refuse(like.image, err)
	}
	return c, d.remove(ctx, like.name)
}

// gaveUp notes that a restore went wrong, which ends no part.
func (b *bootBench) gaveUp(w way, image string, err error) bool {
	if err != nil && w.name() == "restore" {
		b.refuse(image, err)
		return true
	}
	return false
}

// refuse notes why an image is left out, in the words of dew.
func (b *bootBench) refuse(image string, err error) {
	why := err.Error()
	for _, before := range []string{": dew: ", `"error":"`} {
		if _, after, ok := strings.Cut(why, before); ok {
			why = strings.TrimSuffix(after, `"}`)
		}
	}
	b.refused[image] = strings.Join(strings.Fields(why), " ")
	b.failed = append(b.failed, image+": "+b.refused[image])
	fmt.Fprintf(b.stdout, "left out: %s: %s\n", image, b.refused[image])
}
