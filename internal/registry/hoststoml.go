package registry

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"
)

// capability is what a host may be asked for.
type capability int

const (
	canPull capability = 1 << iota
	canResolve
	canReferrers // list what refers to an image

	canAll = canPull | canResolve | canReferrers
)

// hostConfig is one endpoint as a hosts directory describes it.
type hostConfig struct {
	base        *url.URL // scheme, host and API root; nil is the registry itself
	caps        capability
	ca          []string // files
	client      [][2]string
	skipVerify  bool
	header      http.Header
	dialTimeout time.Duration
}

// ordinary reports that nothing of the endpoint's connections is special.
func (h hostConfig) ordinary() bool {
	return len(h.ca) == 0 && len(h.client) == 0 && !h.skipVerify && h.dialTimeout == 0
}

// hostTable is a table of hosts.toml, as containerd documents it.
type hostTable struct {
	Capabilities []string       `toml:"capabilities"`
	CA           any            `toml:"ca"`
	Client       any            `toml:"client"`
	SkipVerify   bool           `toml:"skip_verify"`
	Header       map[string]any `toml:"header"`
	OverridePath bool           `toml:"override_path"`
	DialTimeout  string         `toml:"dial_timeout"`
}

// parseHosts reads a hosts.toml that lies in dir: the mirrors in the order of
// the file, and last the server.
func parseHosts(dir string, b []byte) ([]hostConfig, error) {
	var file struct {
		hostTable
		Server string               `toml:"server"`
		Host   map[string]hostTable `toml:"host"`
	}
	if err := toml.Unmarshal(b, &file); err != nil {
		return nil, err
	}
	var out []hostConfig
	for _, name := range hostOrder(b, file.Host) {
		h, err := file.Host[name].parse(dir, name)
		if err != nil {
			return nil, fmt.Errorf("host %q: %w", name, err)
		}
		if h.base == nil {
			return nil, fmt.Errorf("host %q: no address", name)
		}
		out = append(out, h)
	}
	server, err := file.hostTable.parse(dir, file.Server)
	if err != nil {
		return nil, fmt.Errorf("server: %w", err)
	}
	return append(out, server), nil
}

// hostOrder gives the names of the [host."…"] tables as the file orders them,
// then those that were written in another form, sorted.
func hostOrder(b []byte, hosts map[string]hostTable) []string {
	var order []string
	seen := map[string]bool{}
	p := unstable.Parser{}
	p.Reset(b)
	for p.NextExpression() {
		e := p.Expression()
		if e.Kind != unstable.Table && e.Kind != unstable.KeyValue {
			continue
		}
		it := e.Key()
		if !it.Next() || string(it.Node().Data) != "host" || !it.Next() {
			continue
		}
		name := string(it.Node().Data)
		if _, ok := hosts[name]; ok && !seen[name] {
			seen[name] = true
			order = append(order, name)
		}
	}
	rest := len(order)
	for name := range hosts {
		if !seen[name] {
			order = append(order, name)
		}
	}
	sort.Strings(order[rest:])
	return order
}

func (t hostTable) parse(dir, address string) (h hostConfig, err error) {
	if h.base, err = parseAddress(address, t.OverridePath); err != nil {
		return h, err
	}
	if h.caps, err = parseCapabilities(t.Capabilities); err != nil {
		return h, err
	}
	if h.ca, err = paths(dir, t.CA); err != nil {
		return h, fmt.Errorf("ca: %w", err)
	}
	if h.client, err = pairs(dir, t.Client); err != nil {
		return h, fmt.Errorf("client: %w", err)
	}
	if h.header, err = headers(t.Header); err != nil {
		return h, fmt.Errorf("header: %w", err)
	}
	h.skipVerify = t.SkipVerify
	if t.DialTimeout != "" {
		if h.dialTimeout, err = time.ParseDuration(t.DialTimeout); err != nil || h.dialTimeout <= 0 {
			return h, fmt.Errorf("dial_timeout %q is no duration", t.DialTimeout)
		}
	}
	return h, nil
}

