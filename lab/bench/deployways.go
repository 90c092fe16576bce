package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/spec"
	"dewpoint/lab/bench/ctrclient/order"
	"dewpoint/testkit/testbed"
)

// toDeploy is one container.
type toDeploy struct {
	name, image string // image is a reference
	args        []string
	net         string
}

// deployer is a way to deploy: an engine, and how it is told. Its methods may be
// called by many goroutines at once.
type deployer interface {
	name() string
	// deploy returns when the engine says that the container runs, with the CPU
	// time of a process that it has spawned for this.
	deploy(ctx context.Context, c toDeploy) (time.Duration, error)
}

// manyDeployer is a way to have all deployed by one instruction, so many of them at
// once. It tells what has ended as it ends, in a goroutine of its own.
type manyDeployer interface {
	deployer
	deployMany(ctx context.Context, all []toDeploy, atOnce int, ended func(index int, err error)) error
}

// manyEngine is an engine in its session with what the experiments need of it.
type manyEngine interface {
	name() string
	engine() engine
	// setting says what containers get there.
	setting(net string) string
	ways() []deployer
	session() *session
	// remove ends a container and removes it, over the API.
	remove(ctx context.Context, name string) error
	// client is a command that only starts the engine's command line client.
	client() *exec.Cmd
	// calls are calls of the API that read, some about a container that runs.
	calls(container string) map[string]func(context.Context) error
	close() error
}

// spawn runs a client's process in the engine's group, and gives its CPU time.
func spawn(s *session, cmd *exec.Cmd) (time.Duration, error) {
	_, err := s.group.Run(cmd)
	if cmd.ProcessState == nil {
		return 0, err
	}
	return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), err
}

// viaCLI and viaAPI are ways by a function.
type viaCLI struct {
	of      string
	s       *session
	command func(ctx context.Context, c toDeploy) *exec.Cmd
}

func (w viaCLI) name() string { return w.of + "-cli" }
func (w viaCLI) deploy(ctx context.Context, c toDeploy) (time.Duration, error) {
	return spawn(w.s, w.command(ctx, c))
}

type viaAPI struct {
	of   string
	call func(ctx context.Context, c toDeploy) error
}

func (w viaAPI) name() string { return w.of + "-api" }
func (w viaAPI) deploy(ctx context.Context, c toDeploy) (time.Duration, error) {
	return 0, w.call(ctx, c)
}

// --- Dewpoint --------------------------------------------------------------------

// dewdAt is where the measured dewd serves its metrics, in the bed's node.
const dewdAt = "127.0.0.1:9464"

type manyDewd struct {
	dewd
	s *session
	c *api.Client
}

func openDewd(ctx context.Context, bed *testbed.Bed, e dewd) (manyEngine, error) {
	e.config += "[pack]\nlearn = \"never\"\n"
	e.args = []string{"--http", dewdAt}
	s, err := open(ctx, bed, e)
	if err != nil {
		return nil, err
	}
	c, err := api.Dial("unix://" + s.path("state/dewd.sock"))
	return &manyDewd{dewd: e, s: s, c: c}, err
}

func (m *manyDewd) engine() engine    { return m.dewd }
func (m *manyDewd) session() *session { return m.s }
func (m *manyDewd) setting(net string) string {
	return "containers of a containerd of its own, EROFS under overlayfs, seccomp; output to files that the shim writes; network " + map[string]string{
		"none": "a namespace with lo, by its path", "host": "the node's",
		"bridge": "CNI's bridge and host-local"}[net] +
		"; API: Deploy, a stream for each container, over one HTTP/2 connection to the socket; many: one DeployMany for all"
}

func (m *manyDewd) ways() []deployer {
	return []deployer{
		viaCLI{"dewd", m.s, func(ctx context.Context, c toDeploy) *exec.Cmd {
			return m.dewCommand(ctx,
				append([]string{"run", "-d", "--net", c.net, "--ready", "none", "--name", c.name, c.image}, c.args...)...)
		}},
		viaAPI{"dewd", func(ctx context.Context, c toDeploy) error {
			_, err := m.c.Deploy(ctx, c.request(), spec.Watch{})
			return err
		}},
		viaMany{m.c},
	}
}

func (c toDeploy) request() spec.Request {
	return spec.Request{Image: c.image, Name: c.name, Cmd: c.args, Net: c.net, Ready: "none"}
}

// viaMany is dewd's call for many deployments.
type viaMany struct{ c *api.Client }

func (w viaMany) name() string { return "dewd-many" }

func (w viaMany) deploy(ctx context.Context, c toDeploy) (time.Duration, error) {
	var failed error
	err := w.deployMany(ctx, []toDeploy{c}, 1, func(_ int, err error) { failed = err })
	return 0, errors.Join(err, failed)
}

