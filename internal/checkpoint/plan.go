package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"dewpoint/internal/checkpoint/store"
	"dewpoint/internal/engine"
	"dewpoint/internal/image"
)

// How a container is to start.
const (
	Auto   = "auto"   // from a checkpoint, if one fits and that is faster
	Never  = "never"  // by its command
	Always = "always" // from a checkpoint, or not at all
)

// What a restore is expected to take where that was not measured.
const (
	floor        = 0.15  // seconds: runc, CRIU, namespaces
	carriedFloor = 1.0   // seconds, by an engine that the container carries: docs/design/checkpoints-dmtcp.md
	lazyFloor    = 0.6   // seconds, where memory comes while the processes run
	readRate     = 600e6 // bytes of memory a second, from this node
	fetchRate    = 80e6  // bytes a second, from the PoP's store
	clearly      = 1.25  // by this factor booting has to be slower
	patience     = 5     // times what is expected, a restored container may take to be ready
	leastReady   = 2 * time.Second
)

// stats counts what became of starts.
type stats struct{ restored, failed, unfit, slower atomic.Int64 }

// Stats are counts since the daemon's start.
type Stats struct {
	Restored int64 // containers
	Failed   int64 // restores that failed; the containers booted, or were not to
	Unfit    int64 // containers that booted since no checkpoint of the image fits
	Slower   int64 // containers that booted since that is as fast
}

// Stats returns the counts now.
func (m *Manager) Stats() Stats {
	s := &m.stats
	return Stats{Restored: s.restored.Load(), Failed: s.failed.Load(), Unfit: s.unfit.Load(),
		Slower: s.slower.Load()}
}

// Plan is how one container starts, and what is learnt from that.
type Plan struct {
	m   *Manager
	img *image.Image
	fit Fit
	// carrier is the engine, if the container has to carry it.
	carrier Carrier
	// asked: a checkpoint is to be made when it is ready; slow: if it took long.
	asked, slow bool
	mode        string
	keeps       state // beside its memory
	limit       int64 // of its memory, bytes; 0 is none
	failed      error // why it could not be restored; nil if it was not tried
	// Record is what it starts from; nil boots it.
	Record *store.Record
	Why    string // it boots though there are checkpoints; or must not
	expect float64
	far    bool // its memory takes its time to come
	// outcome is what a restored container has come to, of two that may happen at once.
	outcome atomic.Int32
}

// What a restore may come to.
const (
	open   = iota
	served // it is ready: if its memory is lost later, it is started anew
	lost   // its memory was, before that: it boots instead
)

// Plan decides how a container of s starts. With mode Always an error that
// wraps ErrRestore says why it cannot. A nil Plan knows nothing and boots.
func (m *Manager) Plan(ctx context.Context, s engine.Spec, mode string, asked bool) (*Plan, error) {
	p, err := m.plan(ctx, s, mode, asked)
	if err == nil && mode == Always && p.Record == nil {
		why := p.Why
		if why == "" {
			why = "there is no checkpoint of the image; make one with \"dew checkpoint\""
			if u := m.making.refusal(p.fit.kind()); u != "" {
				why = "there is no checkpoint of the image, the last that was asked for could not be made: " + u
			}
		}
		err = fmt.Errorf("%w: %s", ErrRestore, why)
	}
	return p, err
}

func (m *Manager) plan(ctx context.Context, s engine.Spec, mode string, asked bool) (*Plan, error) {
	p := &Plan{m: m, img: s.Image, mode: mode, limit: s.Memory}
	var all []store.Listed
	if mode != Never {
		all = m.list(ctx, s.Image.Desc.Digest.String())
	}
	m.wants(p, labelsOf(s.Image, s.Labels)[LabelCheckpoint], asked)
	a := m.able.Load()
	if a == nil && (len(all) > 0 || p.asked || mode == Always) {
		var err error
		if a, err = m.probe(ctx); err != nil {
			p.Why = err.Error()
		}
	}
	o, err := m.cfg.Containers.Plan(s)
	if err != nil {
		return p, err
	}
	if a == nil {
		a = &able{}
		all = nil
	}
	p.carrier = a.carrier()
	p.fit = FitOf(s.Image, o, a.Ability, s.Labels)
	p.fit.User = s.User
	if len(all) > 0 {
		p.fit.Contents = contentsOf(o, freeVolumes(s.Image, s.Labels))
	}
	p.keeps = stateOf(s.Image, o, s.Labels)
	p.slow = p.slow && p.keeps == state{}
	if len(unsaved(o)) > 0 {
		p.asked, p.slow = false, false
	}
	if m.choose(ctx, p, all, mode) {
		p.asked, p.slow = false, false
	}
	return p, nil
}

