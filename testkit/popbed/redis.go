package popbed

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"dewpoint/testkit/testbed"

	"golang.org/x/sys/unix"
)

// redisServer is the PoP's Redis. It keeps an append-only file, so that it
// can come back with what it knew.
type redisServer struct {
	group *testbed.Group
	relay *testbed.Relay
}

func (b *Bed) newRedis(ctx context.Context) error {
	l, err := b.Listen(redis, redisIP+":6380")
	if err != nil {
		return err
	}
	b.redis = &redisServer{relay: testbed.NewRelay(l, func(ctx context.Context) (net.Conn, error) {
		return b.dial(ctx, redis, redisIP+":6379")
	})}
	if b.redis.group, err = b.group(redis); err != nil {
		return err
	}
	return b.StartRedis(ctx, true)
}

func (b *Bed) redisDir() string { return filepath.Join(b.cfg.Dir, "redis") }

// StartRedis starts Redis again, empty or with what it had, until it answers.
func (b *Bed) StartRedis(ctx context.Context, empty bool) error {
	if empty {
		if err := os.RemoveAll(b.redisDir()); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(b.redisDir(), 0o700); err != nil {
		return err
	}
	cmd := b.Command(ctx, redis, "redis-server", "--bind", redisIP, "--port", "6379", "--protected-mode", "no",
		"--daemonize", "no", "--dir", b.redisDir(), "--logfile", filepath.Join(b.cfg.Dir, "redis.log"),
		"--appendonly", "yes", "--appendfsync", "everysec", "--save", "")
	if err := b.redis.group.Start(cmd); err != nil {
		return err
	}
	return until(ctx, 20*time.Second, func() error { return b.pingRedis(ctx) })
}

// pingRedis asks Redis whether it is ready, which it is not while it loads.
func (b *Bed) pingRedis(ctx context.Context) error {
	c, err := b.dial(ctx, redis, redisIP+":6379")
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := c.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err == nil && !strings.HasPrefix(line, "+PONG") {
		err = fmt.Errorf("redis: %s", strings.TrimSpace(line))
	}
	return err
}

// StopRedis ends Redis as an operator does: what it knows is on disk.
func (b *Bed) StopRedis(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return b.redis.group.Stop(ctx, unix.SIGTERM)
}

// KillRedis ends Redis as a crash does: the last second may not be on disk.
func (b *Bed) KillRedis() error { return b.redis.group.Kill() }

// HangRedis lets Redis keep its connections and answer nothing, or go on.
func (b *Bed) HangRedis(hang bool) error { return b.redis.group.Freeze(hang) }

// SlowRedis delays what goes over SlowRedisURL by a round trip of so long.
func (b *Bed) SlowRedis(rtt time.Duration) { b.redis.relay.Delay(rtt) }

var errNoSuch = errors.New("this kind of store has none")
