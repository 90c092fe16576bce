package main

import (
	"fmt"
	"net/http"
	"strings"

	"connectrpc.com/connect"
	"github.com/goccy/go-yaml"

	"dewpoint/internal/api"
)

// about says of each code when a call fails with it.
var about = map[api.Code]string{
	api.Internal:       "None of the others: what went wrong was not foreseen.",
	api.BadRequest:     "The request makes no sense by itself.",
	api.NoDaemon:       "Nothing answers, or the connection broke. Made by clients.",
	api.Stopping:       "dewd is about to stop.",
	api.NotFound:       "There is no such container, image, tag, deployment or checkpoint, here or in the registry.",
	api.Unauthorized:   "The node does not know the caller, or the registry wants a login.",
	api.Forbidden:      "The registry's login has no right to the image.",
	api.Unreachable:    "The registry, or what it leads to, does not answer.",
	api.RateLimited:    "The registry limits how often it is asked.",
	api.RegistryFault:  "The registry answers with an error of its own.",
	api.Mismatch:       "Bytes did not hash to the digest that named them; nothing of them was kept.",
	api.BadImage:       "The image cannot be used: it is damaged, or of another platform.",
	api.DiskFull:       "There is no space for it.",
	api.NotReady:       "The container did not become ready in time.",
	api.Exited:         "The container's process ended before it was ready.",
	api.NameInUse:      "There is a container of that name.",
	api.PortInUse:      "Something else listens on the port.",
	api.Running:        "The container runs, and may not for this.",
	api.NotRunning:     "The container does not run, and has to for this.",
	api.InUse:          "Containers use it.",
	api.Permission:     "The caller's role, or dewd's own rights, do not suffice.",
	api.Unsupported:    "The node lacks something that this needs, or does not know the call.",
	api.NotExecutable:  "The command cannot be run.",
	api.CommandMissing: "The command is not in the container.",
	api.StatusUnknown:  "The container runs on, but its status will not be known here. Made by clients.",
	api.Canceled:       "The caller went away, or somebody canceled it.",
	api.Deadline:       "It took longer than it was given.",
	api.Busy:           "The node has as much to do as it takes on; nothing was accepted.",
	api.NoMemory:       "The node has not the memory that it would need.",
	api.KeyReused:      "The caller has used the key for another request.",
}

// statuses are the HTTP statuses of unary calls that fail (connectrpc.com/docs/protocol, "Error codes").
var statuses = map[connect.Code]int{
	connect.CodeCanceled: 499, connect.CodeUnknown: http.StatusInternalServerError,
	connect.CodeInvalidArgument:  http.StatusBadRequest,
	connect.CodeDeadlineExceeded: http.StatusGatewayTimeout, connect.CodeNotFound: http.StatusNotFound,
	connect.CodeAlreadyExists:      http.StatusConflict,
	connect.CodePermissionDenied:   http.StatusForbidden,
	connect.CodeResourceExhausted:  http.StatusTooManyRequests,
	connect.CodeFailedPrecondition: http.StatusBadRequest, connect.CodeAborted: http.StatusConflict,
	connect.CodeOutOfRange:    http.StatusBadRequest,
	connect.CodeUnimplemented: http.StatusNotImplemented, connect.CodeInternal: http.StatusInternalServerError,
	connect.CodeUnavailable: http.StatusServiceUnavailable, connect.CodeDataLoss: http.StatusInternalServerError,
	connect.CodeUnauthenticated: http.StatusUnauthorized,
}

// codes describes every error code, for people and for programs.
func codes() (string, []yaml.MapSlice, error) {
	var list []yaml.MapSlice
	table := "| code | HTTP | exit | when | what to do |\n|---|---|---|---|---|\n"
	for _, c := range api.Codes() {
		when := about[c.Code]
		if when == "" {
			return "", nil, fmt.Errorf("the error code %s has no description: add it to errors.go", c.Code)
		}
		status := statuses[c.RPC]
		list = append(list, yaml.MapSlice{
			{Key: "code", Value: string(c.Code)}, {Key: "status", Value: status},
			{Key: "connect", Value: c.RPC.String()},
			{Key: "exit", Value: c.Exit}, {Key: "when", Value: when}, {Key: "remedy", Value: c.Remedy},
		})
		table += fmt.Sprintf("| `%s` | %d | %d | %s | %s |\n", c.Code, status, c.Exit, when,
			strings.ReplaceAll(c.Remedy, "|", "\\|"))
	}
	return table, list, nil
}

// failure is the JSON of a call that failed, with the detail that a node adds.
func failure() yaml.MapSlice {
	var names []string
	for c := connect.CodeCanceled; c <= connect.CodeUnauthenticated; c++ {
		names = append(names, c.String())
	}
	detail := yaml.MapSlice{
		{Key: "type", Value: "object"},
		{Key: "required", Value: []string{"type", "value"}},
		{Key: "properties", Value: yaml.MapSlice{
			{Key: "type", Value: text("dewpoint.v1.Error")},
			{Key: "value", Value: text("The protobuf message in base64, without padding.")},
			{Key: "debug", Value: reference("dewpoint.v1.Error")},
		}},
	}
	return yaml.MapSlice{
		{Key: "type", Value: "object"},
		{Key: "description",
			Value: "A call that failed, as Connect says it. The node's own words are in the detail of type dewpoint.v1.Error."},
		{Key: "required", Value: []string{"code"}},
		{Key: "properties", Value: yaml.MapSlice{
			{Key: "code", Value: yaml.MapSlice{{Key: "type", Value: "string"}, {Key: "enum", Value: names}}},
			{Key: "message", Value: text("What happened, on one line.")},
			{Key: "details", Value: yaml.MapSlice{{Key: "type", Value: "array"}, {Key: "items", Value: detail}}},
		}},
	}
}

// end is the last line of a stream that failed after its first.
func end() yaml.MapSlice {
	return yaml.MapSlice{
		{Key: "type", Value: "object"},
		{Key: "description",
			Value: "The last line of a stream that failed after its first line. Of DeployMany, whose lines have an error too when one of many has failed, it is the one whose error has details."},
		{Key: "required", Value: []string{"error"}},
		{Key: "properties", Value: yaml.MapSlice{{Key: "error", Value: reference("connect.error")}}},
	}
}
