package api

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"dewpoint/internal/limit"
)

// TLSFiles are PEM files. They are read again when they have changed, so that a
// certificate is renewed without a restart.
type TLSFiles struct {
	Cert, Key string
	ClientCA  string // who signs the certificates of clients; "" asks them for none
}

// reloaded is the configuration that files give, read again when one has changed.
type reloaded struct {
	files TLSFiles

	mu   sync.Mutex
	read [3]time.Time
	cfg  *tls.Config
}

// Config is for a listener. The files are read now, and looked at again at each
// connection; where they are wrong by then, the ones before are used on.
func (t TLSFiles) Config() (*tls.Config, error) {
	r := &reloaded{files: t}
	if _, err := r.now(); err != nil {
		return nil, err
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{"h2", "http/1.1"},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return r.now() }}, nil
}

func (r *reloaded) now() (*tls.Config, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var at [3]time.Time
	for i, path := range []string{r.files.Cert, r.files.Key, r.files.ClientCA} {
		if fi, err := os.Stat(path); err == nil {
			at[i] = fi.ModTime()
		}
	}
	if r.cfg != nil && at == r.read {
		return r.cfg, nil
	}
	cfg, err := r.load()
	if err != nil {
		if r.cfg != nil {
			return r.cfg, nil
		}
		return nil, err
	}
	r.cfg, r.read = cfg, at
	return cfg, nil
}

func (r *reloaded) load() (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(r.files.Cert, r.files.Key)
	if err != nil {
		return nil, err
	}
	// No tickets: who resumes a session is not looked at again, though client_ca may be another by then.
	cfg := &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{"h2", "http/1.1"},
		Certificates: []tls.Certificate{cert}, SessionTicketsDisabled: true}
	if r.files.ClientCA != "" {
		if cfg.ClientCAs, err = pool(r.files.ClientCA); err != nil {
			return nil, err
		}
		cfg.ClientAuth = tls.VerifyClientCertIfGiven // a token will do, too
	}
	return cfg, nil
}

func pool(path string) (*x509.CertPool, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	p := x509.NewCertPool()
	if !p.AppendCertsFromPEM(b) {
		return nil, fmt.Errorf("%s: no certificate in it", path)
	}
	return p, nil
}

// What callers over TCP can take of the node, known or not.
const (
	tcpConns      = 512 // of which one address may have half
	tcpCalls      = 2048
	tcpCallerMost = 1024        // calls under way, of one caller
	writeTime     = time.Minute // for one write to be taken; about a megabyte is under way by itself
)

// ListenTCP listens at addr, in clear if cfg is nil: then on a loopback address only.
func ListenTCP(addr string, cfg *tls.Config) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	bounded := limit.Listener(l, tcpConns, tcpConns/2)
	if cfg != nil {
		return tls.NewListener(bounded, cfg), nil
	}
	if at, ok := l.Addr().(*net.TCPAddr); !ok || !at.IP.IsLoopback() {
		return nil, errors.Join(fmt.Errorf("listen on %s: in clear on loopback addresses only: give [api] cert and key", addr), l.Close())
	}
	return bounded, nil
}
