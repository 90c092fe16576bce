package layer

import (
	"sync"
	"time"

	"dewpoint/internal/durable"
)

// hardGap is the least time between two fsyncs of a fill's progress. Up to
// Interval / hardGap (13 MB/s with the defaults) a power cut costs no more
// than two intervals; over faster links it costs what arrives meanwhile.
const hardGap = 300 * time.Millisecond

// keeper records a fill's progress beside it: at once for this boot, and
// durably as fast as the disk follows. It drops records that newer ones
// overtake, so the fill never waits for the disk here.
type keeper struct {
	mu    sync.Mutex
	draft *progress // the newest restart point
	kept  int64     // compressed bytes written to the kept blob
	done  bool

	wake    chan struct{}
	stopped chan struct{} // closed by stop
	settled chan struct{} // closed when nothing will be written any more
}

func (k *keeper) start(from *progress) {
	k.wake = make(chan struct{}, 1)
	k.stopped = make(chan struct{})
	k.settled = make(chan struct{})
	k.draft = from
	k.kept = from.Kept
}

func (k *keeper) offer(d *progress) {
	k.mu.Lock()
	k.draft = d
	k.mu.Unlock()
	k.nudge()
}

func (k *keeper) keptTo(n int64) {
	k.mu.Lock()
	k.kept = n
	k.mu.Unlock()
	k.nudge()
}

func (k *keeper) stop() {
	k.mu.Lock()
	k.done = true
	k.mu.Unlock()
	close(k.stopped)
	k.nudge()
}

func (k *keeper) nudge() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

func (k *keeper) newest() (progress, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := *k.draft
	d.Kept = k.kept
	return d, k.done
}

// run saves progress until stop. Two savers run side by side, since the
// durable one may wait long for the disk; run does not wait for it, settled
// is closed when it has ended.
func (k *keeper) run(p *pipeline) error {
	hard := make(chan progress, 1)
	defer close(hard)
	go func() {
		defer close(k.settled)
		if err := k.saveHard(p, hard); err != nil {
			p.f.store.cfg.Log.Warn("progress of a layer is not recorded", "layer", p.f.Layer.Digest, "err", err)
		}
	}()
	return k.saveBoot(p, hard)
}

// saveBoot writes each new restart point for this boot and hands on what is
// worth an fsync.
func (k *keeper) saveBoot(p *pipeline, hard chan progress) error {
	last := *p.from
	offered := last
	for range k.wake {
		d, done := k.newest()
		if d.Point.Out > last.Point.Out {
			if err := d.saveBoot(p.f.dir); err != nil {
				return err
			}
			last = d
		}
		if done {
			return nil
		}
		if max(d.Point.In, d.Kept)-max(offered.Point.In, offered.Kept) >= p.f.store.cfg.Interval {
			offered = d
			select {
			case <-hard: // overtaken
			default:
			}
			hard <- d
		}
	}
	return nil
}

// saveHard makes data, kept blob and then the record durable. It leaves the
// last record when the fill has ended meanwhile: the layer is about to be
// made durable as a whole.
func (k *keeper) saveHard(p *pipeline, in <-chan progress) error {
	for d := range in {
		if _, done := k.newest(); done {
			return nil
		}
		if err := durable.Sync(p.data); err != nil {
			return err
		}
		if p.kept != nil {
			if err := durable.Sync(p.kept); err != nil {
				return err
			}
		}
		if err := d.save(p.f.dir); err != nil {
			return err
		}
		select {
		case <-k.stopped:
		case <-time.After(hardGap):
		}
	}
	return nil
}
