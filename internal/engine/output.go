package engine

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"dewpoint/internal/engine/logfile"
	"dewpoint/internal/sched"
)

// defaultLogBytes is what a stream of a container's output may take on the disk.
const defaultLogBytes = 16 << 20

// How often it is looked how much containers have written: seldom, unless one was
// seen to write fast.
const (
	outputRarely = 10 * time.Second
	outputOften  = time.Second
)

// boundOutput keeps what containers have written small, until ctx ends.
func (e *outputs) boundOutput(ctx context.Context) {
	sizes, pause := map[string]int64{}, outputRarely
	for sched.Sleep(ctx, pause) {
		var err error
		sizes, pause, err = e.cutOutput(sizes, e.cfg.LogBytes)
		if errors.Is(err, logfile.ErrKept) {
			e.log.Warn("containers' output is kept whole", "because", err)
			return
		}
		if err != nil {
			e.log.Warn("cut containers' output", "err", err)
		}
	}
}

// cutOutput cuts the files that take more than most bytes and have grown since they had
// the sizes before, and returns the ones they have now, and when to look again.
func (e *outputs) cutOutput(before map[string]int64, most int64) (map[string]int64, time.Duration, error) {
	now, pause := map[string]int64{}, outputRarely
	all, failed := e.state.List(context.Background())
	for _, i := range all {
		for _, path := range []string{i.Stdout, i.Stderr} {
			st, err := os.Stat(path)
			if err != nil || st.Size() == before[path] {
				now[path] = before[path]
				continue
			}
			if now[path] = st.Size(); st.Size()-before[path] > most/4 {
				pause = outputOften
			}
			if err := logfile.Cut(path, most); err != nil && !errors.Is(err, fs.ErrNotExist) {
				failed = err
			}
		}
	}
	return now, pause, failed
}
