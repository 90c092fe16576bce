package containerdtest_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"dewpoint/testkit/containerdtest"
)

// nerdctl pulls by the transfer service where containerd has a new one; else
// it gives no labels.
func TestNerdctl(t *testing.T) {
	for _, v := range versions {
		for _, known := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/known=%v", v, known), func(t *testing.T) {
				n := newNode(t, v)
				if known {
					n.know()
				}
				n.nerdctlGreet()
				want := 3
				if v == containerdtest.V16 && !known {
					want = 0
				}
				n.wantKinds(want, 3-want)
				t.Logf("containerd has %d of 3 blobs after %d fetches and %d imports",
					n.blobs(), n.store.Calls("Fetch"), n.store.Calls("Import"))
				n.forget(n.image.Ref)
			})
		}
	}
}

func (n *node) nerdctlGreet() {
	n.t.Helper()
	name := fmt.Sprintf("snap-n-%d", os.Getpid())
	out := n.Nerdctl("run", "--rm", "--net", "none", "--name", name, n.image.Ref, "/cat", "/greeting")
	if !strings.Contains(out, "hello") {
		n.t.Errorf("the container says %q", out)
	}
}

// An image that was committed on the node runs from image layers below a
// directory.
func TestNerdctlCommit(t *testing.T) {
	n := newNode(t, containerdtest.V24)
	n.know()
	name := fmt.Sprintf("snap-c-%d", os.Getpid())
	n.Nerdctl("run", "-d", "--net", "none", "--name", name, n.image.Ref, "/cat", "/dev/stdin")
	out := n.Nerdctl("commit", name, "built:1")
	t.Log(out)
	n.Nerdctl("rm", "-f", name)
	n.greet("docker.io/library/built:1")
	n.forget("docker.io/library/built:1", n.image.Ref)
}
