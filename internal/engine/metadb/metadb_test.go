package metadb

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"dewpoint/testkit"

	"go.etcd.io/bbolt"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const pairs = 40

// set writes one value in many places of the database, in one transaction, as no_sync has it.
func set(t *testing.T, db *bbolt.DB, v uint64) {
	t.Helper()
	if err := db.Update(func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucketIfNotExists([]byte("b"))
		for i := uint64(0); i < pairs && err == nil; i++ {
			err = b.Put(append(binary.BigEndian.AppendUint64(nil, i*v%977), make([]byte, 300)...), nil)
			if err == nil {
				err = b.Put(binary.BigEndian.AppendUint64(nil, i), binary.BigEndian.AppendUint64(nil, v))
			}
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

func open(t *testing.T, path string) *bbolt.DB {
	t.Helper()
	db, err := bbolt.Open(path, 0o600,
		&bbolt.Options{NoSync: true, NoGrowSync: true, NoFreelistSync: true, Timeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	return db
}

// get checks the database, and that all places have one value, which it returns.
func get(t *testing.T, path string) uint64 {
	t.Helper()
	db := open(t, path)
	defer db.Close()
	var v uint64
	if err := db.View(func(tx *bbolt.Tx) error {
		var errs error
		for err := range tx.Check() {
			errs = errors.Join(errs, err)
		}
		b := tx.Bucket([]byte("b"))
		v = binary.BigEndian.Uint64(b.Get(make([]byte, 8)))
		for i := range uint64(pairs) {
			if got := binary.BigEndian.Uint64(b.Get(binary.BigEndian.AppendUint64(nil, i))); got != v {
				t.Errorf("place %d has %d, the first %d", i, got, v)
			}
		}
		return errs
	}); err != nil {
		t.Fatal(err)
	}
	return v
}

func scramble(t *testing.T, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b {
		b[i] ^= byte(i * 7)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// A copy that is made while the database is written is one moment of it.
func TestCopyIsOneMoment(t *testing.T) {
	path := filepath.Join(t.TempDir(), "meta.db")
	db := open(t, path)
	defer db.Close()
	set(t, db, 1)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for v := uint64(2); ; v++ {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				set(t, db, v)
			}
		}
	}()
	var last uint64
	copies := 0
	for range 200 {
		if _, err := Save(path); errors.Is(err, errBusy) {
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		copies++
		v := get(t, path+kept)
		if v < last {
			t.Errorf("the copy went back from %d to %d", last, v)
		}
		last = v
	}
	close(stop)
	<-done
	if copies == 0 || last < 2 {
		t.Errorf("%d copies, the last of value %d", copies, last)
	}
}

func TestPowerCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dir", "meta.db")
	log := slog.New(slog.DiscardHandler)
	if err := Prepare(path, false, log); err != nil {
		t.Fatal(err)
	}
	db := open(t, path)
	set(t, db, 1)
	if _, err := Save(path); err != nil {
		t.Fatal(err)
	}
	set(t, db, 2)
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}

	if err := Prepare(path, false, log); err != nil {
		t.Fatal(err)
	}
	if v := get(t, path); v != 2 {
		t.Errorf("after the end of a process: %d", v)
	}
	if _, err := Save(path); err != nil {
		t.Fatal(err)
	}

	scramble(t, path)
	if err := os.WriteFile(path+unsynced, []byte("of another boot"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Prepare(path, false, log); err != nil {
		t.Fatal(err)
	}
	if v := get(t, path); v != 2 {
		t.Errorf("after a power cut: %d", v)
	}
	if err := Prepare(path, true, log); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path + unsynced); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a database that is flushed again is said not to be: %v", err)
	}
}

// Without a copy, or with a damaged one, containerd begins anew.
func TestPowerCutWithoutCopy(t *testing.T) {
	for _, damaged := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "meta.db")
		files := map[string]string{path: "torn", path + unsynced: "of another boot"}
		if damaged {
			files[path+kept] = "torn too"
		}
		for name, text := range files {
			if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := Prepare(path, false, slog.New(slog.DiscardHandler)); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("damaged copy %v: the torn database is still in its place: %v", damaged, err)
		}
		if b, err := os.ReadFile(path + ".old"); err != nil || string(b) != "torn" {
			t.Errorf("the torn database was not kept for whoever looks: %q %v", b, err)
		}
	}
}

// Keep makes a copy of what rests, and one when it ends.
func TestKeep(t *testing.T) {
	path := filepath.Join(t.TempDir(), "meta.db")
	db := open(t, path)
	defer db.Close()
	set(t, db, 1)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); Keep(ctx, path, slog.New(slog.DiscardHandler)) }()
	testkit.Retry(t, "a copy is made", func() error {
		_, err := os.Stat(path + kept)
		return err
	})
	if v := get(t, path+kept); v != 1 {
		t.Errorf("copy of %d", v)
	}
	set(t, db, 2)
	cancel()
	<-done
	if v := get(t, path+kept); v != 2 {
		t.Errorf("the last copy is of %d", v)
	}
}
