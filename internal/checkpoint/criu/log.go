package criu

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"

	"dewpoint/internal/checkpoint"
)

// complaints are what CRIU's log says when a container is not fit, in our words.
var complaints = []struct {
	line         *regexp.Regexp
	what, remedy string
}{
	{regexp.MustCompile(`Connected TCP socket|In-flight connection`), "a client is connected",
		"checkpoint when none is, or let connections be closed in the clones"},
	{regexp.MustCompile(`Unsupported proto 262`), "it has a socket of multipath TCP, which Go programs ask for",
		"run the container dumpable, or with GODEBUG=multipathtcp=0"},
	{regexp.MustCompile(`io_uring`), "it uses io_uring", "run the container dumpable, without io_uring"},
	{regexp.MustCompile(`Can't dump ghost file`),
		"it has a file open that was removed and is larger than " + ghostLimit,
		"restart the program, or checkpoint before it opens such"},
	{regexp.MustCompile(`link-remap`), "it has a file open whose name was removed while another name is left",
		"restart the program"},
	{regexp.MustCompile(`Can't (resolve|find suitable path|dump) .*(handle|inotify|fanotify)|inotify.*(fail|can't)|Can't dump that handle`), "it watches files (inotify) that CRIU cannot find again", "such a container can only boot"},
	{regexp.MustCompile(`(?i)external (stream|socket|unix)|unix.*external|Connected.*peer.*out`),
		"it is connected to a program outside by a Unix socket", "checkpoint when it is not"},
	{regexp.MustCompile(`Unable to freeze`), "a process sleeps in the kernel and cannot be stopped",
		"try again when it has what it waits for"},
	{regexp.MustCompile(`Can't (lookup|dump) .*tty|tty: `), "it has a terminal", "run it without one"},
	{regexp.MustCompile(`Can't get rlimits?|prlimit.*Operation not permitted`), "a process is not root's",
		"CRIU reads its limits only with CAP_SYS_RESOURCE"},
	{regexp.MustCompile(`Can't (lock|dump) .*lock|file lock`),
		"it holds a lock on a file together with a program outside", "checkpoint when it does not"},
}

// explain makes of a dump that went wrong, and of CRIU's log, an error that
// tells more. It is an *UnfitError if the container is to blame, and wraps ENOSPC if the disk is full.
func explain(log string, err error) error {
	lines := errorLines(log)
	if len(lines) == 0 {
		return err
	}
	for _, l := range lines {
		if strings.Contains(l, "No space left on device") {
			return fmt.Errorf("write the memory: %w", unix.ENOSPC)
		}
		for _, c := range complaints {
			if c.line.MatchString(l) {
				return &checkpoint.UnfitError{What: c.what, Remedy: c.remedy}
			}
		}
	}
	return fmt.Errorf("%w; CRIU says: %s", err, strings.Join(lines, "; "))
}

// What is read of a log: a restore that runs in circles writes gigabytes.
const mostLines, mostLog = 4, 4 << 20

var errorLine = regexp.MustCompile(`^(?:\([0-9.]+\)\s+)?(?:\d+: )?Error \([^)]*\): (.*)`)

// errorLines are the first errors that a log of CRIU's tells: the cause comes
// before its consequences.
func errorLines(log string) []string {
	f, err := os.Open(log)
	if err != nil {
		return nil
	}
	defer f.Close()
	var lines []string
	for s := bufio.NewScanner(io.LimitReader(f, mostLog)); s.Scan() && len(lines) < mostLines; {
		if m := errorLine.FindStringSubmatch(s.Text()); m != nil &&
			!strings.Contains(m[1], "RLIMIT_NOFILE for self") {
			lines = append(lines, m[1])
		}
	}
	return lines
}

// Explain implements checkpoint.Explainer.
func (e *Engine) Explain(dir string, err error) error {
	return ExplainRestore(filepath.Join(dir, "restore.log"), err)
}

// ExplainRestore makes of a restore that went wrong, and of the log in the
// engine's WorkDir, an error that tells more. What a CRIU that was killed has left in /tmp is removed, unless
// another runs: then the next one's turn is it.
func ExplainRestore(log string, err error) error {
	if err != nil {
		sweepYards()
	}
	lines := errorLines(log)
	if err == nil || len(lines) == 0 {
		return err
	}
	return fmt.Errorf("%w; CRIU says: %s", err, strings.Join(lines, "; "))
}

var errStats = errors.New("CRIU's statistics are not understood")

// pagesWritten is how many bytes of memory a dump wrote, by CRIU's statistics:
// two magic numbers, and a message with its size, whose first field is the
// dump's, whose field pages_written is the seventh.
func pagesWritten(stats string) (int64, error) {
	b, err := os.ReadFile(stats)
	if err != nil {
		return 0, err
	}
	const head = 12
	if len(b) < head || int(binary.LittleEndian.Uint32(b[8:])) > len(b)-head {
		return 0, errStats
	}
	dump, ok := field(b[head:head+int(binary.LittleEndian.Uint32(b[8:]))], 1)
	if !ok {
		return 0, errStats
	}
	pages, ok := field(dump, 7)
	if !ok {
		return 0, errStats
	}
	n, used := protowire.ConsumeVarint(pages)
	if used < 0 {
		return 0, errStats
	}
	return int64(n) * int64(os.Getpagesize()), nil
}

// field is the value of the first field of a message that has the number: the
// content of a message or a string, or the bytes of a number.
func field(b []byte, number protowire.Number) ([]byte, bool) {
	for len(b) > 0 {
		num, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return nil, false
		}
		b = b[n:]
		size := protowire.ConsumeFieldValue(num, kind, b)
		if size < 0 {
			return nil, false
		}
		if num == number && kind == protowire.BytesType {
			v, _ := protowire.ConsumeBytes(b)
			return v, true
		}
		if num == number {
			return b[:size], true
		}
		b = b[size:]
	}
	return nil, false
}
