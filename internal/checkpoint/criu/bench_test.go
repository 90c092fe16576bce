package criu_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"dewpoint/internal/checkpoint"
	"dewpoint/internal/engine"
	"dewpoint/testkit/enginetest"
)

// BenchmarkDumpAndRestore tells, for a small container and one with 64 MiB of
// memory, how long a dump stops it, and how long a container takes from its
// creation, booted and restored, until it answers.
func BenchmarkDumpAndRestore(b *testing.B) {
	for name, prog := range containerds() {
		bed := newBed(b, prog)
		for _, things := range [][]string{nil, {"memory"}} {
			b.Run(fmt.Sprintf("%s/%d", name, len(things)), func(b *testing.B) { bed.bench(b, things) })
		}
	}
}

func (b *bed) bench(tb *testing.B, things []string) {
	var pause, boot, create, start, answer time.Duration
	for range tb.N {
		began := time.Now()
		one := b.Boot(tb, enginetest.Boot{Name: "one", Things: things})
		boot += time.Since(began)
		dir, err := os.MkdirTemp("", "bench")
		if err != nil {
			tb.Fatal(err)
		}
		var d checkpoint.Dumped
		d, err = b.criu.Dump(tb.Context(), one.Container, dir, func(ctx context.Context) error {
			return b.Keep(ctx, "one", dir)
		})
		if err != nil {
			tb.Fatal(err)
		}
		pause += d.Paused
		began = time.Now()
		_, err = b.e.Create(tb.Context(), b.restoreSpec("two", dir))
		create += time.Since(began)
		if err == nil {
			err = b.e.Start(tb.Context(), "two")
		}
		start += time.Since(began)
		var i *engine.Info
		if err == nil {
			i, err = b.e.Inspect(tb.Context(), "two")
		}
		if err == nil {
			_, err = running(i, int(i.Pid)).Ask("count")
		}
		if err != nil {
			tb.Fatal(err)
		}
		answer += time.Since(began)
		if os.Getenv("KEEPLOG") != "" {
			l, _ := os.ReadFile(b.e.WorkDir("two") + "/restore.log")
			os.WriteFile(os.Getenv("KEEPLOG"), l, 0o600)
		}
		b.Remove(tb, "one")
		b.Remove(tb, "two")
		os.RemoveAll(dir)
	}
	for unit, d := range map[string]time.Duration{"pause-ms": pause, "boot-ms": boot, "create-ms": create,
		"start-ms": start - create, "answer-ms": answer} {
		tb.ReportMetric(float64(d.Milliseconds())/float64(tb.N), unit)
	}
	tb.ReportMetric(0, "ns/op")
}
