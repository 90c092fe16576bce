package test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/pop/peer"
	"dewpoint/internal/spec"
	"dewpoint/testkit"
	"dewpoint/testkit/popbed"
)

// sharing is the configuration of nodes that are a PoP.
const sharing = popbed.Basic + `
[pop]
node = "{{.Name}}"
redis = "{{.Redis}}"
listen = "{{.Address}}:7117"
key = "KEY"
lease = "3s"
grace = "6s"
`

const sharingStore = sharing + `store = "{{.Store}}"
patience = "2s"
`

// patient gives the nodes leases that they do not lose on a busy machine: where all is to cross the WAN once,
// and no node dies.
var patient = strings.NewReplacer(`lease = "3s"`, `lease = "15s"`, `grace = "6s"`, `grace = "20s"`)

// newPoP makes a PoP whose nodes share what they fetch.
func newPoP(t testing.TB, cfg popbed.Config) *pop {
	t.Helper()
	cfg.Redis = true
	if cfg.Template == "" {
		cfg.Template = sharingStore
		if cfg.Store == popbed.None {
			cfg.Template = sharing
		}
	}
	key := filepath.Join(t.TempDir(), "key")
	if err := peer.NewKey(key); err != nil {
		t.Fatal(err)
	}
	cfg.Template = strings.ReplaceAll(cfg.Template, "KEY", key)
	p := newPop(t, cfg)
	if cfg.Store != popbed.None { // what comes before waits for its upload for a while
		for i, n := range p.Nodes {
			p.eventually("the store of "+n.Name, func() error {
				s, err := p.status(i)
				if err == nil && s.Store.State != spec.PoPOK {
					err = fmt.Errorf("%+v", s.Store)
				}
				return err
			})
		}
	}
	return p
}

// client asks the dewd of a node.
func (p *pop) client(i int, do func(context.Context, *api.Client) error) error {
	c, err := api.Dial(p.Nodes[i].Host())
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(p.t.Context(), time.Minute)
	defer cancel()
	return do(ctx, c)
}

func (p *pop) status(i int) (s spec.PoP, err error) {
	err = p.client(i, func(ctx context.Context, c *api.Client) error {
		s, err = c.PoPStatus(ctx)
		return err
	})
	return s, err
}

// spent logs what the registry was asked for after the first so many requests.
func (p *pop) spent(after int) {
	p.t.Helper()
	for _, r := range p.reg.Requests()[after:] {
		p.t.Logf("%s %s %s %s %q %d", r.Time.Format("05.000"), r.From, r.Method, r.Path, r.Range, r.Bytes)
	}
}

// wan is how many bytes have come over the WAN since the last call.
func (p *pop) wan() int64 {
	p.t.Helper()
	now, err := p.WAN()
	if err != nil {
		p.t.Fatal(err)
	}
	n := now.In - p.seen
	p.seen, p.asked = now.In, len(p.reg.Requests())
	return n
}

// eventually waits until ok, for what other nodes see a moment later.
func (p *pop) eventually(what string, ok func() error) {
	p.t.Helper()
	testkit.Retry(p.t, what, ok)
}

// settled waits until every node sees all nodes, the store and the coordinator.
func (p *pop) settled() {
	p.t.Helper()
	for i, n := range p.Nodes {
		p.eventually("the PoP as "+n.Name+" sees it", func() error {
			s, err := p.status(i)
			if err == nil && (len(s.Nodes) != len(p.Nodes) || s.Store.State != spec.PoPOK ||
				s.Coordinator.State != spec.PoPSettled) {
				err = fmt.Errorf("%d nodes, store %+v, coordinator %+v", len(s.Nodes), s.Store, s.Coordinator)
			}
			return err
		})
	}
}

// stored asserts that the store has so many layers, as the last node sees it: another node may see later what
// the one that published them sees at once.
func (p *pop) stored(layers int) {
	p.t.Helper()
	dir := filepath.Join(p.Nodes[len(p.Nodes)-1].Store, "layers")
	p.eventually("the store", func() error {
		found, err := filepath.Glob(filepath.Join(dir, "*.json"))
		if err == nil && len(found) != layers {
			err = fmt.Errorf("%d layers and not %d", len(found), layers)
		}
		for _, path := range found {
			_, serr := os.Stat(path)
			err = errors.Join(err, serr)
		}
		return err
	})
}

