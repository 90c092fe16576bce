package bench

import (
	"fmt"
	"math"
	"os"
	"strings"
)

func (b *bootBench) markdown(title string, head []string, rows [][]string) {
	b.report.markdown(fmt.Sprintf("%s (commit %s, %s; medians of %d)", title, commit(), machine(), b.o.rounds),
		head, rows)
}

// markdown prints a table as the documentation has them, and adds it to PREFIX.md.
func (r *report) markdown(title string, head []string, rows [][]string) {
	r.note(markdownTable(title, head, rows))
}

// markdownTable is a table below its title, if it has one.
func markdownTable(title string, head []string, rows [][]string) string {
	var t strings.Builder
	if title != "" {
		fmt.Fprintf(&t, "\n%s\n", title)
	}
	line := func(cells []string) { fmt.Fprintf(&t, "| %s |\n", strings.Join(cells, " | ")) }
	t.WriteString("\n")
	line(head)
	fmt.Fprintf(&t, "|%s\n", strings.Repeat("---|", len(head)))
	for _, row := range rows {
		line(row)
	}
	return t.String()
}

// note prints a text, and adds it to PREFIX.md.
func (r *report) note(text string) {
	fmt.Fprint(r.out, text)
	f, err := os.OpenFile(r.prefix+".md", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err == nil {
		_, err = f.WriteString(text)
		f.Close()
	}
	if err != nil {
		fmt.Fprintln(r.progress, err)
	}
}

// bootTable sets boot, restore and Docker beside each other, for every image and each of what.
func (b *bootBench) bootTable(title string, what []string,
	verdict func(image, what string, boot, restore float64) string) {
	head := []string{"image", "", "docker, s", "boot, s", "restore, s", "restore / boot", "restore / docker",
		"CPU s: docker", "boot", "restore", "auto", "targets"}
	var rows [][]string
	for _, image := range b.o.images {
		for _, w := range what {
			if row := b.bootRow(image, w, verdict); row != nil {
				rows = append(rows, row)
			}
		}
	}
	b.markdown(title, head, rows)
}

func (b *bootBench) bootRow(image, what string,
	verdict func(image, what string, boot, restore float64) string) []string {
	k := key{image, 0, what}
	of := func(engine string, v func(Sample) float64) float64 {
		rows := b.report.of(k, engine)
		if len(rows) == 0 {
			return math.NaN()
		}
		return median(values(rows, v))
	}
	boot, restore, docker := of("boot", seconds), of("restore", seconds), of("docker", seconds)
	if math.IsNaN(boot) && math.IsNaN(restore) {
		return nil
	}
	said := b.refused[image]
	if !math.IsNaN(restore) {
		said = strings.TrimPrefix(said+"; "+verdict(image, what, boot, restore), "; ")
	}
	auto := ""
	if rows := b.report.of(k, "auto"); len(rows) > 0 {
		auto = rows[0].Way
	}
	return []string{image, what, number(docker), number(boot), number(restore), number(restore / boot),
		number(restore / docker),
		number(of("docker", cpuSeconds)), number(of("boot", cpuSeconds)), number(of("restore", cpuSeconds)), auto,
		said}
}

// number prints what was measured; what was not is empty.
func number(v float64) string {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return ""
	}
	return fmt.Sprintf("%.2f", v)
}
