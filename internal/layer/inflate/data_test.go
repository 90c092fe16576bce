package inflate

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
)

// payloads are uncompressed streams of many kinds.
var payloads = sync.OnceValue(func() map[string][]byte {
	rnd := rand.New(rand.NewPCG(1, 2))
	random := make([]byte, 300_000)
	for i := range random {
		random[i] = byte(rnd.Uint32())
	}
	var far bytes.Buffer // matches as far back as they go
	for far.Len() < 400_000 {
		far.Write(random[:32<<10-rnd.IntN(300)])
	}
	return map[string][]byte{
		"empty":  {},
		"byte":   {'x'},
		"zeros":  make([]byte, 700_000),
		"random": random,
		"text":   words(rnd, 500_000),
		"far":    far.Bytes(),
		"short":  repeats(rnd, 500_000),
		"skewed": skewed(rnd, 400_000),
		"mixed": bytes.Join([][]byte{words(rnd, 100_000), random[:150_000], make([]byte, 99_999),
			words(rnd, 200_000)}, nil),
		"binary": executable(1_000_000),
	}
})

func words(rnd *rand.Rand, n int) []byte {
	list := make([]string, 3000)
	for i := range list {
		b := make([]byte, 2+rnd.IntN(9))
		for j := range b {
			b[j] = "etaoinshrdlucmfwypvbgkqjxz"[min(rnd.IntN(26), rnd.IntN(26))]
		}
		list[i] = string(b)
	}
	var out bytes.Buffer
	for out.Len() < n {
		fmt.Fprintf(&out, "%s ", list[min(rnd.IntN(3000), rnd.IntN(3000), rnd.IntN(3000))])
	}
	return out.Bytes()[:n]
}

// repeats makes overlapping matches of every small distance.
func repeats(rnd *rand.Rand, n int) []byte {
	var out []byte
	for len(out) < n {
		unit := make([]byte, 1+rnd.IntN(40))
		for i := range unit {
			unit[i] = byte(rnd.Uint32())
		}
		out = append(out, bytes.Repeat(unit, 1+rnd.IntN(30))...)
	}
	return out[:n]
}

// skewed bytes need codes of up to 15 bits.
func skewed(rnd *rand.Rand, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		v := 0
		for v < 255 && rnd.IntN(100) < 55 {
			v++
		}
		if rnd.IntN(5000) == 0 {
			v = rnd.IntN(256)
		}
		out[i] = byte(v)
	}
	return out
}

func executable(n int) []byte {
	path, err := os.Executable()
	if err != nil {
		panic(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		panic(err)
	}
	return b[:min(n, len(b))]
}

func goGzip(level int, parts ...[]byte) []byte {
	var out bytes.Buffer
	z, err := gzip.NewWriterLevel(&out, level)
	if err != nil {
		panic(err)
	}
	z.Name, z.Comment, z.Extra = "name", "comment", []byte("extra")
	for i, p := range parts {
		if i > 0 {
			z.Flush()
		}
		z.Write(p)
	}
	z.Close()
	return out.Bytes()
}

// command filters data through a program of the base system.
func command(t testing.TB, data []byte, line string) []byte {
	args := strings.Fields(line)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin = bytes.NewReader(data)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return out
}

// packer makes a gzip stream of data.
type packer struct {
	name string
	pack func(t testing.TB, data []byte) []byte
}

func packers() []packer {
	var list []packer
	for level := gzip.HuffmanOnly; level <= gzip.BestCompression; level++ {
		list = append(list, packer{fmt.Sprintf("go%d", level), func(_ testing.TB, data []byte) []byte {
			return goGzip(level, data)
		}})
	}
	for _, line := range []string{"gzip -1 -n", "gzip -6", "gzip -9", "gzip --rsyncable"} {
		list = append(list, packer{line, func(t testing.TB, data []byte) []byte { return command(t, data, line) }})
	}
	return append(list,
		packer{"flushed", func(_ testing.TB, data []byte) []byte { return goGzip(6, split(data, 30_000)...) }},
		packer{"members", func(_ testing.TB, data []byte) []byte { return members(data, 65_280) }},
		packer{"tiny members", func(_ testing.TB, data []byte) []byte { return members(data[:len(data)/20], 700) }},
		packer{"padded", func(_ testing.TB, data []byte) []byte {
			return append(members(data, 200_000), make([]byte, 10_000)...)
		}},
	)
}

func split(data []byte, n int) (parts [][]byte) {
	for len(data) > n {
		parts = append(parts, data[:n])
		data = data[n:]
	}
	return append(parts, data)
}

// members makes a stream of many members as bgzip does, empty ones among them.
func members(data []byte, n int) (out []byte) {
	for i, p := range split(data, n) {
		out = append(out, goGzip(1+i%9, p)...)
		if i%3 == 0 {
			out = append(out, goGzip(6)...)
		}
	}
	return out
}

// reference inflates with the standard library.
func reference(t testing.TB, gz []byte) []byte {
	z, err := gzip.NewReader(bytes.NewReader(bytes.TrimRight(gz, "\x00")))
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(z)
	if err != nil && err != gzip.ErrHeader && err != io.ErrUnexpectedEOF {
		t.Fatal(err)
	}
	return b
}

// readAll reads r in buffers of n bytes.
func readAll(r io.Reader, n int) ([]byte, error) {
	var out []byte
	buf := make([]byte, n)
	for idle := 0; idle < 3; {
		k, err := r.Read(buf)
		out = append(out, buf[:k]...)
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return out, err
		}
		idle++
		if k > 0 {
			idle = 0
		}
	}
	return out, io.ErrNoProgress
}
