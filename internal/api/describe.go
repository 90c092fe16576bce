package api

import (
	"maps"
	"slices"

	"connectrpc.com/connect"
)

// CodeInfo is what a code means to those who describe the API.
type CodeInfo struct {
	Code   Code
	Exit   int          // exit code of a command that fails for it
	RPC    connect.Code // that a call fails with
	Remedy string       // where the error has none of its own; may be ""
}

// Codes are all kinds of failure, by name.
func Codes() []CodeInfo {
	var all []CodeInfo
	for _, c := range slices.Sorted(maps.Keys(meanings)) {
		m := meanings[c]
		all = append(all, CodeInfo{Code: c, Exit: m.exit, RPC: m.rpc, Remedy: m.remedy})
	}
	return all
}

// RoleOf is the role that a caller over TCP needs for a path, such as "/dewpoint.v1.Node/List".
func RoleOf(path string) Role { return roleOf(path) }
