package session

import (
	"slices"
	"strings"

	"dewpoint/internal/pop"
)

// OnePerNode makes members, one for each session that lives, those heard of last at the end,
// one for each node, by name: the last one. A node that was started anew has two
// sessions for a while, of one address; if the addresses differ, two machines have one name.
func OnePerNode(members []pop.Member) []pop.Member {
	at := map[string]int{}
	all := []pop.Member{}
	for _, m := range members {
		k, again := at[m.Node]
		if !again {
			at[m.Node] = len(all)
			all = append(all, m)
			continue
		}
		if was := all[k]; was.Address != "" && m.Address != "" && was.Address != m.Address {
			m.Twin = was.Address
		}
		all[k] = m
	}
	slices.SortFunc(all, func(a, b pop.Member) int { return strings.Compare(a.Node, b.Node) })
	return all
}
