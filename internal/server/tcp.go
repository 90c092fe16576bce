package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"dewpoint/internal/api"
	"dewpoint/internal/config"

	"golang.org/x/sync/errgroup"
)

// serveTCP serves the API over TCP to who shows that he may, if the configuration says so.
func serveTCP(ctx context.Context, g *errgroup.Group, f config.API, h http.Handler, log *slog.Logger) error {
	if f.Listen == "" {
		return nil
	}
	who := &api.Access{Clients: map[string]api.Role{}, Tokens: f.Tokens}
	for name, role := range f.Clients {
		r, err := api.ParseRole(role)
		if err != nil {
			return fmt.Errorf("api.clients: %s: %w", name, err)
		}
		who.Clients[name] = r
	}
	if err := who.Check(); err != nil {
		return fmt.Errorf("api.tokens: %w", err)
	}
	if len(f.Clients) > 0 && f.ClientCA == "" {
		return errors.New("api.clients: api.client_ca is missing: who signs their certificates?")
	}
	var secure *tls.Config
	if f.Cert != "" || f.Key != "" {
		var err error
		if secure, err = (api.TLSFiles{Cert: f.Cert, Key: f.Key, ClientCA: f.ClientCA}).Config(); err != nil {
			return fmt.Errorf("api.cert, api.key, api.client_ca: %w", err)
		}
	}
	l, err := api.ListenTCP(f.Listen, secure)
	if err != nil {
		return fmt.Errorf("api.listen: %w", err)
	}
	log.Info("dewd serves its API over TCP", "address", l.Addr(), "tls", secure != nil)
	g.Go(func() error { return api.Serve(ctx, l, who.Handler(h)) })
	return nil
}
