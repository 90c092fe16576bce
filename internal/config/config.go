// Package config reads the node's configuration: one TOML file, every key
// optional. A key that is not known is an error that names it, since a
// misspelt limit is worse than none.
//
// Keys with the tag "tuning" are for tests and the laboratory: they shorten clocks and choose what dewd
// chooses by itself. Only a dewd whose environment has DEWPOINT_TUNING=1 takes them.
//
// Of the others, comment and tag "example" are their lines in docs/operate/configuration.md, which "make
// generate" writes. Those with the tag "instead" are commented out there: they exclude the one before.
package config

//go:generate go test -run ^TestKeysAreDocumented$ . -update

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"dewpoint/internal/spec"
)

// Config is the configuration file. The zero value is the default of every key.
type Config struct {
	Registry   map[string]Registry `toml:"registry"` // by host, as written in image references
	Registries Registries          `toml:"registries"`
	Engine     Engine              `toml:"engine"`
	Cache      Cache               `toml:"cache"`
	Limits     Limits              `toml:"limits"`
	Link       Link                `toml:"link"`
	Pack       Pack                `toml:"pack"`
	Lazy       Lazy                `toml:"lazy"`
	Node       Node                `toml:"node"`
	PoP        PoP                 `toml:"pop"`
	API        API                 `toml:"api"`
	Checkpoint Checkpoint          `toml:"checkpoint"`
	Deploy     Deploy              `toml:"deploy"`
	Trace      Trace               `toml:"trace"`
}

// Trace says where the spans of deployments go.
type Trace struct {
	// Endpoint is an OpenTelemetry collector's, by OTLP over HTTP: http://HOST:4318.
	// "" is what OTEL_EXPORTER_OTLP_ENDPOINT says, else nowhere.
	Endpoint string `toml:"endpoint" tuning:"yes"`
}

// Registry is what is to be known of one registry.
type Registry struct {
	// logins too; default: HTTPS, and at loopback addresses HTTP without a login if they answer so
	PlainHTTP bool `toml:"plain_http" example:"true"`
}

// Registries is what holds for all registries.
type Registries struct {
	// containerd's hosts.toml: mirrors, certificates
	HostsDirs    []string `toml:"hosts_dirs" example:"[\"/etc/containerd/certs.d\"]"`
	StallTimeout Duration `toml:"stall_timeout" tuning:"yes"` // a read without a byte for so long is cut; 0 is 30s
}

// Engine is the containerd that runs containers.
type Engine struct {
	Containerd string `toml:"containerd" tuning:"yes"` // the private one's binary; "" looks beside dewd, then in PATH
	// containerd's, of all that dewd makes
	Namespace string `toml:"namespace" example:"dewpoint"`
	Subnet    string `toml:"subnet" example:"10.88.240.0/20"` // of --net bridge
	// auto: crun where it works, else runc; crun; runc
	Runtime string `toml:"runtime" example:"auto"`
	// of each stream of a container's output; the newest half of it stays at least
	LogBytes Size `toml:"log_max_bytes" example:"16MiB"`
}

// Cache bounds what is kept though nothing uses it.
type Cache struct {
	// of all layers; above it, and when the disk is 90 % full, cut pulls go, then layers of images without a
	// container, within a minute
	MaxBytes Size `toml:"max_bytes" example:"10GB"`
	// of what goes first: one of evict.Names; "" is evict.Default, the best of the study
	Policy string `toml:"policy" tuning:"yes"`
}

// Limits refuses what would hurt the node.
type Limits struct {
	Memory Size `toml:"memory" tuning:"yes"` // dewd's own Go heap aims below it; 0 is 40MiB
}

// Link bounds what the registries' link is used for.
type Link struct {
	Limit      Rate `toml:"limit" example:"20Mbit"`     // of all pulls together
	Background Rate `toml:"background" example:"5Mbit"` // of limit, for the rest of images that run already
}

// Pack says which startup packs are believed and whether they are learned.
type Pack struct {
	// packs of registries: pop uses none, signed those with a valid signature, repository any that the image's
	// repository has; default: repository for images named by tag, signed for those named by digest
	Trust string `toml:"trust" example:"repository"`
	Key   string `toml:"key" example:"/etc/dewpoint/pack.pub"` // Ed25519 public key of signed packs, PEM
	Learn string `toml:"learn" example:"auto"`                 // auto: record first starts; never
	// a recorded start lasts until the container has been ready for so long; 0 is 5s
	After Duration `toml:"after" tuning:"yes"`
}