func (w viaMany) deployMany(ctx context.Context, all []toDeploy, atOnce int,
	ended func(index int, err error)) error {
	m := spec.Many{Parallel: atOnce}
	for _, c := range all {
		m.Requests = append(m.Requests, c.request())
	}
	return w.c.DeployMany(ctx, m, spec.ManyWatch{Ended: func(i int, _ spec.Record, f *spec.Failure) {
		if f != nil {
			ended(i, errors.New(f.Message))
			return
		}
		ended(i, nil)
	}})
}

func (m *manyDewd) dewCommand(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, filepath.Join(m.bin, "dew"),
		append([]string{"-H", "unix://" + m.s.path("state/dewd.sock")}, args...)...)
}

func (m *manyDewd) client() *exec.Cmd {
	return exec.Command(filepath.Join(m.bin, "dew"), "help")
}

func (m *manyDewd) remove(ctx context.Context, name string) error { return m.c.Remove(ctx, name, true) }

func (m *manyDewd) calls(container string) map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"Inspect": func(ctx context.Context) error { _, err := m.c.Inspect(ctx, container); return err },
		"List":    func(ctx context.Context) error { _, err := m.c.List(ctx, true); return err },
		"Version": func(ctx context.Context) error { _, err := m.c.Version(ctx); return err },
		"Images":  func(ctx context.Context) error { _, err := m.c.Images(ctx); return err },
		"ListDeployments": func(ctx context.Context) error {
			_, err := m.c.ListDeployments(ctx, spec.DeploymentQuery{All: true})
			return err
		},
		"Logs": func(ctx context.Context) error {
			return m.c.Logs(ctx, container, spec.LogOptions{}, func(spec.LogChunk) error { return nil })
		},
		"PoPStatus": func(ctx context.Context) error { _, err := m.c.PoPStatus(ctx); return err },
	}
}

func (m *manyDewd) close() error {
	m.c.Close()
	return m.s.close(m.dewd)
}

// --- Docker --------------------------------------------------------------------

type manyDocker struct {
	docker
	s *session
	c *http.Client
}

func openDocker(ctx context.Context, bed *testbed.Bed, e docker) (manyEngine, error) {
	s, err := open(ctx, bed, e)
	if err != nil {
		return nil, err
	}
	t := &http.Transport{MaxIdleConnsPerHost: 64,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", s.path("sock"))
		}}
	return &manyDocker{docker: e, s: s, c: &http.Client{Transport: t}}, nil
}

func (m *manyDocker) engine() engine    { return m.docker }
func (m *manyDocker) session() *session { return m.s }
func (m *manyDocker) setting(net string) string {
	return "overlay2, seccomp, output to json-file; network " + map[string]string{
		"none": "a namespace with lo, by libnetwork", "host": "the node's",
		"bridge": "docker0 by libnetwork, no iptables rules"}[net] +
		"; API: create and start of the Engine API 1.41, over connections that are kept"
}

func (m *manyDocker) ways() []deployer {
	return []deployer{
		viaCLI{"docker", m.s, func(ctx context.Context, c toDeploy) *exec.Cmd {
			return exec.CommandContext(ctx, dockerCLI, append([]string{"--host", "unix://" + m.s.path("sock"),
				"run", "--detach", "--net", c.net, "--name", c.name, c.image}, c.args...)...)
		}},
		viaAPI{"docker", func(ctx context.Context, c toDeploy) error {
			spec := map[string]any{"Image": c.image, "Cmd": c.args, "HostConfig": map[string]any{"NetworkMode": c.net}}
			if err := m.ask(ctx, http.MethodPost, "/containers/create?name="+c.name, spec); err != nil {
				return err
			}
			return m.ask(ctx, http.MethodPost, "/containers/"+c.name+"/start", nil)
		}},
	}
}

// ask is one call of the Engine API.
func (m *manyDocker) ask(ctx context.Context, method, path string, body any) error {
	var in io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return err
		}
		in = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://docker/v1.41"+path, in)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := m.c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, 4<<20))
	if err == nil && resp.StatusCode >= 300 {
		err = fmt.Errorf("docker %s %s: %s: %s", method, path, resp.Status, answer[:min(300, len(answer))])
	}
	return err
}

func (m *manyDocker) client() *exec.Cmd { return exec.Command(dockerCLI, "--version") }

func (m *manyDocker) remove(ctx context.Context, name string) error {
	return m.ask(ctx, http.MethodDelete, "/containers/"+name+"?force=1", nil)
}

