// Package registry fetches images from registries that speak the OCI distribution protocol: it resolves
// references to image.Image values and opens blobs as streams that mend themselves. It also finds and pushes
// what refers to an image.
//
// A Client asks the endpoints that are configured for a reference's host: the mirrors of its hosts.toml in
// their order, then the registry. Each request passes through small layers, outermost first:
//
//	resume   carries a blob's stream over failures, from the position reached
//	mirrors  tries the host's endpoints until one answers
//	exact    insists on the bytes asked for, and no others
//	watch    cuts what stalls while somebody waits
//	follow   follows redirects, without telling others our credentials
//	authority answers challenges, and keeps tokens until they expire
//	http     connections, one request at a time each (HTTP/1.1)
//
// HTTP/2 is not used: a stream that its reader holds back would share one connection's fate and windows with
// the streams that must not wait.
//
// Plain HTTP is spoken only where Host.PlainHTTP or an http:// address in hosts.toml says so, and to loopback
// addresses that answer so, which are sent no login then. A registry that is asked over HTTPS may redirect to
// HTTPS only, one that is asked over HTTP to itself too. Logins go to the endpoint that they are for, and to
// the token server that it names: over HTTPS, or at its own address.
//
// What refers to an image, such as a startup pack, is found by Referrers and put there by PushArtifact:
// through the registry's API for it, or where there is none by a tag that clients agree on. Pushes pass the
// mirrors by.
//
// Documents (indexes, manifests, configs) are verified here. Blobs are not: the bytes of a Stream are as many
// as asked for and begin where asked for, but whether they hash to the digest is for the reader to find out.
// Memory does not depend on the size of a blob.
package registry

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"golang.org/x/sync/singleflight"
)

// Config is what a Client needs to know. The zero value of each field means
// its default.
type Config struct {
	Hosts     map[string]Host // by host, as references name it
	HostsDirs []string        // containerd's certs.d layout; the first that knows the host decides
	// DockerConfig is the file with the logins; "" is $DOCKER_CONFIG/config.json
	// or .docker/config.json in the home directory. A file that is not there
	// holds no logins. It is read anew whenever a login is needed.
	DockerConfig string

	DialTimeout  time.Duration // for a connection, TLS included; 10 s
	StallTimeout time.Duration // for the next byte while a reader waits; 30 s

	// Retries is how often a stream is taken up again before it fails. The
	// count begins anew whenever the stream has moved on by 64 KiB. 8; below 0
	// is none.
	Retries int
	// ResolveRetries is the same for documents. 3.
	ResolveRetries int
	// Backoff is the wait before the first retry; it doubles up to MaxBackoff.
	// 200 ms and 15 s. Half of each wait is random.
	Backoff, MaxBackoff time.Duration

	MaxIdle   int // idle connections kept per host; 16
	UserAgent string

	// Observe, if set, is called after each read with the number of payload
	// bytes that crossed the wire, discarded ones included. It must be fast
	// and safe for concurrent use.
	Observe func(n int)
	// Wait, if set, is called after each read of n payload bytes and may delay
	// the stream, as a rate limiter does; its error ends the stream.
	Wait func(ctx context.Context, n int) error

	Log *slog.Logger // nil discards
}

// Host is what is configured for one registry host.
type Host struct {
	PlainHTTP bool // speak HTTP without TLS, and send logins so
}

// Client speaks to registries. It is safe for concurrent use.
type Client struct {
	cfg       Config
	transport *http.Transport // of endpoints with no TLS settings of their own

	mu    sync.Mutex // guards hosts
	hosts map[string]*hostEntry

	given      *authn.AuthConfig  // the login of all hosts, to be checked; nil is what Docker's file has
	logins     singleflight.Group // lookups under way, by host
	helperTime time.Duration      // that a credential helper may take; then it is killed

	bytes, discarded, retries atomic.Int64
}

// New makes a Client. It does not touch the network.
func New(cfg Config) (*Client, error) {
	cfg = cfg.defaults()
	for _, d := range cfg.HostsDirs {
		if !filepath.IsAbs(d) {
			return nil, fmt.Errorf("registry: hosts directory %q is not an absolute path", d)
		}
	}
	return &Client{cfg: cfg, transport: newTransport(cfg, &tls.Config{}, cfg.DialTimeout),
		hosts: map[string]*hostEntry{}, helperTime: helperTime}, nil
}

// Close ends idle connections. Streams that are open go on.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.transport.CloseIdleConnections()
	for _, e := range c.hosts {
		e.close(c.transport)
	}
}

// Stats counts since the Client was made.
type Stats struct {
	Bytes     int64 // payload of documents and blobs that crossed the wire
	Discarded int64 // of them, bytes before an offset whose Range was ignored
	Retries   int64
}

// Stats gives the counters.
func (c *Client) Stats() Stats {
	return Stats{Bytes: c.bytes.Load(), Discarded: c.discarded.Load(), Retries: c.retries.Load()}
}

func (cfg Config) defaults() Config {
	def(&cfg.DialTimeout, 10*time.Second)
	def(&cfg.StallTimeout, 30*time.Second)
	def(&cfg.Retries, 8)
	def(&cfg.ResolveRetries, 3)
	def(&cfg.Backoff, 200*time.Millisecond)
	def(&cfg.MaxBackoff, 15*time.Second)
	def(&cfg.MaxIdle, 16)
	def(&cfg.UserAgent, "dewpoint")
	if cfg.DockerConfig == "" {
		cfg.DockerConfig = dockerConfig()
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return cfg
}

func def[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}
