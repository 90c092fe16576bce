package bench

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"dewpoint/testkit/demo"
	"dewpoint/testkit/testbed"
)

// options are what both experiments are told.
type options struct {
	images  []string
	mbit    []float64
	rounds  int
	what    []string
	engines []string
	layout  string
	dir     string
	bin     string
	tools   string
	out     string
	set     []string // flags that were given
}

func (o *options) asked(flag string) bool { return slices.Contains(o.set, flag) }

// parse reads the flags; more adds those of one experiment.
func (o *options) parse(name string, args []string, stderr io.Writer, images string,
	more func(*flag.FlagSet)) error {
	f := flags(name, stderr)
	if more != nil {
		more(f)
	}
	list := func(target *[]string, name, value, usage string) {
		*target = strings.Split(value, ",")
		f.Func(name, usage+" (default "+value+")", func(s string) error {
			*target = strings.Split(s, ",")
			return nil
		})
	}
	var rates []string
	list(&o.images, "images", images, "comma-separated `names`")
	list(&rates, "rates", "0", "comma-separated `Mbit/s`; 0 is the whole link")
	list(&o.what, "what", "pull,answer", "what to time: `pull,answer`; of lazy answer,complete")
	list(&o.engines, "engines", "dewd,containerd-overlayfs,containerd-erofs,docker", "comma-separated `names`")
	f.IntVar(&o.rounds, "rounds", 5, "`rounds`, in each of which every engine has its turn")
	f.StringVar(&o.layout, "layout", demo.Dir, "OCI `layout` with the images")
	f.StringVar(&o.dir, "dir", "/var/tmp/dewpoint-bench", "scratch `directory` of the engines, emptied")
	f.StringVar(&o.bin, "bin", besideUs(), "`directory` of dewd and dew")
	f.StringVar(&o.tools, "tools", toolsDir(), "`directory` of what scripts/install builds")
	f.StringVar(&o.out, "out", "bench-"+name, "`prefix` of the files of results")
	if err := f.Parse(args); err != nil {
		return err
	}
	f.Visit(func(f *flag.Flag) { o.set = append(o.set, f.Name) })
	for _, r := range rates {
		mbit, err := strconv.ParseFloat(r, 64)
		if err != nil {
			return fmt.Errorf("rate %q: %w", r, err)
		}
		o.mbit = append(o.mbit, mbit)
	}
	return nil
}

func besideUs() string {
	exe, err := os.Executable()
	if err != nil {
		return "bin"
	}
	return filepath.Dir(exe)
}

func toolsDir() string {
	if dir := os.Getenv("DEWPOINT_TOOLS"); dir != "" {
		return dir
	}
	return "/var/cache/dewpoint/tools"
}

func (o *options) build(ctx context.Context, stderr io.Writer) error {
	return demo.Build(ctx, demo.Config{Dir: o.layout, Names: o.images, Log: stderr})
}

// bed builds the images and the testbed.
func (o *options) bed(ctx context.Context, stderr io.Writer, self []string) (*testbed.Bed, error) {
	if err := o.build(ctx, stderr); err != nil {
		return nil, err
	}
	return testbed.New(ctx, testbed.Config{Images: o.layout, Dir: o.dir, Self: self,
		Log: slog.New(slog.NewTextHandler(stderr, nil))})
}

func (o *options) containerd() string {
	found, _ := filepath.Glob(filepath.Join(o.tools, "containerd-2.*"))
	if len(found) == 0 {
		return ""
	}
	return slices.Max(found)
}

// chosen keeps of all engines those that were asked for and can run here.
func (o *options) chosen(all []engine, stdout io.Writer) ([]engine, error) {
	var engines []engine
	for _, e := range all {
		if !slices.Contains(o.engines, e.name()) {
			continue
		}
		if why := e.missing(); why != "" {
			fmt.Fprintf(stdout, "left out: %s: %s\n", e.name(), why)
			continue
		}
		engines = append(engines, e)
	}
	if len(engines) == 0 {
		return nil, errors.New("no engine to measure")
	}
	return engines, nil
}

// comparePull times a cold pull and a cold first answer on each engine.
func comparePull(ctx context.Context, args []string, stdout, stderr io.Writer, self []string) error {
	var o options
	if err := o.parse("pull", args, stderr, "python:1,nginx:1", nil); err != nil {
		return err
	}
	tools := o.containerd()
	engines, err := o.chosen([]engine{
		dewd{bin: o.bin, tools: tools},
		containerd{tools: tools, snapshotter: "overlayfs"},
		containerd{tools: tools, snapshotter: "erofs", mkfs: newerMkfs(o.tools)},
		docker{},
	}, stdout)
	if err != nil {
		return err
	}
	bed, err := o.bed(ctx, stderr, self)
	if err != nil {
		return err
	}
	defer bed.Close()
	r := newReport(stdout, stderr, "pull", o.out)
	r.header(engines)
	if err := o.measureAll(ctx, bed, engines, r); err != nil {
		return err
	}
	r.table("containerd-overlayfs")
	return r.write()
}

// measureAll measures every engine once in each round.
func (o *options) measureAll(ctx context.Context, bed *testbed.Bed, engines []engine, r *report) error {
	for _, mbit := range o.mbit {
		if err := bed.Rate(ctx, mbit); err != nil {
			return err
		}
		for round := range o.rounds {
			for _, image := range o.images {
				for _, what := range o.what {
					for i := range engines {
						e := engines[(i+round)%len(engines)]
						s, err := measure(ctx, bed, e, image, what, nil)
						if err != nil {
							return err
						}
						s.Mbit, s.Round = mbit, round
						r.add(s)
					}
				}
			}
		}
	}
	return nil
}
