package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"dewpoint/internal/cli/show"
	"dewpoint/internal/spec"
)

func images(ctx context.Context, c *call) error {
	if err := c.none(); err != nil {
		return err
	}
	all, err := c.client.Images(ctx)
	if err != nil {
		return err
	}
	l := show.List{Head: []string{"IMAGE", "DIGEST", "LAYERS", "COMPRESSED", "DISK", "AGE"}, Quiet: "Name",
		Filters: map[string]show.Filter{"reference": {Column: "Name", Part: true},
			"digest": {Column: "Digest", Part: true}}}
	for _, i := range all {
		repository, tag := i.Name, ""
		if n := strings.LastIndexByte(i.Name, ':'); n > strings.LastIndexByte(i.Name, '/') {
			repository, tag = i.Name[:n], i.Name[n+1:]
		}
		layers := strconv.Itoa(len(i.Layers))
		l.Rows = append(l.Rows, show.Row{Doc: i,
			Cells: []string{i.Name, short(i.Digest), layers, size(i.Size), size(i.Disk), age(i.Created)},
			Names: map[string]string{"ID": short(i.Digest), "Name": i.Name, "Repository": repository, "Tag": tag,
				"Digest": i.Digest, "Layers": layers, "Size": size(i.Size), "Disk": size(i.Disk),
				"CreatedAt": i.Created.Format(time.RFC3339), "CreatedSince": age(i.Created)}})
	}
	return c.shows(l)
}

func imagesFlags(c *call) { listFlags(c, "reference, digest") }

func rmi(ctx context.Context, c *call) error {
	return c.names("image", func(name string) error { return c.client.RemoveImage(ctx, name) })
}

func pruneFlags(c *call) {
	c.flags.BoolVarP(&c.opt.all, "all", "a", false, "also images that no container uses")
	c.flags.BoolVar(&c.opt.pop, "pop", false, "also what no node uses of the PoP's store")
}

func prune(ctx context.Context, c *call) error {
	if err := c.none(); err != nil {
		return err
	}
	r, err := c.client.Prune(ctx, spec.PruneOptions{Images: c.opt.all, PoP: c.opt.pop})
	if err != nil {
		return err
	}
	if c.json {
		r.Images, r.Layers = append([]string{}, r.Images...), append([]string{}, r.Layers...)
		return c.print(r)
	}
	for _, i := range r.Images {
		fmt.Fprintln(c.cfg.Stdout, i)
	}
	fmt.Fprintf(c.cfg.Stdout, "%d images and %d layers removed, %s freed\n", len(r.Images), len(r.Layers),
		size(r.Bytes))
	if c.opt.pop {
		fmt.Fprintf(c.cfg.Stdout,
			"%d layers evicted from the PoP's store, %s free when their time of grace is over\n", len(r.PoPLayers),
			size(r.PoPBytes))
	}
	for _, id := range r.Checkpoints {
		fmt.Fprintf(c.cfg.Stdout, "checkpoint %s removed\n", short(id))
	}
	if r.PoPWhy != "" {
		fmt.Fprintf(c.cfg.Stderr, "dew: not all that no node uses was evicted: %s; prune again when that is over\n",
			r.PoPWhy)
	}
	return nil
}

// short is a digest for a table.
func short(digest string) string {
	_, hex, ok := strings.Cut(digest, ":")
	if !ok {
		hex = digest // IDs of checkpoints have no algorithm
	}
	return dash(hex[:min(12, len(hex))])
}

// size is a number of bytes in three digits.
func size(n int64) string {
	if n < 1000 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n)/1e3, 0
	for v >= 999.5 && unit < 3 {
		v /= 1e3
		unit++
	}
	digits := 0
	if v < 99.95 {
		digits = 1
	}
	return fmt.Sprintf("%.*f %cB", digits, v, "kMGT"[unit])
}
