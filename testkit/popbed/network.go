package popbed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"dewpoint/testkit/testbed"
)

// The bed's machines that are no nodes.
const (
	lan   = "lan"
	wan   = "wan"
	redis = "redis"
	ceph  = "ceph"
)

// machines are all namespaces but the LAN's, with their addresses.
func (b *Bed) machines() map[string]string {
	m := map[string]string{wan: wanIP, redis: redisIP, ceph: cephIP}
	for _, n := range b.Nodes {
		m[n.Name] = n.Address
	}
	return m
}

// netns is the name of a machine's network namespace.
func (b *Bed) netns(machine string) string { return b.name + "-" + machine }

// connect makes the machines and plugs them into the LAN.
func (b *Bed) connect(ctx context.Context) error {
	bridge := b.netns(lan)
	lines := []string{"netns add " + bridge, "-n " + bridge + " link add lan type bridge",
		"-n " + bridge + " link set lan up"}
	for m, ip := range b.machines() {
		ns := b.netns(m)
		lines = append(lines,
			"netns add "+ns,
			"-n "+ns+" link set lo up",
			"-n "+ns+" link add eth0 type veth peer name "+m+" netns "+bridge,
			"-n "+ns+" addr add "+ip+"/24 dev eth0",
			"-n "+bridge+" link set "+m+" master lan",
			"-n "+bridge+" link set "+m+" up",
			"-n "+ns+" link set eth0 up")
	}
	for _, line := range lines {
		if err := testbed.Run(ctx, "ip", strings.Fields(line)...); err != nil {
			return err
		}
	}
	return nil
}

func (b *Bed) disconnect() error {
	var errs []error
	entries, _ := os.ReadDir("/run/netns")
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), b.name+"-") {
			errs = append(errs, testbed.Run(context.Background(), "ip", "netns", "del", e.Name()))
		}
	}
	return errors.Join(errs...)
}

// Rate narrows the WAN to so many Mbit/s each way, for all nodes together; 0 is
// no limit.
func (b *Bed) Rate(ctx context.Context, mbit float64) error {
	for machine, device := range map[string]string{wan: "eth0", lan: wan} {
		at := []string{"-n", b.netns(machine), "qdisc"}
		if mbit == 0 {
			testbed.Run(ctx, "tc", append(at, "del", "dev", device, "root")...) // fails when there is none
			continue
		}
		err := testbed.Run(ctx, "tc", append(at, "replace", "dev", device, "root", "tbf",
			"rate", fmt.Sprintf("%gmbit", mbit), "burst", "64kb", "latency", "100ms")...)
		if err != nil {
			return err
		}
	}
	return nil
}

// Delay sets the round trip of FarRegistry.
func (b *Bed) Delay(rtt time.Duration) { b.wan.Delay(rtt) }

// Traffic is what has passed a machine's interface, in bytes (LAN: frames and all).
type Traffic struct{ In, Out int64 }

// header is what a packet has before its contents: Ethernet, IPv4, TCP with time stamps.
const header = 14 + 20 + 32

// WAN counts what the nodes have received from the registry's side (In) and sent to it (Out), without
// headers: the kernel passes up to 64 KiB as one packet between namespaces, the busier the machine is the
// less, so that frames of the same contents are up to 4.5 % more.
func (b *Bed) WAN() (Traffic, error) {
	t, packets, err := b.traffic(wan)
	return Traffic{In: t.Out - packets.Out*header, Out: t.In - packets.In*header}, err
}

// LAN counts what node i has received and sent: the WAN's share, too.
func (b *Bed) LAN(i int) (Traffic, error) {
	t, _, err := b.traffic(b.Nodes[i].Name)
	return t, err
}

