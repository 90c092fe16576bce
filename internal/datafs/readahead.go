package datafs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// bdiDir has the kernel's backing devices, each with a read_ahead_kb.
const bdiDir = "/sys/class/bdi"

// reading is held while a mount is made whose backing device is to be found.
var reading sync.Mutex

// WithoutReadAhead calls mount, which mounts one EROFS image whose device is a
// datafs file, and switches EROFS's own read-ahead of the new mount off. EROFS
// reads ahead in the reader's name: it would wait for absent neighbours of what
// is there, and want them. It returns the names of the mount's backing devices for SetReadAhead.
//
// The devices that come up during mount are taken for its own; another process's EROFS mount of the same moment would
// lose its read-ahead too, and nothing else.
func WithoutReadAhead(mount func() error) ([]string, error) {
	reading.Lock()
	defer reading.Unlock()
	before, err := erofsDevices()
	if err != nil {
		return nil, err
	}
	if err := mount(); err != nil {
		return nil, err
	}
	after, err := erofsDevices()
	if err != nil {
		return nil, err
	}
	var came []string
	for name := range after {
		if !before[name] {
			came = append(came, name)
		}
	}
	if len(came) == 0 {
		return nil, errors.New("the new EROFS mount has no backing device of its own")
	}
	return came, SetReadAhead(came, 0)
}

// SetReadAhead sets how many KiB are read ahead by backing devices; those that
// are gone are left out. It holds for files that are opened from then on.
func SetReadAhead(names []string, kib int) error {
	for _, name := range names {
		path := filepath.Join(bdiDir, filepath.Base(name), "read_ahead_kb")
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			_, err = f.WriteString(strconv.Itoa(kib))
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			return fmt.Errorf("set read-ahead: %w", err)
		}
	}
	return nil
}

// stopReadAhead keeps the kernel from reading ahead in the FUSE mount at dir. A
// read-ahead around pages that are cached already is cut into requests of single
// pages, which look like those that a reader waits for: absent neighbours would
// be fetched ahead of what is needed.
func stopReadAhead(dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	return SetReadAhead([]string{fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))}, 0)
}

func erofsDevices() (map[string]bool, error) {
	dir, err := os.Open(bdiDir)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	found := map[string]bool{}
	for _, n := range names {
		if strings.HasPrefix(n, "erofs-") {
			found[n] = true
		}
	}
	return found, err
}
