package deploy

import (
	"errors"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dewpoint/internal/engine"
	"dewpoint/internal/engine/network"
	"dewpoint/internal/fetch"
	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/spec"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParseRefuses(t *testing.T) {
	d := New(Config{})
	defer d.Close()
	k, err := NewQueue(QueueConfig{Deployer: d, Path: filepath.Join(t.TempDir(), "deployments")})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	for says, req := range map[string]spec.Request{
		"UPPER":           {Image: "UPPER/Case:1"},
		"reference":       {Image: ""},
		"container name":  {Image: "app:1", Name: "-web"},
		"--lazy always":   {Image: "app:1", Lazy: "always"},
		"--restore maybe": {Image: "app:1", Restore: "maybe"},
		"--order random":  {Image: "app:1", Order: "random"},
		"--net wifi":      {Image: "app:1", Net: "wifi"},
		"localhost":       {Image: "app:1", Ports: []spec.Port{{HostIP: "localhost", Host: 80, Container: 80}}},
	} {
		_, err := d.parse(req)
		if !errors.Is(err, ErrRequest) || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: %v, want ErrRequest with %q", req, err, says)
		}
		if _, err := k.Deploy(t.Context(), req, spec.Watch{}); !errors.Is(err, ErrRequest) {
			t.Errorf("Deploy of %+v: %v", req, err)
		}
	}
	if _, err := d.Pull(t.Context(), spec.PullRequest{Image: "app:1", Order: "random"},
		spec.Watch{}); !errors.Is(err, ErrRequest) {
		t.Errorf("Pull: %v", err)
	}
}

func TestParseDefaults(t *testing.T) {
	d := New(Config{ReadyTimeout: 7 * time.Second})
	defer d.Close()
	o, err := d.parse(spec.Request{Image: "team/app"})
	if err != nil {
		t.Fatal(err)
	}
	if o.timeout != 7*time.Second || o.Net != "" || !strings.HasPrefix(o.name, "app-") ||
		o.ref.String() != "docker.io/team/app:latest" {
		t.Errorf("%+v", o)
	}
	o, err = d.parse(spec.Request{Image: "app:1", Name: "web", ReadyTimeout: time.Second,
		Ports: []spec.Port{{Host: 8080, Container: 80}}})
	if err != nil {
		t.Fatal(err)
	}
	if o.timeout != time.Second || o.Net != engine.NetBridge || o.name != "web" {
		t.Errorf("%+v", o)
	}
	plain := New(Config{})
	defer plain.Close()
	if got := plain.cfg.ReadyTimeout; got != time.Minute {
		t.Errorf("by default a container may take %s", got)
	}
}

func TestMadeUpName(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range []string{"nginx", "r.example:5000/a/b/some_app.x:1"} {
		ref, err := image.ParseReference(s)
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			name := madeUpName(ref)
			if err := engine.ValidName(name); err != nil {
				t.Error(err)
			}
			seen[name] = true
		}
	}
	if len(seen) != 40 {
		t.Errorf("%d names of 40 differ", len(seen))
	}
}

// A repository may have a longer name than a container.
func TestMadeUpNameOfALongOne(t *testing.T) {
	d := New(Config{})
	defer d.Close()
	if _, err := d.parse(spec.Request{Image: strings.Repeat("a", 100)}); err != nil {
		t.Error(err)
	}
}

