package api

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"dewpoint/api/openapi"
	pb "dewpoint/internal/api/gen/dewpoint/v1"
	"dewpoint/internal/api/gen/dewpoint/v1/dewpointv1connect"
	"dewpoint/internal/limit"
	"dewpoint/internal/spec"
)

// Role is what a caller may do. Each may do what the ones before it may; node.proto says what that is.
type Role pb.Role

// The roles.
const (
	NoRole = Role(pb.Role_ROLE_UNSPECIFIED)
	Read   = Role(pb.Role_READ)
	Deploy = Role(pb.Role_DEPLOY)
	Admin  = Role(pb.Role_ADMIN)
)

var roleNames = map[string]Role{"read": Read, "deploy": Deploy, "admin": Admin}

// ParseRole reads the name of a role.
func ParseRole(name string) (Role, error) {
	if r, ok := roleNames[name]; ok {
		return r, nil
	}
	return NoRole, fmt.Errorf("%q is not a role; want read, deploy or admin", name)
}

func (r Role) String() string {
	for name, is := range roleNames {
		if is == r {
			return name
		}
	}
	return "none"
}

// roleOf is the role needed to call a procedure, such as "/dewpoint.v1.Node/List".
func roleOf(procedure string) Role {
	if procedure == openapi.Path {
		return Read
	}
	methods := pb.File_dewpoint_v1_node_proto.Services().ByName("Node").Methods()
	name := strings.TrimPrefix(procedure, "/"+dewpointv1connect.NodeName+"/")
	if m := methods.ByName(protoreflect.Name(name)); m != nil {
		return leastRole(m, pb.E_MayCall)
	}
	return Admin
}

// leastRole is what an option of a call or of a field says; Admin, where it says nothing.
func leastRole(d protoreflect.Descriptor, option protoreflect.ExtensionType) Role {
	if r, _ := proto.GetExtension(d.Options(), option).(pb.Role); r != pb.Role_ROLE_UNSPECIFIED {
		return Role(r)
	}
	return Admin
}

// callerKey is the key of a caller in a context. Where there is none he came by the socket,
// and may do everything.
type callerKey struct{}

// caller is who calls.
type caller struct {
	name string // local, token:NAME, cert:NAME
	role Role
}

// callerOf says who calls.
func callerOf(ctx context.Context) caller {
	if c, ok := ctx.Value(callerKey{}).(caller); ok {
		return c
	}
	return caller{spec.Local, Admin}
}

// terms are those of who calls.
func (c caller) terms(key string, deadline time.Duration) spec.Terms {
	return spec.Terms{Key: key, Deadline: deadline, Caller: c.name, Admin: c.role == Admin}
}

// host refuses a container in the host's network to who is not its administrator. What else gives a
// container something of the host is a field of its own.
func host(ctx context.Context, req *spec.Request) error {
	if callerOf(ctx).role == Admin || req.Net != "host" && (req.Net != "" || len(req.Ports) > 0) {
		return nil
	}
	return advised(Permission, "a container may have the host's network by an administrator's word only",
		"say --net bridge or none")
}

// own refuses a container that somebody else has deployed to who is not the node's administrator. What it
// returns names the container that was looked at, and no other one that has its name later.
func (h *edge) own(ctx context.Context, name string) (string, error) {
	if callerOf(ctx).role == Admin {
		return name, nil
	}
	i, err := h.node.Inspect(ctx, name)
	if err != nil {
		return "", err
	}
	return cmp.Or(i.Container.ID, name), owned(ctx, i.Container)
}

func owned(ctx context.Context, c spec.Container) error {
	who := callerOf(ctx)
	if who.role == Admin || c.Caller == who.name {
		return nil
	}
	e := New(Permission, fmt.Sprintf("the container %s is another caller's", c.Name))
	e.Remedy = "ask who deployed it, or an administrator of the node"
	return e
}

// Access says who calls over TCP, and what he may do: clients by the common name of the
// certificate that TLS has verified, or by a token. Safe for concurrent use.
type Access struct {
	// Clients are the roles by common name.
	Clients map[string]Role
	// Tokens is the file of tokens, "" for none. It is read again when it has changed, so that a
	// line that is removed ends a token.
	Tokens string

	mu     sync.Mutex
	read   time.Time // the file's time of change when it was read
	tokens []token
}

// token is a line of the file: NAME ROLE sha256:HEX.
type token struct {
	name string
	role Role
	sum  [sha256.Size]byte
}

var errManyCalls = advised(Busy, "too many calls are under way over TCP, of this caller or of all",
	"end some that stream, or try again in a few seconds")

