package layer

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"dewpoint/internal/durable"

	"github.com/opencontainers/go-digest"
)

// layout is where a store's files lie: each layer has a directory that is named for its diffID, with
// "-tree" behind it in a store of unpacked layers. Directories with a prefix are being made, or are to be
// deleted; the next Open deletes what is left of them. A layout has no state of its own.
type layout struct {
	root string
	tree bool // layers are unpacked
}

const (
	importPrefix  = "import-"
	trashPrefix   = "trash-"
	retiredPrefix = "retired-" // with the boot behind it, see retire
	treeForm      = "-tree"
)

// dir is the directory of a layer.
func (d layout) dir(id digest.Digest) string {
	if d.tree {
		return filepath.Join(d.root, id.Encoded()+treeForm)
	}
	return filepath.Join(d.root, id.Encoded())
}

// idOf is the layer that a directory of this store's form is named for.
func (d layout) idOf(name string) (digest.Digest, bool) {
	hex, tree := strings.CutSuffix(name, treeForm)
	id := digest.NewDigestFromEncoded(digest.SHA256, hex)
	return id, tree == d.tree && id.Validate() == nil
}

// hide renames dir, if it is there, to where the next Open would delete it. That the disk may forget this
// is no error: what comes back after a power cut says of itself what it is worth.
func (d layout) hide(dir string) (string, error) {
	trash := filepath.Join(d.root, trashPrefix+filepath.Base(dir))
	if err := os.RemoveAll(trash); err != nil {
		return "", err
	}
	if err := durable.Rename(dir, trash); err != nil && !errors.Is(err, os.ErrNotExist) &&
		!errors.Is(err, durable.ErrLost) {
		return "", err
	}
	return trash, nil
}

// discard takes dir out of sight in one step and deletes it.
func (d layout) discard(dir string) error {
	trash, err := d.hide(dir)
	if err != nil {
		return err
	}
	return os.RemoveAll(trash)
}

// retire is discard for the directory of a layer that may be mounted. The kernel has the files of one open,
// but reads a tree by its names: that stays aside until the next boot.
func (d layout) retire(dir string) error {
	if _, err := os.Stat(filepath.Join(dir, "tree")); err != nil {
		return d.discard(dir)
	}
	return os.Rename(dir, filepath.Join(d.root, d.retired()+strconv.FormatInt(time.Now().UnixNano(), 36)))
}

// retired is what the names of directories begin with that were retired in this boot.
func (d layout) retired() string { return retiredPrefix + durable.BootID() + "-" }

// clear empties a layer's directory: of what an earlier fill left, all is elsewhere.
func (d layout) clear(dir string) error {
	if err := d.discard(dir); err != nil {
		return err
	}
	return os.MkdirAll(dir, 0o755)
}

// removeLeftovers deletes what a complete layer does without. released says that no mount of the time when
// the layer was partial needs its data.
func (d layout) removeLeftovers(dir string, released bool) {
	names := []string{progressFile, bootFile, readyFile, earlyFile, blobFile}
	if released && d.tree {
		names = append(names, "data")
	}
	for _, name := range names {
		os.Remove(filepath.Join(dir, name))
	}
	tmps, _ := filepath.Glob(filepath.Join(dir, "*.tmp"))
	for _, t := range tmps {
		os.RemoveAll(t)
	}
}
