package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"
)

// figure is a measurement that is no instruction's time: a size, a rate, a
// latency.
type figure struct {
	Image  string    `json:"image"`
	State  string    `json:"state"` // of the container, or the engine
	What   string    `json:"what"`
	Unit   string    `json:"unit"`
	Values []float64 `json:"values"` // raw
}

func (f figure) median() float64 { return median(f.Values) }

// find is the figure of what in a state; nil if there is none.
func find(all []figure, image, state, what string) *figure {
	i := slices.IndexFunc(all, func(f figure) bool {
		return f.Image == image && f.State == state && f.What == what
	})
	if i < 0 {
		return nil
	}
	return &all[i]
}

// merge adds figures, those of the same thing together.
func merge(all, more []figure) []figure {
	for _, m := range more {
		if f := find(all, m.Image, m.State, m.What); f != nil {
			f.Values = append(f.Values, m.Values...)
		} else {
			all = append(all, m)
		}
	}
	return all
}

// tabulate prints medians, and ratios to the state called base.
func tabulate(out io.Writer, all []figure, base string) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "image\twhat\tstate\tmedian\tmin\tmax\tunit\t/ %s\tn\n", base)
	for _, f := range all {
		against := "-"
		if b := find(all, f.Image, base, f.What); b != nil && b.median() != 0 {
			against = fmt.Sprintf("%.3f", f.median()/b.median())
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%.4g\t%.4g\t%.4g\t%s\t%s\t%d\n", f.Image, f.What, f.State, f.median(),
			slices.Min(f.Values), slices.Max(f.Values), f.Unit, against, len(f.Values))
	}
	w.Flush()
}

// writeFigures leaves figures in PREFIX.json and PREFIX.csv, after the
// samples of the same part if there are any.
func writeFigures(prefix string, all []figure) error {
	raw, err := json.MarshalIndent(map[string]any{"commit": commit(), "machine": machine(), "figures": all}, "",
		" ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(prefix+"-figures.json", raw, 0o644); err != nil {
		return err
	}
	rows := [][]string{{"image", "state", "what", "unit", "value"}}
	for _, f := range all {
		for _, v := range f.Values {
			rows = append(rows, []string{f.Image, f.State, f.What, f.Unit, fmt.Sprint(v)})
		}
	}
	return writeCSV(prefix+"-figures.csv", rows)
}
