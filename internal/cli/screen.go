package cli

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"golang.org/x/term"
)

// screen is a picture of some lines at the end of a terminal, which is drawn again in its place.
// It is not safe for concurrent use.
type screen struct {
	w     io.Writer
	term  *os.File // nil where there is no terminal
	shown []string // the lines of the picture
}

// screen is that of standard error.
func (c *call) screen() screen {
	s := screen{w: c.cfg.Stderr}
	if f, ok := c.cfg.Stderr.(*os.File); ok && isTerminal(f) {
		s.term = f
	}
	return s
}

// isTerminal reports whether pictures can be drawn there.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb"
}

// size is the terminal's, in characters.
func (s *screen) size() (width, height int) {
	width, height, err := term.GetSize(int(s.term.Fd()))
	if err != nil || width <= 0 || height <= 0 {
		return 80, 24
	}
	return width, height
}

// draw replaces the picture. It writes once, and only what has changed of the lines: nothing flickers.
// If the terminal has become narrower since, the old lines take more of its rows.
func (s *screen) draw(lines []string) {
	if strings.Join(lines, "\n") == strings.Join(s.shown, "\n") && len(lines) == len(s.shown) {
		return
	}
	var b bytes.Buffer
	if up := s.rows(); up > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", up)
	}
	b.WriteByte('\r')
	for _, l := range lines {
		b.WriteString(l)
		b.WriteString("\x1b[K\r\n")
	}
	b.WriteString("\x1b[J")
	s.shown = lines
	_, _ = s.w.Write(b.Bytes())
}

// rows is how many rows of the terminal the picture takes, at most those above the last.
func (s *screen) rows() int {
	width, height := s.size()
	n := 0
	for _, l := range s.shown {
		n += 1 + max(0, utf8.RuneCountInString(l)-1)/width
	}
	return min(n, height-1)
}

// clip is the beginning of a line that is at most width characters wide.
func clip(s string, width int) string {
	if utf8.RuneCountInString(s) <= width {
		return s
	}
	return string([]rune(s)[:max(0, width)])
}
