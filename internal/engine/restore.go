package engine

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/anypb"

	"dewpoint/internal/durable"
)

// Restore starts a container from dumped processes instead of its command. The
// container must have the mounts, by their targets, and the kind of network
// that the dumped one had; the files that the processes have open must be in
// its root. Name, host name, network, address, limits, and the sources of
// volumes are its own. Processes keep their environment.
//
// Create makes all but the processes, which Start does: its error means that
// there are none, and restore.log in the engine's WorkDir tells more. A
// container that has ended is started anew by its command.
type Restore struct {
	Dir    string        // CRIU's images; read only, may be shared by many
	Upper  digest.Digest // diff ID of one more layer on top of the image's, registered; "" is none
	Config []string      // lines for CRIU's configuration
}

// WorkDir is where CRIU works when it restores the container: its log, and the
// socket lazy-pages.socket that it connects to with lazy-pages in its
// configuration. It is there from Create on until Remove, and is short enough
// for a socket's address with usual names.
func (e *Engine) WorkDir(name string) string { return filepath.Join(e.cfg.restoreDir(), name) }

func (e *Engine) imagesDir(name string) string { return filepath.Join(e.cfg.dir(name), "images") }

// parent is the snapshot below the container's.
func (s *Spec) parent() string {
	if s.Restore == nil || s.Restore.Upper == "" {
		return ChainID(s.Image)
	}
	ids := s.Image.Spec.RootFS.DiffIDs
	return identity.ChainID(append(ids[:len(ids):len(ids)], s.Restore.Upper)).String()
}

// prepareRestore makes the directory that the processes are restored from: the
// dumped images, but the host name is the container's. It returns the runtime's
// options for the task, which take the place of the record's.
func (e *Engine) prepareRestore(s *Spec) (*anypb.Any, error) {
	hostname, err := s.hostname()
	if err != nil {
		return nil, err
	}
	if err := e.linkImages(s.Name, hostname, s.Restore.Dir); err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	if err := e.writeCRIUConfig(s.Name, s.Restore.Config); err != nil {
		return nil, err
	}
	o := e.runcOptions()
	o.CriuImagePath, o.CriuWorkPath = e.imagesDir(s.Name), e.WorkDir(s.Name)
	return plainAny(o)
}

func (e *Engine) linkImages(name, hostname, from string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, d := range []string{e.WorkDir(name), e.imagesDir(name)} {
		if err := errors.Join(os.RemoveAll(d), os.MkdirAll(d, 0o700)); err != nil {
			return err
		}
	}
	for _, f := range entries {
		to := filepath.Join(e.imagesDir(name), f.Name())
		if strings.HasPrefix(f.Name(), "utsns-") {
			err = os.WriteFile(to, utsImage(hostname), 0o600)
		} else {
			err = linkOrCopy(filepath.Join(from, f.Name()), to)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// linkOrCopy makes no symbolic link: CRIU follows those in the container's root.
func linkOrCopy(from, to string) error {
	if err := os.Link(from, to); !errors.Is(err, unix.EXDEV) {
		return err
	}
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close())
}

// utsImage is CRIU's image of a UTS namespace: two magic numbers, and one
// message with its size, of host name and domain name.
func utsImage(hostname string) []byte {
	const common, utsns = 0x54564319, 0x54473203
	m := protowire.AppendTag(nil, 1, protowire.BytesType)
	m = protowire.AppendString(m, hostname)
	m = protowire.AppendTag(m, 2, protowire.BytesType)
	m = protowire.AppendString(m, "(none)")
	b := binary.LittleEndian.AppendUint32(nil, common)
	b = binary.LittleEndian.AppendUint32(b, utsns)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m)))
	return append(b, m...)
}

// wrapRunc makes runc find the configured CRIU, by its name in PATH and no
// otherwise. It returns the program that shims are to run.
func (c *Config) wrapRunc() (string, error) {
	if c.CRIU == "" {
		return c.Runc, nil
	}
	dir := filepath.Join(c.Root, "bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if err := replaceLink(c.CRIU, filepath.Join(dir, "criu")); err != nil {
		return "", err
	}
	script := fmt.Sprintf("#!/bin/sh\nPATH='%s':$PATH exec '%s' \"$@\"\n", dir, cmp.Or(c.Runc, "runc"))
	wrapper := filepath.Join(dir, "runc-criu")
	if old, err := os.ReadFile(wrapper); err == nil && string(old) == script {
		return wrapper, nil
	}
	return wrapper, durable.WriteFile(wrapper, []byte(script), 0o755)
}

func replaceLink(target, link string) error {
	if old, err := os.Readlink(link); err == nil && old == target {
		return nil
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.Symlink(target, link)
}
