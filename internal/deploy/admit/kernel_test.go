package admit

import (
	"fmt"
	"os"
	"testing"
	"time"
)

// What the kernel says of this machine is understood.
func TestKernel(t *testing.T) {
	m, err := kernelMemory()
	if err != nil || m.Available <= 0 || m.Available > m.Total {
		t.Errorf("%+v, %v", m, err)
	}
	p := kernelPressure()
	if _, err := os.Stat("/proc/pressure"); err != nil && p != (Pressure{}) {
		t.Errorf("%+v of a kernel that has none", p)
	}
}

func TestParseSome(t *testing.T) {
	type read struct {
		percent float64
		total   time.Duration
	}
	for in, want := range map[string]read{
		"some avg10=84.58 avg60=79.71 avg300=50.76 total=145\nfull avg10=1.00 avg60=0 avg300=0 total=9\n": {84.58,
			145 * time.Microsecond},
		"some avg10=0.00 avg60=1.00 total=2432679946": {0,
			2432679946 * time.Microsecond},
		"":                           {},
		"some avg10=":                {},
		"some avg10=x total=y":       {},
		"some avg10=1e9 total=-1":    {},
		"full avg10=3.00 total=3000": {},
	} {
		if percent, total := parseSome([]byte(in)); percent != want.percent || total != want.total {
			t.Errorf("%q: %g, %v, want %v", in, percent, total, want)
		}
	}
}

// What a deployment on an idle node pays.
func BenchmarkIdle(b *testing.B) {
	a := New(Config{})
	defer a.Close()
	for b.Loop() {
		k, err := a.Enter(Claim{Caller: "uid 0", Image: "x"})
		if err == nil {
			err = k.Run(b.Context())
		}
		if err != nil {
			b.Fatal(err)
		}
		k.Done(0)
	}
}

// The same when what is known of the machine is too old.
func BenchmarkLook(b *testing.B) {
	a := New(Config{})
	defer a.Close()
	for b.Loop() {
		if _, err := kernelMemory(); err != nil {
			b.Fatal(err)
		}
		kernelPressure()
	}
}

// A slot changes hands while many wait, of one and of a hundred callers.
func BenchmarkFull(b *testing.B) {
	for _, callers := range []int{1, 100} {
		b.Run(fmt.Sprint(callers), func(b *testing.B) {
			a := New(Config{Max: 1, Queue: 4096, PerCaller: 4096})
			defer a.Close()
			last, err := a.Enter(Claim{})
			if err != nil {
				b.Fatal(err)
			}
			line := make([]*Ticket, 0, b.N+2048)
			add := func(i int) {
				k, err := a.Enter(Claim{Caller: fmt.Sprint(i % callers)})
				if err != nil {
					b.Fatal(err)
				}
				line = append(line, k)
			}
			for i := range 2000 {
				add(i)
			}
			for i := 0; b.Loop(); i++ {
				last.Done(0)
				if last = line[i]; last.Place().Position != 0 {
					b.Fatal("it was not next")
				}
				add(i)
			}
		})
	}
}
