package deploy

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy/ready"
	"dewpoint/internal/engine"
	"dewpoint/internal/engine/network"
	"dewpoint/internal/fetch"
	"dewpoint/internal/fetch/link"
	"dewpoint/internal/image"
	"dewpoint/internal/restart"
	"dewpoint/internal/spec"
)

// order is a request that was understood.
type order struct {
	spec.Request
	ref      image.Reference
	name     string
	ports    []network.Port
	timeout  time.Duration // for the container to be ready
	mode     string        // of checkpoint: whether the container may start from one
	pullOnly bool          // of an image, without a container
	blobs    bool          // of a pull: containerd gets the image's blobs too
	id       string        // the deployment's, which the Queue gives; "" without a Queue
}

// parse understands a request. The run that it returns has not begun.
func (d *Deployer) parse(req spec.Request) (*run, error) {
	ref, err := image.ParseReference(req.Image)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	o := order{Request: req, ref: ref, name: cmp.Or(req.Name, madeUpName(ref)), timeout: req.ReadyTimeout,
		mode: cmp.Or(req.Restore, checkpoint.Auto)}
	if req.Record || req.TTY || req.Stdin { // no checkpoint keeps a terminal, nor an open input
		o.mode = checkpoint.Never
	}
	if err := engine.ValidName(o.name); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	if o.timeout <= 0 {
		o.timeout = d.cfg.ReadyTimeout
	}
	if o.Net == "" && len(req.Ports) > 0 {
		o.Net = engine.NetBridge
	}
	for _, f := range []struct {
		flag, value string
		allowed     []string
	}{
		{"lazy", req.Lazy, []string{"", "auto", "never"}},
		{"restore", req.Restore, []string{"", checkpoint.Auto, checkpoint.Never, checkpoint.Always}},
		{"order", req.Order, []string{"", "layers", "parallel"}},
		{"net", o.Net, []string{"", engine.NetHost, engine.NetBridge, engine.NetNone}},
	} {
		if !slices.Contains(f.allowed, f.value) {
			return nil, fmt.Errorf("%w: --%s %s: want one of%s", ErrRequest, f.flag, f.value,
				strings.Join(f.allowed, " "))
		}
	}
	if req.Memory != 0 && req.Memory < spec.MinMemory {
		return nil, fmt.Errorf("%w: --memory %d: a container needs at least %d MiB", ErrRequest, req.Memory,
			spec.MinMemory>>20)
	}
	if _, err := spec.ParseRestart(req.Restart); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	o.ports, err = ports(req.Ports)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	return &run{d: d, order: o}, nil
}

func ports(in []spec.Port) ([]network.Port, error) {
	var out []network.Port
	for _, p := range in {
		n := network.Port{Host: p.Host, Container: p.Container, Protocol: p.Protocol}
		if n.Protocol == "" {
			n.Protocol = "tcp"
		}
		if p.HostIP != "" {
			var err error
			if n.HostIP, err = netip.ParseAddr(p.HostIP); err != nil {
				return nil, err
			}
		}
		out = append(out, n)
	}
	return out, nil
}

// madeUpName is the last part of the repository, cut to what a name may have,
// and some random digits.
func madeUpName(ref image.Reference) string {
	base := ref.Path[strings.LastIndexByte(ref.Path, '/')+1:]
	base = base[:min(len(base), 56)]
	b := make([]byte, 3)
	rand.Read(b)
	return base + "-" + hex.EncodeToString(b)
}

// options are those of the order's pull. A container takes the image that is
// here, as docker run does, unless it is to ask always; a pull asks the registry.
func (o *order) options() fetch.Options {
	return fetch.Options{Local: !o.pullOnly && o.PullPolicy != "always",
		Lazy: !o.pullOnly && !o.Record && o.Lazy != "never", Order: link.Order(o.Order), Inflaters: o.Inflaters}
}

// spec is what the container is made by, without what a checkpoint of it needs.
func (o *order) spec(img *image.Image) engine.Spec {
	return engine.Spec{Name: o.name, Image: img, Entrypoint: o.Entrypoint, Cmd: o.Cmd, Env: o.Env, Net: o.Net,
		Ports: o.ports, Volumes: o.Volumes, Memory: o.Memory, CPUs: o.CPUs, Options: o.Options,
		Labels: o.labels()}
}

// labels are those of the container of an order, the caller's among them.
func (o *order) labels() map[string]string {
	if !o.Remove && !o.restarts() && o.id == "" && len(o.Labels) == 0 {
		return nil
	}
	l := map[string]string{}
	maps.Copy(l, o.Labels)
	if o.Remove {
		l[LabelRemove] = "true"
	}
	if o.restarts() {
		l[restart.LabelPolicy] = o.Restart
	}
	if o.id == "" {
		return l
	}
	l[LabelDeployment] = o.id
	if o.Terms.Caller != "" {
		l[LabelCaller] = o.Terms.Caller
	}
	if owner := o.Terms.Owner(); owner != "" {
		l[checkpoint.LabelOwner] = owner
	}
	if text := Asked(o.Request); text != "" {
		l[LabelRequest] = text
	}
	return l
}

// Asked is what LabelRequest has of a request; "" of one that is too long.
func Asked(r spec.Request) string {
	b, err := json.Marshal(r)
	if err != nil || len(b) > maxRequest {
		return ""
	}
	return string(b)
}

// restarts reports whether the container has a policy of restarts.
func (o *order) restarts() bool { return o.Restart != "" && o.Restart != spec.RestartNo }

// checkOf is when a container of the image is ready.
func (o *order) checkOf(img *image.Image) (spec.ReadyCheck, error) {
	hc, err := o.health(img)
	if err != nil {
		return spec.ReadyCheck{}, err
	}
	c, err := spec.ParseReadyCheck(o.Ready, hc)
	if err != nil {
		return spec.ReadyCheck{}, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	return c, nil
}

// health is how the container's health is checked while it runs: as the order says, over the image's check.
func (o *order) health(img *image.Image) (*spec.Health, error) {
	hc, err := ready.ImageHealthcheck(img.Config)
	if err != nil {
		return nil, err
	}
	if hc, err = o.Health.Over(hc); err == nil && o.Health != nil {
		err = hc.Fits()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	return hc, nil
}

// conflict refuses a check that another process of the host would pass.
func (o *order) conflict(c spec.ReadyCheck) error {
	if o.Net != "" && o.Net != engine.NetHost {
		return nil
	}
	return ready.Conflict(c)
}
