package registrytest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"dewpoint/internal/image"
)

// Layer is a layer to push: a tar, and how to pack it.
type Layer struct {
	Tar         []byte            // the tar, or
	Path        string            // the file that holds it, read as a stream
	Compression image.Compression // "" is image.Gzip
	Level       int               // of the compressor; 0 is its default
	// MemberSize starts a new gzip member or zstd frame after each so many
	// bytes of the tar. 0 makes one.
	MemberSize int64
	// MediaType is what the manifest calls the layer; "" is the right one.
	MediaType string
	// DiffID is what the config says the tar hashes to; "" is the truth.
	DiffID digest.Digest
}

// Options shape an image. The zero value is an OCI image for linux on this
// machine's architecture.
type Options struct {
	Docker   bool                // Docker schema 2 media types
	Platform ocispec.Platform    // zero is linux on this machine's architecture
	Config   ocispec.ImageConfig // entrypoint, environment and so on
	Health   any                 // Docker's Healthcheck in it; nil is none
}

// Pushed is an image, or an index, in the registry.
type Pushed struct {
	Ref      string // HOST/REPOSITORY:TAG
	ByDigest string // HOST/REPOSITORY@DIGEST
	Digest   digest.Digest
	Desc     ocispec.Descriptor // of the document that Ref names
	Config   digest.Digest      // of an image
	Layers   []image.Layer      // of an image, bottom first
	Images   []Pushed           // of an index, in its order; Ref is unset
}

// PushImage stores an image under ref, REPOSITORY:TAG or REPOSITORY alone.
func (s *Server) PushImage(ref string, layers []Layer, o Options) Pushed {
	repo, tag := splitTag(ref)
	m, pushed, err := s.build(layers, o)
	s.must(err)
	body := s.json(m)
	pushed.Desc = s.Store.putManifest(repo, tag, m.MediaType, body)
	return s.named(pushed, repo, tag)
}

// PlatformImage is an image in an index.
type PlatformImage struct {
	Platform string // "linux/arm64"
	Layers   []Layer
}

// PushIndex stores an index of one image for each platform, followed by an
// attestation as current builders add it.
func (s *Server) PushIndex(ref string, images []PlatformImage, o Options) Pushed {
	repo, tag := splitTag(ref)
	idx := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
	if o.Docker {
		idx.MediaType = image.DockerManifestList
	}
	var pushed Pushed
	for _, img := range images {
		p, err := image.ParsePlatform(img.Platform)
		s.must(err)
		o.Platform = p
		m, one, err := s.build(img.Layers, o)
		s.must(err)
		d := s.Store.putManifest(repo, "", m.MediaType, s.json(m))
		d.Platform = &p
		idx.Manifests = append(idx.Manifests, d)
		one.Desc, one.Digest = d, d.Digest
		one.ByDigest = fmt.Sprintf("%s/%s@%s", s.Host(), repo, d.Digest)
		pushed.Images = append(pushed.Images, one)
	}
	idx.Manifests = append(idx.Manifests, s.attestation(repo))
	pushed.Desc = s.Store.putManifest(repo, tag, idx.MediaType, s.json(idx))
	return s.named(pushed, repo, tag)
}

// PushManifest stores any document as a manifest.
func (s *Server) PushManifest(ref, mediaType string, body []byte) Pushed {
	repo, tag := splitTag(ref)
	return s.named(Pushed{Desc: s.Store.putManifest(repo, tag, mediaType, body)}, repo, tag)
}

// PushBlob stores any bytes as a blob.
func (s *Server) PushBlob(b []byte) digest.Digest { return s.Store.putBlob(b) }

// PushSchema1 stores a manifest of the kind that registries served before 2016.
func (s *Server) PushSchema1(ref string) Pushed {
	body := `{"schemaVersion":1,"name":"old","tag":"latest","architecture":"amd64","fsLayers":[{"blobSum":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}],"history":[{"v1Compatibility":"{}"}],"signatures":[]}`
	return s.PushManifest(ref, image.DockerSchema1JWS, []byte(body))
}

