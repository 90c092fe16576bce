package bench

import (
	"context"
	"fmt"
	"slices"
	"text/tabwriter"

	"dewpoint/internal/spec"
	"dewpoint/testkit/testbed"
)

// sizes compares the packs with the images (figure 8a), and what crosses the
// link in all with what a whole pull fetches (figure 8b).
func (l *lazy) sizes(ctx context.Context) error {
	if err := l.bed.Rate(ctx, 0); err != nil {
		return err
	}
	asked := l.o.what
	l.o.what = []string{firstAnswer, wholeImage}
	defer func() { l.o.what = asked }()
	w := tabwriter.NewWriter(l.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "image\timage MB\tprofile needs MB, raw\tchunks MB\ttables MB\theader MB\tbefore ready MB\t/ chunks\t/ image\tpack MB\twire MB at the answer\tin all\twhole\tin all / whole")
	var shares, overheads []float64
	for _, image := range l.o.images {
		p := l.packs[image]
		answer, all, whole, err := l.wires(ctx, image)
		if err != nil {
			return fmt.Errorf("%s: %w", image, err)
		}
		size, err := l.imageSize(image)
		if err != nil {
			return err
		}
		share, over := float64(p.Start)/float64(size), float64(p.Start)/float64(p.Parts.Chunks)
		overheads = append(overheads, over)
		if size > 20e6 {
			shares = append(shares, share)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%.3f\t%.1f %%\t%s\t%s\t%s\t%s\t%.3f\n", image, mb(size),
			mb(p.Needed), mb(p.Parts.Chunks),
			mb(p.Parts.Tables), mb(p.Parts.Header), mb(p.Start), over, share*100, mb(p.Size), mb(answer), mb(all),
			mb(whole), float64(all)/float64(whole))
		l.figures = append(l.figures, sizeFigures(image, p, size, answer, all, whole)...)
	}
	w.Flush()
	if len(shares) > 0 {
		fmt.Fprintf(l.stdout,
			"images over 20 MB: %.1f %% in the median, at most %.1f %%; before ready / chunks: median %.3f, at most %.3f\n",
			median(shares)*100, slices.Max(shares)*100, median(overheads), slices.Max(overheads))
	}
	return nil
}

// wires counts the bytes that cross the whole link until the first answer and
// until the image is whole, and those of a whole pull.
func (l *lazy) wires(ctx context.Context, image string) (answer, all, whole int64, err error) {
	err = l.startOne(ctx, l.dewd("", "", false), testbed.Address, image, func(s Sample) {
		switch s.What {
		case firstAnswer:
			answer = s.Wire
		case wholeImage:
			all = s.Wire
		}
		l.report.add(s)
	})
	if err != nil {
		return 0, 0, 0, err
	}
	err = l.startOne(ctx, l.dewd("-whole", "", false, "--lazy", "never"), testbed.Address, image,
		func(s Sample) {
			if s.What == wholeImage {
				whole = s.Wire
			}
			l.report.add(s)
		})
	return answer, all, whole, err
}

func sizeFigures(image string, p spec.Pack, size, answer, all, whole int64) []figure {
	var f []figure
	for _, row := range []struct {
		what string
		n    int64
	}{
		{"image", size}, {"needed raw", p.Needed}, {"before ready", p.Start}, {"header", p.Parts.Header},
		{"tables", p.Parts.Tables},
		{"chunks", p.Parts.Chunks}, {"points", p.Parts.Points}, {"windows", p.Parts.Windows},
		{"files", p.Parts.Files}, {"pack", p.Size},
		{"wire until answer", answer}, {"wire until complete", all}, {"wire of a whole pull", whole},
	} {
		f = append(f, figure{Image: image, State: "size", What: row.what, Unit: "bytes",
			Values: []float64{float64(row.n)}})
	}
	return f
}

func mb(n int64) string { return fmt.Sprintf("%.2f", float64(n)/1e6) }
