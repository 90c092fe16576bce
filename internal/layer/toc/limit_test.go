package toc

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
)

func scan(s *Scanner) (n int, err error) {
	for ; err == nil; n++ {
		_, err = s.Next()
	}
	return n - 1, err
}

func manyFiles(t *testing.T, n int, link string) *bytes.Reader {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := range n {
		h := &tar.Header{Name: fmt.Sprint(i), Typeflag: tar.TypeSymlink, Linkname: link}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return bytes.NewReader(b.Bytes())
}

func TestTooManyEntries(t *testing.T) {
	s := NewScanner(manyFiles(t, 20, "x"))
	s.entries = MaxEntries - 10
	if n, err := scan(s); n != 10 || !errors.Is(err, ErrLimit) {
		t.Error(n, err)
	}
}

func TestTooMuchMetadata(t *testing.T) {
	s := NewScanner(manyFiles(t, 20, strings.Repeat("t", 4000)))
	s.meta = MaxMetadata - 10*4010
	if n, err := scan(s); n != 10 || !errors.Is(err, ErrLimit) {
		t.Error(n, err)
	}
}

func TestTooManyNames(t *testing.T) {
	tree := NewTree()
	tree.Names = append(tree.Names, make([]Name, MaxEntries-10)...)
	err := tree.Add(&Entry{Name: strings.Repeat("d/", 5) + "f"})
	if err == nil {
		err = tree.Add(&Entry{Name: strings.Repeat("e/", 5) + "f"})
	}
	if !errors.Is(err, ErrLimit) {
		t.Error(err)
	}
}
