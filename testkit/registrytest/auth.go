package registrytest

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Auth is what the registry asks of clients.
type Auth struct {
	Mode     AuthMode
	User     string
	Password string
	// Anonymous, in mode Bearer, gives tokens for pulling to those without credentials.
	Anonymous bool
	// Life is how long a token is good; 0 is an hour. Clients are told so,
	// unless Tell says otherwise.
	Life time.Duration
	Tell time.Duration
	// Identity is the refresh token that a POST to the token server may carry
	// instead of user and password. Who asks by these for offline use gets it.
	Identity string
	// Realm is where tokens are had; "" is this server.
	Realm string
}

// AuthMode is a way to authenticate.
type AuthMode int

const (
	None   AuthMode = iota
	Basic           // user and password with each request
	Bearer          // a token from /token, for user and password, for one scope
)

// Require sets what the registry asks for from now on. Tokens given before are void.
func (s *Server) Require(a Auth) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.Life == 0 {
		a.Life = time.Hour
	}
	if a.Tell == 0 {
		a.Tell = a.Life
	}
	s.auth = a
	clear(s.tokens)
}

// Revoke makes all tokens given so far invalid.
func (s *Server) Revoke() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.tokens)
}

// token is what a bearer may do, and until when.
type token struct {
	scopes  []string
	expires time.Time
}

func (s *Server) required() Auth {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.auth
}

// authorized lets the request pass, or answers with a challenge.
func (a *answer) authorized() bool {
	auth := a.s.required()
	switch auth.Mode {
	case Basic:
		user, password, ok := a.r.BasicAuth()
		if ok && user == auth.User && password == auth.Password {
			return true
		}
		a.Header().Set("WWW-Authenticate", `Basic realm="test registry"`)
	case Bearer:
		if a.bearerOK() {
			return true
		}
		a.Header().Set("WWW-Authenticate", a.challenge(auth))
	default:
		return true
	}
	a.fail(http.StatusUnauthorized, "UNAUTHORIZED", "authentication required")
	return false
}

func (a *answer) challenge(auth Auth) string {
	realm := auth.Realm
	if realm == "" {
		realm = a.s.URL() + "/token"
	}
	c := fmt.Sprintf(`Bearer realm="%s",service="test"`, realm)
	if scope := a.scope(); scope != "" {
		c += fmt.Sprintf(`,scope="%s"`, scope)
	}
	return c
}

// scope is what the request needs: "" for the API's root.
func (a *answer) scope() string {
	path := strings.TrimPrefix(a.r.URL.Path, "/v2/")
	for _, at := range []string{"/manifests/", "/blobs/uploads/", "/blobs/", "/referrers/"} {
		if repo, _, ok := split(path, at); ok && writes(a.r) {
			return "repository:" + repo + ":pull" + push
		} else if ok {
			return "repository:" + repo + ":pull"
		}
	}
	return ""
}

// push ends the scope of those who may.
const push = ",push"

func (a *answer) bearerOK() bool {
	id, ok := strings.CutPrefix(a.r.Header.Get("Authorization"), "Bearer ")
	if !ok {
		return false
	}
	need := a.scope()
	a.s.mu.Lock()
	defer a.s.mu.Unlock()
	t, ok := a.s.tokens[id]
	if !ok || time.Now().After(t.expires) {
		return false
	}
	for _, s := range t.scopes {
		if s == need || s == need+push {
			return true
		}
	}
	return need == ""
}

// token answers the token endpoint.
func (a *answer) token() {
	auth := a.s.required()
	scopes, ok := a.login(auth)
	if !ok {
		a.fail(http.StatusUnauthorized, "UNAUTHORIZED", "incorrect username or password")
		return
	}
	id := rand.Text()
	a.s.mu.Lock()
	a.s.tokens[id] = token{scopes: scopes, expires: time.Now().Add(auth.Life)}
	a.s.mu.Unlock()
	doc := map[string]any{"token": id, "access_token": id, "expires_in": int(auth.Tell.Seconds())}
	if auth.Identity != "" && a.r.URL.Query().Get("offline_token") == "true" {
		doc["refresh_token"] = auth.Identity
	}
	body, err := json.Marshal(doc)
	if err != nil {
		panic(err)
	}
	a.document("application/json", body)
}

// login checks who asks for a token, and gives the scopes asked for.
func (a *answer) login(auth Auth) ([]string, bool) {
	if a.r.Method == http.MethodPost {
		if err := a.r.ParseForm(); err != nil {
			return nil, false
		}
		f := a.r.PostForm
		ok := auth.Identity != "" && f.Get("refresh_token") == auth.Identity
		return strings.Fields(f.Get("scope")), ok
	}
	scopes := allScopes(a.r.URL.Query())
	user, password, ok := a.r.BasicAuth()
	if !ok {
		for n := range scopes {
			scopes[n] = strings.TrimSuffix(scopes[n], push)
		}
		return scopes, auth.Anonymous
	}
	return scopes, user == auth.User && password == auth.Password
}

func allScopes(q url.Values) []string {
	var out []string
	for _, s := range q["scope"] {
		out = append(out, strings.Fields(s)...)
	}
	return out
}
