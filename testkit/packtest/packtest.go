// Package packtest makes packs that are not what they say, for tests of who
// reads packs.
package packtest

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"testing"

	"dewpoint/internal/image"
	"dewpoint/internal/pack"

	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
)

// Relabel makes the header of a pack name other layers: those of an honest image,
// in place of the ones that it was built from. It returns the pack and its
// header's digest.
func Relabel(tb testing.TB, b []byte, layers []image.Layer) ([]byte, digest.Digest) {
	tb.Helper()
	must := func(err error) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
	}
	n, err := pack.HeaderSize(b[:pack.PreambleSize])
	must(err)
	r, err := zstd.NewReader(nil)
	must(err)
	defer r.Close()
	raw, err := r.DecodeAll(b[pack.PreambleSize:n], nil)
	must(err)
	var head map[string]any
	must(json.Unmarshal(raw, &head))
	for i, l := range head["layers"].([]any) {
		l.(map[string]any)["diff_id"] = layers[i].DiffID
	}
	raw, err = json.Marshal(head)
	must(err)
	w, err := zstd.NewWriter(nil)
	must(err)
	defer w.Close()
	stored := w.EncodeAll(raw, nil)
	out := binary.LittleEndian.AppendUint32(bytes.Clone(b[:8]), uint32(len(stored)))
	out = append(binary.LittleEndian.AppendUint32(out, uint32(len(raw))), stored...)
	return append(out, b[n:]...), digest.FromBytes(out)
}
