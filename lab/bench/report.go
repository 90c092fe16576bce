package bench

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"

	"golang.org/x/sys/unix"
)

// report gathers samples and writes them three ways: a table of medians for
// people, PREFIX.json and PREFIX.csv with every sample.
type report struct {
	out, progress io.Writer
	experiment    string
	prefix        string
	samples       []Sample
}

func newReport(out, progress io.Writer, experiment, prefix string) *report {
	return &report{out: out, progress: progress, experiment: experiment, prefix: prefix}
}

// header says what was measured and where.
func (r *report) header(engines []engine) {
	fmt.Fprintf(r.out, "commit %s\nmachine %s\n", commit(), machine())
	for _, e := range engines {
		fmt.Fprintf(r.out, "engine %s: inflater %s\n", e.name(), e.inflater())
	}
	fmt.Fprintln(r.out)
}

// commit is that of the tree in which the program lies, as "make build" leaves it.
func commit() string {
	out, err := exec.Command("git", "-C", besideUs(), "describe", "--always", "--dirty").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}

func machine() string {
	var u unix.Utsname
	unix.Uname(&u)
	model := "unknown processor"
	raw, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(raw)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			model = strings.TrimSpace(value)
			break
		}
	}
	var info unix.Sysinfo_t
	unix.Sysinfo(&info)
	return fmt.Sprintf("%s, %d cores, %d MB, Linux %s %s", model, runtime.NumCPU(),
		info.Totalram*uint64(info.Unit)>>20, unix.ByteSliceToString(u.Release[:]), runtime.GOARCH)
}

func (r *report) add(s Sample) {
	s.Experiment = r.experiment
	r.samples = append(r.samples, s)
	fmt.Fprintf(r.progress, "%-24s %-14s %5g Mbit/s %-6s %8.3f s  cpu %6.2f s  peak %4d MB  wire %.1f MB  %s\n",
		s.Engine, s.Image, s.Mbit, s.What, s.Seconds, s.CPU, s.Peak>>20, float64(s.Wire)/1e6, s.Way)
}

// key is what a row of the table stands for.
type key struct {
	image string
	mbit  float64
	what  string
}

// table prints the medians, and ratios to the engine called base.
func (r *report) table(base string) {
	w := tabwriter.NewWriter(r.out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "image\tMbit/s\twhat\tengine\tseconds\tmin\tmax\tCPU s\tpeak MB\tidle MB\twire MB\ttime/%[1]s\tCPU/%[1]s\tn\n", base)
	for _, k := range r.keys() {
		reference := r.of(k, base)
		for _, name := range r.engines() {
			rows := r.of(k, name)
			if len(rows) == 0 {
				continue
			}
			times := values(rows, func(s Sample) float64 { return s.Seconds })
			cpu := median(values(rows, func(s Sample) float64 { return s.CPU }))
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%.3f\t%.3f\t%.3f\t%.2f\t%.0f\t%.0f\t%.1f\t%s\t%s\t%d\n",
				k.image, rate(k.mbit), k.what, name, median(times), slices.Min(times), slices.Max(times), cpu,
				median(values(rows, func(s Sample) float64 { return float64(s.Peak) }))/(1<<20),
				median(values(rows, func(s Sample) float64 { return float64(s.Idle) }))/(1<<20),
				median(values(rows, func(s Sample) float64 { return float64(s.Wire) }))/1e6,
				ratio(median(times), values(reference, func(s Sample) float64 { return s.Seconds })),
				ratio(cpu, values(reference, func(s Sample) float64 { return s.CPU })), len(rows))
		}
	}
	w.Flush()
}

func rate(mbit float64) string {
	if mbit == 0 {
		return "all"
	}
	return fmt.Sprintf("%g", mbit)
}

func ratio(x float64, reference []float64) string {
	if len(reference) == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", x/median(reference))
}

func (r *report) keys() (keys []key) {
	for _, s := range r.samples {
		if k := (key{s.Image, s.Mbit, s.What}); !slices.Contains(keys, k) {
			keys = append(keys, k)
		}
	}
	return keys
}

func (r *report) engines() (names []string) {
	for _, s := range r.samples {
		if !slices.Contains(names, s.Engine) {
			names = append(names, s.Engine)
		}
	}
	return names
}

func (r *report) of(k key, engine string) (rows []Sample) {
	for _, s := range r.samples {
		if s.Engine == engine && k == (key{s.Image, s.Mbit, s.What}) {
			rows = append(rows, s)
		}
	}
	return rows
}

func values(rows []Sample, of func(Sample) float64) []float64 {
	v := make([]float64, len(rows))
	for i, s := range rows {
		v[i] = of(s)
	}
	return v
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

// write leaves the samples in PREFIX.json and PREFIX.csv.
func (r *report) write() error {
	raw, err := json.MarshalIndent(map[string]any{"commit": commit(), "machine": machine(),
		"samples": r.samples}, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(r.prefix+".json", raw, 0o644); err != nil {
		return err
	}
	rows := [][]string{{"experiment", "engine", "image", "mbit", "round", "what", "seconds", "cpu", "peak",
		"idle", "wire", "way"}}
	for _, s := range r.samples {
		rows = append(rows, []string{s.Experiment, s.Engine, s.Image, fmt.Sprint(s.Mbit), fmt.Sprint(s.Round),
			s.What,
			fmt.Sprint(s.Seconds), fmt.Sprint(s.CPU), fmt.Sprint(s.Peak), fmt.Sprint(s.Idle), fmt.Sprint(s.Wire),
			s.Way})
	}
	return writeCSV(r.prefix+".csv", rows)
}

func writeCSV(path string, rows [][]string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := csv.NewWriter(f).WriteAll(rows); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}