// parseAddress reads "https://host:port/path"; without a scheme it is HTTPS.
// The API root is /v2 below the path, unless override says that the path is it.
func parseAddress(s string, override bool) (*url.URL, error) {
	if s == "" {
		return nil, nil
	}
	if !strings.Contains(s, "://") {
		s = "https://" + s
	}
	u, err := url.Parse(s)
	if err != nil {
		return nil, err
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, errors.New("not an http or https address")
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, errors.New("an address has no user, query or fragment")
	}
	root := strings.TrimSuffix(path.Clean("/"+u.Path), "/")
	if !override && !strings.HasSuffix(root, "/v2") {
		root += "/v2"
	}
	return &url.URL{Scheme: u.Scheme, Host: u.Host, Path: root}, nil
}

func parseCapabilities(names []string) (capability, error) {
	if len(names) == 0 {
		return canAll, nil
	}
	var c capability
	for _, n := range names {
		switch strings.ToLower(n) {
		case "pull":
			c |= canPull
		case "resolve":
			c |= canResolve
		case "referrers":
			c |= canReferrers
		case "push": // goes to the registry itself, whatever is configured
		default:
			return 0, fmt.Errorf("unknown capability %q", n)
		}
	}
	return c, nil
}

// paths reads a file name or a list of them, relative to dir.
func paths(dir string, v any) ([]string, error) {
	list, err := stringList(v)
	for n, p := range list {
		list[n] = under(dir, p)
	}
	return list, err
}

func under(dir, p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(dir, p)
}

// pairs reads a file, a list of files, or a list of pairs of files.
func pairs(dir string, v any) ([][2]string, error) {
	items, ok := v.([]any)
	if !ok {
		items = []any{v}
	}
	var out [][2]string
	for _, it := range items {
		p, err := paths(dir, it)
		switch {
		case err != nil:
			return nil, err
		case len(p) == 1:
			out = append(out, [2]string{p[0], ""})
		case len(p) == 2:
			out = append(out, [2]string{p[0], p[1]})
		case len(p) > 2:
			return nil, fmt.Errorf("%d files where a certificate and its key are due", len(p))
		}
	}
	return out, nil
}

func headers(m map[string]any) (http.Header, error) {
	h := http.Header{}
	for k, v := range m {
		list, err := stringList(v)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", k, err)
		}
		for _, s := range list {
			h.Add(k, s)
		}
	}
	return h, nil
}

// stringList reads a string or a list of strings; nil is none.
func stringList(v any) ([]string, error) {
	switch v := v.(type) {
	case nil:
		return nil, nil
	case string:
		return []string{v}, nil
	case []any:
		out := make([]string, len(v))
		for n, it := range v {
			s, ok := it.(string)
			if !ok {
				return nil, fmt.Errorf("%v is not a string", it)
			}
			out[n] = s
		}
		return out, nil
	}
	return nil, fmt.Errorf("%v is neither a string nor a list of them", v)
}

// hostDir finds the directory that describes a host, as containerd does:
// "host_5000_", "host:5000", "_default". "" if there is none.
func hostDir(roots []string, host string) (string, error) {
	names := []string{host, "_default"}
	if n := strings.LastIndex(host, ":"); n > 0 {
		names = append([]string{host[:n] + "_" + host[n+1:] + "_"}, names...)
	}
	for _, root := range roots {
		for _, name := range names {
			dir := filepath.Join(root, name)
			if fi, err := os.Stat(dir); err == nil && fi.IsDir() {
				return dir, nil
			} else if err != nil && !os.IsNotExist(err) {
				return "", err
			}
		}
	}
	return "", nil
}

// loadHosts reads a host's directory: its hosts.toml, or else certificates in
// Docker's manner.
func loadHosts(dir string) ([]hostConfig, error) {
	file := filepath.Join(dir, "hosts.toml")
	b, err := os.ReadFile(file)
	if os.IsNotExist(err) {
		return loadCerts(dir)
	}
	if err != nil {
		return nil, err
	}
	hosts, err := parseHosts(dir, b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return hosts, nil
}

// loadCerts reads Docker's layout: *.crt are authorities, *.cert with *.key a
// client's certificates.
func loadCerts(dir string) ([]hostConfig, error) {
	h := hostConfig{caps: canAll}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		switch filepath.Ext(name) {
		case ".crt":
			h.ca = append(h.ca, name)
		case ".cert":
			key := strings.TrimSuffix(name, ".cert") + ".key"
			if _, err := os.Stat(key); err != nil {
				key = ""
			}
			h.client = append(h.client, [2]string{name, key})
		}
	}
	return []hostConfig{h}, nil
}
