package registry

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
)

const (
	maxToken     = 1 << 20          // bytes of a token server's answer
	defaultLife  = 60 * time.Second // of a token that does not say, by the specification
	maxMargin    = 10 * time.Second // before its end, a token is no longer used
	tokenTimeout = 30 * time.Second
	clientID     = "dewpoint"
)

// authority authenticates the requests to one endpoint. It asks for nothing
// until the endpoint has challenged it once; from then on it sends along what
// the challenge asked for, so that a request seldom needs two round trips.
type authority struct {
	ep *endpoint
	c  *Client

	mu     sync.Mutex // guards what follows
	basic  string     // Authorization for each request, "" if not challenged so
	realm  string     // where tokens are had, "" if not challenged so
	serv   string     // the service to ask a token for
	tokens map[string]*token

	identity string // that came with the last token, "" if none
}

// token is the bearer token for one scope. sem, of capacity 1, is held by
// whoever reads or fetches it, so that one fetches for all who wait.
type token struct {
	sem     chan struct{}
	asked   string // the scope that the endpoint's challenge named, "" if none
	value   string
	expires time.Time
}

func newAuthority(ep *endpoint, c *Client) *authority {
	return &authority{ep: ep, c: c, tokens: map[string]*token{}}
}

// authorization gives the header to send for scope, "" if none is known to be needed.
func (a *authority) authorization(ctx context.Context, scope string) (string, error) {
	a.mu.Lock()
	basic, realm := a.basic, a.realm
	a.mu.Unlock()
	if realm == "" {
		return basic, nil
	}
	return a.bearer(ctx, scope, "", "")
}

// challenged learns from a 401 and gives the header to try again with. sent is
// the header that was refused.
func (a *authority) challenged(ctx context.Context, h http.Header, scope, sent string) (string, error) {
	for _, ch := range challenges(h) {
		switch ch.scheme {
		case schemeBearer:
			if err := a.learn(ch.params); err != nil {
				return "", err
			}
			return a.bearer(ctx, scope, ch.params["scope"], sent)
		case schemeBasic:
			return a.useBasic(ctx, sent)
		}
	}
	return "", nil
}

