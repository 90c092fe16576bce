package profile

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"dewpoint/testkit/mounttest"
)

const childEnv = "DEWPOINT_PROFILE_CHILD"

func TestMain(m *testing.M) {
	if spec := os.Getenv(childEnv); spec != "" {
		recordUntilKilled(strings.Split(spec, "\n"))
	}
	mounttest.Main(m)
}

// recordUntilKilled is the child of TestClean: it records, says so, and waits.
func recordUntilKilled(spec []string) {
	_, err := Start(context.Background(), Config{Dir: spec[0]},
		[]Layer{{DiffID: "sha256:00", Index: spec[1], Mount: spec[2]}})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("recording")
	io.Copy(io.Discard, os.Stdin) // ends with the parent
	os.Exit(1)
}
