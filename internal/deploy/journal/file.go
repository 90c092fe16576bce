package journal

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"strconv"
	"time"

	"dewpoint/internal/durable"
	"dewpoint/internal/spec"
)

// line is the JSON of one line.
type line struct {
	Accept *accepted `json:"accept,omitempty"`
	End    *ended    `json:"end,omitempty"`
}

type accepted struct{ Entry }

type ended struct {
	ID      string        `json:"id"`
	State   string        `json:"state"`
	Ended   time.Time     `json:"ended"`
	Record  *spec.Record  `json:"record,omitempty"`
	Failure *spec.Failure `json:"error,omitempty"`
	Void    bool          `json:"void,omitempty"`
}

func marshal(l line) ([]byte, error) { return json.Marshal(l) }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// seal adds a line to b, and says where in b its JSON is.
func seal(b []byte, more int, text []byte) ([]byte, span) {
	rest := append(strconv.AppendInt(nil, int64(more), 10), ' ')
	sum := crc32.Update(crc32.Checksum(rest, castagnoli), castagnoli, text)
	b = fmt.Appendf(b, "%08x %s", sum, rest)
	s := span{int64(len(b)), len(text)}
	return append(append(b, text...), '\n'), s
}

// unseal is the way back; ok is false for what seal has not written so.
func unseal(l []byte) (more int, text []byte, ok bool) {
	l, whole := bytes.CutSuffix(l, []byte("\n"))
	sum, rest, two := bytes.Cut(l, []byte(" "))
	want, err := strconv.ParseUint(string(sum), 16, 32)
	if !whole || !two || err != nil || len(sum) != 8 || uint32(want) != crc32.Checksum(rest, castagnoli) {
		return 0, nil, false
	}
	n, text, two := bytes.Cut(rest, []byte(" "))
	more, err = strconv.Atoi(string(n))
	return more, text, two && err == nil
}

// maxLine bounds a line; a request is below a mebibyte.
const maxLine = 8 << 20

// read takes the file into memory and says how many lines are damaged. What was accepted
// together counts once its last line is there.
func (j *Journal) read() (bad int, err error) {
	in := bufio.NewReaderSize(j.f, 64<<10)
	var together []*item
	var at int64
	for {
		raw, err := readLine(in)
		if errors.Is(err, io.EOF) && len(raw) == 0 {
			break
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return bad, err
		}
		more, text, ok := unseal(raw)
		var l line
		if ok = ok && json.Unmarshal(text, &l) == nil; !ok {
			bad++
		}
		s := span{at + int64(len(raw)-len(text)-1), len(text)}
		at += int64(len(raw))
		switch {
		case l.Accept != nil:
			together = append(together, &item{Deployment: l.Accept.Deployment, sum: l.Accept.Sum, accept: s})
			if more == 0 {
				j.enterAll(together)
				together = nil
			}
		case l.End != nil:
			j.readEnd(l.End, s)
		}
		if ok && len(together) == 0 {
			j.size = at
		}
	}
	if bad > 0 {
		j.cfg.Log.Warn("the journal of deployments has lines that are damaged: a crash tears the last one, others are the disk's fault", "lines", bad)
	}
	return bad, nil
}

func (j *Journal) enterAll(all []*item) {
	for _, i := range all {
		if j.items[i.ID] == nil {
			j.enter(i)
		}
	}
}

func (j *Journal) readEnd(e *ended, s span) {
	if i := j.items[e.ID]; i != nil && !i.Over() {
		j.finish(i, e.State, e.Ended, e.Void)
		i.end = s
	}
}

// readLine is a line with its end, or what is there before the file's; too long a line is
// given in pieces.
func readLine(in *bufio.Reader) ([]byte, error) {
	var out []byte
	for {
		part, err := in.ReadSlice('\n')
		out = append(out, part...)
		if !errors.Is(err, bufio.ErrBufferFull) || len(out) > maxLine {
			if errors.Is(err, bufio.ErrBufferFull) {
				err = nil
			}
			return out, err
		}
	}
}

// line reads one back. It is called with mu held.
func (j *Journal) line(s span) (line, error) {
	b, err := j.text(s)
	if err != nil {
		return line{}, err
	}
	return parse(b)
}

// text is a line's JSON. It is called with mu held.
func (j *Journal) text(s span) ([]byte, error) {
	b := make([]byte, s.n)
	_, err := j.f.ReadAt(b, s.at)
	return b, err
}

func parse(b []byte) (line, error) {
	var l line
	err := json.Unmarshal(b, &l)
	return l, err
}

