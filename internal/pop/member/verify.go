package member

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"dewpoint/internal/layer"
	"dewpoint/internal/pop"

	"github.com/opencontainers/go-digest"
)

const (
	verifyLease = "verify"
	// verifyRate is how fast layers are read in the background, bytes a second:
	// five terabytes in a week.
	verifyRate = 8 << 20
	// between two looks for layers that are due, at least: each reads a note for each layer
	verifyLook = time.Minute
	// replaceTime is how long a damaged layer may take to come anew.
	replaceTime = time.Hour
)

// verifier looks for layers of the store that are not what was published, and replaces them.
type verifier struct {
	*common

	mu      sync.Mutex
	mending map[digest.Digest]bool     // layers that are being replaced
	noted   map[digest.Digest]sighting // of what other nodes have verified
}

// Verified is what the verification of a layer has found.
type Verified struct {
	DiffID   digest.Digest
	Image    string // that it was fetched for first
	Size     int64
	Damage   error // unless nil, it was damaged, and was taken out
	Replaced bool  // and is there anew
	Gone     bool  // it has left the store meanwhile
}

// Verify reads layers of the PoP's store, all if none is named, and compares
// them with what was published. What is damaged is taken out, and replaced if this node has the layer
// or uses it. found is called for each layer, one call at a time; an error of it
// ends the verification.
func (s *Member) Verify(ctx context.Context, ids []digest.Digest, found func(Verified) error) error {
	st, err := s.needStore()
	if err != nil {
		return err
	}
	broken, err := st.Broken(ctx)
	if err != nil {
		return err
	}
	for _, id := range broken {
		if len(ids) > 0 && !slices.Contains(ids, id) {
			continue
		}
		if err := found(s.mend(ctx, st, id)); err != nil {
			return err
		}
	}
	layers, err := s.toVerify(ctx, st, ids, broken)
	if err != nil {
		return err
	}
	var missing error // told in the end: it is not known yet to be lost
	for _, l := range layers {
		v, err := s.verify(ctx, st, l, 0)
		if errors.Is(err, pop.ErrMissing) {
			missing = errors.Join(missing, err)
			continue
		}
		if err == nil {
			err = found(v)
		}
		if err != nil {
			return err
		}
	}
	return missing
}

// toVerify are the records of the layers that are named, or of all.
func (s *verifier) toVerify(ctx context.Context, st *pop.Store, ids, broken []digest.Digest) ([]*pop.Layer,
	error) {
	if len(ids) == 0 {
		layers, err := st.Objects(ctx)
		if len(layers) > 0 || errors.Is(err, pop.ErrDamaged) { // what cannot be read was told of
			err = nil
		}
		return layers, err
	}
	var layers []*pop.Layer
	for _, id := range ids {
		if slices.Contains(broken, id) {
			continue
		}
		l, err := st.Record(ctx, id)
		if err != nil {
			return nil, err
		}
		layers = append(layers, l)
	}
	return layers, nil
}

// verify verifies one layer. The error says why that was not possible.
func (s *verifier) verify(ctx context.Context, st *pop.Store, l *pop.Layer, rate int64) (Verified, error) {
	v := Verified{DiffID: l.DiffID, Image: l.Image, Size: l.Size}
	err := st.Verify(ctx, l, rate)
	switch {
	case errors.Is(err, pop.ErrDamaged):
		v.Damage = err
		s.quarantine(ctx, st, l, err)
		v.Replaced = s.replace(ctx, l.DiffID)
	case errors.Is(err, pop.ErrUnknown):
		v.Gone = true
		return v, nil
	case err != nil:
		return v, err
	default:
		if err := st.NoteVerified(ctx, l); err != nil {
			s.log.Debug("a verification is not noted", "layer", l.DiffID, "err", err)
		}
	}
	s.stats.verified.Add(1)
	return v, nil
}

// mend removes a record that cannot be understood, and replaces the layer.
func (s *verifier) mend(ctx context.Context, st *pop.Store, id digest.Digest) Verified {
	v := Verified{DiffID: id, Damage: fmt.Errorf("the record of layer %s: %w", id, pop.ErrDamaged)}
	s.report(id, st.Mend(ctx, id), v.Damage)
	v.Replaced = s.replace(ctx, id)
	return v
}

// quarantine takes a damaged layer out of sight.
func (s *verifier) quarantine(ctx context.Context, st *pop.Store, rec *pop.Layer, why error) {
	s.report(rec.DiffID, st.Quarantine(ctx, rec), why)
}

// report tells of a damaged layer, and that err kept it from being taken out.
func (s *verifier) report(id digest.Digest, err, why error) {
	s.log.Error("a layer in the PoP's store is damaged: it is taken out", "layer", id, "err", why)
	if err != nil {
		s.log.Error("it could not be taken out", "layer", id, "err", err)
	}
	s.stats.damaged.Add(1)
	s.cfg.Audience.Damaged(id, why)
}

