package cli

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"dewpoint/internal/api"
	"dewpoint/internal/pop/peer"
	"dewpoint/internal/spec"
)

func popFlags(c *call) {
	c.flags.BoolVar(&c.opt.layers, "layers", false,
		"status: list the layers of the store, and which nodes use them")
}

// pops does dew pop status, verify, forget and key.
func pops(ctx context.Context, c *call) error {
	verbs := map[string]func(context.Context, *call) error{"status": popStatus, "verify": popVerify,
		"forget": popForget, "key": popKey}
	if len(c.args) == 0 || verbs[c.args[0]] == nil {
		return misuse(c, "say what to do: status, verify, forget or key")
	}
	verb := c.args[0]
	c.args = c.args[1:]
	if verb != "status" && c.opt.layers {
		return misuse(c, "--layers is for pop status")
	}
	ctx, stop := interruptible(ctx)
	defer stop()
	return verbs[verb](ctx, c)
}

func popStatus(ctx context.Context, c *call) error {
	if err := c.none(); err != nil {
		return err
	}
	p, err := c.client.PoPStatus(ctx)
	if err != nil {
		return err
	}
	if c.json {
		return c.print(p)
	}
	w := c.cfg.Stdout
	fmt.Fprintf(w, "PoP %s, seen from %s\n", p.Name, p.Node)
	fmt.Fprintf(w, "store        %s\n", storeLine(p))
	for _, q := range p.Store.Quotas {
		fmt.Fprintf(w, "quota        %s of %s for %s\n", size(q.Bytes), size(q.Most), q.Prefix)
	}
	fmt.Fprintf(w, "coordinator  %s\n\n", coordinatorLine(p.Coordinator))
	if err := popNodes(w, p.Nodes); err != nil {
		return err
	}
	popFetching(w, p.Nodes)
	if c.opt.layers {
		return popLayers(w, p.Layers)
	}
	return nil
}

func storeLine(p spec.PoP) string {
	s := p.Store
	switch s.State {
	case spec.PoPNone:
		return "none: the nodes ask each other"
	case spec.PoPAway:
		return strings.TrimSpace(s.Path + " away: " + s.Why)
	}
	line := fmt.Sprintf("%s ok, %d layers of %s, %s of %s free", s.Path, len(p.Layers),
		sizeOf(s.Bytes, s.Capacity), size(s.Free), size(s.Total))
	if s.Trash > 0 {
		line += fmt.Sprintf(", %s about to be deleted", size(s.Trash))
	}
	line += ", " + s.ID
	if s.Why != "" {
		line += "; " + s.Why
	}
	return line
}

func coordinatorLine(k spec.PoPCoordinator) string {
	switch k.State {
	case spec.PoPAway:
		return k.Kind + " away: " + k.Why
	case spec.PoPUnsettled:
		return k.Kind + " is new, or has lost its memory a moment ago: nothing is evicted until all nodes have told it what they use"
	}
	return k.Kind + " ok"
}

func popNodes(w io.Writer, nodes []spec.PoPNode) error {
	var rows [][]string
	for _, n := range nodes {
		layers := n.Local.Layers + n.Store.Layers + n.Peer.Layers + n.Registry.Layers
		bytes := n.Local.Bytes + n.Store.Bytes + n.Peer.Bytes + n.Registry.Bytes
		rows = append(rows, []string{n.Name, dash(n.Address), sizeOf(n.Cache, n.Capacity),
			strconv.FormatInt(layers, 10), size(bytes),
			shares(n.Local, layers, bytes), shares(n.Store, layers, bytes), shares(n.Peer, layers, bytes),
			shares(n.Registry, layers, bytes)})
	}
	return table(w, "NODE ADDRESS CACHE LAYERS BYTES LOCAL STORE PEER REGISTRY", rows)
}

// sizeOf is a size and its bound, if that is known.
func sizeOf(n, most int64) string {
	if most == 0 {
		return size(n)
	}
	return size(n) + "/" + size(most)
}

// shares are a source's parts of a node's layers and of their bytes.
func shares(h spec.PoPHits, layers, bytes int64) string {
	return share(h.Layers, layers) + "/" + share(h.Bytes, bytes)
}

func share(part, whole int64) string {
	if whole == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", 100*float64(part)/float64(whole))
}

func popFetching(w io.Writer, nodes []spec.PoPNode) {
	for _, n := range nodes {
		for _, f := range n.Fetching {
			fmt.Fprintf(w, "%s fetches %s, %s of %s\n", n.Name, short(f.Layer), size(f.Done), size(f.Size))
		}
	}
}

func popLayers(w io.Writer, layers []spec.PoPLayer) error {
	var rows [][]string
	for _, l := range layers {
		rows = append(rows, []string{l.DiffID, size(l.Size), dash(printable(l.Image)),
			dash(strings.Join(l.Users, ","))})
	}
	fmt.Fprintln(w)
	return table(w, "LAYER SIZE IMAGE USED-BY", rows)
}

// popVerify fails if something was damaged, though it was replaced.
func popVerify(ctx context.Context, c *call) error {
	var whole, bad int
	err := c.client.PoPVerify(ctx, c.args, func(v spec.PoPVerified) error {
		switch v.State {
		case spec.PoPWhole:
			whole++
		case spec.PoPDamaged, spec.PoPReplaced:
			bad++
		}
		if c.json {
			return c.print(v)
		}
		words := []string{v.DiffID, v.State}
		if v.Error != "" {
			words = append(words, printable(v.Error))
		}
		_, err := fmt.Fprintln(c.cfg.Stdout, strings.Join(words, " "))
		return err
	})
	if err != nil {
		return err
	}
	if bad > 0 {
		e := api.New(api.Mismatch, fmt.Sprintf("%d of %d layers were damaged", bad, bad+whole))
		e.Remedy = "what was replaced is right again, the rest is fetched when it is wanted; look at the disks of the store"
		return e
	}
	return nil
}

func popForget(ctx context.Context, c *call) error {
	name, err := c.one("node")
	if err != nil {
		return err
	}
	return c.client.PoPForget(ctx, name)
}

// popKey needs no daemon.
func popKey(_ context.Context, c *call) error {
	path, err := c.one("file")
	if err != nil {
		return err
	}
	return peer.NewKey(path)
}
