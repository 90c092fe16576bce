package test

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"dewpoint/testkit"
	"dewpoint/testkit/containerdtest"
	"dewpoint/testkit/registrytest"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Kubernetes's way to containers, through containerd's CRI: an image with a
// pack starts lazily, and one without is pulled whole by dewd.
func TestCRI(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		version  containerdtest.Version
		transfer bool
		backend  string
	}{
		"1.6":          {containerdtest.V16, false, "loop"},
		"2.4":          {containerdtest.V24, false, "erofs"},
		"2.4 transfer": {containerdtest.V24, true, "tree"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, d := newClientBed(t, c.backend, anyPack, c.version, &containerdtest.CRI{Transfer: c.transfer})
			testCRI(t, b, dialCRI(t, d.Address))
		})
	}
}

func testCRI(t *testing.T, b *lazyBed, k *kubelet) {
	before := b.li.served(b.reg)
	pod := k.pod("lazy")
	id := k.container(pod, b.li.Ref, "serve", b.port)
	b.lazyThenWhole(before)
	k.remove(pod, id)

	// The same layers with another on top, which no pack knows.
	whole := b.reg.PushImage("whole:1",
		append(appLayers(t, 0), registrytest.Layer{Tar: registrytest.RandomTar(9, 3, 3_000_000)}), appOptions())
	top := whole.Layers[len(whole.Layers)-1]
	pod = k.pod("whole")
	b.port = freePort(t)
	id = k.container(pod, whole.Ref, "serve", b.port)
	b.serves()
	if got := get(t, "http://127.0.0.1:"+b.port+"/cat?/etc/motd"); got != "above\n" {
		t.Errorf("the image that was pulled whole reads %q", got)
	}
	if n := b.reg.Served(top.Digest); n != top.Size {
		t.Errorf("%d bytes of a layer of %d were fetched", n, top.Size)
	}
	// Pause and both images have two layers in common, and these one of their own.
	mounted, _ := filepath.Glob(filepath.Join(b.root, "snapshotter", "m", "*"))
	if len(mounted) != 2+2 {
		t.Errorf("layers are mounted at %v", mounted)
	}
	k.remove(pod, id)
	k.forget(b.li.Ref, whole.Ref)
	if left := gone(b.served); len(left) > 0 {
		t.Errorf("datafs still has %v", left)
	}
}

// kubelet speaks CRI to a containerd. Its methods fail the test on errors.
type kubelet struct {
	t       *testing.T
	images  cri.ImageServiceClient
	runtime cri.RuntimeServiceClient
	configs map[string]*cri.PodSandboxConfig // by the pod's id
}

func dialCRI(t *testing.T, socket string) *kubelet {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	k := &kubelet{t: t, images: cri.NewImageServiceClient(conn), runtime: cri.NewRuntimeServiceClient(conn),
		configs: map[string]*cri.PodSandboxConfig{}}
	k.try("a version", func(ctx context.Context) error { // CRI comes a moment after the socket
		_, err := k.runtime.Version(ctx, &cri.VersionRequest{}, grpc.WaitForReady(true))
		return err
	})
	return k
}

// try calls f with a bound on its time.
func (k *kubelet) try(what string, f func(context.Context) error) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Limit)
	defer cancel()
	if err := f(ctx); err != nil {
		k.t.Fatalf("%s: %v", what, err)
	}
}

// pod starts a pod on the host's network. It is removed at the latest when the
// test ends.
func (k *kubelet) pod(name string) string {
	k.t.Helper()
	c := &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: name, Uid: fmt.Sprintf("%s-%d", name, time.Now().UnixNano()),
			Namespace: "default"},
		Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Network: cri.NamespaceMode_NODE}}},
	}
	var id string
	k.try("run a pod", func(ctx context.Context) error {
		r, err := k.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: c})
		id = r.GetPodSandboxId()
		return err
	})
	k.configs[id] = c
	k.t.Cleanup(func() {
		k.runtime.RemovePodSandbox(context.Background(), &cri.RemovePodSandboxRequest{PodSandboxId: id})
	})
	return id
}

// container pulls an image and runs it in a pod.
func (k *kubelet) container(pod, ref string, args ...string) string {
	k.t.Helper()
	spec := &cri.ImageSpec{Image: ref}
	k.try("pull "+ref, func(ctx context.Context) error {
		_, err := k.images.PullImage(ctx, &cri.PullImageRequest{Image: spec, SandboxConfig: k.configs[pod]})
		return err
	})
	var id string
	k.try("create a container", func(ctx context.Context) error {
		r, err := k.runtime.CreateContainer(ctx,
			&cri.CreateContainerRequest{PodSandboxId: pod, SandboxConfig: k.configs[pod],
				Config: &cri.ContainerConfig{Metadata: &cri.ContainerMetadata{Name: "app"}, Image: spec, Args: args,
					Linux: &cri.LinuxContainerConfig{}}})
		id = r.GetContainerId()
		return err
	})
	k.try("start a container", func(ctx context.Context) error {
		_, err := k.runtime.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: id})
		return err
	})
	return id
}

// remove ends a container and its pod.
func (k *kubelet) remove(pod, container string) {
	k.t.Helper()
	k.try("remove", func(ctx context.Context) error {
		if _, err := k.runtime.StopContainer(ctx,
			&cri.StopContainerRequest{ContainerId: container, Timeout: 5}); err != nil {
			return err
		}
		if _, err := k.runtime.RemoveContainer(ctx,
			&cri.RemoveContainerRequest{ContainerId: container}); err != nil {
			return err
		}
		if _, err := k.runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod}); err != nil {
			return err
		}
		_, err := k.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod})
		return err
	})
}

// forget removes images.
func (k *kubelet) forget(refs ...string) {
	k.t.Helper()
	for _, ref := range refs {
		k.try("remove "+ref, func(ctx context.Context) error {
			_, err := k.images.RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: ref}})
			return err
		})
	}
}