// taken lets go of a layer that has left the store though it is attached here, and brings it again: another
// node has found it damaged, or did not see that it is in use.
func (s *verifier) taken(id digest.Digest, damaged bool) {
	l, err := s.layers.Peek(id)
	if err != nil || l.At == "" {
		return
	}
	s.work.Go(func() {
		switch {
		case s.prewarmer.takeBack(s.life, id):
		case damaged:
			s.replace(s.life, id)
		default:
			s.again(s.life, id,
				"a layer has left the PoP's store, though this node used it: it comes anew for containers that start from here on")
		}
	})
}

// lost tells of what was damaged in the store, and is not there any more.
func (s *verifier) lost(id digest.Digest) {
	s.cfg.Audience.Lost(id)
}

// replace puts a layer into the store again that was damaged there, if this node
// has it, or uses it. It reports whether it is there.
func (s *verifier) replace(ctx context.Context, id digest.Digest) bool {
	s.lost(id)
	if !s.again(ctx, id,
		"a layer has left the PoP's store, since it was damaged: containers that run with it may have read wrong bytes; it comes anew for those that start from here on") {
		return false
	}
	s.log.Info("a damaged layer of the PoP's store was replaced", "layer", id)
	s.stats.replaced.Add(1)
	s.cfg.Audience.Replaced(id)
	return true
}

// again lets go of a layer that has left the store, and puts it there again if this node has it, or uses
// it. It reports whether it is there. lost is said of one that is used here.
func (s *verifier) again(ctx context.Context, id digest.Digest, lost string) bool {
	if !s.begins(id) {
		return false
	}
	defer s.ends(id)
	ctx, cancel := context.WithTimeout(ctx, replaceTime)
	defer cancel()
	wanted := s.letGo(ctx, id, lost)
	have, err := s.layers.Peek(id)
	if wanted && err != nil {
		have, err = s.anew(ctx, id)
	}
	if err == nil {
		err = s.uploads.republish(ctx, have)
	}
	switch {
	case errors.Is(err, layer.ErrUnknown):
		return false // who wants it next fetches it
	case err != nil:
		s.log.Error("a layer that has left the PoP's store is not there again", "layer", id, "err", err)
		return false
	}
	if wanted {
		s.node.Remount(id) // what starts from here on mounts it anew
	}
	return true
}

// begins reports whether nobody else here replaces the layer; ends must follow.
func (s *verifier) begins(id digest.Digest) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mending[id] {
		return false
	}
	s.mending[id] = true
	return true
}

func (s *verifier) ends(id digest.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mending, id)
}

// letGo forgets a layer that was attached and is not there any more, or in other files, says say, and reports
// whether it did. Containers that stand on it go on with the files that they have.
func (s *verifier) letGo(ctx context.Context, id digest.Digest, say string) bool {
	st := s.usable()
	if st == nil {
		return false
	}
	defer s.lock(id)()
	l, err := s.layers.Peek(id)
	if err != nil || l.At == "" {
		return err == nil
	}
	rec, err := st.Record(ctx, id)
	if err == nil && s.cfg.Dir.Path(rec.Data()) == l.At || err != nil && !errors.Is(err, pop.ErrUnknown) {
		return false
	}
	s.log.Warn(say, "layer", id, "images", s.imagesWith(id))
	if err := s.attacher.Detach(id); err != nil {
		s.log.Warn("detach layer", "layer", id, "err", err)
		return false
	}
	s.cfg.Audience.LetGo(id, say)
	return true
}

func (s *common) imagesWith(id digest.Digest) []string {
	var names []string
	for _, img := range s.catalog.WithLayer(id) {
		names = append(names, img.Ref.String())
	}
	return names
}

// anew fetches a layer as a deployment would: with its lease, or from who has it.
func (s *verifier) anew(ctx context.Context, id digest.Digest) (*layer.Layer, error) {
	err := fmt.Errorf("layer %s: no image here has it: %w", id, layer.ErrUnknown)
	for _, img := range s.catalog.WithLayer(id) {
		var have *layer.Layer
		have, err = s.node.Refill(ctx, img, id)
		if err == nil || ctx.Err() != nil {
			return have, err
		}
	}
	return nil, err
}

