package lazypages

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// serveFaults fetches what somebody waits for.
func (s *Server) serveFaults() error {
	for {
		j := s.plan.nextUrgent()
		if j == nil {
			return nil
		}
		if _, err := s.serve(j, &s.stats.FaultBytes); err != nil {
			return err
		}
	}
}

// serveRest fetches what nobody waits for yet: first the order, then all else.
func (s *Server) serveRest() error {
	for {
		j, ordered := s.plan.nextRest()
		if j == nil {
			return nil
		}
		class := &s.stats.OrderBytes
		if !ordered {
			class = &s.stats.RestBytes
		}
		s.bury(j.file)
		n, err := s.serve(j, class)
		if err != nil {
			return err
		}
		if !ordered {
			s.pace.spend(s.ctx, n)
		}
	}
}

// serve fetches a chunk and gives it to all who miss it.
func (s *Server) serve(j *job, class *int64) (int64, error) {
	if !s.missed(j) {
		return s.deliver(j, nil, class)
	}
	data := s.ahead.awaitChunk(s.ctx, j.key)
	late, err := false, error(nil)
	if data == nil {
		data, late, err = s.fetch(j.key)
	}
	switch {
	case err == nil:
		return s.deliver(j, data, class)
	case s.ctx.Err() != nil:
		return 0, nil
	case late: // whoever waits has a bound of his own
		s.plan.putBack(j)
		select {
		case <-time.After(100 * time.Millisecond):
		case <-s.ctx.Done():
		}
		return 0, nil
	}
	return 0, fmt.Errorf("chunk %d of %s: %w", j.chunk, j.file, err)
}

// fetch asks the Source, and tells an error because of the bound from others.
func (s *Server) fetch(k key) (data []byte, late bool, err error) {
	ctx, cancel := context.WithTimeout(s.ctx, s.cfg.Wait)
	defer cancel()
	data, err = s.cfg.Source.Chunk(ctx, k.file, k.chunk)
	if err != nil {
		return nil, ctx.Err() != nil, err
	}
	return data, false, nil
}

// deliver pushes data to every process, those included that are forked meanwhile.
// No data means that nobody missed any before.
func (s *Server) deliver(j *job, data []byte, class *int64) (int64, error) {
	seen := map[*process]bool{}
	var pushed int64
	again := false
	for {
		p := s.nextFor(j, seen, again, pushed, class)
		if p == nil {
			return pushed, nil
		}
		seen[p] = true
		n, left, err := s.push(p, j, data)
		if err != nil {
			return pushed, err
		}
		pushed += n
		again = again || left
	}
}

// nextFor is a process of the job's file that is not in seen. If there is none,
// the job is over: in one step, so that a child that is forked with the chunk
// missing is either seen or puts it into the plan anew.
func (s *Server) nextFor(j *job, seen map[*process]bool, again bool, pushed int64, class *int64) *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p := range s.procs {
		if p.name == j.file && !seen[p] {
			return p
		}
	}
	waited := s.plan.over(j, again)
	*class += pushed
	s.stats.Waited += waited
	s.stats.Longest = max(s.stats.Longest, waited)
	return nil
}

// push copies what p misses of a chunk, and hears what p does meanwhile. left is
// that some of it could not be copied yet.
func (s *Server) push(p *process, j *job, data []byte) (n int64, left bool, err error) {
	for {
		sure := s.isFinished()
		var heard news
		p.mu.Lock()
		if data != nil && !p.gone {
			var copied int64
			copied, err = p.push(j.chunk, data, s.plan.firstOf(j), sure)
			n += copied
		}
		again := errors.Is(err, errAgain)
		if again {
			err = p.listen(&heard)
		}
		left = len(p.mem.chunks[j.chunk]) > 0
		p.mu.Unlock()
		err = errors.Join(err, s.spread(p, &heard))
		if !again || err != nil {
			break
		}
		time.Sleep(50 * time.Microsecond) // the process is just changing its memory
	}
	s.settled(p)
	return n, left, err
}

// missed tells whether any process misses the job's chunk.
func (s *Server) missed(j *job) bool {
	s.mu.Lock()
	procs := s.list(j.file)
	s.mu.Unlock()
	for _, p := range procs {
		p.mu.Lock()
		missed := len(p.mem.chunks[j.chunk]) > 0
		p.mu.Unlock()
		if missed {
			return true
		}
	}
	return false
}

// bury notes which processes of a file have ended.
func (s *Server) bury(file string) {
	s.mu.Lock()
	procs := s.list(file)
	s.mu.Unlock()
	for _, p := range procs {
		p.mu.Lock()
		if !p.gone && !alive(p.fd) {
			p.end()
		}
		p.mu.Unlock()
		s.settled(p)
	}
}

// list is the processes of a file, or all for "". Callers hold mu.
func (s *Server) list(file string) []*process {
	var out []*process
	for p := range s.procs {
		if file == "" || p.name == file {
			out = append(out, p)
		}
	}
	return out
}

func (s *Server) isFinished() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.finished
}