// choose takes the newest checkpoint that fits, and reports whether there is one.
func (m *Manager) choose(ctx context.Context, p *Plan, all []store.Listed, mode string) bool {
	var why []string
	for _, l := range all {
		f, reasons := m.unfit(ctx, p, l)
		if len(reasons) > 0 {
			why = append(why, reasons...)
			continue
		}
		p.expect = m.expected(l)
		boot := m.boot(f, l.Record)
		if p.Why = p.slower(boot); p.Why != "" && mode == Auto && (boot < clearly*floor || !m.again(l.ID)) {
			m.stats.slower.Add(1)
			return true
		}
		p.Record, p.far = &l.Record, !near(l)
		return true
	}
	switch {
	case len(all) > 0:
		m.stats.unfit.Add(1)
		p.Why = noneFits(len(all), why)
	case mode != Never && p.Why == "" && m.cfg.Store.Knows(p.img.Ref.String()):
		m.stats.unfit.Add(1)
		p.Why = "the image is not the one that its checkpoints were made of: it has changed"
	}
	if mode != Never && m.making.underway(p.fit.kind()) {
		p.Why = strings.TrimPrefix(p.Why+"; a checkpoint that fits is still being made", "; ")
	}
	return false
}

// unfit is why a container cannot start from a checkpoint of fit f; nothing if it can.
func (m *Manager) unfit(ctx context.Context, p *Plan, l store.Listed) (f Fit, why []string) {
	f, err := fitIn(l.Record)
	switch {
	case err != nil:
		why = []string{err.Error()}
	case l.Quarantined:
		why = []string{fmt.Sprintf("%s is quarantined after %d failures", shortID(l.ID), l.Failures)}
	default:
		why = f.Why(p.fit)
	}
	if len(why) == 0 {
		why = p.unsafe(f, l.Data.Pages)
	}
	if len(why) == 0 && !m.cfg.Store.HasUpper(ctx, l) {
		why = []string{fmt.Sprintf("the writable layer of %s is not in the PoP's store", shortID(l.ID))}
	}
	return f, why
}

// unsafe is why a container is not to start from a checkpoint of fit f with so many bytes of memory, though
// its processes could.
func (p *Plan) unsafe(f Fit, pages int64) (why []string) {
	const mib = 1 << 20
	if p.limit > 0 && pages > p.limit {
		why = append(why, fmt.Sprintf("its %.1f MiB of memory are more than the limit of %.1f MiB",
			float64(pages)/mib, float64(p.limit)/mib))
	}
	if p.mode == Always {
		return why
	}
	if d := p.keeps.declined(); d != "" {
		why = append(why, d)
	}
	if target := f.uncountable(p.fit); target != "" {
		why = append(why, fmt.Sprintf("what is mounted at %s has too many files to see whether they have changed: only --restore always starts from it", target))
	}
	return why
}

// noneFits says why none of so many checkpoints fits: what several have in common, once.
func noneFits(checkpoints int, why []string) string {
	if checkpoints == 1 {
		return sentence(why)
	}
	times := map[string]int{}
	var once []string
	for _, w := range why {
		if times[w]++; times[w] == 1 {
			once = append(once, w)
		}
	}
	for i, w := range once {
		if times[w] < checkpoints {
			once[i] = fmt.Sprintf("%s (%d)", w, times[w])
		}
	}
	return fmt.Sprintf("none of %d checkpoints fits: %s", checkpoints, sentence(once))
}

// tryEvery is how often what was slow is tried nevertheless: what was measured on
// a busy node does not hold for ever. Before it was measured enough times it is.
const (
	tryEvery = 16
	enough   = 3
)