// Layers cross the WAN once, however many nodes want them at once, and later nodes
// mount them from the store.
func TestPoPFetchesOnce(t *testing.T) {
	for _, kind := range []popbed.Kind{popbed.None, popbed.Dir, popbed.Gluster, popbed.Gluster3, popbed.Ceph} {
		t.Run("store "+string(kind), func(t *testing.T) {
			t.Parallel()
			cfg := popbed.Config{Store: kind, StoreBytes: 1 << 30, Mbit: 100, Args: []string{"--http", popMetrics}}
			if cfg.Template = sharing; kind != popbed.None { // a Ceph on a busy machine is slow, and not away
				cfg.Template = strings.Replace(sharingStore, `patience = "2s"`, `patience = "30s"`, 1)
			}
			cfg.Template = patient.Replace(cfg.Template)
			p := newPoP(t, cfg)
			const noise = 16 << 20
			img := p.reg.PushImage("team/app:1", appLayers(t, noise), appOptions())
			var unique int64
			for _, l := range img.Layers {
				unique += l.Size
			}
			p.wan()
			p.all(func(i int) error {
				if i == 4 {
					return nil
				}
				_, err := p.deploy(i, img.Ref, "web")
				return err
			})
			for i := range 4 {
				if err := p.answers(i); err != nil {
					t.Error(err)
				}
			}
			if n := p.wan(); n > unique*102/100+64<<10 {
				t.Errorf("%d bytes crossed the WAN, the image has %d", n, unique)
			}
			if kind != popbed.None {
				p.stored(len(img.Layers))
			}
			rec, err := p.deploy(4, img.Ref, "web")
			if err != nil {
				t.Fatal(err)
			}
			if err := p.answers(4); err != nil {
				t.Error(err)
			}
			if n := p.wan(); n > 64<<10 || rec.Bytes.Registry != 0 {
				t.Errorf("a later node had %d bytes over the WAN, record %+v", n, rec)
			}
			p.counted(4, len(img.Layers), unique)
			if kind != popbed.None {
				if n := diskUse(t, filepath.Join(p.Nodes[4].Root(), "layers")); n > noise/4 {
					t.Errorf("a later node keeps %d bytes itself", n)
				}
			}
		})
	}
}

// popMetrics is where the nodes serve their metrics.
const popMetrics = "127.0.0.1:9464"

// counted asserts what is counted on the first nodes, which fetched so many layers together, and on a later
// one.
func (p *pop) counted(later, layers int, bytes int64) {
	p.t.Helper()
	t := p.t.(*testing.T)
	scrape := func(i int) metrics {
		text, err := p.getAt(i, popMetrics, "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		return parseMetrics(t, text)
	}
	var fetched, wanted float64
	for i := range later {
		all := scrape(i)
		fetched += all.count(series{"pop_hits_total", "source=registry"})
		wanted += all.count(series{"pop_hits_total", ""})
	}
	if wanted != float64(later*layers) || fetched < float64(layers) || fetched >= wanted {
		t.Errorf("of %v layers that %d nodes wanted %v came from the registry, the image has %d", wanted, later,
			fetched, layers)
	}
	// bytes are counted once all are here
	becomes(t, func() metrics { return scrape(later) }, map[series]float64{
		{"pop_hits_total", ""}: float64(layers), {"pop_hits_total", "source=registry"}: 0,
		{"pop_hits_total", "source=local"}:            0,
		{"pop_hit_bytes_total", ""}:                   float64(bytes),
		{"deployment_bytes_total", "source=pop"}:      float64(bytes),
		{"deployment_bytes_total", "source=registry"}: 0,
		{"pop_store_away", ""}:                        0, {"pop_coordinator_away", ""}: 0,
	})
}

func diskUse(t testing.TB, dir string) (sum int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		fi, err := d.Info()
		if err == nil {
			sum += fi.Size()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return sum
}
