package registry

import (
	"cmp"
	"net/http"
	"regexp"
	"slices"
	"strings"
)

// challenge is what a registry wants of who asks (RFC 9110, 11.6.1).
type challenge struct {
	scheme string // in small letters
	params map[string]string
}

const (
	schemeBearer = "bearer"
	schemeBasic  = "basic"
)

var (
	param   = regexp.MustCompile("([!#$%&'*+.^_`|~0-9A-Za-z-]+)\\s*=\\s*(?:\"((?:[^\"\\\\]|\\\\.)*)\"|([^\\s\",]+))")
	escaped = regexp.MustCompile(`\\(.)`)
)

// challenges are those of an answer, one a header line, bearer before basic.
func challenges(h http.Header) []challenge {
	var all []challenge
	for _, line := range h.Values("WWW-Authenticate") {
		scheme, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		c := challenge{strings.ToLower(scheme), map[string]string{}}
		for _, m := range param.FindAllStringSubmatch(rest, -1) {
			c.params[strings.ToLower(m[1])] = cmp.Or(escaped.ReplaceAllString(m[2], "$1"), m[3])
		}
		all = append(all, c)
	}
	rank := func(c challenge) int { return slices.Index([]string{schemeBasic, schemeBearer}, c.scheme) }
	slices.SortStableFunc(all, func(a, b challenge) int { return rank(b) - rank(a) })
	return all
}
