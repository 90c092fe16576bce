package admit

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
)

// kernelMemory is the machine's. A cgroup that bounds dewd does not bound containers.
func kernelMemory() (Memory, error) {
	b, err := head("/proc/meminfo")
	if err != nil {
		return Memory{}, err
	}
	m := Memory{Available: -1}
	for line := range bytes.Lines(b) {
		f := bytes.Fields(line)
		if len(f) != 3 {
			continue
		}
		n, err := strconv.ParseInt(string(f[1]), 10, 64)
		if err != nil {
			continue
		}
		switch string(f[0]) {
		case "MemTotal:":
			m.Total = n << 10
		case "MemAvailable:":
			m.Available = n << 10
		}
		if m.Total > 0 && m.Available >= 0 {
			return m, nil
		}
	}
	return Memory{}, fmt.Errorf("/proc/meminfo: %q has no MemTotal and MemAvailable", b)
}

// head reads the beginning of a small file in one call, as procfs has it.
func head(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b := make([]byte, 512)
	n, err := f.Read(b)
	return b[:n], err
}

// kernelPressure is what the kernel has of it: nothing without CONFIG_PSI.
func kernelPressure() Pressure {
	return Pressure{CPU: some("/proc/pressure/cpu"), Memory: some("/proc/pressure/memory"), IO: some("/proc/pressure/io")}
}

// some is avg10 of a PSI file's line "some".
func some(path string) float64 {
	b, err := head(path)
	if err != nil {
		return 0
	}
	return parseSome(b)
}

func parseSome(b []byte) float64 {
	_, b, ok := bytes.Cut(b, []byte("some avg10="))
	if !ok {
		return 0
	}
	b, _, _ = bytes.Cut(b, []byte(" "))
	v, err := strconv.ParseFloat(string(b), 64)
	if err != nil || v < 0 || v > 100 {
		return 0
	}
	return v
}