// Handler lets h serve who may call what he calls: so many at once, who read what h answers.
func (a *Access) Handler(h http.Handler) http.Handler {
	refuse, calls := connect.NewErrorWriter(), paths()
	under := &limit.Shares{All: tcpCalls, Each: tcpCallerMost}
	h = limit.Writes(h, writeTime)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who, err := a.caller(r)
		// of what is no call, that is said
		if need := roleOf(r.URL.Path); err == nil && who.role < need && calls[r.URL.Path] {
			err = advised(Permission, fmt.Sprintf("the call needs the role %s, and the caller has %s", need, who.role),
				"ask the node's administrator for the role")
		}
		if err == nil {
			if under.Enter(who.name) {
				defer under.Leave(who.name)
			} else {
				err = errManyCalls
			}
		}
		if err != nil {
			var e *Error
			if !errors.As(err, &e) {
				e = New(Internal, oneLine(err.Error()))
			}
			_ = refuse.Write(w, r, e.wire())
			return
		}
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{}, who)))
	})
}

var errWho = func() *Error {
	e := New(Unauthorized, "the caller is not known here")
	e.Remedy = "name a token with --token-file, or a certificate that the node knows with --tls-cert and --tls-key"
	return e
}()

var errEnded = func() *Error {
	e := New(Unauthorized, "the client's certificate has expired")
	e.Remedy = "have a new one signed"
	return e
}()

// caller is who sends the request, with the best of the roles that he shows.
func (a *Access) caller(r *http.Request) (caller, error) {
	var best caller
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		cert := r.TLS.VerifiedChains[0][0]
		if time.Now().After(cert.NotAfter) { // since the connection was made
			return caller{}, errEnded
		}
		best = caller{"cert:" + cert.Subject.CommonName, a.Clients[cert.Subject.CommonName]}
	}
	if secret, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer "); ok {
		tokens, err := a.load()
		if err != nil {
			return caller{}, err
		}
		sum := sha256.Sum256([]byte(secret))
		for _, t := range tokens { // all of them: the time says nothing
			if subtle.ConstantTimeCompare(t.sum[:], sum[:]) == 1 && t.role > best.role {
				best = caller{"token:" + t.name, t.role}
			}
		}
	}
	if best.role == NoRole {
		return caller{}, errWho
	}
	return best, nil
}

// load returns the tokens, read anew if the file has changed.
func (a *Access) load() ([]token, error) {
	if a.Tokens == "" {
		return nil, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	fi, err := os.Stat(a.Tokens)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if fi.ModTime().Equal(a.read) {
		return a.tokens, nil
	}
	if a.tokens, err = readTokens(a.Tokens); err != nil {
		a.tokens, a.read = nil, time.Time{}
		return nil, err
	}
	if time.Since(fi.ModTime()) > 2*time.Second { // a later change could have the same time
		a.read = fi.ModTime()
	}
	return a.tokens, nil
}

// Check reads the file of tokens, so that what is wrong with it is said early.
func (a *Access) Check() error {
	_, err := a.load()
	return err
}

func readTokens(path string) ([]token, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var all []token
	in := bufio.NewScanner(bytes.NewReader(b))
	for n := 1; in.Scan(); n++ {
		line := strings.TrimSpace(in.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		t, err := parseToken(line)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", path, n, err)
		}
		all = append(all, t)
	}
	return all, in.Err()
}

func parseToken(line string) (token, error) {
	f := strings.Fields(line)
	if len(f) != 3 {
		return token{}, errors.New("want NAME ROLE sha256:HEX; \"dew token\" makes such lines")
	}
	role, err := ParseRole(f[1])
	if err != nil {
		return token{}, err
	}
	t := token{name: f[0], role: role}
	sum, err := hex.DecodeString(strings.TrimPrefix(f[2], "sha256:"))
	if err != nil || len(sum) != len(t.sum) || !strings.HasPrefix(f[2], "sha256:") {
		return token{}, fmt.Errorf("%q is not sha256:HEX", f[2])
	}
	copy(t.sum[:], sum)
	return t, nil
}

// AddToken makes a token with a role, adds it to the file and returns it. It is not kept
// anywhere in clear. A name that the file has already is an error.
func AddToken(path, name string, role Role) (string, error) {
	if name == "" || strings.ContainsAny(name, " \t\n#") {
		return "", fmt.Errorf("token %q: want a name without spaces", name)
	}
	have, err := readTokens(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	for _, t := range have {
		if t.name == name {
			return "", fmt.Errorf("%s has a token %s already: remove its line first", path, name)
		}
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return "", err
	}
	secret := rand.Text()
	_, err = fmt.Fprintf(f, "%s %s sha256:%x\n", name, role, sha256.Sum256([]byte(secret)))
	return secret, errors.Join(err, f.Sync(), f.Close())
}
