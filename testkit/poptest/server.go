package poptest

import (
	"context"
	"testing"

	"dewpoint/internal/pop"
	"dewpoint/internal/pop/session"
)

// RunServer runs what sessions rely on but cannot provoke: steps that come late. The server
// is of node "a" and remembers nothing yet.
func RunServer(t *testing.T, s session.Server) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	epoch, err := s.Begin(ctx, 0)
	must(t, err)
	if _, err := s.Beat(ctx, epoch, session.Beat{Seq: 1}); err != session.ErrUnknown {
		t.Errorf("a beat of a stranger: %v", err)
	}
	first, _, err := s.Acquire(ctx, epoch, 2, "k", 0)
	must(t, err)
	pulse, err := s.Beat(ctx, epoch,
		session.Beat{Seq: 5, Full: true, Use: []string{"x"}, Member: &pop.Member{Node: "a", Used: 5},
			Leases: []session.Renewal{{Key: "k", Token: first}, {Key: "free", Token: first}}})
	must(t, err)
	if len(pulse.Lost) != 1 || pulse.Lost[0] != "free" || pulse.Top != first {
		t.Errorf("pulse %+v, token %d", pulse, first)
	}
	for _, late := range []session.Beat{{Seq: 4, Drop: []string{"x"}},
		{Seq: 5, Full: true, Member: &pop.Member{Node: "a"}}} {
		if _, err := s.Beat(ctx, epoch, late); err == nil {
			t.Errorf("late beat %+v: no error", late)
		}
	}
	if users, err := s.Users(ctx, epoch, []string{"x"}); err != nil || len(users["x"]) != 1 {
		t.Errorf("after late beats: users %v, %v", users, err)
	}
	if all, err := s.Members(ctx, epoch); err != nil || len(all) != 1 || all[0].Used != 5 {
		t.Errorf("after late beats: members %v, %v", all, err)
	}
	second, _, err := s.Acquire(ctx, epoch, 7, "k", 0) // the session knows nothing of the first
	must(t, err)
	if token, held, err := s.Acquire(ctx, epoch, 6, "k", 0); err != nil || token != 0 || held == nil ||
		held.Token != second {
		t.Errorf("a late acquisition got %d, %+v, %v", token, held, err)
	}
	restores(t, s, epoch, second)
	stale(ctx, t, s)
}

// restores: in a new epoch the greater token has the lease.
func restores(t *testing.T, s session.Server, epoch string, top uint64) {
	beat := func(seq, token uint64) (lost bool) {
		t.Helper()
		pulse, err := s.Beat(t.Context(), epoch,
			session.Beat{Seq: seq, Leases: []session.Renewal{{Key: "r", Token: token, Restore: true}}})
		must(t, err)
		return len(pulse.Lost) > 0
	}
	if beat(10, top+10) {
		t.Error("a lease that nobody has was not restored")
	}
	if !beat(11, top+9) {
		t.Error("an earlier lease was restored in place of a later one")
	}
	if beat(12, top+11) {
		t.Error("a later lease was not restored in place of an earlier one")
	}
	token, _, err := s.Acquire(t.Context(), epoch, 13, "s", 0)
	must(t, err)
	if token <= top+11 {
		t.Errorf("token %d after one of %d was restored", token, top+11)
	}
}

// stale: nothing happens in an epoch that is not the current one.
func stale(ctx context.Context, t *testing.T, s session.Server) {
	const none = "another"
	_, beat := s.Beat(ctx, none, session.Beat{Seq: 100, Full: true})
	_, _, acquire := s.Acquire(ctx, none, 101, "e", 0)
	_, holder := s.Holder(ctx, none, "k")
	_, users := s.Users(ctx, none, []string{"x"})
	_, members := s.Members(ctx, none)
	_, settled := s.Settled(ctx, none)
	_, _, touches := s.Touches(ctx, none, "", 1)
	_, load := s.LoadPolicy(ctx, none)
	for what, err := range map[string]error{"beat": beat, "acquire": acquire, "holder": holder, "users": users,
		"members": members,
		"settled": settled, "touches": touches, "load": load, "release": s.Release(ctx, none, "k", 1),
		"touch": s.Touch(ctx, none, []pop.Touch{{}}), "save": s.SavePolicy(ctx, none, pop.PolicyState{})} {
		if err != session.ErrEpoch {
			t.Errorf("%s in another epoch: %v", what, err)
		}
	}
}