func TestPorts(t *testing.T) {
	got, err := ports([]spec.Port{{Host: 8080, Container: 80},
		{HostIP: "::1", Host: 53, Container: 5353, Protocol: "udp"}})
	want := []network.Port{{Host: 8080, Container: 80, Protocol: "tcp"},
		{HostIP: netip.MustParseAddr("::1"), Host: 53, Container: 5353, Protocol: "udp"}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := ports(nil); got != nil || err != nil {
		t.Errorf("of none: %v, %v", got, err)
	}
}

func TestOptions(t *testing.T) {
	o := &order{Request: spec.Request{Order: "parallel", Inflaters: 3}}
	if got, want := o.options(),
		(fetch.Options{Local: true, Lazy: true, Order: link.Order("parallel"),
			Inflaters: 3}); !reflect.DeepEqual(got, want) {
		t.Errorf("of a container: %+v", got)
	}
	o.pullOnly = true
	if o.options().Local {
		t.Error("a pull takes what is here")
	}
}

func TestSpec(t *testing.T) {
	o := &order{name: "web",
		Request: spec.Request{Cmd: []string{"serve"}, Env: []string{"A=1"}, Memory: 64 << 20, CPUs: 0.5,
			Net:     engine.NetNone,
			Volumes: []spec.Volume{{Source: "/s", Target: "/t", ReadOnly: true}}}}
	s := o.spec(nil)
	if s.Name != "web" || s.Cmd[0] != "serve" || s.Env[0] != "A=1" || s.Memory != 64<<20 || s.CPUs != 0.5 ||
		s.Net != engine.NetNone ||
		len(s.Volumes) != 1 || s.Volumes[0] != (engine.Volume{Source: "/s", Target: "/t", ReadOnly: true}) ||
		s.Labels != nil {
		t.Errorf("%+v", s)
	}
	o.Remove = true
	if o.spec(nil).Labels[LabelRemove] == "" {
		t.Error("a container that is to be removed is not marked")
	}
}

func TestTail(t *testing.T) {
	out := &tail{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				if n, err := out.Write(make([]byte, 100)); n != 100 || err != nil {
					t.Errorf("%d, %v", n, err)
				}
			}
		})
	}
	wg.Wait()
	out.Write([]byte("the end"))
	if len(out.b) != maxOutput || !strings.HasSuffix(string(out.b), "\x00the end") {
		t.Errorf("%d bytes are kept", len(out.b))
	}
	out = &tail{}
	out.Write([]byte(strings.Repeat("x", 3*maxOutput) + "y"))
	if len(out.b) != maxOutput || out.b[maxOutput-1] != 'y' {
		t.Errorf("%d bytes of one long write are kept", len(out.b))
	}
}

// audience keeps what it is told to be over.
type audience struct {
	deaf
	done []spec.Record
}

func (a *audience) Done(r spec.Record) { a.done = append(a.done, r) }

// A deployment that fails has a record that says so, told to Done once.
func TestRecordOfFailure(t *testing.T) {
	var told audience
	d := New(Config{Node: "n1", Audience: &told})
	defer d.Close()
	var stages []string
	r, err := d.parse(spec.Request{Image: "app:1", Name: "web"})
	if err != nil {
		t.Fatal(err)
	}
	r.begin(t.Context(), time.Now(),
		spec.Watch{Reached: func(name, stage string, at float64) { stages = append(stages, name+" "+stage) }})
	r.reached(spec.Resolved)
	rec := r.end(errors.New("no"))
	if rec.Error != "no" || rec.Name != "web" || rec.Node != "n1" || rec.Stages[spec.Resolved] <= 0 ||
		len(told.done) != 1 || told.done[0].Error != "no" {
		t.Errorf("%+v, told %+v", rec, told.done)
	}
	if !slices.Equal(stages, []string{"web resolved"}) {
		t.Errorf("stages %v", stages)
	}
	if r.life.Err() == nil {
		t.Error("the layers of a deployment that failed go on")
	}
}

// Only a container on the host's network can be mistaken for another process.
func TestConflict(t *testing.T) {
	for _, net := range []string{engine.NetBridge, engine.NetNone} {
		o := &order{Request: spec.Request{Net: net}}
		if err := o.conflict(spec.ReadyCheck{}); err != nil {
			t.Errorf("--net %s: %v", net, err)
		}
	}
}

func TestNamespaceToConnectFrom(t *testing.T) {
	for net, want := range map[string]string{engine.NetHost: "", engine.NetBridge: "", engine.NetNone: "/ns"} {
		if got := nsOf(&engine.Info{Net: net, NetNS: "/ns"}); got != want {
			t.Errorf("--net %s: %q", net, got)
		}
	}
}

// Whether the registry is asked follows the pull policy.
func TestPullPolicy(t *testing.T) {
	d := &Deployer{}
	for policy, local := range map[string]bool{"": true, "missing": true, "never": true, "always": false} {
		o, err := d.parse(spec.Request{Image: "app:1", Options: spec.Options{PullPolicy: policy}})
		if err != nil || o.options().Local != local {
			t.Errorf("%q: %+v, %v", policy, o.options(), err)
		}
	}
}
