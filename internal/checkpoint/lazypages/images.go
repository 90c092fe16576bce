package lazypages

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// What CRIU writes: every image is a common magic, the magic of its kind, then
// messages, each after its length as 32 bits. A pagemap is a head, which names
// the file of pages, and entries in the order of their addresses; the pages of
// entries that are present lie in the file one after the other.
const (
	magicCommon  = 0x54564319
	magicPagemap = 0x56084025

	flagParent  = 1 << 0
	flagLazy    = 1 << 1
	flagPresent = 1 << 2

	// maxPagemap bounds what is read of one pagemap: 64 MiB are millions of entries.
	maxPagemap = 64 << 20
	// maxAddress bounds addresses and lengths, so that sums do not overflow.
	maxAddress = 1 << 56
)

// run is pages that are neighbours in memory and in the file of pages.
type run struct {
	addr   uint64 // where they were when they were dumped
	offset int64  // in the file
	size   int64  // bytes
	lazy   bool
}

// pagemap is what one process, or one piece of shared memory, had.
type pagemap struct {
	file string // pages-N.img
	runs []run
	size int64 // of the file
}

func readPagemap(path string) (pagemap, error) {
	st, err := os.Stat(path)
	if err != nil {
		return pagemap{}, err
	}
	if st.Size() > maxPagemap {
		return pagemap{}, fmt.Errorf("%s has %d bytes", path, st.Size())
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return pagemap{}, err
	}
	m, err := parsePagemap(b)
	if err != nil {
		return pagemap{}, fmt.Errorf("%s: %w", filepath.Base(path), err)
	}
	return m, nil
}

func parsePagemap(b []byte) (pagemap, error) {
	msgs, err := messages(b, magicPagemap)
	if err != nil {
		return pagemap{}, err
	}
	if len(msgs) == 0 {
		return pagemap{}, errors.New("no head")
	}
	head, err := fields(msgs[0])
	if err != nil {
		return pagemap{}, err
	}
	m := pagemap{file: "pages-" + strconv.FormatUint(head[1], 10) + ".img"}
	for _, msg := range msgs[1:] {
		f, err := fields(msg)
		if err != nil {
			return pagemap{}, err
		}
		if err := m.add(f); err != nil {
			return pagemap{}, err
		}
	}
	return m, nil
}

// add takes one entry: 1 address, 2 or 5 number of pages, 3 in parent, 4 flags.
func (m *pagemap) add(f map[protowire.Number]uint64) error {
	addr, n, flags := f[1], f[5], f[4]
	if _, wide := f[5]; !wide {
		n = f[2]
	}
	if _, given := f[4]; !given {
		flags = flagPresent
	}
	if flags&flagParent != 0 || f[3] != 0 {
		return errors.New("pages in a parent image are not supported")
	}
	if addr%pageSize != 0 || addr > maxAddress || n > maxAddress/pageSize ||
		uint64(m.size)+n*pageSize > maxAddress {
		return fmt.Errorf("entry %#x of %d pages is out of range", addr, n)
	}
	if flags&flagPresent == 0 || n == 0 {
		return nil
	}
	size := int64(n * pageSize)
	m.runs = append(m.runs, run{addr: addr, offset: m.size, size: size, lazy: flags&flagLazy != 0})
	m.size += size
	return nil
}

// messages splits an image of the wanted kind.
func messages(b []byte, kind uint32) ([][]byte, error) {
	if len(b) < 8 || binary.LittleEndian.Uint32(b) != magicCommon || binary.LittleEndian.Uint32(b[4:]) != kind {
		return nil, errors.New("not an image of this kind")
	}
	var out [][]byte
	for b = b[8:]; len(b) > 0; {
		if len(b) < 4 {
			return nil, errors.New("cut off")
		}
		n := binary.LittleEndian.Uint32(b)
		if uint64(n) > uint64(len(b)-4) {
			return nil, errors.New("cut off")
		}
		out = append(out, b[4:4+n])
		b = b[4+n:]
	}
	return out, nil
}

// fields are the numbers of a message; others are passed over.
func fields(b []byte) (map[protowire.Number]uint64, error) {
	out := map[protowire.Number]uint64{}
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		b = b[n:]
		if typ == protowire.VarintType {
			out[num], n = protowire.ConsumeVarint(b)
		} else {
			n = protowire.ConsumeFieldValue(num, typ, b)
		}
		if n < 0 {
			return nil, protowire.ParseError(n)
		}
		b = b[n:]
	}
	return out, nil
}

// pagemaps are all of a directory: of processes and of shared memory.
func pagemaps(dir string) ([]pagemap, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "pagemap-*.img"))
	if err != nil {
		return nil, err
	}
	var out []pagemap
	for _, p := range paths {
		m, err := readPagemap(p)
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(filepath.Base(p), "pagemap-shmem-") {
			for i := range m.runs {
				m.runs[i].lazy = false // CRIU fills shared memory itself
			}
		}
		out = append(out, m)
	}
	return out, nil
}
