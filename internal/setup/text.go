package setup

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// A TOML file is edited line by line, so that comments, order and what nobody here knows stay. Lines that
// were added end in mark; lines that were replaced stay as comments that begin with kept. So an edit is
// undone by the text alone, also after somebody else has changed the file.
const (
	mark    = " # dewpoint"
	kept    = "# dewpoint keeps: "
	created = "# dew setup made this file" + mark
	unended = "# the last line had no end" + mark
)

// set is a key that is to have a value, in the table of the path. Each value is one line of TOML; without
// one the key is to go.
type set struct {
	table []string
	key   string
	value string
}

func (s set) path() []string { return append(slices.Clone(s.table), s.key) }

// errByHand says that a file is written in a way that line by line cannot be edited.
var errByHand = errors.New("the file is written in a way that dew does not edit")

// edit sets keys and, at the end, adds lines. It gives what parses to the same document with these
// changes, or errByHand.
func edit(text []byte, sets []set, add []string) ([]byte, error) {
	var before map[string]any
	if err := toml.Unmarshal(text, &before); err != nil {
		return nil, err
	}
	lines, missing := splitLines(text), []set(nil)
	for _, s := range sets {
		known := lookup(before, s.path()) != nil
		if s.value == "" && !known {
			continue
		}
		if !known && !hasTable(lines, s.table) {
			missing = append(missing, s)
			continue
		}
		lines = setKey(lines, s)
	}
	var header []string
	for _, s := range missing {
		if header == nil || !slices.Equal(header, s.table) {
			header = s.table
			lines = append(lines, "["+path(header)+"]"+mark)
		}
		lines = append(lines, "  "+s.key+" = "+s.value+mark)
	}
	for _, l := range add {
		lines = append(lines, l+mark)
	}
	out := joinLines(lines)
	return out, verify(before, out, sets, add)
}

// verify says whether text has all that before has, but for the keys that were set and the lines that were
// added.
func verify(before map[string]any, text []byte, sets []set, add []string) error {
	var after, want map[string]any
	if err := toml.Unmarshal(text, &after); err != nil {
		return fmt.Errorf("%w: %w", errByHand, err)
	}
	var changes strings.Builder
	for _, s := range sets {
		if s.value == "" {
			continue
		}
		changes.Reset()
		fmt.Fprintf(&changes, "v = %s\n", s.value)
		if err := toml.Unmarshal([]byte(changes.String()), &want); err != nil {
			return err
		}
		at := s.path()
		if !reflect.DeepEqual(lookup(after, at), want["v"]) {
			return fmt.Errorf("%w: %s", errByHand, path(at))
		}
	}
	var added map[string]any
	if err := toml.Unmarshal([]byte(strings.Join(add, "\n")), &added); err != nil {
		return err
	}
	if !holds(after, before, sets, nil) || !holds(after, added, nil, nil) {
		return errByHand
	}
	return nil
}

// holds says whether all of part is in whole, but for the keys of sets. Of lists the end may be whole's own.
func holds(whole, part map[string]any, sets []set, at []string) bool {
	for k, v := range part {
		here := append(slices.Clone(at), k)
		if slices.ContainsFunc(sets, func(s set) bool { return slices.Equal(s.path(), here) }) {
			continue
		}
		w, ok := whole[k]
		if !ok {
			return false
		}
		switch v := v.(type) {
		case map[string]any:
			if w, ok := w.(map[string]any); !ok || !holds(w, v, sets, here) {
				return false
			}
		case []any:
			w, ok := w.([]any)
			if !ok || len(v) > len(w) {
				return false
			}
			for _, x := range v {
				if !slices.ContainsFunc(w, func(y any) bool { return reflect.DeepEqual(x, y) }) {
					return false
				}
			}
		default:
			if !reflect.DeepEqual(v, w) {
				return false
			}
		}
	}
	return true
}

// undo takes back what edit has done. What others have written since stays: their keys keep the table that
// edit has made, and their value of a key stays in place of the one that there was before. What they have
// written into dewpoint's own plugins goes, for without these it means nothing. gone says that nothing is
// left of a file that edit had made.
func undo(text []byte) (out []byte, gone bool) {
	var lines []string
	made, cut, own := false, false, false // own: these lines are of a plugin of dewpoint's
	all := splitLines(text)
	for i, l := range all {
		text := strings.TrimSpace(l)
		begins := strings.HasPrefix(text, "[")
		if begins {
			h := header(l)
			own = strings.HasSuffix(l, mark) && len(h) > 1 && h[0] == "proxy_plugins"
		}
		switch {
		case l == created:
			made = true
		case l == unended:
			cut = true
		case strings.HasSuffix(l, mark):
			if begins && !own && othersKeys(all[i+1:]) {
				lines = append(lines, strings.TrimSuffix(l, mark))
			}
		case strings.HasPrefix(l, kept):
			if !setByOthers(all, i) {
				lines = append(lines, strings.TrimPrefix(l, kept))
			}
		case !own || text == "" || strings.HasPrefix(text, "#"):
			lines = append(lines, l)
		}
	}
	out = joinLines(slices.DeleteFunc(lines, func(l string) bool { return l == unended }))
	if cut {
		out = bytes.TrimSuffix(out, []byte("\n"))
	}
	return out, made && len(out) == 0
}

