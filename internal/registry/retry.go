package registry

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// progress is how many new bytes give a stream its full number of retries again.
const progress = 64 << 10

// maxAfter bounds what a Retry-After header may ask for.
const maxAfter = time.Minute

// backoff counts failures and waits between them.
type backoff struct {
	first, most time.Duration
	retries     int
	failures    int
}

// again decides whether to try again after err; if so it has waited. It
// returns err, or the end of ctx, if not.
func (b *backoff) again(ctx context.Context, err error) error {
	var e *Error
	if !errors.As(err, &e) || !e.Temporary() || b.failures >= b.retries {
		return err
	}
	b.failures++
	t := time.NewTimer(b.delay(e.after))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w, after: %w", context.Cause(ctx), err)
	}
}

// delay is half fixed and half random, and no shorter than the server asked.
func (b *backoff) delay(after time.Duration) time.Duration {
	d := b.most
	if n := b.failures - 1; n < 20 && b.first<<n < b.most {
		d = b.first << n
	}
	d = d/2 + rand.N(d/2+1)
	return max(d, min(after, maxAfter))
}

// reset gives the full number of retries again.
func (b *backoff) reset() { b.failures = 0 }

// mirrors tries the endpoints that have the capability, healthy ones first,
// until one succeeds. If none does, the error is that of the registry itself,
// which is the last one configured; or, was that not asked, the last error.
func (c *Client) mirrors(ctx context.Context, eps []*endpoint, want capability, op string,
	try func(*endpoint) error) error {
	var final error
	decided := false
	for _, ep := range order(eps, want) {
		err := try(ep)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		if len(eps) > 1 {
			c.cfg.Log.Info("endpoint failed", "op", op, "endpoint", ep.base.Host, "error", err)
			if temporary(err) {
				ep.failed()
			}
		}
		if !decided {
			final = err
		}
		decided = decided || ep == eps[len(eps)-1]
	}
	if final == nil {
		return &Error{Kind: BadConfig, Op: op, Err: errors.New("hosts.toml gives no host this capability")}
	}
	return final
}

func temporary(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Temporary()
}

// order gives the endpoints with the capability, those that failed lately last.
func order(eps []*endpoint, want capability) []*endpoint {
	var well, ill []*endpoint
	for _, ep := range eps {
		switch {
		case ep.caps&want != want:
		case ep.healthy():
			well = append(well, ep)
		default:
			ill = append(ill, ep)
		}
	}
	return append(well, ill...)
}
