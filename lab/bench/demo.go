package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"dewpoint/testkit/demo"
	"dewpoint/testkit/testbed"
)

// demonstrate deploys each image cold, by dew and by containerd, and prints
// dew's stage times beside containerd's; then the last image booted and restored.
func demonstrate(ctx context.Context, args []string, stdout, stderr io.Writer, self []string) error {
	var o options
	if err := o.parse("demo", args, stderr, strings.Join(demo.Default, ","), nil); err != nil {
		return err
	}
	d := dewd{bin: o.bin, tools: o.containerd()}
	c := containerd{tools: o.containerd(), snapshotter: "overlayfs"}
	if why := d.missing() + c.missing(); why != "" {
		return errors.New(why)
	}
	bed, err := o.bed(ctx, stderr, self)
	if err != nil {
		return err
	}
	defer bed.Close()
	if err := bed.Rate(ctx, o.mbit[0]); err != nil {
		return err
	}
	for _, image := range o.images {
		if err := compareOne(ctx, bed, d, c, o.layout, image, o.mbit[0], stdout); err != nil {
			return err
		}
	}
	return showRestored(ctx,
		&bootBench{o: &o, bed: bed, refused: map[string]string{}, stdout: stdout, stderr: stderr},
		o.images[len(o.images)-1])
}

func compareOne(ctx context.Context, bed *testbed.Bed, d dewd, c containerd, layout, image string,
	mbit float64, out io.Writer) error {
	m, err := demo.Manifest(layout, image)
	if err != nil {
		return err
	}
	var size int64
	for _, l := range m.Layers {
		size += l.Size
	}
	app, err := applicationOf(image)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "\n%s: %.1f MB compressed in %d layers, cold, link %s Mbit/s\n", image, float64(size)/1e6,
		len(m.Layers), rate(mbit))
	fmt.Fprintf(out, "  $ dew run -d --net host --ready %s %s/%s\n", app.ready, testbed.Address, image)
	ours, err := show(ctx, bed, d, image, app, out)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "  $ ctr images pull … && ctr run --detach --net-host …   (containerd, overlayfs, inflater %s)\n", c.inflater())
	theirs, err := measure(ctx, bed, c, image, firstAnswer, nil)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "    first answer %.2f s\n  dew: %.2f of containerd's time\n", theirs.Seconds,
		ours/theirs.Seconds)
	return nil
}

// show deploys by dew and prints the stages of its record, with the first
// answer as the harness saw it, whose seconds it returns.
func show(ctx context.Context, bed *testbed.Bed, d dewd, image string, app application,
	out io.Writer) (float64, error) {
	s, err := open(ctx, bed, d)
	if err != nil {
		return 0, err
	}
	seconds, err := showIn(ctx, s, d, image, app, out)
	return seconds, errors.Join(err, s.close(d))
}

func showIn(ctx context.Context, s *session, d dewd, image string, app application, out io.Writer) (float64,
	error) {
	if err := s.bed.Cool(image); err != nil {
		return 0, err
	}
	name, _, _ := strings.Cut(image, ":")
	start := time.Now()
	raw, err := d.dew(ctx, s, "run", "-d", "--net", "host", "--ready", app.ready, "--name", "demo-"+name,
		testbed.Address+"/"+image)
	if err != nil {
		return 0, err
	}
	if err := s.bed.Wait(ctx, time.Minute, func(ctx context.Context) error {
		return app.ask(ctx, s.bed.Dial)
	}); err != nil {
		return 0, err
	}
	seconds := time.Since(start).Seconds()
	var record struct{ Stages map[string]float64 }
	if err := json.Unmarshal(raw, &record); err != nil {
		return 0, fmt.Errorf("dew's record: %w: %s", err, raw)
	}
	fmt.Fprintf(out, "    %s; first answer %.2f s\n", stages(record.Stages), seconds)
	return seconds, d.remove(ctx, s, "demo-"+name)
}

// showRestored boots an image that is on the node, makes a checkpoint, and deploys from it.
func showRestored(ctx context.Context, b *bootBench, image string) (err error) {
	l, err := b.dewdAlone(ctx, "", image)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	fmt.Fprintf(b.stdout, "\n%s, which is on the node: booted, and restored from a checkpoint\n", image)
	name, _, _ := strings.Cut(image, ":")
	boots, restores := l.dewd.with("boot"), l.dewd.with("restore")
	first := instance{image: image, name: "demo-" + name}
	booted, err := b.showStart(ctx, boots, first)
	if err != nil {
		return err
	}
	fmt.Fprintf(b.stdout, "  $ dew checkpoint --stateful %s\n", first.name)
	c, err := boots.checkpoint(ctx, first.name)
	if err != nil {
		b.refuse(image, err) // a machine without CRIU, or where it does not work, boots
		return nil
	}
	fmt.Fprintf(b.stdout, "    %.1f MB of memory stored in %.1f MB; paused for %.2f s\n", float64(c.Pages)/1e6,
		float64(c.Size)/1e6, c.Paused)
	second := instance{image: image, name: "demo-" + name + "-clone"}
	restored, err := b.showStart(ctx, restores, second)
	if err != nil {
		return err
	}
	fmt.Fprintf(b.stdout, "  restored: %.2f of the boot's time\n", restored/booted)
	return errors.Join(boots.remove(ctx, first.name), restores.remove(ctx, second.name))
}

// showStart brings an instance up, prints the stages of its record, and returns the seconds to its first
// answer.
func (b *bootBench) showStart(ctx context.Context, d *bootDewd, i instance) (float64, error) {
	args, err := d.arguments(i)
	if err != nil {
		return 0, err
	}
	fmt.Fprintf(b.stdout, "  $ dew run %s\n", strings.Join(args, " "))
	start := time.Now()
	record, err := d.record(ctx, i)
	if err != nil {
		return 0, err
	}
	if err := answered(ctx, b.bed, d, i); err != nil {
		return 0, err
	}
	took := time.Since(start).Seconds()
	fmt.Fprintf(b.stdout, "    %s; first answer %.2f s\n", stages(record.Stages), took)
	return took, nil
}

// stages lists stage times in the order in which they were reached.
func stages(times map[string]float64) string {
	var names, parts []string
	for n := range times {
		names = append(names, n)
	}
	slices.SortFunc(names, func(a, b string) int {
		if times[a] < times[b] || (times[a] == times[b] && a < b) {
			return -1
		}
		return 1
	})
	for _, n := range names {
		parts = append(parts, fmt.Sprintf("%s %.2f", n, times[n]))
	}
	return strings.Join(parts, ", ")
}