// Lazy says how images run that are not whole yet.
type Lazy struct {
	// auto: images with a startup pack start lazily and come whole in the background; on-demand: what nobody
	// reads never comes; never: every image is pulled whole
	Mode  string   `toml:"mode" example:"auto"`
	Wait  Duration `toml:"wait" tuning:"yes"`  // a read waits so long for bytes that do not come, then it fails; 0 is 60s
	Delay Duration `toml:"delay" tuning:"yes"` // between a start and the completion of its layers
	// complete layers only then, in local time
	Hours string `toml:"hours" example:"22:00-06:00"`
}

// Between reports whether t lies within the hours; always, if none are given.
func (l Lazy) Between(t time.Time) bool {
	from, to, ok := parseHours(l.Hours)
	if !ok {
		return true
	}
	m := t.Hour()*60 + t.Minute()
	if from <= to {
		return m >= from && m < to
	}
	return m >= from || m < to
}

// parseHours reads "HH:MM-HH:MM" as minutes of the day.
func parseHours(s string) (from, to int, ok bool) {
	a, b, _ := strings.Cut(s, "-")
	x, err1 := time.Parse("15:04", strings.TrimSpace(a))
	y, err2 := time.Parse("15:04", strings.TrimSpace(b))
	return x.Hour()*60 + x.Minute(), y.Hour()*60 + y.Minute(), err1 == nil && err2 == nil
}

// Node says who this node is.
type Node struct {
	Name  string `toml:"name" example:"n1"`     // default: the host's
	Mount string `toml:"mount" example:"erofs"` // erofs, loop, tree; default: the best that works
}

// API lets callers in over TCP. The Unix socket is there anyway.
type API struct {
	// the API over TCP (docs/operate/api.md); without cert and key on loopback only; default: nowhere
	Listen string `toml:"listen" example:"0.0.0.0:7119"`
	Cert   string `toml:"cert" example:"/etc/dewpoint/node.crt"` // PEM
	Key    string `toml:"key" example:"/etc/dewpoint/node.key"`
	// the authority of clients' certificates, PEM
	ClientCA string `toml:"client_ca" example:"/etc/dewpoint/clients.crt"`
	// roles (read, deploy, admin) by the certificates' common names
	Clients map[string]string `toml:"clients" example:"{\"deployer.example\" = \"deploy\"}"`
	Tokens  string            `toml:"tokens" example:"/etc/dewpoint/tokens"` // "dew token" writes it
}

// PoP says what this node has in common with others. It is in one if Store or
// Redis is given.
type PoP struct {
	Node string `toml:"node" tuning:"yes"` // this node's name in it; "" is node.name
	// directory on the file system that the nodes share, absolute
	Store string `toml:"store" example:"/mnt/pop"`
	// or redis://; default: a node by itself
	Redis string `toml:"redis" example:"rediss://user:pw@10.0.0.9"`
	// the authority of a rediss:// server's certificate
	RedisCA string `toml:"redis_ca" example:"/etc/dewpoint/redis.pem"`
	// at which the other nodes reach this one; default: nowhere
	Listen string `toml:"listen" example:"10.0.0.1:7070"`
	// the PoP's secret ("dew pop key"); or, in its place, certificates (PEM):
	Key string `toml:"key" example:"/etc/dewpoint/pop.key"`
	// the authority's certificates, and its lists of revoked ones
	CA     string `toml:"ca" example:"/etc/dewpoint/pop-ca.pem" instead:"yes"`
	Cert   string `toml:"cert" example:"/etc/dewpoint/n1.crt" instead:"yes"`
	TLSKey string `toml:"tls_key" example:"/etc/dewpoint/n1.key" instead:"yes"`

	// of the layers in the store; default: all of its file system
	Capacity Size    `toml:"capacity" example:"40GB"`
	High     float64 `toml:"high" tuning:"yes"` // share of it from which on layers are evicted; 0 is 0.95
	Low      float64 `toml:"low" tuning:"yes"`  // share down to which; 0 is 0.05 less
	// by the beginning of image references
	Quota map[string]Size `toml:"quota" example:"{\"registry.example/team/\" = \"10GB\"}"`
	// of evicting: one of evict.Names; "" is evict.Default, the best of the study
	Policy string `toml:"policy" tuning:"yes"`
	// a node that is silent for so long has let go of what it did; 0 is 15s
	Lease Duration `toml:"lease" tuning:"yes"`
	Grace Duration `toml:"grace" tuning:"yes"` // what was evicted can come back for so long; 0 is 60s
	// auto (layers that are deployed often here are copied near), never; "" is auto
	Copy string `toml:"copy" tuning:"yes"`
	// images that other nodes deploy again and again are prewarmed here while nothing is deployed, so many at
	// most; 0 is 16, below it none
	Prepare  int      `toml:"prepare" tuning:"yes"`
	Patience Duration `toml:"patience" tuning:"yes"` // the store is away if it does not answer for so long; 0 is 5s
}