// forget lets go of what is too old or too much, and says whether that was something. It is
// called with mu held.
func (j *Journal) forget() bool {
	since := time.Now().Add(-j.cfg.Keep)
	if j.ended <= j.cfg.Most && (len(j.order) == 0 || !j.order[0].Over() || j.order[0].Ended.After(since)) {
		return false
	}
	before := len(j.order)
	spare := j.ended - j.cfg.Most
	j.order = slices.DeleteFunc(j.order, func(i *item) bool {
		if !i.Over() || i.last != nil || spare <= 0 && i.Ended.After(since) {
			return false
		}
		spare--
		j.ended--
		delete(j.items, i.ID)
		if k := [2]string{i.Caller, i.Key}; j.keys[k] == i {
			delete(j.keys, k)
		}
		return true
	})
	return len(j.order) < before
}

// slack is how much of the file may be of no use, beyond as much as was of use.
const slack = 1 << 20

// mend writes the file anew, durably, if it has to be, or if that is worth it. It is called with mu held.
func (j *Journal) mend() error {
	if !j.torn && j.size < 2*j.base+slack {
		return nil
	}
	j.forget()
	n := &newFile{}
	err := durable.Commit(j.cfg.Path, 0o600, func(f *os.File) error { return n.write(f, j) })
	if err != nil && !j.replaced() {
		if j.torn {
			return err
		}
		j.base = j.size // it goes on as it is, for a while
		return nil
	}
	f, oerr := os.OpenFile(j.cfg.Path, os.O_RDWR, 0)
	if oerr != nil {
		j.torn = true
		return oerr
	}
	j.f.Close()
	j.f, j.size, j.base = f, n.size, n.size
	for k, i := range j.order {
		i.accept, i.end, i.last = n.accepts[k], n.ends[k], nil
	}
	j.unwritten = nil
	j.wrote++
	if j.torn, j.lost = err != nil, err != nil; j.lost { // a power cut may bring back the old file
		signal(j.soon)
		return err
	}
	j.durable(j.wrote, nil)
	return nil
}

// replaced reports whether another file than f has the journal's name.
func (j *Journal) replaced() bool {
	named, err := os.Stat(j.cfg.Path)
	open, oerr := j.f.Stat()
	return err == nil && oerr == nil && !os.SameFile(named, open)
}

// newFile is where the lines are in a file that is written anew.
type newFile struct {
	accepts, ends []span
	size          int64
}

func (n *newFile) write(f *os.File, j *Journal) error {
	out := bufio.NewWriterSize(f, 64<<10)
	put := func(text []byte) (span, error) {
		b, s := seal(nil, 0, text)
		s.at += n.size
		n.size += int64(len(b))
		_, err := out.Write(b)
		return s, err
	}
	for _, i := range j.order {
		text := make([]byte, i.accept.n)
		if _, err := j.f.ReadAt(text, i.accept.at); err != nil {
			return err
		}
		a, err := put(text)
		if err != nil {
			return err
		}
		var e span
		if i.Over() {
			if text = i.last; text == nil {
				text = make([]byte, i.end.n)
				if _, err := j.f.ReadAt(text, i.end.at); err != nil {
					return err
				}
			}
			if e, err = put(text); err != nil {
				return err
			}
		}
		n.accepts, n.ends = append(n.accepts, a), append(n.ends, e)
	}
	return out.Flush()
}

// lazySync is how long an end may wait until it is durable.
const lazySync = time.Second

// sync is the goroutine that makes what was written durable.
func (j *Journal) sync() {
	defer close(j.gone)
	for j.awaited() {
		j.mu.Lock()
		err := j.pay()
		if err == nil && j.lost {
			err = j.mend()
		}
		if err != nil && !j.closed {
			j.cfg.Log.Warn("the journal of deployments cannot be written to", "err", err)
			signal(j.soon)
		}
		if j.lost {
			j.durable(0, err)
		}
		f, upTo := j.f, j.wrote
		dirty := upTo > j.synced && !j.lost
		j.mu.Unlock()
		if !dirty {
			continue
		}
		err = durable.Sync(f)
		j.mu.Lock()
		if j.f == f { // else it was written anew meanwhile, and who waits was told
			if err != nil { // what was written may be lost though it can be read
				j.torn, j.lost = true, true
				signal(j.soon)
			}
			j.durable(upTo, err)
		}
		j.mu.Unlock()
	}
}

// awaited returns when there is something to make durable: at once if somebody waits for
// it, else in lazySync. It is false if the journal is closed.
func (j *Journal) awaited() bool {
	select {
	case <-j.hurry:
		return true
	case <-j.stop:
		return false
	case <-j.soon:
	}
	t := time.NewTimer(lazySync)
	defer t.Stop()
	select {
	case <-j.hurry:
	case <-t.C:
	case <-j.stop:
		return false
	}
	return true
}

// durable tells who waits. It is called with mu held.
func (j *Journal) durable(upTo uint64, err error) {
	if err == nil {
		j.synced = max(j.synced, upTo)
	}
	j.failed = err
	close(j.turned)
	j.turned = make(chan struct{})
}
