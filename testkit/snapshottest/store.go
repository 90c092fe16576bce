// Package snapshottest has a store of layers for tests of the snapshotter:
// real files on disk, filled from tars, from blobs or from a registry, and
// failing on command.
package snapshottest

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/containerd/containerd/v2/pkg/archive/compression"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/mount"
	"dewpoint/internal/layer/toc"
	"dewpoint/internal/snapshot"
)

// Store implements snapshot.Layers. Each layer is
// DIR/ALGORITHM-HEX/{data,index,tree}, so that any mount backend can be used.
// It is safe for concurrent use.
type Store struct {
	dir string

	mu     sync.Mutex
	layers map[digest.Digest]mount.Files
	chains map[digest.Digest][]digest.Digest
	fail   map[string]error
	calls  map[string]int
}

var _ snapshot.Layers = (*Store)(nil)

// New returns an empty store in dir, which exists.
func New(dir string) *Store {
	return &Store{
		dir:    dir,
		layers: make(map[digest.Digest]mount.Files),
		chains: make(map[digest.Digest][]digest.Digest),
		fail:   make(map[string]error),
		calls:  make(map[string]int),
	}
}

// Fail makes the method of that name ("Fetch", "Files", "Import", "Chain")
// return err from now on; nil makes it work again.
func (s *Store) Fail(method string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail[method] = err
}

// Calls returns how often the method of that name was called.
func (s *Store) Calls(method string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[method]
}

func (s *Store) called(method string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[method]++
	return s.fail[method]
}

// Add puts an uncompressed tar into the store.
func (s *Store) Add(ctx context.Context, tar io.Reader) (digest.Digest, int64, error) {
	tmp, err := os.MkdirTemp(s.dir, "new-")
	if err != nil {
		return "", 0, err
	}
	defer os.RemoveAll(tmp)
	data, err := os.Create(filepath.Join(tmp, "data"))
	if err != nil {
		return "", 0, err
	}
	defer data.Close()
	hash := sha256.New()
	size, err := io.Copy(io.MultiWriter(data, hash), tar)
	if err != nil {
		return "", 0, err
	}
	id := digest.NewDigest(digest.SHA256, hash)
	implied, err := index(data, size, id, filepath.Join(tmp, "index"))
	if err != nil {
		return "", 0, err
	}
	if err := unpack(ctx, data, filepath.Join(tmp, "tree")); err != nil {
		return "", 0, err
	}
	return id, size, s.install(id, tmp, implied)
}

// index writes the layer's index and returns the directories that it implies.
func index(data *os.File, size int64, id digest.Digest, path string) ([]string, error) {
	table, err := toc.Read(data)
	if err != nil {
		return nil, err
	}
	tree, err := table.Tree()
	if err != nil {
		return nil, err
	}
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	o := erofs.Options{UUID: erofs.UUID(id.String()), DataSize: size, Data: data}
	if err := erofs.Write(f, tree, o); err != nil {
		return nil, err
	}
	root := func(name string) bool { return name == "" }
	return slices.DeleteFunc(tree.Implied(), root), f.Close()
}

func unpack(ctx context.Context, data *os.File, tree string) error {
	if _, err := data.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if err := os.Mkdir(tree, 0o755); err != nil {
		return err
	}
	_, err := archive.Apply(ctx, tree, data, archive.WithConvertWhiteout(archive.OverlayConvertWhiteout))
	return err
}

func (s *Store) install(id digest.Digest, tmp string, implied []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.layers[id]; ok {
		return nil
	}
	dir := filepath.Join(s.dir, id.Algorithm().String()+"-"+id.Encoded())
	if err := os.Rename(tmp, dir); err != nil {
		return err
	}
	f := FilesIn(dir)
	f.Implied = implied
	s.layers[id] = f
	return nil
}

// FilesIn is where a layer lies whose directory is dir and that implies none.
func FilesIn(dir string) mount.Files {
	return mount.Files{
		Index: filepath.Join(dir, "index"), Data: filepath.Join(dir, "data"), Tree: filepath.Join(dir, "tree"),
	}
}

// AddChain makes the chains of these layers, bottom first, known, and returns
// the topmost.
func (s *Store) AddChain(ids ...digest.Digest) digest.Digest {
	s.mu.Lock()
	defer s.mu.Unlock()
	var top digest.Digest
	for i := range ids {
		top = identity.ChainID(ids[:i+1])
		s.chains[top] = append([]digest.Digest(nil), ids[:i+1]...)
	}
	return top
}

// Forget removes a layer's files.
func (s *Store) Forget(id digest.Digest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok := s.layers[id]
	if !ok {
		return nil
	}
	delete(s.layers, id)
	return os.RemoveAll(filepath.Dir(f.Data))
}

// Chain implements snapshot.Layers.
func (s *Store) Chain(_ context.Context, chain digest.Digest) ([]digest.Digest, error) {
	if err := s.called("Chain"); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	ids, ok := s.chains[chain]
	for _, id := range ids {
		if _, here := s.layers[id]; !here {
			ok = false
		}
	}
	if !ok {
		return nil, fmt.Errorf("chain %s: %w", chain, snapshot.ErrNotHere)
	}
	return ids, nil
}

// Files implements snapshot.Layers.
// HasLayer implements snapshot.Layers.
func (s *Store) HasLayer(id digest.Digest) bool {
	_, err := s.Files(id)
	return err == nil
}

func (s *Store) Files(id digest.Digest) (mount.Files, error) {
	if err := s.called("Files"); err != nil {
		return mount.Files{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok := s.layers[id]
	if !ok {
		return f, fmt.Errorf("layer %s: %w", id, snapshot.ErrNotHere)
	}
	return f, nil
}

// Fetch implements snapshot.Layers: it pulls the layer over plain HTTP.
func (s *Store) Fetch(ctx context.Context, w snapshot.Want) (digest.Digest, error) {
	if err := s.called("Fetch"); err != nil {
		return "", err
	}
	ref, err := name.ParseReference(w.Ref, name.Insecure)
	if err != nil {
		return "", err
	}
	l, err := remote.Layer(ref.Context().Digest(w.Layer.String()), remote.WithContext(ctx))
	if err != nil {
		return "", err
	}
	tar, err := l.Uncompressed()
	if err != nil {
		return "", err
	}
	defer tar.Close()
	id, _, err := s.Add(ctx, tar)
	return id, err
}

// Import implements snapshot.Layers.
func (s *Store) Import(ctx context.Context, desc ocispec.Descriptor, blob io.Reader) (digest.Digest, int64,
	error) {
	if err := s.called("Import"); err != nil {
		return "", 0, err
	}
	verifier := desc.Digest.Verifier()
	blob = io.TeeReader(blob, verifier)
	tar, err := compression.DecompressStream(blob)
	if err != nil {
		return "", 0, err
	}
	defer tar.Close()
	id, size, err := s.Add(ctx, tar)
	if err != nil {
		return "", 0, err
	}
	if _, err := io.Copy(io.Discard, blob); err != nil {
		return "", 0, err
	}
	if !verifier.Verified() {
		return "", 0, fmt.Errorf("blob is not %s", desc.Digest)
	}
	return id, size, nil
}

// Put makes a layer known that lies somewhere already.
func (s *Store) Put(id digest.Digest, f mount.Files) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.layers[id] = f
}