// Checkpoint says how containers start from the memory of others.
type Checkpoint struct {
	// asked: containers are saved, once they are ready, whose image's label or deployment asks for it; measured:
	// also what boots slowly; manual: none by itself; off: none is made or used
	Mode   string `toml:"mode" example:"asked"`
	Engine string `toml:"engine" tuning:"yes"` // criu, dmtcp, auto (the first of them that works); "" is auto
	CRIU   string `toml:"criu" tuning:"yes"`   // the program; "" is found beside dewd's tools and in PATH
	// directory of its installation, with bin and lib; "" is that of dmtcp_launch in PATH
	DMTCP    string `toml:"dmtcp" tuning:"yes"`
	MaxBytes Size   `toml:"max_bytes" example:"4GiB"` // of all checkpoints on this node
	// LazyAbove is from how much memory on it comes while the processes run already, of what is not unpacked
	// here from three quarters of that; 0 is 256MiB.
	LazyAbove Size `toml:"lazy_above" tuning:"yes"`
}

// Deploy says how many deployments are under way at once. Package admit has the defaults.
type Deploy struct {
	Max int `toml:"max" tuning:"yes"` // containers being made; 0 is by the number of processors
	// images being fetched from one registry; 0 is by the number of processors
	Fetch int `toml:"fetch" tuning:"yes"`
	Queue int `toml:"queue" tuning:"yes"` // deployments that wait; 0 is 1024
	// memory that deployments leave free; 0 is a 32nd of the machine's, 32 to 256 MiB
	Reserve Size `toml:"reserve" tuning:"yes"`
	// true: containers' limits of memory need not fit into what is free, and are not kept for those that run
	Overcommit bool `toml:"overcommit" example:"false"`
}

func (d Deploy) validate() error {
	for _, k := range []struct {
		key string
		n   int
	}{{"max", d.Max}, {"fetch", d.Fetch}, {"queue", d.Queue}} {
		if k.n < 0 {
			return fmt.Errorf("deploy.%s = %d: it is below zero", k.key, k.n)
		}
	}
	return nil
}

// Load reads the file at path. An empty path gives the defaults.
func Load(path string) (Config, error) {
	if path == "" {
		return Config{}, nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return Config{}, err
	}
	c, err := Parse(b)
	if err != nil {
		return Config{}, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// Parse reads a configuration.
func Parse(b []byte) (Config, error) {
	var c Config
	d := toml.NewDecoder(bytes.NewReader(b)).DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return Config{}, explain(err)
	}
	if os.Getenv(tuningVar) == "" {
		if err := refuseTuning(reflect.ValueOf(c), ""); err != nil {
			return Config{}, err
		}
	}
	return c, c.validate()
}

// tuningVar is the environment variable that lets keys for tests and the laboratory in.
const tuningVar = "DEWPOINT_TUNING"

// refuseTuning names the first key below prefix that is given and is not an operator's.
func refuseTuning(v reflect.Value, prefix string) error {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		key := prefix + f.Tag.Get("toml")
		switch {
		case f.Tag.Get("tuning") != "" && !v.Field(i).IsZero():
			return fmt.Errorf("%s is not a key for operators: dewd chooses it (tests set %s=1)", key, tuningVar)
		case f.Type.Kind() == reflect.Struct:
			if err := refuseTuning(v.Field(i), key+"."); err != nil {
				return err
			}
		}
	}
	return nil
}

// explain gives the line of what is wrong.
func explain(err error) error {
	var strict *toml.StrictMissingError
	if errors.As(err, &strict) && len(strict.Errors) > 0 {
		e := strict.Errors[0]
		row, _ := e.Position()
		return fmt.Errorf("line %d: no such key: %s", row, strings.Join(e.Key(), "."))
	}
	var de *toml.DecodeError
	if errors.As(err, &de) {
		row, col := de.Position()
		return fmt.Errorf("line %d, column %d: %s", row, col, strings.TrimPrefix(de.Error(), "toml: "))
	}
	return err
}

