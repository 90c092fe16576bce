package checkpoint

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"golang.org/x/sys/unix"
)

// What is bound read-only into a container is its configuration, as its
// variables are: memory that was made from other files than the container
// has now is not to be used silently. So a Fit tells what is in them, by what
// means the same on all nodes: names, kinds, and contents of small files. Of
// large ones size and time of modification stand for the contents.
const (
	maxCensus     = 2000     // files and directories of one mount
	maxFileRead   = 1 << 20  // bytes of a file whose contents count
	maxCensusRead = 16 << 20 // bytes of all such files of one mount
)

// uncounted stands for contents that were too many to look at, or could not be.
const uncounted = "?"

// contentsOf tells what is in a container's read-only binds, by their targets,
// but for its own files and what free names. It reads 16 MiB and 2,000 names of each at most.
func contentsOf(o *specs.Spec, free []string) map[string]string {
	all, _ := contentsSince(o, free, time.Time{})
	return all
}

// contentsSince is contentsOf, and names a file that has changed since a time, if there is one: its contents,
// or what else the kernel keeps a time of (owner, mode, number of names). The zero time is that of no change.
func contentsSince(o *specs.Spec, free []string, since time.Time) (all map[string]string, changed string) {
	for _, m := range o.Mounts {
		if !bound(m) || !slices.Contains(m.Options, "ro") || slices.Contains(free, m.Destination) {
			continue
		}
		if all == nil {
			all = map[string]string{}
		}
		sum := sha256.New()
		c := census{sum: sum, since: since}
		if err := c.source(m.Source); err != nil {
			all[m.Destination] = uncounted
			continue
		}
		all[m.Destination] = hex.EncodeToString(sum.Sum(nil)[:16])
		if c.changed != "" {
			changed = m.Destination + strings.TrimPrefix(c.changed, m.Source)
		}
	}
	return all, changed
}

// census adds up what is below one source.
type census struct {
	sum     io.Writer
	entries int
	read    int64
	since   time.Time
	changed string // since then: the path of the last such file
}

var errTooMany = errors.New("too many files")

func (c *census) source(path string) error {
	fi, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c.tell("", "directory") // it is made when the container is
	}
	if err != nil {
		return err
	}
	return c.entry(path, "", fi)
}

// tell adds one line; names hold no zero bytes.
func (c *census) tell(name string, what ...any) error {
	_, err := fmt.Fprint(c.sum, name, "\x00", fmt.Sprint(what...), "\x00")
	return err
}

func (c *census) entry(path, name string, fi fs.FileInfo) error {
	if c.entries++; c.entries > maxCensus {
		return errTooMany
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); ok && !c.since.IsZero() &&
		time.Unix(st.Ctim.Unix()).After(c.since) {
		c.changed = path
	}
	switch mode := fi.Mode(); {
	case mode.IsDir():
		return errors.Join(c.tell(name, "directory"), c.directory(path, name))
	case mode.IsRegular():
		return c.file(path, name, fi)
	case mode.Type() == fs.ModeSymlink:
		to, err := os.Readlink(path)
		return errors.Join(c.tell(name, "link ", to), err)
	default:
		return c.tell(name, mode.Type())
	}
}

func (c *census) directory(path, name string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	entries, err := d.ReadDir(maxCensus + 1 - c.entries)
	d.Close()
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	for _, e := range entries {
		fi, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = c.entry(filepath.Join(path, e.Name()), name+"/"+e.Name(), fi)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *census) file(path, name string, fi fs.FileInfo) error {
	size := fi.Size()
	if size > maxFileRead || c.read+size > maxCensusRead {
		return c.tell(name, "large ", size, " ", fi.ModTime().UnixNano())
	}
	if err := c.tell(name, "file ", size); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // whatever has taken its place
	if err != nil {
		return err
	}
	defer f.Close()
	c.read += size
	_, err = io.Copy(c.sum, io.LimitReader(f, size))
	return err
}

// whyContents says which of the read-only binds have other contents than they had.
func (f Fit) whyContents(want Fit) []string {
	names := slices.DeleteFunc(whichDiffer(f.Contents, want.Contents), func(target string) bool {
		return f.Contents[target] == uncounted || want.Contents[target] == uncounted
	})
	if len(names) == 0 {
		return nil
	}
	return []string{"what is mounted read-only has changed: " + strings.Join(names, " ")}
}

// uncountable is a read-only bind of which it is not known whether it has changed, "" if there is none.
func (f Fit) uncountable(want Fit) string {
	for _, contents := range []map[string]string{f.Contents, want.Contents} {
		for target, c := range contents {
			if c == uncounted {
				return target
			}
		}
	}
	return ""
}
