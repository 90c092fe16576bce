// Command ctrclient deploys containers through containerd's own client
// library, for "dewlab bench deploy". It is a program of its own because the
// library would more than double the processor time of every start of dew.
//
// It keeps one connection open. Each line of its standard input is an order,
// carried out at once beside those before it; each line of its standard output
// says that one is done. It ends with its input, and with an error only if it
// cannot connect.
//
//	ctrclient SOCKET SNAPSHOTTER
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"dewpoint/lab/bench/ctrclient/order"
)

func main() {
	if err := run(context.Background(), os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "ctrclient:", err)
		os.Exit(1)
	}
}

type deployer struct {
	client      *containerd.Client
	snapshotter string
	images      sync.Map // containerd.Image by reference: a deployer knows its images
}

func run(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	if len(args) != 2 {
		return errors.New("usage: ctrclient SOCKET SNAPSHOTTER")
	}
	client, err := containerd.New(args[0])
	if err != nil {
		return err
	}
	defer client.Close()
	d := &deployer{client: client, snapshotter: args[1]}
	ctx = namespaces.WithNamespace(ctx, "default") // ctr's own
	var mu sync.Mutex
	var all sync.WaitGroup
	defer all.Wait()
	answers := json.NewEncoder(out)
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var o order.Order
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return err
		}
		all.Go(func() {
			done := order.Done{ID: o.ID}
			if err := d.carryOut(ctx, o); err != nil {
				done.Error = err.Error()
			}
			mu.Lock()
			defer mu.Unlock()
			answers.Encode(done) // whoever does not read it any more has ended us
		})
	}
	return lines.Err()
}

func (d *deployer) carryOut(ctx context.Context, o order.Order) error {
	if o.Remove {
		return d.remove(ctx, o.Name)
	}
	return d.deploy(ctx, o)
}

// deploy is what "ctr run --detach --null-io" does with the library.
func (d *deployer) deploy(ctx context.Context, o order.Order) error {
	image, err := d.image(ctx, o.Image)
	if err != nil {
		return err
	}
	spec := []oci.SpecOpts{oci.WithDefaultSpec(), oci.WithDefaultUnixDevices, oci.WithImageConfig(image)}
	if len(o.Args) > 0 {
		spec = append(spec, oci.WithProcessArgs(o.Args...))
	}
	if o.HostNetwork {
		spec = append(spec, oci.WithHostNamespace(specs.NetworkNamespace), oci.WithHostHostsFile,
			oci.WithHostResolvconf)
	}
	c, err := d.client.NewContainer(ctx, o.Name, containerd.WithImage(image),
		containerd.WithImageConfigLabels(image),
		containerd.WithSnapshotter(d.snapshotter), containerd.WithNewSnapshot(o.Name, image),
		containerd.WithNewSpec(spec...))
	if err != nil {
		return err
	}
	task, err := c.NewTask(ctx, cio.NullIO)
	if err != nil {
		return err
	}
	return task.Start(ctx)
}

func (d *deployer) image(ctx context.Context, ref string) (containerd.Image, error) {
	if image, ok := d.images.Load(ref); ok {
		return image.(containerd.Image), nil
	}
	image, err := d.client.GetImage(ctx, ref)
	if err == nil {
		d.images.Store(ref, image)
	}
	return image, err
}

func (d *deployer) remove(ctx context.Context, name string) error {
	c, err := d.client.LoadContainer(ctx, name)
	if err != nil {
		return err
	}
	task, err := c.Task(ctx, nil)
	if err == nil {
		_, err = task.Delete(ctx, containerd.WithProcessKill)
	}
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return c.Delete(ctx, containerd.WithSnapshotCleanup)
}