func (c Config) validate() error {
	if err := c.validateChoices(); err != nil {
		return err
	}
	for host := range c.Registry {
		if host == "" || strings.ContainsAny(host, "/ ") {
			return fmt.Errorf("registry %q: give the host (and port) alone, as image references have it", host)
		}
	}
	if d := c.Registries.StallTimeout; d != 0 && time.Duration(d) < time.Second {
		return fmt.Errorf("registries.stall_timeout = %q: at least 1s", time.Duration(d))
	}
	if m := c.Limits.Memory; m != 0 && m < 16<<20 {
		return fmt.Errorf("limits.memory: %d bytes are too few: at least 16MiB", m)
	}
	if n := c.Engine.Namespace; strings.ContainsAny(n, "/ ") {
		return fmt.Errorf("engine.namespace = %q: letters, digits and - . _", n)
	}
	if u, err := url.Parse(c.Trace.Endpoint); c.Trace.Endpoint != "" &&
		(err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "") {
		return fmt.Errorf("trace.endpoint = %q: want http://HOST:PORT, or https", c.Trace.Endpoint)
	}
	if n := c.Engine.LogBytes; n != 0 && n < 1<<20 {
		return fmt.Errorf("engine.log_max_bytes: %d bytes are too few: at least 1MiB", n)
	}
	if c.Lazy.Hours != "" {
		if _, _, ok := parseHours(c.Lazy.Hours); !ok {
			return fmt.Errorf("lazy.hours = %q: give times of the day, as in 22:00-06:00", c.Lazy.Hours)
		}
	}
	if c.Pack.Trust == "signed" && c.Pack.Key == "" {
		return errors.New("pack.trust = \"signed\": pack.key is missing, the file of the public key")
	}
	if err := errors.Join(c.PoP.validate(), c.Deploy.validate()); err != nil {
		return err
	}
	return c.validatePaths()
}

// validateChoices refuses what is not among the few values of a key.
func (c Config) validateChoices() error {
	for _, k := range []struct {
		key, value string
		of         []string
	}{
		{"node.mount", c.Node.Mount, spec.Mounts},
		{"engine.runtime", c.Engine.Runtime, []string{"auto", "crun", "runc"}},
		{"pack.trust", c.Pack.Trust, []string{"pop", "signed", "repository"}},
		{"pack.learn", c.Pack.Learn, []string{"auto", "never"}},
		{"lazy.mode", c.Lazy.Mode, []string{"auto", "never", "on-demand"}},
		{"pop.copy", c.PoP.Copy, []string{"auto", "never"}},
		{"checkpoint.mode", c.Checkpoint.Mode, []string{"asked", "measured", "manual", "off"}},
		{"checkpoint.engine", c.Checkpoint.Engine, []string{"auto", "criu", "dmtcp"}},
	} {
		if k.value != "" && !slices.Contains(k.of, k.value) {
			last := len(k.of) - 1
			return fmt.Errorf("%s = %q: it is %s or %s", k.key, k.value, strings.Join(k.of[:last], ", "), k.of[last])
		}
	}
	return nil
}

