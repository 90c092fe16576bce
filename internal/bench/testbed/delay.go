package testbed

import (
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sync/errgroup"
)

// FarAddress is where the registry can be reached with the round trips that
// Bed.Delay sets.
const FarAddress = "10.77.255.1:5001"

// farAway passes connections on to a registry as if it were far away. What
// one side sends reaches the other half a round trip later, in order and
// however much is under way, so that the distance costs time and not
// bandwidth. A new connection's first bytes come a whole round trip later
// still: the time of the handshake, which the kernel here does at once.
//
// Real distance is worse in one way that this does not show: a connection's
// window grows by round trips at first. Loss is not there either.
type farAway struct {
	listener net.Listener
	dial     func(ctx context.Context) (net.Conn, error)
	rtt      atomic.Int64 // nanoseconds
	wait     sync.WaitGroup
}

// underWay bounds the bytes between the ends of a connection in one
// direction: at 300 ms it is not reached below 3 Gbit/s.
const (
	piece    = 64 << 10
	underWay = 128 << 20
)

// serve accepts connections until the listener is closed, and then waits for
// those that are open, which ctx ends.
func (f *farAway) serve(ctx context.Context) {
	defer f.wait.Wait()
	for {
		conn, err := f.listener.Accept()
		if err != nil {
			return
		}
		f.wait.Go(func() { f.pass(ctx, conn) })
	}
}

// pass joins a connection with one to the registry until both directions have
// ended, or one has failed.
func (f *farAway) pass(ctx context.Context, near net.Conn) {
	rtt := time.Duration(f.rtt.Load())
	begin := time.Now().Add(rtt)
	far, err := f.dial(ctx)
	if err != nil {
		near.Close()
		return
	}
	cut := func() { near.Close(); far.Close() }
	defer cut()
	defer context.AfterFunc(ctx, cut)()
	var both errgroup.Group
	for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
		both.Go(func() error {
			err := carry(way[1], way[0], begin, rtt/2)
			if err != nil {
				cut()
			}
			return err
		})
	}
	both.Wait()
}

// parcel is what was read at one moment; an empty one ends the direction.
type parcel struct {
	due  time.Time
	data []byte
}

// carry copies from one connection to another. Each byte arrives late after
// it was read, or after begin if that is later.
func carry(to, from net.Conn, begin time.Time, late time.Duration) error {
	road := make(chan parcel, underWay/piece)
	var receiver errgroup.Group
	receiver.Go(func() error {
		err := deliver(to, road)
		for range road { // the sender must not wait for who is gone
		}
		return err
	})
	buf := make([]byte, piece)
	for {
		n, err := from.Read(buf)
		at := time.Now()
		if at.Before(begin) {
			at = begin
		}
		if n > 0 {
			road <- parcel{at.Add(late), append([]byte(nil), buf[:n]...)}
		}
		if err != nil {
			road <- parcel{due: at.Add(late)}
			break
		}
	}
	close(road)
	return receiver.Wait()
}

// deliver writes parcels when they are due.
func deliver(to net.Conn, road <-chan parcel) error {
	for p := range road {
		time.Sleep(time.Until(p.due))
		if p.data == nil {
			return closeWrite(to)
		}
		if _, err := to.Write(p.data); err != nil {
			return err
		}
	}
	return nil
}

func closeWrite(conn net.Conn) error {
	if c, ok := conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return conn.Close()
}

// far starts the far registry: a relay in the registry's namespace, so that
// the link's bandwidth holds for what comes through it.
func (b *Bed) far(ctx context.Context) error {
	f := &farAway{dial: func(ctx context.Context) (net.Conn, error) {
		return within(b.registry, func() (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", Address)
		})
	}}
	var err error
	f.listener, err = within(b.registry, func() (net.Listener, error) { return net.Listen("tcp", FarAddress) })
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); f.serve(ctx) }()
	b.relay, b.endRelay = f, func() error {
		err := f.listener.Close()
		cancel()
		<-done
		return err
	}
	return nil
}

// Delay sets the round trip of connections to FarAddress that are made from now on.
func (b *Bed) Delay(rtt time.Duration) { b.relay.rtt.Store(int64(rtt)) }

// within calls f on a thread in a network namespace.
func within[T any](ns string, f func() (T, error)) (result T, err error) {
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		return result, err
	}
	defer home.Close()
	away, err := netns.GetFromName(ns)
	if err != nil {
		return result, err
	}
	defer away.Close()
	if err := netns.Set(away); err != nil {
		return result, err
	}
	result, err = f()
	if back := netns.Set(home); back != nil {
		return result, errors.Join(err, back) // the thread stays locked and ends with its goroutine
	}
	runtime.UnlockOSThread()
	return result, err
}