func (m *manyDocker) calls(container string) map[string]func(context.Context) error {
	return map[string]func(context.Context) error{
		"Inspect": func(ctx context.Context) error {
			return m.ask(ctx, http.MethodGet, "/containers/"+container+"/json", nil)
		},
		"List": func(ctx context.Context) error {
			return m.ask(ctx, http.MethodGet, "/containers/json?all=1", nil)
		},
		"Logs": func(ctx context.Context) error {
			return m.ask(ctx, http.MethodGet, "/containers/"+container+"/logs?stdout=1&stderr=1", nil)
		},
		"Version": func(ctx context.Context) error { return m.ask(ctx, http.MethodGet, "/version", nil) },
		"Images":  func(ctx context.Context) error { return m.ask(ctx, http.MethodGet, "/images/json", nil) },
	}
}

func (m *manyDocker) close() error {
	m.c.CloseIdleConnections()
	return m.s.close(m.docker)
}

// --- containerd ------------------------------------------------------------------

type manyContainerd struct {
	containerd
	s      *session
	lib    *exec.Cmd // ctrclient
	orders io.WriteCloser

	mu      sync.Mutex
	next    int                   // guarded by mu
	waiting map[int]chan<- string // guarded by mu: who waits for an order, for its error
	ended   chan struct{}         // closed when ctrclient has ended
}

func openContainerd(ctx context.Context, bed *testbed.Bed, e containerd, client string) (manyEngine, error) {
	s, err := open(ctx, bed, e)
	if err != nil {
		return nil, err
	}
	m := &manyContainerd{containerd: e, s: s, waiting: map[int]chan<- string{}, ended: make(chan struct{})}
	m.lib = exec.Command(client, s.path("sock"), e.snapshotter)
	m.lib.Stderr = s.log
	out, err := m.lib.StdoutPipe()
	if err == nil {
		m.orders, err = m.lib.StdinPipe()
	}
	if err == nil {
		err = s.group.StartBeside(m.lib)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", client, err), s.close(e))
	}
	go m.listen(out)
	return m, nil
}

// listen passes on what ctrclient says until it ends.
func (m *manyContainerd) listen(out io.Reader) {
	defer close(m.ended)
	for lines := bufio.NewScanner(out); lines.Scan(); {
		var done order.Done
		if json.Unmarshal(lines.Bytes(), &done) != nil {
			continue
		}
		m.mu.Lock()
		tell := m.waiting[done.ID]
		delete(m.waiting, done.ID)
		m.mu.Unlock()
		if tell != nil {
			tell <- done.Error
		}
	}
	m.lib.Wait()
}