func (s *Server) attestation(repo string) ocispec.Descriptor {
	body := s.json(map[string]any{
		"schemaVersion": 2, "mediaType": ocispec.MediaTypeImageManifest, "config": ocispec.DescriptorEmptyJSON,
		"layers": []any{},
	})
	d := s.Store.putManifest(repo, "", ocispec.MediaTypeImageManifest, body)
	d.Platform = &ocispec.Platform{OS: "unknown", Architecture: "unknown"}
	d.Annotations = map[string]string{"vnd.docker.reference.type": "attestation-manifest"}
	return d
}

func (s *Server) named(p Pushed, repo, tag string) Pushed {
	p.Digest = p.Desc.Digest
	p.Ref = fmt.Sprintf("%s/%s:%s", s.Host(), repo, tag)
	p.ByDigest = fmt.Sprintf("%s/%s@%s", s.Host(), repo, p.Digest)
	return p
}

func (s *Server) json(v any) []byte {
	b, err := json.Marshal(v)
	s.must(err)
	return b
}

// build stores the layers and the config, and makes the manifest.
func (s *Server) build(layers []Layer, o Options) (ocispec.Manifest, Pushed, error) {
	var p Pushed
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2},
		MediaType: ocispec.MediaTypeImageManifest, Layers: []ocispec.Descriptor{}}
	config := ocispec.Image{Platform: o.Platform, Config: o.Config,
		RootFS: ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{}}}
	if config.OS == "" {
		config.Platform = ocispec.Platform{OS: "linux", Architecture: runtime.GOARCH}
	}
	created := time.Unix(0, 0).UTC()
	config.Created = &created
	for _, l := range layers {
		got, err := s.Store.putLayer(l, o.Docker)
		if err != nil {
			return m, p, err
		}
		p.Layers = append(p.Layers, got)
		m.Layers = append(m.Layers,
			ocispec.Descriptor{MediaType: got.MediaType, Digest: got.Digest, Size: got.Size})
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, got.DiffID)
	}
	body, err := json.Marshal(config)
	if o.Health != nil {
		type checked struct {
			ocispec.ImageConfig
			Healthcheck any
		}
		body, err = json.Marshal(struct {
			ocispec.Image
			Config checked `json:"config"`
		}{config, checked{o.Config, o.Health}})
	}
	if err != nil {
		return m, p, err
	}
	m.Config = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageConfig, Digest: s.Store.putBlob(body),
		Size: int64(len(body))}
	if o.Docker {
		m.MediaType, m.Config.MediaType = image.DockerManifest, image.DockerConfig
	}
	p.Config = m.Config.Digest
	return m, p, nil
}

func splitTag(ref string) (repo, tag string) {
	repo, tag, ok := strings.Cut(ref, ":")
	if !ok {
		tag = "latest"
	}
	return repo, tag
}

// Store holds blobs and manifests.
type Store struct {
	dir       string
	mu        sync.RWMutex
	blobs     map[digest.Digest]blob
	manifests map[string]manifest // by REPOSITORY/TAG and REPOSITORY/DIGEST
}

type blob struct {
	content io.ReaderAt
	size    int64
}

type manifest struct {
	mediaType string
	body      []byte
	digest    digest.Digest
}

func newStore(dir string) *Store {
	return &Store{dir: dir, blobs: map[digest.Digest]blob{}, manifests: map[string]manifest{}}
}

func (s *Store) blob(d digest.Digest) (blob, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	b, ok := s.blobs[d]
	return b, ok
}

func (s *Store) manifest(repo, object string) (manifest, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	m, ok := s.manifests[repo+"/"+object]
	return m, ok
}

func (s *Store) putManifest(repo, tag, mediaType string, body []byte) ocispec.Descriptor {
	m := manifest{mediaType: mediaType, body: body, digest: digest.FromBytes(body)}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.manifests[repo+"/"+m.digest.String()] = m
	if tag != "" {
		s.manifests[repo+"/"+tag] = m
	}
	return ocispec.Descriptor{MediaType: mediaType, Digest: m.digest, Size: int64(len(body))}
}

func (s *Store) putBlob(b []byte) digest.Digest {
	d := digest.FromBytes(b)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.blobs[d] = blob{bytes.NewReader(b), int64(len(b))}
	return d
}

