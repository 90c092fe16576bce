package registry

import (
	"crypto/tls"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"
)

const (
	dockerHub         = "docker.io"
	dockerHubEndpoint = "registry-1.docker.io"
)

// endpoint is one place that serves a host's images.
type endpoint struct {
	base      url.URL // scheme, host and API root
	namespace string  // the registry's host, if this is a mirror of it
	caps      capability
	header    http.Header
	transport *http.Transport
	bounded   *http.Transport // the same, for streams with a window
	authority *authority
	redirects locations
	latency   latency
	loopback  bool         // of this machine, and nothing is configured for it
	clear     atomic.Bool  // it is at a loopback address, and speaks HTTP
	down      atomic.Int64 // unix nanoseconds until which others are asked first
	mute      atomic.Int64 // unix nanoseconds until which it is not asked for referrers
}

// sick is how long a mirror that failed is asked last.
const sick = 30 * time.Second

func (e *endpoint) failed()       { e.down.Store(time.Now().Add(sick).UnixNano()) }
func (e *endpoint) healthy() bool { return time.Now().UnixNano() >= e.down.Load() }

// address is where the request goes.
func (e *endpoint) address(q ask) *url.URL {
	if q.at != nil {
		return q.at
	}
	u := e.url(q.path)
	if q.query != "" {
		u.RawQuery = strings.Trim(u.RawQuery+"&"+q.query, "&")
	}
	return u
}

// url is the address of a path below the API root.
func (e *endpoint) url(path string) *url.URL {
	u := e.base
	if e.clear.Load() {
		u.Scheme = "http"
	}
	u.Path += path
	if e.namespace != "" {
		u.RawQuery = url.Values{"ns": {e.namespace}}.Encode()
	}
	return &u
}

// same reports that u lies at the endpoint as it is configured, so that it may see the
// endpoint's credentials and headers. Where HTTP is spoken and not configured, it may not.
func (e *endpoint) same(u *url.URL) bool {
	return u.Scheme == e.base.Scheme && u.Host == e.base.Host
}

// hostEntry is a host's endpoints, and the state of the configuration that
// they were made from.
type hostEntry struct {
	stamp     stamp
	endpoints []*endpoint
}

// stamp changes when a hosts directory does.
type stamp struct {
	dir        string
	dirTime    time.Time
	fileTime   time.Time
	fileLength int64
}

func takeStamp(dir string) stamp {
	s := stamp{dir: dir}
	if dir == "" {
		return s
	}
	if fi, err := os.Stat(dir); err == nil {
		s.dirTime = fi.ModTime()
	}
	if fi, err := os.Stat(filepath.Join(dir, "hosts.toml")); err == nil {
		s.fileTime, s.fileLength = fi.ModTime(), fi.Size()
	}
	return s
}

func (e *hostEntry) close(shared *http.Transport) {
	for _, ep := range e.endpoints {
		if ep.transport != shared {
			ep.transport.CloseIdleConnections()
		}
	}
}

// endpoints gives the endpoints of a host, mirrors first. They are kept until
// the host's directory changes.
func (c *Client) endpoints(host string) ([]*endpoint, error) {
	dir, err := hostDir(c.cfg.HostsDirs, host)
	if err != nil {
		return nil, &Error{Kind: BadConfig, Host: host, Op: opHosts, Err: err}
	}
	now := takeStamp(dir)
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.hosts[host]
	if old != nil && old.stamp == now {
		return old.endpoints, nil
	}
	eps, err := c.makeEndpoints(host, dir)
	if err != nil {
		return nil, &Error{Kind: BadConfig, Host: host, Op: opHosts, Err: err}
	}
	if old != nil {
		old.close(c.transport)
	}
	c.hosts[host] = &hostEntry{now, eps}
	return eps, nil
}

func (c *Client) makeEndpoints(host, dir string) ([]*endpoint, error) {
	configs := []hostConfig{{caps: canAll}}
	if dir != "" {
		var err error
		if configs, err = loadHosts(dir); err != nil {
			return nil, err
		}
	}
	var out []*endpoint
	for _, h := range configs {
		ep, err := c.makeEndpoint(host, h)
		if err != nil {
			return nil, err
		}
		out = append(out, ep)
	}
	return out, nil
}

func (c *Client) makeEndpoint(host string, h hostConfig) (*endpoint, error) {
	base := h.base
	if base == nil {
		base = &url.URL{Scheme: "https", Host: apiHost(host), Path: "/v2"}
	}
	ep := &endpoint{base: *base, caps: h.caps, header: h.header, transport: c.transport}
	switch {
	case base.Host != apiHost(host):
		ep.namespace = host
	case c.cfg.Hosts[host].PlainHTTP: // the host itself, not its mirrors
		ep.base.Scheme = "http"
	default:
		ep.loopback = h.base == nil && h.ordinary() && loopback(base.Hostname())
	}
	if !h.ordinary() {
		t, err := h.tlsConfig()
		if err != nil {
			return nil, err
		}
		ep.transport = c.transportFor(h, t)
	}
	ep.bounded = bounded(ep.transport)
	ep.authority = newAuthority(ep, c)
	return ep, nil
}

func (c *Client) transportFor(h hostConfig, t *tls.Config) *http.Transport {
	dial := c.cfg.DialTimeout
	if h.dialTimeout > 0 {
		dial = h.dialTimeout
	}
	return newTransport(c.cfg, t, dial)
}

// apiHost is where a registry's API is served.
func apiHost(host string) string {
	if host == dockerHub {
		return dockerHubEndpoint
	}
	return host
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
