package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"dewpoint/internal/api"
	"dewpoint/internal/config"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
)

// manager is the service manager as dewd's environment names it. Processes that dewd starts do not see it:
// runc, for one, would speak to it.
type manager struct {
	socket string        // where it is told; "" is nowhere
	within time.Duration // it wants a sign of life so often; 0 is never
	log    *slog.Logger
}

func newManager(log *slog.Logger) (manager, error) {
	within, err := daemon.SdWatchdogEnabled(true)
	m := manager{socket: os.Getenv("NOTIFY_SOCKET"), within: within, log: log}
	os.Unsetenv("NOTIFY_SOCKET")
	return m, err
}

// tell says a state to the manager, if there is one.
func (m manager) tell(state string) {
	if m.socket == "" {
		return
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: m.socket, Net: "unixgram"})
	if err == nil {
		_, err = conn.Write([]byte(state))
		conn.Close()
	}
	if err != nil {
		m.log.Warn("the service manager cannot be told", "state", state, "err", err)
	}
}

// watch tells the manager that dewd lives for as long as the API at host answers, until ctx ends.
func (m manager) watch(ctx context.Context, host string) {
	if m.within == 0 {
		return
	}
	c, err := api.Dial(host)
	if err != nil {
		m.log.Error("the watchdog has no client", "err", err)
		return
	}
	defer c.Close()
	every := time.NewTicker(m.within / 3)
	defer every.Stop()
	for {
		ask, cancel := context.WithTimeout(ctx, m.within/3)
		if _, err := c.Version(ask); err == nil {
			m.tell(daemon.SdNotifyWatchdog)
		}
		cancel()
		select {
		case <-every.C:
		case <-ctx.Done():
			return
		}
	}
}

// reloads gives the configuration in file anew for each SIGHUP. One that is wrong is logged, and the one in
// force stays.
func (m manager) reloads(ctx context.Context, file string) <-chan config.Config {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	out := make(chan config.Config)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-hup:
			}
			m.tell(fmt.Sprintf("%s\nMONOTONIC_USEC=%d", daemon.SdNotifyReloading, monotonic()))
			c, err := config.Load(file)
			if err != nil {
				m.log.Error("the configuration is wrong: the one in force stays", "err", err)
			} else {
				select {
				case out <- c:
				case <-ctx.Done():
					return
				}
			}
			m.tell(daemon.SdNotifyReady)
		}
	}()
	return out
}

func monotonic() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t)
	return t.Nano() / int64(time.Microsecond)
}

// inherited is the listener at path that the service manager passed on; nil if there is none. Others are an
// error: their clients would wait for an answer that never comes.
func inherited(path string) (net.Listener, error) {
	all, err := activation.Listeners()
	if err != nil || len(all) == 0 {
		return nil, err
	}
	if len(all) > 1 || all[0] == nil || all[0].Addr().String() != path {
		return nil, fmt.Errorf("the service manager passed on %d sockets, not %s alone: see dewd.socket", len(all), path)
	}
	if u, ok := all[0].(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false) // it is the service manager's, and outlives this process
	}
	return all[0], nil
}
