package server

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"time"

	"dewpoint/internal/layer/bdi"
	"dewpoint/internal/layer/datafs"

	"github.com/opencontainers/go-digest"
)

// datafsServer is datafs, started when it is needed, with what it needs of the mounts
// over it. It is safe for concurrent use.
type datafsServer struct {
	cfg      datafs.Config
	log      *slog.Logger
	probed   chan struct{}   // closed when unusable is set
	unusable error           // why layers cannot be served here, or nil
	found    []digest.Digest // what a datafs of an earlier dewd served; set before there are layers

	mu     sync.Mutex
	client *datafs.Client             // nil while there is no datafs
	slow   map[digest.Digest][]string // mounts that do not read ahead, by layer
}

// startTime bounds how long it takes to start a datafs.
const startTime = 30 * time.Second

// running returns the datafs, which it starts if need be.
func (s *datafsServer) running() (*datafs.Client, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.client != nil {
		return s.client, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	c, err := datafs.Start(ctx, s.cfg)
	if err != nil {
		return nil, err
	}
	s.client = c
	return c, nil
}

// there is the datafs that runs, or nil.
func (s *datafsServer) there() *datafs.Client {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.client
}

// Add implements layer.Server.
func (s *datafsServer) Add(id digest.Digest, data, present *os.File) (string, error) {
	if <-s.probed; s.unusable != nil {
		return "", s.unusable
	}
	c, err := s.running()
	if err != nil {
		return "", err
	}
	return c.Add(id, data, present)
}

// Tree implements layer.Server.
func (s *datafsServer) Tree(id digest.Digest, index *os.File) (string, error) {
	c, err := s.running()
	if err != nil {
		return "", err
	}
	return c.Tree(id, index)
}

// Present implements layer.Server.
func (s *datafsServer) Present(id digest.Digest, from, to int64) {
	if c := s.there(); c != nil {
		c.Present(id, from, to)
	}
}

// Warm implements layer.Server.
func (s *datafsServer) Warm(id digest.Digest, from, to int64) {
	if c := s.there(); c != nil {
		c.Warm(id, from, to)
	}
}

// Fail implements layer.Server.
func (s *datafsServer) Fail(id digest.Digest, from, to int64) {
	if c := s.there(); c != nil {
		c.Fail(id, from, to)
	}
}

// Mounting implements layer.Server: the kernel must not read ahead into what is
// absent, which readers of what is there would wait for.
func (s *datafsServer) Mounting(id digest.Digest, target string, mount func() error) error {
	names, err := bdi.Without(target, mount)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slow[id] = append(s.slow[id], names...)
	return err
}

// usualReadAhead is the kernel's default, in KiB.
const usualReadAhead = 128

// Remove implements layer.Server. What is mounted of a layer that is whole may
// read ahead from now on; of one that is not, nothing is mounted.
func (s *datafsServer) Remove(id digest.Digest) {
	s.mu.Lock()
	names := s.slow[id]
	delete(s.slow, id)
	s.mu.Unlock()
	for _, name := range names {
		_ = bdi.SetReadAhead(name, usualReadAhead) // those that are gone cannot be set
	}
	if c := s.there(); c != nil {
		c.Remove(id)
	}
}

// rest ends a datafs that serves nothing, and else leaves it to the next dewd.
func (s *datafsServer) rest(last bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.client == nil {
		return
	}
	err := s.client.Shutdown()
	if err == nil {
		s.client = nil
		return
	}
	if last {
		err = s.client.Close()
		s.client = nil
	}
	if err != nil {
		s.log.Debug("datafs stays", "why", err)
	}
}
