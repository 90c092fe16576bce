package pop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// verifier compares what is in the store with what was published.
type verifier struct {
	*layout
	records *records

	mu    sync.Mutex
	lacks map[string]absence // layers, by the names of their files, of which some are missing
}

// Verify reads a layer and its table, and compares them with what was published, at most rate
// bytes a second; 0 is as fast as it goes. It returns an error that wraps ErrDamaged if they differ,
// ErrUnknown if the layer has left the store meanwhile. What is not there wraps ErrMissing, until this node
// has seen it missing for StoreConfig.Forget; then ErrDamaged.
func (vf *verifier) Verify(ctx context.Context, l *Layer, rate int64) error {
	err := vf.compare(ctx, l, rate)
	if !errors.Is(err, ErrUnknown) && !errors.Is(err, fs.ErrNotExist) {
		if err == nil || errors.Is(err, ErrDamaged) {
			vf.complete(l)
		}
		return err
	}
	if now, rerr := vf.records.record(ctx, l.DiffID); rerr != nil || now.Name != l.Name {
		vf.complete(l)
		return fmt.Errorf("layer %s: %w", l.DiffID, errors.Join(ErrUnknown, unlessUnknown(rerr)))
	}
	if vf.lacking(l) < vf.cfg.Forget {
		return fmt.Errorf("layer %s: %w", l.DiffID, ErrMissing)
	}
	return fmt.Errorf("layer %s: %w: %w", l.DiffID, err, ErrDamaged)
}

// absence is what this node has seen of files that were missing.
type absence struct{ first, last time.Time }

// lacking notes that files of a layer are missing, and returns for how long they have been. They were there
// in between if that was not seen for StoreConfig.Forget.
func (vf *verifier) lacking(l *Layer) time.Duration {
	vf.mu.Lock()
	defer vf.mu.Unlock()
	a, now := vf.lacks[l.Name], time.Now()
	if now.Sub(a.last) > vf.cfg.Forget {
		a.first = now
	}
	a.last = now
	vf.lacks[l.Name] = a
	return now.Sub(a.first)
}

// complete notes that no files of a layer are missing, or that it is none any more.
func (vf *verifier) complete(l *Layer) {
	vf.mu.Lock()
	defer vf.mu.Unlock()
	delete(vf.lacks, l.Name)
}

func (vf *verifier) compare(ctx context.Context, l *Layer, rate int64) error {
	if _, err := vf.records.Table(ctx, l); err != nil {
		return err
	}
	f, err := vf.cfg.FS.Open(ctx, l.data())
	if err != nil {
		return err
	}
	defer f.Close()
	if rate > 0 {
		return l.verify(ctx, paced{ctx, f, rate})
	}
	return l.verify(ctx, f)
}

// paced gives at most rate bytes a second, in the mean of each read.
type paced struct {
	ctx  context.Context
	r    io.ReaderAt
	rate int64
}

func (p paced) ReadAt(b []byte, off int64) (int, error) {
	n, err := p.r.ReadAt(b, off)
	select {
	case <-time.After(time.Duration(n) * time.Second / time.Duration(p.rate)):
	case <-p.ctx.Done():
		return 0, context.Cause(p.ctx)
	}
	return n, err
}

// Verification says when a layer was verified last.
type Verification struct {
	Node string `json:"node"` // whose clock it is
	At   int64  `json:"at"`   // seconds since 1970
	Name string `json:"name"` // of the files, see Layer
}

const verifiedDir = "verified"

func verificationOf(id digest.Digest) string { return path.Join(verifiedDir, id.Encoded()) }

// NoteVerified records that this node has found a layer to be right, or has seen
// it for the first time.
func (vf *verifier) NoteVerified(ctx context.Context, l *Layer) error {
	b, err := json.Marshal(Verification{Node: vf.cfg.Node, At: time.Now().Unix(), Name: l.Name})
	if err != nil {
		return err
	}
	if err := vf.cfg.FS.Mkdir(ctx, verifiedDir); err != nil { // stores of an earlier version have none
		return err
	}
	return vf.cfg.FS.WriteFile(ctx, verificationOf(l.DiffID), b)
}

// Verified returns what is noted of a layer, or an error that wraps ErrUnknown.
func (vf *verifier) Verified(ctx context.Context, l *Layer) (Verification, error) {
	var v Verification
	b, err := vf.cfg.FS.ReadFile(ctx, verificationOf(l.DiffID))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return v, err
	}
	if err != nil || json.Unmarshal(b, &v) != nil || v.Name != l.Name {
		return Verification{}, fmt.Errorf("verification of layer %s: %w", l.DiffID, ErrUnknown)
	}
	return v, nil
}
