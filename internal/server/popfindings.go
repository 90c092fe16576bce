package server

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/member"
	"dewpoint/internal/spec"
)

// findings says whether this node has what it shares with others.
func (s *pops) findings(ctx context.Context) []spec.Finding {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	p, err := s.member.Status(ctx)
	if p == nil {
		return nil
	}
	if err != nil {
		s.log.Debug("the PoP's findings lack something", "err", err)
	}
	out := []spec.Finding{s.coordinatorFinding(p)}
	if p.Shared {
		out = append(out, s.writable(ctx, storeFinding(p)))
	}
	if s.cfg.Redis != "" {
		out = append(out, peerFinding(s.cfg.Listen))
	}
	out = append(out, s.refusals(ctx, p)...)
	out = append(append(out, twinFindings(p)...), apartFindings(p)...)
	return append(out, silentFindings(p)...)
}

// apartFindings names nodes that share another store than this one.
func apartFindings(p *member.Status) []spec.Finding {
	var out []spec.Finding
	for _, m := range apart(p) {
		out = append(out, spec.Finding{What: "PoP node " + m.Node, Level: spec.LevelBad,
			Detail: fmt.Sprintf("it has another store, %s, than this node, %s: they do not share what they fetch",
				m.Store, p.Store),
			Remedy: "see on both that the PoP's file system is mounted at pop.store (findmnt); where it was not, stop dewd, mount it and remove pop.store in dewd's root"})
	}
	return out
}

// apart are the nodes that have another store than this one, which has one.
func apart(p *member.Status) []pop.Member {
	return slices.DeleteFunc(slices.Clone(p.Members), func(m pop.Member) bool {
		return p.Store == "" || m.Store == "" || m.Store == p.Store
	})
}

// refusals names nodes that say where they can be asked, and cannot be.
func (s *pops) refusals(ctx context.Context, p *member.Status) []spec.Finding {
	if s.peers == nil {
		return nil
	}
	why := make([]error, len(p.Members))
	var all sync.WaitGroup
	for i, m := range p.Members {
		if m.Node != p.Node && m.Address != "" {
			all.Go(func() { why[i] = s.peers.Try(ctx, m.Address) })
		}
	}
	all.Wait()
	var out []spec.Finding
	for i, m := range p.Members {
		if why[i] != nil {
			out = append(out, spec.Finding{What: "PoP node " + m.Node, Level: spec.LevelBad,
				Detail: "cannot be asked: " + oneLine(why[i]),
				Remedy: "see that it can be reached from here at " + m.Address +
					", its pop.listen, and that both have the same pop.key, or certificates of one pop.ca"})
		}
	}
	return out
}

// twinFindings names nodes that cannot be told apart.
func twinFindings(p *member.Status) []spec.Finding {
	var out []spec.Finding
	for _, m := range p.Members {
		if m.Twin != "" {
			out = append(out, spec.Finding{What: "PoP node " + m.Node, Level: spec.LevelBad,
				Detail: fmt.Sprintf("two machines have this name: those at %s and %s", m.Address, m.Twin),
				Remedy: takenRemedy})
		}
	}
	return out
}

func (s *pops) coordinatorFinding(p *member.Status) spec.Finding {
	f := spec.Finding{What: "PoP coordinator", Level: spec.LevelOK,
		Detail: fmt.Sprintf("%s answers, %d nodes", s.coordinatorKind(), len(p.Members))}
	switch {
	case p.Lost != nil:
		f.Level, f.Detail, f.Remedy = spec.LevelBad, p.Lost.Error(), redisRemedy
	case !p.Settled:
		f.Level, f.Detail = spec.LevelNote,
			"it has lost its memory a moment ago, or is new: nothing is evicted for a lease period"
	}
	return f
}

func storeFinding(p *member.Status) spec.Finding {
	if p.Away != nil {
		f := spec.Finding{What: "PoP store", Level: spec.LevelBad, Detail: oneLine(p.Away), Remedy: storeRemedy}
		switch {
		case errors.Is(p.Away, pop.ErrTaken):
			f.Remedy = takenRemedy
		case errors.Is(p.Away, pop.ErrNotStore):
			f.Remedy = notStoreRemedy
		}
		return f
	}
	return spec.Finding{What: "PoP store", Level: spec.LevelOK,
		Detail: fmt.Sprintf("%s answers, %d layers", p.Path, len(p.Layers))}
}

// writable makes it bad that a store which answers takes nothing: it is full, or may be read only.
func (s *pops) writable(ctx context.Context, f spec.Finding) spec.Finding {
	if f.Level != spec.LevelOK {
		return f
	}
	name := "nodes/.doctor." + rand.Text()[:8]
	err := s.dir.WriteFile(ctx, name, make([]byte, 64<<10))
	if err == nil {
		err = s.dir.Remove(ctx, name)
	}
	if err != nil {
		f.Level, f.Detail, f.Remedy = spec.LevelBad, "it takes nothing: "+oneLine(err), fullRemedy
	}
	return f
}

// peerFinding says whether other nodes can ask this one.
func peerFinding(listen string) spec.Finding {
	f := spec.Finding{What: "PoP peers", Level: spec.LevelOK,
		Detail: "other nodes ask this one at " + listen}
	host, _, err := net.SplitHostPort(listen)
	ip := net.ParseIP(host)
	switch {
	case listen == "":
		f.Level, f.Detail = spec.LevelNote,
			"other nodes cannot ask this one: they wait for what it fetches until it is in the store"
		f.Remedy = "give pop.listen, and pop.key (\"dew pop key FILE\" makes one, for all nodes)"
	case err != nil:
		f.Level, f.Detail, f.Remedy = spec.LevelBad, err.Error(), "give pop.listen as HOST:PORT"
	case host == "" || ip != nil && ip.IsUnspecified():
		f.Level, f.Detail = spec.LevelBad,
			fmt.Sprintf("%q says to other nodes no address of this one", listen)
		f.Remedy = "give pop.listen the address at which the other nodes reach this one"
	}
	return f
}

// silentLong is how long a node with marks may be silent without being mentioned.
const silentLong = 2 * time.Minute

// silentFindings names nodes that keep layers from being evicted and give no
// sign of life.
func silentFindings(p *member.Status) []spec.Finding {
	var out []spec.Finding
	for _, n := range p.Silent {
		lives := slices.ContainsFunc(p.Members, func(m pop.Member) bool { return m.Node == n.Node })
		if lives || n.For < silentLong {
			continue
		}
		out = append(out, spec.Finding{What: "PoP node " + n.Node, Level: spec.LevelNote,
			Detail: fmt.Sprintf("silent for %v at least; %d layers stay in the store, since it may use them",
				n.For.Round(time.Second), n.References),
			Remedy: fmt.Sprintf("if it is gone for good: \"dew pop forget %s\"", n.Node)})
	}
	return out
}
