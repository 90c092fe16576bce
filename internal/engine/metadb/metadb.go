// Package metadb keeps containerd's database safe while containerd does not wait for the disk.
//
// containerd's database is a bbolt file, each of whose transactions is made durable twice, one transaction
// after the other: a container's life has seven to ten of them, and on an SD card a flush takes tens of
// milliseconds. A private containerd is therefore told not to (no_sync, containerd 2.1 and newer). The end of
// a process, containerd's or this one's, does the file no harm: the writes are in the page cache. A power cut
// may leave any part of the writes since the last flush, and so a file that cannot be trusted.
//
// Against that a copy is kept beside it:
//
//	meta.db           containerd's
//	meta.db.kept      a copy, complete and durable
//	meta.db.unsynced  says since which boot meta.db has been written without flushes
//
// Keep copies whenever the database has changed and then rested for a second, or has not rested for ten.
// Prepare, before containerd is started, puts the copy in the database's place if the machine has been
// started anew since meta.db was written without flushes. Records between the last copy and the power cut are
// lost then: of a container, which does not run any more anyway, or of an image, whose layers are still
// there.
//
// # How a file that changes is copied
//
// bbolt never writes a page that the newest committed transaction reaches; a commit writes other pages and
// then one of two meta pages (bbolt's documentation, "Caveats"; its page layout has been the same since
// version 2 of the format). A copy is complete, therefore, if no transaction was committed between its
// beginning and its end.
package metadb

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"dewpoint/internal/durable"
)

const (
	kept     = ".kept"
	unsynced = ".unsynced"

	look    = time.Second      // between two looks at the database
	atMost  = 10 * time.Second // between two copies of one that does not rest
	retries = 20               // of a copy during which something was committed
)

// Prepare readies the database for a containerd that is about to be started,
// and must not run. sync says whether that one flushes.
func Prepare(path string, sync bool, log *slog.Logger) error {
	boot, err := os.ReadFile(path + unsynced)
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	} else if err == nil && string(boot) != durable.BootID() {
		err = goBack(path, log)
	}
	if err == nil && sync {
		err = Settle(path)
	}
	if err == nil && !sync {
		err = begin(path)
	}
	if err != nil {
		return fmt.Errorf("containerd's database: %w", err)
	}
	return nil
}

// goBack puts the copy in the database's place. Without one there was nothing
// worth a copy yet.
func goBack(path string, log *slog.Logger) error {
	now, _ := committed(path)
	then, err := committed(path + kept)
	if err != nil {
		log.Warn("containerd's database was not flushed when the machine stopped, and there is no copy: it begins anew, images have to be pulled again", "path", path, "err", err)
		return ignoreAbsent(os.Rename(path, path+".old"))
	}
	log.Warn("containerd's database was not flushed when the machine stopped: its copy is used", "path", path,
		"transactions_lost", int64(now-then))
	return copyTo(path, path+kept)
}

// begin notes durably that the database is written without flushes from now on.
func begin(path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return err
	}
	if _, err := os.Stat(path); err == nil {
		if _, err := Save(path); err != nil {
			return err
		}
	}
	return durable.WriteFile(path+unsynced, []byte(durable.BootID()), 0o600)
}

// Settle makes a database durable that was written without flushes, and that
// nobody writes now.
func Settle(path string) error {
	f, err := os.Open(path)
	if err == nil {
		err = errors.Join(durable.Sync(f), f.Close())
	}
	return errors.Join(ignoreAbsent(err), ignoreAbsent(os.Remove(path+unsynced)))
}

// Keep keeps the copy until ctx ends, and then once more.
func Keep(ctx context.Context, path string, log *slog.Logger) {
	var have, last uint64
	var at time.Time
	said := false
	for tick := time.NewTicker(look); ; {
		over := false
		select {
		case <-ctx.Done():
			tick.Stop()
			over = true
		case <-tick.C:
		}
		now, err := committed(path)
		if err == nil && now != have && (over || now == last || time.Since(at) > atMost) {
			if have, err = Save(path); err == nil {
				at, said = time.Now(), false
			}
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) && !said {
			log.Warn("no copy of containerd's database could be made: a power cut would lose more", "path", path,
				"err", err)
			said = true
		}
		if last = now; over {
			return
		}
	}
}

// errBusy says that the database was written all the time.
var errBusy = errors.New("the database does not rest")

// Save makes the copy, and says which transaction is the last in it. Only one
// call at a time.
func Save(path string) (uint64, error) {
	for range retries {
		before, err := committed(path)
		if err != nil {
			return 0, err
		}
		if before == 0 {
			return 0, nil
		}
		err = copyIf(path, before)
		if !errors.Is(err, errBusy) {
			return before, err
		}
	}
	return 0, fmt.Errorf("%s: %w", path, errBusy)
}

// copyIf copies the database unless something is committed meanwhile.
func copyIf(path string, last uint64) error {
	from, err := os.Open(path)
	if err != nil {
		return err
	}
	defer from.Close()
	return durable.Commit(path+kept, 0o600, func(to *os.File) error {
		if _, err := io.Copy(to, from); err != nil {
			return err
		}
		if now, err := committed(path); err != nil || now != last {
			return errors.Join(errBusy, err)
		}
		return nil
	})
}

func copyTo(path, source string) error {
	from, err := os.Open(source)
	if err != nil {
		return err
	}
	defer from.Close()
	return durable.Commit(path, 0o600, func(to *os.File) error {
		_, err := io.Copy(to, from)
		return err
	})
}

// bbolt's meta page: a page header, then magic, version, page size, flags, root
// bucket (16), freelist, high water mark, transaction, and the checksum of these.
const (
	pageHeader = 16
	metaSize   = 56 // before the checksum
	metaTx     = 48
	metaMagic  = 0xED0CDAED
)

// ErrNoDatabase says that a file is none of bbolt's.
var ErrNoDatabase = errors.New("not a database")

// committed is the number of the newest transaction of the database, 0 if the
// file is empty.
func committed(path string) (uint64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() == 0 {
		return 0, nil
	}
	var tx uint64
	found := false
	for page, at := 0, int64(0); page < 2; page++ {
		var b [pageHeader + metaSize + 8]byte
		if _, err := f.ReadAt(b[:], at); err != nil && err != io.EOF {
			return 0, err
		}
		m := b[pageHeader:]
		size := int64(binary.NativeEndian.Uint32(m[8:]))
		if valid(m) {
			found = true
			tx = max(tx, binary.NativeEndian.Uint64(m[metaTx:]))
		}
		if size < 512 || size > 1<<16 {
			size = int64(os.Getpagesize())
		}
		at += size
	}
	if !found {
		return 0, fmt.Errorf("%s: %w", path, ErrNoDatabase)
	}
	return tx, nil
}

func valid(m []byte) bool {
	sum := fnv.New64a()
	sum.Write(m[:metaSize])
	return binary.NativeEndian.Uint32(m) == metaMagic && binary.NativeEndian.Uint64(m[metaSize:]) == sum.Sum64()
}

func ignoreAbsent(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
