package registry

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"
)

// newTransport makes the connections for endpoints with one TLS
// configuration. Readers that ask for ReadBufferSize bytes or more read
// straight from the socket.
func newTransport(cfg Config, t *tls.Config, dial time.Duration) *http.Transport {
	t.MinVersion = tls.VersionTLS12
	t.ClientSessionCache = tls.NewLRUClientSessionCache(64)
	var only1 http.Protocols
	only1.SetHTTP1(true)
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: dial, KeepAlive: 30 * time.Second}).DialContext,
		TLSClientConfig:     t,
		TLSHandshakeTimeout: dial,
		MaxIdleConnsPerHost: cfg.MaxIdle,
		IdleConnTimeout:     90 * time.Second,
		ReadBufferSize:      32 << 10,
		DisableCompression:  true, // bytes as they are stored, whatever the server would like
		Protocols:           &only1,
		// A server's header is limited; its answer's time is by watch.
		MaxResponseHeaderBytes: 256 << 10,
	}
}

// tlsConfig reads the certificates that a hosts.toml names.
func (h hostConfig) tlsConfig() (*tls.Config, error) {
	t := &tls.Config{InsecureSkipVerify: h.skipVerify}
	if len(h.ca) > 0 {
		pool, err := x509.SystemCertPool()
		if err != nil {
			return nil, fmt.Errorf("system's certificate authorities: %w", err)
		}
		for _, f := range h.ca {
			b, err := os.ReadFile(f)
			if err != nil {
				return nil, fmt.Errorf("ca: %w", err)
			}
			if !pool.AppendCertsFromPEM(b) {
				return nil, fmt.Errorf("ca: no certificate in %s", f)
			}
		}
		t.RootCAs = pool
	}
	for _, pair := range h.client {
		cert, err := loadPair(pair)
		if err != nil {
			return nil, fmt.Errorf("client: %w", err)
		}
		t.Certificates = append(t.Certificates, cert)
	}
	return t, nil
}

// loadPair reads a client's certificate and key; without a second file, the
// first holds both.
func loadPair(pair [2]string) (tls.Certificate, error) {
	if pair[1] == "" {
		pair[1] = pair[0]
	}
	return tls.LoadX509KeyPair(pair[0], pair[1])
}