// republish puts a layer of this node's own into the store, unless it is there.
func (s *uploads) republish(ctx context.Context, have *layer.Layer) error {
	st := s.usable()
	if st == nil {
		return pop.ErrStoreAway
	}
	for {
		if st.HasLayer(ctx, have.DiffID) {
			return nil
		}
		if have.At != "" || have.Tree {
			return fmt.Errorf("layer %s is not kept here: %w", have.DiffID, layer.ErrUnknown)
		}
		if err := st.Room(ctx, have.Size); err != nil {
			return err
		}
		lease, err := s.routes.acquire(ctx, have.DiffID)
		if err == nil {
			err = s.copyWhole(ctx, st, have, lease.Token())
			return errors.Join(err, lease.Release(context.WithoutCancel(ctx)))
		}
		var held *pop.HeldError
		if !errors.As(err, &held) {
			return err
		}
		if err := s.awaitChange(ctx, time.Second); err != nil { // its holder publishes it
			return err
		}
	}
}

// copyWhole publishes a layer that is complete here, if its bytes are still what
// its name says.
func (s *uploads) copyWhole(ctx context.Context, st *pop.Store, have *layer.Layer, token uint64) error {
	f, err := os.Open(have.Files().Data)
	if err != nil {
		return err
	}
	defer f.Close()
	table, err := tableOf(f, have.Size)
	if err != nil {
		return err
	}
	draft, err := st.Draft(ctx, have.DiffID, token)
	if err != nil {
		return err
	}
	h := sha256.New()
	_, err = io.CopyBuffer(io.MultiWriter(draft, h), struct{ io.Reader }{io.NewSectionReader(f, 0, have.Size)},
		make([]byte, 256<<10))
	if err == nil && digest.NewDigest(digest.SHA256, h) != have.DiffID {
		err = fmt.Errorf("this node's copy of layer %s is damaged too: %w", have.DiffID, layer.ErrMismatch)
	}
	if err != nil {
		return errors.Join(err, draft.Abandon(context.WithoutCancel(ctx)))
	}
	rec := pop.Layer{DiffID: have.DiffID, Size: have.Size, Blob: have.Blob, BlobSize: have.BlobSz}
	if names := s.imagesWith(have.DiffID); len(names) > 0 {
		rec.Image = names[0]
	}
	return errors.Join(draft.Publish(ctx, rec, table), draft.Close())
}

// VerifyInBackground verifies every layer of the store once in Config.Verify,
// one at a time in the whole PoP, slowly, and while the coordinator is there, until ctx ends.
func (s *verifier) VerifyInBackground(ctx context.Context) {
	if s.cfg.Dir == nil || s.cfg.Verify <= 0 {
		return
	}
	tick := time.NewTicker(min(max(verifyLook, s.cfg.Verify/200), s.cfg.Verify))
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if err := s.verifyDue(ctx); err != nil && ctx.Err() == nil {
				s.log.Debug("verification of the PoP's store", "err", err)
			}
		case <-ctx.Done():
			return
		}
	}
}

// verifyDue verifies the layers that are due, if no other node does so.
func (s *verifier) verifyDue(ctx context.Context) error {
	st := s.usable()
	if st == nil {
		return nil
	}
	if ok, err := s.cfg.Coord.Settled(ctx); err != nil || !ok {
		return err
	}
	lease, err := s.cfg.Coord.Acquire(ctx, verifyLease, 0)
	if err != nil {
		return err
	}
	defer lease.Release(context.WithoutCancel(ctx))
	if broken, err := st.Broken(ctx); err == nil {
		for _, id := range broken {
			s.mend(ctx, st, id)
		}
	}
	layers, err := st.Objects(ctx)
	for _, l := range layers {
		select {
		case <-lease.Lost():
			return pop.ErrAway
		case <-ctx.Done():
			return context.Cause(ctx)
		default:
		}
		if s.due(ctx, st, l) {
			_, verr := s.verify(ctx, st, l, verifyRate)
			if errors.Is(verr, pop.ErrMissing) {
				s.log.Warn("a layer of the PoP's store cannot be verified", "layer", l.DiffID, "err", verr)
				continue
			}
			if verr != nil {
				return verr
			}
		}
	}
	return err
}

// due reports whether the time since a layer was verified is over. Each node measures it by its own
// clock: of what another one has verified, from when this one saw that first. A layer
// that nobody has verified yet was verified when it was published: its time begins.
func (s *verifier) due(ctx context.Context, st *pop.Store, l *pop.Layer) bool {
	v, err := st.Verified(ctx, l)
	if errors.Is(err, pop.ErrUnknown) {
		if err := st.NoteVerified(ctx, l); err != nil {
			s.log.Debug("a verification is not noted", "layer", l.DiffID, "err", err)
		}
		return false
	}
	if err != nil {
		return false
	}
	if v.Node == s.cfg.Node {
		since := time.Since(time.Unix(v.At, 0))
		return since < -time.Minute || since >= s.cfg.Verify // a clock that went back says nothing
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	seen, ok := s.noted[l.DiffID]
	if !ok || seen.what != v {
		s.noted[l.DiffID] = sighting{v, time.Now()}
		return false
	}
	return time.Since(seen.at) >= s.cfg.Verify
}
