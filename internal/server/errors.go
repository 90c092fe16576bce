package server

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"dewpoint/internal/adopt"
	"dewpoint/internal/api"
	"dewpoint/internal/checkpoint"
	"dewpoint/internal/deploy"
	"dewpoint/internal/deploy/ready"
	"dewpoint/internal/engine"
	"dewpoint/internal/image"
	"dewpoint/internal/layer"
	"dewpoint/internal/layer/erofs"
	"dewpoint/internal/layer/inflate"
	"dewpoint/internal/layer/toc"
	"dewpoint/internal/registry"

	"github.com/containerd/errdefs"
)

// sentinels are the errors of the parts as the surfaces know them, the most
// telling first.
var sentinels = []struct {
	err  error
	code api.Code
}{
	{syscall.ENOSPC, api.DiskFull},
	{syscall.EDQUOT, api.DiskFull},
	{deploy.ErrRequest, api.BadRequest},
	{engine.ErrOption, api.BadRequest},
	{checkpoint.ErrUnable, api.Unsupported},
	{layer.ErrMismatch, api.Mismatch},
	{layer.ErrEarlyMismatch, api.Mismatch},
	{inflate.ErrCorrupt, api.Mismatch},
	{layer.ErrTooLarge, api.BadImage},
	{erofs.ErrTooLarge, api.BadImage},
	{toc.ErrUnsafe, api.BadImage},
	{toc.ErrCorrupt, api.BadImage},
	{toc.ErrLimit, api.BadImage},
	{image.ErrInvalid, api.BadImage},
	{image.ErrUnsupported, api.BadImage},
	{errImageInUse, api.InUse},
	{adopt.ErrUnknown, api.NotFound},
	{engine.ErrNoCommand, api.CommandMissing},
	{engine.ErrNotExecutable, api.NotExecutable},
	{engine.ErrExists, api.NameInUse},
	{engine.ErrNotFound, api.NotFound},
	{engine.ErrNoVolume, api.NotFound},
	{engine.ErrVolumeUsed, api.InUse},
	{engine.ErrPortTaken, api.PortInUse},
	{engine.ErrNotRunning, api.NotRunning},
	{engine.ErrRunning, api.Running},
	{engine.ErrMissing, api.Unsupported},
	{errdefs.ErrNotFound, api.NotFound},
}

var kinds = map[registry.Kind]api.Code{
	registry.Unreachable:  api.Unreachable,
	registry.Stalled:      api.Unreachable,
	registry.Unauthorized: api.Unauthorized,
	registry.Forbidden:    api.Forbidden,
	registry.NotFound:     api.NotFound,
	registry.RateLimited:  api.RateLimited,
	registry.ServerFault:  api.RegistryFault,
	registry.Protocol:     api.RegistryFault,
	registry.Mismatch:     api.Mismatch,
	registry.PlainHTTP:    api.Unreachable,
	registry.Certificate:  api.Unreachable,
	registry.BadConfig:    api.BadRequest,
	registry.BadImage:     api.BadImage,
}

// classify says to the API what went wrong.
func classify(err error) *api.Error {
	var known *api.Error
	var exited *ready.ExitError
	var unready *ready.NotReadyError
	var taken *ready.TakenError
	var re *registry.Error
	switch {
	case errors.As(err, &known):
		return known
	case errors.As(err, &taken):
		return api.Of(api.PortInUse, err)
	case errors.Is(err, checkpoint.ErrRestore):
		return unrestored(err)
	case errors.As(err, &exited):
		return left(api.Of(api.Exited, err), err, "see its output above")
	case errors.As(err, &unready):
		return left(api.Of(api.NotReady, err), err, "allow more time with --ready-timeout")
	case errors.As(err, &re):
		return refused(re, err)
	}
	for _, s := range sentinels {
		if errors.Is(err, s.err) {
			return api.Of(s.code, err)
		}
	}
	return api.Classify(err)
}

// left has the remedy say what is left of a container that did not serve.
func left(e *api.Error, err error, advice string) *api.Error {
	var u *deploy.UnreadyError
	switch {
	case !errors.As(err, &u):
	case u.Kept:
		e.Remedy = fmt.Sprintf("it is kept, stopped: see \"dew logs %s\", remove it with \"dew rm -f %s\", or %s",
			u.Name, u.Name, advice)
	default:
		e.Remedy = "nothing is left of it: " + advice + ", or leave out --rm to keep it and its logs"
	}
	return e
}

// refused is an error of a registry, with its remedy in its own place: the text ends with it, too.
func refused(re *registry.Error, err error) *api.Error {
	e := api.Of(kinds[re.Kind], err)
	if r := re.Remedy(); r != "" {
		e.Remedy, e.Message = r, strings.Replace(e.Message, "; "+r, "", 1)
	}
	return e
}

// unrestored classifies errors of containers that were to be restored in any case, whatever went
// wrong with them after that: booting is the remedy, but for a full disk.
func unrestored(err error) *api.Error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return api.Of(api.DiskFull, err)
	}
	e := api.Of(api.Unsupported, err)
	e.Remedy = "without --restore always it boots"
	return e
}
