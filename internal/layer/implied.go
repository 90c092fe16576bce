package layer

import (
	"maps"
	"slices"
	"strings"

	"dewpoint/internal/layer/toc"
)

// directories are those of a layer that is being unpacked, except the root, and
// whether no entry describes them. They are what toc.Tree would say, at the cost
// of the directories alone.
type directories map[string]bool

// add takes the next entry of the tar, which has been unpacked.
func (d directories) add(e *toc.Entry) {
	switch e.Type {
	case toc.Directory:
		d.pass(parent(e.Name))
		d[e.Name] = false
	case toc.Opaque:
		d.pass(e.Name)
	case toc.Whiteout:
		d.pass(parent(e.Name))
	default:
		d.pass(parent(e.Name))
		if _, was := d[e.Name]; was {
			d.replace(e.Name)
		}
	}
}

// pass notes that there must be a directory of that name.
func (d directories) pass(name string) {
	for ; name != ""; name = parent(name) {
		if _, known := d[name]; known {
			return
		}
		d[name] = true
	}
}

// replace forgets a directory that something else took the place of.
func (d directories) replace(name string) {
	delete(d, name)
	maps.DeleteFunc(d, func(n string, _ bool) bool { return strings.HasPrefix(n, name+"/") })
}

// implied lists the directories that no entry describes, parents first.
func (d directories) implied() names {
	var all names
	for name, implied := range d {
		if implied && name != "" {
			all = append(all, name)
		}
	}
	slices.Sort(all)
	return all
}

func parent(name string) string {
	if i := strings.LastIndexByte(name, '/'); i >= 0 {
		return name[:i]
	}
	return ""
}

// withoutRoot drops the root, which toc.Tree.Implied lists first.
func withoutRoot(implied []string) names {
	if len(implied) > 0 && implied[0] == "" {
		implied = implied[1:]
	}
	if len(implied) == 0 {
		return nil
	}
	return implied
}
