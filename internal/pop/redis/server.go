package redis

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/redis/go-redis/v9"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/session"
)

// server implements session.Server.
type server struct {
	cfg     pop.Config
	rdb     *redis.Client
	prefix  string
	session string
	floor   atomic.Uint64 // the greatest token that the session is known to have seen
	calls   sync.WaitGroup
}

var _ session.Server = (*server)(nil)

func newServer(cfg pop.Config, prefix string) *server {
	return &server{cfg: cfg, prefix: prefix, session: cfg.Node + "/" + newID()}
}

func (s *server) key(name string) string { return s.prefix + name }

// run runs a script. It returns when ctx ends: the client heeds deadlines only, so
// what it waits for may take until its timeout.
func (s *server) run(ctx context.Context, script *redis.Script, epoch string, args ...any) (any, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	type answer struct {
		v   any
		err error
	}
	answers := make(chan answer, 1)
	s.calls.Go(func() {
		v, err := s.eval(ctx, s.rdb, script, epoch, args...)
		answers <- answer{v, err}
	})
	select {
	case a := <-answers:
		return a.v, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *server) eval(ctx context.Context, c redis.Scripter, script *redis.Script, epoch string,
	args ...any) (any, error) {
	all := append([]any{s.prefix, s.cfg.TTL.Microseconds(), epoch}, args...)
	v, err := script.Run(ctx, c, []string{s.key("epoch")}, all...).Result()
	return v, sentinel(err)
}

// sentinel finds out which of the session's or the scripts' own errors err is.
func sentinel(err error) error {
	var said redis.Error
	switch {
	case errors.As(err, &said):
	case errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE):
		return fmt.Errorf("%w: %w", session.ErrBroken, err)
	default:
		return err
	}
	code, _, _ := strings.Cut(strings.TrimPrefix(said.Error(), "ERR "), " ")
	switch code {
	case "EPOCH":
		return session.ErrEpoch
	case "UNKNOWN":
		return session.ErrUnknown
	case "FENCED":
		return pop.ErrFenced
	}
	return err
}

func (s *server) Begin(ctx context.Context, floor uint64) (string, error) {
	s.saw(floor)
	return s.begin(ctx, nil, floor)
}

// begin runs on the connection, or on any if it is nil.
func (s *server) begin(ctx context.Context, cn *redis.Conn, floor uint64) (string, error) {
	var v any
	var err error
	if cn != nil {
		v, err = s.eval(ctx, cn, beginScript, newID(), decimal(floor))
	} else {
		v, err = s.run(ctx, beginScript, newID(), decimal(floor))
	}
	if err != nil {
		return "", err
	}
	epoch, ok := v.(string)
	if !ok {
		return "", unexpected(v)
	}
	return epoch, nil
}

func (s *server) saw(token uint64) {
	for {
		old := s.floor.Load()
		if old >= token || s.floor.CompareAndSwap(old, token) {
			return
		}
	}
}

func (s *server) Beat(ctx context.Context, epoch string, b session.Beat) (session.Pulse, error) {
	args := []any{s.session, s.cfg.Node, decimal(b.Seq), "", flag(b.Full)}
	if b.Member != nil {
		args[3] = encode(b.Member)
	}
	args = append(args, 3*len(b.Leases))
	for _, l := range b.Leases {
		args = append(args, l.Key, decimal(l.Token), flag(l.Restore))
	}
	args = append(args, len(b.Use))
	for _, key := range b.Use {
		args = append(args, key)
	}
	args = append(args, len(b.Drop))
	for _, key := range b.Drop {
		args = append(args, key)
	}
	v, err := s.run(ctx, beatScript, epoch, args...)
	if err != nil {
		return session.Pulse{}, err
	}
	reply, _ := v.([]any)
	if len(reply) != 2 {
		return session.Pulse{}, unexpected(v)
	}
	top, err := number(reply[0])
	if err != nil {
		return session.Pulse{}, err
	}
	s.saw(top)
	lost, err := texts(reply[1])
	return session.Pulse{Lost: lost, Top: top}, err
}

func (s *server) Acquire(ctx context.Context, epoch string, seq uint64, key string, above uint64) (uint64,
	*pop.Holding, error) {
	reply, err := s.texts(ctx, acquireScript, epoch, s.session, s.cfg.Node, decimal(seq), key, decimal(above))
	if err != nil {
		return 0, nil, err
	}
	if len(reply) == 3 {
		h, err := holding(reply[1:])
		return 0, h, err
	}
	token, err := number(strings.Join(reply, " "))
	if err == nil {
		s.saw(token)
	}
	return token, nil, err
}

func (s *server) Release(ctx context.Context, epoch, key string, token uint64) error {
	_, err := s.run(ctx, releaseScript, epoch, key, decimal(token))
	return err
}

func (s *server) Holder(ctx context.Context, epoch, key string) (*pop.Holding, error) {
	reply, err := s.texts(ctx, holderScript, epoch, key)
	if err != nil || len(reply) == 0 {
		return nil, err
	}
	return holding(reply)
}

// holding reads a token and a member.
func holding(reply []string) (*pop.Holding, error) {
	if len(reply) != 2 {
		return nil, unexpected(reply)
	}
	token, err := number(reply[0])
	if err != nil {
		return nil, err
	}
	h := &pop.Holding{Token: token}
	if err := json.Unmarshal([]byte(reply[1]), &h.Holder); err != nil {
		return nil, fmt.Errorf("holder of a lease: %w", err)
	}
	return h, nil
}