func (a *authority) useBasic(ctx context.Context, sent string) (string, error) {
	login, err := a.c.login(ctx, a.ep.base.Host)
	if err != nil {
		return "", a.badLogin(ctx, err)
	}
	if login.Username == "" && login.Password == "" {
		return "", nil
	}
	req := http.Request{Header: http.Header{}}
	req.SetBasicAuth(login.Username, login.Password)
	h := req.Header.Get("Authorization")
	if h == sent {
		return "", nil // refused already
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.basic, a.realm = h, ""
	return h, nil
}

func (a *authority) badLogin(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return &Error{Kind: BadConfig, Host: a.ep.base.Host, Op: opLogin, Err: err}
}

// learn keeps a bearer challenge after judging its realm.
func (a *authority) learn(params map[string]string) error {
	if err := a.checkRealm(params["realm"]); err != nil {
		return &Error{Kind: Protocol, Host: a.ep.base.Host, Op: opLogin,
			Err: fmt.Errorf("token server %q: %w", params["realm"], err)}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.realm != params["realm"] || a.serv != params["service"] {
		a.realm, a.serv, a.basic = params["realm"], params["service"], ""
		a.tokens = map[string]*token{}
	}
	return nil
}

// checkRealm keeps a registry from having our login sent in clear, but to itself where it is
// configured so, or to addresses inside the node's network that it could not reach itself.
func (a *authority) checkRealm(realm string) error {
	u, err := url.Parse(realm)
	if err != nil || u.Host == "" {
		return errors.New("not an address")
	}
	switch {
	case u.Scheme == "https":
	case a.ep.same(u):
	default:
		return errors.New("neither HTTPS nor the registry itself")
	}
	if private(u.Hostname()) && !private(a.ep.base.Hostname()) {
		return errors.New("a private address named by a registry elsewhere")
	}
	return nil
}

func private(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" ||
		ip != nil && (ip.IsPrivate() || ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsUnspecified())
}

// bearer gives a token for scope: the one at hand if it is still good and not
// the refused one, else a new one. asked is the scope in the endpoint's own
// words, if it has named one: behind a path prefix its names differ from ours.
func (a *authority) bearer(ctx context.Context, scope, asked, refused string) (string, error) {
	t := a.slot(scope)
	select {
	case t.sem <- struct{}{}:
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	defer func() { <-t.sem }()
	if h := "Bearer " + t.value; t.value != "" && h != refused && time.Now().Before(t.expires) {
		return h, nil
	}
	t.value = ""
	if asked != "" {
		t.asked = asked
	}
	value, life, err := a.fetchToken(ctx, cmp.Or(t.asked, scope))
	if err != nil {
		return "", err
	}
	t.value, t.expires = value, time.Now().Add(life-min(life/10, maxMargin))
	return "Bearer " + value, nil
}

func (a *authority) slot(scope string) *token {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.tokens[scope]
	if t == nil {
		t = &token{sem: make(chan struct{}, 1)}
		a.tokens[scope] = t
	}
	return t
}

// fetchToken asks the token server.
func (a *authority) fetchToken(ctx context.Context, scope string) (string, time.Duration, error) {
	login, err := a.c.login(ctx, a.ep.base.Host)
	if err != nil {
		return "", 0, a.badLogin(ctx, err)
	}
	if login.RegistryToken != "" {
		return login.RegistryToken, time.Hour, nil
	}
	a.mu.Lock()
	realm, service := a.realm, a.serv
	a.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, tokenTimeout, errStalled)
	defer cancel()
	req, err := tokenRequest(ctx, realm, service, scope, login)
	if err != nil {
		return "", 0, &Error{Kind: Protocol, Host: a.ep.base.Host, Op: opLogin, Err: err}
	}
	if a.c.given != nil {
		q := req.URL.Query()
		q.Set("offline_token", "true") // an identity token too, if the registry has those
		q.Set("client_id", clientID)
		req.URL.RawQuery = q.Encode()
	}
	req.Header.Set("User-Agent", a.c.cfg.UserAgent)
	res, err := a.ep.transport.RoundTrip(req)
	if err != nil {
		return "", 0, broken(ctx, err, req.URL.Host, opLogin)
	}
	if res.StatusCode != http.StatusOK {
		return "", 0, a.denied(res)
	}
	defer res.Body.Close()
	value, identity, life, err := readToken(res.Body)
	a.mu.Lock()
	a.identity = identity
	a.mu.Unlock()
	if err != nil {
		return "", 0, broken(ctx, &Error{Kind: Protocol, Host: req.URL.Host, Op: opLogin, Err: err}, "", "")
	}
	return value, life, nil
}

// denied reads a token server's refusal: whatever it is of the client's
// making, it is the login.
func (a *authority) denied(res *http.Response) error {
	err := refused(res, a.ep.base.Host, opLogin)
	var e *Error
	if errors.As(err, &e) && e.Status >= 400 && e.Status < 500 && e.Kind != RateLimited {
		e.Kind = Unauthorized
	}
	return err
}

// tokenRequest is a GET with user and password, or without; or a POST where
// the login is an identity token.
func tokenRequest(ctx context.Context, realm, service, scope string, login authn.AuthConfig) (*http.Request,
	error) {
	u, err := url.Parse(realm)
	if err != nil {
		return nil, err
	}
	if login.IdentityToken != "" {
		form := url.Values{
			"grant_type": {"refresh_token"}, "refresh_token": {login.IdentityToken},
			"service": {service}, "scope": {scope}, "client_id": {clientID},
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), strings.NewReader(form.Encode()))
		if err == nil {
			req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		}
		return req, err
	}
	q := u.Query()
	if service != "" {
		q.Set("service", service)
	}
	if scope != "" {
		q.Set("scope", scope)
	}
	u.RawQuery = q.Encode()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err == nil && (login.Username != "" || login.Password != "") {
		req.SetBasicAuth(login.Username, login.Password)
	}
	return req, err
}

func readToken(r io.Reader) (value, identity string, life time.Duration, err error) {
	var doc struct {
		Token        string `json:"token"`
		AccessToken  string `json:"access_token"`
		RefreshToken string `json:"refresh_token"`
		ExpiresIn    int64  `json:"expires_in"`
	}
	b, err := io.ReadAll(io.LimitReader(r, maxToken))
	if err != nil {
		return "", "", 0, fmt.Errorf("token: %w", err)
	}
	if err := json.Unmarshal(b, &doc); err != nil {
		return "", "", 0, fmt.Errorf("token: %w", err)
	}
	if doc.Token == "" {
		doc.Token = doc.AccessToken
	}
	if doc.Token == "" || strings.ContainsAny(doc.Token, "\r\n") {
		return "", "", 0, errors.New("token: none in the answer")
	}
	life = time.Duration(min(doc.ExpiresIn, int64(7*24*3600))) * time.Second
	if life <= 0 {
		life = defaultLife
	}
	return doc.Token, doc.RefreshToken, life, nil
}
