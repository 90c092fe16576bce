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

// Relay passes connections on to a server as if it were far away. What
// one side sends reaches the other half a round trip later, in order and
// however much is under way, so that the distance costs time and not
// bandwidth. A new connection's first bytes come a whole round trip later
// still: the time of the handshake, which the kernel here does at once.
//
// Real distance is worse in one way that this does not show: a connection's
// window grows by round trips at first. Loss is not there either.
type Relay struct {
	listener net.Listener
	dial     func(ctx context.Context) (net.Conn, error)
	rtt      atomic.Int64 // nanoseconds
	wait     sync.WaitGroup
	cancel   context.CancelFunc
	done     chan struct{} // closed when serve has returned
}

// NewRelay accepts connections on l, and dials for each, until Close.
func NewRelay(l net.Listener, dial func(ctx context.Context) (net.Conn, error)) *Relay {
	ctx, cancel := context.WithCancel(context.Background())
	f := &Relay{listener: l, dial: dial, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(f.done)
		f.serve(ctx)
	}()
	return f
}

// Delay sets the round trip of what is sent from now on. What is under way
// already is not overtaken.
func (f *Relay) Delay(rtt time.Duration) { f.rtt.Store(int64(rtt)) }

// Close ends the relay with its connections.
func (f *Relay) Close() error {
	err := f.listener.Close()
	f.cancel()
	<-f.done
	return err
}

// underWay bounds the bytes between the ends of a connection in one
// direction: at 300 ms it is not reached below 3 Gbit/s.
const (
	piece    = 64 << 10
	underWay = 128 << 20
)

// serve accepts connections until the listener is closed, and then waits for
// those that are open, which ctx ends.
func (f *Relay) serve(ctx context.Context) {
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
func (f *Relay) pass(ctx context.Context, near net.Conn) {
	begin := time.Now().Add(time.Duration(f.rtt.Load()))
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
			err := f.carry(way[1], way[0], begin)
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

// carry copies from one connection to another. Each byte arrives half a round
// trip after it was read, or after begin if that is later.
func (f *Relay) carry(to, from net.Conn, begin time.Time) error {
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
		late := time.Duration(f.rtt.Load()) / 2
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
func (b *Bed) far() error {
	l, err := Within(b.registry, func() (net.Listener, error) { return net.Listen("tcp", FarAddress) })
	if err != nil {
		return err
	}
	b.relay = NewRelay(l, func(ctx context.Context) (net.Conn, error) {
		return Within(b.registry, func() (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", Address)
		})
	})
	return nil
}

// Delay sets the round trip of what goes over FarAddress from now on.
func (b *Bed) Delay(rtt time.Duration) { b.relay.Delay(rtt) }

// Within calls f on a thread in a network namespace.
func Within[T any](ns string, f func() (T, error)) (result T, err error) {
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
