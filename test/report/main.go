// Command report reads what "go test -json" writes and tells it as go test alone does: a line for each
// package, and what tests that failed have said, and in the end how many were left out, and why. It appends
// how long each test took to a file, for scripts/test to name the slowest.
//
//	go test -json ./... | report FILE
//
// A test's time is its own: what its subtests take is theirs. Those that run side by side can take
// more together than the test around them, which then counts as nothing.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
)

func main() {
	err := errors.New("the name of a file is missing: report FILE")
	if len(os.Args) == 2 {
		err = run(os.Stdin, os.Stdout, os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer, times string) error {
	f, err := os.OpenFile(times, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	t := newTeller(out, f)
	err = errors.Join(t.tell(in), f.Close())
	for _, why := range slices.Sorted(maps.Keys(t.skipped)) {
		fmt.Fprintf(out, "left out: %d, %s\n", t.skipped[why], why)
	}
	return err
}

// event is what cmd/test2json says of one moment.
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64 // seconds
}

// test is one that has begun.
type test struct {
	above  *test   // nil if it is nobody's part
	said   []piece // in their order
	result string  // its line that begins with ---
	ended  bool
	failed bool
	below  float64 // seconds that its parts took
}

// piece is a line that a test has said, or a part of it that has begun.
type piece struct {
	line string
	part *test
}

// teller knows the tests of the packages that are under way.
type teller struct {
	out, times io.Writer
	packages   map[string]*testsOf
	skipped    map[string]int // tests, by what they said last
}

type testsOf struct {
	out    bytes.Buffer // what is told when the package has ended: others may be under way
	byName map[string]*test
	whole  []*test // those that are nobody's part and of which nothing was told, in their order
}

func newTeller(out, times io.Writer) *teller {
	return &teller{out, times, map[string]*testsOf{}, map[string]int{}}
}

// tell copies until the input ends. Lines that are no events are passed on as they are.
func (t *teller) tell(in io.Reader) error {
	r := bufio.NewReader(in)
	for {
		line, err := r.ReadBytes('\n')
		var e event
		switch {
		case len(line) == 0:
		case line[0] != '{' || json.Unmarshal(line, &e) != nil || e.Action == "":
			t.out.Write(line)
		default:
			t.event(e)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (t *teller) event(e event) {
	switch e.Action {
	case "build-output":
		io.WriteString(t.out, e.Output)
	case "output":
		t.output(e)
	case "pass", "fail", "skip":
		t.end(e)
	}
}

// in is what is known of a package.
func (t *teller) in(pkg string) *testsOf {
	if t.packages[pkg] == nil {
		t.packages[pkg] = &testsOf{byName: map[string]*test{}}
	}
	return t.packages[pkg]
}

// of is the test that an event is about.
func (t *teller) of(e event) *test {
	all := t.in(e.Package)
	one := all.byName[e.Test]
	if one == nil {
		one = &test{above: all.around(e.Test)}
		all.byName[e.Test] = one
		if one.above != nil {
			one.above.said = append(one.above.said, piece{part: one})
		} else {
			all.whole = append(all.whole, one)
		}
	}
	return one
}

// around is the test whose part the one of this name is, nil if it is nobody's.
func (all *testsOf) around(name string) (above *test) {
	for above == nil && name != "" {
		name = name[:max(0, strings.LastIndexByte(name, '/'))]
		above = all.byName[name]
	}
	return above
}

func (t *teller) output(e event) {
	line := strings.TrimLeft(e.Output, " ")
	switch {
	case e.Test == "" && (line == "PASS\n" || strings.HasPrefix(line, "coverage: ")):
	case e.Test == "":
		all := t.in(e.Package)
		if strings.HasPrefix(line, "FAIL") {
			all.unended() // a panic ends a package in the middle of its tests
		}
		all.out.WriteString(e.Output)
	case strings.HasPrefix(line, "=== "):
		t.of(e)
	case strings.HasPrefix(line, "--- "):
		t.of(e).result = e.Output
	default:
		one := t.of(e)
		one.said = append(one.said, piece{line: e.Output})
	}
}

// end notes how long a test took, and tells of it if it failed and is nobody's part. Nothing of
// a package is kept once that has ended.
func (t *teller) end(e event) {
	all := t.in(e.Package)
	if e.Test == "" {
		all.unended()
		t.out.Write(all.out.Bytes())
		delete(t.packages, e.Package)
		return
	}
	one := t.of(e)
	one.ended, one.failed = true, e.Action == "fail"
	if e.Action == "skip" {
		t.skipped[one.reason()]++
	}
	fmt.Fprintf(t.times, "%.2f %s %s\n", max(0, e.Elapsed-one.below), e.Package, e.Test)
	if one.above != nil {
		one.above.below += e.Elapsed
		return
	}
	all.whole = slices.DeleteFunc(all.whole, func(w *test) bool { return w == one })
	if one.failed {
		one.tell(&all.out, "")
	}
	one.said = nil
}

// reason is what a test has said last, without the place.
func (one *test) reason() string {
	if len(one.said) == 0 {
		return "without a reason"
	}
	said := one.said[len(one.said)-1].line
	_, said, _ = strings.Cut(said, ": ")
	return strings.TrimSpace(said)
}

// unended tells of tests that have not ended with their package.
func (all *testsOf) unended() {
	for _, one := range all.whole {
		one.tell(&all.out, "")
	}
	all.whole = nil
}

// tell tells what a test has said, and those of its parts that have failed or not ended.
func (one *test) tell(out io.Writer, indent string) {
	if one.result != "" {
		io.WriteString(out, indent+one.result)
	}
	if !one.ended {
		indent = ""
	}
	for _, p := range one.said {
		if p.part == nil {
			io.WriteString(out, indent+p.line)
		} else if p.part.failed || !p.part.ended {
			p.part.tell(out, indent+"    ")
		}
	}
}