// putLayer packs a layer and stores it: in memory if it came from there, else in a file.
func (s *Store) putLayer(l Layer, docker bool) (image.Layer, error) {
	if l.Compression == "" {
		l.Compression = image.Gzip
	}
	out, blobID, diffID, err := s.pack(l)
	if err != nil {
		return image.Layer{}, fmt.Errorf("pack layer: %w", err)
	}
	s.mu.Lock()
	s.blobs[blobID] = out
	s.mu.Unlock()
	got := image.Layer{Digest: blobID, Size: out.size, MediaType: l.MediaType, DiffID: l.DiffID}
	if got.MediaType == "" {
		got.MediaType = layerType(l.Compression, docker)
	}
	if got.DiffID == "" {
		got.DiffID = diffID
	}
	return got, nil
}

// pack gives a layer's blob, and what it and its tar hash to.
func (s *Store) pack(l Layer) (out blob, blobID, diffID digest.Digest, err error) {
	if l.Path == "" {
		b, ofTar, err := packed.get(l)
		return blob{bytes.NewReader(b), int64(len(b))}, digest.FromBytes(b), ofTar, err
	}
	f, err := os.Open(l.Path)
	if err != nil {
		return blob{}, "", "", err
	}
	defer f.Close()
	ofTar, ofBlob := digest.Canonical.Digester(), digest.Canonical.Digester()
	out, err = s.spool(true, ofBlob, func(w io.Writer) error {
		return Compress(w, io.TeeReader(f, ofTar.Hash()), l)
	})
	return out, ofBlob.Digest(), ofTar.Digest(), err
}

// spool keeps what write writes, in a file if big, and hashes it.
func (s *Store) spool(big bool, d digest.Digester, write func(io.Writer) error) (blob, error) {
	if !big || s.dir == "" {
		var b bytes.Buffer
		err := write(io.MultiWriter(&b, d.Hash()))
		return blob{bytes.NewReader(b.Bytes()), int64(b.Len())}, err
	}
	f, err := os.CreateTemp(s.dir, "blob")
	if err != nil {
		return blob{}, err
	}
	os.Remove(f.Name()) // the descriptor keeps it, and its end ends it
	if err := write(io.MultiWriter(f, d.Hash())); err != nil {
		f.Close()
		return blob{}, err
	}
	size, err := f.Seek(0, io.SeekEnd)
	return blob{f, size}, err
}

func layerType(c image.Compression, docker bool) string {
	base, sep := ocispec.MediaTypeImageLayer, "+"
	if docker {
		base, sep = image.DockerLayer, "."
	}
	if c == image.Plain {
		return base
	}
	return base + sep + string(c)
}

// Compress packs the tar as l says: its compression, level and member size.
func Compress(w io.Writer, tar io.Reader, l Layer) error {
	for first := true; ; first = false {
		part := tar
		if l.MemberSize > 0 {
			part = io.LimitReader(tar, l.MemberSize)
		}
		n, err := member(w, part, l, first)
		if err != nil || l.MemberSize == 0 || n < l.MemberSize {
			return err
		}
	}
}

// member writes one gzip member or zstd frame; an empty one only if it is the first.
func member(w io.Writer, tar io.Reader, l Layer, first bool) (int64, error) {
	head := make([]byte, 1)
	if n, err := io.ReadFull(tar, head); err == io.EOF && !first {
		return 0, nil
	} else if err != nil && err != io.EOF {
		return 0, err
	} else {
		tar = io.MultiReader(bytes.NewReader(head[:n]), tar)
	}
	z, err := compressor(w, l)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(z, tar)
	if err != nil {
		return n, err
	}
	return n, z.Close()
}

func compressor(w io.Writer, l Layer) (io.WriteCloser, error) {
	switch l.Compression {
	case image.Gzip:
		level := l.Level
		if level == 0 {
			level = gzip.DefaultCompression
		}
		return gzip.NewWriterLevel(w, level)
	case image.Zstd:
		opts := []zstd.EOption{zstd.WithEncoderConcurrency(1)}
		if l.Level != 0 {
			opts = append(opts, zstd.WithEncoderLevel(zstd.EncoderLevelFromZstd(l.Level)))
		}
		return zstd.NewWriter(w, opts...)
	case image.Plain:
		return plain{w}, nil
	}
	return nil, fmt.Errorf("no compression %q", l.Compression)
}

type plain struct{ io.Writer }

func (plain) Close() error { return nil }