// again reports whether a checkpoint that would be declined is to be tried once more.
func (m *Manager) again(id string) bool {
	switch n := len(m.boots.sorted(id)); {
	case n == 0:
		return false // nothing was measured
	case n < enough:
		return true
	}
	return m.making.decline(id)%tryEvery == 0
}

// boot is how long booting takes in place of a checkpoint of fit f: here, or where it was made; 0 is unknown.
func (m *Manager) boot(f Fit, r store.Record) float64 {
	if boot := m.boots.median(f.bootKey()); boot > 0 {
		return boot
	}
	return r.Boot
}

// near reports whether a checkpoint's memory comes about as soon as all else of a container is made: what has
// to come from farther away is waited for before.
func near(l store.Listed) bool {
	return l.Local || l.PoP && float64(l.Data.Size) < fetchRate
}

// slower is why restoring is not clearly faster than a boot of so many seconds, 0 being unknown; "" if it is.
func (p *Plan) slower(boot float64) string {
	switch {
	case boot == 0:
		return "how long booting takes is not known: the container has no readiness check"
	case p.expect*clearly > boot:
		return fmt.Sprintf("restoring takes about %.2f s, booting %.2f s", p.expect, boot)
	}
	return ""
}

// expected is what restoring takes here: the shortest that was measured, as the work is always the same, and
// what makes it longer (clones that start at once, others' load) makes booting longer as well.
func (m *Manager) expected(l store.Listed) float64 {
	if all := m.boots.sorted(l.ID); len(all) > 0 {
		return all[0]
	}
	if late, _ := m.lazy(&l.Record); late {
		return lazyFloor
	}
	least := floor
	if m.able.Load().carrier() != nil {
		least = carriedFloor
	}
	t := least + float64(l.Data.Pages)/readRate
	if !l.Local {
		t += float64(l.Data.Size) / fetchRate
	}
	return t
}

// wants finds out whether a checkpoint is to be made of the container; label is its LabelCheckpoint.
func (m *Manager) wants(p *Plan, label string, asked bool) {
	p.asked = asked || label == "auto" && m.cfg.Auto != "manual"
	p.slow = label == "" && m.cfg.Auto == "measured"
}

// slow is how long a boot takes at least for which a checkpoint is made unasked.
const slow = 0.8 // seconds

// Booted records that a container booted, and became ready so many seconds
// after its start; 0 is unknown. If it could not be restored before, that counts against the checkpoint
// now. It reports whether Make is to be called.
func (p *Plan) Booted(ctx context.Context, seconds float64) bool {
	if p == nil || p.fit.Manifest == "" {
		return false
	}
	p.blame(ctx)
	if seconds > 0 {
		if err := p.m.boots.add(p.fit.bootKey(), seconds); err != nil {
			p.m.cfg.Log.Warn("remember how long a start took", "err", err)
		}
	}
	return p.asked || p.slow && seconds > slow
}

// Make makes a checkpoint of the container that has booted, unless another one of
// the same kind is being made. It returns when that is done.
func (p *Plan) Make(ctx context.Context, name string, boot float64) error {
	done, alone := p.m.making.beginAlone(p.fit.kind())
	if !alone {
		return nil
	}
	defer done()
	_, _, err := p.m.Checkpoint(ctx, name, Options{Boot: boot})
	gone := errors.Is(err, engine.ErrNotRunning) || errors.Is(err, engine.ErrNotFound)
	if err != nil && p.asked && !gone && ctx.Err() == nil {
		p.m.making.refuse(p.fit.kind(), err)
		if p.m.cfg.Audience != nil {
			p.m.cfg.Audience.Unmade(name, err)
		}
	}
	return err
}

func fitIn(r store.Record) (Fit, error) {
	var f Fit
	if err := json.Unmarshal(r.Fit, &f); err != nil {
		return f, fmt.Errorf("the record of %s cannot be read: %w", shortID(r.ID), err)
	}
	return f, nil
}

func shortID(id string) string {
	return "checkpoint " + id[:min(12, len(id))]
}

// sentence joins reasons, not too many.
func sentence(why []string) string {
	const most = 4
	if len(why) > most {
		why = append(why[:most:most], fmt.Sprintf("and %d more", len(why)-most))
	}
	return strings.Join(why, "; ")
}
