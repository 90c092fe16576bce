package datafs

import (
	"os"

	"dewpoint/internal/layer/bdi"
)

// stopReadAhead keeps the kernel from reading ahead in the FUSE mount at dir. A
// read-ahead around pages that are cached already is cut into requests of single
// pages, which look like those that a reader waits for: absent neighbours would
// be fetched ahead of what is needed.
//
// EROFS's own read-ahead of a layer's file has to be off too (bdi.Without): it
// reads ahead in the reader's name, would wait for absent neighbours of what is
// there, and want them.
func stopReadAhead(dir string) error {
	root, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	name, err := bdi.Of(root)
	if err != nil {
		return err
	}
	return bdi.SetReadAhead(name, 0)
}