func (s *server) Users(ctx context.Context, epoch string, keys []string) (map[string][]string, error) {
	args := make([]any, len(keys))
	for i, key := range keys {
		args[i] = key
	}
	reply, err := s.pairs(ctx, usersScript, epoch, args...)
	if err != nil {
		return nil, err
	}
	users := map[string][]string{}
	for _, pair := range reply {
		users[pair[0]] = append(users[pair[0]], pair[1])
	}
	for key, nodes := range users {
		slices.Sort(nodes)
		users[key] = slices.Compact(nodes)
	}
	return users, nil
}

func (s *server) Members(ctx context.Context, epoch string) ([]pop.Member, error) {
	reply, err := s.texts(ctx, membersScript, epoch)
	if err != nil {
		return nil, err
	}
	return members(reply)
}

func members(reply []string) ([]pop.Member, error) {
	all := make([]pop.Member, len(reply))
	for i, text := range reply {
		if err := json.Unmarshal([]byte(text), &all[i]); err != nil {
			return nil, fmt.Errorf("a member: %w", err)
		}
	}
	return session.OnePerNode(all), nil
}

func (s *server) Settled(ctx context.Context, epoch string) (bool, error) {
	v, err := s.run(ctx, settledScript, epoch)
	return v == int64(1), err
}

func (s *server) Touch(ctx context.Context, epoch string, touches []pop.Touch) error {
	args := make([]any, len(touches))
	for i := range touches {
		args[i] = encode(touches[i])
	}
	_, err := s.run(ctx, touchScript, epoch, args...)
	return err
}

// A position is an epoch and an id of the stream: after another epoch's, all is new.
func (s *server) Touches(ctx context.Context, epoch, after string, limit int) ([]pop.Touch, string, error) {
	reply, err := s.pairs(ctx, touchesScript, epoch, idIn(epoch, after), limit)
	if err != nil {
		return nil, "", err
	}
	return touches(reply, epoch, after)
}

func touches(reply [][2]string, epoch, after string) ([]pop.Touch, string, error) {
	all, position := []pop.Touch{}, after
	for _, pair := range reply {
		var t pop.Touch
		if err := json.Unmarshal([]byte(pair[1]), &t); err != nil {
			return nil, "", fmt.Errorf("a touch: %w", err)
		}
		all, position = append(all, t), epoch+"/"+pair[0]
	}
	return all, position, nil
}

// idIn is the stream's id in a position of the epoch; empty in one of another.
func idIn(epoch, position string) string {
	of, id, _ := strings.Cut(position, "/")
	if of != epoch {
		return ""
	}
	return id
}

func (s *server) SavePolicy(ctx context.Context, epoch string, p pop.PolicyState) error {
	_, err := s.run(ctx, savePolicyScript, epoch, decimal(p.Token), p.Position, p.Data, idIn(epoch, p.Position))
	return err
}

func (s *server) LoadPolicy(ctx context.Context, epoch string) (pop.PolicyState, error) {
	reply, err := s.texts(ctx, loadPolicyScript, epoch)
	if err != nil || len(reply) == 0 {
		return pop.PolicyState{}, err
	}
	if len(reply) != 3 {
		return pop.PolicyState{}, unexpected(reply)
	}
	token, err := number(reply[0])
	return pop.PolicyState{Token: token, Position: reply[1], Data: []byte(reply[2])}, err
}

var publishScript = redis.NewScript(preamble + `return redis.call('PUBLISH', P..'events', ARGV[4])`)

func (s *server) Publish(ctx context.Context, e pop.Event) error {
	_, err := s.run(ctx, publishScript, "", encode(e))
	return err
}

func decodeEvent(payload string) (e pop.Event, ok bool) {
	err := json.Unmarshal([]byte(payload), &e)
	return e, err == nil
}

// texts runs a script that returns a list of strings.
func (s *server) texts(ctx context.Context, script *redis.Script, epoch string, args ...any) ([]string,
	error) {
	v, err := s.run(ctx, script, epoch, args...)
	if err != nil {
		return nil, err
	}
	return texts(v)
}

// pairs runs a script that returns a list of strings in twos.
func (s *server) pairs(ctx context.Context, script *redis.Script, epoch string, args ...any) ([][2]string,
	error) {
	list, err := s.texts(ctx, script, epoch, args...)
	if err != nil {
		return nil, err
	}
	return inTwos(list)
}

func inTwos(list []string) ([][2]string, error) {
	if len(list)%2 != 0 {
		return nil, unexpected(list)
	}
	pairs := make([][2]string, 0, len(list)/2)
	for pair := range slices.Chunk(list, 2) {
		pairs = append(pairs, [2]string(pair))
	}
	return pairs, nil
}

func texts(v any) ([]string, error) {
	list, ok := v.([]any)
	if !ok {
		return nil, unexpected(v)
	}
	out := make([]string, len(list))
	for i := range list {
		if out[i], ok = list[i].(string); !ok {
			return nil, unexpected(v)
		}
	}
	return out, nil
}

func number(v any) (uint64, error) {
	text, ok := v.(string)
	if !ok {
		return 0, unexpected(v)
	}
	return strconv.ParseUint(text, 10, 64)
}

func unexpected(v any) error { return fmt.Errorf("unexpected answer of %T from the PoP's Redis", v) }

func decimal(n uint64) string { return strconv.FormatUint(n, 10) }

func flag(b bool) int {
	if b {
		return 1
	}
	return 0
}

// encode is JSON of a type of package pop, which cannot fail unless a number is not finite.
func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return "{}"
	}
	return string(b)
}
