// Package redis is the coordinator of a PoP with several nodes: what they agree on lies in one Redis server
// (7 or newer), in scripts' reach. scripts.go has the keys.
//
// # Time
//
// Redis measures expiry by its machine's wall clock, which may jump. So nothing here expires by Redis's
// means. The scripts keep a clock of their own: each adds what Redis's time has advanced since the script
// before, at least nothing and at most a fifth of the lease period. Nodes are heard of more often than that,
// so it goes as real time does, and a jump of hours costs a fifth of a lease. When no node calls, it nearly
// stands still.
//
// # Epochs and tokens
//
// An epoch ends when its record is gone (emptied) or when the server's run id is not the one in it
// (restarted, also from a dump that may be old; another server took over). Each connection looks at the run
// id before anything else; each script, at the record. Tokens are one counter for all keys. A new epoch
// starts it at the greatest of the time in microseconds, what the server still has, and what the node that
// begins it has seen.
//
// Redis must not evict keys by itself: maxmemory-policy is noeviction, its default, or one of volatile-*.
// Touches take at most some 20 MB, all else little. The URL's user needs no more than
//
//	ACL SETUSER dewpoint on >PASSWORD resetkeys resetchannels
//	    ~dewpoint:{P}:* &dewpoint:{P}:*
//	    -@all +hello +ping +info +eval +evalsha +time +publish +subscribe +unsubscribe
//	    +get +set +del +exists +hget +hmget +hset +hgetall
//	    +sadd +srem +sismember +zadd +zrem +zscore +zrangebyscore
//	    +xadd +xrange +xtrim
package redis

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/session"
)

// Config says which server, and for which PoP.
type Config struct {
	pop.Config
	// URL is redis://[USER:PASSWORD@]HOST:PORT[/DB], or rediss:// for TLS.
	URL string
	// CA is a file with the certificates that the server's is to be signed by, for
	// rediss. Default: the system's.
	CA string
	// PoP is the PoP's id: PoPs with different ones do not see each other.
	PoP string
}

// New is a session of cfg.Node. An error means that cfg is wrong; whether the server is
// there, calls tell.
func New(cfg Config) (*session.Session, error) {
	common, err := session.Defaults(cfg.Config)
	if err != nil {
		return nil, err
	}
	if cfg.PoP == "" || strings.ContainsAny(cfg.PoP, "{}*?[]\\ ") {
		return nil, fmt.Errorf("%q is no id of a PoP", cfg.PoP)
	}
	opt, err := options(cfg)
	if err != nil {
		return nil, err
	}
	quiet()
	s := newServer(common, "dewpoint:{"+cfg.PoP+"}:")
	opt.OnConnect = s.greet
	opt.DialTimeout = common.Timeout
	opt.ReadTimeout, opt.WriteTimeout, opt.PoolTimeout = common.Timeout, common.Timeout, common.Timeout
	s.rdb = redis.NewClient(opt)
	return session.New(common, s), nil
}

// quiet turns off the client's own log, which is one for the process: what it says
// comes as errors, too.
var quiet = sync.OnceFunc(logging.Disable)

func options(cfg Config) (*redis.Options, error) {
	opt, err := redis.ParseURL(cfg.URL)
	if err != nil {
		return nil, fmt.Errorf("address of the PoP's Redis (pop.redis): %w; it is redis://HOST:PORT, rediss:// with TLS", withoutURL(err))
	}
	if cfg.CA != "" {
		if opt.TLSConfig == nil {
			return nil, errors.New("address of the PoP's Redis: a CA is of use with rediss:// only")
		}
		if opt.TLSConfig.RootCAs, err = certificates(cfg.CA); err != nil {
			return nil, err
		}
	}
	if opt.TLSConfig != nil {
		opt.TLSConfig.MinVersion = tls.VersionTLS12
	}
	opt.MaxRetries = -1 // a step that may have happened is not repeated blindly
	opt.DialerRetries = 1
	opt.ContextTimeoutEnabled = true
	opt.DisableIdentity = true
	opt.PoolSize = 16
	opt.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return opt, nil
}

// withoutURL keeps the password, which a parser's error may quote, out of logs.
func withoutURL(err error) error {
	for inner := errors.Unwrap(err); inner != nil; inner = errors.Unwrap(err) {
		err = inner
	}
	return err
}

func certificates(file string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("CA of the PoP's Redis: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("CA of the PoP's Redis: no certificate in %s", file)
	}
	return pool, nil
}

// greet is the first thing on each connection: a server that was started since
// the epoch began is told apart before it is asked anything.
func (s *server) greet(ctx context.Context, cn *redis.Conn) error {
	_, err := s.begin(ctx, cn, s.floor.Load())
	return err
}

// listenPatience is how long a quiet connection for events is believed in.
func (s *server) listenPatience() time.Duration { return max(s.cfg.TTL/5, 50*time.Millisecond) }

// Listen implements session.Server.
func (s *server) Listen(ctx context.Context, connected func(), event func(pop.Event)) error {
	ps := s.rdb.Subscribe(ctx)
	defer ps.Close()
	stop := context.AfterFunc(ctx, func() { ps.Close() })
	defer stop()
	bounded, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	if err := ps.Subscribe(bounded, s.key("events")); err != nil {
		return err
	}
	pinged, here := false, false
	for {
		m, err := ps.ReceiveTimeout(ctx, s.listenPatience())
		var timeout interface{ Timeout() bool }
		switch {
		case err == nil:
			pinged = false
		case errors.As(err, &timeout) && timeout.Timeout() && here && !pinged:
			pinged = true
			if err := ps.Ping(ctx); err != nil {
				return err
			}
			continue
		default:
			return err
		}
		switch m := m.(type) {
		case *redis.Subscription:
			if here {
				return errors.New("the connection was another one")
			}
			here = true
			connected()
		case *redis.Message:
			if e, ok := decodeEvent(m.Payload); ok {
				event(e)
			}
		}
	}
}

// Close implements session.Server.
func (s *server) Close() error {
	err := s.rdb.Close()
	s.calls.Wait()
	return err
}

func newID() string { return rand.Text() }