// othersKeys reports whether a table, whose lines begin here, has keys that edit has not written.
func othersKeys(lines []string) bool {
	for _, l := range lines {
		l = strings.TrimSpace(l)
		if strings.HasPrefix(l, "[") {
			return false
		}
		if l != "" && !strings.HasPrefix(l, "#") && !strings.HasSuffix(l, mark) {
			return true
		}
	}
	return false
}

// setByOthers reports whether somebody has put a value of his own in the place of edit's, above the line i
// that is kept.
func setByOthers(lines []string, i int) bool {
	for i > 0 && strings.HasPrefix(lines[i-1], kept) {
		i--
	}
	name, _, _ := strings.Cut(strings.TrimPrefix(lines[i], kept), "=")
	return i > 0 && !strings.HasSuffix(lines[i-1], mark) &&
		entry(lines[i-1:i], strings.Trim(strings.TrimSpace(name), `"'`)) > 0
}

// splitLines gives the lines without their ends. A last one without an end is followed by the line unended.
func splitLines(text []byte) []string {
	if len(text) == 0 {
		return nil
	}
	lines := strings.Split(string(text), "\n")
	if last := len(lines) - 1; lines[last] == "" {
		return lines[:last]
	}
	return append(lines, unended)
}

func joinLines(lines []string) []byte {
	if len(lines) == 0 {
		return nil
	}
	return []byte(strings.Join(lines, "\n") + "\n")
}

// header is the path of a table's line, "[a.b]"; nil of every other line.
func header(line string) []string {
	line = strings.TrimSpace(line)
	if !strings.HasPrefix(line, "[") || strings.HasPrefix(line, "[[") {
		return nil
	}
	var doc map[string]any
	if toml.Unmarshal([]byte(line), &doc) != nil {
		return nil
	}
	var p []string
	for len(doc) == 1 {
		for k, v := range doc {
			p = append(p, k)
			doc, _ = v.(map[string]any)
		}
	}
	return p
}

// headerOf is the index of a table's line; -1 if it has none.
func headerOf(lines []string, table []string) int {
	return slices.IndexFunc(lines, func(l string) bool { return slices.Equal(header(l), table) })
}

func hasTable(lines []string, table []string) bool {
	return len(table) == 0 || headerOf(lines, table) >= 0
}

// setKey sets a key in a table that has a line of its own, or at the top.
func setKey(lines []string, s set) []string {
	begin := 0
	if len(s.table) > 0 {
		begin = headerOf(lines, s.table) + 1
	}
	if s.value == "" && begin == 0 {
		return lines // a list of tables, [[…]]
	}
	line := "  " + s.key + " = " + s.value + mark
	if len(s.table) == 0 {
		line = strings.TrimSpace(line)
	}
	for i := begin; i < len(lines) && !strings.HasPrefix(strings.TrimSpace(lines[i]), "["); i++ {
		n := entry(lines[i:], s.key)
		if n == 0 {
			continue
		}
		out := slices.Clone(lines[:i])
		if s.value != "" {
			out = append(out, line)
		}
		for _, old := range lines[i : i+n] {
			out = append(out, kept+old)
		}
		return append(out, lines[i+n:]...)
	}
	if s.value == "" {
		return lines
	}
	return slices.Insert(slices.Clone(lines), begin, line)
}

// entry is the number of lines that "key = value" takes, if the first of lines begins it; else 0.
func entry(lines []string, key string) int {
	name, _, ok := strings.Cut(lines[0], "=")
	if !ok || strings.Trim(strings.TrimSpace(name), `"'`) != key {
		return 0
	}
	for n := 1; n <= len(lines); n++ {
		if toml.Unmarshal([]byte(strings.Join(lines[:n], "\n")), new(map[string]any)) == nil {
			return n
		}
	}
	return 0
}

func lookup(doc map[string]any, at []string) any {
	for i, k := range at {
		v, ok := doc[k]
		if !ok {
			return nil
		}
		if i == len(at)-1 {
			return v
		}
		if doc, ok = v.(map[string]any); !ok {
			return nil
		}
	}
	return nil
}

// path is how TOML writes a path: a."b.c".
func path(at []string) string {
	var b strings.Builder
	for i, k := range at {
		if i > 0 {
			b.WriteByte('.')
		}
		if strings.Trim(k, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") != "" {
			k = fmt.Sprintf("%q", k)
		}
		b.WriteString(k)
	}
	return b.String()
}
