package pop

import (
	"context"
	"crypto/rand"
	"errors"
	"io/fs"
	"path"
	"strings"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"
)

// trash moves titles: of layers that are evicted, put back, taken out, deleted. A title is moved by a rename,
// which one of several nodes can do; so trash needs no lock.
type trash struct {
	*layout
	records    *records
	references *references
	notes      *notes
}

// evict takes a layer out of sight, unless a node uses it. It reports whether it did.
func (bin *trash) evict(ctx context.Context, id digest.Digest) (bool, error) {
	if used, err := bin.references.inUse(ctx, id); err != nil || used {
		return false, err
	}
	l, err := bin.records.record(ctx, id)
	if errors.Is(err, ErrUnknown) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	trash, err := bin.hide(ctx, id, l.Name)
	if err != nil || trash == "" {
		return false, err
	}
	// A node that referenced it before it was out of sight may have seen it.
	used, err := bin.references.inUse(ctx, id)
	if err != nil || used {
		return false, errors.Join(err, bin.putBack(ctx, id, trash))
	}
	bin.tell(ctx, Event{Kind: Evicted, Key: id.String()})
	return true, nil
}

// hide takes the layer's record out of sight, whichever it is now, and returns its
// name in the trash, which it has to itself; "" if there was no record. The data stay.
func (bin *trash) hide(ctx context.Context, id digest.Digest, name string) (string, error) {
	trash, err := bin.aside(ctx, recordOf(id), name, trashEnd)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return trash, err
}

// aside renames the title of the files of that name to one in the trash that ends so, and returns it. On a
// distributed file system whose servers are full to the last byte most new names fail: a name belongs on one
// of the servers, and if the file lies on another one, a pointer has to be written there. So another name is
// tried.
func (bin *trash) aside(ctx context.Context, title, name, end string) (to string, err error) {
	for range asideTries {
		to = path.Join(trashDir, name+"."+rand.Text()[:8]+end)
		if err = bin.cfg.FS.Rename(ctx, title, to); !errors.Is(err, unix.ENOSPC) {
			break
		}
	}
	return to, err
}

const asideTries = 32 // with three servers, one in half a million titles finds no name

// putBack shows a layer again that was hidden, unless it was published anew or is being deleted.
func (bin *trash) putBack(ctx context.Context, id digest.Digest, trash string) error {
	if bin.records.HasLayer(ctx, id) {
		return nil // these files go when they are not used any more
	}
	err := bin.cfg.FS.Rename(ctx, trash, recordOf(id))
	if err == nil {
		bin.tell(ctx, Event{Kind: Returned, Key: id.String()}) // who looked meanwhile is to look again
	}
	return unlessGone(err)
}

// Revive shows a layer again that was evicted and not deleted yet, so that nobody fetches it anew. The caller
// holds the layer's lease: nobody publishes it meanwhile. Whether it is there then is for the caller to see.
func (bin *trash) Revive(ctx context.Context, id digest.Digest) error {
	names, err := bin.cfg.FS.Names(ctx, trashDir)
	if err != nil {
		return unlessGone(err)
	}
	for _, name := range names {
		if of, ok := idOf(name); !ok || of != id || !strings.HasSuffix(name, trashEnd) {
			continue
		}
		title := path.Join(trashDir, name)
		l, err := bin.records.readRecord(ctx, title)
		if err == nil && l.DiffID == id && !bin.records.Denies(l.Name) {
			return bin.putBack(ctx, id, title)
		}
		if unlessUnknown(err) != nil && !errors.Is(err, ErrDamaged) { // a sweep deletes what is damaged
			return err
		}
	}
	return nil
}