func (b *Bed) traffic(machine string) (bytes, packets Traffic, err error) {
	raw, err := testbed.Within(b.netns(machine), func() ([]byte, error) {
		return os.ReadFile("/proc/thread-self/net/dev")
	})
	if err != nil {
		return bytes, packets, err
	}
	for line := range strings.Lines(string(raw)) {
		name, rest, _ := strings.Cut(line, ":")
		f := strings.Fields(rest)
		if strings.TrimSpace(name) != "eth0" || len(f) < 10 {
			continue
		}
		for i, n := range map[int]*int64{0: &bytes.In, 1: &packets.In, 8: &bytes.Out, 9: &packets.Out} {
			v, perr := strconv.ParseInt(f[i], 10, 64)
			*n, err = v, errors.Join(err, perr)
		}
		return bytes, packets, err
	}
	return bytes, packets, fmt.Errorf("%s has no interface", machine)
}

// Listen opens a socket on a machine: "wan" for a registry of the caller's,
// which listens at Registry.
func (b *Bed) Listen(machine, address string) (net.Listener, error) {
	return testbed.Within(b.netns(machine), func() (net.Listener, error) { return net.Listen("tcp", address) })
}

// OnWAN calls f on a thread of the registry's machine: sockets that it opens
// are that machine's.
func (b *Bed) OnWAN(f func() error) error {
	_, err := testbed.Within(b.netns(wan), func() (struct{}, error) { return struct{}{}, f() })
	return err
}

func (b *Bed) dial(ctx context.Context, machine, address string) (net.Conn, error) {
	return testbed.Within(b.netns(machine), func() (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", address)
	})
}

// Dial connects from node i.
func (b *Bed) Dial(ctx context.Context, i int, address string) (net.Conn, error) {
	return b.dial(ctx, b.Nodes[i].Name, address)
}

// Command runs a program on a machine ("n1", "wan").
func (b *Bed) Command(ctx context.Context, machine, name string, args ...string) *exec.Cmd {
	return testbed.Enter(ctx, b.netns(machine), name, args...)
}

// StartRegistry runs a program on the registry's machine until it answers at
// Registry. A caller that serves from its own process uses OnWAN instead.
func (b *Bed) StartRegistry(ctx context.Context, name string, args ...string) (err error) {
	if b.registry == nil {
		if b.registry, err = b.group("registry"); err != nil {
			return err
		}
	}
	if err := b.registry.Start(b.Command(context.WithoutCancel(ctx), wan, name, args...)); err != nil {
		return err
	}
	return until(ctx, 20*time.Second, func() error {
		c, err := b.dial(ctx, wan, Registry)
		if err != nil {
			return err
		}
		return c.Close()
	})
}

// StopRegistry ends what StartRegistry has started.
func (b *Bed) StopRegistry() error { return b.registry.Kill() }

// LoseNode unplugs node i from the LAN, its brick with it. What it runs goes on.
func (b *Bed) LoseNode(i int) error { return b.plug(i, "down") }

// ReturnNode plugs it in again.
func (b *Bed) ReturnNode(i int) error { return b.plug(i, "up") }

func (b *Bed) plug(i int, state string) error {
	return testbed.Run(context.Background(), "ip", "-n", b.netns(lan), "link", "set", b.Nodes[i].Name, state)
}

// PartitionRedis loses all packets between node i and Redis, without a word to
// either. HealRedis ends that.
func (b *Bed) PartitionRedis(i int) error { return b.drop("-I", i) }

// HealRedis undoes PartitionRedis.
func (b *Bed) HealRedis(i int) error { return b.drop("-D", i) }

func (b *Bed) drop(action string, i int) error {
	var errs []error
	for _, rule := range [][]string{{"INPUT", "-s"}, {"OUTPUT", "-d"}} {
		out, err := b.Command(context.Background(), redis, "iptables", "-w", action, rule[0], rule[1],
			b.Nodes[i].Address, "-j", "DROP").CombinedOutput()
		if err != nil {
			errs = append(errs, fmt.Errorf("iptables: %w: %s", err, out))
		}
	}
	return errors.Join(errs...)
}
