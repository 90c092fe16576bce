package registrytest

import (
	"bytes"
	"sync"

	"dewpoint/internal/image"

	"github.com/opencontainers/go-digest"
)

// keptBytes is how many bytes of packed layers a process keeps.
const keptBytes = 128 << 20

// packed are layers that were packed in this process, whichever server they were pushed to: tests push the
// same ones again and again, and compressing them takes longer than most tests, above all under
// the race detector.
var packed = keptLayers{blobs: map[packing][]byte{}}

// packing is all that a packed layer follows from.
type packing struct {
	tar         digest.Digest
	compression image.Compression
	level       int
	member      int64
}

type keptLayers struct {
	mu    sync.Mutex
	blobs map[packing][]byte // nobody writes into them
	size  int                // of all
}

// get returns the packed layer, and what its tar hashes to.
func (k *keptLayers) get(l Layer) ([]byte, digest.Digest, error) {
	id := digest.FromBytes(l.Tar)
	how := packing{id, l.Compression, l.Level, l.MemberSize}
	k.mu.Lock()
	b, ok := k.blobs[how]
	k.mu.Unlock()
	if ok {
		return b, id, nil
	}
	var out bytes.Buffer
	if err := Compress(&out, bytes.NewReader(l.Tar), l); err != nil {
		return nil, "", err
	}
	k.put(how, out.Bytes())
	return out.Bytes(), id, nil
}

func (k *keptLayers) put(how packing, b []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, ok := k.blobs[how]; ok || len(b) > keptBytes/4 {
		return
	}
	if k.size += len(b); k.size > keptBytes {
		clear(k.blobs)
		k.size = len(b)
	}
	k.blobs[how] = b
}
