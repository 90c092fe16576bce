package layer

import (
	"encoding/json"
	"fmt"
	"strconv"
)

// names are paths within a layer: any bytes but NUL. JSON has text only, so
// what is no printable text there, and the backslash, is escaped as in a Go
// string literal.
type names []string

// MarshalJSON implements json.Marshaler.
func (n names) MarshalJSON() ([]byte, error) {
	quoted := make([]string, len(n))
	for i, s := range n {
		q := strconv.Quote(s)
		quoted[i] = q[1 : len(q)-1]
	}
	return json.Marshal(quoted)
}

// UnmarshalJSON implements json.Unmarshaler.
func (n *names) UnmarshalJSON(b []byte) error {
	var quoted []string
	if err := json.Unmarshal(b, &quoted); err != nil {
		return err
	}
	all := make(names, len(quoted))
	for i, q := range quoted {
		s, err := strconv.Unquote(`"` + q + `"`)
		if err != nil {
			return fmt.Errorf("name %q: %w", q, err)
		}
		all[i] = s
	}
	*n = all
	return nil
}