// takeOut takes a layer out of sight, and tells why.
func (bin *trash) takeOut(ctx context.Context, l *Layer, kind string) error {
	now, err := bin.records.record(ctx, l.DiffID)
	if errors.Is(err, ErrUnknown) || err == nil && now.Name != l.Name {
		return nil
	}
	for first := true; ; first = false {
		trash, err := bin.hide(ctx, l.DiffID, l.Name)
		if err != nil || trash == "" && first {
			return err
		}
		if trash == "" { // a sweep has it
			break
		}
		// If it was published anew a moment ago, that is what was hidden.
		if hidden, err := bin.records.readRecord(ctx, trash); err == nil && hidden.Name != l.Name {
			return bin.putBack(ctx, l.DiffID, trash)
		}
		// From here on nobody puts it back. If somebody just has (Revive, a sweep), it is hidden again.
		if _, err = bin.kill(ctx, trash, l.Name); err == nil {
			break
		}
		if unlessGone(err) != nil {
			return err
		}
	}
	bin.notes.noteLost(ctx, l.DiffID, kind == Damaged)
	e := Event{Kind: kind, Key: l.DiffID.String()}
	if kind == Damaged {
		e.Name = l.Name
	}
	bin.tell(ctx, e)
	return nil
}

// Quarantine takes a damaged layer out of sight, used or not: nothing new is to
// use it, and it can be published anew. Its files stay while nodes use it.
func (bin *trash) Quarantine(ctx context.Context, l *Layer) error {
	return bin.takeOut(ctx, l, Damaged)
}

// Withdraw does what Quarantine does to one that is as it was published, and no longer wanted: nobody
// is to publish it anew.
func (bin *trash) Withdraw(ctx context.Context, l *Layer) error { return bin.takeOut(ctx, l, Evicted) }

// Mend removes a record that cannot be understood, so that the layer can be
// published anew. A sweep removes what it named.
func (bin *trash) Mend(ctx context.Context, id digest.Digest) error {
	if _, err := bin.records.record(ctx, id); !errors.Is(err, ErrDamaged) {
		return nil
	}
	aside := path.Join(trashDir, "."+id.Encoded()+".json."+bin.boot)
	if err := unlessGone(bin.cfg.FS.Rename(ctx, recordOf(id), aside)); err != nil {
		return err
	}
	if _, err := bin.records.readRecord(ctx, aside); err == nil { // published anew a moment ago
		return bin.putBack(ctx, id, aside)
	}
	bin.notes.noteLost(ctx, id, true)
	bin.tell(ctx, Event{Kind: Damaged, Key: id.String()})
	return bin.remove(ctx, aside)
}

// kill makes the title of the files of that name dead, and returns what it is called then.
func (bin *trash) kill(ctx context.Context, title, name string) (dead string, err error) {
	dead = path.Join(trashDir, name+deadEnd)
	if err = bin.cfg.FS.Rename(ctx, title, dead); errors.Is(err, unix.ENOSPC) {
		return bin.aside(ctx, title, name, deadEnd)
	}
	return dead, err
}

// discard deletes the files of that name if the title that lies at from is theirs
// to the end: if it can be made dead, they are no layer and never will be.
func (bin *trash) discard(ctx context.Context, from, name string) error {
	dead, err := bin.kill(ctx, from, name)
	if err != nil {
		return unlessGone(err) // published, or put back, or somebody else deletes them
	}
	return bin.bury(ctx, dead, name)
}

// bury deletes the files of a dead title, and it.
func (bin *trash) bury(ctx context.Context, title, name string) error {
	for _, end := range fileEnds {
		if err := bin.remove(ctx, path.Join(layersDir, name+end)); err != nil {
			return err
		}
	}
	return bin.remove(ctx, title)
}

// Trashed is how many bytes will be free when what was evicted is deleted.
func (bin *trash) Trashed(ctx context.Context) int64 {
	ents, err := bin.cfg.FS.ReadDir(ctx, trashDir)
	if err != nil {
		return 0
	}
	var sum int64
	for _, e := range ents {
		if l, err := bin.records.readRecord(ctx, path.Join(trashDir, e.Name())); err == nil {
			sum += l.Size
		}
	}
	return sum
}
