package admit

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
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
	var p Pressure
	p.CPU, p.Waited = some("/proc/pressure/cpu")
	p.Memory, _ = some("/proc/pressure/memory")
	p.IO, _ = some("/proc/pressure/io")
	return p
}

// some is avg10 and total of a PSI file's line "some".
func some(path string) (percent float64, total time.Duration) {
	b, err := head(path)
	if err != nil {
		return 0, 0
	}
	return parseSome(b)
}

func parseSome(b []byte) (percent float64, total time.Duration) {
	line, _, _ := strings.Cut(string(b), "\n")
	if !strings.HasPrefix(line, "some ") {
		return 0, 0
	}
	for _, f := range strings.Fields(line) {
		name, value, _ := strings.Cut(f, "=")
		switch v, err := strconv.ParseFloat(value, 64); {
		case err != nil || v < 0:
		case name == "avg10" && v <= 100:
			percent = v
		case name == "total":
			total = time.Duration(v) * time.Microsecond
		}
	}
	return percent, total
}