// ask gives an order and waits until it is carried out.
func (m *manyContainerd) ask(ctx context.Context, o order.Order) error {
	answer := make(chan string, 1)
	m.mu.Lock()
	m.next++
	o.ID = m.next
	m.waiting[o.ID] = answer
	raw, err := json.Marshal(o)
	if err == nil {
		_, err = m.orders.Write(append(raw, '\n'))
	}
	m.mu.Unlock()
	if err != nil {
		return err
	}
	select {
	case said := <-answer:
		if said != "" {
			return errors.New("containerd's client: " + said)
		}
		return nil
	case <-m.ended:
		return errors.New("containerd's client has ended: see its log")
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (m *manyContainerd) name() string      { return "containerd" }
func (m *manyContainerd) engine() engine    { return m.containerd }
func (m *manyContainerd) session() *session { return m.s }
func (m *manyContainerd) setting(net string) string {
	return m.snapshotter + ", containerd's default specification (no seccomp), no output; network " +
		map[string]string{
			"none": "a namespace with lo, by runc", "host": "the node's"}[net] +
		"; API: containerd's client library in a process of its own, one connection"
}

func (m *manyContainerd) ways() []deployer {
	return []deployer{
		viaCLI{"containerd", m.s, func(ctx context.Context, c toDeploy) *exec.Cmd {
			args := []string{"--address", m.s.path("sock"), "run", "--detach", "--null-io", "--snapshotter",
				m.snapshotter}
			if c.net == "host" {
				args = append(args, "--net-host")
			}
			return exec.CommandContext(ctx, filepath.Join(m.tools, "ctr"),
				append(append(args, c.image, c.name), c.args...)...)
		}},
		viaAPI{"containerd", func(ctx context.Context, c toDeploy) error {
			return m.ask(ctx, order.Order{Name: c.name, Image: c.image, Args: c.args, HostNetwork: c.net == "host"})
		}},
	}
}

func (m *manyContainerd) client() *exec.Cmd {
	return exec.Command(filepath.Join(m.tools, "ctr"), "--version")
}

func (m *manyContainerd) remove(ctx context.Context, name string) error {
	return m.ask(ctx, order.Order{Name: name, Remove: true})
}

func (m *manyContainerd) calls(string) map[string]func(context.Context) error { return nil }

func (m *manyContainerd) close() error {
	m.orders.Close()
	<-m.ended
	return m.s.close(m.containerd)
}

// --- all of them -----------------------------------------------------------------

// deployLineup is all engines, with the images, and the ways to tell them.
type deployLineup struct {
	b       *deployBench
	engines []manyEngine
	ways    []deployer
	made    int // containers so far, for their names
}

func (b *deployBench) lineup(ctx context.Context, part string) (*deployLineup, error) {
	l := &deployLineup{b: b}
	for _, name := range b.o.engines {
		m, err := b.open(ctx, name, part)
		if err == nil && m != nil {
			l.engines = append(l.engines, m)
			err = b.bring(ctx, m)
		}
		if err != nil {
			return nil, errors.Join(err, l.close())
		}
	}
	for _, m := range l.engines {
		for _, w := range m.ways() {
			if b.ways == nil || slices.Contains(b.ways, w.name()) {
				if err := l.try(ctx, m, w); err != nil {
					fmt.Fprintf(b.stdout, "left out: %s: %v\n", w.name(), err)
					continue
				}
				l.ways = append(l.ways, w)
			}
		}
	}
	if len(l.ways) == 0 {
		return nil, errors.Join(errors.New("no way to deploy is left: see -engines and -ways"), l.close())
	}
	return l, nil
}

// open starts an engine; nil is one that cannot take part, and why is printed.
func (b *deployBench) open(ctx context.Context, name, part string) (manyEngine, error) {
	tools := b.o.containerd()
	client := filepath.Join(b.o.bin, "ctrclient")
	var why string
	var start func() (manyEngine, error)
	switch name {
	case "dewd":
		e := dewd{bin: b.o.bin, tools: tools}
		if part == "api" { // its status is asked for
			e.config = "[pop]\nstore = \"DIR/pop\"\n"
		}
		why, start = e.missing(), func() (manyEngine, error) { return openDewd(ctx, b.bed, e) }
	case "docker":
		e := docker{bridge: b.net == "bridge"}
		why, start = e.missing(), func() (manyEngine, error) { return openDocker(ctx, b.bed, e) }
		if part == "alive" {
			why = "the part is about dewd"
		}
	case "containerd-overlayfs":
		e := containerd{tools: tools, snapshotter: "overlayfs"}
		why, start = e.missing(), func() (manyEngine, error) { return openContainerd(ctx, b.bed, e, client) }
		if _, err := os.Stat(client); err != nil && why == "" {
			why = client + " is not built: make build-lab"
		}
		if b.net == "bridge" {
			why = "it has no bridge of its own"
		}
		if part == "alive" || part == "api" {
			why = "the part compares dewd and Docker"
		}
	default:
		return nil, fmt.Errorf("engine %q: there are dewd, docker, containerd-overlayfs", name)
	}
	if why != "" {
		fmt.Fprintf(b.stdout, "left out: %s: %s\n", name, why)
		return nil, nil
	}
	return start()
}

// bring has an engine pull the images, and starts each once.
func (b *deployBench) bring(ctx context.Context, m manyEngine) error {
	for i, image := range b.o.images {
		ref := testbed.Address + "/" + image
		if err := m.engine().pull(ctx, m.session(), ref); err != nil {
			return err
		}
		name := fmt.Sprintf("b%d-first-%s-%d", os.Getpid(), m.name(), i)
		if _, err := m.ways()[1].deploy(ctx,
			toDeploy{name: name, image: ref, args: []string{"ls"}, net: b.net}); err != nil {
			return err
		}
		if err := m.remove(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// try deploys once by a way.
func (l *deployLineup) try(ctx context.Context, m manyEngine, w deployer) error {
	c := l.b.sleeper(l)
	if _, err := w.deploy(ctx, c); err != nil {
		return err
	}
	return m.remove(ctx, c.name)
}

func (l *deployLineup) close() error {
	var err error
	for _, m := range l.engines {
		err = errors.Join(err, m.close())
	}
	return err
}

// of is the engine of a way.
func (l *deployLineup) of(way string) manyEngine {
	for _, m := range l.engines {
		if strings.HasPrefix(way, m.name()+"-") {
			return m
		}
	}
	return nil
}

// name is one that no other container of the machine has: containerds share runc's state.
func (l *deployLineup) name() string {
	l.made++
	return "b" + strconv.Itoa(os.Getpid()) + "-" + strconv.Itoa(l.made)
}
