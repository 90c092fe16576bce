package simulate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"dewpoint/internal/api"
)

func dew(args ...string) (string, error) {
	var out bytes.Buffer
	err := Program{}.Main(context.Background(), args, &out, &out)
	return out.String(), err
}

func TestCommand(t *testing.T) {
	dir := t.TempDir()
	trace, plots := filepath.Join(dir, "dev.json.gz"), filepath.Join(dir, "plots")
	if out, err := dew("--generate", "dev", "-o", trace, "--scale", "0.02", "--seed", "3"); err != nil ||
		out != "" {
		t.Fatal(out, err)
	}
	table, err := dew(trace, "--policies", "lru,sieve", "--sizes", "10%,1GB", "--nodes", "2", "--bin", "50",
		"--plot", plots)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"This trace is synthetic", "not counted: ", " not a GET",
		"lru     shared   1.00 GB", "sieve   2 nodes  0.50 GB"} {
		if !strings.Contains(table, want) {
			t.Errorf("%q is not in\n%s", want, table)
		}
	}
	for _, name := range []string{"hit-ratio", "byte-ratio", "deployment", "series-hits", "series-deployment"} {
		b, err := os.ReadFile(filepath.Join(plots, name+".svg"))
		if err != nil || !strings.Contains(string(b), "(synthetic trace)") ||
			!strings.Contains(string(b), "lru, 2 nodes") {
			t.Errorf("%s: %v\n%.300s", name, err, b)
		}
	}
	out, err := dew("--json", "--policies", "lru", "--sizes", "1GB", "--deployments", "100", "--assign",
		"client", trace)
	var res Result
	if err := errors.Join(err, json.Unmarshal([]byte(out), &res)); err != nil {
		t.Fatal(err)
	}
	if !res.Synthetic || res.Deployments != 100 || len(res.Setups) != 1 || res.Setups[0].Size != 1e9 ||
		res.Setups[0].HitRatio <= 0 || res.Records == 0 {
		t.Errorf("%s", out)
	}
}

func TestMisuse(t *testing.T) {
	trace := put(t, "t.json", array(manifestGet(1, "c", "n/r")))
	for _, line := range []string{
		"", "--none", "--study " + trace, "--generate dev " + trace, "--generate", "--generate mars -o x",
		"--generate dev",
		"--policies fifo " + trace, "--sizes 0 " + trace, "--bandwidth 0bit " + trace,
		"--lan-bandwidth fast " + trace,
		"--assign dice " + trace, "--nodes -1 " + trace, "--cost euros " + trace,
	} {
		_, err := dew(strings.Fields(line)...)
		var e *api.Error
		if !errors.As(err, &e) || e.Code != api.BadRequest {
			t.Errorf("%q: %v", line, err)
		}
	}
	if _, err := dew(filepath.Join(t.TempDir(), "none.json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a trace that is not there: %v", err)
	}
	if out, err := dew("--help"); !errors.Is(err, pflag.ErrHelp) || !strings.Contains(out, "--policies") {
		t.Errorf("help: %v %s", err, out)
	}
	unfinished := filepath.Join(t.TempDir(), "x.json")
	if _, err := dew("--generate", "dev", "--scale", "-3", "-o", unfinished); err == nil {
		t.Error("a negative scale is accepted")
	}
	if _, err := os.Stat(unfinished); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an unfinished trace stays: %v", err)
	}
}
