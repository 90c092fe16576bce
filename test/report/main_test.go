package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"dewpoint/testkit"
)

// tests are packages that go test has something to say of, by their file's name.
var tests = map[string]string{
	"good/a_test.go": `package a
import "testing"
func TestWell(t *testing.T) { t.Log("nobody asks"); t.Run("part", func(t *testing.T) { t.Log("nor here") }) }
func TestSkipped(t *testing.T) { t.Skip("no") }`,
	"bad/b_test.go": `package b
import "testing"
func TestWell(t *testing.T) { t.Log("nobody asks") }
func TestBad(t *testing.T) {
	t.Log("before")
	t.Run("well", func(t *testing.T) { t.Log("not this") })
	t.Run("a/b", func(t *testing.T) { t.Run("deep", func(t *testing.T) { t.Error("two\nlines") }) })
	t.Error("after")
}
func TestSideBySide(t *testing.T) {
	for _, name := range []string{"one", "two"} {
		t.Run(name, func(t *testing.T) { t.Parallel(); if name == "two" { t.Error("this one") } })
	}
}`,
	"broken/c_test.go": `package c
import "testing"
func TestBroken(t *testing.T) { undefined() }`,
	"panics/d_test.go": `package d
import "testing"
func TestWell(t *testing.T) {}
func TestPanics(t *testing.T) { t.Log("before"); t.Run("in", func(t *testing.T) { panic("what now") }) }`,
	"exits/e_test.go": `package e
import ("os"; "testing"; "fmt")
func TestExits(t *testing.T) { fmt.Println("said"); os.Exit(3) }`,
	"none/f.go": `package f`,
}

// varies are what differs from run to run.
var varies = regexp.MustCompile(`\(?\d+\.\d+s\)?|0x[0-9a-f]+\??|goroutine \d+|\+0x|gp=\S+|m=\S+`)

// What is told is what go test tells, and all tests are timed.
func TestTellsAsGoTest(t *testing.T) {
	testkit.Long(t)
	dir := t.TempDir()
	tests["go.mod"] = "module m\ngo 1.26\n"
	for name, text := range tests {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	goTest := func(flags ...string) []byte {
		cmd := exec.Command("go",
			append(append([]string{"test", "-count=1", "-vet=off", "-p=1"}, flags...), "./...")...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err == nil {
			t.Fatalf("tests that fail have passed:\n%s", out)
		}
		return out
	}
	var out, times bytes.Buffer
	if err := newTeller(&out, &times).tell(bytes.NewReader(goTest("-json"))); err != nil {
		t.Fatal(err)
	}
	want := varies.ReplaceAllString(string(goTest()), "")
	got := varies.ReplaceAllString(out.String(), "")
	// A line FAIL on its own closes what is told of all packages together.
	if want = strings.TrimSuffix(want, "FAIL\n"); got != want {
		t.Errorf("told:\n%s\ngo test tells:\n%s", got, want)
	}
	for _, name := range []string{"m/good TestWell/part", "m/good TestSkipped", "m/bad TestBad/a/b/deep",
		"m/bad TestSideBySide/two"} {
		if !strings.Contains(times.String(), " "+name+"\n") {
			t.Errorf("%s is not timed:\n%s", name, times.String())
		}
	}
}
