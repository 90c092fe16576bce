package layer

import (
	"path/filepath"
	"sync"
	"time"

	"dewpoint/internal/durable"
)

// hardGap is the least time between two fsyncs of a fill's progress. Up to
// Interval / hardGap (13 MB/s with the defaults) a power cut costs no more
// than two intervals; over faster links it costs what arrives meanwhile.
const hardGap = 300 * time.Millisecond

// saver records a fill's progress beside it: at once for this boot, and
// durably as fast as the disk follows. It drops records that newer ones
// overtake, so the fill never waits for the disk here.
type saver struct {
	mu    sync.Mutex
	draft *progress // the newest restart point
	kept  int64     // compressed bytes written to the kept blob
	done  bool
	whole bool  // with done: the stream ended well, the layer itself will be made durable
	lost  error // of a sync of the data: what was written may not be on the disk

	rooted  bool // used by saveHard alone
	wake    chan struct{}
	stopped chan struct{} // closed by stop
	settled chan struct{} // closed when nothing will be written any more
}

func (k *saver) start(from *progress) {
	k.wake = make(chan struct{}, 1)
	k.stopped = make(chan struct{})
	k.settled = make(chan struct{})
	k.draft = from
	k.kept = from.Kept
}

func (k *saver) offer(d *progress) {
	k.mu.Lock()
	k.draft = d
	k.mu.Unlock()
	k.nudge()
}

func (k *saver) keptTo(n int64) {
	k.mu.Lock()
	k.kept = n
	k.mu.Unlock()
	k.nudge()
}

// stop ends the keeping. After a stream that did not end well the newest
// record is saved durably before settled is closed.
func (k *saver) stop(whole bool) {
	k.mu.Lock()
	k.done, k.whole = true, whole
	k.mu.Unlock()
	close(k.stopped)
	k.nudge()
}

func (k *saver) nudge() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

func (k *saver) newest() (d progress, done, whole bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	d = *k.draft
	d.Kept = k.kept
	return d, k.done, k.whole
}

// lose ends the fill with the error of a sync.
func (k *saver) lose(err error) error {
	k.mu.Lock()
	k.lost = err
	k.mu.Unlock()
	k.nudge()
	return err
}

func (k *saver) failure() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.lost
}

// settle waits until nothing will be written any more, and returns an error if what was written is lost. A
// nil saver keeps nothing.
func (k *saver) settle() error {
	if k == nil {
		return nil
	}
	<-k.settled
	return k.failure()
}

// run saves progress until stop. Two savers run side by side, since the
// durable one may wait long for the disk; run does not wait for it, settled
// is closed when it has ended.
func (k *saver) run(p *pipeline) error {
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
func (k *saver) saveBoot(p *pipeline, hard chan progress) error {
	last := *p.from
	offered := last
	for range k.wake {
		if err := k.failure(); err != nil {
			return err
		}
		d, done, whole := k.newest()
		if d.Point.Out > last.Point.Out {
			if err := d.saveBoot(p.f.dir); err != nil {
				return err
			}
			last = d
		}
		ahead := d.sparedBytes() - offered.sparedBytes()
		if ahead >= p.f.store.cfg.Interval || done && !whole && ahead > 0 {
			offered = d
			select {
			case <-hard: // overtaken
			default:
			}
			hard <- d
		}
		if done {
			return nil
		}
	}
	return nil
}

// sparedBytes is how many compressed bytes the record spares the next fill.
func (p progress) sparedBytes() int64 { return max(p.Point.In, p.Kept) }

// saveHard makes data, kept blob and then the record durable. It leaves what
// is left when the fill has ended well meanwhile: the layer is about to be
// made durable as a whole.
func (k *saver) saveHard(p *pipeline, in <-chan progress) error {
	for d := range in {
		if _, _, whole := k.newest(); whole {
			return nil
		}
		if err := k.sync(p); err != nil {
			return k.lose(err)
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

// sync makes durable what a record is to vouch for.
func (k *saver) sync(p *pipeline) error {
	if err := k.syncParent(p); err != nil {
		return err
	}
	if err := durable.Sync(p.data); err != nil {
		return err
	}
	if p.kept == nil {
		return nil
	}
	return durable.Sync(p.kept)
}

// syncParent makes the layer's directory itself durable, once.
func (k *saver) syncParent(p *pipeline) error {
	if k.rooted {
		return nil
	}
	k.rooted = true
	return durable.SyncDir(filepath.Dir(p.f.dir))
}
