package learn

import (
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"

	"dewpoint/internal/layer/inflate"
	"dewpoint/internal/pack"

	"golang.org/x/sys/unix"
)

// outFD is the file that a child writes the pack to.
const outFD = 3

// Child builds the pack that its standard input describes, at the lowest
// priority, and says how that went. It is the whole of a process that Build
// starts; the error is for its exit status.
func Child(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	if err := humble(); err != nil {
		return err
	}
	out := os.NewFile(outFD, "pack")
	if out == nil {
		return errors.New("this is for dewd to start")
	}
	defer out.Close()
	stats, err := serve(ctx, stdin, out)
	o := outcome{Stats: stats}
	if err != nil {
		o.Error, o.Full = err.Error(), errors.Is(err, unix.ENOSPC)
	}
	return errors.Join(err, json.NewEncoder(stdout).Encode(o))
}

// humble lets everything else go first: processors and disk. The priority is
// each thread's own.
func humble() error {
	runtime.LockOSThread() // this one does the work
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	for _, t := range threads {
		id, _ := strconv.Atoi(t.Name())
		if err := unix.Setpriority(unix.PRIO_PROCESS, id, 19); err != nil && err != unix.ESRCH {
			return os.NewSyscallError("setpriority", err)
		}
		const whoProcess, idle = 1, 3 << 13
		unix.Syscall(unix.SYS_IOPRIO_SET, whoProcess, uintptr(id), idle) // not all kernels have it
	}
	return nil
}

func serve(ctx context.Context, stdin io.Reader, out io.Writer) (pack.Stats, error) {
	d := gob.NewDecoder(stdin)
	var j job
	if err := d.Decode(&j); err != nil {
		return pack.Stats{}, fmt.Errorf("read what to build: %w", err)
	}
	in := pack.Input{Image: j.Image, Profile: j.Profile, Dir: j.Dir}
	for i, l := range j.Layers {
		f, err := os.Open(l.Data)
		if err != nil {
			return pack.Stats{}, err
		}
		defer f.Close()
		to := pack.InputLayer{DiffID: l.DiffID, Blob: l.Blob, BlobSize: l.BlobSize, Size: l.Size,
			Compression: l.Compression, Data: f}
		if l.Points {
			to.Points = func(yield func(inflate.Point) error) error { return each(d, i, yield) }
		}
		in.Layers = append(in.Layers, to)
	}
	return pack.Build(ctx, out, in)
}

// each yields the points of layer i, and skips those of layers before it that
// nobody wanted.
func each(d *gob.Decoder, i int, yield func(inflate.Point) error) error {
	for {
		var m mark
		if err := d.Decode(&m); err != nil {
			return err
		}
		switch {
		case m.Layer < i:
		case m.Layer > i:
			return fmt.Errorf("points of layer %d where those of %d are due", m.Layer, i)
		case m.End:
			return nil
		default:
			if err := yield(m.Point); err != nil {
				return err
			}
		}
	}
}