// popNode is what a node's name in a PoP looks like: it is that of a directory, too.
var popNode = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$`)

// CheckNode says what is wrong with a node's name in a PoP.
func CheckNode(name string) error {
	if !popNode.MatchString(name) {
		return fmt.Errorf("%q: letters, digits and - . _", name)
	}
	return nil
}

func (p PoP) validate() error {
	if p.Node != "" {
		if err := CheckNode(p.Node); err != nil {
			return fmt.Errorf("pop.node = %w", err)
		}
	}
	switch {
	case p.Redis == "" && (p.Listen != "" || p.RedisCA != ""):
		return errors.New("pop.redis is missing: nodes find each other by it")
	case p.Listen != "" && p.Key == "" && p.Cert == "":
		return errors.New("pop.key is missing, the secret of the PoP that lets nodes ask each other: make it by \"dew pop key FILE\" and copy it to every node")
	case p.Cert != "" && (p.CA == "" || p.TLSKey == "" || p.Key != ""):
		return errors.New("pop.cert goes with pop.ca and pop.tls_key, instead of pop.key")
	case p.High != 0 && p.High < 0.1 || p.High > 1 || p.Low < 0 ||
		p.Low > 0 && p.Low > cmp.Or(p.High, defaultHigh):
		return fmt.Errorf("pop.high = %g, pop.low = %g: shares of the capacity, low below high, which is %g unless given", p.High, p.Low, defaultHigh)
	case p.Store != "" && !strings.HasPrefix(p.Store, "/"):
		return fmt.Errorf("pop.store = %q: an absolute path", p.Store)
	}
	if p.Listen != "" {
		host, port, err := net.SplitHostPort(p.Listen)
		if err != nil || port == "" {
			return fmt.Errorf("pop.listen = %q: HOST:PORT, such as 10.0.0.1:7070", p.Listen)
		}
		if host == "" {
			return fmt.Errorf("pop.listen = %q: give the address at which the other nodes reach this one", p.Listen)
		}
	}
	return p.validateTimes()
}

// Of the times of package pop and its session, which see.
const (
	defaultHigh  = 0.95
	defaultLease = Duration(15 * time.Second)
	defaultGrace = Duration(time.Minute)
)

// validateTimes refuses times with which nodes would take each other for dead, or what another
// one uses for unused.
func (p PoP) validateTimes() error {
	for _, t := range []struct {
		key      string
		d, least Duration
	}{
		{"lease", p.Lease, Duration(time.Second)}, {"grace", p.Grace, Duration(time.Second)},
		{"patience", p.Patience, Duration(100 * time.Millisecond)},
	} {
		if t.d != 0 && t.d < t.least {
			return fmt.Errorf("pop.%s = %q: at least %v", t.key, time.Duration(t.d), time.Duration(t.least))
		}
	}
	lease, grace := cmp.Or(p.Lease, defaultLease), cmp.Or(p.Grace, defaultGrace)
	if grace <= lease {
		return fmt.Errorf("pop.grace = %q is not longer than pop.lease = %q: a node that was cut off for a moment would find gone what it uses", time.Duration(grace), time.Duration(lease))
	}
	return nil
}

// validatePaths checks what is named and must be there.
func (c Config) validatePaths() error {
	if n := c.Engine.Subnet; n != "" {
		if p, err := netip.ParsePrefix(n); err != nil || !p.Addr().Is4() || p.Bits() > 28 {
			return fmt.Errorf("engine.subnet = %q: an IPv4 subnet of /28 or larger, such as 10.88.240.0/20", n)
		}
	}
	paths := map[string]string{"engine.containerd": c.Engine.Containerd, "pack.key": c.Pack.Key,
		"pop.key": c.PoP.Key, "pop.ca": c.PoP.CA, "pop.cert": c.PoP.Cert, "pop.tls_key": c.PoP.TLSKey,
		"pop.redis_ca": c.PoP.RedisCA, "checkpoint.criu": c.Checkpoint.CRIU, "checkpoint.dmtcp": c.Checkpoint.DMTCP}
	for i, d := range c.Registries.HostsDirs {
		paths[fmt.Sprintf("registries.hosts_dirs[%d]", i)] = d
	}
	for key, path := range paths {
		if path == "" {
			continue
		}
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil
}

// Size is a number of bytes: "10GB", "512MiB", "1048576".
type Size int64

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Size) UnmarshalText(b []byte) error {
	n, err := ParseSize(string(b))
	*s = Size(n)
	return err
}

var sizeUnits = []struct {
	suffix string
	factor float64
}{
	{"kib", 1 << 10}, {"mib", 1 << 20}, {"gib", 1 << 30}, {"tib", 1 << 40},
	{"kb", 1e3}, {"mb", 1e6}, {"gb", 1e9}, {"tb", 1e12},
	{"k", 1 << 10}, {"m", 1 << 20}, {"g", 1 << 30}, {"t", 1 << 40}, {"b", 1}, {"", 1},
}

// ParseSize reads a number of bytes. Units: B, KB, MB, GB, TB by thousands;
// KiB, MiB, GiB, TiB and, as docker has them, k, m, g, t by 1024.
func ParseSize(s string) (int64, error) {
	low := strings.ToLower(strings.TrimSpace(s))
	for _, u := range sizeUnits {
		num, ok := strings.CutSuffix(low, u.suffix)
		if !ok {
			continue
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(num), 64)
		if err != nil || v < 0 || v*u.factor >= 1<<63 {
			break
		}
		return int64(v * u.factor), nil
	}
	return 0, fmt.Errorf("%q is not a size such as 512MiB or 10GB", s)
}

// Rate is bytes a second, written in bits as links are: "20Mbit", "512kbit".
type Rate int64

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Rate) UnmarshalText(b []byte) error {
	s := strings.ToLower(strings.TrimSpace(string(b)))
	s = strings.TrimSuffix(s, "/s")
	for _, u := range []struct {
		suffix string
		factor float64
	}{{"kbit", 1e3}, {"mbit", 1e6}, {"gbit", 1e9}, {"bit", 1}} {
		if num, ok := strings.CutSuffix(s, u.suffix); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(num), 64)
			if err == nil && v > 0 {
				*r = Rate(v * u.factor / 8)
				return nil
			}
		}
	}
	return fmt.Errorf("%q is not a rate such as 20Mbit", b)
}

// Duration is a time.Duration as Go writes it: "30s".
type Duration time.Duration

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return fmt.Errorf("%q is not a duration such as 30s", b)
	}
	*d = Duration(v)
	return nil
}
